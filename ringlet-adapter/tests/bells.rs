//! A program is killed with a doorbell for it on its way, or unread: its connection is let go only when there is none.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{Half, Operation, Rings, Segment as Memory};
use ringlet_core::layout::WANT_BYTE;
use ringlet_core::ring::{Mark, Tx};
use segment::{Segment, with_buffers};
use std::collections::VecDeque;
use std::task::Poll;

/// What was asked of it, and whether it puts bytes.
#[derive(Default)]
struct Noted {
    said: Vec<String>,
    puts: bool,
}

impl Rings for Noted {
    fn published(&mut self) {}
    fn event(&mut self) -> bool {
        true
    }
    fn byte(&mut self) -> Poll<bool> {
        if self.puts { Poll::Ready(true) } else { Poll::Pending }
    }
    fn take_bells(&mut self, most: u64) {
        self.said.push(format!("take {most}"));
    }
    fn part(&mut self) -> Poll<()> {
        self.said.push("part".into());
        Poll::Ready(())
    }
}

struct Pair {
    halves: [Half; 2],
    rings: [Noted; 2],
    ways: [VecDeque<Operation>; 2],
}

impl Pair {
    /// Some passes of both, in which all that was sent arrives.
    fn pass(&mut self) {
        for _ in 0..10 {
            for end in [0, 1] {
                self.halves[end].pass(&mut self.ways[end], &mut self.rings[end]);
                while let Some(operation) = self.ways[end].pop_front() {
                    let (to, rings) = (&mut self.halves[1 - end], &mut self.rings[1 - end]);
                    to.take(operation, |_, _, _| {}, &mut self.ways[1 - end], rings);
                }
                self.halves[1 - end].settle(&mut self.ways[1 - end], &mut self.rings[1 - end]);
            }
        }
    }
}

#[test]
fn no_doorbell_is_left_to_a_program_that_was_killed() {
    let segments = [(); 2].map(|()| Segment::new(1 << 16));
    let halves = [0, 1].map(|end: usize| {
        let memory = Memory { area: segments[end].area(), geometry: segments[end].geometry };
        Half::new(end, memory)
    });
    let mut pair = Pair { halves, rings: Default::default(), ways: Default::default() };
    // End 0 sleeps, to be woken by a byte, and end 1 sends.
    let (tx, ring) = (Tx::default(), segments[1].ring(1));
    assert!(tx.push_mark(&ring, Mark::Start(0)));
    with_buffers(&mut [1; 8], &[], |from| tx.push(&ring, from));
    segments[0].ring(1).control().data_wish().want(WANT_BYTE);
    pair.pass();
    assert_eq!(
        segments[0].ring(1).control().sender.bells.load(std::sync::atomic::Ordering::Relaxed),
        1
    );
    // It is killed while the byte is on its way.
    pair.halves[0].gone();
    pair.pass();
    assert!(!pair.halves[0].has_parted() && pair.rings[0].said.is_empty());
    pair.rings[1].puts = true;
    pair.pass();
    assert_eq!(pair.rings[0].said, ["take 1", "part"]);
    assert!(pair.halves[0].has_parted());
    // For one that is gone none is put.
    segments[0].ring(1).control().data_wish().want(WANT_BYTE);
    with_buffers(&mut [1; 8], &[], |from| tx.push(&ring, from));
    pair.pass();
    assert_eq!(
        segments[0].ring(1).control().sender.bells.load(std::sync::atomic::Ordering::Relaxed),
        1
    );
}
