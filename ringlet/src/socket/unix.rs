//! What Unix connections do otherwise than TCP's: their ends, control data beside the bytes, and pairs.
//!
//! KERNEL: a Unix connection has no packets under way. What one end closes or shuts, the other sees at once: a send fails with EPIPE
//! as soon as the peer has closed or shut down its receiving; and a peer that closes with bytes unread leaves ECONNRESET, which the
//! next receive (or SO_ERROR) takes, once, after all bytes.

use super::table::{End, Receiving, Sending, Socket, Stage, tables};
use super::{carrier, moving, stream};
use crate::reasons::Reason;
use libc::{msghdr, sockaddr};
use ringlet_core::layout::{NOT_SHUT, SHUT, SHUT_READ, SHUT_UNREAD};
use ringlet_core::leaving::Leaving;
use ringlet_core::memory::Buffers;
use ringlet_core::queue::Message;
use ringlet_core::ring::{Next, SegmentRing};
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::unix::{self as kernel, FromKernel};
use ringlet_linux::{fd, tcp};

/// A sender whose bytes are always under way finds no moment to enter the ring. At some of its sends (the 8th, 16th, 32nd ...) it waits
/// so long for the receiver to take all.
const WAIT_TAKEN_NS: u64 = 200_000;
const WAIT_TAKEN_FROM: u32 = 8;

/// Waits, seldom, until the peer has taken all that went through the kernel. Send lock held.
#[cold]
pub fn await_taken(socket: &Socket, end: &End) -> bool {
    let refused = end.refused_starts.add(1);
    if refused < WAIT_TAKEN_FROM || !refused.is_power_of_two() {
        return false;
    }
    let until = sys::now_ns() + WAIT_TAKEN_NS;
    while sys::now_ns() < until {
        match kernel::untaken(socket.fd()) {
            Ok(0) => return true,
            Ok(_) => sys::sched_yield(),
            Err(_) => return false,
        }
    }
    false
}

/// Once the peer has closed (or died): did it leave bytes of ours unread? Then ECONNRESET is pending. `taken` is an error that was just taken
/// from the kernel. True if the kernel's own error is accounted for by this.
///
/// What was unread when it closed, it says (`SHUT_*`). One that died says nothing, and then the ring and the kernel tell, except for
/// doorbells, which are nobody's bytes.
pub fn judge(socket: &Socket, end: &End, taken: i32) -> bool {
    let gone = libc::POLLHUP | libc::POLLERR;
    if end.judged.is() || taken == 0 && fd::pending(socket.fd(), 0) & gone == 0 {
        return end.judged.is();
    }
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else {
        return false;
    };
    let said = incoming.control().sender.shut.load(Ordering::Acquire);
    // Shut down from both sides, or from ours alone, is not closed.
    let alive = said == SHUT || said == NOT_SHUT && end.shut_receiving.is();
    if alive || end.judged.swap(1) != 0 {
        return false;
    }
    let of_kernel = if taken != 0 { taken } else { tcp::take_error(socket.fd()) };
    // While we send by the ring the kernel holds nothing else of ours; one may have come after the peer had taken the others.
    let only_doorbells = end.bells_only.is();
    let _held = end.send_lock.try_take();
    let unread = match said {
        NOT_SHUT => end.tx.outstanding_bytes(&outgoing) > 0,
        _ => said == SHUT_UNREAD,
    };
    if unread || of_kernel != 0 && !only_doorbells {
        end.pending_error.set(libc::ECONNRESET as u32);
    }
    end.ended.set(end.ended.get().max(1));
    socket.kernel_news.set(1);
    true
}

/// The kernel has said that no more bytes come, and the ring is empty: the end of the stream, or the error that it ends with.
pub fn end_of_stream(end: &End) -> Sys<Option<usize>> {
    match end.pending_error.swap(0) {
        0 => Ok(Some(0)),
        error => Err(Errno(error as i32)),
    }
}

/// KERNEL: a send that waits while the peer closes with bytes unread takes the error, and raises no signal.
pub fn broken(socket: &Socket, end: &End) -> Option<Errno> {
    judge(socket, end, 0);
    let error = end.pending_error.swap(0);
    (error != 0).then_some(Errno(error as i32))
}

/// The process is about to end by itself, and nobody else holds this end: from now on the peer asks the kernel before it sends, so that
/// it learns of the end with its next send. (What this end still does is served: it only receives through the kernel.)
pub fn exiting(socket: &Socket) {
    if socket.stage() == Stage::Attached
        && let Some(incoming) = socket.incoming()
    {
        incoming.control().close();
    }
}

/// KERNEL: after SHUT_RD the peer's sends fail at once. It must not wait for room either. Our own direction goes back to the kernel: the
/// peer can ring for its room no more. Send lock held, before the kernel's shutdown.
pub fn shut_receiving(socket: &Socket, end: &End) {
    end.shut_receiving.set(1);
    if let Some(incoming) = socket.incoming() {
        incoming.control().close();
        moving::wake_sender(socket, &incoming);
    }
    if end.sending() == Sending::Ring
        && let Some(outgoing) = socket.outgoing()
    {
        moving::go_back(socket, end, &outgoing, Sending::KernelForGood, Reason::Closing);
    }
}

