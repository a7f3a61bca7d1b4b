"""Test suites of native programs, on the kernel and then under ringlet: a test that passes there must pass here.

    python3 tests/suites/native.py [--mode plain|unforgiving|both] [--quick] [--ringlet COMMAND] [SUITE[:UNIT]...]

Each suite comes as Debian's source package and runs in units, each in a network namespace of its own, first on the kernel,
whose results are the measure. A unit with a test that passes there and not under ringlet is repeated on both sides, to tell
what is different from what is flaky. What can't be had is named, and fails nothing.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import harness  # noqa: E402
from harness import ROOT, Failed, Ringlet, Skipped  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
KERNEL, PLAIN, UNFORGIVING = "kernel", "plain", "unforgiving"
LIMIT_SECONDS = 400  # of a unit on the kernel; under ringlet so much more than four times what it took there:
SLACK_SECONDS = 60
BUILD_SECONDS = 900
REPEATS = 3
SHOWN_BYTES = 1500

Result = collections.namedtuple("Result", "cases seconds moved log")


# Sources.


def run(argv, directory, seconds=BUILD_SECONDS):
    done = subprocess.run(argv, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    if done.returncode != 0:
        raise Skipped(f"{' '.join(map(str, argv))[:80]} failed:\n{(done.stdout + done.stderr)[-SHOWN_BYTES:]}")
    return done.stdout


class Sources:
    """Source packages, fetched by apt with lists of its own (images seldom have those of sources), kept for the next time."""

    def __init__(self, place):
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        self._apt = None

    def _options(self):
        if self._apt is None:
            lists = self._place / "lists"
            (lists / "partial").mkdir(parents=True, exist_ok=True)
            targets = run(["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)", "Created-By: Packages"], "/")
            (self._place / "sources.list").write_text("".join(f"deb-src {line}\n" for line in sorted(set(targets.splitlines()))))
            self._apt = [
                *("-o", f"Dir::Etc::sourcelist={self._place}/sources.list", "-o", "Dir::Etc::sourceparts=/dev/null"),
                *("-o", f"Dir::State::lists={lists}", "-o", "APT::Sandbox::User=root"),
            ]
            # Some of the sources that packages come from may have no sources.
            subprocess.run(["apt-get", *self._apt, "update"], capture_output=True, timeout=BUILD_SECONDS)
        return self._apt

    def get(self, package, build):
        """The directory of a package's sources, built."""
        place = self._place / package
        ready = place / "ready"
        if not ready.exists():
            for tool in ("apt-get", "dpkg-source", "cc", "make"):
                if shutil.which(tool) is None:
                    raise Skipped(f"{tool} is missing, which gets or builds the sources of {package}")
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            run(["apt-get", *self._options(), "source", "--download-only", package], place)
            run(["dpkg-source", "--no-check", "-x", *place.glob("*.dsc"), place / "tree"], place)
            # Patches change what the build would then make anew, with tools that nobody has.
            now = time.time()
            for number, pattern in enumerate(("aclocal.m4", "configure", "*.h.in", "Makefile.in")):
                for path in (place / "tree").rglob(pattern):
                    os.utime(path, (now + number / 100, now + number / 100))
            build(place / "tree")
            ready.touch()
        return place / "tree"


# Suites: a name, their units, what a unit runs, and what its output says.


