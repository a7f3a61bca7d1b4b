//! Programs that write anything anywhere in their segments, between any two passes: the link writes nowhere else, ends each pass, and an
//! honest connection beside it does not notice.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{Bells, Link, Segment as Memory};
use ringlet_core::layout::{CONTROL_OFFSET, LINE_BYTES, SLOT_COUNT, SLOTS_OFFSET};
use ringlet_core::ring::{Next, Rx, SegmentRing, Tx};
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};
use segment::{Segment, with_buffers};
use std::task::Poll;

const RING_BYTES: usize = 1 << 16;

#[derive(Default)]
struct Rings {
    bytes: u64,
    events: u64,
}

impl Bells for Rings {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) {
        self.events += 1;
    }
    fn byte(&mut self, _to: usize) -> Poll<bool> {
        self.bytes += 1;
        if self.bytes.is_multiple_of(5) {
            return Poll::Pending;
        }
        Poll::Ready(self.bytes.is_multiple_of(3))
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        self.bytes += 1;
        if self.bytes.is_multiple_of(5) { Poll::Pending } else { Poll::Ready(()) }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

fn link(seed: Option<u64>, segments: &[Segment; 2]) -> Link {
    let ends = [0, 1]
        .map(|end: usize| Memory { area: segments[end].area(), geometry: segments[end].geometry });
    Link::new(seed, ends)
}

/// An honest record, or one that is none; and words of the control lines, of which small numbers mean most.
fn scribble(segment: &Segment, tx: &Tx, ring: &SegmentRing, random: &mut Random) {
    let area = segment.area();
    match random.below(4) {
        0 => {
            let mut bytes = vec![7; 1 + random.below(20_000)];
            with_buffers(&mut bytes, &[], |from| tx.push(ring, from));
        }
        1 => {
            let at = CONTROL_OFFSET + 4 * random.below(256);
            area.at::<AtomicU32>(at).store(random.below(8) as u32, Relaxed);
        }
        2 => {
            let at = SLOTS_OFFSET + LINE_BYTES * random.below(2 * SLOT_COUNT) + 8 * random.below(3);
            let word = area.at::<AtomicU64>(at);
            let bit = 1 << random.below(64);
            word.store(word.load(Relaxed) ^ bit, Relaxed);
        }
        _ => {
            let at = 8 * random.below(SLOTS_OFFSET / 8);
            area.at::<AtomicU64>(at)
                .store((random.below(1 << 31) as u64) << random.below(33), Relaxed);
        }
    }
}

#[test]
fn a_link_survives_what_is_written() {
    let honest = [Segment::new(RING_BYTES), Segment::new(RING_BYTES)];
    let mut beside = link(None, &honest);
    let (tx, rx) = (Tx::default(), Rx::default());
    let (from, to) = (honest[0].ring(0), honest[1].ring(0));
    for seed in 0..200 {
        let segments = [Segment::new(RING_BYTES), Segment::new(RING_BYTES)];
        let mut link = link((seed % 3 > 0).then_some(seed), &segments);
        let mut random = Random(seed);
        let (txs, rings) =
            ([Tx::default(), Tx::default()], [0, 1].map(|end: usize| segments[end].ring(end)));
        let mut bells = Rings::default();
        for _ in 0..500 {
            let end = random.below(2);
            scribble(&segments[end], &txs[end], &rings[end], &mut random);
            link.pass(&mut bells);
            if random.below(20) == 0 {
                link.arm();
                link.disarm();
            }
        }
        let mut bytes = seed.to_ne_bytes();
        assert_eq!(with_buffers(&mut bytes, &[], |from_| tx.push(&from, from_)), 8);
        beside.pass(&mut bells);
        let mut got = [0; 8];
        let next = with_buffers(&mut got, &[], |to_| rx.pop(&to, to_));
        assert!(matches!(next, Next::Bytes(8, _)) && got == bytes);
    }
}
