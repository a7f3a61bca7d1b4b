"""A port that does what none does, spoken by hand: the others stay well."""

import array
import collections
import contextlib
import json
import mmap
import os
import pathlib
import random
import resource
import signal
import socket
import struct
import subprocess
import threading
import time

from harness import Failed, require, wait_until
from networks import LIMIT_SECONDS, Host

HOSTILE = {}
# Mirrors ringlet-ethernet/src/wire.rs and ringlet-core/src/layout.rs.
VERSION = 2 << 16 | 11
SLOTS, SLOT_COUNT, LINE = 4096, 1024, 64
PLAIN = bytes(10)
NOBODY = 65534
BROADCAST = b"\xff" * 6
HEADER = "malformed header"
SOURCE = "a source address that is another port's"


def scene(function):
    HOSTILE[function.__name__] = function
    return function


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


class Stranger:
    """One strand with a port, whose memory it writes as it likes."""

    def __init__(self, host, address="02:00:00:00:00:66", version=VERSION, name="stranger"):
        folder = pathlib.Path(os.environ["RINGLET_ETHERNET"]) / host.network
        number = host.number
        self.held = contextlib.ExitStack()
        self.number = random.getrandbits(64)
        self.mac, self.position = mac(address), 0
        self.seat = self.held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        path = folder / f"{self.number:016x}.port"
        self.seat.bind(str(path))
        self.held.callback(path.unlink, missing_ok=True)
        self.seat.listen()
        self.socket = self.held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.socket.settimeout(LIMIT_SECONDS)
        self.socket.connect(str(folder / f"{number}.port"))
        about = {"id": f"{self.number:016x}", "name": name, "mac": address, "queues": 1, "pid": 1, "namespace": 0, "far": False}
        self.about = about
        self.socket.send(json.dumps({"version": version, "ask": {"Join": about}}).encode())
        said, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
        self.answer = json.loads(said)
        self.socket.setblocking(False)
        if "Strand" in self.answer:
            self.ring_bytes = self.answer["Strand"]["ring_bytes"]
            self.memory = mmap.mmap(fds[0], SLOTS + 2 * (SLOT_COUNT * LINE + self.ring_bytes))
        for fd in fds:
            os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.held.close()

    def bell(self):
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.socket.send(b"\0")

    def record(self, flags, length, payload):
        """The next record, in its slot."""
        at = SLOTS + self.position % SLOT_COUNT * LINE
        self.memory[at + 8 : at + 8 + len(payload)] = payload
        header = (1 << 43 | self.position) << 20 | flags << 17 | length
        self.memory[at : at + 8] = struct.pack("<Q", header)
        self.position += 1
        self.bell()

    def send(self, source, destination=BROADCAST, header=PLAIN, rest=bytes(20)):
        message = header + destination + source + b"\x88\xb5" + rest
        self.record(0, len(message), message)

    def is_out(self):
        """The other end has been closed."""
        try:
            while self.socket.recv(64):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True


def well(*hosts):
    """All others reach each other, and none has ended."""
    for host in hosts:
        require(host.port.poll() is None, f"a port ended: {host.port.tail()}")
        for other in hosts:
            if other is not host:
                host.ping(other.ip, "-s", 9000)


@scene
def lies(ground):
    """Headers that say what can't be, and other ports' addresses, are refused and counted; a record that no port writes ends the strand."""
    one, other = ground.hosts(2, "--addresses", "locked")
    with Stranger(one) as stranger:
        one_takes = one.state()["totals"]["received"]
        stranger.send(stranger.mac)
        wait_until(lambda: one.state()["totals"]["received"] > one_takes, LIMIT_SECONDS, "an honest frame to be taken")
        # (The first five are no header of a kernel's; a multicast source is nobody's.)
        broken = [bytes([4]) + bytes(9), b"\0\x02" + bytes(8), b"\1\1\xff\xff\0\1\x22\0\x10\0"]
        broken += [b"\1\1\0\0\0\0\x22\0\x10\0", b"\1\0\0\0\0\0\xff\xff\0\0"]
        for header in broken:
            stranger.send(stranger.mac, header=header)
        stranger.send(b"\1" + stranger.mac[1:])
        stranger.record(0, 11, bytes(11))
        wait_until(lambda: one.dropped(HEADER) == len(broken) + 2, LIMIT_SECONDS, f"what is malformed to be counted: {one.state()}")
        for source in (mac(one.mac), mac(other.mac)):
            stranger.send(source)
        wait_until(lambda: one.dropped(SOURCE) == 2, LIMIT_SECONDS, f"who takes others' addresses to be counted: {one.state()}")
        well(one, other)
        stranger.record(0, 57, bytes(40))
        wait_until(stranger.is_out, LIMIT_SECONDS, "a corrupt record to end the strand")
    behind_the_end = struct.pack("<Q", (1 << 21) - 64)
    for flags, length, payload in ((1, 100, behind_the_end), (1, 0, bytes(8)), (1, (1 << 17) - 1, bytes(8)), (4, 16, bytes(16)), (5, 16, bytes(16))):
        with Stranger(one) as stranger:
            stranger.record(flags, length, payload)
            wait_until(stranger.is_out, LIMIT_SECONDS, f"{(flags, length)} to end the strand")
    well(one, other)


