//! The socket-like workloads: messages through `ringlet-core`'s rings, one for each direction between two nodes.

use ringlet_core::layout::{RECORD_MAX_BYTES, WANT_EVENT};
use ringlet_core::locked::Locked;
use ringlet_core::mailbox::Inbox;
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::record::RingMemory;
use ringlet_core::{queue, ring};

use crate::cluster::{Context, Program, Step};
use crate::from_us;
use crate::ledger::Violation;
use crate::memory::Node;
use crate::moving::Moving;

/// Who sends to whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Node 0 to 1, 2 to 3 and so on; each message is answered by one of its size before the next.
    PingPong,
    /// The same pairs, one way.
    Stream,
    AllToAll,
}

/// What carries the messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carrier {
    /// A byte ring for each direction; a node looks at all of them.
    Bytes,
    /// The same, moved between the ring and the kernel's connection time and again.
    Moving,
    /// A message queue for each direction, whose sender says in the receiver's mailbox that there is something.
    Messages,
    /// Locked buffers, whose two ends take turns: only for ping-pong.
    Locked,
    /// Active Messages, each of which is replied to; announced in the mailbox, or all looked at.
    Active { mailbox: bool },
    /// A lock in memory whose writes a hub reflects to all nodes; a message is one that was held. All want it, or only node 0.
    Reflected,
}

/// What a run does.
#[derive(Clone, Debug)]
pub struct Traffic {
    pub pattern: Pattern,
    pub carrier: Carrier,
    pub nodes: usize,
    /// From each sender to each of its receivers.
    pub messages: u32,
    /// Sleep when there is nothing to do, and be interrupted; else poll.
    pub sleep: bool,
    /// After so many bytes a sender looks whether they have arrived.
    pub mtu_bytes: usize,
    /// Does receiving copy the bytes to the program?
    pub copy: bool,
    /// Left out, to show that it is needed: the look after arming.
    pub look_again: bool,
    /// Pairs are connected with all other nodes as well, which are silent.
    pub connected: bool,
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic {
            pattern: Pattern::PingPong,
            carrier: Carrier::Bytes,
            nodes: 2,
            messages: 100,
            sleep: false,
            mtu_bytes: RECORD_MAX_BYTES,
            copy: true,
            look_again: true,
            connected: false,
        }
    }
}

impl Traffic {
    /// Do senders say in a mailbox that there is something?
    pub(crate) fn mailbox(&self) -> bool {
        matches!(self.carrier, Carrier::Messages | Carrier::Active { mailbox: true })
    }

    pub(crate) fn is_active(&self) -> bool {
        matches!(self.carrier, Carrier::Active { .. })
    }

    pub(crate) fn peers(&self, node: usize) -> Vec<(usize, u32)> {
        let partner = node ^ 1;
        if self.connected && self.pattern != Pattern::AllToAll {
            let pair = Traffic { connected: false, ..self.clone() }.peers(node);
            let silent =
                (0..self.nodes).filter(|&id| id != node && id != partner).map(|id| (id, 0));
            return pair.into_iter().chain(silent).collect();
        }
        match self.pattern {
            Pattern::AllToAll => {
                (1..self.nodes).map(|n| ((node + n) % self.nodes, self.messages)).collect()
            }
            _ if partner >= self.nodes => Vec::new(),
            Pattern::Stream if node % 2 == 1 => vec![(partner, 0)],
            _ => vec![(partner, self.messages)],
        }
    }
}

/// Both directions of a connection, as this end has them.
enum Lane {
    Bytes(ring::Tx, ring::Rx),
    Moving(Box<Moving>),
    Messages(queue::Tx, queue::Rx),
    Locked(Locked),
}

/// What a lane holds next.
enum Next {
    Empty,
    /// So many bytes; true when the sender should be looked for.
    Bytes(usize, bool),
    Corrupt,
}

impl Lane {
    fn new(carrier: Carrier, client: bool) -> Lane {
        match carrier {
            Carrier::Moving => Lane::Moving(Default::default()),
            Carrier::Messages => Lane::Messages(Default::default(), Default::default()),
            Carrier::Locked => {
                Lane::Locked(if client { Locked::client() } else { Locked::server() })
            }
            _ => Lane::Bytes(Default::default(), Default::default()),
        }
    }

    fn writable(&self, memory: &impl RingMemory) -> bool {
        match self {
            Lane::Bytes(tx, _) => tx.writable(memory),
            Lane::Moving(moving) => moving.writable(memory),
            Lane::Messages(tx, _) => tx.writable(memory),
            Lane::Locked(locked) => locked.our_turn(),
        }
    }

