//! epoll sets that hold attached connections.
//!
//! The kernel's set stays in charge of everything else. An attached connection is registered there under a mark of our own,
//! edge-triggered, for what only the kernel knows (doorbell bytes, the end of the connection); its readiness is computed here.
//!
//! Looking at every connection would cost what idle ones are many; so a set keeps a *hot list* of those that may be ready or were
//! lately. A sleeping set is woken for hot ones through its context. Cold ones are armed to be woken by a byte on their kernel
//! connection, which the kernel's set reports by itself; then they are hot again.

use super::table::{Lock, Receiving, Sending, Socket, Stage, Tables, tables};
use super::{carrier, context, datagram, moving, sleep, spin, stream, unforgiving, view};
use crate::plain::{P32, P64};
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::map::Zeroed;
use ringlet_linux::sys::{self, Errno, Sys};
use std::cell::Cell;

/// Data of our registrations: high half this mark (no canonical address, no descriptor number), low half the watch.
const MARK: u64 = 0x726e_676c << 32;
const MARK_MASK: u64 = 0xffff_ffff << 32;
/// The set's own eventfd.
const MARK_SELF: u64 = MARK | 0xffff_ffff;
/// The second context's, which its thread drains.
const MARK_SECOND: u64 = MARK | 0xffff_fffe;
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

const LOOK_SOON_NS: u64 = 1_000_000;
const LOOK_AT_TIMES_NS: u64 = 50_000_000;

const EPOLLIN: u32 = libc::EPOLLIN as u32;
const EPOLLOUT: u32 = libc::EPOLLOUT as u32;
const EPOLLPRI: u32 = libc::EPOLLPRI as u32;
const EPOLLRDHUP: u32 = libc::EPOLLRDHUP as u32;
/// How a connection ends.
const ENDS: u32 = EPOLLRDHUP | (libc::EPOLLHUP | libc::EPOLLERR) as u32;
const EPOLLET: u32 = libc::EPOLLET as u32;
const EPOLLONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EPOLLEXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// KERNEL: what may stand beside EPOLLEXCLUSIVE.
const EXCLUSIVE_ALLOWS: u32 = EPOLLIN
    | EPOLLOUT
    | EPOLLET
    | EPOLLEXCLUSIVE
    | (libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32;

/// An epoll set of this process.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Set {
    lock: Lock,
    pub epfd: P32,
    /// Descriptors of this process that name it.
    pub names: P32,
    /// Attached connections in it; while there is none, every wait is the kernel's.
    adopted: P32,
    /// Our context for it once it had an adopted connection; its eventfd is registered.
    context: P32,
    /// The context of a thread that is home to connections which came into the set later: armed with it when that very thread waits.
    /// (Otherwise its thread may sleep elsewhere, and drain what was rung for us.)
    second: P32,
    /// It is itself waited on (in another set, or by poll): it stays armed, by this context.
    nested: P32,
    armed: P32,
    /// Other sets are in it.
    holds_sets: P32,
    hot_first: P32,
    hot_last: P32,
    hot_count: P32,
    /// Waits that found something ready.
    fruitful: P32,
    /// The kernel is asked first at the next wait: rings have filled the last one.
    kernel_turn: P32,
    /// The last harvest reported something by level.
    stays_ready: P32,
    kernel_asked: P64,
    written: P32,
    pub next_free: P32,
}

/// One descriptor of a followed socket in one set.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Watch {
    set: P32,
    socket: P32,
    fd: P32,
    events: P32,
    data: P64,
    /// Edge-triggered: what was last reported (ring position, bytes that the kernel had received, room), and whether it is new.
    seen: P64,
    seen_received: P64,
    seen_room: P32,
    fresh: P32,
    /// One-shot, and shot.
    disabled: P32,
    /// Removed by the program, but still registered in the kernel's set.
    dormant: P32,
    adopted: P32,
    hot: P32,
    hot_next: P32,
    hot_previous: P32,
    /// Count of fruitful waits of its set when it was last ready.
    active_at: P32,
    /// Next watch of the same socket; next free one.
    pub next: P32,
    /// What the kernel has told of it since the last report, and which ends of the connection were reported.
    told: P32,
    seen_ends: P32,
}

