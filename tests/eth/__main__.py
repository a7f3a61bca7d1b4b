"""`ringlet eth`: devices in network namespaces, and what runs over them that nobody here wrote.

    python3 tests/eth [SCENE...]     default: all scenes (as root)
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults"), str(HERE.parent / "node")]

from bridged import BRIDGED  # noqa: E402
from far import FAR, Stream, multicasts  # noqa: E402
from ground import can  # noqa: E402
from harness import ROOT, Failed, Skipped, adopt_orphans, end_orphans, has_failed, require, skip, wait_until  # noqa: E402
from hostile import HOSTILE  # noqa: E402
from networks import LIMIT_SECONDS, Host, ground, within  # noqa: E402
from ports import PORTS  # noqa: E402
from protocols import PROTOCOLS  # noqa: E402

NEEDED = {"ip": "iproute2", "bridge": "iproute2", "ping": "iputils-ping", "iperf3": "iperf3", "tcpdump": "tcpdump", "ethtool": "ethtool", "cc": "gcc"}
SCENES = HOSTILE | PORTS | FAR | PROTOCOLS | BRIDGED


def scene(function):
    SCENES[function.__name__] = function
    return function


@scene
def carrier(ground):
    """A device has a carrier while another port is there; of one that is killed nothing stays."""
    one, other = ground.hosts(2)
    one.await_carrier(True)
    other.await_carrier(True)
    folder = pathlib.Path(os.environ["RINGLET_ETHERNET"]) / one.network
    require(len(list(folder.glob("*.port"))) == 2, f"sockets: {list(folder.iterdir())}")
    other.port.kill()
    one.await_carrier(False)
    require("vnet0" not in other.run("ip", "link"), "the device outlives its port")
    wait_until(lambda: len(list(folder.glob("*.port"))) == 1, LIMIT_SECONDS, f"the socket of a dead port: {list(folder.iterdir())}")
    other.up()
    one.await_carrier(True)
    one.ping(other.ip)
    ground.must("down", "vnet0", within=other.namespace)
    require("vnet0" not in other.run("ip", "link"), "the device is there behind `down`")
    require(other.port.wait(LIMIT_SECONDS) == 0, f"a port that was told to end: {other.port.tail()}")
    one.await_carrier(False)
    # The last one of all: who looks next removes what it left behind.
    one.port.kill()
    require("no ports" in ground.must("ls"), ground.must("ls"))
    require(not list(folder.glob("*.port")), f"sockets: {list(folder.iterdir())}")
    ground.must("delete", one.network)


@scene
def persists(ground):
    """A device that persists stays, with its addresses, routes and MTU, while its port is ended or killed and begun anew; whoever has one keeps it."""
    one, other = ground.hosts(2)
    host = Host(ground, ground.namespace(), one.network, 3, ("--persist", "--mtu", "1400"))
    host.up()
    host.run("ip", "route", "add", "198.51.100.0/24", "via", one.ip)
    host.ping(one.ip)
    shown = lambda: re.search(r"link/ether (\S+)", host.run("ip", "link", "show", "vnet0"))[1]
    number = host.run("cat", "/sys/class/net/vnet0/ifindex")
    host.words = ()
    for end in (lambda: ground.must("down", "vnet0", within=host.namespace), lambda: host.port.kill()):
        status, said = ground.eth("up", "vnet0", "--network", one.network, within=host.namespace)
        require(status != 0 and "there is a device vnet0 here already" in said, f"a second port of a device: {status} {said}")
        end()
        host.port.wait(LIMIT_SECONDS)
        require(not host.has_carrier(), "a carrier without a port")
        host.start_port()
        wait_until(lambda: "ready" in host.port.tail() or host.port.poll() is not None, LIMIT_SECONDS, "the port to be ready again")
        require(host.port.poll() is None, host.port.tail())
        host.await_carrier(True)
        host.ping(one.ip)
        other.ping(host.ip)
        require("198.51.100.0/24 via" in host.run("ip", "route") and host.run("cat", "/sys/class/net/vnet0/ifindex") == number, host.run("ip", "route"))
        require("mtu 1400" in host.run("ip", "link", "show", "vnet0") and shown() == host.mac, host.run("ip", "link"))
    # One that somebody else has made, which is down, has its own address; what is no TAP device of one queue is nobody's.
    fresh = ground.namespace()
    within(fresh, "ip", "tuntap", "add", "dev", "vnet0", "mode", "tap")
    within(fresh, "ip", "link", "set", "vnet0", "address", "02:00:00:00:00:04")
    made = ground.start(["ip", "netns", "exec", fresh, ground.command, "eth", "up", "vnet0", "--network", one.network])
    wait_until(lambda: "ready vnet0 02:00:00:00:00:04" in made.tail() or made.poll() is not None, LIMIT_SECONDS, "a device that was made before")
    within(fresh, "ip", "address", "add", "10.7.0.4/24", "dev", "vnet0")
    one.ping("10.7.0.4")
    for device, *kind in (("tun0", "mode", "tun"), ("many", "mode", "tap", "multi_queue")):
        within(fresh, "ip", "tuntap", "add", "dev", device, *kind)
        status, said = ground.eth("up", device, "--network", one.network, within=fresh)
        require(status != 0 and f"there is a device {device} here already" in said, f"{device}: {status} {said}")
    # Who gets no port (its socket's name is too long) leaves no device, and one that was there as it was.
    networks, ground.networks = ground.networks, f"{ground.networks}/{'long' * 25}"
    try:
        ground.must("create", "long")
        within(fresh, "ip", "tuntap", "add", "dev", "stays", "mode", "tap")
        before = within(fresh, "ip", "-o", "link")
        for device in "stays", "new":
            words = "--mtu", "1300", "--mac", "02:00:00:00:00:05", "--persist"
            status, said = ground.eth("up", device, "--network", "long", *words, within=fresh)
            require(status != 0 and "too long" in said, f"{device}: {status} {said}")
        after = within(fresh, "ip", "-o", "link")
        require(after == before, f"{before}, and then {after}")
    finally:
        ground.networks = networks


@scene
def becomes_another(ground):
    """A device that is renamed, given another address, or moved to another network namespace is shown, and ended, as what and where it is."""
    one, other = ground.hosts(2)
    elsewhere, address = ground.namespace(), "02:00:00:00:77:77"

    def shown():
        ports = [port["about"] for network in json.loads(ground.must("ls", "--json")) for port in network["ports"]]
        (about,) = [about for about in ports if about["id"] == other.number]
        return about

    before = shown()
    other.run("ip", "link", "set", "vnet0", "down")
    other.run("ip", "link", "set", "vnet0", "name", "front", "address", address)
    now = shown()
    require((now["name"], now["mac"], now["namespace"]) == ("front", address, before["namespace"]), now)
    require(ground.eth("down", "vnet0", within=other.namespace)[0] != 0, "what is not there is ended")
    other.run("ip", "link", "set", "front", "netns", elsewhere)
    within(elsewhere, "ip", "address", "add", f"{other.ip}/24", "dev", "front")
    within(elsewhere, "ip", "link", "set", "front", "up")
    now = shown()
    require(now["name"] == "front" and now["namespace"] != before["namespace"], (before, now))
    one.run("ip", "neigh", "flush", "all")
    one.ping(other.ip)
    require(ground.eth("down", "front", within=other.namespace)[0] != 0, "what was moved away is ended")
    ground.must("down", "front", within=elsewhere)
    require(other.port.wait(LIMIT_SECONDS) == 0, f"a port that was told to end: {other.port.tail()}")
    require("front" not in within(elsewhere, "ip", "link"), "the device is there behind `down`")


@scene
def together(ground):
    """Ports that all start at one moment all meet."""
    for _ in range(3):
        network = ground.network()
        hosts = [Host(ground, ground.namespace(), network, number, ["--queues", str(1 + number % 2)]) for number in range(1, 9)]
        for host in hosts:
            host.start_port()
        for host in hosts:
            host.await_port()
        for host in hosts:
            wait_until(lambda host=host: len(host.state()["peers"]) == len(hosts) - 1, LIMIT_SECONDS, f"all others: {host.state()['peers']}")
        for one, other in zip(hosts, hosts[1:], strict=False):
            one.ping(other.ip)
        for host in hosts:
            host.port.kill()


@scene
def at_once(ground):
    """Of those that make a device of one name at one moment one has it, with all its queues, and the others say that there is one."""
    if shutil.which("strace") is None:
        raise Skipped("not installed: strace")
    network, namespace = ground.network(), ground.namespace()
    hosts = [Host(ground, namespace, network, number, ["--queues", "2"]) for number in range(1, 5)]
    for host in hosts:
        # (Each has looked whether there is such a device before one makes it.)
        host.before = ["strace", "-f", "-o", "/dev/null", "-e", "trace=ioctl", "-e", "inject=ioctl:delay_exit=400000"]
        host.start_port()
    for host in hosts:
        is_done = lambda host=host: "ready vnet0" in host.port.tail() or host.port.poll() is not None  # noqa: E731
        wait_until(is_done, LIMIT_SECONDS, "a port to be ready, or to end")
    have = [host for host in hosts if host.port.poll() is None]
    require(len(have) == 1, f"{len(have)} have the device")
    for host in hosts:
        require(host in have or re.search("there (is a|such a) device", host.port.tail()), host.port.tail())


@scene
def removed(ground):
    """A port whose device is deleted ends, and says why; also where the only other port stands still, and takes nothing."""
    for stands in (False, True):
        one, other = ground.hosts(2)
        pid = other.state()["about"]["pid"]
        if stands:
            os.kill(pid, signal.SIGSTOP)
            one.run("ip", "neigh", "replace", other.ip, "lladdr", other.mac, "dev", "vnet0")
            speak = f"import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nfor _ in range(5000): s.sendto(bytes(1000), ('{other.ip}', 7007))"
            speaker = one.start(sys.executable, "-c", speak)
            wait_until(lambda: one.state()["totals"]["waited"], LIMIT_SECONDS, "a full queue")  # noqa: B023
            speaker.kill()
        one.run("ip", "link", "del", "vnet0")
        require(one.port.wait(LIMIT_SECONDS) == 1 and "the device was removed" in one.port.tail(), one.port.tail())
        os.kill(pid, signal.SIGCONT)


def none_lost(*hosts):
    for host in hosts:
        lost = {why: count for why, count in host.state()["totals"]["dropped"].items() if count and why != "no other port"}
        require(not lost, f"dropped: {lost}")


@scene
def pings(ground):
    """Every kind of size by IPv4 and IPv6, and from cold; unfragmented up to the largest MTU."""
    one, other = ground.hosts(2)
    for size in (0, 1, 18, 19, 56, 1472, 1473, 4096, 9000, 32768, 65493):
        one.ping(other.ip, "-M", "do", "-s", size)
    for size in (0, 64, 1453, 9000, 65473):
        other.ping(one.six, "-M", "do", "-s", size)
    one.ping(other.ip, "-s", 65507)
    for words in (["-4"], ["-6"]):
        one.run("ip", *words, "neigh", "flush", "all")
        one.ping(other.ip if words == ["-4"] else other.six)
    require("mtu 65521" in one.run("ip", "link", "show", "vnet0"), "not the largest MTU")
    none_lost(one, other)


def iperf(client, server, *words, most=("-t", 1)):
    """What iperf3's client found."""
    served = server.start("iperf3", "-s", "-1", "-B", server.ip)
    wait_until(lambda: f"{server.ip}:5201" in server.run("ss", "-Hltn"), LIMIT_SECONDS, "iperf3 to listen")
    done = client.run("iperf3", "-J", *most, "-c", server.ip, *words)
    require(served.wait(LIMIT_SECONDS) == 0, served.tail())
    return json.loads(done)["end"]


