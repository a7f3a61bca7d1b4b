//! Sets that are themselves waited on, in other sets or by poll.

use super::arm::arm;
use super::bells::{Armed, bell_stays, disarm, drain, kick, kick_sleepers};
use super::hot::{for_each_hot, heat_set};
use super::look::any_ready;
use super::registration::{asks_for_room, heat_those, holds_ours};
use super::set::{self, Set, Visit, Watch, watches};
use crate::socket::in_use::in_use;
use crate::socket::table::{Socket, Tables, tables};
use crate::socket::transfer::room::{leave_full, waits_for_room, waits_untold};
use crate::socket::transfer::wait::want_bytes;
use crate::socket::{context, datagram, pin};
use crate::waiting::sleep;
use core::cell::Cell;
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::fd::{self, pollfd};
use ringlet_linux::sys::Sys;

/// Another set or a poll waits on this set: from now on it stays armed.
pub fn nest(set_index: u32, outer: Option<u32>) {
    let Some(tables) = tables() else { return };
    let set = set::at(set_index);
    if let Some(outer) = outer {
        set::at(outer).holds_sets.set(1);
    }
    if !set.nested.is() {
        set.nested.set(1);
        let second = set.second.swap(0);
        if second != 0 {
            let eventfd = context::eventfd_of(second);
            let _ = fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_DEL, eventfd, None);
        }
        bell_stays(set);
        // What rests by the ready board would make no set readable.
        set.all_hot.set(1);
        settle_nested(tables, set);
    }
}

/// Has the set connections that only we can answer for?
pub fn has_adopted(set_index: u32) -> bool {
    holds_ours(set::at(set_index))
}

/// Would a wait on this set return at once, as far as rings tell?
pub fn ready(set_index: u32) -> bool {
    tables().is_some_and(|tables| any_ready(tables, set::at(set_index)))
}

/// A nested set is armed whenever nobody is inside a wait on it; each arming is a new value, so that peers ring again. (Each thread that does so
/// disarms what it has taken out, so that none of several stays counted.)
fn stay_armed(tables: &Tables, set: &Set) {
    let before = set.armed.swap(arm(tables, set).contexts[0]);
    // (Of one that was closed beside us its next life is to find none.)
    let closed = if set.names.is() { 0 } else { set.armed.swap(0) };
    disarm(&Armed { contexts: [before, closed], look_every_ns: None });
}

/// Makes the kernel's view of a nested set true: its eventfd is readable if, and only if, a ring has something. It is rung only for what has come
/// since, or who waits for edges there would be told of the same again and again.
pub(super) fn settle_nested(tables: &Tables, set: &Set) {
    if set.all_hot.is()
        && let Some(_held) = set.take()
    {
        heat_set(tables, set);
    }
    if !set.context.is() {
        return;
    }
    stay_armed(tables, set);
    // Doorbell bytes that wait in the kernel would make the set readable.
    for_each_hot(tables, set, |_, socket| socket.kernel_tells());
    // (Before the look: what comes behind it is news to the next one, and rings.)
    let arrived = arrivals(tables, set);
    if !any_ready(tables, set) {
        let held = set.take();
        drain(set);
        drop(held);
        // What has rung just before is there by now.
        if !any_ready(tables, set) {
            return;
        }
    } else if set.settled.get() == arrived && is_rung(set) {
        return;
    }
    set.settled.set(arrived);
    kick(set);
}

/// Is its eventfd readable? Then its set is, until somebody has found nothing there.
fn is_rung(set: &Set) -> bool {
    fd::pending(context::eventfd_of(set.context.get()), libc::POLLIN) != 0
}

/// A number that grows with whatever makes a connection of the set ready.
fn arrivals(tables: &Tables, set: &Set) -> u64 {
    let sum = Cell::new(0u64);
    for_each_hot(tables, set, |watch, socket| {
        let come =
            if socket.has_datagrams() { datagram::arrivals(socket) } else { come(socket, watch) };
        sum.set(sum.get().wrapping_add(come));
    });
    sum.get()
}

/// Bytes, or the end of them; and room behind a send that found none.
fn come(socket: &Socket, watch: &Watch) -> u64 {
    let end = socket.end();
    let room = u64::from(end.no_space.get());
    socket.incoming().map_or(room, |ring| {
        let shut = ring.control().sender.shut.load(Ordering::Relaxed);
        // (From where the last look has come to.)
        let position = end.rx.published_after(&ring, watch.settled.get());
        watch.settled.set(position);
        room.wrapping_add(u64::from(shut)).wrapping_add(position)
    })
}

