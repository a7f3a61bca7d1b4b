//! Memory that the processes of a family (a parent and its children by fork) share: no more than the connections that they share.
//!
//! Ends (and mailboxes, inlets) lie in chunks. What is mapped when a process forks is shared with the child for good, so a fork *seals*
//! every chunk that there is: what comes later lies in chunks mapped since, which no other process has. A sealed chunk is mapped anew
//! once nothing of it is in use here; the others of the family keep theirs. Which places are in use is known to this process alone, so
//! nobody can falsify it.

use crate::plain::P32;
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::map::{self, Table, Zeroed};
use ringlet_linux::sys::Sys;

/// Entries of a chunk; with entries of whole 128 bytes these are whole pages.
const CHUNK_COUNT: usize = 32;
/// What is known of so many of them lies with the small tables (`map::Table`).
const NEAR_CHUNK_COUNT: usize = 8;
const PAGE_BYTES: usize = 4096;
const ALL: u32 = u32::MAX;

/// What this process knows of a chunk.
#[derive(Default)]
pub struct Chunk {
    /// A bit for each entry in use; all of them while the chunk is being mapped anew.
    used: AtomicU32,
    /// The age (`Pool::take`) in which it was mapped.
    age: P32,
}

// SAFETY: atomics only; zero is a chunk of age 0 with nothing in use.
#[allow(unsafe_code)]
unsafe impl Zeroed for Chunk {}

/// Entries handed out one by one. The *age* counts the forks of this process and those it comes from: a chunk of the present age is this
/// process's alone.
pub struct Pool<T: Zeroed + 'static> {
    entries: &'static [T],
    chunks: Table<Chunk>,
    /// Private: where the last entry was taken or given back, the age of the youngest chunk, and that of all of them, plus one.
    hint: &'static [P32],
}

// SAFETY: as for `Chunk`.
#[allow(unsafe_code)]
unsafe impl Zeroed for P32 {}

impl<T: Zeroed> Pool<T> {
    const WHOLE_PAGES: () = assert!((size_of::<T>() * CHUNK_COUNT).is_multiple_of(PAGE_BYTES));

    /// For so many entries, of which the first is never handed out.
    pub fn map(count: usize) -> Sys<Pool<T>> {
        let () = Self::WHOLE_PAGES;
        let pool = Pool {
            entries: map::family_table(count / CHUNK_COUNT * CHUNK_COUNT)?,
            chunks: Table::map(NEAR_CHUNK_COUNT, count / CHUNK_COUNT)?,
            hint: map::private_table(3)?,
        };
        pool.chunks.at(0).used.store(1, Ordering::Relaxed);
        Ok(pool)
    }

