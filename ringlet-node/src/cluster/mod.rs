//! The node services of several hosts know each other: who is a member, who can be reached, and an ordered channel to each that can.
//!
//! ```text
//!   identity.rs   the cluster's certificate authority, a node's key and certificate, and TLS by them
//!   members.rs    `[cluster]` of node.toml: which nodes there are, or where they are found
//!   nodes.rs      those that are listed, and those that were learned of; which addresses belong to them
//!   link.rs       one connection to a node: TLS, frames, bounded in both directions
//!   peers.rs      what becomes of a node: joined, unreachable, left; without a system call
//!   names.rs      nodes that are listed by name are looked up
//!   renewal.rs    new keys and certificates are taken up
//!   post.rs       what other nodes say of ends of connections, for the service
//!   strangers.rs  how many may be there who have not said yet who they are
//!   channels.rs   a plain connection for the two ends of each that is carried
//!   joining.rs    nodes of an open cluster hear of each other
//!   engine.rs     the thread that dials, accepts, sends heartbeats and gives up
//! ```
//!
//! There is no leader and no vote. Each pair of nodes has one connection, a *session*, which the node with the lower name dials; what binds the two
//! (links, messages that are passed) belongs to that session and ends with it. A session ends for both: whoever gives it up closes it, and who can't be
//! told so hears nothing more, and gives it up after `SILENT` himself. It never comes back: the next connection is another session, with another number.
//! So a partition of one pair says nothing about others, and no two nodes can think differently of a link of theirs for longer than that; until
//! then the link's two programs agree by the kernel's connection between them, which has no part in this.

mod channels;
mod engine;
pub mod identity;
mod joining;
mod link;
pub mod members;
mod names;
mod nodes;
mod peers;
pub mod post;
mod renewal;
mod strangers;

pub use channels::{TOKEN_BYTES, Token};
pub use engine::{BEAT, Events, Running, SILENT};
pub use link::{Called, End, Meet, Word};

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use channels::{Said, said_for};
use identity::Identity;
use members::Settings;
use ringlet_linux::fd;
use ringlet_linux::sys::Errno;
use serde_json::{Value, json};

use crate::journal::Journal;
use nodes::Node;

/// What may wait for a node that does not read, and the longest message that is passed.
pub const QUEUE_BYTES: usize = 1 << 20;
pub const PASS_BYTES: usize = 64 << 10;

/// What both ends of a session call it, and nobody else: derived from its TLS keys.
pub type Session = [u8; 16];

/// The cluster as other threads see it.
#[derive(Clone)]
pub struct Cluster(Arc<Shared>);

struct Shared {
    settings: Settings,
    incarnation: u64,
    wake: i32,
    now: Mutex<Now>,
}

struct Now {
    nodes: Vec<Node>,
    /// Where those of `join` listen, by their places there.
    seeds: Vec<Vec<SocketAddr>>,
    /// Names of which nothing was found when they were looked up last.
    unfound: HashSet<Target>,
    /// Nodes that are to be dialled for a channel, and who is to dial us; sessions that are to end, and why.
    calls: Vec<(usize, Session, Token)>,
    expected: HashMap<Said, Expected>,
    over: Vec<(usize, Session, String)>,
    /// A new one, for the sessions to come.
    identity: Option<Identity>,
    journal: Journal,
}

/// A channel for which the node at a place is to dial us.
struct Expected {
    token: Token,
    place: usize,
    since: Instant,
}

#[derive(Default)]
struct Outbox {
    /// Kinds of frames, and what is in them.
    messages: VecDeque<(u8, Vec<u8>)>,
    bytes: usize,
}

impl Outbox {
    fn clear(&mut self) {
        *self = Outbox::default();
    }
}

/// Whose name is looked up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Target {
    Node(usize),
    Seed(usize),
}

/// A node that can be reached, in one session.
#[derive(Clone)]
pub struct Peer {
    cluster: Cluster,
    place: usize,
    name: Arc<str>,
    pub session: Session,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotPassed {
    /// The session has ended.
    Over,
    /// It does not read; to be tried again.
    Full,
    TooLong,
}

impl Cluster {
    fn new(settings: Settings, incarnation: u64, quiet: bool) -> Result<Cluster, Errno> {
        let now = Now {
            nodes: settings.nodes.iter().map(Node::listed).collect(),
            seeds: settings.join.iter().flatten().map(members::Address::fixed).collect(),
            unfound: HashSet::new(),
            calls: Vec::new(),
            expected: HashMap::new(),
            over: Vec::new(),
            identity: None,
            journal: Journal::new(quiet),
        };
        let wake = fd::eventfd()?;
        Ok(Cluster(Arc::new(Shared { settings, incarnation, wake, now: Mutex::new(now) })))
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.0.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// The name of the node to which this address belongs.
    pub fn node_of(&self, address: IpAddr) -> Option<Arc<str>> {
        nodes::node_of(&self.now().nodes, address).map(|node| node.name.clone())
    }

    pub fn knows(&self, node: &str) -> bool {
        nodes::place_of(&self.now().nodes, node).is_some()
    }

    /// The node of this name, if it can be reached.
    pub fn peer(&self, node: &str) -> Option<Peer> {
        let place = nodes::place_of(&self.now().nodes, node)?;
        self.peer_at(place)
    }

    fn peer_at(&self, place: usize) -> Option<Peer> {
        let now = self.now();
        let node = &now.nodes[place];
        let (session, name) = (node.peer.session()?, node.name.clone());
        Some(Peer { cluster: self.clone(), place, name, session })
    }

    /// What `ringlet node status` shows.
    pub fn status(&self) -> Value {
        let (settings, now) = (&self.0.settings, self.now());
        let peers = now.nodes.iter().map(|node| {
            let (peer, address) = (&node.peer, node.listed.as_ref().map(ToString::to_string));
            json!({
                "node": &*node.name, "address": address, "addresses": node.addresses, "subnets": node.subnets,
                "state": peer.state().code(), "why": peer.why(),
                "seconds": peer.since().elapsed().as_secs(), "incarnation": peer.incarnation(),
                "rtt_us": peer.round_trip().map(|time| time.as_micros() as u64),
            })
        });
        json!({
            "node": settings.node, "listen": settings.listen.to_string(), "incarnation": self.0.incarnation,
            "beat_seconds": BEAT.as_secs_f64(), "silent_seconds": SILENT.as_secs_f64(),
            "peers": peers.collect::<Vec<_>>(),
            "decisions": now.journal.counts(),
            "last": now.journal.last().collect::<Vec<_>>(),
        })
    }
}

impl Peer {
    pub fn node(&self) -> &str {
        &self.name
    }

