//! Frames of keepers in frames of a transport (`ringlet_fabric`): a small one is in one; of a larger one only the length is, and its bytes are
//! written before into a ring of the receiver's. A long payload is taken from where it lies (`Arena`), and what is around it stands in the frame.
//!
//! Both ends know by the lengths alone where each lies: behind the last one, or at the ring's begin where it would not fit. It is room again for
//! the sender when the receiver has said that it has read it, and the transport that the write need not be done again.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind};
use std::iter::{empty, once};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use ringlet_core::memory::Area;
use ringlet_fabric::{FRAME_BYTES as PIECE_BYTES, Memory, Node, Number, Write};
use ringlet_linux::map;
use ringlet_linux::sys::Errno;
use ringlet_reflect::network::{Arena, Batch, Bytes, FRAME_BYTES, Parcel};

/// What each end has for what comes; and as much for what goes.
const RING_BYTES: usize = 1 << 20;
/// In each frame: its kind, and how far the ring was read.
const HEAD_BYTES: usize = 1 + 8;
const SMALL_BYTES: usize = PIECE_BYTES - HEAD_BYTES;
/// Without a frame that says it, so much is said by one of its own.
const UNTOLD_MOST: u64 = RING_BYTES as u64 / 4;
/// What waits for room, at most: who takes nothing is no reason to keep more.
const WAITING_MOST: usize = 1 << 20;

const SMALL: u8 = 0;
/// So long, in the ring.
const LARGE: u8 = 1;
/// The memory that is the receiver's ring.
const RING: u8 = 2;
/// Nothing else.
const READ: u8 = 3;
/// So long a part, in the ring; so much before it; that, and what is behind it.
const AROUND: u8 = 4;
const AROUND_HEAD_BYTES: usize = 4 + 2;

/// One end.
pub struct Frames {
    number: Number,
    memory: Shared,
    from: Memory,
    arena: Arc<Arena>,
    payloads: Memory,
    theirs: Option<Memory>,
    /// How far what goes has come: given, and of what is no room yet where each ends, its write, and what that takes from; before `freed` there is room.
    given: u64,
    freed: u64,
    under_way: VecDeque<(u64, u32, Option<Bytes>)>,
    read_there: u64,
    /// How far what comes was read; and said to be.
    came: u64,
    told: u64,
    /// What had no room yet.
    waiting: VecDeque<Parcel>,
    waiting_bytes: usize,
    piece: Vec<u8>,
}

/// Memory that rails can map once more, as some do of what they write to.
struct Shared(Area);

impl Shared {
    fn make(bytes: usize) -> std::io::Result<Shared> {
        let failed = |errno: Errno| Error::from_raw_os_error(errno.0);
        let made = map::sealed_memfd(c"ringlet-frames", bytes, 0).map_err(failed)?;
        // SAFETY: made just now, ours alone.
        let memfd = unsafe { OwnedFd::from_raw_fd(made) };
        let memory = Shared(map::map_shared(memfd.as_raw_fd(), bytes, true).map_err(failed)?);
        // What comes is written there by rails, for which a page that can't be had would be the end.
        map::hold(memory.0, 0, bytes).map_err(failed)?;
        Ok(memory)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: a whole mapping of ours, which no rail uses any more (`Frames::begin`).
        unsafe { map::unmap(self.0) };
    }
}

