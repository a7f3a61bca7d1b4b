"""Each reason, provoked in a real pair of programs and read as `ringlet ss` prints it.

ringlet-preload/tests/documents.rs sees to it that every code has a scene here, or a place in `ELSEWHERE`.
"""

import os
import sys

from harness import START_SECONDS, Failed, Skipped, free_port, require, wait_until

# What other stages provoke, and look at by its code: users, namespaces, filters, liars and lost packets are theirs.
ELSEWHERE = {
    "not-owner": "tests/hostile/rendezvous.py",
    "other-user": "tests/hostile/pods.py",
    "name-taken": "tests/hostile/rendezvous.py",
    "forbidden": "tests/hostile/limits.py",
    "old-kernel": "tests/hostile/limits.py",
    "bad-peer": "tests/hostile/rendezvous.py",
    "other-version": "tests/hostile/rendezvous.py",
    "miscounted": "tests/faults/counts.py",
    "full": "tests/hostile/rendezvous.py",
    "unproven": "tests/hostile/limits.py",
    "no-mirror": "tests/node/strangers.py",
    "no-note": "tests/node/strangers.py",
    "refused": "tests/node/strangers.py",
    "node-full": "tests/node/strangers.py",
    "lease": "tests/node/lease.py",
    "carried": "tests/node/carried.py",
    "no-fabric": "tests/node/cluster.py",
}

# The start of both programs. `turn` is a message there and back.
COMMON = """
import ctypes, fcntl, mmap, os, resource, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
family, place, action = sys.argv[1:]
tcp = family == "tcp"
kind = socket.SOCK_SEQPACKET if family == "packets" else socket.SOCK_STREAM
address = ("127.0.0.1", int(place)) if tcp else place

def child(does):
    if os.fork() == 0:
        does()
        while True:
            signal.pause()
"""
# An echo, until it is told to look at nothing any more.
SERVER = """
listener = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX, kind)
listener.bind(address)
listener.listen()
print("ready", flush=True)
end = listener.accept()[0]
try:
    while (data := end.recv(1 << 20)) not in (b"", b"stop"):
        end.send(data)
except ConnectionResetError:
    pass
while True:
    signal.pause()
"""
# Acts where it is told to: before it connects, before the first message, or when the connection has moved.
CLIENT = """
end = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX, kind)
connect = lambda: end.connect(address)
def turn():
    end.send(b"x")
    end.recv(1)
def silent():
    global turn
    turn = lambda: None
WHEN, WHAT = action.split(":", 1)
def act(when):
    if when == WHEN:
        exec(WHAT, globals())
act("first")
connect()
act("fresh")
for line in sys.stdin:
    if line == "act\\n":
        act("moved")
    else:
        turn()
    print("done", flush=True)
"""


class Scene:
    def __init__(self, action, family="tcp", env=None, wrapped=True, root=False, off=False):
        """`action`: what the client does, and when; `off`: `ringlet off` is said to it."""
        self.action, self.family, self.env, self.wrapped, self.root, self.off = action, family, env, wrapped, root, off


