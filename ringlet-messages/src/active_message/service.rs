//! The thread that makes connections and notices their end. It sleeps until something happens.
//!
//! Two processes that talk have a *link*: a Unix socket, whose end is the other one's death. Over it they pass their bell pages,
//! and for each connection its segment: `Hello`, then `Open` and `Answer`, at last `End`.
//!
//! Lanes with a wire (`afar`) have no link: the thread hears their bells, and tells the program's threads.

use super::afar;
use super::lane::{Bells, Lane, Mapping, Stage};
use super::name::Name;
use super::state::{Command, Endpoint, Shared, own, raw};
use super::wire::Wire;
use crate::guarded::Guarded;
use crate::native::{Error, hosts};
use ringlet::handshake::{self, Frame, Protocol};
use ringlet_core::active::Status;
use ringlet_core::active::layout::{BELLS_BYTES, MAGIC, SEGMENT_BYTES};
use ringlet_linux::fd::pollfd;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, map, meet, sys};
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How long a peer may take to answer, and to accept.
const ANSWER_NS: u64 = 10_000_000_000;
/// Between two tries of a rendezvous that is overrun, and looks for those who took too long.
const RETRY_NS: u64 = 10_000_000;
const LOOK_NS: u64 = 1_000_000_000;
/// Between two tries to greet one that has not looked yet who we are; it grows as they do.
const GREET_AGAIN_NS: u64 = 1_000_000;

/// Endpoints beyond the network namespace to which a process is joined, before one who has come has to go for another one; and those who come at once.
const CARRIED_MOST: usize = 256;
const COME_AT_ONCE: usize = 64;

const HELLO: u16 = 1;
const OPEN: u16 = 2;
const ANSWER: u16 = 3;
const END: u16 = 4;
const ASK: u16 = 5;
const SEGMENT: u16 = 6;

/// All messages have all fields; `status` 0 is success.
#[derive(Clone, Copy)]
struct Note {
    kind: u16,
    status: u32,
    /// The lane's number at the receiver of this note (all but `Hello` and `Open`), and at its sender (`Open`, `Answer`).
    /// In place of the latter: the tag (`Ask`), the segment's generation (`Segment`).
    yours: u64,
    ours: u64,
    /// `Hello`, `Open`: the sender.
    from: Name,
    /// `Open`: the endpoint asked for, unless `yours` is the number by which it is known.
    endpoint: u32,
}

impl Note {
    fn frame(self) -> Frame {
        Frame::new(Protocol::ActiveMessages, self.kind)
            .u32(self.status)
            .u64(self.yours)
            .u64(self.ours)
            .u32(self.endpoint)
            .put(&self.from.to_bytes())
    }

    fn read(packet: &[u8]) -> Option<Note> {
        let parsed = handshake::read(packet, Protocol::ActiveMessages, |kind, fields| {
            Some(Note {
                kind,
                status: fields.u32()?,
                yours: fields.u64()?,
                ours: fields.u64()?,
                endpoint: fields.u32()?,
                from: Name::from_bytes(&fields.array()?)?,
            })
        });
        parsed.ok()
    }
}

/// A lane and its number at the peer, once that is known.
struct Joined {
    endpoint: Arc<Endpoint>,
    lane: Arc<Lane>,
    theirs: Option<u64>,
    since_ns: u64,
}

impl Joined {
    fn end(&self, status: Status) {
        self.lane.end(status);
        self.endpoint.tell();
    }
}

struct Link {
    socket: Guarded,
    /// Becomes readable when the process ends, even if a child of its keeps the socket.
    process: Option<OwnedFd>,
    /// Who it must be, or was found to be; the number by which it was called, or 0.
    peer: Option<[u8; 16]>,
    port: u16,
    asked: bool,
    bells: Option<Bells>,
    leaving: VecDeque<(Note, Option<OwnedFd>)>,
    /// So often it did not take our descriptor; since when we are here.
    refused: u64,
    since_ns: u64,
    lanes: HashMap<u64, Joined>,
    dead: bool,
}

/// A lane with a wire.
struct Carried {
    endpoint: Arc<Endpoint>,
    lane: Arc<Lane>,
    /// It has come to us, from this node.
    came: Option<String>,
    /// It ends, since when: once all is said.
    ending: Option<(Status, u64)>,
}

