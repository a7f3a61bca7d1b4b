//! A job: its processing elements (PEs), and the one region of reflective memory that holds what they share.
//!
//! ```text
//!   | control of PE 0 | ... | control of PE n-1 || data of PE 0 | heap of PE 0 | data of PE 1 | heap of PE 1 | ...
//! ```
//!
//! Each PE maps all of it. Its own data, which is the program's, is the same memory, mapped where the program has it (`data`).

use std::ffi::{CStr, c_int};
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock, PoisonError};

use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering, fence};
use ringlet_reflect::{Host, PAGE_BYTES, Permission, Region, Status, Transmitter, Use, VARIABLE};
use std::sync::atomic::AtomicBool;

use crate::data::{Data, place_heap};
use crate::group::{Group, SLOTS, Slot};
use crate::heap::Heap;

/// What the launcher tells each PE. (The keeper's members are as many at most.)
pub const PE: &str = "RINGLET_SHMEM_PE";
pub const PES: &str = "RINGLET_SHMEM_NPES";
pub const KEY: &str = "RINGLET_SHMEM_KEY";
pub const LAUNCHER: &str = "RINGLET_SHMEM_FD";
pub const PES_MOST: usize = 1024;

const HEAP_BYTES: usize = 256 << 20;
/// Of all PEs' heaps together, where nobody said how large they are.
const HEAPS_BYTES: usize = 8 << 30;
/// Heaps are a multiple of this.
const HEAP_UNIT: usize = 64 << 10;

/// What others tell a PE by.
#[repr(C, align(128))]
pub struct Control {
    /// Threads of it that sleep, or are about to (`wait`).
    pub waiting: AtomicU32,
    /// Rung for them.
    pub bell: AtomicU32,
    /// For what: places (`Job::place`).
    pub from: AtomicU64,
    pub to: AtomicU64,
    /// Others have pointers to its memory, and may store there without a call.
    pub pointed: AtomicU32,
    /// It can't make others pass a barrier, nor be made.
    pub has_no_barriers: AtomicU32,
    /// Of teams, by their number.
    pub slots: [Slot; SLOTS],
}

const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(PAGE_BYTES);

pub struct Job {
    pub me: usize,
    pub size: usize,
    pub threads: c_int,
    controls: *mut u8,
    /// What PE 0 has, and how far from each other two PEs' are.
    parts: *mut u8,
    part_bytes: usize,
    pub data: Data,
    heap: *mut u8,
    pub heap_bytes: usize,
    pub allocated: Mutex<Heap>,
    /// Of each PE a processor is free while it waits.
    pub has_processors: bool,
    /// All writers pass a barrier when a waiter wishes it. (Until all are there, nobody knows.)
    pub has_barriers: AtomicBool,
    launcher: Option<Mutex<UnixStream>>,
    _region: Region,
    _transmitter: Transmitter,
}

// SAFETY: its pointers are to mappings that are never undone, of which all is reached by atomics or as the program says.
unsafe impl Send for Job {}
// SAFETY: its pointers are to mappings that are never undone, of which all is reached by atomics or as the program says.
unsafe impl Sync for Job {}

static JOB: OnceLock<Job> = OnceLock::new();

/// The job. The program has called `shmem_init` before it calls anything else.
#[inline]
pub fn job() -> &'static Job {
    match JOB.get() {
        Some(job) => job,
        None => give_up("OpenSHMEM is used before shmem_init"),
    }
}

pub fn begun() -> Option<&'static Job> {
    JOB.get()
}

/// The program is wrong, or can't go on: it says why, and the launcher ends the others.
#[cold]
pub fn give_up(why: impl Display) -> ! {
    let who = JOB.get().map_or(String::new(), |job| format!("PE {}: ", job.me));
    let _ = writeln!(std::io::stderr(), "ringlet-shmem: {who}{why}");
    // SAFETY: ends this process; nothing is written that was not, as by a signal.
    unsafe { libc::_exit(1) }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    let value = variable(name)?;
    Some(value.parse().unwrap_or_else(|_| give_up(format_args!("{name} is not a number: {value}"))))
}

/// As the standard has it: 1.5G, 20m.
fn bytes_of(text: &str) -> Option<usize> {
    let text = text.trim();
    let unit = match text.chars().last()?.to_ascii_lowercase() {
        'k' => 10,
        'm' => 20,
        'g' => 30,
        't' => 40,
        _ => 0,
    };
    let digits = if unit > 0 { &text[..text.len() - 1] } else { text };
    let bytes = digits.trim().parse::<f64>().ok()? * (1u64 << unit) as f64;
    (bytes >= 1.0 && bytes < (1u64 << 40) as f64).then_some(bytes as usize)
}

