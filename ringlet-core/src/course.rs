//! The records of one direction on their way through an adapter (`mirror`): which there are, and which may be delivered.
//!
//! An adapter looks at the sender's segment as a receiver does, and writes to the receiver's segment as the sender did to its own, to the same
//! places. Either program may write anything at any time. So what is looked at is copied once and checked, and delivered is only what has
//! room by the credit that was passed back: an honest sender never publishes more.
//!
//! Where the two segments are apart, either half of an adapter has a course: the sender's `look`s and is `give`n credit, the receiver's
//! `follow`s what the other half has seen (which it does not trust), and has the `credit`.

use crate::layout::*;
use crate::record::{RingMemory, header_word, position_after, slot_of, tag};
use crate::ring::Mark;
use crate::sync::Ordering;

pub type Body = [u8; LINE_BYTES - 8];

/// A record, as it was found.
#[derive(Clone, Debug)]
pub struct Piece {
    pub position: u64,
    pub slot: usize,
    pub header: u64,
    /// What stands behind the header.
    pub body: Body,
    /// What lies in the data ring, if `len` is not 0.
    pub place: usize,
    pub len: usize,
    pub mark: Option<Mark>,
}

/// What a receiver has consumed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credit {
    pub slots: u64,
    pub data: u64,
    /// A quarter of the slots or of the data was passed: a sender that waits for room is looked for, as `Rx::release` has it.
    pub looks: bool,
}

#[derive(Default, Debug)]
pub struct Course {
    /// The record that is due, and where the data of the last one ended.
    next: u64,
    data: u64,
    /// What the receiver is known to have consumed.
    credit_slots: u64,
    credit_data: u64,
    spoiled: bool,
}

impl Course {
    /// The record that is due, if it is published. What no ringlet writes is found as one that none reads, and is the last.
    #[inline]
    pub fn look<M: RingMemory>(&mut self, from: &M) -> Option<Piece> {
        let slot = slot_of(from, self.next);
        if !self.has_room(from) {
            return None;
        }
        // ORDER: Acquire; pairs with `RingMemory::publish`, as `record::look`.
        let header = from.header(slot).load(Ordering::Acquire);
        if header >> (LEN_BITS + FLAG_BITS) != tag(self.next) {
            return None;
        }
        let mut body = [0; LINE_BYTES - 8];
        // SAFETY: an array of that length.
        unsafe { from.read_slot(slot, 8, body.as_mut_ptr(), body.len()) };
        Some(self.take(from, header, body))
    }

    /// The record that another half has found. `None`: it can't be the one that is due here.
    pub fn follow<M: RingMemory>(&mut self, to: &M, header: u64, body: Body) -> Option<Piece> {
        let is_due = self.has_room(to) && header >> (LEN_BITS + FLAG_BITS) == tag(self.next);
        is_due.then(|| self.take(to, header, body))
    }

    fn has_room<M: RingMemory>(&self, memory: &M) -> bool {
        !self.spoiled && self.next - self.credit_slots < memory.slot_count() as u64
    }

    fn take<M: RingMemory>(&mut self, memory: &M, header: u64, body: Body) -> Piece {
        let (position, slot) = (self.next, slot_of(memory, self.next));
        let mut piece = Piece { position, slot, header, body, place: 0, len: 0, mark: None };
        if self.check(memory, &mut piece).is_none() {
            self.spoiled = true;
            (piece.header, piece.len) = (header_word(position, FLAG_CONTROL, 0), 0);
        }
        self.next = position_after(memory, position, header >> LEN_BITS & ((1 << FLAG_BITS) - 1));
        piece
    }

    #[inline]
    fn check<M: RingMemory>(&mut self, memory: &M, piece: &mut Piece) -> Option<()> {
        let flags = piece.header >> LEN_BITS & ((1 << FLAG_BITS) - 1);
        let len = (piece.header & ((1 << LEN_BITS) - 1)) as usize;
        if flags & FLAG_CONTROL != 0 {
            piece.mark = Some(Mark::of_words(piece.word(0), piece.word(1))?);
            return (len == 16 && flags & FLAG_DATA == 0).then_some(());
        }
        if flags & FLAG_DATA == 0 {
            return (len <= INLINE_BYTES).then_some(());
        }
        let (start, size) = (piece.word(0), memory.ring_bytes() as u64);
        if start != self.data {
            // Over the rest of a lap; where nothing is unread, that counts as free at once.
            if start != self.data.checked_next_multiple_of(size)? {
                return None;
            }
            if self.credit_data == self.data {
                self.credit_data = start;
            }
        }
        let end = start.checked_add((len as u64).next_multiple_of(LINE_BYTES as u64))?;
        let place = start & (size - 1);
        let fits = end - self.credit_data <= size
            && place + len as u64 <= size
            && (1..=MESSAGE_MAX_BYTES).contains(&len);
        self.data = end;
        (piece.place, piece.len) = (place as usize, len);
        fits.then_some(())
    }

    /// What the receiver has consumed, if that is more than was known.
    #[inline]
    pub fn credit<M: RingMemory>(&mut self, receiver: &M) -> Option<Credit> {
        // ORDER: Acquire, both; pairs with `RingMemory::give_credit`, as `Tx::refresh`.
        let slots = receiver.credit_slots().load(Ordering::Acquire);
        let data = receiver.credit_data().load(Ordering::Acquire);
        let before = (self.credit_slots, self.credit_data);
        if !self.give(slots, data) {
            return None;
        }
        let data = self.credit_data;
        let passed = |before: u64, now: u64, size: usize| {
            let quarter = size as u64 / 4;
            before / quarter != now / quarter
        };
        let looks = passed(before.0, slots, receiver.slot_count())
            || passed(before.1, data, receiver.ring_bytes());
        Some(Credit { slots, data, looks })
    }

    /// So much was consumed. False if that is nothing new, or can't be.
    pub fn give(&mut self, slots: u64, data: u64) -> bool {
        let is_new = slots != self.credit_slots
            && slots.wrapping_sub(self.credit_slots) <= self.next - self.credit_slots;
        if is_new {
            self.credit_slots = slots;
            if data.wrapping_sub(self.credit_data) <= self.data - self.credit_data {
                self.credit_data = data;
            }
        }
        is_new
    }

    /// What was consumed of the data, as far as that is believed.
    pub fn consumed(&self) -> u64 {
        self.credit_data
    }

    /// The record that is due next.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// May a sender that wants more wait for room before long? (With less than this unread none does.)
    pub fn fills<M: RingMemory>(&self, memory: &M) -> bool {
        self.next - self.credit_slots > memory.slot_count() as u64 / 2
            || self.data - self.credit_data > memory.ring_bytes() as u64 / 2
    }

    /// Is something on its way, or unread?
    pub fn is_owed(&self) -> bool {
        self.next != self.credit_slots
    }
}

impl Piece {
    /// Puts the slot in its place. What lies in the data ring is there.
    #[inline]
    pub fn put<M: RingMemory>(&self, to: &M) {
        // SAFETY: an array of that length.
        unsafe { to.write_slot(self.slot, 8, self.body.as_ptr(), self.body.len()) };
        to.publish(self.slot, self.header);
    }

    fn word(&self, nth: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.body[8 * nth..8 * nth + 8]);
        u64::from_ne_bytes(word)
    }
}
