//! `ringlet reflect` and `ringlet imc`: a host's keeper of reflective memory, and what it has.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringlet_reflect::keeper::{Limits, Options, keep};
use ringlet_reflect::{Host, PATH, RegionState, State, Status, VARIABLE};

use ringlet_programs::table;

mod stat;

/// See reflective memory of this host: regions and locks that programs share by their keys
#[derive(clap::Args)]
pub struct ReflectArgs {
    #[command(subcommand)]
    command: ReflectCommand,
}

#[derive(clap::Subcommand)]
enum ReflectCommand {
    /// Show regions, lock sets, and who uses them
    Ls(LsArgs),
    /// Show how much is written, who may write and receives, which locks are held and waited for, and errors
    ///
    /// Stores go past everybody, so nobody counts them. Ten times a second the pages of a region (of a large one some) are compared with what they
    /// were: a page that has changed counts as written, once. Programs do nothing for it. Of regions that may not be read nothing is told. In a
    /// cluster it is what this host receives, of all that is written anywhere; of a region that it does not receive nothing is told.
    Stat(StatArgs),
    /// Keep regions and locks for programs, in the foreground; it says `ready`. (Programs start one for their user if there is none.)
    Keep(KeepArgs),
    /// Say that a host of the cluster is dead for good, and answer for it
    ///
    /// Hosts that reach no more than half of all stop, for the others may go on elsewhere. One that is known never to come back as it was is not
    /// waited for any more.
    Bury(BuryArgs),
}

#[derive(clap::Args)]
struct BuryArgs {
    /// Its name, as in `nodes` of node.toml
    node: String,
}

#[derive(clap::Args)]
struct LsArgs {
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct StatArgs {
    /// For how long it looks before it shows
    #[arg(long, short, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// How often it shows; 0 until it is interrupted
    #[arg(long, short, value_name = "COUNT", default_value_t = 1)]
    count: u64,
    /// As JSON, one object each time
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct KeepArgs {
    /// Where programs of all users find it (they look there by themselves, or where RINGLET_REFLECT says); without it, programs of this user only
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = PATH, value_hint = clap::ValueHint::FilePath)]
    path: Option<PathBuf>,
    /// Space of all regions
    #[arg(long, value_name = "MB", default_value_t = DEFAULT_MB, value_parser = megabytes)]
    all: u64,
    /// Space of the regions that are received here
    #[arg(long, value_name = "MB", default_value_t = DEFAULT_MB, value_parser = megabytes)]
    received: u64,
    /// Go to the background, and end when nobody has been there for some seconds
    #[arg(long)]
    behind: bool,
    /// Go to the background, and stay
    #[arg(long, conflicts_with = "behind")]
    stay: bool,
    #[arg(long, hide = true)]
    ends: bool,
}

/// A Memory Channel API cluster of this host: <sys/imc.h>
#[derive(clap::Args)]
pub struct ImcArgs {
    #[command(subcommand)]
    command: ImcCommand,
}

#[derive(clap::Subcommand)]
enum ImcCommand {
    /// Initialise the Memory Channel API on this host, as imc_init does
    ///
    /// By root for all users, otherwise for this user. Where it was done before, its limits have to be the same.
    Init(InitArgs),
    /// Show members, regions and lock sets, as imcs does
    Stat(ImcStatArgs),
}

#[derive(clap::Args)]
struct InitArgs {
    /// Megabytes of all regions
    #[arg(short = 'a', value_name = "MB", default_value_t = 10, value_parser = megabytes)]
    all: u64,
    /// Megabytes of the regions that are received on this host
    #[arg(short = 'r', value_name = "MB", default_value_t = 10, value_parser = megabytes)]
    received: u64,
}

#[derive(clap::Args)]
struct ImcStatArgs {
    /// Members
    #[arg(short = 'm')]
    members: bool,
    /// Lock sets
    #[arg(short = 'l')]
    locks: bool,
    /// Regions
    #[arg(short = 'r')]
    regions: bool,
    /// All
    #[arg(short = 'f')]
    all: bool,
    /// Space, and errors
    #[arg(short = 's')]
    statistics: bool,
}

const DEFAULT_MB: u64 = 1 << 14;
const MB: u64 = 1 << 20;
/// A keeper listens after so long, or will not.
const KEEPER_BEGINS: Duration = Duration::from_secs(10);

fn megabytes(word: &str) -> anyhow::Result<u64> {
    let megabytes = word.parse()?;
    ensure!((1..=1 << 30).contains(&megabytes), "out of range");
    Ok(megabytes)
}

/// Standard streams that are closed would be memory or sockets of ours, where others write.
pub fn occupy_streams() -> anyhow::Result<()> {
    loop {
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        if null.as_raw_fd() > 2 {
            return Ok(());
        }
        let _ = null.into_raw_fd();
    }
}

