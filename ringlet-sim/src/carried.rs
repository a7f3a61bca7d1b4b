//! What carries connections between hosts (`ringlet_fabric`, and the trunks and lanes of `ringlet_adapter`), unmodified, on a cluster of nodes on virtual
//! time: over rails that delay, shuffle, repeat and fail, in nodes that die, and under services that lose one another. Each byte of a connection arrives, in
//! order and once; or the connection goes back to the kernel at both ends, where what did not arrive is still there to be sent again. What is handed back
//! is not written to any more.
//!
//! Here stands what `ringlet-node` does around that, with shorter times: it passes controls, gives up rails that are silent, tries them again, and
//! closes a transport without any.

mod network;
mod program;

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::io::Write;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use ringlet_adapter::{Event as Told, Lane, LaneName, Progress, Serve, Trunk};
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Control, Node, Number};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::{Time, from_us, to_us};
pub use network::{Disorder, Promise};
use network::{Network, SimulatedRail, held};
use program::{Bell, Program, Step};

/// How often a node looks after its transports; and after how long what `ringlet-node` does in seconds.
const SWEEP_US: f64 = 250.0;
const SILENT_US: f64 = 1000.0;
const DOWN_US: f64 = 2000.0;
const ANSWERED_US: f64 = 50_000.0;
/// What a thread has to do for one that it serves.
const PASS_US: f64 = 0.1;
/// Who reads does not ring for each record (`Serve::is_owed`).
const LOOK_AGAIN_US: f64 = 50.0;
const LOOK_AGAIN_MOST_US: f64 = 2500.0;
/// The longest way of what services say.
const CONTROL_US: f64 = 300.0;
/// A connection that finds no rail for so often stays in the kernel.
const TRIES: u32 = 20;
/// Without anything new for so long it is stuck.
const PATIENCE_US: f64 = 200_000.0;
/// The most that is kept for one transport and for one lane: what may be under way, and what may wait.
const KEPT_OF_TRANSPORT: usize = 3 << 20;
const KEPT_OF_LANE: usize = 64 << 10;

#[derive(Clone, Debug, Serialize)]
pub struct Carried {
    pub nodes: usize,
    pub rails: usize,
    /// Of each node, to the next ones.
    pub connections: usize,
    /// Each way.
    pub bytes: u64,
    pub disorder: Disorder,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CarriedStats {
    /// Connections by what became of them: all has arrived; both ends have gone back to the kernel; an end has died; no rail worked.
    pub arrived: u64,
    pub back: u64,
    pub died: u64,
    pub kernel: u64,
    /// Received.
    pub bytes: u64,
    /// Messages and writes by rails; of those what came late, or in parts twice; and ways that were lost.
    pub operations: u64,
    pub late: u64,
    pub repeated: u64,
    pub failures: u64,
    /// The most that one node has kept.
    pub kept_bytes: usize,
    /// Virtual microseconds.
    pub elapsed_us: f64,
}

pub struct CarriedOutcome {
    pub stats: CarriedStats,
    /// Of everything that happened, in order.
    pub trace: u64,
    pub wrong: Option<String>,
}

impl Carried {
    /// Any cluster and any disorder, as the seed has it.
    pub fn drawn(seed: u64) -> Carried {
        let mut rng = Pcg64Mcg::seed_from_u64(!seed);
        let nodes = if rng.random_range(0..10) == 0 { 24 } else { rng.random_range(2..8) };
        let mut some = |most: f64| if rng.random() { rng.random_range(0.0..most) } else { 0.0 };
        let disorder = Disorder {
            late: some(0.5),
            late_us: 1.0 + some(200.0),
            repeated: some(0.3),
            fails: some(0.01),
            dead_nodes: 0,
            lost_sessions: 0,
            within_us: 1.0 + some(5000.0),
            broken: None,
        };
        let dead_nodes = if rng.random() { rng.random_range(0..nodes) } else { 0 };
        let lost_sessions = if rng.random() { rng.random_range(0..nodes) } else { 0 };
        Carried {
            nodes,
            rails: rng.random_range(1..=3),
            connections: rng.random_range(1..=4),
            bytes: 1 << rng.random_range(0..19),
            disorder: Disorder { dead_nodes, lost_sessions, ..disorder },
        }
    }

