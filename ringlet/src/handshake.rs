//! The frame of every message by which two processes introduce themselves: sockets, datagrams, the native library, Active Messages, adapters, the node service.
//!
//! ```text
//!  0  magic     8 bytes    no other program's
//!  8  version   u32        of these messages and of the shared memory that they lead to
//! 12  protocol  u16        whose message it is
//! 14  kind      u16        which of its messages; 0 says only that the sender is of this version
//! 16  fields               as many as that kind has, no more and no less
//! ```
//!
//! All little endian, one frame for each packet of a Unix socket. Magic and version stand first, and for good, so that two builds that share nothing else
//! still find out that they do not fit: then their connection stays on the kernel (`other-version`). Whatever is none of ours, or has a field too few
//! or too many, is a stranger's.

use crate::reasons::Reason;
use ringlet_core::layout::VERSION;

const MAGIC: u64 = u64::from_le_bytes(*b"rnglmeet");
const HEAD_BYTES: usize = 16;
/// No frame is longer.
pub const FRAME_MAX_BYTES: usize = 128;
/// Room for a frame, and for one byte more than any has.
pub const ROOM_BYTES: usize = FRAME_MAX_BYTES + 1;

/// Whose messages they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Protocol {
    Connection = 1,
    Datagrams = 2,
    Native = 3,
    ActiveMessages = 4,
    Adapter = 5,
    Node = 6,
}

/// A message that can't be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Misfit {
    /// From a ringlet whose messages or memory differ from ours.
    OtherVersion,
    /// No message of ours.
    Nonsense,
}

impl From<Misfit> for Reason {
    fn from(misfit: Misfit) -> Reason {
        match misfit {
            Misfit::OtherVersion => Reason::OtherVersion,
            Misfit::Nonsense => Reason::BadPeer,
        }
    }
}

/// A frame to be sent.
pub struct Frame {
    bytes: [u8; FRAME_MAX_BYTES],
    len: usize,
}

impl Frame {
    pub fn new(protocol: Protocol, kind: u16) -> Frame {
        Frame { bytes: [0; _], len: 0 }
            .put(&MAGIC.to_le_bytes())
            .u32(VERSION)
            .put(&(protocol as u16).to_le_bytes())
            .put(&kind.to_le_bytes())
    }

    /// All that can be said to a peer of another version: which one is ours.
    pub fn version_only(protocol: Protocol) -> Frame {
        Frame::new(protocol, 0)
    }

    /// Adds a field of plain bytes. (The messages of this crate are shorter than a frame, all of them: a longer one is a mistake here.)
    pub fn put(mut self, field: &[u8]) -> Frame {
        self.bytes[self.len..self.len + field.len()].copy_from_slice(field);
        self.len += field.len();
        self
    }

    pub fn u32(self, field: u32) -> Frame {
        self.put(&field.to_le_bytes())
    }

    pub fn u64(self, field: u64) -> Frame {
        self.put(&field.to_le_bytes())
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The fields of a frame that came, each taken in its turn.
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// What a packet says, if it is a frame of this protocol and version: `parse` is given its kind and takes all of its fields.
pub fn read<T>(
    packet: &[u8],
    protocol: Protocol,
    parse: impl FnOnce(u16, &mut Fields) -> Option<T>,
) -> Result<T, Misfit> {
    let mut head = Fields(packet);
    let (Some(magic), Some(version)) = (head.u64(), head.u32()) else {
        return Err(Misfit::Nonsense);
    };
    match (magic, version) {
        (MAGIC, VERSION) => {}
        (MAGIC, _) => return Err(Misfit::OtherVersion),
        _ => return Err(Misfit::Nonsense),
    }
    let whose = head.array().map(u16::from_le_bytes);
    let kind = head.array().map(u16::from_le_bytes).filter(|kind| *kind != 0);
    let (true, Some(kind)) = (whose == Some(protocol as u16), kind) else {
        return Err(Misfit::Nonsense);
    };
    let message = parse(kind, &mut head).ok_or(Misfit::Nonsense)?;
    if head.0.is_empty() { Ok(message) } else { Err(Misfit::Nonsense) }
}

const _: () = assert!(HEAD_BYTES < FRAME_MAX_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(kind: u16, fields: &mut Fields) -> Option<(u16, u32, u64)> {
        Some((kind, fields.u32()?, fields.u64()?))
    }

    fn frame() -> Frame {
        Frame::new(Protocol::Native, 7).u32(8).u64(9)
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(read(frame().as_bytes(), Protocol::Native, pair), Ok((7, 8, 9)));
    }

    #[test]
    fn every_cut_and_every_byte_more_is_nonsense() {
        let frame = frame();
        let whole = frame.as_bytes();
        for len in 0..whole.len() {
            assert_eq!(read(&whole[..len], Protocol::Native, pair), Err(Misfit::Nonsense), "{len}");
        }
        let longer = [whole, &[0]].concat();
        assert_eq!(read(&longer, Protocol::Native, pair), Err(Misfit::Nonsense));
    }

    #[test]
    fn each_byte_of_the_head_counts() {
        for at in 0..HEAD_BYTES {
            let mut bytes = frame().as_bytes().to_vec();
            bytes[at] ^= 0x40;
            let got = read(&bytes, Protocol::Native, pair);
            match at {
                8..12 => assert_eq!(got, Err(Misfit::OtherVersion)),
                14..16 => assert_ne!(got, Ok((7, 8, 9))),
                _ => assert_eq!(got, Err(Misfit::Nonsense)),
            }
        }
    }

    #[test]
    fn a_frame_of_another_protocol_is_not_taken() {
        for other in [Protocol::Connection, Protocol::Datagrams, Protocol::ActiveMessages] {
            assert_eq!(read(frame().as_bytes(), other, pair), Err(Misfit::Nonsense));
        }
    }

    #[test]
    fn a_version_alone_is_understood_by_every_version_and_is_no_message() {
        let frame = Frame::version_only(Protocol::Connection);
        let any = |_, _: &mut Fields| Some(());
        assert_eq!(read(frame.as_bytes(), Protocol::Connection, any), Err(Misfit::Nonsense));
        let mut other = frame.as_bytes().to_vec();
        other[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
        assert_eq!(read(&other, Protocol::Connection, any), Err(Misfit::OtherVersion));
    }
}
