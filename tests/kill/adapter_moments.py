"""Kills the adapter of a connection at one moment after another, each of which once lost a byte or the connection.

    python3 tests/kill/adapter_moments.py [--ringlet COMMAND] [MOMENT...]

Both ends run in one program, under ringlet, which kills the adapter itself: `adapter_moments.py --ends MOMENT`.
"""

import argparse
import contextlib
import fcntl
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import has_failed  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAMILIES = {"tcp": socket.AF_INET, "unix": socket.AF_UNIX}
END_SECONDS = 60  # which only a fault meets
HANG_SECONDS = 0.3
DATA = bytes((place * 7 + (place >> 8) * 13) & 255 for place in range(50_000))
FIRST, TAKEN = 20_000, 500  # bytes of the first send, and how many of it are taken


class End:
    def __init__(self, connection, accepted, told, tells, adapter):
        self.connection, self.accepted, self._told, self._tells, self._adapter = connection, accepted, told, tells, adapter

    def tell(self):
        os.write(self._tells, b"x")

    def wait(self):
        assert os.read(self._told, 1), "the other end is gone"

    def kill_adapter(self):
        ended = os.pidfd_open(self._adapter)
        os.kill(self._adapter, signal.SIGKILL)
        assert select.select([ended], [], [], END_SECONDS)[0]
        os.close(ended)

    def stop_adapter(self):
        os.kill(self._adapter, signal.SIGSTOP)

    def hang_adapter(self):
        """Until it is killed, a little later."""
        os.kill(self._adapter, signal.SIGSTOP)
        threading.Thread(target=lambda: (time.sleep(HANG_SECONDS), self.kill_adapter())).start()

    def expect(self, start, end):
        while start < end:
            data = self.connection.recv(end - start)
            assert data and data == DATA[start : start + len(data)], f"{len(data)} bytes at {start}: {data[:8]}"
            start += len(data)

    def ping(self, rounds=60):
        for _ in range(rounds):
            for step in (0, 1):
                if step == self.accepted:
                    self.connection.sendall(DATA[:100])
                else:
                    self.expect(0, 100)


def run_child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


# The moments: each is given both ends, one in each of two processes, once they use the ring.


def a_copy_was_closed(end):
    """A process that shared the end has closed it."""
    if end.accepted:
        run_child(end.connection.close)
        end.kill_adapter()
        end.tell()
    else:
        end.wait()
    end.ping()


def the_parent_has_closed(end):
    if not end.accepted:
        end.wait()
        return end.ping()
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(told, 1)
        end.kill_adapter()
        end.tell()
        end.ping()
        os._exit(0)
    end.connection.close()
    os.write(tells, b"x")
    assert os.waitpid(pid, 0)[1] == 0


def _is_sent_in_two(end):
    """By the end that connected; the other one has taken a part of the first. True there."""
    if end.accepted:
        end.wait()
        end.expect(0, TAKEN)
        return True
    end.connection.sendall(DATA[:FIRST])
    end.tell()
    end.wait()
    end.connection.sendall(DATA[FIRST:])
    end.connection.close()
    return False


def a_program_has_inherited(end):
    """Its peer has not yet sent again what was left unread for that."""
    if _is_sent_in_two(end):
        cat = subprocess.Popen(["cat"], stdin=end.connection, stdout=subprocess.PIPE)
        end.connection.close()
        end.kill_adapter()
        end.tell()
        assert cat.communicate()[0] == DATA[TAKEN:]


def it_was_passed_on(end):
    if _is_sent_in_two(end):
        here, there = socket.socketpair()
        socket.send_fds(here, [b"x"], [end.connection.fileno()])
        end.kill_adapter()
        end.connection = socket.socket(fileno=socket.recv_fds(there, 1, 1)[1][0])
        end.tell()
        end.expect(TAKEN, len(DATA))
        assert not end.connection.recv(1)


def one_left_and_reads_on(end):
    """An end that is told of data by a signal leaves the ring."""
    if end.accepted:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(end.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end.connection, fcntl.F_SETFL, os.O_ASYNC)
        end.kill_adapter()
        end.tell()
        end.expect(0, len(DATA))
    else:
        end.wait()
        end.connection.sendall(DATA)
    end.ping()


