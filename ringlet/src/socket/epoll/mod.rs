//! epoll sets that hold attached connections.
//!
//! The kernel's set stays in charge of everything else. An attached connection is registered there under a mark of our own,
//! edge-triggered, for what only the kernel knows (doorbell bytes, the end of the connection); its readiness is computed here.
//!
//! Looking at every connection would cost what idle ones are many; so a set keeps a *hot list* of those that may be ready or were
//! lately. A sleeping set is woken for hot ones through its context. Cold ones are armed to be woken by a byte on their kernel
//! connection, which the kernel's set reports by itself; then they are hot again.

pub mod set;

use set::{OTHERS_MOST, Set, Watch};

use super::table::{Known, Receiving, Sending, Socket, Stage, Tables, tables};
use super::{carrier, context, datagram, jumps, moving, stream, unforgiving, view};
use crate::lock::Held;
use crate::plain::P32;
use crate::reasons::Reason;
use crate::waiting::{signals, sleep, spin};
use core::cell::Cell;
use ringlet_core::sync::Ordering;
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::tcp;

/// Data of our registrations: high half this mark (no canonical address, no descriptor number), low half whose it is and the watch.
const MARK: u64 = 0x726e_676c << 32;
const MARK_MASK: u64 = 0xffff_ffff << 32;
const WATCH_BITS: u32 = 18;
const WATCH_MASK: u32 = (1 << WATCH_BITS) - 1;
/// In place of a watch: the set's own eventfd; and the second context's, which its thread drains.
const SELF: u32 = WATCH_MASK;
const SECOND: u32 = WATCH_MASK - 1;
/// And what a process that shares the set has registered for this one: it has taken what was not for it.
const ALL: u32 = WATCH_MASK - 2;
/// The set's own bell that is rung by name.
const NAMED: u32 = WATCH_MASK - 3;

/// What a process that shares a set by fork adds to its eventfd, when it has taken what was not for it: look at everything.
const LOOK_AT_ALL: u64 = 1 << 32;
/// Then it leaves the set to the others for a moment.
const LEAVE_TO_OTHERS_NS: u64 = 1_000_000;

/// Hot connections beside the first cool down after some waits that found something elsewhere: the more there are, the sooner, so that
/// looking at them costs a bounded number of looks altogether. WHY not keep a few: each costs 30 ns a look, eight doubled an 8 B
/// ping-pong by epoll (280 to 530 ns half, `ringlet bench --only scale`).
const HOT_COUNT: u32 = 1;
const COOL_AFTER_LOOKS: u32 = 4096;
const COOL_AFTER_WAITS_MIN: u32 = 16;
/// While rings keep a set busy (or being watched), the kernel's part is looked at this often (about 10 us).
const ASK_KERNEL_TICKS: u64 = 30_000;

/// So often the kernel is asked on, where there is room for few events and those are our own.
const ASKS_MAX: u32 = 64;

/// Neighbours of which the kernel has told nothing for so many waits are quiet. Counted in waits, so that no clock decides about order.
const QUIET_AFTER_WAITS: u32 = 256;

/// Beside neighbours, everything is looked at after so many waits that found something.
const ALL_AFTER_WAITS: u32 = 1024;

const LOOK_SOON_NS: u64 = 1_000_000;
const LOOK_AT_TIMES_NS: u64 = 50_000_000;

const EPOLLIN: u32 = libc::EPOLLIN as u32;
const EPOLLOUT: u32 = libc::EPOLLOUT as u32;
const EPOLLPRI: u32 = libc::EPOLLPRI as u32;
const EPOLLRDHUP: u32 = libc::EPOLLRDHUP as u32;
/// How a connection ends.
const ENDS: u32 = EPOLLRDHUP | (libc::EPOLLHUP | libc::EPOLLERR) as u32;
const EPOLLREAD: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const EPOLLET: u32 = libc::EPOLLET as u32;
const EPOLLONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EPOLLEXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// KERNEL: what may stand beside EPOLLEXCLUSIVE.
const EXCLUSIVE_ALLOWS: u32 = EPOLLIN
    | EPOLLOUT
    | EPOLLET
    | EPOLLEXCLUSIVE
    | (libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32;

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
    let Some(tables) = tables() else { return };
    let Some(index) = set::take() else { return };
    let set = set::at(index);
    for word in [&set.context, &set.second, &set.reserved] {
        word.set(0);
    }
    for word in [&set.nested, &set.armed, &set.holds_sets, &set.all_hot, &set.elder, &set.quiet] {
        word.set(0);
    }
    for count in [&set.adopted, &set.natives, &set.neighbours] {
        count.store(0, Ordering::Relaxed);
    }
    for word in [&set.inherited, &set.given, &set.waker, &set.named, &set.taken] {
        word.set(0);
    }
    for word in [&set.hot_first, &set.hot_last, &set.hot_count, &set.beside, &set.left_over] {
        word.set(0);
    }
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
        if !watches(tables, socket).any(|(_, watch)| of_set(watch)) || !gives(socket) {
            continue;
        }
        let _registering = socket.registering.take();
        let adopted = |watch: &Watch| of_set(watch) && watch.adopted.is();
        for (_, watch) in watches(tables, socket).filter(|(_, watch)| adopted(watch)) {
            register_natively(set, watch);
            count_neighbour(set, watch, watch.set.is() && is_neighbour(socket));
        }
    }
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
    if let Some(_held) = set.lock.take() {
        cool(set, watch);
    }
    let how = if events & EPOLLEXCLUSIVE != 0 { libc::EPOLL_CTL_ADD } else { libc::EPOLL_CTL_MOD };
    let event = epoll_event { events, u64: watch.data.get() };
    let _ = fd::epoll_ctl(epfd, how, watched, Some(event));
}

/// The set's eventfds are registered in it, or not.
fn register_bells(set: &Set, op: i32) {
    let own = set.context.get().max(set.reserved.get());
    for (context, index) in [(own, SELF), (set.second.get(), SECOND)] {
        if context != 0 {
            let event = epoll_event { events: EPOLLIN | EPOLLET, u64: mark(index) };
            let eventfd = context::eventfd_of(context);
            let _ = fd::epoll_ctl(set.epfd.get() as i32, op, eventfd, Some(event));
        }
    }
    if set.named.is() {
        let event = epoll_event { events: EPOLLIN | EPOLLET, u64: mark(NAMED) };
        let socket = context::named_of(set.context.get());
        let _ = fd::epoll_ctl(set.epfd.get() as i32, op, socket, Some(event));
    }
}

/// The context of a set that watches this socket may have its bell by name since just now.
pub fn bell_was_named(socket: &Socket) {
    let Some(set) = first_set(socket).map(set::at) else { return };
    if let Some(_held) = set.lock.take() {
        register_named(set);
    }
}

/// The bell by name of the set's context is registered, once there is one. Set lock held.
fn register_named(set: &Set) {
    let socket = context::named_of(set.context.get());
    if socket >= 0 && !set.named.is() {
        let event = epoll_event { events: EPOLLIN | EPOLLET, u64: mark(NAMED) };
        let made = fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_ADD, socket, Some(event));
        set.named.set(made.is_ok() as u32);
    }
}

/// A bell of a context of ours has got another number; the old one names it too, so far. KERNEL: a set knows it by both file and number.
pub fn renamed(context: u32, old: i32, new: i32) {
    for set in set::used() {
        let Some(_held) = set.lock.take() else { continue };
        let own = set.context.get().max(set.reserved.get());
        let by_name = context::named_of(context) == new;
        for (_, index) in
            [(own, SELF), (set.second.get(), SECOND)].into_iter().filter(|(of, _)| *of == context)
        {
            let epfd = set.epfd.get() as i32;
            let index = if by_name { NAMED } else { index };
            let event = epoll_event { events: EPOLLIN | EPOLLET, u64: mark(index) };
            if fd::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, old, None).is_ok() {
                let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, new, Some(event));
            }
        }
    }
}

