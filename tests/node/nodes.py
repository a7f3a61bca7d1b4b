"""Hosts of a cluster: network namespaces with a node service each, and rails between them."""

import contextlib
import os
import pathlib
import subprocess
import tempfile

from harness import Failed, command_of, descendants, require, wait_until
from world import NUMBERS, Service, inside, until, world

PORT = 7471
NAMES = "abc"
ALLOWED = """
[[allow]]
between = ["/ringlet-*-a", "b:/ringlet-*-b"]
[[allow]]
between = ["/ringlet-*-b", "a:/ringlet-*-a"]
"""
DISORDER = ", seed = {seed}, fails_one_in = 3000000"


class Host:
    """One node of a cluster."""

    def __init__(self, ground, world, name, place):
        self.name, self.command = name, str(pathlib.Path(ground.ringlet.command).resolve())
        self.container = world.container()
        self.ip = self.container.ip
        self.directory = pathlib.Path(place) / name
        self.directory.mkdir()
        self.identity = self.directory / "identity"
        self.service, self.subnets = None, []

    def enrol(self, *words, **more):
        done = subprocess.run([self.command, "node", "enrol", "--directory", self.identity, *words], capture_output=True, text=True, timeout=60, **more)
        require(done.returncode == 0, f"enrol {words}: {done.stderr}")
        return done.stdout

    def run(self, hosts, more="", group=None, listed=None, zone=None, join=None):
        addresses = {each.name: f"{each.ip}:{PORT}" for each in hosts} | (listed or {})
        nodes = ", ".join(f'{{name = "{each.name}", address = "{addresses[each.name]}", subnets = {each.subnets}}}' for each in hosts)
        joins = "" if join is None else f"join = {join}\n"
        policy = f'[cluster]\nnode = "{self.name}"\nlisten = "{self.ip}:{PORT}"\ndirectory = "{self.identity}"\nnodes = [{nodes}]\n{joins}{more}'
        before = ["nsenter", f"--net=/run/netns/{self.container.name}"]
        if zone:
            before += ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"', str(zone.resolver)]
        self.service = Service(self.command, self.directory, policy, before=before, more=["--cgroup", group] if group else [])
        self.service.start()
        require(self.service.runs(), f"{self.name} does not start: {self.service.told()}")

    def peers(self):
        return {each["node"]: each for each in self.service.status()["cluster"]["peers"]}

    def state(self, other):
        return self.peers().get(other, {}).get("state")

    def count(self, outcome):
        return self.service.status()["cluster"]["decisions"].get(outcome, 0)

    def before(self, enter=inside):
        """A program of this host's."""
        joins = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(self.group)]
        return [*joins, "env", f"RINGLET_NODE={self.service.socket}", *enter(self.container.name)]

    def lives(self):
        require(self.service.process.poll() is None, f"{self.name} has died: {self.service.told()}")


class Speaker:
    """A program of a scene's that says how far it is, a line at a time."""

    def __init__(self, argv, stdin=None):
        self.process = subprocess.Popen([str(word) for word in argv], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def hears(self, *expected):
        """Its next line."""
        line = self.process.stdout.readline().strip()
        if line not in expected:
            raise Failed(f"{line!r}, not {expected}: {self.told()}")
        return line

    def goes_on(self):
        """It has waited for this."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def told(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.communicate(timeout=1)[1]
        return "(it runs)"


def all_joined(hosts):
    for one in hosts:
        for other in hosts:
            if one is not other:
                until(lambda one=one, other=other: one.state(other.name) == "joined", f"{other.name} to be joined at {one.name}")


@contextlib.contextmanager
def cluster(ground, names=NAMES, run=True):
    """Hosts that are enrolled, and run."""
    with world() as ground_world, tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        hosts = [Host(ground, ground_world, name, place) for name in names]
        first, *others = hosts
        first.enrol("--new", first.name)
        for each in others:
            each.enrol("--join", "-", input=first.enrol("--issue", each.name))
        try:
            for each in hosts if run else ():
                each.run(hosts)
            yield hosts
        finally:
            for each in hosts:
                if each.service:
                    each.service.stop()
            # What carries ends by itself when its service has.
            carries = lambda pid: any(word in (command_of(pid) or "") for word in ("node fabric", "node reflect"))  # noqa: E731
            until(lambda: not any(map(carries, descendants(os.getpid()))), "what carries to end")


def unified():
    """Where the unified hierarchy of control groups is mounted."""
    mounts = [line.split() for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
    return next(pathlib.Path(mount[1]) for mount in mounts if mount[2] == "cgroup2")


@contextlib.contextmanager
def two_hosts(ground, rules, rails="rails = []", join=False):
    """Hosts a and b, with a control group for what runs on each, and these rails. (If they join each other: with a subnet that a's certificate has.)"""
    with cluster(ground, "ab", run=False) as hosts, contextlib.ExitStack() as held:
        a, b = hosts
        a.second = f"{a.ip.rsplit('.', 1)[0]}.200"
        a.subnets = [f"{a.second}/32"]
        for host in hosts:
            host.group = unified() / f"ringlet-{os.getpid()}-{next(NUMBERS)}-{host.name}"
            host.group.mkdir()
            # (Where a scene fails its programs may be there still.)
            held.callback(remove, host.group)
            own = rails(host) if callable(rails) else rails
            more = f"{own}\n{rules}"
            if join:
                if host is a:
                    a.enrol("--rotate", *(word for net in a.subnets for word in ("--subnet", net)))
                host.run([], more, host.group, join=[] if host is a else [f"{a.ip}:{PORT}"])
            else:
                host.run(hosts, more, host.group)
        all_joined(hosts)
        yield hosts


def remove(group):
    with contextlib.suppress(Failed):
        wait_until(lambda: is_removed(group), 2, "a control group to be empty")


def is_removed(group):
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextlib.contextmanager
def in_memory(seed=None):
    """Two rails in memory."""
    disorder = "" if seed is None else DISORDER.format(seed=seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for rail in "12":
            (pathlib.Path(folder) / rail).mkdir()
        rails = [f'{{provider = "memory", folder = "{folder}/{rail}"{disorder}}}' for rail in "12"]
        yield f"rails = [{', '.join(rails)}]"


@contextlib.contextmanager
def by_libfabric():
    yield lambda host: f'rails = [{{provider = "tcp;ofi_rxm", address = "{host.ip}"}}]'


def fabric(host):
    return host.service.status()["fabric"]


def carried(host):
    return fabric(host)["connections"]


def process(host):
    """The pid of the living one."""
    until(lambda: fabric(host)["pid"], "what carries")
    return fabric(host)["pid"]
