"""One of two guests with a cable between them, which are hosts of a cluster; the other one is switched off at the end."""

import contextlib
import os
import pathlib
import socket
import struct
import subprocess
import time

import host
import rails
from ground import run
from harness import require
from world import Service, until

ADDRESSES = {"a": "10.92.0.1", "b": "10.92.0.2"}
NODE, PLAIN, CONTROL = 7471, 7472, 7473
# A host that is switched off is missed after 5 s; this is for a machine that has other work.
SOON = 120
# What TCP is to show by itself, where it was asked to.
USER_TIMEOUT_MS = 3000


def scenes(ground):
    name = ground.options.name
    other = "b" if name == "a" else "a"
    ip, peer = ADDRESSES[name], ADDRESSES[other]

    with ground.scene("a cable"):
        run("/run/modprobe", "-a", "virtio_net", "rdma_rxe", "rdma_ucm")
        run("ip", "address", "add", f"{ip}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0")
        host.say("up")
        host.hear()
        run("ping", "-c", "1", "-W", str(SOON), peer)

    with ground.scene("a transport over verbs between two hosts, whose endpoints are closed in the middle"):
        program = str(ground.options.kernel.parent / "programs/carried")
        at = f"listen {ip}:{CONTROL}" if name == "a" else f"connect {peer}:{CONTROL}"
        more = {"RINGLET_TEST_RAILS": f"{rails.VERBS} {ip}", "RINGLET_TEST_AT": at}
        if name == "b":
            host.hear()
        with subprocess.Popen([program, "--nocapture"], stdout=subprocess.PIPE, text=True, env={**os.environ, **more}) as process:
            said = ""
            for line in process.stdout:
                said += line
                if name == "a" and line.strip().endswith("listens"):
                    host.say("listens")
            require(process.wait(rails.PROGRAM_SECONDS) == 0 and "1 passed" in said, said)

    place = pathlib.Path(ground.directory)
    nodes = ", ".join(f'{{name = "{each}", address = "{at}:{NODE}", subnets = []}}' for each, at in ADDRESSES.items())
    identity = ground.options.kernel.parent / "identities" / name
    policy = f'[cluster]\nnode = "{name}"\nlisten = "{ip}:{NODE}"\ndirectory = "{identity}"\nnodes = [{nodes}]\n'

    with ground.scene("two node services join; one host is switched off"), Service(ground.ringlet.command, place, policy) as service:
        require(service.runs(), f"it does not start: {service.told()}")

        def peers():
            return {each["node"]: each for each in service.status()["cluster"]["peers"]}

        until(lambda: peers()[other]["state"] == "joined", f"{other} to join: {service.told()}")
        if name == "b":
            with socket.create_server((ip, PLAIN)) as listener:
                host.say("listens")
                held = [listener.accept()[0] for _ in range(2)]
                host.say("joined")
                # Until the power fails.
                host.hear()
                require(False, f"it is still on, with {held}")
        host.hear()
        with contextlib.ExitStack() as held:
            plain, asked = (held.enter_context(socket.create_connection((peer, PLAIN), timeout=SOON)) for _ in range(2))
            asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
            host.say("joined")
            host.hear()
            began = time.monotonic()
            for each in plain, asked:
                each.sendall(b"is anybody there?")
            until(lambda: peers()[other]["state"] == "unreachable", f"{other} to be missed: {service.told()}")
            host.tell(f"missed after {time.monotonic() - began:.1f} s; the service says silent for 5 s: {peers()[other]['why']!r}")
            require(service.status()["cluster"]["decisions"].get("unreachable") == 1, f"it says it more than once: {service.status()['cluster']}")
            # TCP goes on trying, and says nothing of it.
            require(plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0, "TCP shows an error by itself")
            plain.sendall(b"more")
            [unacknowledged] = struct.unpack_from("I", plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)
            require(unacknowledged > 0, "somebody has acknowledged it")
            asked.settimeout(SOON)
            try:
                got = asked.recv(1)
                require(False, f"a host that is off has sent {got}")
            except TimeoutError as problem:
                require(problem.errno is not None, "no error within the limit")
                host.tell(f"TCP with a limit of {USER_TIMEOUT_MS / 1000:g} s of its own shows {problem.strerror!r}")
