//! The papers' own measurements, again: the rings of `ringlet-core` on the hardware that they describe.
//!
//! The papers' values are those that their texts state, with the place; nothing is fitted to them but the parameters that a
//! profile says were taken from there.

use std::cell::Cell;
use std::rc::Rc;

use ringlet_core::sync::Ordering::Relaxed;

use crate::cluster::{Cluster, Context, Program, Step};
use crate::ledger::Ledger;
use crate::profile::Profile;
use crate::rings::{Carrier, Pattern, Traffic};
use crate::scenario::Scenario;

/// What a figure's curves show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Axis {
    Microseconds,
    MegabytesPerSecond,
}

pub struct Curve {
    pub name: String,
    pub points: Vec<(usize, f64)>,
}

/// One number that a paper states.
pub struct Row {
    pub what: &'static str,
    pub unit: &'static str,
    pub simulated: f64,
    pub paper: f64,
    /// The paper states a bound, not a value.
    pub bound: bool,
    /// Where it says so, and why the two differ where they do.
    pub place: &'static str,
    pub why: &'static str,
}

pub struct Figure {
    pub paper: &'static str,
    pub name: &'static str,
    /// What the curves are drawn over.
    pub x: &'static str,
    pub axis: Axis,
    pub curves: Vec<Curve>,
    pub rows: Vec<Row>,
}

/// A pair of nodes with messages of one size, and so many silent ones that both are connected with.
#[derive(Clone)]
struct Pair {
    profile: Profile,
    carrier: Carrier,
    silent: usize,
    sleep: bool,
    copy: bool,
    mtu_bytes: usize,
}

impl Pair {
    fn new(name: &str) -> Pair {
        let profile = Profile::shipped(name).expect("it is shipped");
        Pair {
            profile,
            carrier: Carrier::Bytes,
            silent: 0,
            sleep: false,
            copy: true,
            mtu_bytes: 1500,
        }
    }

    fn elapsed_us(&self, pattern: Pattern, size: usize, messages: u32) -> f64 {
        let traffic = Traffic {
            pattern,
            carrier: self.carrier,
            nodes: 2 + self.silent,
            messages,
            sleep: self.sleep,
            mtu_bytes: self.mtu_bytes,
            copy: self.copy,
            connected: true,
            ..Traffic::default()
        };
        let scenario = Scenario { profile: self.profile.clone(), traffic, size, mixed: false };
        let outcome = scenario.run(0, None);
        assert_eq!(outcome.violation, None, "without faults nothing goes wrong");
        outcome.stats.elapsed_us
    }

    /// Half a round trip.
    fn transfer_us(&self, size: usize) -> f64 {
        self.elapsed_us(Pattern::PingPong, size, 50) / 100.0
    }

    fn throughput_mb_s(&self, size: usize) -> f64 {
        let messages = ((1 << 20) / size).clamp(30, 3000);
        (size * messages) as f64 / self.elapsed_us(Pattern::Stream, size, messages as u32)
    }

    /// Writing to the same place over and over, waiting for the answers each time; microseconds for one.
    fn raw_us(&self, size: usize) -> f64 {
        let count = ((1 << 20) / size).clamp(20, 1000) as u64;
        let elapsed = Rc::new(Cell::new(0));
        let last = elapsed.clone();
        let make =
            move |node| Raw { size, left: if node == 0 { count } else { 0 }, last: last.clone() };
        let ledger = Ledger::new(2, 1, 0, 1, false);
        let mut cluster = Cluster::new(self.profile.clone(), ledger, 2, 0, make);
        cluster.run();
        crate::to_us(elapsed.get()) / count as f64
    }
}

/// Writes without flow control.
struct Raw {
    size: usize,
    left: u64,
    last: Rc<Cell<u64>>,
}

impl Program for Raw {
    fn step(&mut self, cx: &mut Context) -> Step {
        if cx.node.id == 1 {
            return Step::Poll;
        }
        if cx.now > 0 {
            self.left -= 1;
            cx.ledger.abandon(1);
            self.last.set(cx.now);
        }
        if self.left > 0 {
            cx.node.store_bytes(1, 0, &vec![1; self.size]);
            cx.node.barrier();
        }
        Step::Again
    }
    fn lost(&mut self, _: &mut Context, _: usize) {}
    fn reconnected(&mut self, _: &mut Context, _: usize) {}
    fn planned(&self) -> u64 {
        self.left
    }
}

/// Node 0 writes to the memory of all nodes, its own included, and waits for that.
struct ToAll {
    word: u64,
    left: u64,
    last: Rc<Cell<u64>>,
}

