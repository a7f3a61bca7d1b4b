//! `ringlet sim carried`: what carries between hosts, on virtual time.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use ringlet_sim::{Carried, CarriedOutcome, CarriedStats};
use serde::Serialize;

use super::{seeds, trace_file};
use ringlet_bench::bench::spec::{Unit, parse_size};

/// Run what carries connections between hosts, over rails that delay, shuffle, repeat and fail
///
/// The code of the node services, on a cluster of nodes: each byte must arrive, in order and once, or both ends must agree on what goes back to the kernel.
/// What is not given is as each seed has it.
#[derive(Args, Debug)]
pub struct CarriedArgs {
    /// One number, or a range like 0..1000
    #[arg(value_parser = seeds)]
    seeds: Range<u64>,
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=512))]
    nodes: Option<u16>,
    /// Of each node
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8))]
    rails: Option<u16>,
    /// Of each node, to the next ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: Option<u16>,
    /// The most that a connection carries, each way
    #[arg(long, value_parser = parse_size)]
    size: Option<usize>,
    /// Of what is sent, this part comes late
    #[arg(long, value_name = "PART", value_parser = part)]
    late: Option<f64>,
    /// By up to so much
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    late_us: Option<u32>,
    /// Of what is written, this part is written again
    #[arg(long, value_name = "PART", value_parser = part)]
    repeated: Option<f64>,
    /// A rail fails in this part of what is sent
    #[arg(long, value_name = "PART", value_parser = part)]
    fails: Option<f64>,
    /// Nodes that die
    #[arg(long, value_name = "N")]
    dead_nodes: Option<u16>,
    /// Pairs of services that lose one another, and find one another again
    #[arg(long, value_name = "N")]
    lost_sessions: Option<u16>,
    /// Write everything that happens to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print the result as JSON, a line for each seed
    #[arg(long)]
    json: bool,
}

/// A probability, at which all still comes to an end.
pub fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if (0.0..=0.5).contains(&part) => Ok(part),
        _ => Err("a number from 0 to 0.5".into()),
    }
}

impl CarriedArgs {
    fn scenario(&self, seed: u64) -> Carried {
        let mut carried = Carried::drawn(seed);
        let set = |to: &mut usize, given: Option<u16>| *to = given.map_or(*to, usize::from);
        set(&mut carried.nodes, self.nodes);
        set(&mut carried.rails, self.rails);
        set(&mut carried.connections, self.connections);
        carried.bytes = self.size.map_or(carried.bytes, |size| size as u64);
        let disorder = &mut carried.disorder;
        set(&mut disorder.dead_nodes, self.dead_nodes);
        set(&mut disorder.lost_sessions, self.lost_sessions);
        disorder.late = self.late.unwrap_or(disorder.late);
        disorder.late_us = self.late_us.map_or(disorder.late_us, f64::from);
        disorder.repeated = self.repeated.unwrap_or(disorder.repeated);
        disorder.fails = self.fails.unwrap_or(disorder.fails);
        carried
    }
}

#[derive(Serialize)]
struct Line<'a> {
    seed: u64,
    #[serde(flatten)]
    carried: &'a Carried,
    #[serde(flatten)]
    stats: &'a CarriedStats,
    trace: String,
    wrong: Option<String>,
}

pub fn run(args: &CarriedArgs) -> Result<ExitCode> {
    let count = args.seeds.end - args.seeds.start;
    if args.trace.is_some() && count > 1 {
        bail!("a trace is of one seed");
    }
    let (began, mut total, mut bad) = (Instant::now(), CarriedStats::default(), 0);
    for seed in args.seeds.clone() {
        let carried = args.scenario(seed);
        let CarriedOutcome { stats, trace, wrong } = carried.run(seed, trace_file(&args.trace)?);
        bad += usize::from(wrong.is_some());
        let trace = format!("{trace:016x}");
        if args.json {
            let line = Line { seed, carried: &carried, stats: &stats, trace, wrong };
            serde_json::to_writer(io::stdout(), &line)?;
            println!();
        } else if let Some(wrong) = wrong {
            println!("seed {seed}: WRONG {wrong}");
            println!("  {carried:?}");
        } else if count == 1 {
            println!("trace {trace}");
        }
        total.arrived += stats.arrived;
        total.back += stats.back;
        total.died += stats.died;
        total.kernel += stats.kernel;
        total.bytes += stats.bytes;
        total.operations += stats.operations;
        total.late += stats.late;
        total.repeated += stats.repeated;
        total.failures += stats.failures;
        total.kept_bytes = total.kept_bytes.max(stats.kept_bytes);
        total.elapsed_us += stats.elapsed_us;
    }
    if !args.json {
        print_total(&total, count, began.elapsed().as_secs_f64());
    }
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_total(total: &CarriedStats, count: u64, took: f64) {
    let plural = if count == 1 { "" } else { "s" };
    println!(
        "{count} seed{plural}: of {} connections all has arrived, {} went back to the kernel, {} lost an end, {} found no rail",
        total.arrived, total.back, total.died, total.kernel
    );
    println!(
        "  {} bytes by {} messages and writes, {} of them after their rail had failed; {} parts written again, {} failures",
        total.bytes, total.operations, total.late, total.repeated, total.failures
    );
    println!(
        "  at most {} bytes kept by a node; {} of virtual time in {took:.1} s",
        total.kept_bytes,
        Unit::Nanoseconds.show(total.elapsed_us * 1e3)
    );
}
