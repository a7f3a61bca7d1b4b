//! The symmetric heap's allocator. Each PE has its own, of offsets, and all are asked the same in the same order: so they answer the same.

use std::collections::BTreeMap;

/// No two allocations share a cache line.
const UNIT: usize = 64;

pub struct Heap {
    /// By offset, how long.
    free: BTreeMap<usize, usize>,
    used: BTreeMap<usize, usize>,
}

impl Heap {
    pub fn new(bytes: usize) -> Heap {
        Heap { free: BTreeMap::from([(0, bytes)]), used: BTreeMap::new() }
    }

    /// The first place that is large enough. (`align` is a power of two.)
    pub fn allocate(&mut self, bytes: usize, align: usize) -> Option<usize> {
        let bytes = bytes.max(1).checked_next_multiple_of(UNIT)?;
        let align = align.max(UNIT);
        let (begin, length, start) = self.free.iter().find_map(|(&begin, &length)| {
            let start = begin.checked_next_multiple_of(align)?;
            let fits = start.checked_add(bytes)? <= begin + length;
            fits.then_some((begin, length, start))
        })?;
        self.free.remove(&begin);
        for (from, to) in [(begin, start), (start + bytes, begin + length)] {
            if from < to {
                self.free.insert(from, to - from);
            }
        }
        self.used.insert(start, bytes);
        Some(start)
    }

    /// How long an allocation is.
    pub fn length(&self, at: usize) -> Option<usize> {
        self.used.get(&at).copied()
    }

    /// False: there is no such allocation.
    pub fn free(&mut self, at: usize) -> bool {
        let Some(length) = self.used.remove(&at) else { return false };
        let (mut begin, mut end) = (at, at + length);
        if let Some((&before, &length)) = self.free.range(..begin).next_back()
            && before + length == begin
        {
            self.free.remove(&before);
            begin = before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        self.free.insert(begin, end - begin);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_freed_is_one_piece_again() {
        let mut heap = Heap::new(1 << 16);
        let places: Vec<usize> = (0..64).map(|n| heap.allocate(n * 8, 1).unwrap()).collect();
        assert!(places.windows(2).all(|pair| pair[0] < pair[1]));
        let aligned = heap.allocate(10, 4096).unwrap();
        assert_eq!(aligned % 4096, 0);
        assert_eq!(heap.length(aligned), Some(UNIT));
        for at in places.iter().step_by(2).chain(places.iter().skip(1).step_by(2)).chain([&aligned])
        {
            assert!(heap.free(*at));
            assert!(!heap.free(*at));
        }
        assert_eq!(heap.allocate(1 << 16, 1), Some(0));
        assert_eq!(heap.allocate(1, 1), None);
        assert!(heap.free(0));
        assert_eq!(heap.allocate((1 << 16) + 1, 1), None);
        assert_eq!(heap.allocate(usize::MAX, 1), None);
        assert_eq!(heap.allocate(1, 1 << 63), Some(0));
    }
}
