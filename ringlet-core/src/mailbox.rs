//! Many senders, one receiver: a lane (a `queue`) for each sender, so that none can harm another's messages, and a list of lanes that
//! may hold something new, so that the receiver's work does not grow with those that are idle (the SMiLE paper's remote enqueue).
//!
//! The list is a bitmap of two levels (`layout::Ready`):
//!
//! ```text
//! sender                                  receiver
//!   publish in the lane (RMW, SeqCst)       take the summary's bits, then the words' (RMW, SeqCst)
//!   set the lane's bit in its word          look at the lanes
//!   set the word's bit in the summary
//! ```
//!
//! A sender that finds its lane's bit still set leaves it: the receiver takes it only afterwards, and then looks at the lane. So a
//! message is never missed by honest ones. Those who share a bitmap can hide each other's bits from the receiver, no more: give
//! one to each circle of senders that trust each other. And bits are but hints: `Inbox::poll` looks at one more lane every time,
//! each in its turn, so that what is hidden is found late, not never; and a bit without a message costs one look.

use crate::layout::{LANE_MAX_COUNT, READY_WORD_COUNT, Ready};
use crate::sync::Ordering;
#[cfg(any(loom, not(target_arch = "x86_64")))]
use crate::sync::fence;

/// Says that there is something new in `lane`. After the message was published, before the look at the receiver's interrupt flag.
#[inline]
pub fn announce(ready: &Ready, lane: usize) {
    let (word, bit) = (lane / 64 % READY_WORD_COUNT, 1 << (lane % 64));
    // ORDER: SeqCst, behind the SeqCst swap that published; pairs with `Inbox::collect`: if we see the bit set, the receiver takes it
    // after this load, and its look at the lane finds the message.
    #[cfg(loom)]
    fence(Ordering::SeqCst); // which alone is sequentially consistent there
    if ready.words[word].load(Ordering::SeqCst) & bit != 0 {
        return;
    }
    // ORDER: SeqCst; pairs with `Inbox::collect`. First the word, then the summary: what the summary leads to is there.
    ready.words[word].fetch_or(bit, Ordering::SeqCst);
    if ready.summary.load(Ordering::SeqCst) & 1 << word == 0 {
        ready.summary.fetch_or(1 << word, Ordering::SeqCst);
    }
}

/// Has anything been announced? The cheapest look, for spinning.
#[inline(always)]
pub fn announced(ready: &Ready) -> bool {
    // ORDER: SeqCst; before going to sleep it follows the fence of `wait::arm`.
    ready.summary.load(Ordering::SeqCst) != 0
}

/// Messages that one lane may deliver in a row before the others are looked at: its lines are in the cache, and the sender's
/// announcement is not waited for.
const IN_A_ROW: u32 = 8;

/// The receiver's own state: lanes that it has still to look at.
pub struct Inbox {
    pending: [u64; READY_WORD_COUNT],
    /// Where the search for a pending lane begins.
    next: usize,
    /// The lane that was served last: the likeliest one to have more.
    last: usize,
    /// How often in a row.
    row: u32,
    /// The lane to be looked at in its turn.
    turn: usize,
}

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox { pending: [0; READY_WORD_COUNT], next: 0, last: 0, row: IN_A_ROW, turn: 0 }
    }
}

impl Inbox {
    /// Takes over what senders have announced.
    #[inline]
    pub fn collect(&mut self, ready: &Ready) {
        // ORDER: SeqCst, all; pairs with `announce`: a bit that a sender saw set, or set before, is taken before our looks at the lanes.
        if ready.summary.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut words = ready.summary.swap(0, Ordering::SeqCst);
        words &= (1 << READY_WORD_COUNT) - 1;
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            words &= words - 1;
            self.pending[word] |= ready.words[word].swap(0, Ordering::SeqCst);
        }
        // WHY: a SeqCst read-modify-write is this fence on x86.
        #[cfg(any(loom, not(target_arch = "x86_64")))]
        fence(Ordering::SeqCst);
    }

    /// Has to look at `lane` again: it held more than was taken, or it is new.
    pub fn keep(&mut self, lane: usize) {
        self.pending[lane / 64 % READY_WORD_COUNT] |= 1 << (lane % 64);
    }

    /// The next lane that holds something, of `lanes`: each in its turn. `has` looks at one. What it finds stays noted until a later
    /// call finds the lane empty.
    #[inline]
    pub fn poll<'a>(
        &mut self,
        bitmaps: impl IntoIterator<Item = &'a Ready>,
        lanes: usize,
        mut has: impl FnMut(usize) -> bool,
    ) -> Option<usize> {
        let lanes = lanes.min(LANE_MAX_COUNT);
        if self.row < IN_A_ROW && self.last < lanes && has(self.last) {
            self.row += 1;
            return Some(self.last);
        }
        bitmaps.into_iter().for_each(|ready| self.collect(ready));
        if lanes > 0 {
            self.turn = (self.turn + 1) % lanes;
            self.keep(self.turn);
            self.keep(self.last);
        }
        self.next_pending(lanes, has)
    }

    /// The next lane that was announced or kept and holds something: at most a look at each, since nothing is collected meanwhile.
    pub fn next_pending(
        &mut self,
        lanes: usize,
        mut has: impl FnMut(usize) -> bool,
    ) -> Option<usize> {
        while let Some(lane) = self.first_pending() {
            if lane < lanes && has(lane) {
                (self.last, self.next, self.row) = (lane, lane + 1, 1);
                return Some(lane);
            }
            self.pending[lane / 64] &= !(1 << (lane % 64));
        }
        None
    }

    /// The first pending lane from `next` on, around the end.
    fn first_pending(&self) -> Option<usize> {
        let next = self.next % LANE_MAX_COUNT;
        let from = next / 64;
        let after = self.pending[from] & u64::MAX << (next % 64);
        if after != 0 {
            return Some(from * 64 + after.trailing_zeros() as usize);
        }
        (1..=READY_WORD_COUNT).map(|i| (from + i) % READY_WORD_COUNT).find_map(|word| {
            let bits = self.pending[word];
            (bits != 0).then(|| word * 64 + bits.trailing_zeros() as usize)
        })
    }
}
