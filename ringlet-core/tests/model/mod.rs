//! The model checker's memory of one direction, bells, and contexts.

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use ringlet_core::ring::RingMemory;
use ringlet_core::sync::AtomicU64;
use ringlet_core::wait::{Wish, armed};

const SLOTS: usize = 8;
const HOT_SLOTS: usize = 4;
pub const LINE: usize = 64;
const DATA_LINES: usize = 8;

type Line = UnsafeCell<[u8; LINE]>;

/// The words of a wish.
#[derive(Default)]
pub struct Wishes {
    pub wished: AtomicU64,
    pub granted: AtomicU64,
}

impl Wishes {
    pub fn wish(&self) -> Wish<'_> {
        Wish { wished: &self.wished, granted: &self.granted }
    }
}

/// The memory of one direction.
pub struct Memory {
    headers: Vec<AtomicU64>,
    slots: Vec<Line>,
    data: Vec<Line>,
    credit_slots: AtomicU64,
    credit_data: AtomicU64,
    hot_data: u64,
}

// SAFETY: the point of the exercise: loom checks that no two threads use a cell at once.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(hot_data: u64) -> Memory {
        let lines = |n| (0..n).map(|_| UnsafeCell::new([0; LINE])).collect();
        Memory {
            headers: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
            slots: lines(SLOTS),
            data: lines(DATA_LINES),
            credit_slots: AtomicU64::new(0),
            credit_data: AtomicU64::new(0),
            hot_data,
        }
    }
}

/// The lines that `n` bytes from `at` lie in: line, place in it, place in the buffer, length.
fn pieces(at: usize, n: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let (line, place) = ((at + done) / LINE, (at + done) % LINE);
        let len = (LINE - place).min(n - done);
        done += len;
        (len > 0).then_some((line, place, done - len, len))
    })
}

fn write(lines: &[Line], at: usize, from: *const u8, n: usize) {
    for (line, place, start, len) in pieces(at, n) {
        lines[line].with_mut(|to| {
            // SAFETY: within the line and within the buffer of `n` bytes.
            unsafe { from.add(start).copy_to_nonoverlapping(to.cast::<u8>().add(place), len) }
        });
    }
}

fn read(lines: &[Line], at: usize, to: *mut u8, n: usize) {
    for (line, place, start, len) in pieces(at, n) {
        lines[line].with(|from| {
            // SAFETY: within the line and within the buffer of `n` bytes.
            unsafe { from.cast::<u8>().add(place).copy_to_nonoverlapping(to.add(start), len) }
        });
    }
}

impl RingMemory for Memory {
    fn header(&self, slot: usize) -> &AtomicU64 {
        &self.headers[slot]
    }
    fn credit_slots(&self) -> &AtomicU64 {
        &self.credit_slots
    }
    fn credit_data(&self) -> &AtomicU64 {
        &self.credit_data
    }
    fn ring_bytes(&self) -> usize {
        DATA_LINES * LINE
    }
    fn slot_count(&self) -> usize {
        SLOTS
    }
    fn hot_slot_count(&self) -> usize {
        HOT_SLOTS
    }
    fn hot_data_bytes(&self) -> u64 {
        self.hot_data
    }
    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize) {
        write(&self.slots, slot * LINE + at, from, n);
    }
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize) {
        read(&self.slots, slot * LINE + at, to, n);
    }
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize) {
        write(&self.data, at, from, n);
    }
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize) {
        read(&self.data, at, to, n);
    }
}

/// `LOOM_MAX_PREEMPTIONS` looks further than the usual three preemptions of a thread that could run on.
pub fn model(f: impl Fn() + Sync + Send + 'static) {
    model_of(3, f);
}

/// The same with so many preemptions: of more threads there are more.
pub fn model_of(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(f);
}

/// What a sleeper sleeps on: an eventfd, or the bytes that wait on the kernel's connection.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<usize>,
    news: Condvar,
}

impl Bell {
    pub fn ring(&self) {
        *self.rung.lock().unwrap() += 1;
        self.news.notify_all();
    }

    /// Sleeps until there is something, and leaves it there (poll).
    pub fn poll(&self) {
        let mut rung = self.rung.lock().unwrap();
        while *rung == 0 {
            rung = self.news.wait(rung).unwrap();
        }
    }

    pub fn count(&self) -> usize {
        *self.rung.lock().unwrap()
    }

    pub fn take(&self, n: usize) {
        *self.rung.lock().unwrap() -= n;
    }

    /// Reads an eventfd without blocking.
    pub fn drain(&self) {
        *self.rung.lock().unwrap() = 0;
    }
}

#[derive(Default)]
pub struct Context {
    pub flag: AtomicU64,
    pub bell: Bell,
}

impl Context {
    /// What a sender does after it has published.
    pub fn ring_if_armed(&self, rung: &mut u64) {
        if let Some(value) = armed(&self.flag, *rung) {
            *rung = value;
            self.bell.ring();
        }
    }
}
