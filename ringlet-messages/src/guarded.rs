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
    /// Who has made it has given its other end to somebody else, whom its credentials do not name.
    given: bool,
}

impl Guarded {
    pub fn new(socket: OwnedFd) -> Guarded {
        Guarded { socket: ManuallyDrop::new(socket), shared: false, given: false }
    }

    /// One that the node service has made, for us and anybody.
    pub fn of_node(socket: OwnedFd) -> Guarded {
        let mut guarded = Guarded::new(socket);
        guarded.given = true;
        guarded
    }

    /// An end that came from whoever is at the other end of `with`.
    pub fn shared(socket: OwnedFd, with: &Guarded) -> Guarded {
        let mut guarded = Guarded::new(socket);
        guarded.shared = with.is_strangers();
        guarded
    }

    /// Do its credentials name who has made it, not who is at its other end?
    pub fn is_given(&self) -> bool {
        self.given
    }

    /// Has it a stranger at its other end?
    fn is_strangers(&self) -> bool {
        let uid = meet::credentials(self.as_raw_fd()).map(|peer| peer.uid);
        self.given || !uid.is_ok_and(|uid| uid == 0 || meet::is_our_user(uid))
    }
}

/// Closes our copy of what was sent to whoever is at the other end of `to`, and goes on there.
pub fn close_sent(sent: OwnedFd, to: &Guarded) {
    if to.is_strangers() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    #[test]
    fn whoever_the_node_service_has_given_an_end_to_is_a_stranger() {
        // SAFETY: made just now, ours alone.
        #[allow(unsafe_code)]
        let pair = || meet::pair().unwrap().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        for (of, strangers) in [(Guarded::new as fn(_) -> _, false), (Guarded::of_node, true)] {
            let ([ours, _theirs], [came, _other]) = (pair(), pair());
            assert_eq!(Guarded::shared(came, &of(ours)).shared, strangers);
        }
    }
}
