"""Reflective memory of several hosts: each a network namespace with a node service, and programs that share a region and a lock."""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile

from harness import ROOT, Failed, descendants, require
from nodes import Speaker, all_joined, by_libfabric, cluster, in_memory
from world import inside, note, until

REFLECT = "\n[cluster.reflect]\nbeat_ms = 100\nsilent_ms = {silent}\n"
SILENT = 4000
# Whoever is found to have gone was heard to leave.
NOBODY_IS_SILENT = 600_000
BUSY = "-5"
KILLS = 8
MESSAGES = 3000


def built(name):
    path = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / name
    if not path.exists():
        raise Failed(f"{path} does not exist: cargo build --release --workspace --examples")
    return path


@contextlib.contextmanager
def actor():
    """The program, as built, where all can reach it."""
    program = built("examples/reflect_actor")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield shutil.copy2(program, place)


class Actor(Speaker):
    def __init__(self, program, host, role, slot, slots):
        self.host, self.slot = host, slot
        words = ["env", f"RINGLET_REFLECT={socket(host)}", *inside(host.container.name), program, role, slot, slots]
        super().__init__(words, stdin=subprocess.PIPE)

    def asked(self, word):
        """What it says to that, before it says that it is done."""
        self.tell(word)
        return self.done(word)

    def tell(self, word):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def done(self, word):
        lines = []
        while (line := self.process.stdout.readline()) and line.strip() != word:
            lines.append(line.strip())
        if not line:
            raise Failed(f"{self.host.name}: {word}: {lines[-1:]}, {self.process.wait(60)}")
        return lines

    def number(self, word):
        return [int(each) for each in self.asked(word)[-1].split()]

    def ends(self):
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        said = self.process.communicate(timeout=60)
        require(self.process.returncode == 0, f"{self.host.name}: {said}")

    def kill(self):
        self.process.kill()
        self.process.communicate()


def socket(host):
    return host.service.socket.parent / "reflect.sock"


def reflects(host):
    """What its service says of it, and the keeper."""
    told = host.service.status().get("reflect") or {}
    return told, told.get("keeper")


def view(host):
    """The hosts with which it goes on; None while it does not."""
    state = reflects(host)[1]
    seen = (state or {}).get("cluster") or {}
    return None if not seen or seen["stopped"] or not seen["is_inside"] else sorted(seen["hosts"])


def number(host):
    """Of the view with which it goes on; 0 while it does not."""
    return reflects(host)[1]["cluster"]["view"] if view(host) else 0


def stops(host):
    until(lambda: ((reflects(host)[1] or {}).get("cluster") or {}).get("stopped"), f"{host.name} to stop: {reflects(host)}")


def run(host):
    """Which one of what reflects there it is."""
    return ((reflects(host)[1] or {}).get("cluster") or {}).get("incarnation", 0)


