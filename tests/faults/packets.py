"""Packets that come late, in another order, twice, or not at all: before, during and after the move, among doorbells, behind what a
full ring leaves to the kernel, and around the close. netem does it where the kernel has it; else a queue with slow classes, into which
a firewall's rule puts some of the packets, and a rule that sends a second copy."""

import contextlib
import pathlib
import socket

from ground import Ends, Skipped, address, can, queue, rules, run
from harness import require, wait_until

FIRST, SECOND = "192.0.2.1", "192.0.2.2"
PAIRS = (FIRST, SECOND, None), ("127.0.0.1", "127.0.0.1", "nobody")
MANY = 8 << 20
DOORBELLS = 10
FELT_SECONDS = 90
SEGMENTS, SEGMENT_BYTES = 16, 2000
# Some go into a queue that takes milliseconds for each, and are overtaken by the others: a byte of a small packet weighs more.
SOME = "meta l4proto tcp numgen random mod 10 < 3"
SLOW = "meta length < 300 meta priority set 1:1", "meta length >= 300 meta priority set 1:2"
RATES = {"1:1": "200kbit", "1:2": "20mbit"}


@contextlib.contextmanager
def slow_classes():
    with queue("handle", "1:", "htb"):
        for name, rate in RATES.items():
            run("tc", "class", "add", "dev", "lo", "parent", "1:", "classid", name, "htb", "rate", rate, "burst", "70", "cburst", "70")
        with rules("late", "inet", "output", *(f"{SOME} {rule}" for rule in SLOW)):
            yield


def either(netem, otherwise):
    """netem if this kernel has it."""

    @contextlib.contextmanager
    def fault():
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(queue("netem", *netem.split()))
            except Skipped:
                held.enter_context(otherwise())
            yield

    return fault


def second_copies():
    return rules("twice", "netdev", "ingress device lo", f"{SOME} dup to lo")


late = either("delay 3ms 3ms", slow_classes)
twice = either("duplicate 30%", second_copies)


def lost():
    return rules("lost", "inet", "input", "meta l4proto tcp numgen random mod 10 < 1 drop")


@contextlib.contextmanager
def everything():
    with either("delay 3ms 3ms duplicate 20%", slow_classes)(), contextlib.ExitStack() as held:
        with contextlib.suppress(Skipped):
            held.enter_context(second_copies())
        with lost():
            yield


# Each with those of the kernel's counts that grow by it.
FAULTS = {
    "late and in another order": (late, ["TCPOFOQueue"]),
    "twice": (twice, ["TCPDSACKOldSent", "TCPDSACKOfoSent"]),
    "not at all": (lost, ["TCPLostRetransmit", "TCPTimeouts", "TCPFastRetrans", "TCPSlowStartRetrans"]),
    "late, in another order, twice or not at all": (everything, ["TCPOFOQueue"]),
}


def possible():
    """Those that this kernel has."""
    found = []
    for fault, _ in FAULTS.values():
        with contextlib.suppress(Skipped), fault():
            found.append(fault)
    return found


def counted(names):
    lines = [line.split() for line in pathlib.Path("/proc/net/netstat").read_text().splitlines()]
    return sum(int(count) for heads, counts in zip(lines[::2], lines[1::2]) for head, count in zip(heads, counts) if head in names)


def felt(names):
    """A connection of the kernel's own, which goes on until its counts show that the fault is there."""
    before = counted(names)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        there, _ = listener.accept()
        with there:
            there.settimeout(FELT_SECONDS)
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def grows():
                for _ in range(SEGMENTS):
                    here.sendall(bytes(SEGMENT_BYTES))
                left = SEGMENTS * SEGMENT_BYTES
                while left:
                    left -= len(there.recv(left))
                return counted(names) > before

            wait_until(grows, FELT_SECONDS, f"one of {names} to grow")


def among(ground, server, client, user):
    """All that a connection does in its life."""
    ends = Ends(ground, server, client, user)
    ends.both("send 300000", "receive 300000")
    ends.on_ring()
    for _ in range(DOORBELLS):
        ends.tell(ends.server, "receive 8")
        ends.asleep(ends.server, looks=3)
        ends.ask(ends.client, "send 8")
        ends.answer(ends.server, "receive 8")
    # Nobody reads: what the ring does not hold waits in the kernel, behind the doorbells.
    ends.tell(ends.client, f"send {MANY}")
    ends.overflown(ends.client)
    ends.ask(ends.server, f"receive {MANY}")
    ends.answer(ends.client, "send")
    ends.both("trade 3000000 2000000", "trade 2000000 3000000")
    ends.talk()
    ends.finish()


def scenes(ground):
    exercised = []
    for name, (fault, names) in FAULTS.items():
        with ground.scene(f"packets that come {name}"), address(FIRST), address(SECOND):
            with fault():
                felt(names)
                for pair in PAIRS:
                    among(ground, *pair)
            exercised.append(name)
    with ground.scene("some of it could be done here"):
        require(exercised, "of packets nothing could be harmed")