impl Program for ToAll {
    fn step(&mut self, cx: &mut Context) -> Step {
        cx.node.work(crate::from_us(cx.profile.node.look_us));
        if cx.node.reflected(cx.node.id).load(Relaxed) != self.word {
            return Step::Poll;
        }
        if self.word > 0 {
            cx.ledger.abandon(1);
            self.last.set(cx.now);
        }
        if self.left == 0 {
            return Step::Poll;
        }
        self.left -= 1;
        self.word += 1;
        cx.node.reflect(self.word);
        Step::Again
    }
    fn lost(&mut self, _: &mut Context, _: usize) {}
    fn reconnected(&mut self, _: &mut Context, _: usize) {}
    fn planned(&self) -> u64 {
        self.left
    }
}

fn to_all_us(profile: &Profile, nodes: usize) -> f64 {
    let count = 100;
    let elapsed = Rc::new(Cell::new(0));
    let last = elapsed.clone();
    let make = move |node| {
        let left = if node == 0 { count } else { 0 };
        ToAll { word: 0, left, last: last.clone() }
    };
    let ledger = Ledger::new(nodes, 1, 0, 1, false);
    Cluster::new(profile.clone(), ledger, nodes, 0, make).run();
    crate::to_us(elapsed.get()) / count as f64
}

/// So many runs of a lock that the hub's order makes, with faults: those in which it failed, or a node saw another order.
fn out_of_order(profile: &Profile, runs: u64) -> f64 {
    let mut profile = profile.clone();
    let faults = "lost=0.02,corrupt=0.02,unanswered=0.02,late=0.05,dead_nodes=2,restart_us=500";
    profile.faults = faults.parse().expect("these are faults");
    let carrier = Carrier::Reflected;
    let traffic = Traffic {
        pattern: Pattern::AllToAll,
        carrier,
        nodes: 8,
        messages: 30,
        ..Default::default()
    };
    let scenario = Scenario { profile, traffic, size: 8, mixed: false };
    (0..runs).filter(|&seed| scenario.run(seed, None).violation.is_some()).count() as f64
}

fn sizes(first: usize, last: usize) -> Vec<usize> {
    (0..).map(|bit| first << bit).take_while(|&size| size <= last).collect()
}

fn curve(name: &str, sizes: &[usize], value: impl Fn(usize) -> f64) -> Curve {
    Curve { name: name.into(), points: sizes.iter().map(|&size| (size, value(size))).collect() }
}

/// The first size, in hundreds, whose rate is nine tenths of the rate of large messages.
fn nine_tenths(rate: impl Fn(usize) -> f64) -> f64 {
    let enough = 0.9 * rate(256 << 10);
    let first = (1..).map(|hundreds| hundreds * 100).find(|&size| rate(size) >= enough);
    first.unwrap_or_default() as f64
}

fn row(
    what: &'static str,
    unit: &'static str,
    simulated: f64,
    paper: f64,
    place: &'static str,
) -> Row {
    Row { what, unit, simulated, paper, bound: false, place, why: "" }
}

impl Row {
    fn bound(self) -> Row {
        Row { bound: true, ..self }
    }
    fn because(self, why: &'static str) -> Row {
        Row { why, ..self }
    }
}

const STACKS: &str = "the 20000 cycles that §1 quotes for a message are another system's; NT's and the drivers' own costs are not stated";

