"""Networks that span hosts: by node services, by UDP, and by whichever of them works; and a peer by UDP that does what none does."""

import contextlib
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import types

from harness import ROOT, Skipped, require, wait_until
from networks import LIMIT_SECONDS, within
from nodes import ALLOWED, by_libfabric, in_memory, two_hosts
from world import inside, missing, world
from world import within as enters

FAR = {}
PORT = 7472
# Mirrors ringlet-ethernet/src/pieces.rs and udp.rs.
HEAD = struct.Struct("<BBHIQIHH")
PIECE, HELLO, BYE = 1, 2, 3
SOURCE, HEADER = "a source address that is another port's", "malformed header"


def scene(function):
    FAR[function.__name__] = function
    return function


class Site:
    """A machine: networks of its own, and who has them span to others, in the machine's own network namespace."""

    def __init__(self, ground, name, namespace, ip, before, service=None):
        self.ground, self.name, self.namespace, self.ip, self.before, self.service = ground.another(name), name, namespace, ip, before, service

    def create(self, network, *words):
        self.network = network
        self.ground.must("create", network, *words)

    def host(self, number, *words):
        return self.ground.host(self.network, number, *words)

    def span(self, *peers):
        words = [word for peer in peers for word in ("--peer", peer)]
        self.process = self.ground.start([*self.before, self.ground.command, "eth", "span", self.network, *words])
        wait_until(lambda: "ready" in self.process.tail() or self.process.poll() is not None, LIMIT_SECONDS, "a network to span hosts")
        require(self.process.poll() is None, f"it ended: {self.process.tail()}")

    def reach(self):
        """Of each host, by which way it is reached, and the ways there are."""
        told = json.loads(self.ground.must("way", self.network, "--json"))
        return {host["name"]: host for host in told["hosts"]}

    def reach_pid(self):
        return json.loads(self.ground.must("way", self.network, "--json"))["pid"]

    def reaches(self, *by):
        """Each of its peers, by a way that begins so (None: by none)."""

        def is_so():
            found = [host["by"] for host in self.reach().values()]
            return len(found) == len(by) and all((it is None) == (word is None) and (it or "").startswith(word or "") for it, word in zip(found, by, strict=True))

        wait_until(is_so, LIMIT_SECONDS, f"{self.name} to reach others by {by}: {self.reach()}")


@contextlib.contextmanager
def by_nodes(ground, rails=in_memory):
    """Machines a and b, with a node service each."""
    if problem := missing(ground.command):
        raise Skipped(problem)
    stands_for = types.SimpleNamespace(ringlet=types.SimpleNamespace(command=ground.command))
    with rails() as said, two_hosts(stands_for, ALLOWED, said) as hosts:
        yield [Site(ground, host.name, host.container.name, host.ip, host.before(), host.service) for host in hosts]
        for host in hosts:
            host.lives()


@contextlib.contextmanager
def by_udp(ground, names="ab", mtu=1500):
    """Machines that have a network in common, and no node service."""
    with world() as place:
        containers = [place.container() for _ in names]
        for number in range(2, 2 + len(names)):
            within(place.host, "ip", "link", "set", f"veth{number}", "mtu", mtu)
        yield [Site(ground, name, each.name, each.ip, inside(each.name)) for name, each in zip(names, containers, strict=True)]


def all_to_all(sites, peer):
    for site in sites:
        site.span(*(peer(other) for other in sites if other is not site))


def flows(one, other):
    """Every kind of size, by IPv4 and IPv6, from cold."""
    for host in one, other:
        host.run("ip", "neigh", "flush", "all")
    one.ping(other.ip)
    other.ping(one.six)
    for size in (0, 1, 19, 1472, 4096, 9000, 32768, 65493):
        one.ping(other.ip, "-M", "do", "-s", size)
    other.ping(one.six, "-M", "do", "-s", "65473")


LISTEN = """
import socket, struct, sys
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("239.7.7.7", 7007))
listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("4s4s", socket.inet_aton("239.7.7.7"), socket.inet_aton(sys.argv[1])))
listener.settimeout(60)
print("listens", flush=True)
while (data := listener.recv(100)) != b"end":
    print(data.decode(), flush=True)
"""
SPEAK = """
import socket, sys, time
speaker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
speaker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))
for number in range(int(sys.argv[2])):
    time.sleep(0.001)
    speaker.sendto(b"%d" % number, ("239.7.7.7", 7007))
speaker.sendto(b"end", ("239.7.7.7", 7007))
"""


