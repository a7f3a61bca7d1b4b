//! A node's memory, and the rings in it: reads are local, what is for the other end becomes stores in the node's outbox.
//!
//! A node's memory begins with its mailbox: the interrupt flag of whoever reads it, and which lanes may hold something. Then comes a
//! block for each other node, at the same offset in every node's memory:
//!
//! ```text
//!    0  interrupt flags: of the receiver (towards this peer), of the sender
//!   64  the credit that this peer gives us, which it stores
//!   80  the credit that we give it: our own copy
//!  128  slots, then data, which this peer stores and we read
//!       slots, then data, which we store at the peer: our own copy
//! ```
//!
//! Reflected writes go to the writer's block in all nodes' memory, its own included: a word where the data begin.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};

use ringlet_core::layout::*;
use ringlet_core::memory::Area;
use ringlet_core::ring::RingMemory;
use ringlet_core::sync::AtomicU64;
use ringlet_core::wait::Wish;

use crate::Time;
use crate::moving::Incoming;
use crate::profile::{Adapter, RingSizes};

/// Zeroed pages; those never touched cost nothing.
pub(crate) struct Memory {
    /// A page longer, so that it can begin at one: zeroed memory of a larger alignment would be written to.
    words: Vec<u64>,
}

const PAGE_BYTES: usize = 4096;

impl Memory {
    pub fn new(bytes: usize) -> Memory {
        Memory { words: vec![0; (bytes + PAGE_BYTES).div_ceil(size_of::<u64>())] }
    }

    /// Only for as long as the memory lives.
    pub fn area(&mut self, bytes: usize) -> Area {
        let base = self.words.as_mut_ptr().cast::<u8>();
        let skipped = base.align_offset(PAGE_BYTES);
        assert!(skipped + bytes <= size_of_val(&self.words[..]));
        // SAFETY: within the vector, which nobody else touches and which stays where it is until it is dropped; users keep to the
        // memory's life (`Cluster` owns both).
        unsafe { Area::new(base.add(skipped), bytes) }
    }
}

/// The mailbox: its interrupt flag, and the bitmap.
pub(crate) const WANT_MAIL: usize = 0;
const READY: usize = 128;
const BLOCKS: usize = 512;
const _: () = assert!(READY + size_of::<Ready>() <= BLOCKS);

/// Where the parts of a block lie.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    base: usize,
    sizes: RingSizes,
}

impl Block {
    pub fn new(sizes: RingSizes, peer: usize) -> Block {
        Block { base: BLOCKS + peer * Block::bytes(sizes), sizes }
    }

    pub fn bytes(sizes: RingSizes) -> usize {
        128 + 2 * (sizes.slots * LINE_BYTES + sizes.data_bytes)
    }

    /// Of a node's whole memory.
    pub fn memory_bytes(sizes: RingSizes, nodes: usize) -> usize {
        BLOCKS + nodes * Block::bytes(sizes)
    }

    pub fn start(&self) -> usize {
        self.base
    }
    pub fn want_data(&self) -> usize {
        self.base
    }
    pub fn want_room(&self) -> usize {
        self.base + 16
    }
    pub fn credit(&self) -> usize {
        self.base + 64
    }
    pub fn given_credit(&self) -> usize {
        self.base + 80
    }
    pub fn incoming(&self) -> usize {
        self.base + 128
    }
    pub fn data(&self) -> usize {
        self.incoming() + self.sizes.slots * LINE_BYTES
    }
    pub fn outgoing(&self) -> usize {
        self.data() + self.sizes.data_bytes
    }
}

/// The target of a write that the hub reflects to all nodes.
pub(crate) const EVERYONE: usize = usize::MAX;

