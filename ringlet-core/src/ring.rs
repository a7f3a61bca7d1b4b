//! A one-way byte stream through shared memory: reserve and publish on one side, peek and release on the other.
//!
//! Positions run freely and never go back. A slot position counts slots, a data position bytes; the place is the position
//! modulo the size. Going back to slot 0 (or data byte 0) while the ring is drained is a jump forward to the next multiple of
//! the size: the skipped part counts as used until the receiver has passed it, so one subtraction tells what is free.
//!
//! Each side keeps its own state where its peer can't write (`Tx`, `Rx`); from shared memory it takes the other's words,
//! each loaded once and checked. A peer that lies gets `Corrupt` or loses its own bytes; it can't move us out of the segment.
//!
//! Sender and receiver are each one caller at a time (the owner's lock). The other orderings are written at their places.

use crate::layout::*;
use crate::memory::Buffers;
use crate::sync::{AtomicU64, Ordering};

/// What a ring is made of, as one of its ends sees it. The real one is `SegmentRing`; the model checker and the simulated
/// cluster bring their own.
///
/// Every write is remote, every read is local: the receiver reads slots and data, the sender reads the credit, and what the
/// sender reads of slots and data is what it wrote itself. So the references below are only loaded; what the other end
/// shall see goes through `publish`, `give_credit` and the writes, which on coherent memory are the plain stores that stand
/// here, and over an interconnect packets.
pub trait RingMemory {
    fn header(&self, slot: usize) -> &AtomicU64;
    fn credit_slots(&self) -> &AtomicU64;
    fn credit_data(&self) -> &AtomicU64;
    /// Puts the header on a slot. Data written before arrives before it, that slot's bytes with it. (One record may overtake
    /// another: the receiver waits for the one that is due.)
    #[inline(always)]
    fn publish(&self, slot: usize, header: u64) {
        // ORDER: Release; pairs with `Rx::look` (Acquire): the bytes of the record are visible with its header. It is a swap
        // so that on x86 it is also the StoreLoad barrier which the look at the receiver's interrupt flag needs (`wait`).
        self.header(slot).swap(header, Ordering::SeqCst);
    }
    /// Tells the sender what is consumed; `data` if that has changed. An older credit never replaces a newer one.
    #[inline(always)]
    fn give_credit(&self, slots: u64, data: Option<u64>) {
        // ORDER: Release, both; pairs with `Tx::refresh` (Acquire): our copies are done before the place is written again.
        if let Some(data) = data {
            self.credit_data().store(data, Ordering::Release);
        }
        self.credit_slots().store(slots, Ordering::Release);
    }
    fn ring_bytes(&self) -> usize;
    /// Slots per lap and slots used while the receiver keeps up; smaller under the model checker.
    fn slot_count(&self) -> usize {
        SLOT_COUNT
    }
    fn hot_slot_count(&self) -> usize {
        HOT_SLOT_COUNT
    }
    fn hot_data_bytes(&self) -> u64 {
        HOT_DATA_BYTES
    }
    /// # Safety
    /// `from` is valid for reading `n` bytes. (Places are checked: at worst nothing is copied.)
    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize);
    /// # Safety
    /// `to` is valid for writing `n` bytes.
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize);
    /// # Safety
    /// As for `write_slot`.
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize);
    /// # Safety
    /// As for `read_slot`.
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize);
}

/// Control records: how a direction changes its path (see `handover`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// The first `0` bytes of this direction went through the kernel; what follows is in the ring.
    Start(u64),
    /// The ring ends here; what follows comes through the kernel, from kernel byte `0` on.
    Back(u64),
}

/// The sender's own state.
#[derive(Default)]
#[repr(C)]
pub struct Tx {
    slots: PlainU64,
    data: PlainU64,
    /// What the receiver is known to have consumed: a copy of its credit, refreshed only when needed.
    known_slots: PlainU64,
    known_data: PlainU64,
}

/// The receiver's own state: where it reads, and how much of that record is consumed.
#[derive(Default)]
#[repr(C)]
pub struct Rx {
    slots: PlainU64,
    data: PlainU64,
    used: PlainU64,
}

