"""What one end of a Unix connection sees of the other end's close and shutdown, at once and in which order.

A close with bytes unread leaves ECONNRESET, which one call takes: a receive, after all bytes; or SO_ERROR; of sends only one with packets. Sends
fail with EPIPE from then on. shutdown(RD) makes the other end's sends fail, which no event of poll tells. Before accept() the
other end has no number in the socket table.
"""

import errno
import os
import select
import socket
import struct

SHOW_PEER = 4
ATTRIBUTE_PEER = 2


def said(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]


def mask(end):
    poll = select.poll()
    poll.register(end, select.POLLIN | select.POLLOUT | select.POLLRDHUP)
    return poll.poll(0)[0][1]


def peer(end):
    """The other end's inode, by sock_diag."""
    body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, os.fstat(end.fileno()).st_ino, SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as table:
        table.send(struct.pack("=IHHII", 16 + len(body), 20, 1, 1, 0) + body)
        answer = table.recv(4096)
    at = 32
    while at < len(answer):
        length, kind = struct.unpack_from("=HH", answer, at)
        if kind == ATTRIBUTE_PEER:
            return struct.unpack_from("=I", answer, at + 4)[0]
        at += (length + 3) & ~3
    return 0


HUP = select.POLLIN | select.POLLOUT | select.POLLHUP | select.POLLRDHUP
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    near.send(b"unread")
    far.send(b"farewell")
    far.close()
    assert mask(near) == HUP | select.POLLERR
    sent = said(near.send, b"x")
    received = [said(near.recv, 10) for _ in range(3)]
    print(kind.name, "after a close with bytes unread: send", sent, "receives", received)
    if kind == socket.SOCK_STREAM:
        assert (sent, received) == ("EPIPE", [b"farewell", "ECONNRESET", b""])
    else:
        assert (sent, received) == ("ECONNRESET", [b"farewell", b"", b""])
    assert said(near.send, b"x") == "EPIPE"
    near.close()

near, far = socket.socketpair()
near.send(b"in time")
far.shutdown(socket.SHUT_RD)
assert mask(near) == select.POLLOUT and said(near.send, b"x") == "EPIPE"
assert far.recv(10) == b"in time" and far.recv(10) == b""
near.close()
far.close()

listener = socket.socket(socket.AF_UNIX)
listener.bind("")
listener.listen()
near = socket.socket(socket.AF_UNIX)
near.connect(listener.getsockname())
assert peer(near) == 0
far, _ = listener.accept()
assert peer(near) == os.fstat(far.fileno()).st_ino and peer(far) == os.fstat(near.fileno()).st_ino
far.close()
assert peer(near) == 0
print("the other end has a number from accept to close")
