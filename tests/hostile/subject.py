"""A victim as seen from outside: commands, descriptors, mappings, and what `ringlet ss` says of its connections."""

import collections
import contextlib
import json
import os
import pathlib
import socket
import sys
import time

from harness import Failed, require, status_word, wait_until

HERE = pathlib.Path(__file__).resolve().parent
ANSWER_SECONDS = 120  # far beyond what anything here takes: whoever needs it hangs
LOOK_SECONDS = 0.2  # whether it lives
SETTLE_SECONDS = 60  # for what was closed to be gone
RING = 3
DEFAULT_RING_BYTES = 1 << 20


class Problem(Failed):
    """The victim's own word for what went wrong at a command."""


class Subject:
    def __init__(self, test, role="server", ring_bytes=DEFAULT_RING_BYTES, env=None, limits=None, python=sys.executable):
        argv = [python, "-I", "-S", HERE / "victim.py"]
        if limits:
            argv = [sys.executable, "-I", "-S", HERE / "confine.py", json.dumps(limits), *argv]
        environment = {"RINGLET_RING_BYTES": str(ring_bytes), "RINGLET_ENABLED": "yes", **(env or {})}
        self._test, self.ring_bytes = test, ring_bytes
        # In a pid namespace it is another process than the one that we have started.
        self._is_below = bool(limits) and ("pod" in limits or "pid_namespace" in limits)
        self.process = test.start(role, argv, env=environment)
        self.pid = self.process.pid
        self._asked = []
        self.listening = None
        self.do("ready")

    def poll(self):
        return self.process.poll()

    def close(self):
        self._test.put_away(self.process)

    # Commands.

    def ask(self, *command):
        self.process.write(json.dumps(command) + "\n")
        self._asked.append(command)

    def answered(self):
        """The answer if it is there, else None; raises the victim's problem."""
        return self._take(self.process.line(0))

    def answer(self, seconds=ANSWER_SECONDS):
        deadline = time.monotonic() + seconds
        while (line := self.process.line(LOOK_SECONDS)) is None:
            require(self.poll() is None, f"no answer to {self._asked[0]}: {self._state()}")
            if time.monotonic() > deadline:
                raise Failed(f"no answer to {self._asked[0]} within {seconds} s\n{self.process.where()}")
        return self._take(line)["value"]

    def _take(self, line):
        if line is None:
            status = self.poll()
            require(status is None, f"the victim is gone: {self._state()}")
            return None
        self._asked.pop(0)
        answer = json.loads(line)
        if "problem" in answer:
            raise Problem(answer["problem"])
        return answer

    def _state(self):
        status = self.poll()
        return "it runs" if status is None else f"{status_word(status)}\n{self.process.tail()}"

    def do(self, *command):
        self.ask(*command)
        return self.answer()

    # Connections.

    def listen(self):
        self.listening = self.do("listen")
        return self.listening

    def accept_from_us(self):
        """A connection whose accepting end is the victim's: our end of it, and the victim's number for it."""
        tcp = socket.create_connection(("127.0.0.1", self.listening or self.listen()))
        return plain(tcp), self.do("accept")

    def connect_to_us(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ask("connect", listener.getsockname()[1])
            tcp = plain(listener.accept()[0])
        return tcp, self.answer()

    # What it holds.

    def held(self):
        """What a connection that is over may leave behind."""
        found, inodes, boards = collections.Counter(), set(), 0
        for entry in pathlib.Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(entry)
                if target.startswith("/memfd:ringlet-ready"):
                    # Its own ready boards, from its first epoll set on. (Those of peers are mapped only.)
                    boards += 1
                    continue
                found[kind(target)] += 1
                inodes.add(target[8:-1])
        maps = pathlib.Path(f"/proc/{self.pid}/maps").read_text()
        found["mappings of ours"] = sum("/memfd:" in line for line in maps.splitlines()) - boards
        for line in pathlib.Path("/proc/net/unix").read_text().splitlines():
            found["names"] += "@ringlet1/" in line and line.split()[6] in inodes
        return +found

    def resident_kib(self):
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def holds_only(self, wanted, what):
        try:
            wait_until(lambda: self.held() == wanted, SETTLE_SECONDS, "the victim to let go")
        except Failed:
            more, less = self.held() - wanted, wanted - self.held()
            raise Failed(f"{what}: the victim holds {dict(more)} too much, {dict(less)} too little") from None

    def segments_kib(self):
        """Memory of its connections' segments, by what of them is its share."""
        held, ours = 0, False
        for line in pathlib.Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            name = line.split(maxsplit=1)[0]
            if not name.endswith(":"):
                ours = "/memfd:ringlet-segment" in line
            elif ours and name == "Pss:":
                held += int(line.split()[1])
        return held

    # What is said of it.

    def reason(self, local_port, peer_port):
        """(path, reason code) of one connection, as `ringlet ss` prints them."""
        for row in self._test.ringlet.connections(local_port):
            ends = (row["local"] or {}).get("port"), (row["peer"] or {}).get("port")
            if (row["pid"] == self.pid or self._is_below) and ends == (local_port, peer_port):
                return row["path"], row["reason"]
        return None, None


def kind(target):
    """What a descriptor is, without the number that tells it from others of its kind."""
    return "socket" if target.startswith("socket:") else "pipe" if target.startswith("pipe:") else target


def plain(tcp):
    """Our own waits are bounded, too."""
    tcp.settimeout(ANSWER_SECONDS)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return tcp


class Pair:
    """Two victims with a connection between them on which bytes can be sent either way."""

    def __init__(self, accepting, connecting):
        self.accepting, self.connecting = accepting, connecting
        port = accepting.listening or accepting.listen()
        self.connecting_number = connecting.do("connect", port)
        self.accepting_number = accepting.do("accept")
        self.connecting_descriptor = connecting.do("descriptor", self.connecting_number)
        self.acceptor = ("127.0.0.1", port)
        self.connector = ("127.0.0.1", connecting.do("port", self.connecting_number))

    def exchange(self, size=100, times=1):
        self.accepting.ask("echo", self.accepting_number, size, times)
        self.connecting.do("trips", self.connecting_number, size, times)
        self.accepting.answer()

    def ends(self):
        return (self.accepting, self.accepting_number), (self.connecting, self.connecting_number)

    def paths(self):
        return (
            self.accepting.do("path", self.accepting_number),
            self.connecting.do("path", self.connecting_number),
        )

    def reasons(self):
        acceptor, connector = self.acceptor[1], self.connector[1]
        return self.accepting.reason(acceptor, connector), self.connecting.reason(connector, acceptor)

    def close(self):
        self.connecting.do("close", self.connecting_number)
        self.accepting.do("close", self.accepting_number)


class Steady:
    """The connection of a victim that nothing may harm: with another, well-behaved process, and on the ring."""

    def __init__(self, test, subject):
        self._subject, self.partner = subject, Subject(test, "client", subject.ring_bytes)
        port = self.partner.listen()
        self.partner.ask("steady_accept")
        subject.do("steady_connect", port)
        self.partner.answer()
        wait_until(lambda: self._state(subject)["path"] == RING, SETTLE_SECONDS, "the steady connection on the ring")

    def _state(self, subject):
        state = subject.do("steady")
        require(state["problem"] is None, f"the steady connection was harmed: {state['problem']}")
        return state

    def goes_on(self):
        before = self._state(self._subject)["rounds"]
        wait_until(
            lambda: self._state(self._subject)["rounds"] > before + 1, SETTLE_SECONDS, "the steady connection to go on"
        )
        for each in (self._subject, self.partner):
            require(self._state(each)["path"] == RING, "the steady connection has left the ring")
