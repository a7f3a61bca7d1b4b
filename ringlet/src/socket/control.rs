//! What `ringlet off` and `ringlet on` ask of a running connection, in the process's page (`view`).
//!
//! A direction changes its path at its own sender's next call, before the next byte: nobody is woken or stopped for it. An end that was
//! asked to keep off the ring also asks its peer (`Receiver::keep_out`), since the peer's page may be another user's.

use super::moving;
use super::table::{End, Sending, Socket, Stage};
use super::{sides, tap, view, words};
use crate::interconnect::mirrored;
use crate::reasons::Reason;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_core::view::{ASKED_OFF, ASKED_ON, ASKED_TAP_END};

/// Looks at what is asked of an attached connection, and tells the peer. Any lock of the end's may be held.
#[cold]
pub fn notice(socket: &Socket, end: &End) {
    let Some(slot) = view::of(socket) else { return };
    if slot.asked.load(Ordering::Relaxed) & ASKED_TAP_END != 0 {
        tap::notice_end(socket);
    }
    // Bounded: whoever writes there may write for ever.
    for _ in 0..ASKED_AGAIN_MAX {
        let asked = slot.asked.load(Ordering::Relaxed);
        let away = asked & ASKED_OFF;
        if away == end.away.get() && asked & ASKED_ON == 0 {
            return;
        }
        slot.asked.fetch_and(!ASKED_ON, Ordering::Relaxed);
        if asked & ASKED_ON != 0 {
            // Where its carrier has died, another one is looked for at once.
            socket.again_tries.set(0);
            socket.again_due_ns.set(0);
        }
        end.away.set(away);
        if let Some(incoming) = socket.incoming() {
            // ORDER: SeqCst; pairs with the fence of `Wish::want`: a peer that begins to wait for room sees it, or we see its wish.
            incoming.control().receiver.keep_out.store(away, Ordering::SeqCst);
            mirrored::said(socket);
            wake_waiter(socket, away);
        }
        view::show_path(socket);
    }
}

const ASKED_AGAIN_MAX: u32 = 8;

/// A peer that waits for room by a byte on the connection must be woken as long as such a byte is a doorbell; it finds that it is to
/// send through the kernel.
fn wake_waiter(socket: &Socket, away: u32) {
    if away != 0
        && let Some(incoming) = socket.incoming()
    {
        sides::wake_sender(socket, &incoming);
    }
}

/// The sending direction leaves the ring if it is to. Send lock held.
pub fn leave(socket: &Socket, end: &End, ring: &SegmentRing) {
    if end.sending() != Sending::Ring || !view::is_away(socket, end, ring) || words::has_left(ring)
    {
        return;
    }
    notice(socket, end);
    wake_waiter(socket, 1);
    let reason = if end.away.is() { Reason::Paused } else { Reason::Asked };
    moving::go_back(socket, end, ring, Sending::Kernel, reason);
}

/// As `leave`, for an end that does not send: it receives, or asks for readiness.
pub fn leave_idle(socket: &Socket, end: &End) {
    if let Some(ring) = socket.outgoing()
        && let Some(_held) = end.send_lock.try_take()
    {
        leave(socket, end, &ring);
    }
}

/// Before a step towards the ring: is the connection to stay where it is?
pub fn keeps_off(socket: &Socket) -> bool {
    let off = view::asked(socket) & ASKED_OFF != 0;
    if off {
        view::show(socket, Reason::Paused);
        look_anew(socket);
    }
    off
}

/// The time to find the peer begins when it may be looked for.
pub fn look_anew(socket: &Socket) {
    socket.first_step_ns.set(0);
    socket.calls_before.set(socket.calls.get());
}

/// A connection whose peer was not found: looked for again, if that was asked.
#[cold]
pub fn begin_again(socket: &Socket) {
    let Some(slot) = view::of(socket) else { return };
    slot.asked.fetch_and(!ASKED_ON, Ordering::Relaxed);
    let end = socket.end();
    // (One thread does it, and what else bars the connection meanwhile holds.)
    if socket.stage() == Stage::KernelForGood
        && end.barred.change(Reason::NoPeer as u32, Reason::None as u32)
    {
        look_anew(socket);
        socket.next_step.set(socket.calls.get());
        socket.change_stage(Stage::KernelForGood, Stage::Kernel);
        view::show(socket, Reason::Young);
    }
}
