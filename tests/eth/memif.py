"""Frames from port to port, of programs that have a core each: by ringlet's native ports, and by memif, whose ends DPDK's testpmd is; by turns.

    python3 tests/eth/memif.py [--rounds N] [--ringlet PATH]

Without testpmd (`tests/setup memif`) it says so, and its exit status is 77.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent)]

from harness import ROOT, Failed, Process, adopt_orphans, require, skip, wait_until  # noqa: E402

TESTPMD = "dpdk-testpmd"
SIZES = (64, 1500)
# Of each measurement of memif; and against hanging only.
SECONDS = 3
LIMIT_SECONDS = 120


def end(directory, role, cpu, *words):
    """One end of memif: a process with its main thread and one that forwards, both on one processor, and no huge pages."""
    device = f"net_memif0,role={role},socket={directory}/memif.sock,socket-abstract=no"
    cores = ["--lcores", f"(0-1)@{cpu}", "--no-huge", "-m", "256", "--no-pci", "--no-telemetry", "--file-prefix", f"memif-{os.getpid()}-{role}"]
    argv = [TESTPMD, *cores, "--vdev", device, "--", "--no-mlockall", "--nb-cores=1", "--total-num-mbufs=8192", "--stats-period=1", *words]
    return Process(argv, str(directory))


def memif(size, cpus):
    """Frames a second that the receiver's end counts."""
    with tempfile.TemporaryDirectory(prefix="ringlet-memif-") as directory, contextlib.ExitStack() as held:
        sink = end(directory, "server", cpus[1], "--forward-mode=rxonly")
        held.callback(sink.kill)
        wait_until(lambda: pathlib.Path(directory, "memif.sock").exists() or sink.poll() is not None, LIMIT_SECONDS, "testpmd to listen")
        source = end(directory, "client", cpus[0], "--forward-mode=txonly", f"--txpkts={size}")
        held.callback(source.kill)

        def counted():
            return [int(count) for count in re.findall(r"RX-packets: (\d+)", sink.tail())]

        wait_until(lambda: any(counted()) or None not in (sink.poll(), source.poll()), LIMIT_SECONDS, "frames")
        require(sink.poll() is None and source.poll() is None, f"testpmd has ended: {sink.tail()}\n{source.tail()}")
        time.sleep(SECONDS + 1)
        rates = [int(rate) for rate in re.findall(r"Rx-pps: +(\d+)", sink.tail())]
        require(len(rates) > 1 and rates[-1], f"no rates: {sink.tail()}")
        for process in (source, sink):
            process.stop(signal.SIGINT)
        return statistics.median(rates[1:][-SECONDS:])


def ports(ringlet, directory):
    """By `ringlet bench`: frames a second, by size."""
    told = directory / "bench.json"
    argv = [ringlet, "bench", "--only", "ethernet", "--rounds", "1", "--json", told]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=LIMIT_SECONDS)
    require(done.returncode == 0, f"{done.stdout}{done.stderr}")
    rows = json.loads(told.read_text())["rows"]
    found = {row["what"]: row["median"] for row in rows if row["case"] == "ports"}
    return {size: found[f"{size} B frames, polling"] for size in SIZES}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet")
    options = parser.parse_args()
    if shutil.which(TESTPMD) is None:
        skip(f"{TESTPMD} is not installed (Debian's package dpdk-dev): there is nothing to compare with")
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        skip("it takes two processors")
    adopt_orphans()
    found = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory(prefix="ringlet-memif-") as directory:
        for _ in range(options.rounds):
            ours = ports(options.ringlet, pathlib.Path(directory))
            for size in SIZES:
                found[size].append((ours[size], memif(size, cpus)))
    for size, pairs in found.items():
        ours, theirs = (statistics.median(each) / 1e6 for each in zip(*pairs, strict=True))
        ratios = sorted(our / their for our, their in pairs)
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{size:5} B: ports {ours:6.2f} M/s, memif {theirs:6.2f} M/s, ratio {ratio}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        main()
    except (Failed, subprocess.SubprocessError) as problem:
        sys.exit(str(problem))
