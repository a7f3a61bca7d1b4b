//! A one-way byte stream: records (`record`) whose boundaries mean nothing, and marks among them.
//!
//! A long message is cut, so that the receiver copies one piece while the sender fills the next; what a receiver does not take of a
//! record stays.
//!
//! The same ring carries packets: then a record is a packet, which may be empty, and what a receiver has no room for is lost with it.
//! Both ends know which of the two it is; what stands in shared memory does not say.

use crate::layout::*;
use crate::memory::Buffers;
use crate::queue::Message;
use crate::record::{
    Record, header_word, look, position_after, read_word, slot_of, tag, write_word,
};
use crate::sync::Ordering;

#[cfg(not(loom))]
pub use crate::mapped::SegmentRing;
pub use crate::record::{Backing, Corrupt, PlainU64, RingMemory, Rx, Tx};

/// Control records: how a direction changes its path (see `handover`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mark {
    /// The first `0` bytes of this direction went through the kernel; what follows is in the ring.
    Start(u64),
    /// The ring ends here; what follows comes through the kernel, from kernel byte `0` on.
    Back(u64),
}

impl Mark {
    pub(crate) fn of_words(kind: u64, value: u64) -> Option<Mark> {
        match kind {
            MARK_START => Some(Mark::Start(value)),
            MARK_BACK => Some(Mark::Back(value)),
            _ => None,
        }
    }
}

/// What the receiver finds next.
#[derive(PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing is published.
    Empty,
    /// So many bytes were copied out (of a packet: it was so long, and what there was room for was copied); `true` when a sender that
    /// waits for room should now be looked for.
    Bytes(usize, bool),
    /// A mark stands here; `Rx::pass_mark` goes on.
    Mark(Mark),
    /// The peer wrote what no ringlet writes.
    Corrupt,
}

/// What a receiver remembers between two counts of what it can read (`Rx::available_since`), so that the next one begins where this one
/// ended. A hint of one process: what others take meanwhile is seen by where the receiver stands. Used by one caller at a time, as `Rx`.
#[derive(Default)]
pub struct Counted {
    /// The first record that is counted, plus one; 0 while nothing is known.
    from: core::sync::atomic::AtomicU64,
    /// The one behind the last, and the bytes of all of them.
    to: PlainU64,
    bytes: PlainU64,
}

impl Counted {
    pub fn reset(&self) {
        self.from.store(0, Ordering::Relaxed);
    }

    /// Up to where it is counted, and the bytes from `now` on. Of what was taken since, the headers tell, until their slots are used again:
    /// then nothing is known.
    fn since<M: RingMemory>(&self, memory: &M, now: u64) -> Option<(u64, u64)> {
        let mut at = self.from.load(Ordering::Relaxed).checked_sub(1)?;
        let (to, mut bytes) = (self.to.get(), self.bytes.get());
        for _ in 0..memory.slot_count() {
            if at == now {
                return Some((to, bytes));
            }
            // ORDER: Relaxed; nothing but the header is read.
            let header = memory.header(slot_of(memory, at)).load(Ordering::Relaxed);
            if at >= to || header >> (LEN_BITS + FLAG_BITS) != tag(at) {
                break;
            }
            bytes = bytes.checked_sub(header & ((1 << LEN_BITS) - 1))?;
            at = position_after(memory, at, header >> LEN_BITS & ((1 << FLAG_BITS) - 1));
        }
        None
    }

    fn note(&self, from: u64, to: u64, bytes: u64) {
        // ORDER: Relaxed, then Release; pairs with `since`: a copy that a fork makes in between, or a handler that never comes back,
        // finds nothing known.
        self.from.store(0, Ordering::Relaxed);
        core::sync::atomic::fence(Ordering::Release);
        self.to.set(to);
        self.bytes.set(bytes);
        // ORDER: Release; pairs with `since`, as above.
        self.from.store(from + 1, Ordering::Release);
    }
}

const MARK_START: u64 = 1;
const MARK_BACK: u64 = 2;

fn write_mark<M: RingMemory>(memory: &M, slot: usize, mark: Mark) {
    let (kind, value) = match mark {
        Mark::Start(bytes) => (MARK_START, bytes),
        Mark::Back(bytes) => (MARK_BACK, bytes),
    };
    write_word(memory, slot, 8, kind);
    write_word(memory, slot, 16, value);
}

/// As `record::look`. (That a stream has no empty records is seen where one is taken.)
#[inline(always)]
fn look_at<M: RingMemory>(memory: &M, position: u64) -> Result<Option<Record>, Corrupt> {
    look(memory, slot_of(memory, position), position, MESSAGE_MAX_BYTES)
}