fn heap_bytes(size: usize) -> usize {
    let asked = variable("SHMEM_SYMMETRIC_SIZE").or_else(|| variable("SMA_SYMMETRIC_SIZE"));
    let bytes = match &asked {
        Some(text) => bytes_of(text)
            .unwrap_or_else(|| give_up(format_args!("SHMEM_SYMMETRIC_SIZE is not a size: {text}"))),
        None => HEAP_BYTES.min(HEAPS_BYTES / size),
    };
    bytes.next_multiple_of(HEAP_UNIT)
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    match read {
        Ok(()) => u64::from_le_bytes(bytes),
        Err(error) => give_up(format_args!("/dev/urandom: {error}")),
    }
}

/// The socket of the launcher's. (Programs that this one starts are jobs of their own.)
fn launcher() -> Option<Mutex<UnixStream>> {
    let descriptor: c_int = number(LAUNCHER)?;
    for name in
        [c"RINGLET_SHMEM_PE", c"RINGLET_SHMEM_NPES", c"RINGLET_SHMEM_KEY", c"RINGLET_SHMEM_FD"]
    {
        // SAFETY: names that end; what else the program does with its environment it does before or behind this call.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
    // SAFETY: a system call of numbers.
    if unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        give_up("the launcher's socket is not open");
    }
    // SAFETY: the launcher gave it to this process, which nobody else uses.
    let launcher = unsafe { UnixStream::from_raw_fd(descriptor) };
    end_with(&launcher, true);
    if has_hung_up(&launcher) {
        give_up(LAUNCHER_HAS_ENDED);
    }
    Some(Mutex::new(launcher))
}

const LAUNCHER_HAS_ENDED: &str = "the launcher has ended";

/// Has the kernel end this process, as `ringlet shmem` does its children, when the launcher does; or no longer. A PE that a script has started is not its
/// child, and one that only looks at memory again and again makes no call by which it would find out.
fn end_with(launcher: &UnixStream, ends: bool) {
    let (fd, flags) = (launcher.as_raw_fd(), if ends { libc::O_ASYNC } else { 0 });
    // SAFETY: system calls of numbers. (The launcher says nothing to a PE: what there is to be told of is its end.)
    unsafe {
        libc::fcntl(fd, libc::F_SETOWN, libc::getpid());
        libc::fcntl(fd, F_SETSIG, libc::SIGTERM);
        libc::fcntl(fd, libc::F_SETFL, flags);
    }
}

/// (Of <fcntl.h>.)
const F_SETSIG: c_int = 10;

fn has_hung_up(launcher: &UnixStream) -> bool {
    let mut event = libc::pollfd { fd: launcher.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    let found = unsafe { libc::poll(&raw mut event, 1, 0) };
    found == 1 && event.revents & libc::POLLHUP != 0
}

/// Joins the job, once.
pub fn begin(threads: c_int) -> &'static Job {
    if let Some(job) = JOB.get() {
        return job;
    }
    let (me, size) = (number(PE).unwrap_or(0), number(PES).unwrap_or(1));
    let key = number(KEY).unwrap_or_else(random);
    if size == 0 || size > PES_MOST || me >= size {
        give_up(format_args!(
            "{PE} and {PES} are not what `ringlet shmem` sets: PE {me} of {size}"
        ));
    }
    let job = match join(me, size, key, threads) {
        Ok(job) => JOB.get_or_init(|| job),
        Err(why) => give_up(why),
    };
    job.tell("begun");
    // From here on all PEs are there, with their data where it is.
    world(job).sync();
    // ORDER: Relaxed: stored before the sync.
    let can = |pe| job.control(pe).has_no_barriers.load(Ordering::Relaxed) == 0;
    job.has_barriers.store((0..size).all(can), Ordering::Relaxed);
    job.show();
    job
}

