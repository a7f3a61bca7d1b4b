"""What the ends of a connection say to each other and where they write in the segment, by hand: for a peer that lies.

Mirrors ringlet/src/socket/meet.rs (in the frames of ringlet/src/handshake.rs), ringlet-linux/src/meet.rs and ringlet-core/src/layout.rs.
"""

import array
import contextlib
import ctypes
import fcntl
import ipaddress
import mmap
import os
import socket
import struct

from harness import CONNECTION as SOCKETS
from harness import FRAME_HEAD_BYTES, Failed, frame, framed, require

GREETING, HELLO, ANSWER = 1, 2, 3
NO_ADAPTER = (0, 0, 0)  # which, and the ticket
NO_BOARDS = (0, 0)  # their number, and a context
FIELDS = "<QIIQQQQQIQQQ"
MESSAGE_BYTES = FRAME_HEAD_BYTES + struct.calcsize(FIELDS)
SEGMENT_MAGIC = int.from_bytes(b"rnglseg\x00", "little")
PAGE_BYTES = 4096
DESCRIPTORS_MOST = 253  # SCM_MAX_FD

SLOT_COUNT, LINE_BYTES, INLINE_BYTES = 1024, 64, 56
CONTROL_OFFSET, CONTROL_BYTES, SLOTS_OFFSET = 512, 512, 4096
# Offsets of the words of one direction's control: halves, and those of 64 bits. (ringlet-core/tests/mirror.rs compares them.)
STATE, KEEP_OUT, DRAINING, CHANGES, TAKING, DELIVERED, HELD, PARTED = 128, 132, 136, 140, 208, 212, 216, 220
SHUT, WORKING, ANSWERED, ATTACHED, CUTTING = 256, 260, 264, 268, 272
FLUSHES, RINGS, EVENTS, HOLD, PARTING, ECHO = 276, 280, 284, 288, 292, 344
CREDIT_SLOTS, CREDIT_DATA = 0, 8
USED, WANT_DATA, ROOM_GRANTED, BELLS_PUT, LANE = 144, 192, 200, 224, 232
SHUT_AT, KERNEL_AT, WRITTEN, WANT_ROOM, DATA_GRANTED, BELLS = 296, 304, 312, 320, 328, 336
HALVES = (STATE, KEEP_OUT, DRAINING, CHANGES, TAKING, DELIVERED, HELD, PARTED, SHUT, WORKING, ANSWERED, ATTACHED, CUTTING)
HALVES += (FLUSHES, RINGS, EVENTS, HOLD, PARTING, ECHO)
WORDS = (WANT_DATA, ROOM_GRANTED, USED, BELLS_PUT, LANE, WANT_ROOM, DATA_GRANTED, BELLS, SHUT_AT, KERNEL_AT, WRITTEN)
CLOSED, LEAVES = 1, 6  # values of STATE; it leaves for the first time
SHUT_READ, SHUT_UNREAD = 2, 3  # values of SHUT
WANT_BYTE, WANT_EVENT, WANT_READY = 1, 2, 4
HOW_BITS = 3
BOARDS_BYTES = 32 * 12288
RINGS_BY_NAME = 3  # a value of ATTACHED
WISH_BYTE = 1 << HOW_BITS | WANT_BYTE  # the first wish
LEN_BITS, FLAG_BITS = 17, 3
PUBLISHED = 1 << 43
DATA, REWIND, CONTROL = 1, 2, 4
START, BACK = 1, 2

F_ADD_SEALS, SEAL, SHRINK, GROW, WRITE = 1033, 1, 2, 4, 8
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2

CONNECTING, ACCEPTING = 0, 1
WORD = (1 << 64) - 1


# The rendezvous.


def name(connector, acceptor):
    """The abstract name of a connection; both ends as (address, port)."""

    def end(address, port):
        ip = ipaddress.ip_address(address)
        packed = ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed
        return (packed + port.to_bytes(2, "big")).hex()

    return "\0ringlet1/" + end(*connector[:2]) + end(*acceptor[:2])