# A system call that libc's functions know nothing of.
AROUND_LIBC = """moved:
CODE = bytes.fromhex("4889f84889f74889d64889ca4d89c24d89c80f05c3")
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(CODE)
call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 5)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
"""
EPOLL_CREATE1 = 291
WATCHED = """
end.setblocking(False)
def turn():
    end.send(b"x")
    while True:
        try:
            return end.recv(1)
        except BlockingIOError:
            time.sleep(0.001)
"""
# By a set that is a parent's too, who lives.
ONE_SHOT = """first:
poll, mask = select.epoll(), select.EPOLLIN | select.EPOLLONESHOT
forked = os.fork()
if forked:
    end.close()
    os.waitpid(forked, 0)
    os._exit(0)
def connect():
    end.connect(address)
    end.setblocking(False)
    poll.register(end, mask)
def turn():
    poll.modify(end, mask)
    end.send(b"x")
    poll.poll()
    poll.modify(end, mask)
    end.recv(1)
"""
DISSOLVE = "moved:silent(); libc.connect(end.fileno(), struct.pack('16x'), 16)"
PAIR = "first:\none, other = socket.socketpair()\nconnect = silent"
SELF = "first:end.bind(('127.0.0.1', 0)); address = end.getsockname()"
PASS = "moved:near, far = socket.socketpair(); socket.send_fds(near, [b'x'], [end.fileno()])"
PIPE = "moved:read, write = os.pipe(); os.write(write, b'x'); os.splice(read, end.fileno(), 1); end.recv(1)"
ATTACHED = "moved:silent(); socket.send_fds(end, [b'x'], [0])"
STALL = "moved:silent(); end.send(b'stop'); threading.Thread(target=end.sendall, args=[bytes(1 << 25)], daemon=True).start()"
NO_DESCRIPTORS = "fresh:resource.setrlimit(resource.RLIMIT_NOFILE, (end.fileno() + 1,) * 2)"
CHANGE_USER = "moved:child(lambda: os.setresuid(65534, 65534, 65534))"
THREAD_APART = "moved:threading.Thread(target=lambda: (libc.unshare(0x400), signal.pause()), daemon=True).start()"
# With a thread beside, without which nothing would be told of the process any more. The filter allows all.
CLOSED_IN = (
    "moved:threading.Thread(target=signal.pause, daemon=True).start(); libc.prctl(38, 1, 0, 0, 0); "
    "rule = struct.pack('HBBI', 6, 0, 0, 0x7fff0000); "
    "libc.prctl(22, 2, struct.pack('HxxxxxxP', 1, ctypes.cast(rule, ctypes.c_void_p).value), 0, 0)"
)
SCENES = {
    "-": Scene(":"),
    "young": Scene(":", env={"RINGLET_MOVE_AFTER": "1000000"}),
    "not-connected": Scene(DISSOLVE),
    "not-local": Scene(SELF),
    "no-peer": Scene(":", wrapped=False),
    "off": Scene(":", env={"RINGLET_EXCEPT": "127.0.0.1:*"}),
    "no-adapter": Scene(":", env={"RINGLET_ADAPTER": "1"}),
    "no-descriptor": Scene(NO_DESCRIPTORS),
    "no-memory": Scene(":", env={"RINGLET_MEMORY_LIMIT_BYTES": "1000000"}),
    "shared": Scene("fresh:child(lambda: None)"),
    "exec": Scene("moved:os.set_inheritable(end.fileno(), True); os.posix_spawnp('sleep', ['sleep', '1000'], os.environ)"),
    "passed": Scene(PASS),
    "stdio": Scene("moved:libc.fdopen(end.fileno(), b'r+')"),
    "io-uring": Scene("moved:libc.syscall(425, 0, None)"),
    "own-epoll": Scene(AROUND_LIBC.replace("moved", "fresh") + f"call({EPOLL_CREATE1}, 0, 0, 0, 0)" + WATCHED),
    "one-shot": Scene(ONE_SHOT),
    "around": Scene("moved:libc.dlmopen(ctypes.c_long(-1), b'libc.so.6', 2)"),
    "urgent": Scene("moved:end.send(b'!', socket.MSG_OOB)"),
    "option": Scene("moved:end.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)"),
    "splice": Scene(PIPE, family="packets"),
    "closing": Scene("fresh:silent(); end.shutdown(socket.SHUT_WR)", family="unix"),
    "asked": Scene("moved:libc.fdopen(end.fileno(), b'r+')"),
    "pair": Scene(PAIR, family="unix"),
    "ancillary": Scene(ATTACHED, family="unix"),
    "large": Scene("moved:silent(); end.send(bytes(100_000))", family="packets", env={"RINGLET_RING_BYTES": "65536"}),
    "stalled": Scene(STALL),
    "unforgiving": Scene(":", env={"RINGLET_UNFORGIVING": "1"}),
    "paused": Scene(":", off=True),
    "credentials": Scene(CHANGE_USER, root=True),
    "own-files": Scene(THREAD_APART),
    "sandbox": Scene(CLOSED_IN),
    "sigio": Scene("moved:fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)"),
}


def scenes(ground):
    for code, scene in SCENES.items():
        with ground.scene(f"the reason {code}"):
            play(ground, code, scene)


def play(ground, code, scene):
    if scene.root and os.geteuid() != 0:
        raise Skipped("only root can change its user")
    if code == "own-epoll" and os.uname().machine != "x86_64":
        raise Skipped("its system call is x86-64's")
    place = free_port() if scene.family == "tcp" else os.path.join(ground.directory, f"{code}.socket")
    words = [scene.family, place, scene.action]
    server = ground.start("server" if scene.wrapped else "unwrapped", [sys.executable, "-c", COMMON + SERVER, *words], env=scene.env)
    require(server.line(START_SECONDS) == "ready", f"no server\n{server.tail()}")
    client = ground.start("client", [sys.executable, "-c", COMMON + CLIENT, *words], env=scene.env)

    def do(line):
        client.write(line + "\n")
        require(client.line(START_SECONDS) == "done", f"the client did not answer\n{client.tail()}\n{client.where()}")

    def rows():
        """Of whoever has an end: the client, its children, the server."""
        return ground.json("ss", "--all")["connections"]

    def moved():
        do("turn")
        return any(row["path"] == "ring" for row in rows())

    if scene.action.startswith("moved") or scene.off or code == "-":
        wait_until(moved, START_SECONDS, "the connection to move")
        do("act")
    if scene.off:
        ground.command("off", client.pid)

    def told():
        do("turn")
        found = rows()
        if code == "credentials" and any(row["path"] == "ring" for row in found):
            return []  # whoever shares the end has yet to tell the same
        return [row for row in found if (row["reason"] or "-") == code]

    try:
        row = wait_until(told, START_SECONDS, f"the reason {code}")[0]
    except Failed as problem:
        raise Failed(f"{problem}; what is told: {rows()}") from None
    require((row["path"] == "ring") == (code == "-") and (code == "-" or row["explanation"]), f"{row}")
