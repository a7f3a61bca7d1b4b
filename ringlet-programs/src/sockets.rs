//! What the kernel knows of sockets: of TCP and UDP from /proc, of Unix sockets from its socket table, since their names may hold
//! whatever would forge a line of text.

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::str::FromStr;

use rustix::fs::Dir;
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::namespaces;
use crate::table::printable;

/// One socket of those tables.
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
        name: Option<Name>,
        inode: Option<u64>,
    },
}

/// The name of a Unix socket, which may hold any byte but that it is not text: an abstract one begins with a zero byte.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Name(Vec<u8>);

impl Name {
    /// As the kernel has it.
    pub fn new(bytes: &[u8]) -> Name {
        let is_abstract = bytes.first() == Some(&0);
        Name(if is_abstract { bytes } else { bytes.strip_suffix(&[0]).unwrap_or(bytes) }.to_vec())
    }

    /// Is it meant by this word? Either as it is, with an @ for the first byte of an abstract one, or as it is shown.
    pub fn is(&self, word: &str) -> bool {
        let bytes = match self.0.split_first() {
            Some((0, rest)) => word.strip_prefix('@').is_some_and(|word| word.as_bytes() == rest),
            _ => word.as_bytes() == self.0,
        };
        bytes || self.to_string() == word
    }
}

/// Text, with \xNN for each byte that is none; so no two names look alike.
impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let bytes = match self.0.split_first() {
            Some((0, rest)) => {
                out.write_char('@')?;
                rest
            }
            _ => &self.0,
        };
        for chunk in bytes.utf8_chunks() {
            out.write_str(&chunk.valid().replace('\\', "\\\\"))?;
            chunk.invalid().iter().try_for_each(|byte| write!(out, "\\x{byte:02x}"))?;
        }
        Ok(())
    }
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
                fields.serialize_field("unix", &name.as_ref().map(Name::to_string))?;
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
                let name = name.as_ref().map_or_else(|| "*".to_owned(), Name::to_string);
                write!(out, "{}", printable(&name))?;
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

/// The sockets of a network namespace by inode.
#[derive(Default)]
pub struct SocketTable {
    sockets: HashMap<u64, KernelSocket>,
    /// What could not be read.
    pub problem: Option<String>,
    /// Looked at again (`look_again`).
    is_second: bool,
}

impl SocketTable {
    /// Those of the process that is shown in this directory.
    pub fn read(directory: &Path) -> SocketTable {
        let mut table = SocketTable::default();
        for (file, protocol) in [
            ("tcp", Protocol::Tcp),
            ("tcp6", Protocol::Tcp),
            ("udp", Protocol::Udp),
            ("udp6", Protocol::Udp),
        ] {
            match fs::read_to_string(directory.join("net").join(file)) {
                Ok(text) => {
                    let lines = text.lines().filter_map(|line| parse_line(line, protocol));
                    table.sockets.extend(lines);
                }
                // A kernel without IPv6.
                Err(error) if error.kind() == io::ErrorKind::NotFound && file.ends_with('6') => {}
                Err(error) => table.note(file, &error),
            }
        }
        let read = unix_sockets(directory, &mut |socket| {
            table.sockets.insert(socket.inode.into(), unix(socket));
        });
        if let Err(error) = read {
            table.note("Unix", &error);
        }
        table
    }

    fn note(&mut self, what: &str, error: &io::Error) {
        self.problem = Some(format!("the {what} sockets there can't be listed: {error}"));
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &KernelSocket)> {
        self.sockets.iter().map(|(inode, socket)| (*inode, socket))
    }

    /// What a first look has left out, by another. KERNEL: while others come and go, a socket may be left out of a listing that is read
    /// in pieces.
    pub fn look_again(&mut self, directory: &Path) {
        if !self.is_second {
            self.is_second = true;
            for (inode, socket) in SocketTable::read(directory).sockets {
                self.sockets.entry(inode).or_insert(socket);
            }
        }
    }

    /// A socket; of a Unix socket's other end also the name.
    pub fn find(&self, inode: u64) -> Option<KernelSocket> {
        let mut socket = self.sockets.get(&inode)?.clone();
        if let End::Unix { name, inode: Some(number) } = &mut socket.peer {
            let other = self.sockets.get(number).map(|other| &other.local);
            if let Some(End::Unix { name: bound, .. }) = other {
                name.clone_from(bound);
            }
        }
        Some(socket)
    }
}

/// The tables of the network namespaces met so far: each is read once, so that one look shows one moment.
#[derive(Default)]
pub struct SocketTables(HashMap<String, SocketTable>);

