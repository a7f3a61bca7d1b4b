//! Where a lane's next message goes, decided by its receiver: to the ring while the receiver looks there, to the kernel when it is about
//! to sleep. So a sleeper needs no doorbell: what is sent to it through the kernel wakes it, however it sleeps.
//!
//! ```text
//! receiver, before it sleeps           sender, for each message
//!   path = kernel   (then a fence)       busy = 1        (RMW)
//!   wait while busy (a few stores)       look at path
//!   look at the ring once more           ring, or something is not yet taken: publish; else: send through the kernel
//!   nothing there: sleep                 busy = 0
//! ```
//!
//! While something that was published is not taken, the receiver does not sleep, or is about to find it; so more may follow it, which keeps
//! the order. (One that sleeps all the same, because it does not care for what is there, says `KERNEL_AT_ONCE`.)
//!
//! If the sender's look does not see the new path, its `busy` precedes the receiver's fence in the one order of sequentially consistent
//! operations, so the receiver waits for it and finds the message. A sender that stays busy (stopped, killed, or lying) is given up, by
//! a last look and the path `GivenUp`; whoever published under it learns it by a look of its own (`gave_up`).
//!
//! Order. The sender says before it sends through the kernel how many messages it had published (`Words::before`). A receiver that finds
//! that this has changed, and that the next message comes after it, takes what the kernel has first.

use crate::memory::Shared;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Where a lane's words lie: in the page of its control words, behind those.
pub const WORDS_OFFSET: usize = 2048;

/// Each line has one writer.
#[repr(C)]
pub struct Words {
    pub receiver: Path,
    pub sender: Busy,
    pub history: History,
}

/// Written by the receiver.
#[repr(C, align(128))]
pub struct Path {
    pub path: AtomicU32,
}

/// Written by the sender, for each message.
#[repr(C, align(128))]
pub struct Busy {
    pub busy: AtomicU32,
}

/// Written by the sender, seldom.
#[repr(C, align(128))]
pub struct History {
    /// Messages published before the last one that went through the kernel (low half), and how many went there (high half).
    pub before: AtomicU64,
    /// 1 once the sender publishes no more.
    pub left: AtomicU32,
    /// 1 once the sender has mapped the lane.
    pub attached: AtomicU32,
}

// SAFETY: atomics only; all bit patterns are valid.
unsafe impl Shared for Words {}

/// Values of `Path::path`; fresh memory says `KERNEL`.
pub const KERNEL: u32 = 0;
pub const RING: u32 = 1;
/// The receiver may sleep although the ring is not empty.
pub const KERNEL_AT_ONCE: u32 = 4;
/// The receiver takes no more from this lane than what is in it.
pub const CLOSED: u32 = 2;
/// As `CLOSED`, and it may have missed what a busy sender was publishing.
pub const GIVEN_UP: u32 = 3;

/// The sender is about to publish. True: it may, and then calls `done`. False: the path is the kernel's. `untaken` says whether something
/// that was published is not yet taken.
#[inline(always)]
pub fn claim(busy: &AtomicU32, path: &AtomicU32, untaken: impl FnOnce() -> bool) -> bool {
    // ORDER: SeqCst, both; pairs with `turn` and `is_quiet`: of this and a turn, one is seen by the other side. Who sees the turn sees what
    // the receiver had taken before it.
    busy.swap(1, Ordering::SeqCst);
    fence_for_the_model_checker();
    let may = match path.load(Ordering::SeqCst) {
        RING => true,
        KERNEL => untaken(),
        _ => false,
    };
    if !may {
        done(busy);
    }
    may
}

#[inline(always)]
pub fn done(busy: &AtomicU32) {
    // ORDER: Release; pairs with `is_quiet` (Acquire): who sees it sees what was published before.
    busy.store(0, Ordering::Release);
}

/// After a publish (a SeqCst read-modify-write): has the receiver given this lane up, and may have missed it?
#[inline(always)]
pub fn gave_up(path: &AtomicU32) -> bool {
    fence_for_the_model_checker();
    // ORDER: SeqCst; pairs with the fence of `turn`, after which the receiver takes its last look.
    path.load(Ordering::SeqCst) == GIVEN_UP
}

/// The receiver chooses the path of later messages. Unless that is the ring, wait until the sender `is_quiet`, and look at the ring once more.
#[inline]
pub fn turn(path: &AtomicU32, to: u32) {
    // ORDER: SeqCst and a fence (the looks that follow are only Acquire loads); pairs with `claim` and `gave_up`.
    path.store(to, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// Is no sender between its look at the path and its publish?
#[inline]
pub fn is_quiet(busy: &AtomicU32) -> bool {
    // ORDER: Acquire; pairs with `done`.
    busy.load(Ordering::Acquire) == 0
}

/// The sender is about to send a message through the kernel, after `published` messages.
pub fn note_kernel(before: &AtomicU64, published: u64) {
    let count = (before.load(Ordering::Relaxed) >> 32).wrapping_add(1);
    // ORDER: Release; whoever finds a later message in the ring sees this (it was published after it).
    before.store(count << 32 | published & 0xffff_ffff, Ordering::Release);
}

/// What the receiver must know before it takes message number `next` (counted from 0): `Some` is the history that obliges it to take
/// what the kernel has first. `seen` is the history for which it has done that.
#[inline(always)]
pub fn kernel_comes_first(before: &AtomicU64, seen: u64, next: u64) -> Option<u64> {
    // ORDER: Acquire; after the look at the message; pairs with `note_kernel`.
    let history = before.load(Ordering::Acquire);
    let reached = (next as u32).wrapping_sub(history as u32) as i32 >= 0;
    (history != seen && reached).then_some(history)
}

/// Has the sender sent through the kernel after message number `next`, which is still there? Then that comes first.
pub fn kernel_comes_later(before: &AtomicU64, next: u64) -> bool {
    // ORDER: Acquire; as in `kernel_comes_first`.
    let history = before.load(Ordering::Acquire);
    ((next as u32).wrapping_sub(history as u32) as i32) < 0
}

/// loom takes SeqCst accesses for AcqRel and knows only fences as sequentially consistent; elsewhere the accesses suffice.
#[inline(always)]
fn fence_for_the_model_checker() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
