"""Hosts (network namespaces) with a node service each, which know each other; and who is none of them."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
import time

from ground import Ends
from harness import require
from nodes import ALLOWED, PORT, Host, all_joined, cluster, two_hosts
from service import require_confined
from strangers import Relay
from world import Across, inside, note, until, within, world

# The service says: silent for 5 s. The rest is for a machine that has other work.
SOON = 60


class Zone:
    """A name server of a host's own, at its loopback address: what it says of (name, type) may change at any time."""

    A, SRV = 1, 33

    def __init__(self, host):
        self.said, self.asked = {}, 0
        with within(host.container):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 53))
        self.resolver = host.directory / "resolv.conf"
        self.resolver.write_text("nameserver 127.0.0.1\noptions timeout:1\n")
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                query, asker = self.socket.recvfrom(4096)
                self.asked += 1
                self.socket.sendto(self.answer(query), asker)

    def answer(self, query):
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        name, (kind, _) = ".".join(labels), struct.unpack_from(">HH", query, at + 1)
        records = self.said.get((name, kind), [])
        known = any(name == each for each, _ in self.said)
        head = query[:2] + struct.pack(">HHHHH", 0x8180 if known else 0x8183, 1, len(records), 0, 0)
        seconds = 2
        return head + query[12 : at + 5] + b"".join(b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, seconds, len(each)) + each for each in records)

    def says(self, name, *addresses):
        self.said[name, self.A] = [socket.inet_aton(each) for each in addresses]

    def serves(self, name, *targets):
        """Priority, port and host of each."""
        wire = lambda host: b"".join(bytes([len(label)]) + label.encode() for label in host.split(".")) + b"\0"  # noqa: E731
        self.said[name, self.SRV] = [struct.pack(">HHH", priority, 0, port) + wire(host) for priority, port, host in targets]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


class Apart(Across):
    """Two ends on two hosts: each is in its host's control group, which is all that the service of that host sees; and knows that service only."""

    def __init__(self, ground, server, client, dial=None, prepare=None):
        Ends._listen(self, ground, server.ip, server.before())
        if prepare:
            prepare(self.port)
        ip, self.dialled = dial or (server.ip, self.port)
        self.connect(ip, self.dialled, before=client.before())


def matched(host, outcome):
    """The numbers of what was decided so."""
    last = host.service.status()["last"]
    return [each["about"].split()[0] for each in last if each["outcome"] == outcome]


def dial(by, to):
    with within(by.container):
        return socket.create_connection((to.ip, PORT), timeout=SOON)


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


