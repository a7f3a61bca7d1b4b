//! `ringlet off` and `ringlet on`: running connections go back to the kernel, and return to the ring, unnoticed by their programs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use comfy_table::Cell;
use ringlet::reasons::Reason;
use ringlet_core::view::{
    ASKED_OFF, ASKED_ON, PATH_KERNEL, PATH_RING, SLOT_FREE, SocketSlot, asks_peer, ring_directions,
};
use serde::Serialize;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::targets::{Connection, End, Ends, Target, Targets};
use ringlet_programs::processes::{self, LivePage, Process};
use ringlet_programs::sockets::Protocol;
use ringlet_programs::table;

/// Send running connections through the kernel, where tcpdump and the firewall see them
///
/// The programs notice nothing, and need not be awake: from now on, each byte that they send goes through the kernel's
/// connection. For a process this holds for its later connections too. `ringlet on` takes it back.
///
/// Exit status 0: every connection is on the kernel, or goes there with its next message. 1: one is not, none was found, or a
/// program can't be seen or asked.
#[derive(clap::Args)]
pub struct OffArgs {
    #[command(flatten)]
    how: HowArgs,
}

/// Let connections use shared memory again, after `ringlet off`
///
/// A connection whose peer was not found (reason no-peer) looks for it again.
///
/// Exit status 0: every connection is in shared memory, or enters it with its next messages. 1: one is not, or none was
/// found, or a program can't be seen or asked; a connection that the kernel keeps for another reason counts if it was named itself.
#[derive(clap::Args)]
pub struct OnArgs {
    #[command(flatten)]
    how: HowArgs,
}

#[derive(clap::Args)]
struct HowArgs {
    #[command(flatten)]
    targets: Targets,
    /// How long to wait for connections that are in use
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    timeout: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    Off,
    On,
}

/// A connection whose counts stand still so long is idle: it changes its path when it is used again.
const IDLE: Duration = Duration::from_millis(250);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Connections that begin while we ask are looked for so many times.
const SCANS_MAX: usize = 4;

pub fn off(args: OffArgs) -> anyhow::Result<ExitCode> {
    run(args.how, Want::Off)
}

pub fn on(args: OnArgs) -> anyhow::Result<ExitCode> {
    run(args.how, Want::On)
}

fn run(args: HowArgs, want: Want) -> anyhow::Result<ExitCode> {
    let until = Instant::now() + Duration::try_from_secs_f64(args.timeout).unwrap_or_default();
    let mut reports: Vec<Report> = Vec::new();
    let mut known: HashSet<Ends> = HashSet::new();
    let mut problems: BTreeSet<String> = BTreeSet::new();
    let mut asked_process = false;
    for scan in 0..SCANS_MAX {
        let found = args.targets.find()?;
        problems.extend(found.problems);
        let processes: HashMap<u32, &Process> =
            found.processes.iter().map(|process| (process.pid, process)).collect();
        let mut pages = Pages::default();
        for process in found.processes.iter().filter(|process| args.targets.names(process)) {
            let Some(page) = pages.of(process, &mut problems) else { continue };
            match want {
                Want::Off => page.header().asked.fetch_or(ASKED_OFF, SeqCst),
                Want::On => page.header().asked.fetch_and(!ASKED_OFF, SeqCst),
            };
            asked_process = true;
        }
        // What begins after our look begins as the process was asked; what began in between is seen by the next look.
        let mut asked = Vec::new();
        for mut connection in found.connections {
            if !known.insert(connection.identity.clone()) {
                continue;
            }
            connection.ends.retain(|end| {
                let process = processes.get(&end.pid);
                let page = process.and_then(|process| pages.of(process, &mut problems));
                page.inspect(|page| ask(page, end, want)).is_some()
            });
            match connection.ends.is_empty() {
                true => reports.push(report(&connection, Outcome::Timeout, Reason::None, want)),
                false => asked.push(Asked::new(connection)),
            }
        }
        if scan > 0 && asked.is_empty() {
            break;
        }
        reports.extend(wait(asked, &pages, want, until));
    }
    let fine = reports.iter().all(|report| report.fine) && (asked_process || !reports.is_empty());
    if args.json {
        table::json(&reports)?;
    } else if reports.is_empty() {
        let processes = args.targets.targets.iter().all(|it| matches!(it, Target::Process(_)));
        println!(
            "{}",
            match (asked_process, processes) {
                (true, _) => "No connection yet.",
                _ if args.targets.all => "No program that can be seen runs under ringlet.",
                (_, true) => "No process under ringlet has that id (`ringlet ss` lists them).",
                _ => "No such process or connection under ringlet (`ringlet ss` lists them).",
            }
        );
    } else {
        let header = ["Connection", "Program", "Now"].map(Cell::new).to_vec();
        table::print(header, reports.iter().map(|report| report.row()));
    }
    let problems: Vec<String> = problems.into_iter().collect();
    let told = processes::tell(&problems);
    Ok(if fine { told } else { ExitCode::FAILURE })
}

