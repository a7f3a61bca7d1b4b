//! poll and select over descriptors of which some are attached connections (or epoll sets that hold some).

use super::asked::{self, Which};
use super::in_use;
use super::release;
use super::table::{Known, Receiving, Sending, Socket, Stage, lookup, tables};
use super::transfer::room::{look_after, waits_for_room};
use super::transfer::{events, wait};
use super::{context, datagram, doorbells, epoll, memory, pin, sides, view};
use crate::waiting::{signals, sleep, spin};
use core::cell::Cell;
use ringlet_core::sync::Ordering;
use ringlet_linux::fd::{self, pollfd};
use ringlet_linux::map::{self, Scratch};
use ringlet_linux::sys::{self, Errno, Sys};

/// Can the kernel alone answer for all of these?
pub fn is_kernels(fds: &[pollfd]) -> bool {
    !fds.iter().any(|entry| match lookup(entry.fd) {
        Some(Known::Socket(socket)) => {
            // (What a process has unread that has closed itself in is all that it does not ask the kernel.)
            let asks = entry.events & (libc::POLLIN | libc::POLLRDNORM) != 0;
            socket.is_ours() && (asks || !socket.last_of_ring.is())
        }
        Some(Known::Set(set)) => epoll::has_adopted(set),
        _ => false,
    })
}

/// Is it a set, or a socket of ours, or one that may become ours while it is waited for?
pub fn is_followed(fd: i32) -> bool {
    match lookup(fd) {
        Some(Known::Socket(socket)) => !socket.is_kernels_for_good(),
        Some(Known::Set(_)) => true,
        _ => false,
    }
}

/// A native wait over these: until it is over, no peer is told to use the ring of one of them. `None`: one has just become ours.
/// `wait` is given what is to be put away if the thread is cancelled in it.
pub fn natively<T>(fds: &[pollfd], wait: impl FnOnce(&dyn Fn()) -> T) -> Option<T> {
    memory::close_left();
    with_room(fds.len(), |held, unmap| {
        enter(fds, held, false);
        let cancelled = || {
            leave(held);
            unmap();
        };
        let value = is_kernels(fds).then(|| wait(&cancelled));
        leave(held);
        value
    })
    .unwrap_or(None)
}

/// What a sleep adds to the entries: the context's bells, and the kernel's set of those that need no entry of their own.
pub const OWN_ENTRIES: usize = 3;

/// From so many connections on they are put in that set.
const WATCHED_FROM: usize = 16;

/// poll. `scratch` has `OWN_ENTRIES` more than `fds`.
pub fn poll(
    fds: &mut [pollfd],
    scratch: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    with_room(fds.len(), |held, unmap| {
        enter(fds, held, true);
        let cancelled = || {
            leave(held);
            unmap();
        };
        let result = poll_entered(fds, held, scratch, timeout_ns, mask, &cancelled);
        leave(held);
        result
    })
    .unwrap_or(Err(Errno::ENOMEM))
}

const HELD_ON_STACK: usize = 128;
/// Room for more is not worth its clearing, for most.
const FEW: usize = 8;

/// With so many words. They are given with what stands in place of their drop, which does not come to a thread that is cancelled.
#[allow(unsafe_code)]
fn with_room<T>(count: usize, act: impl FnOnce(&mut [u32], &dyn Fn()) -> T) -> Option<T> {
    if count <= FEW {
        return Some(act(&mut [0; FEW][..count], &|| {}));
    }
    if count <= HELD_ON_STACK {
        return Some(act(&mut [0; HELD_ON_STACK][..count], &|| {}));
    }
    let mut many = Scratch::new(count, 0u32)?;
    let area = many.area();
    // SAFETY: nothing of ours runs after it.
    Some(act(&mut many, &|| unsafe { map::unmap(area) }))
}

