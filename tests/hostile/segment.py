"""A peer that attached as it should, and then writes what it likes to all that it shares with its victim."""

import contextlib
import errno
import fcntl
import os
import socket
import struct

import protocol
from harness import Failed, require, wait_until
from protocol import ACCEPTING, BACK, CONNECTING, CONTROL_WORDS, CREDIT_DATA, CREDIT_SLOTS, PUBLISHED, SLOT_COUNT, START
from rendezvous import make_peer, truth
from subject import RING, SETTLE_SECONDS, Steady, Subject

ATTACKS = 150
CALLS = 40
STROKES = 20  # between two looks whether the victim is done
RING_BYTES = 64 << 10
LOOK_EVERY = 25
EVENTFD_FULL = (1 << 64) - 2


def scenes(ground):
    with ground.scene(f"{ATTACKS * ground.rounds} peers that scribble over the segment"):
        scribbles(ground)
    for attack in DOORBELL_ATTACKS:
        with ground.scene(f"a peer that {attack.__name__.replace('_', ' ')}"):
            doorbell(ground, attack)


def scribbles(ground):
    victim = Subject(ground, ring_bytes=RING_BYTES)
    steady = Steady(ground, victim)
    truth(ground, victim)
    held = victim.held()
    for number in range(ATTACKS * ground.rounds):
        try:
            attack(ground, victim, number)
            if number % LOOK_EVERY == LOOK_EVERY - 1:
                steady.goes_on()
                victim.holds_only(held, "after scribbles")
        except Failed as problem:
            raise Failed(f"attack {number}: {problem}") from None
    truth(ground, victim)


def attack(ground, victim, number):
    source = type(ground.random)(f"{ground.seed}/{number}")
    peer, connection = make_peer(victim, source.choice((CONNECTING, ACCEPTING)))
    try:
        protocol.meet(peer, victim, connection).close()
        if source.random() < 0.9:
            peer.start()
        scribbler = Scribbler(peer, source)
        victim.ask("abuse", connection, number, CALLS)
        while victim.answered() is None:
            for _ in range(STROKES):
                scribbler.stroke()
        if source.random() < 0.5:
            peer.close()
        victim.do("close", connection)
    finally:
        peer.close()


