//! Programs that write anything anywhere in their segments, between any two passes: the link writes nowhere else, ends each pass, and an
//! honest connection beside it does not notice. And a half whose other half says anything.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{Back, Bells, Half, Link, Operation, Rings as OneRings, Segment as Memory};
use ringlet_core::course::Credit;
use ringlet_core::layout::{CONTROL_OFFSET, LINE_BYTES, SLOT_COUNT, SLOTS_OFFSET};
use ringlet_core::mirror::{ReceiverLine, SenderLine};
use ringlet_core::ring::{Next, Rx, SegmentRing, Tx};
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};
use segment::{Segment, with_buffers};
use std::collections::VecDeque;
use std::task::Poll;

const RING_BYTES: usize = 1 << 16;

#[derive(Default)]
struct Rings {
    bytes: u64,
    events: u64,
}

impl Bells for Rings {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) -> bool {
        self.events += 1;
        true
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

impl OneRings for Rings {
    fn published(&mut self) {}
    fn event(&mut self) -> bool {
        Bells::event(self, 0)
    }
    fn byte(&mut self) -> Poll<bool> {
        Bells::byte(self, 0)
    }
    fn part(&mut self) -> Poll<()> {
        Bells::part(self, 0)
    }
}

/// What another half might say in place of this.
fn lie(said: Operation, random: &mut Random) -> Operation {
    let mut small = || random.below(4) as u32;
    match said {
        Operation::Record(mut piece) => {
            piece.header ^= 1 << random.below(64);
            piece.body[random.below(24)] ^= 1 << random.below(8);
            Operation::Record(piece)
        }
        Operation::Line { said, .. } => {
            let (hold, rings, events, parting) = (small(), small(), small(), small());
            let said = SenderLine { hold, rings, events, parting, working: small(), ..said };
            Operation::Line { said, echo: small() }
        }
        Operation::Back(Back { first, .. }) => {
            let last = ReceiverLine { state: small(), changes: small(), ..first };
            let (slots, data) = (u64::from(small()) << random.below(64), u64::MAX);
            Operation::Back(Back { first, credit: Some(Credit { slots, data, looks: true }), last })
        }
        _ => match random.below(5) {
            0 => Operation::Ring,
            1 => Operation::Rung { went: random.below(2) == 0 },
            2 => Operation::Silent { hold: random.below(4) as u32 },
            3 => Operation::Done,
            _ => Operation::Line { said: SenderLine::default(), echo: 0 },
        },
    }
}

/// It ends, or goes on; what it answers stays within what it was told, and what its program sends.
#[test]
fn a_half_survives_what_the_other_says() {
    const TOLD_MOST: usize = 4;
    let mut failed = 0;
    for seed in 0..400 {
        let mut random = Random(seed);
        let segments = [Segment::new(RING_BYTES), Segment::new(RING_BYTES)];
        let mut halves = [0, 1].map(|end: usize| {
            let memory = Memory { area: segments[end].area(), geometry: segments[end].geometry };
            Half::new(end, memory)
        });
        let (txs, rings) =
            ([Tx::default(), Tx::default()], [0, 1].map(|end: usize| segments[end].ring(end)));
        let mut ways = [VecDeque::new(), VecDeque::new()];
        let mut bells = Rings::default();
        for _ in 0..500 {
            let end = random.below(2);
            scribble(&segments[end], &txs[end], &rings[end], &mut random);
            let before = ways[end].len();
            halves[end].pass(&mut ways[end], &mut bells);
            assert!(ways[end].len() - before <= 64 + 5, "a pass sends no more than it may");
            for _ in 0..TOLD_MOST {
                let Some(mut said) = ways[end].pop_front() else { break };
                match random.below(12) {
                    0 => said = lie(said, &mut random),
                    1 => ways[end].push_front(said.clone()),
                    2 => continue,
                    _ => {}
                }
                let before = ways[1 - end].len();
                halves[1 - end].take(said, |_, _, _| {}, &mut ways[1 - end], &mut bells);
                halves[1 - end].settle(&mut ways[1 - end], &mut bells);
                assert!(ways[1 - end].len() - before <= 4, "each is answered by a few");
            }
            if halves.iter().any(Half::has_failed) {
                failed += 1;
                break;
            }
        }
    }
    assert!(failed > 100, "only {failed} were found out");
}
