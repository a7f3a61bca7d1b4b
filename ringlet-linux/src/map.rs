//! Memory: tables of our own, tables shared over fork, sealed segments.

use crate::locked;
use crate::sys::{Errno, Sys, close, sched_yield, sys};
use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};
use ringlet_core::layout::PAGE_BYTES;
use ringlet_core::memory::Area;
use ringlet_core::sync::AtomicU64;

/// Types for which zeroed memory is a valid, empty value; they live in tables that are mapped, never built.
///
/// # Safety
/// All-zero bytes are a valid value, the type is `Sync`, and has no destructor.
pub unsafe trait Zeroed: Sync {}

// SAFETY: zero is a valid atomic.
unsafe impl Zeroed for core::sync::atomic::AtomicU32 {}
// SAFETY: zero is a valid atomic.
unsafe impl Zeroed for core::sync::atomic::AtomicU64 {}
// SAFETY: zero is a valid atomic.
unsafe impl Zeroed for AtomicUsize {}

fn map(len: usize, prot: i32, flags: i32, fd: i32) -> Sys<*mut u8> {
    map_at(0, len, prot, flags, fd)
}

fn map_at(offset: usize, len: usize, prot: i32, flags: i32, fd: i32) -> Sys<*mut u8> {
    if locked::is_future_locked() {
        return map_unlocked(offset, len, prot, flags, fd);
    }
    // SAFETY: a fresh mapping at an address of the kernel's choice disturbs nothing.
    unsafe { sys!(SYS_mmap, 0usize, len, prot, flags, fd, offset) }
        .map(|address| address as *mut u8)
}

/// Where the program has all locked that is mapped. KERNEL: no page is made to be there that may not be used yet. (It counts against the limit for
/// a moment, and can't be had where that has no room for it.)
#[cold]
fn map_unlocked(offset: usize, len: usize, prot: i32, flags: i32, fd: i32) -> Sys<*mut u8> {
    // SAFETY: as in `map`; nobody else knows of it yet.
    unsafe {
        let address = sys!(SYS_mmap, 0usize, len, libc::PROT_NONE, flags, fd, offset)?;
        let done = sys!(SYS_munlock, address, len).and(sys!(SYS_mprotect, address, len, prot));
        if let Err(error) = done {
            let _ = sys!(SYS_munmap, address, len);
            return Err(error);
        }
        Ok(address as *mut u8)
    }
}

/// Fresh zeroed memory in the place of a mapping of ours, in one step.
///
/// # Safety
/// Whole pages of a mapping of ours, where zero is valid, and may be found at any time.
unsafe fn map_over(base: usize, len: usize, flags: i32) -> Sys<()> {
    // SAFETY: by contract.
    unsafe {
        if !locked::is_future_locked() {
            let flags = flags | libc::MAP_FIXED;
            sys!(SYS_mmap, base, len, READ_WRITE, flags, -1i32, 0usize)?;
        } else {
            let made = map(len, READ_WRITE, flags, -1)?;
            let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            if let Err(error) = sys!(SYS_mremap, made, len, len, how, base) {
                let _ = sys!(SYS_munmap, made, len);
                return Err(error);
            }
        }
        if flags & libc::MAP_SHARED != 0 && len >= LARGE_BYTES {
            leave_out(base, len);
        }
    }
    Ok(())
}

/// Not to be written to a core dump. KERNEL: of shared memory the dump makes each page that was never used, and writes it.
fn leave_out(base: usize, len: usize) {
    // SAFETY: advice on a mapping of ours.
    let _ = unsafe { sys!(SYS_madvise, base, len, libc::MADV_DONTDUMP) };
}

/// Smaller shared memory may be dumped.
const LARGE_BYTES: usize = 64 << 10;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

const TABLE: i32 = libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
/// KERNEL: a mapping lies below the one before it, and is one with that if it is of the same kind. (So it is with what the loader has mapped last,
/// for the first thread's variables: a mapping less for each fork to copy.)
const GROUND: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A part of a mapping of which not all is taken.
struct Rest {
    next: AtomicUsize,
    end: AtomicUsize,
}

