"""iperf3: streams in each direction, which looks at TCP_INFO all the time and must agree with itself."""

import json

from harness import require

NEEDS = ("iperf3",)
# What a sender counts and its receiver never read when the test ends: socket buffers, and rings.
IN_FLIGHT_BYTES = 64 << 20


def checks(test):
    variants = (
        ("one stream", 1, []),
        ("one stream, reverse", 1, ["-R"]),
        ("both directions", 2, ["--bidir"]),
        ("4 streams", 4, ["-P", "4"]),
        ("sendfile", 1, ["-Z"]),
        ("small writes, reverse", 1, ["-l", "100", "-R"]),
    )
    argv = ["iperf3", "-s", "-B", test.address("server"), "-1", "-p"]
    for name, streams, options in variants:
        with test.check(name):
            with test.server(lambda port: [*argv, port], finite=True) as server:
                client = ["iperf3", "-c", test.address("server"), "-p", server.port, "-t", test.seconds(), "-J", *options]
                report = json.loads(test.client(client, ring=(server.port, streams)))
            agree(report)


def agree(report):
    require("error" not in report, f"iperf3: {report.get('error')}")
    end = report["end"]
    for suffix in ("", "_bidir_reverse"):
        if f"sum_sent{suffix}" not in end:
            continue
        sent, received = end[f"sum_sent{suffix}"]["bytes"], end[f"sum_received{suffix}"]["bytes"]
        require(0 < received <= sent, f"{sent} bytes sent, {received} received")
        require(sent - received <= IN_FLIGHT_BYTES, f"{sent} bytes sent, only {received} received")
    for way in ("sender", "receiver"):
        for stream in end["streams"]:
            require(stream[way]["bytes"] > 0, f"a stream stood still: {stream}")
