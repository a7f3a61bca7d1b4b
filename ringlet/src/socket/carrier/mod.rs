//! What differs between the kinds of kernel connection that can carry one of ours. Each kind is a module, what they are asked is `Carrier`, and
//! the functions here ask the one that a socket has: whoever moves bytes does not ask which it is.
//!
//! How the kernel counts: TCP tells how many bytes were ever written and read, so a mark of `handover` names a place in all that
//! the connection has carried. It tells so by several measures, and where one contradicts another (packets that could not be sent; a socket
//! in a BPF sockmap, whose bytes go past TCP) no place can be named: the connection stays on the kernel, or ends with an error. A Unix connection tells only whether all that was sent is also taken. Then it can be moved: a
//! `Start` stands at place 0, and both ends count the doorbells that follow, up to a `Back`. (The receiver counts on, and notes
//! where that place lies in its count: `base`.) Where a Unix connection carries packets, a doorbell is a packet of one byte.

pub mod packets;
mod tcp;
mod unix_stream;

use super::table::{End, Kind, Socket, Stage, Tables};
use super::{pin, view, words};
use crate::config::Config;
use crate::reasons::Reason;
use packets::Packets;
use ringlet_core::handover::{Incoming, Step};
use ringlet_core::memory::Buffers;
use ringlet_core::ring::SegmentRing;
use ringlet_linux::fd;
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::tcp as kernel;
use ringlet_linux::unix::{self, FromKernel};
use tcp::Tcp;
use unix_stream::UnixStream;

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
    /// Has it TCP_NODELAY and TCP_CORK?
    pub has_delays: bool,
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
    has_delays: false,
};

/// (A UDP socket has no carrier; what is asked of any socket is answered as for TCP.)
#[inline(always)]
pub fn facts(socket: &Socket) -> Facts {
    match socket.kind() {
        Kind::Packets => Packets::FACTS,
        Kind::UnixStream => UnixStream::FACTS,
        Kind::Tcp | Kind::Datagrams => Tcp::FACTS,
    }
}