    /// How many bytes were sent.
    fn push(
        &self,
        node: &Node,
        peer: usize,
        memory: &impl RingMemory,
        from: &mut Buffers,
    ) -> usize {
        match self {
            Lane::Bytes(tx, _) => tx.push(memory, from),
            Lane::Moving(moving) => moving.push(node, peer, memory, from),
            Lane::Messages(tx, _) => {
                let len = from.remaining();
                tx.push(memory, from).map_or(0, |()| len)
            }
            Lane::Locked(locked) => {
                let len = from.remaining();
                let Ok(reserved) = locked.reserve(memory, len) else { return 0 };
                let (piece, n) = from.take(len);
                // SAFETY: a piece of a message that is in one piece, valid for `n` bytes.
                unsafe { reserved.write(memory, 0, piece, n) };
                locked.commit(memory, reserved, n);
                n
            }
        }
    }

    fn ready(&self, node: &Node, peer: usize) -> bool {
        let memory = &node.receiver(peer);
        match self {
            Lane::Bytes(_, rx) => rx.ready(memory),
            Lane::Moving(moving) => moving.ready(node, peer, memory),
            Lane::Messages(_, rx) => rx.ready(memory),
            Lane::Locked(locked) => locked.ready(memory),
        }
    }

    fn pop(&self, node: &Node, peer: usize, memory: &impl RingMemory, to: &mut Buffers) -> Next {
        let bytes = |next| match next {
            ring::Next::Empty => Next::Empty,
            ring::Next::Bytes(n, look) => Next::Bytes(n, look),
            ring::Next::Mark(_) | ring::Next::Corrupt => Next::Corrupt,
        };
        match self {
            Lane::Bytes(_, rx) => bytes(rx.pop(memory, to)),
            Lane::Moving(moving) => bytes(moving.pop(node, peer, memory, to)),
            Lane::Messages(_, rx) => match rx.peek(memory) {
                queue::Next::Empty => Next::Empty,
                queue::Next::Corrupt => Next::Corrupt,
                queue::Next::Message(message) => {
                    let n = message.copy_to(memory, to);
                    Next::Bytes(n, rx.release(memory, message))
                }
            },
            Lane::Locked(locked) => match locked.peek(memory) {
                queue::Next::Empty => Next::Empty,
                queue::Next::Corrupt => Next::Corrupt,
                queue::Next::Message(message) => {
                    let n = message.copy_to(memory, to);
                    locked.take_turn(&message);
                    Next::Bytes(n, false)
                }
            },
        }
    }
}

/// The connection with one peer.
struct Channel {
    peer: usize,
    lane: Lane,
    to_send: u32,
    /// What is sent of the message that has begun.
    sending: Option<(u32, usize)>,
    /// What has come of the message that is due.
    received: Vec<u8>,
    open: bool,
}

/// The program of a node.
pub struct Rings {
    traffic: Traffic,
    node: usize,
    channels: Vec<Channel>,
    /// Whose turn it is to be sent to.
    next: usize,
    sleeping: Sleeping,
    inbox: Inbox,
    /// Where each peer's channel is.
    places: Vec<Option<usize>>,
}

/// How far a node is on its way to sleep. Time passes from one to the next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sleeping {
    Not,
    /// It has looked and found nothing, and arms its flags next.
    Arming,
    /// It looks again. (Whoever wakes it takes the wish: the next sleep needs a new one.)
    Armed,
}

impl Rings {
    pub fn new(traffic: Traffic, node: usize) -> Rings {
        let channels = traffic.peers(node).into_iter().map(|(peer, to_send)| Channel {
            peer,
            lane: Lane::new(traffic.carrier, node < peer),
            to_send,
            sending: None,
            received: Vec::new(),
            open: true,
        });
        let channels: Vec<Channel> = channels.collect();
        let mut places = vec![None; traffic.nodes];
        for (at, channel) in channels.iter().enumerate() {
            places[channel.peer] = Some(at);
        }
        let inbox = Inbox::default();
        Rings { channels, traffic, node, next: 0, sleeping: Sleeping::Not, inbox, places }
    }
}

fn with_buffer<T>(bytes: &mut [u8], use_it: impl FnOnce(&mut Buffers) -> T) -> T {
    let list = [Buffer { base: bytes.as_mut_ptr(), len: bytes.len() }];
    // SAFETY: `bytes` is valid for its length, and borrowed until the end.
    use_it(&mut unsafe { Buffers::new(&list) })
}

