//! The lease of a connection that crosses a border (`interconnect::node`): its bytes pass where no packet filter sees them, so the border is asked
//! whether it still lets packets pass. Who sends by the ring puts a doorbell on the kernel's connection now and then, and the peer's kernel has to
//! acknowledge it. If it does not, the sender goes back to the kernel, where the program sees what TCP sees: a firewall rule that is added later,
//! or a cable that is pulled, holds the stream up. Once something that was sent there is acknowledged, the direction may enter the ring again.
//!
//! An end that sends nothing asks nothing: by it nothing passes.

use super::table::{End, Socket};
use ringlet_linux::{sys, tcp};

/// From one question to the next, which is how long an answer may take: ten times what it does where a packet is lost.
const TERM_NS: u64 = 2_000_000_000;

/// Has the border passed nothing for a term, though it was asked? `ask`: by a doorbell. Send lock held, and sending by the ring.
pub fn has_lapsed(socket: &Socket, ask: impl FnOnce()) -> bool {
    if !socket.introduced.is() {
        return false;
    }
    let (due, now) = (socket.lease_due_ns.get(), sys::now_ns());
    if now < due {
        return false;
    }
    // KERNEL: the peer's kernel acknowledges what it has, and answers where it has no room, whether or not the program runs.
    let Ok(counts) = tcp::counts(socket.fd()) else { return false };
    if due != 0 && counts.unanswered && counts.acked == socket.lease_acked.get() {
        socket.end().lapsed.set(counts.acked + 1);
        return true;
    }
    socket.lease_acked.set(counts.acked);
    ask();
    socket.lease_due_ns.set(now + TERM_NS);
    false
}

/// Does the border pass packets, as far as is known? Where a lease has lapsed, something was acknowledged since. Send lock held.
pub fn holds(socket: &Socket, end: &End) -> bool {
    let Some(acked) = end.lapsed.get().checked_sub(1) else { return true };
    let passes = tcp::counts(socket.fd()).is_ok_and(|now| !now.unanswered && now.acked != acked);
    if passes {
        end.lapsed.set(0);
    }
    passes
}
