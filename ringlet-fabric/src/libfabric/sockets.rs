//! A provider's connections, from outside: TCP sockets of this process, by their addresses.

use std::collections::HashSet;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{BorrowedFd, RawFd};

use rustix::fs::fstat;

pub struct Connections {
    ours: SocketAddr,
    peers: HashSet<SocketAddr>,
    /// Inodes of those that were shut: a socket that is shut may have no addresses any more.
    shut: HashSet<u64>,
}

impl Connections {
    /// Those between our endpoint's address and anybody, and between us and these peers' endpoints.
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
        // A descriptor of our own: whoever closes this number meanwhile, what is looked at is what is shut.
        // SAFETY: only for this call, which fails if the number is closed.
        let Ok(copy) = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned() else {
            return false;
        };
        let Ok(inode) = fstat(&copy).map(|stat| stat.st_ino) else { return false };
        let socket = TcpStream::from(copy);
        // (A socket that listens has no peer.)
        let is_of_it = self.shut.contains(&inode)
            || socket.peer_addr().is_ok_and(|peer| self.peers.contains(&peer))
            || socket.peer_addr().is_ok() && socket.local_addr().is_ok_and(|at| at == self.ours);
        if is_of_it && self.shut.insert(inode) {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
        is_of_it
    }
}
