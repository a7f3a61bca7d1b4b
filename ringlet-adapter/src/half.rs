//! One end of a connection: a program's segment, and what crosses between it and the other end's half. The two halves of a link may be in one process, or
//! on two hosts: all that they need of what lies between them is that operations come in order, each once, and the bytes of a record before it.
//!
//! ```text
//!   sender's half                                  receiver's half
//!     finds a record           -- Record -->         checks it, puts it in its place, wakes the program
//!     reads the sender's line  -- Line   -->         puts it behind the records, does what it asks for
//!     answers the sender       <-- Done  --
//!     credit, receiver's line  <-- Back  --          reads them
//!     puts a doorbell byte     <-- Ring  --          counts one, for a program that is to be woken so
//!                              -- Rung   -->         (counts it out if it did not go)
//!     answers the sender       <-- Silent --         asked for silence: when no doorbell is on its way any more
//! ```
//!
//! What comes is as little to be trusted as the program: it may spoil this connection, and nothing else.

use ringlet_core::bells;
use ringlet_core::course::{Course, Credit, Piece};
use ringlet_core::layout::{Geometry, LINE_BYTES, SLOT_COUNT, WANT_BYTE, WANT_EVENT};
use ringlet_core::leaving::Leaving;
use ringlet_core::mapped::Mapped;
use ringlet_core::memory::Area;
use ringlet_core::mirror::{Answers, ReceiverLine, SenderLine};
use ringlet_core::record::RingMemory;
use ringlet_core::ring::{Mark, SegmentRing};
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::map;
use std::task::Poll;

/// Records and bytes of one direction that one pass finds: then the other directions and links have their turn.
const RECORDS_MOST: usize = 64;
const BYTES_MOST: usize = 256 << 10;
/// So many passes what was consumed, if no sender is looked for, waits for more.
const CREDIT_PASSES: u32 = 64;
/// Memory is asked for in such pieces before it is first written to.
const HOLD_BYTES: usize = 64 << 10;

/// How a half's program is rung, and the other one. What is `Pending` is asked for again: who must not wait for a program's socket has another thread
/// do that.
pub trait Rings {
    /// Something came: the program's context is rung if somebody sleeps there.
    fn published(&mut self);
    /// A wish says that its context is to be rung. False if it may not have been: then a byte is put.
    fn event(&mut self) -> bool;
    /// A doorbell byte for the other end, by our program's kernel connection. False if it did not go.
    fn byte(&mut self) -> Poll<bool>;
    /// Our program is gone. If no more bytes than so many lie unread in its kernel connection they are doorbells, and are taken away.
    fn take_bells(&mut self, _most: u64) {}
    /// All that our program did is delivered: what is held of its kernel connection is let go.
    fn part(&mut self) -> Poll<()>;
}

/// Where operations go, to the other half.
pub trait Way {
    /// Is there room for one more record? (The others are few, bounded by the answers to them.)
    fn has_room(&self) -> bool;
    fn send(&mut self, operation: Operation);
}

#[derive(Clone, Debug)]
pub enum Operation {
    /// (Its place, mark and length are found again from header and body by who gets it.)
    Record(Piece),
    /// What the sender says, and by which of the receiver's changes that was read.
    Line {
        said: SenderLine,
        echo: u32,
    },
    Done,
    Back(Back),
    Ring,
    Rung {
        went: bool,
    },
    /// By this `hold` no more doorbells come.
    Silent {
        hold: u32,
    },
    /// This link can't go on.
    Failed,
}

/// News of a receiver's: its words, of which two come before the credit.
#[derive(Clone, Debug)]
pub struct Back {
    pub first: ReceiverLine,
    pub credit: Option<Credit>,
    pub last: ReceiverLine,
}

/// The memory of one end. It stays mapped as long as a link has it.
#[derive(Clone, Copy)]
pub struct Segment {
    pub area: Area,
    pub geometry: Geometry,
}

/// The direction in which our program sends.
#[derive(Default)]
struct Sending {
    course: Course,
    /// The sender's words as the receiver knows them, and the receiver's as the sender does.
    told: SenderLine,
    heard: ReceiverLine,
    echoed: u32,
    /// The sender's line on its way.
    line: Option<Line>,
    /// Doorbells that were put since the last `Start`. The other half has asked for one.
    bells_put: u64,
    bell_due: bool,
    /// The last `hold` of which the other half has said that it is silent.
    silent: u32,
    /// How often it has answered a line, and a `hold`.
    answers: [u32; 2],
}

