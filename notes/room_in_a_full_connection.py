"""A full connection whose receiver reads nothing can take bytes again a little later (40 to 250 ms; half a second and more on a machine with much to do,
where the probe timer, which follows the time of round trips, is longer, and runs a second time at twice that).

The last acknowledgements may be delayed, and a segment that is larger than what is left of the window is held back until the
probe timer sends a part of it; each frees room in the send buffer. So one EAGAIN does not say that a connection stays full.
"""

import socket
import time

listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
near.setblocking(False)


def fill():
    sent = 0
    for chunk in (b"x" * 16384, b"x"):
        try:
            while True:
                sent += near.send(chunk)
        except BlockingIOError:
            pass
    return sent


start = time.monotonic()
print(f"filled with {fill()} bytes")
for _ in range(50):
    time.sleep(0.02)
    if more := fill():
        print(f"{more} bytes more after {time.monotonic() - start:.2f} s")
assert fill() == 0, "half a second and more later it is full for good"
