//! A one-way queue of messages: records (`record`) whose boundaries count. One sender, one receiver.
//!
//! A message is written where the receiver will read it (`reserve`, `commit`) and read where it lies (`peek`, `release`); `push` and
//! `pop` copy. One of up to `INLINE_BYTES` shares a cache line with the header that announces it, so one line crosses. A longer one lies
//! in one piece in the data ring; `max_bytes` is a quarter of it, so that any message fits whenever the queue is `writable`.
//!
//! The receiver's side of shared memory is hostile input, as in `record`: what a message's bytes say may even change while they are
//! looked at. So they are copied out (`Message::read`) or looked at through a raw pointer, and never are a `&[u8]`.

use crate::layout::*;
use crate::memory::Buffers;
use crate::record::{self, PlainU64, RingMemory, look, position_after, slot_of};

/// The longest message that a queue of this memory takes.
#[inline(always)]
pub fn max_bytes<M: RingMemory>(memory: &M) -> usize {
    (memory.ring_bytes() / 4).clamp(INLINE_BYTES, MESSAGE_MAX_BYTES)
}

/// Memory in which this process can look at a message in place.
pub trait InPlace: RingMemory {
    /// Where the bytes of a slot begin, its header word included; `LINE_BYTES` are there.
    fn slot_pointer(&self, slot: usize) -> *mut u8;
    /// Where the data ring begins; `ring_bytes` are there.
    fn data_pointer(&self) -> *mut u8;
}

/// Why a message was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// No room now. There will be some when the queue is `writable`.
    Full,
    /// Longer than `max_bytes`: never.
    TooLong,
}

/// Where the next message of a sender may be written. Nothing is published by it, nor lost when it is forgotten.
#[derive(Debug)]
pub struct Reserved {
    pub(crate) slot: usize,
    /// Start in the data ring, if it is not in the slot.
    pub(crate) data: Option<usize>,
    pub(crate) room: usize,
}

impl Reserved {
    pub fn room(&self) -> usize {
        self.room
    }

    /// Copies `n` bytes to byte `at` of the message. Panics when there is no room for them.
    ///
    /// # Safety
    /// `from` is valid for reading `n` bytes.
    #[inline(always)]
    pub unsafe fn write<M: RingMemory>(&self, memory: &M, at: usize, from: *const u8, n: usize) {
        assert!(at <= self.room && n <= self.room - at);
        // SAFETY: `from` is valid for `n` bytes by our own contract, and the message has room for them.
        unsafe {
            match self.data {
                None => memory.write_slot(self.slot, 8 + at, from, n),
                Some(place) => memory.write_data(place + at, from, n),
            }
        }
    }

    /// Where the message is to be written: `room` bytes, until it is committed. The peer may write there too.
    pub fn pointer<M: InPlace>(&self, memory: &M) -> *mut u8 {
        place_pointer(memory, self.slot, self.data)
    }
}

/// A message that is written and not shown.
#[derive(Debug)]
pub struct Sealed {
    slot: usize,
    header: u64,
}

impl Sealed {
    /// The receiver's wish is to be looked at behind a fence.
    #[inline(always)]
    pub fn show<M: RingMemory>(self, memory: &M) {
        memory.publish_quietly(self.slot, self.header);
    }
}

/// Several messages of one sender, of which the receiver finds none before all are shown: the first is shown last.
#[derive(Default)]
pub struct Train {
    slot: PlainU64,
    header: PlainU64,
    len: PlainU64,
}

impl Train {
    /// Adds the message that was sealed last; how many there are.
    #[inline(always)]
    pub fn add<M: RingMemory>(&self, memory: &M, sealed: Sealed) -> u64 {
        match self.len.get() {
            0 => {
                self.slot.set(sealed.slot as u64);
                self.header.set(sealed.header);
            }
            _ => sealed.show(memory),
        }
        self.len.set(self.len.get() + 1);
        self.len.get()
    }

    /// Shows them. Before anything else is sent, too.
    #[inline(always)]
    pub fn show<M: RingMemory>(&self, memory: &M) {
        if self.len.get() > 0 {
            self.len.set(0);
            Sealed { slot: self.slot.get() as usize, header: self.header.get() }.show(memory);
        }
    }
}

/// A message that is to be read next. It stays where it lies until it is released.
#[derive(PartialEq, Eq, Debug)]
pub struct Message(pub(crate) record::Record);

