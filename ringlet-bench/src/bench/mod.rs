//! `ringlet bench`: kernel TCP and UDP, Unix sockets and ringlet side by side on this machine.
//!
//! For each figure two fresh processes run the same ordinary socket program ([`server`], [`client`]); ringlet is only
//! in their environment. Transports take turns within a round, and a ratio is judged within its round, so that what
//! else happens on the machine strikes all alike.

mod args;
mod carried;
mod child;
mod client;
mod cost;
mod datagrams;
mod ethernet;
pub mod ethom;
mod handover;
pub mod hierarchy;
mod limits;
pub mod machine;
mod many;
mod messages;
mod mirror;
mod native;
mod orders;
mod parent;
mod place;
mod plan;
mod plot;
mod ports;
mod reflect;
mod report;
mod server;
pub mod spec;
pub mod stats;
pub mod symbol;
mod talk;
mod trips;
mod wire;

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::{SigSet, Signal};

pub use args::{BenchArgs, Paper, PapersArgs, Part};
use args::{Group, Sizes};
use machine::Machine;
use plan::Case;
pub use report::Row;
use report::{Heading, Report, Sample};
use spec::parse_size;

pub fn run(args: BenchArgs) -> Result<ExitCode> {
    // A peer that is gone is an error of one row (EPIPE), not our end.
    SigSet::from(Signal::SIGPIPE).thread_block()?;
    if let Some(spec) = &args.child {
        return Ok(child::run(spec));
    }
    if args.plot.is_some() && !args.only.is_empty() && !args.only.contains(&Group::Latency) {
        bail!("--plot draws latency, which --only leaves out");
    }
    let mut notes = Vec::new();
    let cases = plan::plan(&args, &mut notes)?;
    let machine = Machine::look()?;
    let rows = rows_of(&cases);
    let ring_expected = |row: &&Row| {
        let mut cases = cases.iter().filter(|case| case.title == row.title);
        let mut contenders = cases.next().into_iter().flat_map(|case| &case.contenders);
        contenders.any(|each| each.label == row.transport && each.expects_ring())
    };
    let measured = rows.iter().filter(|row| row.error.is_none());
    let off_ring = |row: &&Row| !matches!(row.path.as_str(), "ring" | "-");
    let strayed = measured.filter(ring_expected).filter(off_ring).count();
    if strayed > 0 {
        notes.push(format!("{strayed} of ringlet's rows did not stay on the ring; see path"));
    }
    let report = Report { machine, command: std::env::args().collect(), notes, rows };
    present(&args, &report)?;
    let failed = report.rows.iter().any(|row| row.error.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What the Memory Channel's paper measured, but for its programs.
pub fn of_memory_channel(rounds: u32, quick: bool) -> Result<Vec<Row>> {
    SigSet::from(Signal::SIGPIPE).thread_block()?;
    Ok(rows_of(&plan::memory_channel(rounds, quick)?))
}

/// What ETHOM's paper measured, by these.
pub fn of_ethom(rounds: u32, quick: bool, overs: &[spec::Over]) -> Result<Vec<Row>> {
    SigSet::from(Signal::SIGPIPE).thread_block()?;
    Ok(rows_of(&plan::ethom(rounds, quick, overs)))
}

fn rows_of(cases: &[Case]) -> Vec<Row> {
    let heading = |case: &Case| Heading {
        case: case.name,
        title: case.title.clone(),
        contenders: case.contenders.iter().map(|contender| contender.label).collect(),
    };
    let headings: Vec<Heading> = cases.iter().map(heading).collect();
    report::rows(&headings, &measure(cases))
}

fn present(args: &BenchArgs, report: &Report) -> Result<()> {
    // Drawing every size is no reason to list every size.
    let usual = Sizes::usual(args.quick).0;
    let shown = |row: &Row| {
        let size = if row.case == "latency" { parse_size(&row.what).ok() } else { None };
        args.sizes.is_some() || size.is_none_or(|size| usual.contains(&size))
    };
    // Files first: they are there even if nobody reads the table to its end.
    let to_stdout = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let json = serde_json::to_string_pretty(report)? + "\n";
    if let Some(path) = args.json.as_ref().filter(|_| !to_stdout) {
        fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &args.plot {
        plot::draw(path, &report.rows, &report.machine)?;
    }
    let table = report::table(report, shown);
    if to_stdout {
        anstream::stderr().write_all(table.as_bytes())?;
        io::stdout().write_all(json.as_bytes())?;
    } else {
        anstream::stdout().write_all(table.as_bytes())?;
    }
    Ok(())
}

/// Round by round, case by case, each contender in turn.
fn measure(cases: &[Case]) -> Vec<Sample> {
    let rounds = cases.iter().map(|case| case.rounds).max().unwrap_or(0);
    let total: usize = cases.iter().map(|c| c.contenders.len() * c.rounds as usize).sum();
    // Draws on standard error, and not at all where that is no terminal.
    let bar = ProgressBar::new(total as u64).with_style(
        ProgressStyle::with_template("{bar:30} {percent:>3}%  {eta:>4} left  {wide_msg}")
            .expect("a constant, valid template"),
    );
    let mut samples = Vec::new();
    let mut given_up = HashSet::new();
    for round in 0..rounds {
        for (case_index, case) in cases.iter().enumerate().filter(|(_, c)| round < c.rounds) {
            for (contender_index, contender) in case.contenders.iter().enumerate() {
                bar.set_message(format!("{}: {}", case.title, contender.label));
                // Whoever failed once would most likely take its whole patience again each round.
                if !given_up.contains(&(case_index, contender_index)) {
                    let outcome = parent::measure(contender, &case.setting);
                    if outcome.is_err() {
                        given_up.insert((case_index, contender_index));
                    }
                    samples.push(Sample {
                        case: case_index,
                        contender: contender_index,
                        round,
                        outcome: outcome.map_err(|error| format!("{error:#}")),
                    });
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    samples
}
