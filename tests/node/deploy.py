"""The files of deploy/: each for who reads it, and all for the service: the same paths, keys and options."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import threading

from harness import Skipped, require
from world import Across, Service, own_group, world

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
LIBRARY = "/usr/local/lib/ringlet/libringlet_preload.so"
COMMAND = "/usr/local/bin/ringlet"
# systemd-analyze's figure, in tenths; 100 is no protection at all.
EXPOSED_MOST = 20


def tool(name):
    if shutil.which(name) is None:
        raise Skipped(f"not installed: {name}")
    return name


def said_by(*argv, **more):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, **more)
    require(done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}")
    return done.stdout


def unit(name):
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def strings(value):
    """All that are in it."""
    match value:
        case dict():
            return [each for part in value.items() for each in strings(list(part))]
        case list():
            return [each for part in value for each in strings(part)]
        case _:
            return [str(value)]


def scenes(ground):
    ringlet = str(pathlib.Path(ground.ringlet.command).resolve())
    socket = default_socket(ringlet)
    reflect = re.search(r'pub const PATH: &str = "(.*)";', (DEPLOY.parent / "ringlet-reflect/src/host.rs").read_text())[1]
    rooms = re.search(r'"(/run/ringlet/.*)"', (DEPLOY.parent / "ringlet-ethernet/src/room.rs").read_text())[1]

    def paths(name, text):
        """What a file says of ours is as it is installed, and as the service and the library have it."""
        for path in set(re.findall(r"/run/ringlet[-a-z/.]*", text)):
            known = [socket, os.path.dirname(socket), reflect, rooms, "/run/ringlet-labels", "/run/ringlet-labels/shop"]
            require(path.rstrip("/.") in known, f"{name}: {path}")
        for path in set(re.findall(r"/usr/local/(?:lib|bin)[-\w/.]*", text)):
            known = [LIBRARY, os.path.dirname(LIBRARY), COMMAND, os.path.dirname(COMMAND)]
            require(path.rstrip(".") in known, f"{name}: {path}")

    with ground.scene("paths and keys that the files name"):
        named = 0
        for path in DEPLOY.iterdir():
            text = path.read_text()
            paths(path.name, text)
            named += text.count(os.path.dirname(socket))
        require(named > 10, "no paths in deploy/")
        cdi = json.loads((DEPLOY / "ringlet-cdi.json").read_text())
        require(f"LD_PRELOAD={LIBRARY}" in cdi["containerEdits"]["env"], f"{cdi}")

    with ground.scene("systemd units"):
        tool("systemd-analyze")
        place = pathlib.Path(ground.directory) / "units"
        place.mkdir()
        for name in "ringlet-node.socket", "ringlet-node.service":
            (place / name).write_text((DEPLOY / name).read_text().replace(COMMAND, ringlet))
        told = subprocess.run(["systemd-analyze", "verify", *place.iterdir()], capture_output=True, text=True, timeout=60)
        require(told.returncode == 0 and not told.stderr.strip(), f"systemd-analyze verify: {told.stderr}")
        with_limit = ["security", "--offline=yes", f"--threshold={EXPOSED_MOST}"]
        said_by("systemd-analyze", *with_limit, place / "ringlet-node.service")
        require(unit("ringlet-node.socket")["ListenSequentialPacket"] == socket, "the socket's path")

    with ground.scene("the service as its unit confines it"):
        service_unit = unit("ringlet-node.service")
        require(service_unit["ExecStart"] == f"{COMMAND} node run --keep-notes", "what is started")
        caps = ",".join("+" + name.removeprefix("CAP_").lower() for name in service_unit["CapabilityBoundingSet"].split())
        # PrivateNetwork, ProtectControlGroups, ProtectKernelTunables (ProtectSystem but for where this test has its files).
        read_only = "mount --make-rprivate / && for at in $(findmnt -rno TARGET -t cgroup2); do mount -o remount,bind,ro $at; done && mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"
        before = ["unshare", "--net", "--mount", "sh", "-c", f'{read_only} && exec setpriv --no-new-privs --bounding-set=-all,{caps} --inh-caps=-all "$@"', "sh"]
        with Service(ringlet, ground.directory, before=before) as service, world() as host:
            require(service.runs(), f"it does not start: {service.told()}")
            server, client = host.container(), host.container()
            Across(ground, server.name, client.name, server.ip).meets("the service as its unit confines it")
        # (As the unit has it, but not for this host's connections, of which something would be left.)
        with own_group(ringlet) as (group, _):
            for _ in "its first start", "a second one, with what the first has kept":
                with Service(ringlet, ground.directory, before=before, more=["--keep-notes", "--cgroup", group]) as service:
                    require(service.runs(), f"it does not start: {service.told()}")

    with ground.scene("a manifest and a compose file"):
        with contextlib.suppress(ImportError):
            import yaml

            for name in "daemonset.yaml", "compose.yaml":
                for document in yaml.safe_load_all((DEPLOY / name).read_text()):
                    paths(name, "\n".join(strings(document)))
            daemon_set, _pod = yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text())
            [container] = daemon_set["spec"]["template"]["spec"]["containers"]
            require(container["command"][0] == COMMAND, f"{container['command']}")
            # (Parsed, and no more.)
            said_by(ringlet, *container["command"][1:], "--help")
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            require({os.path.dirname(socket), container["command"][-1]} <= mounted, f"{mounted}")
        if shutil.which("docker-compose"):
            said_by("docker-compose", "-f", DEPLOY / "compose.yaml", "config", "-q")

    with ground.scene("a library that is replaced under those who use it"), contextlib.suppress(ImportError):
        import yaml

        daemon_set, _pod = yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text())
        [container] = daemon_set["spec"]["template"]["spec"]["initContainers"]
        place = pathlib.Path(ground.directory)
        image, host = place / "image", place / "host"
        image.mkdir()
        host.mkdir()
        words = [word.replace(os.path.dirname(LIBRARY), str(image)).replace("/host", str(host)) for word in container["command"]]
        replaced_whole(image / os.path.basename(LIBRARY), host / os.path.basename(LIBRARY), words)
        require(len(list(host.iterdir())) == 1, "something is left there")

    with ground.scene("what is installed again under those who use it"):
        root = DEPLOY.parent
        recipe = said_by("make", "-n", "-C", root, "install", "PREFIX=/usr/local", "TARGET=/built")
        libraries = [line.split() for line in recipe.splitlines() if re.match(r"install .*/built/release/\S+( |$)", line) and ".a " not in line]
        require(len(libraries) >= 5, f"{recipe}")
        for number, line in enumerate(libraries):
            place = pathlib.Path(ground.directory) / str(number)
            source, target = place / "built/release" / os.path.basename(line[4]), place / line[-1].lstrip("/")
            source.parent.mkdir(parents=True)
            words = " ".join(line).replace("/built/", f"{place}/built/").replace("/usr/local/", f"{place}/usr/local/")
            replaced_whole(source, target, ["sh", "-ec", words])

    with ground.scene("an SELinux policy"):
        tool("checkmodule")
        place = pathlib.Path(ground.directory)
        said_by("checkmodule", "-M", "-m", "-o", place / "ringlet.mod", DEPLOY / "ringlet.te")
        if shutil.which("semodule_package"):
            said_by("semodule_package", "-o", place / "ringlet.pp", "-m", place / "ringlet.mod", "-f", DEPLOY / "ringlet.fc")


def replaced_whole(source, target, words):
    """What these words put there is another file than the one before, which stays as it was; and at each moment there is a whole one."""
    old, new = b"old" * 1_000_000, b"new" * 2_000_000
    source.write_bytes(old)
    said_by(*words)
    source.write_bytes(new)
    over, seen = threading.Event(), set()

    def look():
        while not over.is_set():
            try:
                seen.add(target.stat().st_size)
            except FileNotFoundError:
                seen.add(None)

    with target.open("rb") as held:
        looks = threading.Thread(target=look)
        looks.start()
        try:
            said_by(*words)
        finally:
            over.set()
            looks.join()
        require(held.read() == old, f"{words}: written over what is in use")
    require(target.read_bytes() == new, f"{words}: it is not replaced")
    require(seen <= {len(old), len(new)}, f"{words}: there was a moment with {seen}")


def default_socket(ringlet):
    """Where the library looks for the service, if nothing else is said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGLET_")}
    for line in said_by(ringlet, "config", env=environment).splitlines():
        if line.split()[:1] == ["node"]:
            return line.split()[1]
    require(False, "no key `node`")
