"""memcached: one thread accepts and hands descriptors to four others; it drops its privileges after it listens."""

import os
import random
import socket

from harness import hold, require, server_address

NEEDS = ("memcached",)
LARGEST_VALUE = 1 << 20
THREADS = 4
MANY = 200


class Memcached:
    """A raw client of the text protocol."""

    def __init__(self, port):
        self._socket = socket.create_connection((server_address(), port), timeout=60)
        self._file = self._socket.makefile("rb")

    def send_set(self, key, value, tail=""):
        self._socket.sendall(f"set {key} 0 0 {len(value)}{tail}\r\n".encode() + value + b"\r\n")

    def send_get(self, *keys):
        self._socket.sendall(f"get {' '.join(keys)}\r\n".encode())

    def line(self):
        return self._file.readline().rstrip(b"\r\n")

    def set(self, key, value):
        self.send_set(key, value)
        return self.line() == b"STORED"

    def values(self):
        """What a `get` answers, as {key: value}."""
        found = {}
        while (line := self.line()) != b"END":
            word, key, _flags, size = line.split()
            assert word == b"VALUE", line
            found[key.decode()] = self._file.read(int(size))
            assert self.line() == b""
        return found

    def get(self, *keys):
        self.send_get(*keys)
        return self.values()

    def statistics(self):
        self._socket.sendall(b"stats\r\n")
        found = {}
        while (line := self.line()) != b"END":
            _word, name, value = line.decode().split(" ", 2)
            found[name] = value
        return found


def random_values(seed, count):
    source = random.Random(seed)
    sizes = [LARGEST_VALUE] + [int(LARGEST_VALUE ** source.random()) for _ in range(count - 1)]
    return {f"key:{number}": source.randbytes(size) for number, size in enumerate(sizes)}


def write_and_read_values(port, seed, count):
    values = random_values(seed, count)
    clients = [Memcached(port) for _ in range(2 * THREADS)]  # each thread of the server gets two
    for number, (key, value) in enumerate(values.items()):
        client = clients[number % len(clients)]
        assert client.set(key, value), f"{key} was not stored"
        assert client.get(key) == {key: value}, f"{key} differs"
    hold()
    for client in clients:
        for key in values:
            client.send_get(key)
            assert client.values() == {key: values[key]}, f"{key} differs for another connection"
    small = {key: value for key, value in values.items() if len(value) < 10_000}
    assert clients[0].get(*small) == small


def many_connections(port, count):
    clients = [Memcached(port) for _ in range(count)]
    for round_ in range(40):
        for number, client in enumerate(clients):
            client.send_set(f"many:{number}", b"%d/%d" % (number, round_), tail=" noreply")
            client.send_get(f"many:{number}")
        for number, client in enumerate(clients):
            assert client.values() == {f"many:{number}": b"%d/%d" % (number, round_)}
        if round_ == 30:
            hold()


def checks(test):
    argv = ["memcached", "-l", test.address("server"), "-U", "0", "-t", THREADS, "-I", "2m", "-m", "256", "-c", "1024"]
    if os.geteuid() == 0:
        argv += ["-u", "root" if test.mirrored else "nobody"]
    with test.server(lambda port: [*argv, "-p", port]) as memcached:
        with test.check("random values of 1 B to 1 MB come back"):
            test.peer(write_and_read_values, memcached.port, test.seed, 100, ring=(memcached.port, 2 * THREADS))
            witness = Memcached(memcached.port)
            for key, value in random_values(test.seed, 100).items():
                require(witness.get(key) == {key: value}, f"{key} differs for an unwrapped reader")
            require(witness.statistics()["threads"] == str(THREADS), "not the threads that were asked for")

        # (Over a mirror each has a bell of its own, and a process bells for an eighth of its descriptors.)
        many = MANY // 2 if test.mirrored else MANY
        with test.check(f"{many} connections"):
            test.peer(many_connections, memcached.port, many, ring=(memcached.port, many))