/// A word of one owner at a time, behind its lock; atomic only so that it may lie in memory shared over fork.
#[derive(Default, Debug)]
#[repr(transparent)]
pub struct PlainU64(core::sync::atomic::AtomicU64);

impl PlainU64 {
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(core::sync::atomic::Ordering::Relaxed)
    }
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, core::sync::atomic::Ordering::Relaxed);
    }
}

/// What the receiver finds next.
#[derive(PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing is published.
    Empty,
    /// So many bytes were copied out; `true` when a sender that waits for room should now be looked for.
    Bytes(usize, bool),
    /// A mark stands here; `Rx::pass_mark` goes on.
    Mark(Mark),
    /// The peer wrote what no ringlet writes.
    Corrupt,
}

/// A record as its header announces it, checked.
struct Record {
    len: usize,
    flags: u64,
    /// Start in the data ring (place, not position), and the position after it, for `FLAG_DATA`.
    place: usize,
    data_end: u64,
}

const MARK_START: u64 = 1;
const MARK_BACK: u64 = 2;

/// The upper part of the header of the record at `position`.
#[inline(always)]
fn tag(position: u64) -> u64 {
    PUBLISHED | position & POSITION_MASK
}

fn header_word(position: u64, flags: u64, len: usize) -> u64 {
    tag(position) << (LEN_BITS + FLAG_BITS) | flags << LEN_BITS | len as u64
}

#[inline(always)]
fn write_word<M: RingMemory>(memory: &M, slot: usize, at: usize, word: u64) {
    // SAFETY: `word` is a local of 8 bytes.
    unsafe { memory.write_slot(slot, at, (&raw const word).cast(), 8) };
}

#[inline(always)]
fn read_word<M: RingMemory>(memory: &M, slot: usize, at: usize) -> u64 {
    let mut word = 0u64;
    // SAFETY: as in `write_word`.
    unsafe { memory.read_slot(slot, at, (&raw mut word).cast(), 8) };
    word
}

fn round_to_line(bytes: u64) -> u64 {
    bytes.next_multiple_of(LINE_BYTES as u64)
}

impl Tx {
    pub fn reset(&self) {
        for word in [&self.slots, &self.data, &self.known_slots, &self.known_data] {
            word.set(0);
        }
    }

    /// Takes over the receiver's credit if it makes sense; a credit from nowhere is ignored (the liar's ring stays full).
    fn refresh<M: RingMemory>(&self, memory: &M) {
        // ORDER: Acquire; pairs with `RingMemory::give_credit` (Release): the receiver has finished reading what we may now overwrite.
        let slots = memory.credit_slots().load(Ordering::Acquire);
        let data = memory.credit_data().load(Ordering::Acquire);
        if slots.wrapping_sub(self.known_slots.get()) <= self.slots.get() - self.known_slots.get() {
            self.known_slots.set(slots);
        }
        if data.wrapping_sub(self.known_data.get()) <= self.data.get() - self.known_data.get() {
            self.known_data.set(data);
        }
    }

    /// Slots free for records; one more is always kept for a mark.
    fn free_slots<M: RingMemory>(&self, memory: &M) -> u64 {
        let used = self.slots.get() - self.known_slots.get();
        (memory.slot_count() as u64 - 1).saturating_sub(used)
    }

    fn free_data<M: RingMemory>(&self, memory: &M) -> u64 {
        (memory.ring_bytes() as u64).saturating_sub(self.data.get() - self.known_data.get())
    }

    /// Is everything that was published also consumed?
    pub fn drained<M: RingMemory>(&self, memory: &M) -> bool {
        self.refresh(memory);
        self.slots.get() == self.known_slots.get()
    }

    /// Changes whenever the receiver is found to have consumed something.
    pub fn progress(&self) -> u64 {
        self.known_slots.get()
    }

