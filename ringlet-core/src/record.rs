//! Records in shared memory, one way: what the byte ring (`ring`), the message queue (`queue`) and the locked buffer (`locked`) have in
//! common. Reserve a place and publish on one side, look and release on the other.
//!
//! Positions run freely and never go back. A slot position counts slots, a data position bytes; the place is the position
//! modulo the size. Going back to slot 0 (or data byte 0) while everything is consumed is a jump forward to the next multiple of
//! the size: the skipped part counts as used until the receiver has passed it, so one subtraction tells what is free.
//!
//! Each side keeps its own state where its peer can't write (`Tx`, `Rx`); from shared memory it takes the other's words,
//! each loaded once and checked. A peer that lies gets `Corrupt` or loses its own bytes; it can't move us out of the segment.
//!
//! Sender and receiver are each one caller at a time (the owner's lock). The other orderings are written at their places.

use crate::layout::*;
use crate::sync::{AtomicU64, Ordering};

/// What records lie in, as one of the two ends sees it. The real ones are in `mapped`; the model checker and the simulated
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
        // ORDER: Release; pairs with `look` (Acquire): the bytes of the record are visible with its header. It is a swap
        // so that on x86 it is also the StoreLoad barrier which the look at the receiver's interrupt flag needs (`Wish::granted_by_sender`).
        self.header(slot).swap(header, Ordering::SeqCst);
    }
    /// As `publish`, of the same order; but who looks at the receiver's interrupt flag behind it needs a fence first (`Wish::granted_by_receiver` has
    /// one): of many records one for all. For coherent memory.
    #[inline(always)]
    fn publish_quietly(&self, slot: usize, header: u64) {
        // ORDER: Release; pairs with `look` (Acquire), as `publish`.
        self.header(slot).store(header, Ordering::Release);
    }
    /// As `publish`, unless the receiver has withdrawn (`Rx::withdraw`); false if so. The only word that both sides write: for coherent
    /// memory.
    #[inline(always)]
    fn publish_unless_withdrawn(&self, slot: usize, header: u64) -> bool {
        let word = self.header(slot);
        let before = word.load(Ordering::Relaxed);
        // ORDER: SeqCst; pairs with `look`, as `publish`, and with `Rx::withdraw`: one of the two is first.
        before != WITHDRAWN
            && word.compare_exchange(before, header, Ordering::SeqCst, Ordering::Relaxed).is_ok()
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

/// The sender's own state.
#[derive(Default)]
#[repr(C)]
pub struct Tx {
    pub(crate) slots: PlainU64,
    data: PlainU64,
    /// What the receiver is known to have consumed: a copy of its credit, refreshed only when needed.
    pub(crate) known_slots: PlainU64,
    known_data: PlainU64,
    /// What the memory does not surely hold, if that is looked after (`begin_bare`): slots and bytes of data from the one less than this
    /// on; 0 where all is held. And what a record was refused for.
    bare_slots: PlainU64,
    bare_data: PlainU64,
    wanted: PlainU64,
}

/// What a sender's ring must have before it goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    Slots,
    /// The first so many bytes of data.
    Data(u64),
}

/// The receiver's own state: where it reads, and how much of that record is consumed.
#[derive(Default)]
#[repr(C)]
pub struct Rx {
    pub(crate) slots: PlainU64,
    data: PlainU64,
    pub(crate) used: PlainU64,
}

/// A word of one owner at a time, behind its lock; atomic only so that it may lie in memory shared over fork.
#[derive(Default, Debug)]
#[repr(transparent)]
pub struct PlainU64(core::sync::atomic::AtomicU64);

impl Clone for PlainU64 {
    fn clone(&self) -> PlainU64 {
        PlainU64::new(self.get())
    }
}

impl PartialEq for PlainU64 {
    fn eq(&self, other: &PlainU64) -> bool {
        self.get() == other.get()
    }
}

impl Eq for PlainU64 {}

impl core::hash::Hash for PlainU64 {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.get().hash(state);
    }
}

impl PlainU64 {
    pub const fn new(value: u64) -> PlainU64 {
        PlainU64(core::sync::atomic::AtomicU64::new(value))
    }
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(core::sync::atomic::Ordering::Relaxed)
    }
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, core::sync::atomic::Ordering::Relaxed);
    }
}

