"""What can be said at the rendezvous, by whom, and when: lies, strangers, silence."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import pathlib
import pwd
import select
import signal
import socket
import struct
import subprocess
import tempfile
import traceback

import protocol
from harness import CONNECTION, VERSION, Failed, Skipped, frame, require, wait_until
from protocol import ACCEPTING, BOARDS_BYTES, CONNECTING, GROW, PAGE_BYTES, SEAL, SHRINK, WORD, WRITE, Peer, memfd, message
from protocol import segment_bytes, segment_memfd
from subject import RING, SETTLE_SECONDS, Pair, Steady, Subject, plain
from victim import elsewhere

ATTACKS = 200
OF_ONE_USER = 8  # so many of one user's descriptors are closed at a time
OFFER_CALLS = 70  # after so many, the accepting side has offered, however early its connections ended lately


def scenes(ground):
    with ground.scene("a peer that tells the truth"):
        truth(ground, Subject(ground))
    with ground.scene("an end of another version"):
        another_version(ground)
    for user in (None, "nobody"):
        whose = "another user" if user else "the same user"
        with ground.scene(f"strangers, {whose}"):
            strangers(ground, user)
    for side in (CONNECTING, ACCEPTING):
        with ground.scene(f"{'accepted' if side == CONNECTING else 'made'} in another network namespace, whose addresses somebody has here"):
            in_another_namespace(ground, side)
    with ground.scene(f"{ATTACKS} lies of the far end's owner"):
        lies(ground)
    with ground.scene("descriptors that nobody can close in time"):
        lingering(ground)
    with ground.scene("descriptors whose close nothing can end"):
        unkillable(ground)


# The tests' own peer is right, or nothing here would mean anything.


def truth(ground, victim):
    for side in (CONNECTING, ACCEPTING):
        peer, number = make_peer(victim, side)
        protocol.meet(peer, victim, number)
        # Marks, then bytes, in both directions.
        peer.start()
        sizes = (1, 56, 57, 400, 5_000)
        for size in sizes:
            data = ground.random.randbytes(size)
            victim.ask("send_back", number, size)
            peer.send(data)
            got = b""
            if not peer.read_position:
                kind, _written = wait_until(peer.next, SETTLE_SECONDS, "the victim's mark")
                require(kind == protocol.START, "the victim's ring does not begin with its start")
            got = peer.receive(size, victim)
            victim.answer()
            require(got == data, "bytes through the ring are wrong")
        require(victim.do("path", number) == RING, "the victim is not on the ring")
        victim.do("close", number)
        peer.close()


def make_peer(victim, side):
    tcp, number = victim.accept_from_us() if side == CONNECTING else victim.connect_to_us()
    return Peer(tcp, side), number


# Strangers: they don't own an end of the connection between two victims that they attack.


def strangers(ground, user):
    if user and os.geteuid() != 0:
        raise Skipped("only root can become another user")
    accepting, connecting = Subject(ground), Subject(ground, "client")
    steady = Steady(ground, accepting)
    # (Each thread's own doorbell is there for good from its first rendezvous on, which may be none of those that are attacked.)
    pair = Pair(accepting, connecting)
    pair.exchange(times=200)
    require(pair.paths() == (RING, RING), "before the strangers nobody gets on the ring")
    pair.close()
    held = None
    for number, attack in enumerate((*STRANGERS, *STRANGERS)):
        pair = Pair(accepting, connecting)
        attack(ground, pair, user)
        pair.exchange(size=3000, times=4)
        pair.close()
        steady.goes_on()
        if number == len(STRANGERS) - 1:
            held = accepting.held(), connecting.held()
    accepting.holds_only(held[0], "strangers")
    connecting.holds_only(held[1], "strangers")
    pair = Pair(accepting, connecting)
    pair.exchange(times=200)
    require(pair.paths() == (RING, RING), "after the strangers nobody gets on the ring")


def as_user(user, act):
    """Runs `act` in a child process of this user; whatever it opened lives until the block ends."""

    @contextlib.contextmanager
    def running():
        ready_read, ready_write = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if user:
                    entry = pwd.getpwnam(user)
                    os.setgroups([])
                    os.setgid(entry.pw_gid)
                    os.setuid(entry.pw_uid)
                act(lambda: os.write(ready_write, b"."))
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        try:
            os.close(ready_write)
            require(os.read(ready_read, 1) == b".", "the stranger could not do what it is for")
            yield
        finally:
            os.close(ready_read)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    return running()


def until_killed():
    signal.pause()


def name_of(pair):
    return protocol.name(pair.connector, pair.acceptor)


def make_offer(pair):
    """Has the accepting side offer, before the connecting side looks."""
    pair.accepting.do("send_many", pair.accepting_number, 1, OFFER_CALLS)


def take_owed(pair):
    pair.connecting.do("receive", pair.connecting_number, OFFER_CALLS)


def reasons_become(pair, accepting=None, connecting=None, calls=8):
    """What `ringlet ss` says after some more calls."""
    got = None

    def is_so():
        nonlocal got
        pair.exchange(times=calls)
        got = pair.reasons()
        wanted = zip((accepting, connecting), got)
        return all(path == "kernel" and reason in reasons for reasons, (path, reason) in wanted if reasons)

    # (Where others run, looks at the machine's locks take long, and the victim then can't tell for a while who has come.)
    try:
        wait_until(is_so, 10 * SETTLE_SECONDS, "the reasons")
    except Failed:
        raise Failed(f"the reasons are {got}, not of {accepting} and {connecting}") from None


def given_up(pair):
    pair.exchange(size=1, times=50)
    return all(path == "kernel" and reason in ("no-peer", "name-taken", "not-owner") for path, reason in pair.reasons())


def squat(say=None):
    """Holds the name before the accepting side offers; `say` answers whoever comes."""

    def attack(ground, pair, user):
        def act(ready):
            with protocol.offer(name_of(pair)) as offered:
                offered.setblocking(True)
                ready()
                meeting = offered.accept()[0]
                if say:
                    with contextlib.suppress(OSError):
                        say(meeting, pair)
                until_killed()

        with as_user(user, act):
            reasons_become(pair, accepting={"name-taken"}, connecting={"not-owner"} if user or say else None, calls=30)
            if not (user or say):
                wait_until(lambda: given_up(pair), 3 * SETTLE_SECONDS, "the connecting side to give a silent squatter up")

    return attack


def answer_all(meeting, pair):
    mine = next(fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}"))
    protocol.say(meeting, message(protocol.GREETING, mine, 0))
    # At once, as if it had been told hello.
    protocol.say(meeting, message(protocol.ANSWER, mine, pair.connecting.ring_bytes), [segment_memfd(pair.connecting.ring_bytes)])


def come(act_at, reasons):
    """Comes to the accepting side's offer before the connecting side does."""

    def attack(ground, pair, user):
        make_offer(pair)

        def act(ready):
            meeting = protocol.call(name_of(pair))
            if meeting is not None:
                act_at(meeting, pair)
                ready()
            until_killed()

        with as_user(user, act):
            pair.accepting.do("send_many", pair.accepting_number, 1, 3)
            take_owed(pair)
            pair.connecting.do("receive", pair.connecting_number, 3)
            reasons_become(pair, accepting=reasons)
            if act_at is nothing:
                # A caller that says nothing is not waited for for ever.
                wait_until(lambda: given_up(pair), 3 * SETTLE_SECONDS, "the accepting side to give a silent caller up")

    return attack