struct Line {
    said: SenderLine,
    /// The receiver's change that was delivered before it was read.
    echo: u32,
    /// Records to be looked at before all that were published before are found; then 0.
    left: usize,
    sent: bool,
}

/// The direction in which it receives.
#[derive(Default)]
struct Receiving {
    course: Course,
    /// The sender's words as they were put here, and which of its wishes were done.
    told: SenderLine,
    echoed: u32,
    /// The receiver's as they were sent.
    said: ReceiverLine,
    /// Something was put here for which the program is to be woken.
    news: bool,
    /// The last mark is a `Start`: a byte is a doorbell; unless silence was asked for since, by this number until it is told.
    started: bool,
    silent: bool,
    hold: Option<u32>,
    /// One is due; one was when silence was asked for, and goes before that; one is asked for and not yet put; one did not go.
    byte_due: bool,
    last_due: bool,
    ringing: Ringing,
    bell_lost: bool,
    /// How often the other half has answered that it was asked for one.
    answers: u32,
    /// What the receiver says waits for a doorbell: no other goes before it.
    back_waits: bool,
    /// What it has consumed and is not sent, and for how many passes.
    credit: Option<Credit>,
    credit_waits: u32,
    /// How much of its data and slots was asked for.
    held: [usize; 2],
}

/// A doorbell on its way. There is one at most: while there is, another would wake nobody who does not look in any case.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Ringing {
    #[default]
    No,
    Counted,
    /// It was counted for an earlier `Start`.
    Stale,
}

pub struct Half {
    outgoing: SegmentRing,
    incoming: SegmentRing,
    sending: Sending,
    receiving: Receiving,
    /// Our program is gone: what it has said is all.
    gone: bool,
    /// All that it did is delivered; and is its connection let go?
    parts: bool,
    parted: bool,
    failed: bool,
}

impl Half {
    /// End 0 is the connecting one, whose sending direction is 0. Fails if the segment has no memory for what is written before anything is known of it.
    pub fn new(end: usize, segment: Segment) -> Half {
        let ring = |direction| SegmentRing::new(segment.area, segment.geometry, direction);
        Half {
            outgoing: ring(end),
            incoming: ring(1 - end),
            sending: Sending::default(),
            receiving: Receiving::default(),
            gone: false,
            parts: false,
            parted: false,
            failed: false,
        }
    }

    /// Where the bytes of records are read from, and where those of the other end come to.
    pub fn outgoing(&self) -> &SegmentRing {
        &self.outgoing
    }

    pub fn incoming(&self) -> &SegmentRing {
        &self.incoming
    }

    /// Its process is gone. What it has left is delivered, then it parts.
    pub fn gone(&mut self) {
        self.gone = true;
    }

    pub fn has_parted(&self) -> bool {
        self.parted
    }

    /// Has the other end, as far as is known here?
    pub fn other_parts(&self) -> bool {
        self.receiving.told.parting != 0
    }

    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Both have parted. (One that parts as its process ends may still do something.)
    pub fn end(&self) {
        self.outgoing.control().answer_over();
    }

    /// Around whatever touches the segment. False if our program has severed itself: then the link is over for both.
    pub fn begin(&self) -> bool {
        self.outgoing.control().begin_pass()
    }

    pub fn leave(&self) {
        self.outgoing.control().end_pass();
    }

    /// What our program has sent and said, within bounds. Was there anything?
    pub fn pass(&mut self, way: &mut impl Way, rings: &mut impl Rings) -> bool {
        self.put_bell(way, rings);
        self.let_go(rings);
        let mut busy = self.read_line();
        // What it says as a receiver is read behind what it asks for as a sender.
        busy |= self.pass_back(way);
        busy |= self.pass_records(way);
        busy |= self.pass_line(way);
        self.ring(way);
        self.pass_silence(way);
        busy
    }

    /// Our program rings when there is something to deliver. To be passed over once more afterwards.
    pub fn arm(&mut self) {
        self.outgoing.control().data_wish().want(WANT_EVENT);
        // (A receiver rings for that also each time that it finds nothing more.)
        if self.receiving.course.fills(&self.incoming) {
            self.incoming.control().room_wish().want(WANT_EVENT);
        }
    }

    /// What was consumed, and is not told yet, waited for more for long enough.
    pub fn overdue(&mut self) {
        self.receiving.credit_waits = CREDIT_PASSES;
    }

    /// It is passed over again anyway.
    pub fn disarm(&mut self) {
        self.outgoing.control().data_wish().withdraw();
        self.incoming.control().room_wish().withdraw();
    }

