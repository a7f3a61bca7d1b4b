//! An open cluster: nodes that are not listed hear of each other.
//!
//! ```text
//!   new node                                a node of its `join`
//!     TLS, by the name that all nodes have
//!     Hello, introduces            -->      (learns of it)
//!                                  <--      Hello; Nodes, Nodes, ... last
//!     (learns of them; closes)
//! ```
//!
//! Then each pair has its session as others have, dialled by the one with the lower name. In sessions, both say at once which nodes they know, and
//! each new one when they hear of it. So a node needs no more than one that is there. `join` is asked again now and then, for parts of a cluster that
//! began apart.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::engine::{BEAT, Dial, Engine, INTRODUCED, Who, connect};
use super::identity::{self, MEMBER};
use super::link::{Cause, Link, Word, cause};
use super::nodes::{Learned, learn, may_say, place_of};

/// This node's own address is in `join` too.
pub(super) const ITSELF: &str = "itself";
/// Another one has its name: a copy of its keys.
pub(super) const NAMESAKE: &str = "same-name";

/// Until one has answered, and from then on.
const AGAIN: Duration = Duration::from_secs(2);
const LATER: Duration = Duration::from_secs(30);
/// So many are told in one word, whatever their names are.
const AT_ONCE: usize = 6;

/// An address of `join`.
pub(super) struct Seed {
    next: Instant,
    is_dialled: bool,
    tried: usize,
    /// Why it did not answer, which is said once.
    failed: Option<&'static str>,
}

impl Seed {
    pub fn new() -> Seed {
        Seed { next: Instant::now(), is_dialled: false, tried: 0, failed: None }
    }
}

impl Engine {
    /// The place of the node of this name, if it may be a member.
    pub fn member(&mut self, name: &str, incarnation: u64) -> Result<usize, Cause> {
        let settings = self.cluster.settings();
        if name == settings.node {
            return Err(match incarnation == self.cluster.0.incarnation {
                true => cause(ITSELF, "it is this node"),
                false => cause(NAMESAKE, format!("another node is called {name}, as this one")),
            });
        }
        if settings.banned.iter().any(|banned| banned == name) {
            return Err(cause("banned", format!("{name} is banned")));
        }
        if let Some(place) = place_of(&self.cluster.now().nodes, name) {
            return Ok(place);
        }
        if settings.join.is_none() {
            return Err(cause("unknown-node", format!("{name} is not listed")));
        }
        let learned = self.learn(name, None);
        learned.ok_or_else(|| cause("too-many", format!("no room for {name}")))
    }

    fn learn(&mut self, name: &str, said: Option<(usize, SocketAddr)>) -> Option<usize> {
        let mut now = self.cluster.now();
        let place = match learn(&mut now.nodes, name, said) {
            Learned::New(place) => place,
            Learned::Known(place) => return Some(place),
            Learned::Full => return None,
        };
        now.journal.note("learned", || match said {
            Some((_, address)) => format!("{name} at {address}"),
            None => name.to_owned(),
        });
        drop(now);
        if place == self.dials.len() {
            self.dials.push(Dial::new());
            self.sessions.push(None);
        } else if let Some(by) = std::mem::replace(&mut self.dials[place], Dial::new()).by {
            // (It was of the node that had the place.)
            self.connections.remove(&by);
        }
        Some(place)
    }

    /// The node at a place, which is at that address, says that there are these.
    pub fn told(&mut self, by: usize, from: IpAddr, nodes: Vec<(String, SocketAddr)>) {
        let settings = self.cluster.settings().clone();
        let is_open = settings.join.is_some();
        for (name, address) in nodes.into_iter().take(if is_open { AT_ONCE } else { 0 }) {
            let is_other = name != settings.node && !settings.banned.contains(&name);
            if is_other && may_say(address, from) && identity::check_name(&name).is_ok() {
                self.learn(&name, Some((by, address)));
            }
        }
    }

    /// Who asked for it hears which nodes there are, and they hear of it, though not as often as it likes.
    pub fn introduce(&mut self, key: u64, place: usize) -> Result<(), Cause> {
        if self.cluster.settings().join.is_none() {
            return Err(cause("not-open", "[cluster] has no `join`"));
        }
        self.tell_all(key)?;
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.who = Who::Introduced;
        }
        let (name, address) = {
            let node = &self.cluster.now().nodes[place];
            (node.name.to_string(), node.addresses.first().copied())
        };
        let told = &mut self.dials[place].told;
        let is_news = told.is_none_or(|told| told.elapsed() >= BEAT);
        let Some(address) = address.filter(|_| is_news) else { return Ok(()) };
        *told = Some(Instant::now());
        let news = Word::Nodes { nodes: vec![(name, address)], last: true };
        for session in self.sessions.iter().flatten() {
            if let Some(connection) = self.connections.get_mut(session) {
                // (It is sent, or found to be over, at its next turn.)
                let _ = connection.link.say(&news).and_then(|()| connection.link.write());
            }
        }
        Ok(())
    }

    /// All nodes that are known here, in an open cluster.
    pub fn tell_all(&mut self, key: u64) -> Result<(), Cause> {
        if self.cluster.settings().join.is_none() {
            return Ok(());
        }
        let now = self.cluster.now();
        let known = now
            .nodes
            .iter()
            .filter_map(|node| Some((node.name.to_string(), node.addresses.first().copied()?)));
        let known: Vec<(String, SocketAddr)> = known.collect();
        drop(now);
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(()) };
        for nodes in known.chunks(AT_ONCE) {
            connection.link.say(&Word::Nodes { nodes: nodes.to_vec(), last: false })?;
        }
        connection.link.say(&Word::Nodes { nodes: Vec::new(), last: true })
    }

    pub fn dial_seeds(&mut self, now: Instant) {
        for place in 0..self.seeds.len() {
            let seed = &mut self.seeds[place];
            if seed.is_dialled || now < seed.next {
                continue;
            }
            let address = {
                let known = self.cluster.now();
                let addresses = &known.seeds[place];
                addresses.get(seed.tried % addresses.len().max(1)).copied()
            };
            seed.next = now + AGAIN;
            // (Its name is being looked up.)
            let Some(address) = address else { continue };
            seed.tried = seed.tried.wrapping_add(1);
            let made = connect(address)
                .map_err(|error| cause("lost", error))
                .and_then(|stream| Link::dial(stream, &self.identity, MEMBER))
                .and_then(|mut link| link.say(&self.hello(true)).map(|()| link));
            match made {
                Ok(link) => {
                    self.seeds[place].is_dialled = true;
                    self.add(link, address, Who::Seed(place, None));
                }
                Err(cause) => self.seed_is_over(place, address, &cause),
            }
        }
    }

    /// The connection to an address of `join` has ended.
    pub fn seed_is_over(&mut self, place: usize, address: SocketAddr, why: &Cause) {
        let seed = &mut self.seeds[place];
        let is_done = why.code == INTRODUCED || why.code == ITSELF;
        seed.is_dialled = false;
        seed.next = Instant::now() + if is_done { LATER } else { AGAIN };
        let failed = (!is_done).then_some(why.code);
        if std::mem::replace(&mut seed.failed, failed) != failed && !is_done {
            self.cluster.now().journal.note(why.code, || format!("join {address}: {}", why.about));
        }
    }
}
