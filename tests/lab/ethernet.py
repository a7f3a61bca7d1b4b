"""In one guest: inside/ethernet.py."""

from guest import alone


def scenes(ground):
    alone(ground, "ethernet")
