//! Locks that all processes of a key share. Their holder is a process, and not a thread of it.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringlet_core::reflect::{Attempt, LockWord, NotHeld};
use ringlet_core::sync::Ordering;
use ringlet_linux::futex;

use crate::host::Membership;
use crate::memory::Mapping;
use crate::protocol::{Answer, Ask, Made};
use crate::status::Status;

/// Who sleeps looks again so often, and asks whether the holder is there.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Who was woken for a lock has had his time to take it.
const LEFT: Duration = Duration::from_millis(2);
/// Looks before it sleeps: a lock that is held for an instant is not worth a sleep.
const LOOKS: u32 = 100;
/// So many releases that wake somebody leave the lock to whoever comes first; the next one leaves it to a sleeper, so that none starves.
const UNFAIR: u32 = 16;

/// For how long a lock is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    No,
    UpTo(Duration),
    /// As long as it takes, or a keeper is there.
    Forever,
}

/// A set of locks. Dropped, it is given back, with the locks that are held.
pub struct Locks {
    host: Arc<Membership>,
    id: u32,
    count: usize,
    made: Made,
    /// Those that are taken in memory: none in a cluster.
    in_memory: usize,
    words: Mapping,
    released: AtomicU32,
    /// In a cluster: those that a thread of this process waits for.
    waited: Waited,
}

#[derive(Default)]
struct Waited {
    locks: Mutex<BTreeSet<usize>>,
    changed: Condvar,
}

/// One of them; dropped, it is waited for no longer.
struct Turn<'a>(&'a Waited, usize);

impl Waited {
    /// Once no other thread does.
    fn begin(&self, lock: usize, wait: Wait) -> Result<Turn<'_>, Status> {
        let began = Instant::now();
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        while !locks.insert(lock) {
            let left = wait.left(began).min(LOOK_AGAIN);
            if left.is_zero() {
                return Err(Status::Busy);
            }
            let woken = self.changed.wait_timeout(locks, left);
            locks = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(Turn(self, lock))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.locks.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
        self.0.changed.notify_all();
    }
}

impl Wait {
    /// For how long it is to go on.
    fn left(self, began: Instant) -> Duration {
        match self {
            Wait::No => Duration::ZERO,
            Wait::UpTo(most) => most.saturating_sub(began.elapsed()),
            Wait::Forever => LOOK_AGAIN,
        }
    }
}

