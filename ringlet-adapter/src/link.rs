//! One connection whose two halves are in one process.

use crate::fabric::Fabric;
use crate::half::{Half, Operation, Rings, Segment, Way};
use ringlet_core::mapped::Mapped;
use ringlet_core::ring::SegmentRing;
use std::collections::VecDeque;
use std::task::Poll;

/// How the two programs are rung (`Rings`). End 0 is the connecting one.
pub trait Bells {
    /// Something came for this end: its context is rung if somebody sleeps there.
    fn published(&mut self, end: usize);
    /// A wish of this end's says that its context is to be rung. False if it may not have been: then a byte is put.
    fn event(&mut self, end: usize) -> bool;
    /// A doorbell byte for this end, by the other one's kernel connection. False if it did not go.
    fn byte(&mut self, to: usize) -> Poll<bool>;
    /// As `Rings::take_bells`, of this end's.
    fn take_bells(&mut self, _end: usize, _most: u64) {}
    /// All of this end's is delivered: what is held of its kernel connection is let go.
    fn part(&mut self, end: usize) -> Poll<()>;
}

/// So many operations are on their way from a half before no more records are found there.
const WAITING_MOST: usize = 128;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    Idle,
    Busy,
    /// Both ends have parted.
    Ended,
    /// The memory of a segment can't be had, or an end has severed itself: the link can't go on, and both ends are to go back to the kernel as if it had died.
    Failed,
}

pub struct Link {
    halves: [Half; 2],
    /// What is on its way, by the half that has sent it.
    ways: [VecDeque<Operation>; 2],
    fabric: Option<Fabric>,
}

/// The rings of one of the two.
struct OfEnd<'a, B>(&'a mut B, usize);

impl<B: Bells> Rings for OfEnd<'_, B> {
    fn published(&mut self) {
        self.0.published(self.1);
    }
    fn event(&mut self) -> bool {
        self.0.event(self.1)
    }
    fn byte(&mut self) -> Poll<bool> {
        self.0.byte(1 - self.1)
    }
    fn take_bells(&mut self, most: u64) {
        self.0.take_bells(self.1, most);
    }
    fn part(&mut self) -> Poll<()> {
        self.0.part(self.1)
    }
}

impl Way for VecDeque<Operation> {
    fn has_room(&self) -> bool {
        self.len() < WAITING_MOST
    }

    fn send(&mut self, operation: Operation) {
        self.push_back(operation);
    }
}

impl Link {
    /// `seed`: what crosses is delayed, and the bytes of records are written in any order and repeatedly, by this number. Without one, all is copied at
    /// once. The segments are as large as each other.
    pub fn new(seed: Option<u64>, ends: [Segment; 2]) -> Link {
        Link {
            halves: [0, 1].map(|end| Half::new(end, ends[end])),
            ways: Default::default(),
            fabric: seed.map(Fabric::new),
        }
    }

    /// This end's process is gone. What it has left is delivered, then it parts.
    pub fn gone(&mut self, end: usize) {
        self.halves[end].gone();
    }

    /// Delivers what there is, within bounds.
    pub fn pass(&mut self, bells: &mut impl Bells) -> Progress {
        let progress = match self.halves.iter().all(Half::begin) {
            true => self.pass_now(bells),
            false => Progress::Failed,
        };
        self.halves.iter().for_each(Half::leave);
        progress
    }

    fn pass_now(&mut self, bells: &mut impl Bells) -> Progress {
        let mut busy = false;
        for end in [0, 1] {
            // (Answers to the other half may wait there already: who asks all the time is not to keep this one from being looked at.)
            if self.ways[end].has_room() {
                busy |= self.halves[end].pass(&mut self.ways[end], &mut OfEnd(bells, end));
            }
            busy |= self.cross(end, bells);
        }
        // The answers.
        busy |= self.cross(0, bells);
        match () {
            _ if self.halves.iter().any(Half::has_failed) => Progress::Failed,
            _ if self.halves.iter().all(Half::has_parted) => {
                self.halves.iter().for_each(Half::end);
                Progress::Ended
            }
            _ if busy || self.ways.iter().any(|way| !way.is_empty()) => Progress::Busy,
            _ => Progress::Idle,
        }
    }

    /// What this half has sent comes to the other one.
    fn cross(&mut self, end: usize, bells: &mut impl Bells) -> bool {
        let Link { halves, ways, fabric } = self;
        let ([one, other], [first, second]) = (halves, ways);
        let (from, to) = if end == 0 { (one, other) } else { (other, one) };
        let (way, back) = if end == 0 { (first, second) } else { (second, first) };
        let from = from.outgoing();
        let rings = &mut OfEnd(bells, 1 - end);
        let copy = |to: &SegmentRing, place: usize, n: usize| {
            let (at, here) = (from.data_offset() + place, to.data_offset() + place);
            from.area().copy_to(at, to.area(), here, n);
        };
        let mut come = false;
        let arrives = |fabric: &mut Option<Fabric>| fabric.as_mut().is_none_or(Fabric::arrives);
        while !way.is_empty() && arrives(fabric) {
            let Some(operation) = way.pop_front() else { break };
            come = true;
            match fabric {
                None => to.take(operation, copy, back, rings),
                Some(fabric) => {
                    let bring = |to: &SegmentRing, place, n| {
                        fabric.bring(place, n, |at, n| copy(to, at, n));
                    };
                    to.take(operation, bring, back, rings);
                }
            }
        }
        to.settle(back, rings);
        come
    }

    /// Both programs ring when there is something to deliver. To be passed over once more afterwards.
    pub fn arm(&mut self) {
        self.halves.iter_mut().for_each(Half::arm);
    }

    pub fn overdue(&mut self) {
        self.halves.iter_mut().for_each(Half::overdue);
    }

    /// It is passed over again anyway.
    pub fn disarm(&mut self) {
        self.halves.iter_mut().for_each(Half::disarm);
    }

    /// Does an answer to a sender wait for the receiver's process to leave what takes it some instructions? One that stays there holds up the other end.
    pub fn is_held_up(&self) -> bool {
        self.halves.iter().any(Half::is_held_up)
    }

    /// Is something unread? Who reads it does not ring for each record.
    pub fn is_owed(&self) -> bool {
        self.halves.iter().any(Half::is_owed)
    }
}
