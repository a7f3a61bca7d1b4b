//! What the kernel knows of TCP and UDP sockets, from /proc.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::Serialize;

/// One line of /proc/net/tcp, tcp6, udp or udp6.
#[derive(Clone, Copy)]
pub struct KernelSocket {
    pub protocol: Protocol,
    pub state: &'static str,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub send_queue_bytes: u64,
    pub receive_queue_bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
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
            ];
            let mut sockets = HashMap::new();
            for (file, protocol) in files {
                let text = fs::read_to_string(format!("/proc/{pid}/net/{file}"));
                let text = text.unwrap_or_default();
                sockets.extend(text.lines().filter_map(|line| parse_line(line, protocol)));
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
        local: parse_address(local)?,
        peer: parse_address(peer)?,
        send_queue_bytes: u64::from_str_radix(send, 16).ok()?,
        receive_queue_bytes: u64::from_str_radix(receive, 16).ok()?,
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
        assert_eq!(socket.local, "127.0.0.1:6379".parse().unwrap());
        assert_eq!(socket.peer, "127.0.0.2:54321".parse().unwrap());
        assert_eq!((socket.send_queue_bytes, socket.receive_queue_bytes), (10, 3));

        let line = "   1: 0000000000000000FFFF00000100007F:0050 00000000000000000000000001000000:0051 0A \
                    00000000:00000000 00:00000000 00000000     0        0 99 1";
        let (_, socket) = parse_line(line, Protocol::Tcp).unwrap();
        assert_eq!(socket.local, "[::ffff:127.0.0.1]:80".parse().unwrap());
        assert_eq!(socket.peer, "[::1]:81".parse().unwrap());
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
}
