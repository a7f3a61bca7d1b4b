"""stores.py IP PORT SECONDS: values are stored in a Redis and asked for again, over some connections at once; each must be what was stored."""

import random
import socket
import sys
import threading
import time

IP, PORT, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
CONNECTIONS = 4
MOST_BYTES = 100_000
wrong = []


def command(stream, *words):
    stream.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))


def answer(lines):
    line = lines.readline().rstrip(b"\r\n")
    if line[:1] != b"$":
        return line
    value = lines.read(int(line[1:]) + 2)
    return value[:-2]


def store(number):
    draw = random.Random(number)
    stream = socket.create_connection((IP, PORT))
    lines = stream.makefile("rb")
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        key, value = b"%d/%d" % (number, draw.randrange(8)), draw.randbytes(draw.randrange(1, MOST_BYTES))
        command(stream, b"SET", key, value)
        command(stream, b"GET", key)
        if answer(lines) != b"+OK" or answer(lines) != value:
            raise AssertionError(f"{key} is not what was stored")


def main(number):
    try:
        store(number)
    except Exception as problem:
        wrong.append(f"{number}: {problem!r}")


threads = [threading.Thread(target=main, args=[number]) for number in range(CONNECTIONS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("\n".join(wrong) or 0)