impl Locks {
    pub(crate) fn new(
        host: Arc<Membership>,
        id: u32,
        count: usize,
        made: Made,
        words: Mapping,
    ) -> Locks {
        let (released, waited) = (AtomicU32::new(0), Waited::default());
        let in_memory = if host.logged.is_none() { count } else { 0 };
        Locks { host, id, count, made, in_memory, words, released, waited }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Who has made it, and how.
    pub fn made(&self) -> Made {
        self.made
    }

    /// Its number on this host.
    pub fn id(&self) -> u32 {
        self.id
    }

    fn word(&self, lock: usize) -> Result<&LockWord, Status> {
        if lock >= self.count {
            return Err(Status::BadLock);
        }
        self.host.lives()?;
        Ok(self.words.area().at(lock * size_of::<u32>()))
    }

    /// Which member has it, as far as this host knows. On one host whoever may use the set may write there.
    pub fn holder(&self, lock: usize) -> Result<Option<u32>, Status> {
        Ok(self.word(lock)?.holder())
    }

    /// Does this process hold one of them?
    pub fn holds_any(&self) -> bool {
        (0..self.count)
            .any(|lock| self.word(lock).is_ok_and(|word| word.holder() == Some(self.host.member)))
    }

    /// Takes a lock.
    ///
    /// [`Status::Busy`]: it was not to be waited for so long. [`Status::HeldByUs`]: this process has it, in this thread or another.
    /// [`Status::CorruptLock`]: it names a holder that is not there, and is free from now on. [`Status::NotInitialised`]: the keeper has gone meanwhile.
    #[inline]
    pub fn acquire(&self, lock: usize, wait: Wait) -> Result<(), Status> {
        // (One look tells both: is there such a lock, and is it in memory?)
        if lock >= self.in_memory {
            return self.acquire_in_cluster(lock, wait);
        }
        let word = self.word(lock)?;
        match word.try_acquire(self.host.member) {
            Attempt::Taken => Ok(()),
            Attempt::Ours => Err(Status::HeldByUs),
            Attempt::Held(seen) if wait == Wait::No && LockWord::is_handed_over(seen) => {
                // (Whoever it was left to takes it at once, or has died meanwhile: then it is anybody's.)
                futex::wait(&word.0, seen, LEFT.as_nanos() as u64);
                let taken = word.acquire_waiting(self.host.member, true) == Attempt::Taken;
                if taken { Ok(()) } else { Err(Status::Busy) }
            }
            Attempt::Held(_) if wait == Wait::No => Err(Status::Busy),
            Attempt::Held(_) => self.wait_for(word, lock, wait),
        }
    }

    #[cold]
    fn wait_for(&self, word: &LockWord, lock: usize, wait: Wait) -> Result<(), Status> {
        let us = self.host.member;
        for _ in 0..LOOKS {
            std::hint::spin_loop();
            if word.holder().is_none() && word.try_acquire(us) == Attempt::Taken {
                return Ok(());
            }
        }
        let began = Instant::now();
        let mut has_slept = false;
        loop {
            let seen = match word.acquire_waiting(us, has_slept) {
                Attempt::Taken => return Ok(()),
                Attempt::Ours => return Err(Status::HeldByUs),
                Attempt::Held(seen) => seen,
            };
            let left = wait.left(began);
            if left.is_zero() {
                return Err(Status::Busy);
            }
            let slept = Instant::now();
            futex::wait(&word.0, seen, left.min(LOOK_AGAIN).as_nanos() as u64);
            has_slept = true;
            if slept.elapsed() >= LOOK_AGAIN {
                // (Nobody has woken us: is its holder there, and the keeper?)
                self.host.ask(&Ask::Look { id: self.id, lock: lock as u32 })?;
            }
        }
    }

    /// By the one order of all hosts; who holds it is in its word, which the keeper writes.
    #[cold]
    fn acquire_in_cluster(&self, lock: usize, wait: Wait) -> Result<(), Status> {
        let (word, began) = (self.word(lock)?, Instant::now());
        let _turn = self.waited.begin(lock, wait)?;
        let (id, number) = (self.id, lock as u32);
        let ask = |ask: &Ask| match self.host.ask(ask)? {
            (Answer::Lock { is_held }, _) => Ok(is_held),
            _ => Err(Status::NotInitialised),
        };
        if ask(&Ask::Acquire { id, lock: number, waits: wait != Wait::No })? {
            return Ok(());
        }
        loop {
            // ORDER: Acquire, pairs with Release in `Keeper::tell_holders`: what was written under the lock is seen under it.
            let seen = word.0.load(Ordering::Acquire);
            if seen == self.host.member {
                return Ok(());
            }
            let left = wait.left(began);
            if left.is_zero() {
                // (It may be ours meanwhile.)
                return ask(&Ask::Cancel { id, lock: number }).map(drop);
            }
            let slept = Instant::now();
            futex::wait(&word.0, seen, left.min(LOOK_AGAIN).as_nanos() as u64);
            if slept.elapsed() >= LOOK_AGAIN {
                self.host.ask(&Ask::Look { id, lock: number })?;
            }
        }
    }

    #[cold]
    fn release_in_cluster(&self, lock: usize) -> Result<(), Status> {
        self.word(lock)?;
        self.host.ask(&Ask::Release { id: self.id, lock: lock as u32 }).map(drop)
    }

    /// Gives a lock back. [`Status::NotHeld`]: this process has not got it.
    #[inline]
    pub fn release(&self, lock: usize) -> Result<(), Status> {
        if lock >= self.in_memory {
            return self.release_in_cluster(lock);
        }
        let word = self.word(lock)?;
        // ORDER: Relaxed: a count for fairness.
        let hand_over = self.released.load(Ordering::Relaxed) >= UNFAIR;
        match word.release(self.host.member, hand_over) {
            Ok(false) => Ok(()),
            Ok(true) => {
                let next = if hand_over { 0 } else { self.released.load(Ordering::Relaxed) + 1 };
                self.released.store(next, Ordering::Relaxed);
                if !futex::wake_one(&word.0) && hand_over && word.nobody_slept() {
                    futex::wake_one(&word.0);
                }
                Ok(())
            }
            Err(NotHeld) => Err(Status::NotHeld),
        }
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        if self.host.lives().is_err() {
            return;
        }
        // (In a cluster all are with the set.)
        for lock in 0..self.in_memory {
            let _ = self.release(lock);
        }
        let _ = self.host.ask(&Ask::DropLocks { id: self.id });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;
    use crate::keeper::{Options, keep};

    #[test]
    fn a_lock_that_names_nobody_is_found_out() {
        let folder = tempfile::tempdir().unwrap();
        let (path, (ready, is_ready)) = (folder.path().join("socket"), std::sync::mpsc::channel());
        let at = path.clone();
        std::thread::spawn(move || {
            let options = Options { path: Some(&at), stays: true, ..Options::default() };
            keep(&options, || ready.send(()).unwrap()).unwrap();
        });
        is_ready.recv().unwrap();
        let [one, other] = [(); 2].map(|()| Host::at(&path).unwrap());
        let locks = one.locks(1, 2, 0o600, false).unwrap();
        let theirs = other.locks(1, 2, 0o600, false).unwrap();
        // As somebody who may write there, and does not mean well: a holder that is not there; one that has handed it over, to nobody.
        // (To one that has died since: who only tries has it too.)
        theirs.words.word(1).store(u32::MAX, Ordering::Relaxed);
        assert!((0..1000).any(|_| locks.acquire(1, Wait::No).is_ok()));
        locks.release(1).unwrap();
        // The number of who comes next: what he has not taken he does not hold.
        theirs.words.word(1).store(other.member() + 10, Ordering::Relaxed);
        let newcomers: Vec<_> = (0..10).map(|_| Host::at(&path).unwrap()).collect();
        let newcomer = newcomers.iter().find(|each| each.member() == other.member() + 10);
        let new_locks = newcomer.unwrap().locks(1, 2, 0o600, false).unwrap();
        assert_eq!(new_locks.acquire(1, Wait::No), Ok(()));
        drop((new_locks, newcomers));
        for (word, found) in [(77_777, Err(Status::CorruptLock)), (u32::MAX, Ok(()))] {
            theirs.words.word(0).store(word, Ordering::Relaxed);
            assert_eq!(locks.acquire(0, Wait::Forever), found);
            if found.is_err() {
                locks.acquire(0, Wait::No).unwrap();
            }
            locks.release(0).unwrap();
        }
    }
}
