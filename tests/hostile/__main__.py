"""Peers that lie, strangers at the rendezvous, limits that are reached: no crash, no hang, no byte lost, nothing kept.

    python3 tests/hostile [--seed N] [--rounds N] [--ringlet PATH] [GROUP...]
"""

import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import play, scenes_options, scenes_parser  # noqa: E402

GROUPS = "rendezvous pods bells segment datagrams limits leaks".split()


def main():
    parser = scenes_parser(__doc__, GROUPS)
    parser.add_argument("--rounds", type=int, default=1, help="do what is random so many times as often")
    sys.exit(play("hostile", scenes_options(parser, GROUPS)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
