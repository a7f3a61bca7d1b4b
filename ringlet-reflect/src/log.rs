//! A process's log of what it transmits in a cluster: a ring of records in memory that it shares with its host's keeper.
//!
//! Any thread of the process, and any handler of a signal in the middle of another one's record, takes room for its record by one exchange, writes it, and
//! says that it is whole by its mark. The keeper takes records in the order of their room, and waits for each to be whole: so what a process wrote is
//! a prefix, if it dies in the middle of one. What was taken has no mark any more. (Marks lie apart from records, which so need not be cleared: that costs
//! as much as a copy, and the next one who writes there has to fetch what the keeper's processor has cleared.)
//!
//! The keeper believes nothing that lies here but its own count of what it took.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

use ringlet_core::memory::Area;
use ringlet_core::sync::{AtomicU32, AtomicU64, fence};
use ringlet_linux::futex;

use crate::PAGE_BYTES;
use crate::memory::Mapping;

const RING_BYTES: u64 = 1 << 20;
/// Each record begins where such a piece does, to which a mark belongs.
const GRAIN_BYTES: u64 = 32;
const RING: usize = PAGE_BYTES + (RING_BYTES / GRAIN_BYTES) as usize * size_of::<u64>();
pub const BYTES: usize = RING + RING_BYTES as usize;
/// Of one record: what is longer is several.
pub const PIECE_BYTES: usize = 16 << 10;
/// Who sleeps for room looks again so often.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

// Where the words are.
const HEAD: usize = 0;
const ROOM: usize = 64;
const WAITS: usize = 128;
const TAIL: usize = 192;

/// In a record's mark, once it is whole; the rest of that is its length, the head included.
const WHOLE: u64 = 1 << 63;
/// There is nothing in it.
const EMPTY: u64 = 1 << 62;
/// Region, bytes, place in the region.
const RECORD_HEAD: u64 = 16;

#[repr(transparent)]
struct Long(AtomicU64);
#[repr(transparent)]
struct Word(AtomicU32);

#[allow(unsafe_code)]
// SAFETY: an atomic integer.
unsafe impl ringlet_core::memory::Shared for Long {}
#[allow(unsafe_code)]
// SAFETY: an atomic integer.
unsafe impl ringlet_core::memory::Shared for Word {}

fn long<'a>(area: Area, at: usize) -> &'a AtomicU64 {
    &area.at::<Long>(at).0
}

fn word<'a>(area: Area, at: usize) -> &'a AtomicU32 {
    &area.at::<Word>(at).0
}

/// Where in the mapping that position of the ring is.
fn place(position: u64) -> usize {
    RING + (position % RING_BYTES) as usize
}

/// That of the record which begins there.
fn mark<'a>(area: Area, position: u64) -> &'a AtomicU64 {
    long(area, PAGE_BYTES + (position % RING_BYTES / GRAIN_BYTES) as usize * size_of::<u64>())
}

/// Up to where such a record goes that begins there, and how much of it is passed over, since it would not be in one piece.
fn extent(position: u64, length: usize) -> (u64, u64) {
    let whole = (RECORD_HEAD + length as u64).next_multiple_of(GRAIN_BYTES);
    let left = RING_BYTES - position % RING_BYTES;
    let passed = if whole > left { left } else { 0 };
    (position + passed + whole, passed)
}

/// The process's side.
pub struct Writer {
    mapping: Mapping,
}

impl Writer {
    pub fn new(mapping: Mapping) -> Writer {
        Writer { mapping }
    }

