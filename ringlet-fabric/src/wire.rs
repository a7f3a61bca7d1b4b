//! What stands in messages, notices and tokens.
//!
//! A message is a header and then frames, each behind its length; a frame that needs writes says how many were given before it.

use crate::rail::MESSAGE_BYTES;

/// The most that a frame has.
pub const FRAME_BYTES: usize = 1024;
/// Messages that are not acknowledged, on either side.
pub const WINDOW: usize = 128;
/// Writes that are not acknowledged.
pub const WRITES: usize = 4096;
/// Transports of one node: their numbers stand in notices.
pub const NUMBERS: usize = 1 << NUMBER_BITS;

const NUMBER_BITS: u32 = 10;
const EPOCH_BITS: u32 = 6;
const WRITE_BITS: u32 = 16;

pub const HEADER_BYTES: usize = 20;
const LENGTH_BYTES: usize = 2;
const NEEDS_BYTES: usize = 4;
/// In a frame's length: it needs writes.
const NEEDS: u16 = 1 << 15;

/// Numbers of messages and of writes begin shortly before they come round, so that every connection shows that they may.
pub const FIRST: u32 = u32::MAX - 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Frames,
    /// An acknowledgement alone.
    Acknowledgement,
    /// Is there to arrive.
    Probe,
}

/// What each message begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Whose it is at the receiver's, by the number and the key that the receiver has given.
    pub number: u16,
    pub key: u32,
    /// `None`: nothing that we know.
    pub kind: Option<Kind>,
    /// How often the way that it goes was begun.
    pub epoch: u16,
    /// Of the message, among those with frames.
    pub sequence: u32,
    /// The first message that was not delivered.
    pub acknowledged: u32,
    /// The first write that has not arrived.
    pub arrived: u32,
}

impl Header {
    pub fn write(&self, to: &mut [u8]) {
        let kind = match self.kind {
            Some(Kind::Frames) => 1,
            Some(Kind::Acknowledgement) => 2,
            Some(Kind::Probe) => 3,
            None => 0u16,
        };
        to[..2].copy_from_slice(&(self.number | kind << NUMBER_BITS).to_le_bytes());
        to[2..4].copy_from_slice(&self.epoch.to_le_bytes());
        to[4..8].copy_from_slice(&self.key.to_le_bytes());
        to[8..12].copy_from_slice(&self.sequence.to_le_bytes());
        to[12..16].copy_from_slice(&self.acknowledged.to_le_bytes());
        to[16..HEADER_BYTES].copy_from_slice(&self.arrived.to_le_bytes());
    }

    /// `None`: too short to have one.
    pub fn read(message: &[u8]) -> Option<Header> {
        let bytes: &[u8; HEADER_BYTES] = message.first_chunk()?;
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| half(at) as u32 | (half(at + 2) as u32) << 16;
        Some(Header {
            number: half(0) & (NUMBERS as u16 - 1),
            kind: match half(0) >> NUMBER_BITS {
                1 => Some(Kind::Frames),
                2 => Some(Kind::Acknowledgement),
                3 => Some(Kind::Probe),
                _ => None,
            },
            epoch: half(2),
            key: word(4),
            sequence: word(8),
            acknowledged: word(12),
            arrived: word(16),
        })
    }
}

/// Bytes that a frame takes in a message.
pub fn frame_room(bytes: usize, needs: bool) -> usize {
    LENGTH_BYTES + if needs { NEEDS_BYTES } else { 0 } + bytes
}

/// `needs`: writes up to this one.
pub fn push_frame(message: &mut Vec<u8>, frame: &[u8], needs: Option<u32>) {
    debug_assert!(frame.len() <= FRAME_BYTES && message.len() < MESSAGE_BYTES);
    let flag = if needs.is_some() { NEEDS } else { 0 };
    message.extend_from_slice(&(frame.len() as u16 | flag).to_le_bytes());
    if let Some(needs) = needs {
        message.extend_from_slice(&needs.to_le_bytes());
    }
    message.extend_from_slice(frame);
}

/// A frame as it stands in a message.
#[derive(PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    pub needs: Option<u32>,
    pub bytes: &'a [u8],
    /// What it takes in the message.
    pub room: usize,
}

/// The frame with which `frames`, which is not empty, begins. `None`: none that we would send.
pub fn first_frame(frames: &[u8]) -> Option<Frame<'_>> {
    let (length, rest) = frames.split_first_chunk::<LENGTH_BYTES>()?;
    let length = u16::from_le_bytes(*length);
    let (needs, rest) = if length & NEEDS != 0 {
        let (needs, rest) = rest.split_first_chunk::<NEEDS_BYTES>()?;
        (Some(u32::from_le_bytes(*needs)), rest)
    } else {
        (None, rest)
    };
    let n = usize::from(length & !NEEDS);
    let bytes = rest.get(..n).filter(|_| n <= FRAME_BYTES)?;
    Some(Frame { needs, bytes, room: frame_room(n, needs.is_some()) })
}

/// What a write leaves at its target: whose it is, the end of its way's epoch, and of its own number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    pub number: u16,
    pub epoch: u8,
    pub write: u16,
}

impl Notice {
    pub fn new(number: u16, epoch: u16, write: u32) -> Notice {
        Notice { number, epoch: Notice::epoch_of(epoch), write: write as u16 }
    }

    pub fn epoch_of(epoch: u16) -> u8 {
        (epoch & ((1 << EPOCH_BITS) - 1)) as u8
    }

    pub fn pack(self) -> u32 {
        u32::from(self.number) << (EPOCH_BITS + WRITE_BITS)
            | u32::from(self.epoch) << WRITE_BITS
            | u32::from(self.write)
    }

    pub fn unpack(notice: u32) -> Notice {
        Notice {
            number: (notice >> (EPOCH_BITS + WRITE_BITS)) as u16,
            epoch: Notice::epoch_of((notice >> WRITE_BITS) as u16),
            write: notice as u16,
        }
    }
}

/// By what a rail names to us what has failed: all that counts is which way it went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token {
    pub number: u16,
    pub epoch: u16,
}

impl Token {
    pub fn pack(self) -> u64 {
        u64::from(self.number) << 16 | u64::from(self.epoch)
    }

    pub fn unpack(token: u64) -> Token {
        Token { number: (token >> 16) as u16, epoch: token as u16 }
    }
}

/// How far `number` is from `base` on, of numbers that come round; `None`: it is behind it.
pub fn ahead(number: u32, base: u32) -> Option<usize> {
    let distance = number.wrapping_sub(base);
    (distance < 1 << 31).then_some(distance as usize)
}
