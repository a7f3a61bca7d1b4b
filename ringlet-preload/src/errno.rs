//! libc's errno of the calling thread, and results as libc's functions tell them.

use ringlet_linux::sys::{Errno, Sys};

/// What libc's function returned, with its errno.
#[inline(always)]
pub fn told(done: isize) -> Sys<usize> {
    // SAFETY: libc's errno of this thread.
    if done == -1 { Err(Errno(unsafe { *libc::__errno_location() })) } else { Ok(done as usize) }
}

pub fn set_errno(value: i32) {
    // SAFETY: libc's errno of this thread.
    unsafe { *libc::__errno_location() = value };
}

/// A result as libc returns it.
#[inline(always)]
pub fn result(value: Sys<usize>) -> isize {
    match value {
        Ok(n) => n as isize,
        Err(Errno(error)) => {
            set_errno(error);
            -1
        }
    }
}