// SAFETY: atomics only; zero is a free entry.
#[allow(unsafe_code)]
unsafe impl Zeroed for Set {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Zeroed for Watch {}

/// A set was made: `fd` names it.
pub fn created(fd: i32) {
    let Some(tables) = tables() else { return };
    let Some(index) = tables.new_set() else { return };
    let set = &tables.sets[index as usize];
    for word in [&set.adopted, &set.context, &set.second, &set.nested, &set.armed, &set.holds_sets]
    {
        word.set(0);
    }
    for word in [&set.hot_first, &set.hot_last, &set.hot_count] {
        word.set(0);
    }
    set.epfd.set(fd as u32);
    set.names.set(1);
    tables.name_set(fd, index);
}

/// The set's last descriptor of this process is about to be closed.
pub fn closed(index: u32) {
    let Some(tables) = tables() else { return };
    let set = &tables.sets[index as usize];
    if set.names.add(u32::MAX) != 0 {
        return;
    }
    for socket in tables.followed() {
        remove_watches(tables, socket, |watch| watch.set.get() == index);
    }
    if set.context.is() {
        context::release_set(index);
    }
    tables.free_set(index);
}

/// After a fork: locks held by threads that do not exist here, and contexts that are the parent's.
pub fn after_fork(tables: &Tables) {
    for set in tables.used_sets() {
        set.lock.reset();
        set.context.set(0);
        set.second.set(0);
        set.armed.set(0);
    }
}

/// The set that a descriptor names; one that was made behind our back is followed from now on.
pub fn set_of(epfd: i32) -> Option<u32> {
    match super::table::lookup(epfd) {
        Some(super::table::Known::Set(set)) => Some(set),
        None if fd::is_epoll(epfd) => {
            created(epfd);
            set_of_known(epfd)
        }
        _ => None,
    }
}

fn set_of_known(epfd: i32) -> Option<u32> {
    match super::table::lookup(epfd) {
        Some(super::table::Known::Set(set)) => Some(set),
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
    if socket.watches.is() || socket.waited_for.is() || !fd::is_nonblocking(socket.fd()) {
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

/// A set that holds a socket of ours.
pub fn first_set(socket: &Socket) -> Option<u32> {
    let tables = tables()?;
    let watch = socket.watches.get();
    (watch != 0).then(|| tables.watches[watch as usize].set.get())
}

fn watches<'t>(tables: &'t Tables, socket: &Socket) -> impl Iterator<Item = (u32, &'t Watch)> {
    let mut next = socket.watches.get();
    std::iter::from_fn(move || {
        if next == 0 {
            return None;
        }
        let index = next;
        let watch = &tables.watches[index as usize];
        next = watch.next.get();
        Some((index, watch))
    })
}

fn find<'t>(tables: &'t Tables, socket: &Socket, set: u32, fd: i32) -> Option<(u32, &'t Watch)> {
    watches(tables, socket).find(|(_, watch)| watch.set.get() == set && watch.fd.get() as i32 == fd)
}

fn remove_watches(tables: &Tables, socket: &Socket, gone: impl Fn(&Watch) -> bool) {
    let mut previous = 0;
    let mut index = socket.watches.get();
    while index != 0 {
        let watch = &tables.watches[index as usize];
        let next = watch.next.get();
        if gone(watch) {
            let set = &tables.sets[watch.set.get() as usize];
            {
                let _held = set.lock.take();
                cool(tables, set, watch);
                if watch.adopted.is() {
                    set.adopted.add(u32::MAX);
                }
            }
            match previous {
                0 => socket.watches.set(next),
                before => tables.watches[before as usize].next.set(next),
            }
            tables.free_watch(index);
        } else {
            previous = index;
        }
        index = next;
    }
}

/// A descriptor number of `socket` is about to be closed: the kernel drops its registrations with the last one.
pub fn forget_socket(socket: &Socket) {
    if let Some(tables) = tables() {
        remove_watches(tables, socket, |_| true);
    }
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
    let set = &tables.sets[set_index as usize];
    let epfd = set.epfd.get() as i32;
    let found = find(tables, socket, set_index, fd);
    if socket.is_ours()
        && let Some((_, watch)) = found
        && watch.adopted.is()
    {
        control_adopted(tables, set, op, watch, event)?;
        if socket.is_datagram() {
            // Room for datagrams only the kernel knows.
            sending_changed(socket);
        }
        return Ok(());
    }
    if op == libc::EPOLL_CTL_ADD
        && let Some(event) = event
    {
        return add(tables, set, set_index, fd, socket, event);
    }
    fd::epoll_ctl(epfd, op, fd, event)?;
    if let (libc::EPOLL_CTL_MOD, Some(event), Some((_, watch))) = (op, event, found) {
        aim(watch, event);
    }
    if op == libc::EPOLL_CTL_DEL {
        remove_watches(tables, socket, |watch| {
            watch.set.get() == set_index && watch.fd.get() as i32 == fd
        });
    }
    Ok(())
}

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
    let attached = socket.is_ours();
    let index = tables.new_watch().ok_or(Errno::ENOMEM)?;
    let asked = if attached { our_event(index, socket, event.events) } else { event };
    if let Err(error) = fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_ADD, fd, Some(asked)) {
        tables.free_watch(index);
        return Err(error);
    }
    let watch = &tables.watches[index as usize];
    watch.set.set(set_index);
    watch.socket.set(tables.index_of(socket));
    watch.fd.set(fd as u32);
    watch.adopted.set(0);
    watch.dormant.set(0);
    watch.hot.set(0);
    // What an earlier user of this entry had seen is nothing to this one.
    watch.seen.set(0);
    watch.seen_received.set(0);
    watch.seen_ends.set(0);
    watch.seen_room.set(socket.end().room_news.get());
    watch.told.set(0);
    aim(watch, event);
    watch.next.set(socket.watches.get());
    socket.watches.set(index);
    if attached {
        adopt_watch(tables, set, set_index, watch);
    }
    Ok(())
}