/// Beside the index of a socket in `held`: it was counted as waiting for room too; or as waited for by the kernel alone.
const FOR_ROOM: u32 = 1 << 31;
const NATIVE: u32 = 1 << 30;
const INDEX: u32 = NATIVE - 1;

/// Counts us in at the sockets that a call asks about, and notes for each entry at which, or 0: what the numbers mean may change
/// meanwhile. `ours`: it is no call of the kernel's alone.
fn enter(fds: &[pollfd], held: &mut [u32], ours: bool) {
    for (entry, held) in fds.iter().zip(held) {
        match lookup(entry.fd) {
            Some(Known::Socket(socket)) => *held = hold(entry, socket, ours),
            Some(Known::Set(set)) if !ours => epoll::nest(set, None),
            _ => {}
        }
    }
}

fn hold(entry: &pollfd, socket: &'static Socket, ours: bool) -> u32 {
    let Some(tables) = tables() else { return 0 };
    let attached = socket.stage() == Stage::Attached;
    if !attached {
        socket.waited_for.set(1);
        if socket.is_kernels_for_good() {
            return 0;
        }
    }
    // One that is not ours yet is left to the kernel until the call returns, whatever the others are.
    let native = !(attached || ours && socket.has_datagrams());
    let room = attached && entry.events & (libc::POLLOUT | libc::POLLWRNORM) != 0;
    let with = if native { NATIVE } else { 0 } | if room { FOR_ROOM } else { 0 };
    // ORDER: SeqCst; pairs with `process::release`: a socket is not unmapped, nor its entry another's, while somebody looks at it.
    super::jumps::waits(socket, native);
    socket.sleepers.fetch_add(1, Ordering::SeqCst);
    if room {
        socket.room_waiters.fetch_add(1, Ordering::SeqCst);
    }
    if native {
        socket.enter_native(|end| &end.native_receivers);
    }
    let held = tables.index_of(socket) | with;
    if !is_named_by(entry.fd, socket) {
        // It was closed before it was held.
        leave(&[held]);
        return 0;
    }
    held
}

fn leave(held: &[u32]) {
    let Some(tables) = tables() else { return };
    for &held in held.iter().filter(|held| **held != 0) {
        let socket = tables.sockets.at((held & INDEX) as usize);
        let native = held & NATIVE != 0;
        if native {
            release::leave_native(&socket.end().native_receivers);
        }
        if held & FOR_ROOM != 0 {
            socket.leave_room();
        }
        in_use::waits_no_more(socket, native);
    }
}

fn is_named_by(fd: i32, socket: &Socket) -> bool {
    matches!(lookup(fd), Some(Known::Socket(now)) if core::ptr::eq(now, socket))
}

/// The connection that we are counted at for an entry.
fn of_held(held: u32) -> Option<&'static Socket> {
    let socket = tables()?.sockets.at((held & INDEX) as usize);
    (held != 0 && socket.stage() == Stage::Attached).then_some(socket)
}

/// What an entry asks about. KERNEL: a poll goes on with what its numbers meant when it began, also when another thread closes them; only
/// once that wakes it does it look what they mean by then.
fn meaning(entry: &pollfd, held: u32) -> Option<Known> {
    match of_held(held) {
        Some(socket)
            if !is_named_by(entry.fd, socket) && mask_of(socket, entry, held, false) == 0 =>
        {
            Some(Known::Socket(socket))
        }
        _ => lookup(entry.fd),
    }
}

/// Its mask. Who holds it counts among its waiters; the number may name another one by now, at which we do not count.
fn mask_of(socket: &Socket, entry: &pollfd, held: u32, watched: bool) -> i16 {
    let mine = of_held(held).is_some_and(|held| core::ptr::eq(held, socket));
    events::poll_mask(socket, entry.events, watched, mine as u32)
}

/// The connection of ours that an entry asks about.
fn attached(entry: &pollfd, held: u32) -> Option<&'static Socket> {
    match meaning(entry, held)? {
        Known::Socket(socket) if socket.stage() == Stage::Attached => Some(socket),
        _ => None,
    }
}

