//! What a fork must see whole: which connections this process follows, and how many processes hold each. A thread that changes both goes
//! through the gate; a thread that forks shuts it from the count until the copy is made.
//!
//! Nobody waits here for ever. A handler that interrupted a thread inside goes in as well, or forks, and a thread that has left by a long
//! jump is forgotten after a second: then a count may be off, which only keeps a connection from being moved.

use super::context;
use super::table::{Process, tables};
use ringlet_core::sync::Ordering;
use ringlet_linux::fd;
use std::cell::Cell;

const LOOK_NS: u64 = 100_000;
const LOOKS_MAX: u32 = 10_000;

thread_local! {
    /// How often this thread is inside.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

pub struct Inside(Option<&'static Process>);

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(process) = self.0 {
            INSIDE.set(INSIDE.get() - 1);
            one_less(process);
        }
    }
}

/// Never below none: `shut` may have given us up.
fn one_less(process: &Process) {
    let one_less = |inside: u32| inside.checked_sub(1);
    // ORDER: Release; pairs with `shut`.
    let _ = process.inside.fetch_update(Ordering::Release, Ordering::Relaxed, one_less);
}

/// The calling thread changes what is followed.
pub fn enter() -> Inside {
    let Some(process) = tables().map(|tables| tables.process()) else { return Inside(None) };
    let me = context::thread_number();
    for look in 1.. {
        // ORDER: SeqCst, both; pairs with `shut`: it sees us, or we see it.
        process.inside.fetch_add(1, Ordering::SeqCst);
        let forker = process.forker.load(Ordering::SeqCst);
        if forker == 0 || forker == me || INSIDE.get() > 0 || look == LOOKS_MAX {
            break;
        }
        one_less(process);
        nap();
    }
    INSIDE.set(INSIDE.get() + 1);
    Inside(Some(process))
}

/// The same for who does not wait: not while another thread forks.
pub fn try_enter() -> Option<Inside> {
    let Some(process) = tables().map(|tables| tables.process()) else { return Some(Inside(None)) };
    // ORDER: as in `enter`.
    process.inside.fetch_add(1, Ordering::SeqCst);
    INSIDE.set(INSIDE.get() + 1);
    let inside = Inside(Some(process));
    let forker = process.forker.load(Ordering::SeqCst);
    (forker == 0 || forker == context::thread_number() || INSIDE.get() > 1).then_some(inside)
}

/// The calling thread is about to fork.
pub fn shut(process: &Process) {
    let me = context::thread_number();
    for _ in 0..LOOKS_MAX {
        let before = process.forker.compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst);
        if before.is_ok() || before == Err(me) {
            break;
        }
        nap();
    }
    process.forker.store(me, Ordering::SeqCst);
    for _ in 0..LOOKS_MAX {
        // ORDER: SeqCst; pairs with `enter`, and with the Release of those who leave.
        if process.inside.load(Ordering::SeqCst) <= INSIDE.get() {
            return;
        }
        nap();
    }
    // (The next fork does not wait for them again.)
    process.inside.store(INSIDE.get(), Ordering::SeqCst);
}

/// It has forked; or it is the child, in which there is no other thread.
pub fn open(process: &Process, child: bool) {
    if child {
        process.inside.store(INSIDE.get(), Ordering::SeqCst);
    }
    process.forker.store(0, Ordering::SeqCst);
}

fn nap() {
    let _ = fd::poll(&mut [], Some(LOOK_NS), None);
}