/// What is stored remotely.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Bytes,
    /// Replaces what was stored there before, never what was stored later.
    Credit,
    /// Not stored: the adapter looks whether the flag there is armed, and interrupts if so (SCILAN §3.2).
    StimulateReceiver,
    StimulateSender,
    /// Remote enqueue (SMiLE §4): the adapter notes the sender's lane in the mailbox, then looks as above.
    Announce,
    /// Bytes of the kernel's connection, which are not in this memory; `at` counts them.
    Kernel,
}

#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub to: usize,
    pub at: usize,
    pub kind: Kind,
    pub len: u8,
    pub dma: bool,
    /// The processor has done its part.
    pub paid: bool,
    pub body: [u8; LINE_BYTES],
}

/// What a node's processor has to do, in order.
pub(crate) enum Work {
    Processor(Time),
    /// Copying so many bytes within the node.
    Copy(usize),
    /// Setting the adapter's own engine up.
    Engine,
    Store(Store),
    /// Waiting for the answers to all stores.
    Barrier,
}

#[derive(Default)]
pub(crate) struct Outbox {
    pub work: VecDeque<Work>,
    /// Stores since the last barrier that something later must not overtake.
    unsettled: bool,
}

/// What a program on a node sees of it: memory, outbox, rules of the adapter.
pub struct Node {
    pub id: usize,
    pub(crate) area: Area,
    pub(crate) outbox: RefCell<Outbox>,
    /// What the kernel has for us from each peer.
    pub(crate) kernel: RefCell<BTreeMap<usize, Incoming>>,
    pub(crate) sizes: RingSizes,
    packet_bytes: usize,
    dma_from_bytes: usize,
    /// Order is the sender's business.
    barriers: bool,
    /// Does what is received cost a copy?
    pub copying: Cell<bool>,
}

impl Node {
    pub(crate) fn new(id: usize, area: Area, sizes: RingSizes, adapter: &Adapter) -> Node {
        Node {
            id,
            area,
            outbox: RefCell::default(),
            kernel: RefCell::default(),
            sizes,
            packet_bytes: adapter.packet_bytes,
            dma_from_bytes: adapter.dma_from_bytes,
            barriers: !adapter.ordered && adapter.barrier,
            copying: Cell::new(true),
        }
    }

