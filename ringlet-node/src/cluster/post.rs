//! What the cluster's thread has for the service's: of ends of connections; and what is for the processes with rails, which get it at once.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringlet_linux::fd;

use super::{Events, Peer, Session, Token, Word};
use crate::fabric::share::Ways;

/// Words that wait. Of more the last one of the session that has most is forgotten, so that a node that floods us crowds out no other one: an end that was
/// sought in vain stays on the kernel, and comes again.
const MOST: usize = 4096;

#[derive(Clone)]
pub struct Post(Arc<Inner>);

struct Inner {
    bell: OwnedFd,
    news: Mutex<Queue>,
    ways: Vec<Ways>,
}

#[derive(Default)]
struct Queue {
    all: VecDeque<News>,
    /// Words of each session.
    said: HashMap<Session, usize>,
    words: usize,
}

impl Queue {
    fn put(&mut self, news: News) {
        if let News::Said(peer, _) = &news {
            let session = peer.session;
            if self.words >= MOST && !self.makes_room(session) {
                return;
            }
            *self.said.entry(session).or_default() += 1;
            self.words += 1;
        }
        // (Others are no more than there are sessions, and calls.)
        self.all.push_back(news);
    }

    /// For a word of this session. False if none has more than that.
    fn makes_room(&mut self, session: Session) -> bool {
        let has = self.said.get(&session).copied().unwrap_or(0);
        let Some((most, count)) = self.said.iter_mut().max_by_key(|(_, count)| **count) else {
            return false;
        };
        if *count <= has + 1 {
            return false;
        }
        let is = |news: &News| matches!(news, News::Said(peer, _) if peer.session == *most);
        let Some(last) = self.all.iter().rposition(is) else { return false };
        *count -= 1;
        self.words -= 1;
        self.all.remove(last);
        true
    }
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
        let mut news = self.0.news.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *news).all
    }

    fn put(&self, news: News) {
        self.0.news.lock().unwrap_or_else(PoisonError::into_inner).put(news);
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
    fn a_node_that_floods_us_crowds_out_no_other() {
        let mut post = Post::new(Vec::new()).unwrap();
        let peers = joined(&["floods", "too", "other"]);
        let beats = |post: &mut Post, peer: &Peer, from: u64, count: u64| {
            (from..from + count).for_each(|number| post.said(peer, Word::Beat(number)));
        };
        beats(&mut post, &peers[0], 0, 3 * MOST as u64);
        post.called([7; 16], None);
        beats(&mut post, &peers[2], 0, 10);
        beats(&mut post, &peers[1], 0, 3 * MOST as u64);
        beats(&mut post, &peers[2], 10, 10);
        post.ended(&peers[2]);
        let news = post.take();
        let of = |peer: &Peer| {
            let number = |news: &News| match news {
                News::Said(by, Word::Beat(number)) if by.session == peer.session => Some(*number),
                _ => None,
            };
            news.iter().filter_map(number).collect::<Vec<_>>()
        };
        assert_eq!(of(&peers[2]), (0..20).collect::<Vec<_>>());
        assert!(news.iter().any(|news| matches!(news, News::Called(..))));
        assert!(matches!(news.back(), Some(News::Ended(_))));
        let [floods, too] = [0, 1].map(|at: usize| of(&peers[at]));
        assert_eq!(floods.len() + too.len() + 20, MOST);
        assert!(floods.len().abs_diff(too.len()) <= 10, "{} and {}", floods.len(), too.len());
        assert!((0..).zip(&floods).all(|(at, number)| at == *number), "in their order");
        // What was taken leaves room.
        beats(&mut post, &peers[0], 0, MOST as u64);
        assert_eq!(post.take().len(), MOST);
    }

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
