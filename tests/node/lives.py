"""The service comes and goes; what it has introduced does not need it."""

from harness import require
from world import Across, Service, note, world


def scenes(ground):
    with ground.scene("killed, it takes nothing with it; when it is back, it introduces again"):
        with Service(ground.ringlet.command, ground.directory) as service, world() as host:
            server, client = host.container(), host.container()
            first = Across(ground, server.name, client.name, server.ip)
            first.on_ring()
            service.stop()
            for _ in range(3):
                first.trade(2_000_000, 2_000_000)
                first.traded()
                require(not first.problem, f"{first.problem}")
            require([row["path"] for row in first.rows()] == ["ring", "ring"], f"not on the ring: {first.told()}")
            first.finish()
            without = Across(ground, server.name, client.name, server.ip)
            without.stays_apart("no service", "not-local")
            service.start()
            Across(ground, server.name, client.name, server.ip).meets("the service is back")

    with ground.scene("killed at any moment, no byte is lost"):
        with Service(ground.ringlet.command, ground.directory) as service, world() as host:
            server, client = host.container(), host.container()
            for _ in range(12):
                ends = Across(ground, server.name, client.name, server.ip)
                ends.tell(ends.server, "echo 200")
                ends.tell(ends.client, "ask 200")
                service.stop()
                ends.answer(ends.client, "ask")
                ends.answer(ends.server, "echo")
                ends.trade(500_000, 500_000)
                ends.traded()
                require(not ends.problem, f"{ends.problem}")
                ends.finish()
                service.start()
            note("the service is killed while two are introduced", "either", "byte-exact")
