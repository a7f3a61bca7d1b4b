//! `ringlet ss`: what ringlet processes show, joined with what the kernel knows.

use std::collections::HashMap;
use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser};
use comfy_table::{Cell, CellAlignment, Color};
use ringlet::reasons::Reason;
use serde::Serialize;
use wildmatch::WildMatch;

use ringlet_bench::bench::spec::Unit;
use ringlet_programs::joined::{Joined, Path, explanation, join, reason_code};
use ringlet_programs::processes::{self, Process, Seen, Slot};
use ringlet_programs::sockets::{End, KernelSocket, Key, LISTENING, Protocol, UNCONNECTED};
use ringlet_programs::table;

/// Show the connections of ringlet programs: which are in shared memory, and why others are not
///
/// Shows the programs of this user, or of all users to root. Queues of a connection in shared memory are those of its
/// rings, and are known if the other end can be seen too; while it is busy they are a little off, since its ends are read
/// one after the other. Ring-In and Ring-Out count bytes through shared memory.
///
/// Exit status 1: something could not be seen.
#[derive(clap::Args)]
pub struct SsArgs {
    /// Only programs with this in their name; * and ? match as in a shell
    program: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Add a sentence that explains the reason
    #[arg(short, long)]
    explain: bool,
    /// Sockets that listen or are not connected, too
    #[arg(short, long)]
    all: bool,
    /// Only connections on this path
    #[arg(long, value_name = "PATH")]
    path: Option<Path>,
    /// Only this process; may be repeated
    #[arg(long)]
    pid: Vec<u32>,
    /// Only connections with this port at either end
    #[arg(long)]
    port: Option<u16>,
    /// Only connections with this reason code
    #[arg(long, value_name = "CODE", value_parser = reason_codes())]
    reason: Option<String>,
}

/// The codes with their sentences, so that the manual lists them all.
fn reason_codes() -> PossibleValuesParser {
    let reasons = Reason::ALL.iter().filter(|reason| **reason != Reason::None);
    reasons.map(|reason| PossibleValue::new(reason.code()).help(reason.sentence())).into()
}

#[derive(Serialize)]
struct Report {
    connections: Vec<Connection>,
    processes: Vec<Summary>,
    /// What could not be seen.
    problems: Vec<String>,
}

#[derive(Serialize)]
struct Summary {
    pid: u32,
    program: String,
    refused: u64,
    watched_ns: u64,
    watched: u64,
    watched_in_vain: u64,
}

#[derive(Serialize)]
struct Connection {
    /// None for a socket that is bound to nothing.
    protocol: Option<Protocol>,
    state: &'static str,
    receive_queue_bytes: Option<u64>,
    send_queue_bytes: Option<u64>,
    local: Option<End>,
    peer: Option<End>,
    program: String,
    pid: u32,
    fd: i32,
    path: Path,
    reason: Option<String>,
    explanation: Option<&'static str>,
    ring_in_bytes: u64,
    ring_out_bytes: u64,
    calls: u64,
    wakes: u32,
    bells: u32,
}

pub fn run(args: SsArgs) -> anyhow::Result<ExitCode> {
    let Seen { processes, mut problems } = processes::all()?;
    let joined = join(&processes, &mut problems);
    let rings = RingEnds::of(&joined);
    let shown = joined.iter().filter(|each| args.wants(each));
    let connections: Vec<Connection> = shown.map(|each| connection(each, &rings)).collect();
    let summaries = processes.iter().filter(|process| args.wants_process(process));
    let summaries = summaries.map(|process| Summary {
        pid: process.pid,
        program: process.program.clone(),
        refused: process.refused,
        watched_ns: process.watched_ns,
        watched: process.watched,
        watched_in_vain: process.watched_in_vain,
    });
    let report = Report { connections, processes: summaries.collect(), problems };
    if args.json {
        table::json(&report)?;
    } else {
        print(&report, args.explain, joined.len());
    }
    Ok(processes::tell(&report.problems))
}

impl SsArgs {
    fn wants_process(&self, process: &Process) -> bool {
        let named = |pattern: &String| {
            let exact = pattern.contains(['*', '?']);
            let pattern = if exact { pattern.clone() } else { format!("*{pattern}*") };
            WildMatch::new(&pattern).matches(&process.program)
        };
        (self.pid.is_empty() || self.pid.contains(&process.pid))
            && self.program.as_ref().is_none_or(named)
    }

    fn wants(&self, each: &Joined) -> bool {
        let has_port = |port: u16| {
            each.socket.as_ref().is_some_and(|socket| {
                [&socket.local, &socket.peer].iter().any(|end| end.port() == Some(port))
            })
        };
        let connected = each
            .socket
            .as_ref()
            .is_some_and(|socket| ![LISTENING, UNCONNECTED].contains(&socket.state));
        self.wants_process(each.process)
            // A UDP socket needs no connection to be in use.
            && (connected || each.path != Path::Kernel || self.all)
            && self.path.is_none_or(|path| path == each.path)
            && self.port.is_none_or(has_port)
            && self
                .reason
                .as_ref()
                .is_none_or(|code| reason_code(each.reason()).as_ref() == Some(code))
    }
}

/// The ends of connections that are in shared memory or on their way, by namespace and addresses, to find an end's other end.
struct RingEnds<'p>(HashMap<(&'p str, Protocol, Key, Key), &'p Slot>);

