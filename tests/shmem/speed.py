"""What OpenSHMEM costs by ringlet and by another library, by turns: medians, and the range of the ratio of the two runs of one round.

    python3 tests/shmem/speed.py --ours PREFIX [--theirs oshcc,oshrun] [--rounds 9]

PREFIX is where ringlet is installed (`make install PREFIX=...`). Of the other one its compiler and its launcher are named; Open MPI's (Debian's
openmpi-bin, libopenmpi-dev) are taken by default. What it says at its end is not looked at: Open MPI 4.1's fails in shmem_finalize now and then.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

LIMIT = 240


def measure(argv):
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, env=environment)
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2]
    if len(rows) < 9:
        raise SystemExit(f"{argv} says\n{done.stdout}{done.stderr}")
    return {name: (unit, float(value)) for name, unit, value in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--theirs", default="/usr/bin/oshcc,/usr/bin/oshrun")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    compiler, launcher = options.theirs.split(",")
    source = Path(__file__).resolve().parent / "speed.c"
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([options.ours / "bin/oshcc", "-O2", source, "-o", f"{directory}/ours"], check=True)
        subprocess.run([compiler, "-O2", source, "-o", f"{directory}/theirs"], check=True)
        rounds = []
        for _ in range(options.rounds):
            ours = measure([options.ours / "bin/oshrun", "-np", "2", f"{directory}/ours"])
            rounds.append((ours, measure([launcher, "-np", "2", f"{directory}/theirs"])))
    print("| what | ringlet | the other | ratio (range) |\n| --- | --- | --- | --- |")
    for name, (unit, _) in rounds[0][0].items():
        values = [(ours[name][1], theirs[name][1]) for ours, theirs in rounds]
        ratios = sorted(theirs / ours if unit == "ns" else ours / theirs for ours, theirs in values)
        ours, theirs = (statistics.median(each) for each in zip(*values))
        print(f"| {name} | {ours:.3g} {unit} | {theirs:.3g} {unit} | {statistics.median(ratios):.2g} ({ratios[0]:.2g} to {ratios[-1]:.2g}) |")


main()