impl Rest {
    const fn none() -> Rest {
        Rest { next: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }

    fn set(&self, start: usize, end: usize) {
        self.next.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
    }

    fn take(&self, bytes: usize, align: usize) -> Option<usize> {
        let start = |next: usize| {
            let start = next.next_multiple_of(align);
            let fits = start.checked_add(bytes)? <= self.end.load(Ordering::Relaxed);
            fits.then_some(start)
        };
        let after = |next| Some(start(next)? + bytes);
        let taken = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        taken.ok().and_then(start)
    }

    /// The same from its end, in whole pages.
    fn take_last(&self, bytes: usize) -> Option<usize> {
        let before = |end: usize| {
            let start = end.checked_sub(bytes)? / PAGE_BYTES * PAGE_BYTES;
            (start >= self.next.load(Ordering::Relaxed)).then_some(start)
        };
        let taken = self.end.fetch_update(Ordering::Relaxed, Ordering::Relaxed, before);
        taken.ok().and_then(before)
    }
}

/// One mapping for many tables: each mapping is made at every start, copied by every fork and taken down at every end.
struct Ground {
    flags: i32,
    /// For those that are smaller than a page: what a fork writes lies on few pages.
    small: Rest,
    large: Rest,
    /// Where all of it lies.
    base: AtomicUsize,
    top: AtomicUsize,
}

/// Where the grounds lie, which are large and hardly used; none before they are made.
pub fn tables() -> Option<[Range<usize>; 2]> {
    let all = [&PRIVATE, &FAMILY]
        .map(|ground| ground.base.load(Ordering::Relaxed)..ground.top.load(Ordering::Relaxed));
    all.iter().all(|range| !range.is_empty()).then_some(all)
}

/// What memfds are called that are the library's own affair.
pub const OURS: [&str; 6] = [
    "/memfd:ringlet-segment",
    "/memfd:ringlet-lane",
    "/memfd:ringlet-process",
    "/memfd:ringlet-context",
    "/memfd:ringlet-ready",
    "/memfd:ringlet-tap",
];

static PRIVATE: Ground = Ground::new(libc::MAP_PRIVATE);
/// (Private too until it is needed: `share`.)
static FAMILY: Ground = Ground::new(libc::MAP_SHARED);
const SMALL_BYTES: usize = PAGE_BYTES;
/// No type of theirs wants more.
const ALIGN: usize = 128;

/// Where the small private tables lie, and the first entries of large ones (`Table`): beside the library's own variables, in a table of pages
/// that a fork copies anyway.
#[repr(C, align(4096))]
struct Near(UnsafeCell<[u8; NEAR_BYTES]>);

const NEAR_BYTES: usize = 3 * PAGE_BYTES;

// SAFETY: only its address is taken, for tables of atomics.
unsafe impl Sync for Near {}

static NEAR: Near = Near(UnsafeCell::new([0; NEAR_BYTES]));

impl Ground {
    const fn new(flags: i32) -> Ground {
        let (base, top) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ground { flags, small: Rest::none(), large: Rest::none(), base, top }
    }

    fn begin(&self, bytes: usize, small: Option<usize>) -> Sys<()> {
        let base = map(bytes, READ_WRITE, GROUND, -1)? as usize;
        let end = match small {
            Some(near) => {
                self.small.set(near, near + NEAR_BYTES);
                base + bytes
            }
            None => {
                self.small.set(base + bytes - SMALL_BYTES, base + bytes);
                base + bytes - SMALL_BYTES
            }
        };
        self.large.set(base, end);
        self.base.store(base, Ordering::Relaxed);
        self.top.store(base + bytes, Ordering::Relaxed);
        Ok(())
    }

