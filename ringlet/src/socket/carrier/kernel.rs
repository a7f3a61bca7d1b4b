//! What is asked of every kind of kernel connection in the same way.

use super::facts::{MSG_SERVED, facts};
use crate::socket::table::{End, Socket};
use crate::socket::view;
use ringlet_core::memory::Buffers;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::unix::FromKernel;
use ringlet_linux::{fd, tcp};

pub(super) fn is_on(socket: &Socket, option: i32, from: i32) -> bool {
    tcp::int_option(socket.fd(), libc::SOL_SOCKET, option).is_ok_and(|value| value >= from)
}

pub(super) fn place_behind(end: &End, bells: u64) -> u64 {
    end.sender.started().wrapping_add(bells)
}

pub(super) fn has_unread(socket: &Socket) -> bool {
    matches!(tcp::unread(socket.fd()), Ok(1..))
}

pub fn receive_native(
    socket: &Socket,
    end: &End,
    to: &mut Buffers,
    max: usize,
    flags: i32,
    from: &mut FromKernel,
) -> Sys<usize> {
    let flags = flags & (MSG_SERVED & !libc::MSG_WAITALL) | libc::MSG_DONTWAIT;
    // Of a packet, how long it was is counted, though a part is lost; and it counts, though it is of no bytes (`received`).
    let packets = facts(socket).has_boundaries;
    let (room, length) = (to.remaining(), if packets { libc::MSG_TRUNC } else { 0 });
    let news = socket.kernel_news.number();
    match from.receive(socket.fd(), to, max, flags | length) {
        Ok(n) => {
            if flags & libc::MSG_PEEK == 0 {
                end.receiver.count_taken(n.max(packets as usize) as u64);
                view::count_kernel_bytes(socket, 0, n);
            }
            Ok(if packets && flags & libc::MSG_TRUNC == 0 { n.min(room) } else { n })
        }
        Err(error) => {
            socket.kernel_news.nothing_since(news);
            Err(error)
        }
    }
}

/// Has the kernel seen the peer's end of the connection finish?
pub fn kernel_says_end(socket: &Socket) -> bool {
    let ended = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
    fd::pending(socket.fd(), libc::POLLRDHUP) & ended != 0
}

/// The peer's end was met; what it was before (`End::ended`).
pub(super) fn note_end(socket: &Socket, end: &End) -> u32 {
    let before = end.ended.get();
    if before == 0 {
        end.ended.set(1);
    }
    socket.kernel_news.tell();
    before
}

pub(super) fn told_end(end: &End) -> Sys<Option<usize>> {
    match end.pending_error.swap(0) {
        0 => Ok(Some(0)),
        error => Err(Errno(error as i32)),
    }
}
