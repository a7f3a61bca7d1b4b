"""One end of a channel of the native library's: both ends send so many messages of random lengths, each checks what comes.

    natives_actor.py LIBRARY serve|call NAME KIND COUNT SEED [slow|late]

One that is late reads nothing before it has sent all. A line is written when the service is there, when a connection is, and at the end, with how it ended. A server serves one connection.
"""

import ctypes
import os
import random
import sys
import threading
import time

KINDS = {"bytes": 1, "messages": 2, "locked": 3}
LONGEST = 60_000
WAIT_MS = 60_000


class Options(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint), ("peers", ctypes.c_uint), ("slots", ctypes.c_size_t), ("ring", ctypes.c_size_t), ("spin", ctypes.c_int)]


def say(*words):
    print(*words, flush=True)


def load(path):
    library = ctypes.CDLL(path, use_errno=True)
    for name, result, arguments in [
        ("listen", ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p]),
        ("accept", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
        ("connect", ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]),
        ("send", ctypes.c_ssize_t, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]),
        ("receive", ctypes.c_ssize_t, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]),
        ("finish", ctypes.c_int, [ctypes.c_void_p]),
        ("close", None, [ctypes.c_void_p]),
    ]:
        function = getattr(library, "ringlet_" + name)
        function.restype, function.argtypes = result, arguments
    return library


class Over(Exception):
    """By this error."""


class Channel:
    def __init__(self, calls, handle):
        if not handle:
            raise Over(ctypes.get_errno())
        self.calls, self.handle = calls, handle
        self.buffer = ctypes.create_string_buffer(1 << 18)

    def send(self, data):
        sent = self.calls.ringlet_send(self.handle, data, len(data), WAIT_MS)
        if sent < 0:
            raise Over(ctypes.get_errno())
        return sent

    def receive(self):
        got = self.calls.ringlet_receive(self.handle, self.buffer, len(self.buffer), WAIT_MS)
        if got < 0:
            raise Over(ctypes.get_errno())
        return self.buffer.raw[:got]


def messages(seed, count):
    chance = random.Random(seed)
    for _ in range(count):
        length = chance.choice([0, 1, 8, 56, 57, 900, 1014, 1015, 5000, chance.randrange(LONGEST)])
        yield chance.randbytes(max(length, 1))


def send_all(channel, kind, seed, count):
    for message in messages(seed, count):
        while message:
            sent = channel.send(message)
            message = message[sent:] if kind == "bytes" else b""


def receive_all(channel, kind, seed, count, slow):
    """How many came as they were sent."""
    rest, good = b"", 0
    for message in messages(seed, count):
        if slow:
            time.sleep(0.01)
            # (And then for as long as its parent likes.)
            if good == 10:
                sys.stdin.readline()
        if kind == "bytes":
            while len(rest) < len(message):
                rest += channel.receive()
            come, rest = rest[: len(message)], rest[len(message) :]
        else:
            come = channel.receive()
        if come != message:
            sys.exit(f"message {good} of {len(message)} bytes came as {len(come)}")
        good += 1
    return good


def main(path, role, name, kind, count, seed, reads=None):
    count, seed = int(count), int(seed)
    library = load(path)
    options = Options(kind=KINDS[kind], spin=-1)
    try:
        if role == "serve":
            listener = library.ringlet_listen(name.encode(), ctypes.byref(options))
            if not listener:
                raise Over(ctypes.get_errno())
            say("serving")
            channel = Channel(library, library.ringlet_accept(listener, WAIT_MS))
        else:
            channel = Channel(library, library.ringlet_connect(name.encode(), ctypes.byref(options), WAIT_MS))
    except Over as over:
        return say("error", os.strerror(over.args[0]))
    say("connected")
    ours, theirs = (seed, seed + 1) if role == "serve" else (seed + 1, seed)
    try:
        if kind == "locked":
            for question, answer in zip(messages(seed, count), messages(seed + 1, count)):
                for turn in (0, 1) if role == "call" else (1, 0):
                    if turn == 0:
                        time.sleep(1 if reads == "slow" else 0)
                        channel.send(question if role == "call" else answer)
                    elif channel.receive() != (answer if role == "call" else question):
                        sys.exit("another message came")
        else:
            problem = []

            def send():
                try:
                    send_all(channel, kind, ours, count)
                    library.ringlet_finish(channel.handle)
                except Over as over:
                    problem.append(over)

            sender = threading.Thread(target=send)
            sender.start()
            if reads == "late":
                sender.join()
            try:
                receive_all(channel, kind, theirs, count, reads == "slow")
            finally:
                sender.join()
            if problem:
                raise problem[0]
            try:
                channel.receive()
                sys.exit("more came than was sent")
            except Over as over:
                if os.strerror(over.args[0]) != "Broken pipe":
                    raise
        say("all")
    except Over as over:
        say("error", os.strerror(over.args[0]))
    library.ringlet_close(channel.handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
