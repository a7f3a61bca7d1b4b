"""What surrounds the programs: the policy that holds without a file, a label, the doctor in a container, the service itself in one."""

import json
import pathlib
import subprocess

import yaml
from engine import ALLOW, DEPLOY, ENGINE_SECONDS, LIBRARY, Engine
from harness import require, wait_until
from programs import REDIS
from world import Service, note


def scenes(ground):
    with ground.scene("an image of this machine's programs"):
        engine = Engine(ground)
    command = ground.ringlet.command

    def service(policy="", **more):
        return Service(command, ground.directory, policy, run="/run/ringlet", **more)

    def bench(there, **more):
        return engine.start("redis-benchmark", "-h", there.ip, "-t", "get,set", "-n", 300_000, "-c", 4, "-q", **more)

    name = "two containers of no pod, and no policy"
    with ground.scene(name), service() as node, engine.container(*REDIS) as there:
        there.listens(6379)
        client = bench(there)
        require(client.wait(ENGINE_SECONDS) == 0, client.tail())
        decisions = node.status()["decisions"]
        require(decisions.get("refused") and "met" not in decisions, f"{decisions}")
        note(name, "kernel", "refused")

    name = "two containers of one label"
    with ground.scene(name), service('labels = ["shop"]\n') as node:
        given = ["-v", f"{ground.directory}/labels/shop:/run/ringlet:ro", "-v", f"{engine.shipped}:/usr/local/lib/ringlet:ro"]
        given += ["--env", f"LD_PRELOAD={LIBRARY}"]
        with engine.container(*REDIS, given=given) as there:
            there.listens(6379)
            met = engine.on_ring(bench(there, given=given), {6379}, node)
            note(name, "met", f"{met} connections")

    with ground.scene("ringlet doctor in a container"), service():
        with engine.container(*REDIS) as whole, engine.container(*REDIS, given=()) as bare:
            told = whole.doctor()
            for check in "namespaces", "preload", "node service", "connection":
                require(told[check]["status"] == "ok", f"{told[check]}")
            require("introduced" in told["node service"]["found"] and "of its own" in told["namespaces"]["found"], f"{told}")
            told = bare.doctor()
            for check, fix in ("node service", "podman run -v /run/ringlet"), ("preload", "podman run -v /usr/local/lib/ringlet"):
                require(told[check]["status"] != "ok" and fix in told[check]["fix"], f"{told[check]}")

    name = "the service in a container, as the DaemonSet has it"
    with ground.scene(name):
        daemon_set, _pod = yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text())
        [container] = daemon_set["spec"]["template"]["spec"]["containers"]
        rights = container["securityContext"]
        require(rights["readOnlyRootFilesystem"] and rights["capabilities"]["drop"] == ["ALL"], f"{rights}")
        groups = next(line.split()[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line)
        policy = pathlib.Path(ground.directory) / "daemon.toml"
        policy.write_text(ALLOW)
        options = ["--pid=host", "--cgroupns=private", "--read-only", "--security-opt", "no-new-privileges", "--cap-drop=ALL"]
        options += [f"--cap-add={right}" for right in rights["capabilities"]["add"]]
        options += ["--security-opt", f"seccomp={rights['seccompProfile']['type'].lower()}"]
        options += ["-v", "/run/ringlet:/run/ringlet", "-v", f"{groups}:/host/cgroup:ro", "-v", f"{policy}:/etc/ringlet/node.toml:ro"]
        with engine.container(*container["command"], options=options, given=()) as node:
            wait_until(lambda: "ready" in node.logs() or node.inspect(".State.Running") != "true", ENGINE_SECONDS, "the service to be ready")
            require(node.inspect(".State.Running") == "true", node.logs())
            with engine.container(*REDIS) as there:
                there.listens(6379)
                met = engine.on_ring(bench(there), {6379}, InContainer(command))
                note(name, "met", f"{met} connections")


class InContainer:
    def __init__(self, command):
        self.command = command

    def status(self):
        done = subprocess.run([self.command, "node", "status", "--json"], capture_output=True, text=True, timeout=ENGINE_SECONDS)
        require(done.returncode == 0, done.stderr)
        return json.loads(done.stdout)
