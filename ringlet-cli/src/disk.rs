//! `ringlet disk`: disks of one host that are used from others.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use ringlet::config::NODE_SOCKET;
use ringlet_disk::{Options, Reader, Said};
use ringlet_reflect::Host;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::reflect;
use ringlet_programs::table;

/// Use disks of other hosts by reflective memory
#[derive(clap::Args)]
pub struct DiskArgs {
    #[command(subcommand)]
    command: DiskCommand,
}

#[derive(clap::Subcommand)]
enum DiskCommand {
    /// Serve a file or a block device of this host, in the foreground; it says `ready`
    ///
    /// What is read is put into the memory of who reads it. It serves until it is killed, by whatever signal: what was written is as safe as the last
    /// flush has made it, and readers wait for it to be served again.
    Serve(ServeArgs),
    /// Show a disk to programs that speak NBD, at a Unix socket, in the foreground
    ///
    /// It says `ready`, and ends by SIGTERM. Where the server has gone, or can't be reached, requests wait for it, and fail when that takes too long.
    Attach(AttachArgs),
    /// Show the disks that this user may use, where they are, and who uses them
    Ls(LsArgs),
}

#[derive(clap::Args)]
struct ServeArgs {
    /// Its name: letters, digits, dots, dashes and underscores
    name: String,
    /// A file, or a block device
    #[arg(value_hint = clap::ValueHint::FilePath)]
    path: PathBuf,
    /// Nobody may write
    #[arg(long)]
    read_only: bool,
    /// Who may use it, as a file's mode: reading and writing, or neither
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    mode: u32,
    /// Let readers of other hosts ask over TCP connections to that address (with a port, or any), `cluster`: this host's in its cluster
    ///
    /// That spares them, and this host, the way by the reflective memory of all hosts. Where such a connection can't be made, or breaks, they ask by that
    /// memory, and try again. What goes there is not encrypted.
    #[arg(long, value_name = "ADDRESS|cluster", value_parser = direct)]
    direct: Option<Direct>,
    /// The node service that knows the address in the cluster
    #[arg(long, value_name = "SOCKET", default_value = NODE_SOCKET, value_hint = clap::ValueHint::FilePath)]
    node: PathBuf,
}

#[derive(Clone, Copy)]
enum Direct {
    At(SocketAddr),
    Cluster,
}

fn direct(word: &str) -> anyhow::Result<Direct> {
    if word == "cluster" {
        return Ok(Direct::Cluster);
    }
    let any_port = |ip: IpAddr| SocketAddr::new(ip, 0);
    let address = word.parse().or_else(|_| word.parse().map(any_port));
    let address: SocketAddr = address.context("an address, an address and a port, or `cluster`")?;
    let address = SocketAddr::new(address.ip().to_canonical(), address.port());
    ensure!(!address.ip().is_unspecified(), "an address that others can connect to");
    Ok(Direct::At(address))
}

/// Where this host listens for others of its cluster, with any port.
fn in_cluster(node: &Path) -> anyhow::Result<SocketAddr> {
    let told = ringlet_node::status(node)?;
    let listen = told["cluster"]["listen"].as_str().context("it is in no cluster")?;
    let listen: SocketAddr = listen.parse()?;
    ensure!(!listen.ip().is_unspecified(), "it listens at all its addresses: name one");
    Ok(SocketAddr::new(listen.ip(), 0))
}

#[derive(clap::Args)]
struct AttachArgs {
    /// Its name (`ringlet disk ls`)
    name: String,
    /// Where it is shown
    #[arg(long, value_name = "SOCKET", value_hint = clap::ValueHint::FilePath)]
    socket: PathBuf,
    /// How long a request waits, in seconds, where the server has gone or can't be reached
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    patience: u64,
    /// Believe a server of this user's, by number, besides root's and one's own
    #[arg(long, value_name = "UID")]
    owner: Option<u32>,
}

