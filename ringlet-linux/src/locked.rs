//! mlockall beside memory of ours: the program's is locked, and ours is not, nor made to be there.
//!
//! KERNEL: mlockall counts all that is mapped against RLIMIT_MEMLOCK, used or not, and makes all of it be there. So what is mapped now is locked
//! piece by piece, as /proc/self/maps tells them, and what is mapped later by the kernel's own flag, from which our mappings are freed again (`map`).

use crate::sys::{self, Sys, sys};
use crate::{map, mapped};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};
use ringlet_core::layout::PAGE_BYTES;

static FUTURE: AtomicU32 = AtomicU32::new(0);

/// Is what is mapped from now on locked, and held by memory at once?
#[inline(always)]
pub fn is_future_locked() -> bool {
    FUTURE.load(Ordering::Relaxed) != 0
}

const KNOWN: i32 = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
const CAP_IPC_LOCK: u32 = 14;

/// Serves mlockall. `by_kernel` makes the call as the program has made it.
pub fn lock_all(flags: i32, by_kernel: impl Fn() -> Sys<usize>) -> Sys<usize> {
    let future = flags & libc::MCL_FUTURE;
    if flags & !KNOWN != 0 || flags & libc::MCL_CURRENT == 0 || map::tables().is_none() {
        // (Before the kernel's: another thread may map something of ours as soon as that is done.)
        note_future(flags);
        return by_kernel();
    }
    let on_fault = libc::MLOCK_ONFAULT;
    if !fits().unwrap_or(false) || !lock_current(on_fault).unwrap_or(false) {
        // It says why not, or there is no list of what is mapped.
        note_future(flags);
        return by_kernel();
    }
    if future != 0 {
        note_future(flags);
        // SAFETY: no memory is passed.
        unsafe { sys!(SYS_mlockall, flags & !libc::MCL_CURRENT)? };
    } else if is_future_locked() {
        // KERNEL: so the call ends what was said of the future. Only one that unlocks all does so alone.
        // SAFETY: no memory is passed.
        unsafe { sys!(SYS_munlockall)? };
        FUTURE.store(0, Ordering::Relaxed);
    }
    // (With what was mapped meanwhile. KERNEL: a page that can't be had is no error.)
    let _ = lock_current(if flags & libc::MCL_ONFAULT != 0 { on_fault } else { 0 });
    Ok(0)
}

fn note_future(flags: i32) {
    if flags & libc::MCL_FUTURE != 0 {
        FUTURE.store(1, Ordering::Relaxed);
    }
}

/// May the program lock so much? The kernel asks for all that is mapped.
fn fits() -> Sys<bool> {
    let mut sum = 0u64;
    each(|range| sum += range.len() as u64)?;
    let limit = sys::limit(libc::RLIMIT_MEMLOCK);
    Ok(sum <= limit || sys::has_capability(CAP_IPC_LOCK) && may_exceed(limit as usize))
}

/// KERNEL: a capability of a user namespace counts for no limit, and none tells of which it is. So a range that is longer is locked, without memory.
fn may_exceed(limit: usize) -> bool {
    let len = limit.saturating_add(1).next_multiple_of(PAGE_BYTES);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice disturbs nothing; nobody else knows of it.
    unsafe {
        let mapped = sys!(SYS_mmap, 0usize, len, libc::PROT_NONE, flags, -1i32, 0usize);
        mapped.is_ok_and(|address| {
            let locked = sys!(SYS_mlock2, address, len, libc::MLOCK_ONFAULT).is_ok();
            let _ = sys!(SYS_munmap, address, len);
            locked
        })
    }
}

/// False: nothing could be locked. (A piece may have been unmapped meanwhile, which is an error of the same name as the limit's.)
fn lock_current(flags: u32) -> Sys<bool> {
    let mut any = false;
    each(|range| {
        // SAFETY: changes no memory, but that it is there.
        any |= unsafe { sys!(SYS_mlock2, range.start, range.len(), flags) }.is_ok();
    })?;
    Ok(any)
}

/// All that is mapped and is not ours, in order.
fn each(mut tell: impl FnMut(Range<usize>)) -> Sys<()> {
    mapped::each_line(|line, own| {
        if let Some(range) = of_line(line) {
            tell_rest(range, own, &mut tell);
        }
    })
}

/// What of a mapping is not of our tables: the kernel makes one of neighbours of the same kind.
fn tell_rest(range: Range<usize>, own: &Range<usize>, tell: &mut impl FnMut(Range<usize>)) {
    let mut from = range.start;
    let [first, second] = map::tables().unwrap_or_default();
    let mut ours = [first, second, own.clone()];
    ours.sort_unstable_by_key(|part| part.start);
    for part in ours.into_iter().filter(|part| part.start < range.end && part.end > range.start) {
        if part.start > from {
            tell(from..part.start);
        }
        from = from.max(part.end);
    }
    if from < range.end {
        tell(from..range.end);
    }
}

/// None of a memfd of ours.
fn of_line(line: &[u8]) -> Option<Range<usize>> {
    let is_ours = |name: &str| line.windows(name.len()).any(|part| part == name.as_bytes());
    mapped::range_of(line).filter(|_| !map::OURS.iter().any(|name| is_ours(name)))
}
