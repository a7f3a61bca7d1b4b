"""Python: blocking sockets, each selector, asyncio, and the servers of its standard library."""

import asyncio
import collections
import ctypes
import hashlib
import http.client
import http.server
import multiprocessing.connection
import pathlib
import random
import selectors
import socket
import socketserver
import ssl
import subprocess
import threading

from harness import CLIENT_SECONDS, hold, needs, require, server_address

NEEDS = ()
CONNECTIONS = 8
PING_ROUNDS = 50
PING_LARGEST = 5_000
BULK_BYTES = 3_000_000
WRITE_LARGEST = 100_000
READ_BYTES = 70_000
TIMEOUT_SECONDS = 120
ON_THE_RING = 3  # of ringlet_path


def check_equal(got, wanted):
    assert len(got) == len(wanted), f"{len(got)} bytes instead of {len(wanted)}"
    if got != wanted:
        place = next(place for place in range(len(got)) if got[place] != wanted[place])
        raise AssertionError(f"the bytes differ from {place} of {len(got)} on")


# Echo servers: all speak the same protocol, so that any client can meet any server.


def echo(connection):
    while data := connection.recv(READ_BYTES):
        connection.sendall(data)


def listener(port, family=socket.AF_INET):
    return socket.create_server(("::1" if family == socket.AF_INET6 else server_address(), port), family=family, backlog=128)


def blocking_server(port, family=socket.AF_INET):
    def serve(connection):
        with connection:
            echo(connection)

    server = listener(port, family)
    while True:
        connection, _address = server.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def selector_server(port, kind):
    """Never blocks but in the selector; keeps what a slow reader has not taken."""
    selector, server = getattr(selectors, kind)(), listener(port)
    server.setblocking(False)
    selector.register(server, selectors.EVENT_READ)
    pending, ended = collections.defaultdict(bytearray), set()
    while True:
        for key, events in selector.select():
            connection = key.fileobj
            if connection is server:
                accepted, _address = server.accept()
                accepted.setblocking(False)
                selector.register(accepted, selectors.EVENT_READ)
                continue
            buffer = pending[connection]
            if events & selectors.EVENT_READ:
                data = connection.recv(READ_BYTES)
                buffer += data
                if not data:
                    ended.add(connection)
            if buffer:
                try:
                    del buffer[: connection.send(buffer)]
                except BlockingIOError:
                    pass
            if connection in ended and not buffer:
                ended.discard(connection)
                del pending[connection]
                selector.unregister(connection)
                connection.close()
                continue
            reading = 0 if connection in ended or len(buffer) > 10 * READ_BYTES else selectors.EVENT_READ
            selector.modify(connection, reading | (selectors.EVENT_WRITE if buffer else 0))


def asyncio_server(port):
    async def serve(reader, writer):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def main():
        server = await asyncio.start_server(serve, server_address(), port)
        await server.serve_forever()

    asyncio.run(main())


def socketserver_server(port, mixin):
    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            echo(self.request)

    class Server(getattr(socketserver, mixin), socketserver.TCPServer):
        request_queue_size = 128
        allow_reuse_address = True
        daemon_threads = True

    Server((server_address(), port), Handler).serve_forever()