def multicasts(speaker, *others, count=50):
    """Each hears all, once and in order. (By UDP more than a socket takes at once is lost, as is right.)"""
    listeners = [host.start(sys.executable, "-c", LISTEN, host.ip) for host in others]
    for listener in listeners:
        require(listener.line(LIMIT_SECONDS) == "listens", listener.tail())
    speaker.run(sys.executable, "-c", SPEAK, speaker.ip, count)
    for listener in listeners:
        require(listener.wait(LIMIT_SECONDS) == 0, listener.tail())
        heard = listener.finished_output().decode().split()[1:]
        require(heard == [str(number) for number in range(count)], f"heard: {heard}")


# What is sent until somebody says that it is enough; and whether all of it came, in order.
TAKE = """
import socket
listener = socket.create_server(("", 7008))
print("listens", flush=True)
stream, _ = listener.accept()
block, count = bytes(range(251)) * 1000, 0
while data := stream.recv(1 << 18):
    at = count % 251
    assert data == block[at : at + len(data)] or data == (block * 2)[at : at + len(data)], f"other bytes at {count}"
    count += len(data)
stream.sendall(b"%d" % count)
"""
GIVE = """
import select, socket, sys
stream = socket.create_connection((sys.argv[1], 7008))
block, count = bytes(range(251)) * 1000, 0
print("goes", flush=True)
while not select.select([0], [], [], 0)[0]:
    stream.sendall(block)
    count += len(block)
stream.shutdown(socket.SHUT_WR)
print(count, stream.recv(100).decode(), flush=True)
"""


class Stream:
    """TCP, until `ends`."""

    def __init__(self, client, server):
        self.client = client
        self.takes = server.start(sys.executable, "-c", TAKE)
        require(self.takes.line(LIMIT_SECONDS) == "listens", self.takes.tail())
        self.gives = client.start(sys.executable, "-c", GIVE, server.ip)
        require(self.gives.line(LIMIT_SECONDS) == "goes", self.gives.tail())
        self.goes_on()

    def goes_on(self):
        sent = self.client.state()["totals"]["sent"]
        wait_until(lambda: self.client.state()["totals"]["sent"] > sent + 50 or self.gives.poll() is not None, LIMIT_SECONDS, "the stream to go on")
        require(self.gives.poll() is None, f"the stream has ended: {self.gives.tail()}")

    def ends(self):
        self.gives.write("enough\n")
        require(self.gives.wait(LIMIT_SECONDS) == 0 and self.takes.wait(LIMIT_SECONDS) == 0, f"{self.gives.tail()}, {self.takes.tail()}")
        sent, came = self.gives.finished_output().split()[-2:]
        require(sent == came, f"{came} of {sent} bytes")


def iperf(client, server):
    """A stream of 64 MiB."""
    served = server.start("iperf3", "-s", "-1", "-B", server.ip)
    wait_until(lambda: f"{server.ip}:5201" in server.run("ss", "-Hltn"), LIMIT_SECONDS, "iperf3 to listen")
    client.run("iperf3", "-n", 64 << 20, "-c", server.ip)
    require(served.wait(LIMIT_SECONDS) == 0, served.tail())


def sleeps(*sites):
    """Who has it span hosts takes no processor time when nothing comes, however busy it was."""

    def ticks():
        stats = [pathlib.Path(f"/proc/{site.process.pid}/stat").read_text().rpartition(")")[2].split() for site in sites]
        return [int(fields[11]) + int(fields[12]) for fields in stats]

    def idle():
        before = ticks()
        time.sleep(0.5)
        return before == ticks()

    wait_until(idle, LIMIT_SECONDS, "those who have it span hosts to sleep")


def is_gone(site):
    """What says to which hosts it reaches."""
    return "is of this host alone" in site.ground.eth("way", site.network)[1]


def three_ports(a, b):
    """Two on one machine, and one on another."""
    for site in a, b:
        site.create("blue")
    return a.host(1, "--mtu", "65521"), a.host(2), b.host(3)