/// Looks at what rings can tell. Returns how many are ready, and whether there are others that only the kernel can answer for. `watched`: the
/// caller asks the kernel by itself.
fn look(fds: &mut [pollfd], held: &[u32], watched: bool) -> (usize, bool) {
    let (mut found, mut others) = (0, false);
    for (entry, &held) in fds.iter_mut().zip(held) {
        others |= look_at(entry, held, watched) && entry.fd >= 0;
        found += (entry.revents != 0) as usize;
    }
    (found, others)
}

/// The same at one entry: is there more to it that only the kernel knows?
fn look_at(entry: &mut pollfd, held: u32, watched: bool) -> bool {
    entry.revents = 0;
    match meaning(entry, held) {
        Some(Known::Socket(socket)) if socket.stage() == Stage::Attached => {
            entry.revents = mask_of(socket, entry, held, watched);
            return false;
        }
        Some(Known::Socket(socket)) if socket.stage() == Stage::Mailbox => {
            entry.revents = datagram::lanes_mask(socket, entry.events);
        }
        Some(Known::Set(set)) if epoll::has_adopted(set) => {
            epoll::nest(set, None);
            epoll::settle(set);
            if epoll::ready(set) {
                entry.revents = entry.events & (libc::POLLIN | libc::POLLRDNORM);
            }
        }
        _ => {}
    }
    true
}

