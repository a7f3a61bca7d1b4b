//! Moving the two directions of an attached connection between the kernel and the ring, and the doorbells that wake the peer.
//!
//! The protocol is modelled and checked in `ringlet_core::handover`; this is its form on a real connection, where the kernel counts
//! the bytes (`carrier`). Callers hold the end's receive lock for what concerns the receiving direction and its
//! send lock for the sending one; receive before send.

use super::in_use;
use super::table::{End, Receiving, Sending, Socket, tables};
use super::{carrier, context, unix, view};
use crate::plain::P64;
use crate::reasons::Reason;
use ringlet_core::bells;
use ringlet_core::layout::{SHUT, SHUT_UNREAD, WANT_BYTE, WANT_EVENT};
use ringlet_core::leaving::ReceiverState;
use ringlet_core::ring::{Mark, SegmentRing};
use ringlet_core::sync::{AtomicU32, Ordering, fence};
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, sys, tcp};

/// Changes of path that one call follows; a peer that changes more often is not sane.
pub const CHANGES_MAX: usize = 16;
/// How long a doorbell byte of our own family's that is under way is waited for: about half a second.
const RINGERS_WAIT_ROUNDS: u32 = 1100;
const RINGERS_LOOK_NS: u64 = 500_000;
/// Looks at a word of the peer's in a row: some microseconds.
const QUICK_LOOKS: u32 = 200;
/// What all peers together may make this process wait: so long, and then a hundredth of the time that passes (`wait_patiently`).
const PATIENCE_NS: u64 = 200_000_000;
const PATIENCE_SHARE: u64 = 100;
const PATIENT_LOOK_NS: u64 = 100_000;
/// No kernel holds so many doorbells: who says that they are more is not sane.
const BELLS_MAX: u64 = 8 << 20;

