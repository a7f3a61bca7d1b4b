//! The two ends of one direction of a connection, for tests: what `ringlet_core::handover` finds around it, over a kernel's connection that
//! is a queue. Every access to what more than one thread sees is one `Engine::op`, between any two of which other threads may run.
//!
//! `Rule` names what each end must keep to; an end that breaks one shows that a test would see it.
#![allow(dead_code)]

pub mod stage;

use ringlet_core::handover::{
    CHANGES_MAX, Fault, Head, Incoming, Outgoing, Receiver, Sender, Sending, Step,
};
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::Mark;
use std::collections::VecDeque;

/// The words that several threads see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    State,
    Used,
    Working,
    Answered,
    Bells,
    Draining,
    /// The receiver asks its sender to go back.
    KeepOut,
    /// The sender has ended its direction.
    Shut,
    /// Of the sender's own threads: where it sends, and how many of them ring.
    Path,
    Ringers,
}

pub const WORDS: usize = Word::Ringers as usize + 1;

/// The kernel's connection: bytes of the stream and doorbells (`None`), under way and arrived.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Kernel {
    pub wire: VecDeque<Option<u8>>,
    pub here: VecDeque<Option<u8>>,
    pub room: usize,
    pub written: u64,
    pub taken: u64,
    pub ended: bool,
    /// It counts nothing, as a Unix connection: marks name places from their own start on.
    pub counts_nothing: bool,
}

impl Kernel {
    pub fn write(&mut self, byte: Option<u8>) -> bool {
        let has_room = self.wire.len() + self.here.len() < self.room && !self.ended;
        if has_room {
            self.wire.push_back(byte);
            self.written += 1;
        }
        has_room
    }

    pub fn arrive(&mut self) -> bool {
        let next = self.wire.pop_front();
        self.here.extend(next);
        next.is_some()
    }

    fn take(&mut self) -> Option<Option<u8>> {
        let byte = self.here.pop_front();
        self.taken += byte.is_some() as u64;
        byte
    }

    fn is_over(&self) -> bool {
        self.ended && self.wire.is_empty()
    }
}

/// What was sent, and what was received of it.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Record {
    pub sent: u64,
    pub got: u64,
    /// What went wrong first.
    pub wrong: Option<&'static str>,
}

impl Record {
    pub fn wrong(&mut self, what: &'static str) {
        self.wrong.get_or_insert(what);
    }

    fn receive(&mut self, byte: Option<u8>) {
        match byte {
            None => self.wrong("a doorbell read as a byte of the stream"),
            Some(byte) if self.got < self.sent && byte == stream(self.got) => self.got += 1,
            Some(_) => self.wrong("a byte lost, doubled or out of order"),
        }
    }
}

/// The stream's byte at this place.
pub fn stream(at: u64) -> u8 {
    (at % 251) as u8
}

/// What both ends share.
pub trait World {
    fn get(&self, word: Word) -> u64;
    fn set(&mut self, word: Word, value: u64);
    fn kernel(&mut self) -> &mut Kernel;
    fn record(&mut self) -> &mut Record;
    /// Publishes bytes of the stream, as many of these as find room.
    fn push(&mut self, bytes: &[u8]) -> u64;
    fn push_mark(&mut self, mark: Mark) -> bool;
    fn drained(&self) -> bool;
    fn outstanding(&self) -> u64;
    fn take_credit(&mut self);
    /// Some bytes of the oldest record behind the first `used`.
    fn oldest(&self, used: u64) -> Vec<u8>;
    fn pass_oldest(&mut self) -> bool;
    fn head(&self) -> Head;
    fn mark_ahead(&self) -> Option<Mark>;
    fn used(&self) -> u64;
    fn pass_mark(&mut self);
    fn skip(&mut self, bytes: u64) -> bool;
    fn pop(&mut self, most: u64) -> Vec<u8>;

    fn records(&self) -> u64 {
        0
    }
    /// Who makes the next access; and others have their turn.
    fn now(&mut self, _who: Who) {}
    fn pass(&mut self) {}

    fn sender_died(&mut self) {
        self.kernel().ended = true;
    }

    // Over a mirror (`ringlet_core::mirror`) others do what is done here in one memory.

    const MIRRORED: bool = false;
    /// Is all delivered that was published and said before this was first asked?
    fn is_delivered(&mut self, _asked: &mut Option<u32>) -> bool {
        true
    }
    /// Does nobody put doorbells any more?
    fn is_silent(&mut self) -> bool {
        true
    }
    fn put_bell(&mut self) {
        if self.kernel().write(None) {
            self.set(Word::Bells, self.get(Word::Bells) + 1);
        }
    }
}

