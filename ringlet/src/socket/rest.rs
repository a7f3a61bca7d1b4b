//! What stands unread in the ring of a process that closes itself in: it is received in memory, and then the connection is the kernel's.
//!
//! A peer that listens sends it again at once, and then all is the kernel's before the filter is set. But it may be long in its own code, or wait
//! for us there, or have ended, or have gone on through the kernel. Of such a one the program finds it all the same, as in the kernel's
//! queue. From the moment of the filter no system call is made here; what takes some is done before it: doorbells are thrown away, and none is
//! wished for.

use super::patience::wait_patiently;
use super::table::{End, Receiving, Sending, Socket, Stage, Tables, tables};
use super::{again, carrier, in_use, moving, orphan, sides, table, view, words};
use crate::interconnect::sever;
use crate::reasons::Reason;
use crate::thread;
use ringlet_core::handover::Incoming;
use ringlet_core::layout::SHUT_UNREAD;
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::Mark;
use ringlet_core::sync::Ordering;
use ringlet_linux::{fd, tcp};

/// Looks at a peer that is at work, which does no more than a few system calls there.
const QUIET_LOOKS: u32 = 100_000;

/// Before the filter is set, by the only thread: stays what the ring holds there, for us alone? False: the connection has to go back
/// as a whole. (In a set nobody would tell of it.)
pub fn stays(tables: &Tables, socket: &'static Socket) -> bool {
    let end = socket.end();
    let may = socket.stage() == Stage::Attached
        && !carrier::facts(socket).has_boundaries
        && socket.watches.load(Ordering::Relaxed) == 0
        && tables.holders.is_alone(&end.holders);
    if !may || is_sent_again(socket) || !holds_rest(socket) {
        return false;
    }
    // What we send goes by the kernel from now on.
    moving::send_back(socket, Reason::Sandbox);
    if !matches!(end.sending(), Sending::KernelForGood) || !parts_from_adapter(socket, end) {
        return false;
    }
    carrier::tune(socket, end);
    view::show(socket, Reason::Sandbox);
    end.given.set(1);
    socket.last_of_ring.set(1);
    true
}

/// Both directions go on in the kernel by now. To an adapter words are said by system calls: so it is to touch the segment no more, and the other end hears
/// so now.
fn parts_from_adapter(socket: &Socket, end: &End) -> bool {
    if !end.mirrored.is() {
        return true;
    }
    let (Some(ring), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else { return false };
    let Some(_held) = end.send_lock.take() else { return false };
    if !sever::sever(socket) {
        return false;
    }
    orphan::go_back(socket, end, &outgoing, false);
    again::never(socket);
    ring.control().room_wish().withdraw();
    end.mirrored.set(0);
    true
}

/// Does the peer answer soon that it sends again what is unread?
fn is_sent_again(socket: &'static Socket) -> bool {
    moving::leave_early(socket);
    let _in_use = in_use::Waiter::new(socket);
    let end = socket.end();
    // (It answers, and then sends. What is not here yet the program does not find, nor does the kernel reset a connection for it.)
    let comes = || wait_patiently(|| tcp::unread(socket.fd()) != Ok(0));
    if !moving::is_owed(socket) {
        let left = end.receiver.has_left();
        if left && socket.incoming().is_some_and(|ring| end.rx.has_bytes(&ring)) {
            comes();
        }
        return left;
    }
    if let Some(outgoing) = socket.outgoing() {
        // (It may sleep.)
        sides::ring_byte(socket, &outgoing);
    }
    let answered = wait_patiently(|| !moving::is_owed(socket));
    let stays = || {
        let _held = end.receive_lock.take()?;
        Some(sides::incoming(socket, end, &socket.incoming()?).stay_after_all())
    };
    if answered {
        comes();
    }
    answered || stays() != Some(true)
}

/// Does the ring hold bytes behind which the kernel's connection has the stream, with nothing before it?
fn holds_rest(socket: &'static Socket) -> bool {
    let _in_use = in_use::Waiter::new(socket);
    let end = socket.end();
    let Some(_held) = end.receive_lock.take() else { return false };
    let (Some(ring), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else { return false };
    if moving::settle(socket, end, &ring).is_err()
        || end.receiving() != Receiving::Ring
        || !end.rx.has_bytes(&ring)
    {
        return false;
    }
    let side = sides::incoming(socket, end, &ring);
    end.barred.set(Reason::Sandbox as u32);
    side.ask_back();
    ring.control().data_wish().withdraw();
    outgoing.control().room_wish().withdraw();
    // (One that waits for room in the ring has to be rung for.)
    let is_mirrored = end.mirrored.is();
    if !is_mirrored && ring.control().room_wish().is_open() {
        return false;
    }
    wait_patiently(|| {
        // In this order: a mark is published before the first byte that it gives a meaning to, and what a sender at work rings is there behind it.
        let quiet = side.is_quiet();
        let place = match end.rx.mark_ahead(&ring) {
            // (By an adapter more may come.)
            None => Some(words::bells_end(end, &ring)).filter(|_| !is_mirrored),
            Some(mark @ Mark::Back(_)) => end.receiver.goes_on_at(mark),
            Some(Mark::Start(_)) => None,
        };
        quiet && place.is_some_and(|place| side.discard_to(place) == Ok(true))
    })
}

/// The same of what could not go back: is it all that still comes? Nobody sends again what a peer has left there that has ended.
pub fn is_last(socket: &Socket) -> bool {
    let end = socket.end();
    let Some(ring) = socket.incoming() else { return false };
    // KERNEL: behind a FIN comes nothing. (No doorbell lies before it, and the stream goes on nowhere else.)
    let ended = || {
        fd::pending(socket.fd(), libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP) != 0
            && tcp::unread(socket.fd()) == Ok(0)
    };
    end.receiving() == Receiving::Ring
        && end.rx.has_bytes(&ring)
        && ended()
        && end.rx.mark_ahead(&ring).is_none()
}

/// The last bytes that the ring held were taken: behind them the stream is the kernel's, unless the peer has published some just now. Receive lock
/// held.
#[cold]
pub fn was_taken(socket: &Socket) {
    let end = socket.end();
    let Some(ring) = socket.incoming() else { return };
    let words = ring.control();
    // What is published from now on is sent again (by a sender that sees that we have left, after it has published).
    words.leave(0);
    let quiet = || {
        (0..QUIET_LOOKS).any(|_| {
            core::hint::spin_loop();
            words.is_quiet()
        })
    };
    if end.rx.has_bytes(&ring) && words.stay(quiet) == Some(true) {
        return;
    }
    leave(socket);
}

/// The program closes it, or ends, with bytes unread in the ring: the peer hears of that as of a reset.
pub fn is_left(socket: &Socket) {
    let end = socket.end();
    if let (Some(ring), Some(outgoing)) = (socket.incoming(), socket.outgoing()) {
        let _held = end.receive_lock.take();
        ring.control().close();
        words::say_end(&outgoing, SHUT_UNREAD);
    }
    leave(socket);
}

/// (What is mapped stays mapped: to give it back is a system call.)
fn leave(socket: &Socket) {
    socket.last_of_ring.set(0);
    socket.bell.set(0);
    socket.boards.set(0);
    let _ = socket.take_segment();
    socket.set_stage(Stage::KernelForGood);
    let moves = |socket: &&Socket| socket.stage() == Stage::Attached || socket.has_datagrams();
    if !tables().is_some_and(|tables| tables.followed().any(|socket| moves(&socket))) {
        table::never_begin();
        thread::leave_alone();
    }
}
