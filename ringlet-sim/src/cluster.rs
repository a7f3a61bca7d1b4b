//! Nodes, links and what happens when.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::Write;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use ringlet_core::layout::{LINE_BYTES, WANT_NOTHING};
use ringlet_core::{mailbox, wait};
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::ledger::{Ledger, Violation};
use crate::memory::{Block, Kind, Memory, Node, Store, Work};
use crate::profile::Profile;
use crate::topology::Route;
use crate::{Time, from_us, to_us, transfer};

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
    memory: Memory,
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
            let memory = Memory::new(Block::memory_bytes(profile.ring, nodes));
            let node = Node::new(id, memory.area(), profile.ring, &profile.adapter);
            Host {
                node,
                memory,
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
            hosts: (0..nodes).map(host).collect(),
            programs: (0..nodes).map(&make).collect(),
            make: Box::new(make),
            ledger,
            now: 0,
            events: BinaryHeap::new(),
            event_count: 0,
            packets: Vec::new(),
            free_packets: Vec::new(),
            pairs: vec![Pair::default(); nodes * nodes],
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
        while self.ledger.violation.is_none() && !self.ledger.finished() {
            let Some(Reverse((time, _, event))) = self.events.pop() else {
                self.end_of_everything();
                break;
            };
            self.now = time;
            self.note(event);
            self.handle(event);
            let done = self.ledger.to_go();
            if done != self.progress.0 {
                self.progress = (done, self.now);
            } else if self.now > self.progress.1 + self.patience {
                self.ledger.violate(Violation::Stuck { messages: done });
            }
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

    /// Nothing will ever happen again, though something should: if all have looked, there is nothing to be found.
    fn end_of_everything(&mut self) {
        let messages = self.ledger.to_go();
        let asleep = self.hosts.iter().any(|host| host.state == State::Asleep);
        let missing = if asleep { None } else { self.ledger.missing() };
        self.ledger.violate(missing.unwrap_or(Violation::Stuck { messages }));
    }

    fn begin(&mut self) {
        let faults = self.profile.faults;
        let nodes = self.hosts.len();
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
        let nodes = self.hosts.len();
        &mut self.pairs[from * nodes + to]
    }

    // The processor.

    fn wake(&mut self, node: usize, time: Time) {
        let host = &mut self.hosts[node];
        host.state = State::Active;
        host.turn += 1;
        let turn = host.turn;
        self.at(time, Event::Run(node, turn));
    }

    /// The processor is busy for so long. False when something else happens before: it goes on later.
    fn busy(&mut self, node: usize, time: Time) -> bool {
        let host = &mut self.hosts[node];
        let stolen = std::mem::take(&mut host.stolen);
        let until = self.now + (time as f64 * host.slowness) as Time + stolen;
        self.until(node, until)
    }

    fn until(&mut self, node: usize, until: Time) -> bool {
        if self.events.peek().is_some_and(|Reverse((next, ..))| *next <= until) {
            self.wake(node, until);
            return false;
        }
        self.now = until;
        true
    }

    /// Does a node's work until something else comes first, or there is none.
    fn turn(&mut self, node: usize) {
        while self.ledger.violation.is_none() && !self.ledger.finished() {
            let next = self.hosts[node].node.outbox.get_mut().work.pop_front();
            let goes_on = match next {
                Some(work) => self.work(node, work),
                None => self.step(node),
            };
            if !goes_on {
                return;
            }
        }
    }

    fn step(&mut self, node: usize) -> bool {
        let host = &mut self.hosts[node];
        match host.step {
            Step::Poll if host.arrivals == host.seen => {
                host.state = State::Polling;
                return false;
            }
            Step::Sleep if !host.interrupted => {
                host.state = State::Asleep;
                return false;
            }
            Step::Sleep => {
                host.step = Step::Again;
                host.interrupted = false;
                return self.busy(node, from_us(self.profile.node.kernel_us));
            }
            _ => {}
        }
        host.seen = host.arrivals;
        let mut context = Context {
            now: self.now,
            node: &host.node,
            ledger: &mut self.ledger,
            profile: &self.profile,
        };
        let step = self.programs[node].step(&mut context);
        if step == Step::Sleep {
            host.node.work(from_us(self.profile.node.kernel_us));
        }
        host.step = step;
        true
    }

    fn work(&mut self, node: usize, work: Work) -> bool {
        match work {
            Work::Processor(time) => self.busy(node, time),
            Work::Engine => self.busy(node, from_us(self.profile.adapter.dma_setup_us)),
            Work::Copy(bytes) => {
                let host = &mut self.hosts[node];
                let time = transfer(bytes, self.profile.node.copy_mb_s) as f64 * host.slowness;
                let until = host.bus_free.max(self.now) + time as Time;
                host.bus_free = until;
                self.until(node, until)
            }
            Work::Barrier => match self.answered(node, 0) {
                Ok(()) => true,
                Err(time) => self.wait_for_answer(node, time, Work::Barrier),
            },
            Work::Store(store) if self.pair(node, store.to).closed => true,
            Work::Store(store) => {
                let adapter = &self.profile.adapter;
                let bytes = (store.len as usize).max(adapter.small_packet_bytes);
                let time = if store.dma { 0 } else { transfer(bytes, adapter.store_mb_s) };
                match self.answered(node, adapter.outstanding - 1) {
                    Err(time) => self.wait_for_answer(node, time, Work::Store(store)),
                    Ok(()) => {
                        self.hosts[node].node.outbox.get_mut().work.push_front(Work::Post(store));
                        self.busy(node, time)
                    }
                }
            }
            Work::Post(store) => {
                self.post(node, store);
                true
            }
        }
    }

    /// Are all but `few` packets answered? If not, when the next answer comes, if that is known.
    fn answered(&mut self, node: usize, few: usize) -> Result<(), Option<Time>> {
        let host = &mut self.hosts[node];
        if host.in_flight + host.answers.len() > few {
            host.answers.retain(|&time| time > self.now);
        }
        if host.in_flight + host.answers.len() <= few {
            return Ok(());
        }
        Err(host.answers.iter().min().copied())
    }

    fn wait_for_answer(&mut self, node: usize, time: Option<Time>, work: Work) -> bool {
        let host = &mut self.hosts[node];
        host.node.outbox.get_mut().work.push_front(work);
        host.stalled = time.is_none();
        time.is_some_and(|time| self.until(node, time))
    }

    // The interconnect.

    fn post(&mut self, from: usize, store: Store) {
        let pair = self.pair(from, store.to);
        if pair.closed {
            return;
        }
        pair.next_number += 1;
        let (number, life) = (pair.next_number, pair.life);
        self.hosts[from].in_flight += 1;
        self.stats.packets += 1;
        let packet = Packet {
            from,
            store,
            number,
            life,
            birth: self.hosts[from].birth,
            attempts: 0,
            copies: 0,
            corrupt: false,
            delivered: false,
            settled: false,
        };
        let place = match self.free_packets.pop() {
            Some(place) => {
                self.packets[place] = packet;
                place
            }
            None => {
                self.packets.push(packet);
                self.packets.len() - 1
            }
        };
        self.transmit(place);
    }

    fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.random_bool(probability)
    }

    fn wire_bytes(&self, store: &Store) -> usize {
        let adapter = &self.profile.adapter;
        let small = store.len as usize <= adapter.small_packet_bytes;
        if small { adapter.small_packet_bytes } else { adapter.packet_bytes }
    }

    fn later(&mut self, delay: Time, event: Event) {
        if let Event::Arrive(packet) | Event::Deliver(packet) | Event::Retry(packet) = event {
            self.packets[packet].copies += 1;
        }
        self.at(self.now + delay, event);
    }

    /// Sends a packet on its way, whose links all accept it now, so that there is one event for all of it.
    fn transmit(&mut self, place: usize) {
        let faults = self.profile.faults;
        let Packet { from, ref store, .. } = self.packets[place];
        let (to, dma, bytes) = (store.to, store.dma, self.wire_bytes(store));
        self.packets[place].attempts += 1;
        let adapter = &self.profile.adapter;
        let link = self.profile.link;
        let timeout = from_us(adapter.timeout_us);
        let nodes = self.hosts.len();
        let reachable =
            self.profile.topology.route(nodes, from, to, &self.dead_links, &mut self.route);
        if !reachable || self.chance(faults.lost) {
            return self.later(timeout, Event::Retry(place));
        }
        let adapter = &self.profile.adapter;
        let host = &mut self.hosts[from];
        let mut start = self.now.max(host.adapter_free);
        if dma {
            start = start.max(host.engine_free);
            host.engine_free = start + transfer(bytes, adapter.dma_mb_s);
        }
        host.adapter_free = start + transfer(bytes, adapter.mb_s);
        let mut time = host.adapter_free + from_us(adapter.latency_us);
        let on_wire = transfer(bytes + adapter.header_bytes, link.mb_s);
        let hop = from_us(link.hop_us);
        for &link in &self.route.links {
            time = accept(&mut self.link_free[link], self.now, time, on_wire) + hop;
        }
        if self.route.switches > 0 {
            let through = transfer(bytes + adapter.header_bytes, link.switch_mb_s);
            time = accept(&mut self.switch_free, self.now, time, through)
                + from_us(link.switch_us) * self.route.switches;
        }
        time += on_wire;
        let late = if self.chance(faults.late) {
            from_us(self.rng.random_range(0.0..=faults.late_us.max(0.0)))
        } else {
            0
        };
        let corrupt = self.chance(faults.corrupt);
        self.packets[place].corrupt = corrupt;
        self.later(time + late - self.now, Event::Arrive(place));
        // Waiting on the way is the links' flow control, which senders know of.
        if late > timeout {
            self.later(timeout, Event::Retry(place));
        }
    }

    /// One of the events that refer to it has happened. True when the packet is still of interest.
    fn take(&mut self, place: usize) -> bool {
        let packet = &mut self.packets[place];
        packet.copies -= 1;
        let (from, to, life) = (packet.from, packet.store.to, packet.life);
        if self.pair(from, to).life == life {
            return true;
        }
        self.settle(place, 0);
        self.release(place);
        false
    }

    fn release(&mut self, place: usize) {
        let packet = &self.packets[place];
        if packet.copies == 0 && packet.settled {
            self.free_packets.push(place);
        }
    }

    fn arrive(&mut self, place: usize) {
        if !self.take(place) {
            return;
        }
        let Packet { from, ref store, number, corrupt, delivered, .. } = self.packets[place];
        let (to, bytes) = (store.to, self.wire_bytes(store));
        let adapter = &self.profile.adapter;
        let answer = from_us(adapter.latency_us);
        if self.hosts[to].state == State::Dead {
            return self.later(from_us(adapter.timeout_us), Event::Retry(place));
        }
        if corrupt {
            self.packets[place].corrupt = false;
            if adapter.crc {
                return self.later(answer, Event::Retry(place));
            }
            let at = self.rng.random_range(0..self.packets[place].store.len as usize);
            self.packets[place].store.body[at] ^= 1 << self.rng.random_range(0..8);
        }
        let adapter = &self.profile.adapter;
        if delivered && adapter.sequence {
            return self.answer(place);
        }
        if adapter.ordered && !delivered {
            let expected = self.pair(from, to).expected + 1;
            if number != expected {
                self.packets[place].copies += 1;
                if let Some(twin) = self.held.insert((from, to, number), place) {
                    self.packets[twin].copies -= 1;
                }
                return;
            }
            self.pair(from, to).expected = number;
            if let Some(next) = self.held.remove(&(from, to, number + 1)) {
                self.at(self.now, Event::Arrive(next));
            }
        }
        // Copied now: its first delivery may still be under way.
        let host = &mut self.hosts[to];
        let start = host.bus_free.max(self.now);
        host.bus_free = start + transfer(bytes, self.profile.node.bus_mb_s);
        let delay = host.bus_free - self.now;
        self.packets[place].delivered = true;
        self.later(delay, Event::Deliver(place));
    }

    /// The packet reaches the node's memory.
    fn deliver(&mut self, place: usize) {
        if !self.take(place) {
            return;
        }
        let Packet { from, ref store, number, .. } = self.packets[place];
        let Store { to, at, kind, len, body, .. } = *store;
        if self.hosts[to].state == State::Dead {
            return self.later(from_us(self.profile.adapter.timeout_us), Event::Retry(place));
        }
        let area = self.hosts[to].node.area;
        let mut armed = false;
        match kind {
            Kind::Bytes => write(area, at, &body[..len as usize]),
            Kind::Credit => {
                let ordered = self.profile.adapter.ordered;
                let last = &mut self.pair(from, to).expected;
                if ordered || number > *last {
                    *last = number.max(*last);
                    write(area, at, &body[..len as usize]);
                }
            }
            Kind::StimulateReceiver => {
                armed = wait::wanted_by_receiver(area.at(at)) != WANT_NOTHING
            }
            Kind::Announce => {
                mailbox::announce(self.hosts[to].node.ready(), from);
                armed = wait::wanted_by_receiver(area.at(at)) != WANT_NOTHING;
            }
            Kind::StimulateSender => armed = wait::wanted_by_sender(area.at(at)) != WANT_NOTHING,
        }
        let host = &mut self.hosts[to];
        host.arrivals += 1;
        if armed {
            self.stats.interrupts += 1;
            let interrupt = from_us(self.profile.node.interrupt_us);
            if host.state == State::Asleep {
                host.step = Step::Again;
                let back = from_us(self.profile.node.kernel_us) as f64 * host.slowness;
                self.wake(to, self.now + interrupt + back as Time);
            } else {
                host.interrupted = true;
                host.stolen += interrupt;
            }
        }
        let host = &self.hosts[to];
        if host.state == State::Polling {
            let look = from_us(self.profile.node.look_us) as f64 * host.slowness;
            self.wake(to, self.now + look as Time);
        }
        self.answer(place);
    }

    fn answer(&mut self, place: usize) {
        if self.chance(self.profile.faults.unanswered) && self.profile.adapter.retry {
            return self.later(from_us(self.profile.adapter.timeout_us), Event::Retry(place));
        }
        let hops = self.route_back(place);
        self.settle(place, hops);
        self.release(place);
    }

    /// What the answer takes: the adapters, and as many links as there are.
    fn route_back(&mut self, place: usize) -> Time {
        let (from, to) = (self.packets[place].from, self.packets[place].store.to);
        let nodes = self.hosts.len();
        self.profile.topology.route(nodes, to, from, &self.dead_links, &mut self.route);
        let link = &self.profile.link;
        from_us(self.profile.adapter.latency_us)
            + self.route.links.len() as Time * from_us(link.hop_us)
            + self.route.switches * from_us(link.switch_us)
    }

    /// The sender has its answer, or gives up, after `delay`.
    fn settle(&mut self, place: usize, delay: Time) {
        let packet = &mut self.packets[place];
        if std::mem::replace(&mut packet.settled, true) {
            return;
        }
        let (from, birth) = (packet.from, packet.birth);
        let host = &mut self.hosts[from];
        if host.state == State::Dead || host.birth != birth {
            return;
        }
        host.in_flight -= 1;
        host.answers.push(self.now + delay);
        if std::mem::take(&mut host.stalled) {
            self.wake(from, self.now + delay);
        }
    }

    fn retry(&mut self, place: usize) {
        if !self.take(place) {
            return;
        }
        let Packet { from, settled, attempts, .. } = self.packets[place];
        let adapter = &self.profile.adapter;
        if settled || self.hosts[from].state == State::Dead {
            self.packets[place].settled = true;
        } else if !adapter.retry {
            // Nobody notices.
            self.settle(place, 0);
        } else if attempts > adapter.retries {
            let to = self.packets[place].store.to;
            self.settle(place, 0);
            self.lose(from, to);
        } else {
            self.stats.retries += 1;
            return self.transmit(place);
        }
        self.release(place);
    }

    // Ends and beginnings.

    fn kill(&mut self, node: usize) {
        let host = &mut self.hosts[node];
        host.state = State::Dead;
        host.turn += 1;
        host.node.outbox.take();
        self.ledger.died(node);
        self.ledger.abandon(self.programs[node].planned());
        let adapter = &self.profile.adapter;
        let noticed = from_us(adapter.timeout_us) * Time::from(adapter.retries + 1);
        self.at(self.now + noticed, Event::Gone(node));
        let restart = self.profile.faults.restart_us;
        if restart > 0.0 {
            self.at(self.now + from_us(restart), Event::Restart(node));
        }
    }

    fn gone(&mut self, node: usize) {
        if self.hosts[node].state == State::Dead {
            for other in 0..self.hosts.len() {
                if other != node {
                    self.lose(node, other);
                }
            }
        }
    }

    /// Ends the connection of two nodes. (That both learn of it at once is a membership service's work, which is not
    /// simulated.)
    fn lose(&mut self, one: usize, other: usize) {
        if self.pair(one, other).closed {
            return;
        }
        for (node, peer) in [(one, other), (other, one)] {
            let pair = self.pair(node, peer);
            pair.closed = true;
            pair.life += 1;
            let held = self.held.extract_if((node, peer, 0)..=(node, peer, u64::MAX), |_, _| true);
            for packet in held.map(|(_, packet)| packet).collect::<Vec<_>>() {
                self.at(self.now, Event::Arrive(packet));
            }
            if self.hosts[node].state == State::Dead {
                continue;
            }
            self.hosts[node].node.outbox.get_mut().work.retain(
                |work| !matches!(work, Work::Store(store) | Work::Post(store) if store.to == peer),
            );
            self.tell(node, |program, context| program.lost(context, peer));
        }
    }

    fn tell(&mut self, node: usize, what: impl Fn(&mut P, &mut Context)) {
        let host = &mut self.hosts[node];
        let mut context = Context {
            now: self.now,
            node: &host.node,
            ledger: &mut self.ledger,
            profile: &self.profile,
        };
        what(&mut self.programs[node], &mut context);
        host.arrivals += 1;
        host.interrupted = true;
        if matches!(host.state, State::Polling | State::Asleep) {
            host.step = Step::Again;
            self.wake(node, self.now);
        }
    }

    fn restart(&mut self, node: usize) {
        self.gone(node);
        let host = &mut self.hosts[node];
        zero(host.node.area, 0, host.node.area.len());
        *host = Host {
            node: Node::new(node, host.memory.area(), self.profile.ring, &self.profile.adapter),
            memory: std::mem::replace(&mut host.memory, Memory::new(0)),
            birth: host.birth + 1,
            state: State::Active,
            step: Step::Again,
            interrupted: false,
            stolen: 0,
            in_flight: 0,
            answers: Vec::new(),
            stalled: false,
            ..*host
        };
        self.programs[node] = (self.make)(node);
        self.ledger.plan(self.programs[node].planned());
        for peer in (0..self.hosts.len()).filter(|&peer| peer != node) {
            self.ledger.fresh(node, peer);
            if self.hosts[peer].state == State::Dead {
                self.tell(node, |program, context| program.lost(context, peer));
                continue;
            }
            for (from, to) in [(node, peer), (peer, node)] {
                let pair = self.pair(from, to);
                *pair = Pair { life: pair.life + 1, ..Pair::default() };
            }
            let block = Block::new(self.profile.ring, node);
            zero(self.hosts[peer].node.area, block.start(), Block::bytes(self.profile.ring));
            self.tell(peer, |program, context| program.reconnected(context, node));
        }
        self.wake(node, self.now);
    }
}

/// A link accepts work `now` for something that comes at `time`: it is behind all that was accepted before. Returns when it begins.
/// (So no link does more than it can; packets that meet far from their senders, without a crowd, are not seen to wait.)
fn accept(free: &mut Time, now: Time, time: Time, work: Time) -> Time {
    let begin = time.max(*free);
    *free = now.max(*free) + work;
    begin
}

fn write(area: ringlet_core::memory::Area, at: usize, bytes: &[u8]) {
    // SAFETY: the slice is valid for its length.
    unsafe { area.write(at, bytes.as_ptr(), bytes.len()) };
}

fn zero(area: ringlet_core::memory::Area, at: usize, bytes: usize) {
    let zeros = [0; LINE_BYTES];
    for place in (at..at + bytes).step_by(LINE_BYTES) {
        write(area, place, &zeros[..LINE_BYTES.min(at + bytes - place)]);
    }
}