/// The longest packet that a ring takes: an eighth of it, so that any finds room in a ring that is `writable`, though as much may
/// have to be skipped before its end.
pub fn packet_max_bytes<M: RingMemory>(memory: &M) -> usize {
    (memory.ring_bytes() / 8).min(MESSAGE_MAX_BYTES)
}

impl Tx {
    /// Bytes published and not yet consumed, by our own headers (a peer that overwrites them misleads only this figure); an empty packet
    /// counts as one.
    pub fn outstanding_bytes<M: RingMemory>(&self, memory: &M) -> usize {
        self.refresh(memory);
        let (mut position, mut total) = (self.known_slots.get(), 0);
        for _ in 0..memory.slot_count() {
            let header = memory.header(slot_of(memory, position)).load(Ordering::Relaxed);
            if position >= self.slots.get() || header >> (LEN_BITS + FLAG_BITS) != tag(position) {
                break;
            }
            let flags = header >> LEN_BITS & ((1 << FLAG_BITS) - 1);
            if flags & FLAG_CONTROL == 0 {
                total += (header & ((1 << LEN_BITS) - 1)).max(1) as usize;
            }
            position = position_after(memory, position, flags);
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
        match look_at(memory, position) {
            Ok(Some(record)) if !record.is_control() && used < record.len => {
                let n = (record.len - used).min(to.len());
                // SAFETY: `n` writable bytes.
                unsafe { record.read(memory, used, to.as_mut_ptr(), n) };
                &to[..n]
            }
            _ => &[],
        }
    }

    /// The same for packets, left where it lies.
    pub fn oldest_packet<M: RingMemory>(&self, memory: &M) -> Option<Message> {
        let position = self.known_slots.get();
        if position >= self.slots.get() {
            return None;
        }
        let record = look_at(memory, position).ok()??;
        (!record.is_control()).then_some(Message(record))
    }

    /// Goes past the oldest record, on the receiver's behalf. False when there is none (or the peer has spoiled it).
    pub fn pass_oldest<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.known_slots.get();
        if position >= self.slots.get() {
            return false;
        }
        let Ok(Some(record)) = look_at(memory, position) else { return false };
        self.known_slots.set(position_after(memory, position, record.flags).min(self.slots.get()));
        true
    }

    /// Takes the receiver's final credit over, when it has left the ring.
    pub fn take_credit<M: RingMemory>(&self, memory: &M) {
        self.refresh(memory);
    }

    /// Would a sender that asks for room be content?
    pub fn writable<M: RingMemory>(&self, memory: &M) -> bool {
        self.has_room(memory, memory.ring_bytes() as u64 / 4)
    }

    /// Publishes one record from the program's buffers, which are not empty. Returns its length, 0 when there is no room.
    #[inline]
    pub fn push<M: RingMemory>(&self, memory: &M, from: &mut Buffers) -> usize {
        self.push_sent_at(memory, from, 0, 0).unwrap_or(0)
    }

    /// As `push`, and notes when (0: not known) for `Rx::sent_at`. If `packet_max` is not 0, all that is left in the buffers is one
    /// packet; there is never room for a longer one than that. `None` when there is no room.
    #[inline]
    pub fn push_sent_at<M: RingMemory>(
        &self,
        memory: &M,
        from: &mut Buffers,
        time: u64,
        packet_max: usize,
    ) -> Option<usize> {
        let wanted = from.remaining();
        debug_assert!(wanted > 0 || packet_max > 0);
        let slot = self.reserve_slot(memory)?;
        // The receiver watches the slot, and takes its line away whenever it looks: so nothing is written there before all else is done.
        let note_time = || {
            if time != 0 {
                write_word(memory, slot, SENT_AT, time);
            }
        };
        if wanted <= STREAM_INLINE_BYTES {
            note_time();
            let mut at = 0;
            while at < wanted {
                let (piece, n) = from.take(wanted - at);
                // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
                unsafe { memory.write_slot(slot, 8 + at, piece, n) };
                at += n;
            }
            self.publish(memory, slot, 0, wanted);
            return Some(wanted);
        }
        let (place, len) = match packet_max {
            0 => {
                let len = wanted.min(RECORD_MAX_BYTES).min(memory.ring_bytes() / 4);
                self.reserve_data(memory, len, true)?
            }
            _ if wanted > packet_max => return None,
            _ => self.reserve_data(memory, wanted, false)?,
        };
        let mut at = 0;
        while at < len {
            let (piece, n) = from.take(len - at);
            // SAFETY: `take` returns a piece that is valid for its length.
            unsafe { memory.write_data(place + at, piece, n) };
            at += n;
        }
        note_time();
        self.publish_data(memory, slot, len);
        Some(len)
    }

