//! `ringlet explain`: what happened to each socket of a process, and why.

mod advice;
mod program;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ringlet::reasons::Reason;
use ringlet_core::view::{ASKED_OFF, ASKED_TAP, PATH_MOVING, PATH_RING};
use serde::Serialize;

use crate::holders::{Holder, Holders, sockets_of};
use ringlet_programs::processes::{self, Slot};
use ringlet_programs::sockets::{
    End, KernelSocket, Key, LISTENING, Protocol, SocketTable, UNCONNECTED,
};
use ringlet_programs::table;

/// Explain what happened to the sockets of a program, and why
///
/// Tells of each socket whether ringlet follows it, where it is and since when, what brought it there, who is at its other
/// end and who else holds it, and what can be done. Of a program that ringlet does not reach, it tells why.
#[derive(clap::Args)]
pub struct ExplainArgs {
    /// The process
    pid: u32,
    /// Only this descriptor
    fd: Option<i32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    pid: u32,
    program: String,
    /// Does it show itself to ringlet?
    seen: bool,
    reason: Option<&'static str>,
    explanation: Option<String>,
    advice: Option<String>,
    sockets: Vec<Socket>,
}

#[derive(Serialize)]
struct Socket {
    fd: i32,
    kind: &'static str,
    state: Option<&'static str>,
    local: Option<String>,
    peer: Option<String>,
    /// ring, moving, kernel; none for a socket that ringlet does not follow.
    path: Option<&'static str>,
    reason: Option<String>,
    explanation: Option<String>,
    advice: Option<String>,
    /// Everything that ringlet has noted of it.
    history: Option<History>,
    asked_off: bool,
    captured: bool,
    holders: Vec<Holder>,
    peer_holders: Vec<Holder>,
    peer_runs_ringlet: Option<bool>,
}

/// Moments are nanoseconds since 1970.
#[derive(Serialize)]
struct History {
    began_ns: u64,
    path_since_ns: u64,
    moved_ns: Option<u64>,
    /// How often it came to shared memory, and how often this end went back.
    entries: u32,
    returns: u32,
    overflows: u32,
    last_return_ns: Option<u64>,
    last_return_reason: Option<&'static str>,
    ring_sent_bytes: u64,
    ring_received_bytes: u64,
    /// Known once the connection shares memory with its peer.
    kernel_sent_bytes: u64,
    kernel_received_bytes: u64,
    ring_messages: u64,
    kernel_messages: u64,
    slept: u32,
    watched: u32,
    rung: u32,
}

pub fn run(args: ExplainArgs) -> anyhow::Result<ExitCode> {
    let process = processes::one(args.pid)?;
    let unseen = match process {
        None => Some(program::why_unseen(args.pid)?),
        Some(_) => None,
    };
    anyhow::ensure!(
        unseen.as_ref().is_none_or(|why| why.code != "gone"),
        "there is no process {}",
        args.pid
    );
    let slots = process.into_iter().flat_map(|process| process.slots);
    let slots = slots.map(|slot| (slot.inode, slot)).collect();
    let mut wanted = sockets_of(args.pid);
    wanted.retain(|(fd, _)| args.fd.is_none_or(|one| one == *fd));
    let look = Look::new(args.pid, slots, &wanted);
    let sockets: Vec<Socket> =
        wanted.iter().map(|(fd, inode)| look.socket(*fd, *inode, unseen.is_none())).collect();
    if let Some(fd) = args.fd {
        anyhow::ensure!(
            !sockets.is_empty(),
            "descriptor {fd} of process {} is no socket",
            args.pid
        );
    }
    let report = Report {
        pid: args.pid,
        program: processes::program_of(args.pid),
        seen: unseen.is_none(),
        reason: unseen.as_ref().map(|why| why.code),
        explanation: unseen.as_ref().map(|why| why.sentence.clone()),
        advice: unseen.and_then(|why| why.advice),
        sockets,
    };
    if args.json {
        table::json(&report)?;
    } else {
        print(&report);
    }
    let problem = look.table.problem.iter().map(|why| format!("{}: {why}", args.pid));
    Ok(processes::tell(&problem.collect::<Vec<_>>()))
}

