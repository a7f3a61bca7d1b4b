//! Active Messages: the connections of `ringlet_core::active`, a request's handler that replies, and the rules that must hold.

use std::cell::RefCell;

use ringlet_core::active::{
    Arguments, Call, Connection, Delivered, Gate, Head, Host, Kind, Memory, Message, NoReply,
    Queue, Returned, Status, layout::SLOT_BYTES, message::TAG_ALL,
};
use ringlet_core::layout::{LINE_BYTES, WANT_EVENT};
use ringlet_core::mailbox::Inbox;
use ringlet_core::sync::{AtomicU64, Ordering::Relaxed};

use crate::cluster::{Context, Program, Step};
use crate::from_us;
use crate::ledger::{Ledger, Violation};
use crate::memory::{Block, Node};
use crate::profile::RingSizes;
use crate::rings::{Pattern, Traffic};

/// Requests under way between two nodes: of few nodes, and of many.
pub const DEEP: usize = 16;
pub const SHALLOW: usize = 2;

/// A block's slots hold those of two queues; its data are buffers, then the memory segment that this peer may store to.
pub fn sizes(depth: usize, longest: usize) -> RingSizes {
    let slots = 2 * depth * SLOT_BYTES / LINE_BYTES;
    let data_bytes = (2 * depth * longest).next_power_of_two().max(256);
    RingSizes { slots, hot_slots: 4, data_bytes, hot_data_bytes: 64 }
}

/// One end's view of a connection's memory.
struct End<'a, const DEPTH: usize> {
    node: &'a Node,
    peer: usize,
    /// What is here for the peer, and where it has what is there for us.
    block: Block,
    remote: Block,
    /// Bytes of each slot that was written last, and whether a buffer was.
    written: RefCell<(usize, bool)>,
}

fn place<const DEPTH: usize>(queue: Queue, slot: usize) -> usize {
    (queue as usize * DEPTH + slot) * SLOT_BYTES
}

impl<'a, const DEPTH: usize> End<'a, DEPTH> {
    fn new(node: &'a Node, peer: usize) -> End<'a, DEPTH> {
        let (block, remote) = (Block::new(node.sizes, peer), Block::new(node.sizes, node.id));
        End { node, peer, block, remote, written: RefCell::default() }
    }

    fn buffer_bytes(&self) -> usize {
        self.node.sizes.data_bytes / 4 / DEPTH
    }

    fn buffer(&self, block: Block, queue: Queue, buffer: usize) -> usize {
        block.data() + (queue as usize * DEPTH + buffer % DEPTH) * self.buffer_bytes()
    }

    /// Where a request's bytes are stored: no two that are under way lie in the same place.
    fn stored(&self, number: u32) -> usize {
        let half = self.node.sizes.data_bytes / 2;
        half + number as usize % DEPTH * (half / DEPTH)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.node.area.at(at)
    }

    fn copy_out(&self, at: usize, to: &mut [u8]) {
        self.node.copy(to.len());
        // SAFETY: `to` is valid for its length.
        unsafe { self.node.area.read(at, to.as_mut_ptr(), to.len()) };
    }
}

impl<const DEPTH: usize> Memory for End<'_, DEPTH> {
    const DEPTH: usize = DEPTH;

    fn stamp(&self, queue: Queue, slot: usize) -> u64 {
        self.word(self.block.incoming() + place::<DEPTH>(queue, slot)).load(Relaxed)
    }
    fn read(&self, queue: Queue, slot: usize, to: &mut [u8]) {
        self.copy_out(self.block.incoming() + place::<DEPTH>(queue, slot) + 8, to);
    }
    unsafe fn read_buffer(&self, queue: Queue, buffer: usize, to: *mut u8, n: usize) {
        self.node.copy(n);
        let n = n.min(self.buffer_bytes());
        // SAFETY: `to` has room for `n` bytes by our own contract, and no more are written.
        unsafe { self.node.area.read(self.buffer(self.block, queue, buffer), to, n) };
    }
    fn credit(&self, queue: Queue) -> u64 {
        self.word(self.block.credit() + 8 * queue as usize).load(Relaxed)
    }
    fn written(&self, queue: Queue, slot: usize, to: &mut [u8]) {
        self.copy_out(self.block.outgoing() + place::<DEPTH>(queue, slot) + 8, to);
    }