    /// Is there something of which its reader does not ring: that it has read a record, which is not told yet, or has left off taking doorbells?
    pub fn is_owed(&self) -> bool {
        self.receiving.course.is_owed() || self.receiving.credit.is_some() || self.is_held_up()
    }

    fn read_line(&mut self) -> bool {
        let Half { sending, outgoing, gone, .. } = self;
        if sending.line.is_some() {
            return false;
        }
        let echo = sending.heard.changes;
        if echo != sending.echoed {
            // ORDER: SeqCst, between the delivery of the receiver's line and the look at the sender's; pairs with `Leaving::begin_work`.
            fence(Ordering::SeqCst);
        }
        let Some(mut said) = SenderLine::read(&outgoing.control().sender, &sending.told) else {
            return true;
        };
        said.parting |= *gone as u32;
        if said == sending.told && echo == sending.echoed {
            return false;
        }
        sending.line = Some(Line { said, echo, left: SLOT_COUNT, sent: false });
        true
    }

    /// Waits something here for the program to leave what takes it some instructions? One that stays there holds up the other end.
    pub fn is_held_up(&self) -> bool {
        self.receiving.hold.is_some() && self.receiving.ringing == Ringing::No
    }

    /// What the other half is still to answer, by kind: the number of that answer.
    pub fn awaited(&self) -> [Option<u32>; 3] {
        let Half { sending, receiving, .. } = self;
        let SenderLine { hold, .. } = sending.told;
        [
            sending.line.as_ref().filter(|line| line.sent).map(|_| sending.answers[0]),
            (hold & 1 != 0 && hold != sending.silent).then_some(sending.answers[1]),
            (receiving.ringing != Ringing::No).then_some(receiving.answers),
        ]
    }

    /// What the receiver says, and how far it is, if there is news.
    fn pass_back(&mut self, way: &mut impl Way) -> bool {
        let Half { sending, receiving, incoming, .. } = self;
        // By the echo of what it says, one that has left knows the number of doorbells: none may be on its way, which may yet not go.
        receiving.back_waits = receiving.ringing != Ringing::No;
        if receiving.back_waits {
            return false;
        }
        let words = &incoming.control().receiver;
        let last = ReceiverLine::read(words);
        if let Some(credit) = receiving.course.credit(incoming) {
            receiving.credit = Some(credit);
        }
        if last == receiving.said {
            let Some(credit) = receiving.credit else { return false };
            // Mostly more is consumed soon, and then this is told with it. (But what the program says as a sender goes behind.) That is no work: it is slept
            // over too (`is_owed`).
            if !credit.looks && sending.line.is_none() && receiving.credit_waits < CREDIT_PASSES {
                receiving.credit_waits += 1;
                return false;
            }
        }
        // (If nothing was consumed since, this one is as if read now.)
        let credit = receiving.credit.take();
        receiving.credit_waits = 0;
        let first = ReceiverLine::read(words);
        let ReceiverLine { keep_out, draining, .. } = first;
        receiving.said = ReceiverLine { keep_out, draining, ..last };
        way.send(Operation::Back(Back { first, credit, last }));
        true
    }

    fn pass_records(&mut self, way: &mut impl Way) -> bool {
        let Half { sending, outgoing, .. } = self;
        let (mut records, mut bytes, mut all) = (0, 0, false);
        while records < RECORDS_MOST && bytes < BYTES_MOST && way.has_room() {
            let Some(piece) = sending.course.look(outgoing) else {
                all = true;
                break;
            };
            (records, bytes) = (records + 1, bytes + piece.len);
            if let Some(Mark::Start(_)) = piece.mark {
                sending.bells_put = 0;
                // ORDER: Relaxed; who reads it knows the mark.
                outgoing.control().receiver.bells_put.store(0, Ordering::Relaxed);
            }
            way.send(Operation::Record(piece));
        }
        if let Some(line) = &mut sending.line {
            line.left = if all { 0 } else { line.left.saturating_sub(records) };
        }
        records > 0
    }

    /// The sender's line goes behind all records that it follows.
    fn pass_line(&mut self, way: &mut impl Way) -> bool {
        match &mut self.sending.line {
            Some(line) if line.left == 0 && !line.sent => {
                line.sent = true;
                way.send(Operation::Line { said: line.said, echo: line.echo });
                true
            }
            Some(line) => line.left > 0,
            None => false,
        }
    }

