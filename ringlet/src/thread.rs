//! Who the calling thread is to locks that processes share, and whether its process is still the one that it was.
//!
//! A child learns of the fork at its first look, however that was made: a page that the kernel wipes in a child says so. One that looks at nothing
//! of ours, and ends or becomes another program, needs nothing done.

use crate::local::{self, Local};
use crate::once::Once;
use crate::plain::P32;
use ringlet_core::sync::{AtomicU32, AtomicUsize, Ordering};
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::{fd, map};

/// What changes with the process; private.
#[derive(Default)]
pub struct Identity {
    /// Counts forks, so that a thread knows when its number is stale.
    generation: P32,
    /// Which pid namespace the processes of a fork group here are in, as owners of locks tell it; 0 where the first of them is.
    namespace: P32,
}

/// What `Process::alive` says. In a child, at first: nothing was done for it yet.
const UNSEEN: u32 = 0;
pub const SEEN: u32 = 1;
/// A thread of the child does it now.
const BEING_SEEN: u32 = 2;

struct Process {
    /// Wiped in a child.
    alive: &'static AtomicU32,
    identity: &'static Identity,
    leave_behind: fn(),
    after_fork: fn(),
}

static PROCESS: Once<Process> = Once::new();

/// The process and its children follow nothing any more (`process::closes_in`).
static LEFT_ALONE: AtomicU32 = AtomicU32::new(0);
/// What `Process::alive` says then.
const NEVER_SEEN: u32 = 3;

/// By the only thread, when nothing is followed any more.
pub fn leave_alone() {
    LEFT_ALONE.store(1, Ordering::Relaxed);
    if let Some(process) = PROCESS.get() {
        process.alive.store(NEVER_SEEN, Ordering::Relaxed);
    }
}

pub fn is_left_alone() -> bool {
    LEFT_ALONE.load(Ordering::Relaxed) != 0
}

/// In each child, at its first look: `leave_behind` is called before anything else is done there (in a signal handler perhaps once more),
/// `after_fork` once. Returns the word that is `SEEN` after that.
pub fn start(
    identity: &'static Identity,
    leave_behind: fn(),
    after_fork: fn(),
) -> Sys<&'static AtomicU32> {
    let alive: &'static [AtomicU32] = map::wiped_table(1024)?;
    alive[0].store(SEEN, Ordering::Relaxed);
    let first = PROCESS.set(Process { alive: &alive[0], identity, leave_behind, after_fork });
    Ok(PROCESS.get().filter(|_| !first).map_or(&alive[0], |process| process.alive))
}

/// In a child, for which nothing has been done yet: does it.
#[inline(always)]
pub fn look_for_fork() {
    // ORDER: Acquire; pairs with the store of `become_child`.
    if let Some(process) = PROCESS.get()
        && process.alive.load(Ordering::Acquire) != SEEN
    {
        become_child(process);
    }
}

/// Is the calling thread the one that does for a child what is to be done, or a handler that has interrupted it?
static AT_IT: Local<bool> = Local::new(local::AT_IT);
/// Others wait for it, for no more than a second.
const LOOK_NS: u64 = 100_000;
const LOOKS_MAX: u32 = 10_000;

#[cold]
fn become_child(process: &Process) {
    if is_left_alone() {
        return;
    }
    (process.leave_behind)();
    let was_at_it = AT_IT.replace(true);
    // ORDER: Relaxed: of several threads, one does it; the others wait for the store below.
    let (alive, order) = (process.alive, Ordering::Relaxed);
    match alive.compare_exchange(UNSEEN, BEING_SEEN, order, order) {
        Ok(_) => {
            process.identity.generation.add(1);
            enter_namespace(process.identity);
            (process.after_fork)();
            // ORDER: Release; pairs with `look_for_fork`, and the look of `table::tables`.
            alive.store(SEEN, Ordering::Release);
        }
        Err(BEING_SEEN) if !was_at_it => {
            // ORDER: Acquire; pairs with the store of `become_child`.
            let is_done = || alive.load(Ordering::Acquire) == SEEN;
            let look_again = || {
                let _ = fd::poll(&mut [], Some(LOOK_NS), None);
                is_done()
            };
            if !(0..LOOKS_MAX).any(|_| look_again()) {
                // (It has left by a long jump out of a handler.)
                // ORDER: Release; pairs with `look_for_fork`.
                alive.store(SEEN, Ordering::Release);
            }
        }
        Err(_) => {}
    }
    AT_IT.set(was_at_it);
}

