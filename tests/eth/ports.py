"""Ports that are no devices: a guest's, by vhost-user, whose front end is a program here; and a program's, which is a host by itself."""

import os
import pathlib
import signal
import sys

from ground import run
from harness import ROOT, require, wait_until
from networks import LIMIT_SECONDS

PORTS = {}
GUEST_MAC = "02:00:00:00:00:99"
GUEST_IP = "10.7.0.9"
# Guests that come one after the other.
COMERS = 10


def scene(function):
    PORTS[function.__name__] = function
    return function


def built(ground, name):
    path = pathlib.Path(ground.command).parent / "examples" / name
    require(path.exists(), f"not built: cargo build --release -p ringlet-ethernet --example {name}")
    return path


def back_end(ground, network, *words):
    socket = pathlib.Path(ground.directory) / "guest.sock"
    back = ground.start([ground.command, "eth", "vhost", "--socket", socket, "--network", network, "--mac", GUEST_MAC, *words])
    said = back.line(LIMIT_SECONDS)
    require(said == f"ready {socket} {GUEST_MAC}", f"{said}: {back.tail()}")
    return back, socket


def front_end(ground, socket, *words):
    front = ground.start([built(ground, "guest"), socket, GUEST_IP, *words])
    require(front.line(LIMIT_SECONDS) == "answering", front.tail())
    return front


@scene
def guest(ground):
    """A guest answers pings of every kind of size, whatever its driver takes; the device sees it come and go."""
    network = ground.network("--addresses", "static")
    one = ground.host(network, 1)
    one.await_carrier(False)
    back, socket = back_end(ground, network)
    one.await_carrier(False)
    for words in ([], ["plain"]):
        front = front_end(ground, socket, *words)
        one.await_carrier(True)
        # (Without merging a frame is in one buffer of 2 KiB.)
        sizes = (0, 18, 56, 1472, 1980) if words else (0, 18, 56, 1472, 9000, 32768, 65493)
        for size in sizes:
            one.ping(GUEST_IP, "-M", "do", "-s", size)
        one.run("ip", "neigh", "flush", "all")
        front.kill()
        one.await_carrier(False)
    # What one guest after the other leaves behind is nothing.
    held = []
    for _ in range(COMERS):
        front = front_end(ground, socket)
        one.await_carrier(True)
        one.ping(GUEST_IP)
        front.kill()
        one.await_carrier(False)
        held.append(len(os.listdir(f"/proc/{back.pid}/fd")))
    require(held[-1] <= held[1], f"descriptors with each guest: {held}")
    # A back end that is killed, and one that is begun in its place.
    front = front_end(ground, socket)
    one.await_carrier(True)
    back.kill()
    one.await_carrier(False)
    front.kill()
    back, socket = back_end(ground, network)
    front_end(ground, socket)
    one.await_carrier(True)
    one.ping(GUEST_IP)
    # Ended by its name, as a device is.
    ground.must("down", "guest")
    require(back.wait(LIMIT_SECONDS) == 0 and not socket.exists(), back.tail())
    one.await_carrier(False)


@scene
def misuse(ground):
    """Each wrong use of a back end gets a sentence that names the fix."""
    network = ground.network()
    place = pathlib.Path(ground.directory)

    def says(*words, what):
        status, said = ground.eth("vhost", *words)
        require(status != 0 and what in said, f"{words}: {status}, {said}")

    says("--socket", place / "s", "--network", "nowhere", what="ringlet eth create nowhere")
    says("--socket", place / "none/s", "--network", network, what="No such file or directory")
    says("--socket", place / ("s" * 200), "--network", network, what="can't be made")
    (place / "file").write_text("")
    says("--socket", place / "file", "--network", network, what="it is no socket")
    require((place / "file").exists(), "it took a file that is no socket away")
    _back, socket = back_end(ground, network)
    says("--socket", socket, "--network", network, what="another back end listens there")


