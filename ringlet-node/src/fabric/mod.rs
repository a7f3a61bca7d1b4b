//! Connections between hosts: in each host a process of the service's has the rails (`ringlet_fabric`), and a half of each connection that it carries
//! (`ringlet_adapter`). To the programs it is what a carrier is to two tenants (`crate::carrier`).
//!
//! ```text
//!   program                       service ----- TLS ----- service                       program
//!     |  lifeline, meeting          |   what is passed      |         lifeline, meeting   |
//!     +-----------------------> process ====== rails ====== process <---------------------+
//!     |                                                                                   |
//!     +---- the connection, and a channel: plain TCP, which need neither service ---------+
//! ```
//!
//! What the two processes agree upon they pass through their services, in order: transports (`ringlet_fabric::Control`), and what the two programs say at their
//! rendezvous. All of it belongs to one session of the services. It ends with the session: each process takes the memory back, so that nothing comes
//! there any more, and then lets go of the programs' lifelines, by which they know that they go on in the kernel. A process that has lost
//! its service ends, and so does the session of a service that has lost its process.
//!
//! A lane is expected by the connecting end's process before the accepting program hears hello, and so before anything can come for it.

mod passage;
pub(crate) mod places;
mod process;
pub(crate) mod share;

pub use process::carry;

use std::net::IpAddr;
use std::path::PathBuf;

use ringlet_fabric::Control;
use ringlet_fabric::memory::{Chaos, MemoryRail};
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{libfabric, libfabric::Libfabric};
use serde::{Deserialize, Serialize};

use crate::apart::From;
use crate::cluster::Session;

/// A rail, as `[cluster]` of node.toml has it.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
pub struct RailSettings {
    /// Of libfabric, "verbs;ofi_rxm"; or "memory", for hosts that are namespaces of one machine, for tests.
    pub provider: String,
    /// Its local address, or the domain's name.
    pub address: Option<String>,
    /// Of a rail in memory: where all nodes have theirs; and disorder by seed, where one poll in so many loses the way.
    pub folder: Option<PathBuf>,
    pub seed: Option<u64>,
    #[serde(default)]
    pub fails_one_in: u32,
}

/// Providers that beat the kernel's TCP: used if no rails are named.
const FAST: [&str; 5] = ["verbs", "efa", "cxi", "opx", "psm3"];

/// Of what a host has, what is a rail without being named. Datagrams by software (`ofi_rxd`) are slower than TCP; an address of one link does not say of which.
fn is_fast(provider: &libfabric::Provider) -> bool {
    let mut names = provider.provider.split(';');
    let leads_on = |address: IpAddr| match address {
        IpAddr::V4(address) => !(address.is_loopback() || address.is_link_local()),
        IpAddr::V6(address) => !(address.is_loopback() || address.is_unicast_link_local()),
    };
    names.next().is_some_and(|core| FAST.contains(&core))
        && names.all(|layer| layer != "ofi_rxd")
        && provider.address.is_none_or(leads_on)
}

impl RailSettings {
    pub fn text(&self) -> String {
        match &self.address {
            Some(address) => format!("{} at {address}", self.provider),
            None => self.provider.clone(),
        }
    }

    /// Those that this host has, of providers that are fast.
    pub fn found() -> Vec<RailSettings> {
        let all = libfabric::providers().unwrap_or_default();
        let of = |provider: &libfabric::Provider| RailSettings {
            provider: provider.provider.clone(),
            address: Some(match provider.address {
                Some(address) => address.to_string(),
                None => provider.domain.clone(),
            }),
            folder: None,
            seed: None,
            fails_one_in: 0,
        };
        all.iter().filter(|provider| is_fast(provider)).map(of).collect()
    }

    pub(crate) fn open(&self, node: &str) -> std::io::Result<Box<dyn Rail>> {
        if self.provider != "memory" {
            return Ok(Box::new(Libfabric::open(&self.provider, self.address.as_deref())?));
        }
        let folder = self.folder.as_deref().ok_or(std::io::ErrorKind::NotFound)?;
        let chaos = self.seed.map(|seed| Chaos { seed, fails_one_in: self.fails_one_in });
        let mut number = [0; 8];
        ringlet_linux::sys::random(&mut number);
        let name = format!("{node}-{:016x}", u64::from_ne_bytes(number));
        Ok(Box::new(MemoryRail::new(folder, &name, chaos)?))
    }
}

/// One message between the service and its process: the kind, the session that it is about (zeros: none), and what it has.
const HEAD_BYTES: usize = 1 + size_of::<Session>();
/// As long as one may be.
pub(crate) const PACKET_BYTES: usize = HEAD_BYTES + 1 + crate::cluster::PASS_BYTES;