/// As `settle_nested`, for a poll on the set itself.
pub fn settle(set_index: u32) {
    if let Some(tables) = tables() {
        settle_nested(tables, set::at(set_index));
    }
}

/// Before a wait on a set that holds other sets.
fn settle_inner(set_index: u32) {
    let Some(tables) = tables() else { return };
    if holds_sets(set_index) {
        for inner in set::used().filter(|set| set.nested.is() && set.names.is()) {
            settle_nested(tables, inner);
        }
    }
}

/// Are other sets in it, of which some is rung by peers? (To who has closed itself in they are the kernel's.)
pub fn holds_sets(set_index: u32) -> bool {
    let is_rung = |set: &Set| set.nested.is() && set.names.is() && set.context.is();
    set::at(set_index).holds_sets.is() && !pin::is_closed_in() && set::used().any(is_rung)
}

/// Sleeps until a set that holds others is readable, or may be. A sender rings behind its publishing, when the bytes may have been received already; and
/// an event of that can't be given back (edges, one-shot). KERNEL: a poll takes nothing out of a set, and a set that is asked looks again whether
/// what has rung is still readable.
pub(super) fn sleep_over(
    set: &Visit,
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<()> {
    settle_inner(set.index());
    let mut entry = [pollfd { fd: set.epfd.get() as i32, events: libc::POLLIN, revents: 0 }];
    if !set.is_over() {
        let told = match timeout_ns {
            // (A signal ends no call that does not sleep: what was found before it would be lost.)
            Some(0) => usize::from(fd::pending(entry[0].fd, libc::POLLIN) != 0),
            _ => sleep::poll(&mut entry, timeout_ns, mask, cancelled)?,
        };
        if told > 0 {
            settle_inner(set.index());
        }
    }
    Ok(())
}

/// A wait on a set is over, or cancelled.
pub(super) fn leave(tables: &Tables, set: &Set) {
    if set.nested.is() {
        settle_nested(tables, set);
    }
}

/// A send has found no room. A set that looks at the connection no more, or is waited on from outside, has asked the peer for a doorbell only if our
/// direction was in the ring by then. So one is asked for here, before the last look for room; where none can come, the sets look for room themselves.
/// And none tells that the receiver has stopped reading: the sets are to look for that. At one that is waited on from outside nobody looks, nor does
/// another process that has the connection: the kernel tells of room there. No lock held.
pub fn found_no_room(socket: &Socket) {
    if !set::watches_any(socket) {
        return;
    }
    // (What is looked at, and written, is unmapped by a close by another thread.)
    let Some(_at_it) = in_use(socket) else { return };
    let Some(tables) = tables().filter(|_| waits_for_room(socket)) else { return };
    // ORDER: a fence behind our direction's way into the ring; pairs with the wishes of `arm::want_at_rest` behind `Rest::begin`: a set that begins to
    // rest beside us, and is not seen here, sees the direction there, and asks for itself.
    fence(Ordering::SeqCst);
    let (mut by_bells, mut by_kernel) = (false, !tables.holders.is_alone(&socket.end().holders));
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| asks_for_room(watch)) {
        let set = set::at(watch.set.get());
        by_bells |= watch.rests.is();
        by_kernel |= set.nested.is();
        if set.full.swap(1) == 0 {
            // ORDER: a fence behind `full`; pairs with `wait::arm`: who is about to sleep sees it, or is seen here. (Who sleeps since then looks now and then.)
            fence(Ordering::SeqCst);
            kick_sleepers(set);
        }
    }
    if by_kernel && leave_full(socket) {
        return;
    }
    if waits_untold(socket) {
        return heat_for_room(socket);
    }
    if by_bells || by_kernel {
        want_bytes(socket, false, true);
    }
}

/// And no doorbell can tell of some (`room::waits_untold`).
fn heat_for_room(socket: &Socket) {
    heat_those(socket, |watch| asks_for_room(watch) && !watch.hot.is());
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| asks_for_room(watch)) {
        let set = set::at(watch.set.get());
        if set.nested.is() {
            settle_nested(tables, set);
        }
    }
}