/// Declares the trait, and for each of its functions one of the same name that asks the carrier of the socket.
macro_rules! carriers {
    (
        $($(#[$about:meta])* fn $name:ident($socket:ident: &Socket $(, $arg:ident: $type:ty)*) $(-> $result:ty)? $({ $($body:tt)* })?;)*
    ) => {
        /// What a kind of kernel connection has of its own. Where nothing else is said, the kind is a Unix stream.
        pub trait Carrier {
            const FACTS: Facts = UNIX_STREAM;

            $($(#[$about])* fn $name($socket: &Socket $(, $arg: $type)*) $(-> $result)? { $($($body)*)? })*
        }

        $($(#[$about])* pub fn $name($socket: &Socket $(, $arg: $type)*) $(-> $result)? {
            match $socket.kind() {
                Kind::Packets => Packets::$name($socket $(, $arg)*),
                Kind::UnixStream => UnixStream::$name($socket $(, $arg)*),
                Kind::Tcp | Kind::Datagrams => Tcp::$name($socket $(, $arg)*),
            }
        })*
    };
}

carriers! {
    // ---- whether it can be moved ----

    /// The two ends of a connection that may be moved; else why not, or that it is not yet known (`None`).
    fn ends(socket: &Socket, tables: &Tables) -> Result<Ends, Option<Reason>> { unix_stream::ends(socket, tables) };
    /// Do the kernel's counts name the places of the connection? Asked once, before it is attached.
    fn countable(_socket: &Socket) -> Result<(), Reason> { Ok(()) };
    /// Is an option set whose meaning lies in the kernel's queues?
    fn has_unserved_option(socket: &Socket) -> bool { unix_stream::has_unserved_option(socket) };
    /// The connection is about to be shut down, perhaps before it is attached.
    fn shutting_down(socket: &Socket) {
        // A Unix connection moves whole, or not at all.
        if socket.stage() != Stage::Attached {
            pin::to_kernel(socket, Reason::Closing);
        }
    };
    /// The longest packet that the ring and the kernel take may have changed.
    fn limits_changed(_socket: &Socket, _end: &End) {};
    /// No doorbell waits for company, unless the connection is the kernel's again.
    fn tune(_socket: &Socket, _end: &End) {};

    // ---- places ----

    /// How much of our direction the kernel has got in all, if its measures of that agree.
    fn written_place(_socket: &Socket) -> Option<u64> { None };
    /// Bytes that it has sent and received, if the kernel tells.
    fn carried(_socket: &Socket) -> (usize, usize) { (0, 0) };
    /// The kernel's place from which on its bytes are doorbells; `None` if that can't be said now. Send lock held, and nobody is inside
    /// a native send.
    fn start_place(socket: &Socket, end: &End) -> Option<u64> {
        if unix::untaken(socket.fd()) != Ok(0) {
            return None;
        }
        end.refused_starts.set(0);
        Some(0)
    };
    /// A sender whose bytes are always under way finds no moment to enter the ring: waits, seldom, until the peer has taken all. Send lock
    /// held.
    fn await_start(socket: &Socket, end: &End) -> bool { unix_stream::await_taken(socket, end) };
    /// The kernel's place where the stream goes on there: no doorbell follows. ERANGE: the kernel has taken more or less than our doorbells
    /// since the `Start`. Send lock held.
    fn back_place(_socket: &Socket, end: &End, bells: u64) -> Sys<u64> { Ok(place_behind(end, bells)) };
    /// Where place 0 of the peer's marks lies in our count, if its `Start` is met now.
    fn base(_socket: &Socket, start: u64, taken: u64) -> u64 {
        // All that was sent before was taken.
        taken.wrapping_sub(start)
    };
    /// What was taken before we count.
    fn taken_before(_socket: &Socket) -> Sys<u64> { Ok(0) };
    /// The kernel's place up to which all has arrived, in the count of `taken`. Grows while nobody receives (packets: while some bytes come).
    fn received(socket: &Socket, end: &End) -> Sys<u64> {
        Ok(taken(socket, end)? + kernel::unread(socket.fd())? as u64)
    };
    /// Nothing waits in the kernel. Was all that came by it taken by calls that count?
    fn has_counted_all(_socket: &Socket, _end: &End) -> bool { true };
    /// What we have sent through the kernel, and the peer has not taken, as far as a Unix connection tells.
    fn untaken(socket: &Socket) -> Sys<usize> { unix::untaken(socket.fd()) };
    /// What the kernel has still to bring to the other end's queue.
    fn undelivered(_socket: &Socket) -> usize { 0 };

    // ---- receiving and sending by the kernel ----

    /// From the kernel, before the peer has moved its direction. In this order: count what waits in the kernel, then look for the
    /// peer's mark; only bytes that were counted before no mark was there are known to be data.
    fn receive_kernel(socket: &Socket, end: &End, side: &impl Incoming<Error = Errno>, to: &mut Buffers, flags: i32, from: &mut FromKernel) -> Sys<Option<usize>> {
        let waiting = kernel::unread(socket.fd())?;
        match side.follow(false, waiting as u64)? {
            None => return Ok(None),
            Some(Step::Read(n)) => {
                return receive_native(socket, end, to, n as usize, flags, from).map(Some);
            }
            Some(_) => {}
        }
        let peeked = kernel::receive_into(socket.fd(), &mut [0; 1], libc::MSG_PEEK | libc::MSG_DONTWAIT);
        match Self::classify(socket, end, peeked) {
            Ok(0) if side.follow(true, 0)?.is_none() => Ok(None),
            Ok(0) => {
                crate::interconnect::mirrored::break_off_if_orphan(socket);
                Self::end_of_kernel(socket, end)
            }
            // KERNEL: at the urgent mark nothing counts as waiting, though data may follow. (Who sends urgent data enters the ring no more.)
            Ok(_) if kernel::unread(socket.fd())? == 0 => {
                receive_native(socket, end, to, usize::MAX, flags, from).map(Some)
            }
            Ok(_) => Ok(None),
            Err(error) => {
                socket.kernel_news.set(0);
                Err(error)
            }
        }
    };
    /// Waits more in the kernel that one receive would take together? KERNEL: a Unix one goes no further than the urgent byte, and drops that if
    /// it begins there.
    fn goes_on(socket: &Socket) -> bool { has_unread(socket) && !unix::at_mark(socket.fd()) };
    /// Sends again, through the kernel, what the receiver has left unread behind the first `used` bytes of the oldest record; how much of it.
    /// Send lock held.
    fn send_again(socket: &Socket, end: &End, ring: &SegmentRing, used: u64) -> Sys<u64> {
        let mut piece = [0u8; 2048];
        match end.tx.oldest(ring, used as usize, &mut piece) {
            [] => {
                end.resent_at.set(0);
                Ok(0)
            }
            bytes => {
                if let sent @ 1.. = Self::resent_by_the_dead(socket, end, used, bytes.len() as u64) {
                    return Ok(sent);
                }
                words::sends_uncounted(end, ring);
                let sent = kernel::send_from(socket.fd(), bytes, libc::MSG_DONTWAIT);
                if sent.is_err() {
                    end.resent_at.set(0);
                }
                sent.map(|n| n as u64)
            }
        }
    };
    /// A process that shares the end may have been killed between a send and its note: how much of what follows the first `used` bytes of the
    /// oldest record (at `most`) has the kernel got already? If none, one is under way from now on. (A Unix connection does not tell.)
    fn resent_by_the_dead(_socket: &Socket, _end: &End, _used: u64, _most: u64) -> u64 { 0 };

    // ---- ends ----

    /// Has the peer's end of the connection finished, as far as the kernel knows?
    fn peer_ended(socket: &Socket) -> bool { kernel_says_end(socket) };
    /// The kernel may say that the connection is over; `taken` is an error that was just taken from it. True if that is accounted for, and not
    /// what the program is to be told.
    fn judge(socket: &Socket, end: &End, taken: i32) -> bool { unix_stream::judge(socket, end, taken) };
    /// What a look has found in the kernel, with an end or reset as the program is to see it.
    fn classify(socket: &Socket, end: &End, found: Sys<usize>) -> Sys<usize> {
        match found {
            Ok(0) | Err(Errno::ECONNRESET) => {
                Self::judge(socket, end, found.err().map_or(0, |error| error.0));
                Ok(0)
            }
            other => other,
        }
    };
    /// The kernel has said that no more bytes come, and the ring is empty: the end of the stream, or the error that it ends with.
    fn end_of_stream(socket: &Socket, end: &End) -> Sys<Option<usize>> {
        note_end(socket, end);
        told_end(end)
    };
    /// The same where the ring was not in use.
    fn end_of_kernel(_socket: &Socket, end: &End) -> Sys<Option<usize>> { told_end(end) };
    /// KERNEL: a send on a Unix connection that waits while the peer closes with bytes unread takes the error, and raises no signal.
    fn broken(socket: &Socket, end: &End) -> Option<Errno> {
        Self::judge(socket, end, 0);
        let error = end.pending_error.swap(0);
        (error != 0).then_some(Errno(error as i32))
    };
    /// The peer seems to have ended, so that our direction is about to go back: an error, or how much the send has lost by it. Send lock held.
    fn ends_in_ring(socket: &Socket, end: &End, _ring: &SegmentRing, _from: &mut Buffers) -> Sys<Option<usize>> {
        Self::judge(socket, end, 0);
        Ok(None)
    };
    /// Before a send through the kernel: how much of it is lost, since the peer died with doorbells unread? Send lock held.
    fn lost_by_death(_socket: &Socket, _end: &End, _ring: &SegmentRing, _from: &mut Buffers) -> Option<usize> { None };
    /// Before our direction steps aside: has the peer died with bytes of ours unread? Send lock held.
    fn died_unread(_socket: &Socket, _end: &End, _ring: &SegmentRing) -> Sys<()> { Ok(()) };
    /// The kernel's connection is over by a reset: does the program see it as open our way?
    fn is_open_after_reset(_socket: &Socket, _end: &End) -> bool { false };
    /// What poll is to say of what the kernel says.
    fn shown(_socket: &Socket, _end: &End, kernel: i16) -> i16 { kernel };
    /// How a close is told to the peer; `shut`: what was told before.
    fn end_told(_socket: &Socket, _shut: u32, unread: bool) -> u32 { unix_stream::end_told(unread) };
    /// The process is about to end by itself, and nobody else holds this end.
    fn exiting(socket: &Socket) { unix_stream::exiting(socket) };
    /// The same, with some left that is to be sent again. Send lock held.
    fn exiting_unsent(_socket: &Socket, _end: &End) {};
    /// What the connection still held is lost: whoever reads from it gets an error, not an orderly end.
    fn break_off(socket: &Socket) { unix_stream::break_off(socket) };
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
    if kernel::is_tcp(fd) {
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

/// Options whose meaning lies in the kernel's queues.
pub fn unserved_option(socket: &Socket) -> Option<Reason> {
    let either = is_on(socket, libc::SO_RCVLOWAT, 2) || is_on(socket, libc::SO_OOBINLINE, 1);
    (either || has_unserved_option(socket)).then_some(Reason::Option)
}

fn is_on(socket: &Socket, option: i32, from: i32) -> bool {
    kernel::int_option(socket.fd(), libc::SOL_SOCKET, option).is_ok_and(|value| value >= from)
}

fn place_behind(end: &End, bells: u64) -> u64 {
    end.sender.started().wrapping_add(bells)
}

/// The kernel's place up to which all is taken: of a Unix connection, counted from the first time that it is asked for. (Counted by us from
/// then on, since a closed connection no longer tells whether its end was counted.)
pub fn taken(socket: &Socket, end: &End) -> Sys<u64> {
    if let Some(taken) = end.receiver.taken() {
        return Ok(taken);
    }
    let before = taken_before(socket)?;
    end.receiver.begin_count(before);
    Ok(before)
}

/// A connection is about to be attached.
pub fn attaching(socket: &Socket, end: &End) {
    socket.inode.set(inode(socket.fd()));
    limits_changed(socket, end);
}

/// It is, and whoever sets an option from now on sees that.
pub fn attached(socket: &Socket, end: &End) {
    limits_changed(socket, end);
    tune(socket, end);
}

/// The kernel's number of a socket; 0 if that can't be said.
pub fn inode(fd: i32) -> u32 {
    unix::inode(fd).unwrap_or(0)
}

/// An unconnected socket of the same kind.
pub fn unconnected(socket: &Socket) -> Sys<i32> {
    let (domain, socket_type) = facts(socket).of;
    fd::unconnected(domain, socket_type)
}

fn has_unread(socket: &Socket) -> bool {
    matches!(kernel::unread(socket.fd()), Ok(1..))
}

pub fn receive_native(
    socket: &Socket,
    end: &End,
    to: &mut Buffers,
    max: usize,
    flags: i32,
    from: &mut FromKernel,
) -> Sys<usize> {
    let flags = flags & (MSG_SERVED & !libc::MSG_WAITALL) | libc::MSG_DONTWAIT;
    // Of a packet, how long it was is counted, though a part is lost; and it counts, though it is of no bytes (`received`).
    let packets = facts(socket).has_boundaries;
    let (room, length) = (to.remaining(), if packets { libc::MSG_TRUNC } else { 0 });
    match from.receive(socket.fd(), to, max, flags | length) {
        Ok(n) => {
            if flags & libc::MSG_PEEK == 0 {
                end.receiver.count_taken(n.max(packets as usize) as u64);
                view::count_kernel_bytes(socket, 0, n);
            }
            Ok(if packets && flags & libc::MSG_TRUNC == 0 { n.min(room) } else { n })
        }
        Err(error) => {
            socket.kernel_news.set(0);
            Err(error)
        }
    }
}

/// Has the kernel seen the peer's end of the connection finish?
pub fn kernel_says_end(socket: &Socket) -> bool {
    let ended = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
    fd::pending(socket.fd(), libc::POLLRDHUP) & ended != 0
}

/// The peer's end was met; what it was before (`End::ended`).
fn note_end(socket: &Socket, end: &End) -> u32 {
    let before = end.ended.get();
    if before == 0 {
        end.ended.set(1);
    }
    socket.kernel_news.set(1);
    before
}

fn told_end(end: &End) -> Sys<Option<usize>> {
    match end.pending_error.swap(0) {
        0 => Ok(Some(0)),
        error => Err(Errno(error as i32)),
    }
}