class Redis:
    """Of the servers and clients that are installed."""

    name = "redis"
    QUICK = "unit/protocol unit/info unit/multi unit/pubsub unit/auth unit/networking".split()
    UNITS = QUICK + (
        "unit/type/string unit/type/hash unit/type/list unit/type/list-2 unit/type/set unit/type/zset unit/type/stream "
        "unit/type/stream-cgroups unit/sort unit/expire unit/other unit/quit unit/aofrw unit/acl unit/acl-v2 unit/dump unit/keyspace "
        "unit/scan unit/latency-monitor unit/pubsubshard unit/slowlog unit/scripting unit/functions unit/introspection "
        "unit/introspection-2 unit/limits unit/obuf-limits unit/wait unit/pause unit/querybuf unit/pendingquerybuf unit/tracking "
        "unit/shutdown unit/client-eviction unit/replybufsize unit/violations unit/lazyfree unit/cluster unit/cluster/misc "
        "unit/cluster/links unit/cluster-scripting integration/aof integration/aof-multi-part integration/rdb "
        "integration/block-repl integration/replication integration/replication-2 integration/replication-3 "
        "integration/replication-4 integration/replication-psync integration/replication-buffer integration/psync2 "
        "integration/psync2-reg integration/psync2-pingoff integration/psync2-master-restart integration/failover "
        "integration/shutdown integration/logging integration/redis-cli integration/redis-benchmark"
    ).split()
    PROGRAMS = "redis-server redis-cli redis-benchmark redis-check-aof redis-check-rdb".split()

    def __init__(self, sources):
        for program in ("tclsh", *self.PROGRAMS):
            if shutil.which(program) is None:
                raise Skipped(f"{program} is missing")
        self._tree = sources.get("redis", lambda tree: None)
        self.units = [unit for unit in self.UNITS if (self._tree / f"tests/{unit}.tcl").exists()]

    def argv(self, unit, place):
        (place / "src").mkdir()
        for program in self.PROGRAMS:
            (place / "src" / program).symlink_to(shutil.which(program))
        for part in ("tests", "utils"):
            shutil.copytree(self._tree / part, place / part)
        for part in ("runtest", "redis.conf", "sentinel.conf"):
            shutil.copy2(self._tree / part, place)
        return ["./runtest", "--clients", "1", "--tags", "-large-memory", "--single", unit], place

    def cases(self, output):
        output = re.sub(r"\x1b\[[0-9;]*m", "", output)
        for word, test in re.findall(r"^\[(ok|err|exception)\]: (.*)$", output, re.M):
            yield re.sub(r" \(\d+ ms\)$| in tests/\S+$", "", test), word == "ok"


class Memcached:
    """Over TCP, where its tests would take a Unix socket if they could."""

    OVER_TCP = "use MemcachedTest; no warnings; *MemcachedTest::supports_unix_socket = sub { 0 }; $0 = shift; do qq(./$0); die $@ if $@"
    name = "memcached"
    QUICK = "t/getset.t t/binary.t t/noreply.t t/maxconns.t t/unixsocket.t t/udp.t".split()

    def __init__(self, sources):
        if shutil.which("perl") is None:
            raise Skipped("perl is missing")
        self._tree = sources.get("memcached", self._build)
        self.units = sorted(str(path.relative_to(self._tree)) for path in self._tree.glob("t/*.t")) + ["testapp"]

    @staticmethod
    def _build(tree):
        run(["./configure"], tree)
        run(["make", "-j2"], tree)

    def argv(self, unit, place):
        if unit in ("testapp", "t/unixsocket.t"):
            return (["./testapp"] if unit == "testapp" else ["perl", "-It/lib", unit]), self._tree
        return ["perl", "-It/lib", "-e", self.OVER_TCP, unit], self._tree

    def cases(self, output):
        return tap(output)


def tap(output):
    for word, number, name in re.findall(r"^(ok|not ok) (\d+)(.*)$", output, re.M):
        if "# skip" not in name.lower() and "# todo" not in name.lower():
            yield number, word == "ok"


class Libevent:
    name = "libevent"
    QUICK = "bufferevent http listener util".split()

    def __init__(self, sources):
        self._tree = sources.get("libevent", self._build)
        listed = run(["./test/regress", "--list-tests"], self._tree)
        self.units = sorted(set(re.findall(r"^\s*:?([a-z_0-9]+)/", listed, re.M)))

    @staticmethod
    def _build(tree):
        run(["./configure", "--disable-samples", "--disable-shared"], tree)
        run(["make", "-j2", "test/regress"], tree)

    def argv(self, unit, place):
        return ["./test/regress", f"{unit}/.."], self._tree

    def cases(self, output):
        for test in re.findall(r"^(\S+): .*OK$", output, re.M):
            yield test, True
        for test in re.findall(r"^  \[(\S+) FAILED\]", output, re.M):
            yield test, False


