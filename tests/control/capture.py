"""`ringlet capture`: every byte of known conversations, in packets that two independent readers find sound."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import termios
import time

from control import End
from ends import MESSAGE_BYTES, message
from harness import CLIENT_SECONDS, START_SECONDS, free_port, listening, needs, require, status_word, wait_until
from pcapng import Capture, streams
from wire import Wire

TRIPS = 500
PACKET_MOST_BYTES = 1000  # of one message, with all that is said of it


def scenes(ground):
    for host in ("127.0.0.1", "::1"):
        for name, target in {
            "the client": lambda server, client: [client.pid],
            "the server": lambda server, client: [server.pid],
            "the connection": lambda server, client: [client.name],
            "both": lambda server, client: [server.pid, client.pid],
        }.items():
            with ground.scene(f"every byte over {host}, captured at {name}"):
                every_byte(ground, host, target)
    with ground.scene("a Unix socket, with what else can be done to it"):
        unix(ground)
    with ground.scene("datagrams"):
        datagrams(ground)
    with ground.scene("another reader"):
        another_reader(ground)
    with ground.scene("only the beginning of each piece"):
        snaplen(ground)
    with ground.scene("so many packets, to standard output"):
        count_and_pipe(ground)
    with ground.scene("to one who does not read"):
        unread(ground)
    with ground.scene("more than the memory holds"):
        flood(ground)
    with ground.scene("while it goes to the kernel and back"):
        moved(ground)
    with ground.scene("connections and children that come later"):
        later(ground)
    with ground.scene("nothing is left behind"):
        nothing_left(ground)
    with ground.scene("the captured program dies"):
        dies(ground)
    with ground.scene("one at a time"):
        one_at_a_time(ground)


class Recording:
    def __init__(self, ground, *words):
        self.path = pathlib.Path(ground.directory, f"{os.urandom(4).hex()}.pcapng")
        argv = [ground.ringlet.command, "capture", "-w", self.path, *map(str, words)]
        self._popen = subprocess.Popen(argv, stderr=subprocess.PIPE)
        self._ground, self.pid = ground, self._popen.pid
        said = self._popen.stderr.readline()
        require(said.startswith(b"Recording"), f"it does not begin: {said}")
        self.pid = self._popen.pid

    def finish(self, number=signal.SIGINT, status=0, said=False):
        """What it has recorded; and what it said, if that is asked."""
        if number:
            self._popen.send_signal(number)
        _, text = self._popen.communicate(timeout=CLIENT_SECONDS)
        require(self._popen.returncode == status, f"{status_word(self._popen.returncode)}: {text}")
        capture = Capture(self.path.read_bytes())
        return (capture, text.decode()) if said else capture

    def kill(self):
        self._popen.kill()
        self._popen.wait()
        self._popen.stderr.close()


@contextlib.contextmanager
def recording(ground, *words):
    """Ends with its block, whatever happens there."""
    running = Recording(ground, *words)
    try:
        yield running
    finally:
        running.kill()


def conversation(first, last):
    numbers = range(first, last + 1)
    return tuple(b"".join(message(kind, number) for number in numbers) for kind in (b"Q", b"R"))


def begin(client):
    """A call that began before the recording may end unrecorded; after a round trip there is none."""
    return client.do("send 1") + 1


def is_said(capture, ends, first, last):
    """Are the messages of these numbers all there, perhaps after the one with which the recording began?"""
    found, expected = streams(capture.packets), conversation(first, last)
    return set(found) == {ends, ends[::-1]} and all(
        missing == 0 and stream.endswith(said) and len(stream) <= len(said) + MESSAGE_BYTES
        for (stream, missing), said in zip((found[ends], found[ends[::-1]]), expected)
    )


def told(capture, ends, first, last):
    """What a capture has, for the report of one that lacks something: of each stream where it begins and ends, and bytes lost."""
    found = streams(capture.packets)
    parts = [f"{stream[:10]} to {stream[-MESSAGE_BYTES:][:10]}, {len(stream)} bytes, {missing} missing" for stream, missing in found.values()]
    return f"{first} to {last} were; {'; '.join(parts)}; at {list(found)}, which is {ends}"


def every_byte(ground, host, target):
    server, client = ground.pair(host=host)
    began = time.time_ns()
    with recording(ground, *target(server, client)) as running:
        first = begin(client)
        last = client.do(f"send {TRIPS}")
        capture = running.finish()
    ended = time.time_ns()
    ends = (host, client.port), (host, client.server_port)
    require(is_said(capture, ends, first, last), f"not what was said: {told(capture, ends, first, last)}")
    # At the time at which it was said, in order, and with acknowledgements of what had come by then.
    times = [packet.time_ns for packet in capture.packets]
    require(began <= times[0] and times == sorted(times) and times[-1] <= ended, "the times are wrong")
    come = {packet.source: 1 for packet in capture.packets}
    for packet in capture.packets:
        require(packet.ack == come[packet.destination], f"an acknowledgement of {packet.ack}: {come}")
        come[packet.source] = packet.sequence + packet.length
    whose = {packet.source for packet in capture.packets if not packet.inbound}
    require(len(whose) == 1 and len(capture.interfaces) == 1, f"sent by {whose} on {capture.interfaces}")
    [own] = whose
    expected = client if own == ends[0] else server
    require(capture.interfaces[0].endswith(f"/{expected.pid}"), f"{own} is {capture.interfaces}")
    require(f"/{expected.pid} descriptor" in capture.packets[0].comments[0], f"{capture.packets[0].comments}")
    require(capture.dropped == {0: 0} and capture.received == {0: len(times)}, f"{capture.dropped} {capture.received}")


def unix(ground):
    path = os.path.join(ground.directory, "socket")
    server = End(ground, "server", 0, "recv", host=path)
    wait_until(lambda: os.path.exists(path), START_SECONDS, "a server to listen")
    client = End(ground, "client", 0, role="client", host=path)
    client.line()

    def is_on(wanted):
        client.do("send 3")
        [found] = [each for each in ground.json("explain", client.pid)["sockets"] if each["path"]]
        require([each["pid"] for each in found["peer_holders"]] == [server.pid], f"{found}")
        return found["path"] == wanted

    wait_until(lambda: is_on("ring"), START_SECONDS, "the connection to be in shared memory")
    with recording(ground, client.pid) as running:
        first = begin(client)
        last = client.do(f"send {TRIPS}")
        capture = running.finish()
    [ends, _] = {packet.source + packet.destination: None for packet in capture.packets}
    require(is_said(capture, (ends[:2], ends[2:]), first, last), "not what was said")
    for word, where in (("off", "kernel"), ("on", "ring")):
        ground.command(word, client.pid)
        wait_until(lambda where=where: is_on(where), START_SECONDS, f"the connection to be on the {where}")


def datagrams(ground):
    """Each is in the capture or went over the wire, whole, and with its addresses."""
    port = free_port()
    server = End(ground, "datagrams", port)
    server.line()
    client = End(ground, "client", port, "udp", role="client")
    client.port = int(client.line())
    client.do("run")
    wait_until(lambda: "ring" in {row["path"] for row in ground.ringlet.connections(port)}, START_SECONDS, "lanes")
    client.do("stop")
    ends = ("127.0.0.1", client.port), ("127.0.0.1", port)

    def stretch(whose):
        """Whether both directions were captured: on a busy machine all of a stretch may go through the kernel."""
        with Wire() as wire, recording(ground, whose.pid) as running:
            first = begin(client)
            last = client.do(f"send {TRIPS}")
            capture = running.finish()
        seen = 0
        for kind, way in ((b"Q", ends), (b"R", ends[::-1])):
            packets = [packet for packet in capture.packets if (packet.source, packet.destination) == way]
            numbers = [int(packet.payload[1:10]) for packet in packets]
            require([packet.payload for packet in packets] == [message(kind, number) for number in numbers], "not what was said")
            require({packet.inbound for packet in packets} <= {(whose is server) == (kind == b"Q")}, "not its directions")
            captured, carried = set(numbers), set(wire.numbers(kind, client.port))
            require(not captured & carried, f"{len(captured)} datagrams of {kind}, of which the kernel had {captured & carried}")
            seen += bool(captured)
            missing = set(range(first, last + 1)) - captured - carried
            require(not missing and len(numbers) == len(captured), f"{len(missing)} of {TRIPS} are missing")
        require(all(packet.sequence is None for packet in capture.packets), "they are no datagrams")
        # (Of one that has recorded nothing yet there are no counts.)
        require(capture.dropped == ({0: 0} if capture.packets else {}), f"{capture.dropped}")
        return seen == 2

    for whose in (server, client):
        wait_until(lambda whose=whose: stretch(whose), START_SECONDS, "datagrams to be captured in both directions")
        wait_until(lambda whose=whose: not (client.do("send 1") and has_memory(whose.pid)), START_SECONDS, "the memory to be given back")

    def beginnings():
        with recording(ground, "--snaplen", 16, client.pid) as running:
            client.do(f"send {TRIPS}")
            return running.finish().packets

    packets = wait_until(beginnings, START_SECONDS, "datagrams to be captured")
    require({(len(packet.payload), packet.length) for packet in packets} == {(16, 64)}, "not the beginnings")


def another_reader(ground):
    needs("tshark")
    server, client = ground.pair()
    first = client.do("now") + 1
    with recording(ground, client.pid) as running:
        last = client.do(f"send {TRIPS}")
        running.finish()

    def tshark(*words):
        done = subprocess.run(["tshark", "-r", running.path, *words], capture_output=True, timeout=CLIENT_SECONDS)
        require(done.returncode == 0, f"tshark {words}: {done.stderr.decode()}")
        return done.stdout.decode()

    checks = ["-o", "ip.check_checksum:TRUE", "-o", "tcp.check_checksum:TRUE"]
    require(len(tshark().splitlines()) == 2 * TRIPS, "it sees another number of packets")
    wrong = "tcp.analysis.lost_segment or tcp.analysis.retransmission or tcp.analysis.ack_lost_segment"
    bad = "tcp.checksum.status != 1 or ip.checksum.status != 1 or _ws.malformed or _ws.expert.severity >= 6291456"
    require((found := tshark(*checks, "-Y", f"{wrong} or {bad}")) == "", f"it does not like\n{found[:500]}")
    followed = tshark("-q", "-z", "follow,tcp,raw,0").splitlines()
    lines = [line for line in followed if set(line.strip()) <= set("0123456789abcdef") and line.strip()]
    said = {b"Q": b"", b"R": b""}
    for line in lines:
        piece = bytes.fromhex(line.strip())
        said[piece[:1]] += piece
    require((said[b"Q"], said[b"R"]) == conversation(first, last), "it puts together something else")
    about = subprocess.run(["capinfos", "-M", running.path], capture_output=True, timeout=CLIENT_SECONDS)
    require(about.returncode == 0 and b"nanoseconds" in about.stdout, f"capinfos: {about}")


def snaplen(ground):
    server, client = ground.pair()
    first = client.do("now") + 1
    with recording(ground, "--snaplen", 16, client.pid) as running:
        client.do("send 20")
        capture = running.finish()
    expected = [message(kind, first + trip)[:16] for trip in range(20) for kind in (b"Q", b"R")]
    require([packet.payload for packet in capture.packets] == expected, "not the beginnings")
    require({packet.length for packet in capture.packets} == {64}, "not the lengths")


def count_and_pipe(ground):
    server, client = ground.pair()
    client.do("run")
    argv = [ground.ringlet.command, "capture", "-w", "-", "--packets", "100", str(client.pid)]
    done = subprocess.run(argv, capture_output=True, timeout=CLIENT_SECONDS)
    require(done.returncode == 0, f"{done.stderr}")
    require(len(Capture(done.stdout).packets) == 100, "not so many")
    # A reader that has had enough.
    argv[-2:-1] = []
    with subprocess.Popen(argv[:4] + [str(client.pid)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        running.stdout.read(10_000)
        running.stdout.close()
        require(running.wait(CLIENT_SECONDS) == 0, "it does not end with its reader")
    argv = [ground.ringlet.command, "capture", "-w", "/dev/null", "--seconds", "0.3", str(client.pid)]
    require(subprocess.run(argv, capture_output=True, timeout=CLIENT_SECONDS).returncode == 0, "so many seconds")
    client.do("stop")


def unread(ground):
    """A capture that can't write what it has still gives signs of life, without which its programs would soon record no more."""
    server, client = ground.pair()
    path = pathlib.Path(ground.directory, f"{os.urandom(4).hex()}.fifo")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    running = subprocess.Popen([ground.ringlet.command, "capture", "-w", path, str(client.pid)], stderr=subprocess.PIPE)
    try:
        require(running.stderr.readline().startswith(b"Recording"), "it does not begin")

        def writes():
            call = pathlib.Path(f"/proc/{running.pid}/syscall").read_text().split()[0]
            return call == {"x86_64": "1", "aarch64": "64"}[os.uname().machine]

        def waits():
            client.do("send 1000")
            return fcntl.ioctl(reader, termios.FIONREAD, b"1234") != bytes(4) and writes() and writes()

        wait_until(waits, CLIENT_SECONDS, "the FIFO to be full")
        first = signs_of_life(client.pid)
        wait_until(lambda: signs_of_life(client.pid) - first >= 3, START_SECONDS, "signs of life from a capture that writes")
        require(writes(), "the capture does not wait any more")
    finally:
        running.kill()
        running.wait()
        running.stderr.close()
        os.close(reader)


