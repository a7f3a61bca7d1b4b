//! A link that is slow amid its pass: an end has severed itself meanwhile, and a copy has taken the place of its segment. What the other end is told of
//! is in that copy.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{Bells, Link, Progress, Segment as End};
use ringlet_core::layout::{WANT_BYTE, control};
use ringlet_core::memory::Area;
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Mark, Rx, SegmentRing, Tx};
use ringlet_core::sync::Ordering;
use ringlet_linux::map::PrivateCopy;
use segment::{Segment, with_buffers};
use std::task::Poll;

/// When something was put into the segment of end 1, end 0 severs itself: this is what it goes on with.
struct Slow {
    end: Area,
    copy: Option<PrivateCopy>,
    rung: usize,
}

impl Bells for Slow {
    fn published(&mut self, end: usize) {
        if end == 1 && self.copy.is_none() {
            control(self.end, 0).sever();
            self.copy = Some(PrivateCopy::of_area(self.end).unwrap());
        }
    }
    fn event(&mut self, _end: usize) -> bool {
        true
    }
    fn byte(&mut self, to: usize) -> Poll<bool> {
        self.rung += usize::from(to == 0);
        Poll::Ready(true)
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        Poll::Ready(())
    }
}

fn push(tx: &Tx, to: &SegmentRing) {
    assert!(with_buffers(&mut [1u8; 30], &[], |list| tx.push(to, list)) > 0);
}

#[test]
fn the_other_end_is_told_of_nothing_that_is_not_in_the_copy() {
    for (asks, wishes) in [(true, false), (false, true), (true, true)] {
        let segments = [(); 2].map(|()| Segment::new(1 << 16));
        let ends = [0, 1]
            .map(|nth: usize| End { area: segments[nth].area(), geometry: segments[nth].geometry });
        let mut link = Link::new(None, ends);
        let mut slow = Slow { end: segments[0].area(), copy: None, rung: 0 };
        let (ours, theirs) = (segments[0].ring(0), segments[1].ring(1));
        let (tx, other) = (Tx::default(), Tx::default());
        assert!(other.push_mark(&theirs, Mark::Start(0)));
        assert_eq!(link.pass(&mut slow), Progress::Busy);
        push(&tx, &ours);
        push(&other, &theirs);
        if wishes {
            segments[0].ring(1).control().data_wish().want(WANT_BYTE);
        }
        let asked = asks.then(|| theirs.control().ask_delivery());
        let _ = link.pass(&mut slow);
        let copy = slow.copy.expect("it was put there");
        let seen = SegmentRing::new(copy.area(), ends[0].geometry, 1);
        let has_come = Rx::default().end(&seen) == 2;
        let told = asked.is_some_and(|asked| theirs.control().is_delivered(asked));
        assert!(has_come || !told, "it was told that all is there");
        // (Who counts what others have rung would take a byte of the program's for one more.)
        let counted = seen.control().sender.bells.load(Ordering::Relaxed);
        assert!(slow.rung as u64 <= counted, "it was rung for nothing");
        assert_eq!(link.pass(&mut slow), Progress::Failed);
        copy.forget();
    }
}
