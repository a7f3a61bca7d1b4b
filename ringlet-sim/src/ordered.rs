//! The one order of a cluster (`ringlet-order`), unmodified, over a network that loses, delays, shuffles and doubles frames, parts nodes from each
//! other, and in nodes that die at any step and come back with what they have kept.

mod history;
mod network;
mod runs;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use ringlet_order::Life;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::{Time, from_us, to_us};
pub use history::{History, Seen};
use network::TOLD_US;
use runs::Node;

const BEAT_US: f64 = 1000.0;
const SILENT_US: f64 = 8000.0;
/// Where nothing fails any more all is in order within so many times the time of silence, and for each node.
const CALM: f64 = 60.0;
const CALM_OF_NODE: f64 = 8.0;

/// What of all that is promised to, or by, the order is not kept: then a check has to find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Planted {
    /// A node delivers two payloads in the other order; one not at all; one twice.
    Swaps,
    Skips,
    Doubles,
    /// What is kept is what was kept first.
    ForgetsPromises,
    /// Half of the nodes are enough, whichever: the others are buried by those who can't reach them.
    AnyHalf,
    /// A run that has lost everything has the last one's number.
    SameRun,
    /// Frames of former views pass for the present one's.
    NoFence,
    /// Acknowledges more than there is.
    Boasts,
    /// Submissions get lost between a program and its node.
    Loses,
    /// Partitions that never heal.
    Apart,
}

