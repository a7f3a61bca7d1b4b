//! How an end sleeps and is woken: its interrupt flag (`ringlet_core::wait`) and a byte on a Unix socket, which tells of the peer's
//! death as well. A child that the peer has forked holds that socket too, so the peer's process is watched beside it.

use super::segment::own;
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
use std::sync::{Arc, OnceLock};

/// An end that polls without waiting asks the kernel this often whether its peer still lives (in ticks: some 10 to 50 ms).
const LOOK_EVERY_TICKS: u64 = 50_000_000;
/// An answer that comes at once needs no clock: so many looks take a microsecond or a few.
const LOOKS_BEFORE_CLOCK: u32 = 50;
/// Bytes taken at once: a peer that rings for nothing does not hold us here.
const BELLS_AT_ONCE: usize = 64;

/// The process at the other end.
#[derive(Clone)]
pub(super) enum Process {
    /// The kernel does not tell, or what we have was made by a third one: then only the socket tells of its end.
    Unknown,
    Gone,
    /// By a pidfd, which is readable when it has ended.
    Watched(Arc<OwnedFd>),
}

impl Process {
    /// As a lookup of `meet` found it.
    pub fn new(found: sys::Sys<Option<i32>>) -> Result<Process, Error> {
        match found {
            Ok(Some(process)) => Ok(Process::Watched(Arc::new(own(process)))),
            Ok(None) => Ok(Process::Unknown),
            Err(sys::Errno(libc::ESRCH)) => Ok(Process::Gone),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Of the one that has connected this socket to us.
    pub fn that_connected(socket: &Guarded) -> Result<Process, Error> {
        match socket.is_given() {
            true => Ok(Process::Unknown),
            false => Process::new(meet::process_at_other_end(socket.as_raw_fd())),
        }
    }

    /// The pidfd, or what `poll` passes over.
    pub fn descriptor(&self) -> i32 {
        match self {
            Process::Watched(process) => process.as_raw_fd(),
            Process::Unknown | Process::Gone => -1,
        }
    }
}

pub(super) struct Bell {
    socket: Guarded,
    process: Process,
    /// The socket and the process, for a program that waits by itself; made when it asks.
    set: OnceLock<Option<OwnedFd>>,
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
    pub fn new(socket: Guarded, process: Process) -> Bell {
        meet::admit_descriptors(socket.as_raw_fd(), false);
        let gone = matches!(process, Process::Gone);
        Bell {
            socket,
            process,
            set: OnceLock::new(),
            armed: AtomicBool::new(false),
            gone: AtomicBool::new(gone),
            looked: AtomicU64::new(0),
        }
    }

    pub fn socket(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    /// To wait on.
    pub fn descriptor(&self) -> i32 {
        self.as_fd().as_raw_fd()
    }

    /// Both in one. (Where no descriptor is free for it the socket alone will do: a peer whose child holds it is found by `look`.)
    fn make_set(&self) -> Option<OwnedFd> {
        if self.process.descriptor() < 0 {
            return None;
        }
        let set = own(fd::epoll_create().ok()?);
        for of in [self.socket(), self.process.descriptor()] {
            let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            fd::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, of, Some(event)).ok()?;
        }
        Some(set)
    }

    /// Wakes the peer, or finds that it is gone. What finds no room is as good as rung: bytes are waiting for it.
    #[cold]
    pub fn ring(&self) {
        // KERNEL: ECONNRESET of bytes that it had not read when it went.
        let rang = meet::send(self.socket(), &[1], &[]);
        if matches!(rang, Err(sys::Errno(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN))) {
            self.give_up();
        }
        // A child of a peer that is gone holds the other end.
        self.look();
    }

    /// Has the kernel told that the peer is gone?
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// The peer has gone, as the kernel or another bell has told.
    pub fn give_up(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Takes the bytes that came.
    pub fn drain(&self) {
        for _ in 0..BELLS_AT_ONCE {
            match meet::receive(self.socket(), &mut [0; 8]) {
                Ok((0, _)) => return self.give_up(),
                Ok(_) => {}
                Err(sys::Errno::EAGAIN | sys::Errno::EINTR) => break,
                Err(_) => return self.give_up(),
            }
        }
        // Whoever waits by the set would be woken by the process's end for ever.
        if self.set.get().is_some() {
            self.ask();
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
        let mut fds = self.fds(0);
        // (It fills both in, or fails and leaves them.)
        let _ = fd::poll(&mut fds, Some(0), None);
        if fds.iter().any(|of| of.revents != 0) {
            self.give_up();
        }
    }

    fn fds(&self, events: i16) -> [fd::pollfd; 2] {
        [(self.socket(), events), (self.process.descriptor(), libc::POLLIN)]
            .map(|(fd, events)| fd::pollfd { fd, events, revents: 0 })
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
            let mut fds = self.fds(libc::POLLIN);
            fd::poll(&mut fds, left, None)?;
            if fds[1].revents != 0 {
                self.give_up();
            }
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
        let set = self.set.get_or_init(|| self.make_set()).as_ref();
        set.map_or_else(|| self.socket.as_fd(), AsFd::as_fd)
    }
}
