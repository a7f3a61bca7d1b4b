"""The node service: processes in network namespaces of their own are introduced where they are the two ends of one connection, and nobody else is.

    python3 tests/node [--seed N] [--ringlet PATH] [GROUP...]

It makes network namespaces, and so needs to be root; else it is skipped (exit status 77). What it says at the end is a table: situation, whether
the ends met, and the reason if they did not.
"""

import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

import world  # noqa: E402
from harness import needs_root_and, play, scenes_options, scenes_parser, skip  # noqa: E402

GROUPS = "service deploy doctor ways strangers hostile lives lease carried cluster far natives messages reflect".split()
TOOLS = "ip nft nsenter openssl setpriv unshare".split()


def main():
    parser = scenes_parser(__doc__, GROUPS)
    options = scenes_options(parser, GROUPS)
    needs_root_and(TOOLS, "namespaces")
    if problem := world.missing(options.ringlet):
        skip(problem)
    status = play("node", options)
    world.print_table()
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
