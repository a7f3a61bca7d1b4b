//! A contiguous piece of the order: what not all members are known to have.

use std::collections::VecDeque;

use bytes::Bytes;

/// What one member may have under way: submitted, and not yet known to be with all.
pub const WINDOW_COUNT: usize = 4096;
pub const WINDOW_BYTES: usize = 2 << 20;

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Usage {
    pub count: usize,
    pub bytes: usize,
}

impl Usage {
    pub fn add(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes += bytes;
    }

    pub fn remove(&mut self, bytes: usize) {
        self.count -= 1;
        self.bytes -= bytes;
    }

    /// Is there room for so many bytes more, in so many windows?
    pub fn fits(&self, bytes: usize, windows: usize) -> bool {
        self.count < windows * WINDOW_COUNT && self.bytes + bytes <= windows * WINDOW_BYTES
    }
}

#[derive(Clone, Debug)]
pub struct Entry {
    /// Its place among the view's members.
    pub origin: u8,
    pub number: u64,
    pub payload: Bytes,
    /// Bytes of all payloads up to this one's end.
    end: u64,
}

#[derive(Debug)]
pub struct Log {
    /// The sequence number before the first entry's, and the bytes before it.
    base: u64,
    base_bytes: u64,
    entries: VecDeque<Entry>,
    /// By origin.
    usage: Vec<Usage>,
}

impl Log {
    pub fn new(base: u64, origins: usize) -> Log {
        Log {
            base,
            base_bytes: 0,
            entries: VecDeque::new(),
            usage: vec![Usage::default(); origins],
        }
    }

    /// Up to here all is there, or was.
    pub fn last(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn usage(&self, origin: usize) -> Usage {
        self.usage[origin]
    }

    pub fn push(&mut self, origin: u8, number: u64, payload: Bytes) {
        self.usage[origin as usize].add(payload.len());
        let end = self.bytes_to(self.last()) + payload.len() as u64;
        self.entries.push_back(Entry { origin, number, payload, end });
    }

    /// What comes behind that one; nothing if it is not there any more.
    pub fn behind(&self, sequence: u64) -> impl Iterator<Item = &Entry> {
        let from = sequence.checked_sub(self.base).map_or(self.entries.len(), |from| from as usize);
        self.entries.range(from.min(self.entries.len())..)
    }

    /// Bytes of all payloads up to that one's end, as far as they are known.
    pub fn bytes_to(&self, sequence: u64) -> u64 {
        match sequence.min(self.last()).checked_sub(self.base + 1) {
            Some(at) => self.entries[at as usize].end,
            None => self.base_bytes,
        }
    }

    /// All have it up to here.
    pub fn trim(&mut self, to: u64) {
        while self.base < to
            && let Some(entry) = self.entries.pop_front()
        {
            self.usage[entry.origin as usize].remove(entry.payload.len());
            self.base += 1;
            self.base_bytes = entry.end;
        }
    }

    /// What comes behind that one has never been.
    pub fn cut(&mut self, to: u64) {
        while self.last() > to
            && let Some(entry) = self.entries.pop_back()
        {
            self.usage[entry.origin as usize].remove(entry.payload.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_count_from_both_ends() {
        let mut log = Log::new(10, 2);
        for number in 1..=5u64 {
            log.push((number % 2) as u8, number, vec![0; number as usize].into());
        }
        assert_eq!(
            (log.last(), log.bytes_to(15), log.bytes_to(12), log.bytes_to(10)),
            (15, 15, 3, 0)
        );
        assert_eq!(log.usage(1), Usage { count: 3, bytes: 9 });
        log.trim(12);
        log.cut(14);
        assert_eq!((log.base(), log.last(), log.bytes_to(14), log.bytes_to(3)), (12, 14, 10, 3));
        assert_eq!(
            (log.usage(0), log.usage(1)),
            (Usage { count: 1, bytes: 4 }, Usage { count: 1, bytes: 3 })
        );
        let numbers = |from| log.behind(from).map(|entry| entry.number).collect::<Vec<_>>();
        assert_eq!(
            (numbers(12), numbers(13), numbers(14), numbers(20)),
            (vec![3, 4], vec![4], vec![], vec![])
        );
        // Before what is there: none, not all.
        assert_eq!(numbers(11), []);
        log.trim(20);
        log.cut(0);
        assert_eq!((log.last(), log.usage(0), log.bytes_to(14)), (14, Usage::default(), 10));
    }

    #[test]
    fn a_window_has_an_end() {
        let mut usage = Usage::default();
        assert!(usage.fits(WINDOW_BYTES, 1) && !usage.fits(WINDOW_BYTES + 1, 1));
        for _ in 0..WINDOW_COUNT {
            assert!(usage.fits(1, 1));
            usage.add(1);
        }
        assert!(!usage.fits(1, 1) && usage.fits(1, 2));
    }
}
