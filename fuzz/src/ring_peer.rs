//! Our end of a segment while the peer writes what it likes, where it likes.
//!
//! A script of bytes says what happens: operations of ours, operations of the peer as an honest one makes them (else nothing
//! would ever be taken for news), and scribbles. Whatever happens, an operation must not panic, not touch what is not its
//! own, claim no more than it was asked for, and end after a bounded number of looks at shared memory.

use crate::segment::{Segment, with_buffers};
use ringlet_core::layout::*;
use ringlet_core::ring::{Mark, Next, RingMemory, Rx, SegmentRing, Tx, packet_max_bytes};
use ringlet_core::sync::{AtomicU64, Ordering};
use std::cell::Cell;
use std::ops::Range;

/// Directions, seen from us.
pub const OUT: usize = 0;
pub const IN: usize = 1;
/// What buffers hold before an operation.
pub const BLANK: u8 = 0xa5;
/// More than the largest operation takes: a peek over all slots, into few buffers.
const LOOKS_MAX: usize = 6 * SLOT_COUNT;

/// Counts what an operation does to shared memory, and lets the peer interfere between any two looks of one operation.
pub struct Watched<'a> {
    segment: &'a Segment,
    ring: SegmentRing,
    looks: Cell<usize>,
    /// State of a small random generator; 0 while the peer keeps still.
    mischief: &'a Cell<u64>,
}

impl<'a> Watched<'a> {
    pub fn new(segment: &'a Segment, direction: usize, mischief: &'a Cell<u64>) -> Watched<'a> {
        Watched { segment, ring: segment.ring(direction), looks: Cell::new(0), mischief }
    }

    /// Of an operation, whose looks are counted.
    pub fn start(&self) {
        self.looks.set(0);
    }

    fn look(&self) -> &SegmentRing {
        self.looks.set(self.looks.get() + 1);
        assert!(self.looks.get() <= LOOKS_MAX, "an operation without end");
        let next = || {
            let mut state = self.mischief.get();
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            self.mischief.set(state);
            state.to_le_bytes()
        };
        if self.mischief.get() != 0 && next()[7] < 32 {
            scribble(self.segment, &mut Script([next(), next()].as_flattened()));
        }
        &self.ring
    }
}

impl RingMemory for Watched<'_> {
    fn header(&self, slot: usize) -> &AtomicU64 {
        self.look().header(slot)
    }
    fn credit_slots(&self) -> &AtomicU64 {
        self.look().credit_slots()
    }
    fn credit_data(&self) -> &AtomicU64 {
        self.look().credit_data()
    }
    fn ring_bytes(&self) -> usize {
        self.ring.ring_bytes()
    }
    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize) {
        assert!(slot < SLOT_COUNT && at + n <= LINE_BYTES);
        // SAFETY: passed on to the caller.
        unsafe { self.look().write_slot(slot, at, from, n) };
    }
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize) {
        assert!(slot < SLOT_COUNT && at + n <= LINE_BYTES);
        // SAFETY: passed on to the caller.
        unsafe { self.look().read_slot(slot, at, to, n) };
    }
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize) {
        assert!(at + n <= self.ring_bytes());
        // SAFETY: passed on to the caller.
        unsafe { self.look().write_data(at, from, n) };
    }
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize) {
        assert!(at + n <= self.ring_bytes());
        // SAFETY: passed on to the caller.
        unsafe { self.look().read_data(at, to, n) };
    }
}

/// The rest of the script; zeros when it is used up.
pub struct Script<'a>(pub &'a [u8]);

impl Script<'_> {
    pub fn number(&mut self, bytes: usize) -> u64 {
        let (first, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        first.iter().rev().fold(0, |number, &byte| number << 8 | byte as u64)
    }

    pub fn below(&mut self, bytes: usize, limit: usize) -> usize {
        self.number(bytes) as usize % limit
    }

    /// Sizes around all that matters.
    pub fn size(&mut self) -> usize {
        match self.below(1, 4) {
            0 => 1 + self.below(1, INLINE_BYTES + 4),
            1 => 1 + self.below(2, 5000),
            2 => RECORD_MAX_BYTES - 64 + self.below(1, 128),
            _ => 1 + self.below(3, 100_000),
        }
    }

    pub fn cuts(&mut self) -> Vec<usize> {
        (0..self.below(1, 4)).map(|_| self.below(2, 3000)).collect()
    }
}

