"""Kills one end of live connections at random moments, and demands of the other end what the kernel would show.

    python3 tests/kill [--kills N] [--seed N] [--first N] [--mode MODE] [--family FAMILY] [--pairs N] [--between memory|tcp]

A survivor sees the end of each connection within a bound, has lost none of the bytes that the victim's calls had
accepted, goes on serving others, and keeps nothing: no descriptor, mapping, name, memory or process.
"""

import argparse
import collections
import contextlib
import json
import mmap
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import datagrams  # noqa: E402
import ends  # noqa: E402
from harness import MODES, ROOT, Failed, Ringlet, Test, adopt_orphans, end_orphans, free_port, listening  # noqa: E402
from harness import require, wait_until  # noqa: E402
from programs.redis import Redis  # noqa: E402

import between  # noqa: E402 (behind `programs`, of which there is another one)

END_SECONDS = 60  # for a survivor to see an end; the kernel needs microseconds, a loaded machine more
LATEST_KILL_SECONDS = 0.05
WHILE_MOVING_SECONDS = 0.003
LONGER_BETWEEN = 10  # so many times: a connection between hosts is carried after a few hundredths of a second
CONNECTIONS_MOST = 4
REDIS_CONNECTIONS = 50
KILLS_PER_LEAK_CHECK = 25
WARM_UP_KILLS = 5  # of each kind one: pools are there from then on, and nothing may grow
EVENTFDS_MOST = 40  # a process keeps up to 32, for threads that sleep
RESIDENT_GROWTH_KB = 24 << 10  # Python's own heap grows a little; segments that stay mapped would be more
MOVED_BETWEEN = 0.1  # between hosts, where that takes longer than many a connection
MOVED_AT_LEAST = 0.5  # ends of connections that used the ring, for each kill: most scenarios have several
FLAGS = "/memfd:ringlet-context"  # their flags, from the first sleep on
READY = "/memfd:ringlet-ready"  # its ready boards, likewise; those of peers are mapped as long as it has their eventfds
RUNNABLE = "/proc/loadavg"  # whence it knows how many threads want to run, from the first time that it may watch
STEADY, GREETING, FIRST_ID = 0, 1, 2
# What the connecting end does, what the accepting end does.
WAYS = (
    ("ping", "echo"),
    ("ping", "echo_select"),
    ("ping", "echo_poll"),
    ("ping", "echo_epoll"),
    ("rest", "echo"),
    ("rest", "echo_epoll"),
    ("flood", "sink"),
    ("flood", "slow"),
    ("sink", "flood"),
    ("slow", "flood"),
)
# One way only: nothing is left unread at the victim, so its death must look like an orderly end, after all it has sent.
ORDERLY = {"sink", "slow"}
ABRUPT = {"eof", "reset", "broken pipe"}


def moves_of(test):
    """Where the library notes each end of a connection that uses the ring."""
    return pathlib.Path(test.directory, "moves")