/// `cancelled`: see `sleep`.
fn poll_entered(
    fds: &mut [pollfd],
    held: &[u32],
    scratch: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    let deadline = timeout_ns.map(|ns| if ns == 0 { 0 } else { sys::now_ns().saturating_add(ns) });
    let limit = tables().map_or(0, |tables| tables.config.watch_us());
    // A byte that we can't take, and that tells us nothing, would end each sleep at once: then we don't listen for any, and look soon.
    let stays = Cell::new(false);
    let watcher = Cell::new(watcher(fds, held));
    if deadline == Some(0) {
        // One question for all, where each would ask for itself. (And none does so that was not late for this one.)
        let together = connections(fds, held).nth(1).is_some() && !pin::is_closed_in();
        if together && is_asked_late(fds, held) {
            let _ = ask_all(fds, held, scratch, None, &watcher, Some(0), None, &stays, &|| {});
        }
        return with_kernel(fds, held, scratch, mask, together);
    }
    // Who waits asks the kernel by that.
    loop {
        let (mut found, others) = look(fds, held, true);
        if found > 0 && is_asked_late(fds, held) && !pin::is_closed_in() {
            // One whose rings always have something must hear of the rest as well. (KERNEL: what is ready goes before signals.)
            let _ = ask_all(fds, held, scratch, None, &watcher, Some(0), None, &stays, &|| {});
            found = look(fds, held, true).0;
        }
        if found > 0 && (!others || pin::is_closed_in()) {
            return Ok(found);
        }
        if found > 0 {
            // (Another thread may have taken what was there.)
            found = with_kernel(fds, held, scratch, mask, false)?;
            if found > 0 {
                return Ok(found);
            }
        }
        sleep::check(cancelled);
        let left = |at: u64| at.saturating_sub(sys::now_ns());
        let budget = limit.min(deadline.map_or(u64::MAX, |at| left(at) / 1000));
        let mut asked = sys::now_ns();
        // (One at which we are counted: where its peer runs is read in what is unmapped with it.)
        let talks_to = sockets(held).find(|socket| socket.stage() == Stage::Attached);
        let peer = || talks_to.and_then(wait::peer);
        signals::begin_wait();
        if talks_to.is_some_and(wait::sent_lately) {
            spin::sent();
        }
        let mut told = Ok(0);
        let worth = spin::watch_many(budget, fds.len(), peer, || {
            if look(fds, held, true).0 > 0 {
                return true;
            }
            let now = sys::now_ns();
            let due = now - asked > ASK_KERNEL_NS;
            if due {
                asked = now;
                told = ask_all(fds, held, scratch, None, &watcher, Some(0), mask, &stays, &|| {});
            }
            told != Ok(0)
        });
        // A signal would have ended the kernel's wait.
        told?;
        if !worth && signals::handled() {
            return Err(Errno::EINTR);
        }
        if !worth {
            // Once: whether a peer rings it may change while we sleep, and who arms must disarm.
            // (Our own entry must not be the one that is too many: bytes wake us then.)
            let home = home(fds, held).filter(|_| !is_at_limit(fds));
            // (Each is looked at behind its arming, while its memory is near.)
            let idle = arm(fds, held, home);
            let soon = stays.get().then_some(wait::LOOK_SOON_NS);
            let at_times = may_miss_doorbells(fds, held, home).then_some(wait::LOOK_AT_TIMES_NS);
            let at_times = [at_times, look_for_room(held)].into_iter().flatten().min();
            let timeout =
                [deadline.map(left), soon, at_times, memory::due()].into_iter().flatten().min();
            let awake = || {
                disarm(home);
                sockets(held).for_each(datagram::is_awake);
            };
            let cancelled = || {
                awake();
                cancelled();
            };
            let slept = idle.then(|| {
                ask_all(fds, held, scratch, home, &watcher, timeout, mask, &stays, &cancelled)
            });
            awake();
            if let Some(slept) = slept {
                let woken = slept?;
                // (What nothing has rung for until its time was up comes behind it, as by the kernel.)
                let told = woken > 0 || soon.or(at_times).is_some() || memory::due().is_some();
                if !told && deadline.is_some_and(|at| sys::now_ns() >= at) {
                    return Ok(none_ready(fds));
                }
                for (entry, &held) in fds.iter().zip(held) {
                    if let Some(socket) = attached(entry, held)
                        && mask_of(socket, entry, held, true) != 0
                    {
                        spin::woken(events::sent_at(socket));
                        view::count_wake(socket);
                    }
                }
                if woken > 0 {
                    sockets(held).filter(|each| each.has_datagrams()).for_each(|_| spin::woken(0));
                }
                // (Also if something woke it: a byte that stays in the kernel, and tells nothing, does so at once each time.)
                if deadline.is_some_and(|at| sys::now_ns() >= at) {
                    let (found, others) = look(fds, held, false);
                    return if others {
                        with_kernel(fds, held, scratch, mask, false)
                    } else {
                        Ok(found)
                    };
                }
            }
        }
        let (found, others) = look(fds, held, true);
        if others {
            let total = with_kernel(fds, held, scratch, mask, true)?;
            if total > 0 {
                return Ok(total);
            }
        } else if found > 0 {
            return Ok(found);
        }
    }
}

/// While watching: the kernel is asked this often.
const ASK_KERNEL_NS: u64 = 20_000;

fn none_ready(fds: &mut [pollfd]) -> usize {
    fds.iter_mut().for_each(|entry| entry.revents = 0);
    0
}

/// Would one entry more be too many for the kernel? Asked where it may matter, and where a call more does not.
fn is_at_limit(fds: &[pollfd]) -> bool {
    fds.len() >= MANY && fds.len() + OWN_ENTRIES > fd::limit()
}

/// More than the kernel takes? It has to say so, whatever rings say.
pub fn is_too_many(fds: &[pollfd]) -> bool {
    fds.len() >= MANY && fds.len() > fd::limit()
}

const MANY: usize = 64;

/// Has the kernel not been asked about one of these connections for long?
fn is_asked_late(fds: &[pollfd], held: &[u32]) -> bool {
    let now = sys::ticks();
    connections(fds, held).any(|socket| events::is_asked_late(socket, now))
}

