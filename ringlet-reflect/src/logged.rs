//! What a process transmits in a cluster: by its log, which its keeper passes on.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;

use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::fd;

use crate::PAGE_BYTES;
use crate::log::{PIECE_BYTES, Writer};
use crate::memory::Mapping;
use crate::protocol::page;
use crate::status::Status;

/// Looks for room, a tenth of a second each, while the keeper takes nothing: then a record before is not whole, and never will be.
const LOOKS_MOST: u32 = 100;

/// Has what is to be read be there. WHY: who reads it while he has room in the log, and faults, may never come back (his handler jumps elsewhere, or
/// ends the thread); then his record would never be whole, and hold up all that the process writes behind it.
///
/// # Safety
/// So many bytes can be read there.
#[inline]
#[allow(unsafe_code)]
pub unsafe fn touch(from: *const u8, bytes: usize) {
    let Some(last) = bytes.checked_sub(1) else { return };
    for at in (0..last).step_by(PAGE_BYTES).chain([last]) {
        // SAFETY: our own contract.
        unsafe { from.add(at).read_volatile() };
    }
}

pub struct Logged {
    writer: Writer,
    page: Mapping,
    bell: OwnedFd,
    /// To the keeper: hung up when that has gone.
    socket: RawFd,
    /// The keeper's sleep in which it was rung for last.
    rung: AtomicU32,
    /// Stores that could not be passed on, and of which nobody could be told.
    lost: AtomicU32,
}

impl Logged {
    pub fn new(log: Mapping, page: Mapping, bell: OwnedFd, socket: RawFd) -> Logged {
        let (writer, rung, lost) = (Writer::new(log), AtomicU32::new(0), AtomicU32::new(0));
        Logged { writer, page, bell, socket, rung, lost }
    }

    #[inline]
    fn state(&self) -> u32 {
        self.page.word(page::STATE).load(Ordering::Relaxed)
    }

    /// Writes bytes to this place of a region. (Its bounds are looked at before.)
    #[inline]
    pub fn put(&self, region: u32, at: usize, bytes: &[u8]) -> Result<(), Status> {
        // SAFETY: all of it can be read.
        #[allow(unsafe_code)]
        unsafe {
            touch(bytes.as_ptr(), bytes.len())
        };
        self.put_by(region, at, bytes.len(), |from, length, to| {
            // SAFETY: a part of the bytes, and room for it.
            #[allow(unsafe_code)]
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().add(from), to, length);
            }
            true
        })
    }

    /// The same with bytes that `fill` writes, each piece (from, length, where) in turn, or can't: then the rest is not written.
    #[inline]
    pub fn put_by(
        &self,
        region: u32,
        at: usize,
        bytes: usize,
        mut fill: impl FnMut(usize, usize, *mut u8) -> bool,
    ) -> Result<(), Status> {
        if self.state() & page::STOPPED != 0 {
            return Err(Status::Stopped);
        }
        let mut from = 0;
        while from < bytes {
            // (Pieces end where words of 8 bytes do: those come whole.)
            let to_end = PIECE_BYTES - (at + from) % PIECE_BYTES;
            let length = to_end.min(bytes - from);
            self.append(region, at + from, length, &mut |to| fill(from, length, to))?;
            from += length;
        }
        Ok(())
    }

    #[inline]
    fn append(
        &self,
        region: u32,
        at: usize,
        length: usize,
        fill: &mut impl FnMut(*mut u8) -> bool,
    ) -> Result<(), Status> {
        let filled = match self.writer.append(region, at as u64, length, &mut *fill) {
            Some(filled) => filled,
            None => self.append_later(region, at, length, fill)?,
        };
        self.tell();
        if filled { Ok(()) } else { Err(Status::BadAddress) }
    }

    #[cold]
    fn append_later(
        &self,
        region: u32,
        at: usize,
        length: usize,
        fill: &mut impl FnMut(*mut u8) -> bool,
    ) -> Result<bool, Status> {
        let (mut taken, mut looks) = (self.writer.taken(), 0);
        loop {
            self.tell();
            if self.state() & page::STOPPED != 0 {
                return Err(Status::Stopped);
            }
            if !self.keeper_lives() {
                return Err(Status::NotInitialised);
            }
            self.writer.await_room();
            if let Some(filled) = self.writer.append(region, at as u64, length, &mut *fill) {
                return Ok(filled);
            }
            let now = self.writer.taken();
            looks = if std::mem::replace(&mut taken, now) == now { looks + 1 } else { 0 };
            if looks >= LOOKS_MOST {
                return Err(Status::Timeout);
            }
        }
    }

    /// Wakes the keeper, if it sleeps.
    #[inline]
    fn tell(&self) {
        // ORDER: SeqCst, pairs with that in `cluster::sleep`: the keeper sees the record, or is seen to sleep. WHY: a keeper that had all writers pass a
        // barrier (membarrier) would interrupt each of them whenever it sleeps, which costs more than this at each record.
        fence(Ordering::SeqCst);
        let sleep = self.state() & !page::STOPPED;
        // WHY once for each sleep: a keeper that was woken may wait for a processor for as long as many records take, and each bell is a system call.
        // (Behind the bell, not before it: whoever does not ring knows that it rings. A number that comes round in 2^30 sleeps costs one second of sleep.)
        if sleep & page::ASLEEP != 0 && self.rung.load(Ordering::Relaxed) != sleep {
            fd::ring(self.bell.as_raw_fd());
            self.rung.store(sleep, Ordering::Relaxed);
        }
    }

    fn keeper_lives(&self) -> bool {
        let mut fds = [fd::pollfd { fd: self.socket, events: libc::POLLRDHUP, revents: 0 }];
        fd::poll(&mut fds, Some(0), None) != Ok(1)
    }

    pub fn lose(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    pub fn lost(&self) -> u32 {
        self.lost.load(Ordering::Relaxed)
    }
}
