//! Room of which nobody tells: sets and polls come here, who are below those that send.

use super::wait::waits_untold;
use crate::reasons::Reason;
use crate::socket::table::{Sending, Socket};
use crate::socket::{moving, words};

/// For who waits for room where no doorbell can tell of it, and nobody looks now and then, as in a set that is in another one, or has others to look
/// at: the kernel is to tell.
pub fn leave_untold(socket: &Socket) {
    let end = socket.end();
    if waits_untold(socket)
        && let (Some(_held), Some(ring)) = (end.send_lock.try_take(), socket.outgoing())
        && end.sending() == Sending::Ring
        && !words::has_left(&ring)
    {
        moving::go_back(socket, end, &ring, Sending::Kernel, Reason::Stalled);
    }
}
