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
pub struct Working<'a>(&'a Control);

impl Working<'_> {
    pub fn is_taken(&self) -> bool {
        self.0.is_taken()
    }

    pub fn has_left(&self) -> bool {
        self.0.has_left()
    }

    /// If the receiver leaves, and has not been answered: answers. True for one caller, whose duty it is to send again. Send lock held.
    pub fn answer(&self) -> bool {
        let answers = self.0.receiver_state() == ReceiverState::Leaves;
        if answers {
            // ORDER: SeqCst; pairs with `Control::stay`: inside the count, so that the receiver finds it behind its wait.
            let state = self.0.receiver.state.load(Ordering::SeqCst);
            self.0.sender.answered.store(state / NUMBER, Ordering::SeqCst);
        }
        answers
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        // ORDER: SeqCst; pairs with `is_quiet`: what was done is there.
        self.0.sender.working.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Control {
    /// Does the receiver take from the ring?
    #[inline(always)]
    pub fn is_taken(&self) -> bool {
        // ORDER: as in `receiver_state`.
        self.receiver.state.load(Ordering::SeqCst) & (CLOSED | LEAVES) == 0
    }

    /// Does it leave, answered or not?
    #[inline(always)]
    pub fn has_left(&self) -> bool {
        // ORDER: as in `receiver_state`.
        self.receiver.state.load(Ordering::SeqCst) & (CLOSED | LEAVES) == LEAVES
    }

    pub fn receiver_state(&self) -> ReceiverState {
        // ORDER: SeqCst; pairs with `leave` (where a sender counted itself in before), and Acquire of what is said with it.
        match self.receiver.state.load(Ordering::SeqCst) {
            state if state & (CLOSED | LEAVES) == 0 => ReceiverState::Takes,
            state if state & CLOSED != 0 => ReceiverState::Closed,
            state if self.sender.answered.load(Ordering::SeqCst) == state / NUMBER => {
                ReceiverState::Answered
            }
            _ => ReceiverState::Leaves,
        }
    }

    // ---- the sender's ----

    /// The calling thread is at work, until what is returned is dropped.
    pub fn work(&self) -> Working<'_> {
        // ORDER: SeqCst, before the look at the receiver; pairs with `leave`.
        self.sender.working.fetch_add(1, Ordering::SeqCst);
        fence_for_the_model_checker();
        Working(self)
    }

    // ---- the receiver's; receive lock held ----

    /// Is no thread of the sender's at work?
    pub fn is_quiet(&self) -> bool {
        // ORDER: SeqCst; pairs with `work` and its end.
        self.sender.working.load(Ordering::SeqCst) == 0
    }

    /// The receiver leaves, having taken `used` bytes of the first record that is not released. Wait until the sender `is_quiet`, and look at
    /// the ring once more.
    pub fn leave(&self, used: u64) {
        self.receiver.used.store(used, Ordering::Relaxed);
        let number = (self.receiver.state.load(Ordering::Relaxed) / NUMBER).wrapping_add(1);
        // ORDER: SeqCst, before the look at the sender; pairs with `work`. (It carries `used`.)
        self.receiver.state.store(number.wrapping_mul(NUMBER) | LEAVES, Ordering::SeqCst);
        fence_for_the_model_checker();
    }

    /// The receiver stays after all, unless it was answered: false then. `quiet` waits until the sender is quiet; where it can't, nothing is
    /// known: `None`, and the receiver still leaves.
    pub fn stay(&self, quiet: impl FnOnce() -> bool) -> Option<bool> {
        let state = self.receiver.state.load(Ordering::Relaxed);
        // ORDER: as in `leave`.
        self.receiver.state.store(state & !LEAVES, Ordering::SeqCst);
        fence_for_the_model_checker();
        let known = quiet();
        let answered = self.sender.answered.load(Ordering::SeqCst) == state / NUMBER;
        if !known || answered {
            self.receiver.state.store(state, Ordering::SeqCst);
        }
        known.then_some(!answered)
    }

    /// Nobody takes from here any more. True if the receiver had left, and was not answered.
    pub fn close(&self) -> bool {
        let left = self.receiver_state() == ReceiverState::Leaves;
        let number = self.receiver.state.load(Ordering::Relaxed) & !(CLOSED | LEAVES);
        // ORDER: SeqCst; pairs with `work`, as `leave` does.
        self.receiver.state.store(number | CLOSED, Ordering::SeqCst);
        fence_for_the_model_checker();
        left
    }
}
