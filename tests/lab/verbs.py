"""Two guests with a cable between them, whose node services carry redis, and then NetPIPE, over soft-RoCE."""

from harness import require
from two import guests

PROGRAMS = 2


def scenes(ground):
    with ground.scene("two guests, and redis and NetPIPE between them over verbs"), guests(ground, "verbs") as (a, b):
        for _ in range(PROGRAMS):
            b.until("listens")
            a.say("go")
            a.until("done")
            b.say("enough")
        ended = [each.until("ended") for each in (a, b)]
        require(ended == ["0", "0"], "a scene in a guest has failed")
