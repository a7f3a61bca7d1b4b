//! The interrupt flag of a sleeper, written once (SCILAN §3.2 and §3.5).
//!
//! A *context* is whatever can sleep: a thread in a blocking call, or an epoll set. It owns one word that its peers can read
//! but not write, so that none of them can spoil another's wake-up. The word holds the number of sleepers (low 16 bits) and a
//! count of changes (the rest). Going to sleep:
//!
//! ```text
//! sleeper                          sender
//!   arm      (RMW, then fence)       publish  (RMW, SeqCst, `Tx::publish`)
//!   look at the rings again          look at the word (SeqCst)
//!   nothing there: sleep             armed: ring its doorbell
//! ```
//!
//! If the sender's look does not see the arming, its publish precedes the sleeper's fence in the one order of sequentially
//! consistent operations, so the sleeper's second look finds the record. A sender rings once per value of the word: further
//! records are free until the sleeper has moved.

use crate::sync::{AtomicU64, Ordering, fence};

const SLEEPERS: u64 = 0xffff;
const CHANGE: u64 = 0x1_0000;

/// Announces a sleeper. Look at everything once more afterwards.
pub fn arm(flag: &AtomicU64) {
    // ORDER: SeqCst and a fence (the looks that follow are only Acquire loads); pairs with `armed`.
    flag.fetch_add(CHANGE + 1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// The sleeper is awake again (or found something and never slept).
pub fn disarm(flag: &AtomicU64) {
    // ORDER: SeqCst, to keep one total order with `arm`; nothing is published by it.
    flag.fetch_add(CHANGE - 1, Ordering::SeqCst);
}

/// For a sender that has just published: the word's value if somebody sleeps and was not yet rung for this value.
#[inline(always)]
pub fn armed(flag: &AtomicU64, rung: u64) -> Option<u64> {
    // ORDER: SeqCst; pairs with `arm`. The caller's publish was a SeqCst read-modify-write.
    let value = flag.load(Ordering::SeqCst);
    (value & SLEEPERS != 0 && value != rung).then_some(value)
}
