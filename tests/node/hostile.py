"""Guests that mean ill: what they do is theirs to bear, and nobody else's."""

import array
import contextlib
import fcntl
import os
import resource
import signal
import socket
import struct

from ground import ANSWER_SECONDS
from harness import Skipped, frame, framed, require
from world import Across, Service, effective, note, until, world

NODE, GREETING, COME, MET, APART, STATUS = 6, 1, 2, 3, 4, 5
LINGER_SECONDS = 3600
FEW_DESCRIPTORS, AT_ONCE = 1000, 200
CAP_SYS_RESOURCE = 1 << 24
WAIT_LONG = "[limits]\nwait_seconds = 3600\n"


def come(service):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.settimeout(ANSWER_SECONDS)
    guest.connect(str(service.socket))
    return guest


def message(kind, accepting=0):
    return frame(NODE, kind, struct.pack("<4I", accepting, 0, 0, 0))


def heard(guest):
    """The kind of the service's next message; none if it has parted."""
    with contextlib.suppress(ConnectionError):
        if data := guest.recv(1000):
            return framed(data, NODE)[0]


def show(guest, shown):
    """True if it was greeted, and has got there."""
    if heard(guest) != GREETING:
        return False
    with contextlib.suppress(BrokenPipeError):
        guest.sendmsg([message(COME)], rights(shown))
        return True
    return False


def rights(*shown):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [each.fileno() for each in shown]))]


def refused(service):
    with come(service) as guest:
        return heard(guest) == APART


@contextlib.contextmanager
def stopped(service):
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def scenes(ground):
    def scene(name, play, policy=""):
        with ground.scene(name), Service(ground.ringlet.command, ground.directory, policy) as service:
            play(name, service)
            require(service.process.poll() is None, f"the service died: {service.told()}")

    def unclosable(name, service):
        """Whoever closes one of these last waits for its linger time: the service, which alone still has it."""
        held = []

        def hang(count):
            """How many of so many were greeted, and are now the service's to close. (A signal ends the waiting of those that wait already.)"""
            greeted = []
            for _ in range(count):
                near, far = connection()
                near.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        near.send(bytes(1 << 20))
                guest = come(service)
                held.extend([far, guest])
                if heard(guest) == GREETING:
                    greeted.append((guest, near))
                else:
                    near.close()
            with stopped(service):
                for guest, near in greeted:
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
                    guest.sendmsg([message(COME)], rights(near))
                    near.close()
            return len(greeted)

        def honest():
            near, far = connection()
            with come(service) as guest:
                shown = show(guest, near)
                near.close()
                far.settimeout(ANSWER_SECONDS)
                try:
                    require(far.recv(1) == b"", "a byte from nowhere")
                except TimeoutError:
                    require(False, f"the close of one that was {'shown' if shown else 'not shown'} does not reach its peer")
                far.close()

        hang(1)
        honest()
        require(hang(40) == 40, "not all were greeted")
        honest()
        # From whom so much can't be closed nothing more is taken.
        until(lambda: refused(service), "a guest to be refused")
        for each in held:
            each.close()
        note(name, "kernel", "node-full")

    def gone(name, service):
        """One ends when it has shown its end, before it is told of the other's."""
        near, far = connection()
        with near, far, come(service) as one, come(service) as other:
            require(heard(one) == heard(other) == GREETING, "they were not greeted")
            one.sendmsg([message(COME, accepting=1)], rights(far))
            until(lambda: service.status()["waiting"] == 1, "the first to wait")
            with stopped(service):
                other.sendmsg([message(COME)], rights(near))
                other.close()
            # (That a carrier was started is noted too.)
            decided = lambda: {what: count for what, count in service.status()["decisions"].items() if what != "carrier-started"}
            until(decided, "something to be decided")
            require(decided() == {"gone": 1}, f"what is noted of it: {decided()}")

    def on_their_way(name, service):
        """Descriptors that lie in sockets' queues count for their user, and every root is one user."""
        queues = []
        most = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)[0]
        require(most == FEW_DESCRIPTORS, f"the service's limit: {most}")
        with open(os.devnull) as shown, world() as host:
            for _ in range(2 * FEW_DESCRIPTORS // AT_ONCE):
                one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                one.sendmsg([b"x"], rights(*[shown] * AT_ONCE))
                queues += [one, other]
            server, client = host.container(), host.container()
            Across(ground, server.name, client.name, server.ip).meets(name)
            for each in queues:
                each.close()

    name = "a neighbour of the same user with too many descriptors on their way"
    with ground.scene(name):
        if not effective(os.getpid()) & CAP_SYS_RESOURCE:
            raise Skipped("nobody here may have CAP_SYS_RESOURCE")
        few = ["prlimit", f"--nofile={FEW_DESCRIPTORS}"]
        with Service(ground.ringlet.command, ground.directory, before=few) as service:
            on_their_way(name, service)

    scene("a neighbour whose descriptors can't be closed", unclosable, WAIT_LONG)
    scene("an end that is gone before it is introduced", gone)
    scene("an end that is gone before it is carried", gone, 'same_pod = false\notherwise = "isolated"\n')