def one_shuts_down(end):
    if end.accepted:
        end.hang_adapter()
        end.connection.sendall(DATA)
        end.connection.shutdown(socket.SHUT_WR)
        end.tell()
    else:
        end.wait()
        end.expect(0, len(DATA))
        assert not end.connection.recv(1)


def it_stands_still(end):
    """And does not go on: an end that gets no answer severs itself, and what was not delivered comes by the kernel, with the orderly end behind it. Where it
    may yet put a doorbell on a Unix connection, that is reset: nothing is missing before an orderly end."""
    if end.accepted:
        end.wait()
        end.stop_adapter()
        end.connection.sendall(DATA)
        end.tell()
        with contextlib.suppress(OSError):
            end.connection.shutdown(socket.SHUT_WR)
        end.wait()
    else:
        end.tell()
        end.wait()
        with contextlib.suppress(*[ConnectionResetError] * (end.connection.family == socket.AF_UNIX)):
            end.expect(0, len(DATA))
            assert not end.connection.recv(1)
        end.tell()


def its_numbers_were_wanted(end):
    """The program has taken the numbers of all sockets of ringlet's."""
    null = os.open("/dev/null", os.O_RDWR)
    ours = {end.connection.fileno(), null}
    for number in (number for number in map(int, os.listdir("/proc/self/fd")) if number > max(ours)):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:
            continue
        if is_socket:
            os.dup2(null, number)
    if end.accepted:
        end.kill_adapter()
        end.tell()
    else:
        end.wait()
    end.ping()


MOMENTS = {
    moment.__name__: moment
    for moment in (
        a_copy_was_closed,
        the_parent_has_closed,
        a_program_has_inherited,
        it_was_passed_on,
        one_left_and_reads_on,
        one_shuts_down,
        it_stands_still,
        its_numbers_were_wanted,
    )
}


def ends(moment, adapter, family):
    signal.alarm(END_SECONDS)
    left, right, listener = os.pipe(), os.pipe(), socket.socket(family)
    listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else b"")
    listener.listen()
    connecting = os.fork()
    if connecting == 0:
        signal.alarm(END_SECONDS)
        connection = socket.socket(family)
        connection.connect(listener.getsockname())
        end = End(connection, False, left[0], right[1], adapter)
    else:
        end = End(listener.accept()[0], True, right[0], left[1], adapter)
    for unused in (left[0 if end.accepted else 1], right[1 if end.accepted else 0]):
        os.close(unused)
    end.ping()
    MOMENTS[moment](end)
    if connecting:
        assert os.waitpid(connecting, 0)[1] == 0, "the other end failed"


def run(ringlet, moment, number, family):
    """Why it failed, if it did."""
    argv = [ringlet, "adapter", "--number", str(number)]
    adapter = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert adapter.stdout.readline() == b"ready\n"
        with tempfile.NamedTemporaryFile() as moves:
            argv = [ringlet, "run", "--moves", moves.name, "--", sys.executable, __file__, "--ends", moment, str(adapter.pid), family]
            env = os.environ | {"RINGLET_ADAPTER": str(number), "RINGLET_MOVE_AFTER": "4"}
            done = subprocess.run(argv, env=env, capture_output=True, text=True)
            moved = moves.read().count(b"mirrored\n")
    finally:
        adapter.kill()
        adapter.wait()
    if done.returncode:
        return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return None if moved == 2 else f"{moved} ends used the ring over an adapter"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moments", nargs="*", metavar="MOMENT", help=", ".join(MOMENTS))
    parser.add_argument("--family", choices=FAMILIES, default="tcp", help="of the connections (default: tcp)")
    parser.add_argument("--ringlet", default=ROOT / "target/release/ringlet", help="the command to test")
    arguments = parser.parse_args()
    failed = False
    for place, moment in enumerate(arguments.moments or MOMENTS):

        def play(place=place, moment=moment):
            wrong = run(arguments.ringlet, moment, os.getpid() << 32 | place + 1, arguments.family)
            print(f"FAILED  {moment}: {wrong}" if wrong else f"passed  {moment}", flush=True)
            return wrong is not None

        failed |= has_failed(f"{arguments.family} {moment}", play)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ends"]:
        ends(sys.argv[2], int(sys.argv[3]), FAMILIES[sys.argv[4]])
    else:
        main()
