"""GASNet's own tests and measurements, with its udp-conduit on the installed ringlet instead of its own AMUDP. Nothing of it is changed.

    python3 tests/gasnet --sources DIR [--build DIR] [--processes 2,4,8] [--mode seq] [--debug] [--tables] [--upcxx DIR] [--ringlet PATH] [TEST...]

DIR is an unpacked release of GASNet-EX (gasnet.lbl.gov), 2025.8.0 for example. It is built in --build, or in a folder that is removed afterwards.
AMUDP is replaced by variables of make, for which udp-conduit's makefiles have a place. PATH is an installation's bin/ringlet, which is used where it
is, or a build's release/ringlet; nothing of ringlet is built here. With --upcxx, the sources of UPC++ (upcxx.lbl.gov, 2020.10.0
for example), that is built on it instead, and its own tests are run.

With --tables it is built with its AMUDP too, and as smp-conduit, and all are measured by turns, between two processes. What the table compares: over
udp-conduit a put or get is a request and a reply (by ringlet, or by AMUDP); over smp-conduit it is the initiator's own load or store in memory that
both have mapped (PSHM), with nobody at the other end, and only its Active Messages are of the same kind. udp-conduit with PSHM, the last column, does
as smp-conduit between processes of one host. All spin. On a virtual machine whose processors are moved, figures come in two, by whether the two
processors share a cache (a round trip takes 0.25 us or 0.6 and more, over shared memory too): then compare the least, or take more rounds.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 900
# Of GASNet's clients: one thread, any one at a time, any.
MODES = ["seq", "parsync", "par"]
# What only makes sense elsewhere: other hardware, MPI, no job at all, or a fault that is meant.
OMITTED = {"testmpi", "testcudauva", "testhip", "testze", "testtools", "testtoolscxx", "testreadonly"}
# Short, as GASNet's own `run-tests` has them where it has; else its tests begin with the number of rounds.
ARGUMENTS = {
    "testalign": "100", "testam": "200 4096", "testlarge": "50 262144", "testsmall": "200", "testbarrier": "1000", "testcore1": "100", "testcore2": "10",
    "testhsl": "0", "testrand": "1024", "testqueue": "1 64 65536", "testenv": "GASNet is 'Global Address Space Networking'", "testvisperf": "-maxdata 65536 -maxcontig 512 3",
    "testslice": "102400 10 5", "testcollperf": "-szfactor 4 4096 2 20 0", "testvis": "", "testcoll": "50", "testteam": "50", "testreduce": "10 3 64",
    "testmisc": "10000", "testsplit": "", "testcore3": "", "testteambcast": "", "testlogGP": "100 0 8 65536", "testgasnet": "", "testratomic": "100", "testtoken": "", "testthreads": "2",
}
# Those that are about one process, or an own number of them.
PROCESSES = {"testmisc": 1, "testbarrierconf": 3}
# Rows of the tables: a test, its arguments, and what its lines say.
TABLES = [
    ("testsmall", "20000 8", r"\s8 bytes?\s*:.*?([0-9.]+) us ave\. \((PutBlocking|GetBlocking) latency\)"),
    ("testam", "20000 8", r"\s(AM\w+\s+ping-pong roundtrip ReqRep|AM\w+\s+flood\s+one-way\s+Req)\s*:.*?sec\s+([0-9.]+) us"),
    ("testlarge", "100 262144", r"\s262144 byte.*?throughput\s+([0-9.]+) KB/sec \(((?:PutBlocking|GetBlocking) throughput)"),
    ("testbarrier", "500", r"Avg (.*?) Barrier latency:\s*([0-9.]+) us"),
]


# Of UPC++: those that say whether they have passed, and need nothing else.
UPCXX = "alloc atomics barrier collectives dist_object future global_ptr local_team lpc_barrier rpc_barrier rpc_ff_ring rput rput_rpc_cx"
UPCXX += " segment_allocator serialization view vis"


class Build:
    """GASNet, configured and built in a folder of its own; `over` tells over what, `pshm` whether processes of one host share memory without that."""

    def __init__(self, over, sources, folder, prefix, debug=False, mode="seq", pshm=False):
        self.over, self.mode, self.name = over, mode, over + ("-pshm" if pshm and over != "smp" else "")
        self.folder = folder / (self.name + ("" if mode == "seq" else f"-{mode}") + ("-debug" if debug else ""))
        self.conduit = "smp" if over == "smp" else "udp"
        self.variables = []
        if over == "ringlet":
            self.variables = [
                f"CONDUIT_EXTRALIBCFLAGS=-I{prefix}/include", f"CONDUIT_INCLUDES=-I{prefix}/include", "CONDUIT_EXTRADEPS=",
                f"CONDUIT_EXTRAHEADERS={prefix}/include/amudp_const.h",
                f"CONDUIT_LIBS=-L{prefix}/lib -lringlet -Wl,-rpath,{prefix}/lib",
            ]
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "Makefile").exists():
            # Between processes of one host udp-conduit would go through memory of its own otherwise, and not by AMUDP.
            options = ["--disable-auto-conduit-detect", f"--enable-{self.conduit}", "--enable-pshm" if pshm else "--disable-pshm"]
            options += [f"--{'enable' if each == mode else 'disable'}-{each}" for each in MODES] + (["--enable-debug"] if debug else [])
            self.do([sources / "configure", *options], self.folder)

    def do(self, command, where):
        with open(self.folder / "log", "ab") as log:
            done = subprocess.run([str(word) for word in command], cwd=where, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"{command}: status {done.returncode}; see {self.folder / 'log'}")

    @property
    def place(self):
        return self.folder / f"{self.conduit}-conduit"

    def tests(self, names=()):
        """Builds those, or all of them; what is there."""
        all_built, some_built = self.folder / "built", self.folder / "built-some"
        if not all_built.exists() and not (names and some_built.exists()):
            self.do(["make", "-j2", *self.variables, self.mode], self.place)
            self.do(["make", *self.variables, *([f"{name}-{self.mode}" for name in names] or [f"tests-{self.mode}"])], self.place)
            (some_built if names else all_built).touch()
        found = (path.name for path in self.place.glob("test*") if path.is_file() and os.access(path, os.X_OK))
        return sorted(found)

    def run(self, test, count, arguments, spinning=False):
        environment = {**os.environ, "GASNET_SPAWNFN": "L", "GASNET_PSHM_NODES": str(count), "GASNET_BACKTRACE": "0"}
        if spinning:
            # (Who is spawned by L gives the processor away in each poll that finds nothing. smp-conduit does not. Each on a processor of its own:
            # else the first milliseconds are about those that begin on one.)
            processors = sorted(os.sched_getaffinity(0))
            each = [f"taskset -c {processors[rank % len(processors)]} %C & " for rank in range(count)]
            environment |= {"GASNET_SPAWNFN": "C", "GASNET_CSPAWN_CMD": "".join(each) + "wait", "GASNET_MASTERIP": "127.0.0.1"}
        environment["GASNET_DUMMY"] = "GASNet dummy value"  # which testenv looks for
        count = [] if self.over == "smp" else [str(count)]
        command = ["timeout", "--kill-after=10", str(LIMIT), f"./{test}", *count, *shlex.split(arguments)]
        done = subprocess.run(command, cwd=self.place, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        return done.returncode, done.stdout + done.stderr


def exits(build, count):
    """Each way to end a job that testexit knows, the number of which is to be the job's code."""
    statuses = {way: build.run("testexit", count, str(way))[0] for way in range(1, 16)}
    return str(wrong) if (wrong := {way: status for way, status in statuses.items() if status != way}) else None


