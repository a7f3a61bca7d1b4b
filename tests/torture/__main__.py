"""TCP, Unix streams and UDP, used in every way at once: threads, forks, exec, passed and copied descriptors, signals, kills, low limits,
all ways to wait, while they move between kernel and ring at random bytes. Every byte is checked, and at the end nothing is left.

    python3 tests/torture [--seconds N] [--pairs N] [--seed N] [--mode kernel|plain|unforgiving] [--family F]... [--mirror SEED | --hosts SEED | --between memory|tcp] [--ringlet COMMAND]

What happens is drawn from the seed; `--first N` with `--pair N` repeats a round that failed.
"""

import argparse
import contextlib
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "suites"))

import between  # noqa: E402
import harness  # noqa: E402
import inside  # noqa: E402
from harness import ROOT, Failed, Process, Ringlet, require  # noqa: E402

ACTOR = str(pathlib.Path(__file__).resolve().parent / "actor.py")
KERNEL, PLAIN, UNFORGIVING = "kernel", "plain", "unforgiving"
ROUNDS = 8  # between two looks at what is held
WARM_LOOKS = 4
HELPERS = 2
FAMILIES = ["tcp", "path", "abstract", "pair", "udp"]
# Those that reach another host; a pair's ends both stay on theirs.
FAMILIES_BETWEEN = ["tcp", "pair"]
LARGE_BETWEEN = "20 24"
# Of ringlet's own, which it keeps for threads and sets to come: as many as were ever needed at once.
FOR_LATER = 6
# Python's own heap grows a little; a segment that stayed mapped, or an unread ring, would be more each time.
RESIDENT_GROWTH_KB = 12 << 10
ROUNDS_SECONDS = 300


def descriptors(pid):
    return ", ".join(sorted(f"{link.name} {link.readlink()}" for link in pathlib.Path(f"/proc/{pid}/fd").iterdir()))


class Pair:
    """A serving and a connecting process."""

    def __init__(self, name, mode, seed, first, families, directory, ringlet):
        self.name, self.next, self.looks, self.seed = name, first, [], f"{seed}/{name}"
        self.datagrams = [0, 0]  # that each end has received
        self._moves = directory / f"moves-{name}"
        self._moves.touch()

        environment = {"TORTURE_STRANGERS": "0" if mode == UNFORGIVING else "1", "TORTURE_FAMILIES": " ".join(families)}
        if ringlet and ringlet.between:
            # Of short ones most have ended before both services have brought their ends together.
            environment["TORTURE_LARGE"] = LARGE_BETWEEN

        def start(role, *words):
            argv = [sys.executable, ACTOR, *words]
            if mode != KERNEL:
                seed = random.Random(self.seed).randrange(1, 1 << 32)
                argv = ringlet.wrap(argv, self._moves, ["--unforgiving", str(seed)] if mode == UNFORGIVING else [])
            if ringlet and ringlet.between:
                argv = ringlet.between.placed(role, argv)
            return Process(argv, directory, env=environment)

        self.server = start("server", "serve", self.seed)
        self.ends = [self.server]
        port = self.server.line(harness.START_SECONDS)
        require(port, f"no server: {self.server.tail()}")
        self.client = start("client", "connect", self.seed, port)
        self.ends.append(self.client)

    def ask(self):
        for end in self.ends:
            end.write(f"{self.next} {self.next + ROUNDS}\n")
        self.next += ROUNDS

    def look(self):
        """What both hold after the rounds asked for."""
        look = []
        deadline = time.monotonic() + ROUNDS_SECONDS
        for end in self.ends:
            line = end.line(max(deadline - time.monotonic(), 1))
            what = f"pair {self.name}, rounds {self.next - ROUNDS} to {self.next - 1}, {'server' if end is self.server else 'client'}"
            if line is None:
                raise Failed(f"{what}: no answer\n" + "\n".join(end.where() for end in self.ends))
            if not line.startswith("{"):
                more = []
                for other in self.ends:
                    while told := other.line(2):
                        more.append(told)
                raise Failed("\n".join([f"{what}: {line}", *more, end.tail()]))
            told = json.loads(line)
            look.append(told["held"])
            self.datagrams[self.ends.index(end)] = told["datagrams"]
        self.looks.append(look)
        if len(self.looks) > WARM_LOOKS:
            self._nothing_more_is_held()

    def _nothing_more_is_held(self):
        warm = self.looks[:WARM_LOOKS]
        for number, (process, end) in enumerate(zip(self.ends, self.looks[-1])):
            for name, now in end.items():
                before = max(look[number][name] for look in warm)
                allowed = {"resident": before + RESIDENT_GROWTH_KB, "children": HELPERS}.get(name, before + FOR_LATER)
                what = f"pair {self.name}: {name} of end {number} were {before}, are {now} before round {self.next}"
                require(now <= allowed, f"{what}\n{descriptors(process.pid)}")

    def moved(self, ringlet):
        return ringlet.moved(self._moves, within_a_host=ringlet.between is not None) if ringlet else 0

    def stop(self):
        for end in self.ends:
            end._popen.stdin.close()
        for end in self.ends:
            status = end.wait(harness.STOP_SECONDS)
            require(status == 0, f"pair {self.name}: {harness.status_word(status)}\n{end.tail()}")

    def kill(self):
        for end in self.ends:
            end.kill()


