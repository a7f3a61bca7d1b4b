//! The io_urings of this process that only files are handed to (the agent looks), and those that nobody has told of.

use super::bypass::{BEHIND_OUR_BACK, IO_URING};
use super::table::{lookup, tables};
use crate::once::Once;
use crate::plain::P64;
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::{fd, sys};

const RINGS_MAX: usize = 64;

/// Their descriptors, plus one; 0 where there is none.
static SEEN: [AtomicU32; RINGS_MAX] = [const { AtomicU32::new(0) }; RINGS_MAX];
/// Was there ever one?
static ANY_SEEN: AtomicU32 = AtomicU32::new(0);

/// A look for others takes at most this share of the time that passes, and there is at most one in so long.
const LOOK_SHARE: u64 = 50;
const LOOK_EVERY_NS: u64 = 10_000_000;

/// When there is the next.
static LOOK_AGAIN_NS: P64 = P64::new(0);

/// What brings all connections to the kernel (`process::uses_io_uring`, which stands above).
static FOUND: Once<fn()> = Once::new();

pub fn start(found: fn()) {
    let _ = FOUND.set(found);
}

/// There is one that nobody has told of.
fn found() {
    match FOUND.get() {
        Some(found) => found(),
        // (Nothing has moved yet.)
        None => drop(BEHIND_OUR_BACK.fetch_or(IO_URING, Ordering::SeqCst)),
    }
}

/// Are all connections on the kernel already?
pub fn are_kernels() -> bool {
    BEHIND_OUR_BACK.load(Ordering::Relaxed) & IO_URING != 0
}

/// Rings that are being made, whose descriptors are not known yet.
static BEGUN: AtomicU32 = AtomicU32::new(0);

/// One whose operations are looked at is about to be made.
pub fn begins() {
    BEGUN.fetch_add(1, Ordering::Relaxed);
}

/// That was done, if there is a descriptor. False if there are too many.
pub fn made(fd: Option<i32>) -> bool {
    // (Never below none: a child by fork has forgotten what was begun.)
    let one_less = |begun: u32| begun.checked_sub(1);
    let _ = BEGUN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    let Some(fd) = fd else { return true };
    ANY_SEEN.store(1, Ordering::Relaxed);
    SEEN.iter().any(|each| {
        each.compare_exchange(0, fd as u32 + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    })
}

/// It is about to be closed.
pub fn ends(fd: i32) {
    end_between(fd as u32, fd as u32);
}

/// The program is about to close these numbers by itself: the next ring that gets one of them is another.
#[inline(always)]
pub fn closes(first: u32, last: u32) {
    if ANY_SEEN.load(Ordering::Relaxed) != 0 {
        end_between(first, last);
    }
}

#[cold]
fn end_between(first: u32, last: u32) {
    for each in &SEEN {
        let seen = each.load(Ordering::Relaxed);
        if seen != 0 && (first..=last).contains(&(seen - 1)) {
            let _ = each.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// In a child: threads of the parent's that were making a ring are not ours.
pub fn after_fork() {
    if BEGUN.load(Ordering::Relaxed) != 0 {
        BEGUN.store(0, Ordering::Relaxed);
    }
}

fn is_seen(fd: i32) -> bool {
    SEEN.iter().any(|each| each.load(Ordering::Relaxed) == fd as u32 + 1)
}

/// Looks for rings of the program's own system calls (liburing linked into it), before a connection is moved: where there is one, all are on the
/// kernel. Not at each: the price is a call for each descriptor that is not known. No lock held.
#[cold]
pub fn look_for_others() {
    let began = sys::now_ns();
    if are_kernels() || began < LOOK_AGAIN_NS.get() {
        return;
    }
    let begun = BEGUN.load(Ordering::Relaxed) != 0;
    let is_there = !begun && {
        // No fork while the look has a descriptor open: the child would keep it.
        let _inside = tables().map(|tables| tables.process().gate.enter());
        fd::any_io_uring(|fd| is_seen(fd) || lookup(fd).is_some())
    };
    if is_there {
        found();
    }
    let now = sys::now_ns();
    LOOK_AGAIN_NS.set(now + LOOK_EVERY_NS.max((now - began) * LOOK_SHARE));
}

/// Something was mapped from this place of a descriptor. KERNEL: a ring's parts lie at such places.
#[inline(always)]
pub fn mapped(fd: i32, offset: i64) {
    if matches!(offset, 0x800_0000 | 0x1000_0000) {
        look_at(fd);
    }
}

#[cold]
fn look_at(fd: i32) {
    let begun = BEGUN.load(Ordering::Relaxed) != 0;
    if !begun && !are_kernels() && fd::is_io_uring(fd) && !is_seen(fd) {
        found();
    }
}
