//! One end of a connection: what it may send, what it serves, what comes back.
//!
//! Requests are served in the order of their positions, each reply is published before the credit of its request. So an end
//! that has seen a credit, and then no reply waiting, knows that every request up to it is completed.
//!
//! Each method is called by one caller at a time (the owner's lock). None waits.

use super::layout::{BUFFER_BYTES, INLINE_BYTES};
use super::memory::{Memory, Queue};
use super::message::*;
use crate::record::PlainU64;
use core::cell::Cell;

/// All requests that may be under way are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// Why a handler may not reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoReply {
    /// It handles a reply.
    InReply,
    /// It has replied already.
    Twice,
    /// The peer has spoiled the connection.
    Spoiled,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Delivered {
    Nothing,
    /// One message: its handler ran, or it was refused and goes back.
    One,
    /// The peer wrote what no sane peer writes: the connection is of no use any more.
    Corrupt,
}

/// Where messages go.
///
/// # Safety
/// `place` returns an address that is valid for writing `head.len` bytes, for every head that `gate` admits and whose length is at
/// most `BUFFER_BYTES`; for a stored message, and a get, the address of bytes that are there already.
pub unsafe trait Host<M: Memory> {
    fn gate(&self) -> Gate;
    fn place(&self, head: &Head) -> *mut u8;
    /// Runs the message's handler; its bytes are where `place` said.
    fn run(&self, call: &Call<M>);
    /// For the error handler.
    fn returned(&self, returned: &Returned);
}

/// One end's own state, where its peer can't write.
#[derive(Default)]
pub struct Connection {
    /// Requests published, and of those completed.
    sent: PlainU64,
    completed: PlainU64,
    /// Replies taken.
    answered: PlainU64,
    /// The peer's requests served, and replies published to them.
    served: PlainU64,
    replied: PlainU64,
    /// Replies of the program's, less those that have come back.
    answers: PlainU64,
    /// Buffers of the leaving queues.
    buffers: [Buffers; 2],
}

/// A message that is being handled.
pub struct Call<'a, M: Memory> {
    connection: &'a Connection,
    memory: &'a M,
    head: &'a Head,
    /// Position of the request; `None` for a reply.
    request: Option<u64>,
    replied: Cell<bool>,
    place: *mut u8,
}

impl<M: Memory> Call<'_, M> {
    pub fn head(&self) -> &Head {
        self.head
    }

    pub fn is_reply(&self) -> bool {
        self.request.is_none()
    }

    /// Where the message's bytes are.
    pub fn place(&self) -> *mut u8 {
        self.place
    }

    /// Has a reply's place that was not used.
    pub fn may_reply(&self) -> Result<(), NoReply> {
        match self.request {
            None => Err(NoReply::InReply),
            Some(_) if self.replied.get() => Err(NoReply::Twice),
            Some(_) => Ok(()),
        }
    }

    /// At most once, and from a request's handler only. There is always room.
    pub fn reply(&self, message: &Message) -> Result<(), NoReply> {
        self.may_reply()?;
        let request = self.request.ok_or(NoReply::InReply)?;
        if !self.connection.answer(self.memory, request, message, None) {
            return Err(NoReply::Spoiled);
        }
        self.replied.set(true);
        Ok(())
    }
}

impl Connection {
    /// Requests that are not completed, as far as is known.
    pub fn outstanding(&self) -> u64 {
        self.sent.get() - self.completed.get()
    }

    /// Is there something to deliver?
    #[inline(always)]
    pub fn ready<M: Memory>(&self, memory: &M) -> bool {
        self.arrived(memory, Queue::Reply, self.answered.get())
            || self.arrived(memory, Queue::Request, self.served.get())
    }

    #[inline(always)]
    fn arrived<M: Memory>(&self, memory: &M, queue: Queue, position: u64) -> bool {
        memory.stamp(queue, slot::<M>(position)) == position + 1
    }

