//! Runs of nodes: how they start and die, what they submit, and how they do what the order tells them to.

use std::io::Write;
use std::time::Duration;

use rand::RngExt;
use ringlet_order::{Life, NotTaken, Order, Output, PAYLOAD_BYTES, Settings};
use xxhash_rust::xxh3::xxh3_64;

use super::{BEAT_US, Cluster, Event, Planted, SILENT_US, Seen, duration};
use crate::{Time, from_us, to_us};

/// Whoever has stopped for good is started again within so long.
const AGAIN_US: f64 = 20_000.0;

/// A run of a node.
pub(super) struct Run {
    pub(super) order: Order,
    pub(super) life: Life,
    /// So many outputs from now it dies.
    pub(super) fuse: Option<u64>,
    pub(super) frozen: Time,
    pub(super) leaves: bool,
}

pub(super) struct Node {
    pub(super) name: String,
    pub(super) kept: Option<Vec<u8>>,
    pub(super) incarnation: u64,
    pub(super) run: Option<Run>,
    /// For good.
    pub(super) dead: bool,
    /// What it is yet to submit.
    pub(super) left: usize,
}

impl Cluster {
    pub(super) fn running(&mut self, node: usize, incarnation: u64) -> Option<&mut Run> {
        self.nodes[node].run.as_mut().filter(|run| run.life.incarnation == incarnation)
    }

    pub(super) fn tick_later(&mut self, node: usize, incarnation: u64) {
        let late = self.up_to(200.0);
        let Some(run) = self.running(node, incarnation) else { return };
        let due = run.order.due();
        if due < Duration::MAX {
            let time = due.as_nanos() as Time * 1000 + late;
            self.at(time, Event::Tick(node, incarnation));
        }
    }

    pub(super) fn start(&mut self, node: usize) {
        let planted = self.ordered.trouble.planted;
        if self.nodes[node].run.is_some() || self.nodes[node].dead {
            return;
        }
        let founders = (0..self.ordered.founders).map(|node| format!("n{node:02}")).collect();
        let Node { name, kept, incarnation, .. } = &mut self.nodes[node];
        if planted == Some(Planted::SameRun) && *incarnation > 0 {
            *kept = None;
        } else {
            *incarnation += 1;
        }
        let life = Life { node: name.clone(), incarnation: *incarnation };
        let settings = Settings {
            me: life.clone(),
            founders,
            silent: duration(from_us(SILENT_US)),
            beat: duration(from_us(BEAT_US)),
        };
        let order = Order::new(settings, kept.as_deref(), duration(self.now));
        let incarnation = *incarnation;
        self.nodes[node].run = Some(Run { order, life, fuse: None, frozen: 0, leaves: false });
        self.stats.runs += 1;
        for other in 0..self.nodes.len() {
            self.meet(node, other, 0.0);
            self.meet(other, node, 0.0);
        }
        self.at(self.now, Event::Tick(node, incarnation));
        self.drain(node);
    }

