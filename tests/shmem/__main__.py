"""OpenSHMEM programs in C on reflective memory, compiled by oshcc against what is installed, and started by oshrun or `ringlet shmem`.

    python3 tests/shmem [--ringlet PATH] [--deaths N] [NAME...]
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import ROOT, Failed, has_failed, require, status_word, wait_until

HERE = Path(__file__).resolve().parent
LIMIT = 240
STEPS = []


def step(function):
    STEPS.append(function)
    return function


class Place:
    """An installation, a keeper of its own, and the programs compiled there."""

    def __init__(self, directory, deaths):
        self.directory = directory
        self.deaths = deaths
        self.root = directory / "root/usr"
        self.environment = {**os.environ, "RINGLET_REFLECT": str(directory / "reflect.sock")}
        self.run(["make", "-s", "-C", ROOT, "install", f"DESTDIR={directory}/root", "PREFIX=/usr"], limit=600)
        self.keeper = subprocess.Popen([self.root / "bin/ringlet", "reflect", "keep", "--path", directory / "reflect.sock"], stdout=subprocess.PIPE)
        require(self.keeper.stdout.readline() == b"ready\n", "the keeper does not start")

    def run(self, argv, expected=0, limit=LIMIT, **options):
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=limit, env=self.environment, **options)
        require(done.returncode == expected, f"{argv}: {status_word(done.returncode)}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def build(self, name, compiler="oshcc", flags=("-std=gnu11",)):
        program = self.directory / f"{name}-{compiler}"
        if not program.exists():
            self.run([self.root / "bin" / compiler, *flags, "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", HERE / f"{name}.c", "-o", program])
        return program

    def job(self, count, program, *words, expected=0):
        return self.run([self.root / "bin/ringlet", "shmem", "--timeout", f"{LIMIT - 40}s", "-n", count, "--", program, *words], expected)

    def unused(self):
        """Nothing is left of those who were there."""
        def state():
            return json.loads(self.run([self.root / "bin/ringlet", "reflect", "ls", "--json"]))
        wait_until(lambda: not any(state()[each] for each in ("members", "regions", "sets")), LIMIT, "nothing to be left")


def program(name, sizes):
    def runs(place):
        for size in sizes:
            place.job(size, place.build(name))
        place.unused()
    runs.__name__ = name
    step(runs)


# (More than there are processors, too.)
program("memory", [1, 2, 4])
program("rma", [1, 2, 5])
program("atomics", [1, 2, 4])
program("waits", [1, 2, 6])
program("pointed", [3])
program("collectives", [1, 2, 3, 8])
program("teams", [1, 2, 5, 8])
program("threads", [1, 2, 3])
program("locks", [1, 2, 6])


@step
def old(place):
    """Earlier names, in C99; and C++."""
    for size in [1, 2, 3]:
        place.job(size, place.build("old", flags=["-std=gnu99"]))
        place.run([place.root / "bin/oshrun", "-np", size, place.build("old", "oshc++", ["-x", "c++"])])
    said = place.run([place.root / "bin/oshrun", "--host", "a,b", "-np", "2", "true"], 125)
    require("one host" in said, said)


@step
def alone(place):
    """A program that nobody has launched is a job of one; those that a PE starts are jobs of their own."""
    place.run([place.build("old", flags=["-std=gnu99"])])
    source = place.directory / "starts.c"
    source.write_text('#include "check.h"\nint main(int count, char **words) {\n'
                      'begin();\nif (count < 2) return pes == 1 ? 0 : 5;\nint status = system(words[1]);\n'
                      'shmem_barrier_all();\nshmem_finalize();\nreturn status != 0; }\n')
    place.run([place.root / "bin/oshcc", f"-I{HERE}", source, "-o", place.directory / "starts"])
    place.job(2, place.directory / "starts", place.directory / "starts")


@step
def wrong(place):
    """What a program must not do is told, and ends the job."""
    told = {"address": "not symmetric", "length": "not symmetric", "pe": "no PE 3", "minus": "no PE -1", "context": "context",
            "comparison": "comparison", "signal": "signals", "lock": "has not set it", "scribbled": "no PE writes there",
            "free": "not an allocation", "stride": "backwards",
            "set": "active set", "alone": "active set", "sync": "active set", "root": "root is 3", "many": "too many",
            "unaligned": "not aligned", "early": "before shmem_init", "late": "behind shmem_finalize"}
    built = place.build("wrong")
    for word, why in told.items():
        said = place.job(3, built, word, expected=1)
        require(why in said, f"{word}: {said}")
    place.job(3, built, "nothing")
    place.unused()


@step
def settings(place):
    built = place.build("memory")
    for value, expected, why in [("64M", 0, ""), ("1.5x", 1, "not a size"), ("0", 1, "not a size"), ("60g", 1, "not to be had")]:
        place.environment["SHMEM_SYMMETRIC_SIZE"] = value
        try:
            said = place.job(2, built, expected=expected)
        finally:
            del place.environment["SHMEM_SYMMETRIC_SIZE"]
        require(why in said, f"{value}: {said}")
    place.environment.update(SHMEM_INFO="1", SHMEM_VERSION="1")
    try:
        said = place.job(2, built)
    finally:
        del place.environment["SHMEM_INFO"], place.environment["SHMEM_VERSION"]
    require("OpenSHMEM 1.5" in said and "268435456 bytes of heap" in said, said)


@step
def ends(place):
    """However a PE ends, the job does, with the status that it says."""
    built = place.build("ends")
    place.job(4, built, "well")
    place.job(4, built, "global", "barrier", "0")
    place.job(4, built, "global", "lock", "9", expected=9)
    place.job(4, built, "status", "wait", expected=7)
    place.job(4, built, "kill", "barrier", expected=128 + signal.SIGKILL)
    place.job(4, built, "kill", "lock", expected=128 + signal.SIGKILL)
    place.job(4, built, "fault", "wait", expected=128 + signal.SIGSEGV)
    require("PE 0 has ended without" in place.job(4, built, "_exit", "lock", expected=1), "it is not said which PE has ended")
    require("PE 1 has ended without" in place.job(4, built, "unstarted", expected=1), "it is not said which PE has ended")
    place.unused()
    # PEs that are a script's children, of whom one has left: the others are not the launcher's to signal.
    def script(*words):
        return place.run([place.root / "bin/ringlet", "shmem", "--prefix", "-n", 3, "--", "sh", "-c", *words], expected=1)
    script(f"{built} left; true")
    place.unused()
    # (Who hears no signal finds out where he waits.)
    said = script(f"trap '' TERM; {built} left; true")
    require("launcher has ended" in said, said)
    place.unused()
    # One that waits by looking at memory, without a call.
    running = subprocess.Popen([place.root / "bin/ringlet", "shmem", "-n", "2", "--", "sh", "-c", f"{built} look look; true"],
                               stdout=subprocess.PIPE, env=place.environment)
    [running.stdout.readline() for _ in range(2)]
    running.kill()
    running.wait(LIMIT)
    place.unused()
    running.stdout.close()
    # One program of a job that is another one.
    said = place.job(2, "sh", "-c", f'[ "$RINGLET_SHMEM_PE" = 1 ] && exec {place.build("memory")}; exec {built} well', expected=1)
    require("differ" in said, said)
    place.unused()


@step
def together(place):
    """Jobs that begin at once where there is no keeper yet: one starts it, all have it."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return "skipped: only root makes a network namespace, in which there is none"
    job = f"{place.root}/bin/ringlet shmem -n 1 -- true"
    script = f"pids=; for n in 1 2 3 4 5 6; do {job} & pids=\"$pids $!\"; done; for pid in $pids; do wait $pid || exit 1; done"
    environment = {**place.environment, "RINGLET_REFLECT": ""}
    for _ in range(10):
        done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=LIMIT, env=environment)
        require(done.returncode == 0, done.stderr)