class Progress:
    """What senders note of themselves; it outlives them."""

    def __init__(self, directory, count):
        self.path = pathlib.Path(directory, "progress")
        self.path.write_bytes(bytes(count * ends.PROGRESS_BYTES))
        with open(self.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def sent(self, id):
        return struct.unpack_from("<Q", self._map, id * ends.PROGRESS_BYTES)[0]


class Ends:
    """A process with one end of each of its connections."""

    def __init__(self, test, verb, progress, family):
        self._verb = verb
        argv = [sys.executable, "-I", "-S", ends.__file__, verb, progress.path, family]
        role = "client" if verb == "connect" else "server"
        self.process = test.start(role, argv, env={"RINGLET_MOVES": str(moves_of(test))})
        self.port = None
        self.accepted, self.connected = set(), set()
        self.serving = {}  # by ID: the pid
        self.ended = {}  # by the connecting end's port at a server, by ID at a client

    def look(self):
        """Takes in what it has said since; returns itself, to look further."""
        while (line := self.process.line(0)) is not None:
            event = json.loads(line)
            what = event.pop("event")
            if what == "listening":
                self.port = event["port"]
            elif what == "accepted":
                self.accepted.add(event["port"])
            elif what == "connected":
                self.connected.add(event["id"])
            elif what == "serving":
                self.serving[event["id"]] = event["pid"]
            else:
                self.ended[event["id" if self._verb == "connect" else "port"]] = event
        require(self.process.poll() is None, f"the survivor is gone\n{self.process.tail()}")
        return self

    def connect(self, port, id, way, other_way):
        self.process.write(f"{port} {id} {way} {other_way}\n")


def holdings(process):
    """What a process holds that a dead peer could have left with it."""
    held, inodes = collections.Counter(), set()
    for entry in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(FLAGS):
            continue
        target = target.removesuffix(" (deleted)")
        kind = {"anon_inode:[eventfd]": "eventfds", RUNNABLE: "counts of the runnable", READY: "ready boards"}.get(target, "descriptors")
        held[kind] += 1
        if target == READY:
            continue
        held["shared memory descriptors"] += target.startswith("/memfd:ringlet")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    held["resident"] = int(status.split("VmRSS:")[1].split()[0])
    maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
    held["mappings"] = maps.count("/memfd:ringlet") - maps.count(FLAGS) - maps.count(READY)
    held["mapped ready boards"] = maps.count(READY)
    for line in pathlib.Path(f"/proc/{process.pid}/net/unix").read_text().splitlines():
        if "ringlet" in line and line.split()[6] in inodes:
            # A thread's own bell with a name is made when a peer is met that is not in sight, as one that was killed just then, and stays.
            is_bell = "ringlet1-bell/" in line
            held["bells"] += is_bell
            held["descriptors"] -= is_bell
            held["names"] += not is_bell
    return held


def no_more(held, before):
    grown = before["resident"] + RESIDENT_GROWTH_KB
    limits = {**before, "eventfds": EVENTFDS_MOST, "bells": EVENTFDS_MOST, "counts of the runnable": 1, "resident": grown}
    limits |= {"ready boards": 1, "mapped ready boards": 1 + EVENTFDS_MOST}
    return all(count <= limits.get(what, 0) for what, count in held.items())


class KillTest:
    def __init__(self, test, seed, count, family):
        self._test, self._seed, self._family = test, seed, family
        longer = LONGER_BETWEEN if test.between else 1
        self._latest_kill, self._while_moving = LATEST_KILL_SECONDS * longer, WHILE_MOVING_SECONDS * longer
        self._progress = Progress(test.directory, FIRST_ID + (WARM_UP_KILLS + count) * CONNECTIONS_MOST)
        self._next_id = FIRST_ID
        moves_of(test).touch()
        self._server = self._start("serve")
        self._client = self._start("connect")
        self._client.connect(self._server.port, STEADY, "steady", "echo")
        wait_until(lambda: self._server.look().accepted, END_SECONDS, "the steady connection")
        with_redis = family == "tcp" and shutil.which("redis-benchmark") and shutil.which("redis-server")
        self._redis = self._start_redis() if with_redis else None
        self.counts = collections.Counter()
        self._baseline = {}

    def _start(self, verb):
        started = Ends(self._test, verb, self._progress, self._family)
        if verb != "connect":
            wait_until(lambda: started.look().port, END_SECONDS, "a server to listen")
        return started

    def _start_redis(self):
        port = free_port()
        argv = ["redis-server", "--bind", self._test.address("server"), "--protected-mode", "no", "--save", "", "--port", port]
        process = self._test.start("server", argv)
        process.port = port
        wait_until(lambda: listening(port, pid=process.pid) or process.poll() is not None, END_SECONDS, "redis-server to listen")
        require(process.poll() is None, f"redis-server did not start\n{process.tail()}")
        return process

    def kill_once(self, number):
        source = random.Random(f"{self._seed}/{number}")
        scenarios = [self._kill_client, self._kill_server] * 3 + [self._kill_forked] * 2
        if self._redis:
            scenarios += [self._kill_redis_client, self._kill_redis_server]
        scenario = source.choice(scenarios) if number >= 0 else scenarios[number]
        self.counts[scenario.__name__.removeprefix("_kill_")] += 1
        steady = self._progress.sent(STEADY)
        try:
            scenario(source)
            self._others_are_served(steady)
        except Failed as problem:
            where = "\n".join(f"{process.name}:\n{process.where()}" for process in self.survivors())
            raise Failed(f"kill {number}, {scenario.__name__[1:]}: {problem}\nThe survivors:\n{where}") from None

    # Scenarios: start a victim, let it work, kill it, look at the survivor.

    def _ask_for_connections(self, source, client, port):
        ways = {}
        for _ in range(source.randint(1, CONNECTIONS_MOST)):
            ways[self._next_id] = source.choice(WAYS)
            client.connect(port, self._next_id, *ways[self._next_id])
            self._next_id += 1
        return ways

    def _kill_at_a_moment(self, source, victim, client, ways):
        """While connections are made, while they move into shared memory, or in the midst of their work."""
        moment = source.choice(("making", "moving", "working", "working"))
        if moment == "moving":
            id = source.choice(list(ways))
            wait_until(lambda: id in client.look().connected or id in client.ended, END_SECONDS, "a connection")
        elif moment == "working":
            wait_until(lambda: client.look().connected | set(client.ended) >= set(ways), END_SECONDS, "connections")
        time.sleep(source.uniform(0, self._while_moving if moment == "moving" else self._latest_kill))
        for id in ways:
            require(id not in client.ended, f"a {ways[id][0]} ended before anybody was killed: {client.ended.get(id)}")
        os.kill(victim.process.pid, signal.SIGKILL)
        self._test.put_away(victim.process)

    def _kill_client(self, source):
        victim = self._start("connect")
        before = set(self._server.look().accepted)
        ways = self._ask_for_connections(source, victim, self._server.port)
        self._kill_at_a_moment(source, victim, victim, ways)
        # Connections are accepted in their order: when a later one of our own has been, all of the victim's have been.
        with ends.dial(self._family, self._server.port) as probe:
            mine = ends.port_of(probe.getsockname())
            wait_until(lambda: mine in self._server.look().accepted, END_SECONDS, "the server to accept")
        new = self._server.accepted - before
        self._wait_for_ends(self._server, new, "the killed client's connections at the server")
        for port in new:
            ended = self._server.ended.pop(port)
            if "id" in ended:
                self._judge(ended, f"the server's {ended['way']}")
        self._server.accepted -= new

    def _kill_server(self, source):
        victim = self._start("serve")
        ways = self._ask_for_connections(source, self._client, victim.port)
        self._kill_at_a_moment(source, victim, self._client, ways)
        self._judge_at_client(ways)

    def _kill_forked(self, source):
        """A child of several; then the parent, whose connections they are no more; then the other children."""
        victim = self._start("fork")
        ways = self._ask_for_connections(source, self._client, victim.port)
        wait_until(lambda: victim.look().serving.keys() >= ways.keys(), END_SECONDS, "children to serve")
        time.sleep(source.uniform(0, self._latest_kill))
        first, *others = source.sample(list(ways), len(ways))
        os.kill(victim.serving[first], signal.SIGKILL)
        self._judge_at_client([first])
        self._go_on(others, ways)
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.wait(END_SECONDS)
        self._go_on(others, ways)
        for id in others:
            os.kill(victim.serving[id], signal.SIGKILL)
            os.waitpid(victim.serving[id], 0)  # ours, since its parent is gone
        self._test.put_away(victim.process)
        self._judge_at_client(others)

    def _go_on(self, ids, ways):
        for id in ids:
            before = self._progress.sent(id)
            if ways[id][0] != "rest":
                wait_until(lambda: self._progress.sent(id) != before, END_SECONDS, f"a {ways[id][0]} to go on")
            require(id not in self._client.look().ended, f"a {ways[id][0]} ended though nobody killed it")

    def _judge_at_client(self, ids):
        self._wait_for_ends(self._client, ids, "the killed server's connections at the client")
        for id in ids:
            ended = self._client.ended.pop(id)
            self._judge(ended, f"the client's {ended['way']}")
        self._client.connected -= set(ids)

    def _wait_for_ends(self, survivor, wanted, what):
        wanted = set(wanted)
        wait_until(lambda: survivor.look().ended.keys() >= wanted, END_SECONDS, f"{what} to end")

    def _judge(self, ended, who):
        how, sent = ended["how"], self._progress.sent(ended["id"])
        if how.startswith("not connected"):
            return
        require(how in ABRUPT, f"{who} ended with: {how}; {sent} bytes were sent")
        if ended["way"] in ORDERLY and sent:  # or it may not have read what we asked of it
            received = ended["received"]
            require(how == "eof", f"{who} ended with: {how}, not eof (got {received} bytes of {sent})")
            require(received >= sent, f"{who} got {received} bytes of the {sent} that had been accepted")
            require(received <= sent + ends.WRITE_LARGEST, f"{who} got {received} bytes, though {sent} were sent")

    def _kill_redis_client(self, source):
        argv = ["redis-benchmark", "-h", self._test.address("server"), "-p", self._redis.port, "-c", REDIS_CONNECTIONS, "-n", "1000000000", "-t", "get,set"]
        victim = self._test.start("client", argv)
        time.sleep(source.uniform(0, 4 * LATEST_KILL_SECONDS))
        os.kill(victim.pid, signal.SIGKILL)
        self._test.put_away(victim)
        self._wait_for_clients(self._redis, lambda count: count == 1)

    def _wait_for_clients(self, server, enough):
        """Of redis-server, which counts us as well."""
        asker = Redis(server.port)
        wait_until(lambda: enough(int(asker.info("clients")["connected_clients"])), END_SECONDS, "redis-server's clients")

    def _kill_redis_server(self, source):
        victim = self._start_redis()
        argv = ["redis-benchmark", "-h", self._test.address("server"), "-p", victim.port, "-c", REDIS_CONNECTIONS, "-n", "1000000000", "-t", "get,set"]
        survivor = self._test.start("client", argv)
        # Killed before that, its server leaves redis-benchmark in an endless loop of its own, on the kernel too.
        self._wait_for_clients(victim, lambda count: count > REDIS_CONNECTIONS)
        time.sleep(source.uniform(0, 4 * LATEST_KILL_SECONDS))
        os.kill(victim.pid, signal.SIGKILL)
        self._test.put_away(victim)
        status = survivor.wait(END_SECONDS)
        where = survivor.where()
        self._test.put_away(survivor)
        require(status is not None, f"redis-benchmark did not notice that its server was killed; it waits:\n{where}")
        require(status > 0, f"redis-benchmark ended with status {status}\n{survivor.tail()}")

    # After each kill.

    def _others_are_served(self, steady):
        self._client.connect(self._server.port, GREETING, "greet", "echo")
        wait_until(lambda: GREETING in self._client.look().ended, END_SECONDS, "the server to serve another one")
        greeting = self._client.ended.pop(GREETING)
        require(greeting["how"] == "done", f"a new connection ended with: {greeting['how']}")
        wait_until(lambda: self._progress.sent(STEADY) > steady, END_SECONDS, "the steady connection to go on")
        require(STEADY not in self._client.ended, "the steady connection ended")

    def survivors(self):
        return [self._server.process, self._client.process, *([self._redis] if self._redis else [])]

    def nothing_is_kept(self):
        """Compares what the survivors hold with what they held at the first call; threads get a moment to end."""
        if self._test.between:
            # (But for the steady connection.)
            self._test.between.nothing_is_kept(1)
        for process in self.survivors():
            before = self._baseline.setdefault(process, holdings(process))
            try:
                wait_until(lambda: no_more(holdings(process), before), END_SECONDS, "a survivor to let go")
            except Failed as problem:
                held = f"{process.name} held {dict(before)}, holds {dict(holdings(process))}"
                raise Failed(f"{problem}: {held}") from None


def run(test, arguments):
    began = time.monotonic()
    if arguments.family == "udp":
        datagrams.run(test, arguments.seed, arguments.kills, holdings, no_more, require, wait_until)
        print(f"passed  {test.mode:9}{time.monotonic() - began:6.1f} s  UDP, killed: {arguments.kills}")
        return
    kill_test = KillTest(test, arguments.seed, arguments.kills, arguments.family)
    for number in (*range(-WARM_UP_KILLS, 0), *range(arguments.first, arguments.first + arguments.kills)):
        kill_test.kill_once(number)
        if number % KILLS_PER_LEAK_CHECK == KILLS_PER_LEAK_CHECK - 1:  # -1 is one of them
            kill_test.nothing_is_kept()
    kill_test.nothing_is_kept()
    for process in kill_test.survivors():
        require(process.stop(), f"a survivor did not end when asked\n{process.where()}")
    moved = test.ringlet.moved(moves_of(test)) if test.mode == "both" else 0
    if test.mode == "both":
        require(moved >= (MOVED_BETWEEN if test.between else MOVED_AT_LEAST) * arguments.kills, f"only {moved} ends of connections used the ring")
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(kill_test.counts.items()))
    print(f"passed  {test.mode:9}{time.monotonic() - began:6.1f} s  killed: {counts}; {moved} ends had moved")


