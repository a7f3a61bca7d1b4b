"""The native library as a user has it: installed, found by pkg-config, compiled against, and run by two processes.

    python3 tests/native [CHECK...]        needs `make build`, a C compiler, pkg-config and strace

The examples are the programs: each in C and in Rust, which must understand each other.
"""

import array
import contextlib
import fcntl
import mmap
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import reflect
from harness import NATIVE, ROOT, VERSION, Failed, Process, adopt_orphans, end_orphans, frame, has_failed, require, status_word, wait_until

SECONDS = 240  # for whatever a program does
KINDS = {"bytes": 1, "messages": 2, "locked": 3, "mailbox": 4}
WELCOME = 1
CHECKS = dict(reflect.CHECKS)


def welcome(kind, slots, ring, **head):
    return frame(NATIVE, WELCOME, struct.pack("<IIQQ", kind, 0, slots, ring), **head)


def check(function):
    CHECKS[function.__name__] = function
    return function


def run(argv, **options):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=600, **options)
    require(done.returncode == 0, f"{argv[0]}: {status_word(done.returncode)}\n{done.stdout}{done.stderr}")
    return done.stdout


class Place:
    """An installation, and the examples compiled against it."""

    def __init__(self, directory):
        self.directory = directory
        self.root = directory / "root"
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        run(["make", "-s", "-C", ROOT, "install", f"DESTDIR={self.root}", "PREFIX=/usr"])
        # With debug checks, and as the unit tests have built them.
        run(["cargo", "build", "--quiet", "-p", "ringlet-messages", "--examples"], cwd=ROOT)
        self.environment = {
            **os.environ,
            "PKG_CONFIG_PATH": str(self.root / "usr/lib/pkgconfig"),
            "PKG_CONFIG_SYSROOT_DIR": str(self.root),
            "LD_LIBRARY_PATH": str(self.root / "usr/lib"),
        }
        self.c, self.rust = directory / "c", target.resolve() / "debug/examples"
        self.c.mkdir()
        for name in ("echo", "mailbox", "region", "reflect", "port"):
            self.compile(["cc", "-std=c99", "-D_GNU_SOURCE"], f"{name}.c", self.c / name, ["--cflags", "--libs"])

    def compile(self, compiler, source, to, ask):
        flags = run(["pkg-config", *ask, "ringlet"], env=self.environment).split()
        warnings = ["-O2", "-Wall", "-Wextra", "-Werror"]
        run([*compiler, *warnings, ROOT / "ringlet-native/examples" / source, "-o", to, *flags])

    def start(self, *argv):
        return Process([str(word) for word in argv], str(self.directory), env=self.environment)

    @contextlib.contextmanager
    def service(self, *argv):
        """A program that says one word when it is ready."""
        process = self.start(*argv)
        try:
            require(process.line(SECONDS) in ("serving", "collecting"), f"it does not serve\n{process.tail()}")
            yield process
        finally:
            process.kill()

    def call(self, *argv, status=0):
        """Runs a program to its end; its output, and what it complained of."""
        process = self.start(*argv)
        try:
            ended = process.wait(SECONDS)
            require(ended == status, f"{argv}: {status_word(ended)}\n{process.tail()}\n{process.where()}")
            return process.finished_output().decode(), process.tail()
        finally:
            process.kill()


_count = 0


def name():
    global _count
    _count += 1
    return f"test-{os.getpid()}-{_count}"


def lines_of(process, count):
    found = []
    while len(found) < count:
        line = process.line(SECONDS)
        if line is None:
            raise Failed(f"{len(found)} of {count} lines came\n{process.tail()}\n{process.where()}")
        found.append(line)
    return found


