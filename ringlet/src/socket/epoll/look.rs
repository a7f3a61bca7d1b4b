//! What is ready: the events that a wait would report of a watch, and whether they are news.

use super::hot::{collect, for_each_hot};
use super::registration::is_plain;
use super::set::{
    self, ENDS, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLPRI, EPOLLRDHUP, EPOLLREAD, Set,
    Watch,
};
use crate::socket::table::{Receiving, Socket, Tables, tables};
use crate::socket::transfer::events;
use crate::socket::{carrier, chaos, datagram, words};
use core::cell::Cell;
use ringlet_core::watch::Told;

/// What a look at a watch has found.
#[derive(Default)]
pub(super) struct Look {
    /// The events that a wait would report now.
    pub(super) events: u32,
    /// Edge-triggered: how far it saw. What the events tell of is within: none of it is news to the next look.
    pub(super) position: u64,
    pub(super) epoch: u32,
    /// Are there bytes that were not reported, or datagrams?
    pub(super) more: bool,
    pub(super) received: Option<u64>,
    /// How the connection has ended, whether that is asked for or not.
    pub(super) ends: u32,
    pub(super) room: u32,
    pub(super) no_space: u32,
    /// Datagrams of which the kernel tells by itself: which of its news these are.
    pub(super) by_kernel: Option<u32>,
}

/// Set lock held, or its result a hint.
pub(super) fn look(tables: &Tables, watch: &Watch) -> Look {
    let mut look = Look::default();
    let socket = tables.sockets.at(watch.socket.get() as usize);
    if watch.disabled.is() || watch.dormant.is() || watch.set.get() == 0 || !socket.is_ours() {
        return look;
    }
    let asked = watch.events.get();
    if socket.has_datagrams() {
        return look_at_lanes(socket, watch, asked);
    }
    if asked & EPOLLET == 0 {
        look.events = mask_of(socket, asked);
        return look;
    }
    let mask = look.begin(socket, watch, asked);
    look.end(socket, mask);
    if mask != 0 && look.is_news(socket, watch, mask) {
        look.events = mask;
    }
    look
}

fn mask_of(socket: &Socket, asked: u32) -> u32 {
    events::poll_mask(socket, asked as u16 as i16, true, 0) as u16 as u32
}

fn look_at_lanes(socket: &Socket, watch: &Watch, asked: u32) -> Look {
    let edge = asked & EPOLLET != 0;
    let mut position = if edge { datagram::arrivals(socket) } else { 0 };
    let more = edge && position != watch.seen.get();
    let told = told_now(watch, asked);
    let stale = told.is_none() && watch.told.get() & EPOLLREAD != 0;
    let news = socket.kernel_news.number();
    let mask = datagram::poll_mask(socket, asked as u16 as i16, told, stale) as u16 as u32;
    let by_kernel = told.is_some().then_some(news);
    if edge && mask & EPOLLREAD != 0 {
        // One that came in between is told of with these.
        position = datagram::arrivals(socket);
    }
    if stale && mask & EPOLLREAD == 0 {
        // Somebody has received it.
        watch.told.set(watch.told.get() & !EPOLLREAD);
    }
    let is_news = !edge || watch.fresh.is() || watch.told.is() || more;
    Look { events: if is_news { mask } else { 0 }, position, more, by_kernel, ..Look::default() }
}

/// What the kernel has told of the datagrams of a watch in this very wait: it need not be asked again. (Nobody has asked it since; and it tells again
/// when there is something new, or while there is something.)
fn told_now(watch: &Watch, asked: u32) -> Option<i16> {
    let now = watch.is_told_now();
    let again = watch.is_by_level() || asked & EPOLLET != 0;
    let told = watch.told.get();
    (now && again && is_plain(asked) && told & EPOLLREAD != 0).then_some(told as u16 as i16)
}

impl Look {
    /// The events, whether they are news or not.
    fn begin(&mut self, socket: &Socket, watch: &Watch, asked: u32) -> u32 {
        let end = socket.end();
        self.room = end.room_news.get();
        self.no_space = end.no_space.get();
        self.epoch = socket.epoch.get();
        if watch.told.get() & EPOLLIN != 0 {
            self.received = received_by_kernel(socket);
        }
        let Some(incoming) = socket.incoming() else { return self.mask_with_ends(socket, asked) };
        // (Of a segment that came in the place of another one nothing was told.)
        let none = Told::default();
        let told = if watch.seen_epoch.get() == self.epoch { &watch.seen } else { &none };
        let (mask, seen) = told.look(&end.rx, &incoming, || self.mask_with_ends(socket, asked));
        (self.position, self.more) = (seen.position, seen.more);
        mask
    }

    fn mask_with_ends(&mut self, socket: &Socket, asked: u32) -> u32 {
        let mask = mask_of(socket, asked | EPOLLRDHUP);
        self.ends = mask & ENDS;
        mask & (asked | !EPOLLRDHUP)
    }

    /// Room is news once to each watch, after a send that found none.
    fn end(&mut self, socket: &Socket, mask: u32) {
        let end = socket.end();
        if mask & EPOLLOUT != 0 && self.no_space != end.no_space_told.get() {
            end.no_space_told.set(self.no_space);
            self.room = end.room_news.add(1);
        }
    }

    /// Edge-triggered: has anything happened since the last report, so that `mask` is reported again?
    fn is_news(&mut self, socket: &Socket, watch: &Watch, mask: u32) -> bool {
        watch.fresh.is()
            || mask & EPOLLOUT != 0 && watch.seen_room.get() != self.room
            || mask & EPOLLREAD != 0 && self.more
            || watch.told.is() && self.is_kernel_news(socket, watch, mask)
    }

