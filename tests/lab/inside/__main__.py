"""The first process of a guest, behind `init`: makes it a machine where scenes can play, plays those that are asked for, and says how they ended.

    inside KERNEL RINGLET NAME SEED GROUP...
"""

import faulthandler
import os
import pathlib
import subprocess
import sys
import tty

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parents[1]
sys.path[1:1] = [str(TESTS), str(TESTS / "faults"), str(TESTS / "node")]

from harness import play, scenes_options, scenes_parser  # noqa: E402

LINE = "/dev/ttyS1"
HANGS_SECONDS = 300


def talk():
    """Standard input and output are the line to the host."""
    line = os.open(LINE, os.O_RDWR)
    tty.setraw(line)
    for number in 0, 1, 2:
        os.dup2(line, number)


def settle(kernel):
    """What a machine's start would have done."""
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    os.environ["HOME"] = "/tmp"
    # The modules are not where they would be installed; the kernel asks for some by itself.
    helper = pathlib.Path("/run/modprobe")
    helper.write_text(f'#!/bin/sh\nexec modprobe -d "{kernel}" "$@"\n')
    helper.chmod(0o755)
    pathlib.Path("/proc/sys/kernel/modprobe").write_text(str(helper))
    for kind, at in ("cgroup2", "/sys/fs/cgroup"), ("bpf", "/sys/fs/bpf"), ("tmpfs", "/dev/shm"), ("devpts", "/dev/pts"):
        pathlib.Path(at).mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", kind, kind, at], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main():
    kernel, ringlet, name, seed, *groups = sys.argv[1:]
    sys.argv[1:] = ["--ringlet", ringlet, "--seed", seed, *groups]
    options = scenes_options(scenes_parser(__doc__, groups), groups)
    options.kernel, options.name = pathlib.Path(kernel), name
    return play(name, options)


if __name__ == "__main__":
    talk()
    settle(sys.argv[1])
    child = os.fork()
    if child == 0:
        # What hangs says where.
        faulthandler.dump_traceback_later(HANGS_SECONDS, repeat=True)
        os._exit(main())
    # All that loses its parent is ours.
    while (ended := os.wait())[0] != child:
        pass
    print(f"lab: ended {os.waitstatus_to_exitcode(ended[1])}", flush=True)
    # (The end of the first process would be a panic: the host ends the machine.)
    while True:
        os.read(0, 1)