class Libuv:
    name = "libuv"
    QUICK = "tcp_ shutdown_ poll_ ipc_".split()

    def __init__(self, sources):
        if shutil.which("cmake") is None:
            raise Skipped("cmake is missing, which builds libuv's tests")
        os.environ["UV_RUN_AS_ROOT"] = "1"
        self._tree = sources.get("libuv1", self._build)
        listed = run([self._runner(), "--list"], self._tree)
        # Its own helpers are listed too; its tests run one by one in one go, so a unit is all of one kind.
        self.units = sorted({name.partition("_")[0] + "_" for name in listed.split() if "_" in name})
        self._tests = listed.split()

    def _runner(self):
        return str(self._tree / "build/uv_run_tests_a")

    @staticmethod
    def _build(tree):
        run(["cmake", "-S", ".", "-B", "build", "-DBUILD_TESTING=ON"], tree)
        run(["make", "-C", "build", "-j2", "uv_run_tests_a"], tree)

    def argv(self, unit, place):
        tests = [test for test in self._tests if test.startswith(unit)]
        script = 'runner=$1; shift; for test; do "$runner" "$test" >out 2>&1 && echo "ok $test" || { echo "not ok $test"; tail -5 out; }; done'
        return ["sh", "-c", script, "sh", self._runner(), *tests], place

    def cases(self, output):
        for word, test in re.findall(r"^(ok|not ok) (\S+)$", output, re.M):
            yield test, word == "ok"


SUITES = {suite.name: suite for suite in (Redis, Memcached, Libevent, Libuv)}


# Running.


