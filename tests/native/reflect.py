"""Reflective memory from C: the calls of ringlet_reflect, the example, and what is hard for it: many regions, no memory, setuid programs,
strangers' names."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys

from harness import ROOT, Process, require, status_word, wait_until

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "faults"))
import limits  # noqa: E402

SECONDS = 240
USER, STRANGER = 12345, 65534
CHECKS = {}
ONLY_ROOT = "  (as root only: there is no other user to be)"


def check(function):
    CHECKS[f"reflect_{function.__name__}"] = function
    return function


class Programs:
    """What is run, where it looks for a keeper at `socket`, or for its user's."""

    def __init__(self, place, socket=None, prefix=()):
        self.place, self.prefix = place, [str(word) for word in prefix]
        self.ringlet = place.root / "usr/bin/ringlet"
        self.environment = {**place.environment, "PATH": f"{place.root}/usr/bin:{os.environ['PATH']}"}
        self.environment.pop("RINGLET_REFLECT", None)
        if socket:
            self.environment["RINGLET_REFLECT"] = str(socket)

    def argv(self, program, words, user):
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user is not None else []
        return [*self.prefix, *as_user, str(program), *map(str, words)]

    def start(self, program, *words, user=None):
        return Process(self.argv(program, words, user), str(self.place.directory), env=self.environment)

    def actor(self, *words, user=None):
        return self.start(actor_of(self.place), *words, user=user)

    def ends(self, process, expected="ok\n"):
        try:
            ended = process.wait(SECONDS)
            said = process.finished_output().decode()
            require(ended == 0 and said.endswith(expected), f"{status_word(ended)}: {said}{process.tail()}{process.where()}")
            return said
        finally:
            process.kill()

    @contextlib.contextmanager
    def open(self, user=None, program=None):
        """A program that stays until it is let go; how many were there before."""
        process = self.start(program or actor_of(self.place), "open", "stay", user=user)
        try:
            line = process.line(SECONDS)
            require(line and line.startswith("open "), f"{line} {process.tail()}")
            yield int(line.split()[1])
        finally:
            process.kill()

    @contextlib.contextmanager
    def keeper(self, *words, user=None):
        process = self.start(self.ringlet, "reflect", "keep", *words, user=user)
        try:
            require(process.line(SECONDS) == "ready", process.tail())
            yield process
        finally:
            process.kill()


def actor_of(place):
    actor = place.directory / "reflect_actor"
    if not actor.exists():
        place.compile(["cc", "-std=c99", "-D_GNU_SOURCE"], ROOT / "tests/native/reflect_actor.c", actor, ["--cflags", "--libs"])
        place.directory.chmod(0o755)
    return actor


@contextlib.contextmanager
def kept(place, *words):
    """Programs, and a keeper for all users that they find."""
    socket = place.directory / "reflect.sock"
    programs = Programs(place, socket)
    with programs.keeper("--path", socket, *words) as keeper:
        programs.pid = keeper.pid
        yield programs


@check
def calls(place):
    """Each call, and each way in which it fails: its number, and words that name the call and the cause; from C and from C++."""
    place.compile(["c++", "-x", "c++", "-fpermissive", "-w"], "reflect.c", place.directory / "reflect_cpp", ["--cflags", "--libs"])
    with kept(place, "--all", 10, "--received", 8) as programs:
        programs.ends(programs.actor("api", place.directory / "nowhere.sock"))
        outlives = programs.actor("outlives")
        require(outlives.line(SECONDS) == "ready", outlives.tail())
        os.kill(programs.pid, signal.SIGKILL)
        programs.ends(outlives)


@check
def example(place):
    """Three writers and two readers of a board, the C example in both languages: every reader sees it to its end."""
    with kept(place) as programs:
        cpp, c = place.directory / "reflect_cpp", place.c / "reflect"
        if not cpp.exists():
            cpp = c
        readers = [programs.start(program, "read", 7, 3000) for program in (c, cpp)]
        for reader in readers:
            require(reader.line(SECONDS) == "reading", reader.tail())
        for writer in [programs.start(program, "write", 7, 1000) for program in (c, cpp, c)]:
            programs.ends(writer, "1000 written\n")
        for reader in readers:
            programs.ends(reader, "3000 read\n")


@check
def many_regions(place):
    """Ten thousand, or as many as a keeper's descriptors are for: they are made, written and read, shown as far as an answer holds them, and all
    given back; one more is refused in words."""
    if os.geteuid() != 0:
        print("  (as root only: others may have a quarter)")
        return
    with kept(place) as programs:
        # (Half of its descriptors, four each; see keeper.rs.)
        most = min(16_384, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 64) // 4)
        programs.ends(programs.actor("many", min(10_000, most), int(most <= 10_000)))
        print(f"  {min(10_000, most)} regions")
        ls = ["reflect", "ls", "--json"]
        wait_until(lambda: '"regions": []' in programs.ends(programs.start(programs.ringlet, *ls), "}\n"), SECONDS, "all to be given back")


