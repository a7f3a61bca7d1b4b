//! What a node's processor does: its program's steps, and the work that they leave.

use std::cmp::Reverse;

use super::{Cluster, Context, Event, Program, State, Step};
use crate::memory::Work;
use crate::{Time, from_us, transfer};

impl<P: Program> Cluster<P> {
    pub(super) fn wake(&mut self, node: usize, time: Time) {
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
    pub(super) fn turn(&mut self, node: usize) {
        while self.goes_on() {
            let idle = self.hosts[node].node.outbox.get_mut().work.is_empty();
            let goes_on = if idle { self.step(node) } else { self.work(node) };
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

    /// Does the first piece of work, or waits until it can be done.
    fn work(&mut self, node: usize) -> bool {
        let host = &mut self.hosts[node];
        let outbox = &mut host.node.outbox.get_mut().work;
        match outbox.front() {
            None => true,
            Some(Work::Store(_)) => self.store(node),
            Some(Work::Barrier) => match self.answered(node, 0) {
                Err(time) => self.wait_for_answer(node, time),
                Ok(()) => {
                    self.hosts[node].node.outbox.get_mut().work.pop_front();
                    true
                }
            },
            Some(&Work::Processor(time)) => {
                outbox.pop_front();
                self.busy(node, time)
            }
            Some(Work::Engine) => {
                outbox.pop_front();
                self.busy(node, from_us(self.profile.adapter.dma_setup_us))
            }
            Some(&Work::Copy(bytes)) => {
                outbox.pop_front();
                let time = transfer(bytes, self.profile.node.copy_mb_s) as f64 * host.slowness;
                let until = host.bus_free.max(self.now) + time as Time;
                host.bus_free = until;
                self.until(node, until)
            }
        }
    }

    /// The first piece of work is a store: the processor's part, then the adapter's.
    fn store(&mut self, node: usize) -> bool {
        let adapter = &self.profile.adapter;
        let (small, rate, few) =
            (adapter.small_packet_bytes, adapter.store_mb_s, adapter.outstanding - 1);
        if let Err(time) = self.answered(node, few) {
            return self.wait_for_answer(node, time);
        }
        let outbox = &mut self.hosts[node].node.outbox.get_mut().work;
        let Some(Work::Store(store)) = outbox.front_mut() else { return true };
        if !std::mem::replace(&mut store.paid, true) {
            let bytes = (store.len as usize).max(small);
            return self.busy(node, transfer(bytes, rate));
        }
        if let Some(Work::Store(store)) = outbox.pop_front() {
            self.post(node, store);
        }
        true
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

    fn wait_for_answer(&mut self, node: usize, time: Option<Time>) -> bool {
        self.hosts[node].stalled = time.is_none();
        time.is_some_and(|time| self.until(node, time))
    }
}
