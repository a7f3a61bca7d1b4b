"""The Memory Channel API as a program has it: <sys/imc.h> and libimc.so, installed, compiled against and loaded by name, on this host's reflective memory.

    python3 tests/imc [--ringlet PATH] [NAME...]
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from harness import ROOT, Failed, has_failed, require, status_word, wait_until

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 240
STRANGER = 65534
STEPS = []


def step(function):
    STEPS.append(function)
    return function


def user(number):
    return {"user": number, "group": number, "extra_groups": []}


class Place:
    """An installation, and the programs compiled against it; and a keeper where they look for one."""

    def __init__(self, directory):
        self.directory = directory
        directory.chmod(0o755)
        self.root = directory / "root/usr"
        self.run(["make", "-s", "-C", ROOT, "install", f"DESTDIR={directory}/root", "PREFIX=/usr"])
        self.socket = directory / "reflect.sock"
        self.environment = {**os.environ, "RINGLET_REFLECT": str(self.socket), "LD_LIBRARY_PATH": f"{self.root}/lib"}
        self.actors = {}
        for compiler, words in [("cc", ["-std=gnu11"]), ("c++", ["-x", "c++", "-fpermissive", "-w"])]:
            self.actors[compiler] = directory / f"actor-{compiler}"
            self.run([compiler, *words, "-O2", "-Wall", "-Wextra", f"-I{self.root}/include", HERE / "imc_actor.c",
                      f"-L{self.root}/lib", "-limc", "-ldl", "-o", self.actors[compiler]])

    def run(self, argv, expected=0, **options):
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=LIMIT, **options)
        require(done.returncode == expected, f"{argv}: {status_word(done.returncode)}\n{done.stdout}{done.stderr}")
        return done

    def ringlet(self, *words, **options):
        return self.run([self.root / "bin/ringlet", *words], env=self.environment, **options)

    def start(self, *words, compiler="cc", before=(), **options):
        return subprocess.Popen([*before, self.actors[compiler], *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)

    def actor(self, *words, expected=0, **options):
        self.ends(self.start(*words, **options), words, expected)

    def ends(self, actor, words, expected=0):
        try:
            said, _ = actor.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            actor.kill()
            raise Failed(f"{words} hangs: {actor.communicate()[0]}") from None
        require(actor.returncode == expected, f"{words}: {status_word(actor.returncode)}\n{said}")

    @contextlib.contextmanager
    def beside(self, word, **options):
        """One that is ready, until it is killed; then nothing is left of it."""
        actor = self.start(word, **options)
        try:
            require(actor.stdout.readline() == "ready\n", f"{word} does not start")
            yield
        finally:
            actor.kill()
            actor.wait()
        self.unused()

    def asks(self, name, text, number, expected):
        said = self.run([self.actors["cc"], "says", name, text], env=self.environment, **user(number)).stdout
        require(expected in said, f"user {number} of {name}: {said}")

    def state(self):
        return json.loads(self.ringlet("reflect", "ls", "--json").stdout)

    def unused(self):
        """Nothing is left of those who were there."""
        wait_until(lambda: not any(self.state()[each] for each in ("members", "regions", "sets")), LIMIT, f"nothing to be left: {self.state()}")

    def keep(self, megabytes=10, received=8):
        limits = ["--all", str(megabytes), "--received", str(received)]
        keeper = subprocess.Popen([self.root / "bin/ringlet", "reflect", "keep", "--path", self.socket, *limits], stdout=subprocess.PIPE, text=True)
        require(keeper.stdout.readline() == "ready\n", "the keeper does not start")
        return keeper

    @contextlib.contextmanager
    def with_room(self, megabytes):
        """For once the keeper has so much."""
        def again(**room):
            self.keeper.terminate()
            self.keeper.wait()
            self.keeper = self.keep(**room)

        again(megabytes=megabytes, received=megabytes)
        try:
            yield
        finally:
            again()


@step
def uninitialised(place):
    place.keeper.terminate()
    place.keeper.wait()
    try:
        place.actor("uninitialised")
    finally:
        place.keeper = place.keep()


@step
def regions(place):
    for compiler in place.actors:
        place.actor("regions", compiler=compiler)
        place.unused()


@step
def locks(place):
    place.actor("locks")
    place.unused()


@step
def cluster(place):
    place.actor("cluster")
    if os.geteuid() == 0:
        place.actor("cluster", **user(STRANGER))
    place.unused()


@step
def attaches(place):
    with place.with_room(600):
        place.actor("attaches")
        place.unused()


@step
def shares(place):
    """No user but root takes more than half of the space that others have left."""
    if os.geteuid() != 0:
        return
    with place.with_room(100), place.beside("half", **user(STRANGER)):
        place.actor("quarter", **user(STRANGER - 1))


@step
def forks(place):
    place.actor("forks")
    place.unused()


@step
def cancelled(place):
    place.actor("cancelled")
    place.unused()


@step
def by_name(place):
    place.actor("by_name")


@step
def messages(place):
    """A writer and a reader, the protocol of the paper, every word looked at."""
    for _ in range(3):
        reader = place.start("read")
        place.actor("write")
        place.ends(reader, ["read"])
        place.unused()


@step
def permissions(place):
    if os.geteuid() != 0:
        return "skipped: only root can become two users"
    with place.beside("owner", **user(12345)):
        place.actor("stranger", **user(STRANGER))
        shown = place.state()
        require({region["mode"] for region in shown["regions"]} == {0o600, 0o604, 0o602}, f"{shown}")
    return None


@step
def read_only_for_good(place):
    """What was given to be read is not opened anew to be written, by another user than the keeper's."""
    if os.geteuid() != 0:
        return "skipped: only root can become two users"
    with place.beside("owner", **user(12345)):
        for number in (STRANGER, 12345):
            place.actor("reopens", place.socket, **user(number))
    return None


