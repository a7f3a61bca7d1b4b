//! The process: one thread that has the rails and the halves, and those that do apart what may wait.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::introduction::{GREETING, JOIN, LINK, LINKED, Message, ORPHAN};
use ringlet_adapter::{
    Event, Lane, LaneName, Memory, Pipe, Progress, Serve, Server, Trunk, watch_the_crowd,
};
use ringlet_core::layout::Geometry;
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Node, Number};
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{fd, map, meet};
use ringlet_messages::native::carried::{Beginning, Joined, Offer, Port};

use super::passage::Passage;
use super::places::{Opens, Places, close_apart, eventfd};
use super::{
    ANSWER, ASK, BROKEN, Between, DOWN, ENDED, JOINED, LANE, LOG, LaneOrder, NATIVE, NativeOrder,
    OVER, PACKET_BYTES, PASS, PASSED, Pieces, RailSettings, SETTINGS, Settings, TooLong, UP,
    in_pieces, packet, read,
};
use crate::apart::{Apart, From};
use crate::carrier::ends::{Brought, Doing, End};
use crate::carrier::keeper::by_whom_it_was_started;
use crate::clock::{Clock, Moment};
use crate::cluster::Session;
use crate::memory::{RINGS_OF_A_LANE, Room, connection_bytes};
use crate::{sandbox, service};

const SERVICE: u32 = 0;
const RAILS: u32 = 1;
const FIRST_LINE: u32 = 2;
/// How often what has a time is looked at; where nothing has.
const SWEEP: Duration = Duration::from_millis(250);
const IDLE: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_millis(5);
/// A rail on which nothing was acknowledged for so long is given up, and one that does not work is tried again so often.
const SILENT: Duration = Duration::from_secs(1);
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// The same where none works, and something is carried: for `DOWN_MOST` there are as many tries as `ringlet_fabric` has patience for one (`TRIALS`).
const TRY_SOON: Duration = Duration::from_millis(250);
/// A half that has not answered the other one for so long holds up its program.
const ANSWERED: Duration = Duration::from_secs(4);
/// For so long no rail may work before what is carried goes back to the kernel.
const DOWN_MOST: Duration = Duration::from_secs(2);
const PACKETS_AT_ONCE: usize = 64;
/// More frames than two programs say at a rendezvous.
const SAID_MOST: u32 = 8;
/// What may wait for the service; and what is to be passed in one session.
const WAITING_MOST: usize = 16 << 20;
const OF_SESSION_MOST: usize = 2 << 20;
const ANSWERS_MOST: usize = 64 << 10;
/// For so long the other node may take to write to memory no more that is withdrawn.
const FREE_IN: Duration = Duration::from_secs(5);

/// What the server serves.
enum Served {
    Trunk(Trunk),
    Lane(Box<Lane<End>>),
    Passage(Box<Passage>),
}

impl Served {
    fn it(&self) -> &dyn Serve {
        match self {
            Served::Trunk(trunk) => trunk,
            Served::Lane(lane) => &**lane,
            Served::Passage(passage) => &**passage,
        }
    }

    fn it_mut(&mut self) -> &mut dyn Serve {
        match self {
            Served::Trunk(trunk) => trunk,
            Served::Lane(lane) => &mut **lane,
            Served::Passage(passage) => &mut **passage,
        }
    }
}

