"""The bell that is reached by its name, between ends that share no descriptors: wake-ups by it, and without it, and what others do to it.

Each way a record is followed by exactly one wake-up, or its receiver would sleep for ever: so that bytes arrive tells that it came. Whether it
came by the bell, the kernel's count of bytes on the connection tells: a doorbell there is one.
"""

import contextlib
import os
import pathlib
import socket

import protocol
from harness import Failed, Skipped, require
from pods import OTHER, USER, python_for
from protocol import ACCEPTING, ATTACHED, CONNECTING, RINGS_BY_NAME, WANT_EVENT, Bell
from rendezvous import as_user, make_peer
from subject import RING, Pair, Steady, Subject

ROUNDS = 40  # until both are in the ring and know how the other rings
TRIPS = 200
FEW = TRIPS // 4
ATTEMPTS = 10
RINGS = 60  # far more than fit into a queue
QUEUE_MOST = 16
FLOOD, FLOODS = 4_000, 20
SLEEPS = {"RINGLET_SPIN_US": "0"}  # each wait is a sleep
WITHOUT = {"deny": [["setsockopt of SO_PASSRIGHTS", "ENOPROTOOPT"]]}


def scenes(ground):
    with ground.scene("two users ring each other by name"):
        by_name(ground, two_users(ground))
    with ground.scene("pods ring each other by name"):
        by_name(ground, two_users(ground, pod=True))
    with ground.scene("two users, of whom one takes a ring at a time"):
        by_name(ground, two_users(ground, confined={"server": {"deny": [["recvmmsg", "ENOSYS"]]}}))
    with ground.scene("two users, of whom one can't have a bell with a name"):
        by_byte(ground)
    with ground.scene("a third user who floods the names of bells"):
        flooded(ground)
    for side in (CONNECTING, ACCEPTING):
        with ground.scene(f"a sleeper that takes no ring, {'connecting' if side == CONNECTING else 'accepting'}"):
            full(ground, side)
    with ground.scene("a peer that floods the bell that it was told of"):
        flooded_by_peer(ground)
    with ground.scene("the bell of a set, full before anybody waits in it"):
        full_set(ground)
    with ground.scene("addresses that lead nowhere"):
        nowhere(ground)


def two_users(ground, pod=False, confined=None):
    if os.geteuid() != 0:
        raise Skipped("only root can become two users")
    if not protocol.refuses_descriptors():
        raise Skipped("needs SO_PASSRIGHTS (Linux 6.16)")
    python, confined = python_for(USER), confined or {}
    limits = [{"pod" if pod else "user": user, **confined.get(role, {})} for role, user in (("server", USER), ("client", OTHER))]
    roles = zip(("server", "client"), limits)
    pair = Pair(*(Subject(ground, role, env=SLEEPS, limits=limit, python=python) for role, limit in roles))
    pair.exchange(times=ROUNDS)
    require(pair.paths() == (RING, RING), f"not on the ring: {pair.reasons()}")
    return pair


def bytes_while(pair, act):
    """How many bytes came by the kernel's connection meanwhile, at each end."""
    count = [subject.do("kernel_received", number) for subject, number in pair.ends()]
    act()
    return [subject.do("kernel_received", number) - before for (subject, number), before in zip(pair.ends(), count)]


def ends_with(pair, act, wanted, message):
    """How often a sleeper sleeps at all is the machine's matter: one of a few rounds is enough."""
    for _ in range(ATTEMPTS):
        rung = bytes_while(pair, act)
        if wanted(max(rung)):
            return
    raise Failed(f"{rung} bytes rang in {TRIPS} trips{message}")


def rings_by_name(pair, act):
    # (Who is about to do something else than wait for the next message may want a byte.)
    ends_with(pair, act, lambda rung: rung < FEW, "")


def by_name(_ground, pair):
    rings_by_name(pair, lambda: pair.exchange(times=TRIPS))
    rings_by_name(pair, lambda: exchange_by(pair, "poll", TRIPS))
    pair.exchange(size=500_000, times=3)
    pair.close()
    # The home of a connection that is in a set when it moves is that set.
    pair = Pair(pair.accepting, pair.connecting)
    exchange_by(pair, "epoll", ROUNDS)
    rings_by_name(pair, lambda: exchange_by(pair, "epoll", TRIPS))


def exchange_by(pair, way, times):
    pair.accepting.ask("echo_by", pair.accepting_number, 100, times, way)
    pair.connecting.do("trips", pair.connecting_number, 100, times)
    pair.accepting.answer()


def by_byte(ground):
    for role in ("server", "client"):
        pair = two_users(ground, confined={role: WITHOUT})
        # (Or the scenes above would find no bytes wherever they look.)
        ends_with(pair, lambda: pair.exchange(times=TRIPS), lambda rung: rung >= FEW, ", without a bell")
        ground.close()


def names():
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
    return {line.split("@", 1)[1] for line in lines if "@ringlet1-bell/" in line}