/// How threads take turns.
pub trait Engine {
    type World: World;
    /// One access, whole.
    fn op(&self, access: impl FnOnce(&mut Self::World) -> u64) -> u64;
    /// The same, of what only one thread looks at, or none that could tell the difference if others ran meanwhile.
    fn alone(&self, access: impl FnOnce(&mut Self::World) -> u64) -> u64 {
        self.op(access)
    }
    /// Will nobody who is to tell a difference look at the word any more, or write to it?
    fn is_settled(&self, _word: Word) -> bool {
        false
    }
    /// Waits until this is true; false if it is not waited for any longer.
    fn wait(&self, until: impl FnMut(&mut Self::World) -> bool) -> bool;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// A thread that rings says so to the receiver, and to its own end.
    RingersCount,
    /// It rings only where a byte is a doorbell.
    RingersLook,
    /// A sender that marks or ends its direction says that it is at work, and looks whether the receiver has left.
    MarkersCount,
    MarkersLook,
    /// It waits for its own ringers before it leaves the ring.
    SenderAwaitsRingers,
    /// It enters only a ring that is drained.
    SenderAwaitsReceiver,
    /// It sends again only what was not taken.
    SenderHeedsUsed,
    /// A receiver that leaves waits until the sender is quiet, follows the marks that it finds then, and throws away as many doorbells as were
    /// sent.
    ReceiverWaits,
    ReceiverFollowsMarks,
    ReceiverCountsBells,
    /// One that stays after all looks whether it was answered.
    ReceiverHeedsAnswer,
    /// It counts what waits in the kernel before it looks at the ring, and looks for the end before both.
    KernelBeforeRing,
    EndBeforeKernel,
    /// It says that it has met a `Start`, as long as something before the ring is not taken.
    ReceiverSaysDraining,
    /// Over a mirror, a sender waits until no more doorbells are put before it says where they end, and until what it says is delivered before
    /// the kernel gets more than doorbells.
    SenderAwaitsSilence,
    SenderAwaitsDelivery,
}

pub const RULES: [Rule; 14] = [
    Rule::RingersCount,
    Rule::RingersLook,
    Rule::MarkersCount,
    Rule::MarkersLook,
    Rule::SenderAwaitsRingers,
    Rule::SenderAwaitsReceiver,
    Rule::SenderHeedsUsed,
    Rule::ReceiverWaits,
    Rule::ReceiverFollowsMarks,
    Rule::ReceiverCountsBells,
    Rule::ReceiverHeedsAnswer,
    Rule::KernelBeforeRing,
    Rule::EndBeforeKernel,
    Rule::ReceiverSaysDraining,
];

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Who {
    /// A thread of the sender's that holds its lock; one that rings; the receiver.
    Sender,
    Ringer,
    Receiver,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failed {
    /// The kernel has no room now.
    Full,
    Fault(Fault),
    /// Somebody was waited for too long, or changes too often.
    Stuck,
}

/// One thread's view of an end.
pub struct Side<'a, E> {
    pub engine: &'a E,
    pub who: Who,
    pub sender: &'a Sender,
    pub receiver: &'a Receiver,
    /// The rule that is broken.
    pub broken: Option<Rule>,
}

impl<E: Engine> Side<'_, E> {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn on_word(&self, word: Word, access: impl FnOnce(&mut E::World) -> u64) -> u64 {
        match self.engine.is_settled(word) {
            true => self.engine.alone(access),
            false => self.engine.op(access),
        }
    }

    fn word(&self, word: Word) -> u64 {
        self.on_word(word, |world| world.get(word))
    }

    fn set_word(&self, word: Word, value: u64) {
        self.on_word(word, |world| {
            world.set(word, value);
            0
        });
    }

    /// Before the kernel gets a byte that a mark or a word gives its meaning.
    fn await_delivery(&self) {
        let mut asked = None;
        if E::World::MIRRORED && !self.breaks(Rule::SenderAwaitsDelivery) {
            // (If it is waited for in vain, what follows finds that out.)
            let _ = self.engine.wait(|world| world.is_delivered(&mut asked));
        }
    }

    fn add(&self, word: Word, n: i64) {
        self.on_word(word, |world| {
            world.set(word, world.get(word).wrapping_add_signed(n));
            0
        });
    }

    fn counts_itself(&self) -> bool {
        match self.who {
            Who::Ringer => !self.breaks(Rule::RingersCount),
            _ => !self.breaks(Rule::MarkersCount),
        }
    }
}

