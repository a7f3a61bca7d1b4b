"""How fast two containers of one host talk that the node service has introduced, beside the same programs over the kernel's veth, by turns.

    python3 tests/node/speed.py [--rounds N] [--ringlet PATH]

It makes network namespaces (as root), and measures with qperf. A figure is the median, with the least and the most.
"""

import argparse
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

from harness import Process, wait_until  # noqa: E402
from world import START_SECONDS, Service, inside, world  # noqa: E402

PORT = 19765
FIGURES = {"8 B, half a round trip (us)": (r"latency += +([0-9.,]+) ns", 1e-3), "stream (GB/s)": (r"bw += +([0-9.,]+) bytes", 1e-9)}


def listens(name):
    told = subprocess.run(inside(name, "ss", "-Hltn", f"sport = :{PORT}"), capture_output=True, text=True, timeout=START_SECONDS)
    return bool(told.stdout.strip())


def measure(wrapped, server, client, directory):
    program = Process(inside(server.name, *wrapped, "qperf", "-lp", str(PORT)), directory)
    try:
        wait_until(lambda: listens(server.name), START_SECONDS, "qperf to listen")
        argv = [*wrapped, "qperf", "-lp", str(PORT), server.ip, "-t", "1", "-uu", "tcp_lat", "tcp_bw"]
        told = subprocess.run(inside(client.name, *argv), capture_output=True, text=True, timeout=60, check=True).stdout
    finally:
        program.kill()
    return [float(re.search(pattern, told)[1].replace(",", "")) * scale for pattern, scale in FIGURES.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ringlet", default=str(HERE.parents[1] / "target/release/ringlet"))
    options = parser.parse_args()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if missing := [tool for tool in ("ip", "ss", "qperf") if shutil.which(tool) is None]:
        sys.exit(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        sys.exit("only root makes namespaces")
    ringlet = str(pathlib.Path(options.ringlet).resolve())
    found = {"kernel": [], "ringlet": []}
    with tempfile.TemporaryDirectory() as directory, Service(ringlet, directory) as service, world() as host:
        server, client = host.container(), host.container()
        for _ in range(options.rounds):
            for path, wrapped in ("kernel", []), ("ringlet", [ringlet, "run", "--"]):
                found[path].append(measure(wrapped, server, client, directory))
        # Two connections at least in each round: else the kernel was measured twice.
        met = service.status()["decisions"].get("met", 0)
        if met < 2 * options.rounds:
            sys.exit(f"only {met} connections have met in {options.rounds} rounds")
    for index, figure in enumerate(FIGURES):
        for path, rounds in found.items():
            values = [values[index] for values in rounds]
            print(f"{figure:28}  {path:7}  {statistics.median(values):8.3f}  ({min(values):.3f} to {max(values):.3f})")
        ratios = [ours[index] / kernels[index] for ours, kernels in zip(found["ringlet"], found["kernel"], strict=True)]
        ratios = [1 / ratio for ratio in ratios] if "us" in figure else ratios
        print(f"{'':28}  ratio    {statistics.median(ratios):8.1f}  ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