/// Everything that was found at one moment.
struct Look {
    pid: u32,
    slots: HashMap<u64, Slot>,
    table: SocketTable,
    /// Of each end of an internet connection: its socket.
    ends: HashMap<(Key, Key), u64>,
    other_kinds: HashMap<u64, &'static str>,
    holders: Holders,
    /// The holders of the other ends that show a page.
    wrapped: HashSet<u32>,
}

/// Files of /proc/PID/net that tell of sockets of other kinds, the column of the inode in them, and what the sockets are called.
const KINDS: [(&str, usize, &str); 5] = [
    ("netlink", 9, "netlink"),
    ("packet", 8, "packet"),
    ("raw", 9, "raw IP"),
    ("raw6", 9, "raw IP"),
    ("icmp", 9, "ping"),
];

impl Look {
    /// What there is to know of these sockets of a process.
    fn new(pid: u32, slots: HashMap<u64, Slot>, sockets: &[(i32, u64)]) -> Look {
        let directory = processes::directory(pid);
        let mut other_kinds = HashMap::new();
        for (file, column, name) in KINDS {
            let text = fs::read_to_string(directory.join("net").join(file)).unwrap_or_default();
            let inodes = text
                .lines()
                .filter_map(|line| line.split_ascii_whitespace().nth(column)?.parse::<u64>().ok());
            other_kinds.extend(inodes.map(|inode| (inode, name)));
        }
        let table = SocketTable::read(&directory);
        let ends =
            table.iter().map(|(inode, socket)| ((socket.local.key(), socket.peer.key()), inode));
        let (ends, holders) = (ends.collect(), Holders::look());
        let wrapped = HashSet::new();
        let mut look = Look { pid, slots, table, ends, other_kinds, holders, wrapped };
        let peers =
            sockets.iter().filter_map(|(_, inode)| look.peer_inode(&look.table.find(*inode)?));
        let pids: HashSet<u32> =
            peers.flat_map(|peer| look.holders.of(peer)).map(|holder| holder.pid).collect();
        look.wrapped = processes::that_show(pids.into_iter().collect()).collect();
        look
    }

    fn socket(&self, fd: i32, inode: u64, seen: bool) -> Socket {
        let found = self.table.find(inode);
        let kernel = found.as_ref();
        let kind = match kernel.map(|kernel| kernel.protocol) {
            Some(Protocol::Tcp) => Some("TCP"),
            Some(Protocol::Udp) => Some("UDP"),
            Some(Protocol::Unix | Protocol::Seqpacket) => Some("Unix"),
            None => self.other_kinds.get(&inode).copied(),
        };
        let slot = self.slots.get(&inode);
        let holders = self.holders.of(inode).iter().filter(|holder| holder.pid != self.pid);
        let peer = kernel.and_then(|kernel| self.peer_inode(kernel));
        let peer_holders = peer.map_or(&[][..], |peer| self.holders.of(peer)).to_vec();
        let wrapped = |holder: &Holder| self.wrapped.contains(&holder.pid);
        let connected =
            kernel.is_some_and(|kernel| ![LISTENING, UNCONNECTED].contains(&kernel.state));
        let is_listener = kernel.is_some_and(|kernel| kernel.state == LISTENING);
        let (reason, explanation, advice) = match slot {
            Some(slot) if !is_listener => reason_of(slot),
            _ => (None, Some(why_not_followed(kind, kernel, seen).to_owned()), None),
        };
        Socket {
            fd,
            // What the kernel's tables do not list is bound to nothing, or of a kind without a table.
            kind: match kernel {
                Some(KernelSocket { protocol: Protocol::Seqpacket, .. }) => "Unix packets",
                _ => kind.unwrap_or("unbound"),
            },
            state: kernel.map(|kernel| kernel.state),
            local: kernel.map(|kernel| kernel.local.to_string()),
            peer: kernel.filter(|_| connected).map(|kernel| kernel.peer.to_string()),
            path: slot.map(|slot| match slot.path {
                PATH_RING => "ring",
                PATH_MOVING => "moving",
                _ => "kernel",
            }),
            reason,
            explanation,
            advice,
            history: slot.map(history),
            asked_off: slot.is_some_and(|slot| slot.asked & ASKED_OFF != 0),
            captured: slot.is_some_and(|slot| slot.asked & ASKED_TAP != 0),
            holders: holders.cloned().collect(),
            peer_runs_ringlet: peer.map(|_| peer_holders.iter().any(wrapped)),
            peer_holders,
        }
    }

