"""Hosts (network namespaces) with a node service each, which know each other; and who is none of them."""

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import ssl
import struct
import subprocess
import tempfile

from harness import require
from service import require_confined
from world import Service, inside, note, until, world

PORT = 7471
CLONE_NEWNET = 0x40000000
NAMES = "abc"
# The service says: silent for 5 s. The rest is for a machine that has other work.
SOON = 60


class Host:
    """One node of a cluster."""

    def __init__(self, ground, world, name, place):
        self.name, self.command = name, str(pathlib.Path(ground.ringlet.command).resolve())
        self.container = world.container()
        self.ip = self.container.ip
        self.directory = pathlib.Path(place) / name
        self.directory.mkdir()
        self.identity = self.directory / "identity"
        self.service = None

    def enrol(self, *words, **more):
        done = subprocess.run([self.command, "node", "enrol", "--directory", self.identity, *words], capture_output=True, text=True, timeout=60, **more)
        require(done.returncode == 0, f"enrol {words}: {done.stderr}")
        return done.stdout

    def run(self, hosts, more=""):
        nodes = ", ".join(f'{{name = "{each.name}", address = "{each.ip}:{PORT}"}}' for each in hosts)
        policy = f'[cluster]\nnode = "{self.name}"\nlisten = "{self.ip}:{PORT}"\ndirectory = "{self.identity}"\nnodes = [{nodes}]\n{more}'
        before = ["nsenter", f"--net=/run/netns/{self.container.name}"]
        self.service = Service(self.command, self.directory, policy, before=before)
        self.service.start()
        require(self.service.runs(), f"{self.name} does not start: {self.service.told()}")

    def peers(self):
        return {each["node"]: each for each in self.service.status()["cluster"]["peers"]}

    def state(self, other):
        return self.peers()[other]["state"]

    def count(self, outcome):
        return self.service.status()["cluster"]["decisions"].get(outcome, 0)

    def lives(self):
        require(self.service.process.poll() is None, f"{self.name} has died: {self.service.told()}")


def all_joined(hosts):
    for one in hosts:
        for other in hosts:
            if one is not other:
                until(lambda one=one, other=other: one.state(other.name) == "joined", f"{other.name} to be joined at {one.name}")


@contextlib.contextmanager
def cluster(ground, names=NAMES):
    """Hosts that are enrolled, and run."""
    with world() as ground_world, tempfile.TemporaryDirectory() as place:
        hosts = [Host(ground, ground_world, name, place) for name in names]
        first, *others = hosts
        first.enrol("--new", first.name)
        for each in others:
            each.enrol("--join", "-", input=first.enrol("--issue", each.name))
        try:
            for each in hosts:
                each.run(hosts)
            yield hosts
        finally:
            for each in hosts:
                if each.service:
                    each.service.stop()


def enter(namespace):
    require(ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) == 0, f"setns: {os.strerror(ctypes.get_errno())}")


def within(host, action):
    """In the network namespace of a host. (A socket keeps that in which it was made.)"""
    ours = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/run/netns/{host.container.name}", os.O_RDONLY)
    enter(theirs)
    try:
        return action()
    finally:
        enter(ours)
        os.close(ours)
        os.close(theirs)


def dial(by, to):
    return within(by, lambda: socket.create_connection((to.ip, PORT), timeout=SOON))


