"""BPF programs, loaded without any library: one drops what goes out, one takes a stream's bytes past TCP, two put another address in an address's place."""

import contextlib
import ctypes
import os
import pathlib
import platform
import socket
import struct

from ground import Skipped

SYS_BPF = {"x86_64": 321, "aarch64": 280}.get(platform.machine())
SYS_PIDFD_GETFD = 438
MAP_CREATE, MAP_UPDATE_ELEM, PROG_LOAD, PROG_ATTACH, PROG_DETACH = 0, 2, 5, 8, 9
MAP_TYPE_SOCKMAP, PROG_TYPE_CGROUP_SKB, PROG_TYPE_SK_MSG, PROG_TYPE_CGROUP_SOCK_ADDR = 15, 8, 16, 18
CGROUP_INET_EGRESS, SK_MSG_VERDICT, CGROUP_INET4_CONNECT, CGROUP_INET4_GETPEERNAME = 1, 7, 10, 29
MSG_REDIRECT_MAP, F_INGRESS = 60, 1
MOVE, MAP_OF_FD, CALL, EXIT = 0xB7, 0x18, 0x85, 0x95
LOAD_WORD, STORE_WORD, MOVE_WORD, SKIP_UNLESS_WORD = 0x61, 0x63, 0xB4, 0x56
USER_IP4, USER_PORT = 4, 24  # in a struct bpf_sock_addr
libc = ctypes.CDLL(None, use_errno=True)
MADE = []  # groups, which can be removed when their programs have ended


def call(number, *words):
    got = libc.syscall(number, *words)
    if got < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return got


def bpf(command, attributes):
    if SYS_BPF is None:
        raise Skipped(f"the number of bpf() on {platform.machine()} is not known here")
    attributes = ctypes.create_string_buffer(attributes, 128)
    try:
        return call(SYS_BPF, command, attributes, 128)
    except PermissionError as problem:
        raise Skipped(f"bpf: {problem}") from None


def instruction(code, register=0, value=0, source=0, offset=0):
    return struct.pack("<BBhI", code, register | source << 4, offset, value & 0xFFFFFFFF)


def load(kind, attach_type, *instructions):
    program = ctypes.create_string_buffer(b"".join(instructions))
    license = ctypes.create_string_buffer(b"GPL")
    addresses = ctypes.addressof(program), ctypes.addressof(license)
    attributes = struct.pack("<IIQQIIQII16sII", kind, len(program) // 8, *addresses, 0, 0, 0, 0, 0, b"faults", 0, attach_type)
    return bpf(PROG_LOAD, attributes)


def unified():
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2":
            return pathlib.Path(line.split()[1])
    raise Skipped("no cgroup2 is mounted")


@contextlib.contextmanager
def attached(directory, kind, attach_type, *instructions):
    program = load(kind, attach_type, *instructions)
    group = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    bpf(PROG_ATTACH, struct.pack("<IIII", group, program, attach_type, 0))
    try:
        yield
    finally:
        bpf(PROG_DETACH, struct.pack("<IIII", group, program, attach_type, 0))
        os.close(group)
        os.close(program)


def dropping(directory):
    return attached(directory, PROG_TYPE_CGROUP_SKB, CGROUP_INET_EGRESS, instruction(MOVE, 0, 0), instruction(EXIT))


def in_place_of(directory, attach_type, before, after):
    """Of an address (IP, port) that a program passes, or gets."""
    words = lambda ip, port: (struct.unpack("=I", socket.inet_aton(ip))[0], socket.htons(port))  # noqa: E731
    (old_ip, old_port), (new_ip, new_port) = words(*before), words(*after)
    return attached(
        directory,
        PROG_TYPE_CGROUP_SOCK_ADDR,
        attach_type,
        instruction(LOAD_WORD, 2, source=1, offset=USER_IP4),
        instruction(SKIP_UNLESS_WORD, 2, old_ip, offset=6),
        instruction(LOAD_WORD, 2, source=1, offset=USER_PORT),
        instruction(SKIP_UNLESS_WORD, 2, old_port, offset=4),
        instruction(MOVE_WORD, 2, new_ip),
        instruction(STORE_WORD, 1, source=2, offset=USER_IP4),
        instruction(MOVE_WORD, 2, new_port),
        instruction(STORE_WORD, 1, source=2, offset=USER_PORT),
        instruction(MOVE, 0, 1),
        instruction(EXIT),
    )


@contextlib.contextmanager
def group():
    """Who is started within is of a group of its own: its directory."""
    above = unified()
    before = next(line[3:] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    own = above / f"ringlet-faults-{os.getpid()}"
    try:
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as problem:
        raise Skipped(f"no control group can be made: {problem}") from None
    try:
        yield own
    finally:
        (above / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        MADE.append(own)


def remove_groups():
    while MADE:
        MADE.pop().rmdir()


def socket_of(pid, number):
    process = os.pidfd_open(pid)
    try:
        return call(SYS_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)


def sockmap():
    return bpf(MAP_CREATE, struct.pack("<IIIII", MAP_TYPE_SOCKMAP, 4, 4, 1, 0))


def put(socket, made):
    key, value = ctypes.c_uint32(0), ctypes.c_uint32(socket)
    bpf(MAP_UPDATE_ELEM, struct.pack("<IIQQQ", made, 0, ctypes.addressof(key), ctypes.addressof(value), 0))


@contextlib.contextmanager
def past_tcp(sender, receiver):
    """Each a pid and a descriptor's number: what the one sends is put straight into the other's queue."""
    with contextlib.ExitStack() as held:
        sockets = [socket_of(*end) for end in (sender, receiver)]
        for socket in sockets:
            held.callback(os.close, socket)
        try:
            target, source = sockmap(), sockmap()
        except OSError as problem:
            raise Skipped(f"no sockmap: {problem}") from None
        held.callback(os.close, target)
        held.callback(os.close, source)
        put(sockets[1], target)
        program = load(
            PROG_TYPE_SK_MSG,
            SK_MSG_VERDICT,
            instruction(MAP_OF_FD, 2, target, source=1),
            instruction(0),
            instruction(MOVE, 3, 0),
            instruction(MOVE, 4, F_INGRESS),
            instruction(CALL, 0, MSG_REDIRECT_MAP),
            instruction(EXIT),
        )
        held.callback(os.close, program)
        # The program before the socket, which gets what its map has when it is put there.
        bpf(PROG_ATTACH, struct.pack("<IIII", source, program, SK_MSG_VERDICT, 0))
        put(sockets[0], source)
        yield