def name_of(tcp, side):
    """The name of a connection of ours, in which we are on this side."""
    ends = (tcp.getsockname(), tcp.getpeername())
    return name(*(ends if side == CONNECTING else reversed(ends)))


def message(kind, fd, ring_bytes, context=0, process=0, protocol=SOCKETS, bell=(0, 0, 0), boards=NO_BOARDS, **head):
    fields = struct.pack(FIELDS, ring_bytes & WORD, fd & 0xFFFFFFFF, context & 0xFFFFFFFF, process & WORD, *bell, *boards, *NO_ADAPTER)
    return frame(protocol, kind, fields, **head)


class Message:
    def __init__(self, data, descriptors):
        require(len(data) == MESSAGE_BYTES, f"a message of {len(data)} bytes")
        self.kind, fields = framed(data, SOCKETS)
        self.ring_bytes, self.fd, self.context, self.process, *rest = struct.unpack(FIELDS, fields)
        self.bell, self.boards = rest[:3], rest[3:5]
        self.descriptors = descriptors

    def close(self):
        for fd in self.descriptors:
            os.close(fd)


class Bell:
    """One that is rung by its name: an address is a name and the two words of a token."""

    def __init__(self):
        self.address = struct.unpack("<QQQ", os.urandom(24))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path(self.address[0]))
        self._socket.setblocking(False)

    @staticmethod
    def path(name):
        return f"\0ringlet1-bell/{name:016x}"

    @staticmethod
    def token(address):
        return struct.pack(">QQ", *address[1:])

    def take(self):
        """How many have rung."""
        rung = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                require(self._socket.recv(64) == self.token(self.address), "what rings carries another token")
                rung += 1
        return rung

    def close(self):
        self._socket.close()


SO_PASSRIGHTS = 83


def refuses_descriptors():
    """Does the kernel know a wish for none?"""
    with unix_socket() as made, contextlib.suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        return True
    return False


def unix_socket():
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def offer(at, backlog=1, takes=True):
    """Listens on a name; OSError when it is taken."""
    made = unix_socket()
    try:
        if not takes:
            made.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)  # which what it accepts inherits
        made.bind(at)
    except OSError:
        made.close()
        raise
    made.listen(backlog)
    return made


def call(at):
    """Connects to a name; None while nobody offers it."""
    made = unix_socket()
    try:
        made.connect(at)
        return made
    except (ConnectionRefusedError, BlockingIOError):
        made.close()
        return None


def say(meeting, data, descriptors=()):
    """OSError when the other side is gone, as it may be."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    meeting.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def hear(meeting):
    """The message that has come, or None."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(meeting, MESSAGE_BYTES + 1, DESCRIPTORS_MOST)
    except (BlockingIOError, ConnectionResetError):
        return None
    return Message(data, descriptors) if data else None


# Shared memory.


def segment_bytes(ring_bytes):
    return SLOTS_OFFSET + 2 * (SLOT_COUNT * LINE_BYTES + ring_bytes)


def memfd(size, seals=SEAL | SHRINK | GROW, flags=0, content=b""):
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        if content:
            os.pwrite(fd, content, 0)
        if seals:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


def head(ring_bytes, magic=SEGMENT_MAGIC):
    return struct.pack("<QQ", magic, ring_bytes)


def segment_memfd(ring_bytes):
    return memfd(segment_bytes(ring_bytes), content=head(ring_bytes))