    /// Runs it. The same seed, the same outcome; `trace` gets a line for everything that happens.
    pub fn run(&self, seed: u64, trace: Option<Box<dyn Write>>) -> CarriedOutcome {
        Cluster::new(self, seed, trace).run()
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// The thread of this node's carrier.
    Turn(usize),
    /// A program goes on.
    Program(usize, usize),
    Sweep(usize),
    /// This lane is looked at again: by its node and place, and how often the place was given.
    Look(usize, usize, u64),
    /// A session opens at one of its ends; a control comes there; it closes there. Of its life.
    Join(usize, usize, u32),
    Control(usize, usize, u32),
    Close(usize, usize, u32),
    /// Two services have lost one another.
    Lost(usize),
    /// A connection is to be carried; then each end's lane begins, the accepting one's first; this end is to go back, for the other has.
    Open(usize),
    Begin(usize, usize, u32),
    Over(usize, usize, u32),
    NodeDies(usize),
}

struct Served {
    lane: Lane<Bell>,
    whose: (usize, usize),
    looked: Option<Time>,
    given: u64,
}

struct Host {
    trunk: Trunk,
    alive: bool,
    lanes: Vec<Option<Served>>,
    /// 0 is the trunk, and the lanes follow.
    awake: BTreeSet<usize>,
    runs: bool,
    tried: Time,
    asked: Time,
}

/// What one node knows of a transport.
#[derive(Default)]
struct Side {
    number: Option<Number>,
    up: bool,
    down: Option<Time>,
    oldest: [Option<(usize, u32)>; 2],
    since: Time,
    /// What is under way from the other side, in order, and when the last of it comes.
    controls: VecDeque<Control>,
    last: Time,
}

struct Session {
    nodes: [usize; 2],
    life: u32,
    sides: [Side; 2],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Kernel,
    /// By a lane in this place.
    Carried(usize),
    /// It has parted, or gone back.
    Over,
    Back,
}

struct Connection {
    session: usize,
    life: u32,
    programs: [Program; 2],
    at: [At; 2],
    tries: u32,
    closed: bool,
}

struct Cluster {
    carried: Carried,
    network: Arc<Mutex<Network>>,
    hosts: Vec<Host>,
    sessions: Vec<Session>,
    connections: Vec<Connection>,
    by_number: HashMap<(usize, Number), usize>,
    rung: Rc<RefCell<Vec<(usize, usize)>>>,
    /// Connections of which an end is over, or its memory freed.
    changed: Rc<RefCell<Vec<usize>>>,
    fd: Arc<OwnedFd>,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    count: u64,
    given: u64,
    rng: Pcg64Mcg,
    open: usize,
    /// When something was new.
    progress: Time,
    stats: CarriedStats,
    hash: Xxh3,
    trace: Option<Box<dyn Write>>,
    wrong: Option<String>,
}

impl Cluster {
    fn new(carried: &Carried, seed: u64, trace: Option<Box<dyn Write>>) -> Cluster {
        let fd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"));
        let network = Arc::new(Mutex::new(Network::new(seed ^ 0x7261_696c, carried.disorder)));
        let host = |node| {
            let rail = |_| Box::new(SimulatedRail::new(&network, node, &fd)) as Box<dyn Rail>;
            let trunk = Trunk::new(Node::new((0..carried.rails).map(rail).collect()));
            trunk.is_served_at(0);
            Host {
                trunk,
                alive: true,
                lanes: Vec::new(),
                awake: BTreeSet::new(),
                runs: false,
                tried: 0,
                asked: 0,
            }
        };
        Cluster {
            hosts: (0..carried.nodes).map(host).collect(),
            carried: carried.clone(),
            network,
            sessions: Vec::new(),
            connections: Vec::new(),
            by_number: HashMap::new(),
            rung: Rc::default(),
            changed: Rc::default(),
            fd,
            now: 0,
            events: BinaryHeap::new(),
            count: 0,
            given: 0,
            rng: Pcg64Mcg::seed_from_u64(seed),
            open: 0,
            progress: 0,
            stats: CarriedStats::default(),
            hash: Xxh3::new(),
            trace,
            wrong: None,
        }
    }