    pub(super) fn die(&mut self, node: usize) {
        let Some(run) = self.nodes[node].run.take() else { return };
        self.stats.deaths += 1;
        if self.rng.random() {
            (0..self.nodes.len()).for_each(|other| self.part(other, run.life.clone()));
        }
        let soon = self.rng.random();
        let again = self.now + self.up_to(if soon { 500.0 } else { 4.0 * SILENT_US });
        // Somebody has to be left who has a voice in that view.
        let others = run.order.view().is_some_and(|view| {
            let runs =
                self.nodes.iter().filter(|node| !node.dead).filter_map(|node| node.run.as_ref());
            runs.filter_map(|run| run.order.view()).any(|other| other == view)
        });
        let stays = others
            && self.nodes.iter().filter(|node| node.dead).count() < self.ordered.trouble.buried
            && self.calm.is_none()
            && node != 0;
        if stays {
            self.bury(node);
            return;
        }
        // What was kept is damaged: a run that is to go on from it says so, and the node comes as another one.
        let forgets = others
            && self.nodes.len() < self.ordered.nodes + self.ordered.trouble.forgotten
            && self.calm.is_none();
        if forgets && let Some(kept) = &self.nodes[node].kept {
            let incarnation = self.nodes[node].incarnation + 1;
            let founders = vec![run.life.node.clone()];
            let me = Life { node: run.life.node.clone(), incarnation };
            let (silent, beat) = (Duration::from_micros(8000), Duration::from_micros(1000));
            let cut = self.rng.random_range(0..kept.len());
            let order = Order::new(
                Settings { me, founders, silent, beat },
                Some(&kept[..cut]),
                duration(self.now),
            );
            if !order.is_over() {
                self.wrong = Some(format!(
                    "{} takes part with {cut} bytes of what it had kept",
                    run.life.node
                ));
            }
            self.bury(node);
            let (name, left) = (format!("n{:02}", self.nodes.len()), self.nodes[node].left);
            self.by_name.insert(name.clone(), self.nodes.len());
            self.nodes.push(Node {
                name,
                kept: None,
                incarnation: 0,
                run: None,
                dead: false,
                left,
            });
            let new = self.nodes.len() - 1;
            self.at(again, Event::Submit(new));
            return self.at(again, Event::Starts(new));
        }
        self.at(again, Event::Starts(node));
    }

    /// It never comes back under this name.
    pub(super) fn bury(&mut self, node: usize) {
        self.nodes[node].dead = true;
        self.history.buried.insert(self.nodes[node].name.clone());
    }

    pub(super) fn submit(&mut self, node: usize) {
        let (burst, size, planted) =
            (self.ordered.burst, self.ordered.size, self.ordered.trouble.planted);
        if self.nodes[node].left == 0 || self.nodes[node].dead {
            return;
        }
        for _ in 0..self.rng.random_range(1..=burst) {
            let bytes = self.rng.random_range(8..=size.clamp(8, PAYLOAD_BYTES));
            let mut payload = vec![0; bytes];
            payload[..8].copy_from_slice(&self.rng.random::<u64>().to_le_bytes());
            // A word of its own, so that the rest tells it from others.
            payload[bytes - 8..].copy_from_slice(&self.rng.random::<u64>().to_le_bytes());
            let now = duration(self.now);
            let Some(run) = self.nodes[node].run.as_mut().filter(|run| run.frozen <= self.now)
            else {
                break;
            };
            match run.order.submit(payload.clone(), now) {
                Ok(_) if planted == Some(Planted::Loses) && self.stats.submitted % 50 == 49 => {
                    self.history.seen.push((run.life.clone(), Seen::Submits(xxh3_64(&payload))));
                    self.history.seen.push((run.life.clone(), Seen::Submits(xxh3_64(&payload))));
                    self.stats.submitted += 2;
                }
                Ok(_) => {
                    self.history.seen.push((run.life.clone(), Seen::Submits(xxh3_64(&payload))));
                    self.stats.submitted += 1;
                }
                Err(NotTaken::Full) => {
                    self.stats.full += 1;
                    break;
                }
                Err(NotTaken::Stopped) => break,
                Err(NotTaken::TooLong) => {
                    self.wrong = Some(format!("{bytes} bytes are too long"));
                    return;
                }
            }
            self.nodes[node].left -= 1;
            if self.nodes[node].left == 0 {
                break;
            }
        }
        self.drain(node);
        let rest = from_us(self.ordered.trouble.within_us);
        let pause = self.up_to(
            self.ordered.trouble.within_us * 2.0 * burst as f64 / self.ordered.payloads as f64,
        );
        // What is left when all is calm, or for want of a view, is never submitted.
        if self.now + pause < rest {
            self.at(self.now + pause.max(1), Event::Submit(node));
        }
    }

