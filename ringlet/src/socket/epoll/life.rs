//! Sets from their making to their last name's close, and who else has them: children by fork, and other programs.

use super::bells::{Armed, disarm, kick, register_bells, register_context};
use super::elder::{has_elder, is_anothers};
use super::hot::cool;
use super::registration::{self, count_neighbour, is_neighbour, withdraw};
use super::set::{
    self, EPOLLET, EPOLLEXCLUSIVE, EPOLLONESHOT, Set, Visit, Watch, is_marked_unmoved, is_named,
    watches, watches_any,
};
use crate::socket::table::{Known, Socket, Tables, lookup, tables, tables_for_new};
use crate::socket::{context, pin};
use ringlet_core::sync::Ordering;
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::sys::Sys;

/// Maps the tables.
pub fn start() -> Sys<()> {
    set::start()
}

/// A set has one more name.
pub fn named(set: u32) {
    set::at(set).names.add(1);
}

/// A set was made: `fd` names it.
pub fn created(fd: i32) {
    let Some(tables) = tables_for_new() else { return };
    let Some(index) = set::take() else { return };
    let set = set::at(index);
    for word in [&set.context, &set.second, &set.reserved] {
        word.set(0);
    }
    for word in [&set.nested, &set.armed, &set.holds_sets, &set.all_hot, &set.elder, &set.quiet] {
        word.set(0);
    }
    for count in [&set.adopted, &set.neighbours] {
        count.store(0, Ordering::Relaxed);
    }
    for word in [&set.inherited, &set.given, &set.waker, &set.named, &set.taken, &set.left] {
        word.set(0);
    }
    for word in [&set.hot_first, &set.hot_last, &set.hot_count, &set.beside, &set.left_over] {
        word.set(0);
    }
    set.settled.set(0);
    set.epfd.set(fd as u32);
    set.names.set(1);
    tables.name_set(fd, index);
}

/// Whoever gets this set now may know nothing of ringlet, and it would hear nothing of rings, and be told our marks instead of the program's
/// data. So what `gives` lets go to the kernel for good is registered again as the program has asked for it.
fn give_back(tables: &Tables, index: u32, gives: impl Fn(&'static Socket) -> bool) {
    let set = set::at(index);
    for socket in tables.followed() {
        let of_set = |watch: &Watch| watch.set.get() == index;
        if !watches(tables, socket).any(|(_, watch)| of_set(watch)) {
            continue;
        }
        let gives = gives(socket);
        let _registering = socket.registering.take();
        let ours = |watch: &Watch| gives && watch.adopted.is() || is_marked_unmoved(watch);
        let ours = |watch: &Watch| of_set(watch) && ours(watch);
        for (_, watch) in watches(tables, socket).filter(|(_, watch)| ours(watch)) {
            if !is_named(socket, watch) {
                continue;
            }
            register_natively(set, watch);
            count_neighbour(set, watch, watch.set.is() && is_neighbour(socket));
        }
    }
}

/// One of several numbers of a socket is about to be closed, which has no meaning to us any more. What waits there for the kernel alone, under our mark,
/// is the program's again, which nobody could say afterwards.
pub fn number_closes(socket: &Socket, fd: i32) {
    let Some(tables) = tables().filter(|_| watches_any(socket)) else { return };
    let _registering = socket.registering.take();
    let by_it = |watch: &Watch| is_marked_unmoved(watch) && watch.fd.get() == fd as u32;
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| by_it(watch)) {
        register_natively(set::at(watch.set.get()), watch);
    }
    registration::number_closes(socket, fd);
}