    /// Bytes published and not yet consumed, by our own headers (a peer that overwrites them misleads only this figure).
    pub fn outstanding_bytes<M: RingMemory>(&self, memory: &M) -> usize {
        self.refresh(memory);
        let (mut position, mut total) = (self.known_slots.get(), 0);
        for _ in 0..memory.slot_count() {
            let slot = position as usize & (memory.slot_count() - 1);
            let header = memory.header(slot).load(Ordering::Relaxed);
            if position >= self.slots.get() || header >> (LEN_BITS + FLAG_BITS) != tag(position) {
                break;
            }
            let flags = header >> LEN_BITS & ((1 << FLAG_BITS) - 1);
            if flags & FLAG_CONTROL == 0 {
                total += (header & ((1 << LEN_BITS) - 1)) as usize;
            }
            position = Rx::position_after(memory, position, flags);
        }
        total
    }

    /// What follows the first `used` bytes of the oldest record that the receiver has not released, as much as `to` holds. Empty
    /// when nothing follows, and for a mark. For a receiver that has left the ring.
    pub fn oldest<'b, M: RingMemory>(&self, memory: &M, used: usize, to: &'b mut [u8]) -> &'b [u8] {
        let position = self.known_slots.get();
        if position >= self.slots.get() {
            return &[];
        }
        let slot = position as usize & (memory.slot_count() - 1);
        match Rx::look(memory, position) {
            Ok(Some(record)) if record.flags & FLAG_CONTROL == 0 && used < record.len => {
                let n = (record.len - used).min(to.len());
                // SAFETY: `n` writable bytes; the record was checked by `look`.
                unsafe {
                    if record.flags & FLAG_DATA == 0 {
                        memory.read_slot(slot, 8 + used, to.as_mut_ptr(), n);
                    } else {
                        memory.read_data(record.place + used, to.as_mut_ptr(), n);
                    }
                }
                &to[..n]
            }
            _ => &[],
        }
    }

    /// Goes past the oldest record, on the receiver's behalf. False when there is none (or the peer has spoiled it).
    pub fn pass_oldest<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.known_slots.get();
        if position >= self.slots.get() {
            return false;
        }
        let Ok(Some(record)) = Rx::look(memory, position) else { return false };
        self.known_slots
            .set(Rx::position_after(memory, position, record.flags).min(self.slots.get()));
        true
    }

    /// Takes the receiver's final credit over, when it has left the ring.
    pub fn take_credit<M: RingMemory>(&self, memory: &M) {
        self.refresh(memory);
    }

    /// Would a sender that asks for room be content: a quarter of the data, and as many slots as are surely free when the
    /// receiver keeps up (a rewind takes nearly all others out of the count until the receiver has passed it).
    pub fn writable<M: RingMemory>(&self, memory: &M) -> bool {
        let enough = |tx: &Tx| {
            tx.free_slots(memory) >= memory.hot_slot_count() as u64 / 4
                && tx.free_data(memory) >= memory.ring_bytes() as u64 / 4
        };
        enough(self) || {
            self.refresh(memory);
            enough(self)
        }
    }

    /// Publishes one record from the program's buffers. Returns its length, 0 when there is no room.
    #[inline]
    pub fn push<M: RingMemory>(&self, memory: &M, from: &mut Buffers) -> usize {
        let wanted = from.remaining();
        if wanted == 0 {
            return 0;
        }
        if self.free_slots(memory) == 0 {
            self.refresh(memory);
            if self.free_slots(memory) == 0 {
                return 0;
            }
        }
        let slot = self.slots.get() as usize & (memory.slot_count() - 1);
        if wanted <= INLINE_BYTES {
            let mut at = 0;
            while at < wanted {
                let (piece, n) = from.take(wanted - at);
                // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
                unsafe { memory.write_slot(slot, 8 + at, piece, n) };
                at += n;
            }
            self.publish(memory, slot, 0, wanted);
            return wanted;
        }
        let Some((place, len)) = self.reserve_data(memory, wanted) else { return 0 };
        let start = self.data.get();
        write_word(memory, slot, 8, start);
        let mut at = 0;
        while at < len {
            let (piece, n) = from.take(len - at);
            // SAFETY: as above.
            unsafe { memory.write_data(place + at, piece, n) };
            at += n;
        }
        self.data.set(start + round_to_line(len as u64));
        self.publish(memory, slot, FLAG_DATA, len);
        len
    }

    /// A contiguous place in the data ring for up to `wanted` bytes, and how many.
    fn reserve_data<M: RingMemory>(&self, memory: &M, wanted: usize) -> Option<(usize, usize)> {
        let size = memory.ring_bytes() as u64;
        let len = wanted.min(RECORD_MAX_BYTES).min(memory.ring_bytes() / 4);
        let needed = round_to_line(len as u64);
        let place = self.data.get() & (size - 1);
        let hot = memory.hot_data_bytes();
        if place / hot != (place + needed) / hot {
            // The end of a hot stretch: the only place where a credit is asked for that is not needed yet.
            self.refresh(memory);
            let drained = self.data.get() == self.known_data.get();
            // Drained: start again at the beginning, whose lines are still in both caches.
            if drained || place + needed > size {
                let rewound = self.data.get().next_multiple_of(size);
                if drained {
                    // Nothing is unread, so nothing is skipped: the whole ring is free. (An older credit is out of range
                    // for `refresh` until the receiver has passed the first record here.)
                    self.known_data.set(rewound);
                }
                if rewound + needed - self.known_data.get() <= size {
                    self.data.set(rewound);
                } else if place + needed > size {
                    return self.reserve_tail(memory, len);
                }
            }
        }
        if self.free_data(memory) < needed {
            self.refresh(memory);
            if self.free_data(memory) < needed {
                return None;
            }
        }
        Some(((self.data.get() & (size - 1)) as usize, len))
    }

    /// The record does not fit before the end of the ring, nor is its beginning free: use the tail for a shorter one.
    fn reserve_tail<M: RingMemory>(&self, memory: &M, len: usize) -> Option<(usize, usize)> {
        let size = memory.ring_bytes() as u64;
        let place = self.data.get() & (size - 1);
        let tail = (size - place).min(self.free_data(memory)) & !(LINE_BYTES as u64 - 1);
        (tail > 0).then_some((place as usize, len.min(tail as usize)))
    }

    #[inline(always)]
    fn publish<M: RingMemory>(&self, memory: &M, slot: usize, flags: u64, len: usize) {
        let position = self.slots.get();
        let mut next = position + 1;
        let mut flags = flags;
        let hot = memory.hot_slot_count();
        if slot == hot - 1 {
            // At the end of the first page: rewind if the receiver keeps up, so that the lag fits in half a page.
            self.refresh(memory);
            if position - self.known_slots.get() <= hot as u64 / 2 {
                flags |= FLAG_REWIND;
                next = position.next_multiple_of(memory.slot_count() as u64);
                if next == position {
                    next = position + memory.slot_count() as u64;
                }
            }
        }
        self.slots.set(next);
        memory.publish(slot, header_word(position, flags, len));
    }

    /// Publishes a mark. There is always room for one `Back`; a `Start` is only sent into a drained ring.
    pub fn push_mark<M: RingMemory>(&self, memory: &M, mark: Mark) -> bool {
        self.refresh(memory);
        if self.slots.get() - self.known_slots.get() >= memory.slot_count() as u64 {
            return false;
        }
        let slot = self.slots.get() as usize & (memory.slot_count() - 1);
        let (kind, value) = match mark {
            Mark::Start(bytes) => (MARK_START, bytes),
            Mark::Back(bytes) => (MARK_BACK, bytes),
        };
        write_word(memory, slot, 8, kind);
        write_word(memory, slot, 16, value);
        self.publish(memory, slot, FLAG_CONTROL, 16);
        true
    }
}

