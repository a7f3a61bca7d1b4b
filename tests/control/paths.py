"""`ringlet off` and `ringlet on`, on programs in every state."""

import os
import re
import signal
import time

from control import End
from harness import CLIENT_SECONDS, START_SECONDS, Skipped, free_port, listening, needs, require, wait_until
from wire import Wire

WINDOW_MESSAGES = 200
MOVES = 12


def scenes(ground):
    for name, targets in {
        "of the server": lambda server, client: [server.pid],
        "of the client": lambda server, client: [client.pid],
        "of a connection": lambda server, client: [client.name],
        "of one end": lambda server, client: [f"127.0.0.1:{client.port}"],
        "of all": lambda server, client: ["--all"],
    }.items():
        with ground.scene(f"busy, {name}"):
            busy(ground, targets)
    for way in ("recv", "poll", "select", "epoll"):
        with ground.scene(f"blocked in {way}"):
            idle(ground, way)
    with ground.scene("stopped"):
        idle(ground, "recv", during=signal.SIGSTOP, after=signal.SIGCONT)
    with ground.scene("computing"):
        idle(ground, "recv", during=signal.SIGUSR1)
    with ground.scene("back and forth while bytes stream and the ring is full"):
        stream(ground)
    with ground.scene("what begins later, and children"):
        later(ground)
    with ground.scene("before the first message"):
        young(ground)
    with ground.scene("by a user who can reach one end only"):
        one_end(ground)
    with ground.scene("datagrams"):
        datagrams(ground)
    with ground.scene("redis"):
        redis(ground)
    with ground.scene("nothing there"):
        ground.command("off", 4194305, status=1)
        ground.command("on", "127.0.0.1:1", status=1)
        ground.command("off", "nonsense", status=2)


def seen(client, act):
    """Which numbers went over the wire while `act` ran, as requests and as answers."""
    with Wire() as wire:
        act()
    return wire.numbers(b"Q", client.port), wire.numbers(b"R", client.port)


def window(client):
    """Whole round trips that certainly began and ended while we looked, and those that the wire carried."""
    numbers = []

    def act():
        first = client.do("now")
        wait_until(lambda: client.do("now") > first + WINDOW_MESSAGES, CLIENT_SECONDS, "round trips")
        numbers.extend(range(first + 2, client.do("now")))

    requests, answers = seen(client, act)
    return set(numbers), set(requests), set(answers)


def command(ground, word, target, outcomes, user=None):
    """Busy connections are moved at once; if the machine leaves their programs without a processor, they are taken for idle."""

    def done():
        got = [row["outcome"] for row in ground.json(word, *target, user=user)]
        require(set(got) <= {*outcomes, "next-message", "after-next-message"}, f"{word}: {got}")
        return got == outcomes

    wait_until(done, START_SECONDS, f"{word} {target} to be done")


def busy(ground, targets):
    server, client = ground.pair()
    target = targets(server, client)
    client.do("run")
    for _ in range(3):
        command(ground, "off", target, ["kernel"])
        require(ground.paths(client) == {"kernel"}, f"ss: {ground.ringlet.connections(client.port)}")
        expected, requests, answers = window(client)
        require(expected <= requests and expected <= answers, "off, and messages did not go through the kernel")
        command(ground, "on", target, ["ring"])
        expected, requests, answers = window(client)
        require(not requests and not answers, f"on, and {len(requests)} messages went through the kernel")
    client.do("stop")


def idle(ground, way, during=None, after=None):
    server, client = ground.pair(way)
    for _ in range(3):
        if during:
            server.process.send(during)
        [moved] = ground.json("off", server.pid)
        require(moved["outcome"] == "next-message", f"off: {moved}")
        number = client.do("now")

        def trip():
            client.ask("send 1")
            if after:
                server.process.send(after)
            client.line()

        requests, answers = seen(client, trip)
        require(requests == answers == [number + 1], f"the next message: {requests} and {answers} on the wire")
        require(ground.paths(client) == {"kernel"}, "not on the kernel after a message")
        [moved] = ground.json("off", server.pid)
        require(moved["outcome"] == "kernel", f"off again: {moved}")
        [moved] = ground.json("on", server.pid)
        require(moved["outcome"] == "next-message", f"on: {moved}")
        ground.await_path(client, "ring")
        requests, answers = seen(client, lambda: client.do("send 5"))
        require(requests == answers == [], "on, and messages went through the kernel")


def stream(ground):
    port = free_port()
    sink = End(ground, "sink", port, "0.05")
    wait_until(lambda: listening(port), START_SECONDS, "the sink to listen")
    source = End(ground, "source", port, 200_000_000, ground.random.randrange(1, 100_000), "on", role="client")
    for _ in range(MOVES):
        target = ground.random.choice([source.pid, sink.pid])
        word = ground.random.choice(["off", "on"])
        ground.command(word, target, "--timeout", "0.3", status=None)
        time.sleep(ground.random.uniform(0, 0.05))
    require(source.process.line(0) is None, "it had ended before")
    source.ask("enough")
    sums = {source.line(), sink.line()}
    require(len(sums) == 1, f"the checksums differ: {sums}")


