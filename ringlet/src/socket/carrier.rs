//! What differs between the kinds of kernel connection that can carry one of ours.
//!
//! How the kernel counts: TCP tells how many bytes were ever written and read, so a mark of `handover` names a place in all that
//! the connection has carried. It tells so by several measures, and where one contradicts another (packets that could not be sent; a socket
//! in a BPF sockmap, whose bytes go past TCP) no place can be named: the connection stays on the kernel, or ends with an error. A Unix connection tells only whether all that was sent is also taken. Then it can be moved: a
//! `Start` stands at place 0, and both ends count the doorbells that follow, up to a `Back`. (The receiver counts on, and notes
//! where that place lies in its count: `base`.) Where a Unix connection carries packets, a doorbell is a packet of one byte.

use super::table::{End, Kind, Sending, Socket, Tables};
use super::unix;
use crate::config::Endpoint;
use crate::reasons::Reason;
use ringlet_core::ring::packet_max_bytes;
use ringlet_core::sync::Ordering;
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::unix as kernel;
use ringlet_linux::{diag, fd, tcp};

/// Which kind a new socket is; `None` for one that can't be moved.
pub fn kind(domain: i32, socket_type: i32, protocol: i32) -> Option<Kind> {
    match (domain, socket_type & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)) {
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM)
            if protocol == 0 || protocol == libc::IPPROTO_TCP =>
        {
            Some(Kind::Internet)
        }
        (libc::AF_UNIX, libc::SOCK_STREAM) => Some(Kind::Unix),
        (libc::AF_UNIX, libc::SOCK_SEQPACKET) => Some(Kind::Packets),
        _ => None,
    }
}

/// The same for a descriptor of which nothing is known.
pub fn kind_of(fd: i32) -> Option<Kind> {
    if tcp::is_tcp(fd) {
        return Some(Kind::Internet);
    }
    kernel::kind(fd).and_then(|socket_type| kind(libc::AF_UNIX, socket_type, 0))
}

/// The two ends of a connection that may be moved; else why not, or that it is not yet known (`None`).
pub fn ends(tables: &Tables, socket: &Socket) -> Result<Ends, Option<Reason>> {
    match socket.kind() {
        Kind::Internet => {
            let ends = tcp::ends(socket.fd()).ok_or(Some(Reason::NotConnected))?;
            if ends.local == ends.remote {
                return Err(Some(Reason::NotLocal));
            }
            let endpoint = |end: &tcp::Address| Endpoint { address: end.ip, port: end.port };
            if !tables.config.allows(endpoint(&ends.local), endpoint(&ends.remote)) {
                return Err(Some(Reason::Off));
            }
            // Without these counts no direction could be moved.
            let failed = |error| Some(Reason::from(error));
            tcp::counts(socket.fd()).map_err(failed)?;
            // Only the kernel knows which other addresses are this machine's: it has the far end's socket, or not.
            let loopback = ends.local.is_loopback() && ends.remote.is_loopback();
            if ends.local.ip != ends.remote.ip && !loopback {
                match diag::far_owner(&Ends::Tcp(ends)) {
                    Err(Errno::ENOENT) => return Err(Some(Reason::NotLocal)),
                    found => drop(found.map_err(failed)?),
                }
            }
            Ok(Ends::Tcp(ends))
        }
        _ if !tables.config.allows_unix() => Err(Some(Reason::Off)),
        // What was shut down before the move is not told in shared memory.
        _ if fd::pending(socket.fd(), libc::POLLRDHUP) != 0 => Err(Some(Reason::Closing)),
        _ => match kernel::ends(socket.fd()) {
            Ok(ends) => Ok(Ends::Unix(ends)),
            Err(Errno::EAGAIN) => Err(None),
            // The kernel has no table of Unix sockets (CONFIG_UNIX_DIAG).
            Err(Errno::ENOENT) => Err(Some(Reason::OldKernel)),
            Err(error) => Err(Some(Reason::from(error))),
        },
    }
}

