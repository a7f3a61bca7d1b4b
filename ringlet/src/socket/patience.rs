//! How long a peer, or a thread of ours, may keep this process waiting, and the error with which a connection ends that can't go on.

use super::table::Socket;
use super::{view, words};
use crate::interconnect::Interconnect;
use crate::plain::P64;
use crate::reasons::Reason;
use ringlet_core::bells::Ringers;
use ringlet_core::layout::SHUT_UNREAD;
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{fd, tcp};

/// How long a doorbell byte of our own family's that is under way is waited for: about half a second.
const RINGERS_WAIT_ROUNDS: u32 = 1100;
const RINGERS_LOOK_NS: u64 = 500_000;

/// What all peers together may make this process wait: so long, and then a hundredth of the time that passes (`wait_patiently`). (In tests a
/// peer does nothing meanwhile.)
const PATIENCE_NS: u64 = if cfg!(test) { 1_000_000 } else { 200_000_000 };
const PATIENCE_SHARE: u64 = 100;
const PATIENT_LOOK_NS: u64 = 100_000;

/// Waits until there is none, of which only our family tells: a system call's time, if whoever holds it runs; in the end long enough for
/// one that was preempted.
pub fn await_none(ringers: &Ringers) -> bool {
    for round in 0..RINGERS_WAIT_ROUNDS {
        if ringers.are_none() {
            return true;
        }
        match round {
            0..100 => sys::sched_yield(),
            _ => drop(fd::poll(&mut [], Some(RINGERS_LOOK_NS), None)),
        }
    }
    false
}

/// When what was waited for peers is made up for.
static PATIENT_AGAIN_NS: P64 = P64::new(0);

/// Waits for what an honest peer does soon, and a hostile one never. What a hostile one can gain by it is bounded for all peers of the
/// process together. False if it was not done.
pub fn wait_patiently(mut done: impl FnMut() -> bool) -> bool {
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

/// What one end promised of the kernel's bytes is not what the other has, or the kernel's counts are not ours. An error that can be seen,
/// not bytes lost in silence.
#[cold]
pub fn miscounted(socket: &Socket) -> Errno {
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
    // The peer, if it is sane, is not to take what is missing for an orderly end. (Over a mirror it does not know of any: `channel::is_cut_short`.)
    if socket.interconnect() == Interconnect::Local
        && let Some(outgoing) = socket.outgoing()
    {
        words::say_end(&outgoing, SHUT_UNREAD);
    }
    tcp::tear_off(socket.fd());
    Errno::ECONNRESET
}
