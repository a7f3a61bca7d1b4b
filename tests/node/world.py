"""Network namespaces as container engines make them: a host with a bridge, and containers on it; a node service; and two ends of a stream."""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import subprocess
import tempfile

from ground import ANSWER_SECONDS, Ends, can, run
from harness import Failed, Process, Skipped, require, wait_until

NUMBERS = itertools.count()
START_SECONDS = 30
LACKS = ["CAP_BPF", "cgroup2"]
ROWS = []
CLONE_NEWNET = 0x40000000


def note(situation, outcome, reason=""):
    ROWS.append((situation, outcome, reason))


def print_table():
    if ROWS:
        width = max(len(row[0]) for row in ROWS)
        print("\n" + "situation".ljust(width) + "  ends    reason")
        for situation, outcome, reason in ROWS:
            print(f"{situation.ljust(width)}  {outcome:6}  {reason}".rstrip())


def missing(command):
    """Why no service can run here, if none can."""
    with tempfile.TemporaryDirectory() as place, Service(command, place) as service:
        if service.runs() or not any(lack in service.told() for lack in LACKS):
            return None
        return f"the node service does not run here: {service.told()}"


def effective(pid):
    """A process's capabilities."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


class Service:
    def __init__(self, command, directory, policy="", before=(), more=(), run=None):
        self.before, self.more = before, more
        self.command, self.directory = str(pathlib.Path(command).resolve()), pathlib.Path(directory)
        self.socket = (pathlib.Path(run) if run else self.directory / "run") / "node.sock"
        self.policy = self.directory / "node.toml"
        self.policy.write_text(policy)

    def __enter__(self):
        self.start()
        os.environ["RINGLET_NODE"] = str(self.socket)
        return self

    def __exit__(self, *_):
        os.environ.pop("RINGLET_NODE", None)
        self.stop()

    def start(self):
        where = ["--directory", self.socket.parent, "--labels", self.directory / "labels", "--policy", self.policy, *self.more]
        self.process = Process([*self.before, self.command, "node", "run", *map(str, where)], str(self.directory))
        wait_until(lambda: self.runs() or self.process.poll() is not None, START_SECONDS, "the service to be ready")

    def runs(self):
        return self.process.poll() is None and "ready" in self.process.tail()

    def told(self):
        return self.process.tail().strip()

    def stop(self):
        self.process.kill()

    def status(self):
        done = subprocess.run([self.command, "node", "status", "--json", "--socket", self.socket], capture_output=True, text=True, timeout=60)
        require(done.returncode == 0, f"ringlet node status: {done.stderr}")
        return json.loads(done.stdout)


class World:
    """A host of its own (a network namespace), with a bridge; `container` makes one on it."""

    def __init__(self, held):
        self._held = held
        self.net = f"10.{88 + os.getpid() % 60}.{next(NUMBERS) % 250}"
        self.six = f"fd00:{os.getpid() % 0xFFFF:x}:{next(NUMBERS):x}:"
        self.host = self.namespace()
        self.within(self.host, "ip", "link", "add", "bridge", "type", "bridge")
        self.address(self.host, "bridge", 1)
        self.within(self.host, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.route_localnet=1")
        self._containers = 0

    def namespace(self):
        name = f"ringlet-{os.getpid()}-{next(NUMBERS)}"
        run("ip", "netns", "add", name)
        self._held.callback(can, "ip", "netns", "del", name)
        self.within(name, "ip", "link", "set", "lo", "up")
        return name

    def within(self, name, *words):
        return run("ip", "netns", "exec", name, *map(str, words))

    def address(self, name, device, number):
        self.within(name, "ip", "address", "add", f"{self.net}.{number}/24", "dev", device)
        self.within(name, "ip", "-6", "address", "add", f"{self.six}:{number}/64", "dev", device, "nodad")
        self.within(name, "ip", "link", "set", device, "up")

    def container(self):
        """Its namespace and its address."""
        name = self.namespace()
        self._containers += 1
        number = self._containers + 1
        inside, outside = "eth0", f"veth{number}"
        run("ip", "link", "add", inside, "netns", name, "type", "veth", "peer", "name", outside, "netns", self.host)
        self.within(self.host, "ip", "link", "set", outside, "master", "bridge", "up")
        self.address(name, inside, number)
        self.within(name, "ip", "route", "add", "default", "via", f"{self.net}.1")
        # What comes back to who has sent it (a hairpin).
        self.within(self.host, "ip", "link", "set", outside, "type", "bridge_slave", "hairpin", "on")
        return Container(name, f"{self.net}.{number}", f"{self.six}:{number}")

    def routed(self):
        """One on a network of its own, to which the host passes on."""
        name, net = self.namespace(), f"{self.net.rsplit('.', 1)[0]}.{251 + next(NUMBERS) % 4}"
        run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", "routed", "netns", self.host)
        for where, device, number in (name, "eth0", 2), (self.host, "routed", 1):
            self.within(where, "ip", "address", "add", f"{net}.{number}/24", "dev", device)
            self.within(where, "ip", "link", "set", device, "up")
        self.within(name, "ip", "route", "add", "default", "via", f"{net}.1")
        return Container(name, f"{net}.2", None)

    def gate(self):
        return f"{self.net}.1"

    def rules(self, name, table, *chains):
        chains = [f"chain {chain} {{\n{text}\n}}" for chain, text in chains]
        text = "\n".join([f"table ip {table} {{", *chains, "}"])
        try:
            self.within(name, "nft", text)
        except Failed as problem:
            raise Skipped(f"this kernel or its nft has not all of: {text} ({problem})") from None

    def publish(self, port, container, to_port):
        """A port of the host's leads to a container, as an engine does it: rewritten both ways."""
        to = f"tcp dport {port} dnat to {container.ip}:{to_port}"
        chains = [
            ("incoming", f"type nat hook prerouting priority -100;\n{to}"),
            ("own", f"type nat hook output priority -100;\nfib daddr type local {to}"),
            ("out", f"type nat hook postrouting priority 100;\nip daddr {container.ip} masquerade"),
        ]
        self.rules(self.host, "publish", *chains)