    /// What was not used, at its beginning, goes back in whole pieces of so many bytes.
    fn end(&self, piece: usize) {
        let base = self.large.next.load(Ordering::Relaxed);
        let unused = self.large.end.load(Ordering::Relaxed) - base;
        let back = unused / piece * piece;
        self.small.set(0, 0);
        self.large.set(0, 0);
        if back > 0 {
            self.base.store(base + back, Ordering::Relaxed);
            // SAFETY: whole pages of our own mapping that nobody was given.
            let _ = unsafe { sys!(SYS_munmap, base, back) };
        }
    }

    /// Zeroed memory for good: a part of the mapping if there is room, and else one of its own.
    fn take(&self, bytes: usize, align: usize) -> Sys<*mut u8> {
        let small = if bytes < SMALL_BYTES { self.small.take(bytes, align) } else { None };
        let part = small.or_else(|| self.large.take_last(bytes));
        match part {
            Some(base) => Ok(base as *mut u8),
            None => {
                let base = map(bytes, READ_WRITE, self.flags | TABLE, -1)?;
                leave_out(base as usize, bytes);
                Ok(base)
            }
        }
    }
}

static NEAR_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// The tables that `make` makes lie together, as far as they take no more than so many bytes (some multiple of a huge page), private ones and
/// the family's.
pub fn together<T>(bytes: usize, make: impl FnOnce() -> Sys<T>) -> Sys<T> {
    // (Once: a second call would hand out the same again.)
    let near = NEAR_TAKEN.swap(1, Ordering::Relaxed) == 0;
    // KERNEL: a mapping of whole huge pages begins where one does, and what the program maps below it would no more begin at the place within
    // 64 KiB, or within a huge page, where it begins without us; which decides how many of its pages are mapped at a fault.
    PRIVATE.begin(bytes + PAGE_BYTES, near.then_some(NEAR.0.get() as usize))?;
    let made = FAMILY.begin(bytes - PAGE_BYTES, None).and_then(|()| {
        let end = FAMILY.small.end.load(Ordering::Relaxed);
        let made = make();
        TO_SHARE.set(FAMILY.large.end.load(Ordering::Relaxed), end);
        made
    });
    PRIVATE.end(HUGE_PAGE_BYTES);
    FAMILY.end(PAGE_BYTES);
    // (A dump that goes through a pipe has zeros for what holds nothing.)
    tables().into_iter().flatten().for_each(|part| leave_out(part.start, part.len()));
    made
}

/// What of the family's ground is not shared yet.
static TO_SHARE: Rest = Rest::none();
static SHARING: AtomicUsize = AtomicUsize::new(0);
/// Another thread is at it for no longer than this.
const LOOKS: usize = 10_000;
const QUICK_LOOKS: usize = 1000;

/// Makes the family's tables shared with the children that come, if they are not: before anything is put there. (A process that has neither
/// a socket nor a child needs no such memory, whose making and end cost it more than other memory's.) False: they are not.
pub fn share() -> bool {
    // ORDER: Acquire; pairs with the store of `share`.
    let begin = TO_SHARE.next.load(Ordering::Acquire);
    if begin == 0 {
        return true;
    }
    // ORDER: Acquire; pairs with the store at the end of `share`: one thread maps it, once.
    if SHARING.swap(1, Ordering::Acquire) != 0 {
        // (A handler that has interrupted that thread gives up. On a busy machine that thread may have no processor just now.)
        return (0..LOOKS).any(|look| {
            if look < QUICK_LOOKS {
                core::hint::spin_loop()
            } else {
                sched_yield()
            }
            TO_SHARE.next.load(Ordering::Acquire) == 0
        });
    }
    let mut shared = TO_SHARE.next.load(Ordering::Relaxed) == 0;
    if !shared {
        let bytes = TO_SHARE.end.load(Ordering::Relaxed) - begin;
        // SAFETY: whole pages of our own mapping, for tables in which nothing was put, so that they are zero before and after.
        shared = unsafe { map_over(begin, bytes, TABLE | libc::MAP_SHARED) }.is_ok();
        if shared {
            // ORDER: Release; pairs with the loads of `share`: who finds it so finds the memory.
            TO_SHARE.next.store(0, Ordering::Release);
        }
    }
    // ORDER: Release; pairs with the swap of `share`.
    SHARING.store(0, Ordering::Release);
    shared
}

/// In a child by fork: the thread of its parent that shares the tables is not there.
pub fn begin_sharing_anew() {
    if SHARING.load(Ordering::Relaxed) != 0 {
        SHARING.store(0, Ordering::Relaxed);
    }
}

fn table<T: Zeroed>(count: usize, align: usize, ground: &Ground) -> Sys<&'static [T]> {
    const { assert!(align_of::<T>() <= ALIGN) };
    let base = ground.take(count * size_of::<T>(), align)?;
    // SAFETY: zeroed memory that nobody else is given, aligned as `T` wants it, never unmapped; zero is valid (contract of `Zeroed`).
    Ok(unsafe { core::slice::from_raw_parts(base.cast(), count) })
}