/// What rings tell, and the kernel of what only it can answer for (if it is to be asked: `asked`), without waiting. Returns the number of
/// ready entries. `watched`: the caller has asked the kernel for all connections, or lately enough.
fn with_kernel(
    fds: &mut [pollfd],
    held: &[u32],
    scratch: &mut [pollfd],
    mask: Option<u64>,
    watched: bool,
) -> Sys<usize> {
    let (mut found, mut others, mut which) = (0, false, Which::default());
    for ((entry, copy), &held) in fds.iter_mut().zip(scratch.iter_mut()).zip(held) {
        let kernels = look_at(entry, held, watched) && entry.fd >= 0;
        found += (entry.revents != 0) as usize;
        *copy = pollfd { fd: if kernels { entry.fd } else { -1 }, ..*entry };
        others |= kernels;
        if kernels {
            which.add(entry);
        }
    }
    // (By its mask a signal may come, which ends the kernel's call.)
    if !others || mask.is_none() && !asked::is_due(which, found > 0) {
        return Ok(found);
    }
    let n = fds.len();
    let asked = asked::ask(which, &scratch[..n]);
    if fd::poll(&mut scratch[..n], Some(0), mask)? == 0 {
        asked.in_vain(found > 0);
        return Ok(found);
    }
    let mut total = 0;
    for (entry, copy) in fds.iter_mut().zip(scratch.iter()) {
        if copy.fd >= 0 {
            entry.revents |= if copy.revents == 0 { 0 } else { still_ready(copy) };
        }
        total += (entry.revents != 0) as usize;
    }
    Ok(total)
}

/// What the kernel has told of an entry. A set of ours may have been rung for what was received before it was asked (`epoll::sleep_over`).
fn still_ready(told: &pollfd) -> i16 {
    match lookup(told.fd) {
        Some(Known::Set(set)) if epoll::has_adopted(set) && !pin::is_closed_in() => {
            epoll::settle(set);
            fd::pending(told.fd, told.events)
        }
        _ => told.revents,
    }
}

/// The connections of ours that are asked about.
fn connections(fds: &[pollfd], held: &[u32]) -> impl Iterator<Item = &'static Socket> {
    fds.iter().zip(held).filter_map(|(entry, &held)| attached(entry, held))
}

/// May a doorbell byte that is meant for us not come, since another waiter takes it, or, of room, for whatever reason (`waits_for_room`)? Then we look
/// now and then.
fn may_miss_doorbells(fds: &[pollfd], held: &[u32], home: Option<u32>) -> bool {
    fds.iter().zip(held).any(|(entry, &held)| {
        attached(entry, held).is_some_and(|socket| {
            socket.sleepers.load(Ordering::SeqCst) > 1
                || held & FOR_ROOM != 0 && !rings(socket, home) && waits_for_room(socket)
        })
    })
}

/// How long do these wait for room that a receiver may never make (`room::leave_unread`)?
fn look_for_room(held: &[u32]) -> Option<u64> {
    let for_room = held.iter().filter(|held| **held & FOR_ROOM != 0);
    let full = for_room.filter_map(|held| of_held(*held)).filter(|socket| waits_for_room(socket));
    full.map(look_after).min()
}

/// Are we rung for this one by the eventfd of this context, which we wait on?
fn rings(socket: &Socket, home: Option<u32>) -> bool {
    home.is_some() && home == Some(socket.home.get()) && wait::rings_home(socket)
}

/// The same, by the bell that has a name. (A ring by it may fail, and then a byte rings.)
fn rings_by_name(socket: &Socket, home: Option<u32>) -> bool {
    home.is_some() && home == Some(socket.home.get()) && wait::rings_by_name(socket)
}

/// The thread's context, if it is the home of one of these.
fn home(fds: &[pollfd], held: &[u32]) -> Option<u32> {
    let mine = context::of_thread_if_any()?;
    let covered = |socket: &Socket| rings(socket, Some(mine)) || rings_by_name(socket, Some(mine));
    connections(fds, held).any(covered).then_some(mine)
}

