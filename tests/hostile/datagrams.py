"""UDP: senders and receivers that lie at doors and in lanes, and strangers who want to send in another's name."""

import contextlib
import mmap
import os
import socket
import struct
import time

from harness import DATAGRAMS, Failed, Skipped, frame, framed, require, wait_until
from protocol import GROW, INLINE_BYTES, LEN_BITS, FLAG_BITS, LINE_BYTES, PAGE_BYTES, PUBLISHED, SEAL, SHRINK
from protocol import WORD, memfd
from rendezvous import as_user, until_killed
from subject import ANSWER_SECONDS, RING, SETTLE_SECONDS, Subject

# Mirrors ringlet/src/socket/datagram/door.rs, ringlet-core/src/switch.rs and `LaneGeometry` of ringlet-core/src/layout.rs.
HELLO, LANE = 1, 2
WORDS_OFFSET = 2048
PATH, BUSY, BY_KERNEL, SETTLED, LEFT = (WORDS_OFFSET + at for at in (0, 128, 256, 264, 272))
HEAD_BYTES = 8
TO_RING = 1
LOOPBACK = bytes(10) + b"\xff\xff" + bytes((127, 0, 0, 1))

ROUNDS_TO_A_LOOK = 140  # LATER_MAX_CALLS and some more
KNOCKS_AT_ONCE = 6
IDLE_SECONDS = 1.1  # CHECK_IDLE_NS and some more
SCRIBBLES = 300
BROADCASTS = 1000
WARM_ROUNDS = 400
STEADY_ROUNDS = 40


def scenes(ground):
    with ground.scene("a sender that tells the truth"):
        truth(ground)
    with ground.scene("nobody sends in another's name"):
        strangers(ground)
    with ground.scene("another user, who could close its port and go on in the next one's name, gets no lane"):
        another_user(ground)
    with ground.scene("a broadcast reaches all"):
        Subject(ground).do("udp_broadcast", BROADCASTS)
    with ground.scene("senders that lie at the door"):
        lies(ground)
    with ground.scene(f"{SCRIBBLES} senders' scribbles over their lanes"):
        scribbles(ground)
    with ground.scene("a sender that stays busy, one that rewrites its history"):
        stuck(ground)
    with ground.scene("receivers that lie"):
        receivers(ground)


def inode_of(sock):
    return os.fstat(sock.fileno()).st_ino


def message(kind, fd, inode, to_inode, source, target, slots=0, ring_bytes=0, **head):
    body = struct.pack("<III", fd & 0xFFFFFFFF, inode & 0xFFFFFFFF, to_inode & 0xFFFFFFFF)
    for port in (source, target):
        body += LOOPBACK + struct.pack("<I", port & 0xFFFFFFFF)
    return frame(DATAGRAMS, kind, body + struct.pack("<IQ", slots & 0xFFFFFFFF, ring_bytes & WORD), **head)


def door_name(inode):
    return f"\0ringlet1/udp/{inode:08x}"


def told(door, kind):
    """The next message of a kind at a door, which is non-blocking."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data, fds, _flags, _address = socket.recv_fds(door, 200, 4)
            said, fields = framed(data, DATAGRAMS)
            if said == kind:
                return fields, fds
            for fd in fds:
                os.close(fd)
    return None


class Port:
    """A UDP socket of ours with a door, by hand."""

    def __init__(self, port=0):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", port))
        self.socket.settimeout(ANSWER_SECONDS)
        self.inode, self.port = inode_of(self.socket), self.socket.getsockname()[1]
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.door.bind(door_name(self.inode))
        self.door.setblocking(False)
        self.lane = None

    def close(self):
        self.socket.close()
        self.door.close()
        if self.lane is not None:
            self.lane.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data, port):
        self.socket.sendto(data, ("127.0.0.1", port))

    def knock(self, inode, data, fds=()):
        """False when nobody is there."""
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
            self.door.sendmsg([data], rights, 0, door_name(inode))
        except (ConnectionRefusedError, BlockingIOError, PermissionError):
            return False
        return True

    def hello(self, victim, **changes):
        said = {"kind": HELLO, "fd": self.socket.fileno(), "inode": self.inode, "to_inode": victim.inode,
                "source": self.port, "target": victim.port}
        return message(**{**said, **changes})

    def answered(self, kind):
        """What of this kind came to our door: (message, descriptors), or None."""
        return told(self.door, kind)

    def meet(self, victim):
        """Gets a lane as an honest sender does."""
        deadline = time.monotonic() + ANSWER_SECONDS
        knocked = False
        while time.monotonic() < deadline:
            victim.round(self)
            knocked = knocked or self.knock(victim.inode, self.hello(victim))
            if knocked and (answer := self.answered(LANE)):
                data, fds = answer
                slots, ring_bytes = struct.unpack_from("<IQ", data, 52)
                self.slots, self.ring_bytes = slots, ring_bytes
                self.lane = mmap.mmap(fds[0], os.fstat(fds[0]).st_size)
                for fd in fds:
                    os.close(fd)
                return self
        raise Failed("the victim never answered at the door")

    def word(self, at, size=4):
        return int.from_bytes(self.lane[at : at + size], "little")

    def put(self, at, value, size=4):
        self.lane[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def warm(self, victim):
        """Sends through the kernel until the victim looks at the lane."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.word(PATH) != TO_RING:
            require(time.monotonic() < deadline, "the lane is never turned to the ring")
            victim.round(self)
        self.position = 0

    def publish(self, data, before=0):
        data = struct.pack("<Q", before) + data
        slot = PAGE_BYTES + self.position % self.slots * LINE_BYTES
        self.lane[slot + 8 : slot + 8 + len(data)] = data
        header = (PUBLISHED | self.position) << (LEN_BITS + FLAG_BITS) | len(data)
        self.put(slot, header, 8)
        self.position += 1


