//! Moving one direction of a stream between the kernel's connection and the ring at a known byte, as two state machines.
//!
//! The kernel's connection is a queue of bytes, shared by the stream and by doorbells (single bytes without meaning that
//! wake a receiver sleeping in the kernel). Both ends know exactly how many bytes ever went into it and came out of it, so
//! a count of kernel bytes names a place in the stream:
//!
//! ```text
//! kernel   s s s s d d s s     s = stream, d = doorbell
//!                 |   |
//! ring     Start(4) r r r Back(6)
//! ```
//!
//! `Start(n)`: the first n kernel bytes come before what follows in the ring, and all after them are doorbells. `Back(n)`:
//! kernel bytes up to n are doorbells, and the stream goes on behind them. The sender publishes a mark *before* the first
//! kernel byte that it gives a meaning to. Hence the receiver's one rule, on which everything rests: **count what waits in
//! the kernel, then look at the ring.** If no mark is there, each byte that was counted still has the old meaning; of bytes
//! that arrived after the count nothing is known, and they are not touched. The same with the end of the stream: it is
//! believed if it was seen before a count that found nothing and a look that found the ring empty.
//!
//! Each machine belongs to one caller at a time (the owner's lock) and may lie in memory shared over fork.

use crate::ring::{Mark, PlainU64, RingMemory, Tx};

/// The sender's side: through the kernel (0) or through the ring (1).
#[derive(Default)]
#[repr(C)]
pub struct Sending {
    in_ring: PlainU64,
}

impl Sending {
    /// Through the ring? Only then is a byte put on the kernel's connection a doorbell.
    #[inline(always)]
    pub fn in_ring(&self) -> bool {
        self.in_ring.get() != 0
    }

    /// From the kernel to the ring; `written` counts all bytes ever written to the kernel's connection. False when the
    /// receiver has not read all of an earlier stay in the ring: try again later.
    pub fn start<M: RingMemory>(&self, tx: &Tx, memory: &M, written: u64) -> bool {
        // Into a drained ring only, so that it always holds at most one pair of marks and has room for the second.
        let done =
            !self.in_ring() && tx.drained(memory) && tx.push_mark(memory, Mark::Start(written));
        if done {
            self.in_ring.set(1);
        }
        done
    }

    /// From the ring to the kernel; `written` counts all bytes ever written to it, doorbells too. No doorbell may be on its
    /// way meanwhile, and none may follow, not even for this mark: the stream's next bytes wake who sleeps in the kernel.
    /// There is always room for this mark.
    pub fn back<M: RingMemory>(&self, tx: &Tx, memory: &M, written: u64) -> bool {
        let done = self.in_ring() && tx.push_mark(memory, Mark::Back(written));
        if done {
            self.in_ring.set(0);
        }
        done
    }
}

/// The receiver's side.
#[derive(Default, Debug)]
#[repr(C)]
pub struct Receiving {
    mode: PlainU64,
    until: PlainU64,
}

const KERNEL: u64 = 0;
/// A `Start` was passed: the stream's bytes before it are still in the kernel, up to `until`.
const DRAINING: u64 = 1;
const RING: u64 = 2;
/// A `Back` was passed: doorbells are still in the kernel, up to `until`.
const DISCARDING: u64 = 3;

/// What the receiver has found. The fields stand in the order in which it must look.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The kernel's connection has got its end: what waits is all that will.
    pub ended: bool,
    /// Bytes ever taken out of it.
    pub consumed: u64,
    /// Bytes that wait in it.
    pub waiting: u64,
    pub ring: Head,
}

/// What stands next in the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Head {
    Empty,
    Bytes,
    Mark(Mark),
}

/// What the receiver has to do; afterwards it looks at everything again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Give at most so many kernel bytes to the program.
    Read(u64),
    /// Throw away exactly so many kernel bytes: doorbells.
    Discard(u64),
    /// Give ring bytes to the program.
    Pop,
    /// Go past the ring's mark.
    PassMark,
    /// Sleep until the kernel has something.
    Wait,
    /// End of the stream.
    End,
    /// The peer's counts contradict the kernel's, or it ended before what it promised.
    Broken,
}

impl Receiving {
    /// In the ring with nothing to do in the kernel first: then `Rx::pop` alone tells what to do, unless it finds nothing.
    #[inline(always)]
    pub fn in_ring(&self) -> bool {
        self.mode.get() == RING
    }

    pub fn next(&self, seen: &Seen) -> Step {
        if matches!(self.mode.get(), DRAINING | DISCARDING) {
            let (draining, until) = (self.mode.get() == DRAINING, self.until.get());
            let Some(left) = until.checked_sub(seen.consumed) else { return Step::Broken };
            let n = left.min(seen.waiting);
            return match (left, n, draining) {
                (0, ..) => {
                    self.mode.set(if draining { RING } else { KERNEL });
                    self.settled(seen)
                }
                (_, 0, _) if seen.ended => Step::Broken,
                (_, 0, _) => Step::Wait,
                (_, _, true) => Step::Read(n),
                (_, _, false) => Step::Discard(n),
            };
        }
        self.settled(seen)
    }

    fn settled(&self, seen: &Seen) -> Step {
        match (self.mode.get(), seen.ring) {
            (KERNEL, Head::Mark(Mark::Start(until))) => self.pass(DRAINING, until),
            (RING, Head::Mark(Mark::Back(until))) => self.pass(DISCARDING, until),
            (RING, Head::Bytes) => Step::Pop,
            (_, Head::Empty) if seen.waiting > 0 && self.in_ring() => Step::Discard(seen.waiting),
            (_, Head::Empty) if seen.waiting > 0 => Step::Read(seen.waiting),
            (_, Head::Empty) if seen.ended => Step::End,
            (_, Head::Empty) => Step::Wait,
            _ => Step::Broken,
        }
    }

    fn pass(&self, mode: u64, until: u64) -> Step {
        self.until.set(until);
        self.mode.set(mode);
        Step::PassMark
    }
}
