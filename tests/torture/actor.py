"""One end of many connections, one after the other or several at once, used in every way that a program can think of: TCP, Unix
streams (by path, by abstract name, as pairs over a fork), UDP. It knows nothing of ringlet.

    actor.py serve SEED           prints its port; its twin is
    actor.py connect SEED PORT
    actor.py go-on FD STATE       what an end becomes by exec

Lines of standard input ask for rounds: a first and a last number. All that an end does is drawn from the seed, the connection's number
and its side; what both must agree on (how many bytes go each way, who dies) from the first two. The bytes are those of a pad, from a
place that the connection's number gives, and every one that comes is compared with what it must be. Over Unix streams descriptors go
along, at bytes that both know. Of datagrams some may be lost, but each that comes is whole, comes once, and in its order.
"""

import array
import contextlib
import errno
import fcntl
import json
import mmap
import os
import pathlib
import random
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time

PAD = random.Random("pad").randbytes(1 << 18)
STRANGERS = os.environ.get("TORTURE_STRANGERS") == "1"
FAMILIES = os.environ.get("TORTURE_FAMILIES", "").split()
ADDRESS = os.environ.get("SERVER_ADDRESS", "127.0.0.1")
UNIX = ("path", "abstract", "pair")
STALL_SECONDS = 150
BLOCKED_SECONDS = 0.02  # of SO_RCVTIMEO and SO_SNDTIMEO
TICK_SECONDS = 0.05  # of the signals; longer, since Python begins an interrupted call anew
REPEAT_SECONDS = 0.001  # between datagrams that say the same
ENDINGS = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
ENDS_OF_A_ROUND = 100  # the numbers of a round's connections
datagrams_received = mmap.mmap(-1, 8)  # by this process and its forks


class Wrong(Exception):
    """Not what a program may see."""


def pad(start, length):
    start %= len(PAD)
    piece = PAD[start : start + length]
    return piece if len(piece) == length else piece + pad(0, length - len(piece))


def family_of(seed, number):
    return random.Random(f"{seed}/{number}/family").choice(FAMILIES)


