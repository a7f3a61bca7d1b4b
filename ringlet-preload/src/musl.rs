//! What musl has in another way than the kernel and glibc.

use crate::objects;
use core::sync::atomic::{AtomicBool, Ordering};
use libc::msghdr;

static IS: AtomicBool = AtomicBool::new(false);

/// Before main.
pub fn look() {
    IS.store(objects::behind_us().any(|object| objects::is_musl(&object)), Ordering::Relaxed);
}

/// Is the program's libc musl?
#[inline(always)]
pub fn is() -> bool {
    IS.load(Ordering::Relaxed)
}

/// A message header as the kernel has it: musl's lengths are ints, and what lies behind each, where the kernel has the rest of a longer number,
/// may be anything.
///
/// # Safety
/// The program's header.
pub unsafe fn header(message: *const msghdr) -> msghdr {
    // SAFETY: by contract.
    let mut header = unsafe { *message };
    header.msg_iovlen = header.msg_iovlen as u32 as usize;
    header.msg_controllen = header.msg_controllen as u32 as usize;
    header
}
