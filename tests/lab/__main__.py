"""A lab: guests of QEMU with Debian's kernel, which has what this machine's lacks: soft-RoCE, hosts that are switched off.

    python3 tests/lab [--seed N] [--ringlet PATH] [--run COMMAND] [GROUP...]

A guest sees this machine's files, to be read only, and what it writes is in its memory. It needs root and `tests/setup lab`; else it is skipped
(exit status 77). It fetches Debian's package of the kernel, which is not installed, and keeps it beside the command.
"""

import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent)]

from harness import Failed, Ground, needs_root_and, play, scenes_options, scenes_parser, skip  # noqa: E402

import built  # noqa: E402
from kernel import Kernel  # noqa: E402

GROUPS = "rails hosts two verbs vhost ethernet".split()
# They need no more than the command.
UNBUILT = {"vhost", "ethernet", "shell"}
TOOLS = "qemu-system-x86_64 busybox kmod cpio apt-get dpkg-deb ip rdma nft python3 redis-server redis-benchmark NPtcp iperf3 tipc".split()


def main():
    parser = scenes_parser(__doc__, GROUPS)
    parser.add_argument("--run", metavar="COMMAND", help="no scenes: a line for the shell in a guest that has soft-RoCE")
    options = scenes_options(parser, GROUPS)
    if options.run:
        options.groups = ["shell"]
    needs_root_and(TOOLS, "a lab")
    if not list(pathlib.Path("/usr/lib").glob("*/libibverbs/librxe-*.so")):
        skip("not installed: ibverbs-providers")
    kept = pathlib.Path(options.ringlet).resolve().parents[1] / "lab"
    kept.mkdir(exist_ok=True)
    try:
        if set(options.groups) - UNBUILT:
            built.programs(kept)
        options.kernel = Kernel(kept)
    except Failed as problem:
        sys.exit(str(problem))
    sys.exit(play("lab", options, Ground))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
