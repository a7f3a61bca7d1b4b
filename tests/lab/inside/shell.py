"""A line for the shell, which the host gives; soft-RoCE is on eth0."""

import subprocess
import sys

import rails


def scenes(ground):
    rails.device("eth0", rails.ADDRESS)
    print("lab: line", flush=True)
    line = sys.stdin.readline()
    print(line, flush=True)
    subprocess.run(["sh", "-c", line])
