//! The two ends of a direction over a mirror: as ringlet-core/tests/moves.rs drives them over one segment, at random by seed, but each has a
//! segment of its own, and a `Link` between them has its turns like the others. What it has to ring are bytes on a kernel's connection that is a queue.

#[path = "../../ringlet-core/tests/ends/mod.rs"]
mod ends;
#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ends::stage::{self, Random};
use ends::{Kernel, Record, Rule, Who, Word, World};
use ringlet_adapter::{Bells, Link, Segment as End};
use ringlet_core::handover::{Head, Sending};
use ringlet_core::layout::{Control, WANT_BYTE};
use ringlet_core::leaving::Leaving;
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Mark, Next, Rx, SegmentRing, Tx};
use ringlet_core::sync::Ordering::SeqCst;
use segment::{Segment, with_buffers};
use std::task::Poll;

const RING_BYTES: usize = 1 << 16;

/// Direction 0 of a link; the other one is idle.
struct Mirrored {
    link: Link,
    /// The sender's, and the receiver's.
    from: SegmentRing,
    to: SegmentRing,
    tx: Tx,
    rx: Rx,
    kernel: Kernel,
    record: Record,
    path: u64,
    ringers: u64,
    who: Who,
    random: Random,
    /// A byte that is on its way, and whether it went.
    flight: Option<bool>,
    /// The link has one of so many turns.
    pace: u64,
    /// How far the sender's credit has come.
    credit: u64,
}

/// What asks for the kernel, and by a thread of its own, as a carrier does: it goes when it is first asked for or later, and that is told later still.
struct Rings<'a> {
    kernel: &'a mut Kernel,
    random: &'a Random,
    flight: &'a mut Option<bool>,
}

impl Bells for Rings<'_> {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) -> bool {
        true
    }
    fn byte(&mut self, to: usize) -> Poll<bool> {
        if self.flight.is_none() && self.random.one_in(2) {
            *self.flight = Some(to == 1 && self.kernel.write(None));
        }
        match *self.flight {
            Some(went) if !self.random.one_in(3) => {
                *self.flight = None;
                Poll::Ready(went)
            }
            _ => Poll::Pending,
        }
    }
    fn part(&mut self, end: usize) -> Poll<()> {
        if self.random.one_in(3) {
            return Poll::Pending;
        }
        self.kernel.ended |= end == 0;
        Poll::Ready(())
    }
}

impl Mirrored {
    fn new(seed: u64, segments: &[Segment; 2]) -> Mirrored {
        let ends = [0, 1]
            .map(|nth: usize| End { area: segments[nth].area(), geometry: segments[nth].geometry });
        let random = Random::new(seed, 253);
        Mirrored {
            link: Link::new((!random.one_in(4)).then_some(seed), ends),
            from: segments[0].ring(0),
            to: segments[1].ring(0),
            tx: Tx::default(),
            rx: Rx::default(),
            kernel: stage::kernel(seed),
            record: Record::default(),
            path: 0,
            ringers: 0,
            who: Who::Sender,
            pace: 1 + random.below(4),
            random,
            flight: None,
            credit: 0,
        }
    }

    fn turn(&mut self) {
        let Mirrored { link, kernel, random, flight, .. } = self;
        link.pass(&mut Rings { kernel, random, flight });
    }

    fn words(&self) -> &Control {
        if self.who == Who::Receiver { self.to.control() } else { self.from.control() }
    }
}

impl World for Mirrored {
    const MIRRORED: bool = true;