def hello(name, incarnation, version=5, introduces=False):
    said = {"version": version, "node": name, "incarnation": incarnation, "listen": f"0.0.0.0:{PORT}", "introduces": introduces}
    return word(json.dumps({"Hello": said}).encode())


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

    name = "nodes are listed by their names, and by their services"
    with ground.scene(name), cluster(ground, "ab", run=False) as (a, b), Zone(a) as zone:
        b.run([a, b])
        a.run([a, b], listed={"b": f"b.cluster.test:{PORT}"}, zone=zone)
        until(lambda: a.count("not-found") == 1, "a to miss the name")
        require(a.state("b") == "unknown" and a.peers()["b"]["addresses"] == [], f"{a.peers()}")
        zone.says("b.cluster.test", b.ip)
        all_joined([a, b])
        require(a.peers()["b"]["addresses"] == [f"{b.ip}:{PORT}"], f"{a.peers()}")
        require_confined(a.service)
        # A name that is no longer known parts nobody.
        asked = zone.asked
        zone.said.clear()
        until(lambda: a.count("not-found") == 2 and zone.asked > asked, "a to miss the name again")
        require(a.state("b") == "joined" and a.count("unreachable") == 0, f"{a.service.told()}")
        # Nobody listens where the first target is.
        a.service.stop()
        until(lambda: b.state("a") == "unreachable", "b to miss a")
        zone.says("b.cluster.test", b.ip)
        zone.serves("_ringlet._tcp.cluster.test", (1, PORT, "b.cluster.test"), (0, PORT + 1, "b.cluster.test"))
        a.run([a, b], listed={"b": "_ringlet._tcp.cluster.test"}, zone=zone)
        all_joined([a, b])
        require(a.peers()["b"]["addresses"] == [f"{b.ip}:{PORT + 1}", f"{b.ip}:{PORT}"], f"{a.peers()}")
        note(name, "joined")

    name = "nodes that are not listed hear of each other"
    with ground.scene(name), cluster(ground, run=False) as (a, b, c), Zone(c) as zone:
        a.run([], join=[])
        b.run([], join=[f"{a.ip}:{PORT}", f"{b.ip}:{PORT}"])
        all_joined([a, b])
        # It is found by its name; and the two others, of which it was told of one only, by it and each other.
        c.run([], join=[f"seed.cluster.test:{PORT}"], zone=zone)
        until(lambda: c.count("not-found") == 1, "c to miss the name")
        require(c.peers() == {} and set(a.peers()) == {"b"}, f"{c.peers()}, {a.peers()}")
        zone.says("seed.cluster.test", b.ip)
        all_joined([a, b, c])
        for host in a, b, c:
            require_confined(host.service)
            require(len(host.peers()) == 2, f"{host.peers()}")
        # Whom they knew has gone; who comes back needs one of them only, and so does who forgot all.
        a.service.stop()
        until(lambda: b.state("a") == c.state("a") == "unreachable", "a to be missed")
        c.service.stop()
        until(lambda: b.state("c") == "unreachable", "c to be missed")
        c.run([], join=[f"{b.ip}:{PORT}", f"{a.ip}:{PORT}"])
        all_joined([b, c])
        a.run([], join=[f"{c.ip}:{PORT}"])
        all_joined([a, b, c])
        # Who is banned is no member, whatever it holds; who has a list only does not open it.
        a.service.stop()
        until(lambda: b.state("a") == c.state("a") == "unreachable", "a to be missed")
        a.run([], "banned = ['c']", join=[f"{b.ip}:{PORT}"])
        all_joined([a, b])
        until(lambda: a.count("banned") > 0, "a to refuse c")
        require(set(a.peers()) == {"b"} and c.state("a") == "unreachable", f"{a.peers()}, {c.peers()}")
        a.service.stop()
        a.run([b])
        all_joined([a, b])
        until(lambda: a.count("unknown-node") > 0, "a to refuse c")
        require(set(a.peers()) == {"b"}, f"{a.peers()}")
        note(name, "joined")

    name = "what a member says of nodes is a hint where to dial"
    with ground.scene(name), cluster(ground, "ab", run=False) as (a, b):
        a.run([], join=[])
        victim = f"10.9.9.9:{PORT}"
        identity = b.identity
        with tls(b, a, identity, "a") as stream:
            stream.sendall(hello("b", 1))
            until(lambda: a.peers().get("b", {}).get("state") == "joined", "the liar to be a member")
            many = [[f"n{number}", victim] for number in range(2_000)]
            for at in range(0, len(many), 6):
                stream.sendall(word(json.dumps({"Nodes": {"nodes": many[at : at + 6], "last": False}}).encode()))
            last = word(json.dumps({"Nodes": {"nodes": [["a", victim], ["B_", victim], ["c", victim]], "last": True}}).encode())
            # (None of those gives up its place at once, as each would be dialled then.)
            until(lambda: stream.sendall(last) or "c" in a.peers(), "a to have read all of it")
            known = a.peers()
            require(len(known) == 256 and "B_" not in known and "a" not in known, f"{len(known)} nodes")
            require(a.count("learned") < 300, f"{a.count('learned')} were dialled")
            require(known["b"]["state"] == "joined", "the only one that is there was forgotten")
            a.lives()
        # The real one comes back, and is found among all those.
        until(lambda: a.state("b") == "unreachable", "the liar to go")
        b.run([], join=[f"{a.ip}:{PORT}"])
        all_joined([a, b])
        note(name, "joined")

    name = "all nodes have the same list, and one's keys are on two of them"
    with ground.scene(name), cluster(ground, run=False) as (a, b, c):
        for host in a, b:
            host.run([], join=[f"{a.ip}:{PORT}", f"{b.ip}:{PORT}"])
        all_joined([a, b])
        for host in a, b:
            # (The other one may have been dialled before it listened.)
            own = [each for each in host.service.status()["last"] if each["outcome"] == "lost" and f"{host.ip}:" in each["about"]]
            require(host.count("itself") == 0 and not own, f"its own address is none that fails: {host.service.told()}")
        shutil.rmtree(c.identity)
        shutil.copytree(b.identity, c.identity)
        c.name = "b"
        c.run([], join=[f"{b.ip}:{PORT}"])
        for host in b, c:
            until(lambda host=host: host.count("same-name") > 0, "both to see it")
        require(c.peers() == {} and a.state("b") == "joined", f"{c.peers()}")
        note(name, "joined")

    name = "members that introduce themselves again and again"
    with ground.scene(name), cluster(ground, run=False) as (a, b, c), contextlib.ExitStack() as held:
        a.run([], join=[])

        def introduced():
            stream = tls(b, a, b.identity, "a")
            stream.sendall(hello("b", 1, introduces=True))
            stream.settimeout(SOON)
            require(stream.recv(1), "no answer")
            return stream

        said = b""
        with tls(c, a, c.identity, "a") as session:
            session.sendall(hello("c", 1))
            until(lambda: a.state("c") == "joined", "c to be a member")
            began = time.monotonic()
            for _ in range(30):
                introduced().close()
            session.settimeout(1)
            with contextlib.suppress(TimeoutError):
                while time.monotonic() - began < SOON:
                    session.sendall(word(json.dumps({"Echo": 0}).encode()))
                    part = session.recv(1 << 16)
                    said += part
                    # What is said from here on is beats.
                    if said.count(b"Beat") > 2:
                        break
            # (One a second, whenever the last one was.)
            most = time.monotonic() - began + 2
        news = said.count(b'[["b",')
        require(0 < news < most, f"c was told of b {news} times in {most - 2:.1f} s")

        def kept():
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                held.enter_context(introduced())

        until(lambda: kept() or a.count("too-many") > 0, "those who are introduced and stay to be too many")
        note(name, "refused")

    name = "where a node joins, one that is banned says nothing"
    with ground.scene(name), cluster(ground, "ac", run=False) as (a, c):
        with within(c.container):
            listener = socket.create_server((c.ip, PORT))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(c.identity / "ca.pem")
        context.load_cert_chain(c.identity / "node.pem", c.identity / "node.key")
        listener.settimeout(SOON)
        a.run([], "banned = ['c']", join=[f"{c.ip}:{PORT}"])
        told = word(json.dumps({"Nodes": {"nodes": [["d", f"{c.ip}:{PORT}"]], "last": True}}).encode())
        for first in told, hello("c", 1):
            with context.wrap_socket(listener.accept()[0], server_side=True) as stream:
                stream.sendall(first + told)
                gone(stream)
        listener.close()
        until(lambda: a.count("banned") > 0, "a to see who it is")
        require(a.peers() == {} and a.count("garbage") == 1, f"{a.peers()}, {a.service.told()}")
        note(name, "refused")

    name = "a service that runs takes up new keys"
    with ground.scene(name), cluster(ground, "ab") as (a, b):
        all_joined([a, b])
        first = {host.name: (host.identity / "node.pem").read_text() for host in (a, b)}
        # One that does not belong to the rest is not taken.
        key = (b.identity / "node.key").read_text()
        (b.identity / "node.key").write_text((a.identity / "node.key").read_text())
        until(lambda: "stay in use" in b.service.told(), "b to refuse a key that is not its own")
        (b.identity / "node.key").write_text(key)
        until(lambda: b.count("new-identity") == 1, "b to read its own again")
        b.enrol("--join", "-", input=a.enrol("--issue", "b"))
        a.enrol("--rotate")
        until(lambda: a.count("new-identity") >= 1 and b.count("new-identity") >= 2, "the new keys to be taken up")
        for by, to in (a, b), (b, a):
            with tls(by, to, by.identity, to.name) as stream:
                shown = stream.getpeercert(binary_form=True)
            pem = (to.identity / "node.pem").read_text()
            require(pem != first[to.name] and shown == ssl.PEM_cert_to_DER_cert(pem), f"{to.name} shows an old certificate")
            require_confined(to.service)
        require(a.state("b") == "joined" and a.count("unreachable") == b.count("unreachable") == 0, "a session is lost by it")
        # Both prove who they are by the new ones.
        drop(a, b, True)
        until(lambda: a.state("b") == b.state("a") == "unreachable", "both to declare it")
        drop(a, b, False)
        all_joined([a, b])
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


    found(ground)


