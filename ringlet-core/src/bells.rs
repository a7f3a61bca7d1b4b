//! Doorbell bytes that are taken by their number, in one call, with no look at them.
//!
//! A sender counts each before it goes, since who it wakes may run before the sender comes back, and counts it out again if it did not go
//! (the kernel had no room). A receiver that has read the number before that would take a byte more than there are doorbells: of data, if the
//! stream goes on in the kernel by then. So it says that it is *taking* before it reads the number, and a sender that has counted one out
//! gives nothing else to the kernel before it has seen, once, that nobody takes.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

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