@check
def no_memory(place):
    """A region for which a program's control group has no memory is refused when it is attached, and nobody is killed for it."""
    if os.geteuid() != 0:
        print("  (as root only: control groups)")
        return
    with kept(place) as programs, limits.group() as group:
        group.limit(96 << 20)
        inside = ["sh", "-c", f'echo $$ > {group.place}/cgroup.procs; exec "$@"', "sh"]
        limited = Programs(place, place.directory / "reflect.sock", inside)
        limited.ends(limited.actor("large", 32 << 20, "fits"))
        limited.ends(limited.actor("large", 256 << 20, "fails"))
        programs.ends(programs.actor("large", 256 << 20, "fits"))


@check
def setuid_programs(place):
    """A program with more rights than who starts it takes no name of a keeper from him, nor a program to start; and it is its own user."""
    if os.geteuid() != 0:
        print(ONLY_ROOT)
        return
    setuid, fake = place.directory / "reflect_setuid", place.directory / "fake"
    fake.mkdir(exist_ok=True)
    # (The loader takes no path for libraries from who starts it either.)
    flags = ["-Wl,-rpath," + str(place.root / "usr/lib")]
    place.compile(["cc", "-std=c99", "-D_GNU_SOURCE", *flags], ROOT / "tests/native/reflect_actor.c", setuid, ["--cflags", "--libs"])
    os.chown(setuid, USER, USER)
    setuid.chmod(0o4755)
    (fake / "ringlet").write_text(f"#!/bin/sh\ntouch {fake}/was_run\n")
    (fake / "ringlet").chmod(0o755)
    fake.chmod(0o777)
    with namespace(place) as inside:
        hostile = Programs(place, place.directory / "stranger.sock", inside)
        hostile.environment["PATH"] = f"{fake}:{os.environ['PATH']}"
        # None is there: it looks for its own user's, and starts none.
        said = hostile.ends(hostile.start(setuid, "refused", user=STRANGER), "\n")
        require("no keeper" in said and not (fake / "was_run").exists(), said)
        own = Programs(place, prefix=inside)
        with own.keeper(user=USER):
            said = hostile.ends(hostile.start(setuid, "open", user=STRANGER), "\n")
            require(f"as user {USER}" in said, said)
            # Who starts it is nobody there.
            said = own.ends(own.start(actor_of(place), "refused", user=STRANGER), "\n")
            require(f"as user {USER}" not in said, said)


@contextlib.contextmanager
def namespace(place):
    """A network of its own, where names are free; what goes before a command to run there."""
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo ready; exec sleep 1000"], stdout=subprocess.PIPE, text=True)
    try:
        require(holder.stdout.readline() == "ready\n", "no network namespace")
        yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        # (Those that programs have started end behind them.)
        wait_until(lambda: not any(is_keeper(path, place) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")), SECONDS, "keepers to end")
    finally:
        holder.kill()
        holder.wait()


@check
def names_of_strangers(place):
    """A stranger who has a user's name keeps nobody out; and when he goes there is still one keeper."""
    if os.geteuid() != 0:
        print(ONLY_ROOT)
        return
    actor_of(place)
    with namespace(place) as inside:
        programs = Programs(place, prefix=inside)
        squatter = programs.actor("squats", USER, user=STRANGER)
        try:
            require(squatter.line(SECONDS) == "ready", squatter.tail())
            with programs.open(user=USER) as first, programs.open(user=USER) as second:
                require((first, second) == (0, 1), f"{first} {second}")
                squatter.kill()
                # (The plain name is free now, but there is one already.)
                with programs.open(user=USER) as third:
                    require(third == 2, f"{third}")
                refused = programs.start(programs.ringlet, "reflect", "keep", user=USER)
                require(refused.wait(SECONDS) == 1 and "can't listen" in refused.tail(), refused.tail())
                refused.kill()
        finally:
            squatter.kill()


@check
def keepers_affinity(place):
    """A keeper runs wherever it may, not only where the program runs that happened to start it."""
    actor_of(place)
    if len(os.sched_getaffinity(0)) < 2:
        print("  (one processor)")
        return
    with namespace(place) as inside:
        programs = Programs(place, prefix=[*inside, "taskset", "-c", "0"])
        with programs.open():
            rows = [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if is_keeper(path, place)]
            require(len(rows) == 1, f"{rows}")
            status = rows[0].with_name("status").read_text()
            allowed = next(line.split(":")[1].strip() for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
            require(allowed != "0", f"processors {allowed}")


def is_keeper(path, place):
    with contextlib.suppress(OSError):
        words = path.read_bytes().split(b"\0")
        return words[0].startswith(str(place.directory).encode()) and words[1:3] == [b"reflect", b"keep"]
