"""Programs that nobody here wrote, while faults come and go: what they store and serve is what comes back."""

import pathlib
import random
import time

import packets
import streams
from ground import ANSWER_SECONDS, address
from harness import needs, require, status_word, wait_until

FIRST, SECOND = streams.FIRST, streams.SECOND
PAUSE_SECONDS = 0.3
FILE_BYTES = 300_000
SETTINGS = """
daemon off; master_process off; pid {directory}/nginx.pid; error_log stderr;
events {{ }}
http {{
    keepalive_requests 100000000;
    access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    server {{ listen {ip}:{port}; root {place}; }}
}}
"""


class Running:
    """What a fault is drawn for: a program's port, and the processes that may be stopped."""

    def __init__(self, port, server, client):
        self.port, self.server, self.client = port, server, client


def until_done(draw, ground, server, client, connections=0):
    """Faults come and go until the client has ended; it must say that all went well. `connections`: that it makes at its beginning, and
    no others. Where it makes more later the server's address stays: an address that is not there is an error to whoever connects."""
    target = Running(server.port, server, client)
    of_packets = packets.possible()
    addresses = (FIRST, SECOND) if connections else (SECOND,)

    def made():
        rows = ground.ringlet.connections(server.port)
        return client.poll() is not None or sum(row["pid"] == client.pid for row in rows) >= connections

    wait_until(made, ANSWER_SECONDS, f"{connections} connections of the client")
    while client.poll() is None:
        with streams.a_fault(draw, [target], of_packets, addresses):
            time.sleep(draw.uniform(*streams.FAULT_SECONDS))
        time.sleep(draw.uniform(PAUSE_SECONDS, 2 * PAUSE_SECONDS))


def scenes(ground):
    draw = random.Random(f"{ground.seed}/programs")

    with ground.scene("redis: what was stored"), address(FIRST), address(SECOND):
        needs("redis-server", "redis-benchmark")

        def argv(port):
            return ["redis-server", "--port", port, "--bind", FIRST, "--save", "", "--appendonly", "no", "--protected-mode", "no"]

        with ground.server(argv) as redis:
            script = pathlib.Path(__file__).with_name("stores.py").read_text()
            client = ground.start("client", ["/usr/bin/python3", "-c", script, FIRST, str(redis.port), str(ground.options.seconds / 4)])
            until_done(draw, ground, redis, client, connections=4)
            require(client.poll() == 0, f"{client.name}: {status_word(client.poll())}\n{client.tail()}")
            ground.put_away(client)
            load = ["redis-benchmark", "-h", FIRST, "-p", redis.port, "-n", 20000, "-c", 20, "-P", 4, "-d", 2000, "-t", "set,get", "-q"]
            client = ground.start("client", load)
            until_done(draw, ground, redis, client)
            require(client.poll() == 0, f"{client.name}: {status_word(client.poll())}\n{client.tail()}")
            ground.put_away(client)

    with ground.scene("nginx: what was served"), address(FIRST), address(SECOND):
        needs("nginx", "wrk")
        place = pathlib.Path(ground.directory, "www")
        place.mkdir()
        (place / "file").write_bytes(draw.randbytes(FILE_BYTES))
        settings = pathlib.Path(ground.directory, "nginx.conf")

        def serve(port):
            settings.write_text(SETTINGS.format(ip=FIRST, port=port, place=place, directory=ground.directory))
            return ["nginx", "-c", settings, "-e", "stderr"]

        with ground.server(serve) as nginx:
            seconds = max(int(ground.options.seconds / 4), 2)
            url = f"http://{FIRST}:{nginx.port}/file"
            client = ground.start("client", ["wrk", "-t", 1, "-c", 8, "-d", f"{seconds}s", "--timeout", "120s", url])
            until_done(draw, ground, nginx, client, connections=8)
            told = client.finished_output().decode()
            require(client.poll() == 0 and "Requests/sec" in told, f"{told}{client.tail()}")
            require("Socket errors" not in told and "Non-2xx" not in told, told)
            ground.put_away(client)
