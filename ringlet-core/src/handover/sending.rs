//! The sender's side.

use super::CHANGES_MAX;
use crate::leaving::Leaving;
use crate::record::PlainU64;
use crate::ring::Mark;

/// Which way the sending direction goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Sending {
    Kernel = 0,
    Ring = 1,
    /// Back on the kernel for good.
    KernelForGood = 2,
    /// The receiver has left the ring: what it has not read is being sent again through the kernel.
    Returning = 3,
}

/// (What each send looks at is last, to lie beside the ring's.)
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
#[repr(C)]
pub struct Sender {
    /// The kernel's place that the last `Start` names, behind which only doorbells follow.
    started: PlainU64,
    /// While `Returning`: bytes of the oldest record that need not be sent again.
    returned: PlainU64,
    path: PlainU64,
}

impl Sender {
    #[inline(always)]
    pub fn path(&self) -> Sending {
        match self.path.get() {
            0 => Sending::Kernel,
            1 => Sending::Ring,
            3 => Sending::Returning,
            _ => Sending::KernelForGood,
        }
    }

    /// Through the ring? Only then is a byte put on the kernel's connection a doorbell.
    #[inline(always)]
    pub fn in_ring(&self) -> bool {
        self.path.get() == Sending::Ring as u64
    }

    pub fn started(&self) -> u64 {
        self.started.get()
    }

    /// Through the kernel from now on, with no mark: nothing that still matters stands in the ring (the direction is not there, or has ended, or
    /// its connection is over).
    pub fn keep_out(&self) {
        self.path.set(Sending::KernelForGood as u64);
    }

    /// What has carried our direction is dead. All that the receiver may not have taken is sent again, as it was told by other means; of the
    /// oldest record what follows the first `used` bytes.
    pub fn send_all_again(&self, used: u64) {
        self.returned.set(used);
        self.path.set(Sending::Returning as u64);
    }

    /// For `Outgoing::set_path`.
    pub fn turn_to(&self, path: Sending) {
        self.path.set(path as u64);
    }

    pub fn reset(&self) {
        for word in [&self.path, &self.started, &self.returned] {
            word.set(0);
        }
    }
}

/// A sending direction with what its end has around it. Send lock held, but for `ring`.
pub trait Outgoing {
    type Error;
    type Words: Leaving;

    fn sender(&self) -> &Sender;
    fn words(&self) -> &Self::Words;

    // ---- the ring ----

    /// Has the receiver taken all that was published?
    fn drained(&self) -> bool;
    /// Bytes published and not taken.
    fn outstanding(&self) -> usize;
    fn push_mark(&self, mark: Mark) -> bool;
    /// Takes the last credit of a receiver that has left over.
    fn take_credit(&self);
    /// Goes past the oldest record. False when there is none.
    fn pass_oldest(&self) -> bool;

    // ---- the kernel's connection ----

    /// Doorbells are counted from 0 (`bells`).
    fn restart_bells(&self);
    fn bells(&self) -> u64;
    /// Where the stream goes on in the kernel, behind all doorbells, in the count that `Start` was told in.
    fn back_place(&self) -> Result<u64, Self::Error>;
    /// Sends again what follows the first `used` bytes of the oldest record. 0: nothing does.
    fn send_again(&self, used: u64) -> Result<u64, Self::Error>;
    /// Puts a doorbell there (`bells::ring`).
    fn put_bell(&self);
    /// Threads of this end that may put one there; waits until there is none, and nobody takes bells by a number before (`bells::nobody_takes`).
    fn begin_bell(&self);
    fn end_bell(&self);
    fn await_bells(&self) -> Result<(), Self::Error>;

    /// Does the receiver say that it has met a `Start`, and has not yet taken all that is before it?
    fn is_draining(&self) -> bool;

    // ---- what it is told ----

    /// By a mark.
    fn went_back(&self);
    /// The receiver was answered; and all is sent again.
    fn returns(&self);
    fn has_returned(&self);
    /// The peer changes its mind for ever.
    fn gives_up(&self) -> Self::Error;

    /// As those see it who do not hold the lock.
    #[inline(always)]
    fn path(&self) -> Sending {
        self.sender().path()
    }

    fn set_path(&self, path: Sending) {
        self.sender().turn_to(path);
    }

