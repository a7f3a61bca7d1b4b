//! What goes over the wire behind the handshake: requests, and the heads of answers, simple ones or chunks.
//!
//! Compact ones, or extended ones (the protocol's branch extension-ext-header), whose lengths have 64 bits.

use ringlet_disk::Extent;

/// Of a request's bytes, as NBD has it; what is more than a slot's is asked for in pieces.
pub const REQUEST_MOST: u32 = 32 << 20;

const REQUEST: u32 = 0x2560_9513;
const REQUEST_BYTES: usize = 28;
const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
const EXTENDED_REQUEST_BYTES: usize = 32;

const SIMPLE: u32 = 0x6744_6698;
const STRUCTURED: u32 = 0x668e_33ef;
const EXTENDED: u32 = 0x6e8a_278c;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const ZERO: u16 = 6;
pub const STATUS: u16 = 7;

/// What is asked: it is durable; zeros are no holes; one piece of what is read; one extent; zeros only if that is fast; bytes follow.
pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 1 << 1;
pub const WHOLE: u16 = 1 << 2;
pub const ONE: u16 = 1 << 3;
pub const FAST_ZERO: u16 = 1 << 4;
pub const PAYLOAD: u16 = 1 << 5;

/// The last chunk of an answer.
const DONE: u16 = 1;

const NONE: u16 = 0;
const DATA: u16 = 1;
const HOLE: u16 = 2;
const EXTENTS: u16 = 5;
const EXTENDED_EXTENTS: u16 = 6;
const ERROR: u16 = 1 << 15 | 1;
const ERROR_AT: u16 = 1 << 15 | 2;

/// Of base:allocation, the only context that there is.
pub const ALLOCATION: u32 = 1;
const HOLE_OF_ZEROS: u32 = 1 | 1 << 1;

/// Why something failed, in words.
const WHY_MOST: usize = 4096;

/// What the handshake has agreed on.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Agreed {
    /// Answers with bytes are chunks.
    pub structured: bool,
    /// All answers are, and they and requests are the extended ones.
    pub extended: bool,
    /// What is allocated can be asked for.
    pub allocation: bool,
}

impl Agreed {
    pub fn has_chunks(self) -> bool {
        self.structured || self.extended
    }

    pub fn request_bytes(self) -> usize {
        if self.extended { EXTENDED_REQUEST_BYTES } else { REQUEST_BYTES }
    }
}

/// As it came.
#[derive(PartialEq, Eq, Debug)]
pub struct Request {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u64,
    /// So many bytes follow.
    pub payload: u64,
}

impl Request {
    /// `None` if it is none, or not whole.
    pub fn read(bytes: &[u8], agreed: Agreed) -> Option<Request> {
        let bytes = bytes.get(..agreed.request_bytes())?;
        let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let (head, is_extended) = (word(0), agreed.extended);
        let (magic, length) = match is_extended {
            true => (EXTENDED_REQUEST, word(24)),
            false => (REQUEST, word(20) & 0xffff_ffff),
        };
        let (flags, kind) = ((head >> 16) as u16, head as u16);
        let has_payload = if is_extended { flags & PAYLOAD != 0 } else { kind == WRITE };
        let payload = if has_payload { length } else { 0 };
        let request = Request { flags, kind, cookie: word(8), offset: word(16), length, payload };
        (head >> 32 == u64::from(magic)).then_some(request)
    }
}

const HEAD_MOST: usize = 32 + 12;

/// Whose answer it is: as its request had it.
#[derive(Clone, Copy)]
pub struct To {
    pub cookie: u64,
    pub offset: u64,
}

/// The first bytes of an answer.
pub struct Head {
    bytes: [u8; HEAD_MOST],
    length: usize,
}

impl Head {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn new(words: &[&[u8]]) -> Head {
        let mut head = Head { bytes: [0; HEAD_MOST], length: 0 };
        for word in words {
            head.bytes[head.length..head.length + word.len()].copy_from_slice(word);
            head.length += word.len();
        }
        head
    }

    /// Without chunks, an answer's; what was read follows.
    pub fn simple(to: To, done: Result<(), i32>) -> Head {
        let error = done.err().map_or(0, number);
        Head::new(&[&SIMPLE.to_be_bytes(), &error.to_be_bytes(), &to.cookie.to_be_bytes()])
    }

    /// Of a request that is done, and has no bytes.
    pub fn done(agreed: Agreed, to: To) -> Head {
        if agreed.extended { Head::empty(agreed, to) } else { Head::simple(to, Ok(())) }
    }

