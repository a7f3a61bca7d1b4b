//! Nodes, links and what happens when.

mod lives;
mod network;
mod processor;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::Write;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::ledger::{Ledger, Violation};
use crate::memory::{Block, Memory, Node, Store};
use crate::profile::Profile;
use crate::topology::Route;
use crate::{Time, from_us, to_us};

/// What a node's program did with its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Something; it wants another turn as soon as that is done.
    Again,
    /// Nothing; it polls until something arrives.
    Poll,
    /// Nothing; it has armed its flags, looked again, and sleeps until it is interrupted.
    Sleep,
}

pub struct Context<'a> {
    pub now: Time,
    pub node: &'a Node,
    pub ledger: &'a mut Ledger,
    pub profile: &'a Profile,
}

/// What runs on a node.
pub trait Program {
    fn step(&mut self, cx: &mut Context) -> Step;
    /// Nothing can be sent to `peer` any more, nor will anything come.
    fn lost(&mut self, cx: &mut Context, peer: usize);
    /// `peer` has started afresh: so does everything between the two. Our memory for it is zeroed.
    fn reconnected(&mut self, cx: &mut Context, peer: usize);
    /// Messages that it has planned and not sent: with it, they are given up.
    fn planned(&self) -> u64;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Active,
    Polling,
    Asleep,
    Dead,
}

struct Host {
    node: Node,
    /// Where the node's area lies.
    _memory: Memory,
    state: State,
    /// How often it has been started.
    birth: u32,
    /// The only valid `Run`; what was planned before is void.
    turn: u64,
    /// How the program's last step ended, while its work is still being done.
    step: Step,
    slowness: f64,
    /// Changes with each arrival; as it was when the program looked last.
    arrivals: u64,
    seen: u64,
    /// An interrupt found the node awake: it goes on at once when it next sleeps. Its price is yet to be paid.
    interrupted: bool,
    stolen: Time,
    bus_free: Time,
    adapter_free: Time,
    engine_free: Time,
    /// Packets without an answer yet, times of the answers that will come, and whether the processor waits for one.
    in_flight: usize,
    answers: Vec<Time>,
    stalled: bool,
}

struct Packet {
    from: usize,
    store: Store,
    /// Number among the packets of the pair, the pair's life, and which start of the sender's it is from.
    number: u64,
    life: u32,
    birth: u32,
    attempts: u32,
    /// Events that refer to it.
    copies: u32,
    corrupt: bool,
    delivered: bool,
    settled: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Run(usize, u64),
    Arrive(usize),
    Deliver(usize),
    Retry(usize),
    LinkDies(usize),
    NodeDies(usize),
    /// The others learn of it.
    Gone(usize),
    Restart(usize),
}

/// The connection of an ordered pair of nodes.
#[derive(Clone, Copy, Default)]
struct Pair {
    life: u32,
    closed: bool,
    next_number: u64,
    /// What the receiving adapter expects next, if it keeps order; else the last credit that it stored.
    expected: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    pub events: u64,
    pub packets: u64,
    pub retries: u64,
    pub interrupts: u64,
    pub messages: u64,
    pub bytes: u64,
    pub returned: u64,
    /// Virtual microseconds.
    pub elapsed_us: f64,
}

pub struct Outcome {
    pub stats: Stats,
    /// Of everything that happened, in order.
    pub trace: u64,
    pub violation: Option<Violation>,
}

pub struct Cluster<P> {
    profile: Profile,
    /// The nodes, and behind them the hub: of it there are only its connections, for reflected writes.
    hosts: Vec<Host>,
    programs: Vec<P>,
    make: Box<dyn Fn(usize) -> P>,
    pub ledger: Ledger,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    event_count: u64,
    packets: Vec<Packet>,
    free_packets: Vec<usize>,
    pairs: Vec<Pair>,
    /// Packets that came before one that is due.
    held: BTreeMap<(usize, usize, u64), usize>,
    link_free: Vec<Time>,
    dead_links: Vec<bool>,
    switch_free: Time,
    route: Route,
    rng: Pcg64Mcg,
    stats: Stats,
    hash: Xxh3,
    trace: Option<Box<dyn Write>>,
    /// Longest time without a message before the run counts as stuck.
    patience: Time,
    progress: (u64, Time),
}

impl<P: Program> Cluster<P> {
    pub fn new(
        profile: Profile,
        ledger: Ledger,
        nodes: usize,
        seed: u64,
        make: impl Fn(usize) -> P + 'static,
    ) -> Cluster<P> {
        let host = |id| {
            let bytes = if id < nodes { Block::memory_bytes(profile.ring, nodes) } else { 0 };
            let mut memory = Memory::new(bytes);
            let node = Node::new(id, memory.area(bytes), profile.ring, &profile.adapter);
            Host {
                node,
                _memory: memory,
                state: State::Active,
                birth: 0,
                turn: 0,
                step: Step::Again,
                slowness: 1.0,
                arrivals: 0,
                seen: 0,
                interrupted: false,
                stolen: 0,
                bus_free: 0,
                adapter_free: 0,
                engine_free: 0,
                in_flight: 0,
                answers: Vec::new(),
                stalled: false,
            }
        };
        let links = profile.topology.link_count(nodes);
        Cluster {
            hosts: (0..=nodes).map(host).collect(),
            programs: (0..nodes).map(&make).collect(),
            make: Box::new(make),
            ledger,
            now: 0,
            events: BinaryHeap::new(),
            event_count: 0,
            packets: Vec::new(),
            free_packets: Vec::new(),
            pairs: vec![Pair::default(); (nodes + 1) * (nodes + 1)],
            held: BTreeMap::new(),
            link_free: vec![0; links],
            dead_links: vec![false; links],
            switch_free: 0,
            route: Route::default(),
            rng: Pcg64Mcg::seed_from_u64(seed),
            stats: Stats::default(),
            hash: Xxh3::new(),
            trace: None,
            patience: from_us(5e6),
            progress: (0, 0),
            profile,
        }
    }

