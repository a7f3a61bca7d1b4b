//! The service's sockets, and who comes to them (`ringlet::interconnect::node` has the messages).

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CString, OsStr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::node::{
    APART, Ask, CARRIED, COME, GREETING, MET, Message, SAME_USER, STATUS, TRUSTED,
};
use ringlet::reasons::Reason;
use ringlet_linux::meet::Received;
use ringlet_linux::service::{self, Kind};
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{fd, meet, proof, tcp};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use serde_json::json;

use crate::apart::{Apart, From, Handed};
use crate::carrier::Carriers;
use crate::carrier::earlier::Earlier;
use crate::carrier::keeper::{self, Kept};
use crate::carrier::share::News;
use crate::fabric::share::Side;
use crate::far::{Calling, Far};
use crate::hall::{Hall, Verdict};
use crate::journal::{Journal, say};
use crate::memory::{RINGS_OF_A_LANE, RINGS_OF_A_PAIR, Room};
use crate::mounts::Watch;
use crate::notes::{Kernel, Note, Notes};
use crate::offers::Calls;
use crate::policy::{Allowed, Limits, Otherwise, Policy};
use crate::reflect::share::Reflect;
use crate::reload::{self, Reload};
use crate::sandbox;
use crate::who::Who;

pub struct Options {
    /// Where `node.sock` is made, unless a socket is inherited.
    pub directory: PathBuf,
    /// The directory of the labels' directories.
    pub labels: PathBuf,
    pub policy: Policy,
    /// Where that was read, unless it is the usual place.
    pub file: Option<PathBuf>,
    /// The control group below which connections are noted; the root of the unified hierarchy by itself.
    pub group: Option<PathBuf>,
    /// What is noted there outlives the service.
    pub keeps_notes: bool,
    pub quiet: bool,
}

/// Who was greeted and says nothing goes.
const ASK_IN: Duration = Duration::from_secs(5);
const SWEEP: Duration = Duration::from_secs(1);
/// Who comes at once is served in turns of so many, between which those who wait are looked at.
const ACCEPTED_AT_ONCE: usize = 64;
const BACKLOG: i32 = 4096;
/// Tokens that are no guest's.
const KEEPER: u64 = u64::MAX;
const CARRIER: u64 = u64::MAX - 1;
const OTHER_NODES: u64 = u64::MAX - 2;
const FABRIC_KEEPER: u64 = u64::MAX - 3;
pub(crate) const FABRIC: u64 = u64::MAX - 4;
const REFLECT_KEEPER: u64 = u64::MAX - 5;
pub(crate) const REFLECT: u64 = u64::MAX - 6;
const RELOAD: u64 = u64::MAX - 7;
/// What has no room is given again so soon.
const AGAIN: Duration = Duration::from_millis(10);

pub(crate) enum State {
    Greeted,
    Waiting {
        cookie: u64,
        note: Note,
    },
    /// For an end on another host; it is found, and a channel to it is on its way.
    Seeking {
        note: Note,
    },
    Calling(Calling),
    /// Of the native library.
    Offering {
        service: String,
    },
    Asking(Calls),
}

pub(crate) struct Guest {
    pub lifeline: i32,
    pub who: Who,
    pub since: Instant,
    pub state: State,
}

#[derive(Default)]
struct User {
    guests: usize,
    /// Visits in the second that began then.
    visits: u32,
    second: Option<Instant>,
}

/// Where guests come, and the label that they have by that.
pub struct Listener {
    pub socket: OwnedFd,
    pub label: Option<String>,
}

pub struct Service<N> {
    pub(crate) policy: Policy,
    pub(crate) notes: N,
    group: PathBuf,
    events: OwnedFd,
    listeners: Vec<Listener>,
    pub(crate) guests: HashMap<u64, Guest>,
    next: u64,
    pub(crate) hall: Hall,
    users: HashMap<Option<u32>, User>,
    carriers: Option<Carriers>,
    earlier: Earlier,
    pub(crate) far: Option<Far>,
    pub(crate) apart: Apart,
    pub(crate) journal: Journal,
    mounts: Watch,
    reload: Option<Reload>,
    bounds: Bounds,
    /// The cluster of the policy that it was started with, as text.
    cluster: String,
    began: Instant,
    swept: Instant,
}

