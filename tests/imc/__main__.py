"""The Memory Channel API as a program has it: <sys/imc.h> and libimc.so, installed, compiled against and loaded by name, on this host's reflective memory.

    python3 tests/imc [--ringlet PATH] [NAME...]
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from harness import ROOT, Failed, require, status_word, wait_until

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

    def start(self, *words, compiler="cc", **options):
        return subprocess.Popen([self.actors[compiler], *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)

    def actor(self, *words, expected=0, **options):
        self.ends(self.start(*words, **options), words, expected)

    def ends(self, actor, words, expected=0):
        try:
            said, _ = actor.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            actor.kill()
            raise Failed(f"{words} hangs: {actor.communicate()[0]}") from None
        require(actor.returncode == expected, f"{words}: {status_word(actor.returncode)}\n{said}")

    def state(self):
        return json.loads(self.ringlet("reflect", "ls", "--json").stdout)

    def unused(self):
        """Nothing is left of those who were there."""
        wait_until(lambda: not any(self.state()[each] for each in ("members", "regions", "sets")), LIMIT, f"nothing to be left: {self.state()}")

    def keep(self):
        keeper = subprocess.Popen([self.root / "bin/ringlet", "reflect", "keep", "--path", self.socket, "--all", "10", "--received", "8"],
                                  stdout=subprocess.PIPE, text=True)
        require(keeper.stdout.readline() == "ready\n", "the keeper does not start")
        return keeper


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
    owner = place.start("owner", **user(12345))
    try:
        require(owner.stdout.readline() == "ready\n", "the owner does not start")
        place.actor("stranger", **user(STRANGER))
        shown = place.state()
        require({region["mode"] for region in shown["regions"]} == {0o600, 0o604, 0o602}, f"{shown}")
    finally:
        owner.kill()
        owner.wait()
    place.unused()
    return None


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
                try:
                    print(f"{act.__name__:24} {act(place) or 'ok'}", flush=True)
                except Failed as failure:
                    failed = 1
                    print(f"failed {act.__name__}: {failure}", flush=True)
        finally:
            place.keeper.kill()
            place.keeper.wait()
    return failed


if __name__ == "__main__":
    sys.exit(main())