    /// Dials it for a channel, which `Events::called` tells of.
    pub fn call(&self, token: Token) {
        let mut now = self.cluster.now();
        now.calls.push((self.place, self.session, token));
        fd::ring(self.cluster.0.wake);
    }

    /// It is to dial us for a channel, with this token.
    pub fn expect(&self, token: Token) {
        let expected = Expected { token, place: self.place, since: Instant::now() };
        self.cluster.now().expected.insert(said_for(&token), expected);
    }

    /// It is not to, any more.
    pub fn unexpect(&self, token: Token) {
        self.cluster.now().expected.remove(&said_for(&token));
    }

    /// Ends the session, and with it all that belongs to it, there and here. The next one begins soon.
    pub fn end(&self, why: &str) {
        let mut now = self.cluster.now();
        now.over.push((self.place, self.session, why.to_owned()));
        fd::ring(self.cluster.0.wake);
    }

    /// Has ours the lower name?
    pub fn is_first(&self) -> bool {
        self.cluster.0.settings.node.as_str() < self.node()
    }

    /// Sends a message of a carrier's: it comes once, in order, or the session ends.
    pub fn pass(&self, message: &[u8]) -> Result<(), NotPassed> {
        if message.len() > PASS_BYTES {
            return Err(NotPassed::TooLong);
        }
        self.put(link::PASSED, message.to_vec())
    }

    /// The same of a word of the service's.
    pub fn say(&self, word: &Word) -> Result<(), NotPassed> {
        let text = serde_json::to_vec(word).map_err(|_| NotPassed::TooLong)?;
        if text.len() > link::WORD_BYTES {
            return Err(NotPassed::TooLong);
        }
        self.put(link::WORD, text)
    }

    fn put(&self, kind: u8, message: Vec<u8>) -> Result<(), NotPassed> {
        let mut now = self.cluster.now();
        if now.nodes[self.place].peer.session() != Some(self.session) {
            return Err(NotPassed::Over);
        }
        let out = &mut now.nodes[self.place].out;
        // (The frame's head counts too, so that empty ones are no way around the limit.)
        let bytes = message.len() + link::HEAD_BYTES;
        if out.bytes + bytes > QUEUE_BYTES {
            return Err(NotPassed::Full);
        }
        out.bytes += bytes;
        out.messages.push_back((kind, message));
        fd::ring(self.cluster.0.wake);
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Nodes with a session each, for which nobody sends.
    pub fn joined(names: &[&str]) -> Vec<Peer> {
        let listed = names.iter().enumerate();
        let listed: Vec<String> = listed
            .map(|(at, name)| format!("{{name = '{name}', address = '10.0.0.{at}:7471'}}"))
            .collect();
        let text =
            format!("node = 'own'\nlisten = '0.0.0.0:7471'\nnodes = [{}]", listed.join(", "));
        let settings: Settings = toml::from_str(&text).unwrap();
        let cluster = Cluster::new(settings, 1, true).unwrap();
        for (place, node) in cluster.now().nodes.iter_mut().enumerate() {
            node.peer.join(1, [place as u8 + 1; 16]);
        }
        names.iter().filter_map(|name| cluster.peer(name)).collect()
    }

    /// The nodes whose sessions are to end.
    pub fn given_up(one: &Peer) -> Vec<String> {
        let now = one.cluster.now();
        let name = |place: usize| now.nodes[place].name.to_string();
        let mut names: Vec<String> = now.over.iter().map(|(place, ..)| name(*place)).collect();
        names.dedup();
        names
    }

    impl Peer {
        pub fn cluster(&self) -> Cluster {
            self.cluster.clone()
        }

        /// How many channels it is to dial us for.
        pub fn expected(&self) -> usize {
            self.cluster.now().expected.len()
        }

        /// What waits to be sent to it.
        pub fn waiting(&self) -> Vec<String> {
            let now = self.cluster.now();
            let text = |(_, bytes): &(u8, Vec<u8>)| String::from_utf8_lossy(bytes).into_owned();
            now.nodes[self.place].out.messages.iter().map(text).collect()
        }
    }
}
