"""What the checks have in common: a network namespace of their own, two ends of a stream in it, and the tools that harm it."""

import contextlib
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import harness  # noqa: E402
from harness import Failed, Skipped, require, wait_until  # noqa: E402

END = str(pathlib.Path(__file__).resolve().parent / "end.py")
# Nothing here passes or fails by a time: this is when a hang is called one.
ANSWER_SECONDS = 90
COMMAND_SECONDS = 120


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    require(done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def can(*words):
    """Whether this machine has what the command needs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, timeout=COMMAND_SECONDS).returncode == 0
    return False


@contextlib.contextmanager
def address(ip):
    run("ip", "address", "add", f"{ip}/32", "dev", "lo")
    try:
        yield
    finally:
        can("ip", "address", "del", f"{ip}/32", "dev", "lo")


@contextlib.contextmanager
def address_gone(ip):
    run("ip", "address", "del", f"{ip}/32", "dev", "lo")
    try:
        yield
    finally:
        run("ip", "address", "add", f"{ip}/32", "dev", "lo")


@contextlib.contextmanager
def rules(name, family, hook, *each, kind="filter", priority=0):
    """What passes the hook meets these rules of the firewall."""
    chain = f"type {kind} hook {hook} priority {priority};"
    text = "\n".join([f"table {family} {name} {{", "chain each {", chain, *each, "}", "}"])
    if not can("nft", text):
        raise Skipped(f"this kernel or its nft has not all of: {chain} {each}")
    try:
        yield
    finally:
        run("nft", "delete", "table", family, name)


def dropped_by_rule(port):
    """What goes out to or from the port is dropped, as the sender is told."""
    return rules("faults", "ip", "output", f"tcp sport {port} drop", f"tcp dport {port} drop")


@contextlib.contextmanager
def queue(*words):
    if not can("tc", "qdisc", "add", "dev", "lo", "root", *words):
        raise Skipped(f"this kernel has no queue of the kind {words[0]}")
    try:
        yield
    finally:
        can("tc", "qdisc", "del", "dev", "lo", "root")


class Ends:
    """Two processes, and a stream between them."""

    def __init__(self, ground, server_ip, client_ip=None, client_user=None, before=()):
        self._listen(ground, server_ip, before)
        self.connect(server_ip, self.port, client_ip, client_user, before)

    @classmethod
    def listener(cls, ground, ip):
        """The server alone; `connect` makes the other end."""
        ends = cls.__new__(cls)
        ends._listen(ground, ip)
        return ends

    def _listen(self, ground, ip, before=()):
        self._ground = ground
        self.port = 0
        self._argv = self.argv()
        self.server = self.client = ground.start("server", [*before, *self._argv])
        self.port = int(self.ask(self.server, f"listen {ip}"))

    def argv(self):
        # Both where any user can read them.
        return ["/usr/bin/python3", "-u", shutil.copy2(END, self._ground.directory)]

    def connect(self, ip, port, source=None, user=None, before=()):
        self.client = self._ground.start("client", [*before, *self._argv], user=user)
        self.tell(self.server, "accept")
        self.ask(self.client, f"connect {ip} {port} {source or ''}")
        self.answer(self.server, "accept")

    def put_away(self):
        self._ground.put_away(self.server)

    def tell(self, end, command):
        end.write(command + "\n")

    def answer(self, end, command):
        deadline = time.monotonic() + ANSWER_SECONDS
        while (line := end.line(1)) is None and end.poll() is None and time.monotonic() < deadline:
            pass
        who = "server" if end is self.server else "client"
        if line is None:
            held = "\n".join(each.where() for each in (self.server, self.client))
            raise Failed(f"{who}, {command}: no answer; {self.told()}\n{end.tail()}\n{held}")
        require(not line.startswith("failed:"), f"{who}: {line}; {self.told()}")
        return line

    def ask(self, end, command):
        self.tell(end, command)
        return self.answer(end, command)

    def both(self, of_server, of_client):
        """Both at once; then both answers."""
        self.tell(self.server, of_server)
        self.tell(self.client, of_client)
        self.answer(self.client, of_client)
        self.answer(self.server, of_server)

    def talk(self, count=60):
        self.both(f"echo {count}", f"ask {count}")

    def trade(self, there, back):
        """Both send and receive at once; `traded` awaits it."""
        self.problem = None
        self.tell(self.server, f"trade {back} {there}")
        self.tell(self.client, f"trade {there} {back}")

    def traded(self):
        try:
            self.answer(self.client, "trade")
            self.answer(self.server, "trade")
        except Failed as problem:
            self.problem = problem

    def counts(self, end):
        by_sequence, by_transmission, waiting, arrived = map(int, self.ask(end, "counts").split())
        return by_sequence, by_transmission, waiting, arrived

    def send_in_vain(self, end, count):
        """Sends, and waits until the transmission has failed: it is counted more often than the bytes."""
        before = self.counts(end)
        self.ask(end, f"send {count}")
        self.await_failure(end, before)

    def has_failed(self, end, before):
        now = self.counts(end)
        return now[1] - before[1] > now[0] - before[0]

    def await_failure(self, end, before):
        def failed():
            return self.has_failed(end, before)

        wait_until(failed, ANSWER_SECONDS, "a transmission that fails")

    def number(self, end):
        return end.pid, int(self.ask(end, "number"))

    def asleep(self, end, looks=20):
        """Waits until its receive sleeps in the kernel, each time that it is looked at."""
        seen = 0

        def sleeps():
            nonlocal seen
            state = pathlib.Path(f"/proc/{end.pid}/stat").read_text().rpartition(")")[2].split()[0]
            seen = seen + 1 if state == "S" else 0
            return seen > looks

        wait_until(sleeps, ANSWER_SECONDS, "a receiver that sleeps")

    def overflown(self, end):
        """Waits until what it sends is on the kernel, since the ring is full."""

        def stalled():
            return any(row["pid"] == end.pid and row["reason"] == "stalled" for row in self.rows())

        wait_until(stalled, ANSWER_SECONDS, "a sender that has left a full ring")

    def finish(self, word="finish"):
        self.both(word, word)
        for end in self.server, self.client:
            end._popen.stdin.close()
            status = end.wait(ANSWER_SECONDS)
            require(status == 0, f"an end: {harness.status_word(status)}\n{end.tail()}")
            self._ground.put_away(end)

    def rows(self):
        return self._ground.ringlet.own_connections(self.port)

    def told(self):
        with contextlib.suppress(Failed, OSError, subprocess.SubprocessError):
            return "; ".join(f"{row['path']} ({row['reason']})" for row in self.rows())

    def on_ring(self):
        def moved():
            self.talk(20)
            rows = self.rows()
            return len(rows) == 2 and all(row["path"] == "ring" for row in rows)

        wait_until(moved, ANSWER_SECONDS, lambda: f"both ends on the ring; {self.told()}")

    def stays(self, reason):
        """Both ends are on the kernel, and one says why."""

        def says_why():
            self.talk()
            rows = self.rows()
            require("ring" not in [row["path"] for row in rows], f"expected on the kernel: {self.told()}")
            return reason in [row["reason"] for row in rows]

        try:
            wait_until(says_why, ANSWER_SECONDS, reason)
        except Failed as problem:
            raise Failed(f"{problem}; {self.told()}") from None