def span_of_three(a, b, peer, by):
    """Three ports of two machines see each other, and only as long as the machines do."""
    one, two, three = three_ports(a, b)
    require(not three.has_carrier(), "a carrier, and nobody there")
    all_to_all([a, b], peer)
    for site in a, b:
        site.reaches(by)
    three.await_carrier(True)
    flows(one, three)
    one.ping(two.ip)
    two.ping(three.six)
    multicasts(one, two, three)
    multicasts(three, one, two)
    # What is between the two of one machine is not for the other.
    before = three.state()["totals"]["received"]
    for _ in range(10):
        one.ping(two.ip)
    require(three.state()["totals"]["received"] - before < 20, "another machine's port saw what was not for it")
    # Whose ports are behind which machine, and how it is reached.
    told = a.ground.must("stats", "vnet0", within=one.namespace)
    require(any(by in line for line in told.splitlines()), told)
    require(by in a.ground.must("ls"), a.ground.must("ls"))
    return one, two, three


def is_whole(client, server):
    """Segments of TCP pass uncut: at the receiver frames are longer than its packets."""
    before = server.state()["totals"]
    iperf(client, server)
    after = server.state()["totals"]
    mean = (after["received_bytes"] - before["received_bytes"]) / (after["received"] - before["received"])
    mtu = int(server.run("cat", "/sys/class/net/vnet0/mtu"))
    require(mean > mtu, f"frames of {mean} bytes at an MTU of {mtu}")


def takes_nothing(site, one, other):
    """A machine stands still, and all is full of what one of its ports is to get; how much of it was lost."""
    site.process.send(signal.SIGSTOP)
    of = lambda what: sum(peer[what] for peer in one.state()["peers"] if peer["far"])  # noqa: E731
    before = of("full")
    speak = "import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n"
    speak += "for _ in range(3000): s.sendto(bytes(60000), (sys.argv[1], 7007))"
    one.run(sys.executable, "-c", speak, other.ip)
    require(of("waiting") > 0, f"it takes something: {one.state()}")
    return of("full") - before


def goes_on(site, one, other):
    site.process.send(signal.SIGCONT)
    # (The first one may find all still full.)
    one.run("ping", "-n", "-c", "1", "-w", "30", other.ip)
    one.ping(other.ip)


@scene
def far_by_nodes(ground):
    """By node services, over rails in memory; one is killed in the midst of a stream, and is back."""
    with by_nodes(ground) as (a, b):
        one, two, three = span_of_three(a, b, lambda other: other.name, "node ")
        for host in one, three:
            host.run("ip", "link", "set", "vnet0", "mtu", "1500")
        is_whole(one, three)
        stream = Stream(one, three)
        b.service.stop()
        three.await_carrier(False)
        a.reaches(None)
        one.ping(two.ip)
        b.service.start()
        three.await_carrier(True)
        stream.goes_on()
        stream.ends()
        # While the other machine takes nothing only what is for it is lost.
        require(takes_nothing(b, one, three) > 0, f"nothing was lost: {one.state()}")
        one.ping(two.ip)
        goes_on(b, one, three)
        sleeps(a, b)
        # Who has it span hosts is killed: nothing of it stays, and it may begin anew.
        b.process.kill()
        three.await_carrier(False)
        require("is of this host alone" in b.ground.eth("way", "blue")[1], "a killed one is there")
        b.span("a")
        three.await_carrier(True)
        one.ping(three.ip)


@scene
def far_by_libfabric(ground):
    """The same by libfabric's tcp."""
    with by_nodes(ground, by_libfabric) as (a, b):
        for site in a, b:
            site.create("blue")
        one, three = a.host(1), b.host(3)
        all_to_all([a, b], lambda other: other.name)
        three.await_carrier(True)
        flows(one, three)
        iperf(one, three)


@scene
def far_by_udp(ground):
    """By UDP; one end is killed in the midst of a stream, and is back; and another ends in order."""
    with by_udp(ground) as (a, b):
        one, _two, three = span_of_three(a, b, lambda other: other.ip, "UDP ")
        for host in one, three:
            host.run("ip", "link", "set", "vnet0", "mtu", "1500")
        is_whole(one, three)
        sleeps(a, b)
        stream = Stream(one, three)
        b.process.kill()
        three.await_carrier(False)
        # (At once: TCP waits two times as long as it was cut off.)
        b.span(a.ip)
        three.await_carrier(True)
        stream.goes_on()
        stream.ends()
        b.process.kill()
        a.reaches(None)
        b.span(a.ip)
        a.reaches("UDP ")
        # One that ends in order says so: nobody waits until it is missed.
        b.process.send(signal.SIGTERM)
        require(b.process.wait(LIMIT_SECONDS) == 0 and is_gone(b), b.process.tail())
        wait_until(lambda: "it has ended" in a.ground.must("way", "blue"), LIMIT_SECONDS, f"that it has ended: {a.reach()}")


