"""Networks with a bridge of the kernel's for the devices of one host (`ringlet eth bridge`): what passes, what does not, and what stays of none."""

import array
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

from far import Stream, by_udp, flows, multicasts
from ground import can, run
from harness import ROOT, Skipped, require, wait_until
from hostile import NOBODY, SOURCE, VERSION, Stranger, knocking, mac
from networks import LIMIT_SECONDS, NUMBERS, Host, within
from ports import GUEST_IP, back_end, front_end

BRIDGED = {}
STORM = "too many to all ports"
KERNEL = "refused by the kernel"


def scene(function):
    BRIDGED[function.__name__] = function
    return function


def bridged(ground, count, *words):
    """A network's bridge, and devices on it."""
    network = ground.network(*words)
    bridge = ground.bridge(network)
    hosts = [ground.host(network, number) for number in range(1, count + 1)]
    require(all("@if" in host.run("ip", "link", "show", "vnet0") for host in hosts), "a device is no veth")
    return network, bridge, hosts


def port_of(ground, name):
    """The state of the one port of this name."""
    (state,) = [state for state in json.loads(ground.must("stats", "--json")) if state["about"]["name"] == name]
    return state


def uplink(ground, bridge):
    """The state of a bridge's own port."""
    (state,) = json.loads(run("nsenter", f"--net=/proc/{bridge.pid}/ns/net", ground.command, "eth", "stats", "uplink", "--json"))
    return state


def dropped(state):
    return {why: count for why, count in state["totals"]["dropped"].items() if count and why != "no other port"}


def streams(ground, pairs):
    """TCP between each of them at once, of which each byte is looked at, until each has sent a good deal."""
    running = [Stream(one, other) for one, other in pairs]
    for _ in range(3):
        before = [one.state()["totals"]["sent"] for one, _ in pairs]
        for (one, _), sent in zip(pairs, before, strict=True):
            wait_until(lambda one=one, sent=sent: one.state()["totals"]["sent"] > sent + 1000, LIMIT_SECONDS, "a stream to go on")
    for stream in running:
        stream.ends()


@scene
def bridged_frames(ground):
    """Frames of all sizes, tags and groups pass between devices; streams between three lose nothing, and none of it leaves the kernel."""
    network, bridge, (one, other, third) = bridged(ground, 3)
    flows(one, other)
    multicasts(one, other, third)
    for host in one, other, third:
        host.run("ip", "neigh", "flush", "all")
    streams(ground, [(one, other), (other, third), (third, one)])
    for host in one, other, third:
        state = host.state()
        require(state["bridged"] == 2 and not dropped(state), f"of a device: {state}")
    require(uplink(ground, bridge)["totals"]["sent"] == 0, "frames have left the kernel")
    shown = ground.must("ls")
    require(len(re.findall(rf"{network} +vnet0 .* bridge +2 ", shown)) == 3, shown)
    # What is sent is counted once, and nobody else sees it.
    before = [host.state()["totals"] for host in (one, other, third)]
    one.ping(other.ip)
    after = [host.state()["totals"] for host in (one, other, third)]
    sent, received, seen = (new[what] - old[what] for what, old, new in zip(("sent", "received", "received"), before, after, strict=True))
    require(3 <= sent < 20 and 3 <= received < 20 and seen < 6, f"counts of three pings: {sent}, {received}, and {seen} elsewhere")


@scene
def bridged_carrier(ground):
    """A device has a carrier while another one, or another port, is there; it goes with `down`, and comes again."""
    network, bridge, (one, other) = bridged(ground, 2)
    for _ in range(3):
        one.await_carrier(True)
        one.ping(other.ip)
        ground.must("down", "vnet0", within=other.namespace)
        require("vnet0" not in other.run("ip", "link"), "the device is there behind `down`")
        require(other.port.wait(LIMIT_SECONDS) == 0, other.port.tail())
        one.await_carrier(False)
        other.up()
    other.port.stop()
    require("vnet0" not in other.run("ip", "link"), "the device is there behind its end")
    one.await_carrier(False)
    tap = ground.host(network, 3, "--tap")
    one.await_carrier(True)
    tap.await_carrier(True)
    tap.ping(one.ip)
    tap.port.kill()
    one.await_carrier(False)
    status, said = ground.eth("delete", network)
    require(status != 0 and "1 ports" in said, said)
    ground.must("down", "vnet0", within=one.namespace)
    ground.must("delete", network)
    require(bridge.wait(LIMIT_SECONDS) == 0, bridge.tail())