class End:
    """Where one end of a connection stands; it can be told to another process as JSON."""

    # Of bytes, as powers of two; by `small`.
    SIZES = {True: (0, 13), False: tuple(map(int, os.environ.get("TORTURE_LARGE", "0 21").split()))}
    WAIT_SECONDS = 1

    @staticmethod
    def new(seed, number, side, at=None):
        family = family_of(seed, number // ENDS_OF_A_ROUND)
        return (Datagrams if family == "udp" else End)(family, seed, number, side, at)

    def __init__(self, family, seed, number, side, at):
        plan = random.Random(f"{seed}/{number}")
        small = plan.random() < 0.5
        totals = [1 + int(2 ** plan.uniform(*self.SIZES[small])) for _ in range(2)]
        self.killed = plan.randrange(2) if plan.random() < 0.08 else None  # the side that dies
        # The side that may give the connection to strangers, if there may be such. What is unread of a peer that has gone, or has gone
        # on through the kernel, can't be given away (SPECIFICATION.md, known differences): so its other end stays until this one has
        # ended, sends too little to fill a ring, and there are no strangers where paths change at random.
        self.giver = plan.randrange(2) if small and STRANGERS else None
        # With which bytes of either side a descriptor goes: through the kernel, so not to the giver.
        self.passes = [
            sorted({plan.randrange(total) for _ in range(plan.randrange(5))}) if family in UNIX and self.giver != 1 - sender else []
            for sender, total in enumerate(totals)
        ]
        self.family, self.seed, self.number, self.side = family, seed, number, side
        self.to_send, self.to_receive = totals[side], totals[1 - side]
        self.sent, self.received, self.shut, self.ended, self.cut, self.hops = at or (0, 0, False, False, False, 0)
        self.random = random.Random(f"{seed}/{number}/{side}/{self.hops}")
        self.small = small

    def at(self):
        return self.sent, self.received, self.shut, self.ended, self.cut, self.hops + 1

    def word(self):
        return json.dumps([self.seed, self.number, self.side, self.at()])

    @staticmethod
    def of(word):
        return End.new(*json.loads(word))

    def state(self):
        directions = f"sent {self.sent} of {self.to_send}, received {self.received} of {self.to_receive}"
        return f"{directions}, shut {self.shut}, ended {self.ended}, giver {self.giver}, killed {self.killed}, side {self.side}"

    def done(self):
        return (self.shut and self.ended) or self.cut

    def all_sent(self):
        return self.shut

    def sent_by_another(self):
        self.sent, self.shut = self.to_send, True

    def again(self):
        """What to do when nothing was told for WAIT_SECONDS, as events."""
        return []

    def meet(self, stream):
        """The socket to use, of a new connection."""
        return stream

    def patient(self):
        return self.giver is not None and self.giver != self.side and not self.ended

    def place(self, side):
        return (self.number * 7919 + side * 104729) % len(PAD)

    def amount(self, left):
        most = 60 if self.small else self.random.choice((64, 5000, 70_000, 300_000))
        return min(left, self.random.randint(1, most))

    # One call each. False: nothing could be done now.

    def send(self, sock, flags=0):
        left = self.to_send - self.sent
        if left == 0:
            if not self.shut:
                self.shut = True
                self._or_cut(lambda: sock.shutdown(socket.SHUT_WR))
            return True
        if self.patient() and left == 1:
            return False
        most = min([self.sent + max(left - self.patient(), 1)] + [at for at in self.passes[self.side] if at > self.sent]) - self.sent
        data = pad(self.place(self.side) + self.sent, min(self.amount(left), most))
        way = 4 if self.sent in self.passes[self.side] else self.random.choice((0, 1, 2, 3, 5, 5))
        ways = {
            0: lambda: os.write(sock.fileno(), data),
            1: lambda: sock.sendmsg(cut(self.random, data), [], flags),
            2: lambda: os.writev(sock.fileno(), cut(self.random, data)),
            3: lambda: self._send_file(sock, len(data)),
            4: lambda: self._send_descriptor(sock, data, flags),
            5: lambda: sock.send(data, flags),
        }
        try:
            n = self._or_cut(ways[way])
        except BlockingIOError:
            return False
        self.sent += n or 0
        return True

    def _send_file(self, sock, length):
        start = (self.place(self.side) + self.sent) % len(PAD)
        return os.sendfile(sock.fileno(), pad_file(), start, min(length, len(PAD) - start))

    def _mark(self, side, at):
        """What a file tells that is passed with this byte."""
        return f"{self.number}/{side}/{at}".encode()

    def _send_descriptor(self, sock, data, flags):
        with open(os.memfd_create("passed"), "w+b", buffering=0) as file:
            file.write(self._mark(self.side, self.sent))
            return socket.send_fds(sock, [data], [file.fileno()], flags)

    def _receive_descriptors(self, sock, length, flags):
        room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
        data, control, told, _ = sock.recvmsg(length, room, flags)
        fds = [fd for _, _, words in control for fd in array.array("i", words)]
        marks = [os.pread(fd, 100, 0) for fd in fds]
        for fd in fds:
            os.close(fd)
        wanted = [self._mark(1 - self.side, at) for at in self.passes[1 - self.side] if 0 <= at - self.received < len(data)]
        if marks != wanted or told & socket.MSG_CTRUNC:
            raise Wrong(f"with {len(data)} bytes from {self.received} came {marks}, not {wanted}; flags {told}")
        return data

    def receive(self, sock, flags=0):
        left = self.to_receive - self.received
        length = self.amount(max(left, 1) + 10)
        way = self.random.randrange(6)
        try:
            data = self._or_cut(lambda: self._receive_by(way, sock, length, flags))
        except BlockingIOError:
            return False
        if data is None:
            return True
        if not data:
            self.ended = True
            if left and self.killed != 1 - self.side:
                raise Wrong(f"ended too early: {self.state()}")
            return True
        self._check(data)
        self.received += len(data)
        if self.received > self.to_receive:
            raise Wrong(f"{self.received} bytes, though {self.to_receive} were sent")
        return True

    def _receive_by(self, way, sock, length, flags):
        if way == 0:
            return os.read(sock.fileno(), length)
        if way == 1:
            buffers = [bytearray(length // 3 + 1) for _ in range(3)]
            n = os.readv(sock.fileno(), buffers)
            return b"".join(buffers)[:n]
        if way == 2:
            return self._receive_descriptors(sock, length, flags)
        if way == 3:
            peeked = sock.recv(length, flags | socket.MSG_PEEK)
            self._check(peeked)
            got = sock.recv(max(len(peeked), 1), flags)
            if peeked and got[: len(peeked)] != peeked[: len(got)]:
                raise Wrong(f"peeked at other bytes than were read at {self.received}")
            return got
        if way == 4 and self.to_receive > self.received:
            return sock.recv(min(length, self.to_receive - self.received), flags | socket.MSG_WAITALL)
        return sock.recv(length, flags)

    def _check(self, data):
        wanted = pad(self.place(1 - self.side) + self.received, len(data))
        if data != wanted:
            at = next(i for i, (a, b) in enumerate(zip(data, wanted)) if a != b)
            raise Wrong(f"byte {self.received + at} of {self.to_receive} is wrong, in {len(data)} bytes from {self.received}")

    def _or_cut(self, call):
        """A connection whose other end dies may end by an error; nothing else may."""
        try:
            return call()
        except OSError as error:
            if error.errno not in ENDINGS or self.killed != 1 - self.side:
                raise
            self.cut = True
            return None


class Datagrams(End):
    """Both sides send their datagrams, then say again and again that these were all, until they have heard that of the other side and
    know that it has heard theirs. The last to know finds the other gone."""

    SIZES = {True: (0, 5), False: (0, 10)}
    WAIT_SECONDS = 0.05
    HEAD = struct.Struct("<IBBII")  # connection, side, whether the other side's last is known, number, length of the rest
    LONGEST = 65_507 - HEAD.size

    def __init__(self, family, seed, number, side, at):
        *of_all, self.heard, self.other_ended, self.connected, self.peer = at or (None, -1, False, False, None)
        super().__init__(family, seed, number, side, of_all if at else None)
        # So few find room in any buffer; only what is given to strangers, or killed, may lose some.
        self.all_must_come = self.small and self.giver is None and self.killed is None

    def at(self):
        return *super().at(), self.heard, self.other_ended, self.connected, self.peer

    def meet(self, stream):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((stream.getsockname()[0], 0))
        stream.send(struct.pack("<H", sock.getsockname()[1]))
        self.peer = [stream.getpeername()[0], *struct.unpack("<H", stream.recv(2, socket.MSG_WAITALL))]
        stream.close()
        if self.random.random() < 0.5:
            self._connect(sock)
        return sock

    def _connect(self, sock):
        self.connected = True
        sock.connect(tuple(self.peer))

    def patient(self):
        return False

    def all_sent(self):
        return self.sent >= self.to_send

    def sent_by_another(self):
        self.sent = max(self.sent, self.to_send)

    def again(self):
        return [(None, select.EPOLLOUT)]

    def state(self):
        return f"{super().state()}, heard {self.heard}, other side ended {self.other_ended}, connected {self.connected}"

    def _or_cut(self, call):
        try:
            return call()
        except ConnectionRefusedError:
            if self.killed == 1 - self.side:
                self.cut = True
            elif self.other_ended and self.all_sent():
                self.shut = self.ended = True
            else:
                raise
            return None

    def _content(self, side, number, length):
        return pad(self.place(side) + 31 * number, length)

    def send(self, sock, flags=0):
        repeats = self.all_sent()
        if repeats and (self.other_ended or self.killed == 1 - self.side) and not self.connected:
            self._connect(sock)
        if repeats and self.ended:
            self.shut = True
        length = 0 if repeats else self.random.randint(0, self.random.choice((60, 1_400) if self.small else (60, 1_400, 9_000, self.LONGEST)))
        head = self.HEAD.pack(self.number, self.side, self.other_ended, self.sent, length)
        data = head + self._content(self.side, self.sent, length)
        to = None if self.connected else tuple(self.peer)
        ways = (
            lambda: sock.sendto(data, flags, to) if to else os.write(sock.fileno(), data),
            lambda: sock.sendmsg(cut(self.random, data), [], flags, to),
            lambda: sock.sendto(data, flags, to) if to else sock.send(data, flags),
        )
        try:
            n = self._or_cut(self.random.choice(ways))
        except BlockingIOError:
            return False
        self.sent += n is not None
        if repeats:
            time.sleep(REPEAT_SECONDS)
        return not repeats

    def receive(self, sock, flags=0):
        room = self.HEAD.size + self.random.choice((0, 100, self.LONGEST, self.LONGEST, self.LONGEST))
        way = self.random.randrange(5)
        try:
            told = self._or_cut(lambda: self._receive_by(way, sock, room, flags))
        except BlockingIOError:
            return False
        if told:
            self._check(*told, room)
        return True

    def _receive_by(self, way, sock, room, flags):
        if way == 0:
            return os.read(sock.fileno(), room), None
        if way == 1:
            data, _, told, source = sock.recvmsg(room, 0, flags)
            return data, source
        if way == 2:
            peeked = sock.recvfrom(room, flags | socket.MSG_PEEK)
            got = sock.recvfrom(room, flags)
            if got != peeked:
                raise Wrong(f"peeked at another datagram than was read after {self.heard}: {peeked[0][:20]}, {got[0][:20]}")
            return got
        if way == 3:
            return sock.recv(room, flags), None
        return sock.recvfrom(room, flags)

    def _check(self, data, source, room):
        def wrong(what):
            raise Wrong(f"{what}: {len(data)} bytes {data[: self.HEAD.size].hex()} from {source} after {self.heard}; {self.state()}")

        if len(data) < self.HEAD.size:
            wrong("no whole head")
        number, side, knows, place, length = self.HEAD.unpack_from(data)
        if (number, side) != (self.number, 1 - self.side) or source not in (None, tuple(self.peer)):
            wrong("not for this socket")
        if data[self.HEAD.size :] != self._content(side, place, length)[: room - self.HEAD.size]:
            wrong("damaged")
        if place <= self.heard:
            wrong("twice, or out of order")
        self.heard = place
        if place < self.to_receive:
            self.received += 1
            datagrams_received[:] = struct.pack("<Q", struct.unpack("<Q", datagrams_received)[0] + 1)
            return
        if self.all_must_come and self.received < self.to_receive:
            wrong("lost some, though there was room")
        self.other_ended = True
        self.ended |= bool(knows)


def cut(source, data):
    ends = sorted(source.randrange(len(data) + 1) for _ in range(source.randrange(1, 9)))
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)])]


