//! Unix sequenced packets: each record of the ring is one, and what they do otherwise than Unix streams.

use super::contract::Carrier;
use super::kernel::{kernel_says_end, receive_native};
use super::unix_stream::judge;
use crate::socket::table::{End, Receiving, Socket};
use crate::socket::{channel, words};
use ringlet_core::handover::{CHANGES_MAX, Incoming};
use ringlet_core::layout::SHUT_READ;
use ringlet_core::memory::Buffers;
use ringlet_core::ring::{Next, SegmentRing, packet_max_bytes};
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::unix::{self, FromKernel};
use ringlet_linux::{fd, tcp};

pub struct Packets;

impl Carrier for Packets {
    /// Packets that are longer than the ring takes, or than the kernel, go there, and it says what is to be said (EMSGSIZE).
    fn limits_changed(socket: &Socket, end: &End) {
        let Some(ring) = socket.outgoing() else { return };
        // KERNEL: 32 bytes less than SO_SNDBUF, which is 4,608 at least.
        let buffer = tcp::int_option(socket.fd(), libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0);
        let longest = packet_max_bytes(&ring).min((buffer - 32).max(1) as usize);
        end.packet_max.set(longest as u32);
    }

    fn received(socket: &Socket, end: &End) -> Sys<u64> {
        let unread = match tcp::unread(socket.fd())? {
            // One of no bytes is there, perhaps; it counts as one when it is taken.
            0 => (fd::pending(socket.fd(), libc::POLLIN) & libc::POLLIN != 0) as usize,
            unread => unread,
        };
        Ok(Self::taken(socket, end)? + unread as u64)
    }

    /// Packets may wait there still: nothing tells an empty one from the end.
    fn has_counted_all(_socket: &Socket, _end: &End) -> bool {
        false
    }

    /// First what waits there, then the ring. (A packet of no bytes waits too, and FIONREAD does not tell.)
    fn receive_kernel(
        socket: &Socket,
        end: &End,
        side: &impl Incoming<Error = Errno>,
        to: &mut Buffers,
        flags: i32,
        from: &mut FromKernel,
    ) -> Sys<Option<usize>> {
        let news = socket.kernel_news.number();
        let waiting = fd::pending(socket.fd(), libc::POLLIN | libc::POLLRDHUP);
        // (While the ring can be taken up, the kernel has no packet.)
        let over = waiting & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0;
        let there = waiting & libc::POLLIN != 0 && !over;
        if side.follow(over, there as u64)?.is_none() {
            return Ok(None);
        }
        if over && tcp::unread(socket.fd()) == Ok(0) {
            channel::is_cut_short(socket, kernel_says_end);
        }
        if waiting & (libc::POLLHUP | libc::POLLERR) != 0 {
            judge(socket, end, 0);
        }
        if let error @ 1.. = end.pending_error.swap(0) {
            return Err(Errno(error as i32));
        }
        if waiting == 0 {
            socket.kernel_news.nothing_since(news);
            return Err(Errno::EAGAIN);
        }
        receive_native(socket, end, to, usize::MAX, flags, from).map(Some)
    }

    #[allow(unsafe_code)]
    fn send_again(socket: &Socket, end: &End, ring: &SegmentRing, used: u64) -> Sys<u64> {
        let Some(packet) = end.tx.oldest_packet(ring).filter(|_| used == 0) else { return Ok(0) };
        words::sends_uncounted(end, ring);
        // SAFETY: `record::look` has checked where the packet lies, which stays mapped while the send lock is held.
        unsafe { unix::send_packet(socket.fd(), packet.pointer(ring), packet.len()) }?;
        Ok(packet.len().max(1) as u64)
    }
}

/// KERNEL: of packets, the error of a peer that has closed with some unread comes before those that are there, in whichever call is
/// next. Receive lock held.
pub fn error_first(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    let now = sys::ticks();
    let closed = ring.control().sender.shut.load(Ordering::Acquire) >= SHUT_READ;
    if !end.judged.is() && (closed || now.wrapping_sub(socket.kernel_asked.get()) > ASK_TICKS) {
        socket.kernel_asked.set(now);
        judge(socket, end, 0);
    }
    match end.pending_error.swap(0) {
        0 => Ok(()),
        error => Err(Errno(error as i32)),
    }
}

/// A peer that was killed says nothing: the kernel is asked this often (about a millisecond).
const ASK_TICKS: u64 = 3_000_000;

/// The next packet of the ring, as `Rx::pop_packet` (or peeked at). KERNEL: with MSG_TRUNC it counts for its whole length.
pub fn next(
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    from: &mut FromKernel,
) -> Next {
    let room = to.remaining();
    let next = match flags & libc::MSG_PEEK != 0 {
        false => end.rx.pop_packet(ring, to),
        // Looked for first: what is published between two looks is no fault.
        true if !words::published(end, ring) => Next::Empty,
        true => match (end.rx.peek_packet(ring, to), end.rx.mark(ring)) {
            (Some(len), _) => Next::Bytes(len, false),
            (None, Some(mark)) => Next::Mark(mark),
            (None, None) => Next::Corrupt,
        },
    };
    let Next::Bytes(len, look) = next else { return next };
    from.named = true;
    if len > room {
        from.flags |= libc::MSG_TRUNC;
    }
    Next::Bytes(if flags & libc::MSG_TRUNC != 0 { len } else { len.min(room) }, look)
}

/// Would a receive find a packet (or the end)? Receive lock held.
pub fn wait_for_us(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    side: &impl Incoming<Error = Errno>,
) -> Sys<bool> {
    for _ in 0..CHANGES_MAX {
        let before = end.receiving();
        // What waited in the kernel before no mark was in the ring is the program's.
        let waiting = fd::pending(socket.fd(), libc::POLLIN) != 0;
        match side.settle() {
            Ok(_) | Err(Errno::EAGAIN) => {}
            Err(error) => return Err(error),
        }
        match end.receiving() {
            Receiving::Ring => return Ok(end.rx.has_bytes(ring)),
            Receiving::Kernel if before == Receiving::Kernel => return Ok(waiting),
            // Behind doorbells that are still to come.
            Receiving::Discarding => return Ok(false),
            _ => {}
        }
    }
    Ok(true)
}
