"""Very many connections between two namespaces, plain, through a published port, from ports that come again and through a proxy, whose ends and others
are shown to the service in any order: whoever is introduced is given the one end that it is connected to, and nobody else anything.

    python3 tests/node/attempts.py [--attempts N] [--seed N] [--ringlet PATH]

It makes network namespaces, and so needs to be root; and Cargo, for what it runs.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "faults")]

from world import Service, inside, world  # noqa: E402

ROOT = HERE.parents[1]
PORT, PUBLISHED, PROXY = 19800, 19801, 19802
POLICY = "[limits]\nvisits_of_a_user = 1000000000\nwait_seconds = 3600\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--ringlet", default=str(ROOT / "target/release/ringlet"))
    options = parser.parse_args()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    subprocess.run(["cargo", "build", "-q", "-p", "ringlet-node", "--example", "attempts"], cwd=ROOT, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    program = target / "debug/examples/attempts"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, Service(options.ringlet, directory, POLICY, more=["--quiet"]) as service, world() as host:
        server, client = host.container(), host.container()
        host.publish(PUBLISHED, server, PORT)
        where = {"--host": f"/run/netns/{host.host}", "--server": f"/run/netns/{server.name}", "--service": service.socket}
        where |= {"--plain": f"{server.ip}:{PORT}", "--published": f"{host.gate()}:{PUBLISHED}", "--proxied": f"{host.gate()}:{PROXY}"}
        where |= {"--attempts": options.attempts, "--seed": options.seed}
        argv = [str(word) for pair in where.items() for word in pair]
        print(f"seed {options.seed}", flush=True)
        status = subprocess.run(inside(client.name, program, *argv)).returncode
        print(f"{time.monotonic() - began:.0f} s; what the service says: {service.status()['decisions']}")
        sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
