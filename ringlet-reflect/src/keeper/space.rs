//! The memory of regions and locks, as a keeper has it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use ringlet_core::reflect::LockWord;
use ringlet_core::sync::Ordering;

use crate::PAGE_BYTES;
use crate::memory::{self, Mapping};
use crate::status::Status;

pub struct Memory {
    pub data: OwnedFd,
    /// What is written where there is no loopback, which nobody on this host reads.
    apart: Option<OwnedFd>,
    /// Of each page: how often somebody was told of writes, and how many wish to be.
    changes: OwnedFd,
    wishes: OwnedFd,
    pub wished: Mapping,
    /// In a cluster the keeper alone writes: the data, and what has changed.
    pub written: Option<(Mapping, Mapping)>,
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
        let words = memory::words_bytes(bytes / PAGE_BYTES);
        let (wishes, changes) = (memory::make(words)?, memory::make(words)?);
        let data = memory::make(bytes)?;
        Ok(Memory {
            written: match is_written {
                true => {
                    Some((memory::map(&data, bytes, true)?, memory::map(&changes, words, true)?))
                }
                false => None,
            },
            data,
            apart: None,
            changes,
            wished: memory::map(&wishes, words, true)?,
            wishes,
        })
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

    pub fn given_to_receive(&self) -> Result<Vec<OwnedFd>, Status> {
        Ok(vec![memory::to_read(&self.data)?.into(), memory::to_read(&self.changes)?.into()])
    }
}

/// Wishes of one region, or of all, that a process has no longer.
pub fn forget(
    memories: &BTreeMap<u32, Memory>,
    watches: &mut BTreeMap<(u32, u32), u32>,
    only: Option<u32>,
) {
    watches.retain(|(id, page), count| {
        let is_it = only.is_none_or(|only| only == *id);
        if let (true, Some(memory)) = (is_it, memories.get(id)) {
            memory.wished.word(*page as usize).fetch_sub(*count, Ordering::SeqCst);
        }
        !is_it
    });
}