def signs_of_life(pid):
    """`tap_beat` in the page of a process (ringlet-core/src/view.rs)."""
    for place in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(place).startswith("/memfd:ringlet-process"):
            with place.open("rb") as page:
                return struct.unpack_from("I", page.read(128), 40)[0]
    raise AssertionError(f"{pid} shows no page")


def flood(ground):
    """Nobody waits for the capture; what it drops is counted, and everything else stands where it belongs."""
    port, count = free_port(), 100_000_000
    sink = End(ground, "sink", port, "0")
    wait_until(lambda: listening(port), START_SECONDS, "the sink to listen")
    with recording(ground, sink.pid) as running:
        source = End(ground, "source", port, count, 7, role="client")
        sums = {source.line(), sink.line()}
        [history] = [each["history"] for each in ground.json("explain", sink.pid)["sockets"] if each["history"]]
        capture = running.finish()
    require(len(sums) == 1, f"the checksums differ: {sums}")
    [dropped] = capture.dropped.values()
    # What came before the move need not be in it; what was dropped at the end leaves no gap.
    [(stream, missing)] = [found for ends, found in streams(capture.packets).items() if ends[1][1] == port]
    require(len(stream) + missing <= count and (missing == 0 or dropped > 0), f"{missing} missing, {dropped} dropped")
    by_ring = history["ring_received_bytes"]
    require(dropped > 0 or len(stream) >= by_ring, f"only {len(stream)} bytes of {by_ring}, and none dropped")