pub fn run(mut options: Options) -> anyhow::Result<()> {
    // A connection to another node that has gone is an error of the write. (rustls writes by writev, which has no flag for that.)
    // SAFETY: no handler, and no other thread yet that writes.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let mut listeners = inherited(&options.policy.labels)?;
    let signals = reload::hold_signal().context("signals")?;
    let others = if options.policy.cluster.is_some() { OF_CLUSTER } else { 0 };
    if options.policy.cluster.is_some() {
        lock_any();
    }
    let bounds = Bounds::beside(OF_OURS + others);
    if let Some(most) = bounds.bound(&mut options.policy) {
        say(&format!("warning: {}", is_bounded(most)));
    }
    let group = group_or_root(options.group)?;
    let (connections, keeps) = (options.policy.limits.connections, options.keeps_notes);
    let notes = Kernel::watch(&group, connections, keeps).with_context(|| {
        let more = if keeps { "; CAP_SYS_ADMIN, to find what was kept" } else { "" };
        format!("the kernel does not let us note how connections begin at {} (CAP_BPF and CAP_NET_ADMIN, Linux 5.15{more})", group.display())
    })?;
    let is_there = |listeners: &[Listener], label: Option<&String>| {
        listeners.iter().any(|listener| listener.label.as_ref() == label)
    };
    if !is_there(&listeners, None) {
        listeners.push(Listener { socket: listen(&options.directory)?, label: None });
    }
    for label in &options.policy.labels {
        if !is_there(&listeners, Some(label)) {
            make_directory(&options.labels, 0o700)?;
            let socket = listen(&options.labels.join(label))?;
            listeners.push(Listener { socket, label: Some(label.clone()) });
        }
    }
    let earlier = Earlier::find();
    let isolates = options.policy.otherwise == Otherwise::Isolated;
    let carriers = if isolates { Some(Carriers::new(Kept::start(keeper::CARRY)?)) } else { None };
    let told = cluster_text(&options.policy);
    let cluster = options.policy.cluster.take();
    let reflects = options.directory.join("reflect.sock");
    let far = cluster.map(|cluster| Far::start(cluster, reflects, options.quiet)).transpose()?;
    // Behind the cluster's thread, which takes SIGTERM: a thread that had not blocked it would end the process, and no other node would be told.
    let reload = reload::start(signals, options.file)?;
    sd_notify::notify(&[NotifyState::Ready]).context("the service manager is not reached")?;
    let directory_of = |listener: &Listener| Some(path_of(&listener.socket)?.parent()?.to_owned());
    let mounts = Watch::of(&listeners.iter().filter_map(directory_of).collect::<Vec<_>>());
    sandbox::enter(|| notes.answers())?;
    let mut service = Service::new(options.policy, notes, listeners)?;
    (service.group, service.journal) = (group, Journal::new(options.quiet));
    service.mounts = mounts;
    service.watch(reload.bell(), RELOAD)?;
    service.earlier = earlier;
    (service.reload, service.bounds, service.cluster) = (Some(reload), bounds, told);
    if let Some(far) = far {
        service.watch(far.post.bell().as_raw_fd(), OTHER_NODES)?;
        service.watch(far.fabric.side.keeper(), FABRIC_KEEPER)?;
        if let Some(reflect) = &far.reflect {
            service.watch(reflect.side.keeper(), REFLECT_KEEPER)?;
        }
        service.far = Some(far);
        service.watch_fabric()?;
        service.watch_reflect()?;
    }
    if let Some(carriers) = carriers {
        service.carry_by(carriers)?;
    }
    say("ready");
    loop {
        // With nobody here, and nothing carried, there is nothing to look after.
        let carries = service.carriers.as_ref().is_some_and(|carriers| carriers.counts().0 > 0)
            || service
                .far
                .as_ref()
                .is_some_and(|far| far.fabric.carries() || far.reflect.is_some());
        let idle = service.guests.is_empty() && service.users.is_empty() && !carries;
        let waits = service.far.as_ref().is_some_and(|far| far.sides().any(Side::waits));
        service.turn(match idle {
            _ if waits => Some(AGAIN),
            true => None,
            false => Some(SWEEP),
        })?;
    }
}

