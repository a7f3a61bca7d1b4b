"""One of two guests with a cable between them: redis and NetPIPE serve there, and their clients run here, over verbs."""

import contextlib

import host
import hosts
from pair import cable, joins, service
from world import until


def scenes(ground):
    name, other, ip, peer = cable(ground)
    with ground.scene("redis and NetPIPE between two hosts, over verbs"), service(ground, name) as here:
        joins(here, other)
        if name == "a":
            for client, more in (hosts.redis_client, ()), (hosts.netpipe_client, [hosts.SHORTER]):
                host.hear()
                try:
                    client(ground, here, peer, *more)
                finally:
                    host.say("done")
        else:
            for server in redis(ground, here, ip), hosts.netpipe_server(ground, here, hosts.SHORTER):
                with server:
                    host.say("listens")
                    host.hear()
                hosts.lives(here)


@contextlib.contextmanager
def redis(ground, here, ip):
    with hosts.started(ground, here, [*hosts.REDIS, "--bind", ip, "--port", "6379"]) as process:
        until(lambda: "Ready to accept" in process.tail(), "redis to listen")
        yield