    /// Of one whose answer has to be a chunk all the same.
    pub fn empty(agreed: Agreed, to: To) -> Head {
        Head::chunk(agreed, to, true, NONE, 0, &[])
    }

    /// Of `bytes` that were read at `at`, and follow.
    pub fn data(agreed: Agreed, to: To, is_last: bool, at: u64, bytes: usize) -> Head {
        Head::chunk(agreed, to, is_last, DATA, 8 + bytes, &[&at.to_be_bytes()])
    }

    /// Of `bytes` at `at` that are zeros.
    pub fn hole(agreed: Agreed, to: To, is_last: bool, at: u64, bytes: usize) -> Head {
        let length = (bytes as u32).to_be_bytes();
        Head::chunk(agreed, to, is_last, HOLE, 12, &[&at.to_be_bytes(), &length])
    }

    fn chunk(
        agreed: Agreed,
        to: To,
        is_last: bool,
        kind: u16,
        length: usize,
        words: &[&[u8]],
    ) -> Head {
        let flags = if is_last { DONE } else { 0 };
        let magic = if agreed.extended { EXTENDED } else { STRUCTURED };
        let begins = [&magic.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()];
        let mut head = Head::new(&begins);
        head.add(&to.cookie.to_be_bytes());
        if agreed.extended {
            head.add(&to.offset.to_be_bytes());
            head.add(&(length as u64).to_be_bytes());
        } else {
            head.add(&(length as u32).to_be_bytes());
        }
        words.iter().for_each(|word| head.add(word));
        head
    }

    fn add(&mut self, word: &[u8]) {
        self.bytes[self.length..self.length + word.len()].copy_from_slice(word);
        self.length += word.len();
    }
}

/// (NBD has these numbers, and no others.)
fn number(errno: i32) -> i32 {
    match errno {
        libc::EPERM | libc::EROFS | libc::EACCES => libc::EPERM,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => libc::ENOSPC,
        libc::ENOMEM | libc::EINVAL | libc::EOVERFLOW | libc::EOPNOTSUPP => errno,
        _ => libc::EIO,
    }
}

/// The chunk of what failed, with why; if it is a part of what was asked for: where.
pub fn failed(
    agreed: Agreed,
    to: To,
    is_last: bool,
    errno: i32,
    at: Option<u64>,
    why: &str,
) -> (Head, Vec<u8>) {
    let mut most = why.len().min(WHY_MOST);
    while !why.is_char_boundary(most) {
        most -= 1;
    }
    let why = &why[..most];
    let mut body = number(errno).to_be_bytes().to_vec();
    body.extend((why.len() as u16).to_be_bytes());
    body.extend(why.as_bytes());
    body.extend(at.iter().flat_map(|at| at.to_be_bytes()));
    let kind = if at.is_some() { ERROR_AT } else { ERROR };
    (Head::chunk(agreed, to, is_last, kind, body.len(), &[]), body)
}

