"""A network's ports in containers that have no other network, as the README says how."""

import json
import subprocess

from engine import ENGINE_SECONDS, Engine
from harness import require, wait_until

GIVEN = "--network none --cap-add NET_ADMIN --device /dev/net/tun -v /run/ringlet/ethernet:/run/ringlet/ethernet".split()


def scenes(ground):
    with ground.scene("an image of this machine's programs, for an Ethernet"):
        engine = Engine(ground)

    def eth(*words):
        done = subprocess.run([ground.ringlet.command, "eth", *words], capture_output=True, text=True, timeout=ENGINE_SECONDS)
        require(done.returncode == 0, f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def inside(container, *words):
        done = container.execute(*words)
        require(done.returncode == 0, f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def port():
        return engine.container("ringlet", "eth", "up", "vnet0", "--network", "blue", given=GIVEN)

    def address(container, number):
        wait_until(lambda: "ready" in container.logs() or container.inspect(".State.Running") != "true", ENGINE_SECONDS, "a device")
        require(container.inspect(".State.Running") == "true", container.logs())
        inside(container, "ip", "address", "add", f"10.11.0.{number}/24", "dev", "vnet0")

    def ports():
        (network,) = json.loads(eth("ls", "--json"))
        return network["ports"]

    with ground.scene("two containers on an Ethernet"):
        eth("create", "blue")
        with port() as one:
            with port() as other:
                address(one, 1)
                address(other, 2)
                inside(one, "ping", "-n", "-c", "3", "-s", "60000", "10.11.0.2")
                require([len(port["peers"]) for port in ports()] == [1, 1], f"{ports()}")
                # A server in one, and a program in the other.
                inside(other, *"redis-server --bind 0.0.0.0 --protected-mode no --daemonize yes".split())
                wait_until(lambda: "PONG" in one.execute("redis-cli", "-h", "10.11.0.2", "ping").stdout, ENGINE_SECONDS, "an answer")
                told = inside(one, "redis-benchmark", "-h", "10.11.0.2", "-t", "get", "-n", "2000", "-q")
                require("requests per second" in told, told)
            wait_until(lambda: "NO-CARRIER" in inside(one, "ip", "link", "show", "vnet0"), ENGINE_SECONDS, "a device without a carrier")
            require(len(ports()) == 1, f"{ports()}")
            with port() as other:
                address(other, 2)
                inside(one, "ping", "-n", "-c", "3", "10.11.0.2")
                # Ended from within, as from the host.
                inside(other, "ringlet", "eth", "down", "vnet0")
                wait_until(lambda: other.inspect(".State.Running") == "false", ENGINE_SECONDS, "a port to end")
        wait_until(lambda: not ports(), ENGINE_SECONDS, "no ports")
        eth("delete", "blue")