_pad_file = None


def pad_file():
    global _pad_file
    if _pad_file is None:
        file = tempfile.TemporaryFile()
        file.write(PAD)
        file.flush()
        _pad_file = file
    return _pad_file.fileno()


# Ways to use a connection for a while: so many calls, or until it is done.


def set_timeouts(sock, seconds):
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def by_threads(end, sock, calls):
    """A thread that sends and one that receives, both in blocking calls."""
    sock.setblocking(True)
    set_timeouts(sock, BLOCKED_SECONDS)
    stop, problems = threading.Event(), []

    def sender():
        try:
            for _ in range(calls):
                if end.shut or end.cut:
                    break
                end.send(sock)
        except BaseException as problem:
            problems.append(problem)
        stop.set()

    thread = threading.Thread(target=sender)
    thread.start()
    try:
        while not (stop.is_set() or end.ended or end.cut):
            end.receive(sock)
    finally:
        thread.join()
        set_timeouts(sock, 0)
    if problems:
        raise problems[0]


def ready(end, sock, wait):
    """`wait(wants_room)` tells (readable, writable)."""
    readable, writable = wait(not end.shut and not (end.patient() and end.to_send - end.sent == 1))
    if readable and not end.ended:
        end.receive(sock, socket.MSG_DONTWAIT if sock.getblocking() else 0)
    if writable and not (end.shut or end.cut):
        end.send(sock, socket.MSG_DONTWAIT if sock.getblocking() else 0)


