//! Waiting for memory to change: a while awake, then asleep until who changes it rings.

use std::hint::spin_loop;
use std::ops::Range;
use std::sync::atomic::compiler_fence;
use std::sync::{Mutex, PoisonError};

use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::futex;

use crate::job::{Control, Job};

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

/// From here on others can make this process pass a barrier. False: the kernel does not.
pub fn register_barriers() -> bool {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED)
        && membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED)
}

/// Behind a store of so many bytes, of PE `pe`'s.
#[inline]
pub fn ring(job: &Job, pe: usize, at: *const u8, bytes: usize) {
    if job.has_barriers.load(Ordering::Relaxed) {
        // ORDER: the one that sleeps has made this process pass a barrier (`sleep`) behind its wish; the compiler must not move the look.
        compiler_fence(Ordering::SeqCst);
    } else {
        // ORDER: SeqCst, pairs with the fence in `sleep`: either it sees the store, or we see its wish.
        fence(Ordering::SeqCst);
    }
    if job.control(pe).waiting.load(Ordering::Relaxed) != 0 {
        wake(job, pe, job.place(at), bytes as u64);
    }
}

#[cold]
fn wake(job: &Job, pe: usize, at: u64, bytes: u64) {
    let control = job.control(pe);
    // (Of two that change meanwhile, both hold for whoever sleeps then.)
    let [from, to] = [&control.from, &control.to].map(|word| word.load(Ordering::Relaxed));
    if at < to && from < at + bytes {
        // ORDER: Release, pairs with Acquire in `sleep`: what was stored is seen with it.
        control.bell.fetch_add(1, Ordering::Release);
        futex::wake(&control.bell);
    }
}

/// Until the memory that `is_so` looks at, which lies there, is as it wants it. What was stored before that is seen behind this.
#[inline]
pub fn wait(job: &Job, there: (*const u8, usize), mut is_so: impl FnMut() -> bool) {
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
    sleep(job, there, &mut is_so);
}

/// Where something is waited for.
pub fn place<T>(word: &T) -> (*const u8, usize) {
    ((&raw const *word).cast(), size_of::<T>())
}

/// What threads of this PE sleep for.
static SLEEPERS: Mutex<Vec<Range<u64>>> = Mutex::new(Vec::new());

/// Says what they sleep for, all together, once `change` is made.
fn wish(control: &Control, change: impl FnOnce(&mut Vec<Range<u64>>)) {
    let mut sleepers = SLEEPERS.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut sleepers);
    control
        .from
        .store(sleepers.iter().map(|each| each.start).min().unwrap_or(0), Ordering::Relaxed);
    control.to.store(sleepers.iter().map(|each| each.end).max().unwrap_or(0), Ordering::Relaxed);
    control.waiting.store(sleepers.len() as u32, Ordering::Relaxed);
}

#[cold]
fn sleep(job: &Job, there: (*const u8, usize), is_so: &mut dyn FnMut() -> bool) {
    crate::setup::refuse_to_wait();
    let control = job.control(job.me);
    let at = job.place_of_ours(there.0, there.1);
    let range = at..at + there.1 as u64;
    wish(control, |sleepers| sleepers.push(range.clone()));
    // ORDER: SeqCst: behind this every PE's look in `ring` sees the wish, or its store came before.
    fence(Ordering::SeqCst);
    membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED);
    let mut patience = LOOK_AGAIN_NS;
    loop {
        // ORDER: Acquire, pairs with Release in `wake`.
        let seen = control.bell.load(Ordering::Acquire);
        if is_so() {
            break;
        }
        futex::wait(&control.bell, seen, patience);
        if patience == LOOK_AGAIN_MOST_NS {
            job.end_without_launcher();
        }
        patience = (patience * 2).min(LOOK_AGAIN_MOST_NS);
    }
    wish(control, |sleepers| {
        let ours = sleepers.iter().position(|each| *each == range);
        ours.map(|number| sleepers.swap_remove(number));
    });
}