def own_descriptor(meeting, pair):
    protocol.say(meeting, message(protocol.HELLO, 0, pair.accepting.ring_bytes))


def their_descriptor(meeting, pair):
    protocol.say(meeting, message(protocol.HELLO, pair.connecting_descriptor, pair.accepting.ring_bytes))


def with_a_bell(meeting, pair):
    hello = message(protocol.HELLO, 0, pair.accepting.ring_bytes, context=1, process=7)
    say_when_admitted(meeting, hello, [os.eventfd(0), memfd(PAGE_BYTES)])


def say_when_admitted(meeting, data, descriptors):
    """With the descriptors, or without if they are not taken from us."""
    try:
        protocol.say(meeting, data, descriptors)
    except PermissionError:
        protocol.say(meeting, data)


def garbage(meeting, pair):
    protocol.say(meeting, os.urandom(40))


def nothing(meeting, pair):
    pass


def leave(meeting, pair):
    meeting.close()


def flood(ground, pair, user):
    """So many come to the offer that the far end finds no place in the queue."""
    make_offer(pair)

    def act(ready):
        callers = []
        for _ in range(64):
            caller = protocol.call(name_of(pair))
            if caller is not None:
                callers.append(caller)
                with contextlib.suppress(OSError):
                    protocol.say(caller, os.urandom(40))
        ready()
        until_killed()

    with as_user(user, act):
        take_owed(pair)
        pair.exchange(times=30)