def flooded(ground):
    """He sees the names, and knows no token: what he sends is dropped before it is queued, and wakes nobody."""
    pair = two_users(ground)
    targets = ["\0" + name for name in names()]
    require(len(targets) >= 2, "no bell has a name")

    def act(ready):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for size in (0, 1, 15, 16, 17, 4_000):
                for target in targets:
                    for _ in range(QUEUE_MOST * 4):
                        with contextlib.suppress(ConnectionRefusedError):  # another test's
                            sender.sendto(os.urandom(size), socket.MSG_DONTWAIT, target)
            ready()
            while True:
                for target in targets:
                    with contextlib.suppress(OSError):
                        sender.sendto(os.urandom(16), socket.MSG_DONTWAIT, target)

    with as_user("nobody", act):
        rings_by_name(pair, lambda: pair.exchange(times=TRIPS))
    pair.close()


def full(ground, side):
    """Its queue is full soon, and then each further wake-up is a byte: none is lost, and its ringer is not held up."""
    victim = Subject(ground, env=SLEEPS)
    steady = Steady(ground, victim)
    peer, number = make_peer(victim, side)
    bell = Bell()
    protocol.meet(peer, victim, number, bell.address)
    peer.start()
    victim.ask("send_back", number, 8)
    peer.send(bytes(8))
    victim.answer()
    require(peer.segment.get(1 - peer.out, ATTACHED) == RINGS_BY_NAME, "the victim does not say that it rings by name")
    peer.take_bytes()
    for _ in range(RINGS):
        peer.wish(WANT_EVENT)
        victim.do("send", number, 10)
    rung, by_byte = bell.take(), len(peer.take_bytes())
    require(0 < rung <= QUEUE_MOST, f"{rung} rings are in the queue")
    require(rung + by_byte == RINGS, f"{rung} rings and {by_byte} bytes for {RINGS} wishes")
    # There is room again.
    for _ in range(4):
        peer.wish(WANT_EVENT)
        victim.do("send", number, 10)
    require((bell.take(), len(peer.take_bytes())) == (4, 0), "the bell that was emptied does not ring")
    bell.close()
    for _ in range(4):
        peer.wish(WANT_EVENT)
        victim.do("send", number, 10)
    require(len(peer.take_bytes()) == 4, "no byte rings for a bell that is gone")
    victim.do("close", number)
    peer.close()
    steady.goes_on()


def flooded_by_peer(ground):
    """He wakes it in vain, and fills its queue; who else is there goes on, and it still hears of a record."""
    if not protocol.refuses_descriptors():
        raise Skipped("needs SO_PASSRIGHTS (Linux 6.16)")
    victim = Subject(ground, env=SLEEPS)
    steady = Steady(ground, victim)
    peer, number = make_peer(victim, ACCEPTING)
    # Where no descriptors are taken, it tells the address of its bell.
    hello = protocol.meet(peer, victim, number, takes=False)
    require(hello.bell[0] and not hello.descriptors, "the victim does not tell where its bell is")
    peer.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for _ in range(FLOODS):
            victim.ask("send_back", number, 8)
            for _ in range(FLOOD // FLOODS):
                with contextlib.suppress(BlockingIOError):
                    sender.sendto(Bell.token(hello.bell), socket.MSG_DONTWAIT, Bell.path(hello.bell[0]))
            peer.send(bytes(8))
            victim.answer()
    victim.do("close", number)
    peer.close()
    steady.goes_on()


def full_set(ground):
    """Rings that come all at once are one edge. What they leave of the queue is full, and gives no edge any more: a byte tells of it."""
    if not protocol.refuses_descriptors():
        raise Skipped("needs SO_PASSRIGHTS (Linux 6.16)")
    victim = Subject(ground, env=SLEEPS)
    peer, number = make_peer(victim, ACCEPTING)
    victim.ask("send_back_by", number, 8, "epoll")
    peer.write(bytes(8))
    require(len(peer.tcp.recv(8, socket.MSG_WAITALL)) == 8, "the victim ended the connection")
    victim.answer()
    hello = protocol.meet(peer, victim, number, takes=False)
    require(hello.bell[0], "the victim does not tell where its bell is")
    peer.start()
    peer.segment.set(peer.out, ATTACHED, RINGS_BY_NAME)

    def trip():
        victim.ask("send_back_by", number, 8, "epoll")
        peer.send(bytes(8))
        victim.answer()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:

        def ring():
            with contextlib.suppress(BlockingIOError):
                return sender.sendto(Bell.token(hello.bell), socket.MSG_DONTWAIT, Bell.path(hello.bell[0])) > 0
            return False

        trip()
        require(any(not ring() for _ in range(QUEUE_MOST)), "the queue has no end")
        for _ in range(TRIPS):
            trip()
            if ring():
                break
        else:
            raise Failed("a queue that was full once is never emptied")
    victim.do("close", number)
    peer.close()


def nowhere(ground):
    victim = Subject(ground, env=SLEEPS)
    for address in (1, 2, 3), ((1 << 64) - 1, 0, 0):
        peer, number = make_peer(victim, CONNECTING)
        protocol.meet(peer, victim, number, address)
        peer.start()
        victim.ask("send_back", number, 8)
        peer.send(bytes(8))
        victim.answer()
        require(peer.segment.get(1 - peer.out, ATTACHED) == protocol.WANT_BYTE, "the victim rings what is not there")
        victim.do("close", number)
        peer.close()
