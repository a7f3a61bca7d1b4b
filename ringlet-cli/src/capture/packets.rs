//! pcapng, with TCP and UDP packets made up around what was recorded.

use std::borrow::Cow;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use etherparse::{IpNumber, Ipv4Header, Ipv6Header, TcpHeader, TransportHeader, UdpHeader};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::{DataLink, Endianness};

/// One piece of a stream, or a datagram.
pub struct Packet {
    pub time_ns: u64,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub received: bool,
    pub by_kernel: bool,
    pub datagram: bool,
    /// The call's last piece.
    pub last: bool,
    /// Bytes of this direction before it, and of the other one.
    pub before: u64,
    pub other: u64,
    /// Bytes that it stands for; `bytes` may be fewer.
    pub len: usize,
    pub number: u64,
    pub note: Option<String>,
    pub bytes: Vec<u8>,
}

pub struct Writer<W: Write> {
    file: PcapNgWriter<W>,
    interfaces: u32,
    pub packets: u64,
    last_time_ns: u64,
}

const NANOSECONDS: u8 = 9;
const HOPS: u8 = 64;
const WINDOW: u16 = u16::MAX;
/// Sequence numbers begin here, as if the SYN had been number 0.
const FIRST: u64 = 1;
/// Bits of epb_flags.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

impl<W: Write> Writer<W> {
    pub fn new(output: W) -> anyhow::Result<Writer<W>> {
        let file = PcapNgWriter::with_endianness(output, Endianness::Little)
            .context("cannot write the capture")?;
        Ok(Writer { file, interfaces: 0, packets: 0, last_time_ns: 0 })
    }

    pub fn flush(&mut self) -> anyhow::Result<()> {
        self.file.get_mut().flush().context("cannot write the capture")
    }

    /// A process is an interface of its own.
    pub fn interface(&mut self, name: &str) -> anyhow::Result<u32> {
        let text = format!("{name}, through shared memory (ringlet)");
        let block = InterfaceDescriptionBlock {
            linktype: DataLink::RAW,
            // The same packet may be as long as it likes: what is kept is said by each.
            snaplen: 0,
            options: vec![
                InterfaceDescriptionOption::IfName(text_option(name)),
                InterfaceDescriptionOption::IfDescription(text_option(&text)),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ],
        };
        self.file.write_pcapng_block(block).context("cannot write the capture")?;
        self.interfaces += 1;
        Ok(self.interfaces - 1)
    }

    pub fn statistics(
        &mut self,
        interface: u32,
        received: u64,
        dropped: u64,
    ) -> anyhow::Result<()> {
        let block = InterfaceStatisticsBlock {
            interface_id: interface,
            // WHY: the format has the upper half first, the crate writes one little-endian number.
            timestamp: self.last_time_ns.rotate_left(32),
            options: vec![
                InterfaceStatisticsOption::IsbIfRecv(received),
                InterfaceStatisticsOption::IsbIfDrop(dropped),
            ],
        };
        self.file.write_pcapng_block(block).context("cannot write the capture")?;
        Ok(())
    }

    pub fn packet(&mut self, interface: u32, packet: &Packet) -> anyhow::Result<()> {
        let data = headers_and_bytes(packet)?;
        let mut options = vec![EnhancedPacketOption::Flags(match packet.received {
            true => INBOUND,
            false => OUTBOUND,
        })];
        let notes = [packet.note.as_deref(), packet.by_kernel.then_some("through the kernel")];
        let notes = notes.into_iter().flatten();
        options.extend(notes.map(|note| EnhancedPacketOption::Comment(text_option(note))));
        let block = EnhancedPacketBlock {
            interface_id: interface,
            timestamp: Duration::from_nanos(packet.time_ns),
            original_len: (data.len() - packet.bytes.len() + packet.len) as u32,
            data: Cow::Owned(data),
            options,
        };
        self.file.write_pcapng_block(block).context("cannot write the capture")?;
        self.packets += 1;
        self.last_time_ns = self.last_time_ns.max(packet.time_ns);
        Ok(())
    }
}

/// The length of an option has 16 bits.
fn text_option(text: &str) -> Cow<'_, str> {
    Cow::Borrowed(&text[..text.floor_char_boundary(usize::from(u16::MAX))])
}

/// What is no connection over IP (its addresses are zero) gets addresses for documentation (RFC 5737), and ports from its number.
fn ends(packet: &Packet) -> (SocketAddr, SocketAddr) {
    let (mut local, mut remote) = (packet.local, packet.remote);
    if local.port() == 0 && remote.port() == 0 {
        let port = packet.number as u16;
        local = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), port);
        remote = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 2).into(), port);
    }
    if packet.received { (remote, local) } else { (local, remote) }
}

fn transport(packet: &Packet, source: u16, destination: u16) -> anyhow::Result<TransportHeader> {
    if packet.datagram {
        return Ok(TransportHeader::Udp(UdpHeader {
            source_port: source,
            destination_port: destination,
            length: u16::try_from(UdpHeader::LEN + packet.len)?,
            checksum: 0,
        }));
    }
    let sequence = packet.before.wrapping_add(FIRST) as u32;
    let mut tcp = TcpHeader::new(source, destination, sequence, WINDOW);
    tcp.ack = true;
    tcp.acknowledgment_number = packet.other.wrapping_add(FIRST) as u32;
    tcp.psh = packet.last;
    Ok(TransportHeader::Tcp(tcp))
}

fn headers_and_bytes(packet: &Packet) -> anyhow::Result<Vec<u8>> {
    let (source, destination) = ends(packet);
    let mut header = transport(packet, source.port(), destination.port())?;
    let protocol = if packet.datagram { IpNumber::UDP } else { IpNumber::TCP };
    let len = header.header_len() + packet.len;
    // Of what was not kept no checksum can be made; readers check none on a cut packet.
    let whole = packet.bytes.len() == packet.len;
    let mut data = Vec::with_capacity(Ipv6Header::LEN + len);
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let len = u16::try_from(len)?;
            let ip = Ipv4Header::new(len, HOPS, protocol, from.octets(), to.octets())?;
            if whole {
                header.update_checksum_ipv4(&ip, &packet.bytes)?;
            }
            ip.write(&mut data)?;
        }
        (from, to) => {
            let v6 = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let ip = Ipv6Header {
                payload_length: u16::try_from(len)?,
                next_header: protocol,
                hop_limit: HOPS,
                source: v6(from),
                destination: v6(to),
                ..Default::default()
            };
            if whole {
                header.update_checksum_ipv6(&ip, &packet.bytes)?;
            }
            ip.write(&mut data)?;
        }
    }
    header.write(&mut data)?;
    data.extend_from_slice(&packet.bytes);
    Ok(data)
}
