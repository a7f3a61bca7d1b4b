"""Services of the native library that are offered beyond their network namespace, and on other hosts."""

import contextlib
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import time

from ground import ANSWER_SECONDS
from harness import frame, require
from hostile import NODE
from nodes import ALLOWED, Speaker, by_libfabric, carried, fabric, in_memory, process, two_hosts
from world import note, until

ACTOR = pathlib.Path(__file__).resolve().parent / "natives_actor.py"
CALL, OFFER, ASKED_BYTES = 6, 7, 96
# Messages: more than there is time for.
ENDLESS = 1 << 40
UNREACHABLE, REFUSED, DIED = "No route to host", "Permission denied", "Connection reset by peer"


class Actor(Speaker):
    def __init__(self, host, role, name, kind="messages", count=300, seed=1, *more, after=()):
        library = pathlib.Path(host.command).parent / "libringlet_native.so"
        words = [sys.executable, ACTOR, library, role, name, kind, count, seed, *more]
        super().__init__([*host.before(), *after, *words], stdin=subprocess.PIPE)

    def ends(self, *expected):
        line = self.hears(*expected)
        self.process.wait(timeout=ANSWER_SECONDS)
        return line

    def kill(self):
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def squatter(path, come, offer):
    """A process of another user's, and of no control group that the policy names, which offers first."""
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            # (The directory above it is for root.)
            os.chdir(path.parent)
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
            guest = come(path.name)
            guest.send(offer)
            os.write(said, guest.recv(1000))
            signal.pause()
        os._exit(1)
    os.close(said)
    try:
        require(len(os.read(ready, 1000)) > 0, "it does not offer")
        yield
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def scenes(ground):
    def scene(name, play, rails=in_memory, rules=ALLOWED):
        if os.environ.get("SCENE", "") not in name:
            return
        with ground.scene(name), rails() as said, two_hosts(ground, rules, said) as (a, b):
            for host in a, b:
                until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries: {host.service.told()}")
            play(name, a, b)
            a.lives()
            b.lives()

    def nothing_is_left(*hosts):
        until(lambda: all(carried(host) == 0 for host in hosts), f"nothing to be carried any more: {[fabric(host) for host in hosts]}")

    def pair(a, b, kind="messages", count=300, **more):
        """A service of b's, and who calls it from a: connected."""
        seed = ground.random.randrange(1 << 30)
        name = more.get("name", "orders")
        server = Actor(b, "serve", f":{name}", kind, count, seed, *more.get("server", ()))
        server.hears("serving")
        caller = Actor(a, "call", f"b:{name}", kind, count, seed, *more.get("caller", ()))
        for each in caller, server:
            each.hears("connected")
        return server, caller

    def trade(name, a, b):
        for kind in "bytes", "messages", "locked":
            for one, other in (a, b), (a, b):
                server, caller = pair(one, other, kind)
                for each in server, caller:
                    each.ends("all")
        nothing_is_left(a, b)
        note(name, "carried")

    def here(name, a, b):
        """Of one host, in two network namespaces: they share memory, and the service is out of it."""
        server = Actor(b, "serve", ":orders", "messages", 300, 5)
        server.hears("serving")
        caller = Actor(b, "call", "localhost:orders", "messages", 300, 5)
        for each in server, caller:
            each.hears("connected")
        require(carried(b) == 0, "the service is in it")
        for each in server, caller:
            each.ends("all")
        note(name, "met")

    def early(name, a, b):
        """Who calls waits until it is offered."""
        caller = Actor(a, "call", "b:orders", "messages", 20, 5)
        until(lambda: b.service.status()["decisions"].get("no-peer"), "a call in vain")
        server = Actor(b, "serve", ":orders", "messages", 20, 5)
        server.hears("serving")
        for each in server, caller:
            each.hears("connected")
            each.ends("all")
        note(name, "carried")

    def refused(name, a, b):
        server = Actor(b, "serve", ":orders")
        server.hears("serving")
        Actor(a, "call", "b:orders").ends(f"error {REFUSED}")
        Actor(a, "call", "c:orders").ends(f"error {UNREACHABLE}")
        Actor(a, "call", "b:orders", "messages", 1, 1, after=["setpriv", "--reuid=65534", "--clear-groups"]).ends(f"error {REFUSED}", f"error {UNREACHABLE}")
        Actor(b, "serve", ":orders").ends("error Address already in use")
        server.kill()
        nothing_is_left(a, b)
        note(name, "refused")

    def killed(name, a, b):
        """What it had sent before comes, then that it has died; in whosever turn."""
        for turn in range(8):
            kind = "messages" if turn < 6 else "locked"
            # (A locked pair's other end has the turn.)
            thinks = ("server", "caller")[turn % 2]
            server, caller = pair(a, b, kind, ENDLESS, **({thinks: ["slow"]} if kind == "locked" else {}))
            dies, stays = (server, caller) if turn % 2 else (caller, server)
            time.sleep(0.3)
            dies.kill()
            stays.ends(f"error {DIED}")
        nothing_is_left(a, b)
        note(name, "reset")

    def carrier_killed(name, a, b):
        """Both ends hear of it; the service is called again."""
        for turn in range(4):
            server, caller = pair(a, b, count=ENDLESS)
            time.sleep(0.3)
            os.kill(process("ab"[turn % 2] == "a" and a or b), signal.SIGKILL)
            for each in server, caller:
                each.ends(f"error {DIED}")
            for host in a, b:
                until(lambda host=host: fabric(host)["nodes"] == 1, "a rail that carries again")
        server, caller = pair(a, b)
        for each in server, caller:
            each.ends("all")
        nothing_is_left(a, b)
        note(name, "reset")

    def slow(name, a, b):
        """One that reads slowly holds up who sends to it, and nobody else."""
        server, caller = pair(a, b, count=400, server=["slow"])
        other, another = pair(a, b, count=400, name="others")
        for each in other, another:
            each.ends("all")
        require(server.process.poll() is None, "it was not slow")
        server.goes_on()
        for each in caller, server:
            each.ends("all")
        nothing_is_left(a, b)
        note(name, "carried")

    def late(name, a, b):
        """One that reads nothing before it has sent all sends as long as the other one reads: neither way waits for the other."""
        for kind in "messages", "bytes":
            for late in "server", "caller":
                server, caller = pair(a, b, kind, 3000, **{late: ["late"]})
                for each in server, caller:
                    each.ends("all")
        nothing_is_left(a, b)
        note(name, "carried")

    def strangers(name, a, b):
        """Of what is asked as nobody should, nothing comes; who offers under another's name gets none of his calls."""

        path = pathlib.Path(b.service.socket)

        def come(to=path):
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            guest.settimeout(ANSWER_SECONDS)
            guest.connect(str(to))
            guest.recv(1000)
            return guest

        def name_of(text):
            return text.encode().ljust(ASKED_BYTES, b"\0")

        odd = [b"", b"\0" * ASKED_BYTES, b"a\0b".ljust(ASKED_BYTES, b"\0"), b"\xff" * ASKED_BYTES, name_of("a\nb"), name_of("a")[:-1], name_of("a") + b"\0"]
        for kind in CALL, OFFER, 8, 99:
            for text in [*odd, name_of(":"), name_of("x:"), name_of("b:" + "x" * 80)]:
                with come() as guest:
                    guest.send(frame(NODE, kind, text))
        with come() as guest:
            guest.send(frame(NODE, OFFER, name_of("once")))
            guest.recv(1000)
            guest.send(frame(NODE, OFFER, name_of("twice")))
            require(guest.recv(1000) == b"", "who offers twice stays")
        with come() as guest:
            near, far = socket.socketpair()
            guest.sendmsg([frame(NODE, OFFER, name_of("x"))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", near.fileno()))])
            require(guest.recv(1000) == b"", "who offers a descriptor stays")
        with squatter(path, come, frame(NODE, OFFER, name_of("orders"))):
            for _ in range(3):
                server, caller = pair(a, b, count=20)
                for each in server, caller:
                    each.ends("all")
        nothing_is_left(a, b)
        note(name, "refused")

    scene("channels between two hosts", trade)
    scene("channels over rails in disorder that fail", trade, lambda: in_memory(ground.random.randrange(1 << 30)))
    scene("channels over libfabric's tcp provider", trade, by_libfabric)
    same = '[[allow]]\nbetween = ["/ringlet-*-b", "/ringlet-*-b"]\n'
    scene("a channel of two network namespaces of one host", here, rules=same)
    scene("a service that is called before it is offered", early)
    scene("a service whom the policy lets nobody call", refused, rules="")
    scene("an end of a channel on another host is killed", killed)
    scene("what carries channels is killed", carrier_killed)
    scene("a channel whose reader is slow", slow)
    scene("a channel one of whose ends sends all before it reads", late)
    scene("strangers offer and call", strangers)