fn join(me: usize, size: usize, key: u64, threads: c_int) -> Result<Job, String> {
    let data = Data::of_program()?;
    let heap_bytes = heap_bytes(size);
    let part_bytes = data.bytes() + heap_bytes;
    let all =
        part_bytes.checked_mul(size).and_then(|parts| parts.checked_add(CONTROL_BYTES * size));
    let all = all.ok_or("the symmetric heap is too large")?;
    let cant = |status: Status| match status {
        Status::BadSize => format!(
            "{all} bytes of {size} PEs are not to be had (SHMEM_SYMMETRIC_SIZE), or PEs differ in it or in their program"
        ),
        Status::Full | Status::ReceiveFull => format!(
            "this host's keeper of reflective memory has no {all} bytes for {size} PEs: let it have more (`ringlet reflect keep --all`, \
             `ringlet imc init -a`), name another one by {VARIABLE}, or ask for less by SHMEM_SYMMETRIC_SIZE"
        ),
        status => format!("reflective memory of {all} bytes: {status}"),
    };
    let host = Host::open().map_err(cant)?;
    let how = Permission::default();
    let region = host.allocate(key, all, &how).map_err(cant)?;
    let transmitter = region.transmit_sparse(Use::default()).map_err(cant)?;
    let controls = transmitter.base();
    // SAFETY: within the mapping: so it was allocated.
    let parts = unsafe { controls.add(CONTROL_BYTES * size) };
    // SAFETY: the region was allocated with a part for each of `size` PEs, and `me` is one.
    let ours = unsafe { parts.add(part_bytes * me) };
    if !is_writable(ours) {
        let why = "this host's reflective memory reaches other hosts, and a job is of one host: ";
        return Err(format!("{why}{VARIABLE} may name another keeper's socket"));
    }
    data.share(ours)?;
    // SAFETY: our part begins with the data's bytes, and the heap's follow: so it was allocated.
    let heap = place_heap(unsafe { ours.add(data.bytes()) }, heap_bytes)?;
    let has_barriers = crate::wait::register_barriers();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let job = Job {
        me,
        size,
        threads,
        controls,
        parts,
        part_bytes,
        data,
        heap,
        heap_bytes,
        allocated: Mutex::new(Heap::new(heap_bytes)),
        has_processors: size <= processors,
        has_barriers: AtomicBool::new(false),
        launcher: launcher(),
        _region: region,
        _transmitter: transmitter,
    };
    job.control(me).has_no_barriers.store(u32::from(!has_barriers), Ordering::Relaxed);
    Ok(job)
}

/// Can a byte be stored there as anywhere? (It is 0 before, and then.)
fn is_writable(at: *mut u8) -> bool {
    let zeros = File::open("/dev/zero");
    // SAFETY: a byte of a mapping that nobody else has used yet; the kernel refuses if it can't be written.
    zeros.is_ok_and(|zeros| unsafe { libc::read(zeros.as_raw_fd(), at.cast(), 1) } == 1)
}

/// All PEs.
pub fn world(job: &Job) -> Group<'_> {
    Group::of_slot(job, 0, 1, job.size, 0, 0)
}

impl Job {
    #[inline]
    pub fn control(&self, pe: usize) -> &Control {
        debug_assert!(pe < self.size);
        // SAFETY: of a PE of the job, within a mapping that stays; all of it is atomics.
        unsafe { &*self.controls.add(CONTROL_BYTES * pe).cast::<Control>() }
    }

    /// Where a PE has a control's word that lies at this address in PE 0's.
    pub fn controls_apart(&self) -> usize {
        CONTROL_BYTES
    }

    pub fn parts_apart(&self) -> usize {
        self.part_bytes
    }

    /// What lies at a symmetric address of ours, as PE `pe` has it. `None`: not all of it is symmetric, or there is no such PE.
    #[inline]
    pub fn find(&self, address: *const u8, bytes: usize, pe: usize) -> Option<*mut u8> {
        let in_heap = (address as usize).wrapping_sub(self.heap as usize);
        let at = if in_heap < self.heap_bytes && bytes <= self.heap_bytes - in_heap {
            self.data.bytes() + in_heap
        } else {
            self.data.find(address as usize, bytes)?
        };
        // SAFETY: within the part of a PE of the job.
        (pe < self.size).then(|| unsafe { self.parts.add(self.part_bytes * pe + at) })
    }

    /// What the program may load from and store to; nothing if it is not symmetric. (Its own it knows already.)
    pub fn pointer(&self, address: *const u8, pe: usize) -> *mut u8 {
        let found = self.find(address, 1, pe);
        let found = if pe == self.me { found.map(|_| address.cast_mut()) } else { found };
        found.unwrap_or(std::ptr::null_mut())
    }

    /// As `find`, where the program has to be right.
    #[inline]
    pub fn remote(&self, address: *const u8, bytes: usize, pe: usize) -> *mut u8 {
        match self.find(address, bytes, pe) {
            Some(found) => found,
            None if bytes == 0 => address.cast_mut(),
            None => self.refuse(address, bytes, pe),
        }
    }

