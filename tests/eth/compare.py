"""`ringlet eth` beside what else joins network namespaces without a kernel device between them: veth, vde2, slirp4netns and pasta; by turns.

    python3 tests/eth/compare.py [--rounds N] [--ringlet PATH] [WAY...]     (as root; ringlet is always one of the ways)

Of each: a stream of iperf3's TCP, and half a round trip of NetPIPE's 64 bytes. slirp4netns and pasta join a namespace to its host only, so there the
server is in a namespace that is theirs. `bridge` is a network with a bridge of the kernel's (`ringlet eth bridge`), `uplink` is from that to a TAP device. Ratios are of figures of one round: its median, with the least and the most.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

from ground import can  # noqa: E402
from harness import ROOT, free_port, require, skip, wait_until  # noqa: E402
from networks import LIMIT_SECONDS, Ground, within  # noqa: E402
from shutil import which  # noqa: E402

SECONDS = 2
NEEDED = {"iperf3": "iperf3", "NPtcp": "netpipe-tcp"}
WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


class Pair:
    """Two namespaces; in the first is who asks, and in the other the server, at `address`."""

    def __init__(self, ground):
        self.ground = ground
        self.asks, self.serves = ground.namespace(), ground.namespace()
        self.address = "10.7.0.2"

    def devices(self, name):
        for namespace, address in ((self.asks, "10.7.0.1"), (self.serves, self.address)):
            within(namespace, "ip", "address", "add", f"{address}/24", "dev", name)
            within(namespace, "ip", "link", "set", name, "up")

    def start(self, namespace, *words):
        return self.ground.start(["ip", "netns", "exec", namespace, *words])

    def await_way(self):
        """(pasta answers no ping of its gateway.)"""
        port = free_port()
        server = self.start(self.serves, "iperf3", "-s", "-p", port)
        ask = ["ip", "netns", "exec", self.asks, "iperf3", "-c", self.address, "-p", port, "-n", "1", "--connect-timeout", "1000"]
        wait_until(lambda: can(*map(str, ask)), LIMIT_SECONDS, f"the way to {self.address}")
        server.kill()


def await_ready(process):
    wait_until(lambda: "ready" in process.tail() or process.poll() is not None, LIMIT_SECONDS, "what is to be ready")
    require(process.poll() is None, process.tail())


@way
def ringlet(pair):
    """Two ports of a network."""
    network = pair.ground.network()
    for namespace in (pair.asks, pair.serves):
        await_ready(pair.start(namespace, pair.ground.command, "eth", "up", "vnet0", "--network", network))
    pair.devices("vnet0")


@way
def bridge(pair):
    """Two devices on a network's bridge."""
    network = pair.ground.network()
    pair.ground.bridge(network)
    for namespace in (pair.asks, pair.serves):
        await_ready(pair.start(namespace, pair.ground.command, "eth", "up", "vnet0", "--network", network))
    pair.devices("vnet0")


@way
def uplink(pair):
    """A device on a network's bridge, and a TAP device beside it."""
    network = pair.ground.network()
    pair.ground.bridge(network)
    for namespace, words in ((pair.asks, []), (pair.serves, ["--tap"])):
        await_ready(pair.start(namespace, pair.ground.command, "eth", "up", "vnet0", "--network", network, *words))
    pair.devices("vnet0")


