"""The ways by which two containers of one host are connected: whatever rewrites addresses on it, the two ends of one connection meet."""

import contextlib
import subprocess

import bpf
from harness import require
from world import ALONE, Across, Service, inside, note, until, world

PUBLISHED = 8080


def scenes(ground):
    def scene(name, play):
        with ground.scene(name), Service(ground.ringlet.command, ground.directory) as service, world() as host:
            play(host, name)
            told = service.status()
            require(told["decisions"].get("met"), f"nobody has met: {told['decisions']}")
            require(told["guests"] == 0 and told["waiting"] == 0, f"somebody is left: {told}")

    def plain(host, name):
        server, client = host.container(), host.container()
        Across(ground, server.name, client.name, server.ip).meets(name)

    def six(host, name):
        server, client = host.container(), host.container()
        Across(ground, server.name, client.name, server.six).meets(name)

    def published(host, name):
        server, client = host.container(), host.container()
        publish = lambda port: host.publish(PUBLISHED, server, port)  # noqa: E731
        Across(ground, server.name, client.name, server.ip, (host.gate(), PUBLISHED), prepare=publish).meets(name)

    def from_host(host, name):
        server = host.container()
        publish = lambda port: host.publish(PUBLISHED, server, port)  # noqa: E731
        Across(ground, server.name, host.host, server.ip, ("127.0.0.1", PUBLISHED), prepare=publish).meets(name)

    def hairpin(host, name):
        server = host.container()
        publish = lambda port: host.publish(PUBLISHED, server, port)  # noqa: E731
        Across(ground, server.name, server.name, server.ip, (host.gate(), PUBLISHED), prepare=publish).meets(name)

    def redirect(host, name):
        """A sidecar: what its neighbour sends to anywhere comes to it."""
        pod, elsewhere = host.container(), host.container()

        def catch(port):
            rule = f"ip daddr {elsewhere.ip} tcp dport {PUBLISHED} redirect to :{port}"
            host.rules(pod.name, "sidecar", ("own", f"type nat hook output priority -100;\n{rule}"))

        Across(ground, pod.name, pod.name, "0.0.0.0", (elsewhere.ip, PUBLISHED), prepare=catch).meets(name)

    def rewritten(host, name):
        """Before the packet is made, as some networks of containers do; what the program asks for later is told it back."""
        server, client = host.container(), host.container()
        service = (host.gate(), PUBLISHED)
        try:
            with bpf.group() as group, contextlib.ExitStack() as held:

                def rewrite(port):
                    held.enter_context(bpf.in_place_of(group, bpf.CGROUP_INET4_CONNECT, service, (server.ip, port)))
                    held.enter_context(bpf.in_place_of(group, bpf.CGROUP_INET4_GETPEERNAME, (server.ip, port), service))

                Across(ground, server.name, client.name, server.ip, service, prepare=rewrite).meets(name)
        finally:
            bpf.remove_groups()

    def alone(host, name):
        server, client = host.container(), host.container()
        Across(ground, server.name, client.name, server.ip, before_server=ALONE, before_client=ALONE).meets(name)

    def to_host(host, name):
        client = host.container()
        Across(ground, host.host, client.name, host.gate()).meets(name)

    def redis(host, name):
        server, client = host.container(), host.container()
        argv = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", ground.directory]
        process = ground.start("server", inside(server.name, *argv))
        ask = inside(client.name, "redis-cli", "-h", server.ip, "ping")
        until(lambda: subprocess.run(ask, capture_output=True).stdout == b"PONG\n", "redis to listen")
        bench = inside(client.name, "redis-benchmark", "-h", server.ip, "-t", "set,get", "-c", "8", "-n", "100000", "-q")
        ground.client(bench, ring=(6379, 16))
        require(process.poll() is None, "redis died")
        note(name, "met")

    scene("two containers on a bridge", plain)
    scene("the same by IPv6", six)
    scene("a published port: DNAT and masquerade", published)
    scene("a published port from the host's loopback", from_host)
    scene("a published port of one's own: hairpin", hairpin)
    scene("REDIRECT to a sidecar in the pod", redirect)
    scene("an address that is rewritten at connect, and hidden", rewritten)
    scene("a container and the host", to_host)
    scene("pid, mount and user namespaces of their own", alone)
    scene("redis-benchmark and redis in two containers", redis)