    /// The socket at the other end, if it is in the same network namespace.
    fn peer_inode(&self, socket: &KernelSocket) -> Option<u64> {
        if let End::Unix { inode, .. } = socket.peer {
            return inode;
        }
        self.ends.get(&(socket.peer.key(), socket.local.key())).copied()
    }
}

fn why_not_followed(kind: Option<&str>, kernel: Option<&KernelSocket>, seen: bool) -> &'static str {
    match (kind, kernel) {
        _ if !seen => "Not followed: ringlet is not in this process.",
        (_, Some(kernel)) if kernel.state == LISTENING => {
            "A listener: it is the kernel's; ringlet follows the connections that it accepts."
        }
        (Some("TCP"), _) => {
            "Not followed: it was not made by this program's own calls (it was inherited, or passed by another process, or made by a \
             system call around libc), or the tables were full."
        }
        (Some("Unix" | "UDP"), _) => {
            "Not followed: it is none of the sockets of this kind that ringlet moves, or not connected."
        }
        (Some(_), _) => "Not followed: ringlet has nothing to offer to sockets of this kind.",
        (None, _) => {
            "Not followed: it is not connected, or of a kind that the kernel's tables do not list."
        }
    }
}

fn reason_of(slot: &Slot) -> (Option<String>, Option<String>, Option<String>) {
    match Reason::from_u32(slot.reason) {
        Some(Reason::None) => (None, None, None),
        Some(reason) => (
            Some(reason.code().to_owned()),
            Some(reason.sentence().to_owned()),
            advice::advice(reason).map(str::to_owned),
        ),
        None => (
            Some(format!("#{}", slot.reason)),
            Some("A reason that only a newer ringlet can explain.".to_owned()),
            None,
        ),
    }
}

fn history(slot: &Slot) -> History {
    let (ring_messages, kernel_messages) = slot.calls_by_path();
    let moment = |ns: u64| (ns != 0).then_some(ns);
    let returned = moment(slot.returned_ns);
    History {
        began_ns: slot.began_ns,
        path_since_ns: slot.path_since_ns,
        moved_ns: moment(slot.moved_ns),
        entries: slot.entries,
        returns: slot.returns,
        overflows: slot.overflows,
        last_return_ns: returned,
        last_return_reason: returned
            .and_then(|_| Reason::from_u32(slot.return_reason))
            .map(Reason::code),
        ring_sent_bytes: slot.tx_bytes,
        ring_received_bytes: slot.rx_bytes,
        kernel_sent_bytes: slot.kernel_tx_bytes,
        kernel_received_bytes: slot.kernel_rx_bytes,
        ring_messages,
        kernel_messages,
        slept: slot.wakes,
        watched: slot.spins,
        rung: slot.bells,
    }
}

fn print(report: &Report) {
    let name = processes::name(&report.program, report.pid);
    let on_ring = report.sockets.iter().filter(|socket| socket.path == Some("ring")).count();
    match &report.explanation {
        None => println!(
            "{name} runs under ringlet. Sockets: {}, of them in shared memory: {on_ring}.",
            report.sockets.len()
        ),
        Some(sentence) => println!("{name}: {sentence}"),
    }
    if let Some(advice) = &report.advice {
        println!("  {advice}");
    }
    for socket in &report.sockets {
        println!();
        print_socket(socket);
    }
}