def by_poll(end, sock, calls):
    sock.setblocking(False)

    def wait(room):
        poller = select.poll()
        poller.register(sock, (0 if end.ended else select.POLLIN) | (select.POLLOUT if room else 0))
        mask = sum(mask for _, mask in poller.poll(20))
        return mask & ~select.POLLOUT, mask & ~select.POLLIN

    for _ in range(calls):
        if end.done():
            break
        ready(end, sock, wait)


def by_select(end, sock, calls):
    sock.setblocking(False)

    def wait(room):
        r, w, _ = select.select([] if end.ended else [sock], [sock] if room else [], [], 0.02)
        return r, w

    for _ in range(calls):
        if end.done():
            break
        ready(end, sock, wait)


def by_epoll(end, sock, calls):
    sock.setblocking(False)
    with contextlib.closing(select.epoll()) as watch:
        watch.register(sock, select.EPOLLIN | select.EPOLLOUT)

        def wait(room):
            watch.modify(sock, (0 if end.ended else select.EPOLLIN) | (select.EPOLLOUT if room else 0))
            mask = sum(mask for _, mask in watch.poll(0.02))
            return mask & ~select.EPOLLOUT, mask & ~select.EPOLLIN

        for _ in range(calls):
            if end.done():
                break
            ready(end, sock, wait)