fn scilan() -> Vec<Figure> {
    let paper = "SCILAN";
    let scilan = Pair::new("scilan");
    let without_copy = Pair { copy: false, ..scilan.clone() };
    let long = Pair { mtu_bytes: 16 << 10, ..scilan.clone() };
    let long_without_copy = Pair { mtu_bytes: 16 << 10, ..without_copy.clone() };
    let sleeping = Pair { sleep: true, ..scilan.clone() };
    let stacks = &scilan.profile.stacks;
    let large = 256 << 10;
    let raw = |size| size as f64 / scilan.raw_us(size);
    let rate = |size| scilan.throughput_mb_s(size);
    let all = sizes(64, 64 << 10);
    let small = sizes(64, 4096);

    let copy = Figure {
        paper,
        name: "Figure 7: copy performance",
        x: "message size",
        axis: Axis::MegabytesPerSecond,
        curves: vec![curve("SCI memcpy", &all, raw), curve("SCILAN", &all, rate)],
        rows: vec![
            row("SCI memcpy, large", "MB/s", raw(large), 55.0, "§4.2")
                .because("it is the parameter store_mb_s; what is less is the wait for answers"),
            row("SCILAN, large, at most", "MB/s", rate(large), 21.8, "§4.2, X_max").bound(),
            row("SCILAN reaches 90 % at", "bytes", nine_tenths(rate), 1500.0, "§4.2")
                .because("the parameter call_us was derived from it, and halved; but the two ends work at the same time"),
        ],
    };
    let ratio =
        |one: &Pair, other: &Pair| one.throughput_mb_s(large) / other.throughput_mb_s(large);
    let flow = Figure {
        paper,
        name: "Figure 8: flow control and receiver copy",
        x: "message size",
        axis: Axis::MegabytesPerSecond,
        curves: vec![
            curve("SCI memcpy", &all, raw),
            curve("nocopy SCILAN, MTU 16K", &all, |size| long_without_copy.throughput_mb_s(size)),
            curve("nocopy SCILAN, MTU 1500", &all, |size| without_copy.throughput_mb_s(size)),
            curve("SCILAN", &all, rate),
        ],
        rows: vec![
            row("SCILAN, large", "MB/s", rate(large), 20.0, "§4.5, \"about\""),
            row(
                "with copy: MTU 16K over MTU 1500",
                "times",
                ratio(&long, &scilan),
                1.0,
                "§4.5: the MTU does not matter",
            ),
            row(
                "nocopy: MTU 16K over MTU 1500",
                "times",
                ratio(&long_without_copy, &without_copy),
                1.0,
                "§4.5: \"a considerable difference\"",
            )
            .bound(),
        ],
    };
    let mut curves = vec![curve("SCILAN", &all, rate)];
    curves
        .extend(stacks.iter().map(|(name, stack)| curve(name, &all, |s| stack.throughput_mb_s(s))));
    let best = |size| stacks.values().map(|stack| stack.throughput_mb_s(size)).fold(0.0, f64::max);
    let margin = all.iter().map(|&size| rate(size) / best(size)).fold(f64::MAX, f64::min);
    let ndis = &stacks["SCI-NDIS"];
    let throughput = Figure {
        paper,
        name: "Figure 9: throughput",
        x: "message size",
        axis: Axis::MegabytesPerSecond,
        curves,
        rows: vec![
            row("SCI/NDIS, large", "MB/s", ndis.throughput_mb_s(large), 10.0, "§4.6"),
            row("SCI/NDIS reaches 90 % at", "bytes", nine_tenths(|s| ndis.throughput_mb_s(s)), 25_000.0, "§4.6")
                .because("messages are sent one behind the other here; what kept the driver from that is not stated"),
            row("SCILAN over the best of the others, at least", "times", margin, 2.0, "§4.6: at all sizes")
                .bound()
                .because(STACKS),
        ],
    };
    let ethernet = &stacks["100baseT"];
    let small_packets = Figure {
        paper,
        name: "Figure 10: small packets",
        x: "message size",
        axis: Axis::MegabytesPerSecond,
        curves: vec![
            curve("SCILAN", &small, rate),
            curve("100baseT", &small, |size| ethernet.throughput_mb_s(size)),
        ],
        rows: vec![],
    };
    let steps = sizes(1, 4096);
    let mut curves = vec![
        curve("SCILAN polling", &steps, |size| scilan.transfer_us(size)),
        curve("SCILAN interrupt", &steps, |size| sleeping.transfer_us(size)),
    ];
    curves.extend(stacks.iter().map(|(name, stack)| curve(name, &steps, |s| stack.transfer_us(s))));
    let table = "table 3";
    let transfer = Figure {
        paper,
        name: "Figure 11 and table 3: transfer time",
        x: "message size",
        axis: Axis::Microseconds,
        curves,
        rows: vec![
            row("SCILAN polling", "us", scilan.transfer_us(1), 16.1, table)
                .because("SCILAN's sender reads the receiver's read pointer across SCI (§3.4), 2 us each time; ringlet reads nothing there"),
            row("SCILAN interrupt", "us", sleeping.transfer_us(1), 179.8, table)
                .because("only one interrupt and one way out of the kernel are known (6000 cycles each); NT's scheduling is not stated"),
            row("100baseT", "us", ethernet.transfer_us(1), 209.3, table).because(STACKS),
            row("ATM", "us", stacks["ATM"].transfer_us(1), 304.5, table).because(STACKS),
            row("SCI/NDIS", "us", ndis.transfer_us(1), 394.1, table).because(STACKS),
        ],
    };
    vec![copy, flow, throughput, small_packets, transfer]
}

