"""Java: NIO selectors and blocking sockets, on IPv6 sockets that reach IPv4 addresses."""

import pathlib
import subprocess

from harness import CLIENT_SECONDS, require

NEEDS = ("java", "javac")
SOURCE = pathlib.Path(__file__).parent / "Peer.java"
CONNECTIONS = 8


def checks(test):
    done = subprocess.run(
        ["javac", "-d", test.directory, SOURCE], capture_output=True, text=True, timeout=CLIENT_SECONDS
    )  # fmt: skip
    require(done.returncode == 0, f"javac: {done.stderr}")
    java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", test.directory, "Peer"]
    for server_kind, client_kind in (("nio", "nio"), ("blocking", "blocking"), ("nio", "blocking"), ("blocking", "nio")):
        with test.check(f"{client_kind} client to {server_kind} server"):
            with test.server(lambda port: [*java, f"{server_kind}-server", port]) as server:
                argv = [*java, f"{client_kind}-client", server.port, CONNECTIONS, test.seed]
                output = test.client(argv, ring=(server.port, CONNECTIONS))
                require(output.splitlines()[-1] == "all equal", f"unexpected output: {output}")