/// An endpoint that is offered, and where its callers come, unless the node service has gone; then it was tried last.
struct Offered {
    endpoint: Arc<Endpoint>,
    name: String,
    node: hosts::Node,
    line: Option<Guarded>,
    tried_ns: u64,
}

pub(super) struct Service {
    shared: Arc<Shared>,
    listener: Guarded,
    links: Vec<Link>,
    carried: Vec<Carried>,
    offers: Vec<Offered>,
    /// Endpoints that are known by numbers, and where callers come for them.
    known: Vec<(u32, Guarded)>,
    /// Commands whose rendezvous was overrun.
    later: Vec<Command>,
    stop: bool,
}

impl Service {
    pub fn new(shared: Arc<Shared>) -> Sys<Service> {
        let listener = Guarded::new(own(meet::offer_named(&shared.name(0).rendezvous())?));
        Ok(Service {
            shared,
            listener,
            links: Vec::new(),
            carried: Vec::new(),
            offers: Vec::new(),
            known: Vec::new(),
            later: Vec::new(),
            stop: false,
        })
    }

    pub fn run(mut self) {
        while !self.stop || !self.carried.is_empty() {
            let mut fds = vec![watched(&self.listener, 0), watched(&self.shared.waker, 0)];
            fds.extend(self.known.iter().map(|(_, listener)| watched(listener, 0)));
            for link in &self.links {
                let waits = !link.leaving.is_empty() && link.refused == 0;
                let out = if waits { libc::POLLOUT } else { 0 };
                fds.push(watched(&link.socket, out));
                fds.extend(link.process.as_ref().map(|process| watched(process, 0)));
            }
            fds.extend(
                self.offers.iter().filter_map(|offer| Some(watched(offer.line.as_ref()?, 0))),
            );
            let (first, mut whose) = (fds.len(), Vec::new());
            for (at, carried) in self.carried.iter().enumerate() {
                for fd in carried.lane.wire().map(Wire::descriptors).unwrap_or_default() {
                    fds.push(pollfd { fd, events: libc::POLLIN, revents: 0 });
                    whose.push(at);
                }
            }
            let waits = self.links.iter().any(|link| link.lanes.values().any(Joined::opening))
                || self.carried.iter().any(|carried| carried.ending.is_some())
                || self.offers.iter().any(|offer| offer.line.is_none());
            let refused = self.links.iter().map(|link| link.refused).filter(|times| *times > 0);
            let limit = match (refused.min(), self.later.is_empty(), waits) {
                (Some(times), ..) => Some(RETRY_NS.min(times * GREET_AGAIN_NS)),
                (None, false, _) => Some(RETRY_NS),
                (None, true, true) => Some(LOOK_NS),
                (None, true, false) => None,
            };
            let _ = fd::poll(&mut fds, limit, None);
            for (_, at) in fds[first..].iter().zip(whose).filter(|(fd, _)| fd.revents != 0) {
                self.carried[at].rang(&self.shared.bells);
            }
            self.accept();
            fd::drain(raw(&self.shared.waker));
            let mut commands = std::mem::take(&mut self.later);
            commands.append(&mut self.shared.commands.lock());
            commands.into_iter().for_each(|command| self.obey(command));
            (0..self.offers.len()).for_each(|at| self.hear_offer(at));
            self.hang_up();
            for at in 0..self.links.len() {
                self.links[at].send();
                self.receive(at);
            }
            self.bury();
        }
        for link in &self.links {
            link.lanes.values().for_each(|joined| joined.end(Status::Unreachable));
        }
    }

