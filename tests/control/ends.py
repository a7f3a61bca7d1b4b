"""The two ends of the connections that are moved: each checks every byte that it gets.

A request is `Q`, nine digits and a filler that follows from them; its answer is the same with an `R`.
"""

import hashlib
import os
import select
import signal
import socket
import sys
import threading
import time

MESSAGE_BYTES = 64
COMPUTE_SECONDS = 1.0
HOST = os.environ.get("HOST", "127.0.0.1")


def message(kind, number):
    digits = b"%s%09d" % (kind, number)
    return digits + hashlib.shake_128(digits).hexdigest((MESSAGE_BYTES - len(digits)) // 2).encode()


def connect(port):
    if not HOST.startswith("/"):
        return socket.create_connection((HOST, int(port)))
    end = socket.socket(socket.AF_UNIX)
    end.connect(HOST)
    return end


def listen(port):
    if HOST.startswith("/"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(HOST)
        listener.listen()
        return listener
    return socket.create_server((HOST, int(port)), family=socket.AF_INET6 if ":" in HOST else socket.AF_INET)


def receive(end, count, ready=lambda: None):
    got = b""
    while len(got) < count:
        ready()
        try:
            piece = end.recv(count - len(got))
        except ConnectionResetError:  # its other end was killed
            piece = b""
        if not piece:
            break
        got += piece
    return got


def waiting(way, end):
    """What a server does before it calls recv."""
    if way == "recv":
        return lambda: None
    if way == "poll":
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return poll.poll
    if way == "epoll":
        epoll = select.epoll()
        epoll.register(end, select.EPOLLIN)
        return epoll.poll
    return lambda: select.select([end], [], [])


def serve(end, way):
    ready = waiting(way, end)
    while request := receive(end, MESSAGE_BYTES, ready):
        number = int(request[1:10])
        if request != message(b"Q", number):
            sys.exit(f"not what was sent: {request}")
        end.sendall(message(b"R", number))


def server(port, way):
    """Serves each connection in a way: recv, poll, epoll or select in threads, or fork. SIGUSR1 makes it compute for a while."""

    def compute(*_):
        until = time.monotonic() + COMPUTE_SECONDS
        while time.monotonic() < until:
            pass

    signal.signal(signal.SIGUSR1, compute)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # In the main thread, so that the signal finds it waiting.
    listener = listen(port)
    while True:
        end, _ = listener.accept()
        if way == "fork":
            if os.fork() == 0:
                serve(end, "recv")
                os._exit(0)
            end.close()
        else:
            serve(end, way)


def datagrams(port):
    """Answers datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind((HOST, int(port)))
        print("ready", flush=True)
        while True:
            request, sender = end.recvfrom(2 * MESSAGE_BYTES)
            number = int(request[1:10])
            if request != message(b"Q", number):
                sys.exit(f"not what was sent: {request}")
            end.sendto(message(b"R", number), sender)


def echo(port, kind="tcp"):
    """As a client, of a server that sends back what it gets."""
    client(port, kind, answer=b"Q")


def client(port, kind="tcp", answer=b"R"):
    """Commands: `send N` makes N round trips, `run` makes them until `stop`; both answer with the last number."""
    if kind == "udp":
        end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        end.connect((HOST, int(port)))
    else:
        end = connect(port)
    print(f"{end.getsockname()[1] if end.family != socket.AF_UNIX else 0}", flush=True)
    number = 0
    running = threading.Event()

    def trip():
        nonlocal number
        end.sendall(message(b"Q", number + 1))
        found = receive(end, MESSAGE_BYTES)
        if found != message(answer, number + 1):
            sys.exit(f"not the answer: {found}")
        number += 1

    def run():
        while running.is_set():
            trip()

    worker = None
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "send":
            for _ in range(int(arguments[0])):
                trip()
        elif command == "run":
            running.set()
            worker = threading.Thread(target=run, daemon=True)
            worker.start()
        elif command == "stop":
            running.clear()
            worker.join()
        print(number, flush=True)


def source(port, count, seed, on=""):
    """Sends `count` bytes in pieces of many sizes (`on`: and goes on until a line comes), then says their checksum."""
    end = connect(port)
    checksum, left, size = hashlib.sha256(), int(count), 1
    while left or on:
        if not left:
            if select.select([sys.stdin], [], [], 0)[0]:
                sys.stdin.readline()
                break
            left = 1_000_000
        size = (size * 48271 + int(seed)) % 131071
        piece = os.urandom(min(left, 1 + size))
        end.sendall(piece)
        checksum.update(piece)
        left -= len(piece)
    end.shutdown(socket.SHUT_WR)
    end.recv(1)
    print(checksum.hexdigest(), flush=True)
    sys.stdin.readline()


def sink(port, pause):
    """Reads all, pausing now and then so that the ring fills (`asked`: once, until a line comes), and says the checksum."""
    end, _ = listen(port).accept()
    checksum, since = hashlib.sha256(), 0
    while piece := end.recv(50_000):
        checksum.update(piece)
        since += len(piece)
        if since > 8_000_000:
            if pause == "asked":
                sys.stdin.readline()
                pause = 0
            time.sleep(float(pause))
            since = 0
    end.sendall(b".")
    print(checksum.hexdigest(), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    roles = {"server": server, "datagrams": datagrams, "client": client, "echo": echo, "source": source, "sink": sink}
    roles[sys.argv[1]](*sys.argv[2:])
