//! Locks in shared words, in every interleaving (see loom.rs): `RUSTFLAGS="--cfg loom" cargo test --release -p ringlet-core --test loom_reflect`.
#![cfg(loom)]

#[allow(dead_code)] // loom.rs uses the rest
mod model;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use model::model;
use ringlet_core::reflect::{Attempt, LockWord};
use ringlet_core::sync::{AtomicU32, Ordering};

struct Shared {
    word: LockWord,
    /// The kernel's, who looks at the word while nobody can wake: how many sleep, and how many of them are being woken.
    asleep: Mutex<(u32, u32)>,
    woken: Condvar,
    /// What the lock guards: loom finds two at a time.
    guarded: UnsafeCell<u32>,
}

impl Shared {
    fn new() -> Arc<Shared> {
        Arc::new(Shared {
            word: LockWord(AtomicU32::new(0)),
            asleep: Mutex::new((0, 0)),
            woken: Condvar::new(),
            guarded: UnsafeCell::new(0),
        })
    }

    fn sleep(&self, seen: u32) {
        let mut asleep = self.asleep.lock().unwrap();
        if self.word.0.load(Ordering::Relaxed) == seen {
            asleep.0 += 1;
            while asleep.1 == 0 {
                asleep = self.woken.wait(asleep).unwrap();
            }
            asleep.1 -= 1;
        }
    }

    /// Were there any?
    fn wake(&self, most: u32) -> bool {
        let mut asleep = self.asleep.lock().unwrap();
        let woken = asleep.0.min(most);
        *asleep = (asleep.0 - woken, asleep.1 + woken);
        self.woken.notify_all();
        woken > 0
    }

    /// As `Locks::acquire` does, but for its looks at times.
    fn acquire(&self, us: u32) {
        match self.word.try_acquire(us) {
            Attempt::Taken => return,
            Attempt::Ours => panic!("twice"),
            Attempt::Held(_) => {}
        }
        let mut has_slept = false;
        loop {
            match self.word.acquire_waiting(us, has_slept) {
                Attempt::Taken => return,
                Attempt::Ours => panic!("twice"),
                Attempt::Held(seen) => self.sleep(seen),
            }
            has_slept = true;
        }
    }

    fn change(&self) {
        // SAFETY: with the lock held; loom fails if another one is here.
        self.guarded.with_mut(|number| unsafe { *number += 1 });
    }

    fn release(&self, us: u32, hand_over: bool) {
        let wakes = self.word.release(us, hand_over).unwrap();
        if wakes && !self.wake(1) && hand_over && self.word.nobody_slept() {
            self.wake(1);
        }
    }
}

fn all_have_it(threads: u32, hand_over: bool) {
    model(move || {
        let shared = Shared::new();
        let act = |us: u32| {
            let shared = shared.clone();
            move || {
                shared.acquire(us);
                shared.change();
                shared.release(us, hand_over);
            }
        };
        let others: Vec<_> = (2..=threads).map(|us| thread::spawn(act(us))).collect();
        act(1)();
        others.into_iter().for_each(|thread| thread.join().unwrap());
        // SAFETY: all have gone.
        assert_eq!(shared.guarded.with(|number| unsafe { *number }), threads);
    });
}

#[test]
fn two_have_it_one_after_the_other() {
    all_have_it(2, false);
}

#[test]
fn three_have_it_and_nobody_sleeps_for_ever() {
    all_have_it(3, false);
}

#[test]
fn a_lock_that_is_handed_over_is_had_by_who_sleeps() {
    all_have_it(2, true);
    all_have_it(3, true);
}

/// As `Locks::acquire` does that is not to wait: of one that is handed over it waits for an instant, which may be over at any time.
fn tries(shared: &Shared, us: u32) -> bool {
    match shared.word.try_acquire(us) {
        Attempt::Taken => true,
        Attempt::Ours => panic!("twice"),
        Attempt::Held(seen) if LockWord::is_handed_over(seen) => {
            shared.word.acquire_waiting(us, true) == Attempt::Taken
        }
        Attempt::Held(_) => false,
    }
}

/// Who only tries takes one that was handed over to a sleeper, before or behind him: it is held by one, and the sleeper has it in the end.
#[test]
fn who_only_tries_leaves_nobody_asleep() {
    model(|| {
        let shared = Shared::new();
        shared.acquire(1);
        let (other, third) = (shared.clone(), shared.clone());
        let sleeps = thread::spawn(move || {
            other.acquire(2);
            other.change();
            other.release(2, false);
        });
        let tries = thread::spawn(move || {
            if tries(&third, 3) {
                third.change();
                third.release(3, false);
            }
        });
        shared.change();
        shared.release(1, true);
        sleeps.join().unwrap();
        tries.join().unwrap();
        assert!(shared.word.holder().is_none());
    });
}

/// The one that it was handed over to dies before he takes it: who only tries has it, and so has who comes to wait.
#[test]
fn what_was_handed_over_to_the_dead_is_had_by_others() {
    model(|| {
        let shared = Shared::new();
        shared.acquire(1);
        // (It says that it sleeps, and is no more.)
        assert!(matches!(shared.word.acquire_waiting(2, false), Attempt::Held(_)));
        assert_eq!(shared.word.release(1, true), Ok(true));
        let other = shared.clone();
        let waits = thread::spawn(move || {
            // (Its sleeps are for a time only: that is over.)
            while other.word.acquire_waiting(3, true) != Attempt::Taken {
                thread::yield_now();
            }
            other.change();
            other.release(3, false);
        });
        if tries(&shared, 4) {
            shared.change();
            shared.release(4, true);
        }
        waits.join().unwrap();
        assert!(shared.word.holder().is_none());
    });
}

/// Its holder dies: the keeper gives it up, and wakes all.
#[test]
fn a_holder_that_dies_leaves_it_to_others() {
    model(|| {
        let shared = Shared::new();
        shared.acquire(1);
        shared.change();
        let other = shared.clone();
        let waits = thread::spawn(move || {
            other.acquire(2);
            other.change();
            other.release(2, false);
        });
        if shared.word.give_up(1) {
            shared.wake(u32::MAX);
        }
        assert!(!shared.word.give_up(1), "it is another's, or nobody's");
        waits.join().unwrap();
    });
}
