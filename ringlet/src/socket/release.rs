//! The last thread that was at a socket puts it away, when another one has closed it meanwhile.

use super::table::{Socket, Stage, Tables, tables};
use super::{boards, budget, context, meeting, view};
use crate::once::Once;
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::map;

/// How a connection is closed whose descriptors went while threads slept on it.
pub type Close = fn(&'static Socket);

static CLOSE: Once<Close> = Once::new();

pub fn start(close: Close) {
    let _ = CLOSE.set(close);
}

/// Counts a thread out of the kernel. (Never below none: another thread may have closed the socket meanwhile, and all ends beside its own,
/// so that the word was mapped anew.)
#[inline]
pub fn leave_native(count: &AtomicU32) {
    let one_less = |count: u32| count.checked_sub(1);
    // ORDER: SeqCst; pairs with `moving::publish_attached` and `sides::try_start`.
    let _ = count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
}

/// One look less: see `in_use`. (Never below none, as in `Socket::leave_room`.)
pub fn leave(socket: &Socket) {
    let one_less = |count: u32| count.checked_sub(1);
    if socket.sleepers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less) == Ok(1) {
        if socket.orphaned.load(Ordering::SeqCst) != 0 {
            close_orphan(socket);
        }
        if socket.stage() == Stage::Closing {
            clean_up(socket);
        }
    }
}

/// The last sleeper of a connection that was closed meanwhile has left.
pub fn close_orphan(socket: &Socket) {
    if socket.orphaned.swap(0, Ordering::SeqCst) != 0
        && let (Some(tables), Some(close)) = (tables(), CLOSE.get())
    {
        close(tables.sockets.at(tables.index_of(socket) as usize));
    }
}

/// A socket that was closed in a handler which had interrupted a look at it, if no thread sleeps there.
#[cold]
pub fn clean_up_left(socket: &Socket) {
    // ORDER: SeqCst; pairs with `in_use::Waiter::new`, as in `process::release`.
    if socket.stage() == Stage::Closing && socket.sleepers.load(Ordering::SeqCst) == 0 {
        clean_up(socket);
    }
}

/// The last sleeper of a socket that was closed meanwhile.
pub fn clean_up(socket: &Socket) {
    let Some(tables) = tables() else { return };
    let last = socket.published.get() == 2;
    clean_up_as(tables.sockets.at(tables.index_of(socket) as usize), last, true);
}

/// Of a connection that was closed before it began to move: there is no segment, no bell, no rendezvous, and nobody works under its locks.
pub fn clean_up_young(tables: &'static Tables, socket: &'static Socket) {
    if socket.leave() {
        view::end(tables, socket);
        tables.forget(socket, true);
    }
}

/// `beside`: other threads may be at it. (In a child by fork there are none, and the locks are the parent's.)
pub fn clean_up_as(socket: &'static Socket, last: bool, beside: bool) {
    let Some(tables) = tables() else { return };
    let end = socket.end();
    if beside && (end.receive_lock.is_ours() || end.send_lock.is_ours()) {
        // We are in a handler that interrupted a call at work there, which goes on with the memory. (It stays.)
        return;
    }
    if !socket.leave() {
        return;
    }
    meeting::abandon(socket);
    part_from_segment(tables, socket, beside);
    match socket.channel.swap(0) as i32 {
        0 => {}
        // (Others of the family speak and hear there.)
        channel if !last => tables.close_hidden(channel),
        channel => meeting::part(channel),
    }
    if socket.lifeline.is() {
        tables.close_hidden(socket.lifeline.swap(0) as i32);
    }
    view::end(tables, socket);
    tables.forget(socket, last);
}

/// No thread sleeps there, and none begins to: the stage says so.
#[allow(unsafe_code)]
pub fn part_from_segment(tables: &Tables, socket: &Socket, beside: bool) {
    let end = socket.end();
    let segment = {
        let _receiving = beside.then(|| end.receive_lock.take());
        let _sending = beside.then(|| end.send_lock.take());
        socket.take_segment()
    };
    if let Some((area, geometry)) = segment {
        budget::release(tables, geometry.segment_bytes());
        // SAFETY: users of the segment look it up under one of the end's locks, or are sleepers; it was taken away under both locks (who
        // waited for one of them since before the close is done, or finds none), and there is no sleeper.
        unsafe { map::unmap(area) };
    }
    context::release(socket.bell.swap(0));
    boards::release(socket.boards.swap(0));
}