/// Do the kernel's counts name the places of a TCP connection? Asked once, before it is attached.
pub fn countable(socket: &Socket) -> Result<(), Reason> {
    if socket.is_unix() {
        return Ok(());
    }
    let end = socket.end();
    // Before the counts: other threads go on.
    let (has_sent, has_received) = (end.has_sent.is(), end.has_received.is());
    let received = tcp::counts(socket.fd()).map_err(Reason::from)?.received;
    let written = match written(socket) {
        Err(Errno::EAGAIN) => return Ok(()),
        measured => measured.map_err(Reason::from)?,
    };
    let past_tcp = tcp::consumed(socket.fd()) == Err(Errno::ERANGE)
        || has_sent && written.place == 0
        || has_received && received == 0;
    // (What another thread writes between two measures is in one of them only. They are compared again when nobody does: `start_place`.)
    let writing = end.native_senders.load(Ordering::SeqCst) != 0;
    if past_tcp || written.agreed().is_none() && !writing {
        return Err(Reason::Miscounted);
    }
    Ok(())
}

pub fn written(socket: &Socket) -> Sys<tcp::Written> {
    tcp::written(socket.fd(), !socket.side.is())
}

/// Options whose meaning lies in the kernel's queues.
pub fn unserved_option(socket: &Socket) -> Option<Reason> {
    let on = |option, from| {
        tcp::int_option(socket.fd(), libc::SOL_SOCKET, option).is_ok_and(|value| value >= from)
    };
    let either = on(libc::SO_RCVLOWAT, 2) || on(libc::SO_OOBINLINE, 1);
    let own = match socket.kind() {
        Kind::Internet => tcp::has_upper_protocol(socket.fd()),
        Kind::Unix | Kind::Packets => {
            [libc::SO_PASSCRED, libc::SO_PASSSEC, super::SO_PASSPIDFD, super::SO_INQ]
                .iter()
                .any(|option| on(*option, 1))
                || on(libc::SO_PEEK_OFF, 0)
        }
    };
    (either || own).then_some(Reason::Option)
}

/// The kernel's place from which on its bytes are doorbells; `None` if that can't be said now. Send lock held, and nobody is inside
/// a native send.
pub fn start_place(socket: &Socket, end: &End) -> Option<u64> {
    match socket.kind() {
        Kind::Internet => {
            let written = written(socket).ok()?;
            let place = written.agreed();
            if written.state != tcp::TCP_ESTABLISHED || place.is_none() {
                end.sender.keep_out();
            }
            if place.is_none() {
                super::pin::keep_out(socket, end, Reason::Miscounted);
            }
            place.filter(|_| end.sending() != Sending::KernelForGood)
        }
        Kind::Unix | Kind::Packets => {
            if kernel::untaken(socket.fd()) != Ok(0) {
                return None;
            }
            end.refused_starts.set(0);
            Some(0)
        }
    }
}

/// The kernel's place where the stream goes on there: no doorbell follows. ERANGE: the kernel has taken more or less than our doorbells
/// since the `Start`. Send lock held.
pub fn back_place(socket: &Socket, end: &End, bells: u64) -> Sys<u64> {
    let place = end.sender.started().wrapping_add(bells);
    if socket.is_unix() {
        return Ok(place);
    }
    match written(socket)? {
        written if written.place == place => Ok(place),
        // Nothing follows an end, which has a sequence number too.
        written if !matches!(written.state, tcp::TCP_ESTABLISHED | tcp::TCP_CLOSE_WAIT) => {
            Ok(place)
        }
        _ => Err(Errno::ERANGE),
    }
}

/// Where place 0 of the peer's marks lies in our count, if its `Start` is met now.
pub fn base(socket: &Socket, start: u64, taken: u64) -> u64 {
    match socket.kind() {
        Kind::Internet => 0,
        // All that was sent before was taken.
        Kind::Unix | Kind::Packets => taken.wrapping_sub(start),
    }
}

