//! Leaving a connection on the kernel for good.

use super::table::{End, Socket, Stage};
use super::{meeting, view};
use crate::interconnect::mirrored;
use crate::reasons::Reason;
use ringlet_core::sync::{AtomicU32, Ordering, fence};

/// Pins a stream to the kernel, and shows why.
pub fn to_kernel(socket: &Socket, reason: Reason) {
    loop {
        let end = socket.end();
        end.barred.set(reason as u32);
        // ORDER: SeqCst, then the stage and the end; pairs with `moving::publish_attached` and `Tables::rehome`.
        fence(Ordering::SeqCst);
        if core::ptr::eq(socket.end(), end) {
            break;
        }
    }
    settle(socket);
    view::show(socket, reason);
}

/// Takes a socket that is pinned off its way to the ring: unless a thread is in the middle of a step with it (this one too, or it was
/// interrupted there), which does it then.
pub fn settle(socket: &Socket) {
    while socket.end().barred.is() && socket.stage().may_move() {
        // ORDER: SeqCst, after the reason; pairs with `meet::step_once`.
        if socket.stepping.swap(1, Ordering::SeqCst) != 0 {
            return;
        }
        if socket.advance(Stage::KernelForGood) {
            meeting::abandon(socket);
            view::show_path(socket);
        }
        socket.stepping.swap(0, Ordering::SeqCst);
    }
}

/// Our direction stays on the kernel for good; the peer is asked to leave the ring too, since only who sends by the ring can ring for
/// room there. Send lock held.
#[cold]
pub fn keep_out(socket: &Socket, end: &End, reason: Reason) {
    end.barred.set(reason as u32);
    if let Some(incoming) = socket.incoming() {
        // ORDER: as in `control::notice`.
        incoming.control().receiver.keep_out.store(1, Ordering::SeqCst);
        mirrored::ring_event(socket);
    }
    view::show(socket, reason);
}

/// Why nothing of this process may be moved: bits for good, and the loads under way. (Not in the tables: a constructor may come
/// before them.)
pub static BEHIND_OUR_BACK: AtomicU32 = AtomicU32::new(0);

pub const IO_URING: u32 = 1 << 31;
pub const AROUND: u32 = 1 << 30;
pub const CLOSED_IN: u32 = 1 << 29;
pub const FOR_GOOD: u32 = IO_URING | AROUND | CLOSED_IN;

pub fn is_closed_in() -> bool {
    BEHIND_OUR_BACK.load(Ordering::SeqCst) & CLOSED_IN != 0
}

/// Why this process's connections have to stay on the kernel, and whether for good; `meet` and `datagram` ask before they move one,
/// and `meet` again when it has.
pub fn keeps_all_on_kernel() -> Option<(Reason, bool)> {
    match BEHIND_OUR_BACK.load(Ordering::SeqCst) {
        0 => None,
        bits if bits & CLOSED_IN != 0 => Some((Reason::Sandbox, true)),
        bits if bits & IO_URING != 0 => Some((Reason::IoUring, true)),
        bits => Some((Reason::Around, bits & AROUND != 0)),
    }
}
