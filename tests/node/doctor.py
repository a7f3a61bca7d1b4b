"""`ringlet doctor` in a container: what is missing there, and how it is mended."""

import json
import os
import pathlib
import socket
import subprocess

from ground import can
from harness import Skipped, require
from world import ALONE, Service, inside, world

PATIENCE_SECONDS = 300
REFUSE = "same_pod = false\n"


def scenes(ground):
    ringlet = str(pathlib.Path(ground.ringlet.command).resolve())

    def told(name, where, path, **environment):
        """What the doctor says of this, and the fix."""
        environment = {**os.environ, "RINGLET_NODE": str(path), **environment}
        argv = [*(inside(where, *ALONE) if where else []), ringlet, "doctor", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        return checks[name]["status"], f"{checks[name]['found']} {checks[name]['fix']}"

    def says(expected, words, *asked, **environment):
        status, text = told(*asked, **environment)
        require(status == expected and all(word in text for word in words), f"{asked}: {status}: {text}")

    with ground.scene("doctor: no service, another's, and one that has died"), world() as host:
        name, place = host.container().name, pathlib.Path(ground.directory)
        says("ok", ["of its own"], "namespaces", name, "off")
        says("ok", ["the host's"], "namespaces", None, "off")
        says("warn", ["nobody is asked"], "node service", name, "off")
        says("ok", ["it is for containers"], "node service", None, place / "none/node.sock")
        says("warn", ["nor its directory", "podman run -v /run/ringlet"], "node service", name, place / "none/node.sock")
        says("warn", ["no service in it", "ringlet node run"], "node service", name, place / "node.sock")
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        dead.bind(f"{place}/node.sock")
        says("warn", ["nobody listens"], "node service", name, place / "node.sock")
        dead.listen(9)
        dead.close()
        missing = f"{place}/libringlet_preload.so"
        says("fail", ["not to be had", "podman run -v"], "preload", name, "off", LD_PRELOAD=missing)

    with ground.scene("doctor: a service that introduces"), world() as host, Service(ringlet, ground.directory) as service:
        says("ok", ["has introduced"], "node service", host.container().name, service.socket)

    with ground.scene("doctor: a service that refuses"), world() as host, Service(ringlet, ground.directory, REFUSE) as service:
        says("warn", ["policy does not let", "node.toml"], "node service", host.container().name, service.socket)

    with ground.scene("doctor: a service that isolates"), world() as host, Service(ringlet, ground.directory, f'{REFUSE}otherwise = "isolated"') as service:
        says("ok", ["carried"], "node service", host.container().name, service.socket)

    with ground.scene("doctor: a service that looks elsewhere"), world() as host:
        mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
        group = next((pathlib.Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
        elsewhere = group and group / f"ringlet-{os.getpid()}"
        if not elsewhere or not can("mkdir", str(elsewhere)):
            raise Skipped("no control group can be made")
        try:
            with Service(ringlet, ground.directory, more=["--cgroup", elsewhere]) as service:
                says("warn", ["has not seen", "--cgroup"], "node service", host.container().name, service.socket)
        finally:
            elsewhere.rmdir()
