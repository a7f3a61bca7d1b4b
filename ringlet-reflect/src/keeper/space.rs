//! The memory of regions and locks, as a keeper has it.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};

use ringlet_core::reflect::LockWord;
use ringlet_core::sync::Ordering;
use ringlet_linux::map;
use rustix::fs::{SeekFrom, seek};

use super::cluster::put_into;
use crate::PAGE_BYTES;
use crate::memory::{self, Mapping};
use crate::room;
use crate::status::Status;

pub struct Memory {
    pub data: OwnedFd,
    /// What is written where there is no loopback, which nobody on this host reads.
    apart: Option<OwnedFd>,
    /// Of each page: how often somebody was told of writes, and how many wish to be.
    changes: OwnedFd,
    wishes: OwnedFd,
    pub wished: Mapping,
    /// Pages of which anybody wishes to be told.
    pub watched: u32,
    /// In a cluster the keeper alone writes: the data, and what has changed.
    pub written: Option<(Mapping, Mapping)>,
    common: Common,
}

/// In a cluster, of a coherent region: what was written to all hosts, which is what a late-comer is given.
enum Common {
    /// As it is received here.
    Received,
    /// This host does not receive all of that, since it has no loopback, or more, which was for it alone.
    Apart(Apart),
    Unknown,
}

/// What was written to all hosts, where it is not what is received here. A page is copied when either is written to for the first time: nobody waits for
/// a copy of all of a region.
struct Apart {
    memory: OwnedFd,
    data: Mapping,
    /// A bit for each page that lies here. All others are as they are received.
    has: Vec<u64>,
}

impl Apart {
    fn new(bytes: usize) -> Option<Apart> {
        // (All of it may be needed.)
        if bytes as u64 > room::left() {
            return None;
        }
        let memory = memory::make(bytes).ok()?;
        let data = memory::map_sparse(&memory, bytes, true).ok()?;
        Some(Apart { memory, data, has: vec![0; (bytes / PAGE_BYTES).div_ceil(64)] })
    }

    fn has(&self, page: usize) -> bool {
        self.has[page / 64] >> (page % 64) & 1 != 0
    }

    /// These bytes are to be written to, here or in what is received.
    fn preserve(&mut self, received: &Mapping, at: usize, bytes: usize) {
        for page in at / PAGE_BYTES..(at + bytes).div_ceil(PAGE_BYTES) {
            if self.has(page) {
                continue;
            }
            let at = page * PAGE_BYTES;
            // SAFETY: a page of both mappings, which are as large; only this thread writes to them.
            #[allow(unsafe_code)]
            unsafe {
                let (from, to) = (received.area().base().add(at), self.data.area().base().add(at));
                std::ptr::copy_nonoverlapping(from, to, PAGE_BYTES);
            }
            self.has[page / 64] |= 1 << (page % 64);
        }
    }
}

/// What became of what was written to all hosts.
pub enum Parted {
    Already,
    Now,
    /// There is no memory for it: others have it.
    Failed,
}

pub struct Words {
    pub memory: OwnedFd,
    pub words: Mapping,
}

impl Words {
    pub fn new(count: usize) -> Result<Words, Status> {
        let bytes = memory::words_bytes(count);
        let memory = memory::make(bytes)?;
        Ok(Words { words: memory::map(&memory, bytes, true)?, memory })
    }

    pub fn lock(&self, lock: usize) -> &LockWord {
        self.words.area().at(lock * size_of::<u32>())
    }
}

impl Memory {
    pub fn make(bytes: usize, is_written: bool) -> Result<Memory, Status> {
        // (All hosts may write there; the keeper would be ended at a store for what there is no room for.)
        if is_written && bytes as u64 > room::left() {
            return Err(Status::NoMemory);
        }
        let words = memory::words_bytes(bytes / PAGE_BYTES);
        let (wishes, changes) = (memory::make(words)?, memory::make(words)?);
        let data = memory::make(bytes)?;
        Ok(Memory {
            written: match is_written {
                true => Some((
                    memory::map_sparse(&data, bytes, true)?,
                    memory::map(&changes, words, true)?,
                )),
                false => None,
            },
            data,
            apart: None,
            changes,
            wished: memory::map(&wishes, words, true)?,
            wishes,
            watched: 0,
            common: Common::Received,
        })
    }

    /// Is what was written to all hosts known here?
    pub fn has_common(&self) -> bool {
        self.written.is_some() && !matches!(self.common, Common::Unknown)
    }