def by_edges(end, sock, calls):
    """As programs do it: what is reported is used until it says EAGAIN."""
    sock.setblocking(False)
    with contextlib.closing(select.epoll()) as watch:
        watch.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        began = time.monotonic()
        while calls > 0 and not end.done():
            events = watch.poll(end.WAIT_SECONDS)
            if events:
                began = time.monotonic()
            for _ in events or end.again():
                while not (end.ended or end.cut) and end.receive(sock):
                    calls -= 1
                while not (end.shut or end.cut) and end.send(sock):
                    calls -= 1
            if time.monotonic() - began > STALL_SECONDS:
                raise Wrong(f"no edge was told: {end.state()}")


def by_blocking_turns(end, sock, calls):
    """One thread, blocking calls with a time."""
    sock.setblocking(True)
    set_timeouts(sock, BLOCKED_SECONDS)
    for _ in range(calls):
        if not (end.shut or end.cut):
            end.send(sock)
        if not (end.ended or end.cut):
            end.receive(sock)
    set_timeouts(sock, 0)


def by_two_processes(end, sock):
    """The child sends the rest, the parent receives meanwhile."""
    sock.setblocking(True)
    set_timeouts(sock, BLOCKED_SECONDS)
    child = os.fork()
    if child == 0:
        with status_of_child():
            while not (end.all_sent() or end.cut):
                end.send(sock)
    while not (status := os.waitpid(child, 0 if end.ended or end.cut else os.WNOHANG))[0]:
        end.receive(sock)
    ended_well(status[1])
    set_timeouts(sock, 0)
    end.sent_by_another()


WAYS = (by_threads, by_poll, by_select, by_epoll, by_edges, by_blocking_turns)


# Hops: from one descriptor, process or program to another.


@contextlib.contextmanager
def status_of_child():
    status = 1
    try:
        yield
        status = 0
    except BaseException as problem:
        report(problem)
    finally:
        os._exit(status)


def wait_for(child, killed=False):
    ended_well(os.waitpid(child, 0)[1], killed)


def ended_well(word, killed=False):
    status = os.waitstatus_to_exitcode(word)
    if status != (-signal.SIGKILL if killed else 0):
        raise Wrong(f"a child ended with {status}")


def unread(sock):
    return struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]


