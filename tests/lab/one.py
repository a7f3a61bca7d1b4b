"""One guest for each: what plays in it alone."""

from guest import Guest
from harness import require

INSIDE = "rails".split()


def scenes(ground):
    for group in INSIDE:
        with ground.scene(f"{group}, in a guest"), Guest(ground, group, [group]) as guest:
            require(guest.until("ended") == "0", "a scene in the guest has failed")
