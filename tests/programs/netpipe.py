"""NetPIPE: blocking reads and writes of every size, with its own check of what comes."""

import pathlib
import subprocess

from harness import require

NEEDS = ("NPtcp",)
LARGEST = 1 << 20
SIZES_AT_LEAST = 20


def checks(test):
    variants = {
        # Its one-way mode (-s) is left out: it ends with a reset on the kernel, too.
        "integrity of every size up to 1 MB": (["-i"], "Integrity check passed"),
        "ping-pong": ([], "Mbps in"),
        "both ways at once": (["-2"], "Mbps in"),
    }
    for name, (options, success) in variants.items():
        with test.check(name):
            # A set number of repeats, or it would do as many as it finds time for.
            common = ["NPtcp", *options, "-n", test.work(100), "-u", LARGEST]
            with test.server(lambda port: [*common, "-P", port], finite=True) as server:
                argv = [*common, "-h", test.address("server"), "-P", server.port, "-o", pathlib.Path(test.directory, "np.out")]
                output = test.client(argv, ring=(server.port, 1), stderr=subprocess.STDOUT)
            require(output.count(success) >= SIZES_AT_LEAST, f"sizes are missing\n{output}")
            require("fail" not in output.lower(), f"it found something wrong\n{output}")
