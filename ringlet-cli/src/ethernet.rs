//! `ringlet eth`: network devices whose frames go through shared memory (`ringlet_ethernet`).

use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{self, Receiver, Sender};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Group;
use ringlet_ethernet::device::{self, End, Settings};
use ringlet_ethernet::far::{Address, Host};
use ringlet_ethernet::room::{BRIDGE, GLANCE, PATIENCE, Rules, VARIABLE, base, is_in};
use ringlet_ethernet::wire::{Choice, Span, State, Totals};
use ringlet_ethernet::{Mac, Policy, Room, attached, bridge, port, span, vhost};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use ringlet_messages::guarded::Guarded;

use crate::reflect;
use ringlet_programs::table;

/// Network devices between namespaces and containers of this host, whose frames go through shared memory, and to those of other hosts
///
/// A network is a directory below /run/ringlet/ethernet (or where RINGLET_ETHERNET says): who may enter it may be a port. `up` makes a TAP device
/// that is one; everything that works on a network card works on it. With no other port there, it has no carrier. Where the network has a bridge, it is
/// a veth device on that, whose frames to others on it do not leave the kernel. `span` makes other hosts, which have a network of that name too, ports
/// of it.
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
    /// It needs CAP_NET_ADMIN here, and /dev/net/tun. The device goes when this command ends, however it ends, unless it persists (`--persist`, or made by
    /// `ip tuntap add`): one of one queue that does, and that no other process has, is taken over, with its addresses, routes and MTU. So a port is begun
    /// anew, by a newer ringlet for one, and what is on the device stays.
    ///
    /// Where the network has a bridge it is a veth device, which sends from its own address only, does not persist, and goes with the bridge, too.
    Up(UpArgs),
    /// Make a QEMU guest's virtio-net a port of a network, in the foreground, as a vhost-user back end; it says `ready`
    ///
    /// QEMU connects with `-chardev socket,id=c,path=PATH,reconnect=1 -netdev vhost-user,id=n,chardev=c -device
    /// virtio-net-pci,netdev=n,mac=ADDRESS`, and shares the guest's memory: `-object memory-backend-memfd,id=m,size=1G,share=on -numa
    /// node,memdev=m`. One guest at a time; the port is there while its driver is.
    Vhost(VhostArgs),
    /// Have a bridge of the kernel's for a network's devices, in the foreground; it says `ready`
    ///
    /// While it is there `up` makes a veth device on it, whose frames to others on it do not leave the kernel; the bridge itself is one port of the
    /// network, by which they reach guests, programs, other hosts and TAP devices. It needs CAP_SYS_ADMIN, CAP_NET_ADMIN, /dev/net/tun and the command
    /// `nft`. When it ends, however it ends, its devices go. `create --bridge` begins one in the background; in such a network `up` waits for the next one.
    /// Who may make a device on it may delete others', and the bridge: have none where containers with CAP_NET_ADMIN must not.
    Bridge(BridgeArgs),
    /// End a port of this network namespace: a device, a guest's, or a program's
    Down {
        /// Its name: of a guest's port that of the socket, without what stands behind its last dot
        device: String,
    },
    /// Have a network span other hosts, by the node service or by UDP, in the foreground; it says `ready`
    ///
    /// It runs on each of the hosts, and names all others. Each that can be reached is a port of the network here; devices come and go as they like.
    /// By the node service (`ringlet node`) its policy says who may; by UDP nothing is encrypted, and who sees what passes can forge it.
    Span(SpanArgs),
    /// Show by which way each other host is reached; or say by which kind of way to send from now on
    Way(WayArgs),
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
    /// Its devices of this host are on a bridge (`ringlet eth bridge`). It begins now, in the background, and `delete` ends it; or later, as a unit
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "now", value_parser = ["now", "later"])]
    bridge: Option<String>,
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
    /// Bytes of the longest packet, 68 to 65521, which is what a new device has without it
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u16>,
    /// The device's address; without it a new device has a random one
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,
    /// The device stays when this command ends, with its addresses and routes, but without a carrier; `ip link del` removes it
    #[arg(long, conflicts_with = "queues")]
    persist: bool,
    /// A TAP device also where the network has a bridge: one that may have other addresses behind it, or another one than it came with. So is one that
    /// persists, or has several queues
    #[arg(long)]
    tap: bool,
    /// Queues, each with a thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(port::QUEUES_MOST)))]
    queues: u16,
    /// Microseconds to watch, at most, before a thread sleeps; 0: it sleeps at once
    #[arg(long, value_name = "US", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    watch: u64,
}