/// On a watch that is ours the kernel need not be asked. A removed one stays registered there, dormant: programs that add and remove a
/// connection for every message pay no system call for it, and the kernel drops it when the connection is closed.
fn control_adopted(
    tables: &Tables,
    set: &Set,
    op: i32,
    watch: &Watch,
    event: Option<epoll_event>,
) -> Sys<()> {
    let dormant = watch.dormant.is();
    match (op, event) {
        (libc::EPOLL_CTL_ADD, _) if !dormant => return Err(Errno::EEXIST),
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _) if dormant => return Err(Errno::ENOENT),
        (libc::EPOLL_CTL_ADD, Some(event)) => {
            if event.events & EPOLLEXCLUSIVE != 0 && event.events & !EXCLUSIVE_ALLOWS != 0 {
                return Err(Errno::EINVAL);
            }
            wake_watch(tables, set, watch, event);
        }
        (libc::EPOLL_CTL_MOD, Some(event)) => {
            if (event.events | watch.events.get()) & EPOLLEXCLUSIVE != 0 {
                return Err(Errno::EINVAL);
            }
            wake_watch(tables, set, watch, event);
        }
        (libc::EPOLL_CTL_DEL, _) => {
            let _held = set.lock.take();
            cool(tables, set, watch);
            watch.dormant.set(1);
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok(())
}

fn wake_watch(tables: &Tables, set: &Set, watch: &Watch, event: epoll_event) {
    let asked = watch.events.get() ^ event.events;
    {
        let _held = set.lock.take();
        aim(watch, event);
        watch.dormant.set(0);
        heat(tables, set, watch);
    }
    let socket = &tables.sockets[watch.socket.get() as usize];
    if asked & EPOLLOUT != 0 && socket.end().sending() != Sending::Ring {
        register_anew(tables, socket, index_of(tables, watch), watch);
    }
    kick_sleepers(set);
}

/// What the program asks of a watch; the kernel looks at readiness anew then, and so do we.
fn aim(watch: &Watch, event: epoll_event) {
    watch.events.set(event.events);
    watch.data.set(event.u64);
    watch.disabled.set(0);
    watch.fresh.set(1);
}

fn our_event(index: u32, socket: &Socket, asked: u32) -> epoll_event {
    // Room in the kernel matters while we send there, to who asks for it; and to us for what is sent again.
    let room = match socket.end().sending() {
        Sending::Ring => 0,
        Sending::Returning => EPOLLOUT,
        _ => asked & EPOLLOUT,
    };
    epoll_event {
        events: EPOLLIN | EPOLLRDHUP | EPOLLPRI | EPOLLET | room,
        u64: MARK | index as u64,
    }
}

/// The sending direction has changed its path: the kernel is asked for what matters now.
pub fn sending_changed(socket: &Socket) {
    let Some(tables) = tables() else { return };
    for (index, watch) in watches(tables, socket).filter(|(_, watch)| watch.adopted.is()) {
        register_anew(tables, socket, index, watch);
    }
}

fn register_anew(tables: &Tables, socket: &Socket, index: u32, watch: &Watch) {
    let epfd = tables.sets[watch.set.get() as usize].epfd.get() as i32;
    let event = our_event(index, socket, watch.events.get());
    let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, watch.fd.get() as i32, Some(event));
}

