//! A provider's connections, from outside: TCP sockets of this process, by their addresses.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use ringlet_linux::tcp;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketAddrAny, getpeername, getsockname, shutdown};

use super::gate;

pub struct Connections {
    ours: SocketAddr,
    peers: HashSet<SocketAddr>,
    /// Inodes of those that were shut: a socket that is shut may have no addresses any more.
    shut: HashSet<u64>,
}

impl Connections {
    /// Those between our endpoint's address and anybody, and from there to these peers' endpoints. (Peers say themselves where they are: so from another
    /// address, as another rail's, none is meant.)
    pub fn new(ours: SocketAddr, peers: HashSet<SocketAddr>) -> Connections {
        Connections { ours, peers, shut: HashSet::new() }
    }

    /// Shuts all, as if each peer had ended. False when the provider has closed them all (or they can't be known: without /proc, or descriptors).
    pub fn shut(&mut self) -> bool {
        let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return false };
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        // (All, before any is open twice.)
        let numbers: Vec<RawFd> = numbers.collect();
        // Not `any`, which ends at the first.
        numbers.into_iter().filter(|&number| self.shut_one(number)).count() > 0
    }

    fn shut_one(&mut self, number: RawFd) -> bool {
        if gate::holds(number) {
            return false;
        }
        // SAFETY: for calls that look only, whatever it is by then, and fail if the number is closed.
        let seen = unsafe { BorrowedFd::borrow_raw(number) };
        // WHY before there is a copy: who closes the last one waits for what that costs, and takes the process's locks of a file with it.
        if self.theirs(seen).is_none() {
            return false;
        }
        // A descriptor of our own: whoever closes this number meanwhile, what is looked at is what is shut.
        let Ok(copy) = seen.try_clone_to_owned() else { return false };
        let Some(inode) = self.theirs(copy.as_fd()) else { return false };
        if self.shut.insert(inode) {
            // It may have ended by itself.
            let _ = shutdown(&copy, Shutdown::Both);
        }
        true
    }

    /// The inode of a connection of the provider's.
    fn theirs(&self, socket: BorrowedFd) -> Option<u64> {
        // (What is no socket ends here. A socket that listens has no peer.)
        let peer = match getpeername(socket) {
            Ok(peer) => peer.and_then(internet),
            Err(Errno::NOTCONN) => None,
            Err(_) => return None,
        };
        let inode = fstat(socket).ok()?.st_ino;
        let is_theirs = |peer, at: SocketAddr| {
            at == self.ours || at.ip() == self.ours.ip() && self.peers.contains(&peer)
        };
        // (Who has said nothing has written nothing. Of such, who may be anybody, libfabric 1.17 closes one in 6 ms.)
        let has_spoken = || tcp::counts(socket.as_raw_fd()).map_or(true, |it| it.received > 0);
        let is_theirs = self.shut.contains(&inode)
            || peer.is_some_and(|peer| {
                let at = getsockname(socket).ok().and_then(internet);
                at.is_some_and(|at| is_theirs(peer, at)) && has_spoken()
            });
        is_theirs.then_some(inode)
    }
}

/// As a name has it, which says nothing of scope or flow.
fn internet(address: SocketAddrAny) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(address).ok()?;
    Some(SocketAddr::new(address.ip(), address.port()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Strangers who connect and say nothing are not waited for; who has spoken is, until his connection is closed here.
    #[test]
    fn who_says_nothing_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut stranger = TcpStream::connect(at).unwrap();
        let (came, _) = listener.accept().unwrap();
        let mut connections = Connections::new(at, HashSet::new());
        assert!(!connections.shut());
        stranger.write_all(&[7]).unwrap();
        assert_eq!(came.peek(&mut [0]).unwrap(), 1);
        assert!(connections.shut() && connections.shut());
        drop(came);
        assert!(!connections.shut());
    }
}
