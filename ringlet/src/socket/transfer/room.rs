//! Room in a full ring. Senders look for some, and sets and polls; where none comes, the direction leaves the ring.

use crate::reasons::Reason;
use crate::socket::table::{End, Sending, Socket};
use crate::socket::{moving, words};
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::SegmentRing;
use ringlet_linux::sys;

/// A ring that stays full so long is not being read.
pub const STALLED_NS: u64 = 10_000_000;

/// Has our ring no room for who waits for some?
pub fn waits_for_room(socket: &Socket) -> bool {
    let end = socket.end();
    let full = |ring: SegmentRing| ring.control().is_taken() && !end.tx.writable(&ring);
    end.sending() == Sending::Ring && socket.outgoing().is_some_and(full)
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

/// Who wants to send looks for room, and there is none. Programs that first send and then receive count on what the kernel's buffers hold: if the
/// receiver has read nothing for a while, the rest goes there; the ring is entered again once it is drained. Has our direction left?
#[cold]
pub fn leave_stalled(socket: &Socket) -> bool {
    stalled(socket.end()) && leave_full(socket)
}

/// Has the receiver read nothing for a while?
fn stalled(end: &End) -> bool {
    let (now, progress) = (sys::now_ns(), end.tx.progress() + 1);
    if end.full_at.get() != progress {
        end.full_at.set(progress);
        end.full_since_ns.set(now);
    }
    now.saturating_sub(end.full_since_ns.get()) > STALLED_NS
}
