//! A Unix socket at whose other end may be anybody.

use ringlet_linux::{apart, meet};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

/// What strangers have left in its queue goes with it, and nobody waits for that.
pub struct Guarded {
    socket: ManuallyDrop<OwnedFd>,
    /// A stranger has this very end too, or had: its last close may wait for him (`apart`).
    shared: bool,
}

impl Guarded {
    pub fn new(socket: OwnedFd) -> Guarded {
        Guarded { socket: ManuallyDrop::new(socket), shared: false }
    }

    /// An end that came from whoever is at the other end of `with`.
    pub fn shared(socket: OwnedFd, with: &OwnedFd) -> Guarded {
        Guarded { socket: ManuallyDrop::new(socket), shared: is_strangers(with) }
    }
}

/// Has it a stranger at its other end?
fn is_strangers(socket: &OwnedFd) -> bool {
    let uid = meet::credentials(socket.as_raw_fd()).map(|peer| peer.uid);
    !uid.is_ok_and(|uid| uid == 0 || meet::is_our_user(uid))
}

/// Closes our copy of what was sent to whoever is at the other end of `to`, and goes on there.
pub fn close_sent(sent: OwnedFd, to: &OwnedFd) {
    if is_strangers(to) {
        apart::close_socket_apart(sent.into_raw_fd(), apart::SOMEBODY);
    }
}

impl Deref for Guarded {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.socket
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let socket = self.socket.as_raw_fd();
        match self.shared {
            true => apart::close_socket_apart(socket, apart::SOMEBODY),
            false => meet::part(socket),
        }
    }
}
