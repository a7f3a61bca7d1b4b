"""Runs real programs, wrapped in ringlet or not, and puts every one of them away again.

A check runs in four modes, so that a failure says by itself where to look: `baseline` (nothing wrapped: the check and
the program), `server` and `client` (one end wrapped: the shim on plain TCP) and `both` (the ring). Every wait has a
bound, every process is ended by its own pid, every port comes from the kernel.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import pwd
import queue
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODES = {"baseline": (), "both": ("server", "client"), "server": ("server",), "client": ("client",)}

# Bounds, which only a fault meets: the machine may have other work.
START_SECONDS = 120  # for a program to listen
STOP_SECONDS = 60  # for a program to end after SIGTERM
CLIENT_SECONDS = 240  # for a client to do its work
RING_SECONDS = 60  # for connections that are held open and busy to be on the ring
WATCH_INTERVAL_SECONDS = 0.03
START_ATTEMPTS = 4  # another program may take a port between our asking for it and its use
LOG_TAIL_BYTES = 2_000


# Mirrors ringlet/src/handshake.rs: the frame of every introduction. (`VERSION` is compared with the layout's by ringlet-core/tests/mirror.rs.)
FRAME_MAGIC = int.from_bytes(b"rnglmeet", "little")
FRAME_HEAD_BYTES = 16
VERSION = 11
CONNECTION, DATAGRAMS, NATIVE, ACTIVE_MESSAGES = 1, 2, 3, 4


def frame(protocol, kind, fields, magic=FRAME_MAGIC, version=VERSION):
    return struct.pack("<QIHH", magic, version & 0xFFFFFFFF, protocol & 0xFFFF, kind & 0xFFFF) + fields


def framed(data, protocol):
    """The kind of a frame, and its fields."""
    require(len(data) >= FRAME_HEAD_BYTES, f"a frame of {len(data)} bytes")
    magic, version, whose, kind = struct.unpack_from("<QIHH", data)
    require((magic, version, whose) == (FRAME_MAGIC, VERSION, protocol), "a frame of nobody's")
    return kind, data[FRAME_HEAD_BYTES:]


class Failed(Exception):
    """A check found something wrong."""


class Skipped(Exception):
    """A check can't be made on this machine."""


class NotThis(Exception):
    """Another scene than the one that is played once more."""


def require(condition, message):
    if not condition:
        raise Failed(message)


def wait_until(condition, seconds, what):
    """Polls `condition` until it returns something true; fails with `what` (or what that says then) after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise Failed(f"waited {seconds} s for {what() if callable(what) else what}")
        time.sleep(0.01)
    return value


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_address():
    """Where servers listen: on this machine, or on a host of their own."""
    return os.environ.get("SERVER_ADDRESS", "127.0.0.1")


def listening(port, protocol="tcp", pid="self"):
    """Whether somebody listens on `port` where this process is, without connecting: many programs here serve the first comer only."""
    wanted, state = f":{port:04X}", {"tcp": "0A", "udp": "07"}[protocol]
    for table in (protocol, f"{protocol}6"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/net/{table}") as lines:
            for line in lines:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == state:
                    return True
    return False


# A scene that fails is played once more where all of them are run (tests/run sets this); whoever runs one of them wants to see how it fails.
PLAYED_ONCE_MORE = bool(os.environ.get("RETRY_FAILED"))


def flaky(name):
    """What has failed has passed when it was played once more. (tests/run collects these lines.)"""
    print(f"flaky: {name}", flush=True)


def has_failed(name, play):
    """`play` plays a scene, tells of it, and says whether it failed; here whether it has failed for good."""
    if not play():
        return False
    if not PLAYED_ONCE_MORE or play():
        return True
    flaky(name)
    return False


def leave_block():
    """The block whose manager is being entered runs none of its body, but leaves it by `NotThis`. (A manager can't say so, but a trace can: it is called
    before the block's next line, and before whatever other manager's call stands in the same line.)
    """

    def leave(*_):
        raise NotThis

    frame = sys._getframe()
    while frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    frame.f_trace = leave
    try:
        sys.settrace(leave)
        yield
    except NotThis:
        # (One that has raised is called no more.)
        pass


# Processes.


def descendants(pid):
    """The pids below `pid`, children before their parents, zombies included."""
    children = collections.defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = pathlib.Path("/proc", entry, "stat").read_text(errors="replace")
                children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    found, level = [], [pid]
    while level:
        level = [child for parent in level for child in children[parent]]
        found = level + found
    return found


def adopt_orphans():
    """Makes this process the parent of whatever its descendants leave behind, so that nothing can hide from it."""
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def name_of(pid):
    """A zombie has one too."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()