    /// Appends so many bytes (at most `PIECE_BYTES`) for that place of a region. `fill` writes them to where it is told, and says whether it could; if not
    /// they are not there. `None` if there is no room.
    #[inline]
    pub fn append(
        &self,
        region: u32,
        at: u64,
        length: usize,
        fill: impl FnOnce(*mut u8) -> bool,
    ) -> Option<bool> {
        let area = self.mapping.area();
        let mut tail = long(area, TAIL).load(Relaxed);
        let (end, passed) = loop {
            let (end, passed) = extent(tail, length);
            // ORDER: Acquire, pairs with Release of the head in `Reader::give_back`: marks of what was taken are zero before they are set anew.
            // (Where the tail is old the head may be beyond it: then the exchange fails.)
            let used = end.wrapping_sub(long(area, HEAD).load(Acquire)) as i64;
            if used > RING_BYTES as i64 {
                return None;
            }
            // ORDER: AcqRel, pairs with itself in `append`: who writes behind what another thread was told of is behind it here too.
            match long(area, TAIL).compare_exchange_weak(tail, end, AcqRel, Relaxed) {
                Ok(_) => break (end, passed),
                Err(found) => tail = found,
            }
        };
        if passed > 0 {
            mark(area, tail).store(WHOLE | EMPTY | passed, Release);
        }
        let record = place(tail + passed);
        word(area, record).store(region, Relaxed);
        word(area, record + 4).store(length as u32, Relaxed);
        long(area, record + 8).store(at, Relaxed);
        // SAFETY: within the ring (`extent`), in room that is this record's alone.
        #[allow(unsafe_code)]
        let to = unsafe { area.base().add(record + RECORD_HEAD as usize) };
        let is_filled = fill(to);
        let kind = if is_filled { WHOLE } else { WHOLE | EMPTY };
        // ORDER: Release, pairs with Acquire of the mark in `Reader::next`: a record that is whole is seen whole.
        mark(area, tail + passed).store(kind | (end - tail - passed), Release);
        Some(is_filled)
    }

    /// What the keeper has taken.
    pub fn taken(&self) -> u64 {
        long(self.mapping.area(), HEAD).load(Relaxed)
    }

    /// Sleeps until there may be room, at most a tenth of a second. (In handlers of signals too.)
    pub fn await_room(&self) {
        let area = self.mapping.area();
        let (room, seen) = (word(area, ROOM), word(area, ROOM).load(Relaxed));
        word(area, WAITS).store(1, SeqCst);
        // ORDER: SeqCst, pairs with the fence in `Reader::give_back`: either it sees the wish, or this sees the room.
        fence(SeqCst);
        // (What was taken first: both grow.)
        let head = long(area, HEAD).load(Acquire);
        if long(area, TAIL).load(Relaxed) - head > RING_BYTES / 2 {
            futex::wait(room, seen, LOOK_AGAIN.as_nanos() as u64);
        }
    }
}

/// The keeper's side.
pub struct Reader {
    mapping: Mapping,
    /// What was taken: never read from where the process may write.
    taken: u64,
    /// What was told to be.
    told: u64,
}

/// Its bytes lie in the log still, and may change at any time.
pub struct Record {
    pub region: u32,
    pub at: u64,
    pub bytes: *const u8,
    pub length: usize,
    end: u64,
}

/// The process writes there what it should not.
#[derive(Debug)]
pub struct Broken;

impl Reader {
    pub fn new(mapping: Mapping) -> Reader {
        Reader { mapping, taken: 0, told: 0 }
    }

    /// What has room in it up to now.
    pub fn tail(&self) -> u64 {
        let tail = long(self.mapping.area(), TAIL).load(Acquire);
        // (No more than there is, whatever it says.)
        self.taken + tail.wrapping_sub(self.taken).min(RING_BYTES)
    }

    pub fn has_taken(&self, up_to: u64) -> bool {
        self.taken >= up_to
    }

    /// Is the next one whole?
    pub fn has_next(&self) -> bool {
        mark(self.mapping.area(), self.taken).load(Acquire) != 0
    }

