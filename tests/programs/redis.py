"""Redis: one thread, epoll, pipelining, a fork for each snapshot."""

import csv
import pathlib
import random
import shutil
import socket

from harness import hold, require, server_address

NEEDS = ("redis-server", "redis-benchmark")
BENCHMARKS = (  # (name, connections, pipeline, requests)
    ("one connection", 1, 1, 10_000),
    ("50 connections", 50, 1, 50_000),
    ("50 connections, 16 requests in flight on each", 50, 16, 500_000),
)
LARGEST_VALUE = 1 << 20
SUBSCRIBERS = 5


class Redis:
    """A raw client: replies are exact bytes, and nothing is hidden by a library."""

    def __init__(self, place):
        """`place` is a port, or the path of a Unix socket."""
        if isinstance(place, int):
            self._socket = socket.create_connection((server_address(), place), timeout=60)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(60)
            self._socket.connect(place)
        self._file = self._socket.makefile("rb")

    def send(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"*%d\r\n" % len(words)] + [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        self._socket.sendall(b"".join(parts))

    def reply(self):
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise ValueError(f"not a reply: {line[:80]!r}")

    def ask(self, *words):
        self.send(*words)
        return self.reply()

    def info(self, section):
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def random_values(seed, count):
    """Values of 1 B to 1 MB, as many of each magnitude."""
    source = random.Random(seed)
    return [source.randbytes(int(LARGEST_VALUE ** source.random())) for _ in range(count)]


def write_and_read_values(port, seed, count):
    values = random_values(seed, count)
    redis, other = Redis(port), Redis(port)
    for number, value in enumerate(values):
        assert redis.ask("SET", f"value:{number}", value) == b"OK"
        assert redis.ask("GET", f"value:{number}") == value, f"value {number} differs"
        assert other.ask("STRLEN", f"value:{number}") == len(value)
    hold()
    for number in range(count):
        other.send("GET", f"value:{number}")
        redis.send("GETRANGE", f"value:{number}", 0, -1)
    for number, value in enumerate(values):
        assert other.reply() == value, f"value {number} differs, pipelined"
        assert redis.reply() == value, f"value {number} differs, pipelined"


def snapshot_under_load(port, seed):
    values = random_values(seed, 200)
    clients = [Redis(port) for _ in range(20)]
    for round_ in range(10):
        for number, client in enumerate(clients):
            assert client.ask("SET", f"snapshot:{number}", values[10 * number + round_]) == b"OK"
    hold()
    saved = int(clients[0].info("persistence")["rdb_last_save_time"])
    assert clients[0].ask("BGSAVE").startswith(b"Background saving started")
    for round_ in range(10_000):
        # The child has inherited all of these connections; the parent goes on with them.
        for number, client in enumerate(clients):
            assert client.ask("GET", f"snapshot:{number}") == values[10 * number + 9]
        info = clients[0].info("persistence")
        if info["rdb_bgsave_in_progress"] == "0" and round_ > 20:
            break
    assert info["rdb_bgsave_in_progress"] == "0", "the snapshot did not end"
    assert info["rdb_last_bgsave_status"] == "ok" and int(info["rdb_last_save_time"]) >= saved
    for number, client in enumerate(clients):
        assert client.ask("GET", f"snapshot:{number}") == values[10 * number + 9]


def read_snapshot(port, seed):
    values, redis = random_values(seed, 200), Redis(port)
    for number in range(20):
        assert redis.ask("GET", f"snapshot:{number}") == values[10 * number + 9]


def publish_and_subscribe(port, seed, count):
    subscribers = [Redis(port) for _ in range(SUBSCRIBERS)]
    for subscriber in subscribers:
        assert subscriber.ask("SUBSCRIBE", "news") == [b"subscribe", b"news", 1]
    publisher = Redis(port)
    for number, value in enumerate(random_values(seed, count)):
        assert publisher.ask("PUBLISH", "news", value) == SUBSCRIBERS
        for subscriber in subscribers:
            assert subscriber.reply() == [b"message", b"news", value], f"message {number} differs"
        if number == count // 2:
            hold()


def server(test, directory):
    argv = ["redis-server", "--unixsocket", f"{directory}/socket", "--bind", test.address("server"), "--protected-mode", "no", "--save", "", "--dir", str(directory), "--logfile", "", "--port"]
    return test.server(lambda port: [*argv, port])


def checks(test):
    with server(test, test.directory) as redis:
        for name, connections, pipeline, requests in BENCHMARKS:
            with test.check(f"redis-benchmark, {name}"):
                before = int(Redis(redis.port).info("stats")["total_commands_processed"])
                requests = test.work(requests)
                argv = ["redis-benchmark", "--csv", "-t", "set,get", "-c", connections, "-P", pipeline, "-n", requests]
                output = test.client([*argv, "-h", test.address("server"), "-p", redis.port], ring=(redis.port, connections))
                rates = {row["test"]: float(row["rps"]) for row in csv.DictReader(output.splitlines())}
                require(rates.keys() == {"SET", "GET"} and min(rates.values()) > 0, f"unexpected output: {output}")
                served = int(Redis(redis.port).info("stats")["total_commands_processed"]) - before
                require(served >= 2 * requests, f"only {served} of {2 * requests} requests reached the server")

        path = f"{test.directory}/socket"
        with test.check("a Unix socket: redis-benchmark"):
            argv = ["redis-benchmark", "--csv", "-t", "set,get", "-c", 50, "-n", test.work(50_000), "-s", path]
            output = test.client(argv, ring=(path, 50))
            require(output.count("\n") >= 3, f"unexpected output: {output}")
        with test.check("a Unix socket: random values of 1 B to 1 MB come back"):
            test.peer(write_and_read_values, path, test.seed, 50, ring=(path, 2))

        with test.check("a connection per request"):
            argv = ["redis-benchmark", "--csv", "-t", "set,get", "-c", "20", "-k", "0", "-n", "4000"]
            output = test.client([*argv, "-h", test.address("server"), "-p", redis.port])
            require(output.count("\n") >= 3, f"unexpected output: {output}")

        with test.check("random values of 1 B to 1 MB come back"):
            test.peer(write_and_read_values, redis.port, test.seed, 150, ring=(redis.port, 2))
            witness = Redis(redis.port)
            for number, value in enumerate(random_values(test.seed, 150)):
                got = witness.ask("GET", f"value:{number}")
                require(got == value, f"value {number} differs for an unwrapped reader")

        with test.check("publish and subscribe"):
            test.peer(publish_and_subscribe, redis.port, test.seed, 200, ring=(redis.port, SUBSCRIBERS + 1))

        with test.check("a snapshot while connections live"):
            test.peer(snapshot_under_load, redis.port, test.seed, ring=(redis.port, 20))
            copy = pathlib.Path(test.directory, "copy")
            copy.mkdir()
            shutil.copy(pathlib.Path(test.directory, "dump.rdb"), copy)
            with server(test, copy) as reader:
                test.peer(read_snapshot, reader.port, test.seed)
