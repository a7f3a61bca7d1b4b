//! What there is to find at one connection: the bytes that wait, and the events that poll reports.

use super::room::leave_unread;
use crate::socket::carrier::packets;
use crate::socket::table::{End, Receiving, Sending, Socket};
use crate::socket::{carrier, chaos, control, doorbells, in_use, moving, sides, view, words};
use ringlet_core::layout::NOT_SHUT;
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::Errno;
use ringlet_linux::sys::Sys;
use ringlet_linux::{fd, sys, tcp};

/// A program that polls an empty ring has the kernel asked this often (about 10 us) at first.
const ASK_WHEN_EMPTY_TICKS: u64 = 30_000;
/// Each time that the kernel was asked so often in vain, twice as seldom; so many times (then every 4 to 15 ms on x86-64).
const ASK_TWICE_AS_SELDOM_AFTER: u32 = 8;
const ASK_SELDOM_MOST: u32 = 9;

/// How often the kernel is asked for a connection at which nothing was found so many times in a row. (Of bytes, and of an end that the peer lives to
/// say, the ring tells. The kernel alone tells of a peer that was killed.)
#[inline]
pub(super) fn ask_every(times_in_vain: u32) -> u64 {
    ASK_WHEN_EMPTY_TICKS << (times_in_vain / ASK_TWICE_AS_SELDOM_AFTER).min(ASK_SELDOM_MOST)
}

/// The kernel was asked for a connection, and has nothing. (Not one atomic step: a count that may miss one.)
#[inline]
pub fn asked_in_vain(socket: &Socket) {
    let most = ASK_TWICE_AS_SELDOM_AFTER * ASK_SELDOM_MOST;
    let times = socket.found_nothing.get();
    if times < most {
        socket.found_nothing.set(times + 1);
    }
}

/// Bytes that a receive would find now: in the ring, or in the kernel while it is the way.
pub fn readable_bytes(socket: &Socket) -> Sys<usize> {
    count_readable(socket, usize::MAX)
}

/// Until there are `enough`: behind what is found first may stand a whole ring of small records, which nobody walks through at each look
/// (who asks for all of them goes on where the last one stopped).
fn count_readable(socket: &Socket, enough: usize) -> Sys<usize> {
    let end = socket.end();
    let _held = end.receive_lock.take_first().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.incoming() else { return tcp::unread(socket.fd()) };
    chaos::await_whole(&ring);
    match moving::settle(socket, end, &ring) {
        Ok(()) | Err(Errno::EAGAIN) => {}
        Err(error) => return Err(error),
    }
    let of_kernel = match end.receiving() {
        Receiving::Kernel => {
            return match tcp::unread(socket.fd())? {
                // KERNEL: at the urgent byte it counts nothing, though a receive goes past that; poll tells.
                0 if enough != usize::MAX => {
                    let readable = fd::pending(socket.fd(), libc::POLLIN) & libc::POLLIN != 0;
                    Ok(usize::from(readable))
                }
                waiting => Ok(waiting),
            };
        }
        Receiving::Draining if end.receiver.has_left() => {
            let again = moving::unread_after(socket, end, words::bells_end(end, &ring))?;
            return Ok(tcp::unread(socket.fd())?.min(end.receiver.before_ring() as usize) + again);
        }
        Receiving::Draining => tcp::unread(socket.fd())?.min(end.receiver.before_ring() as usize),
        Receiving::Ring => 0,
        Receiving::Discarding => return moving::unread_after(socket, end, end.receiver.until()),
    };
    if of_kernel >= enough {
        return Ok(of_kernel);
    }
    let (in_ring, back) = match enough {
        usize::MAX => {
            let (all, mark) = end.rx.available_since(&ring, &socket.counted_bytes);
            (all, mark.and_then(|mark| end.receiver.goes_on_at(mark)))
        }
        _ => match end.rx.available(&ring, enough) {
            some if of_kernel + some >= enough => (some, None),
            all => (all, words::back_ahead(end, &ring)),
        },
    };
    let behind = match back {
        Some(position) => moving::unread_after(socket, end, position)?,
        None => 0,
    };
    Ok(of_kernel + in_ring + behind)
}

/// Would a receive find something now?
fn is_readable(socket: &Socket) -> Sys<bool> {
    if !carrier::facts(socket).has_boundaries {
        return count_readable(socket, 1).map(|n| n > 0);
    }
    let end = socket.end();
    let _held = end.receive_lock.take_first().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.incoming() else { return Ok(true) };
    packets::wait_for_us(socket, end, &ring, &sides::incoming(socket, end, &ring))
}