    /// Any number: one that is none of ours names some other entry.
    #[inline(always)]
    pub fn get(&self, index: u32) -> &'static T {
        &self.entries[index as usize % self.entries.len()]
    }

    /// The chunk of which it is.
    pub fn chunk(&self, index: u32) -> &'static [T] {
        let from = index as usize / CHUNK_COUNT * CHUNK_COUNT;
        &self.entries[from..from + CHUNK_COUNT]
    }

    /// Is it of a chunk that other processes have?
    pub fn is_sealed(&self, index: u32, age: u32) -> bool {
        self.chunks.at(index as usize / CHUNK_COUNT).age.get() != age
    }

    /// An entry that nobody else has; what it holds is of its last user, or zero. Without a lock, so that a signal handler can't be stuck.
    pub fn take(&self, age: u32) -> Option<u32> {
        let (hint, youngest) = (&self.hint[0], &self.hint[1]);
        let places = || {
            let from = hint.get() as usize % self.chunks.len();
            (from..self.chunks.len()).chain(0..from)
        };
        let found = if youngest.get() == age {
            places().find_map(|at| self.take_from(at, age))
        } else {
            None
        };
        let index = found.or_else(|| {
            let index = places().find_map(|at| self.renew(at, age))?;
            youngest.set(age);
            Some(index)
        })?;
        hint.set(index / CHUNK_COUNT as u32);
        Some(index)
    }

    fn take_from(&self, at: usize, age: u32) -> Option<u32> {
        let chunk = self.chunks.at(at);
        let mut used = chunk.used.load(Ordering::Relaxed);
        while used != ALL && chunk.age.get() == age {
            let free = used.trailing_ones();
            // ORDER: AcqRel; pairs with `give`.
            match chunk.used.compare_exchange(
                used,
                used | 1 << free,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some((at * CHUNK_COUNT) as u32 + free),
                Err(now) => used = now,
            }
        }
        None
    }

    /// Maps a sealed chunk anew, if nothing of it is in use.
    fn renew(&self, at: usize, age: u32) -> Option<u32> {
        let first = u32::from(at == 0);
        if !self.claim(at, age) || !self.map_anew(at, at + 1, age, first | 1 << first) {
            return None;
        }
        Some((at * CHUNK_COUNT) as u32 + first)
    }

    /// True: a sealed chunk of which nothing is in use, and the caller maps it anew.
    fn claim(&self, at: usize, age: u32) -> bool {
        let chunk = self.chunks.at(at);
        let none = u32::from(at == 0);
        // ORDER: AcqRel; pairs with `give`.
        chunk.age.get() != age
            && chunk.used.compare_exchange(none, ALL, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Maps claimed chunks anew; `used` is what is in use of them then.
    fn map_anew(&self, from: usize, to: usize, age: u32, used: u32) -> bool {
        let entries = &self.entries[from * CHUNK_COUNT..to * CHUNK_COUNT];
        // Whoever still looks at an entry that was given back finds zeros: it is nobody's, and a lock is freed by its owner only.
        let mapped = map::map_anew(entries).is_ok();
        for (chunk, at) in self.chunks.entries(from..to).zip(from..) {
            if mapped {
                chunk.age.set(age);
            }
            // ORDER: Release; pairs with `take_from`: the age is there with it.
            chunk.used.store(u32::from(at == 0) | if mapped { used } else { 0 }, Ordering::Release);
        }
        mapped
    }

    /// This process uses the entry no more.
    pub fn give(&self, index: u32) {
        let chunk = self.chunks.at(index as usize / CHUNK_COUNT);
        // ORDER: AcqRel; pairs with `take_from` and `claim`.
        chunk.used.fetch_and(!(1 << (index as usize % CHUNK_COUNT)), Ordering::AcqRel);
        self.hint[0].set(index / CHUNK_COUNT as u32);
    }

    /// Maps all anew that others have and this process does not use.
    pub fn part(&self, age: u32) {
        // Some programs change their user for each request.
        if self.hint[2].get() == age + 1 {
            return;
        }
        let mut from = 0;
        while from < self.chunks.len() {
            let to = (from..self.chunks.len()).find(|&at| !self.claim(at, age));
            let to = to.unwrap_or(self.chunks.len());
            if to > from {
                self.map_anew(from, to, age, 0);
            }
            from = to + 1;
        }
        self.hint[1].set(age);
        if self.chunks.entries(0..self.chunks.len()).all(|chunk| chunk.age.get() == age) {
            self.hint[2].set(age + 1);
        }
    }

    /// For entries that go along with those of another pool, by the same numbers: what belongs to this one, just taken there, is this
    /// process's alone too. False if it can't be now.
    pub fn go_along(&self, index: u32, age: u32) -> bool {
        let at = index as usize / CHUNK_COUNT;
        self.claim(at, age) && self.map_anew(at, at + 1, age, 0) || !self.is_sealed(index, age)
    }

    /// The number of an entry.
    pub fn index_of(&self, entry: &T) -> u32 {
        ((entry as *const T as usize - self.entries.as_ptr() as usize) / size_of::<T>()) as u32
    }
}