/// One side of the connection: sends on one direction, receives on the other.
struct Side<'a> {
    out: Watched<'a>,
    tx: Tx,
    inward: Watched<'a>,
    rx: Rx,
    /// Records are packets.
    packets: bool,
}

impl<'a> Side<'a> {
    fn new(segment: &'a Segment, out: usize, mischief: &'a Cell<u64>, packets: bool) -> Side<'a> {
        Side {
            packets,
            out: Watched::new(segment, out, mischief),
            tx: Tx::default(),
            inward: Watched::new(segment, 1 - out, mischief),
            rx: Rx::default(),
        }
    }

    fn operate(&mut self, which: usize, script: &mut Script) {
        self.out.start();
        self.inward.start();
        match which {
            0 => self.push(script),
            1 => self.pop(script),
            2 => self.peek(script),
            3 => {
                let bytes = self.rx.available(&self.inward, usize::MAX);
                assert!(bytes <= SLOT_COUNT * MESSAGE_MAX_BYTES);
                self.rx.has_bytes(&self.inward);
                self.rx.published_after(&self.inward, script.number(4));
                let from = [script.number(1), u64::MAX - script.number(1)][script.below(1, 2)];
                self.rx.taken_since(&self.inward, from);
            }
            4 => {
                if self.rx.mark(&self.inward).is_some() {
                    self.rx.pass_mark(&self.inward);
                }
            }
            5 => {
                self.tx.drained(&self.out);
                self.tx.writable(&self.out);
                self.tx.outstanding_bytes(&self.out);
            }
            6 if self.packets => {
                let mut bytes = vec![BLANK; MESSAGE_MAX_BYTES];
                if let Some(packet) = self.tx.oldest_packet(&self.out) {
                    with_buffers(&mut bytes, &[], |to| packet.copy_to(&self.out, to));
                    assert!(bytes[packet.len()..].iter().all(|&byte| byte == BLANK));
                }
                self.tx.pass_oldest(&self.out);
            }
            6 => {
                let mut piece = [BLANK; 256];
                let rest = self.tx.oldest(&self.out, script.size(), &mut piece).len();
                assert!(rest <= piece.len() && piece[rest..].iter().all(|&byte| byte == BLANK));
                self.tx.pass_oldest(&self.out);
            }
            _ => {
                let value = script.number(8);
                let mark = if value & 1 == 0 { Mark::Start(value) } else { Mark::Back(value) };
                self.tx.push_mark(&self.out, mark);
            }
        }
    }

    fn push(&mut self, script: &mut Script) {
        let (mut wanted, cuts) = (script.size(), script.cuts());
        if self.packets && wanted.is_multiple_of(7) {
            wanted = 0;
        }
        let mut data = vec![BLANK; wanted];
        let writable = self.tx.writable(&self.out);
        let max = if self.packets { packet_max_bytes(&self.out) } else { 0 };
        let (pushed, left) = with_buffers(&mut data, &cuts, |from| {
            (self.tx.push_sent_at(&self.out, from, 0, max), from.remaining())
        });
        assert!(pushed.unwrap_or(0) + left == wanted);
        let fits = !self.packets || wanted <= max;
        assert!(pushed.is_some() || !writable || !fits, "a liar's ring stays full, ours has room");
        assert!(!self.packets || pushed.is_none_or(|n| n == wanted && fits), "a packet is whole");
        assert!(data.iter().all(|&byte| byte == BLANK), "a send wrote to the program's buffer");
    }

    fn pop(&mut self, script: &mut Script) {
        let (room, cuts) = (script.size(), script.cuts());
        let mut data = vec![BLANK; room];
        let (next, left) = with_buffers(&mut data, &cuts, |to| {
            let next = match self.packets {
                true => self.rx.pop_packet(&self.inward, to),
                false => self.rx.pop(&self.inward, to),
            };
            (next, to.remaining())
        });
        let n = if let Next::Bytes(n, _) = next { n.min(room) } else { 0 };
        assert!(n + left == room);
        assert!(self.packets || (n > 0) == matches!(next, Next::Bytes(..)));
        assert!(data[n..].iter().all(|&byte| byte == BLANK), "more was written than claimed");
    }

    fn peek(&mut self, script: &mut Script) {
        let (room, cuts) = (script.size(), script.cuts());
        let mut data = vec![BLANK; room];
        let n = with_buffers(&mut data, &cuts, |to| match self.packets {
            true => self.rx.peek_packet(&self.inward, to).map_or(0, |len| len.min(room)),
            false => self.rx.peek(&self.inward, to),
        });
        assert!(n <= room);
        assert!(data[n..].iter().all(|&byte| byte == BLANK), "more was written than claimed");
    }
}