/// The live pages of processes, each mapped once; None for one that can't be.
#[derive(Default)]
struct Pages(HashMap<u32, Option<LivePage>>);

impl Pages {
    fn of(&mut self, process: &Process, problems: &mut BTreeSet<String>) -> Option<&LivePage> {
        let page = self.0.entry(process.pid).or_insert_with(|| match process.live() {
            Ok(page) => Some(page),
            Err(error) => {
                problems.insert(format!("{error:#}"));
                None
            }
        });
        page.as_ref()
    }

    fn slot(&self, end: &End) -> Option<&SocketSlot> {
        self.0.get(&end.pid)?.as_ref().map(|page| page.slot(end.slot.index))
    }
}

fn ask(page: &LivePage, end: &End, want: Want) {
    let slot = page.slot(end.slot.index);
    let (set, clear) = match want {
        Want::Off => (ASKED_OFF, ASKED_ON),
        Want::On => (ASKED_ON, ASKED_OFF),
    };
    if slot.number.load(SeqCst) == end.slot.number {
        let _ = slot.asked.fetch_update(SeqCst, SeqCst, |asked| Some(asked & !clear | set));
    }
    // Another connection has taken the place meanwhile: nothing was asked of that one.
    if slot.number.load(SeqCst) != end.slot.number {
        slot.asked.fetch_and(!set, SeqCst);
    }
}

/// A connection that was asked to move.
struct Asked {
    connection: Connection,
    counts: u64,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Kernel,
    Ring,
    NextMessage,
    AfterNextMessage,
    Closed,
    Stays,
    Timeout,
}

#[derive(Serialize)]
struct Report {
    connection: String,
    programs: Vec<String>,
    outcome: Outcome,
    /// Why the kernel keeps it.
    reason: Option<&'static str>,
    #[serde(skip)]
    want_off: bool,
    #[serde(skip)]
    sentence: &'static str,
    #[serde(skip)]
    fine: bool,
}

impl Asked {
    fn new(connection: Connection) -> Asked {
        Asked { connection, counts: u64::MAX, since: Instant::now() }
    }

    /// None: not yet.
    fn look(&mut self, pages: &Pages, want: Want) -> Option<(Outcome, Reason)> {
        let ends = self.connection.ends.iter().filter_map(|end| {
            let slot = pages.slot(end)?;
            let same = slot.number.load(Relaxed) == end.slot.number;
            (same && slot.path.load(Relaxed) != SLOT_FREE).then_some(slot)
        });
        let ends: Vec<&SocketSlot> = ends.collect();
        if ends.is_empty() {
            return Some((Outcome::Closed, Reason::None));
        }
        let counts = ends.iter().map(|slot| count(slot)).fold(0, u64::wrapping_add);
        if counts != self.counts {
            (self.counts, self.since) = (counts, Instant::now());
        }
        let idle = self.since.elapsed() > IDLE;
        match want {
            Want::Off => self.look_for_kernel(&ends, idle).map(|found| (found, Reason::None)),
            Want::On => look_for_ring(&ends, idle),
        }
    }

