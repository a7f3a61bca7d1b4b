"""Takes rights and means away from itself, then becomes a program: confine.py JSON PROGRAM ARGUMENTS...

    nofile          RLIMIT_NOFILE
    address_space   RLIMIT_AS
    file_size       RLIMIT_FSIZE
    deny            [[name of a system call (see `CALLS`), name of the error that it fails with], ...]
    hide            directories under which nothing is to be found
    pid_namespace   true: a namespace of its own, whose first process the program is
    user            another user, and no group but one of the same number
    pod             a user: as this one, in a pid and a user namespace of its own, in which no other user is mapped
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
RET_ERRNO, RET_ALLOW = 0x00050000, 0x7FFF0000
LOAD, AND, JUMP_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
ARGUMENTS_OFFSET = 16  # struct seccomp_data: number, architecture, instruction pointer, arguments
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
PR_SET_DUMPABLE = 4
MS_REC, MS_PRIVATE = 0x4000, 1 << 18

# Name: number on x86-64 and on AArch64, and if not all uses of the call are meant: argument, mask, value.
CALLS = {
    "memfd_create": (319, 279),
    "eventfd2": (290, 19),
    "socket of AF_UNIX": (41, 198, 0, 0xFFFF, 1),
    "socket of AF_NETLINK": (41, 198, 0, 0xFFFF, 16),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "getsockopt of TCP_INFO": (55, 209, 2, 0xFFFF, 11),
    "getsockopt of SO_PEERCRED": (55, 209, 2, 0xFFFF, 17),
    "setsockopt of SO_PASSRIGHTS": (54, 208, 2, 0xFFFF, 83),
    "setsockopt of SO_ATTACH_FILTER": (54, 208, 2, 0xFFFF, 26),
    "recvmmsg": (299, 243),
    "epoll_pwait2": (441, 441),
    "fcntl of F_ADD_SEALS": (72, 25, 1, 0xFFFF, 1033),
    "fcntl of F_GET_SEALS": (72, 25, 1, 0xFFFF, 1034),
    "fcntl of F_DUPFD_CLOEXEC": (72, 25, 1, 0xFFFF, 1030),
    "mmap of MAP_SHARED": (9, 222, 3, 0x3, 1),
    "readlinkat": (267, 78),
    "getrandom": (318, 278),
    "madvise of MADV_WIPEONFORK": (28, 233, 2, 0xFFFF, 18),
    "madvise of MADV_POPULATE_WRITE": (28, 233, 2, 0xFFFF, 23),
    "ppoll": (271, 73),
    "sched_yield": (24, 124),
    "tkill": (200, 130),
}

libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def filter_program(denied):
    """A seccomp filter in classic BPF: for each denied call, past its return unless everything is as said."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    program = []
    for name, error in denied:
        entry = CALLS[name]
        answer = (RETURN, 0, 0, RET_ERRNO | getattr(errno, error))
        tests = []
        if entry[2:]:
            argument, mask, value = entry[2:]
            tests = [(LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * argument), (AND, 0, 0, mask), (JUMP_EQUAL, 0, 1, value)]
        program += [(LOAD, 0, 0, 0), (JUMP_EQUAL, 0, len(tests) + 1, entry[machine]), *tests, answer]
    program.append((RETURN, 0, 0, RET_ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program), len(program)


def deny(denied):
    instructions, count = filter_program(denied)
    buffer = ctypes.create_string_buffer(instructions)
    program = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def hide(directories):
    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    for directory in directories:
        check(libc.mount(b"none", directory.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=0"))


def enter_pid_namespace():
    """The rest runs in a child, whose end is ours."""
    check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS))
    child = os.fork()
    if child:
        _pid, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    check(libc.mount(b"none", b"/proc", b"proc", ctypes.c_ulong(0), None))


def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def enter_pod(user):
    become(user)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or these files were root's
    check(libc.unshare(CLONE_NEWUSER))
    for file, text in ("uid_map", f"1000 {user} 1"), ("setgroups", "deny"), ("gid_map", f"1000 {user} 1"):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    enter_pid_namespace()


def main():
    limits, program = json.loads(sys.argv[1]), sys.argv[2:]
    if limits.get("pid_namespace"):
        enter_pid_namespace()
    if "user" in limits:
        become(limits["user"])
    if "pod" in limits:
        enter_pod(limits["pod"])
    if "hide" in limits:
        hide(limits["hide"])
    if "nofile" in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits["nofile"],) * 2)
    if "address_space" in limits:
        resource.setrlimit(resource.RLIMIT_AS, (limits["address_space"],) * 2)
    if "file_size" in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_size"],) * 2)
    if "deny" in limits:
        deny(limits["deny"])
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