impl Channel {
    /// A ping is sent once the last one is answered, an answer once there is a ping.
    fn may_send(&self, traffic: &Traffic, cx: &Context) -> bool {
        if !self.open || (self.to_send == 0 && self.sending.is_none()) {
            return false;
        }
        let (here, there) = (cx.node.id, self.peer);
        match traffic.pattern {
            _ if self.sending.is_some() => true,
            Pattern::PingPong => {
                let (sent, received) = (cx.ledger.sent(here, there), cx.ledger.due(there, here));
                if here < there { sent == received } else { sent < received }
            }
            _ => true,
        }
    }

    /// Sends what there is room for. True when anything moved.
    fn send(&mut self, traffic: &Traffic, cx: &mut Context) -> bool {
        let (here, there) = (cx.node.id, self.peer);
        let memory = cx.node.sender(there);
        if self.sending.is_none() {
            if !self.lane.writable(&memory) {
                return false;
            }
            self.to_send -= 1;
            self.sending = Some((cx.ledger.send(here, there), 0));
            cx.node.work(from_us(cx.profile.node.call_us));
        }
        let Some((number, mut done)) = self.sending else { return false };
        let mut message = vec![0; cx.ledger.size(here, there, number)];
        cx.ledger.fill(here, there, number, &mut message);
        let before = done;
        while done < message.len() {
            let bytes = matches!(self.lane, Lane::Bytes(..) | Lane::Moving(_));
            let piece = if bytes { traffic.mtu_bytes } else { message.len() };
            let end = message.len().min(done + piece);
            let n = with_buffer(&mut message[done..end], |from| {
                self.lane.push(cx.node, there, &memory, from)
            });
            if n == 0 {
                break;
            }
            done += n;
            match self.lane {
                Lane::Bytes(..) | Lane::Moving(_) | Lane::Locked(_) => {
                    cx.node.stimulate_receiver(there)
                }
                Lane::Messages(..) => cx.node.announce(there),
            }
        }
        self.sending = (done < message.len()).then_some((number, done));
        done > before
    }

    /// Receives up to one message.
    fn receive(&mut self, cx: &mut Context) {
        let (here, there) = (cx.node.id, self.peer);
        let memory = cx.node.receiver(there);
        let due = cx.ledger.due(there, here);
        let size = cx.ledger.size(there, here, due);
        while self.received.len() < size {
            let done = self.received.len();
            if done == 0 {
                cx.node.work(from_us(cx.profile.node.call_us));
            }
            self.received.resize(size, 0);
            let next = with_buffer(&mut self.received[done..], |to| {
                self.lane.pop(cx.node, there, &memory, to)
            });
            let n = match next {
                Next::Bytes(n, look) => {
                    if look {
                        cx.node.stimulate_sender(there);
                    }
                    n
                }
                Next::Empty => 0,
                Next::Corrupt => {
                    return cx.ledger.violate(Violation::Corrupt { from: there, to: here });
                }
            };
            self.received.truncate(done + n);
            if n == 0 {
                return;
            }
        }
        cx.ledger.received(there, here, &self.received);
        self.received.clear();
    }

    /// The peer is gone: what it has not read is returned.
    fn give_up(&mut self, cx: &mut Context) {
        let (here, there) = (cx.node.id, self.peer);
        let memory = cx.node.sender(there);
        let first = match &self.lane {
            Lane::Bytes(tx, _) => self.first_unread(tx, &memory, cx),
            // A kernel's connection that breaks doesn't tell what was read.
            Lane::Moving(_) => 0,
            Lane::Messages(tx, _) => {
                let whole = cx.ledger.sent(here, there) - u32::from(self.sending.is_some());
                whole.saturating_sub(tx.outstanding(&memory) as u32)
            }
            // The answer, which is our turn, says that the question was read.
            Lane::Locked(locked) => {
                cx.ledger.sent(here, there).saturating_sub(u32::from(!locked.our_turn()))
            }
        };
        cx.ledger.return_from(here, there, first);
        cx.ledger.abandon(u64::from(self.to_send));
        (self.to_send, self.sending, self.open) = (0, None, false);
        self.received.clear();
    }

