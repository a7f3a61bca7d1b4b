//! Whether a wait that a signal ended goes on (SA_RESTART) or returns EINTR.
//!
//! We sleep in ppoll, which never restarts, where the program's call would have been a receive or send, which does if the handler
//! says so; and we watch memory where a poll would have slept, which any handler ends. The kernel does not tell which handler ran. So the
//! program's handlers are run by ours, which note that they did and what they do to calls. The program sees its own handler in all that
//! sigaction tells.

use crate::local::{self, Local};
use ringlet_core::sync::{AtomicUsize, Ordering};

const SIGNALS: usize = 65;

/// The program's handlers, of which one of ours runs the last that was set; 0 where there never was one.
static HANDLERS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];

/// Has a handler run in this thread since its wait began, and does one of them end calls?
static HANDLED: Local<[bool; 2]> = Local::new(local::SIGNALS);

fn entry(signal: i32) -> Option<&'static AtomicUsize> {
    HANDLERS.get(signal as usize)
}

/// A wait begins: what came before it does not end it.
pub fn begin_wait() {
    HANDLED.set([false; 2]);
}

/// Has a handler run since the wait began? That ends a poll, whatever the handler says.
pub fn handled() -> bool {
    HANDLED.get()[0]
}

/// A wait ended by a signal: does the call go on?
pub fn restart() -> bool {
    !HANDLED.get()[1]
}

/// A handler runs in this thread.
pub fn note(interrupts: bool) {
    HANDLED.set([true, HANDLED.get()[1] || interrupts]);
}

/// The program's handler of a signal that ours stands in for, or did the last time.
pub fn handler_of(signal: i32) -> Option<usize> {
    let handler = entry(signal)?.load(Ordering::Relaxed);
    (handler != 0).then_some(handler)
}

pub fn set_handler(signal: i32, handler: Option<usize>) {
    if let Some(entry) = entry(signal) {
        entry.store(handler.unwrap_or(0), Ordering::Relaxed);
    }
}
