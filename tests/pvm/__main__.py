"""PVM, unmodified: its example programs on virtual machines of one host and of two, over the kernel and over ringlet.

    python3 tests/pvm [--on PLACE] [EXAMPLE...]     each must say what it says where all went well
    python3 tests/pvm --measure [--rounds N]        messages and an application over both, by turns

Places: `host` has one daemon; `daemons` has two on one host, which talk by UDP (as root); `hosts` are two network namespaces with a node service
each, which carries between them over rails in memory (as root). Under ringlet, each kind of connection must be in shared memory.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "node"), str(HERE.parent / "faults")]

from examples import EXAMPLES  # noqa: E402
from harness import ROOT, Failed, Ringlet, adopt_orphans, end_orphans, has_failed, require, skip, status_word, wait_until  # noqa: E402
from machine import LIMIT_SECONDS, Machine, Node  # noqa: E402
from measure import measure  # noqa: E402
from nodes import ALLOWED, fabric, in_memory, two_hosts  # noqa: E402
from world import inside, missing, world  # noqa: E402

NEEDED = {"pvmd": "pvm", "spmd": "pvm-examples", "/usr/include/pvm3.h": "pvm-dev", "cc": "gcc"}
PAIR_SECONDS = 40  # for two tasks to be looked at, before others are
PAIRS = 5
PLACES = {}


def place(function):
    PLACES[function.__name__] = contextlib.contextmanager(function)
    return function


@place
def host(_ringlet):
    yield [Node("127.0.0.1")]


@place
def daemons(_ringlet):
    # (On loopback addresses a daemon takes no other in.)
    with world() as ground:
        name, addresses = ground.namespace(), [f"{ground.net}.{number}" for number in (2, 3)]
        for address in addresses:
            ground.within(name, "ip", "address", "add", f"{address}/32", "dev", "lo")
        yield [Node(address, inside(name)) for address in addresses]


@place
def hosts(ringlet):
    ground = types.SimpleNamespace(ringlet=ringlet)
    with in_memory() as rails, two_hosts(ground, ALLOWED, rails) as both:
        for each in both:
            wait_until(lambda each=each: fabric(each)["nodes"] == 1, LIMIT_SECONDS, f"a rail that carries: {each.service.told()}")
        # (With the mounts as they are: a daemon starts the others' from there, which join control groups.)
        yield [Node(each.ip, each.before(lambda name: ["nsenter", f"--net=/run/netns/{name}"])) for each in both]


def why_not(name, ringlet):
    """Why there can be no such place, if there can be none."""
    if name == "host":
        return None
    if os.geteuid() != 0:
        return "only root makes namespaces"
    tools = [tool for tool in ("ip", "nsenter", "sysctl") if shutil.which(tool) is None]
    if tools:
        return f"not installed: {', '.join(tools)}"
    return missing(ringlet.command) if name == "hosts" else None


def build(directory):
    """What is no example: who starts tasks, and two that talk."""
    for name, source in ("spawn", HERE / "spawn.c"), ("talk", ROOT / "tests/compare/pvm.c"):
        done = subprocess.run(["cc", "-O2", "-o", directory / name, source, "-lpvm3", "-lm"], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        require(done.returncode == 0, f"{source}: {done.stderr}")


def paths(ringlet, pids):
    """Where each connection of these programs is: by the protocol."""
    done = subprocess.run([ringlet.command, "ss", "--json"], capture_output=True, timeout=LIMIT_SECONDS)
    require(done.returncode in (0, 1), f"ringlet ss: {done.stderr}")
    rows = [row for row in json.loads(done.stdout)["connections"] if row["pid"] in pids and row["state"] != "LISTEN"]
    return {protocol: [row["path"] for row in rows if row["protocol"] == protocol] for protocol in ("tcp", "udp", "unix")}


def talk(machine, route, seen):
    """Two tasks talk until `seen` has seen their pids, and what it says to them; both end well."""
    asks = machine.start(["talk", "ask", route, 0])
    answers = machine.start(["talk", "answer", route, 0], number=-1)
    try:
        found = seen({asks.pid, answers.pid})
        asks._popen.stdin.close()
        for each in asks, answers:
            status = each.wait(LIMIT_SECONDS)
            require(status == 0, f"talk by the {route} route: {status_word(status)}\n{each.tail()}\n{machine.told()}")
        return found
    finally:
        for each in asks, answers:
            each.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(EXAMPLES)} (default: all)")
    parser.add_argument("--on", choices=PLACES, help="default: all places")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that is measured (5)")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    options = parser.parse_args()
    if unknown := set(options.examples) - set(EXAMPLES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if packages := [package for what, package in NEEDED.items() if not (pathlib.Path(what).exists() or shutil.which(what))]:
        skip(f"not installed (Debian packages): {', '.join(packages)}")
    os.environ["RINGLET_CONFIG"] = "/dev/null"
    adopt_orphans()
    # Who is told to end puts away what there is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = False
    with tempfile.TemporaryDirectory(prefix="ringlet-pvm-") as directory:
        directory = pathlib.Path(directory)
        directory.chmod(0o755)
        ringlet = Ringlet(options.ringlet, directory)
        build(directory)
        for name in [options.on] if options.on else PLACES:
            if why := why_not(name, ringlet):
                print(f"skipped   {name}: {why}", flush=True)
                continue
            with PLACES[name](ringlet) as nodes:
                if options.measure:
                    measure(name, nodes, ringlet, directory, options.rounds)
                else:
                    failed |= play(name, nodes, ringlet, directory, options.examples or EXAMPLES)
            if left := end_orphans():
                print(f"FAILED    {name}: left behind: {left}", flush=True)
                failed = True
    sys.exit(failed)


def play(name, nodes, ringlet, directory, chosen):
    failed = False
    for path in "kernel", "ringlet":
        scenes = {}
        if path == "ringlet":
            # (First: behind the examples' many short connections one of two tasks that only talk directly may stay with the kernel.)
            scenes = {f"the {route} route is in shared memory": moves(ringlet, name, route) for route in ("direct", "daemon")}
        scenes |= {each: EXAMPLES[each] for each in chosen}
        wrap = ringlet.wrap if path == "ringlet" else list
        with Machine(directory / f"{name}-{path}", nodes, wrap, directory) as machine:
            for what, scene in scenes.items():

                def once(what=what, scene=scene, machine=machine, path=path):
                    began, problem = time.monotonic(), ""
                    try:
                        scene(machine)
                    except Failed as told:
                        problem = str(told)
                    print(f"{'FAILED' if problem else 'passed':8}  {name:8} {path:8} {what:40} {time.monotonic() - began:6.1f} s", flush=True)
                    if problem:
                        print("    " + problem.replace("\n", "\n    "), flush=True)
                    return bool(problem)

                failed |= has_failed(f"{name} {path}: {what}", once)
    return failed


# What there is, in ends. Tasks of one daemon have a Unix socket, to it and to each other; others have TCP, and their daemons UDP. (Between hosts only TCP
# is carried.)
USED = {
    ("host", "direct"): {"unix": 4},
    ("host", "daemon"): {"unix": 2},
    ("daemons", "direct"): {"tcp": 2},
    ("daemons", "daemon"): {"unix": 2, "udp": 2},
    ("hosts", "direct"): {"tcp": 2},
    ("hosts", "daemon"): {"unix": 2},
}


def moves(ringlet, name, route):
    """All connections of two tasks' and of their daemons' that carry what is said, at both ends."""

    def scene(machine):
        def seen(tasks):
            wanted = USED[name, route]
            pids = {"unix": tasks, "tcp": tasks, "udp": machine.daemons()}

            def are_there():
                found = {protocol: paths(ringlet, pids[protocol])[protocol] for protocol in wanted}
                are_there.found = found
                return all(found[protocol].count("ring") >= count for protocol, count in wanted.items())

            with contextlib.suppress(Failed):
                wait_until(are_there, PAIR_SECONDS, f"{wanted} ends in shared memory")
                return None
            return are_there.found

        # (One whose ends did not come to terms in time, on a busy machine, stays in the kernel: then other tasks are looked at.)
        for _ in range(PAIRS):
            found = talk(machine, route, seen)
            if found is None:
                return
        raise Failed(f"not {USED[name, route]} ends in shared memory, of {PAIRS} pairs of tasks: {found}")

    return scene


if __name__ == "__main__":
    main()
