"""A line for the shell, which the host gives; soft-RoCE is on eth0."""

import subprocess

import host
import rails


def scenes(_ground):
    rails.device("eth0", rails.ADDRESS)
    host.say("line")
    subprocess.run(["sh", "-c", host.hear()])