@check
def installed(place):
    """Header, library, manual pages and pkg-config say the same; it serves C++ and static programs too."""
    header = (place.root / "usr/include/ringlet.h").read_text()
    declared = set(re.findall(r"\b(ringlet_\w+)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.S)))
    messages = (place.root / "usr/include/am.h").read_text()
    messages = set(re.findall(r"^(?!typedef|static|struct|enum)\w[\w ]*?[ *(]\*?(\w+)\)?[(;\[]", messages, flags=re.M))
    library = place.root / "usr/lib/libringlet.so.0"
    exported = {line.split()[-1] for line in run(["nm", "-D", "--defined-only", library]).splitlines()}
    both = declared | messages
    require(both == exported, f"only declared: {both - exported}; only exported: {exported - both}")
    pages = place.root / "usr/share/man/man3"
    paged = {page.stem for page in pages.iterdir()} - {"ringlet_mailbox", "ringlet_region", "ringlet_reflect", "ringlet_port", "am"}
    require(paged == declared, f"without a page: {declared - paged}; pages for nothing: {paged - declared}")
    for page in pages.iterdir():
        text = page.read_text()
        if text.startswith(".so "):
            require((pages.parent / text.split()[1]).exists(), f"{page} leads nowhere")
    soname = re.search(r"soname: \[(.*)\]", run(["readelf", "-d", library])).group(1)
    require(soname == "libringlet.so.0", soname)
    place.compile(["c++", "-x", "c++", "-fpermissive", "-w"], "mailbox.c", place.directory / "cpp", ["--cflags", "--libs"])
    static = place.directory / "static"
    flags = run(["pkg-config", "--cflags", "ringlet"], env=place.environment).split()
    private = run(["pkg-config", "--static", "--libs-only-l", "ringlet"], env=place.environment).split()
    archive = str(place.root / "usr/lib/libringlet.a")
    source = ROOT / "ringlet-native/examples/echo.c"
    run(["cc", "-D_GNU_SOURCE", "-O2", source, "-o", static, *flags, archive, *(word for word in private if word != "-lringlet")])
    service = name()
    with place.service(static, "serve", service, "messages"):
        place.call(static, "call", service, "messages", 100, 8)


@check
def echoes(place):
    """C and Rust, each as server and as client, in every kind of channel, short and long."""
    for server in (place.c, place.rust):
        for kind in ("bytes", "messages", "locked"):
            service = name()
            with place.service(server / "echo", "serve", service, kind):
                for client in (place.c, place.rust):
                    for count, size in ((3000, 8), (300, 5000), (30, 100_000)):
                        output, _ = place.call(client / "echo", "call", service, kind, count, size)
                        require(output == f"{count} answers\n", output)


@check
def regions(place):
    """Remote stores, rung for, between C and Rust, each as server and as client, short and long."""
    for server in (place.c, place.rust):
        service = name()
        with place.service(server / "region", "serve", service):
            for client in (place.c, place.rust):
                for count, size in ((3000, 8), (300, 5000), (30, 1_000_000)):
                    output, _ = place.call(client / "region", "call", service, count, size)
                    require(output == f"{count} answers\n", output)
                # What does not fit is not stored.
                _, complaint = place.call(client / "region", "call", service, 1, 1 << 20, status=1)
                require(complaint, "it says nothing")


@check
def ports(place):
    """Frames between two programs' ports: all come, in order, short and long; and whoever is wrong is told."""
    place.environment["RINGLET_ETHERNET"] = str(place.directory / "networks")
    run([place.root / "usr/bin/ringlet", "eth", "create", "blue"], env=place.environment)
    for size, count in ((22, 30_000), (60, 30_000), (1500, 30_000), (65_000, 3000)):
        sink = place.start(place.c / "port", "sink", "blue", count, size)
        try:
            require(sink.line(SECONDS) == "listening", sink.tail())
            place.call(place.c / "port", "generate", "blue", count, size)
            require(sink.wait(SECONDS) == 0 and b"frames/s" in sink.finished_output(), sink.tail())
        finally:
            sink.kill()
    for words, what in ((("nowhere", 1, 60), "ringlet eth create nowhere"), (("../blue", 1, 60), "a network's name is of")):
        _, complaint = place.call(place.c / "port", "sink", *words, status=1)
        require(what in complaint, complaint)
    sink = place.start(place.c / "port", "sink", "blue", 1, 60)
    try:
        require(sink.line(SECONDS) == "listening", sink.tail())
        _, complaint = place.call(place.c / "port", "generate", "blue", 1, 70_000, status=1)
        require("longer than" in complaint, complaint)
        run([place.root / "usr/bin/ringlet", "eth", "down", "example"], env=place.environment)
        require(sink.wait(SECONDS) == 1 and "somebody has ended the port" in sink.tail(), sink.tail())
    finally:
        sink.kill()


@check
def mailboxes(place):
    """Many senders at once, in C and in Rust: all messages arrive, each sender's in order, none mixed up."""
    for receiver in (place.c, place.rust):
        service, senders, each = name(), 12, 500
        with place.service(receiver / "mailbox", "collect", service, senders * each) as process:
            tellers = [
                place.start((place.c, place.rust)[i % 2] / "mailbox", "tell", service, f"teller{i}", each)
                for i in range(senders)
            ]
            try:
                lines = lines_of(process, senders * each)
                require(process.wait(SECONDS) == 0, process.tail())
                statuses = [teller.wait(SECONDS) for teller in tellers]
                require(not any(statuses), f"{statuses}")
            finally:
                for teller in tellers:
                    teller.kill()
        next_of, text_of = {}, {}
        for line in lines:
            sender, text, number = line.split()
            require(text_of.setdefault(sender, text) == text, f"{sender} is {text} and {text_of[sender]}")
            require(int(number) == next_of.get(text, 0), f"{text}: {number} after {next_of.get(text)}")
            next_of[text] = int(number) + 1
        require(len(next_of) == senders and set(next_of.values()) == {each}, f"{next_of}")


@check
def no_system_call_while_awake(place):
    """Two ends that look again and again: a hundred times the messages make no more system calls. (Apart from the look whether the
    peer lives, a poll without waiting some times a second.)"""

    def calls(count):
        service, log = name(), place.directory / "strace"
        with place.service(place.c / "echo", "serve", service, "messages", "awake"):
            place.call("strace", "-f", "-c", "-o", log, place.c / "echo", "call", service, "messages", "awake", count, 8)
        found = {}
        for line in log.read_text().splitlines():
            words = line.split()
            if len(words) >= 5 and words[0].replace(".", "").isdigit() and words[-1] != "total":
                found[words[-1]] = int(words[3])
        require("socket" in found, f"strace tells nothing:\n{log.read_text()}")
        found.pop("ppoll", None)
        found.pop("poll", None)
        return found

    few, many = calls(200), calls(20_000)
    require(sum(many.values()) <= sum(few.values()) + 10, f"200 messages: {few}\n20,000 messages: {many}")


def is_connected(process):
    """Does it share memory with another one?"""
    return "/memfd:ringlet" in pathlib.Path(f"/proc/{process.pid}/maps").read_text()


@check
def deaths(place):
    """An end that is killed is told to the other; the name is free at once, and whoever connects again goes on."""
    for program, *kind in (("echo", "bytes"), ("echo", "messages"), ("echo", "locked"), ("region",)):
        service = name()
        with place.service(place.c / program, "serve", service, *kind) as server:
            client = place.start(place.c / program, "call", service, *kind, 2_000_000_000, 8)
            try:
                wait_until(lambda: is_connected(client), SECONDS, "the connection")
                time.sleep(0.1)
                require(client.poll() is None, client.tail())
                os.kill(server.pid, signal.SIGKILL)
                require(client.wait(SECONDS) == 1, f"it did not notice\n{client.tail()}\n{client.where()}")
                require("reset" in client.tail(), client.tail())
            finally:
                client.kill()
        # The caller's death, and a caller that comes before its service.
        client = place.start(place.c / program, "call", service, *kind, 2_000_000_000, 8)
        time.sleep(0.1)
        with place.service(place.c / program, "serve", service, *kind):
            wait_until(lambda: is_connected(client), SECONDS, "the connection")
            time.sleep(0.1)
            require(client.poll() is None, client.tail())
            client.kill()
            place.call(place.rust / program, "call", service, *kind, 100, 8)


def death_scene(place, scene):
    actor = place.directory / "death_actor"
    if not actor.exists():
        place.compile(["cc", "-std=c99", "-D_GNU_SOURCE"], ROOT / "tests/native/death_actor.c", actor, ["--cflags", "--libs"])
    said, _ = place.call(actor, name(), scene)
    require(said == "ok\n", said)


@check
def senders_to_the_dead(place):
    """A sender learns that its receiver was killed by the next message if that slept, else within a few: bytes, messages, mailboxes, rings."""
    death_scene(place, "senders")


@check
def children_of_the_dead(place):
    """A child that a program has forked hides its death from nobody."""
    death_scene(place, "children")


@check
def services_out_of_descriptors(place):
    """Who comes while no descriptor is free waits until one is."""
    death_scene(place, "crowded")


@check
def services_in_the_background(place):
    """A service whose opener has ended, and whose child serves, is no dead one."""
    death_scene(place, "background")


@check
def gasnet_on_an_installation(place):
    """GASNet's tests take an installed ringlet as it is, and build nothing of one that is neither installed nor built."""
    folder = place.directory / "gasnet"
    (folder / "sources/udp-conduit").mkdir(parents=True)
    (folder / "tools").mkdir()
    alone = folder / "alone/ringlet"
    alone.parent.mkdir()
    for path, says in ((folder / "sources/configure", "configured"), (alone, "no ringlet"), *((folder / "tools" / tool, "built") for tool in ("make", "cargo"))):
        path.write_text(f"#!/bin/sh\necho {says} >> {folder}/said\nexit 1\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'tools'}:{os.environ['PATH']}"}
    for ringlet, is_none in ((place.root / "usr/bin/ringlet", False), (alone, True)):
        command = [sys.executable, ROOT / "tests/gasnet", "--sources", folder / "sources", "--build", folder / f"build-{ringlet.parent.name}", "--ringlet", ringlet]
        done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=600)
        require(done.returncode == 1 and ("a whole build" in done.stderr) == is_none, done.stderr)
    logs = [path.read_text() for path in folder.glob("build-*/*/log")]
    said = (folder / "said").read_text().splitlines()
    require(said == ["configured"] and len(logs) == 1, f"{said} {logs}")


def unix_socket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def memfd(size, seals=True):
    fd = os.memfd_create("liar", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, 1033, 2 | 4)  # F_ADD_SEALS: SHRINK, GROW
    return fd


def lane_bytes(slots, ring):
    return 4096 + max(slots * 64, 4096) + ring


@check
def services_that_lie(place):
    """Whoever answers to a name may say anything: the caller fails with an error, and does nothing else."""
    slots, ring = 64, 65536
    size = 2 * lane_bytes(slots, ring)
    good = welcome(KINDS["messages"], slots, ring)
    lies = [
        (b"", []),
        (b"nonsense", []),
        (good[:-1], []),
        (good + b"x", []),
        (good, []),
        (good, [memfd(size)]),
        (good, [memfd(size, seals=False), memfd(size)]),
        (good, [memfd(size - 4096), memfd(size)]),
        (good, [memfd(size + 4096), memfd(size)]),
        (good, [memfd(size), os.open("/dev/null", os.O_RDWR)]),
        (good, [os.open("/dev/zero", os.O_RDWR), memfd(size)]),
        (welcome(KINDS["bytes"], slots, ring), [memfd(size)]),
        (welcome(2, 65, ring), [memfd(size)]),
        (welcome(2, 2**63, 2**63), [memfd(size)]),
        (welcome(2, 0, 0), [memfd(size)]),
        (welcome(2, slots, ring, version=VERSION + 1), [memfd(size), memfd(size)]),
    ]
    for number, (text, fds) in enumerate(lies):
        service = name()
        with unix_socket() as liar:
            liar.bind(f"\0ringlet1-service/{service}")
            liar.listen()
            liar.settimeout(SECONDS)
            process = place.start(place.c / "echo", "call", service, "messages", 1, 8)
            try:
                victim, _ = liar.accept()
                with victim:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                    victim.sendmsg([text], rights)
                    status = process.wait(SECONDS)
                require(status == 1 and "connect:" in process.tail(), f"lie {number}: {status_word(status)} {process.tail()}")
            finally:
                process.kill()
        for fd in fds:
            os.close(fd)


@check
def peers_that_scribble(place):
    """A caller that writes anything anywhere in its segment ends its own connection at worst; the service serves the next."""
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    for server in (place.c, place.rust):
        for program, *kind in (("echo", "bytes"), ("echo", "messages"), ("echo", "locked"), ("region",)):
            service = name()
            with place.service(server / program, "serve", service, *kind) as process:
                for _ in range(15):
                    scribble(dice, service)
                    require(process.poll() is None, f"seed {seed}, {kind}: {status_word(process.poll())}\n{process.tail()}")
                place.call(place.c / program, "call", service, *kind, 100, 8)


@check
def senders_that_scribble(place):
    """A mailbox's sender can write to its own lane and to the list of busy lanes, not to the receiver's flag; whatever it writes, all that
    honest senders send arrives."""
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    for receiver in (place.c, place.rust):
        service, count = name(), 3000
        # What liars send counts too.
        with place.service(receiver / "mailbox", "collect", service, 100 * count) as process:
            teller = place.start(place.c / "mailbox", "tell", service, "honest", count)
            rounds = 0
            try:
                while rounds < 20 or teller.poll() is None:
                    rounds += 1
                    with liar(service) as (caller, fds):
                        with contextlib.suppress(PermissionError), mmap.mmap(fds[2], 4096):
                            raise Failed("a sender can write to the receiver's flag")
                        with mmap.mmap(fds[1], 4096) as ready:
                            for _ in range(200):
                                # Bits set for nothing, bits of others taken away.
                                ready[: 17 * 8] = dice.choice((bytes(17 * 8), dice.randbytes(17 * 8)))
                        scribble_over(dice, caller, fds)
                require(teller.wait(SECONDS) == 0, teller.tail())
                numbers = []
                while len(numbers) < count:
                    (line,) = lines_of(process, 1)
                    if "honest" in line:
                        numbers.append(int(line.split()[2]))
                require(numbers == list(range(count)), f"{numbers}")
                require(process.poll() is None, process.tail())
            except (Failed, OSError) as failure:
                raise Failed(f"seed {seed}: {failure}\nreceiver: {status_word(process.poll())}\n{process.tail()}") from failure
            finally:
                teller.kill()


@check
def strangers(place):
    """Another user is turned away."""
    if os.geteuid() != 0:
        print("  (as root only: there is no other user to be)")
        return
    for path in (place.directory, place.c):
        path.chmod(0o755)
    service = name()
    with place.service(place.c / "echo", "serve", service, "messages"):
        argv = [str(word) for word in (place.c / "echo", "call", service, "messages", 1, 8)]
        stranger = Process(argv, str(place.directory), env=place.environment, user="nobody")
        try:
            require(stranger.wait(SECONDS) == 1 and "Permission denied" in stranger.tail(), stranger.tail())
        finally:
            stranger.kill()
        place.call(place.c / "echo", "call", service, "messages", 1, 8)


@contextlib.contextmanager
def liar(service):
    """A caller that takes what it is given, and then does not keep to anything."""
    with unix_socket() as caller:
        caller.connect(f"\0ringlet1-service/{service}")
        text, rights, _, _ = caller.recvmsg(64, socket.CMSG_SPACE(4 * 4))
        if not text:
            raise ConnectionResetError
        fds = array.array("i", rights[0][2])
        try:
            yield caller, fds
        finally:
            for fd in fds:
                os.close(fd)


def scribble(dice, service):
    with liar(service) as (caller, fds):
        scribble_over(dice, caller, fds)


def scribble_over(dice, caller, fds):
    """Noise, and headers that are due, so that they are looked at."""
    size = os.fstat(fds[0]).st_size
    with mmap.mmap(fds[0], size) as segment:
        slots = 4096  # of the first lane, which is ours
        # A region's rings, so that it is looked at, and its first word.
        struct.pack_into("<Q", segment, 1024 + 128, dice.choice((1, 2, 2**63, 2**64 - 1)))
        struct.pack_into("<Q", segment, 8192, dice.choice((0, 8, 1000, 1 << 20, 2**64 - 8)))
        for position in range(dice.randrange(1, 60)):
            # A header as it is due, with any length and flags, so that it is looked at; and noise.
            header = ((1 << 43) | position) << 20 | dice.choice((0, 1, 2, 4, 7)) << 17 | dice.choice((0, 8, 56, 57, 4000, 131071))
            struct.pack_into("<QQ", segment, slots + 64 * (position % 1024), header, dice.randrange(1 << 64))
            for _ in range(dice.randrange(4)):
                struct.pack_into("<Q", segment, dice.randrange(size // 8) * 8, dice.randrange(1 << 64))
        with contextlib.suppress(OSError):
            caller.send(b"\1" * dice.randrange(20), socket.MSG_DONTWAIT)
        time.sleep(0.01)


def main():
    adopt_orphans()
    chosen = sys.argv[1:] or list(CHECKS)
    failed = 0
    for tool in ("cc", "c++", "pkg-config", "strace", "nm", "readelf"):
        if not shutil.which(tool):
            print(f"tests/native: no {tool} here")
            return 77
    with tempfile.TemporaryDirectory(prefix="ringlet-native-") as directory:
        try:
            place = Place(pathlib.Path(directory))
        except Failed as failure:
            print(f"installation: {failure}")
            return 1
        for title in chosen:

            def play(title=title):
                began = time.monotonic()
                try:
                    CHECKS[title](place)
                    result, detail = "passed", ""
                except (Failed, OSError, subprocess.TimeoutExpired) as failure:
                    result, detail = "FAILED", str(failure)
                print(f"{title:28} {result} {time.monotonic() - began:6.1f} s", detail, flush=True)
                return result == "FAILED"

            failed |= has_failed(title, play)
        left = end_orphans()
        if left:
            print(f"left behind: {left}")
            failed = 1
    return failed


sys.exit(main())
