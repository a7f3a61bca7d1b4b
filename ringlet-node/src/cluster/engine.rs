//! The thread that speaks with other nodes: it waits for sockets only, and for nobody.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::channels::{Call, Caller, PATIENCE, Token, Wants};
use super::identity::{self, Identity};
use super::joining::{ITSELF, NAMESAKE, Seed};
use super::link::{Cause, Frame, Hello, Link, VERSION, Word, cause};
use super::members::Settings;
use super::nodes::may_say;
use super::peers::State;
use super::strangers::Strangers;
use super::{Cluster, Expected, Peer, QUEUE_BYTES, names, renewal};
use crate::clock::{Clock, Moment};
use crate::sandbox;

/// A heartbeat goes to each node so often; one of whom nothing was heard for so long is unreachable.
pub const BEAT: Duration = Duration::from_secs(1);
pub const SILENT: Duration = Duration::from_secs(5);
/// A connection that has told what it was there for.
pub(super) const INTRODUCED: &str = "introduced";
/// Who has connected, or is dialled, has proved who it is by then.
const HANDSHAKE: Duration = Duration::from_secs(5);
const AGAIN_FIRST: Duration = Duration::from_millis(250);
const AGAIN_LAST: Duration = Duration::from_secs(2);
/// What has a time is looked at so often.
const TICK: Duration = Duration::from_millis(250);
/// Connections that are taken at once.
const ACCEPTS_AT_ONCE: usize = 64;
/// A node that ends says so to others, for no longer than this.
const FAREWELL: Duration = Duration::from_millis(500);

/// What tells of one signal.
const SIGNAL_BYTES: usize = size_of::<libc::signalfd_siginfo>();

/// What the thread tells: called on it, so they must not wait.
pub trait Events: Send {
    /// A session began. (`restarted`: it is another run of that node than in the last one.)
    fn joined(&mut self, peer: &Peer, restarted: bool);
    /// It is over, with all that belonged to it.
    fn ended(&mut self, peer: &Peer);
    /// What the other service has said of ends of connections.
    fn said(&mut self, peer: &Peer, word: Word);
    /// What the other node has passed, in order.
    fn passed(&mut self, peer: &Peer, message: &[u8]);
    /// A channel is there, or could not be had.
    fn called(&mut self, token: Token, channel: Option<OwnedFd>);
    /// The service is to end. True once nothing is left that others of the cluster still need of it: it is asked again until then.
    fn may_leave(&mut self) -> bool {
        true
    }
}

/// What has to be done before the service gives up the right to.
pub struct Running {
    settings: Settings,
    identity: Identity,
    incarnation: u64,
    listener: TcpListener,
}

impl Running {
    pub fn prepare(settings: Settings) -> anyhow::Result<Running> {
        let identity = identity::load(&settings.directory, &settings.node)?;
        let incarnation = identity::next_incarnation(&settings.directory)?;
        let listener = TcpListener::bind(settings.listen)
            .with_context(|| format!("[cluster] listen = {}", settings.listen))?;
        listener.set_nonblocking(true)?;
        Ok(Running { settings, identity, incarnation, listener })
    }

    /// Starts the thread, which gives up its own rights. (Call it while there is no other.)
    ///
    /// SIGTERM and SIGINT are the thread's from then on: once nobody needs anything of it (or at the second signal) other nodes are told that this one
    /// leaves, then the process ends.
    pub fn start(self, events: Box<dyn Events>, quiet: bool) -> anyhow::Result<Cluster> {
        let failed = |error: ringlet_linux::sys::Errno| std::io::Error::from_raw_os_error(error.0);
        let cluster = Cluster::new(self.settings, self.incarnation, quiet).map_err(failed)?;
        let ends = signals()?;
        let settings = cluster.settings();
        let nodes = settings.nodes.len();
        let seeds = settings.join.iter().flatten().map(|_| Seed::new()).collect();
        let mut engine = Engine {
            dials: vec![Dial::new(); nodes],
            sessions: vec![None; nodes],
            seeds,
            cluster: cluster.clone(),
            identity: self.identity,
            listener: self.listener,
            connections: HashMap::new(),
            callers: Vec::new(),
            calls: Vec::new(),
            next: 0,
            beat: Instant::now(),
            began: Instant::now(),
            clock: Clock::new(),
            events,
            ends,
            asked_to_end: 0,
        };
        let (said, confined) = sync_channel(1);
        std::thread::Builder::new().name("cluster".into()).spawn(move || {
            let entered = sandbox::enter_for_cluster();
            let is_confined = entered.is_ok();
            let _ = said.send(entered);
            if is_confined {
                loop {
                    engine.turn();
                }
            }
        })?;
        confined.recv().map_err(|_| anyhow!("the cluster's thread has ended"))??;
        renewal::start(cluster.clone())?;
        names::start(cluster.clone())?;
        Ok(cluster)
    }
}

