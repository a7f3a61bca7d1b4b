#!/usr/bin/env python3
"""Plays what fails once more, by itself, and prints `flaky: NAME` if it passes then; what fails twice fails. Nothing is tried without RETRY_FAILED=1.

    tests/retry.py COMMAND...           a command that is one scene, with the seed that it printed
    tests/retry.py --tests BINARY ...   each test that fails of a binary of cargo's (which starts it so as the runner of its target)
"""

import os
import re
import signal
import subprocess
import sys

SKIPPED = 77
RUST_PANICKED = 101  # how a binary of tests ends of which some have failed


def run(argv):
    """The command's status and its standard output, which is passed on as it comes."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)

    def end(*_):
        process.terminate()
        process.wait()
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    said = bytearray()
    for line in process.stdout:
        said += line
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    status = process.wait()
    # As a shell says it.
    return status if status >= 0 else 128 - status, said.decode(errors="replace")


def flaky(name):
    print(f"flaky: {name}", flush=True)


def command(argv):
    status, said = run(argv)
    if status in (0, SKIPPED) or not os.environ.get("RETRY_FAILED"):
        return status
    seed = re.search(r"^seed (\d+)", said, re.MULTILINE)
    again = [*argv, "--seed", seed[1]] if seed and "--seed" not in argv else argv
    print(f"once more: {' '.join(again)}", flush=True)
    status, _ = run(again)
    if status == 0:
        flaky(" ".join(argv))
    return status


def tests(argv):
    status, said = run(argv)
    # (Whatever else ended it is no test's failure; and the names stand behind the last of these words.)
    names = said.rpartition("\nfailures:\n")[2].partition("\n\n")[0].split("\n") if status == RUST_PANICKED else []
    if not os.environ.get("RETRY_FAILED") or not names or not all(name.startswith("    ") for name in names):
        return status
    failed = False
    for name in map(str.strip, names):
        again, said = run([argv[0], "--exact", name])
        if again == 0 and "test result: ok. 1 passed;" in said:
            flaky(f"{os.path.basename(argv[0])} {name}")
        else:
            failed = True
    return status if failed else 0


sys.exit(tests(sys.argv[2:]) if sys.argv[1] == "--tests" else command(sys.argv[1:]))
