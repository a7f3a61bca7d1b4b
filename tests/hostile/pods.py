"""Programs that see neither each other's processes nor users, as the containers of a pod: they share memory, and no third gets in.

Each victim is in a pid and a user namespace of its own; whoever attacks is in neither, so that the victims can't tell it from each other by
process or user: it has no number, and reads as the user who is nobody in particular.
"""

import contextlib
import fcntl
import functools
import os
import struct
import subprocess
import sys
import tempfile
import time

import protocol
from harness import Skipped, require, wait_until
from protocol import ANSWER, GREETING, HELLO, message
from rendezvous import OFFER_CALLS, as_user, make_offer, name_of, take_owed, until_killed
from subject import RING, SETTLE_SECONDS, Pair, Subject

USER, OTHER, STRANGER = 61_001, 61_002, 61_003
ROUNDS = 40
PAUSE_SECONDS = 0.2  # between calls, of which only so many are made before it is given up


def scenes(ground):
    for users in (USER, OTHER), (USER, USER):
        whose = "the same user" if users[0] == users[1] else "two users"
        with ground.scene(f"pods of {whose} are on the ring"):
            fast(ground, users)
    with ground.scene("who holds thousands of locks hides nobody's statement for good"):
        many_locks(ground)
    with ground.scene("a user who can't be told is never the same one"):
        same_user_only(ground)
    for users, stranger, whose in ((USER, OTHER), STRANGER, "a third user"), ((USER, USER), USER, "a neighbour of the same user"):
        for attack in (come, squat, relay):
            with ground.scene(f"{whose} {attack.__doc__}"):
                keep_out(ground, attack, users, stranger)


def pods(ground, users, env=None):
    if os.geteuid() != 0:
        raise Skipped("only root can make namespaces here")
    python = python_for(USER)
    roles = zip(("server", "client"), users)
    return Pair(*(Subject(ground, role, env=env, limits={"pod": user}, python=python) for role, user in roles))


@functools.cache
def python_for(user):
    """One that this user may start: ours may lie in a directory of root's."""
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-I", "-S", "-c", ""], user=user, extra_groups=[]).returncode == 0:
                return python
    raise Skipped("no Python that other users can start")


def fast(ground, users):
    pair = pods(ground, users)
    pair.exchange(times=ROUNDS)
    require(pair.paths() == (RING, RING), f"not on the ring: {pair.reasons()}")
    pair.exchange(size=200_000)


LOCKS = 12_000  # more than are looked at
FILES = 120


def many_locks(ground):
    """Nothing is proven then, either way: it is asked again once they are gone."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) == 1:
        raise Skipped("needs two processors: each has a list of locks, and the newest of a list comes first")
    os.sched_setaffinity(0, processors[-1:])
    try:
        pair = pods(ground, (USER, OTHER))
    finally:
        os.sched_setaffinity(0, processors)

    def act(ready):
        os.sched_setaffinity(0, processors[:1])
        files = [tempfile.TemporaryFile() for _ in range(FILES)]
        for file in files:
            for at in range(LOCKS // FILES):
                # Such as don't merge.
                lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 2 * at, 1, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        ready()
        until_killed()

    def seen(reason):
        pair.exchange()
        time.sleep(PAUSE_SECONDS)
        got = [reason for _path, reason in pair.reasons()]
        require("not-owner" not in got, f"a statement that is hidden is taken for none: {got}")
        return reason in got

    with as_user(None, act):
        wait_until(lambda: seen("unproven"), SETTLE_SECONDS, "a look at the locks")
        for _ in range(3):
            seen(None)
            require(RING not in pair.paths(), "proven by what could not be seen")

    def moved():
        seen(None)
        return pair.paths() == (RING, RING)

    wait_until(moved, 2 * SETTLE_SECONDS, "the connection on the ring, when the locks are gone")
    pair.exchange(size=200_000)


def same_user_only(ground):
    pair = pods(ground, (USER, OTHER), {"RINGLET_PEERS": "same-user"})
    pair.exchange(times=ROUNDS)
    require(("kernel", "other-user") in pair.reasons(), f"unmapped users count as the same: {pair.reasons()}")
    require(RING not in pair.paths(), "on the ring")


def keep_out(ground, attack, users, user):
    pair = pods(ground, users)
    make_offer(pair)
    told_read, told_write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            attack(name_of(pair), pair.accepting.ring_bytes, lambda word: os.write(told_write, word))
            status = 0
        os._exit(status)
    os.close(told_write)
    os.set_blocking(told_read, False)
    told = b""

    def has_said(word):
        nonlocal told
        with contextlib.suppress(BlockingIOError):
            told += os.read(told_read, 100)
        return word in told

    def is_over():
        pair.exchange(size=100)
        return has_said(b".")

    try:
        # The stranger is there first.
        wait_until(lambda: has_said(b","), SETTLE_SECONDS, "the stranger to come")
        take_owed(pair)
        wait_until(is_over, 2 * SETTLE_SECONDS, "the attack to be made")
        require(b"!" not in told, "the stranger was given descriptors")
        require(b"?" not in told, "the stranger was told a hello or an answer")
        require(RING not in pair.paths(), "with a stranger on the ring")
        pair.exchange(size=3000, times=4)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(told_read)


def patiently(look, seconds=4):
    try:
        return wait_until(look, seconds, "an answer")
    except Exception:  # there is none, which is as it should be
        return None


def judge(heard, tell, harmless=(GREETING,)):
    if heard:
        tell(b"!" * len(heard.descriptors) + (b"" if heard.kind in harmless else b"?"))


def come(at, ring_bytes, tell):
    """comes in the far end's place"""
    meeting = patiently(lambda: protocol.call(at))
    tell(b",")
    judge(patiently(lambda: protocol.hear(meeting)), tell)
    say(meeting, message(HELLO, 3, ring_bytes))
    judge(patiently(lambda: protocol.hear(meeting), 1), tell)
    tell(b".")


def squat(at, ring_bytes, tell):
    """listens in the near end's place"""
    first = patiently(lambda: protocol.call(at))
    tell(b",")
    patiently(lambda: protocol.hear(first))
    # The name is free again.
    offered = patiently(lambda: try_offer(at))
    meeting = patiently(lambda: accept(offered))
    say(meeting, message(GREETING, 3, 0))
    say(meeting, message(ANSWER, 3, ring_bytes))
    judge(patiently(lambda: protocol.hear(meeting), 1), tell, ())
    tell(b".")


def relay(at, ring_bytes, tell):
    """stands between both and passes on what each says"""
    there = patiently(lambda: protocol.call(at))
    tell(b",")
    greeting = patiently(lambda: protocol.hear(there))
    judge(greeting, tell)
    offered = patiently(lambda: try_offer(at))
    here = patiently(lambda: accept(offered))
    say(here, message(GREETING, greeting.fd if greeting else 3, 0))
    hello = patiently(lambda: protocol.hear(here), 1)
    judge(hello, tell, ())
    say(there, message(HELLO, hello.fd if hello else 3, ring_bytes))
    judge(patiently(lambda: protocol.hear(there), 1), tell)
    tell(b".")


def say(meeting, data):
    """To one who may have turned us away, or never came."""
    if meeting is not None:
        with contextlib.suppress(OSError):
            protocol.say(meeting, data)


def try_offer(at):
    with contextlib.suppress(OSError):
        return protocol.offer(at)


def accept(offered):
    with contextlib.suppress(BlockingIOError):
        made = offered.accept()[0]
        made.setblocking(False)
        return made