/// Another set or a poll waits on this set: from now on it stays armed.
pub fn nest(set_index: u32, outer: Option<u32>) {
    let Some(tables) = tables() else { return };
    let set = &tables.sets[set_index as usize];
    if let Some(outer) = outer {
        tables.sets[outer as usize].holds_sets.set(1);
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
    tables().is_some_and(|tables| tables.sets[set_index as usize].adopted.is())
}

/// Would a wait on this set return at once, as far as rings tell?
pub fn ready(set_index: u32) -> bool {
    tables().is_some_and(|tables| any_ready(tables, &tables.sets[set_index as usize]))
}

/// Does another thread sleep in a wait on a set that watches this socket?
pub fn watched_by_sleepers(socket: &Socket) -> bool {
    let Some(tables) = tables() else { return false };
    watches(tables, socket).any(|(_, watch)| {
        let set = &tables.sets[watch.set.get() as usize];
        set.context.is() && context::has_sleepers(set.context.get())
    })
}

/// A socket was just attached: its registrations in sets become ours.
pub fn adopt(socket: &Socket) {
    let Some(tables) = tables() else { return };
    for (index, watch) in watches(tables, socket) {
        let set_index = watch.set.get();
        let set = &tables.sets[set_index as usize];
        let epfd = set.epfd.get() as i32;
        let watched = watch.fd.get() as i32;
        if watch.events.get() & EPOLLONESHOT != 0 {
            watch.disabled.set(!fd::epoll_armed(epfd, watched) as u32);
        }
        watch.fresh.set(1);
        // First the context, then the registration: a wait that is under way in the kernel must find out that it was overtaken.
        adopt_watch(tables, set, set_index, watch);
        let ours = Some(our_event(index, socket, watch.events.get()));
        if watch.events.get() & EPOLLEXCLUSIVE != 0 {
            // KERNEL: an exclusive registration can't be modified.
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, watched, None);
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, watched, ours);
        } else {
            let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, watched, ours);
        }
    }
}

fn adopt_watch(tables: &Tables, set: &Set, set_index: u32, watch: &Watch) {
    let _held = set.lock.take();
    watch.adopted.set(1);
    set.adopted.add(1);
    if !set.context.is()
        && let Some(context) = context::of_set(set_index)
    {
        set.context.set(context);
        let event = epoll_event { events: EPOLLIN | EPOLLET, u64: MARK_SELF };
        let _ = fd::epoll_ctl(
            set.epfd.get() as i32,
            libc::EPOLL_CTL_ADD,
            context::eventfd_of(context),
            Some(event),
        );
    }
    heat(tables, set, watch);
    if !set.context.is() {
        // Without a context (there are only so many) the set is woken by bytes.
        let socket = &tables.sockets[watch.socket.get() as usize];
        want(socket, watch.events.get() & EPOLLOUT != 0);
    }
    let home = tables.sockets[watch.socket.get() as usize].home.get();
    if context::is_of_thread(home) && !set.second.is() && !set.nested.is() {
        let event = epoll_event { events: EPOLLIN | EPOLLET, u64: MARK_SECOND };
        let eventfd = context::eventfd_of(home);
        if fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_ADD, eventfd, Some(event)).is_ok() {
            set.second.set(home);
        }
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
        let set = &tables.sets[watch.set.get() as usize];
        !set.context.is() || context::has_sleepers(set.context.get())
    })
}