/// Is another process, of which this one is a child, or may be, in the set too, under our marks?
fn is_anothers(set: &Set) -> bool {
    has_elder(set) || set.inherited.is() && !set.elder.is()
}

/// The sets of this process that another program is about to inherit.
fn inherited_sets(tables: &'static Tables) -> impl Iterator<Item = u32> {
    tables.known_numbers(0, u32::MAX).filter_map(move |fd| match super::table::lookup(fd) {
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

/// The set's last descriptor of this process is about to be closed.
pub fn closed(index: u32) {
    let Some(tables) = tables() else { return };
    let set = set::at(index);
    if set.names.add(u32::MAX) != 0 {
        return;
    }
    for socket in tables.followed() {
        let _registering = socket.registering.take();
        watches(tables, socket)
            .filter(|(_, watch)| watch.set.get() == index)
            .for_each(|(_, watch)| _ = withdraw(watch));
    }
    disarm(&Armed { contexts: [set.armed.swap(0), set.beside.swap(0)], look_every_ns: None });
    if set.context.is() || set.reserved.is() {
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
        let _held = set.lock.take();
        if !set.context.is() && !set.reserved.is() && !has_elder(set) {
            set.reserved.set(register_context(set, index).unwrap_or(0));
        }
    }
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
fn has_elder(set: &Set) -> bool {
    if !set.elder.is() && !set.inherited.is() {
        return false;
    }
    let lives = sys::thread_exists(set.keeper.get() as i32);
    if !lives {
        set.inherited.set(0);
    }
    lives
}

/// The process in marks.
fn tag() -> u64 {
    let pid = tables().map_or(0, |tables| tables.process().pid.get());
    u64::from((pid ^ pid >> (32 - WATCH_BITS)) << WATCH_BITS)
}

fn mark(watch: u32) -> u64 {
    MARK | tag() | u64::from(watch)
}

/// Makes the set's context and registers its eventfd. Set lock held.
fn register_context(set: &Set, set_index: u32) -> Option<u32> {
    let context = context::of_set(set_index)?;
    let event = epoll_event { events: EPOLLIN | EPOLLET, u64: mark(SELF) };
    let eventfd = context::eventfd_of(context);
    let _ = fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_ADD, eventfd, Some(event));
    set.keeper.set(tables()?.process().pid.get());
    Some(context)
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
        set.natives.store(0, Ordering::Relaxed);
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
    match super::table::lookup(epfd) {
        Some(Known::Set(set)) => Some(set),
        None if fd::is_epoll(epfd) => {
            created(epfd);
            set_of_known(epfd)
        }
        _ => None,
    }
}

fn set_of_known(epfd: i32) -> Option<u32> {
    match super::table::lookup(epfd) {
        Some(Known::Set(set)) => Some(set),
        _ => None,
    }
}

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
        let strange =
            |fd: i32| super::table::lookup(fd).is_none() && fd::is_open(fd) && fd::is_epoll(fd);
        process.has_strange_set.set((0..end).any(strange) as u32);
    }
    process.has_strange_set.is()
}

/// Was it ever put into a set?
fn watches_any(socket: &Socket) -> bool {
    socket.watches.load(Ordering::Relaxed) != 0
}

/// A set that holds a socket of ours.
pub fn first_set(socket: &Socket) -> Option<u32> {
    watches(tables()?, socket).map(|(_, watch)| watch.set.get()).next()
}

/// The registrations of a socket. See `Watch` for why this needs no lock.
fn watches<'t>(tables: &'t Tables, socket: &Socket) -> impl Iterator<Item = (u32, &'t Watch)> {
    entries(tables, socket).filter(|(_, watch)| watch.set.get() != 0)
}

/// The same, and those that are registered nowhere.
fn entries<'t>(tables: &'t Tables, socket: &Socket) -> impl Iterator<Item = (u32, &'t Watch)> {
    let owner = tables.index_of(socket);
    // ORDER: Acquire, both; pairs with `link`: what the entry says of itself is there.
    let mut next = socket.watches.load(Ordering::Acquire);
    core::iter::from_fn(move || {
        let index = next;
        let watch = set::watch_at(index);
        // (An entry that is another's by now: our socket has gone meanwhile, and its list with it.)
        if index == 0 || watch.socket.get() != owner {
            return None;
        }
        next = watch.next.load(Ordering::Acquire);
        Some((index, watch))
    })
}

fn find<'t>(tables: &'t Tables, socket: &Socket, set: u32, fd: i32) -> Option<(u32, &'t Watch)> {
    watches(tables, socket).find(|(_, watch)| watch.set.get() == set && watch.fd.get() as i32 == fd)
}

/// An entry for a new registration; the socket's list may have one. `registering` held.
fn entry<'t>(tables: &'t Tables, socket: &Socket) -> Option<(u32, &'t Watch)> {
    if let Some(unused) =
        entries(tables, socket).find(|(_, watch)| watch.set.get() == 0 && !watch.hot.is())
    {
        return Some(unused);
    }
    let index = set::take_watch()?;
    let watch = set::watch_at(index);
    watch.set.set(0);
    watch.hot.set(0);
    watch.gone.set(0);
    watch.socket.set(tables.index_of(socket));
    link(socket, index, watch);
    Some((index, watch))
}

fn link(socket: &Socket, index: u32, watch: &Watch) {
    let mut first = socket.watches.load(Ordering::Relaxed);
    loop {
        watch.next.store(first, Ordering::Relaxed);
        // ORDER: Release; pairs with `entries`. An exchange, for a signal handler may be quicker, which needs no lock that we hold.
        match socket.watches.compare_exchange(first, index, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

/// The kernel has no such registration any more. False if the entry is still on the hot list, which a signal handler can't change while
/// the thread that it interrupted does.
fn withdraw(watch: &Watch) -> bool {
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
    if let Some(_held) = set.lock.take() {
        cool(set, watch);
    }
    !watch.hot.is()
}

/// The last descriptor of `socket` is about to be closed: the kernel drops its registrations with it.
pub fn forget_socket(socket: &Socket) {
    let _registering = socket.registering.take();
    let mut next = socket.watches.swap(0, Ordering::AcqRel);
    while next != 0 {
        let index = next;
        let watch = set::watch_at(index);
        next = watch.next.load(Ordering::Acquire);
        if withdraw(watch) {
            free(index, watch);
        } else {
            watch.gone.set(1);
        }
    }
}

fn free(index: u32, watch: &Watch) {
    watch.socket.set(0);
    set::give_watch(index);
}

/// epoll_ctl on a descriptor of a followed socket.
pub fn control(
    set_index: u32,
    op: i32,
    fd: i32,
    socket: &'static Socket,
    event: Option<epoll_event>,
) -> Sys<()> {
    let tables = tables().ok_or(Errno::EBADF)?;
    let set = set::at(set_index);
    let ours = || {
        let (_, watch) = socket.is_ours().then(|| find(tables, socket, set_index, fd))??;
        watch.adopted.is().then(|| control_adopted(tables, set, op, socket, watch, event))
    };
    if let Some(done) = ours() {
        return done;
    }
    // Until it is adopted, and then it stays so: what is registered here and in the kernel changes together.
    let _registering = socket.registering.take();
    if let Some(done) = ours() {
        return done;
    }
    if op == libc::EPOLL_CTL_ADD
        && let Some(event) = event
    {
        if set.given.is() {
            super::keep_on_kernel(socket, Reason::Passed);
        }
        return add(tables, set, set_index, fd, socket, event);
    }
    fd::epoll_ctl(set.epfd.get() as i32, op, fd, event)?;
    if let Some((_, watch)) = find(tables, socket, set_index, fd) {
        match (op, event) {
            (libc::EPOLL_CTL_MOD, Some(event)) => aim(watch, event),
            (libc::EPOLL_CTL_DEL, _) => _ = withdraw(watch),
            _ => {}
        }
    }
    Ok(())
}

/// `registering` held.
fn add(
    tables: &Tables,
    set: &Set,
    set_index: u32,
    fd: i32,
    socket: &Socket,
    event: epoll_event,
) -> Sys<()> {
    if event.events & EPOLLEXCLUSIVE != 0 && event.events & !EXCLUSIVE_ALLOWS != 0 {
        return Err(Errno::EINVAL);
    }
    let epfd = set.epfd.get() as i32;
    let attached = socket.is_ours() && !set.given.is();
    let (index, watch) = entry(tables, socket).ok_or(Errno::ENOMEM)?;
    watch.fd.set(fd as u32);
    watch.adopted.set(0);
    watch.dormant.set(0);
    // What an earlier user of this entry had seen is nothing to this one.
    watch.seen.set(0);
    watch.seen_received.set(0);
    watch.seen_ends.set(0);
    watch.seen_room.set(socket.end().room_news.get());
    watch.told.set(0);
    watch.linked.set(0);
    aim(watch, event);
    if !attached {
        fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, Some(event))?;
        watch.set.set(set_index);
        // (What is connected never does.)
        let listens = || {
            !socket.is_begun()
                && tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1)
        };
        count_neighbour(set, watch, is_neighbour(socket) && !listens());
        return Ok(());
    }
    prepare(set, set_index);
    watch.marked.set(mark(index) as u32);
    let ours = our_event(watch, socket, event.events);
    if let Err(error) = fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, Some(ours)) {
        set.adopted.fetch_sub(1, Ordering::SeqCst);
        return Err(error);
    }
    watch.set.set(set_index);
    take_up(tables, set, watch);
    link_if_ready(tables, set, watch, 0);
    Ok(())
}