    /// Descriptors go both ways, so whoever comes must be of our user.
    fn accept(&mut self) {
        let known = self.known.iter().map(|(_, listener)| listener);
        for listener in [&self.listener].into_iter().chain(known) {
            while let Ok(socket) = meet::accept(raw(listener)) {
                let socket = Guarded::new(own(socket));
                let user = meet::credentials(raw(&socket)).map_or(u32::MAX, |found| found.uid);
                if meet::is_our_user(user) {
                    meet::admit_descriptors(raw(&socket), true);
                    self.links.push(Link::new(socket, None));
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Stop => self.stop = true,
            Command::Carry { endpoint, lane } => self.carry(endpoint, lane, None),
            Command::Offer { endpoint, name, node, line } => {
                // (As with `Known`.)
                if endpoint.bundle().is_some() {
                    let line = Some(line);
                    self.offers.push(Offered { endpoint, name, node: *node, line, tried_ns: 0 });
                } else {
                    drop(line);
                    self.shared.forget(endpoint.id);
                }
            }
            Command::Known { endpoint, listener } => {
                // (It may have been freed before.)
                if endpoint.bundle().is_some() {
                    self.known.push((endpoint.id, listener));
                } else {
                    drop(listener);
                    self.shared.forget(endpoint.id);
                }
            }
            Command::Freed { endpoint } => {
                self.offers.retain(|offer| offer.endpoint.id != endpoint);
                self.known.retain(|(id, _)| *id != endpoint);
                // (Behind the listeners and lines: `Shared::await_unknown`.)
                self.shared.forget(endpoint);
            }
            Command::End { lane, status } => {
                let ended = self.carried.iter_mut().find(|carried| carried.lane.id == lane);
                ended.into_iter().for_each(|carried| carried.ends(status));
                for link in &mut self.links {
                    if let Some(joined) = link.lanes.remove(&lane)
                        && let Some(theirs) = joined.theirs
                    {
                        link.tell_end(&self.shared, theirs, status);
                    }
                }
            }
            Command::Ask { lane, tag } => {
                for link in &mut self.links {
                    if let Some(theirs) = link.lanes.get(&lane).and_then(|joined| joined.theirs) {
                        link.tell(&self.shared, ASK, theirs, tag, None);
                    }
                }
            }
            Command::Connect { endpoint, lane, segment, since_ns } => {
                // Nobody may be known by that number yet.
                let may_come = lane.peer.port().is_some() && sys::now_ns() - since_ns < ANSWER_NS;
                let link = match self.link_to(lane.peer) {
                    Ok(link) => link,
                    Err(Errno::EAGAIN) => {
                        self.later.push(Command::Connect { endpoint, lane, segment, since_ns });
                        return;
                    }
                    Err(Errno::ECONNREFUSED) if may_come => {
                        self.later.push(Command::Connect { endpoint, lane, segment, since_ns });
                        return;
                    }
                    Err(error) => {
                        let lacking = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
                        let lacking = lacking.contains(&error);
                        lane.end(if lacking { Status::Congestion } else { Status::Unreachable });
                        endpoint.tell();
                        return;
                    }
                };
                let note = Note {
                    kind: OPEN,
                    status: 0,
                    yours: lane.peer.port().unwrap_or(0).into(),
                    ours: lane.id,
                    from: self.shared.name(endpoint.id),
                    endpoint: lane.peer.endpoint,
                };
                let joined = Joined { endpoint, lane, theirs: None, since_ns: sys::now_ns() };
                self.links[link].lanes.insert(note.ours, joined);
                self.links[link].leaving.push_back((note, Some(segment)));
            }
        }
    }

    fn carry(&mut self, endpoint: Arc<Endpoint>, lane: Arc<Lane>, came: Option<String>) {
        let mut carried = Carried { endpoint, lane, came, ending: None };
        // (It may have been freed before.)
        match carried.lane.stage() {
            Stage::Ended(status) => carried.ends(status),
            _ if carried.endpoint.bundle().is_none() => carried.ends(Status::BadEndpoint),
            _ => {}
        }
        self.carried.push(carried);
    }

    /// Who has found an endpoint that is offered.
    fn hear_offer(&mut self, at: usize) {
        for _ in 0..COME_AT_ONCE {
            let offer = &mut self.offers[at];
            let comes = match &offer.line {
                Some(line) => hosts::comes(line),
                None if sys::now_ns() - offer.tried_ns < LOOK_NS => return,
                None => {
                    offer.line = afar::renew(&offer.name, &offer.node);
                    offer.tried_ns = sys::now_ns();
                    return;
                }
            };
            match comes {
                // (Who is not taken sees the end of his socket.)
                Ok((socket, node)) if self.is_room() => {
                    let endpoint = self.offers[at].endpoint.clone();
                    if let Ok(lane) = self.shared.welcome(socket) {
                        endpoint.put(lane.clone());
                        self.carry(endpoint, lane, Some(node));
                    }
                }
                Ok(_) | Err(Error::System(Errno::EMFILE)) => {}
                Err(Error::System(Errno::EAGAIN)) => return,
                Err(_) => {
                    let offer = &mut self.offers[at];
                    (offer.line, offer.tried_ns) = (None, sys::now_ns());
                }
            }
        }
    }

    /// For one more. WHY by the end of one of those who came and were never let in: strangers, who know no tag, keep nobody out, be they many. It is one of
    /// the node from which most of these are, so that one node's strangers push out their own; one of which nothing waits for the program's next poll, if
    /// there is one; and of such the one that came first.
    fn is_room(&mut self) -> bool {
        if self.carried.len() < CARRIED_MOST {
            return true;
        }
        let silent = |(at, each): (usize, &Carried)| {
            let is_known = each.lane.is_known.load(Ordering::Relaxed);
            Some((at, each.came.clone().filter(|_| !is_known)?))
        };
        let silent: Vec<_> = self.carried.iter().enumerate().filter_map(silent).collect();
        let mut of_node = HashMap::<&str, usize>::new();
        silent.iter().for_each(|(_, node)| *of_node.entry(node).or_default() += 1);
        let rank = |(at, node): &(usize, String)| {
            let lane = &self.carried[*at].lane;
            // (Its bell need not have rung: the program has not slept since.)
            lane.carry();
            let has_spoken = lane.wire().is_some_and(Wire::has_heard);
            (Reverse(of_node[&**node]), has_spoken, *at)
        };
        let Some((.., at)) = silent.iter().map(rank).min() else { return false };
        let Carried { endpoint, lane, .. } = self.carried.remove(at);
        lane.end(Status::Congestion);
        endpoint.tell();
        // (Who takes nothing is not waited for.)
        let _ = lane.hang_up(Status::Congestion);
        lane.wire().into_iter().for_each(Wire::drop_all);
        true
    }

    /// Ends those lanes of which all is said, or nobody hears it.
    fn hang_up(&mut self) {
        let now = sys::now_ns();
        if self.stop {
            self.carried.iter_mut().for_each(|carried| carried.ends(Status::Unreachable));
        }
        self.carried.retain(|Carried { lane, ending, .. }| {
            let Some((status, since)) = *ending else { return true };
            let stays = !lane.hang_up(status) && now - since < ANSWER_NS;
            if !stays {
                lane.wire().into_iter().for_each(Wire::drop_all);
            }
            stays
        });
    }

    /// The link to a peer's process, which is made if need be.
    fn link_to(&mut self, peer: Name) -> Sys<usize> {
        let port = peer.port();
        let is_it = |link: &Link| match port {
            Some(port) => link.port == port,
            None => link.peer == Some(peer.process),
        };
        let known = |link: &Link| is_it(link) && !link.dead;
        if let Some(at) = self.links.iter().position(known) {
            return Ok(at);
        }
        let socket = Guarded::new(own(meet::look_named(&peer.rendezvous())?));
        let user = meet::credentials(raw(&socket))?.uid;
        if user != peer.user || !meet::is_our_user(user) {
            return Err(Errno::EPERM);
        }
        meet::admit_descriptors(raw(&socket), true);
        let mut link = Link::new(socket, port.is_none().then_some(peer.process));
        link.port = port.unwrap_or(0);
        link.hello(&self.shared);
        self.links.push(link);
        Ok(self.links.len() - 1)
    }

    fn receive(&mut self, at: usize) {
        let mut bytes = [0; handshake::ROOM_BYTES];
        while !self.links[at].dead {
            match meet::receive(raw(&self.links[at].socket), &mut bytes) {
                Err(Errno::EAGAIN | Errno::EINTR) => break,
                Ok((len, mut fds)) if len > 0 => {
                    let passed = fds.take(0).map(own);
                    let note = Note::read(&bytes[..len]);
                    if note.and_then(|note| self.take(at, note, passed)).is_none() {
                        self.links[at].dead = true;
                    }
                }
                _ => self.links[at].dead = true,
            }
        }
        let link = &mut self.links[at];
        let ended = |process: &OwnedFd| fd::pending(raw(process), libc::POLLIN) != 0;
        link.dead |= link.process.as_ref().is_some_and(ended);
    }

    /// `None` for what no sane peer sends.
    fn take(&mut self, at: usize, note: Note, passed: Option<OwnedFd>) -> Option<()> {
        let shared = self.shared.clone();
        let link = &mut self.links[at];
        match note.kind {
            HELLO if link.bells.is_none() => {
                let is_right = match link.peer {
                    Some(peer) => peer == note.from.process,
                    None => is_owner(&note.from, &link.socket),
                };
                if !is_right {
                    return None;
                }
                let page = passed?;
                if map::sealed_size(raw(&page)).ok()? < BELLS_BYTES {
                    return None;
                }
                link.bells = Some(Bells::map(raw(&page))?);
                link.peer = Some(note.from.process);
                if !link.asked {
                    link.hello(&shared);
                }
            }
            OPEN => {
                let bells = link.bells.clone()?;
                if link.peer != Some(note.from.process) {
                    return None;
                }
                let mut answer = Note { kind: ANSWER, yours: note.ours, status: 0, ..note };
                match open(&shared, &note, passed) {
                    Err(status) => answer.status = status as u32,
                    Ok((endpoint, lane)) => {
                        answer.ours = lane.id;
                        lane.open(bells);
                        endpoint.put(lane.clone());
                        let (theirs, since_ns) = (Some(note.ours), 0);
                        let joined = Joined { endpoint, lane, theirs, since_ns };
                        link.lanes.insert(answer.ours, joined);
                    }
                }
                answer.from = shared.name(note.endpoint);
                link.leaving.push_back((answer, None));
                link.send();
            }
            ANSWER => {
                let bells = link.bells.clone()?;
                match (link.lanes.get_mut(&note.yours), note.status) {
                    (Some(joined), 0) if joined.theirs.is_none() => {
                        joined.theirs = Some(note.ours);
                        joined.lane.open(bells);
                        joined.endpoint.tell();
                    }
                    (Some(joined), 0) => {
                        joined.end(Status::Unreachable);
                        return None;
                    }
                    // Our endpoint was freed meanwhile.
                    (None, 0) => link.tell_end(&shared, note.ours, Status::BadEndpoint),
                    (_, status) => link.end(note.yours, status),
                }
            }
            END => link.end(note.yours, note.status),
            ASK => {
                if let Some(joined) = link.lanes.get(&note.yours)
                    && let Some(theirs) = joined.theirs
                    && let Some((memory, generation)) = joined.endpoint.give_segment(note.ours)
                {
                    link.tell(&shared, SEGMENT, theirs, generation.into(), Some(memory));
                }
            }
            SEGMENT => {
                let memory = passed?;
                let bytes = map::sealed_size(raw(&memory)).ok()?;
                if let Some(joined) = link.lanes.get(&note.yours)
                    && let Some(memory) = Mapping::new(raw(&memory), bytes)
                {
                    joined.lane.set_store(note.ours as u8, memory);
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Ends what hangs on dead links, and what took too long.
    fn bury(&mut self) {
        let now = sys::now_ns();
        for link in &mut self.links {
            link.dead |= link.refused > 0 && now - link.since_ns > ANSWER_NS;
            if link.dead {
                link.lanes.values().for_each(|joined| joined.end(Status::Unreachable));
            } else {
                link.lanes.retain(|_, joined| {
                    let late = joined.opening() && now - joined.since_ns > ANSWER_NS;
                    if late {
                        joined.end(Status::Congestion);
                    }
                    !late
                });
            }
        }
        self.links.retain(|link| !link.dead);
    }
}

fn watched(fd: &OwnedFd, events: i16) -> pollfd {
    pollfd { fd: raw(fd), events: libc::POLLIN | events, revents: 0 }
}

/// Is who came to us the process that offers this name's rendezvous? Else it could take what is meant for that one. (Processes that can't be
/// seen all read as number 0.)
fn is_owner(name: &Name, socket: &OwnedFd) -> bool {
    let Ok(offered) = meet::look_named(&name.rendezvous()) else { return false };
    let offered = Guarded::new(own(offered));
    let found = (meet::credentials(raw(&offered)), meet::credentials(raw(socket)));
    matches!(found, (Ok(there), Ok(here)) if there.pid != 0 && there.pid == here.pid && there.uid == here.uid)
}

/// A connection that a peer asks for.
fn open(
    shared: &Shared,
    note: &Note,
    segment: Option<OwnedFd>,
) -> Result<(Arc<Endpoint>, Arc<Lane>), Status> {
    let endpoint = match u16::try_from(note.yours) {
        Ok(0) => shared.endpoints.lock().get(&note.endpoint).cloned(),
        Ok(port) => shared.known.lock().get(&port).cloned(),
        Err(_) => None,
    };
    let endpoint = endpoint.ok_or(Status::BadEndpoint)?;
    // The kernel had no number free for it here.
    let segment = segment.ok_or(Status::Congestion)?;
    if map::sealed_size(raw(&segment)) != Ok(SEGMENT_BYTES) {
        return Err(Status::Unreachable);
    }
    let mapping = Mapping::of_rings(raw(&segment), SEGMENT_BYTES).ok_or(Status::Congestion)?;
    let lane = Arc::new(Lane::new(shared.lane_id(), note.from, mapping, 1));
    if lane.memory.head().magic.load(Ordering::Relaxed) != MAGIC {
        return Err(Status::Unreachable);
    }
    Ok((endpoint, lane))
}

impl Carried {
    /// One of its bells.
    fn rang(&self, bells: &Bells) {
        self.lane.rang(bells);
        if self.lane.has_ended() {
            self.endpoint.tell();
        }
    }

    /// The first reason counts.
    fn ends(&mut self, status: Status) {
        self.ending.get_or_insert_with(|| (status, sys::now_ns()));
    }
}

impl Joined {
    fn opening(&self) -> bool {
        self.theirs.is_none()
    }
}

impl Link {
    fn new(socket: Guarded, peer: Option<[u8; 16]>) -> Link {
        let pid = meet::credentials(raw(&socket)).map_or(0, |found| found.pid);
        let process = (pid > 0).then(|| sys::pidfd(pid).ok().map(own)).flatten();
        Link {
            socket,
            process,
            peer,
            port: 0,
            asked: false,
            bells: None,
            leaving: VecDeque::new(),
            refused: 0,
            since_ns: sys::now_ns(),
            lanes: HashMap::new(),
            dead: false,
        }
    }

    fn hello(&mut self, shared: &Shared) {
        self.asked = true;
        let from = shared.name(0);
        let note = Note { kind: HELLO, status: 0, yours: 0, ours: 0, from, endpoint: 0 };
        match shared.bells_fd.try_clone() {
            Ok(page) => self.leaving.push_back((note, Some(page))),
            Err(_) => self.dead = true,
        }
    }

    fn tell_end(&mut self, shared: &Shared, theirs: u64, status: Status) {
        let status = status as u32;
        let from = shared.name(0);
        let note = Note { kind: END, status, yours: theirs, ours: 0, from, endpoint: 0 };
        self.leaving.push_back((note, None));
        self.send();
    }

    fn tell(&mut self, shared: &Shared, kind: u16, yours: u64, ours: u64, passed: Option<OwnedFd>) {
        let note = Note { kind, status: 0, yours, ours, from: shared.name(0), endpoint: 0 };
        self.leaving.push_back((note, passed));
        self.send();
    }

    fn end(&mut self, lane: u64, status: u32) {
        if let Some(joined) = self.lanes.remove(&lane) {
            let status = u8::try_from(status).ok().and_then(Status::from_u8);
            joined.end(status.unwrap_or(Status::Unreachable));
        }
    }

    fn send(&mut self) {
        while let Some((note, passed)) = self.leaving.front() {
            let fds: Vec<i32> = passed.iter().map(raw).collect();
            match meet::send(raw(&self.socket), note.frame().as_bytes(), &fds) {
                Ok(()) => {
                    self.leaving.pop_front();
                    self.refused = 0;
                }
                Err(Errno::EAGAIN | Errno::EINTR) => break,
                // KERNEL: it admits no descriptors before it has looked who we are.
                Err(Errno::EPERM) => {
                    self.refused += 1;
                    break;
                }
                Err(_) => {
                    self.dead = true;
                    break;
                }
            }
        }
    }
}
