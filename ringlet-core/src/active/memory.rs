//! The memory of a connection as one end sees it: what arrives is read where it lies, what leaves is written to the peer.

use super::layout::*;
use crate::memory::Area;
use crate::sync::{AtomicU64, Ordering};
use crate::wait::Wish;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    Request = 0,
    Reply = 1,
}

/// Places are checked by whoever implements this: at worst nothing is copied.
pub trait Memory {
    /// Uncompleted requests of each end: a power of two, at most 64. Each queue has as many slots and buffers.
    const DEPTH: usize = DEPTH;

    /// The stamp of an arriving slot. What was written to the slot and its buffer before it was published is seen.
    fn stamp(&self, queue: Queue, slot: usize) -> u64;
    /// What arrived in a slot, behind its stamp.
    fn read(&self, queue: Queue, slot: usize, to: &mut [u8]);
    /// # Safety
    /// `to` is valid for writing `n` bytes.
    unsafe fn read_buffer(&self, queue: Queue, buffer: usize, to: *mut u8, n: usize);
    /// How many messages of a leaving queue the peer has taken.
    fn credit(&self, queue: Queue) -> u64;
    /// What we wrote to a leaving slot, behind its stamp.
    fn written(&self, queue: Queue, slot: usize, to: &mut [u8]);

    /// Writes to a leaving slot, behind its stamp.
    fn write(&self, queue: Queue, slot: usize, bytes: &[u8]);
    fn write_buffer(&self, queue: Queue, buffer: usize, bytes: &[u8]);
    /// The stamp arrives after all that was written before it.
    fn publish(&self, queue: Queue, slot: usize, stamp: u64);
    /// Arrives after all that was published before it, and after our reading of what it gives back.
    fn give_credit(&self, queue: Queue, taken: u64);
}

/// A connection's segment, as end 0 or 1 sees it.
#[derive(Clone, Copy)]
pub struct SegmentMemory {
    segment: Area,
    end: usize,
}

impl SegmentMemory {
    /// Panics when the segment is too small: the caller has checked its size.
    pub fn new(segment: Area, end: usize) -> SegmentMemory {
        assert!(segment.len() >= SEGMENT_BYTES && end < 2);
        SegmentMemory { segment, end }
    }

    pub fn area(&self) -> Area {
        self.segment
    }

    pub fn head<'a>(&self) -> &'a ConnectionHead {
        self.segment.at(0)
    }
    /// What we tell the peer.
    #[inline(always)]
    pub fn ours<'a>(&self) -> &'a Side {
        self.segment.at(SIDE_OFFSET + self.end * SIDE_BYTES)
    }
    /// What the peer tells us.
    #[inline(always)]
    pub fn theirs<'a>(&self) -> &'a Side {
        self.segment.at(SIDE_OFFSET + (1 - self.end) * SIDE_BYTES)
    }

    /// To be told of what is published while the queues are not watched: the wish of this end, or of the peer.
    #[inline(always)]
    pub fn watch_wish(&self, ours: bool) -> Wish<'_> {
        let (sleeper, waker) = self.sides(ours);
        Wish { wished: &sleeper.watching.want, granted: &waker.watching.granted }
    }

    /// To be told of requests that were served.
    #[inline(always)]
    pub fn room_wish(&self, ours: bool) -> Wish<'_> {
        let (sleeper, waker) = self.sides(ours);
        Wish { wished: &sleeper.room.want, granted: &waker.room.granted }
    }

    #[inline(always)]
    fn sides(&self, ours_first: bool) -> (&Side, &Side) {
        if ours_first { (self.ours(), self.theirs()) } else { (self.theirs(), self.ours()) }
    }

    #[inline(always)]
    fn slot(&self, end: usize, queue: Queue, slot: usize) -> usize {
        SLOTS_OFFSET + ((2 * end + queue as usize) * DEPTH + slot % DEPTH) * SLOT_BYTES
    }
    #[inline(always)]
    fn buffer(&self, end: usize, queue: Queue, buffer: usize) -> usize {
        BUFFERS_OFFSET + ((2 * end + queue as usize) * DEPTH + buffer % DEPTH) * BUFFER_BYTES
    }
    fn peer(&self) -> usize {
        1 - self.end
    }
    #[inline(always)]
    fn stamp_of(&self, end: usize, queue: Queue, slot: usize) -> &AtomicU64 {
        self.segment.at(self.slot(end, queue, slot))
    }
}

impl Memory for SegmentMemory {
    #[inline(always)]
    fn stamp(&self, queue: Queue, slot: usize) -> u64 {
        // ORDER: Acquire; pairs with `publish`.
        self.stamp_of(self.peer(), queue, slot).load(Ordering::Acquire)
    }
    #[inline(always)]
    fn read(&self, queue: Queue, slot: usize, to: &mut [u8]) {
        let n = to.len().min(SLOT_BYTES - 8);
        // SAFETY: `to` is valid for its length.
        unsafe { self.segment.read(self.slot(self.peer(), queue, slot) + 8, to.as_mut_ptr(), n) };
    }
    #[inline(always)]
    unsafe fn read_buffer(&self, queue: Queue, buffer: usize, to: *mut u8, n: usize) {
        let at = self.buffer(self.peer(), queue, buffer);
        // SAFETY: `to` has room for `n` bytes by our own contract, and no more are written.
        unsafe { self.segment.read(at, to, n.min(BUFFER_BYTES)) };
    }
    #[inline(always)]
    fn credit(&self, queue: Queue) -> u64 {
        // ORDER: Acquire; pairs with `give_credit`.
        self.theirs().credit.taken[queue as usize].load(Ordering::Acquire)
    }
    fn written(&self, queue: Queue, slot: usize, to: &mut [u8]) {
        let n = to.len().min(SLOT_BYTES - 8);
        // SAFETY: `to` is valid for its length.
        unsafe { self.segment.read(self.slot(self.end, queue, slot) + 8, to.as_mut_ptr(), n) };
    }

    #[inline(always)]
    fn write(&self, queue: Queue, slot: usize, bytes: &[u8]) {
        let n = bytes.len().min(SLOT_BYTES - 8);
        // SAFETY: `bytes` is valid for its length.
        unsafe { self.segment.write(self.slot(self.end, queue, slot) + 8, bytes.as_ptr(), n) };
    }
    #[inline(always)]
    fn write_buffer(&self, queue: Queue, buffer: usize, bytes: &[u8]) {
        let (at, n) = (self.buffer(self.end, queue, buffer), bytes.len().min(BUFFER_BYTES));
        // SAFETY: `bytes` is valid for its length.
        unsafe { self.segment.write(at, bytes.as_ptr(), n) };
    }
    #[inline(always)]
    fn publish(&self, queue: Queue, slot: usize, stamp: u64) {
        // ORDER: SeqCst read-modify-write: Release for `stamp`, and it stands before the look at the peer's wish
        // (`Wish::granted_by_sender`), so no fence is needed between.
        self.stamp_of(self.end, queue, slot).swap(stamp, Ordering::SeqCst);
    }
    #[inline(always)]
    fn give_credit(&self, queue: Queue, taken: u64) {
        // ORDER: Release; pairs with `credit`.
        self.ours().credit.taken[queue as usize].store(taken, Ordering::Release);
    }
}
