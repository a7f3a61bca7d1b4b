"""Thousands of connections, one after the other, ended in every way: what is over leaves nothing behind."""

from harness import require
from subject import Pair, Subject

WARM_UP = 150
CONNECTIONS = 2000
AT_A_TIME = 500
# (How many are moved before they end is a matter of load.)
MOVED_LEAST = CONNECTIONS // 40
GROWTH_KIB = 2048  # the interpreter's own


def scenes(ground):
    with ground.scene(f"{CONNECTIONS * ground.options.rounds} connections"):
        churn(ground)


def churn(ground):
    server, client = Subject(ground), Subject(ground, "client")
    port = server.listen()
    batch(ground, server, client, port, WARM_UP)
    moved = 0
    held = server.held(), client.held()
    resident = server.resident_kib(), client.resident_kib()
    for _ in range(CONNECTIONS * ground.options.rounds // AT_A_TIME):
        moved += batch(ground, server, client, port, AT_A_TIME)
        for subject, wanted in zip((server, client), held):
            subject.holds_only(wanted, "after many connections")
    require(moved >= MOVED_LEAST, f"only {moved} connections were moved")
    for subject, before, who in zip((server, client), resident, ("server", "client")):
        grown = subject.resident_kib() - before
        require(grown < GROWTH_KIB, f"the {who} has grown by {grown} KiB")
    Pair(server, client).exchange(times=20)


def batch(ground, server, client, port, count):
    server.do("churn_serve", count)
    moved = client.do("churn", port, count, ground.random.getrandbits(32))
    server.do("churn_served")
    return moved
