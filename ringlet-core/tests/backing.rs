//! Memory that is asked for before it is used, and given back: neither end touches a page that is not held.
#![cfg(not(loom))]

#[allow(dead_code)] // what other tests use
mod segment;

use ringlet_core::layout::*;
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::ring::{Backing, Mark, Next, RingMemory, Rx, SegmentRing, Tx};
use ringlet_core::sync::AtomicU64;
use segment::Segment;
use std::cell::Cell;

const PAGES: usize = SLOT_COUNT / HOT_SLOT_COUNT;

/// A ring of which only some pages are held.
struct Held {
    ring: SegmentRing,
    slots: Cell<u32>,
    data: Cell<u64>,
}

impl Held {
    fn slot(&self, slot: usize) {
        let page = slot % SLOT_COUNT / HOT_SLOT_COUNT;
        assert!(self.slots.get() & 1 << page != 0, "slot {slot} is not held");
    }
    fn data(&self, at: usize, n: usize) {
        assert!((at + n) as u64 <= self.data.get(), "data {at} + {n} is not held");
    }
}

impl RingMemory for Held {
    fn header(&self, slot: usize) -> &AtomicU64 {
        self.slot(slot);
        self.ring.header(slot)
    }
    fn credit_slots(&self) -> &AtomicU64 {
        self.ring.credit_slots()
    }
    fn credit_data(&self) -> &AtomicU64 {
        self.ring.credit_data()
    }
    fn ring_bytes(&self) -> usize {
        self.ring.ring_bytes()
    }
    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize) {
        self.slot(slot);
        // SAFETY: passed on to the caller, as below.
        unsafe { self.ring.write_slot(slot, at, from, n) };
    }
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize) {
        self.slot(slot);
        // SAFETY: as above.
        unsafe { self.ring.read_slot(slot, at, to, n) };
    }
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize) {
        self.data(at, n);
        // SAFETY: as above.
        unsafe { self.ring.write_data(at, from, n) };
    }
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize) {
        self.data(at, n);
        // SAFETY: as above.
        unsafe { self.ring.read_data(at, to, n) };
    }
}

/// A generator of numbers, the same at every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

fn run(seed: u64, refuses: bool) -> (u32, u32, u32) {
    let segment = Segment::new(256 << 10);
    let held = Held { ring: segment.ring(0), slots: Cell::new(1), data: Cell::new(0) };
    let (tx, rx, mut random) = (Tx::default(), Rx::default(), Random(seed));
    tx.begin_bare(&held);
    let (mut sent, mut got, mut in_ring) = (0u64, 0u64, true);
    let (mut asked, mut given_back, mut refused) = (0, 0, 0);
    let keeps_up = random.below(3);
    for _ in 0..8_000 {
        match random.below(8 + keeps_up * 3) {
            0..5 if in_ring => {
                let long = !seed.is_multiple_of(3) && random.below(3) == 0;
                let len = 1 + random.below(if long { 40_000 } else { 40 + seed });
                let mut bytes: Vec<u8> = (sent..sent + len).map(|i| (i % 251) as u8).collect();
                let list = [Buffer { base: bytes.as_mut_ptr(), len: bytes.len() }];
                // SAFETY: `bytes` is valid for its length.
                let n = tx.push(&held, &mut unsafe { Buffers::new(&list) });
                sent += n as u64;
                if n > 0 {
                    continue;
                }
                let Some(what) = tx.wanted_backing() else { continue };
                asked += 1;
                if refuses && random.below(4) == 0 {
                    refused += 1;
                    in_ring = !tx.push_mark(&held, Mark::Back(sent));
                    assert!(!in_ring, "there is always room for this mark");
                    continue;
                }
                let what = match what {
                    Backing::Slots => {
                        held.slots.set((1 << PAGES) - 1);
                        what
                    }
                    Backing::Data(end) => {
                        held.data.set(end.next_multiple_of(4096));
                        Backing::Data(held.data.get())
                    }
                };
                tx.has_backing(&held, what);
            }
            0..5 => in_ring = tx.drained(&held) && tx.push_mark(&held, Mark::Start(sent)),
            5 if random.below(20) == 0 => {
                if let Some(kept) = tx.let_go(&held) {
                    given_back += 1;
                    held.slots.set(1 | 1 << (kept / HOT_SLOT_COUNT));
                    held.data.set(0);
                }
            }
            _ => {
                let mut bytes = vec![0; 1 + random.below(30_000) as usize];
                let list = [Buffer { base: bytes.as_mut_ptr(), len: bytes.len() }];
                // SAFETY: as above.
                match rx.pop(&held, &mut unsafe { Buffers::new(&list) }) {
                    Next::Bytes(n, _) => {
                        for byte in &bytes[..n] {
                            assert_eq!(*byte, (got % 251) as u8, "at byte {got}");
                            got += 1;
                        }
                    }
                    Next::Mark(_) => drop(rx.pass_mark(&held)),
                    Next::Empty => assert_eq!(got, sent),
                    Next::Corrupt => panic!("corrupt"),
                }
            }
        }
    }
    (asked, given_back, refused)
}

#[test]
fn nobody_touches_what_is_not_held() {
    let mut sums = (0, 0, 0);
    for seed in 0..24 {
        let (asked, given_back, refused) = run(seed, seed % 2 == 0);
        sums = (sums.0 + asked, sums.1 + given_back, sums.2 + refused);
    }
    assert!(sums.0 > 200 && sums.1 > 50 && sums.2 > 20, "too little was tried: {sums:?}");
}
