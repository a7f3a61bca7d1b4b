//! How long a ring has been full, and how often that was too long.

use crate::plain::{P32, P64};
use ringlet_linux::sys;

/// How far the receiver was when a look found the ring full, plus one, and since when; and how often the direction has left for that.
#[derive(Default)]
pub struct Stalls {
    at: P64,
    since_ns: P64,
    count: P32,
}

impl Stalls {
    /// In a segment that nobody has filled.
    pub fn begin(&self) {
        self.at.set(0);
    }

    pub fn reset(&self) {
        self.begin();
        self.count.set(0);
    }

    /// How long has it been full, with the receiver where it is?
    pub fn full_for_ns(&self, progress: u64) -> u64 {
        let now = sys::now_ns();
        if self.at.get() != progress + 1 {
            self.at.set(progress + 1);
            self.since_ns.set(now);
        }
        now.saturating_sub(self.since_ns.get())
    }

    pub fn leave(&self) {
        self.count.add(1);
    }

    pub fn times(&self) -> u32 {
        self.count.get()
    }
}
