//! One connection.

use crate::fabric::{Back, Fabric};
use ringlet_core::bells;
use ringlet_core::course::{Course, Piece};
use ringlet_core::layout::{Geometry, LINE_BYTES, SLOT_COUNT, WANT_BYTE, WANT_EVENT};
use ringlet_core::leaving::Leaving;
use ringlet_core::mapped::Mapped;
use ringlet_core::memory::Area;
use ringlet_core::mirror::{Answers, ReceiverLine, SenderLine};
use ringlet_core::record::RingMemory;
use ringlet_core::ring::{Mark, SegmentRing};
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::map;

/// Records and bytes of one direction that one pass delivers: then the other directions and links have their turn.
const RECORDS_MOST: usize = 64;
const BYTES_MOST: usize = 256 << 10;
/// Memory is asked for in such pieces before it is first written to.
const HOLD_BYTES: usize = 64 << 10;

/// How the two programs are rung. End 0 is the connecting one, whose sending direction is 0.
pub trait Bells {
    /// Something came for this end: its context is rung if somebody sleeps there.
    fn published(&mut self, end: usize);
    /// A wish of this end's says that its context is to be rung.
    fn event(&mut self, end: usize);
    /// A doorbell byte for this end, by the other one's kernel connection. False if it did not go.
    fn byte(&mut self, to: usize) -> bool;
    /// All of this end's is delivered: what is held of its kernel connection is let go.
    fn part(&mut self, end: usize);
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    Idle,
    Busy,
    /// Both ends have parted.
    Ended,
    /// The memory of a segment can't be had: the link can't go on, and both ends are to go back to the kernel as if it had died.
    Failed,
}

/// The memory of one end. It stays mapped as long as a link has it.
#[derive(Clone, Copy)]
pub struct Segment {
    pub area: Area,
    pub geometry: Geometry,
}

pub struct Link {
    /// By the end that sends.
    flows: [Flow; 2],
    fabric: Option<Fabric>,
    ends: [End; 2],
    failed: bool,
}

#[derive(Default)]
struct End {
    /// Its process is gone: what it has said is all.
    gone: bool,
    parted: bool,
}

/// One direction.
pub(crate) struct Flow {
    /// The sender's ring and the receiver's.
    pub from: SegmentRing,
    pub to: SegmentRing,
    course: Course,
    /// The sender's words as the receiver knows them, and the receiver's as the sender does.
    told: SenderLine,
    heard: ReceiverLine,
    echoed: u32,
    /// Of the sender's wishes, those that were done; and whether it has been told so.
    done: SenderLine,
    /// The sender's line on its way, and whether all records before it were found.
    line: Option<Line>,
    /// The last mark that was delivered is a `Start`: a byte is a doorbell.
    pub started: bool,
    pub bells: u64,
    /// One did not go; one is due.
    bell_lost: bool,
    byte_due: bool,
    /// How much of the receiver's data and slots was asked for.
    held: [usize; 2],
}

struct Line {
    said: SenderLine,
    /// The receiver's change that was delivered before it was read.
    echo: u32,
    /// Records to be looked at before all that were published are found; then 0.
    left: usize,
    upto: u64,
    /// Which news of the same end's as a receiver it follows (`Fabric::is_behind`).
    backs: (u64, u64),
}

impl Flow {
    fn new(from: SegmentRing, to: SegmentRing) -> Flow {
        Flow {
            from,
            to,
            course: Course::default(),
            told: SenderLine::default(),
            heard: ReceiverLine::default(),
            echoed: 0,
            done: SenderLine::default(),
            line: None,
            started: false,
            bells: 0,
            bell_lost: false,
            byte_due: false,
            held: [0; 2],
        }
    }

    /// The slots or the data of the receiver's that this record needs are there. False if they can't be had.
    fn hold(&mut self, piece: &Piece) -> bool {
        let slots = self.to.slot_offset(0);
        for (nth, base, end, all) in [
            (0, slots, (piece.slot + 2) * LINE_BYTES, SLOT_COUNT * LINE_BYTES),
            (1, self.to.data_offset(), piece.place + piece.len, self.to.data_bytes()),
        ] {
            if end > self.held[nth] && self.held[nth] < all {
                let upto = end.next_multiple_of(if nth == 0 { 4096 } else { HOLD_BYTES }).min(all);
                let (at, bytes) = (base + self.held[nth], upto - self.held[nth]);
                if map::hold(self.to.area(), at, bytes).is_err() {
                    return false;
                }
                self.held[nth] = upto;
            }
        }
        true
    }

    /// A stretch of what lies in the data ring.
    pub fn copy_data(&self, place: usize, n: usize) {
        let (from, to) = (self.from.data_offset() + place, self.to.data_offset() + place);
        self.from.area().copy_to(from, self.to.area(), to, n);
    }