class Scribbler:
    def __init__(self, peer, source):
        self._peer, self._source, self._segment = peer, source, peer.segment
        peer.tcp.setblocking(False)
        ways = [self.word, self.any_word, self.control, self.credit, self.record, self.mark, self.hole]
        ways += [self.behave, self.stray_bytes, self.listen]
        # Few at a time: alone, each gets further than among all the others.
        self._ways = source.sample(ways, source.randint(1, 4))
        if source.random() < 0.5:
            self._ways += [self.behave, self.listen]

    def stroke(self):
        with contextlib.suppress(OSError):
            self._source.choice(self._ways)()

    def _value(self):
        source = self._source
        near = self._segment.credit(source.randrange(2)) + source.randint(-2, 2)
        return source.choice((0, 1, 2, 3, 4, near, near + SLOT_COUNT, 1 << 31, (1 << 64) - 1, source.getrandbits(64)))

    def word(self):
        self._segment.words[self._source.randrange((4096 + 2 * SLOT_COUNT * 64) // 8)] = self._value() & protocol.WORD

    def any_word(self):
        self._segment.words[self._source.randrange(len(self._segment.words))] = self._source.getrandbits(64)

    def control(self):
        self._segment.set(self._source.randrange(2), self._source.choice(CONTROL_WORDS), self._value())

    def credit(self):
        word = self._source.choice((CREDIT_SLOTS, CREDIT_DATA))
        self._segment.set_credit(self._source.randrange(2), word, self._value())

    def _next_position(self):
        """Where the victim reads or writes next, as it says itself."""
        position = self._source.choice((self._segment.credit(self._peer.out), self._peer.position))
        return (position + self._source.choice((0, 0, 0, 1, SLOT_COUNT))) % PUBLISHED

    def record(self):
        source = self._source
        length = source.choice((0, 1, 16, 56, 57, 16 << 10, (16 << 10) + 1, (1 << 17) - 1, source.getrandbits(17)))
        payload = struct.pack("<QQ", self._value() & protocol.WORD, self._value() & protocol.WORD)
        direction = source.choice((self._peer.out, self._peer.out, 1 - self._peer.out))
        self._segment.publish(direction, self._next_position(), source.randrange(8), length, payload)
        self._peer.ring()

    def mark(self):
        source = self._source
        value = source.choice((self._peer.written + source.randint(-2, 2), 0, source.getrandbits(64)))
        payload = struct.pack("<QQ", source.choice((START, BACK, BACK, 0, 3)), value & protocol.WORD)
        self._segment.publish(self._peer.out, self._next_position(), protocol.CONTROL, 16, payload)
        self._peer.ring()

    def hole(self):
        start = self._source.randrange(len(self._segment.bytes))
        self._segment.punch(start, self._source.randint(1, 64 << 10))

    def behave(self):
        if self._source.random() < 0.5:
            self._peer.send(bytes(self._source.randint(1, 200)))
        else:
            self._peer.next()

    def stray_bytes(self):
        self._peer.write(bytes(self._source.randint(1, 50)))

    def listen(self):
        self._peer.tcp.recv(1 << 16)


# What a peer of the same user is trusted with: eventfds, its own and the victim's. The victim serves the peer and a good
# client in one thread, by epoll; the good client must be served on.


def doorbell(ground, attack):
    victim, good = Subject(ground), Subject(ground, "client")
    port = victim.listen()
    victim.do("serve")
    good.do("steady_connect", port)
    steady = lambda: good.do("steady")  # noqa: E731
    wait_until(lambda: steady()["path"] == RING, SETTLE_SECONDS, "the good client on the ring")
    peer = Peer(ground, victim, port)
    try:
        for stroke in attack(peer):
            before = steady()["rounds"]
            wait_until(lambda: stroke() or steady()["rounds"] > before + 3, SETTLE_SECONDS, "the good client to be served")
            require(steady()["problem"] is None, "the good client's connection was harmed")
    except Failed as problem:
        raise Failed(f"{problem}\n{victim.process.where()}") from None
    finally:
        peer.close()


class Served:
    """Stands for a victim that serves by itself, whatever it is asked."""

    def __init__(self, victim):
        self.ring_bytes = victim.ring_bytes

    def ask(self, *_command):
        pass

    def answer(self):
        pass


class Peer(protocol.Peer):
    def __init__(self, ground, victim, port):
        tcp = socket.create_connection(("127.0.0.1", port))
        tcp.settimeout(SETTLE_SECONDS)
        super().__init__(tcp, CONNECTING)
        self.eventfd, self.page = os.eventfd(0), protocol.memfd(protocol.PAGE_BYTES)
        served = Served(victim)
        at = protocol.name_of(tcp, CONNECTING)
        with protocol.knock(self, served, None, at) as meeting:
            hello = protocol.message(tcp.fileno(), victim.ring_bytes, context=1, process=7)
            protocol.say(meeting, hello, [self.eventfd, self.page])
            self.answer = protocol.await_message(self, served, None, meeting)
        require(len(self.answer.descriptors) == 3, "a peer of the same user is not given a doorbell")
        self.attach(protocol.Segment(self.answer.descriptors.pop(0), self.answer.ring_bytes))
        self.start()

    def close(self):
        super().close()
        for fd in (self.eventfd, self.page):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.answer.close()

    def knock_on(self):
        """Has the victim answer us through the ring."""
        with contextlib.suppress(BlockingIOError):
            self.send(b"x")
        self.next()


def fills_the_victims_eventfd(peer):
    theirs = peer.answer.descriptors[0]

    def stroke():
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(theirs)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(theirs, EVENTFD_FULL)

    yield stroke
    stroke()
    yield lambda: None


def empties_the_victims_eventfd(peer):
    theirs = peer.answer.descriptors[0]

    def stroke():
        for _ in range(20_000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(theirs)

    yield stroke


def makes_the_victims_eventfd_blocking(peer):
    theirs = peer.answer.descriptors[0]
    fcntl.fcntl(theirs, fcntl.F_SETFL, fcntl.fcntl(theirs, fcntl.F_GETFL) & ~os.O_NONBLOCK)

    def stroke():
        # Never ourselves in a write that blocks.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(theirs, 1)

    yield stroke
    yield lambda: None


def gives_a_full_blocking_eventfd(peer):
    os.eventfd_write(peer.eventfd, EVENTFD_FULL)
    armed = 1
    with open(f"/proc/self/fd/{peer.page}", "r+b", buffering=0) as page:

        def stroke():
            nonlocal armed
            armed += 1 << 16
            page.seek(0)
            page.write(struct.pack("<Q", armed))
            peer.knock_on()

        for word in (protocol.WANT_DATA,):
            peer.segment.set(1 - peer.out, word, protocol.WANT_EVENT)
        yield stroke


DOORBELL_ATTACKS = (
    fills_the_victims_eventfd,
    empties_the_victims_eventfd,
    makes_the_victims_eventfd_blocking,
    gives_a_full_blocking_eventfd,
)
