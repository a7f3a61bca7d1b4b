//! Waiting for memory to change: a while awake, then asleep until who changes it rings.

use std::hint::spin_loop;
use std::ops::Range;
use std::sync::atomic::compiler_fence;
use std::sync::{Mutex, PoisonError};

use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::{futex, sys};

use crate::job::{Control, Job};

/// Looks before the processor is offered to others, where each PE has one, and where not; and offers before a sleep.
const LOOKS: u32 = 4000;
const LOOKS_CROWDED: u32 = 40;
const OFFERS: u32 = 20;
/// Who sleeps looks again behind as long as it has waited, within these: a store that is none of ours (by another thread) rings for nobody.
const LOOK_AGAIN_NS: u64 = 1_000_000;
const LOOK_AGAIN_MOST_NS: u64 = 16_000_000;
/// Where another PE has a pointer here (`shmem_ptr`), by which it stores and rings for nobody: behind this share of it, and sooner where each PE has a
/// processor. So what it is late by is little beside what it has waited, or beside a sleep; and so is what its looks cost.
const POINTED_SHARE: u64 = 256;
const POINTED_NS: u64 = 50_000;

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
///
/// Only calls of ours store there.
#[inline]
pub fn wait(job: &Job, there: (*const u8, usize), is_so: impl FnMut() -> bool) {
    wait_for(job, there, false, is_so);
}

/// The same, where the program may store by itself.
#[inline]
pub fn wait_for_program(job: &Job, there: (*const u8, usize), is_so: impl FnMut() -> bool) {
    wait_for(job, there, true, is_so);
}

#[inline]
fn wait_for(
    job: &Job,
    there: (*const u8, usize),
    is_program_s: bool,
    mut is_so: impl FnMut() -> bool,
) {
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
    sleep(job, there, is_program_s, &mut is_so);
}

/// Another PE is given a pointer to memory of this one's.
#[inline]
pub fn is_pointed_at(job: &Job, pe: usize) {
    let control = job.control(pe);
    if control.pointed.load(Ordering::Relaxed) == 0 {
        control.pointed.store(1, Ordering::Relaxed);
        // ORDER: Release, pairs with Acquire in `sleep`: who sleeps already sees that it is pointed at, and looks sooner from now on.
        control.bell.fetch_add(1, Ordering::Release);
        futex::wake(&control.bell);
    }
}

/// How long who has waited so long sleeps before it looks again.
fn patience(waited: u64, is_pointed: bool, has_processors: bool) -> u64 {
    let (share, least) = match (is_pointed, has_processors) {
        (false, _) => (1, LOOK_AGAIN_NS),
        (true, true) => (POINTED_SHARE, POINTED_NS),
        (true, false) => (POINTED_SHARE, LOOK_AGAIN_NS),
    };
    (waited / share).clamp(least, LOOK_AGAIN_MOST_NS)
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
fn sleep(
    job: &Job,
    there: (*const u8, usize),
    is_program_s: bool,
    is_so: &mut dyn FnMut() -> bool,
) {
    crate::setup::refuse_to_wait();
    let control = job.control(job.me);
    let at = job.place_of_ours(there.0, there.1);
    let range = at..at + there.1 as u64;
    wish(control, |sleepers| sleepers.push(range.clone()));
    // ORDER: SeqCst: behind this every PE's look in `ring` sees the wish, or its store came before.
    fence(Ordering::SeqCst);
    membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED);
    let began = sys::now_ns();
    let mut looked = began;
    loop {
        // ORDER: Acquire, pairs with Release in `wake`.
        let seen = control.bell.load(Ordering::Acquire);
        if is_so() {
            break;
        }
        // ORDER: Relaxed: behind the bell, by which a sleeper is told of it.
        let is_pointed = is_program_s && control.pointed.load(Ordering::Relaxed) != 0;
        let now = sys::now_ns();
        if now - looked >= LOOK_AGAIN_MOST_NS {
            job.end_without_launcher();
            looked = now;
        }
        let patience = patience(now - began, is_pointed, job.has_processors);
        futex::wait(&control.bell, seen, patience);
    }
    wish(control, |sleepers| {
        let ours = sleepers.iter().position(|each| *each == range);
        ours.map(|number| sleepers.swap_remove(number));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Late by a small share of what it has waited for, or by a sleep; and the looks of ever longer waits are ever less of them.
    #[test]
    fn who_is_pointed_at_looks_soon_and_less_and_less() {
        for waited in (0..40).map(|power| 1_u64 << power) {
            let [alone, crowded] = [true, false].map(|alone| patience(waited, true, alone));
            assert!(alone <= (waited / POINTED_SHARE).max(POINTED_NS), "{waited}");
            assert!(crowded <= (waited / POINTED_SHARE).max(LOOK_AGAIN_NS), "{waited}");
            assert!(alone >= POINTED_NS && crowded >= LOOK_AGAIN_NS, "{waited}");
            assert!(patience(waited, false, true) >= crowded, "{waited}");
        }
        let looks = |until: u64, is_pointed| {
            let (mut waited, mut looks) = (0, 0);
            while waited < until {
                waited += patience(waited, is_pointed, true);
                looks += 1;
            }
            looks
        };
        assert!(looks(40 * MS, true) < 800, "{}", looks(40 * MS, true));
        assert!(looks(1000 * MS, true) < 1700, "{}", looks(1000 * MS, true));
        assert!(looks(1000 * MS, false) < 80, "{}", looks(1000 * MS, false));
    }
}
