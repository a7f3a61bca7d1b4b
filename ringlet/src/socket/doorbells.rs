//! Doorbells on the kernel's connection: telling them from the end of the stream, and taking them away.

use super::epoll::registration::{end_rests, may_sleep_on};
use super::sides::{answer_return, go_back_if_orphan, others_wait, seen};
use super::table::{End, Receiving, Sending, Socket, Stage};
use super::{carrier, channel, words};
use ringlet_core::bells;
use ringlet_core::handover::Step;
use ringlet_core::layout::WANT_BYTE;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::tcp;

/// Doorbells that one look takes at most: who puts more there is not to keep us from returning.
const BELLS_AT_ONCE: usize = 64 << 10;

/// And so many by one call, without a look at them.
const FEW_BELLS: u64 = 64;

/// The ring is empty: has the kernel a doorbell for us, the end of the stream, or an error?
pub fn look_at_kernel(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    mine: u32,
) -> Sys<Option<usize>> {
    let news = socket.kernel_news.number();
    socket.bells_left.set(0);
    answer_return(socket, end);
    go_back_if_orphan(socket);
    let mut bells = [0u8; 64];
    let peeked = tcp::receive_into(socket.fd(), &mut bells, libc::MSG_PEEK | libc::MSG_DONTWAIT);
    let peeked = carrier::classify(socket, end, peeked);
    let peeked = match (peeked, end.pending_error.get()) {
        // Taken from the kernel before.
        (Err(Errno::EAGAIN) | Ok(0), error @ 1..) => Err(Errno(error as i32)),
        (Err(Errno::EAGAIN), 0) => {
            socket.kernel_news.nothing_since(news);
            return Err(Errno::EAGAIN);
        }
        // There may be more: one packet is one, and one stays for each time that we waited for room beside bytes that stood in the ring.
        (Ok(seen @ 1..), _) if carrier::facts(socket).has_boundaries || seen == bells.len() => {
            tcp::unread(socket.fd()).map(|waiting| waiting.clamp(seen, BELLS_AT_ONCE))
        }
        (other, _) => other,
    };
    if let Err(error) = peeked {
        // Taken from the kernel now; what the ring still holds comes first.
        end.pending_error.set(error.0 as u32);
        end.ended.set(1);
        socket.kernel_news.tell();
    }
    if matches!(peeked, Ok(1..)) && !end_rests(socket) {
        // As below.
        socket.kernel_news.tell();
        return Err(Errno::EAGAIN);
    }
    if matches!(peeked, Ok(1..)) && others_wait(socket, end, mine) {
        // They may wait for the bytes that we are about to take: the next record, or the next room, rings for them.
        ring.control().data_wish().want(WANT_BYTE);
        if let Some(outgoing) = socket.outgoing()
            && socket.room_waiters.load(Ordering::SeqCst) != 0
        {
            outgoing.control().room_wish().want(WANT_BYTE);
            if end.sending() == Sending::Ring && end.tx.writable(&outgoing) {
                // This byte is theirs, and there may be no other.
                socket.kernel_news.tell();
                return Err(Errno::EAGAIN);
            }
        }
    }
    // What the peer published before it said this on the kernel is visible by now: look again.
    match end.receiver.next(&seen(socket, end, ring, peeked)) {
        Step::Discard(n) => {
            throw_away(socket, end, n as usize);
            socket.kernel_news.tell();
            Ok(None)
        }
        Step::End => match peeked {
            Err(error) => {
                end.pending_error.set(0);
                end.ended.set(2);
                Err(error)
            }
            Ok(_) if channel::is_cut_short(socket, carrier::peer_ended) => {
                end.ended.set(2);
                Err(Errno(end.pending_error.swap(0).max(libc::ECONNRESET as u32) as i32))
            }
            Ok(_) => carrier::end_of_stream(socket, end),
        },
        _ => {
            socket.kernel_news.nothing_since(news);
            socket.bells_left.set(matches!(peeked, Ok(1..)) as u32);
            Ok(None)
        }
    }
}

/// The kernel has reported these events of the descriptor (poll's and epoll's are the same). While the stream comes by the ring, bytes alone are
/// doorbells, and what they ring for is in the ring.
pub fn kernel_tells(socket: &Socket, events: u32) {
    let readable = (libc::POLLIN | libc::POLLRDNORM) as u32;
    let by_ring =
        || socket.stage() == Stage::Attached && socket.end().receiving() == Receiving::Ring;
    if events & !readable == 0 && by_ring() {
        socket.bells_left.set(1);
        socket.kernel_asked.set(sys::ticks());
    } else {
        socket.kernel_tells();
    }
}

