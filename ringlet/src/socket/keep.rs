//! What only the kernel can do with a connection, from now on: where a socket stays there for good.

use super::pin::to_kernel;
use super::table::{Socket, Stage};
use super::{carrier, datagram, in_use, moving};
use crate::reasons::Reason;

/// Leaves a socket on the kernel for good, and shows why.
pub fn pin(socket: &Socket, reason: Reason) {
    match socket.has_datagrams() {
        true => datagram::bar(socket, reason),
        false => to_kernel(socket, reason),
    }
}

/// The program has asked for something that only the kernel can do with this connection, from now on.
pub fn keep_on_kernel(socket: &'static Socket, reason: Reason) {
    // Another thread that closes it leaves it to us.
    let _in_use = in_use::Waiter::new(socket);
    if matches!(socket.stage(), Stage::Free | Stage::Closing) {
        return;
    }
    if socket.stage() != Stage::Attached {
        pin(socket, reason);
    }
    // (Or another thread has moved it meanwhile.)
    if socket.stage() == Stage::Attached && !moving::return_to_kernel(socket, reason) {
        // An error that can be seen, not bytes lost in silence.
        carrier::break_off(socket);
    }
}
