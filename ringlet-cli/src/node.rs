//! `ringlet node`: the service that introduces processes of one host in different network namespaces (`ringlet_node`).

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use ipnet::IpNet;
use ringlet::config::NODE_SOCKET;
use ringlet::reasons::Reason;
use ringlet_node::carrier::keeper;
use ringlet_node::cluster::identity;
use ringlet_node::policy::{EXAMPLE, FILE, Policy};
use ringlet_reflect::{State, Status};
use serde_json::Value;

use ringlet_programs::table;

const BUNDLE_BYTES: u64 = 64 << 10;
/// Two looks from which rates are told.
const APART: Duration = Duration::from_millis(250);

/// Introduce containers of this host to each other, so that their connections move into shared memory
///
/// Two programs under `ringlet run` that are in different network namespaces do not find each other. Where this service runs, and its directory
/// is mounted into both containers, it finds that they are the two ends of one connection (by their TCP sequence numbers, through NAT), asks its
/// policy, and gives them a channel. Their data never passes it, and they go on without it; but two that may not share memory it can have carried.
#[derive(clap::Args)]
pub struct NodeArgs {
    #[command(subcommand)]
    command: NodeCommand,
}

#[derive(clap::Subcommand)]
enum NodeCommand {
    /// Run the service, in the foreground; it says `ready`, then each decision
    ///
    /// It needs CAP_BPF and CAP_NET_ADMIN to begin with, and serves programs of all users. By SIGHUP it reads its policy again, for who comes from then
    /// on; what can't be changed while it runs (labels, the cluster, that it isolates at all) it says.
    Run(RunArgs),
    /// Make a cluster of hosts, or take this host into one: its key and certificate
    Enrol(EnrolArgs),
    /// Show who waits, other nodes, what was decided lately, and why
    Status(StatusArgs),
    /// Print an annotated policy file, which says what holds without one
    Policy,
    /// Forget what services with `--keep-notes` have noted, and note no more: when none is to follow
    Forget {
        /// The service's `--cgroup`
        #[arg(long, value_name = "DIRECTORY", value_hint = clap::ValueHint::DirPath)]
        cgroup: Option<PathBuf>,
    },
    /// Start what carries for the service at the other end of standard input
    #[command(name = keeper::KEEP, hide = true)]
    Keep {
        #[arg(value_parser = [keeper::CARRY, keeper::FABRIC, keeper::REFLECT])]
        what: String,
    },
    /// Carry what the service at the other end of standard input hands over
    #[command(name = keeper::CARRY, hide = true)]
    Carry,
    /// The same to other hosts
    #[command(name = keeper::FABRIC, hide = true)]
    Fabric,
    /// Keep this host's part of the cluster's reflective memory
    #[command(name = keeper::REFLECT, hide = true)]
    Reflect,
}

#[derive(clap::Args)]
struct RunArgs {
    /// The policy; without it /etc/ringlet/node.toml, if it is there
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    policy: Option<PathBuf>,
    /// Where node.sock is made, to be mounted into containers; a socket that systemd hands over is used instead
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/ringlet", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// Where the directories of the policy's labels are made
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/ringlet-labels", value_hint = clap::ValueHint::DirPath)]
    labels: PathBuf,
    /// Watch connections below this control group only, instead of all
    #[arg(long, value_name = "DIRECTORY", value_hint = clap::ValueHint::DirPath)]
    cgroup: Option<PathBuf>,
    /// Keep what is noted of connections for the next service (an upgrade), until `ringlet node forget`; it takes CAP_SYS_ADMIN to begin with
    #[arg(long)]
    keep_notes: bool,
    /// Say nothing of what is decided
    #[arg(long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct EnrolArgs {
    #[command(flatten)]
    what: Enrol,
    /// Where keys and certificates are kept, as in [cluster] of node.toml
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/ringlet", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// How long a certificate holds that is made now
    #[arg(long, value_name = "DAYS", default_value_t = 365)]
    days: u32,
    /// A subnet of that node's containers, for a cluster whose nodes join by each other: its certificate says that it belongs to the node
    #[arg(long = "subnet", value_name = "NET", conflicts_with = "join")]
    subnets: Vec<IpNet>,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Enrol {
    /// Make a cluster with this host as a node of this name; only here are certificates made from then on
    #[arg(long, value_name = "NAME")]
    new: Option<String>,
    /// Print a bundle for a node of this name, which holds its secret key
    #[arg(long, value_name = "NAME")]
    issue: Option<String>,
    /// Take in the bundle that was made for this host (- for standard input); the same again with new keys
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    join: Option<PathBuf>,
    /// Make a new key and certificate for this host, where the cluster was made; elsewhere issue and join again
    #[arg(long)]
    rotate: bool,
}

#[derive(clap::Args)]
struct StatusArgs {
    /// The service's socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET, value_hint = clap::ValueHint::FilePath)]
    socket: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: NodeArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        NodeCommand::Run(args) => {
            let policy = Policy::load(args.policy.as_deref())?;
            let (file, directory, labels) = (args.policy, args.directory, args.labels);
            let (group, keeps_notes, quiet) = (args.cgroup, args.keep_notes, args.quiet);
            ringlet_node::run(ringlet_node::Options {
                directory,
                labels,
                policy,
                file,
                group,
                keeps_notes,
                quiet,
            })?;
        }
        NodeCommand::Forget { cgroup } => {
            let (count, group) = ringlet_node::forget_notes(cgroup)?;
            match count {
                0 => println!("nothing is kept at {}", group.display()),
                _ => println!("what was kept at {} is forgotten", group.display()),
            }
        }
        NodeCommand::Enrol(args) => enrol(args)?,
        NodeCommand::Status(args) => {
            let mut told = ringlet_node::status(&args.socket)?;
            let place = told["reflect"]["socket"].as_str().map(PathBuf::from);
            let kept = place.as_deref().map(kept).transpose();
            match (args.json, kept) {
                (true, kept) => {
                    if let Ok(Some((_, state))) = kept {
                        told["reflect"]["keeper"] = serde_json::to_value(state)?;
                    }
                    table::json(&told)?;
                }
                (false, kept) => show(&told, kept),
            }
        }
        NodeCommand::Keep { what } => keeper::keep(&what)?,
        NodeCommand::Carry => ringlet_node::carrier::carry()?,
        NodeCommand::Fabric => ringlet_node::fabric::carry()?,
        NodeCommand::Reflect => ringlet_node::reflect::reflect()?,
        NodeCommand::Policy => println!("# (To be read from {FILE}.)\n{}", EXAMPLE.trim_end()),
    }
    Ok(ExitCode::SUCCESS)
}

