//! `ringlet bench`: kernel TCP and UDP, Unix sockets and ringlet side by side on this machine.
//!
//! For each figure two fresh processes run the same ordinary socket program ([`server`], [`client`]); ringlet is only
//! in their environment. Transports take turns within a round, and a ratio is judged within its round, so that what
//! else happens on the machine strikes all alike.

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
mod wire;

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::{SigSet, Signal};

use machine::Machine;
use plan::Case;
pub use report::Row;
use report::{Heading, Report, Sample};
use spec::parse_size;

/// As `git describe` has it, if whoever built this said so.
const VERSION: &str = match option_env!("GIT_DESCRIBE") {
    Some(described) => described,
    None => env!("CARGO_PKG_VERSION"),
};

/// Measure kernel TCP, Unix sockets and ringlet on this machine.
///
/// Without options: everything but the crowd, Ethernet and what is carried (of many and idle one number of connections only, by epoll), in about a minute,
/// unpinned; and 8-byte latencies also with both ends pinned to a core each, and with ringlet's spinning off.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// A short run that shows that everything works; its figures are rough
    #[arg(long)]
    quick: bool,
    /// How often every transport has its turn [default: 5, quick: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Measure only these
    #[arg(long, value_name = "GROUPS", value_enum, value_delimiter = ',')]
    only: Vec<Group>,
    /// Compare only these; ratios need tcp
    #[arg(long, value_name = "TRANSPORTS", value_enum, value_delimiter = ',')]
    transport: Vec<Transport>,
    /// Message sizes for latency: a list like 8,4K,1M, or `all` for the powers of two up to 8M
    #[arg(long, value_name = "SIZES")]
    sizes: Option<Sizes>,
    /// Idle connections for scale, as far as RLIMIT_NOFILE allows [default: 1000, quick: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    idle: Option<u32>,
    /// How many connections many and idle have [default where they are named: 1,32,128,512,2000 and 100,500,2000, quick: 1,32,128 and 100]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=20_000))]
    connections: Vec<u32>,
    /// Pin both ends of everything: `auto` or two cores like 0,2; `none` leaves out the pinned rows
    #[arg(long, value_name = "CORES")]
    pin: Option<Pin>,
    /// Write everything, with each round's figures, as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw latency and throughput over all message sizes; FILE ends in .svg or .png
    #[arg(long, value_name = "FILE", value_parser = crate::plot::file)]
    plot: Option<PathBuf>,
    #[command(subcommand)]
    pub part: Option<Part>,
    /// What this program starts to do the work
    #[arg(long, hide = true, value_name = "SPEC", exclusive = true)]
    child: Option<String>,
}

#[derive(Subcommand, Debug)]
pub enum Part {
    Papers(PapersArgs),
}

