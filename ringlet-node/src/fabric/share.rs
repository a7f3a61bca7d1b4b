//! The processes that have rails, as the service knows them. Two of its threads speak to each: the cluster's, of sessions and what was passed
//! there, and the service's, of lanes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringlet_linux::meet;
use ringlet_linux::sys::Errno;

use super::{
    ANSWER, ASK, BROKEN, DOWN, ENDED, JOINED, LANE, LEAVE, LOG, LaneOrder, NATIVE, NativeOrder,
    OVER, PACKET_BYTES, PASS, PASSED, REFLECTED, SETTINGS, Settings, UP, packet, read,
};
use crate::apart::{From, Handed};
use crate::carrier::keeper::{Kept, Look, Word};
use crate::cluster::{NotPassed, Peer, QUEUE_BYTES, Session};
use crate::policy::Limits;

/// What may wait for a process that does not read: then it is given up. Besides, of each session what was passed there: then that session is.
const WAITING_MOST: usize = 4 << 20;
const OF_SESSION_MOST: usize = 2 << 20;
const WORDS_AT_ONCE: usize = 64;
/// A node that reads nothing for so long is given up, and one for which so much waits.
const READS_IN: Duration = Duration::from_millis(500);
const UNPASSED_MOST: usize = QUEUE_BYTES;

/// What a process carries.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub enum Carries {
    /// Connections: what belongs to a session ends with it, and a session whose process has died ends.
    #[default]
    Connections,
    /// Reflective memory: the next process finds out with the others' where all of them are. Without one nothing waits for it.
    Reflection,
}

impl Carries {
    /// Is this, which was passed, for a process of this kind?
    fn is_of(self, message: &[u8]) -> bool {
        let reflected = message.first().is_some_and(|flags| flags & REFLECTED != 0);
        reflected == (self == Carries::Reflection)
    }

    /// As what a process passes goes to another service, whatever it has said there itself.
    fn mark(self, message: &mut [u8]) {
        let Some(flags) = message.first_mut() else { return };
        match self {
            Carries::Connections => *flags &= !REFLECTED,
            Carries::Reflection => *flags |= REFLECTED,
        }
    }
}

/// What both threads have.
#[derive(Clone, Default)]
pub struct Ways(Arc<Mutex<Out>>);

#[derive(Default)]
struct Out {
    carries: Carries,
    socket: Option<i32>,
    waiting: VecDeque<Waiting>,
    bytes: usize,
    sessions: Vec<Way>,
    /// The process was told to leave.
    leaves: bool,
}

struct Waiting {
    packet: Vec<u8>,
    fds: Vec<Handed>,
    /// It was passed there.
    passed: Option<Session>,
}

/// A session, and how much waits that was passed there.
struct Way {
    peer: Peer,
    bytes: usize,
}

fn joins(peer: &Peer) -> Vec<u8> {
    packet(JOINED, peer.session, peer.node().as_bytes())
}

impl Ways {
    fn new(carries: Carries) -> Ways {
        Ways(Arc::new(Mutex::new(Out { carries, ..Out::default() })))
    }

    fn lock(&self) -> MutexGuard<'_, Out> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn joined(&self, peer: &Peer) {
        let mut out = self.lock();
        out.sessions.push(Way { peer: peer.clone(), bytes: 0 });
        out.say(joins(peer), Vec::new());
    }

    pub fn ended(&self, peer: &Peer) {
        let mut out = self.lock();
        out.sessions.retain(|way| way.peer.session != peer.session);
        out.say(packet(ENDED, peer.session, &[]), Vec::new());
    }

    /// (If it is for the other process, it is nothing.)
    pub fn passed(&self, peer: &Peer, message: &[u8]) {
        let mut out = self.lock();
        if !out.carries.is_of(message) || out.waits_for_none() {
            return;
        }
        let packet = packet(PASSED, peer.session, message);
        let Some(way) = out.way(peer.session) else { return };
        way.bytes += packet.len();
        if way.bytes > OF_SESSION_MOST {
            // (It is not to be heard any further: there would be a gap.)
            way.peer.end("more is passed there than can be taken");
            out.sessions.retain(|way| way.peer.session != peer.session);
            out.waiting.retain(|waiting| waiting.passed != Some(peer.session));
            return;
        }
        out.waiting.push_back(Waiting { packet, fds: Vec::new(), passed: Some(peer.session) });
        out.flush();
    }

    /// A process that has what other nodes need is told to leave, and does once they have it. True if there is none, or it has.
    pub fn has_left(&self) -> bool {
        let mut out = self.lock();
        if out.carries == Carries::Connections || out.socket.is_none() {
            return true;
        }
        if !std::mem::replace(&mut out.leaves, true) {
            out.say(packet(LEAVE, Session::default(), &[]), Vec::new());
        }
        false
    }

    /// Is there something to be sent again?
    pub fn waits(&self) -> bool {
        let out = self.lock();
        out.socket.is_some() && !out.waiting.is_empty()
    }
}

