//! How long a ring has been full.

use crate::plain::P64;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::sys;

/// How far the receiver was when a look found the ring full, plus one, and since when.
#[derive(Default)]
pub struct Stalls {
    at: AtomicU64,
    since_ns: P64,
}

impl Stalls {
    pub fn reset(&self) {
        self.at.store(0, Ordering::Relaxed);
    }

    /// How long has it been full, with the receiver where it is?
    pub fn full_for_ns(&self, progress: u64) -> u64 {
        let now = sys::now_ns();
        // ORDER: Acquire; pairs with the release in `full_for_ns`: who finds the place finds its time.
        if self.at.load(Ordering::Acquire) != progress + 1 {
            self.since_ns.set(now);
            // ORDER: Release; pairs with the acquire in `full_for_ns`.
            self.at.store(progress + 1, Ordering::Release);
        }
        now.saturating_sub(self.since_ns.get())
    }
}
