"""A control group, or a machine, that has no memory left: a ring's pages can't be had, where a first use of them would have killed the
program."""

import contextlib
import os
import pathlib
import signal
import sys

from ground import ANSWER_SECONDS, Ends, Skipped
from harness import require, wait_until

MANY = 8 << 20
# Room for what the programs themselves need meanwhile, but not for a ring of a megabyte.
ROOM_BYTES = 640 << 10
BALLAST_BYTES = 64 << 20
FIRST_TO_GO = "1000"
# Of its own: what is shared is free only once its process has ended, and the killer does not wait for that.
BALLAST = f"""
import signal
held = b"x" * {BALLAST_BYTES}
print("held", flush=True)
signal.pause()
"""


class Group:
    """A control group, of the second version or the first."""

    def __init__(self):
        mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
        places = [(kind, pathlib.Path(at)) for _, at, kind, options, *_ in mounts if kind == "cgroup2" or "memory" in options.split(",")]
        for kind, above in sorted(places, reverse=True):
            own = dict(line.split(":", 2)[1:] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines())
            names = {"cgroup2": ("", "memory.max", "memory.current"), "cgroup": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")}
            controller, limit, used = names[kind]
            # Below our own where that may be; the second version has none below those that have processes.
            for parent in (above / own.get(controller, "/").lstrip("/"), above):
                self.place = parent / f"ringlet-faults-{os.getpid()}-memory"
                with contextlib.suppress(OSError):
                    self.place.mkdir()
                    self._limit, self._used = self.place / limit, self.place / used
                    if self._limit.exists() and os.access(self._limit, os.W_OK):
                        return
                    self.place.rmdir()
        raise Skipped("no control group with a limit of memory can be made")

    def takes(self, *processes):
        for process in processes:
            (self.place / "cgroup.procs").write_text(str(process.pid))

    def used(self):
        return int(self._used.read_text())

    def limit(self, size):
        self._limit.write_text(str(size))

    def never_kills(self):
        """Who finds no memory is told so in a call, and waits at a page of its own."""
        control = self.place / "memory.oom_control"
        if not control.exists():
            raise Skipped("this group has no switch for its killer: the second version never fails a call")
        control.write_text("1")

    def close(self):
        def removed():
            with contextlib.suppress(OSError):
                self.place.rmdir()
            return not self.place.exists()

        wait_until(removed, ANSWER_SECONDS, "an empty control group to go")


@contextlib.contextmanager
def group():
    made = Group()
    try:
        yield made
    finally:
        made.limit(1 << 40)
        for pid in (made.place / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        made.close()


@contextlib.contextmanager
def strict_overcommit():
    """Nothing more can be had by any program of this machine."""
    switches = [pathlib.Path("/proc/sys/vm", name) for name in ("overcommit_memory", "overcommit_ratio", "overcommit_kbytes")]
    before = [switch.read_text() for switch in switches]
    committed = next(line.split()[1] for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if "Committed_AS" in line)
    try:
        switches[2].write_text(committed)
        switches[0].write_text("2")
        yield
    finally:
        switches[0].write_text(before[0])
        # Each of these sets the other to 0.
        switches[1 if int(before[1]) else 2].write_text(before[1 if int(before[1]) else 2])


def left_for_want_of_memory(ends):
    return any(row["pid"] == ends.client.pid and row["reason"] == "no-memory" for row in ends.rows())


def all_arrives(ends):
    ends.ask(ends.server, f"receive {MANY}")
    ends.answer(ends.client, "send")
    ends.both("send 400000", "receive 400000")
    ends.talk()
    ends.finish()


def scenes(ground):
    with ground.scene("a control group without memory for a ring, and without a killer"), group() as limited:
        limited.never_kills()
        ends = Ends(ground, "127.0.0.1")
        ends.on_ring()
        limited.takes(ends.client)
        limited.limit(ROOM_BYTES)
        # Nobody reads.
        ends.tell(ends.client, f"send {MANY}")
        wait_until(lambda: left_for_want_of_memory(ends), ANSWER_SECONDS, "a sender that has left a ring for which there is no memory")
        limited.limit(1 << 40)
        all_arrives(ends)

    with ground.scene("a control group that kills another program for a ring's memory"), group() as limited:
        ends = Ends(ground, "127.0.0.1")
        ends.on_ring()
        ballast = ground.start("neighbour", [sys.executable, "-c", BALLAST])
        pathlib.Path(f"/proc/{ballast.pid}/oom_score_adj").write_text(FIRST_TO_GO)
        limited.takes(ends.server, ends.client, ballast)
        require(ballast.line(ANSWER_SECONDS) == "held", ballast.tail())
        limited.limit(limited.used() + ROOM_BYTES)
        ends.tell(ends.client, f"send {MANY}")
        require(ballast.wait(ANSWER_SECONDS) == -signal.SIGKILL, f"the neighbour lives: {limited.used()} bytes are used")
        ground.put_away(ballast)
        all_arrives(ends)

    with ground.scene("strict overcommit"):
        if not ground.options.whole_machine:
            raise Skipped("a switch of the whole machine: only with --whole-machine")
        ends = Ends(ground, "127.0.0.1")
        # What the sender's own program needs is there from now on.
        ends.both("receive 300000", "send 300000")
        ends.on_ring()
        # Nothing may be started meanwhile, not even what would tell.
        with strict_overcommit():
            ends.tell(ends.client, f"send {MANY}")
            ends.asleep(ends.client)
        require(left_for_want_of_memory(ends), f"not for want of memory: {ends.told()}")
        all_arrives(ends)
