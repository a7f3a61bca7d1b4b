"""Two ends on two hosts, whose services carry their connection: over a rail in memory that both hosts reach, in disorder by seed; and over libfabric's tcp provider."""

import contextlib
import pathlib
import tempfile

from carried import on_ring
from cluster import ALLOWED, Apart, two_hosts
from harness import require
from world import note, until


@contextlib.contextmanager
def hosts(ground, chaos=None):
    """Hosts a and b, which share a rail in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        disorder = f", seed = {chaos}, fails_one_in = 5000" if chaos is not None else ""
        rails = [f'{{provider = "memory", folder = "{folder}/{rail}"{disorder}}}' for rail in "12"]
        for rail in "12":
            (pathlib.Path(folder) / rail).mkdir()
        with two_hosts(ground, f"rails = [{', '.join(rails)}]\n{ALLOWED}") as pair:
            try:
                for host in pair:
                    until(lambda host=host: rails_up(host), f"a rail at {host.name}: {host.service.status()}")
                yield pair
            except BaseException:
                for host in pair:
                    print(host.name, host.service.told())
                raise


def rails_up(host):
    peers = host.service.status()["cluster"]["peers"]
    return all(peer["state"] == "joined" for peer in peers)


def carried(host):
    return host.service.status()["fabric"]["connections"]


def scenes(ground):
    def scene(name, play, chaos=None):
        with ground.scene(name), hosts(ground, chaos) as (a, b):
            play(name, a, b)
            a.lives()
            b.lives()

    def meet(a, b, **more):
        ends = Apart(ground, b, a, **more)
        on_ring(ends)
        require((carried(a), carried(b)) == (1, 1), f"{carried(a)}, {carried(b)} carried")
        return ends

    def moves(name, a, b):
        ends = meet(a, b)
        ends.trade(3_000_000, 2_000_000)
        ends.traded()
        require(not ends.problem, f"{ends.problem}")
        ends.finish()
        until(lambda: (carried(a), carried(b)) == (0, 0), "nothing to be carried any more")
        note(name, "carried")

    scene("two ends on two hosts", moves)
    return
    scene("over rails in disorder that fail", moves, chaos=1)
