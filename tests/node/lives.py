"""The service comes and goes; what it has introduced does not need it."""

import os
import pathlib
import socket
import sys

from ground import ANSWER_SECONDS
from harness import framed, require
from hostile import COME, GREETING, NODE, message
from world import Across, Service, inside, note, until, within, world

WATCHES = """
import select, socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
watch = select.epoll()
watch.register(sock, select.EPOLLIN)
for line in sys.stdin:
    if line == "ask\\n":
        sock.send(b"?")
        print(watch.poll() and sock.recv(1), flush=True)
    elif line == "close\\n":
        print(sock.close(), flush=True)
    else:
        print(watch.poll(0), flush=True)
"""


def scenes(ground):
    with ground.scene("killed, it takes nothing with it; when it is back, it introduces again"):
        with Service(ground.ringlet.command, ground.directory) as service, world() as host:
            server, client = host.container(), host.container()
            first = Across(ground, server.name, client.name, server.ip)
            first.on_ring()
            service.stop()
            for _ in range(3):
                first.trade(2_000_000, 2_000_000)
                first.traded()
                require(not first.problem, f"{first.problem}")
            require([row["path"] for row in first.rows()] == ["ring", "ring"], f"not on the ring: {first.told()}")
            first.finish()
            without = Across(ground, server.name, client.name, server.ip)
            without.stays_apart("no service", "not-local")
            service.start()
            Across(ground, server.name, client.name, server.ip).meets("the service is back")

    with ground.scene("killed at any moment, no byte is lost"):
        with Service(ground.ringlet.command, ground.directory) as service, world() as host:
            server, client = host.container(), host.container()
            for _ in range(12):
                ends = Across(ground, server.name, client.name, server.ip)
                ends.tell(ends.server, "echo 200")
                ends.tell(ends.client, "ask 200")
                service.stop()
                ends.answer(ends.client, "ask")
                ends.answer(ends.server, "echo")
                ends.trade(500_000, 500_000)
                ends.traded()
                require(not ends.problem, f"{ends.problem}")
                ends.finish()
                service.start()
            note("the service is killed while two are introduced", "either", "byte-exact")

    with ground.scene("it is slow to let go of what was shown; no set tells of that when it is closed"), world() as host:
        server, client = host.container(), host.container()
        place = str(pathlib.Path(ground.directory, "slow.sock"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as service:
            service.bind(place)
            service.listen()
            service.setblocking(False)
            with within(server):
                listener = socket.create_server((server.ip, 0))
            argv = ["env", f"RINGLET_NODE={place}", *inside(client.name), *ground.ringlet.wrap([sys.executable, "-c", WATCHES, server.ip, str(listener.getsockname()[1])])]
            program = ground.start("between", argv)
            listener.settimeout(ANSWER_SECONDS)
            end, _ = listener.accept()
            end.settimeout(ANSWER_SECONDS)

            def said(word):
                program.write(f"{word}\n")
                return program.line(ANSWER_SECONDS)

            def asked(act):
                program.write("ask\n")
                end.sendall(end.recv(1))
                require(program.line(ANSWER_SECONDS) == "b'?'", f"no answer\n{program.tail()}")
                try:
                    return act()
                except BlockingIOError:
                    return None

            guest = until(lambda: asked(service.accept), "it to come to the service")[0]
            guest.setblocking(False)
            guest.send(message(GREETING))
            data, [held], *_ = until(lambda: asked(lambda: socket.recv_fds(guest, 1000, 1)), "it to show its connection")
            require(framed(data, NODE)[0] == COME, f"{data}")
            require(said("close") == "None", "no close")
            end.sendall(b"!")
            # (It is there, for the one that the service holds.)
            with socket.socket(fileno=held) as copy:
                copy.setblocking(True)
                require(copy.recv(1, socket.MSG_PEEK) == b"!", "nothing came")
                require((told := said("look")) == "[]", f"a set tells of what is closed: {told}")
            for each in guest, end, listener:
                each.close()
        os.unlink(place)
        note("a service that is slow to let go", "kernel")
