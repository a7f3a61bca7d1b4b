"""How fast reflective memory of two hosts is, beside a connection that is carried between them, and copies in memory; by turns.

    python3 tests/node/reflect_speed.py [--over memory|tcp] [--rounds N] [--ringlet PATH]

Each host is a network namespace with a node service (as root). One way is half of a round trip, of eight bytes. A figure is the median of all rounds
(of each its median), with the least and the most; ratios are of figures of one round. A stream's copies alone are as many as a payload goes through from
the program to what both hosts receive, by three threads in the place of three processes.
"""

import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

from harness import ROOT, require, wait_until  # noqa: E402
from nodes import ALLOWED, Speaker, by_libfabric, fabric, in_memory, two_hosts  # noqa: E402
from reflect import REFLECT, all_in, socket  # noqa: E402
from world import START_SECONDS, inside  # noqa: E402

# (Who watches has its processor for a whole slice where others want it too, so those take long.)
TRIPS = {"carried": 1000, "asleep": 1000, "awake": 400}
MEGABYTES, PORT = 256, 7500
OVER = {"memory": in_memory, "tcp": by_libfabric}


class End(Speaker):
    def __init__(self, host, program):
        words = ["env", f"RINGLET_REFLECT={socket(host)}", *inside(host.container.name), program, "memory"]
        super().__init__(words, stdin=subprocess.PIPE)
        self.hears("ready")

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def said(self):
        return self.process.stdout.readline().split()

    def asked(self, *words):
        self.tell(*words)
        return self.said()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(60)


def carried(ringlet, program, a, b):
    """One way of a connection that is carried, in microseconds."""
    address = f"{b.ip}:{PORT}"
    before = b.service.status()["decisions"].get("carried-far", 0)
    server = Speaker([*b.before(), ringlet, "run", "--", program, "answer", address])
    server.hears("ready")
    client = [*a.before(), ringlet, "run", "--", program, "ask", address, str(TRIPS["carried"])]
    told = subprocess.run(client, capture_output=True, text=True, timeout=120, check=True)
    require(server.process.wait(60) == 0, server.told())
    require(b.service.status()["decisions"].get("carried-far", 0) > before, "it was not carried")
    return int(told.stdout.split()[0]) / 1000


def both(one, other, ask, answer):
    other.tell(*answer)
    said = one.asked(*ask)
    require((answered := other.said()) == ["done"], f"{answer}: {answered}")
    return said


def measure(ringlet, program, a, b, one, other):
    figures = {"carried, one way (us)": carried(ringlet, program, a, b)}
    for waits in "awake", "asleep":
        for way, asker, answerer in ("", one, other), (", from the other host", other, one):
            middle, worst = both(asker, answerer, ("ping", TRIPS[waits], waits), ("pong", TRIPS[waits], waits))
            figures[f"one way, {waits}{way} (us)"] = int(middle) / 1000
            figures[f"one way, {waits}{way}, 99 % (us)"] = int(worst) / 1000
    for way, asker, answerer in ("", one, other), (", from the other host", other, one):
        figures[f"stream{way} (MB/s)"] = int(both(asker, answerer, ("stream", MEGABYTES), ("pong", 1, "asleep"))[0])
        require(one.asked("digest") == other.asked("digest"), "they have not the same")
    figures["copy out of cache (MB/s)"] = int(one.asked("copy", MEGABYTES)[0])
    figures["the stream's copies alone (MB/s)"] = int(one.asked("chain", MEGABYTES)[0])
    return figures


def show(what, values, digits):
    print(f"  {what:48} {statistics.median(values):10.{digits}f}  ({min(values):.{digits}f} to {max(values):.{digits}f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=OVER, action="append", help="rails in memory, or libfabric's tcp; both, if it is not said")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ringlet", default=str(ROOT / "target/release/ringlet"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root makes namespaces")
    ringlet = str(pathlib.Path(options.ringlet).resolve())
    program = str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release/examples/reflect_speed")
    ground = types.SimpleNamespace(ringlet=types.SimpleNamespace(command=ringlet))
    for over in options.over or OVER:
        with OVER[over]() as rails, two_hosts(ground, f"{REFLECT.format(silent=4000)}{ALLOWED}", rails) as hosts:
            all_in(hosts)
            wait_until(lambda hosts=hosts: all(fabric(host)["nodes"] == 1 for host in hosts), START_SECONDS, "rails that carry")
            with End(hosts[0], program) as one, End(hosts[1], program) as other:
                rounds = [measure(ringlet, program, *hosts, one, other) for _ in range(options.rounds)]
        print(f"over {over}")
        for what in rounds[0]:
            show(what, [each[what] for each in rounds], 1)
        for what in rounds[0]:
            if what.startswith("one way") and "%" not in what:
                show(f"{what.removesuffix(' (us)')} : carried", [each[what] / each["carried, one way (us)"] for each in rounds], 2)
            elif what.startswith("stream"):
                for beside, by in ("copy", "copy out of cache (MB/s)"), ("its copies alone", "the stream's copies alone (MB/s)"):
                    show(f"{what.removesuffix(' (MB/s)')} : {beside}", [each[what] / each[by] for each in rounds], 3)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
