//! How a handler is run, and what it can do with its message.

use super::message::{Error, Payload};
use super::name::Name;
use super::state::{Endpoint, Handled, Incoming, Translation, Undeliverable, Undelivered};
use super::statistics;
use ringlet_core::active::message::TAG_ALL;
use ringlet_core::active::{
    Call, Gate, Head, Host, Kind, Message, NoReply, Returned, SegmentMemory, Status, Tag,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[allow(unsafe_code)]
// SAFETY: the gate's segment is what `set_segment` was promised to be writable; the scratch holds `BUFFER_BYTES`.
unsafe impl Host<SegmentMemory> for Handled<'_> {
    #[inline]
    fn gate(&self) -> Gate {
        self.state.gate.get()
    }

    #[inline]
    fn place(&self, head: &Head) -> *mut u8 {
        match head.kind {
            Kind::Bulk | Kind::Stored | Kind::Get => {
                self.state.segment.get().wrapping_add(head.place() as usize)
            }
            Kind::Short | Kind::Medium => self.guard.scratch(),
        }
    }

    #[inline]
    fn run(&self, call: &Call<SegmentMemory>) {
        self.lane.know();
        if call.head().kind == Kind::Get {
            return self.give(call);
        }
        let handlers = self.state.handlers.borrow();
        if let Some(handler) = &handlers[call.head().handler as usize] {
            let mut statistics = self.state.statistics.borrow_mut();
            let at = statistics::place(call.head().kind);
            match call.is_reply() {
                false => statistics.requests_received[at] += 1,
                true => statistics.replies_received[at] += 1,
            }
            drop(statistics);
            self.guard.handle(|| handler(&Incoming { call, host: self }));
        }
    }

    fn returned(&self, returned: &Returned) {
        let what = Undelivered { returned: *returned, peer: Some(self.lane.peer) };
        self.guard.inner.returned.borrow_mut().push_back((self.endpoint.clone(), what));
    }
}

impl Handled<'_> {
    /// Answers a get, which the gate has admitted.
    #[cold]
    #[allow(unsafe_code)]
    fn give(&self, call: &Call<SegmentMemory>) {
        let Some(head) = call.head().got() else { return };
        self.state.statistics.borrow_mut().requests_received[statistics::place(Kind::Get)] += 1;
        let scratch = self.guard.scratch();
        // (By way of the scratch: others may write to the segment meanwhile.)
        // SAFETY: the gate has found as many bytes in the segment, and the scratch holds `BUFFER_BYTES`, which no message exceeds.
        unsafe { call.place().copy_to(scratch, head.len) };
        // SAFETY: the scratch holds `head.len` bytes, written just now, and nothing else is put there before this returns.
        let bytes = unsafe { std::slice::from_raw_parts(scratch, head.len) };
        match call.reply(&Message { head, bytes }) {
            Ok(()) => {
                self.state.statistics.borrow_mut().replies.count(&head);
                self.lane.notify();
            }
            Err(_) => self.lane.end(Status::Unreachable),
        }
    }
}

impl Incoming<'_> {
    pub fn arguments(&self) -> &[u32] {
        self.call.head().arguments.words()
    }

    pub fn is_reply(&self) -> bool {
        self.call.is_reply()
    }

    /// It has arguments only; a medium or bulk message may be one of no bytes.
    pub fn is_short(&self) -> bool {
        self.call.head().kind == Kind::Short
    }

    /// By which it was sent: it has arguments only, bytes that live as long as the handler, or bytes for the segment (`Kind::Stored` too).
    pub fn kind(&self) -> Kind {
        self.call.head().kind
    }

    pub fn handler(&self) -> u8 {
        self.call.head().handler
    }

    /// The number by which the receiver's translation table knows the sender; one of them if it has several.
    pub fn source_index(&self) -> Option<usize> {
        let (peer, lane) = (self.host.lane.peer, self.host.lane);
        let table = self.host.state.translations.borrow();
        let is_it =
            |each: &Option<_>| each.as_ref().is_some_and(|each: &Translation| each.name == peer);
        let known = lane.known_as.load(Ordering::Relaxed) as usize;
        if table.get(known).is_some_and(is_it) {
            return Some(known);
        }
        let found = table.iter().position(is_it)?;
        lane.known_as.store(found as u32, Ordering::Relaxed);
        Some(found)
    }

    /// The bytes of a medium message; of others none.
    #[allow(unsafe_code)]
    pub fn bytes(&self) -> &[u8] {
        match self.call.head().kind {
            // SAFETY: the scratch holds a medium message's bytes, and nothing else is put there before this handler returns.
            Kind::Medium => unsafe {
                std::slice::from_raw_parts(self.call.place(), self.call.head().len)
            },
            _ => &[],
        }
    }

    /// Where a bulk message's bytes are in the segment: offset and length.
    pub fn stored(&self) -> Option<(u64, usize)> {
        let head = self.call.head();
        matches!(head.kind, Kind::Bulk | Kind::Stored).then_some((head.place(), head.len))
    }

    /// Where the message's bytes are, and how many.
    pub fn place(&self) -> (*mut u8, usize) {
        (self.call.place(), self.call.head().len)
    }

    pub fn source(&self) -> Name {
        self.host.lane.peer
    }

    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.host.endpoint
    }

    /// Of a request. A reply is let in as the answer that it is, whatever the endpoint's tag.
    pub fn tag(&self) -> Tag {
        if self.is_reply() { TAG_ALL } else { self.call.head().tag }
    }

    /// From a request's handler, once.
    pub fn reply(&self, handler: u8, arguments: &[u32], payload: Payload) -> Result<(), Error> {
        let message: Message = payload.message(handler, arguments)?;
        if message.head.kind == Kind::Get {
            return Err(Error::BadArgument);
        }
        match self.call.reply(&message) {
            Ok(()) => {
                self.host.state.statistics.borrow_mut().replies.count(&message.head);
                self.host.lane.notify();
                Ok(())
            }
            Err(NoReply::InReply | NoReply::Twice) => Err(Error::InHandler),
            Err(NoReply::Spoiled) => {
                self.host.lane.end(Status::Unreachable);
                Err(Error::NoResource)
            }
        }
    }
}

impl Undeliverable<'_> {
    pub fn status(&self) -> Status {
        self.returned.status
    }

    pub fn is_reply(&self) -> bool {
        self.returned.reply
    }

    pub fn is_short(&self) -> bool {
        self.returned.head.kind == Kind::Short
    }

    /// Whom it was for; `None` when its number meant nobody.
    pub fn peer(&self) -> Option<Name> {
        self.peer
    }

    pub fn handler(&self) -> u8 {
        self.returned.head.handler
    }

    pub fn arguments(&self) -> &[u32] {
        self.returned.head.words()
    }

    pub fn tag(&self) -> Tag {
        self.returned.head.tag
    }

    /// It asked for bytes.
    pub fn is_get(&self) -> bool {
        self.returned.head.kind == Kind::Get
    }

    /// How many bytes it carried, or asked for, and where they were to be stored (`None` for a medium message), or are.
    pub fn bytes(&self) -> (usize, Option<u64>) {
        let head = &self.returned.head;
        let bulk = matches!(head.kind, Kind::Bulk | Kind::Stored | Kind::Get);
        (head.len, bulk.then_some(head.place()))
    }
}
