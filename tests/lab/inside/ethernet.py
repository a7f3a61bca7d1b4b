"""What Debian's kernel puts on an Ethernet: TIPC, and a bond, on devices of `ringlet eth` in network namespaces."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import host

sys.path[1:1] = [str(pathlib.Path(__file__).resolve().parents[2] / "eth")]

import networks  # noqa: E402
from ground import run  # noqa: E402
from harness import require, wait_until  # noqa: E402

LIMIT_SECONDS = 120
PYTHON = "/usr/bin/python3"
# As tipcbench's: a service that answers, and one that counts. (TIPC's messages have 66,000 bytes at most.)
SIZES = [1, 16, 256, 1024, 4096, 8192, 16384, 65536]
TRIPS, MESSAGES = 100, 200
SERVES = """
import socket
listener = socket.socket(socket.AF_TIPC, socket.SOCK_SEQPACKET)
listener.bind((socket.TIPC_ADDR_NAMESEQ, 4711, 1, 1, socket.TIPC_CLUSTER_SCOPE))
listener.listen(8)
print("ready", flush=True)
while True:
    peer, _ = listener.accept()
    size, trips, messages = map(int, peer.recv(100).split())
    for _ in range(trips):
        peer.send(peer.recv(66000))
    whole = all(peer.recv(66000) == bytes([count % 251]) * size for count in range(messages))
    peer.send(b"whole" if whole else b"other bytes")
    peer.close()
"""
ASKS = """
import socket, sys, time
trips, messages, *sizes = map(int, sys.argv[1:])
for size in sizes:
    peer = socket.socket(socket.AF_TIPC, socket.SOCK_SEQPACKET)
    peer.settimeout(60)
    peer.connect((socket.TIPC_ADDR_NAME, 4711, 1, 0, socket.TIPC_CLUSTER_SCOPE))
    peer.send(b"%d %d %d" % (size, trips, messages))
    message = b"x" * size
    began = time.monotonic()
    for _ in range(trips):
        peer.send(message)
        assert peer.recv(66000) == message, "other bytes"
    half = (time.monotonic() - began) / trips / 2
    began = time.monotonic()
    for count in range(messages):
        peer.send(bytes([count % 251]) * size)
    assert peer.recv(100) == b"whole", "other bytes"
    print(size, round(half * 1e6), round(size * messages / (time.monotonic() - began) / 1e6, 2), flush=True)