/// A table of this process: a child by fork gets a copy. Untouched pages cost nothing.
pub fn private_table<T: Zeroed>(count: usize) -> Sys<&'static [T]> {
    table(count, ALIGN, &PRIVATE)
}

/// A table that this process and its children by fork share.
pub fn family_table<T: Zeroed>(count: usize) -> Sys<&'static [T]> {
    table(count, ALIGN, &FAMILY)
}

/// A private table of which the first entries are used most, by many processes only they: those of all such tables share few pages, which is
/// what a child by fork copies.
pub struct Table<T: 'static> {
    near: &'static [T],
    /// Of all: what `near` holds is never touched here.
    far: &'static [T],
}

impl<T: Zeroed> Table<T> {
    pub fn map(near: usize, count: usize) -> Sys<Table<T>> {
        Ok(Table { near: table(near, align_of::<T>(), &PRIVATE)?, far: private_table(count)? })
    }

    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<&'static T> {
        self.near.get(index).or_else(|| self.far.get(index))
    }

    #[inline(always)]
    pub fn at(&self, index: usize) -> &'static T {
        match self.near.get(index) {
            Some(entry) => entry,
            None => &self.far[index],
        }
    }

    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.far.len()
    }

    /// The number of an entry.
    #[inline(always)]
    pub fn index_of(&self, entry: &T) -> usize {
        let index_in = |entries: &[T]| {
            (entry as *const T as usize).wrapping_sub(entries.as_ptr() as usize) / size_of::<T>()
        };
        let near = index_in(self.near);
        if near < self.near.len() { near } else { index_in(self.far) }
    }

    pub fn entries(&self, numbers: Range<usize>) -> impl Iterator<Item = &'static T> + use<T> {
        let (near, far) = (self.near, self.far);
        let (from, to) = (numbers.start, numbers.end.min(far.len()));
        let near = near.get(from.min(near.len())..to.min(near.len())).unwrap_or(&[]);
        near.iter().chain(far.get(from.max(self.near.len())..to).unwrap_or(&[]))
    }
}

/// Puts fresh zeroed memory in the place of entries of such a table: from now on they are this process's, and its later children's. The
/// others keep what was there. Whoever looks at an entry meanwhile finds the old value or zero.
pub fn map_anew<T: Zeroed>(entries: &'static [T]) -> Sys<()> {
    // SAFETY: whole pages of a mapping of ours (the kernel refuses others), which stay mapped for good; the entries are atomics that may
    // change at any time, and zero is valid (contract of `Zeroed`).
    unsafe { map_over(entries.as_ptr() as usize, size_of_val(entries), TABLE | libc::MAP_SHARED) }
}

/// A table that is zero again in a child by fork, however the fork was made: the cheapest way to notice one.
pub fn wiped_table<T: Zeroed>(count: usize) -> Sys<&'static [T]> {
    let base = map(count * size_of::<T>(), READ_WRITE, libc::MAP_PRIVATE | TABLE, -1)?;
    // SAFETY: as in `table`.
    let made: &'static [T] = unsafe { core::slice::from_raw_parts(base.cast(), count) };
    // SAFETY: advice on our own fresh mapping.
    unsafe {
        sys!(SYS_madvise, made.as_ptr(), count * size_of::<T>(), libc::MADV_WIPEONFORK)?;
    }
    Ok(made)
}