    fn end(&self, peer: usize, local: usize, credit: usize) -> End<'_> {
        let remote = Block::new(self.sizes, self.id);
        End { node: self, peer, local, credit, remote }
    }

    /// The ring to `peer`, as its sender sees it.
    pub fn sender(&self, peer: usize) -> impl RingMemory + '_ {
        let block = Block::new(self.sizes, peer);
        self.end(peer, block.outgoing(), block.credit())
    }

    /// The ring from `peer`, as its receiver sees it.
    pub fn receiver(&self, peer: usize) -> impl RingMemory + '_ {
        let block = Block::new(self.sizes, peer);
        self.end(peer, block.incoming(), block.given_credit())
    }

    /// The interrupt flags of this node towards `peer`.
    pub fn data_wish(&self, peer: usize) -> Wish<'_> {
        self.wish(Block::new(self.sizes, peer).want_data())
    }
    pub fn room_wish(&self, peer: usize) -> Wish<'_> {
        self.wish(Block::new(self.sizes, peer).want_room())
    }
    /// Both words lie here: this node's adapter grants it, when it is stimulated.
    pub fn wish(&self, at: usize) -> Wish<'_> {
        Wish { wished: self.area.at(at), granted: self.area.at(at + 8) }
    }

    /// Behind all stores so far, lets the peer's adapter look whether its receiver (for news) or sender (for room) sleeps.
    pub fn stimulate_receiver(&self, peer: usize) {
        self.stimulate(peer, Block::new(self.sizes, self.id).want_data(), Kind::StimulateReceiver);
    }
    pub fn stimulate_sender(&self, peer: usize) {
        self.stimulate(peer, Block::new(self.sizes, self.id).want_room(), Kind::StimulateSender);
    }

    /// Behind all stores so far, says in the peer's mailbox that there is something from us.
    pub fn announce(&self, peer: usize) {
        self.stimulate(peer, WANT_MAIL, Kind::Announce);
    }

    /// This node's mailbox, and the interrupt flag of its reader.
    pub fn ready(&self) -> &Ready {
        self.area.at(READY)
    }
    pub fn mail_wish(&self) -> Wish<'_> {
        self.wish(WANT_MAIL)
    }

    /// Writes a word that all nodes have, in the order in which the hub takes it among all others'.
    pub fn reflect(&self, word: u64) {
        let at = Block::new(self.sizes, self.id).data();
        self.store(EVERYONE, at, Kind::Bytes, &word.to_le_bytes());
    }

    /// What `writer` has reflected, as far as it has come here.
    pub fn reflected(&self, writer: usize) -> &AtomicU64 {
        self.area.at(Block::new(self.sizes, writer).data())
    }

    fn stimulate(&self, peer: usize, at: usize, kind: Kind) {
        self.barrier();
        self.store(peer, at, kind, &[0; 4]);
    }

    /// What was stored before arrives before what is stored later.
    pub fn barrier(&self) {
        let mut outbox = self.outbox.borrow_mut();
        if self.barriers && std::mem::take(&mut outbox.unsettled) {
            outbox.work.push_back(Work::Barrier);
        }
    }

    /// Stores raw bytes at a place in the peer's memory, a packet for each line: no ring, no flow control.
    pub fn store_bytes(&self, peer: usize, at: usize, bytes: &[u8]) {
        let dma = self.dma_from_bytes > 0 && bytes.len() >= self.dma_from_bytes;
        if dma {
            self.outbox.borrow_mut().work.push_back(Work::Engine);
        }
        let (mut at, mut rest) = (at, bytes);
        while !rest.is_empty() {
            let n = (self.packet_bytes - at % self.packet_bytes).min(rest.len());
            let (piece, more) = rest.split_at(n);
            self.post(peer, at, Kind::Bytes, piece, dma);
            (at, rest) = (at + n, more);
        }
    }

    /// Sends bytes of the kernel's connection, the first of which is its byte number `at`.
    pub(crate) fn write_kernel(&self, peer: usize, at: u64, bytes: &[u8]) {
        for (number, piece) in bytes.chunks(self.packet_bytes).enumerate() {
            let at = at as usize + number * self.packet_bytes;
            self.post(peer, at, Kind::Kernel, piece, false);
        }
    }

    pub(crate) fn kernel<T>(&self, peer: usize, what: impl FnOnce(&mut Incoming) -> T) -> T {
        what(self.kernel.borrow_mut().entry(peer).or_default())
    }

    /// Stores a slot whose first word announces it: a packet, or some, that word's last. `more` was written before and has to arrive
    /// before.
    pub(crate) fn publish(&self, peer: usize, at: usize, slot: &[u8], more: bool) {
        let first = slot.len().min(self.packet_bytes);
        self.store_bytes(peer, at + first, &slot[first..]);
        if more || slot.len() > first {
            self.barrier();
        }
        self.store(peer, at, Kind::Bytes, &slot[..first]);
    }

    pub(crate) fn give_credit(&self, peer: usize, words: [u64; 2]) {
        let at = Block::new(self.sizes, self.id).credit();
        self.store(peer, at, Kind::Credit, words.map(u64::to_le_bytes).as_flattened());
    }

    fn store(&self, peer: usize, at: usize, kind: Kind, bytes: &[u8]) {
        self.post(peer, at, kind, bytes, false);
    }

    fn post(&self, to: usize, at: usize, kind: Kind, bytes: &[u8], dma: bool) {
        let mut body = [0; LINE_BYTES];
        body[..bytes.len()].copy_from_slice(bytes);
        let len = bytes.len() as u8;
        let mut outbox = self.outbox.borrow_mut();
        outbox.work.push_back(Work::Store(Store { to, at, kind, len, dma, paid: dma, body }));
        outbox.unsettled = true;
    }

    pub fn work(&self, time: Time) {
        let work = &mut self.outbox.borrow_mut().work;
        match work.back_mut() {
            Some(Work::Processor(last)) => *last += time,
            _ => work.push_back(Work::Processor(time)),
        }
    }

    pub(crate) fn copy(&self, bytes: usize) {
        let work = &mut self.outbox.borrow_mut().work;
        match work.back_mut() {
            _ if !self.copying.get() => {}
            Some(Work::Copy(last)) => *last += bytes,
            _ => work.push_back(Work::Copy(bytes)),
        }
    }
}

