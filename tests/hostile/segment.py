"""A peer that attached as it should, and then writes what it likes to all that it shares with its victim."""

import contextlib
import fcntl
import os
import socket
import struct

import protocol
from harness import Failed, Skipped, require, wait_until
from protocol import ACCEPTING, BACK, CONNECTING, CONTROL_WORDS, CREDIT_DATA, CREDIT_SLOTS, PUBLISHED, SLOT_COUNT, START
from rendezvous import as_user, make_peer, truth
from subject import RING, SETTLE_SECONDS, Steady, Subject, plain

ATTACKS = 150
CALLS = 40
STROKES = 20  # between two looks whether the victim is done
RING_BYTES = 64 << 10
LOOK_EVERY = 25
EVENTFD_FULL = (1 << 64) - 2
CONTEXTS = (1, 2, 3, 4)


def scenes(ground):
    with ground.scene(f"{ATTACKS * ground.rounds} peers that scribble over the segment"):
        scribbles(ground)
    with ground.scene("peers that spoil doorbells"):
        doorbells(ground)
    with ground.scene("a peer of another user has no doorbell"):
        another_users_doorbell(ground)


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


# Doorbells, which peers of one user are given. The victim serves a good client and the peer in one thread, by epoll.


def doorbells(ground):
    victim, good = Subject(ground), Subject(ground, "client")
    port = victim.listen()
    victim.do("serve")
    impostors = [pretend_to_be(good, victim, port, context) for context in CONTEXTS]
    good.do("steady_connect", port)
    served(good)
    for attack in (fill, make_blocking):
        peer = Served(victim, port)
        attack(peer.answer.descriptors[0])
        served(good)
        peer.close()
    for peer in impostors:
        peer.close()


def served(good):
    """The good client is answered, again and again, after it has slept."""

    def rounds():
        state = good.do("steady")
        require(state["problem"] is None, f"the good client was harmed: {state['problem']}")
        return state["rounds"]

    before = rounds()
    wait_until(lambda: rounds() > before + 20, SETTLE_SECONDS, "the good client to be served")
    require(good.do("steady")["path"] == RING, "the good client is not on the ring")


class Server:
    """A victim that serves by itself: it needs no commands, and answers none."""

    def __init__(self, victim):
        self.ring_bytes, self.poll = victim.ring_bytes, victim.poll

    def ask(self, *_command):
        pass

    def answer(self):
        pass


class Served(protocol.Peer):
    """A client of such a victim, with a doorbell of its own; `answer` is what the victim said."""

    def __init__(self, victim, port, **words):
        super().__init__(plain(socket.create_connection(("127.0.0.1", port))), CONNECTING)
        server, bell = Server(victim), [os.eventfd(0), protocol.memfd(protocol.PAGE_BYTES)]
        with protocol.knock(self, server, None, protocol.name_of(self.tcp, CONNECTING)) as meeting:
            hello = protocol.message(self.tcp.fileno(), server.ring_bytes, **{"context": 1, "process": 7, **words})
            protocol.say(meeting, hello, bell)
            self.answer = protocol.await_message(self, server, None, meeting)
        for fd in bell:
            os.close(fd)
        self.attach(protocol.Segment(self.answer.descriptors.pop(0), self.answer.ring_bytes))

    def close(self):
        super().close()
        self.answer.close()


def pretend_to_be(good, victim, port, context):
    """A peer that says that its doorbell is one of the good client's, whose number it has learned."""
    tcp, number = good.connect_to_us()
    known = protocol.Peer(tcp, ACCEPTING)
    hello = protocol.meet(known, good, number)
    hello.close()
    known.close()
    good.do("close", number)
    require(hello.process, "a client does not say who it is")
    return Served(victim, port, process=hello.process, context=context)


def fill(eventfd):
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(eventfd)
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(eventfd, EVENTFD_FULL)


def make_blocking(eventfd):
    fcntl.fcntl(eventfd, fcntl.F_SETFL, fcntl.fcntl(eventfd, fcntl.F_GETFL) & ~os.O_NONBLOCK)


# Another user is neither given a doorbell nor rung by one: who has an eventfd can make a ringer wait.


def another_users_doorbell(ground):
    if os.geteuid() != 0:
        raise Skipped("only root can become another user")
    victim = Subject(ground)
    port = victim.listen()
    victim.do("serve")

    def act(ready):
        peer = Served(victim, port)
        require(not peer.answer.descriptors, "another user is given a doorbell")
        peer.start()
        require(peer.segment.get(1 - peer.out, protocol.ATTACHED) == protocol.WANT_BYTE, "another user's bell is kept")
        ready()

    with as_user("nobody", act):
        pass
