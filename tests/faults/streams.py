"""Many streams at once, both ways, while faults come and go; every byte is compared, and what the ends hold must not grow."""

import contextlib
import random
import shutil
import signal
import threading
import time

import ground as tools
import packets
from ground import Ends, address, require

FIRST, SECOND = "192.0.2.1", "192.0.2.2"
PAIRS = [
    # server's and client's address, the client's user; users that don't trust each other ring by bytes on the connection
    (FIRST, FIRST, None),
    (FIRST, SECOND, None),
    ("127.0.0.1", SECOND, "nobody"),
    ("127.0.0.1", "127.0.0.1", "nobody"),
]
ROUNDS_OF_A_PAIR = 4
MOST_BYTES = 6 << 20
# Of ringlet's own, which it keeps for threads and sets to come (with the page and the ready boards of its contexts, each a descriptor and a mapping).
FOR_LATER = 10
FAULT_SECONDS = 0.02, 0.4


def dropped(hook, what=""):
    """Packets that a firewall takes away: at the output the sender is told so, at the input nobody is."""
    return tools.rules("faults", "ip", hook, f"meta l4proto tcp {what} drop")


@contextlib.contextmanager
def stopped(process):
    process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)


def a_fault(draw, pairs, of_packets, addresses=(FIRST, SECOND)):
    """One that is drawn, and ends when it is left. `addresses`: those that may go for a while."""
    port = draw.choice(pairs).port
    faults = [
        lambda: tools.address_gone(draw.choice(addresses)),
        lambda: tools.dropped_by_rule(port),
        lambda: dropped("output"),
        lambda: dropped("input"),
        lambda: dropped("output", "numgen random mod 10 < 2"),
        lambda: dropped("input", "numgen random mod 10 < 2"),
        lambda: tools.queue("tbf", "rate", "200mbit", "burst", "100k", "latency", "2ms"),
        lambda: stopped(draw.choice([draw.choice(pairs).server, draw.choice(pairs).client])),
    ]
    return draw.choice(faults + of_packets)()


def a_round(draw, pairs, of_packets):
    """All send and receive; faults come and go until all is there."""
    for pair in pairs:
        there, back = (draw.randrange(1, MOST_BYTES) for _ in range(2))
        pair.trade(there, back)
    answers = [threading.Thread(target=pair.traded) for pair in pairs]
    for answer in answers:
        answer.start()
    while any(answer.is_alive() for answer in answers):
        with a_fault(draw, pairs, of_packets):
            time.sleep(draw.uniform(*FAULT_SECONDS))
        # Long enough for what was lost to be sent again: faults without a pause are no network.
        time.sleep(draw.uniform(0.05, 0.5))
    for pair in pairs:
        if pair.problem:
            raise pair.problem


def scenes(ground):
    with ground.scene("streams while faults come and go"), address(FIRST), address(SECOND):
        draw = random.Random(f"{ground.seed}/streams")
        of_packets = packets.possible()
        deadline = time.monotonic() + ground.options.seconds
        rounds = moved = 0
        held = []
        while time.monotonic() < deadline or rounds == 0:
            pairs = [Ends(ground, server, client, user) for server, client, user in PAIRS]
            for number, pair in enumerate(pairs):
                # Signals, whose handler the interrupted call survives or not.
                pair.ask(pair.client, f"ticks 0.01 {number % 2}")
                pair.ask(pair.server, f"ticks 0.013 {1 - number % 2}")
            for _ in range(ROUNDS_OF_A_PAIR):
                a_round(draw, pairs, of_packets)
                rounds += 1
            moved += sum(row["path"] == "ring" for pair in pairs for row in pair.rows())
            held.append([int(pair.ask(end, "held")) for pair in pairs for end in (pair.server, pair.client)])
            for pair in pairs:
                pair.finish()
            require(
                all(now <= first + FOR_LATER for now, first in zip(held[-1], held[0])),
                f"descriptors and mappings were {held[0]}, are {held[-1]} after {rounds} rounds",
            )
        print(f"        {rounds} rounds of {len(PAIRS)} streams, {moved} ends seen on the ring", flush=True)

    with ground.scene("no address space for a ring"):
        ends = Ends.listener(ground, "127.0.0.1")
        ends.ask(ends.server, "no_more_space")
        ends.connect("127.0.0.1", ends.port)
        ends.stays("no-memory")
        ends.both("receive 3000000", "send 3000000")
        ends.finish()

    with ground.scene("ends whose clocks are days apart"):
        if shutil.which("unshare") is None or not tools.can("unshare", "-T", "--monotonic", "100000", "true"):
            raise tools.Skipped("no namespaces of time")
        ends = Ends.listener(ground, "127.0.0.1")
        ends.connect("127.0.0.1", ends.port, before=["unshare", "-T", "--monotonic", "1000000", "--boottime", "1000000"])
        ends.on_ring()
        ends.both("receive 9000000", "send 9000000")
        ends.both("send 9000000", "receive 9000000")
        ends.talk()
        ends.finish()
