//! A packet's way from outbox to memory, and what happens to it on the way.

use rand::RngExt;
use ringlet_core::layout::WANT_NOTHING;
use ringlet_core::mailbox;

use super::{Cluster, Event, Packet, Program, State, Step, write};
use crate::memory::{EVERYONE, Kind, Store};
use crate::{Time, from_us, transfer};

impl<P: Program> Cluster<P> {
    pub(super) fn post(&mut self, from: usize, mut store: Store) {
        if store.to == EVERYONE {
            store.to = self.hub();
        }
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
        let hub = self.hub();
        let reachable =
            self.profile.topology.route(hub, from, to, &self.dead_links, &mut self.route);
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
        let mut time = self.now;
        // A reflected write pays for both adapters on its way to the hub.
        if from != hub {
            host.adapter_free = start + transfer(bytes, adapter.mb_s);
            time = host.adapter_free + from_us(adapter.latency_us);
        }
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
        // The hub passes on what comes as it comes.
        time += if to == hub { 0 } else { on_wire };
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

    pub(super) fn arrive(&mut self, place: usize) {
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
        let at_hub = to == self.hub();
        let host = &mut self.hosts[to];
        let mut delay = 0;
        if !at_hub {
            let start = host.bus_free.max(self.now);
            host.bus_free = start + transfer(bytes, self.profile.node.bus_mb_s);
            delay = host.bus_free - self.now;
        }
        self.packets[place].delivered = true;
        self.later(delay, Event::Deliver(place));
    }

    /// The hub has a write for all: that gives it its place among all. The copies, the writer's own too, are its business now, so
    /// that nobody misses one whose writer dies.
    fn reflect(&mut self, place: usize) {
        let store = self.packets[place].store.clone();
        self.ledger.reflect(store.at, &store.body);
        for to in 0..self.hub() {
            self.post(self.hub(), Store { to, ..store.clone() });
        }
    }

    /// The packet reaches the node's memory.
    pub(super) fn deliver(&mut self, place: usize) {
        if !self.take(place) {
            return;
        }
        let Packet { from, ref store, number, .. } = self.packets[place];
        let Store { to, at, kind, len, body, .. } = *store;
        if to == self.hub() {
            self.reflect(place);
            return self.answer(place);
        }
        if self.hosts[to].state == State::Dead {
            return self.later(from_us(self.profile.adapter.timeout_us), Event::Retry(place));
        }
        if from == self.hub() {
            self.ledger.reflected(to, at, &body);
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
                armed = self.hosts[to].node.wish(at).granted_by_sender() != WANT_NOTHING
            }
            Kind::Announce => {
                mailbox::announce(self.hosts[to].node.ready(), from);
                armed = self.hosts[to].node.wish(at).granted_by_sender() != WANT_NOTHING;
            }
            Kind::Kernel => {
                let node = &self.hosts[to].node;
                node.kernel(from, |kernel| kernel.arrives(at as u64, &body[..len as usize]));
                armed = node.data_wish(from).granted_by_sender() != WANT_NOTHING;
            }
            Kind::StimulateSender => {
                armed = self.hosts[to].node.wish(at).granted_by_receiver() != WANT_NOTHING
            }
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

    /// The answer takes the adapters and as many links as there are, if there is a way.
    fn answer(&mut self, place: usize) {
        let (from, to) = (self.packets[place].from, self.packets[place].store.to);
        let nodes = self.hub();
        let topology = self.profile.topology;
        let reachable = topology.route(nodes, to, from, &self.dead_links, &mut self.route);
        let retry = self.profile.adapter.retry;
        if retry && (!reachable || self.chance(self.profile.faults.unanswered)) {
            let timeout = from_us(self.profile.adapter.timeout_us);
            return self.later(timeout, Event::Retry(place));
        }
        let link = &self.profile.link;
        let way = from_us(self.profile.adapter.latency_us)
            + self.route.links.len() as Time * from_us(link.hop_us)
            + self.route.switches * from_us(link.switch_us);
        self.settle(place, way);
        self.release(place);
    }

    /// The sender has its answer, or gives up, after `delay`.
    fn settle(&mut self, place: usize, delay: Time) {
        let packet = &mut self.packets[place];
        if std::mem::replace(&mut packet.settled, true) {
            return;
        }
        let (from, birth) = (packet.from, packet.birth);
        let hub = self.hub();
        let host = &mut self.hosts[from];
        if from == hub || host.state == State::Dead || host.birth != birth {
            return;
        }
        host.in_flight -= 1;
        host.answers.push(self.now + delay);
        if std::mem::take(&mut host.stalled) {
            self.wake(from, self.now + delay);
        }
    }

    pub(super) fn retry(&mut self, place: usize) {
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
            match from.max(to) == self.hub() {
                true => self.cut_off(from.min(to)),
                false => self.lose(from, to),
            }
        } else {
            self.stats.retries += 1;
            return self.transmit(place);
        }
        self.release(place);
    }
}

/// A link accepts work `now` for something that comes at `time`: it is behind all that was accepted before. Returns when it begins.
/// (So no link does more than it can; packets that meet far from their senders, without a crowd, are not seen to wait.)
fn accept(free: &mut Time, now: Time, time: Time, work: Time) -> Time {
    let begin = time.max(*free);
    *free = now.max(*free) + work;
    begin
}
