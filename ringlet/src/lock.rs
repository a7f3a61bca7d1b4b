//! A lock that a dead owner does not keep.

use crate::thread::{self, Fate};
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::map::Zeroed;
use ringlet_linux::{fd, sys};

/// A lock between threads and, after fork, processes: the word holds the owner (`thread::owner_number`), so a dead one is found out.
/// Whoever takes it over finds consistent state, because each operation publishes with one store.
#[derive(Default)]
#[repr(transparent)]
pub struct Lock(AtomicU32);

// SAFETY: an atomic only; zero is a free lock.
#[allow(unsafe_code)]
unsafe impl Zeroed for Lock {}

/// Rounds of a wait for a lock: watching, then sleeping, so that an owner of lower priority gets the processor.
const WATCH_ROUNDS: u32 = 4096;
const SLEEP_MIN_NS: u64 = 10_000;
const SLEEP_MAX_NS: u64 = 1_000_000;
/// Sleeps until an owner of which it can't be known whether it lives is waited for no longer: about a second.
const STRANGE_SLEEPS: u32 = 1000;
/// And so many until it is asked whether it has ended, and is only not yet waited for.
const STRANGE_LOOK_SLEEPS: u32 = 20;

/// Held until dropped, by this owner.
pub struct Held<'a>(&'a AtomicU32, u32);

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // The word may have become another lock's: that of an end mapped anew.
        if self.0.load(Ordering::Relaxed) == self.1 {
            // ORDER: Release; pairs with the Acquire in `Lock::take`.
            self.0.store(0, Ordering::Release);
        }
    }
}

impl Lock {
    /// `None` when the calling thread holds it already: we are in a signal handler that interrupted the holder. And, after a second, when
    /// it is not known who holds it.
    #[inline(always)]
    pub fn take(&self) -> Option<Held<'_>> {
        let me = thread::owner_number();
        // ORDER: Acquire; pairs with the Release in `Held::drop`.
        match self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Held(&self.0, me)),
            Err(owner) if owner == me => None,
            Err(_) => self.take_contended(me),
        }
    }

    /// Does the calling thread hold it?
    pub fn is_ours(&self) -> bool {
        self.0.load(Ordering::Relaxed) == thread::owner_number()
    }

    /// Makes it ours for good.
    pub fn keep(&self) {
        self.0.store(thread::owner_number(), Ordering::Relaxed);
    }

    /// Frees a lock whose owner was left behind in another process by a fork.
    pub fn reset(&self) {
        // A page that a child does not write to stays its parent's memory.
        if self.0.load(Ordering::Relaxed) != 0 {
            self.0.store(0, Ordering::Relaxed);
        }
    }

    /// As `take`, but without waiting.
    pub fn try_take(&self) -> Option<Held<'_>> {
        let me = thread::owner_number();
        // ORDER: as in `take`.
        self.0
            .compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Held(&self.0, me))
    }

    /// An owner of our own process is waited for as long as it lives. One of another process may be dead while its number names a stranger,
    /// or be known to us under another number (another pid namespace): it is not waited for for ever, and the lock is not taken from it.
    #[cold]
    fn take_contended(&self, me: u32) -> Option<Held<'_>> {
        let (mut pause, mut strange) = (SLEEP_MIN_NS, (0, 0));
        for round in 0u32.. {
            // ORDER: as in `take`.
            let Err(owner) = self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed)
            else {
                break;
            };
            if owner == me {
                return None;
            }
            if round < WATCH_ROUNDS {
                if round % 64 < 48 {
                    core::hint::spin_loop()
                } else {
                    sys::sched_yield()
                }
                continue;
            }
            let dead = match thread::fate_of(owner) {
                Fate::Unknown if strange.0 != owner => {
                    strange = (owner, 0);
                    false
                }
                Fate::Unknown => {
                    strange.1 += 1;
                    strange.1 % STRANGE_LOOK_SLEEPS == 0 && thread::has_ended(owner)
                }
                fate => matches!(fate, Fate::Dead),
            };
            // ORDER: Acquire, as in `take`: whatever the dead owner last published.
            if dead
                && self.0.compare_exchange(owner, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                break;
            }
            if strange.1 == STRANGE_SLEEPS {
                return None;
            }
            let _ = fd::poll(&mut [], Some(pause), None);
            pause = (pause * 2).min(SLEEP_MAX_NS);
        }
        Some(Held(&self.0, me))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    /// A lock that this owner holds.
    fn held_by(owner: i32) -> Lock {
        Lock(AtomicU32::new(owner as u32))
    }

    #[test]
    fn a_lock_is_waited_for_while_its_owner_lives() {
        let (lock, (tell, hear)) = (Lock::default(), mpsc::channel());
        thread::scope(|scope| {
            scope.spawn(|| {
                let held = lock.take();
                tell.send(sys::gettid()).unwrap();
                // Until the other one waits for it, in its sleeps.
                thread::sleep(std::time::Duration::from_millis(20));
                assert!(lock.is_ours());
                drop(held);
            });
            hear.recv().unwrap();
            assert!(lock.take().is_some());
        });
        assert!(lock.try_take().is_some());
    }

    #[test]
    fn a_lock_of_a_dead_thread_is_taken_over() {
        let lock = Lock::default();
        let owner = thread::scope(|scope| {
            let taken = scope.spawn(|| {
                std::mem::forget(lock.take());
                sys::gettid()
            });
            taken.join().unwrap()
        });
        while sys::thread_exists(owner) {
            thread::yield_now();
        }
        assert!(lock.take().is_some() && lock.try_take().is_some());
    }

    #[test]
    fn a_lock_of_a_process_that_nobody_waits_for_is_taken_over() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let lock = held_by(child.id() as i32);
        assert!(lock.take().is_some());
        child.wait().unwrap();
    }

    #[test]
    fn a_lock_of_a_stranger_is_waited_for_no_longer_than_a_while() {
        // One that lives, and one of another pid namespace, of which nothing is known.
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        for owner in [child.id() as i32, 1 << 22 | 1] {
            let lock = held_by(owner);
            assert!(lock.take().is_none() && lock.try_take().is_none());
            assert_eq!(lock.0.into_inner(), owner as u32);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
