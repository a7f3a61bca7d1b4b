"""A peer that attached as it should, and then writes what it likes to all that it shares with its victim."""

import contextlib
import fcntl
import os
import socket
import struct
import time

import protocol
from harness import Failed, Skipped, require, wait_until
from protocol import (
    ACCEPTING,
    BACK,
    BELLS,
    CLOSED,
    CONNECTING,
    CREDIT_DATA,
    CREDIT_SLOTS,
    HALVES,
    LANE,
    LEAVES,
    PUBLISHED,
    SHUT,
    SHUT_READ,
    SHUT_UNREAD,
    SLOT_COUNT,
    START,
    STATE,
    WANT_BYTE,
    WANT_DATA,
    WANT_READY,
    WISH_BYTE,
    WORD,
    WORDS,
    WORKING,
    WRITTEN,
)
from rendezvous import as_user, make_peer, truth
from subject import RING, SETTLE_SECONDS, Problem, Steady, Subject, plain
from victim import pattern

ATTACKS = 150
CALLS = 40
STROKES = 20  # between two looks whether the victim is done
RING_BYTES = 64 << 10
LOOK_EVERY = 25
SLEEPS_MOST = 5  # of a call that must not wait: the kernel's own locks may cost one
UNREAD_BYTES = 190_000  # in one send; more than the kernel's small buffers hold, less than a ring
PATIENCE_CLOSES = 8
SLEEPS_MADE_UP_PER_SECOND = 100  # a hundredth of the time, at 0.1 ms each
PATIENCE_SLEEPS = 2500  # all its patience, and some sleeps of other kinds; each close might sleep a thousand times
EVENTFD_FULL = (1 << 64) - 2
CONTEXTS = (1, 2, 3, 4)


def scenes(ground):
    with ground.scene(f"{ATTACKS * ground.options.rounds} peers that scribble over the segment"):
        scribbles(ground)
    with ground.scene("peers for whom no call waits"):
        nobody_waits(ground)
    with ground.scene("peers that leave the ring and read nothing"):
        leavers(ground)
    with ground.scene("peers that close before a doorbell comes"):
        late_doorbells(ground)
    with ground.scene("a peer that has no ready board, and wishes for its bit"):
        no_ready_board(ground)
    with ground.scene("peers that spoil doorbells"):
        doorbells(ground)
    with ground.scene("peers that end before what they have promised"):
        broken_promises(ground)
    with ground.scene("a peer of another user has no doorbell"):
        another_users_doorbell(ground)


def scribbles(ground):
    victim = Subject(ground, ring_bytes=RING_BYTES)
    steady = Steady(ground, victim)
    truth(ground, victim)
    held = victim.held()
    for number in range(ATTACKS * ground.options.rounds):
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
        direction, at = self._source.randrange(2), self._source.choice(HALVES + WORDS)
        write = self._segment.set if at in HALVES else self._segment.set_credit
        write(direction, at, self._value())

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


# Words by which a peer says that it will be done in a moment.


def moved_peer(victim, side):
    """A peer that behaves, and its connection, on the ring both ways."""
    peer, connection = make_peer(victim, side)
    protocol.meet(peer, victim, connection).close()
    peer.start()
    victim.ask("receive", connection, 10)
    peer.send(pattern(0, 10))
    victim.answer()
    victim.do("send", connection, 10)
    require(peer.receive(10, victim) == pattern(0, 10), "the victim's bytes are wrong")
    return peer, connection


def sleeps_at_most(most, victim, connection, call, wanted="done"):
    outcome, sleeps = victim.do("sleeps", connection, call)
    require(outcome in wanted, f"{call}: {outcome}")
    require(sleeps <= most, f"{call} slept {sleeps} times")


def patience_ends(victim, make):
    """Closes such connections: all together the victim waits no longer for what their peers owe than for some, but for a part of the time."""
    began, slept = time.monotonic(), 0
    for _ in range(PATIENCE_CLOSES):
        peer, connection = make()
        _outcome, sleeps = victim.do("sleeps", connection, "close")
        slept += sleeps
        peer.close()
    most = PATIENCE_SLEEPS + SLEEPS_MADE_UP_PER_SECOND * (time.monotonic() - began)
    require(slept <= most, f"{PATIENCE_CLOSES} closes slept {slept} times, and not {most:.0f}")


