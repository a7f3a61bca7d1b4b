//! Moving the two directions of an attached connection between the kernel and the ring, and the doorbells that wake the peer.
//!
//! The protocol is modelled and checked in `ringlet_core::handover`; this is its form on a real connection, where the kernel counts
//! the bytes (`carrier`). Callers hold the end's receive lock for what concerns the receiving direction and its
//! send lock for the sending one; receive before send.

use super::table::{End, Receiving, Sending, Socket, tables};
use super::{carrier, context, control, view};
use crate::reasons::Reason;
use ringlet_core::layout::{GO_BACK, GONE_BACK, WANT_BYTE, WANT_EVENT, WANT_NOTHING};
use ringlet_core::ring::{Mark, SegmentRing};
use ringlet_core::sync::{AtomicU32, Ordering, fence};
use ringlet_core::wait as flag;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, sys, tcp};

/// Changes of path that one call follows; a peer that changes more often is not sane.
pub const CHANGES_MAX: usize = 16;
/// How long a doorbell byte that is under way is waited for: about half a second.
const RINGING_WAIT_ROUNDS: u32 = 1100;
const RINGING_LOOK_NS: u64 = 500_000;
/// How long a return to the kernel waits for room there, and for the peer to have taken the last doorbell.
const RETURN_WAIT_NS: u64 = 200_000_000;
/// While `Returning`: the peer still takes doorbells, nothing was sent again.
const NOT_YET: u64 = u64::MAX;
const LEAVING_WAIT_ROUNDS: u32 = 500;
const LEAVING_LOOK_NS: u64 = 100_000;

/// Tells the peer, once, that it may send by the ring: when no thread of ours is inside a native receive any more.
pub fn publish_attached(socket: &Socket, end: &End) {
    if socket.published.is() || end.native_receivers.load(Ordering::SeqCst) != 0 {
        return;
    }
    socket.published.set(1);
    if let Some(outgoing) = socket.outgoing() {
        let how = if socket.bell.is() { WANT_EVENT } else { WANT_BYTE };
        // ORDER: SeqCst, after the stage; pairs with `stream::shut_down_before`.
        if end.shut.load(Ordering::SeqCst) != 0 {
            // Our FIN went ahead: the peer is to know that it was no death.
            outgoing.control().sender.shut.store(1, Ordering::Relaxed);
        }
        // ORDER: Release; pairs with `peer_attached` (Acquire).
        outgoing.control().sender.attached.store(how, Ordering::Release);
    }
}

/// Whether the peer is at home in the segment, and how it rings us.
pub fn peer_attached(socket: &Socket) -> u32 {
    // ORDER: Acquire; pairs with `publish_attached` (Release).
    socket.incoming().map_or(0, |ring| ring.control().sender.attached.load(Ordering::Acquire))
}

/// Moves our direction into the ring, if the peer is at home there and nobody is inside a native send.
pub fn try_start(socket: &Socket, end: &End, ring: &SegmentRing) {
    let ready = peer_attached(socket) != 0
        && end.native_senders.load(Ordering::SeqCst) == 0
        && end.ended.get() == 0
        && !end.barred.is()
        && !control::is_away(socket, end, ring)
        && ring.control().receiver.closed.load(Ordering::Acquire) == 0
        && end.tx.drained(ring);
    if !ready {
        return;
    }
    let Some(place) = carrier::start_place(socket, end) else { return };
    if end.tx.is_new() {
        note_move();
    }
    if end.tx.push_mark(ring, Mark::Start(place)) {
        end.sending.set(Sending::Ring as u32);
        super::epoll::sending_changed(socket);
        show_path(socket, end);
        wake_receiver(socket, ring);
    }
}

/// For tests: an end uses the ring for the first time.
#[cold]
fn note_move() {
    if let Some(tables) = tables() {
        super::note(&tables.config.moves, b"moved\n");
    }
}

