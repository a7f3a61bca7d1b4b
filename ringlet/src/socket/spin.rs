//! How long to watch shared memory before sleeping.
//!
//! The budget adapts: watching that paid doubles it up to the configured limit, watching in vain halves it. A thread that
//! finds itself preempted while watching, or whose yield let somebody else run for long, takes the processors for crowded
//! and sleeps at once for some rounds: then the peer needs our processor more than we need to look.
//!
//! The kernel likes to wake a thread where its waker runs, so two ends that talk often share one processor while another idles. Then
//! watching is in vain, and neither ever sleeps long enough to be moved. So a thread that finds by a yield that its peer runs
//! on the same processor moves to another one that it may use.

use ringlet_linux::sys;
use std::cell::Cell;

/// A yield that took longer gave the processor to somebody.
const CROWDED_NS: u64 = 8_000;
/// A budget below this is not worth starting.
const LEAST_NS: u64 = 1_000;
/// Rounds without watching after the processors were found crowded; after so many, one more try.
const ROUNDS_OFF: u32 = 16;
/// Time between yields while watching: a yield costs a system call of a fraction of it.
const YIELD_EVERY_NS: u64 = 4_000;
const LOOKS_PER_CLOCK: u32 = 16;

/// A yield that took longer let somebody run.
const SHARED_NS: u64 = 1_500;
/// Time before a thread moves again; doubled each time that it is needed again soon.
const MOVE_AGAIN_NS: u64 = 2_000_000;
const MOVE_AGAIN_MAX_NS: u64 = 1_000_000_000;

thread_local! {
    static MOVED_NS: Cell<u64> = const { Cell::new(0) };
    static MOVE_AGAIN: Cell<u64> = const { Cell::new(MOVE_AGAIN_NS) };
    static BUDGET_NS: Cell<u64> = const { Cell::new(u64::MAX) };
    static OFF: Cell<u32> = const { Cell::new(0) };
}

/// Where the peer that a watcher waits for runs.
#[derive(Clone, Copy)]
pub struct Peer {
    pub processor: u32,
    /// Of two that share a processor this one moves; the other only when that does not help.
    pub we_move: bool,
}

/// Watches until `ready` or until the budget is spent; says whether it became ready. `peer` is asked when the processor turns out to be
/// shared.
#[inline]
pub fn watch(
    limit_us: u64,
    peer: impl Fn() -> Option<Peer>,
    mut ready: impl FnMut() -> bool,
) -> bool {
    let limit = limit_us * 1000;
    if limit == 0 {
        return ready();
    }
    if OFF.get() > 0 {
        OFF.set(OFF.get() - 1);
        return ready();
    }
    let budget = BUDGET_NS.get().min(limit).max(LEAST_NS.min(limit));
    // An answer that comes at once is not kept waiting by the clock.
    if looks(&mut ready) {
        BUDGET_NS.set((budget * 2).min(limit));
        return true;
    }
    let start = sys::now_ns();
    let mut yielded = start;
    let mut last = start;
    loop {
        if looks(&mut ready) {
            BUDGET_NS.set((budget * 2).min(limit));
            return true;
        }
        let mut now = sys::now_ns();
        if now - last > CROWDED_NS {
            return give_up(&mut ready);
        }
        if now - start > budget {
            BUDGET_NS.set(budget / 2);
            return ready();
        }
        if now - yielded > YIELD_EVERY_NS {
            sys::sched_yield();
            let back = sys::now_ns();
            if back - now > SHARED_NS {
                part(back, &peer);
            }
            if back - now > CROWDED_NS {
                return give_up(&mut ready);
            }
            now = back;
            yielded = now;
        }
        last = now;
    }
}

#[inline(always)]
fn looks(ready: &mut impl FnMut() -> bool) -> bool {
    (0..LOOKS_PER_CLOCK).any(|_| {
        let is_ready = ready();
        if !is_ready {
            core::hint::spin_loop();
        }
        is_ready
    })
}

/// Moves away from a processor that the peer shares.
#[cold]
fn part(now: u64, peer: &impl Fn() -> Option<Peer>) {
    let Some(peer) = peer() else { return };
    let here = sys::processor();
    let patience = MOVE_AGAIN.get() * if peer.we_move { 1 } else { 8 };
    if peer.processor != here || now - MOVED_NS.get() < patience {
        return;
    }
    // Needed again soon after the last time: it does not help much here.
    let soon = now - MOVED_NS.get() < patience * 8;
    MOVE_AGAIN.set(if soon {
        (MOVE_AGAIN.get() * 2).min(MOVE_AGAIN_MAX_NS)
    } else {
        MOVE_AGAIN_NS
    });
    MOVED_NS.set(now);
    sys::leave_processor(here);
}

#[cold]
fn give_up(ready: &mut impl FnMut() -> bool) -> bool {
    OFF.set(ROUNDS_OFF);
    ready()
}