"""


def tipc(one, other, device):
    """What each size takes, and how much goes one way."""
    for each in (one, other):
        within(each, "tipc", "bearer", "enable", "media", "eth", "device", device)
    wait_until(lambda: re.search(r"\bup\b", run("ip", "netns", "exec", one, "tipc", "link", "list").split("broadcast-link", 1)[-1].split("\n", 1)[-1]), LIMIT_SECONDS, "a link")
    return one, other


def within(name, *words):
    return networks.within(name, *words)


def measured(ground, one, other):
    serves = ground.start(["ip", "netns", "exec", other, PYTHON, "-c", SERVES])
    require(serves.line(LIMIT_SECONDS) == "ready", serves.tail())
    within(one, PYTHON, "-c", "import socket, time\n"
           "peer = socket.socket(socket.AF_TIPC, socket.SOCK_SEQPACKET)\n"
           "for _ in range(600):\n"
           "    try:\n"
           "        peer.connect((socket.TIPC_ADDR_NAME, 4711, 1, 0, socket.TIPC_CLUSTER_SCOPE))\n"
           "        peer.send(b'1 0 0'); print(peer.recv(9)); break\n"
           "    except OSError:\n"
           "        time.sleep(0.1)\n")
    said = within(one, PYTHON, "-c", ASKS, TRIPS, MESSAGES, *SIZES)
    rows = [line.split() for line in said.splitlines()]
    require([int(row[0]) for row in rows] == SIZES, said)
    return rows


def scenes(ground):
    for module in ("tun", "tipc", "bonding", "veth"):
        run("/run/modprobe", module)

    with ground.scene("TIPC on devices, and on the kernel's own"), place(ground) as ours:
        one, other = ours.hosts(2)
        a, b = ours.namespace(), ours.namespace()
        within(a, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v0", "netns", b)
        for name in (a, b):
            within(name, "ip", "link", "set", "v0", "mtu", "65521", "up")
        tables = {}
        for what, (asks, serves), device in (("ringlet", (one.namespace, other.namespace), "vnet0"), ("veth", (a, b), "v0")):
            tables[what] = measured(ours, *tipc(asks, serves, device))
        host.tell(f"{'bytes':>8}  half a round trip (us): {' / '.join(tables)}   one way (MB/s): {' / '.join(tables)}")
        for rows in zip(*tables.values(), strict=True):
            host.tell(f"{rows[0][0]:>8}  {' / '.join(row[1] for row in rows):>36}   {' / '.join(row[2] for row in rows):>30}")

    with ground.scene("ETHOM's figures are measured, by TIPC too"):
        # (How long a machine that is emulated takes says nothing.)
        words = ["bench", "papers", "--only", "ethom", "--quick", "--json", "-"]
        done = subprocess.run([ground.options.ringlet, *words], capture_output=True, text=True)
        said = json.loads(done.stdout)
        require(done.returncode == 0 and not said["notes"], f"{said['notes']}{done.stderr}")
        missing = [row["what"] for row in said["figures"] if row["here"] is None]
        require(not missing and any("TIPC" in row["figure"] for row in said["figures"]), f"not measured: {missing}")

    with ground.scene("a bond of two devices, of which one dies"), place(ground) as ours:
        hosts = ours.hosts(2)
        second = ours.network()
        for number, each in enumerate(hosts, 1):
            each.run("ip", "address", "flush", "dev", "vnet0")
            each.other = networks.Host(ours, each.namespace, second, 10 + number, (), "vnet1").up()
            each.run("ip", "address", "flush", "dev", "vnet1")
            each.run("ip", "link", "add", "bond0", "type", "bond", "mode", "active-backup", "miimon", "50")
            for device in ("vnet0", "vnet1"):
                each.run("ip", "link", "set", device, "down")
                each.run("ip", "link", "set", device, "master", "bond0")
            each.run("ip", "link", "set", "bond0", "up")
            each.address("bond0")
        one, other = hosts

        def active(each):
            return re.search(r"Currently Active Slave: (\S+)", each.run("cat", "/proc/net/bonding/bond0"))[1]

        wait_until(lambda: active(one) == active(other) == "vnet0", LIMIT_SECONDS, f"the first device: {active(one)} {active(other)}")
        one.ping(other.ip)
        server = other.start("iperf3", "-s", "-1")
        wait_until(lambda: ":5201 " in other.run("ss", "-tln"), LIMIT_SECONDS, "iperf3")
        client = one.start("iperf3", "-c", other.ip, "-t", "8", "-i", "1", "-J")
        wait_until(lambda: "bond0" in one.run("ss", "-tinOH", "dport", "5201") or one.run("ss", "-tHn", "state", "established", "dport", "5201"), LIMIT_SECONDS, "a stream")
        one.port.kill()
        wait_until(lambda: active(one) == active(other) == "vnet1", LIMIT_SECONDS, f"the second device: {active(one)} {active(other)}")
        require(client.wait(LIMIT_SECONDS) == 0, f"the stream ends: {client.tail()}{server.tail()}")
        one.ping(other.ip)
        # It comes back, and the other one goes.
        one.start_port()
        wait_until(lambda: "ready" in one.port.tail(), LIMIT_SECONDS, "a port")
        one.run("ip", "link", "set", "vnet0", "down")
        one.run("ip", "link", "set", "vnet0", "master", "bond0")
        wait_until(lambda: all(each.run("cat", "/proc/net/bonding/bond0").count("MII Status: up") == 3 for each in hosts), LIMIT_SECONDS, "both devices")
        other.other.port.kill()
        wait_until(lambda: active(one) == active(other) == "vnet0", LIMIT_SECONDS, f"the first device again: {active(one)} {active(other)}")
        one.ping(other.ip)


def place(ground):
    return networks.ground(ground.options.ringlet, tempfile.mkdtemp(prefix="ringlet-eth-"))
