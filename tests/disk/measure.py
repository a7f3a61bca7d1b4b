"""A disk in memory: fio by ringlet's reflective memory, and by nbdkit's own file plugin over TCP, by turns."""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile

from harness import Process, free_port, require, wait_until
from places import LIMIT, attached, served

SECONDS = 2
MB = 1 << 20
# Name, how, what of fio's result, unit; is less better?
JOBS = [
    ("4 KiB random reads, 1 at a time", ["--rw=randread", "--bs=4k", "--iodepth=1"], lambda job: job["read"]["clat_ns"]["mean"] / 1000, "us", True),
    ("4 KiB random reads, 16 at a time", ["--rw=randread", "--bs=4k", "--iodepth=16"], lambda job: job["read"]["iops"] / 1000, "k/s", False),
    ("128 KiB reads in order, 4 at a time", ["--rw=read", "--bs=128k", "--iodepth=4"], lambda job: job["read"]["bw_bytes"] / MB, "MB/s", False),
    ("128 KiB writes in order, 4 at a time", ["--rw=write", "--bs=128k", "--iodepth=4"], lambda job: job["write"]["bw_bytes"] / MB, "MB/s", False),
]


def fio(place, uri, how, wrap):
    words = ["fio", "--name=job", "--ioengine=nbd", f"--uri={uri}", "--size=256M", "--output-format=json"]
    words += ["--time_based", f"--runtime={SECONDS}", *how]
    done = subprocess.run(place.uses.argv(*wrap(words)), capture_output=True, text=True, timeout=LIMIT, cwd=place.directory)
    require(done.returncode == 0, f"fio: {done.stdout}{done.stderr}")
    return json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]


@contextlib.contextmanager
def over_tcp(place, path):
    address, port = (place.hosts[0].ip if place.name == "hosts" else "127.0.0.1"), free_port()
    process = Process(place.serves.argv("nbdkit", "-f", "-i", address, "-p", port, "file", path), str(place.directory))
    try:
        asks = place.uses.argv("nbdinfo", "--size", f"nbd://{address}:{port}")
        wait_until(lambda: subprocess.run(asks, capture_output=True, timeout=LIMIT).returncode == 0, LIMIT, f"nbdkit: {process.tail()}")
        yield f"nbd://{address}:{port}"
    finally:
        process.kill()


def measure(place, ringlet, rounds, direct):
    plain, wrapped = list, lambda words: [str(ringlet.command), "run", "--", *words]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as held:
        path = os.path.join(folder, "disk")
        with open(path, "wb") as file:
            for _ in range(256):
                file.write(os.urandom(MB))
        held.enter_context(served(place, "measured", path))
        ways = {
            "nbdkit over TCP": (held.enter_context(over_tcp(place, path)), plain),
            "ringlet": (held.enter_context(attached(place, "measured")).uri, plain),
            "ringlet, and fio under it": (held.enter_context(attached(place, "measured", wrap=wrapped)).uri, wrapped),
        }
        if direct:
            other = os.path.join(folder, "other")
            shutil.copy2(path, other)
            held.enter_context(served(place, "direct", other, "--direct", place.address))
            ways["ringlet --direct"] = (held.enter_context(attached(place, "direct")).uri, plain)
        for name, how, value, unit, less in JOBS:
            found = {way: [] for way in ways}
            for _ in range(rounds):
                for way, (uri, wrap) in ways.items():
                    found[way].append(value(fio(place, uri, how, wrap)))
            base = found["nbdkit over TCP"]
            print(f"{place.name}: {name}", flush=True)
            for way, values in found.items():
                ratios = sorted((one / other) if less else (other / one) for one, other in zip(base, values))
                times = f"{statistics.median(ratios):5.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"    {way:26} {statistics.median(values):9.1f} {unit:5} {times}", flush=True)