/// `registering` held.
fn register_natively(set: &Set, watch: &Watch) {
    let (epfd, watched) = (set.epfd.get() as i32, watch.fd.get() as i32);
    let mut events = watch.events.get();
    if watch.disabled.is() {
        events &= EPOLLET | EPOLLONESHOT;
    }
    if watch.dormant.is() || events & EPOLLEXCLUSIVE != 0 {
        // KERNEL: an exclusive registration can't be modified.
        let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, watched, None);
    }
    if watch.dormant.is() {
        withdraw(watch);
        return;
    }
    if watch.adopted.swap(0) != 0 {
        set.adopted.fetch_sub(1, Ordering::SeqCst);
    }
    let held = set.take();
    if held.is_some() {
        cool(set, watch);
    }
    watch.marked.set(0);
    let how = if events & EPOLLEXCLUSIVE != 0 { libc::EPOLL_CTL_ADD } else { libc::EPOLL_CTL_MOD };
    let event = epoll_event { events, u64: watch.data.get() };
    let _ = fd::epoll_ctl(epfd, how, watched, Some(event));
}

/// The sets of this process that another program is about to inherit.
fn inherited_sets(tables: &'static Tables) -> impl Iterator<Item = u32> {
    tables.known_numbers(0, u32::MAX).filter_map(move |fd| match lookup(fd) {
        Some(Known::Set(index)) if fd::is_inherited(fd) => {
            Some(index).filter(|index| !is_anothers(set::at(*index)))
        }
        _ => None,
    })
}

/// Before an exec: what the new program inherits has gone to the kernel for good. (The rest is no concern of its.)
pub fn give_back_inherited(tables: &'static Tables) {
    for index in inherited_sets(tables) {
        give_back(tables, index, |socket| socket.end().given.is());
    }
}

/// This process is about to become another program.
pub fn before_exec(tables: &'static Tables) {
    for index in inherited_sets(tables) {
        register_bells(set::at(index), libc::EPOLL_CTL_DEL);
    }
}

/// It did not become one.
pub fn after_failed_exec(tables: &'static Tables) {
    for index in inherited_sets(tables) {
        let set = set::at(index);
        register_bells(set, libc::EPOLL_CTL_ADD);
        kick(set);
    }
}