/// What comes to this socket is to be looked for by us again.
pub fn heat_all(socket: &Socket) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket) {
        let set = &tables.sets[watch.set.get() as usize];
        {
            let _held = set.lock.take();
            heat(tables, set, watch);
        }
        kick_sleepers(set);
    }
}

/// Makes a wait on the set return (and look again).
fn kick(set: &Set) {
    if set.context.is() {
        fd::ring(context::eventfd_of(set.context.get()));
    }
}

fn kick_sleepers(set: &Set) {
    if set.context.is() && context::has_sleepers(set.context.get()) {
        kick(set);
    }
}

/// Puts a watch on the hot list. Set lock held.
fn heat(tables: &Tables, set: &Set, watch: &Watch) {
    watch.active_at.set(set.fruitful.get());
    if watch.hot.is() || !watch.adopted.is() || watch.dormant.is() {
        return;
    }
    let index = index_of(tables, watch);
    watch.hot.set(1);
    append(tables, set, index, watch);
    set.hot_count.add(1);
}

fn index_of(tables: &Tables, watch: &Watch) -> u32 {
    ((watch as *const Watch as usize - tables.watches.as_ptr() as usize) / size_of::<Watch>())
        as u32
}

fn append(tables: &Tables, set: &Set, index: u32, watch: &Watch) {
    let last = set.hot_last.get();
    watch.hot_next.set(0);
    watch.hot_previous.set(last);
    match last {
        0 => set.hot_first.set(index),
        last => tables.watches[last as usize].hot_next.set(index),
    }
    set.hot_last.set(index);
}

fn unlink(tables: &Tables, set: &Set, watch: &Watch) {
    let (previous, next) = (watch.hot_previous.get(), watch.hot_next.get());
    match previous {
        0 => set.hot_first.set(next),
        previous => tables.watches[previous as usize].hot_next.set(next),
    }
    match next {
        0 => set.hot_last.set(previous),
        next => tables.watches[next as usize].hot_previous.set(previous),
    }
}

/// Takes a watch off the hot list. Set lock held.
fn cool(tables: &Tables, set: &Set, watch: &Watch) {
    if watch.hot.is() {
        unlink(tables, set, watch);
        watch.hot.set(0);
        set.hot_count.add(u32::MAX);
    }
}

/// The events that a wait would report for this watch now.
fn events_of(tables: &Tables, watch: &Watch) -> u32 {
    let socket = &tables.sockets[watch.socket.get() as usize];
    if watch.disabled.is() || watch.dormant.is() || !socket.is_ours() {
        return 0;
    }
    let asked = watch.events.get();
    let mask = if socket.is_datagram() {
        datagram::poll_mask(socket, asked as u16 as i16)
    } else {
        stream::poll_mask(socket, asked as u16 as i16, true)
    };
    let mask = mask as u16 as u32;
    if mask == 0 || asked & EPOLLET == 0 || edge(socket, watch, mask) { mask } else { 0 }
}

/// Edge-triggered: has anything happened since the last report, so that `mask` is reported again?
fn edge(socket: &Socket, watch: &Watch, mask: u32) -> bool {
    if socket.is_datagram() {
        let news = || datagram::arrivals(socket) != watch.seen.get();
        return watch.fresh.is() || watch.told.is() || news();
    }
    let end = socket.end();
    if mask & EPOLLOUT != 0 && end.no_space.is() {
        end.no_space.set(0);
        end.room_news.add(1);
    }
    let room = mask & EPOLLOUT != 0 && watch.seen_room.get() != end.room_news.get();
    if watch.fresh.is() || room || watch.told.is() && kernel_edge(socket, watch) {
        return true;
    }
    let Some(incoming) = socket.incoming() else { return false };
    end.rx.published_after(&incoming, watch.seen.get()) > watch.seen.get()
}

/// The kernel has told something of this watch: is it news? It tells all that is ready, after every change of what we ask of it, and
/// also of doorbells.
fn kernel_edge(socket: &Socket, watch: &Watch) -> bool {
    let told = watch.told.get();
    let news = told & ENDS & !watch.seen_ends.get() != 0
        || told & EPOLLPRI != 0
        || told & EPOLLIN != 0
            && received_by_kernel(socket).is_some_and(|n| n > watch.seen_received.get());
    if !news {
        watch.told.set(0);
    }
    news
}

