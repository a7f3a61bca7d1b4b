//! When the two directions of an attached connection move between the kernel and the ring.
//!
//! How they move is `ringlet_core::handover`, which is given what is around it by `sides`. Callers hold the end's receive lock for what concerns
//! the receiving direction and its send lock for the sending one; receive before send.

use super::epoll::registration::watched_by_sleepers;
use super::in_use;
use super::patience::wait_patiently;
use super::sides::{
    answer_return, go_back_if_orphan, incoming, measure_written, out, return_unread, ring_byte,
    wake_sender,
};
use super::table::{End, Receiving, Sending, Socket, Stage, tables};
use super::words::{
    bells_end, has_left, has_said_attached, published, reads_on, say_end, sends_uncounted,
};
use super::{bypass, carrier, channel, context, doorbells, orphan, view};
use crate::interconnect::{mirrored, sever};
use crate::reasons::Reason;
pub use ringlet_core::handover::CHANGES_MAX;
use ringlet_core::handover::{Head, Incoming, Outgoing, Step};
use ringlet_core::layout::SHUT_UNREAD;
use ringlet_core::leaving::{Leaving, ReceiverState};
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, sys, tcp};

/// As `publish_attached`, without the receive lock: not while another has it, who does the same.
pub fn publish_attached_aside(socket: &Socket, end: &End) {
    if !socket.published.is()
        && let Some(_held) = end.receive_lock.try_take()
    {
        publish_attached(socket, end);
    }
}

/// Tells the peer, once, that it may send by the ring: when no thread of ours is inside a native receive any more. Receive lock held.
pub fn publish_attached(socket: &Socket, end: &End) {
    if socket.published.is() || end.native_receivers.load(Ordering::SeqCst) != 0 {
        return;
    }
    // ORDER: SeqCst, behind the stage; pairs with `pin::to_kernel`: who barred the connection before it was attached, and now goes on with
    // the kernel alone, is seen here.
    fence(Ordering::SeqCst);
    if end.barred.is() || !carrier::begin_count(socket, end) {
        return;
    }
    socket.published.set(1);
    if let Some(outgoing) = socket.outgoing() {
        let how = context::rings(socket);
        // ORDER: SeqCst, after the stage; pairs with `shut::before`.
        if end.shut.load(Ordering::SeqCst) != 0 {
            // Our FIN went ahead: the peer is to know that it was no death.
            outgoing.control().sender.shut.store(1, Ordering::Relaxed);
        }
        // ORDER: Release; pairs with `words::peer_attached` (Acquire).
        outgoing.control().sender.attached.store(how, Ordering::Release);
        mirrored::said(socket);
    }
}

/// Leaves the ring: what follows goes through the kernel from a known byte on. `to` is `KernelForGood`, or `Kernel` when the ring may be
/// entered again.
#[cold]
pub fn go_back(socket: &Socket, end: &End, ring: &SegmentRing, to: Sending, reason: Reason) {
    // Doorbells that nobody wants any more would lie unread: a process that is killed with them there resets the connection, and
    // what the kernel still has to deliver is lost.
    if socket.room_waiters.load(Ordering::SeqCst) == 0 && !watched_by_sleepers(socket) {
        ring.control().room_wish().withdraw();
    }
    if let (Some(incoming), Some(_held)) = (socket.incoming(), end.receive_lock.try_take())
        && end.receiving() == Receiving::Ring
        && !published(end, &incoming)
    {
        doorbells::take_unwanted_bells(socket, end, &incoming);
    }
    if out(socket, end, ring, reason).go_back(to).is_err() {
        orphan::go_back(socket, end, ring, false);
    }
}

/// For what only the kernel carries: our direction is there now, and may enter the ring again. Send lock held.
pub fn step_aside(socket: &Socket, end: &End, ring: &SegmentRing, reason: Reason) -> Sys<()> {
    if end.sending() == Sending::Ring {
        go_back(socket, end, ring, Sending::Kernel, reason);
    }
    let returned = match end.sending() {
        Sending::Ring | Sending::Returning => return_unread(socket, end, ring),
        _ => Ok(()),
    };
    // (Behind it, which says how much it was so far.)
    sends_uncounted(end, ring);
    returned
}

/// Says how our direction ends. What is to be sent again comes before: false if the kernel has no room for that now.
#[must_use]
pub fn end_direction(socket: &Socket, end: &End, ring: &SegmentRing, how: u32) -> bool {
    ring.control().sender.shut_at.store(sys::ticks(), Ordering::Relaxed);
    let side = out(socket, end, ring, Reason::Closing);
    let ends = || {
        let ended = side.end(|| say_end(ring, how));
        if ended.is_ok() {
            side.flush(false);
        }
        ended
    };
    let ended = match ends() {
        Ok(()) if end.sending() == Sending::Returning => ends(),
        Err(Errno::ECONNRESET) if orphan::go_back(socket, end, ring, false) => ends(),
        other => other,
    };
    match ended {
        Ok(()) => true,
        Err(Errno::EAGAIN) => false,
        Err(_) => {
            break_off(socket, ring);
            true
        }
    }
}

