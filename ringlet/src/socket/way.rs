//! Whose call it is: the kernel's, or ours.

use super::keep::pin;
use super::table::{self, End, Known, Socket, Stage, lookup};
use super::{chaos, control, datagram, in_use, meet, release, view};
use crate::reasons::Reason;
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_core::view as layout;

/// How a call on a descriptor goes.
pub enum Way {
    /// To the kernel; what is to be told about it afterwards.
    Kernel(Option<Native>),
    /// Through `transfer`.
    Ours(&'static Socket),
    /// Through `datagram`, or else to the kernel.
    Datagram(&'static Socket),
}

/// A native call under way on a socket that may be moved: as long as it is, it will not be.
pub struct Native {
    socket: &'static Socket,
    count: &'static AtomicU32,
}

impl Native {
    pub(super) fn begin(socket: &'static Socket, count: &'static AtomicU32) -> Native {
        // ORDER: SeqCst; pairs with `sides::try_start`.
        count.fetch_add(1, Ordering::SeqCst);
        Native { socket, count }
    }

    /// The call has moved data.
    #[inline]
    pub fn moved(&self) {
        let end = self.socket.end();
        let sends = core::ptr::eq(self.count, &end.native_senders);
        let has = if sends { &end.has_sent } else { &end.has_received };
        if !has.is() {
            has.set(1);
        }
        count_call(self.socket);
    }

    /// In place of the drop, for a thread that is cancelled.
    #[inline]
    pub fn end(&self) {
        release::leave_native(self.count);
    }

    /// The connection is not to be moved.
    pub fn stay(&self, reason: Reason) {
        pin(self.socket, reason);
    }
}

impl Drop for Native {
    #[inline]
    fn drop(&mut self) {
        self.end();
    }
}

#[inline(always)]
pub fn count_call(socket: &Socket) {
    let calls = socket.calls.add(1);
    view::count(socket, |slot| slot.calls.store(calls as u64, Ordering::Relaxed));
}

/// A call that receives.
#[inline(always)]
pub fn way_in(fd: i32) -> Way {
    match lookup(fd) {
        Some(Known::Socket(socket)) => way(socket, |end| &end.native_receivers, Stage::Mailbox),
        _ => Way::Kernel(None),
    }
}

/// A call that sends.
#[inline(always)]
pub fn way_out(fd: i32) -> Way {
    match lookup(fd) {
        // (Of a process that has closed itself in only what it receives may still lie in the ring.)
        Some(Known::Socket(socket)) if socket.last_of_ring.is() => Way::Kernel(None),
        Some(Known::Socket(socket)) => way(socket, |end| &end.native_senders, Stage::Datagram),
        _ => {
            KERNEL_WRITES.store(kernel_writes().wrapping_add(1), Ordering::Relaxed);
            Way::Kernel(None)
        }
    }
}

/// Counts this process's writes to what is not a connection of ours; may miss one of two at once.
static KERNEL_WRITES: AtomicU32 = AtomicU32::new(0);

pub fn kernel_writes() -> u32 {
    KERNEL_WRITES.load(Ordering::Relaxed)
}

#[inline(always)]
fn way(socket: &'static Socket, count: fn(&End) -> &AtomicU32, datagram_from: Stage) -> Way {
    if socket.stage() == Stage::Attached {
        chaos::call(socket);
        if socket.comes_again.is() {
            meet::step_again(socket);
        }
        return Way::Ours(socket);
    }
    before_native(socket, count, datagram_from)
}

/// `datagram_from`: the stage from which on a UDP socket's call goes through `datagram`.
fn before_native(
    socket: &'static Socket,
    count: fn(&End) -> &AtomicU32,
    datagram_from: Stage,
) -> Way {
    if view::asked(socket) & layout::ASKED_ON != 0 {
        datagram::look_anew(socket);
        control::begin_again(socket);
    }
    match socket.stage() {
        stage @ (Stage::Datagram | Stage::Mailbox) if stage >= datagram_from => {
            return Way::Datagram(socket);
        }
        Stage::Free | Stage::Closing => return Way::Kernel(None),
        Stage::KernelForGood if socket.is_kernels_for_good() => return Way::Kernel(None),
        Stage::KernelForGood => {}
        _ if socket.calls.get() < socket.next_step.get() => {}
        _ if socket.has_datagrams() => datagram::receiving(socket),
        _ => meet::step(socket),
    }
    // ORDER: SeqCst, then the stage; pairs with `meet::attach` (stage) and `moving::publish_attached` (count): either we see that
    // the segment is there, or the peer is not told to use it before we are back. So whatever may still be moved, by another thread and
    // at any moment, is counted before it is looked at.
    let count = socket.enter_native(count);
    match socket.stage() {
        Stage::Attached => {
            release::leave_native(count);
            Way::Ours(socket)
        }
        stage @ (Stage::Datagram | Stage::Mailbox) if stage >= datagram_from => {
            release::leave_native(count);
            Way::Datagram(socket)
        }
        _ => Way::Kernel(Some(Native { socket, count })),
    }
}

/// The path of a descriptor's connection; `None` for one that is not followed.
pub fn path_of(fd: i32) -> Option<u32> {
    let socket = table::socket(fd)?;
    // Another thread that closes it leaves it to us.
    let _in_use = in_use::Waiter::new(socket);
    Some(datagram::shown_path(socket))
}