fn enrol(args: EnrolArgs) -> anyhow::Result<()> {
    let directory = &args.directory;
    let terms = identity::Terms { days: args.days, subnets: &args.subnets };
    let renewal = "a service that runs takes it up by itself, for the sessions to come";
    match args.what {
        Enrol { new: Some(name), .. } => {
            identity::found(directory, &name, &terms)?;
            println!(
                "{name} is the first node of a cluster; keep {}/ca.key safe",
                directory.display()
            );
        }
        Enrol { issue: Some(name), .. } => print!("{}", identity::issue(directory, &name, &terms)?),
        Enrol { join: Some(path), .. } => {
            let bundle = match path.as_os_str() == "-" {
                true => std::io::read_to_string(std::io::stdin().take(BUNDLE_BYTES))?,
                false => std::io::read_to_string(std::fs::File::open(&path)?.take(BUNDLE_BYTES))?,
            };
            println!("this host is {}; {renewal}", identity::join(directory, &bundle)?);
        }
        Enrol { .. } => {
            println!("{} has a new key; {renewal}", identity::rotate(directory, &terms)?);
        }
    }
    Ok(())
}

type Kept = (State, State);

/// What the keeper shows, at two moments.
fn kept(place: &Path) -> Result<Kept, Status> {
    let first = ringlet_reflect::state_at(place)?;
    std::thread::sleep(APART);
    Ok((first, ringlet_reflect::state_at(place)?))
}

