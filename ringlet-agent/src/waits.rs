//! Calls that wait for readiness.

use crate::Edge;
use crate::data::is_nowhere;
use core::cell::Cell;
use core::ptr::null;
use libc::{c_int, c_long, epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use ringlet::socket::readiness::OWN_ENTRIES;
use ringlet::socket::table::{self, Known, lookup};
use ringlet::socket::{epoll, readiness};
use ringlet::thread::is_alone;
use ringlet_linux::map::{self, Scratch};
use ringlet_linux::sys::{self, Errno, Sys};

/// Room for more is not worth its clearing, for most polls.
const FEW: usize = 9;
/// Entries of a poll that fit on our stack.
const POLL_ON_STACK: usize = 128;

fn from_ms(ms: c_int) -> Option<u64> {
    (ms >= 0).then(|| ms as u64 * 1_000_000)
}

/// `Err(EINVAL)` for a time that is none; `Ok(None)` waits for ever.
pub(crate) unsafe fn from_timespec(time: *const timespec) -> Sys<Option<u64>> {
    if time.is_null() {
        return Ok(None);
    }
    if is_nowhere(time) {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the program's struct.
    let time = unsafe { *time };
    if time.tv_sec < 0 || !(0..1_000_000_000).contains(&time.tv_nsec) {
        return Err(Errno::EINVAL);
    }
    Ok(Some((time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)))
}

/// The kernel's part of a signal mask.
unsafe fn from_mask(mask: *const sigset_t) -> Sys<Option<u64>> {
    if !mask.is_null() && is_nowhere(mask) {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the program's mask, of which the kernel knows the first 64 bits.
    Ok((!mask.is_null()).then(|| unsafe { *mask.cast::<u64>() }))
}

/// Whether the kernel alone can tell what to do: an array that is none, or a program of which nothing is followed, whose
/// pointers, good or bad, are then not looked at.
fn is_beyond_us(fds: *const pollfd, count: nfds_t) -> bool {
    count == 0 || count > 1 << 20 || is_nowhere(fds) || !table::knows_any()
}

/// A poll by ringlet, or `None` when it is the kernel's.
unsafe fn poll_ours<E: Edge>(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: impl FnOnce() -> Sys<Option<u64>>,
    mask: *const sigset_t,
) -> Option<Sys<usize>> {
    if is_beyond_us(fds, count) {
        return None;
    }
    // SAFETY: the program's array.
    let fds = unsafe { core::slice::from_raw_parts_mut(fds, count as usize) };
    if readiness::is_kernels(fds) {
        return None;
    }
    if readiness::is_too_many(fds) {
        return Some(Err(Errno::EINVAL));
    }
    // SAFETY: the program's mask.
    let (timeout, mask) = match (timeout(), unsafe { from_mask(mask) }) {
        (Ok(timeout), Ok(mask)) => (timeout, mask),
        (Err(error), _) | (_, Err(error)) => return Some(Err(error)),
    };
    let empty = pollfd { fd: -1, events: 0, revents: 0 };
    if fds.len() + OWN_ENTRIES <= FEW {
        return Some(readiness::poll(fds, &mut [empty; FEW], timeout, mask));
    }
    if fds.len() + OWN_ENTRIES <= POLL_ON_STACK {
        return Some(readiness::poll(fds, &mut [empty; POLL_ON_STACK], timeout, mask));
    }
    let Some(mut scratch) = Scratch::new(fds.len() + OWN_ENTRIES, empty) else {
        return Some(Err(Errno::ENOMEM));
    };
    let left = scratch.area();
    // SAFETY: in place of the drop, which does not come then.
    let cancelled = || unsafe { map::unmap(left) };
    Some(E::in_which(&cancelled, || readiness::poll(fds, &mut scratch, timeout, mask)))
}

/// Runs a native wait over these descriptors; none of them is moved meanwhile. `None`: one has just become ours.
unsafe fn natively<E: Edge>(edge: &E, fds: *const pollfd, count: nfds_t) -> Option<Sys<usize>> {
    if is_beyond_us(fds, count) {
        return Some(edge.pass_on());
    }
    // SAFETY: the program's array.
    natively_over(edge, unsafe { core::slice::from_raw_parts(fds, count as usize) })
}

fn natively_over<E: Edge>(edge: &E, fds: &[pollfd]) -> Option<Sys<usize>> {
    readiness::natively(fds, |cancelled| E::in_which(cancelled, || edge.pass_on()))
}

pub unsafe fn poll<E: Edge>(
    edge: &E,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
) -> Sys<usize> {
    loop {
        // SAFETY: the contract of poll.
        if let Some(done) = unsafe { poll_ours::<E>(fds, count, || Ok(from_ms(timeout)), null()) } {
            return done;
        }
        // SAFETY: the contract of poll: `count` entries of the program's.
        if let Some(done) = unsafe { natively(edge, fds, count) } {
            return done;
        }
    }
}

pub unsafe fn ppoll<E: Edge>(
    edge: &E,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> Sys<usize> {
    loop {
        // SAFETY: the contract of ppoll.
        let ours = unsafe { poll_ours::<E>(fds, count, || from_timespec(timeout), mask) };
        if let Some(done) = ours {
            return done;
        }
        // SAFETY: the contract of ppoll: `count` entries of the program's.
        if let Some(done) = unsafe { natively(edge, fds, count) } {
            return done;
        }
    }
}

/// One of select's bit sets; they may be longer than FD_SETSIZE.
#[derive(Clone, Copy)]
struct Bits(*mut c_long);

const LONG_BITS: usize = c_long::BITS as usize;

impl Bits {
    fn has(self, fd: usize) -> bool {
        self.word(fd / LONG_BITS) >> (fd % LONG_BITS) & 1 != 0
    }
    fn word(self, index: usize) -> c_long {
        // SAFETY: the program's set, which covers all numbers below its `nfds`, in whole words.
        if self.0.is_null() { 0 } else { unsafe { *self.0.add(index) } }
    }
    fn clear_all(self, count: usize) {
        if !self.0.is_null() {
            for word in 0..count.div_ceil(LONG_BITS) {
                // SAFETY: the program's set has whole words up to its `nfds`, which `count` is.
                unsafe { *self.0.add(word) = 0 };
            }
        }
    }
    fn put(self, fd: usize) {
        // SAFETY: the program's set has this bit's word: `put` is called for members below `nfds` only.
        unsafe { *self.0.add(fd / LONG_BITS) |= 1 << (fd % LONG_BITS) };
    }
}

const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUT: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// The numbers below `count` that are in one of the sets, word by word: most programs ask for few, and name the most that there can be.
fn members(count: usize, sets: [Bits; 3]) -> impl Iterator<Item = usize> {
    (0..count.div_ceil(LONG_BITS)).flat_map(move |index| {
        let mut left = sets.iter().fold(0, |word, set| word | set.word(index));
        core::iter::from_fn(move || {
            let bit = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            let fd = index * LONG_BITS + bit;
            (bit < LONG_BITS && fd < count).then_some(fd)
        })
    })
}

/// select's three sets as poll entries; `None` when the kernel can do it alone.
fn entries(count: usize, sets: [Bits; 3], fds: &mut [pollfd]) -> Option<usize> {
    let mut used = 0;
    for fd in members(count, sets) {
        let mut events = 0;
        for (set, bits) in sets.iter().zip([IN, OUT, libc::POLLPRI]) {
            if set.has(fd) {
                events |= bits;
            }
        }
        // (Another thread may have added some since they were counted.)
        let Some(entry) = fds.get_mut(used).filter(|_| events != 0) else { continue };
        *entry = pollfd { fd: fd as c_int, events, revents: 0 };
        used += 1;
    }
    (used > 0).then_some(used)
}

/// A select by ringlet, or by the kernel (`native`), whichever can.
unsafe fn select_with<E: Edge>(
    edge: &E,
    count: c_int,
    sets: [Bits; 3],
    timeout: impl FnOnce() -> Sys<Option<u64>>,
    mask: *const sigset_t,
    by_kernel: &Cell<bool>,
) -> Sys<usize> {
    // KERNEL: it looks no further than its own table, and a set may end there though `count` does not. So we look at what we know.
    let known = table::known_below(count.max(0) as usize);
    if !members(known, sets).any(|fd| readiness::is_followed(fd as c_int)) {
        by_kernel.set(true);
        return edge.pass_on();
    }
    let count = count as usize;
    let empty = pollfd { fd: -1, events: 0, revents: 0 };
    let asked = members(count, sets).count();
    if asked + OWN_ENTRIES <= POLL_ON_STACK {
        let (mut fds, mut scratch) = ([empty; POLL_ON_STACK], [empty; POLL_ON_STACK]);
        // SAFETY: asks for the program's sets of `count` bits, which the caller vouches for.
        return unsafe {
            select_entries(edge, count, sets, [&mut fds, &mut scratch], timeout, mask, by_kernel)
        };
    }
    let (Some(mut fds), Some(mut scratch)) =
        (Scratch::new(asked + OWN_ENTRIES, empty), Scratch::new(asked + OWN_ENTRIES, empty))
    else {
        return Err(Errno(libc::ENOMEM));
    };
    let left = [fds.area(), scratch.area()];
    // SAFETY: in place of the drops, which do not come then.
    let cancelled = || left.iter().for_each(|area| unsafe { map::unmap(*area) });
    E::in_which(&cancelled, || {
        // SAFETY: asks for the program's sets of `count` bits, which the caller vouches for.
        unsafe {
            select_entries(edge, count, sets, [&mut fds, &mut scratch], timeout, mask, by_kernel)
        }
    })
}

/// `select_with`, by poll entries; both arrays have room for one more than is asked for.
unsafe fn select_entries<E: Edge>(
    edge: &E,
    count: usize,
    sets: [Bits; 3],
    [fds, scratch]: [&mut [pollfd]; 2],
    timeout: impl FnOnce() -> Sys<Option<u64>>,
    mask: *const sigset_t,
    by_kernel: &Cell<bool>,
) -> Sys<usize> {
    let natively = || {
        by_kernel.set(true);
        edge.pass_on()
    };
    let room = fds.len() - OWN_ENTRIES;
    let Some(used) = entries(count, sets, &mut fds[..room]) else { return natively() };
    if readiness::is_kernels(&fds[..used])
        && let Some(done) = natively_over(edge, &fds[..used])
    {
        by_kernel.set(true);
        return done;
    }
    let time = timeout()?;
    // SAFETY: the program's mask.
    let mask = unsafe { from_mask(mask) }?;
    readiness::poll(&mut fds[..used], scratch, time, mask)?;
    if fds[..used].iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return Err(Errno(libc::EBADF));
    }
    // KERNEL: which poll events count for which set (fs/select.c).
    let meanings = [
        (IN, IN | libc::POLLHUP | libc::POLLERR),
        (OUT, OUT | libc::POLLERR),
        (libc::POLLPRI, libc::POLLPRI),
    ];
    let mut total = 0;
    for set in sets {
        set.clear_all(count);
    }
    for entry in &fds[..used] {
        for (set, (asked, met)) in sets.iter().zip(meanings) {
            if entry.events & asked != 0 && entry.revents & met != 0 {
                set.put(entry.fd as usize);
                total += 1;
            }
        }
    }
    Ok(total)
}

pub unsafe fn select<E: Edge>(
    edge: &E,
    count: c_int,
    readable: *mut fd_set,
    writable: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *mut timeval,
) -> Sys<usize> {
    let start = Cell::new(0);
    let sets = [Bits(readable.cast()), Bits(writable.cast()), Bits(exceptional.cast())];
    let ns = || {
        if timeout.is_null() {
            return Ok(None);
        }
        if is_nowhere(timeout) {
            return Err(Errno::EFAULT);
        }
        // SAFETY: the program's struct.
        let time = unsafe { *timeout };
        if time.tv_sec < 0 || time.tv_usec < 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Some(
            (time.tv_sec as u64)
                .saturating_mul(1_000_000_000)
                .saturating_add(time.tv_usec as u64 * 1000),
        ))
    };
    let by_kernel = Cell::new(false);
    // SAFETY: the contract of select.
    let done = unsafe {
        let begin = || {
            start.set(sys::now_ns());
            ns()
        };
        select_with(edge, count, sets, begin, null(), &by_kernel)
    };
    if !by_kernel.get()
        && let Ok(Some(asked)) = ns()
    {
        // KERNEL: Linux leaves the time that was not waited.
        let left = asked.saturating_sub(sys::now_ns() - start.get()) / 1000;
        // SAFETY: the program's struct.
        unsafe {
            (*timeout).tv_sec = (left / 1_000_000) as _;
            (*timeout).tv_usec = (left % 1_000_000) as _;
        }
    }
    done
}

pub unsafe fn pselect<E: Edge>(
    edge: &E,
    count: c_int,
    readable: *mut fd_set,
    writable: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> Sys<usize> {
    let sets = [Bits(readable.cast()), Bits(writable.cast()), Bits(exceptional.cast())];
    // SAFETY: the contract of pselect.
    unsafe { select_with(edge, count, sets, || from_timespec(timeout), mask, &Cell::new(false)) }
}

pub unsafe fn epoll_ctl<E: Edge>(
    edge: &E,
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> Sys<usize> {
    match lookup(fd) {
        Some(Known::Socket(socket)) => {
            let Some(set) = epoll::set_of(epfd) else {
                return edge.pass_on();
            };
            if is_nowhere(event) && op != libc::EPOLL_CTL_DEL {
                return Err(Errno(libc::EFAULT));
            }
            // SAFETY: the program's event.
            let event = (op != libc::EPOLL_CTL_DEL).then(|| unsafe { event.read_unaligned() });
            epoll::control(set, op, fd, socket, event).map(|()| 0)
        }
        known => {
            if let Some(Known::Set(inner)) = known
                && op == libc::EPOLL_CTL_ADD
            {
                epoll::nest(inner, epoll::set_of(epfd));
            }
            if let Some(Known::Hidden) = known {
                return Err(Errno(libc::EBADF));
            }
            edge.pass_on()
        }
    }
}

/// KERNEL: EP_MAX_EVENTS.
const EVENTS_MAX: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;

/// A wait by ringlet when the set has connections of ours, else by the kernel; one that was overtaken goes on with ringlet.
unsafe fn wait_with<E: Edge>(
    edge: &E,
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    limited: bool,
    timeout: impl Fn() -> Sys<Option<u64>>,
    mask: *const sigset_t,
) -> Sys<usize> {
    let known = epoll::visit(epfd);
    if max <= 0 || max > EVENTS_MAX || is_nowhere(events) {
        return edge.pass_on();
    }
    // (The number that this wait began with may mean another set when it goes on.)
    let visit = || known.or_else(|| epoll::set_of(epfd).and_then(|_| epoll::visit(epfd)));
    let mut waited = 0;
    if known.is_none_or(epoll::begin_native) {
        // KERNEL: not by the coarse clock, which is more than a tick late where the host does not run the processor that keeps it: the wait
        // would end too early.
        let start = if limited { sys::now_ns() } else { 0 };
        let n = match known {
            Some(set) if epoll::holds_sets(set.index()) => {
                // SAFETY: the program's array.
                let out = unsafe { core::slice::from_raw_parts_mut(events, max as usize) };
                // SAFETY: the program's mask.
                let asked = || Ok((timeout()?, unsafe { from_mask(mask) }?));
                asked().and_then(|(time, mask)| epoll::wait_over_sets(set, out, time, mask))
            }
            Some(set) if !is_alone() => E::in_which(&|| epoll::end_native(set), || edge.pass_on()),
            _ => edge.pass_on(),
        };
        if let Some(set) = known {
            epoll::end_native(set);
        }
        // SAFETY: the kernel has filled `n` entries.
        let told = unsafe { core::slice::from_raw_parts_mut(events, n.unwrap_or(0)) };
        if !epoll::any_of_ours(told) {
            return n;
        }
        // It was overtaken; or somebody else's set came to us, with registrations of ringlet's.
        let Some(set) = visit() else { return Ok(0) };
        let kept = epoll::after_native(set, told);
        if kept > 0 {
            return Ok(kept);
        }
        waited = if limited { sys::now_ns() - start } else { 0 };
    }
    let Some(set) = visit() else { return Ok(0) };
    // SAFETY: the program's array.
    let out = unsafe { core::slice::from_raw_parts_mut(events, max as usize) };
    let time = timeout()?;
    // SAFETY: the program's mask.
    let mask = unsafe { from_mask(mask) }?;
    epoll::wait(set, out, time.map(|ns| ns.saturating_sub(waited)), mask)
}

pub unsafe fn epoll_wait<E: Edge>(
    edge: &E,
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> Sys<usize> {
    // SAFETY: the contract of epoll_wait.
    unsafe { wait_with(edge, epfd, events, max, timeout > 0, || Ok(from_ms(timeout)), null()) }
}

pub unsafe fn epoll_pwait<E: Edge>(
    edge: &E,
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> Sys<usize> {
    // SAFETY: the contract of epoll_pwait.
    unsafe { wait_with(edge, epfd, events, max, timeout > 0, || Ok(from_ms(timeout)), mask) }
}

pub unsafe fn epoll_pwait2<E: Edge>(
    edge: &E,
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> Sys<usize> {
    // SAFETY: the contract of epoll_pwait2.
    unsafe {
        wait_with(edge, epfd, events, max, !timeout.is_null(), || from_timespec(timeout), mask)
    }
}
