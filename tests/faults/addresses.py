"""Connections between two addresses of this machine move; one whose far end is not what its address says stays on the kernel."""

from ground import Ends, address, rules

FIRST, SECOND, ELSEWHERE = "192.0.2.1", "192.0.2.2", "192.0.2.9"


def rewritten(ip, port, to_ip, to_port):
    """What is sent to one place goes to another, as behind a proxy or a service's address."""
    rule = f"ip daddr {ip} tcp dport {port} dnat to {to_ip}:{to_port}"
    return rules("faults", "ip", "output", rule, kind="nat", priority=-100)


def scenes(ground):
    for server, client in (FIRST, SECOND), (FIRST, "127.0.0.1"), ("127.0.0.1", SECOND), (FIRST, FIRST), ("127.0.0.2", "127.0.0.3"):
        with ground.scene(f"from {client} to {server}"), address(FIRST), address(SECOND):
            ends = Ends(ground, server, client)
            ends.on_ring()
            ends.both("receive 3000000", "send 3000000")
            ends.finish()

    with ground.scene("an address that leads elsewhere, where another program listens"), address(FIRST), address(ELSEWHERE):
        other = Ends.listener(ground, "0.0.0.0")
        ends = Ends.listener(ground, FIRST)
        with rewritten(ELSEWHERE, other.port, FIRST, ends.port):
            ends.connect(ELSEWHERE, other.port)
            ends.stays("not-local")
            ends.finish()
        other.put_away()
