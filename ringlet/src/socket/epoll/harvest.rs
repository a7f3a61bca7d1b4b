//! Collecting what rings hold.

use super::arm::{has_board, want_at_rest};
use super::hot::{append, collect, cool, heat, heat_set, is_active, rest, unlink};
use super::look::{Look, look, reported, see};
use super::order::{IN_ORDER_MOST, PLACES_BETWEEN, insert, leave_over, link_again, place_of};
use super::registration::asks_for_room;
use super::set::{
    self, EPOLLET, EPOLLEXCLUSIVE, EPOLLONESHOT, EPOLLOUT, Set, Visit, Watch, free, is_linked,
    is_of, watches,
};
use crate::socket::table::{Receiving, Socket, Tables};
use crate::socket::transfer::events;
use crate::socket::transfer::room::{
    LOOK_NS, leave_untold, look_at_rest, waits_for_room, waits_untold,
};
use crate::socket::{release, view};
use crate::waiting::spin;
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::fd::epoll_event;
use ringlet_linux::sys;

/// Hot connections beside the first cool down after some waits that found something elsewhere: the more there are, the sooner, so that
/// looking at them costs a bounded number of looks altogether. WHY not keep a few: each costs 30 ns a look, eight doubled an 8 B
/// ping-pong by epoll (280 to 530 ns half, `ringlet bench --only scale`).
const HOT_COUNT: u32 = 1;
const COOL_AFTER_LOOKS: u32 = 4096;
const COOL_AFTER_WAITS_MIN: u32 = 16;

/// Where the peer says by the ready board that there is something, that costs what a few looks do.
const COOL_BY_BOARD_AFTER_LOOKS: u32 = 64;
const COOL_BY_BOARD_AFTER_WAITS_MIN: u32 = 4;

/// And so after waits that found nothing at all: a loop with a timer would look at its idle connections for ever. Each has looked
/// at all of them some times before it slept, so fewer are as dear.
const COOL_AFTER_FRUITLESS: u32 = 1024;
/// One in so many ticks counts (0.4 to 2 ms on x86-64): who asks over and over without waiting finds nothing soon after something came.
const FRUITLESS_EVERY_TICKS: u64 = 2_000_000;

/// Beside neighbours, everything is looked at after so many waits that found something.
pub(super) const ALL_AFTER_WAITS: u32 = 1024;

/// It is reported now. Set lock held.
#[inline(always)]
fn tell(set: &Set, watch: &Watch, socket: &Socket, seen: &Look, slept: bool) -> epoll_event {
    reported(socket, watch, seen);
    if watch.events.get() & (EPOLLET | EPOLLONESHOT | EPOLLEXCLUSIVE) == 0 {
        set.stays_ready.set(1);
        watch.again.set(1);
    }
    if slept {
        view::count_wake(socket);
        if socket.end().receiving() == Receiving::Ring {
            // The kernel, which would have told of it, did not.
            socket.kernel_asked.set(sys::ticks());
        }
    }
    is_active(set, watch);
    epoll_event { events: seen.events, u64: watch.data.get() }
}

/// Which watches a look beside neighbours is for: those that were reported by level; what rings hold, and what is to be looked at anyway;
/// one; all.
#[derive(Clone, Copy)]
pub(super) enum Whom {
    Linked,
    Rung,
    RungBefore(u64),
    One(u32),
    All,
}

/// As `harvest`, beside neighbours: those for whom is asked, and which were not reported in this turn, or, by the same wait, since another
/// one, the first of them first.
pub(super) fn harvest_turn(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    slept: bool,
    whom: Whom,
    since: u32,
) -> usize {
    harvest_turn_at(
        tables,
        set,
        out,
        slept,
        whom,
        since,
        &mut [(0, 0); IN_ORDER_MOST],
        sys::ticks(),
    )
}

