//! What a message carries, and why a call was refused.

use crate::native;
use ringlet_core::active::layout::BUFFER_BYTES;
use ringlet_core::active::message::TAG_ALL;
use ringlet_core::active::{Arguments, Head, Kind, Message};

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
    /// What is offered, or looked for, beyond the network namespace, or the node service.
    Node(native::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Error::Node(error) => return error.fmt(f),
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
    /// None, but a wish: so many bytes of the receiver's segment, from this offset, are to come to that one of the sender's. Its answer is a bulk
    /// reply with these arguments for this handler. Two arguments fewer; in requests only.
    Get {
        from: u64,
        to: u64,
        len: usize,
    },
}

impl<'a> Payload<'a> {
    #[inline(always)]
    pub(super) fn message(self, handler: u8, arguments: &[u32]) -> Result<Message<'a>, Error> {
        let (kind, bytes, offset) = match self {
            Payload::None => (Kind::Short, &[][..], 0),
            Payload::Medium(bytes) => (Kind::Medium, bytes, 0),
            Payload::Bulk { offset, bytes } => (Kind::Bulk, bytes, offset),
            Payload::Get { from, to, len } => return get(from, to, len, handler, arguments),
        };
        let arguments = Arguments::new(arguments).ok_or(Error::BadArgument)?;
        if bytes.len() > BUFFER_BYTES {
            return Err(Error::BadArgument);
        }
        let (tag, len) = (TAG_ALL, bytes.len());
        let head = Head { kind, handler, arguments, tag, len, offset };
        Ok(Message { head, bytes })
    }
}

#[cold]
fn get<'a>(
    from: u64,
    to: u64,
    len: usize,
    handler: u8,
    arguments: &[u32],
) -> Result<Message<'a>, Error> {
    let words = [arguments, &[to as u32, (to >> 32) as u32]].concat();
    let arguments = Arguments::new(&words).filter(|_| len <= BUFFER_BYTES);
    let arguments = arguments.ok_or(Error::BadArgument)?;
    let head = Head { kind: Kind::Get, handler, arguments, tag: TAG_ALL, len, offset: from };
    Ok(Message { head, bytes: &[] })
}
