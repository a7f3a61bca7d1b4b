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
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};
use std::ops::Range;

/// What the two sides share: the lane with its words, and the kernel's way.
struct Shared {
    memory: Memory,
    path: AtomicU32,
    busy: AtomicU32,
    history: History,
    kernel: Mutex<Vec<u8>>,
    arrived: Condvar,
}

impl Shared {
    fn new(path: u32) -> Arc<Shared> {
        Arc::new(Shared {
            memory: Memory::new(0),
            path: AtomicU32::new(path),
            busy: AtomicU32::new(0),
            history: History {
                by_kernel: AtomicU64::new(0),
                settled: AtomicU64::new(0),
                left: AtomicU32::new(0),
                attached: AtomicU32::new(1),
            },
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

fn send_all(shared: &Shared, tx: &Tx, numbers: Range<u8>) {
    // Once the receiver has closed the lane, all goes through the kernel.
    let mut left = false;
    for number in numbers {
        let settled = !tx.is_new() || shared.kernel.lock().unwrap().is_empty();
        if tx.is_new() && settled {
            shared.history.settle();
        }
        if !left && settled && claim(&shared.busy, &shared.path, || !tx.drained(&shared.memory)) {
            let mut byte = number;
            let list = [Buffer { base: &raw mut byte, len: 1 }];
            let head = [shared.history.before_next() as u8];
            // SAFETY: one readable byte.
            let mut from = unsafe { Buffers::new(&list) };
            let published = tx.push_behind(&shared.memory, &head, &mut from).expect("room");
            done(&shared.busy);
            if published {
                continue;
            }
            left = true;
        }
        left |= shared.path.load(Ordering::Acquire) == CLOSED;
        if !left {
            shared.history.note_kernel();
        }
        shared.kernel.lock().unwrap().push(number);
        shared.arrived.notify_one();
    }
}

/// A receiver: how it sleeps is the kernel's affair.
struct Receiver {
    rx: Rx,
    taken: u64,
    order: Order,
    got: Vec<u8>,
}

impl Receiver {
    fn new() -> Receiver {
        Receiver { rx: Rx::default(), taken: 0, order: Order::default(), got: Vec::new() }
    }

    /// The next message of the lane, unless the kernel comes first. False: there is none.
    fn take(&mut self, shared: &Shared) -> bool {
        let Next::Message(message) = self.rx.peek(&shared.memory) else { return false };
        let mut bytes = [0; 2];
        // SAFETY: two writable bytes.
        unsafe { message.read(&shared.memory, 0, bytes.as_mut_ptr(), 2) };
        let [before, number] = bytes;
        let (taken, before) = (self.taken, u64::from(before));
        if !self.order.may_take(&shared.history, taken, before, false) {
            let there = !shared.kernel.lock().unwrap().is_empty();
            if there && !self.order.is_first(&shared.history, before) {
                return self.take_from_kernel(shared, false);
            }
            assert!(self.order.may_take(&shared.history, taken, before, !there));
        }
        self.rx.release(&shared.memory, message);
        self.taken += 1;
        self.got.push(number);
        true
    }

    fn take_from_kernel(&mut self, shared: &Shared, wait: bool) -> bool {
        let number = shared.from_kernel(wait);
        if number.is_some() {
            self.order.came();
        }
        self.got.extend(number);
        number.is_some()
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
            self.take_from_kernel(shared, true);
            // What else is there comes next, whoever sent it: the lane stays empty as long as it is turned.
            self.take_from_kernel(shared, false);
            assert!(!self.rx.ready(&shared.memory));
        }
        turn(&shared.path, RING);
    }

    /// Sleeps in spite of what is there, for as long as a look at the kernel takes.
    fn nod(&mut self, shared: &Shared) {
        turn(&shared.path, KERNEL_AT_ONCE);
        while !is_quiet(&shared.busy) {
            thread::yield_now();
        }
        turn(&shared.path, RING);
    }
}

/// Nothing is lost, doubled or out of order, and the receiver is always woken.
fn all_arrive(path: u32, count: u8) {
    model(move || {
        let shared = Shared::new(path);
        let theirs = shared.clone();
        let sending = thread::spawn(move || send_all(&theirs, &Tx::default(), 0..count));
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

/// A message of the lane is taken neither before what was sent before it by the kernel nor after what was sent there later.
fn order_with_a_nod(path: u32, first: u8, count: u8) {
    model(move || {
        let shared = Shared::new(RING);
        let theirs = shared.clone();
        let (mut receiver, tx) = (Receiver::new(), Tx::default());
        send_all(&shared, &tx, 0..first);
        while receiver.got.len() < first as usize {
            receiver.receive(&shared);
        }
        turn(&shared.path, path);
        let sending = thread::spawn(move || send_all(&theirs, &tx, first..count));
        turn(&shared.path, RING);
        receiver.nod(&shared);
        while receiver.got.len() < count as usize {
            receiver.receive(&shared);
        }
        sending.join().unwrap();
        assert_eq!(receiver.got, (0..count).collect::<Vec<_>>());
    });
}

#[test]
fn order_when_the_receiver_sleeps_in_spite_of_what_is_there() {
    order_with_a_nod(KERNEL, 1, 4);
}

#[test]
fn order_when_it_does_so_from_the_first_message_on() {
    order_with_a_nod(RING, 0, 3);
}

/// Whom the receiver gives up, wherever it is: each message is taken from the lane or goes through the kernel, once and in order.
#[test]
fn who_is_given_up_is_told() {
    model(|| {
        let shared = Shared::new(RING);
        let theirs = shared.clone();
        let sending = thread::spawn(move || send_all(&theirs, &Tx::default(), 0..3));
        let mut receiver = Receiver::new();
        receiver.take(&shared);
        turn(&shared.path, CLOSED);
        receiver.rx.withdraw(&shared.memory);
        while receiver.take(&shared) {}
        sending.join().unwrap();
        while receiver.take(&shared) || receiver.take_from_kernel(&shared, false) {}
        assert_eq!(receiver.got, [0, 1, 2]);
    });
}