    pub fn put(&mut self, piece: &Piece) {
        if let Some(Mark::Start(_)) = piece.mark {
            self.bells = 0;
            // ORDER: Relaxed; who reads it has seen the mark.
            self.to.control().sender.bells.store(0, Ordering::Relaxed);
            self.from.control().receiver.bells_put.store(0, Ordering::Relaxed);
        }
        piece.put(&self.to);
        if let Some(mark) = piece.mark {
            self.started = matches!(mark, Mark::Start(_));
        }
    }

    /// Would a byte for the receiver be a doorbell? Not if it has left, nor if the sender was told that no more come.
    fn may_ring(&self) -> bool {
        // ORDER: Acquire; pairs with `RingMemory::publish` of the `Start` that was delivered, and `Asks::ask_silence`.
        let hold = self.from.control().sender.hold.load(Ordering::Acquire);
        let silent = hold & 1 != 0 && hold == self.done.hold;
        self.started && !silent && self.to.control().is_taken()
    }

    /// The byte that is due, if it is.
    fn ring(&mut self, receiver: usize, bells: &mut impl Bells) {
        if !self.byte_due || !self.may_ring() {
            return;
        }
        self.byte_due = false;
        if bells::ring(&self.to.control().sender.bells, || bells.byte(receiver)) {
            self.bells += 1;
            self.from.control().receiver.bells_put.store(self.bells, Ordering::Relaxed);
        } else {
            self.bell_lost = true;
        }
    }

    /// Something was published.
    pub fn wake_receiver(&mut self, receiver: usize, bells: &mut impl Bells) {
        // Before it is rung: then it may run at once, and wish for what comes next.
        let how = self.to.control().data_wish().granted_by_sender();
        bells.published(receiver);
        if how & WANT_EVENT != 0 {
            bells.event(receiver);
        }
        self.byte_due |= how & WANT_BYTE != 0;
        self.ring(receiver, bells);
    }

    /// What the receiver says, and how far it is: read, if there is news.
    fn read_back(&mut self) -> Option<Back> {
        let last = ReceiverLine::read(&self.to.control().receiver);
        let credit = self.course.credit(&self.to);
        if last == self.heard && credit.is_none() {
            return None;
        }
        Some(Back { credit, last, first: ReceiverLine::read(&self.to.control().receiver) })
    }

    pub fn put_first(&mut self, back: &Back) {
        let ReceiverLine { keep_out, draining, .. } = back.first;
        if (self.heard.keep_out, self.heard.draining) != (keep_out, draining) {
            back.first.write_first(&self.from.control().receiver);
            self.heard = ReceiverLine { keep_out, draining, ..self.heard };
        }
    }

    pub fn put_credit(&self, back: &Back) {
        if let Some(credit) = back.credit {
            self.from.give_credit(credit.slots, Some(credit.data));
        }
    }

    pub fn put_last(&mut self, back: &Back) {
        let ReceiverLine { keep_out, draining, .. } = self.heard;
        let last = ReceiverLine { keep_out, draining, ..back.last };
        if self.heard != last {
            last.write_last(&self.from.control().receiver);
            self.heard = last;
        }
    }
}

impl Link {
    /// `seed`: writes are delayed, done in another order as far as an unordered fabric may, and repeated, by this number. Without one, all is copied at
    /// once. The segments are as large as each other.
    pub fn new(seed: Option<u64>, ends: [Segment; 2]) -> Link {
        let ring =
            |end: usize, direction| SegmentRing::new(ends[end].area, ends[end].geometry, direction);
        Link {
            flows: [0, 1].map(|sender| Flow::new(ring(sender, sender), ring(1 - sender, sender))),
            fabric: seed.map(Fabric::new),
            ends: Default::default(),
            failed: false,
        }
    }

    /// This end's process is gone. What it has left is delivered, then it parts.
    pub fn gone(&mut self, end: usize) {
        self.ends[end].gone = true;
    }

    /// Delivers what there is, within bounds.
    pub fn pass(&mut self, bells: &mut impl Bells) -> Progress {
        let mut busy = false;
        for end in [0, 1] {
            busy |= self.serve(end, bells);
        }
        match () {
            _ if self.failed => Progress::Failed,
            _ if self.ends.iter().all(|end| end.parted) => {
                // (One that parts as its process ends may still do something.)
                self.flows.iter().for_each(|flow| flow.from.control().answer_over());
                Progress::Ended
            }
            _ if busy => Progress::Busy,
            _ => Progress::Idle,
        }
    }

    /// Both programs ring when there is something to deliver. To be passed over once more afterwards.
    pub fn arm(&mut self) {
        for flow in &self.flows {
            flow.from.control().data_wish().want(WANT_EVENT);
            if flow.course.is_owed() {
                flow.to.control().room_wish().want(WANT_EVENT);
            }
        }
    }

    /// It is passed over again anyway.
    pub fn disarm(&mut self) {
        for flow in &self.flows {
            flow.from.control().data_wish().withdraw();
            flow.to.control().room_wish().withdraw();
        }
    }

    /// Is something unread? Who reads it does not ring for each record.
    pub fn is_owed(&self) -> bool {
        self.flows.iter().any(|flow| flow.course.is_owed())
    }

