"""The two ends of the connections of a kill test: one of them is killed, the other one tells what it saw.

    ends.py serve PROGRESS FAMILY      prints its port, then does on each connection what the connecting end asks for
    ends.py fork PROGRESS FAMILY       the same, each connection in a process of its own
    ends.py connect PROGRESS FAMILY    does what its standard input says, one connection a line: PORT ID OWN-WAY OTHER-WAY

FAMILY is tcp or unix; a Unix socket's port is the number that the kernel gives it as its abstract name.
What flows is a known pattern, so that a receiver can tell a torn byte. A sender notes in the file PROGRESS what its
calls have accepted, at its ID: memory that outlives it, to compare with what the receiver got.
"""

import json
import mmap
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time

PATTERN = random.Random(0).randbytes(65_521) * 3
PERIOD = len(PATTERN) // 3
PING_LARGEST = 8_000
WRITE_LARGEST = 60_000
READ_BYTES = 50_000
RESTING_PINGS = 20
PROGRESS_BYTES = 8

progress = None
saying = threading.Lock()


def say(**event):
    with saying:
        print(json.dumps(event), flush=True)


class Torn(Exception):
    """Bytes came that were never sent."""


class End:
    def __init__(self, connection, id):
        self._connection, self._id = connection, id
        self._random = random.Random(id)
        self._sent = 0
        self.received = 0

    def send(self, size):
        start = self._sent % PERIOD
        accepted = self._connection.send(PATTERN[start : start + size])
        self._sent += accepted
        struct.pack_into("<Q", progress, self._id * PROGRESS_BYTES, self._sent)
        return accepted

    def receive(self, size):
        """How many bytes came: none at the end of the stream."""
        data = self._connection.recv(size)
        start = self.received % PERIOD
        if data != PATTERN[start : start + len(data)]:
            place = next(place for place in range(len(data)) if data[place] != PATTERN[start + place])
            raise Torn(f"{data[place : place + 20].hex()} came at byte {self.received + place}, in a read of {len(data)}")
        self.received += len(data)
        return len(data)

    def send_all(self, size):
        while size:
            size -= self.send(size)

    def receive_all(self, size):
        while size:
            got = self.receive(size)
            if not got:
                raise EOFError
            size -= got

    # The ways to use a connection.

    def flood(self):
        while True:
            self.send(self._random.randint(1, WRITE_LARGEST))

    def sink(self):
        while self.receive(READ_BYTES):
            pass

    def slow(self):
        """Leaves the sender without room for most of the time."""
        while self.receive(READ_BYTES):
            time.sleep(self._random.uniform(0, 0.003))

    def ping(self, rounds=None):
        while rounds is None or rounds > 0:
            size = self._random.randint(1, PING_LARGEST)
            self.send_all(size)
            self.receive_all(size)
            rounds = rounds and rounds - 1

    def rest(self):
        """Shows that it lives, then waits for ever."""
        self.ping(RESTING_PINGS)
        self.receive(1)

    def greet(self):
        """Shows that it is served, and leaves."""
        self.ping(RESTING_PINGS)
        return "done"

    def steady(self):
        """Goes on for ever, but leaves the machine to others for most of the time."""
        while True:
            self.ping(RESTING_PINGS)
            time.sleep(0.01)

    def echo(self, wait=lambda: None):
        while True:
            wait()
            size = self.receive(READ_BYTES)
            if not size:
                return
            self.send_all(size)

    def echo_select(self):
        self.echo(lambda: select.select([self._connection], [], []))

    def echo_poll(self):
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        self.echo(poll.poll)

    def echo_epoll(self):
        with select.epoll() as epoll:
            epoll.register(self._connection, select.EPOLLIN)
            self.echo(epoll.poll)


def port_of(address):
    return address[1] if isinstance(address, tuple) else int(address.strip(b"\0"), 16)


def unix_socket():
    """One with a number."""
    made = socket.socket(socket.AF_UNIX)
    made.bind("")
    return made


def address():
    """Of the server."""
    return os.environ.get("SERVER_ADDRESS", "127.0.0.1")


def dial(family, port):
    if family == "tcp":
        return socket.create_connection((address(), port))
    made = unix_socket()
    made.connect(f"\0{port:05x}")
    return made


def use(connection, id, way):
    """Uses the connection until its other end is gone, and tells how that looked."""
    end = End(connection, id)
    try:
        how = getattr(end, way)() or "eof"
    except EOFError:
        how = "eof"
    except ConnectionResetError:
        how = "reset"
    except BrokenPipeError:
        how = "broken pipe"
    except Torn as what:
        how = f"torn: {what}"
    except OSError as error:
        how = str(error)
    connection.close()
    return {"id": id, "way": way, "how": how, "received": end.received}


def listen():
    if FAMILY == "tcp":
        listener = socket.create_server((address(), 0), backlog=128)
    else:
        listener = unix_socket()
        listener.listen(128)
    say(event="listening", port=port_of(listener.getsockname()))
    return listener


def do_as_asked(connection, port):
    request = bytearray()
    result = {"how": "nothing asked for"}
    try:
        while not request.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte:
                break
            request += byte
        else:
            id, way = request.decode().split()
            say(event="serving", id=int(id), pid=os.getpid())
            result = use(connection, int(id), way)
    except ConnectionResetError:
        pass
    connection.close()
    say(event="ended", port=port, **result)


def serve():
    listener = listen()
    while True:
        connection, address = listener.accept()
        port = port_of(address)
        say(event="accepted", port=port)
        threading.Thread(target=do_as_asked, args=(connection, port), daemon=True).start()


def fork():
    listener = listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, address = listener.accept()
        port = port_of(address)
        say(event="accepted", port=port)
        if os.fork() == 0:
            listener.close()
            do_as_asked(connection, port)
            os._exit(0)
        connection.close()


def connect():
    def one(port, id, way, other_way):
        try:
            connection = dial(FAMILY, port)
            connection.sendall(f"{id} {other_way}\n".encode())
        except OSError as error:
            say(event="ended", id=id, way=way, how=f"not connected: {error}", received=0)
            return
        say(event="connected", id=id)
        say(event="ended", **use(connection, id, way))

    for line in sys.stdin:
        port, id, way, other_way = line.split()
        threading.Thread(target=one, args=(int(port), int(id), way, other_way), daemon=True).start()


if __name__ == "__main__":
    with open(sys.argv[2], "r+b") as file:
        progress = mmap.mmap(file.fileno(), 0)
    FAMILY = sys.argv[3]
    {"serve": serve, "fork": fork, "connect": connect}[sys.argv[1]]()
