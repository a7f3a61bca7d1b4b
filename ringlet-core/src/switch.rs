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
//! operations, so the receiver waits for it and finds the message. A sender that stays busy (stopped, killed, or lying) is given up:
//! the receiver closes the path and withdraws from the place where the next message would be (`Rx::withdraw`). That and the publish exclude each
//! other, so a message is taken, or its sender is told to send it through the kernel, and never both.
//!
//! Order. The sender counts what it sends through the kernel (`History::by_kernel`), and each message that it publishes begins with that
//! count. Its receiver counts what the kernel has brought from there (`Order`): so it knows of the next message of each way which one was
//! sent first, however often the way has changed meanwhile. What the kernel dropped is found out when it has nothing more;
//! and before its first message, and after so many through the kernel that some may have been dropped, a sender publishes nothing until
//! the kernel has nothing left for the receiver. It says so (`History::settle`): there the two counts agree. (Or it sends no more through
//! the kernel until its receiver has found that out.)

use crate::memory::Shared;
use crate::record::PlainU64;
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
    /// Messages sent through the kernel.
    pub by_kernel: AtomicU64,
    /// One more than `by_kernel` was when nothing was left there.
    pub settled: AtomicU64,
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
/// The receiver takes no more from this lane than what is in it when it withdraws.
pub const CLOSED: u32 = 2;

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

/// The receiver chooses the path of later messages. Unless that is the ring, wait until the sender `is_quiet`, and look at the ring once more.
#[inline]
pub fn turn(path: &AtomicU32, to: u32) {
    // ORDER: SeqCst and a fence (the looks that follow are only Acquire loads); pairs with `claim`.
    path.store(to, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// Is no sender between its look at the path and its publish?
#[inline]
pub fn is_quiet(busy: &AtomicU32) -> bool {
    // ORDER: Acquire; pairs with `done`.
    busy.load(Ordering::Acquire) == 0
}

impl History {
    /// The sender is about to send a message through the kernel.
    pub fn note_kernel(&self) {
        // ORDER: Release; pairs with `sent` (Acquire): whoever finds a later message in the ring finds a count that is not below it.
        self.by_kernel.store(self.before_next().wrapping_add(1), Ordering::Release);
    }

    /// For the sender: what the next message that it publishes begins with.
    #[inline(always)]
    pub fn before_next(&self) -> u64 {
        // Our own word. A receiver that writes there spoils the order of what it gets.
        self.by_kernel.load(Ordering::Relaxed)
    }

    /// The kernel has nothing left for the receiver.
    pub fn settle(&self) {
        // ORDER: Release; before the publish of what begins with this count; pairs with `Order::sync`.
        self.settled.store(self.before_next().wrapping_add(1), Ordering::Release);
    }

    #[inline(always)]
    fn sent(&self) -> u64 {
        // ORDER: Acquire; after the look at the message; pairs with `note_kernel`.
        self.by_kernel.load(Ordering::Acquire)
    }
}

/// What a lane's receiver knows of the order of its messages and those of the same sender that the kernel brings.
#[derive(Default)]
pub struct Order {
    /// How many the kernel has brought.
    came: PlainU64,
    /// `came` is counted from where the sender counts: not before the two have once agreed.
    synced: PlainU64,
    /// One more than the number of the message for which the kernel is about to be asked.
    noted: PlainU64,
}

impl Order {
    pub fn reset(&self) {
        for word in [&self.came, &self.synced, &self.noted] {
            word.set(0);
        }
    }

    /// The kernel has brought a message of this sender.
    pub fn came(&self) {
        self.came.set(self.came.get().wrapping_add(1));
    }

    /// Was the next message of the lane, before which its sender had sent `before` through the kernel, sent before what the kernel was
    /// just found to have of that sender?
    pub fn is_first(&self, history: &History, before: u64) -> bool {
        self.sync(history, before);
        self.has_come(before)
    }

    /// Has the kernel brought all that was sent there before?
    #[inline(always)]
    fn has_come(&self, before: u64) -> bool {
        self.synced.get() != 0 && self.came.get().wrapping_sub(before) as i64 >= 0
    }

    /// What was not brought before the counts agreed was dropped.
    fn sync(&self, history: &History, before: u64) {
        // ORDER: Acquire; pairs with `History::settle`.
        let settled = history.settled.load(Ordering::Acquire) == before.wrapping_add(1);
        if settled && !self.has_come(before) {
            self.came.set(before);
            self.synced.set(1);
        }
    }

    /// May message number `next` of the lane be taken? If not, the kernel is asked first; when it has nothing (`kernel_empty`), the
    /// answer is yes, whatever the sender says.
    #[inline(always)]
    pub fn may_take(&self, history: &History, next: u64, before: u64, kernel_empty: bool) -> bool {
        let sent = history.sent();
        if self.came.get().wrapping_sub(sent) as i64 > 0 {
            // From before the lane was there, or counted late by another thread.
            self.came.set(sent);
        }
        if self.has_come(before) {
            return true;
        }
        self.sync(history, before);
        if self.has_come(before) {
            return true;
        }
        let number = next.wrapping_add(1);
        if kernel_empty && self.noted.get() == number {
            self.came.set(before);
            self.synced.set(1);
            return true;
        }
        self.noted.set(number);
        false
    }
}

/// loom takes SeqCst accesses for AcqRel and knows only fences as sequentially consistent; elsewhere the accesses suffice.
#[inline(always)]
fn fence_for_the_model_checker() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