/// Another process is about to get this set: it and what is in it are the kernel's for good.
pub fn given_away(index: u32, gives: impl Fn(&'static Socket) -> bool) {
    let Some(tables) = tables() else { return };
    let set = set::at(index);
    // ORDER: SeqCst, before the look at what is in it; pairs with `add`, which looks behind its registration.
    set.given.swap(1);
    give_back(tables, index, gives);
    register_bells(set, libc::EPOLL_CTL_DEL);
}

/// This process is about to close itself in, and will wait there as without ringlet. (In a set that its parent waits on too, that one's marks stay.)
pub fn closes_in(index: u32, gives: impl Fn(&'static Socket) -> bool) {
    if !is_anothers(set::at(index)) {
        given_away(index, gives);
    }
}

/// One of the set's descriptors of this process, which names it no more, is about to be closed. With the last one it goes; else it is known by another.
pub fn closed(index: u32) {
    let Some(tables) = tables() else { return };
    let set = set::at(index);
    if set.names.add(u32::MAX) != 0 {
        let names = |fd: &i32| matches!(lookup(*fd), Some(Known::Set(named)) if named == index);
        if !names(&(set.epfd.get() as i32))
            && let Some(other) = tables.known_numbers(0, u32::MAX).find(names)
        {
            set.epfd.set(other as u32);
        }
        return;
    }
    for socket in tables.followed() {
        let _registering = socket.registering.take();
        watches(tables, socket)
            .filter(|(_, watch)| watch.set.get() == index)
            .for_each(|(_, watch)| _ = withdraw(watch));
    }
    // Who still waits in it is nothing to the next set of this entry, nor to the next owner of its contexts (`Visit`).
    let held = set.take();
    set.end_life();
    let contexts = [&set.context, &set.second, &set.reserved].map(|word| word.swap(0));
    let armed = [set.armed.swap(0), set.beside.swap(0)];
    drop(held);
    disarm(&Armed { contexts: armed, look_every_ns: None });
    if contexts.iter().any(|context| *context != 0) {
        context::release_set(index);
    }
    for word in [&set.elder, &set.waker] {
        let eventfd = word.swap(0) as i32;
        if eventfd != 0 {
            tables.close_hidden(eventfd);
        }
    }
    set::give(index);
}

/// Before a fork: the child may wait on our sets, and take what was for us; then it must be able to wake us.
pub fn before_fork(socket: &'static Socket) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket) {
        let index = watch.set.get();
        if index == 0 {
            // Another thread has just taken it out.
            continue;
        }
        let set = set::at(index);
        let _held = set.take();
        if !set.context.is() && !set.reserved.is() && !has_elder(set) {
            set.reserved.set(register_context(set, index).unwrap_or(0));
        }
    }
}

/// Before a fork, which a handler may make that has interrupted this thread at work in sets: then both processes go on with that. What it takes off
/// a set's ready board may be taken by the other one too. So all that is in the set is looked at. True if there is such a set.
pub fn before_fork_amid() -> bool {
    let amid = set::used().filter(|set| set.lock.is_ours());
    amid.inspect(|set| set.all_hot.set(1)).count() > 0
}

/// After a fork: locks held by threads that do not exist here, and contexts that are the parent's.
pub fn after_fork(tables: &Tables, parent: u32) {
    for set in set::used() {
        if !set.elder.is() && !set.inherited.is() {
            set.keeper.set(parent);
        }
        set.lock.reset();
        set.context.set(0);
        set.second.set(0);
        set.armed.set(0);
        set.beside.set(0);
        set.forget_natives();
        set.reserved.set(0);
        set.named.set(0);
        set.inherited.set(1);
        set.all_hot.set(1);
    }
    for socket in tables.followed() {
        socket.registering.reset();
    }
}

/// The set that a descriptor names; one that was made behind our back is followed from now on.
pub fn set_of(epfd: i32) -> Option<u32> {
    match lookup(epfd) {
        Some(Known::Set(set)) => Some(set),
        None if !pin::is_closed_in() && fd::is_epoll(epfd) => {
            created(epfd);
            set_of_known(epfd)
        }
        _ => None,
    }
}

fn set_of_known(epfd: i32) -> Option<u32> {
    match lookup(epfd) {
        Some(Known::Set(set)) => Some(set),
        _ => None,
    }
}

/// A wait begins in the set that a descriptor names, if we know it. It may be closed beside us, and its entry be another set's: so the number is looked
/// up again behind the look at whose life it is.
pub fn visit(epfd: i32) -> Option<Visit> {
    (0..VISIT_LOOKS).find_map(|_| {
        let visit = Visit::of(set_of_known(epfd)?);
        (set_of_known(epfd) == Some(visit.index())).then_some(visit)
    })
}

/// Each of them is another thread's close and making of a set in between.
const VISIT_LOOKS: u32 = 16;

/// Sets that were made around libc are looked for among the numbers up to so many above the highest that we know, and below the other.
const STRANGE_SETS_ABOVE: i32 = 64;
const STRANGE_SETS_BELOW: i32 = 4096;

/// May a set that was made by system calls around libc watch this socket? Whoever waits there would hear nothing of the ring. Suspected
/// is a non-blocking socket that no call of libc's has waited for; it is cleared if the process has no such set.
#[cold]
pub fn may_be_watched_by_a_strange_set(tables: &Tables, socket: &Socket) -> bool {
    if watches_any(socket) || socket.waited_for.is() || !fd::is_nonblocking(socket.fd()) {
        return false;
    }
    let process = tables.process();
    if !process.has_strange_set.is() {
        let highest = process.highest_fd.get() as i32;
        let end = (highest + STRANGE_SETS_ABOVE).min(STRANGE_SETS_BELOW);
        let strange = |fd: i32| lookup(fd).is_none() && fd::is_open(fd) && fd::is_epoll(fd);
        process.has_strange_set.set((0..end).any(strange) as u32);
    }
    process.has_strange_set.is()
}
