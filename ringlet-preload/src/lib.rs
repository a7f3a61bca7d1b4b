//! The exported C symbols that stand in front of libc's. No logic: each asks `ringlet::socket` whose call it is, and passes it on.
//!
//! Contract of every function here: that of the libc function of the same name, with the program's own arguments.

#![cfg_attr(panic = "abort", no_std)]
#![allow(clippy::missing_safety_doc)]

mod around;
mod calls;
mod cancellation;
mod datagrams;
mod descriptors;
mod next;
mod objects;
mod processes;
mod start;
mod waits;
#[cfg(panic = "abort")]
mod without_std;

use ringlet_linux::sys::{Errno, Sys};

pub(crate) fn set_errno(value: i32) {
    // SAFETY: libc's errno of this thread.
    unsafe { *libc::__errno_location() = value };
}

/// A result as libc returns it.
#[inline(always)]
pub(crate) fn result(value: Sys<usize>) -> isize {
    match value {
        Ok(n) => n as isize,
        Err(Errno(error)) => {
            set_errno(error);
            -1
        }
    }
}

// That libc is loaded before us, and under which names and versions its functions are there. (musl takes this name for its own.)
#[link(name = "c")]
unsafe extern "C" {}