    /// Writes everything that happens to `to`, a line each.
    pub fn trace_to(&mut self, to: Box<dyn Write>) {
        self.trace = Some(to);
    }

    /// Runs until all messages are received or returned, or something is wrong.
    pub fn run(&mut self) -> Outcome {
        self.begin();
        while self.goes_on() {
            let Some(Reverse((time, _, event))) = self.events.pop() else {
                self.end_of_everything();
                break;
            };
            self.now = time;
            self.note(event);
            self.handle(event);
        }
        Outcome {
            stats: Stats {
                messages: self.ledger.messages,
                bytes: self.ledger.bytes,
                returned: self.ledger.returned,
                elapsed_us: to_us(self.now),
                ..self.stats.clone()
            },
            trace: self.hash.digest(),
            violation: self.ledger.violation.clone(),
        }
    }

    /// Until all is done, something is wrong, or nothing has become of any message for long.
    fn goes_on(&mut self) -> bool {
        let to_go = self.ledger.to_go();
        if to_go != self.progress.0 {
            self.progress = (to_go, self.now);
        } else if self.now > self.progress.1 + self.patience {
            self.ledger.violate(Violation::Stuck { messages: to_go });
        }
        to_go > 0 && self.ledger.violation.is_none()
    }

    /// Nothing will ever happen again, though something should: if all have looked, there is nothing to be found.
    fn end_of_everything(&mut self) {
        let messages = self.ledger.to_go();
        let asleep = self.hosts.iter().any(|host| host.state == State::Asleep);
        let missing = if asleep { None } else { self.ledger.missing() };
        self.ledger.violate(missing.unwrap_or(Violation::Stuck { messages }));
    }

    fn begin(&mut self) {
        let faults = self.profile.faults;
        let nodes = self.hub();
        for program in &self.programs {
            self.ledger.plan(program.planned());
        }
        for id in 0..nodes {
            self.wake(id, 0);
        }
        let mut some = |count: usize, of: usize| -> Vec<usize> {
            let mut chosen: Vec<usize> = Vec::new();
            while chosen.len() < count.min(of) {
                let one = self.rng.random_range(0..of);
                if !chosen.contains(&one) {
                    chosen.push(one);
                }
            }
            chosen
        };
        let links = some(faults.dead_links, self.link_free.len());
        // Somebody has to survive to tell the story.
        let dying = some(faults.dead_nodes.min(nodes - 1), nodes);
        for id in some(faults.slow_nodes, nodes) {
            self.hosts[id].slowness = faults.slowness.max(1.0);
        }
        for link in links {
            let time = self.some_time();
            self.at(time, Event::LinkDies(link));
        }
        for node in dying {
            let time = self.some_time();
            self.at(time, Event::NodeDies(node));
        }
    }

    fn some_time(&mut self) -> Time {
        from_us(self.rng.random_range(0.0..=self.profile.faults.within_us.max(0.0)))
    }

    fn at(&mut self, time: Time, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((time, self.event_count, event)));
    }

    fn note(&mut self, event: Event) {
        self.stats.events += 1;
        let (kind, one, other) = match event {
            Event::Run(node, _) => (0, node, 0),
            Event::Arrive(packet) => (1, packet, self.packets[packet].number as usize),
            Event::Deliver(packet) => (2, packet, self.packets[packet].number as usize),
            Event::Retry(packet) => (3, packet, self.packets[packet].number as usize),
            Event::LinkDies(link) => (4, link, 0),
            Event::NodeDies(node) => (5, node, 0),
            Event::Gone(node) => (6, node, 0),
            Event::Restart(node) => (7, node, 0),
        };
        let words = [self.now, kind, one as u64, other as u64].map(u64::to_le_bytes);
        self.hash.update(words.as_flattened());
        if let Some(to) = &mut self.trace {
            let _ = write!(to, "{:14.6} {event:?}", to_us(self.now));
            if let Event::Arrive(packet) | Event::Deliver(packet) | Event::Retry(packet) = event {
                let Packet { from, store, number, attempts, .. } = &self.packets[packet];
                let Store { to: target, at, kind, len, .. } = store;
                let _ = write!(
                    to,
                    " {from}->{target} {number} {kind:?} {len} bytes at {at}, attempt {attempts}"
                );
            }
            let _ = writeln!(to);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Run(node, turn) => {
                if self.hosts[node].turn == turn {
                    self.turn(node);
                }
            }
            Event::Arrive(packet) => self.arrive(packet),
            Event::Deliver(packet) => self.deliver(packet),
            Event::Retry(packet) => self.retry(packet),
            Event::LinkDies(link) => self.dead_links[link] = true,
            Event::NodeDies(node) => self.kill(node),
            Event::Gone(node) => self.gone(node),
            Event::Restart(node) => self.restart(node),
        }
    }

    fn pair(&mut self, from: usize, to: usize) -> &mut Pair {
        let hosts = self.hosts.len();
        &mut self.pairs[from * hosts + to]
    }

    /// Its number, which is how many nodes there are.
    fn hub(&self) -> usize {
        self.hosts.len() - 1
    }
}

fn write(area: ringlet_core::memory::Area, at: usize, bytes: &[u8]) {
    // SAFETY: the slice is valid for its length.
    unsafe { area.write(at, bytes.as_ptr(), bytes.len()) };
}