    fn run(mut self) -> CarriedOutcome {
        self.begin();
        while self.open > 0 && self.wrong.is_none() {
            let lands = held(&self.network).next_time();
            let next = self.events.peek().map(|Reverse((time, ..))| *time);
            if lands.is_some_and(|lands| next.is_none_or(|next| lands < next)) {
                held(&self.network).land();
                self.now = held(&self.network).now;
                let rung = held(&self.network).rung();
                rung.into_iter().for_each(|node| self.rouse(node, 0));
            } else if let Some(Reverse((time, _, event))) = self.events.pop() {
                self.now = time;
                held(&self.network).now = time;
                self.note(&event);
                self.handle(event);
            } else {
                self.fail("nothing will ever happen again");
            }
            if self.now > self.progress + from_us(PATIENCE_US) {
                let left = self.open;
                self.fail(&format!("{left} connections are stuck"));
            }
        }
        self.check_buried();
        let counts = held(&self.network).counts;
        let bytes = self.connections.iter().flat_map(|each| &each.programs).map(|end| end.got);
        let stats = CarriedStats {
            bytes: bytes.sum(),
            operations: counts.operations,
            late: counts.late,
            repeated: counts.repeated,
            failures: counts.failures,
            elapsed_us: to_us(self.now),
            ..self.stats.clone()
        };
        let trace = self.hash.digest();
        CarriedOutcome { stats, trace, wrong: self.wrong.take() }
    }

    fn begin(&mut self) {
        let Carried { nodes, connections, bytes, disorder, .. } = self.carried;
        let mut by_pair = BTreeMap::new();
        for from in 0..nodes {
            for nth in 0..connections {
                let to = (from + 1 + nth % (nodes - 1)) % nodes;
                let pair = [from.min(to), from.max(to)];
                let session = *by_pair.entry(pair).or_insert_with(|| {
                    let sides = Default::default();
                    self.sessions.push(Session { nodes: pair, life: 0, sides });
                    self.sessions.len() - 1
                });
                let seed = self.rng.random::<u32>().into();
                let bytes = self.rng.random_range(0..=bytes);
                let programs = [0, 1].map(|end| Program::new(seed, end, bytes));
                let at = [At::Kernel; 2];
                let (life, tries, closed) = (0, 0, false);
                self.connections.push(Connection { session, life, programs, at, tries, closed });
            }
        }
        self.open = self.connections.len();
        for session in 0..self.sessions.len() {
            self.join(session);
        }
        for node in 0..nodes {
            let time = self.after(SWEEP_US);
            self.at(time, Event::Sweep(node));
        }
        for connection in 0..self.connections.len() {
            let time = self.after(disorder.within_us);
            self.at(time, Event::Open(connection));
        }
        for _ in 0..disorder.dead_nodes.min(nodes - 1) {
            let (time, node) =
                (self.after(2.0 * disorder.within_us), self.rng.random_range(0..nodes));
            self.at(time, Event::NodeDies(node));
        }
        for _ in 0..disorder.lost_sessions {
            let time = self.after(2.0 * disorder.within_us);
            let session = self.rng.random_range(0..self.sessions.len());
            self.at(time, Event::Lost(session));
        }
    }

    fn fail(&mut self, wrong: &str) {
        self.wrong.get_or_insert(format!("at {:.3} us: {wrong}", to_us(self.now)));
    }

    /// Some time up to so much later.
    fn after(&mut self, most_us: f64) -> Time {
        self.now + from_us(self.rng.random_range(0.0..=most_us))
    }