    /// The next record, if it is whole.
    pub fn next(&mut self) -> Result<Option<Record>, Broken> {
        let area = self.mapping.area();
        loop {
            // ORDER: Acquire, pairs with Release in `Writer::append`.
            let mark = mark(area, self.taken).load(Acquire);
            if mark == 0 {
                return Ok(None);
            }
            let (length, left) = (mark & !(WHOLE | EMPTY), RING_BYTES - self.taken % RING_BYTES);
            if mark & WHOLE == 0 || length == 0 || length % GRAIN_BYTES != 0 || length > left {
                return Err(Broken);
            }
            let end = self.taken + length;
            // (Without room that was given back there is no more than a ring: who writes where he has none would be read without end.)
            if end - self.told > RING_BYTES {
                return Err(Broken);
            }
            if mark & EMPTY != 0 {
                self.take_to(end);
                continue;
            }
            let record = place(self.taken);
            if length < RECORD_HEAD {
                return Err(Broken);
            }
            let bytes = word(area, record + 4).load(Relaxed) as usize;
            if bytes > PIECE_BYTES || bytes as u64 > length - RECORD_HEAD {
                return Err(Broken);
            }
            // SAFETY: within the ring, as was just looked at.
            #[allow(unsafe_code)]
            let from = unsafe { area.base().add(record + RECORD_HEAD as usize) };
            let (region, at) =
                (word(area, record).load(Relaxed), long(area, record + 8).load(Relaxed));
            return Ok(Some(Record { region, at, bytes: from, length: bytes, end }));
        }
    }

    /// It was copied.
    pub fn take(&mut self, record: &Record) {
        self.take_to(record.end);
    }

    fn take_to(&mut self, end: u64) {
        mark(self.mapping.area(), self.taken).store(0, Relaxed);
        self.taken = end;
    }

    /// The room of what was taken is the process's again.
    pub fn give_back(&mut self) {
        if self.told == self.taken {
            return;
        }
        self.told = self.taken;
        let area = self.mapping.area();
        // ORDER: Release, pairs with Acquire of the head in `Writer::append`.
        long(area, HEAD).store(self.taken, Release);
        // ORDER: SeqCst, pairs with the fence in `Writer::await_room`.
        fence(SeqCst);
        // (Who waits does so for half of it: woken for each record's room it would be woken for each.)
        if self.tail() - self.taken <= RING_BYTES / 2 && word(area, WAITS).load(Relaxed) != 0 {
            word(area, WAITS).store(0, Relaxed);
            word(area, ROOM).fetch_add(1, Relaxed);
            futex::wake(word(area, ROOM));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::memory;

    fn ends() -> (Writer, Reader) {
        let made = memory::make(BYTES).unwrap();
        let map = || memory::map(&made, BYTES, true).unwrap();
        (Writer::new(map()), Reader::new(map()))
    }

    fn append(writer: &Writer, region: u32, at: u64, bytes: &[u8]) -> Option<bool> {
        writer.append(region, at, bytes.len(), |to| {
            // SAFETY: room for so many bytes.
            #[allow(unsafe_code)]
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            }
            true
        })
    }

    fn next(reader: &mut Reader) -> Option<(u32, u64, Vec<u8>)> {
        let record = reader.next().unwrap()?;
        // SAFETY: in the ring, where nobody writes meanwhile.
        #[allow(unsafe_code)]
        let bytes = unsafe { std::slice::from_raw_parts(record.bytes, record.length) }.to_vec();
        reader.take(&record);
        Some((record.region, record.at, bytes))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]
        /// Records of all lengths, some of which could not be filled: those that come out are a queue's.
        #[test]
        fn a_log_is_a_queue(acts in prop::collection::vec((0..6u8, 0..=PIECE_BYTES, any::<u64>()), 1..400)) {
            let (writer, mut reader) = ends();
            let mut queue = VecDeque::new();
            for (kind, length, at) in acts {
                match kind {
                    0 => prop_assert_eq!(next(&mut reader), queue.pop_front()),
                    1 => {
                        reader.give_back();
                        prop_assert!(reader.has_taken(reader.taken));
                    }
                    2 => {
                        let _ = writer.append(1, at, length, |_| false);
                    }
                    _ => {
                        let bytes: Vec<u8> = (0..length).map(|byte| (byte as u64 ^ at) as u8).collect();
                        if append(&writer, length as u32, at, &bytes).is_some() {
                            queue.push_back((length as u32, at, bytes));
                        } else {
                            // (Full is no less than the ring without two of the longest.)
                            let used = reader.tail() - reader.told;
                            prop_assert!(used + 3 * PIECE_BYTES as u64 > RING_BYTES);
                        }
                    }
                }
            }
            while let Some(expected) = queue.pop_front() {
                prop_assert_eq!(next(&mut reader), Some(expected));
            }
            prop_assert_eq!(next(&mut reader), None);
            prop_assert!(reader.has_taken(reader.tail()));
        }

        /// Whatever lies there: each record is within the ring, and it comes to an end.
        #[test]
        fn whatever_is_written_there_is_read_within_bounds(
            words in prop::collection::vec((0..64usize, prop_oneof![
                any::<u64>(),
                (0..9u64, any::<u32>()).prop_map(|(kind, low)| (kind << 61) | (u64::from(low) % (2 * RING_BYTES))),
            ]), 0..200),
            tail in any::<u64>(),
        ) {
            let (writer, mut reader) = ends();
            let area = writer.mapping.area();
            long(area, TAIL).store(tail, Relaxed);
            for (at, word) in words {
                // (At the beginning, where it is read, and at the end; marks, and heads.)
                let grain = at as u64 % 32 / 2 * GRAIN_BYTES;
                let at_end = RING_BYTES - GRAIN_BYTES - grain;
                let position = if at < 32 { grain } else { at_end };
                match at % 2 {
                    0 => mark(area, position).store(word, Relaxed),
                    _ => long(area, place(position)).store(word, Relaxed),
                }
            }
            prop_assert!(reader.tail() - reader.taken <= RING_BYTES);
            let base = area.base() as usize;
            let (mut taken, mut ends) = (0, false);
            for _ in 0..1000 {
                match reader.next() {
                    Ok(Some(record)) => {
                        let from = record.bytes as usize - reader.mapping.area().base() as usize;
                        prop_assert!(from >= RING && from + record.length <= BYTES, "{base:x}");
                        reader.take(&record);
                        reader.give_back();
                        taken += 1;
                    }
                    Ok(None) | Err(Broken) => {
                        ends = true;
                        break;
                    }
                }
            }
            prop_assert!(ends, "{taken} records");
        }
    }

