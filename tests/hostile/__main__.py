"""Peers that lie, strangers at the rendezvous, limits that are reached: no crash, no hang, no byte lost, nothing kept.

    python3 tests/hostile [--seed N] [--rounds N] [--ringlet PATH] [GROUP...]
"""

import argparse
import collections
import contextlib
import importlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import ROOT, Failed, Outcome, Ringlet, Test, adopt_orphans, end_orphans  # noqa: E402

GROUPS = "rendezvous pods segment datagrams limits leaks".split()


class Ground(Test):
    """Where subjects live; each scene ends with all of them put away."""

    def __init__(self, group, rounds, *rest):
        super().__init__(group, *rest)
        self.rounds = rounds

    @property
    def ringlet(self):
        return self._ringlet

    @contextlib.contextmanager
    def scene(self, name):
        try:
            with self.check(name):
                yield
        finally:
            self.close()
            if left := end_orphans():
                self._report(Outcome(self.program, self.mode, f"{name}: leaves no process", "failed", 0.0, str(left)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of everything that is random")
    parser.add_argument("--rounds", type=int, default=1, help="do what is random so many times as often")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    if unknown := set(arguments.groups) - set(GROUPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    counts = collections.Counter()

    def report(outcome):
        counts[outcome.result] += 1
        print(f"{outcome.result:8}{outcome.program:11}{outcome.seconds:6.1f} s  {outcome.check}", flush=True)
        if outcome.detail:
            print("    " + outcome.detail.replace("\n", "\n    "), flush=True)

    print(f"seed {arguments.seed}", flush=True)
    os.environ.pop("RINGLET_CONFIG", None)
    adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-hostile-"))
    directory.chmod(0o755)
    try:
        ringlet = Ringlet(arguments.ringlet, directory)
        for group in arguments.groups or GROUPS:
            place = directory / group
            place.mkdir()
            place.chmod(0o777)
            ground = Ground(group, arguments.rounds, "both", place, ringlet, arguments.seed, report)
            try:
                importlib.import_module(group).scenes(ground)
            finally:
                ground.close()
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
