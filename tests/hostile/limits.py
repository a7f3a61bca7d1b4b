"""What a process may not have: the connection stays with the kernel, or does without, and the reason says why."""

import contextlib
import os
import pathlib
import pwd
import shutil
import subprocess

import protocol
from confine import CALLS
from harness import Failed, Skipped, require, wait_until
from segment import Served
from subject import RING, SETTLE_SECONDS, Pair, Subject

KERNEL_REASON = {"EPERM": "forbidden", "EACCES": "forbidden", "ENOSYS": "old-kernel"}
ROLES = {"accepting": "server", "connecting": "client"}
BOTH = tuple(ROLES)
# Sides that can't do without a call; where none is named, the ring must be reached without it.
NEEDED_BY = {
    "memfd_create": ("accepting",),
    "fcntl of F_ADD_SEALS": ("accepting",),
    "fcntl of F_GET_SEALS": ("connecting",),
    "socket of AF_UNIX": BOTH,
    "socket of AF_NETLINK": BOTH,
    "sendmsg": BOTH,
    "recvmsg": BOTH,
    "getsockopt of TCP_INFO": BOTH,
    "getsockopt of SO_PEERCRED": BOTH,
    "mmap of MAP_SHARED": BOTH,
    "madvise of MADV_WIPEONFORK": BOTH,
}
# Python itself does not start without these.
PYTHON_NEEDS = {("getrandom", "EACCES")}
DENIALS = (("EPERM", "accepting"), ("EPERM", "connecting"), ("ENOSYS", "accepting"), ("EACCES", "connecting"))
WAYS = ("recv", "poll", "select", "epoll")

MEBIBYTE = 1 << 20
RING_BYTES = 64 << 10
LIBRARY_BYTES = 8 * MEBIBYTE  # the library, and what the loader needs for it
BURST_PAIRS, BURST_RING_BYTES, BURST_BYTES = 8, 2 * MEBIBYTE, 3 * MEBIBYTE
BURST_KIB = 100
PAGES_KEPT_KIB = 16  # more than before the burst: where the receiver looks next, and a message's
SPARE_DESCRIPTORS = 1  # the page that `ringlet ss` reads
DESCRIPTORS = 200
SERVED_OF_DESCRIPTORS = 0.75


def scenes(ground):
    for call in CALLS:
        with ground.scene(f"a filter that forbids {call}"):
            filtered(ground, call)
    for limits, what, reason in (
        ({"hide": ["/proc"]}, "without /proc", "unproven"),
        ({"hide": ["/dev/shm", "/sys"]}, "without /sys and /dev/shm", None),
        ({"pid_namespace": True}, "in pid namespaces of their own", None),
    ):
        with ground.scene(f"both ends {what}"):
            contained(ground, limits, reason)
    with ground.scene("a program with more rights than its caller takes nothing from him"):
        secure(ground)
    with ground.scene("few descriptors"):
        few_descriptors(ground)
    with ground.scene("many idle clients outside ringlet"):
        idle_clients(ground)
    with ground.scene("many clients with doorbells"):
        many_doorbells(ground)
    with ground.scene("a small address space"):
        small_address_space(ground)
    with ground.scene("a share of the address space"):
        share_of_address_space(ground)
    with ground.scene("small files only"):
        small_files(ground)
    with ground.scene("no memory for a ring"):
        no_memory(ground)
    with ground.scene("memory of a burst"):
        bursts(ground)
    with ground.scene("no mapping left"):
        no_mappings(ground)
    with ground.scene("ringlet's own memory limit"):
        memory_limit(ground)


def work(pair):
    """Bytes both ways, little and much, and every way to wait for them. Long enough for the ring to be reached."""
    pair.exchange(times=3)
    pair.exchange(size=3000, times=10)
    for waiting, sending in (pair.ends(), reversed(pair.ends())):
        for way in WAYS:
            waiting[0].ask("wait_by", waiting[1], way)
            sending[0].do("send", sending[1], 1)
            waiting[0].answer()
    pair.exchange(size=200_000)


def subjects(ground, limits, side=None):
    """Two victims, of which one (or both) is confined."""
    return [Subject(ground, role, limits=limits if side in (None, name) else None) for name, role in ROLES.items()]


# Filters.


def filtered(ground, call):
    for error, side in DENIALS:
        if (call, error) in PYTHON_NEEDS:
            continue
        try:
            pair = Pair(*subjects(ground, {"deny": [[call, error]]}, side))
            work(pair)
            judge_filtered(pair, call, error, side)
        except Failed as problem:
            raise Failed(f"{error} at the {side} side: {problem}") from None
        finally:
            ground.close()


def judge_filtered(pair, call, error, side):
    paths = dict(zip(BOTH, pair.paths()))
    path, reason = dict(zip(BOTH, pair.reasons()))[side]
    needed = side in NEEDED_BY.get(call, ())
    if needed:
        require(RING not in paths.values(), "on the ring, without what that needs")
        # Where not even the page that tells it can be made, nothing is told.
        require(reason in (None, KERNEL_REASON[error]), f"the reason is {reason}")
        require(path in (None, "kernel"), f"the path is {path}")
    else:
        require(set(paths.values()) == {RING}, f"not on the ring ({path}, {reason}), which does not need this call")


