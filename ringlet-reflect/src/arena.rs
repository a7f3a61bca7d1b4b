//! Memory of payloads that a network can send from where it lies, and what is put together there: a payload of this host's, and a frame of another's,
//! which this one may have to pass on.

use std::sync::{Arc, Mutex, PoisonError};

use ringlet_core::memory::Area;
use ringlet_order::{Bytes, FRAME_BYTES};

use crate::memory::{self, Mapping};
use crate::status::Status;

const ROOM_BYTES: usize = FRAME_BYTES.next_multiple_of(crate::PAGE_BYTES);
/// As many as the long payloads of one node's that are under way take (`WINDOW_BYTES`, each more than half a room). What finds none lies elsewhere.
const ROOMS: usize = 64;

pub struct Arena {
    mapping: Mapping,
    /// The one that was used last is the next: it may be in a cache still.
    free: Mutex<Vec<usize>>,
}

impl Arena {
    pub fn new() -> Result<Arc<Arena>, Status> {
        let bytes = ROOMS * ROOM_BYTES;
        // (A network may map it once more.)
        let mapping = memory::map(&memory::make(bytes)?, bytes, true)?;
        Ok(Arc::new(Arena { mapping, free: Mutex::new((0..ROOMS).collect()) }))
    }

    pub fn area(&self) -> Area {
        self.mapping.area()
    }

    /// Where in it these bytes lie, if they do.
    pub fn place_of(&self, bytes: &[u8]) -> Option<usize> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.area().base() as usize)?;
        (at < self.area().len()).then_some(at)
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a payload or a frame is put together: in a room of an arena's, or anywhere.
pub struct Batch {
    base: *mut u8,
    length: usize,
    owner: Owner,
}

enum Owner {
    Room(Arc<Arena>, usize),
    Heap(#[allow(dead_code)] Vec<u8>),
}

#[allow(unsafe_code)]
// SAFETY: its memory is its own until it is dropped.
unsafe impl Send for Batch {}

impl Batch {
    pub fn new(arena: Option<&Arc<Arena>>) -> Batch {
        let room = arena.and_then(|arena| Some((arena.clone(), arena.free().pop()?)));
        if let Some((arena, room)) = room {
            // SAFETY: a room of the mapping.
            #[allow(unsafe_code)]
            let base = unsafe { arena.area().base().add(room * ROOM_BYTES) };
            return Batch { base, length: 0, owner: Owner::Room(arena, room) };
        }
        let mut heap = Vec::with_capacity(FRAME_BYTES);
        Batch { base: heap.as_mut_ptr(), length: 0, owner: Owner::Heap(heap) }
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub fn clear(&mut self) {
        self.length = 0;
    }

    pub fn put(&mut self, bytes: &[u8]) {
        // SAFETY: a slice.
        #[allow(unsafe_code)]
        unsafe {
            self.put_raw(bytes.as_ptr(), bytes.len());
        }
    }

    /// Panics where it would be more than a frame.
    ///
    /// # Safety
    /// So many bytes can be read there; whatever they are meanwhile, they are bytes.
    #[allow(unsafe_code)]
    pub unsafe fn put_raw(&mut self, from: *const u8, bytes: usize) {
        assert!(bytes <= FRAME_BYTES - self.length, "more than a frame");
        // SAFETY: room for a frame is there, which is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(from, self.base.add(self.length), bytes) };
        self.length += bytes;
    }

    /// As it is from now on.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Batch {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: so many were written, and nobody else writes there.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts(self.base, self.length)
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Owner::Room(arena, room) = &self.owner {
            arena.free().push(*room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_used_again_when_nobody_has_what_is_in_them_and_not_before() {
        let arena = Arena::new().unwrap();
        let full = |byte: u8| {
            let mut batch = Batch::new(Some(&arena));
            batch.put(&vec![byte; FRAME_BYTES - 1]);
            batch.put(&[byte]);
            batch.freeze()
        };
        let payloads: Vec<Bytes> = (0..ROOMS as u8).map(full).collect();
        let places: Vec<_> = payloads.iter().map(|each| arena.place_of(each).unwrap()).collect();
        let beyond = full(99);
        assert_eq!(arena.place_of(&beyond), None);
        let part = payloads[7].slice(100..);
        assert_eq!(arena.place_of(&part), Some(places[7] + 100));
        drop((payloads, beyond));
        let again: Vec<Bytes> = (100..100 + ROOMS as u8).map(full).collect();
        assert_eq!(again.iter().filter(|each| arena.place_of(each).is_none()).count(), 1);
        assert!(part.iter().all(|byte| *byte == 7), "it was used again while somebody has it");
    }
}