impl<N: Notes> Service<N> {
    pub fn new(policy: Policy, notes: N, listeners: Vec<Listener>) -> anyhow::Result<Service<N>> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (at, listener) in listeners.iter().enumerate() {
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(&events, &listener.socket, data, epoll::EventFlags::IN)?;
        }
        Ok(Service {
            next: listeners.len() as u64,
            policy,
            notes,
            group: PathBuf::new(),
            events,
            listeners,
            guests: HashMap::new(),
            hall: Hall::default(),
            users: HashMap::new(),
            carriers: None,
            earlier: Earlier::default(),
            far: None,
            apart: Apart::new()?,
            journal: Journal::new(true),
            mounts: Watch::default(),
            reload: None,
            bounds: Bounds::default(),
            cluster: String::new(),
            began: Instant::now(),
            swept: Instant::now(),
        })
    }

    /// How many are here, and how many of them wait.
    pub fn guests(&self) -> (usize, usize) {
        (self.guests.len(), self.hall.len())
    }

    /// Serves who is ready, or gets ready before so long.
    pub fn turn(&mut self, wait: Option<Duration>) -> anyhow::Result<()> {
        let wait = wait.and_then(|wait| rustix::event::Timespec::try_from(wait).ok());
        let mut ready = Vec::with_capacity(256);
        match epoll::wait(&self.events, rustix::buffer::spare_capacity(&mut ready), wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &ready {
            let token = event.data.u64();
            match token {
                OTHER_NODES => self.hear_of_others(),
                FABRIC_KEEPER | FABRIC => self.hear_of_fabric(token == FABRIC)?,
                REFLECT_KEEPER | REFLECT => self.hear_of_reflect(token == REFLECT)?,
                KEEPER | CARRIER => self.hear_of_carrier(token)?,
                RELOAD => self.reload(),
                _ if token < self.listeners.len() as u64 => self.accept(token as usize),
                _ => self.hear(token),
            }
        }
        if self.far.as_ref().is_some_and(|far| far.sides().any(Side::waits)) {
            self.hear_of_fabric(true)?;
            self.hear_of_reflect(true)?;
        }
        if self.swept.elapsed() >= SWEEP {
            self.swept = Instant::now();
            self.sweep();
        }
        Ok(())
    }

    /// Those whom the policy does not let share memory are carried by these.
    fn carry_by(&mut self, carriers: Carriers) -> anyhow::Result<()> {
        self.watch(carriers.kept.keeper(), KEEPER)?;
        if let Some(carrier) = carriers.kept.process() {
            self.watch(carrier, CARRIER)?;
        }
        self.carriers = Some(carriers);
        Ok(())
    }

    pub(crate) fn watch(&self, fd: i32, token: u64) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.events, borrowed(fd), data, epoll::EventFlags::IN)
    }

    fn hear_of_carrier(&mut self, token: u64) -> anyhow::Result<()> {
        let Some(carriers) = &mut self.carriers else { return Ok(()) };
        // (What is closed is watched no more.)
        let news = if token == KEEPER { carriers.hear_keeper() } else { carriers.hear_carrier() };
        match news {
            News::None => {}
            News::Started(pid) => {
                if let Some(carrier) = carriers.kept.process() {
                    self.watch(carrier, CARRIER)?;
                }
                self.journal.note("carrier-started", || format!("pid {pid}"));
            }
            News::Lost(pid, pairs) => self.journal.note("carrier-lost", || {
                format!("pid {pid}; what it carried goes on in the kernel: {pairs} connections")
            }),
            // Nothing starts another one: so does who has started us.
            News::KeeperLost => bail!("who starts carriers has died"),
        }
        Ok(())
    }

    /// The policy was read again: it holds for who comes from now on.
    fn reload(&mut self) {
        match self.reload.as_ref().and_then(Reload::take) {
            None => {}
            Some(Err(error)) => self.journal.note("policy-refused", || format!("{error:#}")),
            Some(Ok(policy)) => {
                let told = self.take_over(policy);
                self.journal.note("policy", || told);
            }
        }
    }

    /// What of it can't be changed while we run stays as it was, and is told, as is what has changed.
    fn take_over(&mut self, mut policy: Policy) -> String {
        let listened = |label: &String| {
            self.listeners.iter().any(|listener| listener.label.as_ref() == Some(label))
        };
        let limits = self.policy.limits;
        let isolates = policy.otherwise == Otherwise::Isolated;
        let later = [
            ("labels", !policy.labels.iter().all(listened)),
            ("otherwise", isolates && self.carriers.is_none()),
            ("connections", policy.limits.connections != limits.connections),
            ("cluster", cluster_text(&policy) != self.cluster),
        ];
        policy.labels.retain(listened);
        policy.limits.connections = limits.connections;
        let most = self.bounds.bound(&mut policy);
        policy.cluster = None;
        let changed = policy.differences(&self.policy);
        self.policy = policy;
        let later: Vec<_> = later.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect();
        let mut told = "read again".to_owned();
        for (how, what) in [("changed", changed), ("a restart is needed for", later)] {
            if !what.is_empty() {
                told += &format!("; {how}: {}", what.join(", "));
            }
        }
        if let Some(most) = most {
            told += &format!("; {}", is_bounded(most));
        }
        told
    }

    fn accept(&mut self, at: usize) {
        for _ in 0..ACCEPTED_AT_ONCE {
            if self.apart.is_full() {
                return std::thread::sleep(Duration::from_millis(1));
            }
            let listener = self.listeners[at].socket.as_raw_fd();
            match meet::accept_in_sight(listener) {
                Ok(came) => self.greet(came, at),
                Err(Errno::EAGAIN) => return,
                // KERNEL: who waits makes the listener readable again and again; those who are here go in time.
                Err(_) => return std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn greet(&mut self, came: i32, at: usize) {
        let caller = meet::credentials(came).ok();
        let (uid, limits) = (caller.map(|caller| caller.uid), self.policy.limits);
        let mut from = From { user: uid, pod: None };
        if self.guests.len() >= limits.guests {
            return self.refuse(came, from, "as many guests as there may be");
        }
        // (Before anything is read of it.)
        if !self.users.entry(uid).or_default().may_come(&limits) {
            return self.refuse(came, from, "a user with as many guests as it may have");
        }
        let Ok(came) = meet::guard_channel(came) else { return };
        let known = |label: &String| self.policy.labels.contains(label);
        let label = self.listeners[at].label.clone().filter(known);
        let Some(who) = Who::came(came, label.as_deref()) else {
            return self.let_go(from, came);
        };
        from = From::of(&who);
        if self.mounts.finds(who.pid, who.group.as_deref()) {
            self.journal.note("writable-mount", || {
                format!("{}: it may put another service in this one's place; mount the directory to be read only", who.text())
            });
        }
        // (What it would hand over would wait behind those, and its close not reach its peer.)
        if self.apart.hangs(&from) {
            return self.refuse(came, from, "a user or pod whose descriptors can't be closed");
        }
        meet::admit_descriptors(came, true);
        let greeting = Message { kind: GREETING, ..Message::default() };
        let data = epoll::EventData::new_u64(self.next);
        let greeted = meet::send(came, greeting.frame().as_bytes(), &[]).is_ok()
            && epoll::add(&self.events, borrowed(came), data, epoll::EventFlags::IN).is_ok();
        if !greeted {
            return self.let_go(from, came);
        }
        self.users.entry(uid).or_default().guests += 1;
        self.guests.insert(
            self.next,
            Guest { lifeline: came, who, since: Instant::now(), state: State::Greeted },
        );
        self.next += 1;
    }

    fn refuse(&mut self, came: i32, from: From, text: &'static str) {
        let apart = Message { kind: APART, reason: Reason::NodeFull as u32, ..Message::default() };
        let _ = meet::send(came, apart.frame().as_bytes(), &[]);
        self.let_go(from, came);
        self.journal.note(Reason::NodeFull.code(), || text.to_owned());
    }

    fn hear(&mut self, token: u64) {
        let Some(guest) = self.guests.get(&token) else { return };
        let mut bytes = [0; ROOM_BYTES];
        let mut said = match meet::take(guest.lifeline, &mut bytes) {
            Err(Errno::EAGAIN) => return,
            Ok(said) => said,
            Err(_) => return self.part(token),
        };
        let shown = shown_in(&mut said);
        let cookie = shown.first().and_then(|shown| cookie_of(shown.as_raw_fd()));
        let is_shown = !shown.is_empty();
        if is_shown {
            self.apart.close(From::of(&guest.who), shown);
        }
        // It has gone, or has sent more than anybody should; or who speaks is another than who came, of whom nothing is known.
        let pid = guest.who.pid;
        if said.caller.is_none_or(|caller| caller.pid != pid) || said.fds.truncated {
            return self.part(token);
        }
        let message = Message::read(&bytes[..said.len]).ok();
        match (message, &guest.state) {
            (Some(message), State::Greeted) if message.kind == COME && is_shown => {
                self.come(token, cookie, message.accepting != 0);
            }
            (Some(message), State::Greeted) if message.kind == STATUS => self.tell(token),
            (None, State::Greeted) if !is_shown => match Ask::read(&bytes[..said.len]) {
                Ok(asked) => self.asked(token, &asked),
                Err(_) => self.part(token),
            },
            // Nothing is to be said while it waits.
            _ => self.part(token),
        }
    }

    /// A guest has shown a connection, if this is the cookie of one.
    fn come(&mut self, token: u64, cookie: Option<u64>, accepting: bool) {
        let Some(cookie) = cookie else { return self.send_away(token, Reason::BadPeer) };
        let (verdict, replaced) = self.hall.come(&self.notes, token, cookie, accepting);
        if let Some(replaced) = replaced {
            self.part(replaced);
        }
        match verdict {
            Verdict::Apart(Reason::NoMirror) if self.seek(token, cookie) => {}
            Verdict::Apart(reason) => self.send_away(token, reason),
            Verdict::With(far) => self.introduce(token, far, cookie),
            Verdict::Wait => {
                let note = self.notes.of(cookie).unwrap_or_default();
                if let Some(guest) = self.guests.get_mut(&token) {
                    guest.state = State::Waiting { cookie, note };
                    guest.since = Instant::now();
                }
            }
        }
    }

    /// Two ends of one connection are here.
    fn introduce(&mut self, near: u64, far: u64, cookie: u64) {
        let (Some(one), Some(other)) = (self.guests.get(&near), self.guests.get(&far)) else {
            return self.part(near);
        };
        // (Its lifeline's end may not have been heard yet.)
        if !other.is_here() {
            self.part(far);
            let note = self.notes.of(cookie).unwrap_or_default();
            let (_, replaced) =
                self.hall.come(&self.notes, near, cookie, note.side == crate::notes::ACCEPTED);
            if let Some(guest) = self.guests.get_mut(&near) {
                guest.state = State::Waiting { cookie, note };
            }
            return replaced.into_iter().for_each(|token| self.part(token));
        }
        let about = |by: &str| format!("{} - {} ({by})", one.who.text(), other.who.text());
        match self.policy.allows(&one.who, &other.who) {
            Some(allowed) => {
                let about = about(allowed.by);
                match self.bring_together(near, far, allowed) {
                    Ok(()) => self.journal.note("met", || about),
                    Err(error) => {
                        let (outcome, _) = untold(error);
                        self.journal.note(outcome, || format!("{about}: error {}", error.0));
                    }
                }
            }
            None if self.carriers.is_some() && self.policy.otherwise == Otherwise::Isolated => {
                let about = about("isolated");
                match self.isolate(near, far) {
                    Ok(()) => self.journal.note("carried", || about),
                    Err((outcome, reason)) => {
                        self.journal.note(outcome, || about);
                        [near, far].into_iter().for_each(|token| self.say_apart(token, reason));
                    }
                }
            }
            None => {
                let about = about("policy");
                self.journal.note(Reason::Refused.code(), || about);
                for token in [near, far] {
                    self.say_apart(token, Reason::Refused);
                    self.part(token);
                }
                return;
            }
        }
        self.part(near);
        self.part(far);
    }

    fn bring_together(&self, near: u64, far: u64, allowed: Allowed) -> Result<(), Errno> {
        let (Some(one), Some(other)) = (self.guests.get(&near), self.guests.get(&far)) else {
            return Err(Errno::ENOENT);
        };
        // (Each end admits descriptors when it knows that it wants some.)
        let channel = self.guarded([&From::of(&one.who), &From::of(&other.who)])?;
        let flags = if allowed.same_user { SAME_USER | TRUSTED } else { 0 };
        // (If the second is not reached, the first finds a channel that has ended, and comes again.)
        tell(one, other, flags, &[channel[0].as_raw_fd()])
            .and_then(|()| tell(other, one, flags, &[channel[1].as_raw_fd()]))
    }

    /// Two connected sockets as of `guarded_pair`, and to whom each is handed; or from whom what comes by it is.
    pub(crate) fn guarded(&self, to: [&From; 2]) -> Result<[Handed; 2], Errno> {
        let [one, other] = guarded_pair()?;
        Ok([self.apart.handed(one, to[0]), self.apart.handed(other, to[1])])
    }

    /// The same of two that may not share memory: the carrier gets a lifeline to each. Else what is noted, and told to who is there.
    fn isolate(&mut self, near: u64, far: u64) -> Result<(), (&'static str, Reason)> {
        let for_reason = |reason: Reason| (reason.code(), reason);
        let (Some(one), Some(other), Some(carriers)) =
            (self.guests.get(&near), self.guests.get(&far), &self.carriers)
        else {
            return Err(for_reason(Reason::NoAdapter));
        };
        // The one that waited has said, and its note with it, which of the two accepted.
        let accepted = |guest: &Guest| match guest.state {
            State::Waiting { note, .. } => note.side == crate::notes::ACCEPTED,
            _ => false,
        };
        let ends = if accepted(other) { [one, other] } else { [other, one] };
        let from = ends.map(|guest| From::of(&guest.who));
        if carriers.kept.process().is_none() {
            return Err(for_reason(Reason::NoAdapter));
        }
        if !carriers.may([&from[0], &from[1]], &self.policy.limits) {
            return Err(for_reason(Reason::NodeFull));
        }
        let user = one.who.user;
        let flags = CARRIED | if user.is_some() && user == other.who.user { SAME_USER } else { 0 };
        let pair = |to: [usize; 2]| self.guarded(to.map(|end| &from[end]));
        let pairs = || Ok([pair([0, 1])?, pair([0, 0])?, pair([1, 1])?]);
        let [channel, one, other] = pairs().map_err(untold)?;
        let fd = |fd: &Handed| fd.as_raw_fd();
        let lifelines = [fd(&one[0]), fd(&other[0])];
        let limit = self.policy.limits.carried_ring_bytes;
        let carry =
            |carriers: &mut Carriers| carriers.carry([&from[0], &from[1]], lifelines, limit);
        match self.carriers.as_mut().map_or(Err(Errno::ENOENT), carry) {
            Ok(()) => {}
            Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(for_reason(Reason::NoAdapter)),
            Err(error) => return Err(untold(error)),
        }
        // (Who is not reached is gone for the carrier; and for the other end.)
        tell(ends[0], ends[1], flags, &[fd(&channel[0]), fd(&one[1])])
            .and_then(|()| tell(ends[1], ends[0], flags, &[fd(&channel[1]), fd(&other[1])]))
            .map_err(untold)
    }

    pub(crate) fn say_apart(&self, token: u64, reason: Reason) {
        if let Some(guest) = self.guests.get(&token) {
            let apart = Message { kind: APART, reason: reason as u32, ..Message::default() };
            let _ = meet::send(guest.lifeline, apart.frame().as_bytes(), &[]);
        }
    }

    pub(crate) fn send_away(&mut self, token: u64, reason: Reason) {
        self.say_apart(token, reason);
        if let Some(guest) = self.guests.get(&token) {
            self.journal.note(reason.code(), || guest.who.text());
        }
        self.part(token);
    }

    pub(crate) fn part(&mut self, token: u64) {
        let Some(guest) = self.guests.remove(&token) else { return };
        match guest.state {
            State::Greeted => {}
            State::Waiting { cookie, .. } => self.hall.leave(cookie, token),
            State::Seeking { note } => self.hall.seek_no_more(note.pair, token),
            State::Calling(calling) => calling.give_up(),
            State::Offering { .. } | State::Asking(_) => {}
        }
        let _ = epoll::delete(&self.events, borrowed(guest.lifeline));
        let uid = meet::credentials(guest.lifeline).ok().map(|caller| caller.uid);
        if let Some(user) = self.users.get_mut(&uid) {
            user.guests = user.guests.saturating_sub(1);
        }
        self.let_go(From::of(&guest.who), guest.lifeline);
    }

    /// A guest's socket, in whose queue may be what can't be closed.
    fn let_go(&self, from: From, came: i32) {
        // SAFETY: the kernel has made it for us, and nobody uses it any more.
        self.apart.close(from, vec![unsafe { OwnedFd::from_raw_fd(came) }]);
    }

    fn sweep(&mut self) {
        let wait = Duration::from_secs(self.policy.limits.wait_seconds);
        let late = |guest: &Guest| match guest.state {
            State::Greeted => guest.since.elapsed() > ASK_IN,
            State::Offering { .. } => false,
            State::Waiting { .. }
            | State::Seeking { .. }
            | State::Calling(_)
            | State::Asking(_) => guest.since.elapsed() > wait,
        };
        let late: Vec<u64> =
            self.guests.iter().filter(|(_, guest)| late(guest)).map(|(token, _)| *token).collect();
        late.into_iter().for_each(|token| self.part(token));
        self.users.retain(|_, user| user.guests > 0 || user.is_new());
        self.earlier.forget_ended();
        let Service { carriers, far, journal, .. } = self;
        if let Some(pid) = carriers.as_mut().and_then(Carriers::hangs) {
            journal.note("carrier-hangs", || format!("pid {pid}: it is ended"));
        }
        if let Some(pid) = far.as_mut().and_then(|far| far.fabric.hangs()) {
            journal.note("fabric-hangs", || format!("pid {pid}: it is ended"));
        }
        // (Programs ask it at any time.)
        let reflect = far.as_mut().and_then(|far| far.reflect.as_mut());
        if let Some(pid) = reflect.and_then(|reflect| reflect.side.hangs(true)) {
            journal.note("reflect-hangs", || format!("pid {pid}: it is ended"));
        }
    }

    /// What `ringlet node status` shows: to our own user and root.
    fn tell(&mut self, token: u64) {
        let Some(guest) = self.guests.get(&token) else { return };
        let caller = meet::credentials(guest.lifeline).ok();
        if caller.is_none_or(|caller| caller.uid != 0 && caller.uid != sys::geteuid()) {
            self.say_apart(token, Reason::Refused);
            return self.part(token);
        }
        let waiting = |guest: &Guest| match guest.state {
            State::Greeted | State::Calling(_) | State::Offering { .. } | State::Asking(_) => None,
            State::Waiting { note, .. } | State::Seeking { note } => Some(json!({
                "pid": guest.who.pid, "user": guest.who.user, "group": guest.who.shown_group(), "label": guest.who.label,
                "namespace": note.namespace, "accepted": note.side == crate::notes::ACCEPTED,
                "seconds": guest.since.elapsed().as_secs(),
            })),
        };
        let offered = |guest: &Guest| match &guest.state {
            State::Offering { service } => Some(json!({
                "service": service, "pid": guest.who.pid, "user": guest.who.user, "group": guest.who.shown_group(),
            })),
            _ => None,
        };
        const SHOWN: usize = 64;
        let told = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "seconds": self.began.elapsed().as_secs(),
            "notes": { "group": self.group, "connections": self.policy.limits.connections },
            "guests": self.guests.len() - 1,
            "waiting": self.hall.len(),
            "offered": self.guests.values().filter_map(offered).take(SHOWN).collect::<Vec<_>>(),
            "waiting_ends": self.guests.values().filter_map(waiting).take(SHOWN).collect::<Vec<_>>(),
            "carrier": self.carriers.as_ref().map(|carriers| {
                let (carried, lost) = carriers.counts();
                json!({ "pid": carriers.kept.pid(), "connections": carried, "lost": lost })
            }),
            "earlier_carriers": self.earlier.pids().take(SHOWN).collect::<Vec<_>>(),
            "cluster": self.far.as_ref().map(|far| far.cluster.status()),
            "fabric": self.far.as_ref().map(|far| far.fabric.status()),
            "reflect": self.far.as_ref().and_then(|far| far.reflect.as_ref()).map(Reflect::status),
            "decisions": self.journal.counts(),
            "last": self.journal.last().collect::<Vec<_>>(),
        });
        let _ = meet::send(guest.lifeline, told.to_string().as_bytes(), &[]);
        self.part(token);
    }
}

