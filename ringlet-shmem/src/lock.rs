//! Locks of the program's, each a symmetric `long` of 0: Mellor-Crummey and Scott's queue. In one PE's copy stands the last one who wants it, in each
//! one's copy who comes behind him, and whether it is his. Whoever comes waits at his own copy, and is served in turn.

use std::collections::HashSet;
use std::ffi::{c_int, c_long};
use std::sync::{Condvar, Mutex, PoisonError};

use ringlet_core::sync::{AtomicU32, Ordering};

use crate::job::{Job, give_up, job};
use crate::wait::{place, wait};

/// A PE's copy. PEs are counted from 1.
#[repr(C)]
struct Copy {
    last: AtomicU32,
    /// Who comes behind this PE, and `YOURS`.
    next: AtomicU32,
}

const YOURS: u32 = 1 << 31;

fn at(job: &Job, lock: *mut c_long, pe: usize) -> &Copy {
    let found = job.remote(lock.cast(), size_of::<Copy>(), pe).cast::<Copy>();
    if !found.is_aligned() {
        give_up(format_args!("the lock at {lock:?} is not aligned"));
    }
    // SAFETY: of a PE's memory, aligned; atomics.
    unsafe { &*found }
}

/// The PE in whose copy the last one stands.
fn home(job: &Job, lock: *mut c_long) -> &Copy {
    at(job, lock, 0)
}

/// Locks that this PE has, or waits for: a queue has a PE once, whichever of its threads it is.
static OURS: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
static CLEARED: Condvar = Condvar::new();

/// Makes it this thread's to be asked for. False: it is another's, and was not to be waited for.
fn claim(lock: *mut c_long, waits: bool) -> bool {
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if ours.get_or_insert_default().insert(lock as usize) {
            return true;
        }
        if !waits {
            return false;
        }
        ours = CLEARED.wait(ours).unwrap_or_else(PoisonError::into_inner);
    }
}

/// False: it is nobody's.
fn unclaim(lock: *mut c_long) -> bool {
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    let was = ours.get_or_insert_default().remove(&(lock as usize));
    CLEARED.notify_all();
    was
}

#[unsafe(no_mangle)]
extern "C" fn shmem_set_lock(lock: *mut c_long) {
    let job = job();
    claim(lock, true);
    let ours = at(job, lock, job.me);
    let number = job.me as u32 + 1;
    // ORDER: AcqRel: what the last holder stored is seen, and who comes next sees `ours` as we left it.
    let before = home(job, lock).last.swap(number, Ordering::AcqRel);
    if before == 0 {
        return;
    }
    let pe = before as usize - 1;
    if pe >= job.size {
        give_up(format_args!(
            "the lock at {lock:?} holds what no PE writes there: it is not 0 at first, or was overwritten"
        ));
    }
    // ORDER: Release, pairs with Acquire of the wait in `shmem_clear_lock`.
    let theirs = &at(job, lock, pe).next;
    theirs.fetch_or(number, Ordering::Release);
    job.ring(pe, theirs, size_of_val(theirs));
    // ORDER: Acquire, pairs with Release of the last store in `shmem_clear_lock`: what was done under the lock is seen.
    wait(job, place(&ours.next), || ours.next.load(Ordering::Acquire) & YOURS != 0);
    ours.next.fetch_and(!YOURS, Ordering::Relaxed);
}

/// 0: this PE has it now; 1: somebody has it.
#[unsafe(no_mangle)]
extern "C" fn shmem_test_lock(lock: *mut c_long) -> c_int {
    let job = job();
    if !claim(lock, false) {
        return 1;
    }
    let number = job.me as u32 + 1;
    // ORDER: AcqRel: as in `shmem_set_lock`.
    let taken =
        home(job, lock).last.compare_exchange(0, number, Ordering::AcqRel, Ordering::Relaxed);
    if taken.is_err() {
        unclaim(lock);
    }
    taken.is_err().into()
}

#[unsafe(no_mangle)]
extern "C" fn shmem_clear_lock(lock: *mut c_long) {
    let job = job();
    let ours = at(job, lock, job.me);
    let number = job.me as u32 + 1;
    job.quiet();
    if !OURS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_default()
        .contains(&(lock as usize))
    {
        give_up(format_args!("the lock at {lock:?} is cleared, and this PE has not set it"));
    }
    // ORDER: Release: what was done under the lock is seen by who takes it next (`shmem_set_lock`).
    let free = ours.next.load(Ordering::Acquire) == 0
        && home(job, lock)
            .last
            .compare_exchange(number, 0, Ordering::Release, Ordering::Relaxed)
            .is_ok();
    if !free {
        // ORDER: Acquire, pairs with Release in `shmem_set_lock`. (He has come, and is about to say so.)
        wait(job, place(&ours.next), || ours.next.load(Ordering::Acquire) != 0);
        let next = ours.next.swap(0, Ordering::Acquire) as usize - 1;
        if next >= job.size {
            give_up(format_args!("the lock at {lock:?} was overwritten"));
        }
        // ORDER: Release, pairs with Acquire in `shmem_set_lock`.
        let theirs = &at(job, lock, next).next;
        theirs.fetch_or(YOURS, Ordering::Release);
        job.ring(next, theirs, size_of_val(theirs));
    }
    unclaim(lock);
}