/// Leaves the ring: what follows goes through the kernel from a known byte on. `to` is `KernelForGood`, or `Kernel` when the ring may be
/// entered again.
pub fn go_back(socket: &Socket, end: &End, ring: &SegmentRing, to: Sending, reason: Reason) {
    if !leave_ring(end, to) {
        corrupt(socket);
        return;
    }
    let Ok(place) = carrier::back_place(socket, end) else { return };
    // Doorbells that nobody wants any more would lie unread: a process that is killed with them there resets the connection, and what
    // the kernel still has to deliver is lost.
    if socket.room_waiters.load(Ordering::SeqCst) == 0 && !super::epoll::watched_by_sleepers(socket)
    {
        ring.control().sender.want_room.store(WANT_NOTHING, Ordering::Relaxed);
    }
    if let (Some(incoming), Some(_held)) = (socket.incoming(), end.receive_lock.try_take())
        && end.receiving() == Receiving::Ring
        && !published(end, &incoming)
    {
        super::stream::take_unwanted_bells(socket, end, &incoming);
    }
    // No doorbell for the mark: what follows through the kernel wakes by itself.
    let _ = end.tx.push_mark(ring, Mark::Back(place));
    super::epoll::sending_changed(socket);
    view::count_return(socket, reason);
    view::show(socket, reason);
    // A receiver that left the ring just now has not seen the mark, nor what is unread before it.
    if has_left(ring) {
        end.sending.set(Sending::Ring as u32);
        let _ = return_unread(socket, end, ring);
    }
}

/// From here on a byte on the kernel's connection is data: no doorbell is under way, and none follows. False if one stays under way (a
/// thread or process of ours was stopped or killed in the middle of it).
fn leave_ring(end: &End, to: Sending) -> bool {
    end.sending.set(to as u32);
    fence(Ordering::SeqCst);
    // ORDER: SeqCst; pairs with `ring_byte`, which counts itself in and then looks where we send.
    await_none(&end.ringers)
}

/// Waits until the word is 0: a system call's time, if whoever holds it runs; in the end long enough for one that was preempted.
fn await_none(word: &AtomicU32) -> bool {
    for round in 0..RINGING_WAIT_ROUNDS {
        if word.load(Ordering::SeqCst) == 0 {
            return true;
        }
        match round {
            0..100 => sys::sched_yield(),
            _ => drop(fd::poll(&mut [], Some(RINGING_LOOK_NS), None)),
        }
    }
    false
}

/// The receiver has left the ring: what it has not released is sent again, through the kernel.
pub fn return_unread(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    let control = ring.control();
    if end.sending() == Sending::Ring {
        if !leave_ring(end, Sending::Returning) {
            return Err(corrupt(socket));
        }
        end.returned.set(NOT_YET);
    }
    if end.returned.get() == NOT_YET {
        // Our last doorbell must be off the kernel before our bytes come; that takes the peer a moment.
        for _ in 0..LEAVING_WAIT_ROUNDS {
            if control.receiver.closed.load(Ordering::Acquire) != GO_BACK {
                break;
            }
            let _ = fd::poll(&mut [], Some(LEAVING_LOOK_NS), None);
        }
        if control.receiver.closed.load(Ordering::Acquire) == GO_BACK {
            return Err(Errno::EAGAIN);
        }
        end.tx.take_credit(ring);
        end.returned.set(control.receiver.used.load(Ordering::Relaxed));
        view::count_return(socket, Reason::Asked);
        view::show(socket, Reason::Asked);
    }
    let mut piece = [0u8; 4096];
    let until = sys::now_ns() + RETURN_WAIT_NS;
    loop {
        let bytes = end.tx.oldest(ring, end.returned.get() as usize, &mut piece);
        if bytes.is_empty() {
            end.returned.set(0);
            if end.tx.pass_oldest(ring) {
                continue;
            }
            end.sending.set(Sending::KernelForGood as u32);
            super::epoll::sending_changed(socket);
            return Ok(());
        }
        match tcp::send_from(socket.fd(), bytes, libc::MSG_DONTWAIT) {
            Ok(n) => {
                end.returned.set(end.returned.get() + n as u64);
            }
            Err(Errno::EAGAIN) if sys::now_ns() < until => {
                let mut room = [fd::pollfd { fd: socket.fd(), events: libc::POLLOUT, revents: 0 }];
                let _ = fd::poll(&mut room, Some(LEAVING_LOOK_NS), None);
            }
            Err(error) => return Err(error),
        }
    }
}