    /// What this end has sent and said.
    fn serve(&mut self, end: usize, bells: &mut impl Bells) -> bool {
        let mut busy = self.read_line(end);
        // What it says as a receiver is read behind what it asks for as a sender.
        busy |= self.pass_back(end, bells);
        busy |= self.pass_records(end, bells);
        busy |= self.pass_line(end, bells);
        busy
    }

    fn read_line(&mut self, end: usize) -> bool {
        let flow = &mut self.flows[end];
        if flow.line.is_some() {
            return false;
        }
        let echo = flow.heard.changes;
        if echo != flow.echoed {
            // ORDER: SeqCst, between the delivery of the receiver's line and the look at the sender's; pairs with `Leaving::begin_work`.
            fence(Ordering::SeqCst);
        }
        let Some(mut said) = SenderLine::read(&flow.from.control().sender, &flow.told) else {
            return true;
        };
        said.parting |= self.ends[end].gone as u32;
        if said == flow.told && echo == flow.echoed {
            return false;
        }
        let backs = self.fabric.as_ref().map_or((0, 0), |fabric| fabric.backs(end));
        flow.line = Some(Line { said, echo, left: SLOT_COUNT, upto: 0, backs });
        true
    }

    fn pass_back(&mut self, receiver: usize, bells: &mut impl Bells) -> bool {
        let sender = 1 - receiver;
        let flow = &mut self.flows[sender];
        let looks = match &mut self.fabric {
            None => {
                let Some(back) = flow.read_back() else { return false };
                flow.put_first(&back);
                flow.put_credit(&back);
                flow.put_last(&back);
                back.credit.is_some_and(|credit| credit.looks)
            }
            Some(fabric) => {
                let news = if fabric.takes_back(sender) { flow.read_back() } else { None };
                match fabric.pass_back(sender, flow, news) {
                    None => return false,
                    Some(looks) => looks,
                }
            }
        };
        if looks {
            let how = flow.from.control().room_wish().granted_by_receiver();
            if how & WANT_EVENT != 0 {
                bells.event(sender);
            }
            if how & WANT_BYTE != 0 {
                let other = &mut self.flows[receiver];
                other.byte_due = true;
                other.ring(sender, bells);
            }
        }
        true
    }

    fn pass_records(&mut self, end: usize, bells: &mut impl Bells) -> bool {
        let flow = &mut self.flows[end];
        let (mut records, mut bytes, mut all) = (0, 0, false);
        while records < RECORDS_MOST && bytes < BYTES_MOST {
            let Some(piece) = flow.course.look(&flow.from) else {
                all = true;
                break;
            };
            if !flow.hold(&piece) {
                self.failed = true;
                return false;
            }
            (records, bytes) = (records + 1, bytes + piece.len);
            match &mut self.fabric {
                None => {
                    flow.copy_data(piece.place, piece.len);
                    flow.put(&piece);
                }
                Some(fabric) => fabric.send(end, piece),
            }
        }
        if let Some(line) = &mut flow.line
            && line.left > 0
        {
            line.left = if all { 0 } else { line.left.saturating_sub(records) };
            line.upto = flow.course.position();
        }
        let (put, busy) = match &mut self.fabric {
            None => (records > 0, records > 0),
            Some(fabric) => fabric.pass_records(end, flow),
        };
        if put {
            flow.wake_receiver(1 - end, bells);
        }
        busy
    }

    /// The sender's line is delivered behind all records that it follows, and then what it asks for is done.
    fn pass_line(&mut self, end: usize, bells: &mut impl Bells) -> bool {
        let flow = &mut self.flows[end];
        let Some(line) = &mut flow.line else { return false };
        if line.left > 0 {
            return true;
        }
        if let Some(fabric) = &mut self.fabric
            && !fabric.is_behind(end, line.upto, line.backs)
        {
            return true;
        }
        let (said, echo) = (line.said, line.echo);
        if said != flow.told {
            said.write(&flow.to.control().sender);
            flow.told = said;
        }
        if echo != flow.echoed {
            flow.to.control().answer_echo(echo);
            flow.echoed = echo;
        }
        if said.rings != flow.done.rings {
            flow.byte_due = true;
        }
        flow.ring(1 - end, bells);
        if said.events != flow.done.events {
            bells.event(1 - end);
        }
        let words = flow.from.control();
        let hold = flow.done.hold;
        flow.done = SenderLine { hold, ..said };
        words.answer_delivery(said.flushes);
        if said.hold & 1 != 0 && said.hold != hold {
            // One that did not go may still be taken for one by the number.
            if flow.bell_lost && !bells::nobody_takes(&flow.to.control().receiver.taking) {
                return true;
            }
            flow.bell_lost = false;
            flow.byte_due = false;
            flow.done.hold = said.hold;
            words.answer_silence(said.hold, flow.bells);
        }
        if said.parting != 0 && !self.ends[end].parted {
            self.ends[end].parted = true;
            bells.part(end);
            words.answer_parting();
        }
        flow.line = None;
        true
    }
}
