"""One of two guests with a cable between them, which are hosts of a cluster; the other one is switched off at the end."""

import contextlib
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import time

import host
import hosts
import rails
from ground import run
from harness import require
from nodes import ALLOWED
from world import Service, until

ADDRESSES = {"a": "10.92.0.1", "b": "10.92.0.2"}
NODE, PLAIN, CONTROL = 7471, 7472, 7473
# A host that is switched off is missed after 5 s; this is for a machine that has other work.
SOON = 120
# What TCP is to show by itself, where it was asked to.
USER_TIMEOUT_MS = 3000


def scenes(ground):
    name, other, ip, peer = cable(ground)

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

    with ground.scene("node services join, and one host is switched off"), service(ground, name) as here:
        joins(here, other)
        if name == "b":
            is_switched_off(ip)
        else:
            host.hear()
            misses(here, other, peer)


def cable(ground):
    """The network between both guests, and soft-RoCE upon it: our name, the other one's, and the addresses."""
    name = ground.options.name
    other = "b" if name == "a" else "a"
    with ground.scene("a cable"):
        run("/run/modprobe", "-a", "virtio_net", "rdma_rxe", "rdma_ucm")
        run("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0")
        host.say("up")
        host.hear()
    return name, other, ADDRESSES[name], ADDRESSES[other]


def joins(here, other):
    require(here.service.runs(), f"it does not start: {here.service.told()}")
    until(lambda: here.peer(other)["state"] == "joined", f"{other} to join: {here.service.told()}")
    host.tell(f"{other} has joined")


class Here:
    """This guest's service, and what `hosts` asks of one."""

    def __init__(self, service, group):
        self.service, self.group = service, group

    def before(self):
        return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(self.group)]

    def peer(self, name):
        return {each["node"]: each for each in self.service.status()["cluster"]["peers"]}[name]


def service(ground, name):
    """As it would be run, but for what the host has made: certificates."""
    place = pathlib.Path(ground.directory)
    identity, group = place / "identity", pathlib.Path(f"/sys/fs/cgroup/ringlet-lab-{name}")
    shutil.copytree(ground.options.kernel.parent / "identities" / name, identity)
    group.mkdir()
    nodes = ", ".join(f'{{name = "{each}", address = "{at}:{NODE}", subnets = []}}' for each, at in ADDRESSES.items())
    cluster = f'[cluster]\nnode = "{name}"\nlisten = "{ADDRESSES[name]}:{NODE}"\ndirectory = "{identity}"\nnodes = [{nodes}]\n'
    rails_here = f'rails = [{{provider = "{rails.VERBS}", address = "{ADDRESSES[name]}"}}]\n'
    return running(Service(ground.ringlet.command, place, cluster + rails_here + ALLOWED), group)


@contextlib.contextmanager
def running(service, group):
    with service:
        yield Here(service, group)


def is_switched_off(ip):
    with socket.create_server((ip, PLAIN)) as listener:
        host.say("listens")
        held = [listener.accept()[0] for _ in range(2)]
        host.say("joined")
        # Until the power fails.
        host.hear()
        require(False, f"it is still on, with {held}")


def misses(here, other, peer):
    with contextlib.ExitStack() as held:
        plain, asked = (held.enter_context(socket.create_connection((peer, PLAIN), timeout=SOON)) for _ in range(2))
        asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        host.say("joined")
        host.hear()
        began = time.monotonic()
        for each in plain, asked:
            each.sendall(b"is anybody there?")
        until(lambda: here.peer(other)["state"] == "unreachable", f"{other} to be missed: {here.service.told()}")
        host.tell(f"missed after {time.monotonic() - began:.1f} s; the service says silent for 5 s: {here.peer(other)['why']!r}")
        cluster = here.service.status()["cluster"]
        require(cluster["decisions"].get("unreachable") == 1, f"it says it more than once: {cluster}")
        # TCP goes on trying, and says nothing of it.
        require(plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0, "TCP shows an error by itself")
        plain.sendall(b"more")
        [unacknowledged] = struct.unpack_from("I", plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)
        require(unacknowledged > 0, "somebody has acknowledged it")
        asked.settimeout(SOON)
        try:
            got = asked.recv(1)
        except TimeoutError as problem:
            require(problem.errno is not None, "no error within the limit")
            host.tell(f"TCP with a limit of {USER_TIMEOUT_MS / 1000:g} s of its own shows {problem.strerror!r}")
        else:
            require(False, f"a host that is off has sent {got}")
        hosts.lives(here)
