"""Two hosts (network namespaces) with a node service each, on Debian's kernel: they join, find both ends of a connection; and real programs run between."""

import contextlib
import re
import subprocess

import host
from cluster import ALLOWED, Apart, all_joined, cluster, matched, two_hosts
from harness import Process, require
from world import until

# What the services decide of a connection that both have found. (Where they carry it, this is another word.)
FOUND = "no-fabric"
PROGRAM_SECONDS = 600
# No services by these programs' own configuration, and nothing kept.
REDIS = "redis-server --protected-mode no --appendonly no --save".split() + [""]


def scenes(ground):
    with ground.scene("two nodes join"), cluster(ground, "ab") as hosts:
        all_joined(hosts)

    with ground.scene("both ends of a connection between two hosts are found"), two_hosts(ground, ALLOWED) as (a, b):
        ends = Apart(ground, b, a)
        for each in a, b:
            until(lambda each=each: matched(each, FOUND), f"{each.name}: {each.service.status()}")
        ends.talk(100)
        ends.finish()

    with ground.scene("redis between two hosts"), two_hosts(ground, ALLOWED) as (a, b):
        with started(ground, b, [*REDIS, "--bind", b.ip, "--port", "6379"]) as server:
            until(lambda: "Ready to accept" in server.tail(), "redis to listen")
            told = finished(ground, a, ["redis-benchmark", "-h", b.ip, "-p", "6379", "-t", "get,set", "-n", "3000", "-c", "4", "-q"])
            require(len(re.findall(r"(?:GET|SET): [\d.]+ requests per second", told)) == 2, told)
        both_found(a, b)

    with ground.scene("NetPIPE between two hosts"), two_hosts(ground, ALLOWED) as (a, b):
        with started(ground, b, ["NPtcp", "-u", "65536"]) as server:
            # (It has no port to choose, and says nothing while it waits.)
            until(lambda: listens(b, 5002), "NPtcp to listen")
            told = finished(ground, a, ["NPtcp", "-h", b.ip, "-u", "65536", "-n", "20"])
            require("65536 bytes" in told, told)
            require(server.wait(PROGRAM_SECONDS) == 0, server.tail())
        both_found(a, b)


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
    process = Process(wrapped(ground, at, argv), ground.directory)
    try:
        require(process.wait(PROGRAM_SECONDS) == 0, f"{argv[0]}: {process.poll()}\n{process.tail()}")
        return process.tail()
    finally:
        process.kill()


def listens(at, port):
    told = subprocess.run(["ip", "netns", "exec", at.container.name, "ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True, timeout=60)
    return bool(told.stdout.strip())


def both_found(a, b):
    for each in a, b:
        require(matched(each, FOUND), f"{each.name} has not found it: {each.service.status()['cluster']}")
        each.lives()
    host.tell(f"{FOUND}: {len(set(matched(a, FOUND)))} connections at {a.name}, {len(set(matched(b, FOUND)))} at {b.name}")
