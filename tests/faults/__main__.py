"""Faults from outside: addresses that go, rules and queues that drop, bytes that go past TCP, processes that are stopped, limits, clocks.
No byte is lost, nobody waits for ever, nothing stays behind.

    python3 tests/faults [--seed N] [--seconds N] [--whole-machine] [--ringlet PATH] [GROUP...]

It works in a network namespace of its own, and so needs to be root; else it is skipped (exit status 77).
"""

import argparse
import collections
import importlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "suites"))

import bpf  # noqa: E402
import inside  # noqa: E402
from ground import Ground  # noqa: E402
from harness import ROOT, Failed, Ringlet, adopt_orphans  # noqa: E402

GROUPS = "counts addresses packets limits streams programs".split()
TOOLS = "ip tc nft".split()
SKIPPED = 77


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of everything that is random")
    parser.add_argument("--seconds", type=float, default=60, help="how long what is random goes on")
    parser.add_argument("--whole-machine", action="store_true", help="switches that other programs feel, too; for a machine of its own")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    if unknown := set(arguments.groups) - set(GROUPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        print(f"skipped: {'not installed: ' + ', '.join(missing) if missing else 'only root makes faults'}")
        sys.exit(SKIPPED)
    counts = collections.Counter()

    def report(outcome):
        counts[outcome.result] += 1
        print(f"{outcome.result:8}{outcome.program:11}{outcome.seconds:6.1f} s  {outcome.check}", flush=True)
        if outcome.detail:
            print("    " + outcome.detail.replace("\n", "\n    "), flush=True)

    print(f"seed {arguments.seed}", flush=True)
    os.environ.pop("RINGLET_CONFIG", None)
    adopt_orphans()
    inside.enter()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-faults-"))
    directory.chmod(0o755)
    try:
        ringlet = Ringlet(arguments.ringlet, directory)
        for group in arguments.groups or GROUPS:
            place = directory / group
            place.mkdir()
            place.chmod(0o777)
            ground = Ground(group, "both", place, ringlet, arguments.seed, report)
            ground.limit_seconds, ground.whole_machine = arguments.seconds, arguments.whole_machine
            try:
                importlib.import_module(group).scenes(ground)
            finally:
                ground.close()
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        bpf.remove_groups()
        shutil.rmtree(directory, ignore_errors=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
