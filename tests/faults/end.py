"""One end of a byte stream, told what to do by lines of standard input; it answers each by one line. It uses ringlet without
knowing of it.

    listen IP                 answers the port
    accept
    connect IP PORT [FROM]
    send N                    the next N bytes of our stream
    receive N                 the next N bytes of the other's, each compared
    echo N, ask N             a ping-pong of N messages, at the answering and the asking side
    trade N M                 N bytes are sent while M are received
    ticks SECONDS 0|1         SIGALRM again and again, without or with SA_RESTART
    no_more_space             almost none of the address space is left
    held                      how many descriptors and mappings there are
    finish [again]            no more bytes follow; the other's end is awaited, again where the kernel says that there is nothing yet
    number                    of our descriptor
    bind IP [PORT]            instead of a stream, datagrams; answers the port
    answer_all WORD [awake]   from now on each datagram is answered by this word; by one who never sleeps until the next one comes
    who N IP PORT...          N questions to each of these by turns, each awaited; answers which words answered at each
    shout N IP PORT           N datagrams, for which nobody waits; answers how many the kernel refused
    counts                    of bytes: written by sequence numbers and by transmissions, waiting for an acknowledgement, arrived

What fails is answered by `failed:` and why.
"""

import contextlib
import os
import pathlib
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback

PAD = random.Random("pad").randbytes(1 << 20)
PIECE = 1 << 16
MESSAGE = 24
SPACE_LEFT = 1 << 20
INFO_BYTES = 216
ACKED, RECEIVED, NOT_SENT, SENT, RESENT = 120, 128, 144, 200, 208


def pad(start, length):
    start %= len(PAD)
    piece = PAD[start : start + length]
    return piece if len(piece) == length else piece + pad(0, length - len(piece))


class End:
    def __init__(self):
        self.sent = self.received = 0
        self.connected = True

    def listen(self, ip):
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self.listener = socket.create_server((ip, 0), family=family)
        return self.listener.getsockname()[1]

    def accept(self):
        self.stream, _ = self.listener.accept()
        self.connected = False
        self._begin()

    def connect(self, ip, port, source=None):
        self.stream = socket.create_connection((ip, int(port)), source_address=(source, 0) if source else None)
        self._begin()

    def _begin(self):
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, count):
        left = int(count)
        while left > 0:
            done = self.stream.send(pad(self.sent, min(left, PIECE)))
            self.sent += done
            left -= done
        return count

    def receive(self, count):
        left = int(count)
        while left > 0:
            got = self.stream.recv(min(left, PIECE))
            if not got:
                raise AssertionError(f"the end of the stream, after {self.received} bytes")
            if got != pad(self.received, len(got)):
                wrong = next(i for i, byte in enumerate(got) if byte != pad(self.received, len(got))[i])
                raise AssertionError(f"another byte than was sent, at {self.received + wrong}")
            self.received += len(got)
            left -= len(got)
        return count

    def echo(self, count):
        for _ in range(int(count)):
            self.receive(MESSAGE)
            self.send(MESSAGE)
        return count

    def ask(self, count):
        for _ in range(int(count)):
            self.send(MESSAGE)
            self.receive(MESSAGE)
        return count

    def trade(self, to_send, to_receive):
        sender = threading.Thread(target=self.send, args=[to_send])
        sender.start()
        self.receive(to_receive)
        sender.join()
        return "traded"

    def ticks(self, seconds, restart):
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.siginterrupt(signal.SIGALRM, restart == "0")
        signal.setitimer(signal.ITIMER_REAL, float(seconds), float(seconds))

    def no_more_space(self):
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + SPACE_LEFT
        # (By another process: a limit that a program sets for itself is its own memory's, and ringlet's comes beside it.)
        subprocess.run(["prlimit", f"--pid={os.getpid()}", f"--as={most}"], check=True)

    def held(self):
        return len(os.listdir("/proc/self/fd")) + len(pathlib.Path("/proc/self/maps").read_text().splitlines())

    def finish(self, again=None):
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.stream.shutdown(socket.SHUT_WR)
        left = None
        while left is None:
            try:
                left = self.stream.recv(1)
            except BlockingIOError:
                # KERNEL: of a sockmap's socket, whoever waits already is told so when it is woken by less than bytes.
                if not again:
                    raise
        if left:
            raise AssertionError(f"{left} after the end")
        return self.stream.close()

    def bind(self, ip, port=0):
        self.datagrams = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind((ip, int(port)))
        return self.datagrams.getsockname()[1]

    def answer_all(self, word, awake=None):
        self.datagrams.setblocking(not awake)

        def answer():
            while True:
                try:
                    asked, source = self.datagrams.recvfrom(64)
                except BlockingIOError:
                    continue
                if asked != b"shout":
                    self.datagrams.sendto(f"{asked.decode()} {word}".encode(), source)

        threading.Thread(target=answer, daemon=True).start()

    def who(self, count, *places):
        told = {place: set() for place in zip(places[::2], map(int, places[1::2]), strict=True)}
        self.datagrams.settimeout(1)
        for number in range(int(count)):
            for place, words in told.items():
                self._ask_one(f"{number} {place[0]}", place, words)
        return " ".join(f"{ip}={','.join(sorted(words))}" for (ip, _), words in told.items())

    def _ask_one(self, question, place, words):
        # (A datagram may be lost.)
        for _ in range(60):
            self.datagrams.sendto(question.encode(), place)
            with contextlib.suppress(TimeoutError):
                while not (answer := self.datagrams.recv(64).decode()).startswith(question + " "):
                    pass
                words.add(answer.rpartition(" ")[2])
                return
        raise AssertionError(f"{place} does not answer")

    def shout(self, count, ip, port):
        refused = 0
        for _ in range(int(count)):
            try:
                self.datagrams.sendto(b"shout", (ip, int(port)))
            except OSError:
                refused += 1
        return refused

    def number(self):
        return self.stream.fileno()

    def counts(self):
        info = self.stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        words = {at: struct.unpack_from("Q", info, at)[0] for at in (ACKED, RECEIVED, SENT, RESENT)}
        # The kernel's own answer: SIOCOUTQ is ringlet's too, by libc's syscall as well, and counts what is in the ring.
        inode = str(os.fstat(self.stream.fileno()).st_ino)
        rows = map(str.split, pathlib.Path("/proc/net/tcp").read_text().splitlines())
        waiting = next(int(row[4].split(":")[0], 16) for row in rows if row[9] == inode)
        by_sequence = words[ACKED] + waiting - self.connected
        by_transmission = words[SENT] - words[RESENT] + struct.unpack_from("I", info, NOT_SENT)[0]
        return f"{by_sequence} {by_transmission} {waiting} {words[RECEIVED]}"


def main():
    end = End()
    for line in sys.stdin:
        command, *words = line.split()
        try:
            answer = getattr(end, command)(*words)
            print("done" if answer is None else answer, flush=True)
        except Exception as problem:
            traceback.print_exc()
            print(f"failed: {command}: {problem!r}", flush=True)


if __name__ == "__main__":
    main()
