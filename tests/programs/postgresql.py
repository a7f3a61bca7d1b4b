"""PostgreSQL: a process per connection, whose parent closes its own copy; a latch in the socket's epoll set."""

import hashlib
import os
import pathlib
import pwd
import re
import shutil
import signal
import subprocess

from harness import CLIENT_SECONDS, Failed, Skipped, require

NEEDS = ("psql", "pgbench")
CLIENTS = 4
ROWS = 200_000
NOTIFICATIONS = 500
# Nothing here outlives the check: no sync, and small.
SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB", "max_connections": "40", "jit": "off"}


def server_directory():
    """Where the server's own commands are; Debian keeps them out of the PATH."""
    places = [shutil.which("postgres"), *pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    found = [pathlib.Path(place).resolve().parent for place in places if place]
    if not found:
        raise Skipped("not installed: the PostgreSQL server")
    return found[0]


def server_user():
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        raise Skipped("PostgreSQL does not run as root, and there is no user postgres") from None


def make_cluster(test, binaries, user):
    place = pathlib.Path(test.directory, "cluster")
    place.mkdir(mode=0o700)
    group = None
    if user:
        group = pwd.getpwnam(user).pw_gid
        os.chown(place, pwd.getpwnam(user).pw_uid, group)
    argv = [binaries / "initdb", "-D", place, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
    identity = {"user": user, "group": group, "extra_groups": [] if user else None}
    done = subprocess.run(argv, **identity, cwd="/", capture_output=True, text=True, timeout=CLIENT_SECONDS)
    if done.returncode != 0:
        raise Failed(f"initdb: {done.stderr}")
    with open(place / "pg_hba.conf", "a") as rules:
        rules.write("host all all samenet trust\n")  # from another host too
    return place


class Psql:
    """Runs psql and pgbench as clients of the check."""

    def __init__(self, test, port, host=None):
        self._test, self._port = test, port
        self._user = server_user() if test.mirrored else None
        self._address = ["-h", host or test.address("server"), "-p", port, "-U", "postgres"]

    def psql(self, *commands, raw=False, **options):
        argv = ["psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *self._address]
        for command in commands:
            argv += ["-c", command]
        output = self._test.client([*argv, "postgres"], raw=raw, user=self._user, **options)
        return output if raw else output.strip()

    def pgbench(self, *options, ring=None):
        output = self._test.client(["pgbench", *self._address, *map(str, options), "postgres"], ring=ring, user=self._user)
        processed = re.search(r"transactions actually processed: (\d+)/(\d+)", output)
        if processed:
            require(processed[1] == processed[2], f"only {processed[1]} of {processed[2]} transactions\n{output}")
            require("failed transactions: 0 " in output, f"failed transactions\n{output}")
        else:
            require("-i" in options, f"unexpected output\n{output}")


def checks(test):
    binaries, user = server_directory(), server_user()
    cluster = make_cluster(test, binaries, user)
    argv = [binaries / "postgres", "-D", cluster, "-h", test.address("server"), "-k", cluster]
    for name, value in SETTINGS.items():
        argv += ["-c", f"{name}={value}"]
    fast_shutdown = signal.SIGINT
    with test.server(lambda port: [*argv, "-p", port], stop=fast_shutdown, user=user) as server:
        client = Psql(test, server.port)
        on_ring = (server.port, CLIENTS)

        with test.check("pgbench -i"):
            client.pgbench("-i", "-q", "-s", 1)
        with test.check("pgbench -S, simple and prepared"):
            for protocol in ("simple", "prepared"):
                count = test.work(2_000)
                client.pgbench("-S", "-n", "-M", protocol, "-c", CLIENTS, "-j", 2, "-t", count, ring=on_ring)
        with test.check("pgbench, TPC-B: the balances agree"):
            count = test.work(100)
            client.pgbench("-n", "-c", CLIENTS, "-j", 2, "-t", count, ring=on_ring)
            sums = client.psql(
                "select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers),"
                " (select sum(bbalance) from pgbench_branches), sum(delta), count(*) from pgbench_history"
            ).split("|")
            require(len(set(sums[:4])) == 1, f"accounts, tellers, branches, history: {sums[:4]}")
            require(int(sums[4]) == CLIENTS * count, f"{sums[4]} of {CLIENTS * count} transactions in the history")
        with test.check("pgbench, a connection per transaction"):
            client.pgbench("-S", "-C", "-n", "-c", CLIENTS, "-t", 50)

        with test.check("pgbench over the server's Unix socket"):
            path = f"{cluster}/.s.PGSQL.{server.port}"
            local = Psql(test, server.port, host=cluster)
            local.pgbench("-S", "-n", "-c", CLIENTS, "-j", 2, "-t", test.work(2_000), ring=(path, CLIENTS))
            got = local.psql("select repeat('0123456789', 2000000)", raw=True)
            require(got == b"0123456789" * 2_000_000 + b"\n", f"the value differs ({len(got)} bytes came)")

        with test.check(f"{ROWS} rows"):
            wanted = hashlib.sha256()
            for number in range(1, ROWS + 1):
                wanted.update(b"%d|%s\n" % (number, hashlib.md5(b"%d" % number).hexdigest().encode()))
            query = f"select i, md5(i::text) from generate_series(1, {ROWS}) i"
            got = client.psql(query, raw=True)
            require(hashlib.sha256(got).digest() == wanted.digest(), f"the rows differ ({len(got)} bytes came)")

        with test.check("COPY in and out"):
            texts = (test.random.randbytes(50).hex().encode() for _ in range(100_000))
            rows = b"".join(b"%d\t%s\n" % row for row in enumerate(texts))
            source = pathlib.Path(test.directory, "rows")
            source.write_bytes(rows)
            client.psql("create table copied (number int, text text)")
            with open(source, "rb") as stdin:
                client.psql("copy copied from stdin", stdin=stdin)
            got = client.psql("copy copied to stdout", raw=True)
            require(got == rows, f"{len(rows)} bytes went in, {len(got)} other ones came out")

        with test.check("a value of 20 MB"):
            got = client.psql("select repeat('0123456789', 2000000)", raw=True)
            require(got == b"0123456789" * 2_000_000 + b"\n", f"the value differs ({len(got)} bytes came)")

        with test.check("LISTEN and NOTIFY"):
            listen_and_notify(test, client, server.port)


def listen_and_notify(test, client, port):
    """Notifications come before the answer to the next command, so none need be waited for."""
    argv = ["psql", "-X", "-q", "-A", "-t", "-h", test.address("server"), "-p", port, "-U", "postgres", "postgres"]
    listener = test.start("client", argv)
    try:
        listener.write("listen news;\nselect 'listening';\n")
        require(listener.line(CLIENT_SECONDS) == "listening", f"psql did not listen\n{listener.tail()}")
        client.psql(*(f"notify news, 'number {number}'" for number in range(NOTIFICATIONS)))
        listener.write("select 'done';\n")
        heard = []
        while (line := listener.line(CLIENT_SECONDS)) != "done":
            require(line is not None, f"psql did not answer\n{listener.tail()}")
            heard.append(line)
        # psql looks for notifications after each answer, so they follow it.
        listener.write("\\q\n")
        require(listener.wait(CLIENT_SECONDS) == 0, "psql did not end")
        text = "\n".join(heard) + listener.finished_output().decode()
        for number in range(NOTIFICATIONS):
            require(f'payload "number {number}"' in text, f"notification {number} did not come")
    finally:
        test.put_away(listener)
