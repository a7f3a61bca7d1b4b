//! Message queue, mailbox and locked buffer against plain queues: random operations on real memory, all ends in one thread.
#![cfg(not(loom))]

mod segment;

use proptest::prelude::*;
use ringlet_core::layout::*;
use ringlet_core::locked::Locked;
use ringlet_core::mailbox::{Inbox, announce};
use ringlet_core::mapped::Lane;
use ringlet_core::queue::{self, InPlace, Message, Next, Refused, Rx, Tx};
use ringlet_core::sync::Ordering;
use segment::{Pages, Segment, with_buffers};
use std::collections::VecDeque;

#[derive(Clone, Debug)]
enum Op {
    /// Send so many bytes, cut into buffers of these lengths.
    Push(usize, Vec<usize>),
    /// Reserve so many, write them in place, send only a part (in thousandths).
    InPlace(usize, usize),
    /// Reserve, and forget it.
    Forget(usize),
    /// Send messages of this length until one is refused.
    Fill(usize),
    /// Receive so many, into buffers of these lengths.
    Receive(usize, Vec<usize>),
    /// Look without receiving, in place.
    Peek,
    Writable,
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        1 => Just(0),
        6 => 1..=INLINE_BYTES + 8,
        3 => 1..5000usize,
        1 => 1..200_000usize,
        1 => Just(MESSAGE_MAX_BYTES),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let cuts = || proptest::collection::vec(0..3000usize, 0..4);
    prop_oneof![
        6 => (size(), cuts()).prop_map(|(n, cuts)| Op::Push(n, cuts)),
        3 => (size(), 0..=1000usize).prop_map(|(n, part)| Op::InPlace(n, part)),
        1 => size().prop_map(Op::Forget),
        1 => size().prop_map(Op::Fill),
        6 => (1..4usize, cuts()).prop_map(|(n, cuts)| Op::Receive(n, cuts)),
        1 => (1..2000usize, cuts()).prop_map(|(n, cuts)| Op::Receive(n, cuts)),
        2 => Just(Op::Peek),
        1 => Just(Op::Writable),
    ]
}

/// The bytes of message `number`.
fn content(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number.wrapping_mul(31) + at % 251 + at / 251) as u8).collect()
}

fn in_place<M: InPlace>(memory: &M, message: &Message) -> Vec<u8> {
    let from = message.pointer(memory);
    // SAFETY: a message's bytes, and nobody writes to them in this test.
    (0..message.len()).map(|at| unsafe { from.add(at).read_volatile() }).collect()
}

struct Model<M> {
    memory: M,
    tx: Tx,
    rx: Rx,
    messages: VecDeque<Vec<u8>>,
    sent: usize,
    /// The sender waits for room.
    waiting: bool,
}

impl<M: InPlace> Model<M> {
    fn new(memory: M) -> Model<M> {
        let (tx, rx) = (Tx::default(), Rx::default());
        Model { memory, tx, rx, messages: VecDeque::new(), sent: 0, waiting: false }
    }

    fn taken(&mut self, message: Vec<u8>) {
        self.messages.push_back(message);
        self.sent += 1;
    }

    fn refused(&mut self, refused: Refused, len: usize) {
        if refused == Refused::TooLong {
            return assert!(len > queue::max_bytes(&self.memory));
        }
        assert!(!self.messages.is_empty(), "an empty queue must take any message");
        assert!(!self.tx.writable(&self.memory), "writable, yet refused");
        self.waiting = true;
    }

    fn push(&mut self, len: usize, cuts: &[usize]) -> bool {
        let mut data = content(self.sent, len);
        match with_buffers(&mut data, cuts, |from| self.tx.push(&self.memory, from)) {
            Ok(()) => self.taken(data),
            Err(refused) => {
                self.refused(refused, len);
                return false;
            }
        }
        true
    }