    fn write(&self, queue: Queue, slot: usize, bytes: &[u8]) {
        let at = self.block.outgoing() + place::<DEPTH>(queue, slot) + 8;
        // SAFETY: `bytes` is valid for its length.
        unsafe { self.node.area.write(at, bytes.as_ptr(), bytes.len()) };
        self.written.borrow_mut().0 = bytes.len();
    }
    fn write_buffer(&self, queue: Queue, buffer: usize, bytes: &[u8]) {
        self.node.store_bytes(self.peer, self.buffer(self.remote, queue, buffer), bytes);
        self.written.borrow_mut().1 = true;
    }
    fn publish(&self, queue: Queue, slot: usize, stamp: u64) {
        let at = place::<DEPTH>(queue, slot);
        let own = self.block.outgoing() + at;
        self.word(own).store(stamp, Relaxed);
        let (used, buffer) = self.written.take();
        let mut line = [0; SLOT_BYTES];
        // SAFETY: `line` has room for a slot.
        unsafe { self.node.area.read(own, line.as_mut_ptr(), SLOT_BYTES) };
        self.node.publish(self.peer, self.remote.incoming() + at, &line[..8 + used], buffer);
    }
    fn give_credit(&self, queue: Queue, taken: u64) {
        // A credit says that the reply is there already.
        self.node.barrier();
        let words = [Queue::Request, Queue::Reply]
            .map(|queue| self.word(self.block.given_credit() + 8 * queue as usize));
        words[queue as usize].store(taken, Relaxed);
        self.node.give_credit(self.peer, words.map(|word| word.load(Relaxed)));
    }
}

/// What handlers see.
struct Handlers<'a, 'b, const DEPTH: usize> {
    end: &'a End<'b, DEPTH>,
    nodes: usize,
    ledger: RefCell<&'a mut Ledger>,
    buffer: RefCell<Vec<u8>>,
    /// Returned messages: the number in their head.
    returned: RefCell<u64>,
}

const REQUEST: u8 = 1;
const REPLY: u8 = 2;

impl<const DEPTH: usize> Handlers<'_, '_, DEPTH> {
    fn rule(&self, holds: bool, rule: &str) {
        if !holds {
            self.ledger.borrow_mut().violate(Violation::Rule(rule.into()));
        }
    }

    /// The message's bytes, wherever they came.
    fn bytes(&self, call: &Call<End<'_, DEPTH>>) -> Vec<u8> {
        let head = call.head();
        match head.kind {
            Kind::Short => {
                head.arguments.words().iter().flat_map(|word| word.to_le_bytes()).collect()
            }
            Kind::Stored => {
                let mut bytes = vec![0; head.len];
                // SAFETY: `bytes` is valid for its length.
                unsafe {
                    let at = self.end.block.data() + head.offset as usize;
                    self.end.node.area.read(at, bytes.as_mut_ptr(), bytes.len());
                }
                bytes
            }
            _ => self.buffer.borrow()[..head.len].to_vec(),
        }
    }
}

// SAFETY: `buffer` is as long as a medium message may be by `admit`ted heads (`BUFFER_BYTES`), and is not resized meanwhile; a stored
// message's bytes are in the node's memory, to which its segment's size confines them, and nobody writes to the address that is returned.
unsafe impl<'c, const DEPTH: usize> Host<End<'c, DEPTH>> for Handlers<'_, 'c, DEPTH> {
    fn gate(&self) -> Gate {
        let segment = self.end.node.sizes.data_bytes;
        Gate {
            tag: TAG_ALL,
            segment,
            generation: 0,
            handlers: [1 << REQUEST | 1 << REPLY, 0, 0, 0],
        }
    }

    fn place(&self, _: &Head) -> *mut u8 {
        self.buffer.borrow_mut().as_mut_ptr()
    }

    fn run(&self, call: &Call<End<'c, DEPTH>>) {
        let (here, there) = (self.end.node.id, self.end.peer);
        let bytes = self.bytes(call);
        if call.is_reply() {
            self.ledger.borrow_mut().received(there + self.nodes, here, &bytes);
            let message = message(Kind::Short, REPLY, &[], &[]);
            let refused = call.reply(&message) == Err(NoReply::InReply);
            return self.rule(refused, "a reply's handler could communicate");
        }
        let ledger = &mut *self.ledger.borrow_mut();
        ledger.received(there, here, &bytes);
        ledger.plan(1);
        let number = ledger.send(here + self.nodes, there);
        let mut answer = [0; 8];
        let n = ledger.size(here + self.nodes, there, number).min(answer.len());
        ledger.fill(here + self.nodes, there, number, &mut answer[..n]);
        let first = call.reply(&message(Kind::Medium, REPLY, &[], &answer[..n]));
        let second = call.reply(&message(Kind::Short, REPLY, &[], &[]));
        if first.is_err() || second != Err(NoReply::Twice) {
            ledger.violate(Violation::Rule("a handler may reply once".into()));
        }
    }

    fn returned(&self, _: &Returned) {
        *self.returned.borrow_mut() += 1;
    }
}