def nobody_waits(ground):
    """They ring for ever, or say that doorbells are under way that never come."""
    victim = Subject(ground)
    steady = Steady(ground, victim)
    truth(ground, victim)
    held = victim.held()

    def ring_for_ever(peer):
        peer.segment.set(peer.out, WORKING, 1)

    def announce_doorbells(peer):
        peer.segment.set_credit(peer.out, BELLS, 1 << 40)

    for lie in (ring_for_ever, announce_doorbells):
        for side in (CONNECTING, ACCEPTING):
            for calls in (("close",), ("receive", "poll", "send", "shut down", "close"), ("low mark", "close")):
                peer, connection = moved_peer(victim, side)
                lie(peer)
                for call in calls:
                    sleeps_at_most(SLEEPS_MOST, victim, connection, call, ("done", "EAGAIN"))
                peer.close()
    # What the kernel still has to send would be lost by a late doorbell: that is waited for, but not for each.
    def late():
        peer, connection = make_peer(victim, CONNECTING)
        protocol.meet(peer, victim, connection).close()
        victim.do("small_buffer", connection)
        peer.mark(START, peer.written)
        victim.ask("receive", connection, 10)
        peer.send(pattern(0, 10))
        victim.answer()
        while victim.do("send_now", connection, UNREAD_BYTES):
            pass
        ring_for_ever(peer)
        return peer, connection

    patience_ends(victim, late)
    steady.goes_on()
    victim.holds_only(held, "after peers for whom no call waits")


def leavers(ground):
    """They leave the ring with much unread there, so that the victim must send it again, and the kernel has no room for it."""
    victim = Subject(ground)
    steady = Steady(ground, victim)
    truth(ground, victim)
    held = victim.held()

    def leave():
        peer, connection = moved_peer(victim, CONNECTING)
        victim.do("small_buffer", connection)
        sent = victim.do("send_now", connection, UNREAD_BYTES)
        require(sent > UNREAD_BYTES / 2, f"only {sent} bytes fit into the ring")
        require(victim.do("path", connection) == RING, "the victim is not on the ring")
        peer.segment.set(1 - peer.out, STATE, LEAVES)
        return peer, connection, sent

    for way in ("recv", "poll", "select", "epoll"):
        peer, connection, sent = leave()
        for call in ("send", "receive", "poll", "shut down"):
            sleeps_at_most(SLEEPS_MOST, victim, connection, call, ("done", "EAGAIN"))
        # Whoever then waits for something else goes on with it in its sleep, up to the end.
        victim.ask("wait_by", connection, way)
        time.sleep(0.3)
        got = bytearray()
        while piece := peer.tcp.recv(1 << 16):
            got += piece
        require(got.lstrip(b"\0") == pattern(10, sent).lstrip(b"\0"), f"{way}: {len(got)} bytes of {sent}, or wrong ones")
        peer.send(pattern(10, 1))
        victim.answer()
        victim.do("close", connection)
        peer.close()
    patience_ends(victim, lambda: leave()[:2])
    steady.goes_on()
    victim.holds_only(held, "after peers that left the ring")


def late_doorbells(ground):
    """The kernel resets a connection that is closed with a doorbell unread. If the peer had read all it is an orderly end, as TCP's would
    have been; who leaves bytes unread, or wants a reset, says so."""
    victim = Subject(ground)
    missing = 1 << 40  # more than has arrived
    for said, written, wanted in ((SHUT_READ, 0, "EOFError()"), (SHUT_READ, missing, "ECONNRESET"), (SHUT_UNREAD, 0, "ECONNRESET")):
        for way in ("receive", "recv", "poll", "select", "epoll"):
            peer, connection = moved_peer(victim, CONNECTING)
            peer.segment.set_credit(1 - peer.out, WANT_DATA, WISH_BYTE)
            victim.do("send", connection, 10)
            peer.receive(10, victim)
            peer.segment.set(1 - peer.out, STATE, CLOSED)
            peer.segment.set_credit(peer.out, WRITTEN, written + 1)
            peer.segment.set(peer.out, SHUT, said)
            peer.close()
            try:
                victim.do(*(("receive", connection, 1) if way == "receive" else ("wait_by", connection, way)))
                raise Failed("bytes came from nowhere")
            except Problem as problem:
                require(str(problem) == wanted, f"{way}: {problem} instead of {wanted}")
            victim.do("close", connection)


