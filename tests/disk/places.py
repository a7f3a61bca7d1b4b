"""Where disks are served and used: on one host, and on two, each a network namespace with a node service."""

import contextlib
import json
import os
import pathlib
import signal
import socket as sockets
import subprocess
import types

from harness import Failed, Process, require, status_word, wait_until
from nodes import by_libfabric, in_memory
from reflect import cut, hosts_that_reflect, reflects, socket
from world import inside

LIMIT = 120  # only a fault meets it


class Side:
    """A host's programs: how one is started there, and its keeper."""

    def __init__(self, place, keeper, before=()):
        self.place, self.keeper, self.before = place, keeper, list(before)

    def argv(self, *words, user=None):
        drops = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        return [str(word) for word in (*self.before, *drops, "env", f"RINGLET_REFLECT={self.keeper}", *words)]

    def ringlet(self, *words, user=None, wrap=list):
        return self.argv(*wrap([self.place.command, *words]), user=user)

    def run(self, *words, expected=0, user=None):
        done = subprocess.run(self.ringlet(*words, user=user), capture_output=True, text=True, timeout=LIMIT, cwd=self.place.directory)
        require(done.returncode == expected, f"{words}: {status_word(done.returncode)}\n{done.stdout}{done.stderr}")
        return done.stdout if expected == 0 else done.stderr

    def start(self, *words, **how):
        return Process(self.ringlet(*words, **how), str(self.place.directory))

    def state(self):
        return json.loads(self.run("reflect", "ls", "--json"))

    def disks(self):
        return {each["name"]: each for each in json.loads(self.run("disk", "ls", "--json"))}


class Place:
    def __init__(self, name, command, directory):
        self.name, self.command, self.directory = name, command, pathlib.Path(directory)
        self._count = 0
        # What each server is told besides: where it takes connections.
        self.direct = []

    def path(self, name):
        self._count += 1
        return self.directory / f"{name}-{self._count}"

    def file(self, size, name="disk"):
        path = self.path(name)
        with open(path, "wb") as file:
            file.truncate(size)
        return path

    def is_empty(self):
        def left():
            state = self.serves.state()
            return any(state[each] for each in ("members", "regions", "sets"))
        wait_until(lambda: not left(), LIMIT, f"nothing to be left: {self.serves.state()}")


@contextlib.contextmanager
def host(command, directory, _rails):
    place = Place("host", command, directory)
    keeper = pathlib.Path(directory) / "reflect.sock"
    keepers = []

    def begin():
        process = Process([str(command), "reflect", "keep", "--path", str(keeper)], str(directory))
        keepers.append(process)
        require(process.line(LIMIT) == "ready", f"the keeper does not start: {process.tail()}")

    def end(_number):
        keepers[-1].kill()
        begin()

    begin()
    place.serves = place.uses = Side(place, keeper)
    place.end_keeper = end
    place.address = "127.0.0.1"
    try:
        yield place
    finally:
        keepers[-1].kill()


@contextlib.contextmanager
def hosts(command, directory, rails):
    place = Place("hosts", command, directory)
    ground = types.SimpleNamespace(ringlet=types.SimpleNamespace(command=command))
    with (in_memory if rails == "memory" else by_libfabric)() as said, hosts_that_reflect(ground, "ab", said) as both:
        place.hosts = both
        place.address = both[0].ip
        place.end_keeper = lambda number: os.kill(reflects(both[number])[0]["pid"], signal.SIGKILL)
        place.serves, place.uses = (Side(place, socket(each), inside(each.container.name)) for each in both)
        yield place
        for each in both:
            each.lives()


class Server:
    """`ringlet disk serve`."""

    def __init__(self, place, name, path, *words, side=None, user=None):
        self.place, self.name, self.path, self.words, self.user = place, name, path, words, user
        self.side = side or place.serves
        self.start()

    def start(self):
        direct = [] if "--direct" in self.words else self.place.direct
        self.process = self.side.start("disk", "serve", self.name, self.path, *direct, *self.words, user=self.user)
        line = self.process.line(LIMIT)
        require(line == "ready", f"{self.name} is not served: {line} {self.process.tail()}")

    def kill(self):
        self.process.kill()


class Reader:
    """`ringlet disk attach`."""

    def __init__(self, place, name, *words, side=None, **how):
        self.place, self.name, self.words, self.how = place, name, words, how
        self.side = side or place.uses
        self.socket = place.path("nbd")
        self.uri = f"nbd+unix:///?socket={self.socket}"
        self.start()

    def start(self):
        self.process = self.side.start("disk", "attach", self.name, "--socket", self.socket, *self.words, **self.how)
        wait_until(self._listens, LIMIT, f"{self.name} to be attached: {self.process.tail()}")

    def _listens(self):
        if self.process.poll() is not None:
            raise Failed(f"{self.name} is not attached: {self.process.tail()}")
        with sockets.socket(sockets.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(self.socket))
            return True
        return False

    def kill(self):
        self.process.kill()


@contextlib.contextmanager
def served(place, name, path, *words, **more):
    server = Server(place, name, path, *words, **more)
    try:
        # (It is ready where it is served. A busy machine may take its time until it is known at another host.)
        wait_until(lambda: place.uses.disks().get(name, {}).get("host"), LIMIT, f"{name} to be known where it is used")
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def attached(place, name, *words, **more):
    reader = Reader(place, name, *words, **more)
    try:
        yield reader
    finally:
        reader.kill()
