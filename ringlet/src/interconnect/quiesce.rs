//! Rounds in which nobody but one thread touches what two locks are for, though others may have them.
//!
//! A thread that has one of the locks, and only waits, stands still for a round of another's.
//!
//! ```text
//! whose round it is                   who has a lock, and waits
//!   begins it
//!   what of the locks is free, take
//!                                       a round? says by its number that this lock's holder stands still
//!   both are taken, or still: act       waits until the round is over
//!   the round is over
//! ```
//!
//! All of this is done with signals blocked. So no thread leaves a round by a long jump; and what was said in one round says nothing in the next.

use crate::lock::{Held, Lock};
use crate::thread::{self, Fate};
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};
use ringlet_linux::map::Zeroed;
use ringlet_linux::{fd, sys};

/// How long a round waits for who has a lock, and how often it looks. (Where that sleeps for longer there is another round.)
const STILL_NS: u64 = 5_000_000;
const LOOK_NS: u64 = 20_000;

/// One at a time. In the upper half of the word is whose round it is, 0 for nobody's; in the lower one the number of the last round, which only grows.
#[derive(Default)]
pub struct Rounds {
    word: AtomicU64,
    /// In which round the holder of each lock stands still.
    still: [AtomicU32; 2],
}

// SAFETY: atomics only; zero is that there was no round.
#[allow(unsafe_code)]
unsafe impl Zeroed for Rounds {}

/// Until it is dropped.
pub struct Round<'a> {
    rounds: &'a Rounds,
    word: u64,
}

impl Rounds {
    /// The word while a round of this process's goes on. (Another one's is nothing to our threads; and it may have been killed.)
    fn going_on(&self) -> Option<u64> {
        // ORDER: SeqCst; pairs with `Round::drop`: what was done in the round is there.
        let word = self.word.load(Ordering::SeqCst);
        let owner = (word >> 32) as u32;
        (owner != 0 && matches!(thread::fate_of(owner), Fate::Alive)).then_some(word)
    }

    /// With signals blocked, until it is over.
    pub fn begin(&self) -> Option<Round<'_>> {
        let before = self.word.load(Ordering::Relaxed);
        if self.going_on().is_some() {
            return None;
        }
        // (Never 0, in which nobody has stood still yet.)
        let number = (before as u32).wrapping_add(1).max(1);
        let word = u64::from(thread::owner_number()) << 32 | u64::from(number);
        // ORDER: SeqCst; pairs with `going_on`.
        let order = Ordering::SeqCst;
        let begun = self.word.compare_exchange(before, word, order, order).is_ok();
        begun.then_some(Round { rounds: self, word })
    }

    /// For who only waits: if a round of another thread's goes on, those of the locks that are ours are still until it is over.
    pub fn stand_still(&self, locks: [&Lock; 2]) {
        if self.going_on().is_none() {
            return;
        }
        // WHY unsignalled: a handler may leave it by a jump.
        sys::unsignalled(|| {
            while let Some(word) = self.going_on() {
                for (lock, still) in locks.into_iter().zip(&self.still) {
                    if lock.is_ours() {
                        // ORDER: SeqCst; pairs with `Round::is_still`: what we have done under the lock is there.
                        still.store(word as u32, Ordering::SeqCst);
                    }
                }
                sys::sched_yield();
            }
        });
    }
}

impl Round<'_> {
    /// Nobody but us does anything under this lock, until the answer is dropped.
    fn is_still<'a>(&self, lock: &'a Lock, still: &AtomicU32) -> Option<Option<Held<'a>>> {
        if lock.is_ours() {
            return Some(None);
        }
        match lock.try_take() {
            // ORDER: SeqCst; pairs with `Rounds::stand_still`. (Only who has the lock says so, and has it until the round is over.)
            None => (still.load(Ordering::SeqCst) == self.word as u32).then_some(None),
            held => Some(held),
        }
    }

    /// The same under both, if their holders are waiting.
    pub fn await_still<'a>(&self, locks: [&'a Lock; 2]) -> Option<[Option<Held<'a>>; 2]> {
        let until = sys::now_ns() + STILL_NS;
        let ([first, second], [still_first, still_second]) = (locks, &self.rounds.still);
        loop {
            if let Some(first) = self.is_still(first, still_first)
                && let Some(second) = self.is_still(second, still_second)
            {
                return Some([first, second]);
            }
            if sys::now_ns() > until {
                return None;
            }
            let _ = fd::poll(&mut [], Some(LOOK_NS), None);
        }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        // ORDER: SeqCst; pairs with `Rounds::going_on`. (Unless another process has begun one.)
        let (over, order) = (u64::from(self.word as u32), Ordering::SeqCst);
        let _ = self.rounds.word.compare_exchange(self.word, over, order, order);
    }
}
