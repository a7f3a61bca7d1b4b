"""Two who may not share memory, and whom the policy has carried: each has a segment of its own, which a process of the service's keeps in step with the other's."""

import os
import pathlib
import re
import signal
import subprocess

from harness import require
from world import Across, Service, inside, note, until, world

ISOLATED = 'same_pod = false\notherwise = "isolated"\n'


def memory(pid):
    """What it has mapped, or holds, of memory that can be shared with others: inodes of memfds."""
    place = pathlib.Path(f"/proc/{pid}")
    mapped = re.findall(r" (\d+) +/memfd:", (place / "maps").read_text())
    held = set()
    for each in (place / "fd").iterdir():
        try:
            if os.readlink(each).startswith("/memfd:"):
                held.add(str(each.stat().st_ino))
        except OSError:
            continue
    return set(mapped) | held


def children(pid):
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def carrier(service):
    """The pid of the living one."""
    until(lambda: service.status()["carrier"]["pid"], "a carrier")
    return service.status()["carrier"]["pid"]


def carried(service):
    return service.status()["carrier"]["connections"]


def on_ring(ends):
    ends.on_ring()
    reasons = {row["reason"] for row in ends.rows()}
    require(reasons == {"carried"}, f"not carried: {ends.told()}")


def scenes(ground):
    def scene(name, play, policy=ISOLATED):
        with ground.scene(name), Service(ground.ringlet.command, ground.directory, policy) as service, world() as host:
            play(host, name, service)
            require(service.process.poll() is None, f"the service died: {service.told()}")

    def meet(host, **more):
        server, client = host.container(), host.container()
        ends = Across(ground, server.name, client.name, server.ip, **more)
        on_ring(ends)
        return ends

    def traded(ends, there=3_000_000, back=2_000_000):
        ends.trade(there, back)
        ends.traded()
        require(not ends.problem, f"{ends.problem}; {ends.told()}")

    def apart(host, name, service):
        ends = meet(host)
        traded(ends)
        ends.talk(300)
        between = carrier(service)
        server, client, middle = memory(ends.server.pid), memory(ends.client.pid), memory(between)
        require(not server & client, f"they share {server & client}")
        require(len(server & middle) == len(client & middle) == 1, f"a segment of each: {server & middle}, {client & middle}")
        require(carried(service) == 1, f"carried: {service.status()}")
        ends.finish()
        until(lambda: carried(service) == 0, "what was carried to be over")
        note(name, "carried")

    def users(host, name, service):
        """They see no user of each other's."""
        as_user = lambda number: ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"]  # noqa: E731
        ends = meet(host, before_server=as_user(12345), before_client=as_user(12346))
        traded(ends)
        require(not memory(ends.server.pid) & memory(ends.client.pid), "they share memory")
        ends.finish()
        note(name, "carried")

    def service_killed(host, name, service):
        """What is carried goes on; when it is over, so is who carried."""
        ends = meet(host)
        between = carrier(service)
        ends.trade(20_000_000, 20_000_000)
        service.stop()
        ends.traded()
        require(not ends.problem, f"{ends.problem}")
        traded(ends)
        require([row["path"] for row in ends.rows()] == ["ring", "ring"], f"not on the ring: {ends.told()}")
        ends.finish()
        until(lambda: not pathlib.Path(f"/proc/{between}/exe").exists(), "the carrier to end behind its last connection")
        service.start()
        again = meet(host)
        traded(again)
        again.finish()
        note(name, "carried")

    def carrier_killed(host, name, service):
        for _ in range(8):
            ends = meet(host)
            between = carrier(service)
            ends.trade(30_000_000, 30_000_000)
            os.kill(between, signal.SIGKILL)
            ends.traded()
            require(not ends.problem, f"{ends.problem}; {ends.told()}")
            traded(ends, 300_000, 300_000)
            reasons = {row["reason"] for row in ends.rows()}
            require(reasons == {"no-adapter"}, f"they do not know that their carrier has died: {ends.told()}")
            ends.finish()
            until(lambda: service.status()["carrier"]["pid"] not in (None, between), "another carrier")  # noqa: B023
        told = service.status()
        require(told["carrier"]["lost"] == 8 and told["decisions"]["carrier-lost"] == 8, f"{told}")
        note(name, "kernel", "no-adapter")

    def confined(host, name, service):
        between = carrier(service)
        status = pathlib.Path(f"/proc/{between}/status").read_text()
        said = dict(line.split(":\t", 1) for line in status.splitlines())
        require((said["Seccomp"], said["NoNewPrivs"]) == ("2", "1"), f"not confined: {said}")
        for field in "CapEff CapPrm CapInh CapAmb".split():
            require(int(said[field], 16) & ~(1 << 24) == 0, f"{field}: {said[field]}")
        note(name, "carried")

    def limited(host, name, service):
        """One more than a pod may have stays on the kernel, until another is over."""
        first = meet(host)
        server, client = host.container(), host.container()
        Across(ground, server.name, client.name, server.ip).stays_apart(name, "node-full")
        first.finish()
        until(lambda: carried(service) == 0, "the first to be over")
        meet(host).finish()

    def redis(host, name, service):
        server, client = host.container(), host.container()
        argv = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", ground.directory]
        process = ground.start("server", inside(server.name, *argv))
        ask = inside(client.name, "redis-cli", "-h", server.ip, "ping")
        until(lambda: subprocess.run(ask, capture_output=True).stdout == b"PONG\n", "redis to listen")
        bench = inside(client.name, "redis-benchmark", "-h", server.ip, "-t", "set,get", "-c", "8", "-n", "100000", "-q")
        ground.client(bench, ring=(6379, 16))
        require(process.poll() is None, "redis died")
        require(service.status()["decisions"].get("carried"), f"nobody was carried: {service.status()}")
        note(name, "carried")

    scene("two that may not share memory are carried", apart)
    scene("two of different users are carried", users)
    scene("redis-benchmark and redis, carried", redis)
    scene("what carries has given up what it does not need", confined)
    scene("more are to be carried than the policy admits", limited, f"{ISOLATED}[limits]\ncarried_of_a_pod = 1\n")
    scene("the service is killed while it has two carried", service_killed)
    scene("who carries is killed, with bytes on their way", carrier_killed)
