"""An edge-triggered epoll set may report the end of a stream once or twice.

A FIN wakes the waiters for the change of state and again for the data queue. A waiter that collects the first event between
the two sees a second one; one that comes later sees one. Nothing may depend on the number.
"""

import collections
import select
import socket
import threading
import time

listener = socket.create_server(("127.0.0.1", 0))
seen = collections.Counter()
for _ in range(2000):
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    edges = select.epoll()
    edges.register(far, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
    closer = threading.Thread(target=near.shutdown, args=(socket.SHUT_WR,))
    closer.start()
    events = len(edges.poll(1.0))
    until = time.monotonic() + 0.0005
    while time.monotonic() < until:
        events += len(edges.poll(0))
    seen[events] += 1
    closer.join()
    for thing in (edges, near, far):
        thing.close()
print("ends by number of reports:", dict(seen))
assert set(seen) <= {1, 2}