@scene
def far_by_narrow_paths(ground):
    """Frames go by paths that take little, and by one that has become narrower."""
    with by_udp(ground, mtu=9000) as (a, b):
        one, _two, three = three_ports(a, b)
        for mtu in (552, 9000):
            for site in a, b:
                within(site.namespace, "ip", "link", "set", "eth0", "mtu", mtu)
            all_to_all([a, b], lambda other: other.ip)
            three.await_carrier(True)
            flows(one, three)
            if mtu == 9000:
                for site in a, b:
                    within(site.namespace, "ip", "link", "set", "eth0", "mtu", "1400")
                flows(one, three)
            for site in a, b:
                site.process.send(signal.SIGTERM)
                require(site.process.wait(LIMIT_SECONDS) == 0, site.process.tail())


@scene
def far_by_three(ground):
    """Three machines: a frame for all comes once to each; a machine that is lost takes nobody with it, nor does one that can't be a port here:
    that is said, and it is one once it can."""
    with by_udp(ground, "abc") as sites:
        for site in sites:
            site.create("blue")
        hosts = [site.host(number + 1) for number, site in enumerate(sites)]
        all_to_all(sites, lambda other: other.ip)
        for site in sites:
            site.reaches("UDP ", "UDP ")
        for one in hosts:
            for other in hosts:
                if one is not other:
                    one.ping(other.ip)
        multicasts(hosts[0], *hosts[1:])
        sites[2].process.send(signal.SIGTERM)
        hosts[2].await_carrier(False)
        sites[0].reaches("UDP ", None)
        hosts[0].ping(hosts[1].ip)
        require(hosts[0].has_carrier(), "no carrier, and one is there")
        # There is no descriptor more for a port.
        pid = int(sites[0].reach_pid())
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(number for number in itertools.count() if number not in taken), limits[1]))
        sites[2].span(sites[0].ip, sites[1].ip)
        ends = sites[0].process
        wait_until(lambda: "is no port here" in ends.tail() or ends.poll() is not None, LIMIT_SECONDS, f"a word on what is lacking: {ends.tail()}")
        require(ends.poll() is None, f"it ended: {ends.tail()}")
        hosts[0].ping(hosts[1].ip)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        sites[0].reaches("UDP ", "UDP ")
        hosts[0].ping(hosts[2].ip)


@scene
def far_by_either(ground):
    """A stream of TCP lives through changes of its way, by the operator's word and as ways come and go; the carrier stays. One of two ways is used."""
    with by_nodes(ground) as (a, b):
        for site in a, b:
            site.create("blue")
        one, three = a.host(1), b.host(3)
        all_to_all([a, b], lambda other: f"{other.name},{other.ip}")
        for site in a, b:
            site.reaches("node ")
        changes = int(one.run("cat", "/sys/class/net/vnet0/carrier_changes"))
        stream = Stream(one, three)
        for way, begins in (("udp", "UDP "), ("node", "node "), ("udp", "UDP "), ("auto", "node ")):
            for site in a, b:
                site.ground.must("way", "blue", way)
                site.reaches(begins)
            stream.goes_on()
        b.service.stop()
        for site in a, b:
            site.reaches("UDP ")
        stream.goes_on()
        b.service.start()
        for site in a, b:
            site.reaches("node ")
        stream.goes_on()
        stream.ends()
        require(int(one.run("cat", "/sys/class/net/vnet0/carrier_changes")) == changes, "the carrier was lost meanwhile")
        one.ping(three.ip)
        # Who waits for room by one way sleeps, though there is room by the other.
        takes_nothing(b, one, three)
        sleeps(a)
        goes_on(b, one, three)
        # Named as if it were two machines, in whichever order, each is one port.
        for theirs in (("a", a.ip), (a.ip, "a")):
            for site in a, b:
                site.process.send(signal.SIGTERM)
                require(site.process.wait(LIMIT_SECONDS) == 0, site.process.tail())
            a.span("b", b.ip)
            b.span(*theirs)
            for site in a, b:
                wait_until(lambda site=site: "name a host once" in site.process.tail(), LIMIT_SECONDS, f"that to be told: {site.process.tail()}")
                require("name a host once" in site.ground.must("way", "blue"), f"{site.reach()}")
                used = lambda site=site: [host["by"] for host in site.reach().values() if host["by"]]  # noqa: E731
                wait_until(lambda used=used: len(used()) == 1, LIMIT_SECONDS, f"one way: {site.reach()}")
            three.await_carrier(True)
            one.run("ping", "-n", "-c", "1", "-w", "30", three.ip)
            one.ping(three.ip)