/// SIGTERM and SIGINT, to be read. (Processes that we start have none blocked: std clears that.)
fn signals() -> anyhow::Result<OwnedFd> {
    // SAFETY: a set that is filled before it is used; the descriptor is new, and ours.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let made = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if made < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(OwnedFd::from_raw_fd(made))
    }
}

#[derive(Clone)]
pub(super) struct Dial {
    next: Instant,
    pause: Duration,
    /// The connection by which it is tried just now.
    pub by: Option<u64>,
    /// How often: its addresses have turns.
    tried: usize,
    /// Why it did not become a session, which is said once.
    failed: Option<&'static str>,
    /// When others were told of it last.
    pub told: Option<Instant>,
}

impl Dial {
    pub fn new() -> Dial {
        Dial {
            next: Instant::now(),
            pause: AGAIN_FIRST,
            by: None,
            tried: 0,
            failed: None,
            told: None,
        }
    }
}

pub(super) struct Connection {
    pub link: Link,
    pub from: SocketAddr,
    began: Instant,
    heard: Moment,
    pub who: Who,
    /// Beats that were sent: the last one's number and time.
    beat: (u64, Instant),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// Has connected, and has not said who it is.
    Stranger,
    /// Has, and was told which nodes there are: it closes.
    Introduced,
    /// We have dialled this place of `join`, to be told the same; and the node that has answered.
    Seed(usize, Option<usize>),
    /// We have dialled this node; it has proved it when it says something.
    Dialled(usize),
    Node(usize),
}

pub(super) struct Engine {
    pub cluster: Cluster,
    pub identity: Identity,
    listener: TcpListener,
    pub connections: HashMap<u64, Connection>,
    callers: Vec<Caller>,
    calls: Vec<Call>,
    next: u64,
    /// Of each node: how it is dialled (where it is on us to), and its session's connection.
    pub dials: Vec<Dial>,
    pub sessions: Vec<Option<u64>>,
    pub seeds: Vec<Seed>,
    beat: Instant,
    began: Instant,
    clock: Clock,
    events: Box<dyn Events>,
    ends: OwnedFd,
    /// How often.
    asked_to_end: u32,
}

impl Engine {
    fn turn(&mut self) {
        let wake = self.cluster.0.wake;
        // SAFETY: the eventfd is never closed.
        let wake = unsafe { BorrowedFd::borrow_raw(wake) };
        let keys: Vec<u64> = self.connections.keys().copied().collect();
        let mut fds = vec![
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::from_borrowed_fd(wake, PollFlags::IN),
            PollFd::new(&self.ends, PollFlags::IN),
        ];
        for key in &keys {
            let link = &self.connections[key].link;
            let out = if link.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(link.stream.as_fd(), PollFlags::IN | out));
        }
        let callers = self.callers.iter().filter(|caller| !caller.is_partial);
        let callers = callers.map(|caller| (caller.stream.as_fd(), PollFlags::IN));
        let calls = self.calls.iter().map(|call| {
            let flags = if call.wants_write() { PollFlags::OUT } else { PollFlags::IN };
            (call.stream.as_fd(), flags)
        });
        fds.extend(callers.chain(calls).map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let tick = Timespec::try_from(TICK).ok();
        let _ = poll(&mut fds, tick.as_ref());
        self.clock.waited(TICK);
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        if !ready[2].is_empty() && rustix::io::read(&self.ends, &mut [0u8; SIGNAL_BYTES]).is_ok() {
            self.asked_to_end += 1;
        }
        if self.asked_to_end > 1 || self.asked_to_end == 1 && self.events.may_leave() {
            self.leave();
        }
        if !ready[1].is_empty() {
            let _ = rustix::io::read(wake, &mut [0u8; 8]);
            self.renew();
        }
        for (key, ready) in keys.into_iter().zip(&ready[3..]) {
            if !ready.is_empty() {
                self.serve(key);
            }
        }
        self.hear_callers();
        self.go_on_calling();
        if !ready[0].is_empty() {
            self.accept();
        }
        self.send_passed();
        self.look_at_times();
    }

