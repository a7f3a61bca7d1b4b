//! The handover between kernel and ring: first every order of steps of a small model, then random ones on a real ring.
#![cfg(not(loom))]

mod segment;

use proptest::prelude::*;
use ringlet_core::handover::{Head, Receiving, Seen, Sending, Step};
use ringlet_core::ring::{Mark, Next, Rx, SegmentRing, Tx};
use segment::{Segment, with_buffers};
use std::collections::{HashSet, VecDeque};

/// What the sender does in one step, and the receiver does in one: nothing happens between the halves of a step, anything
/// between two steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    /// The next byte of the stream, on the path of the moment.
    Send,
    Doorbell,
    Start,
    Back,
    Close,
    /// The receiver's looks, in the order of the rule under test, and what it does then.
    Look,
    /// As `Look`, but where the step says "at most", the receiver takes a single byte.
    LookAndTakeOne,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Item {
    Byte(u8),
    Start(u64),
    Back(u64),
}

/// The parts of `Seen` that change under the receiver's eyes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Ended,
    Waiting,
    Ring,
}

const RIGHT: [Part; 3] = [Part::Ended, Part::Waiting, Part::Ring];

struct World {
    order: [Part; 3],
    sending_in_ring: bool,
    sent: u8,
    written: u64,
    /// Bytes of the stream, and doorbells (`None`).
    kernel: VecDeque<Option<u8>>,
    ended: bool,
    ring: VecDeque<Item>,
    receiving: Receiving,
    looks: usize,
    seen: Seen,
    step: Option<Step>,
    got: u8,
    finished: bool,
}

impl World {
    fn new(order: [Part; 3]) -> World {
        World {
            order,
            sending_in_ring: false,
            sent: 0,
            written: 0,
            kernel: VecDeque::new(),
            ended: false,
            ring: VecDeque::new(),
            receiving: Receiving::default(),
            looks: 0,
            seen: Seen { ended: false, consumed: 0, waiting: 0, ring: Head::Empty },
            step: None,
            got: 0,
            finished: false,
        }
    }

    /// Everything that the future depends on.
    fn key(&self) -> String {
        let sender = (self.sending_in_ring, self.sent, self.written, self.ended);
        let between = (&self.kernel, &self.ring);
        let receiver = (&self.receiving, self.looks, &self.seen, self.step, self.got);
        format!("{sender:?}{between:?}{receiver:?}{}", self.finished)
    }

    fn can(&self, next: Move) -> bool {
        match next {
            Move::Send | Move::Close => !self.ended,
            Move::Start => !self.ended && !self.sending_in_ring,
            Move::Doorbell | Move::Back => !self.ended && self.sending_in_ring,
            Move::Look => !self.finished,
            Move::LookAndTakeOne => matches!(self.step, Some(Step::Read(2..))),
        }
    }

    fn apply(&mut self, next: Move) -> Result<(), String> {
        match next {
            Move::Send if self.sending_in_ring => {
                self.ring.push_back(Item::Byte(self.sent));
                self.sent += 1;
            }
            Move::Send => {
                self.write(Some(self.sent));
                self.sent += 1;
            }
            Move::Doorbell => self.write(None),
            Move::Start => {
                self.ring.push_back(Item::Start(self.written));
                self.sending_in_ring = true;
            }
            Move::Back => {
                self.ring.push_back(Item::Back(self.written));
                self.sending_in_ring = false;
            }
            Move::Close => self.ended = true,
            Move::Look | Move::LookAndTakeOne => return self.receive(next),
        }
        Ok(())
    }

    fn write(&mut self, byte: Option<u8>) {
        self.kernel.push_back(byte);
        self.written += 1;
    }

    fn receive(&mut self, how: Move) -> Result<(), String> {
        if let Some(step) = self.step.take() {
            return self.act(step, how == Move::LookAndTakeOne);
        }
        match self.order[self.looks] {
            Part::Ended => self.seen.ended = self.ended,
            Part::Waiting => self.seen.waiting = self.kernel.len() as u64,
            Part::Ring => {
                self.seen.ring = match self.ring.front() {
                    None => Head::Empty,
                    Some(Item::Byte(_)) => Head::Bytes,
                    Some(&Item::Start(at)) => Head::Mark(Mark::Start(at)),
                    Some(&Item::Back(at)) => Head::Mark(Mark::Back(at)),
                }
            }
        }
        self.looks += 1;
        if self.looks == self.order.len() {
            self.looks = 0;
            self.step = Some(self.receiving.next(&self.seen));
        }
        Ok(())
    }