/// How much of the stream the kernel has received, while it is the way.
fn received_by_kernel(socket: &Socket) -> Option<u64> {
    let end = socket.end();
    let received = || carrier::received(socket, end).unwrap_or(u64::MAX);
    // Behind what is in the ring.
    let behind = || {
        let ring = socket.incoming()?;
        let resumed = match end.left.get() {
            0 => moving::back_ahead(end, &ring)?,
            _ => moving::bells_end(end, &ring),
        };
        Some(received()).filter(|received| *received > resumed)
    };
    match end.receiving() {
        Receiving::Ring => behind(),
        // What comes after these are doorbells, up to where the stream goes on.
        Receiving::Draining => {
            behind().or_else(|| Some(received().min(end.taken.get() + end.until.get() - 1)))
        }
        // What came before it are doorbells.
        Receiving::Kernel | Receiving::Discarding => {
            Some(received()).filter(|received| *received > end.until.get())
        }
    }
}

/// A mark is no news: who has seen what came before it has seen the mark.
pub fn mark_passed(socket: &Socket, before: u64, after: u64) {
    let Some(tables) = tables() else { return };
    for (_, watch) in watches(tables, socket).filter(|(_, watch)| watch.seen.get() == before) {
        watch.seen.set(after);
    }
}

/// What was reported is seen.
fn reported(socket: &Socket, watch: &Watch, events: u32) {
    let end = socket.end();
    watch.fresh.set(0);
    watch.seen_room.set(end.room_news.get());
    if watch.events.get() & EPOLLONESHOT != 0 {
        watch.disabled.set(1);
    }
    if socket.is_datagram() {
        watch.told.set(0);
        if watch.events.get() & EPOLLET != 0 {
            watch.seen.set(datagram::arrivals(socket));
        }
        return;
    }
    if watch.events.get() & EPOLLOUT != 0 && events & EPOLLOUT == 0 {
        // KERNEL: who asks for room and finds none is told when there is some.
        end.no_space.set(1);
    }
    let mut in_kernel = end.receiving() != Receiving::Ring;
    if let Some(incoming) = socket.incoming() {
        watch.seen.set(end.rx.published_after(&incoming, watch.seen.get()));
        in_kernel |= end.rx.mark_ahead(&incoming).is_some();
    }
    if events & EPOLLIN != 0
        && (in_kernel || watch.told.is())
        && let Some(received) = received_by_kernel(socket)
    {
        // More than was there when the report was made, perhaps: it comes with it.
        watch.seen_received.set(received);
    }
    watch.seen_ends.set(watch.seen_ends.get() | watch.told.get() & ENDS);
    watch.told.set(0);
}

/// KERNEL: what became ready first is told first, and programs count on that: one that sent on two connections expects its server
/// to serve them in this order. So many of those found at once are put in order.
const IN_ORDER_MOST: usize = 16;

/// Puts an event at the last place of `out`, or, as long as there are times for all of them, before those that are later.
#[inline]
fn insert(out: &mut [epoll_event], times: &mut [u64], event: epoll_event, time: u64) {
    let mut place = out.len() - 1;
    if place < times.len() {
        while place > 0 && times[place - 1] > time {
            (out[place], times[place]) = (out[place - 1], times[place - 1]);
            place -= 1;
        }
        times[place] = time;
    }
    out[place] = event;
}

