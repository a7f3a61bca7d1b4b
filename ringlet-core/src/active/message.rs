//! Messages as the program sees them and as a slot carries them.

use super::layout::{BUFFER_BYTES, INLINE_BYTES, SLOT_BYTES};

/// Arguments that a message may have.
pub const ARGUMENTS: usize = 16;

/// What a message must know to be let in.
pub type Tag = u64;

/// No message is let in, and every one.
pub const TAG_NONE: Tag = 0;
pub const TAG_ALL: Tag = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Arguments only.
    Short = 1,
    /// And bytes, which live as long as the handler.
    Medium = 2,
    /// And bytes, which are in the receiver's memory segment before the handler runs.
    Bulk = 3,
    /// As `Bulk`, by a sender that has stored them there itself. The upper byte of the offset tells which segment of the
    /// receiver's that was (`Gate::generation`).
    Stored = 4,
    /// A request for bytes of the receiver's segment, which answers by itself: with a bulk reply for the handler, to the place in the sender's
    /// segment that the last `GET_WORDS` arguments say.
    Get = 5,
}

/// Of a `Get`: where its bytes are to be stored, the lower half first.
pub const GET_WORDS: usize = 2;

/// Why a message came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    BadArguments = 1,
    BadEntry = 2,
    BadTag = 3,
    BadHandler = 4,
    BadOffset = 5,
    BadLength = 6,
    BadEndpoint = 7,
    Congestion = 8,
    Unreachable = 9,
}

impl Status {
    pub fn from_u8(value: u8) -> Option<Status> {
        use Status::*;
        [
            BadArguments,
            BadEntry,
            BadTag,
            BadHandler,
            BadOffset,
            BadLength,
            BadEndpoint,
            Congestion,
            Unreachable,
        ]
        .into_iter()
        .find(|status| *status as u8 == value)
    }
}

/// Up to 16 words.
#[derive(Clone, Copy)]
pub struct Arguments {
    /// Those beyond the count mean nothing.
    words: [u32; ARGUMENTS],
    count: u8,
}

impl Arguments {
    pub const NONE: Arguments = Arguments { words: [0; ARGUMENTS], count: 0 };

    /// `None` when there are too many.
    #[inline(always)]
    pub fn new(words: &[u32]) -> Option<Arguments> {
        if words.len() > ARGUMENTS {
            return None;
        }
        // All at once, so that they are in the same pieces when they are copied on.
        let word = |at: usize| words.get(at).copied().unwrap_or(0);
        Some(Arguments { words: core::array::from_fn(word), count: words.len() as u8 })
    }

    #[inline]
    pub fn words(&self) -> &[u32] {
        &self.words[..self.count as usize]
    }
}

impl PartialEq for Arguments {
    fn eq(&self, other: &Arguments) -> bool {
        self.words() == other.words()
    }
}

impl Eq for Arguments {}

impl core::fmt::Debug for Arguments {
    fn fmt(&self, f: &mut core::fmt::Formatter) -> core::fmt::Result {
        self.words().fmt(f)
    }
}

/// What a message says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    pub kind: Kind,
    pub handler: u8,
    pub arguments: Arguments,
    /// Of a request: what it offers to the receiver's gate.
    pub tag: Tag,
    /// Bytes, and where they belong in the receiver's segment (bulk).
    pub len: usize,
    pub offset: u64,
}

/// A stored message's offset holds the segment's generation in its upper byte.
const GENERATION_SHIFT: u32 = 56;

impl Head {
    /// Of bytes that the sender has stored at `offset` of the receiver's segment of that generation.
    pub fn stored(self, generation: u8) -> Head {
        let offset = self.offset | (generation as u64) << GENERATION_SHIFT;
        Head { kind: Kind::Stored, offset, ..self }
    }

    /// Where a bulk or stored message's bytes are in the receiver's segment.
    #[inline]
    pub fn place(&self) -> u64 {
        match self.kind {
            Kind::Stored => self.offset & ((1 << GENERATION_SHIFT) - 1),
            _ => self.offset,
        }
    }

    /// Of the handler's arguments: not where the bytes of a `Get` are to be stored.
    pub fn words(&self) -> &[u32] {
        let words = self.arguments.words();
        let own = if self.kind == Kind::Get { GET_WORDS } else { 0 };
        &words[..words.len().saturating_sub(own)]
    }

    /// The answer to a `Get`, which the gate has admitted.
    pub fn got(&self) -> Option<Head> {
        let (own, [low, high]) = self.arguments.words().split_last_chunk::<GET_WORDS>()?;
        let (arguments, offset) = (Arguments::new(own)?, u64::from(*low) | u64::from(*high) << 32);
        Some(Head { kind: Kind::Bulk, arguments, offset, ..*self })
    }
}

/// A message to be sent; `bytes` is empty for a short one and for one whose bytes are stored already.
#[derive(Clone, Copy)]
pub struct Message<'a> {
    pub head: Head,
    pub bytes: &'a [u8],
}

