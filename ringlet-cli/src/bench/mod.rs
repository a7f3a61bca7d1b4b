//! `ringlet bench`: kernel TCP, Unix sockets and ringlet side by side on this machine.
//!
//! For each figure two fresh processes run the same ordinary socket program ([`server`], [`client`]); ringlet is only
//! in their environment. Transports take turns within a round, and a ratio is judged within its round, so that what
//! else happens on the machine strikes all alike.

mod child;
mod client;
mod limits;
mod machine;
mod parent;
mod plot;
mod report;
mod server;
mod spec;
mod stats;
pub mod symbol;
mod wire;

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::{SigSet, Signal};

use machine::Machine;
use parent::{Contender, Setting};
use report::{Heading, Report, Row, Sample};
use spec::{Family, Waiting, Work, parse_size};

/// As `git describe` has it, if whoever built this said so.
const VERSION: &str = match option_env!("GIT_DESCRIBE") {
    Some(described) => described,
    None => env!("CARGO_PKG_VERSION"),
};

/// Measure kernel TCP, Unix sockets and ringlet on this machine.
///
/// Without options: latency, stream, connect, readiness and scale, in about a minute and a half, unpinned; and 8-byte
/// latencies also with both ends pinned to a core each, and with ringlet's spinning off.
#[derive(Args, Debug)]
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
    /// Pin both ends of everything: `auto` or two cores like 0,2; `none` leaves out the pinned rows
    #[arg(long, value_name = "CORES")]
    pin: Option<Pin>,
    /// Write everything, with each round's figures, as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw latency and throughput over all message sizes; FILE ends in .svg or .png
    #[arg(long, value_name = "FILE", value_parser = picture)]
    plot: Option<PathBuf>,
    /// What this program starts to do the work
    #[arg(long, hide = true, value_name = "SPEC", exclusive = true)]
    child: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Group {
    /// Blocking ping-pong over message sizes
    Latency,
    /// Ping-pong of event loops, by epoll and by poll
    Epoll,
    /// One way: 64 KiB writes, 8-byte writes
    Stream,
    /// A connection per request
    Connect,
    /// One busy connection beside many idle ones
    Scale,
    /// Eight busy pairs of processes at once
    Pairs,
    /// Only one end under ringlet
    OneSide,
    /// What the machine itself allows
    Limits,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Transport {
    Tcp,
    Unix,
    Ringlet,
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
        let mut sizes = text.split(',').map(parse_size).collect::<Result<Vec<_>, _>>()?;
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

fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(path),
        _ => Err("a picture ends in .svg or .png".into()),
    }
}