/// A memfd of `len` bytes that can neither shrink nor grow: a mapping of it can't fault.
pub fn sealed_memfd(name: &CStr, len: usize, extra_seals: i32) -> Sys<i32> {
    // KERNEL: RLIMIT_FSIZE is for these files too, and who exceeds it gets SIGXFSZ.
    if len as u64 > crate::sys::limit(libc::RLIMIT_FSIZE) {
        return Err(Errno::ENOMEM);
    }
    // SAFETY: `name` is a C string.
    let fd = unsafe {
        sys!(SYS_memfd_create, name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?
    } as i32;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: no memory is passed.
    let made = unsafe {
        sys!(SYS_ftruncate, fd, len)
            .and_then(|_| sys!(SYS_fcntl, fd, libc::F_ADD_SEALS, seals | extra_seals))
    };
    match made {
        Ok(_) => Ok(fd),
        Err(error) => {
            close(fd);
            Err(error)
        }
    }
}

/// Forbids writable mappings from now on (those that exist go on), and further seals.
pub fn seal_readers(fd: i32) -> Sys<()> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_fcntl, fd, libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL) }
        .map(drop)
}

/// What is known of a memfd.
struct Memory {
    seals: i32,
    stat: libc::stat,
}

impl Memory {
    /// An error for what is no memfd. (Of nothing else are seals known.)
    fn of(fd: i32) -> Sys<Memory> {
        // SAFETY: no memory is passed.
        let seals = unsafe { sys!(SYS_fcntl, fd, libc::F_GET_SEALS)? } as i32;
        // SAFETY: zero is a valid stat buffer.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: `stat` is valid for writing.
        unsafe { sys!(SYS_fstat, fd, &raw mut stat)? };
        Ok(Memory { seals, stat })
    }

    /// Does it hold no more than this, and will it never?
    ///
    /// KERNEL: pages behind the end (FALLOC_FL_KEEP_SIZE) are counted as blocks only; once it is sealed none are added.
    fn is_at_most(&self, bytes: u64) -> bool {
        let held = self.stat.st_blocks as u64 * 512;
        self.seals & libc::F_SEAL_GROW != 0 && self.stat.st_size as u64 <= bytes && held <= bytes
    }
}

/// Is this memory, as memfds are, that can't be more than this?
pub fn is_memory_of(fd: i32, most: u64) -> bool {
    Memory::of(fd).is_ok_and(|memory| memory.is_at_most(most))
}

/// How much memory holds it now.
pub fn held_bytes(fd: i32) -> Sys<u64> {
    Memory::of(fd).map(|memory| memory.stat.st_blocks as u64 * 512)
}

/// Size of a memfd that somebody else made, if it is one that can't fault: sealed against shrinking, and not of huge pages,
/// which may run out. (Its block size does not tell: it is that of a huge page too where tmpfs may use them.) Nor does it hold more than it
/// shows: whoever lets go of it last frees all. `EINVAL` if not.
pub fn sealed_size(fd: i32) -> Sys<usize> {
    let memory = Memory::of(fd)?;
    let (seals, stat) = (memory.seals, &memory.stat);
    // SAFETY: zero is a valid statfs buffer.
    let mut system: libc::statfs = unsafe { core::mem::zeroed() };
    // SAFETY: `system` is valid for writing.
    unsafe { sys!(SYS_fstatfs, fd, &raw mut system)? };
    let in_tmpfs = system.f_type == libc::TMPFS_MAGIC;
    let sane = stat.st_size >= 0
        && memory.is_at_most(stat.st_size as u64 + stat.st_blksize.max(PAGE_BYTES as i64) as u64);
    if seals & libc::F_SEAL_SHRINK == 0 || !in_tmpfs || !sane {
        return Err(Errno::EINVAL);
    }
    Ok(stat.st_size as usize)
}

