//! What is so for all connections of a kind, and which kind a socket is.

use crate::config::Config;
use crate::socket::table::{Kind, Socket};
use ringlet_linux::sys::Sys;
use ringlet_linux::{fd, tcp, unix};

/// Flags of a receive or send that the ring serves.
pub const MSG_SERVED: i32 = libc::MSG_EOR
    | libc::MSG_PEEK
    | libc::MSG_DONTWAIT
    | libc::MSG_WAITALL
    | libc::MSG_NOSIGNAL
    | libc::MSG_MORE
    | libc::MSG_TRUNC
    | libc::MSG_CMSG_CLOEXEC
    | libc::MSG_ERRQUEUE;

#[derive(Clone, Copy)]
pub struct Facts {
    /// What the domain and type of such a socket are.
    of: (i32, i32),
    /// Do its messages have boundaries?
    pub has_boundaries: bool,
    /// Flags of a receive that are always the kernel's affair. KERNEL: Unix sockets have no queue of errors, and ignore that flag.
    pub kernels_flags: i32,
    /// KERNEL: only TCP takes MSG_TRUNC as a wish to discard what is received.
    pub discards: bool,
    /// May a message have control data, and its receiver want an address?
    pub has_messages: bool,
    /// KERNEL: is a send to an address refused (EISCONN)?
    pub refuses_address: bool,
    /// KERNEL: a Unix peer that shuts down receiving ends our sends at once, and no event tells that.
    pub ends_sends_untold: bool,
    /// Does a send tell of the error that was taken from the kernel before?
    pub tells_sender: bool,
    /// What poll calls room.
    pub writable: i16,
    /// KERNEL: SPLICE_F_NONBLOCK is about the pipe; but a Unix socket heeds it too.
    pub heeds_splice_flag: bool,
    /// Does the kernel tell how many bytes were ever written?
    pub counts_places: bool,
    /// Has it TCP_NODELAY and TCP_CORK?
    pub has_delays: bool,
    /// Can the node service say who its ends are? It tells them by TCP's sequence numbers.
    pub is_known_to_node: bool,
}

const UNIX_STREAM: Facts = Facts {
    of: (libc::AF_UNIX, libc::SOCK_STREAM),
    has_boundaries: false,
    kernels_flags: libc::MSG_OOB,
    discards: false,
    has_messages: true,
    refuses_address: true,
    ends_sends_untold: true,
    tells_sender: false,
    writable: libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND,
    heeds_splice_flag: true,
    counts_places: false,
    has_delays: false,
    is_known_to_node: false,
};

const TCP: Facts = Facts {
    of: (libc::AF_INET, libc::SOCK_STREAM),
    has_boundaries: false,
    kernels_flags: libc::MSG_OOB | libc::MSG_ERRQUEUE,
    discards: true,
    has_messages: false,
    refuses_address: false,
    ends_sends_untold: false,
    tells_sender: true,
    writable: libc::POLLOUT | libc::POLLWRNORM,
    heeds_splice_flag: false,
    counts_places: true,
    has_delays: true,
    is_known_to_node: true,
};

const PACKETS: Facts = Facts {
    of: (libc::AF_UNIX, libc::SOCK_SEQPACKET),
    has_boundaries: true,
    refuses_address: false,
    tells_sender: true,
    ..UNIX_STREAM
};

/// (A UDP socket has no carrier; what is asked of any socket is answered as for TCP.)
#[inline(always)]
pub fn facts(socket: &Socket) -> Facts {
    match socket.kind() {
        Kind::Packets => PACKETS,
        Kind::UnixStream => UNIX_STREAM,
        Kind::Tcp | Kind::Datagrams => TCP,
    }
}

/// Which kind a new socket is; `None` for one that is not followed.
pub fn kind(domain: i32, socket_type: i32, protocol: i32) -> Option<Kind> {
    let inet = matches!(domain, libc::AF_INET | libc::AF_INET6);
    match socket_type & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) {
        libc::SOCK_STREAM if inet && matches!(protocol, 0 | libc::IPPROTO_TCP) => Some(Kind::Tcp),
        libc::SOCK_DGRAM if inet && matches!(protocol, 0 | libc::IPPROTO_UDP) => {
            Some(Kind::Datagrams)
        }
        libc::SOCK_STREAM if domain == libc::AF_UNIX => Some(Kind::UnixStream),
        libc::SOCK_SEQPACKET if domain == libc::AF_UNIX => Some(Kind::Packets),
        _ => None,
    }
}

/// The same for a connection of which nothing is known.
pub fn kind_of(fd: i32) -> Option<Kind> {
    if tcp::is_tcp(fd) {
        return Some(Kind::Tcp);
    }
    unix::kind(fd).and_then(|socket_type| kind(libc::AF_UNIX, socket_type, 0))
}

/// Are new sockets of this kind to be followed?
pub fn is_wanted(kind: Kind, config: &Config) -> bool {
    match kind {
        Kind::Tcp => true,
        Kind::UnixStream | Kind::Packets => config.allows_unix(),
        Kind::Datagrams => config.udp && config.enabled,
    }
}

/// The kernel's number of a socket; 0 if that can't be said.
pub fn inode(fd: i32) -> u32 {
    unix::inode(fd).unwrap_or(0)
}

/// An unconnected socket of the same kind.
pub fn unconnected(socket: &Socket) -> Sys<i32> {
    let (domain, socket_type) = match socket.kind() {
        Kind::Datagrams => (socket.family.get() as i32, libc::SOCK_DGRAM),
        _ => facts(socket).of,
    };
    fd::unconnected(domain, socket_type)
}
