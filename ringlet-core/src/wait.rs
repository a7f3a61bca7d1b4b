//! The interrupt flag of a sleeper, written once (SCILAN §3.2 and §3.5).
//!
//! A *context* is whatever can sleep: a thread in a blocking call, or an epoll set. It owns one word that its peers can read
//! but not write, so that none of them can spoil another's wake-up. The word holds the number of sleepers (low 16 bits) and a
//! count of changes (the rest). Going to sleep:
//!
//! ```text
//! sleeper                          sender
//!   arm      (RMW, then fence)       publish  (RMW, SeqCst, `RingMemory::publish`)
//!   look at the rings again          look at the word (SeqCst)
//!   nothing there: sleep             armed: ring its doorbell
//! ```
//!
//! If the sender's look does not see the arming, its publish precedes the sleeper's fence in the one order of sequentially
//! consistent operations, so the sleeper's second look finds the record. A sender rings once per value of the word: further
//! records are free until the sleeper has moved.

use crate::layout::WANT_NOTHING;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

const SLEEPERS: u64 = 0xffff;
const CHANGE: u64 = 0x1_0000;

/// Announces a sleeper. Look at everything once more afterwards.
pub fn arm(flag: &AtomicU64) {
    // ORDER: SeqCst and a fence (the looks that follow are only Acquire loads); pairs with `armed`.
    flag.fetch_add(CHANGE + 1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// The sleeper is awake again (or found something and never slept). A wake-up is for one sleeper, and senders ring once per
/// value of the word: if others still sleep here (`sleepers`) and something is left for them, wake them before leaving.
pub fn disarm(flag: &AtomicU64) {
    // ORDER: SeqCst and a fence, as in `arm`: a sender that did not ring because it saw the old value published before our
    // next look.
    flag.fetch_add(CHANGE - 1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// Does anybody sleep here?
pub fn sleepers(flag: &AtomicU64) -> bool {
    // ORDER: SeqCst; after a `disarm`, whose fence orders it against other sleepers' `arm`.
    flag.load(Ordering::SeqCst) & SLEEPERS != 0
}

/// How many?
pub fn sleeper_count(flag: &AtomicU64) -> u64 {
    // ORDER: SeqCst; a sleeper that it does not see looks after whatever the caller has done before.
    flag.load(Ordering::SeqCst) & SLEEPERS
}

/// For a sender that has just published: the word's value if somebody sleeps and was not yet rung for this value.
#[inline(always)]
pub fn armed(flag: &AtomicU64, rung: u64) -> Option<u64> {
    // ORDER: SeqCst; pairs with `arm`. The caller's publish was a SeqCst read-modify-write.
    fence_for_the_model_checker();
    let value = flag.load(Ordering::SeqCst);
    (value & SLEEPERS != 0 && value != rung).then_some(value)
}

// One word per direction (`WANT_*`, bits), in shared memory: who is about to sleep adds how it wants to be woken, who has done
// what is waited for takes all wishes back and fulfils each, once. The word speaks for all sleepers of one end, and so does a
// doorbell byte. Hence two rules for an end where more than one can sleep:
//
// - Whoever throws doorbell bytes away asks for the next one first: count the bytes, `want`, look at the ring, and if it is
//   empty discard what was counted. Another sleeper that missed those bytes is then woken by the next record.
// - Nobody takes a wish back. At worst one doorbell rings in vain.

/// Announces that this end is about to sleep and how it wants to be woken. Look once more afterwards.
pub fn want(flag: &AtomicU32, how: u32) {
    // ORDER: the fence puts the wish before the look that follows; pairs with the SeqCst look of `wanted_by_receiver` and
    // the fence of `wanted_by_sender`. Of a wish and a publish (or release), one is seen by the other side.
    flag.fetch_or(how, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// For a sender that has just published: the ways in which the receiver wants to be woken, now the caller's duty.
#[inline(always)]
pub fn wanted_by_receiver(flag: &AtomicU32) -> u32 {
    // ORDER: SeqCst load after the SeqCst swap of `RingMemory::publish`: no fence in between; pairs with the fence of `want`.
    fence_for_the_model_checker();
    if flag.load(Ordering::SeqCst) == WANT_NOTHING {
        return WANT_NOTHING;
    }
    take_wish(flag)
}

/// For a receiver that has just released enough: the ways in which the sender wants to be woken, now the caller's duty.
#[inline]
pub fn wanted_by_sender(flag: &AtomicU32) -> u32 {
    // ORDER: the credit was a Release store, so a fence must keep this look behind it; pairs with the fence of `want`.
    fence(Ordering::SeqCst);
    if flag.load(Ordering::Relaxed) == WANT_NOTHING {
        return WANT_NOTHING;
    }
    take_wish(flag)
}

#[cold]
fn take_wish(flag: &AtomicU32) -> u32 {
    // ORDER: SeqCst swap: of several wakers one gets the wish.
    flag.swap(WANT_NOTHING, Ordering::SeqCst)
}

/// loom takes SeqCst accesses for AcqRel and knows only fences as sequentially consistent; elsewhere the accesses suffice.
#[inline(always)]
fn fence_for_the_model_checker() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
