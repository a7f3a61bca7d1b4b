"""Who must not meet: what ends a connection and makes another one, who may not, and liars."""

import array
import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading

from harness import frame, framed, require
from world import Across, Service, note, until, within, world

NODE, GREETING, COME, STATUS = 6, 1, 2, 5
CLONE_NEWNET = 0x40000000
REFUSE = "same_pod = false\n"
WAIT_LONG = "[limits]\nwait_seconds = 3600\n"
FEW = f"{WAIT_LONG}guests = 2\n"
# More than the machine has besides.
REMEMBERED = 1024
SOME = f"[limits]\nconnections = {REMEMBERED}\n"


class Relay:
    """A proxy in a thread of ours, which is not wrapped: it passes on the same bytes, on another connection."""

    def __init__(self, namespace, ip, to):
        self.to = to
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        ready = threading.Event()

        def serve():
            setns(there)
            self.listener = socket.create_server((ip, 0))
            self.port = self.listener.getsockname()[1]
            ready.set()
            near, _ = self.listener.accept()
            far = socket.create_connection(self.to())
            for one, other in (near, far), (far, near):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=relay, args=(one, other), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        require(ready.wait(30), "no proxy")
        os.close(there)


def setns(descriptor):
    require(ctypes.CDLL(None).setns(descriptor, CLONE_NEWNET) == 0, "setns")


def relay(one, other):
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


# Root of a container where the service's directory is mounted writable: it is where the service was, says what that says, and tells of each connection that it is shown.
IMPOSTOR = """
import os, socket, sys
path = sys.argv[1]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visit:
    visit.connect(path)
    greeting = visit.recv(4096)
os.unlink(path)
place = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
place.bind(path)
os.chmod(path, 0o666)
place.listen(100)
print("there", flush=True)
while True:
    guest = place.accept()[0]
    print("visited", flush=True)
    try:
        guest.send(greeting)
        said, shown, *_ = socket.recv_fds(guest, 4096, 4)
        print("shown" if shown else "left", flush=True)
    except OSError:
        print("left", flush=True)
"""
# Such as no process of the host's can be seen from; users are the host's.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@contextlib.contextmanager
def impostor(path):
    held = subprocess.Popen([*CONTAINER, sys.executable, "-I", "-c", IMPOSTOR, str(path)], stdout=subprocess.PIPE, text=True)
    lines = []
    try:
        require(held.stdout.readline() == "there\n", "the impostor could not do what it is for")
        threading.Thread(target=lambda: lines.extend(held.stdout), daemon=True).start()
        yield lines
    finally:
        held.kill()
        held.wait()