def share(arguments, modes):
    """Several pairs of survivors at a time, each with its share of the kills in a process of its own; false if one failed."""
    command = [sys.executable, pathlib.Path(__file__).parent, "--ringlet", arguments.ringlet, "--family", arguments.family]
    command += [word for mode in modes for word in ("--mode", mode)]
    command += ["--between", arguments.between] if arguments.between else []
    began, pairs = time.monotonic(), []
    try:
        for number in range(arguments.pairs):
            kills = arguments.kills * (number + 1) // arguments.pairs - arguments.kills * number // arguments.pairs
            words = ["--kills", kills, "--seed", arguments.seed + number]
            pairs.append(subprocess.Popen([str(word) for word in command + words]))
        failed = [arguments.seed + number for number, pair in enumerate(pairs) if pair.wait() != 0]
    finally:
        # Each puts away what it has started.
        for pair in pairs:
            pair.terminate()
        for pair in pairs:
            pair.wait()
    seeds = f"seeds {arguments.seed} to {arguments.seed + arguments.pairs - 1}"
    told = f"failed with seeds {failed}" if failed else "nothing lost, nobody hung, nothing left behind"
    print(f"{arguments.kills} kills, {arguments.family}, {seeds}, {time.monotonic() - began:.0f} s: {told}", flush=True)
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of scenarios and moments")
    parser.add_argument("--first", type=int, default=0, help="number of the first kill, to repeat one that failed")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be given several times (default: both)")
    parser.add_argument("--family", choices=("tcp", "unix", "udp"), default="tcp", help="of the connections (default: tcp)")
    between.add(parser)
    parser.add_argument("--pairs", type=int, default=1, help="pairs of survivors at a time (default: 1)")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    modes = arguments.mode or ["both"]
    if arguments.between:
        if modes != ["both"] or arguments.family != "tcp":
            parser.error("between hosts: both ends wrapped, by TCP")
        between.needed(arguments)
    print(f"seed {arguments.seed}", flush=True)
    adopt_orphans()
    if arguments.pairs > 1:
        try:
            passed = share(arguments, modes)
        finally:
            left = end_orphans()
        sys.exit(f"processes left: {', '.join(left)}" if left else not passed)
    if not (shutil.which("redis-benchmark") and shutil.which("redis-server")) and arguments.family == "tcp":
        print("not installed: Redis, of which nobody is killed", flush=True)
    failed = False
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-kill-"))
    directory.chmod(0o755)
    try:
        ringlet = Ringlet(arguments.ringlet, directory) if modes != ["baseline"] else None
        for mode in modes:
            place = directory / mode
            place.mkdir()
            hosts = between.Between(ringlet, arguments.between, arguments.seed).run() if arguments.between else contextlib.nullcontext()
            try:
                with hosts, contextlib.closing(Test("kill", mode, place, ringlet, arguments.seed, print)) as test:
                    run(test, arguments)
            except Failed as problem:
                failed = True
                print(f"FAILED  {mode}: {problem}")
            finally:
                if left := end_orphans():
                    failed = True
                    print(f"FAILED  {mode}: processes left: {', '.join(left)}")
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