    /// Does what its owner is told to do; or dies in the middle of it.
    pub(super) fn drain(&mut self, node: usize) {
        loop {
            let Some(run) = &mut self.nodes[node].run else { return };
            let Some(output) = run.order.output() else { return };
            if let Some(fuse) = &mut run.fuse {
                if *fuse == 0 {
                    return self.die(node);
                }
                *fuse -= 1;
            }
            self.done(node, output);
        }
    }

    pub(super) fn done(&mut self, node: usize, output: Output) {
        let planted = self.ordered.trouble.planted;
        let Some(run) = &mut self.nodes[node].run else { return };
        let life = run.life.clone();
        if let Some(trace) = &mut self.trace
            && !matches!(output, Output::Send { .. })
        {
            let shown = format!("{output:?}");
            let _ = writeln!(
                trace,
                "{:.3} {}/{}: {:.200}",
                to_us(self.now),
                life.node,
                life.incarnation,
                shown
            );
        }
        match output {
            Output::Keep(bytes) => {
                self.stats.kept += 1;
                let kept = &mut self.nodes[node].kept;
                if planted != Some(Planted::ForgetsPromises) || kept.is_none() {
                    *kept = Some(bytes);
                }
            }
            Output::Send { to, frame } => self.send(node, life, to, frame.to_vec()),
            Output::Deliver { sequence, origin, number, payload } => {
                self.stats.delivered += 1;
                let what = xxh3_64(&payload);
                let seen = Seen::Delivered { sequence, origin, number, what };
                let due = sequence % 64 == 33 && life.node == "n01";
                match planted {
                    Some(Planted::Skips) if due => {}
                    Some(Planted::Doubles) if due => {
                        self.history.seen.push((life.clone(), seen.clone()));
                        self.history.seen.push((life, seen));
                    }
                    // What comes next takes this one's place, and the other way round.
                    Some(Planted::Swaps) => match self.history.seen.last_mut() {
                        Some((
                            last,
                            Seen::Delivered {
                                sequence: before,
                                origin: of,
                                number: nth,
                                what: which,
                            },
                        )) if *last == life && due && *before + 1 == sequence => {
                            let Seen::Delivered { origin, number, what, .. } = seen else { return };
                            let swapped = Seen::Delivered {
                                sequence,
                                origin: of.clone(),
                                number: *nth,
                                what: *which,
                            };
                            (*of, *nth, *which) = (origin, number, what);
                            self.history.seen.push((life, swapped));
                        }
                        _ => self.history.seen.push((life, seen)),
                    },
                    _ => self.history.seen.push((life, seen)),
                }
            }
            Output::View { sequence, view, joined, .. } => {
                self.history.seen.push((life, Seen::View { sequence, view, joined }))
            }
            Output::Stable { sequence } => self.history.seen.push((life, Seen::Stable(sequence))),
            Output::Stopped { why } => self.stopped(node, why),
        }
    }

    pub(super) fn stopped(&mut self, node: usize, why: String) {
        let Some(run) = &mut self.nodes[node].run else { return };
        if !run.order.is_over() {
            self.stats.stopped += 1;
            if self.ordered.trouble.planted == Some(Planted::AnyHalf) {
                let view = run.order.view().cloned();
                for member in view.iter().flat_map(|view| &view.members) {
                    let other = self.by_name[&member.node];
                    if self.cut.get(&(other, node)).is_some_and(|cuts| *cuts > 0) {
                        let now = duration(self.now);
                        self.nodes[node].run.as_mut().expect("it runs").order.bury(member, now);
                    }
                }
            }
            return;
        }
        match (why.contains("taken for dead"), run.leaves && why.contains("has left")) {
            (true, _) => self.stats.excluded += 1,
            (_, true) => self.stats.left += 1,
            _ if self.ordered.trouble.planted.is_some() => {}
            _ => self.wrong = Some(format!("{:?} has stopped: {why}", run.life)),
        }
        // (All that it says now is nothing.)
        self.nodes[node].run = None;
        let again = self.now + self.up_to(AGAIN_US);
        self.at(again, Event::Starts(node));
    }
}
