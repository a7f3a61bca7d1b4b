//! The connections that are served, each by a link or by two lanes, and what is held of its ends.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ringlet::interconnect::introduction::{JOIN, LINK, LINKED, Message};
use ringlet_adapter::{
    Bells, Both, Hosts, Lane, Link, Memory, Progress, Rings, Serve, Server, Trunk, Wakes, WakesOne,
};
use ringlet_core::layout::Geometry;
use ringlet_core::memory::Area;
use ringlet_core::sync::AtomicU64;
use ringlet_core::wait;
use ringlet_linux::meet::Fds;
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::{fd, map, tcp};

const LINKS_MOST: usize = 16 << 10;
/// Descriptors that each connection costs beside its ends' lifelines: of two segments, connections and bells, and what rings its link, or its lanes.
const LINK_DESCRIPTORS: usize = 8;
/// Looks for doorbells that a dead program has left unread. (A packet has one.)
const BELLS_MOST: usize = 4096;
const PAGE_BYTES: usize = 4096;
/// Contexts in a page of flags (`ringlet::socket::context`).
const FLAG_APART_BYTES: usize = 128;
const CONTEXT_COUNT: u32 = (PAGE_BYTES / FLAG_APART_BYTES) as u32;

/// Which end of which connection, by its number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub number: u64,
    pub end: usize,
}

pub enum Served {
    Link(Box<Both<Ends>>),
    Lane(Box<Lane<End>>),
    Trunk(Trunk),
}

pub type Adapter = Server<Served>;

impl Served {
    fn it(&self) -> &dyn Serve {
        match self {
            Served::Link(it) => it,
            Served::Lane(it) => it,
            Served::Trunk(it) => it,
        }
    }

    fn it_mut(&mut self) -> &mut dyn Serve {
        match self {
            Served::Link(it) => it,
            Served::Lane(it) => it,
            Served::Trunk(it) => it,
        }
    }

    /// The ends that it serves.
    fn places(&self) -> Vec<Place> {
        match self {
            Served::Link(link) => link.bells.0.iter().map(|end| end.place).collect(),
            Served::Lane(lane) => vec![lane.rings.place],
            Served::Trunk(_) => Vec::new(),
        }
    }

    fn end(&mut self, place: Place) -> Option<&mut End> {
        match self {
            Served::Link(link) => Some(&mut link.bells.0[place.end]),
            Served::Lane(lane) => Some(&mut lane.rings),
            Served::Trunk(_) => None,
        }
    }
}

impl Serve for Served {
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress {
        match self {
            Served::Link(it) => it.pass(rouse),
            Served::Lane(it) => it.pass(rouse),
            Served::Trunk(it) => it.pass(rouse),
        }
    }
    fn arm(&mut self) -> bool {
        self.it_mut().arm()
    }
    fn disarm(&mut self) {
        self.it_mut().disarm();
    }
    fn is_owed(&self) -> bool {
        self.it().is_owed()
    }
    fn overdue(&mut self) {
        self.it_mut().overdue();
    }
    fn is_dear(&self) -> bool {
        self.it().is_dear()
    }
    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.it().descriptors(tell);
    }
}

/// A program's doorbell.
struct Bell {
    eventfd: i32,
    page: Area,
    line: usize,
    rung: u64,
    /// Its holder has us wait for it: it is rung no more.
    waits: bool,
}

impl Bell {
    /// Takes both descriptors. `None` if they are not what they should be.
    fn new(eventfd: i32, page_memfd: i32, context: u32) -> Option<Bell> {
        let sane = (1..=CONTEXT_COUNT).contains(&context)
            && fd::is_eventfd(eventfd)
            && fd::is_nonblocking(eventfd)
            && map::sealed_size(page_memfd) == Ok(PAGE_BYTES);
        let page = sane.then(|| map::map_shared(page_memfd, PAGE_BYTES, false).ok()).flatten();
        sys::close(page_memfd);
        let Some(page) = page else {
            sys::close(eventfd);
            return None;
        };
        let line = (context as usize - 1) * FLAG_APART_BYTES;
        Some(Bell { eventfd, page, line, rung: 0, waits: false })
    }