fn memory_channel() -> Vec<Figure> {
    let direct = Pair { mtu_bytes: 16 << 10, ..Pair::new("memory-channel") };
    let mut acknowledged = direct.clone();
    acknowledged.profile.adapter.ordered = false;
    let latency = direct.transfer_us(32);
    let steps = sizes(4, 4096);
    let counts = [2, 4, 6, 8];
    let lock = |pattern| {
        let held = |nodes| {
            let one = Pair {
                carrier: Carrier::Reflected,
                silent: nodes - 2,
                ..Pair::new("memory-channel")
            };
            let times = if pattern == Pattern::AllToAll { nodes } else { 1 };
            one.elapsed_us(pattern, 8, 50) / (50 * times) as f64
        };
        counts.iter().map(|&nodes| (nodes, held(nodes))).collect()
    };
    let to_all = |nodes| to_all_us(&direct.profile, nodes);
    let reflected = Figure {
        paper: "Memory Channel",
        name: "Reflected memory: writes to all nodes, and a lock made of them",
        x: "nodes",
        axis: Axis::Microseconds,
        curves: vec![
            curve("a write to all", &counts, to_all),
            Curve { name: "lock, one wants it".into(), points: lock(Pattern::Stream) },
            Curve { name: "lock, all want it".into(), points: lock(Pattern::AllToAll) },
        ],
        rows: vec![
            row(
                "a write to all of 8 nodes, its writer too, at most",
                "us",
                to_all(8),
                5.0,
                "\"Requirements\": the goal for a message",
            )
            .bound(),
            row(
                "20 runs with faults: a node saw another order, at most",
                "times",
                out_of_order(&direct.profile, 20),
                0.0,
                "\"Requirements\": strict order even under errors",
            )
            .bound(),
        ],
    };
    let latency_figure = Figure {
        paper: "Memory Channel",
        name: "Figure 5: one-way message latency",
        x: "message size",
        axis: Axis::Microseconds,
        curves: vec![curve("direct", &steps, |size| direct.transfer_us(size))],
        rows: vec![
            row(
                "direct, 32 bytes",
                "us",
                latency,
                4.5,
                "\"Write-and-run\": 30 times the overhead of 150 ns",
            ),
            row("direct, at most", "us", latency, 5.0, "\"Requirements\": the goal").bound(),
            row(
                "FDDI's 375 us over direct",
                "times",
                375.0 / latency,
                83.0,
                "\"Process-to-process\"; FDDI: 2500 times 150 ns",
            ),
            row(
                "remote acknowledge of a write",
                "us",
                acknowledged.raw_us(32),
                5.0,
                "PVM with recovery 20 us, without 15",
            ),
        ],
    };
    vec![latency_figure, reflected]
}

/// Everything, by paper and number.
pub fn figures() -> Vec<Figure> {
    let mut figures = scilan();
    figures.extend(smile());
    figures.extend(memory_channel());
    figures
}

fn smile() -> Vec<Figure> {
    let paper = "SMiLE";
    let pair = Pair { carrier: Carrier::Active { mailbox: false }, ..Pair::new("smile") };
    let all = sizes(8, 64 << 10);
    let rate = |size| pair.throughput_mb_s(size);
    let messages = Figure {
        paper,
        name: "Table 1 and figure 5: Active Messages",
        x: "message size",
        axis: Axis::MegabytesPerSecond,
        curves: vec![curve("store", &all, rate)],
        rows: vec![
            row("round trip", "us", 2.0 * pair.transfer_us(8), 15.0, "table 1")
                .because("latency_us is the write latency of the project's own bridge, not of the adapters that table 1 is about"),
            row("store, large", "MB/s", rate(64 << 10), 21.0, "table 1")
                .because("the raw rate is only known as less than 21 / 0.8 MB/s, which is what store_mb_s says; the layer's own cost is not stated"),
        ],
    };
    // What a reply takes longer, since all connections are looked at.
    let waiting = |mailbox, silent| {
        Pair { carrier: Carrier::Active { mailbox }, silent, ..pair.clone() }.transfer_us(8)
    };
    let counts = [1, 2, 4, 8, 16, 32, 62];
    let growth =
        |mailbox, more: usize, fewer: usize| waiting(mailbox, more) - waiting(mailbox, fewer);
    let polling = Figure {
        paper,
        name: "Figure 6: polling with many endpoints",
        x: "silent endpoints",
        axis: Axis::Microseconds,
        curves: vec![
            curve("looking at each", &counts, |count| waiting(false, count)),
            curve("remote enqueue", &counts, |count| waiting(true, count)),
        ],
        rows: vec![
            row(
                "growth from 16 to 32 over that from 8 to 16",
                "times",
                growth(false, 32, 16) / growth(false, 16, 8),
                2.0,
                "§4: linear",
            ),
            row(
                "growth from 8 to 62 with remote enqueue, at most",
                "us",
                growth(true, 62, 8),
                0.0,
                "§4: proposed, not measured",
            )
            .bound(),
        ],
    };
    vec![messages, polling]
}