impl Guest {
    pub(crate) fn is_here(&self) -> bool {
        let over = libc::POLLHUP | libc::POLLRDHUP;
        self.who.lives() && fd::pending(self.lifeline, libc::POLLRDHUP) & over == 0
    }
}

impl User {
    fn is_new(&self) -> bool {
        self.second.is_some_and(|second| second.elapsed() < Duration::from_secs(1))
    }

    fn may_come(&mut self, limits: &Limits) -> bool {
        if !self.is_new() {
            (self.second, self.visits) = (Some(Instant::now()), 0);
        }
        self.visits = self.visits.saturating_add(1);
        self.visits <= limits.visits_of_a_user && self.guests < limits.guests_of_a_user
    }
}

/// Says to one that it has met the other.
fn tell(to: &Guest, of: &Guest, flags: u32, fds: &[i32]) -> Result<(), Errno> {
    let met = Message { kind: MET, flags, stranger: of.who.pid as u32, ..Message::default() };
    meet::send(to.lifeline, met.frame().as_bytes(), fds)
}

/// Two could not be told of each other: what is noted of that, and said to who is still there.
fn untold(error: Errno) -> (&'static str, Reason) {
    match error {
        Errno::EPIPE | Errno::ECONNRESET | Errno::ENOENT => ("gone", Reason::NoPeer),
        _ => (Reason::NodeFull.code(), Reason::NodeFull),
    }
}

