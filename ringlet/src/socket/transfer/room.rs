//! Room in a full ring. Senders look for some, and sets and polls; where none comes, the direction leaves the ring.

use crate::reasons::Reason;
use crate::socket::table::{Receiving, Sending, Socket};
use crate::socket::{moving, words};
use ringlet_core::layout::NOT_SHUT;
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;

/// If bytes wait for us in a connection whose ring stays full so long, both ends may be about to send first.
const BOTH_SEND_NS: u64 = 10_000_000;

/// A ring that stays full so long is perhaps not being read. Each time that it was left for that, twice as long: whoever reads seldom, but does, is
/// served by the ring.
const STALLED_NS: u64 = 160_000_000;
const TWICE_AS_LONG_MOST: u32 = 3;

/// Whoever waits for room looks this often at least: bytes may have come for us.
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
    let end = socket.end();
    // (Another thread that has the lock sends, or goes back itself.)
    let (Some(_held), Some(ring)) = (end.send_lock.try_take(), socket.outgoing()) else {
        return false;
    };
    let full = waits_for_room(socket) && !words::has_left(&ring);
    if full {
        moving::go_back(socket, end, &ring, Sending::Kernel, Reason::Stalled);
    }
    full
}

/// The same where no doorbell can tell of room.
pub fn leave_untold(socket: &Socket) -> bool {
    waits_untold(socket) && leave_full(socket)
}

/// A look for room has found none. Programs that first send and then receive count on what the kernel's buffers hold: if the receiver has read nothing for
/// a while, the rest goes there; the ring is entered again once it is drained. Has our direction left?
#[cold]
pub fn leave_stalled(socket: &Socket) -> bool {
    let stalls = &socket.end().stalls;
    let stalled = stalls.full_for_ns(socket.end().tx.progress()) > patience(socket);
    let left = stalled && leave_full(socket);
    if left {
        stalls.leave();
    }
    left
}

/// After what time a wait for room is to look again.
pub fn look_after(socket: &Socket) -> u64 {
    patience(socket).min(LOOK_NS)
}

/// So long a receiver may read nothing.
fn patience(socket: &Socket) -> u64 {
    let end = socket.end();
    let unread = |ring: SegmentRing| end.rx.has_bytes(&ring);
    if end.receiving() == Receiving::Ring && socket.incoming().is_some_and(unread) {
        return BOTH_SEND_NS;
    }
    STALLED_NS << end.stalls.times().min(TWICE_AS_LONG_MOST)
}