#[derive(clap::Args)]
struct LsArgs {
    /// As JSON
    #[arg(long)]
    json: bool,
}

fn mode(word: &str) -> anyhow::Result<u32> {
    let mode = u32::from_str_radix(word, 8)?;
    let is_right = mode >> 9 == 0
        && mode >> 6 == 6
        && [0, 6].contains(&(mode >> 3 & 7))
        && [0, 6].contains(&(mode & 7));
    ensure!(is_right, "600, 660, 606 or 666");
    Ok(mode)
}

pub fn run(args: DiskArgs) -> anyhow::Result<ExitCode> {
    reflect::occupy_streams()?;
    match args.command {
        DiskCommand::Serve(args) => serve(&args),
        DiskCommand::Attach(args) => attach(&args),
        DiskCommand::Ls(args) => list(&args),
    }
}

fn serve(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let name = &args.name;
    let direct = match args.direct {
        None => None,
        Some(Direct::At(address)) => Some(address),
        Some(Direct::Cluster) => {
            Some(in_cluster(&args.node).context("this host's address in its cluster")?)
        }
    };
    let (path, read_only, mode) = (&args.path, args.read_only, args.mode);
    let options = Options { name, path, read_only, mode, direct };
    // (Who has heard that it is ready may have gone by the next time: that ends no server.)
    SigSet::from(Signal::SIGPIPE).thread_block()?;
    let say = |said| {
        let _ = match said {
            Said::Ready => writeln!(std::io::stdout(), "ready"),
            Said::Lost(error) => {
                writeln!(std::io::stderr(), "ringlet: {name} is not served for now: {error:#}")
            }
            Said::Indirect(error) => {
                writeln!(std::io::stderr(), "ringlet: {name} is served without --direct: {error:#}")
            }
        };
    };
    ringlet_disk::serve(&options, reflect::host, say)?;
    Ok(ExitCode::SUCCESS)
}

fn attach(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    SigSet::from(Signal::SIGPIPE).thread_block()?;
    let patience = Duration::from_secs(args.patience);
    let disk = Reader::open(&args.name, args.owner, patience)?;
    make_way(&args.socket)?;
    let shown = || args.socket.display().to_string();
    let listener = UnixListener::bind(&args.socket).with_context(shown)?;
    let _ = writeln!(std::io::stdout(), "ready");
    std::thread::spawn(move || {
        let say = |why: &str| {
            let _ = writeln!(std::io::stderr(), "ringlet: {why}");
        };
        ringlet_nbd::serve(&listener, disk, &say)
    });
    signals.forever().next();
    let _ = std::fs::remove_file(&args.socket);
    Ok(ExitCode::SUCCESS)
}

/// What a server has left behind at whom nobody listens any more.
fn make_way(socket: &Path) -> anyhow::Result<()> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    match UnixStream::connect(socket).map_err(|error| error.kind()) {
        Err(NotFound) => Ok(()),
        Err(ConnectionRefused) if is_socket(socket) => {
            std::fs::remove_file(socket).with_context(|| socket.display().to_string())
        }
        _ => bail!("{} is there already", socket.display()),
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|about| about.file_type().is_socket())
}

fn list(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let host = Host::find().context("this host's reflective memory")?;
    let disks = ringlet_disk::list(&host)?;
    if args.json {
        table::json(&serde_json::to_value(&disks)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = disks.iter().map(|disk| {
        let writes = if disk.read_only { "read only" } else { "" };
        let place = disk.host.as_deref().unwrap_or("(nobody)");
        [
            disk.name.clone(),
            table::grouped(disk.bytes),
            writes.to_owned(),
            disk.owner.to_string(),
            table::printable(place),
            table::printable(&disk.readers.join(" ")),
        ]
    });
    let head = ["Disk", "Size", "", "User", "Served by", "Readers on"];
    table::print(head.map(str::to_owned), rows.collect::<Vec<_>>());
    Ok(ExitCode::SUCCESS)
}