    /// From where on anything was ever written to all hosts. (Where nothing was there is no memory.)
    pub fn next_common(&self, from: u64) -> Option<u64> {
        let next = |memory: &OwnedFd| seek(memory, SeekFrom::Data(from)).ok();
        match &self.common {
            Common::Received => next(&self.data),
            Common::Apart(apart) => next(&self.data).into_iter().chain(next(&apart.memory)).min(),
            Common::Unknown => None,
        }
    }

    /// What was written there to all hosts. None if it is not known, or there is no such place.
    pub fn copy_common(&self, at: usize, bytes: usize) -> Option<Vec<u8>> {
        let (received, _) = self.written.as_ref()?;
        let end = at.checked_add(bytes).filter(|end| *end <= received.area().len())?;
        let (mut copied, mut at) = (Vec::with_capacity(bytes), at);
        while at < end {
            let page = at / PAGE_BYTES;
            let next = ((page + 1) * PAGE_BYTES).min(end);
            let from = match &self.common {
                Common::Received => received,
                Common::Apart(apart) if apart.has(page) => &apart.data,
                Common::Apart(_) => received,
                Common::Unknown => return None,
            };
            // SAFETY: a part of both mappings, which only this thread writes to.
            #[allow(unsafe_code)]
            let part = unsafe {
                std::slice::from_raw_parts(from.area().base().add(at).cast_const(), next - at)
            };
            copied.extend_from_slice(part);
            at = next;
        }
        Some(copied)
    }

    /// What comes now is received here and not everywhere, or everywhere else.
    pub fn part(&mut self) -> Parted {
        if !matches!(self.common, Common::Received) {
            return Parted::Already;
        }
        let bytes = self.written.as_ref().map(|(data, _)| data.area().len());
        let (common, parted) = match bytes.and_then(Apart::new) {
            Some(apart) => (Common::Apart(apart), Parted::Now),
            None => (Common::Unknown, Parted::Failed),
        };
        self.common = common;
        parted
    }

    /// Writes to what is received here. None if there is no such place.
    pub fn put(&mut self, at: u64, bytes: &[u8], most: u64) -> Option<()> {
        let (data, _) = self.written.as_ref()?;
        let whole = (data.area().len() as u64).min(most);
        at.checked_add(bytes.len() as u64).filter(|end| *end <= whole)?;
        if let Common::Apart(apart) = &mut self.common {
            apart.preserve(data, at as usize, bytes.len());
        }
        put_into(data, at, bytes)
    }

    /// Writes to what all hosts have, where that lies apart.
    pub fn put_apart(&mut self, at: u64, bytes: &[u8]) -> Option<()> {
        let (received, _) = self.written.as_ref()?;
        let Common::Apart(apart) = &mut self.common else { return None };
        let whole = apart.data.area().len() as u64;
        at.checked_add(bytes.len() as u64).filter(|end| *end <= whole)?;
        apart.preserve(received, at as usize, bytes.len());
        put_into(&apart.data, at, bytes)
    }

    /// Nobody here needs it any more.
    pub fn let_go(self) {
        let common = match &self.common {
            Common::Apart(apart) => Some(&apart.memory),
            _ => None,
        };
        let all = [Some(&self.data), self.apart.as_ref(), common].into_iter().flatten();
        let held = all.map(|memory| map::held_bytes(memory.as_raw_fd()).unwrap_or(u64::MAX));
        let bytes = held.fold(0, u64::saturating_add);
        memory::let_go(self, usize::try_from(bytes).unwrap_or(usize::MAX));
    }

    pub fn wish(&mut self, page: u32, more: u32) {
        // ORDER: SeqCst, pairs with the fence of `Mapped::before_look` where a writer has no barriers.
        let had = self.wished.word(page as usize).fetch_add(more, Ordering::SeqCst);
        self.watched += u32::from(had == 0);
    }

    pub fn forget(&mut self, page: u32, fewer: u32) {
        // ORDER: SeqCst, as in `wish`.
        let had = self.wished.word(page as usize).fetch_sub(fewer, Ordering::SeqCst);
        self.watched -= u32::from(had == fewer);
    }

    pub fn given_to_transmit(
        &mut self,
        bytes: usize,
        loopback: bool,
    ) -> Result<Vec<OwnedFd>, Status> {
        if !loopback && self.apart.is_none() {
            self.apart = Some(memory::make(bytes)?);
        }
        let written = if loopback { &self.data } else { self.apart.as_ref().unwrap_or(&self.data) };
        let copy = |memory: &OwnedFd| memory.try_clone().map_err(|_| Status::NoMemory);
        Ok(vec![copy(written)?, copy(&self.changes)?, memory::to_read(&self.wishes)?.into()])
    }