@scene
def bridged_uplink(ground):
    """Devices on the bridge, TAP devices, and a guest reach each other, and streams between them lose no byte."""
    network, bridge, (one, other) = bridged(ground, 2, "--addresses", "static")
    tap, many = ground.host(network, 3, "--tap"), ground.host(network, 4, "--queues", "2")
    require("@if" not in many.run("ip", "link", "show", "vnet0"), "several queues, by one veth")
    for host in one, other:
        host.await_carrier(True)
        flows(host, tap)
        flows(many, host)
    multicasts(one, other, tap, many)
    multicasts(tap, one, other, many)
    streams(ground, [(one, tap), (tap, other), (other, one)])
    for state in tap.state(), uplink(ground, bridge), one.state():
        # (One of several ports is waited for as long as the others lose little by it: where the machine is busy, TCP sends a few frames again.)
        lost = {why: count for why, count in dropped(state).items() if why != "the receiver's queue was full"}
        require(not lost, f"dropped: {lost}")
    _back, path = back_end(ground, network)
    front_end(ground, path)
    for size in (0, 1472, 9000, 65493):
        one.ping(GUEST_IP, "-M", "do", "-s", size)


@scene
def bridged_far(ground):
    """Devices on the bridges of two hosts, and TAP devices, reach each other."""
    with by_udp(ground) as sites:
        for site in sites:
            site.create("blue")
            site.ground.bridge("blue")
        for site, other in zip(sites, reversed(sites), strict=True):
            site.span(other.ip)
        one, tap, far, last = sites[0].host(1), sites[0].host(2, "--tap"), sites[1].host(3), sites[1].host(4)
        for host in one, far:
            host.await_carrier(True)
        flows(one, far)
        flows(tap, far)
        multicasts(one, tap, far, last)
        stream = Stream(one, far)
        sent = one.state()["totals"]["sent"]
        wait_until(lambda: one.state()["totals"]["sent"] > sent + 1000, LIMIT_SECONDS, "a stream to go on")
        stream.ends()


SHOUT = """
import socket, sys
sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sender.bind(("vnet0", 0))
to, source = (bytes.fromhex(word.replace(":", "")) for word in sys.argv[1:3])
for _ in range(int(sys.argv[3])):
    sender.send(to + source + bytes([0x88, 0xb5]) + bytes(46))
"""
BROADCAST = "ff:ff:ff:ff:ff:ff"


@scene
def bridged_kept(ground):
    """A network that has need of its bridge, and so is not removed, has it still."""
    network = ground.network()
    bridge = ground.bridge(network)

    def is_kept(why):
        status, said = ground.eth("delete", network)
        require(status != 0 and why in said, f"{status}, {said}")
        time.sleep(0.5)
        require(bridge.poll() is None, f"{why}: {bridge.tail()}")

    span = ground.start([ground.command, "eth", "span", network, "--peer", "127.0.0.2", "--listen", "127.0.0.1"])
    wait_until(lambda: "ready" in span.tail() or span.poll() is not None, LIMIT_SECONDS, "who spans hosts")
    require(span.poll() is None, span.tail())
    is_kept("spans hosts")
    span.stop()
    tap = ground.host(network, 1, "--tap")
    is_kept("1 ports")
    tap.port.stop()
    one = ground.host(network, 2)
    is_kept("1 ports")
    one.port.stop()
    ground.must("delete", network)
    require(bridge.wait(LIMIT_SECONDS) == 0, bridge.tail())


def shout(host, to, source, count):
    host.run(sys.executable, "-c", SHOUT, to, source, count)


@scene
def bridged_addresses(ground):
    """A device sends from its own address only; no port gets a frame by sending from another's, on the bridge or beside it."""
    network, bridge, (one, other, third) = bridged(ground, 3, "--addresses", "locked")
    before, bytes_before = other.state()["totals"]["received"], third.state()["totals"]["sent_bytes"]
    for source in (other.mac, "02:00:00:00:00:77", "00:00:00:00:00:00", "01:00:5e:00:00:01"):
        shout(third, other.mac, source, 100)
        shout(third, BROADCAST, source, 100)
    wait_until(lambda: third.dropped(SOURCE) == 800, LIMIT_SECONDS, "frames from others' addresses to be counted")
    sent = third.state()["totals"]["sent_bytes"] - bytes_before
    require(0 <= sent < 5000, f"{sent} bytes, with 48,000 that were refused")
    require(other.state()["totals"]["received"] < before + 100, "a frame from another's address came")
    one.ping(other.ip)
    # A port beside the bridge, which does what none does.
    beside = Host(ground, one.namespace, network, 0, ()).numbered(uplink(ground, bridge)["about"]["id"])
    one.await_carrier(True)
    with Stranger(beside) as stranger:
        for address in (one.mac, other.mac):
            for _ in range(50):
                stranger.send(mac(address))
        wait_until(lambda: uplink(ground, bridge)["totals"]["dropped"][SOURCE] >= 100, LIMIT_SECONDS, "frames that are refused")
    one.run("ip", "neigh", "flush", "all")
    one.ping(other.ip)
    # Its address is another's: no device is made.
    twin = Host(ground, ground.namespace(), network, 1, ())
    twin.start_port()
    require(twin.port.wait(LIMIT_SECONDS) == 1 and "another port's address" in twin.port.tail(), twin.port.tail())
    require("vnet0" not in twin.run("ip", "link"), "a device that was refused")
    # An address is free once its device is gone.
    ground.must("down", "vnet0", within=one.namespace)
    twin.up()
    twin.ping(other.ip)