    fn ring(&mut self) {
        self.waits = self.waits || !fd::ring(self.eventfd);
    }

    fn ring_if_armed(&mut self) {
        if let Some(value) = wait::armed(self.page.at::<AtomicU64>(self.line), self.rung) {
            self.rung = value;
            self.ring();
        }
    }
}

impl Drop for Bell {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        sys::close(self.eventfd);
        // SAFETY: this bell alone has the mapping.
        unsafe { map::unmap(self.page) };
    }
}

/// What is held of one end. (0 connects, 1 accepts.)
pub struct End {
    place: Place,
    memory: Rc<Memory>,
    /// What its program rings: its link, or its lane.
    eventfd: Rc<OwnedFd>,
    /// Its connection, from when its program has come until it has parted; and its bell.
    socket: Option<i32>,
    bell: Option<Bell>,
    /// Its last process is gone.
    gone: bool,
}

impl End {
    fn let_go(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        // KERNEL: who closes last waits, if the program had it so (SO_LINGER); a program that is killed does not.
        if self.gone && matches!(tcp::linger(socket), Ok([1, seconds]) if seconds > 0) {
            tcp::set_linger(socket, [0, 0]);
        }
        sys::close(socket);
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Rings for End {
    fn published(&mut self) {
        if let Some(bell) = &mut self.bell {
            bell.ring_if_armed();
        }
    }

    fn event(&mut self) -> bool {
        if let Some(bell) = &mut self.bell {
            bell.ring();
        }
        true
    }

    fn byte(&mut self) -> Poll<bool> {
        let rings = |socket| self.memory.ring_byte(self.place.end, socket);
        Poll::Ready(self.socket.is_some_and(rings))
    }

    fn take_bells(&mut self, most: u64) {
        let Some(socket) = self.socket else { return };
        let mut bells = [0; 64];
        // (Not more than were counted: behind an urgent byte more may stand, and more may come.)
        let mut left = match tcp::unread(socket) {
            Ok(unread) if unread as u64 <= most => unread.min(BELLS_MOST),
            _ => 0,
        };
        while left > 0 {
            let some = left.min(bells.len());
            match tcp::receive_into(socket, &mut bells[..some], libc::MSG_DONTWAIT) {
                Ok(taken @ 1..) => left -= taken,
                _ => break,
            }
        }
    }

    fn part(&mut self) -> Poll<()> {
        self.let_go();
        Poll::Ready(())
    }
}

impl WakesOne for End {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// Those of a link.
pub struct Ends([End; 2]);

impl Bells for Ends {
    fn published(&mut self, end: usize) {
        self.0[end].published();
    }
    fn event(&mut self, end: usize) -> bool {
        self.0[end].event()
    }
    fn byte(&mut self, to: usize) -> Poll<bool> {
        self.0[1 - to].byte()
    }
    fn take_bells(&mut self, end: usize, most: u64) {
        self.0[end].take_bells(most);
    }
    fn part(&mut self, end: usize) -> Poll<()> {
        self.0[end].part()
    }
}

impl Wakes for Ends {
    /// (Of both.)
    fn eventfd(&self) -> BorrowedFd<'_> {
        WakesOne::eventfd(&self.0[0])
    }
}

struct Connection {
    /// Where its ends are served: each until its own is over.
    at: [Option<usize>; 2],
    ticket: [u64; 2],
    ring_bytes: u64,
    joined: [bool; 2],
}

pub struct Links {
    seed: u64,
    /// Connections have two lanes between these; otherwise a link.
    hosts: Option<Hosts>,
    /// The flags of the adapter's contexts: it sleeps by the wishes in the segments, so none is ever armed.
    page_memfd: i32,
    process: u64,
    /// By their numbers; and for which tickets ends are still to come.
    connections: HashMap<u64, Connection>,
    awaited: Vec<u64>,
    count: u64,
    most: usize,
}

impl Links {
    /// With no more than so many descriptors.
    pub fn new(seed: u64, hosts: Option<Hosts>, descriptors: usize) -> Sys<Links> {
        let page_memfd = map::sealed_memfd(c"ringlet-context", PAGE_BYTES, 0)?;
        map::seal_readers(page_memfd)?;
        let mut process = [0; 8];
        sys::random(&mut process);
        let process = u64::from_ne_bytes(process);
        let most = (descriptors / LINK_DESCRIPTORS).min(LINKS_MOST);
        let (connections, awaited) = (HashMap::new(), Vec::new());
        Ok(Links { seed, hosts, page_memfd, process, connections, awaited, count: 0, most })
    }

    /// What a program asks for: the place of its end, and what it is told, with which descriptors.
    pub fn request(
        &mut self,
        adapter: &mut Adapter,
        message: &Message,
        fds: &mut Fds,
    ) -> Option<(Place, Message, [i32; 3])> {
        let socket = fds.take(0)?;
        let bell = match message.context {
            0 => None,
            context => {
                fds.take_all(1).and_then(|[eventfd, page]| Bell::new(eventfd, page, context))
            }
        };
        let place = match message.kind {
            _ if !is_connection(socket) => None,
            LINK => self.make(adapter, message.ring_bytes).map(|number| Place { number, end: 1 }),
            JOIN => self.find(message).map(|number| Place { number, end: 0 }),
            _ => None,
        };
        let found = place.and_then(|place| {
            let connection = self.connections.get_mut(&place.number)?;
            let at = connection.at[place.end]?;
            Some((place, connection, adapter.get(at)?.end(place)?))
        });
        let Some((place, connection, end)) = found else {
            sys::close(socket);
            return None;
        };
        (end.socket, end.bell) = (Some(socket), bell);
        connection.joined[place.end] = true;
        let number = place.number.wrapping_mul(2) + place.end as u64;
        let linked = Message {
            kind: LINKED,
            ring_bytes: connection.ring_bytes,
            ticket: if place.end == 1 { connection.ticket } else { [0; 2] },
            // What rings is of this connection alone.
            process: self.process.wrapping_add(number),
            context: 1,
            ..Message::default()
        };
        Some((place, linked, [end.memory.memfd, end.eventfd.as_raw_fd(), self.page_memfd]))
    }

    /// A new connection. Its number.
    fn make(&mut self, adapter: &mut Adapter, ring_bytes: u64) -> Option<u64> {
        let geometry = Geometry::new(usize::try_from(ring_bytes).ok()?)?;
        let mut random = [0; 16];
        if self.connections.len() >= self.most || !sys::random(&mut random) {
            return None;
        }
        let half = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| random[at + i]));
        self.count += 1;
        let number = self.count;
        let memory = || Some(Rc::new(Memory::make(geometry)?));
        let end = |end, memory, eventfd| {
            let place = Place { number, end };
            End { place, memory, eventfd, socket: None, bell: None, gone: false }
        };
        let (memories, eventfd) = ([memory()?, memory()?], eventfd()?);
        let segments = memories.each_ref().map(|memory| memory.segment());
        let [one, other] = memories;
        let at = if self.hosts.is_some() {
            let ends = [end(0, one, eventfd), end(1, other, self::eventfd()?)];
            self.make_lanes(adapter, number as u32, ends)?
        } else {
            let ends = [end(0, one, eventfd.clone()), end(1, other, eventfd)];
            // Each link draws otherwise, and alike when all is run again in the same order.
            let seed = (self.seed != 0)
                .then(|| self.seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let link = Both { link: Link::new(seed, segments), bells: Ends(ends) };
            [adapter.serve(Served::Link(Box::new(link))).ok()?; 2]
        };
        let ticket = [half(0), half(8)];
        let (at, joined) = (at.map(Some), [false; 2]);
        self.connections.insert(number, Connection { at, ticket, ring_bytes, joined });
        self.awaited.push(number);
        Some(number)
    }

    /// Where they are served.
    #[allow(unsafe_code)]
    fn make_lanes(&self, adapter: &mut Adapter, lane: u32, ends: [End; 2]) -> Option<[usize; 2]> {
        let hosts = self.hosts.as_ref()?;
        let mut at = Vec::new();
        for (nth, end) in ends.into_iter().enumerate() {
            let (trunk, name) = (&hosts.trunks()[nth], hosts.name(nth, lane));
            let (segment, memory) = (end.memory.segment(), end.memory.clone());
            let free = Box::new(move || drop(memory));
            let served = end.memory.hold_for_a_lane(nth).and_then(|()| {
                // SAFETY: mapped as long as `free` has the memory.
                let lane = unsafe { Lane::new(trunk, name, nth, segment, end, free) };
                adapter.serve(Served::Lane(Box::new(lane.ok()?))).ok()
            });
            let Some(served) = served else {
                at.into_iter().for_each(|at| drop(adapter.leave(at)));
                return None;
            };
            trunk.is_lane_at(name, served);
            at.push(served);
        }
        at.try_into().ok()
    }

    /// The connection for which the ticket is. It is good once.
    fn find(&mut self, message: &Message) -> Option<u64> {
        let is = |number: &u64| {
            self.connections.get(number).is_some_and(|connection| {
                connection.ticket == message.ticket && connection.ring_bytes == message.ring_bytes
            })
        };
        let nth = self.awaited.iter().position(is)?;
        Some(self.awaited.swap_remove(nth))
    }

    /// The last process of this end is gone.
    pub fn gone(&mut self, adapter: &mut Adapter, place: Place) {
        let Some(connection) = self.connections.get(&place.number) else { return };
        let (at, joined) = (connection.at, connection.joined);
        // (Who has not come by then goes on with the kernel.)
        if !joined[1 - place.end] {
            self.awaited.retain(|number| *number != place.number);
        }
        for end in [0, 1] {
            if (end == place.end || !joined[end])
                && let Some(at) = at[end]
            {
                if let Some(served) = adapter.get(at) {
                    match served {
                        Served::Link(both) => both.link.gone(end),
                        Served::Lane(lane) => lane.gone(),
                        Served::Trunk(_) => {}
                    }
                    if let Some(gone) = served.end(Place { end, ..place }) {
                        gone.gone |= end == place.end;
                    }
                }
                adapter.rouse(at);
            }
        }
    }

    /// A link or a lane is over, or can't go on. The ends for which it was.
    pub fn end(&mut self, at: usize, adapter: &mut Adapter) -> Vec<Place> {
        let places = adapter.leave(at).map_or(Vec::new(), |served| served.places());
        let trunks = self.hosts.iter().flat_map(Hosts::served_at);
        trunks.for_each(|trunk| adapter.rouse(trunk));
        for Place { number, end } in &places {
            if let Some(connection) = self.connections.get_mut(number) {
                connection.at[*end] = None;
                if connection.at == [None; 2] {
                    self.connections.remove(number);
                    self.awaited.retain(|awaited| awaited != number);
                }
            }
        }
        places
    }

    /// Behind each turn of the adapter. How long the next one may sleep.
    pub fn relay(&mut self, adapter: &mut Adapter) -> anyhow::Result<Option<Duration>> {
        let Some(hosts) = &mut self.hosts else { return Ok(None) };
        let mut rouse = Vec::new();
        let most = hosts.relay(&mut rouse)?;
        rouse.into_iter().for_each(|at| adapter.rouse(at));
        Ok(most)
    }

    /// Now and then: lanes whose other half owes an answer for that long. They are given up.
    pub fn hanging(&self, adapter: &mut Adapter) -> Vec<usize> {
        let mut all: Vec<usize> =
            self.connections.values().flat_map(|connection| connection.at).flatten().collect();
        all.retain(|at| match adapter.get(*at) {
            Some(Served::Lane(lane)) => lane.hangs(),
            _ => false,
        });
        all
    }
}

#[allow(unsafe_code)]
fn eventfd() -> Option<Rc<OwnedFd>> {
    let eventfd = fd::eventfd().ok()?;
    // SAFETY: just made, and ours.
    Some(Rc::new(unsafe { OwnedFd::from_raw_fd(eventfd) }))
}

/// A descriptor that a doorbell byte may be put on.
fn is_connection(fd: i32) -> bool {
    let kind = tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_TYPE);
    matches!(kind, Ok(libc::SOCK_STREAM | libc::SOCK_SEQPACKET))
}