STRANGERS = (
    squat(),
    squat(answer_all),
    come(own_descriptor, {"not-owner"}),
    come(their_descriptor, {"not-owner"}),
    come(with_a_bell, {"not-owner"}),
    come(garbage, {"bad-peer", "not-owner"}),
    come(leave, None),
    come(nothing, None),
    flood,
)


# Addresses are of a network namespace: the same ones in another are somebody else's.


def in_another_namespace(ground, side):
    """A thread makes its connection elsewhere, comes back, and uses it here; `side` is the stranger's, who has a connection with the same addresses here."""
    if os.geteuid() != 0:
        raise Skipped("only root can make namespaces here")
    victim = Subject(ground)
    other = subprocess.Popen(["unshare", "-n", "sh", "-c", "ip link set lo up && echo up && exec sleep 1000"], stdout=subprocess.PIPE)
    try:
        if other.stdout.readline() != b"up\n":
            raise Skipped("no network namespaces here")
        namespace = f"/proc/{other.pid}/ns/net"
        far, number = made_elsewhere(victim, side, namespace)
        near = (far.getpeername(), far.getsockname())
        ours = a_connection(*(near if side == ACCEPTING else reversed(near)))
        ours.reverse() if side == ACCEPTING else None
        peer = Peer(ours[0], side)
        was_told = pretend(peer, victim, number, far)
        require(not was_told, "the victim believes who has the same addresses in another namespace")
        victim.ask("send_back", number, 3000)
        far.sendall(bytes(3000))
        require(far.recv(3000, socket.MSG_WAITALL) == bytes(3000), "bytes are lost")
        victim.answer()
        require(victim.do("path", number) != RING, "on the ring")
    finally:
        other.kill()
        other.wait()


def made_elsewhere(victim, side, namespace):
    """The victim's connection there: the far end of it, and its number."""
    if side == ACCEPTING:
        with elsewhere(namespace):
            listener = socket.create_server(("127.0.0.1", 0))
        number = victim.do("connect_in", namespace, listener.getsockname()[1])
        far = listener.accept()[0]
    else:
        port = victim.do("listen_in", namespace)
        with elsewhere(namespace):
            far = socket.create_connection(("127.0.0.1", port))
        number = victim.do("accept")
    return plain(far), number


def a_connection(source, target):
    """Both ends of one from there to there: the connecting one first."""
    listener, connecting = socket.socket(), socket.socket()
    for each, at in (listener, target), (connecting, source):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(at)
    listener.listen()
    connecting.connect(target)
    return [connecting, listener.accept()[0]]


def pretend(peer, victim, number, far):
    """Plays the far end at the rendezvous while the victim answers the true one. Is it told more than a greeting?"""
    at, meeting, greeted = protocol.name_of(peer.tcp, peer.side), None, False
    offered = protocol.offer(at) if peer.side == ACCEPTING else None
    for _ in range(protocol.ATTEMPTS):
        victim.ask("send_back", number, 1)
        far.sendall(b"x")
        require(far.recv(1) == b"x", "what came back is not what was sent")
        victim.answer()
        if meeting is None:
            meeting = protocol.call(at) if offered is None else accepted(offered)
        if meeting is None or greeted:
            if meeting and protocol.hear(meeting):
                return True
            continue
        greeted = True
        with contextlib.suppress(OSError):
            kind = protocol.HELLO if offered is None else protocol.GREETING
            protocol.say(meeting, message(kind, peer.tcp.fileno(), victim.ring_bytes))
    return False


def accepted(offered):
    with contextlib.suppress(BlockingIOError):
        meeting = offered.accept()[0]
        meeting.setblocking(False)
        return meeting
    return None


