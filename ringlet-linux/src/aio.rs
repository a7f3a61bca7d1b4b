//! To ring an eventfd that somebody else owns who is not trusted.
//!
//! KERNEL: a write to an eventfd waits while its counter is full, unless O_NONBLOCK is set; its owner can fill it, and clear the flag. The end
//! of an asynchronous operation (IOCB_FLAG_RESFD) rings without waiting, and wakes whatever the counter says. So a poll of that eventfd is
//! submitted, which is ready at once: an eventfd can be read, or written to, or both.

use crate::sys::{self, Errno, Sys, sys};
use core::mem;
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// How many ends the kernel keeps for us at least. (The machine has 65,536 for all processes.)
const ENDS: usize = 16;

const NONE: usize = 0;
/// A thread is making it.
const MAKING: usize = 1;
/// The kernel, or a filter, has none for us.
const REFUSED: usize = 2;

/// The kernel's name of this process's context, or one of the words above; and the process.
static CONTEXT: AtomicUsize = AtomicUsize::new(NONE);
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// `struct iocb` of the kernel's interface.
#[repr(C)]
#[derive(Default)]
struct Operation {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    flags_of_write: u32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    events: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

const OPCODE_POLL: u16 = 5;
const FLAG_RESULT_FD: u32 = 1;
const _: () = assert!(mem::size_of::<Operation>() == 64);

/// Can this process ring so? Asked before a peer is told that it does: by trying, once.
pub fn can_ring() -> bool {
    context().is_some()
}

/// In a child by fork: the context is the parent's.
pub fn forget() {
    PROCESS.store(0, Ordering::Relaxed);
    CONTEXT.store(NONE, Ordering::Relaxed);
}

fn context() -> Option<usize> {
    // ORDER: Acquire; pairs with the Release below.
    match CONTEXT.load(Ordering::Acquire) {
        REFUSED | MAKING => None,
        NONE => make(),
        made => Some(made),
    }
}

#[cold]
fn make() -> Option<usize> {
    // ORDER: Relaxed: nothing else is read by it. Who comes second (a handler, too) does without.
    CONTEXT.compare_exchange(NONE, MAKING, Ordering::Relaxed, Ordering::Relaxed).ok()?;
    let mut made = 0usize;
    // SAFETY: a word to write to, which is 0 as the kernel demands.
    let done = unsafe { sys!(SYS_io_setup, ENDS, &raw mut made) };
    let context = match done {
        Ok(_) if made > REFUSED => made,
        _ => REFUSED,
    };
    PROCESS.store(sys::getpid(), Ordering::Relaxed);
    // ORDER: Release; pairs with `context`.
    CONTEXT.store(context, Ordering::Release);
    (context != REFUSED).then_some(context)
}

/// Rings it; false if that can't be done. Never waits.
pub fn ring(eventfd: i32) -> bool {
    let Some(mut made) = context() else { return false };
    for _ in 0..3 {
        match submit(made, eventfd) {
            Ok(_) => return true,
            // There is no room for the end: those that came before are taken away.
            Err(Errno::EAGAIN) => take_ends(made),
            // KERNEL: a context is its process's alone. After a fork that nobody told us of it is not ours.
            Err(Errno::EINVAL) if PROCESS.load(Ordering::Relaxed) != sys::getpid() => {
                forget();
                let Some(ours) = make() else { return false };
                made = ours;
            }
            Err(_) => return false,
        }
    }
    false
}

fn submit(context: usize, eventfd: i32) -> Sys<usize> {
    let operation = Operation {
        opcode: OPCODE_POLL,
        fd: eventfd as u32,
        events: (libc::POLLIN | libc::POLLOUT) as u64,
        flags: FLAG_RESULT_FD,
        result_fd: eventfd as u32,
        ..Operation::default()
    };
    let operations = [&raw const operation];
    // SAFETY: one pointer to an operation, both of which are only read, and name no memory.
    unsafe { sys!(SYS_io_submit, context, operations.len(), operations.as_ptr()) }
}

fn take_ends(context: usize) {
    let mut ends = [[0u64; 4]; 4 * ENDS];
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: so many places of 32 bytes to write to, and a time to read.
    let _ = unsafe {
        sys!(SYS_io_getevents, context, 0, ends.len(), ends.as_mut_ptr(), &raw const now)
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd;

    #[test]
    fn rings_one_whose_owner_has_filled_it_and_lets_writers_wait() {
        if !can_ring() {
            return;
        }
        let eventfd = fd::eventfd().expect("an eventfd");
        // SAFETY: no memory is passed.
        let _ = unsafe { sys!(SYS_fcntl, eventfd, libc::F_SETFL, 0) };
        fd::ring_by(eventfd, u64::MAX - 1);
        for _ in 0..1000 {
            assert!(ring(eventfd));
        }
        assert_eq!(fd::take(eventfd), Ok(u64::MAX));
        assert_eq!(fd::take(eventfd), Err(Errno::EAGAIN));
        assert!(ring(eventfd));
        assert_eq!(fd::take(eventfd), Ok(1));
        sys::close(eventfd);
    }
}