def passes_whole(one, other, mtu):
    """Segments of TCP pass uncut: frames are longer than the MTU."""
    before = other.state()["totals"]
    # (As much, however long that takes.)
    end = iperf(one, other, most=("-n", "32M"))
    after = other.state()["totals"]
    mean = (after["received_bytes"] - before["received_bytes"]) / (after["received"] - before["received"])
    require(end["sum_received"]["bytes"] > 10_000_000, f"iperf3: {end}")
    require(mean > mtu, f"frames of {mean} bytes at an MTU of {mtu}")


@scene
def streams(ground):
    """iperf3 by TCP and UDP, both ways, by one queue and by several."""
    for options in ([], ["--queues", "2"]):
        one, other = ground.hosts(2, options=["--mtu", "1500", *options])
        passes_whole(one, other, 1500)
        iperf(one, other, "-R")
        iperf(one, other, "-P", "4")
        end = iperf(one, other, "-u", "-b", "50M", "-l", "1400")["sum"]
        # (What a slow reader's socket has no room for is lost there, and not on the way.)
        require(0 <= end["lost_packets"] < end["packets"], f"UDP: {end}")
        none_lost(one, other)


@scene
def queues(ground):
    """Ports of different numbers of queues understand each other."""
    network = ground.network()
    few, many = ground.host(network, 1), ground.host(network, 2, "--queues", "4")
    few.await_carrier(True)
    for one, other in ((few, many), (many, few)):
        one.ping(other.ip, "-s", 9000)
        iperf(one, other, "-P", "4")


