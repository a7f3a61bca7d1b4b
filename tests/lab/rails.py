"""In one guest: inside/rails.py."""

from guest import alone


def scenes(ground):
    alone(ground, "rails")
