"""Running programs are controlled, watched and compared: `ringlet off` and `on`, `capture`, `explain`, `compare`, `bench`. Every byte is checked
meanwhile, and that a connection is where ringlet says by what the loopback interface carries.

    python3 tests/control [--seed N] [--ringlet PATH] [GROUP...]

Runs in namespaces of its own, of the network and of processes, to see and to control nothing else; exit status 77 where none can
be made.
"""

import fcntl
import json
import os
import pathlib
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import harness  # noqa: E402
from harness import CLIENT_SECONDS, START_SECONDS, Failed, free_port, listening, needs, require  # noqa: E402
from harness import play, scenes_options, scenes_parser, wait_until  # noqa: E402

GROUPS = "paths capture explain reasons strangers compare bench".split()
ENDS = pathlib.Path(__file__).resolve().parent / "ends.py"
INSIDE = "TEST_INSIDE_NAMESPACES"
SKIPPED = 77
IFF_UP, SIOCSIFFLAGS = 1, 0x8914


def enter_namespace():
    """This program again, in namespaces of its own, with the loopback interface up."""
    if INSIDE not in os.environ:
        users = [] if os.geteuid() == 0 else ["--map-root-user"]
        unshare = ["unshare", *users, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            print("no namespaces can be made here")
            sys.exit(SKIPPED)
        os.environ[INSIDE] = "1"
        os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


class End:
    """A running `ends.py`."""

    def __init__(self, test, *words, role="server", user=None, host="127.0.0.1"):
        python, program = sys.executable, ENDS
        if user:  # who may not be able to reach these
            python, program = "/usr/bin/python3", shutil.copy(ENDS, test.directory)
            needs(python)
        self.process = test.start(role, [python, program, *words], user=user, env={"HOST": host})
        self.pid = self.process.pid

    def line(self, seconds=CLIENT_SECONDS):
        line = self.process.line(seconds)
        if line is None:
            raise Failed(f"nothing was said: {self.process.poll()}\n{self.process.tail()}\n{self.process.where()}")
        return line

    def ask(self, command):
        self.process.write(command + "\n")

    def do(self, command):
        self.ask(command)
        return int(self.line())


class Ground(harness.Ground):
    """With commands, and ends of connections."""

    def pair(self, way="recv", host="127.0.0.1", **options):
        """A server and a client with a connection in shared memory."""
        port = free_port()
        server = End(self, "server", port, way, host=host, **options)
        wait_until(lambda: listening(port), START_SECONDS, "a server to listen")
        client = End(self, "client", port, role="client", host=host)
        client.port, client.server_port = int(client.line()), port
        shown = f"[{host}]" if ":" in host else host
        client.name = f"{shown}:{client.port}-{shown}:{port}"
        client.do("send 20")
        self.await_path(client, "ring")
        return server, client

    def paths(self, client):
        return {row["path"] for row in self.ringlet.connections(client.port)}

    def await_path(self, client, path):
        """A few messages at a time until the connection is there."""

        def there():
            client.do("send 3")
            return self.paths(client) == {path}

        wait_until(there, START_SECONDS, f"the connection to be on the {path}")

    def command(self, *words, status=0, user=None):
        """A ringlet command; what it printed."""
        group = {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        argv = [self.ringlet.command, *map(str, words)]
        done = subprocess.run(argv, capture_output=True, timeout=CLIENT_SECONDS, **group)
        said = done.stdout.decode() + done.stderr.decode()
        require(status is None or done.returncode == status, f"ringlet {words}: exit status {done.returncode}, not {status}\n{said}")
        return done.stdout.decode()

    def json(self, *words, **options):
        return json.loads(self.command(*words, "--json", **options))


def main():
    options = scenes_options(scenes_parser(__doc__, GROUPS), GROUPS)
    enter_namespace()
    sys.exit(play("control", options, Ground))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    # What the groups import from here must be this very module.
    sys.modules["control"] = sys.modules["__main__"]
    main()
