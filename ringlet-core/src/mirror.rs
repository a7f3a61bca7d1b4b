//! Two segments, one for each end of a connection, that an *adapter* keeps in step: what crosses, in which order, and what an end asks for.
//!
//! ```text
//! sender's program     its segment             adapter            the other segment     receiver's program
//!   publishes       -> slots, data    -- data, slot, header ----> slots, data        -> reads
//!   says            -> Sender, line 1 -- behind these records --> Sender, line 1     -> reads
//!   reads           <- Credit         <------------------------   Credit             <- releases
//!   reads           <- Receiver, l. 1 <-- with its credit -----   Receiver, line 1   <- says
//!   wishes, asks   <-> Receiver, l. 2     (the adapter is each    Sender, line 2    <-> wishes, taking
//!                      Sender, line 2      one's local peer)      Receiver, line 2
//! ```
//!
//! **Order.** A sender's line is delivered behind all records that were published before it was read: where it says that the sender has ended, has
//! answered or is not at work, what it did before is there. Of the receiver's line, `draining` comes before the credit that was read before it, and
//! `state` with `used` comes behind the credit that was read after it: what is sent again was not taken, and what is taken was not before the ring.
//!
//! **Echo.** In one memory, of a receiver's word that it leaves and a sender's that it is at work one is seen by the other end. Over a mirror
//! that takes a round trip: the adapter delivers the receiver's line, and after it (a fence in between) reads the sender's, delivers that, and then
//! says (`Sender::echo`) by which of the receiver's `changes` it did so.
//!
//! **Bells.** The adapter alone puts doorbell bytes on the kernel connection, behind the `Start` that it has delivered, unless the receiver is seen
//! to have left, or the sender asks for silence. Of what an end asks, the adapter hears as of records: who asks rings the adapter's context
//! (`wait::armed`) afterwards.
//!
//! **Severing.** An adapter that stands still, and may go on, must not put a record or a doorbell where its end has turned to the kernel. So it says when it
//! is at work for an end, and then looks whether that has severed itself; an end severs itself, and then looks whether the adapter is at work. One
//! sees the other. An end that waits in vain for a pass to end goes on with what was put into its segment by then. So before the other end is told of what
//! was put there, the adapter looks once more.

use crate::layout::{Control, Receiver, Sender};
use crate::leaving::Leaving;
use crate::sync::{Ordering, fence};
use crate::wait::fence_for_the_model_checker;

/// `Receiver::parted`.
const PARTED: u32 = 1;
const BOTH_PARTED: u32 = 2;

/// Has the count come to this one?
fn has_come(count: u32, to: u32) -> bool {
    count.wrapping_sub(to) as i32 >= 0
}

/// What a sender asks of its adapter, in its own segment. (Each ends with a SeqCst access: look at the adapter's context afterwards.) The
/// answers come soon, if the adapter lives: it never waits for a program.
pub trait Asks {
    /// The adapter is to say when all that was published and said before is delivered: `is_delivered` by this number. (And the receiver's words of
    /// the other direction are, once `is_echoed`.)
    fn ask_delivery(&self) -> u32;
    fn is_delivered(&self, asked: u32) -> bool;
    /// No more doorbell bytes are to be put on the kernel connection, until `allow_bells`. Send lock held. Asked again, it is the same.
    fn ask_silence(&self);
    /// How many there are since the last `Start`, once no more come.
    fn bells_of_silence(&self) -> Option<u64>;
    /// Before a `Start` is published. Send lock held.
    fn allow_bells(&self);
    /// The receiver is to be rung by a byte (as long as it would be a doorbell), or by its event.
    fn ask_byte(&self);
    fn ask_event(&self);
    /// Our end is closed: all is to be delivered, and the adapter is to close what it holds of our kernel connection. To be asked for in our
    /// sending direction, after the last word in either.
    fn ask_parting(&self);
    fn has_parted(&self) -> bool;
    /// Have both ends parted? Then nothing is delivered or answered any more.
    fn is_over(&self) -> bool;
    /// For a receiver, in its own segment: does the sender know of our last `state`, and do we know what it did before? Then `is_quiet_beyond` tells.
    fn is_echoed(&self) -> bool;
    /// `Leaving::is_quiet` over a mirror.
    fn is_quiet_beyond(&self) -> bool;
    /// The adapter is to touch neither this end's segment nor its connection any more: so it is once it `has_let_go`. In our sending direction.
    fn sever(&self);
    fn has_let_go(&self) -> bool;
    /// So many of the adapter's threads put a doorbell byte on our connection, or are about to.
    fn bytes_on_their_way(&self) -> u32;
}

impl Asks for Control {
    fn ask_delivery(&self) -> u32 {
        // ORDER: SeqCst; pairs with `SenderLine::read`: what was said and published before is seen with it.
        self.sender.flushes.fetch_add(1, Ordering::SeqCst).wrapping_add(1)
    }

    fn is_delivered(&self, asked: u32) -> bool {
        // ORDER: Acquire; pairs with `answer_delivery` (Release), behind what was delivered.
        has_come(self.receiver.delivered.load(Ordering::Acquire), asked)
    }

