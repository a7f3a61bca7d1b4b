//! Waiting for memory to change: a while awake, then asleep until who changes it rings.

use std::hint::spin_loop;
use std::sync::atomic::compiler_fence;

use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::futex;

use crate::job::Job;

/// Looks before the processor is offered to others, where each PE has one, and where not; and offers before a sleep.
const LOOKS: u32 = 4000;
const LOOKS_CROWDED: u32 = 40;
const OFFERS: u32 = 20;
/// Who sleeps looks again behind so long, and then twice as long: a store that is none of ours (by `shmem_ptr`, by another thread) rings for nobody.
const LOOK_AGAIN_NS: u64 = 1_000_000;
const LOOK_AGAIN_MOST_NS: u64 = 16_000_000;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: a system call of numbers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

const REGISTER: libc::c_int = 1 << 2;
const EXPEDITED: libc::c_int = 1 << 1;

/// From here on others can make this process pass a barrier. False: the kernel does not.
pub fn register_barriers() -> bool {
    membarrier(REGISTER) && membarrier(EXPEDITED)
}

/// Behind a store to what PE `pe` may wait for.
#[inline]
pub fn ring(job: &Job, pe: usize) {
    if job.has_barriers.load(Ordering::Relaxed) {
        // ORDER: the one that sleeps has made this process pass a barrier (`sleep`) behind its wish; the compiler must not move the look.
        compiler_fence(Ordering::SeqCst);
    } else {
        // ORDER: SeqCst, pairs with the fence in `sleep`: either it sees the store, or we see its wish.
        fence(Ordering::SeqCst);
    }
    if job.control(pe).waiting.load(Ordering::Relaxed) != 0 {
        wake(job, pe);
    }
}

#[cold]
fn wake(job: &Job, pe: usize) {
    let bell = &job.control(pe).bell;
    // ORDER: Release, pairs with Acquire in `sleep`: what was stored is seen with it.
    bell.fetch_add(1, Ordering::Release);
    futex::wake(bell);
}

/// Until the memory that `is_so` looks at is as it wants it. What was stored before that is seen behind this.
#[inline]
pub fn wait(job: &Job, mut is_so: impl FnMut() -> bool) {
    let looks = if job.has_processors { LOOKS } else { LOOKS_CROWDED };
    for _ in 0..looks {
        if is_so() {
            return;
        }
        spin_loop();
    }
    for _ in 0..OFFERS {
        std::thread::yield_now();
        if is_so() {
            return;
        }
    }
    sleep(job, &mut is_so);
}

#[cold]
fn sleep(job: &Job, is_so: &mut dyn FnMut() -> bool) {
    let control = job.control(job.me);
    control.waiting.fetch_add(1, Ordering::SeqCst);
    // ORDER: behind this every PE's look at `waiting` sees us, or its store came before (`ring`).
    fence(Ordering::SeqCst);
    membarrier(EXPEDITED);
    let mut patience = LOOK_AGAIN_NS;
    loop {
        // ORDER: Acquire, pairs with Release in `wake`.
        let seen = control.bell.load(Ordering::Acquire);
        if is_so() {
            break;
        }
        futex::wait(&control.bell, seen, patience);
        patience = (patience * 2).min(LOOK_AGAIN_MOST_NS);
    }
    control.waiting.fetch_sub(1, Ordering::Relaxed);
}
