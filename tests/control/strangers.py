"""The commands, as root gives them, among processes that deceive: they see and control what is not theirs, end, and say what they can't."""

import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import unicodedata

from capture import begin, recording
from control import ENDS, End
from ends import message
from harness import CLIENT_SECONDS, START_SECONDS, Skipped, require, wait_until
from pcapng import Capture

LIAR = pathlib.Path(__file__).resolve().parent / "liar.py"
UGLY = "\x1b[2J\x9b\u202e\u2066"


def scenes(ground):
    for name, play in {
        "names of Unix sockets": unix_names,
        "names of programs": program_names,
        "a page that can't be written": unwritable,
        "a page of another version": elder,
        "one connection in all rows, and a record of lies": repeating,
        "one that pretends to be captured": beating,
        "a file under a lease, named like a page": leased,
        "a page under a lease": leased_memory,
        "more pages than descriptors": many,
        "a program that names another file as its own": other_file,
        "a script whose interpreter is a FIFO": fifo,
        "the first thread has ended": headless,
        "Unix sockets in another network namespace": other_namespace,
        "where a capture is written": output,
    }.items():
        with ground.scene(name):
            play(ground)


class Liar:
    def __init__(self, ground, *words):
        # The role is none that is run under ringlet.
        self.process = ground.start("liar", [sys.executable, LIAR, *words])
        self.pid = self.process.pid
        line = self.process.line(START_SECONDS)
        require(line and line.startswith("ready"), f"it is not ready: {line}\n{self.process.tail()}")
        self.said = line.partition(" ")[2]

    def do(self, word):
        self.process.write(word + "\n")
        line = self.process.line(CLIENT_SECONDS)
        require(line is not None, f"no answer to {word}\n{self.process.tail()}")
        return line


def told(ground, *words, limit=None):
    """Exit status, standard output, and standard error of a command."""
    argv = [str(ground.ringlet.command), *map(str, words)]
    argv = argv if limit is None else ["prlimit", f"--nofile={limit}:{limit}", *argv]
    done = subprocess.run(argv, capture_output=True, timeout=CLIENT_SECONDS)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def goes_and_comes(ground, server, client, status=0, culprit=None):
    """All is sent to the kernel and comes back, but for whoever can't be asked, who is named."""
    for word, path in (("off", "kernel"), ("on", "ring")):
        client.do("send 3")
        code, said, problems = told(ground, word, "--all")
        require(code == status, f"{word}: exit status {code}\n{said}{problems}")
        require(culprit is None or f"/{culprit}" in problems, f"{word} does not name {culprit}: {problems}")
        require(str(client.port) in said, f"{word} does not tell of {client.name}:\n{said}")
        ground.await_path(client, path)


def rows(ground, status=0):
    code, said, problems = told(ground, "ss", "--json", "--all")
    require(code == status, f"exit status {code}: {problems}")
    return json.loads(said)["connections"]


def unix_names(ground):
    server, client = ground.pair()
    path = os.path.join(ground.directory, "victim")
    listener = End(ground, "server", 0, "recv", host=path)
    wait_until(lambda: os.path.exists(path), START_SECONDS, "a server to listen")
    local = End(ground, "client", 0, role="client", host=path)
    local.line()
    local.do("send 100")
    [inode] = {os.stat(f"/proc/{client.pid}/fd/{each['fd']}").st_ino for each in ground.json("explain", client.pid)["sockets"]}
    forged = f"\0x\n0000000000000000: 00000002 00000000 00010000 0001 01 {inode} /forged"
    names = [forged.encode(), b"\0\xff\xfe\x80", b"\0" + UGLY.encode(), b"\0back\\slash"]
    Liar(ground, "bound", *(name.hex() for name in names))
    seen = rows(ground)
    mine = [each for each in seen if each["pid"] == client.pid]
    require([(each["protocol"], each["state"], each["path"]) for each in mine] == [("tcp", "ESTAB", "ring")], f"{mine}")
    ends = {each["pid"]: each for each in seen if each["pid"] in (listener.pid, local.pid) and each["state"] == "ESTAB"}
    require({each["path"] for each in ends.values()} == {"ring"} and len(ends) == 2, f"{ends}")
    require(ends[local.pid]["peer"]["unix"] == path and ends[listener.pid]["local"]["unix"] == path, f"{ends}")
    shown = {each["local"].get("unix") for each in seen if each["local"]}
    require({"@\\xff\\xfe\\x80", "@" + UGLY, "@back\\\\slash"} <= shown, f"{shown}")
    harmless(told(ground, "ss", "--all"), told(ground, "ss", "--json", "--all"))
    goes_and_comes(ground, server, client)
    require({each["path"] for each in rows(ground) if each["pid"] in (listener.pid, local.pid)} <= {"ring", "kernel"}, "gone")
    code, _, problems = told(ground, "off", path)
    require(code == 0, problems)
    local.do("send 3")
    require({each["path"] for each in rows(ground) if each["pid"] == local.pid} == {"kernel"}, "not off")
    code, said, problems = told(ground, "off", "@\\xff\\xfe\\x80")
    require("unix:" in said, f"it is not found by its name: {code} {said} {problems}")