/// What no sane node sends.
#[derive(Debug, PartialEq, Eq)]
pub struct Insane(pub &'static str);

/// Where the next one of so many bytes begins that goes behind this place.
fn place(behind: u64, bytes: usize) -> u64 {
    let ring = RING_BYTES as u64;
    if (behind % ring) as usize + bytes > RING_BYTES {
        behind.next_multiple_of(ring)
    } else {
        behind
    }
}

fn offset(place: u64) -> usize {
    (place % RING_BYTES as u64) as usize
}

impl Frames {
    /// Of a transport that was opened just now; it is closed where this fails.
    ///
    /// # Safety
    /// They are dropped behind it.
    pub unsafe fn begin(
        node: &mut Node,
        number: Number,
        arena: Arc<Arena>,
    ) -> std::io::Result<Frames> {
        let memory = Shared::make(2 * RING_BYTES)?;
        let base = memory.0.base();
        // SAFETY: mapped as long as these frames are, and nobody has a reference to it; what comes is in the first half.
        let into = unsafe { node.register(number, base, RING_BYTES) };
        // SAFETY: the same, of the second half.
        let from = unsafe { node.register_source(number, base.add(RING_BYTES), RING_BYTES) };
        let area = arena.area();
        // SAFETY: mapped as long as these frames have it.
        let payloads = unsafe { node.register_source(number, area.base(), area.len()) };
        let (into, from, payloads) = match (into, from, payloads) {
            (Ok(into), Ok(from), Ok(payloads)) => (into, from, payloads),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                // (Before the memory goes.)
                node.close(number);
                return Err(error);
            }
        };
        let mut frames = Frames {
            number,
            memory,
            from,
            arena,
            payloads,
            theirs: None,
            given: 0,
            freed: 0,
            under_way: VecDeque::new(),
            read_there: 0,
            came: 0,
            told: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            piece: Vec::with_capacity(PIECE_BYTES),
        };
        let said = frames.say(node, RING, once(&into.0.to_le_bytes()[..]), false);
        if !said {
            node.close(number);
            return Err(ErrorKind::NotConnected.into());
        }
        Ok(frames)
    }

    /// False: there is no room for it, or it is too long.
    pub fn send(&mut self, node: &mut Node, frame: &Parcel) -> bool {
        if self.waiting.is_empty() && self.go(node, frame) {
            return true;
        }
        let fits = frame.len() <= FRAME_BYTES && self.waiting_bytes + frame.len() <= WAITING_MOST;
        if fits {
            self.waiting_bytes += frame.len();
            self.waiting.push_back(frame.clone());
        }
        fits
    }

    /// What waited goes as far as there is room, and what the other end has to know. True if anything went.
    pub fn go_on(&mut self, node: &mut Node) -> bool {
        let mut went = false;
        self.settle(node);
        while let Some(frame) = self.waiting.pop_front() {
            if !self.go(node, &frame) {
                self.waiting.push_front(frame);
                break;
            }
            self.waiting_bytes -= frame.len();
            went = true;
        }
        if self.came - self.told >= UNTOLD_MOST {
            went |= self.say(node, READ, empty(), false);
        }
        went
    }

    /// What was read, and need not be written again, is room, there and where it was taken from.
    fn settle(&mut self, node: &mut Node) {
        if self.under_way.is_empty() {
            return;
        }
        let written = node.transport(self.number).written();
        while let Some((end, write, _)) = self.under_way.front()
            && *end <= self.read_there
            // (Numbers of writes come round.)
            && written.wrapping_sub(*write) as i32 > 0
        {
            self.freed = *end;
            self.under_way.pop_front();
        }
    }

    fn go(&mut self, node: &mut Node, frame: &Parcel) -> bool {
        if frame.len() <= SMALL_BYTES {
            return self.say(node, SMALL, frame.parts(), false);
        }
        let Some(to) = self.theirs.filter(|_| frame.len() <= FRAME_BYTES) else { return false };
        self.settle(node);
        let transport = node.transport(self.number);
        let around = frame
            .one_long()
            .filter(|(_, long, _)| frame.len() - long.len() <= SMALL_BYTES - AROUND_HEAD_BYTES);
        let around = around.and_then(|(before, long, behind)| {
            Some((before, long, behind, self.arena.place_of(long)?))
        });
        let bytes = around.map_or(frame.len(), |(_, long, ..)| long.len());
        let at = place(self.given, bytes);
        let end = at + bytes as u64;
        if end > self.freed + RING_BYTES as u64 || !transport.has_room() {
            return false;
        }
        let (mut fits, mut to_place) = (true, RING_BYTES + offset(at));
        for part in frame.parts().filter(|_| around.is_none()) {
            // SAFETY: a slice; where it goes to nothing is read any more.
            fits &= unsafe { self.memory.0.write(to_place, part.as_ptr(), part.len()) };
            to_place += part.len();
        }
        let (from, from_place) = match around {
            Some((.., place)) => (self.payloads, place),
            None => (self.from, offset(at)),
        };
        let write = Write { from, at: from_place, bytes, to, offset: offset(at) as u64 };
        // (A transport that has ended is told of; and there was room for both.)
        let Some(write) = fits.then(|| transport.write(write).ok()).flatten() else { return false };
        self.given = end;
        self.under_way.push_back((end, write, around.map(|(_, long, ..)| long.clone())));
        let length = (bytes as u32).to_le_bytes();
        match around {
            Some((before, _, behind, _)) => {
                let until = (before.len() as u16).to_le_bytes();
                let body = [&length[..], &until, before, behind];
                self.say(node, AROUND, body.into_iter(), true)
            }
            None => self.say(node, LARGE, once(&length[..]), true),
        }
    }

    fn say<'a>(
        &mut self,
        node: &mut Node,
        kind: u8,
        body: impl Iterator<Item = &'a [u8]>,
        needs_writes: bool,
    ) -> bool {
        self.piece.clear();
        self.piece.push(kind);
        self.piece.extend(self.came.to_le_bytes());
        body.for_each(|part| self.piece.extend(part));
        let said = node.transport(self.number).frame(&self.piece, needs_writes).is_ok();
        if said {
            self.told = self.came;
        }
        said
    }

    /// What is in the ring, between what is around it.
    fn take_large(
        &mut self,
        bytes: usize,
        before: &[u8],
        behind: &[u8],
    ) -> Result<Option<Bytes>, Insane> {
        let length = bytes.saturating_add(before.len() + behind.len());
        if bytes == 0 || length > FRAME_BYTES {
            return Err(Insane("of no length, or too long"));
        }
        let at = place(self.came, bytes);
        let ring = self.memory.0.base();
        let mut frame = Batch::new(Some(&self.arena));
        frame.put(before);
        // SAFETY: within the ring (`place`), as it is no longer than a frame; the other node may write there at any time, so that it is copied before it
        // is looked at.
        unsafe { frame.put_raw(ring.add(offset(at)), bytes) };
        frame.put(behind);
        self.came = at + bytes as u64;
        Ok(Some(frame.freeze()))
    }

    /// A frame that has come, if one has by that.
    pub fn take(&mut self, piece: &[u8]) -> Result<Option<Bytes>, Insane> {
        let word = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes);
        let (Some((kind, rest)), true) = (piece.split_first(), piece.len() >= HEAD_BYTES) else {
            return Err(Insane("a frame without a head"));
        };
        let (read, body) = rest.split_at(HEAD_BYTES - 1);
        let read = u64::from_le_bytes(read.try_into().map_err(|_| Insane("no head"))?);
        if read < self.read_there || read > self.given {
            return Err(Insane("it has read what was not written"));
        }
        self.read_there = read;
        match (*kind, word(body)) {
            (SMALL, _) => Ok(Some(Bytes::copy_from_slice(body))),
            (READ, _) => Ok(None),
            (RING, Ok(memory)) if self.theirs.is_none() => {
                self.theirs = Some(Memory(memory));
                Ok(None)
            }
            (LARGE, Ok(bytes)) => self.take_large(bytes as usize, &[], &[]),
            (AROUND, _) => {
                let (bytes, around) = body.split_at_checked(4).ok_or(Insane("no length"))?;
                let (until, around) = around.split_at_checked(2).ok_or(Insane("no place"))?;
                let until = until.try_into().map(u16::from_le_bytes);
                let parts = until.ok().and_then(|until| around.split_at_checked(until.into()));
                match (word(bytes), parts) {
                    (Ok(bytes), Some((before, behind))) => {
                        self.take_large(bytes as usize, before, behind)
                    }
                    _ => Err(Insane("less around it than was said")),
                }
            }
            _ => Err(Insane("a frame of no kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a transport without rails, which keeps all that it is given; and its node.
    fn frames() -> (Node, Frames) {
        let mut node = Node::new(Vec::new());
        let number = node.open().unwrap();
        // SAFETY: no rail writes anything anywhere.
        let frames = unsafe { Frames::begin(&mut node, number, Arena::new().unwrap()).unwrap() };
        (node, frames)
    }

    fn piece(kind: u8, read: u64, body: &[u8]) -> Vec<u8> {
        [&[kind][..], &read.to_le_bytes(), body].concat()
    }

    fn word(number: usize) -> [u8; 4] {
        (number as u32).to_le_bytes()
    }

    #[test]
    fn what_no_sane_node_says_is_refused() {
        for said in [
            vec![],
            vec![SMALL],
            piece(SMALL, 0, b"x")[..HEAD_BYTES - 1].to_vec(),
            piece(9, 0, &word(1)),
            piece(SMALL, 1, b"x"),
            piece(READ, u64::MAX, b""),
            piece(LARGE, 0, &word(0)),
            piece(LARGE, 0, &word(FRAME_BYTES + 1)),
            piece(LARGE, 0, &word(u32::MAX as usize)),
            piece(LARGE, 0, b"123"),
            piece(LARGE, 0, b"12345"),
            piece(RING, 0, b"1"),
            piece(AROUND, 0, &word(1)),
            piece(AROUND, 0, &[&word(1)[..], &[0]].concat()),
            piece(AROUND, 0, &[&word(1)[..], &[2, 0, 7]].concat()),
            piece(AROUND, 0, &[&word(0)[..], &[1, 0, 7]].concat()),
            piece(AROUND, 0, &[&word(FRAME_BYTES)[..], &[0, 0, 7]].concat()),
            piece(AROUND, 0, &[&word(u32::MAX as usize)[..], &[0, 0, 7]].concat()),
        ] {
            let (_node, mut frames) = frames();
            assert!(frames.take(&said).is_err(), "{said:?}");
        }
        let (_node, mut frames) = frames();
        let ring = piece(RING, 0, &word(0));
        assert_eq!(frames.take(&ring), Ok(None));
        assert!(frames.take(&ring).is_err(), "another ring");
    }

    #[test]
    fn what_is_around_a_payload_is_around_it_again() {
        let (_node, mut frames) = frames();
        let payload: Vec<u8> = (0..3000u32).map(|at| at as u8).collect();
        // SAFETY: a slice; nobody else writes there.
        assert!(unsafe { frames.memory.0.write(0, payload.as_ptr(), payload.len()) });
        let said = [&word(payload.len())[..], &[2, 0], b"abc"].concat();
        let came = frames.take(&piece(AROUND, 0, &said)).unwrap().unwrap();
        assert_eq!(came, [&b"ab"[..], &payload, b"c"].concat());
        assert_eq!(frames.came, payload.len() as u64);
    }

    #[test]
    fn what_is_not_read_is_not_written_again_and_nothing_lies_across_the_end() {
        let (mut node, mut frames) = frames();
        frames.take(&piece(RING, 0, &word(0))).unwrap();
        let bytes = FRAME_BYTES - 1;
        let mut went = 0;
        while frames.go(&mut node, &vec![1; bytes].into()) {
            went += 1;
        }
        assert_eq!(went, RING_BYTES / bytes);
        // That it was read is not all: it may be written again.
        frames.take(&piece(READ, frames.given, b"")).unwrap();
        assert!(!frames.go(&mut node, &vec![1; bytes].into()));
        assert!(frames.take(&piece(READ, 0, b"")).is_err(), "it is unread again");
        // (As of who reads.)
        let mut came = 0;
        for _ in 0..10_000 {
            let at = place(came, bytes);
            assert!(at >= came && offset(at) + bytes <= RING_BYTES);
            came = at + bytes as u64;
        }
    }
}
