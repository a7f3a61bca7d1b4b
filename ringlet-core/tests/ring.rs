//! The ring against a plain queue: random operations on real memory, both ends in one thread.
#![cfg(not(loom))]

mod segment;

use proptest::prelude::*;
use ringlet_core::layout::*;
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::ring::{Counted, Mark, Next, Rx, SegmentRing, Tx};
use segment::{Segment, with_buffers};
use std::collections::VecDeque;

#[derive(Clone, Debug)]
enum Op {
    /// One call of `push` with so many bytes, cut into buffers of these lengths (the last one takes the rest).
    Push(usize, Vec<usize>),
    /// Push until all is sent or nothing moves.
    Send(usize),
    /// Push pieces of this size until nothing moves.
    Fill(usize),
    /// One call of `pop` into buffers of these lengths.
    Pop(Vec<usize>),
    /// Pop into one buffer until so many bytes (or all) are read.
    Receive(usize),
    Peek(Vec<usize>),
    Available,
    /// Push a mark; the number is its value.
    Start(u64),
    Back(u64),
    /// A sender that can't write announces that it waits.
    Writable,
    Drained,
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        6 => 1..=INLINE_BYTES + 8,
        3 => 1..5000usize,
        2 => 1..200_000usize,
        1 => Just(RECORD_MAX_BYTES),
    ]
}

fn splits() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        2 => Just(Vec::new()),
        1 => proptest::collection::vec(prop_oneof![Just(0), 1..70usize, 1..20_000usize], 0..6),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (size(), splits()).prop_map(|(n, cuts)| Op::Push(n, cuts)),
        3 => size().prop_map(Op::Send),
        1 => size().prop_map(Op::Fill),
        8 => proptest::collection::vec(size(), 1..4).prop_map(Op::Pop),
        4 => (1..1_200_000usize).prop_map(Op::Receive),
        1 => Just(Op::Receive(usize::MAX)),
        2 => proptest::collection::vec(size(), 1..4).prop_map(Op::Peek),
        2 => Just(Op::Available),
        1 => any::<u64>().prop_map(Op::Start),
        1 => any::<u64>().prop_map(Op::Back),
        2 => Just(Op::Writable),
        1 => Just(Op::Drained),
    ]
}

struct Model {
    memory: SegmentRing,
    ring_bytes: usize,
    tx: Tx,
    rx: Rx,
    /// Of all that the receiver has counted.
    counted: Counted,
    /// Bytes sent and not received, and the marks among them: how many of those bytes stand before each.
    bytes: VecDeque<u8>,
    marks: VecDeque<(usize, Mark)>,
    sent: usize,
    /// The stream is this over and over; its length has no factor in common with any size in the ring.
    pattern: Vec<u8>,
    /// The sender waits for room: set when it found none, taken back by a receiver whose release says "look".
    waiting: bool,
}

impl Model {
    fn new(segment: &Segment, direction: usize) -> Model {
        Model {
            memory: segment.ring(direction),
            ring_bytes: segment.geometry.ring_bytes,
            tx: Tx::default(),
            rx: Rx::default(),
            counted: Counted::default(),
            bytes: VecDeque::new(),
            marks: VecDeque::new(),
            sent: 0,
            pattern: (0..60491usize).map(|at| ((at % 251) ^ (at / 251)) as u8).collect(),
            waiting: false,
        }
    }

    /// In step up to the last slot of the hot page, whose record is followed by a rewind.
    fn at_the_rewind(segment: &Segment) -> Model {
        let mut model = Model::new(segment, 0);
        for _ in 0..HOT_SLOT_COUNT - 1 {
            model.step(&Op::Push(1, vec![]));
            model.step(&Op::Pop(vec![1]));
        }
        model
    }

    fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.marks.is_empty()
    }

    fn check(&self, got: &[u8]) {
        let (front, back) = self.bytes.as_slices();
        let (first, second) = got.split_at(got.len().min(front.len()));
        assert!(first == &front[..first.len()], "bytes lost, doubled or reordered");
        assert!(second == &back[..second.len()], "bytes lost, doubled or reordered");
    }

    /// Bytes before the first mark.
    fn readable(&self) -> usize {
        self.marks.front().map_or(self.bytes.len(), |&(before, _)| before)
    }

    fn push(&mut self, wanted: usize, cuts: &[usize]) -> usize {
        let mut data = Vec::with_capacity(wanted + self.pattern.len());
        data.extend_from_slice(&self.pattern[self.sent % self.pattern.len()..]);
        while data.len() < wanted {
            data.extend_from_slice(&self.pattern);
        }
        data.truncate(wanted);
        let was_writable = self.waiting && self.tx.writable(&self.memory);
        let (n, left) = with_buffers(&mut data, cuts, |from| {
            (self.tx.push(&self.memory, from), from.remaining())
        });
        assert_eq!(n + left, wanted, "push must take what it sends and nothing else");
        if wanted <= STREAM_INLINE_BYTES {
            assert!(n == 0 || n == wanted);
        }
        if n == 0 {
            assert!(!self.is_empty(), "an empty ring must accept something");
            assert!(
                !was_writable && !self.tx.writable(&self.memory),
                "writable, yet nothing moves"
            );
            self.waiting = true;
        }
        self.bytes.extend(&data[..n]);
        self.sent += n;
        n
    }

    fn fill(&mut self, piece: usize) {
        let was_empty = self.is_empty();
        let (mut records, mut bytes) = (0, 0);
        loop {
            match self.push(piece, &[]) {
                0 => break,
                n => (records, bytes) = (records + 1, bytes + n),
            }
        }
        if was_empty {
            // What a program may count on: half a page of records, and with large ones nearly the whole ring.
            assert!(records >= HOT_SLOT_COUNT / 2 - 2 || bytes >= self.ring_bytes / 2);
            let large = piece >= RECORD_MAX_BYTES && self.ring_bytes <= 1 << 19;
            assert!(!large || bytes >= self.ring_bytes - 2 * RECORD_MAX_BYTES, "{bytes}");
        }
    }

    /// The receiver has released something; `look` says whether it looks for a waiting sender.
    fn released(&mut self, look: bool) {
        if look && self.tx.writable(&self.memory) {
            self.waiting = false;
        }
        assert!(!(self.waiting && self.is_empty()), "a waiting sender was forgotten");
    }

    fn pop(&mut self, lens: &[usize]) -> usize {
        let room = lens.iter().sum::<usize>();
        let mut data = vec![0; room];
        let (next, left) =
            with_buffers(&mut data, lens, |to| (self.rx.pop(&self.memory, to), to.remaining()));
        let ready = self.rx.ready(&self.memory);
        match next {
            Next::Empty => {
                assert!(self.is_empty() && !ready);
                0
            }
            Next::Bytes(n, look) => {
                assert!(0 < n && n <= room && n <= self.readable() && left == room - n);
                assert!(
                    self.bytes.iter().take(n).eq(&data[..n]),
                    "bytes lost, doubled or reordered"
                );
                self.bytes.drain(..n);
                for (before, _) in &mut self.marks {
                    *before -= n;
                }
                self.released(look);
                n
            }
            Next::Mark(mark) => {
                assert_eq!(self.marks.front(), Some(&(0, mark)));
                assert_eq!(self.rx.mark(&self.memory), Some(mark));
                self.marks.pop_front();
                let look = self.rx.pass_mark(&self.memory);
                self.released(look);
                0
            }
            Next::Corrupt => panic!("corrupt"),
        }
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Push(n, cuts) => {
                self.push(*n, cuts);
            }
            Op::Send(n) => {
                let mut left = *n;
                while left > 0 {
                    match self.push(left, &[]) {
                        0 => break,
                        n => left -= n,
                    }
                }
            }
            Op::Fill(piece) => self.fill(*piece),
            Op::Pop(lens) => {
                self.pop(lens);
            }
            Op::Receive(n) => {
                let mut left = *n;
                while left > 0 && !self.is_empty() {
                    left -= self.pop(&[left.min(1 << 16)]);
                }
            }
            Op::Peek(lens) => {
                let mut data = vec![0; lens.iter().sum()];
                let n = with_buffers(&mut data, lens, |to| self.rx.peek(&self.memory, to));
                assert_eq!(n, data.len().min(self.readable()));
                self.check(&data[..n]);
            }
            Op::Available => {
                assert_eq!(self.rx.available(&self.memory, usize::MAX), self.readable());
                let since = self.rx.available_since(&self.memory, &self.counted);
                assert_eq!(since, (self.readable(), self.rx.mark_ahead(&self.memory)));
                let some = self.rx.available(&self.memory, 1);
                assert!(some <= self.readable() && (some > 0) == (self.readable() > 0));
                assert_eq!(self.rx.ready(&self.memory), !self.is_empty());
                assert_eq!(self.rx.has_bytes(&self.memory), self.readable() > 0);
                let outstanding = self.tx.outstanding_bytes(&self.memory);
                assert_eq!(outstanding, self.bytes.len() + self.rx.used() as usize);
            }
            Op::Start(value) => self.mark(Mark::Start(*value)),
            Op::Back(value) => self.mark(Mark::Back(*value)),
            Op::Writable => {
                let writable = self.tx.writable(&self.memory);
                assert!(writable || !self.is_empty());
                self.waiting = !writable;
            }
            Op::Drained => assert_eq!(self.tx.drained(&self.memory), self.is_empty()),
        }
    }

    /// The receiver leaves the ring: what it has not read is found by the sender, in order.
    fn leave(mut self) {
        self.tx.take_credit(&self.memory);
        let (mut piece, mut used) = ([0; 4096], self.rx.used() as usize);
        loop {
            let rest = self.tx.oldest(&self.memory, used, &mut piece);
            if rest.is_empty() {
                used = 0;
                if !self.tx.pass_oldest(&self.memory) {
                    break;
                }
                continue;
            }
            self.check(rest);
            self.bytes.drain(..rest.len());
            used += rest.len();
        }
        assert!(self.bytes.is_empty());
    }

    fn mark(&mut self, mark: Mark) {
        if self.tx.push_mark(&self.memory, mark) {
            self.marks.push_back((self.bytes.len(), mark));
        } else {
            assert!(!self.marks.is_empty(), "there is always room for one mark");
        }
    }
}

