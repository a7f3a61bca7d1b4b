"""PHP: its streams, and its extension for sockets, which it loads so that the extension prefers the libc that it was linked with."""

import pathlib

from harness import require

NEEDS = ("php",)
SCRIPT = pathlib.Path(__file__).parent / "peer.php"
CONNECTIONS = 8
CLIENTS = {
    "stream": "streams: pings, then a bulk both ways",
    "socket": "sockets extension: the same",
    "mixed": "streams that the sockets extension receives from: the same",
}


def checks(test):
    for kind, name in CLIENTS.items():
        with test.check(name):
            with test.server(lambda port: ["php", SCRIPT, f"{kind}-server", port]) as server:
                argv = ["php", SCRIPT, f"{kind}-client", server.port, CONNECTIONS, test.seed]
                output = test.client(argv, ring=(server.port, CONNECTIONS))
                require(output.splitlines()[-1] == "all equal", f"unexpected output: {output}")
