//! What each thread keeps for itself: a block of words that are zero when it begins, in which each module has a place.
//!
//! Where there is a libc, the block is a part of what its loader gives every thread, by the model of libraries that are loaded with the program
//! (initial-exec): its address is two instructions away, and neither the loader nor Rust's library is asked. What has no libc
//! below says where the block is (`start`).

#![allow(unsafe_code)]

use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::marker::PhantomData;
use ringlet_core::sync::{AtomicUsize, Ordering};

/// Types for which zero is a value, with which they begin.
///
/// # Safety
/// All-zero bytes are a valid value, and the type has no destructor.
pub unsafe trait Zero {}

macro_rules! zero {
    ($($type:ty),*) => {$(
        // SAFETY: of numbers, and what is made of them.
                unsafe impl Zero for $type {}
    )*};
}

zero!(bool, u32, u64, usize, (u64, bool), (u64, u64));

// SAFETY: as its elements.
unsafe impl<T: Zero, const N: usize> Zero for [T; N] {}

/// Where a module's words lie in the block, and how many bytes.
#[derive(Clone, Copy)]
pub struct Place {
    at: usize,
    len: usize,
}

const WORD: usize = size_of::<u64>();

impl Place {
    const fn first(words: usize) -> Place {
        Place { at: 0, len: words * WORD }
    }
    const fn then(self, words: usize) -> Place {
        Place { at: self.at + self.len, len: words * WORD }
    }
    /// A part of it.
    pub const fn from(self, words: usize) -> Place {
        assert!(words * WORD <= self.len);
        Place { at: self.at + words * WORD, len: self.len - words * WORD }
    }
}

// Who needs how much. What every call looks at comes first.
pub const THREAD: Place = Place::first(1);
pub const SIGNALS: Place = THREAD.then(1);
pub const SPIN: Place = SIGNALS.then(26);
pub const ASKED: Place = SPIN.then(6);
pub const CONTEXT: Place = ASKED.then(2);
pub const GATE: Place = CONTEXT.then(1);
pub const FORK: Place = GATE.then(1);
pub const LAST_FORK: Place = FORK.then(1);
pub const AT_IT: Place = LAST_FORK.then(1);
pub const JUMPS: Place = AT_IT.then(33);
pub const INTERRUPTED: Place = JUMPS.then(32);

/// A thread's block takes so many bytes.
pub const BLOCK_BYTES: usize = INTERRUPTED.at + INTERRUPTED.len;

global_asm!(
    ".pushsection .tbss.ringlet_thread, \"awT\", @nobits",
    ".balign 64",
    ".globl ringlet_thread",
    ".hidden ringlet_thread",
    ".type ringlet_thread, @object",
    ".size ringlet_thread, {bytes}",
    "ringlet_thread: .zero {bytes}",
    ".popsection",
    bytes = const BLOCK_BYTES,
);

/// The way to the calling thread's block where libc gives it none; 0 where it does.
static WAY: AtomicUsize = AtomicUsize::new(0);

/// Gives a thread's block, of `BLOCK_BYTES`, zero at first, to nobody else while the thread lives.
pub type Way = extern "C" fn() -> *mut u8;

/// What serves programs without a libc says, before anything else, where its threads' blocks are.
///
/// # Safety
/// As `Way` says.
pub unsafe fn start(way: Way) {
    WAY.store(way as usize, Ordering::Relaxed);
}

#[inline(always)]
fn block() -> *mut u8 {
    match WAY.load(Ordering::Relaxed) {
        0 => of_libc(),
        way => elsewhere(way),
    }
}

/// An address in what libc keeps for the calling thread; 0 where there is no libc.
pub fn beside_stack() -> usize {
    if WAY.load(Ordering::Relaxed) == 0 { of_libc() as usize } else { 0 }
}

#[cold]
fn elsewhere(way: usize) -> *mut u8 {
    // SAFETY: what `start` was given.
    unsafe { core::mem::transmute::<usize, Way>(way)() }
}

/// (The same for a thread as long as it lives, so the compiler may keep it.)
#[inline(always)]
fn of_libc() -> *mut u8 {
    let block: *mut u8;
    // SAFETY: reads the thread's pointer, and where the loader has put the block, as its ABI says.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "mov {0}, qword ptr fs:[0]",
            "add {0}, qword ptr [rip + ringlet_thread@GOTTPOFF]",
            out(reg) block,
            options(pure, nomem, nostack)
        );
    }
    // SAFETY: reads the thread's pointer, and where the loader has put the block, as this processor's ABI says.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "mrs {0}, tpidr_el0",
            "adrp {1}, :gottprel:ringlet_thread",
            "ldr {1}, [{1}, :gottprel_lo12:ringlet_thread]",
            "add {0}, {0}, {1}",
            out(reg) block,
            out(reg) _,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    block
}

/// A value that each thread has of its own.
pub struct Local<T> {
    at: usize,
    of: PhantomData<fn() -> T>,
}

impl<T: Zero> Local<T> {
    pub const fn new(place: Place) -> Local<T> {
        assert!(size_of::<T>() <= place.len && align_of::<T>() <= WORD);
        Local { at: place.at, of: PhantomData }
    }

    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(&Cell<T>) -> R) -> R {
        // SAFETY: within this thread's block, at a place of its own (each `Local` names another), where zero was a value.
        f(unsafe { &*block().add(self.at).cast::<Cell<T>>() })
    }

    #[inline(always)]
    pub fn set(&self, value: T) {
        self.with(|cell| cell.set(value));
    }
    #[inline(always)]
    pub fn replace(&self, value: T) -> T {
        self.with(|cell| cell.replace(value))
    }
    #[inline(always)]
    pub fn take(&self) -> T
    where
        T: Default,
    {
        self.with(Cell::take)
    }
    #[inline(always)]
    pub fn get(&self) -> T
    where
        T: Copy,
    {
        self.with(Cell::get)
    }
}

impl<T: Zero, const N: usize> Local<[T; N]> {
    #[inline(always)]
    pub fn with_each<R>(&self, f: impl FnOnce(&[Cell<T>]) -> R) -> R {
        self.with(|all| {
            let all: &Cell<[T]> = all;
            f(all.as_slice_of_cells())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A place that no module's code uses here.
    static ONE: Local<[u64; 3]> = Local::new(INTERRUPTED);
    static OTHER: Local<u64> = Local::new(INTERRUPTED.from(3));

    #[test]
    fn each_thread_has_its_own_and_begins_with_zero() {
        let values = |seed: u64| {
            assert_eq!((ONE.get(), OTHER.get()), ([0; 3], 0));
            ONE.set([seed; 3]);
            OTHER.set(seed + 1);
            thread::yield_now();
            ONE.with_each(|each| each[1].set(7));
            assert_eq!((ONE.get(), OTHER.get()), ([seed, 7, seed], seed + 1));
        };
        thread::scope(|scope| {
            (1..9).for_each(|seed| drop(scope.spawn(move || values(seed))));
        });
        // (Of memory that a thread before may have had.)
        thread::spawn(move || values(9)).join().unwrap();
    }
}
