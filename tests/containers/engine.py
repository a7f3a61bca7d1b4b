"""Podman with a place of its own, an image of this machine's programs, and containers of it."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess

from ground import ANSWER_SECONDS
from harness import Process, require, wait_until

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
IMAGE = "ringlet-test:1"
ENGINE_SECONDS = 120
WORK_SECONDS = 240
LIBRARY = "/usr/local/lib/ringlet/libringlet_preload.so"
NUMBERS = itertools.count(1)
ALLOW = "[[allow]]\nbetween = ['*libpod-*', '*']\n"

# Limits: who may not raise his own can give no higher ones.
SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=1024:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
network_backend = "netavark"
network_config_dir = "{place}/networks"
"""
COMMANDS = "sh cat ip ping redis-server redis-cli redis-benchmark nginx wrk".split()


def postgresql():
    """Where its commands are (Debian keeps them out of the PATH), its libraries and its data."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        return []
    version = found[-1].parent.parent
    return [version, pathlib.Path("/usr/share/postgresql") / version.name, pathlib.Path("/usr/share/zoneinfo")]


def needed_by(program):
    """The libraries, and the loader."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=ENGINE_SECONDS).stdout
    return re.findall(r"(/\S+) \(0x", told)


def copy(path, root, follow=True):
    to = root / str(path).lstrip("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    if not to.exists():
        shutil.copy2(path, to, follow_symlinks=follow)


class Engine:
    def __init__(self, ground):
        self.ground, self.place = ground, pathlib.Path(ground.directory) / "engine"
        self.ringlet = pathlib.Path(ground.ringlet.command).resolve()
        self.run_directory = pathlib.Path("/run/ringlet")
        self.place.mkdir()
        (self.place / "networks").mkdir()
        settings = self.place / "containers.conf"
        settings.write_text(SETTINGS.format(place=self.place))
        self.environment = {**os.environ, "CONTAINERS_CONF": str(settings)}
        self.base = ["podman", "--root", str(self.place / "root"), "--runroot", "/run/podman-test"]
        self._make_image()
        # The file as it is shipped, but for where the library was built.
        cdi = (DEPLOY / "ringlet-cdi.json").read_text()
        library = '"hostPath": "/usr/local/lib/ringlet"'
        require(library in cdi, "no library in the CDI file")
        self.shipped = self.place / "library"
        self.shipped.mkdir()
        shutil.copy2(self.ringlet.with_name("libringlet_preload.so"), self.shipped)
        pathlib.Path("/run/cdi").mkdir(exist_ok=True)
        pathlib.Path("/run/cdi/ringlet.json").write_text(cdi.replace(library, f'"hostPath": "{self.shipped}"'))

    def podman(self, *words):
        done = subprocess.run([*self.base, *map(str, words)], capture_output=True, text=True, timeout=ENGINE_SECONDS, env=self.environment)
        require(done.returncode == 0, f"podman {' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def _make_image(self):
        root = self.place / "image"
        programs = [shutil.which(command) for command in COMMANDS]
        for tree in postgresql():
            shutil.copytree(tree, root / str(tree).lstrip("/"), symlinks=True, dirs_exist_ok=True)
            programs += [path for path in tree.rglob("*") if path.is_file() and (path.suffix == ".so" or path.parent.name == "bin")]
        for program in programs:
            copy(program, root)
            for library in needed_by(program):
                copy(library, root)
        copy(self.ringlet, root)
        (root / "usr/local/bin").mkdir(parents=True)
        shutil.move(root / str(self.ringlet).lstrip("/"), root / "usr/local/bin/ringlet")
        if not (root / "bin/sh").exists():
            copy("/bin/sh", root)
        for directory in "tmp", "var/lib/nginx", "var/log/nginx", "run", "etc":
            (root / directory).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\npostgres:x:999:999::/tmp:/bin/sh\n")
        (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\npostgres:x:999:\n")
        image = self.place / "image.tar"
        subprocess.run(["tar", "-C", root, "-cf", image, "."], check=True, timeout=ENGINE_SECONDS)
        shutil.rmtree(root)
        self.podman("import", "-q", image, IMAGE)
        image.unlink()

    @contextlib.contextmanager
    def container(self, *words, options=(), given=("--device", "ringlet.local/node=all")):
        """One that goes on, until it is removed."""
        name = f"c{next(NUMBERS)}"
        container = self.podman("run", "-d", "--name", name, *given, *options, IMAGE, *words)
        try:
            yield Container(self, name)
        finally:
            subprocess.run([*self.base, "rm", "-f", "-t", "0", name], capture_output=True, timeout=ENGINE_SECONDS, env=self.environment)
            # What cleans up behind a container that has ended does so by itself.
            wait_until(lambda: not self._is_busy(container.encode()), ENGINE_SECONDS, "Podman to have cleaned up")

    def _is_busy(self, container):
        for command in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = command.read_bytes().split(b"\0")
                is_ours = str(self.place / "root").encode() in words
                if is_ours and (container in words or words[0].endswith(b"podman")):
                    return True
        return False

    def start(self, *words, options=(), given=("--device", "ringlet.local/node=all")):
        """One whose end is awaited."""
        argv = [*self.base, "run", "--rm", *given, *options, IMAGE, *words]
        return Process(list(map(str, argv)), self.ground.directory, env={"CONTAINERS_CONF": self.environment["CONTAINERS_CONF"]})

    def on_ring(self, client, ports, service, count=1):
        """Both ends of so many connections to be in shared memory while the client runs; then, that it ends well. What the service says of it."""
        before = service.status()["decisions"].get("met", 0)

        def seen():
            rows = [row for port in ports for row in self.ground.ringlet.connections(port)]
            rings = [row for row in rows if row["path"] == "ring"]
            return len({row["pid"] for row in rings}) >= 2 and len(rings) >= 2 * count or client.poll() is not None

        wait_until(seen, WORK_SECONDS, "both ends to be on the ring")
        was_running = client.poll() is None
        status = client.wait(WORK_SECONDS)
        require(status == 0, f"the client: {status}: {client.tail()}")
        met = service.status()["decisions"].get("met", 0) - before
        require(was_running, f"never on the ring; {met} met; {service.status()}")
        require(met >= count, f"only {met} have met: {service.status()}")
        return met


class Container:
    def __init__(self, engine, name):
        self.engine, self.name = engine, name

    def inspect(self, what):
        return self.engine.podman("inspect", "-f", "{{" + what + "}}", self.name)

    @property
    def ip(self):
        return self.inspect(".NetworkSettings.IPAddress")

    @property
    def gate(self):
        return self.inspect(".NetworkSettings.Gateway")

    def listens(self, port):
        def answers():
            require(self.inspect(".State.Running") == "true", f"{self.name}: {self.logs()}")
            with contextlib.suppress(OSError), socket.create_connection((self.ip, port), timeout=ANSWER_SECONDS):
                return True

        wait_until(answers, ANSWER_SECONDS, f"{self.name} to listen")

    def logs(self):
        done = subprocess.run([*self.engine.base, "logs", self.name], capture_output=True, text=True, timeout=ENGINE_SECONDS, env=self.engine.environment)
        return (done.stdout + done.stderr)[-2000:]

    def execute(self, *words):
        # (Podman does not give a CDI file's environment to what is executed later.)
        argv = [*self.engine.base, "exec", "--env", f"LD_PRELOAD={LIBRARY}", self.name, *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=ENGINE_SECONDS, env=self.engine.environment)

    def doctor(self):
        done = self.execute("/usr/local/bin/ringlet", "doctor", "--json")
        return {check["name"]: check for check in json.loads(done.stdout)["checks"]}