    /// The first message that the peer has not read, by our own copy of the ring, which must hold just what was sent.
    fn first_unread(&self, tx: &ring::Tx, memory: &impl RingMemory, cx: &mut Context) -> u32 {
        let (here, there) = (cx.node.id, self.peer);
        cx.node.copying.set(false);
        tx.take_credit(memory);
        let mut unread = Vec::new();
        let mut piece = vec![0; memory.ring_bytes()];
        loop {
            unread.extend_from_slice(tx.oldest(memory, 0, &mut piece));
            if !tx.pass_oldest(memory) {
                break;
            }
        }
        cx.node.copying.set(true);
        // The stream's end, backwards: the message that was being sent, then whole ones.
        let mut first = cx.ledger.sent(here, there);
        let mut rest = unread.len();
        while first > 0 {
            let number = first - 1;
            let size = match self.sending {
                Some((sending, done)) if sending == number => done,
                _ if rest == 0 => break,
                _ => cx.ledger.size(here, there, number),
            };
            first = number;
            let mut message = vec![0; cx.ledger.size(here, there, number)];
            cx.ledger.fill(here, there, number, &mut message);
            let found = size.min(rest);
            if unread[rest - found..rest] != message[size - found..size] {
                cx.ledger.violate(Violation::Damaged { from: here, to: there, number });
            }
            rest -= found;
        }
        if rest > 0 {
            cx.ledger.violate(Violation::Corrupt { from: here, to: there });
        }
        first
    }
}

impl Rings {
    /// Messages that are taken from a mailbox before something is sent again.
    const AT_ONCE: usize = 8;

    fn receive(&mut self, cx: &mut Context) -> bool {
        let look = from_us(cx.profile.node.look_us);
        let mut received = false;
        if self.traffic.mailbox() {
            for _ in 0..Rings::AT_ONCE {
                cx.node.work(look);
                let Rings { inbox, channels, places, .. } = self;
                let has = |peer: usize| {
                    let channel = places[peer].map(|at| &channels[at]);
                    channel.is_some_and(|c| c.open && c.lane.ready(cx.node, peer))
                };
                let Some(peer) = inbox.poll([cx.node.ready()], places.len(), has) else { break };
                if let Some(at) = self.places[peer] {
                    self.channels[at].receive(cx);
                }
                received = true;
            }
            return received;
        }
        let open = self.channels.iter().filter(|channel| channel.open).count();
        cx.node.work(look * open as u64);
        for channel in self.channels.iter_mut().filter(|channel| channel.open) {
            if channel.lane.ready(cx.node, channel.peer) {
                channel.receive(cx);
                received = true;
            }
        }
        received
    }

    fn send(&mut self, cx: &mut Context) -> bool {
        let count = self.channels.len();
        for turn in 0..count {
            let at = (self.next + turn) % count;
            let channel = &mut self.channels[at];
            if channel.may_send(&self.traffic, cx) && channel.send(&self.traffic, cx) {
                self.next = at + 1;
                return true;
            }
        }
        false
    }

    fn arm(&self, cx: &Context) {
        if self.traffic.mailbox() {
            cx.node.mail_wish().want(WANT_EVENT);
        }
        for channel in self.channels.iter().filter(|channel| channel.open) {
            cx.node.data_wish(channel.peer).want(WANT_EVENT);
            if channel.may_send(&self.traffic, cx) {
                cx.node.room_wish(channel.peer).want(WANT_EVENT);
            }
        }
    }
}

impl Program for Rings {
    fn step(&mut self, cx: &mut Context) -> Step {
        if self.sleeping == Sleeping::Arming {
            self.arm(cx);
            let again = self.traffic.look_again;
            self.sleeping = if again { Sleeping::Armed } else { Sleeping::Not };
            return if again { Step::Again } else { Step::Sleep };
        }
        cx.node.copying.set(self.traffic.copy);
        let received = self.receive(cx);
        // One message to one peer, so that what comes meanwhile is not kept waiting.
        if self.send(cx) || received {
            self.sleeping = Sleeping::Not;
            return Step::Again;
        }
        if !self.traffic.sleep {
            return Step::Poll;
        }
        let armed = self.sleeping == Sleeping::Armed;
        self.sleeping = if armed { Sleeping::Not } else { Sleeping::Arming };
        if armed { Step::Sleep } else { Step::Again }
    }

    fn lost(&mut self, cx: &mut Context, peer: usize) {
        if let Some(channel) = self.channels.iter_mut().find(|c| c.peer == peer && c.open) {
            channel.give_up(cx);
        }
        self.sleeping = Sleeping::Not;
    }

    fn reconnected(&mut self, cx: &mut Context, peer: usize) {
        let fresh = Rings::new(self.traffic.clone(), self.node);
        let again = fresh.channels.into_iter().find(|channel| channel.peer == peer);
        let channel = self.channels.iter_mut().find(|channel| channel.peer == peer);
        if let (Some(channel), Some(again)) = (channel, again) {
            cx.ledger.plan(u64::from(again.to_send));
            *channel = again;
        }
        self.sleeping = Sleeping::Not;
    }

    fn planned(&self) -> u64 {
        self.channels.iter().map(|channel| u64::from(channel.to_send)).sum()
    }
}