@scene
def three(ground):
    """Unicast goes to one port only; what is behind a bridge is learned, and found again where it has moved to."""
    network = ground.network()
    one, other, bridged = (ground.host(network, number) for number in (1, 2, 3))
    # Behind the third's bridge is a host by a veth.
    bridged.run("ip", "address", "flush", "dev", "vnet0")
    bridged.run("ip", "link", "add", "bridge", "type", "bridge")
    bridged.run("ip", "link", "set", "bridge", "mtu", "1500", "up")
    bridged.run("ip", "link", "set", "vnet0", "mtu", "1500", "master", "bridge")
    behind = Host(ground, ground.namespace(), network, 4, (), "eth0")
    within(behind.namespace, "ip", "link", "add", "eth0", "address", behind.mac, "type", "veth", "peer", "name", "inner", "netns", bridged.namespace)
    behind.run("ip", "link", "set", "eth0", "up")
    bridged.run("ip", "link", "set", "inner", "master", "bridge", "up")
    behind.address("eth0")
    for host in (one, other):
        host.run("ip", "link", "set", "vnet0", "mtu", "1500")
        host.ping(behind.ip, "-s", 1400)
    behind.ping(one.six)

    def of(host, peer):
        return next(each["received"] for each in host.state()["peers"] if each["mac"] == peer.mac)

    before = of(other, one)
    for _ in range(20):
        one.ping(behind.ip)
    require(of(other, one) - before < 30, f"another port saw {of(other, one) - before} frames of 60 that were not for it")
    # It moves: the same address by a device of its own.
    behind.run("ip", "link", "del", "eth0")
    moved = ground.host(network, 4, namespace=behind.namespace)
    one.run("ip", "neigh", "flush", "all")
    one.ping(moved.ip)