#[derive(clap::Args)]
struct VhostArgs {
    /// Where QEMU connects: a socket that is made here
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The network's name
    #[arg(long, value_name = "NAME")]
    network: String,
    /// The address that QEMU gives to the guest; a network with `--addresses static` must know it
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,
    /// Microseconds to watch, at most, before the thread sleeps; 0: it sleeps at once
    #[arg(long, value_name = "US", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    watch: u64,
}

#[derive(clap::Args)]
struct SpanArgs {
    /// The network's name
    network: String,
    /// Another host: its node's name, as `ringlet node status` shows it, or an address and port for UDP (7472 without one); or several of these, of
    /// which the first that works is used
    #[arg(long = "peer", value_name = "NODE|ADDRESS,...", required = true)]
    peers: Vec<Host>,
    /// Where to hear others by UDP; without it at port 7472 of all addresses
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<Address>,
    /// Microseconds to watch, at most, before a thread sleeps; 0: it sleeps at once
    #[arg(long, value_name = "US", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    watch: u64,
}

#[derive(clap::Args)]
struct BridgeArgs {
    /// The network's name
    network: String,
    /// Microseconds to watch, at most, before the thread of its port sleeps; 0: it sleeps at once
    #[arg(long, value_name = "US", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    watch: u64,
}

