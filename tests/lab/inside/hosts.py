"""Two hosts (network namespaces) with a node service each, on Debian's kernel: they join, find both ends of a connection; and real programs run between."""

import contextlib
import re
import subprocess

import host
from cluster import Apart, matched
from harness import Process, require
from nodes import ALLOWED, all_joined, cluster, two_hosts
from world import until

PROGRAM_SECONDS = 240
# No services by these programs' own configuration, and nothing kept.
REDIS = "redis-server --protected-mode no --appendonly no --save".split() + [""]
# (For so long that services find both ends meanwhile.)
NETPIPE = "-u 65536 -n 20".split()
# Sizes by powers of two only: between two guests, whose processors are emulated, a message takes 20 ms.
SHORTER = "-p 0".split()
# Nothing here beats the kernel's TCP: that is carried only if it is told so.
RAILS = 'rails = [{provider = "tcp;ofi_rxm", address = "eth0"}]'


def scenes(ground):
    with ground.scene("two nodes join"), cluster(ground, "ab") as hosts:
        all_joined(hosts)

    with ground.scene("both ends of a connection between two hosts are found, and nothing carries it"), two_hosts(ground, ALLOWED) as (a, b):
        ends = Apart(ground, b, a)
        # (Who is idle seeks nobody.)
        for each in a, b:
            until(lambda each=each: ends.talk(100) or matched(each, "no-fabric"), f"{each.name}: {each.service.status()}")
        ends.finish()

    with ground.scene("redis between two hosts"), two_hosts(ground, ALLOWED, RAILS) as (a, b):
        redis(ground, a, b.ip, b)

    with ground.scene("NetPIPE between two hosts"), two_hosts(ground, ALLOWED, RAILS) as (a, b):
        netpipe(ground, a, b.ip, b)


def redis(ground, client, ip, server):
    with started(ground, server, [*REDIS, "--bind", ip, "--port", "6379"]) as process:
        until(lambda: "Ready to accept" in process.tail(), "redis to listen")
        redis_client(ground, client, ip)
    lives(server)


def redis_client(ground, client, ip):
    told = finished(ground, client, ["redis-benchmark", "-h", ip, "-p", "6379", "-t", "get,set", "-n", "1000", "-c", "4", "-q"])
    rates = re.findall(r"(GET|SET): ([\d.]+) requests per second", told)
    require(len(rates) == 2, told)
    was_carried(client, f"redis, {rates}")


def netpipe(ground, client, ip, server):
    with netpipe_server(ground, server):
        netpipe_client(ground, client, ip)
    lives(server)


@contextlib.contextmanager
def netpipe_server(ground, at, more=()):
    with started(ground, at, ["NPtcp", *NETPIPE, *more]) as process:
        # (It says nothing while it waits.)
        until(lambda: listens(at, 5002), "NPtcp to listen")
        yield
        require(process.wait(PROGRAM_SECONDS) == 0, process.tail())


def netpipe_client(ground, client, ip, more=()):
    told = finished(ground, client, ["NPtcp", "-h", ip, *NETPIPE, *more])
    require("65536 bytes" in told, told)
    was_carried(client, "NetPIPE")


def wrapped(ground, at, argv):
    return [*at.before(), *ground.ringlet.wrap(argv)]


@contextlib.contextmanager
def started(ground, at, argv):
    process = Process(wrapped(ground, at, argv), ground.directory)
    try:
        yield process
    finally:
        process.kill()


def finished(ground, at, argv):
    """All that it says. (NetPIPE's figures are on standard error.)"""
    process = Process(wrapped(ground, at, argv), ground.directory, stderr=subprocess.STDOUT)
    try:
        status = process.wait(PROGRAM_SECONDS)
        require(status == 0, f"{argv[0]}: {status}\n{process.tail()}\n{process.where() if status is None else ''}\n{at.service.status()}\n{at.service.told()}")
        return process.finished_output().decode(errors="replace")
    finally:
        process.kill()


def listens(at, port):
    """In its network namespace."""
    argv = [*at.before(), "ss", "-Hltn", f"sport = :{port}"]
    return bool(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip())


def was_carried(at, what):
    """By what the service has decided. (Connections that are over are carried no more.)"""
    carried = set(matched(at, "carried-far"))
    require(carried, f"{what}: none was carried: {at.service.status()}")
    host.tell(f"{what}: {len(carried)} connections were carried")
    lives(at)


def lives(at):
    require(at.service.process.poll() is None, f"the service has died: {at.service.told()}")
