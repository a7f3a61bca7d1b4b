"""Faults from outside: addresses that go, rules and queues that drop, bytes that go past TCP, processes that are stopped, limits, clocks.
No byte is lost, nobody waits for ever, nothing stays behind.

    python3 tests/faults [--seed N] [--seconds N] [--whole-machine] [--ringlet PATH] [GROUP...]

It works in a network namespace of its own, and so needs to be root; else it is skipped (exit status 77).
"""

import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "suites"))

import bpf  # noqa: E402
import inside  # noqa: E402
from harness import needs_root_and, play, scenes_options, scenes_parser  # noqa: E402

GROUPS = "counts addresses datagrams packets limits streams programs".split()
TOOLS = "ip tc nft".split()


def main():
    parser = scenes_parser(__doc__, GROUPS)
    parser.add_argument("--seconds", type=float, default=60, help="how long what is random goes on")
    parser.add_argument("--whole-machine", action="store_true", help="switches that other programs feel, too; for a machine of its own")
    options = scenes_options(parser, GROUPS)
    needs_root_and(TOOLS, "faults")
    inside.enter()
    try:
        sys.exit(play("faults", options))
    finally:
        bpf.remove_groups()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