    /// Takes over what the peer says it has served; what makes no sense is ignored (the liar gets no more requests).
    fn refresh<M: Memory>(&self, memory: &M) {
        let credit = memory.credit(Queue::Request);
        // The credit was loaded first: a reply that is not there yet belongs to a later request.
        if (self.completed.get()..=self.sent.get()).contains(&credit)
            && !self.arrived(memory, Queue::Reply, self.answered.get())
        {
            self.completed.set(credit);
        }
    }

    /// Is every request completed?
    pub fn idle<M: Memory>(&self, memory: &M) -> bool {
        self.refresh(memory);
        self.outstanding() == 0
    }

    /// May a request be sent? (A reply that waits to be delivered keeps its request uncompleted.)
    #[inline]
    pub fn has_room<M: Memory>(&self, memory: &M) -> bool {
        self.outstanding() < M::DEPTH as u64 || {
            self.refresh(memory);
            self.outstanding() < M::DEPTH as u64
        }
    }

    /// Sends a request. Its bytes are at most `BUFFER_BYTES`.
    #[inline]
    pub fn request<M: Memory>(&self, memory: &M, message: &Message) -> Result<(), Full> {
        if !self.has_room(memory) {
            return Err(Full);
        }
        let position = self.sent.get();
        if !self.post(memory, Queue::Request, position, message, message.head.tag, None) {
            return Err(Full); // a peer that gives credits for what it keeps
        }
        self.sent.set(position + 1);
        Ok(())
    }

    fn answer<M: Memory>(
        &self,
        memory: &M,
        request: u64,
        message: &Message,
        returned: Option<Status>,
    ) -> bool {
        let position = self.replied.get();
        let done = self.post(memory, Queue::Reply, position, message, request, returned);
        if done {
            self.replied.set(position + 1);
            self.answers.set(self.answers.get() + returned.is_none() as u64);
        }
        done
    }

    #[inline]
    fn post<M: Memory>(
        &self,
        memory: &M,
        queue: Queue,
        position: u64,
        message: &Message,
        word: u64,
        returned: Option<Status>,
    ) -> bool {
        let Message { head, bytes } = message;
        debug_assert!(bytes.len() <= BUFFER_BYTES);
        let mut extra = returned.map_or(0, |status| status as u8);
        let inline = fits_inline(head);
        if !inline && !bytes.is_empty() {
            let buffers = &self.buffers[queue as usize];
            let Some(buffer) = buffers.take(memory.credit(queue), position, M::DEPTH) else {
                return false;
            };
            memory.write_buffer(queue, buffer as usize, bytes);
            extra = buffer;
        }
        let place = slot::<M>(position);
        // Most messages are no more than some arguments. Those go by no other way than the processor's registers.
        if fits_line(head) && (!inline || bytes.is_empty()) {
            let mut line = [0; FIRST_BYTES];
            encode(head, returned.is_some(), word, extra, &mut line);
            memory.write(queue, place, &line);
        } else {
            let mut body = [0; BODY_BYTES];
            let mut used = encode(head, returned.is_some(), word, extra, &mut body);
            if inline {
                body[used..used + bytes.len()].copy_from_slice(bytes);
                used += bytes.len();
            }
            // One of two lengths that the compiler knows: what follows the message is zeros.
            let written = if used <= FIRST_BYTES { &body[..FIRST_BYTES] } else { &body[..] };
            memory.write(queue, place, written);
        }
        memory.publish(queue, place, position + 1);
        true
    }

    /// Delivers the next message of a queue.
    #[inline(always)]
    pub fn deliver<M: Memory, H: Host<M>>(&self, memory: &M, queue: Queue, host: &H) -> Delivered {
        let next = match queue {
            Queue::Request => &self.served,
            Queue::Reply => &self.answered,
        };
        if !self.arrived(memory, queue, next.get()) {
            return Delivered::Nothing;
        }
        self.deliver_next(memory, queue, next, host)
    }