/// Bytes that nobody can send again are lost with the connection: its descriptors name an unconnected socket from now on, from which a
/// receive fails (EINVAL, ENOTCONN). KERNEL: nothing can dissolve a Unix connection, or give it an error.
pub fn break_off(socket: &Socket) {
    let Some(tables) = tables() else { return };
    let Ok(other) = carrier::unconnected(socket) else { return };
    for (number, _) in tables.known_fds().filter(|(_, each)| core::ptr::eq(*each, socket)) {
        fd::replace(number, other);
    }
    sys::close(other);
}

/// See `ringlet_linux::unix::untaken`.
pub fn untaken(socket: &Socket) -> Sys<usize> {
    kernel::untaken(socket.fd())
}

pub fn at_mark(socket: &Socket) -> bool {
    kernel::at_mark(socket.fd())
}

// ---- messages with control data, addresses ----

/// recvmsg. KERNEL: control data ends a message, and comes with its bytes; the address is the one that the peer is bound to.
pub fn receive_message(
    socket: &Socket,
    message: &mut msghdr,
    to: &mut Buffers,
    flags: i32,
) -> Sys<usize> {
    let asked = *message;
    let whole = asked.msg_controllen != 0 || socket.is_packets();
    let mut from = FromKernel::new(whole.then_some(&asked));
    let got = stream::receive_by(socket, to, flags, &mut from)?;
    message.msg_controllen = from.control_bytes;
    message.msg_flags = from.flags | flags & libc::MSG_CMSG_CLOEXEC;
    if !message.msg_name.is_null() {
        let name = message.msg_name.cast();
        let anything = got > 0 || from.named;
        let room = message.msg_namelen;
        message.msg_namelen = if anything { peer_name(socket, name, room) } else { 0 };
    }
    Ok(got)
}

/// The address that a receive tells; returns how long it is, which may be more than there is room for.
fn peer_name(socket: &Socket, to: *mut sockaddr, room: u32) -> u32 {
    // KERNEL: of a peer that is bound to nothing only the family is known, and a receive tells not even that.
    kernel::peer_name(socket.fd(), to, room).filter(|len| *len > 2).unwrap_or(0)
}

/// Does this message carry more than bytes?
pub fn has_control(message: &msghdr) -> bool {
    !message.msg_control.is_null() && message.msg_controllen != 0
}

/// The kernel's part of a sendmsg with control data: all at once, since control data goes with the first of its bytes. Send lock held.
pub fn send_control(
    socket: &Socket,
    end: &End,
    message: &msghdr,
    from: &mut Buffers,
    flags: i32,
) -> Sys<usize> {
    let Some(ring) = socket.outgoing() else { return Err(Errno::EBADF) };
    moving::publish_attached(socket, end);
    moving::step_aside(socket, end, &ring, Reason::Ancillary)?;
    let sent = kernel::send_message(socket.fd(), message, flags | libc::MSG_DONTWAIT)?;
    let mut left = sent.min(from.remaining());
    while left > 0 {
        left -= from.take(left).1;
    }
    Ok(sent)
}

// ---- packets ----

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
pub fn next_packet(
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
        true if !moving::published(end, ring) => Next::Empty,
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

/// From the kernel, as `stream::receive_kernel`: first what waits there, then the ring. (A packet of no bytes waits too, and FIONREAD
/// does not tell.)
pub fn receive_kernel(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    from: &mut FromKernel,
) -> Sys<Option<usize>> {
    let waiting = fd::pending(socket.fd(), libc::POLLIN | libc::POLLRDHUP);
    // (While the ring can be taken up, the kernel has no packet.)
    let over = waiting & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0;
    let there = (waiting & libc::POLLIN != 0 && !over) as usize;
    if moving::follow(socket, end, ring, over, there)?.is_none() {
        return Ok(None);
    }
    if waiting & (libc::POLLHUP | libc::POLLERR) != 0 {
        judge(socket, end, 0);
    }
    if let error @ 1.. = end.pending_error.swap(0) {
        return Err(Errno(error as i32));
    }
    if waiting == 0 {
        socket.kernel_news.set(0);
        return Err(Errno::EAGAIN);
    }
    stream::receive_native(socket, end, to, usize::MAX, flags, from).map(Some)
}

/// Would a receive find a packet (or the end)?
pub fn packet_waits(socket: &Socket) -> Sys<bool> {
    let end = socket.end();
    let _held = end.receive_lock.take().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.incoming() else { return Ok(true) };
    for _ in 0..moving::CHANGES_MAX {
        let before = end.receiving();
        // What waited in the kernel before no mark was in the ring is the program's.
        let waiting = fd::pending(socket.fd(), libc::POLLIN) != 0;
        match moving::settle(socket, end, &ring) {
            Ok(()) | Err(Errno::EAGAIN) => {}
            Err(error) => return Err(error),
        }
        match end.receiving() {
            Receiving::Ring => return Ok(end.rx.has_bytes(&ring)),
            Receiving::Kernel if before == Receiving::Kernel => return Ok(waiting),
            // Behind doorbells that are still to come.
            Receiving::Discarding => return Ok(false),
            _ => {}
        }
    }
    Ok(true)
}

/// Sends a packet that the receiver has left unread in the ring again.
#[allow(unsafe_code)]
pub fn send_again(socket: &Socket, ring: &SegmentRing, packet: &Message) -> Sys<()> {
    // SAFETY: `record::look` has checked where the packet lies, which stays mapped while the send lock is held.
    unsafe { kernel::send_packet(socket.fd(), packet.pointer(ring), packet.len()) }
}