class Peer:
    """A machine that speaks UDP by hand."""

    def __init__(self, site, to, network="blue", port=PORT):
        with enters(types.SimpleNamespace(name=site.namespace)):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.settimeout(LIMIT_SECONDS)
        self.socket.bind(("0.0.0.0", port))
        self.socket.connect((to, PORT))
        self.network, self.cookie, self.theirs, self.number = network.encode(), 0x1234567890ABCDEF, 0, 0

    def send(self, kind, cookie, says=b"", number=0, whole=0, each=0, nth=0, size=None, version=3):
        head = HEAD.pack(kind, version, len(says) if size is None else size, number, cookie, whole, each, nth)
        with contextlib.suppress(ConnectionRefusedError):
            self.socket.send(head + says)

    @property
    def both(self):
        """What pieces have."""
        return self.theirs + self.cookie & (1 << 64) - 1

    def hello(self, echo):
        self.send(HELLO, echo, struct.pack("<QQ", self.cookie, 7) + self.network)

    def hears(self):
        """The next greeting: whom it takes for us, and who it is."""
        while True:
            data = self.socket.recv(1 << 16)
            kind, _, size, _, cookie, *_ = HEAD.unpack_from(data)
            if kind == HELLO:
                return cookie, *struct.unpack_from("<Q", data, HEAD.size)

    def joins(self):
        self.hello(0)
        while True:
            echo, self.theirs = self.hears()
            if echo == self.cookie:
                break
            self.hello(self.theirs)
        self.hello(self.theirs)

    def frame(self, source, to=b"\xff" * 6, header=bytes(10), rest=bytes(46), cookie=None, **more):
        self.number += 1
        data = header + to + source + b"\x88\xb5" + rest
        more = {"number": self.number, "whole": len(data), "each": 9000, **more}
        self.send(PIECE, self.both if cookie is None else cookie, data, **more)


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


