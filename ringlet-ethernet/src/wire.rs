//! What ports, and who looks at them, say to each other over their sockets: one JSON value a message.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use ringlet_core::layout;
use ringlet_linux::meet::{self, Received};
use ringlet_linux::sys::Errno;
use ringlet_messages::guarded::Guarded;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use crate::counters::Totals;
use crate::frame::Mac;

/// Of these messages and, with the layout of what is shared, of a strand.
pub const VERSION: u32 = 2 << 16 | layout::VERSION;
/// The longest that is read: what a port says of itself and 511 others.
const LONGEST: usize = 192 << 10;

/// The first message of who connects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u32,
    pub ask: Ask,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ask {
    /// Another port's, for its first strand.
    Join(About),
    /// For a further one, with what the first answer said.
    Strand {
        #[serde(with = "hexadecimal")]
        id: u64,
        number: u16,
        token: u64,
    },
    /// Say how you are.
    State,
    /// Of who spans hosts: by which kind of way to send from now on.
    Way(Choice),
    /// End.
    End,
    /// Of a bridge: a device on it. A socket of the asker's by which the kernel can be asked for one (NETLINK_ROUTE) comes with it. The device is there as
    /// long as the connection.
    Attach(Device),
    /// Of a bridge: say how the device is whose number is the next one.
    Next(u64),
    /// Of a bridge: end the device of this number.
    Detach(u64),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct About {
    #[serde(with = "hexadecimal")]
    pub id: u64,
    pub name: String,
    pub mac: Mac,
    pub queues: u16,
    pub pid: u32,
    /// Its network namespace, by its inode.
    pub namespace: u64,
    /// Behind it are the ports of another host. Such ports send nothing to each other: what comes from one host is not for another.
    pub far: bool,
    /// Behind it are the devices on a bridge of this host.
    #[serde(default)]
    pub bridge: bool,
}

/// What a device on a bridge is to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Device {
    pub name: String,
    pub mac: Mac,
    pub mtu: u16,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The strand's memory comes with it.
    Strand {
        about: About,
        token: u64,
        ring_bytes: usize,
    },
    /// Both came to each other at once, and the other connection stays.
    Crossed,
    Refused(String),
    State(State),
    Span(Span),
    /// That is all.
    Done,
    Ending,
}

/// Which ways to other hosts are used: of all that there are, the first one, as they were named; or of one kind only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    Auto,
    Node,
    Udp,
}

/// To which hosts a network reaches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    pub pid: u32,
    pub choice: Choice,
    pub hosts: Vec<Reach>,
}

/// One host, which is a port of the network while it can be reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reach {
    pub name: String,
    /// The way that is used.
    pub by: Option<String>,
    pub ways: Vec<Way>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Way {
    pub address: String,
    pub up: bool,
    /// What is in the way, as far as it is known.
    pub why: Option<String>,
    /// Messages of which pieces were lost on the way here, or that could not be sent.
    pub lost: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub about: About,
    pub peers: Vec<Peer>,
    pub totals: Totals,
    /// It is on the network's bridge; with so many others, those behind the bridge's port among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridged: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    #[serde(with = "hexadecimal")]
    pub id: u64,
    pub name: String,
    pub mac: Mac,
    pub far: bool,
    pub user: u32,
    pub sent: u64,
    pub received: u64,
    pub full: u64,
    pub waiting: u64,
}

/// A port's number as its socket's name has it: many who read JSON keep 53 bits of a number only.
mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(id: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{id:016x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(from)?, 16).map_err(serde::de::Error::custom)
    }
}

pub fn hello(ask: Ask) -> Hello {
    Hello { version: VERSION, ask }
}

pub fn say(socket: &Guarded, what: &impl Serialize, fds: &[i32]) -> Result<()> {
    let text = serde_json::to_vec(what)?;
    meet::send(socket.as_raw_fd(), &text, fds)
        .map_err(|error| anyhow::anyhow!("nothing can be said there: {error:?}"))
}

/// The next message, and its descriptors; `None` when there is none yet.
pub fn hear<T: DeserializeOwned>(socket: &Guarded) -> Result<Option<(T, Received)>> {
    let mut bytes = vec![0; LONGEST];
    let came = match meet::take(socket.as_raw_fd(), &mut bytes) {
        Ok(came) => came,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(error) => bail!("{error:?}"),
    };
    if came.len == 0 || came.fds.truncated {
        bail!("it has ended the connection");
    }
    let what = serde_json::from_slice(&bytes[..came.len.min(LONGEST)])
        .context("what it says is not understood")?;
    Ok(Some((what, came)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::is_name;
    use crate::room::PORTS_MOST;

    #[test]
    fn what_is_said_of_all_others_can_be_said() {
        let name = "\"".repeat(64);
        assert!(
            is_name(&name) && !is_name(&"x".repeat(65)) && !is_name("\u{1}") && !is_name("\u{9f}")
        );
        let (mac, most) = (Mac([0xfe; 6]), u64::MAX);
        let peer = Peer {
            id: most,
            name: name.clone(),
            mac,
            far: false,
            user: u32::MAX,
            sent: most,
            received: most,
            full: most,
            waiting: most,
        };
        let (queues, pid, namespace, far) = (u16::MAX, u32::MAX, most, false);
        let about = About { id: most, name, mac, queues, pid, namespace, far, bridge: far };
        let totals = Totals::of([].iter());
        let state = State { about, peers: vec![peer; PORTS_MOST - 1], totals, bridged: None };
        let (one, other) = meet::pair().map(|ends| ends.map(guarded)).unwrap().into();
        say(&one, &Answer::State(state.clone()), &[]).unwrap();
        assert_eq!(hear::<Answer>(&other).unwrap().unwrap().0, Answer::State(state));
    }

    fn guarded(fd: i32) -> Guarded {
        use std::os::fd::{FromRawFd, OwnedFd};
        // SAFETY: made just now, ours alone.
        #[allow(unsafe_code)]
        Guarded::new(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