def datagrams_by_the_kernel():
    """That programs of this network namespace have received."""
    names, values = [line.split() for line in pathlib.Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Udp:")]
    return int(values[names.index("InDatagrams")])


def names_left():
    """The rendezvous of connections that are no more; this network namespace is ours alone."""
    return [line for line in pathlib.Path("/proc/net/unix").read_text().splitlines() if "@" in line]


def torture(arguments, mode, directory, ringlet):
    numbers = [arguments.pair] if arguments.pair is not None else range(arguments.pairs)
    pairs = []
    by_the_kernel = -datagrams_by_the_kernel()
    try:
        for number in numbers:
            pairs.append(Pair(number, mode, arguments.seed, arguments.first, arguments.family, directory, ringlet))
        deadline = time.monotonic() + arguments.seconds / len(arguments.mode)
        while time.monotonic() < deadline:
            for pair in pairs:
                pair.ask()
            for pair in pairs:
                pair.look()
        for pair in pairs:
            pair.stop()
        if ringlet:
            ringlet.until_no_adapter()
        for host in ringlet.between.hosts() if ringlet and ringlet.between else [None]:
            with between.within(host.container) if host else contextlib.nullcontext():
                left = names_left()
            require(not left, f"names left: {left}")
        moved = sum(pair.moved(ringlet) for pair in pairs)
        require(moved or mode == KERNEL or arguments.family == ["udp"], "no connection used the ring")
        datagrams = sum(sum(pair.datagrams) for pair in pairs)
        by_lanes = datagrams - (by_the_kernel + datagrams_by_the_kernel())
        require(by_lanes > 0 or "udp" not in arguments.family or mode == KERNEL, f"of {datagrams} datagrams none went by a lane")
        last = [end for pair in pairs for end in pair.looks[-1]]
        held = {name: max(end[name] for end in last) for name in last[0]}
        rounds = sum(pair.next - arguments.first for pair in pairs)
        moves = f"{moved} ends of connections moved, {max(by_lanes, 0)} of {datagrams} datagrams by lanes"
        print(f"passed, {mode}: {rounds} rounds, {moves}; held at most: {held}", flush=True)
    finally:
        for pair in pairs:
            pair.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes at a time")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--mode", choices=[KERNEL, PLAIN, UNFORGIVING], action="append", help="default: the latter two, by halves")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all but udp")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--pair", type=int, help="only this one")
    harness.add_mirror(parser)
    between.add(parser)
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    arguments.mode = arguments.mode or [PLAIN, UNFORGIVING]
    # The order of datagrams does not always hold where the kernel drops some and forks share a socket (SPECIFICATION.md).
    arguments.family = arguments.family or (FAMILIES_BETWEEN if arguments.between else FAMILIES[:-1])
    if arguments.between:
        if left_out := set(arguments.family) - set(FAMILIES_BETWEEN):
            parser.error(f"not between hosts: {', '.join(sorted(left_out))}")
        between.needed(arguments)
    print(f"seed {arguments.seed}", flush=True)
    harness.adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-torture-"))
    directory.chmod(0o755)
    problem = None
    try:
        ringlet = Ringlet(arguments.ringlet, directory, arguments.mirror) if arguments.mode != [KERNEL] or arguments.between else None
        if not arguments.between:
            inside.enter()
        for mode in arguments.mode:
            place = directory / mode
            place.mkdir(mode=0o755)
            with between.Between(ringlet, arguments.between, arguments.seed).run() if arguments.between else contextlib.nullcontext():
                torture(arguments, mode, place, ringlet)
    except Failed as failure:
        problem = str(failure)
    finally:
        left = harness.end_orphans()
        shutil.rmtree(directory, ignore_errors=True)
    if problem or left:
        sys.exit(f"FAILED (seed {arguments.seed}): {problem or ''} {'left behind: ' + ', '.join(left) if left else ''}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
