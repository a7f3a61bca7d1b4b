"""Rails over soft-RoCE, whose device is on this guest's own network: what holds for a rail over TCP holds over verbs."""

import os
import re
import subprocess

from ground import run
from harness import require

ADDRESS = "10.91.0.1"
VERBS = "verbs;ofi_rxm"
TESTS = """
libfabric::messages_go_both_ways libfabric::a_write_is_whole_at_its_notice libfabric::full_and_back libfabric::garbage_is_not_a_name
libfabric::nothing_lands_in_what_is_withdrawn libfabric::nothing_is_taken_from_what_is_withdrawn libfabric::ends_sleep
libfabric::between_processes libfabric::a_partner_is_killed carried::endpoints_are_closed_amid_frames_and_writes
""".split()
# Against hanging only.
PROGRAM_SECONDS = 240
# Of what `rail` does by itself: the processors are emulated.
PART = 10


def device(name, address):
    """A network interface with an address, and soft-RoCE upon it."""
    run("/run/modprobe", "-a", "rdma_rxe", "rdma_ucm", "veth")
    run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
    run("ip", "address", "add", f"{address}/24", "dev", name)
    for end in name, f"{name}-peer":
        run("ip", "link", "set", end, "up")
    run("rdma", "link", "add", f"rxe-{name}", "type", "rxe", "netdev", name)


def program(ground, name, *words, **environment):
    path = ground.options.kernel.parent / "programs" / name
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=PROGRAM_SECONDS, env={**ground.environment, **environment})
    require(done.returncode == 0, f"{name} {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def figures(told):
    return {what.strip(): float(value) for what, value in re.findall(r"^(\w.*?)  +([\d.]+) (?:us|/s|MB/s)$", told, re.MULTILINE)}


def scenes(ground):
    ground.environment = {**os.environ, "RUST_BACKTRACE": "1"}
    with ground.scene("a device of soft-RoCE"):
        device("eth0", ADDRESS)
        require("ACTIVE" in run("rdma", "link"), "it is not up")

    with ground.scene("a rail over verbs beside one over TCP"):
        told = program(ground, "rail", VERBS, ADDRESS, str(PART))
        require(any(line.split()[:1] == [VERBS] and line.split()[-1] == ADDRESS for line in told.splitlines()), f"it is not listed:\n{told}")
        verbs, tcp = figures(told), figures(program(ground, "rail", "tcp", ADDRESS, str(PART)))
        require(len(verbs) == 3 and verbs.keys() == tcp.keys(), f"{verbs} {tcp}")
        for what, value in verbs.items():
            print(f"    {what}: verbs {value:g}, tcp {tcp[what]:g}, ratio {value / tcp[what]:.2f}")

    for test in TESTS:
        name, words = test.split("::")
        with ground.scene(test):
            told = program(ground, name, "--exact", words, RINGLET_TEST_RAILS=f"{VERBS} {ADDRESS}")
            require("1 passed" in told, f"it did not run: {told}")