def moved(ground):
    server, client = ground.pair()
    first = client.do("now") + 1
    with recording(ground, client.pid) as running:
        for _ in range(3):
            for word in ("off", "on"):
                ground.command(word, client.pid)
                client.do("send 30")
        capture = running.finish()
    expected = conversation(first, client.do("now"))
    found = sorted(streams(capture.packets).values(), key=lambda found: found[0][:1])
    require(found == [(stream, 0) for stream in expected], "not what was said")
    by_kernel = [packet for packet in capture.packets if "through the kernel" in packet.comments]
    require(0 < len(by_kernel) < len(capture.packets), f"{len(by_kernel)} packets went through the kernel")


def later(ground):
    server, first = ground.pair("fork")
    with recording(ground, server.pid) as running:
        second = End(ground, "client", first.server_port, role="client")
        second.port = int(second.line())
        second.do("send 20")
        ground.await_path(second, "ring")
        begin = second.do("now") + 1
        last = second.do("send 100")
        # As long as it takes to find the child, its memory keeps what it records.
        [child] = [row["pid"] for row in ground.ringlet.connections(second.port) if row["pid"] != second.pid]
        found = lambda: tapes(child) and tapes(child) <= tapes(running.pid)
        wait_until(found, START_SECONDS, "the child to be found")
        capture = running.finish()
    requests, _ = conversation(begin, last)
    packets = [packet for packet in capture.packets if packet.source[1] == second.port]
    require(b"".join(packet.payload for packet in packets).endswith(requests), "the child's connection is not all there")


