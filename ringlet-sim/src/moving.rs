//! A stream that moves between the kernel's connection and the ring (`ringlet_core::handover`), back and forth as the seed has it.
//!
//! The kernel's bytes are packets on the same links, put in order as TCP does, and any of them may come before or after what the
//! ring holds. The rule of the handover needs that a mark is there before a kernel byte to which it gives a meaning: so the sender
//! lets nothing overtake it.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use ringlet_core::handover;
use ringlet_core::handover::{
    Fault, Head, Incoming as _, Outgoing as _, Receiver, Sender, Sending, Step,
};
use ringlet_core::layout::Control;
use ringlet_core::memory::Buffers;
use ringlet_core::record::RingMemory;
use ringlet_core::ring::{Mark, Next, Rx, Tx};

use crate::ledger::mix;
use crate::memory::Node;

/// What the kernel's connection from a peer has brought.
#[derive(Default)]
pub(crate) struct Incoming {
    arrived: u64,
    waiting: VecDeque<u8>,
    /// Came before its turn.
    early: BTreeMap<u64, Vec<u8>>,
}

impl Incoming {
    pub fn arrives(&mut self, at: u64, bytes: &[u8]) {
        self.early.insert(at, bytes.to_vec());
        while let Some(bytes) = self.early.remove(&self.arrived) {
            self.arrived += bytes.len() as u64;
            self.waiting.extend(bytes);
        }
    }
}

/// Both directions, as one end has them.
#[derive(Default)]
pub(crate) struct Moving {
    tx: Tx,
    rx: Rx,
    sender: Sender,
    receiver: Receiver,
    /// Nobody leaves the ring here for good, so no peer looks at these words.
    words: Control,
    /// Bytes ever written to the kernel's connection, and those of them that are doorbells since the last start.
    written: Cell<u64>,
    bells: Cell<u64>,
    /// How often something was sent.
    turns: Cell<u64>,
    /// A sender that waits for room is to be looked for.
    look: Cell<bool>,
}

/// Bytes that go through the kernel at once: few, so that the path changes within messages.
const PIECE_BYTES: usize = 256;

/// One of them, with what is around it.
struct Side<'a, M> {
    moving: &'a Moving,
    node: &'a Node,
    peer: usize,
    memory: &'a M,
}

impl<M: RingMemory> handover::Outgoing for Side<'_, M> {
    type Error = ();
    type Words = Control;

    fn sender(&self) -> &Sender {
        &self.moving.sender
    }
    fn words(&self) -> &Control {
        &self.moving.words
    }
    fn drained(&self) -> bool {
        self.moving.tx.drained(self.memory)
    }
    fn outstanding(&self) -> usize {
        self.moving.tx.outstanding_bytes(self.memory)
    }
    fn push_mark(&self, mark: Mark) -> bool {
        let pushed = self.moving.tx.push_mark(self.memory, mark);
        self.node.barrier();
        pushed
    }
    fn take_credit(&self) {
        self.moving.tx.take_credit(self.memory);
    }
    fn pass_oldest(&self) -> bool {
        self.moving.tx.pass_oldest(self.memory)
    }
    fn restart_bells(&self) {
        self.moving.bells.set(0);
    }
    fn bells(&self) -> u64 {
        self.moving.bells.get()
    }
    fn back_place(&self) -> Result<u64, ()> {
        let place = self.moving.sender.started() + self.moving.bells.get();
        assert_eq!(place, self.moving.written.get(), "a doorbell that was not counted");
        Ok(place)
    }
    fn send_again(&self, _used: u64) -> Result<u64, ()> {
        unreachable!("nobody leaves")
    }
    fn put_bell(&self) {
        self.moving.bells.set(self.moving.bells.get() + 1);
        self.moving.write(self.node, self.peer, b"!");
    }
    // One thread does all.
    fn begin_bell(&self) {}
    fn end_bell(&self) {}
    fn await_bells(&self) -> Result<(), ()> {
        Ok(())
    }
    fn is_draining(&self) -> bool {
        unreachable!("nobody asks how a peer has died")
    }
    fn went_back(&self) {}
    fn returns(&self) {}
    fn has_returned(&self) {}
    fn gives_up(&self) {}
}