def command_of(pid):
    """Nothing of one that has ended, or is a zombie."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def end_orphans():
    """Ends and names whatever is still below this process when nothing should be."""
    left = []
    for pid in descendants(os.getpid()):
        if command := command_of(pid):
            left.append(f"{pid} ({command[:80]})")
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return left


class Process:
    """A started program: its output goes to files, its lines of standard output can be awaited."""

    def __init__(self, argv, directory, env=None, user=None, stdin=subprocess.PIPE, stderr=None):
        self.name = os.path.basename(argv[argv.index("--") + 1] if "run" in argv and "--" in argv else argv[0])
        self._log = tempfile.NamedTemporaryFile(dir=directory, prefix=f"{self.name}-", suffix=".log", delete=False)
        self._lines = queue.SimpleQueue()
        self._output = bytearray()
        self._popen = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._log if stderr is None else stderr,
            cwd=directory,
            env={**os.environ, **(env or {})},
            user=user,
            group=None if user is None else pwd.getpwnam(user).pw_gid,
            extra_groups=None if user is None else [],
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._popen.stdout:
            self._output += line
            self._lines.put(line)

    def line(self, seconds):
        """The next line of standard output, or None when none came in time."""
        try:
            return self._lines.get(block=seconds > 0, timeout=seconds or None).decode(errors="replace").rstrip("\n")
        except queue.Empty:
            return None

    def write(self, text):
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(text.encode())
            self._popen.stdin.flush()

    def poll(self):
        return self._popen.poll()

    def send(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds):
        """The exit status, or None when it did not end in time."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def finished_output(self):
        self._reader.join(STOP_SECONDS)
        return bytes(self._output)

    def tail(self):
        log = pathlib.Path(self._log.name).read_bytes() + bytes(self._output)
        return log[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def where(self):
        """What each of its threads waits for: the first question after a hang."""
        found = []
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(OSError):
                for task in sorted(pathlib.Path(f"/proc/{pid}/task").glob("*")):
                    call = (task / "syscall").read_text().split()
                    name, wchan = (task / "comm").read_text().strip(), (task / "wchan").read_text()
                    found.append(f"{task.name} {name}: system call {call[0]} on {call[1:2]}, in {wchan}")
        return "\n".join(found)

    def stop(self, number=signal.SIGTERM):
        """Ends it and all below it; tells whether it ended when asked."""
        self.send(number)
        asked = self.wait(STOP_SECONDS) is not None
        self.kill()
        return asked

    def kill(self):
        below = descendants(self.pid) if self.poll() is None else []
        for pid in [self.pid, *below]:
            if pid != self.pid or self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait(STOP_SECONDS)
        # (KERNEL: who is killed is there until its memory is freed.)
        deadline = time.monotonic() + STOP_SECONDS
        while any(command_of(pid) for pid in below) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._reader.join(STOP_SECONDS)
        streams = [self._popen.stdin, self._log]
        if not self._reader.is_alive():  # or something else holds the other end, and closing would wait for it
            streams.append(self._popen.stdout)
        for stream in streams:
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def status_word(status):
    if status is None:
        return "did not end"
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


# The command under test.


def add_mirror(parser):
    """`arguments.mirror` is what `ringlet run` is told."""
    for name, over in (("--mirror", "an adapter"), ("--hosts", "what carries between two hosts, in one adapter,")):
        help = f"both ends over {over} by this seed (see `ringlet run`)"
        parser.add_argument(name, dest="mirror", type=lambda seed, name=name: [name, str(int(seed))], metavar="SEED", help=help)


class Ringlet:
    """The real command and library, copied where any user can read them: servers drop to other users.

    With a `mirror` (`add_mirror`) all is run over an adapter by its seed; to be used in a network namespace of its own, where that is nobody else's.
    """

    # Ends that a node service carries are mirrored too.
    carried = False
    # Hosts, where servers and clients are apart (`Between` of between.py).
    between = None

    def __init__(self, command, directory, mirror=None):
        self.mirror = mirror
        command = pathlib.Path(command).resolve()
        libraries = [command.parent / f"lib{name}.so" for name in ("ringlet_preload", "ringlet_native", "imc")]
        for path in (command, *libraries):
            if not path.exists():
                raise Failed(f"{path} does not exist: run `make build` first")
        place = pathlib.Path(directory, "bin")
        place.mkdir(mode=0o755)
        for path in libraries:
            shutil.copy2(path, place)
        self.command = shutil.copy2(command, place)

    def wrap(self, argv, moves=None, keys=()):
        """`moves`: a file where each end of a connection that comes to use the ring is noted."""
        keys = [*(["--moves", str(moves)] if moves else []), *(self.mirror or []), *keys]
        return [str(self.command), "run", *keys, "--", *argv]

    def moved(self, moves, within_a_host=False):
        """How many ends were noted there. None may have come to use the ring otherwise than it is to; but some, which are not counted, if both their ends are on
        one host of two.
        """
        lines = pathlib.Path(moves).read_bytes().splitlines()
        how = b"moved" if self.mirror is None and not self.carried and not self.between else b"mirrored"
        if within_a_host:
            lines = [line for line in lines if line != b"moved"]
        require(set(lines) <= {how}, f"of {len(lines)} ends that use the ring {lines.count(how)} do so by what is {how.decode()}")
        return len(lines)

    def until_no_adapter(self):
        """Adapters, which nobody else waits for, end by themselves and well, behind their last program and its last connection."""
        for pid in descendants(os.getpid()) if self.mirror is not None else []:
            if name_of(pid) == "ringlet":
                _, status = wait_until(lambda: done if (done := os.waitpid(pid, os.WNOHANG))[0] else None, STOP_SECONDS, "an adapter's end")
                require(status == 0, f"an adapter: {status_word(os.waitstatus_to_exitcode(status))}")

    def connections(self, port):
        """Every connection of every ringlet process with `port` (or the path of a Unix socket) at either end, as `ringlet ss` tells it."""
        argv = [self.command, "ss", "--json", *(["--port", str(port)] if isinstance(port, int) else [])]
        done = subprocess.run(argv, capture_output=True, timeout=CLIENT_SECONDS)
        # 1: something of another program could not be seen.
        if done.returncode not in (0, 1):
            raise Failed(f"ringlet ss --json: {status_word(done.returncode)}\n{done.stderr.decode(errors='replace')}")
        rows = json.loads(done.stdout)["connections"]
        return [row for row in rows if is_at(row["local"], port) or is_at(row["peer"], port)]

    def own_connections(self, port):
        """Those of this test's programs: in another network namespace a test beside this one may have the same port."""
        ours = set(descendants(os.getpid()))
        return [row for row in self.connections(port) if row["pid"] in ours]


# Checks.

Outcome = collections.namedtuple("Outcome", "program mode check result seconds detail")
LEAVES_NOTHING = ": leaves no process"


def play_once_more(outcomes, began, play):
    """Each check that has failed, of the outcomes from the place `began` on, is played once more by `play(name)`, which adds what comes of it. That counts."""

    def name_of(outcome):
        return outcome.check.removesuffix(LEAVES_NOTHING)

    failed = {name_of(each): each for each in outcomes[began:] if each.result == "failed"}
    for name, first in failed.items() if PLAYED_ONCE_MORE else ():
        before = len(outcomes)
        play(name)
        again = outcomes[before:]
        if again:
            outcomes[began:before] = [each for each in outcomes[began:before] if name_of(each) != name]
        if again and all(each.result == "passed" for each in again):
            flaky(f"{first.program}, {first.mode}: {name}")


class Test:
    """One program in one mode."""

    def __init__(self, program, mode, directory, ringlet, seed, report, limit=CLIENT_SECONDS):
        self.program, self.mode, self.directory, self.seed = program, mode, str(directory), seed
        self._ringlet, self._report, self._limit = ringlet, report, limit
        self._running = []
        # The check that is played once more, when others are not.
        self.only = None
        # An adapter serves one user's programs, and who is carried may be of the same only: a server under root stays root there.
        self.between = ringlet.between if mode == "both" else None
        self.mirrored = mode == "both" and (ringlet.mirror is not None or self.between is not None)
        self.random = random.Random(f"{seed}/{program}")

    @property
    def ringlet(self):
        return self._ringlet

    def address(self, role):
        """Where a server of this role listens."""
        return self.between.host(role).ip if self.between else server_address()

    def work(self, amount):
        """More of it where it goes faster, so that the program lives long enough to be looked at."""
        return amount * 5 if self.mode == "both" and not self.mirrored else amount

    def seconds(self):
        """For programs that work for a time."""
        return 3 if self.mode == "both" else 1

    # Starting.

    def _argv(self, role, argv, moves=None):
        argv = [str(word) for word in argv]
        roles = MODES[self.mode]
        # "between" is both at once (a proxy): wrapped when either would be.
        wrapped = bool(roles) if role == "between" else role in roles
        return self._ringlet.wrap(argv, moves) if wrapped else argv

    def start(self, role, argv, moves=None, **options):
        argv = self._argv(role, argv, moves)
        if self.between:
            argv = self.between.placed(role, argv, options.pop("user", None))
        process = Process(argv, self.directory, **options)
        self._running.append(process)
        return process

    @contextlib.contextmanager
    def server(self, argv_for_port, role="server", stop=signal.SIGTERM, finite=False, protocol="tcp", **options):
        """A program that listens on a port of ours; ends when the block is left, or with its client if `finite`."""
        for attempt in range(START_ATTEMPTS):
            port = free_port()
            process = self.start(role, argv_for_port(port), **options)
            process.port = port
            deadline = time.monotonic() + START_SECONDS
            while process.poll() is None and not listening(port, protocol, process.pid) and time.monotonic() < deadline:
                time.sleep(0.005)
            if process.poll() is None and listening(port, protocol, process.pid):
                break
            status = process.poll()
            self.put_away(process)
            if status is None or attempt == START_ATTEMPTS - 1:
                raise Failed(f"{process.name} did not listen ({status_word(status)})\n{process.tail()}")
        try:
            yield process
            status = process.wait(STOP_SECONDS) if finite else process.poll()
        finally:
            asked = process.stop(stop)
            self.put_away(process)
        require(status == (0 if finite else None), f"{process.name}: {status_word(status)}\n{process.tail()}")
        require(asked, f"{process.name} did not end when asked\n{process.tail()}")

    def put_away(self, process):
        process.kill()
        self._running.remove(process)

    def client(self, argv, role="client", ring=None, raw=False, stoppable=True, **options):
        """Runs a program to its end and returns its output, as bytes if `raw`.

        `ring=(port or path, count)` demands that when both ends are wrapped `count` connections to `port` come to use the ring, and
        that none ever does otherwise. A client that prints the line `hold` waits until that has been looked at.
        """
        if self.between and ring and isinstance(ring[0], str):
            raise Skipped("a Unix socket leads to no other host")
        moves = pathlib.Path(self.directory, "moves") if ring else None
        if moves:
            moves.write_bytes(b"")
            moves.chmod(0o666)
        process = self.start(role, argv, moves=moves, **options)
        watch = RingWatch(self._ringlet, self.mode, moves, *ring) if ring and self.mode != "baseline" else None
        deadline = time.monotonic() + self._limit
        try:
            while process.poll() is None:
                if process.line(WATCH_INTERVAL_SECONDS) == "hold":
                    if watch:
                        watch.hold()
                    process.write("go\n")
                    deadline = time.monotonic() + self._limit
                elif watch:
                    watch.watch(process, stoppable)
                if time.monotonic() >= deadline:
                    held = "\n".join(other.where() for other in self._running)
                    raise Failed(f"{process.name} did not end within {self._limit} s\n{process.tail()}\n{held}")
            got = process.poll()
            require(got == 0, f"{process.name}: {status_word(got)}\n{process.tail()}")
            if watch:
                watch.judge()
            output = process.finished_output()
            return output if raw else output.decode(errors="replace")
        finally:
            self.put_away(process)

    def peer_argv(self, function, *args):
        """The command that runs a function of a checks module in a Python process of its own."""
        module = pathlib.Path(function.__code__.co_filename).stem
        main = ROOT / "tests" / "programs"
        return [sys.executable, main, "peer", module, function.__name__, json.dumps(args)]

    def peer(self, function, *args, **options):
        """Runs `function(*args)` in a client process and returns what it returned."""
        return json.loads(self.client(self.peer_argv(function, *args), **options).splitlines()[-1])

    # Judging.

    @contextlib.contextmanager
    def check(self, name):
        if self.only not in (None, name):
            yield from leave_block()
            return
        started = time.monotonic()
        result, detail = "passed", ""
        try:
            yield
            for process in self._running:
                status = process.poll()
                require(status is None, f"{process.name} died: {status_word(status)}\n{process.tail()}")
        except Skipped as reason:
            result, detail = "skipped", str(reason)
        except (Failed, OSError, ValueError, LookupError, subprocess.SubprocessError) as problem:
            result, detail = "failed", str(problem) if isinstance(problem, Failed) else repr(problem)
        self._report(Outcome(self.program, self.mode, name, result, time.monotonic() - started, detail))

    def close(self):
        for process in list(self._running):
            self.put_away(process)


class Ground(Test):
    """Where scenes play; each ends with all of its programs put away."""

    def __init__(self, group, directory, options, *rest):
        super().__init__(group, "both", directory, *rest)
        self.options = options

    @contextlib.contextmanager
    def scene(self, name):
        if self.only not in (None, name):
            yield from leave_block()
            return
        try:
            with self.check(name):
                yield
        finally:
            self.close()
            if left := end_orphans():
                self._report(Outcome(self.program, self.mode, name + LEAVES_NOTHING, "failed", 0.0, str(left)))


def scenes_parser(description, groups):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(groups)} (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of everything that is random")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    return parser


def scenes_options(parser, groups):
    options = parser.parse_args()
    if unknown := set(options.groups) - set(groups):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    options.groups = options.groups or groups
    return options


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def needs_root_and(tools, what):
    """Scenes that only root can play, with these programs."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        skip(f"only root makes {what}")


def play(name, options, make=Ground):
    """Plays the scenes of each group, which is a module of that name; returns the exit status."""
    outcomes = []

    def report(outcome):
        outcomes.append(outcome)
        print(f"{outcome.result:8}{outcome.program:11}{outcome.seconds:6.1f} s  {outcome.check}", flush=True)
        if outcome.detail:
            print("    " + outcome.detail.replace("\n", "\n    "), flush=True)

    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    # What this machine is configured to do is not what is tested.
    os.environ["RINGLET_CONFIG"] = "/dev/null"
    adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"ringlet-{name}-"))
    directory.chmod(0o755)
    try:
        ringlet = Ringlet(options.ringlet, directory)
        for group in options.groups:
            first = len(outcomes)

            def scenes(only=None, group=group):
                place = directory / group
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                place.chmod(0o777)
                ground = make(group, place, options, ringlet, options.seed, report)
                ground.only = only
                try:
                    importlib.import_module(group).scenes(ground)
                finally:
                    ground.close()

            scenes()
            play_once_more(outcomes, first, scenes)
    except Failed as problem:
        sys.exit(str(problem))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        counts = collections.Counter(outcome.result for outcome in outcomes)
        told = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        print(f"seed {options.seed}, {time.monotonic() - began:.0f} s: {told}")
        for outcome in outcomes:
            if outcome.result != "passed":
                print(f"    {outcome.result} {outcome.program}: {outcome.check}")
    return counts["failed"] > 0


def is_at(end, place):
    """Has this end of a connection the port or path? (Of a peer that has gone nothing is known.)"""
    return end is not None and place in (end.get("port"), end.get("unix"))


class RingWatch:
    """Looks at `ringlet ss` while a client runs, and at what it has noted behind that: on a busy machine looks are few."""

    def __init__(self, ringlet, mode, moves, port, count):
        self._ringlet, self._moves, self._port = ringlet, moves, port
        # (Between hosts some rest before both services have brought their ends together.)
        self._wanted = (1 if ringlet.between else count) if mode == "both" else 0
        self._most = 0
        self._seen = collections.Counter()
        self._next = 0.0

    def watch(self, client, stoppable):
        """Now and then, while the client runs; stopped meanwhile if it bears that, lest it ends before it was looked at."""
        if time.monotonic() < self._next or self._satisfied():
            return
        began = time.monotonic()
        if self._wanted and stoppable:
            client.send(signal.SIGSTOP)
        try:
            self._look()
        finally:
            client.send(signal.SIGCONT)
        # A busy machine looks slowly, and the client is to run in between, longer than it stands.
        self._next = time.monotonic() + max(WATCH_INTERVAL_SECONDS, 2 * (time.monotonic() - began))

    def hold(self):
        """While the client holds its connections for us."""
        deadline = time.monotonic() + RING_SECONDS
        self._look()
        while self._wanted and not self._satisfied() and time.monotonic() < deadline:
            time.sleep(WATCH_INTERVAL_SECONDS)
            self._look()

    def _satisfied(self):
        return self._wanted and self._most >= self._wanted

    def _look(self):
        ends = self._ringlet.connections(self._port)
        # A connection with both ends wrapped is counted once, at its server.
        counted = [row for row in ends if is_at(row["local"], self._port)] if self._wanted else ends
        on_ring = sum(row["path"] == "ring" for row in counted)
        if ends and on_ring >= self._most:
            self._most = on_ring
            self._seen = collections.Counter(f"{row['path']} ({row['reason']})" for row in ends)

    def judge(self):
        seen = ", ".join(f"{count} {what}" for what, count in self._seen.items()) or "none"
        if self._wanted:
            moved = self._ringlet.moved(self._moves)
            expected = f"{self._wanted} connections expected on the ring; {moved} ends of the client's came there; best seen: {seen}"
            # (Over a mirror that is known of those that were noted.)
            most = self._most if self._ringlet.mirror is None and not self._ringlet.between else 0
            require(max(moved, most) >= self._wanted, expected)
        else:
            require(self._most == 0, f"one end is not wrapped, yet connections are on the ring: {seen}")


def hold():
    """Called by a peer function: keeps its connections as they are until they have been looked at."""
    print("hold", flush=True)
    sys.stdin.readline()


def needs(*commands):
    """Skips unless every command is there."""
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