    fn deliver_next<M: Memory, H: Host<M>>(
        &self,
        memory: &M,
        queue: Queue,
        next: &PlainU64,
        host: &H,
    ) -> Delivered {
        let position = next.get();
        let mut line = [0; FIRST_BYTES];
        memory.read(queue, slot::<M>(position), &mut line);
        let mut body = [0; BODY_BYTES];
        // As in `post`.
        let (found, inline) = match used(&line) {
            (HEAD_BYTES..=FIRST_BYTES, 0) => (decode(&line), &[][..]),
            (all, _) => {
                read_body(memory, queue, slot::<M>(position), &line, all, &mut body);
                (decode(&body), &body[..])
            }
        };
        let Some(found) = found else { return Delivered::Corrupt };
        // A reply answers a request of ours that is not completed, and its successor a later one.
        let open = self.completed.get()..self.sent.get();
        if queue == Queue::Reply && !open.contains(&found.word) {
            return Delivered::Corrupt;
        }
        let mut refused = None;
        if found.returned {
            let Some(status) = Status::from_u8(found.extra) else { return Delivered::Corrupt };
            let reply = queue == Queue::Request;
            // No more come back than were made: a peer that knows no tag, and so was never answered, has nothing to say to the error handler.
            if reply {
                let Some(left) = self.answers.get().checked_sub(1) else {
                    return Delivered::Corrupt;
                };
                self.answers.set(left);
            }
            // A reply's place holds whose answer it is instead of the tag, so the head is taken from what we sent.
            let head = if reply { None } else { sent(memory, Queue::Request, found.word) };
            host.returned(&Returned { status, reply, head: head.as_ref().unwrap_or(&found).head });
        } else {
            match host.gate().admit(&found.head, queue == Queue::Reply) {
                Err(status) => refused = Some(status),
                Ok(()) => {
                    let place = host.place(&found.head);
                    if !fetch(memory, queue, inline, &found, place) {
                        return Delivered::Corrupt;
                    }
                    host.run(&Call {
                        connection: self,
                        memory,
                        head: &found.head,
                        request: (queue == Queue::Request).then_some(position),
                        replied: Cell::new(false),
                        place,
                    });
                }
            }
        }
        if queue == Queue::Reply {
            self.completed.set(found.word + 1);
        }
        if let Some(status) = refused {
            self.send_back(memory, queue, position, &found.head, status);
        }
        next.set(position + 1);
        memory.give_credit(queue, position + 1);
        Delivered::One
    }

    /// A request goes back in the place of its reply; a reply as a request, whose place is there: the reply has just completed one.
    fn send_back<M: Memory>(
        &self,
        memory: &M,
        queue: Queue,
        position: u64,
        head: &Head,
        status: Status,
    ) {
        let message = Message { head: *head, bytes: &[] };
        if queue == Queue::Request {
            self.answer(memory, position, &message, Some(status));
        } else {
            let position = self.sent.get();
            self.post(memory, Queue::Request, position, &message, 0, Some(status));
            self.sent.set(position + 1);
        }
    }

    /// For the end of a connection, when what had arrived is delivered: hands out what the peer has not taken.
    pub fn undelivered<M: Memory>(
        &self,
        memory: &M,
        status: Status,
        mut each: impl FnMut(Returned),
    ) {
        for (queue, end) in [(Queue::Request, &self.sent), (Queue::Reply, &self.replied)] {
            let least = end.get().saturating_sub(M::DEPTH as u64);
            let least = if queue == Queue::Request { self.completed.get() } else { least };
            for position in memory.credit(queue).clamp(least, end.get())..end.get() {
                // Unless the peer has spoiled the slot.
                let found = sent(memory, queue, position);
                if found.as_ref().is_none_or(|found| !found.returned) {
                    let head = found.map_or(NOTHING, |found| found.head);
                    each(Returned { status, reply: queue == Queue::Reply, head });
                }
            }
        }
        self.completed.set(self.sent.get());
    }
}

const NOTHING: Head = Head {
    kind: Kind::Short,
    handler: 0,
    arguments: Arguments::NONE,
    tag: TAG_NONE,
    len: 0,
    offset: 0,
};