/// Tells the peer, once, that it may send by the ring: when no thread of ours is inside a native receive any more.
pub fn publish_attached(socket: &Socket, end: &End) {
    if socket.published.is() || end.native_receivers.load(Ordering::SeqCst) != 0 {
        return;
    }
    // ORDER: SeqCst, behind the stage; pairs with `Socket::bar`: who barred the connection before it was attached, and now goes on with
    // the kernel alone, is seen here.
    fence(Ordering::SeqCst);
    if end.barred.is() {
        return;
    }
    socket.published.set(1);
    if let Some(outgoing) = socket.outgoing() {
        let how = context::rings(socket);
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

/// Moves our direction into the ring, if it is not there, the peer is at home there and nobody is inside a native send. Send lock held: who
/// looked without it whether this is to be done may find it done.
pub fn try_start(socket: &Socket, end: &End, ring: &SegmentRing) {
    let ready = end.sending() == Sending::Kernel
        && peer_attached(socket) != 0
        && end.native_senders.load(Ordering::SeqCst) == 0
        && end.ended.get() == 0
        && !end.barred.is()
        && !view::is_away(socket, end, ring)
        && ring.control().is_taken()
        && end.tx.drained(ring);
    if !ready {
        return;
    }
    let Some(place) = carrier::start_place(socket, end) else { return };
    if end.tx.is_new() {
        note_move();
    }
    end.started.set(place);
    // ORDER: Relaxed; who reads it has seen the mark.
    ring.control().sender.bells.store(0, Ordering::Relaxed);
    end.bell_lost.set(0);
    note_written(ring, place);
    if end.tx.push_mark(ring, Mark::Start(place)) {
        end.sending.set(Sending::Ring as u32);
        end.bells_only.set(1);
        super::epoll::sending_changed(socket);
        show_path(socket, end);
        wake_receiver(socket, ring);
    }
}

/// Our direction stays on the kernel for good; the peer is asked to leave the ring too, since only who sends by the ring can ring for
/// room there. Send lock held.
#[cold]
pub fn keep_out(socket: &Socket, end: &End, reason: Reason) {
    end.barred.set(reason as u32);
    if let Some(incoming) = socket.incoming() {
        // ORDER: as in `control::notice`.
        incoming.control().receiver.keep_out.store(1, Ordering::SeqCst);
        context::ring(socket);
    }
    view::show(socket, reason);
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
    for _ in 0..CHANGES_MAX {
        if !leave_ring(end, ring, to) {
            corrupt(socket);
            return;
        }
        let place = match carrier::back_place(socket, end, ring) {
            Ok(place) => place,
            Err(Errno::ERANGE | Errno::EAGAIN) => {
                miscounted(socket);
                return;
            }
            Err(_) => return,
        };
        note_written(ring, place);
        // Doorbells that nobody wants any more would lie unread: a process that is killed with them there resets the connection, and
        // what the kernel still has to deliver is lost.
        if socket.room_waiters.load(Ordering::SeqCst) == 0
            && !super::epoll::watched_by_sleepers(socket)
        {
            ring.control().room_wish().withdraw();
        }
        if let (Some(incoming), Some(_held)) = (socket.incoming(), end.receive_lock.try_take())
            && end.receiving() == Receiving::Ring
            && !published(end, &incoming)
        {
            super::stream::take_unwanted_bells(socket, end, &incoming);
        }
        // No doorbell for the mark: what follows through the kernel wakes by itself.
        let push = || {
            // (There is always room for it.)
            end.tx.push_mark(ring, Mark::Back(place));
        };
        if unless_left(ring, push) {
            super::epoll::sending_changed(socket);
            view::count_return(socket, reason);
            view::show(socket, reason);
            return;
        }
        // The receiver has gone first, and what it has not read is to be sent again.
        end.sending.set(Sending::Ring as u32);
        let _ = return_unread(socket, end, ring);
        if end.sending() != Sending::Ring {
            return;
        }
    }
    corrupt(socket);
}

/// What a sender does for good to the ring without knowing that its receiver has left: a mark, its end. False, and not done, if the
/// receiver has left. One that leaves waits for us between the two, and so it finds what was done, or was seen to leave: never both,
/// never neither.
pub fn unless_left(ring: &SegmentRing, act: impl FnOnce()) -> bool {
    let working = ring.control().work();
    let stays = !working.has_left();
    if stays {
        act();
    }
    stays
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

/// From here on a byte on the kernel's connection is data: no doorbell is under way, and none follows. False if one stays under way (a
/// thread or process of ours was stopped or killed in the middle of it), or the peer stays in the middle of taking one that did not go.
fn leave_ring(end: &End, ring: &SegmentRing, to: Sending) -> bool {
    end.sending.set(to as u32);
    fence(Ordering::SeqCst);
    // ORDER: SeqCst; pairs with `ring_byte`, which counts itself in and then looks where we send.
    let quiet = || bells::nobody_takes(&ring.control().receiver.taking);
    await_none(&end.ringers) && (!end.bell_lost.is() || wait_patiently(quiet))
}

/// Waits until the word, which only our family writes, is 0: a system call's time, if whoever holds it runs; in the end long enough for
/// one that was preempted.
fn await_none(word: &AtomicU32) -> bool {
    for round in 0..RINGERS_WAIT_ROUNDS {
        if word.load(Ordering::SeqCst) == 0 {
            return true;
        }
        match round {
            0..100 => sys::sched_yield(),
            _ => drop(fd::poll(&mut [], Some(RINGERS_LOOK_NS), None)),
        }
    }
    false
}

/// Is no thread of the peer's at a doorbell, or about to leave the ring? It may say so for ever: some quick looks, and no wait.
fn is_quiet(ring: &SegmentRing) -> bool {
    (0..QUICK_LOOKS).any(|_| {
        core::hint::spin_loop();
        ring.control().is_quiet()
    })
}

/// When what was waited for peers is made up for.
static PATIENT_AGAIN_NS: P64 = P64::new(0);

/// Waits for what an honest peer does soon, and a hostile one never. What a hostile one can gain by it is bounded for all peers of the
/// process together. False if it was not done.
fn wait_patiently(mut done: impl FnMut() -> bool) -> bool {
    loop {
        if done() {
            return true;
        }
        let before = sys::now_ns();
        let owed = PATIENT_AGAIN_NS.get().saturating_sub(before);
        if owed >= PATIENCE_NS * PATIENCE_SHARE {
            return false;
        }
        let _ = fd::poll(&mut [], Some(PATIENT_LOOK_NS), None);
        // (At least so long: a clock that stands still must not make it last for ever.)
        let waited = sys::now_ns().saturating_sub(before).max(PATIENT_LOOK_NS);
        PATIENT_AGAIN_NS.set(before + owed + waited.saturating_mul(PATIENCE_SHARE));
    }
}

/// Says how our direction ends. What is to be sent again comes before: false if the kernel has no room for that now.
#[must_use]
pub fn end_direction(socket: &Socket, end: &End, ring: &SegmentRing, how: u32) -> bool {
    ring.control().sender.shut_at.store(sys::ticks(), Ordering::Relaxed);
    for _ in 0..CHANGES_MAX {
        match end.sending() {
            Sending::Ring if unless_left(ring, || say_end(ring, how)) => return true,
            Sending::Ring | Sending::Returning => {}
            _ => {
                say_end(ring, how);
                return true;
            }
        }
        match return_unread(socket, end, ring) {
            Ok(()) => {}
            Err(Errno::EAGAIN) => return false,
            Err(_) => break,
        }
    }
    break_off(socket, ring);
    true
}

fn say_end(ring: &SegmentRing, how: u32) {
    // ORDER: Release; pairs with `peer_is_over`, `stream::died_unread`, `stream::fin_by_death` and `unix::judge`; the end itself follows
    // through the kernel.
    ring.control().sender.shut.store(how, Ordering::Release);
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

/// The receiver has left the ring: what it has not released is sent again, through the kernel. (Where it takes that back all stays as
/// it was.) `EAGAIN` when the kernel is full: every later call goes on with it, and whoever sleeps on the connection is woken for it.
/// Send lock held: who looked without it may find it done.
pub fn return_unread(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    let control = ring.control();
    if end.sending() == Sending::Ring {
        if !ring.control().work().answer() {
            // It has not been rung for meanwhile.
            ring_byte(socket, ring);
            return Ok(());
        }
        if !leave_ring(end, ring, Sending::Returning) {
            return Err(corrupt(socket));
        }
        end.tx.take_credit(ring);
        end.returned.set(control.receiver.used.load(Ordering::Relaxed));
        view::count_return(socket, Reason::Asked);
        view::show(socket, Reason::Asked);
    }
    if end.sending() != Sending::Returning {
        return Ok(());
    }
    let mut piece = [0u8; 2048];
    loop {
        let packet = if socket.is_packets() { end.tx.oldest_packet(ring) } else { None };
        let bytes = match packet {
            None => end.tx.oldest(ring, end.returned.get() as usize, &mut piece),
            Some(_) => &[],
        };
        if packet.is_some() || !bytes.is_empty() {
            sends_uncounted(end, ring);
        }
        let sent = match &packet {
            Some(packet) => unix::send_again(socket, ring, packet).map(|()| 0),
            None if bytes.is_empty() => Ok(0),
            None => tcp::send_from(socket.fd(), bytes, libc::MSG_DONTWAIT),
        };
        match sent {
            Ok(0) => {
                end.returned.set(0);
                if end.tx.pass_oldest(ring) {
                    continue;
                }
                end.sending.set(Sending::KernelForGood as u32);
                // (Whoever has the descriptor beside us sends what we do not see.)
                if !end.given.is() && (!end.barred.is() || still_reads_on(end)) {
                    measure_written(socket, end, ring);
                }
                linger_again(socket, end);
                super::epoll::sending_changed(socket);
                if end.shut_later.swap(0) != 0 {
                    say_end(ring, SHUT);
                    let _ = tcp::shut_down(socket.fd(), libc::SHUT_WR);
                }
                return Ok(());
            }
            Ok(n) => {
                end.returned.set(end.returned.get() + n as u64);
            }
            Err(error) => {
                if error == Errno::EAGAIN {
                    // Sleepers are woken when there is room.
                    super::epoll::sending_changed(socket);
                }
                return Err(error);
            }
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

/// Before this process ends, or becomes another program: goes on with what is being sent again. What the kernel has no room for would be
/// missing behind an orderly end, so then the end is a reset, unless others of the family go on with it until all is sent.
pub fn finish_return(socket: &Socket, end: &End) {
    let Some(_in_use) = in_use::in_use(socket) else { return };
    answer_return(socket, end);
    let alone = end.holders.load(Ordering::Acquire) <= 1;
    if alone
        && end.sending() == Sending::Returning
        && let Some(outgoing) = socket.outgoing()
        && let Some(_held) = end.send_lock.take()
    {
        make_room(socket, end, &outgoing);
    }
    if alone
        && let Some(incoming) = socket.incoming()
        && socket.outgoing().is_some_and(|outgoing| has_left(&outgoing))
        && let Some(_held) = end.receive_lock.try_take()
    {
        // The doorbells of a peer that has left: unread, they would make the end a reset, which takes with it what is not delivered.
        let _ = settle(socket, end, &incoming);
    }
    if alone && is_sent_again(socket, end) || socket.is_unix() {
        return;
    }
    let Some(_held) = end.send_lock.take() else { return };
    if end.sending() != Sending::Returning {
        return;
    }
    if let Ok([on, seconds]) = tcp::linger(socket.fd())
        && end.linger.get() == 0
    {
        end.linger.set(LINGER_KEPT | (on as u64) << 32 | u64::from(seconds as u32));
    }
    tcp::reset_on_close(socket.fd());
}

const LINGER_KEPT: u64 = 1 << 63;

/// All is sent again, so that the end need not be a reset.
fn linger_again(socket: &Socket, end: &End) {
    if let linger @ 1.. = end.linger.get() {
        end.linger.set(0);
        tcp::set_linger(socket.fd(), [(linger >> 32 & 1) as i32, linger as i32]);
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

/// Has the receiver of this ring gone back to the kernel?
pub fn has_left(ring: &SegmentRing) -> bool {
    ring.control().has_left()
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
///
/// False if what the kernel has is not the stream, since nobody could send again what lies before it, or what we have to send again finds no
/// room there: whoever goes through ringlet still gets and sends all, in order, but a stranger must not get the descriptor.
#[must_use]
pub fn return_to_kernel(socket: &Socket, reason: Reason) -> bool {
    let end = socket.end();
    let mut whole = true;
    end.barred.set(reason as u32);
    {
        let Some(_held) = end.receive_lock.take() else { return true };
        let Some(ring) = socket.incoming() else { return true };
        if ring.control().is_taken() {
            leave_incoming(socket, end, &ring, reads_on(reason));
        }
        if !reads_on(reason) {
            whole = hand_over(socket, end, &ring);
        }
        wake_sender(socket, &ring);
    }
    if let Some(outgoing) = socket.outgoing()
        && let Some(incoming) = socket.incoming()
        && end.left.is()
        && end.rx.has_bytes(&incoming)
    {
        // The peer may sleep, and has something to send again. (A doorbell for nothing would be unread if it is killed.)
        context::ring(socket);
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

/// Does every call of the program's still come through here? Then what stands in the ring can be read from there.
fn reads_on(reason: Reason) -> bool {
    matches!(reason, Reason::Unforgiving | Reason::Option)
}

/// The same, where we have left already.
fn still_reads_on(end: &End) -> bool {
    Reason::from_u32(end.barred.get()).is_some_and(reads_on)
}

/// The receiver leaves the ring: the peer sends again what is unread. Unless it has gone back or ended first, not knowing of this: then
/// all is read where it stands. So it is if the program `reads_on` here, since the peer might be long in sending it again: then the peer is
/// asked to go back when it sends the next time. Receive lock held.
fn leave_incoming(socket: &Socket, end: &End, ring: &SegmentRing, reads_on: bool) {
    let _ = settle(socket, end, ring);
    let control = ring.control();
    let unread = || end.receiving() != Receiving::Kernel && end.rx.has_bytes(ring);
    if reads_on && (unread() || !is_quiet(ring)) {
        control.receiver.keep_out.store(1, Ordering::SeqCst);
        return;
    }
    // ORDER: pairs with the peer's `ring_byte` and `unless_left` and, after a publish, with its look in `stream::send_now`.
    control.leave(end.rx.used());
    let quiet = || is_quiet(ring) || wait_patiently(|| control.is_quiet());
    if !quiet() {
        corrupt(socket);
        return;
    }
    // What the peer did unaware of it is there now.
    let _ = settle(socket, end, ring);
    if unread() && (back_ahead(end, ring).is_some() || peer_is_over(socket, ring)) {
        return;
    }
    if unread() && reads_on {
        match control.stay(quiet) {
            Some(true) => {
                control.receiver.keep_out.store(1, Ordering::SeqCst);
                return;
            }
            Some(false) => {}
            None => {
                corrupt(socket);
                return;
            }
        }
    }
    end.left.set(1);
    if end.receiving() == Receiving::Ring {
        leave_for_bells(socket, end, ring);
    }
    let _ = settle(socket, end, ring);
}

/// Has the peer ended, in whatever way, without sending anything again?
pub fn peer_is_over(socket: &Socket, ring: &SegmentRing) -> bool {
    let control = ring.control();
    // ORDER: Acquire; pairs with `stream::shut_down` and `process::close_ring`, which answer before that.
    let over = control.sender.shut.load(Ordering::Acquire) != 0 || carrier::peer_ended(socket);
    over && control.receiver_state() == ReceiverState::Leaves
}

/// The kernel says that no more bytes come. Did the peer end without sending again what stands unread in the ring? Then it is read there.
pub fn take_up(socket: &Socket, end: &End, ring: &SegmentRing) -> bool {
    // (What the sender has answered it has answered before its end, which the kernel has told: nobody is waited for.)
    let stays = || ring.control().stay(|| true) == Some(true);
    let unread = end.left.is()
        && end.rx.has_bytes(ring)
        && ring.control().receiver_state() == ReceiverState::Leaves
        && stays();
    if unread {
        end.left.set(0);
        set_receiving(socket, end, Receiving::Ring);
    }
    unread
}

/// The end of the kernel's bytes before the ring was reached.
pub fn drained(socket: &Socket, end: &End, ring: &SegmentRing) {
    // ORDER: Release; pairs with `stream::all_taken`.
    ring.control().receiver.draining.store(0, Ordering::Release);
    match end.left.get() {
        0 => set_receiving(socket, end, Receiving::Ring),
        _ => leave_for_bells(socket, end, ring),
    }
}

/// Behind the doorbells the kernel has what the peer sends again.
fn leave_for_bells(socket: &Socket, end: &End, ring: &SegmentRing) {
    end.until.set(bells_end(end, ring));
    set_receiving(socket, end, Receiving::Discarding);
}

/// The kernel's place up to which its bytes are doorbells, when no more are sent.
pub fn bells_end(end: &End, ring: &SegmentRing) -> u64 {
    // ORDER: Relaxed; the sender was seen not to be `working`.
    bells_end_of(end, ring.control().sender.bells.load(Ordering::Relaxed))
}

/// The same if they are so many.
pub fn bells_end_of(end: &End, bells: u64) -> u64 {
    end.bells_from.get().wrapping_add(bells)
}

/// Before somebody gets the descriptor who reads only the kernel's: false if what that one would read is not the stream.
fn hand_over(socket: &Socket, end: &End, ring: &SegmentRing) -> bool {
    // Doorbells that were sent may not have arrived.
    wait_patiently(|| settle(socket, end, ring) != Err(Errno::EAGAIN));
    match end.receiving() {
        Receiving::Kernel => true,
        Receiving::Ring => !end.rx.has_bytes(ring),
        // Doorbells behind the data could not be told from what follows.
        Receiving::Draining => end.left.is() && bells_end(end, ring) == end.bells_from.get(),
        Receiving::Discarding => false,
    }
}

/// Takes the doorbells off the kernel's connection before it is closed: unread, they would make the kernel end it by a reset. One that
/// comes later does so too. The peer knows that it was a doorbell only (`stream::fin_by_death`, `unix::judge`), so that is waited for no
/// longer than some looks; but a reset takes with it what the kernel has not yet sent of ours. After the ring was closed.
pub fn drain_bells(socket: &Socket, end: &End, ring: &SegmentRing) {
    let drained = || {
        // What comes while we look is the peer's affair.
        let waiting = tcp::unread(socket.fd()).unwrap_or(0) as u64;
        let here = carrier::consumed(socket, end).unwrap_or(0).saturating_add(waiting);
        is_quiet(ring)
            && discard_to(socket, end, bells_end(end, ring).min(here)) == Ok(true)
            && carrier::consumed(socket, end).is_ok_and(|taken| taken >= bells_end(end, ring))
    };
    if !drained() && !socket.is_unix() && tcp::unsent(socket.fd()) > 0 {
        wait_patiently(|| tcp::unsent(socket.fd()) == 0 || drained());
    }
}

/// Follows the marks that stand next, as far as they go without bytes of the program's.
pub fn settle(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    for _ in 0..CHANGES_MAX {
        match end.receiving() {
            Receiving::Kernel if start_met(socket, end, ring)? => {}
            Receiving::Draining if end.until.get() == 0 => drained(socket, end, ring),
            Receiving::Ring => match end.rx.mark(ring) {
                Some(Mark::Back(position)) => back_met(socket, end, ring, position),
                Some(Mark::Start(_)) => return Err(corrupt(socket)),
                None if is_spoiled(end, ring) => return Err(corrupt(socket)),
                None => return Ok(()),
            },
            Receiving::Discarding if discard(socket, end)? => {}
            // Our own end; the doorbells may still come.
            Receiving::Discarding => return Err(Errno::EAGAIN),
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
            let until = match carrier::until_start(socket, end, start) {
                Err(Errno::ERANGE) => return Err(miscounted(socket)),
                until => until?,
            };
            // ORDER: Relaxed; the mark's release follows.
            ring.control().receiver.draining.store((until > 0) as u32, Ordering::Relaxed);
            end.bells_from.set(carrier::consumed(socket, end)? + until);
            // (A sender that waits for room in the ring is woken when that is read, after what it still has in the kernel: if it were killed
            // with a doorbell unread, the kernel would reset, and that would be lost.)
            if end.rx.pass_mark(ring) && until == 0 {
                wake_sender(socket, ring);
            }
            end.until.set(until);
            set_receiving(socket, end, Receiving::Draining);
            Ok(true)
        }
        Some(_) => Err(corrupt(socket)),
    }
}

/// Does a record stand next that is neither bytes nor a mark?
pub fn is_spoiled(end: &End, ring: &SegmentRing) -> bool {
    published(end, ring) && !end.rx.has_bytes(ring) && end.rx.mark(ring).is_none()
}

/// Takes `n` doorbells that wait in the kernel. Receive lock held.
pub fn take_bells(socket: &Socket, end: &End, n: usize) {
    let mut left = n;
    while left > 0 {
        match take_some_bells(socket, end, left) {
            Ok(taken @ 1..) => left -= taken,
            _ => return,
        }
    }
}

/// Up to `most` of them, by one call. Receive lock held.
pub fn take_some_bells(socket: &Socket, end: &End, most: usize) -> Sys<usize> {
    let mut bells = [0u8; 256];
    let most = most.min(bells.len());
    let taken = tcp::receive_into(socket.fd(), &mut bells[..most], libc::MSG_DONTWAIT)?;
    count_taken(end, taken);
    Ok(taken)
}

/// Goes past a mark, and looks for a sender that waits for its place.
fn pass_mark(socket: &Socket, end: &End, ring: &SegmentRing) {
    if end.rx.pass_mark(ring) {
        wake_sender(socket, ring);
    }
}

pub fn back_met(socket: &Socket, end: &End, ring: &SegmentRing, position: u64) {
    pass_mark(socket, end, ring);
    // A sender that looked before we left, and then saw the ring drained, may still enter it: in vain.
    if !ring.control().is_taken() {
        end.left.set(1);
    }
    end.until.set(end.base.get().wrapping_add(position));
    set_receiving(socket, end, Receiving::Discarding);
}

/// Behind the stage: who writes from now on counts it, and who wrote before is seen to be still there (`native_senders`).
pub fn written_so_far(socket: &Socket, end: &End) {
    if let (Some(ring), Some(_held)) = (socket.outgoing(), end.send_lock.try_take()) {
        measure_written(socket, end, &ring);
    }
}

/// Send lock held.
fn measure_written(socket: &Socket, end: &End, ring: &SegmentRing) {
    if !socket.is_unix()
        && end.native_senders.load(Ordering::SeqCst) == 0
        && let Some(place) = carrier::written(socket).ok().and_then(|written| written.agreed())
    {
        note_written(ring, place);
    }
}

/// Where our direction is in the kernel, once it is known. Send lock held.
pub fn note_written(ring: &SegmentRing, place: u64) {
    // ORDER: Release; pairs with `may_have_lost`, which follows the end that the kernel tells of.
    ring.control().sender.written.store(place + 1, Ordering::Release);
}

/// The kernel has taken so much more of our direction. Send lock held.
pub fn count_written(ring: &SegmentRing, bytes: usize) {
    let written = &ring.control().sender.written;
    let before = written.load(Ordering::Relaxed);
    if before != 0 {
        // ORDER: as in `note_written`.
        written.store(before.wrapping_add(bytes as u64), Ordering::Release);
    }
}

/// Before the kernel carries more than doorbells of our direction, by calls that nobody counts.
fn sends_uncounted(end: &End, ring: &SegmentRing) {
    end.bells_only.set(0);
    ring.control().sender.written.store(0, Ordering::Release);
}

/// The kernel has reset: may it have had bytes of the peer's to send, which are lost so? (Behind a FIN nothing follows.)
pub fn may_have_lost(socket: &Socket, ring: &SegmentRing) -> bool {
    let written = ring.control().sender.written.load(Ordering::Acquire);
    written == 0 || tcp::counts(socket.fd()).map_or(true, |here| here.arrived < written - 1)
}

/// Where the stream goes on in the kernel behind what is published, if it does.
pub fn back_ahead(end: &End, ring: &SegmentRing) -> Option<u64> {
    goes_on_at(end, end.rx.mark_ahead(ring)?)
}

/// Where the kernel's bytes behind this mark begin to be the stream's.
pub fn goes_on_at(end: &End, mark: Mark) -> Option<u64> {
    match mark {
        Mark::Back(position) => Some(end.base.get().wrapping_add(position)),
        Mark::Start(_) => None,
    }
}

/// Doorbells up to the byte where the peer went back to the kernel. False: not all have come, and we have shut down receiving ourselves,
/// which ends the stream for now.
pub fn discard(socket: &Socket, end: &End) -> Sys<bool> {
    let done = discard_to(socket, end, end.until.get())?;
    match done {
        true => set_receiving(socket, end, Receiving::Kernel),
        false => ends_before(socket, end)?,
    }
    Ok(done)
}

/// The kernel says that no more bytes come, before the place that a mark of the peer's names: an error, if that is the peer's end, for what
/// is missing is missed. KERNEL: a receive that we have shut down ourselves says the same, until the next bytes come.
pub fn ends_before(socket: &Socket, end: &End) -> Sys<()> {
    // (Who has the descriptor beside us, and knows nothing of rings, may have taken some.)
    let shared = end.given.is() || end.left.is() && !still_reads_on(end);
    // In this order: what came before the peer's end is there.
    if !shared && carrier::peer_ended(socket) && tcp::unread(socket.fd()) == Ok(0) {
        return Err(miscounted(socket));
    }
    Ok(())
}

/// Throws away what the kernel has up to this position of the connection. False when it ends before.
pub fn discard_to(socket: &Socket, end: &End, position: u64) -> Sys<bool> {
    // KERNEL: what is taken moves the place from which SO_PEEK_OFF looks. Doorbells were never before it.
    let peeks_from = tcp::int_option(socket.fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF);
    let done = discard_bells(socket, end, position);
    if let Ok(from @ 0..) = peeks_from {
        tcp::peek_from(socket.fd(), from);
    }
    done
}

fn discard_bells(socket: &Socket, end: &End, position: u64) -> Sys<bool> {
    let mut bells = [0u8; 1024];
    let most = carrier::consumed(socket, end)?.saturating_add(BELLS_MAX);
    loop {
        let consumed = carrier::consumed(socket, end)?;
        if consumed >= most {
            return Err(corrupt(socket));
        }
        let Some(left) = position.checked_sub(consumed) else {
            // Bytes of the stream were taken for doorbells.
            return Err(miscounted(socket));
        };
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
    super::epoll::receiving_changed(socket);
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
            && !socket.outgoing().is_some_and(|ring| view::is_away(socket, end, &ring))
            && end.sending() != Sending::KernelForGood
    {
        view::show(socket, reason);
    } else {
        view::show_path(socket);
    }
}

/// What one end promised of the kernel's bytes is not what the other has, or the kernel's counts are not ours. An error that can be seen,
/// not bytes lost in silence.
#[cold]
fn miscounted(socket: &Socket) -> Errno {
    reset(socket, Reason::Miscounted)
}

/// The peer wrote what no ringlet writes. Its connection ends as if reset; nothing else is harmed.
#[cold]
pub fn corrupt(socket: &Socket) -> Errno {
    reset(socket, Reason::BadPeer)
}

fn reset(socket: &Socket, reason: Reason) -> Errno {
    view::show(socket, reason);
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
    let how = ring.control().data_wish().granted_by_sender();
    if how != 0 {
        // (Whose bell does not take the ring hears a byte.)
        let heard = how & WANT_EVENT == 0 || context::ring(socket);
        if how & WANT_BYTE != 0 || !heard {
            ring_byte(socket, ring);
        }
    }
    if rung || how != 0 {
        count_bell(socket);
    }
}

/// After a release: wakes a sender that waits for room.
pub fn wake_sender(socket: &Socket, incoming: &SegmentRing) {
    let how = incoming.control().room_wish().granted_by_receiver();
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
    crate::waiting::spin::rang();
    view::count(socket, |slot| {
        slot.bells.fetch_add(1, Ordering::Relaxed);
    });
}

/// A byte on the kernel connection: only while our direction is in the ring, where it can't be taken for data, and unless the peer has
/// closed (it would answer with a reset) or left. `working` lets a peer that closes wait until the byte has arrived; `ringers` the
/// same for a thread of ours that leaves the ring.
fn ring_byte(socket: &Socket, outgoing: &SegmentRing) {
    let end = socket.end();
    // ORDER: SeqCst, all; pairs with `leave_ring`, `leave_incoming` and `process::close_ring`.
    end.ringers.fetch_add(1, Ordering::SeqCst);
    let working = outgoing.control().work();
    if end.sending() == Sending::Ring && working.is_taken() {
        // (Whoever counts on the number has waited for us, by `ringers` or `working`.)
        let went = bells::ring(&outgoing.control().sender.bells, || tcp::ring_byte(socket.fd()));
        if !went {
            end.bell_lost.set(1);
        }
    }
    drop(working);
    end.ringers.fetch_sub(1, Ordering::SeqCst);
}

/// Is something published that we have not consumed (bytes or a mark)?
#[inline(always)]
pub fn published(end: &End, incoming: &SegmentRing) -> bool {
    end.rx.ready(incoming) && !end.left.is()
}
