//! A set that a process before a fork waits on too: what was for that one and came to us is passed on.

use super::bells::{ALL, LOOK_AT_ALL, MARK, WATCH_MASK};
use super::set::{self, EPOLLET, EPOLLIN, Set};
use crate::plain::P32;
use crate::socket::table::Tables;
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::sys::{self, Sys};

/// Then it leaves the set to the others for a moment.
const LEAVE_TO_OTHERS_NS: u64 = 1_000_000;

/// Is another process, of which this one is a child, or may be, in the set too, under our marks?
pub(super) fn is_anothers(set: &Set) -> bool {
    has_elder(set) || set.inherited.is() && !set.elder.is()
}

/// In a child: the eventfd of a set of the parent's.
pub fn inherit(tables: &Tables, set: u32, eventfd: i32) {
    let set = set::at(set);
    let before = set.elder.swap(eventfd as u32) as i32;
    if before != 0 {
        tables.close_hidden(before);
    }
}

/// The eventfds of sets that were inherited.
pub fn elders() -> impl Iterator<Item = &'static P32> {
    set::used().flat_map(|set| [&set.elder, &set.waker]).filter(|word| word.is())
}

/// Does another process, whose child we are, wait on this set?
pub(super) fn has_elder(set: &Set) -> bool {
    if !set.elder.is() && !set.inherited.is() {
        return false;
    }
    let lives = sys::thread_exists(set.keeper.get() as i32);
    if !lives {
        set.inherited.set(0);
    }
    lives
}

/// We share the set with a process that came before us, and have taken what was for it. It is woken, if it waits there, while we do not.
pub(super) fn pass_on(tables: &Tables, set: &Set, taken: u64, mask: Option<u64>) -> Sys<()> {
    if has_elder(set) {
        match set.elder.get() {
            0 => wake_by_mark(tables, set, taken),
            elder => drop(fd::ring_by(elder as i32, LOOK_AT_ALL)),
        }
        fd::poll(&mut [], Some(LEAVE_TO_OTHERS_NS), mask)?;
    }
    Ok(())
}

/// That process had no eventfd in the set when it forked. So we register one for it, under its marks.
#[cold]
fn wake_by_mark(tables: &Tables, set: &Set, taken: u64) {
    let of = taken as u32 & !WATCH_MASK | ALL;
    let Some(_held) = set.take() else { return };
    if !set.waker.is() {
        let Ok(eventfd) = fd::eventfd() else { return };
        tables.hide(eventfd);
        set.waker.set(eventfd as u32);
        set.waker_of.set(0);
    }
    let waker = set.waker.get() as i32;
    if set.waker_of.swap(of) != of {
        let event = epoll_event { events: EPOLLIN | EPOLLET, u64: MARK | u64::from(of) };
        let epfd = set.epfd.get() as i32;
        if fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, waker, Some(event)).is_err() {
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, waker, Some(event));
        }
    }
    // A full counter would not ring again.
    fd::drain(waker);
    fd::ring(waker);
}
