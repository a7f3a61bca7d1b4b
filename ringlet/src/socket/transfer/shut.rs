//! shutdown(2): the kernel does it, behind what the ring holds.

use crate::interconnect::mirrored;
use crate::reasons::Reason;
use crate::socket::table::{End, Sending, Socket, Stage};
use crate::socket::{carrier, context, moving, sides};
use ringlet_core::layout::SHUT;
use ringlet_core::leaving::Leaving;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::tcp;

/// Before a shutdown. True if it is ours to do, for the connection is attached; else the kernel does it alone.
pub fn before(socket: &Socket, how: i32) -> bool {
    if how != libc::SHUT_RD {
        // ORDER: SeqCst, then the stage; pairs with `moving::publish_attached`, which is after the stage: either we see that the
        // connection is attached, or whoever tells the peer so sees this.
        socket.end().shut.store(1, Ordering::SeqCst);
    }
    carrier::shutting_down(socket);
    socket.stage() == Stage::Attached
}

/// The kernel has refused to.
pub fn failed(socket: &Socket) {
    socket.end().shut.store(0, Ordering::SeqCst);
}

/// shutdown(2): the kernel does it, after the ring's bytes in the order that the peer sees.
pub fn shut_down(socket: &Socket, how: i32) -> Sys<()> {
    let end = socket.end();
    let held = end.send_lock.take_first().ok_or(Errno::EINTR)?;
    let mut how_now = Some(how);
    if how != libc::SHUT_RD {
        if let Some(ring) = socket.outgoing()
            && !moving::end_direction(socket, end, &ring, SHUT)
        {
            // The kernel has no room yet for what comes before.
            end.shut_later.set(1);
            how_now = (how == libc::SHUT_RDWR).then_some(libc::SHUT_RD);
        }
        if end.sending() == Sending::Kernel {
            end.sender.keep_out();
        }
    }
    if matches!(how, libc::SHUT_RD | libc::SHUT_RDWR) && carrier::facts(socket).ends_sends_untold {
        shut_receiving(socket, end);
    }
    let result = match how_now.map_or(Ok(()), |how| tcp::shut_down(socket.fd(), how)) {
        Err(Errno::ENOTCONN) if carrier::is_open_after_reset(socket, end) => Ok(()),
        result => result,
    };
    if result.is_ok() && how != libc::SHUT_RD && end.sending() == Sending::Ring {
        // Nothing can follow the end; sends get the kernel's EPIPE.
        end.sender.keep_out();
    }
    socket.kernel_news.tell();
    drop(held);
    if socket.home.is() && socket.sleepers.load(Ordering::SeqCst) != 0 {
        // A thread of ours that waits on this connection looks again.
        context::ring_ours(socket.home.get());
    }
    result
}

/// KERNEL: after SHUT_RD the peer's sends fail at once (`Facts::ends_sends_untold`). It must not wait for room either. Our own direction goes back to the
/// kernel: the peer can ring for its room no more. Send lock held, before the kernel's shutdown.
fn shut_receiving(socket: &Socket, end: &End) {
    end.shut_receiving.set(1);
    if let Some(incoming) = socket.incoming() {
        incoming.control().close();
        mirrored::said(socket);
        sides::wake_sender(socket, &incoming);
    }
    if end.sending() == Sending::Ring
        && let Some(outgoing) = socket.outgoing()
    {
        moving::go_back(socket, end, &outgoing, Sending::KernelForGood, Reason::Closing);
    }
}
