//! The receiver's side.

use super::CHANGES_MAX;
use crate::leaving::{Leaving, ReceiverState};
use crate::record::PlainU64;
use crate::ring::Mark;

/// No kernel holds so many doorbells: who says that they are more is not sane.
const BELLS_MAX: u64 = 8 << 20;

/// Which way the receiving direction comes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Receiving {
    Kernel = 0,
    /// A `Start` was met: the stream's bytes before it are still in the kernel, up to `Receiver::until`.
    Draining = 1,
    Ring = 2,
    /// A `Back` was met, or we have left: doorbells are still in the kernel, up to `Receiver::until`.
    Discarding = 3,
}

/// All places are counted in bytes that were taken from the kernel's connection since it began (or since somebody first asked).
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
#[repr(C)]
pub struct Receiver {
    path: PlainU64,
    /// We have left: what the peer still publishes is not for us.
    left: PlainU64,
    until: PlainU64,
    /// How many were taken, plus one; 0 until that is known.
    taken: PlainU64,
    /// Where place 0 of the sender's marks lies.
    base: PlainU64,
    /// The last `Start`: from here on the kernel's bytes are doorbells.
    bells_from: PlainU64,
}

/// What the receiver has found. The fields stand in the order in which it must look.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The kernel's connection has got its end: what waits is all that will.
    pub ended: bool,
    /// Bytes that wait in it; as many as may be, where their meaning is known without a count (`Draining`, `Discarding`).
    pub waiting: u64,
    pub ring: Head,
}

/// What stands next in the ring.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Head {
    Empty,
    Bytes,
    Mark(Mark),
    /// What no ringlet writes.
    Spoiled,
}

/// What the receiver has to do; afterwards it looks at everything again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Step {
    /// Give at most so many kernel bytes to the program.
    Read(u64),
    /// Throw away so many kernel bytes: doorbells.
    Discard(u64),
    /// Give ring bytes to the program.
    Pop,
    /// Go past the ring's mark.
    Pass(Mark),
    /// The place that was waited for is reached: go on behind it.
    Arrive,
    /// The peer is over; read what it has left in the ring that we had left, as far as it has not sent it again.
    TakeUp,
    /// Sleep until the kernel has something.
    Wait,
    /// End of the stream.
    End,
    Fail(Fault),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fault {
    /// The peer wrote what no ringlet writes.
    Corrupt,
    /// The peer's counts contradict the kernel's, or it ended before what it promised.
    Miscounted,
}

impl Receiver {
    #[inline(always)]
    pub fn path(&self) -> Receiving {
        match self.path.get() {
            0 => Receiving::Kernel,
            1 => Receiving::Draining,
            2 => Receiving::Ring,
            _ => Receiving::Discarding,
        }
    }

    /// In the ring with nothing to do in the kernel first: then `Rx::pop` alone tells what to do, unless it finds nothing.
    #[inline(always)]
    pub fn in_ring(&self) -> bool {
        self.path.get() == Receiving::Ring as u64
    }

    #[inline(always)]
    pub fn has_left(&self) -> bool {
        self.left.get() != 0
    }

    /// Where `Draining` and `Discarding` end.
    pub fn until(&self) -> u64 {
        self.until.get()
    }

    /// Bytes of the stream that the kernel still has before the ring.
    pub fn before_ring(&self) -> u64 {
        self.until().saturating_sub(self.taken().unwrap_or(0))
    }

    pub fn taken(&self) -> Option<u64> {
        self.taken.get().checked_sub(1)
    }

    /// So many were taken so far. From now on all are counted (`count_taken`).
    pub fn begin_count(&self, taken: u64) {
        self.taken.set(taken + 1);
    }

    #[inline]
    pub fn count_taken(&self, bytes: u64) {
        if self.taken.get() != 0 {
            self.taken.set(self.taken.get().wrapping_add(bytes));
        }
    }

    /// The place up to which the kernel's bytes are doorbells, if the sender has sent so many since its `Start`.
    pub fn bells_end(&self, bells: u64) -> u64 {
        self.bells_from.get().wrapping_add(bells)
    }

    /// What is sent again to us, who have left, begins at this place.
    pub fn begins_again_at(&self, place: u64) {
        self.until.set(place);
        self.path.set(Receiving::Discarding as u64);
    }

    /// Bytes that were taken since, once we have left and have come to what is sent again.
    fn behind_bells(&self) -> u64 {
        self.taken().unwrap_or(0).saturating_sub(self.until())
    }