def hop_to_copy(end, sock):
    if end.random.random() < 0.5:
        new = os.dup(sock.fileno())
    else:
        with open(os.devnull) as any_file:
            new = os.dup2(sock.fileno(), os.dup(any_file.fileno()), False)
    os.close(sock.detach())
    return socket.socket(fileno=new)


def hop_to_child(end, sock):
    """Returns None: the connection went away, and its end was waited for."""
    child = os.fork()
    if child == 0:
        with status_of_child():
            work(End.of(end.word()), sock)
    sock.close()
    wait_for(child)


def hop_to_program(end, sock):
    child = os.fork()
    if child == 0:
        with status_of_child():
            sock.setblocking(True)
            sock.set_inheritable(True)
            wrapped = end.random.random() < 0.7
            environment = {name: value for name, value in os.environ.items() if wrapped or name != "LD_PRELOAD"}
            os.execve(sys.executable, [sys.executable, __file__, "go-on", str(sock.fileno()), end.word()], environment)
    sock.close()
    wait_for(child)


def hop_to_helper(end, sock):
    """Passed over a Unix socket to a process that was there before."""
    helper = helpers[end.random.randrange(len(helpers))]
    sock.setblocking(True)
    socket.send_fds(helper, [end.word().encode()], [sock.fileno()])
    sock.close()
    if helper.recv(1) != b"+":
        raise Wrong("a helper failed")


helpers = []


def start_helper():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        with status_of_child():
            ours.close()
            for other in helpers:
                other.close()
            helpers.clear()
            while True:
                word, fds, _, _ = socket.recv_fds(theirs, 1000, 1)
                if not word:
                    break
                work(End.of(word), socket.socket(fileno=fds[0]))
                theirs.send(b"+")
    theirs.close()
    helpers.append(ours)


def work(end, sock):
    """Uses a connection to its end, here or wherever it goes."""
    began = time.monotonic()
    while not end.done():
        if time.monotonic() - began > STALL_SECONDS:
            raise Wrong(f"stalled: {end.state()}")
        if end.random.random() < 0.03 and not end.patient():
            by_two_processes(end, sock)
            continue
        end.random.choice(WAYS)(end, sock, end.random.randint(1, 40))
        chance = end.random.random()
        if chance < 0.10:
            sock = hop_to_copy(end, sock)
        elif end.hops < 4 and chance < 0.24 and not end.done():
            hop = hop_to_child if chance < 0.16 else hop_to_program if chance < 0.19 else hop_to_helper
            # (With a doorbell behind what is unread from before a move it can't be given away either.)
            if end.giver != end.side or end.shut or unread(sock) or hop is hop_to_helper and not helpers:
                hop = hop_to_child
            return hop(end, sock)
    sock.close()


def die(end, sock):
    """A child works with the connection until it is killed."""
    child = os.fork()
    if child == 0:
        with status_of_child():
            helpers.clear()  # whose answers would come to nobody
            work(end, sock)
            time.sleep(STALL_SECONDS)
    sock.close()
    time.sleep(end.random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    wait_for(child, killed=True)
    end.cut = True


def crowd(ends):
    """Several at once, in one loop."""
    by_fd = {sock.fileno(): (end, sock) for end, sock in ends}
    edge = ends[0][0].random.random() < 0.5
    with contextlib.closing(select.epoll()) as watch:
        for fd, (end, sock) in by_fd.items():
            sock.setblocking(False)
            watch.register(fd, select.EPOLLIN | select.EPOLLOUT | (select.EPOLLET if edge else 0))
        last = time.monotonic()
        while by_fd:
            events = watch.poll(ends[0][0].WAIT_SECONDS)
            if events:
                last = time.monotonic()
            elif time.monotonic() - last > STALL_SECONDS:
                raise Wrong("stalled: " + "; ".join(f"{end.number}: {end.state()}" for end, _ in by_fd.values()))
            for fd, mask in events or [(fd, mask) for fd, (end, _) in by_fd.items() for _, mask in end.again()]:
                end, sock = by_fd[fd]
                if mask & ~select.EPOLLOUT:
                    while not (end.ended or end.cut) and end.receive(sock) and edge:
                        pass
                if mask & ~select.EPOLLIN:
                    while not (end.shut or end.cut) and end.send(sock) and edge:
                        pass
                if end.done():
                    sock.close()  # and leaves the set by that
                    del by_fd[fd]
                elif not edge:
                    watch.modify(fd, (0 if end.ended else select.EPOLLIN) | (0 if end.shut else select.EPOLLOUT))


# Rounds.


def report(problem):
    text = str(problem) if isinstance(problem, Wrong) else repr(problem)
    where = problem.__traceback__
    while where and where.tb_next:
        where = where.tb_next
    line = f" (line {where.tb_lineno})" if where else ""
    print(f"wrong in {os.getpid()}: {text}{line}", flush=True)


def holdings():
    """What this process holds; the kernel's own view."""
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:" in line for line in maps)
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"descriptors": len(fds) - 1, "mappings": mapped, "resident": resident, "children": len(children)}


