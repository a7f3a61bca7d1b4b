"""Servers and their clients in two containers: over the bridge, over a published port, and from the host."""

from engine import ALLOW, Engine, postgresql
from harness import Process, Skipped
from world import Service, note

REDIS = "redis-server --bind 0.0.0.0 --protected-mode no --save".split() + [""]
NGINX = """
daemon off; user root; worker_processes 2; error_log stderr warn; pid /tmp/nginx.pid;
events { worker_connections 1024; }
http { access_log off; keepalive_requests 10000000; server { listen 80; location / { return 200 "0123456789abcdef"; } } }
"""
POSTGRES = """
initdb -D /tmp/c -U postgres -A trust --locale=C -N >/dev/null && echo "host all all all trust" >> /tmp/c/pg_hba.conf &&
exec postgres -D /tmp/c -h 0.0.0.0 -k /tmp -c fsync=off -c shared_buffers=32MB -c dynamic_shared_memory_type=mmap
"""


def scenes(ground):
    with ground.scene("an image of this machine's programs"):
        engine = Engine(ground)

    def by_each_way(name, server, port, published, client, options=()):
        for way in "bridge", "published port":
            with ground.scene(f"{name} over the {way}"), Service(ground.ringlet.command, ground.directory, ALLOW, run="/run/ringlet") as service:
                with engine.container(*server, options=[*options, "-p", f"{published}:{port}"]) as there:
                    there.listens(port)
                    target = (there.ip, port) if way == "bridge" else (there.gate, published)
                    for words in client(*target):
                        met = engine.on_ring(engine.start(*words, options=options), {port, published}, service)
                note(f"{name} over the {way}", "met", f"{met} connections")

    def redis_client(host, port):
        yield ["redis-benchmark", "-h", host, "-p", port, "-t", "get,set", "-n", 400_000, "-c", 8, "-q"]

    by_each_way("redis", REDIS, 6379, 16379, redis_client)

    with ground.scene("redis in a container, its client on the host"), Service(ground.ringlet.command, ground.directory, ALLOW, run="/run/ringlet") as service:
        with engine.container(*REDIS, options=["-p", "16379:6379"]) as there:
            there.listens(6379)
            bench = ["redis-benchmark", "-h", "127.0.0.1", "-p", "16379", "-t", "get,set", "-n", "400000", "-c", "8", "-q"]
            met = engine.on_ring(Process(ground.ringlet.wrap(bench), ground.directory), {6379, 16379}, service)
            note("redis, its client on the host, by a published port", "met", f"{met} connections")

    nginx = ["sh", "-c", f"echo '{NGINX}' > /tmp/n.conf && exec nginx -c /tmp/n.conf"]

    def nginx_client(host, port):
        yield ["wrk", "-t", 2, "-c", 16, "-d", "6s", f"http://{host}:{port}/"]

    by_each_way("nginx and wrk", nginx, 80, 18080, nginx_client)

    if not postgresql():
        with ground.scene("postgresql"):
            raise Skipped("not installed: the PostgreSQL server")
    binaries = f"{postgresql()[0]}/bin"
    path = ["--user", "999", "--env", f"PATH={binaries}:/usr/bin:/bin", "--env", "PGUSER=postgres"]

    def postgres_client(host, port):
        bench = f"pgbench -h {host} -p {port} -q -i -s 2 postgres && exec pgbench -h {host} -p {port} -S -n -c 4 -T 6 postgres"
        yield ["sh", "-c", bench]

    by_each_way("postgresql and pgbench", ["sh", "-c", POSTGRES], 5432, 15432, postgres_client, path)