class UdpVictim:
    """A program with a UDP socket under ringlet."""

    def __init__(self, ground, role="server"):
        self.subject = Subject(ground, role, env={"RINGLET_SPIN_US": "50"})
        self.port, self.inode = self.subject.do("udp")

    def round(self, port):
        """One datagram through the kernel, and its answer."""
        port.send(b"round", self.port)
        self.subject.do("udp_answer")
        require(port.socket.recv(100) == b"round", "a wrong answer")

    def rounds(self, port):
        """So many that it looks at its door."""
        for _ in range(ROUNDS_TO_A_LOOK):
            self.round(port)

    def take(self, most=1000):
        """All that can be received: a list of (sender's port, text)."""
        return [(port, bytes.fromhex(text)) for port, text in self.subject.do("udp_take", most)]


class Steady:
    """An honest pair that goes on meanwhile: a client of the victim's under ringlet too."""

    def __init__(self, ground, victim):
        self.victim, self.client = victim, Subject(ground, "client")
        self.port, _inode = self.client.do("udp")
        self.goes_on(WARM_ROUNDS)

    def goes_on(self, rounds=STEADY_ROUNDS):
        # Answers only to this one: what strangers sent is left out by its mark.
        self.victim.subject.ask("udp_serve", self.port, rounds)
        self.client.do("udp_ask", self.victim.port, rounds)
        self.victim.subject.answer()


def truth(ground):
    victim = UdpVictim(ground)
    with Port() as sender:
        sender.meet(victim)
        sender.warm(victim)
        for text in (b"", b"x", b"y" * (INLINE_BYTES - HEAD_BYTES)):
            sender.publish(text)
        require(victim.take() == [(sender.port, text) for text in (b"", b"x", b"y" * (INLINE_BYTES - HEAD_BYTES))], "wrong datagrams")
        sender.put(LEFT, 1)
        require(victim.take() == [], "datagrams from nobody")


def strangers(ground):
    victim = UdpVictim(ground)
    steady = Steady(ground, victim)
    with Port() as stranger, contextlib.ExitStack() as stack:
        innocent = stack.enter_context(contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        innocent.bind(("127.0.0.1", 0))
        child = os.fork()
        if child == 0:
            # Holds the innocent socket alone.
            stranger.close()
            until_killed()
        inode, port, number = inode_of(innocent), innocent.getsockname()[1], innocent.fileno()
        innocent.close()
        try:
            squatted = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            stack.callback(squatted.close)
            squatted.bind(door_name(inode))
            squatted.setblocking(False)
            for _ in range(5):
                for claim in ({"source": port}, {"source": port, "inode": inode}, {"source": port, "inode": inode, "fd": number},
                              {"source": steady.port}, {"source": 53}, {"source": 0}):
                    require(stranger.knock(victim.inode, stranger.hello(victim, **claim)), "the victim has no door")
                victim.rounds(stranger)
            for door in (squatted, stranger.door):
                require(told(door, LANE) is None, "the victim gave a lane in another's name")
            steady.goes_on()
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def another_user(ground):
    if os.geteuid() != 0:
        raise Skipped("only root can become another user")
    victim = UdpVictim(ground)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]

    def act(ready):
        with Port(number) as sender:
            knocked = 0
            for _ in range(2 * ROUNDS_TO_A_LOOK):
                sender.send(b"round", victim.port)
                require(sender.socket.recv(100) == b"round", "a wrong answer")
                knocked += sender.knock(victim.inode, sender.hello(victim))
            require(knocked, "the victim has no door")
            require(sender.answered(LANE) is None, "another user was given a lane")
        ready()

    victim.subject.ask("udp_serve", number, 2 * ROUNDS_TO_A_LOOK)
    with as_user("nobody", act):
        victim.subject.answer()


