//! `ringlet sim`: the rings of the library on virtual time, over interconnects that this machine has not.

mod carried;
mod order;
mod papers;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use ringlet_sim::{
    Carrier, Faults, Outcome, Pattern, Profile, SHIPPED, Scenario, Topology, Traffic,
};
use serde::Serialize;

use ringlet_bench::bench::spec::{Unit, parse_size};
use ringlet_bench::plot::{BLUE, Curve, MESSAGE_SIZE, Panel, Picture};

/// Run ringlet's rings on a simulated cluster
///
/// Nodes on SCI ringlets, a switch, a torus or a Memory Channel hub, with what their hardware costs and how it fails, on
/// virtual time. The same seed gives the same run. Every message is checked: none may be lost, doubled, damaged or out of
/// order, and those to nodes that died come back.
#[derive(Args, Debug)]
pub struct SimArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Run(RunArgs),
    Seeds(SeedsArgs),
    Carried(carried::CarriedArgs),
    Order(order::OrderArgs),
    Papers(papers::PapersArgs),
    Profile(ProfileArgs),
}

/// Run one workload
#[derive(Args, Debug)]
struct RunArgs {
    /// scilan, smile, memory-channel, modern, or a parameter file
    profile: String,
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=512))]
    nodes: u16,
    /// ring, switch:NODES (in each ringlet), torus, hub:SPARES [default: the profile's]
    #[arg(long)]
    topology: Option<Topology>,
    #[arg(long, value_enum, default_value_t = Workload::Pingpong)]
    workload: Workload,
    /// From each sender to each of its receivers
    #[arg(long, value_name = "N", default_value_t = 100)]
    messages: u32,
    /// Bytes of a message
    #[arg(long, default_value = "8", value_parser = parse_size)]
    size: usize,
    /// Sizes from one byte to --size
    #[arg(long)]
    mixed: bool,
    /// Sleep until interrupted instead of polling
    #[arg(long)]
    sleep: bool,
    /// Messages are announced in the receiver's mailbox; else it looks at each peer's memory
    #[arg(long)]
    mailbox: bool,
    /// After so many bytes the sender looks whether they have arrived
    #[arg(long, value_name = "SIZE", default_value = "16K", value_parser = parse_size)]
    mtu: usize,
    /// Like lost=0.01,dead_nodes=1 [default: the profile's]
    #[arg(long)]
    faults: Option<Faults>,
    /// One number, or a range like 0..1000
    #[arg(long, value_name = "SEED", default_value = "0", value_parser = seeds)]
    seed: Range<u64>,
    /// Write everything that happens to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print the result as JSON, a line for each seed
    #[arg(long)]
    json: bool,
    /// Draw time and throughput over message sizes up to 64 KiB; FILE ends in .svg or .png
    #[arg(long, value_name = "FILE", value_parser = ringlet_bench::plot::file, conflicts_with = "trace")]
    plot: Option<PathBuf>,
}

/// Run any cluster with any traffic and any faults, as each seed has it
#[derive(Args, Debug)]
struct SeedsArgs {
    /// One number, or a range like 0..5000
    #[arg(value_parser = seeds)]
    seeds: Range<u64>,
    /// Write everything that happens to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// Print a profile that comes with the program, as the beginning of one's own
#[derive(Args, Debug)]
struct ProfileArgs {
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(SHIPPED.iter().map(|(name, _)| *name)))]
    name: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Workload {
    /// Pairs of nodes; each message is answered before the next
    Pingpong,
    /// Pairs of nodes, one way
    Stream,
    /// As stream, moved between the ring and the kernel's connection time and again
    Moving,
    AllToAll,
    /// As pingpong, in locked buffers whose ends take turns
    Locked,
    /// Active Messages: each request's handler replies before the next is sent
    AmPingpong,
    /// Up to 16 requests under way; long ones are stored in the receiver's memory segment
    AmStore,
    AmAllToAll,
    /// A lock in memory that a hub reflects to all nodes: all want it, and nobody may hold it beside another
    Reflect,
}

impl Workload {
    fn pattern(self) -> Pattern {
        match self {
            Workload::Pingpong | Workload::Locked | Workload::AmPingpong => Pattern::PingPong,
            Workload::Stream | Workload::Moving | Workload::AmStore => Pattern::Stream,
            Workload::AllToAll | Workload::AmAllToAll | Workload::Reflect => Pattern::AllToAll,
        }
    }

