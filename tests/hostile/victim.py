"""An ordinary program with TCP connections, which knows nothing of ringlet: what the attacks are made upon.

It does what its standard input says, a JSON list a line (the name of a method of `Victim`, then its arguments), and
answers each with a line. What flows is a known pattern: whoever receives can tell a lost, doubled or changed byte.
"""

import collections
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import queue
import random
import resource
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time

PATTERN = random.Random(0).randbytes(65_521) * 3
PERIOD = len(PATTERN) // 3
LARGEST = 65_521

STEADY_BYTES = 200
STEADY_PAUSE_SECONDS = 0.002
ABUSE_TIMEOUT_SECONDS = 0.01
DATAGRAM_SECONDS = 90  # for one that must come
ABUSE_LARGEST = 200_000
SIOCOUTQ = termios.TIOCOUTQ
CLONE_NEWNET = 0x40000000
ARENA_OBJECTS, ARENAS = 100_000, 40


def pattern(position, size):
    start = position % PERIOD
    return PATTERN[start : start + size]


class Torn(Exception):
    """Bytes came that were never sent."""


@contextlib.contextmanager
def elsewhere(namespace):
    """This thread is in that network namespace for the moment."""
    with open("/proc/thread-self/ns/net") as own, open(namespace) as other:
        join(other)
        try:
            yield
        finally:
            join(own)


def join(namespace):
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Connection:
    def __init__(self, made):
        self.socket = made
        self.sent = self.received = 0

    def send(self, size):
        while size:
            n = self.socket.send(pattern(self.sent, min(size, LARGEST)))
            self.sent += n
            size -= n

    def receive(self, size):
        while size:
            data = self.socket.recv(min(size, LARGEST))
            if not data:
                raise EOFError
            if data != pattern(self.received, len(data)):
                raise Torn(f"at byte {self.received}")
            self.received += len(data)
            size -= len(data)

    def send_back(self, size):
        """Whatever comes: the other end is not one of us."""
        while size:
            data = self.socket.recv(min(size, LARGEST))
            if not data:
                raise EOFError
            self.socket.sendall(data)
            size -= len(data)


class Steady:
    """A connection that is in use all the time and must never be harmed."""

    def __init__(self, connection, asks):
        self._connection, self._asks = connection, asks
        self.rounds, self.problem, self._end = 0, None, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            while not self._end:
                if self._asks:
                    self._connection.send(STEADY_BYTES)
                self._connection.receive(STEADY_BYTES)
                if self._asks:
                    time.sleep(STEADY_PAUSE_SECONDS)
                else:
                    self._connection.send(STEADY_BYTES)
                self.rounds += 1
        except (OSError, EOFError, Torn) as problem:
            self.problem = repr(problem)

    def path(self):
        return ringlet_path(self._connection.socket.fileno())