impl SocketTables {
    /// The name of the network namespace of the process that is shown in this directory, and its sockets.
    pub fn of(&mut self, directory: &Path) -> (String, &mut SocketTable) {
        let name = fs::read_link(directory.join("ns/net")).map_or_else(
            |_| directory.to_string_lossy().into_owned(),
            |link| link.to_string_lossy().into_owned(),
        );
        let table = self.0.entry(name.clone()).or_insert_with(|| SocketTable::read(directory));
        (name, table)
    }
}

fn unix_sockets(
    directory: &Path,
    each: &mut dyn FnMut(&ringlet_linux::diag::UnixSocket),
) -> io::Result<()> {
    let socket = namespaces::diag_socket(directory)?;
    let mut room = Box::new([0; ringlet_linux::diag::LIST_BYTES]);
    ringlet_linux::diag::unix_sockets(std::os::fd::AsRawFd::as_raw_fd(&socket), &mut room, each)
        .map_err(|error| io::Error::from_raw_os_error(error.0))
}

fn unix(socket: &ringlet_linux::diag::UnixSocket) -> KernelSocket {
    const SOCK_SEQPACKET: u8 = 5;
    let inode = Some(socket.inode.into());
    KernelSocket {
        protocol: if socket.kind == SOCK_SEQPACKET { Protocol::Seqpacket } else { Protocol::Unix },
        state: state_name(socket.state),
        local: End::Unix { name: socket.name.map(Name::new), inode },
        peer: End::Unix { name: None, inode: socket.peer.filter(|peer| *peer != 0).map(u64::from) },
        send_queue_bytes: None,
        receive_queue_bytes: None,
    }
}

/// The descriptors of the process that is shown in a directory.
pub struct Descriptors {
    place: Option<File>,
    misses: usize,
    /// All there are, once so many were asked for that are not there.
    listed: Option<HashSet<i32>>,
}

/// Who shows rows of what it has not got is looked at by what it has.
const MISSES_MAX: usize = 1000;

impl Descriptors {
    pub fn of(directory: &Path) -> Descriptors {
        let place = File::open(directory.join("fd")).ok();
        Descriptors { place, misses: 0, listed: None }
    }

    /// The inode of one of them, if it is a socket.
    pub fn socket(&mut self, fd: i32) -> Option<u64> {
        if self.listed.as_ref().is_some_and(|listed| !listed.contains(&fd)) {
            return None;
        }
        let place = self.place.as_ref()?;
        let link = rustix::fs::readlinkat(place, fd.to_string(), Vec::new());
        if link.is_err() {
            self.misses += 1;
            if self.misses == MISSES_MAX {
                self.listed = Some(self.list().collect());
            }
        }
        link.ok()?.to_str().ok()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    }

    /// Their numbers.
    pub fn list(&self) -> impl Iterator<Item = i32> + use<> {
        let entries = self.place.as_ref().and_then(|place| Dir::read_from(place).ok());
        let entries = entries.into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok())
    }
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

    /// Of 65,536 rows that lie, all but the first thousand are told by one list.
    #[test]
    fn what_is_not_there_is_soon_known_from_a_list() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let there = std::os::fd::AsRawFd::as_raw_fd(&socket);
        let mut descriptors = Descriptors::of(Path::new("/proc/self"));
        assert!(descriptors.socket(there).is_some() && descriptors.misses == 0);
        assert!((1 << 20..(1 << 20) + (1 << 16)).all(|fd| descriptors.socket(fd).is_none()));
        assert!(descriptors.misses == MISSES_MAX && descriptors.socket(there).is_some());
        assert!(descriptors.list().any(|fd| fd == there));
    }

    #[test]
    fn names_of_unix_sockets_are_told_apart() {
        let shown = |bytes: &[u8]| Name::new(bytes).to_string();
        assert_eq!(shown(b"/run/a b\0"), "/run/a b");
        assert_eq!(shown(b"\0name\0"), "@name\0");
        assert_eq!(shown(b"/\xff\xe2\x82\xac"), "/\\xff\u{20ac}");
        assert_eq!(shown(b"/\\xff"), "/\\\\xff");
        assert!(Name::new(b"/\\xff").is("/\\xff") && !Name::new(b"/\\xff").is("@/\\xff"));
        assert!(Name::new(b"/\xff\0").is("/\\xff") && Name::new(b"\0a").is("@a"));
        assert!(!Name::new(b"@a\0").is("a"));
    }
}