INTRUDE = """
import os, socket, struct, sys
def attribute(kind, value):
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
def ask(what, flags, *rest):
    route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    route.bind((0, 0))
    route.settimeout(10)
    body = b"".join(rest)
    route.send(struct.pack("IHHII", 16 + len(body), what, flags | 5, 1, 0) + body)
    said = route.recv(1 << 16)
    kind, error = struct.unpack_from("H", said, 4)[0], struct.unpack_from("i", said, 16)[0]
    if kind == 2 and error:
        sys.exit(f"{what}: {os.strerror(-error)}")
    return said
HEAD = struct.pack("BxHiII", 0, 0, 0, 1, 1)
number = int(sys.argv[1])
there = attribute(46, struct.pack("i", number))
(bridge,) = struct.unpack_from("i", ask(18, 0, HEAD, there, attribute(3, b"bridge\\0")), 20)
here = attribute(19, struct.pack("I", os.getpid()))
veth = attribute(1, b"veth\\0") + attribute(2, attribute(1, bytes(16) + attribute(3, b"mine\\0") + here))
ask(16, 0x600, HEAD, there, attribute(3, b"evil\\0"), attribute(10, struct.pack("I", bridge)), attribute(18, veth))
ear = attribute(1, b"macvlan\\0") + attribute(2, attribute(1, struct.pack("I", 8)))
ask(16, 0x600, HEAD, attribute(3, b"ear\\0"), attribute(5, struct.pack("I", bridge)), attribute(37, struct.pack("i", number)), attribute(18, ear))
"""


@scene
def bridged_intruders(ground):
    """Who makes devices in the bridge's namespace by way of his own device's other end hears nothing by them, and sends nothing."""
    network, bridge, (one, other, third) = bridged(ground, 3)
    tap = ground.host(network, 4, "--tap")
    one.await_carrier(True)
    one.ping(other.ip)
    one.ping(tap.ip)
    (number,) = re.findall(r"link-netnsid (\d+)", third.run("ip", "link", "show", "vnet0"))
    third.run(sys.executable, "-c", INTRUDE, number)

    def received(device):
        return int(third.run("cat", f"/sys/class/net/{device}/statistics/rx_packets"))

    for device in "mine", "ear":
        third.run("sysctl", "-qw", f"net.ipv6.conf.{device}.disable_ipv6=1")
        third.run("ip", "link", "set", device, "up")
    before = {device: received(device) for device in ("mine", "ear")}
    heard = other.state()["totals"]["received"]
    for device in "mine", "ear":
        for to in (other.mac, BROADCAST):
            third.run(sys.executable, "-c", SHOUT.replace("vnet0", device), to, one.mac, "100")
    require(other.state()["totals"]["received"] < heard + 100, "what comes by a stranger's device")
    shout(one, BROADCAST, one.mac, 100)
    one.ping(other.ip)
    for device, count in before.items():
        require(received(device) == count, f"{device} has heard {received(device) - count} frames")
    # Nor does anything come that has not passed the bridge's rules, as by a VLAN device on another one's end (which not each kernel has), where the
    # kernel has rules for what leaves a device.
    egress = "table netdev probe { chain out { type filter hook egress device lo priority 0; }; }"
    if can("unshare", "-n", "nft", egress):
        # (Its sender may be told that it was dropped.)
        shouts = SHOUT.replace("import socket", "import contextlib, socket").replace("sender.send(", "with contextlib.suppress(OSError): sender.send(")
        for device, victim in ((f"p{int(other.number, 16)}", other), ("uplink", tap)):
            heard = victim.state()["totals"]["received"]
            for to in (victim.mac, BROADCAST):
                run("nsenter", f"--net=/proc/{bridge.pid}/ns/net", sys.executable, "-c", shouts.replace("vnet0", device), to, one.mac, "100")
            require(victim.state()["totals"]["received"] < heard + 100, f"what has passed no rules has come by {device}")


