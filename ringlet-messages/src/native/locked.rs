//! A locked pair of buffers between two programs: question and answer, in turns. The connecting end asks first.

use super::bell::{Deadline, Waiter};
use super::channel::{Link, Receives, Sends, atomic_bytes};
use super::{Error, Timeout};
use ringlet_core::layout::LaneGeometry;
use ringlet_core::locked::{self, max_bytes};
use ringlet_core::mapped::{Lane, Mapped};
use ringlet_core::memory::Area;
use ringlet_core::queue::{self, Next, Refused, Reserved};
use ringlet_core::sync::Ordering;
use std::sync::atomic::AtomicU8;

/// One end. Dropping it tells the other.
pub struct Locked {
    link: Link,
    ours: Lane,
    theirs: Lane,
    turns: locked::Locked,
    corrupt: bool,
    abandoned: bool,
}

impl Locked {
    pub(super) fn new(link: Link, geometry: LaneGeometry) -> Locked {
        let (ours, theirs) = (link.lane(geometry, link.side), link.lane(geometry, 1 - link.side));
        let turns =
            if link.side == 0 { locked::Locked::client() } else { locked::Locked::server() };
        Locked { link, ours, theirs, turns, corrupt: false, abandoned: false }
    }

    pub(super) fn mapping(&self) -> Area {
        self.link.mapping.0
    }

    pub(super) fn is_alone(&self) -> bool {
        self.link.data.ask();
        self.link.data.is_gone()
    }

    /// In our turn, in which nothing of the other end's is left: has it ended, as it told or as the kernel has it (`is_alone`)?
    pub(super) fn left(&self) -> Result<(), Error> {
        // ORDER: Acquire, as in `wait`.
        match self.theirs.control().sender.shut.load(Ordering::Acquire) != 0 {
            true => Err(Error::Closed),
            false if self.link.data.is_gone() => Err(Error::PeerDied),
            false => Ok(()),
        }
    }

    /// As `Sender::abandon`.
    pub(super) fn abandon(mut self) {
        self.abandoned = true;
    }

    #[inline]
    pub fn is_our_turn(&self) -> bool {
        self.turns.our_turn()
    }

    fn has_news(&self) -> bool {
        let shut = &self.theirs.control().sender.shut;
        self.turns.ready(&self.theirs) || shut.load(Ordering::Acquire) != 0
    }

    /// Asks, and waits for the answer; returns its length. (When the time is up the answer can still be received later.)
    pub fn call(
        &mut self,
        question: &[u8],
        answer: &mut [u8],
        timeout: Timeout,
    ) -> Result<usize, Error> {
        self.send(question, None)?;
        self.receive(answer, timeout)
    }

    /// Waits for a question and answers it, both in place: `f` is given the question and room for an answer of any length, and
    /// returns the answer's length (at most the room's).
    pub fn serve(
        &mut self,
        timeout: Timeout,
        f: impl FnOnce(&[AtomicU8], &[AtomicU8]) -> usize,
    ) -> Result<(), Error> {
        let message = self.peek_raw(timeout)?;
        self.turns.take_turn(&message);
        let max = self.max_bytes();
        let reserved = self.reserve_raw(max, None)?;
        let question = atomic_bytes(message.pointer(&self.theirs), message.len());
        let len = f(question, atomic_bytes(reserved.pointer(&self.ours), reserved.room()));
        self.commit_raw(reserved, len)
    }

    /// Asks to be woken. True when there is nothing yet: then `descriptor` becomes readable as soon as there is something.
    pub fn arm(&mut self) -> bool {
        let wish = self.theirs.control().data_wish();
        self.link.data.arm(wish, &mut || self.has_news())
    }

    /// To wait for the other end on, after `arm`. Only ever wait on it.
    pub fn descriptor(&self) -> i32 {
        self.link.data.descriptor()
    }

    /// As `Receiver::wait`.
    #[cold]
    fn wait(&mut self, deadline: &mut Deadline) -> Result<(), Error> {
        let control = self.theirs.control();
        // ORDER: Acquire, before the look, as in `channel::wait`.
        let shut = control.sender.shut.load(Ordering::Acquire) != 0;
        let gone = self.link.data.is_gone();
        let next = self.turns.peek(&self.theirs);
        self.corrupt |= next == Next::Corrupt;
        match next {
            _ if self.corrupt => Err(Error::PeerCorrupt),
            Next::Empty if shut => Err(Error::Closed),
            Next::Empty if gone => Err(Error::PeerDied),
            Next::Empty => {
                let waiter = Waiter {
                    wish: control.data_wish(),
                    ours: &self.ours,
                    theirs: Some(&self.theirs),
                    moves: self.link.side == 1,
                    spin_us: self.link.spin_us,
                };
                self.link.data.wait(&waiter, deadline, || self.has_news())
            }
            Next::Message(_) | Next::Corrupt => Ok(()),
        }
    }

    #[inline]
    fn ring(&self) {
        if self.ours.control().data_wish().granted_by_sender() != 0 {
            self.link.data.ring();
        }
    }
}

/// Sending gives the turn away. It never waits: in the other end's turn it fails with `NotOurTurn`.
impl Sends for Locked {
    fn max_bytes(&self) -> usize {
        max_bytes(&self.ours)
    }

    #[inline]
    fn out(&self) -> &Lane {
        &self.ours
    }

    #[inline(always)]
    fn reserve_raw(&mut self, len: usize, _: Timeout) -> Result<Reserved, Error> {
        if self.link.data.is_gone() {
            return Err(Error::PeerDied);
        }
        self.turns.reserve(&self.ours, len).map_err(|refused| match refused {
            Refused::Full => Error::NotOurTurn,
            Refused::TooLong => Error::TooLong,
        })
    }

    #[inline(always)]
    fn commit_raw(&mut self, reserved: Reserved, len: usize) -> Result<(), Error> {
        self.turns.commit(&self.ours, reserved, len);
        // (It may have taken this and gone, awake as it was, before the ring finds that. What comes next is the other's turn: who waits for that is told.)
        self.ring();
        Ok(())
    }
}

/// What is received stays readable in place until our next message is sent; to release it is to take the turn.
impl Receives for Locked {
    #[inline(always)]
    fn peek_raw(&mut self, timeout: Timeout) -> Result<queue::Message, Error> {
        if self.is_our_turn() {
            return Err(Error::NotOurTurn);
        }
        let mut deadline = Deadline::new(timeout);
        loop {
            match self.turns.peek(&self.theirs) {
                Next::Message(message) if !self.corrupt => return Ok(message),
                _ => self.wait(&mut deadline)?,
            }
        }
    }

    #[inline]
    fn inward(&self) -> &Lane {
        &self.theirs
    }

    #[inline(always)]
    fn take_raw(&mut self, message: queue::Message, _: usize) {
        self.turns.take_turn(&message);
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        // ORDER: as in `Sender::drop`.
        self.ours.control().sender.shut.swap(1, Ordering::SeqCst);
        self.ring();
    }
}