impl Out {
    fn way(&mut self, session: Session) -> Option<&mut Way> {
        self.sessions.iter_mut().find(|way| way.peer.session == session)
    }

    fn waits_for_none(&self) -> bool {
        self.carries == Carries::Reflection && self.socket.is_none()
    }

    /// Without a process it waits for the next one.
    fn say(&mut self, packet: Vec<u8>, fds: Vec<Handed>) {
        if self.waits_for_none() {
            return;
        }
        self.bytes += packet.len();
        self.waiting.push_back(Waiting { packet, fds, passed: None });
        self.flush();
        if self.socket.is_none() && self.bytes > WAITING_MOST {
            self.forget("nothing carries there");
        }
    }

    fn flush(&mut self) {
        let Some(socket) = self.socket else { return };
        while let Some(Waiting { packet, fds, passed }) = self.waiting.front() {
            let numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
            // (Of one that has gone the service's thread hears.)
            if meet::send(socket, packet, &numbers) == Err(Errno::EAGAIN) {
                return;
            }
            let (bytes, passed) = (packet.len(), *passed);
            self.waiting.pop_front();
            match passed {
                None => self.bytes -= bytes,
                Some(session) => {
                    self.way(session).into_iter().for_each(|way| way.bytes -= bytes);
                }
            }
        }
    }

    /// What was said to the process is lost, or would be; and so are the sessions that it is of, where it carries connections.
    fn forget(&mut self, why: &str) {
        self.waiting.clear();
        self.bytes = 0;
        for way in &mut self.sessions {
            way.bytes = 0;
            if self.carries == Carries::Connections {
                way.peer.end(why);
            }
        }
    }
}

/// One of them.
pub struct Side {
    kept: Kept,
    settings: Vec<u8>,
    pub ways: Ways,
    /// Nodes to which a rail carries.
    up: HashSet<Session>,
    lost: u64,
    /// What sessions had no room for.
    unpassed: HashMap<Session, Unpassed>,
}

struct Unpassed {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Since when none of it went.
    since: Instant,
}

pub enum News {
    Started(u32),
    Lost(u32),
    KeeperLost,
    Log(String),
    /// Nothing is left of this one, which it carried.
    Over(u64),
}

impl Side {
    /// `settings`: what it is told first.
    pub fn new(kept: Kept, carries: Carries, settings: &impl serde::Serialize) -> Side {
        let side = Side {
            kept,
            settings: serde_json::to_vec(settings).unwrap_or_default(),
            ways: Ways::new(carries),
            up: HashSet::new(),
            lost: 0,
            unpassed: HashMap::new(),
        };
        side.begin(&mut side.ways.lock());
        side
    }

    pub fn keeper(&self) -> i32 {
        self.kept.keeper()
    }

    pub fn process(&self) -> Option<i32> {
        self.kept.process()
    }

    /// Is there something to be done before anything comes?
    pub fn waits(&self) -> bool {
        !self.unpassed.is_empty() || self.ways.waits()
    }

    pub fn pid(&self) -> Option<u32> {
        self.kept.pid()
    }

    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// To how many nodes a rail carries.
    pub fn nodes(&self) -> usize {
        self.up.len()
    }

    pub fn is_up(&self, session: Session) -> bool {
        self.up.contains(&session)
    }