/// The peer may have left the ring while we have nothing to send.
pub fn answer_return(socket: &Socket, end: &End) {
    let Some(outgoing) = socket.outgoing() else { return };
    if matches!(end.sending(), Sending::Ring | Sending::Returning)
        && has_left(&outgoing)
        && let Some(_held) = end.send_lock.try_take()
    {
        let _ = return_unread(socket, end, &outgoing);
    }
}

/// Has the receiver of this ring gone back to the kernel?
pub fn has_left(ring: &SegmentRing) -> bool {
    matches!(ring.control().receiver.closed.load(Ordering::Acquire), GO_BACK | GONE_BACK)
}

/// Moves the sending direction back to the kernel for good. Takes the send lock.
pub fn send_back(socket: &Socket, reason: Reason) {
    let end = socket.end();
    let Some(_held) = end.send_lock.take() else { return };
    let Some(ring) = socket.outgoing() else { return };
    match end.sending() {
        Sending::Ring if has_left(&ring) => {
            let _ = return_unread(socket, end, &ring);
        }
        Sending::Ring => go_back(socket, end, &ring, Sending::KernelForGood, reason),
        Sending::Kernel => end.sending.set(Sending::KernelForGood as u32),
        _ => {}
    }
}

/// Both directions go back to the kernel, for something that knows nothing of rings. Nobody is waited for: we read the ring no more,
/// and the peer sends again, through the kernel, what we have not read, at its next call (or, if it sleeps, now). Takes both locks.
pub fn return_to_kernel(socket: &Socket, reason: Reason) {
    let end = socket.end();
    end.barred.set(reason as u32);
    {
        let Some(_held) = end.receive_lock.take() else { return };
        let Some(ring) = socket.incoming() else { return };
        let _ = settle(socket, end, &ring);
        let control = ring.control();
        if control.receiver.closed.load(Ordering::Relaxed) == 0 {
            let ended = control.sender.shut.load(Ordering::Acquire) != 0 || end.ended.is();
            if ended && end.rx.has_bytes(&ring) {
                // Nobody is left who could send these bytes again: an error that can be seen, not bytes lost in silence.
                carrier::break_off(socket);
            }
            control.receiver.used.store(end.rx.used(), Ordering::Relaxed);
            // ORDER: SeqCst; pairs with the peer's `ring_byte` and, after a publish, with its look in `stream::send_now`.
            control.receiver.closed.store(GO_BACK, Ordering::SeqCst);
            let quiet = await_none(&control.sender.ringing);
            if quiet && !end.rx.has_bytes(&ring) {
                // The peer may have gone back just now, with nothing unread before: its mark is good, whether it saw ours or not.
                let _ = settle(socket, end, &ring);
            }
            match end.receiving() {
                _ if !quiet => drop(corrupt(socket)),
                // The peer has gone back by itself, and sends nothing again.
                Receiving::Ring if end.rx.mark_ahead(&ring).is_some() => carrier::break_off(socket),
                Receiving::Ring => drain_bells(socket.fd()),
                Receiving::Discarding => drop(discard(socket, end)),
                // Data of the kernel's time, and behind it perhaps doorbells, which can't be told apart any more.
                Receiving::Draining
                    if tcp::unread(socket.fd()).unwrap_or(0) as u64 > end.until.get() =>
                {
                    corrupt(socket);
                }
                _ => {}
            }
            end.left.set(1);
            set_receiving(socket, end, Receiving::Kernel);
            control.receiver.closed.store(GONE_BACK, Ordering::SeqCst);
        }
        wake_sender(socket, &ring);
    }
    if let Some(outgoing) = socket.outgoing() {
        context::ring(socket);
        ring_byte(socket, &outgoing);
    }
    send_back(socket, reason);
    carrier::returned(socket, end);
    view::show(socket, reason);
}

/// Takes doorbells off a kernel connection that carries nothing else now.
pub fn drain_bells(fd: i32) {
    let mut bells = [0u8; 256];
    for _ in 0..64 {
        match tcp::receive_into(fd, &mut bells, libc::MSG_DONTWAIT) {
            Ok(1..) => {}
            _ => break,
        }
    }
}

/// No doorbell byte of the peer's is under way any more (it has seen that `closed` is set, or it has rung).
pub fn await_ringing(ring: &SegmentRing) {
    await_none(&ring.control().sender.ringing);
}