/// What we sent, as its slot still has it.
fn sent<M: Memory>(memory: &M, queue: Queue, position: u64) -> Option<Decoded> {
    let mut body = [0; BODY_BYTES];
    memory.written(queue, slot::<M>(position), &mut body);
    decode(&body)
}

#[inline(always)]
pub(super) fn slot<M: Memory>(position: u64) -> usize {
    const { assert!(M::DEPTH.is_power_of_two() && M::DEPTH <= 64) };
    position as usize & (M::DEPTH - 1)
}

/// The rest of the first cache line. The second one is touched only if something is there.
const FIRST_BYTES: usize = 56;

/// Do the head and the arguments fit in the first line?
#[inline(always)]
fn fits_line(head: &Head) -> bool {
    HEAD_BYTES + 4 * head.arguments.words().len() <= FIRST_BYTES
}

/// How much of a body is used, and how many of these are bytes of the message, by its first line.
#[inline(always)]
fn used(line: &[u8; FIRST_BYTES]) -> (usize, usize) {
    let len = u32::from_le_bytes([line[4], line[5], line[6], line[7]]) as usize;
    let after = 4 * line[1] as usize;
    let inline = if after + len <= INLINE_BYTES { len } else { 0 };
    (HEAD_BYTES + after + inline, inline)
}

#[inline]
fn read_body<M: Memory>(
    memory: &M,
    queue: Queue,
    slot: usize,
    line: &[u8; FIRST_BYTES],
    used: usize,
    body: &mut Body,
) {
    if used > FIRST_BYTES {
        memory.read(queue, slot, body);
    }
    // What was read first stays as it is: a peer that changes it now is not believed.
    body[..FIRST_BYTES].copy_from_slice(line);
}

/// Copies a message's bytes to `place`, which is valid for them (contract of `Host`).
#[inline]
fn fetch<M: Memory>(
    memory: &M,
    queue: Queue,
    inline: &[u8],
    found: &Decoded,
    place: *mut u8,
) -> bool {
    let Head { len, kind, .. } = found.head;
    if len == 0 || matches!(kind, Kind::Stored | Kind::Short | Kind::Get) {
        return true;
    }
    if fits_inline(&found.head) {
        let start = HEAD_BYTES + 4 * found.head.arguments.words().len();
        // SAFETY: `place` is valid for `len` bytes; the slice has as many.
        unsafe { place.copy_from_nonoverlapping(inline[start..start + len].as_ptr(), len) };
        return true;
    }
    if found.extra as usize >= M::DEPTH {
        return false;
    }
    // SAFETY: `place` is valid for `len` bytes, which `decode` has limited to a buffer's.
    unsafe { memory.read_buffer(queue, found.extra as usize, place, len) };
    true
}

/// Which buffers of a leaving queue are free. The lowest is taken, so that traffic that waits for its answers stays in the same memory.
#[derive(Default)]
struct Buffers {
    /// A bit for each one in use.
    used: PlainU64,
    /// The oldest and the next of `taken`, which holds position and buffer of each, by position.
    first: PlainU64,
    last: PlainU64,
    taken: Taken,
}

struct Taken([PlainU64; 64]);

impl Default for Taken {
    fn default() -> Taken {
        Taken([const { PlainU64::new(0) }; 64])
    }
}

impl Buffers {
    /// A buffer for the message at `position`, when the peer has taken `credit` messages.
    fn take(&self, credit: u64, position: u64, depth: usize) -> Option<u8> {
        while self.first.get() < self.last.get() {
            let oldest = self.taken.0[self.first.get() as usize % 64].get();
            if oldest >> 8 >= credit.min(position) {
                break;
            }
            self.used.set(self.used.get() & !(1 << (oldest & 63)));
            self.first.set(self.first.get() + 1);
        }
        let buffer = self.used.get().trailing_ones() as usize;
        if buffer >= depth {
            return None;
        }
        self.used.set(self.used.get() | 1 << buffer);
        self.taken.0[self.last.get() as usize % 64].set(position << 8 | buffer as u64);
        self.last.set(self.last.get() + 1);
        Some(buffer as u8)
    }
}
