//! The process as the service knows it. Two of its threads speak to it: the cluster's, of sessions and what was passed there, and the service's, of lanes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringlet_linux::meet;
use ringlet_linux::sys::Errno;

use super::{
    BROKEN, DOWN, ENDED, JOINED, LANE, LOG, LaneOrder, NATIVE, NativeOrder, OVER, PACKET_BYTES,
    PASS, PASSED, SETTINGS, Settings, UP, packet, read,
};
use crate::apart::From;
use crate::carrier::keeper::{Kept, Word};
use crate::cluster::{NotPassed, Peer, Session};
use crate::policy::Limits;

/// What may wait for a process that does not read: then it is given up.
const WAITING_MOST: usize = 4 << 20;
const WORDS_AT_ONCE: usize = 64;
/// A node that reads nothing for so long holds up what is passed to others no longer.
const READS_IN: Duration = Duration::from_millis(500);

/// What both threads have.
#[derive(Clone, Default)]
pub struct Ways(Arc<Mutex<Out>>);

#[derive(Default)]
struct Out {
    socket: Option<i32>,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    bytes: usize,
    sessions: Vec<Peer>,
}

impl Ways {
    fn lock(&self) -> MutexGuard<'_, Out> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn joined(&self, peer: &Peer) {
        let mut out = self.lock();
        out.sessions.push(peer.clone());
        out.say(packet(JOINED, peer.session, &[]), Vec::new());
    }

    pub fn ended(&self, peer: &Peer) {
        let mut out = self.lock();
        out.sessions.retain(|other| other.session != peer.session);
        out.say(packet(ENDED, peer.session, &[]), Vec::new());
    }

    pub fn passed(&self, peer: &Peer, message: &[u8]) {
        self.lock().say(packet(PASSED, peer.session, message), Vec::new());
    }

    /// Is there something to be sent again?
    pub fn waits(&self) -> bool {
        let out = self.lock();
        out.socket.is_some() && !out.waiting.is_empty()
    }
}

impl Out {
    /// Without a process it waits for the next one.
    fn say(&mut self, packet: Vec<u8>, fds: Vec<OwnedFd>) {
        self.bytes += packet.len();
        self.waiting.push_back((packet, fds));
        self.flush();
        if self.socket.is_none() && self.bytes > WAITING_MOST {
            self.forget("nothing carries there");
        }
    }

    fn flush(&mut self) {
        let Some(socket) = self.socket else { return };
        while let Some((packet, fds)) = self.waiting.front() {
            let numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
            // (Of one that has gone the service's thread hears.)
            if meet::send(socket, packet, &numbers) == Err(Errno::EAGAIN) {
                return;
            }
            self.bytes -= packet.len();
            self.waiting.pop_front();
        }
    }

    /// What was said to the process is lost, or would be: and so are the sessions that it is of.
    fn forget(&mut self, why: &str) {
        self.waiting.clear();
        self.bytes = 0;
        self.sessions.iter().for_each(|peer| peer.end(why));
    }
}

pub struct Fabric {
    kept: Kept,
    settings: Settings,
    pub ways: Ways,
    /// Nodes to which a rail carries.
    up: HashSet<Session>,
    /// What is carried, for whom.
    lanes: HashMap<u64, From>,
    next: u64,
    lost: u64,
    /// What a session had no room for.
    unpassed: Option<(Session, Vec<u8>, Instant)>,
}

pub enum News {
    Started(u32),
    Lost(u32, usize),
    KeeperLost,
    Log(String),
}

impl Fabric {
    pub fn new(kept: Kept, node: String, rails: Vec<super::RailSettings>) -> Fabric {
        let fabric = Fabric {
            kept,
            settings: Settings { node, rails },
            ways: Ways::default(),
            up: HashSet::new(),
            lanes: HashMap::new(),
            next: 0,
            lost: 0,
            unpassed: None,
        };
        fabric.begin(&mut fabric.ways.lock());
        fabric
    }

    pub fn keeper(&self) -> i32 {
        self.kept.keeper()
    }

    pub fn process(&self) -> Option<i32> {
        self.kept.process()
    }

    /// Is there something to be done before anything comes?
    pub fn waits(&self) -> bool {
        self.unpassed.is_some() || self.ways.waits()
    }

    pub fn status(&self) -> serde_json::Value {
        let rails: Vec<String> =
            self.settings.rails.iter().map(super::RailSettings::text).collect();
        serde_json::json!({
            "pid": self.kept.pid(), "connections": self.lanes.len(), "lost": self.lost, "rails": rails,
            "nodes": self.up.len(),
        })
    }

