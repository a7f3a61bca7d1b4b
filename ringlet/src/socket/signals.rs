//! Whether a wait that a signal ended goes on (SA_RESTART) or returns EINTR.
//!
//! We sleep in ppoll, which never restarts, where the program's call would have been a receive or send, which does if the handler
//! says so. The kernel does not tell which handler ran. So a handler without SA_RESTART is run by one of ours, which notes that
//! it did; a wait that ended without such a note goes on. The program sees its own handler in all that sigaction tells.

use ringlet_core::sync::{AtomicUsize, Ordering};
use std::cell::Cell;

const SIGNALS: usize = 65;

/// The program's handlers that interrupt calls; 0 where there is none.
static INTERRUPTING: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];

thread_local! {
    static INTERRUPTED: Cell<bool> = const { Cell::new(false) };
}

/// A wait begins: what came before it does not end it.
pub fn begin_wait() {
    INTERRUPTED.set(false);
}

/// A wait ended by a signal: does the call go on?
pub fn restart() -> bool {
    !INTERRUPTED.get()
}

/// An interrupting handler runs in this thread.
pub fn note_interruption() {
    INTERRUPTED.set(true);
}

/// The program's handler of a signal, if it is one that ours stands in for.
pub fn handler_of(signal: i32) -> Option<usize> {
    let handler = INTERRUPTING.get(signal as usize)?.load(Ordering::Relaxed);
    (handler != 0).then_some(handler)
}

/// The program sets a handler that interrupts calls (`Some`), or anything else (`None`).
pub fn set_handler(signal: i32, interrupting: Option<usize>) {
    if let Some(entry) = INTERRUPTING.get(signal as usize) {
        entry.store(interrupting.unwrap_or(0), Ordering::Relaxed);
    }
}