/// The same, at this moment; the places in which those were that are reported are left in `first`.
#[allow(clippy::too_many_arguments)]
pub(super) fn harvest_turn_at(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    slept: bool,
    whom: Whom,
    since: u32,
    first: &mut [(u64, u32); IN_ORDER_MOST],
    now: u64,
) -> usize {
    let Some(_held) = set.take_first() else {
        set.since_all.set(ALL_AFTER_WAITS);
        return 0;
    };
    if set.all_hot.is() {
        heat_set(tables, set);
    }
    collect(tables, set);
    let turn = set.turn.get();
    let socket_of = |watch: &Watch| tables.sockets.at(watch.socket.get() as usize);
    // (A neighbour that has just come to the ring rings too.)
    let rung = |watch: &Watch| {
        !watch.neighbour.is() || watch.again.is() || events::ring_tells(socket_of(watch))
    };
    let asked = |index: u32, watch: &Watch| match whom {
        Whom::Linked => (1..=set.told_at.get()).contains(&watch.linked.get()),
        Whom::Rung => rung(watch),
        Whom::RungBefore(time) => rung(watch) && place_of(watch, socket_of(watch)) < time,
        Whom::One(one) => one == index,
        Whom::All => true,
    };
    let mut count = 0;
    let mut index = set.hot_first.get();
    for _ in 0..set.hot_count.get() {
        if index == 0 {
            break;
        }
        let (this, watch) = (index, set::watch_at(index));
        index = watch.hot_next.get();
        if is_left(watch) {
            take_off(tables, set, this, watch);
            continue;
        }
        if !asked(this, watch) {
            continue;
        }
        let told_before = turn.wrapping_sub(watch.turn.get());
        if told_before <= turn.wrapping_sub(since) {
            if told_before != 0 {
                // What is new since then the next wait tells.
                watch.again.set(1);
                leave_over(set, watch, set.told_at.get());
            }
            continue;
        }
        let socket = socket_of(watch);
        if see(tables, watch, socket).events == 0 {
            watch.again.set(0);
            watch.linked.set(0);
            continue;
        }
        let time = place_of(watch, socket);
        if count == first.len() {
            leave_over(set, watch, time);
            continue;
        }
        let mut place = count;
        while place > 0 && first[place - 1].0 > time {
            first[place] = first[place - 1];
            place -= 1;
        }
        first[place] = (time, this);
        count += 1;
    }
    let mut found = 0;
    for nth in 0..count {
        let (time, index) = first[nth];
        let watch = set::watch_at(index);
        if found == out.len() {
            leave_over(set, watch, time);
            continue;
        }
        let socket = socket_of(watch);
        let seen = see(tables, watch, socket);
        if seen.events != 0 {
            watch.turn.set(turn);
            watch.again.set(0);
            out[found] = tell(set, watch, socket, &seen, slept);
            link_again(watch, now, found);
            first[found] = first[nth];
            found += 1;
            unlink(set, watch);
            append(set, index, watch);
        }
    }
    if found > 0 {
        set.told_at.set(now + found as u64 * PLACES_BETWEEN);
        set.fruitful.add(1);
    }
    found
}

/// A signal handler has left it on the hot list, which it could not change.
#[inline(always)]
fn is_left(watch: &Watch) -> bool {
    watch.set.get() == 0 || watch.dormant.is()
}

/// Set lock held.
#[cold]
fn take_off(tables: &Tables, set: &Set, index: u32, watch: &Watch) {
    cool(set, watch);
    if watch.gone.swap(0) != 0 {
        let socket = tables.sockets.at(watch.socket.get() as usize);
        free(index, watch);
        release::clean_up_left(socket);
    }
}

/// Has it had nothing for so many waits that looking at it costs more than a doorbell?
#[inline(always)]
fn is_idle(set: &Set, watch: &Watch, socket: &Socket, hot: u32) -> bool {
    let patience = |looks: u32, least: u32| (looks / hot.max(1)).max(least);
    let fruitful = set.fruitful.get().wrapping_sub(watch.active_at.get());
    let fruitless = set.fruitless.get().wrapping_sub(watch.active_at_fruitless.get());
    fruitful > patience(COOL_AFTER_LOOKS, COOL_AFTER_WAITS_MIN)
        || fruitless > patience(COOL_AFTER_FRUITLESS, COOL_AFTER_WAITS_MIN)
        || fruitful > patience(COOL_BY_BOARD_AFTER_LOOKS, COOL_BY_BOARD_AFTER_WAITS_MIN)
            // (The board tells nothing of room.)
            && watch.events.get() & EPOLLOUT == 0
            && has_board(set, socket)
}

