"""Who uses a disk by NBD, and what it must find there."""

import random
import struct

import nbd
from harness import require

BLOCK = 32 << 10


def connect(uri):
    client = nbd.NBD()
    # (What the server must refuse is sent too.)
    client.set_strict_mode(0)
    client.connect_uri(uri)
    return client


def refused(act, *errors):
    try:
        act()
    except nbd.Error as error:
        require(error.errnum in errors, f"{error.string}, not {errors}")
    else:
        require(False, f"it is not refused: {errors}")


class Model:
    """Blocks with one writer, many writes in flight at a time: what each block holds is what was written last; or, where it is not known
    whether that was done, bytes of both."""

    def __init__(self, blocks, seed, first=0, size=BLOCK):
        self.dice, self.first, self.size = random.Random(seed), first, size
        self.known = {first + block: {0} for block in range(blocks)}
        self.count, self.done = 0, 0
        self.client, self.flight = None, {}

    def use(self, uri):
        self.client = connect(uri)

    def lose(self):
        """The way to the server has gone: what is in flight may be done, or not."""
        self.client = None
        for block, (_, writes, _, count) in self.flight.items():
            if writes:
                self.known[block].add(count)
        self.flight = {}

    def issue(self):
        idle = [block for block in self.known if block not in self.flight]
        block = self.dice.choice(idle)
        if self.dice.random() < 0.7:
            self.count += 1
            data = struct.pack("<Q", block << 32 | self.count) * (self.size // 8)
            flags = nbd.CMD_FLAG_FUA if self.dice.random() < 0.05 else 0
            buffer = nbd.Buffer.from_bytearray(bytearray(data))
            self.flight[block] = (self.client.aio_pwrite(buffer, block * self.size, flags=flags), True, buffer, self.count)
        else:
            buffer = nbd.Buffer(self.size)
            self.flight[block] = (self.client.aio_pread(buffer, block * self.size), False, buffer, 0)

    def step(self, depth=12):
        """Some are issued, and one at least is answered."""
        while len(self.flight) < depth:
            self.issue()
        before = self.done
        while self.done == before:
            for block, (cookie, writes, buffer, count) in list(self.flight.items()):
                if self.client.aio_command_completed(cookie):
                    del self.flight[block]
                    self.done += 1
                    if writes:
                        self.known[block] = {count}
                    else:
                        self.check(block, bytes(buffer.to_bytearray()))
            if self.done == before:
                require(self.client.poll(120_000) > 0, "no answer")

    def check(self, block, data):
        found = set(struct.unpack(f"<{self.size // 8}Q", data))
        allowed = {block << 32 | count if count else 0 for count in self.known[block]}
        require(found <= allowed, f"block {block} has {sorted(found)[:4]}, not {sorted(allowed)}")
        return found

    def settle(self):
        while self.flight:
            self.step(0)

    def look_again(self):
        """What was not known is so, or not, from now on: it can't be done later."""
        for block, known in self.known.items():
            if len(known) > 1:
                data = self.client.pread(self.size, block * self.size)
                self.known[block] = {word & 0xFFFFFFFF for word in self.check(block, bytes(data))}

    def is_in(self, path):
        with open(path, "rb") as file:
            for block in self.known:
                file.seek(block * self.size)
                self.check(block, file.read(self.size))