@scene
def locked(ground):
    """Where addresses are locked or static nobody has another's, and where they are static nobody has a second one."""
    for policy, second in (("locked", 0), ("static", 1)):
        (one,) = ground.hosts(1, "--addresses", policy)
        with Stranger(one, "02:00:00:00:00:66") as stranger, Stranger(one, "02:00:00:00:00:67") as thief:
            stranger.send(mac("02:00:00:00:00:77"))
            wait_until(lambda: one.state()["totals"]["received"] + one.dropped(SOURCE) == 1, LIMIT_SECONDS, "a second address")  # noqa: B023
            require(one.dropped(SOURCE) == second, f"{policy}: {one.state()}")
            for address in ("02:00:00:00:00:77", "02:00:00:00:00:66"):
                thief.send(mac(address))
            wait_until(lambda: one.dropped(SOURCE) == second + 2, LIMIT_SECONDS, f"a thief to be refused: {one.state()}")  # noqa: B023
        with Stranger(one, one.mac) as twin:
            require("Refused" in twin.answer, f"{twin.answer}")


@contextlib.contextmanager
def nobody():
    """Sockets that are made meanwhile are another user's."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@scene
def users(ground):
    """Who is of the network's group may be a port of it; another user's addresses he can't have, nor end another's port. One user's ports may."""
    pathlib.Path(ground.directory).chmod(0o755)
    one, other = ground.hosts(2, "--group", str(NOBODY))
    with Stranger(one) as stranger:
        stranger.send(mac(other.mac))
        wait_until(lambda: one.state()["totals"]["received"] >= 1 and not one.dropped(SOURCE), LIMIT_SECONDS, f"an address to move: {one.state()}")
        stranger.send(mac(one.mac))
        wait_until(lambda: one.dropped(SOURCE) == 1, LIMIT_SECONDS, f"our own address to be refused: {one.state()}")
    well(one, other)
    with nobody():
        stranger = Stranger(one)
    with stranger:
        require("Strand" in stranger.answer, f"{stranger.answer}")
        for source in (mac(one.mac), mac(other.mac)):
            stranger.send(source)
        wait_until(lambda: one.dropped(SOURCE) == 3, LIMIT_SECONDS, f"another user to be refused: {one.state()}")
        with nobody(), contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as asks:
            asks.settimeout(LIMIT_SECONDS)
            asks.connect(stranger.socket.getpeername())
            asks.send(json.dumps({"version": VERSION, "ask": "End"}).encode())
            answer = json.loads(asks.recv(1 << 16))
        require("Refused" in answer, f"{answer}")
        well(one, other)
    # And where there is no group he does not come in.
    (alone,) = ground.hosts(1)
    with nobody():
        try:
            Stranger(alone).held.close()
        except PermissionError:
            return
    raise Failed("a user who may not has come in")


@scene
def scribbles(ground):
    """Random bytes all over the memory, again and again."""
    one, other = ground.hosts(2)
    for seed in range(6):
        chance = random.Random(seed)
        with Stranger(one) as stranger, Stranger(other) as second:
            for each in (stranger, second):
                for _ in range(300):
                    where = ((512, 1536), (SLOTS, SLOTS + 4096), (0, len(each.memory) - 64))
                    at = chance.randrange(*chance.choice(where))
                    each.memory[at : at + 8] = chance.randbytes(8) if chance.random() < 0.9 else bytes(8)
                    if chance.random() < 0.1:
                        each.bell()
                    if chance.random() < 0.1:
                        each.send(each.mac, rest=chance.randbytes(20))
            well(one, other)


@scene
def hears_nothing(ground):
    """What one port sends to another is in no memory of a third."""
    one, other = ground.hosts(2)
    with Stranger(one) as stranger, Stranger(other) as second:
        one.ping(other.ip)
        marker = os.urandom(16)
        one.ping(other.ip, "-s", 4000, "-p", marker.hex())
        other.ping(one.six, "-s", 4000, "-p", marker.hex())
        for each in (stranger, second):
            require(each.memory.find(marker) < 0, "a frame for another port")
        # (What is for all is there: the look is one.)
        one.run("ip", "neigh", "flush", "all")
        one.ping(other.ip)
        require(stranger.memory.find(mac(one.mac)) >= 0, "not even a broadcast has come")