    /// Where the kernel's bytes behind this mark begin to be the stream's.
    pub fn goes_on_at(&self, mark: Mark) -> Option<u64> {
        match mark {
            Mark::Back(place) => Some(self.base.get().wrapping_add(place)),
            Mark::Start(_) => None,
        }
    }

    pub fn reset(&self) {
        let Receiver { path, until, taken, base, bells_from, left } = self;
        for word in [path, until, taken, base, bells_from, left] {
            word.set(0);
        }
    }

    pub fn next(&self, seen: &Seen) -> Step {
        match self.path() {
            path @ (Receiving::Draining | Receiving::Discarding) => {
                let Some(left) = self.until().checked_sub(self.taken().unwrap_or(0)) else {
                    return Step::Fail(Fault::Miscounted);
                };
                match left.min(seen.waiting) {
                    _ if left == 0 => Step::Arrive,
                    0 if seen.ended => Step::Fail(Fault::Miscounted),
                    0 => Step::Wait,
                    n if path == Receiving::Draining => Step::Read(n),
                    n => Step::Discard(n),
                }
            }
            path => match (path, seen.ring) {
                (Receiving::Kernel, _) if self.has_left() => match seen.waiting {
                    0 if seen.ended && seen.ring != Head::Empty => Step::TakeUp,
                    0 if seen.ended => Step::End,
                    0 => Step::Wait,
                    n => Step::Read(n),
                },
                (Receiving::Kernel, Head::Mark(mark @ Mark::Start(_))) => Step::Pass(mark),
                (Receiving::Ring, Head::Mark(mark @ Mark::Back(_))) => Step::Pass(mark),
                (Receiving::Ring, Head::Bytes) => Step::Pop,
                (_, Head::Empty) => match seen.waiting {
                    0 if seen.ended => Step::End,
                    0 => Step::Wait,
                    n if path == Receiving::Ring => Step::Discard(n),
                    n => Step::Read(n),
                },
                // The first record of a stay in the ring is a mark.
                _ => Step::Fail(Fault::Corrupt),
            },
        }
    }
}

/// A receiving direction with what its end has around it. Receive lock held.
pub trait Incoming {
    type Error;
    type Words: Leaving;

    fn receiver(&self) -> &Receiver;
    fn words(&self) -> &Self::Words;

    // ---- the ring ----

    fn head(&self) -> Head;
    /// The first mark in all that is published.
    fn mark_ahead(&self) -> Option<Mark>;
    /// Bytes taken of the record that stands next.
    fn used(&self) -> u64;
    /// Goes past so many bytes. False, and nothing done, if no more than these stand there, or it is not known how many came by the kernel.
    fn skip(&self, bytes: u64) -> bool;
    /// Goes past the mark that stands next; `wakes`: a sender that waits for room is looked for.
    fn pass_mark(&self, wakes: bool);

    // ---- the kernel's connection ----

    /// How much was taken from it: measured, or as it is counted.
    fn taken(&self) -> Result<u64, Self::Error>;
    /// Where place 0 of the marks lies, if the one of this `Start` is met now.
    fn base(&self, start: u64, taken: u64) -> u64;
    /// Takes at most so many bytes and throws them away. 0: no more come, for now at least.
    fn throw_away(&self, most: u64) -> Result<u64, Self::Error>;
    /// Nothing waits, and the peer has ended: what is missing before a place is missed.
    fn is_over(&self) -> bool;

    // ---- the sender's words, and ours ----

    /// Doorbells that it has put on the kernel's connection since the last `Start`.
    fn bells(&self) -> u64;
    /// Has the sender ended, in whatever way?
    fn has_ended(&self) -> bool;
    /// Says whether bytes from before the last `Start` are still in the kernel.
    fn say_draining(&self, draining: bool);
    /// Asks the sender to go back when it sends the next time.
    fn ask_back(&self);
    /// Is no thread of the sender's at work? Looked at a few times at most; or waited for, as long as one may be waited for.
    fn is_quiet(&self) -> bool;
    fn await_quiet(&self) -> bool;
    /// Can nothing the sender says come here any more, nor the other way? (It is told how it goes on by other means.)
    fn is_cut_off(&self) -> bool {
        false
    }

    // ---- what it is told ----

    /// It comes another way now.
    fn turned(&self);
    /// The connection ends with an error.
    fn fails(&self, fault: Fault) -> Self::Error;

    fn turn_to(&self, path: Receiving) {
        self.receiver().path.set(path as u64);
        self.turned();
    }