    /// What the other half has sent. `bring`: the bytes of a record that are not here are to be put in their place, of so many from there on.
    pub fn take(
        &mut self,
        operation: Operation,
        bring: impl FnOnce(&SegmentRing, usize, usize),
        way: &mut impl Way,
        rings: &mut impl Rings,
    ) {
        match operation {
            Operation::Record(piece) => self.put(piece, bring),
            Operation::Line { said, echo } => self.put_line(said, echo, way, rings),
            Operation::Done => {
                self.is_delivered();
                self.let_go(rings);
            }
            Operation::Back(back) => self.put_back(back, way, rings),
            Operation::Ring => {
                // (An honest half waits for the answer before it asks again.)
                self.failed |= std::mem::replace(&mut self.sending.bell_due, true);
                self.put_bell(way, rings);
            }
            Operation::Rung { went } => self.is_rung(went, way),
            Operation::Silent { hold } => {
                self.sending.silent = hold;
                self.sending.answers[1] = self.sending.answers[1].wrapping_add(1);
                self.outgoing.control().answer_silence(hold, self.sending.bells_put);
            }
            Operation::Failed => self.failed = true,
        }
    }

    /// All that has come for now was taken.
    pub fn settle(&mut self, way: &mut impl Way, rings: &mut impl Rings) {
        if std::mem::take(&mut self.receiving.news) {
            // Before it is rung: then it may run at once, and wish for what comes next.
            let how = self.incoming.control().data_wish().granted_by_sender();
            rings.published();
            self.receiving.byte_due |=
                how & WANT_BYTE != 0 || how & WANT_EVENT != 0 && !rings.event();
            self.ring(way);
        }
        self.pass_silence(way);
    }

    fn put(&mut self, piece: Piece, bring: impl FnOnce(&SegmentRing, usize, usize)) {
        let Half { receiving, incoming, .. } = self;
        let Some(piece) = receiving.course.follow(incoming, piece.header, piece.body) else {
            self.failed = true;
            return;
        };
        if !receiving.hold(incoming, &piece) {
            self.failed = true;
            return;
        }
        if piece.len > 0 {
            bring(incoming, piece.place, piece.len);
        }
        if let Some(Mark::Start(_)) = piece.mark {
            if receiving.ringing == Ringing::Counted {
                receiving.ringing = Ringing::Stale;
            }
            receiving.silent = false;
            receiving.byte_due |= std::mem::take(&mut receiving.last_due);
            // ORDER: Relaxed; who reads it has seen the mark.
            incoming.control().sender.bells.store(0, Ordering::Relaxed);
        }
        piece.put(incoming);
        if let Some(mark) = piece.mark {
            receiving.started = matches!(mark, Mark::Start(_));
        }
        receiving.news = true;
    }

    fn put_line(
        &mut self,
        said: SenderLine,
        echo: u32,
        way: &mut impl Way,
        rings: &mut impl Rings,
    ) {
        let Half { receiving, incoming, .. } = self;
        let told = std::mem::replace(&mut receiving.told, said);
        if said != told {
            said.write(&incoming.control().sender);
        }
        if echo != receiving.echoed {
            incoming.control().answer_echo(echo);
            receiving.echoed = echo;
        }
        receiving.byte_due |= said.rings != told.rings;
        let asks_silence = said.hold & 1 != 0 && said.hold != told.hold;
        self.ring(way);
        if said.events != told.events {
            // (A doorbell for nothing would be unread if it is killed.)
            let _ = rings.event();
        }
        if asks_silence {
            self.receiving.silent = true;
            self.receiving.last_due |= std::mem::take(&mut self.receiving.byte_due);
            self.receiving.hold = Some(said.hold);
        }
        if !self.outgoing.control().has_what_was_put() {
            self.failed = true;
            return;
        }
        way.send(Operation::Done);
        self.pass_silence(way);
    }

    fn is_delivered(&mut self) {
        let Half { sending, outgoing, .. } = self;
        let Some(line) = sending.line.take_if(|line| line.sent) else {
            // Nobody has asked.
            self.failed = true;
            return;
        };
        (sending.told, sending.echoed) = (line.said, line.echo);
        sending.answers[0] = sending.answers[0].wrapping_add(1);
        let words = outgoing.control();
        words.answer_delivery(line.said.flushes);
        self.parts |= line.said.parting != 0;
    }

    fn let_go(&mut self, rings: &mut impl Rings) {
        let Half { receiving, sending, incoming, .. } = self;
        if !self.parts || self.parted {
            return;
        }
        // KERNEL: who closes with a byte unread, or gets one afterwards, resets the connection, and what it has not yet sent there is lost. So no
        // doorbell may be on its way, and one that nobody is left to read is taken.
        if receiving.ringing != Ringing::No || sending.bell_due {
            return;
        }
        let words = incoming.control();
        if self.gone && receiving.started && words.is_taken() {
            rings.take_bells(words.sender.bells.load(Ordering::Relaxed));
        }
        if rings.part().is_ready() {
            self.parted = true;
            self.outgoing.control().answer_parting();
        }
    }

