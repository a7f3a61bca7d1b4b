"""sockperf: finds its functions by dlsym; ping-pong with its own check of what comes, on each readiness call.

It takes a wait that is interrupted for an error, so it can't be stopped on its way.
"""

import pathlib
import re

from harness import free_port, require

NEEDS = ("sockperf",)
READINESS = {"s": "select", "p": "poll", "e": "epoll"}
RATE = ["--mps", "100000"]  # unlimited means 600,000 a second, beyond which it stops with an error
FEED_PORTS = 3  # it serves a single connection without a readiness call


def checks(test):
    variants = {
        "ping-pong of random sizes": ["pp", "--data-integrity", "-m", "5000", "-r", "4000", *RATE],
        "one way": ["tp", "-m", "1000"],
    }
    for name, options in variants.items():
        with test.check(f"{name}, blocking"):
            argv = ["sockperf", "sr", "--tcp", "-i", test.address("server"), "-p"]
            with test.server(lambda port: [*argv, port]) as server:
                client = ["sockperf", *options, "--tcp", "-i", test.address("server"), "-p", server.port, "-t", test.seconds()]
                judge(test.client(client, ring=(server.port, 1), stoppable=False))

    with test.check("ping-pong by UDP, blocking"):
        argv = ["sockperf", "sr", "-i", test.address("server"), "-p"]
        with test.server(lambda port: [*argv, port], protocol="udp") as server:
            client = ["sockperf", "pp", "-m", "1000", "-r", "900", "--data-integrity", *RATE, "-i", test.address("server")]
            client += ["-p", server.port, "-t", test.seconds()]
            # (Datagram lanes have no adapter.)
            judge(test.client(client, ring=None if test.mirrored else (server.port, 1), stoppable=False))

    for letter, name in READINESS.items():
        with test.check(f"ping-pong, {name}"):
            feed = pathlib.Path(test.directory, "feed")

            def argv_for_port(port):
                ports = [port, *(free_port() for _ in range(FEED_PORTS - 1))]
                feed.write_text("".join(f"T:{test.address('server')}:{each}\n" for each in ports))
                return ["sockperf", "sr", "-f", feed, "-F", letter]

            with test.server(argv_for_port) as server:
                client = ["sockperf", "pp", "-f", feed, "-F", letter, "-t", test.seconds(), "--data-integrity", *RATE]
                judge(test.client(client, ring=(server.port, 1), stoppable=False))


def judge(output):
    if "Message Rate" in output:  # one way: nothing comes back to be counted
        require(re.search(r"Total of [1-9]\d* messages sent", output), f"no messages\n{output}")
    else:
        messages = re.search(r"\[Total Run\].*SentMessages=(\d+); ReceivedMessages=(\d+)", output)
        require(messages and int(messages[1]) > 0, f"no messages\n{output}")
        require(int(messages[2]) >= int(messages[1]) - 1, f"answers are missing\n{output}")  # the timer cuts one off
        wanted = "dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0"
        require(wanted in output, f"messages dropped, doubled or out of order\n{output}")
    require("mismatch" not in output.lower() and "error" not in output.lower(), f"errors\n{output}")