def no_ready_board(ground):
    """Who has given no ready board, and wishes for a bit there, hears a byte, whatever bit it names."""
    victim = Subject(ground)
    peer, connection = moved_peer(victim, CONNECTING)
    for lane in (0, 65535, 65536, 1 << 40, WORD):
        peer.segment.set_credit(1 - peer.out, LANE, lane)
        peer.wish(WANT_READY)
        victim.do("send", connection, 10)
        peer.receive(10, victim)
        require(len(peer.take_bytes()) == 1, f"no byte rings for bit {lane}")
    victim.do("close", connection)
    peer.close()


def broken_promises(ground):
    """A mark names a place of the kernel's connection. If that ends before it, bytes are missing: an error, and no orderly end. (Where
    it is the victim that has shut down receiving, it ends for now, as on the kernel, and goes on when more comes.)"""
    victim = Subject(ground)
    steady = Steady(ground, victim)
    truth(ground, victim)
    held = victim.held()
    missing = 7

    def bytes_before_the_ring():
        peer, connection = make_peer(victim, CONNECTING)
        protocol.meet(peer, victim, connection).close()
        peer.segment.set(peer.out, protocol.ATTACHED, WANT_BYTE)
        peer.segment.publish(peer.out, 0, protocol.CONTROL, 16, struct.pack("<QQ", START, peer.written + missing))
        return peer, connection

    def doorbells_before_the_kernel():
        peer, connection = moved_peer(victim, CONNECTING)
        # (Those that were sent are taken by then.)
        peer.segment.publish(peer.out, peer.position, protocol.CONTROL, 16, struct.pack("<QQ", BACK, peer.written + missing))
        return peer, connection

    for promise, rest in ((bytes_before_the_ring, pattern(0, missing)), (doorbells_before_the_kernel, bytes(missing) + pattern(10, missing))):
        for shut_here in (False, True):
            peer, connection = promise()
            if shut_here:
                victim.do("shut_receiving", connection)
                for _ in range(3):
                    require(outcome_of(victim, connection, missing) == "EOFError()", f"{promise.__name__}: no end after shutdown(RD)")
                peer.write(rest)
                wait_until(lambda: outcome_of(victim, connection, missing) == "done", SETTLE_SECONDS, "what comes after shutdown(RD)")
            else:
                peer.tcp.shutdown(socket.SHUT_WR)
                outcome = outcome_of(victim, connection, missing)
                require(outcome == "ECONNRESET", f"{promise.__name__}: {outcome}, though bytes are missing")
            victim.do("close", connection)
            peer.close()
    steady.goes_on()
    victim.holds_only(held, "after broken promises")


def outcome_of(victim, connection, size):
    try:
        victim.do("receive", connection, size)
        return "done"
    except Problem as problem:
        return str(problem)


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
    """A client of such a victim, with a doorbell of its own (another user's would not be taken); `answer` is what the victim said."""

    def __init__(self, victim, port, has_bell=True, **words):
        super().__init__(plain(socket.create_connection(("127.0.0.1", port))), CONNECTING)
        server, bell = Server(victim), [os.eventfd(0), protocol.memfd(protocol.PAGE_BYTES)] if has_bell else []
        with protocol.knock(self, server, None, protocol.name_of(self.tcp, CONNECTING)) as meeting:
            protocol.await_message(self, server, None, meeting, protocol.GREETING)
            hello = protocol.message(protocol.HELLO, self.tcp.fileno(), server.ring_bytes, **{"context": 1, "process": 7, **words})
            protocol.say(meeting, hello, bell)
            self.answer = protocol.await_message(self, server, None, meeting, protocol.ANSWER)
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
        peer = Served(victim, port, has_bell=False)
        require(not peer.answer.descriptors, "another user is given a doorbell")
        peer.start()
        require(peer.segment.get(1 - peer.out, protocol.ATTACHED) == protocol.WANT_BYTE, "another user's bell is kept")
        ready()

    with as_user("nobody", act):
        pass