# Containers.


def contained(ground, limits, reason):
    if os.geteuid() != 0:
        raise Skipped("only root can make namespaces here")
    try:
        pair = Pair(*subjects(ground, limits))
    except Failed as problem:
        raise Skipped(f"no such namespaces here: {problem}") from None
    work(pair)
    if reason:
        require(("kernel", reason) in pair.reasons(), f"on the ring unproven, or for another reason: {pair.reasons()}")
        require(RING not in pair.paths(), "on the ring unproven")
    else:
        require(pair.paths() == (RING, RING), f"not on the ring: {pair.reasons()}")


# AT_SECURE.


def secure(ground):
    """A copy of a program that is set-user-ID, with ringlet in ld.so.preload: the caller's log is not written, which tells of a wrong setting."""
    if os.geteuid() != 0:
        raise Skipped("only root can make a program set-user-ID")
    library = pathlib.Path(ground.ringlet.command).parent / "libringlet_preload.so"
    for mode, writes in ((0o755, True), (0o4755, False)):
        program = pathlib.Path(ground.directory, f"true-{mode:o}")
        shutil.copy(shutil.which("true"), program)
        os.chown(program, pwd.getpwnam("nobody").pw_uid, -1)
        program.chmod(mode)
        log = pathlib.Path(ground.directory, f"log-{mode:o}")
        script = f"mount -t tmpfs none /etc && echo {library} > /etc/ld.so.preload && exec {program}"
        env = {"PATH": os.environ["PATH"], "RINGLET_LOG": str(log), "RINGLET_SPIN_US": "wrong"}
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], env=env, capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"no mount namespace here: {done.stderr}")
        require(log.exists() == writes, f"mode {mode:o}: the log is {'not ' * writes}written")
        log.unlink(missing_ok=True)


# Descriptors.


def few_descriptors(ground):
    least = least_limit(range(5, 40), lambda count: works_unwrapped(ground, {"nofile": count}))
    ring = 0
    for count in range(least + SPARE_DESCRIPTORS, least + 14):
        for side in (*BOTH, None):
            pair = Pair(*subjects(ground, {"nofile": count}, side))
            try:
                work(pair)
                judge_few(pair)
                ring += pair.paths() == (RING, RING)
            except Failed as problem:
                where = f"{count} descriptors, of which {least} are needed, at {side or 'both'}"
                raise Failed(f"{where}: {problem}") from None
            ground.close()
    require(ring, "with no number of descriptors is the ring reached")


def judge_few(pair):
    for path, reason in pair.reasons():
        if path == "kernel":
            require(reason in ("no-descriptor", "no-peer"), f"the reason is {reason}")


def least_limit(candidates, works):
    for candidate in candidates:
        if works(candidate):
            return candidate
    raise Skipped("no limit found under which the program works by itself")


def works_unwrapped(ground, limits):
    try:
        work(Pair(*(Subject(ground, "nobody", limits=limits) for _ in BOTH)))
        return True
    except Failed:
        return False
    finally:
        ground.close()


def idle_clients(ground):
    """Each has sent enough for the server to await it at the rendezvous, and then does nothing for ever."""
    server = Subject(ground, limits={"nofile": DESCRIPTORS})
    with contextlib.ExitStack() as open_ones:
        for count in range(int(DESCRIPTORS * SERVED_OF_DESCRIPTORS)):
            tcp, number = server.accept_from_us()
            open_ones.enter_context(tcp)
            try:
                server.ask("send_back", number, 1, 6)
                for _ in range(6):
                    tcp.sendall(b"x")
                    require(tcp.recv(1) == b"x", "the server does not answer")
                server.answer()
            except Failed as problem:
                raise Failed(f"client {count}: {problem}") from None