@step
def containers(place):
    """Containers with user, pid, network and other namespaces of their own, where the keeper's root reads as nobody: their users are told from each
    other, what one writes the other reads, and what one had that was killed is given back."""
    if os.geteuid() != 0:
        return "skipped: only root can become two users"

    def container(number):
        own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--net"]
        own += ["--ipc", "--uts", "--cgroup"]
        return ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", *own]

    reader = place.start("read", before=container(12345))
    place.actor("write", before=container(12345))
    place.ends(reader, ["read"])
    place.unused()
    with place.beside("owner", before=container(12345)):
        place.actor("stranger", before=container(STRANGER))
        place.actor("reopens", place.socket, before=container(STRANGER))
        shown = place.state()
        require({region["owner"] for region in shown["regions"]} == {12345}, f"{shown}")
        require(all(member["pid"] > 0 for member in shown["members"]), f"{shown}")
    # A folder where anybody may put a socket says nothing of who listens there.
    folder = place.socket.parent
    folder.chmod(0o777)
    try:
        said = place.start("errors", before=container(12345))
        require("is -10" in said.communicate(timeout=LIMIT)[0], "it believes who listens in a folder of anybody's")
    finally:
        folder.chmod(0o755)
    return None


@step
def seen_from_outside(place):
    """Who looks sees how much is written, of what he may read."""
    if os.geteuid() != 0:
        return "skipped: only root can become two users"
    with place.beside("owner", **user(12345)):
        words = [place.root / "bin/ringlet", "reflect", "stat", "--json"]
        for number, seen in [(0, {1, 2, 3}), (12345, {1, 2, 3}), (STRANGER, {2})]:
            shown = json.loads(place.run(words, env=place.environment, **user(number)).stdout)
            require({region["key"] for region in shown["regions"] if region["written"]} == seen, f"user {number}: {shown}")
            require(shown["errors"] == [0], f"{shown}")
    with place.beside("scribble"):
        shown = json.loads(place.ringlet("reflect", "stat", "--json", "--interval", "2").stdout)
        written = {region["key"]: region["written"] for region in shown["regions"]}
        require([each["pages_per_second"] > 0 for each in written.values()] == [True], f"{shown}")
        text = place.ringlet("reflect", "stat", "--count", "2").stdout
        require(text.count("Pages/s") == 2 and text.count("errors: 0 on rail 0") == 2, text)
    return None


@step
def keeper_of_one_user(place):
    """The one that anybody can reach by its name is not for anybody."""
    if os.geteuid() != 0:
        return "skipped: only root can become two users"
    environment = {name: text for name, text in place.environment.items() if name != "RINGLET_REFLECT"}
    keeper = subprocess.Popen([place.root / "bin/ringlet", "reflect", "keep"], stdout=subprocess.PIPE, text=True, env=environment, **user(12345))
    try:
        require(keeper.stdout.readline() == "ready\n", "it does not start")
        for number, expected in [(0, '"regions"'), (12345, '"regions"'), (STRANGER, "answer: \n")]:
            place.asks("@ringlet1-service/ringlet-reflect/12345", '"State"', number, expected)
    finally:
        keeper.kill()
        keeper.wait()
    return None


@step
def users_of_a_namespace(place):
    """A keeper that can't tell users from each other, in a user namespace where one number is that of all, lets none of them in."""
    if os.geteuid() != 0:
        return "skipped: only root can become two users"
    path = place.directory / "namespace/reflect.sock"
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o777)
    keeper = subprocess.Popen(["unshare", "--user", "--map-root-user", place.root / "bin/ringlet", "reflect", "keep", "--path", path],
                              stdout=subprocess.PIPE, text=True, **user(12345))
    try:
        require(keeper.stdout.readline() == "ready\n", "it does not start")
        for number, expected in [(12345, "Welcome"), (STRANGER, "Denied")]:
            place.asks(path, '{"Hello":{"version":4}}', number, expected)
    finally:
        keeper.kill()
        keeper.wait()
    return None


