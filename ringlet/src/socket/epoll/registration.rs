//! Registrations of moved connections, which are ours, and how they follow what becomes of the connection. (Below the code that moves bytes, which
//! says here what has changed.)

use super::bells::{MARK, SECOND, kick, kick_sleepers, mark, register_context, register_named};
use super::elder::has_elder;
use super::hot::{cool, heat};
use super::set::{
    self, EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLPRI, EPOLLRDHUP, Set,
    Watch, free, is_marked_unmoved, is_named, is_of, other_place, others_of, watches,
};
use crate::lock::Held;
use crate::socket::context;
use crate::socket::table::{Receiving, Sending, Socket, Stage, Tables, tables};
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::fd::{self, epoll_event};

/// So often the kernel is asked on, where there is room for few events and those are our own.
pub(super) const ASKS_MAX: u32 = 64;

/// The kernel has no such registration any more. False if the entry is still on the hot list, which a signal handler can't change while
/// the thread that it interrupted does.
pub(super) fn withdraw(watch: &Watch) -> bool {
    let index = watch.set.swap(0);
    if index == 0 {
        return !watch.hot.is();
    }
    let set = set::at(index);
    count_neighbour(set, watch, false);
    if !watch.adopted.is() {
        // Never on the hot list, then.
        return !watch.hot.is();
    }
    if watch.adopted.swap(0) != 0 {
        set.adopted.fetch_sub(1, Ordering::SeqCst);
    }
    if let Some(_held) = set.take() {
        cool(set, watch);
    }
    !watch.hot.is()
}

/// The last descriptor of `socket` is about to be closed, of which another process may have a copy. KERNEL: while it has, sets go on to
/// tell of the closed one.
pub fn unregister(socket: &Socket) {
    let Some(tables) = tables() else { return };
    let _registering = socket.registering.take();
    // (Under another number, which is closed, nobody can take it out.)
    let named = |watch: &Watch| watch.fd.get() == socket.fd.get();
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| named(watch)) {
        let set = set::at(watch.set.get());
        let _ = fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_DEL, socket.fd(), None);
    }
}

/// The last descriptor of `socket` is about to be closed: the kernel drops its registrations with it. False: we are in a signal handler that interrupted
/// this thread at work in a set of the socket's, perhaps as it looked at it. That frame goes on with the memory, and the set's next harvest puts it away.
pub fn forget_socket(socket: &Socket) -> bool {
    let _registering = socket.registering.take();
    let mut withdrawn = true;
    let mut next = socket.watches.swap(0, Ordering::AcqRel);
    while next != 0 {
        let index = next;
        let watch = set::watch_at(index);
        next = watch.next.load(Ordering::Acquire);
        if withdraw(watch) {
            free(index, watch);
        } else {
            watch.gone.set(1);
            withdrawn = false;
        }
    }
    withdrawn
}

/// KERNEL: of several connections that became ready, the one that was first is told first, and programs count on that: one that has
/// sent on two of them expects to be served in this order. Where all their bytes are in rings, these say when they were sent. What the
/// kernel holds says nothing; but its list of what is ready has an order, in which our eventfd takes the place where it was first rung.
///
/// WHY not leave such a set to the kernel, until all its connections can be moved: one client of another machine would keep all others
/// of its server there for good, and each new one would send them back. What is lost so is the order of a byte by the kernel and one
/// that came later by a ring, where a third was in a ring before both.
///
/// WHY not so beside quiet neighbours: each first ring is a system call for its sender then, and a message costs about what it costs on the
/// kernel; a pool's idle connections would take that from the busy ones. Beside these the kernel is only looked at first, at each wait;
/// what it tells ends the quiet.
///
/// Listeners are no neighbours, nor are the ends of a socket pair: these wake event loops.
pub(super) fn is_neighbour(socket: &Socket) -> bool {
    let in_ring = socket.stage() == Stage::Attached && socket.end().receiving() == Receiving::Ring;
    !in_ring && !socket.has_datagrams() && !socket.paired.is()
}

