//! `ringlet sim order`: the one order of a cluster, on virtual time.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use ringlet_sim::{Ordered, OrderedOutcome, OrderedStats};
use serde::Serialize;

use super::{seeds, trace_file};
use ringlet_bench::bench::spec::Unit;

/// Run the one order of a cluster, over a network that loses, doubles and parts, in nodes that die at any step
///
/// What is to reflect memory over several hosts: all nodes must see one order, whatever fails, each node's own in its order and once, and all must be in
/// one view in the end, with everything. What is not given is as each seed has it.
#[derive(Args, Debug)]
pub struct OrderArgs {
    /// One number, or a range like 0..1000
    #[arg(value_parser = seeds)]
    seeds: Range<u64>,
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=64))]
    nodes: Option<u16>,
    /// Of each node
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    payloads: Option<u32>,
    /// Of the frames, this part is lost
    #[arg(long, value_name = "PART", value_parser = super::carried::part)]
    lost: Option<f64>,
    /// Nodes that die
    #[arg(long, value_name = "N")]
    deaths: Option<u16>,
    /// Sets of nodes that can't reach the others for a time
    #[arg(long, value_name = "N")]
    partitions: Option<u16>,
    /// Write everything that happens to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print the result as JSON, a line for each seed
    #[arg(long)]
    json: bool,
}

impl OrderArgs {
    fn scenario(&self, seed: u64) -> Ordered {
        let mut ordered = Ordered::drawn(seed);
        if let Some(nodes) = self.nodes {
            ordered.nodes = usize::from(nodes);
            ordered.founders = ordered.founders.min(ordered.nodes);
        }
        ordered.payloads = self.payloads.map_or(ordered.payloads, |payloads| payloads as usize);
        let trouble = &mut ordered.trouble;
        trouble.lost = self.lost.unwrap_or(trouble.lost);
        trouble.deaths = self.deaths.map_or(trouble.deaths, usize::from);
        trouble.partitions = self.partitions.map_or(trouble.partitions, usize::from);
        ordered
    }
}

#[derive(Serialize)]
struct Line<'a> {
    seed: u64,
    #[serde(flatten)]
    ordered: &'a Ordered,
    #[serde(flatten)]
    stats: &'a OrderedStats,
    trace: String,
    wrong: Option<String>,
}

pub fn run(args: &OrderArgs) -> Result<ExitCode> {
    let count = args.seeds.end - args.seeds.start;
    if args.trace.is_some() && count > 1 {
        bail!("a trace is of one seed");
    }
    let (began, mut total, mut bad) = (Instant::now(), OrderedStats::default(), 0);
    for seed in args.seeds.clone() {
        let ordered = args.scenario(seed);
        let OrderedOutcome { stats, trace, wrong } = ordered.run(seed, trace_file(&args.trace)?);
        bad += usize::from(wrong.is_some());
        let trace = format!("{trace:016x}");
        if args.json {
            let line = Line { seed, ordered: &ordered, stats: &stats, trace, wrong };
            serde_json::to_writer(io::stdout(), &line)?;
            println!();
        } else if let Some(wrong) = wrong {
            println!("seed {seed}: WRONG {wrong}");
            println!("  {ordered:?}");
        } else if count == 1 {
            println!("trace {trace}");
        }
        total.add(&stats);
    }
    if !args.json {
        print_total(&total, count, began.elapsed().as_secs_f64());
    }
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_total(total: &OrderedStats, count: u64, took: f64) {
    let plural = if count == 1 { "" } else { "s" };
    println!(
        "{count} seed{plural}: {} runs of nodes in {} views, {} of them empty; {} deaths, {} taken for dead, {} could not reach enough others, {} left",
        total.runs,
        total.views,
        total.empty_views,
        total.deaths,
        total.excluded,
        total.stopped,
        total.left
    );
    println!(
        "  {} payloads submitted, {} deliveries, {} of them behind the end of a view; {} frames, {} lost, {} doubled, {} late",
        total.submitted,
        total.delivered,
        total.unseen,
        total.frames,
        total.lost,
        total.doubled,
        total.late
    );
    println!(
        "  all in order {} after the last trouble at most; {} of virtual time in {took:.1} s",
        Unit::Nanoseconds.show(total.calm_us * 1e3),
        Unit::Nanoseconds.show(total.elapsed_us * 1e3)
    );
}