impl Rx {
    pub fn reset(&self) {
        for word in [&self.slots, &self.data, &self.used] {
            word.set(0);
        }
    }

    /// Bytes taken of the record that stands next.
    pub fn used(&self) -> u64 {
        self.used.get()
    }

    /// Is anything published? The cheapest look, for spinning; needs no lock.
    #[inline(always)]
    pub fn ready<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.slots.get();
        let slot = position as usize & (memory.slot_count() - 1);
        // ORDER: Acquire; pairs with `RingMemory::publish` (SeqCst swap).
        let header = memory.header(slot).load(Ordering::Acquire);
        header >> (LEN_BITS + FLAG_BITS) == tag(position)
    }

    /// As `ready`, but only for bytes, not for a mark.
    #[inline(always)]
    pub fn has_bytes<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.slots.get();
        let slot = position as usize & (memory.slot_count() - 1);
        // ORDER: as in `ready`. One load: an earlier one may still have seen the slot's last lap.
        let header = memory.header(slot).load(Ordering::Acquire);
        header >> (LEN_BITS + FLAG_BITS) == tag(position) && header >> LEN_BITS & FLAG_CONTROL == 0
    }

    /// The record at `position`, checked; `Ok(None)` when it is not published.
    #[inline(always)]
    fn look<M: RingMemory>(memory: &M, position: u64) -> Result<Option<Record>, ()> {
        let slot = position as usize & (memory.slot_count() - 1);
        // ORDER: Acquire; pairs with `RingMemory::publish` (SeqCst swap): the record's bytes are visible with its header.
        let header = memory.header(slot).load(Ordering::Acquire);
        if header >> (LEN_BITS + FLAG_BITS) != tag(position) {
            return Ok(None);
        }
        let flags = header >> LEN_BITS & ((1 << FLAG_BITS) - 1);
        let len = (header & ((1 << LEN_BITS) - 1)) as usize;
        let mut record = Record { len, flags, place: 0, data_end: 0 };
        if flags & FLAG_CONTROL != 0 {
            return if len == 16 && flags & FLAG_DATA == 0 { Ok(Some(record)) } else { Err(()) };
        }
        if flags & FLAG_DATA == 0 {
            return if (1..=INLINE_BYTES).contains(&len) { Ok(Some(record)) } else { Err(()) };
        }
        let start = read_word(memory, slot, 8);
        record.place = (start & (memory.ring_bytes() as u64 - 1)) as usize;
        record.data_end = start.wrapping_add(round_to_line(len as u64));
        let fits =
            (1..=RECORD_MAX_BYTES).contains(&len) && len <= memory.ring_bytes() - record.place;
        if fits { Ok(Some(record)) } else { Err(()) }
    }

    fn position_after<M: RingMemory>(memory: &M, position: u64, flags: u64) -> u64 {
        if flags & FLAG_REWIND == 0 {
            return position + 1;
        }
        (position + 1).next_multiple_of(memory.slot_count() as u64)
    }

    fn copy_out<M: RingMemory>(
        memory: &M,
        position: u64,
        record: &Record,
        used: usize,
        to: &mut Buffers,
    ) -> usize {
        let slot = position as usize & (memory.slot_count() - 1);
        let total = (record.len - used).min(to.remaining());
        let mut done = 0;
        while done < total {
            let (piece, n) = to.take(total - done);
            // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
            unsafe {
                if record.flags & FLAG_DATA == 0 {
                    memory.read_slot(slot, 8 + used + done, piece, n);
                } else {
                    memory.read_data(record.place + used + done, piece, n);
                }
            }
            done += n;
        }
        total
    }

    /// Moves bytes of the next record into the program's buffers (which have room).
    #[inline]
    pub fn pop<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> Next {
        let position = self.slots.get();
        let record = match Self::look(memory, position) {
            Ok(None) => return Next::Empty,
            Ok(Some(record)) => record,
            Err(()) => return Next::Corrupt,
        };
        if record.flags & FLAG_CONTROL != 0 {
            return Self::read_mark(memory, position);
        }
        let used = self.used.get() as usize;
        if used >= record.len {
            return Next::Corrupt;
        }
        let n = Self::copy_out(memory, position, &record, used, to);
        if used + n < record.len {
            self.used.set((used + n) as u64);
            return Next::Bytes(n, false);
        }
        Next::Bytes(n, self.release(memory, position, &record))
    }

    /// Copies without consuming, over as many records as fit. Returns the bytes copied.
    pub fn peek<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> usize {
        let (mut position, mut used, mut total) = (self.slots.get(), self.used.get() as usize, 0);
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = Self::look(memory, position) else { break };
            if record.flags & FLAG_CONTROL != 0 || used >= record.len || to.remaining() == 0 {
                break;
            }
            total += Self::copy_out(memory, position, &record, used, to);
            position = Self::position_after(memory, position, record.flags);
            used = 0;
        }
        total
    }

    /// The position after the last record that is published now, from `from` on: what an edge-triggered watcher remembers.
    pub fn published_after<M: RingMemory>(&self, memory: &M, from: u64) -> u64 {
        let mut position = from.max(self.slots.get());
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = Self::look(memory, position) else { break };
            position = Self::position_after(memory, position, record.flags);
        }
        position
    }

    /// Bytes that can be read now.
    pub fn available<M: RingMemory>(&self, memory: &M) -> usize {
        let (mut position, mut used, mut total) = (self.slots.get(), self.used.get() as usize, 0);
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = Self::look(memory, position) else { break };
            if record.flags & FLAG_CONTROL != 0 {
                break;
            }
            total += record.len.saturating_sub(used);
            position = Self::position_after(memory, position, record.flags);
            used = 0;
        }
        total
    }

    fn read_mark<M: RingMemory>(memory: &M, position: u64) -> Next {
        let slot = position as usize & (memory.slot_count() - 1);
        let value = read_word(memory, slot, 16);
        match read_word(memory, slot, 8) {
            MARK_START => Next::Mark(Mark::Start(value)),
            MARK_BACK => Next::Mark(Mark::Back(value)),
            _ => Next::Corrupt,
        }
    }

    /// Does a mark stand anywhere in what is published?
    pub fn mark_ahead<M: RingMemory>(&self, memory: &M) -> bool {
        let mut position = self.slots.get();
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = Self::look(memory, position) else { break };
            if record.flags & FLAG_CONTROL != 0 {
                return true;
            }
            position = Self::position_after(memory, position, record.flags);
        }
        false
    }

    /// The mark that stands next, if one does.
    pub fn mark<M: RingMemory>(&self, memory: &M) -> Option<Mark> {
        let position = self.slots.get();
        match Self::look(memory, position) {
            Ok(Some(record)) if record.flags & FLAG_CONTROL != 0 => {
                match Self::read_mark(memory, position) {
                    Next::Mark(mark) => Some(mark),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Goes past the mark that stands next. True as in `Next::Bytes`.
    pub fn pass_mark<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.slots.get();
        match Self::look(memory, position) {
            Ok(Some(record)) if record.flags & FLAG_CONTROL != 0 => {
                self.release(memory, position, &record)
            }
            _ => false,
        }
    }

    /// Gives the record's place back to the sender. True when a quarter of the slots or of the data was passed: then a
    /// sender that waits for room is looked for. (A look at every record would cost a fence each.)
    ///
    /// No waiter is forgotten. It waits while not `writable`, that is while it has more than three quarters outstanding. Take
    /// the release that makes it writable. If that one passes a quarter's boundary, we look. If not, it ends in the quarter
    /// where it began, three quarters' lengths behind what is published: a boundary, and a look, still lies ahead. Skipped
    /// places change nothing: positions count them, and going over them passes a boundary.
    fn release<M: RingMemory>(&self, memory: &M, position: u64, record: &Record) -> bool {
        let next = Self::position_after(memory, position, record.flags);
        self.slots.set(next);
        self.used.set(0);
        let mut passed = position ^ next >= memory.slot_count() as u64 / 4;
        let has_data = record.flags & FLAG_DATA != 0;
        if has_data {
            let quarter = memory.ring_bytes() as u64 / 4;
            passed |= self.data.get() / quarter != record.data_end / quarter;
            self.data.set(record.data_end);
        }
        memory.give_credit(next, has_data.then_some(record.data_end));
        passed
    }
}

/// The ring of one direction of a segment.
#[cfg(not(loom))]
#[derive(Clone, Copy)]
pub struct SegmentRing {
    segment: crate::memory::Area,
    geometry: Geometry,
    direction: usize,
}

#[cfg(not(loom))]
impl SegmentRing {
    /// Panics when the segment is smaller than its geometry says: the caller has checked the descriptor's size.
    pub fn new(segment: crate::memory::Area, geometry: Geometry, direction: usize) -> SegmentRing {
        assert!(segment.len() >= geometry.segment_bytes() && direction < 2);
        SegmentRing { segment, geometry, direction }
    }

    pub fn control<'a>(&self) -> &'a Control {
        control(self.segment, self.direction)
    }
}

#[cfg(not(loom))]
impl RingMemory for SegmentRing {
    #[inline(always)]
    fn header(&self, slot: usize) -> &AtomicU64 {
        self.segment.at(self.geometry.slot_offset(self.direction, slot & (SLOT_COUNT - 1)))
    }
    #[inline(always)]
    fn credit_slots(&self) -> &AtomicU64 {
        &self.control().credit.slots
    }
    #[inline(always)]
    fn credit_data(&self) -> &AtomicU64 {
        &self.control().credit.data
    }
    #[inline(always)]
    fn ring_bytes(&self) -> usize {
        self.geometry.ring_bytes
    }
    #[inline(always)]
    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize) {
        // SAFETY: passed on to the caller.
        unsafe {
            self.segment.write(self.geometry.slot_offset(self.direction, slot) + at, from, n)
        };
    }
    #[inline(always)]
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize) {
        // SAFETY: passed on to the caller.
        unsafe { self.segment.read(self.geometry.slot_offset(self.direction, slot) + at, to, n) };
    }
    #[inline(always)]
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize) {
        // SAFETY: passed on to the caller.
        unsafe { self.segment.write(self.geometry.data_offset(self.direction) + at, from, n) };
    }
    #[inline(always)]
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize) {
        // SAFETY: passed on to the caller.
        unsafe { self.segment.read(self.geometry.data_offset(self.direction) + at, to, n) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::{Area, Buffer};

    /// From shortly before the positions leave the header's field to well after, through every slot of the lap.
    #[test]
    fn positions_wrap() {
        #[derive(Clone)]
        #[repr(align(4096))]
        struct Page(#[allow(dead_code)] [u8; 4096]);
        let geometry = Geometry::new(RING_MIN_BYTES).unwrap();
        let mut pages = vec![Page([0; 4096]); geometry.segment_bytes() / 4096];
        // SAFETY: the pages live until the end of the test.
        let area = unsafe { Area::new(pages.as_mut_ptr().cast(), geometry.segment_bytes()) };
        let memory = SegmentRing::new(area, geometry, 0);
        let (tx, rx) = (Tx::default(), Rx::default());
        let first = PUBLISHED - SLOT_COUNT as u64 + HOT_SLOT_COUNT as u64;
        for word in [&tx.slots, &tx.known_slots, &rx.slots] {
            word.set(first);
        }
        for i in 0..2 * SLOT_COUNT {
            assert!(!rx.ready(&memory));
            let mut sent = (i as u64).to_le_bytes();
            let list = [Buffer { base: sent.as_mut_ptr(), len: 8 }];
            // SAFETY: `sent` is valid for its length.
            assert_eq!(tx.push(&memory, &mut unsafe { Buffers::new(&list) }), 8);
            assert!(rx.ready(&memory));
            let mut got = [0; 8];
            let list = [Buffer { base: got.as_mut_ptr(), len: 8 }];
            // SAFETY: `got` is valid for its length.
            let next = rx.pop(&memory, &mut unsafe { Buffers::new(&list) });
            assert!(matches!(next, Next::Bytes(8, _)) && got == sent);
        }
        assert!(tx.drained(&memory) && tx.slots.get() > PUBLISHED);
    }
}
