"""UDP: clients are killed while they ask a server, and the server while it is asked; the others go on and keep nothing.

    datagrams.py serve PORT     answers each request with itself; prints its port
    datagrams.py ask PORT       asks for ever, each request until it is answered; prints now and then how it goes
"""

import json
import random
import socket
import struct
import sys
import time

END_SECONDS = 60  # for a survivor to go on: the kernel needs microseconds, a loaded machine more
LATEST_KILL_SECONDS = 0.08
ANSWER_SECONDS = 0.05
ROUNDS_TO_TELL = 200
LARGEST = 9_000
IDLE_SECONDS = 3  # after which a receiver looks whether a sender lives: a second, by a clock of 3 GHz that may be slower
KILLS_PER_SERVER = 10
OWN_MAPPINGS, LANES_EACH = 1, 2


# The two ends.


def serve(port):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    print(json.dumps({"port": server.getsockname()[1]}), flush=True)
    while True:
        data, address = server.recvfrom(LARGEST)
        server.sendto(data, address)


def ask(port):
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect(("127.0.0.1", port))
    client.settimeout(ANSWER_SECONDS)
    source = random.Random(client.getsockname()[1])
    number = lost = 0
    while True:
        request = struct.pack("<I", number) + source.randbytes(source.randrange(LARGEST - 4))
        while True:
            try:
                client.send(request)
                # What answers an earlier try has an earlier number, or is the same.
                while struct.unpack_from("<I", answer := client.recv(LARGEST))[0] != number:
                    pass
                if answer != request:
                    print(json.dumps({"torn": number}), flush=True)
                break
            except ConnectionRefusedError:
                print(json.dumps({"rounds": number, "refused": 1, "lost": lost}), flush=True)
                time.sleep(0.01)
            except TimeoutError:
                lost += 1
        number += 1
        if number % ROUNDS_TO_TELL == 0:
            print(json.dumps({"rounds": number, "refused": 0, "lost": lost}), flush=True)


# The test.


class Steady:
    """A client that goes on all the time."""

    def __init__(self, test, port):
        self._process = test.start("client", [sys.executable, "-I", "-S", __file__, "ask", str(port)])
        self.refused = 0

    def _told(self, require, seconds):
        """The rounds that it tells of next, 0 for a refusal; None is nothing."""
        line = self._process.line(seconds)
        if line is None:
            require(self._process.poll() is None, f"the survivor is gone\n{self._process.tail()}")
            return None
        event = json.loads(line)
        require("torn" not in event, f"a torn answer: {event}")
        self.refused += event["refused"]
        return 0 if event["refused"] else event["rounds"]

    def is_refused(self, require, wait_until, what):
        before = self.refused
        wait_until(lambda: self._told(require, 0.05) is not None and self.refused > before, END_SECONDS, f"a refusal ({what})")

    def goes_on(self, require, wait_until, what):
        while self._told(require, 0) is not None:
            pass  # what it told before
        for _ in range(2):
            wait_until(lambda: self._told(require, 0.05), END_SECONDS, f"the survivor to go on ({what})")


def run(test, seed, kills, holdings, no_more, require, wait_until):
    source = random.Random(seed)

    def start(role, *args):
        return test.start(role, [sys.executable, "-I", "-S", __file__, *map(str, args)])

    def server_at(port):
        server = start("server", "serve", port)
        wait_until(lambda: server.line(0.05), END_SECONDS, "the server")
        return server

    server = start("server", "serve", 0)
    port = json.loads(wait_until(lambda: server.line(0.05), END_SECONDS, "the server"))["port"]
    steady = Steady(test, port)
    steady.goes_on(require, wait_until, "at first")
    if test.mode == "both":
        wait_until(lambda: holdings(server)["mappings"] > OWN_MAPPINGS, END_SECONDS, "a lane")
    before = holdings(server)
    for number in range(kills):
        victim = start("client", "ask", port)
        time.sleep(source.random() * LATEST_KILL_SECONDS)
        test.put_away(victim)
        steady.goes_on(require, wait_until, f"kill {number}")
        if number % KILLS_PER_SERVER == KILLS_PER_SERVER - 1:
            # The lanes of the dead go when their receiver finds the time; those of the survivor and of who passes by now remain.
            enough = {**before, "mappings": OWN_MAPPINGS + 2 * LANES_EACH}
            deadline = time.monotonic() + END_SECONDS
            while not no_more(holdings(server), enough):
                require(time.monotonic() < deadline, f"the server keeps {holdings(server)}, where it had {before}")
                time.sleep(IDLE_SECONDS)
                passer_by = start("client", "ask", port)
                wait_until(lambda: passer_by.line(0.05), END_SECONDS, "a passer-by to be answered")
                test.put_away(passer_by)
            test.put_away(server)
            steady.is_refused(require, wait_until, f"no server after kill {number}")
            server = server_at(port)
            steady.goes_on(require, wait_until, f"a new server after kill {number}")
            before = holdings(server)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](int(sys.argv[2]))
