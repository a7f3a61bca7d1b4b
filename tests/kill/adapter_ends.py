"""The two ends of connections whose adapter is killed meanwhile, which neither is to notice.

    adapter_ends.py serve FAMILY       prints its port, then does its part of what each connection's first line says: SEED
    adapter_ends.py connect FAMILY     does what its standard input says, one connection a line: PORT SEED

What is done on a connection, and how much, both draw from its seed. Each tells when it is done, or what went wrong.
"""

import random
import select
import socket
import sys
import threading
import time

import ends

PIECE_LARGEST = 60_000
QUESTION_LARGEST = 20_000
STREAM_LARGEST = 6 << 20
REST_LONGEST_SECONDS = 0.3
END_SECONDS = 60  # which only a fault meets


class Wrong(Exception):
    pass


class Side:
    def __init__(self, connection, side, seed):
        connection.settimeout(END_SECONDS)
        self._connection = connection
        self._common = random.Random(seed)
        self._own = random.Random(f"{seed}/{side}")
        self._side, self._sent, self._received = side, 0, 0

    def _pattern(self, side, place, size):
        start = (place + side) % ends.PERIOD
        return ends.PATTERN[start : start + size]

    def _took(self, data):
        if data != self._pattern(1 - self._side, self._received, len(data)):
            raise Wrong(f"wrong bytes in {len(data)} behind {self._received}")
        self._received += len(data)

    def _send(self, size):
        while size:
            n = self._connection.send(self._pattern(self._side, self._sent, min(size, PIECE_LARGEST)))
            self._sent, size = self._sent + n, size - n

    def _receive(self, size):
        while size:
            data = self._connection.recv(min(size, PIECE_LARGEST))
            if not data:
                raise Wrong(f"an end behind {self._received}, {size} bytes too early")
            self._took(data)
            size -= len(data)

    def _receive_rest(self, whole):
        while data := self._connection.recv(PIECE_LARGEST):
            self._took(data)
        if self._received != whole:
            raise Wrong(f"an end behind {self._received} of {whole} bytes")

    def _pause(self):
        if self._own.random() < 0.1:
            time.sleep(self._own.uniform(0, 0.01))

    # The ways to use a connection. (The first draws are common.)

    def _sizes(self):
        return [int(self._common.random() ** 2 * STREAM_LARGEST) for _ in range(2)]

    def both(self):
        """Each sends and shuts down, and receives to the end."""
        sizes, failed = self._sizes(), []

        def send():
            try:
                left = sizes[self._side]
                while left:
                    n = min(left, self._own.randint(1, PIECE_LARGEST))
                    self._send(n)
                    left -= n
                    self._pause()
                self._connection.shutdown(socket.SHUT_WR)
            except (OSError, Wrong) as error:
                failed.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        self._receive_rest(sizes[1 - self._side])
        thread.join()
        if failed:
            raise failed[0]

    def both_by_epoll(self):
        """The same, in one thread that never waits but there."""
        sizes, open_ways = self._sizes(), 2
        self._connection.setblocking(False)
        with select.epoll() as epoll:
            epoll.register(self._connection, select.EPOLLIN | select.EPOLLOUT)
            shut = False
            while open_ways:
                ready = epoll.poll(END_SECONDS)
                if not ready:
                    raise Wrong(f"nothing is told behind {self._received} received, {self._sent} sent")
                events = ready[0][1]
                if events & select.EPOLLOUT and not shut:
                    left = sizes[self._side] - self._sent
                    piece = self._pattern(self._side, self._sent, min(left, self._own.randint(1, PIECE_LARGEST)))
                    try:
                        self._sent += self._connection.send(piece) if left else 0
                    except BlockingIOError:
                        pass
                    if self._sent == sizes[self._side]:
                        self._connection.shutdown(socket.SHUT_WR)
                        shut, open_ways = True, open_ways - 1
                        epoll.modify(self._connection, select.EPOLLIN)
                if events & ~select.EPOLLOUT:
                    try:
                        data = self._connection.recv(self._own.randint(1, PIECE_LARGEST))
                    except BlockingIOError:
                        continue
                    self._took(data)
                    if not data:
                        open_ways -= 1
                        epoll.modify(self._connection, 0 if shut else select.EPOLLOUT)
                        if self._received != sizes[1 - self._side]:
                            raise Wrong(f"an end behind {self._received} of {sizes[1 - self._side]} bytes")
                        if open_ways:
                            self._send_rest(sizes[self._side] - self._sent)
                            return

    def _send_rest(self, size):
        self._connection.settimeout(END_SECONDS)
        self._send(size)
        self._connection.shutdown(socket.SHUT_WR)

    def ask(self, longest_rest=0.0):
        """Questions and answers; who asks closes."""
        for _ in range(self._common.randint(1, 2_000 if not longest_rest else 6)):
            size = self._common.randint(1, QUESTION_LARGEST)
            for step in (0, 1):
                if step == self._side:
                    self._send(size)
                else:
                    self._receive(size)
            if self._side == 0 and longest_rest:
                time.sleep(self._own.uniform(0, longest_rest))
        if self._side == 1:
            self._receive_rest(self._received)

    def rest(self):
        """The same, mostly asleep."""
        self.ask(REST_LONGEST_SECONDS)

    def whole(self):
        """One question, to the end; then one answer, and a close behind it."""
        question, answer = self._sizes()
        if self._side == 0:
            self._send(question)
            self._connection.shutdown(socket.SHUT_WR)
            self._receive_rest(answer)
        else:
            self._receive_rest(question)
            self._send(answer)

    def do(self):
        way = self._common.choice(("both", "both_by_epoll", "ask", "rest", "whole"))
        try:
            getattr(self, way)()
            return way, None
        except (OSError, Wrong) as error:
            return way, f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()


def use(connection, side, seed):
    way, wrong = Side(connection, side, seed).do()
    ends.say(event="done", side=side, seed=seed, way=way, wrong=wrong)


def serve():
    listener = ends.listen()

    def one(connection):
        line = b""
        while not line.endswith(b"\n"):
            line += connection.recv(1)
        use(connection, 1, int(line))

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=one, args=(connection,), daemon=True).start()


def connect():
    def one(port, seed):
        connection = ends.dial(ends.FAMILY, port)
        connection.sendall(f"{seed}\n".encode())
        use(connection, 0, seed)

    for line in sys.stdin:
        port, seed = line.split()
        threading.Thread(target=one, args=(int(port), int(seed)), daemon=True).start()


if __name__ == "__main__":
    ends.FAMILY = sys.argv[2]
    {"serve": serve, "connect": connect}[sys.argv[1]]()
