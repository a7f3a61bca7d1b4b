"""Real programs in containers that Podman makes, over its bridge and over a published port: their connections meet by the node service.

    python3 tests/containers [--seed N] [--ringlet PATH] [GROUP...]

The image is made here, of this machine's own programs and their libraries. Network, mounts and all that Podman keeps are of namespaces and a
directory that end with the test. It needs root, Podman and runc; else it is skipped (exit status 77).
"""

import contextlib
import os
import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults"), str(HERE.parent / "node")]

import world  # noqa: E402
from harness import needs_root_and, play, scenes_options, scenes_parser, skip  # noqa: E402

GROUPS = "programs around ethernet".split()
TOOLS = "podman runc ip ping unshare iptables redis-server redis-benchmark nginx wrk".split()
INSIDE = "CONTAINERS_TEST_INSIDE"


def main():
    parser = scenes_parser(__doc__, GROUPS)
    options = scenes_options(parser, GROUPS)
    needs_root_and(TOOLS, "containers")
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    # (Not what this machine has at /run.)
    world.run("mount", "-t", "tmpfs", "run", "/run")
    world.run("ip", "link", "set", "lo", "up")
    if problem := world.missing(options.ringlet):
        skip(problem)
    try:
        status = play("containers", options)
    finally:
        # Podman leaves it behind. (With somebody else's containers below it, it stays.)
        groups = pathlib.Path("/sys/fs/cgroup")
        for group in [groups, *groups.iterdir()]:
            for name in "libpod_parent/conmon", "libpod_parent":
                with contextlib.suppress(OSError):
                    (group / name).rmdir()
    world.print_table()
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
