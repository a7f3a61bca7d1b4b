//! The ring as a carrier of packets, against a plain queue of them: random operations on real memory, both ends in one thread.
#![cfg(not(loom))]

mod segment;

use proptest::prelude::*;
use ringlet_core::layout::*;
use ringlet_core::ring::{Mark, Next, Rx, SegmentRing, Tx, packet_max_bytes};
use segment::{Segment, with_buffers};
use std::collections::VecDeque;

#[derive(Clone, Debug)]
enum Op {
    /// A packet of so many bytes, cut into buffers of these lengths (the last one takes the rest).
    Send(usize, Vec<usize>),
    /// Packets of this size until there is no room.
    Fill(usize),
    /// One receive into buffers of these lengths.
    Receive(Vec<usize>),
    /// Receive until nothing is left.
    Drain,
    Peek(Vec<usize>),
    Back(u64),
    Look,
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        2 => Just(0),
        6 => 0..=INLINE_BYTES + 8,
        3 => 1..5000usize,
        2 => 1..200_000usize,
        1 => Just(RING_MIN_BYTES / 8),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let sizes = || proptest::collection::vec(size(), 0..4);
    prop_oneof![
        8 => (size(), sizes()).prop_map(|(n, cuts)| Op::Send(n, cuts)),
        1 => size().prop_map(Op::Fill),
        8 => sizes().prop_map(Op::Receive),
        1 => Just(Op::Drain),
        3 => sizes().prop_map(Op::Peek),
        1 => any::<u64>().prop_map(Op::Back),
        2 => Just(Op::Look),
    ]
}

enum Sent {
    Packet(Vec<u8>),
    Mark(Mark),
}

struct Model {
    memory: SegmentRing,
    tx: Tx,
    rx: Rx,
    queue: VecDeque<Sent>,
    number: usize,
    /// The sender waits for room, as in the model of the stream.
    waiting: bool,
}

impl Model {
    fn new(segment: &Segment) -> Model {
        let memory = segment.ring(0);
        let (tx, rx) = (Tx::default(), Rx::default());
        Model { memory, tx, rx, queue: VecDeque::new(), number: 0, waiting: false }
    }

    /// Sends a packet that no other one is like, if there is room.
    fn send(&mut self, len: usize, cuts: &[usize]) -> bool {
        self.number += 1;
        let mut data = vec![self.number as u8; len];
        data.iter_mut().zip(self.number.to_le_bytes()).for_each(|(byte, of)| *byte = of);
        let max = packet_max_bytes(&self.memory);
        let writable = self.tx.writable(&self.memory);
        let pushed = with_buffers(&mut data, cuts, |from| {
            let pushed = self.tx.push_sent_at(&self.memory, from, 0, max);
            assert_eq!(
                from.remaining(),
                if pushed.is_some() { 0 } else { len },
                "whole or not at all"
            );
            pushed
        });
        match pushed {
            Some(n) => {
                assert!(n == len && len <= max);
                self.queue.push_back(Sent::Packet(data));
            }
            None => {
                assert!(!writable || len > max, "writable, yet nothing moves");
                self.waiting |= len <= max && !self.tx.writable(&self.memory);
            }
        }
        pushed.is_some()
    }

    fn released(&mut self, look: bool) {
        if look && self.tx.writable(&self.memory) {
            self.waiting = false;
        }
        assert!(!(self.waiting && self.queue.is_empty()), "a waiting sender was forgotten");
    }

    fn receive(&mut self, lens: &[usize]) {
        let mut data = vec![0xa5; lens.iter().sum()];
        let (next, left) = with_buffers(&mut data, lens, |to| {
            (self.rx.pop_packet(&self.memory, to), to.remaining())
        });
        match (next, self.queue.pop_front()) {
            (Next::Empty, None) => assert!(!self.rx.ready(&self.memory)),
            (Next::Bytes(len, look), Some(Sent::Packet(sent))) => {
                let n = len.min(data.len());
                assert!(len == sent.len() && left == data.len() - n, "another packet, or cut");
                assert!(data[..n] == sent[..n] && data[n..].iter().all(|&byte| byte == 0xa5));
                self.released(look);
            }
            (Next::Mark(mark), Some(Sent::Mark(sent))) => {
                assert_eq!(mark, sent);
                let look = self.rx.pass_mark(&self.memory);
                self.released(look);
            }
            (next, _) => panic!("{next:?}"),
        }
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Send(len, cuts) => {
                self.send(*len, cuts);
            }
            Op::Fill(len) => while self.send(*len, &[]) {},
            Op::Receive(lens) => self.receive(lens),
            Op::Drain => {
                while !self.queue.is_empty() {
                    self.receive(&[100]);
                }
            }
            Op::Peek(lens) => {
                let mut data = vec![0; lens.iter().sum()];
                let seen =
                    with_buffers(&mut data, lens, |to| self.rx.peek_packet(&self.memory, to));
                match self.queue.front() {
                    Some(Sent::Packet(sent)) => {
                        let n = sent.len().min(data.len());
                        assert!(seen == Some(sent.len()) && data[..n] == sent[..n]);
                    }
                    _ => assert_eq!(seen, None),
                }
            }
            Op::Back(value) => {
                if self.tx.push_mark(&self.memory, Mark::Back(*value)) {
                    self.queue.push_back(Sent::Mark(Mark::Back(*value)));
                }
            }
            Op::Look => self.look(),
        }
    }

    fn look(&self) {
        let packets = || {
            self.queue.iter().map_while(|sent| match sent {
                Sent::Packet(data) => Some(data.len()),
                Sent::Mark(_) => None,
            })
        };
        assert_eq!(self.rx.available(&self.memory, usize::MAX), packets().sum());
        assert_eq!(self.rx.has_bytes(&self.memory), packets().next().is_some());
        assert_eq!(self.tx.drained(&self.memory), self.queue.is_empty());
        let unread = self.queue.iter().any(|sent| matches!(sent, Sent::Packet(_)));
        assert_eq!(self.tx.outstanding_bytes(&self.memory) > 0, unread);
    }

    /// The receiver has left: what it has not released comes back to the sender, packet by packet.
    fn leave(&mut self) {
        self.tx.take_credit(&self.memory);
        for sent in self.queue.drain(..) {
            if let Sent::Packet(sent) = sent {
                let packet = self.tx.oldest_packet(&self.memory).expect("not released");
                let mut data = vec![0; sent.len()];
                with_buffers(&mut data, &[], |to| packet.copy_to(&self.memory, to));
                assert!(packet.len() == sent.len() && data == sent);
            } else {
                assert_eq!(self.tx.oldest_packet(&self.memory), None);
            }
            assert!(self.tx.pass_oldest(&self.memory));
        }
        assert!(!self.tx.pass_oldest(&self.memory));
    }
}

proptest! {
    #[test]
    fn behaves_as_a_queue_of_packets(
        ops in proptest::collection::vec(op(), 1..100),
        size in 0..3u32,
    ) {
        let segment = Segment::new(RING_MIN_BYTES << size);
        let mut model = Model::new(&segment);
        for op in &ops {
            model.step(op);
        }
        model.look();
        model.leave();
    }
}
