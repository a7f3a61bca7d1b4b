"""Java: NIO selectors and blocking sockets, on IPv6 sockets that reach IPv4 addresses."""

import itertools
import pathlib
import subprocess

from harness import CLIENT_SECONDS, require

NEEDS = ("java", "javac")
SOURCE = pathlib.Path(__file__).parent / "Peer.java"
CONNECTIONS = 8
KINDS = ("nio", "blocking")


def checks(test):
    javac = ["javac", "-d", test.directory, SOURCE]
    done = subprocess.run(javac, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    require(done.returncode == 0, f"javac: {done.stderr}")
    java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", test.directory, "Peer"]
    for server_kind, client_kind in itertools.product(KINDS, KINDS):
        with test.check(f"{client_kind} client to {server_kind} server"):
            with test.server(lambda port: [*java, f"{server_kind}-server", port]) as server:
                argv = [*java, f"{client_kind}-client", server.port, CONNECTIONS, test.seed]
                output = test.client(argv, ring=(server.port, CONNECTIONS))
                require(output.splitlines()[-1] == "all equal", f"unexpected output: {output}")