/// Maps `len` bytes of a sealed memfd, which stay mapped until `unmap`.
pub fn map_shared(fd: i32, len: usize, writable: bool) -> Sys<Area> {
    let prot = if writable { READ_WRITE } else { libc::PROT_READ };
    let base = map(len, prot, libc::MAP_SHARED, fd)?;
    // SAFETY: mapped just now, page-aligned; the seal keeps every page backed.
    Ok(unsafe { Area::new(base, len) })
}

/// The same of whole pages of it, for writing.
pub fn map_shared_at(fd: i32, offset: usize, len: usize) -> Sys<Area> {
    let base = map_at(offset, len, READ_WRITE, libc::MAP_SHARED, fd)?;
    // SAFETY: mapped just now, page-aligned, for `len` bytes; the file's seals keep every page backed.
    Ok(unsafe { Area::new(base, len) })
}

/// The same as `map_shared` for what is the library's own affair, and large: no core dump of the program has it.
pub fn map_segment(fd: i32, len: usize) -> Sys<Area> {
    let area = map_shared(fd, len, true)?;
    leave_out(area.base() as usize, len);
    Ok(area)
}

/// Puts one mapping in the place of another one, of the same size: who looks there meets the one or the other, whole pages at a time. If that fails both
/// stay as they are.
///
/// # Safety
/// What refers to the memory at `place` may find the other there at any time: made of atomics, of which nothing is believed. `fresh` is used no more by
/// where it was.
pub unsafe fn put_in_place(fresh: Area, place: Area) -> Sys<()> {
    if fresh.len() != place.len() {
        return Err(Errno::EINVAL);
    }
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let len = fresh.len();
    // KERNEL: whoever touches a page meanwhile waits until it is done (the lock of the address space). It refuses before it takes anything away.
    // SAFETY: two whole mappings of ours; the rest by contract.
    unsafe { sys!(SYS_mremap, fresh.base(), len, len, how, place.base()) }.map(drop)
}

/// A copy of a mapping that others write to as well, as it is now. It may take the place of that one in this process (or in a child, if it was made before
/// the fork), and is shared with later children as that one was.
#[derive(Clone, Copy, Default)]
pub struct PrivateCopy {
    of: usize,
    base: usize,
    len: usize,
}

impl PrivateCopy {
    pub fn of_area(area: Area) -> Sys<PrivateCopy> {
        let copy = copy_of(area)?;
        Ok(PrivateCopy { of: area.base() as usize, base: copy.base() as usize, len: area.len() })
    }

    pub fn of_table<T: Zeroed>(entries: &'static [T]) -> Sys<PrivateCopy> {
        // SAFETY: whole pages of a table of ours, which lasts.
        let table = unsafe { Area::new(entries.as_ptr().cast_mut().cast(), size_of_val(entries)) };
        PrivateCopy::of_area(table)
    }

    pub fn area(&self) -> Area {
        // SAFETY: a whole mapping of ours, shown to nobody.
        unsafe { Area::new(self.base as *mut u8, self.len) }
    }

    /// From now on it is there in the place of what was copied. If that fails all is as before, and the copy is gone.
    ///
    /// # Safety
    /// As of `put_in_place`.
    pub unsafe fn put_in_place(self) -> Sys<()> {
        // SAFETY: whole pages of ours, which last; the rest by contract.
        let placed = unsafe { put_in_place(self.area(), Area::new(self.of as *mut u8, self.len)) };
        if placed.is_err() {
            self.forget();
        }
        placed
    }

    pub fn forget(self) {
        // SAFETY: nobody else knows of it.
        unsafe { unmap(self.area()) };
    }
}

