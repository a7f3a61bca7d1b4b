//! Whether a wait that a signal ended goes on (SA_RESTART) or returns EINTR.
//!
//! We sleep in ppoll, which never restarts, where the program's call would have been a receive or send, which does if the
//! handler says so. Which handler ran is not told, but which handlers there are is known by watching sigaction: if all agree,
//! so do we; if not, `stream` sleeps in a receive, where the kernel knows.

use ringlet_core::sync::{AtomicU64, Ordering};

/// Signals with a handler that restarts calls, and with one that interrupts them.
static RESTARTING: AtomicU64 = AtomicU64::new(0);
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);

/// The program has set the handler of a signal.
pub fn handler_set(signal: i32, is_function: bool, flags: i32) {
    if !(1..=64).contains(&signal) {
        return;
    }
    let bit = 1u64 << (signal - 1);
    RESTARTING.fetch_and(!bit, Ordering::Relaxed);
    INTERRUPTING.fetch_and(!bit, Ordering::Relaxed);
    if is_function {
        let kind = if flags & libc::SA_RESTART != 0 { &RESTARTING } else { &INTERRUPTING };
        kind.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Are there handlers of both kinds?
pub fn mixed() -> bool {
    RESTARTING.load(Ordering::Relaxed) != 0 && INTERRUPTING.load(Ordering::Relaxed) != 0
}

/// A wait ended by a signal: does it go on? (If no handler is known, the runtime's own are meant, which restart.)
pub fn restart() -> bool {
    INTERRUPTING.load(Ordering::Relaxed) == 0
}
