//! A plain region between two programs: each stores into the other's part, reads its own, and rings when there is something to see.
//!
//! What the bytes mean is the programs' own affair. As on Memory Channel and SCI every store is remote and every read local, and what
//! an interconnect's error counters tell there, `check` tells here.

use super::bell::{Deadline, Waiter};
use super::channel::{Link, SENDS_PER_CLOCK};
use super::{Error, Timeout};
use ringlet_core::layout::{APART_BYTES, LANE_FREE_OFFSET, LaneGeometry, NOT_SHUT, SHUT};
use ringlet_core::mapped::{Lane, Mapped};
use ringlet_core::queue::InPlace;
use ringlet_core::sync::{AtomicU64, Ordering, fence};
use std::os::fd::{AsFd, BorrowedFd};

/// One end. Dropping it tells the other.
pub struct Region {
    link: Link,
    /// What the peer reads.
    remote: Lane,
    /// What we read.
    local: Lane,
    rung: u64,
    heard: u64,
}

/// How often the end that stores into this part has rung.
fn rings(part: &Lane) -> &AtomicU64 {
    part.area().at(part.control_offset() + LANE_FREE_OFFSET + APART_BYTES)
}

fn words(part: &Lane) -> &[AtomicU64] {
    // SAFETY: the part's data lies on pages of its own in a mapping that lives as long as the `Link`, from which the caller's borrow
    // comes. Every bit pattern is an `AtomicU64`; what another process does to it is to us as a device's writes: some value.
    #[allow(unsafe_code)]
    unsafe {
        std::slice::from_raw_parts(part.data_pointer().cast(), part.data_bytes() / 8)
    }
}

impl Region {
    pub(super) fn new(link: Link, geometry: LaneGeometry) -> Region {
        let remote = link.lane(geometry, link.side);
        let local = link.lane(geometry, 1 - link.side);
        Region { link, remote, local, rung: 0, heard: 0 }
    }

    /// Bytes of each of the two parts.
    pub fn part_bytes(&self) -> usize {
        self.remote.data_bytes()
    }

    /// The part that the peer reads, to store to. The peer may write there as well, so what is read back proves nothing.
    pub fn remote(&self) -> &[AtomicU64] {
        words(&self.remote)
    }

    /// The part that the peer stores to, which may change at any time: load each word once. A word whose store came after others
    /// (`Release`, or a `ring`) is loaded before them (`Acquire`, or a `wait`).
    pub fn local(&self) -> &[AtomicU64] {
        words(&self.local)
    }

    /// Stores bytes from byte `at` of the peer's part on.
    #[inline]
    pub fn put(&self, at: usize, data: &[u8]) -> Result<(), Error> {
        self.place(at, data.len())?;
        // SAFETY: `data` is valid for its length.
        #[allow(unsafe_code)]
        unsafe {
            self.remote.area().write(self.remote.data_offset() + at, data.as_ptr(), data.len())
        };
        Ok(())
    }

    /// Copies bytes out of our part, from byte `at` on.
    #[inline]
    pub fn get(&self, at: usize, to: &mut [u8]) -> Result<(), Error> {
        self.place(at, to.len())?;
        // SAFETY: `to` is valid for its length.
        #[allow(unsafe_code)]
        unsafe {
            self.local.area().read(self.local.data_offset() + at, to.as_mut_ptr(), to.len())
        };
        Ok(())
    }

    fn place(&self, at: usize, len: usize) -> Result<(), Error> {
        let end = at.checked_add(len).ok_or(Error::TooLong)?;
        if end <= self.part_bytes() { Ok(()) } else { Err(Error::TooLong) }
    }

    /// Rings the peer's doorbell. Whoever hears it sees all that was stored before.
    #[inline]
    pub fn ring(&mut self) -> Result<(), Error> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        self.rung += 1;
        // ORDER: a SeqCst swap, as a publish is; pairs with `is_rung`: what was stored before is seen with it, and the
        // look at the flag comes after it.
        rings(&self.remote).swap(self.rung, Ordering::SeqCst);
        if !self.wake() && self.rung.is_multiple_of(SENDS_PER_CLOCK.into()) {
            self.link.data.look();
        }
        // (One that has closed may have heard it, awake as it was.)
        match self.link.data.is_gone() {
            true => self.ended().filter(|error| *error != Error::Closed).map_or(Ok(()), Err),
            false => Ok(()),
        }
    }

    /// True if the peer slept.
    #[inline]
    fn wake(&self) -> bool {
        let wished = self.remote.control().data_wish().granted_by_sender() != 0;
        if wished {
            self.link.data.ring();
        }
        wished
    }

    /// Why nothing more will come, if it is known.
    #[inline]
    fn ended(&self) -> Option<Error> {
        // ORDER: Acquire: what was stored and rung before the end is seen with it (`drop`).
        match self.local.control().sender.shut.load(Ordering::Acquire) {
            NOT_SHUT => self.link.data.is_gone().then_some(Error::PeerDied),
            SHUT => Some(Error::Closed),
            _ => Some(Error::PeerCorrupt),
        }
    }

    fn is_rung(&self) -> bool {
        // ORDER: Acquire; pairs with the swap in `ring`.
        rings(&self.local).load(Ordering::Acquire) != self.heard
    }

    /// Waits until our doorbell was rung; returns how often since the last time.
    pub fn wait(&mut self, timeout: Timeout) -> Result<u64, Error> {
        let mut deadline = Deadline::new(timeout);
        loop {
            // Before the look, so that what was rung before the end is heard.
            let ended = self.ended();
            // ORDER: as in `is_rung`.
            let count = rings(&self.local).load(Ordering::Acquire);
            let since = count.wrapping_sub(self.heard);
            if since > u64::MAX / 2 {
                return Err(Error::PeerCorrupt); // it counts backwards
            }
            if since > 0 {
                self.heard = count;
                return Ok(since);
            }
            if let Some(error) = ended {
                return Err(error);
            }
            let waiter = Waiter {
                wish: self.local.control().data_wish(),
                ours: &self.remote,
                theirs: Some(&self.local),
                moves: self.link.side == 1,
                spin_us: self.link.spin_us,
            };
            let ready = || self.is_rung() || self.ended().is_some();
            self.link.data.wait(&waiter, &mut deadline, ready)?;
        }
    }

    /// Did all that was stored until now reach a peer that is there? The kernel is asked. An end is for good, so this answers for all
    /// stores of a sequence, wherever it began; whether the peer has looked at them only it can tell.
    pub fn check(&self) -> Result<(), Error> {
        // ORDER: a fence: the stores come before the look at whom they were for, which is `ask`.
        fence(Ordering::SeqCst);
        self.link.data.ask();
        self.ended().map_or(Ok(()), Err)
    }

    /// Asks to be woken. True when nothing was rung yet: then `descriptor` becomes readable as soon as something is.
    pub fn arm(&mut self) -> bool {
        let wish = self.local.control().data_wish();
        self.link.data.arm(wish, &mut || self.is_rung() || self.ended().is_some())
    }

    /// To wait for the doorbell on, after `arm`. Only ever wait on it.
    pub fn descriptor(&self) -> i32 {
        self.link.data.descriptor()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // ORDER: as in `ring`.
        self.remote.control().sender.shut.swap(SHUT, Ordering::SeqCst);
        self.wake();
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.data.as_fd()
    }
}
