"""For suites that know one machine: servers on one host and clients on another. The hosts are network namespaces with a node service each, which carries
what is between them: over rails in memory, in disorder by seed, or over libfabric's tcp provider. It needs to be root."""

import contextlib
import os
import pathlib
import pwd
import signal
import sys

# (Behind what a suite has of the same name.)
sys.path += [str(pathlib.Path(__file__).resolve().parent / group) for group in ("node", "faults")]

import world  # noqa: E402
from carried import is_alive  # noqa: E402
from ground import ANSWER_SECONDS  # noqa: E402
from harness import adopt_orphans, needs_root_and, require, skip  # noqa: E402
from nodes import ALLOWED, by_libfabric, carried, fabric, in_memory, process, two_hosts  # noqa: E402
from world import until, within  # noqa: E402

RAILS = {"memory": in_memory, "tcp": lambda _seed: by_libfabric()}
TOOLS = "ip nsenter setpriv".split()


def add(parser):
    parser.add_argument("--between", choices=RAILS, help="servers on one host, clients on another, over rails in memory, or over TCP by libfabric (as root)")


def needed(arguments):
    """Skips all of it where there can be no hosts."""
    needs_root_and(TOOLS, "namespaces")
    adopt_orphans()
    if problem := world.missing(arguments.ringlet):
        skip(problem)


class Between:
    """Two hosts, of which `client` has who connects, and `server` all others."""

    def __init__(self, ringlet, over, seed):
        self.ringlet, self._rails, self.lost = ringlet, RAILS[over](seed), {"a": 0, "b": 0}
        self._held = {}

    @contextlib.contextmanager
    def run(self):
        """The hosts are there, and what is looked at, or dialled, is so from the client's. At the end all that has been carried is given back."""
        with self._rails as said, two_hosts(self, ALLOWED, said) as hosts, within(hosts[0].container):
            self.client, self.server = hosts
            self.until_carries()
            os.environ["SERVER_ADDRESS"] = self.server.ip
            self.ringlet.between = self
            try:
                yield self
                self.nothing_is_kept()
            except BaseException:
                for host in hosts:
                    print(f"{host.name}: {host.service.told()}")
                raise
            finally:
                self.ringlet.between = None
                del os.environ["SERVER_ADDRESS"]

    def host(self, role):
        return self.client if role == "client" else self.server

    def hosts(self):
        return self.client, self.server

    def placed(self, role, argv, user=None):
        """A command of this role, where it runs; as another user, if it is to."""
        as_user = []
        if user is not None:
            of = pwd.getpwnam(user)
            as_user = ["setpriv", f"--reuid={of.pw_uid}", f"--regid={of.pw_gid}", "--clear-groups"]
        return [*self.host(role).before(), *as_user, *argv]

    def until_carries(self):
        for host in self.hosts():
            until(lambda host=host: fabric(host)["nodes"] == 1, f"a rail that carries: {host.service.told()}")

    def kill_what_carries(self, host):
        os.kill(process(host), signal.SIGKILL)
        self.lost[host.name] += 1

    def kill_service(self, host):
        """What carries ends with it; both come back."""
        pid = process(host)
        host.service.process.send(signal.SIGKILL)
        host.service.process.wait(ANSWER_SECONDS)
        until(lambda: not is_alive(pid), "what carries to end with its service")
        host.service.stop()
        host.service.start()
        require(host.service.runs(), f"it does not start again: {host.service.told()}")
        self.lost[host.name] = 0

    def carried(self):
        return [carried(host) for host in self.hosts()]

    def nothing_is_kept(self, but=0):
        """Beside so many connections. Nothing has died that nobody has killed."""
        until(lambda: max(self.carried()) <= but, f"nothing else to be carried than {but} connections: {[fabric(host) for host in self.hosts()]}")
        for host in self.hosts():
            host.lives()
            require(fabric(host)["lost"] == self.lost[host.name], f"what carries has died: {host.service.told()}")
            # What carries has memory and descriptors for as many as before.
            pid = process(host)
            before = self._held.setdefault((pid, but), held(pid))
            until(lambda: held(pid) <= before, f"{host.name}'s process to let go of {held(pid)} descriptors and mappings, before {before}")  # noqa: B023


def held(pid):
    place = pathlib.Path(f"/proc/{pid}")
    return len(list((place / "fd").iterdir())) + (place / "maps").read_text().count("/memfd:")
