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

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Bits of a wish (`Wish`): nobody sleeps; wake me by a byte on the kernel connection; by my context's bell.
pub const WANT_NOTHING: u32 = 0;
pub const WANT_BYTE: u32 = 1;
pub const WANT_EVENT: u32 = 2;
/// By a bit on the ready board of my home context, and then as its interrupt flag says (`ready`). Only for data.
pub const WANT_READY: u32 = 4;

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
    // ORDER: SeqCst; pairs with `arm`: a sleeper that it does not see looks after whatever the caller has done before.
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

/// A wish of one end of a connection to be woken, and what the other end has granted: two words, each written by one end, so that they can
/// be mirrored. The wish holds its number and how (`WANT_*`); who has done what is wished for grants it, by its number, and wakes once.
///
/// A wish speaks for all sleepers of its end, and so does a doorbell byte. Hence two rules for an end where more than one can sleep:
///
/// - Whoever throws doorbell bytes away asks for the next one first: count the bytes, `want`, look at the ring, and if it is
///   empty discard what was counted. Another sleeper that missed those bytes is then woken by the next record.
/// - Nobody takes a wish back for another. At worst one doorbell rings in vain.
#[derive(Clone, Copy)]
pub struct Wish<'a> {
    /// Written by who sleeps.
    pub wished: &'a AtomicU64,
    /// Written by who wakes: the number of the last wish that it has granted.
    pub granted: &'a AtomicU64,
}

pub const HOW_BITS: u32 = 3;
const HOW: u64 = (1 << HOW_BITS) - 1;

impl Wish<'_> {
    /// Announces that this end is about to sleep and how it wants to be woken. Look once more afterwards.
    pub fn want(self, how: u32) {
        let next = |last: u64| {
            // What was wished before and is not granted is wished again. (Granted meanwhile, it is granted once more than needed.)
            let granted = self.granted.load(Ordering::Relaxed) == last >> HOW_BITS;
            let before = if granted { 0 } else { last & HOW };
            Some(((last >> HOW_BITS) + 1) << HOW_BITS | before | u64::from(how))
        };
        // ORDER: the fence puts the wish before the look that follows; pairs with the SeqCst look of `granted_by_sender` and
        // the fence of `granted_by_receiver`. Of a wish and a publish (or release), one is seen by the other side.
        let _ = self.wished.fetch_update(Ordering::SeqCst, Ordering::Relaxed, next);
        fence(Ordering::SeqCst);
    }

    /// Has this end wished for something that was not granted?
    pub fn is_open(self) -> bool {
        // ORDER: Relaxed; who must not miss a wish looks for it again (`granted_by_receiver`).
        let last = self.wished.load(Ordering::Relaxed);
        last & HOW != 0 && self.granted.load(Ordering::Relaxed) != last >> HOW_BITS
    }

    /// Nobody of this end sleeps any more, or ever will by this wish.
    pub fn withdraw(self) {
        let next = |last: u64| Some(((last >> HOW_BITS) + 1) << HOW_BITS);
        let _ = self.wished.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// For a sender that has just published: the ways in which the receiver wants to be woken, now the caller's duty.
    #[inline(always)]
    pub fn granted_by_sender(self) -> u32 {
        self.granted_by_sender_behind(|_| {})
    }

    /// The same, behind what may be done twice for it: whoever stops before the grant has taken nothing from the next sender.
    #[inline(always)]
    pub fn granted_by_sender_behind(self, first: impl FnOnce(u32)) -> u32 {
        // ORDER: SeqCst load after the SeqCst swap of `RingMemory::publish`: no fence in between; pairs with the fence of `want`.
        fence_for_the_model_checker();
        let last = self.wished.load(Ordering::SeqCst);
        if self.granted.load(Ordering::Relaxed) == last >> HOW_BITS {
            return WANT_NOTHING;
        }
        first((last & HOW) as u32);
        self.grant(last)
    }

    /// For a receiver that has just released enough: the ways in which the sender wants to be woken, now the caller's duty.
    #[inline]
    pub fn granted_by_receiver(self) -> u32 {
        // ORDER: the credit was a Release store, so a fence must keep this look behind it; pairs with the fence of `want`.
        fence(Ordering::SeqCst);
        let last = self.wished.load(Ordering::Relaxed);
        if self.granted.load(Ordering::Relaxed) == last >> HOW_BITS {
            return WANT_NOTHING;
        }
        self.grant(last)
    }

    #[cold]
    fn grant(self, last: u64) -> u32 {
        // ORDER: SeqCst swap, as in `granted_by_sender`: of several wakers of this end one gets the wish. (One that comes late with an
        // older wish grants it anew, and the next waker the newer one once more: a doorbell too many.)
        match self.granted.swap(last >> HOW_BITS, Ordering::SeqCst) == last >> HOW_BITS {
            true => WANT_NOTHING,
            false => (last & HOW) as u32,
        }
    }
}

// A word of one process, which any of its peers may write: who sleeps sets it, who wakes takes it back. For futexes, which need a word that
// changes.

/// Announces that this process is about to sleep. Look once more afterwards.
pub fn nap(flag: &AtomicU32) {
    // ORDER: as in `Wish::want`; pairs with `rouse`.
    flag.store(NAPS, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// What a sleeper's futex is compared with.
pub const NAPS: u32 = 1;

/// For whoever has just published by a SeqCst read-modify-write: did the process sleep? Then the caller wakes it.
#[inline(always)]
pub fn rouse(flag: &AtomicU32) -> bool {
    // ORDER: as in `Wish::granted_by_sender`; pairs with `nap`. SeqCst swap: of several wakers one gets it.
    fence_for_the_model_checker();
    flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::SeqCst) != 0
}

/// loom takes SeqCst accesses for AcqRel and knows only fences as sequentially consistent; elsewhere the accesses suffice.
#[inline(always)]
pub(crate) fn fence_for_the_model_checker() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
