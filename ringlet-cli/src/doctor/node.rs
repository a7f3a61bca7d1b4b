//! Connections that leave this network namespace: are we in one of our own, as in a container, and does the node service introduce us?

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use ringlet::config::NODE_SOCKET;
use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::node::{APART, CARRIED, COME, GREETING, MET, Message};
use ringlet::reasons::Reason;
use ringlet_linux::service::{self, Kind};
use ringlet_linux::sys::Errno;
use ringlet_linux::{fd, meet};

use super::Check;
use super::kernel::{connection, describe, own};
use ringlet_programs::settings::{Flags, Settings};

const NAME: &str = "node service";
/// How long the service may take to say a word: it never waits for others.
const PATIENCE: Duration = Duration::from_secs(10);
const MOUNT: &str = "give the container the directory (`podman run -v /run/ringlet:/run/ringlet:ro`, in Kubernetes a hostPath; not the socket alone, which \
                     a service that is started again replaces)";

pub fn checks() -> Vec<Check> {
    let mut checks: Vec<Check> = preloaded().into_iter().collect();
    let apart = is_apart();
    checks.push(Check::ok(
        "namespaces",
        match apart {
            true => "a network namespace of its own, as of a container",
            false => "the host's network namespace",
        },
    ));
    checks.push(introduces(apart));
    checks.extend(writable());
    checks
}

/// Is a container's mount of the service's directory one by which it could put another service there?
fn writable() -> Option<Check> {
    let Settings { config, .. } = Settings::load(std::env::vars_os().collect(), &Flags::default());
    let path = config.node?.as_c_str().to_string_lossy().into_owned();
    let directory = Path::new(&path).parent()?;
    let is_container = fs::metadata("/proc/self/ns/pid").is_ok_and(|it| it.ino() != FIRST_PIDS);
    (is_container && ringlet_node::mounts::is_mounted_writable(directory)).then(|| {
        Check::warn(
            "node directory",
            format!(
                "{} is mounted writable: root here can put another socket in the service's place",
                directory.display()
            ),
            format!("Mount it to be read only, everywhere; {MOUNT}."),
        )
    })
}

/// KERNEL: the inodes of the first namespaces; that of networks since Linux 6.18, before that it is any.
const FIRST_PIDS: u64 = 0xeffffffc;
const FIRST_NETWORK: u64 = 0xeffffff9;

/// As far as it can be told.
fn is_apart() -> bool {
    let inode = |path: &str| fs::metadata(path).ok().map(|found| found.ino());
    let ours = inode("/proc/self/ns/net");
    if ours == Some(FIRST_NETWORK) {
        return false;
    }
    let among_all = inode("/proc/self/ns/pid") == Some(FIRST_PIDS);
    !among_all || inode("/proc/1/ns/net").is_some_and(|first| Some(first) != ours)
}

/// What a container is started with: the loader passes over a library that is not there, with a line to stderr.
fn preloaded() -> Option<Check> {
    let list = std::env::var("LD_PRELOAD").ok()?;
    let mut ours = list
        .split([':', ' '])
        .filter(|path| path.ends_with(ringlet_programs::preload::LIBRARY_NAME));
    let path = ours.next()?;
    Some(match fs::metadata(path) {
        Ok(_) => Check::ok("preload", format!("LD_PRELOAD has {path}")),
        Err(error) => Check::fail(
            "preload",
            format!("LD_PRELOAD has {path}, which is not to be had: {error}"),
            "Mount the library's directory into the container where LD_PRELOAD says it is (`podman run -v /usr/local/lib/ringlet:/usr/local/lib/ringlet:ro`).",
        ),
    })
}