impl<M: RingMemory> handover::Incoming for Side<'_, M> {
    type Error = Fault;
    type Words = Control;

    fn receiver(&self) -> &Receiver {
        &self.moving.receiver
    }
    fn words(&self) -> &Control {
        &self.moving.words
    }
    fn head(&self) -> Head {
        match self.moving.rx.mark(self.memory) {
            Some(mark) => Head::Mark(mark),
            None if self.moving.rx.ready(self.memory) => Head::Bytes,
            None => Head::Empty,
        }
    }
    fn mark_ahead(&self) -> Option<Mark> {
        self.moving.rx.mark_ahead(self.memory)
    }
    fn used(&self) -> u64 {
        self.moving.rx.used()
    }
    fn skip(&self, _bytes: u64) -> bool {
        unreachable!("nobody leaves")
    }
    fn pass_mark(&self, _wakes: bool) {
        let look = self.moving.rx.pass_mark(self.memory);
        self.moving.look.set(self.moving.look.get() | look);
    }
    fn taken(&self) -> Result<u64, Fault> {
        Ok(self.receiver().taken().expect("all is counted from the beginning"))
    }
    fn base(&self, _start: u64, _taken: u64) -> u64 {
        0
    }
    fn throw_away(&self, most: u64) -> Result<u64, Fault> {
        Ok(self.node.kernel(self.peer, |kernel| {
            let n = kernel.waiting.len().min(most as usize);
            kernel.waiting.drain(..n).count() as u64
        }))
    }
    fn is_over(&self) -> bool {
        false
    }
    fn bells(&self) -> u64 {
        unreachable!("nobody leaves")
    }
    fn has_ended(&self) -> bool {
        false
    }
    fn say_draining(&self, _draining: bool) {}
    fn ask_back(&self) {}
    fn is_quiet(&self) -> bool {
        true
    }
    fn await_quiet(&self) -> bool {
        true
    }
    fn turned(&self) {}
    fn fails(&self, fault: Fault) -> Fault {
        fault
    }
}

impl Moving {
    fn side<'a, M>(&'a self, node: &'a Node, peer: usize, memory: &'a M) -> Side<'a, M> {
        Side { moving: self, node, peer, memory }
    }

    pub fn writable(&self, memory: &impl RingMemory) -> bool {
        !self.sender.in_ring() || self.tx.writable(memory)
    }

    pub fn push(
        &self,
        node: &Node,
        peer: usize,
        memory: &impl RingMemory,
        from: &mut Buffers,
    ) -> usize {
        let turn = self.turns.replace(self.turns.get() + 1);
        let side = self.side(node, peer, memory);
        match mix((node.id as u64) << 32 | turn) % 8 {
            0..3 => drop(side.start(self.written.get())),
            3 if self.sender.in_ring() => side.go_back(Sending::Kernel).expect("nobody leaves"),
            4 => side.ring(),
            _ => {}
        }
        if self.sender.in_ring() {
            return self.tx.push(memory, from);
        }
        let (piece, n) = from.take(PIECE_BYTES);
        // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
        self.write(node, peer, unsafe { std::slice::from_raw_parts(piece, n) });
        n
    }

    fn write(&self, node: &Node, peer: usize, bytes: &[u8]) {
        let at = self.written.replace(self.written.get() + bytes.len() as u64);
        node.write_kernel(peer, at, bytes);
    }

    pub fn ready(&self, node: &Node, peer: usize, memory: &impl RingMemory) -> bool {
        node.kernel(peer, |kernel| !kernel.waiting.is_empty()) || self.rx.ready(memory)
    }

    pub fn pop(
        &self,
        node: &Node,
        peer: usize,
        memory: &impl RingMemory,
        to: &mut Buffers,
    ) -> Next {
        let side = self.side(node, peer, memory);
        if self.receiver.taken().is_none() {
            self.receiver.begin_count(0);
        }
        self.look.set(false);
        loop {
            let waiting = node.kernel(peer, |kernel| kernel.waiting.len() as u64);
            let n = match side.follow(false, waiting) {
                Ok(None) => continue,
                Ok(Some(Step::Pop)) => match self.rx.pop(memory, to) {
                    Next::Bytes(n, more) => return Next::Bytes(n, more || self.look.get()),
                    _ => return Next::Corrupt,
                },
                Ok(Some(Step::Discard(n))) => {
                    node.kernel(peer, |kernel| kernel.waiting.drain(..n as usize).count());
                    self.receiver.count_taken(n);
                    continue;
                }
                Ok(Some(Step::Read(n))) => n as usize,
                Ok(Some(Step::Wait)) => return Next::Bytes(0, self.look.get()),
                Ok(Some(_)) | Err(_) => return Next::Corrupt,
            };
            let (piece, n) = to.take(n);
            node.copy(n);
            node.kernel(peer, |kernel| {
                for (at, byte) in kernel.waiting.drain(..n).enumerate() {
                    // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
                    unsafe { piece.add(at).write(byte) };
                }
            });
            self.receiver.count_taken(n as u64);
            return Next::Bytes(n, self.look.get());
        }
    }
}
