//! How a set is woken: the eventfds that are registered in it, under marks by which they, and our watches, are told from what is the program's.

use super::set::{self, EPOLLET, EPOLLIN, Set, first_set};
use crate::socket::table::{Socket, tables};
use crate::socket::{boards, context};
use ringlet_linux::fd::{self, epoll_event};

/// Data of our registrations: high half this mark (no canonical address, no descriptor number), low half whose it is and the watch.
pub(super) const MARK: u64 = 0x726e_676c << 32;
const MARK_MASK: u64 = 0xffff_ffff << 32;
const WATCH_BITS: u32 = 18;
pub(super) const WATCH_MASK: u32 = (1 << WATCH_BITS) - 1;

/// In place of a watch: the set's own eventfd; and the second context's, which its thread drains.
pub(super) const SELF: u32 = WATCH_MASK;
pub(super) const SECOND: u32 = WATCH_MASK - 1;

/// And what a process that shares the set has registered for this one: it has taken what was not for it.
pub(super) const ALL: u32 = WATCH_MASK - 2;

/// The set's own bell that is rung by name.
pub(super) const NAMED: u32 = WATCH_MASK - 3;

/// What a process that shares a set by fork adds to its eventfd, when it has taken what was not for it: look at everything.
pub(super) const LOOK_AT_ALL: u64 = 1 << 32;

/// How the set's own eventfd is registered. Who waits on the set itself sees it ready as long as it is rung, and a ring as an edge.
fn bell_event(set: &Set, index: u32) -> epoll_event {
    let edges = if set.nested.is() && index == SELF { 0 } else { EPOLLET };
    epoll_event { events: EPOLLIN | edges, u64: mark(index) }
}

/// It is waited on by others from now on.
pub(super) fn bell_stays(set: &Set) {
    let own = set.context.get().max(set.reserved.get());
    if own != 0 {
        let event = Some(bell_event(set, SELF));
        let (epfd, eventfd) = (set.epfd.get() as i32, context::eventfd_of(own));
        let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, eventfd, event);
    }
}

/// The set's eventfds are registered in it, or not.
pub(super) fn register_bells(set: &Set, op: i32) {
    let own = set.context.get().max(set.reserved.get());
    for (context, index) in [(own, SELF), (set.second.get(), SECOND)] {
        if context != 0 {
            let event = bell_event(set, index);
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
    if let Some(_held) = set.take() {
        register_named(set);
    }
}

/// The bell by name of the set's context is registered, once there is one. Set lock held.
pub(super) fn register_named(set: &Set) {
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
        let Some(_held) = set.take() else { continue };
        let own = set.context.get().max(set.reserved.get());
        let by_name = context::named_of(context) == new;
        for (_, index) in
            [(own, SELF), (set.second.get(), SECOND)].into_iter().filter(|(of, _)| *of == context)
        {
            let epfd = set.epfd.get() as i32;
            let index = if by_name { NAMED } else { index };
            let event = bell_event(set, index);
            if fd::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, old, None).is_ok() {
                let _ = fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, new, Some(event));
            }
        }
    }
}

/// The process in marks.
fn tag() -> u64 {
    let pid = tables().map_or(0, |tables| tables.process().pid.get());
    u64::from((pid ^ pid >> (32 - WATCH_BITS)) << WATCH_BITS)
}

pub(super) fn mark(watch: u32) -> u64 {
    MARK | tag() | u64::from(watch)
}

/// Makes the set's context and registers its eventfd. Set lock held.
pub(super) fn register_context(set: &Set, set_index: u32) -> Option<u32> {
    let context = context::of_set(set_index)?;
    let event = bell_event(set, SELF);
    let eventfd = context::eventfd_of(context);
    let _ = fd::epoll_ctl(set.epfd.get() as i32, libc::EPOLL_CTL_ADD, eventfd, Some(event));
    set.keeper.set(tables()?.process().pid.get());
    Some(context)
}

/// Makes a wait on the set return (and look again).
pub(super) fn kick(set: &Set) {
    let context = set.context.get();
    if context != 0 {
        context::ring_ours(context);
    }
}

pub(super) fn kick_sleepers(set: &Set) {
    if set.context.is() && context::has_sleepers(set.context.get()) {
        kick(set);
    }
}

/// Does anybody else sleep in this set?
pub(super) fn others_sleep(set: &Set) -> bool {
    !set.beside.is() || context::sleepers(set.beside.get()) > 1
}

/// What `arm` armed, to be disarmed by whoever armed it: a set may get contexts meanwhile.
pub(super) struct Armed {
    pub(super) contexts: [u32; 2],
    /// Somebody's room can't be rung for, or another thread may take the byte that says it: look now and then.
    pub(super) look_every_ns: Option<u64>,
}

pub(super) fn disarm(armed: &Armed) {
    for context in armed.contexts {
        if context != 0 {
            context::disarm(context);
            boards::wakes(context);
        }
    }
}

/// Are events of our own registrations among these, which no program may see?
pub fn any_of_ours(events: &[epoll_event]) -> bool {
    events.iter().any(is_ours)
}

/// Is this event one of our registrations?
pub(super) fn is_ours(event: &epoll_event) -> bool {
    let data = event.u64;
    data & MARK_MASK == MARK
}

/// Set lock held, under which its context is no other's.
pub(super) fn drain(set: &Set) {
    let context = set.context.get().max(set.reserved.get());
    if context::drain(context) >= LOOK_AT_ALL {
        set.all_hot.set(1);
    }
}

/// A wake-up was taken, perhaps one that tells of an adoption. KERNEL: it wakes one thread; others may still be in waits of the kernel's
/// alone, which it was for.
pub(super) fn pass_on_overtaking(set: &Set) {
    if set.has_natives() {
        kick(set);
    }
}