@scene
def far_lies(ground):
    """A peer by UDP: until it repeats our number it is nobody; what it then sends is bounded, checked, and does nobody harm; who only has its address gets nowhere."""
    with by_udp(ground) as (a, b):
        for site in a, b:
            site.create("blue", "--addresses", "locked")
        one, two = a.host(1), a.host(2)
        a.span(b.ip)
        peer = Peer(b, a.ip)
        # It says that it is there, and does not hear us: nobody.
        own, far = mac("02:00:00:00:00:77"), a.reach
        for echo in (0, 1, 0xFFFFFFFFFFFFFFFF):
            peer.hello(echo)
            peer.frame(own, cookie=echo)
        require(far()[f"{b.ip}:{PORT}"]["by"] is None, f"{far()}")
        stranger = Peer(b, a.ip, "red", PORT + 1)
        stranger.hello(0)
        peer.joins()
        a.reaches("UDP ")

        def far_of(host):
            return [each for each in host.state()["peers"] if each["far"]]

        wait_until(lambda: all(far_of(host) for host in (one, two)), LIMIT_SECONDS, "a port of the peer's")
        peer.frame(own)
        wait_until(lambda: far_of(one)[0]["received"] == 1, LIMIT_SECONDS, f"an honest frame: {one.state()}")
        # (What another port of that machine sends is not heard, nor what has another number: one frame more is all that comes.)
        stranger.frame(own, cookie=peer.both)
        for cookie in (0, peer.both ^ 1, peer.theirs, peer.cookie):
            peer.frame(own, cookie=cookie)
        # Pieces that do not fit, in any way; and messages that lack some.
        data = bytes(10) + b"\xff" * 6 + own + bytes(2000)
        fits = {"number": 1000, "whole": len(data), "each": 1000}
        for odd in ({"nth": 9}, {"nth": 2}, {"each": 1}, {"each": 0}, {"whole": 1 << 31}, {"whole": 1}, {"whole": 0}, {"each": 999}, {"size": 65535}, {"size": 999}, {"version": 1}):
            more = {"number": 1000, "whole": len(data), "each": 1000, **odd}
            peer.send(PIECE, peer.both, data[:1000], **more)
        for kind in (0, 4, 255):
            peer.send(kind, peer.both, data[:1000])
        for size in (0, 1, 10, HEAD.size - 1):
            with contextlib.suppress(ConnectionRefusedError):
                peer.socket.send(bytes(size))
        for number in range(2000, 3000):
            peer.send(PIECE, peer.both, data[:1000], **{**fits, "number": number})
        for nth in (1, 1, 0, 0, 1):
            at = nth * 1000
            peer.send(PIECE, peer.both, data[at : at + 1000], **{**fits, "number": 4000, "nth": nth, "whole": 2000})
        wait_until(lambda: far_of(one)[0]["received"] == 2, LIMIT_SECONDS, f"a frame in pieces: {one.state()}")
        wait_until(lambda: far()[f"{b.ip}:{PORT}"]["ways"][0]["lost"] >= 990, LIMIT_SECONDS, f"what lacks pieces to be counted: {far()}")
        # Addresses of others, and headers of nobody's.
        before = [host.dropped(SOURCE) for host in (one, two)]
        peer.number = 5000
        for source in (mac(one.mac), mac(two.mac)):
            peer.frame(source)
        for host, refused in zip((one, two), before, strict=True):
            wait_until(lambda host=host, refused=refused: host.dropped(SOURCE) == refused + 2, LIMIT_SECONDS, f"a thief to be refused: {host.state()}")
        for header in (bytes([4]) + bytes(9), b"\0\x02" + bytes(8), b"\1\1\xff\xff\0\1\x22\0\x10\0"):
            peer.frame(own, header=header)

        def malformed():
            (port,) = [port for port in json.loads(a.ground.must("stats", "--json")) if port["about"]["far"]]
            return port["totals"]["dropped"][HEADER]

        wait_until(lambda: malformed() == 3, LIMIT_SECONDS, "broken headers to be counted")
        # A flood, of greetings as well.
        for number in range(20_000):
            peer.hello(peer.theirs)
            peer.frame(own, rest=bytes(1000))
        one.ping(two.ip)
        require(all(far_of(host)[0]["received"] >= 2 for host in (one, two)), f"{one.state()}")
        for _ in range(100):
            peer.hello(7)
        # It says nothing more: it is missed. And it may begin anew.
        with contextlib.suppress(BlockingIOError):
            peer.socket.setblocking(False)
            while peer.socket.recv(1 << 16):
                pass
        peer.send(BYE, 1)
        require(far()[f"{b.ip}:{PORT}"]["by"], "a farewell of nobody's was heard")
        peer.send(BYE, peer.both)
        a.reaches(None)
        wait_until(lambda: not far_of(one), LIMIT_SECONDS, f"its port to be gone: {one.state()}")
        one.ping(two.ip)
        # What the one before has sent, and comes late, is not heard of the next one, and does not stand in its way.
        peer.socket.settimeout(LIMIT_SECONDS)
        late, peer.cookie, peer.number = peer.both, peer.cookie + 1, 0
        peer.joins()
        wait_until(lambda: all(far_of(host) for host in (one, two)), LIMIT_SECONDS, "a port of the peer's")
        for number in range(8):
            peer.frame(own, mac(one.mac), cookie=late, number=1_000_000 + number)
        peer.send(BYE, late)
        for _ in range(20):
            peer.frame(own, mac(one.mac))
        wait_until(lambda: far_of(one)[0]["received"] >= 20, LIMIT_SECONDS, f"all that it sends: {one.state()}")
        require(far_of(one)[0]["received"] == 20, f"late ones are heard: {one.state()}")


