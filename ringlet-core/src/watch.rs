//! A connection in an epoll set: what was told of it, and who hears of what comes next.
//!
//! The set either looks at it in each wait, and whoever sleeps there arms it first (`wait`); or the connection *rests*: no wait looks
//! at it. Its next record rings by a byte on the kernel's connection, of which the kernel's set tells one wait, and that one looks again; or it
//! is announced on the set's board (`ready`), and the next wait finds it there.
//!
//! ```text
//! set                                sender                     who takes doorbells
//!   rests                              publish                    count the bytes
//!   wish for a byte                    look at the wish: ring     does it rest? then the set looks at it again
//!   look: something there? go on                                  look at the ring, take what was counted
//! ```
//!
//! So while it rests, either a wish stands that no record has granted, or a byte lies in the kernel of which its set has not told yet. A byte
//! that was counted was wished for before, and so whoever takes it sees the rest that counts on it. A record published beside the
//! last look of the set is found by that look, or rings.

use crate::record::PlainU64;
use crate::ring::{RingMemory, Rx};
use crate::sync::{AtomicU32, Ordering};

/// Does a set count on a doorbell for this connection? Changed under the set's lock, read without.
#[derive(Default)]
pub struct Rest(AtomicU32);

impl Rest {
    /// The set looks no more at the connection, unless there is something. `wish`: for a byte.
    pub fn begin(&self, wish: impl FnOnce(), found: impl FnOnce() -> bool) -> bool {
        // ORDER: Release, before the wish; pairs with `is`.
        self.0.store(1, Ordering::Release);
        wish();
        let rests = !found();
        if !rests {
            self.end();
        }
        rests
    }

    /// The set looks at it again, or it has left the set.
    pub fn end(&self) {
        // ORDER: Relaxed; whoever reads it too early leaves a doorbell where it is.
        self.0.store(0, Ordering::Relaxed);
    }

    /// For whoever has counted doorbells and is about to take them.
    #[inline(always)]
    pub fn is(&self) -> bool {
        // ORDER: Acquire; pairs with `begin`, by the wish and the byte that answers it.
        self.0.load(Ordering::Acquire) != 0
    }
}

/// By edge: up to which record of the ring a wait has told. Behind the set's lock.
#[derive(Default)]
pub struct Told(PlainU64);

/// What a look has seen of the ring.
#[derive(Clone, Copy, Default)]
pub struct Seen {
    /// Behind the last record with bytes.
    pub position: u64,
    /// Is there one that was not told, nor received meanwhile?
    pub more: bool,
}

impl Told {
    /// `events`: what can be reported. It is taken before the position is: a record that it tells of is no news to the next look. One that came
    /// behind it stands in the ring before the report is out.
    pub fn look<M: RingMemory, R>(
        &self,
        rx: &Rx,
        memory: &M,
        events: impl FnOnce() -> R,
    ) -> (R, Seen) {
        let told = self.0.get();
        let events = events();
        let position = rx.published_after(memory, told);
        // (Behind a mark that was passed there may be none. And who receives beside us has gone on.)
        (events, Seen { position, more: position > told.max(rx.position()) })
    }

    pub fn get(&self) -> u64 {
        self.0.get()
    }

    /// A wait tells of it.
    pub fn set(&self, position: u64) {
        self.0.set(position);
    }
}
