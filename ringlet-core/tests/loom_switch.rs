//! Lanes whose receiver sleeps in the kernel, in every interleaving (see loom.rs):
//! `RUSTFLAGS="--cfg loom" cargo test --release -p ringlet-core --test loom_switch`.
#![cfg(loom)]

#[allow(dead_code)] // loom.rs uses the rest
mod model;

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use model::{Memory, model};
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::queue::{Next, Rx, Tx};
use ringlet_core::switch::*;
use ringlet_core::sync::{AtomicU32, AtomicU64};

/// What the two sides share: the lane with its words, and the kernel's way.
struct Shared {
    memory: Memory,
    path: AtomicU32,
    busy: AtomicU32,
    before: AtomicU64,
    kernel: Mutex<Vec<u8>>,
    arrived: Condvar,
}

impl Shared {
    fn new(path: u32) -> Arc<Shared> {
        Arc::new(Shared {
            memory: Memory::new(0),
            path: AtomicU32::new(path),
            busy: AtomicU32::new(0),
            before: AtomicU64::new(0),
            kernel: Mutex::new(Vec::new()),
            arrived: Condvar::new(),
        })
    }

    /// The oldest datagram that the kernel has.
    fn from_kernel(&self, wait: bool) -> Option<u8> {
        let mut kernel = self.kernel.lock().unwrap();
        while wait && kernel.is_empty() {
            kernel = self.arrived.wait(kernel).unwrap();
        }
        (!kernel.is_empty()).then(|| kernel.remove(0))
    }
}

fn send_all(shared: &Shared, count: u8) {
    let (tx, mut sent) = (Tx::default(), 0);
    for number in 0..count {
        if claim(&shared.busy, &shared.path, || !tx.drained(&shared.memory)) {
            let mut byte = number;
            let list = [Buffer { base: &raw mut byte, len: 1 }];
            // SAFETY: one readable byte.
            tx.push(&shared.memory, &mut unsafe { Buffers::new(&list) }).expect("room");
            sent += 1;
            done(&shared.busy);
        } else {
            note_kernel(&shared.before, sent);
            shared.kernel.lock().unwrap().push(number);
            shared.arrived.notify_one();
        }
    }
}

/// A receiver: how it sleeps is the kernel's affair.
struct Receiver {
    rx: Rx,
    taken: u64,
    seen: u64,
    got: Vec<u8>,
}

impl Receiver {
    fn new() -> Receiver {
        Receiver { rx: Rx::default(), taken: 0, seen: 0, got: Vec::new() }
    }

    /// The next message of the lane, unless the kernel comes first. False: there is none.
    fn take(&mut self, shared: &Shared) -> bool {
        let Next::Message(message) = self.rx.peek(&shared.memory) else { return false };
        if let Some(history) = kernel_comes_first(&shared.before, self.seen, self.taken) {
            match shared.from_kernel(false) {
                Some(number) => {
                    self.got.push(number);
                    return true;
                }
                None => self.seen = history,
            }
        }
        let mut byte = 0;
        // SAFETY: one writable byte.
        unsafe { message.read(&shared.memory, 0, &raw mut byte, 1) };
        self.rx.release(&shared.memory, message);
        self.taken += 1;
        self.got.push(byte);
        true
    }

    fn receive(&mut self, shared: &Shared) {
        if self.take(shared) {
            return;
        }
        turn(&shared.path, KERNEL);
        while !is_quiet(&shared.busy) {
            thread::yield_now();
        }
        if !self.rx.ready(&shared.memory) {
            self.got.extend(shared.from_kernel(true));
        }
        turn(&shared.path, RING);
    }
}

/// Nothing is lost, doubled or out of order, and the receiver is always woken.
fn all_arrive(path: u32, count: u8) {
    model(move || {
        let shared = Shared::new(path);
        let theirs = shared.clone();
        let sending = thread::spawn(move || send_all(&theirs, count));
        let mut receiver = Receiver::new();
        while receiver.got.len() < count as usize {
            receiver.receive(&shared);
        }
        sending.join().unwrap();
        assert_eq!(receiver.got, (0..count).collect::<Vec<_>>());
    });
}

#[test]
fn a_sleeper_misses_nothing() {
    all_arrive(RING, 3);
}

#[test]
fn order_across_both_ways() {
    all_arrive(KERNEL, 4);
}

/// A receiver that gives a busy sender up has its message, or the sender knows.
#[test]
fn who_is_given_up_is_told() {
    model(|| {
        let shared = Shared::new(RING);
        let theirs = shared.clone();
        let sending = thread::spawn(move || {
            let tx = Tx::default();
            if !claim(&theirs.busy, &theirs.path, || false) {
                return true;
            }
            let mut byte = 7;
            let list = [Buffer { base: &raw mut byte, len: 1 }];
            // SAFETY: one readable byte.
            tx.push(&theirs.memory, &mut unsafe { Buffers::new(&list) }).expect("room");
            done(&theirs.busy);
            gave_up(&theirs.path)
        });
        let receiver = Receiver::new();
        turn(&shared.path, GIVEN_UP);
        let seen = receiver.rx.ready(&shared.memory);
        let told = sending.join().unwrap();
        assert!(seen || told);
    });
}