/// The chunk of what is allocated from the request's offset on.
pub fn extents(agreed: Agreed, to: To, extents: &[Extent]) -> (Head, Vec<u8>) {
    let mut body = ALLOCATION.to_be_bytes().to_vec();
    if agreed.extended {
        body.extend((extents.len() as u32).to_be_bytes());
    }
    for extent in extents {
        let status = if extent.is_hole { HOLE_OF_ZEROS } else { 0 };
        if agreed.extended {
            body.extend([extent.length, status.into()].iter().flat_map(|word| word.to_be_bytes()));
        } else {
            // (As long as what was asked for at most, which had 32 bits.)
            let length = u32::try_from(extent.length).unwrap_or(u32::MAX);
            body.extend([length, status].iter().flat_map(|word| word.to_be_bytes()));
        }
    }
    let kind = if agreed.extended { EXTENDED_EXTENTS } else { EXTENTS };
    (Head::chunk(agreed, to, true, kind, body.len(), &[]), body)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPACT: Agreed = Agreed { structured: true, extended: false, allocation: true };
    const LONG: Agreed = Agreed { structured: false, extended: true, allocation: true };
    const TO: To = To { cookie: 0x0102_0304_0506_0708, offset: 0x1112_1314_1516_1718 };

    fn words(agreed: Agreed, flags: u16, kind: u16, length: u64) -> Vec<u8> {
        let magic = if agreed.extended { EXTENDED_REQUEST } else { REQUEST };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend([flags, kind].iter().flat_map(|word| word.to_be_bytes()));
        bytes.extend([TO.cookie, TO.offset].iter().flat_map(|word| word.to_be_bytes()));
        match agreed.extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend((length as u32).to_be_bytes()),
        }
        bytes
    }

    #[test]
    fn requests_are_read_as_they_were_agreed_on() {
        for (agreed, flags, kind, length, payload) in [
            (COMPACT, FUA, READ, 7, 0),
            (COMPACT, 0, WRITE, u64::from(u32::MAX), u64::from(u32::MAX)),
            (LONG, 0, WRITE, 9, 0),
            (LONG, PAYLOAD, WRITE, 9, 9),
            (LONG, PAYLOAD, STATUS, 12, 12),
            (LONG, 0, ZERO, 1 << 40, 0),
        ] {
            let bytes = words(agreed, flags, kind, length);
            let (cookie, offset) = (TO.cookie, TO.offset);
            let right = Request { flags, kind, cookie, offset, length, payload };
            assert_eq!(Request::read(&bytes, agreed), Some(right));
            for less in 0..bytes.len() {
                assert_eq!(Request::read(&bytes[..less], agreed), None);
            }
            let other = if agreed.extended { COMPACT } else { LONG };
            assert_eq!(Request::read(&[&bytes[..], &[0; 8]].concat(), other), None);
        }
    }

    /// As a client takes an answer apart: flags, kind, what is behind its head.
    fn taken_apart(agreed: Agreed, bytes: &[u8]) -> (u16, u16, &[u8]) {
        let number = |from: &[u8]| from.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let (magic, length) = match agreed.extended {
            true => (0x6e8a_278c, number(&bytes[24..32])),
            false => (0x668e_33ef, number(&bytes[16..20])),
        };
        assert_eq!(number(&bytes[..4]), magic);
        assert_eq!(number(&bytes[8..16]), TO.cookie);
        assert!(!agreed.extended || number(&bytes[16..24]) == TO.offset);
        let body = &bytes[if agreed.extended { 32 } else { 20 }..];
        assert_eq!(body.len() as u64, length);
        (number(&bytes[4..6]) as u16, number(&bytes[6..8]) as u16, body)
    }

    fn whole((head, body): (Head, Vec<u8>)) -> Vec<u8> {
        [head.bytes(), &body].concat()
    }

    #[test]
    fn chunks_say_how_long_they_are() {
        for agreed in [COMPACT, LONG] {
            let bytes = whole((Head::data(agreed, TO, false, 5, 3), b"abc".to_vec()));
            assert_eq!(taken_apart(agreed, &bytes), (0, 1, &b"\0\0\0\0\0\0\0\x05abc"[..]));
            let hole = Head::hole(agreed, TO, true, 6, 0x0102_0304);
            let body = &b"\0\0\0\0\0\0\0\x06\x01\x02\x03\x04"[..];
            assert_eq!(taken_apart(agreed, hole.bytes()), (1, 2, body));
            assert_eq!(taken_apart(agreed, Head::empty(agreed, TO).bytes()), (1, 0, &b""[..]));
            let bytes = whole(failed(agreed, TO, true, libc::EIO, None, "why"));
            assert_eq!(taken_apart(agreed, &bytes), (1, 0x8001, &b"\0\0\0\x05\0\x03why"[..]));
            let bytes = whole(failed(agreed, TO, false, libc::EROFS, Some(9), ""));
            let body = &b"\0\0\0\x01\0\0\0\0\0\0\0\0\0\x09"[..];
            assert_eq!(taken_apart(agreed, &bytes), (0, 0x8002, body));
            let long = "\u{e9}".repeat(WHY_MOST);
            let bytes = whole(failed(agreed, TO, true, libc::EIO, None, &long));
            assert!(taken_apart(agreed, &bytes).2.len() <= 6 + WHY_MOST);
        }
        assert!(Head::done(COMPACT, TO).bytes().starts_with(&0x6744_6698_u32.to_be_bytes()));
        assert_eq!(taken_apart(LONG, Head::done(LONG, TO).bytes()), (1, 0, &b""[..]));
    }

    #[test]
    fn extents_have_their_context_and_status() {
        let found = [Extent { length: 0x100, is_hole: true }, Extent { length: 2, is_hole: false }];
        let bytes = whole(extents(COMPACT, TO, &found));
        let body = b"\0\0\0\x01\0\0\x01\0\0\0\0\x03\0\0\0\x02\0\0\0\0";
        assert_eq!(taken_apart(COMPACT, &bytes), (1, 5, &body[..]));
        let bytes = whole(extents(LONG, TO, &found));
        let body = b"\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0";
        assert_eq!(taken_apart(LONG, &bytes), (1, 6, &body[..]));
    }
}