impl Message {
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.0.len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `n` bytes out, from byte `at` on. Panics when the message has not so many.
    ///
    /// # Safety
    /// `to` is valid for writing `n` bytes.
    #[inline(always)]
    pub unsafe fn read<M: RingMemory>(&self, memory: &M, at: usize, to: *mut u8, n: usize) {
        assert!(at <= self.len() && n <= self.len() - at);
        // SAFETY: `to` has room for `n` bytes by our own contract, and the message has as many.
        unsafe { self.0.read(memory, at, to, n) };
    }

    /// Copies into the program's buffers what they hold; returns how much that is.
    #[inline]
    pub fn copy_to<M: RingMemory>(&self, memory: &M, to: &mut Buffers) -> usize {
        self.copy_rest_to(memory, 0, to)
    }

    /// Copies the bytes from `at` on. Panics when the message ends before.
    #[inline]
    pub fn copy_rest_to<M: RingMemory>(&self, memory: &M, at: usize, to: &mut Buffers) -> usize {
        let total = (self.len() - at).min(to.remaining());
        let mut done = 0;
        while done < total {
            let (piece, n) = to.take(total - done);
            // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
            unsafe { self.read(memory, at + done, piece, n) };
            done += n;
        }
        total
    }

    /// Where the message lies: `len` bytes, until it is released. The peer may change them at any time: read each as a volatile
    /// or atomic one, once.
    pub fn pointer<M: InPlace>(&self, memory: &M) -> *const u8 {
        let data = (self.0.flags & FLAG_DATA != 0).then_some(self.0.place);
        place_pointer(memory, self.0.slot, data)
    }
}

fn place_pointer<M: InPlace>(memory: &M, slot: usize, data: Option<usize>) -> *mut u8 {
    match data {
        None => memory.slot_pointer(slot).wrapping_add(8),
        Some(place) => memory.data_pointer().wrapping_add(place),
    }
}

/// What a receiver finds next.
#[derive(PartialEq, Eq, Debug)]
pub enum Next {
    Empty,
    Message(Message),
    /// The peer wrote what no ringlet writes.
    Corrupt,
}

/// The sender's own state.
#[derive(Default)]
#[repr(transparent)]
pub struct Tx(record::Tx);

impl Tx {
    pub fn reset(&self) {
        self.0.reset();
    }

    /// Room for a message of up to `len` bytes. A later call forgets an earlier one.
    #[inline(always)]
    pub fn reserve<M: RingMemory>(&self, memory: &M, len: usize) -> Result<Reserved, Refused> {
        if len > max_bytes(memory) {
            return Err(Refused::TooLong);
        }
        let slot = self.0.reserve_slot(memory).ok_or(Refused::Full)?;
        if len <= INLINE_BYTES {
            return Ok(Reserved { slot, data: None, room: INLINE_BYTES });
        }
        let (place, room) = self.0.reserve_data(memory, len, false).ok_or(Refused::Full)?;
        Ok(Reserved { slot, data: Some(place), room })
    }

    /// Sends the first `len` bytes of what was reserved last. Panics when so many were not reserved.
    #[inline(always)]
    pub fn commit<M: RingMemory>(&self, memory: &M, reserved: Reserved, len: usize) {
        assert!(len <= reserved.room);
        match reserved.data {
            Some(_) if len > 0 => self.0.publish_data(memory, reserved.slot, len),
            _ => self.0.publish(memory, reserved.slot, 0, len),
        }
    }

    /// As `commit`; but it is for the caller to show it. (The receiver finds what lies behind it only then.)
    #[inline(always)]
    pub fn seal<M: RingMemory>(&self, memory: &M, reserved: Reserved, len: usize) -> Sealed {
        assert!(len <= reserved.room);
        let flags = match reserved.data {
            Some(_) if len > 0 => {
                self.0.name_data(memory, reserved.slot, len);
                FLAG_DATA
            }
            _ => 0,
        };
        let header = self.0.next_header(memory, reserved.slot, flags, len);
        Sealed { slot: reserved.slot, header }
    }

    /// Sends all that is left in the program's buffers as one message.
    #[inline]
    pub fn push<M: RingMemory>(&self, memory: &M, from: &mut Buffers) -> Result<(), Refused> {
        let (reserved, len) = self.prepare(memory, &[], from)?;
        self.commit(memory, reserved, len);
        Ok(())
    }

