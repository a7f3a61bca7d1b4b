"""Kills the adapter of live connections at random moments, which neither end is to notice; or what carries them between two hosts, of either: the process that
does, or the service with it.

    python3 tests/kill/adapter.py [--kills N] [--seed N] [--first N] [--family FAMILY] [--hosts | --between memory|tcp]

Every byte arrives, every end of a stream is told behind it, and no call fails.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import between  # noqa: E402
from harness import ROOT, Failed, Ringlet, Test, adopt_orphans, end_orphans, require, wait_until  # noqa: E402

ENDS = pathlib.Path(__file__).parent / "adapter_ends.py"
END_SECONDS = 120  # for what is under way to end; a loaded machine is slow
CONNECTIONS_MOST = 5
LATEST_KILL_SECONDS = 0.4
MOVED_AT_LEAST = 1  # ends of connections that used the ring, for each kill
MOVED_BETWEEN = 0.1  # between hosts, where that takes longer than many a connection
SERVICES_KILLED = 0.25  # of kills between two hosts


class Adapter:
    def __init__(self, ringlet, number, seed, hosts):
        argv = [ringlet.command, "adapter", "--number", str(number), "--seed", str(seed), *(["--hosts"] if hosts else [])]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        require(self._process.stdout.readline() == b"ready\n", "the adapter is not ready")

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


class Carrier:
    """What carries between two hosts: of either one, or its service, which is started again."""

    def __init__(self, hosts, source):
        self._hosts = hosts
        hosts.until_carries()
        self._host = source.choice(hosts.hosts())
        self._with_service = source.random() < SERVICES_KILLED

    def kill(self):
        if self._with_service:
            self._hosts.kill_service(self._host)
        else:
            self._hosts.kill_what_carries(self._host)


class Ends:
    def __init__(self, test, verb, family, number):
        moves = str(pathlib.Path(test.directory, "moves"))
        adapter = {} if test.between else {"RINGLET_ADAPTER": str(number)}
        env = {"RINGLET_MOVES": moves, "RINGLET_MOVE_AFTER": "4", **adapter}
        argv = [sys.executable, ENDS, verb, family]
        self.process = test.start("client" if verb == "connect" else "server", argv, env=env)
        self.port, self.done = None, {}

    def look(self):
        while (line := self.process.line(0)) is not None:
            event = json.loads(line)
            if event["event"] == "listening":
                self.port = event["port"]
            else:
                self.done[event["seed"]] = event
        require(self.process.poll() is None, f"an end is gone\n{self.process.tail()}")
        return self


def kill_once(source, ringlet, number, hosts, server, client):
    if ringlet.between:
        adapter = Carrier(ringlet.between, source)
    else:
        adapter = Adapter(ringlet, number, source.choice((0, source.randrange(1, 1 << 31))), hosts)
    try:
        seeds = [source.randrange(1 << 48) for _ in range(source.randint(1, CONNECTIONS_MOST))]
        for seed in seeds:
            client.process.write(f"{server.port} {seed}\n")
        time.sleep(source.uniform(0, LATEST_KILL_SECONDS))
    finally:
        adapter.kill()
    early = sum(seed in end.look().done for seed in seeds for end in (server, client))
    for end in (server, client):
        wait_until(lambda: end.look().done.keys() >= set(seeds), END_SECONDS, "connections to be done with")
    done = [end.done.pop(seed) for seed in seeds for end in (server, client)]
    wrong = [f"side {end['side']} of a `{end['way']}`: {end['wrong']}" for end in done if end["wrong"]]
    require(not wrong, "; ".join(wrong))
    return len(done) - early


def run(test, ringlet, arguments):
    moves = pathlib.Path(test.directory, "moves")
    moves.touch()
    number = os.getpid() << 32 | 1
    server, client = (Ends(test, verb, arguments.family, number) for verb in ("serve", "connect"))
    wait_until(lambda: server.look().port, END_SECONDS, "the server to listen")
    under_way = 0
    for kill in range(arguments.first, arguments.first + arguments.kills):
        source = random.Random(f"{arguments.seed}/{kill}")
        try:
            under_way += kill_once(source, ringlet, number, arguments.hosts, server, client)
        except Failed as problem:
            where = "\n".join(f"{end.process.name}:\n{end.process.where()}" for end in (server, client))
            raise Failed(f"kill {kill}: {problem}\n{where}") from None
    moved = moves.read_bytes().count(b"\n")
    at_least = MOVED_BETWEEN if ringlet.between else MOVED_AT_LEAST
    require(moved >= at_least * arguments.kills, f"only {moved} ends of connections used the ring")
    if ringlet.between:
        ringlet.moved(moves)
    what = "what carries" if ringlet.between else "an adapter"
    print(f"passed  {arguments.kills} kills of {what}, {arguments.family}; {moved} ends had moved, {under_way} were under way")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of connections and moments")
    parser.add_argument("--first", type=int, default=0, help="number of the first kill, to repeat one that failed")
    parser.add_argument("--family", choices=("tcp", "unix"), default="tcp", help="of the connections (default: tcp)")
    parser.add_argument("--hosts", action="store_true", help="of one that keeps them in step by what carries between two hosts")
    between.add(parser)
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    if arguments.between:
        if arguments.hosts or arguments.family != "tcp":
            parser.error("between hosts: by TCP, and without --hosts")
        between.needed(arguments)
    print(f"seed {arguments.seed}", flush=True)
    adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-kill-"))
    directory.chmod(0o755)
    failed = None
    try:
        ringlet = Ringlet(arguments.ringlet, directory)
        hosts = between.Between(ringlet, arguments.between, arguments.seed).run() if arguments.between else contextlib.nullcontext()
        with hosts, contextlib.closing(Test("kill", "both", directory, ringlet, arguments.seed, print)) as test:
            run(test, ringlet, arguments)
    except Failed as problem:
        failed = f"FAILED  {problem}"
    finally:
        if left := end_orphans():
            failed = f"{failed or 'FAILED'}; processes left: {', '.join(left)}"
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