@scene
def far_static(ground):
    """Where addresses are static another machine's are, too: who has them first has them; and each machine sees to its own."""
    with by_udp(ground) as (a, b):
        for site in a, b:
            site.create("blue", "--addresses", "static")
        one, three = a.host(1), b.host(3)
        all_to_all([a, b], lambda other: other.ip)
        three.await_carrier(True)
        one.ping(three.ip)
        # A second address of a port's does not leave its machine.
        before = three.state()["totals"]["received"]
        speak = "import socket, sys\ns = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\ns.bind(('vnet0', 0))\n"
        speak += "for last in (0x77, int(sys.argv[1])): s.send(b'\\xff' * 6 + bytes([2, 0, 0, 0, 0, last]) + b'\\x88\\xb5' + bytes(46))"
        one.run(sys.executable, "-c", speak, "1")
        wait_until(lambda: three.state()["totals"]["received"] > before, LIMIT_SECONDS, "what has the port's own address")
        ports = json.loads(a.ground.must("stats", "--json"))
        (far,) = [port for port in ports if port["about"]["far"]]
        require(far["totals"]["dropped"][SOURCE] == 1, f"{far}")


@scene
def far_unit(ground):
    """The unit is one; and root without any rights does what it is for, and is ready when it says so."""
    text = (ROOT / "deploy/ringlet-eth-span@.service").read_text().replace("/usr/local/bin/ringlet", ground.command)
    place = pathlib.Path(ground.directory) / "ringlet-eth-span@blue.service"
    place.write_text(text)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        require(done.returncode == 0 and not done.stderr, done.stderr)
    require("\nCapabilityBoundingSet=\n" in text, "rights that it does not need")
    told = pathlib.Path(ground.directory) / "notify"
    with by_udp(ground) as (a, b), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(told))
        manager.settimeout(LIMIT_SECONDS)
        for site in a, b:
            site.create("blue")
            site.before += ["env", f"NOTIFY_SOCKET={told}", "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        one, three = a.host(1), b.host(3)
        all_to_all([a, b], lambda other: other.ip)
        require(b"READY=1" in manager.recv(1000), "not what a service manager waits for")
        three.await_carrier(True)
        one.ping(three.ip)


@scene
def far_wrong(ground):
    """Each wrong use gets a sentence that names the fix."""
    with by_udp(ground) as (a, b):
        for site in a, b:
            site.create("blue")

        def says(*words, what):
            status, said = a.ground.eth(*words, within=a.namespace)
            require(status != 0 and what in said, f"{words}: {status}, {said}")

        says("span", "nowhere", "--peer", b.ip, what="ringlet eth create nowhere")
        says("span", "blue", what="--peer")
        says("span", "blue", "--peer", "b.example", what="a numeric address")
        says("span", "blue", "--peer", b.ip, "--peer", f"{b.ip}:{PORT}", what="named twice")
        says("span", "blue", "--peer", f"b,{b.ip},{b.ip}", what="names a way twice")
        says("span", "blue", "--peer", "fd00::1", "--listen", "10.0.0.1:7472", what="of two kinds")
        says("span", "blue", "--peer", b.ip, "--listen", "192.0.2.1:7472", what="nothing can listen at")
        says("way", "blue", what="ringlet eth span blue")
        says("way", "blue", "udp", what="ringlet eth span blue")
        says("way", "blue", "tcp", what="[possible values: auto, node, udp]")
        a.span(b.ip)
        says("span", "blue", "--peer", b.ip, what="spans hosts already")
        says("delete", "blue", what="is to end first")
        status, said = a.ground.eth("way", "blue")
        require(status == 0 and "it does not answer" in said, said)
        # Nobody else changes it.
        socket_of = pathlib.Path(a.ground.networks) / "blue" / f"{0:016x}.port"
        for folder in (ground.directory, a.ground.networks, socket_of.parent):
            os.chmod(folder, 0o755)
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = ground.start(["env", f"RINGLET_ETHERNET={a.ground.networks}", *nobody, ground.command, "eth", "way", "blue", "udp"])
        require(done.wait(LIMIT_SECONDS) != 0 and "root" in done.tail(), done.tail())
        # Of two networks, by the same addresses, the second one would have all that comes.
        a.ground.must("create", "red")
        says("span", "red", "--peer", b.ip, what="for another network: this one needs another port, at both ends")
        says("span", "red", "--peer", f"[::ffff:{b.ip}]:{PORT}", what="for another network")
        b.create("red")
        b.span(a.ip)
        wait_until(lambda: "of another network" in a.ground.must("way", "blue"), LIMIT_SECONDS, f"whom it hears: {a.reach()}")
        a.reaches(None)