/// Takes those doorbells that the peer says it has sent, in one call: they lie in front of all that the kernel may have. True if there were
/// some; then what they ring for is seen by the next look. Receive lock held.
pub fn take_counted_bells(socket: &Socket, end: &End, ring: &SegmentRing, mine: u32) -> bool {
    // (Of an adapter that has died one that was counted may not have gone.)
    if !socket.bells_left.is() || end.receiving() != Receiving::Ring || end.mirrored.is() {
        return false;
    }
    let Ok(taken_before) = carrier::taken(socket, end) else { return false };
    let control = ring.control();
    let taken = bells::take(&control.receiver.taking, &control.sender.bells, |bells| {
        let waiting = end.receiver.bells_end(bells).saturating_sub(taken_before);
        // (None: what the kernel has is no doorbell. Many: `look_at_kernel` takes all of them at one look.)
        let leaves = || others_wait(socket, end, mine) || !end_rests(socket);
        if waiting == 0 || waiting > FEW_BELLS || leaves() {
            return None;
        }
        socket.bells_left.set(0);
        socket.kernel_asked.set(sys::ticks());
        // (By one call: what came behind one that did not go is data at the next.)
        Some(throw_some_away(socket, end, waiting as usize))
    });
    let error = match taken {
        Some(Ok(1..)) => return true,
        None | Some(Err(Errno::EAGAIN)) => return false,
        // The kernel says, in place of one that was counted, how the connection ended: an error once.
        Some(other) => other.err(),
    };
    if let Err(error) = carrier::classify(socket, end, error.map_or(Ok(0), Err)) {
        end.pending_error.set(error.0 as u32);
        end.ended.set(end.ended.get().max(1));
    }
    socket.kernel_news.tell();
    false
}

/// Takes doorbell bytes away, so that the descriptor does not stay readable for a sender that waits on it: it would wake at once, again
/// and again. False if some stay, since they may be another's, or what the kernel has is not known to be doorbells.
pub fn take_bells(socket: &Socket, end: &End, mine: u32) -> bool {
    let Some(ring) = socket.incoming() else { return true };
    let Some(_held) = end.receive_lock.try_take() else { return true };
    if end.receiving() != Receiving::Ring {
        return true;
    }
    if words::published(end, &ring) {
        return take_bells_beside(socket, end, &ring, mine);
    }
    match look_at_kernel(socket, end, &ring, mine) {
        Ok(_) => {}
        Err(Errno::EAGAIN) => return !socket.kernel_news.is(),
        // Nobody was told: the next call is.
        Err(error) => end.pending_error.set(error.0 as u32),
    }
    true
}

/// The same while bytes stand in the ring, which nobody reads now. Receive lock held.
fn take_bells_beside(socket: &Socket, end: &End, ring: &SegmentRing, mine: u32) -> bool {
    // What was counted before no mark stood in the ring is doorbells, as in `receive_kernel`.
    let Ok(waiting) = tcp::unread(socket.fd()) else { return true };
    // One may be for another waiter, who has not yet come to what stands there.
    let leaves = || others_wait(socket, end, mine) || may_sleep_on(socket) || !end_rests(socket);
    if waiting != 0 && leaves() {
        return false;
    }
    // (Where nothing is counted there may be an urgent byte, behind a mark.)
    let bells = end.rx.mark_ahead(ring).is_none() && !channel::is_told(socket);
    if bells {
        throw_away(socket, end, waiting.min(BELLS_AT_ONCE));
    }
    bells
}

/// Takes doorbells that wait in the kernel behind an empty ring. Receive lock held.
pub fn take_unwanted_bells(socket: &Socket, end: &End, incoming: &SegmentRing) {
    match look_at_kernel(socket, end, incoming, 1) {
        Ok(_) | Err(Errno::EAGAIN) => {}
        Err(error) => end.pending_error.set(error.0 as u32),
    }
}

/// Takes `n` doorbells that wait in the kernel. Receive lock held.
pub fn throw_away(socket: &Socket, end: &End, n: usize) {
    let mut left = n;
    while left > 0 {
        match throw_some_away(socket, end, left) {
            Ok(taken @ 1..) => left -= taken,
            _ => return,
        }
    }
}

/// Up to `most` of them, by one call. Receive lock held.
fn throw_some_away(socket: &Socket, end: &End, most: usize) -> Sys<usize> {
    let mut bells = [0u8; 256];
    let most = most.min(bells.len());
    let taken = tcp::receive_into(socket.fd(), &mut bells[..most], libc::MSG_DONTWAIT)?;
    end.receiver.count_taken(taken as u64);
    Ok(taken)
}
