//! poll and select over descriptors of which some are attached connections (or epoll sets that hold some).

use super::table::{Known, Receiving, Sending, Socket, Stage, lookup, tables};
use super::{context, datagram, epoll, memory, sleep, spin, stream, view};
use ringlet_core::sync::Ordering;
use ringlet_linux::fd::{self, pollfd};
use ringlet_linux::map::{self, Scratch};
use ringlet_linux::sys::{self, Errno, Sys};

/// Can the kernel alone answer for all of these?
pub fn is_kernels(fds: &[pollfd]) -> bool {
    !fds.iter().any(|entry| match lookup(entry.fd) {
        Some(Known::Socket(socket)) => socket.is_ours(),
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

/// A native wait over these begins: until `end_native`, no peer is told to use the ring of one of them.
pub fn begin_native(fds: &[pollfd]) {
    each_waiting(fds, |socket| {
        socket.waited_for.set(1);
        socket.enter_native(|end| &end.native_receivers);
    });
}

pub fn end_native(fds: &[pollfd]) {
    each_waiting(fds, |socket| {
        socket.end().native_receivers.fetch_sub(1, Ordering::SeqCst);
    });
}

fn each_waiting(fds: &[pollfd], act: impl Fn(&'static Socket)) {
    for entry in fds {
        match lookup(entry.fd) {
            Some(Known::Socket(socket)) => act(socket),
            Some(Known::Set(set)) => epoll::nest(set, None),
            _ => {}
        }
    }
}

/// poll. `scratch` has one entry more than `fds`.
#[allow(unsafe_code)]
pub fn poll(
    fds: &mut [pollfd],
    scratch: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let mut on_stack = [0u32; COUNTED_ON_STACK];
    if fds.len() <= COUNTED_ON_STACK {
        let count = enter(fds, &mut on_stack);
        let counted = &on_stack[..count];
        let result = poll_entered(fds, scratch, timeout_ns, mask, &|| leave(counted));
        leave(counted);
        return result;
    }
    let mut many = Scratch::new(fds.len(), 0u32).ok_or(Errno::ENOMEM)?;
    let count = enter(fds, &mut many);
    let (counted, area) = (&many[..count], many.area());
    let cancelled = || {
        leave(counted);
        // SAFETY: in place of the drop, which does not come then.
        unsafe { map::unmap(area) };
    };
    let result = poll_entered(fds, scratch, timeout_ns, mask, &cancelled);
    leave(counted);
    result
}

const COUNTED_ON_STACK: usize = 128;

/// Counts us in at every attached socket; their indices go to `counted`, which has room for all of `fds`.
fn enter(fds: &[pollfd], counted: &mut [u32]) -> usize {
    let Some(tables) = tables() else { return 0 };
    let mut count = 0;
    for entry in fds {
        let Some(Known::Socket(socket)) = lookup(entry.fd) else { continue };
        if socket.stage() != Stage::Attached {
            socket.waited_for.set(1);
            continue;
        }
        // ORDER: SeqCst; pairs with `process::release`: a socket is not unmapped while somebody looks at it.
        super::jumps::waits(socket);
        socket.sleepers.fetch_add(1, Ordering::SeqCst);
        let room = entry.events & (libc::POLLOUT | libc::POLLWRNORM) != 0;
        socket.room_waiters.fetch_add(room as u32, Ordering::SeqCst);
        counted[count] = tables.index_of(socket) | if room { FOR_ROOM } else { 0 };
        count += 1;
    }
    count
}

/// Beside an index in `counted`: it was counted as waiting for room too.
const FOR_ROOM: u32 = 1 << 31;

fn leave(counted: &[u32]) {
    let Some(tables) = tables() else { return };
    for &index in counted {
        let socket = &tables.sockets[(index & !FOR_ROOM) as usize];
        socket.room_waiters.fetch_sub((index & FOR_ROOM != 0) as u32, Ordering::SeqCst);
        stream::wait_no_more(socket);
    }
}

fn attached(fd: i32) -> Option<&'static Socket> {
    match lookup(fd)? {
        Known::Socket(socket) if socket.stage() == Stage::Attached => Some(socket),
        _ => None,
    }
}

/// Looks at what rings can tell. Returns how many are ready, and whether there are others that only the kernel can answer for.
fn look(fds: &mut [pollfd]) -> (usize, bool) {
    let (mut found, mut others) = (0, false);
    for entry in fds {
        entry.revents = 0;
        match lookup(entry.fd) {
            Some(Known::Socket(socket)) if socket.stage() == Stage::Attached => {
                entry.revents = stream::poll_mask(socket, entry.events, false);
            }
            Some(Known::Socket(socket)) if socket.stage() == Stage::Mailbox => {
                others = true;
                entry.revents = datagram::lanes_mask(socket, entry.events);
            }
            Some(Known::Set(set)) if epoll::has_adopted(set) => {
                others = true;
                epoll::nest(set, None);
                epoll::settle(set);
                if epoll::ready(set) {
                    entry.revents = entry.events & (libc::POLLIN | libc::POLLRDNORM);
                }
            }
            _ => others |= entry.fd >= 0,
        }
        found += (entry.revents != 0) as usize;
    }
    (found, others)
}

/// `cancelled`: see `sleep`.
fn poll_entered(
    fds: &mut [pollfd],
    scratch: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    let deadline = timeout_ns.map(|ns| if ns == 0 { 0 } else { sys::now_ns().saturating_add(ns) });
    let limit = tables().map_or(0, |tables| tables.config.spin_us);
    loop {
        let (found, others) = look(fds);
        if found > 0 || deadline == Some(0) {
            return if others { with_kernel(fds, scratch, mask) } else { Ok(found) };
        }
        sleep::check(cancelled);
        let left = |at: u64| at.saturating_sub(sys::now_ns());
        let budget = limit.min(deadline.map_or(u64::MAX, |at| left(at) / 1000));
        let mut asked = sys::now_ns();
        let talks_to = fds.iter().find_map(|entry| attached(entry.fd));
        let peer = || talks_to.and_then(stream::peer);
        let worth = spin::watch(budget, peer, || {
            if look(fds).0 > 0 {
                return true;
            }
            let now = sys::now_ns();
            let due = others && now - asked > ASK_KERNEL_NS;
            if due {
                asked = now;
            }
            due && with_kernel(fds, scratch, mask).is_ok_and(|n| n > 0)
        });
        if !worth {
            // Once: whether a peer rings it may change while we sleep, and who arms must disarm.
            let home = home(fds);
            each_datagram_socket(fds, |socket| {
                socket.enter_native(|end| &end.native_receivers);
            });
            arm(fds, home);
            let timeout = match (deadline.map(left), shares_doorbells(fds)) {
                (left, true) => Some(left.unwrap_or(u64::MAX).min(stream::LOOK_AT_TIMES_NS)),
                (left, false) => left,
            };
            let timeout = match memory::due() {
                Some(due) => Some(timeout.unwrap_or(u64::MAX).min(due)),
                None => timeout,
            };
            let idle = look(fds).0 == 0;
            let awake = || {
                disarm(home);
                each_datagram_socket(fds, |socket| {
                    socket.end().native_receivers.fetch_sub(1, Ordering::SeqCst);
                    datagram::awake(socket);
                });
            };
            let cancelled = || {
                awake();
                cancelled();
            };
            let slept = idle.then(|| fall_asleep(fds, scratch, home, timeout, mask, &cancelled));
            awake();
            if let Some(slept) = slept {
                let woken = slept?;
                for entry in fds.iter() {
                    if let Some(socket) = attached(entry.fd)
                        && stream::poll_mask(socket, entry.events, true) != 0
                    {
                        view::count_wake(socket);
                    }
                }
                if woken == 0 && deadline.is_some_and(|at| sys::now_ns() >= at) {
                    let (found, others) = look(fds);
                    return if others { with_kernel(fds, scratch, mask) } else { Ok(found) };
                }
            }
        }
        let (found, others) = look(fds);
        if others {
            let total = with_kernel(fds, scratch, mask)?;
            if total > 0 {
                return Ok(total);
            }
        } else if found > 0 {
            return Ok(found);
        }
    }
}

/// While watching: the kernel's descriptors are asked this often.
const ASK_KERNEL_NS: u64 = 10_000;

/// The descriptors that only the kernel can answer for, without waiting; adds them to what rings told. Returns the number of
/// ready entries.
fn with_kernel(fds: &mut [pollfd], scratch: &mut [pollfd], mask: Option<u64>) -> Sys<usize> {
    look(fds);
    for (entry, copy) in fds.iter().zip(scratch.iter_mut()) {
        *copy = *entry;
        if attached(entry.fd).is_some() {
            copy.fd = -1;
        }
    }
    let n = fds.len();
    fd::poll(&mut scratch[..n], Some(0), mask)?;
    let mut total = 0;
    for (entry, copy) in fds.iter_mut().zip(scratch.iter()) {
        if copy.fd >= 0 {
            entry.revents |= copy.revents;
        }
        total += (entry.revents != 0) as usize;
    }
    Ok(total)
}

/// May another waiter take a doorbell byte that is meant for us? Then we look now and then.
fn shares_doorbells(fds: &[pollfd]) -> bool {
    fds.iter().any(|entry| {
        attached(entry.fd).is_some_and(|socket| socket.sleepers.load(Ordering::SeqCst) > 1)
    })
}

/// The thread's context, if it is the home of one of these.
fn home(fds: &[pollfd]) -> Option<u32> {
    let mine = context::of_thread_if_any()?;
    let covered = |socket: &Socket| socket.home.get() == mine && stream::rings_home(socket);
    fds.iter().any(|entry| attached(entry.fd).is_some_and(covered)).then_some(mine)
}

/// UDP sockets count who may sleep on them (`datagram::awake`).
fn each_datagram_socket(fds: &[pollfd], act: impl Fn(&'static Socket)) {
    for entry in fds {
        if let Some(Known::Socket(socket)) = lookup(entry.fd)
            && socket.is_datagram()
        {
            act(socket);
        }
    }
}

fn arm(fds: &[pollfd], home: Option<u32>) {
    each_datagram_socket(fds, |socket| {
        // What is in the lanes is found by the look that follows; who does not ask for it needs no waking by more of it.
        datagram::arm(socket, false);
    });
    if let Some(context) = home {
        context::arm(context);
    }
    for entry in fds {
        let Some(socket) = attached(entry.fd) else { continue };
        super::moving::answer_return(socket, socket.end());
        let room = entry.events & (libc::POLLOUT | libc::POLLWRNORM) != 0;
        if home.is_some() && home == Some(socket.home.get()) && stream::rings_home(socket) {
            if room {
                stream::want_room_event(socket);
            }
        } else {
            stream::want_bytes(socket, true, room);
        }
    }
}

fn disarm(home: Option<u32>) {
    if let Some(context) = home {
        context::disarm(context);
    }
}

/// Waits in the kernel for everything that can wake us.
fn fall_asleep(
    fds: &[pollfd],
    scratch: &mut [pollfd],
    home: Option<u32>,
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    for (entry, copy) in fds.iter().zip(scratch.iter_mut()) {
        *copy = *entry;
        if let Some(socket) = attached(entry.fd) {
            copy.events = kernel_events(socket, entry.events);
        }
    }
    let n = fds.len();
    let event = home.map_or(-1, context::eventfd_of);
    scratch[n] = pollfd { fd: event, events: libc::POLLIN, revents: 0 };
    let woken = sleep::poll(&mut scratch[..n + 1], timeout_ns, mask, cancelled)?;
    if scratch[n].revents != 0 {
        fd::drain(event);
    }
    for copy in &scratch[..n] {
        if copy.revents != 0
            && let Some(socket) = attached(copy.fd)
        {
            socket.kernel_news.set(1);
        }
    }
    Ok(woken)
}

/// What to ask of the kernel for an attached connection: its doorbells and its end while it is not known; its data and room where
/// the kernel is the way.
fn kernel_events(socket: &Socket, asked: i16) -> i16 {
    let end = socket.end();
    let mut events = asked & (libc::POLLPRI | libc::POLLRDHUP);
    if end.receiving() != Receiving::Ring {
        events |= asked & (libc::POLLIN | libc::POLLRDNORM);
    } else if !end.ended.is() {
        events |= libc::POLLIN | libc::POLLRDHUP;
    }
    match end.sending() {
        Sending::Ring => {}
        // To go on with what is sent again.
        Sending::Returning => events |= libc::POLLOUT,
        _ => events |= asked & (libc::POLLOUT | libc::POLLWRNORM),
    }
    events
}