    /// A process is there: it is told its settings, then what has been said since there was none; or of all sessions.
    fn begin(&self, out: &mut Out) {
        let settings = packet(SETTINGS, Session::default(), &self.settings);
        out.bytes += settings.len();
        out.waiting.push_front(Waiting { packet: settings, fds: Vec::new(), passed: None });
        (out.socket, out.leaves) = (self.kept.process(), false);
        if out.carries == Carries::Reflection {
            let joined: Vec<_> = out.sessions.iter().map(|way| joins(&way.peer)).collect();
            joined.into_iter().for_each(|packet| out.say(packet, Vec::new()));
        }
        out.flush();
    }

    /// Asks the process, if it has something to do, whether it goes on. Its pid, if it hangs.
    pub fn hangs(&mut self, is_busy: bool) -> Option<u32> {
        match if is_busy { self.kept.look() } else { Look::Fine } {
            Look::Fine => None,
            Look::Hangs(pid) => Some(pid),
            Look::Ask => {
                self.say(ASK, Session::default(), &[], Vec::new());
                None
            }
        }
    }

    fn say(&self, kind: u8, session: Session, body: &[u8], fds: Vec<Handed>) {
        self.ways.lock().say(packet(kind, session, body), fds);
    }

    pub fn hear_keeper(&mut self, tell: &mut dyn FnMut(News)) {
        let ways = self.ways.clone();
        // (The other thread is not to use the number of a socket that is replaced.)
        let mut out = ways.lock();
        let before = self.kept.pid();
        match self.kept.hear() {
            Word::None => {}
            Word::KeeperLost => tell(News::KeeperLost),
            Word::Started(pid) => {
                if let Some(before) = before {
                    self.clear(&mut out, before, tell);
                }
                self.begin(&mut out);
                tell(News::Started(pid));
            }
        }
    }

    /// Goes on with what had no room; hears what the process says.
    pub fn hear(&mut self, tell: &mut dyn FnMut(News)) {
        self.ways.lock().flush();
        if self.ways.lock().bytes > WAITING_MOST {
            return self.lose(tell);
        }
        self.pass_again();
        let mut bytes = vec![0; PACKET_BYTES];
        for _ in 0..WORDS_AT_ONCE {
            let Some(process) = self.kept.process() else { return };
            let len = match meet::receive(process, &mut bytes) {
                Err(Errno::EAGAIN) => return,
                Ok((len @ 1.., _)) => len,
                _ => return self.lose(tell),
            };
            match read(&bytes[..len]) {
                Some((PASS, session, message)) => self.pass(session, message.to_vec()),
                Some((UP, session, _)) => drop(self.up.insert(session)),
                Some((DOWN, session, _)) => drop(self.up.remove(&session)),
                Some((BROKEN, session, why)) => {
                    self.up.remove(&session);
                    self.end(session, &String::from_utf8_lossy(why));
                }
                Some((OVER, _, number)) => {
                    let number = number.try_into().map(u64::from_le_bytes);
                    number.into_iter().for_each(|number| tell(News::Over(number)));
                }
                Some((ANSWER, ..)) => self.kept.answered(),
                Some((LOG, _, text)) => tell(News::Log(String::from_utf8_lossy(text).into())),
                _ => {}
            }
        }
    }

    fn peer(&self, session: Session) -> Option<Peer> {
        self.ways.lock().way(session).map(|way| way.peer.clone())
    }

    /// One that does not read holds up itself.
    fn pass(&mut self, session: Session, mut message: Vec<u8>) {
        let Some(peer) = self.peer(session) else { return };
        self.ways.lock().carries.mark(&mut message);
        let passed = match self.unpassed.contains_key(&session) {
            true => Err(NotPassed::Full),
            false => peer.pass(&message),
        };
        match passed {
            Err(NotPassed::Full) => {
                let unpassed = self.unpassed.entry(session).or_insert_with(|| Unpassed {
                    messages: VecDeque::new(),
                    bytes: 0,
                    since: Instant::now(),
                });
                unpassed.bytes += message.len();
                unpassed.messages.push_back(message);
                if unpassed.bytes > UNPASSED_MOST {
                    self.unpassed.remove(&session);
                    peer.end("it does not read");
                }
            }
            Err(NotPassed::TooLong) => peer.end("a message that is too long"),
            Ok(()) | Err(NotPassed::Over) => {}
        }
    }