# A frame with a tag, and whose payload is the largest; and a look for it.
TAGGED = """
import socket, sys
sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sender.bind(("vnet0", 0))
to, source = (bytes.fromhex(word.replace(":", "")) for word in sys.argv[1:])
for tag, size in ((7, 46), (4095, 1500), (8, 65521)):
    sender.send(to + source + bytes([0x81, 0, tag >> 8, tag & 255, 0x88, 0xb5]) + b"x" * size)
"""
UNTAG = """
import socket, struct
listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
listener.setsockopt(263, 8, 1)
listener.bind(("vnet0", 3))
listener.settimeout(60)
print("listens", flush=True)
seen = 0
while seen < 3:
    data, extra, _, _ = listener.recvmsg(1 << 17, 256)
    if data[12:14] != bytes([0x88, 0xb5]):
        continue
    seen += 1
    (tag,) = [struct.unpack_from("=IIIHHHH", value)[5] for level, kind, value in extra if (level, kind) == (263, 8)]
    print(tag, len(data) - 14, flush=True)
"""


@scene
def vlans(ground):
    """Tags pass, also with the longest packet; and devices of VLANs, where the kernel has them, are apart."""
    one, other = ground.hosts(2)
    listener = other.start(sys.executable, "-c", UNTAG)
    require(listener.line(LIMIT_SECONDS) == "listens", listener.tail())
    one.run(sys.executable, "-c", TAGGED, other.mac, one.mac)
    require(listener.wait(LIMIT_SECONDS) == 0, listener.tail())
    seen = listener.finished_output().decode().splitlines()[1:]
    require(seen == ["7 46", "4095 1500", "8 65521"], f"tags and sizes: {seen}")
    if not can("ip", "netns", "exec", one.namespace, "ip", "link", "add", "link", "vnet0", "name", "v7", "type", "vlan", "id", "7"):
        return
    one.run("ip", "link", "del", "v7")
    for tag in (7, 8):
        for host, number in ((one, 1), (other, 2)):
            host.run("ip", "link", "add", "link", "vnet0", "name", f"v{tag}", "type", "vlan", "id", tag)
            host.run("ip", "address", "add", f"10.7.{tag}.{number}/24", "dev", f"v{tag}")
            host.run("ip", "link", "set", f"v{tag}", "up")
    one.ping("10.7.7.2", "-M", "do", "-s", 65493)
    other.run("ip", "link", "set", "v8", "down")
    require(not can("ip", "netns", "exec", one.namespace, "ping", "-n", "-c", "1", "-W", "1", "10.7.8.2"), "one VLAN is heard in another")


