"""No scene: a line for the shell, in a guest."""

from guest import Guest


def scenes(ground):
    with ground.scene("a line for the shell"), Guest(ground, "guest", ["shell"]) as guest:
        guest.until("line")
        guest.say(ground.options.run)
        guest.until("ended")
