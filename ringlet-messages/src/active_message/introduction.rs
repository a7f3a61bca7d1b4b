//! How the endpoints of a job's processes come to know each other: by their names where all share a network namespace, and beyond that by the node
//! service (`afar`). Of two that are apart the one of the lower rank finds the other, and says so with that one's tag, which only the job knows.

use super::job::Job;
use super::message::Payload;
use super::name::{NAME_BYTES, Name};
use super::state::{Command, Endpoint, Incoming};
use crate::native::bell::Deadline;
use crate::native::hosts;
use ringlet_core::active::Tag;
use ringlet_linux::sys;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Who does not see its peers within this time does not see them at all. (They have all begun by now.)
const LIMIT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(1);
/// The handler that takes what is said meanwhile; the program's again afterwards.
const HELLO: u8 = 255;

/// What is the same for two processes that can reach each other without a node service: the system, the network namespace, the user.
fn place() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {} {}", boot.trim(), network.display(), sys::geteuid())
}

struct Peer {
    name: Name,
    tag: Tag,
    place: String,
}

impl Peer {
    fn to_bytes(&self) -> Vec<u8> {
        [&self.name.to_bytes()[..], &self.tag.to_le_bytes(), self.place.as_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Peer> {
        let (name, rest) = bytes.split_first_chunk::<NAME_BYTES>()?;
        let (tag, place) = rest.split_first_chunk()?;
        let place = str::from_utf8(place).ok()?.to_owned();
        Some(Peer { name: Name::from_bytes(name)?, tag: Tag::from_le_bytes(*tag), place })
    }
}

impl Job {
    /// Maps the endpoint of each process at its rank. All call this, with an endpoint that lets in messages of that tag, and has room for so many
    /// translations and no handlers yet; `meanwhile` polls its bundle. Returns their tags.
    pub fn introduce(
        &self,
        endpoint: &Arc<Endpoint>,
        tag: Tag,
        mut meanwhile: impl FnMut(),
    ) -> io::Result<Vec<Tag>> {
        let us = Peer { name: endpoint.name(), tag, place: place() };
        let parts = self.gather(&us.to_bytes(), &mut meanwhile)?;
        let peers: Option<Vec<Peer>> = parts.iter().map(|part| Peer::from_bytes(part)).collect();
        let peers = peers.ok_or_else(|| io::Error::other("a process is of another version"))?;
        let names = if peers.iter().all(|peer| peer.place == us.place) {
            peers.iter().map(|peer| peer.name).collect()
        } else {
            self.find_each_other(endpoint, &us, &peers, &mut meanwhile)?
        };
        for (rank, (name, peer)) in names.into_iter().zip(&peers).enumerate() {
            endpoint.map(rank, name, peer.tag).map_err(io::Error::other)?;
        }
        // Nobody sends to who does not know it.
        self.gather(&[], meanwhile)?;
        Ok(peers.iter().map(|peer| peer.tag).collect())
    }

    fn find_each_other(
        &self,
        endpoint: &Arc<Endpoint>,
        us: &Peer,
        peers: &[Peer],
        meanwhile: &mut impl FnMut(),
    ) -> io::Result<Vec<Name>> {
        // By rank: who has found us, and what we know.
        let known: Arc<Mutex<Vec<Option<Name>>>> = Arc::default();
        let seen = |peer: &Peer| (peer.place == us.place).then_some(peer.name);
        *known.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            peers.iter().map(seen).collect();
        let all = known.clone();
        let hear = move |message: &Incoming| {
            let mut known = all.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            // (The first one counts: of the others nobody is of the job.)
            if let [rank] = *message.arguments()
                && let Some(place @ None) = known.get_mut(rank as usize)
            {
                *place = Some(message.source());
            }
        };
        endpoint.set_handler(HELLO, Arc::new(hear)).map_err(io::Error::other)?;
        let offered = offer(endpoint);
        let said = offered.as_deref().unwrap_or_default().as_bytes();
        let names = self.gather(said, &mut *meanwhile)?;
        offered?;
        for (rank, peer) in peers.iter().enumerate().skip(self.rank() + 1) {
            if peer.place == us.place {
                continue;
            }
            let error = |why: &dyn std::fmt::Display| {
                io::Error::other(format!("process {rank} is on another host: {why}"))
            };
            let name = str::from_utf8(&names[rank]).ok().filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| error(&"there is no node service"))?;
            let found = endpoint.find(name, Some(LIMIT)).map_err(|why| error(&why))?;
            endpoint.map(rank, found, peer.tag).map_err(|why| error(&why))?;
            let us = [self.rank() as u32];
            endpoint.request(rank, HELLO, &us, Payload::None).map_err(|why| error(&why))?;
            endpoint.unmap(rank).map_err(|why| error(&why))?;
            known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[rank] = Some(found);
        }
        let end = Instant::now() + LIMIT;
        let found = loop {
            meanwhile();
            let known: Vec<Option<Name>> =
                known.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
            match known.iter().position(Option::is_none) {
                None => break known.into_iter().flatten().collect(),
                Some(_) if self.ended().is_some() => return Err(io::ErrorKind::Interrupted.into()),
                Some(rank) if Instant::now() > end => {
                    return Err(io::Error::other(format!(
                        "process {rank} is on another host, and has not found this one"
                    )));
                }
                Some(_) => std::thread::sleep(LOOK),
            }
        };
        endpoint.clear_handler(HELLO).map_err(io::Error::other)?;
        endpoint.reset_statistics().map_err(io::Error::other)?;
        endpoint.shared.command(Command::Freed { endpoint: endpoint.id });
        Ok(found)
    }
}

/// The name under which others find it.
fn offer(endpoint: &Endpoint) -> io::Result<String> {
    let mut random = [0; 16];
    if !sys::random(&mut random) {
        return Err(io::Error::other("no random bytes"));
    }
    let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!(":am-{name}");
    let here = |why: &dyn std::fmt::Display| {
        io::Error::other(format!("a process of the job is on another host, and {why}"))
    };
    let node = hosts::own_node(&mut Deadline::new(Some(LIMIT)))
        .map_err(|why| here(&format!("there is no node service here ({why})")))?;
    endpoint.offer(&name).map_err(|why| here(&why))?;
    Ok(node + &name)
}