pub(super) fn count_neighbour(set: &Set, watch: &Watch, is: bool) {
    if watch.neighbour.is() != is && watch.neighbour.swap(is as u32) != is as u32 {
        let one = if is { 1 } else { u32::MAX };
        set.neighbours.fetch_add(one, Ordering::Relaxed);
        set.quiet.set(0);
    }
}

/// The receiving direction has changed its path.
pub fn receiving_changed(socket: &Socket) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| watch.adopted.is()) {
        let set = set::at(watch.set.get());
        count_neighbour(set, watch, !watch.dormant.is() && is_neighbour(socket));
        watch.again.set(1);
    }
}

pub(super) fn our_event(watch: &Watch, socket: &Socket, asked: u32) -> epoll_event {
    // Room in the kernel matters while we send there, to who asks for it; and to us for what is sent again.
    let room = match socket.end().sending() {
        Sending::Ring => 0,
        Sending::Returning => EPOLLOUT,
        _ => asked & EPOLLOUT,
    };
    let edges = if tells_by_level(watch, socket, asked) { 0 } else { EPOLLET };
    // (Before the kernel knows: it tells anew of what is changed.)
    watch.registered(edges == 0);
    let events = EPOLLIN | EPOLLRDHUP | EPOLLPRI | edges | room;
    epoll_event { events, u64: MARK | u64::from(watch.marked.get()) }
}

/// Does the kernel go on telling of it while there are datagrams, as the program asks? Then nobody asks whether there are more before he sleeps.
/// Not of what another process may take its time to receive, nor of what nobody waits for.
fn tells_by_level(watch: &Watch, socket: &Socket, asked: u32) -> bool {
    socket.has_datagrams()
        && asked & (EPOLLET | EPOLLONESHOT | EPOLLEXCLUSIVE) == 0
        && asked & EPOLLIN != 0
        && is_plain(asked)
        && !watch.dormant.is()
        && socket.end().holders.count() <= 1
}

/// Is nothing asked for that the kernel does not tell of our own registration? (Of room it is asked.)
pub(super) fn is_plain(asked: u32) -> bool {
    let events = asked as u16 as u32;
    events & !(EPOLLIN | EPOLLPRI | EPOLLRDHUP | (libc::EPOLLERR | libc::EPOLLHUP) as u32) == 0
}

/// The sending direction has changed its path: the kernel is asked for what matters now.
pub fn sending_changed(socket: &Socket) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| watch.adopted.is()) {
        register_anew(socket, watch);
    }
    if socket.end().sending() == Sending::Ring && !socket.has_datagrams() {
        ring_has_room(tables, socket);
    }
}

pub(super) fn asks_for_room(watch: &Watch) -> bool {
    let heard = !watch.dormant.is() && !watch.disabled.is();
    watch.adopted.is() && heard && watch.events.get() & EPOLLOUT != 0
}

/// Our direction is in the ring now, and the kernel tells of no room any more, not even of what it had and no wait has asked it for. There is room in the
/// ring: who has asked the kernel for some, and looks for none itself, looks. (The send lock is held, and whoever has a set's may wait for one of
/// the connection's: that lock is not waited for.)
fn ring_has_room(tables: &Tables, socket: &Socket) {
    // ORDER: a fence behind our direction's way into the ring; pairs with the wishes of `arm::want_at_rest` behind `Rest::begin`: a set that
    // begins to rest beside us, and is not seen here, looks for room in the ring.
    fence(Ordering::SeqCst);
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| asks_for_room(watch)) {
        let set = set::at(watch.set.get());
        if set.nested.is() {
            // (By edge, only behind a send that found none.)
            let end = socket.end();
            if watch.events.get() & EPOLLET == 0 || end.no_space.get() != end.no_space_told.get() {
                kick(set);
            }
            continue;
        }
        if watch.rests.is() {
            match set.lock.try_take() {
                Some(_held) if is_of(watch, set) => heat(set, watch, true),
                Some(_) => {}
                None => set.all_hot.set(1),
            }
        }
        // ORDER: a fence behind `all_hot`; pairs with `wait::arm`: who is about to sleep sees it, or is seen here.
        fence(Ordering::SeqCst);
        kick_sleepers(set);
    }
}