/// Follows the marks that stand next, as far as they go without bytes of the program's.
pub fn settle(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    for _ in 0..CHANGES_MAX {
        match end.receiving() {
            Receiving::Kernel if start_met(socket, end, ring)? => {}
            Receiving::Draining if end.until.get() == 0 => {
                set_receiving(socket, end, Receiving::Ring)
            }
            Receiving::Ring => match end.rx.mark(ring) {
                Some(Mark::Back(position)) => back_met(socket, end, ring, position),
                Some(Mark::Start(_)) => return Err(corrupt(socket)),
                None if spoiled(end, ring) => return Err(corrupt(socket)),
                None => return Ok(()),
            },
            Receiving::Discarding => discard(socket, end)?,
            _ => return Ok(()),
        }
    }
    Err(corrupt(socket))
}

/// So many more were taken.
pub fn count_taken(end: &End, bytes: usize) {
    if end.taken.get() != 0 {
        end.taken.add(bytes as u64);
    }
}

/// If the peer's `Start` stands in the ring, sets out for it. True if so.
pub fn start_met(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<bool> {
    match end.rx.mark(ring).filter(|_| !end.left.is()) {
        // The first record of a stay in the ring is a mark.
        None if published(end, ring) && end.rx.mark(ring).is_none() => Err(corrupt(socket)),
        None => Ok(false),
        Some(Mark::Start(start)) => {
            let until = carrier::until_start(socket, end, start)?;
            pass_mark(socket, end, ring);
            end.until.set(until);
            set_receiving(socket, end, Receiving::Draining);
            Ok(true)
        }
        Some(_) => Err(corrupt(socket)),
    }
}

/// Does a record stand next that is neither bytes nor a mark?
fn spoiled(end: &End, ring: &SegmentRing) -> bool {
    published(end, ring) && !end.rx.has_bytes(ring) && end.rx.mark(ring).is_none()
}

/// Goes past a mark, and looks for a sender that waits for its place.
fn pass_mark(socket: &Socket, end: &End, ring: &SegmentRing) {
    if end.rx.pass_mark(ring) {
        wake_sender(socket, ring);
    }
}

pub fn back_met(socket: &Socket, end: &End, ring: &SegmentRing, position: u64) {
    pass_mark(socket, end, ring);
    end.until.set(end.base.get().wrapping_add(position));
    set_receiving(socket, end, Receiving::Discarding);
}

/// Where the stream goes on in the kernel behind what is published, if it does.
pub fn back_ahead(end: &End, ring: &SegmentRing) -> Option<u64> {
    match end.rx.mark_ahead(ring)? {
        Mark::Back(position) => Some(end.base.get().wrapping_add(position)),
        Mark::Start(_) => None,
    }
}

/// Doorbells up to the byte where the peer went back to the kernel.
pub fn discard(socket: &Socket, end: &End) -> Sys<()> {
    if discard_to(socket, end, end.until.get())? {
        set_receiving(socket, end, Receiving::Kernel);
    }
    Ok(())
}

/// Throws away what the kernel has up to this position of the connection. False when it ends before.
pub fn discard_to(socket: &Socket, end: &End, position: u64) -> Sys<bool> {
    let mut bells = [0u8; 256];
    loop {
        let left = position.saturating_sub(carrier::consumed(socket, end)?);
        if left == 0 {
            return Ok(true);
        }
        let n = left.min(bells.len() as u64) as usize;
        let taken = tcp::receive_into(socket.fd(), &mut bells[..n], libc::MSG_DONTWAIT)?;
        if taken == 0 {
            return Ok(false);
        }
        count_taken(end, taken);
    }
}

/// Bytes that wait in the kernel behind this position of the connection.
pub fn unread_after(socket: &Socket, end: &End, position: u64) -> Sys<usize> {
    let arrived = carrier::consumed(socket, end)? + tcp::unread(socket.fd())? as u64;
    Ok(arrived.saturating_sub(position) as usize)
}

pub fn set_receiving(socket: &Socket, end: &End, state: Receiving) {
    end.receiving.set(state as u32);
    if state != Receiving::Ring {
        // What the kernel has told of may be data from now on, and it does not tell again.
        socket.kernel_news.set(1);
    }
    show_path(socket, end);
    if state == Receiving::Ring
        && end.sending() == Sending::Kernel
        && let Some(outgoing) = socket.outgoing()
        && let Some(_held) = end.send_lock.try_take()
    {
        // An end that only receives moves too: its doorbells for room need the ring.
        try_start(socket, end, &outgoing);
    }
}

fn show_path(socket: &Socket, end: &End) {
    let both = end.sending() == Sending::Ring && end.receiving() == Receiving::Ring;
    let young = end.sending() == Sending::Kernel || end.receiving() != Receiving::Ring;
    let reason = if both { Reason::None } else { Reason::Young };
    if both
        || young
            && !end.barred.is()
            && !socket.outgoing().is_some_and(|ring| control::is_away(socket, end, &ring))
            && end.sending() != Sending::KernelForGood
    {
        view::show(socket, reason);
    } else {
        view::show_path(socket);
    }
}

/// The peer wrote what no ringlet writes. Its connection ends as if reset; nothing else is harmed.
#[cold]
pub fn corrupt(socket: &Socket) -> Errno {
    view::show(socket, Reason::BadPeer);
    let end = socket.end();
    end.ended.set(2);
    tcp::reset_on_close(socket.fd());
    let _ = tcp::shut_down(socket.fd(), libc::SHUT_RDWR);
    Errno::ECONNRESET
}

/// After a publish: wakes a receiver that sleeps.
#[inline(always)]
pub fn wake_receiver(socket: &Socket, ring: &SegmentRing) {
    let rung = context::ring_if_armed(socket);
    let how = flag::wanted_by_receiver(&ring.control().receiver.want_data);
    if how & WANT_EVENT != 0 {
        context::ring(socket);
    }
    if how & WANT_BYTE != 0 {
        ring_byte(socket, ring);
    }
    if rung || how != 0 {
        count_bell(socket);
    }
}

/// After a release: wakes a sender that waits for room.
pub fn wake_sender(socket: &Socket, incoming: &SegmentRing) {
    let how = flag::wanted_by_sender(&incoming.control().sender.want_room);
    if how == 0 {
        return;
    }
    count_bell(socket);
    let rung = how & WANT_EVENT != 0 && context::ring(socket);
    if rung && how & WANT_BYTE == 0 {
        return;
    }
    if let Some(outgoing) = socket.outgoing() {
        let end = socket.end();
        if end.sending() == Sending::Kernel
            && let Some(_held) = end.send_lock.try_take()
        {
            // A byte is a doorbell only while we send by the ring.
            try_start(socket, end, &outgoing);
        }
        ring_byte(socket, &outgoing);
    }
}

fn count_bell(socket: &Socket) {
    view::count(socket, |slot| {
        slot.bells.fetch_add(1, Ordering::Relaxed);
    });
}

/// A byte on the kernel connection: only while our direction is in the ring, where it can't be taken for data, and unless the peer has
/// closed (it would answer with a reset) or left. `ringing` lets a peer that closes wait until the byte has arrived; `ringers` the
/// same for a thread of ours that leaves the ring.
fn ring_byte(socket: &Socket, outgoing: &SegmentRing) {
    let end = socket.end();
    let ringing = &outgoing.control().sender.ringing;
    // ORDER: SeqCst, all; pairs with `leave_ring`, `return_to_kernel` and `process::close_ring`.
    end.ringers.fetch_add(1, Ordering::SeqCst);
    ringing.fetch_add(1, Ordering::SeqCst);
    if end.sending() == Sending::Ring
        && outgoing.control().receiver.closed.load(Ordering::SeqCst) == 0
    {
        // ORDER: Relaxed; `leave_ring` has waited for us before anybody reads it.
        end.bells.fetch_add(tcp::ring_byte(socket.fd()) as u64, Ordering::Relaxed);
    }
    ringing.fetch_sub(1, Ordering::SeqCst);
    end.ringers.fetch_sub(1, Ordering::SeqCst);
}

/// Is something published that we have not consumed (bytes or a mark)?
#[inline(always)]
pub fn published(end: &End, incoming: &SegmentRing) -> bool {
    end.rx.ready(incoming) && !end.left.is()
}