    /// The next step by what was seen in the kernel, in this order: `ended`, `waiting`, and only then the ring. `None` where it was one that only
    /// changes the path: look again.
    fn follow(&self, ended: bool, waiting: u64) -> Result<Option<Step>, Self::Error> {
        self.act(self.receiver().next(&Seen { ended, waiting, ring: self.head() }))
    }

    /// What of a step only changes the path is done: then `None`.
    fn act(&self, step: Step) -> Result<Option<Step>, Self::Error> {
        match step {
            Step::Pass(Mark::Start(start)) => self.start_met(start)?,
            Step::Pass(Mark::Back(place)) => self.back_met(place),
            Step::Arrive => self.arrive(),
            Step::TakeUp if self.take_up() => {}
            Step::TakeUp => return Ok(Some(Step::End)),
            Step::Fail(fault) => return Err(self.fails(fault)),
            step => return Ok(Some(step)),
        }
        Ok(None)
    }

    /// Follows the marks that stand next, as far as they go without bytes of the program's. False: doorbells are still to come, though the
    /// kernel says that no more bytes do.
    fn settle(&self) -> Result<bool, Self::Error> {
        for _ in 0..CHANGES_MAX {
            match self.receiver().path() {
                Receiving::Discarding if !self.discard()? => return Ok(false),
                Receiving::Discarding => {}
                Receiving::Draining if self.receiver().before_ring() > 0 => return Ok(true),
                _ => {
                    if self.follow(false, 0)?.is_some() {
                        return Ok(true);
                    }
                }
            }
        }
        Err(self.fails(Fault::Corrupt))
    }

    fn start_met(&self, start: u64) -> Result<(), Self::Error> {
        let receiver = self.receiver();
        let taken = self.taken()?;
        let base = self.base(start, taken);
        let until = base.wrapping_add(start);
        let Some(left) = until.checked_sub(taken) else {
            return Err(self.fails(Fault::Miscounted));
        };
        receiver.base.set(base);
        receiver.bells_from.set(until);
        receiver.until.set(until);
        self.say_draining(left > 0);
        // (A sender that waits for room in the ring is woken when that is read, after what it still has in the kernel: if it were killed
        // with a doorbell unread, the kernel would reset, and that would be lost.)
        self.pass_mark(left == 0);
        self.turn_to(Receiving::Draining);
        Ok(())
    }

    fn back_met(&self, place: u64) {
        let receiver = self.receiver();
        self.pass_mark(true);
        // A sender that looked before we left, and then saw the ring drained, may still enter it: in vain.
        if !self.words().is_taken() {
            receiver.left.set(1);
        }
        receiver.until.set(receiver.base.get().wrapping_add(place));
        self.turn_to(Receiving::Discarding);
    }

    /// The place before the ring, or behind the doorbells, is reached.
    fn arrive(&self) {
        if self.receiver().path() == Receiving::Discarding {
            self.turn_to(Receiving::Kernel);
            return;
        }
        self.say_draining(false);
        match self.receiver().has_left() {
            false => self.turn_to(Receiving::Ring),
            true => self.turn_behind_bells(),
        }
    }

    /// Behind the doorbells the kernel has what the peer sends again.
    fn turn_behind_bells(&self) {
        self.receiver().until.set(self.receiver().bells_end(self.bells()));
        self.turn_to(Receiving::Discarding);
    }

    /// Doorbells up to the byte where the stream goes on in the kernel. False: not all have come, and the kernel says that no more bytes do;
    /// not for the peer's end, but for our own.
    fn discard(&self) -> Result<bool, Self::Error> {
        let done = self.discard_to(self.receiver().until())?;
        match done {
            true => self.arrive(),
            false if self.is_over() => return Err(self.fails(Fault::Miscounted)),
            false => {}
        }
        Ok(done)
    }

    /// Throws away what the kernel has up to this place. False when it ends before.
    fn discard_to(&self, place: u64) -> Result<bool, Self::Error> {
        let most = self.taken()?.saturating_add(BELLS_MAX);
        loop {
            let taken = self.taken()?;
            if taken >= most {
                return Err(self.fails(Fault::Corrupt));
            }
            match place.checked_sub(taken) {
                // Bytes of the stream were taken for doorbells.
                None => return Err(self.fails(Fault::Miscounted)),
                Some(0) => return Ok(true),
                Some(left) => match self.throw_away(left)? {
                    0 => return Ok(false),
                    n => self.receiver().count_taken(n),
                },
            }
        }
    }

