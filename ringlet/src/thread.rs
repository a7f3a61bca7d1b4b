//! Who the calling thread is to locks that processes share, and whether its process is still the one that it was.
//!
//! A process learns of a fork at its next look, however the fork was made: a page that the kernel wipes in a child says so.

use crate::local::{self, Local};
use crate::once::Once;
use crate::plain::P32;
use ringlet_core::sync::{AtomicU32, AtomicUsize, Ordering};
use ringlet_linux::map;
use ringlet_linux::sys::{self, Sys};

/// What changes with the process; private.
#[derive(Default)]
pub struct Identity {
    /// Counts forks, so that a thread knows when its number is stale.
    generation: P32,
    /// Which pid namespace the processes of a fork group here are in, as owners of locks tell it; 0 where the first of them is.
    namespace: P32,
}

struct Process {
    /// Zero in a child that has not yet found out.
    alive: &'static AtomicU32,
    identity: &'static Identity,
    leave_behind: fn(),
    after_fork: fn(),
}

static PROCESS: Once<Process> = Once::new();

/// In each child, at its first look: `leave_behind` is called before anything else is done there (in a signal handler perhaps once more),
/// `after_fork` once. Returns the word that is zero before that.
pub fn start(
    identity: &'static Identity,
    leave_behind: fn(),
    after_fork: fn(),
) -> Sys<&'static AtomicU32> {
    let alive: &'static [AtomicU32] = map::wiped_table(1024)?;
    alive[0].store(1, Ordering::Relaxed);
    let first = PROCESS.set(Process { alive: &alive[0], identity, leave_behind, after_fork });
    Ok(PROCESS.get().filter(|_| !first).map_or(&alive[0], |process| process.alive))
}

/// In a child, for which nothing has been done yet: does it.
#[inline(always)]
pub fn look_for_fork() {
    if let Some(process) = PROCESS.get()
        && process.alive.load(Ordering::Relaxed) == 0
    {
        become_child(process);
    }
}

/// As `look_for_fork`, where it is likely: by one fault where a look and a store would be two.
pub fn begin_child() {
    if let Some(process) = PROCESS.get()
        && process.alive.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        become_child(process);
    }
}

#[cold]
fn become_child(process: &Process) {
    (process.leave_behind)();
    if process.alive.swap(1, Ordering::Relaxed) != 0 {
        // A signal handler came between.
        return;
    }
    process.identity.generation.add(1);
    enter_namespace(process.identity);
    (process.after_fork)();
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
    let identity = PROCESS.get().map(|process| process.identity);
    let generation = identity.map_or(0, |identity| identity.generation.get()) as u64;
    let known = NUMBER.get();
    if known != 0 && known >> 32 == generation {
        return known as u32;
    }
    let namespace = identity.map_or(0, |identity| identity.namespace.get());
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
