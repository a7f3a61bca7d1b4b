"""nginx and wrk: workers forked after listen, under another user; sendfile; a proxy that keeps its connections."""

import contextlib
import hashlib
import http.client
import os
import pathlib
import re
import signal
import urllib.request

from harness import hold, needs, require

NEEDS = ("nginx",)
SIZES = (1, 100, 1459, 4096, 65_537, 1_000_003, 10_000_000)
WRK_CONNECTIONS = 50

CONFIGURATION = """
{user}
daemon off;
worker_processes {workers};
pid {place}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    keepalive_requests 1000000;
    client_body_temp_path {place}/body;
    proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    {upstream}
    server {{
        listen {address}:{port};
        listen unix:{place}/socket;
        {locations}
    }}
}}
"""
FILES = """
        root {files};
        sendfile on;
        tcp_nopush on;
        location /copied/ {{ alias {files}/; sendfile off; }}
"""
PROXY = """
        location / {
            proxy_pass http://behind;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }
"""


def nginx(test, name, workers, upstream="", locations="", role="server"):
    address = test.address(role)

    def argv(port):
        place = pathlib.Path(test.directory, f"{name}-{port}")
        place.mkdir()
        user = "user root;" if test.mirrored and os.geteuid() == 0 else ""
        text = CONFIGURATION.format(user=user, workers=workers, place=place, address=address, port=port, upstream=upstream, locations=locations)
        configuration = place / "nginx.conf"
        configuration.write_text(text)
        return ["nginx", "-p", place, "-c", configuration, "-e", "stderr"]

    return test.server(argv, role=role, stop=signal.SIGQUIT)


def fetch_all(address, port, hashes, prefixes):
    """Every file, first each on a connection of its own, then all on one."""
    for prefix in prefixes:
        for size, wanted in hashes.items():
            with urllib.request.urlopen(f"http://{address}:{port}{prefix}{size}", timeout=60) as answer:
                assert hashlib.sha256(answer.read()).hexdigest() == wanted, f"{prefix}{size} differs"
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=60)) as connection:
        for round_ in range(3):
            if round_ == 2:
                hold()
            for prefix in prefixes:
                for size, wanted in hashes.items():
                    connection.request("GET", f"{prefix}{size}")
                    body = connection.getresponse().read()
                    assert hashlib.sha256(body).hexdigest() == wanted, f"{prefix}{size} differs, connection kept"
    return True


def wrk(test, address, port, *options, ring=None, role="client"):
    argv = ["wrk", "-t", 2, "-c", WRK_CONNECTIONS, "-d", f"{test.seconds()}s", *options, f"http://{address}:{port}/1459"]
    output = test.client(argv, role, ring)
    requests = re.search(r"(\d+) requests in", output)
    require(requests and int(requests[1]) > 0, f"no requests were answered\n{output}")
    require("Non-2xx" not in output and "Socket errors" not in output, f"errors\n{output}")


def checks(test):
    files = pathlib.Path(test.directory, "files")
    files.mkdir()
    hashes = {}
    for size in SIZES:
        content = test.random.randbytes(size)
        hashes[size] = hashlib.sha256(content).hexdigest()
        (files / str(size)).write_bytes(content)
    locations = FILES.format(files=files)

    for workers in (1, 3):
        with nginx(test, "files", workers, locations=locations) as server:
            named = f"{workers} worker{'s' * (workers > 1)}"
            with test.check(f"{named}: static files of 1 B to 10 MB"):
                test.peer(fetch_all, test.address("server"), server.port, hashes, ["/", "/copied/"], ring=(server.port, 1))
            with test.check(f"{named}: wrk, connections kept"):
                needs("wrk")
                wrk(test, test.address("server"), server.port, ring=(server.port, WRK_CONNECTIONS))
            with test.check(f"{named}: wrk, a connection per request"):
                needs("wrk")
                wrk(test, test.address("server"), server.port, "-H", "Connection: close")

    with nginx(test, "behind", 1, locations=locations) as behind:
        upstream = f"upstream behind {{ server {test.address('server')}:{behind.port}; keepalive 16; }}"
        path = f"{test.directory}/behind-{behind.port}/socket"
        local = f"upstream behind {{ server unix:{path}; keepalive 16; }}"
        with nginx(test, "local", 1, upstream=local, locations=PROXY, role="client") as front:
            with test.check("a proxy in front, over a Unix socket: static files of 1 B to 10 MB"):
                test.peer(fetch_all, test.address("client"), front.port, hashes, ["/", "/copied/"], role="between", ring=(path, 1))
        with nginx(test, "front", 1, upstream=upstream, locations=PROXY, role="client") as front:
            with test.check("a proxy in front: static files of 1 B to 10 MB"):
                test.peer(fetch_all, test.address("client"), front.port, hashes, ["/", "/copied/"], role="between", ring=(behind.port, 1))
            with test.check("a proxy in front: wrk"):
                needs("wrk")
                wrk(test, test.address("client"), front.port, ring=(behind.port, 1), role="between")
