"""`ringlet explain` in known situations: what it says is what was done."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

from control import ENDS, End
from ends import MESSAGE_BYTES
from harness import START_SECONDS, Skipped, free_port, listening, require, wait_until

COMMANDS = """
import socket, sys
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
fresh = socket.socket()
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
netlink.bind((0, 0))
print(udp.fileno(), fresh.fileno(), netlink.fileno(), flush=True)
sys.stdin.readline()
"""


PAIR = """
import fcntl, os, socket, sys
one, other = socket.socketpair()
fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    os.setresuid(65534, 65534, 65534)
    other.close()
    print(os.getpid(), one.fileno(), listener.fileno(), flush=True)
sys.stdin.readline()
"""


def scenes(ground):
    with ground.scene("a connection's life"):
        life(ground)
    with ground.scene("a receiver that does not read"):
        overflow(ground)
    with ground.scene("a peer without ringlet, far peers, forked holders"):
        peers(ground)
    with ground.scene("sockets that are not followed"):
        others(ground)
    with ground.scene("an end of a pair, and a listener, of a child that has changed its user"):
        pair(ground)
    with ground.scene("processes without the library"):
        without(ground)
    with ground.scene("for people"):
        text(ground)


def explained(ground, *words):
    return ground.json("explain", *words)


def connection(ground, end, port):
    """What is said of the socket of `end` that has a connection with this port."""
    found = [each for each in explained(ground, end.pid)["sockets"] if each["peer"] and str(port) in each["local"] + each["peer"]]
    require(len(found) == 1, f"{found}")
    return found[0]


def life(ground):
    began = time.time_ns()
    server, client = ground.pair()
    moved = connection(ground, client, client.server_port)
    history = moved["history"]
    require((moved["path"], moved["reason"], moved["kind"], moved["state"]) == ("ring", None, "TCP", "ESTAB"), f"{moved}")
    require(f"{moved['local']}-{moved['peer']}" == client.name, f"{moved}")
    require(began < history["began_ns"] < history["moved_ns"] <= history["path_since_ns"] < time.time_ns(), f"{history}")
    require((history["entries"], history["returns"], history["last_return_ns"]) == (1, 0, None), f"{history}")
    require([holder["pid"] for holder in moved["peer_holders"]] == [server.pid], f"{moved}")
    require(moved["peer_runs_ringlet"] is True and moved["holders"] == [], f"{moved}")
    other = explained(ground, server.pid, moved["peer_holders"][0]["fd"])["sockets"]
    require([each["local"] for each in other] == [moved["peer"]], f"{other}")
    # Messages are counted as the program made them; bytes are those of the messages, by the way that they took.
    trips = client.do("now")
    require(history["ring_messages"] + history["kernel_messages"] == 2 * trips, f"{trips}: {history}")
    for direction in ("sent", "received"):
        total = history[f"ring_{direction}_bytes"] + history[f"kernel_{direction}_bytes"]
        # The kernel's part may have a few doorbells.
        require(0 <= total - trips * MESSAGE_BYTES < MESSAGE_BYTES, f"{direction}: {history}")
    require(history["ring_sent_bytes"] > 0 and history["kernel_sent_bytes"] >= MESSAGE_BYTES, f"{history}")

    before_off = time.time_ns()
    ground.command("off", client.pid)
    client.do("send 10")
    off = connection(ground, client, client.server_port)
    history = off["history"]
    require((off["path"], off["reason"], off["asked_off"]) == ("kernel", "paused", True), f"{off}")
    require("ringlet on" in off["advice"] and off["explanation"], f"{off}")
    require(history["returns"] == 1 and history["last_return_reason"] == "paused", f"{history}")
    require(before_off < history["last_return_ns"] <= history["path_since_ns"] < time.time_ns(), f"{history}")
    ring = history["ring_sent_bytes"]
    client.do("send 10")
    again = connection(ground, client, client.server_port)["history"]
    require(again["ring_sent_bytes"] == ring and again["ring_messages"] == history["ring_messages"], f"{again}")
    require(again["kernel_sent_bytes"] == history["kernel_sent_bytes"] + 10 * MESSAGE_BYTES, f"{history} {again}")
    require(again["kernel_messages"] == history["kernel_messages"] + 20, f"{history} {again}")

    ground.command("on", client.pid)
    ground.await_path(client, "ring")
    history = connection(ground, client, client.server_port)["history"]
    require((history["entries"], history["returns"]) == (2, 1), f"{history}")

    # A wait that was long was slept through, and somebody rang.
    slept = history["slept"]

    def server_slept():
        client.do("send 1")
        time.sleep(0.1)
        client.do("send 1")
        return connection(ground, server, client.port)["history"]["slept"] > 0

    wait_until(server_slept, START_SECONDS, "a wait of the server that is slept through")
    rung = connection(ground, client, client.server_port)["history"]
    require(rung["rung"] > 0 and rung["slept"] + rung["watched"] >= slept, f"{rung}")
    ground.command("explain", client.pid, 4000, status=1)


def overflow(ground):
    port = free_port()
    sink = End(ground, "sink", port, "asked")
    wait_until(lambda: listening(port), START_SECONDS, "the sink to listen")
    source = End(ground, "source", port, 40_000_000, 5, role="client")

    def overflowed():
        found = [each for each in explained(ground, source.pid)["sockets"] if each["history"]]
        return found and found[0]["history"]["overflows"] > 0 and found[0]["history"]

    history = wait_until(overflowed, START_SECONDS, "an overflow to be told of")
    require(history["returns"] >= history["overflows"] and history["kernel_sent_bytes"] > 0, f"{history}")
    sink.ask("read on")
    require(source.line() == sink.line(), "the checksums differ")


def peers(ground):
    port = free_port()
    plain = subprocess.Popen([sys.executable, ENDS, "server", str(port), "fork"], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: listening(port), START_SECONDS, "a server to listen")
        client = End(ground, "client", port, role="client")
        client.port = int(client.line())

        def given_up():
            client.do("send 100")
            alone = connection(ground, client, port)
            return alone["path"] == "kernel" and alone

        alone = wait_until(given_up, START_SECONDS, "the client to give up")
        require(alone["reason"] == "no-peer" and "ringlet run" in alone["advice"], f"{alone}")
        require(alone["peer_runs_ringlet"] is False and len(alone["peer_holders"]) == 1, f"{alone}")
        require(alone["history"]["moved_ns"] is None and alone["history"]["ring_messages"] == 0, f"{alone}")
    finally:
        plain.kill()
        plain.wait()
    server, client = ground.pair("fork")
    child = connection(ground, client, client.server_port)["peer_holders"]
    require(len(child) == 1 and child[0]["pid"] != server.pid, f"{child}")


def others(ground):
    """Sockets of kinds that ringlet does not move."""
    process = ground.start("server", [sys.executable, "-c", COMMANDS])
    udp, fresh, netlink = map(int, process.line(START_SECONDS).split())
    said = {each["fd"]: each for each in explained(ground, process.pid)["sockets"]}
    require(set(said) == {udp, fresh, netlink}, f"{said}")
    require(said[udp]["kind"] == "UDP" and said[netlink]["kind"] == "netlink", f"{said}")
    for fd in (fresh, netlink):
        require(said[fd]["path"] is None and said[fd]["explanation"].startswith("Not followed"), f"{said[fd]}")
    server, client = ground.pair()
    [listener] = [each for each in explained(ground, server.pid)["sockets"] if each["state"] == "LISTEN"]
    require(listener["explanation"].startswith("A listener") and listener["peer"] is None, f"{listener}")


def await_program(pid, name):
    """Until the process has become this program."""
    comm = pathlib.Path(f"/proc/{pid}/comm")
    wait_until(lambda: comm.read_text().strip() == name, START_SECONDS, f"{name} to run")


def pair(ground):
    """As nginx has them: what bars an end was known before its other end was closed here, and a listener is no connection."""
    if os.geteuid() != 0:
        raise Skipped("only root can change its user")
    parent = ground.start("server", [sys.executable, "-c", PAIR])
    pid, end, listener = map(int, parent.line(START_SECONDS).split())
    for fd, reasons in ((end, ("credentials", "sigio")), (listener, (None,))):
        [found] = explained(ground, pid, fd)["sockets"]
        require((found["path"], found["reason"] in reasons) == ("kernel", True), f"{found}")
    shown = {each["fd"]: each["reason"] for each in ground.json("ss", "--all", "--pid", pid)["connections"]}
    require(shown[end] in ("credentials", "sigio") and shown[listener] is None, f"{shown}")


def without(ground):
    def code(argv, **options):
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)
        try:
            await_program(process.pid, os.path.basename(argv[-1]))
            report = explained(ground, process.pid)
            require(report["seen"] is False and report["explanation"], f"{report}")
            return report["reason"]
        finally:
            process.stdin.close()
            process.kill()
            process.wait()

    require(code(["cat"]) == "not-run", "a program that was just started")
    wrap = [str(ground.ringlet.command), "run", "--"]
    require(code([*wrap, "cat"]) == "nothing-yet", "a wrapped program without sockets")
    require(code([*wrap, "env", "-u", "LD_PRELOAD", "cat"]) == "not-run", "one whose variable was taken away")
    inner = "import subprocess, sys; subprocess.run(['env', '-i', 'sleep', '1000'])"
    outer = subprocess.Popen([*wrap, sys.executable, "-c", inner], start_new_session=True)
    try:
        path = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        [child] = wait_until(lambda: path.read_text().split(), START_SECONDS, "a child")
        await_program(child, "sleep")
        report = explained(ground, child)
        require(report["reason"] == "environment" and f"/{outer.pid}" in report["explanation"], f"{report}")
    finally:
        os.killpg(outer.pid, 9)
        outer.wait()
    missing = {"LD_PRELOAD": "/nowhere/libringlet_preload.so"}
    require(code(["cat"], env={**os.environ, **missing}, stderr=subprocess.DEVNULL) == "not-loaded", "one that can't load it")
    static = static_program(ground)
    require(code([static]) == "unreachable", "a static program")
    ground.command("explain", 4194305, status=1)


def static_program(ground):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise Skipped("no C compiler for a static program")
    path = os.path.join(ground.directory, "static")
    source = b"#include <unistd.h>\nint main(void) { pause(); }\n"
    subprocess.run([compiler, "-static", "-x", "c", "-", "-o", path], input=source, check=True)
    return path


def text(ground):
    server, client = ground.pair()
    ground.command("off", client.pid)
    client.do("send 10")
    said = ground.command("explain", client.pid)
    for words in ("runs under ringlet", client.name, "On the kernel since", "(paused)", "`ringlet on`", f"/{server.pid}", "went back"):
        require(words in said, f"{words!r} is not in\n{said}")
    require("Not followed" not in said, said)
    require("A listener" in ground.command("explain", server.pid), "no listener")
    with socket.socket() as unwrapped:
        require("Not followed: ringlet is not in this process" in ground.command("explain", os.getpid()), f"{unwrapped}")
