//! What the cluster's thread has for the service's: of ends of connections; and what is for the processes with rails, which get it at once.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringlet_linux::fd;

use super::{Events, Peer, Token, Word};
use crate::fabric::share::Ways;

/// More is forgotten: an end that was sought in vain stays on the kernel, and comes again.
const MOST: usize = 4096;

#[derive(Clone)]
pub struct Post(Arc<Inner>);

struct Inner {
    bell: OwnedFd,
    news: Mutex<VecDeque<News>>,
    ways: Vec<Ways>,
}

pub enum News {
    Said(Peer, Word),
    Called(Token, Option<OwnedFd>),
    Ended(Peer),
}

impl Post {
    pub fn new(ways: Vec<Ways>) -> std::io::Result<Post> {
        let made = fd::eventfd().map_err(|error| std::io::Error::from_raw_os_error(error.0))?;
        // SAFETY: made just now, ours alone.
        let bell = unsafe { OwnedFd::from_raw_fd(made) };
        Ok(Post(Arc::new(Inner { bell, news: Mutex::default(), ways })))
    }

    pub fn bell(&self) -> &OwnedFd {
        &self.0.bell
    }

    /// All that there is. (The bell is silenced first, so that what comes meanwhile rings it again.)
    pub fn take(&self) -> VecDeque<News> {
        let _ = rustix::io::read(&self.0.bell, &mut [0u8; 8]);
        std::mem::take(&mut *self.0.news.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, news: News) {
        let mut all = self.0.news.lock().unwrap_or_else(PoisonError::into_inner);
        // (Others are no more than there are sessions, and calls.)
        if all.len() < MOST || !matches!(news, News::Said(..)) {
            all.push_back(news);
        }
        fd::ring(self.0.bell.as_raw_fd());
    }

    /// To those processes. What one does not take at once the service's thread says again, which may sleep.
    fn say(&self, say: impl Fn(&Ways)) {
        self.0.ways.iter().for_each(say);
        if self.0.ways.iter().any(Ways::waits) {
            fd::ring(self.0.bell.as_raw_fd());
        }
    }
}

impl Events for Post {
    fn joined(&mut self, peer: &Peer, _: bool) {
        self.say(|ways| ways.joined(peer));
    }

    fn ended(&mut self, peer: &Peer) {
        self.say(|ways| ways.ended(peer));
        self.put(News::Ended(peer.clone()));
    }

    fn passed(&mut self, peer: &Peer, message: &[u8]) {
        self.say(|ways| ways.passed(peer, message));
    }

    fn said(&mut self, peer: &Peer, word: Word) {
        self.put(News::Said(peer.clone(), word));
    }

    fn called(&mut self, token: Token, channel: Option<OwnedFd>) {
        self.put(News::Called(token, channel));
    }

    fn may_leave(&mut self) -> bool {
        self.0.ways.iter().all(Ways::has_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::tests::joined;
    use crate::fabric::share::tests::fabric;

    #[test]
    fn who_is_to_say_it_again_is_woken() {
        let (fabric, _held) = fabric();
        let mut post = Post::new(vec![fabric.side.ways.clone()]).unwrap();
        let peers = joined(&["b", "c", "d"]);
        let rung = |post: &Post| fd::pending(post.bell().as_raw_fd(), libc::POLLIN) != 0;
        post.joined(&peers[0], false);
        assert!(!rung(&post), "it was taken");
        while !fabric.side.ways.waits() {
            post.passed(&peers[0], &[0; 1 << 15]);
        }
        for say in [
            (|post, peer| Post::passed(post, peer, b"more")) as fn(&mut Post, &Peer),
            |post, peer| post.joined(peer, false),
            |post, peer| post.ended(peer),
        ] {
            post.take();
            assert!(!rung(&post));
            say(&mut post, &peers[1]);
            assert!(rung(&post), "it waits until something else comes");
        }
    }
}