    fn get(&self, word: Word) -> u64 {
        let words = self.words();
        let Control { receiver, sender, .. } = words;
        match (word, self.who) {
            (Word::State, _) => words.state().into(),
            (Word::Used, _) => words.used(),
            (Word::Working, Who::Receiver) => (!words.is_quiet_beyond()).into(),
            (Word::Working, _) => words.working().into(),
            (Word::Answered, _) => words.answered().into(),
            (Word::Bells, Who::Receiver) => sender.bells.load(SeqCst),
            (Word::Bells, _) => receiver.bells_put.load(SeqCst),
            (Word::Draining, _) => receiver.draining.load(SeqCst).into(),
            (Word::KeepOut, _) => receiver.keep_out.load(SeqCst).into(),
            (Word::Shut, _) => sender.shut.load(SeqCst).into(),
            (Word::Path, _) => self.path,
            (Word::Ringers, _) => self.ringers,
        }
    }
    fn set(&mut self, word: Word, value: u64) {
        let words = self.words();
        let Control { receiver, sender, .. } = words;
        match word {
            Word::State => words.set_state(value as u32),
            Word::Used => words.set_used(value),
            Word::Working => sender.working.store(value as u32, SeqCst),
            Word::Answered => words.set_answered(value as u32),
            // From 0 on.
            Word::Bells => words.allow_bells(),
            Word::Draining => receiver.draining.store(value as u32, SeqCst),
            Word::KeepOut => receiver.keep_out.store(value as u32, SeqCst),
            Word::Shut => sender.shut.store(value as u32, SeqCst),
            Word::Path => {
                // (It may have wanted to leave, and stay now.)
                if value == Sending::Ring as u64 {
                    words.allow_bells();
                }
                self.path = value;
            }
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
        with_buffers(&mut bytes, &[], |from| self.tx.push(&self.from, from)) as u64
    }
    fn push_mark(&mut self, mark: Mark) -> bool {
        self.tx.push_mark(&self.from, mark)
    }
    fn drained(&self) -> bool {
        self.tx.drained(&self.from)
    }
    fn outstanding(&self) -> u64 {
        self.tx.outstanding_bytes(&self.from) as u64
    }
    fn take_credit(&mut self) {
        self.tx.take_credit(&self.from);
    }
    fn oldest(&self, used: u64) -> Vec<u8> {
        self.tx.oldest(&self.from, used as usize, &mut [0; 512]).to_vec()
    }
    fn pass_oldest(&mut self) -> bool {
        self.tx.pass_oldest(&self.from)
    }
    fn head(&self) -> Head {
        match self.rx.mark(&self.to) {
            Some(mark) => Head::Mark(mark),
            None if self.rx.ready(&self.to) => Head::Bytes,
            None => {
                // (It would sleep in the kernel.)
                if self.random.one_in(2) {
                    self.to.control().data_wish().want(WANT_BYTE);
                }
                Head::Empty
            }
        }
    }
    fn mark_ahead(&self) -> Option<Mark> {
        self.rx.mark_ahead(&self.to)
    }
    fn used(&self) -> u64 {
        self.rx.used()
    }
    fn pass_mark(&mut self) {
        self.rx.pass_mark(&self.to);
    }
    fn skip(&mut self, bytes: u64) -> bool {
        self.rx.skip(&self.to, bytes)
    }
    fn pop(&mut self, most: u64) -> Vec<u8> {
        let mut bytes = vec![0; most as usize];
        let next = with_buffers(&mut bytes, &[], |to| self.rx.pop(&self.to, to));
        let Next::Bytes(n, _) = next else { panic!("{next:?}") };
        bytes.truncate(n);
        bytes
    }
    fn records(&self) -> u64 {
        self.tx.position()
    }
    fn now(&mut self, who: Who) {
        self.who = who;
    }
    fn pass(&mut self) {
        if self.random.one_in(self.pace) {
            self.turn();
        }
        let credit = self.from.control().credit.slots.load(SeqCst);
        if credit < self.credit {
            self.record.wrong("an older credit in place of a newer one");
        }
        self.credit = credit;
    }
    fn sender_died(&mut self) {
        self.link.gone(0);
    }
    fn is_delivered(&mut self, asked: &mut Option<u32>) -> bool {
        let words = self.from.control();
        words.is_delivered(*asked.get_or_insert_with(|| words.ask_delivery()))
    }
    fn is_silent(&mut self) -> bool {
        self.from.control().ask_silence();
        self.from.control().bells_of_silence().is_some()
    }
    fn put_bell(&mut self) {
        self.from.control().ask_byte();
    }
}

fn run(seed: u64, broken: Option<Rule>) -> Result<u64, &'static str> {
    let segments = [Segment::new(RING_BYTES), Segment::new(RING_BYTES)];
    stage::run(seed, broken, Mirrored::new(seed, &segments))
}

#[test]
fn nothing_lost_over_a_mirror() {
    let mut records = 0;
    for seed in 0..400 {
        records += run(seed, None).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    assert!(records > 1000, "only {records} records went through the rings");
}

#[test]
fn broken_rules_are_found_out() {
    for rule in [
        Rule::SenderAwaitsReceiver,
        Rule::SenderHeedsUsed,
        Rule::ReceiverFollowsMarks,
        Rule::ReceiverCountsBells,
        Rule::ReceiverHeedsAnswer,
        Rule::ReceiverWaits,
        Rule::SenderAwaitsSilence,
        Rule::SenderAwaitsDelivery,
    ] {
        let found = (0..1000).any(|seed| run(seed, Some(rule)).is_err());
        assert!(found, "breaking {rule:?} changes nothing");
    }
}
