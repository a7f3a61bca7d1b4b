"""A guest whose network card is a port of `ringlet eth`: it pings its host's device, and streams to it and from it."""

import json

import host
from ground import run

ADDRESS, PEER = "10.7.0.2/24", "10.7.0.1"
SECONDS = "4"


def iperf(*words):
    end = json.loads(run("iperf3", "-J", "-t", SECONDS, "-c", PEER, *words))["end"]
    return end["sum_received"]["bits_per_second"] / 1e9


def scenes(ground):
    with ground.scene("a card that is a port"):
        run("/run/modprobe", "virtio_net")
        # (The largest MTU that a device of the host's has: what is cut is cut there.)
        run("ip", "link", "set", "eth0", "up")
        run("ip", "address", "add", ADDRESS, "dev", "eth0")
        host.say("up")
        host.hear()
        for size in "56", "1472", "9000", "65000":
            run("ping", "-n", "-c", "3", "-i", "0.05", "-w", "60", "-s", size, PEER)
        told = run("ping", "-n", "-q", "-c", "200", "-i", "0.005", "-w", "60", PEER)
        host.tell(told.strip().splitlines()[-1])
        for what, words in ("to the host", ()), ("from the host", ("-R",)):
            host.tell(f"TCP {what}: {iperf(*words):.2f} Gbit/s")
        host.say("measured")
        host.hear()