fn print_socket(socket: &Socket) {
    let ends = [&socket.local, &socket.peer].into_iter().flatten().cloned().collect::<Vec<_>>();
    let state = socket.state.unwrap_or("");
    println!(
        "{}",
        ["descriptor", &socket.fd.to_string(), socket.kind, &ends.join("-"), state]
            .join(" ")
            .trim_end()
    );
    let say = |text: String| println!("  {text}");
    if let (Some(path), Some(history)) = (socket.path, &socket.history) {
        let place = match path {
            "ring" => "In shared memory",
            "moving" => "On its way, or partly in shared memory",
            _ => "On the kernel",
        };
        say(format!("{place} since {}.", ago(history.path_since_ns)));
    }
    if let Some(sentence) = &socket.explanation {
        let code = socket.reason.as_ref().map_or_else(String::new, |code| format!(" ({code})"));
        say(format!("{sentence}{code}"));
    }
    if let Some(advice) = &socket.advice {
        say(advice.clone());
    }
    if let Some(history) = &socket.history {
        print_history(history, &say);
    }
    if socket.captured {
        say("It is being captured.".to_owned());
    }
    if socket.asked_off && socket.reason.as_deref() != Some(Reason::Paused.code()) {
        say("ringlet off was said; it goes to the kernel with its next message.".to_owned());
    }
    match (&socket.peer, socket.peer_holders.as_slice(), socket.peer_runs_ringlet) {
        (None, ..) => {}
        (Some(_), [], None) => say("Peer: not in this network namespace.".to_owned()),
        (Some(_), [], _) => {
            say("Peer: on this machine, in a process that you may not look into.".to_owned())
        }
        (Some(_), holders, wrapped) => {
            let how =
                if wrapped == Some(true) { "runs under ringlet" } else { "is not seen by ringlet" };
            say(format!("Peer: {}, which {how}.", list(holders)));
        }
    }
    if !socket.holders.is_empty() {
        say(format!("Also held by {}.", list(&socket.holders)));
    }
}

fn print_history(history: &History, say: &impl Fn(String)) {
    let moved = match history.moved_ns {
        None => "it was never in shared memory".to_owned(),
        Some(moved) => {
            let after = Duration::from_nanos(moved.saturating_sub(history.began_ns));
            format!(
                "first in shared memory {} later, {} in all",
                short(after),
                times(history.entries)
            )
        }
    };
    say(format!("Began {}; {moved}.", ago(history.began_ns)));
    if let Some(returned) = history.last_return_ns {
        let why = history.last_return_reason.unwrap_or("?");
        say(format!(
            "This end went back to the kernel {}, {} because the receiver did not read; last {} ({why}).",
            times(history.returns),
            times(history.overflows),
            ago(returned)
        ));
    }
    let bytes = |sent: u64, received: u64| format!("{sent} bytes sent, {received} received");
    let kernel = if history.moved_ns.is_some() {
        format!(
            "; through the kernel {}",
            bytes(history.kernel_sent_bytes, history.kernel_received_bytes)
        )
    } else {
        String::new()
    };
    say(format!(
        "Through shared memory {}, in {} messages{kernel}, in {} messages.",
        bytes(history.ring_sent_bytes, history.ring_received_bytes),
        history.ring_messages,
        history.kernel_messages
    ));
    say(format!(
        "Waits: {} slept through, {} ended by watching memory; rang its peer {}.",
        history.slept,
        history.watched,
        times(history.rung)
    ));
}

fn list(holders: &[Holder]) -> String {
    let each = |holder: &Holder| {
        let name = processes::name(&holder.program, holder.pid);
        format!("{name} (descriptor {})", holder.fd)
    };
    table::some_of(holders.iter().map(each))
}

fn times(count: u32) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// In whole seconds, or milliseconds if it is shorter.
fn short(duration: Duration) -> String {
    let rounded = match duration.as_secs() {
        0 => Duration::from_millis(duration.as_millis() as u64),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(rounded).to_string()
}

fn ago(ns: u64) -> String {
    let moment = UNIX_EPOCH + Duration::from_nanos(ns);
    let ago = SystemTime::now().duration_since(moment).unwrap_or_default();
    format!("{} ago", short(ago))
}
