//! A lock that a dead owner does not keep, nor a frame that its thread has jumped out of.
//!
//! A signal handler may leave a call at any instruction by a long jump, and then nobody frees the lock. So the lock says where the frame is that has
//! taken it. Who finds that its own thread has the lock is either in a handler, or further in a call that has it, deeper on the stack than that
//! frame; or the frame has gone. Where that can't be told (`stack::has_left`), it has not.

use crate::socket::bypass;
use crate::stack;
use crate::thread::{self, Fate};
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::map::Zeroed;
use ringlet_linux::{fd, sys};

/// A lock between threads and, after fork, processes: the upper half of the word holds the owner (`thread::owner_number`), so a dead one is found out;
/// the lower half its frame. Whoever takes it over finds consistent state, because each operation publishes with one store.
#[derive(Default)]
#[repr(transparent)]
pub struct Lock(AtomicU64);

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

/// In a process that has closed itself in, where a filter may forbid the calls of such a wait: about a second, too.
const CALLLESS_ROUNDS: u32 = 1 << 25;

/// A handler's frames lie deeper by more than this than what it has interrupted. KERNEL: beside the 128 bytes that a function may use below its stack
/// pointer there are all registers, of which those of the floating point alone take 512 bytes.
const HANDLER_BYTES: usize = 512;

/// The frame of a lock is noted in units to which the stack is aligned.
const FRAME_UNIT: usize = 16;

#[inline(always)]
fn frame_of(address: usize) -> u32 {
    (address / FRAME_UNIT) as u32
}

#[inline(always)]
fn word_of(owner: u32, frame: u32) -> u64 {
    u64::from(owner) << 32 | u64::from(frame)
}

#[inline(always)]
fn owner_of(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The caller's, as the word of a lock that it has taken.
#[inline(always)]
fn mine() -> u64 {
    word_of(thread::owner_number(), frame_of(stack::here()))
}

/// Held until dropped, by this owner.
pub struct Held<'a>(&'a AtomicU64, u64, bool);

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
    }
}

