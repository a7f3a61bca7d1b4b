//! The conformance suite: every case runs on the kernel and on ringlet, and must see the same.

// The allowances are for `sys` and `rare`, where the calls are.
#![deny(unsafe_code)]

mod case;
mod cases;
mod driver;
mod mirror;
#[allow(unsafe_code)]
mod rare;
#[allow(unsafe_code)]
mod sys;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use case::{Case, Difference, Family, Role, Run, Side};
use driver::{Instance, Options};

#[derive(Parser)]
#[command(about = "Runs socket programs on the kernel and on ringlet, and compares what they see")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the cases whose names contain one of the filters (all without any)
    Run {
        /// The preload library, or "none" to compare the kernel with itself
        #[arg(long, value_name = "PATH", default_value_os_t = beside_us())]
        library: PathBuf,
        /// Only with both sides wrapped, and with this spin budget in microseconds
        #[arg(long, value_name = "MICROSECONDS")]
        spin: Option<u32>,
        /// Only with both sides wrapped, and with ringlet's own key of this name (see `ringlet config`)
        #[arg(long, value_name = "SEED")]
        unforgiving: Option<u32>,
        /// Over a mirror: with the `ringlet` command's adapter, beside the library, by this seed (0: all in order and at once)
        #[arg(long, value_name = "SEED")]
        mirror: Option<u32>,
        /// The same over what carries between two hosts, both in the adapter's process (0: over rails that keep order and don't fail)
        #[arg(long, value_name = "SEED", conflicts_with = "mirror")]
        hosts: Option<u32>,
        /// The client is another user's; only root can do that
        #[arg(long)]
        strangers: bool,
        /// How often each way of running a case is repeated
        #[arg(long, default_value_t = 1)]
        repeat: u32,
        /// Cases at a time; most of them wait most of the time
        #[arg(long, default_value_t = three_for_each_processor())]
        jobs: usize,
        /// Seconds before a case counts as hung
        #[arg(long, default_value_t = 200)]
        limit: u64,
        /// Also name the cases that pass
        #[arg(long, short)]
        verbose: bool,
        filters: Vec<String>,
    },
    /// List the cases with their goals
    List {
        /// Only the differences from the kernel that cases declare, as Markdown
        #[arg(long)]
        differences: bool,
    },
    /// Be one process of a case (what `run` starts)
    #[command(hide = true)]
    Case {
        name: String,
        #[arg(long)]
        role: String,
        #[arg(long)]
        family: String,
    },
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Run {
            library,
            spin,
            unforgiving,
            mirror,
            hosts,
            strangers,
            repeat,
            jobs,
            limit,
            verbose,
            filters,
        } => {
            let library = match library.to_str() {
                Some("none") => None,
                _ => match library.canonicalize() {
                    Ok(library) => Some(library),
                    Err(error) => {
                        eprintln!("conformance: {}: {error}", library.display());
                        return ExitCode::from(2);
                    }
                },
            };
            let wanted =
                |name: &str| filters.is_empty() || filters.iter().any(|f| name.contains(f));
            let all = instances().filter(|instance| wanted(&instance.name()));
            let steady = |instance: &Instance| unforgiving.is_some() && instance.case.steady;
            let (left_out, all): (Vec<Instance>, Vec<Instance>) = all.partition(steady);
            for instance in left_out {
                println!("not run with changing paths: {}", instance.name());
            }
            let beyond = |instance: &Instance| {
                mirror.or(hosts).is_some() && mirror::left_out(instance.case.name).is_some()
            };
            let (left_out, all): (Vec<Instance>, Vec<Instance>) = all.into_iter().partition(beyond);
            for instance in left_out {
                let why = mirror::left_out(instance.case.name).unwrap_or_default();
                println!("not run over a mirror: {} ({why})", instance.name());
            }
            if all.is_empty() {
                eprintln!("conformance: no case matches");
                return ExitCode::from(2);
            }
            let limit = Duration::from_secs(limit);
            let moves = match tempfile::NamedTempFile::new() {
                Ok(moves) => moves,
                Err(error) => {
                    eprintln!("conformance: a temporary file: {error}");
                    return ExitCode::from(2);
                }
            };
            if let Some(seed) = unforgiving {
                println!("seed {seed}");
            }
            let adapter = match (mirror.or(hosts), &library) {
                (Some(seed), Some(library)) => {
                    match mirror::Adapter::start(library, seed, hosts.is_some()) {
                        Ok(adapter) => Some(adapter),
                        Err(error) => {
                            eprintln!("conformance: the adapter: {error}");
                            return ExitCode::from(2);
                        }
                    }
                }
                _ => None,
            };
            let spin_us = spin;
            let options = Options {
                preload: library,
                spin_us,
                unforgiving,
                adapter: adapter.as_ref().map(|adapter| adapter.number),
                strangers,
                repeat,
                jobs,
                limit,
                verbose,
                // As the whole check asks of all that it runs (tests/run).
                retry: std::env::var_os("RETRY_FAILED").is_some(),
                moves,
            };
            let passed = driver::run(&all, &options);
            let well = adapter.is_none_or(mirror::Adapter::end);
            if passed && well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Command::List { differences: false } => {
            for instance in instances() {
                println!("{:<44} {}", instance.name(), instance.case.goal);
            }
            ExitCode::SUCCESS
        }
        Command::List { differences: true } => {
            for (case, sentence, lines) in differences() {
                println!("- {sentence} (`{case}`: {lines})");
            }
            ExitCode::SUCCESS
        }
        Command::Case { name, role, family } => be(&name, &role, &family),
    }
}