impl Serve for Served {
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress {
        match self {
            Served::Trunk(trunk) => trunk.pass(rouse),
            Served::Lane(lane) => lane.pass(rouse),
            Served::Passage(passage) => passage.pass(rouse),
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

/// A session of the services', and the transport that belongs to it.
struct Link {
    session: Session,
    up: bool,
    /// Since when none of its rails works.
    down: Option<Moment>,
    /// What was the oldest, and since when.
    oldest: [Option<(usize, u32)>; 2],
    since: Moment,
    /// Pieces of what the other process passes.
    pieces: Pieces,
    /// What waits to be passed there.
    waiting: usize,
}

/// A connection of which we have one end.
struct Held {
    name: LaneName,
    accepts: bool,
    from: From,
    ring_bytes: u64,
    /// By their tokens, until they are gone.
    line: Option<u32>,
    meeting: Option<u32>,
    said: u32,
    heard: bool,
    joined: bool,
    lane: Option<usize>,
    /// Until nobody writes there any more.
    memory: Option<Arc<Memory>>,
    /// It can't go on: its lifeline is closed behind that, and behind what is being done with its connection.
    broken: bool,
    ringing: Option<Doing>,
    /// Since when it has no lane any more.
    ended: Option<Moment>,
}

impl Held {
    fn is_linking(&self) -> bool {
        self.accepts && !self.joined && self.lane.is_some()
    }

    fn is_to_join(&self) -> bool {
        !self.accepts && self.lane.is_none() && self.memory.is_none() && !self.broken
    }
}

/// A channel of the native library's of which we have one end.
struct Native {
    name: LaneName,
    offers: bool,
    /// Its program, until the other one is there too; and what is read of it is told under this token.
    begins: Option<(Beginning, u32)>,
    at: Option<usize>,
    /// Since when it is served.
    since: Moment,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Lifeline,
    Meeting,
}

struct Process {
    service: OwnedFd,
    server: Server<Served>,
    trunk: Trunk,
    /// None while it can't be served.
    trunk_at: Option<usize>,
    places: Places,
    tried: Moment,
    asked: Moment,
    apart: Arc<Apart>,
    /// None in tests.
    room: Option<Room>,
    /// By which programs tell it from other adapters.
    name: u64,
    /// Bytes that what is held takes, at most.
    taken: u64,
    links: HashMap<Number, Link>,
    held: HashMap<u64, Held>,
    by_lane: HashMap<LaneName, u64>,
    lines: HashMap<u32, (OwnedFd, u64, Line)>,
    natives: HashMap<u64, Native>,
    /// Of those that begin.
    beginning: HashMap<u32, u64>,
    next: u32,
    /// Whose memory nobody writes to any more.
    freed: Rc<RefCell<Vec<u64>>>,
    said: VecDeque<Vec<u8>>,
    waiting: usize,
    clock: Arc<Clock>,
    swept: Moment,
}

/// Carries what the service at the other end of standard input hands over, until that has gone.
pub fn carry() -> anyhow::Result<()> {
    let service = by_whom_it_was_started();
    let mut bytes = vec![0; PACKET_BYTES];
    let mut fds = [fd::pollfd { fd: service.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    let _ = fd::poll(&mut fds, None, None);
    let Ok((len, _)) = meet::receive(service.as_raw_fd(), &mut bytes) else { return Ok(()) };
    let Some((SETTINGS, _, settings)) = read(&bytes[..len]) else { return Ok(()) };
    let Settings { node, rails } = serde_json::from_slice(settings)?;
    let (apart, room) = (Arc::new(Apart::new()?), Room::found());
    let folders: Vec<_> = rails.iter().filter_map(|rail| rail.folder.clone()).collect();
    watch_the_crowd();
    sandbox::enter_as_fabric(&folders)?;
    let rails = if rails.is_empty() { RailSettings::found() } else { rails };
    let mut process = Process::new(service, node, rails, RailSettings::open, apart)?;
    process.room = Some(room);
    if process.places.len() == 0 {
        process.log("no rails: no provider of libfabric here beats TCP, and none is named");
    }
    sys::run_briefly();
    process.open_rails();
    while process.turn()? {}
    Ok(())
}

impl Process {
    fn new(
        service: OwnedFd,
        node: String,
        rails: Vec<RailSettings>,
        opens: Opens,
        apart: Arc<Apart>,
    ) -> anyhow::Result<Process> {
        let (places, rails) = Places::new(node, rails, opens)?;
        let mut server = Server::new()?;
        server.watch(&service, SERVICE)?;
        server.watch(places.bell(), RAILS)?;
        let mut process = Process {
            service,
            server,
            trunk: Trunk::new(rails),
            trunk_at: None,
            places,
            tried: Moment::ZERO,
            asked: Moment::ZERO,
            apart,
            room: None,
            name: service::random_name(),
            taken: 0,
            links: HashMap::new(),
            held: HashMap::new(),
            by_lane: HashMap::new(),
            lines: HashMap::new(),
            natives: HashMap::new(),
            beginning: HashMap::new(),
            next: FIRST_LINE,
            freed: Rc::default(),
            said: VecDeque::new(),
            waiting: 0,
            clock: Arc::new(Clock::new()),
            swept: Moment::ZERO,
        };
        process.serve_trunk();
        Ok(process)
    }

    /// False when the service has gone.
    fn turn(&mut self) -> anyhow::Result<bool> {
        let (mut ready, mut over) = (Vec::new(), Vec::new());
        let patience = match self.is_quiet() {
            true if self.held.is_empty() && self.natives.is_empty() => IDLE,
            true => ANSWERED,
            false => SWEEP,
        };
        let rings = |held: &Held| held.ringing.as_ref().is_some_and(|ringing| !ringing.hangs());
        let soon = !self.said.is_empty() || self.held.values().any(rings);
        let patience = if soon { SOON } else { patience };
        self.server.turn(Some(patience), &mut ready, &mut over)?;
        self.clock.waited(patience);
        // (First: the place of one that is over is another's then.)
        for (at, progress) in over {
            let is = |(_, held): &(&u64, &Held)| held.lane == Some(at);
            if let Some(number) = self.held.iter().find(is).map(|(number, _)| *number) {
                self.end(number, progress == Progress::Failed);
            }
            let is = |(_, native): &(&u64, &Native)| native.at == Some(at);
            if let Some(number) = self.natives.iter().find(is).map(|(number, _)| *number) {
                self.end_native(number, false);
            }
        }
        for token in ready {
            match token {
                SERVICE if !self.hear_service()? => return Ok(false),
                SERVICE => {}
                RAILS => self.take_rails(),
                _ => self.hear(token),
            }
        }
        self.hear_trunk();
        if self.clock.since(self.swept) >= SWEEP {
            self.swept = self.clock.now();
            self.sweep();
        }
        self.free();
        self.forget_ringing();
        self.tell();
        let much = self.links.iter().filter(|(_, link)| link.waiting > OF_SESSION_MOST);
        let much: Vec<Number> = much.map(|(number, _)| *number).collect();
        much.into_iter().for_each(|number| self.give_up(number, "it has more said than is heard"));
        ensure!(self.waiting < WAITING_MOST, "the service does not hear");
        Ok(true)
    }

    /// Has nothing a time?
    fn is_quiet(&self) -> bool {
        let idle = |number: &Number| self.trunk.with_node(|node| node.transport(*number).is_idle());
        let idles = self.apart.is_idle() && self.trunk_at.is_some();
        idles && self.links.iter().all(|(number, link)| link.up && idle(number))
    }

    fn hear_service(&mut self) -> anyhow::Result<bool> {
        let mut bytes = vec![0; PACKET_BYTES];
        for _ in 0..PACKETS_AT_ONCE {
            let (len, mut fds) = match meet::receive(self.service.as_raw_fd(), &mut bytes) {
                Err(Errno::EAGAIN) => return Ok(true),
                Ok((len @ 1.., fds)) => (len, fds),
                _ => return Ok(false),
            };
            // SAFETY: the kernel has just given it to us.
            let mut fd = |at| fds.take(at).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
            let (line, meeting) = (fd(0), fd(1));
            match read(&bytes[..len]) {
                Some((JOINED, session, _)) => self.join(session),
                Some((ENDED, session, _)) => {
                    if let Some(number) = self.number(session) {
                        self.close(number);
                    }
                }
                Some((PASSED, session, piece)) => self.take_piece(session, piece),
                Some((ASK, session, _)) => self.say(ANSWER, session, &[]),
                Some((LANE, session, order)) => {
                    let order: LaneOrder = serde_json::from_slice(order)?;
                    match (line, meeting, self.number(session)) {
                        (Some(line), Some(meeting), Some(number)) => {
                            self.begin(number, order, line, meeting);
                        }
                        // (No descriptor is free, or the session is over; what has come is closed, and its end sees that.)
                        _ => self.say(OVER, Session::default(), &order.number.to_le_bytes()),
                    }
                }
                Some((NATIVE, session, order)) => {
                    let order: NativeOrder = serde_json::from_slice(order)?;
                    match (line, self.number(session)) {
                        (Some(socket), Some(number)) => self.begin_native(number, order, socket),
                        // (As above; but of the other end nobody else hears.)
                        (_, number) => {
                            let over = Between::Over { lane: order.lane };
                            number.into_iter().for_each(|number| self.pass(number, &over));
                            self.say(OVER, Session::default(), &order.number.to_le_bytes());
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(true)
    }

    fn number(&self, session: Session) -> Option<Number> {
        let is = |(_, link): &(&Number, &Link)| link.session == session;
        self.links.iter().find(is).map(|(number, _)| *number)
    }

    fn join(&mut self, session: Session) {
        match self.trunk.with_node(Node::open) {
            Some(number) => {
                let link = Link {
                    session,
                    up: false,
                    down: None,
                    oldest: [None; 2],
                    since: self.clock.now(),
                    pieces: Pieces::default(),
                    waiting: 0,
                };
                self.links.insert(number, link);
                self.rouse_trunk();
            }
            None => self.say(BROKEN, session, b"too many nodes"),
        }
    }

    /// Once this returns nothing comes from that node any more.
    fn close(&mut self, number: Number) {
        let mut rouse = Vec::new();
        self.trunk.close(number, &mut rouse);
        self.links.remove(&number);
        let of = |held: &Held| held.name.0 == number;
        let all: Vec<u64> =
            self.held.iter().filter(|(_, held)| of(held)).map(|(number, _)| *number).collect();
        all.into_iter().for_each(|number| self.end(number, true));
        let of = |native: &Native| native.name.0 == number;
        let all = self.natives.iter().filter(|(_, native)| of(native));
        let all: Vec<u64> = all.map(|(number, _)| *number).collect();
        all.into_iter().for_each(|number| self.end_native(number, false));
    }

    /// The session can't go on.
    fn give_up(&mut self, number: Number, why: &str) {
        if let Some(link) = self.links.get(&number) {
            let session = link.session;
            self.say(BROKEN, session, why.as_bytes());
            self.close(number);
        }
    }

    /// Of what the other process passes.
    fn take_piece(&mut self, session: Session, piece: &[u8]) {
        let Some(number) = self.number(session) else { return };
        let Some(link) = self.links.get_mut(&number) else { return };
        let message = match link.pieces.take(piece) {
            Err(TooLong) => return self.give_up(number, "a message that is too long"),
            Ok(None) => return,
            Ok(Some(message)) => message,
        };
        match serde_json::from_slice(&message) {
            Ok(between) => self.take_between(number, between),
            Err(_) => self.give_up(number, "a message that can't be read"),
        }
    }

    fn take_between(&mut self, number: Number, between: Between) {
        match between {
            Between::Control(control) => {
                self.trunk.with_node(|node| node.control(number, control));
                self.rouse_trunk();
            }
            Between::Said { lane, frame } => match self.by_lane.get(&(number, lane)).copied() {
                Some(held) => self.say_to(held, &frame),
                None => self.is_none(number, lane),
            },
            Between::Linked { lane, ring_bytes } => {
                let held = self.by_lane.get(&(number, lane)).copied();
                let held = held.filter(|held| self.held.get(held).is_some_and(Held::is_to_join));
                match held.map(|held| (held, self.make(held, ring_bytes))) {
                    Some((_, Some(()))) => self.pass(number, &Between::Made { lane }),
                    Some((held, None)) => self.end(held, true),
                    None => {}
                }
            }
            Between::Made { lane } => {
                let held = self.by_lane.get(&(number, lane)).copied();
                let held = held.filter(|held| self.held.get(held).is_some_and(Held::is_linking));
                held.into_iter().for_each(|held| self.linked(held));
            }
            Between::Offered { lane, kind, slot_count, ring_bytes } => {
                match self.by_lane.get(&(number, lane)).copied() {
                    Some(native) => self.welcome(native, Offer { kind, slot_count, ring_bytes }),
                    // (That its caller has gone came there before it had begun.)
                    None => self.is_none(number, lane),
                }
            }
            Between::Begun { lane } => {
                let native = self.by_lane.get(&(number, lane));
                let at = native.and_then(|native| self.natives.get(native)?.at);
                if let Some((at, Served::Passage(passage))) =
                    at.and_then(|at| Some((at, self.server.get(at)?)))
                {
                    passage.begin();
                    self.server.rouse(at);
                }
            }
            Between::Over { lane } => {
                if let Some(held) = self.by_lane.get(&(number, lane)).copied() {
                    self.end_quietly(held, true);
                    self.end_native(held, false);
                }
            }
        }
    }

    /// There is no such lane (any more). Who says much to nobody does not hear it of each.
    fn is_none(&mut self, number: Number, lane: u32) {
        if self.waiting < ANSWERS_MOST {
            self.pass(number, &Between::Over { lane });
        }
    }

    fn pass(&mut self, number: Number, between: &Between) {
        let Some(session) = self.links.get(&number).map(|link| link.session) else { return };
        let Ok(message) = serde_json::to_vec(between) else { return };
        in_pieces(&message).for_each(|piece| self.say(PASS, session, &piece));
    }

    fn say(&mut self, kind: u8, session: Session, body: &[u8]) {
        let packet = packet(kind, session, body);
        self.count(&packet, |waiting, bytes| *waiting += bytes);
        self.said.push_back(packet);
    }

    /// What waits, in all and of a session.
    fn count(&mut self, packet: &[u8], count: impl Fn(&mut usize, usize)) {
        let bytes = packet.len();
        count(&mut self.waiting, bytes);
        if let Some((PASS, session, _)) = read(packet)
            && let Some(link) = self.links.values_mut().find(|link| link.session == session)
        {
            count(&mut link.waiting, bytes);
        }
    }

    fn log(&mut self, text: &str) {
        self.say(LOG, Session::default(), text.as_bytes());
    }

    fn tell(&mut self) {
        while let Some(packet) = self.said.pop_front() {
            if meet::send(self.service.as_raw_fd(), &packet, &[]) == Err(Errno::EAGAIN) {
                return self.said.push_front(packet);
            }
            // (If it has gone, that is heard.)
            self.count(&packet, |waiting, bytes| *waiting -= bytes);
        }
    }

    /// An end that is to be carried.
    fn begin(&mut self, number: Number, order: LaneOrder, line: OwnedFd, meeting: OwnedFd) {
        let LaneOrder { number: held, lane, accepts, from, ring_bytes } = order;
        let name = (number, lane);
        let greeting = Message { kind: GREETING, ring_bytes, ..Message::default() };
        meet::admit_descriptors(line.as_raw_fd(), true);
        // (What it would have done apart would wait behind what hangs.)
        let hangs = self.apart.is_full() || self.apart.hangs(&from);
        let is_room =
            self.room.is_none_or(|room| room.admits(self.taken, RINGS_OF_A_LANE, ring_bytes));
        let greeted = !hangs
            && is_room
            && !self.by_lane.contains_key(&name)
            && meet::send(line.as_raw_fd(), greeting.frame().as_bytes(), &[]).is_ok();
        let lines = greeted.then(|| {
            let line = self.watch(line, held, Line::Lifeline)?;
            Some((line, self.watch(meeting, held, Line::Meeting)))
        });
        let Some(Some((line, Some(meeting)))) = lines else {
            if let Some(Some((line, None))) = lines {
                self.close_line(line);
            }
            self.pass(number, &Between::Over { lane });
            return self.say(OVER, Session::default(), &held.to_le_bytes());
        };
        self.trunk.expect(name);
        self.by_lane.insert(name, held);
        self.taken += connection_bytes(RINGS_OF_A_LANE, ring_bytes);
        self.held.insert(
            held,
            Held {
                name,
                accepts,
                from,
                ring_bytes,
                line: Some(line),
                meeting: Some(meeting),
                said: 0,
                heard: false,
                joined: false,
                lane: None,
                memory: None,
                broken: false,
                ringing: None,
                ended: None,
            },
        );
    }

    fn watch(&mut self, fd: OwnedFd, held: u64, line: Line) -> Option<u32> {
        let token = self.token()?;
        self.server.watch(&fd, token).ok()?;
        self.lines.insert(token, (fd, held, line));
        Some(token)
    }

    /// A program that offers a service, or calls one.
    fn begin_native(&mut self, number: Number, order: NativeOrder, socket: OwnedFd) {
        let NativeOrder { number: native, lane, offers } = order;
        let name = (number, lane);
        let is_new = !self.by_lane.contains_key(&name);
        let native_of = Native { name, offers, begins: None, at: None, since: Moment::ZERO };
        if is_new {
            self.by_lane.insert(name, native);
            self.natives.insert(native, native_of);
        }
        if !is_new || !self.await_native(native, Beginning::new(socket)) {
            self.pass(number, &Between::Over { lane });
            if is_new {
                self.end_native(native, false);
            } else {
                self.say(OVER, Session::default(), &native.to_le_bytes());
            }
        }
    }

    /// What of a program that begins is told no more.
    fn begun(&mut self, number: u64) -> Option<Beginning> {
        let (begins, token) = self.natives.get_mut(&number)?.begins.take()?;
        self.beginning.remove(&token);
        let _ = self.server.unwatch(begins.socket());
        Some(begins)
    }

    /// A service gives us a channel, as to anybody. (Who calls says nothing yet, so that he has gone.)
    fn hear_native(&mut self, number: u64) {
        let Some(begins) = self.begun(number) else { return };
        let Some(native) = self.natives.get(&number) else { return };
        let (to, lane) = native.name;
        let joined = if native.offers { begins.join().ok() } else { None };
        let went = match joined {
            Some(Joined::Here(Offer { kind, slot_count, ring_bytes }, port)) => {
                let serves = self.serve_native(number, *port, false);
                if serves {
                    self.pass(to, &Between::Offered { lane, kind, slot_count, ring_bytes });
                }
                serves
            }
            // (It was woken in vain.)
            Some(Joined::NotYet(begins)) => self.await_native(number, begins),
            None => false,
        };
        if !went {
            self.end_native(number, true);
        }
    }

    fn await_native(&mut self, number: u64, begins: Beginning) -> bool {
        let token = self.token().filter(|token| self.server.watch(begins.socket(), *token).is_ok());
        let (Some(token), Some(native)) = (token, self.natives.get_mut(&number)) else {
            return false;
        };
        native.begins = Some((begins, token));
        self.beginning.insert(token, number);
        true
    }

    /// The service there gives our program a channel like this.
    fn welcome(&mut self, number: u64, offer: Offer) {
        if self.natives.get(&number).is_none_or(|native| native.offers) {
            return;
        }
        let Some(begins) = self.begun(number) else { return };
        let Some(name) = self.natives.get(&number).map(|native| native.name) else { return };
        let port = begins.welcome(offer);
        match port.is_ok_and(|port| self.serve_native(number, port, true)) {
            true => self.pass(name.0, &Between::Begun { lane: name.1 }),
            false => self.end_native(number, true),
        }
    }

    fn serve_native(&mut self, number: u64, port: Port, begun: bool) -> bool {
        let Some(native) = self.natives.get_mut(&number) else { return false };
        let passage = Passage::new(port, Pipe::new(&self.trunk, native.name), begun);
        native.since = self.clock.now();
        native.at = self.server.serve(Served::Passage(Box::new(passage))).ok();
        native.at.inspect(|at| self.trunk.is_lane_at(native.name, *at)).is_some()
    }

    fn end_native(&mut self, number: u64, tell: bool) {
        drop(self.begun(number));
        let Some(native) = self.natives.remove(&number) else { return };
        let (to, lane) = native.name;
        self.by_lane.remove(&native.name);
        if let Some(at) = native.at {
            // (Its pipe tells the other end.)
            drop(self.server.leave(at));
            self.rouse_trunk();
        }
        if tell {
            self.pass(to, &Between::Over { lane });
        }
        self.say(OVER, Session::default(), &number.to_le_bytes());
    }

    fn token(&mut self) -> Option<u32> {
        let token = self.next;
        self.next = if token == u32::MAX { FIRST_LINE } else { token + 1 };
        let free = !self.lines.contains_key(&token) && !self.beginning.contains_key(&token);
        free.then_some(token)
    }

    /// A program says something, or has gone.
    fn hear(&mut self, token: u32) {
        if let Some(number) = self.beginning.get(&token) {
            return self.hear_native(*number);
        }
        let Some((fd, number, line)) = self.lines.get(&token) else { return };
        let (raw, number, line) = (fd.as_raw_fd(), *number, *line);
        let Some(held) = self.held.get_mut(&number) else { return };
        let mut bytes = [0; ROOM_BYTES];
        let mut said = match meet::take(raw, &mut bytes) {
            Err(Errno::EAGAIN) => return,
            Ok(said) if said.caller.is_some() && !said.fds.truncated => said,
            _ => return self.gone(token, number, line),
        };
        let mut shown = service::shown_in(&mut said);
        match (line, held.lane) {
            (Line::Meeting, _) if held.said < SAID_MOST => {
                held.said += 1;
                let ((to, lane), frame) = (held.name, bytes[..said.len].to_vec());
                self.pass(to, &Between::Said { lane, frame });
            }
            (Line::Lifeline, Some(_)) if held.joined && is_orphan(&bytes[..said.len]) => {
                self.end(number, true);
            }
            // It rings.
            (Line::Lifeline, Some(lane)) if held.joined => self.server.rouse(lane),
            (Line::Lifeline, _) if !held.joined => {
                // (What is not taken stays with the others, which are closed apart.)
                let joined = Message::read(&bytes[..said.len]).ok().and_then(|asked| {
                    let brought = Brought::of(&mut shown, asked.bell)?;
                    self.link(number, asked, brought)
                });
                if joined.is_none() {
                    self.end(number, true);
                }
            }
            _ => self.end(number, true),
        }
        if let Some(held) = self.held.get(&number)
            && !shown.is_empty()
        {
            self.apart.close(held.from.clone(), shown);
        }
    }

    /// An end brings its connection, and gets its segment.
    fn link(&mut self, number: u64, asked: Message, brought: Brought) -> Option<()> {
        let held = self.held.get(&number)?;
        let (from, accepts) = (held.from.clone(), held.accepts);
        let made = match (accepts, asked.kind) {
            // (Behind hello: its lane is expected there.)
            (true, LINK) if held.heard && held.lane.is_none() => {
                self.make(number, asked.ring_bytes)
            }
            (false, JOIN) if held.lane.is_some() => Some(()),
            _ => None,
        };
        let held = self.held.get_mut(&number);
        let fits =
            |memory: &Arc<Memory>| memory.segment().geometry.ring_bytes as u64 == asked.ring_bytes;
        let found = made.zip(held).and_then(|((), held)| {
            held.memory.as_ref().filter(|memory| fits(memory))?;
            match self.server.get(held.lane?) {
                Some(Served::Lane(lane)) => Some((held, lane)),
                _ => None,
            }
        });
        let Some((held, lane)) = found else {
            self.apart.close(from, brought.all());
            return None;
        };
        lane.rings.come(brought);
        let ring_bytes = asked.ring_bytes;
        let (to, lane) = held.name;
        match accepts {
            // It is answered when the other half is there too: from then on it may send.
            true => self.pass(to, &Between::Linked { lane, ring_bytes }),
            false => self.linked(number),
        }
        Some(())
    }

    /// Both halves are there: the program gets its segment.
    fn linked(&mut self, number: u64) {
        let Some(held) = self.held.get_mut(&number) else { return };
        let (Some(memory), Some(line)) = (&held.memory, held.line) else { return };
        let Some((line, ..)) = self.lines.get(&line) else { return };
        held.joined = true;
        meet::admit_descriptors(line.as_raw_fd(), false);
        let ring_bytes = memory.segment().geometry.ring_bytes as u64;
        let process = self.name;
        let linked = Message { kind: LINKED, ring_bytes, process, ..Message::default() };
        // (Who does not get it goes, and that is heard.)
        let _ = meet::send(line.as_raw_fd(), linked.frame().as_bytes(), &[memory.memfd]);
    }

    /// The half of an end, and its memory.
    fn make(&mut self, number: u64, ring_bytes: u64) -> Option<()> {
        let held = self.held.get(&number)?;
        let bytes = usize::try_from(ring_bytes).ok().filter(|_| ring_bytes <= held.ring_bytes)?;
        let geometry = Geometry::new(bytes)?;
        let memory = Arc::new(Memory::make(geometry)?);
        let segment = memory.segment();
        // What comes is written there by rails, for which a page that can't be had would be the end.
        map::hold(segment.area, 0, geometry.segment_bytes()).ok()?;
        // (That takes its time, and many may come in one turn: who looks whether we hang hears of each.)
        self.say(ANSWER, Session::default(), &[]);
        self.tell();
        let held = self.held.get_mut(&number)?;
        let (apart, clock) = (self.apart.clone(), self.clock.clone());
        let (name, end) = (held.name, usize::from(held.accepts));
        let eventfd = Arc::new(eventfd()?);
        let rings = End::new(held.from.clone(), (memory.clone(), end), eventfd, apart, clock);
        let freed = self.freed.clone();
        let free = Box::new(move || freed.borrow_mut().push(number));
        // SAFETY: the memory is in `held` until it is free.
        let lane = unsafe { Lane::new(&self.trunk, name, end, segment, rings, free).ok()? };
        held.memory = Some(memory);
        let at = self.server.serve(Served::Lane(Box::new(lane))).ok()?;
        self.trunk.is_lane_at(name, at);
        held.lane = Some(at);
        self.rouse_trunk();
        Some(())
    }

    /// What the other program says at the rendezvous.
    fn say_to(&mut self, number: u64, frame: &[u8]) {
        let Some(held) = self.held.get_mut(&number) else { return };
        held.heard = true;
        // (Who has left it has heard all that it needs.)
        let Some(meeting) = held.meeting.and_then(|token| self.lines.get(&token)) else { return };
        if frame.len() > ROOM_BYTES || meet::send(meeting.0.as_raw_fd(), frame, &[]).is_err() {
            self.end(number, true);
        }
    }

    /// One end of a socket is closed there, or it says what it should not.
    fn gone(&mut self, token: u32, number: u64, line: Line) {
        self.close_line(token);
        let Some(held) = self.held.get_mut(&number) else { return };
        match line {
            Line::Meeting => held.meeting = None,
            Line::Lifeline => held.line = None,
        }
        match (line, held.lane) {
            (Line::Meeting, _) if held.joined => {}
            (Line::Lifeline, Some(at)) if held.joined => {
                if let Some(Served::Lane(lane)) = self.server.get(at) {
                    lane.rings.gone = true;
                    lane.gone();
                }
                self.server.rouse(at);
            }
            (Line::Lifeline, None) if held.joined => self.forget_if_over(number),
            _ => self.end(number, true),
        }
    }

    fn close_line(&mut self, token: u32) {
        let Some((fd, number, _)) = self.lines.remove(&token) else { return };
        let _ = self.server.unwatch(&fd);
        match self.held.get(&number) {
            // (Before Linux 6.16 there may be anything in its queue.)
            Some(held) => self.apart.close(held.from.clone(), vec![fd]),
            None => drop(fd),
        }
    }

    /// It is over; or, if it is broken, can't go on: to its ends it is so as if we had died.
    fn end(&mut self, number: u64, broken: bool) {
        if broken && let Some(held) = self.held.get(&number).filter(|held| !held.broken) {
            let (to, lane) = held.name;
            self.pass(to, &Between::Over { lane });
        }
        self.end_quietly(number, broken);
    }

    fn end_quietly(&mut self, number: u64, broken: bool) {
        let Some(held) = self.held.get_mut(&number) else { return };
        held.broken |= broken;
        match held.lane.take() {
            Some(at) => {
                held.ended = Some(self.clock.now());
                if let Some(Served::Lane(lane)) = self.server.leave(at) {
                    held.ringing = lane.rings.ringing();
                }
                self.trunk_at.into_iter().for_each(|at| self.server.rouse(at));
            }
            None => self.trunk.forget(held.name),
        }
        if let Some(token) = held.meeting.take() {
            self.close_line(token);
        }
        self.forget_if_over(number);
    }

    /// Those for which only a byte was waited for.
    fn forget_ringing(&mut self) {
        let waits = |held: &Held| held.lane.is_none() && held.ringing.is_some();
        let all = self.held.iter().filter(|(_, held)| waits(held));
        let all: Vec<u64> = all.map(|(number, _)| *number).collect();
        all.into_iter().for_each(|number| self.forget_if_over(number));
    }

    /// Memory to which nobody writes any more.
    fn free(&mut self) {
        let freed = std::mem::take(&mut *self.freed.borrow_mut());
        for number in freed {
            let Some(held) = self.held.get_mut(&number) else { continue };
            if held.lane.is_some() {
                self.end(number, true);
            }
            if let Some(held) = self.held.get_mut(&number) {
                held.memory = None;
            }
            self.forget_if_over(number);
        }
    }

    fn forget_if_over(&mut self, number: u64) {
        let Some(held) = self.held.get_mut(&number) else { return };
        let rings = held.ringing.as_ref().is_some_and(|ringing| !ringing.give_up());
        if held.lane.is_some() || held.memory.is_some() || rings {
            return;
        }
        if held.broken
            && let Some(token) = held.line.take()
        {
            self.close_line(token);
        }
        if let Some(held) = self.held.get(&number)
            && held.line.is_none()
        {
            self.by_lane.remove(&held.name);
            if let Some(held) = self.held.remove(&number) {
                self.taken -= connection_bytes(RINGS_OF_A_LANE, held.ring_bytes);
            }
            self.say(OVER, Session::default(), &number.to_le_bytes());
        }
    }

    fn hear_trunk(&mut self) {
        for (number, event) in self.trunk.events() {
            let Some(link) = self.links.get_mut(&number) else { continue };
            let session = link.session;
            match event {
                Event::Control(control) => self.pass(number, &Between::Control(control)),
                Event::Up => {
                    (link.up, link.down) = (true, None);
                    self.say(UP, session, &[]);
                }
                Event::Down => {
                    (link.up, link.down) = (false, Some(self.clock.now()));
                    self.say(DOWN, session, &[]);
                }
                Event::Ended(error) => self.give_up(number, &error.to_string()),
            }
        }
    }

    fn sweep(&mut self) {
        let now = self.clock.now();
        let is_down = self.links.values().any(|link| link.down.is_some());
        if now - self.tried >= if is_down { TRY_SOON } else { TRY_AGAIN } {
            self.tried = now;
            self.serve_trunk();
            self.open_rails();
            let rails = self.places.len();
            for number in self.links.keys().copied() {
                self.trunk.with_node(|node| {
                    let all_up = (0..rails).all(|rail| node.transport(number).is_up(rail));
                    if !all_up {
                        node.try_again(number);
                    }
                });
            }
            self.rouse_trunk();
        }
        let mut broken = Vec::new();
        for (number, link) in &mut self.links {
            let oldest = self.trunk.with_node(|node| node.transport(*number).oldest());
            if oldest != std::mem::replace(&mut link.oldest, oldest) || oldest == [None; 2] {
                link.since = now;
            } else if now - link.since > SILENT {
                link.since = now;
                for (rail, _) in oldest.into_iter().flatten() {
                    self.trunk.with_node(|node| node.give_up(*number, rail));
                }
                self.trunk_at.into_iter().for_each(|at| self.server.rouse(at));
            }
            let carries = self.held.values().any(|held| held.name.0 == *number && held.joined)
                || self.natives.values().any(|it| it.name.0 == *number && it.at.is_some());
            if carries && link.down.is_some_and(|since| now - since > DOWN_MOST) {
                broken.push((*number, "no rail works"));
            }
            let late = |held: &Held| {
                let ended = held.ended.is_some_and(|since| now - since > FREE_IN);
                held.name.0 == *number && held.memory.is_some() && ended
            };
            if self.held.values().any(late) {
                broken.push((*number, "memory is not given back"));
            }
        }
        for (number, why) in broken {
            self.give_up(number, why);
        }
        let asks = now - self.asked > ANSWERED;
        if asks {
            self.asked = now;
        }
        let hangs = |server: &mut Server<Served>, held: &Held| match held
            .lane
            .and_then(|at| server.get(at))
        {
            Some(Served::Lane(lane)) => lane.rings.hangs() || asks && lane.hangs(),
            _ => false,
        };
        let Process { server, held, .. } = self;
        let hang: Vec<u64> = held
            .iter()
            .filter(|(_, held)| hangs(server, held))
            .map(|(number, _)| *number)
            .collect();
        hang.into_iter().for_each(|number| self.end(number, true));
        self.end_those_that_do_not_begin(now);
    }

    /// The other node owes an answer, without which nobody looks whether the program that offers is there.
    fn end_those_that_do_not_begin(&mut self, now: Moment) {
        let Process { server, natives, .. } = self;
        let mut late = Vec::new();
        for (number, native) in natives {
            if let Some(at) = native.at
                && now.saturating_sub(native.since) > ANSWERED
                && let Some(Served::Passage(passage)) = server.get(at)
                && !passage.has_begun()
            {
                late.push(*number);
            }
        }
        late.into_iter().for_each(|number| self.end_native(number, true));
    }

    fn rouse_trunk(&mut self) {
        self.trunk_at.into_iter().for_each(|at| self.server.rouse(at));
    }

    fn open_rails(&mut self) {
        let Process { trunk, places, .. } = self;
        places.open(|at| trunk.with_node(|node| node.is_broken(at)));
    }

    fn take_rails(&mut self) {
        let mut said = Vec::new();
        for (at, rail) in self.places.opened(&mut |text| said.push(text.to_owned())) {
            self.put_rail(at, rail);
        }
        said.iter().for_each(|text| self.log(text));
    }

    fn put_rail(&mut self, at: usize, rail: Box<dyn Rail>) {
        // (What is slept on is another one now.)
        self.trunk_at.take().into_iter().for_each(|at| drop(self.server.leave(at)));
        let before = self.trunk.with_node(|node| node.replace(at, rail));
        self.serve_trunk();
        close_apart(before);
    }

    /// Tried again while it fails.
    fn serve_trunk(&mut self) {
        if self.trunk_at.is_some() {
            return;
        }
        match self.server.serve(Served::Trunk(self.trunk.clone())) {
            Ok(at) => {
                self.trunk.is_served_at(at);
                self.trunk_at = Some(at);
            }
            Err(error) => self.log(&format!("what rails are slept on by: {error}")),
        }
    }
}

/// The other end goes on in the kernel.
fn is_orphan(said: &[u8]) -> bool {
    Message::read(said).is_ok_and(|message| message.kind == ORPHAN)
}

#[cfg(test)]
mod tests {
    use super::super::places::{Absent, Opened};
    use super::*;
    use std::thread;

    /// With one rail, which is opened so; and the service's end.
    fn process(opens: fn(&RailSettings, &str) -> Opened) -> (Process, OwnedFd) {
        // SAFETY: made just now, ours alone.
        let [ours, theirs] = meet::pair().unwrap().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let settings: RailSettings = serde_json::from_str(r#"{"provider": "none"}"#).unwrap();
        let apart = Arc::new(Apart::new().unwrap());
        (Process::new(ours, "a".into(), vec![settings], opens, apart).unwrap(), theirs)
    }

    fn answers(process: &mut Process, service: &OwnedFd) {
        let (ask, mut bytes) = (packet(ASK, Session::default(), &[]), vec![0; PACKET_BYTES]);
        meet::send(service.as_raw_fd(), &ask, &[]).unwrap();
        loop {
            assert!(process.turn().unwrap());
            while let Ok((len, _)) = meet::receive(service.as_raw_fd(), &mut bytes) {
                if bytes[..len].first() == Some(&ANSWER) {
                    return;
                }
            }
        }
    }

    #[test]
    fn of_a_lane_that_is_none_the_other_node_is_told() {
        let (mut process, service) = process(|_, _| Ok(Box::new(unwatched())));
        let session = [7; size_of::<Session>()];
        meet::send(service.as_raw_fd(), &packet(JOINED, session, &[]), &[]).unwrap();
        let passed = |between: Between| {
            let message = serde_json::to_vec(&between).unwrap();
            (PASSED, in_pieces(&message).next().unwrap())
        };
        let offered = Between::Offered { lane: 2, kind: 1, slot_count: 64, ring_bytes: 1 << 16 };
        // (There was no descriptor free for it.)
        let order = NativeOrder { number: 1, lane: 3, offers: true };
        for (lane, (kind, said)) in [
            (1, passed(Between::Said { lane: 1, frame: vec![1] })),
            (2, passed(offered)),
            (3, (NATIVE, serde_json::to_vec(&order).unwrap())),
        ] {
            meet::send(service.as_raw_fd(), &packet(kind, session, &said), &[]).unwrap();
            assert!(process.turn().unwrap());
            let mut bytes = vec![0; PACKET_BYTES];
            let mut over = false;
            while let Ok((len, _)) = meet::receive(service.as_raw_fd(), &mut bytes) {
                let said = read(&bytes[..len]).filter(|(kind, ..)| *kind == PASS);
                let said = said.and_then(|(.., said)| serde_json::from_slice(&said[1..]).ok());
                over |= matches!(said, Some(Between::Over { lane: of }) if of == lane);
            }
            assert!(over, "{lane}");
        }
    }

    /// A process that has joined one other node.
    fn joined() -> (Process, OwnedFd, Number) {
        let (mut process, service) = process(|_, _| Ok(Box::new(unwatched())));
        process.join([7; size_of::<Session>()]);
        let number = *process.links.keys().next().unwrap();
        (process, service, number)
    }

    fn pair() -> [OwnedFd; 2] {
        // SAFETY: made just now, ours alone.
        meet::pair().unwrap().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn has_said(service: &OwnedFd, kind: u8) -> usize {
        let (mut bytes, mut count) = (vec![0; PACKET_BYTES], 0);
        while let Ok((len, _)) = meet::receive(service.as_raw_fd(), &mut bytes) {
            count += usize::from(bytes[..len].first() == Some(&kind));
        }
        count
    }

    #[test]
    fn of_each_ring_that_is_made_it_is_heard_at_once() {
        let (mut process, service, number) = joined();
        let from = From { user: None, pod: None };
        let ends: Vec<_> = (0..3)
            .map(|lane| {
                let ([line, guest], [meeting, other]) = (pair(), pair());
                let (accepts, ring_bytes) = (false, 1 << 16);
                let from = from.clone();
                let order = LaneOrder { number: lane.into(), lane, accepts, from, ring_bytes };
                process.begin(number, order, line, meeting);
                (guest, other)
            })
            .collect();
        process.tell();
        assert_eq!(has_said(&service, ANSWER), 0);
        for held in 0..ends.len() as u64 {
            let _ = process.make(held, 1 << 16);
            assert_eq!(has_said(&service, ANSWER), 1, "{held}");
        }
    }

    #[test]
    fn a_node_that_does_not_say_that_it_has_begun_is_not_waited_for() {
        let (mut process, _service, number) = joined();
        let offer = Offer { kind: 1, slot_count: 64, ring_bytes: 1 << 16 };
        let programs: Vec<_> = [false, true]
            .into_iter()
            .zip(1u32..)
            .map(|(begun, lane)| {
                let [ours, theirs] = pair();
                let (native, offers) = (u64::from(lane), true);
                process.begin_native(number, NativeOrder { number: native, lane, offers }, ours);
                let port = process.begun(native).unwrap().welcome(offer).unwrap();
                assert!(process.serve_native(native, port, begun));
                theirs
            })
            .collect();
        let since = process.natives[&1].since;
        process.end_those_that_do_not_begin(since + ANSWERED);
        assert_eq!(process.natives.len(), programs.len(), "it has time until then");
        process.end_those_that_do_not_begin(since + ANSWERED + SWEEP);
        assert!(process.natives.contains_key(&2), "it has begun");
        assert!(!process.natives.contains_key(&1));
    }

    #[test]
    fn a_rail_whose_open_hangs_holds_up_nothing() {
        let (mut process, service) = process(|_, _| {
            loop {
                thread::park();
            }
        });
        process.open_rails();
        answers(&mut process, &service);
        process.open_rails();
        assert!(process.places.is_opening(0) && !process.places.is_open(0));
        answers(&mut process, &service);
    }

    /// KERNEL: a file of a disk can't be slept on by epoll (EPERM).
    fn unwatched() -> Absent {
        Absent(std::fs::File::open("/proc/self/exe").unwrap().into())
    }

    #[test]
    fn rails_that_cannot_be_slept_on_are_tried_again() {
        let (mut process, service) = process(|_, _| Ok(Box::new(unwatched())));
        process.open_rails();
        while !process.places.is_open(0) {
            assert!(process.turn().unwrap());
        }
        assert_eq!(process.trunk_at, None);
        answers(&mut process, &service);
        process.put_rail(0, Box::new(Absent::new().unwrap()));
        assert!(process.trunk_at.is_some(), "it is served no more");
        answers(&mut process, &service);
    }
}
