//! The link dies between any two of its turns, over a fabric that keeps no order: what the receiver has had, and what the sender sends again since it has
//! no credit for it, are together the stream, at every byte (`socket::orphan`). Against a plain count of bytes.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use proptest::prelude::*;
use ringlet_adapter::{Bells, Link, Segment as End};
use ringlet_core::ring::{Mark, Next, Rx, SegmentRing, Tx};
use segment::{Segment, with_buffers};
use std::task::Poll;

struct Silent;

impl Bells for Silent {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) -> bool {
        true
    }
    fn byte(&mut self, _to: usize) -> Poll<bool> {
        Poll::Ready(true)
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        Poll::Ready(())
    }
}

fn byte(place: usize) -> u8 {
    (place ^ place >> 8 ^ place >> 15) as u8
}

/// Takes so much of the stream, of which `got` bytes were taken before.
fn take(rx: &Rx, to: &SegmentRing, got: &mut usize, most: usize) -> Next {
    let mut bytes = vec![0; most];
    let next = with_buffers(&mut bytes, &[], |list| rx.pop(to, list));
    if let Next::Bytes(n, _) = next {
        assert!(bytes[..n].iter().zip(*got..).all(|(found, place)| *found == byte(place)));
        *got += n;
    }
    next
}

#[derive(Clone, Debug)]
enum Op {
    Push(usize),
    Pop(usize),
    Pass,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => prop_oneof![1..60usize, 1..20_000usize].prop_map(Op::Push),
        3 => prop_oneof![1..60usize, 1..20_000usize].prop_map(Op::Pop),
        5 => Just(Op::Pass),
    ]
}

proptest! {
    #[test]
    fn nothing_is_lost_or_had_twice(
        seed in any::<Option<u64>>(),
        ops in proptest::collection::vec(op(), 1..400),
    ) {
        let segments = [(); 2].map(|()| Segment::new(1 << 16));
        let ends = [0, 1].map(|nth: usize| End { area: segments[nth].area(), geometry: segments[nth].geometry });
        let mut link = Link::new(seed, ends);
        let (from, to) = (segments[0].ring(0), segments[1].ring(0));
        let (tx, rx) = (Tx::default(), Rx::default());
        let (mut sent, mut got) = (0, 0);
        for op in ops {
            match op {
                Op::Push(n) => {
                    let mut bytes: Vec<u8> = (sent..sent + n).map(byte).collect();
                    sent += with_buffers(&mut bytes, &[], |list| tx.push(&from, list));
                }
                Op::Pop(n) => drop(take(&rx, &to, &mut got, n)),
                Op::Pass => drop(link.pass(&mut Silent)),
            }
        }
        // It is dead: what has come comes to the program.
        while take(&rx, &to, &mut got, 1000) != Next::Empty {}
        prop_assert_eq!(rx.end(&to), rx.position());
        // What is sent again begins with the oldest record without credit.
        tx.take_credit(&from);
        let again = tx.outstanding_bytes(&from);
        let had = rx.taken_since(&to, tx.progress()).expect("headers that stand") as usize;
        prop_assert_eq!(sent - again + had, got);
        // What one fabric has let pass before what is missing is not seen behind the marks.
        let marks = [Mark::Start(5), Mark::Back(9)];
        rx.put_marks(&to, &marks);
        for mark in marks {
            prop_assert_eq!(take(&rx, &to, &mut got, 1), Next::Mark(mark));
            rx.pass_mark(&to);
        }
        prop_assert_eq!(take(&rx, &to, &mut got, 1), Next::Empty);
    }
}
