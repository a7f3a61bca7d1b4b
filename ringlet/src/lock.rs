//! A lock that a dead owner does not keep, nor a frame that its thread has jumped out of.
//!
//! A signal handler may leave a call at any instruction by a long jump, and then nobody frees the lock. So a thread notes where the frame is that has
//! taken one. Who begins a call and finds that its own thread has the lock is either in a handler, deeper on the stack than that frame; or the
//! frame has gone.

use crate::local::{self, Local};
use crate::thread::{self, Fate};
use core::arch::asm;
use core::sync::atomic::compiler_fence;
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

/// Frames that lie further apart than this are taken to be on different stacks, which tell nothing about each other.
const SAME_STACK_BYTES: u32 = 1 << 13;

/// Which locks the thread has taken last, and where (`note_of`); those of one place push each other out, and then nothing is known.
const NOTED_COUNT: usize = 64;
static NOTED: Local<[u64; NOTED_COUNT]> = Local::new(local::LOCKS);

/// The caller's stack pointer; the lower half, which tells frames of one stack apart.
#[inline(always)]
fn frame() -> u32 {
    let here: u64;
    // SAFETY: reads a register.
    #[allow(unsafe_code)]
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("mov {}, rsp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    // SAFETY: as above.
    #[allow(unsafe_code)]
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mov {}, sp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    here as u32
}

/// That this lock was taken in this frame.
#[inline(always)]
fn note_of(lock: &AtomicU32, frame: u32) -> u64 {
    (core::ptr::from_ref(lock) as u64) << 32 | u64::from(frame)
}

#[inline(always)]
fn is_of(note: u64, lock: &AtomicU32) -> bool {
    note >> 32 == note_of(lock, 0) >> 32
}

#[inline(always)]
fn place_of(lock: &AtomicU32) -> usize {
    // (Its middle bits, spread by a product: locks lie at the same place in each of many entries.)
    const SPREADS: u32 = 0x9e37_79b1;
    let at = (core::ptr::from_ref(lock) as usize >> 2) as u32;
    (at.wrapping_mul(SPREADS) >> 16) as usize % NOTED_COUNT
}

#[inline(always)]
fn note(lock: &AtomicU32, note: u64) -> u64 {
    let before = NOTED.with_each(|all| all[place_of(lock)].replace(note));
    // WHY a fence: a handler of this thread is to find the note there when the lock is taken.
    compiler_fence(Ordering::SeqCst);
    before
}

/// Held until dropped, by this owner.
pub struct Held<'a>(&'a AtomicU32, u32, bool);

impl Held<'_> {
    /// Its owner before left it in the midst of what it did.
    #[inline(always)]
    pub fn was_left(&self) -> bool {
        self.2
    }
}

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // The word may have become another lock's: that of an end mapped anew.
        if self.0.load(Ordering::Relaxed) == self.1 {
            // ORDER: Release; pairs with the Acquire in `Lock::take`.
            self.0.store(0, Ordering::Release);
        }
        // WHY a fence: for a handler of this thread the lock is free before its note goes.
        compiler_fence(Ordering::SeqCst);
        // (Whoever is interrupted before he has taken it finds that nothing is known.)
        NOTED.with_each(|all| {
            let place = &all[place_of(self.0)];
            if is_of(place.get(), self.0) {
                place.set(0);
            }
        });
    }
}

impl Lock {
    /// `None` when the calling thread holds it already: we are in a signal handler that interrupted the holder. And, after a second, when
    /// it is not known who holds it.
    #[inline(always)]
    pub fn take(&self) -> Option<Held<'_>> {
        self.take_as(false)
    }

    /// The same for a call that has not taken it before: if its thread holds it in a frame that is not further out, it has left that by a long jump.
    #[inline(always)]
    pub fn take_first(&self) -> Option<Held<'_>> {
        self.take_as(true)
    }

    #[inline(always)]
    fn take_as(&self, first: bool) -> Option<Held<'_>> {
        let (me, here) = (thread::owner_number(), frame());
        // Before it is taken: no handler sees it held beside an older note.
        let before = note(&self.0, note_of(&self.0, here));
        // ORDER: Acquire; pairs with the Release in `Held::drop`.
        match self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Held(&self.0, me, false)),
            Err(owner) if owner == me => self.take_from_self(first, before, here),
            Err(_) => self.take_contended(me),
        }
    }

    #[cold]
    fn take_from_self(&self, first: bool, before: u64, here: u32) -> Option<Held<'_>> {
        // The stack grows down.
        let beyond = here.wrapping_sub(before as u32);
        if first
            && is_of(before, &self.0)
            && beyond < SAME_STACK_BYTES
            && !sys::is_on_signal_stack()
        {
            return Some(Held(&self.0, self.0.load(Ordering::Relaxed), true));
        }
        note(&self.0, before);
        None
    }

    /// Who holds it (`thread::owner_number`); 0: nobody.
    pub fn owner(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Does the calling thread hold it?
    pub fn is_ours(&self) -> bool {
        self.0.load(Ordering::Relaxed) == thread::owner_number()
    }

    /// Makes it ours for good.
    pub fn keep(&self) {
        self.0.store(thread::owner_number(), Ordering::Relaxed);
        note(&self.0, 0);
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
        let (me, here) = (thread::owner_number(), frame());
        let before = note(&self.0, note_of(&self.0, here));
        // ORDER: as in `take`.
        if self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return Some(Held(&self.0, me, false));
        }
        note(&self.0, before);
        None
    }

    /// An owner of our own process is waited for as long as it lives. One of another process may be dead while its number names a stranger,
    /// or be known to us under another number (another pid namespace): it is not waited for for ever, and the lock is not taken from it.
    #[cold]
    fn take_contended(&self, me: u32) -> Option<Held<'_>> {
        let (mut pause, mut strange, mut left) = (SLEEP_MIN_NS, (0, 0), false);
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
                left = true;
                break;
            }
            if strange.1 == STRANGE_SLEEPS {
                note(&self.0, 0);
                return None;
            }
            let _ = fd::poll(&mut [], Some(pause), None);
            pause = (pause * 2).min(SLEEP_MAX_NS);
        }
        Some(Held(&self.0, me, left))
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

    /// Work further down the stack than its caller.
    #[inline(never)]
    fn deeper<T>(work: impl FnOnce() -> T) -> T {
        let room = [0u8; 2048];
        core::hint::black_box(&room);
        let done = work();
        core::hint::black_box(&room);
        done
    }

    #[test]
    fn a_lock_of_a_frame_that_was_jumped_out_of_is_taken_over_by_the_next_call() {
        let lock = Lock::default();
        // Its drop is skipped.
        deeper(|| std::mem::forget(lock.take()));
        assert!(lock.take().is_none(), "not by who may hold it himself");
        let held = lock.take_first().expect("its frame has gone");
        assert!(held.was_left());
        drop(held);
        assert!(!lock.take_first().unwrap().was_left());
        // A handler is deeper than the frame that it has interrupted, which goes on.
        let held = lock.take();
        assert!(deeper(|| lock.take_first().is_none() && lock.try_take().is_none()));
        drop(held);
        assert!(lock.take().is_some());
        // One that is kept for good, as in a child by fork, is nobody's.
        lock.keep();
        assert!(lock.take_first().is_none());
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
