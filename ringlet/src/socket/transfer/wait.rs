//! Waiting for one connection: what its sleeper arms, and what wakes it.

use super::events::sent_at;
use super::room;
use crate::socket::table::{End, Receiving, Sending, Socket, Stage, tables};
use crate::socket::{carrier, context, doorbells, in_use, memory, orphan, sides, view, words};
use crate::waiting::{signals, sleep, spin};
use ringlet_core::layout::{RINGS_BY_EVENT, RINGS_BY_NAME, WANT_BYTE, WANT_EVENT, WANT_READY};
use ringlet_core::leaving::Leaving;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, sys};

/// How often a sleeper looks that nothing might wake.
pub const LOOK_SOON_NS: u64 = 1_000_000;
pub const LOOK_AT_TIMES_NS: u64 = 50_000_000;

/// What a caller waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Data,
    Room,
}

pub fn deadline(timeout_ns: u64) -> Option<u64> {
    (timeout_ns != 0).then(|| sys::now_ns().saturating_add(timeout_ns))
}

/// Where the peer runs; and lets it know where we do.
pub fn peer(socket: &Socket) -> Option<spin::Peer> {
    let home = socket.home.get();
    if home != 0 {
        context::tell_processor(home);
    }
    context::peer_of(socket)
}

/// Has any thread of this process sent on it since this was asked last? Then an answer may be what is waited for. (A hint.)
pub fn sent_lately(socket: &Socket) -> bool {
    let sent = socket.has_sent.is();
    if sent {
        socket.has_sent.set(0);
    }
    sent
}

/// Is there what the caller waits for, as far as shared memory tells?
#[inline(always)]
fn there(socket: &Socket, end: &End, want: Want) -> bool {
    match want {
        Want::Data => {
            let Some(ring) = socket.incoming() else { return true };
            end.receiving() != Receiving::Discarding && words::published(end, &ring)
        }
        // On the kernel, the kernel tells.
        Want::Room if end.sending() != Sending::Ring => false,
        Want::Room => {
            let Some(ring) = socket.outgoing() else { return true };
            end.tx.writable(&ring)
                || !ring.control().is_taken()
                || view::is_away(socket, end, &ring)
        }
    }
}

/// Waits until a look is worth while: watches for a moment, then arms, looks again and sleeps. `EAGAIN` when the deadline has
/// passed, `EINTR` after a signal.
pub fn wait(waiter: &in_use::Waiter, want: Want, deadline_ns: Option<u64>) -> Sys<()> {
    let socket = waiter.socket();
    if socket.stage() != Stage::Attached {
        return Err(Errno::EBADF);
    }
    wait_inside(socket, socket.end(), want, deadline_ns)
}

fn wait_inside(socket: &Socket, end: &End, want: Want, deadline_ns: Option<u64>) -> Sys<()> {
    let in_ring = match want {
        Want::Data => end.receiving() == Receiving::Ring,
        Want::Room => end.sending() == Sending::Ring,
    };
    sleep::check(&|| in_use::wait_no_more(socket));
    let limit = tables().map_or(0, |tables| tables.config.watch_us());
    signals::begin_wait();
    if sent_lately(socket) {
        spin::sent();
    }
    if in_ring && spin::watch(limit, || peer(socket), || there(socket, end, want)) {
        view::count_spin(socket);
        return Ok(());
    }
    if !signals::restart() {
        // It would have ended the kernel's wait.
        return Err(Errno::EINTR);
    }
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else {
        return Ok(());
    };
    // Its bell serves if this thread is the connection's home and the peer has said that it rings it.
    let home = Some(socket.home.get())
        .filter(|home| *home != 0 && context::of_thread_if_any() == Some(*home))
        .filter(|_| rings_home(socket) || rings_by_name(socket));
    let event = home.is_some() && rings_home(socket);
    let how = if home.is_some() { WANT_EVENT } else { WANT_BYTE };
    let wish = match want {
        Want::Data => incoming.control().data_wish(),
        Want::Room => outgoing.control().room_wish(),
    };
    if let Some(home) = home {
        context::arm(home);
    }
    // (For room in the kernel its event tells. A doorbell would lie unread there, and make our death a reset, in which what the kernel
    // has not yet sent is lost.)
    let wishes = match want {
        Want::Data => !event,
        Want::Room => end.sending() == Sending::Ring,
    };
    if wishes {
        wish.want(how);
    }
    sides::answer_return(socket, end);
    if want == Want::Room {
        socket.room_waiters.fetch_add(1, Ordering::SeqCst);
    }
    let result = if there(socket, end, want) {
        Ok(())
    } else {
        fall_asleep(socket, end, want, home, deadline_ns)
    };
    if want == Want::Room {
        socket.leave_room();
    }
    if let Some(home) = home {
        context::disarm(home);
    }
    if there(socket, end, want) {
        spin::woken(if want == Want::Data { sent_at(socket) } else { 0 });
    }
    view::count_wake(socket);
    result
}

