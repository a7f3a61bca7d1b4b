//! A stream that moves between the kernel's connection and the ring (`ringlet_core::handover`), back and forth as the seed has it.
//!
//! The kernel's bytes are packets on the same links, put in order as TCP does, and any of them may come before or after what the
//! ring holds. The rule of the handover needs that a mark is there before a kernel byte to which it gives a meaning: so the sender
//! lets nothing overtake it.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use ringlet_core::handover::{Head, Receiving, Seen, Sending, Step};
use ringlet_core::memory::Buffers;
use ringlet_core::record::RingMemory;
use ringlet_core::ring::{Next, Rx, Tx};

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
    sending: Sending,
    receiving: Receiving,
    /// Bytes ever written to the kernel's connection, and ever taken out of it.
    written: Cell<u64>,
    consumed: Cell<u64>,
    /// How often something was sent.
    turns: Cell<u64>,
}

/// Bytes that go through the kernel at once: few, so that the path changes within messages.
const PIECE_BYTES: usize = 256;

impl Moving {
    pub fn writable(&self, memory: &impl RingMemory) -> bool {
        !self.sending.in_ring() || self.tx.writable(memory)
    }

    pub fn push(
        &self,
        node: &Node,
        peer: usize,
        memory: &impl RingMemory,
        from: &mut Buffers,
    ) -> usize {
        let turn = self.turns.replace(self.turns.get() + 1);
        let moved = match mix((node.id as u64) << 32 | turn) % 8 {
            0..3 => self.sending.start(&self.tx, memory, self.written.get()),
            3 => self.sending.back(&self.tx, memory, self.written.get()),
            4 if self.sending.in_ring() => {
                self.write(node, peer, b"!");
                false
            }
            _ => false,
        };
        if moved {
            node.barrier();
        }
        if self.sending.in_ring() {
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
        let mut look = false;
        loop {
            let seen = Seen {
                ended: false,
                consumed: self.consumed.get(),
                waiting: node.kernel(peer, |kernel| kernel.waiting.len() as u64),
                ring: match self.rx.mark(memory) {
                    Some(mark) => Head::Mark(mark),
                    None if self.rx.ready(memory) => Head::Bytes,
                    None => Head::Empty,
                },
            };
            let n = match self.receiving.next(&seen) {
                Step::Pop => match self.rx.pop(memory, to) {
                    Next::Bytes(n, more) => return Next::Bytes(n, more || look),
                    _ => return Next::Corrupt,
                },
                Step::PassMark => {
                    look |= self.rx.pass_mark(memory);
                    continue;
                }
                Step::Wait => return Next::Bytes(0, look),
                Step::End | Step::Broken => return Next::Corrupt,
                Step::Discard(n) => {
                    node.kernel(peer, |kernel| kernel.waiting.drain(..n as usize).count());
                    self.consumed.set(self.consumed.get() + n);
                    continue;
                }
                Step::Read(n) => n as usize,
            };
            let (piece, n) = to.take(n);
            node.copy(n);
            node.kernel(peer, |kernel| {
                for (at, byte) in kernel.waiting.drain(..n).enumerate() {
                    // SAFETY: a piece of the program's buffers, valid for `n` bytes (contract of `Buffers`).
                    unsafe { piece.add(at).write(byte) };
                }
            });
            self.consumed.set(self.consumed.get() + n as u64);
            return Next::Bytes(n, look);
        }
    }
}