# Lies of the one who owns the far end: each a message (or several), and the reasons of which one must follow, if any.


class Lie:
    """What is said in place of a sound greeting. Descriptors are made by functions, so that each lie has fresh ones."""

    def __init__(self, name, reasons=None, segment=(segment_memfd,), bell=(), data=None, times=1, **words):
        self.name, self.reasons, self.segment, self.bell, self.data = name, reasons, segment, bell, data
        self.times, self.words = times, words

    def tell(self, meeting, peer, ring_bytes):
        """`peer` accepts: an answer with a segment, then the bell; else a hello with the bell."""
        made = []
        if peer.side == ACCEPTING:
            made += [maker(ring_bytes) for maker in self.segment]
        made += [maker(ring_bytes) for maker in self.bell]
        words = {"kind": protocol.ANSWER if peer.side == ACCEPTING else protocol.HELLO, "fd": peer.tcp.fileno()}
        words.update(ring_bytes=ring_bytes, context=1 if self.bell else 0, process=7)
        words.update(self.words)
        data = message(**words) if self.data is None else self.data
        try:
            with contextlib.suppress(OSError):
                for _ in range(self.times):
                    protocol.say(meeting, data, made)
        finally:
            for fd in made:
                os.close(fd)


def eventfd(_=0):
    return os.eventfd(0)


def page(_=0):
    return memfd(PAGE_BYTES)


def pipe(_=0):
    read, write = os.pipe()
    os.close(read)
    return write


def directory(_=0):
    return os.open("/", os.O_RDONLY)


def regular_file(size):
    with tempfile.TemporaryFile() as file:
        file.truncate(segment_bytes(size) if size else PAGE_BYTES)
        return os.dup(file.fileno())


def shm_file(size):
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.truncate(segment_bytes(size) if size else PAGE_BYTES)
        return os.dup(file.fileno())


def zero_device(_=0):
    return os.open("/dev/zero", os.O_RDWR)


def stray_socket(_=0):
    with socket.socket() as made:
        return os.dup(made.fileno())


def read_only(size):
    made = segment_memfd(size)
    try:
        return os.open(f"/proc/self/fd/{made}", os.O_RDONLY)
    finally:
        os.close(made)


def sealed(seals):
    return lambda size: memfd(segment_bytes(size), seals=seals, content=protocol.head(size))


