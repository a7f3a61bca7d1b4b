"""What goes over the loopback interface, as tcpdump would see it."""

import ctypes
import re
import socket
import struct

ETH_P_ALL = 3
PACKET_OUTGOING = 4  # each packet on lo is seen twice: going out and coming in
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_ATTACH_FILTER, SO_RCVBUFFORCE = 26, 33
BUFFER_BYTES = 64 << 20


class Wire:
    """Within the block everything is recorded; afterwards `streams` has the bytes by (source port, destination port)."""

    def __init__(self):
        self.streams = {}

    def __enter__(self):
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind(("lo", ETH_P_ALL))
        return self

    def __exit__(self, *problem):
        # From now on nothing is recorded: a filter that returns 0 for every packet.
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
        program = struct.pack("HL", 1, ctypes.addressof(nothing))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        self._socket.setblocking(False)
        last = {}
        try:
            while True:
                packet, (_, _, kind, *_) = self._socket.recvfrom(1 << 17)
                if kind == PACKET_OUTGOING or packet[0] >> 4 != 4:
                    continue
                if packet[9] == socket.IPPROTO_UDP:
                    udp = packet[(packet[0] & 15) * 4 :]
                    key = struct.unpack_from("!HH", udp)
                    self.streams[key] = self.streams.get(key, b"") + udp[8:]
                if packet[9] != socket.IPPROTO_TCP:
                    continue
                tcp = packet[(packet[0] & 15) * 4 : struct.unpack_from("!H", packet, 2)[0] or None]
                source, destination, sequence = struct.unpack_from("!HHI", tcp)
                payload, key = tcp[(tcp[12] >> 4) * 4 :], (source, destination)
                again = (sequence - last.get(key, sequence)) & 0xFFFFFFFF > 1 << 31  # a retransmission
                if payload and not again:
                    last[key] = (sequence + len(payload)) & 0xFFFFFFFF
                    self.streams[key] = self.streams.get(key, b"") + payload
        except BlockingIOError:
            pass
        received, dropped = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self._socket.close()
        if dropped and problem == (None, None, None):
            raise OSError(f"{dropped} of {received} packets were not seen")

    def numbers(self, kind, port):
        """The numbers of all whole messages of a kind (Q or R) to or from a port."""
        streams = [stream for ports, stream in self.streams.items() if port in ports]
        return [int(found) for stream in streams for found in re.findall(kind + rb"(\d{9})", stream)]