/// (What processes are called, and their groups, is theirs to choose.)
fn show(told: &Value, kept: Result<Option<Kept>, Status>) {
    let number = |name: &str| table::grouped(told[name].as_u64().unwrap_or(0));
    println!(
        "up {} s, {} guests, {} of them waiting; connections noted below {}",
        number("seconds"),
        number("guests"),
        number("waiting"),
        text(&told["notes"]["group"])
    );
    if let Some(carrier) = told["carrier"].as_object() {
        let number = |name: &str| table::grouped(carrier[name].as_u64().unwrap_or(0));
        match carrier["pid"].as_u64() {
            Some(pid) => println!("{} connections are carried by pid {pid}", number("connections")),
            None => println!("nobody carries: another carrier is being started"),
        }
        println!("{} carriers were lost", number("lost"));
    }
    let earlier = told["earlier_carriers"].as_array().into_iter().flatten();
    earlier
        .for_each(|pid| println!("pid {pid}, of a service before, goes on with what it carries"));
    if told["cluster"].is_object() {
        show_cluster(&told["cluster"]);
    }
    if told["reflect"].is_object() {
        show_reflect(&told["reflect"], kept);
    }
    let counts = told["decisions"].as_object().into_iter().flatten();
    let rows = counts.map(|(outcome, count)| {
        let reason = Reason::ALL.iter().find(|reason| reason.code() == outcome);
        let about = match (reason, outcome.as_str()) {
            (Some(reason), _) => reason.sentence(),
            (None, "policy") => "It was read again, and holds for who comes from then on.",
            (None, "policy-refused") => "It was to be read again and can't be: the old one holds.",
            (None, "carrier-started") => "A process that carries was started.",
            (None, "carrier-lost") => "It has died: what it carried goes on in the kernel.",
            (None, "reflect") => "What the process says that reflects memory.",
            (None, "reflect-started") => "A process that reflects memory was started.",
            (None, "reflect-lost") => "It has died: programs of this host have to begin anew.",
            (None, "gone") => "One of them had ended before it was told of the other.",
            (None, "no-fabric") => {
                "Its far end was found on another host; nothing carries between hosts yet."
            }
            (None, _) => "Introduced to each other.",
        };
        [table::printable(outcome), table::grouped(count.as_u64().unwrap_or(0)), about.to_owned()]
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        println!();
        table::print(["Outcome".to_owned(), "Count".to_owned(), "What it means".to_owned()], rows);
    }
    let last = told["last"].as_array().into_iter().flatten();
    let rows = last.map(|each| [text(&each["outcome"]), text(&each["about"])]).collect::<Vec<_>>();
    if !rows.is_empty() {
        println!();
        table::print(["Outcome".to_owned(), "Lately".to_owned()], rows);
    }
}

fn show_reflect(told: &Value, kept: Result<Option<Kept>, Status>) {
    let number = |name: &str| table::grouped(told[name].as_u64().unwrap_or(0));
    println!(
        "\nreflective memory: pid {}, {} lost; rails to {} nodes; at {}",
        told["pid"],
        number("lost"),
        number("nodes"),
        text(&told["socket"])
    );
    let (before, state) = match kept {
        Ok(Some(kept)) => kept,
        Ok(None) => return,
        Err(error) => return println!("its keeper does not answer: {error}"),
    };
    let (Some(was), Some(cluster)) = (before.cluster, state.cluster) else { return };
    if let Some(why) = &cluster.stopped {
        println!("stopped: {}", table::printable(why));
    }
    for (node, why) in &cluster.unheard {
        println!("not heard: {}, which says {why}", table::printable(node));
    }
    let hosts = cluster.hosts.iter().map(|host| table::printable(host)).collect::<Vec<_>>();
    let rate = |now: u64, then: u64| {
        table::grouped((now.saturating_sub(then) as f64 / APART.as_secs_f64()) as u64)
    };
    println!(
        "view {}: {}, of which {} makes the order{}",
        cluster.view,
        hosts.join(", "),
        table::printable(&cluster.hub),
        if cluster.is_inside { "" } else { "; what is there is on its way here" }
    );
    println!(
        "{} payloads delivered, {} a second; {} of this host's, {} a second, of which {} are not known to be everywhere",
        table::grouped(cluster.delivered),
        rate(cluster.delivered, was.delivered),
        table::grouped(cluster.submitted),
        rate(cluster.submitted, was.submitted),
        table::grouped(cluster.submitted.saturating_sub(cluster.settled))
    );
    if cluster.filling > 0 {
        println!(
            "contents of {} regions are on their way here: {} of {} MB",
            table::grouped(cluster.filling.into()),
            table::grouped(cluster.filled_bytes >> 20),
            table::grouped(cluster.filling_bytes >> 20)
        );
    }
    if cluster.needed > 0 {
        println!(
            "other hosts lack contents of {} regions that this one has{}",
            table::grouped(cluster.needed.into()),
            match cluster.hands_over {
                true => ": it leaves as soon as they have them",
                false => ": they are lost if it dies now",
            }
        );
    }
    if cluster.incomplete > 0 {
        println!(
            "{} regions are incomplete: the hosts that had all of their contents have gone",
            table::grouped(cluster.incomplete.into())
        );
    }
    println!(
        "{} members, {} regions, {} lock sets; {} of {} MB allocated; errors by rail: {:?}",
        state.members.len(),
        state.regions.len(),
        state.sets.len(),
        table::grouped(state.allocated >> 20),
        table::grouped(state.allocated_most >> 20),
        cluster.errors
    );
}

fn show_cluster(cluster: &Value) {
    println!(
        "\nnode {} at {}, incarnation {}",
        text(&cluster["node"]),
        text(&cluster["listen"]),
        cluster["incarnation"]
    );
    let peers = cluster["peers"].as_array().into_iter().flatten();
    let rows = peers.map(|peer| {
        let seconds = table::grouped(peer["seconds"].as_u64().unwrap_or(0));
        let rtt = peer["rtt_us"]
            .as_u64()
            .map_or("-".to_owned(), |us| format!("{} us", table::grouped(us)));
        [
            text(&peer["node"]),
            text(&peer["address"]),
            text(&peer["state"]),
            format!("{seconds} s"),
            rtt,
            text(&peer["why"]),
        ]
    });
    let titles = ["Node", "Address", "State", "Since", "Round trip", "Why"];
    table::print(titles.map(str::to_owned), rows.collect::<Vec<_>>());
    let counts = cluster["decisions"].as_object().into_iter().flatten();
    let counts = counts.map(|(outcome, count)| format!("{} {}", table::printable(outcome), count));
    println!("other nodes, and who was refused: {}", counts.collect::<Vec<_>>().join(", "));
}

fn text(value: &Value) -> String {
    table::printable(value.as_str().unwrap_or("-"))
}