def one_round(seed, number, side, connection):
    """Some connections at once, or one with all its hops."""
    plan = random.Random(f"{seed}/{number}/round")
    count = plan.randint(2, 12) if plan.random() < 0.3 else 1
    numbers = range(number * ENDS_OF_A_ROUND, number * ENDS_OF_A_ROUND + count)
    if family_of(seed, number) != "pair":
        play([end_and_socket(End.new(seed, n, side), connection) for n in numbers])
        return
    # The twin has pairs of its own.
    pairs = [socket.socketpair() for _ in numbers]
    child = os.fork()
    side = int(child == 0)
    ours = [(End.new(seed, n, side), pair[side]) for n, pair in zip(numbers, pairs)]
    for pair in pairs:
        pair[1 - side].close()
    if child == 0:
        with status_of_child():
            helpers.clear()  # they answer the parent
            play(ours)
    play(ours)
    wait_for(child)


def end_and_socket(end, connection):
    sock = connection("tcp" if end.family == "udp" else end.family)
    return end, end.meet(sock)


def play(ends):
    if len(ends) > 1:
        for end, _ in ends:
            end.killed = end.giver = None
        crowd(ends)
    elif ends[0][0].killed == ends[0][0].side:
        die(*ends[0])
    else:
        end, sock = ends[0]
        rain = end.random.random() < 0.3
        if rain:
            signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
        try:
            work(end, sock)
        finally:
            if rain:
                signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    if sys.argv[1] == "go-on":
        signal.signal(signal.SIGALRM, lambda *_: None)
        end = End.of(sys.argv[3])
        work(end, socket.socket(fileno=int(sys.argv[2])))
        return
    seed = sys.argv[2]
    side = int(sys.argv[1] == "serve")
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, random.Random(f"{seed}/{side}").random() < 0.5)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if random.Random(f"{seed}/{side}/limit").random() < 0.3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for _ in range(2):
        start_helper()
    pad_file()
    tcp = socket.create_server((ADDRESS, 0), backlog=100) if side else None
    port = tcp.getsockname()[1] if side else int(sys.argv[3])
    names = {"path": f"listener-{port}", "abstract": f"\0torture-{port}"}
    listeners = {"tcp": tcp}
    if side:
        for family, name in names.items():
            listeners[family] = socket.socket(socket.AF_UNIX)
            listeners[family].bind(name)
            listeners[family].listen(100)
        print(port, flush=True)

    def connection(family):
        if side:
            return listeners[family].accept()[0]
        if family == "tcp":
            return socket.create_connection((ADDRESS, port))
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(names[family])
        return sock

    for line in sys.stdin:
        first, last = map(int, line.split())
        try:
            for number in range(first, last):
                one_round(seed, number, side, connection)
        except BaseException as problem:
            report(problem)
            print(f"in round {number}", flush=True)
            os._exit(1)
        received = struct.unpack("<Q", datagrams_received)[0]
        print(json.dumps({"held": holdings(), "datagrams": received}), flush=True)
    for helper in helpers:
        helper.close()


if __name__ == "__main__":
    main()