/// On a watch that is ours the kernel need not be asked. A removed one stays registered there, dormant: programs that add and remove a
/// connection for every message pay no system call for it, and the kernel drops it when the connection is closed.
fn control_adopted(
    tables: &Tables,
    set: &Set,
    op: i32,
    socket: &Socket,
    watch: &Watch,
    event: Option<epoll_event>,
) -> Sys<()> {
    let asked = watch.events.get();
    let mut heard = asked;
    {
        let held = set.lock.take();
        let dormant = watch.dormant.is();
        if dormant || watch.disabled.is() {
            heard = 0;
        }
        match (op, event) {
            (libc::EPOLL_CTL_ADD, _) if !dormant => return Err(Errno::EEXIST),
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _) if dormant => return Err(Errno::ENOENT),
            (libc::EPOLL_CTL_ADD, Some(event))
                if event.events & EPOLLEXCLUSIVE != 0 && event.events & !EXCLUSIVE_ALLOWS != 0 =>
            {
                return Err(Errno::EINVAL);
            }
            (libc::EPOLL_CTL_MOD, Some(event)) if (event.events | asked) & EPOLLEXCLUSIVE != 0 => {
                return Err(Errno::EINVAL);
            }
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some(event)) => {
                aim(watch, event);
                watch.dormant.set(0);
                heat(set, watch, held.is_some());
            }
            (libc::EPOLL_CTL_DEL, _) => {
                watch.dormant.set(1);
                watch.linked.set(0);
                if held.is_some() {
                    cool(set, watch);
                }
            }
            _ => return Err(Errno::EINVAL),
        }
    }
    count_neighbour(set, watch, !watch.dormant.is() && is_neighbour(socket));
    if op != libc::EPOLL_CTL_DEL {
        if (asked ^ watch.events.get()) & EPOLLOUT != 0 && socket.end().sending() != Sending::Ring {
            register_anew(socket, watch);
        }
        if link_if_ready(tables, set, watch, heard) || others_sleep(set) {
            kick_sleepers(set);
        }
    }
    if socket.is_datagram() {
        // Room for datagrams only the kernel knows.
        sending_changed(socket);
    }
    Ok(())
}

/// What the program asks of a watch; the kernel looks at readiness anew then, and so do we.
fn aim(watch: &Watch, event: epoll_event) {
    watch.events.set(event.events);
    watch.data.set(event.u64);
    watch.disabled.set(0);
    watch.fresh.set(1);
    watch.again.set(1);
    watch.turn.set(0);
}

/// KERNEL: what is ready as it is asked for is put into the list of what is ready, unless it is there: since it was reported by level, or its
/// data came while that was asked for (`heard`). True if it was put there now.
fn link_if_ready(tables: &Tables, set: &Set, watch: &Watch, heard: u32) -> bool {
    if is_linked(watch) || set.hot_count.get() < 2 && !set.beside.is() {
        return false;
    }
    // (In a handler that interrupted its holder: whoever sleeps looks.)
    let Some(_held) = set.lock.take() else { return true };
    if !is_of(watch, set) {
        return false;
    }
    let ready = look(tables, watch).events;
    let new = ready != 0 && ready & heard & EPOLLREAD == 0;
    if new {
        watch.linked.set(sys::ticks());
    }
    new
}

/// Set lock held, under which no thread takes it out, and so none closes what it watches.
fn is_of(watch: &Watch, set: &Set) -> bool {
    core::ptr::eq(set::at(watch.set.get()), set)
}

fn is_linked(watch: &Watch) -> bool {
    watch.linked.get() != 0
}

/// When it was put into the list of what is ready.
fn place_of(watch: &Watch, socket: &Socket) -> u64 {
    match watch.linked.get() {
        0 => stream::sent_at(socket),
        since => since,
    }
}

/// KERNEL: what is reported by level is at the list's end again, in the order of the report, until a wait finds that it is not ready. What
/// happens to it meanwhile does not change its place.
fn link_again(watch: &Watch, now: u64, nth: usize) {
    let by_level = watch.events.get() & (EPOLLET | EPOLLONESHOT) == 0;
    watch.linked.set(if by_level { now + nth as u64 * PLACES_BETWEEN } else { 0 });
}

/// KERNEL: what there was no room for stays in its place. The next wait begins with it.
fn leave_over(set: &Set, watch: &Watch, place: u64) {
    if !is_linked(watch) {
        watch.linked.set(place.clamp(1, set.told_at.get().max(1)));
    }
    set.left_over.set(1);
}

const PLACES_BETWEEN: u64 = OTHERS_MOST as u64 * 2;

fn note_other(set: &Set, nth: usize, data: u64) {
    if let Some(other) = set.others.get(nth) {
        other.data.set(data);
        other.linked.set(sys::ticks());
    }
}

/// Those of which the kernel has told last.
fn others_of(set: &Set) -> [(u64, u64); OTHERS_MOST] {
    core::array::from_fn(|nth| (set.others[nth].data.get(), set.others[nth].linked.get()))
}

fn other_place(others: &[(u64, u64)], data: u64) -> Option<u64> {
    others.iter().find(|other| other.0 == data && other.1 != 0).map(|other| other.1)
}

/// KERNEL: the first of `out`, which are ours, and others that the kernel tells of now, were put into one list by the last report. These
/// others come to their places among ours, whose places were `ours`.
fn merge_others(
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
fn is_neighbour(socket: &Socket) -> bool {
    let in_ring = socket.stage() == Stage::Attached && socket.end().receiving() == Receiving::Ring;
    !in_ring && !socket.is_datagram() && !socket.paired.is()
}

fn count_neighbour(set: &Set, watch: &Watch, is: bool) {
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

fn our_event(watch: &Watch, socket: &Socket, asked: u32) -> epoll_event {
    // Room in the kernel matters while we send there, to who asks for it; and to us for what is sent again.
    let room = match socket.end().sending() {
        Sending::Ring => 0,
        Sending::Returning => EPOLLOUT,
        _ => asked & EPOLLOUT,
    };
    let events = EPOLLIN | EPOLLRDHUP | EPOLLPRI | EPOLLET | room;
    epoll_event { events, u64: MARK | u64::from(watch.marked.get()) }
}

/// The sending direction has changed its path: the kernel is asked for what matters now.
pub fn sending_changed(socket: &Socket) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| watch.adopted.is()) {
        register_anew(socket, watch);
    }
}