    /// The kernel has told something of this watch: is it news? It tells all that is ready, after every change of what we ask of it,
    /// and also of doorbells.
    fn is_kernel_news(&mut self, socket: &Socket, watch: &Watch, mask: u32) -> bool {
        let told = watch.told.get();
        let more = |received: Option<u64>| received.is_some_and(|n| n > watch.seen_received.get());
        let mut news = told & ENDS & !watch.seen_ends.get() != 0
            || told & EPOLLPRI != 0
            || more(self.received);
        if !news && told & EPOLLIN != 0 && mask & EPOLLREAD != 0 {
            // The look itself may have found that the kernel is the way now, where no mark of a dead adapter's stood before (`orphan`). What came
            // behind the look is reported with it.
            self.received = received_by_kernel(socket);
            news = more(self.received);
        }
        if !news {
            watch.told.set(0);
        }
        news
    }

    /// What the kernel has of the stream is asked for only where something is about to be reported: then the events are looked at
    /// once more. (What it had before the events is less than what they tell of.)
    fn begin_in_kernel(&mut self, socket: &Socket, watch: &Watch) {
        let end = socket.end();
        let mark_ahead =
            || socket.incoming().is_some_and(|ring| end.rx.mark_ahead(&ring).is_some());
        if self.events & EPOLLREAD != 0 && (end.receiving() != Receiving::Ring || mark_ahead()) {
            self.received = received_by_kernel(socket);
            self.events = self.mask_with_ends(socket, watch.events.get());
        }
    }
}

/// How much of the stream the kernel has received, while it is the way.
fn received_by_kernel(socket: &Socket) -> Option<u64> {
    let end = socket.end();
    let received = || carrier::received(socket, end).unwrap_or(u64::MAX);
    // Behind what is in the ring.
    let behind = || {
        let ring = socket.incoming()?;
        let resumed = match end.receiver.has_left() {
            false => words::back_ahead(end, &ring)?,
            true => words::bells_end(end, &ring),
        };
        Some(received()).filter(|received| *received > resumed)
    };
    match end.receiving() {
        Receiving::Ring => behind(),
        // What comes after these are doorbells, up to where the stream goes on.
        Receiving::Draining => behind().or_else(|| Some(received().min(end.receiver.until()))),
        // What came before it are doorbells.
        Receiving::Kernel | Receiving::Discarding => {
            Some(received()).filter(|received| *received > end.receiver.until())
        }
    }
}

/// What was reported is seen, as far as the look saw.
pub(super) fn reported(socket: &Socket, watch: &Watch, look: &Look) {
    let (asked, events) = (watch.events.get(), look.events);
    watch.fresh.set(0);
    let told = watch.told.swap(0);
    watch.told_in(set::NO_QUESTION);
    // (What another set is to be told of by edge is news until it was.)
    let tells_again = |watch: &Watch| watch.is_by_level() || watch.events.get() & EPOLLET != 0;
    if let Some(news) = look.by_kernel
        && tables()
            .is_some_and(|tables| set::watches(tables, socket).all(|(_, watch)| tells_again(watch)))
    {
        socket.kernel_news.nothing_since(news);
    }
    if asked & EPOLLONESHOT != 0 {
        watch.disabled.set(1);
    }
    let end = socket.end();
    if asked & EPOLLOUT != 0 && events & EPOLLOUT == 0 {
        // KERNEL: who asks for room and finds none is told when there is some.
        end.no_space.add(1);
    }
    if asked & EPOLLET == 0 {
        return;
    }
    if events & EPOLLREAD != 0 || socket.has_datagrams() {
        watch.seen.set(look.position);
        watch.seen_epoch.set(look.epoch);
        if let Some(received) = look.received {
            watch.seen_received.set(received);
        }
    }
    if events & EPOLLOUT != 0 {
        watch.seen_room.set(look.room);
    }
    // KERNEL: an end that came with data is no news behind it, also where that alone was asked for.
    watch.seen_ends.set(watch.seen_ends.get() | told & ENDS | look.ends);
}

/// What a wait would report of this watch. Set lock held.
#[inline(always)]
pub(super) fn see(tables: &Tables, watch: &Watch, socket: &Socket) -> Look {
    let mut seen = chaos::of_whole_sends(socket, || look(tables, watch));
    if seen.events != 0 && watch.events.get() & EPOLLET != 0 && !socket.has_datagrams() {
        seen.begin_in_kernel(socket, watch);
    }
    seen
}

/// How many would a wait report, as far as rings tell, and up to so many?
pub(super) fn count_ready(tables: &Tables, set: &Set, most: usize) -> usize {
    let count = Cell::new(0);
    for_each_hot(tables, set, |watch, _| {
        if count.get() < most && look(tables, watch).events != 0 {
            count.set(count.get() + 1);
        }
    });
    count.get()
}

pub(super) fn any_ready(tables: &Tables, set: &Set) -> bool {
    let Some(_held) = set.take() else { return true };
    // (Those are armed by the next wait, or as the set is settled.)
    if set.all_hot.is() {
        return true;
    }
    // What is announced was perhaps received already. (Whoever sleeps has armed the context, which is all that who is announced is woken by.)
    collect(tables, set);
    let mut index = set.hot_first.get();
    for _ in 0..set.hot_count.get() {
        if index == 0 {
            break;
        }
        let watch = set::watch_at(index);
        if look(tables, watch).events != 0 {
            return true;
        }
        index = watch.hot_next.get();
    }
    false
}