    /// The room of what was taken is the process's when it was given back, and no sooner.
    #[test]
    fn who_writes_into_room_that_is_not_his_is_not_read_without_end() {
        let (writer, mut reader) = ends();
        for kind in [WHOLE | EMPTY, WHOLE] {
            let mut write = || {
                mark(writer.mapping.area(), 0).store(kind | RING_BYTES, Relaxed);
                reader.next().map(|record| record.map(|record| reader.take(&record)).is_some())
            };
            assert_eq!(write().unwrap(), kind == WHOLE);
            assert!(write().is_err());
            reader.give_back();
        }
    }

    #[test]
    fn what_is_not_whole_holds_back_what_is_behind_it() {
        let (writer, mut reader) = ends();
        append(&writer, 1, 0, b"first");
        writer.append(2, 0, 8, |_| {
            // (As a handler of a signal does in the middle.)
            assert_eq!(append(&writer, 3, 0, b"third"), Some(true));
            assert_eq!(next(&mut reader).unwrap().0, 1);
            assert_eq!(next(&mut reader), None);
            assert!(!reader.has_taken(reader.tail()));
            true
        });
        assert_eq!([next(&mut reader), next(&mut reader)].map(|each| each.unwrap().0), [2, 3]);
    }

    #[test]
    fn threads_append_beside_each_other_while_it_is_read() {
        const EACH: u64 = 20_000;
        let (writer, mut reader) = ends();
        std::thread::scope(|scope| {
            for thread in 0..3u32 {
                let writer = &writer;
                scope.spawn(move || {
                    for count in 0..EACH {
                        let bytes = vec![count as u8; (count * 37 % 900) as usize];
                        while append(writer, thread, count, &bytes).is_none() {
                            writer.await_room();
                        }
                    }
                });
            }
            let mut counts = [0; 3];
            while counts.iter().sum::<u64>() < 3 * EACH {
                match next(&mut reader) {
                    None => reader.give_back(),
                    Some((thread, count, bytes)) => {
                        assert_eq!(
                            count,
                            std::mem::replace(&mut counts[thread as usize], count + 1)
                        );
                        assert!(bytes.len() as u64 == count * 37 % 900);
                        assert!(bytes.iter().all(|byte| *byte == count as u8));
                    }
                }
            }
            reader.give_back();
        });
    }
}