    pub fn is_up(&self, session: Session) -> bool {
        self.up.contains(&session)
    }

    pub fn may(&self, from: &From, limits: &Limits) -> bool {
        let count = |is: &dyn Fn(&From) -> bool| self.lanes.values().filter(|of| is(of)).count();
        self.lanes.len() < limits.carried
            && count(&|of| of.user == from.user) < limits.carried_of_a_user
            && count(&|of| of == from) < limits.carried_of_a_pod
    }

    /// A process is there: it is told its settings, then what has been said since there was none.
    fn begin(&self, out: &mut Out) {
        let settings = serde_json::to_vec(&self.settings).unwrap_or_default();
        let settings = packet(SETTINGS, Session::default(), &settings);
        out.bytes += settings.len();
        out.waiting.push_front((settings, Vec::new()));
        out.socket = self.kept.process();
        out.flush();
    }

    /// Hands an end over: its lifeline, and where it meets the other one.
    pub fn carry(
        &mut self,
        peer: &Peer,
        (lane, accepts): (u32, bool),
        from: From,
        ring_bytes: u64,
        fds: [OwnedFd; 2],
    ) {
        let number = self.next;
        self.next += 1;
        let order = LaneOrder { number, lane, accepts, from: from.clone(), ring_bytes };
        let order = serde_json::to_vec(&order).unwrap_or_default();
        self.lanes.insert(number, from);
        self.ways.lock().say(packet(LANE, peer.session, &order), fds.into());
    }

    /// The same of a channel of the native library's, with a socket to its program.
    pub fn carry_native(
        &mut self,
        peer: &Peer,
        (lane, offers): (u32, bool),
        from: From,
        socket: OwnedFd,
    ) {
        let number = self.next;
        self.next += 1;
        let order = NativeOrder { number, lane, offers };
        let order = serde_json::to_vec(&order).unwrap_or_default();
        self.lanes.insert(number, from);
        self.ways.lock().say(packet(NATIVE, peer.session, &order), vec![socket]);
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
        if let Some((session, message, since)) = self.unpassed.take() {
            if since.elapsed() > READS_IN {
                self.end(session, "it does not read");
            } else {
                self.pass(session, message, since);
            }
            if self.unpassed.is_some() {
                // KERNEL: what waits makes the process's socket readable again and again.
                return std::thread::sleep(Duration::from_millis(1));
            }
        }
        let mut bytes = vec![0; PACKET_BYTES];
        for _ in 0..WORDS_AT_ONCE {
            let Some(process) = self.kept.process().filter(|_| self.unpassed.is_none()) else {
                return;
            };
            let len = match meet::receive(process, &mut bytes) {
                Err(Errno::EAGAIN) => return,
                Ok((len @ 1.., _)) => len,
                _ => return self.lose(tell),
            };
            match read(&bytes[..len]) {
                Some((PASS, session, message)) => {
                    self.pass(session, message.to_vec(), Instant::now());
                }
                Some((UP, session, _)) => drop(self.up.insert(session)),
                Some((DOWN, session, _)) => drop(self.up.remove(&session)),
                Some((BROKEN, session, why)) => {
                    self.up.remove(&session);
                    self.end(session, &String::from_utf8_lossy(why));
                }
                Some((OVER, _, number)) => {
                    let number = number.try_into().map(u64::from_le_bytes);
                    number.ok().and_then(|number| self.lanes.remove(&number));
                }
                Some((LOG, _, text)) => tell(News::Log(String::from_utf8_lossy(text).into())),
                _ => {}
            }
        }
    }

    fn peer(&self, session: Session) -> Option<Peer> {
        let out = self.ways.lock();
        out.sessions.iter().find(|peer| peer.session == session).cloned()
    }

    fn pass(&mut self, session: Session, message: Vec<u8>, since: Instant) {
        let Some(peer) = self.peer(session) else { return };
        match peer.pass(&message) {
            Err(NotPassed::Full) => self.unpassed = Some((session, message, since)),
            Err(NotPassed::TooLong) => peer.end("a message that is too long"),
            Ok(()) | Err(NotPassed::Over) => {}
        }
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

    /// With it all sessions are lost, for it knew what belongs to them.
    fn clear(&mut self, out: &mut Out, pid: u32, tell: &mut dyn FnMut(News)) {
        out.socket = None;
        out.forget("what carries has died there");
        self.up.clear();
        self.unpassed = None;
        self.lost += 1;
        tell(News::Lost(pid, std::mem::take(&mut self.lanes).len()));
    }

    /// A session is over.
    pub fn forget(&mut self, session: Session) {
        self.up.remove(&session);
    }
}