/// Two connected sockets that admit no descriptors, and whose messages say who sends them.
pub(crate) fn guarded_pair() -> Result<[OwnedFd; 2], Errno> {
    let [one, other] = meet::pair()?;
    let one = meet::guard_channel(one).inspect_err(|_| sys::close(other))?;
    let other = meet::guard_channel(other).inspect_err(|_| sys::close(one))?;
    // SAFETY: made just now, ours alone.
    Ok([one, other].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// By which programs tell one that carries from others.
pub(crate) fn random_name() -> u64 {
    let mut name = [0; 8];
    sys::random(&mut name);
    u64::from_ne_bytes(name)
}

/// The descriptors that came with a message.
pub(crate) fn shown_in(said: &mut Received) -> Vec<OwnedFd> {
    // SAFETY: the kernel has just given it to us.
    let owned = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
    (0..said.fds.count).filter_map(|at| said.fds.take(at)).map(owned).collect()
}

/// The cookie of a TCP socket; `None` of anything else. KERNEL: none of these options waits for a socket's lock, which its owner may hold.
fn cookie_of(shown: i32) -> Option<u64> {
    if is_tcp(shown) { proof::cookie(shown).ok() } else { None }
}

pub(crate) fn is_tcp(shown: i32) -> bool {
    let is = |option, value| tcp::int_option(shown, libc::SOL_SOCKET, option) == Ok(value);
    let of_internet = is(libc::SO_DOMAIN, libc::AF_INET) || is(libc::SO_DOMAIN, libc::AF_INET6);
    of_internet && is(libc::SO_PROTOCOL, libc::IPPROTO_TCP)
}

/// A number of ours, for a call.
fn borrowed(fd: i32) -> BorrowedFd<'static> {
    // SAFETY: its owner closes it after the call.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Descriptors that a guest costs: its socket and its process; and, for a moment, what it shows and a channel. What is needed besides.
const OF_A_GUEST: usize = 3;
/// And what a pair costs the carrier, which has as many.
const OF_A_PAIR: usize = 8;
const OF_OURS: usize = 64;
/// What other nodes cost, and who connects in their place.
const OF_CLUSTER: usize = 384;

/// Devices have what is registered with them locked (all rings, and buffers for each node): as much as may be. What we start inherits the limit, and has no
/// right to raise it.
fn lock_any() {
    let limit = getrlimit(Resource::Memlock);
    let any = Rlimit { current: None, maximum: None };
    if setrlimit(Resource::Memlock, any).is_err() {
        let _ = setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, ..limit });
    }
}

