//! `ringlet eth`: network devices whose frames go through shared memory (`ringlet_ethernet`).

use std::io::Write;
use std::process::ExitCode;
use std::sync::mpsc;

use anyhow::{Context, Result, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Group;
use ringlet_ethernet::device::{self, End, Settings};
use ringlet_ethernet::frame::MTU_MOST;
use ringlet_ethernet::room::{Rules, base, is_in};
use ringlet_ethernet::wire::{State, Totals};
use ringlet_ethernet::{Mac, Policy, Room, port};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::{reflect, table};

/// Network devices between namespaces and containers of this host, whose frames go through shared memory
///
/// A network is a directory below /run/ringlet/ethernet (or where RINGLET_ETHERNET says): who may enter it may be a port. `up` makes a TAP device
/// that is one; everything that works on a network card works on it. With no other port there, it has no carrier.
#[derive(clap::Args)]
pub struct EthArgs {
    #[command(subcommand)]
    command: EthCommand,
}

#[derive(clap::Subcommand)]
enum EthCommand {
    /// Make a network
    Create(CreateArgs),
    /// Remove a network that has no ports
    Delete {
        /// Its name
        network: String,
    },
    /// Make a device in this network namespace that is a port of a network, in the foreground; it says `ready`
    ///
    /// It needs CAP_NET_ADMIN here, and /dev/net/tun. The device goes when this command ends, however it ends.
    Up(UpArgs),
    /// End a device of this network namespace
    Down {
        /// Its name
        device: String,
    },
    /// Show networks and their ports
    Ls(LookArgs),
    /// Show what went through ports, what was dropped, and why
    Stats(StatsArgs),
}

#[derive(clap::Args)]
struct CreateArgs {
    /// Its name
    network: String,
    /// Whose users may be ports too; without it this user only
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// From which addresses a port may send: moving (any that is not another user's), locked (any that no other port used lately), static (its own)
    #[arg(long, value_name = "POLICY", default_value = "moving", value_parser = ["moving", "locked", "static"])]
    addresses: String,
    /// Broadcast and multicast frames a second that are taken from one port, 0 for any number
    #[arg(long, value_name = "FRAMES", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(..=100_000_000))]
    storm: u64,
}

#[derive(clap::Args)]
struct UpArgs {
    /// The device's name
    device: String,
    /// The network's name
    #[arg(long, value_name = "NAME")]
    network: String,
    /// Bytes of the longest packet, 68 to 65521
    #[arg(long, value_name = "BYTES", default_value_t = MTU_MOST)]
    mtu: u16,
    /// The device's address; without it a random one
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,
    /// Queues, each with a thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(port::QUEUES_MOST)))]
    queues: u16,
    /// Microseconds to watch, at most, before a thread sleeps; 0: it sleeps at once
    #[arg(long, value_name = "US", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    watch: u64,
}

#[derive(clap::Args)]
struct LookArgs {
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct StatsArgs {
    /// Of this device of this network namespace; without it of all ports
    device: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: EthArgs) -> Result<ExitCode> {
    // (Else a device would be what is written to.)
    reflect::occupy_streams()?;
    match args.command {
        EthCommand::Create(args) => create(&args)?,
        EthCommand::Delete { network } => Room::delete(&base(), &network)?,
        EthCommand::Up(args) => up(args)?,
        EthCommand::Down { device } => down(&device)?,
        EthCommand::Ls(args) => {
            let networks = networks()?;
            if args.json { table::json(&networks)? } else { show(&networks) }
        }
        EthCommand::Stats(args) => stats(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn create(args: &CreateArgs) -> Result<()> {
    let addresses = match &*args.addresses {
        "locked" => Policy::Locked,
        "static" => Policy::Static,
        _ => Policy::Moving,
    };
    let group = args.group.as_deref().map(|name| -> Result<u32> {
        // (The largest is none: to give it gives nothing.)
        let number = name.parse().ok().filter(|number| *number != u32::MAX);
        let found = match number {
            Some(number) => return Ok(number),
            None => Group::from_name(name)?,
        };
        Ok(found.with_context(|| format!("there is no group {name:?} here"))?.gid.as_raw())
    });
    Room::create(&base(), &args.network, Rules { addresses, storm: args.storm }, group.transpose()?)
}

fn up(args: UpArgs) -> Result<()> {
    // (One for each queue of each other port.)
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    // (Who hears what it says may go: that ends no device. Before there are other threads.)
    SigSet::from(Signal::SIGPIPE).thread_block()?;
    let ends = mpsc::channel();
    let signalled = ends.0.clone();
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            let _ = signalled.send(End::Asked);
        }
    });
    let UpArgs { device, network, mtu, mac, queues, watch } = args;
    let settings = Settings { device, mtu, mac, queues, watch_us: watch };
    let ready = |mac| {
        let mut out = std::io::stdout();
        let _ = writeln!(out, "ready {} {mac}", settings.device).and_then(|()| out.flush());
        // (Without a service manager it says nothing.)
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    };
    let tell = |what: String| {
        let _ = writeln!(std::io::stderr(), "ringlet eth: {}", table::printable(&what));
    };
    device::up(&settings, Room::open(&base(), &network)?, ends, ready, tell).map(drop)
}

#[derive(Serialize)]
struct Network {
    name: String,
    #[serde(flatten)]
    rules: Rules,
    ports: Vec<State>,
    /// They did not answer.
    silent: Vec<String>,
}

fn networks() -> Result<Vec<Network>> {
    let rooms = Room::all(&base())?;
    let look = |room: Room| -> Result<Network> {
        let (mut ports, mut silent) = (Vec::new(), room.ports()?);
        room.states(|state, _| {
            silent.retain(|id| *id != state.about.id);
            ports.push(state);
            true
        })?;
        let silent = silent.into_iter().map(|id| format!("{id:016x}")).collect();
        ports.sort_by(|one: &State, other| one.about.name.cmp(&other.about.name));
        Ok(Network { name: room.name, rules: room.rules, ports, silent })
    };
    rooms.into_iter().map(look).collect()
}

fn show(networks: &[Network]) {
    let mut rows = Vec::new();
    for network in networks {
        for port in &network.ports {
            rows.push([
                network.name.clone(),
                table::printable(&port.about.name),
                port.about.mac.to_string(),
                port.about.queues.to_string(),
                port.peers.len().to_string(),
                table::grouped(port.totals.sent),
                table::grouped(port.totals.received),
                port.about.pid.to_string(),
                port.about.namespace.to_string(),
            ]);
        }
        let empty = |name: &str, says: String| {
            let mut row: [String; 9] = Default::default();
            (row[0], row[1]) = (name.to_owned(), says);
            row
        };
        rows.extend(
            network.silent.iter().map(|id| empty(&network.name, format!("{id} does not answer"))),
        );
        if network.ports.is_empty() && network.silent.is_empty() {
            rows.push(empty(&network.name, "no ports".into()));
        }
    }
    if rows.is_empty() {
        println!("There is no network (`ringlet eth create NAME` makes one).");
        return;
    }
    let head = [
        "Network",
        "Device",
        "Address",
        "Queues",
        "Others",
        "Sent",
        "Received",
        "Pid",
        "Namespace",
    ];
    table::print(head.map(str::to_owned), rows);
}

/// The port of this network namespace that has this name, and its network.
fn find(device: &str) -> Result<(Room, State)> {
    let here = port::namespace()?;
    for room in Room::all(&base())? {
        let mut found = None;
        room.states(|state, socket| {
            let is_it = state.about.name == device && is_in(here, &state, socket);
            found = is_it.then_some(state);
            !is_it
        })?;
        if let Some(state) = found {
            return Ok((room, state));
        }
    }
    bail!(
        "no device {device} of this network namespace is a port: `ringlet eth ls` shows all that this user may see"
    )
}

fn down(device: &str) -> Result<()> {
    let (room, state) = find(device)?;
    room.end(state.about.id).with_context(|| format!("{device} does not end"))
}

fn stats(args: &StatsArgs) -> Result<()> {
    let states: Vec<State> = match &args.device {
        Some(device) => vec![find(device)?.1],
        None => networks()?.into_iter().flat_map(|network| network.ports).collect(),
    };
    if args.json {
        return table::json(&states);
    }
    if states.is_empty() {
        bail!("there is no port: `ringlet eth up DEVICE --network NAME` makes one");
    }
    for state in &states {
        println!("{} {}", table::printable(&state.about.name), state.about.mac);
        let rows = |totals: &Totals| {
            let plain = [
                ("frames sent", totals.sent),
                ("bytes sent", totals.sent_bytes),
                ("frames received", totals.received),
                ("bytes received", totals.received_bytes),
                ("sleeps", totals.slept),
                ("others woken", totals.rang),
                ("waits for room", totals.waited),
            ];
            let dropped = totals
                .dropped
                .iter()
                .map(|(why, count)| (format!("dropped: {}", table::printable(why)), *count));
            let plain = plain.into_iter().map(|(what, count)| (what.to_owned(), count));
            plain
                .chain(dropped)
                .map(|(what, count)| [what, table::grouped(count)])
                .collect::<Vec<_>>()
        };
        table::print(["What", "Count"].map(str::to_owned), rows(&state.totals));
        let peers = state.peers.iter().map(|peer| {
            let counts = [peer.sent, peer.received, peer.full, peer.waiting].map(table::grouped);
            let [sent, received, full, waiting] = counts;
            [table::printable(&peer.name), peer.mac.to_string(), sent, received, full, waiting]
        });
        let head = ["Other port", "Address", "Sent", "Received", "Dropped: full", "Waiting"];
        table::print(head.map(str::to_owned), peers.collect::<Vec<_>>());
        println!();
    }
    Ok(())
}
