"""Disks that are served by reflective memory, and used by NBD: `ringlet disk`, fio, nbdcopy and libnbd.

    python3 tests/disk [--ringlet PATH] [--on PLACE] [--seed N] [SCENE...]
    python3 tests/disk --direct ...                 servers take TCP connections
    python3 tests/disk --measure [--direct] [--rounds N]       beside nbdkit's own file plugin over TCP, by turns

Places: `host` is one, `hosts` are two network namespaces with a node service each, over rails in memory (as root).
"""

import argparse
import concurrent.futures
import contextlib
import errno
import fcntl
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "node"), str(HERE.parent / "faults")]
DEBIANS = "/usr/bin/python3"
try:
    import nbd
except ImportError:
    # (libnbd's module is that Python's.)
    if os.path.realpath(sys.executable) != os.path.realpath(DEBIANS) and os.path.exists(DEBIANS):
        os.execv(DEBIANS, [DEBIANS, *sys.argv])
    print("not installed (Debian package): python3-libnbd")
    sys.exit(77)

from clients import BLOCK, Model, connect, refused  # noqa: E402
from harness import ROOT, Failed, Ringlet, adopt_orphans, end_orphans, free_port, has_failed, require, skip, wait_until  # noqa: E402
from measure import measure  # noqa: E402
from places import LIMIT, Server, attached, cut, host, hosts, served  # noqa: E402
from reflect import ruled  # noqa: E402
from world import missing  # noqa: E402

NEEDED = {"fio": "fio", "nbdcopy": "libnbd-bin"}
PLACES = {"host": host, "hosts": hosts}
STRANGER = 65534
MB = 1 << 20
KILLS = 6
STILL_SECONDS = 0.5  # in which who looks ten times a second is seen
SCENES = []


def scene(function):
    SCENES.append(function)
    return function


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=LIMIT)
    require(done.returncode == 0, f"{words}: {done.stdout}{done.stderr}")
    return done.stdout


def is_same(one, other):
    require(subprocess.run(["cmp", "--", one, other], timeout=LIMIT).returncode == 0, f"{one} is not {other}")


