//! Leaving a connection on the kernel for good.

use super::table::{Socket, Stage};
use super::{meeting, view};
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