    /// To who looks from outside: what those who write now see themselves, or what nobody here does.
    pub fn given_to_see(&self, loopback: bool) -> Result<Vec<OwnedFd>, Status> {
        let written = self.apart.as_ref().filter(|_| !loopback).unwrap_or(&self.data);
        Ok(vec![memory::to_read(written)?.into(), memory::to_read(&self.changes)?.into()])
    }

    pub fn given_to_receive(&self) -> Result<Vec<OwnedFd>, Status> {
        Ok(vec![memory::to_read(&self.data)?.into(), memory::to_read(&self.changes)?.into()])
    }
}

/// Wishes of one region, or of all, that a process has no longer.
pub fn forget(
    memories: &mut BTreeMap<u32, Memory>,
    watches: &mut BTreeMap<(u32, u32), u32>,
    only: Option<u32>,
) {
    watches.retain(|(id, page), count| {
        let is_it = only.is_none_or(|only| only == *id);
        if let (true, Some(memory)) = (is_it, memories.get_mut(id)) {
            memory.forget(*page, *count);
        }
        !is_it
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What lies apart of a region is what is written to, and not all of it at once, for which the others would have to wait.
    #[test]
    fn a_region_lies_apart_by_the_page() {
        const PAGES: usize = 1024;
        let mut memory = Memory::make(PAGES * PAGE_BYTES, true).unwrap();
        let whole = (PAGES * PAGE_BYTES) as u64;
        let mut common = vec![1; PAGES * PAGE_BYTES];
        memory.put(0, &common, whole).unwrap();
        assert!(matches!(memory.part(), Parted::Now));
        assert!(matches!(memory.part(), Parted::Already));
        let held = |memory: &Memory| match &memory.common {
            Common::Apart(apart) => map::held_bytes(apart.memory.as_raw_fd()).unwrap(),
            _ => panic!("it does not lie apart"),
        };
        assert_eq!(held(&memory), 0, "nothing was written to since");
        // For this host alone; for the others alone; for all; for this host where others have written, and the other way round.
        let page = |page: usize| (page * PAGE_BYTES) as u64;
        memory.put(page(10) - 3, &[2; 6], whole).unwrap();
        memory.put_apart(page(20) - 3, &[3; 6]).unwrap();
        memory.put(page(30) - 3, &[4; 6], whole).unwrap();
        memory.put_apart(page(30) - 3, &[4; 6]).unwrap();
        memory.put(page(20) + 1, &[5; 6], whole).unwrap();
        memory.put_apart(page(10) + 1, &[6; 6]).unwrap();
        assert_eq!(memory.put(whole - 1, &[7; 2], u64::MAX), None);
        assert_eq!(memory.put_apart(whole - 1, &[7; 2]), None);
        let mut put = |at: u64, byte: u8| common[at as usize..][..6].fill(byte);
        put(page(20) - 3, 3);
        put(page(30) - 3, 4);
        put(page(10) + 1, 6);
        assert_eq!(held(&memory), page(6), "what was written to");
        assert_eq!(memory.next_common(5), Some(5));
        for (at, bytes) in [(0, PAGES * PAGE_BYTES), (10 * PAGE_BYTES - 1, 2), (7, 5000)] {
            assert!(memory.copy_common(at, bytes).unwrap() == common[at..at + bytes]);
        }
        assert_eq!(memory.copy_common(whole as usize - 1, 2), None);
        let mut here = vec![0; common.len()];
        memory::read(&memory.data, &mut here, 0).unwrap();
        let ours = [(page(10) - 3, 2), (page(30) - 3, 4), (page(20) + 1, 5)];
        let mut expected = vec![1; here.len()];
        ours.iter().for_each(|(at, byte)| expected[*at as usize..][..6].fill(*byte));
        assert!(here == expected);
    }

    /// Of what nobody has written to there is nothing to tell.
    #[test]
    fn where_nothing_was_written_there_is_nothing_in_common() {
        const BYTES: usize = 64 * PAGE_BYTES;
        let mut memory = Memory::make(BYTES, true).unwrap();
        memory.part();
        assert_eq!(memory.next_common(0), None);
        memory.put_apart(9 * PAGE_BYTES as u64, &[1]).unwrap();
        assert_eq!(memory.next_common(0), Some(9 * PAGE_BYTES as u64));
        memory.put(5 * PAGE_BYTES as u64, &[1], BYTES as u64).unwrap();
        assert_eq!(memory.next_common(0), Some(5 * PAGE_BYTES as u64));
        assert_eq!(memory.copy_common(5 * PAGE_BYTES, 1), Some(vec![0]), "it is not everybody's");
    }
}