/// The kernel's place up to which all is taken: of a Unix connection, counted from the first time that it is asked for. (Counted by us from
/// then on, since a closed connection no longer tells whether its end was counted.)
pub fn taken(socket: &Socket, end: &End) -> Sys<u64> {
    if let Some(taken) = end.receiver.taken() {
        return Ok(taken);
    }
    let before = if socket.is_unix() { 0 } else { tcp::consumed(socket.fd())? };
    end.receiver.begin_count(before);
    Ok(before)
}

/// The kernel's place up to which all has arrived, in the same count. Grows while nobody receives (packets: while some bytes come).
pub fn received(socket: &Socket, end: &End) -> Sys<u64> {
    if socket.is_unix() {
        let mut unread = tcp::unread(socket.fd())?;
        if socket.is_packets() && unread == 0 {
            // One of no bytes is there, perhaps; it counts as one when it is taken.
            unread = (fd::pending(socket.fd(), libc::POLLIN) & libc::POLLIN != 0) as usize;
        }
        return Ok(taken(socket, end)? + unread as u64);
    }
    tcp::counts(socket.fd()).map(|counts| counts.received)
}

/// A connection is about to be attached.
pub fn attaching(socket: &Socket, end: &End) {
    socket.inode.set(inode(socket.fd()));
    if socket.is_packets() {
        packet_limit_changed(socket, end);
    }
}

/// It is, and whoever sets an option from now on sees that.
pub fn attached(socket: &Socket, end: &End) {
    if socket.is_packets() {
        packet_limit_changed(socket, end);
    }
    tune(socket, end);
}

/// No doorbell waits for company, unless the connection is the kernel's again.
pub fn tune(socket: &Socket, end: &End) {
    match socket.kind() {
        Kind::Internet if end.barred.is() => {
            tcp::send_as_asked(socket.fd(), end.no_delay.is(), end.cork.is())
        }
        Kind::Internet => tcp::send_at_once(socket.fd()),
        Kind::Unix | Kind::Packets => {}
    }
}

/// Packets that are longer than the ring takes, or than the kernel, go there, and it says what is to be said (EMSGSIZE).
pub fn packet_limit_changed(socket: &Socket, end: &End) {
    let Some(ring) = socket.outgoing() else { return };
    // KERNEL: 32 bytes less than SO_SNDBUF, which is 4,608 at least.
    let buffer = tcp::int_option(socket.fd(), libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0);
    let longest = packet_max_bytes(&ring).min((buffer - 32).max(1) as usize);
    end.packet_max.set(longest as u32);
}

/// Has the peer's end of the connection finished, as far as the kernel knows?
pub fn peer_ended(socket: &Socket) -> bool {
    match socket.kind() {
        // Receiving that we have shut down ourselves looks like an end.
        Kind::Internet => {
            let sends = [tcp::TCP_ESTABLISHED, tcp::TCP_FIN_WAIT1, tcp::TCP_FIN_WAIT2];
            tcp::counts(socket.fd()).is_ok_and(|counts| !sends.contains(&counts.state))
        }
        Kind::Unix | Kind::Packets => super::stream::kernel_says_end(socket),
    }
}

/// The kernel's number of a socket; 0 if that can't be said.
pub fn inode(fd: i32) -> u32 {
    kernel::inode(fd).unwrap_or(0)
}

/// An unconnected socket of the same kind.
pub fn unconnected(socket: &Socket) -> Sys<i32> {
    match socket.kind() {
        Kind::Internet => fd::unconnected(libc::AF_INET, libc::SOCK_STREAM),
        Kind::Unix => fd::unconnected(libc::AF_UNIX, libc::SOCK_STREAM),
        Kind::Packets => fd::unconnected(libc::AF_UNIX, libc::SOCK_SEQPACKET),
    }
}

/// What the connection still held is lost: whoever reads from it gets an error, not an orderly end.
pub fn break_off(socket: &Socket) {
    match socket.kind() {
        Kind::Internet => tcp::disconnect(socket.fd()),
        Kind::Unix | Kind::Packets => unix::break_off(socket),
    }
}
