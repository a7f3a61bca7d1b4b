//! The two ends of a direction (`ends`) over a real ring, driven at random by seed: the sender enters the ring, sends, goes back and ends; a
//! thread of its end rings; the receiver reads as much as it likes, and leaves; one of the two may be killed between any two accesses. Each
//! thread is a real one, but they take turns, and who is next is drawn.
#![cfg(not(loom))]

mod ends;
mod segment;

use ends::stage;
use ends::{Kernel, Record, Rule, Word, World};
use ringlet_core::handover::Head;
use ringlet_core::layout::Control;
use ringlet_core::ring::{Mark, Next, Rx, SegmentRing, Tx};
use ringlet_core::sync::Ordering;
use segment::{Segment, with_buffers};

struct Real {
    ring: SegmentRing,
    tx: Tx,
    rx: Rx,
    kernel: Kernel,
    record: Record,
    path: u64,
    ringers: u64,
}

impl World for Real {
    fn get(&self, word: Word) -> u64 {
        let Control { receiver, sender, .. } = self.ring.control();
        match word {
            Word::State => receiver.state.load(Ordering::SeqCst).into(),
            Word::Used => receiver.used.load(Ordering::SeqCst),
            Word::Working => sender.working.load(Ordering::SeqCst).into(),
            Word::Answered => sender.answered.load(Ordering::SeqCst).into(),
            Word::Bells => sender.bells.load(Ordering::SeqCst),
            Word::Draining => receiver.draining.load(Ordering::SeqCst).into(),
            Word::KeepOut => receiver.keep_out.load(Ordering::SeqCst).into(),
            Word::Shut => sender.shut.load(Ordering::SeqCst).into(),
            Word::Path => self.path,
            Word::Ringers => self.ringers,
        }
    }
    fn set(&mut self, word: Word, value: u64) {
        let Control { receiver, sender, .. } = self.ring.control();
        match word {
            Word::State => receiver.state.store(value as u32, Ordering::SeqCst),
            Word::Used => receiver.used.store(value, Ordering::SeqCst),
            Word::Working => sender.working.store(value as u32, Ordering::SeqCst),
            Word::Answered => sender.answered.store(value as u32, Ordering::SeqCst),
            Word::Bells => sender.bells.store(value, Ordering::SeqCst),
            Word::Draining => receiver.draining.store(value as u32, Ordering::SeqCst),
            Word::KeepOut => receiver.keep_out.store(value as u32, Ordering::SeqCst),
            Word::Shut => sender.shut.store(value as u32, Ordering::SeqCst),
            Word::Path => self.path = value,
            Word::Ringers => self.ringers = value,
        }
    }
    fn kernel(&mut self) -> &mut Kernel {
        &mut self.kernel
    }
    fn record(&mut self) -> &mut Record {
        &mut self.record
    }
    fn push(&mut self, bytes: &[u8]) -> u64 {
        let mut bytes = bytes.to_vec();
        with_buffers(&mut bytes, &[], |from| self.tx.push(&self.ring, from)) as u64
    }
    fn push_mark(&mut self, mark: Mark) -> bool {
        self.tx.push_mark(&self.ring, mark)
    }
    fn drained(&self) -> bool {
        self.tx.drained(&self.ring)
    }
    fn outstanding(&self) -> u64 {
        self.tx.outstanding_bytes(&self.ring) as u64
    }
    fn take_credit(&mut self) {
        self.tx.take_credit(&self.ring);
    }
    fn oldest(&self, used: u64) -> Vec<u8> {
        self.tx.oldest(&self.ring, used as usize, &mut [0; 512]).to_vec()
    }
    fn pass_oldest(&mut self) -> bool {
        self.tx.pass_oldest(&self.ring)
    }
    fn head(&self) -> Head {
        match self.rx.mark(&self.ring) {
            Some(mark) => Head::Mark(mark),
            None if self.rx.ready(&self.ring) => Head::Bytes,
            None => Head::Empty,
        }
    }
    fn mark_ahead(&self) -> Option<Mark> {
        self.rx.mark_ahead(&self.ring)
    }
    fn used(&self) -> u64 {
        self.rx.used()
    }
    fn pass_mark(&mut self) {
        self.rx.pass_mark(&self.ring);
    }
    fn skip(&mut self, bytes: u64) -> bool {
        self.rx.skip(&self.ring, bytes)
    }
    fn pop(&mut self, most: u64) -> Vec<u8> {
        let mut bytes = vec![0; most as usize];
        let next = with_buffers(&mut bytes, &[], |to| self.rx.pop(&self.ring, to));
        let Next::Bytes(n, _) = next else { panic!("{next:?}") };
        bytes.truncate(n);
        bytes
    }
    fn records(&self) -> u64 {
        self.tx.position()
    }
}

fn run(seed: u64, broken: Option<Rule>) -> Result<u64, &'static str> {
    let segment = Segment::new(1 << 16);
    let real = Real {
        ring: segment.ring(0),
        tx: Tx::default(),
        rx: Rx::default(),
        kernel: stage::kernel(seed),
        record: Record::default(),
        path: 0,
        ringers: 0,
    };
    stage::run(seed, broken, real)
}

#[test]
fn nothing_lost_on_a_real_ring() {
    let mut records = 0;
    for seed in 0..250 {
        records += run(seed, None).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    assert!(records > 1000, "only {records} records went through the ring");
}

/// (The others need an order of steps that is hardly ever drawn: handover.rs takes them all.)
#[test]
fn broken_rules_are_found_out() {
    for rule in [
        Rule::RingersLook,
        Rule::SenderAwaitsRingers,
        Rule::SenderAwaitsReceiver,
        Rule::SenderHeedsUsed,
        Rule::ReceiverFollowsMarks,
        Rule::ReceiverCountsBells,
        Rule::ReceiverHeedsAnswer,
    ] {
        let found = (0..1000).any(|seed| run(seed, Some(rule)).is_err());
        assert!(found, "breaking {rule:?} changes nothing");
    }
}