    #[cold]
    fn refuse(&self, address: *const u8, bytes: usize, pe: usize) -> ! {
        if pe >= self.size {
            give_up(format_args!("there is no PE {} among {}", pe as isize, self.size));
        }
        give_up(format_args!(
            "{bytes} bytes at {address:?} are not symmetric: neither of the heap nor static data of the program"
        ))
    }

    /// An offset in the heap.
    pub fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: of an allocation, within the heap.
        unsafe { self.heap.add(offset) }
    }

    pub fn offset(&self, address: *const u8) -> usize {
        (address as usize).wrapping_sub(self.heap as usize)
    }

    pub fn heap(&self) -> std::sync::MutexGuard<'_, Heap> {
        self.allocated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A look at whether somebody sleeps for what was stored there.
    #[inline]
    pub fn ring<T>(&self, pe: usize, at: *const T, bytes: usize) {
        crate::wait::ring(self, pe, at.cast(), bytes);
    }

    /// What all PEs call a place in the region.
    pub fn place(&self, at: *const u8) -> u64 {
        (at as u64).wrapping_sub(self.controls as u64)
    }

    /// Of what lies in the region itself, or is symmetric. (Nothing else is told of.)
    pub fn place_of_ours(&self, at: *const u8, bytes: usize) -> u64 {
        self.place(self.find(at, bytes, self.me).unwrap_or(at.cast_mut()))
    }

    /// Complete, and seen by all before what follows.
    pub fn quiet(&self) {
        // ORDER: SeqCst: what this PE stored is out before what it loads from here on; two PEs that store, pass this and look at each other's store
        // do not both miss it (the other one's `quiet`).
        fence(Ordering::SeqCst);
    }

    /// To the launcher: `begun`, `done`, or the number that the job ends with. (It knows by itself if we die.)
    pub fn tell(&self, word: &str) {
        if let Some(launcher) = &self.launcher {
            let mut launcher = launcher.lock().unwrap_or_else(PoisonError::into_inner);
            let mut message = (word.len() as u32).to_le_bytes().to_vec();
            message.extend(word.as_bytes());
            let _ = launcher.write_all(&message);
        }
    }

    /// Of one who waits: the program may have other plans with the signal that tells it (`end_with`), or none.
    pub fn end_without_launcher(&self) {
        let Some(launcher) = &self.launcher else { return };
        if has_hung_up(&launcher.lock().unwrap_or_else(PoisonError::into_inner)) {
            give_up(LAUNCHER_HAS_ENDED);
        }
    }

    /// It is through with the others: what it does from here on is nobody's to end.
    pub fn leave(&self) {
        self.tell("done");
        if let Some(launcher) = &self.launcher {
            end_with(&launcher.lock().unwrap_or_else(PoisonError::into_inner), false);
        }
    }

    fn show(&self) {
        let is_wanted = |name| variable(name).is_some_and(|value| value != "0");
        if self.me == 0 && is_wanted("SHMEM_VERSION") {
            eprintln!("OpenSHMEM 1.5 on ringlet {}", env!("CARGO_PKG_VERSION"));
        }
        if self.me == 0 && is_wanted("SHMEM_INFO") {
            eprintln!(
                "SHMEM_SYMMETRIC_SIZE: {} bytes of heap for each of {} PEs, and {} of static data",
                self.heap_bytes,
                self.size,
                self.data.bytes()
            );
        }
    }
}

/// The library's name, of at most `SHMEM_MAX_NAME_LEN` bytes.
pub const VENDOR: &CStr = c"ringlet";

/// A word of shared memory.
pub fn word<'a>(at: *mut u8) -> &'a AtomicU64 {
    // SAFETY: of the job's memory, aligned (who asks has looked), which stays mapped.
    unsafe { &*at.cast() }
}

#[cfg(test)]
mod tests {
    use super::{bytes_of, is_writable};

    #[test]
    fn memory_that_is_not_plain_is_found_out() {
        let (none, plain) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
        for (protection, expected) in [(none, false), (plain, true)] {
            let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, how, -1, 0) };
            assert_eq!(is_writable(at.cast()), expected);
        }
    }

    #[test]
    fn sizes_are_read_as_the_standard_has_them() {
        let known = [
            ("1000", Some(1000)),
            ("20m", Some(20 << 20)),
            ("1.5G", Some(3 << 29)),
            (" 4 K ", Some(4096)),
            ("", None),
            ("m", None),
            ("-1", None),
            ("0", None),
            ("nan", None),
            ("9t", None),
        ];
        for (text, bytes) in known {
            assert_eq!(bytes_of(text), bytes, "{text}");
        }
    }
}
