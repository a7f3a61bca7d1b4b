"""asyncio streams: an echo server, and a client that asks it in three ways.

    talk.py server PORT
    talk.py client PORT pings COUNT | bulk BYTES | connections COUNT
"""

import asyncio
import sys
import time

PING_BYTES = 64
BLOCK_BYTES = 64 << 10
WARM_PINGS = 100


async def echo(reader, writer):
    while block := await reader.read(BLOCK_BYTES):
        writer.write(block)
        await writer.drain()
    writer.close()


async def serve(port):
    server = await asyncio.start_server(echo, "127.0.0.1", port)
    await server.serve_forever()


async def ask(reader, writer):
    writer.write(b"x" * PING_BYTES)
    assert await reader.readexactly(PING_BYTES) == b"x" * PING_BYTES


async def pings(port, count):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(WARM_PINGS):
        await ask(reader, writer)
    began = time.perf_counter()
    for _ in range(count):
        await ask(reader, writer)
    return time.perf_counter() - began


async def bulk(port, size):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(WARM_PINGS):
        await ask(reader, writer)

    async def send():
        for _ in range(size // BLOCK_BYTES):
            writer.write(bytes(BLOCK_BYTES))
            await writer.drain()

    began = time.perf_counter()
    sending = asyncio.create_task(send())
    left = size // BLOCK_BYTES * BLOCK_BYTES
    while left:
        left -= len(await reader.read(BLOCK_BYTES))
    await sending
    return time.perf_counter() - began


async def connections(port, count):
    began = time.perf_counter()
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await ask(reader, writer)
        writer.close()
        await writer.wait_closed()
    return time.perf_counter() - began


role, port, *rest = sys.argv[1:]
if role == "server":
    asyncio.run(serve(int(port)))
else:
    way, amount = {"pings": pings, "bulk": bulk, "connections": connections}[rest[0]], int(rest[1])
    print(f"rate {amount / asyncio.run(way(int(port), amount)):.1f}")
