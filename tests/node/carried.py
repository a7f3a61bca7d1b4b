"""Two who may not share memory, and whom the policy has carried: each has a segment of its own, which a process of the service's keeps in step with the other's."""

import array
import contextlib
import json
import mmap
import os
import pathlib
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time

from ground import ANSWER_SECONDS
from harness import frame, framed, require
from hostile import COME, MET, NODE, come, connection, message, rights
from lease import held_up
from service import fields
from world import ALONE, Across, Service, inside, note, own_group, until, world

AGAIN = pathlib.Path(__file__).resolve().parent / "again_actor.py"
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
    """All of them, and theirs."""
    listed = "".join(each.read_text() for each in pathlib.Path(f"/proc/{pid}/task").glob("*/children"))
    return [found for child in map(int, listed.split()) for found in (child, *children(child))]


def is_alive(pid):
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


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


ADAPTER, GREETING, LINK, JOIN, LINKED = 5, 1, 2, 3, 4
RING_BYTES = 64 << 10
PUBLISHED = 8080
LINGER_SECONDS = 3600
SO_PASSRIGHTS = 83
# Of a segment (ringlet-core/src/layout.rs).
CONTROL_OFFSET, SLOTS_OFFSET = 512, 4096


def received(line):
    """(There are credentials beside the descriptors.)"""
    data, control, _, _ = line.recvmsg(1000, 1000)
    fds = array.array("i")
    for level, kind, body in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(body)
    return data, list(fds)


class Tenant:
    """An end that is carried, and that we play: its connection, and its lifeline."""

    def __init__(self, service, held, accepting):
        self.connection = held
        with come(service) as guest:
            require(framed(guest.recv(1000), NODE)[0] == 1, "not greeted")
            guest.sendmsg([message(COME, accepting)], rights(held))
            yield_to = guest.dup()
        self.guest = yield_to
        self.guest.settimeout(ANSWER_SECONDS)

    def met(self):
        data, fds = received(self.guest)
        require(framed(data, NODE)[0] == MET and len(fds) == 2, f"{data}, {len(fds)} descriptors")
        self.channel, self.line = (socket.socket(fileno=fd) for fd in fds)
        self.line.settimeout(ANSWER_SECONDS)
        with contextlib.suppress(OSError):
            self.line.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
        data = self.line.recv(1000)
        require(framed(data, ADAPTER)[0] == GREETING, "who carries does not greet")
        return self

    def say(self, kind, shown=(), ring_bytes=RING_BYTES, bell=0):
        with contextlib.suppress(OSError):
            self.line.sendmsg([frame(ADAPTER, kind, struct.pack("<4QI3Q", ring_bytes, 0, 0, 0, 0, bell, 0, 0))], rights(*shown))

    def linked(self, kind, *rope, bell=0):
        """Its segment."""
        self.say(kind, [self.connection, *rope], bell=bell)
        data, fds = received(self.line)
        require(framed(data, ADAPTER)[0] == LINKED and len(fds) == 1, f"{data}, {len(fds)} descriptors")
        return fds[0]

    def is_parted(self):
        with contextlib.suppress(ConnectionError):
            return self.line.recv(1000) == b""
        return True

    def close(self):
        for each in self.line, self.channel, self.connection, self.guest:
            each.close()