    /// From the kernel to the ring; `place` counts all bytes ever written to the kernel's connection. False when the
    /// receiver has not read all of an earlier stay in the ring: try again later.
    fn start(&self, place: u64) -> bool {
        // Into a drained ring only, so that it always holds at most one pair of marks and has room for the second.
        if self.sender().path() != Sending::Kernel || !self.drained() {
            return false;
        }
        self.sender().started.set(place);
        self.restart_bells();
        let started = self.push_mark(Mark::Start(place));
        if started {
            self.set_path(Sending::Ring);
        }
        started
    }

    /// From here on a byte on the kernel's connection is data: no doorbell is under way, and none follows.
    fn leave_ring(&self, to: Sending) -> Result<(), Self::Error> {
        self.set_path(to);
        self.await_bells()
    }

    /// From the ring to the kernel, which is `to` (for a while, or for good): what follows goes there from a known byte on. If the receiver has
    /// gone first, it is answered.
    fn go_back(&self, to: Sending) -> Result<(), Self::Error> {
        for _ in 0..CHANGES_MAX {
            self.leave_ring(to)?;
            let place = self.back_place()?;
            // No doorbell for the mark: what follows through the kernel wakes by itself.
            let mark = || {
                // (There is always room for it.)
                self.push_mark(Mark::Back(place));
            };
            if self.words().unless_left(mark) {
                self.went_back();
                return Ok(());
            }
            self.set_path(Sending::Ring);
            // (What the kernel has no room for now is sent later.)
            let _ = self.return_unread();
            if self.sender().path() != Sending::Ring {
                return Ok(());
            }
        }
        Err(self.gives_up())
    }

    /// The receiver has left the ring: what it has not released is sent again, through the kernel. (Where it takes that back all stays as
    /// it was.) An error of `send_again` ends it for now: every later call goes on.
    fn return_unread(&self) -> Result<(), Self::Error> {
        let sender = self.sender();
        if sender.path() == Sending::Ring {
            if !self.words().answer() {
                // It has not been rung for meanwhile.
                self.ring();
                return Ok(());
            }
            self.leave_ring(Sending::Returning)?;
            self.take_credit();
            sender.returned.set(self.words().used());
            self.returns();
        }
        if sender.path() != Sending::Returning {
            return Ok(());
        }
        loop {
            match self.send_again(sender.returned.get())? {
                0 => {
                    sender.returned.set(0);
                    if self.pass_oldest() {
                        continue;
                    }
                    self.set_path(Sending::KernelForGood);
                    self.has_returned();
                    return Ok(());
                }
                n => sender.returned.set(sender.returned.get() + n),
            }
        }
    }

    /// The direction ends: `say` tells the peer. What is to be sent again comes before.
    fn end(&self, say: impl Fn()) -> Result<(), Self::Error> {
        for _ in 0..CHANGES_MAX {
            match self.sender().path() {
                Sending::Ring if self.words().unless_left(&say) => return Ok(()),
                Sending::Ring | Sending::Returning => self.return_unread()?,
                Sending::Kernel | Sending::KernelForGood => {
                    say();
                    return Ok(());
                }
            }
        }
        Err(self.gives_up())
    }

    /// Rings: only while our direction is in the ring, where the byte can't be taken for data, and unless the peer has closed (it would answer
    /// with a reset) or left. A peer that leaves or closes waits for us, by `Leaving::work`; a thread of ours that leaves the ring, by
    /// `begin_bell`. Any thread, no lock.
    fn ring(&self) {
        self.begin_bell();
        // (Who gets other memory for its words has left the ring long before, and sees that nobody is in between: so nothing is said in the one, and
        // taken back in the other.)
        if self.path() == Sending::Ring {
            let working = self.words().work();
            if self.path() == Sending::Ring && self.words().is_taken() {
                self.put_bell();
            }
            drop(working);
        }
        self.end_bell();
    }

    fn all_taken(&self) -> bool {
        all_taken(self.outstanding(), self.drained(), self.bells(), self.is_draining())
    }
}

/// A receiver has died, and left something unread in the kernel: was it doorbells only? (Of `Outgoing`, in this order.)
pub fn all_taken(outstanding: usize, drained: bool, bells: u64, draining: bool) -> bool {
    // One that has not come to our `Start` may have left what is before it, as well as doorbells behind it, if there are any.
    outstanding == 0 && (drained || bells > 0) && !draining
}