def packets(path):
    """What a capture holds: frames, without their times."""
    data, at, found = path.read_bytes(), 24, []
    while at + 16 <= len(data):
        size = struct.unpack_from("<I", data, at + 8)[0]
        found.append(data[at + 16 : at + 16 + size])
        at += 16 + size
    return found


@scene
def captures(ground):
    """tcpdump on both ends sees the same frames."""
    one, other = ground.hosts(2)
    files = [pathlib.Path(ground.directory) / f"{host.namespace}.pcap" for host in (one, other)]
    dumps = [host.start("tcpdump", "-i", "vnet0", "-U", "-s", "0", "-w", file, "icmp") for host, file in zip((one, other), files, strict=True)]
    for dump in dumps:
        wait_until(lambda dump=dump: "listening on" in dump.tail(), LIMIT_SECONDS, "tcpdump to listen")
    for size in (0, 100, 1472, 9000, 65493):
        one.ping(other.ip, "-s", size)
    wait_until(lambda: all(len(packets(file)) == 30 for file in files), LIMIT_SECONDS, f"30 frames: {[len(packets(file)) for file in files]}")
    for dump in dumps:
        dump.stop(signal.SIGINT)
    require(packets(files[0]) == packets(files[1]), "the two ends saw different frames")


@scene
def multicast(ground):
    """Each port gets a multicast frame once, in order, and the sender none."""
    one, *others = ground.hosts(4)
    multicasts(one, *others, count=100)


@scene
def bridged_likewise(ground):
    """So it is on a bridge."""
    ground.has_bridges = True
    for play in (pings, vlans, captures, multicast):
        play(ground)