/// Do bytes lie in the ring that come before what the kernel has?
pub fn ring_holds_bytes(socket: &Socket) -> bool {
    let end = socket.end();
    let in_use = in_use::in_use(socket);
    in_use.is_some()
        && end.receiving() == Receiving::Ring
        && socket.incoming().is_some_and(|ring| end.rx.has_bytes(&ring))
}

/// Bytes sent that the peer has not yet taken (SIOCOUTQ).
pub fn unsent_bytes(socket: &Socket) -> Sys<usize> {
    let end = socket.end();
    let _held = end.send_lock.take_first().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.outgoing() else { return Ok(0) };
    let in_kernel = if end.sending() == Sending::Ring { 0 } else { carrier::untaken(socket)? };
    Ok(end.tx.outstanding_bytes(&ring) + in_kernel)
}

/// The event mask that poll would report, of those in `events` and of the three that it always reports. `watched`: the kernel
/// tells us of its news on this descriptor (an epoll set does), so it need not be asked now and then. `mine` of the counted waiters are the
/// caller.
pub fn poll_mask(socket: &Socket, events: i16, watched: bool, mine: u32) -> i16 {
    let end = socket.end();
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else {
        return fd::pending(socket.fd(), events);
    };
    let readable = libc::POLLIN | libc::POLLRDNORM;
    let writable = carrier::facts(socket).writable;
    let mut mask = 0;
    let receiving = end.receiving();
    let in_ring = receiving == Receiving::Ring;
    let mut has_bytes = end.rx.has_bytes(&incoming);
    if in_ring && has_bytes {
        mask |= readable;
    }
    if in_ring
        && !has_bytes
        && socket.bells_left.is()
        && !socket.kernel_news.is()
        && let Some(_held) = end.receive_lock.try_take()
        && doorbells::take_counted_bells(socket, end, &incoming, mine)
    {
        // Behind the doorbell, as is the look for room below: it may have been the only one that told of it.
        has_bytes = end.rx.has_bytes(&incoming);
        mask |= if has_bytes { readable } else { 0 };
    }
    let mut away = false;
    // (Whoever does not ask for room is spared the look at the peer's cache line.)
    if end.sending() == Sending::Ring && events & writable != 0 {
        if has_room(end, &outgoing) {
            mask |= writable;
        } else {
            away = view::is_away(socket, end, &outgoing) || leave_unread(socket);
        }
    }
    let asked_long_ago = || is_asked_late(socket, sys::ticks());
    let due = socket.kernel_news.is()
        || !has_bytes && socket.bells_left.is()
        || end.ended.get() == 0 && is_shut(&incoming)
        || away
        || (!in_ring || !has_bytes) && words::published(end, &incoming)
        || !in_ring && receiving as u32 != socket.kernel_asked_as.get()
        || !watched && asked_long_ago();
    let rings_tell = end.sending() == Sending::Ring || events & writable == 0;
    if (in_ring || watched) && rings_tell && !due {
        return mask & events;
    }
    if socket.last_of_ring.is() && mask & events != 0 {
        // (The rest is asked of the kernel by the program itself, when these are taken.)
        return mask & events;
    }
    mask |= ask_kernel(socket, end, &incoming, readable, writable, mine);
    if events & writable != 0 && has_room(end, &outgoing) {
        // It has come to the ring meanwhile; or the doorbell that was taken told of room.
        mask |= writable;
    }
    mask & (events | libc::POLLERR | libc::POLLHUP)
}

/// Does a send by the ring find room, or that nobody reads any more?
fn has_room(end: &End, outgoing: &SegmentRing) -> bool {
    end.sending() == Sending::Ring && (end.tx.writable(outgoing) || !outgoing.control().is_taken())
}

/// Was the kernel last asked so long ago that it is to be asked again, though rings have something? (Who has heard elsewhere of the peer's
/// death may count on it here.)
pub fn is_asked_late(socket: &Socket, now: u64) -> bool {
    now.wrapping_sub(socket.kernel_asked.get()) > ask_every(socket.found_nothing.get())
}

/// The kernel's part of `poll_mask`.
fn ask_kernel(
    socket: &Socket,
    end: &End,
    incoming: &SegmentRing,
    readable: i16,
    writable: i16,
    mine: u32,
) -> i16 {
    let news = socket.kernel_news.number();
    let mask = look_at_kernel(socket, end, incoming, readable, writable, mine);
    socket.kernel_news.nothing_since(news);
    mask
}