pub(super) fn register_anew(socket: &Socket, watch: &Watch) {
    let set = watch.set.get();
    if set == 0 || !is_named(socket, watch) {
        return;
    }
    let epfd = set::at(set).epfd.get() as i32;
    for _ in 0..ASKS_MAX {
        let event = our_event(watch, socket, watch.events.get());
        let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, watch.fd.get() as i32, Some(event));
        // Several threads may be at this, and one of them ask for what was true before: whoever asks last has looked again.
        if our_event(watch, socket, watch.events.get()).events == event.events {
            break;
        }
    }
}

/// Does another thread sleep in a wait on a set that watches this socket?
pub fn watched_by_sleepers(socket: &Socket) -> bool {
    let Some(tables) = tables() else { return false };
    watches(tables, socket).any(|(_, watch)| {
        let set = set::at(watch.set.get());
        set.context.is() && context::has_sleepers(set.context.get())
    })
}

/// Before a socket is attached: its registrations stay as they are as long as the result is held. `None`, and it can't be attached now, if one
/// of them is one-shot, armed, and not under our mark: a thread may have it from the kernel already, on its way to the program, and it must not
/// be told twice. One that was told is safe, until the program arms it again. And none can be changed whose number was closed.
///
/// (A part of its caller, as all that hands on what is held: `Lock`.)
#[inline(always)]
pub fn hold_registrations(socket: &Socket) -> Option<Held<'_>> {
    let tables = tables()?;
    let held = socket.registering.take()?;
    let armed = |(_, watch): (u32, &Watch)| {
        let epfd = set::at(watch.set.get()).epfd.get() as i32;
        watch.events.get() & EPOLLONESHOT != 0
            && !is_marked_unmoved(watch)
            && fd::epoll_armed(epfd, watch.fd.get() as i32)
    };
    let stays = |entry: (u32, &Watch)| armed(entry) || !is_named(socket, entry.1);
    (!watches(tables, socket).any(stays)).then_some(held)
}

/// One of several numbers of a socket is about to be closed: it names the socket no more, but is open. Under it nothing can be changed afterwards.
/// So what is ours tells of all that may matter from now on.
pub(super) fn number_closes(socket: &Socket, fd: i32) {
    let Some(tables) = tables() else { return };
    let by_it = |watch: &Watch| watch.adopted.is() && watch.fd.get() == fd as u32;
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| by_it(watch)) {
        let event = our_event(watch, socket, EPOLLOUT);
        let event = epoll_event { events: event.events | EPOLLOUT | EPOLLET, ..event };
        watch.registered(false);
        let epfd = set::at(watch.set.get()).epfd.get() as i32;
        let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, fd, Some(event));
    }
}

/// A socket was just attached: its registrations in sets become ours. Those that come later know that it is. `want`: how somebody is told who
/// wants to be woken by the kernel's connection (and for room).
pub fn adopt(socket: &Socket, _registering: Held<'_>, want: impl Fn(&Socket, bool)) {
    let Some(tables) = tables() else { return };
    for (index, watch) in watches(tables, socket).filter(|(_, watch)| !watch.adopted.is()) {
        let set_index = watch.set.get();
        let set = set::at(set_index);
        let epfd = set.epfd.get() as i32;
        let watched = watch.fd.get() as i32;
        if watch.events.get() & EPOLLONESHOT != 0 && !is_marked_unmoved(watch) {
            watch.disabled.set(1);
        }
        prepare(set, set_index);
        watch.marked.set(mark(index) as u32);
        let ours = Some(our_event(watch, socket, watch.events.get()));
        if watch.events.get() & EPOLLEXCLUSIVE != 0 {
            // KERNEL: an exclusive registration can't be modified.
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, watched, None);
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, watched, ours);
        } else {
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, watched, ours);
        }
        let place = other_place(&others_of(set), watch.data.get());
        watch.linked.set(place.filter(|_| set.beside.is()).unwrap_or(0));
        take_up(tables, set, watch, &want);
    }
}

