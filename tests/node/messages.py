"""Active Messages between endpoints that are offered beyond their network namespace, and on other hosts."""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import tempfile
import time

from ground import ANSWER_SECONDS
from harness import require
from nodes import ALLOWED, Speaker, by_libfabric, carried, fabric, in_memory, process, two_hosts
from world import note, until

HERE = pathlib.Path(__file__).resolve().parent
HEADERS = HERE.parent.parent / "ringlet-native/include"
REFUSED, OTHER_KIND = "Permission denied", "Protocol wrong type for socket"
DIED = "error EUNREACHABLE"


@contextlib.contextmanager
def actor(library, source=HERE / "messages_actor.c"):
    """The program, as built."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        program = pathlib.Path(place) / source.stem
        (program.parent / "libringlet.so.0").symlink_to(library)
        words = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", source, library, f"-Wl,-rpath,{place}"]
        done = subprocess.run([*map(str, words), "-o", program], capture_output=True, text=True, timeout=120)
        require(done.returncode == 0, f"the program is not compiled: {done.stderr}")
        yield program


class Actor(Speaker):
    def __init__(self, program, host, role, name, count=300, megabytes=4, *more):
        words = [program, role, name, count, megabytes, *more]
        super().__init__([*host.before(), *words], stdin=subprocess.PIPE)

    def ends(self, *expected):
        line = self.hears(*expected)
        said = self.process.communicate(timeout=ANSWER_SECONDS)[1]
        return line, said

    def kill(self):
        self.process.kill()
        self.process.communicate()


def scenes(ground):
    library = pathlib.Path(ground.ringlet.command).resolve().parent / "libringlet_native.so"

    def scene(name, play, rails=in_memory, rules=ALLOWED):
        if os.environ.get("SCENE", "") not in name:
            return
        with ground.scene(name), actor(library) as program, rails() as said, two_hosts(ground, rules, said) as (a, b):
            for host in a, b:
                until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries: {host.service.told()}")
            play(name, program, a, b)
            a.lives()

    def nothing_is_left(*hosts):
        until(lambda: all(carried(host) == 0 for host in hosts), f"nothing to be carried any more: {[fabric(host) for host in hosts]}")

    def pair(program, a, b, *sizes, name="orders", server=(), caller=()):
        """An endpoint of b's, and who has found it from a."""
        serves = Actor(program, b, "serve", f":{name}", *sizes, *server)
        serves.hears("serving")
        calls = Actor(program, a, "call", f"b:{name}", *sizes, *caller)
        for each in calls, serves:
            each.hears("connected")
        return serves, calls

    def trade(name, program, a, b):
        """Requests and their replies both ways, awake and asleep, and megabytes in bulk."""
        for ways in (), ("sleep",):
            for one, other in (a, b), (b, a):
                here = other.name
                serves = Actor(program, other, "serve", ":orders", 300, 4, *ways)
                serves.hears("serving")
                calls = Actor(program, one, "call", f"{here}:orders", 300, 4, *ways)
                for each in calls, serves:
                    each.hears("connected")
                for each in calls, serves:
                    each.ends("all")
        nothing_is_left(a, b)
        note(name, "carried")

    def here(name, program, a, b):
        """Of one host, in two network namespaces: they share memory, and the service is out of it."""
        serves = Actor(program, b, "serve", ":orders")
        serves.hears("serving")
        calls = Actor(program, b, "call", "localhost:orders")
        for each in serves, calls:
            each.hears("connected")
        require(carried(b) == 0, "the service is in it")
        for each in serves, calls:
            each.ends("all")
        note(name, "met")

    def wrong(name, program, a, b):
        """Who does not know the tag is told so, and the endpoint is another one's to find."""
        serves = Actor(program, b, "serve", ":orders")
        serves.hears("serving")
        Actor(program, a, "call", "b:orders", 300, 4, "wrong").ends("error EBADTAG")
        calls = Actor(program, a, "call", "b:orders")
        for each in calls, serves:
            each.hears("connected")
        for each in calls, serves:
            each.ends("all")
        nothing_is_left(a, b)
        note(name, "refused")

    def refused(name, program, a, b):
        serves = Actor(program, b, "serve", ":orders")
        serves.hears("serving")
        Actor(program, a, "call", "b:orders").ends(f"error {REFUSED}")
        Actor(program, b, "serve", ":orders").ends("error Address already in use")
        Actor(program, a, "call", "c:orders").ends("error No route to host")
        serves.kill()
        nothing_is_left(a, b)
        note(name, "refused")

    def killed(name, program, a, b):
        """Its requests come back to who stays."""
        for turn in range(4):
            serves, calls = pair(program, a, b, 10_000_000, 1)
            time.sleep(0.3)
            dies, stays = (serves, calls) if turn % 2 else (calls, serves)
            dies.kill()
            stays.ends(DIED)
        nothing_is_left(a, b)
        note(name, "reset")

    def carrier_killed(name, program, a, b):
        for turn in range(2):
            serves, calls = pair(program, a, b, 10_000_000, 1)
            time.sleep(0.3)
            os.kill(process((a, b)[turn]), signal.SIGKILL)
            for each in serves, calls:
                each.ends(DIED)
            for host in a, b:
                until(lambda host=host: fabric(host)["nodes"] == 1, "a rail that carries again")
        for each in pair(program, a, b):
            each.ends("all")
        nothing_is_left(a, b)
        note(name, "reset")

    def host_killed(name, program, a, b):
        """All of a host's: the programs, the service, and what carries."""
        serves, calls = pair(program, a, b, 10_000_000, 1)
        time.sleep(0.3)
        # (At once: none of it says anything.)
        gone = [process(b), b.service.process.pid, serves.process.pid]
        for stop in signal.SIGSTOP, signal.SIGKILL:
            for pid in gone:
                os.kill(pid, stop)
        calls.ends(DIED)
        note(name, "reset")

    def slow(name, program, a, b):
        """One whose handlers take their time holds up who sends to it, and nobody else."""
        serves, calls = pair(program, a, b, 400, 1, server=["slow"])
        for each in pair(program, a, b, 400, 1, name="others"):
            each.ends("all")
        require(serves.process.poll() is None, "it was not slow")
        serves.goes_on()
        for each in calls, serves:
            each.ends("all")
        nothing_is_left(a, b)
        note(name, "carried")

    def renewed(name, program, a, b):
        """The node service is started again: what was offered is so again."""
        serves = Actor(program, b, "serve", ":orders")
        serves.hears("serving")
        b.service.stop()
        b.service.start()
        require(b.service.runs(), f"b does not start: {b.service.told()}")
        until(lambda: fabric(a)["nodes"] == 1 and fabric(b)["nodes"] == 1, "a rail that carries again")
        calls = Actor(program, a, "call", "b:orders")
        for each in calls, serves:
            each.hears("connected")
        for each in calls, serves:
            each.ends("all")
        nothing_is_left(a, b)
        note(name, "carried")

    def quick(name, program, a, b):
        """How long a round trip takes, for who wants to know."""
        for ways in ["rounds"], ["naps"]:
            serves, calls = pair(program, a, b, 2000, 0, server=ways, caller=ways)
            said = calls.ends("all")[1]
            serves.ends("all")
            require(re.fullmatch(r"[0-9.]+ us\n", said), f"it does not tell how long: {said}")
            note(f"{name}, by {ways[0]}: {said.strip()}", "carried")

    def job(name, library, a, b):
        """A program's processes are started on both hosts, as by ssh, and meet."""
        with actor(library, HERE.parent / "am" / "spawn.c") as program:
            ssh = program.parent / "ssh"
            # (From within a host: its mounts are not ours.)
            out = f"exec nsenter --mount=/proc/{os.getpid()}/ns/mnt --"
            ways = [f"{host.name}) {out} {shlex.join(map(str, host.before()))} sh -c \"$2\" ;;" for host in (a, b)]
            ways.append(f"no-node) {out} {shlex.join(map(str, b.before()))} env RINGLET_NODE=/nowhere sh -c \"$2\" ;;")
            ssh.write_text("#!/bin/sh\ncase $1 in\n" + "\n".join(ways) + "\nesac\nexit 99\n")
            ssh.chmod(0o755)

            def run(servers, word, limit=ANSWER_SECONDS):
                path = f"{pathlib.Path(ground.ringlet.command).resolve().parent}:{os.environ['PATH']}"
                more = [f"SSH_CMD={ssh}", f"AMUDP_SSH_SERVERS={servers}", f"AMUDP_MASTERIP={a.ip}", "AMUDP_TEST=a=b", f"PATH={path}"]
                command = [*a.before(), "env", *more, program, len(servers.split()), "S", word]
                done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
                return done.returncode, sorted(done.stdout.split("\n")[:-1]), done.stderr

            for servers in "a b", "b a b a":
                count = len(servers.split())
                ended = run(servers, "job")
                require(ended == (5, [f"{rank} of {count}" for rank in range(count)], ""), f"{servers}: {ended}")
            ended = run("a b", "leaves")
            require(ended[0] == 9, f"one that fails: {ended}")
            status, _, said = run("a no-node", "job")
            require(status == 3 and "there is no node service" in said, f"one that nobody can find: {status} {said}")
            ended = run("a elsewhere", "job")
            require(ended[0] == 99, f"one that can't be started: {ended}")
        nothing_is_left(a, b)
        note(name, "carried")

    def ports(name, library, a, b):
        """Endpoints known by ports, of hosts known by their addresses."""
        with actor(library, HERE.parent / "am" / "udpam.c") as program:
            ways = (a, b, 61114, 61115), (b, a, 61115, 61114)
            ends = [Speaker([*here.before(), program, there.ip, port, mine]) for here, there, port, mine in ways]
            for end in ends:
                end.hears("all")
                require(end.process.wait(ANSWER_SECONDS) == 0, f"it fails: {end.told()}")
        nothing_is_left(a, b)
        note(name, "carried")

    scene("endpoints known by ports on two hosts", lambda name, _program, a, b: ports(name, library, a, b))
    scene("a job of Active Messages on two hosts", lambda name, _program, a, b: job(name, library, a, b))
    scene("Active Messages between two hosts", trade)
    scene("Active Messages over rails in disorder that fail", trade, lambda: in_memory(ground.random.randrange(1 << 30)))
    scene("Active Messages over libfabric's tcp provider", trade, by_libfabric)
    same = '[[allow]]\nbetween = ["/ringlet-*-b", "/ringlet-*-b"]\n'
    scene("Active Messages of two network namespaces of one host", here, rules=same)
    scene("a message with the wrong tag to another host", wrong)
    scene("an endpoint whom the policy lets nobody find", refused, rules="")
    scene("an end of Active Messages on another host is killed", killed)
    scene("what carries Active Messages is killed", carrier_killed)
    scene("a host with an endpoint dies", host_killed)
    scene("an endpoint whose handlers are slow", slow)
    scene("an endpoint that is offered to a service that is started again", renewed)
    scene("a round trip of Active Messages", quick)