    fn ask_silence(&self) {
        let hold = self.sender.hold.load(Ordering::Relaxed);
        // ORDER: SeqCst, as `ask_delivery`.
        self.sender.hold.store(hold | 1, Ordering::SeqCst);
    }

    fn bells_of_silence(&self) -> Option<u64> {
        let hold = self.sender.hold.load(Ordering::Relaxed);
        // ORDER: Acquire; pairs with `answer_silence` (Release), behind the number.
        let silent = hold & 1 != 0 && self.receiver.held.load(Ordering::Acquire) == hold;
        silent.then(|| self.receiver.bells_put.load(Ordering::Relaxed))
    }

    fn allow_bells(&self) {
        let hold = self.sender.hold.load(Ordering::Relaxed);
        // (The `Start` that is published next shows it.)
        self.sender.hold.store(hold.wrapping_add(1) & !1, Ordering::Relaxed);
    }

    fn ask_byte(&self) {
        // ORDER: SeqCst, as `ask_delivery`.
        self.sender.rings.fetch_add(1, Ordering::SeqCst);
    }

    fn ask_event(&self) {
        // ORDER: SeqCst, as `ask_delivery`.
        self.sender.events.fetch_add(1, Ordering::SeqCst);
    }

    fn ask_parting(&self) {
        // ORDER: SeqCst, as `ask_delivery`.
        self.sender.parting.store(1, Ordering::SeqCst);
    }

    fn has_parted(&self) -> bool {
        // ORDER: Acquire; pairs with `answer_parting` (Release).
        self.receiver.parted.load(Ordering::Acquire) != 0
    }

    fn is_over(&self) -> bool {
        // ORDER: Acquire; pairs with `answer_over` (Release).
        self.receiver.parted.load(Ordering::Acquire) == BOTH_PARTED
    }

    fn is_echoed(&self) -> bool {
        let changes = self.receiver.changes.load(Ordering::Relaxed);
        // ORDER: Acquire; pairs with `answer_echo` (Release), behind the sender's line.
        self.sender.echo.load(Ordering::Acquire) == changes
    }

    fn is_quiet_beyond(&self) -> bool {
        // (In this order.)
        self.is_echoed() && self.is_quiet()
    }

    fn sever(&self) {
        // ORDER: SeqCst, before the look; pairs with `begin_pass` and `begin_byte`.
        self.sender.severed.store(1, Ordering::SeqCst);
        fence_for_the_model_checker();
    }

    fn has_let_go(&self) -> bool {
        // ORDER: SeqCst; pairs with `end_pass` and `end_byte`: what was done is there.
        self.serving.passes.load(Ordering::SeqCst) == 0 && self.bytes_on_their_way() == 0
    }

    fn bytes_on_their_way(&self) -> u32 {
        // ORDER: SeqCst; pairs with `end_byte`: the byte is there.
        self.serving.bytes.load(Ordering::SeqCst)
    }
}

/// The adapter's answers, each in the segment of the end that has asked.
pub trait Answers {
    /// To the sender: what it asked for up to this number is delivered.
    fn answer_delivery(&self, flushes: u32);
    /// No byte is put by this `hold`, nor was since the number was told.
    fn answer_silence(&self, hold: u32, bells: u64);
    fn answer_parting(&self);
    /// Both have parted.
    fn answer_over(&self);
    /// To the receiver: the sender's line was read behind the delivery of its own with this number, and is delivered.
    fn answer_echo(&self, changes: u32);
    /// Around each pass over an end, by the one thread that does so. False if the end has severed itself: then nothing is to be done.
    fn begin_pass(&self) -> bool;
    fn end_pass(&self);
    /// Amid a pass, behind what was put into the segment: has the end not severed itself? Then it has that, and the other end may be told so.
    fn has_what_was_put(&self) -> bool;
    /// The same for a byte on its connection, by any thread.
    fn begin_byte(&self) -> bool;
    fn end_byte(&self);
}

impl Answers for Control {
    fn answer_delivery(&self, flushes: u32) {
        // ORDER: Release; pairs with `is_delivered`.
        self.receiver.delivered.store(flushes, Ordering::Release);
    }

    fn answer_silence(&self, hold: u32, bells: u64) {
        self.receiver.bells_put.store(bells, Ordering::Relaxed);
        // ORDER: Release; pairs with `bells_of_silence`.
        self.receiver.held.store(hold, Ordering::Release);
    }

    fn answer_parting(&self) {
        // ORDER: Release; pairs with `has_parted`.
        self.receiver.parted.store(PARTED, Ordering::Release);
    }

    fn answer_over(&self) {
        // ORDER: Release; pairs with `is_over`.
        self.receiver.parted.store(BOTH_PARTED, Ordering::Release);
    }

    fn answer_echo(&self, changes: u32) {
        // ORDER: Release; pairs with `is_echoed`.
        self.sender.echo.store(changes, Ordering::Release);
    }

    fn begin_pass(&self) -> bool {
        // ORDER: SeqCst, before the look; pairs with `sever`.
        self.serving.passes.store(1, Ordering::SeqCst);
        fence_for_the_model_checker();
        self.sender.severed.load(Ordering::SeqCst) == 0
    }

