"""Two guests with a cable between them, each a host of a cluster; one is switched off."""

import contextlib
import pathlib
import shutil
import subprocess
import tempfile

from guest import Guest
from harness import require

NAMES = "ab"
COMMAND_SECONDS = 60


def enrol(ground, kept):
    """Both nodes' certificates, where the guests see them."""
    place = kept / "identities"
    shutil.rmtree(place, ignore_errors=True)

    def run(name, *words, **more):
        argv = [ground.options.ringlet, "node", "enrol", "--directory", place / name, *words]
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=COMMAND_SECONDS, **more)
        require(done.returncode == 0, f"enrol {words}: {done.stderr}")
        return done.stdout

    first, second = NAMES
    place.mkdir()
    run(first, "--new", first)
    run(second, "--join", "-", input=run(first, "--issue", second))


def cable(place, name, other):
    """A network card, and where its packets go: to the other guest's."""
    ends = [f"{which}.type=unix,{which}.path={place}/{each}" for which, each in (("local", name), ("remote", other))]
    number = NAMES.index(name) + 1
    return ["-netdev", f"dgram,id=cable,{','.join(ends)}", "-device", f"virtio-net-pci,netdev=cable,mac=52:54:00:00:00:{number:02x}"]


@contextlib.contextmanager
def guests(ground, group):
    """Both, with their cable plugged in."""
    with contextlib.ExitStack() as held:
        enrol(ground, ground.options.kernel.root.parent)
        place = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ringlet-cable-")))
        one, two = NAMES
        both = [held.enter_context(Guest(ground, name, [group], cable(place, name, other))) for name, other in ((one, two), (two, one))]
        for each in both:
            each.until("up")
        for each in both:
            each.say("go")
        yield both


def scenes(ground):
    with ground.scene("two guests, of which one is switched off"), guests(ground, "pair") as (a, b):
        # Of a transport, and of plain connections.
        for listener, dialler in (a, b), (b, a):
            listener.until("listens")
            dialler.say("go")
        for each in b, a:
            each.until("joined")
        b.kill()
        a.say("it is off")
        require(a.until("ended") == "0", "a scene in the guest has failed")
