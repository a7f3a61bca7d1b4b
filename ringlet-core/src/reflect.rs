//! What lies in the shared words of reflective memory (Memory Channel): locks, and wishes to be told of writes.
//!
//! Both are words among any number of processes that do not trust each other further than that they may write here: whatever a word holds, each
//! function ends, and decides by its own process's number what is its own.

use crate::sync::{AtomicU32, Ordering};

/// Somebody sleeps, or may. The rest of the word is who holds the lock.
const WAITED: u32 = 1 << 31;
/// Nobody holds it, and only who has slept for it may have it.
const HANDED: u32 = WAITED - 1;
/// Numbers of processes are 1 to this one.
pub const LAST_HOLDER: u32 = HANDED - 1;

/// A lock: a word that all see. Its holder is a process, by its number.
#[repr(transparent)]
pub struct LockWord(pub AtomicU32);

// SAFETY: an atomic integer.
unsafe impl crate::memory::Shared for LockWord {}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt {
    Taken,
    /// By this very process, before.
    Ours,
    /// The word to sleep on while it is that.
    Held(u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotHeld;

fn holder(word: u32) -> u32 {
    word & !WAITED
}

impl LockWord {
    /// One atomic exchange where nobody holds it.
    #[inline]
    pub fn try_acquire(&self, us: u32) -> Attempt {
        // ORDER: Acquire, pairs with Release in `release`: what was written under the lock is seen under it.
        match self.0.compare_exchange(0, us, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Attempt::Taken,
            Err(word) if holder(word) == us => Attempt::Ours,
            Err(word) => Attempt::Held(word),
        }
    }

    /// For who waits: says that somebody may sleep, so that a release wakes. A lock that was handed over is only for who has slept.
    pub fn acquire_waiting(&self, us: u32, has_slept: bool) -> Attempt {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let is_free = word == 0 || word == WAITED || (has_slept && holder(word) == HANDED);
            let next = match is_free {
                // (Others may sleep still: who takes it says so for them.)
                true if has_slept => us | WAITED,
                true => us | (word & WAITED),
                false if holder(word) == us => return Attempt::Ours,
                false if word & WAITED != 0 => return Attempt::Held(word),
                false => word | WAITED,
            };
            // ORDER: as in `try_acquire`.
            match self.0.compare_exchange_weak(word, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) if is_free => return Attempt::Taken,
                Ok(_) => return Attempt::Held(next),
                Err(found) => word = found,
            }
        }
    }

    /// True if a sleeper is to be woken. With `hand_over` no newcomer can have it before a sleeper does; where nobody slept, `nobody_slept` is to be said.
    #[inline]
    pub fn release(&self, us: u32, hand_over: bool) -> Result<bool, NotHeld> {
        let mut word = us;
        loop {
            if holder(word) != us {
                return Err(NotHeld);
            }
            let is_waited = word & WAITED != 0;
            let next = if is_waited && hand_over { WAITED | HANDED } else { 0 };
            // ORDER: Release, pairs with Acquire in `try_acquire` and `acquire_waiting`.
            match self.0.compare_exchange(word, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return Ok(is_waited),
                Err(found) => word = found,
            }
        }
    }

    /// Does a word say that only who has slept may have it?
    pub fn is_handed_over(word: u32) -> bool {
        holder(word) == HANDED
    }

    /// It was handed over to nobody: newcomers can have it. True if a sleeper is to be woken all the same: one may have come meanwhile.
    pub fn nobody_slept(&self) -> bool {
        // ORDER: Release, pairs with Acquire in `try_acquire`: who takes it sees what was written before it was handed over.
        self.0.compare_exchange(WAITED | HANDED, 0, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Whom it names: nobody if it is free.
    pub fn holder(&self) -> Option<u32> {
        match holder(self.0.load(Ordering::Relaxed)) {
            0 | HANDED => None,
            holder => Some(holder),
        }
    }

    /// Does anybody sleep for it, or did lately?
    pub fn is_waited(&self) -> bool {
        self.0.load(Ordering::Relaxed) & WAITED != 0
    }

    /// It is nobody's, if it is this process's, which has gone. True if sleepers are to be woken, all of them.
    pub fn give_up(&self, gone: u32) -> bool {
        self.release(gone, false).is_ok()
    }
}

/// Who writes tells nobody unless somebody wishes to be told: of a page, this is how many.
///
/// The wish is made by one whom all trust (the keeper), which lets all processes that write pass a barrier (membarrier) before the wish holds. So a writer
/// looks at it behind its store without a barrier of its own, and either sees the wish, or is seen by who looks behind it.
#[repr(transparent)]
pub struct Wish(pub AtomicU32);

// SAFETY: an atomic integer.
unsafe impl crate::memory::Shared for Wish {}