    fn at(&mut self, time: Time, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count, event)));
    }

    fn note(&mut self, event: &Event) {
        let counts = held(&self.network).counts;
        self.hash.update(&self.now.to_le_bytes());
        self.hash.update(format!("{event:?} {counts:?}").as_bytes());
        if let Some(to) = &mut self.trace {
            let _ = writeln!(to, "{:14.6} {event:?} {counts:?}", to_us(self.now));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Turn(node) => self.turn(node),
            Event::Program(connection, end) => self.program(connection, end),
            Event::Sweep(node) => self.sweep(node),
            Event::Look(node, at, given) => {
                let host = &mut self.hosts[node];
                let due: Option<&mut dyn Serve> = match at.checked_sub(1) {
                    None => Some(&mut host.trunk),
                    Some(place) => {
                        let lane = host.lanes.get_mut(place).and_then(Option::as_mut);
                        let lane = lane.filter(|served| served.given == given);
                        lane.map(|served| &mut served.lane as &mut dyn Serve)
                    }
                };
                if let Some(served) = due {
                    served.overdue();
                    self.rouse(node, at);
                }
            }
            Event::Join(session, side, life) => self.joined(session, side, life),
            Event::Control(session, side, life) => self.hear(session, side, life),
            Event::Close(session, side, life) => self.close(session, side, life),
            Event::Lost(session) => self.lose(session),
            Event::Open(connection) => self.carry(connection),
            Event::Begin(connection, end, life) => self.begin_lane(connection, end, life),
            Event::Over(connection, end, life) => {
                if self.connections[connection].life == life {
                    self.go_back(connection, end);
                }
            }
            Event::NodeDies(node) => self.die(node),
        }
    }

    /// There is something for it to do.
    fn rouse(&mut self, node: usize, at: usize) {
        let host = &mut self.hosts[node];
        if host.alive {
            host.awake.insert(at);
            if !std::mem::replace(&mut host.runs, true) {
                let time = self.after(2.0);
                self.at(time, Event::Turn(node));
            }
        }
    }

    /// As `ringlet_adapter::Server` has it, but that what has nothing to do sleeps at once.
    fn turn(&mut self, node: usize) {
        let host = &mut self.hosts[node];
        if !host.alive {
            return;
        }
        let (mut rouse, mut over, mut looks) = (Vec::new(), Vec::new(), Vec::new());
        let awake = std::mem::take(&mut host.awake);
        for &at in &awake {
            let served: &mut dyn Serve = match at.checked_sub(1) {
                None => &mut host.trunk,
                Some(place) => match &mut host.lanes[place] {
                    Some(served) => &mut served.lane,
                    None => continue,
                },
            };
            served.disarm();
            let mut progress = served.pass(&mut rouse);
            if progress == Progress::Idle {
                progress = if served.arm() { served.pass(&mut rouse) } else { Progress::Busy };
            }
            match progress {
                Progress::Busy => drop(host.awake.insert(at)),
                Progress::Idle if served.is_owed() => looks.push(at),
                Progress::Idle => {}
                ended => over.push((at, ended)),
            }
        }
        host.awake.extend(rouse);
        let passes = awake.len() as Time * from_us(PASS_US);
        for at in looks {
            self.look_again(node, at);
        }
        for (at, how) in over {
            let Some(served) = self.hosts[node].lanes[at - 1].as_ref() else { continue };
            let (connection, end) = served.whose;
            if how == Progress::Ended {
                self.end(connection, end, At::Over);
            } else {
                self.go_back(connection, end);
            }
        }
        let rung = held(&self.network).rung();
        rung.into_iter().for_each(|node| self.rouse(node, 0));
        self.hear_trunk(node);
        self.ring_programs();
        let host = &mut self.hosts[node];
        host.runs = !host.awake.is_empty();
        if host.runs {
            let time = self.now + passes + self.rng.random_range(0..from_us(PASS_US));
            self.at(time, Event::Turn(node));
        }
        self.close_what_is_over();
    }

    fn look_again(&mut self, node: usize, at: usize) {
        let Some(place) = at.checked_sub(1) else {
            // (The trunk, which owes an acknowledgement, is told so each time.)
            return self.at(self.now + from_us(LOOK_AGAIN_US), Event::Look(node, 0, 0));
        };
        let Some(served) = self.hosts[node].lanes[place].as_mut() else { return };
        let after = served.looked.map_or(from_us(LOOK_AGAIN_US), |last| 2 * last);
        let after = after.min(from_us(LOOK_AGAIN_MOST_US));
        served.looked = Some(after);
        let given = served.given;
        self.at(self.now + after, Event::Look(node, at, given));
    }

    fn ring_programs(&mut self) {
        let rung = std::mem::take(&mut *self.rung.borrow_mut());
        for (connection, end) in rung {
            if std::mem::take(&mut self.connections[connection].programs[end].sleeps) {
                let time = self.after(5.0);
                self.at(time, Event::Program(connection, end));
            }
        }
    }

    fn program(&mut self, connection: usize, end: usize) {
        let each = &mut self.connections[connection];
        let (At::Carried(place), false) = (each.at[end], each.closed) else { return };
        let node = self.sessions[each.session].nodes[end];
        let mut wake = false;
        let before = each.programs[end].got + each.programs[end].sent;
        let step = each.programs[end].step(&mut wake);
        if each.programs[end].got + each.programs[end].sent != before {
            self.progress = self.now;
        }
        if wake {
            self.rouse(node, place + 1);
        }
        match step {
            Ok(Step::Again) => {
                let time = self.after(1.0);
                self.at(time, Event::Program(connection, end));
            }
            Ok(Step::Parts) => {
                let time = self.now + from_us(10.0);
                self.at(time, Event::Program(connection, end));
            }
            Ok(Step::Sleeps | Step::Over) => {}
            Err(wrong) => self.fail(&format!("connection {connection}, end {end}: {wrong}")),
        }
    }

    /// What the owner of the transports is told.
    fn hear_trunk(&mut self, node: usize) {
        for (number, event) in self.hosts[node].trunk.events() {
            let Some(&session) = self.by_number.get(&(node, number)) else { continue };
            let now = self.now;
            let Session { nodes, life, sides } = &mut self.sessions[session];
            let (life, side) = (*life, usize::from(nodes[1] == node));
            match event {
                Told::Control(control) => {
                    sides[1 - side].controls.push_back(control);
                    let time =
                        self.after(CONTROL_US).max(self.sessions[session].sides[1 - side].last);
                    self.sessions[session].sides[1 - side].last = time;
                    self.at(time, Event::Control(session, 1 - side, life));
                }
                Told::Up => (sides[side].up, sides[side].down) = (true, None),
                Told::Down => (sides[side].up, sides[side].down) = (false, Some(now)),
                Told::Ended(error) => self.fail(&format!("node {node} ends a transport: {error}")),
            }
        }
    }

    fn hear(&mut self, session: usize, side: usize, life: u32) {
        let Session { nodes, life: current, sides } = &mut self.sessions[session];
        let (node, Some(number)) = (nodes[side], sides[side].number) else { return };
        if life == *current
            && let Some(control) = sides[side].controls.pop_front()
        {
            self.hosts[node].trunk.with_node(|of| of.control(number, control));
            self.rouse(node, 0);
        }
    }

    /// The services have found one another (again).
    fn join(&mut self, session: usize) {
        self.sessions[session].life += 1;
        self.sessions[session].sides = Default::default();
        let life = self.sessions[session].life;
        // (Nothing is said to one that has not joined.)
        let (one, other) = (self.after(50.0), self.after(50.0));
        self.at(one, Event::Join(session, 0, life));
        self.at(other, Event::Join(session, 1, life));
    }

    fn joined(&mut self, session: usize, side: usize, life: u32) {
        let node = self.sessions[session].nodes[side];
        if self.sessions[session].life != life || !self.hosts[node].alive {
            return;
        }
        let Some(number) = self.hosts[node].trunk.with_node(Node::open) else {
            return self.fail("too many transports");
        };
        self.by_number.insert((node, number), session);
        let of = &mut self.sessions[session].sides[side];
        of.number = Some(number);
        let waiting = std::mem::take(&mut of.controls);
        let early = waiting.len();
        of.controls = waiting;
        // (What has come before goes on in its order.)
        let last = of.last.max(self.now);
        of.last = last;
        (0..early).for_each(|_| self.at(last, Event::Control(session, side, life)));
        self.rouse(node, 0);
    }

    fn lose(&mut self, session: usize) {
        let life = self.sessions[session].life;
        for side in [0, 1] {
            let time = self.after(500.0);
            self.at(time, Event::Close(session, side, life));
        }
    }

    /// Once this returns nothing comes from that node any more.
    fn close(&mut self, session: usize, side: usize, life: u32) {
        let node = self.sessions[session].nodes[side];
        if self.sessions[session].life != life {
            return;
        }
        if let Some(number) = self.sessions[session].sides[side].number.take() {
            self.by_number.remove(&(node, number));
            let mut rouse = Vec::new();
            self.hosts[node].trunk.close(number, &mut rouse);
            rouse.into_iter().for_each(|at| self.rouse(node, at));
            self.rouse(node, 0);
        }
        // An end whose lane has not begun stays where it is, or goes back.
        for connection in 0..self.connections.len() {
            if self.connections[connection].session == session {
                self.go_back(connection, side);
            }
        }
        let Session { nodes, sides, .. } = &self.sessions[session];
        let alive = nodes.iter().all(|node| self.hosts[*node].alive);
        if alive && sides.iter().all(|side| side.number.is_none()) {
            self.join(session);
        }
        self.close_what_is_over();
    }

    /// A connection is to be carried, if a rail works.
    fn carry(&mut self, connection: usize) {
        let Connection { session, .. } = self.connections[connection];
        let Session { nodes, life, sides } = &self.sessions[session];
        let (nodes, life) = (*nodes, *life);
        let up = sides.iter().all(|side| side.up && side.number.is_some());
        let number = sides[0].number.filter(|_| up);
        let each = &mut self.connections[connection];
        if each.closed {
            return;
        }
        let Some(number) = number else {
            each.tries += 1;
            if each.tries > TRIES || !nodes.iter().all(|node| self.hosts[*node].alive) {
                self.stats.kernel += 1;
                return self.forget(connection);
            }
            let time = self.after(1000.0);
            return self.at(time, Event::Open(connection));
        };
        each.life = life;
        self.hosts[nodes[0]].trunk.expect((number, connection as u32));
        let time = self.after(50.0);
        self.at(time, Event::Begin(connection, 1, life));
    }

    fn begin_lane(&mut self, connection: usize, end: usize, life: u32) {
        let each = &mut self.connections[connection];
        let Session { nodes, life: current, sides } = &self.sessions[each.session];
        let node = nodes[end];
        let number = sides[end].number.filter(|_| *current == life && self.hosts[node].alive);
        let (false, At::Kernel) = (each.closed, each.at[end]) else { return };
        let Some(number) = number else { return self.go_back(connection, end) };
        let name: LaneName = (number, connection as u32);
        let segment = each.programs[end].segment();
        let bell = Bell { rung: self.rung.clone(), whose: (connection, end), fd: self.fd.clone() };
        let freed = each.programs[end].freed.clone();
        let changed = self.changed.clone();
        let free = Box::new(move || {
            freed.set(true);
            changed.borrow_mut().push(connection);
        });
        let trunk = &self.hosts[node].trunk;
        // SAFETY: the connections' memory stays until the end of the run.
        let lane = match unsafe { Lane::new(trunk, name, end, segment, bell, free) } {
            Ok(lane) => lane,
            Err(error) => return self.fail(&format!("no lane: {error}")),
        };
        let host = &mut self.hosts[node];
        let place = host.lanes.iter().position(Option::is_none).unwrap_or(host.lanes.len());
        host.lanes.resize_with(host.lanes.len().max(place + 1), || None);
        self.given += 1;
        let whose = (connection, end);
        host.lanes[place] = Some(Served { lane, whose, looked: None, given: self.given });
        host.trunk.is_lane_at(name, place + 1);
        each.at[end] = At::Carried(place);
        self.rouse(node, place + 1);
        let time = self.after(10.0);
        self.at(time, Event::Program(connection, end));
        if end == 1 {
            let time = self.after(50.0);
            self.at(time, Event::Begin(connection, 0, life));
        }
    }

    /// This end's lane is over.
    fn end(&mut self, connection: usize, end: usize, at: At) {
        let each = &mut self.connections[connection];
        let node = self.sessions[each.session].nodes[end];
        if let At::Carried(place) = std::mem::replace(&mut each.at[end], at) {
            drop(self.hosts[node].lanes[place].take());
            self.hosts[node].awake.remove(&(place + 1));
            self.rouse(node, 0);
        }
        self.changed.borrow_mut().push(connection);
        self.progress = self.now;
    }

    /// It can't go on at this end; the other one hears of it by the services.
    fn go_back(&mut self, connection: usize, end: usize) {
        let each = &self.connections[connection];
        if each.closed || each.life == 0 || matches!(each.at[end], At::Over | At::Back) {
            return;
        }
        let life = each.life;
        if each.at[end] == At::Kernel {
            let Session { nodes, life: current, sides } = &self.sessions[each.session];
            if let Some(number) = sides[end].number.filter(|_| *current == life) {
                self.hosts[nodes[end]].trunk.forget((number, connection as u32));
            }
            each.programs[end].freed.set(true);
        }
        self.end(connection, end, At::Back);
        let time = self.after(CONTROL_US);
        self.at(time, Event::Over(connection, 1 - end, life));
        self.close_what_is_over();
    }

    fn die(&mut self, node: usize) {
        if !std::mem::take(&mut self.hosts[node].alive) {
            return;
        }
        let host = &mut self.hosts[node];
        host.awake.clear();
        // (With all that it has.)
        let nothing = Trunk::new(Node::new(Vec::new()));
        let (lanes, trunk) =
            (std::mem::take(&mut host.lanes), std::mem::replace(&mut host.trunk, nothing));
        drop((lanes, trunk));
        for connection in 0..self.connections.len() {
            let each = &mut self.connections[connection];
            let Some(end) =
                self.sessions[each.session].nodes.iter().position(|other| *other == node)
            else {
                continue;
            };
            if !each.closed && each.life != 0 && each.at[end] != At::Over {
                each.at[end] = At::Back;
            }
            each.programs[end].freed.set(true);
            self.changed.borrow_mut().push(connection);
        }
        for session in 0..self.sessions.len() {
            let Session { nodes, life, sides } = &mut self.sessions[session];
            if let Some(side) = nodes.iter().position(|other| *other == node) {
                sides[side].number = None;
                let life = *life;
                let time = self.after(2000.0);
                self.at(time, Event::Close(session, 1 - side, life));
            }
        }
        self.close_what_is_over();
    }

    /// Connections of which nothing is left.
    fn close_what_is_over(&mut self) {
        let mut changed = std::mem::take(&mut *self.changed.borrow_mut());
        changed.sort_unstable();
        for connection in changed {
            let each = &self.connections[connection];
            let is_over = |end: usize| {
                matches!(each.at[end], At::Over | At::Back) && each.programs[end].freed.get()
            };
            if !each.closed && is_over(0) && is_over(1) {
                self.settle(connection);
            }
        }
    }

    fn settle(&mut self, connection: usize) {
        let each = &mut self.connections[connection];
        let nodes = self.sessions[each.session].nodes;
        let alive = nodes.map(|node| self.hosts[node].alive);
        let done = each.programs.iter().all(Program::is_done);
        let drained = each.programs.iter_mut().try_for_each(Program::drain);
        let result = drained.and_then(|()| match done {
            true => Ok(()),
            false if alive != [true; 2] => Ok(()),
            // One knows that all has come, and the other does not: that can't be, for each has sent as it has received.
            false => {
                let [first, second] = &mut each.programs;
                first.send_again(second.got).and_then(|()| second.send_again(first.got))
            }
        });
        match () {
            _ if done => self.stats.arrived += 1,
            _ if alive == [true; 2] => self.stats.back += 1,
            _ => self.stats.died += 1,
        }
        if let Err(wrong) = result {
            self.fail(&format!("connection {connection}: {wrong}"));
        }
        for (program, alive) in self.connections[connection].programs.iter_mut().zip(alive) {
            if alive {
                program.bury();
            }
        }
        self.forget(connection);
    }

    fn forget(&mut self, connection: usize) {
        self.connections[connection].closed = true;
        self.open -= 1;
        self.progress = self.now;
    }

    /// As `ringlet-node` looks after its transports.
    fn sweep(&mut self, node: usize) {
        if !self.hosts[node].alive {
            return;
        }
        let now = self.now;
        self.check_kept(node);
        let rails = self.carried.rails;
        let tries = now >= self.hosts[node].tried + from_us(SILENT_US);
        if tries {
            self.hosts[node].tried = now;
            for place in 0..rails {
                if self.hosts[node].trunk.with_node(|of| of.is_broken(place)) {
                    let rail = Box::new(SimulatedRail::new(&self.network, node, &self.fd));
                    self.hosts[node].trunk.with_node(|of| of.replace(place, rail));
                }
            }
        }
        let (mut broken, mut rouses) = (Vec::new(), false);
        let carried: BTreeSet<usize> =
            self.connections.iter().filter(|each| !each.closed).map(|each| each.session).collect();
        for (nth, session) in self.sessions.iter_mut().enumerate() {
            let Some(side) = session.nodes.iter().position(|other| *other == node) else {
                continue;
            };
            let of = &mut session.sides[side];
            let Some(number) = of.number else { continue };
            let trunk = &self.hosts[node].trunk;
            let is_up = |rail: usize| trunk.with_node(|of| of.transport(number).is_up(rail));
            if tries && !(0..rails).all(is_up) {
                rouses = true;
                trunk.with_node(|of| of.try_again(number));
            }
            let oldest = trunk.with_node(|of| of.transport(number).oldest());
            if oldest != std::mem::replace(&mut of.oldest, oldest) || oldest == [None; 2] {
                of.since = now;
            } else if now > of.since + from_us(SILENT_US) {
                (of.since, rouses) = (now, true);
                for (rail, _) in oldest.into_iter().flatten() {
                    trunk.with_node(|of| of.give_up(number, rail));
                }
            }
            let down = of.down.is_some_and(|since| now > since + from_us(DOWN_US));
            if down && carried.contains(&nth) {
                broken.push(nth);
            }
        }
        broken.into_iter().for_each(|session| self.lose(session));
        if now > self.hosts[node].asked + from_us(ANSWERED_US) {
            self.hosts[node].asked = now;
            let hang = |served: &mut Served| served.lane.hangs().then_some(served.whose);
            let hanging: Vec<_> =
                self.hosts[node].lanes.iter_mut().flatten().filter_map(hang).collect();
            hanging.into_iter().for_each(|(connection, end)| self.go_back(connection, end));
        }
        if rouses {
            self.rouse(node, 0);
        }
        let time = self.now + from_us(SWEEP_US);
        self.at(time, Event::Sweep(node));
        self.close_what_is_over();
    }

    /// Memory is bounded by what there is: transports and lanes, and not by time.
    fn check_kept(&mut self, node: usize) {
        let kept = self.hosts[node].trunk.kept_bytes();
        self.stats.kept_bytes = self.stats.kept_bytes.max(kept);
        let transports = self.by_number.keys().filter(|(of, _)| *of == node).count();
        let lanes = self.hosts[node].lanes.len();
        if kept > transports * KEPT_OF_TRANSPORT + lanes * KEPT_OF_LANE {
            self.fail(&format!("node {node} keeps {kept} bytes for {transports} transports"));
        }
    }

    /// What lands late does not land in memory that was handed back.
    fn check_buried(&mut self) {
        if self.wrong.is_some() {
            return;
        }
        for _ in 0..1 << 20 {
            if held(&self.network).next_time().is_none() {
                break;
            }
            held(&self.network).land();
        }
        for connection in 0..self.connections.len() {
            let Connection { session, life, programs, .. } = &mut self.connections[connection];
            let nodes = self.sessions[*session].nodes;
            for end in [0, 1] {
                if *life != 0 && self.hosts[nodes[end]].alive && !programs[end].is_buried() {
                    return self.fail(&format!(
                        "connection {connection}: memory that was handed back is written to"
                    ));
                }
            }
        }
    }
}
