//! The memory of regions and locks, as a keeper has it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use ringlet_core::reflect::LockWord;
use ringlet_core::sync::Ordering;
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
    Apart(OwnedFd, Mapping),
    Unknown,
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

    pub fn common(&self) -> Option<(&OwnedFd, &Mapping)> {
        match &self.common {
            Common::Received => self.written.as_ref().map(|(data, _)| (&self.data, data)),
            Common::Apart(memory, data) => Some((memory, data)),
            Common::Unknown => None,
        }
    }

    /// What comes now is received here and not everywhere, or everywhere else.
    pub fn part(&mut self) -> Parted {
        if !matches!(self.common, Common::Received) {
            return Parted::Already;
        }
        let (common, parted) = match self.copied() {
            Some((memory, data)) => (Common::Apart(memory, data), Parted::Now),
            None => (Common::Unknown, Parted::Failed),
        };
        self.common = common;
        parted
    }

    pub fn put_apart(&self, at: u64, bytes: &[u8]) -> Option<()> {
        match &self.common {
            Common::Apart(_, data) => put_into(data, at, bytes),
            _ => None,
        }
    }

    fn copied(&self) -> Option<(OwnedFd, Mapping)> {
        let (from, _) = self.written.as_ref()?;
        let bytes = from.area().len();
        if bytes as u64 > room::left() {
            return None;
        }
        let memory = memory::make(bytes).ok()?;
        let data = memory::map_sparse(&memory, bytes, true).ok()?;
        let mut end = 0;
        while let Ok(at) = seek(&self.data, SeekFrom::Data(end)) {
            end = seek(&self.data, SeekFrom::Hole(at)).ok()?;
            let (at, length) = (at as usize, (end - at) as usize);
            // SAFETY: a part of both mappings, which are as large as the file; only this thread writes to them.
            #[allow(unsafe_code)]
            unsafe {
                let (from, to) = (from.area().base().add(at), data.area().base().add(at));
                std::ptr::copy_nonoverlapping(from, to, length);
            }
        }
        Some((memory, data))
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