fn break_off(socket: &Socket, ring: &SegmentRing) {
    carrier::break_off(socket);
    say_end(ring, SHUT_UNREAD);
}

/// The same for a close, after which nobody goes on with what is to be sent again: what the kernel has no room for breaks the connection off.
pub fn end_direction_now(socket: &Socket, end: &End, ring: &SegmentRing, how: u32) {
    if end_direction(socket, end, ring, how) {
        return;
    }
    make_room(socket, end, ring);
    if !wait_patiently(|| end_direction(socket, end, ring, how)) {
        break_off(socket, ring);
    }
}

/// Nobody goes on with what is being sent again: the kernel may take all of it, and delivers it at the peer's pace.
fn make_room(socket: &Socket, end: &End, ring: &SegmentRing) {
    tcp::widen_sending(socket.fd(), end.tx.outstanding_bytes(ring));
}

/// Before this process ends, or becomes another program: goes on with what is being sent again. What the kernel has no room for would be
/// missing behind an orderly end, so then the end is a reset, unless others of the family go on with it until all is sent.
pub fn finish_return(socket: &Socket, end: &End) {
    let Some(_in_use) = in_use::in_use(socket) else { return };
    go_back_if_orphan(socket);
    answer_return(socket, end);
    let has_left = || socket.outgoing().is_some_and(|outgoing| has_left(&outgoing));
    if end.sending() != Sending::Returning && !has_left() {
        // (As of most that end. Whether others have it too is a question to the kernel for each of them.)
        return;
    }
    let alone = tables().is_some_and(|tables| tables.holders.is_alone(&end.holders));
    if alone
        && end.sending() == Sending::Returning
        && let Some(outgoing) = socket.outgoing()
        && let Some(_held) = end.send_lock.take()
    {
        make_room(socket, end, &outgoing);
    }
    if alone
        && let Some(incoming) = socket.incoming()
        && has_left()
        && let Some(_held) = end.receive_lock.try_take()
    {
        // The doorbells of a peer that has left: unread, they would make the end a reset, which takes with it what is not delivered.
        let _ = settle(socket, end, &incoming);
    }
    if alone && is_sent_again(socket, end) {
        return;
    }
    let Some(_held) = end.send_lock.take() else { return };
    if end.sending() == Sending::Returning {
        carrier::exiting_unsent(socket, end);
    }
}

/// Goes on with what is being sent again, for a while. False if some is left.
fn is_sent_again(socket: &Socket, end: &End) -> bool {
    wait_patiently(|| {
        if end.sending() == Sending::Returning {
            answer_return(socket, end);
        }
        end.sending() != Sending::Returning
    })
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
        Sending::Kernel => end.sender.keep_out(),
        _ => {}
    }
}

/// Both directions go back to the kernel, for something that knows nothing of rings. Nobody is waited for: we read the ring no more,
/// and the peer sends again, through the kernel, what we have not read, at its next call (or, if it sleeps, now). Takes both locks.
///
/// False if what the kernel has is not the stream, since nobody could send again what lies before it, or what we have to send again finds no
/// room there: whoever goes through ringlet still gets and sends all, in order, but a stranger must not get the descriptor.
#[must_use]
pub fn return_to_kernel(socket: &Socket, reason: Reason) -> bool {
    let end = socket.end();
    let mut whole = true;
    go_back_if_orphan(socket);
    end.barred.set(reason as u32);
    {
        let Some(_held) = end.receive_lock.take() else { return true };
        let Some(ring) = socket.incoming() else { return true };
        // (An error is told by the next call. What an adapter that is dead leaves to the peer comes back by itself.)
        if end.mirrored.get() != mirrored::NEEDS_NO_ADAPTER {
            let _ = incoming(socket, end, &ring).leave(reads_on(reason));
            go_back_if_orphan(socket);
        }
        if !reads_on(reason) {
            whole = hand_over(socket, end, &ring);
        }
        wake_sender(socket, &ring);
    }
    if let Some(outgoing) = socket.outgoing()
        && let Some(incoming) = socket.incoming()
        && end.receiver.has_left()
        && end.rx.has_bytes(&incoming)
    {
        // The peer may sleep, and has something to send again. (A doorbell for nothing would be unread if it is killed.)
        mirrored::ring_event(socket);
        ring_byte(socket, &outgoing);
    }
    send_back(socket, reason);
    if !reads_on(reason)
        && let Some(outgoing) = socket.outgoing()
    {
        // What a stranger sends there we do not see. (Behind the mark, which says how much it was so far.)
        let _held = end.send_lock.take();
        sends_uncounted(end, &outgoing);
    }
    // What another program sends must not come before what is still to be sent again.
    whole &= reads_on(reason) || is_sent_again(socket, end);
    carrier::tune(socket, end);
    view::show(socket, reason);
    whole
}