class Victim:
    def __init__(self):
        self._listener = None
        self._connections = {}
        self._next = 0
        self._steady = None
        self._server, self._to_serve = None, queue.Queue()
        self._maps = []
        self._sets = {}

    def _keep(self, made):
        self._next += 1
        self._connections[self._next] = Connection(made)
        return self._next

    def ready(self):
        return "ready"

    def listen(self):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        return self._listener.getsockname()[1]

    def accept(self):
        return self._keep(self._listener.accept()[0])

    def connect(self, port):
        return self._keep(socket.create_connection(("127.0.0.1", port)))

    def listen_in(self, namespace):
        with elsewhere(namespace):
            return self.listen()

    def connect_in(self, namespace, port):
        with elsewhere(namespace):
            return self.connect(port)

    def descriptor(self, number):
        return self._connections[number].socket.fileno()

    def port(self, number):
        return self._connections[number].socket.getsockname()[1]

    def path(self, number):
        return ringlet_path(self._connections[number].socket.fileno())

    def send(self, number, size):
        self._connections[number].send(size)

    def receive(self, number, size):
        self._connections[number].receive(size)

    def trips(self, number, size, times):
        for _ in range(times):
            self.send(number, size)
            self.receive(number, size)

    def echo(self, number, size, times):
        for _ in range(times):
            self.receive(number, size)
            self.send(number, size)

    def echo_by(self, number, size, times, way):
        """The same, each time after a wait by this way; a set is kept from one such call to the next."""
        wait = self._wait(number, way)
        for _ in range(times):
            wait()
            self.echo(number, size, 1)

    def _wait(self, number, way):
        connection = self._connections[number]
        if way == "epoll":
            if number not in self._sets:
                self._sets[number] = select.epoll()
                self._sets[number].register(connection.socket, select.EPOLLIN)
            return self._sets[number].poll
        poll = select.poll()
        poll.register(connection.socket, select.POLLIN)
        return poll.poll

    def kernel_received(self, number):
        """Bytes that have come by the kernel's connection."""
        info = self._connections[number].socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        return struct.unpack_from("Q", info, 128)[0]

    def send_back(self, number, size, times=1):
        for _ in range(times):
            self._connections[number].send_back(size)

    def send_back_by(self, number, size, way):
        self._wait(number, way)()
        self.send_back(number, size)

    # UDP.

    def udp(self):
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._udp.settimeout(DATAGRAM_SECONDS)
        return self._udp.getsockname()[1], os.fstat(self._udp.fileno()).st_ino

    def udp_path(self):
        return ringlet_path(self._udp.fileno())

    def udp_send(self, port, text):
        self._udp.sendto(text.encode(), ("127.0.0.1", port))

    def udp_answer(self):
        data, address = self._udp.recvfrom(70_000)
        self._udp.sendto(data, address)

    def udp_take(self, most):
        """What can be received now: each datagram's sender and bytes."""
        self._udp.setblocking(False)
        taken = []
        with contextlib.suppress(BlockingIOError):
            while len(taken) < most:
                data, address = self._udp.recvfrom(70_000)
                taken.append((address[1], data.hex()))
        self._udp.settimeout(DATAGRAM_SECONDS)
        return taken

    def udp_serve(self, port, rounds):
        """Answers so many datagrams of one sender; others are dropped."""
        while rounds:
            data, address = self._udp.recvfrom(70_000)
            if address[1] == port:
                self._udp.sendto(data, address)
                rounds -= 1

    def udp_ask(self, port, rounds):
        for number in range(rounds):
            request = pattern(number, 1 + number * 37 % 9_000)
            self._udp.sendto(request, ("127.0.0.1", port))
            data, address = self._udp.recvfrom(70_000)
            if data != request or address[1] != port:
                raise Torn(f"in round {number}")

    def udp_broadcast(self, rounds):
        """Two receivers of each datagram, which is sent to all of the machine's own."""
        receivers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        for each in receivers:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.settimeout(DATAGRAM_SECONDS)
        receivers[0].bind(("0.0.0.0", 0))
        receivers[1].bind(receivers[0].getsockname())
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.bind(("127.0.0.1", 0))
        for number in range(rounds):
            sender.sendto(b"to all %d" % number, ("127.255.255.255", receivers[0].getsockname()[1]))
            for each in receivers:
                if each.recv(100) != b"to all %d" % number:
                    raise Torn(f"in round {number}")

    def send_many(self, number, size, times):
        for _ in range(times):
            self._connections[number].send(size)

    def shut_receiving(self, number):
        self._connections[number].socket.shutdown(socket.SHUT_RD)

    def close(self, number):
        self._connections.pop(number).socket.close()

    # Ways to wait, for whoever wants a byte to come by each of them.

    def wait_by(self, number, way):
        connection = self._connections[number].socket
        if way == "poll":
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.poll()
        elif way == "select":
            select.select([connection], [], [])
        elif way == "epoll":
            with select.epoll() as epoll:
                epoll.register(connection, select.EPOLLIN)
                epoll.poll()
        self._connections[number].receive(1)

    # A server of its own accord.

    def serve(self):
        threading.Thread(target=self._serve_all, daemon=True).start()

    def _serve_all(self):
        """Sends back whatever comes, on every connection."""
        epoll, connections = select.epoll(), {}
        epoll.register(self._listener, select.EPOLLIN)
        while True:
            for fd, _events in epoll.poll():
                if fd == self._listener.fileno():
                    made = self._listener.accept()[0]
                    made.setblocking(False)
                    connections[made.fileno()] = made
                    epoll.register(made, select.EPOLLIN)
                    continue
                try:
                    data = connections[fd].recv(LARGEST)
                    if data:
                        connections[fd].send(data)
                        continue
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                connections.pop(fd).close()

    # The connection that must not be harmed.

    def steady_accept(self):
        self._steady = Steady(Connection(self._listener.accept()[0]), asks=False)

    def steady_connect(self, port):
        self._steady = Steady(Connection(socket.create_connection(("127.0.0.1", port))), asks=True)

    def steady(self):
        return {"rounds": self._steady.rounds, "problem": self._steady.problem, "path": self._steady.path()}

    # Many connections one after the other.

    def churn_serve(self, count):
        """Serves `count` connections, each as its first bytes say: a way to end, and how much to send back before."""
        self._to_serve.put(count)
        if not self._server:
            self._server = threading.Thread(target=self._serve_batches, daemon=True)
            self._server.start()

    def churn_served(self):
        self._to_serve.join()

    def _serve_batches(self):
        while True:
            self._serve(self._to_serve.get())
            self._to_serve.task_done()

    def _serve(self, count):
        for _ in range(count):
            connection = Connection(self._listener.accept()[0])
            try:
                way, messages, size = struct.unpack("<BHI", connection.socket.recv(7, socket.MSG_WAITALL))
                connection.send_back(messages * size)
                end_connection(connection.socket, way & 3)
            except (OSError, EOFError, struct.error):
                connection.socket.close()

    def churn(self, port, count, seed):
        source = random.Random(seed)
        moved = 0
        for _ in range(count):
            connection = Connection(socket.create_connection(("127.0.0.1", port)))
            way, messages = source.randrange(16), source.choice((0, 1, 5, 6, 7, 20, 40))
            size = source.choice((1, 50, 700, 9_000))
            connection.socket.sendall(struct.pack("<BHI", way, messages, size))
            try:
                for _ in range(messages):
                    connection.send(size)
                    connection.receive(size)
                moved += ringlet_path(connection.socket.fileno()) == 3
                end_connection(connection.socket, way >> 2)
            except (OSError, EOFError):
                connection.socket.close()
        return moved

    # Calls of which it is asked how often they slept.

    def small_buffer(self, number):
        self._connections[number].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)

    def send_now(self, number, size):
        """One call; returns how much it took."""
        connection = self._connections[number]
        try:
            sent = connection.socket.send(pattern(connection.sent, size), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        connection.sent += sent
        return sent

    def sleeps(self, number, name, *arguments):
        """How often the call gave the processor away to wait."""
        connection, poll = self._connections[number].socket, select.poll()
        poll.register(connection, select.POLLIN | select.POLLOUT)
        ways = {
            "close": connection.close,
            "receive": lambda: connection.recv(100, socket.MSG_DONTWAIT),
            "send": lambda: connection.send(b"x" * 100, socket.MSG_DONTWAIT),
            "poll": lambda: poll.poll(0),
            "shut down": lambda: connection.shutdown(socket.SHUT_WR),
            "low mark": lambda: connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2),
        }
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        try:
            ways[name](*arguments)
            outcome = "done"
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        return outcome, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before

    # Use of a connection whose peer is out of its mind: no call may block for longer than it was told to.

    def abuse(self, number, seed, calls):
        connection = self._connections[number].socket
        source = random.Random(seed)
        timeout = struct.pack("ll", 0, int(ABUSE_TIMEOUT_SECONDS * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        outcomes = collections.Counter()
        with select.epoll() as level, select.epoll() as edge, contextlib.ExitStack() as copies:
            level.register(connection, select.EPOLLIN | select.EPOLLOUT)
            edge.register(connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET | select.EPOLLRDHUP)
            poll = select.poll()
            poll.register(connection, select.POLLIN | select.POLLOUT)
            ms, s = ABUSE_TIMEOUT_SECONDS * 1e3, ABUSE_TIMEOUT_SECONDS
            ways = {
                "receive": lambda: connection.recv(source.randint(1, ABUSE_LARGEST)),
                "receive now": lambda: connection.recv(source.randint(1, ABUSE_LARGEST), socket.MSG_DONTWAIT),
                "receive all": lambda: connection.recv(source.randint(1, ABUSE_LARGEST), socket.MSG_WAITALL),
                "peek": lambda: connection.recv(source.randint(1, ABUSE_LARGEST), socket.MSG_PEEK),
                "send": lambda: connection.send(bytes(source.randint(1, ABUSE_LARGEST))),
                "send now": lambda: connection.send(bytes(source.randint(1, 100)), socket.MSG_DONTWAIT),
                "send little": lambda: connection.send(bytes(source.randint(1, 100))),
                "poll": lambda: poll.poll(ms),
                "select": lambda: select.select([connection], [connection], [connection], s),
                "epoll": lambda: level.poll(s),
                "epoll edge": lambda: edge.poll(s),
                "readable": lambda: fcntl.ioctl(connection, termios.FIONREAD, bytes(4)),
                "unsent": lambda: fcntl.ioctl(connection, SIOCOUTQ, bytes(4)),
                "error": lambda: connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR),
                "dup": lambda: copies.enter_context(connection.dup()),
            }
            rarely = {
                "shut down": lambda: connection.shutdown(socket.SHUT_WR),
                "stdio": lambda: os.close(fdopen_descriptor(os.dup(connection.fileno()))),
            }
            names, rare_names = list(ways), list(rarely)
            for _ in range(calls):
                rare = source.random() < 0.004
                name = source.choice(rare_names if rare else names)
                try:
                    (rarely if rare else ways)[name]()
                    outcomes["done"] += 1
                except OSError as error:
                    outcomes[errno.errorcode[error.errno]] += 1
        return outcomes

    # Limits.

    def use_up_mappings(self, left):
        """Maps until the kernel refuses, then gives `left` mappings back."""
        # The interpreter's own allocations come out of arenas, which it must have by then: one object keeps each.
        self._arenas = [bytes(100) for _ in range(ARENA_OBJECTS)][:: ARENA_OBJECTS // ARENAS]
        with contextlib.suppress(OSError):
            while True:
                self._maps.append(mmap.mmap(-1, 4096))  # shared, so that they don't merge
        for _ in range(left):
            self._maps.pop().close()

    def can_have(self, size):
        with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            return True

    def give_mappings_back(self):
        for each in self._maps:
            each.close()
        self._maps.clear()


def end_connection(connection, way):
    """In order, without reading what came, by a reset, or half first."""
    if way == 1:
        connection.setblocking(False)
        connection.close()
    elif way == 2:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    elif way == 3:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.05)
        with contextlib.suppress(OSError):
            connection.recv(100)
        connection.close()
    else:
        connection.close()


def fdopen_descriptor(fd):
    """stdio on a copy of the descriptor: the connection must go back to the kernel."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    libc.fdopen(fd, b"r+")
    return fd


def ringlet_path(fd):
    """None where ringlet is not."""
    try:
        return ctypes.CDLL(None).ringlet_path(fd)
    except AttributeError:
        return None


def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores, and programs do not
    victim = Victim()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(victim, name)(*arguments)}
        except OSError as error:
            answer = {"problem": errno.errorcode.get(error.errno, str(error))}
        except (EOFError, Torn) as problem:
            answer = {"problem": repr(problem)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