/// What goes wrong. Probabilities are of each frame.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Trouble {
    pub lost: f64,
    pub doubled: f64,
    pub late: f64,
    pub late_us: f64,
    /// Deaths; and of those who return so many without what they had kept, under a new name.
    pub deaths: usize,
    pub forgotten: usize,
    /// Of those who ask, propose or tell a view, this part dies in the middle of it, or can't reach anybody any more for a time.
    pub amid: f64,
    /// Sets of nodes that can't reach the others, or hear them, for a time; single ways that carry nothing.
    pub partitions: usize,
    pub one_way: usize,
    /// Owners that do nothing for a time.
    pub frozen: usize,
    pub leaves: usize,
    /// Nodes that never come back, and are buried by an operator.
    pub buried: usize,
    /// When all of that is over.
    pub within_us: f64,
    pub planted: Option<Planted>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Ordered {
    pub nodes: usize,
    pub founders: usize,
    /// Of each node, in bursts of up to so many.
    pub payloads: usize,
    pub burst: usize,
    pub size: usize,
    pub trouble: Trouble,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OrderedStats {
    pub runs: u64,
    pub views: u64,
    /// Those in which nobody knew anything any more.
    pub empty_views: u64,
    pub submitted: u64,
    pub full: u64,
    pub delivered: u64,
    /// What a run delivered behind the end of its last view: nobody else has seen it.
    pub unseen: u64,
    pub frames: u64,
    pub lost: u64,
    pub doubled: u64,
    pub late: u64,
    pub kept: u64,
    pub deaths: u64,
    /// Runs that could not reach enough others, and that were taken for dead.
    pub stopped: u64,
    pub excluded: u64,
    pub left: u64,
    /// From the end of all trouble until all was in order, at most.
    pub calm_us: f64,
    /// Virtual microseconds.
    pub elapsed_us: f64,
}

impl OrderedStats {
    pub fn add(&mut self, other: &OrderedStats) {
        self.runs += other.runs;
        self.views += other.views;
        self.empty_views += other.empty_views;
        self.submitted += other.submitted;
        self.full += other.full;
        self.delivered += other.delivered;
        self.unseen += other.unseen;
        self.frames += other.frames;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.late += other.late;
        self.kept += other.kept;
        self.deaths += other.deaths;
        self.stopped += other.stopped;
        self.excluded += other.excluded;
        self.left += other.left;
        self.calm_us = self.calm_us.max(other.calm_us);
        self.elapsed_us += other.elapsed_us;
    }
}

pub struct OrderedOutcome {
    pub stats: OrderedStats,
    /// Of everything that happened, in order.
    pub trace: u64,
    pub wrong: Option<String>,
}

impl Ordered {
    /// Any cluster and any trouble, as the seed has it.
    pub fn drawn(seed: u64) -> Ordered {
        let mut rng = Pcg64Mcg::seed_from_u64(!seed);
        let nodes = match rng.random_range(0..40) {
            0 => rng.random_range(16..=64),
            1..4 => rng.random_range(8..=15),
            _ => rng.random_range(2..=7),
        };
        let many = nodes > 7;
        let mut some = |most: f64| if rng.random() { rng.random_range(0.0..most) } else { 0.0 };
        let (lost, doubled, late) = (some(0.25), some(0.2), some(0.3));
        let late_us = 1.0 + some(5000.0);
        let mut few = |most: usize| if rng.random() { rng.random_range(0..=most) } else { 0 };
        let trouble = Trouble {
            lost,
            doubled,
            late,
            late_us,
            deaths: few(nodes + 4),
            forgotten: few(2),
            amid: 0.0,
            partitions: few(5),
            one_way: few(6),
            frozen: few(3),
            leaves: few(2),
            buried: if few(3) == 1 { 1 + few(nodes / 2).min(nodes - 2) } else { 0 },
            within_us: 0.0,
            planted: None,
        };
        let longest = if rng.random_range(0..8) == 0 { 17 } else { 10 };
        let within_us = rng.random_range(10_000.0..if many { 150_000.0 } else { 400_000.0 });
        Ordered {
            nodes,
            founders: if rng.random() { nodes } else { rng.random_range(1..=nodes) },
            payloads: if many { rng.random_range(1..60) } else { rng.random_range(1..400) },
            burst: 1 << rng.random_range(0..7),
            size: 1 << rng.random_range(3..longest),
            trouble: Trouble {
                within_us,
                amid: if rng.random() { rng.random_range(0.0..0.1) } else { 0.0 },
                ..trouble
            },
        }
    }

    /// Runs it. The same seed, the same outcome; `trace` gets a line for everything that happens.
    pub fn run(&self, seed: u64, trace: Option<Box<dyn Write>>) -> OrderedOutcome {
        Cluster::new(self, seed, trace).run()
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// By node and, where one run only is meant, its incarnation.
    Tick(usize, u64),
    Frame(usize, u64, Life, Vec<u8>),
    Submit(usize),
    /// At some step soon.
    Dies(usize),
    Starts(usize),
    Leaves(usize),
    Freezes(usize, Time),
    /// Nothing goes from any of these to any of those; the same passes again.
    Cut(Vec<usize>, Vec<usize>),
    Heals(Vec<usize>, Vec<usize>),
    /// What the network says of another one.
    Up(usize, u64, Life),
    Down(usize, u64, Life),
    Calm,
}

struct Cluster {
    ordered: Ordered,
    nodes: Vec<Node>,
    by_name: BTreeMap<String, usize>,
    /// Ways that carry nothing, and how often they were cut.
    cut: BTreeMap<(usize, usize), u32>,
    now: Time,
    events: BTreeMap<(Time, u64), Event>,
    count: u64,
    handled: u64,
    rng: Pcg64Mcg,
    history: History,
    calm: Option<Time>,
    stats: OrderedStats,
    hash: Xxh3,
    trace: Option<Box<dyn Write>>,
    wrong: Option<String>,
}

fn duration(time: Time) -> Duration {
    Duration::from_nanos(time / 1000)
}

impl Cluster {
    fn new(ordered: &Ordered, seed: u64, trace: Option<Box<dyn Write>>) -> Cluster {
        let name = |node| format!("n{node:02}");
        let node = |at| Node {
            name: name(at),
            kept: None,
            incarnation: 0,
            run: None,
            dead: false,
            left: ordered.payloads,
        };
        Cluster {
            nodes: (0..ordered.nodes).map(node).collect(),
            by_name: (0..ordered.nodes).map(|node| (name(node), node)).collect(),
            ordered: ordered.clone(),
            cut: BTreeMap::new(),
            now: 0,
            events: BTreeMap::new(),
            count: 0,
            handled: 0,
            rng: Pcg64Mcg::seed_from_u64(seed),
            history: History::default(),
            calm: None,
            stats: OrderedStats::default(),
            hash: Xxh3::new(),
            trace,
            wrong: None,
        }
    }

    fn run(mut self) -> OrderedOutcome {
        self.begin();
        let nodes = self.ordered.nodes as f64;
        let bound =
            from_us(self.ordered.trouble.within_us + SILENT_US * (CALM + CALM_OF_NODE * nodes));
        while self.wrong.is_none() && !self.is_done() {
            let Some(((time, _), event)) = self.events.pop_first() else { break };
            self.now = time;
            if time > bound {
                self.wrong = Some(self.unfinished());
                break;
            }
            self.note(&event);
            self.handle(event);
        }
        self.finish()
    }

    fn finish(mut self) -> OrderedOutcome {
        let wrong = self.wrong.take().or_else(|| self.history.wrong());
        let mut views = BTreeMap::new();
        for (_, seen) in &self.history.seen {
            if let Seen::View { view, joined, .. } = seen {
                views.insert(view.number, joined.len() == view.members.len());
            }
        }
        self.stats.views = views.len() as u64;
        self.stats.empty_views =
            views.iter().filter(|(number, empty)| **number > 1 && **empty).count() as u64;
        self.stats.unseen = self.history.unseen();
        self.stats.elapsed_us = to_us(self.now);
        self.stats.calm_us = self.calm.map_or(0.0, |calm| to_us(self.now - calm));
        OrderedOutcome { stats: self.stats, trace: self.hash.digest(), wrong }
    }

    fn any_node(&mut self) -> usize {
        self.rng.random_range(0..self.nodes.len())
    }

    fn begin(&mut self) {
        let trouble = self.ordered.trouble;
        let within = from_us(trouble.within_us);
        for node in 0..self.nodes.len() {
            let soon = self.rng.random();
            let start = self.up_to(if soon { TOLD_US } else { trouble.within_us / 4.0 });
            self.at(start, Event::Starts(node));
            let first = self.rng.random_range(0..within);
            self.at(first, Event::Submit(node));
        }
        for _ in 0..trouble.deaths {
            let (node, time) = (self.any_node(), self.rng.random_range(0..within));
            self.at(time, Event::Dies(node));
        }
        for _ in 0..trouble.leaves {
            let (node, time) = (self.any_node(), self.rng.random_range(0..within));
            self.at(time, Event::Leaves(node));
        }
        for _ in 0..trouble.frozen {
            let (node, time) = (self.any_node(), self.rng.random_range(0..within));
            let until = time + self.up_to(4.0 * SILENT_US);
            self.at(time, Event::Freezes(node, until.min(within)));
        }
        for nth in 0..trouble.partitions + trouble.one_way {
            let mut nodes: Vec<_> = (0..self.nodes.len()).collect();
            nodes.shuffle(&mut self.rng);
            let (from, to, both) = if nth < trouble.partitions {
                // Into even halves, often.
                let half = nodes.len() / 2;
                let size =
                    if self.rng.random() { half } else { self.rng.random_range(1..nodes.len()) };
                let others = nodes.split_off(size);
                (nodes, others, true)
            } else if self.rng.random() {
                (vec![nodes[0]], vec![nodes[1]], false)
            } else {
                // Deaf, or dumb.
                let others = nodes.split_off(1);
                if self.rng.random() { (nodes, others, false) } else { (others, nodes, false) }
            };
            let time = self.rng.random_range(0..within);
            let until = (time + self.up_to(6.0 * SILENT_US)).min(within);
            for (from, to) in
                [(&from, &to), (&to, &from)].into_iter().take(if both { 2 } else { 1 })
            {
                self.at(time, Event::Cut(from.clone(), to.clone()));
                if trouble.planted != Some(Planted::Apart) {
                    self.at(until, Event::Heals(from.clone(), to.clone()));
                }
            }
        }
        self.at(within, Event::Calm);
    }

    fn up_to(&mut self, us: f64) -> Time {
        from_us(self.rng.random_range(0.0..=us))
    }

    fn at(&mut self, time: Time, event: Event) {
        self.count += 1;
        self.events.insert((time.max(self.now), self.count), event);
    }

    fn note(&mut self, event: &Event) {
        self.hash.update(&self.now.to_le_bytes());
        match event {
            Event::Frame(to, _, from, frame) => {
                self.hash.update(&[*to as u8]);
                self.hash.update(from.node.as_bytes());
                self.hash.update(frame);
            }
            event => self.hash.update(format!("{event:?}").as_bytes()),
        }
        if let Some(trace) = &mut self.trace {
            let text = match event {
                Event::Frame(to, run, from, frame) => {
                    let shown = &frame[..frame.len().min(64)];
                    format!(
                        "frame {}/{} to {to:02}/{run}: {} bytes {shown:02x?}",
                        from.node,
                        from.incarnation,
                        frame.len()
                    )
                }
                event => format!("{event:?}"),
            };
            // (A trace that can't be written is seen to be short.)
            let _ = writeln!(trace, "{:.3} {text}", to_us(self.now));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Tick(node, run) => {
                let frozen = self.nodes[node].run.as_ref().map_or(0, |run| run.frozen);
                if frozen > self.now {
                    return self.at(frozen, Event::Tick(node, run));
                }
                let now = duration(self.now);
                // (The operator tells all who ask.)
                let calm = self.calm.is_some();
                let dead = self.nodes.iter().filter(|node| node.dead && calm);
                let dead: Vec<_> = dead
                    .map(|node| Life { node: node.name.clone(), incarnation: node.incarnation })
                    .collect();
                if let Some(run) = self.running(node, run) {
                    dead.iter().for_each(|life| run.order.bury(life, now));
                    run.order.tick(now);
                    self.drain(node);
                }
                self.tick_later(node, run);
            }
            Event::Frame(node, run, from, mut frame) => {
                let frozen = self.nodes[node].run.as_ref().map_or(0, |run| run.frozen);
                if frozen > self.now {
                    return self.at(frozen, Event::Frame(node, run, from, frame));
                }
                let (now, planted) = (duration(self.now), self.ordered.trouble.planted);
                if let Some(run) = self.running(node, run) {
                    // (It is behind version and kind; a view that was decided on has its own.)
                    if planted == Some(Planted::NoFence)
                        && frame[1] != 10
                        && let Some(view) = run.order.view()
                    {
                        frame[2..10].copy_from_slice(&view.number.to_le_bytes());
                    }
                    if let Err(fault) = run.order.heard(&from, frame, now)
                        && self.ordered.trouble.planted.is_none()
                    {
                        self.wrong =
                            Some(format!("a frame of {from:?} to {node} is refused: {fault}"));
                    }
                    self.drain(node);
                }
            }
            Event::Submit(node) => self.submit(node),
            Event::Dies(node) => {
                let steps = self.rng.random_range(0..30);
                match &mut self.nodes[node].run {
                    Some(_) if steps < 5 => self.die(node),
                    Some(run) => run.fuse = Some(steps - 5),
                    None => {}
                }
            }
            Event::Starts(node) => self.start(node),
            Event::Leaves(node) => {
                let now = duration(self.now);
                if let Some(run) = &mut self.nodes[node].run {
                    run.leaves = true;
                    run.order.leave(now);
                    self.drain(node);
                }
            }
            Event::Freezes(node, until) => {
                if let Some(run) = &mut self.nodes[node].run {
                    run.frozen = until;
                }
            }
            Event::Cut(from, to) => self.cut(&from, &to, true),
            Event::Heals(from, to) => self.cut(&from, &to, false),
            Event::Up(node, run, other) => {
                let now = duration(self.now);
                if let Some(run) = self.running(node, run) {
                    run.order.up(other, now);
                    self.drain(node);
                }
            }
            Event::Down(node, run, other) => {
                let now = duration(self.now);
                if let Some(run) = self.running(node, run) {
                    run.order.down(&other, now);
                    self.drain(node);
                }
            }
            Event::Calm => self.calm(),
        }
    }

    /// Nothing fails any more: all that is to come back does, and the dead are buried.
    fn calm(&mut self) {
        self.calm = Some(self.now);
        for node in 0..self.nodes.len() {
            if let Some(run) = &mut self.nodes[node].run {
                run.fuse = None;
            }
            let again = self.now + self.up_to(TOLD_US);
            self.at(again, Event::Starts(node));
        }
        // (Behind whatever the network has yet to say.)
        for (one, other) in
            (0..self.nodes.len()).flat_map(|one| (0..one).map(move |other| (one, other)))
        {
            self.meet(one, other, TOLD_US);
            self.meet(other, one, TOLD_US);
        }
    }

    /// Is all in order? Those who run are in one view, and have all that was ever submitted by one of them.
    fn is_done(&mut self) -> bool {
        // (It takes a look at everything.)
        self.handled += 1;
        if self.calm.is_none() || !self.handled.is_multiple_of(64) {
            return false;
        }
        self.unfinished().is_empty()
    }

    /// What is not.
    fn unfinished(&self) -> String {
        let last = self.history.last();
        let mut views = BTreeSet::new();
        let mut delivered = BTreeSet::new();
        for node in self.nodes.iter().filter(|node| !node.dead) {
            let Some(run) = &node.run else { return format!("{} does not run", node.name) };
            let Some(last) = last.get(&run.life) else {
                return format!("{:?} is in no view", run.life);
            };
            let Some(view) = run.order.view() else {
                return format!("{:?} is in no view", run.life);
            };
            if last.own < last.submitted {
                return format!(
                    "{:?} has submitted {} and delivered {} of them",
                    run.life, last.submitted, last.own
                );
            }
            if last.stable < last.delivered {
                return format!(
                    "{:?} has delivered {} and knows of {} that all have it",
                    run.life, last.delivered, last.stable
                );
            }
            if !view.members.contains(&run.life) {
                return format!("{:?} is in a view without itself", run.life);
            }
            views.insert(format!("{view:?}"));
            delivered.insert(last.delivered);
        }
        if views.len() > 1 || delivered.len() > 1 {
            return format!("nodes are in {views:?}, and have delivered {delivered:?}");
        }
        let members = self
            .nodes
            .iter()
            .filter_map(|node| node.run.as_ref())
            .filter_map(|run| run.order.view())
            .map(|view| view.members.len())
            .max();
        let running = self.nodes.iter().filter(|node| !node.dead).count();
        if members != Some(running) {
            return format!("{running} nodes run, and {members:?} are in the view");
        }
        String::new()
    }
}