    fn carrier(self, mailbox: bool) -> Carrier {
        match self {
            Workload::Locked => Carrier::Locked,
            Workload::Moving => Carrier::Moving,
            Workload::Reflect => Carrier::Reflected,
            Workload::AmPingpong | Workload::AmStore | Workload::AmAllToAll => {
                Carrier::Active { mailbox }
            }
            _ if mailbox => Carrier::Messages,
            _ => Carrier::Bytes,
        }
    }
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?}: {error}"));
    match text.split_once("..") {
        None => number(text).map(|seed| seed..seed.saturating_add(1)),
        Some((first, end)) => match number(first)?..number(end)? {
            range if range.is_empty() => Err("an empty range".into()),
            range => Ok(range),
        },
    }
}

pub fn run(args: SimArgs) -> Result<ExitCode> {
    match args.command {
        Command::Run(args) => run_one(&args),
        Command::Seeds(args) => run_seeds(&args),
        Command::Carried(args) => carried::run(&args),
        Command::Order(args) => order::run(&args),
        Command::Papers(args) => papers::run(&args),
        Command::Profile(args) => {
            let text = SHIPPED.iter().find(|(name, _)| *name == args.name).map(|(_, text)| text);
            ringlet_programs::table::say(text.context("no such profile")?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn profile(name: &str) -> Result<Profile> {
    if let Some(profile) = Profile::shipped(name) {
        return Ok(profile);
    }
    let text = std::fs::read_to_string(name).with_context(|| {
        let known: Vec<_> = SHIPPED.iter().map(|(name, _)| *name).collect();
        format!("{name} is neither a file nor one of {}", known.join(", "))
    })?;
    text.parse().map_err(|error| anyhow::anyhow!("{name}: {error}"))
}

fn trace_file(path: &Option<PathBuf>) -> Result<Option<Box<dyn Write>>> {
    let Some(path) = path else { return Ok(None) };
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Some(Box::new(BufWriter::new(file))))
}

fn scenario(args: &RunArgs) -> Result<Scenario> {
    let mut profile = profile(&args.profile)?;
    profile.topology = args.topology.unwrap_or(profile.topology);
    profile.faults = args.faults.unwrap_or(profile.faults);
    if args.workload == Workload::Reflect && !profile.reflects() {
        bail!("only a hub whose adapters keep order reflects memory, not {}", profile.topology);
    }
    let nodes = usize::from(args.nodes);
    profile.ring = profile.ring.for_nodes(nodes);
    let traffic = Traffic {
        pattern: args.workload.pattern(),
        carrier: args.workload.carrier(args.mailbox),
        nodes,
        messages: args.messages,
        sleep: args.sleep,
        mtu_bytes: args.mtu,
        ..Traffic::default()
    };
    let scenario = Scenario { profile, traffic, size: args.size, mixed: args.mixed };
    let longest = scenario.longest();
    if args.size > longest {
        bail!("these nodes have memory for messages of up to {longest} bytes each");
    }
    Ok(scenario)
}

#[derive(Serialize)]
struct Line<'a> {
    profile: &'a str,
    topology: String,
    workload: Workload,
    nodes: u16,
    seed: u64,
    #[serde(flatten)]
    stats: &'a ringlet_sim::Stats,
    microseconds_per_message: f64,
    megabytes_per_second: f64,
    trace: String,
    violation: Option<String>,
}

fn run_one(args: &RunArgs) -> Result<ExitCode> {
    let scenario = scenario(args)?;
    if let Some(path) = &args.plot {
        sweep(args, scenario, path)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.trace.is_some() && args.seed.clone().count() > 1 {
        bail!("a trace is of one seed");
    }
    let mut bad = 0;
    for seed in args.seed.clone() {
        let began = Instant::now();
        let outcome = scenario.run(seed, trace_file(&args.trace)?);
        let took = began.elapsed().as_secs_f64();
        let Outcome { stats, trace, violation } = &outcome;
        bad += usize::from(violation.is_some());
        let line = Line {
            profile: &args.profile,
            topology: scenario.profile.topology.to_string(),
            workload: args.workload,
            nodes: args.nodes,
            seed,
            stats,
            microseconds_per_message: stats.elapsed_us / stats.messages.max(1) as f64,
            megabytes_per_second: stats.bytes as f64 / stats.elapsed_us.max(1e-6),
            trace: format!("{trace:016x}"),
            violation: violation.as_ref().map(ToString::to_string),
        };
        if args.json {
            serde_json::to_writer(io::stdout(), &line)?;
            println!();
        } else {
            print_outcome(&line, took);
        }
    }
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_outcome(line: &Line, took: f64) {
    let stats = line.stats;
    let ns = |us: f64| Unit::Nanoseconds.show(us * 1e3);
    println!(
        "seed {}: {} messages in {}, {} each, {}; {} packets, {} sent again, {} interrupts, {} returned",
        line.seed,
        stats.messages,
        ns(stats.elapsed_us),
        ns(line.microseconds_per_message),
        Unit::BytesPerSecond.show(line.megabytes_per_second * 1e6),
        stats.packets,
        stats.retries,
        stats.interrupts,
        stats.returned,
    );
    println!(
        "  trace {}; {} events in {took:.1} s of this machine, {}",
        line.trace,
        stats.events,
        Unit::PerSecond.show(stats.messages as f64 / took).replace("/s", " messages/s")
    );
    if let Some(violation) = &line.violation {
        println!("  WRONG: {violation}");
    }
}

fn run_seeds(args: &SeedsArgs) -> Result<ExitCode> {
    let count = args.seeds.end - args.seeds.start;
    if args.trace.is_some() && count > 1 {
        bail!("a trace is of one seed");
    }
    let (mut messages, mut retries, mut returned) = (0, 0, 0);
    for seed in args.seeds.clone() {
        let scenario = Scenario::drawn(seed);
        let outcome = scenario.run(seed, trace_file(&args.trace)?);
        if let Some(violation) = outcome.violation {
            println!("seed {seed}: {violation}");
            println!(
                "  {} nodes, {}, {:?}, up to {} bytes, {}",
                scenario.traffic.nodes,
                scenario.profile.topology,
                scenario.traffic,
                scenario.size,
                scenario.profile.faults
            );
            println!(
                "  again, with everything that happens: ringlet sim seeds {seed} --trace FILE"
            );
            return Ok(ExitCode::FAILURE);
        }
        if count == 1 {
            println!("trace {:016x}", outcome.trace);
        }
        messages += outcome.stats.messages;
        retries += outcome.stats.retries;
        returned += outcome.stats.returned;
    }
    println!(
        "{} seed{}: {messages} messages received, {returned} returned, {retries} packets sent again; nothing lost, doubled, damaged or out of order",
        count,
        if count == 1 { "" } else { "s" }
    );
    Ok(ExitCode::SUCCESS)
}

/// Sizes that figures go through.
fn sizes(last: usize) -> impl Iterator<Item = usize> {
    (0..).map(|bit| 1 << bit).take_while(move |&size| size <= last)
}

fn sweep(args: &RunArgs, mut scenario: Scenario, path: &std::path::Path) -> Result<()> {
    let (mut time, mut rate) = (Vec::new(), Vec::new());
    for size in sizes(scenario.longest().min(64 << 10)) {
        scenario.size = size;
        let Outcome { stats, violation, .. } = scenario.run(args.seed.start, None);
        if let Some(violation) = violation {
            bail!("{size} bytes: {violation}");
        }
        time.push((size as f64, stats.elapsed_us * 1e3 / stats.messages as f64));
        rate.push((size as f64, stats.bytes as f64 / stats.elapsed_us * 1e6));
    }
    let curve = |points| vec![Curve { name: args.profile.clone(), colour: BLUE, points }];
    let panel = |title: &str, unit, points| Panel {
        title: title.into(),
        x: MESSAGE_SIZE,
        unit,
        curves: curve(points),
        limit: None,
    };
    let name = args.workload.to_possible_value().map(|value| value.get_name().to_string());
    let picture = Picture {
        title: format!("{}, simulated", name.unwrap_or_default()),
        subtitle: format!(
            "{}; {} nodes, {}",
            scenario.profile.about, args.nodes, scenario.profile.topology
        ),
        panels: vec![
            panel("Time for each message", Unit::Nanoseconds, time),
            panel("Throughput, all nodes together", Unit::BytesPerSecond, rate),
        ],
    };
    ringlet_bench::plot::draw(path, &picture)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_numbers_and_ranges() {
        assert_eq!(seeds("7"), Ok(7..8));
        assert_eq!(seeds("3..5"), Ok(3..5));
        for text in ["", "x", "5..3", "..", "1..1"] {
            assert!(seeds(text).is_err(), "{text}");
        }
    }
}