/// Collects ready watches of the hot list; a level-triggered one goes to the end of the list, so that none starves.
fn harvest(tables: &Tables, set: &Set, out: &mut [epoll_event], slept: bool) -> usize {
    let Some(_held) = set.lock.take() else { return 0 };
    let mut found = 0;
    let mut times = [0; IN_ORDER_MOST];
    let mut index = set.hot_first.get();
    for _ in 0..set.hot_count.get() {
        if index == 0 || found == out.len() {
            break;
        }
        let watch = &tables.watches[index as usize];
        let next = watch.hot_next.get();
        let socket = &tables.sockets[watch.socket.get() as usize];
        if unforgiving::on() {
            unforgiving::whole(socket);
        }
        let events = events_of(tables, watch);
        if events != 0 {
            if unforgiving::on() {
                // The other pieces of a send that has begun meanwhile are no news of their own.
                unforgiving::whole(socket);
            }
            let event = epoll_event { events, u64: watch.data.get() };
            insert(&mut out[..found + 1], &mut times, event, stream::sent_at(socket));
            found += 1;
            reported(socket, watch, events);
            if watch.events.get() & (EPOLLET | EPOLLONESHOT | EPOLLEXCLUSIVE) == 0 {
                set.stays_ready.set(1);
            }
            if slept {
                view::count_wake(socket);
            }
            watch.active_at.set(set.fruitful.get());
            if next != 0 {
                unlink(tables, set, watch);
                append(tables, set, index, watch);
            }
        } else {
            let hot = set.hot_count.get();
            let idle = set.fruitful.get().wrapping_sub(watch.active_at.get());
            let patience = (COOL_AFTER_LOOKS / hot.max(1)).max(COOL_AFTER_WAITS_MIN);
            if hot > HOT_COUNT && idle > patience && !set.nested.is() {
                let room = watch.events.get() & EPOLLOUT != 0;
                want(socket, room);
                // Armed; look again, so that nothing fell in between.
                if events_of(tables, watch) == 0 {
                    cool(tables, set, watch);
                } else {
                    watch.active_at.set(set.fruitful.get());
                }
            }
        }
        index = next;
    }
    set.fruitful.add((found > 0) as u32);
    found
}

