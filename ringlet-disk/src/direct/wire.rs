//! What is said on a stream, in little-endian words, and how it is sent.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, sockopt};

use crate::layout::{Op, READERS, Request, SLOTS, op_of};

const MAGIC: u64 = u64::from_le_bytes(*b"ringdir1");
pub const HELLO_BYTES: usize = 48;
pub const WELCOME_BYTES: usize = 16;
pub const REQUEST_BYTES: usize = 32;
pub const ANSWER_BYTES: usize = 16;

/// Who connects says hello by then, and hears welcome.
pub const GREETING: Duration = Duration::from_secs(1);
/// So long nothing is heard of the other host's kernel before a stream is broken.
const SILENCE: u32 = 3;

fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let bytes = bytes.get(..N * 8)?;
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
    Some(std::array::from_fn(word))
}

fn bytes<const BYTES: usize>(words: &[u64]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// What is said first: whose seat it is, by which number it was let in there, and which of its streams this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    pub token: [u64; 2],
    pub seat: usize,
    pub admitted: u64,
    pub stream: u64,
}

impl Hello {
    pub fn bytes(&self) -> [u8; HELLO_BYTES] {
        let [one, other] = self.token;
        bytes(&[MAGIC, one, other, self.seat as u64, self.admitted, self.stream])
    }

    /// `None` if it is none, or has another token.
    pub fn read(bytes: &[u8], token: [u64; 2]) -> Option<Hello> {
        let [magic, one, other, seat, admitted, stream] = words(bytes)?;
        let is_token = is_secret([one, other], token);
        let seat = usize::try_from(seat).ok().filter(|seat| *seat < READERS)?;
        let is_right = magic == MAGIC && is_token && stream > 0;
        is_right.then_some(Hello { token, seat, admitted, stream })
    }
}

/// All bits are looked at, whichever differ: how long it takes tells nothing.
fn is_secret(said: [u64; 2], secret: [u64; 2]) -> bool {
    std::hint::black_box((said[0] ^ secret[0]) | (said[1] ^ secret[1])) == 0
}

/// By which the server shows that it is the one that is announced.
pub fn welcome(of: [u64; 2]) -> [u8; WELCOME_BYTES] {
    bytes(&of)
}

pub fn is_welcome(bytes: &[u8], of: [u64; 2]) -> bool {
    words(bytes).is_some_and(|said| is_secret(said, of))
}

/// A request as it goes by a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    pub slot: usize,
    pub number: u64,
    pub request: Request,
}

impl Asked {
    pub fn bytes(&self) -> [u8; REQUEST_BYTES] {
        let Request { op, flags, offset, length, .. } = self.request;
        let what = op as u64 | (self.slot as u64) << 8 | u64::from(flags) << 32;
        bytes(&[what, self.number, offset, length])
    }

    /// `None` if there is no such operation, or slot.
    pub fn read(bytes: &[u8]) -> Option<Asked> {
        let [what, number, offset, length] = words(bytes)?;
        let (op, slot, flags) =
            (op_of(u32::from(what as u8))?, what as u32 >> 8, (what >> 32) as u32);
        let slot = usize::try_from(slot).ok().filter(|slot| *slot < SLOTS)?;
        let request = Request { op, flags, offset, length, over: 0 };
        Some(Asked { slot, number, request })
    }

    /// So many bytes follow.
    pub fn payload(&self) -> u64 {
        if self.request.op == Op::Write { self.request.length } else { 0 }
    }
}

/// The head of an answer: its word, as in the regions, and how many bytes follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    pub slot: usize,
    pub word: u64,
    pub length: usize,
}

impl Head {
    pub fn bytes(&self) -> [u8; ANSWER_BYTES] {
        bytes(&[self.word, self.slot as u64 | (self.length as u64) << 8])
    }

    pub fn read(bytes: &[u8]) -> Option<Head> {
        let [word, what] = words(bytes)?;
        let slot = usize::from(what as u8);
        let length = usize::try_from(what >> 8).ok()?;
        (slot < SLOTS).then_some(Head { slot, word, length })
    }
}

/// The kernel ends it when the other host is not heard any more, whether something is on its way or not.
pub fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, SILENCE)?;
    sockopt::set_tcp_user_timeout(stream, SILENCE * 1000)?;
    Ok(())
}

/// At least a byte; the end is an error. It waits, unless `flags` say otherwise.
pub fn receive(stream: &TcpStream, to: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    loop {
        match rustix::net::recv(stream, &mut *to, flags) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((got, _)) => return Ok(got),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

pub fn send(stream: &TcpStream, parts: &[IoSlice], flags: SendFlags) -> io::Result<usize> {
    loop {
        let flags = flags | SendFlags::NOSIGNAL;
        let mut none = rustix::net::SendAncillaryBuffer::default();
        match rustix::net::sendmsg(stream, parts, &mut none, flags) {
            Ok(sent) => return Ok(sent),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

pub fn waits(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// All of it, until then, however slowly it comes.
pub fn receive_by(stream: &TcpStream, to: &mut [u8], until: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        done += receive(stream, &mut to[done..], RecvFlags::empty())?;
    }
    stream.set_read_timeout(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_what_is_cut_off_is_not() {
        let token = [7, 1 << 63];
        let hello = Hello { token, seat: READERS - 1, admitted: 9, stream: 3 };
        assert_eq!(Hello::read(&hello.bytes(), token), Some(hello));
        for bit in 0..128 {
            let mut other = token;
            other[bit / 64] ^= 1 << (bit % 64);
            assert_eq!(Hello::read(&hello.bytes(), other), None, "bit {bit} of the token");
        }
        assert_eq!(Hello::read(&Hello { stream: 0, ..hello }.bytes(), token), None);
        assert_eq!(Hello::read(&Hello { seat: READERS, ..hello }.bytes(), token), None);
        let request = Request { op: Op::Write, flags: u32::MAX, offset: 5, length: 6, over: 0 };
        let asked = Asked { slot: SLOTS - 1, number: 77, request };
        assert_eq!(Asked::read(&asked.bytes()), Some(asked));
        assert_eq!(Asked::read(&Asked { slot: SLOTS, ..asked }.bytes()), None);
        assert_eq!(Asked::read(&[7; REQUEST_BYTES]), None);
        let head = Head { slot: 3, word: u64::MAX, length: 1 << 40 };
        assert_eq!(Head::read(&head.bytes()), Some(head));
        assert_eq!(Head::read(&Head { slot: SLOTS, ..head }.bytes()), None);
        for less in 0..HELLO_BYTES {
            assert_eq!(Hello::read(&hello.bytes()[..less], token), None);
            let (asked, head) = (asked.bytes(), head.bytes());
            assert!(less >= REQUEST_BYTES || Asked::read(&asked[..less]).is_none());
            assert!(less >= ANSWER_BYTES || Head::read(&head[..less]).is_none());
        }
    }
}
