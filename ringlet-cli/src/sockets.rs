//! What the kernel knows of TCP, UDP and Unix sockets, from /proc.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::table::printable;

/// One line of /proc/net/tcp, tcp6, udp, udp6 or unix.
#[derive(Clone)]
pub struct KernelSocket {
    pub protocol: Protocol,
    pub state: &'static str,
    pub local: End,
    pub peer: End,
    /// Not told of Unix sockets.
    pub send_queue_bytes: Option<u64>,
    pub receive_queue_bytes: Option<u64>,
}

/// What an end of a connection is known by.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum End {
    Internet(SocketAddr),
    /// The name that it is bound to, if it is to one, and its number, if that is known.
    Unix {
        name: Option<String>,
        inode: Option<u64>,
    },
}

/// What both ends of a connection know an end by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Key {
    Internet(SocketAddr),
    /// 0 if it is not known.
    Unix(u64),
}

impl Key {
    /// An IPv6 socket may talk to an IPv4 socket.
    pub fn internet(end: SocketAddr) -> Key {
        Key::Internet(SocketAddr::new(end.ip().to_canonical(), end.port()))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Key::Internet(end) => write!(out, "{end}"),
            Key::Unix(inode) => write!(out, "unix:{inode}"),
        }
    }
}

impl FromStr for Key {
    type Err = ();

    fn from_str(text: &str) -> Result<Key, ()> {
        match text.strip_prefix("unix:") {
            Some(inode) => inode.parse().map(Key::Unix).map_err(drop),
            None => text.parse().map(Key::internet).map_err(drop),
        }
    }
}

impl Serialize for End {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut fields = to.serialize_struct("End", 2)?;
        match self {
            End::Internet(end) => {
                fields.serialize_field("address", &end.ip())?;
                fields.serialize_field("port", &end.port())?;
            }
            End::Unix { name, inode } => {
                fields.serialize_field("unix", name)?;
                fields.serialize_field("inode", inode)?;
            }
        }
        fields.end()
    }
}

impl fmt::Display for End {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            End::Internet(end) => write!(out, "{end}"),
            End::Unix { name, inode } => {
                write!(out, "{}", printable(name.as_deref().unwrap_or("*")))?;
                inode.map_or(Ok(()), |inode| write!(out, " {inode}"))
            }
        }
    }
}

impl End {
    pub fn key(&self) -> Key {
        match self {
            End::Internet(end) => Key::internet(*end),
            End::Unix { inode, .. } => Key::Unix(inode.unwrap_or(0)),
        }
    }

    pub fn port(&self) -> Option<u16> {
        match self {
            End::Internet(address) => Some(address.port()),
            End::Unix { .. } => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
    /// Any Unix socket but those of packets.
    Unix,
    Seqpacket,
}

/// The tables of the network namespaces met so far: each is read once, so that one look shows one moment.
#[derive(Default)]
pub struct SocketTables(HashMap<String, HashMap<u64, KernelSocket>>);

impl SocketTables {
    /// The name of the network namespace of `pid`, and its sockets by inode.
    pub fn of(&mut self, pid: u32) -> (String, &HashMap<u64, KernelSocket>) {
        let name = fs::read_link(format!("/proc/{pid}/ns/net"))
            .map_or_else(|_| format!("pid {pid}"), |link| link.to_string_lossy().into_owned());
        let table = self.0.entry(name.clone()).or_insert_with(|| {
            let files = [
                ("tcp", Protocol::Tcp),
                ("tcp6", Protocol::Tcp),
                ("udp", Protocol::Udp),
                ("udp6", Protocol::Udp),
                ("unix", Protocol::Unix),
            ];
            let mut sockets = HashMap::new();
            for (file, protocol) in files {
                let text = fs::read_to_string(format!("/proc/{pid}/net/{file}"));
                let text = text.unwrap_or_default();
                sockets.extend(text.lines().filter_map(|line| match protocol {
                    Protocol::Unix => parse_unix_line(line),
                    _ => parse_line(line, protocol),
                }));
            }
            sockets
        });
        (name, table)
    }
}

/// The inode of a descriptor, if it is a socket.
pub fn inode(pid: u32, fd: i32) -> Option<u64> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// `sl local remote state tx:rx timer:when retransmits uid timeout inode ...`; the heading is not like that.
fn parse_line(line: &str, protocol: Protocol) -> Option<(u64, KernelSocket)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, local, peer, state, queues, _, _, _, _, inode, ..] = fields[..] else { return None };
    let (send, receive) = queues.split_once(':')?;
    let socket = KernelSocket {
        protocol,
        state: state_name(u8::from_str_radix(state, 16).ok()?),
        local: End::Internet(parse_address(local)?),
        peer: End::Internet(parse_address(peer)?),
        send_queue_bytes: Some(u64::from_str_radix(send, 16).ok()?),
        receive_queue_bytes: Some(u64::from_str_radix(receive, 16).ok()?),
    };
    Some((inode.parse().ok()?, socket))
}

