"""Many connections between two users' processes, which share ready boards: clients that come, are killed, and come again; and one that lies there.

    python3 tests/two_users.py [--ringlet PATH] [--seed N]

Only root can become another user.
"""

import argparse
import ctypes
import os
import pathlib
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONNECTIONS = 40
ROUNDS = 4000
GENERATIONS = 12  # more than there are places for strangers' processes
SECONDS = 60
HIDDEN_SECONDS = 2
NOBODY = 65534
PR_SET_DUMPABLE = 4
BOARDS = "/memfd:ringlet-ready"
HALF_BYTES = 32 * 3 * 4096  # a board for each context of one end (ringlet/src/socket/boards.rs)


def echo():
    """A server of one thread: what comes goes back."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    print(listener.getsockname()[1], flush=True)
    waits = select.epoll()
    waits.register(listener, select.EPOLLIN)
    ends = {}
    while True:
        for number, events in waits.poll():
            if number == listener.fileno():
                end, _ = listener.accept()
                ends[end.fileno()] = end
                waits.register(end, select.EPOLLIN)
                continue
            try:
                came = ends[number].recv(4096)
                ends[number].sendall(came)
            except OSError:
                came = b""
            if not came:
                waits.unregister(number)
                ends.pop(number).close()


def asks(port, seed, rounds, lies):
    """A client that waits for its answers in a set, and asks on connections that it draws; it says how many answers it has had."""
    become_nobody()
    draw = random.Random(seed)
    ends = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    waits = select.epoll()
    for end in ends:
        waits.register(end, select.EPOLLIN)
    of = {end.fileno(): end for end in ends}
    lied = 0
    print("begins", flush=True)
    for number in range(rounds):
        asked = {end.fileno(): struct.pack("<Q", number << 8 | n) for n, end in enumerate(draw.sample(ends, draw.choice((1, 1, 2, 9))))}
        for end, word in asked.items():
            of[end].sendall(word)
        if lies and number > rounds // 2 and number % 16 == 0:
            lie(draw)
            lied += 1
        until = time.monotonic() + (HIDDEN_SECONDS if lied else SECONDS)
        while asked:
            found = waits.poll(max(0, until - time.monotonic()))
            if not found and lied:
                # (What it has said itself, it may hide.)
                break
            if not found:
                sys.exit(f"round {number}: {len(asked)} answers are not there")
            for end, _ in found:
                came = of[end].recv(4096)
                if came != asked.pop(end, None):
                    sys.exit(f"round {number}: {came!r} is no answer")
        if asked:
            break
    assert bool(lied) == lies, "it has not lied"
    print(len(boards(os.getpid())), flush=True)


def become_nobody():
    """(Here, not before: the interpreter may lie where only root may look.)"""
    # What it would load later.
    "".encode("idna")
    struct.pack("<Q", 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Who has changed its user may not open its own memory, else.
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


def boards(pid):
    """Where a process has ready boards that it shares with strangers."""
    found = re.findall(r"^(\w+)-(\w+) rw-s .*" + BOARDS, pathlib.Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    spans = [(int(begin, 16), int(end, 16)) for begin, end in found]
    return [begin for begin, end in spans if end - begin == 2 * HALF_BYTES]


def lie(draw):
    """Writes all over the server's boards: all bits, or none, or anything."""
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for begin in boards(os.getpid()):
            for page in range(0, HALF_BYTES, 4096):
                memory.seek(begin + page)
                memory.write(draw.choice((b"\xff" * 4096, bytes(4096), draw.randbytes(4096))))


class Client:
    def __init__(self, command, port, seed, rounds=ROUNDS, lies=False):
        words = ["asks", str(port), str(seed), str(rounds), "1" if lies else ""]
        self.process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "begins\n", "it does not begin"

    def ends(self, shares=True):
        said, _ = self.process.communicate(timeout=10 * SECONDS)
        assert self.process.returncode == 0, "a client ended so: " + str(self.process.returncode)
        assert not shares or int(said) > 0, "no boards are shared"


def play(ringlet, seed):
    draw = random.Random(seed)
    this = [str(ringlet), "run", "--move-after", "0", "--", sys.executable, __file__]
    with subprocess.Popen([*this, "echo"], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())

            def kept():
                """What the server has, once it has noticed that its clients have gone."""
                Client(this, port, draw.random(), 50).ends(False)
                until = time.monotonic() + SECONDS
                while True:
                    descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
                    time.sleep(0.5)
                    if descriptors == len(os.listdir(f"/proc/{server.pid}/fd")) or time.monotonic() > until:
                        return descriptors, len(boards(server.pid))

            Client(this, port, draw.random()).ends()
            print("one client: passed")
            for _ in range(GENERATIONS):
                beside = Client(this, port, draw.random())
                victim = Client(this, port, draw.random(), 10 * ROUNDS)
                time.sleep(draw.uniform(0, 0.3))
                victim.process.send_signal(signal.SIGKILL)
                victim.process.wait()
                beside.ends()
            print("clients that are killed, and others beside them: passed")
            descriptors, shared = kept()
            assert shared <= 8, f"{shared} boards"
            for _ in range(3):
                honest = Client(this, port, draw.random(), 2 * ROUNDS)
                Client(this, port, draw.random(), lies=True).ends()
                honest.ends()
            print("one that lies, and one beside it: passed")
            after = kept()
            assert after[0] <= descriptors + 2 and after[1] <= 8, f"{after} are kept, {descriptors} before"
        finally:
            server.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ringlet", type=pathlib.Path, default=ROOT / "target/release/ringlet")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("skipped: only root can become another user")
        sys.exit(77)
    print(f"seed {options.seed}", flush=True)
    play(options.ringlet, options.seed)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["echo"]:
            echo()
        case ["asks", port, seed, rounds, lies]:
            asks(int(port), float(seed), int(rounds), bool(lies))
        case _:
            main()
