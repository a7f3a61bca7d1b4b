//! Doorbell bytes that are taken by their number, in one call, with no look at them.
//!
//! A sender counts each before it goes, since who it wakes may run before the sender comes back, and counts it out again if it did not go
//! (the kernel had no room). A receiver that has read the number before that would take a byte more than there are doorbells: of data, if the
//! stream goes on in the kernel by then. So it says that it is *taking* before it reads the number, and a sender that has counted one out
//! gives nothing else to the kernel before it has seen, once, that nobody takes.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Threads of an end that are about to put a doorbell, or to ask for one in a word of the ring: each looks where its end sends, once it is counted. Who has
/// led the end elsewhere and then finds none knows that nobody is in between, and that whoever comes sees it.
#[derive(Default)]
#[repr(transparent)]
pub struct Ringers(AtomicU32);

impl Ringers {
    /// One more. It looks afterwards.
    pub fn begin(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        // ORDER: the fence puts the look behind it, whatever that is by itself; pairs with that of `are_none_behind`: one of the two sees what the other
        // has done.
        fence(Ordering::SeqCst);
    }

    pub fn end(&self) {
        // ORDER: SeqCst, so Release; pairs with `are_none`: what was done for a doorbell is seen with it.
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// For who has led the end elsewhere.
    pub fn are_none_behind(&self) -> bool {
        // ORDER: the fence puts that before the count; pairs with that of `begin`.
        fence(Ordering::SeqCst);
        self.are_none()
    }

    /// The same, over and over, behind a fence.
    pub fn are_none(&self) -> bool {
        // ORDER: SeqCst, so Acquire; pairs with `end`.
        self.0.load(Ordering::SeqCst) == 0
    }

    /// In memory that nobody else knows yet.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Rings by `send`, which says if the byte went.
pub fn ring(bells: &AtomicU64, send: impl FnOnce() -> bool) -> bool {
    count(bells);
    let went = send();
    if !went {
        count_out(bells);
    }
    went
}

/// Before one goes.
pub fn count(bells: &AtomicU64) {
    // ORDER: Release; pairs with `take`: behind the wish that we answer.
    bells.fetch_add(1, Ordering::Release);
}

/// It did not go.
pub fn count_out(bells: &AtomicU64) {
    // ORDER: SeqCst; pairs with `take`, by `nobody_takes`.
    bells.fetch_sub(1, Ordering::SeqCst);
}

/// For a sender that has counted one out, and rings no more: is the number that any receiver goes by the one that it has now?
pub fn nobody_takes(taking: &AtomicU32) -> bool {
    // ORDER: a fence behind the count, and SeqCst; pairs with the fence of `take`: one of the two sees what the other has done.
    fence(Ordering::SeqCst);
    taking.load(Ordering::SeqCst) == 0
}

/// Has `take` done what it does by the number of the doorbells that were counted. One receiver at a time.
pub fn take<T>(taking: &AtomicU32, bells: &AtomicU64, take: impl FnOnce(u64) -> T) -> T {
    taking.store(1, Ordering::SeqCst);
    // ORDER: the fence puts that before the number; pairs with `nobody_takes`.
    fence(Ordering::SeqCst);
    // ORDER: Acquire; pairs with `ring`: who waits, and is rung for by one of those counted, is seen; else his byte may be the one that is taken.
    let done = take(bells.load(Ordering::Acquire));
    // ORDER: Release; pairs with `nobody_takes`: what was taken is before it.
    taking.store(0, Ordering::Release);
    done
}