    fn put_bell(&mut self, way: &mut impl Way, rings: &mut impl Rings) {
        let Half { sending, outgoing, .. } = self;
        if sending.bell_due
            && let Poll::Ready(went) = rings.byte()
        {
            sending.bell_due = false;
            sending.bells_put += u64::from(went);
            let words = &outgoing.control().receiver;
            words.bells_put.store(sending.bells_put, Ordering::Relaxed);
            way.send(Operation::Rung { went });
        }
    }

    fn put_back(&mut self, back: Back, way: &mut impl Way, rings: &mut impl Rings) {
        let Half { sending, outgoing, .. } = self;
        let words = &outgoing.control().receiver;
        let ReceiverLine { keep_out, draining, .. } = back.first;
        if (sending.heard.keep_out, sending.heard.draining) != (keep_out, draining) {
            back.first.write_first(words);
        }
        if let Some(credit) = back.credit
            && sending.course.give(credit.slots, credit.data)
        {
            outgoing.give_credit(credit.slots, Some(sending.course.consumed()));
        }
        let heard = ReceiverLine { keep_out, draining, ..back.last };
        if sending.heard != heard {
            heard.write_last(words);
            sending.heard = heard;
        }
        if back.credit.is_some_and(|credit| credit.looks) {
            let how = outgoing.control().room_wish().granted_by_receiver();
            self.receiving.byte_due |=
                how & WANT_BYTE != 0 || how & WANT_EVENT != 0 && !rings.event();
            self.ring(way);
        }
    }

    /// The byte that is due, if it is: asked of the half that has the connection. (Not if the receiver has left, or is gone, nor if the sender was told
    /// that no more come.)
    fn ring(&mut self, way: &mut impl Way) {
        let Half { receiving, incoming, outgoing, failed, .. } = self;
        let words = incoming.control();
        let may = receiving.started && words.is_taken() && !self.gone && !self.parts;
        let due = if receiving.silent { &mut receiving.last_due } else { &mut receiving.byte_due };
        *due &= may || !receiving.silent;
        if *due && may && receiving.ringing == Ringing::No && !receiving.back_waits {
            *due = false;
            receiving.ringing = Ringing::Counted;
            bells::count(&words.sender.bells);
            // (One that has not heard of it would take the byte for the program's.)
            *failed |= !outgoing.control().has_what_was_put();
            if !*failed {
                way.send(Operation::Ring);
            }
        }
    }

    fn is_rung(&mut self, went: bool, way: &mut impl Way) {
        let Half { receiving, incoming, .. } = self;
        receiving.answers = receiving.answers.wrapping_add(1);
        match std::mem::take(&mut receiving.ringing) {
            Ringing::No => self.failed = true,
            Ringing::Counted if !went => {
                bells::count_out(&incoming.control().sender.bells);
                receiving.bell_lost = true;
            }
            Ringing::Counted | Ringing::Stale => {}
        }
        self.ring(way);
    }

    /// Silence was asked for: is no doorbell on its way, and none that did not go taken for one by the number?
    fn pass_silence(&mut self, way: &mut impl Way) {
        let Half { receiving, incoming, .. } = self;
        let words = &incoming.control().receiver;
        if let Some(hold) = receiving.hold
            && receiving.ringing == Ringing::No
            && !receiving.last_due
            && (!receiving.bell_lost || bells::nobody_takes(&words.taking))
        {
            (receiving.hold, receiving.bell_lost) = (None, false);
            way.send(Operation::Silent { hold });
        }
    }
}

impl Receiving {
    /// The slots and the data that this record needs are there. False if they can't be had.
    fn hold(&mut self, to: &SegmentRing, piece: &Piece) -> bool {
        for (nth, base, end, all) in [
            (0, to.slot_offset(0), (piece.slot + 2) * LINE_BYTES, SLOT_COUNT * LINE_BYTES),
            (1, to.data_offset(), piece.place + piece.len, to.data_bytes()),
        ] {
            if end > self.held[nth] && self.held[nth] < all {
                let upto = end.next_multiple_of(if nth == 0 { 4096 } else { HOLD_BYTES }).min(all);
                let (at, bytes) = (base + self.held[nth], upto - self.held[nth]);
                if map::hold(to.area(), at, bytes).is_err() {
                    return false;
                }
                self.held[nth] = upto;
            }
        }
        true
    }
}