def tenants(service):
    """The connecting one, and the accepting one."""
    near, far = connection()
    one, other = Tenant(service, near, 0), Tenant(service, far, 1)
    return one.met(), other.met()


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

    def alone(host, name, service):
        """Through a published port, and of pid, mount and user namespaces of their own."""
        server, client = host.container(), host.container()
        publish = lambda port: host.publish(PUBLISHED, server, port)  # noqa: E731
        ends = Across(ground, server.name, client.name, server.ip, (host.gate(), PUBLISHED), ALONE, ALONE, publish)
        on_ring(ends)
        traded(ends)
        ends.finish()
        note(name, "carried")

    def cut(host, name, service):
        """What rings them waits for the network as TCP does, or the lease has lapsed: they go on when it passes packets again."""
        server, client = host.container(), host.container()
        ends = Across(ground, server.name, client.name, server.ip)
        on_ring(ends)
        chains = [(hook, f"type filter hook {hook} priority 0;\nmeta l4proto tcp drop") for hook in ("input", "output")]
        host.rules(client.name, "cut", *chains)
        held_up(ends)
        host.within(client.name, "nft", "delete table ip cut")
        for end in ends.client, ends.server:
            ends.answer(end, "held up")
        traded(ends, 300_000, 300_000)
        ends.finish()
        note(name, "either", "byte-exact")

    def service_killed(host, name, service):
        """What is carried goes on; when it is over, so is who carried."""
        ends = meet(host)
        between = carrier(service)
        # (As `systemctl kill -s HUP` does, to all of them.)
        keeper = int(fields(pathlib.Path(f"/proc/{between}"))["PPid"])
        for pid in keeper, between:
            os.kill(pid, signal.SIGHUP)
        traded(ends)
        require(is_alive(keeper) and carrier(service) == between, f"ended by a signal that only the service reads: {service.told()}")
        ends.trade(20_000_000, 20_000_000)
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait(ANSWER_SECONDS)
        ends.traded()
        require(not ends.problem, f"{ends.problem}")
        traded(ends)
        # (Who was slow for a while may be on the way back.)
        on_ring(ends)
        service.stop()
        service.start()
        earlier = lambda: service.status()["earlier_carriers"]  # noqa: E731
        require(earlier() == [between], f"what is told of {between}: {earlier()}")
        ends.finish()
        until(lambda: not is_alive(between), "the carrier to end behind its last connection")
        require(earlier() == [], f"what is told of it then: {earlier()}")
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
            # (They may be on their way to another one.)
            reasons = {row["reason"] for row in ends.rows()}
            require(reasons <= {"no-adapter", "young", "carried"}, f"they do not know that their carrier has died: {ends.told()}")
            ends.finish()
            until(lambda: service.status()["carrier"]["pid"] not in (None, between), "another carrier")  # noqa: B023
        told = service.status()
        require(told["carrier"]["lost"] == 8 and told["decisions"]["carrier-lost"] == 8, f"{told}")
        note(name, "kernel", "no-adapter")

    def crowd(host, how, count=4, before=(), fork=()):
        """A server and a client that wait by level or by edge, the port, and what they say of the connections."""
        server, client = host.container(), host.container()
        actor = ["/usr/bin/python3", "-u", AGAIN]
        serves = ground.start("server", [*before, *inside(server.name, *actor, "serve", server.ip, how, *fork)])
        port = int(serves.line(ANSWER_SECONDS))
        asks = ground.start("client", [*before, *inside(client.name, *actor, "ask", server.ip, str(port), how, str(count))])

        def all_carried(ends):
            """(All but the idle one.)"""
            rows = [row for row in ground.ringlet.own_connections(port) if (row["path"], row["reason"]) == ("ring", "carried")]
            for each in serves, asks:
                require(each.poll() is None, f"it has ended: {each.tail()}")
            return len(rows) >= ends

        until(lambda: all_carried(2 * (count - 1)), "them to be carried")
        return serves, asks, port, all_carried

    def ends_well(serves, asks):
        asks.write("end\n")
        answer = asks.line(ANSWER_SECONDS)
        require(answer == "ok", f"{answer}: {asks.tail()} {serves.tail()}")
        until(lambda: asks.poll() == 0 and serves.poll() == 0, "both to end")
        for each in asks, serves:
            ground.put_away(each)

    def idles(serves, asks):
        asks.write("idle\n")
        answer = asks.line(ANSWER_SECONDS)
        require(answer == "idle", f"{answer}: {asks.tail()} {serves.tail()}")

    def comes_again(host, name, service):
        """Who waits by level, and by edge: all bytes, and each connection is carried again, the one that was idle meanwhile when it is used."""
        for how in "level", "edge":
            serves, asks, _, all_carried = crowd(host, how)
            idles(serves, asks)
            for _ in range(3):
                between = carrier(service)
                time.sleep(ground.random.random() / 2)
                os.kill(between, signal.SIGKILL)
                until(lambda: service.status()["carrier"]["pid"] not in (None, between), "another carrier")  # noqa: B023
                until(lambda: all_carried(6), "them to be carried again")  # noqa: B023
                until(lambda: idles(serves, asks) or all_carried(8), "the idle one to be carried again")  # noqa: B023
            ends_well(serves, asks)
            until(lambda: carried(service) == 0, "what was carried to be over")
        note(name, "carried", "again")

    def shared_meanwhile(host, name, service):
        """One that a child holds too stays on the kernel, until that has gone."""
        serves, asks, port, all_carried = crowd(host, "level", fork=["fork"])
        asks.write("fork\n")
        child = int(serves.line(ANSWER_SECONDS))
        between = carrier(service)
        os.kill(between, signal.SIGKILL)
        until(lambda: service.status()["carrier"]["pid"] not in (None, between), "another carrier")

        def on_kernel():
            rows = ground.ringlet.own_connections(port)
            return rows and not any(row["path"] == "ring" for row in rows)

        def shared():
            require(on_kernel(), f"one is carried: {ground.ringlet.own_connections(port)}")
            return any(row["reason"] == "shared" for row in ground.ringlet.own_connections(port))

        # (Each finds at its own pace that its carrier has died.)
        until(on_kernel, "all to be on the kernel")
        until(shared, "it to be told that they are shared")
        os.kill(child, signal.SIGKILL)
        until(lambda: all_carried(6), "them to be carried again")
        ends_well(serves, asks)
        note(name, "carried", "again")

    def replaced(name, keeps):
        """All of the service is killed, as with its container, and another one started."""
        with own_group(ground.ringlet.command) as (group, into):
            more = ["--cgroup", group, *(["--keep-notes"] if keeps else [])]
            forget = [ground.ringlet.command, "node", "forget", "--cgroup", group]
            with Service(ground.ringlet.command, ground.directory, ISOLATED, more=more) as service, world() as host:
                serves, asks, port, all_carried = crowd(host, "edge", before=into)
                for _ in range(2):
                    parts = [service.process.pid, *children(service.process.pid)]
                    for pid in parts:
                        # (What carries nothing ends by itself behind its service.)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    service.stop()
                    time.sleep(ground.random.random())
                    service.start()
                    if keeps:
                        until(lambda: all_carried(6), "them to be carried again")
                    else:
                        until(lambda: service.status()["decisions"].get("no-note"), "them to ask")  # noqa: B023
                ends_well(serves, asks)
                require(keeps or not any(row["path"] == "ring" for row in ground.ringlet.own_connections(port)), "carried by whom?")
            forgets = subprocess.run(forget, capture_output=True, text=True)
            require((forgets.returncode, forgets.stdout.startswith("what was kept")) == (0, keeps), f"{forgets}")
            note(name, "carried" if keeps else "kernel", "again" if keeps else "no-note")

    def carrier_hung(host, name, service):
        """It is ended, and another one started."""
        for turn in range(2):
            ends = meet(host)
            pid = carrier(service)
            ends.trade(20_000_000, 20_000_000)
            os.kill(pid, signal.SIGSTOP)
            ends.traded()
            require(not ends.problem, f"{ends.problem}; {ends.told()}")
            until(lambda: not is_alive(pid), "what hangs to be ended")  # noqa: B023
            traded(ends, 300_000, 300_000)
            ends.finish()
            require(carrier(service) != pid, "the same carrier")
            require(service.status()["carrier"]["lost"] == turn + 1, f"{service.status()}")
        note(name, "kernel", "no-adapter")

    def all_stand_still(host, name, service):
        """As in a container that is paused: nobody is there to end what hangs. The two go on without it, and when it goes on it does them no harm."""
        for _ in range(4):
            ends = meet(host)
            parts = [service.process.pid, *children(service.process.pid)]
            ends.trade(20_000_000, 20_000_000)
            for pid in parts:
                os.kill(pid, signal.SIGSTOP)
            try:
                ends.traded()
                require(not ends.problem, f"{ends.problem}; {ends.told()}")
            finally:
                for pid in parts:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            traded(ends, 300_000, 300_000)
            ends.finish()
            until(lambda: carried(service) == 0, "what was carried to be over")
        note(name, "kernel", "no-adapter")

    def carrier_killed_early(host, name, service):
        """While they are introduced, join, or move."""
        for turn in range(16):
            between = carrier(service)
            server, client = host.container(), host.container()
            ends = Across(ground, server.name, client.name, server.ip)
            ends.tell(ends.server, "echo 200")
            ends.tell(ends.client, "ask 200")
            for _ in range(turn):
                carried(service)
            os.kill(between, signal.SIGKILL)
            ends.answer(ends.client, "ask")
            ends.answer(ends.server, "echo")
            traded(ends, 500_000, 500_000)
            ends.finish()
            until(lambda: service.status()["carrier"]["pid"] not in (None, between), "another carrier")  # noqa: B023
        note(name, "either", "byte-exact")

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

    def exhausted(host, name, service):
        """Who carries can take no more: those that it could not take are not counted, and it goes on when it can."""
        ends = meet(host)
        between = carrier(service)
        most = resource.prlimit(between, resource.RLIMIT_NOFILE)
        resource.prlimit(between, resource.RLIMIT_NOFILE, (1, most[1]))
        for _ in range(20):
            near, far = connection()
            one, other = Tenant(service, near, 0), Tenant(service, far, 1)
            for each in one, other:
                data, fds = received(each.guest)
                require(framed(data, NODE)[0] == MET and len(fds) == 2, f"{data}, {len(fds)} descriptors")
                channel, line = (socket.socket(fileno=fd) for fd in fds)
                line.settimeout(ANSWER_SECONDS)
                with contextlib.suppress(ConnectionError):
                    require(line.recv(1000) == b"", "it is greeted by who has no descriptor for it")
                for held in channel, line, each.guest, each.connection:
                    held.close()
        until(lambda: carried(service) == 1, "those that could not be taken to be over")
        resource.prlimit(between, resource.RLIMIT_NOFILE, most)
        traded(meet(host))
        traded(ends)
        require(carrier(service) == between, "the carrier died")
        note(name, "carried")

    def redis(host, name, service):
        server, client = host.container(), host.container()
        argv = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", ground.directory]
        process = ground.start("server", inside(server.name, *argv))
        ask = inside(client.name, "redis-cli", "-h", server.ip, "ping")
        until(lambda: subprocess.run(ask, capture_output=True).stdout == b"PONG\n", "redis to listen")
        bench = inside(client.name, "redis-benchmark", "-h", server.ip, "-t", "set,get", "-c", "8", "-n", "100000", "-q")
        ground.ringlet.carried = True
        try:
            ground.client(bench, ring=(6379, 16))
        finally:
            ground.ringlet.carried = False
        require(process.poll() is None, "redis died")
        require(service.status()["decisions"].get("carried"), f"nobody was carried: {service.status()}")
        note(name, "carried")

    scene("two that may not share memory are carried", apart)
    scene("two of different users are carried", users)
    scene("two of namespaces of their own are carried, through a published port", alone)
    scene("a rule is added later that drops the packets of two that are carried", cut)
    scene("redis-benchmark and redis, carried", redis)
    scene("what carries has given up what it does not need", confined)
    scene("who carries has no descriptor left", exhausted)
    scene("more are to be carried than the policy admits", limited, f"{ISOLATED}[limits]\ncarried_of_a_pod = 1\n")
    def beside(host, name, service, play):
        """Honest ones do not notice, before, meanwhile and afterwards; and the carrier lives."""
        ends = meet(host)
        between = carrier(service)
        ends.trade(10_000_000, 10_000_000)
        left = play(service)
        ends.traded()
        require(not ends.problem, f"{ends.problem}; {ends.told()}")
        ends.talk(300)
        # (Who was slow for a while may be on the way back.)
        on_ring(ends)
        traded(meet(host))
        for each in left or ():
            each.close()
        require(carrier(service) == between, "the carrier died")
        ends.finish()
        note(name, "carried")

    def liars(host, name, service):
        random = ground.random

        def play(service):
            for attempt in range(150):
                one, other = tenants(service)
                unix = socket.socketpair()
                bell = os.eventfd(0)
                shown = random.choice([[], [one.line], [unix[0]], [one.connection] * 2, [one.connection, unix[0]], [one.connection, *unix]])
                lie = attempt % 8
                match lie:
                    case 0:
                        one.say(LINK, [one.connection])  # for the other one to say
                    case 1:
                        one.say(JOIN, [one.connection])  # for a link that there is not
                    case 2:
                        other.say(LINK, [other.connection], ring_bytes=1 << 30)
                    case 3:
                        other.say(LINK, [other.connection], ring_bytes=random.randrange(1 << 18) | 1)
                    case 4:
                        other.say(LINK, shown)
                    case 5:
                        one.line.sendmsg([random.randbytes(random.randrange(1, 150))], rights(one.connection))
                    case 6:
                        other.line.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [bell] * 9))])
                    case 7:
                        other.linked(LINK)
                        one.say(JOIN, [one.connection], ring_bytes=2 * RING_BYTES)
                require(one.is_parted() and other.is_parted(), f"a liar is not parted with: {lie}")
                one.close()
                other.close()
                for each in unix:
                    each.close()
                os.close(bell)
            until(lambda: carried(service) == 1, "all liars to be gone")

        beside(host, name, service, play)

    def scribblers(host, name, service):
        """What they write into their segments, and how often they ring, is theirs to bear."""
        random = ground.random

        def play(service):
            held = [tenants(service) for _ in range(8)]
            areas = []
            for one, other in held:
                for fd in other.linked(LINK), one.linked(JOIN):
                    areas.append(mmap.mmap(fd, os.fstat(fd).st_size))
                    os.close(fd)
            for _ in range(300):
                for area in areas:
                    at = random.choice([random.randrange(8192), random.randrange(len(area) - 256)])
                    area[at : at + 64] = random.randbytes(64)
                for pair in held:
                    for each in pair:
                        with contextlib.suppress(OSError):
                            each.line.send(b"ring", socket.MSG_DONTWAIT)
            # As fast as it goes.
            for pair in held:
                each = pair[0].line
                for _ in range(2000):
                    with contextlib.suppress(OSError):
                        each.send(b"", socket.MSG_DONTWAIT)
            return [each for pair in held for each in pair]

        beside(host, name, service, play)

    def unclosable(host, name, service):
        """Connections whose close waits for as long as their holders like; and those whose lock is held."""

        def play(service):
            held = []
            for turn in range(12):
                one, other = tenants(service)
                os.close(other.linked(LINK))
                segment = one.linked(JOIN)
                area = mmap.mmap(segment, os.fstat(segment).st_size)
                os.close(segment)
                near = one.connection
                near.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        near.send(bytes(1 << 20))
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
                # (The carrier has the last.)
                near.close()
                if turn % 2:
                    one.line.close()
                else:
                    # All words of its control lines, of which one says that it has parted: the carrier is to let go.
                    area[CONTROL_OFFSET:SLOTS_OFFSET] = b"\1" * (SLOTS_OFFSET - CONTROL_OFFSET)
                    one.line.send(b"ring")
                    require(one.is_parted() and other.is_parted(), "a link that hangs is not given up")
                held += [one, other]
            return held

        beside(host, name, service, play)

    def bells(host, name, service):
        """What is to ring them rings nobody, waits, or can't be closed."""

        def unclosable(other):
            near, far = connection()
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(bytes(1 << 20))
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
            with contextlib.suppress(OSError):
                other.sendmsg([b"x"], rights(near))
            near.close()
            return far

        def play(service):
            held = []
            for bell, kind in enumerate(("full", "full", "unclosable", "unclosable", "gone", "reads none")):
                one, other = tenants(service)
                mine, rope = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
                mine.bind(b"\0ringlet1-bell/%016x" % bell)
                rope.bind("")
                rope.connect(mine.getsockname())
                mine.connect(rope.getsockname())
                if kind == "full":
                    rope.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            rope.send(b"x")
                    rope.setblocking(True)
                elif kind == "unclosable":
                    held.append(unclosable(mine))
                elif kind == "gone":
                    mine.close()
                os.close(other.linked(LINK, rope, bell=bell))
                segment = one.linked(JOIN, rope, bell=bell)
                area = mmap.mmap(segment, os.fstat(segment).st_size)
                os.close(segment)
                rope.close()
                # All words of its control lines: all wishes, for bells too.
                area[CONTROL_OFFSET:SLOTS_OFFSET] = b"\3" * (SLOTS_OFFSET - CONTROL_OFFSET)
                for each in one, other:
                    with contextlib.suppress(OSError):
                        each.line.send(b"ring")
                held += [mine, one, other]
            return held

        beside(host, name, service, play)

    def senders(host, name, service):
        """Descriptors whose close waits for as long as their holders like, shown where one is due, where none is, and too many."""

        def clogged():
            near, far = connection()
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(bytes(1 << 20))
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
            return near, far

        def play(service):
            held = []
            for turn in range(8):
                one, other = tenants(service)
                if turn % 2:
                    os.close(other.linked(LINK))
                    os.close(one.linked(JOIN))
                made = [clogged() for _ in range((1, 2, 4, 9)[turn // 2])]
                # (Until ours are closed: who closes last waits.)
                os.kill(between, signal.SIGSTOP)
                try:
                    one.line.sendmsg([b"x"], rights(*[near for near, _ in made]))
                except OSError:
                    # (The kernel refuses it, and who closes them last are we.)
                    for near, _ in made:
                        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                for near, far in made:
                    near.close()
                    held.append(far)
                os.kill(between, signal.SIGCONT)
                held += [one, other]
            return held

        between = carrier(service)
        beside(host, name, service, play)

    name = "before Linux 6.16, beside tenants that send what can't be closed"
    denied = json.dumps({"deny": [["setsockopt of SO_PASSRIGHTS", "ENOPROTOOPT"]]})
    old = [sys.executable, str(pathlib.Path(__file__).resolve().parent.parent / "hostile/confine.py"), denied]
    with ground.scene(name), Service(ground.ringlet.command, ground.directory, ISOLATED, before=old) as service, world() as host:
        senders(host, name, service)

    name = "a service that had two capabilities to begin with has two carried"
    least = ["setpriv", "--bounding-set=-all,+bpf,+net_admin", "--inh-caps=-all"]
    with ground.scene(name), Service(ground.ringlet.command, ground.directory, ISOLATED, before=least) as service, world() as host:
        apart(host, name, service)
        confined(host, name, service)

    name = "who starts carriers is killed"
    with ground.scene(name), Service(ground.ringlet.command, ground.directory, ISOLATED) as service, world() as host:
        ends = meet(host)
        keeper = next(line.split()[1] for line in pathlib.Path(f"/proc/{carrier(service)}/status").read_text().splitlines() if line.startswith("PPid:"))
        os.kill(int(keeper), signal.SIGKILL)
        until(lambda: service.process.poll() is not None, "the service to end, and be started again")
        require("who starts carriers has died" in service.told(), f"what it says: {service.told()}")
        traded(ends)
        # (Who was slow for a while may be on the way back.)
        on_ring(ends)
        ends.finish()
        note(name, "carried")

    scene("beside liars, what is carried is carried", liars)
    scene("beside tenants that write and ring what they like", scribblers)
    scene("beside tenants whose connections can't be closed", unclosable)
    scene("beside tenants whose bells ring nobody or can't be closed", bells)
    scene("beside tenants that send what can't be closed", senders)
    scene("the service is killed while it has two carried", service_killed)
    scene("who carries is killed at any moment", carrier_killed_early)
    scene("who carries is killed, with bytes on their way", carrier_killed)
    scene("who carries is killed, and what it carried is carried again", comes_again)
    scene("who carries is killed while a child holds a connection too", shared_meanwhile)
    for keeps in True, False:
        name = f"all of the service is killed, and another one comes that {'goes on with' if keeps else 'knows nothing of'} its notes"
        with ground.scene(name):
            replaced(name, keeps)
    scene("who carries hangs, with bytes on their way", carrier_hung)
    scene("all of the service stands still, with bytes on their way, and goes on", all_stand_still)
