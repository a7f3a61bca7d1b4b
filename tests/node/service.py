"""What the service is as a process: what it has given up, how little it needs to begin with, and how it is started by systemd's protocol."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

from harness import require
from world import Across, Service, until, world

CAP_SYS_RESOURCE, CAP_BPF = 1 << 24, 1 << 39
# Before it, looking into one's own map may take a capability.
FREE_LOOKUPS = (5, 19)
# As systemd starts one: its number in LISTEN_PID is known only after the fork.
HANDED_OVER = """
import os, socket, sys
names, paths = sys.argv[1], sys.argv[2].split(":")
made = []
for number, path in enumerate(paths):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(4096)
    made.append(os.dup(listener.detach()))
for number, each in enumerate(made):
    os.dup2(each, 100 + number)
os.closerange(3, 100)
for number in range(len(made)):
    os.dup2(100 + number, 3 + number, inheritable=True)
os.dup2(0, 90, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(made)), LISTEN_FDNAMES=names)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def fields(directory):
    lines = (directory / "status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def require_confined(service):
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    tasks = list(pathlib.Path(f"/proc/{service.process.pid}/task").iterdir())
    require(len(tasks) > 1, "no thread but the first")
    for task in tasks:
        told = fields(task)
        require((told["Seccomp"], told["NoNewPrivs"]) == ("2", "1"), f"not confined: {told}")
        allowed = CAP_SYS_RESOURCE | (0 if release >= FREE_LOOKUPS else CAP_BPF)
        for name in "CapEff CapPrm CapInh CapBnd CapAmb".split():
            # (A bounding set gives nothing to who may get no privileges; who may not shrink it keeps it.)
            rest = int(told[name], 16) & ~(allowed if name in ("CapEff", "CapPrm") else 0)
            require(rest == 0 or (name == "CapBnd" and service.before), f"{name}: {told[name]}")


def descriptors(service):
    place = pathlib.Path(f"/proc/{service.process.pid}/fd")
    return {int(each.name): os.readlink(each) for each in place.iterdir()}


def scenes(ground):
    def meets(name):
        with world() as host:
            server, client = host.container(), host.container()
            Across(ground, server.name, client.name, server.ip).meets(name)

    name = "a service that has given up what it does not need"
    with ground.scene(name), Service(ground.ringlet.command, ground.directory) as service:
        require_confined(service)
        meets(name)
        require_confined(service)

    name = "a service that had two capabilities to begin with"
    least = ["setpriv", "--bounding-set=-all,+bpf,+net_admin", "--inh-caps=-all"]
    with ground.scene(name), Service(ground.ringlet.command, ground.directory, before=least) as service:
        require(service.runs(), f"it does not start: {service.told()}")
        require_confined(service)
        meets(name)

    for lost in "bpf", "net_admin":
        with ground.scene(f"a service without {lost}"):
            least = ["setpriv", f"--bounding-set=-{lost},-sys_admin", f"--inh-caps=-{lost}"]
            with Service(ground.ringlet.command, ground.directory, before=least) as service:
                require(not service.runs() and "CAP_BPF and CAP_NET_ADMIN" in service.told(), f"what it says: {service.told()}")

    name = "sockets that were handed over"
    with ground.scene(name):
        paths = [f"{ground.directory}/run/node.sock", f"{ground.directory}/shop.sock"]
        pathlib.Path(paths[0]).parent.mkdir(exist_ok=True)
        for path in paths:
            pathlib.Path(path).unlink(missing_ok=True)
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notified.bind(f"{ground.directory}/notify.sock")
        notified.settimeout(0)
        before = ["env", f"NOTIFY_SOCKET={ground.directory}/notify.sock", sys.executable, "-c", HANDED_OVER, "node:shop", ":".join(paths)]
        with Service(ground.ringlet.command, ground.directory, 'labels = ["shop"]\nsame_pod = false\n', before=before) as service:
            require(service.runs(), f"it does not start: {service.told()}")
            require(notified.recv(100) == b"READY=1\n", "the service manager is not told")
            left = descriptors(service)
            require(90 not in left, f"what it was started with is still open: {left}")
            require(not (pathlib.Path(ground.directory) / "labels").exists(), "it has made a socket beside the one that was handed over")
            with world() as host:
                server, client = host.container(), host.container()
                Across(ground, server.name, client.name, server.ip).stays_apart(name, "refused")
                os.environ["RINGLET_NODE"] = paths[1]
                Across(ground, server.name, client.name, server.ip).meets(f"{name}, by a label's")

    name = "a policy that is read again"
    with ground.scene(name), Service(ground.ringlet.command, ground.directory, "same_pod = false\n") as service, world() as host:
        server, client = host.container(), host.container()
        pair = lambda: Across(ground, server.name, client.name, server.ip)  # noqa: E731

        def told(outcome, count):
            os.kill(service.process.pid, signal.SIGHUP)
            until(lambda: service.status()["decisions"].get(outcome, 0) == count, f"{outcome}, {count} times")

        pair().stays_apart(f"{name}: before", "refused")
        service.policy.write_text("same_pod = maybe")
        told("policy-refused", 1)
        service.policy.unlink()
        told("policy-refused", 2)
        # (An editor has just made it anew.)
        service.policy.write_text("")
        told("policy-refused", 3)
        pair().stays_apart(f"{name}: and can't be", "refused")
        # (As an editor does it.)
        other = service.policy.with_name("new.toml")
        other.write_text('labels = ["shop"]\notherwise = "isolated"\n')
        other.rename(service.policy)
        told("policy", 1)
        for what in "changed: same_pod", "a restart is needed for: labels, otherwise":
            require(what in service.told(), f"what it says: {service.told()}")
        pair().meets(name)
        require_confined(service)

    with ground.scene("a socket of another kind was handed over"):
        other = HANDED_OVER.replace("SOCK_SEQPACKET", "SOCK_STREAM")
        path = f"{ground.directory}/other.sock"
        argv = [sys.executable, "-c", other, "node", path, str(pathlib.Path(ground.ringlet.command).resolve()), "node", "run"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        require(done.returncode == 1 and "sequenced packets" in done.stderr, f"{done}")