@scene
def deaf(ground):
    """One that takes nothing loses its own frames; the others' go on."""
    one, other = ground.hosts(2)
    with Stranger(one):
        speak = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n"
        speak += "for _ in range(500): s.sendto(bytes(1000), ('10.7.0.255', 7007))"

        def is_full():
            # (Of what comes faster than the port reads, the device itself loses what is more than its own queue takes.)
            one.run("python3", "-c", speak)
            return any(peer["full"] for peer in one.state()["peers"] if peer["name"] == "stranger")
        wait_until(is_full, LIMIT_SECONDS, f"a full queue: {one.state()}")
        fill = {peer["name"]: peer["waiting"] for peer in one.state()["peers"]}
        require(fill["stranger"] > 900, f"frames that wait in queues: {fill}")
        well(one, other)


@scene
def storms(ground):
    """Of what goes to all, no more is taken than the network's rule says."""
    (one,) = ground.hosts(1, "--storm", "50")
    with Stranger(one) as stranger:
        for _ in range(500):
            stranger.send(stranger.mac)
        wait_until(lambda: one.dropped("too many to all ports") >= 350, LIMIT_SECONDS, f"a storm to be bounded: {one.state()}")
    # Nor by who comes again and again.
    before, began = one.state()["totals"], time.monotonic()
    seen = lambda now: now["received"] + now["dropped"]["too many to all ports"]  # noqa: E731
    for _ in range(20):
        sent = seen(one.state()["totals"]) + 50
        with Stranger(one) as stranger:
            for _ in range(50):
                stranger.send(stranger.mac)
            wait_until(lambda: seen(one.state()["totals"]) == sent, LIMIT_SECONDS, f"all to be looked at: {one.state()}")  # noqa: B023
    received = one.state()["totals"]["received"] - before["received"]
    require(received <= 20 * 8 + 50 * (1 + time.monotonic() - began), f"{received} frames of a storm")


