"""Node.js: its event loop makes its own system calls, and closes descriptors behind libc's back."""

import pathlib

from harness import require

NEEDS = ("node",)
SCRIPT = pathlib.Path(__file__).parent / "peer.js"
CONNECTIONS = 8


def checks(test):
    for protocol in ("net", "http"):
        with test.check({"net": "net: echo with half-close", "http": "http, connections kept"}[protocol]):
            with test.server(lambda port: ["node", SCRIPT, f"{protocol}-server", port]) as server:
                argv = ["node", SCRIPT, f"{protocol}-client", server.port, CONNECTIONS, test.seed]
                output = test.client(argv, ring=(server.port, CONNECTIONS))
                require(output.splitlines()[-1] == "all equal", f"unexpected output: {output}")