@scene
def verify(place, _seed):
    """fio finds what it wrote, in pieces of all sizes and many at a time; and so it is in the file."""
    path, copy = place.file(32 * MB), place.path("copy")
    with served(place, "one", path), attached(place, "one") as reader:
        job = ["--ioengine=nbd", f"--uri={reader.uri}", "--size=32M", f"--directory={place.directory}"]
        job += ["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]
        for name, how in {"small": ["--bs=4k", "--io_size=8M", "--iodepth=16"], "mixed": ["--bsrange=512-1M", "--iodepth=8"]}.items():
            said = run("fio", f"--name={name}", "--rw=randwrite", *how, *job)
            require("err= 0" in said, said)
        run("nbdcopy", reader.uri, copy)
        is_same(path, copy)
        run("nbdcopy", "--flush", copy, reader.uri)
        is_same(path, copy)


@scene
def kinds(place, seed):
    """Each request, at the edges; and each error."""
    dice, size = random.Random(seed), 4 * MB + 512
    path = place.file(size)
    with served(place, "kinds", path), attached(place, "kinds") as reader, attached(place, "kinds") as other:
        client = connect(reader.uri)
        able = [client.can_flush(), client.can_fua(), client.can_trim(), client.can_zero(), client.can_multi_conn(), not client.is_read_only()]
        require(client.get_size() == size and all(able), f"{client.get_size()} {able}")
        model = bytearray(size)
        for _ in range(150):
            length = dice.choice([1, 7, 512, 4096, 256 << 10, (256 << 10) + 1, MB])
            at = dice.choice([0, size - length, dice.randrange(size - length)])
            flags = dice.choice([0, nbd.CMD_FLAG_FUA])
            match dice.randrange(5):
                case 0:
                    client.zero(length, at, flags=flags | dice.choice([0, nbd.CMD_FLAG_NO_HOLE]))
                    model[at:at + length] = bytes(length)
                case 1 | 2:
                    data = dice.randbytes(length)
                    client.pwrite(data, at, flags=flags)
                    model[at:at + length] = data
                case _:
                    require(client.pread(length, at) == model[at:at + length], f"other bytes at {at}, {length}")
        client.flush()
        # (What was trimmed is zeros here, as in any file that has holes.)
        client.trim(MB, MB)
        model[MB:2 * MB] = bytes(MB)
        require(path.read_bytes() == model, "other bytes in the file")
        require(connect(other.uri).pread(size, 0) == model, "other bytes at another reader")
        for act in (lambda: client.pread(2, size - 1), lambda: client.pread(1, size), lambda: client.pread(1, 1 << 62)):
            refused(act, errno.EINVAL)
        for act in (lambda: client.pwrite(b"ab", size - 1), lambda: client.pwrite(bytes(2 * MB), size - MB), lambda: client.zero(2, size - 1)):
            refused(act, errno.ENOSPC)
        require(client.pread(MB, size - MB) == model[-MB:], "some of what was refused is written")
        os.truncate(path, MB)
        refused(lambda: client.pread(4096, 2 * MB), errno.EIO)
        require(client.pread(4096, 0) == model[:4096], "other bytes before what is missing")


@scene
def strangers(place, seed):
    """Who speaks no NBD, or leaves in the middle, harms nobody; what he asked for is done, or not, before what the next one asks."""
    dice, path = random.Random(seed), place.file(MB)
    magic, head = b"IHAVEOPT", struct.Struct(">8sII")
    option = lambda number, data=b"": head.pack(magic, number, len(data)) + data
    begins = struct.pack(">I", 3) + option(7, struct.pack(">IH", 0, 0))
    request = lambda kind, length, at=0, number=0x25609513: struct.pack(">IHHQQI", number, 0, kind, 7, at, length)
    endless = request(1, 0xffffffff)
    with served(place, "met", path), attached(place, "met") as reader:
        client = connect(reader.uri)

        def says(words, wants):
            """What comes back to these words, so many bytes or all until the end."""
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(LIMIT)
                stranger.connect(str(reader.socket))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    stranger.sendall(words)
                    got = b""
                    while len(got) < wants and (more := stranger.recv(1 << 16)):
                        got += more
                    return got
                return b""

        greeting, agreed = 18, 18 + 20 + 12 + 20
        require(len(says(begins, agreed)) == agreed, "it is not agreed with")
        ended = [
            struct.pack(">I", 4), struct.pack(">I", 3) + b"NBDMAGIC" * 2, struct.pack(">I", 3) + head.pack(magic, 7, 1 << 30),
            struct.pack(">I", 3) + option(1, b"another"), struct.pack(">I", 3) + option(2),
        ]
        for words in ended:
            require(len(says(words, 1 << 20)) <= greeting + 20, f"{words}: it goes on")
        for words in [request(0, 8, number=1), endless, dice.randbytes(28)]:
            require(len(says(begins + words, 1 << 20)) == agreed, f"{words}: it goes on")
        # Each of these is answered with an error, and the next one all the same.
        wrong = [option(7, b"\0" * 5), option(6, struct.pack(">I", 1 << 31) + b"\0\0"), option(7, struct.pack(">I4sH", 4, b"none", 0)), option(99, b"x" * 8000)]
        answers = agreed + 4 * 20 + len("another disk is shown here")
        got = says(struct.pack(">I", 3) + b"".join(wrong) + begins[4:], answers)
        require(len(got) == answers and got.endswith(says(begins, agreed)[greeting:]), f"{got}")
        flags = [Raw.request(kind, 0, 4, b"none" * (kind == 1), flags=1 << bit) for kind, bit in ((0, 4), (0, 5), (1, 1), (3, 2), (4, 1), (6, 15))]
        got = says(begins + b"".join([*flags, request(0, 4)]), agreed + len(flags) * 16 + 20)
        errors = [struct.unpack(">I", got[at + 4:at + 8])[0] for at in range(agreed, len(got) - 4, 16)]
        require(errors == [errno.EINVAL] * len(flags) + [0], f"{errors}")
        require(path.read_bytes() == bytes(MB), "what was refused is written")
        kinds = [request(kind, 1) for kind in (5, 9, 0xffff)]
        got = says(begins + b"".join([*kinds, request(0, 64 << 20), request(0, 4)]), agreed + 5 * 16 + 4)
        errors = [struct.unpack(">I", got[at + 4:at + 8])[0] for at in range(agreed, len(got) - 4, 16)]
        require(errors == [errno.EINVAL] * 4 + [0], f"{errors}")
        for _ in range(30):
            # Some of it was asked for, and nobody hears the answers.
            words = [request(1, 4096, at) + bytes([dice.randrange(256)]) * 4096 for at in range(0, MB, 4096)]
            says(begins + b"".join(words)[:dice.randrange(4096 * 200)], greeting)
            last = dice.randbytes(MB)
            with_more = connect(reader.uri)
            with_more.pwrite(last, 0)
            require(client.pread(MB, 0) == last, "a write has come late")
        require(path.read_bytes() == last, "other bytes in the file")
        silent = [socket.socket(socket.AF_UNIX) for _ in range(80)]
        for at, each in enumerate(silent):
            each.connect(str(reader.socket))
            # (Some have begun.)
            each.send(begins[:4 * (at % 2)])
        require(client.pread(4, 0) == last[:4], "it is not served beside silent ones")
        with_more = connect(reader.uri)
        require(with_more.pread(4, 0) == last[:4], "nobody else is served beside silent ones")
        require(client.pread(4, 0) == last[:4], "it had to make way")
        for each in silent:
            each.close()


class Raw:
    """A connection whose words are its test's."""

    HEAD = struct.Struct(">8sII")
    REQUEST = struct.Struct(">IHHQQI")
    AGREED = 18 + 20 + 12 + 20

    def __init__(self, reader):
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(LIMIT)
        self.stream.connect(str(reader.socket))
        self.stream.sendall(struct.pack(">I", 3) + self.HEAD.pack(b"IHAVEOPT", 7, 6) + struct.pack(">IH", 0, 0))
        require(len(self.get(self.AGREED)) == self.AGREED, "it is not agreed with")

    @classmethod
    def request(cls, kind, at, length, data=b"", cookie=7, flags=0):
        return cls.REQUEST.pack(0x25609513, flags, kind, cookie, at, length) + data

    def get(self, wants):
        """So many bytes, or all until the end."""
        got = b""
        while len(got) < wants and (more := self.stream.recv(min(1 << 20, wants - len(got)))):
            got += more
        return got

    def ask(self, kind, at, length, data=b"", **how):
        self.stream.sendall(self.request(kind, at, length, data, **how))

    def error(self):
        """Of the next answer, which has no bytes."""
        answer = self.get(16)
        require(len(answer) == 16 and answer[:4] == struct.pack(">I", 0x67446698), f"no answer: {answer}")
        return struct.unpack(">I", answer[4:8])[0]


class Chunks(Raw):
    """One that has agreed on chunks, compact or extended; and on base:allocation, unless it is not asked for."""

    STRUCTURED, EXTENDED = 8, 11
    CONTEXT = struct.pack(">II", 0, 1) + struct.pack(">I", 15) + b"base:allocation"

    def __init__(self, reader, kind, allocation=True):
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(LIMIT)
        self.stream.connect(str(reader.socket))
        self.stream.sendall(struct.pack(">I", 3))
        self.get(18)
        self.is_extended = kind == self.EXTENDED
        require(self.option(kind) == [(1, b"")], "there are no chunks")
        if allocation:
            require(self.option(10, self.CONTEXT) == [(4, struct.pack(">I", 1) + b"base:allocation"), (1, b"")], "no context")
        self.begun = self.option(7, struct.pack(">IH", 0, 0))
        require(self.begun[-1] == (1, b""), f"{self.begun}")

    def option(self, number, data=b""):
        """What is replied, as kinds and data, up to the last one."""
        self.stream.sendall(self.HEAD.pack(b"IHAVEOPT", number, len(data)) + data)
        replies = []
        while not replies or not (replies[-1][0] == 1 or replies[-1][0] >> 31):
            magic, to, kind, length = struct.unpack(">QIII", self.get(20))
            require((magic, to) == (0x3E889045565A9, number), f"{magic:x} {to}")
            replies.append((kind, self.get(length)))
        return replies

    def ask(self, kind, at, length, data=b"", cookie=7, flags=0):
        if self.is_extended:
            flags |= (32 if kind == 1 else 0)
            self.stream.sendall(struct.pack(">IHHQQQ", 0x21E41C71, flags, kind, cookie, at, length) + data)
        else:
            self.stream.sendall(self.request(kind, at, length, data, cookie, flags))
        self.at = at

    def answer(self):
        """The chunks of the next answer: kind, body. A simple reply is one of kind None, with its error."""
        chunks, flags = [], 0
        while not flags & 1:
            magic = struct.unpack(">I", self.get(4))[0]
            if magic == 0x67446698:
                require(not self.is_extended, "a simple reply")
                return [(None, struct.unpack(">IQ", self.get(12))[0])]
            require(magic == (0x6E8A278C if self.is_extended else 0x668E33EF), f"{magic:x}")
            flags, kind, cookie = struct.unpack(">HHQ", self.get(12))
            if self.is_extended:
                at, length = struct.unpack(">QQ", self.get(16))
                require(at == self.at, "another place")
            else:
                length = struct.unpack(">I", self.get(4))[0]
            require(cookie == 7, "another cookie")
            chunks.append((kind, self.get(length)))
        return chunks

    def read(self, at, length, flags=0):
        """The bytes, and how many of them were sent; or an error."""
        self.ask(0, at, length, flags=flags)
        found, covered, sent = bytearray(length), 0, 0
        for kind, body in self.answer():
            if kind >> 15:
                return struct.unpack(">I", body[:4])[0]
            if kind == 0:
                continue
            from_, = struct.unpack(">Q", body[:8])
            size = len(body) - 8 if kind == 1 else struct.unpack(">I", body[8:])[0]
            require(kind in (1, 2) and at <= from_ and from_ + size <= at + length and size > 0, f"{kind} {from_} {size}")
            if kind == 1:
                found[from_ - at:from_ - at + size] = body[8:]
                sent += size
            covered += size
        require(covered == length, f"{covered} bytes of {length}")
        return bytes(found), sent

    def status(self, at, length, flags=0):
        """Extents, as lengths and whether they are holes; or an error."""
        self.ask(7, at, length, flags=flags)
        (kind, body), = self.answer()
        if kind >> 15:
            return struct.unpack(">I", body[:4])[0]
        require(kind == (6 if self.is_extended else 5) and struct.unpack(">I", body[:4])[0] == 1, f"{kind} {body[:8]}")
        if self.is_extended:
            require(struct.unpack(">I", body[4:8])[0] * 16 == len(body) - 8, "another count")
        found = list(struct.iter_unpack(">QQ" if self.is_extended else ">II", body[8 if self.is_extended else 4:]))
        require(all(size > 0 and status in (0, 3) for size, status in found), f"{found}")
        return [(size, status == 3) for size, status in found]


@scene
def sparse(place, seed):
    """What is held is told, and what is a hole is not sent, in chunks of both kinds; nbdcopy, nbdinfo and qemu-img find and keep holes."""
    dice, size = random.Random(seed), 64 * MB
    path, copy = place.file(size), place.path("copy")
    kept = [(3 * MB, 2 * MB), (20 * MB, MB), (40 * MB, 256 << 10)]
    model = bytearray(size)
    with open(path, "r+b") as file:
        for at, length in kept:
            model[at:at + length] = dice.randbytes(length)
            file.seek(at)
            file.write(model[at:at + length])
    with served(place, "sparse", path), attached(place, "sparse") as reader:
        client = connect(reader.uri)
        require(client.get_structured_replies_negotiated() and client.can_df(), "no structured replies")
        for kind in (Chunks.STRUCTURED, Chunks.EXTENDED):
            each = Chunks(reader, kind)
            done = [(0, b"")] if each.is_extended else [(None, 0)]
            found, at = [], 0
            while at < size:
                extents = each.status(at, size - at)
                found += extents
                at += sum(length for length, _ in extents)
            require(at == size and found == holes_of(kept, size), f"{found}")
            require(each.status(MB, 8 * MB, flags=8) == [(2 * MB, True)], "not one extent")
            require(each.status(size - 5, 5) == [(5, True)], "another end")
            require(each.read(0, 32 * MB) == (model[:32 * MB], 3 * MB), "other bytes, or holes are sent")
            require(each.read(8 * MB, 256 << 10, flags=4) == (bytes(256 << 10), 0), "a hole is sent")
            for at, length in ((3 * MB - 100, 200), (5 * MB - 7, MB + 9), (40 * MB + 5, 0), (size - 1, 1)):
                require(each.read(at, length)[0] == model[at:at + length], f"other bytes at {at}")
            require(each.read(3 * MB - 100, 256 << 10, flags=4)[0] == model[3 * MB - 100:][:256 << 10], "other bytes as one")
            # What is written, made zeros and trimmed is told so at once.
            each.ask(1, 50 * MB, MB, b"x" * MB)
            require(each.answer() == done, "it is not written")
            require(each.status(49 * MB, 3 * MB) == [(MB, True), (MB, False), (MB, True)], f"{each.status(49 * MB, 3 * MB)}")
            each.ask(6, 50 * MB, MB)
            require(each.answer() == done, "it is not made zeros")
            require(each.status(49 * MB, 3 * MB) == [(3 * MB, True)], "it is no hole")
            if each.is_extended:
                # (More than 32 bits have, and than there is.)
                for what in (4, 6):
                    each.ask(what, 0, 1 << 33)
                    require([kind >> 15 for kind, _ in each.answer()] == [1], "it goes on")
        require(path.read_bytes() == model, "other bytes in the file")
        run("nbdcopy", reader.uri, copy)
        is_same(path, copy)
        require(os.stat(copy).st_blocks * 512 <= 8 * MB, "the copy has no holes")
        said = run("nbdinfo", "--map", reader.uri)
        require(len(said.splitlines()) == 7 and "hole,zero" in said, said)
        if shutil.which("qemu-img"):
            said = run("qemu-img", "map", "--output=json", reader.uri)
            require(said.count('"data": true') == 3, said)
            other = place.path("other")
            run("qemu-img", "convert", "-O", "raw", reader.uri, other)
            is_same(path, other)
            require(os.stat(other).st_blocks * 512 <= 8 * MB, "qemu's copy has no holes")
            run("qemu-img", "convert", "-n", "-O", "raw", other, reader.uri)
            is_same(path, copy)


def holes_of(kept, size):
    found, at = [], 0
    for begins, length in kept:
        found += [(begins - at, True), (length, False)]
        at = begins + length
    return [*found, (size - at, True)]


@scene
def strange_chunks(place, seed):
    """Who asks for chunks, contexts and extended headers as he should not is told so, or is left; all others go on."""
    dice, path = random.Random(seed), place.file(MB)
    with served(place, "odd", path) as _, attached(place, "odd") as reader:
        client = connect(reader.uri)
        text = lambda text: struct.pack(">I", len(text)) + text
        odd = Raw.__new__(Chunks)
        odd.stream = socket.socket(socket.AF_UNIX)
        odd.stream.settimeout(LIMIT)
        odd.stream.connect(str(reader.socket))
        odd.stream.sendall(struct.pack(">I", 3))
        odd.get(18)
        invalid, unknown = 1 << 31 | 3, 1 << 31 | 6
        last = lambda *words: odd.option(*words)[-1][0]
        # (Contexts need chunks.)
        require(last(10, Chunks.CONTEXT) == last(9, Chunks.CONTEXT) == invalid, "contexts without chunks")
        require(last(8, b"x") == last(11, b"x") == invalid and last(8) == 1, "data where there is none")
        require(last(10, text(b"another") + Chunks.CONTEXT[4:]) == unknown, "another disk's context")
        for cut in range(len(Chunks.CONTEXT)):
            require(last(dice.choice([9, 10]), Chunks.CONTEXT[:cut]) == invalid, f"{cut} bytes of it do")
        for words in (Chunks.CONTEXT + b"x", text(b"") + b"\xff" * 4, text(b"") + struct.pack(">I", 2) + Chunks.CONTEXT[8:], b"\xff" * 4096):
            require(last(10, words) == invalid, f"{words[:40]} does")
        context = lambda *queries: text(b"") + struct.pack(">I", len(queries)) + b"".join(text(each) for each in queries)
        contexts = lambda *words: [data[4:] for kind, data in odd.option(*words) if kind == 4]
        require(contexts(9, context()) == contexts(9, context(b"base:", b"x:y")) == [b"base:allocation"], "it is not listed")
        require(contexts(10, context()) == contexts(10, context(b"base:")) == contexts(10, context(b"x:y")) == [], "a wildcard is set")
        # (Set, and set to none: the last one holds.)
        require(contexts(10, context(*[b"base:allocation"] * 100)) == [b"base:allocation"] and contexts(10, context(b"x:y")) == [], "not once")
        odd.is_extended = False
        require(odd.option(7, struct.pack(">IH", 0, 0))[-1] == (1, b""), "it is not agreed with")
        require(odd.status(0, 4096) == errno.EINVAL, "an extent without a context")
        require(odd.read(0, 16)[0] == bytes(16), "other bytes")
        for kind in (Chunks.STRUCTURED, Chunks.EXTENDED):
            each = Chunks(reader, kind)
            for at, length in ((0, 0), (MB, 1), (0, MB + 1), (1, MB), (1 << 63, 4), ((1 << 64) - 1, 1)):
                require(each.status(at, length) == errno.EINVAL, f"extents at {at}, {length}")
            for flags in (1 << 2, 1 << 4, 1 << 6, 1 << 15):
                require(each.status(0, 4096, flags=flags) == errno.EINVAL, f"flags {flags}")
            require(each.read(0, (256 << 10) + 1, flags=4) == errno.EOVERFLOW, "too much as one chunk")
            require(each.read(0, MB + 1) == each.read(0, 64 << 20) == errno.EINVAL, "it is read")
            each.ask(99, 0, 4096)
            require(each.answer()[0][0] >> 15 == 1, "there is no such kind")
            require(each.status(0, MB) == [(MB, True)], "it does not go on")
        # What follows a request that has none is passed, as far as one may send.
        each = Chunks(reader, Chunks.EXTENDED)
        for kind in (0, 3, 4, 6, 7, 99):
            each.ask(kind, 0, 70_000, b"x" * 70_000, flags=32)
            require([kind >> 15 for kind, _ in each.answer()] == [1], f"kind {kind} with bytes")
        each.stream.sendall(struct.pack(">IHHQQQ", 0x21E41C71, 0, 1, 7, 0, 4096))
        each.at = 0
        require([kind >> 15 for kind, _ in each.answer()] == [1], "a write without bytes")
        require(each.read(0, 32)[0] == bytes(32), "it does not go on")
        for words in (
            struct.pack(">IHHQQQ", 0x21E41C71, 32, 1, 7, 0, 1 << 40), struct.pack(">IHHQQQ", 0x21E41C71, 32, 7, 7, 0, (32 << 20) + 1),
            Raw.request(0, 0, 4096) + bytes(4), dice.randbytes(32),
        ):
            each = Chunks(reader, Chunks.EXTENDED)
            each.stream.sendall(words)
            require(each.get(1) == b"", f"{words[:40]}: it goes on")
        each = Chunks.__new__(Chunks)
        each.stream = socket.socket(socket.AF_UNIX)
        each.stream.settimeout(LIMIT)
        each.stream.connect(str(reader.socket))
        each.stream.sendall(struct.pack(">I", 3))
        each.get(18)
        require(each.option(11) == [(1, b"")], "no extended headers")
        each.stream.sendall(Raw.HEAD.pack(b"IHAVEOPT", 1, 0))
        require(each.get(1) == b"", "it begins without a word about extended headers")
        require(client.pread(4, 0) == bytes(4) and path.read_bytes() == bytes(MB), "others do not go on")


@scene
def leaves(place, seed):
    """Who asks, and then says that he leaves, or says no more, is answered all the same; and if he has left, what he asked for is done all the same, before
    what the next one asks."""
    dice, path = random.Random(seed), place.file(8 * MB)
    size = 32 << 10
    with served(place, "left", path) as server, attached(place, "left") as reader:
        for round in range(12):
            client, waits, says, is_served = Raw(reader), round % 2, round % 3, round % 4 < 2
            if not is_served:
                server.kill()
            if not waits:
                # (All of it is there before anything is done.)
                os.kill(reader.process.pid, signal.SIGSTOP)
            words, wants = b"", bytearray(path.read_bytes())
            # (As much as the socket holds, where nobody takes it.)
            places = dice.sample(range(0, 8 * MB, size), 40 if waits and is_served else 4)
            for at in places:
                wants[at:at + size] = dice.randbytes(8) * (size // 8)
                words += client.request(1, at, size, wants[at:at + size])
            client.stream.sendall(words + (client.request(2, 0, 0) if says else b""))
            if not waits:
                client.stream.close()
                os.kill(reader.process.pid, signal.SIGCONT)
            elif not says:
                client.stream.shutdown(socket.SHUT_WR)
            if not is_served:
                server.start()
            if waits:
                got = client.get(MB)
                errors = [struct.unpack(">I", got[at + 4:at + 8])[0] for at in range(0, len(got), 16)]
                require(errors == [0] * len(places), f"{errors}, round {round}")
            connect(reader.uri)
            require(path.read_bytes() == wants, f"not all is done, round {round}")


@scene
def late(place, seed):
    """What was asked for by a client that has gone while there was no server is not done behind what the next one writes."""
    path = place.file(MB)
    with served(place, "late", path) as server, attached(place, "late") as reader:
        for round in range(6):
            client = Raw(reader)
            server.kill()
            client.ask(1, 0, 4096, b"x" * 4096)
            # (Received, and waiting.)
            wait_until(lambda: not unread(client.stream), LIMIT, "it to be received")
            client.stream.close()
            server.start()
            after = connect(reader.uri)
            after.pwrite(bytes([round]) * 4096, 0)
            time.sleep(0.3)
            require(after.pread(4096, 0) == bytes([round]) * 4096, f"it comes late, round {round}")


def unread(stream):
    """Bytes that were sent, and not received yet."""
    return struct.unpack("i", fcntl.ioctl(stream, termios.TIOCOUTQ, bytes(4)))[0]


@scene
def hears_nothing(place, _seed):
    """Who asks for much, takes none of it and goes is not read for: who comes next does not wait for that."""
    path = place.file(MB)
    with served(place, "deaf", path) as server, attached(place, "deaf") as reader:
        done = lambda: int(pathlib.Path(f"/proc/{server.process.pid}/io").read_text().split()[1])
        client = Raw(reader)
        client.stream.sendall(Raw.request(0, 0, MB) * 1000)
        client.stream.close()
        connect(reader.uri).pread(4, 0)
        require(done() < 200 * MB, f"{done()} bytes are read")


def switches(process):
    """How often its threads have slept."""
    text = "".join(each.read_text() for each in pathlib.Path(f"/proc/{process.pid}/task").glob("*/status"))
    return sum(int(count) for count in re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", text))


@scene
def rests(place, _seed):
    """A connection at which nothing is asked wakes nobody; and then it is there, also where its server goes meanwhile."""
    with served(place, "still", place.file(MB)) as server, attached(place, "still") as reader:
        client = connect(reader.uri)

        def is_still():
            before = switches(reader.process)
            time.sleep(STILL_SECONDS)
            return switches(reader.process) == before

        client.pwrite(b"before", 0)
        wait_until(is_still, LIMIT, "it to sleep")
        require(client.pread(6, 0) == b"before", "other bytes")
        wait_until(is_still, LIMIT, "it to sleep again")
        server.kill()
        buffer = nbd.Buffer(6)
        cookie = client.aio_pread(buffer, 0)
        server.start()
        while not client.aio_command_completed(cookie):
            require(client.poll(LIMIT * 1000) > 0, "no answer")
        require(bytes(buffer.to_bytearray()) == b"before", "other bytes from the next server")


@scene
def dawdles(place, seed):
    """Who has sent half of what it writes when the server dies, and takes its time for the rest, is answered meanwhile what it asked before."""
    path, data = place.file(MB), random.Random(seed).randbytes(200 << 10)
    with served(place, "slow", path) as server, attached(place, "slow", "--patience", "5") as reader:
        for size in (len(data), len(data) // 2 + 1, 5):
            client, half = Raw(reader), size // 2
            os.kill(server.process.pid, signal.SIGSTOP)
            client.ask(0, MB - 8, 8)
            client.ask(1, 0, size, data[:half], cookie=8)
            wait_until(lambda: not unread(client.stream), LIMIT, "it to be received")
            server.kill()
            server.start()
            require(client.error() == 0 and client.get(8) == bytes(8), "it is not read")
            client.stream.sendall(data[half:size])
            require(client.error() == 0 and path.read_bytes()[:size] == data[:size], "other bytes are written")
            client.ask(1, 0, size, bytes(size))
            require(client.error() == 0, "it is not written")


@scene
def takes_late(place, seed):
    """Who takes no answers while it sends is received all the same, as much as is said; also while the server dies, and with much that is refused."""
    size, path = 256 << 10, place.file(16 * MB)
    with served(place, "late", path, "--mode", "600") as server, attached(place, "late", "--patience", "20") as reader:
        for round in range(4):
            data, client = random.Random(seed + round).randbytes(8 * MB), Raw(reader)
            # (More than sockets hold, so as not to be received otherwise.)
            client.stream.sendall(client.request(0, 0, MB if round % 2 else size, cookie=1) * 8)
            wait_until(lambda: not unread(client.stream), LIMIT, "it to be received")
            if round > 1:
                server.kill()
                server.start()
            client.stream.sendall(client.request(9, 0, 0) * 1000)
            client.stream.sendall(client.request(1, 8 * MB, 8 * MB, data, cookie=2) + client.request(3, 0, 0, cookie=2))
            answers = {0x1: 0, 0x2: 0, 0x7: 0}
            for _ in range(8 + 1000 + 2):
                answer = client.get(16)
                error, cookie = struct.unpack(">IQ", answer[4:])
                answers[cookie] += 1
                require(error == (errno.EINVAL if cookie == 7 else 0), f"{error}, round {round}")
                if cookie == 1:
                    wants = MB if round % 2 else size
                    require(client.get(wants) == path.read_bytes()[:wants], "other bytes are read")
            require(answers == {1: 8, 2: 2, 7: 1000}, f"{answers}")
            require(path.read_bytes()[8 * MB:] == data, "other bytes are written")


@scene
def comes_early(place, _seed):
    """Who connects while there is no server waits for it, as requests do: also beside others."""
    path = place.file(MB)
    with served(place, "early", path) as server, attached(place, "early") as reader:
        connect(reader.uri).pwrite(b"here", 0)
        server.kill()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            read = [pool.submit(lambda: bytes(connect(reader.uri).pread(4, 0))) for _ in range(4)]
            time.sleep(0.5)
            server.start()
            require([each.result() for each in read] == [b"here"] * 4, "other bytes")


@scene
def read_only(place, _seed):
    path = place.file(MB)
    path.write_bytes(b"x" * MB)
    with served(place, "ro", path, "--read-only"), attached(place, "ro") as reader:
        client = connect(reader.uri)
        require(client.is_read_only() and client.pread(4, MB - 4) == b"xxxx", "it is not as it should be")
        for act in (lambda: client.pwrite(b"y", 0), lambda: client.zero(4, 0), lambda: client.trim(4, 0)):
            refused(act, errno.EPERM, errno.EROFS, errno.EINVAL)
        require(path.read_bytes() == b"x" * MB, "it was written")
        require(place.uses.disks()["ro"]["read_only"], "it is not listed as such")


class Skipped(Exception):
    """It can't be tried here."""


def as_root():
    if os.geteuid() != 0:
        raise Skipped("only root mounts")


@contextlib.contextmanager
def small(place):
    """A file system with room for 1 MiB (as root)."""
    folder = place.path("small")
    folder.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1M", "none", folder)
    try:
        yield folder
    finally:
        run("umount", "-l", folder)


@scene
def full(place, _seed):
    """The file system has no room: that is what the writer is told, and what was there stays."""
    as_root()
    with small(place) as folder:
        path = folder / "disk"
        with open(path, "wb") as file:
            file.truncate(4 * MB)
        with served(place, "full", path), attached(place, "full") as reader:
            client = connect(reader.uri)
            client.pwrite(b"a" * 4096, 0, flags=nbd.CMD_FLAG_FUA)
            refused(lambda: [client.pwrite(b"b" * (256 << 10), at) for at in range(MB, 4 * MB, 256 << 10)], errno.ENOSPC)
            require(client.pread(4096, 0) == b"a" * 4096, "what was there has gone")
            client.trim(3 * MB, MB)
            client.pwrite(b"c" * 4096, 2 * MB)


@scene
def lost(place, _seed):
    """A device has lost what was written, which the kernel tells once: all who flush are told, again and again; also by the next server."""
    as_root()
    with contextlib.ExitStack() as held:
        folder = held.enter_context(small(place))
        with open(folder / "behind", "wb") as file:
            file.truncate(4 * MB)
        device = run("losetup", "--show", "-f", folder / "behind").strip()
        held.callback(run, "losetup", "-d", device)
        with served(place, "lost", device) as server, attached(place, "lost") as reader, attached(place, "lost") as other:
            one, two = connect(reader.uri), connect(other.uri)
            one.pwrite(b"a" * 4096, 0, flags=nbd.CMD_FLAG_FUA)
            two.flush()
            for at in range(0, 4 * MB, 256 << 10):
                one.pwrite(b"b" * (256 << 10), at)
            for client in (two, one, one, two):
                refused(client.flush, errno.EIO, errno.ENOSPC)
            refused(lambda: two.pwrite(b"c", 0, flags=nbd.CMD_FLAG_FUA), errno.EIO, errno.ENOSPC)
            two.pread(4096, 0)
            two.pwrite(b"d", 0)
            server.kill()
            server.start()
            two.pread(4096, 0)
            for client in (two, one):
                refused(client.flush, errno.EIO)
            with attached(place, "lost") as fresh:
                connect(fresh.uri).flush()


@scene
def replaced(place, _seed):
    """A device that has another medium, of the same size, when it is served again is another disk."""
    as_root()
    with contextlib.ExitStack() as held:
        one, other = place.file(MB), place.file(MB)
        device = run("losetup", "--show", "-f", one).strip()
        held.callback(run, "losetup", "-d", device)
        with served(place, "medium", device) as server, attached(place, "medium") as reader:
            client = connect(reader.uri)
            client.pwrite(b"one", 0, flags=nbd.CMD_FLAG_FUA)
            server.kill()
            server.start()
            require(client.pread(3, 0) == b"one", "other bytes of the same medium")
            server.kill()
            run("losetup", "-d", device)
            run("losetup", device, other)
            server.start()
            refused(lambda: client.pread(3, 0), errno.EIO)
            require("is another one now" in reader.process.tail(), reader.process.tail())


@scene
def mounted(place, _seed):
    """A device that is mounted, or otherwise in use, is not written beside that."""
    as_root()
    with contextlib.ExitStack() as held:
        folder = held.enter_context(small(place))
        with open(folder / "behind", "wb") as file:
            file.truncate(MB)
        device = run("losetup", "--show", "-f", folder / "behind").strip()
        held.callback(run, "losetup", "-d", device)
        holder = os.open(device, os.O_RDONLY | os.O_EXCL)
        said = place.serves.run("disk", "serve", "held", device, expected=1)
        require("is mounted, served already" in said, said)
        with served(place, "held", device, "--read-only"):
            os.close(holder)
        with served(place, "held", device):
            require("is mounted, served already" in place.serves.run("disk", "serve", "other", device, expected=1), "it is served twice")


@scene
def several(place, seed):
    """Two disks, and several readers of each on both sides, at a time."""
    paths = [place.file(16 * MB) for _ in range(2)]
    sides = [place.uses, place.serves, place.uses]
    with contextlib.ExitStack() as held:
        for number, path in enumerate(paths):
            held.enter_context(served(place, f"d{number}", path))
        models = []
        for number in range(2):
            for part, side in enumerate(sides):
                reader = held.enter_context(attached(place, f"d{number}", side=side))
                models.append(Model(100, seed + part, first=part * 100))
                models[-1].use(reader.uri)
        listed = place.uses.disks()
        require(sorted(listed) == ["d0", "d1"] and all(len(each["readers"]) == 3 for each in listed.values()), f"{listed}")
        require("d0" in place.serves.run("disk", "ls"), "it is not listed")
        for _ in range(60):
            for model in models:
                model.step()
        for model in models:
            model.settle()
        for number, model in enumerate(models):
            model.is_in(paths[number // 3])


@scene
def server_dies(place, seed):
    """Its readers wait for it, and go on: nobody is told of an error, and nothing is lost."""
    path, dice, size = place.file(16 * MB), random.Random(seed), 600_008
    with served(place, "dies", path) as server, attached(place, "dies") as reader:
        # (In one slot, and in pieces.)
        small, large = Model(8 * MB // BLOCK, seed), Model(12, seed, first=14, size=size)
        for model in (small, large):
            model.use(reader.uri)
        for _ in range(KILLS):
            for _ in range(dice.randrange(100)):
                small.step()
                large.step(8)
            server.kill()
            server.start()
        for model, depth in ((small, 12), (large, 8)):
            for _ in range(50):
                model.step(depth)
            model.settle()
            model.client.flush()
            model.is_in(path)


@scene
def reader_dies(place, seed):
    """Its server forgets it. What it wrote last is done or not; and not done later, when another one is there."""
    path, dice = place.file(8 * MB), random.Random(seed)
    with served(place, "mourns", path), attached(place, "mourns") as reader:
        model = Model(8 * MB // BLOCK, seed)
        for _ in range(KILLS):
            model.use(reader.uri)
            model.look_again()
            for _ in range(dice.randrange(20, 200)):
                model.step()
            reader.kill()
            model.lose()
            reader.start()
        model.use(reader.uri)
        model.look_again()
        model.is_in(path)
        reader.kill()
        wait_until(lambda: not place.serves.disks()["mourns"]["readers"], LIMIT, "the reader to be forgotten")
        wait_until(lambda: len(place.serves.state()["regions"]) == 2, LIMIT, f"its regions to go: {place.serves.state()['regions']}")


@scene
def patience(place, _seed):
    """Without a server a request fails in the end; with one it goes on; with another disk of that name it does not."""
    path = place.file(MB)
    with served(place, "gone", path) as server, attached(place, "gone", "--patience", "1") as reader:
        client = connect(reader.uri)
        client.pwrite(b"before", 0)
        server.kill()
        refused(lambda: client.pread(6, 0), errno.EIO)
        server.start()
        require(client.pread(6, 0) == b"before", "other bytes")
        # (Those that are behind others wait no longer than those.)
        many, began = Raw(reader), time.monotonic()
        server.kill()
        many.stream.sendall(Raw.request(0, 0, 8) * 60)
        require([many.error() for _ in range(60)] == [errno.EIO] * 60, "not all fail")
        require(time.monotonic() - began < 20, "each waits behind the other")
        server.path = place.file(MB)
        server.start()
        refused(lambda: client.pread(6, 0), errno.EIO)
        require("is another one now" in reader.process.tail(), reader.process.tail())


@scene
def keeper_dies(place, seed):
    """What reflects is killed: the server announces its disk anew, and readers go on."""
    path = place.file(8 * MB)
    with served(place, "kept", path), attached(place, "kept") as reader:
        model = Model(8 * MB // BLOCK, seed)
        model.use(reader.uri)
        for number in range(2):
            for _ in range(50):
                model.step()
            for _ in range(5):
                model.issue()
            place.end_keeper(number)
        for _ in range(50):
            model.step()
        model.settle()
        model.is_in(path)


@scene
def cut_off(place, seed):
    """The reader's host is cut off, and comes back with nothing: its requests have waited."""
    if place.name != "hosts":
        raise Skipped("of one host nothing is cut off")
    path = place.file(8 * MB)
    with served(place, "far", path), attached(place, "far", "--patience", "100") as reader:
        model = Model(8 * MB // BLOCK, seed)
        model.use(reader.uri)
        for _ in range(50):
            model.step()
        for _ in range(5):
            model.issue()
        user = place.hosts[1]
        cut(user, True)
        wait_until(lambda: not place.serves.disks()["far"]["readers"], LIMIT, "the reader to be forgotten")
        cut(user, False)
        for _ in range(50):
            model.step()
        model.settle()
        model.is_in(path)


@scene
def direct(place, seed):
    """Readers use the server's TCP connections. Where one is killed, or passes nothing any more, they go on without, and have one again later."""
    path, port = place.file(8 * MB), free_port()
    has_one = lambda: bool(run(*place.uses.argv("ss", "-tHn", "state", "established", f"dport = :{port}")).strip())
    bytes_sent = lambda: sum(int(word) for word in re.findall(r"bytes_sent:(\d+)", run(*place.uses.argv("ss", "-tHin", f"dport = :{port}"))))
    with served(place, "direct", path, "--direct", f"{place.address}:{port}") as server, attached(place, "direct", "--patience", "100") as reader:
        model = Model(8 * MB // BLOCK, seed)
        model.use(reader.uri)

        def go_on(steps=50):
            for _ in range(steps):
                model.step()

        def is_used():
            go_on(1)
            return has_one() and bytes_sent() > 10 * BLOCK

        wait_until(is_used, LIMIT, "a connection to be used")
        kills = shutil.which("ss") and subprocess.run(place.uses.argv("ss", "-K", "dport", "=", ":1"), capture_output=True).returncode == 0
        for _ in range(KILLS if kills else 0):
            go_on()
            for _ in range(8):
                model.issue()
            subprocess.run(place.uses.argv("ss", "-K", "dport", "=", f":{port}"), capture_output=True, check=True, timeout=LIMIT)
            go_on()
        wait_until(is_used, LIMIT, "another connection to be used")
        if place.name == "hosts":
            # (Nobody says that nothing passes.)
            ruled(place.hosts[1], f"tcp dport {port} drop; tcp sport {port} drop;")
            go_on()
            wait_until(lambda: not has_one(), LIMIT, "the connection to be given up")
            go_on()
            ruled(place.hosts[1], "")
            wait_until(is_used, LIMIT, "a connection to be used again")
        server.kill()
        server.start()
        go_on()
        wait_until(is_used, LIMIT, "a connection to the next server to be used")
        model.settle()
        model.client.flush()
        model.is_in(path)
    if place.name == "hosts":
        other, found = place.file(MB), lambda: run(*place.uses.argv("ss", "-tHn", "state", "established", "dst", place.address))
        before = len(found().splitlines())
        words = ["--direct", "cluster", "--node", place.hosts[0].service.socket]
        with served(place, "cluster", other, *words), attached(place, "cluster") as reader:
            require(connect(reader.uri).pread(4, 0) == bytes(4), "other bytes")
            require(len(found().splitlines()) > before, "no connection to its address in the cluster")


@scene
def nobody_listens(place, _seed):
    """Who has heard that the disk is ready has gone when it is so again: it is served all the same.

    (Behind it the reader's host is the first one, which goes on where both are cut off from each other.)"""
    path = place.file(MB)
    server = subprocess.Popen(place.serves.ringlet("disk", "serve", "alone", path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        require(server.stdout.readline() == b"ready\n", "it is not served")
        server.stdout.close()
        server.stderr.close()
        with attached(place, "alone") as reader:
            client = connect(reader.uri)
            client.pwrite(b"before", 0)
            place.end_keeper(0)

            def is_served():
                with contextlib.suppress(Failed):
                    return place.serves.disks().get("alone", {}).get("host") is not None
                return False

            wait_until(lambda: server.poll() is not None or is_served(), LIMIT, "it to be served again")
            require(client.pread(6, 0) == b"before", "other bytes")
    finally:
        server.kill()
        server.wait(LIMIT)


@scene
def address_goes(place, _seed):
    """A server whose address has gone by the time that a keeper is back serves without connections, and says so."""
    if place.name != "hosts":
        raise Skipped("addresses of this host stay")
    path, address = place.file(MB), ["address", "add", "198.51.100.7/32", "dev", "lo"]
    run(*place.serves.argv("ip", *address))
    with served(place, "moved", path, "--direct", "198.51.100.7") as server, attached(place, "moved") as reader:
        client = connect(reader.uri)
        client.pwrite(b"before", 0)
        address[1] = "del"
        run(*place.serves.argv("ip", *address))
        place.end_keeper(0)
        wait_until(lambda: "is served without --direct" in server.process.tail(), LIMIT, "it to be said")
        require("198.51.100.7" in server.process.tail(), server.process.tail())
        require(client.pread(6, 0) == b"before", "other bytes")


@scene
def wrong(place, _seed):
    """What can't be is said, and why."""
    path = place.file(MB)
    path.chmod(0o666)
    serves, uses = place.serves, place.uses
    folder, socket, empty, pipe = place.path("folder"), place.path("nbd"), place.file(0), place.path("pipe")
    folder.mkdir()
    os.mkfifo(pipe)
    attach = ["disk", "attach", "wrong", "--socket", socket]

    def says(side, words, why, expected=1, user=None):
        said = side.run(*words, expected=expected, user=user)
        require(why in said, f"{words}: {said}")

    says(uses, attach, "no disk wrong is served just now")
    for address, why, status in (("nowhere", "an address", 2), ("0.0.0.0", "an address that others can connect to", 2), ("203.0.113.9", "connections can't be taken", 1)):
        says(serves, ["disk", "serve", "wrong", path, "--direct", address], why, status)
    says(serves, ["disk", "serve", "a/b", path], "a disk's name has 1 to 64 letters")
    says(serves, ["disk", "serve", "wrong", folder], "Is a directory")
    says(serves, ["disk", "serve", "wrong", folder, "--read-only"], "neither a file nor a block device")
    says(serves, ["disk", "serve", "wrong", pipe, "--read-only"], "neither a file nor a block device")
    says(serves, ["disk", "serve", "wrong", empty], "is empty")
    says(serves, ["disk", "serve", "wrong", "/no/such"], "No such file")
    says(serves, ["disk", "serve", "wrong", path, "--mode", "640"], "600, 660, 606 or 666", 2)
    with served(place, "wrong", path):
        says(serves, ["disk", "serve", "other", path], "is served already, or another program has locked it")
        says(uses, ["disk", "serve", "wrong", place.file(MB)], "a disk wrong is served already")
        socket.write_text("")
        says(uses, attach, "is there already")
        socket.unlink()
        with attached(place, "wrong") as reader:
            says(uses, ["disk", "attach", "wrong", "--socket", reader.socket], "is there already")
        if os.geteuid() == 0:
            says(uses, attach, "is not for this user", user=STRANGER)
            require(not place.uses.run("disk", "ls", "--json", user=STRANGER).strip("[] \n"), "a stranger sees it")
        # (Who was killed left it.)
        left = attached(place, "wrong")
        reader = left.__enter__()
        os.kill(reader.process.pid, signal.SIGKILL)
        reader.process.wait(LIMIT)
        reader.start()
        left.__exit__(None, None, None)
    if os.geteuid() == 0:
        with served(place, "all", path, "--mode", "666"), attached(place, "all", user=STRANGER) as reader:
            connect(reader.uri).pwrite(b"stranger", 0)
            require(path.read_bytes()[:8] == b"stranger", "he can't write")
        with served(place, "his", path, "--mode", "666", user=STRANGER):
            says(uses, ["disk", "attach", "his", "--socket", socket], f"is served by user {STRANGER}: --owner {STRANGER}")
            with attached(place, "his", "--owner", STRANGER) as reader:
                require(connect(reader.uri).pread(8, 0) == b"stranger", "other bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.__name__ for each in SCENES]
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--on", choices=PLACES, help="default: all places")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--direct", action="store_true", help="servers take TCP connections; with --measure: both, by turns")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each that is measured (9)")
    parser.add_argument("--rails", choices=["memory", "tcp"], default="memory", help="between two hosts: in memory, or libfabric's tcp")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    options = parser.parse_args()
    if unknown := set(options.scenes) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    os.environ["RINGLET_CONFIG"] = "/dev/null"
    if packages := [package for what, package in NEEDED.items() if not shutil.which(what)]:
        skip(f"not installed (Debian packages): {', '.join(packages)}")
    adopt_orphans()
    # Who is told to end puts away what there is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"seed {options.seed}", flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="ringlet-disk-") as directory:
        os.chmod(directory, 0o755)
        ringlet = Ringlet(options.ringlet, directory)
        for name in [options.on] if options.on else PLACES:
            if name == "hosts" and (why := why_not(ringlet)):
                print(f"skipped   {name}: {why}", flush=True)
                continue
            folder = pathlib.Path(directory) / name
            folder.mkdir()
            folder.chmod(0o777)
            with PLACES[name](ringlet.command, folder, options.rails) as place:
                if options.measure:
                    measure(place, ringlet, options.rounds, options.direct)
                else:
                    place.direct = ["--direct", place.address] if options.direct else []
                    failed |= play(place, [each for each in SCENES if each.__name__ in (options.scenes or names)], options.seed)
            if left := end_orphans():
                print(f"FAILED    {name}: left behind: {left}", flush=True)
                failed = True
    sys.exit(failed)


def why_not(ringlet):
    if os.geteuid() != 0:
        return "only root makes namespaces"
    tools = [tool for tool in ("ip", "nsenter", "nft", "sysctl") if shutil.which(tool) is None]
    return f"not installed: {', '.join(tools)}" if tools else missing(ringlet.command)


def play(place, scenes, seed):
    failed = False
    for each in scenes:

        def once(each=each):
            began, problem, word = time.monotonic(), "", "passed"
            try:
                each(place, seed)
                place.is_empty()
            except Skipped as why:
                word = f"skipped ({why})"
            except (Failed, nbd.Error, subprocess.TimeoutExpired, TimeoutError) as told:
                problem = f"{type(told).__name__}: {told}"
            print(f"{'FAILED' if problem else word:8}  {place.name:6} {each.__name__:14} {time.monotonic() - began:6.1f} s", flush=True)
            if problem:
                print("    " + problem.replace("\n", "\n    "), flush=True)
            return bool(problem)

        failed |= has_failed(f"{place.name} {each.__name__}", once)
    return failed


if __name__ == "__main__":
    main()