/// A message that was not delivered, back at its sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Returned {
    pub status: Status,
    /// It was a reply, not a request.
    pub reply: bool,
    pub head: Head,
}

/// What an endpoint lets in.
#[derive(Clone, Copy)]
pub struct Gate {
    pub tag: Tag,
    /// Bytes of its memory segment.
    pub segment: usize,
    /// Which segment that is: other than 0 if peers may store there by themselves.
    pub generation: u8,
    /// Which handlers are set: a bit each.
    pub handlers: [u64; 4],
}

impl Gate {
    /// A reply has shown by its place that it answers a request of ours, so it needs no tag.
    pub fn admit(&self, head: &Head, reply: bool) -> Result<(), Status> {
        if !reply && (self.tag == TAG_NONE || self.tag != TAG_ALL && self.tag != head.tag) {
            return Err(Status::BadTag);
        }
        let bit = self.handlers[head.handler as usize / 64] >> (head.handler % 64) & 1;
        // Handler 0 is for what comes back; that of a get is the sender's.
        let is_get = head.kind == Kind::Get;
        if bit == 0 && !is_get || head.handler == 0 {
            return Err(Status::BadHandler);
        }
        if is_get && (reply || head.arguments.words().len() < GET_WORDS) {
            return Err(Status::BadArguments);
        }
        if matches!(head.kind, Kind::Bulk | Kind::Stored | Kind::Get) {
            let (offset, stored) = (head.place(), head.kind == Kind::Stored);
            let is_another = stored && head.offset >> GENERATION_SHIFT != self.generation as u64;
            if offset > self.segment as u64 || self.segment == 0 || is_another {
                return Err(Status::BadOffset);
            }
            if head.len as u64 > self.segment as u64 - offset {
                return Err(Status::BadLength);
            }
        }
        Ok(())
    }
}

/// A slot behind its stamp: kind, count, handler, `extra` (one byte each), length (4) | word (8) | offset (8) | arguments |
/// bytes that fit.
pub(super) const HEAD_BYTES: usize = 24;
pub(super) const BODY_BYTES: usize = SLOT_BYTES - 8;
pub(super) const RETURNED: u8 = 0x80;
pub(super) type Body = [u8; BODY_BYTES];

const _: () = assert!(HEAD_BYTES + INLINE_BYTES == BODY_BYTES && INLINE_BYTES >= 4 * ARGUMENTS);

/// `word` is the tag of a request, and of a reply which request it answers. `extra` is the buffer of bytes that do not fit, and of
/// what comes back its status. `body` holds at least the arguments. Returns how much of it is used.
#[inline(always)]
pub(super) fn encode(head: &Head, returned: bool, word: u64, extra: u8, body: &mut [u8]) -> usize {
    let count = head.arguments.count as usize;
    let flag = if returned { RETURNED } else { 0 };
    let first =
        u64::from_le_bytes([head.kind as u8 | flag, count as u8, head.handler, extra, 0, 0, 0, 0])
            | (head.len as u64) << 32;
    body[0..8].copy_from_slice(&first.to_le_bytes());
    body[8..16].copy_from_slice(&word.to_le_bytes());
    body[16..24].copy_from_slice(&head.offset.to_le_bytes());
    let (words, _) = body[HEAD_BYTES..].as_chunks_mut::<4>();
    // All of them: those beyond the count are overwritten, or not read.
    for (to, word) in words.iter_mut().zip(&head.arguments.words) {
        *to = word.to_le_bytes();
    }
    HEAD_BYTES + 4 * count
}

/// A body as it was found.
pub(super) struct Decoded {
    pub head: Head,
    pub returned: bool,
    pub word: u64,
    pub extra: u8,
}

/// Of a body, or so much of it as is used. `None` for what no sane peer writes.
#[inline(always)]
pub(super) fn decode(body: &[u8]) -> Option<Decoded> {
    let word_at = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&body[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let [kind, count, handler, extra, ..] = word_at(0).to_le_bytes();
    let kind_value = kind & !RETURNED;
    let kind_known = match kind_value {
        1 => Kind::Short,
        2 => Kind::Medium,
        3 => Kind::Bulk,
        4 => Kind::Stored,
        5 => Kind::Get,
        _ => return None,
    };
    let len = (word_at(0) >> 32) as usize;
    if count as usize > ARGUMENTS || kind_known != Kind::Stored && len > BUFFER_BYTES {
        return None;
    }
    let (found, _) = body[HEAD_BYTES..].as_chunks::<4>();
    let mut words = [0; ARGUMENTS];
    for (to, word) in words.iter_mut().zip(found) {
        *to = u32::from_le_bytes(*word);
    }
    let head = Head {
        kind: kind_known,
        handler,
        arguments: Arguments { words, count },
        tag: word_at(8),
        len,
        offset: word_at(16),
    };
    Some(Decoded { head, returned: kind & RETURNED != 0, word: word_at(8), extra })
}

/// Do the bytes of this message fit behind its arguments?
#[inline]
pub(super) fn fits_inline(head: &Head) -> bool {
    head.len + 4 * head.arguments.count as usize <= INLINE_BYTES
}