    /// Sends `head`, and behind it all that is left in the program's buffers, as one message. False: the receiver
    /// has withdrawn, and takes neither it nor any other.
    #[inline]
    pub fn push_behind<M: RingMemory>(
        &self,
        memory: &M,
        head: &[u8],
        from: &mut Buffers,
    ) -> Result<bool, Refused> {
        let (Reserved { slot, data, .. }, len) = self.prepare(memory, head, from)?;
        if data.is_some() {
            self.0.name_data(memory, slot, len);
        }
        let flags = if data.is_some() { FLAG_DATA } else { 0 };
        let header = self.0.next_header(memory, slot, flags, len);
        Ok(memory.publish_unless_withdrawn(slot, header))
    }

    /// Reserves a place for `head` and what is left in the program's buffers, and writes them there.
    #[inline(always)]
    fn prepare<M: RingMemory>(
        &self,
        memory: &M,
        head: &[u8],
        from: &mut Buffers,
    ) -> Result<(Reserved, usize), Refused> {
        let len = head.len() + from.remaining();
        let reserved = self.reserve(memory, len)?;
        // SAFETY: `head` is valid for its length.
        unsafe { reserved.write(memory, 0, head.as_ptr(), head.len()) };
        let mut done = head.len();
        while done < len {
            let (piece, n) = from.take(len - done);
            // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
            unsafe { reserved.write(memory, done, piece, n) };
            done += n;
        }
        Ok((reserved, len))
    }

    /// Is there room for any message? What a sender waits for.
    pub fn writable<M: RingMemory>(&self, memory: &M) -> bool {
        // Half: less than a quarter may be left before the end of the ring and be skipped, a quarter is the message.
        self.0.has_room(memory, memory.ring_bytes() as u64 / 2)
    }

    /// Was nothing ever sent?
    pub fn is_new(&self) -> bool {
        self.0.is_new()
    }

    /// Changes whenever the receiver is found to have released something.
    pub fn progress(&self) -> u64 {
        self.0.progress()
    }

    /// Is everything that was sent also released?
    pub fn drained<M: RingMemory>(&self, memory: &M) -> bool {
        self.0.drained(memory)
    }

    /// Messages sent and not yet known to be released, and places skipped among them: an upper bound.
    pub fn outstanding<M: RingMemory>(&self, memory: &M) -> u64 {
        self.0.refresh(memory);
        self.0.slots.get() - self.0.known_slots.get()
    }
}

#[inline(always)]
fn peek_at<M: RingMemory>(memory: &M, position: u64) -> Next {
    match look(memory, slot_of(memory, position), position, max_bytes(memory)) {
        Ok(None) => Next::Empty,
        Ok(Some(record)) if !record.is_control() => Next::Message(Message(record)),
        _ => Next::Corrupt,
    }
}

/// The receiver's own state.
#[derive(Default)]
#[repr(transparent)]
pub struct Rx(record::Rx);

impl Rx {
    pub fn reset(&self) {
        self.0.reset();
    }

    /// Is a message there? The cheapest look, for spinning; needs no lock.
    #[inline(always)]
    pub fn ready<M: RingMemory>(&self, memory: &M) -> bool {
        self.0.ready(memory)
    }

    /// The next message, left where it is.
    #[inline(always)]
    pub fn peek<M: RingMemory>(&self, memory: &M) -> Next {
        peek_at(memory, self.0.slots.get())
    }

    /// The message behind one that is not released yet. They are released in this order.
    #[inline(always)]
    pub fn peek_behind<M: RingMemory>(&self, memory: &M, message: &Message) -> Next {
        let Message(record) = message;
        peek_at(memory, position_after(memory, record.position, record.flags))
    }

    /// The position after the last message that is there now, from `from` on: what an edge-triggered watcher remembers.
    pub fn published_after<M: RingMemory>(&self, memory: &M, from: u64) -> u64 {
        self.0.published_up_to(memory, from, max_bytes(memory))
    }

    /// Takes no more than what is there now. A sender that is about to publish is told that its message is not taken (`push_behind`).
    pub fn withdraw<M: RingMemory>(&self, memory: &M) {
        self.0.withdraw(memory, max_bytes(memory));
    }

    /// Goes past the message that was peeked at. True when a sender that waits for room should now be looked for.
    #[inline(always)]
    pub fn release<M: RingMemory>(&self, memory: &M, message: Message) -> bool {
        debug_assert!(message.0.position == self.0.slots.get());
        self.0.release(memory, &message.0)
    }
}
