//! How much is written to a region, seen from outside. Stores go past everybody, so nobody counts them; who wants to know compares the memory with
//! what it was, page by page, as long as he looks, and pays for it himself. A writer has a cache line fetched again at most.

use std::hash::Hasher;
use std::os::fd::OwnedFd;

use crate::PAGE_BYTES;
use crate::memory;
use crate::status::Status;

/// Compares at a time.
pub struct Sampler {
    data: OwnedFd,
    changes: OwnedFd,
    pages: u64,
    /// Each page of that number is looked at.
    stride: u64,
    /// Of each of those, what it was.
    seen: Vec<u64>,
    told: Vec<u32>,
}

/// What happened between two looks.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Pages that are not as they were. (However often one was written, it is one; what was written as it was is none.)
    pub changed: u64,
    /// Pages that were looked at, of so many.
    pub looked: u64,
    pub pages: u64,
    /// How often it was told (by `notify`) to somebody who had wished it, by page.
    pub told: u64,
}

impl Sampler {
    pub(crate) fn new(
        bytes: u64,
        data: OwnedFd,
        changes: OwnedFd,
        most: u64,
    ) -> Result<Sampler, Status> {
        let pages = bytes / PAGE_BYTES as u64;
        let stride = pages.div_ceil(most.max(1)).max(1);
        let mut sampler =
            Sampler { data, changes, pages, stride, seen: Vec::new(), told: Vec::new() };
        (sampler.seen, sampler.told) = (sampler.read_pages()?, sampler.read_told()?);
        Ok(sampler)
    }

    /// What happened since the last look.
    pub fn look(&mut self) -> Result<Sample, Status> {
        let (now, told) = (self.read_pages()?, self.read_told()?);
        let changed = now.iter().zip(&self.seen).filter(|(now, then)| now != then).count() as u64;
        let more =
            told.iter().zip(&self.told).map(|(now, then)| u64::from(now.wrapping_sub(*then)));
        let sample =
            Sample { changed, looked: now.len() as u64, pages: self.pages, told: more.sum() };
        (self.seen, self.told) = (now, told);
        Ok(sample)
    }

    /// (Read, and not mapped: a page that nobody has written yet gets no memory by that.)
    fn read_pages(&self) -> Result<Vec<u64>, Status> {
        let mut page = [0; PAGE_BYTES];
        let numbers = (0..self.pages).step_by(self.stride as usize);
        numbers
            .map(|number| {
                memory::read(&self.data, &mut page, number * PAGE_BYTES as u64)?;
                let mut hash = std::hash::DefaultHasher::new();
                hash.write(&page);
                Ok(hash.finish())
            })
            .collect()
    }

    fn read_told(&self) -> Result<Vec<u32>, Status> {
        let mut bytes = vec![0; self.pages as usize * size_of::<u32>()];
        memory::read(&self.changes, &mut bytes, 0)?;
        let word = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().unwrap_or_default());
        Ok(bytes.chunks_exact(size_of::<u32>()).map(word).collect())
    }
}
