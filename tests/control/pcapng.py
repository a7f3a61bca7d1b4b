"""A reader of pcapng and of the TCP and UDP packets in it, which knows nothing of ringlet; every checksum is checked."""

import collections
import ipaddress
import struct

TCP, UDP = 6, 17
SECTION, INTERFACE, STATISTICS, PACKET = 0x0A0D0D0A, 1, 5, 6
COMMENT, EPB_FLAGS, IF_NAME, IF_TSRESOL, ISB_RECEIVED, ISB_DROPPED = 1, 2, 2, 9, 4, 5

Packet = collections.namedtuple("Packet", "interface time_ns inbound comments source destination sequence ack payload length")


class Wrong(Exception):
    """The file is not what it should be."""


def need(condition, what):
    if not condition:
        raise Wrong(what)


class Capture:
    def __init__(self, data):
        self.interfaces, self.packets, self.received, self.dropped = [], [], {}, {}
        at = 0
        while at < len(data):
            kind, length = struct.unpack_from("<II", data, at)
            need(length % 4 == 0 and length >= 12 and at + length <= len(data), f"a block of {length} bytes at {at}")
            need(struct.unpack_from("<I", data, at + length - 4)[0] == length, "a block whose lengths differ")
            self._block(kind, data[at + 8 : at + length - 4])
            at += length

    def _block(self, kind, body):
        if kind == SECTION:
            need(struct.unpack_from("<IHH", body) == (0x1A2B3C4D, 1, 0), "no section header")
        elif kind == INTERFACE:
            link, _, _ = struct.unpack_from("<HHI", body)
            found = options(body[8:])
            need(link == 101 and found[IF_TSRESOL] == [b"\x09"], f"interface: link {link}, {found}")
            self.interfaces.append(found[IF_NAME][0].decode())
        elif kind == STATISTICS:
            interface, high, low = struct.unpack_from("<III", body)
            found = options(body[12:])
            [[received], [dropped]] = [[struct.unpack("<Q", each)[0] for each in found[code]] for code in (ISB_RECEIVED, ISB_DROPPED)]
            times = [packet.time_ns for packet in self.packets if packet.interface == interface]
            need(high << 32 | low >= max(times), "statistics of an earlier time than the last packet")
            self.received[interface], self.dropped[interface] = received, dropped
        elif kind == PACKET:
            interface, high, low, kept, length = struct.unpack_from("<IIIII", body)
            need(interface < len(self.interfaces) and kept <= length, "a packet of no interface")
            found = options(body[20 + (kept + 3 & ~3) :])
            [flags] = found[EPB_FLAGS]
            comments = [comment.decode() for comment in found.get(COMMENT, [])]
            inbound = {1: True, 2: False}[struct.unpack("<I", flags)[0]]
            parts = segment_of(body[20 : 20 + kept], length)
            self.packets.append(Packet(interface, high << 32 | low, inbound, comments, *parts))
        else:
            need(False, f"a block of kind {kind:#x}")


def options(data):
    found, at = collections.defaultdict(list), 0
    while at + 4 <= len(data):
        code, length = struct.unpack_from("<HH", data, at)
        if code == 0:
            break
        found[code].append(data[at + 4 : at + 4 + length])
        at += 4 + (length + 3 & ~3)
    return found


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def segment_of(packet, length):
    """Source, destination, sequence and acknowledgement numbers (none for UDP), payload, and how long that was."""
    if packet[0] >> 4 == 4:
        head, total = (packet[0] & 15) * 4, struct.unpack_from("!H", packet, 2)[0]
        need(checksum(packet[:head]) == 0xFFFF, "the checksum of an IPv4 header")
        addresses, protocol = packet[12:20], packet[9]
    else:
        head, total = 40, 40 + struct.unpack_from("!H", packet, 4)[0]
        addresses, protocol = packet[8:40], packet[6]
    need(total == length and protocol in (TCP, UDP), f"length {total} of {length}, protocol {protocol}")
    half = len(addresses) // 2
    segment = packet[head:]
    source_port, destination_port = struct.unpack_from("!HH", segment)
    if protocol == TCP:
        sequence, ack, offset, flags = struct.unpack_from("!IIBB", segment, 4)
        need(flags & 0b10111 == 0b10000 or flags & 0b11111 == 0b11000, f"flags {flags:#b}")
        start = (offset >> 4) * 4
    else:
        sequence, ack, start = None, None, 8
        need(struct.unpack_from("!H", segment, 4)[0] == length - head, "the length of a UDP datagram")
    if len(packet) == length:
        pseudo = addresses + struct.pack("!II", len(segment), protocol)
        need(checksum(pseudo + segment) == 0xFFFF, "the checksum of a segment")
    ends = [
        (str(ipaddress.ip_address(address)), port)
        for address, port in ((addresses[:half], source_port), (addresses[half:], destination_port))
    ]
    return *ends, sequence, ack, segment[start:], total - head - start


def streams(packets):
    """The bytes of each direction, put together by their sequence numbers, and how many are missing."""
    found = {}
    for packet in packets:
        pieces = found.setdefault((packet.source, packet.destination), {})
        need(packet.sequence not in pieces, "a sequence number twice")
        pieces[packet.sequence] = packet
    whole = {}
    for ends, pieces in found.items():
        stream, expected, missing = [], 1, 0
        for sequence, packet in sorted(pieces.items()):
            need(sequence >= expected, "segments overlap")
            missing += sequence - expected
            stream.append(packet.payload)
            expected = sequence + packet.length
        whole[ends] = b"".join(stream), missing
    return whole