    /// Publishes a mark. There is always room for one `Back`; a `Start` is only sent into a drained ring.
    pub fn push_mark<M: RingMemory>(&self, memory: &M, mark: Mark) -> bool {
        self.refresh(memory);
        if self.slots.get() - self.known_slots.get() >= memory.slot_count() as u64 {
            return false;
        }
        let slot = slot_of(memory, self.slots.get());
        write_mark(memory, slot, mark);
        self.publish(memory, slot, FLAG_CONTROL, 16);
        true
    }
}

impl Rx {
    /// Bytes taken of the record that stands next.
    pub fn used(&self) -> u64 {
        self.used.get()
    }

    /// Goes past so many bytes. False, and nothing done, if no more stand there.
    pub fn skip<M: RingMemory>(&self, memory: &M, bytes: u64) -> bool {
        // First whether there are more.
        let (mut position, mut used, mut left) = (self.slots.get(), self.used.get(), bytes);
        let mut records = 0;
        loop {
            match look_at(memory, position) {
                Ok(Some(record)) if records < memory.slot_count() && !record.is_control() => {
                    match left.checked_sub((record.len as u64).saturating_sub(used)) {
                        None => break,
                        Some(rest) => left = rest,
                    }
                    position = position_after(memory, position, record.flags);
                }
                _ => return false,
            }
            (used, records) = (0, records + 1);
        }
        for _ in 0..records {
            if let Ok(Some(record)) = look_at(memory, self.slots.get()) {
                self.release(memory, &record);
            }
        }
        self.used.set(self.used.get() + left);
        true
    }

    /// When the record that stands next was sent, as the peer says; nothing may depend on its truth.
    #[inline]
    pub fn sent_at<M: RingMemory>(&self, memory: &M) -> u64 {
        read_word(memory, slot_of(memory, self.slots.get()), SENT_AT)
    }