/// A registration of the set is about to become ours. Before that, so that whoever meets our mark, in a wait that is under way in the
/// kernel too, knows what to do with it.
pub(super) fn prepare(set: &Set, set_index: u32) {
    // ORDER: SeqCst; pairs with `wait::begin_native`.
    set.adopted.fetch_add(1, Ordering::SeqCst);
    let _held = set.take();
    if !set.context.is() && !has_elder(set) {
        let context = match set.reserved.swap(0) {
            0 => register_context(set, set_index),
            reserved => Some(reserved),
        };
        set.context.set(context.unwrap_or(0));
    }
}

/// A registration of the set is ours now.
pub(super) fn take_up(tables: &Tables, set: &Set, watch: &Watch, want: impl Fn(&Socket, bool)) {
    let socket = tables.sockets.at(watch.socket.get() as usize);
    {
        let held = set.take();
        watch.fresh.set(1);
        watch.again.set(1);
        watch.adopted.set(1);
        count_neighbour(set, watch, !watch.dormant.is() && is_neighbour(socket));
        heat(set, watch, held.is_some());
        let home = socket.home.get();
        if home != 0 && home == set.context.get() {
            register_named(set);
        }
        if context::is_of_thread(home) && !set.second.is() && !set.nested.is() {
            let event = epoll_event { events: EPOLLIN | EPOLLET, u64: mark(SECOND) };
            let (epfd, eventfd) = (set.epfd.get() as i32, context::eventfd_of(home));
            if fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, eventfd, Some(event)).is_ok() {
                set.second.set(home);
            }
        }
    }
    // What the kernel has told meanwhile was nobody's.
    socket.kernel_tells();
    if !set.context.is() {
        // Without a context (there are only so many) the set is woken by bytes.
        want(socket, watch.events.get() & EPOLLOUT != 0);
    }
    // Whoever is inside a wait on this set began it when the kernel knew everything.
    kick(set);
}

/// May somebody sleep in a set that watches this socket? One without a context does not tell.
pub fn may_sleep_on(socket: &Socket) -> bool {
    let Some(tables) = tables() else { return true };
    watches(tables, socket).any(|(_, watch)| {
        let set = set::at(watch.set.get());
        !set.context.is() || context::has_sleepers(set.context.get())
    })
}

/// What comes to this socket is to be looked for by us again.
pub fn heat_all(socket: &Socket) {
    heat_those(socket, |_| true);
}

/// `which` is asked under the set's lock: who cools a watch there has looked before.
pub(super) fn heat_those(socket: &Socket, which: impl Fn(&Watch) -> bool) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket) {
        let set = set::at(watch.set.get());
        let held = set.take();
        if which(watch) {
            heat(set, watch, held.is_some());
            drop(held);
            kick_sleepers(set);
        }
    }
}

/// Doorbells of this socket, which were counted before, are about to be taken: each set in which a watch rests, and so counts on one of them,
/// looks at it again first. False: one of these sets is at work, and the doorbells must stay. (Who holds the receive lock can't wait for a set's.)
pub fn end_rests(socket: &Socket) -> bool {
    let Some(tables) = tables() else { return true };
    watches(tables, socket).filter(|(_, watch)| watch.rests.is()).all(|(_, watch)| {
        let set = set::at(watch.set.get());
        let Some(held) = set.lock.try_take() else { return false };
        if is_of(watch, set) {
            heat(set, watch, true);
        }
        drop(held);
        kick_sleepers(set);
        true
    })
}

#[inline(always)]
pub(super) fn has_neighbours(set: &Set) -> bool {
    set.neighbours.load(Ordering::Relaxed) != 0
}

pub(super) fn holds_ours(set: &Set) -> bool {
    // ORDER: SeqCst; pairs with `prepare`.
    set.adopted.load(Ordering::SeqCst) != 0
}