fn is_bounded(most: usize) -> String {
    format!("{most} connections are carried at a time: the control group's memory is limited")
}

/// To be compared.
fn cluster_text(policy: &Policy) -> String {
    format!("{:?}", policy.cluster)
}

/// What there is of what a policy shares out.
#[derive(Default)]
struct Bounds {
    descriptors: Option<usize>,
    memory: Room,
}

impl Bounds {
    fn beside(ours: usize) -> Bounds {
        let descriptors = descriptors().map(|descriptors| descriptors.saturating_sub(ours));
        Bounds { descriptors, memory: Room::found() }
    }

    /// As many guests as there are descriptors for, half of them one user's at most: with none left nobody could even be refused. And as many
    /// connections are carried as there is memory for, which are told if that is fewer than asked: with none left the kernel would end what carries for all.
    fn bound(&self, policy: &mut Policy) -> Option<usize> {
        let limits = &mut policy.limits;
        if let Some(descriptors) = self.descriptors {
            let room = (descriptors / OF_A_GUEST).max(2);
            limits.guests = limits.guests.min(room);
            limits.carried = limits.carried.min(descriptors / OF_A_PAIR);
            limits.guests_of_a_user = limits.guests_of_a_user.min(room / 2);
        }
        let isolates = policy.otherwise == Otherwise::Isolated;
        let rings = if isolates { RINGS_OF_A_PAIR } else { RINGS_OF_A_LANE };
        let most = self.memory.connections(rings, limits.carried_ring_bytes);
        let carries = isolates || policy.cluster.is_some();
        if !carries || most >= limits.carried {
            return None;
        }
        limits.carried = most;
        Some(most)
    }
}