    /// For the sessions to come: who has one has proved who it is.
    fn renew(&mut self) {
        let mut now = self.cluster.now();
        if let Some(identity) = now.identity.take() {
            now.journal.note("new-identity", || "a new key or certificate".to_owned());
            drop(now);
            self.identity = identity;
        }
    }

    fn accept(&mut self) {
        let mut strangers = self.strangers();
        for _ in 0..ACCEPTS_AT_ONCE {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // KERNEL: who waits makes the listener readable again and again.
                Err(_) => return std::thread::sleep(Duration::from_millis(1)),
            };
            if !strangers.admits(from.ip()) {
                self.refused(from, &cause("too-many", "others have not said yet who they are"));
                continue;
            }
            let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            match ready {
                Ok(()) => self.callers.push(Caller::new(stream, from)),
                Err(error) => self.refused(from, &cause("lost", error)),
            }
        }
    }

    /// Those who have not said who they are, and the addresses from which channels are to come.
    fn strangers(&self) -> Strangers {
        let is_new = |who| matches!(who, Who::Stranger | Who::Introduced);
        let links = self.connections.values().filter(|each| is_new(each.who));
        let there = self.callers.iter().map(|caller| caller.from).chain(links.map(|it| it.from));
        let now = self.cluster.now();
        let expected = now.expected.values().filter_map(|expected| {
            let session = self.sessions[expected.place]?;
            Some(self.connections.get(&session)?.from.ip())
        });
        Strangers::new(there.map(|from| from.ip()), expected)
    }

    /// What those want who have just connected.
    fn hear_callers(&mut self) {
        let mut at = 0;
        while at < self.callers.len() {
            let wants = self.callers[at].wants();
            let late = self.callers[at].began.elapsed() >= HANDSHAKE;
            if matches!(wants, Wants::NotYet) && !late {
                at += 1;
                continue;
            }
            let caller = self.callers.swap_remove(at);
            let from = caller.from;
            match wants {
                Wants::Tls => match Link::accept(caller.stream, &self.identity) {
                    Ok(link) => {
                        let key = self.add(link, from, Who::Stranger);
                        self.serve(key);
                    }
                    Err(cause) => self.refused(from, &cause),
                },
                Wants::Channel(said) => {
                    let expected = self.cluster.now().expected.remove(&said);
                    let Some(Expected { token, .. }) = expected else {
                        self.refused(from, &cause("not-expected", "a channel's token"));
                        continue;
                    };
                    if let Some(stream) = caller.take() {
                        self.events.called(token, Some(stream.into()));
                    }
                }
                Wants::Gone => self.refused(from, &cause("lost", "it has gone")),
                Wants::NotYet => {
                    let about = format!("it has not proved in {} s who it is", HANDSHAKE.as_secs());
                    self.refused(from, &cause("too-slow", about));
                }
            }
        }
    }

    /// Channels that we dial; and sessions that are to end.
    fn go_on_calling(&mut self) {
        let (calls, over) = {
            let now = &mut *self.cluster.now();
            now.expected.retain(|_, expected| expected.since.elapsed() < PATIENCE);
            (std::mem::take(&mut now.calls), std::mem::take(&mut now.over))
        };
        for (place, session, token) in calls {
            // (Another's place, by now, or another session's: the token is none of theirs.)
            let is = self.cluster.now().nodes[place].peer.session() == Some(session);
            let address = if is { self.address_for_calls(place) } else { None };
            match address.map(connect) {
                Some(Ok(stream)) => self.calls.push(Call::new(stream, token)),
                _ => self.events.called(token, None),
            }
        }
        let mut at = 0;
        while at < self.calls.len() {
            let taken = match self.calls[at].go_on() {
                None if !self.calls[at].is_late() => {
                    at += 1;
                    continue;
                }
                taken => taken == Some(true),
            };
            let Call { stream, token, .. } = self.calls.swap_remove(at);
            self.events.called(token, taken.then(|| stream.into()));
        }
        for (place, session, why) in over {
            let is = self.cluster.now().nodes[place].peer.session() == Some(session);
            if let (true, Some(key)) = (is, self.sessions[place]) {
                self.end(key, &cause("given-up", why));
            }
        }
    }

    /// That of its addresses by which its session came, if one is known.
    fn address_for_calls(&self, place: usize) -> Option<SocketAddr> {
        let by = self.sessions[place].and_then(|key| self.connections.get(&key));
        let now = self.cluster.now();
        let addresses = &now.nodes[place].addresses;
        let of_session = |address: &&SocketAddr| {
            by.is_some_and(|by| by.from.ip().to_canonical() == address.ip())
        };
        addresses.iter().find(of_session).or(addresses.first()).copied()
    }

    pub fn add(&mut self, link: Link, from: SocketAddr, who: Who) -> u64 {
        let (key, now) = (self.next, Instant::now());
        self.next += 1;
        let heard = self.clock.now();
        let connection = Connection { link, from, began: now, heard, who, beat: (0, now) };
        self.connections.insert(key, connection);
        key
    }

    /// (The node with the lower name dials: one connection for each pair.)
    fn dial(&mut self, place: usize) {
        let dial = &mut self.dials[place];
        let tried = dial.tried;
        let (name, address) = {
            let now = self.cluster.now();
            let (name, addresses) = (now.nodes[place].name.clone(), &now.nodes[place].addresses);
            (name, addresses.get(tried % addresses.len().max(1)).copied())
        };
        // (Its name is being looked up.)
        let Some(address) = address else { return };
        dial.tried = tried.wrapping_add(1);
        let made = connect(address)
            .map_err(|error| cause("lost", error))
            .and_then(|stream| Link::dial(stream, &self.identity, &name));
        match made {
            Ok(mut link) => {
                if link.say(&self.hello(false)).is_ok() {
                    self.dials[place].by = Some(self.add(link, address, Who::Dialled(place)));
                }
            }
            Err(cause) => self.is_not_there(place, address, &cause),
        }
    }

    pub fn hello(&self, introduces: bool) -> Word {
        let shared = &self.cluster.0;
        Word::Hello(Hello {
            version: VERSION,
            node: shared.settings.node.clone(),
            incarnation: shared.incarnation,
            listen: shared.settings.listen,
            introduces,
        })
    }

    fn serve(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let mut frames = Vec::new();
        let read = connection.link.read(&mut frames);
        for frame in frames {
            if let Err(cause) = self.hear(key, frame) {
                return self.end(key, &cause);
            }
        }
        let written = match self.connections.get_mut(&key) {
            Some(connection) => connection.link.write(),
            None => return,
        };
        if let Err(cause) = read.and(written) {
            self.end(key, &cause);
        }
    }

    fn hear(&mut self, key: u64, frame: Frame) -> Result<(), Cause> {
        // (It may have been ended by what it said before.)
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(()) };
        connection.heard = self.clock.now();
        let from = connection.from.ip();
        let place = match (connection.who, frame) {
            (Who::Node(place), frame) => {
                match frame {
                    Frame::Passed(message) => {
                        if let Some(peer) = self.peer(place) {
                            self.events.passed(&peer, &message);
                        }
                    }
                    Frame::Word(Word::Beat(number)) => connection.link.say(&Word::Echo(number))?,
                    Frame::Word(Word::Echo(number)) if number == connection.beat.0 => {
                        let time = connection.beat.1.elapsed();
                        self.cluster.now().nodes[place].peer.answered_in(time);
                    }
                    Frame::Word(Word::Echo(_)) => {}
                    Frame::Word(
                        word @ (Word::Seek(_)
                        | Word::Here(..)
                        | Word::Meet(_)
                        | Word::Apart(..)
                        | Word::Call(_)
                        | Word::Answer { .. }),
                    ) => {
                        if let Some(peer) = self.peer(place) {
                            self.events.said(&peer, word);
                        }
                    }
                    Frame::Word(Word::Leave) => return Err(cause("left", "it ends")),
                    Frame::Word(Word::Nodes { nodes, .. }) => self.told(place, from, nodes),
                    Frame::Word(Word::Hello(_)) => {
                        return Err(cause("garbage", "it says twice who it is"));
                    }
                }
                return Ok(());
            }
            (Who::Seed(_, Some(by)), Frame::Word(Word::Nodes { nodes, last })) => {
                self.told(by, from, nodes);
                return if last { Err(cause(INTRODUCED, "")) } else { Ok(()) };
            }
            (
                Who::Stranger | Who::Dialled(_) | Who::Seed(_, None),
                Frame::Word(Word::Hello(hello)),
            ) => self.recognise(key, hello)?,
            _ => return Err(cause("garbage", "it does not say who it is")),
        };
        let (place, hello) = place;
        let who = self.connections.get(&key).map(|connection| connection.who);
        if who == Some(Who::Stranger) {
            let answer = self.hello(hello.introduces);
            if let Some(connection) = self.connections.get_mut(&key) {
                connection.link.say(&answer)?;
            }
        }
        match who {
            Some(Who::Seed(seed, _)) => {
                if let Some(connection) = self.connections.get_mut(&key) {
                    connection.who = Who::Seed(seed, Some(place));
                }
                Ok(())
            }
            Some(Who::Stranger) if hello.introduces => self.introduce(key, place),
            _ => self.join(key, place, hello.incarnation),
        }
    }

    /// Which node says this, by its certificate; it is of the cluster, and no older run of it than the last.
    fn recognise(&mut self, key: u64, hello: Hello) -> Result<(usize, Hello), Cause> {
        let Hello { version, node, incarnation, .. } = &hello;
        if *version != VERSION {
            return Err(cause("other-version", format!("it speaks version {version}")));
        }
        let Some(connection) = self.connections.get(&key) else {
            return Err(cause("lost", "it has gone"));
        };
        // (Its certificate first: what it says of itself is nothing yet.)
        if !connection.link.is_of(node) {
            return Err(cause("wrong-name", format!("its certificate is not that of {node:?}")));
        }
        let (who, from) = (connection.who, connection.from);
        let place = match self.member(node, *incarnation) {
            Err(cause) if who == Who::Stranger && [ITSELF, NAMESAKE].contains(&cause.code) => {
                // (By the answer it sees that it has this name too.)
                let answer = self.hello(hello.introduces);
                if let Some(connection) = self.connections.get_mut(&key) {
                    connection.link.say(&answer).and_then(|()| connection.link.write())?;
                }
                return Err(cause);
            }
            place => place?,
        };
        if matches!(who, Who::Dialled(dialled) if dialled != place) {
            return Err(cause("wrong-name", node));
        }
        let mut now = self.cluster.now();
        if now.nodes[place].peer.admits(*incarnation).is_err() {
            return Err(cause(
                "older-incarnation",
                format!("{node} was here with a newer incarnation than {incarnation}"),
            ));
        }
        let mut listens = hello.listen;
        if listens.ip().is_unspecified() {
            listens.set_ip(from.ip().to_canonical());
        }
        if may_say(listens, from.ip()) {
            now.nodes[place].says(listens);
        }
        drop(now);
        Ok((place, hello))
    }

    fn join(&mut self, key: u64, place: usize, incarnation: u64) -> Result<(), Cause> {
        if let Some(old) = self.sessions[place] {
            self.end(old, &cause("replaced", "it has connected again"));
        }
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(()) };
        let session = connection.link.session()?;
        let (from, subnets) = (connection.from.ip(), connection.link.subnets());
        connection.who = Who::Node(place);
        self.sessions[place] = Some(key);
        self.dials[place].by = None;
        self.dials[place].failed = None;
        self.dials[place].pause = AGAIN_FIRST;
        // (What worked is tried first.)
        self.dials[place].tried = self.dials[place].tried.saturating_sub(1);
        let mut now = self.cluster.now();
        let node = &mut now.nodes[place];
        let restarted = node.peer.join(incarnation, session);
        node.proved(from, subnets);
        node.out.clear();
        let name = node.name.clone();
        let outcome = if restarted { "restarted" } else { "joined" };
        now.journal.note(outcome, || format!("{name}, incarnation {incarnation}"));
        drop(now);
        self.tell_all(key)?;
        if let Some(peer) = self.peer(place) {
            self.events.joined(&peer, restarted);
        }
        Ok(())
    }

    fn peer(&self, place: usize) -> Option<Peer> {
        self.cluster.peer_at(place)
    }

    /// A connection is over, and with it the session, if it was one.
    fn end(&mut self, key: u64, why: &Cause) {
        let Some(connection) = self.connections.remove(&key) else { return };
        match connection.who {
            Who::Node(place) => {
                self.sessions[place] = None;
                self.pause(place);
                let peer = self.peer(place);
                let (state, outcome) = match why.code {
                    "left" => (State::Left, "left"),
                    _ => (State::Unreachable, "unreachable"),
                };
                let mut now = self.cluster.now();
                let node = &mut now.nodes[place];
                node.out.clear();
                let name = node.name.clone();
                if node.peer.end(state, &format!("{}: {}", why.code, why.about)) {
                    now.journal.note(outcome, || format!("{name} ({}: {})", why.code, why.about));
                }
                drop(now);
                if let Some(peer) = peer {
                    self.events.ended(&peer);
                }
            }
            Who::Dialled(place) => {
                self.dials[place].by = None;
                self.pause(place);
                self.is_not_there(place, connection.from, why);
            }
            Who::Seed(place, _) => self.seed_is_over(place, connection.from, why),
            Who::Introduced => {}
            Who::Stranger if why.code == ITSELF => {}
            Who::Stranger => self.refused(connection.from, why),
        }
    }

    fn pause(&mut self, place: usize) {
        let dial = &mut self.dials[place];
        dial.next = Instant::now() + dial.pause;
        dial.pause = (dial.pause * 2).min(AGAIN_LAST);
    }

    /// A node that is not there is no news, nor what else it is each time that it is tried.
    fn is_not_there(&mut self, place: usize, at: SocketAddr, why: &Cause) {
        if matches!(why.code, "lost" | "silent")
            || self.dials[place].failed.replace(why.code) == Some(why.code)
        {
            return;
        }
        let mut now = self.cluster.now();
        let name = now.nodes[place].name.clone();
        now.journal.note(why.code, || format!("{name} {at}: {}", why.about));
    }

    fn refused(&self, from: SocketAddr, why: &Cause) {
        self.cluster.now().journal.note(why.code, || format!("{from}: {}", why.about));
    }

    fn send_passed(&mut self) {
        for place in 0..self.sessions.len() {
            let Some(key) = self.sessions[place] else { continue };
            let Some(connection) = self.connections.get_mut(&key) else { continue };
            let link = &mut connection.link;
            let mut now = self.cluster.now();
            let out = &mut now.nodes[place].out;
            while link.waiting() < QUEUE_BYTES / 2 {
                let Some((kind, message)) = out.messages.pop_front() else { break };
                out.bytes -= message.len() + super::link::HEAD_BYTES;
                link.put(kind, &message);
            }
            drop(now);
            if let Err(cause) = link.write() {
                self.end(key, &cause);
            }
        }
    }

    fn look_at_times(&mut self) {
        let now = Instant::now();
        let mut over = Vec::new();
        let beats = now.duration_since(self.beat) >= BEAT;
        if beats {
            self.beat = now;
        }
        for (key, connection) in &mut self.connections {
            match connection.who {
                Who::Node(_) if self.clock.since(connection.heard) >= SILENT => {
                    over.push((
                        *key,
                        cause("silent", format!("nothing was heard for {} s", SILENT.as_secs())),
                    ));
                }
                Who::Node(_) if beats => {
                    connection.beat = (connection.beat.0 + 1, now);
                    let said = connection.link.say(&Word::Beat(connection.beat.0));
                    if let Err(cause) = said.and_then(|()| connection.link.write()) {
                        over.push((*key, cause));
                    }
                }
                Who::Node(_) => {}
                Who::Stranger | Who::Dialled(_) | Who::Seed(..) | Who::Introduced
                    if now.duration_since(connection.began) >= HANDSHAKE =>
                {
                    let code = if connection.who == Who::Stranger { "too-slow" } else { "silent" };
                    let about = format!("it has not proved in {} s who it is", HANDSHAKE.as_secs());
                    over.push((*key, cause(code, about)));
                }
                Who::Stranger | Who::Dialled(_) | Who::Seed(..) | Who::Introduced => {}
            }
        }
        over.into_iter().for_each(|(key, cause)| self.end(key, &cause));
        for place in 0..self.dials.len() {
            let settings = self.cluster.settings();
            let is_ours = *settings.node < *self.cluster.now().nodes[place].name;
            let dial = &self.dials[place];
            if is_ours && dial.by.is_none() && self.sessions[place].is_none() && now >= dial.next {
                self.pause(place);
                self.dial(place);
            }
        }
        self.dial_seeds(now);
    }

    /// Tells others that this node ends, and ends.
    fn leave(&mut self) -> ! {
        for connection in self.connections.values_mut() {
            if matches!(connection.who, Who::Node(_)) {
                let _ = connection.link.say(&Word::Leave);
            }
        }
        let until = Instant::now() + FAREWELL;
        while Instant::now() < until {
            let waits = |connection: &mut Connection| {
                matches!(connection.who, Who::Node(_))
                    && connection.link.write().is_ok()
                    && connection.link.wants_write()
            };
            if !self.connections.values_mut().any(waits) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let seconds = self.began.elapsed().as_secs();
        crate::journal::say(&format!("left the cluster after {seconds} s"));
        std::process::exit(0)
    }
}

pub(super) fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}