def passes(build, test, count):
    """None, or what is wrong."""
    if test == "testexit":
        return exits(build, count)
    status, said = build.run(test, count, ARGUMENTS.get(test, "10"))
    wrong = [line for line in said.splitlines() if re.search(r"ERROR|FATAL|[Ff]atal signal|Caught a fatal", line)]
    if status or wrong:
        (build.folder / f"{test}-{count}").write_text(said)
        return f"status {status} {' | '.join(wrong[:3])}"
    return None


class Upcxx:
    """UPC++ on GASNet on ringlet, in the same folder; it is told by its makefiles' pass-through of GASNet's variables of make."""

    def __init__(self, sources, gasnet, ours, prefix):
        self.sources, self.folder, self.variables = sources, ours.folder.parent / "upcxx", ours.variables
        # (It has these two; each program is compiled for one of them.)
        self.threads = "par" if ours.mode == "par" else "seq"
        # (Its programs are started by nothing else.)
        self.launcher = prefix / "bin/amudprun"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "Makefile").exists():
            options = [f"--with-gasnet={gasnet}", f"--prefix={self.folder}/installed", "--with-default-network=udp", "--disable-auto-conduit-detect"]
            options += ["--enable-single=opt", "--enable-udp", "--disable-smp", "--disable-pshm", "--disable-parsync"]
            ours.do(["bash", sources / "configure", *options], self.folder)

    def built(self, name):
        """Its executable; what it says meanwhile is kept."""
        kind = ["NETWORK=udp", "UPCXX_CODEMODE=opt", f"UPCXX_THREADMODE={self.threads}"]
        command = ["make", "-s", "exe", *kind, f"SRC={self.sources}/test/{name}.cpp", *self.variables]
        with open(self.folder / "log", "ab") as log:
            done = subprocess.run(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
        if done.returncode:
            sys.exit(f"UPC++'s {name} is not built: see {self.folder / 'log'}")
        return done.stdout.split()[-1]

    def passes(self, name, count):
        environment = {**os.environ, "UPCXX_SHARED_HEAP_SIZE": "64 MB"}
        command = ["timeout", "--kill-after=10", str(LIMIT), str(self.launcher), "-np", str(count), "-spawn", "L", self.built(name)]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        said = done.stdout + done.stderr
        right = not done.returncode and "SUCCESS" in said and not re.search(r"ERROR|FATAL|FAIL", said)
        return None if right else f"status {done.returncode} {said[-300:]}"


def installed(ringlet, folder):
    """The prefix of an installation: that of this program, or one that is made of a build's."""
    release = ringlet.resolve().parent
    prefix = release.parent
    if all((prefix / part).exists() for part in ("include/amudp_const.h", "include/amudp.h", "lib/libringlet.so", "bin/amudprun")):
        return prefix
    # (`make install` would build what is missing.)
    wants = [release / name for name in ("ringlet", "libringlet_preload.so", "libringlet_native.so", "libringlet_native.a", "libimc.so", "libringlet_shmem.so")]
    if missing := [str(path) for path in wants if not path.exists()]:
        sys.exit(f"{ringlet} is of no installation with the native library and its headers, nor of a whole build: there is no {', '.join(missing)} (make build)")
    command = ["make", "-s", "-C", ROOT, "install", f"TARGET={prefix}", f"DESTDIR={folder}/installed", "PREFIX=/usr"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "installed/usr"


def tables(builds, rounds):
    """Each measured once a round, by turns; true if something failed."""
    rows, failed = {}, False
    for _ in range(rounds):
        for test, arguments, pattern in TABLES:
            for build in builds:
                status, said = build.run(test, 2, arguments, spinning=True)
                if status:
                    print(f"{test} over {build.name}: status {status}\n{said[-500:]}", flush=True)
                    failed = True
                for found in re.finditer(pattern, said):
                    number, what = sorted(found.groups(), key=lambda group: not re.fullmatch(r"[0-9.]+", group))
                    rows.setdefault((test, " ".join(what.split())), {}).setdefault(build.name, []).append(float(number))
    if not rows:
        return True
    names = [build.name for build in builds]
    print(f"\nMedian (least, most) of {rounds} rounds by turns; us, and of throughputs KB/s.\n")
    print("| what | " + " | ".join(names) + " | ringlet's time / smp's | amudp's / ringlet's |\n| --- |" + " --- |" * (len(names) + 2))
    for (test, what), columns in rows.items():
        middle = {name: statistics.median(numbers) for name, numbers in columns.items()}
        cells = [f"{middle[name]:.3g} ({min(columns[name]):.3g}, {max(columns[name]):.3g})" if name in columns else "-" for name in names]
        for one, other in [("ringlet", "smp"), ("amudp", "ringlet")]:
            # (Of a throughput the greater one takes less time.)
            one, other = (other, one) if "throughput" in what else (one, other)
            cells.append(f"{middle[one] / middle[other]:.3g}" if middle.get(one) and middle.get(other) else "-")
        print(f"| {test}: {what} | {' | '.join(cells)} |")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--processes", default="2,4,8")
    parser.add_argument("--mode", choices=MODES, default="seq")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--upcxx", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ringlet", type=Path, default=ROOT / "target/release/ringlet")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if not options.sources or not (options.sources / "udp-conduit").is_dir():
        print("NOT RUN: GASNet's sources are not here: unpack a release from gasnet.lbl.gov, and name it by --sources (or make gasnet GASNET=DIR)")
        return 77
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.build or Path(temporary)).resolve()
        prefix = installed(options.ringlet, folder)
        sources = options.sources.resolve()
        ours = Build("ringlet", sources, folder, prefix, options.debug, options.mode)
        language = Upcxx(options.upcxx.resolve(), sources, ours, prefix) if options.upcxx else None
        found = UPCXX.split() if language else ours.tests([test for test, _, _ in TABLES] if options.tables else ())
        if options.tables:
            others = [("amudp", False), ("smp", True), ("ringlet", True)]
            others = [Build(over, sources, folder, prefix, mode=options.mode, pshm=pshm) for over, pshm in others]
            for build in others:
                build.tests([test for test, _, _ in TABLES])
            return tables([ours, *others], options.rounds)
        passed = failed = 0
        for count in map(int, options.processes.split(",")):
            for test in options.names or (name for name in found if name not in OMITTED):
                began = time.monotonic()
                wrong = language.passes(test, count) if language else passes(ours, test, PROCESSES.get(test, count))
                passed, failed = passed + (not wrong), failed + bool(wrong)
                print(f"{test:20} {count} {'FAILED  ' + wrong if wrong else 'ok'} {time.monotonic() - began:7.1f} s", flush=True)
        print(f"{passed} passed, {failed} failed")
        # (None at all is no success.)
        return bool(failed or not passed)


sys.exit(main())