fn three_for_each_processor() -> usize {
    3 * std::thread::available_parallelism().map_or(1, usize::from)
}

/// Where a build puts the library: next to this program.
fn beside_us() -> PathBuf {
    std::env::current_exe().unwrap_or_default().with_file_name("libringlet_preload.so")
}

fn instances() -> impl Iterator<Item = Instance> {
    cases::all()
        .flat_map(|case| case.families.iter().map(move |family| Instance { case, family: *family }))
}

/// Each case's differences by what is said of them.
fn differences() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    let shown = |line: &str| if line.is_empty() { "nothing".into() } else { format!("`{line}`") };
    cases::all().flat_map(move |case| {
        case.differences.chunk_by(|a, b| a.sentence == b.sentence).map(move |alike| {
            let one = |d: &Difference| format!("{}, not `{}`", shown(d.ringlet), d.kernel);
            (case.name, alike[0].sentence, alike.iter().map(one).collect::<Vec<_>>().join("; "))
        })
    })
}

/// Runs one process of a case. Standard input is the way to the other side, standard output the
/// transcript.
fn be(name: &str, role: &str, family: &str) -> ExitCode {
    sys::die_with_parent();
    let case: Option<&Case> = cases::all().find(|case| case.name == name);
    let role = Role::ALL.iter().copied().find(|r| r.name() == role);
    let family = Family::ALL.iter().copied().find(|f| format!("{f:?}") == family);
    let (Some(case), Some(role), Some(family)) = (case, role, family) else {
        eprintln!("conformance: no such case, role or family");
        return ExitCode::from(2);
    };
    // Out of the way of the low numbers, which are a case's to use, and not for its children.
    let control =
        sys::fcntl(0, libc::F_DUPFD_CLOEXEC, case::CONTROL).expect("the control channel moves up");
    let nothing = sys::open("/dev/null").expect("/dev/null opens");
    sys::dup2(nothing, 0).expect("standard input is nothing");
    sys::close(nothing).expect("close");
    // Rust ignores SIGPIPE before main; a C program has it, and so have the cases.
    sys::on_signal(libc::SIGPIPE, sys::Handler::Default, 0);

    let mut side = Side::new(role, family, case.path, control);
    match (case.run, role) {
        (Run::Pair(client, _), Role::Client) => client(&mut side),
        (Run::Pair(_, server), Role::Server) => server(&mut side),
        (Run::Solo(run), Role::Solo) => run(&mut side),
        _ => panic!("the case has no such role"),
    }
    side.leave();
    ExitCode::SUCCESS
}
