"""The kernel's counts are no longer what was written: transmissions fail on this machine, or bytes go past TCP. Before the move the
connection stays on the kernel; after it, no byte is lost."""

import json
import pathlib
import shutil

import bpf
from ground import ANSWER_SECONDS, Ends, address, address_gone, dropped_by_rule, queue
from harness import require, wait_until

CONFINE = pathlib.Path(__file__).resolve().parent.parent / "hostile/confine.py"
IP = "192.0.2.1"
MANY = 8 << 20


def after_a_loss(ends):
    """All that was sent arrives, whichever way it goes."""
    ends.ask(ends.server, "receive 8")
    ends.stays("miscounted")
    ends.both(f"receive {MANY}", f"send {MANY}")
    ends.both("send 400000", "receive 400000")
    ends.finish()


def without_bells_by_name(ground):
    """Before a program: it can't have a bell that is reached by its name, so it is rung by bytes on the connection."""
    confine = shutil.copy2(CONFINE, ground.directory)
    return ["/usr/bin/python3", confine, json.dumps({"deny": [["setsockopt of SO_PASSRIGHTS", "ENOPROTOOPT"]]})]


def scenes(ground):
    with ground.scene("an address that is gone for a while, before the move"), address(IP):
        ends = Ends(ground, IP)
        ends.talk(1)
        with address_gone(IP):
            ends.send_in_vain(ends.client, 8)
        after_a_loss(ends)

    with ground.scene("the same at the accepting side"), address(IP):
        ends = Ends(ground, IP)
        ends.talk(1)
        with address_gone(IP):
            ends.send_in_vain(ends.server, 8)
        ends.ask(ends.client, "receive 8")
        ends.stays("miscounted")
        ends.finish()

    with ground.scene("a firewall's rule that drops what goes out, before the move"):
        ends = Ends(ground, "127.0.0.1")
        ends.talk(1)
        with dropped_by_rule(ends.port):
            ends.send_in_vain(ends.client, 8)
        after_a_loss(ends)

    with ground.scene("a BPF program that drops what goes out, before the move"):
        with bpf.group() as group:
            ends = Ends(ground, "127.0.0.1")
            ends.talk(1)
            with bpf.dropping(group):
                ends.send_in_vain(ends.client, 8)
            after_a_loss(ends)

    with ground.scene("a queue that is too short (tbf), before the move"):
        ends = Ends(ground, "127.0.0.1")
        before = ends.counts(ends.client)
        with queue("tbf", "rate", "50mbit", "burst", "70k", "latency", "1ms"):

            def overrun():
                ends.both("receive 400000", "send 400000")
                return ends.has_failed(ends.client, before)

            wait_until(overrun, ANSWER_SECONDS, "a queue that is too short")
        ends.both("receive 8", "send 8")
        ends.stays("miscounted")
        ends.finish()

    # Users of whom one does not trust the other ring by bytes on the connection, where the kernel knows no SO_PASSRIGHTS.
    with ground.scene("an address that is gone while a doorbell is rung, then more than the ring holds"), address(IP):
        ends = Ends(ground, IP, client_user="nobody", before=without_bells_by_name(ground))
        ends.on_ring()
        before = ends.counts(ends.client)
        for _ in range(3):
            with address_gone(IP):
                ends.tell(ends.server, "receive 8")
                ends.asleep(ends.server)
                ends.ask(ends.client, "send 8")
                ends.await_failure(ends.client, before)
            ends.answer(ends.server, "receive 8")
            before = ends.counts(ends.client)
        # Nobody reads: what the ring does not hold waits in the kernel, behind the doorbells.
        ends.tell(ends.client, f"send {MANY}")
        ends.overflown(ends.client)
        ends.ask(ends.server, f"receive {MANY}")
        ends.answer(ends.client, "send")
        ends.both("send 400000", "receive 400000")
        ends.finish()

    with ground.scene("a socket whose bytes go past TCP (a BPF sockmap)"):
        ends = Ends(ground, "127.0.0.1")
        with bpf.past_tcp(ends.number(ends.client), ends.number(ends.server)):
            ends.talk(2)
            require(ends.counts(ends.client)[0] == 0, "the kernel counts what the sockmap takes")
            ends.stays("miscounted")
            ends.both("receive 100000", "send 100000")
            ends.talk(100)
            ends.finish("finish again")
