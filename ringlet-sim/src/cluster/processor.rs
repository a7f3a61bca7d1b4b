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
}
