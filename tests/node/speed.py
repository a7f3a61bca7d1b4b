"""How fast two containers of one host talk that the node service has introduced, beside the same programs over the kernel's veth, by turns; what a
connection costs that is too short to be moved, with and without a service; and how long it takes until one is moved.

    python3 tests/node/speed.py [--hosts | --isolated] [--rounds N] [--ringlet PATH]

With --hosts: redis-benchmark and redis on two hosts, whose services carry their connections over rails in memory. With --isolated: in two containers of one
host that may not share memory, and are carried.

It makes network namespaces (as root), and measures with qperf and with ends of its own. A figure is the median, with the least and the most.
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

from carried import ISOLATED  # noqa: E402
from harness import Process, wait_until  # noqa: E402
from nodes import ALLOWED, fabric, in_memory, two_hosts  # noqa: E402
from world import START_SECONDS, Service, inside, world  # noqa: E402

PORT = 19765
FIGURES = {"8 B, half a round trip (us)": (r"latency += +([0-9.,]+) ns", 1e-3), "stream (GB/s)": (r"bw += +([0-9.,]+) bytes", 1e-9)}


SHORT = 500  # connections; each leaves a port that is not free for a minute
TRIPS = 3000  # of one that is to be moved


def serve():
    listener = socket.create_server(("", PORT), backlog=512)
    while True:
        end, _ = listener.accept()
        with end:
            while byte := end.recv(1):
                end.send(byte)


def visit(address):
    """The cost of a short connection; after how long a busy one is moved, by how fast its round trips are."""
    began = time.perf_counter()
    for _ in range(SHORT):
        with socket.create_connection((address, PORT)) as end:
            end.send(b"?")
            end.recv(1)
    short = (time.perf_counter() - began) / SHORT
    with socket.create_connection((address, PORT)) as end:
        times = [time.perf_counter()]
        for _ in range(TRIPS):
            end.send(b"?")
            end.recv(1)
            times.append(time.perf_counter())
    trips = [after - before for before, after in zip(times, times[1:], strict=False)]
    fast = statistics.median(trips[-TRIPS // 10 :])
    # One that never got faster has the whole time.
    moved = next((n for n in range(TRIPS - 10) if statistics.median(trips[n : n + 10]) < 2 * fast), TRIPS)
    print(short * 1e6, (times[moved] - times[0]) * 1e3, moved)


def measure_connections(wrapped, server, client, directory):
    itself = [sys.executable, str(pathlib.Path(__file__).resolve())]
    program = Process(inside(server.name, *wrapped, *itself, "--serve"), directory)
    try:
        wait_until(lambda: listens(server.name), START_SECONDS, "the server to listen")
        argv = [*wrapped, *itself, "--visit", server.ip]
        told = subprocess.run(inside(client.name, *argv), stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    finally:
        program.kill()
        wait_until(lambda: not listens(server.name), START_SECONDS, "the port to be free")
    return [float(word) for word in told.split()]


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


@contextlib.contextmanager
def on_two_hosts(ringlet):
    ground = types.SimpleNamespace(ringlet=types.SimpleNamespace(command=ringlet))
    with in_memory() as rails, two_hosts(ground, ALLOWED, rails) as (a, b):
        wait_until(lambda: all(fabric(host)["nodes"] == 1 for host in (a, b)), START_SECONDS, "rails that carry")
        yield a.before(), b.before(), b.ip, lambda: b.service.status()["decisions"].get("carried-far", 0)


@contextlib.contextmanager
def isolated(ringlet):
    with tempfile.TemporaryDirectory() as directory, Service(ringlet, directory, ISOLATED) as service, world() as host:
        client, server = host.container(), host.container()
        yield inside(client.name), inside(server.name), server.ip, lambda: service.status()["decisions"].get("carried", 0)


def redis(place, ringlet, rounds):
    found = {(clients, path): [] for clients in (1, 8) for path in ("kernel", "ringlet")}
    with place(ringlet) as (client, server, ip, count):
        paths = {"kernel": ("6380", []), "ringlet": ("6379", [ringlet, "run", "--"])}
        words = ["--save", "", "--appendonly", "no", "--bind", ip, "--protected-mode", "no"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        servers = [subprocess.Popen([*server, *run, "redis-server", "--port", port, *words], **silent) for port, run in paths.values()]
        try:
            time.sleep(1)
            for clients, path in [key for _ in range(rounds) for key in found]:
                port, run = paths[path]
                argv = [*client, *run, "redis-benchmark", "-h", ip, "-p", port, "-c", str(clients), "-n", "20000", "-t", "get", "--csv"]
                told = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
                found[clients, path].append(float(re.search('"GET","([0-9.]+)"', told)[1]) / 1000)
            carried = count()
        finally:
            for each in servers:
                each.kill()
                each.wait()
    if carried < 9 * rounds:
        sys.exit(f"only {carried} connections were carried in {rounds} rounds")
    for (clients, path), values in found.items():
        print(f"GET, {clients} clients (1000/s)  {path:7}  {statistics.median(values):8.1f}  ({min(values):.1f} to {max(values):.1f})")
    for clients in 1, 8:
        ratios = [ours / kernels for ours, kernels in zip(found[clients, "ringlet"], found[clients, "kernel"], strict=True)]
        print(f"GET, {clients} clients           ratio    {statistics.median(ratios):8.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ringlet", default=str(HERE.parents[1] / "target/release/ringlet"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--visit", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", action="store_true", help="redis on two hosts")
    parser.add_argument("--isolated", action="store_true", help="redis in two containers that are carried")
    options = parser.parse_args()
    if options.serve:
        return serve()
    if options.visit:
        return visit(options.visit)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if missing := [tool for tool in ("ip", "ss", "qperf") if shutil.which(tool) is None]:
        sys.exit(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        sys.exit("only root makes namespaces")
    ringlet = str(pathlib.Path(options.ringlet).resolve())
    if options.hosts or options.isolated:
        return redis(on_two_hosts if options.hosts else isolated, ringlet, options.rounds)
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
        found_short = {"kernel": [], "no service": [], "service": []}
        with_service = os.environ["RINGLET_NODE"]
        for _ in range(options.rounds):
            for path, wrapped in ("kernel", []), ("no service", [ringlet, "run", "--"]), ("service", [ringlet, "run", "--"]):
                os.environ["RINGLET_NODE"] = with_service if path == "service" else str(pathlib.Path(directory) / "nobody")
                found_short[path].append(measure_connections(wrapped, server, client, directory))
    for index, figure in enumerate(FIGURES):
        for path, rounds in found.items():
            values = [values[index] for values in rounds]
            print(f"{figure:28}  {path:7}  {statistics.median(values):8.3f}  ({min(values):.3f} to {max(values):.3f})")
        ratios = [ours[index] / kernels[index] for ours, kernels in zip(found["ringlet"], found["kernel"], strict=True)]
        ratios = [1 / ratio for ratio in ratios] if "us" in figure else ratios
        print(f"{'':28}  ratio    {statistics.median(ratios):8.1f}  ({min(ratios):.1f} to {max(ratios):.1f})")
    shorts = {path: [values[0] for values in rounds] for path, rounds in found_short.items()}
    for path, values in shorts.items():
        print(f"{'a short connection (us)':28}  {path:10}  {statistics.median(values):8.1f}  ({min(values):.1f} to {max(values):.1f})")
    ratios = [without / beside for without, beside in zip(shorts["no service"], shorts["service"], strict=True)]
    print(f"{'':28}  service:no service  {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")
    for name, nth in ("first byte to moved (ms)", 1), ("the same in round trips", 2):
        values = [values[nth] for values in found_short["service"]]
        print(f"{name:28}  service     {statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
