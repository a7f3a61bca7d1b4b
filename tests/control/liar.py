"""A process that deceives whoever looks at it: each role is a lie. It says `ready`, does what a line of its input asks, and says so.

The layouts are those of ringlet-core/src/view.rs and tap.rs.
"""

import ctypes
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time

PAGE_MAGIC, TAP_MAGIC = b"ringlet\x02", b"rngltap\x01"
HEADER_BYTES, ROW_BYTES, ROWS = 128, 256, 65_536
PAGE_BYTES = HEADER_BYTES + ROWS * ROW_BYTES
TAP_HEAD_BYTES, CELLS, CELL_BYTES = 4096, 16_384, 1024
PATH_RING = 3
ATTACHED_BOTH_WAYS = 1 << 16 | 2 << 8 | 1
PR_SET_NAME = 15
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
F_SEAL_WRITE = 8


def memfd(name, size, pieces, seals=SEALS):
    """Pieces: contents by offset."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    for offset, content in pieces.items():
        os.pwrite(fd, content, offset)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(rows, pid=None, magic=PAGE_MAGIC):
    return struct.pack("<8sIIQIIQII", magic, pid or os.getpid(), rows, 0, 0, 0, rows, 0, 0)


def row(fd, number):
    """One in shared memory that has been used."""
    return struct.pack("<IIiIIIQQQIIQ", PATH_RING, 0, fd, 0, 0, ATTACHED_BOTH_WAYS, 99, 99, 99, 0, 0, number).ljust(ROW_BYTES, b"\0")


def show(rows=(), seals=SEALS, magic=PAGE_MAGIC):
    """Maps a page with these rows, and keeps it."""
    pieces = {0: header(len(rows), magic=magic)}
    pieces |= {HEADER_BYTES + index * ROW_BYTES: each for index, each in enumerate(rows)}
    fd = memfd("ringlet-process", PAGE_BYTES, pieces, seals)
    writable = seals & F_SEAL_WRITE == 0
    return fd, mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = socket.create_connection(listener.getsockname())
        return connecting, listener.accept()[0]


def ready(what=""):
    print(f"ready {what}".strip(), flush=True)


def obey(commands=None):
    for line in sys.stdin:
        word = line.strip()
        print((commands or {})[word](), flush=True)


def quiet():
    """Shows an honest page without a connection."""
    kept = show()
    ready()
    obey()
    return kept


def named(name):
    """Has a name, given in hexadecimal digits."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, bytes.fromhex(name), 0, 0, 0)
    ends = connection()
    kept = show([row(ends[0].fileno(), 1)])
    ready()
    obey()
    return kept


def bound(*names):
    """Binds Unix sockets to names in hexadecimal digits; each with a connection."""
    kept = []
    for name in map(bytes.fromhex, names):
        listener, one = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        listener.bind(name)
        listener.listen()
        one.connect(name)
        kept += [listener, one, listener.accept()[0]]
    page = show([row(each.fileno(), index) for index, each in enumerate(kept)])
    ready()
    obey()
    return page


def sealed():
    """Shows a page that can't be written."""
    kept = show([], SEALS | F_SEAL_WRITE)
    ready()
    obey()
    return kept


def elder():
    """Shows a page of another version."""
    kept = show([], magic=b"ringlet\x01")
    ready()
    obey()
    return kept


def repeating():
    """Shows one connection in every row, and records what no program does."""
    ends = connection()
    fd, page = show([row(ends[0].fileno(), 1 + index) for index in range(ROWS)])
    size = TAP_HEAD_BYTES + CELLS * CELL_BYTES
    tap = mmap.mmap(memfd("ringlet-tap", size, {0: struct.pack("<8sI", TAP_MAGIC, os.getpid())}), size)

    def record():
        """Each cell is another lie; in between, more is claimed than there is room for."""
        local, remote = bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1]), bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 2])
        place = 0
        for place in range(4 * CELLS):
            at = TAP_HEAD_BYTES + place % CELLS * CELL_BYTES
            length, kept = ((10, 1 << 31), (0, 5000), (1 << 31, 65_507), (1 << 31, 1 << 31))[place // 70 % 4]
            piece = place % 70 * 896 if kept > 896 else 0
            flags = place // 70 % 16
            head = struct.pack("<QQQQIIIIiI", (1 << 64) - 1, place, 0, 0, length, kept, piece, flags, 1, 7 << 16 | 9)
            tap[at + 8 : at + 8 + len(head)] = head
            tap[at + 64 : at + 96] = local + remote
            tap[at : at + 8] = struct.pack("<Q", place + 1)
            if place % 1000 == 0:
                tap[16:24] = struct.pack("<Q", place + 1)
                time.sleep(0.001)
        tap[16:24] = struct.pack("<Q", place + (1 << 62))
        return "recorded"

    ready()
    obey({"record": record})
    return fd, page


def beating():
    """Pretends that it is being captured."""
    _, page = show()
    ready()
    count = 0
    while True:
        count += 1
        page[40:44] = struct.pack("<I", count)
        time.sleep(0.001)


def leased(directory):
    """Maps a file that is named like a page, of which it is told when somebody opens it."""
    path = os.path.join(directory, "memfd:ringlet-process")
    with open(path, "wb") as file:
        file.write(header(0))
        file.truncate(PAGE_BYTES)
    broken = []
    signal.signal(signal.SIGIO, lambda *_: broken.append(1))
    fd = os.open(path, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    kept = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
    ready()
    obey({"broken": lambda: len(broken)})
    return kept


def leased_memory():
    """Shows a page whose file may not be opened to be written for as long as the kernel lets it."""
    made, _ = show()
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(f"/proc/self/fd/{made}", os.O_RDONLY)
    kept = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
    _.close()
    os.close(made)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        ready("none")
    else:
        ready("held")
    obey({"held": lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE)})
    return kept


def many(count):
    """So many processes, each with a page."""
    for _ in range(int(count)):
        inlet, outlet = os.pipe()
        if os.fork() == 0:
            kept = show()
            os.write(outlet, b".")
            os.close(outlet)
            while True:
                signal.pause()
                del kept
        os.close(outlet)
        os.read(inlet, 1)
        os.close(inlet)
    ready()
    obey()


def headless(way="syscall"):
    """Serves echoes in a thread; when it is told to, the first thread ends."""

    def serve(listener):
        while True:
            end, _ = listener.accept()
            threading.Thread(target=echo, args=[end]).start()

    def echo(end):
        while piece := end.recv(64):
            end.sendall(piece)

    def answer(end):
        while True:
            end.sendto(*end.recvfrom(64))

    listener = socket.create_server(("127.0.0.1", 0))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(listener.getsockname())
    threading.Thread(target=serve, args=[listener]).start()
    threading.Thread(target=answer, args=[datagrams]).start()
    ready(listener.getsockname()[1])
    sys.stdin.readline()
    libc = ctypes.CDLL(None)
    libc.pthread_exit(None) if way == "pthread" else libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)


if __name__ == "__main__":
    roles = [quiet, named, bound, sealed, elder, repeating, beating, leased, leased_memory, many, headless]
    {role.__name__: role for role in roles}[sys.argv[1]](*sys.argv[2:])