/// In a child that is the first of its pid namespace: its numbers, and its children's, mean something else than the group's.
fn enter_namespace(identity: &Identity) {
    let mut random = [0; 2];
    if sys::is_first_of_namespace() && sys::random(&mut random) {
        let most = u16::MAX >> (16 - (u32::BITS - NUMBER_BITS));
        identity.namespace.set(u32::from(u16::from_ne_bytes(random) & most | 1));
    }
}

/// Generation of the process (high half) and the thread's number.
static NUMBER: Local<u64> = Local::new(local::THREAD);

/// KERNEL: thread numbers have at most 22 bits (PID_MAX_LIMIT). The others tell owners in different pid namespaces apart.
const NUMBER_BITS: u32 = 22;
const NUMBER_MASK: u32 = (1 << NUMBER_BITS) - 1;

/// The calling thread as the owner of a lock that a fork group may share: asked once per thread and process.
#[inline(always)]
pub fn owner_number() -> u32 {
    look_for_fork();
    let Some(process) = PROCESS.get() else {
        // (Of a fork nobody would learn.)
        return sys::gettid() as u32 & NUMBER_MASK;
    };
    let identity = process.identity;
    let generation = u64::from(identity.generation.get());
    let known = NUMBER.get();
    if known != 0 && known >> 32 == generation {
        return known as u32;
    }
    let namespace = identity.namespace.get();
    let number = sys::gettid() as u32 & NUMBER_MASK | namespace << NUMBER_BITS;
    NUMBER.set(generation << 32 | number as u64);
    number
}

/// The calling thread's number.
#[inline(always)]
pub fn number() -> u32 {
    owner_number() & NUMBER_MASK
}

/// Changes with each fork: what a thread has noted under another one was its parent's.
pub fn generation() -> u32 {
    look_for_fork();
    PROCESS.get().map_or(0, |process| process.identity.generation.get())
}

/// libc's byte that says so (`__libc_single_threaded`), if it has one.
static ALONE: AtomicUsize = AtomicUsize::new(0);

/// Where libc says whether the process has one thread only; 0 if it does not say.
pub fn told_by(byte: usize) {
    ALONE.store(byte, Ordering::Relaxed);
}

/// Is the calling thread the only one that libc knows of? (A handler may still interrupt it, and may make another.)
#[allow(unsafe_code)]
#[inline(always)]
pub fn is_alone() -> bool {
    let byte = ALONE.load(Ordering::Relaxed) as *const bool;
    // SAFETY: libc's own byte, there for good; it is written before a second thread starts.
    !byte.is_null() && unsafe { byte.read_volatile() }
}

/// How a process is called as an owner, by its number here.
pub fn owner_of(process: i32) -> u32 {
    owner_number() & !NUMBER_MASK | process as u32 & NUMBER_MASK
}

/// What is known of the owner of a lock.
pub enum Fate {
    Alive,
    Dead,
    Unknown,
}

pub fn fate_of(owner: u32) -> Fate {
    let ours = owner_number() >> NUMBER_BITS == owner >> NUMBER_BITS;
    let number = (owner & NUMBER_MASK) as i32;
    match ours {
        false => Fate::Unknown,
        true if sys::has_thread(number) => Fate::Alive,
        true if sys::thread_exists(number) => Fate::Unknown,
        true => Fate::Dead,
    }
}

/// Is a process (`owner_of`) over, waited for or not?
pub fn is_over(process: u32) -> bool {
    matches!(fate_of(process), Fate::Dead) || has_ended(process)
}

/// Is an owner of which nothing else is known a process that is over, and that nobody has waited for? (It may be another, which got the
/// number when the owner was gone.)
pub fn has_ended(owner: u32) -> bool {
    owner_number() >> NUMBER_BITS == owner >> NUMBER_BITS
        && sys::has_ended((owner & NUMBER_MASK) as i32)
}
