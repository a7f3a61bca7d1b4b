"""Ten thousand connections in one process, most of them idle: what they cost in memory, in descriptors, and in looks.

    python3 tests/scale.py [--connections N] [--ringlet COMMAND]

A server process holds all of them; client processes hold a part each, so that no limit on descriptors is met. Asserted: memory
of the server for a connection, and descriptors no more than the kernel's and a constant. Reported: a round trip on a few busy
connections, with few and with all connections open.
"""

import argparse
import json
import os
import pathlib
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "suites"))

import harness  # noqa: E402
import inside  # noqa: E402
from harness import ROOT, Failed, Process, Ringlet, Skipped, require  # noqa: E402

CLIENTS = 4
BUSY = 8
TRIPS = 200  # a connection has moved long before
FEW = 100
# Two rings of two directions keep a few pages each while they keep up, beside the kernel's part and this program's own.
KB_FOR_A_CONNECTION = 24
DESCRIPTORS_BESIDE = 64
STEP_SECONDS = 600


def limit_descriptors(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        print(f"limit {hard}", flush=True)
        sys.exit(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def held():
    status = pathlib.Path("/proc/self/status").read_text()
    rollup = pathlib.Path("/proc/self/smaps_rollup").read_text()
    pss = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))
    return {"descriptors": len(os.listdir("/proc/self/fd")), "kb": pss, "threads": threads}


def serve(count):
    """Echoes, by one epoll loop; a line of input asks what is held."""
    limit_descriptors(count + 1000)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    watch = select.epoll()
    watch.register(listener, select.EPOLLIN)
    watch.register(0, select.EPOLLIN)
    connections = {}
    print(listener.getsockname()[1], flush=True)
    while True:
        for fd, _ in watch.poll():
            if fd == listener.fileno():
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                connections[sock.fileno()] = sock
                watch.register(sock, select.EPOLLIN)
            elif fd == 0:
                if not os.read(0, 100):
                    return
                print(json.dumps({"connections": len(connections), **held()}), flush=True)
            else:
                data = connections[fd].recv(4096)
                if data:
                    connections[fd].sendall(data)
                else:
                    connections.pop(fd).close()


def connect(port, count):
    """`open N` makes connections and warms each; `busy N` measures round trips, in microseconds, over a few of them."""
    limit_descriptors(count + 1000)
    connections = []

    def trip(sock):
        sock.sendall(b"12345678")
        got = b""
        while len(got) < 8:
            got += sock.recv(8 - len(got))

    for line in sys.stdin:
        word, number = line.split()
        if word == "open":
            for _ in range(int(number)):
                sock = socket.create_connection(("127.0.0.1", port))
                connections.append(sock)
                for _ in range(20):
                    trip(sock)
            print(len(connections), flush=True)
        else:
            times = []
            for _ in range(int(number)):
                for sock in connections[:BUSY]:
                    began = time.perf_counter()
                    trip(sock)
                    times.append(time.perf_counter() - began)
            print(f"{sorted(times)[len(times) // 2] * 1e6:.1f}", flush=True)


class Scale:
    def __init__(self, name, wrap, directory, count):
        self.name, self.count = name, count
        self._moves = directory / f"moves-{name}"
        self._moves.touch()
        self._directory = directory
        me = [sys.executable, __file__]
        self.processes = []
        self.server = self._start(wrap, [*me, "serve", str(count)])
        port = self._answer(self.server)
        if port.startswith("limit"):
            raise Skipped(f"the {port} on descriptors is too low for {count} connections")
        share = count // CLIENTS
        self.clients = [self._start(wrap, [*me, "connect", port, str(share)]) for _ in range(CLIENTS)]

    def _start(self, wrap, argv):
        process = Process(wrap(argv, self._moves) if wrap else argv, self._directory)
        self.processes.append(process)
        return process

    def _answer(self, process):
        line = process.line(STEP_SECONDS)
        require(line is not None, f"{self.name}: no answer\n{process.tail()}\n{process.where()}")
        return line

    def _open(self, count):
        for client in self.clients:
            client.write(f"open {count // CLIENTS}\n")
        for client in self.clients:
            self._answer(client)

    def _held(self):
        self.server.write("held\n")
        return json.loads(self._answer(self.server))

    def _busy(self):
        self.clients[0].write(f"busy {TRIPS}\n")
        return float(self._answer(self.clients[0]))

    def measure(self):
        empty = self._held()
        self._open(FEW)
        few = self._busy()
        self._open(self.count - FEW)
        all_open = self._busy()
        full = self._held()
        require(full["connections"] == self.count, f"{self.name}: {full['connections']} connections of {self.count}")
        moved = self._moves.read_bytes().count(b"\n")
        kb = (full["kb"] - empty["kb"]) / self.count
        beside = full["descriptors"] - full["connections"]
        print(
            f"{self.name:8}{self.count} connections, {moved} ends moved: {kb:.1f} kB each in the server, "
            f"{beside} descriptors beside them; round trip {few} us with {FEW}, {all_open} us with all",
            flush=True,
        )
        return kb, beside, moved

    def close(self):
        for process in self.processes:
            process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    harness.adopt_orphans()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringlet-scale-"))
    directory.chmod(0o755)
    problem = None
    try:
        ringlet = Ringlet(arguments.ringlet, directory)
        inside.enter()
        results = {}
        wraps = {"kernel": None, "ringlet": lambda argv, moves: [str(ringlet.command), "run", "--moves", str(moves), "--", *argv]}
        for name, wrap in wraps.items():
            scale = Scale(name, wrap, directory, arguments.connections)
            try:
                results[name] = scale.measure()
            finally:
                scale.close()
        kb, beside, moved = results["ringlet"]
        require(moved >= 2 * arguments.connections, f"only {moved} ends of {arguments.connections} connections moved")
        require(kb <= KB_FOR_A_CONNECTION, f"{kb:.1f} kB for each connection, more than {KB_FOR_A_CONNECTION}")
        allowed = results["kernel"][1] + DESCRIPTORS_BESIDE
        require(beside <= allowed, f"{beside} descriptors beside the connections, more than {allowed}")
    except Skipped as reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    except Failed as failure:
        problem = str(failure)
    finally:
        left = harness.end_orphans()
        shutil.rmtree(directory, ignore_errors=True)
    if problem or left:
        sys.exit(f"FAILED: {problem or ''} {'left behind: ' + ', '.join(left) if left else ''}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    elif sys.argv[1:2] == ["connect"]:
        connect(int(sys.argv[2]), int(sys.argv[3]))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        main()