/// As many as we may have.
fn descriptors() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a struct rlimit.
    let got = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit)
    };
    (got == 0).then(|| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

fn group_or_root(group: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    group.or_else(root_group).context("no control groups (cgroup2) are mounted")
}

/// Takes away what services have kept at this control group; so many programs, and where.
pub fn forget_notes(group: Option<PathBuf>) -> anyhow::Result<(usize, PathBuf)> {
    let group = group_or_root(group)?;
    let count = Kernel::forget(&group).with_context(|| {
        format!("what is kept at {} can't be taken away (CAP_SYS_ADMIN)", group.display())
    })?;
    Ok((count, group))
}

/// Where the root of the unified hierarchy is mounted.
fn root_group() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut fields = place.split(' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        (kind.starts_with("cgroup2 ") && root == "/").then(|| PathBuf::from(at))
    })
}

/// One in which nobody but root and us can put another socket in the place of ours, to which programs show their connections.
fn make_directory(path: &Path, mode: u32) -> anyhow::Result<()> {
    let shown = || path.display().to_string();
    std::fs::create_dir_all(path).with_context(shown)?;
    let owner = std::fs::metadata(path).with_context(shown)?.uid();
    ensure!(
        owner == 0 || owner == sys::geteuid(),
        "{} belongs to user {owner}, who could put another service there",
        shown()
    );
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).with_context(shown)
}