/// Something to measure, and who takes part.
struct Case {
    name: &'static str,
    title: String,
    rounds: u32,
    setting: Setting,
    contenders: Vec<Contender>,
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
    let cases = plan(&args, &mut notes)?;
    let machine = Machine::look()?;
    let samples = measure(&cases);
    let headings: Vec<Heading> = cases
        .iter()
        .map(|case| Heading {
            case: case.name,
            title: case.title.clone(),
            contenders: case.contenders.iter().map(|contender| contender.label).collect(),
        })
        .collect();
    let rows = report::rows(&headings, &samples);
    let strayed = cases
        .iter()
        .flat_map(|case| case.contenders.iter().map(move |contender| (case, contender)))
        .filter(|(_, contender)| contender.expects_ring())
        .flat_map(|(case, contender)| {
            rows.iter().filter(move |row| {
                row.title == case.title && row.transport == contender.label && row.error.is_none()
            })
        })
        .filter(|row| !matches!(row.path.as_str(), "ring" | "-"))
        .count();
    if strayed > 0 {
        notes.push(format!("{strayed} of ringlet's rows did not stay on the ring; see path"));
    }
    let report = Report { machine, command: std::env::args().collect(), notes, rows };
    present(&args, &report)?;
    let failed = report.rows.iter().any(|row| row.error.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn present(args: &BenchArgs, report: &Report) -> Result<()> {
    // Drawing every size is no reason to list every size.
    let usual = Sizes::usual(args.quick).0;
    let shown = |row: &Row| {
        let size = if row.case == "latency" { parse_size(&row.what).ok() } else { None };
        args.sizes.is_some() || size.is_none_or(|size| usual.contains(&size))
    };
    let table = report::table(report, shown);
    let to_stdout = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let json = serde_json::to_string_pretty(report)? + "\n";
    if to_stdout {
        anstream::stderr().write_all(table.as_bytes())?;
        io::stdout().write_all(json.as_bytes())?;
    } else {
        anstream::stdout().write_all(table.as_bytes())?;
        if let Some(path) = &args.json {
            fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    match &args.plot {
        Some(path) => plot::draw(path, &report.rows, &report.machine),
        None => Ok(()),
    }
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

fn plan(args: &BenchArgs, notes: &mut Vec<String>) -> Result<Vec<Case>> {
    let wants = |group| args.only.is_empty() || args.only.contains(&group);
    let quick = args.quick;
    let rounds = args.rounds.unwrap_or(if quick { 1 } else { 5 });
    let two_cores = machine::two_cores();
    let pin_all = match args.pin {
        None | Some(Pin::None) => None,
        Some(Pin::Auto) => match &two_cores {
            Ok(cores) => Some(*cores),
            Err(error) => bail!("{error:#}"),
        },
        Some(Pin::Cores(server, client)) => Some((server, client)),
    };
    let setting = |millis: u64, quick_millis: u64| Setting {
        budget: Duration::from_millis(if quick { quick_millis } else { millis }),
        pin: pin_all,
        pairs: 1,
        idle: Duration::from_millis(if quick { 100 } else { 1000 }),
    };
    let everyone = |work: Work| -> Vec<Contender> { contenders(&args.transport, &work) };
    let mut cases = Vec::new();
    let mut add = |name, title: &str, setting: Setting, contenders: Vec<Contender>| {
        let pinned = setting.pin.filter(|_| !contenders.is_empty());
        let title = match pinned {
            Some((server, client)) => format!("{title}, pinned to cores {server} and {client}"),
            None => title.to_owned(),
        };
        // Idleness takes its time however often it is looked at.
        let rounds = if name == "scale" { rounds.min(3) } else { rounds };
        if !contenders.is_empty() {
            cases.push(Case { name, title, rounds, setting, contenders });
        }
    };
    let ringlet = args.transport.is_empty() || args.transport.contains(&Transport::Ringlet);
    let no_spin = |work: &Work| Contender {
        label: "ringlet, no spin",
        environment: &[("RINGLET_SPIN_US", "0")],
        ..ringlet_contender(work)
    };

    if wants(Group::Latency) {
        let sizes = match (&args.sizes, &args.plot) {
            (Some(sizes), _) => sizes.clone(),
            (None, Some(_)) => Sizes::all(),
            (None, None) => Sizes::usual(quick),
        };
        let mut all = everyone(Work::Latency { sizes: sizes.0 });
        let small = Work::Latency { sizes: vec![8] };
        all.extend(ringlet.then(|| no_spin(&small)));
        add("latency", "latency, blocking, half a round trip", setting(50, 8), all);
        if args.pin.is_none() {
            match &two_cores {
                Ok(cores) => {
                    let mut all = everyone(small.clone());
                    all.extend(ringlet.then(|| no_spin(&small)));
                    let setting = Setting { pin: Some(*cores), ..setting(50, 8) };
                    add("latency-pinned", "latency, half", setting, all);
                }
                Err(error) => notes.push(format!("no pinned rows: {error:#}")),
            }
        }
    }
    if wants(Group::Epoll) {
        for (by, title) in [
            (Waiting::Epoll, "latency by epoll, non-blocking, half a round trip"),
            (Waiting::Poll, "latency by poll, non-blocking, half a round trip"),
        ] {
            add("epoll", title, setting(50, 8), everyone(Work::Events { by }));
        }
    }
    if wants(Group::Stream) {
        for (size, title) in [(64 << 10, "stream, one way"), (8, "small messages, one way")] {
            add("stream", title, setting(200, 30), everyone(Work::Stream { size }));
        }
    }
    if wants(Group::Connect) {
        add("connect", "a connection per request", setting(200, 30), everyone(Work::Connect));
        add("connect", "connections accepted", setting(200, 30), everyone(Work::Accept));
    }
    if wants(Group::Scale) {
        let asked = args.idle.unwrap_or(if quick { 64 } else { 1000 }) as usize;
        let idle = asked.min(machine::idle_limit()?);
        if idle < asked {
            notes.push(format!("{idle} idle connections instead of {asked}: RLIMIT_NOFILE"));
        }
        add(
            "scale",
            "one busy connection beside idle ones, by epoll",
            setting(50, 8),
            everyone(Work::Scale { idle }),
        );
    }
    if wants(Group::Pairs) {
        let setting = Setting { pairs: 8, pin: None, ..setting(300, 50) };
        add("pairs", "8 busy pairs of processes, 8 B", setting, everyone(Work::Pair));
    }
    if wants(Group::OneSide) && ringlet {
        let work = Work::Latency { sizes: vec![8] };
        let mut all: Vec<Contender> =
            everyone(work.clone()).into_iter().filter(|c| c.label == report::BASELINE).collect();
        for (label, server_wrapped, client_wrapped) in
            [("ringlet at server", true, false), ("ringlet at client", false, true)]
        {
            let both = ringlet_contender(&work);
            all.push(Contender { label, server_wrapped, client_wrapped, ..both });
        }
        add("one-side", "one side under ringlet, half a round trip", setting(50, 8), all);
    }
    if wants(Group::Limits) {
        let cpus = pin_all.or(two_cores.ok());
        let setting = Setting { pin: None, ..setting(50, 8) };
        let limit = Contender {
            label: "limit",
            server_wrapped: false,
            client_wrapped: false,
            ..ringlet_contender(&Work::Limits { cpus })
        };
        add("limits", "what the machine allows", setting, vec![limit]);
    }
    Ok(cases)
}

fn contenders(wanted: &[Transport], work: &Work) -> Vec<Contender> {
    let kernel = |label, family| Contender {
        label,
        family,
        server_wrapped: false,
        client_wrapped: false,
        ..ringlet_contender(work)
    };
    [Transport::Tcp, Transport::Unix, Transport::Ringlet]
        .into_iter()
        .filter(|transport| wanted.is_empty() || wanted.contains(transport))
        .map(|transport| match transport {
            Transport::Tcp => kernel(report::BASELINE, Family::Tcp),
            Transport::Unix => kernel("unix", Family::Unix),
            Transport::Ringlet => ringlet_contender(work),
        })
        .collect()
}

fn ringlet_contender(work: &Work) -> Contender {
    Contender {
        label: "ringlet",
        family: Family::Tcp,
        server_wrapped: true,
        client_wrapped: true,
        environment: &[],
        work: work.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_on_the_command_line() {
        assert_eq!("8,1K, 8".replace(' ', "").parse(), Ok(Sizes(vec![8, 1024])));
        assert_eq!("all".parse::<Sizes>().unwrap().0.last(), Some(&(8 << 20)));
        assert!("8,,9".parse::<Sizes>().is_err());
        assert_eq!("0,3".parse(), Ok(Pin::Cores(0, 3)));
        assert_eq!("none".parse(), Ok(Pin::None));
        assert!("1,1".parse::<Pin>().is_err());
        assert!("1".parse::<Pin>().is_err());
    }
}