def many_doorbells(ground):
    """Each client is (or says that it is) another process, with an eventfd of its own."""
    server = Subject(ground, limits={"nofile": DESCRIPTORS})
    port = server.listen()
    server.do("serve")
    with contextlib.ExitStack() as open_ones:
        for count in range(int(DESCRIPTORS * SERVED_OF_DESCRIPTORS)):
            peer = Served(server, port, process=count + 1)
            open_ones.callback(peer.close)
        held = server.held()["anon_inode:[eventfd]"]
        require(held <= DESCRIPTORS // 8 + 2, f"{held} of {DESCRIPTORS} descriptors are doorbells")


# Memory.


def small_address_space(ground):
    limits = [size * MEBIBYTE for size in range(10, 200, 4)]
    least = least_limit(limits, lambda size: works_unwrapped(ground, {"address_space": size}))
    for size in (*range(least + LIBRARY_BYTES, least + 100 * MEBIBYTE, 12 * MEBIBYTE), least + 400 * MEBIBYTE):
        try:
            pair = Pair(*subjects(ground, {"address_space": size}))
            work(pair)
        except Failed as problem:
            raise Failed(f"{size // MEBIBYTE} MiB, of which {least // MEBIBYTE} are needed: {problem}") from None
        for path, reason in pair.reasons():
            require(path != "kernel" or reason in ("no-memory", "no-peer"), f"{size >> 20} MiB: the reason is {reason}")
        ground.close()


def share_of_address_space(ground):
    """Ringlet takes a quarter of what the process may have; a program that then wants the half has it."""
    limit, ring_bytes = 2048 * MEBIBYTE, 16 * MEBIBYTE
    fit = limit // 4 // protocol.segment_bytes(ring_bytes)
    accepting = Subject(ground, ring_bytes=ring_bytes, limits={"address_space": limit})
    connecting = Subject(ground, "client", ring_bytes=ring_bytes)
    pairs = [Pair(accepting, connecting) for _ in range(fit + 5)]
    for pair in pairs:
        pair.exchange(times=8)
    paths = [pair.paths() for pair in pairs]
    require(paths.count((RING, RING)) == fit, f"{fit} of {len(pairs)} fit: {paths}")
    require(pairs[-1].reasons()[0] == ("kernel", "no-memory"), f"the reason is {pairs[-1].reasons()[0]}")
    require(accepting.do("can_have", limit // 2), "half of the address space is not the program's")
    for pair in pairs:
        pair.exchange(size=3000)


def small_files(ground):
    """RLIMIT_FSIZE is for memory files too; who exceeds it is killed by SIGXFSZ."""
    for size in (0, 4096, MEBIBYTE):
        pair = Pair(*subjects(ground, {"file_size": size}, "accepting"))
        work(pair)
        reason = pair.reasons()[0]
        require(reason[0] in ("kernel", None), f"files of {size} bytes: {reason}")
        ground.close()


def no_memory(ground):
    """Pages that can't be had: nobody touches them. (A filter gives the kernel's answer, which else only a machine without memory gives.)"""
    deny = {"deny": [("madvise of MADV_POPULATE_WRITE", "ENOMEM")]}
    for side in BOTH:
        pair = Pair(*subjects(ground, deny, side))
        work(pair)
        reason = pair.reasons()[BOTH.index(side)]
        require(reason == ("kernel", "no-memory"), f"no memory at the {side} side: {reason}")
        ground.close()


def bursts(ground):
    """What much at once has used is given back while the connections live, however their sender sleeps; and they go on."""
    accepting, connecting = (Subject(ground, role, BURST_RING_BYTES) for role in ROLES.values())
    pairs = [Pair(accepting, connecting) for _ in range(BURST_PAIRS)]
    for pair in pairs:
        pair.exchange(times=8)

    def held():
        return (accepting.segments_kib() + connecting.segments_kib()) / BURST_PAIRS

    idle = held()
    for way in WAYS:
        most = 0
        for pair in pairs:
            connecting.ask("receive", pair.connecting_number, BURST_BYTES)
            accepting.do("send", pair.accepting_number, BURST_BYTES)
            connecting.answer()
            # What an earlier one has used may have been given back by now.
            most = max(most, held())
        require(most > idle + BURST_KIB, f"{most} KiB for each connection: there was no burst")
        accepting.ask("wait_by", pairs[0].accepting_number, way)
        wait_until(lambda: held() < idle + PAGES_KEPT_KIB, SETTLE_SECONDS, f"a sender in {way} to give back")
        connecting.do("send", pairs[0].connecting_number, 1)
        accepting.answer()
        for pair in pairs:
            pair.exchange(size=3000)
            require(pair.paths() == (RING, RING), "a connection has left the ring")


def no_mappings(ground):
    for side in BOTH:
        for left in (0, 1, 2, 3):
            pair = Pair(*subjects(ground, None))
            confined = getattr(pair, side)
            confined.do("use_up_mappings", left)
            work(pair)
            path, reason = pair.reasons()[BOTH.index(side)]
            if not left:
                require((path, reason) == ("kernel", "no-memory"), f"no mapping at the {side} side: {path}, {reason}")
            confined.do("give_mappings_back")
            work(pair)
            ground.close()


def memory_limit(ground):
    size = protocol.segment_bytes(RING_BYTES)
    for side in BOTH:
        for limit, expected in ((0, 0), (size - 1, 0), (size, 1), (2 * size, 2)):
            env = {"RINGLET_MEMORY_LIMIT_BYTES": str(limit)}
            accepting, connecting = (
                Subject(ground, role, ring_bytes=RING_BYTES, env=env if name == side else None)
                for name, role in ROLES.items()
            )
            pairs = [Pair(accepting, connecting) for _ in range(3)]
            for pair in pairs:
                work(pair)
            paths = [pair.paths() for pair in pairs]
            require(paths.count((RING, RING)) == expected, f"{limit} bytes at the {side} side: {paths}")
            path, reason = pairs[-1].reasons()[BOTH.index(side)]
            require((path, reason) == ("kernel", "no-memory"), f"{limit} bytes at the {side} side: {path}, {reason}")
            if expected:
                # What is closed makes room for others.
                pairs[0].close()
                later = Pair(accepting, connecting)
                work(later)
                require(later.paths() == (RING, RING), "a closed connection's memory is not given back")
            ground.close()