    fn look_for_kernel(&self, ends: &[&SocketSlot], idle: bool) -> Option<Outcome> {
        if self.connection.protocol == Some(Protocol::Udp) {
            // Its senders keep out once it, or what it sends to, has left its lanes.
            let left = ends.iter().all(|slot| slot.path.load(Relaxed) == PATH_KERNEL);
            return (left || idle).then_some(if left {
                Outcome::Kernel
            } else {
                Outcome::NextMessage
            });
        }
        let whole = self.connection.is_whole();
        let directions = ends.iter().map(|slot| slot.directions.load(Relaxed));
        let by_ring = |(sends, receives): (bool, bool)| sends || receives && !whole;
        if !directions.clone().map(ring_directions).any(by_ring) {
            return Some(Outcome::Kernel);
        }
        // An end that can't be seen is asked by the one that can, once that looks.
        let asked = whole || directions.clone().any(asks_peer);
        idle.then_some(if asked { Outcome::NextMessage } else { Outcome::AfterNextMessage })
    }
}

/// Counts that grow with every use.
fn count(slot: &SocketSlot) -> u64 {
    let counts = [&slot.calls, &slot.tx_bytes, &slot.rx_bytes];
    counts.iter().map(|count| count.load(Relaxed)).fold(0, u64::wrapping_add)
}

fn look_for_ring(ends: &[&SocketSlot], idle: bool) -> Option<(Outcome, Reason)> {
    if ends.iter().all(|slot| slot.path.load(Relaxed) == PATH_RING) {
        return Some((Outcome::Ring, Reason::None));
    }
    for slot in ends.iter().filter(|slot| slot.path.load(Relaxed) == PATH_KERNEL) {
        let reason = Reason::from_u32(slot.reason.load(Relaxed)).unwrap_or(Reason::None);
        let passing = [
            Reason::None,
            Reason::Young,
            Reason::Paused,
            Reason::Asked,
            Reason::Stalled,
            Reason::NoPeer,
        ];
        if !passing.contains(&reason) {
            return Some((Outcome::Stays, reason));
        }
    }
    idle.then_some((Outcome::NextMessage, Reason::None))
}

fn wait(mut asked: Vec<Asked>, pages: &Pages, want: Want, until: Instant) -> Vec<Report> {
    let mut reports = Vec::new();
    while !asked.is_empty() {
        let late = Instant::now() >= until;
        asked.retain_mut(|each| {
            let seen = each.look(pages, want);
            let seen = seen.or_else(|| late.then_some((Outcome::Timeout, Reason::None)));
            if let Some((outcome, reason)) = seen {
                reports.push(report(&each.connection, outcome, reason, want));
            }
            seen.is_none()
        });
        if !asked.is_empty() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
    reports
}

fn report(connection: &Connection, outcome: Outcome, reason: Reason, want: Want) -> Report {
    let fine = match outcome {
        Outcome::Timeout => false,
        Outcome::Stays => !connection.named,
        _ => true,
    };
    Report {
        connection: connection.name(),
        programs: connection.ends.iter().map(End::name).collect(),
        outcome,
        reason: (reason != Reason::None).then(|| reason.code()),
        want_off: want == Want::Off,
        sentence: reason.sentence(),
        fine,
    }
}

impl Report {
    fn row(&self) -> Vec<Cell> {
        let now = match self.outcome {
            Outcome::Kernel => "on the kernel".to_owned(),
            Outcome::Ring => "in shared memory".to_owned(),
            Outcome::NextMessage if self.want_off => {
                "idle: goes through the kernel with its next message".to_owned()
            }
            Outcome::NextMessage => "idle: enters shared memory with its next messages".to_owned(),
            Outcome::AfterNextMessage => {
                "idle: what this end sends goes through the kernel with its next message, what the \
                other end sends after its next one"
                    .to_owned()
            }
            Outcome::Closed => "closed meanwhile".to_owned(),
            Outcome::Stays => format!("stays on the kernel: {}", self.sentence),
            Outcome::Timeout if self.want_off => "NOT yet on the kernel".to_owned(),
            Outcome::Timeout => "NOT yet in shared memory".to_owned(),
        };
        [self.connection.clone(), table::some_of(self.programs.iter().cloned()), now]
            .map(Cell::new)
            .to_vec()
    }
}
