//! Active Messages 2.0: a message names a handler, which runs where the message arrives.
//!
//! A [`Process`] has [`Bundle`]s of [`Endpoint`]s. An endpoint sends requests to the peers in its translation table; a request's
//! handler may reply once, a reply's handler may not send. Handlers run inside `poll`, and inside `request`, which polls. What
//! can't be delivered comes back to the error handler.
//!
//! Messages go through a segment for each pair of endpoints that talk ([`ringlet_core::active`]), made at the first message and
//! found by the peer's [`Name`]. A thread of each process does that, and notices the end of its peers; it sleeps otherwise.

mod bundle;
mod endpoint;
pub mod job;
mod lane;
mod name;
mod process;
mod service;

use endpoint::Handled;
use ringlet_core::active::{Call, Kind, Message, NoReply, Returned, SegmentMemory};
use std::sync::Arc;

pub use endpoint::{Endpoint, ErrorHandler, HANDLERS, Handler, TRANSLATIONS};
pub use name::{NAME_BYTES, Name};
pub use process::{Bundle, Process};
pub use ringlet_core::active::layout::{BUFFER_BYTES, BUNDLES};
pub use ringlet_core::active::message::{TAG_ALL, TAG_NONE};
pub use ringlet_core::active::{ARGUMENTS, Status, Tag};

/// Why a call was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    BadArgument,
    /// Memory, descriptors, bundles or entries of a table.
    NoResource,
    /// It would have waited.
    NotSent,
    InUse,
    /// A handler may only reply (once, to a request) and ask.
    InHandler,
    Freed,
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Error::BadArgument => "bad argument",
            Error::NoResource => "out of resources",
            Error::NotSent => "would have to wait",
            Error::InUse => "in use",
            Error::InHandler => "not allowed in a handler",
            Error::Freed => "freed",
        })
    }
}

impl std::error::Error for Error {}

/// What a message carries beside its arguments: at most `BUFFER_BYTES`.
#[derive(Clone, Copy)]
pub enum Payload<'a> {
    None,
    /// Bytes that live as long as the receiver's handler.
    Medium(&'a [u8]),
    /// Bytes for the receiver's segment.
    Bulk {
        offset: u64,
        bytes: &'a [u8],
    },
}

/// A message in its handler.
pub struct Incoming<'a> {
    call: &'a Call<'a, SegmentMemory>,
    host: &'a Handled<'a>,
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
        match self.call.reply(&message) {
            Ok(()) => {
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

/// A message that came back.
pub struct Undeliverable<'a> {
    returned: &'a Returned,
    peer: Option<Name>,
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
        self.returned.head.arguments.words()
    }

    pub fn tag(&self) -> Tag {
        self.returned.head.tag
    }

    /// How many bytes it carried, and where they were to be stored (`None` for a medium message).
    pub fn bytes(&self) -> (usize, Option<u64>) {
        let head = &self.returned.head;
        let bulk = matches!(head.kind, Kind::Bulk | Kind::Stored);
        (head.len, bulk.then_some(head.place()))
    }
}
