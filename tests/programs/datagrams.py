"""UDP from Python: asyncio's datagram endpoints, the servers of its standard library, and memcached's UDP port."""

import asyncio
import os
import random
import socket
import socketserver
import struct

from harness import hold, needs

NEEDS = ()
CLIENTS = 4
ROUNDS = 150
LARGEST = 9_000
TIMEOUT_SECONDS = 120


# Echo servers.


def asyncio_server(port):
    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport):
            self.transport = transport

        def datagram_received(self, data, address):
            self.transport.sendto(data, address)

    async def main():
        await asyncio.get_running_loop().create_datagram_endpoint(Echo, ("127.0.0.1", port))
        await asyncio.Event().wait()

    asyncio.run(main())


def socketserver_server(port, mixin):
    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            data, server = self.request
            server.sendto(data, self.client_address)

    class Server(getattr(socketserver, mixin), socketserver.UDPServer):
        max_packet_size = LARGEST
        daemon_threads = True

    Server(("127.0.0.1", port), Handler).serve_forever()


# Clients: each datagram is asked for until it is answered, as UDP has it, and each answer is looked at.


def requests(seed, number):
    source = random.Random(f"{seed} {number}")
    for round_ in range(ROUNDS):
        yield struct.pack("<II", number, round_) + source.randbytes(source.randrange(LARGEST - 8))


def blocking_client(port, seed, count):
    clients = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for client in clients:
        client.settimeout(TIMEOUT_SECONDS)
    for number, client in enumerate(clients):
        if number % 2:
            client.connect(("127.0.0.1", port))
        for request in requests(seed, number):
            client.send(request) if number % 2 else client.sendto(request, ("127.0.0.1", port))
            assert client.recvfrom(LARGEST) == (request, ("127.0.0.1", port)), "a wrong answer"
    hold()
    for client in clients:
        client.close()


def asyncio_client(port, seed, count):
    class Ask(asyncio.DatagramProtocol):
        def __init__(self):
            self.answers = asyncio.Queue()

        def datagram_received(self, data, _address):
            self.answers.put_nowait(data)

    async def ask(transport, protocol, number):
        for request in requests(seed, number):
            transport.sendto(request)
            answer = await asyncio.wait_for(protocol.answers.get(), TIMEOUT_SECONDS)
            assert answer == request, "a wrong answer"

    async def main():
        make = asyncio.get_running_loop().create_datagram_endpoint
        ends = [await make(Ask, remote_addr=("127.0.0.1", port)) for _ in range(count)]
        await asyncio.gather(*(ask(*end, number) for number, end in enumerate(ends)))
        hold()
        for transport, _protocol in ends:
            transport.close()

    asyncio.run(main())


def memcached_client(port, seed, count):
    """Its frames: request number, place and number of this datagram, reserved."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(TIMEOUT_SECONDS)
        client.connect(("127.0.0.1", port))

        def ask(number, text):
            client.send(struct.pack(">HHHH", number & 0xFFFF, 0, 1, 0) + text)
            answer = client.recv(2_000)
            assert struct.unpack_from(">H", answer)[0] == number & 0xFFFF, "an answer to something else"
            return answer[8:]

        source = random.Random(seed)
        for number in range(count):
            value = source.randbytes(source.randrange(1_000))
            stored = ask(2 * number, b"set key%d 0 0 %d\r\n" % (number % 50, len(value)) + value + b"\r\n")
            assert stored == b"STORED\r\n", stored
            got = ask(2 * number + 1, b"get key%d\r\n" % (number % 50))
            assert got == b"VALUE key%d 0 %d\r\n" % (number % 50, len(value)) + value + b"\r\nEND\r\n", got
        hold()
        assert ask(7, b"version\r\n").startswith(b"VERSION")


def checks(test):
    def pair(name, server, server_args, client, count=CLIENTS, wanted=1):
        with test.check(name):
            with test.server(lambda port: test.peer_argv(server, port, *server_args), protocol="udp") as process:
                test.peer(client, process.port, test.seed, count, ring=(process.port, wanted))

    pair("asyncio", asyncio_server, (), asyncio_client)
    pair("asyncio to blocking", asyncio_server, (), blocking_client)
    pair("socketserver, thread per datagram", socketserver_server, ("ThreadingMixIn",), blocking_client)

    with test.check("memcached by UDP"):
        needs("memcached")
        argv = ["memcached", "-l", "127.0.0.1", "-t", 1, "-m", "64"]
        if os.geteuid() == 0:
            # Lanes join sockets of one user.
            argv += ["-u", "root"]
        with test.server(lambda port: [*argv, "-p", 0, "-U", port], protocol="udp") as memcached:
            test.peer(memcached_client, memcached.port, test.seed, 300, ring=(memcached.port, 1))
