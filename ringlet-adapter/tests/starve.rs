//! An end that says something new before each pass, or asks for a doorbell each time, holds up nothing of the other one's.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{Bells, Link, Segment as Memory};
use ringlet_core::layout::Control;
use ringlet_core::leaving::Leaving;
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Mark, Next, Rx, Tx};
use segment::{Segment, with_buffers};
use std::task::Poll;

const RING_BYTES: usize = 1 << 16;
const PASSES: usize = 1000;

/// Each byte takes as many looks, as one that another thread sends.
struct Slow {
    looks: u32,
    asked: u64,
}

const LOOKS: u32 = 4;

impl Bells for Slow {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) -> bool {
        true
    }
    fn byte(&mut self, _to: usize) -> Poll<bool> {
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS) {
            self.asked += 1;
            return Poll::Ready(true);
        }
        Poll::Pending
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        Poll::Ready(())
    }
}

/// `loud` is the end that is never quiet.
fn beside(loud: usize, seed: Option<u64>, cry: impl Fn(&Control)) -> u64 {
    let segments = [Segment::new(RING_BYTES), Segment::new(RING_BYTES)];
    let ends = [0, 1]
        .map(|end: usize| Memory { area: segments[end].area(), geometry: segments[end].geometry });
    let mut link = Link::new(seed, ends);
    let mut bells = Slow { looks: 0, asked: 0 };
    let loud_words = segments[loud].ring(loud);
    let quiet = 1 - loud;
    // It is to be rung by bytes.
    assert!(Tx::default().push_mark(&loud_words, Mark::Start(0)));
    for _ in 0..20 {
        link.pass(&mut bells);
    }
    let (tx, rx) = (Tx::default(), Rx::default());
    let (from, to) = (segments[quiet].ring(quiet), segments[loud].ring(quiet));
    let mut bytes = [1, 2, 3];
    assert_eq!(with_buffers(&mut bytes, &[], |from_| tx.push(&from, from_)), 3);
    let incoming = segments[quiet].ring(loud);
    let (mut came, mut echoed) = (false, false);
    for pass in 0..PASSES {
        cry(loud_words.control());
        if pass == PASSES - PASSES / 10 {
            // It leaves what the loud one sends, too.
            incoming.control().leave(0);
        }
        if pass == PASSES - PASSES / 20 {
            // And stays after all, which wants another echo.
            assert!(echoed, "it is not known that it leaves");
            echoed = false;
            incoming.control().set_state(incoming.control().state() & !2);
        }
        link.pass(&mut bells);
        let mut got = [0; 3];
        came |= matches!(with_buffers(&mut got, &[], |to_| rx.pop(&to, to_)), Next::Bytes(..));
        echoed |= pass > PASSES - PASSES / 10 && incoming.control().is_echoed();
    }
    assert!(came && echoed, "loud {loud}, seed {seed:?}: came {came}, echoed {echoed}");
    bells.asked
}

#[test]
fn who_asks_all_the_time_holds_up_nobody() {
    for loud in [0, 1] {
        for seed in [None, Some(1), Some(2)] {
            beside(loud, seed, |words| _ = words.ask_delivery());
            let rung = beside(loud, seed, |words| words.ask_byte());
            assert!(rung > 0, "nothing was rung");
        }
    }
}