    /// As `ready`, but only for bytes, not for a mark.
    #[inline(always)]
    pub fn has_bytes<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.slots.get();
        // ORDER: as in `ready`. One load: an earlier one may still have seen the slot's last lap.
        let header = memory.header(slot_of(memory, position)).load(Ordering::Acquire);
        header >> (LEN_BITS + FLAG_BITS) == tag(position) && header >> LEN_BITS & FLAG_CONTROL == 0
    }

    fn copy_out<M: RingMemory>(
        memory: &M,
        record: &Record,
        used: usize,
        to: &mut Buffers,
    ) -> usize {
        let total = (record.len - used).min(to.remaining());
        let mut done = 0;
        while done < total {
            let (piece, n) = to.take(total - done);
            // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
            unsafe { record.read(memory, used + done, piece, n) };
            done += n;
        }
        total
    }

    /// Moves bytes of the next record into the program's buffers (which have room).
    #[inline]
    pub fn pop<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> Next {
        self.pop_record(memory, to, false)
    }

    /// Moves the next packet into the program's buffers, as much as they hold.
    #[inline]
    pub fn pop_packet<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> Next {
        self.pop_record(memory, to, true)
    }

    #[inline(always)]
    fn pop_record<M: RingMemory>(&self, memory: &M, to: &mut Buffers, packets: bool) -> Next {
        let position = self.slots.get();
        let record = match look_at(memory, position) {
            Ok(None) => return Next::Empty,
            Ok(Some(record)) => record,
            Err(Corrupt) => return Next::Corrupt,
        };
        if record.is_control() {
            return Self::read_mark(memory, position);
        }
        let used = self.used.get() as usize;
        if packets {
            Self::copy_out(memory, &record, 0, to);
            return Next::Bytes(record.len, self.release(memory, &record));
        }
        if used >= record.len {
            return Next::Corrupt;
        }
        let n = Self::copy_out(memory, &record, used, to);
        if used + n < record.len {
            self.used.set((used + n) as u64);
            return Next::Bytes(n, false);
        }
        Next::Bytes(n, self.release(memory, &record))
    }

    /// Copies without consuming, over as many records as fit. Returns the bytes copied.
    pub fn peek<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> usize {
        let (mut position, mut used, mut total) = (self.slots.get(), self.used.get() as usize, 0);
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = look_at(memory, position) else { break };
            if record.is_control() || used >= record.len || to.remaining() == 0 {
                break;
            }
            total += Self::copy_out(memory, &record, used, to);
            position = position_after(memory, position, record.flags);
            used = 0;
        }
        total
    }

    /// Copies the next packet, as much as there is room for, without consuming it. Returns how long it is; `None` if none stands next.
    pub fn peek_packet<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> Option<usize> {
        let record = look_at(memory, self.slots.get()).ok()??;
        if record.is_control() {
            return None;
        }
        Self::copy_out(memory, &record, 0, to);
        Some(record.len)
    }

    /// The position after the last bytes that are published now, from `from` on: what an edge-triggered watcher remembers.
    pub fn published_after<M: RingMemory>(&self, memory: &M, from: u64) -> u64 {
        let mut position = from.max(self.slots.get());
        let mut last = position;
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = look_at(memory, position) else { break };
            position = position_after(memory, position, record.flags);
            if !record.is_control() {
                last = position;
            }
        }
        last
    }

    /// The position up to which all is released.
    pub fn position(&self) -> u64 {
        self.slots.get()
    }

    /// The position behind all that is published now.
    pub fn end<M: RingMemory>(&self, memory: &M) -> u64 {
        self.published_up_to(memory, 0, MESSAGE_MAX_BYTES)
    }

    /// Bytes that were taken from this position on, of which the sender has heard of no credit: so their headers still stand. `None` if it is none of
    /// those. (An empty packet counts as one.)
    pub fn taken_since<M: RingMemory>(&self, memory: &M, from: u64) -> Option<u64> {
        let (mut position, mut bytes) = (from, self.used.get());
        // (The peer says from where.)
        self.slots.get().checked_sub(from).filter(|past| *past <= memory.slot_count() as u64)?;
        for _ in 0..=memory.slot_count() {
            if position == self.slots.get() {
                return Some(bytes);
            }
            let record = look_at(memory, position).ok()??;
            if !record.is_control() {
                bytes += record.len.max(1) as u64;
            }
            position = position_after(memory, position, record.flags);
        }
        None
    }

    /// Puts these marks where the sender's next records would be, for one that publishes nothing more. All is taken that it has published, and the
    /// slots are there, and one more. The first is last: then they stand all.
    pub fn put_marks<M: RingMemory>(&self, memory: &M, marks: &[Mark]) {
        // What may stand behind came before what did not come.
        memory.publish(slot_of(memory, self.slots.get() + marks.len() as u64), 0);
        for (nth, mark) in marks.iter().enumerate().rev() {
            let position = self.slots.get() + nth as u64;
            let slot = slot_of(memory, position);
            write_mark(memory, slot, *mark);
            memory.publish(slot, header_word(position, FLAG_CONTROL, 16));
        }
    }

    /// Bytes that can be read now; counted record by record, until there are `enough`.
    pub fn available<M: RingMemory>(&self, memory: &M, enough: usize) -> usize {
        let (mut position, mut used, mut total) = (self.slots.get(), self.used.get() as usize, 0);
        for _ in 0..memory.slot_count() {
            if total >= enough {
                break;
            }
            let Ok(Some(record)) = look_at(memory, position) else { break };
            if record.is_control() {
                break;
            }
            total += record.len.saturating_sub(used);
            position = position_after(memory, position, record.flags);
            used = 0;
        }
        total
    }

    /// The same of all, by what is known of the last time; and the mark that ends it, if one does.
    pub fn available_since<M: RingMemory>(
        &self,
        memory: &M,
        known: &Counted,
    ) -> (usize, Option<Mark>) {
        let now = self.slots.get();
        let (mut to, mut bytes) = known.since(memory, now).unwrap_or((now, 0));
        let mut mark = None;
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = look_at(memory, to) else { break };
            if record.is_control() {
                mark = Self::mark_at(memory, to);
                break;
            }
            bytes += record.len as u64;
            to = position_after(memory, to, record.flags);
        }
        known.note(now, to, bytes);
        (bytes.saturating_sub(self.used.get()) as usize, mark)
    }

    fn read_mark<M: RingMemory>(memory: &M, position: u64) -> Next {
        let slot = slot_of(memory, position);
        let value = read_word(memory, slot, 16);
        Mark::of_words(read_word(memory, slot, 8), value).map_or(Next::Corrupt, Next::Mark)
    }

    /// The first mark that stands anywhere in what is published.
    pub fn mark_ahead<M: RingMemory>(&self, memory: &M) -> Option<Mark> {
        let mut position = self.slots.get();
        for _ in 0..memory.slot_count() {
            let Ok(Some(record)) = look_at(memory, position) else { break };
            if record.is_control() {
                return Self::mark_at(memory, position);
            }
            position = position_after(memory, position, record.flags);
        }
        None
    }

    fn mark_at<M: RingMemory>(memory: &M, position: u64) -> Option<Mark> {
        match Self::read_mark(memory, position) {
            Next::Mark(mark) => Some(mark),
            _ => None,
        }
    }

    /// The mark that stands next, if one does.
    pub fn mark<M: RingMemory>(&self, memory: &M) -> Option<Mark> {
        let position = self.slots.get();
        match look_at(memory, position) {
            Ok(Some(record)) if record.is_control() => Self::mark_at(memory, position),
            _ => None,
        }
    }

    /// Goes past the mark that stands next. True as in `Next::Bytes`.
    pub fn pass_mark<M: RingMemory>(&self, memory: &M) -> bool {
        let position = self.slots.get();
        match look_at(memory, position) {
            Ok(Some(record)) if record.is_control() => self.release(memory, &record),
            _ => false,
        }
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