@step
def behind(place):
    """What goes to the background keeps nothing of who has started it, by a path of his, without streams, and ends behind the last one."""
    folder = place.directory / "behind"
    folder.mkdir(exist_ok=True)
    environment = {**place.environment, "RINGLET_REFLECT": "./reflect.sock", "LD_PRELOAD": str(place.root / "lib/ringlet/libringlet_preload.so")}
    reads, writes = os.pipe()
    script = 'exec <&- >&- 2>&-; exec "$0" reflect keep --path ./reflect.sock --behind'
    place.run(["sh", "-c", script, place.root / "bin/ringlet"], env=environment, cwd=folder, pass_fds=[writes])
    os.close(writes)
    require(os.read(reads, 1) == b"", "it has a descriptor of who started it")
    os.close(reads)
    counts_no_errors(place, environment, folder)
    behind = pathlib.Path("/proc", str(pid_behind(folder / "reflect.sock")))
    require(b"LD_PRELOAD" not in (behind / "environ").read_bytes(), "it is wrapped as who started it")
    require(os.readlink(behind / "cwd") == "/", "it holds the folder of who started it")
    del environment["LD_PRELOAD"]
    state = json.loads(place.run([place.root / "bin/ringlet", "reflect", "ls", "--json"], env=environment, cwd=folder).stdout)
    require(not state["members"], f"{state}")

    def is_there():
        done = subprocess.run([place.root / "bin/imcs"], env=environment, cwd=folder, capture_output=True)
        return done.returncode == 0

    for out in ["99999999999999999999", "17592186044426", "0"]:
        place.run([place.root / "bin/imc_init", "-a", out], env=environment, cwd=folder, expected=2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waits:
        waits.connect(str(folder / "reflect.sock"))
    wait_until(lambda: "reflect.sock" not in listening(folder), LIMIT, "it to end")
    require(not is_there(), "it has ended")
    # `ringlet imc init` makes it where programs will look.
    place.run([place.root / "bin/imc_init"], env=environment, cwd=folder)
    made = listening(folder)
    require("reflect.sock" in made, f"{made}")
    os.kill(pid_behind(folder / "reflect.sock"), signal.SIGKILL)
    # In the foreground, where closed streams would be its memory, and `ready` an error.
    (folder / "reflect.sock").unlink()
    script = 'exec <&- >&- 2>&-; exec "$0" reflect keep --path "$1"'
    keeper = subprocess.Popen(["sh", "-c", script, place.root / "bin/ringlet", folder / "reflect.sock"], env=environment, cwd=folder)
    try:
        wait_until(lambda: "reflect.sock" in listening(folder) and is_there(), LIMIT, "it to listen")
        counts_no_errors(place, environment, folder)
    finally:
        keeper.kill()
        keeper.wait()


def counts_no_errors(place, environment, folder):
    program = subprocess.Popen([place.actors["cc"], "errors"], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    require(program.stdout.read() == "ok\n", "what the keeper says is counted as errors")
    program.wait()


def pid_behind(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
        keeper.connect(str(path))
        return struct.unpack("3i", keeper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def listening(folder):
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
    return [pathlib.Path(line.split()[-1]).name for line in lines if line.split()[-1].startswith(str(folder))]


@step
def receive_is_read_only(place):
    place.actor("store", expected=-signal.SIGSEGV)
    place.unused()


@step
def commands(place):
    text = place.run([place.root / "bin/imcs"], env=place.environment).stdout
    require("0 members" in text, text)
    said = place.run([place.root / "bin/imc_init", "-a", "10", "-r", "8"], env=place.environment).stdout
    require("initialised already" in said, said)
    said = place.run([place.root / "bin/imc_init", "-a", "11"], env=place.environment, expected=1).stderr
    require("other limits" in said, said)
    said = place.ringlet("reflect", "keep", "--path", place.socket, expected=1).stderr
    require("can't listen" in said, said)
    with tempfile.TemporaryDirectory() as other:
        environment = {**place.environment, "RINGLET_REFLECT": f"{other}/none"}
        said = place.run([place.root / "bin/imcs"], env=environment, expected=1).stderr
        require("ringlet imc init" in said, said)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ringlet", help="(what is built is installed)")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Place(pathlib.Path(directory))
        place.keeper = place.keep()
        try:
            for act in STEPS:
                if options.names and act.__name__ not in options.names:
                    continue

                def play(act=act):
                    try:
                        print(f"{act.__name__:24} {act(place) or 'ok'}", flush=True)
                    except Failed as failure:
                        print(f"failed {act.__name__}: {failure}", flush=True)
                        return True
                    return False

                failed |= has_failed(act.__name__, play)
        finally:
            place.keeper.kill()
            place.keeper.wait()
    return failed


if __name__ == "__main__":
    sys.exit(main())