/// No bell tells that a receiver has stopped reading: so watches of full rings are looked at now and then, also those that rest, or that nobody looks at as
/// long as others have something. Set lock held.
#[cold]
pub(super) fn look_at_full(tables: &Tables, set: &Set) {
    let now = sys::now_ns();
    if now.saturating_sub(set.full_looked_ns.get()) < LOOK_NS {
        return;
    }
    set.full_looked_ns.set(now);
    set.full.set(0);
    // ORDER: SeqCst; pairs with the fences of `nested::found_no_room`: a send that has found none is seen here, or says so behind this.
    fence(Ordering::SeqCst);
    for socket in tables.followed() {
        let ours = |watch: &Watch| is_of(watch, set) && asks_for_room(watch);
        for (_, watch) in watches(tables, socket).filter(|(_, watch)| ours(watch)) {
            let (waits, left) = look_at_rest(socket);
            if waits {
                set.full.set(1);
            }
            if left {
                heat(set, watch, true);
            }
        }
    }
}

/// A wait on the set is over, and has found nothing.
pub(super) fn nothing_found(set: &Set) {
    let now = sys::ticks();
    if now.wrapping_sub(set.fruitless_at.get()) > FRUITLESS_EVERY_TICKS {
        set.fruitless_at.set(now);
        set.fruitless.add(1);
    }
}

/// Collects ready watches of the hot list; a level-triggered one goes to the end of the list, so that none starves.
pub(super) fn harvest(tables: &Tables, set: &Visit, out: &mut [epoll_event], slept: bool) -> usize {
    let Some(_held) = set.take_first() else { return 0 };
    if set.all_hot.is() {
        heat_set(tables, set);
    }
    collect(tables, set);
    if set.full.is() {
        look_at_full(tables, set);
    }
    let mut found = 0;
    let (mut first, mut now) = ([(0, 0); IN_ORDER_MOST], 0);
    let mut index = set.hot_first.get();
    for _ in 0..set.hot_count.get() {
        if index == 0 || found == out.len() {
            break;
        }
        let watch = set::watch_at(index);
        let next = watch.hot_next.get();
        if is_left(watch) {
            take_off(tables, set, index, watch);
            index = next;
            continue;
        }
        let socket = tables.sockets.at(watch.socket.get() as usize);
        let seen = see(tables, watch, socket);
        if seen.events != 0 {
            if found == 0 {
                now = sys::ticks();
            }
            let place = place_of(watch, socket);
            let event = tell(set, watch, socket, &seen, slept);
            insert(&mut out[..found + 1], &mut first, event, (place, index));
            if found >= first.len() {
                link_again(watch, now, found);
            }
            found += 1;
            if next != 0 {
                unlink(set, watch);
                append(set, index, watch);
            }
        } else {
            if is_linked(watch) {
                watch.linked.set(0);
            }
            let hot = set.hot_count.get();
            if hot > HOT_COUNT
                && is_idle(set, watch, socket, hot)
                && !set.nested.is()
                && !set.elder.is()
            {
                let room = watch.events.get() & EPOLLOUT != 0;
                // WHY not keep who waits untold: a server has as many of those as it has slow readers, and each wait would look at all of them. (Who
                // fills the ring behind this heats the watch.)
                let found = || {
                    let untold = room && waits_untold(socket);
                    if untold {
                        leave_untold(socket);
                    }
                    if room && waits_for_room(socket) {
                        set.full.set(1);
                    }
                    look(tables, watch).events != 0 || untold
                };
                rest(set, watch, || want_at_rest(tables, set, socket, room), found);
            }
        }
        index = next;
    }
    if found > 0 {
        for (nth, (_, index)) in first[..found.min(IN_ORDER_MOST)].iter().enumerate() {
            link_again(set::watch_at(*index), now, nth);
        }
        set.told_at.set(now + found as u64 * PLACES_BETWEEN);
        set.fruitful.add(1);
        if slept {
            spin::woken(first[0].0);
        }
    }
    found
}