/// The peer wrote what no ringlet writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt;

/// A record as its header announces it, checked.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub position: u64,
    pub slot: usize,
    pub len: usize,
    pub flags: u64,
    /// Start in the data ring (place, not position), and the position after it, for `FLAG_DATA`.
    pub place: usize,
    data_end: u64,
}

/// The upper part of the header of the record at `position`.
#[inline(always)]
pub(crate) fn tag(position: u64) -> u64 {
    PUBLISHED | position & POSITION_MASK
}

pub(crate) fn header_word(position: u64, flags: u64, len: usize) -> u64 {
    tag(position) << (LEN_BITS + FLAG_BITS) | flags << LEN_BITS | len as u64
}

#[inline(always)]
pub(crate) fn write_word<M: RingMemory>(memory: &M, slot: usize, at: usize, word: u64) {
    // SAFETY: `word` is a local of 8 bytes.
    unsafe { memory.write_slot(slot, at, (&raw const word).cast(), 8) };
}

#[inline(always)]
pub(crate) fn read_word<M: RingMemory>(memory: &M, slot: usize, at: usize) -> u64 {
    let mut word = 0u64;
    // SAFETY: as in `write_word`.
    unsafe { memory.read_slot(slot, at, (&raw mut word).cast(), 8) };
    word
}

fn round_to_line(bytes: u64) -> u64 {
    bytes.next_multiple_of(LINE_BYTES as u64)
}

/// The slot of a position.
#[inline(always)]
pub(crate) fn slot_of<M: RingMemory>(memory: &M, position: u64) -> usize {
    position as usize & (memory.slot_count() - 1)
}

pub(crate) fn position_after<M: RingMemory>(memory: &M, position: u64, flags: u64) -> u64 {
    if flags & FLAG_REWIND == 0 {
        return position + 1;
    }
    (position + 1).next_multiple_of(memory.slot_count() as u64)
}

/// The record at `position`, which is due in `slot`, of at most `max_bytes`, checked; `Ok(None)` when it is not published.
#[inline(always)]
pub(crate) fn look<M: RingMemory>(
    memory: &M,
    slot: usize,
    position: u64,
    max_bytes: usize,
) -> Result<Option<Record>, Corrupt> {
    // ORDER: Acquire; pairs with `RingMemory::publish` (SeqCst swap): the record's bytes are visible with its header.
    let header = memory.header(slot).load(Ordering::Acquire);
    if header >> (LEN_BITS + FLAG_BITS) != tag(position) {
        return Ok(None);
    }
    let flags = header >> LEN_BITS & ((1 << FLAG_BITS) - 1);
    let len = (header & ((1 << LEN_BITS) - 1)) as usize;
    let mut record = Record { position, slot, len, flags, place: 0, data_end: 0 };
    if flags & FLAG_CONTROL != 0 {
        return if len == 16 && flags & FLAG_DATA == 0 { Ok(Some(record)) } else { Err(Corrupt) };
    }
    if flags & FLAG_DATA == 0 {
        return if len <= INLINE_BYTES { Ok(Some(record)) } else { Err(Corrupt) };
    }
    let start = read_word(memory, slot, 8);
    record.place = (start & (memory.ring_bytes() as u64 - 1)) as usize;
    record.data_end = start.wrapping_add(round_to_line(len as u64));
    let fits = (1..=max_bytes).contains(&len) && len <= memory.ring_bytes() - record.place;
    if fits { Ok(Some(record)) } else { Err(Corrupt) }
}

impl Record {
    #[inline(always)]
    pub fn is_control(&self) -> bool {
        self.flags & FLAG_CONTROL != 0
    }

    /// Copies `n` bytes out, from byte `at` of the record on; `at + n` lies within it.
    ///
    /// # Safety
    /// `to` is valid for writing `n` bytes.
    #[inline(always)]
    pub unsafe fn read<M: RingMemory>(&self, memory: &M, at: usize, to: *mut u8, n: usize) {
        // SAFETY: `to` has room for `n` bytes by our own contract.
        unsafe {
            if self.flags & FLAG_DATA == 0 {
                memory.read_slot(self.slot, 8 + at, to, n);
            } else {
                memory.read_data(self.place + at, to, n);
            }
        }
    }
}

