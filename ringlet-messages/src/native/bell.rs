//! How an end sleeps and is woken: its interrupt flag (`ringlet_core::wait`) and a byte on a Unix socket, which tells of the peer's
//! death as well.

use super::{Error, Timeout};
use crate::guarded::Guarded;
use ringlet::waiting::spin;
use ringlet_core::layout::{LANE_FREE_OFFSET, WANT_BYTE};
use ringlet_core::mapped::{Lane, Mapped};
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_core::wait::Wish;
use ringlet_linux::{fd, meet, sys};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// An end that polls without waiting asks the kernel this often whether its peer still lives (in ticks: some 10 to 50 ms).
const LOOK_EVERY_TICKS: u64 = 50_000_000;
/// An answer that comes at once needs no clock: so many looks take a microsecond or a few.
const LOOKS_BEFORE_CLOCK: u32 = 50;
/// Bytes taken at once: a peer that rings for nothing does not hold us here.
const BELLS_AT_ONCE: usize = 64;

pub(super) struct Bell {
    socket: Guarded,
    /// We wanted to be woken, so bytes may have come.
    armed: AtomicBool,
    gone: AtomicBool,
    looked: AtomicU64,
}

/// When a call's time is up.
pub(crate) struct Deadline {
    timeout: Timeout,
    began: u64,
}

impl Deadline {
    pub fn new(timeout: Timeout) -> Deadline {
        // The clock is asked only when it comes to waiting, for a time.
        Deadline { timeout, began: 0 }
    }

    /// Looks some times before the clock is asked, if there is time and watching is wanted.
    #[inline]
    pub fn look_first(&self, spin_us: u64, ready: &mut impl FnMut() -> bool) -> bool {
        if spin_us == 0 || self.timeout == Some(std::time::Duration::ZERO) {
            return false;
        }
        (0..LOOKS_BEFORE_CLOCK).any(|_| {
            let is_ready = ready();
            if !is_ready {
                std::hint::spin_loop();
            }
            is_ready
        })
    }

    /// Waits until a descriptor is readable.
    pub fn await_input(&mut self, fd: &OwnedFd) -> Result<(), Error> {
        let left = self.left()?;
        let mut fds = [fd::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        fd::poll(&mut fds, left, None)?;
        Ok(())
    }

    /// Nanoseconds left, `None` for ever; the reason when there are none.
    pub fn left(&mut self) -> Result<Option<u64>, Error> {
        let Some(timeout) = self.timeout else { return Ok(None) };
        if timeout.is_zero() {
            return Err(Error::WouldBlock);
        }
        let now = sys::now_ns();
        if self.began == 0 {
            self.began = now;
        }
        let all = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        match all.saturating_sub(now - self.began) {
            0 => Err(Error::TimedOut),
            left => Ok(Some(left)),
        }
    }
}

/// Who waits: its flag, and where the two ends tell each other on which processor they are.
pub(super) struct Waiter<'a> {
    pub wish: Wish<'a>,
    pub ours: &'a Lane,
    pub theirs: Option<&'a Lane>,
    /// Of two ends on one processor this one moves first.
    pub moves: bool,
    pub spin_us: u64,
}

fn processor_word(lane: &Lane) -> &AtomicU32 {
    lane.area().at(lane.control_offset() + LANE_FREE_OFFSET)
}

impl Waiter<'_> {
    /// Watches for a while.
    fn watch(&self, left: Option<u64>, ready: &mut impl FnMut() -> bool) -> bool {
        let here = sys::processor() + 1;
        let word = processor_word(self.ours);
        if word.load(Ordering::Relaxed) != here {
            word.store(here, Ordering::Relaxed);
        }
        let peer = || {
            let processor = processor_word(self.theirs?).load(Ordering::Relaxed).checked_sub(1)?;
            Some(spin::Peer { processor, we_move: self.moves })
        };
        let limit = left.map_or(self.spin_us, |left| self.spin_us.min(left / 1000));
        spin::watch(limit, peer, ready)
    }
}

impl Bell {
    /// From now on nobody has a descriptor to send.
    pub fn new(socket: Guarded) -> Bell {
        meet::admit_descriptors(socket.as_raw_fd(), false);
        Bell {
            socket,
            armed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            looked: AtomicU64::new(0),
        }
    }

    pub fn descriptor(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    /// Wakes the peer. What finds no room is as good as rung: bytes are waiting for it.
    #[cold]
    pub fn ring(&self) {
        let _ = meet::send(self.descriptor(), &[1], &[]);
    }

    /// Has the kernel told that the peer is gone?
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// The peer has gone, as another bell has told.
    pub fn give_up(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Takes the bytes that came.
    pub fn drain(&self) {
        for _ in 0..BELLS_AT_ONCE {
            match meet::receive(self.descriptor(), &mut [0; 8]) {
                Ok((0, _)) => return self.gone.store(true, Ordering::Relaxed),
                Ok(_) => {}
                Err(sys::Errno::EAGAIN | sys::Errno::EINTR) => return,
                Err(_) => return self.gone.store(true, Ordering::Relaxed),
            }
        }
    }

    /// Asks to be woken. True when there is nothing yet: then the descriptor becomes readable as soon as there is.
    pub fn arm(&self, wish: Wish, ready: &mut impl FnMut() -> bool) -> bool {
        if self.armed.swap(true, Ordering::Relaxed) {
            self.drain();
        }
        wish.want(WANT_BYTE);
        !ready() && !self.is_gone()
    }

    /// For one that does not wait: is the peer gone? The kernel is asked now and then.
    pub fn look(&self) {
        let now = sys::ticks();
        if now.wrapping_sub(self.looked.load(Ordering::Relaxed)) > LOOK_EVERY_TICKS {
            self.looked.store(now, Ordering::Relaxed);
            self.ask();
        }
    }

    /// Asks the kernel whether the peer is gone.
    pub fn ask(&self) {
        if fd::pending(self.descriptor(), 0) != 0 {
            self.gone.store(true, Ordering::Relaxed);
        }
    }

    /// Returns when `ready` says so, or the peer is gone.
    #[inline]
    pub fn wait(
        &self,
        waiter: &Waiter,
        deadline: &mut Deadline,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), Error> {
        if deadline.look_first(waiter.spin_us, &mut ready) {
            return Ok(());
        }
        self.sleep(waiter, deadline, ready)
    }

    #[cold]
    fn sleep(
        &self,
        waiter: &Waiter,
        deadline: &mut Deadline,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), Error> {
        loop {
            let left = match deadline.left() {
                Ok(left) => left,
                Err(error) => {
                    self.look();
                    return if self.is_gone() { Ok(()) } else { Err(error) };
                }
            };
            if waiter.watch(left, &mut ready) || !self.arm(waiter.wish, &mut ready) {
                return Ok(());
            }
            let mut fds = [fd::pollfd { fd: self.descriptor(), events: libc::POLLIN, revents: 0 }];
            fd::poll(&mut fds, left, None)?;
            if fds[0].revents != 0 {
                self.armed.store(false, Ordering::Relaxed);
                self.drain();
            }
            if ready() || self.is_gone() {
                return Ok(());
            }
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