@scene
def bridged_taken(ground):
    """A device whose end on the bridge is another one's by now, whatever that has of it, is no more; nor is one that was renamed, or taken off the bridge."""
    network, bridge, hosts = bridged(ground, 6)
    last = hosts[-1]

    def changes(*commands):
        within_bridge = ["nsenter", f"--net=/proc/{bridge.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(within_bridge, input="\n".join(commands), check=True, text=True, timeout=LIMIT_SECONDS)

    def end(host):
        name = f"p{int(host.number, 16)}"
        (link,) = json.loads(run("nsenter", f"--net=/proc/{bridge.pid}/ns/net", "ip", "-j", "link", "show", name))
        return name, link["ifindex"], link["address"]

    def is_taken(name, index, address, same=True):
        other = f"address {address}" if same else ""
        return f"link del {name}", f"link add {name} index {index} {other} type veth peer name y{index}", f"link set {name} master bridge up"

    ends = [end(host) for host in hosts]
    taken, likewise, renamed, off, elsewhere = (name for name, *_ in ends[:-1])
    # (It looks when all is done.)
    bridge.send(signal.SIGSTOP)
    changes(*is_taken(*ends[0]), *is_taken(*ends[1], same=False), f"link set {renamed} name x", f"link set {off} nomaster", f"link set {elsewhere} netns {last.namespace}")
    bridge.send(signal.SIGCONT)
    for host in hosts[:-1]:
        require(host.port.wait(LIMIT_SECONDS) == 1 and "was removed" in host.port.tail(), host.port.tail())
    require(last.state()["bridged"] == 0, last.state())
    shown = ground.must("ls")
    require(len(re.findall("vnet0", shown)) == 1 and "does not answer" not in shown, shown)
    left = run("nsenter", f"--net=/proc/{bridge.pid}/ns/net", "ip", "-br", "link")
    require(not any(name in left for name in (taken, likewise, off)), left)
    again = ground.host(network, 9)
    again.ping(last.ip)


@scene
def bridged_storms(ground):
    """Of what a device sends to all, no more is taken than the network's rule says; what is for one is not touched by that."""
    began = time.monotonic()
    _network, _bridge, (one, other) = bridged(ground, 2, "--storm", "50")
    for to in (BROADCAST, "01:00:5e:00:00:01", "33:33:00:00:00:01"):
        shout(one, to, one.mac, 500)
    shout(one, other.mac, one.mac, 500)
    received = other.state()["totals"]["received"]
    most = 8 + 50 * (1 + time.monotonic() - began)
    require(500 <= received <= 500 + most + 50, f"{received} frames, of 500 for one and a storm")
    wait_until(lambda: one.dropped(STORM) >= 1500 - most, LIMIT_SECONDS, f"a storm to be counted: {dropped(one.state())}")


@scene
def bridged_uncounted(ground):
    """Where `nft` fails, no device comes, and those that are there are shown, and keep their network."""
    folder = pathlib.Path(ground.directory) / "bin"
    folder.mkdir()
    nft = folder / "nft"
    nft.symlink_to(shutil.which("nft"))
    network = ground.network()
    bridge = ground.bridge(network, "env", f"PATH={folder}")
    one, other = ground.host(network, 1), ground.host(network, 2)
    shout(one, BROADCAST, other.mac, 100)
    wait_until(lambda: one.dropped(SOURCE) == 100, LIMIT_SECONDS, f"what is refused: {dropped(one.state())}")
    nft.unlink()
    shown = ground.must("ls")
    require(len(re.findall("vnet0", shown)) == 2, shown)
    time.sleep(1)
    require(one.dropped(SOURCE) == 100, f"what was counted before: {dropped(one.state())}")
    third = Host(ground, ground.namespace(), network, 3, ())
    third.start_port()
    require(third.port.wait(LIMIT_SECONDS) == 1 and "nft" in third.port.tail(), third.port.tail())
    require("vnet0" not in third.run("ip", "link"), "a device that was refused")
    status, said = ground.eth("delete", network)
    require(status != 0 and "2 ports" in said and bridge.poll() is None, f"{status}, {said}, {bridge.tail()}")
    one.ping(other.ip)
    nft.symlink_to(shutil.which("nft"))
    third.up()
    third.ping(one.ip)


@scene
def bridged_slow_counts(ground):
    """However long `nft` takes, all devices are shown by asking it once at most."""
    folder = pathlib.Path(ground.directory) / "bin"
    folder.mkdir()
    nft, asked = folder / "nft", folder / "asked"
    nft.write_text(f"#!/bin/sh\ncase $1 in -j) echo >> {asked}; {shutil.which('sleep')} 0.3;; esac\nexec {shutil.which('nft')} \"$@\"\n")
    nft.chmod(0o755)
    network = ground.network()
    ground.bridge(network, "env", f"PATH={folder}")
    for number in range(1, 5):
        ground.host(network, number)
    # (By then what it said before holds no more.)
    time.sleep(2)
    asked.write_text("")
    shown = ground.must("ls")
    require(len(re.findall("vnet0", shown)) == 4, shown)
    # (What it said holds for a time, and on a busy machine that may end meanwhile. Who asked for each device would ask four times.)
    require(len(asked.read_text()) < 4, f"nft was asked {len(asked.read_text())} times")


@scene
def bridged_lengths(ground):
    """What is longer than the MTU of the device for which it is comes not, and is counted there."""
    network = ground.network()
    ground.bridge(network)
    one, other = ground.host(network, 1, "--mtu", "9000"), ground.host(network, 2, "--mtu", "1500")
    one.await_carrier(True)
    one.ping(other.ip, "-s", 1400)
    before = other.dropped(KERNEL)
    can("ip", "netns", "exec", one.namespace, "ping", "-c", "3", "-i", "0.01", "-W", "1", "-M", "do", "-s", "5000", other.ip)
    require(other.dropped(KERNEL) == before + 3, f"frames that are too long: {dropped(other.state())}")
    require(not dropped(one.state()), f"where nothing was: {dropped(one.state())}")
    one.ping(other.ip)


def left(ground, network):
    folder = pathlib.Path(ground.networks) / network
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".port")