    fn end_pass(&self) {
        // ORDER: Release; pairs with `has_let_go`.
        self.serving.passes.store(0, Ordering::Release);
    }

    fn has_what_was_put(&self) -> bool {
        // ORDER: SeqCst, behind what was put; pairs with `sever`, behind which the end looks at its segment for the last time.
        fence(Ordering::SeqCst);
        self.sender.severed.load(Ordering::SeqCst) == 0
    }

    fn begin_byte(&self) -> bool {
        // ORDER: SeqCst, before the look; pairs with `sever`.
        self.serving.bytes.fetch_add(1, Ordering::SeqCst);
        fence_for_the_model_checker();
        self.sender.severed.load(Ordering::SeqCst) == 0
    }

    fn end_byte(&self) {
        // ORDER: Release; pairs with `has_let_go`.
        self.serving.bytes.fetch_sub(1, Ordering::Release);
    }
}

/// The sender's mirrored line.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SenderLine {
    pub shut: u32,
    pub working: u32,
    pub answered: u32,
    pub attached: u32,
    pub cutting: u32,
    pub flushes: u32,
    pub rings: u32,
    pub events: u32,
    pub hold: u32,
    pub parting: u32,
    pub shut_at: u64,
    pub kernel_at: u64,
    pub written: u64,
}

impl SenderLine {
    /// As it stands at one moment; `known` is how it stood before. If the program changes it all the time it is `None`, and there is another look.
    #[inline]
    pub fn read(from: &Sender, known: &SenderLine) -> Option<SenderLine> {
        let once = || {
            // ORDER: Acquire, `working` first, and twice: the other words only count up, or are set once, so what is the same both times was so
            // when `working` was read the second time. (As it was `known` to stand counts as the first.) Pairs with `Leaving::end_work` and whatever an end
            // says.
            let of = |word: &crate::sync::AtomicU32| word.load(Ordering::Acquire);
            SenderLine {
                working: of(&from.working),
                shut: of(&from.shut),
                answered: of(&from.answered),
                attached: of(&from.attached),
                cutting: of(&from.cutting),
                flushes: of(&from.flushes),
                rings: of(&from.rings),
                events: of(&from.events),
                hold: of(&from.hold),
                parting: of(&from.parting),
                shut_at: from.shut_at.load(Ordering::Acquire),
                kernel_at: from.kernel_at.load(Ordering::Acquire),
                written: from.written.load(Ordering::Acquire),
            }
        };
        let first = once();
        (first == *known || once() == first).then_some(first)
    }

    pub fn write(&self, to: &Sender) {
        to.shut_at.store(self.shut_at, Ordering::Relaxed);
        to.kernel_at.store(self.kernel_at, Ordering::Relaxed);
        to.written.store(self.written, Ordering::Release);
        // (What is asked is between the sender and the adapter; but that it parts says that all it did is there.)
        // ORDER: Release; pairs with `Leaving::answered`, and with who looks for the end: behind the records.
        for (word, said) in [
            (&to.attached, self.attached),
            (&to.cutting, self.cutting),
            (&to.answered, self.answered),
            (&to.shut, self.shut),
            (&to.parting, self.parting),
        ] {
            word.store(said, Ordering::Release);
        }
        // ORDER: SeqCst, last; pairs with `Leaving::working`.
        to.working.store(self.working, Ordering::SeqCst);
    }
}

/// The receiver's mirrored line, and the credit that belongs to it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReceiverLine {
    pub state: u32,
    pub keep_out: u32,
    pub draining: u32,
    pub changes: u32,
    pub used: u64,
}

impl ReceiverLine {
    /// What stands there. What is read before a credit, of `state`, `changes` and `used`, comes with it; what is read behind it, of the others.
    pub fn read(from: &Receiver) -> ReceiverLine {
        // ORDER: Acquire, `changes` first; pairs with `Leaving::set_state`: the state is of that change, or newer.
        let changes = from.changes.load(Ordering::Acquire);
        let state = from.state.load(Ordering::Acquire);
        let used = from.used.load(Ordering::Relaxed);
        let keep_out = from.keep_out.load(Ordering::Acquire);
        // ORDER: Acquire; pairs with `Incoming::say_draining` (Release).
        let draining = from.draining.load(Ordering::Acquire);
        ReceiverLine { state, keep_out, draining, changes, used }
    }

    /// Before the credit.
    pub fn write_first(&self, to: &Receiver) {
        // ORDER: Release; pairs with `Outgoing::is_draining`, which looks behind the credit.
        to.keep_out.store(self.keep_out, Ordering::Release);
        to.draining.store(self.draining, Ordering::Release);
    }

    /// Behind it.
    pub fn write_last(&self, to: &Receiver) {
        to.used.store(self.used, Ordering::Relaxed);
        // ORDER: SeqCst; pairs with `Leaving::state` (where a sender has counted itself in before). It carries `used`, and the credit.
        to.state.store(self.state, Ordering::SeqCst);
        to.changes.store(self.changes, Ordering::Release);
    }
}