impl Tx {
    pub fn reset(&self) {
        for word in [
            &self.slots,
            &self.data,
            &self.known_slots,
            &self.known_data,
            &self.bare_slots,
            &self.bare_data,
            &self.wanted,
        ] {
            word.set(0);
        }
    }

    /// From now on, memory is asked for (`wanted_backing`) before it is first used: a page that can't be had would kill whoever touches
    /// it, and so a receiver looks at no slot that the sender has not asked for. The first page of slots is there.
    pub fn begin_bare<M: RingMemory>(&self, memory: &M) {
        let first_page = slot_of(memory, self.slots.get()) < memory.hot_slot_count();
        self.bare_slots.set(if first_page { memory.hot_slot_count() as u64 + 1 } else { 1 });
        self.bare_data.set(1);
    }

    /// What the last record was refused for, if it was not for room. Once.
    #[inline(always)]
    pub fn wanted_backing(&self) -> Option<Backing> {
        match self.wanted.get() {
            0 => None,
            wanted => {
                self.wanted.set(0);
                Some(if wanted == u64::MAX { Backing::Slots } else { Backing::Data(wanted) })
            }
        }
    }

    /// It is there now.
    pub fn has_backing<M: RingMemory>(&self, memory: &M, what: Backing) {
        match what {
            Backing::Slots => self.bare_slots.set(0),
            Backing::Data(end) if end >= memory.ring_bytes() as u64 => self.bare_data.set(0),
            Backing::Data(end) => self.bare_data.set(end + 1),
        }
    }

    /// What it was given: all slots, and so many bytes of data.
    pub fn backing<M: RingMemory>(&self, memory: &M) -> (bool, u64) {
        let data = match self.bare_data.get() {
            0 => memory.ring_bytes() as u64,
            bare => bare - 1,
        };
        (self.bare_slots.get() == 0, data)
    }

    /// Everything is consumed: what it was given can go, but for the first page of slots and the one that is returned, where the receiver
    /// looks for the next record. `None` if not all is consumed.
    pub fn let_go<M: RingMemory>(&self, memory: &M) -> Option<usize> {
        if !self.drained(memory) {
            return None;
        }
        if self.data.get() == self.known_data.get() {
            let rewound = self.data.get().next_multiple_of(memory.ring_bytes() as u64);
            self.data.set(rewound);
            self.known_data.set(rewound);
        }
        self.begin_bare(memory);
        let slot = slot_of(memory, self.slots.get());
        Some(slot / memory.hot_slot_count() * memory.hot_slot_count())
    }

    /// A slot that may not be held, or behind which the receiver would look at one that may not be: is it the last of the first page, after
    /// which the next is the first again?
    #[cold]
    fn may_use<M: RingMemory>(&self, memory: &M, slot: usize) -> bool {
        let hot = memory.hot_slot_count();
        if slot == hot - 1 {
            self.refresh(memory);
            if self.slots.get() - self.known_slots.get() <= hot as u64 / 2 {
                return true;
            }
        }
        self.wanted.set(u64::MAX);
        false
    }