impl<'p> RingEnds<'p> {
    fn of(joined: &'p [Joined<'p>]) -> RingEnds<'p> {
        // An end that still waits for the other's word may already have bytes in the ring.
        let ends = joined.iter().filter(|each| each.path != Path::Kernel).filter_map(|each| {
            let socket = each.socket.as_ref()?;
            let (local, peer) = (socket.local.key(), socket.peer.key());
            Some(((each.namespace.as_str(), socket.protocol, local, peer), each.slot))
        });
        RingEnds(ends.collect())
    }

    fn other_end_of(&self, each: &Joined, socket: &KernelSocket) -> Option<&'p Slot> {
        let (local, peer) = (socket.local.key(), socket.peer.key());
        self.0.get(&(each.namespace.as_str(), socket.protocol, peer, local)).copied()
    }
}

fn connection(each: &Joined, rings: &RingEnds) -> Connection {
    let Joined { process, slot, path, socket, .. } = each;
    let (receive_queue_bytes, send_queue_bytes) = match (path, socket) {
        (_, None) => (None, None),
        // Both counts move while we look, so a difference may come out below zero.
        (Path::Ring, Some(socket)) => match rings.other_end_of(each, socket) {
            Some(other) => (
                Some(other.tx_bytes.saturating_sub(slot.rx_bytes)),
                Some(slot.tx_bytes.saturating_sub(other.rx_bytes)),
            ),
            None => (None, None),
        },
        (_, Some(socket)) => (socket.receive_queue_bytes, socket.send_queue_bytes),
    };
    Connection {
        protocol: socket.as_ref().map(|socket| socket.protocol),
        state: socket.as_ref().map_or(UNCONNECTED, |socket| socket.state),
        receive_queue_bytes,
        send_queue_bytes,
        local: socket.as_ref().map(|socket| socket.local.clone()),
        peer: socket.as_ref().map(|socket| socket.peer.clone()),
        program: process.program.clone(),
        pid: process.pid,
        fd: slot.fd,
        path: *path,
        reason: reason_code(each.reason()),
        explanation: explanation(each.reason()),
        ring_in_bytes: slot.rx_bytes,
        ring_out_bytes: slot.tx_bytes,
        calls: slot.calls,
        wakes: slot.wakes,
        bells: slot.bells,
    }
}

fn color(path: Path) -> Color {
    match path {
        Path::Ring => Color::Green,
        Path::Moving => Color::Yellow,
        Path::Kernel => Color::Reset,
    }
}

fn print(report: &Report, explain: bool, tracked: usize) {
    let texts =
        ["Proto", "State", "Recv-Q", "Send-Q", "Local", "Peer", "Program", "Path", "Reason"];
    let numbers = ["Ring-In", "Ring-Out", "Wakes", "Bells"];
    let mut header: Vec<Cell> = texts.iter().chain(&numbers).map(Cell::new).collect();
    if explain {
        header.push(Cell::new("Explanation"));
    }
    if !report.connections.is_empty() {
        table::print(header, report.connections.iter().map(|each| row(each, explain)));
    } else if report.processes.is_empty() {
        println!(
            "No ringlet program is running, or none that was asked for or may be looked into."
        );
    } else if tracked > 0 {
        println!("No connection is such as was asked for.");
    } else {
        println!("No ringlet program has a connection.");
    }
    for process in report.processes.iter().filter(|process| process.refused > 0) {
        println!(
            "{} left {} sockets to the kernel for want of slots, memory or descriptors.",
            processes::name(&process.program, process.pid),
            process.refused
        );
    }
    let watchers = |process: &&Summary| process.watched > 0 || process.watched_in_vain > 0;
    for process in report.processes.iter().filter(watchers) {
        println!(
            "{} has watched memory for {}: {} waits ended by it, {} in vain.",
            processes::name(&process.program, process.pid),
            Unit::Nanoseconds.show(process.watched_ns as f64),
            table::grouped(process.watched),
            table::grouped(process.watched_in_vain)
        );
    }
}

fn row(each: &Connection, explain: bool) -> Vec<Cell> {
    let number = |value: Option<u64>| {
        let text = value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        Cell::new(text).set_alignment(CellAlignment::Right)
    };
    let address = |end: &Option<End>| {
        Cell::new(end.as_ref().map_or_else(|| "*:*".to_owned(), End::to_string))
    };
    let mut row = vec![
        Cell::new(match each.protocol {
            Some(Protocol::Udp) => "udp",
            Some(Protocol::Unix) => "unix",
            Some(Protocol::Seqpacket) => "seqpacket",
            _ => "tcp",
        }),
        Cell::new(each.state),
        number(each.receive_queue_bytes),
        number(each.send_queue_bytes),
        address(&each.local),
        address(&each.peer),
        Cell::new(processes::name(&each.program, each.pid)),
        Cell::new(each.path.name()).fg(color(each.path)),
        Cell::new(each.reason.as_deref().unwrap_or("-")),
        number(Some(each.ring_in_bytes)),
        number(Some(each.ring_out_bytes)),
        number(Some(each.wakes.into())),
        number(Some(each.bells.into())),
    ];
    if explain {
        row.push(Cell::new(each.explanation.unwrap_or("")));
    }
    row
}