/// Words are copied from the lowest address on, each whole and behind the one before (so what is published at a lower one is there). Memory that can't be had
/// is an error. WHY all pages are made to be there first, also those that were never used: mincore tells of none that is swapped out.
fn copy_of(area: Area) -> Sys<Area> {
    const WORD: usize = size_of::<AtomicU64>();
    populate(area, false)?;
    let len = area.len();
    let base = map(len, READ_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)?;
    leave_out(base as usize, len);
    // SAFETY: a whole mapping of ours, shown to nobody.
    let copy = unsafe { Area::new(base.cast(), len) };
    for page in (0..len).step_by(PAGE_BYTES) {
        let words = || (page..len.min(page + PAGE_BYTES)).step_by(WORD);
        // ORDER: Acquire; pairs with the Release of whoever published there, as `record::publish`.
        let word = |at: usize| area.at::<AtomicU64>(at).load(Ordering::Acquire);
        // (What is zero is so in fresh memory, which need not be held for it.)
        if words().all(|at| word(at) == 0) {
            continue;
        }
        if let Err(error) = hold(copy, page, PAGE_BYTES) {
            // SAFETY: the mapping from above.
            unsafe { unmap(copy) };
            return Err(error);
        }
        words().for_each(|at| copy.at::<AtomicU64>(at).store(word(at), Ordering::Relaxed));
    }
    Ok(copy)
}

/// In a child: private memory in the place of a mapping of its parent's, made of atomics. A handler in which it was forked returns to a frame
/// that may be about to write there.
pub fn stand_in(base: usize, len: usize) {
    // SAFETY: a whole mapping of ours; what is found there from now on is zero, which is a value of atomics.
    let _ = unsafe { map_over(base, len, TABLE | libc::MAP_PRIVATE) };
    leave_out(base, len);
}

/// Changes what may be done with the pages that begin in `start..end`, the first one with all of it; false if the kernel refuses.
///
/// # Safety
/// Nobody needs a right to them that is taken away.
pub unsafe fn protect(start: usize, end: usize, prot: i32) -> bool {
    // SAFETY: only asks what the kernel has told at the start.
    let page = unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize;
    let (start, end) = (start / page * page, end / page * page);
    // SAFETY: by contract.
    unsafe { sys!(SYS_mprotect, start, end - start, prot) }.is_ok()
}

/// Makes sure that these bytes of a mapping, whole pages, are held by memory. A page that can't be had (limits of a container, strict
/// overcommit) is an error here, where at first use it would be SIGBUS. What lies there may be changed where the kernel is old.
pub fn hold(area: Area, offset: usize, len: usize) -> Sys<()> {
    const MADV_POPULATE_WRITE: i32 = 23;
    if offset > area.len() || len > area.len() - offset {
        return Err(Errno::EINVAL);
    }
    let from = area.base().wrapping_add(offset);
    for _ in 0..HOLD_TRIES {
        // SAFETY: within our own mapping; nothing changes but that its pages are there.
        match unsafe { sys!(SYS_madvise, from, len, MADV_POPULATE_WRITE) } {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EPERM | Errno::EACCES) => break,
            other => return other.map(drop),
        }
    }
    // Before 5.14, or forbidden: the kernel itself writes there, which it survives.
    for page in (0..len).step_by(PAGE_BYTES) {
        // SAFETY: one byte of our own mapping.
        let written =
            unsafe { sys!(SYS_getrandom, from.wrapping_add(page), 1, libc::GRND_NONBLOCK) };
        if written == Err(Errno::EFAULT) {
            return Err(Errno::ENOMEM);
        }
    }
    Ok(())
}