/// The context in whose kernel's set connections are put, where they are many.
fn watcher(fds: &[pollfd], held: &[u32]) -> Option<u32> {
    if fds.len() < WATCHED_FROM || pin::is_closed_in() || context::is_asking() {
        return None;
    }
    let mine = context::of_thread_if_any()?;
    let at_home = |socket: &Socket| rings(socket, Some(mine));
    connections(fds, held).filter(|socket| at_home(socket)).nth(WATCHED_FROM - 1)?;
    Some(mine).filter(|mine| !is_at_limit(fds) && context::watch_of(*mine) >= 0)
}

/// Does the kernel's set of this context tell all of this connection that only the kernel can?
fn is_watched(socket: &Socket, entry: &pollfd, watcher: &Cell<Option<u32>>, turn: u32) -> bool {
    let Some(context) = watcher.get() else { return false };
    let may_be = rings(socket, watcher.get())
        && by_ring(socket)
        && !socket.end().ended.is()
        && entry.events & libc::POLLPRI == 0;
    if may_be {
        socket.watch_turn.set(turn);
    }
    if may_be && !context::watch(context, socket) {
        // There is no room, and so for the others.
        watcher.set(None);
        return false;
    }
    may_be
}

fn by_ring(socket: &Socket) -> bool {
    let end = socket.end();
    end.receiving() == Receiving::Ring && end.sending() == Sending::Ring
}

/// Those that we are counted at.
fn sockets(held: &[u32]) -> impl Iterator<Item = &'static Socket> {
    let held = held.iter().filter(|held| **held != 0);
    held.filter_map(|held| Some(tables()?.sockets.at((held & INDEX) as usize)))
}

/// And looks at each behind that: is nothing ready, as far as rings tell?
fn arm(fds: &mut [pollfd], held: &[u32], home: Option<u32>) -> bool {
    sockets(held).for_each(datagram::falls_asleep);
    if let Some(context) = home {
        context::arm(context);
    }
    let mut idle = true;
    for (entry, &held) in fds.iter_mut().zip(held) {
        arm_one(entry, held, home);
        look_at(entry, held, true);
        idle &= entry.revents == 0;
    }
    idle
}

fn arm_one(entry: &pollfd, held: u32, home: Option<u32>) {
    let Some(socket) = attached(entry, held) else { return };
    sides::answer_return(socket, socket.end());
    let room = entry.events & (libc::POLLOUT | libc::POLLWRNORM) != 0;
    if rings(socket, home) {
        if room {
            wait::want_room_event(socket);
        }
    } else if rings_by_name(socket, home) {
        wait::want_named(socket, true, room);
    } else {
        wait::want_bytes(socket, true, room);
    }
}

fn disarm(home: Option<u32>) {
    if let Some(context) = home {
        context::disarm(context);
    }
}