    /// Does something stand unread in the ring, which we have come to or may yet?
    fn leaves_unread(&self) -> bool {
        self.receiver().path() != Receiving::Kernel && self.head() == Head::Bytes
    }

    /// The receiver leaves the ring: the peer sends again what is unread. Unless it has gone back or ended first, not knowing of this: then
    /// all is read where it stands. So it is if the program `reads_on` here, since the peer might be long in sending it again: then the peer is
    /// asked to go back when it sends the next time.
    fn leave(&self, reads_on: bool) -> Result<(), Self::Error> {
        if !self.words().is_taken() {
            return Ok(());
        }
        // (Doorbells may still have to come.)
        let _ = self.settle();
        if reads_on && (self.leaves_unread() || !self.is_quiet()) {
            self.ask_back();
            return Ok(());
        }
        self.words().leave(self.used());
        if !self.await_quiet() && !self.leaves_unheard()? {
            return Ok(());
        }
        // What the peer did unaware of it is there now.
        let _ = self.settle();
        let unread = self.leaves_unread();
        if unread && (self.goes_on_ahead() || self.has_ended_unanswered()) {
            return Ok(());
        }
        if unread && reads_on {
            match self.words().stay(|| self.await_quiet()) {
                Some(true) => {
                    self.ask_back();
                    return Ok(());
                }
                Some(false) => {}
                None if self.leaves_unheard()? => {}
                None => return Ok(()),
            }
        }
        self.receiver().left.set(1);
        if self.receiver().path() == Receiving::Ring {
            self.turn_behind_bells();
        }
        let _ = self.settle();
        Ok(())
    }

    /// Whether the sender has heard that we leave is not known. Where it never will be, we stay, unless it has answered: true then.
    fn leaves_unheard(&self) -> Result<bool, Self::Error> {
        if !self.is_cut_off() {
            return Err(self.fails(Fault::Corrupt));
        }
        Ok(self.words().stay(|| true) == Some(false))
    }

    /// Does the stream go on in the kernel behind what is published?
    fn goes_on_ahead(&self) -> bool {
        self.mark_ahead().is_some_and(|mark| matches!(mark, Mark::Back(_)))
    }

    /// Has the peer ended, without sending anything again?
    fn has_ended_unanswered(&self) -> bool {
        // (It answers before it ends.)
        self.has_ended() && self.words().receiver_state() == ReceiverState::Leaves
    }

    /// The kernel says that no more bytes come. Did the peer end without sending again all that stands unread in the ring? Then the rest is read
    /// there.
    fn take_up(&self) -> bool {
        let (receiver, head) = (self.receiver(), self.head());
        let (bytes, start) = (head == Head::Bytes, matches!(head, Head::Mark(Mark::Start(_))));
        // (What the sender has answered it has answered before its end, which the kernel has told: nobody is waited for.)
        let stays = receiver.has_left()
            && match self.words().receiver_state() {
                ReceiverState::Leaves => {
                    (bytes || start) && self.words().stay(|| true) == Some(true)
                }
                // It was killed in the middle, perhaps.
                ReceiverState::Answered => bytes && self.skip(receiver.behind_bells()),
                ReceiverState::Takes | ReceiverState::Closed => false,
            };
        if stays {
            receiver.left.set(0);
            self.turn_to(if bytes { Receiving::Ring } else { Receiving::Kernel });
        }
        stays
    }

    /// We have left, and the sender has not answered: then we stay after all, and read the rest as it stands. False if it has, or has said nothing to
    /// count on.
    fn stay_after_all(&self) -> bool {
        let receiver = self.receiver();
        let may = receiver.has_left()
            && self.head() == Head::Bytes
            && self.words().receiver_state() == ReceiverState::Leaves;
        if !may {
            return false;
        }
        let stays = self.words().stay(|| self.await_quiet()) == Some(true);
        if stays {
            receiver.left.set(0);
        }
        match receiver.path() {
            // What the kernel still has before the ring comes first.
            Receiving::Draining => {}
            _ if stays => self.turn_to(Receiving::Ring),
            // Who rang meanwhile has put more doorbells before what is sent again, of which nothing was taken yet.
            _ => self.turn_behind_bells(),
        }
        stays
    }

    /// Nobody takes from here any more. True if bytes are unread in the ring, which are lost so.
    fn close(&self) -> bool {
        let unanswered = self.words().close();
        let _ = self.settle();
        // We had left the ring, and what is unread there was not sent again: now it never will be.
        let abandoned = unanswered && self.receiver().has_left();
        (self.receiver().in_ring() || abandoned) && self.head() == Head::Bytes
    }
}