fn message<'a>(kind: Kind, handler: u8, words: &[u32], bytes: &'a [u8]) -> Message<'a> {
    let arguments = Arguments::new(words).unwrap_or(Arguments::NONE);
    let head = Head { kind, handler, arguments, tag: TAG_ALL, len: bytes.len(), offset: 0 };
    Message { head, bytes }
}

struct Peer {
    id: usize,
    connection: Connection,
    to_send: u32,
    open: bool,
}

/// The program of a node.
pub struct Active<const DEPTH: usize> {
    traffic: Traffic,
    peers: Vec<Peer>,
    /// Where each node's connection is.
    places: Vec<Option<usize>>,
    next: usize,
    /// Requests to be sent to any of them.
    left: u64,
    inbox: Inbox,
    armed: bool,
    scratch: Vec<u8>,
}

impl<const DEPTH: usize> Active<DEPTH> {
    pub fn new(traffic: Traffic, node: usize) -> Active<DEPTH> {
        let peer =
            |(id, to_send)| Peer { id, connection: Connection::default(), to_send, open: true };
        let mut peers: Vec<Peer> = traffic.peers(node).into_iter().map(peer).collect();
        // Who answers by replies has no requests of its own.
        if traffic.pattern == Pattern::PingPong && node % 2 == 1 {
            peers.iter_mut().for_each(|peer| peer.to_send = 0);
        }
        let mut places = vec![None; traffic.nodes];
        for (at, peer) in peers.iter().enumerate() {
            places[peer.id] = Some(at);
        }
        let scratch = vec![0; ringlet_core::active::layout::BUFFER_BYTES];
        let left = peers.iter().map(|peer| u64::from(peer.to_send)).sum();
        let (next, inbox, armed) = (0, Inbox::default(), false);
        Active { traffic, peers, places, next, left, inbox, armed, scratch }
    }

    /// Runs the handlers of what a peer has sent: a reply or a request.
    fn deliver(&mut self, cx: &mut Context, at: usize) -> bool {
        let Peer { id, connection, .. } = &self.peers[at];
        let (here, there) = (cx.node.id, *id);
        let end = End::<DEPTH>::new(cx.node, there);
        let handlers = Handlers {
            end: &end,
            nodes: self.traffic.nodes,
            ledger: RefCell::new(cx.ledger),
            buffer: RefCell::new(std::mem::take(&mut self.scratch)),
            returned: RefCell::default(),
        };
        cx.node.work(from_us(cx.profile.node.call_us));
        let mut delivered = connection.deliver(&end, Queue::Reply, &handlers);
        let mut answered = false;
        if delivered == Delivered::Nothing {
            delivered = connection.deliver(&end, Queue::Request, &handlers);
            answered = delivered == Delivered::One;
        }
        handlers.rule(*handlers.returned.borrow() == 0, "a message came back from a living peer");
        self.scratch = handlers.buffer.take();
        if delivered == Delivered::Corrupt {
            cx.ledger.violate(Violation::Corrupt { from: there, to: here });
        }
        if answered && self.traffic.mailbox() {
            cx.node.announce(there);
        }
        delivered == Delivered::One
    }

    fn receive(&mut self, cx: &mut Context) -> bool {
        const AT_ONCE: usize = 8;
        let look = from_us(cx.profile.node.look_us);
        let mut received = false;
        if self.traffic.mailbox() {
            for _ in 0..AT_ONCE {
                cx.node.work(look);
                let Active { inbox, peers, places, .. } = self;
                let has = |id: usize| {
                    let peer = places[id].map(|at| &peers[at]).filter(|peer| peer.open);
                    peer.is_some_and(|peer| {
                        peer.connection.ready(&End::<DEPTH>::new(cx.node, peer.id))
                    })
                };
                let Some(id) = inbox.poll([cx.node.ready()], places.len(), has) else { break };
                received |= self.places[id].is_some_and(|at| self.deliver(cx, at));
            }
            return received;
        }
        // A look at each queue of each peer (SMiLE, figure 6).
        let open = self.peers.iter().filter(|peer| peer.open).count();
        cx.node.work(look * 2 * open as u64);
        for at in 0..self.peers.len() {
            let Peer { id, connection, open, .. } = &self.peers[at];
            if *open && connection.ready(&End::<DEPTH>::new(cx.node, *id)) {
                received |= self.deliver(cx, at);
            }
        }
        received
    }

    fn may_send(&self, cx: &mut Context, peer: &Peer) -> bool {
        let waiting =
            self.traffic.pattern == Pattern::PingPong && peer.connection.outstanding() > 0;
        let may = peer.open
            && peer.to_send > 0
            && !waiting
            && peer.connection.has_room(&End::<DEPTH>::new(cx.node, peer.id));
        Self::check_credit(cx, peer);
        may
    }