pub fn run(args: ReflectArgs) -> anyhow::Result<ExitCode> {
    occupy_streams()?;
    match args.command {
        ReflectCommand::Ls(args) => {
            let state = state()?;
            match args.json {
                true => table::json(&serde_json::to_value(&state)?)?,
                false => show(&state, &Shown { members: true, regions: true, locks: true }),
            }
        }
        ReflectCommand::Stat(args) => stat::run(args.interval, args.count, args.json)?,
        ReflectCommand::Keep(args) => keep_here(&args)?,
        ReflectCommand::Bury(args) => {
            ringlet_reflect::bury_at(&place(), &args.node)
                .with_context(|| format!("{} can't be buried", args.node))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub fn imc(args: ImcArgs) -> anyhow::Result<ExitCode> {
    occupy_streams()?;
    match args.command {
        ImcCommand::Init(args) => init(&args)?,
        ImcCommand::Stat(args) => {
            let state = state()?;
            let none = !(args.members || args.locks || args.regions || args.statistics);
            let shown = Shown {
                members: args.members || args.all || none,
                regions: args.regions || args.all || none,
                locks: args.locks || args.all || none,
            };
            show(&state, &shown);
            if args.statistics || args.all {
                let errors =
                    state.cluster.as_ref().map_or(vec![0], |cluster| cluster.errors.clone());
                let errors: Vec<String> = errors.iter().map(u32::to_string).collect();
                println!(
                    "\n{} of {} MB allocated; errors by rail: {}",
                    table::grouped(state.allocated / MB),
                    table::grouped(state.allocated_most / MB),
                    errors.join(" ")
                );
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Where a keeper for all users is.
fn place() -> PathBuf {
    let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    named.map_or(PathBuf::from(PATH), PathBuf::from)
}

fn state() -> anyhow::Result<State> {
    const WHAT: &str = "this host's reflective memory";
    // (Who looks is no member of a cluster for that, which may have stopped.)
    match ringlet_reflect::state_at(&place()) {
        Err(Status::NotInitialised) => Ok(Host::find().context(WHAT)?.state()?),
        state => state.context(WHAT),
    }
}

fn keep_here(args: &KeepArgs) -> anyhow::Result<()> {
    if args.behind || args.stay {
        return go_behind(args);
    }
    let limits = Limits { all: args.all * MB, received: args.received * MB };
    let options =
        Options { path: args.path.as_deref(), limits, stays: !args.ends, ..Options::default() };
    let ready = || {
        println!("ready");
        let _ = std::io::stdout().flush();
    };
    keep(&options, ready).context("the keeper can't listen (is there one?)")
}

/// A keeper for this user's programs, for as long as there are any.
fn keep_for_user() -> anyhow::Result<()> {
    let (all, received) = (DEFAULT_MB, DEFAULT_MB);
    go_behind(&KeepArgs { path: None, all, received, behind: true, stay: false, ends: false })
}

/// This host's reflective memory; a keeper of this user's is started if there is none.
pub fn host() -> anyhow::Result<Host> {
    let is_named = std::env::var_os(VARIABLE).is_some_and(|path| !path.is_empty());
    let began = Instant::now();
    loop {
        let found = Host::find();
        let late = is_named || began.elapsed() > KEEPER_BEGINS;
        if !matches!(found, Err(Status::NotInitialised)) || late {
            return found.context("this host's reflective memory");
        }
        // (Another job may have begun one at this moment, which does not listen yet.)
        if let Err(error) = keep_for_user() {
            ensure!(began.elapsed() < KEEPER_BEGINS, error);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts a keeper in a session of its own, and returns when it listens, or does not.
fn go_behind(args: &KeepArgs) -> anyhow::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["reflect", "keep"]);
    if let Some(path) = &args.path {
        // (It is somewhere else from now on.)
        command.arg("--path").arg(std::path::absolute(path)?);
    }
    command.arg("--all").arg(args.all.to_string());
    command.arg("--received").arg(args.received.to_string());
    if args.behind {
        command.arg("--ends");
    }
    begin_behind(&mut command)
}

/// Starts what serves others too, in a session of its own; returns when it says that it is ready, or why it is not.
pub fn begin_behind(command: &mut Command) -> anyhow::Result<()> {
    command
        .env_remove("LD_PRELOAD")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: some system calls between fork and exec, of no memory but their own.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            // (It serves others too: neither bound to the processors of who started it, nor behind or before all others as he is.)
            let _ = run_anywhere();
            // (What else the program has open is none of its, which may stay longer.)
            libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32);
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    let mut said = [0; 6];
    let output = child.stdout.take().context("no output")?;
    if output.take(6).read_exact(&mut said).is_err() {
        let mut why = String::new();
        let _ = child.stderr.take().context("no errors")?.take(4096).read_to_string(&mut why);
        let _ = child.wait();
        bail!("{}", why.trim().trim_start_matches("ringlet: "));
    }
    Ok(())
}

fn run_anywhere() -> rustix::io::Result<()> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    let own = rustix::process::Pid::from_raw(0);
    // SAFETY: a policy and its parameter.
    #[allow(unsafe_code)]
    unsafe {
        libc::sched_setscheduler(0, libc::SCHED_OTHER, &libc::sched_param { sched_priority: 0 })
    };
    sched_setaffinity(own, &all)
}

fn init(args: &InitArgs) -> anyhow::Result<()> {
    // (Where programs will look.)
    let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let is_root = rustix::process::geteuid().is_root();
    let path = named.or_else(|| is_root.then(|| PathBuf::from(PATH)));
    if path.as_deref() == Some(Path::new(PATH)) {
        let folder = Path::new(PATH).parent().context("no folder")?;
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    match Host::find() {
        Ok(host) => {
            let had = host.state()?;
            if let Some(cluster) = &had.cluster {
                println!(
                    "{} is initialised by its node service, as one of {}: {} MB in all and {} MB received, as [cluster.reflect] says",
                    had.host,
                    cluster.hosts.join(", "),
                    had.allocated_most / MB,
                    had.received_most / MB
                );
                return Ok(());
            }
            let is_same =
                had.allocated_most == args.all * MB && had.received_most == args.received * MB;
            // (As IMC_INITERR.)
            ensure!(is_same, "it is initialised already, with other limits");
            println!("{} is initialised already", had.host);
            return Ok(());
        }
        Err(Status::NotInitialised) => {}
        Err(error) => return Err(error.into()),
    }
    // (Programs would wait for that one.)
    let is_for_all = path.is_none() && Path::new(PATH).symlink_metadata().is_ok();
    ensure!(
        !is_for_all,
        "{PATH} is of a keeper for all users, which has ended: it is for root to initialise"
    );
    let (all, received) = (args.all, args.received);
    go_behind(&KeepArgs { path, all, received, behind: false, stay: true, ends: false })?;
    println!("{} is initialised", Host::find()?.state()?.host);
    Ok(())
}

struct Shown {
    members: bool,
    regions: bool,
    locks: bool,
}

/// Nine characters, as files have them.
fn mode(mode: u32) -> String {
    (0..9)
        .rev()
        .map(|bit| if mode >> bit & 1 == 1 { [b'x', b'w', b'r'][bit % 3] as char } else { '-' })
        .collect()
}

fn list(members: &[u32]) -> String {
    members.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// Which hosts of a cluster have all of a coherent region, and what the others lack.
fn contents(region: &RegionState) -> String {
    let names = |hosts: &[String]| {
        hosts.iter().map(|host| table::printable(host).to_string()).collect::<Vec<_>>().join(" ")
    };
    let mut text =
        if region.incomplete { "none (incomplete)".into() } else { names(&region.holders) };
    if !region.filling.is_empty() {
        text += &format!("; on its way to {}", names(&region.filling));
    }
    if let Some(bytes) = region.filled_bytes {
        text += &format!(" ({} % here)", bytes * 100 / region.bytes.max(1));
    }
    text
}

fn show(state: &State, shown: &Shown) {
    if shown.members {
        println!("{}: {} members", table::printable(&state.host), state.members.len());
        let rows = state
            .members
            .iter()
            .map(|each| [each.member, each.pid as u32, each.uid].map(|number| number.to_string()));
        if !state.members.is_empty() {
            table::print(["Member", "Pid", "User"].map(str::to_owned), rows.collect::<Vec<_>>());
        }
    }
    if shown.regions && !state.regions.is_empty() {
        println!();
        let rows = state.regions.iter().map(|each| {
            [
                "IMC".to_owned(),
                each.id.to_string(),
                format!("{:#x}", each.key),
                table::grouped(each.bytes),
                mode(each.mode),
                if each.coherent { "coherent".to_owned() } else { String::new() },
                list(&each.transmit),
                list(&each.receive),
                each.watched.to_string(),
                contents(each),
            ]
        });
        let head = [
            "Region",
            "ID",
            "Key",
            "Size",
            "Mode",
            "Kind",
            "Transmit",
            "Receive",
            "Watched pages",
            "All of it at",
        ];
        table::print(head.map(str::to_owned), rows.collect::<Vec<_>>());
    }
    if shown.locks && !state.sets.is_empty() {
        println!();
        let rows = state.sets.iter().map(|each| {
            let held = each.held.iter().map(|(lock, member)| format!("{lock} by {member}"));
            [
                "IMC".to_owned(),
                each.id.to_string(),
                format!("{:#x}", each.key),
                each.count.to_string(),
                mode(each.mode),
                list(&each.users),
                held.collect::<Vec<_>>().join(", "),
            ]
        });
        let head = ["Locks", "ID", "Key", "Count", "Mode", "Members", "Held"];
        table::print(head.map(str::to_owned), rows.collect::<Vec<_>>());
    }
    if state.is_cut {
        println!("(There are more.)");
    }
}
