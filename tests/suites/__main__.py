"""CPython's own tests, on the kernel and then under ringlet: a test that passes there must pass here.

    python3 tests/suites [--python PATH]... [--mode plain|unforgiving|both] [--quick] [--mirror SEED | --hosts SEED] [TEST]...

TEST is a module such as test_socket, or the full name of a test such as test.test_socket.BasicTCPTest.testRecv. Each module runs in a
network namespace of its own; its first run, on the kernel, is the measure of the others. A test that passes there and not
under ringlet is repeated on both sides, alone and with its class, to tell what is different from what is flaky.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import harness  # noqa: E402
from harness import ROOT, Failed, Ringlet  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
QUICK = (
    "test_socket test_selectors test_epoll test_select test_poll test_socketserver test_httpservers test_smtplib test_asynchat"
).split()
MODULES = QUICK + (
    "test_asyncio test_ssl test_ftplib test_httplib test_asyncore test_telnetlib "
    "test_poplib test_imaplib test_urllib2_localnet test_xmlrpc test_multiprocessing_fork test_multiprocessing_spawn "
    "test_multiprocessing_forkserver test_subprocess test_logging test_signal test_os test_io test_concurrent_futures "
    "test_smtpd test_nntplib test_docxmlrpc test_wsgiref test_posix test_pty test_fork1 test_eintr test_fcntl test_threading"
).split()
KERNEL, PLAIN, UNFORGIVING = "kernel", "plain", "unforgiving"
ALONE, WITH_CLASS = 3, 2  # repetitions of a difference
RESTARTS = 8  # of a module in which a test hung or died
BASELINE_STALL_SECONDS = 300
STALL_SECONDS = 150  # beyond four times what the test takes on the kernel
TRACE_SECONDS = 2
WHY_LINES = 25

# Where SPECIFICATION.md says that ringlet differs: mode, end of the test's name, and what it is.
DECLARED = [
    (
        UNFORGIVING,
        "WithProcessesTestPicklingConnections.test_pickling",
        "a connection is passed on with bytes unread whose sender has closed (processes/exec_unread_after_close)",
    ),
]

Ended = collections.namedtuple("Ended", "result seconds why")


class Python:
    """One interpreter, with the tests that it has."""

    def __init__(self, path):
        self.path = str(path)
        ask = (
            "import json, os, sys, test\n"
            "here = os.path.dirname(test.__file__)\n"
            "print(json.dumps([sys.version.split()[0], sorted(name.split('.')[0] for name in os.listdir(here))]))"
        )
        done = subprocess.run([self.path, "-c", ask], capture_output=True, text=True, timeout=harness.CLIENT_SECONDS)
        self.version, has = json.loads(done.stdout) if done.returncode == 0 else ("?", [])
        self.has_tests = "test_socket" in has
        self.modules = [name for name in MODULES if name in has]

    @property
    def minor(self):
        return self.version.rpartition(".")[0]


def found_pythons():
    """The system's Python, and another version: the newest that has its tests."""
    system = Python("/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable)
    if not system.has_tests:
        print(f"missing: the tests of {system.path} {system.version} (Debian package libpython{system.minor}-testsuite)")
    places = [*pathlib.Path("/usr/bin").glob("python3.[0-9]*[0-9]")]
    places += pathlib.Path.home().glob(".pyenv/versions/3.*/bin/python3")
    others = [other for other in map(Python, places) if other.has_tests and other.minor != system.minor]
    others.sort(key=lambda other: [int(part) for part in other.version.split(".") if part.isdigit()])
    if not others:
        print("missing: a second version of Python with its tests (pyenv installs them)")
    return [one for one in [system, *others[-1:]] if one.has_tests]


class Suites:
    def __init__(self, ringlet, directory, seed, logs):
        self._ringlet, self._directory, self._seed, self._logs = ringlet, directory, seed, logs
        self._numbers = itertools.count()
        self.stopping = False

    def _argv(self, python, mode, place, names):
        argv = [python.path, str(HERE / "collect.py"), str(place / "results"), *names]
        if mode != KERNEL:
            argv = self._ringlet.wrap(argv, place / "moves", ["--unforgiving", str(self._seed)] if mode == UNFORGIVING else [])
        return [sys.executable, str(HERE / "inside.py"), *argv]

    def _once(self, python, mode, names, limits):
        """One process. Returns how each test ended, and how many ends of connections used the ring."""
        if self.stopping:
            raise Failed("stopped")
        place = self._directory / str(next(self._numbers))
        work = place / "w"
        work.mkdir(parents=True)
        (place / "moves").touch()
        for path in (place, work, place / "moves"):
            path.chmod(0o777)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGLET_")}
        environment.update(TMPDIR=str(work), LC_ALL="C.UTF-8", RINGLET_CONFIG=os.devnull)
        results = Results(place / "results")
        with open(place / "log", "wb") as log:
            process = subprocess.Popen(
                self._argv(python, mode, place, names),
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                while process.poll() is None:
                    time.sleep(0.05)
                    results.read()
                    if results.quiet_seconds() > limits(results.current):
                        results.stalled = True
                        end(process)
            finally:
                if process.poll() is None:
                    end(process)
        results.read()
        log = (place / "log").read_text(errors="replace")
        results.close(process.returncode, log)
        moved = self._ringlet.moved(place / "moves")
        if self._logs:
            name = f"{python.version}-{names[0]}-{mode}-{place.name}.log"
            (self._logs / name).write_text(log + "\n" + (place / "results").read_text())
        shutil.rmtree(place, ignore_errors=True)
        return results.ended, moved

    def run(self, python, mode, names, baseline=None):
        """All tests of `names`; where one hangs or dies, the rest is run without it."""

        def limits(test):
            if baseline is None:
                return BASELINE_STALL_SECONDS
            return STALL_SECONDS + 4 * (baseline[test].seconds if test in baseline else 0)

        ended, moved = self._once(python, mode, names, limits)
        for _ in range(RESTARTS if baseline else 0):
            rest = [test for test, how in baseline.items() if test not in ended and how.result == "passed"]
            if not rest:
                break
            more, moved_more = self._once(python, mode, rest, limits)
            if not more:
                break
            ended.update(more)
            moved += moved_more
        return ended, moved


class Results:
    """What collect.py has written so far."""

    def __init__(self, path):
        self._path, self._read, self._last = path, 0, time.monotonic()
        self.ended, self.current, self.complete, self.stalled = {}, None, False, False

    def read(self):
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._last = time.monotonic()
                self._take(json.loads(line))

    def _take(self, line):
        if "begun" in line:
            self.current = line["begun"]
        elif "test" in line:
            before = self.ended.get(line["test"])
            if before is None or before.result != "failed":
                self.ended[line["test"]] = Ended(line["result"], line["seconds"], line["why"])
            self.current = None
        else:
            self.complete = True

    def quiet_seconds(self):
        return time.monotonic() - self._last

    def close(self, status, log):
        if not self.complete:
            how = "hung" if self.stalled else f"died with {harness.status_word(status)}"
            self.ended[self.current or "(before or after the tests)"] = Ended("failed", 0.0, f"{how}\n{log[-4000:]}")


def end(process):
    """Asks the tests where they are, then ends them with all that is below them."""
    below = harness.descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(below[-1], signal.SIGABRT)
    time.sleep(TRACE_SECONDS)
    process.terminate()
    try:
        process.wait(harness.STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Verdicts:
    """One module of one Python in one mode, against the kernel."""

    def __init__(self, suites, python, module, mode, baseline):
        self.python, self.module, self.mode = python, module, mode
        passed = {test for test, how in baseline.items() if how.result == "passed"}
        got, self.moved = suites.run(python, mode, [module], baseline)
        lost = sorted(test for test in passed if test not in got or got[test].result != "passed")
        self.tests, self.passed, self.passed_here = len(baseline), len(passed), len(passed) - len(lost)
        self.different, self.flaky, self.declared = [], [], []
        for test in lost:
            if known := [why for where, name, why in DECLARED if where == mode and test.endswith(name)]:
                self.declared.append((test, known[0]))
                continue
            self._repeat(suites, baseline, test, got.get(test, Ended("failed", 0.0, "did not run")))

    def _repeat(self, suites, baseline, test, first):
        times = [[test]] * ALONE + [[test.rpartition(".")[0]]] * WITH_CLASS if "(" not in test else []
        bad = dict.fromkeys((KERNEL, self.mode), 0)
        bad[self.mode] += 1
        why = first.why or first.result
        for names in times:
            for mode in bad:
                ended, _ = suites.run(self.python, mode, names, {test: baseline[test]})
                how = ended.get(test, Ended("failed", 0.0, "did not run"))
                bad[mode] += how.result != "passed"
                if mode == self.mode and how.result != "passed":
                    why = how.why or how.result
        row = (test, bad[self.mode], 1 + len(times), bad[KERNEL], 1 + len(times), why)
        real = bad[KERNEL] == 0 and bad[self.mode] * 2 >= 1 + len(times)
        (self.different if real else self.flaky).append(row)


def examine(suites, python, module, modes, report, deadline):
    if time.monotonic() > deadline:
        return f"{python.version} {module}"
    baseline, _ = suites.run(python, KERNEL, [module])
    for mode in modes:
        report(Verdicts(suites, python, module, mode, baseline))
    return None


def print_table(rows):
    titles = ("python", "mode", "module", "tests", "kernel", "ringlet", "flaky", "different", "ends on the ring")
    total = {}
    lines = []
    for row in sorted(rows, key=lambda row: (row.python.version, row.mode, MODULES.index(row.module) if row.module in MODULES else 99)):
        figures = [row.tests, row.passed, row.passed_here, len(row.flaky), len(row.different), row.moved]
        lines.append((row.python.version, row.mode, row.module, *figures))
        sums = total.setdefault((row.python.version, row.mode), [0] * len(figures))
        total[row.python.version, row.mode] = [a + b for a, b in zip(sums, figures)]
    lines += [(*key, "all", *figures) for key, figures in total.items()]
    print("\n" + "{:9}{:13}{:33}{:>7}{:>8}{:>9}{:>7}{:>11}{:>18}".format(*titles))
    for line in lines:
        print("{:9}{:13}{:33}{:7}{:8}{:9}{:7}{:11}{:18}".format(*line))
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="default: all of the modules that a Python has")
    parser.add_argument("--python", action="append", metavar="PATH", help="may be repeated (default: the system's and another)")
    parser.add_argument("--mode", choices=[PLAIN, UNFORGIVING, "both"], default="both")
    parser.add_argument("--quick", action="store_true", help=f"one Python, and only {' '.join(QUICK)}")
    parser.add_argument("--jobs", type=int, default=2, help="modules at a time")
    parser.add_argument("--minutes", type=int, default=180, help="after which no further module is begun")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 32), help="of the unforgiving mode")
    harness.add_mirror(parser)
    parser.add_argument("--logs", type=pathlib.Path, help="a directory that keeps what the tests wrote")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    modes = [PLAIN, UNFORGIVING] if arguments.mode == "both" else [arguments.mode]
    pythons = [Python(path) for path in arguments.python] if arguments.python else found_pythons()
    if without := [python.path for python in pythons if not python.has_tests]:
        parser.error(f"no tests: {', '.join(without)}")
    if not pythons:
        print("no Python has its tests: nothing was run")
        sys.exit(77)
    if arguments.quick:
        pythons = pythons[:1]
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    print(f"seed {arguments.seed}; " + ", ".join(f"{python.path} {python.version}" for python in pythons), flush=True)
    rows, not_run, lock = [], [], threading.Lock()
    deadline = time.monotonic() + 60 * arguments.minutes

    def report(row):
        with lock:
            rows.append(row)
            told = f"{row.passed_here} of {row.passed} tests that pass on the kernel, {row.moved} ends on the ring"
            print(f"{row.python.version:8}{row.mode:12}{row.module}: {told}", flush=True)
            for test, why in row.declared:
                print(f"    declared {test}: {why}")
            for kind, tests in (("DIFFERENT", row.different), ("flaky", row.flaky)):
                for test, bad, of, bad_on_kernel, of_kernel, why in tests:
                    print(f"    {kind} {test}: ringlet failed {bad} of {of}, kernel {bad_on_kernel} of {of_kernel}")
                    print("        " + "\n        ".join(why.rstrip().splitlines()[-WHY_LINES:]), flush=True)
                    if kind == "flaky" and not bad_on_kernel:
                        harness.flaky(f"{row.python.version} {row.mode} {test}")

    harness.adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        suites = Suites(Ringlet(arguments.ringlet, directory, arguments.mirror), directory, arguments.seed, arguments.logs)
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            work = []
            for python in pythons:
                chosen = [name for name in QUICK if name in python.modules] if arguments.quick else python.modules
                for module in arguments.tests or chosen:
                    work.append(pool.submit(examine, suites, python, module, modes, report, deadline))
            try:
                not_run = [one.result() for one in work if one.result()]
            except BaseException:
                suites.stopping = True
                harness.end_orphans()
                raise
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        left = harness.end_orphans()
        shutil.rmtree(directory, ignore_errors=True)
    total = print_table(rows)
    if left:
        print("left behind: " + ", ".join(left))
    idle = [f"Python {version}, {mode}" for (version, mode), figures in total.items() if figures[-1] == 0]
    for one in idle:
        print(f"no connection used the ring: {one}")
    if not_run:
        print(f"not run within {arguments.minutes} minutes: " + ", ".join(not_run))
    differences = sum(len(row.different) for row in rows)
    flaky = sum(len(row.flaky) for row in rows)
    declared = sum(len(row.declared) for row in rows)
    print(f"{differences} different, {declared} declared, {flaky} flaky")
    sys.exit(bool(differences or idle or left or not_run))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
