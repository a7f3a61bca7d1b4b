//! When a thread that polls all the time, without waiting, asks the kernel for what is not a connection of ours.
//!
//! What is ready when the call is made is to be told: who has made a pipe ready, or heard of it from whoever did, may count on that, and how
//! it was heard (another thread's word, shared memory, a child's end) can't be seen here. So the kernel is asked at each look. But nobody loses by hearing of a
//! connection to accept, or of an eventfd, 10 us later, and libraries that poll all the time (MPI's) do so beside just these. Where there is nothing else, and
//! the kernel had nothing when it was asked last, it is asked again only then, or when any thread of this process has come back from a call of libc's (it may
//! have made something ready, or have heard of it), or a ring has told of something: what a program then knows it may have from the one who has made the others
//! ready, too. A process that has forked shares its eventfds, and perhaps memory by which it hears of them: it asks at each look.

use crate::local::{self, Local, Zero};
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};
use ringlet_linux::fd::{self, pollfd};
use ringlet_linux::sys;
use ringlet_linux::tcp;

/// About 10 us.
const ASK_TICKS: u64 = 30_000;
/// What was asked for so often in a row, never longer apart than so, is looked at: what kind is it?
const TIMES: u32 = 16;
const APART_TICKS: u64 = 3_000_000;
/// What has been so for so many questions more is looked at again: a number may have got another meaning behind our back.
const TIMES_UNTIL_AGAIN: u32 = 256;
const ENTRIES_MAX: u32 = 16;

/// A thread's last question, to which the answer was that nothing is ready.
#[derive(Clone, Copy)]
pub struct Asked {
    which: Which,
    ticks: u64,
    calls: u64,
    closed: u32,
    times: u32,
    may_wait: bool,
    /// A ring has told of something since.
    heard: bool,
}

/// The entries that are asked for, as a number; and how many.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Which(u64, u32);

impl Which {
    #[inline(always)]
    pub fn add(&mut self, entry: &pollfd) {
        let entry = (entry.fd as u64) << 16 | entry.events as u16 as u64;
        // (FNV's prime: entries at other places, or of other numbers, are another sum.)
        self.0 = (self.0 ^ (entry + 1)).wrapping_mul(0x100_0000_01b3);
        self.1 += 1;
    }
}

// SAFETY: numbers; zero is `NONE`.
#[allow(unsafe_code)]
unsafe impl Zero for Asked {}

static ASKED: Local<Asked> = Local::new(local::ASKED);

/// Counts the calls that have come back, from when some thread polls so often that it matters; 0 before.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Counts the numbers that have got another meaning.
static CLOSED: AtomicU32 = AtomicU32::new(0);
static HAS_FORKED: AtomicU32 = AtomicU32::new(0);

/// A call of libc's is over, and the program is about to know what it has done.
///
/// WHY behind the call: a look between the count and the call's effect would find nothing, and take this call for one it has looked behind.
#[inline(always)]
pub fn called() {
    if calls() != 0 {
        // ORDER: Release, behind the call; what the program then tells another thread, by whatever means, puts it before that one's `calls`.
        CALLS.fetch_add(1, Ordering::Release);
    }
}

fn calls() -> u64 {
    // ORDER: Acquire; pairs with `called`.
    CALLS.load(Ordering::Acquire)
}

/// A number is closed, or names something else, by now.
#[inline(always)]
pub fn closes() {
    if calls() != 0 {
        CLOSED.fetch_add(1, Ordering::Relaxed);
    }
}

fn closed() -> u32 {
    CLOSED.load(Ordering::Relaxed)
}