fn any_ready(tables: &Tables, set: &Set) -> bool {
    let Some(_held) = set.lock.take() else { return true };
    let mut index = set.hot_first.get();
    for _ in 0..set.hot_count.get() {
        if index == 0 {
            break;
        }
        let watch = &tables.watches[index as usize];
        if events_of(tables, watch) != 0 {
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
    let contexts = [set.context.get(), second.unwrap_or(0)];
    let mut armed = Armed { contexts, look_every_ns: None };
    for context in armed.contexts {
        if context != 0 {
            context::arm(context);
        }
    }
    let (look_soon, look_at_times) = (Cell::new(false), Cell::new(false));
    for_each_hot(tables, set, |watch, socket| {
        if socket.is_datagram() {
            datagram::arm(socket, true);
            return;
        }
        super::moving::answer_return(socket, socket.end());
        let room = watch.events.get() & EPOLLOUT != 0;
        let home = socket.home.get();
        if home != 0 && armed.contexts.contains(&home) && stream::rings_home(socket) {
            if room {
                stream::want_room_event(socket);
            }
        } else {
            stream::want_bytes(socket, true, room);
            let soon = room && !stream::can_ring_for_room(socket);
            look_soon.set(look_soon.get() || soon);
            look_at_times.set(look_at_times.get() || room);
        }
    });
    armed.look_every_ns = match (look_soon.get(), look_at_times.get()) {
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
        let watch = &tables.watches[index as usize];
        let socket = &tables.sockets[watch.socket.get() as usize];
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
        fd::drain(context::eventfd_of(set.context.get()));
        stay_armed(tables, set);
        // Doorbell bytes that wait in the kernel would make the set readable.
        for_each_hot(tables, set, |_, socket| socket.kernel_news.set(1));
        if any_ready(tables, set) {
            kick(set);
        }
    }
}

/// As `settle_nested`, for a poll on the set itself.
pub fn settle(set_index: u32) {
    if let Some(tables) = tables() {
        settle_nested(tables, &tables.sets[set_index as usize]);
    }
}

/// Before a wait on a set that holds other sets.
pub fn settle_inner(set_index: u32) {
    let Some(tables) = tables() else { return };
    if tables.sets[set_index as usize].holds_sets.is() {
        for inner in tables.used_sets().iter().filter(|set| set.nested.is() && set.names.is()) {
            settle_nested(tables, inner);
        }
    }
}

/// Is this event one of our registrations?
fn is_ours(event: &epoll_event) -> bool {
    let data = event.u64;
    data & MARK_MASK == MARK
}

/// Takes our own events out of what the kernel reported; what they mean is left with the watches. Returns how many remain.
fn translate(tables: &Tables, set: &Set, events: &mut [epoll_event]) -> usize {
    let mut kept = 0;
    for i in 0..events.len() {
        let event = events[i];
        if !is_ours(&event) {
            events[kept] = event;
            kept += 1;
            continue;
        }
        let data = event.u64;
        if data == MARK_SELF {
            // A full counter would not ring again.
            fd::drain(context::eventfd_of(set.context.get()));
            continue;
        }
        if data == MARK_SECOND {
            continue;
        }
        let Some(watch) = tables.watches.get(data as u32 as usize) else { continue };
        let Some(_held) = set.lock.take() else { continue };
        if watch.adopted.is() && std::ptr::eq(&tables.sets[watch.set.get() as usize], set) {
            let socket = &tables.sockets[watch.socket.get() as usize];
            socket.kernel_news.set(1);
            watch.told.set(watch.told.get() | event.events);
            heat(tables, set, watch);
        }
    }
    kept
}

/// Can this set be left to the kernel alone?
#[inline(always)]
pub fn is_native(set_index: u32) -> bool {
    tables().is_none_or(|tables| {
        let set = &tables.sets[set_index as usize];
        !set.context.is() && !set.adopted.is()
    })
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
    let set = &tables.sets[set_index as usize];
    let result = wait_in(tables, set, out, timeout_ns, mask);
    if result == Ok(out.len()) || result.is_ok() && set.stays_ready.is() {
        // More may be ready than there was room for, and what is reported by level is so to every sleeper: another one looks.
        set.stays_ready.set(0);
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
        if set.kernel_turn.is() {
            set.kernel_turn.set(0);
            let more = ask_kernel(tables, set, out, Some(0), mask, None)?;
            let found = harvest(tables, set, &mut out[more..], false);
            if more + found > 0 {
                return Ok(more + found);
            }
        }
        let found = harvest(tables, set, out, false);
        // (What a nested set leaves untaken in the kernel makes it readable.)
        if found > 0 && !kernel_due(set) && !set.nested.is() {
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
        if spin::watch(
            budget,
            || latest_peer(tables, set),
            || any_ready(tables, set) || kernel_due(set) && in_kernel(set),
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
        let armed = arm(tables, set);
        let mut left = deadline.map(|at| at.saturating_sub(sys::now_ns()));
        if let Some(every) = armed.look_every_ns {
            left = Some(left.unwrap_or(every).min(every));
        }
        let slept = if any_ready(tables, set) {
            Ok(0)
        } else {
            ask_kernel(tables, set, out, left, mask, Some(&armed))
        };
        disarm(&armed);
        match slept {
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
    let watch = tables.watches.get(last as usize).filter(|_| last != 0)?;
    let socket = &tables.sockets[watch.socket.get() as usize];
    if socket.stage() == Stage::Attached { stream::peer(socket) } else { None }
}

/// Is the kernel's part of the set to be looked at again? Every now and then; and at once when this process has written to something
/// that is not a connection of ours, since it may expect to be told of it.
fn kernel_due(set: &Set) -> bool {
    let now = sys::ticks();
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

#[allow(unsafe_code)]
fn ask_kernel(
    tables: &Tables,
    set: &Set,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    asleep: Option<&Armed>,
) -> Sys<usize> {
    let epfd = set.epfd.get() as i32;
    let mut timeout = timeout_ns;
    for _ in 0..ASKS_MAX {
        let n = match asleep {
            Some(armed) => {
                let cancelled = || {
                    disarm(armed);
                    // What had woken this one is another's.
                    kick_sleepers(set);
                    leave(tables, set);
                };
                sleep::epoll_wait(epfd, out, timeout, mask, &cancelled)?
            }
            // SAFETY: `out` is a valid slice.
            None => unsafe { fd::epoll_wait(epfd, out.as_mut_ptr(), out.len(), timeout, mask)? },
        };
        let kept = translate(tables, set, &mut out[..n]);
        if kept > 0 || n < out.len() {
            return Ok(kept);
        }
        // Events of our own took all the room there was.
        timeout = Some(0);
    }
    Ok(0)
}

/// What a native wait returned, while it may have been overtaken by an adoption: our events taken out.
pub fn after_native(set_index: u32, out: &mut [epoll_event]) -> usize {
    let Some(tables) = tables() else { return out.len() };
    translate(tables, &tables.sets[set_index as usize], out)
}
