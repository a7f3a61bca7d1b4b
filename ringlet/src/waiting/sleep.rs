//! Sleeping in the kernel. The program's own call could be cancelled there (pthread_cancel), so ours must be: the edge sleeps in
//! libc's calls, which act on it at once. A thread that is cancelled leaves our frames without drops: what they hold is put away by
//! `cancelled`, after which nothing of ours runs.

use crate::once::Once;
use ringlet_linux::fd::{self, pollfd};
use ringlet_linux::sys::{Errno, Sys};

/// With a time and a signal mask, if there are such.
pub type Poll = fn(&mut [pollfd], Option<u64>, Option<u64>, &dyn Fn()) -> Sys<usize>;
pub type EpollWait =
    fn(i32, &mut [libc::epoll_event], Option<u64>, Option<u64>, &dyn Fn()) -> Sys<usize>;

/// The edge's ways to sleep.
pub struct Sleep {
    pub poll: Poll,
    pub epoll_wait: EpollWait,
    /// Acts on a cancellation that came before.
    pub check: fn(&dyn Fn()),
}

static SLEEP: Once<Sleep> = Once::new();

pub fn start(sleep: Sleep) {
    let _ = SLEEP.set(sleep);
}

pub fn poll(
    fds: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    match SLEEP.get().map(|sleep| (sleep.poll)(fds, timeout_ns, mask, cancelled)) {
        // Else unknown to libc, or forbidden to it by a filter: ours knows other ways.
        // Too many entries for the limit of descriptors: likewise.
        Some(done) if !fd::is_barred(&done) && done != Err(Errno::EINVAL) => done,
        _ => fd::poll(fds, timeout_ns, mask),
    }
}

#[allow(unsafe_code)]
pub fn epoll_wait(
    epfd: i32,
    events: &mut [libc::epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    match SLEEP.get().map(|sleep| (sleep.epoll_wait)(epfd, events, timeout_ns, mask, cancelled)) {
        Some(done) if !fd::is_barred(&done) => done,
        // SAFETY: a valid slice.
        _ => unsafe { fd::epoll_wait(epfd, events.as_mut_ptr(), events.len(), timeout_ns, mask) },
    }
}

/// Before watching memory, which a thread may do for ever without sleeping.
pub fn check(cancelled: &dyn Fn()) {
    if let Some(sleep) = SLEEP.get() {
        (sleep.check)(cancelled);
    }
}
