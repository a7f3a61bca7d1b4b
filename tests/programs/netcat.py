"""netcat: a file in each direction, ended by half-close."""

import pathlib
import subprocess

from harness import require

NEEDS = ("nc",)
SIZES = (1, 4096, 20_000_000)
HALF_CLOSE = "-N"  # after its input has ended; a listener without input leaves when its peer does that


def checks(test):
    path = pathlib.Path(test.directory, "file")
    listen, connect = ["nc", "-l", test.address("server")], ["nc", test.address("server")]
    for size in SIZES:
        content = test.random.randbytes(size)
        path.write_bytes(content)
        with test.check(f"{size} bytes to the listener"), open(path, "rb") as file:
            with test.server(lambda port: [*listen, port], finite=True, stdin=subprocess.DEVNULL) as server:
                test.client([*connect, server.port, HALF_CLOSE], stdin=file)
            require(server.finished_output() == content, "the listener got something else")
        with test.check(f"{size} bytes from the listener"), open(path, "rb") as file:
            with test.server(lambda port: [*listen, port, HALF_CLOSE], finite=True, stdin=file) as server:
                got = test.client([*connect, server.port], stdin=subprocess.DEVNULL, raw=True)
            require(got == content, "the client got something else")
