//! What Unix connections do otherwise than TCP's, streams and packets.
//!
//! KERNEL: a Unix connection has no packets under way. What one end closes or shuts, the other sees at once: a send fails with EPIPE
//! as soon as the peer has closed or shut down its receiving; and a peer that closes with bytes unread leaves ECONNRESET, which the
//! next receive (or SO_ERROR) takes, once, after all bytes.

use super::facts::unconnected;
use super::kernel::is_on;
use crate::reasons::Reason;
use crate::socket::table::{End, Socket, Stage, Tables, tables};
use ringlet_core::layout::{NOT_SHUT, SHUT, SHUT_READ, SHUT_UNREAD};
use ringlet_core::leaving::Leaving;
use ringlet_core::sync::Ordering;
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::unix::{self, SO_INQ, SO_PASSPIDFD};
use ringlet_linux::{fd, tcp};

pub fn ends(socket: &Socket, tables: &Tables) -> Result<Ends, Option<Reason>> {
    if !tables.config.allows_unix() {
        return Err(Some(Reason::Off));
    }
    // What was shut down before the move is not told in shared memory.
    if fd::pending(socket.fd(), libc::POLLRDHUP) != 0 {
        return Err(Some(Reason::Closing));
    }
    match unix::ends(socket.fd()) {
        Ok(ends) => Ok(Ends::Unix(ends)),
        Err(Errno::EAGAIN) => Err(None),
        // The kernel has no table of Unix sockets (CONFIG_UNIX_DIAG).
        Err(Errno::ENOENT) => Err(Some(Reason::OldKernel)),
        Err(error) => Err(Some(Reason::from(error))),
    }
}

pub fn has_unserved_option(socket: &Socket) -> bool {
    [libc::SO_PASSCRED, libc::SO_PASSSEC, SO_PASSPIDFD, SO_INQ]
        .iter()
        .any(|option| is_on(socket, *option, 1))
        || is_on(socket, libc::SO_PEEK_OFF, 0)
}

/// A sender whose bytes are always under way finds no moment to enter the ring. At some of its sends (the 8th, 16th, 32nd ...) it waits
/// so long for the receiver to take all.
const WAIT_TAKEN_NS: u64 = 200_000;
const WAIT_TAKEN_FROM: u32 = 8;

#[cold]
pub fn await_taken(socket: &Socket, end: &End) -> bool {
    let refused = end.refused_starts.add(1);
    if refused < WAIT_TAKEN_FROM || !refused.is_power_of_two() {
        return false;
    }
    let until = sys::now_ns() + WAIT_TAKEN_NS;
    while sys::now_ns() < until {
        match unix::untaken(socket.fd()) {
            Ok(0) => return true,
            Ok(_) => sys::sched_yield(),
            Err(_) => return false,
        }
    }
    false
}

/// Once the peer has closed (or died): did it leave bytes of ours unread? Then ECONNRESET is pending. `taken` is an error that was just taken
/// from the kernel. True if the kernel's own error is accounted for by this.
///
/// What was unread when it closed, it says (`SHUT_*`). One that died says nothing, and then the ring and the kernel tell, except for
/// doorbells, which are nobody's bytes.
pub fn judge(socket: &Socket, end: &End, taken: i32) -> bool {
    let gone = libc::POLLHUP | libc::POLLERR;
    if end.judged.is() || taken == 0 && fd::pending(socket.fd(), 0) & gone == 0 {
        return end.judged.is();
    }
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else {
        return false;
    };
    let said = incoming.control().sender.shut.load(Ordering::Acquire);
    // Shut down from both sides, or from ours alone, is not closed.
    let alive = said == SHUT || said == NOT_SHUT && end.shut_receiving.is();
    if alive || end.judged.swap(1) != 0 {
        return false;
    }
    let of_kernel = if taken != 0 { taken } else { tcp::take_error(socket.fd()) };
    // While we send by the ring the kernel holds nothing else of ours; one may have come after the peer had taken the others.
    let only_doorbells = end.bells_only.is();
    let _held = end.send_lock.try_take();
    let unread = match said {
        NOT_SHUT => end.tx.outstanding_bytes(&outgoing) > 0,
        // Over a mirror what it did not take may have been on its way to it.
        _ if end.mirrored.is() && end.tx.outstanding_bytes(&outgoing) > 0 => true,
        _ => said == SHUT_UNREAD,
    };
    if unread || of_kernel != 0 && !only_doorbells {
        end.pending_error.set(libc::ECONNRESET as u32);
    }
    end.ended.set(end.ended.get().max(1));
    socket.kernel_news.tell();
    true
}

pub fn end_told(unread: bool) -> u32 {
    if unread { SHUT_UNREAD } else { SHUT_READ }
}

/// The process is about to end by itself, and nobody else holds this end: from now on the peer asks the kernel before it sends, so that
/// it learns of the end with its next send. (What this end still does is served: it only receives through the kernel.)
pub fn exiting(socket: &Socket) {
    if socket.stage() == Stage::Attached
        && let Some(incoming) = socket.incoming()
    {
        incoming.control().close();
    }
}

/// Bytes that nobody can send again are lost with the connection: its descriptors name an unconnected socket from now on, from which a
/// receive fails (EINVAL, ENOTCONN). KERNEL: nothing can dissolve a Unix connection, or give it an error.
pub fn break_off(socket: &Socket) {
    let Some(tables) = tables() else { return };
    let Ok(other) = unconnected(socket) else { return };
    for (number, _) in tables.known_fds().filter(|(_, each)| core::ptr::eq(*each, socket)) {
        fd::replace(number, other);
    }
    sys::close(other);
}