    /// Takes over the receiver's credit if it makes sense; a credit from nowhere is ignored (the liar's ring stays full).
    pub(crate) fn refresh<M: RingMemory>(&self, memory: &M) {
        // ORDER: Acquire; pairs with `RingMemory::give_credit` (Release): the receiver has finished reading what we may now
        // overwrite.
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
    pub(crate) fn free_slots<M: RingMemory>(&self, memory: &M) -> u64 {
        let used = self.slots.get() - self.known_slots.get();
        (memory.slot_count() as u64 - 1).saturating_sub(used)
    }

    pub(crate) fn free_data<M: RingMemory>(&self, memory: &M) -> u64 {
        (memory.ring_bytes() as u64).saturating_sub(self.data.get() - self.known_data.get())
    }

    /// Is everything that was published also consumed?
    pub fn drained<M: RingMemory>(&self, memory: &M) -> bool {
        self.refresh(memory);
        self.slots.get() == self.known_slots.get()
    }

    /// The position of the next record.
    pub fn position(&self) -> u64 {
        self.slots.get()
    }

    /// Was nothing ever published?
    pub fn is_new(&self) -> bool {
        self.slots.get() == 0
    }

    /// Changes whenever the receiver is found to have consumed something.
    pub fn progress(&self) -> u64 {
        self.known_slots.get()
    }

    /// Is there room: as many slots as are surely free when the receiver keeps up (a rewind takes nearly all others out of the
    /// count until the receiver has passed it), and so much data? (`Rx::release` tells why no waiter is forgotten.)
    pub(crate) fn has_room<M: RingMemory>(&self, memory: &M, data: u64) -> bool {
        let enough = |tx: &Tx| {
            tx.free_slots(memory) >= memory.hot_slot_count() as u64 / 4
                && tx.free_data(memory) >= data
        };
        enough(self) || {
            self.refresh(memory);
            enough(self)
        }
    }

    /// The slot of the next record, if it is free.
    #[inline(always)]
    pub(crate) fn reserve_slot<M: RingMemory>(&self, memory: &M) -> Option<usize> {
        if self.free_slots(memory) == 0 {
            self.refresh(memory);
            if self.free_slots(memory) == 0 {
                return None;
            }
        }
        let slot = slot_of(memory, self.slots.get());
        // The slot behind it is to be there too. (Without a limit this is never so.)
        let bare = slot as u64 + 1 >= self.bare_slots.get().wrapping_sub(1);
        (!bare || self.may_use(memory, slot)).then_some(slot)
    }

    /// `end` bytes from the beginning on are to be there.
    #[inline(always)]
    fn holds_data(&self, end: u64) -> bool {
        let held = end < self.bare_data.get() || self.bare_data.get() == 0;
        if !held {
            self.wanted.set(end);
        }
        held
    }

    /// A contiguous place in the data ring for `len` bytes, or, when a record may be cut, for fewer: the place and how many. (By itself,
    /// so that short records, which need none, stay short to do.)
    #[inline(never)]
    pub(crate) fn reserve_data<M: RingMemory>(
        &self,
        memory: &M,
        len: usize,
        may_cut: bool,
    ) -> Option<(usize, usize)> {
        let size = memory.ring_bytes() as u64;
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
                    return if may_cut { self.reserve_tail(memory, len) } else { None };
                }
            }
        }
        if self.free_data(memory) < needed {
            self.refresh(memory);
            if self.free_data(memory) < needed {
                return None;
            }
        }
        let place = self.data.get() & (size - 1);
        self.holds_data(place + needed).then_some((place as usize, len))
    }

    /// The record does not fit before the end of the ring, nor is its beginning free: use the tail for a shorter one.
    fn reserve_tail<M: RingMemory>(&self, memory: &M, len: usize) -> Option<(usize, usize)> {
        let size = memory.ring_bytes() as u64;
        let place = self.data.get() & (size - 1);
        let tail = (size - place).min(self.free_data(memory)) & !(LINE_BYTES as u64 - 1);
        (tail > 0 && self.holds_data(place + tail))
            .then_some((place as usize, len.min(tail as usize)))
    }

    /// Publishes the record of `len` bytes that was written to the place reserved last in the data ring.
    #[inline(always)]
    pub(crate) fn publish_data<M: RingMemory>(&self, memory: &M, slot: usize, len: usize) {
        self.name_data(memory, slot, len);
        self.publish(memory, slot, FLAG_DATA, len);
    }

    /// The slot says where the bytes lie.
    #[inline(always)]
    pub(crate) fn name_data<M: RingMemory>(&self, memory: &M, slot: usize, len: usize) {
        let start = self.data.get();
        write_word(memory, slot, 8, start);
        self.data.set(start + round_to_line(len as u64));
    }

    #[inline(always)]
    pub(crate) fn publish<M: RingMemory>(&self, memory: &M, slot: usize, flags: u64, len: usize) {
        let header = self.next_header(memory, slot, flags, len);
        memory.publish(slot, header);
    }

    /// The header of the record that is published next.
    #[inline(always)]
    pub(crate) fn next_header<M: RingMemory>(
        &self,
        memory: &M,
        slot: usize,
        flags: u64,
        len: usize,
    ) -> u64 {
        let position = self.slots.get();
        let mut next = position + 1;
        let mut flags = flags;
        let hot = memory.hot_slot_count();
        // A mark may stand where no record would: nothing follows it before all is consumed, so it may always rewind.
        let bare = slot % hot == hot - 1 && self.bare_slots.get() != 0;
        if slot == hot - 1 || bare {
            // At the end of the first page: rewind if the receiver keeps up, so that the lag fits in half a page.
            self.refresh(memory);
            if position - self.known_slots.get() <= hot as u64 / 2 || bare {
                flags |= FLAG_REWIND;
                next = position.next_multiple_of(memory.slot_count() as u64);
                if next == position {
                    next = position + memory.slot_count() as u64;
                }
            }
        }
        self.slots.set(next);
        header_word(position, flags, len)
    }
}