@scene
def bridged_killed(ground):
    """Of a device that is killed, of a bridge that is, of a namespace that goes, nothing stays; the others go on, or end and say why."""
    network, bridge, (one, other, third) = bridged(ground, 3)
    # One that stands still holds nobody up.
    pid = third.state()["about"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    another = ground.host(network, 4)
    another.ping(one.ip)
    another.port.kill()
    gone = lambda host: "vnet0" not in host.run("ip", "link")  # noqa: E731
    wait_until(lambda: gone(another), LIMIT_SECONDS, "a killed one's device to go")
    wait_until(lambda: one.state()["bridged"] == 2, LIMIT_SECONDS, f"a killed one to be none: {one.state()}")
    another.up()
    another.ping(one.ip)
    # A device that is deleted, and a namespace.
    another.run("ip", "link", "del", "vnet0")
    require(another.port.wait(LIMIT_SECONDS) == 1 and "was removed" in another.port.tail(), another.port.tail())
    passing = ground.namespace()
    guest = Host(ground, passing, network, 5, ())
    guest.up()
    guest.port.kill()
    can("ip", "netns", "del", passing)
    wait_until(lambda: one.state()["bridged"] == 2, LIMIT_SECONDS, f"two others: {one.state()}")
    os.kill(pid, signal.SIGCONT)
    third.ping(one.ip)
    # The bridge: each device goes with it.
    bridge.kill()
    for host in one, other, third:
        require(host.port.wait(LIMIT_SECONDS) == 1 and "bridge has ended" in host.port.tail(), host.port.tail())
        wait_until(lambda host=host: gone(host), LIMIT_SECONDS, "a killed bridge's devices to go")
    require("no ports" in ground.must("ls"), ground.must("ls"))
    require(not left(ground, network), f"sockets: {left(ground, network)}")
    # Where there is to be a bridge, a device comes with the next one.
    promised = ground.network("--bridge=later")
    early = Host(ground, ground.namespace(), promised, 1, ())
    early.start_port()
    ground.bridge(promised)
    early.await_port()
    require("@if" in early.run("ip", "link", "show", "vnet0"), "a device is no veth")
    # Elsewhere, without a bridge, it is a TAP device; with the next bridge they reach each other.
    one.up()
    ground.bridge(network)
    other.up()
    other.await_carrier(True)
    other.ping(one.ip)


@scene
def bridged_restarted(ground):
    """Where a bridge is killed and begun again, a device comes again at once, also while the kernel has not yet removed the one of before."""
    network, bridge, hosts = bridged(ground, 12)
    numbers = set()
    for _ in range(4):
        numbers |= {host.number for host in hosts}
        bridge.kill()
        for host in hosts:
            require(host.port.wait(LIMIT_SECONDS) == 1, host.port.tail())
        bridge = ground.bridge(network)
        for host in hosts:
            host.start_port()
        for host in hosts:
            host.await_port()
        require(not numbers & {host.number for host in hosts}, "numbers that were another bridge's devices', by which one would be ended")
        hosts[0].ping(hosts[-1].ip)
    # One that stays is told at once.
    within(hosts[0].namespace, "ip", "link", "add", "stays", "type", "veth", "peer", "name", "other", "netns", hosts[1].namespace)
    status, said = ground.eth("up", "stays", "--network", network, within=hosts[0].namespace)
    require(status != 0 and "there is a device stays here already" in said, said)


@scene
def bridged_stopped(ground):
    """A bridge that stands still holds up nobody of another network; a device on it that is to end says that it could not."""
    network, bridge, (one, other) = bridged(ground, 2)
    beside = ground.host(ground.network(), 3)
    likewise = bridged(ground, 2)[2]
    bridge.send(signal.SIGSTOP)
    try:
        ground.must("down", "vnet0", within=beside.namespace)
        require(beside.port.wait(LIMIT_SECONDS) == 0, beside.port.tail())
        (listens,) = [line.split() for line in run("ss", "-xlH").splitlines() if f"{network}/0000000000000001.port" in line]
        require(listens[2] == "0", f"a bridge of another network was asked: {listens}")
        # Nor does it where both have a bridge: what is nowhere is looked for longer, begun before.

        def is_found_sooner():
            nowhere = ground.start(["ip", "netns", "exec", one.namespace, ground.command, "eth", "down", "nowhere"])
            for host in likewise:
                require(host.state()["bridged"] == 1, host.state())
            is_sooner = nowhere.poll() is None
            require(nowhere.wait(LIMIT_SECONDS) == 1 and f"some do not answer on {network}" in nowhere.tail(), nowhere.tail())
            return is_sooner

        # (Once at least: on a busy machine a bridge that is well may be slow to answer.)
        wait_until(is_found_sooner, LIMIT_SECONDS, "what is there to be found before what is not is given up")
        ground.must("down", "vnet0", within=likewise[0].namespace)
        one.port.send(signal.SIGINT)
        require(one.port.wait(LIMIT_SECONDS) == 1 and "vnet0 is still there" in one.port.tail(), one.port.tail())
    finally:
        bridge.send(signal.SIGCONT)
    wait_until(lambda: "vnet0" not in one.run("ip", "link"), LIMIT_SECONDS, "a device to go when its bridge goes on")
    wait_until(lambda: other.state()["bridged"] == 0, LIMIT_SECONDS, f"no others: {other.state()}")


@scene
def bridged_again(ground):
    """A bridge whose socket was removed, alone or with its network, which is made again, goes on with its devices and takes new ones."""
    network, bridge, (one, other) = bridged(ground, 2)
    folder = pathlib.Path(ground.networks) / network
    removes = [(folder / "0000000000000001.port").unlink, lambda: (shutil.rmtree(folder), ground.must("create", network))]
    for number, remove in enumerate(removes, 3):
        remove()
        back = lambda: "0000000000000001.port" in left(ground, network)  # noqa: E731
        wait_until(lambda: back() or bridge.poll() is not None, LIMIT_SECONDS, "the bridge to be found again")
        require(bridge.poll() is None, bridge.tail())
        third = ground.host(network, number)
        require("@if" in third.run("ip", "link", "show", "vnet0"), "a device is no veth")
        third.ping(one.ip)
        one.ping(other.ip)


@scene
def bridged_wrong(ground):
    """Each wrong use gets a sentence that names the fix; strangers to a bridge get no device, and hold nobody up."""
    network, bridge, (one, other) = bridged(ground, 2)

    def says(*words, what, within=None):
        status, said = ground.eth(*words, within=within)
        require(status != 0 and what in said, f"{words}: {status}, {said}")

    says("bridge", network, what="has a bridge already")
    says("bridge", "nowhere", what="ringlet eth create nowhere")
    for device in "vnet0", "lo":
        says("up", device, "--network", network, what=f"there is a device {device} here already", within=one.namespace)
    one.run("ip", "tuntap", "add", "kept", "mode", "tap")
    says("up", "kept", "--network", network, what="with --tap a TAP device that persists is taken over", within=one.namespace)
    says("up", "a/b", "--network", network, what="a device's name is of")
    says("up", "v", "--network", network, "--mtu", "67", what="between 68 and 65521")
    name = ground.namespace()
    within(name, "ip", "link", "set", "lo", "up")
    if shutil.which("setpriv") is None:
        raise Skipped("not installed: setpriv")
    nobody = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", ground.command, "eth", "up", "vnet0", "--network", network]
    refused = ground.start(["ip", "netns", "exec", name, *nobody])
    require(refused.wait(LIMIT_SECONDS) == 1 and "CAP_NET_ADMIN" in refused.tail(), refused.tail())
    require("vnet0" not in within(name, "ip", "link"), "a device without the right to make one")
    # What is said, and sent, by hand.
    path = str(pathlib.Path(ground.networks) / network / "0000000000000001.port")

    def ask(what, *descriptors):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
            asks.settimeout(LIMIT_SECONDS)
            asks.connect(path)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            asks.sendmsg([what if isinstance(what, bytes) else json.dumps({"version": VERSION, "ask": what}).encode()], rights)
            said = asks.recv(1 << 18)
            return json.loads(said) if said else None

    device = {"name": "front", "mac": "02:00:00:00:00:55", "mtu": 1500}
    attach = {"Attach": device}
    require(ask(b"what") is None, "what nobody understands is answered")
    require("no socket came" in str(ask(attach)), "a device without a socket")
    ends, pipes = socket.socketpair(), os.pipe()
    for wrong in (ends[0].fileno(), pipes[0], pipes[1], os.open("/dev/null", os.O_RDONLY)):
        require("no socket for devices" in str(ask(attach, wrong)), "a device by what is no socket")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        for wrong in ({"name": "../x"}, {"name": ""}, {"name": "x" * 16}, {"mtu": 60}, {"mac": "01:00:00:00:00:01"}, {"mac": one.mac}):
            said = ask({"Attach": device | wrong}, route.fileno())
            require(said is None or "Refused" in said, f"{wrong}: {said}")
        for other_ask in ({"Join": {}}, "State", {"Next": 1 << 63}, {"Detach": 1 << 63}, {"Way": "auto"}):
            ask(other_ask)
    require(not can("ip", "link", "show", "front"), "a stranger's device")
    with knocking(path):
        third = ground.host(network, 3)
        third.ping(one.ip)
    one.ping(other.ip)
    require(bridge.poll() is None, bridge.tail())


@scene
def bridged_at_once(ground):
    """`create --bridge` begins a bridge, and `delete` ends it; of devices that come while the network goes each is there, or says why not."""
    network = f"net{next(NUMBERS)}"
    folder = pathlib.Path(ground.networks)
    environment = {**os.environ, "RINGLET_ETHERNET": folder.name}
    ends = os.pipe()
    words = [ground.command, "eth", "create", network, "--bridge"]
    subprocess.run(words, check=True, timeout=LIMIT_SECONDS, env=environment, cwd=folder.parent, pass_fds=ends)
    bridge = port_of(ground, "uplink")["about"]["pid"]
    # It keeps nothing of who began it.
    proc = pathlib.Path(f"/proc/{bridge}")
    kept = [os.readlink(path) for path in (proc / "cwd", *(proc / "fd").iterdir())]
    require(kept[0] == "/" and os.readlink(f"/proc/self/fd/{ends[0]}") not in kept, f"a bridge keeps {kept}")
    one, other = ground.host(network, 1), ground.host(network, 2)
    one.ping(other.ip)
    for host in one, other:
        ground.must("down", "vnet0", within=host.namespace)
    for _ in range(5):
        hosts = [Host(ground, one.namespace, network, number, (), f"v{number}") for number in range(1, 5)]
        for host in hosts:
            host.start_port()
        status, said = ground.eth("delete", network)
        for host in hosts:
            wait_until(lambda host=host: "ready" in host.port.tail() or host.port.poll() is not None, LIMIT_SECONDS, "a device to be there, or not")
        for host in hosts:
            host.port.stop()
        if status != 0:
            require("ports" in said or "bridge" in said, said)
            ground.must("delete", network)
        wait_until(lambda: not lives(bridge), LIMIT_SECONDS, "the bridge to end")  # noqa: B023
        wait_until(lambda: " v" not in one.run("ip", "-br", "link"), LIMIT_SECONDS, f"devices to go: {one.run('ip', '-br', 'link')}")
        ground.must("create", network, "--bridge")
        bridge = port_of(ground, "uplink")["about"]["pid"]
    ground.must("delete", network)
    wait_until(lambda: not lives(bridge), LIMIT_SECONDS, "the bridge to end")


@scene
def bridged_unit(ground):
    """The unit is one, and a bridge does with the rights that it leaves."""
    text = (ROOT / "deploy/ringlet-eth-bridge@.service").read_text().replace("/usr/local/bin/ringlet", ground.command)
    place = pathlib.Path(ground.directory) / "ringlet-eth-bridge@blue.service"
    place.write_text(text)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        require(done.returncode == 0 and not done.stderr, done.stderr)
    (rights,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("CapabilityBoundingSet=")]
    rights = ",".join("+" + right.removeprefix("CAP_").lower() for right in rights.split())
    network = ground.network()
    words = ["setpriv", f"--bounding-set=-all,{rights}", "--inh-caps=-all", "--no-new-privs", ground.command, "eth", "bridge", network]
    bridge = ground.start(words)
    wait_until(lambda: "ready" in bridge.tail() or bridge.poll() is not None, LIMIT_SECONDS, "a bridge")
    one, other = ground.host(network, 1), ground.host(network, 2)
    one.ping(other.ip)
    tap = ground.host(network, 3, "--tap")
    one.await_carrier(True)
    tap.ping(one.ip)


SQUAT = """
import json, os, socket, sys, time
path, user, way = sys.argv[1:]
os.setgid(int(user))
os.setuid(int(user))
squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
squatter.bind(path)
squatter.listen(0)
comers = []
try:
    while way == 'full':
        comers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        comers[-1].setblocking(False)
        comers[-1].connect(path)
except BlockingIOError:
    pass
print('there', flush=True)
while way == 'invents':
    state = json.loads(sys.stdin.readline())
    while True:
        comer = squatter.accept()[0]
        print('somebody has come', flush=True)
        came = json.loads(comer.recv(1 << 16) or 'null')
        if came and 'Next' in came['ask']:
            state['about'] |= {'id': f"{came['ask']['Next'] + 1:016x}", 'name': 'invented'}
            comer.send(json.dumps({'State': state | {'bridged': 1}}).encode())
time.sleep(1000)
"""


@scene
def bridged_squatters(ground):
    """Who may enter a network's directory is not taken for its bridge: a device is a TAP device then, and nobody looks at, or waits for, such a one."""
    network, other = ground.network("--group", NOBODY), ground.network()
    beside = ground.host(other, 9)
    state = json.dumps(beside.state())
    path = pathlib.Path(ground.networks) / network / "0000000000000001.port"
    os.chmod(ground.directory, 0o755)

    def costs_nothing():
        host = Host(ground, ground.namespace(), network, 1, ())
        for _ in range(2):
            host.up()
            require("@if" not in host.run("ip", "link", "show", "vnet0"), "a device on what is no bridge")
            shown = ground.must("ls")
            require("vnet0" in shown and "invented" not in shown and "does not answer" not in shown, shown)
            require(beside.state()["totals"] is not None, "another network's device is not found")
            ground.must("down", "vnet0", within=host.namespace)
            require(host.port.wait(LIMIT_SECONDS) == 0, host.port.tail())

    for way in "invents", "full", "is silent":
        squatter = ground.start([sys.executable, "-c", SQUAT, path, NOBODY, way])
        require(squatter.line(LIMIT_SECONDS) == "there", squatter.tail())
        if way == "invents":
            squatter.write(state + "\n")
        costs_nothing()
        require("has come" not in squatter.tail(), f"a squatter was asked: {squatter.tail()}")
        ground.must("delete", network)
        ground.must("create", network, "--group", NOBODY)
        squatter.kill()
    # Nor is a link to a port, or to what never answers.
    path.symlink_to(f"../{other}/{beside.number}.port")
    costs_nothing()
    path.unlink()
    silent = pathlib.Path(ground.directory) / "silent"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listens:
        listens.bind(str(silent))
        listens.listen()
        path.symlink_to(silent)
        costs_nothing()
    path.unlink()
    # Where there is to be a bridge, there is no device without, and a bridge takes its name back.
    network = ground.network("--group", NOBODY, "--bridge=later")
    path = pathlib.Path(ground.networks) / network / path.name
    squatter = ground.start([sys.executable, "-c", SQUAT, path, NOBODY, "is silent"])
    require(squatter.line(LIMIT_SECONDS) == "there", squatter.tail())
    status, said = ground.eth("up", "vnet0", "--network", network, within=ground.namespace())
    require(status == 1 and f"ringlet eth bridge {network}" in said, said)
    ground.bridge(network)
    one, last = ground.host(network, 1), ground.host(network, 2)
    one.ping(last.ip)


def lives(pid):
    """(A zombie does not.)"""
    return bool(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()) if os.path.exists(f"/proc/{pid}") else False
