"""What PVM's messages and an application of its cost over the kernel and over ringlet, by turns."""

import contextlib
import re
import statistics

from harness import require, status_word
from machine import LIMIT_SECONDS, Machine

ROUNDS = {"direct": 6000, "daemon": 1500}
# What talk prints, and what becomes of it: the smallest by half a round trip, in microseconds; others by their rate.
FIGURES = {
    "32 B, half a round trip (us)": (r"^32 B: ([0-9.]+)", lambda rate: 1e6 / rate / 2),
    "8 KiB, half a round trip (us)": (r"^8 KiB: ([0-9.]+)", lambda rate: 1e6 / rate / 2),
    "64 KiB, half a round trip (us)": (r"^64 KiB: ([0-9.]+)", lambda rate: 1e6 / rate / 2),
    "64 KiB one way, each (us)": (r"^bulk: ([0-9.]+)", lambda rate: 1e6 / rate),
    "matrix product (us)": (r"^products: ([0-9.]+)", lambda rate: 1e6 / rate),
}
MOLECULES = "molecules (ms)"


def pair(machine, *words):
    """One asks on the first host, and one answers on the last: what the first has printed."""
    answers = machine.start(["talk", "answer", *words], number=-1)
    try:
        output = machine.run(["talk", "ask", *words])
        status = answers.wait(LIMIT_SECONDS)
        require(status == 0, f"talk answer: {status_word(status)}\n{answers.tail()}")
        return output
    finally:
        answers.kill()


def figures(machine, route):
    output = pair(machine, route, ROUNDS[route])
    found = {what: turn(float(re.search(pattern, output, re.M)[1])) for what, (pattern, turn) in FIGURES.items()}
    took, sum_ = re.search(r"^molecules: ([0-9.]+) s, (\S+)$", pair(machine, "molecules", route), re.M).groups()
    return found | {MOLECULES: float(took) * 1e3}, sum_


def measure(name, nodes, ringlet, directory, rounds):
    found = {}
    with contextlib.ExitStack() as held:
        machines = {}
        for path, wrap in ("kernel", list), ("ringlet", ringlet.wrap):
            place = directory / f"measured-{name}-{path}"
            machines[path] = held.enter_context(Machine(place, [node.again() for node in nodes], wrap, directory))
        alone = re.search(r"^molecules: ([0-9.]+) s, (\S+)$", machines["kernel"].run(["talk", "alone", "molecules"]), re.M)
        for _ in range(rounds):
            for route in ROUNDS:
                for path, machine in machines.items():
                    each, sum_ = figures(machine, route)
                    require(sum_ == alone[2], f"two tasks find {sum_}, and one {alone[2]}")
                    for what, value in each.items():
                        found.setdefault((route, what), {}).setdefault(path, []).append(value)
    print(f"\n{name}, medians of {rounds} by turns (least to most); molecules by one task alone: {float(alone[1]) * 1e3:.0f} ms")
    for (route, what), values in found.items():
        told = [f"{path} {statistics.median(each):9.2f} ({min(each):.2f} to {max(each):.2f})" for path, each in values.items()]
        ratios = [kernel / ours for kernel, ours in zip(values["kernel"], values["ringlet"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{route:7} {what:31} {told[0]:42} {told[1]:42} {ratio}", flush=True)