def dies(host):
    """At once, with its service, so that nothing bids farewell."""
    pid = reflects(host)[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    host.service.stop()
    # (The service may have found that it stands still, and ended it.)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def all_in(hosts, among=None):
    names = sorted(host.name for host in hosts)
    for host in among or hosts:
        until(lambda host=host: view(host) == names, f"{host.name} to reflect with {names}: {reflects(host)}; {host.service.told()}")


@contextlib.contextmanager
def hosts_that_reflect(ground, names, rails, silent=SILENT, prepared=lambda _: None):
    with cluster(ground, names, run=False) as hosts, contextlib.ExitStack() as held:
        for host in hosts:
            held.enter_context(prepared(host) or contextlib.nullcontext())
            host.more = (rails(host) if callable(rails) else rails) + REFLECT.format(silent=silent)
            host.run(hosts, host.more)
        all_joined(hosts)
        all_in(hosts)
        yield hosts


def one_order(actors):
    """What was there at one moment, at whichever host, was there before or after whatever else was there at one."""
    seen = []
    for actor in actors:
        own = [tuple(map(int, line.split())) for line in actor.asked("show")]
        require(own, f"{actor.host.name} has seen no moment")
        require(all(sum(one) <= sum(other) for one, other in zip(own, own[1:])), f"{actor.host.name} has seen words that fell")
        seen += [(sum(words), words, actor.host.name) for words in own]
    seen.sort()
    for (_, one, here), (_, other, there) in zip(seen, seen[1:]):
        require(all(a <= b for a, b in zip(one, other)), f"{here} has seen {one}, and {there} {other}: two orders")
    return len(seen)


def scenes(ground):
    def scene(name, play, names="abc", rails=in_memory, **settings):
        if os.environ.get("SCENE", "") not in name:
            return
        with ground.scene(name), actor() as program, rails() as said, hosts_that_reflect(ground, names, said, **settings) as hosts:
            play(name, program, *hosts)
            nothing_is_left(hosts)
            for host in hosts:
                host.lives()

    def nothing_is_left(hosts):
        for host in hosts:
            until(lambda host=host: (state := reflects(host)[1]) and not (state["members"] or state["regions"] or state["sets"]),
                  f"nothing to be left at {host.name}: {reflects(host)}")

    def all_of(program, hosts, role="write", each=1):
        places = [host for host in hosts for _ in range(each)]
        actors = [Actor(program, host, role, slot, len(places)) for slot, host in enumerate(places)]
        for one in actors:
            one.hears("ready")
        return actors

    def settled(actors):
        """Nobody writes, and everybody has everything: the words of all are the same."""
        for one in actors:
            one.asked("stop")
        for one in actors:
            one.asked("settle")
        words = [tuple(one.number("words")) for one in actors]
        require(len(set(words)) == 1, f"other words at the end: {words}")
        return words[0]

    def writes(actors, rounds=300):
        """Until each has seen that all of them have written so much more."""
        for one in actors:
            one.asked("go")
        before = actors[0].number("words")
        have = lambda words: all(words[one.slot] >= before[one.slot] + rounds for one in actors)  # noqa: E731
        for one in actors:
            until(lambda one=one: have(one.number("words")), f"{one.host.name} to see all write: {before}, {one.number('words')}")

    def orders(name, program, *hosts):
        actors = all_of(program, hosts, each=2)
        for _ in range(3):
            writes(actors)
            settled(actors)
        seen = one_order(actors)
        require(seen > 100, f"no more than {seen} moments were seen")
        for one in actors:
            one.ends()
        note(name, "one order", f"{seen} moments")

    def disorder():
        return in_memory(seed=ground.seed)

    scene("writes of three hosts have one order", orders)
    scene("the same over rails in disorder, which fail", orders, rails=disorder)
    scene("the same over libfabric's tcp", orders, rails=by_libfabric)

    def counted(name, program, *hosts):
        """Each adds to one word under a lock of the cluster's: no addition is lost."""
        actors = all_of(program, hosts, "count", 2)
        for one in actors:
            one.asked("go")
        until(lambda: all(one.number("counter")[1] >= 50 for one in actors), "each to have its turns")
        for one in actors:
            one.asked("stop")
        for one in actors:
            one.asked("settle")
        all_counted = [one.number("counter") for one in actors]
        require({there for there, _ in all_counted} == {sum(own for _, own in all_counted)}, f"additions are lost: {all_counted}")
        for one in actors:
            one.ends()
        note(name, "counted", str(all_counted[0][0]))

    scene("a lock of three hosts", counted)
    scene("a lock of three hosts over rails in disorder", counted, rails=disorder)

    def programs_die(name, program, *hosts):
        """Who dies holds nothing any more, wherever it was: the others go on, in one order."""
        actors = all_of(program, hosts)
        dice = random.Random(ground.seed)
        for _ in range(KILLS):
            writes(actors, 50)
            at = dice.randrange(len(actors))
            require(actors[at].asked("lock") == ["0"], "no lock")
            actors[at].kill()
            actors[at] = Actor(program, hosts[at], "write", at, len(actors))
            actors[at].hears("ready")
            other = actors[(at + 1) % len(actors)]
            require(other.asked("lock") == ["0"] and other.asked("unlock") == ["0"], "a dead one has the lock")
        settled(actors)
        one_order(actors)
        for one in actors:
            one.ends()
        note(name, "one order", f"{KILLS} kills")

    scene("programs on three hosts are killed", programs_die)

    def goes_on_without(program, actors, hosts, at, die, back=None):
        """One host's part dies, in the middle. What it has written is a prefix; the others go on without it, and with it again."""
        for one in actors:
            one.asked("go")
        others = [one for one in actors if one.host is not hosts[at]]
        before = number(others[0].host)
        die()
        actors[at].kill()
        for one in others:
            # (Its next run may be in the first view without it.)
            until(lambda one=one: number(one.host) > before, f"{one.host.name} to be without {hosts[at].name}: {reflects(one.host)}")
        writes(others, 50)
        if back:
            back()
        comes_back(program, actors, hosts, at)

    def comes_back(program, actors, hosts, at):
        all_in(hosts)
        one_order([one for one in actors if one.host is not hosts[at]])
        actors[at] = Actor(program, hosts[at], "write", at, len(actors))
        actors[at].hears("ready")
        writes(actors, 50)
        settled(actors)
        one_order(actors)

    def reflecting_dies(name, program, *hosts):
        actors = all_of(program, hosts)
        dice = random.Random(ground.seed)
        for _ in range(KILLS):
            at = dice.randrange(len(hosts))
            pid = reflects(hosts[at])[0]["pid"]
            goes_on_without(program, actors, hosts, at, lambda pid=pid: os.kill(pid, signal.SIGKILL))
        for one in actors:
            one.ends()
        note(name, "goes on", f"{KILLS} kills")

    scene("what reflects is killed at any moment", reflecting_dies)
    scene("the same over rails in disorder", reflecting_dies, rails=disorder)

    def service_dies(name, program, *hosts):
        actors = all_of(program, hosts)
        dice = random.Random(ground.seed)
        for _ in range(KILLS // 2):
            at = dice.randrange(len(hosts))
            host = hosts[at]
            die = dice.choice([host.service.stop, lambda host=host: dies(host)])
            goes_on_without(program, actors, hosts, at, die, lambda host=host: host.run(hosts, host.more))
        for one in actors:
            one.ends()
        note(name, "goes on", f"{KILLS // 2} kills")

    scene("a node service is killed at any moment, alone or with what reflects", service_dies)

    def service_stops(name, program, *hosts):
        """As a service manager does it, which tells all of its processes; or its main one alone. The others hear a farewell."""
        actors = all_of(program, hosts)
        for at, tells_all in (2, True), (0, False), (1, True):
            service = hosts[at].service.process
            pids = [service.pid, *descendants(service.pid)] if tells_all else [service.pid]

            def stop(pids=pids, service=service):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                until(lambda: service.poll() is not None, "the service to end")

            goes_on_without(program, actors, hosts, at, stop, lambda host=hosts[at]: host.run(hosts, host.more))
        for one in actors:
            one.ends()
        note(name, "leaves", "in order")

    scene("a service is stopped where nobody is ever silent", service_stops, silent=NOBODY_IS_SILENT)

    def buried(name, program, *hosts):
        """Of two hosts the first one dies for good: the other one stops, until it is told so. Then it goes on alone; and with a next run of that one."""
        first, other = hosts
        actors = all_of(program, hosts)
        writes(actors)
        settled(actors)
        dies(first)
        actors[0].kill()
        stops(other)
        require(actors[1].asked("try") != ["0"], "it has given a lock")
        bury = ["env", f"RINGLET_REFLECT={socket(other)}", other.command, "reflect", "bury"]
        # (Root of a container that has no user namespace is none who may.)
        refused = subprocess.run(["unshare", "--pid", "--fork", *bury, first.name], capture_output=True, text=True, timeout=60)
        require(refused.returncode != 0 and "permissions" in refused.stderr, f"a container has buried a host: {refused}")
        stops(other)
        for node, is_one in ("z", False), (first.name, True):
            done = subprocess.run([*bury, node], capture_output=True, text=True, timeout=60)
            require((done.returncode == 0) == is_one, f"bury {node}: {done}")
        all_in([other])
        writes(actors[1:])
        first.run(hosts, first.more)
        comes_back(program, actors, hosts, 0)
        for one in actors:
            one.ends()
        note(name, "goes on", "alone, and with the next run")

    scene("a host is buried", buried, "ab")

    def hangs(name, program, *hosts):
        """What reflects stands still, and is declared dead, with what its programs hold. It goes on as another run only."""
        actors = all_of(program, hosts)
        *rest, still = hosts
        require(actors[-1].asked("lock") == ["0"], "no lock")
        before, pid = run(still), reflects(still)[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        all_in(rest, rest)
        require(actors[0].asked("lock") == ["0"], "one that is dead has the lock")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        until(lambda: run(still) > before, f"another run: {reflects(still)}")
        require(actors[-1].asked("try") != ["0"] and actors[-1].asked("unlock") != ["0"], "two have the lock")
        actors[-1].kill()
        all_in(hosts)
        actors[-1] = Actor(program, still, "write", len(hosts) - 1, len(hosts))
        actors[-1].hears("ready")
        require(actors[-1].asked("try") == [BUSY] and actors[0].asked("unlock") == ["0"], "the lock is nobody's")
        require(actors[-1].asked("lock") == ["0"] and actors[-1].asked("unlock") == ["0"], "no lock")
        writes(actors)
        settled(actors)
        one_order(actors)
        for one in actors:
            one.ends()
        note(name, "declared dead", "once for all")

    # (Sooner than its service finds that it hangs.)
    scene("what reflects stands still", hangs, silent=1000)

    def no_room(name, program, *hosts):
        """What a node has promised can't be kept any more: it is without, says why, once, and comes back when there is room."""
        *rest, full = hosts
        filling = full.identity / "reflect/filling"
        with filling.open("wb", buffering=0) as to, contextlib.suppress(OSError):
            while True:
                to.write(bytes(1 << 12))
        os.kill(reflects(rest[0])[0]["pid"], signal.SIGKILL)
        says = lambda: full.service.told().count("No space left on device")  # noqa: E731
        # (As it ends, and as the next one can't begin.)
        until(lambda: says() > 1, f"it to say so: {full.service.told()}")
        pid = reflects(full)[0]["pid"]
        all_in(rest, rest)
        require(reflects(full)[0]["pid"] == pid and says() == 2, f"it says so again: {full.service.told()}")
        filling.unlink()
        are_as_before(program, hosts)
        note(name, "is without", "and comes back")

    def are_as_before(program, hosts):
        all_in(hosts)
        actors = all_of(program, hosts)
        writes(actors)
        settled(actors)
        one_order(actors)
        for one in actors:
            one.ends()

    scene("a full disk under what is kept", no_room, prepared=lambda host: small_disk(host) if host.name == "c" else None)

    def damaged(name, program, *hosts):
        """What a node has promised can't be read: it says what to do, once, and waits until that is done."""
        *rest, host = hosts
        dies(host)
        kept = host.identity / "reflect/kept"
        kept.write_bytes(kept.read_bytes()[:-1])
        host.run(hosts, host.more)
        until(lambda: "ringlet reflect bury" in host.service.told(), f"it to say so: {host.service.told()}")
        pid = reflects(host)[0]["pid"]
        all_in(rest, rest)
        require(reflects(host)[0]["pid"] == pid and host.service.told().count("damaged") == 1, f"it begins again and again: {host.service.told()}")
        kept.unlink()
        are_as_before(program, hosts)
        note(name, "is said", "and mended")

    scene("what is kept is damaged", damaged)

    def parted(name, program, *hosts):
        """One of three is cut off: it stops, and says so, and the others go on; it comes back with nothing of its own."""
        actors = all_of(program, hosts)
        writes(actors)
        settled(actors)
        *rest, alone = hosts
        before = run(alone)
        cut(alone, True)
        stops(alone)
        require(actors[-1].asked("try") != ["0"], "it has given a lock")
        all_in(rest)
        writes(actors[:-1])
        cut(alone, False)
        all_in(hosts)
        require(run(alone) > before, "it is the same run")
        actors[-1].kill()
        actors[-1] = Actor(program, alone, "write", len(hosts) - 1, len(hosts))
        actors[-1].hears("ready")
        writes(actors)
        settled(actors)
        one_order(actors)
        for one in actors:
            one.ends()
        note(name, "stops", "and comes back")

    scene("one host of three is cut off", parted)
    scene("the same over libfabric's tcp", parted, rails=by_libfabric)

    def memory_channel(name, _, *hosts):
        """Programs in C, of <sys/imc.h>: messages of plain stores from one host to the other; then whom each knows, and when one has gone."""
        first, second = hosts
        with imc_actor() as start:
            for one in start(second, "read", MESSAGES), start(first, "write", MESSAGES):
                says(one, "ok")
            ends = start(first, "first", "a", "b"), start(second, "second", "b", "a")
            for one in ends:
                one.hears("ready")
            os.kill(second.service.process.pid, signal.SIGTERM)
            says(ends[0], "ok")
            ends[1].process.kill()
            ends[1].process.communicate()
            until(lambda: second.service.process.poll() is not None, "the service to end")
        second.run(hosts, second.more)
        all_in(hosts)
        note(name, "as on one host", "")

    def says(one, word):
        said = one.process.communicate(timeout=240)
        require(one.process.returncode == 0 and said[0].strip() == word, f"{one.process.args}: {said}")

    scene("the Memory Channel API on two hosts", memory_channel, "ab")

    def hands_over(name, _, *hosts):
        """What reflects on the second host is begun anew; the first one's service is stopped before that one has all that was written."""
        first, second = hosts
        with imc_actor() as start:
            fills = start(first, "fills")
            fills.hears("ready")
            before = run(second)
            os.kill(reflects(second)[0]["pid"], signal.SIGKILL)
            until(lambda: run(second) not in (0, before), "the next one")
            all_in(hosts)
            finds = start(second, "finds")
            finds.hears("ready")
            os.kill(first.service.process.pid, signal.SIGTERM)
            says(finds, "ok")
            until(lambda: first.service.process.poll() is not None, "the service to end")
            fills.process.kill()
            fills.process.communicate()
        first.run(hosts, first.more)
        all_in(hosts)
        note(name, "all is there", "")

    scene("a service hands contents over before it ends", hands_over, "ab")

    def rail_dies(name, program, *hosts):
        """No packet passes on one of two rails: what was under way there goes by the other one."""
        actors = all_of(program, hosts)
        writes(actors)
        for _ in range(2):
            for host in hosts:
                cut_rail(host, True)
            writes(actors, 500)
            until(lambda: all(one.number("rails")[0] == 1 for one in actors), "one rail to carry")
            for host in hosts:
                cut_rail(host, False)
            until(lambda: all(one.number("rails")[0] == 3 for one in actors), "both rails to carry")
        settled(actors)
        one_order(actors)
        for one in actors:
            one.ends()
        require(not any("is given up" in host.service.told() for host in hosts), "a way was given up")
        note(name, "one order", "by the other rail")

    scene("one of two rails of libfabric's tcp is cut", rail_dies, rails=two_by_libfabric)


@contextlib.contextmanager
def imc_actor():
    """What starts that program of tests/imc on a host."""
    library = built("libimc.so").parent
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        program, source = f"{place}/imc_actor", ROOT / "tests/imc/imc_actor.c"
        words = ["cc", "-std=gnu11", "-O2", f"-I{ROOT}/ringlet-imc/include", source, f"-L{library}", "-limc", "-ldl", "-o", program]
        subprocess.run(words, check=True, timeout=240)

        def start(host, *words):
            environment = [f"RINGLET_REFLECT={socket(host)}", f"LD_LIBRARY_PATH={library}"]
            return Speaker(["env", *environment, *inside(host.container.name), program, *words])

        yield start


@contextlib.contextmanager
def small_disk(host):
    """Under what it keeps."""
    place = host.identity / "reflect"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", place], check=True, timeout=60)
    try:
        yield
    finally:
        # (It is in use still.)
        subprocess.run(["umount", "--lazy", place], check=True, timeout=60)


@contextlib.contextmanager
def two_by_libfabric():
    """Two rails, of which the second one has an address of its own."""

    def rails(host):
        host.second = second(host)
        subprocess.run(inside(host.container.name, "ip", "address", "add", f"{host.second}/24", "dev", "eth0"), check=True, timeout=60)
        each = [f'{{provider = "tcp;ofi_rxm", address = "{ip}"}}' for ip in (host.ip, host.second)]
        return f"rails = [{', '.join(each)}]"

    yield rails


def second(host):
    net, number = host.ip.rsplit(".", 1)
    return f"{net}.{100 + int(number)}"


def ruled(host, rule):
    """A firewall rule of one host's; or none any more."""
    text = f"table ip cut {{\nchain in {{ type filter hook input priority 0; {rule}\n}}\nchain out {{ type filter hook output priority 0; {rule}\n}}\n}}"
    words = ["nft", text] if rule else ["nft", "delete", "table", "ip", "cut"]
    subprocess.run(inside(host.container.name, *words), check=True, timeout=60)


def cut(host, on):
    ruled(host, 'oifname "eth0" drop; iifname "eth0" drop;' if on else "")


def cut_rail(host, on):
    ruled(host, f"ip saddr {host.second} drop; ip daddr {host.second} drop;" if on else "")
