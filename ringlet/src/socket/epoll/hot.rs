//! The hot list of a set: the watches that may be ready or were lately.

use super::bells::{MARK, kick_sleepers};
use super::set::{self, Set, Watch, is_marked_unmoved, is_named, is_of, watches};
use crate::socket::table::{Socket, Tables};
use crate::socket::{boards, context};
use ringlet_core::ready::Board;
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::fd::{self, epoll_event};

/// It was ready, or is about to be, after so many waits.
#[inline(always)]
pub(super) fn is_active(set: &Set, watch: &Watch) {
    watch.active_at.set(set.fruitful.get());
    watch.active_at_fruitless.set(set.fruitless.get());
}

/// Puts a watch on the hot list. `held`: the set's lock is; if it is not, we are in a signal handler that interrupted its holder, and the
/// next harvest does it.
pub(super) fn heat(set: &Set, watch: &Watch, held: bool) {
    is_active(set, watch);
    if watch.hot.is() || !watch.adopted.is() || watch.dormant.is() {
        return;
    }
    if !held {
        return set.all_hot.set(1);
    }
    let index = set::index_of(watch);
    watch.rests.end();
    watch.hot.set(1);
    append(set, index, watch);
    set.hot_count.add(1);
}

/// Puts all watches of a set on its hot list. Set lock held.
#[cold]
pub(super) fn heat_set(tables: &Tables, set: &Set) {
    set.all_hot.set(0);
    let anew = set.left.swap(0) != 0;
    if anew {
        for word in [&set.hot_first, &set.hot_last, &set.hot_count] {
            word.set(0);
        }
    }
    for socket in tables.followed() {
        for (_, watch) in watches(tables, socket) {
            if core::ptr::eq(set::at(watch.set.get()), set) {
                if anew {
                    watch.hot.set(0);
                }
                if is_marked_unmoved(watch) && !watch.disabled.is() && is_named(socket, watch) {
                    // Another process has taken what was for us.
                    arm_again(set, watch);
                }
                socket.kernel_tells();
                watch.again.set(1);
                heat(set, watch, true);
            }
        }
    }
}

/// As who jumps out of a change of the list: it is in parts, and locked.
#[cfg(test)]
pub fn leave_amid(set: u32) {
    let set = set::at(set);
    core::mem::forget(set.take());
    set.hot_first.set(0);
    set.hot_last.set(0);
}

/// What a handler does that has interrupted who holds the set's lock, while nothing is hot.
#[cfg(test)]
pub fn amid(set: u32, handler: impl FnOnce()) {
    let set = set::at(set);
    let _held = set.take();
    while set.hot_first.is() {
        cool(set, set::watch_at(set.hot_first.get()));
    }
    handler();
}

/// Does something with the ready board of the set, at work there.
#[cfg(test)]
pub fn at_work<T>(set: u32, act: impl FnOnce(Board<'_>) -> T) -> T {
    let set = set::at(set);
    let _held = set.take();
    act(board_of(set).expect("a ready board"))
}

/// Will all that is in the set be looked at?
#[cfg(test)]
pub fn looks_at_all(set: u32) -> bool {
    set::at(set).all_hot.is()
}

/// Puts those on the hot list that have something by the ready board of the set's context. Set lock held.
#[inline(always)]
pub(super) fn collect(tables: &Tables, set: &Set) {
    if let Some(board) = board_of(set).filter(|board| board.announced()) {
        collect_from(tables, set, board);
    }
    let context = set.context.get();
    if context != 0 && boards::announced(context) {
        collect_strangers(tables, set, context);
    }
}

#[cold]
fn collect_from(tables: &Tables, set: &Set, board: Board<'_>) {
    board.collect(|lane| {
        // (Peers write what they will, and an earlier user of the context may be meant.)
        if let Some(socket) = tables.sockets.get(lane) {
            announced(tables, set, socket);
        }
    });
}

#[cold]
#[inline(never)]
fn collect_strangers(tables: &Tables, set: &Set, context: u32) {
    if boards::collect(tables, context, |socket| announced(tables, set, socket)) {
        look_at_all();
    }
}

fn announced(tables: &Tables, set: &Set, socket: &Socket) {
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| is_of(watch, set)) {
        watch.again.set(1);
        heat(set, watch, true);
    }
}

/// Who rests is to be looked at, whatever was announced.
fn look_at_all() {
    for set in set::used() {
        set.all_hot.set(1);
        // ORDER: a fence behind `all_hot`; pairs with `wait::arm`: who is about to sleep sees it, or is seen.
        fence(Ordering::SeqCst);
        kick_sleepers(set);
    }
}

/// The ready board on which peers say what has come for this set.
#[inline(always)]
pub(super) fn board_of(set: &Set) -> Option<Board<'static>> {
    match set.context.get() {
        0 => None,
        context => context::board_of(context),
    }
}

/// In the kernel's set, in which it was one-shot and told.
fn arm_again(set: &Set, watch: &Watch) {
    let event =
        epoll_event { events: watch.events.get(), u64: MARK | u64::from(watch.marked.get()) };
    let (epfd, watched) = (set.epfd.get() as i32, watch.fd.get() as i32);
    let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, watched, Some(event));
}

pub(super) fn append(set: &Set, index: u32, watch: &Watch) {
    let last = set.hot_last.get();
    watch.hot_next.set(0);
    watch.hot_previous.set(last);
    match last {
        0 => set.hot_first.set(index),
        last => set::watch_at(last).hot_next.set(index),
    }
    set.hot_last.set(index);
}

pub(super) fn unlink(set: &Set, watch: &Watch) {
    let (previous, next) = (watch.hot_previous.get(), watch.hot_next.get());
    match previous {
        0 => set.hot_first.set(next),
        previous => set::watch_at(previous).hot_next.set(next),
    }
    match next {
        0 => set.hot_last.set(previous),
        next => set::watch_at(next).hot_previous.set(previous),
    }
}

/// Takes a watch off the hot list, for as long as it counts on doorbells (`Rest`): unless `found` finds something. Set lock held.
pub(super) fn rest(set: &Set, watch: &Watch, wish: impl FnOnce(), found: impl FnOnce() -> bool) {
    if watch.rests.begin(wish, found) {
        unlist(set, watch);
    } else {
        is_active(set, watch);
    }
}

/// Takes a watch off the hot list for good. Set lock held.
pub(super) fn cool(set: &Set, watch: &Watch) {
    watch.rests.end();
    unlist(set, watch);
}

fn unlist(set: &Set, watch: &Watch) {
    if watch.hot.is() {
        unlink(set, watch);
        watch.hot.set(0);
        set.hot_count.add(u32::MAX);
    }
}

pub(super) fn for_each_hot(tables: &Tables, set: &Set, act: impl Fn(&Watch, &Socket)) {
    let Some(_held) = set.take() else { return };
    let mut index = set.hot_first.get();
    for _ in 0..set.hot_count.get() {
        if index == 0 {
            break;
        }
        let watch = set::watch_at(index);
        let socket = tables.sockets.at(watch.socket.get() as usize);
        if socket.is_ours() {
            act(watch, socket);
        }
        index = watch.hot_next.get();
    }
}