class Container:
    def __init__(self, name, ip, six):
        self.name, self.ip, self.six = name, ip, six


@contextlib.contextmanager
def world():
    with contextlib.ExitStack() as held:
        yield World(held)


def enter(namespace):
    require(ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) == 0, f"setns: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def within(container):
    """This thread is in its network namespace, and what it starts meanwhile. (A socket keeps that in which it was made.)"""
    ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/run/netns/{container.name}", os.O_RDONLY)
    enter(theirs)
    try:
        yield
    finally:
        enter(ours)
        os.close(ours)
        os.close(theirs)


@contextlib.contextmanager
def own_group(command):
    """A control group, in which nothing is left of what a service keeps there; and what a program is started by that is to be in it."""
    mounts = (line.split() for line in pathlib.Path("/proc/self/mounts").read_text().splitlines())
    top = next(pathlib.Path(fields[1]) for fields in mounts if fields[2] == "cgroup2")
    group = top / f"ringlet-test-{os.getpid()}-{next(NUMBERS)}"
    group.mkdir()

    def is_removed():
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    try:
        yield group, ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        subprocess.run([command, "node", "forget", "--cgroup", group], capture_output=True)
        until(is_removed, "the control group to be empty")


def inside(name, *more):
    return ["ip", "netns", "exec", name, *more]


# A program that sees neither the processes nor the users nor the mounts of the host.
ALONE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "--mount-proc"]


class Across(Ends):
    """Two ends in two namespaces; the client dials where it is told to, which may be none of the server's own addresses."""

    dialled = 0

    def __init__(self, ground, server, client, listen_ip, dial=None, before_server=(), before_client=(), prepare=None):
        super()._listen(ground, listen_ip, inside(server, *before_server))
        ip, port = dial or (listen_ip, None)
        if prepare:
            prepare(self.port)
        self.dialled = port or self.port
        self.connect(ip, self.dialled, before=inside(client, *before_client))

    def rows(self):
        # (The client knows the server by the port that it has dialled, or by the same one.)
        ports = {self.port, self.dialled} - {0}
        return [row for port in ports for row in self._ground.ringlet.own_connections(port)]

    def meets(self, situation):
        """Both ends come to the ring, and stay byte-exact."""
        try:
            self.on_ring()
        except Failed:
            note(situation, "kernel", self.told())
            raise
        self.trade(3_000_000, 2_000_000)
        self.traded()
        require(not self.problem, f"{self.problem}")
        self.finish()
        note(situation, "met")

    def stays_apart(self, situation, reason):
        self.stays(reason)
        self.talk(400)
        require("ring" not in [row["path"] for row in self.rows()], f"on the ring: {self.told()}")
        self.finish()
        note(situation, "kernel", reason)


def until(look, what):
    return wait_until(look, ANSWER_SECONDS, what)