/// `num: references protocol flags type state inode name`; the name may be missing, or hold blanks.
fn parse_unix_line(line: &str) -> Option<(u64, KernelSocket)> {
    const ACCEPTS: u32 = 1 << 16;
    const SOCK_SEQPACKET: u8 = 5;
    let (_, rest) = line.split_once(": ")?;
    let mut rest = rest;
    let mut next = || {
        let (field, left) = rest.trim_start().split_once(' ').unwrap_or((rest.trim_start(), ""));
        rest = left;
        field
    };
    let (_, _, flags, kind, state, inode) = (next(), next(), next(), next(), next(), next());
    let packets = u8::from_str_radix(kind, 16).ok()? == SOCK_SEQPACKET;
    let state = match (u32::from_str_radix(flags, 16).ok()?, u8::from_str_radix(state, 16).ok()?) {
        (flags, _) if flags & ACCEPTS != 0 => LISTENING,
        (_, 3) => "ESTAB",
        _ => UNCONNECTED,
    };
    let inode = inode.parse().ok()?;
    let name = (!rest.is_empty()).then(|| rest.to_owned());
    let socket = KernelSocket {
        protocol: if packets { Protocol::Seqpacket } else { Protocol::Unix },
        state,
        local: End::Unix { name, inode: Some(inode) },
        peer: End::Unix { name: None, inode: None },
        send_queue_bytes: None,
        receive_queue_bytes: None,
    };
    Some((inode, socket))
}

/// A socket; the other end of a Unix socket is asked for, which works in this network namespace only.
pub fn find(table: &HashMap<u64, KernelSocket>, inode: u64) -> Option<KernelSocket> {
    let mut socket = table.get(&inode)?.clone();
    if let End::Unix { name, inode: number } = &mut socket.peer {
        *number = unix_peer(inode);
        let other = number.and_then(|number| table.get(&number));
        if let Some(KernelSocket { local: End::Unix { name: bound, .. }, .. }) = other {
            name.clone_from(bound);
        }
    }
    Some(socket)
}

fn unix_peer(inode: u64) -> Option<u64> {
    let peer = ringlet_linux::diag::unix_peer(u32::try_from(inode).ok()?).ok()?;
    (peer != 0).then_some(peer.into())
}

/// Words of an address in the machine's byte order, a colon, the port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok();
    let address: IpAddr = match address.len() {
        8 => Ipv4Addr::from(word(0)?.to_ne_bytes()).into(),
        32 => {
            let mut bytes = [0; 16];
            for (at, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(at)?.to_ne_bytes());
            }
            Ipv6Addr::from(bytes).into()
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

/// As ss(8) names the states of include/net/tcp_states.h.
fn state_name(state: u8) -> &'static str {
    match state {
        1 => "ESTAB",
        2 => "SYN-SENT",
        3 | 12 => "SYN-RECV",
        4 => "FIN-WAIT-1",
        5 => "FIN-WAIT-2",
        6 => "TIME-WAIT",
        7 => UNCONNECTED,
        8 => "CLOSE-WAIT",
        9 => "LAST-ACK",
        10 => LISTENING,
        11 => "CLOSING",
        _ => "UNKNOWN",
    }
}

pub const UNCONNECTED: &str = "UNCONN";
pub const LISTENING: &str = "LISTEN";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn lines_of_both_families_are_read() {
        let line = "   0: 0100007F:18EB 0200007F:D431 01 0000000A:00000003 00:00000000 00000000  1000        \
                    0 4711 1 0000000000000000 20 4 30 10 -1";
        let (inode, socket) = parse_line(line, Protocol::Tcp).unwrap();
        assert_eq!((inode, socket.state), (4711, "ESTAB"));
        let end = |text: &str| End::Internet(text.parse().unwrap());
        assert_eq!((socket.local, socket.peer), (end("127.0.0.1:6379"), end("127.0.0.2:54321")));
        assert_eq!((socket.send_queue_bytes, socket.receive_queue_bytes), (Some(10), Some(3)));

        let line = "   1: 0000000000000000FFFF00000100007F:0050 00000000000000000000000001000000:0051 0A \
                    00000000:00000000 00:00000000 00000000     0        0 99 1";
        let (_, socket) = parse_line(line, Protocol::Tcp).unwrap();
        assert_eq!((socket.local, socket.peer), (end("[::ffff:127.0.0.1]:80"), end("[::1]:81")));
        assert_eq!(socket.state, "LISTEN");

        assert!(
            parse_line(
                "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when",
                Protocol::Udp
            )
            .is_none()
        );
        assert!(parse_line("", Protocol::Udp).is_none());
    }

    #[test]
    fn lines_of_unix_sockets_are_read() {
        let of =
            |line| parse_unix_line(line).map(|(inode, socket)| (inode, socket.state, socket.local));
        let protocol = |line| parse_unix_line(line).map(|(_, socket)| socket.protocol);
        let name = |name: &str| Some(name.to_owned());
        assert_eq!(
            of("0000000000000000: 00000002 00000000 00010000 0001 01 11533 /run/a b"),
            Some((11533, "LISTEN", End::Unix { name: name("/run/a b"), inode: Some(11533) }))
        );
        assert_eq!(
            of("ffff: 00000003 00000000 00000000 0001 03    42 @name"),
            Some((42, "ESTAB", End::Unix { name: name("@name"), inode: Some(42) }))
        );
        assert_eq!(
            of("0000000000000000: 00000003 00000000 00000000 0001 03 43"),
            Some((43, "ESTAB", End::Unix { name: None, inode: Some(43) }))
        );
        let packets = "0000000000000000: 00000003 00000000 00000000 0005 03 44 /run/packets";
        assert!(protocol(packets) == Some(Protocol::Seqpacket));
        assert!(protocol(&packets.replace("0005", "0001")) == Some(Protocol::Unix));
        assert!(of("Num       RefCount Protocol Flags    Type St Inode Path").is_none());
    }
}