    fn pass_again(&mut self) {
        let ways = self.ways.clone();
        self.unpassed.retain(|session, unpassed| {
            let Some(peer) = ways.lock().way(*session).map(|way| way.peer.clone()) else {
                return false;
            };
            while let Some(message) = unpassed.messages.front() {
                if peer.pass(message) == Err(NotPassed::Full) {
                    let late = unpassed.since.elapsed() > READS_IN;
                    if late {
                        peer.end("it does not read");
                    }
                    return !late;
                }
                (unpassed.bytes, unpassed.since) = (unpassed.bytes - message.len(), Instant::now());
                unpassed.messages.pop_front();
            }
            false
        });
    }

    fn end(&self, session: Session, why: &str) {
        if let Some(peer) = self.peer(session) {
            peer.end(why);
        }
    }

    /// The process has died, or hangs.
    fn lose(&mut self, tell: &mut dyn FnMut(News)) {
        let (ways, pid) = (self.ways.clone(), self.kept.pid().unwrap_or_default());
        let mut out = ways.lock();
        self.kept.forget();
        self.clear(&mut out, pid, tell);
    }

    /// What was under way is lost with it.
    fn clear(&mut self, out: &mut Out, pid: u32, tell: &mut dyn FnMut(News)) {
        out.socket = None;
        out.forget("what carries has died there");
        self.up.clear();
        self.unpassed.clear();
        self.lost += 1;
        tell(News::Lost(pid));
    }

    /// A session is over.
    pub fn forget(&mut self, session: Session) {
        self.up.remove(&session);
        self.unpassed.remove(&session);
    }
}

/// What carries connections.
pub struct Fabric {
    pub side: Side,
    rails: Vec<String>,
    /// What is carried, for whom.
    lanes: HashMap<u64, From>,
    next: u64,
}

impl Fabric {
    pub fn new(kept: Kept, node: String, rails: Vec<super::RailSettings>) -> Fabric {
        let names = rails.iter().map(super::RailSettings::text).collect();
        let side = Side::new(kept, Carries::Connections, &Settings { node, rails });
        Fabric { side, rails: names, lanes: HashMap::new(), next: 0 }
    }

    pub fn status(&self) -> serde_json::Value {
        serde_json::json!({
            "pid": self.side.pid(), "connections": self.lanes.len(), "lost": self.side.lost(), "rails": self.rails,
            "nodes": self.side.nodes(),
        })
    }

    pub fn may(&self, from: &From, limits: &Limits) -> bool {
        let count = |is: &dyn Fn(&From) -> bool| self.lanes.values().filter(|of| is(of)).count();
        self.lanes.len() < limits.carried
            && count(&|of| of.user == from.user) < limits.carried_of_a_user
            && count(&|of| of == from) < limits.carried_of_a_pod
    }

    /// Does it carry anything?
    pub fn carries(&self) -> bool {
        !self.lanes.is_empty()
    }

    /// Hands an end over: its lifeline, and where it meets the other one.
    pub fn carry(
        &mut self,
        peer: &Peer,
        (lane, accepts): (u32, bool),
        from: From,
        ring_bytes: u64,
        fds: [Handed; 2],
    ) {
        let number = self.next;
        self.next += 1;
        let order = LaneOrder { number, lane, accepts, from: from.clone(), ring_bytes };
        let order = serde_json::to_vec(&order).unwrap_or_default();
        self.lanes.insert(number, from);
        self.side.say(LANE, peer.session, &order, fds.into());
    }

    /// The same of a channel of the native library's, with a socket to its program.
    pub fn carry_native(
        &mut self,
        peer: &Peer,
        (lane, offers): (u32, bool),
        from: From,
        socket: Handed,
    ) {
        let number = self.next;
        self.next += 1;
        let order = NativeOrder { number, lane, offers };
        let order = serde_json::to_vec(&order).unwrap_or_default();
        self.lanes.insert(number, from);
        self.side.say(NATIVE, peer.session, &order, vec![socket]);
    }

    /// Asks its process, if it carries anything, whether it goes on. Its pid, if it hangs.
    pub fn hangs(&mut self) -> Option<u32> {
        let carries = self.carries();
        self.side.hangs(carries)
    }

    /// Nothing is left of this one.
    pub fn over(&mut self, number: u64) {
        self.lanes.remove(&number);
    }