impl<E: Engine> Leaving for Side<'_, E> {
    fn state(&self) -> u32 {
        self.word(Word::State) as u32
    }
    fn set_state(&self, state: u32) {
        self.set_word(Word::State, state.into());
    }
    fn used(&self) -> u64 {
        let used = self.engine.alone(|world| world.get(Word::Used));
        if self.breaks(Rule::SenderHeedsUsed) { 0 } else { used }
    }
    fn set_used(&self, used: u64) {
        self.engine.alone(|world| {
            world.set(Word::Used, used);
            0
        });
    }
    fn working(&self) -> u32 {
        self.word(Word::Working) as u32
    }
    fn begin_work(&self) {
        if self.counts_itself() {
            self.add(Word::Working, 1);
        }
    }
    fn end_work(&self) {
        if self.counts_itself() {
            self.add(Word::Working, -1);
        }
    }
    fn answered(&self) -> u32 {
        match self.who {
            Who::Receiver if self.breaks(Rule::ReceiverHeedsAnswer) => u32::MAX,
            _ => self.word(Word::Answered) as u32,
        }
    }
    fn set_answered(&self, number: u32) {
        self.set_word(Word::Answered, number.into());
    }
    fn unless_left(&self, act: impl FnOnce()) -> bool {
        let _working = self.work();
        let stays = !self.has_left() || self.breaks(Rule::MarkersLook);
        if stays {
            act();
        }
        stays
    }
}

impl<E: Engine> Outgoing for Side<'_, E> {
    type Error = Failed;
    type Words = Self;

    fn sender(&self) -> &Sender {
        self.sender
    }
    fn words(&self) -> &Self {
        self
    }
    fn drained(&self) -> bool {
        self.breaks(Rule::SenderAwaitsReceiver)
            || self.engine.op(|world| world.drained().into()) != 0
    }
    fn outstanding(&self) -> usize {
        self.engine.op(|world| world.outstanding()) as usize
    }
    fn push_mark(&self, mark: Mark) -> bool {
        self.engine.op(|world| world.push_mark(mark).into()) != 0
    }
    fn take_credit(&self) {
        self.engine.op(|world| {
            world.take_credit();
            0
        });
    }
    fn pass_oldest(&self) -> bool {
        self.engine.alone(|world| world.pass_oldest().into()) != 0
    }
    fn restart_bells(&self) {
        self.set_word(Word::Bells, 0);
    }
    fn bells(&self) -> u64 {
        self.word(Word::Bells)
    }
    fn back_place(&self) -> Result<u64, Failed> {
        Ok(self.sender.started() + self.word(Word::Bells))
    }
    fn send_again(&self, used: u64) -> Result<u64, Failed> {
        const FULL: u64 = u64::MAX;
        let sent = self.engine.op(|world| {
            let bytes = world.oldest(used);
            match bytes.iter().take_while(|byte| world.kernel().write(Some(**byte))).count() {
                0 if !bytes.is_empty() => FULL,
                n => n as u64,
            }
        });
        if sent == FULL { Err(Failed::Full) } else { Ok(sent) }
    }
    fn put_bell(&self) {
        // (`bells::ring` has models of its own.)
        self.engine.op(|world| {
            world.put_bell();
            0
        });
    }
    fn begin_bell(&self) {
        if !self.breaks(Rule::RingersCount) {
            self.add(Word::Ringers, 1);
        }
    }
    fn end_bell(&self) {
        if !self.breaks(Rule::RingersCount) {
            self.add(Word::Ringers, -1);
        }
    }
    fn await_bells(&self) -> Result<(), Failed> {
        let quiet = self.breaks(Rule::SenderAwaitsRingers)
            || self.engine.wait(|world| world.get(Word::Ringers) == 0);
        let silent = !E::World::MIRRORED
            || self.breaks(Rule::SenderAwaitsSilence)
            || self.engine.wait(World::is_silent);
        if quiet && silent { Ok(()) } else { Err(Failed::Stuck) }
    }
    fn is_draining(&self) -> bool {
        self.word(Word::Draining) != 0
    }
    fn went_back(&self) {
        self.await_delivery();
    }
    fn returns(&self) {
        self.await_delivery();
    }
    fn has_returned(&self) {}
    fn gives_up(&self) -> Failed {
        Failed::Stuck
    }
    fn path(&self) -> Sending {
        match self.who {
            Who::Ringer if self.breaks(Rule::RingersLook) => Sending::Ring,
            Who::Ringer if self.word(Word::Path) != Sending::Ring as u64 => Sending::Kernel,
            Who::Ringer => Sending::Ring,
            _ => self.sender.path(),
        }
    }
    fn set_path(&self, path: Sending) {
        self.sender.turn_to(path);
        self.set_word(Word::Path, path as u64);
    }
}