def later(ground):
    server, first = ground.pair("fork")
    ground.command("off", server.pid)
    second = End(ground, "client", first.server_port, role="client")
    second.port = int(second.line())
    requests, answers = seen(second, lambda: second.do("send 40"))
    require(requests == answers == list(range(1, 41)), "a later connection of a child did not stay on the kernel")
    rows = ground.ringlet.connections(second.port)
    [child] = [row for row in rows if row["pid"] != second.pid]
    require((child["path"], child["reason"]) == ("kernel", "paused"), f"{rows}")
    ground.command("on", server.pid, child["pid"])
    ground.await_path(second, "ring")


def young(ground):
    port = free_port()
    server = End(ground, "server", port, "recv")
    wait_until(lambda: listening(port), START_SECONDS, "a server to listen")
    require("No connection yet" in ground.command("off", server.pid), "off of a server without connections")
    client = End(ground, "client", port, role="client")
    client.port = int(client.line())
    requests, answers = seen(client, lambda: client.do("send 40"))
    require(requests == answers == list(range(1, 41)), "it moved")
    # Long enough for the peer to give up looking for the other end.
    for _ in range(3):
        client.do("send 600")
        time.sleep(0.8)
    client.do("send 600")
    [moved] = ground.json("on", server.pid)
    ground.await_path(client, "ring")


def one_end(ground):
    if os.geteuid() != 0 or not os.path.exists("/proc/self/uid_map"):
        raise Skipped("not root")
    if len(open("/proc/self/uid_map").read().split()) != 3 or "4294967295" not in open("/proc/self/uid_map").read():
        raise Skipped("no second user in this namespace")
    server, client = ground.pair(user="nobody")
    for busily in (True, False):
        if busily:
            client.do("run")
        rows = ground.json("off", server.pid, user="nobody")
        require(len(rows) == 1 and len(rows[0]["programs"]) == 1, f"{rows}")
        if busily:
            command(ground, "off", [server.pid], ["kernel"], user="nobody")
            expected, requests, answers = window(client)
            require(expected <= requests and expected <= answers, "off, and messages did not go through the kernel")
            client.do("stop")
        else:
            require(rows[0]["outcome"] == "after-next-message", f"{rows}")
            number = client.do("now")
            requests, answers = seen(client, lambda: client.do("send 2"))
            require(answers == [number + 1, number + 2], f"what this end sends: {answers}")
            require(requests == [number + 2], f"what the other end sends: {requests}")
        ground.command("on", server.pid, user="nobody")
        ground.await_path(client, "ring")


def datagrams(ground):
    """Each socket by itself: what it sends, and once it has left its lanes, what it receives."""
    port = free_port()
    server = End(ground, "datagrams", port)
    server.line()
    client = End(ground, "client", port, "udp", role="client")
    client.port = int(client.line())
    both = [server.pid, client.pid]

    def on_ring():
        rows = ground.ringlet.connections(port)
        return any(row["path"] == "ring" and row["pid"] == client.pid for row in rows)

    for _ in range(3):
        client.do("run")
        wait_until(on_ring, START_SECONDS, "lanes")
        wait_until(lambda: {row["outcome"] for row in ground.json("off", *both)} == {"kernel"}, START_SECONDS, "off")
        expected, requests, answers = window(client)
        require(expected <= requests and expected <= answers, "off, and datagrams did not go through the kernel")
        client.do("stop")
        ground.command("on", *both)


def redis(ground):
    needs("redis-server", "redis-benchmark")
    arguments = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    with ground.server(lambda port: ["redis-server", "--port", port, *arguments]) as server:
        benchmark = ["redis-benchmark", "-p", server.port, "-c", 8, "-n", 2_000_000_000, "-t", "set", "-d", 100]
        client = ground.start("client", benchmark)

        def on_ring():
            ends = ground.ringlet.connections(server.port)
            return len(ends) >= 16 and {row["path"] for row in ends} == {"ring"}

        wait_until(on_ring, START_SECONDS, "eight connections on the ring")
        for _ in range(3):
            command(ground, "off", [server.pid], ["kernel"] * 8)
            requests = set()

            def all_seen():
                with Wire() as wire:
                    time.sleep(0.1)
                requests.update(ports for ports, stream in wire.streams.items() if b"SET" in stream)
                return len(requests) == 8

            wait_until(all_seen, START_SECONDS, "requests of eight connections on the wire")
            command(ground, "on", [server.pid], ["ring"] * 8)
            with Wire() as wire:
                calls = sum(row["calls"] for row in ground.ringlet.connections(server.port))
                more = lambda: sum(row["calls"] for row in ground.ringlet.connections(server.port)) > calls + 1000
                wait_until(more, START_SECONDS, "requests")
            there = re.findall(b"SET", b"".join(wire.streams.values()))
            require(not there, f"{len(there)} requests are on the wire")
        require(client.poll() is None, f"the benchmark ended\n{client.tail()}")
        ground.put_away(client)