    /// Its process has died: how many it carried.
    pub fn lose(&mut self) -> usize {
        std::mem::take(&mut self.lanes).len()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cluster::tests::{given_up, joined};
    use std::os::fd::{FromRawFd, OwnedFd};

    fn pair() -> [OwnedFd; 2] {
        // SAFETY: made just now, ours alone.
        meet::pair().unwrap().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// With a process that reads nothing; the keeper's end of its socket, and that process's.
    pub fn fabric() -> (Fabric, [OwnedFd; 2]) {
        let [keeper, theirs] = pair();
        let [ours, process] = pair();
        meet::send(theirs.as_raw_fd(), b"{\"pid\":7}", &[ours.as_raw_fd()]).unwrap();
        let mut kept = Kept::by(keeper);
        assert_eq!(kept.hear(), Word::Started(7));
        (Fabric::new(kept, "a".into(), Vec::new()), [theirs, process])
    }

    /// That process has a rail to this node.
    pub fn is_up(fabric: &mut Fabric, peer: &Peer, process: &OwnedFd) {
        fabric.side.ways.joined(peer);
        meet::send(process.as_raw_fd(), &packet(UP, peer.session, &[]), &[]).unwrap();
        hear(fabric);
        assert!(fabric.side.is_up(peer.session));
    }

    fn hear(fabric: &mut Fabric) -> usize {
        let mut lost = 0;
        fabric.side.hear(&mut |news| lost += usize::from(matches!(news, News::Lost(..))));
        lost
    }

    #[test]
    fn a_session_that_passes_more_than_is_taken_is_given_up_alone() {
        let (mut fabric, [_keeper, process]) = fabric();
        let peers = joined(&["b", "c"]);
        peers.iter().for_each(|peer| fabric.side.ways.joined(peer));
        fabric.side.ways.passed(&peers[1], b"\0first");
        // (Of the other process.)
        fabric.side.ways.passed(&peers[1], &[REFLECTED]);
        for _ in 0..(2 * WAITING_MOST) >> 16 {
            fabric.side.ways.passed(&peers[0], &[0; (1 << 16) - 64]);
        }
        fabric.side.ways.passed(&peers[1], b"\0last");
        assert_eq!(hear(&mut fabric), 0, "the process is lost for all");
        assert_eq!(given_up(&peers[0]), ["b"]);
        assert!(fabric.side.ways.lock().bytes < WAITING_MOST);
        // What the other one has passed comes, all of it.
        let mut came = Vec::new();
        let mut bytes = vec![0; PACKET_BYTES];
        for _ in 0..10_000 {
            hear(&mut fabric);
            while let Ok((len, _)) = meet::receive(process.as_raw_fd(), &mut bytes) {
                if let Some((PASSED, session, message)) = read(&bytes[..len])
                    && session == peers[1].session
                {
                    came.push(message.to_vec());
                }
            }
        }
        assert_eq!(came, [&b"\0first"[..], b"\0last"]);
        assert!(!fabric.side.waits());
    }

    #[test]
    fn a_node_that_does_not_read_holds_up_no_other() {
        let (mut fabric, [_keeper, process]) = fabric();
        let peers = joined(&["b", "c"]);
        peers.iter().for_each(|peer| fabric.side.ways.joined(peer));
        let say = |fabric: &mut Fabric, peer: &Peer, message: &[u8]| {
            let packet = packet(PASS, peer.session, message);
            while meet::send(process.as_raw_fd(), &packet, &[]) == Err(Errno::EAGAIN) {
                hear(fabric);
            }
        };
        // (Nothing takes what is given to a session here.)
        say(&mut fabric, &peers[0], &[1; 60_000]);
        for _ in 0..QUEUE_BYTES / 60_000 {
            say(&mut fabric, &peers[0], &[1; 60_000]);
        }
        say(&mut fabric, &peers[1], b"here");
        hear(&mut fabric);
        assert!(fabric.side.unpassed.contains_key(&peers[0].session), "it still has room");
        assert_eq!(given_up(&peers[0]), [""; 0]);
        assert_eq!(peers[1].waiting(), ["here"], "it waits for another node to read");
        for _ in 0..2 * QUEUE_BYTES / 60_000 {
            say(&mut fabric, &peers[0], &[1; 60_000]);
        }
        hear(&mut fabric);
        assert_eq!(given_up(&peers[0]), ["b"]);
    }
}
