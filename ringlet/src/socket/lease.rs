//! The lease of a connection that crosses a border (`interconnect::node`): its bytes pass where no packet filter sees them, so the border is asked
//! whether it still lets packets pass. Who sends by the ring puts a doorbell on the kernel's connection now and then, and the peer's kernel has to
//! acknowledge it. If it does not, the sender goes back to the kernel, where the program sees what TCP sees: a firewall rule that is added later,
//! or a cable that is pulled, holds the stream up. Once something that was sent there is acknowledged, the direction may enter the ring again: twice as
//! late after each lapse, and at last no more. (A border that passes some packets, as a limit does, would be passed by at the speed of memory for a term
//! each time.)
//!
//! An end that sends nothing asks nothing: by it nothing passes.

use super::table::{End, Socket};
use ringlet_linux::{sys, tcp};

/// From one question to the next, which is how long an answer may take: ten times what it does where a packet is lost.
const TERM_NS: u64 = 2_000_000_000;
/// A direction whose lease has lapsed so often enters the ring no more.
const LAPSES_MOST: u32 = 8;

/// How long a direction stays out of the ring after its `lapses`th lapse; `None` for good.
fn stays_out_ns(lapses: u32) -> Option<u64> {
    (lapses < LAPSES_MOST).then(|| TERM_NS << lapses.saturating_sub(1))
}

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
        let (end, lapsed) = (socket.end(), counts.acked + 1);
        // (Once, however often it is asked until the direction has gone back.)
        if end.lapsed.get() != lapsed {
            let lapses = end.lapses.get().saturating_add(1);
            end.lapses.set(lapses);
            end.lapsed_until_ns.set(stays_out_ns(lapses).map_or(u64::MAX, |wait| now + wait));
            end.lapsed.set(lapsed);
        }
        return true;
    }
    socket.lease_acked.set(counts.acked);
    ask();
    socket.lease_due_ns.set(now + TERM_NS);
    false
}

/// Does the border pass packets, as far as is known? Where a lease has lapsed, its time is over and something was acknowledged since. Send lock held.
pub fn holds(socket: &Socket, end: &End) -> bool {
    let Some(acked) = end.lapsed.get().checked_sub(1) else { return true };
    let until = end.lapsed_until_ns.get();
    if until == u64::MAX || sys::now_ns() < until {
        return false;
    }
    let passes = tcp::counts(socket.fd()).is_ok_and(|now| !now.unanswered && now.acked != acked);
    if passes {
        end.lapsed.set(0);
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_direction_stays_out_twice_as_long_each_time_and_at_last_for_good() {
        assert_eq!(stays_out_ns(1), Some(TERM_NS));
        for lapses in 2..LAPSES_MOST {
            assert_eq!(stays_out_ns(lapses), stays_out_ns(lapses - 1).map(|before| 2 * before));
        }
        assert_eq!([stays_out_ns(LAPSES_MOST), stays_out_ns(u32::MAX)], [None; 2]);
    }
}