/// A child is about to share what we have. (It finds this as we leave it, and writes nothing.)
pub fn before_fork() {
    if HAS_FORKED.load(Ordering::Relaxed) == 0 {
        HAS_FORKED.store(1, Ordering::Relaxed);
        CLOSED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Is the kernel to be asked for these? `found`: a ring tells of something, in this look.
#[inline(always)]
pub fn is_due(which: Which, found: bool) -> bool {
    let asked = ASKED.get();
    if !asked.may_wait {
        return true;
    }
    let due = asked.is_due(which, sys::ticks(), calls(), closed());
    if found && !asked.heard {
        ASKED.set(Asked { heard: true, ..asked });
    }
    due
}

/// The kernel is about to be asked for these, of `fds`.
#[inline(always)]
pub fn ask(which: Which, fds: &[pollfd]) -> Asked {
    let now = sys::ticks();
    let mut asked = ASKED.take().again(which, now, calls(), closed());
    if asked.times == TIMES / 2 {
        // (Long before anybody relies on it: whoever has not seen it has come back from its call before the looks that follow.)
        let _ = CALLS.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed);
    }
    if asked.times == TIMES {
        asked.may_wait = HAS_FORKED.load(Ordering::Relaxed) == 0
            && fds.iter().filter(|entry| entry.fd >= 0).all(|entry| can_wait(entry.fd));
    }
    asked
}

/// Can its news wait for a moment? A socket's that listens, and an eventfd's.
#[cold]
fn can_wait(fd: i32) -> bool {
    tcp::is_listening(fd) || fd::is_eventfd(fd)
}

impl Default for Asked {
    fn default() -> Asked {
        Asked::NONE
    }
}

impl Asked {
    /// Nothing was ready; `found`: but a ring told of something.
    #[inline(always)]
    pub fn in_vain(self, found: bool) {
        ASKED.set(Asked { heard: found, ..self });
    }

    const NONE: Asked = Asked {
        which: Which(0, 0),
        ticks: 0,
        calls: 0,
        closed: 0,
        times: 0,
        may_wait: false,
        heard: false,
    };

    #[inline(always)]
    fn is_due(self, which: Which, now: u64, calls: u64, closed: u32) -> bool {
        self.heard
            || now.wrapping_sub(self.ticks) > ASK_TICKS
            || which != self.which
            || calls != self.calls
            || closed != self.closed
    }

    /// The same thread asks once more. What was found out is known as long as the same is asked for.
    fn again(self, which: Which, now: u64, calls: u64, closed: u32) -> Asked {
        let goes_on = which == self.which
            && closed == self.closed
            && now.wrapping_sub(self.ticks) <= APART_TICKS
            && which.1 <= ENTRIES_MAX;
        let (times, may_wait) = match goes_on {
            true if self.times == TIMES + TIMES_UNTIL_AGAIN => (TIMES, false),
            true => (self.times + 1, self.may_wait),
            false => (0, false),
        };
        Asked { which, ticks: now, calls, closed, times, may_wait, heard: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn which(fds: &[i32]) -> Which {
        let mut which = Which::default();
        fds.iter().for_each(|&fd| which.add(&pollfd { fd, events: libc::POLLIN, revents: 0 }));
        which
    }

    #[test]
    fn the_kernel_is_asked_again_after_a_moment_and_whenever_there_may_be_news() {
        let set = which(&[3, 4]);
        let asked = Asked::NONE.again(set, 1_000, 5, 7);
        assert!(!asked.is_due(set, 1_001, 5, 7));
        assert!(!asked.is_due(set, 1_000 + ASK_TICKS, 5, 7));
        assert!(asked.is_due(set, 1_001 + ASK_TICKS, 5, 7));
        // (Ticks of another processor's, which are behind.)
        assert!(asked.is_due(set, 999, 5, 7));
        assert!(asked.is_due(set, 1_001, 6, 7));
        assert!(asked.is_due(set, 1_001, 5, 8));
        assert!(Asked { heard: true, ..asked }.is_due(set, 1_001, 5, 7));
        for other in [&[3][..], &[4, 3], &[3, 4, 5], &[3, 5]] {
            assert!(asked.is_due(which(other), 1_001, 5, 7));
        }
    }

    #[test]
    fn the_kind_is_looked_at_of_what_is_asked_for_all_the_time() {
        let (set, other) = (which(&[3]), which(&[4]));
        let mut asked = Asked::NONE;
        let times = |asked: &mut Asked, which, now| {
            *asked = asked.again(which, now, 0, 0);
            asked.times
        };
        for nth in 0..=TIMES {
            assert_eq!(times(&mut asked, set, nth as u64), nth);
        }
        asked.may_wait = true;
        assert!(asked.again(set, 20, 9, 0).may_wait);
        assert!(!asked.again(set, 20, 0, 1).may_wait);
        assert!(!asked.again(other, 20, 0, 0).may_wait);
        assert!(!asked.again(set, TIMES as u64 + APART_TICKS + 1, 0, 0).may_wait);
        for nth in 1..=TIMES_UNTIL_AGAIN {
            assert_eq!(times(&mut asked, set, 20), TIMES + nth);
        }
        // Once more: what kind is it?
        assert!(asked.may_wait && !asked.again(set, 20, 0, 0).may_wait);
        assert_eq!(times(&mut asked, set, 20), TIMES);
    }

    #[test]
    fn only_sockets_that_listen_and_eventfds_can_wait() {
        use std::os::fd::AsRawFd;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (pipe, _other) = std::io::pipe().unwrap();
        let event = fd::eventfd().unwrap();
        assert!(can_wait(listener.as_raw_fd()) && can_wait(event));
        assert!(!can_wait(socket.as_raw_fd()) && !can_wait(pipe.as_raw_fd()) && !can_wait(-1));
        sys::close(event);
    }
}
