//! Messages as datagrams: cut into pieces that a path takes whole, and put together from whatever comes, in bounded memory.
//!
//! ```text
//!  0  kind      u8       what it is (`udp` has more kinds)
//!  1  version   u8
//!  2  bytes     u16      behind this head
//!  4  number    u32      of the message, one after the other
//!  8  cookie    u64      both ends' (`udp`)
//! 16  all       u32      bytes of the message
//! 20  each      u16      bytes of each of its pieces but the last
//! 22  nth       u16      which piece it is
//! ```
//!
//! All little endian.

use crate::frame::{HEAD_BYTES, MESSAGE_MOST};

pub const HEADER: usize = 24;
pub const VERSION: u8 = 3;
pub const PIECE: u8 = 1;
/// Any path takes so much: IPv4's least is 576 bytes. KERNEL: whoever may send us an ICMP can have it take a path for one of 552 (`min_pmtu`).
pub const LEAST: usize = 552 - 20 - 8 - HEADER;
/// Messages that are put together at a time: a piece may come so many messages late.
const WINDOW: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece<'a> {
    pub kind: u8,
    pub number: u32,
    pub cookie: u64,
    pub all: usize,
    pub each: usize,
    pub nth: usize,
    pub bytes: &'a [u8],
}

impl<'a> Piece<'a> {
    /// What is not cut.
    pub fn whole(kind: u8, cookie: u64, bytes: &'a [u8]) -> Piece<'a> {
        Piece { kind, number: 0, cookie, all: 0, each: 0, nth: 0, bytes }
    }

    pub fn write(&self, to: &mut Vec<u8>) {
        to.extend([self.kind, VERSION]);
        to.extend((self.bytes.len() as u16).to_le_bytes());
        to.extend(self.number.to_le_bytes());
        to.extend(self.cookie.to_le_bytes());
        to.extend((self.all as u32).to_le_bytes());
        to.extend((self.each as u16).to_le_bytes());
        to.extend((self.nth as u16).to_le_bytes());
        to.extend(self.bytes);
    }

    /// A datagram. `None` for what is none of ours.
    pub fn read(datagram: &'a [u8]) -> Option<Piece<'a>> {
        let (head, bytes) = datagram.split_first_chunk::<HEADER>()?;
        let half = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
        let word = |at: usize| half(at) as u32 | (half(at + 2) as u32) << 16;
        (head[1] == VERSION && bytes.len() == half(2)).then(|| Piece {
            kind: head[0],
            number: word(4),
            cookie: u64::from(word(8)) | u64::from(word(12)) << 32,
            all: word(16) as usize,
            each: half(20),
            nth: half(22),
            bytes,
        })
    }

    /// Is it one of a message's?
    fn is_sound(&self) -> bool {
        let at = self.nth * self.each;
        self.kind == PIECE
            && (HEAD_BYTES..=MESSAGE_MOST).contains(&self.all)
            && self.each >= LEAST
            && at < self.all
            && self.bytes.len() == self.each.min(self.all - at)
    }
}

/// Adds a message's datagrams to what is to be sent: all but the last are of the same length.
pub fn cut(message: &[u8], number: u32, cookie: u64, each: usize, to: &mut Vec<u8>) {
    for (nth, bytes) in message.chunks(each).enumerate() {
        Piece { kind: PIECE, number, cookie, all: message.len(), each, nth, bytes }.write(to);
    }
}

/// One message of the last ones.
#[derive(Default)]
struct Slot {
    number: Option<u32>,
    all: usize,
    each: usize,
    missing: usize,
    has: Vec<bool>,
    bytes: Vec<u8>,
}

#[derive(Default)]
pub struct Joiner {
    slots: [Slot; WINDOW],
    /// Messages of which pieces did not come in time.
    pub lost: u64,
}

impl Joiner {
    /// The sender's numbers are others from now on.
    pub fn begin_anew(&mut self) {
        self.slots = Default::default();
    }

    /// The message whose last missing piece this is. Each comes once.
    pub fn take<'a>(&'a mut self, piece: &Piece<'a>) -> Option<&'a [u8]> {
        if !piece.is_sound() {
            return None;
        }
        let slot = &mut self.slots[piece.number as usize % WINDOW];
        match slot.number {
            Some(number) if number == piece.number => {}
            // (A newer one has its place.)
            Some(number) if (piece.number.wrapping_sub(number) as i32) < 0 => return None,
            _ => {
                self.lost += u64::from(slot.missing > 0);
                slot.begin(piece);
            }
        }
        slot.take(piece)
    }
}

impl Slot {
    fn begin(&mut self, piece: &Piece) {
        (self.number, self.all, self.each) = (Some(piece.number), piece.all, piece.each);
        self.missing = piece.all.div_ceil(piece.each);
        self.has.clear();
        self.has.resize(self.missing, false);
        self.bytes.resize(MESSAGE_MOST, 0);
    }

    fn take<'a>(&'a mut self, piece: &Piece<'a>) -> Option<&'a [u8]> {
        let has = self.has.get_mut(piece.nth).filter(|has| !**has)?;
        if (piece.all, piece.each) != (self.all, self.each) {
            return None;
        }
        *has = true;
        self.missing -= 1;
        if self.has.len() == 1 {
            return Some(piece.bytes);
        }
        let at = piece.nth * self.each;
        self.bytes[at..at + piece.bytes.len()].copy_from_slice(piece.bytes);
        (self.missing == 0).then(|| &self.bytes[..self.all])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn datagrams(buffer: &[u8]) -> Vec<Vec<u8>> {
        let (mut left, mut all) = (buffer, Vec::new());
        while !left.is_empty() {
            let bytes = usize::from(u16::from_le_bytes([left[2], left[3]]));
            let (one, rest) = left.split_at(HEADER + bytes);
            all.push(one.to_vec());
            left = rest;
        }
        all
    }

    fn message(number: u32, len: usize) -> Vec<u8> {
        (0..len).map(|at| (number as usize * 7 + at * 31 + at / 251) as u8).collect()
    }

    fn take(joiner: &mut Joiner, datagram: &[u8]) -> Option<Vec<u8>> {
        let piece = Piece::read(datagram)?;
        joiner.take(&piece).map(<[u8]>::to_vec)
    }

    proptest! {
        /// As long as none is more than a window late, all come, each once, whatever was mixed up or doubled; what lacks a piece does not.
        #[test]
        fn messages_come_whole_and_once(
            lens in prop::collection::vec(HEAD_BYTES..MESSAGE_MOST + 1, 1..20),
            each in LEAST..9000usize,
            first in any::<u32>(),
            seed in any::<u64>(),
        ) {
            let mut joiner = Joiner::default();
            let mut random = seed | 1;
            let mut chance = |of: usize| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 33) as usize % of
            };
            let numbered = lens.iter().enumerate();
            let messages: Vec<(u32, Vec<u8>)> = numbered
                .map(|(at, len)| (first.wrapping_add(at as u32), message(at as u32, *len)))
                .collect();
            let (mut came, mut torn) = (Vec::new(), Vec::new());
            for group in messages.chunks(WINDOW) {
                let mut all = Vec::new();
                for (number, bytes) in group {
                    let mut buffer = Vec::new();
                    cut(bytes, *number, 5, each, &mut buffer);
                    let mut pieces = datagrams(&buffer);
                    assert!(pieces.iter().all(|piece| piece.len() <= HEADER + each));
                    if chance(4) == 0 {
                        pieces.remove(chance(pieces.len()));
                        torn.push(bytes.clone());
                    }
                    let doubled: Vec<_> = pieces.iter().filter(|_| chance(8) == 0).cloned().collect();
                    all.extend(pieces.into_iter().chain(doubled));
                }
                (1..all.len()).for_each(|at| all.swap(at, chance(at + 1)));
                came.extend(all.iter().filter_map(|datagram| take(&mut joiner, datagram)));
            }
            for (_, bytes) in &messages {
                let count = came.iter().filter(|one| *one == bytes).count();
                let sent = messages.iter().filter(|(_, other)| other == bytes).count();
                let lost = torn.iter().filter(|other| *other == bytes).count();
                assert_eq!(count, sent - lost);
            }
            assert_eq!(came.len(), messages.len() - torn.len());
        }

        /// Whatever comes, nothing is written beyond a message, nor said to be one that is not as long as a message may be.
        #[test]
        fn strangers_do_no_harm(
            heads in prop::collection::vec((0..3u8, 0..20u32, 0..MESSAGE_MOST * 2, 0..70_000usize, 0..200usize, 0..3000usize), 0..200),
        ) {
            let mut joiner = Joiner::default();
            for (kind, number, all, each, nth, len) in heads {
                let bytes = vec![7; len];
                let mut buffer = Vec::new();
                Piece { kind, number, cookie: 0, all, each, nth, bytes: &bytes }.write(&mut buffer);
                let piece = Piece::read(&buffer).unwrap();
                if let Some(message) = joiner.take(&piece) {
                    assert!((HEAD_BYTES..=MESSAGE_MOST).contains(&message.len()) && message.len() == all);
                }
                for end in (0..buffer.len().min(HEADER)).chain([buffer.len() - 1]) {
                    assert_eq!(Piece::read(&buffer[..end]), None);
                }
            }
            assert!(joiner.slots.iter().all(|slot| slot.bytes.len() <= MESSAGE_MOST && slot.has.len() <= MESSAGE_MOST.div_ceil(LEAST)));
        }
    }

    #[test]
    fn what_comes_late_is_lost_and_counted() {
        let mut joiner = Joiner::default();
        let pieces = |number: u32| {
            let mut buffer = Vec::new();
            cut(&message(number, 1000), number, 0, LEAST, &mut buffer);
            datagrams(&buffer)
        };
        let late = pieces(u32::MAX);
        assert_eq!(take(&mut joiner, &late[0]), None);
        for number in 0..WINDOW as u32 {
            pieces(number).iter().for_each(|piece| _ = take(&mut joiner, piece));
        }
        assert_eq!((take(&mut joiner, &late[1]), joiner.lost), (None, 1));
        // (A number that is a window away from one that has come.)
        assert_eq!(take(&mut joiner, &pieces(0)[0]), None);
    }
}