@step
def deaths(place):
    """PEs that are killed at any moment, while others wait asleep, put, and hold locks; and their launcher: nothing is left."""
    built = place.build("ends")
    for number in range(place.deaths):
        # (Its standard input and output are ours: no process is left when they are at their end.)
        running = subprocess.Popen([place.root / "bin/ringlet", "shmem", "-n", "4", "--", built, "sleep", random.choice(["barrier", "lock", "wait"])],
                                   stdout=subprocess.PIPE, env=place.environment, text=True)
        pids = [int(running.stdout.readline()) for _ in range(4)]
        victim = running.pid if number % 5 == 0 else random.choice(pids)
        os.kill(victim, signal.SIGKILL)
        running.stdout.read()
        expected = -signal.SIGKILL if victim == running.pid else 128 + signal.SIGKILL
        require(running.wait(LIMIT) == expected, f"status {running.returncode}")
    place.unused()


@step
def names(place):
    """Each function of the header is in the library, and the other way round."""
    source = place.directory / "names.c"
    source.write_text("#include <shmem.h>\n")
    text = place.run([place.root / "bin/oshcc", "-std=gnu11", "-E", "-P", source])
    text = re.sub(r"static inline[^;{]*\{[^}]*(\{[^}]*\}[^}]*)?\}|for \([^)]*\)[^;]*;", "", text)
    declared = set(re.findall(r"\b((?:ringlet_shmem|shmem|start)_\w+)\(", text)) - {"ringlet_shmem_combine"}  # (a type)
    symbols = place.run(["nm", "-D", "--defined-only", place.root / "lib/libringlet_shmem.so"])
    exported = set(re.findall(r" T ((?:ringlet_shmem|shmem|start)_\w+)", symbols))
    require(declared == exported, f"only in the header: {sorted(declared - exported)}\nonly in the library: {sorted(exported - declared)}")
    require(len(declared) > 1500, f"{len(declared)} names")
    return f"{len(declared)} functions"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ringlet", type=Path, default=ROOT / "target/release/ringlet")
    parser.add_argument("--deaths", type=int, default=30)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if not shutil.which("cc"):
        print("skipped: no C compiler")
        return 77
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory), options.deaths)
        try:
            for each in STEPS:
                if options.names and each.__name__ not in options.names:
                    continue

                def play(each=each):
                    try:
                        began = time.monotonic()
                        said = each(place) or ""
                        print(f"{each.__name__:12} ok  {time.monotonic() - began:5.1f} s  {said}", flush=True)
                    except (Failed, subprocess.TimeoutExpired) as error:
                        print(f"{each.__name__:12} FAILED  {error}", flush=True)
                        return True
                    return False

                failed |= has_failed(each.__name__, play)
        finally:
            place.keeper.terminate()
            place.keeper.wait()
    return 1 if failed else 0


sys.exit(main())
