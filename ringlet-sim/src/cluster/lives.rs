//! Nodes that die and start again, and connections that end.

use ringlet_core::layout::LINE_BYTES;

use super::{Cluster, Context, Event, Pair, Program, State, Step, write};
use crate::memory::{Block, Node, Work};
use crate::topology::Topology;
use crate::{Time, from_us};

impl<P: Program> Cluster<P> {
    pub(super) fn kill(&mut self, node: usize) {
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

    pub(super) fn gone(&mut self, node: usize) {
        if self.hosts[node].state == State::Dead {
            for other in 0..=self.hub() {
                if other != node {
                    self.lose(node, other);
                }
            }
        }
    }

    /// Ends the connection of two nodes. (That both learn of it at once is a membership service's work, which is not
    /// simulated.)
    pub(super) fn lose(&mut self, one: usize, other: usize) {
        if self.pair(one, other).closed {
            return;
        }
        for (node, peer) in [(one, other), (other, one)] {
            let pair = self.pair(node, peer);
            pair.closed = true;
            pair.life += 1;
            let pair = (node, peer, 0)..=(node, peer, u64::MAX);
            let held: Vec<_> = self.held.range(pair).map(|(&key, &packet)| (key, packet)).collect();
            for (key, packet) in held {
                self.held.remove(&key);
                self.at(self.now, Event::Arrive(packet));
            }
            if self.hosts[node].state == State::Dead || self.hub() == node.max(peer) {
                continue;
            }
            let work = &mut self.hosts[node].node.outbox.get_mut().work;
            work.retain(|work| !matches!(work, Work::Store(store) if store.to == peer));
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

    /// Nobody shall go on alone (Memory Channel, \"partition-proof\"): who doesn't reach the hub ends, and stays so.
    pub(super) fn cut_off(&mut self, node: usize) {
        if self.hosts[node].state != State::Dead {
            self.kill(node);
        }
    }

    pub(super) fn restart(&mut self, node: usize) {
        self.gone(node);
        let hub = self.hub();
        let topology = self.profile.topology;
        if matches!(topology, Topology::Hub(_))
            && !topology.route(hub, node, hub, &self.dead_links, &mut self.route)
        {
            return;
        }
        let host = &mut self.hosts[node];
        zero(host.node.area, 0, host.node.area.len());
        host.node = Node::new(node, host.node.area, self.profile.ring, &self.profile.adapter);
        host.birth += 1;
        (host.state, host.step) = (State::Active, Step::Again);
        (host.interrupted, host.stalled, host.stolen) = (false, false, 0);
        (host.in_flight, host.answers) = (0, Vec::new());
        self.programs[node] = (self.make)(node);
        self.ledger.plan(self.programs[node].planned());
        self.ledger.joins(node);
        for peer in (0..=hub).filter(|&peer| peer != node) {
            if self.hosts[peer].state == State::Dead {
                self.ledger.fresh(node, peer);
                self.tell(node, |program, context| program.lost(context, peer));
                continue;
            }
            for (from, to) in [(node, peer), (peer, node)] {
                let pair = self.pair(from, to);
                *pair = Pair { life: pair.life + 1, ..Pair::default() };
            }
            if peer == hub {
                continue;
            }
            self.ledger.fresh(node, peer);
            let block = Block::new(self.profile.ring, node);
            self.hosts[peer].node.kernel.get_mut().remove(&node);
            zero(self.hosts[peer].node.area, block.start(), Block::bytes(self.profile.ring));
            self.tell(peer, |program, context| program.reconnected(context, node));
        }
        self.wake(node, self.now);
    }
}

fn zero(area: ringlet_core::memory::Area, at: usize, bytes: usize) {
    let zeros = [0; LINE_BYTES];
    for place in (at..at + bytes).step_by(LINE_BYTES) {
        write(area, place, &zeros[..LINE_BYTES.min(at + bytes - place)]);
    }
}
