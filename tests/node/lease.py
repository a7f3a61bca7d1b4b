"""The network between two that were introduced stops passing packets: then what they say waits for it, as by TCP, and none of it is lost. When it passes
them again they come back to shared memory."""

import time

from harness import require
from world import Across, Service, note, until, world

# Some terms of a lease.
RENEWED_SECONDS = 5


def scenes(ground):
    def scene(name, cut, mend, renewed=False):
        with ground.scene(name), Service(ground.ringlet.command, ground.directory), world() as host:
            server, client = host.container(), host.container()
            ends = Across(ground, server.name, client.name, server.ip)
            ends.on_ring()
            if renewed:
                talked_to = time.monotonic() + RENEWED_SECONDS
                while time.monotonic() < talked_to:
                    ends.talk(500)
                require([row["path"] for row in ends.rows()] == ["ring", "ring"], f"not on the ring: {ends.told()}")
            cut(host, client)
            held_up(ends)
            require("lease" in [row["reason"] for row in ends.rows()], f"held up, but not by the lease: {ends.told()}")
            mend(host, client)
            for end in ends.client, ends.server:
                ends.answer(end, "held up")
            ends.trade(300_000, 300_000)
            ends.traded()
            ends.on_ring()
            require(not ends.problem, f"{ends.problem}")
            ends.finish()
            note(name, "met")

    def drop(*hooks):
        chains = [(hook, f"type filter hook {hook} priority 0;\nmeta l4proto tcp drop") for hook in hooks]
        return lambda host, client: host.rules(client.name, "cut", *chains)

    def passed_again(host, client):
        host.within(client.name, "nft", "delete table ip cut")

    def link(state):
        return lambda host, client: host.within(client.name, "ip", "link", "set", "eth0", state)

    scene("a rule is added later that drops their packets", drop("input", "output"), passed_again, renewed=True)
    scene("a rule is added later that drops the packets of one", drop("input"), passed_again)
    scene("the link goes down", link("down"), link("up"))


def held_up(ends):
    """Talks on until no answer comes any more."""
    silent = 0

    def is_silent():
        nonlocal silent
        if not silent:
            ends.tell(ends.server, "echo 500")
            ends.tell(ends.client, "ask 500")
        said = ends.client.line(1)
        if said is not None:
            require(not said.startswith("failed:"), f"client: {said}; {ends.told()}")
            ends.answer(ends.server, "echo")
        silent = silent + 1 if said is None else 0
        return silent > 1

    until(is_silent, "an exchange that the border holds up")