def tls(by, to, identity, name):
    """A TLS connection with the certificate in a directory."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(identity / "ca.pem")
    context.load_cert_chain(identity / "node.pem", identity / "node.key")
    return context.wrap_socket(dial(by, to), server_hostname=name)


def gone(stream):
    """The service has ended it."""
    stream.settimeout(SOON)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while stream.recv(1000):
            pass
    stream.close()


def word(text, kind=0):
    return struct.pack("<IB", len(text) + 1, kind) + text


def hello(name, incarnation, version=1):
    return word(b'{"Hello":{"version":%d,"node":"%s","incarnation":%d}}' % (version, name.encode(), incarnation))


def drop(host, other, on):
    """Packets between two hosts vanish."""
    if on:
        rules = "\n".join(["table ip cut {", "chain incoming {", "type filter hook input priority 0;", f"ip saddr {other.ip} drop", "}", "chain outgoing {", "type filter hook output priority 0;", f"ip daddr {other.ip} drop", "}", "}"])
        subprocess.run(inside(host.container.name, "nft", rules), check=True, timeout=60)
    else:
        subprocess.run(inside(host.container.name, "nft", "delete table ip cut"), check=True, timeout=60)


def scenes(ground):
    name = "three nodes join; one is killed, and comes back with new keys"
    with ground.scene(name), cluster(ground) as (a, b, c):
        all_joined([a, b, c])
        beside = {host.name: host.peers() for host in (a, b)}
        require(all(each["incarnation"] > 0 for each in beside["a"].values()), f"{beside}")
        for host in a, b, c:
            until(lambda host=host: all(each["rtt_us"] is not None for each in host.peers().values()), "a heartbeat's answer")
            for kept in host.identity.iterdir():
                require(kept.stat().st_mode & 0o077 == 0, f"{kept} can be read by others")
        before = c.service.status()["cluster"]["incarnation"]
        c.service.stop()
        for host in a, b:
            until(lambda host=host: host.state("c") == "unreachable", f"{host.name} to miss c")
            require_confined(host.service)
            require(host.count("unreachable") == 1, f"{host.name} says it {host.count('unreachable')} times")
        require(a.state("b") == b.state("a") == "joined", "the others lost each other")
        old = (c.identity / "node.key").read_text()
        c.enrol("--join", "-", input=a.enrol("--issue", "c"))
        require((c.identity / "node.key").read_text() != old, "the same key")
        c.run([a, b, c])
        all_joined([a, b, c])
        require(c.service.status()["cluster"]["incarnation"] > before, "the incarnation does not grow")
        for host in a, b:
            require((host.count("restarted"), host.count("unreachable")) == (1, 1), f"{host.service.told()}")
        # One that ends in order says so.
        os.kill(c.service.process.pid, signal.SIGTERM)
        for host in a, b:
            until(lambda host=host: host.state("c") == "left", f"c to leave {host.name}")
            require((host.count("left"), host.count("unreachable")) == (1, 1), f"{host.service.told()}")
        note(name, "joined")

    name = "a partition of one pair heals"
    with ground.scene(name), cluster(ground) as (a, b, c):
        all_joined([a, b, c])
        drop(b, c, True)
        until(lambda: (b.state("c"), c.state("b")) == ("unreachable", "unreachable"), "both to declare it")
        for host, other in (b, "c"), (c, "b"):
            why = host.peers()[other]["why"]
            require(why.startswith(("silent", "lost")), f"{why}")
            require(host.count("unreachable") == 1, "it is said once")
        require(a.state("b") == a.state("c") == b.state("a") == c.state("a") == "joined", "others are concerned")
        require(a.count("unreachable") == 0, "a has seen nothing")
        drop(b, c, False)
        all_joined([a, b, c])
        note(name, "joined")

    name = "who is no node of the cluster is refused, with a reason"
    with ground.scene(name), cluster(ground, "ab") as (a, b), tempfile.TemporaryDirectory() as place:
        all_joined([a, b])

        def refused(code, act, at=a):
            before = at.count(code)
            act()
            until(lambda: at.count(code) > before, f"{code} at {at.name}: {at.service.told()}")
            at.lives()

        def stranger(words, identity, name="a"):
            try:
                stream = tls(b, a, identity, name)
                for each in words:
                    stream.sendall(each)
            except (ssl.SSLError, ConnectionError):
                return
            gone(stream)

        def garbage():
            stream = dial(b, a)
            with contextlib.suppress(ConnectionError):
                stream.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(100_000))
            gone(stream)

        refused("not-tls", garbage)
        # A client hello, byte by byte and never whole.
        slow = dial(b, a)
        slow.sendall(b"\x16\x03\x01")
        refused("too-slow", lambda: gone(slow))
        # More than one address may have.
        many = [dial(b, a) for _ in range(20)]
        until(lambda: a.count("too-many") > 0, "too many")
        for each in many:
            each.close()

        def other(directory, *words):
            identity = pathlib.Path(place) / directory
            subprocess.run([a.command, "node", "enrol", "--directory", identity, *words], check=True, capture_output=True, timeout=60)
            return identity

        def issued(directory, name):
            done = subprocess.run([a.command, "node", "enrol", "--directory", pathlib.Path(place) / directory, "--join", "-"],
                                  input=a.enrol("--issue", name), text=True, capture_output=True, timeout=60)
            require(done.returncode == 0, done.stderr)
            return pathlib.Path(place) / directory

        # Another cluster's certificate, beside the right authority's, which it needs to believe us.
        foreign = other("foreign", "--new", "b")
        (foreign / "ca.pem").write_text((a.identity / "ca.pem").read_text())
        refused("wrong-ca", lambda: stranger([hello("b", 1 << 40)], foreign))
        expired = pathlib.Path(place) / "expired"
        expire(a.identity, expired)
        refused("expired", lambda: stranger([hello("b", 1 << 40)], expired))
        unknown = issued("unknown", "z")
        refused("unknown-node", lambda: stranger([hello("z", 1)], unknown))
        refused("wrong-name", lambda: stranger([hello("b", 1 << 40)], unknown))
        # Who has b's key says what it likes; the b that is there stays.
        theirs = b.identity
        refused("older-incarnation", lambda: stranger([hello("b", 1)], theirs))
        refused("other-version", lambda: stranger([hello("b", 1 << 40, 99)], theirs))
        refused("too-large", lambda: stranger([struct.pack("<IB", 0xFFFFFFFF, 1)], theirs))
        refused("garbage", lambda: stranger([word(b"nonsense")], theirs))
        refused("garbage", lambda: stranger([word(b"before it has said who it is", 1)], theirs))
        require(a.state("b") == "joined" and a.count("unreachable") == 0, f"b is lost: {a.service.told()}")
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(a.identity / "ca.pem")

        def without():
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                gone(bare.wrap_socket(dial(b, a), server_hostname="a"))

        refused("no-certificate", without)
        note(name, "refused")

    name = "a node that holds another's place"
    with ground.scene(name), cluster(ground, "ab") as (a, b):
        all_joined([a, b])
        # b's address is answered by a node with another name.
        b.service.stop()
        until(lambda: a.state("b") == "unreachable", "a to miss b")
        real = b.identity.rename(b.directory / "real")
        b.name = "c"
        b.enrol("--join", "-", input=a.enrol("--issue", "c"))
        b.run([a])
        until(lambda: a.count("wrong-name") > 0, f"a to see it: {a.service.told()}")
        require(a.state("b") == "unreachable", "it was taken for b")
        require(real.exists(), "")
        note(name, "refused")

    name = "a node without an identity, and one with another's, do not start"
    with ground.scene(name), world() as ground_world, tempfile.TemporaryDirectory() as place:
        for number, (enrolled, said) in enumerate([(None, "ringlet node enrol"), ("other", "certificate of other")]):
            host = Host(ground, ground_world, f"a{number}", place)
            if enrolled:
                host.enrol("--new", enrolled)
            try:
                host.run([])
            except Exception as problem:  # noqa: BLE001
                require(said in str(problem), f"what it says: {problem}")
            else:
                require(False, "it runs")
            finally:
                host.service.stop()


def expire(authority, directory):
    """A certificate of this authority that held yesterday."""
    directory.mkdir()

    def openssl(*words):
        done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=60, cwd=directory)
        require(done.returncode == 0, f"openssl {words}: {done.stderr}")

    (directory / "ext").write_text("subjectAltName=DNS:b\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=b")
    openssl("x509", "-req", "-in", "node.csr", "-CA", authority / "ca.pem", "-CAkey", authority / "ca.key", "-days", "-1", "-extfile", "ext", "-out", "node.pem", "-set_serial", "7")
    (directory / "ca.pem").write_text((authority / "ca.pem").read_text())