@scene
def program(ground):
    """A program's port answers pings of a device, plain, as its card would give them; and is ended as one."""
    place = pathlib.Path(ground.directory)
    library = pathlib.Path(ground.command).parent / "libringlet_native.so"
    (place / "libringlet.so.0").symlink_to(library)
    native = ROOT / "ringlet-native"
    run("cc", "-std=c99", "-D_GNU_SOURCE", "-O2", f"-I{native}/include", str(native / "examples/port.c"), str(library), "-o", str(place / "port"))
    network = ground.network()
    one = ground.host(network, 1)
    answers = ground.start(["env", f"LD_LIBRARY_PATH={place}", place / "port", "answer", network, GUEST_IP])
    require(answers.line(LIMIT_SECONDS) == "answering", answers.tail())
    one.await_carrier(True)
    for size in (0, 1, 56, 1472, 9000, 65000):
        one.ping(GUEST_IP, "-s", size)
    # (With two others what is for it alone goes to it alone.)
    two = ground.host(network, 2)
    wait_until(lambda: len(two.state()["peers"]) == 2, LIMIT_SECONDS, "two others")
    two.ping(GUEST_IP)
    one.ping(two.ip)
    answers.send(signal.SIGSTOP)
    one.ping(two.ip)
    answers.send(signal.SIGCONT)
    one.ping(GUEST_IP)
    ground.must("down", "example")
    require(answers.wait(LIMIT_SECONDS) == 0, answers.tail())


# What a child by fork does with its parent's port; and a parent that goes on. Until somebody ends the port.
FORKS = """
import ctypes, errno, os, sys
library = ctypes.CDLL(sys.argv[1], use_errno=True)
opens, queue_of, receives, waits = (getattr(library, "ringlet_port_" + name) for name in ("open", "queue_of", "receive", "wait"))
opens.restype = queue_of.restype = ctypes.c_void_p
options = ctypes.create_string_buffer(32)
ctypes.cast(options, ctypes.POINTER(ctypes.c_char_p))[0] = b"forks"
print("opens", flush=True)
port = ctypes.c_void_p(opens(sys.argv[2].encode(), options))
queue, none = ctypes.c_void_p(queue_of(port, 0)), ctypes.c_void_p(0)
frames = ctypes.create_string_buffer(100)
child = os.fork()
if not child:
    fd, others = library.ringlet_port_fd, library.ringlet_port_others
    for call in (lambda: receives(queue, frames, 1), lambda: waits(queue, 0), lambda: fd(queue), lambda: others(port)):
        assert call() == -1 and ctypes.get_errno() == errno.ENOTCONN
    library.ringlet_port_close(port)
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
for call in (lambda: library.ringlet_port_fd(none), lambda: library.ringlet_port_others(none), lambda: library.ringlet_port_news(none, frames, 100)):
    assert call() == -1 and ctypes.get_errno() == errno.EINVAL
library.ringlet_port_close(none)
while waits(queue, -1) == 0:
    if (came := receives(queue, frames, 1)) > 0:
        print("came", flush=True)
assert ctypes.get_errno() == errno.ESHUTDOWN, ctypes.get_errno()
library.ringlet_port_close(port)
"""


@scene
def forked(ground):
    """A child by fork takes nothing of its parent's port with it; and who asks a port to end that is not open yet is heard."""
    network = ground.network()
    one = ground.host(network, 1)
    library = pathlib.Path(ground.command).parent / "libringlet_native.so"
    program = ground.start([sys.executable, "-c", FORKS, library, network])
    require(program.line(LIMIT_SECONDS) == "opens" and program.line(LIMIT_SECONDS) == "0", program.tail())
    one.await_carrier(True)
    one.start("ping", "-n", "-c", "1", "-W", "1", GUEST_IP)
    require(program.line(LIMIT_SECONDS) == "came", program.tail())
    ground.must("down", "forks")
    require(program.wait(LIMIT_SECONDS) == 0, program.tail())
    # (While one that is there does not answer, a port takes its time to be open.)
    one.port.send(signal.SIGSTOP)
    program = ground.start([sys.executable, "-c", FORKS, library, network])
    require(program.line(LIMIT_SECONDS) == "opens", program.tail())
    wait_until(lambda: ground.eth("down", "forks")[0] == 0, LIMIT_SECONDS, "it to be ended")
    require(program.wait(LIMIT_SECONDS) == 0, program.tail())
    one.port.send(signal.SIGCONT)