/// The peer writes what no ringlet writes: anywhere, or where it hurts.
pub fn scribble(segment: &Segment, script: &mut Script) {
    let geometry = segment.geometry;
    let direction = script.below(1, 2);
    let slot = |script: &mut Script| geometry.slot_offset(direction, script.below(2, SLOT_COUNT));
    // One of the last records published: the receiver may be about to read it, or have read half of it.
    let fresh = |script: &mut Script| {
        let ring = segment.ring(direction);
        let header = |slot: &usize| ring.header(*slot).load(Ordering::Relaxed);
        let last = (0..SLOT_COUNT).max_by_key(header).unwrap_or(0);
        geometry.slot_offset(direction, last.saturating_sub(script.below(1, 3)))
    };
    let credit = CONTROL_OFFSET + direction * size_of::<Control>();
    let (offset, change): (usize, &dyn Fn(u64, u64) -> u64) = match script.below(1, 8) {
        0 => (script.below(3, geometry.segment_bytes() / 8) * 8, &|_, number| number),
        1 => (slot(script), &|_, number| number),
        2 => (fresh(script) + 8, &|_, number| number),
        // Another length or other flags for the same record.
        3 => (fresh(script), &|old, number| old ^ (1 << (number % (LEN_BITS + FLAG_BITS) as u64))),
        4 => (fresh(script), &|old, number| old & !((1 << LEN_BITS) - 1) | (number % 128)),
        5 => (fresh(script) + 8, &|old, number| old ^ (1 << (number % 64))),
        6 => (credit, &|old, number| old.wrapping_add(number % 2048).wrapping_sub(1024)),
        _ => {
            (credit + 8, &|old, number| old.wrapping_add(number % (1 << 18)).wrapping_sub(1 << 17))
        }
    };
    let number = script.number(8);
    let area = segment.area();
    let mut word = 0u64;
    // SAFETY: `word` is a local of 8 bytes.
    let done = unsafe { area.read(offset, (&raw mut word).cast(), 8) };
    word = change(word, number);
    // SAFETY: as above.
    assert!(done && unsafe { area.write(offset, (&raw const word).cast(), 8) });
}

/// What our operations may write to: our slots, our data, our credit.
pub fn own_parts(segment: &Segment) -> [Range<usize>; 3] {
    let geometry = segment.geometry;
    let credit = CONTROL_OFFSET + IN * size_of::<Control>();
    [
        geometry.slot_offset(OUT, 0)..geometry.slot_offset(IN, 0),
        geometry.data_offset(OUT)..geometry.data_offset(IN),
        credit..credit + size_of::<Credit>(),
    ]
}

/// What lies outside of `own`.
pub fn outside(segment: &Segment, own: &[Range<usize>]) -> Vec<u8> {
    let mut bytes = vec![0; segment.geometry.segment_bytes()];
    // SAFETY: `bytes` is valid for its length.
    assert!(unsafe { segment.area().read(0, bytes.as_mut_ptr(), bytes.len()) });
    for part in own {
        bytes[part.clone()].fill(0);
    }
    bytes
}

pub fn run(script: &[u8]) {
    let mut script = Script(script);
    let segment = Segment::new(RING_MIN_BYTES << script.below(1, 3));
    let (mischief, packets) = (Cell::new(0), script.below(1, 2) == 1);
    let side = |out| Side::new(&segment, out, &mischief, packets);
    let (mut we, mut peer) = (side(OUT), side(IN));
    let own = own_parts(&segment);
    while !script.0.is_empty() {
        let what = script.below(1, 256);
        match what >> 5 {
            0 | 1 => scribble(&segment, &mut script),
            2 | 3 => peer.operate(what % 8, &mut script),
            4 => {
                mischief.set(script.number(4));
                we.operate(what % 8, &mut script);
                mischief.set(0);
            }
            5 => {
                let before = outside(&segment, &own);
                we.operate(what % 8, &mut script);
                assert!(before == outside(&segment, &own), "wrote to what is not ours");
            }
            _ => we.operate(what % 8, &mut script),
        }
    }
}