#[derive(clap::Args)]
struct WayArgs {
    /// The network's name
    network: String,
    /// node, udp, or auto: the first that works, as they were named
    #[arg(value_parser = ["auto", "node", "udp"])]
    way: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
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
        EthCommand::Vhost(args) => vhost(args)?,
        EthCommand::Down { device } => down(&device)?,
        EthCommand::Span(args) => span(args)?,
        EthCommand::Bridge(BridgeArgs { network, watch }) => {
            let ready = || say_ready(&format!("ready {network}"));
            bridge::serve(Room::open(&base(), &network)?, watch, ends()?, ready, tell)?;
        }
        EthCommand::Way(args) => way(&args)?,
        EthCommand::Ls(args) => {
            let networks = networks()?;
            if args.json { table::json(&networks)? } else { show(&networks)? }
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
    let rules = Rules { addresses, storm: args.storm, bridge: args.bridge.is_some() };
    Room::create(&base(), &args.network, rules, group.transpose()?)?;
    if args.bridge.as_deref() == Some("now") {
        begin_bridge(&args.network).inspect_err(|_| _ = Room::delete(&base(), &args.network))?;
    }
    Ok(())
}

/// A process that goes on when we have ended; returns when it is ready.
fn begin_bridge(network: &str) -> Result<()> {
    // (It is somewhere else from now on.)
    let base = std::path::absolute(base())?;
    let mut bridge = Command::new(std::env::current_exe()?);
    bridge.args(["eth", "bridge", network]).env(VARIABLE, base);
    reflect::begin_behind(&mut bridge).context("there is no bridge")
}

fn vhost(args: VhostArgs) -> Result<()> {
    let VhostArgs { socket, network, mac, watch } = args;
    let settings = vhost::Settings { socket, mac, watch_us: watch };
    let ready = |mac| say_ready(&format!("ready {} {mac}", settings.socket.display()));
    vhost::serve(&settings, Room::open(&base(), &network)?, ends()?, ready, tell)
}

/// How what runs in the foreground ends: when it is signalled, at least. (And room for descriptors: one for each queue of each other port.)
fn ends() -> Result<(Sender<End>, Receiver<End>)> {
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
    Ok(ends)
}

fn say_ready(line: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    // (Without a service manager it says nothing.)
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
}

fn tell(what: String) {
    let _ = writeln!(std::io::stderr(), "ringlet eth: {}", table::printable(&what));
}

fn span(args: SpanArgs) -> Result<()> {
    let SpanArgs { network, peers, listen, watch } = args;
    let listen = match listen {
        None => None,
        Some(Address::Udp(address)) => Some(address),
        Some(Address::Node(name)) => bail!("--listen takes a numeric address, and not {name:?}"),
    };
    let settings = span::Settings { hosts: peers, listen, watch_us: watch };
    let ready = || say_ready(&format!("ready {network}"));
    span::up(&settings, Room::open(&base(), &network)?, ends()?, ready, tell)
}

fn way(args: &WayArgs) -> Result<()> {
    let room = Room::open(&base(), &args.network)?;
    let alone = || {
        format!(
            "network {0:?} is of this host alone: `ringlet eth span {0} --peer ...` changes that",
            room.name
        )
    };
    if let Some(way) = &args.way {
        room.span()?.with_context(alone)?;
        return room.choose(match &**way {
            "node" => Choice::Node,
            "udp" => Choice::Udp,
            _ => Choice::Auto,
        });
    }
    let span = room.span()?.with_context(alone)?;
    if args.json { table::json(&span) } else { show_span(&room.name, &span) }
}

fn show_span(network: &str, span: &Span) -> Result<()> {
    let mut rows = Vec::new();
    for host in &span.hosts {
        for way in &host.ways {
            let state = match (&host.by, way.up) {
                (Some(by), _) if *by == way.address => "used".to_owned(),
                (_, true) => "up".to_owned(),
                _ => way.why.clone().unwrap_or_default(),
            };
            rows.push([
                network.to_owned(),
                table::printable(&host.name),
                table::printable(&way.address),
                table::grouped(way.lost),
                table::printable(&state),
            ]);
        }
    }
    table::print(["Network", "Host", "Way", "Lost", "State"].map(str::to_owned), rows);
    Ok(())
}

fn up(args: UpArgs) -> Result<()> {
    let UpArgs { device, network, mtu, mac, persist: persists, tap, queues, watch } = args;
    let settings = Settings { device, mtu, mac, queues, persists, watch_us: watch };
    let ready = |mac| say_ready(&format!("ready {} {mac}", settings.device));
    let room = Room::open(&base(), &network)?;
    let is_tap = tap || persists || queues > 1;
    if !is_tap && (room.rules.bridge || bridge::is_there(&room)?) {
        return attached::up(&settings, &room, ends()?, ready);
    }
    device::up(&settings, room, ends()?, ready, tell).map(drop)
}

#[derive(Serialize)]
struct Network {
    name: String,
    #[serde(flatten)]
    rules: Rules,
    ports: Vec<State>,
    /// They did not answer.
    silent: Vec<String>,
    /// To which hosts it reaches.
    span: Option<Span>,
}

/// By which way a port is reached, if that is a host.
fn way_of(span: Option<&Span>, name: &str, far: bool) -> String {
    let host = span.and_then(|span| span.hosts.iter().find(|host| host.name == name));
    match (far, host.and_then(|host| host.by.clone())) {
        (false, _) => String::new(),
        (true, by) => table::printable(by.as_deref().unwrap_or("?")),
    }
}

fn networks() -> Result<Vec<Network>> {
    let rooms = Room::all(&base())?;
    let look = |room: Room| -> Result<Network> {
        let (mut ports, mut silent) = (Vec::new(), room.ports()?);
        room.states(PATIENCE, |state, _| {
            silent.retain(|id| *id != state.about.id);
            ports.push(state);
            true
        })?;
        let mut silent: Vec<_> = silent.into_iter().map(|id| format!("{id:016x}")).collect();
        let devices = room.devices(PATIENCE, |state, _| {
            ports.push(state);
            true
        });
        silent.extend(devices.err().map(|_| "bridge".to_owned()));
        ports.sort_by(|one: &State, other| one.about.name.cmp(&other.about.name));
        let span = room.span().unwrap_or_default();
        Ok(Network { name: room.name, rules: room.rules, ports, silent, span })
    };
    rooms.into_iter().map(look).collect()
}

fn show(networks: &[Network]) -> Result<()> {
    let mut rows = Vec::new();
    for network in networks {
        for port in &network.ports {
            rows.push([
                network.name.clone(),
                table::printable(&port.about.name),
                port.about.mac.to_string(),
                port.about.queues.to_string(),
                match port.bridged {
                    Some(_) => "bridge".into(),
                    None => way_of(network.span.as_ref(), &port.about.name, port.about.far),
                },
                port.bridged.unwrap_or(port.peers.len()).to_string(),
                table::grouped(port.totals.sent),
                table::grouped(port.totals.received),
                port.about.pid.to_string(),
                port.about.namespace.to_string(),
            ]);
        }
        let empty = |name: &str, says: String| {
            let mut row: [String; 10] = Default::default();
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
        return Ok(());
    }
    let head = [
        "Network",
        "Device",
        "Address",
        "Queues",
        "Way",
        "Others",
        "Sent",
        "Received",
        "Pid",
        "Namespace",
    ];
    table::print(head.map(str::to_owned), rows);
    for network in networks {
        if let Some(span) = &network.span {
            println!();
            show_span(&network.name, span)?;
        }
    }
    Ok(())
}

/// The port of this network namespace that has this name, and its network: of several, the one that is here most surely.
fn find(device: &str) -> Result<(Room, State)> {
    let here = port::namespace()?;
    let mut found: Option<(Room, State)> = None;
    let least = Cell::new(u8::MAX);
    let is_sure = || least.get() == 0;
    let mut look = |room: &Room, state: State, socket: &Guarded| {
        let doubts = if state.about.name == device { is_in(here, &state, socket) } else { None };
        if let Some(doubts) = doubts.filter(|doubts| *doubts < least.get()) {
            least.set(doubts);
            found = Some((room.clone(), state));
        }
        !is_sure()
    };
    let mut rooms = Room::all(&base())?;
    // (Where a bridge is, its port and it may stand still: that holds up nobody who is elsewhere.)
    rooms.sort_by_cached_key(|room| !room.bury(BRIDGE));
    for most in [GLANCE, PATIENCE] {
        let mut silent = Vec::new();
        for room in &rooms {
            if !room.states(most, |state, socket| look(room, state, socket))? {
                silent.push(room.name.clone());
            }
            if is_sure() {
                break;
            }
        }
        // (A bridge that does not answer hides no port.)
        for room in rooms.iter().take_while(|_| !is_sure()) {
            if room.devices(most, |state, socket| look(room, state, socket)).is_err() {
                silent.push(room.name.clone());
            }
        }
        rooms.retain(|room| silent.contains(&room.name));
        // (Of what a bridge has, its process is elsewhere, so that nothing is more sure.)
        if least.get() <= 1 {
            break;
        }
    }
    found.with_context(|| {
        let silent: Vec<&str> = rooms.iter().map(|room| &*room.name).collect();
        let silent = match &*silent {
            [] => String::new(),
            silent => format!(", and some do not answer on {}", silent.join(", ")),
        };
        format!("no port of this network namespace is named {device}{silent}: `ringlet eth ls` shows all that this user may see")
    })
}

fn down(device: &str) -> Result<()> {
    let (room, state) = find(device)?;
    let id = state.about.id;
    let ended = if state.bridged.is_some() { room.detach(id) } else { room.end(id) };
    ended.with_context(|| format!("{device} does not end"))
}

fn stats(args: &StatsArgs) -> Result<()> {
    let states: Vec<(Option<Span>, State)> = match &args.device {
        Some(device) => {
            let (room, state) = find(device)?;
            vec![(room.span().unwrap_or_default(), state)]
        }
        None => {
            let of = |Network { span, ports, .. }| {
                ports.into_iter().map(move |state| (span.clone(), state))
            };
            networks()?.into_iter().flat_map(of).collect()
        }
    };
    if args.json {
        return table::json(&states.iter().map(|(_, state)| state).collect::<Vec<_>>());
    }
    if states.is_empty() {
        bail!("there is no port: `ringlet eth up DEVICE --network NAME` makes one");
    }
    for (span, state) in &states {
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
        if let Some(others) = state.bridged {
            println!("On the network's bridge, with {others} others\n");
            continue;
        }
        let peers = state.peers.iter().map(|peer| {
            let counts = [peer.sent, peer.received, peer.full, peer.waiting].map(table::grouped);
            let [sent, received, full, waiting] = counts;
            let way = way_of(span.as_ref(), &peer.name, peer.far);
            [table::printable(&peer.name), peer.mac.to_string(), way, sent, received, full, waiting]
        });
        let head = ["Other port", "Address", "Way", "Sent", "Received", "Dropped: full", "Waiting"];
        table::print(head.map(str::to_owned), peers.collect::<Vec<_>>());
        println!();
    }
    Ok(())
}