fn introduces(apart: bool) -> Check {
    let Settings { config, .. } = Settings::load(std::env::vars_os().collect(), &Flags::default());
    let Some(path) = config.node else {
        return absent(apart, "the key `node` is off: nobody is asked", "Set the key `node`.");
    };
    let shown = path.as_c_str().to_string_lossy().into_owned();
    match introduced(&shown) {
        Ok(false) => Check::ok(NAME, format!("{shown} has introduced two ends of a connection")),
        Ok(true) => Check::ok(
            NAME,
            format!(
                "{shown} has introduced two ends of a connection, which are carried: its policy does not let them share memory"
            ),
        ),
        Err(Trouble::Nobody(Errno::ENOENT | Errno(libc::ENOTDIR))) => {
            let there = Path::new(&shown).parent().is_some_and(Path::is_dir);
            let found = match there {
                true => format!("no {shown}: its directory is there, and no service in it"),
                false => format!("no {shown}, nor its directory"),
            };
            let other = if shown == NODE_SOCKET {
                ""
            } else {
                " (the key `node` says another path than the service's own)"
            };
            absent(
                apart,
                &found,
                &format!("Run `ringlet node run` on the host, and {MOUNT}{other}."),
            )
        }
        Err(Trouble::Nobody(Errno::ECONNREFUSED)) => Check::warn(
            NAME,
            format!("{shown} is there, and nobody listens to it"),
            format!("Start the service again; and {MOUNT}."),
        ),
        Err(Trouble::Nobody(Errno::EACCES | Errno::EPERM)) => Check::warn(
            NAME,
            format!("{shown} may not be used"),
            "Let this user reach it; under SELinux install the policy of ringlet's deploy/ringlet.te on the host.",
        ),
        Err(Trouble::Nobody(error)) => Check::warn(
            NAME,
            format!("{shown}: {}", describe(error)),
            "Correct the key `node` (`ringlet config` shows it).",
        ),
        Err(Trouble::Stranger(user)) => Check::warn(
            NAME,
            format!(
                "{shown} belongs to user {user}, who is neither root nor you: programs show it nothing"
            ),
            "Run the service as root.",
        ),
        Err(Trouble::Unmarked) => Check::warn(
            NAME,
            format!(
                "{shown} may be another container's: it is not marked as the host's own, and programs show it nothing"
            ),
            "Run the service of this version as root with CAP_SYS_ADMIN to begin with (deploy/ringlet-node.service), on a file system with extended attributes; \
             and mount its directory to be read only, everywhere.",
        ),
        Err(Trouble::Other) => Check::warn(
            NAME,
            format!("{shown} does not talk as a node service of this version does"),
            "Use the same version of ringlet on the host and here.",
        ),
        Err(Trouble::Silent) => {
            Check::unknown(NAME, format!("{shown} says nothing for {PATIENCE:?}"))
        }
        Err(Trouble::Apart(reason)) => {
            let fix = match reason {
                Reason::NoNote | Reason::NoMirror => {
                    "Run the service without `--cgroup`, or with one that this container is below; on the host, not within a container's own control groups."
                }
                Reason::Refused => {
                    "Allow it on the host in /etc/ringlet/node.toml (`ringlet node policy` prints it annotated): same_pod, a label or a rule."
                }
                Reason::NodeFull => "Raise the limits of the host's /etc/ringlet/node.toml.",
                _ => "`ringlet node status` on the host shows what was decided, and why.",
            };
            let found = format!(
                "{shown} does not introduce even two ends in this container: {}",
                reason.sentence()
            );
            Check::warn(NAME, found, fix)
        }
        Err(Trouble::Untried(error)) => {
            Check::warn(NAME, format!("could not be tried: {error}"), "Mend what fails above.")
        }
    }
}

/// Where both ends of all connections are in one namespace, nothing is missing.
fn absent(apart: bool, found: &str, fix: &str) -> Check {
    match apart {
        true => Check::warn(
            NAME,
            format!("{found}; connections to other containers and to the host stay on the kernel"),
            fix,
        ),
        false => Check::ok(NAME, format!("none ({found}); it is for containers")),
    }
}

enum Trouble {
    Nobody(Errno),
    /// It belongs to this user.
    Stranger(u32),
    /// It may be a container's.
    Unmarked,
    Other,
    Silent,
    Apart(Reason),
    Untried(std::io::Error),
}

/// Has it introduce both ends of a connection that is ours. Are they carried?
fn introduced(path: &str) -> Result<bool, Trouble> {
    // (Where there is none, nothing is to be tried.)
    let path = std::ffi::CString::new(path).map_err(|_| Trouble::Nobody(Errno::EINVAL))?;
    let look = || {
        let visited = service::visit(&path, Kind::Node).map_err(Trouble::Nobody)?;
        let is_believed = service::is_believed(&visited);
        let visit = own(visited.socket);
        let user = meet::credentials(visit.as_raw_fd()).map_err(Trouble::Nobody)?.uid;
        let us = rustix::process::geteuid().as_raw();
        match is_believed {
            true => Ok(visit),
            false if user == 0 || user == us || meet::is_vague(user) => Err(Trouble::Unmarked),
            false => Err(Trouble::Stranger(user)),
        }
    };
    let visits = [look()?, look()?];
    let pair = connection(Ipv4Addr::LOCALHOST.into()).map_err(Trouble::Untried)?;
    let ends = [pair.connector.as_raw_fd(), pair.acceptor.as_raw_fd()];
    for (accepting, (visit, end)) in visits.iter().zip(ends).enumerate() {
        if hear(visit)?.kind != GREETING {
            return Err(Trouble::Other);
        }
        let come = Message { kind: COME, accepting: accepting as u32, ..Message::default() };
        meet::send(visit.as_raw_fd(), come.frame().as_bytes(), &[end]).map_err(Trouble::Nobody)?;
    }
    let mut carried = false;
    for visit in &visits {
        let met = hear(visit)?;
        if met.kind != MET {
            return Err(Trouble::Other);
        }
        carried |= met.flags & CARRIED != 0;
    }
    Ok(carried)
}

fn hear(visit: &OwnedFd) -> Result<Message, Trouble> {
    let mut fds = [fd::pollfd { fd: visit.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    if fd::poll(&mut fds, Some(PATIENCE.as_nanos() as u64), None) == Ok(0) {
        return Err(Trouble::Silent);
    }
    let mut bytes = [0; ROOM_BYTES];
    let told = meet::take(visit.as_raw_fd(), &mut bytes).map_err(|_| Trouble::Other)?;
    let message = Message::read(&bytes[..told.len]).map_err(|_| Trouble::Other)?;
    match message.kind {
        APART => Err(Trouble::Apart(Reason::from_u32(message.reason).unwrap_or(Reason::NodeFull))),
        _ => Ok(message),
    }
}