def tapes(pid):
    """The inodes of the memory into which processes record, as far as this one has mapped it."""
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "ringlet-tap" in line}


def has_memory(pid):
    return "ringlet-tap" in pathlib.Path(f"/proc/{pid}/maps").read_text() or any(
        "ringlet-tap" in os.readlink(path) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir()
    )


def nothing_left(ground):
    server, client = ground.pair()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with recording(ground, client.pid) as running:
            client.do("send 20")
            wait_until(lambda: has_memory(client.pid), START_SECONDS, "something to be recorded")
            if number == signal.SIGKILL:
                running.kill()
            else:
                running.finish(number)

        def gone():
            client.do("send 1")
            return not has_memory(client.pid)

        wait_until(gone, START_SECONDS, "the memory to be given back")
    # And again.
    with recording(ground, client.pid) as running:
        client.do("send 20")
        require(len(running.finish().packets) == 40, "the next capture")


def dies(ground):
    server, client = ground.pair()
    with recording(ground, client.pid) as running:
        client.do("run")
        wait_until(lambda: running.path.stat().st_size > 100 * PACKET_MOST_BYTES, START_SECONDS, "packets to be written")
        client.process.send(signal.SIGKILL)
        capture = running.finish(None)
    require(len(capture.packets) > 100, f"{len(capture.packets)} packets")
    ground.put_away(client.process)


def one_at_a_time(ground):
    server, client = ground.pair()
    with recording(ground, client.pid) as running:
        client.do("send 20")
        said = ground.command("capture", "-w", "/dev/null", client.pid, status=1)
        client.do("send 20")
        require(len(running.finish().packets) == 80, f"the first one was disturbed: {said}")
    ground.command("capture", "-w", "/dev/null", 4194305, status=1)