impl Rx {
    pub fn reset(&self) {
        for word in [&self.slots, &self.data, &self.used] {
            word.set(0);
        }
    }

    /// Is anything published? The cheapest look, for spinning; needs no lock.
    #[inline(always)]
    pub fn ready<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.slots.get();
        // ORDER: Acquire; pairs with `RingMemory::publish` (SeqCst swap).
        let header = memory.header(slot_of(memory, position)).load(Ordering::Acquire);
        header >> (LEN_BITS + FLAG_BITS) == tag(position)
    }

    /// The position after the last record of at most `max_bytes` that is published now, from `from` on.
    pub(crate) fn published_up_to<M: RingMemory>(
        &self,
        memory: &M,
        from: u64,
        max_bytes: usize,
    ) -> u64 {
        let mut position = from.max(self.slots.get());
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = look(memory, slot_of(memory, position), position, max_bytes)
            else {
                break;
            };
            position = position_after(memory, position, record.flags);
        }
        position
    }

    /// Takes no more than the records that are published now: who publishes one later is told (`publish_unless_withdrawn`).
    pub(crate) fn withdraw<M: RingMemory>(&self, memory: &M, max_bytes: usize) {
        let mut position = self.slots.get();
        for _ in 0..memory.slot_count() {
            let slot = slot_of(memory, position);
            // ORDER: Relaxed; what it is changed for is looked at by `look`.
            let before = memory.header(slot).load(Ordering::Relaxed);
            match look(memory, slot, position, max_bytes) {
                Ok(Some(record)) => position = position_after(memory, position, record.flags),
                // ORDER: SeqCst; pairs with `publish_unless_withdrawn`.
                Ok(None) => {
                    let word = memory.header(slot);
                    let done = word.compare_exchange(
                        before,
                        WITHDRAWN,
                        Ordering::SeqCst,
                        Ordering::Relaxed,
                    );
                    if done.is_ok() {
                        return;
                    }
                }
                // Nothing behind it is ever taken.
                Err(Corrupt) => return,
            }
        }
    }

    /// Gives the record's place back to the sender. True when a quarter of the slots or of the data was passed: then a
    /// sender that waits for room is looked for. (A look at every record would cost a fence each.)
    ///
    /// No waiter is forgotten that waits while it has more than half, or more than three quarters, outstanding. Take the release
    /// that ends its wait. If that one passes a quarter's boundary, we look. If not, it ends in the quarter where it began, half
    /// or three quarters' lengths behind what is published: a boundary, and a look, still lies ahead. Skipped places change
    /// nothing: positions count them, and going over them passes a boundary.
    #[inline]
    pub(crate) fn release<M: RingMemory>(&self, memory: &M, record: &Record) -> bool {
        let next = position_after(memory, record.position, record.flags);
        self.slots.set(next);
        self.used.set(0);
        let mut passed = record.position ^ next >= memory.slot_count() as u64 / 4;
        let mut data = None;
        if record.flags & FLAG_DATA != 0 {
            let quarter = memory.ring_bytes() as u64 / 4;
            passed |= self.data.get() / quarter != record.data_end / quarter;
            self.data.set(record.data_end);
            data = Some(record.data_end);
        }
        memory.give_credit(next, data);
        passed
    }
}