    /// What may still be sent is never negative, nor more than there are places.
    fn check_credit(cx: &mut Context, peer: &Peer) {
        let outstanding = peer.connection.outstanding();
        if outstanding > DEPTH as u64 {
            let rule = format!("{} of {DEPTH} requests outstanding", outstanding as i64);
            cx.ledger.violate(Violation::Rule(rule));
        }
    }

    fn send(&mut self, cx: &mut Context) -> bool {
        if self.left == 0 {
            return false;
        }
        let count = self.peers.len();
        let mut turns = (0..count).map(|turn| (self.next + turn) % count);
        let Some(at) = turns.find(|&at| self.may_send(cx, &self.peers[at])) else { return false };
        self.next = at + 1;
        let peer = &mut self.peers[at];
        let (here, there) = (cx.node.id, peer.id);
        let end = End::<DEPTH>::new(cx.node, there);
        peer.to_send -= 1;
        self.left -= 1;
        let number = cx.ledger.send(here, there);
        let mut bytes = vec![0; cx.ledger.size(here, there, number)];
        cx.ledger.fill(here, there, number, &mut bytes);
        cx.node.work(from_us(cx.profile.node.call_us));
        let mut words = Vec::new();
        let mut request = if bytes.len() <= 4 * ringlet_core::active::ARGUMENTS
            && bytes.len().is_multiple_of(4)
        {
            let word =
                |piece: &[u8]| piece.iter().rev().fold(0, |word, &b| word << 8 | u32::from(b));
            words.extend(bytes.chunks_exact(4).map(word));
            message(Kind::Short, REQUEST, &words, &[])
        } else if bytes.len() <= end.buffer_bytes() {
            message(Kind::Medium, REQUEST, &[], &bytes)
        } else {
            // The bytes go where they belong, and the message behind them.
            let offset = end.stored(number);
            cx.node.store_bytes(there, end.remote.data() + offset, &bytes);
            cx.node.barrier();
            let mut stored = message(Kind::Stored, REQUEST, &[], &[]);
            (stored.head.len, stored.head.offset) = (bytes.len(), offset as u64);
            stored
        };
        request.head.tag = TAG_ALL;
        if peer.connection.request(&end, &request).is_err() {
            cx.ledger.violate(Violation::Rule("there was room, and it is full".into()));
        }
        Self::check_credit(cx, peer);
        if self.traffic.mailbox() {
            cx.node.announce(there);
        }
        true
    }
}

impl<const DEPTH: usize> Program for Active<DEPTH> {
    fn step(&mut self, cx: &mut Context) -> Step {
        cx.node.copying.set(self.traffic.copy);
        let received = self.receive(cx);
        if self.send(cx) || received {
            self.armed = false;
            return Step::Again;
        }
        // Without a mailbox there is nothing to be interrupted by (SMiLE §3.2).
        if !self.traffic.sleep || !self.traffic.mailbox() {
            return Step::Poll;
        }
        self.armed = !self.armed;
        if !self.armed {
            return Step::Sleep;
        }
        cx.node.mail_wish().want(WANT_EVENT);
        Step::Again
    }

    /// What the peer has not served comes back, and so do the replies that it has not taken.
    fn lost(&mut self, cx: &mut Context, peer: usize) {
        self.armed = false;
        let Some(at) = self.places[peer] else { return };
        let Peer { connection, to_send, open, .. } = &mut self.peers[at];
        if !std::mem::replace(open, false) {
            return;
        }
        let (here, nodes) = (cx.node.id, self.traffic.nodes);
        let end = End::<DEPTH>::new(cx.node, peer);
        cx.node.copying.set(false);
        let (mut requests, mut replies) = (0, 0);
        connection.undelivered(&end, Status::Unreachable, |returned| {
            *if returned.reply { &mut replies } else { &mut requests } += 1;
        });
        for (lane, count) in [(here, requests), (here + nodes, replies)] {
            let sent = cx.ledger.sent(lane, peer);
            cx.ledger.return_from(lane, peer, sent.saturating_sub(count));
        }
        let given_up = u64::from(std::mem::take(to_send));
        self.left -= given_up;
        cx.ledger.abandon(given_up);
    }

    fn reconnected(&mut self, cx: &mut Context, peer: usize) {
        self.armed = false;
        let Some(at) = self.places[peer] else { return };
        let fresh = Active::<DEPTH>::new(self.traffic.clone(), cx.node.id);
        if let Some(again) = fresh.peers.into_iter().find(|again| again.id == peer) {
            cx.ledger.plan(u64::from(again.to_send));
            self.left += u64::from(again.to_send);
            self.peers[at] = again;
        }
    }

    fn planned(&self) -> u64 {
        self.left
    }
}