@contextlib.contextmanager
def knocking(path):
    """Somebody connects there, says nothing, and connects again."""
    is_over = threading.Event()

    def knock():
        held = collections.deque()
        while not is_over.is_set():
            held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            held[-1].setblocking(False)
            with contextlib.suppress(OSError):
                held[-1].connect(path)
            if len(held) > 200:
                held.popleft().close()
        for each in held:
            each.close()

    threads = [threading.Thread(target=knock) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@scene
def comers(ground):
    """Who connects and says nothing, or what nobody understands, is in nobody's way."""
    one, other = ground.hosts(2)
    path = str(pathlib.Path(os.environ["RINGLET_ETHERNET"]) / one.network / f"{one.state()['about']['id']}.port")
    with contextlib.ExitStack() as held:
        for number in range(200):
            comer = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            comer.connect(path)
            with contextlib.suppress(OSError):
                if number % 4 == 1:
                    comer.send(b"{" * 60_000)
                elif number % 4 == 2:
                    comer.sendmsg([b"null"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
                elif number % 4 == 3:
                    strand = {"id": "1", "number": 65535, "token": 0}
                    comer.send(json.dumps({"version": VERSION, "ask": {"Strand": strand}}).encode())
        with Stranger(one, version=1) as stranger:
            require("version" in stranger.answer.get("Refused", ""), f"{stranger.answer}")
        # (Of many such names what a port says of all others would be too long to be said.)
        with Stranger(one, name="\1" * 64) as stranger:
            require("control characters" in stranger.answer.get("Refused", ""), f"{stranger.answer}")
        third = ground.host(one.network, 3)
        wait_until(lambda: len(third.state()["peers"]) == 2, LIMIT_SECONDS, "a new port to meet the others")
        well(one, other, third)
    # And while so many come all the time that those who were not heard yet have to go.
    with knocking(path):
        many = [ground.host(one.network, number) for number in range(4, 10)]
        for host in many:
            wait_until(lambda host=host: len(host.state()["peers"]) == 8, LIMIT_SECONDS, f"all others: {host.state()['peers']}")
    well(one, *many[:2])


def folder_of(host):
    return pathlib.Path(os.environ["RINGLET_ETHERNET"]) / host.network


def meets(host, count):
    wait_until(lambda: len(host.state()["peers"]) == count, LIMIT_SECONDS, f"{count} others: {host.state()['peers']}")


@scene
def aliases(ground):
    """By another name of a port's socket nobody is parted from that port."""
    one, other = ground.hosts(2)
    path = folder_of(one) / f"{one.number}.port"
    for make, number in ((pathlib.Path.symlink_to, 0), (pathlib.Path.hardlink_to, 1)):
        make(folder_of(one) / f"{number:016x}.port", path)
    third = ground.host(one.network, 3)
    meets(third, 2)
    well(one, other, third)


@scene
def impostor(ground):
    """Who says that it is a device of another namespace's is not taken for it."""
    one, other = ground.hosts(2)
    totals = {**one.state()["totals"], "dropped": {}}
    device = other.state()["about"]["pid"]
    with Stranger(one) as stranger:
        about = {**stranger.about, "name": "vnet0", "namespace": os.stat(f"/run/netns/{other.namespace}").st_ino}
        answers = {"State": {"State": {"about": about, "peers": [], "totals": totals}}, "End": "Ending"}
        heard = []
        stranger.seat.settimeout(0.1)
        # (The device itself answers later.)
        os.kill(device, signal.SIGSTOP)
        down = ground.start(["ip", "netns", "exec", other.namespace, ground.command, "eth", "down", "vnet0"])

        def is_down():
            with contextlib.suppress(TimeoutError), contextlib.closing(stranger.seat.accept()[0]) as asks:
                asks.settimeout(LIMIT_SECONDS)
                heard.append(json.loads(asks.recv(1 << 16))["ask"])
                asks.send(json.dumps(answers[heard[-1]]).encode())
            if heard:
                os.kill(device, signal.SIGCONT)
            return down.poll() is not None

        wait_until(is_down, LIMIT_SECONDS, f"the device to end: {heard} {down.tail()}")
        require(heard == ["State"], f"a stranger was asked: {heard}")
        require(down.poll() == 0 and other.port.wait(LIMIT_SECONDS) == 0, f"{down.tail()} {other.port.tail()}")


@scene
def unheard(ground):
    """A device whose words nobody hears any more stays; also one that has no streams at all."""
    (one,) = ground.hosts(1)
    for number, closed in ((2, False), (3, True)):
        host = Host(ground, ground.namespace(), one.network, number, ())
        words = [ground.command, "eth", "up", "vnet0", "--network", one.network, "--mac", host.mac]
        shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"] if closed else []
        port = subprocess.Popen(["ip", "netns", "exec", host.namespace, *shell, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            said = port.stdout.readline()
            require(closed or said.startswith(b"ready"), f"{said} {port.poll()}")
            port.stdout.close()
            port.stderr.close()
            meets(one, 1)
            host.number = host.state()["about"]["id"]
            with Stranger(host) as stranger:
                stranger.record(0, 57, bytes(40))
                wait_until(stranger.is_out, LIMIT_SECONDS, "a corrupt record to end the strand")
            # (It is told that, and goes on.)
            meets(host, 1)
            require(port.poll() is None, f"it has ended: {port.poll()}")
        finally:
            port.kill()
            port.wait(LIMIT_SECONDS)
        meets(one, 0)


@scene
def numbers(ground):
    """A port that lacks descriptors for a while meets the others when it has some."""
    (one,) = ground.hosts(1)
    pid = one.state()["about"]["pid"]
    taken = {int(path.name) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(1 << 20) if number not in taken)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # (Who comes is let in; there is none for more.)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, before[1]))
    other = ground.host(one.network, 2)
    tails = lambda: one.port.tail() + other.port.tail()  # noqa: E731
    wait_until(lambda: "no strand" in tails() or "refuses" in tails(), LIMIT_SECONDS, f"a port that lacks descriptors to say so: {tails()}")
    # (Long enough for who would try again at once only to have given up.)
    time.sleep(1)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    meets(other, 1)
    well(one, other)


@scene
def crowd(ground):
    """All the names and places that another user takes are in nobody's way."""
    pathlib.Path(ground.directory).chmod(0o755)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    one, other = ground.hosts(2, "--group", str(NOBODY))
    with contextlib.ExitStack() as held:
        for number in range(510):
            with nobody():
                stranger = held.enter_context(Stranger(one, f"02:00:00:01:{number >> 8:02x}:{number & 255:02x}"))
            require("Strand" in stranger.answer, f"{number}: {stranger.answer}")
        meets(one, 511)
        # (And names behind which nobody ever answers.)
        for number in range(600):
            silent = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            path = folder_of(one) / f"{number:016x}.port"
            with nobody():
                silent.bind(str(path))
                silent.listen()
        third = ground.host(one.network, 3)
        for host, mac_of in ((one, third.mac), (other, third.mac), (third, one.mac), (third, other.mac)):
            wait_until(lambda: mac_of in [peer["mac"] for peer in host.state()["peers"]], LIMIT_SECONDS, f"{mac_of} at {host.mac}")  # noqa: B023
        well(one, other, third)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
