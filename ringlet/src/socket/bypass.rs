//! What this process does past us, for which all of its connections stay on the kernel.

use crate::reasons::Reason;
use ringlet_core::sync::{AtomicU32, Ordering};

/// Why nothing of this process may be moved: bits for good, and the loads under way. (Not in the tables: a constructor may come
/// before them.)
pub static BEHIND_OUR_BACK: AtomicU32 = AtomicU32::new(0);

pub const IO_URING: u32 = 1 << 31;
pub const AROUND: u32 = 1 << 30;
pub const CLOSED_IN: u32 = 1 << 29;
pub const FOR_GOOD: u32 = IO_URING | AROUND | CLOSED_IN;

pub fn is_closed_in() -> bool {
    BEHIND_OUR_BACK.load(Ordering::SeqCst) & CLOSED_IN != 0
}

/// Why this process's connections have to stay on the kernel, and whether for good; `meet` and `datagram` ask before they move one,
/// and `meet` again when it has.
pub fn keeps_all_on_kernel() -> Option<(Reason, bool)> {
    match BEHIND_OUR_BACK.load(Ordering::SeqCst) {
        0 => None,
        bits if bits & CLOSED_IN != 0 => Some((Reason::Sandbox, true)),
        bits if bits & IO_URING != 0 => Some((Reason::IoUring, true)),
        bits => Some((Reason::Around, bits & AROUND != 0)),
    }
}
