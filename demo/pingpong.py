"""A server and a client of eight bytes there and back, as anybody would write them.

    pingpong.py serve                              prints its port
    pingpong.py talk PORT CONNECTIONS MESSAGES     prints messages a second
"""

import selectors
import socket
import sys
import time

MESSAGE = b"12345678"


def answer(connection):
    data = connection.recv(len(MESSAGE))
    if data:
        connection.sendall(data)
    return bool(data)


def serve():
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    selector.register(listener, selectors.EVENT_READ)
    print(listener.getsockname()[1], flush=True)
    while True:
        for key, _events in selector.select():
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
            elif not answer(key.fileobj):
                selector.unregister(key.fileobj)
                key.fileobj.close()


def talk(port, connections, messages):
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    began = time.monotonic()
    for _ in range(messages // connections):
        for client in clients:
            client.sendall(MESSAGE)
        for client in clients:
            if client.recv(len(MESSAGE), socket.MSG_WAITALL) != MESSAGE:
                sys.exit("something else came back")
    print(round(messages / (time.monotonic() - began)))


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else talk(*map(int, sys.argv[2:]))