/// All connections of this process are about to go back: the peer of one may be another of them, which can send again what is unread here only
/// before it has gone back itself.
pub fn leave_early(socket: &'static Socket) {
    // Another thread that closes it leaves it to us.
    let _in_use = in_use::Waiter::new(socket);
    let end = socket.end();
    if socket.stage() == Stage::Attached
        && end.mirrored.get() != mirrored::NEEDS_NO_ADAPTER
        && let Some(_held) = end.receive_lock.take()
        && let Some(ring) = socket.incoming()
    {
        // (An error is told by the next call.)
        let _ = incoming(socket, end, &ring).leave(false);
    }
}

/// We have left, and the peer has not yet begun to send again what stands unread in the ring.
pub fn is_owed(socket: &'static Socket) -> bool {
    let _in_use = in_use::Waiter::new(socket);
    let end = socket.end();
    socket.stage() == Stage::Attached
        && end.receiver.has_left()
        && socket.incoming().is_some_and(|ring| {
            let state = incoming(socket, end, &ring).words().receiver_state();
            state == ReceiverState::Leaves && end.rx.has_bytes(&ring)
        })
}

/// Before somebody gets the descriptor who reads only the kernel's: false if what that one would read is not the stream.
fn hand_over(socket: &Socket, end: &End, ring: &SegmentRing) -> bool {
    // Doorbells that were sent may not have arrived; or what the peer says of its adapter's death.
    // (To one that has left it says it in vain, and then sends again behind what that had.)
    // (Before we have said that we are there it sends by the kernel alone; and it may never come, and say nothing.)
    let wants_word = end.mirrored.get() == mirrored::NEEDS_NO_ADAPTER
        && !end.receiver.has_left()
        && has_said_attached(socket);
    let is_known = || !wants_word || channel::is_told(socket);
    wait_patiently(|| settle(socket, end, ring) != Err(Errno::EAGAIN) && is_known());
    // Where the ring never had anything there was no doorbell either, and what is sent again follows on what came before: TCP has no gap in between.
    let all_in_kernel = || carrier::facts(socket).counts_places && end.rx.end(ring) == 0;
    if !is_known() && !all_in_kernel() {
        return false;
    }
    match end.receiving() {
        Receiving::Kernel => true,
        Receiving::Ring => !end.rx.has_bytes(ring),
        // Doorbells behind the data could not be told from what follows.
        Receiving::Draining => {
            let receiver = &end.receiver;
            receiver.has_left() && bells_end(end, ring) == receiver.bells_end(0)
        }
        Receiving::Discarding => false,
    }
}

/// Takes the doorbells off the kernel's connection before it is closed: unread, they would make the kernel end it by a reset. One that
/// comes later does so too. The peer knows that it was a doorbell only (`carrier::tcp::fin_by_death`, `carrier::unix_stream::judge`), so that is waited for no
/// longer than some looks; but a reset takes with it what the kernel has not yet sent of ours. After the ring was closed.
pub fn drain_bells(socket: &Socket, end: &End, ring: &SegmentRing) {
    let side = incoming(socket, end, ring);
    if end.mirrored.is() && sever::has_died(socket) {
        // (`close_orphan`)
        return;
    }
    let drained = || {
        // What comes while we look is the peer's affair.
        let waiting = tcp::unread(socket.fd()).unwrap_or(0) as u64;
        let here = side.taken().unwrap_or(0).saturating_add(waiting);
        side.is_quiet()
            && side.discard_to(bells_end(end, ring).min(here)) == Ok(true)
            && side.taken().is_ok_and(|taken| taken >= bells_end(end, ring))
    };
    if !drained() && carrier::undelivered(socket) > 0 {
        let has_died = || end.mirrored.is() && sever::has_died(socket);
        wait_patiently(|| carrier::undelivered(socket) == 0 || has_died() || drained());
    }
}

/// How long another thread that holds a lock at the process's end is waited for: 20 ms.
const HELD_LOOKS: usize = 200;
const HELD_LOOK_NS: u64 = 100_000;

