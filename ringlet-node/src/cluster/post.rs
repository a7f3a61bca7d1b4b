//! What other nodes say of ends of connections, on its way from the cluster's thread to the service's.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringlet_linux::fd;

use super::{Events, Peer, Word};

/// More is forgotten: an end that was sought in vain stays on the kernel, and comes again.
const MOST: usize = 4096;

#[derive(Clone)]
pub struct Post(Arc<Inner>);

struct Inner {
    bell: OwnedFd,
    words: Mutex<VecDeque<(Peer, Word)>>,
}

impl Post {
    pub fn new() -> std::io::Result<Post> {
        let made = fd::eventfd().map_err(|error| std::io::Error::from_raw_os_error(error.0))?;
        // SAFETY: made just now, ours alone.
        let bell = unsafe { OwnedFd::from_raw_fd(made) };
        Ok(Post(Arc::new(Inner { bell, words: Mutex::default() })))
    }

    pub fn bell(&self) -> &OwnedFd {
        &self.0.bell
    }

    /// The next one. (The bell is silenced first, so that what comes meanwhile rings it again.)
    pub fn take(&self) -> VecDeque<(Peer, Word)> {
        let _ = rustix::io::read(&self.0.bell, &mut [0u8; 8]);
        std::mem::take(&mut *self.0.words.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What is passed has nobody to go to: no carrier between hosts is there yet.
impl Events for Post {
    fn joined(&mut self, _: &Peer, _: bool) {}
    fn ended(&mut self, _: &Peer) {}
    fn passed(&mut self, _: &Peer, _: &[u8]) {}

    fn said(&mut self, peer: &Peer, word: Word) {
        let mut words = self.0.words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.len() < MOST {
            words.push_back((peer.clone(), word));
            fd::ring(self.0.bell.as_raw_fd());
        }
    }
}