/// Waits in the kernel for everything that can wake us: all entries, and `event`.
#[allow(clippy::too_many_arguments)]
fn ask_all(
    fds: &[pollfd],
    held: &[u32],
    scratch: &mut [pollfd],
    home: Option<u32>,
    watcher: &Cell<Option<u32>>,
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    stays: &Cell<bool>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    let awake = timeout_ns == Some(0);
    let mut watches = false;
    if pin::is_closed_in() {
        // (By another thread, amid this call.)
        watcher.set(None);
    }
    // (Those that are in its set stay there, and are told by it, also if there is no room for others.)
    let set = watcher.get();
    let turn = set.map_or(0, context::watch_turn);
    for ((entry, copy), &held) in fds.iter().zip(scratch.iter_mut()).zip(held) {
        *copy = *entry;
        if let Some(socket) = attached(entry, held) {
            if is_watched(socket, entry, watcher, turn) {
                copy.fd = -1;
                watches = true;
                continue;
            }
            // Bytes that are not asked for are doorbells, for who sleeps, unless we are rung otherwise.
            let bells = !awake && !stays.get() && !rings(socket, home);
            copy.events = kernel_events(socket, entry.events, bells);
            // The entry's own number may be another's by now.
            copy.fd = socket.fd();
        }
    }
    let n = fds.len();
    scratch[n] =
        pollfd { fd: home.map_or(-1, context::eventfd_of), events: libc::POLLIN, revents: 0 };
    let named = home.map_or(-1, context::named_of);
    scratch[n + 1] = pollfd { fd: named, events: libc::POLLIN, revents: 0 };
    let set = set.filter(|_| watches);
    scratch[n + 2] =
        pollfd { fd: set.map_or(-1, context::watch_of), events: libc::POLLIN, revents: 0 };
    let own = scratch[n..][..OWN_ENTRIES]
        .iter()
        .rposition(|entry| entry.fd >= 0)
        .map_or(0, |last| last + 1);
    let woken = match timeout_ns {
        Some(0) => fd::poll(&mut scratch[..n + own], timeout_ns, mask)?,
        _ => sleep::poll(&mut scratch[..n + own], timeout_ns, mask, cancelled)?,
    };
    if let Some(home) = home.filter(|_| scratch[n].revents != 0) {
        // As in `wait::fall_asleep`.
        context::drain(home);
    }
    if let Some(home) = home.filter(|_| scratch[n + 1].revents != 0) {
        context::drain_named(home);
    }
    if !awake {
        stays.set(false);
    }
    let now = sys::ticks();
    for ((copy, entry), &held) in scratch[..n].iter().zip(fds).zip(held) {
        let Some(socket) = of_held(held) else { continue };
        if socket.end().receiving() == Receiving::Ring {
            // It was asked for all that matters.
            socket.kernel_asked.set(now);
        }
        if copy.revents == 0 {
            if awake {
                events::asked_in_vain(socket);
            }
        } else {
            doorbells::kernel_tells(socket, copy.revents as u16 as u32);
            if copy.revents & libc::POLLIN != 0
                && entry.events & (libc::POLLIN | libc::POLLRDNORM) == 0
                && !doorbells::take_bells(socket, socket.end(), 1)
            {
                stays.set(true);
            }
        }
    }
    // (Behind the above: what is told here is asked for by the next look.)
    if let Some(set) = set.filter(|_| scratch[n + 2].revents != 0) {
        let tell = |socket: &Socket, events| {
            doorbells::kernel_tells(socket, events);
            // (One that is not asked about is perhaps another thread's now, which is woken by bytes.)
            socket.watch_turn.get() == turn && socket.stage() == Stage::Attached && by_ring(socket)
        };
        // (Another thread may have closed the process in while we slept: the filter may kill for it.)
        let asks = !pin::is_closed_in() && context::watch_tells(set, tell);
        if !asks {
            // Each is asked for by itself.
            watcher.set(None);
            connections(fds, held).for_each(Socket::kernel_tells);
        }
    }
    Ok(woken)
}

/// What to ask of the kernel for an attached connection: its doorbells and its end while it is not known; its data and room where
/// the kernel is the way.
fn kernel_events(socket: &Socket, asked: i16, bells: bool) -> i16 {
    let end = socket.end();
    let mut events = asked & (libc::POLLPRI | libc::POLLRDHUP);
    let readable = asked & (libc::POLLIN | libc::POLLRDNORM);
    if end.receiving() != Receiving::Ring {
        events |= readable;
    } else if !end.ended.is() {
        events |= libc::POLLRDHUP;
        events |= if bells || readable != 0 { libc::POLLIN } else { 0 };
    }
    match end.sending() {
        Sending::Ring => {}
        // To go on with what is sent again.
        Sending::Returning => events |= libc::POLLOUT,
        _ => events |= asked & (libc::POLLOUT | libc::POLLWRNORM),
    }
    events
}
