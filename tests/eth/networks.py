"""Networks of `ringlet eth` and the network namespaces on them."""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

from ground import can, run  # noqa: E402
from harness import Process, require, wait_until  # noqa: E402

# Bounds, which only a fault meets.
LIMIT_SECONDS = 60
NUMBERS = itertools.count()


class Ground:
    """A place for networks of its own, as one machine has it; what is made goes at the end."""

    def __init__(self, command, directory, held, name="networks"):
        self.command, self.directory, self._held = str(pathlib.Path(command).resolve()), str(directory), held
        self.networks = str(pathlib.Path(directory) / name)
        self.has_bridges = False

    def another(self, name):
        """Another machine's."""
        return Ground(self.command, self.directory, self._held, name)

    def holds(self, context):
        return self._held.enter_context(context)

    def eth(self, *words, within=None):
        """What `ringlet eth` says, and its exit status."""
        before = ["ip", "netns", "exec", within] if within else []
        environment = {**os.environ, "RINGLET_ETHERNET": self.networks}
        argv = [*before, self.command, "eth", *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=environment)
        return done.returncode, done.stdout + done.stderr

    def must(self, *words, within=None):
        status, said = self.eth(*words, within=within)
        require(status == 0, f"ringlet eth {words}: {status}, {said}")
        return said

    def network(self, *words):
        name = f"net{next(NUMBERS)}"
        self.must("create", name, *words)
        if self.has_bridges:
            self.bridge(name)
        return name

    def bridge(self, network, *before):
        bridge = self.start([*before, self.command, "eth", "bridge", network])
        wait_until(lambda: "ready" in bridge.tail() or bridge.poll() is not None, LIMIT_SECONDS, "a bridge")
        require(bridge.poll() is None, bridge.tail())
        return bridge

    def namespace(self):
        name = f"ringlet-eth-{os.getpid()}-{next(NUMBERS)}"
        run("ip", "netns", "add", name)
        self._held.callback(can, "ip", "netns", "del", name)
        within(name, "ip", "link", "set", "lo", "up")
        return name

    def start(self, argv):
        process = Process(list(map(str, argv)), self.directory, env={"RINGLET_ETHERNET": self.networks})
        self._held.callback(process.kill)
        return process

    def host(self, network, number, *words, namespace=None):
        """A namespace with a device on the network, and addresses by its number."""
        host = Host(self, namespace or self.namespace(), network, number, words)
        host.up()
        return host

    def hosts(self, count, *words, options=()):
        network = self.network(*words)
        hosts = [self.host(network, number, *options) for number in range(1, count + 1)]
        for host in hosts:
            wait_until(lambda host=host: host.others() == count - 1, LIMIT_SECONDS, f"{count - 1} others: {host.state()}")
        return hosts


class Host:
    def __init__(self, ground, namespace, network, number, words, device="vnet0"):
        self.ground, self.namespace, self.network, self.words, self.device = ground, namespace, network, words, device
        self.before = []
        self.mac = f"02:00:00:00:00:{number:02x}"
        self.ip, self.six = f"10.7.0.{number}", f"fd07::{number}"

    def numbered(self, number):
        self.number = number
        return self

    def up(self):
        self.start_port()
        self.await_port()
        return self

    def start_port(self):
        words = ["up", self.device, "--network", self.network, "--mac", self.mac, *self.words]
        self.port = self.ground.start(["ip", "netns", "exec", self.namespace, *self.before, self.ground.command, "eth", *words])

    def await_port(self):
        wait_until(lambda: "ready" in self.port.tail() or self.port.poll() is not None, LIMIT_SECONDS, "a port to be ready")
        require(self.port.poll() is None, f"the port ended: {self.port.tail()}")
        self.number = self.state()["about"]["id"]
        self.address(self.device)

    def address(self, device):
        self.run("ip", "address", "add", f"{self.ip}/24", "dev", device)
        self.run("ip", "-6", "address", "add", f"{self.six}/64", "dev", device, "nodad")

    def run(self, *words):
        return within(self.namespace, *words)

    def start(self, *words):
        return self.ground.start(["ip", "netns", "exec", self.namespace, *words])

    def state(self):
        (state,) = json.loads(self.ground.must("stats", self.device, "--json", within=self.namespace))
        return state

    def others(self):
        state = self.state()
        return state.get("bridged", len(state["peers"]))

    def dropped(self, why):
        return self.state()["totals"]["dropped"][why]

    def has_carrier(self):
        return "NO-CARRIER" not in self.run("ip", "link", "show", self.device)

    def await_carrier(self, there):
        wait_until(lambda: self.has_carrier() == there, LIMIT_SECONDS, f"the carrier to be {there}: {self.run('ip', 'link', 'show', self.device)}")

    def ping(self, to, *words):
        """The first three are answered once each, or it fails. (With -w it waits for them; it sends more meanwhile. Without, it waits but two
        times as long as an answer took.)"""
        said = self.run("ping", "-n", "-c", "3", "-i", "0.01", "-w", "30", *map(str, words), to)
        require(all(said.count(f"icmp_seq={number} ") == 1 for number in (1, 2, 3)) and "DUP" not in said, said)


def within(name, *words):
    return run("ip", "netns", "exec", name, *map(str, words))


@contextlib.contextmanager
def ground(command, directory):
    with contextlib.ExitStack() as held:
        place = Ground(command, directory, held)
        os.environ["RINGLET_ETHERNET"] = place.networks
        yield place