    fn receive(&mut self, cuts: &[usize]) {
        let message = match self.rx.peek(&self.memory) {
            Next::Empty => {
                return assert!(self.messages.is_empty() && !self.rx.ready(&self.memory));
            }
            Next::Message(message) => message,
            Next::Corrupt => panic!("corrupt"),
        };
        let expected = self.messages.pop_front().expect("a message from nowhere");
        assert_eq!(message.len(), expected.len(), "boundaries are kept");
        let mut data = vec![0; expected.len().max(cuts.iter().sum())];
        let n = with_buffers(&mut data, cuts, |to| message.copy_to(&self.memory, to));
        assert!(n == expected.len() && data[..n] == expected);
        let look = self.rx.release(&self.memory, message);
        if look && self.tx.writable(&self.memory) {
            self.waiting = false;
        }
        assert!(!(self.waiting && self.messages.is_empty()), "a waiting sender was forgotten");
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Push(len, cuts) => {
                self.push(*len, cuts);
            }
            Op::InPlace(len, part) => match self.tx.reserve(&self.memory, *len) {
                Ok(place) => {
                    let data = content(self.sent, len * part / 1000);
                    let to = place.pointer(&self.memory);
                    assert!(place.room() >= *len);
                    for (at, byte) in data.iter().enumerate() {
                        // SAFETY: within what was reserved.
                        unsafe { to.add(at).write_volatile(*byte) };
                    }
                    self.tx.commit(&self.memory, place, data.len());
                    self.taken(data);
                }
                Err(refused) => self.refused(refused, *len),
            },
            Op::Forget(len) => drop(self.tx.reserve(&self.memory, *len)),
            Op::Fill(len) => {
                let (was_empty, before) = (self.messages.is_empty(), self.sent);
                while self.push(*len, &[]) {}
                if was_empty && *len <= INLINE_BYTES {
                    let taken = self.sent - before;
                    let hot = self.memory.hot_slot_count();
                    assert!(taken + 2 >= hot / 2 && taken < self.memory.slot_count(), "{taken}");
                }
            }
            Op::Receive(n, cuts) => (0..*n).for_each(|_| self.receive(cuts)),
            Op::Peek => match self.rx.peek(&self.memory) {
                Next::Message(message) => {
                    assert!(in_place(&self.memory, &message) == *self.messages.front().unwrap());
                }
                Next::Empty => assert!(self.messages.is_empty()),
                Next::Corrupt => panic!("corrupt"),
            },
            Op::Writable => {
                let writable = self.tx.writable(&self.memory);
                assert!(writable || !self.messages.is_empty());
                self.waiting = !writable;
            }
        }
        assert_eq!(self.tx.drained(&self.memory), self.messages.is_empty());
        assert!(self.tx.outstanding(&self.memory) >= self.messages.len() as u64);
    }

    fn run(mut self, ops: &[Op]) {
        ops.iter().for_each(|op| self.step(op));
        self.step(&Op::Receive(self.messages.len() + 1, vec![]));
        assert!(self.messages.is_empty());
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() }
}