class Segment:
    def __init__(self, fd, ring_bytes):
        self.fd, self.ring_bytes = fd, ring_bytes
        self._map = mmap.mmap(fd, segment_bytes(ring_bytes))
        self.bytes = memoryview(self._map)
        self.words, self.halves = self.bytes.cast("Q"), self.bytes.cast("I")

    def close(self):
        for view in (self.words, self.halves, self.bytes):
            view.release()
        self._map.close()
        os.close(self.fd)

    @staticmethod
    def control(direction, word):
        return CONTROL_OFFSET + direction * CONTROL_BYTES + word

    def get(self, direction, word):
        return self.halves[self.control(direction, word) // 4]

    def set(self, direction, word, value):
        self.halves[self.control(direction, word) // 4] = value & 0xFFFFFFFF

    def credit(self, direction, word=CREDIT_SLOTS):
        return self.words[self.control(direction, word) // 8]

    def set_credit(self, direction, word, value):
        self.words[self.control(direction, word) // 8] = value & WORD

    @staticmethod
    def slot_offset(direction, position):
        return SLOTS_OFFSET + (direction * SLOT_COUNT + position % SLOT_COUNT) * LINE_BYTES

    def data_offset(self, direction):
        return SLOTS_OFFSET + 2 * SLOT_COUNT * LINE_BYTES + direction * self.ring_bytes

    def publish(self, direction, position, flags, length, payload=b""):
        at = self.slot_offset(direction, position)
        self.bytes[at + 8 : at + 8 + len(payload)] = payload
        tag = PUBLISHED | position & (PUBLISHED - 1)
        self.words[at // 8] = tag << LEN_BITS + FLAG_BITS | flags << LEN_BITS | length

    def punch(self, start, size):
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        ctypes.CDLL(None).fallocate64(self.fd, mode, ctypes.c_int64(start), ctypes.c_int64(size))


# A peer that behaves, so far.


class Peer:
    """One end of a connection whose other end is a victim; it owns what it says that it owns."""

    def __init__(self, tcp, side):
        self.tcp, self.side = tcp, side
        self.written = 0  # to the kernel's connection
        self.segment = None
        self.position, self.read_position = 0, 0
        self.moved = False

    def close(self):
        """May be called twice."""
        if self.segment:
            self.segment.close()
            self.segment = None
        self.tcp.close()

    @property
    def out(self):
        return self.side

    def write(self, data):
        self.tcp.sendall(data)
        self.written += len(data)

    def exchange(self, victim, number, data):
        """Has the victim send `data` back through the kernel: three calls of its at least."""
        victim.ask("send_back", number, len(data))
        self.write(data)
        got = bytearray()
        while len(got) < len(data):
            piece = self.tcp.recv(len(data) - len(got))
            require(piece, "the victim ended the connection")
            got += piece
        require(got == data, "the victim's bytes are wrong")
        victim.answer()

    # Moving.

    def attach(self, segment):
        self.segment = segment

    def start(self):
        """Moves our direction into the ring and tells the victim that it may."""
        self.segment.set(self.out, ATTACHED, WANT_BYTE)
        self.mark(START, self.written)
        self.moved = True

    def wish(self, how):
        """Our receiver wants to be woken by the next record."""
        at = self.segment.control(1 - self.out, WANT_DATA) // 8
        self.segment.words[at] = (self.segment.words[at] >> HOW_BITS) + 1 << HOW_BITS | how

    def take_bytes(self):
        """Doorbells that have come by the kernel's connection."""
        taken, patience = b"", self.tcp.gettimeout()
        self.tcp.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while piece := self.tcp.recv(4096):
                taken += piece
        self.tcp.settimeout(patience)
        return taken

    def mark(self, kind, value):
        self.publish(CONTROL, 16, struct.pack("<QQ", kind, value & WORD))

    def publish(self, flags, length, payload):
        self.segment.publish(self.out, self.position, flags, length, payload)
        self.position += 1
        self.ring()

    def ring(self):
        with contextlib.suppress(OSError):
            self.write(b"\0")

    def send(self, data):
        for at in range(0, len(data), INLINE_BYTES):
            piece = data[at : at + INLINE_BYTES]
            self.publish(0, len(piece), piece)

    def next(self):
        """The victim's next record: bytes, a mark as (kind, value), or None."""
        segment, direction = self.segment, 1 - self.out
        at = segment.slot_offset(direction, self.read_position)
        header = segment.words[at // 8]
        if header >> LEN_BITS + FLAG_BITS != PUBLISHED | self.read_position & (PUBLISHED - 1):
            return None
        flags, length = header >> LEN_BITS & 7, header & (1 << LEN_BITS) - 1
        if flags & CONTROL:
            record = struct.unpack_from("<QQ", segment.bytes, at + 8)
        elif flags & DATA:
            start = struct.unpack_from("<Q", segment.bytes, at + 8)[0]
            place = segment.data_offset(direction) + start % segment.ring_bytes
            record = bytes(segment.bytes[place : place + length])
            segment.set_credit(direction, CREDIT_DATA, start + length + -length % LINE_BYTES)
        else:
            record = bytes(segment.bytes[at + 8 : at + 8 + length])
        self.read_position += 1
        if flags & REWIND:
            self.read_position += -self.read_position % SLOT_COUNT
        segment.set_credit(direction, CREDIT_SLOTS, self.read_position)
        return record

    def receive(self, size, victim):
        got = bytearray()
        while len(got) < size:
            record = self.next()
            if isinstance(record, bytes):
                got += record
            elif record is None:
                require(victim.poll() is None, "the victim died")
        return bytes(got)


ATTEMPTS = 120


def meet(peer, victim, number, bell=(0, 0, 0), takes=True):
    """Attaches properly; returns what the victim has said. `bell`: the address of ours; not `takes`: we want no descriptors of its."""
    at = name_of(peer.tcp, peer.side)
    if peer.side == CONNECTING:
        return _meet_connecting(peer, victim, number, at, bell)
    return _meet_accepting(peer, victim, number, at, bell, takes)


def knock(peer, victim, number, at):
    """Calls the victim's offer, once it is there."""
    for _ in range(ATTEMPTS):
        if meeting := call(at):
            return meeting
        peer.exchange(victim, number, b"x")
    raise Failed("the victim never offered a rendezvous")


def await_call(peer, victim, number, offered):
    for _ in range(ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            meeting = offered.accept()[0]
            meeting.setblocking(False)
            return meeting
        peer.exchange(victim, number, b"x")
    raise Failed("the victim never came to the rendezvous")


def await_message(peer, victim, number, meeting, kind):
    for _ in range(ATTEMPTS):
        if heard := hear(meeting):
            require(heard.kind == kind, f"a message of kind {heard.kind}, not {kind}")
            return heard
        peer.exchange(victim, number, b"x")
    raise Failed("the victim said nothing at the rendezvous")


def _meet_connecting(peer, victim, number, at, bell):
    with knock(peer, victim, number, at) as meeting:
        await_message(peer, victim, number, meeting, GREETING)
        say(meeting, message(HELLO, peer.tcp.fileno(), victim.ring_bytes, bell=bell))
        answer = await_message(peer, victim, number, meeting, ANSWER)
    require(answer.descriptors, "no segment came with the answer")
    peer.attach(Segment(answer.descriptors.pop(0), answer.ring_bytes))
    return answer


def _meet_accepting(peer, victim, number, at, bell, takes):
    with offer(at, takes=takes) as offered, await_call(peer, victim, number, offered) as meeting:
        say(meeting, message(GREETING, peer.tcp.fileno(), 0))
        hello = await_message(peer, victim, number, meeting, HELLO)
        made = segment_memfd(victim.ring_bytes)
        peer.attach(Segment(made, victim.ring_bytes))
        say(meeting, message(ANSWER, peer.tcp.fileno(), victim.ring_bytes, bell=bell), [made])
        for _ in range(ATTEMPTS):
            if peer.segment.get(1 - peer.out, ATTACHED):
                return hello
            peer.exchange(victim, number, b"x")
    raise Failed("the victim did not attach")
