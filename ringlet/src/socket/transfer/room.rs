//! Room in a full ring. Senders look for some, and sets and polls; where none comes, the direction leaves the ring.

use crate::reasons::Reason;
use crate::socket::table::{Receiving, Sending, Socket};
use crate::socket::{moving, words};
use ringlet_core::layout::NOT_SHUT;
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;

/// A send that finds a ring full for so long takes it that nobody reads there; and so does a look for room, if bytes wait for us: both ends may be
/// about to send first.
pub const STALLED_NS: u64 = 10_000_000;

/// Else a look is more patient: whoever reads seldom, but does, is served by the ring.
const LOOKS_STALLED_NS: u64 = 160_000_000;

/// A set or a poll that waits for room looks this often at least: bytes may have come for us.
pub const LOOK_NS: u64 = 40_000_000;

/// Has our ring no room for who waits for some?
pub fn waits_for_room(socket: &Socket) -> bool {
    let end = socket.end();
    let full = |ring: SegmentRing| ring.control().is_taken() && !end.tx.writable(&ring);
    end.sending() == Sending::Ring && socket.outgoing().is_some_and(full)
}

/// And can no doorbell tell of it? The peer can put none once its direction has ended, or is back on the kernel, though we have not read so far. (It
/// comes to that by something that the kernel tells.)
pub fn waits_untold(socket: &Socket) -> bool {
    let rx = &socket.end().rx;
    let leaves = |ring: SegmentRing| rx.mark_ahead(&ring).is_some();
    waits_for_room(socket) && (!can_ring_for_room(socket) || socket.incoming().is_some_and(leaves))
}

/// Can the peer, which receives, wake us by a byte: only while its own direction is in the ring, and has not ended.
pub fn can_ring_for_room(socket: &Socket) -> bool {
    // ORDER: Acquire; pairs with `words::say_end`.
    let ends = |ring: SegmentRing| ring.control().sender.shut.load(Ordering::Acquire) != NOT_SHUT;
    socket.end().receiving() == Receiving::Ring && !socket.incoming().is_some_and(ends)
}

/// For a wait for room at which nobody looks now and then, as in a set that is in another one: the kernel is to tell.
pub fn leave_full(socket: &Socket) -> bool {
    // (Another thread that has the lock sends, or goes back itself.)
    socket.end().send_lock.try_take().is_some_and(|_held| leave_if_full(socket))
}

/// Send lock held.
fn leave_if_full(socket: &Socket) -> bool {
    let Some(ring) = socket.outgoing() else { return false };
    let full = waits_for_room(socket) && !words::has_left(&ring);
    if full {
        moving::go_back(socket, socket.end(), &ring, Sending::Kernel, Reason::Stalled);
    }
    full
}

/// The same where no doorbell can tell of room.
pub fn leave_untold(socket: &Socket) -> bool {
    waits_untold(socket) && leave_full(socket)
}

/// A send has found no room. Programs that first send and then receive count on what the kernel's buffers hold: if the receiver has read nothing for a
/// while, the rest goes there; the ring is entered again once it is drained. Has our direction left?
#[cold]
pub fn leave_stalled(socket: &Socket) -> bool {
    is_full_for(socket, STALLED_NS) && leave_full(socket)
}

/// The same, of a look for room.
#[cold]
pub fn leave_unread(socket: &Socket) -> bool {
    is_full_for(socket, patience(socket)) && leave_full(socket)
}

/// A look at one that nobody looks at. Does it wait for room, and has our direction left? (The send lock keeps the ring mapped, though a signal handler
/// closes the connection.)
pub fn look_at_rest(socket: &Socket) -> (bool, bool) {
    let Some(_held) = socket.end().send_lock.try_take() else { return (true, false) };
    if !waits_for_room(socket) {
        return (false, false);
    }
    (true, is_full_for(socket, patience(socket)) && leave_if_full(socket))
}

fn is_full_for(socket: &Socket, ns: u64) -> bool {
    let end = socket.end();
    end.stalls.full_for_ns(end.tx.progress()) > ns
}

/// After what time a look for room is to be followed by another one.
pub fn look_after(socket: &Socket) -> u64 {
    patience(socket).min(LOOK_NS)
}

/// So long a receiver may read nothing.
fn patience(socket: &Socket) -> u64 {
    let end = socket.end();
    let unread = |ring: SegmentRing| end.rx.has_bytes(&ring);
    match end.receiving() == Receiving::Ring && socket.incoming().is_some_and(unread) {
        true => STALLED_NS,
        false => LOOKS_STALLED_NS,
    }
}
