//! A set of PEs that do something together: a team, or an active set of the older interface. All PEs' memory is mapped, so what is collective is a
//! sync (everybody's sources are ready), copies from others' memory, and a sync (sources may be used again).

use ringlet_core::sync::{AtomicU64, Ordering, fence};

use crate::job::{Job, PES_MOST, give_up, word};
use crate::wait::{place, wait};

/// Of each PE: as many teams as it may be in at a time.
pub const SLOTS: usize = VALUE_BITS as usize;

/// What a team's PEs meet by, each on its own: `Words`.
#[repr(C, align(128))]
pub struct Slot {
    word: Line,
    /// The same of those that become a new team, while the old one's is in use.
    split: Line,
}

#[repr(C, align(64))]
struct Line(AtomicU64);

/// One word at the same place of each PE, which is 0 between two uses, as the standard wants it of a program's pSync: whether this PE may go on,
/// how many have arrived (in the first one's), and a value to be shown.
#[derive(Clone, Copy)]
struct Words {
    of_first: *mut u8,
    /// How far apart two PEs' are.
    apart: usize,
}

const GO: u64 = 1 << 63;
const VALUE_BITS: u32 = 48;
const VALUE: u64 = (1 << VALUE_BITS) - 1;
const ONE: u64 = 1 << VALUE_BITS;
/// (The count has room for all.)
const _: () = assert!(PES_MOST < 1 << (63 - VALUE_BITS));

impl Words {
    fn at(&self, pe: usize) -> &AtomicU64 {
        // SAFETY: of a PE of the job: whoever made this has looked.
        word(unsafe { self.of_first.add(self.apart * pe) })
    }
}

#[derive(Clone, Copy)]
pub struct Group<'a> {
    job: &'a Job,
    start: usize,
    /// (It may be negative.)
    stride: isize,
    pub size: usize,
    words: Words,
}