@way
def veth(pair):
    """The kernel's own: the ceiling."""
    within(pair.asks, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v0", "netns", pair.serves)
    pair.devices("v0")


@way
def vde2(pair):
    """A switch, and a TAP device on it in each."""
    socket = f"{pair.ground.directory}/{pair.asks}"
    pair.start(pair.asks, "vde_switch", "-s", socket, "-nostdin")
    wait_until(lambda: os.path.exists(socket + "/ctl"), LIMIT_SECONDS, "a switch")
    for namespace in (pair.asks, pair.serves):
        pair.start(namespace, "vde_plug2tap", "-s", socket, "vnet0")
        wait_until(lambda namespace=namespace: can("ip", "-n", namespace, "link", "show", "vnet0"), LIMIT_SECONDS, "a device")
    pair.devices("vnet0")


def held(pair):
    """A process of the first namespace."""
    process = pair.start(pair.asks, "sleep", "1000")
    wait_until(lambda: os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"), LIMIT_SECONDS, "a process")
    return process.pid


@way
def slirp4netns(pair):
    """TCP of its own in user space, to its own loopback address."""
    pair.start(pair.serves, "slirp4netns", "--configure", "--mtu=65520", held(pair), "tap0")
    pair.address = "10.0.2.2"


@way
def pasta(pair):
    """TCP connections that are passed on, from socket to device."""
    # (It takes its settings from a device with a default route.)
    within(pair.serves, "ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1")
    within(pair.serves, "ip", "address", "add", "10.9.0.2/24", "dev", "d0")
    for device in ("d0", "d1"):
        within(pair.serves, "ip", "link", "set", device, "up")
    within(pair.serves, "ip", "route", "add", "default", "via", "10.9.0.1")
    pair.start(pair.serves, "pasta", "-f", "--config-net", "--runas", "0:0", "--netns-only", "--netns", f"/run/netns/{pair.asks}")
    # (Its gateway's address is its own loopback's.)
    pair.address = "10.9.0.1"


def stream(pair):
    """Gbit/s."""
    port = free_port()
    server = pair.start(pair.serves, "iperf3", "-s", "-1", "-p", port)
    wait_until(lambda: f":{port} " in within(pair.serves, "ss", "-tln"), LIMIT_SECONDS, "iperf3")
    said = json.loads(within(pair.asks, "iperf3", "-c", pair.address, "-p", port, "-t", SECONDS, "-J"))
    server.kill()
    return said["end"]["sum_received"]["bits_per_second"] / 1e9


def round_trip(pair):
    """Half of it, in microseconds."""
    server = pair.start(pair.serves, "NPtcp", "-l", 64, "-u", 64, "-p", 0, "-n", 5000)
    wait_until(lambda: ":5002 " in within(pair.serves, "ss", "-tln"), LIMIT_SECONDS, f"NPtcp: {server.tail()}")
    said = within(pair.asks, "sh", "-c", f"cd {pair.ground.directory} && NPtcp -h {pair.address} -l 64 -u 64 -p 0 -n 5000 2>&1")
    server.kill()
    found = re.search(r"in +([0-9.]+) usec", said)
    require(found, said)
    return float(found[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to measure")
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.geteuid() != 0:
        skip("only root makes namespaces and devices")
    if packages := sorted(package for what, package in NEEDED.items() if which(what) is None):
        skip(f"not installed (Debian packages): {', '.join(packages)}")
    programs = {"vde2": "vde_plug2tap", "slirp4netns": "slirp4netns", "pasta": "pasta"}
    ways = {}
    for name, make in WAYS.items():
        if options.ways and name not in (*options.ways, "ringlet"):
            continue
        if name in programs and which(programs[name]) is None:
            print(f"{name:12} is not installed")
        else:
            ways[name] = make
    with tempfile.TemporaryDirectory(prefix="ringlet-eth-") as directory, contextlib.ExitStack() as held_open:
        ground = Ground(options.ringlet, directory, held_open)
        pairs = {}
        for name, make in ways.items():
            pairs[name] = Pair(ground)
            make(pairs[name])
            pairs[name].await_way()
        for what, unit, measure, is_better in (("stream", "Gbit/s", stream, 1), ("half a round trip", "us", round_trip, -1)):
            found = {name: [] for name in pairs}
            for _ in range(options.rounds):
                for name, pair in pairs.items():
                    found[name].append(measure(pair))
            for name, values in found.items():
                ratios = sorted((one / other) ** is_better for one, other in zip(found["ringlet"], values, strict=True))
                times = f"ringlet is {statistics.median(ratios):6.2f} times as good ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"{what:18} {name:12} {statistics.median(values):9.2f} {unit:7} {times if name != 'ringlet' else ''}", flush=True)


main()