// (All that takes one is part of the function that holds it, and so is what hands it on: the frame is to be the holder's.)
impl Lock {
    /// `None` when the calling thread holds it already: we are further in a call that does, or in a signal handler that interrupted the holder. And,
    /// after a second, when it is not known who holds it.
    #[inline(always)]
    pub fn take(&self) -> Option<Held<'_>> {
        self.take_as(false)
    }

    /// The same for a call that has not taken it before: its frame need not lie beyond the one that was left.
    #[inline(always)]
    pub fn take_first(&self) -> Option<Held<'_>> {
        self.take_as(true)
    }

    #[inline(always)]
    fn take_as(&self, first: bool) -> Option<Held<'_>> {
        let mine = mine();
        // ORDER: Acquire; pairs with the Release in `Held::drop`.
        match self.0.compare_exchange(0, mine, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Held(&self.0, mine, false)),
            Err(word) if owner_of(word) == owner_of(mine) => {
                self.take_from_self(first, word, mine, stack::here())
            }
            Err(_) => self.take_contended(mine),
        }
    }

    #[cold]
    fn take_from_self(&self, first: bool, word: u64, mine: u64, here: usize) -> Option<Held<'_>> {
        let noted = word as u32;
        let nearest = if first { HANDLER_BYTES as isize } else { -(FRAME_UNIT as isize) };
        // How far it is below us.
        let beyond = frame_of(here).wrapping_sub(noted) as i32 as isize * FRAME_UNIT as isize;
        let frame = here.wrapping_add_signed(-beyond);
        let has_left =
            noted != 0 && beyond + nearest >= 0 && stack::has_left(frame.min(here), here);
        // Relaxed: it was this thread's. A handler may have come in between.
        let order = Ordering::Relaxed;
        (has_left && self.0.compare_exchange(word, mine, order, order).is_ok())
            .then(|| Held(&self.0, mine, true))
    }

    /// Who holds it (`thread::owner_number`); 0: nobody.
    pub fn owner(&self) -> u32 {
        owner_of(self.0.load(Ordering::Relaxed))
    }

    /// Does the calling thread hold it?
    pub fn is_ours(&self) -> bool {
        owner_of(self.0.load(Ordering::Relaxed)) == thread::owner_number()
    }

    /// Makes it ours for good.
    pub fn keep(&self) {
        self.0.store(word_of(thread::owner_number(), 0), Ordering::Relaxed);
    }

    /// Frees a lock whose owner was left behind in another process by a fork.
    pub fn reset(&self) {
        // A page that a child does not write to stays its parent's memory.
        if self.0.load(Ordering::Relaxed) != 0 {
            self.0.store(0, Ordering::Relaxed);
        }
    }

    /// As `take`, but without waiting.
    #[inline(always)]
    pub fn try_take(&self) -> Option<Held<'_>> {
        let mine = mine();
        // ORDER: as in `take`.
        match self.0.compare_exchange(0, mine, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Held(&self.0, mine, false)),
            Err(_) => None,
        }
    }

    /// An owner of our own process is waited for as long as it lives. One of another process may be dead while its number names a stranger,
    /// or be known to us under another number (another pid namespace): it is not waited for for ever, and the lock is not taken from it. Nor is any by who
    /// may not ask for its owner.
    #[cold]
    fn take_contended(&self, mine: u64) -> Option<Held<'_>> {
        let (mut pause, mut strange, mut left) = (SLEEP_MIN_NS, (0, 0), false);
        for round in 0u32.. {
            // ORDER: as in `take`.
            let Err(word) = self.0.compare_exchange(0, mine, Ordering::Acquire, Ordering::Relaxed)
            else {
                break;
            };
            let owner = owner_of(word);
            if owner == owner_of(mine) {
                return None;
            }
            if bypass::is_closed_in() {
                if round == CALLLESS_ROUNDS {
                    return None;
                }
                core::hint::spin_loop();
                continue;
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
                && self.0.compare_exchange(word, mine, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                left = true;
                break;
            }
            if strange.1 == STRANGE_SLEEPS {
                return None;
            }
            let _ = fd::poll(&mut [], Some(pause), None);
            pause = (pause * 2).min(SLEEP_MAX_NS);
        }
        Some(Held(&self.0, mine, left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::tests::{amid, deeper};
    use std::sync::mpsc;
    use std::thread;

    /// A lock that this owner holds.
    fn held_by(owner: i32) -> Lock {
        Lock(AtomicU64::new(word_of(owner as u32, 1)))
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
    fn a_lock_of_a_frame_that_was_jumped_out_of_is_taken_over_by_the_next_call() {
        let lock = Lock::default();
        // Its drop is skipped.
        deeper::<2048, _>(|| std::mem::forget(lock.take()));
        assert!(deeper::<8192, _>(|| lock.take_first().is_none()), "a handler may be there");
        let held = lock.take_first().expect("its frame has gone");
        assert!(held.was_left());
        drop(held);
        assert!(!lock.take_first().unwrap().was_left());
        // Far below; and by what may hold it itself, further out.
        deeper::<{ 300 << 10 }, _>(|| std::mem::forget(lock.take()));
        assert!(lock.take().expect("its frame has gone").was_left());
        // By the next call, which need not be as far out.
        std::mem::forget(lock.take());
        assert!(lock.take().is_none() && lock.try_take().is_none());
        assert!(deeper::<64, _>(|| lock.take_first().is_some()));
        // A handler is deeper than the frame that it has interrupted, which goes on.
        let held = lock.take();
        assert!(deeper::<2048, _>(|| lock.take_first().is_none() && lock.take().is_none()));
        drop(held);
        assert!(lock.take().is_some());
        // One that is kept for good, as in a child by fork, is nobody's.
        lock.keep();
        assert!(lock.take_first().is_none());
    }

    #[test]
    fn of_many_locks_that_were_left_each_is_taken_over() {
        let locks: Vec<Lock> = (0..1000).map(|_| Lock::default()).collect();
        deeper::<2048, _>(|| locks.iter().for_each(|lock| std::mem::forget(lock.take())));
        assert!(locks.iter().all(|lock| lock.take_first().is_some_and(|held| held.was_left())));
    }

    #[test]
    fn a_lock_of_a_coroutine_is_not_taken_over_by_another_one() {
        let lock = Lock::default();
        amid(
            |go_over| {
                let held = lock.take().unwrap();
                go_over();
                assert!(lock.is_ours(), "it goes on with what it has");
                drop(held);
                assert!(!lock.take_first().unwrap().was_left());
            },
            || assert!(lock.take_first().is_none() && lock.take().is_none()),
        );
    }

    /// A child that has closed itself in waits for a lock of its parent's, and makes none of the calls that its filter kills for.
    #[test]
    #[allow(unsafe_code)]
    fn who_has_closed_itself_in_waits_without_a_call() {
        const FORBIDDEN: [libc::c_long; 4] =
            [libc::SYS_sched_yield, libc::SYS_ppoll, libc::SYS_tgkill, libc::SYS_tkill];
        fn confine() -> bool {
            let of = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
            let (load, equal, answer) = (0x20, 0x15, 0x06);
            let mut filter = vec![of(load, 0, 0, 0)];
            for (at, call) in FORBIDDEN.iter().enumerate() {
                filter.push(of(equal, (FORBIDDEN.len() - at) as u8, 0, *call as u32));
            }
            filter.push(of(answer, 0, 0, libc::SECCOMP_RET_ALLOW));
            filter.push(of(answer, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
            let program =
                libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
            // SAFETY: the program is there for the call.
            unsafe {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                    && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
            }
        }
        let (rights, how) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: fresh memory, zero, which stays mapped; a free lock.
        let lock: &Lock = unsafe {
            let at = libc::mmap(std::ptr::null_mut(), 4096, rights, how, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            &*at.cast()
        };
        let mut ends = [0; 2];
        // SAFETY: two numbers to write to.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        let held = lock.take();
        // SAFETY: the child makes no call of libc's that another thread could be in the midst of (its allocator's are safe behind a fork).
        let child = unsafe { libc::fork() };
        if child == 0 {
            bypass::BEHIND_OUR_BACK.fetch_or(bypass::CLOSED_IN, Ordering::SeqCst);
            // SAFETY: a byte; and its own end.
            let begins = || unsafe { libc::write(ends[1], b"!".as_ptr().cast(), 1) } == 1;
            let done = confine() && begins() && lock.take().is_some();
            // SAFETY: the child ends here, without the handlers of its parent.
            unsafe { libc::_exit(if done { 7 } else { 1 }) };
        }
        sys::close(ends[1]);
        let (mut byte, mut status) = (0u8, 0);
        // SAFETY: bytes of ours.
        assert_eq!(unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) }, 1);
        // Until it waits.
        thread::sleep(std::time::Duration::from_millis(20));
        drop(held);
        // SAFETY: a child of ours, and a number to write to.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
        sys::close(ends[0]);
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
            assert_eq!(owner_of(lock.0.into_inner()), owner as u32);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
