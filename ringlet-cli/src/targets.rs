//! Which connections a command is about: named by process, by one end or by both, as `ringlet ss` prints them.

use std::collections::HashMap;
use std::str::FromStr;

use ringlet_core::view::PATH_KERNEL;

use ringlet_programs::joined::{Joined, join};
use ringlet_programs::processes::{self, Process, Seen, Slot};
use ringlet_programs::sockets::{self, KernelSocket, Key, LISTENING, Protocol, UNCONNECTED};

#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    Process(u32),
    End(Key),
    Connection(Key, Key),
    /// A name that Unix sockets are bound to.
    Name(String),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        if text.starts_with(['/', '@']) {
            return Ok(Target::Name(text.to_owned()));
        }
        let end = |text: &str| text.parse::<Key>().ok();
        let target = match text.split_once('-') {
            None => text.parse().map(Target::Process).ok().or_else(|| end(text).map(Target::End)),
            Some((one, other)) => end(one).zip(end(other)).map(|(a, b)| Target::Connection(a, b)),
        };
        target.ok_or_else(|| {
            "neither a process id, nor ADDRESS:PORT, nor ADDRESS:PORT-ADDRESS:PORT, nor a path"
                .to_owned()
        })
    }
}

/// PIDs and connections on a command line.
#[derive(clap::Args)]
pub struct Targets {
    /// A process id, one end (127.0.0.1:5432) or both ends of a connection (127.0.0.1:5432-127.0.0.1:40312), or the path or
    /// @name of a Unix socket
    #[arg(value_name = "PID|CONNECTION", required_unless_present = "all")]
    pub targets: Vec<Target>,
    /// Every ringlet program that can be seen
    #[arg(long, conflicts_with = "targets")]
    pub all: bool,
}

impl Targets {
    pub fn names(&self, process: &Process) -> bool {
        self.all || self.targets.contains(&Target::Process(process.pid))
    }

    fn names_socket(&self, socket: &KernelSocket) -> bool {
        let (local, peer) = (socket.local.key(), socket.peer.key());
        let is_bound = |end: &sockets::End, wanted: &String| match end {
            sockets::End::Unix { name, .. } => name.as_ref().is_some_and(|name| name.is(wanted)),
            sockets::End::Internet(_) => false,
        };
        self.targets.iter().any(|target| match target {
            Target::Process(_) => false,
            Target::End(end) => [local, peer].contains(end),
            Target::Name(name) => is_bound(&socket.local, name) || is_bound(&socket.peer, name),
            Target::Connection(a, b) => [(*a, *b), (*b, *a)].contains(&(local, peer)),
        })
    }

    /// What is meant, with all ends and holders that can be seen.
    pub fn find(&self) -> anyhow::Result<Found> {
        let Seen { processes, mut problems } = processes::all()?;
        let mut connections: Vec<Connection> = Vec::new();
        let mut places: HashMap<Ends, usize> = HashMap::new();
        for each in join(&processes, &mut problems) {
            // A UDP socket needs no connection to be in use.
            let is_idle = |socket: &KernelSocket| {
                socket.protocol != Protocol::Udp && [LISTENING, UNCONNECTED].contains(&socket.state)
            };
            if each.socket.as_ref().is_some_and(is_idle) {
                continue;
            }
            let Some(ends) = Ends::of(&each) else { continue };
            let named = each.socket.as_ref().is_some_and(|socket| self.names_socket(socket));
            let place = *places.entry(ends.clone()).or_insert_with(|| {
                connections.push(Connection::new(ends, each.socket.as_ref()));
                connections.len() - 1
            });
            let connection = &mut connections[place];
            connection.named |= named;
            connection.chosen |= named || self.names(each.process);
            connection.ends.push(End {
                pid: each.process.pid,
                program: each.process.program.clone(),
                accepts: each.socket.is_some_and(|socket| socket.local.key() != connection.local),
                slot: each.slot.clone(),
                chosen: named || self.names(each.process),
            });
        }
        connections.retain(|connection| connection.chosen);
        Ok(Found { processes, connections, problems })
    }
}

pub struct Found {
    pub processes: Vec<Process>,
    pub connections: Vec<Connection>,
    pub problems: Vec<String>,
}

/// By which the two ends of a connection are found to be of one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Ends {
    /// In one order, within their network namespace.
    Known(String, Protocol, Key, Key),
    /// The kernel's table doesn't list the socket, of this number, though its process shows that it shares memory with another.
    Unlisted(u64),
}

impl Ends {
    fn of(each: &Joined) -> Option<Ends> {
        Some(match &each.socket {
            Some(socket) => {
                let (local, peer) = (socket.local.key(), socket.peer.key());
                let (one, other) = (local.min(peer), local.max(peer));
                Ends::Known(each.namespace.clone(), socket.protocol, one, other)
            }
            None if each.slot.path != PATH_KERNEL => Ends::Unlisted(each.slot.inode),
            None => return None,
        })
    }
}

/// A connection, and the rows in which processes show it: its two ends, and whoever shares one of them.
pub struct Connection {
    pub identity: Ends,
    /// None if it is not listed.
    pub protocol: Option<Protocol>,
    pub local: Key,
    pub peer: Key,
    pub ends: Vec<End>,
    /// Itself, not only by its process.
    pub named: bool,
    chosen: bool,
}

pub struct End {
    pub pid: u32,
    pub program: String,
    /// Is it at the connection's `peer` address?
    pub accepts: bool,
    pub slot: Slot,
    /// Itself or its process was named.
    pub chosen: bool,
}

impl End {
    pub fn name(&self) -> String {
        processes::name(&self.program, self.pid)
    }
}

impl Connection {
    fn new(identity: Ends, socket: Option<&KernelSocket>) -> Connection {
        let keys = socket.map(|socket| (socket.local.key(), socket.peer.key()));
        let (local, peer) = keys.unwrap_or((Key::Unix(0), Key::Unix(0)));
        let protocol = socket.map(|socket| socket.protocol);
        Connection {
            identity,
            protocol,
            local,
            peer,
            ends: Vec::new(),
            named: false,
            chosen: false,
        }
    }

    pub fn name(&self) -> String {
        match self.identity {
            Ends::Known(..) => format!("{}-{}", self.local, self.peer),
            Ends::Unlisted(inode) => format!("socket {inode}"),
        }
    }

    /// Are both its ends among those that can be seen?
    pub fn is_whole(&self) -> bool {
        self.ends.iter().any(|end| end.accepts) && self.ends.iter().any(|end| !end.accepts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_ends_and_connections_are_told_apart() {
        let end = |text: &str| text.parse::<Key>().unwrap();
        assert_eq!("4711".parse(), Ok(Target::Process(4711)));
        assert_eq!("127.0.0.1:80".parse(), Ok(Target::End(end("127.0.0.1:80"))));
        assert_eq!("[::ffff:127.0.0.1]:80".parse(), Ok(Target::End(end("127.0.0.1:80"))));
        assert_eq!(
            "[::1]:80-[::1]:4000".parse(),
            Ok(Target::Connection(end("[::1]:80"), end("[::1]:4000")))
        );
        assert_eq!("unix:4711".parse(), Ok(Target::End(Key::Unix(4711))));
        assert_eq!("/run/a-b".parse(), Ok(Target::Name("/run/a-b".to_owned())));
        for wrong in ["", "redis", "127.0.0.1", "127.0.0.1:80-", "1-2", "-5"] {
            assert!(wrong.parse::<Target>().is_err(), "{wrong}");
        }
    }
}