/// This process is about to end with this connection open, and nobody else holds it. KERNEL: who ends with bytes unread ends by a reset, which takes
/// with it what is not yet sent. So, as before a close, doorbells are taken away, and the peer puts none behind them: it sends by the kernel from
/// now on. What this end still does is served.
pub fn drain_before_end(socket: &Socket, end: &End) {
    if !loses_by_bells(socket, end) {
        return;
    }
    let Some(_in_use) = in_use::in_use(socket) else { return };
    let mut held = end.receive_lock.try_take();
    // (Of a thread that another one waits for, in a handler, it may never be had; nor of the frame that our own handler has interrupted.)
    for _ in 0..HELD_LOOKS {
        if held.is_some() || end.receive_lock.is_ours() {
            break;
        }
        let _ = fd::poll(&mut [], Some(HELD_LOOK_NS), None);
        held = end.receive_lock.try_take();
    }
    let (Some(_held), Some(ring)) = (held, socket.incoming()) else { return };
    let side = incoming(socket, end, &ring);
    // With bytes unread a reset is what the kernel makes of it, too. (To one that has left nobody rings.)
    if end.rx.has_bytes(&ring) || !end.receiver.has_left() && side.close() {
        return;
    }
    match end.receiving() {
        Receiving::Ring => drain_bells(socket, end, &ring),
        Receiving::Discarding => {
            wait_patiently(|| carrier::undelivered(socket) == 0 || side.settle() != Ok(false));
        }
        _ => {}
    }
}

/// Is there something to be lost by a doorbell that is unread? (Who has given the descriptor away has taken them already. Who has closed itself in may
/// not ask.)
pub fn loses_by_bells(socket: &Socket, end: &End) -> bool {
    socket.stage() == Stage::Attached
        && !bypass::is_closed_in()
        && !end.mirrored.is()
        && !end.given.is()
        && carrier::undelivered(socket) > 0
}

/// Our end is about to be closed, and its adapter is dead. What the peer sends again that we have had must not come behind that: the kernel would
/// answer with a reset. So we say first how much we have had, and then look what it has said: one of the two hears the other. Both locks held.
pub fn close_orphan(socket: &Socket, end: &End) {
    let (Some(outgoing), Some(ring)) = (socket.outgoing(), socket.incoming()) else { return };
    orphan::go_back(socket, end, &outgoing, false);
    channel::close(socket);
    // What waits before the peer has said that it goes on there is doorbells.
    let waiting = tcp::unread(socket.fd()).unwrap_or(0);
    let side = incoming(socket, end, &ring);
    let _ = side.settle();
    if end.receiving() == Receiving::Ring {
        doorbells::throw_away(socket, end, waiting);
    } else if channel::hear(socket).is_some_and(|word| word.in_ring) {
        wait_patiently(|| side.settle() != Ok(false));
    }
}

/// Somebody gets the descriptor who knows of no channel, and reads what the peer sends again for us: what we had of that is taken away before.
/// False if it has not all come.
pub fn give_channel(socket: &Socket) -> bool {
    channel::close(socket);
    let end = socket.end();
    if !end.receiver.has_left() || !channel::is_told(socket) {
        return true;
    }
    let (Some(_held), Some(ring)) = (end.receive_lock.take(), socket.incoming()) else {
        return true;
    };
    let side = incoming(socket, end, &ring);
    wait_patiently(|| side.settle() == Ok(true) && end.receiving() == Receiving::Kernel)
}

/// Follows the marks that stand next, as far as they go without bytes of the program's.
pub fn settle(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    match incoming(socket, end, ring).settle()? {
        true => Ok(()),
        // Our own end; the doorbells may still come.
        false => Err(Errno::EAGAIN),
    }
}

/// What is to be done by what was seen in the kernel; `None`: look again, the path has changed.
pub fn follow(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    ended: bool,
    waiting: usize,
) -> Sys<Option<Step>> {
    incoming(socket, end, ring).follow(ended, waiting as u64)
}

/// The peer's `Back` stands next in the ring.
#[cold]
pub fn back_met(socket: &Socket, end: &End, ring: &SegmentRing, place: u64) {
    incoming(socket, end, ring).back_met(place);
}

/// Doorbells up to the byte where the peer went back to the kernel; then what a receive has found: look again, or nothing for now (see
/// `Incoming::discard`).
pub fn discard(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<Option<usize>> {
    incoming(socket, end, ring).discard().map(|done| if done { None } else { Some(0) })
}

/// Does a record stand next that is neither bytes nor a mark?
pub fn is_spoiled(socket: &Socket, end: &End, ring: &SegmentRing) -> bool {
    !end.receiver.has_left() && incoming(socket, end, ring).head() == Head::Spoiled
}

/// Behind the stage: who writes from now on counts it, and who wrote before is seen to be still there (`native_senders`).
pub fn written_so_far(socket: &Socket, end: &End) {
    if let (Some(ring), Some(_held)) = (socket.outgoing(), end.send_lock.try_take()) {
        measure_written(socket, end, &ring);
    }
}

/// Bytes that wait in the kernel behind this position of the connection.
pub fn unread_after(socket: &Socket, end: &End, position: u64) -> Sys<usize> {
    let arrived = carrier::taken(socket, end)? + tcp::unread(socket.fd())? as u64;
    Ok(arrived.saturating_sub(position) as usize)
}
