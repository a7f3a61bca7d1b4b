"""Runs a command in a network namespace of its own that has only loopback, and ends whatever it leaves behind.

    python3 inside.py COMMAND...
"""

import ctypes
import fcntl
import os
import pathlib
import signal
import socket
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import adopt_orphans, end_orphans  # noqa: E402

CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def enter():
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        check(libc.unshare(CLONE_NEWNET), "unshare the network")
    else:
        check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET), "unshare the user and the network")
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        pathlib.Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def main():
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "prctl")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    enter()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.execvp(sys.argv[1], sys.argv[1:])
        except OSError as problem:
            print(f"{sys.argv[1]}: {problem}", file=sys.stderr)
            os._exit(127)
    try:
        while True:
            pid, status = os.wait()
            if pid == child:
                break
    finally:
        left = end_orphans()
    for one in left:
        print(f"left behind: {one}", file=sys.stderr)
    sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


if __name__ == "__main__":
    main()
