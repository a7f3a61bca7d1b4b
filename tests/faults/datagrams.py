"""Datagrams between two addresses of this machine move; those that are led elsewhere, or whose address has moved away, stay on the kernel."""

import contextlib

from ground import ANSWER_SECONDS, Ends, address, address_gone, can, rules, run
from harness import require, wait_until

FIRST, SECOND, V6, V6_SECOND = "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"


class Sockets(Ends):
    """One that answers, and one that asks."""

    def __init__(self, ground, server_ip, client_ip, awake=""):
        self._ground, self.ip, self.port = ground, server_ip, 0
        self._argv = self.argv()
        self.server = self.client = ground.start("server", self._argv)
        self.port = int(self.ask(self.server, f"bind {server_ip}"))
        self.ask(self.server, f"answer_all right {awake}")
        self.client = ground.start("client", self._argv)
        self.asking_port = int(self.ask(self.client, f"bind {client_ip}"))

    def paths(self):
        """Of the socket that asks, if it is on a way that is shown: one without lanes is not."""
        return {row["path"] for row in self._ground.ringlet.own_connections(self.asking_port)}

    def on_ring(self):
        def moved():
            self.ask(self.client, f"who 50 {self.ip} {self.port}")
            return self.paths() == {"ring"}

        wait_until(moved, ANSWER_SECONDS, lambda: f"datagrams on the ring; {self.told()}")


@contextlib.contextmanager
def subnet(*addresses):
    """All in one net, of which the first is the primary address of its interface."""
    run("ip", "link", "add", "net", "type", "veth", "peer", "name", "far")
    try:
        for each in addresses:
            run("ip", "address", "add", f"{each}/24", "dev", "net")
        for end in "net", "far":
            run("ip", "link", "set", end, "up")
        yield
    finally:
        can("ip", "link", "del", "net")


def scenes(ground):
    for server, client in (FIRST, SECOND), (FIRST, "127.0.0.1"), ("127.0.0.1", SECOND), (FIRST, FIRST), ("127.0.0.2", "127.0.0.3"):
        with ground.scene(f"from {client} to {server}"), address(FIRST), address(SECOND):
            Sockets(ground, server, client).on_ring()

    with ground.scene("between the addresses of one net"), subnet(FIRST, SECOND):
        Sockets(ground, SECOND, FIRST).on_ring()
        Sockets(ground, FIRST, SECOND).on_ring()

    with ground.scene("between two addresses of IPv6"):
        for each in V6, V6_SECOND:
            run("ip", "address", "add", f"{each}/128", "dev", "lo", "nodad")
        Sockets(ground, V6, V6_SECOND).on_ring()

    for client in FIRST, "0.0.0.0":
        with ground.scene(f"from {client} to an address that moves to another machine"), address(FIRST), address(SECOND):
            ends = Sockets(ground, SECOND, client, "awake")
            ends.on_ring()
            with address_gone(SECOND):

                def by_kernel():
                    # (It has no route there, and says so.)
                    return ends.ask(ends.client, f"shout 2000 {SECOND} {ends.port}") == "2000"

                wait_until(by_kernel, ANSWER_SECONDS, lambda: f"datagrams that leave their lane; {ends.told()}")

    with ground.scene("one address of a socket that has all leads elsewhere"), address(FIRST), address(SECOND):
        ends = Sockets(ground, "0.0.0.0", FIRST, "awake")
        other = ground.start("other", ends._argv)
        ends.server, server = other, ends.server
        port = int(ends.ask(other, f"bind {FIRST}"))
        ends.ask(other, "answer_all other")
        rule = f"ip daddr {SECOND} udp dport {ends.port} dnat to {FIRST}:{port}"
        with rules("faults", "ip", "output", rule, kind="nat", priority=-100):
            answers = ends.ask(ends.client, f"who 3000 {FIRST} {ends.port} {SECOND} {ends.port}")
            require(answers == f"{FIRST}=right {SECOND}=other", answers)
        ends.server = server