class Runner:
    def __init__(self, ringlet, directory, seed):
        self._ringlet, self._directory, self._seed = ringlet, directory, seed

    def run(self, suite, unit, mode, limit):
        place = pathlib.Path(tempfile.mkdtemp(dir=self._directory))
        place.chmod(0o777)
        work = place / "w"
        work.mkdir()
        work.chmod(0o777)
        moves = place / "moves"
        moves.touch()
        moves.chmod(0o666)
        argv, directory = suite.argv(unit, work)
        if mode != KERNEL:
            argv = self._ringlet.wrap(argv, moves, ["--unforgiving", str(self._seed)] if mode == UNFORGIVING else [])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGLET_")}
        environment.update(TMPDIR=str(work), LC_ALL="C.UTF-8", RINGLET_CONFIG=os.devnull)
        began = time.monotonic()
        with open(place / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "inside.py"), *argv],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            late = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                process.terminate()
                try:
                    process.wait(harness.STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        output = (place / "log").read_text(errors="replace")
        if late:
            output += f"\nnot done after {limit:.0f} s"
        cases = {}
        for name, passed in suite.cases(output):
            cases[name] = cases.get(name, True) and passed
        moved = self._ringlet.moved(moves)
        shutil.rmtree(place, ignore_errors=True)
        return Result(cases, time.monotonic() - began, moved, output)


def lost(baseline, got):
    return sorted(name for name, passed in baseline.cases.items() if passed and not got.cases.get(name))


def why(log, name):
    """What the log says around a test."""
    at = log.rfind(name)
    return log[max(0, at - SHOWN_BYTES // 2) : at + SHOWN_BYTES // 2] if at >= 0 else log[-SHOWN_BYTES:]


Row = collections.namedtuple("Row", "suite unit mode tests passed here flaky different moved seconds")


def examine(runner, suite, unit, modes, report):
    baseline = runner.run(suite, unit, KERNEL, LIMIT_SECONDS)
    limit = SLACK_SECONDS + 4 * baseline.seconds
    passed = sum(baseline.cases.values())
    for mode in modes:
        first = runner.run(suite, unit, mode, limit)
        missing = lost(baseline, first)
        bad = {name: 1 for name in missing}
        bad_on_kernel = dict.fromkeys(missing, 0)
        logs = [first.log]
        for _ in range(REPEATS if missing else 0):
            again, kernel = runner.run(suite, unit, mode, limit), runner.run(suite, unit, KERNEL, limit)
            logs.append(again.log)
            for name in missing:
                bad[name] += not again.cases.get(name)
                bad_on_kernel[name] += not kernel.cases.get(name)
        different = [name for name in missing if not bad_on_kernel[name] and bad[name] * 2 > REPEATS]
        flaky = [name for name in missing if name not in different]
        row = Row(suite.name, unit, mode, len(baseline.cases), passed, passed - len(missing), len(flaky), len(different), first.moved, first.seconds)
        notes = []
        for name in missing:
            word = "DIFFERENT" if name in different else "flaky"
            told = f"ringlet failed {bad[name]} of {REPEATS + 1}, kernel {bad_on_kernel[name]} of {REPEATS}"
            notes.append(f"    {word} {name}: {told}\n{why(logs[0], name)}")
        report(row, notes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE[:UNIT]", help=f"default: {' '.join(SUITES)}")
    parser.add_argument("--mode", choices=[PLAIN, UNFORGIVING, "both"], default="both")
    parser.add_argument("--quick", action="store_true", help="only those units that tell most in little time")
    parser.add_argument("--jobs", type=int, default=2, help="units at a time")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 32), help="of the unforgiving mode")
    harness.add_mirror(parser)
    parser.add_argument("--sources", type=pathlib.Path, help="where sources are kept (default: beside the command)")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    modes = [PLAIN, UNFORGIVING] if arguments.mode == "both" else [arguments.mode]
    wanted = {}
    for word in arguments.suites or SUITES:
        name, _, unit = word.partition(":")
        if name not in SUITES:
            parser.error(f"no suite {name}; there are: {' '.join(SUITES)}")
        wanted.setdefault(name, []).extend([unit] if unit else [])
    print(f"seed {arguments.seed}", flush=True)
    harness.adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))
    directory.chmod(0o755)
    rows, missing = [], []

    def report(row, notes):
        rows.append(row)
        print(f"{row.suite:10}{row.mode:12}{row.unit:38}{row.here:5} of {row.passed:5}{row.moved:7} ends on the ring{row.seconds:7.1f} s", flush=True)
        for note in notes:
            print(note, flush=True)

    try:
        sources = Sources(arguments.sources or pathlib.Path(arguments.ringlet).resolve().parent.parent / "suites")
        runner = Runner(Ringlet(arguments.ringlet, directory, arguments.mirror), directory, arguments.seed)
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            work = []
            for name, units in wanted.items():
                try:
                    suite = SUITES[name](sources)
                except (Skipped, OSError, subprocess.SubprocessError) as problem:
                    missing.append(f"{name}: {problem}")
                    continue
                for unit in units or (suite.QUICK if arguments.quick else suite.units):
                    work.append(pool.submit(examine, runner, suite, unit, modes, report))
            for one in work:
                one.result()
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        left = harness.end_orphans()
        shutil.rmtree(directory, ignore_errors=True)
    total = collections.defaultdict(lambda: [0] * 6)
    for row in rows:
        total[row.suite, row.mode] = [
            a + b for a, b in zip(total[row.suite, row.mode], (row.tests, row.passed, row.here, row.flaky, row.different, row.moved))
        ]
    print("\n{:10}{:13}{:>8}{:>8}{:>9}{:>7}{:>11}{:>18}".format("suite", "mode", "tests", "kernel", "ringlet", "flaky", "different", "ends on the ring"))
    for (name, mode), figures in sorted(total.items()):
        print("{:10}{:13}{:8}{:8}{:9}{:7}{:11}{:18}".format(name, mode, *figures))
    for one in missing:
        print(f"missing: {one}")
    for one in left:
        print(f"left behind: {one}")
    idle = [f"{name}, {mode}" for (name, mode), figures in total.items() if figures[-1] == 0]
    for one in idle:
        print(f"no connection used the ring: {one}")
    if not rows:
        sys.exit(77)
    sys.exit(bool(left or idle or any(row.different for row in rows)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
