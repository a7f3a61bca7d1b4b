//! Sleeping on a word, of this process or shared.

use crate::fd::timespec;
use crate::sys::{Sys, sys};
use ringlet_core::sync::AtomicU32;

/// Sleeps while the word is `expected`, at most so long. Returns early for a signal, and may for nothing.
pub fn wait(word: &AtomicU32, expected: u32, timeout_ns: u64) {
    let _ = wait_word(word, expected, timeout_ns);
}

/// The same, and why it has returned.
pub fn wait_word(word: &AtomicU32, expected: u32, timeout_ns: u64) -> Sys<()> {
    let time = timespec(timeout_ns);
    // SAFETY: an aligned word and a time that outlive the call.
    unsafe { sys!(SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const time) }.map(drop)
}

/// Wakes all who sleep on the word.
pub fn wake(word: &AtomicU32) {
    // SAFETY: an aligned word; nothing is written.
    let _ = unsafe { sys!(SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Wakes one of them, who has slept longest. False if nobody sleeps.
pub fn wake_one(word: &AtomicU32) -> bool {
    // SAFETY: an aligned word; nothing is written.
    let woken = unsafe { sys!(SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
    woken == Ok(1)
}