fn fall_asleep(
    socket: &Socket,
    end: &End,
    want: Want,
    home: Option<u32>,
    deadline_ns: Option<u64>,
) -> Sys<()> {
    let timeout = match deadline_ns {
        None => None,
        Some(at) => match at.checked_sub(sys::now_ns()) {
            None | Some(0) => return Err(Errno::EAGAIN),
            left => left,
        },
    };
    // (First: it may send our direction back.)
    let due = memory::due();
    // (By name a bell may fail to ring, and then a byte does.)
    let event = home.is_some() && rings_home(socket);
    let mut events = libc::POLLRDHUP;
    let unsaid = orphan::unsaid(socket, end);
    if end.sending() == Sending::Returning {
        // To go on with what is sent again.
        events |= libc::POLLOUT;
    }
    match want {
        Want::Data => events |= libc::POLLIN,
        Want::Room if end.sending() != Sending::Ring => events |= libc::POLLOUT,
        // Woken by a byte: it is readable. (Data that waits in the kernel would look the same: then we look every now and then.)
        Want::Room if !event && end.receiving() == Receiving::Ring => events |= libc::POLLIN,
        Want::Room => {}
    }
    if unsaid.is_some() {
        events &= !libc::POLLOUT;
    }
    // Nothing wakes this one if no byte can be sent to it, or when a thread of ours shuts the connection: it looks now and then.
    let look_every = match want {
        Want::Room if end.sending() == Sending::Ring => Some(room::STALLED_NS),
        Want::Room if carrier::facts(socket).ends_sends_untold => Some(LOOK_AT_TIMES_NS),
        Want::Room if !event && !room::can_ring_for_room(socket) => Some(LOOK_SOON_NS),
        Want::Room if !event => Some(LOOK_AT_TIMES_NS),
        // Another waiter may take the byte that was meant for us.
        Want::Data if socket.sleepers.load(Ordering::SeqCst) > 1 => Some(LOOK_AT_TIMES_NS),
        _ => None,
    };
    let look_every = [look_every, due, unsaid].into_iter().flatten().min();
    let now_and_then = look_every.is_some();
    let timeout = look_every.map_or(timeout, |ns| Some(timeout.unwrap_or(ns).min(ns)));
    let named = home.filter(|_| !event).map(context::named_of);
    let mut fds = [
        fd::pollfd { fd: socket.fd(), events, revents: 0 },
        fd::pollfd { fd: home.map_or(-1, context::eventfd_of), events: libc::POLLIN, revents: 0 },
        fd::pollfd { fd: named.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
    ];
    let fds = &mut fds[..2 + usize::from(named.is_some())];
    // As `wait_inside` and its caller would do it.
    let cancelled = || {
        if want == Want::Room {
            socket.leave_room();
        }
        if let Some(home) = home {
            context::disarm(home);
        }
        in_use::wait_no_more(socket);
    };
    // As the kernel does it: restarted, unless the call has a timeout.
    let goes_on = || deadline_ns.is_none() && signals::restart();
    let mut slept = sleep::poll(fds, timeout, None, &cancelled);
    if slept == Ok(1) && fds[0].revents == libc::POLLERR {
        slept = sleep_beside_errors(fds, timeout, &cancelled);
    }
    let woken = match slept {
        Err(Errno::EINTR) if goes_on() => return Ok(()),
        other => other?,
    };
    if let Some(home) = home.filter(|_| fds[1].revents != 0) {
        context::drain(home);
    }
    if let Some(home) = home.filter(|_| fds.get(2).is_some_and(|bell| bell.revents != 0)) {
        context::drain_named(home);
    }
    if fds[0].revents != 0 {
        doorbells::kernel_tells(socket, fds[0].revents as u16 as u32);
        let by_ring = want == Want::Room && end.sending() == Sending::Ring;
        if by_ring && !doorbells::take_bells(socket, end, 1) && !there(socket, end, want) {
            // Without an ear for bytes, then: the one that stays would end each sleep at once.
            let mut fds = [fd::pollfd { events: events & !libc::POLLIN, ..fds[0] }];
            let timeout = timeout.map_or(LOOK_SOON_NS, |ns| ns.min(LOOK_SOON_NS));
            return match sleep::poll(&mut fds, Some(timeout), None, &cancelled) {
                Err(error) if error != Errno::EINTR || !goes_on() => Err(error),
                _ => Ok(()),
            };
        }
    }
    if woken == 0 && !now_and_then { Err(Errno::EAGAIN) } else { Ok(()) }
}

/// KERNEL: a queue of errors makes a descriptor ready until it is emptied (MSG_ERRQUEUE), which a call that waits does not heed. A set tells only
/// what is new.
#[cold]
fn sleep_beside_errors(
    fds: &mut [fd::pollfd],
    timeout: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    let Ok(set) = fd::epoll_create() else {
        // Where there can be no set, the caller looks again now and then.
        let timeout = timeout.map_or(LOOK_SOON_NS, |ns| ns.min(LOOK_SOON_NS));
        sleep::poll(&mut [], Some(timeout), None, cancelled)?;
        return Ok(1);
    };
    let cancelled = || {
        sys::close(set);
        cancelled();
    };
    let connection = fds[0];
    let events = connection.events as u16 as u32 | libc::EPOLLET as u32;
    let event = libc::epoll_event { events, u64: 0 };
    let watched = fd::epoll_ctl(set, libc::EPOLL_CTL_ADD, connection.fd, Some(event));
    // What is there now is told first.
    let mut told = [libc::epoll_event { events: 0, u64: 0 }];
    let first = sleep::epoll_wait(set, &mut told, Some(0), None, &cancelled);
    let slept = match told[0].events & !(libc::EPOLLERR as u32) {
        0 if watched.is_ok() && first.is_ok() => {
            fds[0] = fd::pollfd { fd: set, events: libc::POLLIN, revents: 0 };
            sleep::poll(fds, timeout, None, &cancelled)
        }
        _ => Ok(1),
    };
    sys::close(set);
    let revents = fd::pending(connection.fd, connection.events);
    fds[0] = fd::pollfd { revents, ..connection };
    slept
}

/// Whoever is about to sleep on this socket among others: asks to be woken by a byte, which every way of waiting in the
/// kernel sees. Look again afterwards.
pub fn want_bytes(socket: &Socket, data: bool, room: bool) {
    want(socket, WANT_BYTE, data, room);
}

/// The same, by the bell of our home context, which the peer rings by its name.
pub fn want_named(socket: &Socket, data: bool, room: bool) {
    want(socket, WANT_EVENT, data, room);
}

/// As `want_bytes`, for data only, by a bit on the ready board of our home context.
pub fn want_ready(socket: &Socket, lane: u32) {
    if let Some(incoming) = socket.incoming() {
        // ORDER: Relaxed, before the wish, which is a SeqCst read-modify-write; pairs with `sides::announce`.
        incoming.control().receiver.lane.store(u64::from(lane), Ordering::Relaxed);
        incoming.control().data_wish().want(WANT_READY);
    }
}

fn want(socket: &Socket, how: u32, data: bool, room: bool) {
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else { return };
    if data {
        incoming.control().data_wish().want(how);
    }
    // (As in `wait_inside`.)
    if room && socket.end().sending() == Sending::Ring {
        outgoing.control().room_wish().want(how);
    }
}

/// As `want_bytes`, for room only, by the home context's eventfd.
pub fn want_room_event(socket: &Socket) {
    if let Some(outgoing) = socket.outgoing() {
        outgoing.control().room_wish().want(WANT_EVENT);
    }
}

/// Does the peer ring our home context's eventfd?
pub fn rings_home(socket: &Socket) -> bool {
    socket.home.is() && words::peer_attached(socket) == RINGS_BY_EVENT
}

/// Does the peer ring our home context by its bell's name, for a wish that says so?
pub fn rings_by_name(socket: &Socket) -> bool {
    socket.home.is() && words::peer_attached(socket) == RINGS_BY_NAME
}
