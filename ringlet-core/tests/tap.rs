//! The queue of a capture: writers that race, a full one, a writer that never finishes, and words that make no sense.

use ringlet_core::memory::Area;
use ringlet_core::sync::Ordering;
use ringlet_core::tap::{CELL_COUNT, CELL_DATA_BYTES, Found, TAP_FILE_BYTES, Tap};
use std::alloc::{Layout, alloc_zeroed, dealloc};

struct Memory(*mut u8);

fn layout() -> Layout {
    Layout::from_size_align(TAP_FILE_BYTES, 4096).unwrap()
}

impl Memory {
    fn new() -> Memory {
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout()) };
        assert!(!base.is_null());
        Memory(base)
    }

    fn tap(&self) -> Tap {
        // SAFETY: allocated for so many bytes, page-aligned; the tests drop the memory last.
        Tap(unsafe { Area::new(self.0, TAP_FILE_BYTES) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(self.0, layout()) };
    }
}

fn put(tap: Tap, value: u64) -> bool {
    let Some(place) = tap.claim(1) else { return false };
    tap.cell(place).before.store(value, Ordering::Relaxed);
    let bytes = [value as u8; CELL_DATA_BYTES];
    // SAFETY: the array is valid for its length.
    unsafe { tap.write(place, 0, bytes.as_ptr(), bytes.len()) };
    tap.publish(place);
    true
}

/// Takes what is there; the values in order.
fn take(tap: Tap, place: &mut u64) -> Vec<u64> {
    let mut values = Vec::new();
    while let Found::Piece(cell) = tap.look(*place) {
        let value = cell.before.load(Ordering::Relaxed);
        let mut bytes = [0; CELL_DATA_BYTES];
        tap.read(*place, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == value as u8), "{value}");
        values.push(value);
        *place += 1;
        tap.give_back(*place);
    }
    values
}

#[test]
fn what_finds_no_room_is_counted_and_the_rest_is_read_in_order() {
    let memory = Memory::new();
    let (tap, mut place) = (memory.tap(), 0);
    for lap in 0..3 {
        let first = lap * 2 * CELL_COUNT;
        let kept = (0..CELL_COUNT + 5).filter(|value| put(tap, first + value)).count() as u64;
        assert_eq!(kept, CELL_COUNT);
        assert_eq!(tap.head().dropped.load(Ordering::Relaxed), 5 * (lap + 1));
        assert_eq!(take(tap, &mut place), (first..first + CELL_COUNT).collect::<Vec<_>>());
        assert!(matches!(tap.look(place), Found::Nothing));
    }
    assert!(tap.claim(CELL_COUNT).is_some() && tap.claim(1).is_none());
}

#[test]
fn writers_race() {
    const EACH: u64 = 20_000;
    let memory = Memory::new();
    let tap = memory.tap();
    let mut found = Vec::new();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                scope.spawn(move || {
                    for value in 0..EACH {
                        while !put(tap, value * 3 + writer) {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut place = 0;
        while !writers.iter().all(|writer| writer.is_finished()) {
            found.extend(take(tap, &mut place));
        }
        found.extend(take(tap, &mut place));
    });
    for writer in 0..3 {
        let of_one: Vec<u64> = found.iter().copied().filter(|value| value % 3 == writer).collect();
        assert_eq!(of_one, (0..EACH).map(|value| value * 3 + writer).collect::<Vec<_>>());
    }
}

#[test]
fn a_cell_without_its_writer_is_given_up() {
    let memory = Memory::new();
    let (tap, mut place) = (memory.tap(), 0);
    let lost = tap.claim(1).unwrap();
    assert!(put(tap, 1));
    assert!(matches!(tap.look(place), Found::Unfinished));
    tap.retire(place);
    assert!(matches!(tap.look(place), Found::Lost));
    place += 1;
    assert_eq!(take(tap, &mut place), [1]);
    // Nobody writes where that writer might still write.
    for value in 0..CELL_COUNT - 2 {
        assert!(put(tap, value));
    }
    take(tap, &mut place);
    let again = tap.claim(1).unwrap();
    assert_eq!((again % CELL_COUNT, tap.is_usable(again)), (lost % CELL_COUNT, false));
    // Until it does finish.
    tap.publish(lost);
    assert!(tap.is_usable(again));
    assert!(matches!(tap.look(again), Found::Unfinished));
    // One that finishes just in time is not given up.
    tap.publish(again);
    tap.retire(again);
    assert!(matches!(tap.look(again), Found::Piece(_)));
}

#[test]
fn nonsense_is_not_followed() {
    let memory = Memory::new();
    let tap = memory.tap();
    // A reader that gave back what was never written, and one that is ahead of all writers.
    tap.give_back(u64::MAX / 2);
    assert!(tap.claim(1).is_none());
    assert!(matches!(tap.look(u64::MAX / 2), Found::Astray));
    tap.give_back(0);
    assert!(put(tap, 7));
    // SAFETY: an array of one byte, of which more is asked than fits in a cell.
    unsafe { tap.write(0, CELL_DATA_BYTES, [1u8].as_ptr(), 1) };
    assert_eq!(take(tap, &mut 0), [7]);
}