/// The figures of Memory Channel's paper, and of ETHOM's, beside what is measured now
///
/// Of Memory Channel's its Figure 1 (what memory, and messages, cost), Figure 5 (one-way messages of 32 B by PVM and directly), the overhead of a
/// message that is written and left to run, and Figure 6 (an application of PVM's). PVM takes part where it is installed, unmodified, with both its
/// tasks here. Of ETHOM's its Figures 5 and 6 (how long messages take, and how many bytes a second go, by TCP), and 9 and 10 (the same by TIPC, where
/// the kernel has it) between two network namespaces: by `ringlet eth` (ETHOM), by frames over UDP (ETHOS), and by veth (the kernel's own Ethernet).
/// That needs root.
#[derive(Args, Debug)]
pub struct PapersArgs {
    /// One of the papers only
    #[arg(long, value_enum)]
    pub only: Option<Paper>,
    /// A short run that shows that everything works; its figures are rough
    #[arg(long)]
    pub quick: bool,
    /// How often everything has its turn [default: 5, quick: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Write everything, with each round's figures, as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw each figure into this directory, as an .svg
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Paper {
    /// R. B. Gillett, "Memory Channel network for PCI" (1996)
    MemoryChannel,
    /// R. Finocchiaro et al., "ETHOM, an Ethernet over SCI and DX driver for Linux" (2009)
    Ethom,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Group {
    /// Blocking ping-pong over message sizes
    Latency,
    /// Ping-pong of ends that both sleep before each message, beside the barest hand-over
    Asleep,
    /// Ping-pong of event loops, by epoll and by poll
    Epoll,
    /// One way: 64 KiB writes, 8-byte writes
    Stream,
    /// UDP: ping-pong and rate
    Udp,
    /// A connection per request
    Connect,
    /// A fork, an accept, a close, a short connection, the start of a program
    Costs,
    /// One busy connection beside many idle ones
    Scale,
    /// Round trips on many connections, and what they take of each end's processor: on a random one by epoll (level and edge), poll, select;
    /// on each in its turn, and in bursts; and the same by many UDP senders
    Many,
    /// Waits of 1 ms beside many idle connections, and what each takes of a processor: by epoll, poll, select
    Idle,
    /// Eight busy pairs of processes at once
    Pairs,
    /// Beside processes that want all processors, with a share of one, on one alone: only if it is named
    Crowd,
    /// Only one end under ringlet
    OneSide,
    /// Active Messages, beside UCX's if ucx_perftest is there
    Messages,
    /// The native library beside the bare cache line
    Native,
    /// Reflective memory beside the bare cache line and plain stores
    Reflect,
    /// A ring in one memory, and over two that an adapter keeps in step
    Mirror,
    /// TCP between two network namespaces, by veth and by `ringlet eth`, as root, and frames between ports: only if it is named
    Ethernet,
    /// Two programs that share no memory, in two network namespaces: by veth, carried in isolation, and as on two hosts with rails in memory, with what
    /// each round trip takes of both ends' processors and of the services'. As root: only if it is named
    Carried,
    /// What the machine itself allows
    Limits,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Transport {
    Tcp,
    Unix,
    Ringlet,
    RingletUnix,
}

#[derive(Clone, PartialEq, Debug)]
struct Sizes(Vec<usize>);

impl Sizes {
    fn all() -> Sizes {
        Sizes((0..=23).map(|bit| 1 << bit).collect())
    }

    fn usual(quick: bool) -> Sizes {
        Sizes(if quick {
            vec![8, 4 << 10, 64 << 10]
        } else {
            vec![8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20]
        })
    }
}

impl FromStr for Sizes {
    type Err = String;
    fn from_str(text: &str) -> Result<Sizes, String> {
        if text == "all" {
            return Ok(Sizes::all());
        }
        let mut sizes =
            text.split(',').map(|size| parse_size(size.trim())).collect::<Result<Vec<_>, _>>()?;
        sizes.sort_unstable();
        sizes.dedup();
        Ok(Sizes(sizes))
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Pin {
    None,
    Auto,
    Cores(usize, usize),
}

impl FromStr for Pin {
    type Err = String;
    fn from_str(text: &str) -> Result<Pin, String> {
        let cores = || -> Option<(usize, usize)> {
            let (server, client) = text.split_once(',')?;
            Some((server.trim().parse().ok()?, client.trim().parse().ok()?))
        };
        match (text, cores()) {
            ("none", _) => Ok(Pin::None),
            ("auto", _) => Ok(Pin::Auto),
            (_, Some((server, client))) if server != client => Ok(Pin::Cores(server, client)),
            _ => Err("none, auto or two different cores like 0,1".into()),
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_on_the_command_line() {
        assert_eq!("8, 1K,8".parse(), Ok(Sizes(vec![8, 1024])));
        assert_eq!("all".parse::<Sizes>().unwrap().0.last(), Some(&(8 << 20)));
        assert!("8,,9".parse::<Sizes>().is_err());
        assert_eq!("0,3".parse(), Ok(Pin::Cores(0, 3)));
        assert_eq!("none".parse(), Ok(Pin::None));
        assert!("1,1".parse::<Pin>().is_err());
        assert!("1".parse::<Pin>().is_err());
    }
}