def scenes(ground):
    def scene(name, play, policy=""):
        with ground.scene(name), Service(ground.ringlet.command, ground.directory, policy) as service, world() as host:
            play(host, name, service)

    def proxied(host, name, service):
        server, client = host.container(), host.container()
        target = {}
        relay = Relay(host.host, host.gate(), lambda: target["at"])
        prepare = lambda port: target.update(at=(server.ip, port))  # noqa: E731
        ends = Across(ground, server.name, client.name, server.ip, (host.gate(), relay.port), prepare=prepare)
        for _ in range(20):
            ends.talk(20)
            require("ring" not in [row["path"] for row in ends.rows()], f"on the ring through a proxy: {ends.told()}")
        require("met" not in service.status()["decisions"], "through a proxy somebody met")
        until(lambda: service.status()["waiting"] == 2, "both to have come, and to wait for who never comes")
        ends.finish()
        note(name, "kernel", "no-peer")

    def churned(host, name, service):
        """A neighbour without rights makes and ends connections, many times as many as are remembered; one that was there before is still known."""
        server, client, neighbour = host.container(), host.container(), host.container()
        ends = Across(ground, server.name, client.name, server.ip)
        with within(neighbour), socket.create_server((neighbour.ip, 0), backlog=64) as listener:
            for _ in range(4 * REMEMBERED):
                with socket.create_connection(listener.getsockname()), listener.accept()[0]:
                    pass
        ends.meets(name)

    def replaced(host, name, service):
        """Nobody is shown a connection who only has root's number and a writable mount; the service is believed for all that its processes are not seen."""
        server, client = host.container(), host.container()
        between = {"before_server": CONTAINER, "before_client": CONTAINER}
        with impostor(service.socket) as told:
            ends = Across(ground, server.name, client.name, server.ip, **between)
            for _ in range(20):
                ends.talk(50)
            require("visited\n" in told, "nobody has come to the impostor")
            require("shown\n" not in told, "the impostor is shown a connection")
            ends.stays_apart(name, "not-local")
        service.stop()
        service.start()
        Across(ground, server.name, client.name, server.ip, **between).meets(f"{name}, and the service again")

    def writable(host, name, service):
        """The service says so of a container that could do that."""
        visit = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); s.recv(100)"
        for mode in "ro", "rw":
            mount = f"mount --bind {service.socket.parent} {service.socket.parent} && mount -o remount,bind,{mode} {service.socket.parent}"
            inner = [*CONTAINER, "--mount", "sh", "-c", f"{mount} && exec {sys.executable} -I -c '{visit}' {service.socket}"]
            subprocess.run(inner, check=True, timeout=60)
            found = service.status()["decisions"].get("writable-mount", 0)
            require(found == 0 or mode == "rw", "a mount that is read only is said to be writable")
            # (A control group is looked at once.)
            if mode == "ro":
                service.stop()
                service.start()
        require(found == 1, f"nothing is said of a writable mount: {service.told()}")

    def elsewhere(host, name, service):
        """The other host's end is in nobody's notes: here, one whose beginning nobody saw."""
        server, client = host.container(), host.container()
        service.stop()
        ends = Across(ground, server.name, client.name, server.ip)
        service.start()
        ends.stays_apart(name, "no-note")

    def refused(host, name, service):
        server, client = host.container(), host.container()
        Across(ground, server.name, client.name, server.ip).stays_apart(name, "refused")

    def one_wrapped(host, name, service):
        """A listener that is not wrapped never comes."""
        server, client = host.container(), host.container()
        ends = Across(ground, server.name, client.name, server.ip, before_server=["env", "-u", "LD_PRELOAD"])
        until(lambda: ends.talk(20) or service.status()["waiting"] == 1, "the client to wait for who never comes")
        require("ring" not in [row["path"] for row in ends.rows()], f"on the ring: {ends.told()}")
        require("met" not in service.status()["decisions"], "somebody met")
        ends.finish()
        note(name, "kernel", "no-peer")

    def liars(host, name, service):
        """Sockets that are none of a connection's, and messages that are none."""
        server, client = host.container(), host.container()
        random = ground.random
        hang = [come(service) for _ in range(50)]
        for attempt in range(400):
            with come(service) as guest:
                shown = random.choice([[], [0], [0] * random.randrange(2, 12), [guest.fileno()]])
                said = random.choice(
                    [
                        b"",
                        random.randbytes(random.randrange(200)),
                        message(COME, random.randrange(3)),
                        message(random.randrange(1 << 16)),
                        message(STATUS)[:-1],
                    ]
                )
                with contextlib.suppress(OSError):
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", shown))] if shown else []
                    guest.sendmsg([said], rights)
        Across(ground, server.name, client.name, server.ip).meets(name)
        require(service.process.poll() is None, "the service died")
        for each in hang:
            each.close()
        until(lambda: service.status()["guests"] == 0, "all liars to be gone")

    def other_numbers(host, name, service):
        """As of another host: who answers the handshake is a SYN proxy, whose numbers are its own."""
        server, client = host.container(), host.container()

        def guard(port):
            rules = [
                ("before", f"type filter hook prerouting priority -300;\ntcp dport {port} tcp flags syn notrack"),
                ("through", f"type filter hook forward priority 0;\ntcp dport {port} ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm"),
            ]
            host.within(host.host, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
            host.rules(host.host, "guard", *rules)

        routed = host.routed()
        Across(ground, routed.name, client.name, routed.ip, prepare=guard).stays_apart(name, "no-mirror")

    def too_many(host, name, service):
        server, client = host.container(), host.container()
        # Each waits for a far end that never comes.
        held = []

        def waits(shown):
            guest = greeted(service)
            guest.sendmsg([message(COME)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [shown.fileno()]))])
            held.append(guest)

        def first_waits():
            """(The service may have to hear first of how both connections began; and who asks it is a guest, too.)"""
            while held:
                held.pop().close()
            waits(shown[0])
            return service.status()["waiting"] == 1

        with socket.create_server(("127.0.0.1", 0)) as listener:
            shown = [socket.create_connection(listener.getsockname()) for _ in range(2)]
            until(first_waits, "the first to wait")
            waits(shown[1])
        held += shown
        Across(ground, server.name, client.name, server.ip).stays_apart(name, "node-full")
        for each in held:
            each.close()

    scene("a SYN proxy", other_numbers)
    scene("more visitors than the policy admits", too_many, FEW)
    scene("a proxy that passes on the same bytes", proxied, WAIT_LONG)
    scene("a connection that is older than the service", elsewhere)
    scene("a policy that allows nothing", refused, REFUSE)
    scene("a server that is not wrapped", one_wrapped)
    scene("beside liars, and who comes and says nothing", liars)
    scene("a neighbour that makes connection after connection", churned, SOME)
    scene("a container's socket in the service's place", replaced)
    scene("a container that may write to the service's directory", writable)


def come(service):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.settimeout(30)
    guest.connect(str(service.socket))
    return guest


def greeted(service):
    """A guest. (Who has just gone, as `ringlet node status`, may count for a moment still: then this one is told that there are too many.)"""
    def comes():
        guest = come(service)
        if framed(guest.recv(200), NODE)[0] == GREETING:
            return guest
        guest.close()
        return None

    return until(comes, "a guest to be greeted")


def message(kind, accepting=0):
    return frame(NODE, kind, struct.pack("<4I", accepting, 0, 0, 0))
