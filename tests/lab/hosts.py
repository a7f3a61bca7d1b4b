"""In one guest: inside/hosts.py."""

from guest import alone


def scenes(ground):
    alone(ground, "hosts")