/// By the protocol of systemd: the sockets that were handed over, a label's under its name (`FileDescriptorName=`). Whatever else we were started
/// with is closed.
fn inherited(labels: &BTreeSet<String>) -> anyhow::Result<Vec<Listener>> {
    let handed = sd_notify::listen_fds_with_names().context("LISTEN_FDS")?;
    const FIRST: u32 = 3;
    // SAFETY: nobody has opened anything yet but who has started us.
    unsafe { libc::syscall(libc::SYS_close_range, FIRST + handed.len() as u32, u32::MAX, 0) };
    let listener = |(fd, name): (i32, String)| {
        let listens = tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1);
        ensure!(
            meet::is_ours_in_kind(fd) && listens,
            "the socket that was inherited is not a listening Unix socket of sequenced packets"
        );
        // SAFETY: it was handed over to us.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::ioctl_fionbio(&socket, true)?;
        meet::admit_descriptors(fd, false);
        if let Some(path) = path_of(&socket) {
            mark(&path, &socket);
        }
        Ok(Listener { socket, label: labels.contains(&name).then_some(name) })
    };
    handed.map(listener).collect()
}

fn listen(directory: &Path) -> anyhow::Result<OwnedFd> {
    make_directory(directory, 0o755)?;
    let path = directory.join("node.sock");
    let shown = || path.display().to_string();
    let address = SocketAddrUnix::new(&path).with_context(shown)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let make = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    // What a service that was killed has left behind is taken away; one that answers is not.
    match rustix::net::connect(make()?, &address) {
        Ok(()) | Err(rustix::io::Errno::AGAIN) => {
            bail!("{}: another node service is there", shown())
        }
        Err(rustix::io::Errno::CONNREFUSED) => std::fs::remove_file(&path).with_context(shown)?,
        Err(_) => {}
    }
    let socket = make()?;
    // (Not by its path: who may write to the directory could put a link to another file there meanwhile.)
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o111));
    let bound = rustix::net::bind(&socket, &address);
    rustix::process::umask(before);
    bound.with_context(shown)?;
    // Nobody has anything to hand over before it was greeted.
    meet::admit_descriptors(socket.as_raw_fd(), false);
    rustix::net::listen(&socket, BACKLOG).with_context(shown)?;
    mark(&path, &socket);
    Ok(socket)
}

/// Says by a mark that it is the host's own, as which programs in containers believe no other.
fn mark(path: &Path, listener: &OwnedFd) {
    let marked = match CString::new(path.as_os_str().as_bytes()) {
        Ok(name) => service::mark(&name, listener.as_raw_fd(), Kind::Node),
        Err(_) => Err(Errno::EINVAL),
    };
    if let Err(error) = marked {
        let error = std::io::Error::from_raw_os_error(error.0);
        say(&format!(
            "warning: {} can't be marked as the host's own ({error}; it takes CAP_SYS_ADMIN to begin with): no program in a container believes that it is",
            path.display()
        ));
    }
}

/// Where a socket that was inherited lies.
fn path_of(socket: &OwnedFd) -> Option<PathBuf> {
    let address = SocketAddrUnix::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    Some(PathBuf::from(OsStr::from_bytes(address.path_bytes()?)))
}