@scene
def reconnects(ground):
    """A port is killed and comes back in the midst of a stream of TCP, which lives."""
    one, other = ground.hosts(2)
    # (Until it is told that it is enough, however fast it is.)
    stream = Stream(one, other)
    for _ in range(2):
        other.port.kill()
        one.await_carrier(False)
        other.up()
        one.await_carrier(True)
        stream.goes_on()
    stream.ends()


def ticks(pid):
    """The processor time of all threads."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@scene
def sleeps(ground):
    """An idle port takes no processor time, however busy it was."""
    one, other = ground.hosts(2)
    iperf(one, other)
    pids = [host.state()["about"]["pid"] for host in (one, other)]

    def idle():
        before = [ticks(pid) for pid in pids]
        time.sleep(0.5)
        return before == [ticks(pid) for pid in pids]

    wait_until(idle, LIMIT_SECONDS, "ports to sleep")
    require(all(peer["waiting"] == 0 for peer in one.state()["peers"]), f"frames that wait: {one.state()}")
    one.ping(other.ip)


# Frames by bunches, of each of which all are to come before the next is sent: what no wake-up was for would be waited for without end.
BUNCHES = """
import socket, sys
speaker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
speaker.settimeout(60)
speaker.connect((sys.argv[1], 7007))
for turn in range(int(sys.argv[2])):
    count = 1 if turn % 40 < 20 else turn % 7 + 1
    for nth in range(count):
        speaker.send(b"%d %d" % (nth, count))
    assert speaker.recv(100) == b"%d" % count
"""
ANSWERS = """
import socket
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("0.0.0.0", 7007))
print("listens", flush=True)
while True:
    data, whose = listener.recvfrom(100)
    nth, count = data.split()
    if int(nth) + 1 == int(count):
        listener.sendto(count, whose)