def found(ground):
    """Both ends of a connection between two hosts."""

    def scene(name, play, rules=ALLOWED, **how):
        with ground.scene(name), two_hosts(ground, rules, **how) as (a, b):
            play(name, a, b)
            a.lives()
            b.lives()

    def found_by_both(name, a, b, outcome, reason, **how):
        ends = Apart(ground, b, a, **how)
        ends.stays(reason)
        for host in a, b:
            until(lambda host=host: matched(host, outcome), f"{host.name}: {outcome}; {host.service.status()}")
        # Each comes again and again; what is found is one connection.
        numbers = [set(matched(host, outcome)) for host in (a, b)]
        require(len(numbers[0]) == 1 and numbers[0] == numbers[1], f"other numbers: {numbers}")
        ends.finish()
        note(name, "kernel", outcome)

    scene("two ends on two hosts, and no fabric", lambda name, a, b: found_by_both(name, a, b, "no-fabric", "no-fabric"))
    scene("two ends on two hosts that no rule allows", lambda name, a, b: found_by_both(name, a, b, "refused", "refused"), "")

    def translated(name, a, b):
        """Both addresses and the port are rewritten."""
        subprocess.run(inside(a.container.name, "ip", "address", "add", f"{a.second}/24", "dev", "eth0"), check=True, timeout=60)

        def prepare(port):
            nat = [(b, f"chain in {{ type nat hook prerouting priority -100; tcp dport 4444 redirect to :{port}\n}}"),
                   (a, f"chain out {{ type nat hook postrouting priority 100; tcp dport 4444 snat to {a.second}\n}}")]
            for host, chain in nat:
                subprocess.run(inside(host.container.name, "nft", f"table ip nat {{\n{chain}\n}}"), check=True, timeout=60)

        found_by_both(name, a, b, "no-fabric", "no-fabric", dial=(b.ip, 4444), prepare=prepare)

    scene("two ends on two hosts, through NAT at both", translated)
    # (a's second address is a subnet of its certificate's; its first one, and b's, are those that the session came by.)
    scene("the same of two hosts that are not listed", translated, join=True)
    scene("two ends on two hosts that are not listed", lambda name, a, b: found_by_both(name, a, b, "no-fabric", "no-fabric"), join=True)

    def relayed(name, a, b):
        target = {}
        relay = Relay(b.container.name, b.ip, lambda: target["at"])
        ends = Apart(ground, b, a, dial=(b.ip, relay.port), prepare=lambda port: target.update(at=(b.ip, port)))
        until(lambda: ends.talk(20) or a.service.status()["guests"] == 1, "the client to seek who never comes")
        for host in a, b:
            require(not matched(host, "no-fabric"), f"through a proxy: {host.service.status()}")
        ends.finish()
        note(name, "kernel", "no-peer")

    scene("two hosts, and a proxy that passes on the same bytes", relayed)

    def unknown(name, a, b):
        """b is on the list of nobody any more."""
        a.service.stop()
        a.run([a], ALLOWED, a.group)
        ends = Apart(ground, b, a)
        ends.stays("no-mirror")
        require(a.count("joined") == 0 and not matched(a, "no-fabric") and not matched(b, "no-fabric"), f"{a.service.status()}")
        ends.finish()
        note(name, "kernel", "no-mirror")

    scene("an address that belongs to no node", unknown)


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
