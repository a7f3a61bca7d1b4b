"""SIOCOUTQ on a connected Unix socket is 0 exactly when the other end has taken all that was sent.

It counts memory, not bytes, until a buffer is taken as a whole; a peek takes nothing. FIONREAD at the other end counts bytes. Hence a sender
that sees 0 knows that nothing of its own is under way. For sequenced packets the same holds, a byte of a truncated message included.
"""

import fcntl
import socket
import struct
import termios

SIOCOUTQ = 0x5411


def count(end, request):
    return struct.unpack("i", fcntl.ioctl(end, request, bytes(4)))[0]


for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    assert count(near, SIOCOUTQ) == 0
    near.send(b"x" * 10)
    near.send(b"y" * 5)
    both = count(near, SIOCOUTQ)
    assert both > 15 == count(far, termios.FIONREAD)
    far.recv(10, socket.MSG_PEEK)
    assert count(near, SIOCOUTQ) == both
    far.recv(10)
    one = count(near, SIOCOUTQ)
    assert 0 < one < both
    far.recv(3)
    rest = count(near, SIOCOUTQ)
    # What a short receive leaves of a message is lost with packets, and waits in a stream.
    assert (rest == 0) == (kind == socket.SOCK_SEQPACKET)
    if rest:
        assert far.recv(10) == b"yy"
    assert count(near, SIOCOUTQ) == 0
    print(kind.name, "untaken after each receive:", both, one, rest, 0)
    near.close()
    far.close()
