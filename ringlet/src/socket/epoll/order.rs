//! The order in which events are told.

use super::set::{EPOLLET, EPOLLONESHOT, OTHERS_MOST, Set, Watch, is_linked, other_place};
use crate::socket::table::Socket;
use crate::socket::transfer::events;
use ringlet_linux::fd::epoll_event;
use ringlet_linux::sys;

/// When it was put into the list of what is ready.
pub(super) fn place_of(watch: &Watch, socket: &Socket) -> u64 {
    match watch.linked.get() {
        0 => events::sent_at(socket),
        since => since,
    }
}

/// KERNEL: what is reported by level is at the list's end again, in the order of the report, until a wait finds that it is not ready. What
/// happens to it meanwhile does not change its place.
pub(super) fn link_again(watch: &Watch, now: u64, nth: usize) {
    let by_level = watch.events.get() & (EPOLLET | EPOLLONESHOT) == 0;
    watch.linked.set(if by_level { now + nth as u64 * PLACES_BETWEEN } else { 0 });
}

/// KERNEL: what there was no room for stays in its place. The next wait begins with it.
pub(super) fn leave_over(set: &Set, watch: &Watch, place: u64) {
    if !is_linked(watch) {
        watch.linked.set(place.clamp(1, set.told_at.get().max(1)));
    }
    set.left_over.set(1);
}

pub(super) const PLACES_BETWEEN: u64 = OTHERS_MOST as u64 * 2;

pub(super) fn note_other(set: &Set, nth: usize, data: u64) {
    if let Some(other) = set.others.get(nth) {
        other.data.set(data);
        other.linked.set(sys::ticks());
    }
}

/// KERNEL: the first of `out`, which are ours, and others that the kernel tells of now, were put into one list by the last report. These
/// others come to their places among ours, whose places were `ours`.
pub(super) fn merge_others(
    set: &Set,
    out: &mut [epoll_event],
    ours: &[(u64, u32)],
    others: &[(u64, u64)],
    now: u64,
) {
    let mut merged = 0;
    for at in ours.len()..out.len() {
        let event = out[at];
        let Some(place) = other_place(others, event.u64) else { continue };
        // Others keep the kernel's order among themselves.
        let before = ours.iter().filter(|of| of.0 <= place).count();
        let to = before + merged;
        if to > at {
            continue;
        }
        out.copy_within(to..at, to + 1);
        out[to] = event;
        merged += 1;
        if let Some(other) = set.others.iter().find(|other| other.data.get() == event.u64) {
            // (Behind ours that is before it, which has the place `now` and as many steps.)
            let step = before as u64 * PLACES_BETWEEN + merged as u64;
            other.linked.set((now + step).wrapping_sub(PLACES_BETWEEN));
        }
    }
}

/// KERNEL: what became ready first is told first, and programs count on that: one that sent on two connections expects its server
/// to serve them in this order. So many of those found at once are put in order.
pub(super) const IN_ORDER_MOST: usize = 16;

/// Puts an event, of a watch, at the last place of `out`, or, as long as there is room to note all of them, before those that are later.
#[inline]
pub(super) fn insert(
    out: &mut [epoll_event],
    first: &mut [(u64, u32)],
    event: epoll_event,
    of: (u64, u32),
) {
    let mut place = out.len() - 1;
    if place < first.len() {
        while place > 0 && first[place - 1].0 > of.0 {
            (out[place], first[place]) = (out[place - 1], first[place - 1]);
            place -= 1;
        }
        first[place] = of;
    }
    out[place] = event;
}