    fn act(&mut self, step: Step, take_one: bool) -> Result<(), String> {
        match step {
            Step::Read(n) => {
                for _ in 0..if take_one { 1 } else { n } {
                    let byte = self.take_from_kernel();
                    self.deliver(byte.ok_or("a doorbell read as a byte of the stream")?)?;
                }
            }
            Step::Discard(n) => {
                for _ in 0..n {
                    if self.take_from_kernel().is_some() {
                        return Err("a byte of the stream thrown away".into());
                    }
                }
            }
            Step::Pop => match self.ring.pop_front() {
                Some(Item::Byte(byte)) => self.deliver(byte)?,
                other => return Err(format!("popped {other:?}")),
            },
            Step::PassMark => {
                self.ring.pop_front();
            }
            Step::Wait => {}
            Step::End if self.ended && self.got == self.sent => self.finished = true,
            Step::End => return Err("the end before the end".into()),
            Step::Broken => return Err("an honest sender taken for a liar".into()),
        }
        Ok(())
    }

    fn take_from_kernel(&mut self) -> Option<u8> {
        self.seen.consumed += 1;
        self.kernel.pop_front().expect("takes what it has counted")
    }

    fn deliver(&mut self, byte: u8) -> Result<(), String> {
        if byte != self.got {
            return Err(format!("byte {byte} where {} was due", self.got));
        }
        self.got += 1;
        Ok(())
    }

    /// The sender has ended: alone, the receiver gets everything and then the end, in a bounded number of steps.
    fn run_out(mut self) -> Result<(), String> {
        for _ in 0..200 {
            if self.finished {
                return Ok(());
            }
            self.receive(Move::Look)?;
        }
        Err("stuck".into())
    }
}

fn replay(order: [Part; 3], path: &[Move]) -> Result<World, String> {
    let mut world = World::new(order);
    path.iter().try_for_each(|&next| world.apply(next))?;
    Ok(world)
}

/// Every order of steps in which the sender makes at most `moves`: the first that goes wrong, or how many states there are.
fn explore(order: [Part; 3], moves: usize) -> Result<usize, String> {
    const ALL: [Move; 7] = [
        Move::Send,
        Move::Doorbell,
        Move::Start,
        Move::Back,
        Move::Close,
        Move::Look,
        Move::LookAndTakeOne,
    ];
    let mut known = HashSet::new();
    let mut paths = vec![(Vec::new(), 0)];
    while let Some((path, made)) = paths.pop() {
        let wrong = |error| format!("{error} after {path:?}");
        let world = replay(order, &path).map_err(wrong)?;
        if !known.insert((world.key(), made)) {
            continue;
        }
        for next in ALL {
            let receivers = matches!(next, Move::Look | Move::LookAndTakeOne);
            if world.can(next) && (receivers || made < moves) {
                paths.push(([&path[..], &[next]].concat(), made + !receivers as usize));
            }
        }
        if world.ended {
            world.run_out().map_err(wrong)?;
        }
    }
    Ok(known.len())
}

#[test]
fn every_order_of_steps() {
    let states = explore(RIGHT, 7).unwrap_or_else(|error| panic!("{error}"));
    assert!(states > 50_000, "only {states} states: the model has lost its moves");
}

#[test]
fn the_order_of_looking_matters() {
    let ring_first = explore([Part::Ended, Part::Ring, Part::Waiting], 4).unwrap_err();
    assert!(
        ring_first.contains("a doorbell read") || ring_first.contains("thrown away"),
        "{ring_first}"
    );
    let ended_late = explore([Part::Waiting, Part::Ended, Part::Ring], 4).unwrap_err();
    assert!(ended_late.contains("the end before the end"), "{ended_late}");
}

#[derive(Clone, Debug)]
enum Real {
    Send(usize),
    Doorbell,
    Start,
    Back,
    /// The receiver's next look, or what it does after its last, with room for so many bytes.
    Receive(usize),
}

fn real() -> impl Strategy<Value = Real> {
    prop_oneof![
        6 => prop_oneof![1..100usize, 1..40_000usize].prop_map(Real::Send),
        2 => Just(Real::Doorbell),
        2 => Just(Real::Start),
        1 => Just(Real::Back),
        20 => prop_oneof![1..100usize, 1..100_000usize].prop_map(Real::Receive),
    ]
}

/// Both machines and a ring as they are; the kernel's connection is a queue.
struct Ends {
    ring: SegmentRing,
    tx: Tx,
    rx: Rx,
    sending: Sending,
    receiving: Receiving,
    kernel: VecDeque<Option<u8>>,
    written: u64,
    ended: bool,
    sent: usize,
    got: usize,
    looks: usize,
    seen: Seen,
    finished: bool,
}

fn stream(at: usize) -> u8 {
    (at % 251) as u8
}

