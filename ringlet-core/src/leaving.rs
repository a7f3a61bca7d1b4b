//! The receiver of a direction leaves the ring, and its sender answers, by words that each have one writer.
//!
//! ```text
//! receiver                                 sender
//!   leave: says that it leaves               works: counts itself in, and only then looks
//!   waits until the sender is quiet            takes: does what counts on a receiver
//!   what the sender did unaware is there       has left: does nothing, or answers
//!                                              counts itself out
//! ```
//!
//! The two cross in two ways only: the sender saw the word and did nothing, or what it did is there once it is quiet. The answer says that
//! the sender sends again, by another way, what the receiver has not taken; from then on the receiver can't stay. One that wants to stay
//! takes its word back, waits until the sender is quiet once more, and finds whether it had answered.
//!
//! Nobody takes from a ring again whose receiver has *closed* it.

use crate::layout::Control;
use crate::sync::Ordering;
use crate::wait::fence_for_the_model_checker;

/// What the receiver of a direction says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceiverState {
    Takes,
    /// It leaves; the sender has not answered.
    Leaves,
    /// It leaves, and the sender sends again what it has not taken.
    Answered,
    Closed,
}

/// `layout::Receiver::state`: these bits, and above them how often the receiver has left, by which it is answered.
const CLOSED: u32 = 1;
const LEAVES: u32 = 2;
const NUMBER: u32 = 4;

/// A thread of the sender's is at work: it does something that counts on a receiver, or rings.
pub struct Working<'a, W: Leaving>(&'a W);

impl<W: Leaving> Drop for Working<'_, W> {
    fn drop(&mut self) {
        self.0.end_work();
    }
}

/// The words, and what is done by them. (A trait, so that a test can have every other step between any two looks at a word.)
pub trait Leaving: Sized {
    fn state(&self) -> u32;
    fn set_state(&self, state: u32);
    fn used(&self) -> u64;
    fn set_used(&self, used: u64);
    fn working(&self) -> u32;
    fn begin_work(&self);
    fn end_work(&self);
    fn answered(&self) -> u32;
    fn set_answered(&self, number: u32);

    /// Does the receiver take from the ring?
    #[inline(always)]
    fn is_taken(&self) -> bool {
        self.state() & (CLOSED | LEAVES) == 0
    }

    /// Does it leave, answered or not?
    #[inline(always)]
    fn has_left(&self) -> bool {
        self.state() & (CLOSED | LEAVES) == LEAVES
    }

    fn receiver_state(&self) -> ReceiverState {
        match self.state() {
            state if state & (CLOSED | LEAVES) == 0 => ReceiverState::Takes,
            state if state & CLOSED != 0 => ReceiverState::Closed,
            state if self.answered() == state / NUMBER => ReceiverState::Answered,
            _ => ReceiverState::Leaves,
        }
    }

    // ---- the sender's ----

    /// The calling thread is at work, until what is returned is dropped.
    fn work(&self) -> Working<'_, Self> {
        self.begin_work();
        Working(self)
    }

    /// What a sender does for good to the ring without knowing that its receiver has left: a mark, its end. False, and not done, if the
    /// receiver has left. One that leaves waits for us between the two, and so it finds what was done, or was seen to leave: never both,
    /// never neither.
    fn unless_left(&self, act: impl FnOnce()) -> bool {
        let _working = self.work();
        let stays = !self.has_left();
        if stays {
            act();
        }
        stays
    }

    /// If the receiver leaves, and has not been answered: answers. True for one caller, whose duty it is to send again. Send lock held.
    fn answer(&self) -> bool {
        // (Counted in, so that the receiver finds it behind its wait.)
        let _working = self.work();
        let answers = self.receiver_state() == ReceiverState::Leaves;
        if answers {
            self.set_answered(self.state() / NUMBER);
        }
        answers
    }

    // ---- the receiver's; receive lock held ----

    /// Is no thread of the sender's at work?
    fn is_quiet(&self) -> bool {
        self.working() == 0
    }

    /// The receiver leaves, having taken `used` bytes of the first record that is not released. Wait until the sender `is_quiet`, and look at
    /// the ring once more.
    fn leave(&self, used: u64) {
        self.set_used(used);
        let number = (self.state() / NUMBER).wrapping_add(1);
        self.set_state(number.wrapping_mul(NUMBER) | LEAVES);
    }

    /// The receiver stays after all, unless it was answered: false then. `quiet` waits until the sender is quiet; where it can't, nothing is
    /// known: `None`, and the receiver still leaves.
    fn stay(&self, quiet: impl Fn() -> bool) -> Option<bool> {
        let state = self.state();
        self.set_state(state & !LEAVES);
        let known = quiet();
        let answered = self.answered() == state / NUMBER;
        if known && !answered {
            return Some(true);
        }
        self.set_state(state);
        // (Who rings, and looked meanwhile, has not seen that it leaves.)
        (known && quiet()).then_some(false)
    }

    /// Nobody takes from here any more. True if the receiver had left, and was not answered.
    fn close(&self) -> bool {
        let left = self.receiver_state() == ReceiverState::Leaves;
        self.set_state(self.state() & !(CLOSED | LEAVES) | CLOSED);
        left
    }
}

impl Leaving for Control {
    #[inline(always)]
    fn state(&self) -> u32 {
        // ORDER: SeqCst; pairs with `set_state` (where a sender counted itself in before), and Acquire of what is said with it.
        self.receiver.state.load(Ordering::SeqCst)
    }

    fn set_state(&self, state: u32) {
        // ORDER: SeqCst, before the look at the sender; pairs with `begin_work`. (It carries `used`.)
        self.receiver.state.store(state, Ordering::SeqCst);
        fence_for_the_model_checker();
        // ORDER: SeqCst; pairs with `mirror::ReceiverLine::read`: who sees this sees the state. (And then, by `wait::armed`, who sleeps is seen.)
        self.receiver.changes.fetch_add(1, Ordering::SeqCst);
    }

    fn used(&self) -> u64 {
        self.receiver.used.load(Ordering::Relaxed)
    }

    fn set_used(&self, used: u64) {
        self.receiver.used.store(used, Ordering::Relaxed);
    }

    fn working(&self) -> u32 {
        // ORDER: SeqCst; pairs with `begin_work` and `end_work`.
        self.sender.working.load(Ordering::SeqCst)
    }

    fn begin_work(&self) {
        // ORDER: SeqCst, before the look at the receiver; pairs with `set_state`.
        self.sender.working.fetch_add(1, Ordering::SeqCst);
        fence_for_the_model_checker();
    }

    fn end_work(&self) {
        // ORDER: SeqCst; pairs with `working`: what was done is there.
        self.sender.working.fetch_sub(1, Ordering::SeqCst);
    }

    fn answered(&self) -> u32 {
        // ORDER: SeqCst; pairs with `set_answered`.
        self.sender.answered.load(Ordering::SeqCst)
    }

    fn set_answered(&self, number: u32) {
        // ORDER: SeqCst; pairs with `answered`.
        self.sender.answered.store(number, Ordering::SeqCst);
    }
}