/// A quarter of the usual number of cases, since each is long; `PROPTEST_CASES` makes it more.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { cases: usual.cases / 4, failure_persistence: None, ..usual }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn behaves_as_a_queue(
        ring_bits in RING_MIN_BYTES.trailing_zeros()..=20,
        direction in 0..2usize,
        ops in proptest::collection::vec(op(), 1..400),
        leaves in any::<bool>(),
    ) {
        let segment = Segment::new(1 << ring_bits);
        let mut model = Model::new(&segment, direction);
        for op in &ops {
            model.step(op);
        }
        if leaves {
            model.leave();
            return Ok(());
        }
        model.step(&Op::Receive(usize::MAX));
        prop_assert!(model.is_empty() && model.tx.drained(&model.memory));
    }

    /// Request and answer stay in the hot page and the hot data, whatever their sizes: only these lines are ever touched.
    #[test]
    fn lockstep_stays_hot(sizes in proptest::collection::vec(1..10_000usize, 100..600)) {
        let segment = Segment::new(1 << 20);
        let memory = segment.ring(0);
        let (tx, rx) = (Tx::default(), Rx::default());
        let mut data = vec![1; 10_000];
        for n in sizes {
            let list = [Buffer { base: data.as_mut_ptr(), len: n }];
            // SAFETY: `data` is valid for `n` bytes.
            prop_assert_eq!(tx.push(&memory, &mut unsafe { Buffers::new(&list) }), n);
            // SAFETY: as above.
            let next = rx.pop(&memory, &mut unsafe { Buffers::new(&list) });
            prop_assert!(matches!(next, Next::Bytes(got, _) if got == n));
        }
        let geometry = segment.geometry;
        let slots = geometry.slot_offset(0, HOT_SLOT_COUNT)..geometry.slot_offset(1, 0);
        let data = geometry.data_offset(0) + HOT_DATA_BYTES as usize + 10_000..geometry.data_offset(1);
        for part in [slots, data] {
            let mut bytes = vec![1; part.len()];
            // SAFETY: `bytes` is valid for its length.
            let read = unsafe { segment.area().read(part.start, bytes.as_mut_ptr(), part.len()) };
            prop_assert!(read);
            prop_assert!(bytes.iter().all(|&byte| byte == 0));
        }
    }
}

/// One unread byte does not make a socket unwritable, wherever it lies.
#[test]
fn writable_after_a_rewind() {
    let segment = Segment::new(RING_MIN_BYTES);
    let mut model = Model::at_the_rewind(&segment);
    model.step(&Op::Push(1, vec![]));
    assert!(model.tx.writable(&model.memory));
}

/// The only boundary on the way to an empty ring may be the one under a mark.
#[test]
fn a_mark_wakes_the_waiter() {
    let segment = Segment::new(RING_MIN_BYTES);
    let mut model = Model::at_the_rewind(&segment);
    model.step(&Op::Start(7));
    model.step(&Op::Fill(1));
    assert!(model.waiting);
    model.step(&Op::Receive(usize::MAX));
}

/// Bytes that came another way are passed over, across records and within one; or nothing is, where there are no more than these.
#[test]
fn what_came_otherwise_is_passed_over() {
    let segment = Segment::new(RING_MIN_BYTES);
    let (memory, tx, rx) = (segment.ring(0), Tx::default(), Rx::default());
    for mut record in [[1u8; 10], [2; 10], [3; 10]] {
        assert_eq!(with_buffers(&mut record, &[], |from| tx.push(&memory, from)), 10);
    }
    let take = |n: usize| {
        let mut bytes = vec![0; n];
        with_buffers(&mut bytes, &[], |to| rx.pop(&memory, to));
        bytes
    };
    assert_eq!(take(3), [1; 3]);
    assert!(!rx.skip(&memory, 27));
    assert!(rx.skip(&memory, 9));
    assert_eq!(take(1), [2]);
    assert!(rx.skip(&memory, 7) && rx.skip(&memory, 2) && rx.skip(&memory, 0));
    assert_eq!(take(8), [3; 8]);
    assert!(!rx.skip(&memory, 0) && tx.drained(&memory));
}