def harmless(*outputs):
    for code, *texts in outputs:
        for text in texts:
            bad = {each for each in text if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp")}
            require(not bad, f"{bad} in what is printed (exit status {code}):\n{text!r}")


def program_names(ground):
    server, client = ground.pair()
    for name in (b"\x1b]0;x\x07\x1b[2J", "a\x9b2J".encode(), "\u202ebad\u2066".encode(), b"\xff\n\xfe"):
        liar = Liar(ground, "named", name.hex())
        require(liar.pid in {each["pid"] for each in rows(ground)}, f"{name} is not seen")
        harmless(
            *(told(ground, *words) for words in (["ss"], ["ss", "--json"], ["explain", liar.pid], ["explain", "--json", liar.pid])),
            told(ground, "off", "--json", liar.pid),
            told(ground, "off", liar.pid),
        )
        with recording(ground, "--all") as running:
            client.do("send 5")
            capture = running.finish()
        harmless((0, *capture.interfaces, *(comment for packet in capture.packets for comment in packet.comments)))
        ground.put_away(liar.process)
        told(ground, "on", "--all")
        ground.await_path(client, "ring")
    goes_and_comes(ground, server, client)


def unwritable(ground):
    server, client = ground.pair()
    liar = Liar(ground, "sealed")
    goes_and_comes(ground, server, client, 1, liar.pid)
    captured(ground, client, liar)


def captured(ground, client, liar):
    """The capture of all has all the others, and names this one."""
    first = client.do("now") + 1
    with recording(ground, "--all") as running:
        client.do("send 5")
        capture, problems = running.finish(status=1, said=True)
    require(f"/{liar.pid}" in problems, f"it is not named: {problems}")
    said = {packet.payload for packet in capture.packets}
    require({message(kind, first + trip) for kind in (b"Q", b"R") for trip in range(5)} <= said, "not what was said")


def elder(ground):
    server, client = ground.pair()
    liar = Liar(ground, "elder")
    for word, path in (("off", "kernel"), ("on", "ring")):
        code, _, problems = told(ground, word, "--all")
        require(code == 1 and f"/{liar.pid}" in problems, f"{code}: {problems}")

        def there(path=path):
            client.do("send 20")
            return {each["path"] for each in rows(ground, 1) if each["pid"] == client.pid} == {path}

        wait_until(there, START_SECONDS, f"the connection to be on the {path}")


def repeating(ground):
    server, client = ground.pair()
    liar = Liar(ground, "repeating")
    require(sum(each["pid"] == liar.pid for each in rows(ground)) == 1, "the same connection more than once")
    goes_and_comes(ground, server, client)
    first = client.do("now") + 1
    with recording(ground, "--all") as running:
        client.do("send 5")
        require(liar.do("record") == "recorded", "it does not record")
        client.do("send 5")
        used = pathlib.Path(f"/proc/{running.pid}/status").read_text().split("VmHWM:")[1].split()[0]
        capture = running.finish()
    require(int(used) < 1 << 18, f"the capture took {used} KiB")
    said = {packet.payload for packet in capture.packets}
    require({message(kind, first + trip) for kind in (b"Q", b"R") for trip in range(10)} <= said, "not what was said")
    require(any(f"/{liar.pid}" in name for name in capture.interfaces), f"{capture.interfaces}")
    sizes = [len(comment) for packet in capture.packets for comment in packet.comments]
    require(max(sizes) < 1000, f"a comment of {max(sizes)} bytes")


def beating(ground):
    server, client = ground.pair()
    captured(ground, client, Liar(ground, "beating"))


def leased(ground):
    server, client = ground.pair()
    liar = Liar(ground, "leased", ground.directory)
    goes_and_comes(ground, server, client)
    require(liar.pid not in {each["pid"] for each in rows(ground)}, "a file passes for a page")
    require(liar.do("broken") == "0", "its file was opened")


def leased_memory(ground):
    server, client = ground.pair()
    liar = Liar(ground, "leased_memory")
    if liar.said == "none":
        raise Skipped("no leases on memory here")
    code, said, problems = told(ground, "off", "--all")
    # It is still there: nobody has waited until the kernel takes it away.
    locks = pathlib.Path("/proc/locks").read_text()
    require(any("LEASE" in line and f" {liar.pid} " in line for line in locks.splitlines()), f"the lease is gone:\n{locks}")
    require(code == 1 and f"/{liar.pid}" in problems and str(client.port) in said, f"{code}\n{said}{problems}")


def many(ground):
    Liar(ground, "many", 30)
    require(len(json.loads(told(ground, "ss", "--json")[1])["processes"]) >= 30, "they are not seen")
    for words in (["ss"], ["off", "--all"]):
        code, said, problems = told(ground, *words, limit=20)
        require(code == 1 and "can't be seen" in problems, f"{words}: {code}\n{said}{problems}")


OTHER_FILE = r"""
#include <fcntl.h>
#include <linux/prctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
extern char __executable_start, _end;
static inline long call(long n, long a, long b, long c, long d) {
    long r;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return r;
}
/* Runs from a copy, since the file can be changed only when nothing of it is mapped. */
__attribute__((noinline)) void moved(struct prctl_mm_map *map, long from, long bytes) {
    char done[2] = {0, '\n'};
    call(SYS_munmap, from, bytes, 0, 0);
    done[0] = call(SYS_prctl, PR_SET_MM, PR_SET_MM_MAP, (long)map, sizeof *map) ? 'n' : 'y';
    call(SYS_write, 1, (long)done, 2, 0);
    for (;;) call(SYS_pause, 0, 0, 0, 0);
}
int main(int count, char **words) {
    long from = (long)&__executable_start & -4096, to = ((long)&_end + 4095) & -4096, at = (long)words;
    struct prctl_mm_map map = {from, to, from, to, to, to, at, at, at, at, at, 0, 0, open(words[1], O_RDONLY)};
    char *copy = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < 512; i++) copy[i] = ((char *)moved)[i];
    ((void (*)(void *, long, long))copy)(&map, from, to - from);
}
"""


def other_file(ground):
    """The file that it names is a script, whose interpreter is a FIFO."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or os.uname().machine != "x86_64":
        raise Skipped("no C compiler, or not for this machine")
    program, script = os.path.join(ground.directory, "program"), fifo_script(ground)
    flags = ["-O1", "-static", "-no-pie", "-fno-stack-protector", "-fcf-protection=none", "-w"]
    subprocess.run([compiler, *flags, "-x", "c", "-", "-o", program], input=OTHER_FILE.encode(), check=True)
    process = ground.start("liar", [program, script])
    if process.line(START_SECONDS) != "y":
        raise Skipped("no right to name another file")
    require(os.readlink(f"/proc/{process.pid}/exe") == script, "it has not changed its file")
    code, said, problems = told(ground, "explain", "--json", process.pid)
    require(code == 0 and json.loads(said)["reason"] == "unreachable", f"{code} {said} {problems}")


def fifo_script(ground):
    fifo_path, script = (os.path.join(ground.directory, f"{name}-{os.urandom(4).hex()}") for name in ("fifo", "script"))
    os.mkfifo(fifo_path)
    pathlib.Path(script).write_text(f"#!{fifo_path}\n")
    os.chmod(script, 0o755)
    return script


def fifo(ground):
    code, said, problems = told(ground, "run", "--", fifo_script(ground))
    require(code == 126, f"{code} {said} {problems}")


def headless(ground):
    """What it has is seen and controlled as any other's."""
    for way in ("syscall", "pthread"):
        process = ground.start("server", [sys.executable, LIAR, "headless", way])
        port = int(process.line(START_SECONDS).split()[1])
        client = End(ground, "echo", port, role="client")
        client.port = int(client.line())
        client.do("send 20")
        ground.await_path(client, "ring")
        process.write("end\n")
        state = pathlib.Path(f"/proc/{process.pid}/stat")
        wait_until(lambda state=state: ") Z " in state.read_text(), START_SECONDS, "the first thread to end")
        controlled(ground, process, client)
        ground.put_away(client.process)
        later = End(ground, "echo", port, role="client")
        later.port = int(later.line())
        later.do("send 20")
        ground.await_path(later, "ring")
        controlled(ground, process, later)
        datagrams = End(ground, "echo", port, "udp", role="client")
        datagrams.port = int(datagrams.line())
        datagrams.do("send 20")
        ground.await_path(datagrams, "ring")
        ground.put_away(process)


def controlled(ground, process, client):
    mine = [each for each in rows(ground) if each["pid"] == process.pid and each["state"] == "ESTAB"]
    require([each["path"] for each in mine] == ["ring"], f"{mine}")
    report = ground.json("explain", process.pid)
    require(report["seen"] and {each["path"] for each in report["sockets"]} >= {"ring"}, f"{report}")
    with recording(ground, process.pid) as running:
        first = begin(client)
        client.do("send 5")
        payloads = [packet.payload for packet in running.finish().packets]
    require(payloads[-10:] == [message(b"Q", first + trip) for trip in range(5) for _ in "in out".split()], "not what was said")
    for word, path in (("off", "kernel"), ("on", "ring")):
        code, said, problems = told(ground, word, process.pid)
        require(code == 0 and str(client.port) in said, f"{word}: {code} {said} {problems}")
        ground.await_path(client, path)


def other_namespace(ground):
    path = os.path.join(ground.directory, f"far-{os.urandom(4).hex()}")
    environment = {"HOST": path}
    inside = [sys.executable, ENDS, "server", "0", "recv"]
    server = ground.start("server", ["unshare", "--net", *inside], env=environment)
    wait_until(lambda: os.path.exists(path), START_SECONDS, "a server to listen")
    enter = ["nsenter", f"--net=/proc/{server.pid}/ns/net"]
    client = ground.start("client", [*enter, sys.executable, ENDS, "client", "0"], env=environment)
    require(client.line(START_SECONDS) == "0", "no connection")

    def trips(count):
        client.write(f"send {count}\n")
        require(client.line(CLIENT_SECONDS), "no answer")

    def there(wanted):
        trips(20)
        ends = {each["pid"]: each for each in rows(ground) if each["state"] == "ESTAB"}
        require(set(ends) == {server.pid, client.pid}, f"{ends}")
        require(ends[client.pid]["peer"] == ends[server.pid]["local"] and ends[client.pid]["peer"]["unix"] == path, f"{ends}")
        return {each["path"] for each in ends.values()} == {wanted}

    wait_until(lambda: there("ring"), START_SECONDS, "the connection to be in shared memory")
    code, said, problems = told(ground, "off", path)
    require(code == 0 and said.count("unix:") == 2, f"{code}\n{said}{problems}")
    wait_until(lambda: there("kernel"), START_SECONDS, "the connection to be on the kernel")


def output(ground):
    """Only who captured it can read it, whatever was there."""
    server, client = ground.pair()
    place = pathlib.Path(ground.directory, f"out-{os.urandom(4).hex()}")
    place.mkdir()
    new, old, link, target = (place / name for name in ("new", "old", "link", "target"))
    old.write_text("before")
    old.chmod(0o666)
    target.write_text("precious")
    link.symlink_to(target)
    with old.open("rb") as open_before:
        for path in (new, old):
            running = subprocess.Popen(
                [ground.ringlet.command, "capture", "-w", path, "--packets", "4", str(client.pid)], stderr=subprocess.PIPE
            )
            require(running.stderr.readline().startswith(b"Recording"), "it does not begin")
            client.do("send 20")
            _, said = running.communicate(timeout=CLIENT_SECONDS)
            require(running.returncode == 0, f"{said}")
            require(stat.S_IMODE(path.stat().st_mode) == 0o600, f"{path}: {path.stat()}")
            require(len(Capture(path.read_bytes()).packets) == 4, f"{path} is no capture")
        require(open_before.read() == b"before", "who had the file open reads the capture")
    code, _, problems = told(ground, "capture", "-w", link, "--packets", 1, client.pid)
    require(code == 1 and target.read_text() == "precious" and link.is_symlink(), f"{code}: {problems}")
    if os.geteuid() == 0:
        strange = place / "strange"
        strange.write_text("mine")
        try:
            os.chown(strange, 65_534, 65_534)
        except OSError:
            return
        code, _, problems = told(ground, "capture", "-w", strange, "--packets", 1, client.pid)
        require(code == 1 and strange.read_text() == "mine", f"{code}: {problems}")