fn lane(pages: &Pages, geometry: LaneGeometry, number: usize) -> Lane {
    Lane::new(pages.area(), number * geometry.lane_bytes(), geometry)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_lane_behaves_as_a_queue_of_messages(
        slot_bits in 4..=10u32,
        ring_bits in 12..=20u32,
        ops in proptest::collection::vec(op(), 1..300),
    ) {
        let geometry = LaneGeometry::new(1 << slot_bits, 1 << ring_bits).unwrap();
        // Behind something else, and before.
        let pages = Pages::new(3 * geometry.lane_bytes());
        Model::new(lane(&pages, geometry, 1)).run(&ops);
        let neighbours = |at: usize| {
            let mut bytes = vec![1; geometry.lane_bytes()];
            // SAFETY: `bytes` is valid for its length.
            assert!(unsafe { pages.area().read(at, bytes.as_mut_ptr(), bytes.len()) });
            bytes.iter().all(|&byte| byte == 0)
        };
        prop_assert!(neighbours(0) && neighbours(2 * geometry.lane_bytes()));
    }

    #[test]
    fn a_connections_ring_behaves_as_a_queue_of_messages(
        direction in 0..2usize,
        ops in proptest::collection::vec(op(), 1..300),
    ) {
        let segment = Segment::new(1 << 18);
        Model::new(segment.ring(direction)).run(&ops);
    }

    /// Every message arrives, in its lane's order; no lane waits for ever while others keep on; bits that the receiver was not
    /// told of, or that say nothing, do no harm.
    #[test]
    fn a_mailbox_serves_every_lane(
        lanes in 1..=LANE_MAX_COUNT,
        ops in proptest::collection::vec((any::<u16>(), 0..8u8), 1..600),
    ) {
        let mut inbox = Inbox::default();
        let ready = Ready::default();
        let mut waiting = vec![VecDeque::new(); lanes];
        for (number, (lane, what)) in ops.iter().enumerate() {
            let lane = *lane as usize % lanes;
            match what {
                // A message, announced.
                0..=2 => {
                    waiting[lane].push_back(number);
                    announce(&ready, lane);
                }
                // Somebody hides all bits; somebody sets bits for nothing, even of lanes that are not there.
                3 => ready.words.iter().for_each(|word| word.store(0, Ordering::Relaxed)),
                4 => announce(&ready, number * 7),
                _ => {
                    let found = inbox.poll([&ready], lanes, |lane| !waiting[lane].is_empty());
                    if let Some(lane) = found {
                        prop_assert!(waiting[lane].pop_front().is_some());
                    }
                }
            }
        }
        // What was hidden is found while each lane has its turn.
        let left: usize = waiting.iter().map(VecDeque::len).sum();
        for _ in 0..left + lanes {
            if let Some(lane) = inbox.poll([&ready], lanes, |lane| !waiting[lane].is_empty()) {
                waiting[lane].pop_front();
            }
        }
        prop_assert!(waiting.iter().all(VecDeque::is_empty));
    }

    #[test]
    fn locked_buffers_carry_questions_and_answers(
        lens in proptest::collection::vec((size(), size()), 1..60),
    ) {
        let segment = Segment::new(RING_MIN_BYTES);
        let (there, back) = (segment.ring(0), segment.ring(1));
        let (client, server) = (Locked::client(), Locked::server());
        for (round, (question, answer)) in lens.into_iter().enumerate() {
            let (question, answer) = (question.min(RING_MIN_BYTES), answer.min(RING_MIN_BYTES));
            prop_assert!(client.our_turn() && !server.our_turn() && !server.ready(&there));
            exchange(&client, &server, &there, content(round, question));
            prop_assert!(server.our_turn() && !client.our_turn() && !client.ready(&back));
            exchange(&server, &client, &back, content(round + 1, answer));
        }
        let too_long = client.reserve(&there, MESSAGE_MAX_BYTES + 1);
        prop_assert_eq!(too_long.unwrap_err(), Refused::TooLong);
    }
}

fn exchange<M: InPlace>(from: &Locked, to: &Locked, memory: &M, data: Vec<u8>) {
    let place = from.reserve(memory, data.len()).unwrap();
    // SAFETY: `data` is valid for its length.
    unsafe { place.write(memory, 0, data.as_ptr(), data.len()) };
    from.commit(memory, place, data.len());
    assert_eq!(from.reserve(memory, 1).unwrap_err(), Refused::Full);
    assert!(to.ready(memory));
    let Next::Message(message) = to.peek(memory) else { panic!("no message") };
    assert!(in_place(memory, &message) == data);
    to.take_turn(&message);
    // It stays where it is while the answer is composed.
    assert!(in_place(memory, &message) == data);
}

/// With all lanes busy, each is served equally often, whatever their number.
#[test]
fn a_mailbox_is_fair() {
    for lanes in [1, 2, 65, LANE_MAX_COUNT] {
        let (mut inbox, ready) = (Inbox::default(), Ready::default());
        (0..lanes).for_each(|lane| announce(&ready, lane));
        let mut served = vec![0; lanes];
        for _ in 0..lanes * 80 {
            served[inbox.poll([&ready], lanes, |_| true).unwrap()] += 1;
        }
        let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
        assert!(most - least <= 8, "{lanes} lanes: between {least} and {most}");
    }
}

/// A receiver's work for one message does not depend on the number of idle lanes.
#[test]
fn idle_lanes_cost_nothing() {
    let (mut inbox, ready) = (Inbox::default(), Ready::default());
    let (rounds, mut looks) = (1000, 0);
    for round in 0..rounds {
        let busy = round * 7 % LANE_MAX_COUNT;
        announce(&ready, busy);
        let found = inbox.poll([&ready], LANE_MAX_COUNT, |lane| {
            looks += 1;
            lane == busy
        });
        assert_eq!(found, Some(busy));
    }
    assert!(looks <= 4 * rounds, "{looks} looks");
}
