//! What is set once, and read ever after: a table, a function of who stands above.

#[cfg(test)]
use crate::worlds;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use ringlet_core::sync::{AtomicU32, Ordering};

const NOTHING: u32 = 0;
const BEING_SET: u32 = 1;
const SET: u32 = 2;

/// There is one, but for tests that play several processes.
#[cfg(not(test))]
mod worlds {
    pub const COUNT: usize = 1;
    #[inline(always)]
    pub fn now() -> usize {
        0
    }
}

pub struct Once<T> {
    of_worlds: [Slot<T>; worlds::COUNT],
}

struct Slot<T> {
    state: AtomicU32,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: the value is written by the one thread that has changed the state for that, before any other reads it; then it stays.
#[allow(unsafe_code)]
unsafe impl<T: Send + Sync> Sync for Once<T> {}

impl<T> Once<T> {
    pub const fn new() -> Once<T> {
        Once {
            of_worlds: [const {
                Slot {
                    state: AtomicU32::new(NOTHING),
                    value: UnsafeCell::new(MaybeUninit::uninit()),
                }
            }; worlds::COUNT],
        }
    }

    /// False: it was set before.
    #[allow(unsafe_code)]
    pub fn set(&self, value: T) -> bool {
        let slot = &self.of_worlds[worlds::now()];
        // ORDER: Relaxed; only one thread comes further, and what it writes is published below.
        let (free, taken) = (Ordering::Relaxed, Ordering::Relaxed);
        if slot.state.compare_exchange(NOTHING, BEING_SET, free, taken).is_err() {
            return false;
        }
        // SAFETY: nobody else writes, as said above, and nobody reads yet.
        unsafe { (*slot.value.get()).write(value) };
        // ORDER: Release; pairs with `get`: the value is there.
        slot.state.store(SET, Ordering::Release);
        true
    }

    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn get(&self) -> Option<&T> {
        let slot = &self.of_worlds[worlds::now()];
        // ORDER: Acquire; pairs with `set`.
        // SAFETY: it was set, and is never written again.
        (slot.state.load(Ordering::Acquire) == SET)
            .then(|| unsafe { (*slot.value.get()).assume_init_ref() })
    }
}

impl<T> Default for Once<T> {
    fn default() -> Once<T> {
        Once::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_stays() {
        let once = Once::new();
        assert_eq!(once.get(), None);
        assert!(once.set(1) && !once.set(2));
        assert_eq!(once.get(), Some(&1));
    }
}