"""


def bunches(one, other, count):
    listener = other.start(sys.executable, "-c", ANSWERS)
    require(listener.line(LIMIT_SECONDS) == "listens", listener.tail())
    speaker = one.start(sys.executable, "-c", BUNCHES, other.ip, count)
    require(speaker.wait(2 * LIMIT_SECONDS) == 0, speaker.tail())
    listener.kill()


@scene
def wakes(ground):
    """Frames one by one and by bunches, with the longest watch and none: each is seen, whoever sleeps."""
    for watch in ("0", "200"):
        one, other = ground.hosts(2, options=["--watch", watch])
        bunches(one, other, 4000)
        bunches(other, one, 400)


@scene
def spares(ground):
    """A device is not read once more behind each frame, to find nothing: not behind one that came alone, and not by whom something else woke."""
    if shutil.which("strace") is None:
        raise Skipped("not installed: strace")
    network = ground.network()
    one = Host(ground, ground.namespace(), network, 1, ("--watch", "0"))
    log = pathlib.Path(ground.directory) / "calls"
    one.before = ["strace", "-f", "-o", log, "-e", "trace=read"]
    one.up()
    other = ground.host(network, 2)
    one.await_carrier(True)
    before = one.state()["totals"]["sent"], log.read_text().count("EAGAIN")
    one.run("ping", "-n", "-q", "-c", "200", "-i", "0.005", other.ip)
    sent = one.state()["totals"]["sent"] - before[0]
    vain = log.read_text().count("EAGAIN") - before[1]
    require(sent >= 200 and vain < sent / 4, f"{vain} reads in vain for {sent} frames")


@scene
def unit(ground):
    """The unit is one, and a device does with the rights that it leaves; it is ready when it says so."""
    text = (ROOT / "deploy/ringlet-eth@.service").read_text().replace("/usr/local/bin/ringlet", ground.command)
    place = pathlib.Path(ground.directory) / "ringlet-eth@vnet0.service"
    place.write_text(text)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        require(done.returncode == 0 and not done.stderr, done.stderr)
    (rights,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("CapabilityBoundingSet=")]
    rights = ",".join("+" + right.removeprefix("CAP_").lower() for right in rights.split())
    network = ground.network()
    host = Host(ground, ground.namespace(), network, 1, ())
    told = pathlib.Path(ground.directory) / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(told))
        manager.settimeout(LIMIT_SECONDS)
        host.before = ["env", f"NOTIFY_SOCKET={told}", "setpriv", f"--bounding-set=-all,{rights}", "--inh-caps=-all", "--no-new-privs"]
        host.start_port()
        require(b"READY=1" in manager.recv(1000), "not what a service manager waits for")
        require("vnet0" in host.run("ip", "link"), "ready, and no device")
    host.await_port()
    host.ping(ground.host(network, 2).ip)


@scene
def wrong(ground):
    """Each wrong use gets a sentence that names the fix."""
    network, name = ground.network(), ground.namespace()

    def says(*words, what, within=None):
        status, said = ground.eth(*words, within=within)
        require(status != 0 and what in said, f"{words}: {status}, {said}")

    says("up", "vnet0", "--network", "nowhere", what="ringlet eth create nowhere")
    says("create", network, what="ringlet eth delete")
    says("create", "a/b", what="a network's name is of")
    says("create", "other", "--group", "nobody-has-this", what="there is no group")
    says("create", "other", "--group", 2**32 - 1, what="there is no group")
    says("up", "vnet0", "--network", network, "--mtu", "67", what="between 68 and 65521")
    says("up", "vnet0", "--network", network, "--mtu", "65522", what="between 68 and 65521")
    says("up", "a-name-that-is-too-long", "--network", network, what="15 characters")
    says("up", "vnet0", "--network", network, "--mac", "01:00:5e:00:00:01", what="the first byte must be even")
    says("up", "vnet0", "--network", network, "--queues", "17", what="1..=16")
    says("up", "lo", "--network", network, what="there is a device lo here already", within=name)
    says("down", "vnet0", what="ringlet eth ls")
    says("delete", "nowhere", what="there is no network")
    nobody = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", ground.command, "eth", "up", "vnet0", "--network", network]
    done = subprocess.run(["ip", "netns", "exec", name, *nobody], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    require(done.returncode != 0 and "CAP_NET_ADMIN" in done.stderr, done.stderr)
    host = ground.host(network, 1)
    says("delete", network, what="has 1 ports")
    # Its address is taken: the two do not meet, and each says so.
    twin = Host(ground, ground.namespace(), network, 1, ())
    twin.up()
    wait_until(lambda: "another port's address" in twin.port.tail(), LIMIT_SECONDS, f"what a twin says: {twin.port.tail()}")
    require(not host.state()["peers"], f"{host.state()['peers']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    options = parser.parse_args()
    if unknown := set(options.scenes) - set(SCENES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.geteuid() != 0:
        skip("only root makes namespaces and devices")
    if not pathlib.Path("/dev/net/tun").exists():
        skip("there is no /dev/net/tun")
    if packages := sorted({package for what, package in NEEDED.items() if shutil.which(what) is None}):
        skip(f"not installed (Debian packages): {', '.join(packages)}")
    adopt_orphans()
    # Who is told to end puts away what there is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = False
    for name in options.scenes or SCENES:

        def play(name=name):
            began, problem, word = time.monotonic(), "", "passed"
            with tempfile.TemporaryDirectory(prefix="ringlet-eth-") as directory:
                try:
                    with ground(options.ringlet, directory) as place:
                        SCENES[name](place)
                except Skipped as told:
                    word, problem = "skipped", str(told)
                except (Failed, subprocess.SubprocessError, TimeoutError) as told:
                    word, problem = "FAILED", str(told)
            print(f"{word:8}  {name:20} {time.monotonic() - began:6.1f} s", flush=True)
            if problem:
                print("    " + problem.replace("\n", "\n    "), flush=True)
            return word == "FAILED"

        failed |= has_failed(name, play)
    if left := end_orphans():
        print(f"FAILED    left behind: {left}", flush=True)
        failed = True
    sys.exit(failed)


with contextlib.suppress(KeyboardInterrupt):
    main()