fn register_anew(socket: &Socket, watch: &Watch) {
    let set = watch.set.get();
    if set == 0 {
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

/// Does another thread sleep in a wait on a set that watches this socket?
pub fn watched_by_sleepers(socket: &Socket) -> bool {
    let Some(tables) = tables() else { return false };
    watches(tables, socket).any(|(_, watch)| {
        let set = set::at(watch.set.get());
        set.context.is() && context::has_sleepers(set.context.get())
    })
}

/// Before a socket is attached: its registrations stay as they are as long as the result is held. `None`, and it can't be attached now, if one
/// of them is one-shot and armed: a thread may have it from the kernel already, on its way to the program, and it must not be told twice. One
/// that was told is safe, until the program arms it again.
pub fn hold_registrations(socket: &Socket) -> Option<Held<'_>> {
    let tables = tables()?;
    let held = socket.registering.take()?;
    let armed = |(_, watch): (u32, &Watch)| {
        let epfd = set::at(watch.set.get()).epfd.get() as i32;
        watch.events.get() & EPOLLONESHOT != 0 && fd::epoll_armed(epfd, watch.fd.get() as i32)
    };
    (!watches(tables, socket).any(armed)).then_some(held)
}

/// A socket was just attached: its registrations in sets become ours. Those that come later know that it is.
pub fn adopt(socket: &Socket, _registering: Held<'_>) {
    let Some(tables) = tables() else { return };
    for (index, watch) in watches(tables, socket).filter(|(_, watch)| !watch.adopted.is()) {
        let set_index = watch.set.get();
        let set = set::at(set_index);
        let epfd = set.epfd.get() as i32;
        let watched = watch.fd.get() as i32;
        if watch.events.get() & EPOLLONESHOT != 0 {
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
        take_up(tables, set, watch);
    }
}

/// A registration of the set is about to become ours. Before that, so that whoever meets our mark, in a wait that is under way in the
/// kernel too, knows what to do with it.
fn prepare(set: &Set, set_index: u32) {
    // ORDER: SeqCst; pairs with `begin_native`.
    set.adopted.fetch_add(1, Ordering::SeqCst);
    let _held = set.lock.take();
    if !set.context.is() && !has_elder(set) {
        let context = match set.reserved.swap(0) {
            0 => register_context(set, set_index),
            reserved => Some(reserved),
        };
        set.context.set(context.unwrap_or(0));
    }
}

/// A registration of the set is ours now.
fn take_up(tables: &Tables, set: &Set, watch: &Watch) {
    let socket = tables.sockets.at(watch.socket.get() as usize);
    {
        let held = set.lock.take();
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

/// Whoever is about to sleep wants to be woken through the kernel.
fn want(socket: &Socket, room: bool) {
    if socket.is_datagram() {
        datagram::arm(socket, true);
    } else {
        stream::want_bytes(socket, true, room);
    }
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
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket) {
        let set = set::at(watch.set.get());
        {
            let held = set.lock.take();
            heat(set, watch, held.is_some());
        }
        kick_sleepers(set);
    }
}

/// Makes a wait on the set return (and look again).
fn kick(set: &Set) {
    let context = set.context.get();
    if context != 0 {
        context::ring_ours(context);
    }
}

fn kick_sleepers(set: &Set) {
    if set.context.is() && context::has_sleepers(set.context.get()) {
        kick(set);
    }
}

/// Does anybody else sleep in this set?
fn others_sleep(set: &Set) -> bool {
    !set.beside.is() || context::sleepers(set.beside.get()) > 1
}

/// Puts a watch on the hot list. `held`: the set's lock is; if it is not, we are in a signal handler that interrupted its holder, and the
/// next harvest does it.
fn heat(set: &Set, watch: &Watch, held: bool) {
    watch.active_at.set(set.fruitful.get());
    if watch.hot.is() || !watch.adopted.is() || watch.dormant.is() {
        return;
    }
    if !held {
        return set.all_hot.set(1);
    }
    let index = set::index_of(watch);
    watch.hot.set(1);
    append(set, index, watch);
    set.hot_count.add(1);
}

/// Puts all watches of a set on its hot list. Set lock held.
#[cold]
fn heat_set(tables: &Tables, set: &Set) {
    set.all_hot.set(0);
    for socket in tables.followed() {
        for (_, watch) in watches(tables, socket) {
            if core::ptr::eq(set::at(watch.set.get()), set) {
                socket.kernel_tells();
                watch.again.set(1);
                heat(set, watch, true);
            }
        }
    }
}

fn append(set: &Set, index: u32, watch: &Watch) {
    let last = set.hot_last.get();
    watch.hot_next.set(0);
    watch.hot_previous.set(last);
    match last {
        0 => set.hot_first.set(index),
        last => set::watch_at(last).hot_next.set(index),
    }
    set.hot_last.set(index);
}

fn unlink(set: &Set, watch: &Watch) {
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

/// Takes a watch off the hot list. Set lock held.
fn cool(set: &Set, watch: &Watch) {
    if watch.hot.is() {
        unlink(set, watch);
        watch.hot.set(0);
        set.hot_count.add(u32::MAX);
    }
}

/// What a look at a watch has found.
#[derive(Default)]
struct Look {
    /// The events that a wait would report now.
    events: u32,
    /// Edge-triggered: how far it saw. All of this is taken before the events, so that whatever comes later is news to the next look.
    position: u64,
    /// Are there bytes that were not reported, or datagrams?
    more: bool,
    received: Option<u64>,
    room: u32,
    no_space: u32,
}

/// Set lock held, or its result a hint.
fn look(tables: &Tables, watch: &Watch) -> Look {
    let mut look = Look::default();
    let socket = tables.sockets.at(watch.socket.get() as usize);
    if watch.disabled.is() || watch.dormant.is() || watch.set.get() == 0 || !socket.is_ours() {
        return look;
    }
    let asked = watch.events.get();
    if asked & EPOLLET == 0 {
        look.events = mask_of(socket, asked);
        return look;
    }
    look.begin(socket, watch);
    let mask = mask_of(socket, asked);
    if !socket.is_datagram() {
        look.end(socket, mask);
    }
    if mask != 0 && look.is_news(socket, watch, mask) {
        look.events = mask;
    }
    look
}

fn mask_of(socket: &Socket, asked: u32) -> u32 {
    let mask = if socket.is_datagram() {
        datagram::poll_mask(socket, asked as u16 as i16)
    } else {
        stream::poll_mask(socket, asked as u16 as i16, true, 0)
    };
    mask as u16 as u32
}

impl Look {
    fn begin(&mut self, socket: &Socket, watch: &Watch) {
        if socket.is_datagram() {
            self.position = datagram::arrivals(socket);
            self.more = self.position != watch.seen.get();
            return;
        }
        let end = socket.end();
        self.room = end.room_news.get();
        self.no_space = end.no_space.get();
        if let Some(incoming) = socket.incoming() {
            self.position = end.rx.published_after(&incoming, watch.seen.get());
            // (Behind a mark that was passed there may be none.)
            self.more = self.position > watch.seen.get().max(end.rx.position());
        }
        if watch.told.get() & EPOLLIN != 0 {
            self.received = received_by_kernel(socket);
        }
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
    fn is_news(&self, socket: &Socket, watch: &Watch, mask: u32) -> bool {
        if watch.fresh.is() || socket.is_datagram() && (watch.told.is() || self.more) {
            return true;
        }
        mask & EPOLLOUT != 0 && watch.seen_room.get() != self.room
            || mask & EPOLLREAD != 0 && self.more && !socket.is_datagram()
            || watch.told.is() && self.is_kernel_news(watch)
    }

    /// The kernel has told something of this watch: is it news? It tells all that is ready, after every change of what we ask of it,
    /// and also of doorbells.
    fn is_kernel_news(&self, watch: &Watch) -> bool {
        let told = watch.told.get();
        let news = told & ENDS & !watch.seen_ends.get() != 0
            || told & EPOLLPRI != 0
            || self.received.is_some_and(|n| n > watch.seen_received.get());
        if !news {
            watch.told.set(0);
        }
        news
    }

    /// What the kernel has of the stream is asked for only where something is about to be reported: then the events are looked at
    /// once more.
    fn begin_in_kernel(&mut self, socket: &Socket, watch: &Watch) {
        let end = socket.end();
        let mark_ahead =
            || socket.incoming().is_some_and(|ring| end.rx.mark_ahead(&ring).is_some());
        if self.events & EPOLLREAD != 0
            && self.received.is_none()
            && (end.receiving() != Receiving::Ring || mark_ahead())
        {
            self.received = received_by_kernel(socket);
            self.events = mask_of(socket, watch.events.get());
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
            false => moving::back_ahead(end, &ring)?,
            true => moving::bells_end(end, &ring),
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
fn reported(socket: &Socket, watch: &Watch, look: &Look) {
    let (asked, events) = (watch.events.get(), look.events);
    watch.fresh.set(0);
    let told = watch.told.swap(0);
    if asked & EPOLLONESHOT != 0 {
        watch.disabled.set(1);
    }
    let end = socket.end();
    if !socket.is_datagram() && asked & EPOLLOUT != 0 && events & EPOLLOUT == 0 {
        // KERNEL: who asks for room and finds none is told when there is some.
        end.no_space.add(1);
    }
    if asked & EPOLLET == 0 {
        return;
    }
    if events & EPOLLREAD != 0 || socket.is_datagram() {
        watch.seen.set(look.position);
        if let Some(received) = look.received {
            watch.seen_received.set(received);
        }
    }
    if events & EPOLLOUT != 0 {
        watch.seen_room.set(look.room);
    }
    watch.seen_ends.set(watch.seen_ends.get() | told & ENDS);
}

/// KERNEL: what became ready first is told first, and programs count on that: one that sent on two connections expects its server
/// to serve them in this order. So many of those found at once are put in order.
const IN_ORDER_MOST: usize = 16;

/// Puts an event, of a watch, at the last place of `out`, or, as long as there is room to note all of them, before those that are later.
#[inline]
fn insert(out: &mut [epoll_event], first: &mut [(u64, u32)], event: epoll_event, of: (u64, u32)) {
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

/// What a wait would report of this watch. Set lock held.
#[inline(always)]
fn see(tables: &Tables, watch: &Watch, socket: &Socket) -> Look {
    let mut seen = match unforgiving::on() {
        // The other pieces of a send that has begun meanwhile are no news of their own.
        true => unforgiving::of_whole_sends(socket, || look(tables, watch)),
        false => look(tables, watch),
    };
    if seen.events != 0 && watch.events.get() & EPOLLET != 0 && !socket.is_datagram() {
        seen.begin_in_kernel(socket, watch);
    }
    seen
}

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
    watch.active_at.set(set.fruitful.get());
    epoll_event { events: seen.events, u64: watch.data.get() }
}

/// Which watches a look beside neighbours is for: those that were reported by level; what rings hold, and what is to be looked at anyway;
/// one; all.
#[derive(Clone, Copy)]
enum Whom {
    Linked,
    Rung,
    RungBefore(u64),
    One(u32),
    All,
}

/// As `harvest`, beside neighbours: those for whom is asked, and which were not reported in this turn, or, by the same wait, since another
/// one, the first of them first.
fn harvest_turn(
    tables: &Tables,
    set: &Set,
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
fn harvest_turn_at(
    tables: &Tables,
    set: &Set,
    out: &mut [epoll_event],
    slept: bool,
    whom: Whom,
    since: u32,
    first: &mut [(u64, u32); IN_ORDER_MOST],
    now: u64,
) -> usize {
    let Some(_held) = set.lock.take() else {
        set.since_all.set(ALL_AFTER_WAITS);
        return 0;
    };
    if set.all_hot.is() {
        heat_set(tables, set);
    }
    let turn = set.turn.get();
    let socket_of = |watch: &Watch| tables.sockets.at(watch.socket.get() as usize);
    // (A neighbour that has just come to the ring rings too.)
    let rung = |watch: &Watch| {
        !watch.neighbour.is() || watch.again.is() || stream::ring_tells(socket_of(watch))
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

/// Collects ready watches of the hot list; a level-triggered one goes to the end of the list, so that none starves.
fn harvest(tables: &Tables, set: &Set, out: &mut [epoll_event], slept: bool) -> usize {
    let Some(_held) = set.lock.take() else { return 0 };
    if set.all_hot.is() {
        heat_set(tables, set);
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
        if watch.set.get() == 0 || watch.dormant.is() {
            // (A signal handler has left it here.)
            cool(set, watch);
            if watch.gone.swap(0) != 0 {
                free(index, watch);
            }
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
            let idle = set.fruitful.get().wrapping_sub(watch.active_at.get());
            let patience = (COOL_AFTER_LOOKS / hot.max(1)).max(COOL_AFTER_WAITS_MIN);
            if hot > HOT_COUNT && idle > patience && !set.nested.is() && !set.elder.is() {
                let room = watch.events.get() & EPOLLOUT != 0;
                want(socket, room);
                // Armed; look again, so that nothing fell in between.
                if look(tables, watch).events == 0 {
                    cool(set, watch);
                } else {
                    watch.active_at.set(set.fruitful.get());
                }
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

/// How many would a wait report, as far as rings tell, and up to so many?
fn count_ready(tables: &Tables, set: &Set, most: usize) -> usize {
    let count = Cell::new(0);
    for_each_hot(tables, set, |watch, _| {
        if count.get() < most && look(tables, watch).events != 0 {
            count.set(count.get() + 1);
        }
    });
    count.get()
}

fn any_ready(tables: &Tables, set: &Set) -> bool {
    let Some(_held) = set.lock.take() else { return true };
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

/// What `arm` armed, to be disarmed by whoever armed it: a set may get contexts meanwhile.
struct Armed {
    contexts: [u32; 2],
    /// Somebody's room can't be rung for, or another thread may take the byte that says it: look now and then.
    look_every_ns: Option<u64>,
}

/// Arms the set's contexts, and those hot connections that they do not cover.
fn arm(tables: &Tables, set: &Set) -> Armed {
    let second = context::of_thread_if_any().filter(|mine| *mine == set.second.get());
    arm_as(tables, set, [set.context.get(), second.unwrap_or(0)])
}

/// Is what rings hold to be told in the kernel's order? Then the set's context is armed from the first such wait to the last.
#[inline(always)]
fn beside_kernel(tables: &Tables, set: &Set) -> bool {
    let (neighbours, before) = (has_neighbours(set), set.beside.is());
    let heard = neighbours && set.quiet.add(1) < QUIET_AFTER_WAITS;
    (neighbours || before) && go_beside(tables, set, heard)
}

#[inline(always)]
fn has_neighbours(set: &Set) -> bool {
    set.neighbours.load(Ordering::Relaxed) != 0
}

/// Does the kernel tell of a neighbour, or of what is none of ours?
fn hear(set: &Set, told: &[epoll_event]) {
    let is_neighbour = |event: &epoll_event| {
        let watch = set::find_watch(event.u64 as u32 & WATCH_MASK);
        !is_ours(event) || watch.is_some_and(|watch| watch.neighbour.is())
    };
    if has_neighbours(set) && told.iter().any(is_neighbour) {
        set.quiet.set(0);
    }
}

#[cold]
fn go_beside(tables: &Tables, set: &Set, neighbours: bool) -> bool {
    // (What a nested set reports, and one that is shared with a parent, has its own order.)
    let context = set.context.get();
    let beside = neighbours && context != 0 && !set.nested.is() && !set.elder.is();
    if beside == set.beside.is() {
        return beside;
    }
    let Some(held) = set.lock.take() else { return set.beside.is() };
    let before = set.beside.swap(if beside { context } else { 0 });
    if beside && before == 0 {
        context::arm(context);
    } else if !beside && before != 0 {
        context::disarm(before);
    }
    drop(held);
    if beside {
        // Those that do not ring by it; and what came to rings before is not in the kernel's list.
        disarm(&arm_as(tables, set, [context, 0]));
        set.turn.add(1);
        set.told_at.set(sys::ticks());
        for_each_hot(tables, set, |watch, socket| {
            if !watch.neighbour.is() {
                leave_over(set, watch, place_of(watch, socket));
            }
        });
        set.others.iter().for_each(|other| other.linked.set(0));
        // What the kernel holds for neighbours it has told of once; those that were reported by level are linked.
        set.left_over.set(1);
    }
    beside
}

fn arm_as(tables: &Tables, set: &Set, contexts: [u32; 2]) -> Armed {
    let mut armed = Armed { contexts, look_every_ns: None };
    for context in armed.contexts {
        if context != 0 {
            context::arm(context);
        }
    }
    // (A bell by name has no place among neighbours, and what waits in its queue would make a nested set ready.)
    let by_name = set.named.is() && !set.beside.is() && !set.nested.is();
    let (look_soon, look_at_times) = (Cell::new(false), Cell::new(false));
    for_each_hot(tables, set, |watch, socket| {
        if socket.is_datagram() {
            datagram::arm(socket, true);
            return;
        }
        super::moving::answer_return(socket, socket.end());
        let room = watch.events.get() & EPOLLOUT != 0;
        let home = socket.home.get();
        let by_event = home != 0 && armed.contexts.contains(&home) && stream::rings_home(socket);
        if by_event {
            if room {
                stream::want_room_event(socket);
            }
        } else if by_name && rings_by_name(set, socket, home) {
            stream::want_named(socket, room);
        } else {
            stream::want_bytes(socket, true, room);
        }
        // (A bell by name may fail to ring, and then only a byte can.)
        if room && !by_event {
            look_soon.set(look_soon.get() || !stream::can_ring_for_room(socket));
            look_at_times.set(true);
        }
    });
    armed.look_every_ns = match (look_soon.get(), look_at_times.get()) {
        _ if holds_ours(set) && has_elder(set) => Some(LOOK_SOON_NS),
        (true, _) => Some(LOOK_SOON_NS),
        (_, true) => Some(LOOK_AT_TIMES_NS),
        _ => None,
    };
    armed
}

fn disarm(armed: &Armed) {
    for context in armed.contexts {
        if context != 0 {
            context::disarm(context);
        }
    }
}

fn for_each_hot(tables: &Tables, set: &Set, act: impl Fn(&Watch, &Socket)) {
    let Some(_held) = set.lock.take() else { return };
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

/// A nested set is armed whenever nobody is inside a wait on it; each arming is a new value, so that peers ring again.
fn stay_armed(tables: &Tables, set: &Set) {
    disarm(&Armed { contexts: [set.armed.get(), 0], look_every_ns: None });
    set.armed.set(arm(tables, set).contexts[0]);
}

/// Makes the kernel's view of a nested set true: its eventfd is readable if, and only if, a ring has something.
fn settle_nested(tables: &Tables, set: &Set) {
    if set.context.is() {
        drain(set);
        stay_armed(tables, set);
        // Doorbell bytes that wait in the kernel would make the set readable.
        for_each_hot(tables, set, |_, socket| socket.kernel_tells());
        if any_ready(tables, set) {
            kick(set);
        }
    }
}

/// As `settle_nested`, for a poll on the set itself.
pub fn settle(set_index: u32) {
    if let Some(tables) = tables() {
        settle_nested(tables, set::at(set_index));
    }
}

/// Before a wait on a set that holds other sets.
pub fn settle_inner(set_index: u32) {
    let Some(tables) = tables() else { return };
    if set::at(set_index).holds_sets.is() {
        for inner in set::used().filter(|set| set.nested.is() && set.names.is()) {
            settle_nested(tables, inner);
        }
    }
}

/// Are events of our own registrations among these, which no program may see?
pub fn any_of_ours(events: &[epoll_event]) -> bool {
    events.iter().any(is_ours)
}

/// Is this event one of our registrations?
fn is_ours(event: &epoll_event) -> bool {
    let data = event.u64;
    data & MARK_MASK == MARK
}

/// What the kernel reported, without our own events.
struct Translated {
    kept: usize,
    /// Something of ours was among it; or of a process with which we share the set.
    ours: bool,
    foreign: Option<u64>,
}

/// Takes our own events out of what the kernel reported; what they mean is left with the watches. `mine`: as what the caller sleeps.
fn translate(
    tables: &Tables,
    set: &Set,
    events: &mut [epoll_event],
    mine: Option<&Armed>,
) -> Translated {
    let mut told = Translated { kept: 0, ours: false, foreign: None };
    for i in 0..events.len() {
        let event = events[i];
        if !is_ours(&event) {
            events[told.kept] = event;
            told.kept += 1;
            continue;
        }
        told.ours = true;
        let foreign = (event.u64 ^ mark(0)) as u32 & !WATCH_MASK != 0;
        told.foreign = told.foreign.or(foreign.then_some(event.u64));
        match event.u64 as u32 & WATCH_MASK {
            SELF | ALL | NAMED if foreign => {}
            NAMED => context::heard_named(set.context.get(), set.hot_count.get()),
            // A full counter would not ring again.
            SELF => drain(set),
            ALL => set.all_hot.set(1),
            SECOND => {}
            index => told_of(tables, set, index, event.events),
        }
    }
    if told.ours {
        renew(tables, set, mine);
        pass_on_overtaking(set);
    }
    told
}

/// When what the kernel holds for this watch was sent; 0 if that is not known.
fn sent_by_kernel(tables: &Tables, set: &Set, index: u32) -> u64 {
    let (Some(watch), Some(_held)) = (set::find_watch(index), set.lock.take()) else {
        return 0;
    };
    if !is_of(watch, set) {
        return 0;
    }
    place_of(watch, tables.sockets.at(watch.socket.get() as usize))
}

/// As `translate`, beside neighbours: what is ours is put where the kernel tells of it. The first `n` of `out` are the kernel's; what a
/// ring's mark stands for may need more places.
fn translate_in_order(
    tables: &Tables,
    set: &Set,
    out: &mut [epoll_event],
    n: usize,
    mine: Option<&Armed>,
    since: Option<u32>,
) -> Translated {
    let mut told = Translated { kept: n, ours: any_of_ours(&out[..n]), foreign: None };
    set.others.iter().for_each(|other| other.linked.set(0));
    if !told.ours {
        out[..n].iter().enumerate().for_each(|(nth, event)| note_other(set, nth, event.u64));
        return told;
    }
    let is_foreign = |event: &epoll_event| (event.u64 ^ mark(0)) as u32 & !WATCH_MASK != 0;
    for event in out[..n].iter().filter(|event| is_ours(event)) {
        let foreign = is_foreign(event);
        told.foreign = told.foreign.or(foreign.then_some(event.u64));
        match event.u64 as u32 & WATCH_MASK {
            SELF if !foreign => drain(set),
            ALL if !foreign => set.all_hot.set(1),
            NAMED if !foreign => context::heard_named(set.context.get(), set.hot_count.get()),
            SELF | SECOND | ALL | NAMED => {}
            index => told_of(tables, set, index, event.events),
        }
    }
    let turn = set.turn.add(1);
    let since = since.unwrap_or(turn);
    // Who rings from now on gets a new place; the looks that follow find what was published before.
    renew(tables, set, mine);
    pass_on_overtaking(set);
    let at = out.len() - n;
    out.copy_within(..n, at);
    told.kept = 0;
    let (mut others, mut rung, mut marks) = (0, false, 0);
    let harvest =
        |out: &mut [epoll_event], whom| harvest_turn(tables, set, out, mine.is_some(), whom, since);
    for i in at..out.len() {
        let event = out[i];
        let index = event.u64 as u32 & WATCH_MASK;
        if is_ours(&event) && matches!(index, SELF | SECOND | ALL | NAMED) {
            rung = true;
            continue;
        }
        if rung {
            // What the kernel holds of ours has a time too. What is none of ours has only its place: behind the first that has rung.
            let time = if is_ours(&event) { sent_by_kernel(tables, set, index) } else { 0 };
            rung = time != 0 && marks < IN_ORDER_MOST;
            marks += 1;
            let whom = if rung { Whom::RungBefore(time) } else { Whom::Rung };
            told.kept += harvest(&mut out[told.kept..i], whom);
        }
        if is_ours(&event) {
            told.kept += harvest(&mut out[told.kept..=i], Whom::One(index));
        } else {
            out[told.kept] = event;
            told.kept += 1;
            note_other(set, others, event.u64);
            others += 1;
        }
    }
    if rung {
        told.kept += harvest(&mut out[told.kept..], Whom::Rung);
    }
    told
}

/// So many events are asked of the kernel at once that there is room for what rings hold.
fn places_beside(tables: &Tables, set: &Set, room: usize) -> usize {
    let hot = set.hot_count.get() as usize;
    let rung = if hot < room { hot } else { count_ready(tables, set, room) };
    room + 1 - rung.clamp(1, room)
}

/// A wait beside neighbours, as far as it needs no sleep.
#[cold]
fn in_order(tables: &Tables, set: &Set, out: &mut [epoll_event], mask: Option<u64>) -> Sys<usize> {
    if set.kernel_turn.swap(0) != 0 {
        let found = ask_kernel(tables, set, out, Some(0), mask, None)?;
        if found > 0 {
            return Ok(found);
        }
    }
    // KERNEL: what there was no room for is first, then what was reported by level: it is in the list again, before all that came later.
    let listed = set.left_over.swap(0) | set.stays_ready.swap(0);
    let (mut first, now) = ([(0, 0); IN_ORDER_MOST], sys::ticks());
    let mut found = 0;
    if listed != 0 {
        let turn = set.turn.add(1);
        found = harvest_turn_at(tables, set, out, false, Whom::Linked, turn, &mut first, now);
    }
    let ours = found;
    // Whatever it is that nobody tells of: it must not wait as long as the neighbours are busy.
    if found == 0 && set.since_all.add(1) > ALL_AFTER_WAITS {
        set.since_all.set(0);
        found = harvest_turn(tables, set, out, false, Whom::All, set.turn.add(1));
    }
    if found > 0 {
        // KERNEL: one wait tells all that is ready, if there is room.
        let (since, others) = (set.turn.get(), others_of(set));
        let rest = &mut out[found..];
        if rest.is_empty() {
            // It comes first at the next wait.
            set.kernel_turn.set(1);
            return Ok(found);
        }
        let more = ask_kernel_since(tables, set, rest, Some(0), mask, None, Some(since));
        found += more.unwrap_or(0);
        merge_others(set, &mut out[..found], &first[..ours], &others, now);
        return Ok(found);
    }
    for _ in 0..2 {
        let found = ask_kernel(tables, set, out, Some(0), mask, None)?;
        if found > 0 {
            return Ok(found);
        }
        // Who has published is about to ring; and what the kernel has got meanwhile may have come before.
        if !any_ready(tables, set) {
            break;
        }
    }
    set.since_all.set(0);
    Ok(0)
}

fn drain(set: &Set) {
    let context = set.context.get().max(set.reserved.get());
    if fd::drain(context::eventfd_of(context)) >= LOOK_AT_ALL {
        set.all_hot.set(1);
    }
}

fn told_of(tables: &Tables, set: &Set, index: u32, events: u32) {
    let Some(watch) = set::find_watch(index) else { return };
    let held = set.lock.take();
    if watch.adopted.is() && is_of(watch, set) {
        let socket = tables.sockets.at(watch.socket.get() as usize);
        stream::kernel_tells(socket, events);
        watch.told.set(watch.told.get() | events);
        let by_byte = watch.hot.is() && rings_by_name(set, socket, socket.home.get());
        heat(set, watch, held.is_some());
        drop(held);
        if by_byte {
            // Perhaps because the bell's queue is full. That gives no edge any more by which it would be emptied.
            context::drain_named(set.context.get());
        }
    }
}

/// Is a socket with this home woken by the bell by name of this set's context?
fn rings_by_name(set: &Set, socket: &Socket, home: u32) -> bool {
    set.named.is() && home != 0 && home == set.context.get() && stream::rings_by_name(socket)
}

/// We have taken a wake-up, perhaps for something that we report, and others go on sleeping in this set: senders, which ring once, are to
/// ring again. The look that follows finds what they did not ring for.
fn renew(tables: &Tables, set: &Set, mine: Option<&Armed>) {
    let contexts = [set.context.get(), set.second.get()];
    let others = contexts.iter().any(|&context| {
        let own = mine.is_some_and(|armed| armed.contexts.contains(&context));
        context != 0 && context::sleepers(context) > u64::from(own)
    });
    if others {
        disarm(&arm_as(tables, set, contexts));
        set.taken.set(1);
    }
}

/// We share the set with a process that came before us, and have taken what was for it. It is woken, if it waits there, while we do not.
fn pass_on(tables: &Tables, set: &Set, taken: u64, mask: Option<u64>) -> Sys<()> {
    if has_elder(set) {
        match set.elder.get() {
            0 => wake_by_mark(tables, set, taken),
            elder => fd::ring_by(elder as i32, LOOK_AT_ALL),
        }
        fd::poll(&mut [], Some(LEAVE_TO_OTHERS_NS), mask)?;
    }
    Ok(())
}

/// That process had no eventfd in the set when it forked. So we register one for it, under its marks.
#[cold]
fn wake_by_mark(tables: &Tables, set: &Set, taken: u64) {
    let of = taken as u32 & !WATCH_MASK | ALL;
    let Some(_held) = set.lock.take() else { return };
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

/// Can this set be left to the kernel alone?
#[inline(always)]
pub fn is_native(set_index: u32) -> bool {
    let set = set::at(set_index);
    !set.context.is() && !holds_ours(set)
}

fn holds_ours(set: &Set) -> bool {
    // ORDER: SeqCst; pairs with `prepare`.
    set.adopted.load(Ordering::SeqCst) != 0
}

/// A wait that is left to the kernel alone begins. False, and it does not, if the set has connections of ours by now.
pub fn begin_native(set_index: u32) -> bool {
    let set = set::at(set_index);
    jumps::waits_in(set_index);
    // ORDER: SeqCst, before the look; pairs with `prepare`, after which `pass_on_overtaking` looks for us.
    set.natives.fetch_add(1, Ordering::SeqCst);
    let native = is_native(set_index);
    if !native {
        end_native(set_index);
    }
    native
}

pub fn end_native(set_index: u32) {
    jumps::waits_no_more_in(set_index);
    set::leave_native(set_index);
}

/// A wake-up was taken, perhaps one that tells of an adoption. KERNEL: it wakes one thread; others may still be in waits of the kernel's
/// alone, which it was for.
fn pass_on_overtaking(set: &Set) {
    if set.natives.load(Ordering::SeqCst) != 0 {
        kick(set);
    }
}

/// epoll_wait and its relatives, on a set that has (or had) adopted connections, or for what a native wait returned
/// (`native` events) when one was adopted meanwhile. `EINTR` after a signal, as the kernel has it.
pub fn wait(
    set_index: u32,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let tables = tables().ok_or(Errno::EBADF)?;
    let set = set::at(set_index);
    jumps::look_back();
    let result = wait_in(tables, set, out, timeout_ns, mask);
    let stays_ready = result.is_ok() && set.stays_ready.is();
    if (result == Ok(out.len()) || stays_ready) && others_sleep(set) {
        // More may be ready than there was room for, and what is reported by level is so to every sleeper: another one looks.
        set.stays_ready.set(0);
        kick_sleepers(set);
    } else if set.taken.swap(0) != 0 && others_sleep(set) && any_ready(tables, set) {
        // What rang came behind our look at the rings, and its wake-up is gone.
        kick_sleepers(set);
    }
    leave(tables, set);
    result
}

/// A wait on a set is over, or cancelled.
fn leave(tables: &Tables, set: &Set) {
    if set.nested.is() {
        settle_nested(tables, set);
    }
}

fn wait_in(
    tables: &Tables,
    set: &Set,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let deadline = timeout_ns.map(|ns| if ns == 0 { 0 } else { sys::now_ns().saturating_add(ns) });
    loop {
        let beside = beside_kernel(tables, set);
        if beside {
            let found = in_order(tables, set, out, mask)?;
            if found > 0 {
                return Ok(found);
            }
        } else if set.kernel_turn.swap(0) != 0 || has_neighbours(set) && any_ready(tables, set) {
            let more = ask_kernel(tables, set, out, Some(0), mask, None)?;
            let found = harvest(tables, set, &mut out[more..], false);
            if more + found > 0 {
                return Ok(more + found);
            }
        }
        let found = harvest(tables, set, out, false);
        // (What a nested set leaves untaken in the kernel makes it readable.)
        if found > 0 && (beside || !kernel_due(set, set.told_at.get()) && !set.nested.is()) {
            return Ok(found);
        }
        if found == out.len() {
            // No room for what the kernel has: it comes first at the next wait.
            set.kernel_turn.set(1);
            return Ok(found);
        }
        if found > 0 || deadline == Some(0) {
            let more = ask_kernel(tables, set, &mut out[found..], Some(0), mask, None)?;
            if found + more > 0 {
                return Ok(found + more);
            }
            return Ok(harvest(tables, set, out, false));
        }
        sleep::check(&|| leave(tables, set));
        let budget = tables
            .config
            .spin_us
            .min(deadline.map_or(u64::MAX, |at| at.saturating_sub(sys::now_ns()) / 1000));
        // (Who does not watch for long asks the kernel by sleeping there.)
        let began = sys::ticks();
        let for_long = || {
            sys::ticks().wrapping_sub(began) > ASK_KERNEL_TICKS
                || super::kernel_writes() != set.written.get()
        };
        let in_kernel = || for_long() && kernel_due(set, sys::ticks()) && in_kernel(set);
        signals::begin_wait();
        if spin::watch(
            budget,
            || latest_peer(tables, set),
            || any_ready(tables, set) || in_kernel(),
        ) {
            let more = if any_ready(tables, set) {
                0
            } else {
                ask_kernel(tables, set, out, Some(0), mask, None)?
            };
            if more > 0 {
                return Ok(more);
            }
            continue;
        }
        if signals::handled() {
            // It would have ended the kernel's wait.
            return Err(Errno::EINTR);
        }
        let armed = arm(tables, set);
        let mut left = deadline.map(|at| at.saturating_sub(sys::now_ns()));
        for every in armed.look_every_ns.into_iter().chain(super::memory::due()) {
            left = Some(left.unwrap_or(every).min(every));
        }
        let slept = if any_ready(tables, set) {
            Ok(0)
        } else {
            ask_kernel(tables, set, out, left, mask, Some(&armed))
        };
        disarm(&armed);
        match slept {
            Ok(0) if beside && deadline.is_none_or(|at| sys::now_ns() < at) => {}
            Ok(more @ 1..) if beside => return Ok(more),
            Ok(0) => {
                let found = harvest(tables, set, out, true);
                if found > 0 || deadline.is_some_and(|at| sys::now_ns() >= at) {
                    return Ok(found);
                }
            }
            Ok(more) => {
                let found = harvest(tables, set, &mut out[more..], true);
                return Ok(more + found);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Where the peer runs that was heard of last.
fn latest_peer(tables: &Tables, set: &Set) -> Option<spin::Peer> {
    let last = set.hot_last.get();
    let watch = set::find_watch(last).filter(|_| last != 0)?;
    let socket = tables.sockets.at(watch.socket.get() as usize);
    if socket.stage() == Stage::Attached { stream::peer(socket) } else { None }
}

/// Is the kernel's part of the set to be looked at again? Every now and then; and at once when this process has written to something
/// that is not a connection of ours, since it may expect to be told of it.
fn kernel_due(set: &Set, now: u64) -> bool {
    let written = super::kernel_writes();
    if now.wrapping_sub(set.kernel_asked.get()) < ASK_KERNEL_TICKS && written == set.written.get() {
        return false;
    }
    set.kernel_asked.set(now);
    set.written.set(written);
    true
}

fn in_kernel(set: &Set) -> bool {
    fd::pending(set.epfd.get() as i32, libc::POLLIN) != 0
}

fn ask_kernel(
    tables: &Tables,
    set: &Set,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    asleep: Option<&Armed>,
) -> Sys<usize> {
    ask_kernel_since(tables, set, out, timeout_ns, mask, asleep, None)
}

/// `since`: the same wait has told of some already, in this turn.
#[allow(unsafe_code)]
fn ask_kernel_since(
    tables: &Tables,
    set: &Set,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    asleep: Option<&Armed>,
    since: Option<u32>,
) -> Sys<usize> {
    let epfd = set.epfd.get() as i32;
    let mut timeout = timeout_ns;
    let beside = set.beside.is();
    let room = if beside { places_beside(tables, set, out.len()) } else { out.len() };
    for _ in 0..ASKS_MAX {
        let asked = &mut out[..room];
        let n = match asleep {
            Some(armed) => {
                let cancelled = || {
                    disarm(armed);
                    // What had woken this one is another's.
                    kick_sleepers(set);
                    leave(tables, set);
                };
                sleep::epoll_wait(epfd, asked, timeout, mask, &cancelled)?
            }
            // SAFETY: `asked` is a valid slice.
            None => unsafe { fd::epoll_wait(epfd, asked.as_mut_ptr(), room, timeout, mask)? },
        };
        set.kernel_asked.set(sys::ticks());
        hear(set, &out[..n]);
        let told = match beside {
            true => translate_in_order(tables, set, out, n, asleep, since),
            false => translate(tables, set, &mut out[..n], asleep),
        };
        if let Some(taken) = told.foreign {
            let passed = pass_on(tables, set, taken, mask);
            if told.kept == 0 {
                passed?;
            }
        }
        if told.kept > 0 || n < room {
            return Ok(told.kept);
        }
        // Events of our own took all the room there was. What they told of comes first; the kernel's turn is next.
        if asleep.is_some() && any_ready(tables, set) {
            return Ok(0);
        }
        timeout = Some(0);
    }
    Ok(0)
}

/// What a native wait returned that was overtaken by an adoption: our events taken out.
pub fn after_native(set_index: u32, out: &mut [epoll_event]) -> usize {
    let Some(tables) = tables() else { return out.len() };
    let set = set::at(set_index);
    let told = translate(tables, set, out, None);
    if let Some(taken) = told.foreign {
        let _ = pass_on(tables, set, taken, None);
    }
    told.kept
}