impl<E: Engine> Incoming for Side<'_, E> {
    type Error = Failed;
    type Words = Self;

    fn receiver(&self) -> &Receiver {
        self.receiver
    }
    fn words(&self) -> &Self {
        self
    }
    fn head(&self) -> Head {
        decode(self.engine.op(|world| encode(world.head())))
    }
    fn mark_ahead(&self) -> Option<Mark> {
        if self.breaks(Rule::ReceiverFollowsMarks) {
            return None;
        }
        let head = |mark: Option<Mark>| encode(mark.map_or(Head::Empty, Head::Mark));
        match decode(self.engine.op(|world| head(world.mark_ahead()))) {
            Head::Mark(mark) => Some(mark),
            _ => None,
        }
    }
    fn used(&self) -> u64 {
        self.engine.alone(|world| world.used())
    }
    fn skip(&self, bytes: u64) -> bool {
        self.engine.op(|world| world.skip(bytes).into()) != 0
    }
    fn pass_mark(&self, _wakes: bool) {
        self.engine.op(|world| {
            world.pass_mark();
            0
        });
    }
    fn taken(&self) -> Result<u64, Failed> {
        if self.receiver.taken().is_none() {
            let measure = |world: &mut E::World| match world.kernel().counts_nothing {
                true => 0,
                false => world.kernel().taken,
            };
            self.receiver.begin_count(self.engine.alone(measure));
        }
        Ok(self.receiver.taken().expect("counted from here on"))
    }
    fn base(&self, start: u64, taken: u64) -> u64 {
        let counts_nothing = self.engine.alone(|world| world.kernel().counts_nothing.into()) != 0;
        if counts_nothing { taken.wrapping_sub(start) } else { 0 }
    }
    fn throw_away(&self, most: u64) -> Result<u64, Failed> {
        let n = self.engine.op(|world| {
            let n = most.min(world.kernel().here.len() as u64);
            for _ in 0..n {
                if world.kernel().take() != Some(None) {
                    world.record().wrong("a byte of the stream thrown away");
                }
            }
            n
        });
        match n {
            0 if self.engine.op(|world| world.kernel().is_over().into()) == 0 => Err(Failed::Full),
            n => Ok(n),
        }
    }
    fn is_over(&self) -> bool {
        let over =
            |world: &mut E::World| world.kernel().is_over() && world.kernel().here.is_empty();
        self.engine.op(|world| over(world).into()) != 0
    }
    fn bells(&self) -> u64 {
        match self.breaks(Rule::ReceiverCountsBells) {
            true => self.engine.op(|world| world.kernel().here.len() as u64),
            false => self.word(Word::Bells),
        }
    }
    fn has_ended(&self) -> bool {
        self.word(Word::Shut) != 0 || self.engine.op(|world| world.kernel().is_over().into()) != 0
    }
    fn say_draining(&self, draining: bool) {
        self.set_word(
            Word::Draining,
            (draining && !self.breaks(Rule::ReceiverSaysDraining)).into(),
        );
    }
    fn ask_back(&self) {
        self.engine.alone(|world| {
            world.set(Word::KeepOut, 1);
            0
        });
    }
    fn is_quiet(&self) -> bool {
        self.breaks(Rule::ReceiverWaits) || self.word(Word::Working) == 0
    }
    fn await_quiet(&self) -> bool {
        self.breaks(Rule::ReceiverWaits) || self.engine.wait(|world| world.get(Word::Working) == 0)
    }
    fn turned(&self) {}
    fn fails(&self, fault: Fault) -> Failed {
        Failed::Fault(fault)
    }
}