def tls_server(port, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = listener(port)

    def serve(plain):
        with context.wrap_socket(plain, server_side=True) as connection:
            echo(connection)
            connection.unwrap()

    while True:
        connection, _address = server.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


# Echo clients: first small messages there and back, then a bulk both ways at once, ended by half-close.


def script(seed, number):
    """What connection `number` says: its pings and the writes of its bulk."""
    source = random.Random(f"{seed}/{number}")
    pings = [source.randbytes(source.randint(1, PING_LARGEST)) for _ in range(PING_ROUNDS)]
    writes, left = [], BULK_BYTES
    while left:
        size = min(left, source.randint(1, WRITE_LARGEST))
        writes.append(source.randbytes(size))
        left -= size
    return pings, writes


def receive_exactly(connection, size):
    """By turns through each call that receives."""
    received = bytearray()
    while len(received) < size:
        left, turn = size - len(received), len(received) % 4
        if turn == 0:
            data = connection.recv(left)
        elif turn == 1:
            data = connection.recv(left, socket.MSG_WAITALL)
        elif turn == 2:
            buffers = [bytearray(left // 2 + 1), bytearray(left // 2 + 1)]
            got = connection.recvmsg_into([memoryview(buffers[0]), memoryview(buffers[1])[: left - len(buffers[0])]])[0]
            data = b"".join(buffers)[:got]
        else:
            peeked = connection.recv(left, socket.MSG_PEEK)
            data = connection.recv(len(peeked))
            check_equal(data, peeked)
        assert data, f"the connection ended {left} bytes early"
        received += data
    return received


def blocking_client(port, seed, count, timeout, family=socket.AF_INET):
    address = ("::1" if family == socket.AF_INET6 else server_address(), port)
    clients = [socket.create_connection(address, timeout=timeout) for _ in range(count)]
    scripts = [script(seed, number) for number in range(count)]
    for round_ in range(PING_ROUNDS):
        for client, (pings, _writes) in zip(clients, scripts):
            client.sendmsg([pings[round_][:7], pings[round_][7:]])
        for client, (pings, _writes) in zip(clients, scripts):
            check_equal(receive_exactly(client, len(pings[round_])), pings[round_])
    hold()
    results = []

    def bulk(client, writes):
        def send():
            for data in writes:
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        received = bytearray()
        while data := client.recv(READ_BYTES):
            received += data
        sender.join()
        results.append(bytes(received) == b"".join(writes))
        client.close()

    bulks = [(client, writes) for client, (_pings, writes) in zip(clients, scripts)]
    threads = [threading.Thread(target=bulk, args=args) for args in bulks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * count, f"bulk transfers: {results}"


def exchange(selector, outgoing, finish):
    """Sends each connection's writes and takes what comes back, on all of them at once, until all has come back."""
    left = {client: collections.deque(writes) for client, writes in outgoing.items()}
    received = {client: bytearray() for client in outgoing}
    for client in outgoing:
        selector.modify(client, selectors.EVENT_READ | selectors.EVENT_WRITE)
    unfinished = set(outgoing)
    while unfinished:
        ready = selector.select(TIMEOUT_SECONDS)
        assert ready, "nothing happened on any connection"
        for key, events in ready:
            client = key.fileobj
            if events & selectors.EVENT_WRITE:
                data = left[client].popleft()
                sent = client.send(data)
                if sent < len(data):
                    left[client].appendleft(data[sent:])
                if not left[client]:
                    selector.modify(client, selectors.EVENT_READ)
                    if finish:
                        client.shutdown(socket.SHUT_WR)
            if events & selectors.EVENT_READ:
                data = client.recv(READ_BYTES)
                received[client] += data
                assert data or finish, "the connection ended early"
                whole = not data if finish else len(received[client]) >= sum(map(len, outgoing[client]))
                if whole:
                    check_equal(received[client], b"".join(outgoing[client]))
                    unfinished.remove(client)
                    if finish:
                        selector.unregister(client)
                        client.close()


def selector_client(port, seed, count, kind):
    selector = getattr(selectors, kind)()
    clients = [socket.socket() for _ in range(count)]
    scripts = [script(seed, number) for number in range(count)]
    for client in clients:
        client.setblocking(False)
        client.connect_ex((server_address(), port))
        selector.register(client, selectors.EVENT_WRITE)
    for round_ in range(PING_ROUNDS):
        exchange(selector, {client: [pings[round_]] for client, (pings, _) in zip(clients, scripts)}, finish=False)
    hold()
    exchange(selector, {client: writes for client, (_, writes) in zip(clients, scripts)}, finish=True)


def asyncio_client(port, seed, count, certificate=None):
    context = ssl.create_default_context(cafile=certificate) if certificate else None
    still_pinging = count

    async def talk(number, all_pinged):
        nonlocal still_pinging
        pings, writes = script(seed, number)
        reader, writer = await asyncio.open_connection(server_address(), port, ssl=context)
        for ping in pings:
            writer.write(ping)
            check_equal(await reader.readexactly(len(ping)), ping)
        still_pinging -= 1
        if still_pinging == 0:
            hold()
            all_pinged.set()
        await all_pinged.wait()

        async def send():
            for data in writes:
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():  # TLS has no half-close
                writer.write_eof()

        sender = asyncio.ensure_future(send())
        received = await (reader.readexactly(BULK_BYTES) if certificate else reader.read(-1))
        await sender
        check_equal(received, b"".join(writes))
        writer.close()

    async def main():
        all_pinged = asyncio.Event()
        await asyncio.gather(*(talk(number, all_pinged) for number in range(count)))

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_SECONDS))


# The standard library's own protocols.


def content(seed, number):
    return random.Random(f"{seed}/{number}").randbytes(4 ** (number % 11) + number)


def http_server(port, seed):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(content(seed, int(self.path[1:])))

        def do_POST(self):
            self.answer(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_words):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

    Server((server_address(), port), Handler).serve_forever()


def http_client(port, seed, count):
    connections = [http.client.HTTPConnection(server_address(), port, timeout=TIMEOUT_SECONDS) for _ in range(4)]
    for number in range(count):
        connection = connections[number % len(connections)]
        connection.request("GET", f"/{number}")
        check_equal(connection.getresponse().read(), content(seed, number))
        connection.request("POST", "/", body=content(seed, number))
        check_equal(connection.getresponse().read(), content(seed, number))
        if number == count // 2:
            hold()


def object_server(port, path=None):
    if path:
        # The harness waits for the port; clients come by the path, which is there before.
        with multiprocessing.connection.Listener(path, backlog=16, authkey=b"key") as server:
            with listener(port):
                serve_objects(server)
    with multiprocessing.connection.Listener((server_address(), port), backlog=16, authkey=b"key") as server:
        serve_objects(server)


def serve_objects(server):
    while True:
        with server.accept() as connection:
            try:
                while True:
                    connection.send(connection.recv())
            except EOFError:
                pass


def object_client(port, seed, count, path=None):
    with multiprocessing.connection.Client(path or (server_address(), port), authkey=b"key") as connection:
        for number in range(count):
            thing = {"number": number, "bytes": content(seed, number), "list": list(range(number))}
            connection.send(thing)
            assert connection.poll(TIMEOUT_SECONDS), "no answer"
            assert connection.recv() == thing, f"object {number} differs"
            if number == count // 2:
                hold()


def pair_client(_port, seed, count):
    """A worker at the other end of a pipe (a pair of Unix sockets) echoes."""
    near, far = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=echo_objects, args=(near, far))
    worker.start()
    far.close()
    for number in range(count):
        near.send_bytes(content(seed, number))
        assert near.poll(TIMEOUT_SECONDS), "no answer"
        check_equal(near.recv_bytes(), content(seed, number))
    path = getattr(ctypes.CDLL(None), "ringlet_path", lambda _fd: None)(near.fileno())
    near.close()
    worker.join(TIMEOUT_SECONDS)
    assert worker.exitcode == 0, f"the worker ended with {worker.exitcode}"
    return path


def echo_objects(near, far):
    near.close()
    try:
        while True:
            far.send_bytes(far.recv_bytes())
    except EOFError:
        pass


def file_server(port, path):
    server = listener(port)
    while True:
        connection, _address = server.accept()
        with connection, open(path, "rb") as file:
            while request := connection.recv(1):
                file.seek(0)
                connection.sendfile(file, offset=request[0])


def file_client(port, size, digests):
    with socket.create_connection((server_address(), port), timeout=TIMEOUT_SECONDS) as connection:
        for offset, wanted in enumerate(digests):
            connection.sendall(bytes([offset]))
            received = receive_exactly(connection, size - offset)
            assert hashlib.sha256(received).hexdigest() == wanted, f"the file from {offset} on differs"
            if offset == len(digests) // 2:
                hold()


def checks(test):
    def pair(name, server, server_args, client, client_args, connections=CONNECTIONS):
        with test.check(name):
            with test.server(lambda port: test.peer_argv(server, port, *server_args)) as process:
                test.peer(client, process.port, *client_args, ring=(process.port, connections))

    talk = (test.seed, CONNECTIONS)
    pair("blocking", blocking_server, (), blocking_client, (*talk, None))
    if not test.between:  # whose nodes have addresses of IPv4
        pair("blocking, IPv6", blocking_server, (socket.AF_INET6,), blocking_client, (*talk, None, socket.AF_INET6))
    pair("socketserver, thread per connection", socketserver_server, ("ThreadingMixIn",), blocking_client, (*talk, 30))
    for kind in ("EpollSelector", "PollSelector", "SelectSelector"):
        pair(f"selectors.{kind}", selector_server, (kind,), selector_client, (*talk, kind))
    pair("asyncio", asyncio_server, (), asyncio_client, talk)
    pair("asyncio to selectors", selector_server, ("EpollSelector",), asyncio_client, talk)
    pair("selectors to blocking", blocking_server, (), selector_client, (*talk, "EpollSelector"))
    pair("socketserver, process per connection", socketserver_server, ("ForkingMixIn",), blocking_client, (*talk, None))
    pair("http.server, connections kept", http_server, (test.seed,), http_client, (test.seed, 40), connections=4)
    pair("multiprocessing.connection", object_server, (), object_client, (test.seed, 100), connections=1)
    path = f"{test.directory}/objects"
    with test.check("multiprocessing.connection, Unix socket"):
        with test.server(lambda port: test.peer_argv(object_server, port, path)) as process:
            test.peer(object_client, process.port, test.seed, 100, path, ring=(path, 1))
    with test.check("multiprocessing.Pipe"):
        path = test.peer(pair_client, 0, test.seed, 400)
        require(test.mode != "both" or path == ON_THE_RING, f"the pair is on path {path}")

    path = pathlib.Path(test.directory, "file")
    data = test.random.randbytes(1_000_003)
    path.write_bytes(data)
    digests = [hashlib.sha256(data[offset:]).hexdigest() for offset in range(20)]
    pair("sendfile", file_server, (str(path),), file_client, (len(data), digests), connections=1)

    with test.check("ssl"):
        certificate = self_signed_certificate(test)
        with test.server(lambda port: test.peer_argv(tls_server, port, certificate)) as process:
            test.peer(asyncio_client, process.port, *talk, certificate, ring=(process.port, CONNECTIONS))


def self_signed_certificate(test):
    needs("openssl")
    path = str(pathlib.Path(test.directory, "certificate.pem"))
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=server"]
    argv += ["-addext", f"subjectAltName=IP:{server_address()}", "-keyout", path, "-out", path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    require(done.returncode == 0, f"openssl: {done.stderr}")
    return path
