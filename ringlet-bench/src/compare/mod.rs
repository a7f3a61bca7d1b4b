//! `ringlet compare`: one's own programs, over the kernel and over ringlet, by turns.

mod comparison;
mod family;
mod play;
mod report;
mod spread;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::bench::machine::Machine;
use comparison::{Comparison, Figure, Requests, from_file, port};
use family::{Family, Stop};
use play::{Contender, Ground, Stopped};
pub use report::Compared;
use report::{Report, Run};
pub use spread::Spread;

/// As a program that was ended by SIGINT has it.
const EXIT_STOPPED: u8 = 130;
/// Who takes part.
pub const KERNEL: &str = "kernel";
pub const RINGLET: &str = "ringlet";
/// Of our own comparisons.
const READY_WITHIN: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(120);

/// Measure a server and its client over the kernel's sockets and over ringlet, by turns
///
/// Both commands are run as they are and under ringlet, as often as --rounds says, with who begins changing from round to round; each
/// run has a directory and a port of its own, and whatever it has started is ended with it. In the commands {port} stands for the port
/// and {dir} for the directory (in a file also {here}, for the directory of that file). Words are split as by a shell; for anything
/// else of a shell's, write sh -c '...'.
///
/// The client is what is measured, from its start to its end: by a number in its output, or else by the time that it takes. Beside it
/// stands the processor time that both programs used meanwhile, for each request if their number is known. A ratio says how many times
/// better ringlet is than the kernel in the same round; of six rounds or more, where it lies with 95 % confidence, too; of ten or more, how often which figures
/// came.
///
/// Where no connection comes into shared memory there is nothing to compare: that is a failure, and its reason is told. Settings of
/// ringlet come from its file and environment, as for `ringlet run`.
#[derive(clap::Args)]
#[command(
    after_long_help = "Exit status: 0 if every run came to its end and connections moved; 1 if not, or if every comparison was skipped; 130 \
                       if it was stopped (what had been measured is shown).\n\n\
    Examples:\n  \
    ringlet compare --server 'redis-server --port {port}' \\\n      \
    --client 'redis-benchmark -p {port} -t get -n 100000 --csv' \\\n      \
    --figure '\"GET\",\"([0-9.]+)\"' --unit 1/s\n  \
    ringlet compare --server './server {port}' --client './client {port}' --requests 5000\n  \
    ringlet compare comparisons.toml --only redis --rounds 9 --json runs.json --plot ratios.svg\n\n\
    A file has a table for each comparison; only name and client must be there. What stands before the first holds for all:\n\n  \
    [[comparison]]\n  \
    name = \"redis, 50 connections\"\n  \
    needs = [\"redis-server\", \"redis-benchmark\"]   # skipped where one of them is missing\n  \
    packages = \"redis-server redis-tools\"         # what to install then\n  \
    build = [\"make -C {here} O={build}\"]         # commands before the first run, and their directory\n  \
    prepare = [\"mkdir {dir}/data\"]                # commands before the server, on the kernel\n  \
    server = \"redis-server --port {port} --dir {dir}/data\"\n  \
    ready = \"{port}\"                              # as --ready\n  \
    warm = [\"redis-cli -p {port} set key value\"]  # commands between server and client\n  \
    client = \"redis-benchmark -p {port} -t get -n 100000 --csv\"\n  \
    requests = 100000                             # as --requests\n  \
    moves = true                                  # false: connections are not expected to move\n  \
    [[comparison.figure]]                         # any number of them\n  \
    name = \"GET\"\n  \
    pattern = '\"GET\",\"([0-9.]+)\"'               # as --figure\n  \
    unit = \"1/s\"                                  # as --unit\n  \
    lower_is_better = false                       # as --lower\n  \
    at_least = 1.0                                # a ratio that is wanted, and is shown beside it\n  \
    aim = 2.0"
)]
pub struct CompareArgs {
    /// Files of comparisons, in TOML (see below)
    #[arg(value_hint = clap::ValueHint::FilePath, required_unless_present = "client")]
    files: Vec<PathBuf>,
    /// The server's command; without one, the client is all that is run
    #[arg(long, value_name = "COMMAND", conflicts_with = "files", requires = "client")]
    server: Option<String>,
    /// The client's command
    #[arg(long, value_name = "COMMAND", conflicts_with = "files")]
    client: Option<String>,
    /// When the server is ready: a port on which it listens, a path that is there then, or a command that succeeds [default: {port}]
    #[arg(long, value_name = "PORT|PATH|COMMAND", requires = "server")]
    ready: Option<String>,
    /// What is compared: a regular expression whose first group is a number in the client's output (its last match counts), or `time`,
    /// or `cpu`, or `server-cpu` (for each request, if their number is known), or `requests` (a second) [default: requests if their
    /// number is given, else time]
    #[arg(long, value_name = "REGEX|time|cpu|server-cpu|requests", requires = "client")]
    figure: Vec<String>,
    /// The unit of what the regular expression finds; of a rate (1/s, MB/s) processor time is told for each 1 or MB
    #[arg(long, value_name = "UNIT", requires = "figure")]
    unit: Option<String>,
    /// Smaller numbers are better
    #[arg(long, requires = "figure")]
    lower: bool,
    /// How many requests the client makes: a number, or a regular expression that finds it in its output
    #[arg(long, value_name = "NUMBER|REGEX", requires = "client")]
    requests: Option<String>,
    /// Only comparisons with this in their names; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// How often each is run, on the kernel and under ringlet
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Seconds after which a command that has not come to its end has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    limit: u64,
    /// Seconds after which a server that is not ready has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    ready_within: u64,
    /// Which ends run under ringlet
    #[arg(long, value_enum, default_value = "both")]
    wrap: Wrap,
    /// Another build of ringlet's library that takes its turns, too; may be repeated
    #[arg(long, value_name = "LIBRARY", value_hint = clap::ValueHint::FilePath)]
    beside: Vec<PathBuf>,
    /// Write everything, with each run's figures, as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the ratios; FILE ends in .svg or .png
    #[arg(long, value_name = "FILE", value_parser = crate::plot::file)]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Debug, clap::ValueEnum)]
enum Wrap {
    Both,
    Server,
    Client,
}

pub fn run(args: CompareArgs) -> Result<ExitCode> {
    args.json.as_deref().map_or(Ok(()), check_target)?;
    let comparisons = comparisons(&args)?;
    let contenders = contenders(&args)?;
    let ground = Ground {
        family: Family::new()?,
        stop: Stop::new()?,
        ready_within: Duration::from_secs(args.ready_within),
        limit: Duration::from_secs(args.limit),
    };
    let machine = Machine::look()?;
    let mut report = Report { machine, results: Vec::new(), skipped: Vec::new() };
    for comparison in &comparisons {
        if let Some(skipped) = comparison.lack() {
            eprintln!("ringlet: {skipped}");
            report.skipped.push(skipped);
            continue;
        }
        report.results.extend(compare(&ground, comparison, &contenders, args.rounds as usize));
        if ground.stop.is_asked() {
            break;
        }
    }
    if !report.results.is_empty() {
        present(&args, &report)?;
    }
    let mut problems = report.problems();
    if ground.stop.is_asked() {
        eprintln!("ringlet: stopped");
        return Ok(ExitCode::from(EXIT_STOPPED));
    }
    if report.results.is_empty() {
        problems.push("nothing was compared");
    }
    for problem in &problems {
        eprintln!("ringlet: {problem}");
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Comparisons of our own, by a file's text whose place is `here`: what came of each, and what was skipped and why.
pub fn of_text(text: &str, here: &Path, rounds: u32) -> Result<(Vec<Compared>, Vec<String>)> {
    let mut comparisons = from_file(text)?;
    for each in &mut comparisons {
        each.here = here.into();
        each.complete().with_context(|| each.name.clone())?;
    }
    let library = ringlet_programs::preload::library()?;
    let contenders = [None, Some(library)].map(|preload| Contender {
        name: if preload.is_some() { RINGLET } else { KERNEL }.into(),
        server: preload.is_some(),
        client: preload.is_some(),
        preload,
    });
    let ground = Ground {
        family: Family::new()?,
        stop: Stop::new()?,
        ready_within: READY_WITHIN,
        limit: LIMIT,
    };
    let (mut results, mut skipped) = (Vec::new(), Vec::new());
    for comparison in &comparisons {
        match comparison.lack() {
            Some(lack) => skipped.push(lack),
            None => results.extend(compare(&ground, comparison, &contenders, rounds as usize)),
        }
        ensure!(!ground.stop.is_asked(), Stopped);
    }
    Ok((results, skipped))
}

/// Round by round, each contender in turn. None if it was stopped before anything was measured.
fn compare(
    ground: &Ground,
    comparison: &Comparison,
    contenders: &[Contender],
    rounds: usize,
) -> Option<Compared> {
    // Draws on standard error, and not at all where that is no terminal.
    let bar = ProgressBar::new((contenders.len() * rounds) as u64).with_style(
        ProgressStyle::with_template("{bar:30} {percent:>3}%  {eta:>4} left  {wide_msg}")
            .expect("a constant, valid template"),
    );
    if bar.is_hidden() {
        eprintln!("{}: {rounds} rounds", comparison.name);
    }
    let mut runs = Vec::new();
    let mut unmoved = Vec::new();
    let built = match ground.build(comparison, &contenders[0]) {
        Ok(built) => built,
        Err(_) if ground.stop.is_asked() => return None,
        Err(error) => {
            runs.push(Run { round: 0, contender: 0, outcome: Err(error) });
            return Some(report::judge(comparison, contenders, runs, &unmoved));
        }
    };
    'rounds: for round in 0..rounds {
        // Each begins as often as the others.
        for turn in 0..contenders.len() {
            let which = (round + turn) % contenders.len();
            let contender = &contenders[which];
            bar.set_message(format!("{}: {}", comparison.name, contender.name));
            let outcome = ground.play(comparison, contender, &built);
            let failed = match &outcome {
                Err(error) if error.is::<Stopped>() || ground.stop.is_asked() => break 'rounds,
                Err(_) => true,
                Ok(outcome) => {
                    let moves = comparison.moves && contender.server && contender.client;
                    if moves && outcome.moved_ends == 0 {
                        let why = ground.why_not_moved(comparison, contender, &built);
                        unmoved.push((which, why.unwrap_or_else(|error| format!("{error:#}"))));
                    }
                    moves && outcome.moved_ends == 0
                }
            };
            runs.push(Run { round, contender: which, outcome });
            bar.inc(1);
            // Whoever failed once would most likely take its whole patience again each round.
            if failed {
                break 'rounds;
            }
        }
    }
    bar.finish_and_clear();
    (!runs.is_empty()).then(|| report::judge(comparison, contenders, runs, &unmoved))
}

/// What is to be written may take the place of an earlier report's, and of no other file.
fn check_target(path: &Path) -> Result<()> {
    // (No pipe is read.)
    let is_file = fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0);
    let ours = |text: String| {
        let found: serde_json::Value = serde_json::from_str(&text).ok()?;
        Some(found.get("machine").is_some() && found.get("results").is_some())
    };
    if is_file && !fs::read_to_string(path).ok().and_then(ours).unwrap_or(false) {
        bail!(
            "{} is there already, and is no report of ringlet's: it stays as it is",
            path.display()
        );
    }
    Ok(())
}

fn present(args: &CompareArgs, report: &Report) -> Result<()> {
    // Files first: they are there even if nobody reads the table to its end.
    let to_stdout = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let json = serde_json::to_string_pretty(report)? + "\n";
    if let Some(path) = args.json.as_ref().filter(|_| !to_stdout) {
        fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = args.plot.as_ref().filter(|_| report.has_ratios()) {
        report.draw(path)?;
    }
    if to_stdout {
        io::stdout().write_all(json.as_bytes())?;
    } else {
        report.print();
    }
    Ok(())
}

fn comparisons(args: &CompareArgs) -> Result<Vec<Comparison>> {
    let mut all = Vec::new();
    for path in &args.files {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let here = std::path::absolute(path)?.parent().map(PathBuf::from).unwrap_or_default();
        let read = from_file(&text).with_context(|| path.display().to_string())?;
        all.extend(read.into_iter().map(|each| Comparison { here: here.clone(), ..each }));
    }
    if let Some(client) = &args.client {
        all.push(from_the_command_line(args, client)?);
    }
    for comparison in &mut all {
        comparison.complete().with_context(|| comparison.name.clone())?;
    }
    all.retain(|each| args.only.is_empty() || args.only.iter().any(|n| each.name.contains(n)));
    ensure!(!all.is_empty(), "no comparison is called so: {}", args.only.join(", "));
    Ok(all)
}

fn from_the_command_line(args: &CompareArgs, client: &str) -> Result<Comparison> {
    let number = |text: &String| match text.parse() {
        Ok(number) => Requests::Number(number),
        Err(_) => Requests::Pattern(text.clone()),
    };
    let one = args.figure.len() == 1;
    let figure = args.figure.iter().enumerate().map(|(index, pattern)| Figure {
        name: if one { "figure".into() } else { format!("figure {}", index + 1) },
        pattern: pattern.clone(),
        unit: args.unit.clone().unwrap_or_default(),
        lower_is_better: args.lower,
        at_least: None,
        aim: None,
    });
    let program = client.split_whitespace().next().unwrap_or("client");
    Ok(Comparison {
        name: program.rsplit('/').next().unwrap_or(program).into(),
        needs: Vec::new(),
        packages: String::new(),
        build: Vec::new(),
        prepare: Vec::new(),
        server: args.server.clone(),
        ready: args.ready.clone().unwrap_or_else(port),
        warm: Vec::new(),
        client: client.into(),
        requests: args.requests.as_ref().map(number),
        figure: figure.collect(),
        moves: true,
        here: std::env::current_dir()?,
    })
}

/// The kernel first.
fn contenders(args: &CompareArgs) -> Result<Vec<Contender>> {
    let library = |path: PathBuf, name: String| -> Result<Contender> {
        // Found out before anything is run.
        ringlet_programs::preload::preload(&mut Vec::new(), &path)?;
        let (server, client) = (args.wrap != Wrap::Client, args.wrap != Wrap::Server);
        Ok(Contender { name, preload: Some(path), server, client })
    };
    let mut all =
        vec![Contender { name: KERNEL.into(), preload: None, server: false, client: false }];
    all.push(library(ringlet_programs::preload::library()?, RINGLET.into())?);
    for path in &args.beside {
        let path = fs::canonicalize(path).with_context(|| path.display().to_string())?;
        let name = path.display().to_string();
        all.push(library(path, name)?);
    }
    Ok(all)
}
