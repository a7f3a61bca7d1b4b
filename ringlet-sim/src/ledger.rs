//! What was sent, and what has become of it: every message is known by its sender, its receiver and its number, and its bytes
//! follow from these and the seed.

use std::fmt;

use ringlet_core::layout::LINE_BYTES;

/// What must not happen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Violation {
    /// Neither received nor returned.
    Lost {
        from: usize,
        to: usize,
        number: u32,
    },
    /// Received another one than the one that was due.
    Doubled {
        from: usize,
        to: usize,
        number: u32,
        due: u32,
    },
    OutOfOrder {
        from: usize,
        to: usize,
        number: u32,
        due: u32,
    },
    /// Other bytes than were sent.
    Damaged {
        from: usize,
        to: usize,
        number: u32,
    },
    /// The ring found something in its memory that no ringlet writes.
    Corrupt {
        from: usize,
        to: usize,
    },
    /// Nothing can happen any more, or nothing has for long, and messages are still due.
    Stuck {
        messages: u64,
    },
    /// A rule of a protocol above.
    Rule(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::Lost { from, to, number } => {
                write!(f, "message {number} from node {from} to node {to} is lost")
            }
            Violation::Doubled { from, to, number, due } => {
                write!(
                    f,
                    "message {number} from node {from} to node {to} came again; {due} was due"
                )
            }
            Violation::OutOfOrder { from, to, number, due } => {
                write!(f, "message {number} from node {from} to node {to} came before {due}")
            }
            Violation::Damaged { from, to, number } => {
                write!(f, "message {number} from node {from} to node {to} is damaged")
            }
            Violation::Corrupt { from, to } => {
                write!(f, "the ring from node {from} to node {to} is corrupt")
            }
            Violation::Stuck { messages } => write!(f, "stuck with {messages} messages to go"),
            Violation::Rule(rule) => f.write_str(rule),
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Pair {
    sent: u32,
    received: u32,
    /// Returned to the sender; nothing more will be received.
    closed: bool,
}

/// Lanes are told apart by adding `lane * nodes` to the sender: what comes in one of them comes in order.
pub struct Ledger {
    nodes: usize,
    seed: u64,
    size: usize,
    /// Sizes vary from 1 to `size`.
    mixed: bool,
    pairs: Vec<Pair>,
    /// Sent and neither received nor returned; and still to be sent.
    open: u64,
    planned: u64,
    pub(crate) violation: Option<Violation>,
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    pub(crate) returned: u64,
    /// Writes to all nodes, in the hub's order: place and word. Then which of them each node gets next.
    reflected: Vec<(usize, u64)>,
    next_reflected: Vec<usize>,
    /// Who holds the lock.
    holder: Option<usize>,
}

pub(crate) fn mix(mut x: u64) -> u64 {
    // The finaliser of splitmix64.
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

fn first_word(body: &[u8; LINE_BYTES]) -> u64 {
    u64::from_le_bytes(*body.first_chunk().expect("a line is longer"))
}

impl Ledger {
    pub fn new(nodes: usize, lanes: usize, seed: u64, size: usize, mixed: bool) -> Ledger {
        Ledger {
            nodes,
            seed,
            size,
            mixed,
            pairs: vec![Pair::default(); lanes * nodes * nodes],
            open: 0,
            planned: 0,
            violation: None,
            messages: 0,
            bytes: 0,
            returned: 0,
            reflected: Vec::new(),
            next_reflected: vec![0; nodes],
            holder: None,
        }
    }

    fn pair(&mut self, from: usize, to: usize) -> &mut Pair {
        &mut self.pairs[from * self.nodes + to]
    }

    fn identity(&self, from: usize, to: usize, number: u32) -> u64 {
        self.seed ^ mix((from as u64) << 48 | (to as u64) << 32 | u64::from(number))
    }

    /// The length of a message.
    pub fn size(&self, from: usize, to: usize, number: u32) -> usize {
        if !self.mixed {
            return self.size;
        }
        // As many small ones as large ones, on a logarithmic scale.
        let draw = mix(self.identity(from, to, number));
        let bits = draw % (u64::from(self.size.ilog2()) + 1);
        (1 + (mix(draw) & ((2 << bits) - 1)) as usize).min(self.size)
    }

    /// Its bytes.
    pub fn fill(&self, from: usize, to: usize, number: u32, message: &mut [u8]) {
        let identity = self.identity(from, to, number);
        // The number itself comes first, so that a wrong message can be named.
        for (at, piece) in message.chunks_mut(8).enumerate() {
            let word = match at {
                0 => u64::from(number) | mix(identity) << 32,
                _ => mix(identity.wrapping_add(at as u64)),
            };
            piece.copy_from_slice(&word.to_le_bytes()[..piece.len()]);
        }
    }

    pub fn plan(&mut self, messages: u64) {
        self.planned += messages;
    }

    pub fn abandon(&mut self, messages: u64) {
        self.planned -= messages;
    }

    /// The next message's number; it was planned, and counts as sent from now on.
    pub fn send(&mut self, from: usize, to: usize) -> u32 {
        self.planned -= 1;
        self.open += 1;
        let pair = self.pair(from, to);
        pair.sent += 1;
        pair.sent - 1
    }

    /// The number of the message that is due.
    pub fn due(&self, from: usize, to: usize) -> u32 {
        self.pairs[from * self.nodes + to].received
    }

    pub fn received(&mut self, from: usize, to: usize, message: &[u8]) {
        let Pair { sent, received: due, closed } = *self.pair(from, to);
        let mut expected = vec![0; message.len()];
        self.fill(from, to, due, &mut expected);
        if due >= sent || message != expected {
            let mut number = [0; 4];
            let n = message.len().min(4);
            number[..n].copy_from_slice(&message[..n]);
            let number = u32::from_le_bytes(number);
            self.fill(from, to, number, &mut expected);
            let from = from % self.nodes;
            self.violate(match () {
                _ if message != expected => Violation::Damaged { from, to, number: due },
                _ if number < due => Violation::Doubled { from, to, number, due },
                _ => Violation::OutOfOrder { from, to, number, due },
            });
            return;
        }
        self.pair(from, to).received += 1;
        // What a dead node has left in our memory was given up with it.
        self.open -= u64::from(!closed);
        self.messages += 1;
        self.bytes += message.len() as u64;
    }

    /// The sender takes back what it finds not received, from message `first` on, with the connection's end. (Of that, some may
    /// have been received, if the receiver's credit did not come back.)
    pub fn return_from(&mut self, from: usize, to: usize, first: u32) {
        let pair = self.pair(from, to);
        let Pair { sent, received, closed } = *pair;
        pair.closed = true;
        if first > received {
            self.violate(Violation::Lost { from: from % self.nodes, to, number: received });
        } else if !closed {
            self.open -= u64::from(sent - received);
            self.returned += u64::from(sent - first);
        }
    }

    pub fn sent(&self, from: usize, to: usize) -> u32 {
        self.pairs[from * self.nodes + to].sent
    }

    /// A node has died: with it goes what it has sent and nobody has received.
    pub(crate) fn died(&mut self, node: usize) {
        if self.holder == Some(node) {
            self.holder = None;
        }
        for (at, pair) in self.pairs.iter_mut().enumerate() {
            if at / self.nodes % self.nodes == node && !pair.closed {
                self.open -= u64::from(pair.sent - pair.received);
                pair.closed = true;
            }
        }
    }

    /// Two nodes have a new connection.
    pub(crate) fn fresh(&mut self, one: usize, other: usize) {
        for from in (0..self.pairs.len() / self.nodes).step_by(self.nodes) {
            *self.pair(from + one, other) = Pair::default();
            *self.pair(from + other, one) = Pair::default();
        }
    }

    /// The hub takes a write for all nodes.
    pub(crate) fn reflect(&mut self, at: usize, body: &[u8; LINE_BYTES]) {
        self.reflected.push((at, first_word(body)));
    }

    /// `node` gets one: each node those of all, in that order.
    pub(crate) fn reflected(&mut self, node: usize, at: usize, body: &[u8; LINE_BYTES]) {
        let next = self.next_reflected[node];
        self.next_reflected[node] += 1;
        if self.reflected.get(next) != Some(&(at, first_word(body))) {
            let rule = format!("node {node} sees another write than number {next} of all");
            self.violate(Violation::Rule(rule));
        }
    }

    /// `node` gets what is reflected from now on.
    pub(crate) fn joins(&mut self, node: usize) {
        self.next_reflected[node] = self.reflected.len();
    }

    pub fn locked(&mut self, node: usize) {
        if let Some(other) = self.holder.replace(node) {
            let rule = format!("nodes {other} and {node} hold the lock at once");
            self.violate(Violation::Rule(rule));
        }
    }

    /// One of the times that were planned.
    pub fn unlocked(&mut self, node: usize) {
        if self.holder.take() == Some(node) {
            self.planned -= 1;
            self.messages += 1;
        }
    }

    pub fn violate(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    pub(crate) fn to_go(&self) -> u64 {
        self.open + self.planned
    }

    /// The first message that is missing.
    pub(crate) fn missing(&self) -> Option<Violation> {
        let at = self.pairs.iter().position(|pair| !pair.closed && pair.received < pair.sent)?;
        let (from, to) = (at / self.nodes % self.nodes, at % self.nodes);
        Some(Violation::Lost { from, to, number: self.pairs[at].received })
    }
}