/// One end of a ring.
struct End<'a> {
    node: &'a Node,
    peer: usize,
    /// Slots and data as this end sees them: what arrived, or the copy of what it stored.
    local: usize,
    credit: usize,
    /// The other end's block for us.
    remote: Block,
}

impl End<'_> {
    fn data(&self) -> usize {
        self.node.sizes.slots * LINE_BYTES
    }
}

impl RingMemory for End<'_> {
    fn header(&self, slot: usize) -> &AtomicU64 {
        self.node.area.at(self.local + slot * LINE_BYTES)
    }
    fn credit_slots(&self) -> &AtomicU64 {
        self.node.area.at(self.credit)
    }
    fn credit_data(&self) -> &AtomicU64 {
        self.node.area.at(self.credit + 8)
    }
    fn ring_bytes(&self) -> usize {
        self.node.sizes.data_bytes
    }
    fn slot_count(&self) -> usize {
        self.node.sizes.slots
    }
    fn hot_slot_count(&self) -> usize {
        self.node.sizes.hot_slots
    }
    fn hot_data_bytes(&self) -> u64 {
        self.node.sizes.hot_data_bytes as u64
    }

    fn publish(&self, slot: usize, header: u64) {
        use ringlet_core::sync::Ordering::Relaxed;
        self.header(slot).store(header, Relaxed);
        let flags = header >> LEN_BITS & ((1 << FLAG_BITS) - 1);
        let payload =
            if flags & FLAG_DATA != 0 { 8 } else { header as usize & ((1 << LEN_BITS) - 1) };
        let mut line = [0; LINE_BYTES];
        // SAFETY: `line` has room for a line, and a slot is one.
        unsafe {
            self.node.area.read(self.local + slot * LINE_BYTES, line.as_mut_ptr(), LINE_BYTES)
        };
        let at = self.remote.incoming() + slot * LINE_BYTES;
        self.node.publish(self.peer, at, &line[..8 + payload], flags & FLAG_DATA != 0);
    }

    fn give_credit(&self, slots: u64, data: Option<u64>) {
        use ringlet_core::sync::Ordering::Relaxed;
        self.credit_slots().store(slots, Relaxed);
        if let Some(data) = data {
            self.credit_data().store(data, Relaxed);
        }
        self.node.give_credit(self.peer, [slots, self.credit_data().load(Relaxed)]);
    }

    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize) {
        // SAFETY: `from` is valid for `n` bytes by our own contract. `publish` sends them.
        unsafe { self.node.area.write(self.local + slot * LINE_BYTES + at, from, n) };
    }
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize) {
        self.node.copy(n);
        // SAFETY: `to` has room for `n` bytes by our own contract.
        unsafe { self.node.area.read(self.local + slot * LINE_BYTES + at, to, n) };
    }
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize) {
        // SAFETY: `from` is valid for `n` bytes by our own contract.
        let bytes = unsafe { std::slice::from_raw_parts(from, n) };
        // SAFETY: a slice of `n` bytes.
        unsafe { self.node.area.write(self.local + self.data() + at, from, n) };
        self.node.store_bytes(self.peer, self.remote.data() + at, bytes);
    }
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize) {
        self.node.copy(n);
        // SAFETY: `to` has room for `n` bytes by our own contract.
        unsafe { self.node.area.read(self.local + self.data() + at, to, n) };
    }
}