/// What is found there is told (`Socket::kernel_news`).
fn look_at_kernel(
    socket: &Socket,
    end: &End,
    incoming: &SegmentRing,
    readable: i16,
    writable: i16,
    mine: u32,
) -> i16 {
    socket.kernel_asked.set(sys::ticks());
    socket.kernel_asked_as.set(end.receiving() as u32);
    socket.bells_left.set(0);
    sides::answer_return(socket, end);
    sides::go_back_if_orphan(socket);
    control::leave_idle(socket, end);
    if words::published(end, incoming)
        && (end.receiving() != Receiving::Ring || !end.rx.has_bytes(incoming))
    {
        let _ = count_readable(socket, 0);
    }
    for _ in 0..moving::CHANGES_MAX {
        let look =
            || fd::pending(socket.fd(), readable | writable | libc::POLLRDHUP | libc::POLLPRI);
        let mut kernel = look();
        let over = kernel & (libc::POLLHUP | libc::POLLERR) != 0;
        if over && !end.judged.is() && carrier::judge(socket, end, 0) {
            kernel = look();
        }
        kernel = carrier::shown(socket, end, kernel);
        let mut mask = kernel & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLPRI);
        if end.pending_error.is() {
            mask |= libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP | readable;
        }
        if mask != 0 {
            // What has happened to the kernel's connection stays, and is to be seen at every look.
            socket.kernel_news.tell();
        }
        // KERNEL: an error alone ends nothing: a queue has something for MSG_ERRQUEUE (a time stamp, say).
        if mask & (libc::POLLRDHUP | libc::POLLHUP) != 0 {
            mask |= readable;
            end.ended.set(end.ended.get().max(1));
        }
        if end.sending() != Sending::Ring || mask & (libc::POLLHUP | libc::POLLERR) != 0 {
            mask |= kernel & writable;
        }
        if kernel & readable == 0 || mask & readable != 0 {
            return mask | ready_mask(end, incoming, readable);
        }
        // Bytes in the kernel: data, or doorbells?
        match end.receiving() {
            Receiving::Ring if end.rx.has_bytes(incoming) => {
                socket.bells_left.set(1);
                return mask | readable;
            }
            Receiving::Ring if !words::published(end, incoming) => {
                if !doorbells::take_bells(socket, end, mine) {
                    return mask | ready_mask(end, incoming, readable);
                }
            }
            // What was there before this look at the ring is the program's, if no mark stands that gives it another meaning.
            Receiving::Kernel
                if !words::published(end, incoming) && !carrier::facts(socket).has_boundaries =>
            {
                socket.kernel_news.tell();
                return mask | readable;
            }
            _ => match is_readable(socket) {
                Ok(false) | Err(Errno::EAGAIN) => {}
                _ => {
                    socket.kernel_news.tell();
                    return mask | readable;
                }
            },
        }
    }
    0
}

/// When what a receive would find first was sent, or the peer ended; 0 if that is not known.
pub fn sent_at(socket: &Socket) -> u64 {
    let end = socket.end();
    match socket.incoming() {
        Some(ring) if end.receiving() == Receiving::Ring => {
            let sender = &ring.control().sender;
            let ended = is_shut(&ring) && !end.rx.has_bytes(&ring);
            if ended { sender.shut_at.load(Ordering::Relaxed) } else { end.rx.sent_at(&ring) }
        }
        Some(ring) => ring.control().sender.kernel_at.load(Ordering::Relaxed),
        None => 0,
    }
}

/// Does the ring hold something that was not looked at, bytes or a mark?
pub fn ring_tells(socket: &Socket) -> bool {
    socket.incoming().is_some_and(|ring| words::published(socket.end(), &ring))
}

/// Does the peer say that it has ended its direction? The kernel has the end itself, or is about to.
#[inline(always)]
fn is_shut(incoming: &SegmentRing) -> bool {
    // ORDER: Acquire; pairs with `moving::end_direction`.
    incoming.control().sender.shut.load(Ordering::Acquire) != NOT_SHUT
}

fn ready_mask(end: &End, incoming: &SegmentRing, readable: i16) -> i16 {
    if end.receiving() == Receiving::Ring && end.rx.has_bytes(incoming) { readable } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_finds_nothing_has_the_kernel_asked_less_and_less_often() {
        let before_last = ASK_TWICE_AS_SELDOM_AFTER * ASK_SELDOM_MOST;
        assert_eq!((ask_every(0), ask_every(7)), (30_000, 30_000));
        assert_eq!(ask_every(8), 60_000);
        assert!((1..before_last).all(|times| ask_every(times) <= ask_every(times + 1)));
        assert_eq!(ask_every(before_last), 15_360_000);
        assert_eq!(ask_every(u32::MAX), ask_every(before_last));
    }
}