/// What the threads of the two ends do, each of it as the socket layer does it.
impl<E: Engine> Side<'_, E> {
    /// Into the ring, if that can be.
    pub fn try_start(&self) {
        if self.sender.path() != Sending::Kernel || !self.is_taken() {
            return;
        }
        const LATER: u64 = u64::MAX;
        let place = self.engine.op(|world| {
            let kernel = world.kernel();
            match kernel.counts_nothing {
                false => kernel.written,
                // All that was sent is taken.
                true if kernel.written == kernel.taken => 0,
                true => LATER,
            }
        });
        if place != LATER {
            self.start(place);
        }
    }

    /// `stream::send_now`: so many more bytes of the stream, as far as there is room.
    pub fn send(&self, n: u64) -> Result<(), Failed> {
        if self.sender.in_ring() && !self.is_taken() {
            match self.has_left() {
                true => self.return_unread()?,
                false => self.go_back(Sending::KernelForGood)?,
            }
        }
        if self.sender.path() == Sending::Returning {
            self.return_unread()?;
        }
        if !self.sender.in_ring() {
            self.engine.op(|world| {
                for _ in 0..n {
                    let byte = stream(world.record().sent);
                    if !world.kernel().write(Some(byte)) {
                        break;
                    }
                    world.record().sent += 1;
                }
                0
            });
            return Ok(());
        }
        self.engine.op(|world| {
            let first = world.record().sent;
            let bytes: Vec<u8> = (first..first + n).map(stream).collect();
            let pushed = world.push(&bytes);
            world.record().sent += pushed;
            0
        });
        // After the publish: a receiver that left the ring just now, and did not see the record, has it sent again.
        if self.has_left() {
            let _ = self.return_unread();
        }
        Ok(())
    }

    /// `moving::answer_return`: a sender that has nothing to send looks around.
    pub fn look_around(&self) -> Result<(), Failed> {
        let moved = matches!(self.sender.path(), Sending::Ring | Sending::Returning);
        if moved && self.has_left() { self.return_unread() } else { Ok(()) }
    }

    pub fn step_back(&self, to: Sending) -> Result<(), Failed> {
        if self.sender.in_ring() { self.go_back(to) } else { Ok(()) }
    }

    /// shutdown(SHUT_WR).
    pub fn shut(&self) -> Result<(), Failed> {
        self.end(|| self.set_word(Word::Shut, 1))?;
        self.await_delivery();
        self.engine.op(|world| {
            world.kernel().ended = true;
            0
        });
        Ok(())
    }

    /// `stream::receive_now`: at most so many bytes. What was found: anything, or the end.
    pub fn receive(&self, most: u64) -> Result<Step, Failed> {
        for _ in 0..CHANGES_MAX {
            let over = || self.on_word(Word::Shut, |world| world.kernel().is_over().into()) != 0;
            let count = || self.engine.op(|world| world.kernel().here.len() as u64);
            let (ended, waiting, ring);
            match self.broken {
                Some(Rule::KernelBeforeRing) => {
                    (ended, ring) = (over(), self.head());
                    waiting = count();
                }
                Some(Rule::EndBeforeKernel) => {
                    waiting = count();
                    (ended, ring) = (over(), self.head());
                }
                _ => {
                    (ended, waiting) = (over(), count());
                    ring = self.head();
                }
            }
            let seen = ringlet_core::handover::Seen { ended, waiting, ring };
            match self.act(self.receiver.next(&seen))? {
                None => {}
                Some(step @ Step::Read(n)) => {
                    let n = n.min(most);
                    self.engine.op(|world| {
                        for _ in 0..n {
                            let byte = world.kernel().take().expect("takes what it has counted");
                            world.record().receive(byte);
                        }
                        0
                    });
                    self.receiver.count_taken(n);
                    return Ok(step);
                }
                Some(Step::Discard(n)) => {
                    let thrown = self.throw_away(n)?;
                    self.receiver.count_taken(thrown);
                }
                Some(Step::Pop) => {
                    self.engine.op(|world| {
                        for byte in world.pop(most) {
                            world.record().receive(Some(byte));
                        }
                        0
                    });
                    return Ok(Step::Pop);
                }
                Some(Step::End) => {
                    self.engine.op(|world| {
                        let record = world.record();
                        if record.got != record.sent {
                            record.wrong("the end before the end");
                        }
                        0
                    });
                    return Ok(Step::End);
                }
                Some(step) => return Ok(step),
            }
        }
        Err(Failed::Stuck)
    }
}

fn encode(head: Head) -> u64 {
    match head {
        Head::Empty => 0,
        Head::Bytes => 1,
        Head::Spoiled => 2,
        Head::Mark(Mark::Start(at)) => 4 * at + 4,
        Head::Mark(Mark::Back(at)) => 4 * at + 5,
    }
}

fn decode(code: u64) -> Head {
    match code {
        0 => Head::Empty,
        1 => Head::Bytes,
        2 => Head::Spoiled,
        _ if code.is_multiple_of(4) => Head::Mark(Mark::Start(code / 4 - 1)),
        _ => Head::Mark(Mark::Back(code / 4 - 1)),
    }
}