def lies(ground):
    victim = UdpVictim(ground)
    steady = Steady(ground, victim)
    held = victim.subject.held()
    with Port() as liar:
        for number in range(100):
            if number % KNOCKS_AT_ONCE == 0:
                victim.rounds(liar)
            kind = ground.random.randrange(6)
            said = bytearray(liar.hello(victim))
            if kind < 3:
                said[ground.random.randrange(8, len(said))] ^= 1 << ground.random.randrange(8)
                if bytes(said) == liar.hello(victim):
                    continue  # it is the truth
            elif kind == 3:
                said = said[: ground.random.randrange(len(said))]
            elif kind == 4:
                said = ground.random.randbytes(ground.random.randrange(300))
            fds = [liar.socket.fileno()] * ground.random.randrange(4) if kind == 5 else []
            if kind == 5:
                said = message(LANE, liar.socket.fileno(), liar.inode, victim.inode, victim.port, liar.port, 1024, 1 << 18)
            liar.knock(victim.inode, bytes(said), fds)
        victim.rounds(liar)
        steady.goes_on()
    # It owns its address, whatever else it says, so one of them may have got it a lane; that goes with it.
    with Port() as other:

        def let_go():
            time.sleep(IDLE_SECONDS)
            victim.rounds(other)
            return victim.subject.held() == held

        with contextlib.suppress(Failed):
            wait_until(let_go, SETTLE_SECONDS, "the victim to let go")
    victim.subject.holds_only(held, "lies at the door")


def scribbles(ground):
    victim = UdpVictim(ground)
    steady = Steady(ground, victim)
    left = SCRIBBLES * ground.options.rounds
    while left:
        with Port() as sender:
            sender.meet(victim)
            sender.warm(victim)
            for _ in range(min(left, 60)):
                left -= 1
                random = ground.random
                at = random.choice((0, WORDS_OFFSET, PAGE_BYTES, PAGE_BYTES, random.randrange(len(sender.lane) // 8) * 8))
                at += random.randrange(64) * 8
                position = sender.position + random.randrange(-1, 3)
                header = (PUBLISHED | position & (PUBLISHED - 1)) << (LEN_BITS + FLAG_BITS)
                value = random.choice((random.getrandbits(64), 0, WORD, header | random.getrandbits(LEN_BITS + FLAG_BITS)))
                sender.put(min(at, len(sender.lane) - 8), value, 8)
                if not random.randrange(4):
                    for port, _text in victim.take():
                        require(port in (sender.port, steady.port), "a datagram from an address that is not its sender's")
            steady.goes_on()


def stuck(ground):
    victim = UdpVictim(ground)
    steady = Steady(ground, victim)
    with Port() as sender:
        sender.meet(victim)
        sender.warm(victim)
        sender.put(BUSY, 1)
        for _ in range(5):
            steady.goes_on()
            time.sleep(0.02)
        victim.round(sender)
    with Port() as sender:
        sender.meet(victim)
        sender.warm(victim)
        for number in range(50):
            sender.put(BY_KERNEL, ground.random.choice((0, number, WORD, ground.random.getrandbits(64))), 8)
            sender.put(SETTLED, ground.random.choice((0, number + 1, ground.random.getrandbits(64))), 8)
            sender.publish(b"with a history", ground.random.choice((0, number, WORD, ground.random.getrandbits(64))))
            sender.put(BY_KERNEL, ground.random.getrandbits(64), 8)
            victim.take()
        steady.goes_on()


def receivers(ground):
    victim = UdpVictim(ground)
    geometry = (1024, 1 << 18)
    size = 2 * PAGE_BYTES + geometry[0] * LINE_BYTES - PAGE_BYTES + geometry[1]
    with Port() as receiver:
        answers = 0
        for number in range(120):
            victim.subject.do("udp_send", receiver.port, f"number {number}")
            require(receiver.socket.recv(100) == f"number {number}".encode(), "a datagram is lost or changed")
            if not (said := receiver.answered(HELLO)):
                continue
            data, _fds = said
            fd, inode = struct.unpack_from("<II", data)
            source, target = struct.unpack_from("<I", data, 28)[0], struct.unpack_from("<I", data, 48)[0]
            require((inode, source, target) == (victim.inode, victim.port, receiver.port), "the victim's hello is wrong")
            lie = answers % 5
            answers += 1
            seals = (SHRINK | GROW | SEAL, SHRINK | GROW | SEAL, GROW, SHRINK | GROW | SEAL, SHRINK | GROW | SEAL)[lie]
            length = (size, PAGE_BYTES, size, size, size)[lie]
            made = memfd(length, seals)
            slots, ring_bytes = ((geometry, geometry, geometry, (0, WORD), (1 << 20, 1 << 40))[lie])
            answer = message(LANE, receiver.socket.fileno(), receiver.inode, inode, source, target, slots, ring_bytes)
            receiver.knock(victim.inode, answer, [] if lie == 3 else [made])
            os.close(made)
        require(answers > 0, "the victim never knocked")
        require(victim.subject.do("udp_path") != RING, "the victim uses a lane that is none")
