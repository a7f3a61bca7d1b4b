"""One of two guests with a cable between them: redis runs there, and its client here, over verbs."""

import host
import hosts
from pair import cable, joins, service
from world import until


def scenes(ground):
    name, other, ip, peer = cable(ground)
    with ground.scene("redis between two hosts, over verbs"), service(ground, name) as here:
        joins(here, other)
        if name == "a":
            host.hear()
            try:
                hosts.redis_client(ground, here, peer)
            finally:
                host.say("done")
        else:
            with hosts.started(ground, here, [*hosts.REDIS, "--bind", ip, "--port", "6379"]) as process:
                until(lambda: "Ready to accept" in process.tail(), "redis to listen")
                host.say("listens")
                host.hear()
            hosts.lives(here)
