"""netcat: both directions of a connection at once, each ended by half-close."""

import pathlib

from harness import require

NEEDS = ("nc",)
SIZES = (1, 4096, 20_000_000)


def checks(test):
    up, down = pathlib.Path(test.directory, "up"), pathlib.Path(test.directory, "down")
    for size in SIZES:
        with test.check(f"{size} bytes each way at once"):
            up.write_bytes(test.random.randbytes(size))
            down.write_bytes(test.random.randbytes(size))
            with open(up, "rb") as upward, open(down, "rb") as downward:
                argv = ["nc", "-N", "-l", "127.0.0.1"]
                with test.server(lambda port: [*argv, port], finite=True, stdin=downward) as server:
                    got_down = test.client(["nc", "-N", "127.0.0.1", server.port], stdin=upward, raw=True)
            require(server.finished_output() == up.read_bytes(), "the listener got something else")
            require(got_down == down.read_bytes(), "the client got something else")
