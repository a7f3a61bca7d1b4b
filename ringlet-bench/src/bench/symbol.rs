//! The one question that this ordinary socket program asks ringlet: where do the bytes go?

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::LazyLock;

type RingletPath = unsafe extern "C" fn(c_int) -> c_int;

static RINGLET_PATH: LazyLock<Option<RingletPath>> = LazyLock::new(|| {
    // SAFETY: RTLD_DEFAULT is a valid handle and the name is terminated by zero.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ringlet_path".as_ptr()) };
    // SAFETY: null is `None` in this representation; otherwise the symbol is the function that
    // the preload library exports under this name with this signature, and it stays loaded.
    unsafe { std::mem::transmute::<*mut libc::c_void, Option<RingletPath>>(symbol) }
});

/// Is the preload library in this process?
pub fn is_loaded() -> bool {
    RINGLET_PATH.is_some()
}

/// One of the view's `PATH_*` values; None where ringlet isn't loaded.
pub fn path(fd: BorrowedFd) -> Option<u32> {
    let ask = (*RINGLET_PATH)?;
    // SAFETY: any descriptor may be asked about; this one is open while it is borrowed.
    let path = unsafe { ask(fd.as_raw_fd()) };
    Some(path as u32)
}