impl<'a> Group<'a> {
    /// PEs that have this slot for it; `split` 1: its other words.
    pub fn of_slot(
        job: &'a Job,
        start: usize,
        stride: isize,
        size: usize,
        slot: usize,
        split: usize,
    ) -> Group<'a> {
        let slot = (&raw const job.control(0).slots[slot]).cast::<u8>().cast_mut();
        // SAFETY: within the slot.
        let of_first = unsafe { slot.add(split * size_of::<Line>()) };
        let words = Words { of_first, apart: job.controls_apart() };
        Group { job, start, stride, size, words }
    }

    /// An active set, which meets at the program's pSync. `None`: it makes no sense.
    pub fn of_active_set(
        job: &'a Job,
        start: i32,
        stride: isize,
        size: i32,
        sync: *mut i64,
    ) -> Option<Group<'a>> {
        let (start, size) = (usize::try_from(start).ok()?, usize::try_from(size).ok()?);
        let of_first = job.find(sync.cast(), size_of::<u64>(), 0)?;
        let words = Words { of_first, apart: job.parts_apart() };
        let group = Group { job, start, stride, size, words };
        let is_there =
            size > 0 && of_first.cast::<AtomicU64>().is_aligned() && group.is_within(job.size);
        (is_there && group.rank(job.me).is_some()).then_some(group)
    }

    /// The subset of its members, in their numbers here.
    pub fn part(&self, start: i32, stride: i32, size: i32) -> Option<(usize, isize, usize)> {
        let (first, size) = (usize::try_from(start).ok()?, usize::try_from(size).ok()?);
        let last = (size as isize)
            .checked_sub(1)?
            .checked_mul(stride as isize)?
            .checked_add(first as isize)?;
        let is_within = |number: isize| (0..self.size as isize).contains(&number);
        let is_sound =
            size > 0 && is_within(first as isize) && is_within(last) && (stride != 0 || size == 1);
        is_sound.then(|| (self.pe(first), self.stride * stride as isize, size))
    }

    fn is_within(&self, pes: usize) -> bool {
        let last = self.start as i128 + self.stride as i128 * (self.size as i128 - 1);
        self.start < pes && (0..pes as i128).contains(&last) && (self.stride != 0 || self.size == 1)
    }

    /// A member's PE.
    pub fn pe(&self, rank: usize) -> usize {
        (self.start as isize + self.stride * rank as isize) as usize
    }

    /// A PE's number in it.
    pub fn rank(&self, pe: usize) -> Option<usize> {
        let from = pe as isize - self.start as isize;
        let rank = if from == 0 { 0 } else { from.checked_div(self.stride)? };
        (rank >= 0 && rank * self.stride == from && (rank as usize) < self.size)
            .then_some(rank as usize)
    }

    fn pes(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.size).map(|rank| self.pe(rank))
    }

    /// Until all of them are here. What each of them stored before is seen by all behind it.
    pub fn sync(&self) {
        let (job, me) = (self.job, self.job.me);
        if self.size == 1 {
            return;
        }
        let first = self.words.at(self.start);
        // ORDER: AcqRel: the last one sees what all stored before theirs, and passes it on by `GO`.
        let before = first.fetch_add(ONE, Ordering::AcqRel);
        if (before & !GO) / ONE + 1 == self.size as u64 {
            // (Nobody arrives anew before he may go on, and has said that he does.)
            first.fetch_sub(ONE * self.size as u64, Ordering::Relaxed);
            for pe in self.pes().filter(|pe| *pe != me) {
                // ORDER: Release, pairs with Acquire of the wait in `sync`.
                let theirs = self.words.at(pe);
                theirs.fetch_or(GO, Ordering::Release);
                job.ring(pe, theirs, size_of_val(theirs));
            }
        } else {
            let ours = self.words.at(me);
            // ORDER: Acquire, pairs with Release of `fetch_or` in `sync`.
            wait(job, place(ours), || ours.load(Ordering::Acquire) & GO != 0);
            ours.fetch_and(!GO, Ordering::Relaxed);
        }
        // ORDER: as `Job::quiet`.
        fence(Ordering::SeqCst);
    }

    /// Shows a value of 48 bits to all of them, and lets `look` see theirs by their numbers, until which nobody goes on.
    pub fn exchange<T>(&self, value: u64, look: impl FnOnce(&dyn Fn(usize) -> u64) -> T) -> T {
        let ours = self.words.at(self.job.me);
        let value = value & VALUE;
        // ORDER: Relaxed: seen by all behind the sync.
        ours.fetch_add(value, Ordering::Relaxed);
        self.sync();
        let seen = look(&|rank| self.words.at(self.pe(rank)).load(Ordering::Relaxed) & VALUE);
        self.sync();
        ours.fetch_sub(value, Ordering::Relaxed);
        seen
    }

    /// `bytes` at `address` as the member `rank` has it.
    fn remote(&self, address: *const u8, bytes: usize, rank: usize) -> *mut u8 {
        self.job.remote(address, bytes, self.pe(rank))
    }

    fn me(&self) -> usize {
        self.rank(self.job.me).unwrap_or(0)
    }

    pub fn broadcast(
        &self,
        dest: *mut u8,
        source: *const u8,
        bytes: usize,
        root: usize,
        to_root: bool,
    ) {
        if root >= self.size {
            give_up(format_args!("a broadcast's root is {}, of {}", root as isize, self.size));
        }
        self.sync();
        if to_root || self.me() != root {
            // (May be the same place.)
            copy(self.remote(source, bytes, root), dest, bytes);
        }
        self.sync();
    }

    /// The bytes of each, one behind the other. (They may be of different lengths.)
    pub fn collect(&self, dest: *mut u8, source: *const u8, bytes: usize) {
        if bytes as u64 > VALUE {
            give_up(format_args!("{bytes} bytes to be collected are too many"));
        }
        self.exchange(bytes as u64, |length| {
            let mut to = dest;
            for rank in 0..self.size {
                let bytes = length(rank) as usize;
                copy(self.remote(source, bytes, rank), to, bytes);
                to = to.wrapping_add(bytes);
            }
        });
    }

    /// The same where all are of one length.
    pub fn collect_alike(&self, dest: *mut u8, source: *const u8, bytes: usize) {
        self.sync();
        for rank in 0..self.size {
            copy(self.remote(source, bytes, rank), dest.wrapping_add(rank * bytes), bytes);
        }
        self.sync();
    }

    /// From each member's source the part that is for us: `count` elements of so many bytes, each `apart` elements apart (there, and in `dest`).
    pub fn all_to_all(
        &self,
        dest: *mut u8,
        source: *const u8,
        bytes: usize,
        count: usize,
        apart: (usize, usize),
    ) {
        let (to_apart, from_apart) = apart;
        let me = self.me();
        let all = bytes.checked_mul(count).and_then(|each| each.checked_mul(self.size));
        if all.is_none_or(|all| all > isize::MAX as usize) {
            give_up(format_args!("{count} elements for each of {} PEs are too many", self.size));
        }
        self.sync();
        for rank in 0..self.size {
            let mut from = source.wrapping_add(me * count * from_apart * bytes);
            let mut to = dest.wrapping_add(rank * count * to_apart * bytes);
            if (to_apart, from_apart) == (1, 1) {
                copy(self.remote(from, bytes * count, rank), to, bytes * count);
                continue;
            }
            for _ in 0..count {
                copy(self.remote(from, bytes, rank), to, bytes);
                from = from.wrapping_add(from_apart * bytes);
                to = to.wrapping_add(to_apart * bytes);
            }
        }
        self.sync();
    }

    /// All members' sources, combined element by element in the order of their numbers, in each one's `dest` (which may be the source). Each member
    /// does a part of the elements for all: so all have the same, bit by bit.
    pub fn reduce(
        &self,
        dest: *mut u8,
        source: *const u8,
        bytes: usize,
        count: usize,
        combine: Combine,
    ) {
        /// Elements of 16 bytes, aligned as any.
        #[repr(C, align(64))]
        struct Block([u8; BLOCK_BYTES]);
        const BLOCK_BYTES: usize = 4096;
        /// A cache line is no two members' to write.
        const LINE: usize = 64;
        self.sync();
        let each = count.div_ceil(self.size).next_multiple_of(LINE / bytes);
        let end = count.min((self.me() + 1) * each);
        let mut begin = (self.me() * each).min(end);
        let mut block = Block([0; BLOCK_BYTES]);
        let sum = block.0.as_mut_ptr();
        while begin < end {
            let n = (end - begin).min(BLOCK_BYTES / bytes);
            let from = source.wrapping_add(begin * bytes);
            copy(self.remote(from, n * bytes, 0), sum, n * bytes);
            for rank in 1..self.size {
                combine(sum, self.remote(from, n * bytes, rank), n);
            }
            for rank in 0..self.size {
                copy(
                    sum,
                    self.remote(dest.wrapping_add(begin * bytes), n * bytes, rank),
                    n * bytes,
                );
            }
            begin += n;
        }
        self.sync();
    }
}

/// So many elements of the second into the first.
pub type Combine = extern "C" fn(*mut u8, *const u8, usize);

/// Of memory that the program vouches for, or `Job::remote`. The two may be the same.
#[inline]
pub fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: as the program says of its own, and `Job::remote` of others'.
    unsafe { std::ptr::copy(from, to, bytes) };
}