def huge(size):
    whole = 2 << 20
    return memfd(-(-segment_bytes(size) // whole) * whole, flags=os.MFD_HUGETLB)


def wrong_head(size):
    return memfd(segment_bytes(size), content=protocol.head(size, magic=1))


def empty_head(size):
    return memfd(segment_bytes(size))


ALL_SEALS = SEAL | SHRINK | GROW
KINDS = (pipe, directory, regular_file, shm_file, zero_device, stray_socket, eventfd, page)
BAD = {"bad-peer"}
SEGMENT_LIES = [
    *(Lie(f"a {kind.__name__} for a segment", BAD, segment=[kind]) for kind in KINDS),
    Lie("an unsealed segment", BAD, segment=[sealed(0)]),
    Lie("a segment sealed against growing only", BAD, segment=[sealed(GROW)]),
    Lie("a segment sealed against shrinking only", BAD, segment=[sealed(SHRINK)]),
    Lie("a segment that can't be written", {"bad-peer", "forbidden"}, segment=[sealed(ALL_SEALS | WRITE)]),
    Lie("a segment opened for reading only", {"bad-peer", "forbidden"}, segment=[read_only]),
    Lie("a segment without head", BAD, segment=[empty_head]),
    Lie("a segment with a wrong head", BAD, segment=[wrong_head]),
    Lie("an empty segment", BAD, segment=[lambda _: memfd(0)]),
    Lie("a segment too short by a page", BAD, segment=[lambda size: memfd(segment_bytes(size) - PAGE_BYTES)]),
    Lie("a segment too short by a byte", BAD, segment=[lambda size: memfd(segment_bytes(size) - 1)]),
    Lie("a segment too long", BAD, segment=[lambda size: memfd(segment_bytes(size) + PAGE_BYTES)]),
    Lie("a segment of huge pages", BAD, segment=[huge]),
    Lie("no segment", BAD, segment=[]),
    Lie("a segment twice", None, segment=[segment_memfd, segment_memfd]),
]
BELL_LIES = [
    *(Lie(f"a {kind.__name__} for an eventfd", bell=[kind, page]) for kind in KINDS if kind is not eventfd),
    *(Lie(f"a {kind.__name__} for a context page", bell=[eventfd, kind]) for kind in KINDS if kind is not page),
    Lie("an eventfd alone", bell=[eventfd]),
    Lie("a context page alone", bell=[page]),
    Lie("a bell too many", bell=[eventfd, page, eventfd, page]),
    Lie("a blocking eventfd that is full", bell=[lambda _: os.eventfd(0xFFFFFFFF), page]),
    Lie("an unsealed context page", bell=[eventfd, lambda _: memfd(PAGE_BYTES, seals=0)]),
    Lie("an empty context page", bell=[eventfd, lambda _: memfd(0)]),
    Lie("a context page of huge pages", bell=[eventfd, huge]),
    *(Lie(f"a {kind.__name__} for a ready board", bell=[eventfd, page, kind]) for kind in KINDS),
    Lie("an unsealed ready board", bell=[eventfd, page, lambda _: memfd(BOARDS_BYTES, seals=0)]),
    Lie("a ready board that can't be written", bell=[eventfd, page, lambda _: memfd(BOARDS_BYTES, seals=ALL_SEALS | WRITE)]),
    Lie("a ready board of huge pages", bell=[eventfd, page, huge]),
    *(Lie(f"context {number}", bell=[eventfd, page], context=number) for number in (0, 33, 1 << 31, 0xFFFFFFFF)),
    Lie("more descriptors than are read", bell=[eventfd, page] + [eventfd] * 60),
]
MESSAGE_LIES = [
    *(Lie(f"a message of {size} bytes", BAD, data=bytes(size)) for size in (1, 8, 39, 40, 41, 80, 4096, 60_000)),
    Lie("an empty message", None, data=b""),
    Lie("no magic", BAD, magic=0),
    *(Lie(f"version {number}", {"other-version"}, version=number) for number in (0, VERSION - 1, VERSION + 1, 0xFFFFFFFF)),
    Lie("a version alone", {"other-version"}, data=frame(CONNECTION, 0, b"", version=VERSION + 1)),
    Lie("our version alone", BAD, data=frame(CONNECTION, 0, b"")),
    *(Lie(f"protocol {number}", BAD, protocol=number) for number in (0, 2, 3, 4, 0xFFFF)),
    *(Lie(f"kind {number}", BAD, kind=number) for number in (0, 1, 4, 0xFFFF)),
    *(Lie(f"a ring of {size} bytes", BAD, ring_bytes=size) for size in (0, 1, 4096, 65_535, 196_608)),
    Lie("a message four times", None, times=4),
]
# Too large is only a lie of who makes the segment; of who asks for one, it is a wish that is cut.
ANSWER_LIES = [Lie(f"a ring of {size} bytes", BAD, ring_bytes=size) for size in (2 << 20, 1 << 40, 1 << 63, WORD)]


# Of one that is proven its descriptor is not asked for any more.
HELLO_LIES = [Lie(f"descriptor {number}", {"not-owner"}, fd=number) for number in (-1, 0, 4000, 0x7FFFFFFF)]


def lies(ground):
    victim = Subject(ground)
    steady = Steady(ground, victim)
    common = MESSAGE_LIES + BELL_LIES
    known = [(lie, CONNECTING) for lie in common + HELLO_LIES] + [(lie, ACCEPTING) for lie in common + SEGMENT_LIES + ANSWER_LIES]
    count = ATTACKS * ground.options.rounds
    chosen = (known * (count // len(known) + 1))[: max(count, len(known))]
    ground.random.shuffle(chosen)
    truth(ground, victim)
    held = victim.held()
    for lie, side in chosen:
        attack_with(ground, victim, lie, side)
        victim.holds_only(held, f"{lie.name}, by the {('connecting', 'accepting')[side]} side")
    steady.goes_on()


def attack_with(ground, victim, lie, side):
    """Told again where the victim can't tell for now who has come: it has spent its time on looks at the machine's locks, which take long where others run."""
    wait_until(lambda: is_found_out(ground, victim, lie, side), 10 * SETTLE_SECONDS, f"a look at who says {lie.name}")


def is_found_out(ground, victim, lie, side):
    peer, number = make_peer(victim, side)
    try:
        tell(ground, victim, peer, number, lie)
        ends = peer.tcp.getpeername()[1], peer.tcp.getsockname()[1]
        path, reason = victim.reason(*ends)
        is_known = not lie.reasons or reason != "unproven" or reason in lie.reasons
        if lie.reasons:
            where = f"{lie.name}, by the {('connecting', 'accepting')[side]} side"
            require(not is_known or reason in lie.reasons, f"{where}: the victim's reason is {reason}, not one of {lie.reasons}")
            require(path == "kernel", f"{where}: the victim is on its way to the ring")
        victim.do("close", number)
        return is_known
    finally:
        peer.close()


def tell(ground, victim, peer, number, lie):
    at = protocol.name_of(peer.tcp, peer.side)
    if peer.side == CONNECTING:
        with protocol.knock(peer, victim, number, at) as meeting:
            protocol.await_message(peer, victim, number, meeting, protocol.GREETING)
            lie.tell(meeting, peer, victim.ring_bytes)
            work_on(ground, peer, victim, number)
    else:
        with protocol.offer(at) as offered, protocol.await_call(peer, victim, number, offered) as meeting:
            protocol.say(meeting, message(protocol.GREETING, peer.tcp.fileno(), 0))
            protocol.await_message(peer, victim, number, meeting, protocol.HELLO).close()
            lie.tell(meeting, peer, victim.ring_bytes)
            work_on(ground, peer, victim, number)


def work_on(ground, peer, victim, number):
    """The connection goes on through the kernel, whatever was said."""
    for _ in range(8):
        peer.exchange(victim, number, ground.random.randbytes(ground.random.randint(1, 5000)))


def another_version(ground):
    """It greets: the victim says which version is its own, and stays on the kernel."""
    victim = Subject(ground)
    peer, number = make_peer(victim, ACCEPTING)
    at = protocol.name_of(peer.tcp, ACCEPTING)
    with protocol.offer(at) as offered, protocol.await_call(peer, victim, number, offered) as meeting:
        protocol.say(meeting, message(protocol.GREETING, peer.tcp.fileno(), 0, version=VERSION + 1))
        work_on(ground, peer, victim, number)
        require(meeting.recv(100) == frame(CONNECTION, 0, b""), "the victim does not say which version is its own")
    said = victim.reason(peer.tcp.getpeername()[1], peer.tcp.getsockname()[1])
    require(said == ("kernel", "other-version"), f"the victim says {said}")
    victim.do("close", number)
    peer.close()


# KERNEL: a close that waits for as long as the one chose who sent the descriptor.


def lingering(ground):
    victim = Subject(ground)
    steady = Steady(ground, victim)
    with contextlib.ExitStack() as far_ends:

        def unread(_=0):
            near, far = stuck_connection()
            far_ends.callback(far.close)
            with near:
                return os.dup(near.fileno())

        for lie, side in (
            (Lie("a lingering socket for an eventfd", bell=[unread, page]), CONNECTING),
            (Lie("a lingering socket for a context page", bell=[eventfd, unread]), ACCEPTING),
            (Lie("a lingering socket for a segment", BAD, segment=[unread]), ACCEPTING),
            (Lie("lingering sockets in a hello that is none", BAD, bell=[unread], kind=0), CONNECTING),
        ):
            attack_with(ground, victim, lie, side)
            steady.goes_on()
        if os.geteuid() == 0:
            # However many one user sends: the others still get in, and he does not any more.
            said = set()
            for _ in range(OF_ONE_USER + 2):
                lie = Lie("lingering sockets of another user", segment=[unread], bell=[unread])
                with effective_user("nobody"):
                    peer, number = make_peer(victim, ACCEPTING)
                    with contextlib.suppress(Failed):
                        tell(ground, victim, peer, number, lie)
                said.add(victim.reason(peer.tcp.getpeername()[1], peer.tcp.getsockname()[1]))
                victim.do("close", number)
                peer.close()
            require(("kernel", "full") in said, f"he gets in: {said}")
            steady.goes_on()
        truth(ground, victim)


@contextlib.contextmanager
def effective_user(user):
    os.seteuid(pwd.getpwnam(user).pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


def stuck_connection():
    """One whose last close waits for ever: its far end takes nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1 << 20))
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    return near, far


# KERNEL: what can be polled is taken out of every epoll set at its last close, which waits for the set's lock, whatever signal comes.


class LockedSet:
    """An epoll set whose lock is held by the process that waits for it, and faults where its events go; and eventfds in it."""

    def __init__(self, count):
        self.eventfds = [os.eventfd(1) for _ in range(count)]
        ready_read, ready_write = os.pipe()
        self._holder = os.fork()
        if self._holder == 0:
            try:
                self._hold(ready_write)
            finally:
                os._exit(1)
        os.close(ready_write)
        try:
            problem = os.read(ready_read, 100).decode()
            if problem != ".":
                raise Skipped(f"no userfaultfd: {problem}")
            wchan = pathlib.Path(f"/proc/{self._holder}/wchan")
            wait_until(lambda: "userfault" in wchan.read_text(), SETTLE_SECONDS, "the lock of the set to be held")
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(ready_read)

    def _hold(self, ready):
        libc = ctypes.CDLL(None, use_errno=True)
        faults = libc.syscall({"x86_64": 323, "aarch64": 282}[os.uname().machine], os.O_CLOEXEC)
        if faults < 0:
            os.write(ready, os.strerror(ctypes.get_errno()).encode())
            return
        area = mmap.mmap(-1, PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        fcntl.ioctl(faults, UFFDIO_API, struct.pack("QQQ", UFFD_API, 0, 0))
        fcntl.ioctl(faults, UFFDIO_REGISTER, struct.pack("QQQQ", start, PAGE_BYTES, UFFD_MISSING, 0))
        locked = select.epoll()
        for fd in self.eventfds:
            locked.register(fd, select.EPOLLIN)
        # They stay in the set as long as anybody has them.
        for fd in self.eventfds:
            os.close(fd)
        os.write(ready, b".")
        libc.epoll_wait(locked.fileno(), ctypes.c_void_p(start), 1, -1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self._holder, signal.SIGKILL)
        os.waitpid(self._holder, 0)
        for fd in self.eventfds:
            os.close(fd)


UFFD_API, UFFD_MISSING = 0xAA, 1
UFFDIO_API, UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00


class Unkillable(Lie):
    """One of whose descriptors nobody but the victim has any more, if it gets there."""

    def __init__(self, locked, **rest):
        super().__init__("an eventfd in a locked set", **rest)
        self.locked, self.refused = locked, False

    def tell(self, meeting, peer, ring_bytes):
        eventfd = self.locked.eventfds.pop()
        others = [maker(ring_bytes) for maker in self.segment] if peer.side == ACCEPTING else []
        words = {"kind": protocol.ANSWER if peer.side == ACCEPTING else protocol.HELLO, "fd": peer.tcp.fileno()}
        try:
            protocol.say(meeting, message(**words, ring_bytes=ring_bytes, context=1, process=7), [*others, eventfd, *others])
            os.close(eventfd)
        except PermissionError:
            self.refused = True
            self.locked.eventfds.append(eventfd)
        for fd in others:
            os.close(fd)


def unkillable(ground):
    if os.geteuid() != 0:
        raise Skipped("only root can become another user")
    with LockedSet(3) as locked:
        for side, segment in ((CONNECTING, ()), (ACCEPTING, (segment_memfd,)), (ACCEPTING, ())):
            victim = Subject(ground)
            steady = Steady(ground, victim)
            lie = Unkillable(locked, segment=segment)
            with effective_user("nobody"):
                peer, number = make_peer(victim, side)
                tell(ground, victim, peer, number, lie)
            ends = peer.tcp.getpeername()[1], peer.tcp.getsockname()[1]
            said = victim.reason(*ends)
            require(lie.refused or said == ("kernel", "bad-peer"), f"the victim says {said}")
            victim.do("close", number)
            peer.close()
            steady.goes_on()
            if lie.refused:
                # It never had it: so its end waits for nobody either.
                victim.close()