/// By the service: settings (the first one); a session, with that node's name; its end; what was passed; a lane, with lifeline and meeting.
pub(crate) const SETTINGS: u8 = 1;
pub(crate) const JOINED: u8 = 2;
pub(crate) const ENDED: u8 = 3;
pub(crate) const PASSED: u8 = 4;
const LANE: u8 = 5;
/// To be answered: does it go on?
pub(crate) const ASK: u8 = 12;
/// By the process: to be passed; a rail carries to that node, or none; the session can't go on; nothing is left of a lane; to be logged; the answer.
pub(crate) const PASS: u8 = 6;
pub(crate) const UP: u8 = 7;
pub(crate) const DOWN: u8 = 8;
pub(crate) const BROKEN: u8 = 9;
const OVER: u8 = 10;
pub(crate) const LOG: u8 = 11;
pub(crate) const ANSWER: u8 = 13;
/// By the service: it is to leave in order, once others have what they need of it.
pub(crate) const LEAVE: u8 = 15;
/// By the service too: a channel of the native library's, with a socket to its program.
const NATIVE: u8 = 14;

pub(crate) fn packet(kind: u8, session: Session, body: &[u8]) -> Vec<u8> {
    [&[kind], &session[..], body].concat()
}

pub(crate) fn read(packet: &[u8]) -> Option<(u8, Session, &[u8])> {
    let (kind, rest) = packet.split_first()?;
    let (session, body) = rest.split_first_chunk()?;
    Some((*kind, *session, body))
}

/// What two processes pass to each other: a message in JSON, in pieces that begin with these.
const MORE: u8 = 1;
/// It is of those processes that reflect memory; the services say so.
const REFLECTED: u8 = 2;
const FIRST: u8 = 4;

/// (Of a process that has died in the middle the last ones don't come.)
pub(crate) fn in_pieces(message: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let mut pieces = message.chunks(crate::cluster::PASS_BYTES - 1).enumerate().peekable();
    std::iter::from_fn(move || {
        let (nth, piece) = pieces.next()?;
        let more = if pieces.peek().is_some() { MORE } else { 0 };
        Some([&[more | if nth == 0 { FIRST } else { 0 }], piece].concat())
    })
}

/// Of what another process passes.
#[derive(Default)]
pub(crate) struct Pieces(Vec<u8>);

#[derive(Debug)]
pub(crate) struct TooLong;

impl Pieces {
    /// A message, if this is the last piece of one.
    pub fn take(&mut self, piece: &[u8]) -> Result<Option<Vec<u8>>, TooLong> {
        let Some((flags, piece)) = piece.split_first() else { return Ok(None) };
        if flags & FIRST != 0 {
            self.0.clear();
        }
        if self.0.len() + piece.len() > MESSAGE_BYTES {
            return Err(TooLong);
        }
        self.0.extend(piece);
        Ok((flags & MORE == 0).then(|| std::mem::take(&mut self.0)))
    }
}

const MESSAGE_BYTES: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
struct Settings {
    node: String,
    rails: Vec<RailSettings>,
}

/// A connection that is to be carried.
#[derive(Serialize, Deserialize)]
struct LaneOrder {
    /// The service's, for `OVER`.
    number: u64,
    /// Both services' name for it in this session.
    lane: u32,
    accepts: bool,
    from: From,
    ring_bytes: u64,
}

/// One of the native library's.
#[derive(Serialize, Deserialize)]
struct NativeOrder {
    number: u64,
    lane: u32,
    /// Our program offers the service.
    offers: bool,
}

/// What those that carry connections pass.
#[derive(Serialize, Deserialize)]
enum Between {
    Control(Control),
    /// What the program has said at the rendezvous, to the other one.
    Said {
        lane: u32,
        frame: Vec<u8>,
    },
    /// The accepting end has come, and has a ring of that size: the connecting one's half is made. It is: the accepting program gets its segment, and what it
    /// sends is delivered, whether or not the connecting one has joined yet.
    Linked {
        lane: u32,
        ring_bytes: u64,
    },
    Made {
        lane: u32,
    },
    /// A service gives its caller a channel like this; the caller has it.
    Offered {
        lane: u32,
        kind: u32,
        slot_count: u64,
        ring_bytes: u64,
    },
    Begun {
        lane: u32,
    },
    /// This lane is over, before both programs had come or because it can't go on.
    Over {
        lane: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(provider: &str, address: Option<&str>) -> libfabric::Provider {
        libfabric::Provider {
            provider: provider.into(),
            domain: "rxe0".into(),
            address: address.map(|address| address.parse().unwrap()),
        }
    }

    #[test]
    fn what_is_slow_or_leads_nowhere_is_no_rail_unless_it_is_named() {
        for (name, address) in [
            ("verbs;ofi_rxm", Some("10.91.0.1")),
            ("verbs;ofi_rxm", Some("fd00::1")),
            ("efa", None),
        ] {
            assert!(is_fast(&provider(name, address)), "{name} {address:?}");
        }
        for (name, address) in [
            ("tcp;ofi_rxm", Some("10.91.0.1")),
            ("verbs;ofi_rxd", Some("10.91.0.1")),
            ("verbs;ofi_rxm", Some("fe80::1")),
            ("verbs;ofi_rxm", Some("169.254.1.1")),
            ("verbs;ofi_rxm", Some("127.0.0.1")),
        ] {
            assert!(!is_fast(&provider(name, address)), "{name} {address:?}");
        }
    }
}
