"""A server and a client that wait in sets, for connections that are carried again: each byte is looked at.

serve IP level|edge [fork]   echoes; says its port. fork: a child holds all connections too, until it is killed; says its pid
ask IP PORT level|edge N     N connections, of which the last one is idle but for `idle`. Commands: idle, end"""

import os
import random
import select
import signal
import socket
import sys

PATIENCE_SECONDS = 60


def content(number, place, count):
    return bytes((number * 31 + at * 7 + (at >> 8)) & 0xFF for at in range(place, place + count))


class Waits:
    """Whoever waits by edge reads until there is nothing."""

    def __init__(self, how):
        self.edge = select.EPOLLET if how == "edge" else 0
        self.set = select.epoll()

    def add(self, held, events=select.EPOLLIN):
        held.setblocking(False)
        self.set.register(held.fileno(), events | self.edge)

    def some(self):
        found = self.set.poll(PATIENCE_SECONDS)
        if not found:
            sys.exit("no event comes")
        return found


def everything(held):
    """What is there to be read, and whether the end was."""
    got = []
    while True:
        try:
            data = held.recv(1 << 16)
        except BlockingIOError:
            return b"".join(got), False
        if not data:
            return b"".join(got), True
        got.append(data)


def send(held, data):
    while data:
        try:
            data = data[held.send(data) :]
        except BlockingIOError:
            select.select([], [held], [], PATIENCE_SECONDS)


def serve(ip, how, fork=""):
    waits = Waits(how)
    listener = socket.create_server((ip, 0), backlog=64)
    listener.setblocking(False)
    waits.set.register(listener.fileno(), select.EPOLLIN)
    print(listener.getsockname()[1], flush=True)
    held = {}
    while True:
        for fd, _ in waits.some():
            if fd == listener.fileno():
                came, _ = listener.accept()
                waits.add(came)
                held[came.fileno()] = came
                continue
            data, ended = everything(held[fd])
            if data == b"fork" and fork:
                child = os.fork()
                if child == 0:
                    signal.pause()
                print(child, flush=True)
                data = b"done"
            send(held[fd], data)
            if ended:
                held.pop(fd).close()
                if not held:
                    return


def ask(ip, port, how, count):
    draw = random.Random(int(port))
    waits = Waits(how)
    waits.set.register(0, select.EPOLLIN)
    held = [socket.create_connection((ip, int(port))) for _ in range(int(count))]
    for each in held:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        waits.add(each)
    places = [0] * len(held)
    commands = b""

    def turn(number, data=None):
        size = draw.choice([1, 40, 300, 5000, 70000])
        data = data or content(number, places[number], size)
        send(held[number], data)
        got = b""
        wanted = len(data)
        while len(got) < wanted:
            nonlocal commands
            for fd, _ in waits.some():
                if fd == 0:
                    commands += os.read(0, 100)
                elif fd == held[number].fileno():
                    more, ended = everything(held[number])
                    got += more
                    if ended:
                        sys.exit("an end that nobody made")
        answer = b"done" if data == b"fork" else data
        if got != answer:
            sys.exit(f"connection {number}: other bytes than were sent, behind {places[number]}")
        if data != b"fork":
            places[number] += wanted

    while True:
        for number in range(len(held) - 1):
            turn(number)
        if select.select([0], [], [], 0)[0]:
            commands += os.read(0, 100)
        while b"\n" in commands:
            command, _, commands = commands.partition(b"\n")
            match command:
                case b"idle":
                    for _ in range(300):
                        turn(len(held) - 1)
                    print("idle", flush=True)
                case b"fork":
                    turn(0, b"fork")
                case b"end":
                    for number in range(len(held)):
                        turn(number)
                    print("ok", flush=True)
                    return


{"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