impl Ends {
    fn apply(&mut self, next: &Real) {
        match *next {
            Real::Send(n) if self.sending.in_ring() => {
                let mut bytes: Vec<u8> = (self.sent..self.sent + n).map(stream).collect();
                self.sent += with_buffers(&mut bytes, &[], |from| self.tx.push(&self.ring, from));
            }
            Real::Send(n) => {
                self.kernel.extend((self.sent..self.sent + n).map(|at| Some(stream(at))));
                self.sent += n;
                self.written += n as u64;
            }
            Real::Doorbell if self.sending.in_ring() => {
                self.kernel.push_back(None);
                self.written += 1;
            }
            Real::Doorbell => {}
            Real::Start => {
                let drained = self.tx.drained(&self.ring);
                let may = drained && !self.sending.in_ring();
                assert_eq!(self.sending.start(&self.tx, &self.ring, self.written), may);
            }
            Real::Back => {
                let may = self.sending.in_ring();
                assert_eq!(self.sending.back(&self.tx, &self.ring, self.written), may);
                assert!(!self.sending.in_ring(), "there is always a way back");
            }
            Real::Receive(room) => self.receive(room),
        }
    }

    fn receive(&mut self, room: usize) {
        self.looks += 1;
        match self.looks {
            1 => self.seen.ended = self.ended,
            2 => self.seen.waiting = self.kernel.len() as u64,
            3 => {
                self.seen.ring = match self.rx.mark(&self.ring) {
                    Some(mark) => Head::Mark(mark),
                    None if self.rx.ready(&self.ring) => Head::Bytes,
                    None => Head::Empty,
                }
            }
            _ => {
                self.looks = 0;
                self.act(room);
            }
        }
    }

    fn act(&mut self, room: usize) {
        match self.receiving.next(&self.seen) {
            Step::Read(n) => {
                for _ in 0..n.min(room as u64) {
                    assert_eq!(self.take(), Some(stream(self.got)));
                    self.got += 1;
                }
            }
            Step::Discard(n) => (0..n).for_each(|_| assert_eq!(self.take(), None)),
            Step::Pop => {
                let mut bytes = vec![0; room.min(1 << 16)];
                let next = with_buffers(&mut bytes, &[], |to| self.rx.pop(&self.ring, to));
                let Next::Bytes(n, _) = next else { panic!("{next:?}") };
                for byte in &bytes[..n] {
                    assert_eq!(*byte, stream(self.got));
                    self.got += 1;
                }
            }
            Step::PassMark => {
                self.rx.pass_mark(&self.ring);
            }
            Step::Wait => {}
            Step::End => self.finished = true,
            Step::Broken => panic!("an honest sender taken for a liar"),
        }
    }

    fn take(&mut self) -> Option<u8> {
        self.seen.consumed += 1;
        self.kernel.pop_front().expect("takes what it has counted")
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_lost_on_a_real_ring(moves in proptest::collection::vec(real(), 1..400)) {
        let segment = Segment::new(1 << 16);
        let mut ends = Ends {
            ring: segment.ring(0),
            tx: Tx::default(),
            rx: Rx::default(),
            sending: Sending::default(),
            receiving: Receiving::default(),
            kernel: VecDeque::new(),
            written: 0,
            ended: false,
            sent: 0,
            got: 0,
            looks: 0,
            seen: Seen { ended: false, consumed: 0, waiting: 0, ring: Head::Empty },
            finished: false,
        };
        for next in &moves {
            ends.apply(next);
        }
        ends.ended = true;
        for _ in 0..10_000 {
            if !ends.finished {
                ends.receive(1 << 20);
            }
        }
        prop_assert!(ends.finished && ends.got == ends.sent);
    }

    /// Whatever a lying peer makes us see: some step, and no kernel byte is taken that was not counted.
    #[test]
    fn any_sight_has_an_answer(
        sights in proptest::collection::vec(
            (any::<bool>(), any::<u64>(), 0..9u64, 0..4u8, 0..9u64, any::<u64>()),
            1..50,
        ),
    ) {
        let receiving = Receiving::default();
        for (ended, wild, waiting, head, near, far) in sights {
            let (consumed, at) = if wild % 4 == 0 { (wild, far) } else { (4, near) };
            let ring = match head {
                0 => Head::Empty,
                1 => Head::Bytes,
                2 => Head::Mark(Mark::Start(at)),
                _ => Head::Mark(Mark::Back(at)),
            };
            match receiving.next(&Seen { ended, consumed, waiting, ring }) {
                Step::Read(n) | Step::Discard(n) => prop_assert!(0 < n && n <= waiting),
                Step::Pop => prop_assert!(ring == Head::Bytes && receiving.in_ring()),
                Step::PassMark => prop_assert!(matches!(ring, Head::Mark(_))),
                Step::End => prop_assert!(ended && waiting == 0 && ring == Head::Empty),
                Step::Wait | Step::Broken => {}
            }
        }
    }
}
