//! Where a thread can be cancelled while it is inside ringlet: libc's own calls, made with a note of what is to be put away then.

use crate::errno;
use crate::next;
use crate::next_of;
use libc::{c_int, c_void, epoll_event, nfds_t, pollfd, sigset_t, timespec};
use ringlet::waiting::sleep::Sleep;
use ringlet_linux::fd;
use ringlet_linux::sys::Sys;

pub const SLEEP: Sleep = Sleep { poll, epoll_wait, check };

/// Makes a call in which this thread may be cancelled. If it is, its frames are left without drops, and `cancelled` is all that runs.
pub fn in_which<T>(cancelled: &dyn Fn(), call: impl FnOnce() -> T) -> T {
    // libc's list of what a cancelled thread still does: the routine, its argument, and two words of libc's own.
    let mut cleanup = [0usize; 4];
    type Routine = unsafe extern "C" fn(*mut c_void);
    next!(
        c"_pthread_cleanup_push",
        fn(*mut usize, Routine, *mut c_void) -> c_int,
        cleanup.as_mut_ptr(),
        run,
        (&raw const cancelled).cast_mut().cast::<c_void>()
    );
    let done = call();
    next!(c"_pthread_cleanup_pop", fn(*mut usize, c_int) -> c_int, cleanup.as_mut_ptr(), 0);
    done
}

unsafe extern "C" fn run(cancelled: *mut c_void) {
    // SAFETY: what `in_which` has given, in a frame that is only now left.
    unsafe { (*cancelled.cast::<&dyn Fn()>())() };
}

fn told(done: c_int) -> Sys<usize> {
    errno::told(done as isize)
}

/// libc's mask, of which the kernel reads the first 64 bits.
fn sigset(mask: Option<u64>) -> Option<sigset_t> {
    // SAFETY: zero is a valid set, longer than 64 bits.
    mask.map(|mask| unsafe {
        let mut set: sigset_t = core::mem::zeroed();
        (&raw mut set).cast::<u64>().write(mask);
        set
    })
}

fn pointer<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(core::ptr::null(), |value| value)
}

fn poll(
    fds: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    let (time, mask) = (timeout_ns.map(fd::timespec), sigset(mask));
    in_which(cancelled, || {
        told(next!(
            c"ppoll",
            fn(*mut pollfd, nfds_t, *const timespec, *const sigset_t) -> c_int,
            fds.as_mut_ptr(),
            fds.len() as nfds_t,
            pointer(&time),
            pointer(&mask)
        ))
    })
}

fn epoll_wait(
    epfd: c_int,
    events: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    cancelled: &dyn Fn(),
) -> Sys<usize> {
    let (time, mask) = (timeout_ns.map(fd::timespec), sigset(mask));
    in_which(cancelled, || {
        let done = told(next!(
            c"epoll_pwait2",
            fn(c_int, *mut epoll_event, c_int, *const timespec, *const sigset_t) -> c_int,
            epfd,
            events.as_mut_ptr(),
            events.len() as c_int,
            pointer(&time),
            pointer(&mask)
        ));
        if !fd::is_barred(&done) {
            return done;
        }
        // Before glibc 2.35 or Linux 5.11, or under a filter that was written before.
        told(next!(
            c"epoll_pwait",
            fn(c_int, *mut epoll_event, c_int, c_int, *const sigset_t) -> c_int,
            epfd,
            events.as_mut_ptr(),
            events.len() as c_int,
            fd::milliseconds(timeout_ns),
            pointer(&mask)
        ))
    })
}

fn check(cancelled: &dyn Fn()) {
    let address = next_of!(c"pthread_testcancel").address();
    if !address.is_null() {
        // SAFETY: the address is that of this function of libc's.
        let test: unsafe extern "C" fn() = unsafe { core::mem::transmute(address) };
        // SAFETY: takes nothing.
        in_which(cancelled, || unsafe { test() });
    }
}
