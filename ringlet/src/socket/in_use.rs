//! A thread is at a socket without its locks: until it is done, a close by another thread leaves the connection open.

use super::table::{Socket, Stage};
use super::{jumps, release};
use ringlet_core::sync::Ordering;

/// A caller that has had to wait. Until it is done, a close by another thread leaves the connection open; the last one out cleans up
/// what was closed meanwhile.
pub struct Waiter<'a>(&'a Socket);

impl<'a> Waiter<'a> {
    pub fn new(socket: &'a Socket) -> Waiter<'a> {
        jumps::waits(socket, false);
        // ORDER: SeqCst; pairs with `process::release`: whoever closes sees us, or we see that the stage changed.
        socket.sleepers.fetch_add(1, Ordering::SeqCst);
        Waiter(socket)
    }

    pub fn socket(&self) -> &'a Socket {
        self.0
    }
}

/// For a look at shared memory without a lock: a close by another thread leaves the connection to it. `None` if that came first.
pub fn in_use(socket: &Socket) -> Option<Waiter<'_>> {
    let waiter = Waiter::new(socket);
    (socket.stage() == Stage::Attached).then_some(waiter)
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        wait_no_more(self.0);
    }
}

/// In place of the drop, for a thread that is cancelled.
pub fn wait_no_more(socket: &Socket) {
    waits_no_more(socket, false);
}

/// `native`: as it was counted (`jumps::waits`).
pub fn waits_no_more(socket: &Socket, native: bool) {
    jumps::waits_no_more(socket, native);
    release::leave(socket);
}
