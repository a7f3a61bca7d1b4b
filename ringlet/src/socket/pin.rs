//! Leaving a connection on the kernel for good.

pub use super::bypass::{
    AROUND, BEHIND_OUR_BACK, CLOSED_IN, FOR_GOOD, IO_URING, is_closed_in, keeps_all_on_kernel,
};
use super::table::{End, Socket, Stage};
use super::{meeting, view};
use crate::interconnect::mirrored;
use crate::reasons::Reason;
use ringlet_core::sync::{Ordering, fence};

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