/// The same of all of a mapping that others use already: whatever lies there stays, and what it was mapped for can be done without a fault. Before
/// Linux 5.14 pages come at their first use.
pub fn populate(area: Area, writable: bool) -> Sys<()> {
    const MADV_POPULATE_READ: i32 = 22;
    const MADV_POPULATE_WRITE: i32 = 23;
    let advice = if writable { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    let (mut done, mut tries) = (0, 0);
    while done < area.len() {
        let (from, piece) = (area.base().wrapping_add(done), POPULATED.min(area.len() - done));
        // SAFETY: within our own mapping; nothing changes but that its pages are there.
        match unsafe { sys!(SYS_madvise, from, piece, advice) } {
            Ok(_) => (done, tries) = (done + piece, 0),
            // (What is done stays done, so that signals that come again and again end no more than a piece.)
            Err(Errno::EAGAIN | Errno::EINTR) if tries < HOLD_TRIES => tries += 1,
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EPERM | Errno::EACCES) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Bytes at a time.
const POPULATED: usize = 4 << 20;
const HOLD_TRIES: usize = 16;

/// Gives the memory of these bytes of a shared mapping, whole pages, back: they are zero then.
pub fn let_go(area: Area, offset: usize, len: usize) -> Sys<()> {
    if len == 0 || offset > area.len() || len > area.len() - offset {
        return Ok(());
    }
    // SAFETY: within our own mapping, whose bytes any peer may change as well.
    unsafe { sys!(SYS_madvise, area.base().wrapping_add(offset), len, libc::MADV_REMOVE) }.map(drop)
}

/// # Safety
/// No copy of `area`, nor a reference made from one, is used afterwards.
pub unsafe fn unmap(area: Area) {
    // SAFETY: `area` is a whole mapping of ours (contract of `Area::new`).
    let _ = unsafe { sys!(SYS_munmap, area.base(), area.len()) };
}

/// A temporary array of our own: from the kernel, since we may be inside the program's allocator or signal handler; on the
/// stack when it is small.
pub struct Scratch<T: Copy + 'static> {
    base: *mut T,
    count: usize,
}

impl<T: Copy> Scratch<T> {
    pub fn new(count: usize, fill: T) -> Option<Scratch<T>> {
        let bytes = count * size_of::<T>();
        let base: *mut T =
            map(bytes, READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).ok()?.cast();
        for i in 0..count {
            // SAFETY: within the fresh mapping, which is aligned for any T of ours.
            unsafe { base.add(i).write(fill) };
        }
        Some(Scratch { base, count })
    }

    /// What is mapped for it.
    pub fn area(&self) -> Area {
        // SAFETY: a whole mapping of ours, which lasts as long as `self`.
        unsafe { Area::new(self.base.cast(), self.count * size_of::<T>()) }
    }
}

impl<T: Copy> core::ops::Deref for Scratch<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `count` entries, written in `new`.
        unsafe { core::slice::from_raw_parts(self.base, self.count) }
    }
}

impl<T: Copy> core::ops::DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; borrowed uniquely.
        unsafe { core::slice::from_raw_parts_mut(self.base, self.count) }
    }
}

impl<T: Copy> Drop for Scratch<T> {
    fn drop(&mut self) {
        // SAFETY: our own mapping; no slice of it outlives us.
        let _ = unsafe { sys!(SYS_munmap, self.base, self.count * size_of::<T>()) };
    }
}

/// Room for the bytes of one round, where they must pass through our hands: more than the smallest stacks have. Some are kept.
pub struct Chunk(*mut u8);

pub const CHUNK_BYTES: usize = 16 << 10;

static KEPT: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];

impl Chunk {
    pub fn take() -> Option<Chunk> {
        // ORDER: Acquire; pairs with `give_back`: who had it before has done with it.
        let kept =
            KEPT.iter().map(|place| place.swap(0, Ordering::Acquire)).find(|kept| *kept != 0);
        let base = match kept {
            Some(kept) => Ok(kept as *mut u8),
            None => map(CHUNK_BYTES, READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        base.ok().map(Chunk)
    }

    /// Of `CHUNK_BYTES`, initialised.
    pub fn base(&self) -> *mut u8 {
        self.0
    }

    /// In place of the drop, for a thread that is cancelled.
    pub fn give_back(&self) {
        // ORDER: Release; see `take`.
        let keep = |place: &AtomicUsize| {
            place.compare_exchange(0, self.0 as usize, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        if !KEPT.iter().any(keep) {
            // SAFETY: our own mapping, which nobody uses any more.
            let _ = unsafe { sys!(SYS_munmap, self.0, CHUNK_BYTES) };
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.give_back();
    }
}
