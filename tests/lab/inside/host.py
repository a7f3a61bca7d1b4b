"""What a guest and its host say to each other: a word each."""

import sys


def say(word):
    print(f"lab: {word}", flush=True)


def hear():
    return sys.stdin.readline().strip()


def tell(what):
    """For who reads along."""
    print(f"    {what}", flush=True)
