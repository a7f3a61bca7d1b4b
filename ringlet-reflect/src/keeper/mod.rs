//! A host's keeper: it makes the memory of regions and locks, and says who may map it. On one host it reads nothing of what is written there but who holds
//! a lock; in a cluster it passes on what its programs write, and writes what they receive ([`cluster`]).
//!
//! One thread answers all, and waits for nobody: a question is one packet, and so is its answer. Who asks otherwise, or does not read, is out. A process
//! has gone when its socket has: what it had is given back then, and its locks are nobody's.

mod cluster;
mod door;
mod end;
mod show;
mod space;
mod transfer;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ringlet_core::sync::Ordering;
use ringlet_linux::sys::Errno;
use ringlet_linux::{fd, futex, meet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::PAGE_BYTES;
use crate::log::{self, Reader};
use crate::memory::{self, Mapping};
use crate::network::Network;
use crate::protocol::{ANSWER_BYTES, ASK_BYTES, Answer, Ask, VERSION, page};
pub use crate::registry::Limits;
use crate::registry::{Act, Attached, Bounds, Direction, Effect, GROUPS_MOST, Registry};
use crate::status::Status;
use cluster::Cluster;
pub use door::listen;
pub(crate) use door::lock_of;
use space::{Memory, Words, forget};

/// Programs that are with it at a time.
const MEMBERS_MOST: usize = 4096;
/// Regions and sets that are there at a time: mappings of a process are few.
const MADE_MOST: usize = 16_384;
/// Descriptors of a region, of a program, and what the keeper needs beside.
const DESCRIPTORS: usize = 4;
const DESCRIPTORS_BESIDE: usize = 64;
/// Pages of which one program may be told.
const WATCHES_MOST: usize = 1 << 16;
/// What one user but root may take of the places for programs.
const SHARE_OF_A_USER: usize = 4;
/// What is given back while nothing can be.
const LATER_MOST: usize = 1 << 16;
/// The same of one program, behind what it has written.
const LATER_OF_ONE_MOST: usize = 1 << 12;
/// Packets of one program that are answered before others have their turn.
const AT_ONCE: usize = 64;
/// One that was started by a program ends when for so long nobody was there.
const IDLE: Duration = Duration::from_secs(5);

/// Where it is found, and for how long it stays.
pub struct Options<'a> {
    /// A socket that all users can reach; otherwise it is this user's, by a name.
    pub path: Option<&'a Path>,
    /// What listens there already (`listen`).
    pub listener: Option<OwnedFd>,
    pub limits: Limits,
    /// Though nobody is there.
    pub stays: bool,
    /// In a cluster: once this is true it leaves in order, and returns.
    pub leaves: Option<&'a AtomicBool>,
    pub membership: Membership,
}

/// What all hosts of a cluster have to say alike.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Names of the hosts that may begin it; the first one decides where half of them are there.
    pub founders: Vec<String>,
    /// A host of which nothing was heard for so long is dead.
    pub silent: Duration,
    pub beat: Duration,
}

impl Default for Membership {
    fn default() -> Membership {
        let (silent, beat) = (Duration::from_secs(2), Duration::from_millis(200));
        Membership { founders: Vec::new(), silent, beat }
    }
}

impl Default for Options<'_> {
    fn default() -> Self {
        let most = 1 << 34;
        let limits = Limits { all: most, received: most };
        Options {
            path: None,
            listener: None,
            limits,
            stays: false,
            leaves: None,
            membership: Membership::default(),
        }
    }
}

struct Client {
    socket: OwnedFd,
    uid: u32,
    /// Its process: a child may have the socket still when it has gone.
    process: Option<OwnedFd>,
    /// Once it has said hello.
    member: Option<u32>,
    /// Region and page, and how often.
    watches: BTreeMap<(u32, u32), u32>,
    /// In a cluster: what it transmits, and what it rings when we sleep.
    log: Option<Reader>,
    bell: Option<OwnedFd>,
    /// What it asks next is behind what it has written up to here.
    drains: Option<u64>,
    /// What it gives back once all that it has written up to there has been passed on, and nothing is to be undone.
    later: VecDeque<(u64, Act)>,
    waits: Waits,
    /// What it was told is not to be had, with this tag, may come out of the order yet: then it is undone before anything else that it asks.
    undoes: Option<u64>,
    is_over: bool,
}

/// For what a program's question waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    No,
    /// The order, with this tag.
    Delivery {
        tag: u64,
        gives_back: bool,
    },
    /// Everybody has this payload of ours.
    Settled(u64),
}

/// (By their numbers in the registry.)
struct Keeper {
    registry: Registry,
    /// What this host allows, whatever others do.
    bounds: Bounds,
    memories: BTreeMap<u32, Memory>,
    words: BTreeMap<u32, Words>,
    clients: Vec<Client>,
    clients_most: usize,
    /// Listens by a name that all users can reach, and is not theirs.
    is_own: bool,
    /// What all programs may see at any time: error counts of rails, and what is told without a question.
    page: (OwnedFd, Mapping),
    watched: end::Watched,
    barriers: bool,
    name: String,
    cluster: Option<Cluster>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.watched.end(&self.page.1);
    }
}

/// Binds, calls `ready`, and serves. Returns when it is over: nobody has been there for a while, if it does not stay.
pub fn keep(options: &Options, ready: impl FnOnce()) -> std::io::Result<()> {
    let (mut keeper, listener) = Keeper::new(options, None)?;
    ready();
    let mut seen = Instant::now();
    loop {
        if !keeper.clients.is_empty() {
            seen = Instant::now();
        }
        if !options.stays && seen.elapsed() >= IDLE {
            return Ok(());
        }
        keeper.look(&listener, Duration::from_secs(1));
    }
}

/// The same as one host of a cluster, by a network to the others' keepers. Returns when it has left in order; an error if the others have declared this run
/// of it dead, or it can't go on for another reason: then it is to begin anew, as another run.
pub fn keep_in(
    options: &Options,
    network: Box<dyn Network>,
    ready: impl FnOnce(),
) -> std::io::Result<()> {
    let cluster = Cluster::new(network, &options.membership);
    let (mut keeper, listener) = Keeper::new(options, Some(cluster))?;
    ready();
    keeper.keep_in_cluster(&listener, options.leaves)
}

/// Can all processes that write be made to pass a barrier?
pub(crate) fn register_barriers() -> bool {
    barrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED)
}

fn barrier(command: libc::c_int) -> bool {
    // SAFETY: no memory is passed.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0
    }
}

impl Client {
    fn new(socket: OwnedFd, uid: u32, process: Option<OwnedFd>) -> Client {
        Client {
            socket,
            uid,
            process,
            member: None,
            watches: BTreeMap::new(),
            log: None,
            bell: None,
            drains: None,
            later: VecDeque::new(),
            waits: Waits::No,
            undoes: None,
            is_over: false,
        }
    }
}

impl Keeper {
    fn new(options: &Options, cluster: Option<Cluster>) -> std::io::Result<(Keeper, OwnedFd)> {
        let descriptors = door::widen();
        let listener = match &options.listener {
            Some(listener) => listener.try_clone()?,
            None => door::listen(options.path)?,
        };
        let no_memory = |status: Status| std::io::Error::other(status.about());
        let shared = memory::make(page::BYTES).map_err(no_memory)?;
        let mapped = memory::map(&shared, page::BYTES, true).map_err(no_memory)?;
        mapped.word(page::RAILS).store(1, Ordering::Relaxed);
        mapped.word(page::ACTIVE).store(1, Ordering::Relaxed);
        let name = match &cluster {
            Some(cluster) => cluster.me.node.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        };
        // (Half of what there is for those who come, a socket and a process of each, and a log and a bell; nobody who makes regions keeps others out.)
        let of_each = if cluster.is_some() { 8 } else { 4 };
        let made_most = (descriptors / 2).saturating_sub(DESCRIPTORS_BESIDE) / DESCRIPTORS;
        let bounds = Bounds {
            limits: options.limits,
            made_most: MADE_MOST.min(made_most),
            is_shared: options.path.is_some(),
        };
        let mut registry = Registry::new(bounds);
        if cluster.is_none() {
            registry.hosts.insert(0, (name.clone(), 0));
        }
        let keeper = Keeper {
            registry,
            bounds,
            memories: BTreeMap::new(),
            words: BTreeMap::new(),
            clients: Vec::new(),
            clients_most: MEMBERS_MOST.min(descriptors / of_each),
            is_own: options.path.is_none(),
            watched: end::Watched::new(&mapped),
            page: (shared, mapped),
            barriers: register_barriers(),
            name,
            cluster,
        };
        Ok((keeper, listener))
    }

    /// Answers those who ask, and lets those in who come; sleeps until there is one, at most so long. True if there was any.
    fn look(&mut self, listener: &OwnedFd, timeout: Duration) -> bool {
        let has_room = self.clients.len() < self.clients_most;
        let first = if has_room { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(listener, first)];
        let is_stopped = self.cluster.as_ref().is_some_and(|cluster| cluster.stopped.is_some());
        for client in &self.clients {
            let undoes = client.undoes.is_some() && !is_stopped;
            let hears = client.waits == Waits::No && client.drains.is_none() && !undoes;
            let events = if hears { PollFlags::IN } else { PollFlags::RDHUP };
            fds.push(PollFd::new(&client.socket, events));
            // (In place of one that has none its socket again.)
            let none = |own: &Option<OwnedFd>| own.is_none().then_some(PollFlags::empty());
            for other in [&client.process, &client.bell] {
                let events = none(other).unwrap_or(PollFlags::IN);
                fds.push(PollFd::new(other.as_ref().unwrap_or(&client.socket), events));
            }
        }
        let own = fds.len();
        let mut of_network: Vec<RawFd> = Vec::new();
        if let Some(cluster) = &self.cluster {
            cluster.network.descriptors(&mut |fd| of_network.push(fd.as_raw_fd()));
        }
        for fd in &of_network {
            // SAFETY: the network has it open until it is polled next, which is behind this.
            #[allow(unsafe_code)]
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let time = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let _ = poll(&mut fds, Some(&time));
        let ready: Vec<bool> = fds[..own].iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut any = false;
        for at in (0..self.clients.len()).rev() {
            let [socket, process, bell] = [1, 2, 3].map(|which| ready[which + 3 * at]);
            any |= socket || process || bell;
            let client = &mut self.clients[at];
            if let (true, Some(bell)) = (bell, &client.bell) {
                fd::drain(bell.as_raw_fd());
            }
            // (Of one that is not heard now only the end is told.)
            let undoes = client.undoes.is_some() && !is_stopped;
            let is_end = client.waits != Waits::No || client.drains.is_some() || undoes;
            client.is_over |= process && client.process.is_some() || socket && is_end;
            if socket && !client.is_over {
                self.serve(at);
            }
            if self.clients[at].is_over {
                let client = self.clients.swap_remove(at);
                self.gone(client);
            }
        }
        if ready[0] {
            self.accept(listener.as_fd());
        }
        any
    }

    fn accept(&mut self, listener: BorrowedFd) {
        let Ok(socket) = meet::accept(listener.as_raw_fd()) else {
            // KERNEL: who waits makes the listener readable again and again.
            return std::thread::sleep(Duration::from_millis(1));
        };
        let socket = memory::own(socket);
        let Ok(uid) = meet::credentials(socket.as_raw_fd()).map(|peer| peer.uid) else { return };
        let of_user = self.clients.iter().filter(|client| client.uid == uid).count();
        let share = self.clients_most / SHARE_OF_A_USER;
        let may = uid == 0 || of_user < share && (!self.is_own || meet::is_our_user(uid));
        match door::process_of(&socket) {
            Ok(process) if may => self.clients.push(Client::new(socket, uid, process)),
            _ => meet::part(socket.into_raw_fd()),
        }
    }

    fn serve(&mut self, at: usize) {
        for _ in 0..AT_ONCE {
            if !self.may_ask(at) {
                return;
            }
            let mut bytes = [0; ASK_BYTES];
            // (Descriptors that came are closed: nobody has any to give.)
            let goes_on = match meet::receive(self.clients[at].socket.as_raw_fd(), &mut bytes) {
                Ok((length, _)) if length > 0 => self.serve_one(at, &bytes[..length]),
                Err(Errno::EAGAIN) => return,
                _ => None,
            };
            self.clients[at].is_over |= goes_on.is_none();
            if self.clients[at].is_over || goes_on == Some(false) {
                return;
            }
        }
    }

    /// What a program asks is behind what it has written, and behind what it has asked before; but where nothing goes on it is answered all the same.
    fn may_ask(&mut self, at: usize) -> bool {
        let is_stopped = self.cluster.as_ref().is_some_and(|cluster| cluster.stopped.is_some());
        let client = &mut self.clients[at];
        if client.waits != Waits::No || client.undoes.is_some() && !is_stopped {
            return false;
        }
        let Some(log) = &client.log else { return true };
        let up_to = client.drains.get_or_insert_with(|| log.tail());
        let may = is_stopped || client.later.is_empty() && log.has_taken(*up_to);
        if may {
            client.drains = None;
        }
        may
    }

    /// None if who asks is out; false if that was all for this turn.
    fn serve_one(&mut self, at: usize, question: &[u8]) -> Option<bool> {
        let ask = serde_json::from_slice::<Ask>(question).ok()?;
        // (What takes long to tell is told to all by turns.)
        let is_long = ask == Ask::State;
        if let Err(status) = self.take(at, ask) {
            self.reply(at, &Answer::No(status), &[]);
        }
        Some(!is_long)
    }

    /// Who does not read is out.
    fn reply(&mut self, at: usize, answer: &Answer, memory: &[OwnedFd]) {
        let fds: Vec<i32> = memory.iter().map(AsRawFd::as_raw_fd).collect();
        let text = serde_json::to_vec(answer).unwrap_or_default();
        let fits = !text.is_empty() && text.len() <= ANSWER_BYTES;
        let client = &mut self.clients[at];
        client.waits = Waits::No;
        client.is_over |= !fits || meet::send(client.socket.as_raw_fd(), &text, &fds).is_err();
    }

    /// Answers at once, or has the question become an act. An error is the answer.
    fn take(&mut self, at: usize, ask: Ask) -> Result<(), Status> {
        let member = match (self.clients[at].member, &ask) {
            (None, Ask::Hello { version: VERSION }) => {
                let who = self.who(at)?;
                return self.act(at, who);
            }
            (Some(member), _) => member,
            // (Whom a cluster that has stopped can't take as a member.)
            (None, Ask::State | Ask::Bury { .. }) => 0,
            (None, _) => return Err(Status::NotInitialised),
        };
        let answer = match ask {
            Ask::Hello { .. } => return Err(Status::BadParameter),
            Ask::Allocate { key, bytes, how } => {
                return self.act(at, Act::Allocate { member, key, bytes, how });
            }
            Ask::Attach { id, direction, how, only } => {
                return self.act(at, Act::Attach { member, id, direction, how, only });
            }
            Ask::Filled { id, direction } => {
                let region = self.registry.regions.get(&id).ok_or(Status::BadRegion)?;
                let is_there = |each: &Attached| match direction {
                    Direction::Transmit => each.transmits,
                    Direction::Receive => each.receives,
                };
                let attached = region.entry.users.get(&member).is_some_and(is_there);
                attached.then_some(()).ok_or(Status::NotAllocated)?;
                if region.incomplete {
                    return Err(Status::Incomplete);
                }
                if self.cluster.as_ref().is_some_and(|cluster| cluster.stopped.is_some()) {
                    return Err(Status::Stopped);
                }
                if self.is_filled(id) {
                    let (answer, memory) = self.attached(id, direction, true)?;
                    self.reply(at, &answer, &memory);
                    return Ok(());
                }
                self.wait_for(id)
            }
            Ask::Detach { id, direction } => {
                return self.act(at, Act::Detach { member, id, direction });
            }
            Ask::Deallocate { id } => return self.act(at, Act::Deallocate { member, id }),
            Ask::Locks { key, count, mode, creates } => {
                return self.act(at, Act::Locks { member, key, count, mode, creates });
            }
            Ask::DropLocks { id } => return self.act(at, Act::DropLocks { member, id }),
            Ask::Acquire { .. } | Ask::Cancel { .. } | Ask::Release { .. }
                if self.cluster.is_none() =>
            {
                return Err(Status::NotSupported);
            }
            Ask::Acquire { id, lock, waits } => {
                return self.act(at, Act::Acquire { member, id, lock, waits });
            }
            Ask::Cancel { id, lock } => return self.act(at, Act::Cancel { member, id, lock }),
            Ask::Release { id, lock } => return self.act(at, Act::Release { member, id, lock }),
            Ask::Watch { id, page, on } => {
                let region = self.registry.regions.get(&id).ok_or(Status::BadRegion)?;
                let attached = region.entry.users.get(&member).ok_or(Status::NotAllocated)?;
                if !attached.receives || u64::from(page) >= region.bytes / PAGE_BYTES as u64 {
                    return Err(Status::BadParameter);
                }
                self.watch(at, id, page, on)?;
                Answer::Done
            }
            Ask::Look { id, lock } => {
                self.look_at_lock(member, id, lock)?;
                Answer::Done
            }
            Ask::Settle => match &self.cluster {
                None => Answer::Done,
                Some(cluster) => {
                    if cluster.stopped.is_some() {
                        return Err(Status::ChannelError);
                    }
                    if self.registry.uses_incomplete(member) {
                        return Err(Status::Incomplete);
                    }
                    let number = cluster.written();
                    self.clients[at].waits = Waits::Settled(number);
                    self.answer_settled();
                    return Ok(());
                }
            },
            Ask::Cluster => Answer::Cluster(self.told()),
            Ask::Bury { node } => {
                let client = &self.clients[at];
                let may = [0, rustix::process::geteuid().as_raw()].contains(&client.uid)
                    && door::is_beside(&client.socket, client.process.as_ref());
                may.then_some(()).ok_or(Status::Denied)?;
                let cluster = self.cluster.as_mut().ok_or(Status::NotSupported)?;
                cluster.bury(&node).then_some(Answer::Done).ok_or(Status::BadHost)?
            }
            Ask::State => Answer::State(Box::new(self.state(member))),
            Ask::Sample { id } => {
                let (bytes, loopback) = self.registry.see(member, id)?;
                // (In a cluster there is none where nobody receives it, unless a late-comer is to see all of it.)
                let memory = self.memories.get(&id).ok_or(Status::BadRegion)?;
                self.reply(at, &Answer::Memory { bytes }, &memory.given_to_see(loopback)?);
                return Ok(());
            }
        };
        self.reply(at, &answer, &[]);
        Ok(())
    }

    /// A process that joins, as the kernel vouches for it.
    fn who(&self, at: usize) -> Result<Act, Status> {
        let socket = &self.clients[at].socket;
        let peer = door::credentials(socket.as_raw_fd())?;
        // (All users and groups that a user namespace does not know have one number there, and are not one.)
        if meet::is_vague(peer.uid) || meet::is_vague(peer.gid) {
            return Err(Status::Denied);
        }
        let mut groups = vec![peer.gid];
        groups.extend(door::groups_of(socket.as_raw_fd()));
        groups.retain(|group| !meet::is_vague(*group));
        groups.truncate(GROUPS_MOST);
        Ok(Act::Join { pid: peer.pid, uid: peer.uid, groups })
    }

    /// On one host an act is done at once; in a cluster when the order says so, on all hosts.
    fn act(&mut self, at: usize, act: Act) -> Result<(), Status> {
        if let Some(cluster) = &mut self.cluster {
            if cluster.stopped.is_some() {
                return self.act_later(at, act);
            }
            // (Of those who came and went while there was no cluster yet.)
            if cluster.has_acts() >= LATER_MOST {
                return Err(Status::Stopped);
            }
            let tag = cluster.tag();
            cluster.say(tag, &act, &self.registry);
            self.clients[at].waits = Waits::Delivery { tag, gives_back: act.gives_back() };
            return Ok(());
        }
        let effect = self.perform(0, &act);
        self.finish(at, &act, effect);
        Ok(())
    }

    /// Where nothing can be had, what is given back is given back once it can.
    fn act_later(&mut self, at: usize, act: Act) -> Result<(), Status> {
        let (later, answer) = match act {
            Act::Cancel { member, id, lock } => {
                (Act::Abandon { member, id, lock }, Answer::No(Status::Busy))
            }
            act if act.gives_back() => (act, Answer::Done),
            _ => return Err(Status::Stopped),
        };
        let cluster = self.cluster.as_mut().filter(|cluster| cluster.has_acts() < LATER_MOST);
        let (cluster, client) = (cluster.ok_or(Status::Stopped)?, &mut self.clients[at]);
        if let Act::Detach { id, direction: Direction::Receive, .. } = later {
            forget(&mut self.memories, &mut client.watches, Some(id));
        }
        match client.log.as_ref().map(|log| (log.tail(), log)) {
            Some((up_to, log))
                if !client.later.is_empty() || client.undoes.is_some() || !log.has_taken(up_to) =>
            {
                (client.later.len() < LATER_OF_ONE_MOST).then_some(()).ok_or(Status::Stopped)?;
                client.later.push_back((up_to, later));
            }
            _ => cluster.say(0, &later, &self.registry),
        }
        self.reply(at, &answer, &[]);
        Ok(())
    }

    /// What was not to be after all.
    fn undo(&mut self, act: &Act) {
        match &mut self.cluster {
            Some(cluster) => cluster.say(0, act, &self.registry),
            None => drop(self.perform(0, act)),
        }
    }

    /// Does an act of a process on that host, with what of it concerns the memory of this one.
    fn perform(&mut self, host: u32, act: &Act) -> Result<Effect, Status> {
        if self.cluster.is_none() {
            match act {
                Act::Leave { member } => {
                    self.words.keys().for_each(|id| self.give_up(*member, *id));
                }
                Act::DropLocks { member, id } => self.give_up(*member, *id),
                _ => {}
            }
        }
        let effect = self.registry.apply(host, act)?;
        let made = self.follow(host, act, &effect);
        self.tell_holders();
        self.tell_lost();
        made.map(|()| effect)
    }

    fn follow(&mut self, host: u32, act: &Act, effect: &Effect) -> Result<(), Status> {
        let in_cluster = self.cluster.is_some();
        let is_here = self.cluster.as_ref().is_none_or(|cluster| cluster.host == host);
        match (act, effect) {
            (_, Effect::Unused(unused)) => {
                unused.regions.iter().for_each(|id| self.let_go(*id));
                unused.sets.iter().for_each(|id| drop(self.words.remove(id)));
                self.sweep();
            }
            (_, Effect::Region { id, is_new: true }) => {
                let region = &self.registry.regions[id];
                if !in_cluster || region.coherent {
                    match self.make(region.bytes) {
                        Ok(memory) => {
                            self.memories.insert(*id, memory);
                            // (The others do not know yet that this host has it from its beginning on.)
                            if let Some(cluster) = &mut self.cluster
                                && self.registry.regions[id].filling.contains(&cluster.host)
                            {
                                cluster.say(0, &Act::Filled { id: *id }, &self.registry);
                            }
                        }
                        Err(status) => {
                            if let (Act::Allocate { member, .. }, true) = (act, is_here) {
                                self.undo(&Act::Deallocate { member: *member, id: *id });
                            }
                            // (Who attaches it here is told.)
                            if in_cluster {
                                self.undo(&Act::Lacks { id: *id });
                            }
                            return if is_here { Err(status) } else { Ok(()) };
                        }
                    }
                }
            }
            // (Who has just come holds none: what says so was not written by him.)
            (Act::Locks { member, .. }, Effect::Locks { id, is_new: false }) if !in_cluster => {
                self.give_up(*member, *id);
            }
            (_, Effect::Locks { id, is_new: true }) => {
                let Ok(words) = self.make_words(self.registry.sets[id].count) else {
                    return Ok(());
                };
                // (The creator has the first one, before anybody else can.)
                if let (Act::Locks { member, creates: true, .. }, false) = (act, in_cluster) {
                    let _ = words.lock(0).try_acquire(*member);
                }
                self.words.insert(*id, words);
            }
            (Act::Attach { id, direction: Direction::Receive, .. }, _) if in_cluster && is_here => {
                let region = &self.registry.regions[id];
                if !region.coherent
                    && !self.memories.contains_key(id)
                    && let Ok(memory) = self.make(region.bytes)
                {
                    self.memories.insert(*id, memory);
                }
            }
            (Act::Detach { id, .. }, _) => {
                if is_here {
                    self.want_no_more(*id);
                }
                self.sweep();
            }
            _ => {}
        }
        Ok(())
    }

    /// Memory for a region: by what this host allows, since another one may say anything of what it allows itself.
    fn make(&self, bytes: u64) -> Result<Memory, Status> {
        let written = self.memories.values().filter_map(|memory| memory.written.as_ref());
        let had: usize = written.map(|(data, _)| data.area().len()).sum();
        let fits = had as u64 + bytes <= self.bounds.limits.all;
        (fits && self.may_make()).then_some(()).ok_or(Status::NoMemory)?;
        Memory::make(bytes as usize, self.cluster.is_some())
    }

    fn make_words(&self, count: usize) -> Result<Words, Status> {
        self.may_make().then_some(()).ok_or(Status::NoMemory)?;
        Words::new(count)
    }

    fn may_make(&self) -> bool {
        self.memories.len() + self.words.len() < self.bounds.made_most
    }

    /// In a cluster what nobody receives here any more needs no memory, unless a late-comer is to see all of it.
    fn sweep(&mut self) {
        let Some(host) = self.cluster.as_ref().map(|cluster| cluster.host) else { return };
        let regions = &self.registry.regions;
        let is_needed = |id: &u32| {
            regions.get(id).is_some_and(|region| region.coherent || region.is_received(host))
        };
        let unneeded: Vec<u32> =
            self.memories.keys().filter(|id| !is_needed(id)).copied().collect();
        unneeded.into_iter().for_each(|id| self.let_go(id));
    }

    /// The memory of a region that nobody needs here.
    fn let_go(&mut self, id: u32) {
        self.memories.remove(&id).into_iter().for_each(Memory::let_go);
    }

    /// In a cluster: who holds a lock is in its word, and who waits for it looks there.
    fn tell_holders(&mut self) {
        for (id, lock) in std::mem::take(&mut self.registry.changed) {
            let Some(words) = self.words.get(&id) else { continue };
            let held = self.registry.sets.get(&id).and_then(|set| set.held.get(&lock));
            let word = &words.lock(lock as usize).0;
            // ORDER: Release, pairs with Acquire in `lock::acquire_in_cluster`: what was written under the lock is seen under it.
            word.store(held.map_or(0, |held| held.holder), Ordering::Release);
            futex::wake(word);
        }
    }

    /// Answers who has asked for it.
    fn finish(&mut self, at: usize, act: &Act, effect: Result<Effect, Status>) {
        let given = effect.and_then(|effect| self.given(at, act, effect));
        match given {
            Ok(Some((answer, memory))) => self.reply(at, &answer, &memory),
            Ok(None) => {}
            Err(status) => self.reply(at, &Answer::No(status), &[]),
        }
    }

    /// The answer to what was done, with its memory; none if it has to wait.
    fn given(
        &mut self,
        at: usize,
        act: &Act,
        effect: Effect,
    ) -> Result<Option<(Answer, Vec<OwnedFd>)>, Status> {
        let answer = match (act, effect) {
            (_, Effect::Joined(member)) => match self.welcome(at, member) {
                Ok(welcome) => return Ok(Some(welcome)),
                Err(status) => {
                    self.undo(&Act::Leave { member });
                    return Err(status);
                }
            },
            (_, Effect::Region { id, .. }) => {
                let region = &self.registry.regions[&id];
                Answer::Region { id, bytes: region.bytes, made: region.entry.made() }
            }
            (Act::Attach { member, id, direction, how, only }, _) => {
                let (member, id, direction) = (*member, *id, *direction);
                // (What is written here and not seen here would come back with what was written before.)
                let is_apart = only.is_none() && !how.loopback;
                if (direction == Direction::Receive || is_apart) && !self.is_filled(id) {
                    // (It asks again: meanwhile it is to have the answers to its other questions.)
                    return Ok(Some((self.wait_for(id), Vec::new())));
                }
                return match self.attached(id, direction, how.loopback) {
                    Ok(given) => Ok(Some(given)),
                    Err(status) => {
                        self.undo(&Act::Detach { member, id, direction });
                        Err(status)
                    }
                };
            }
            (Act::Detach { id, direction: Direction::Receive, .. }, _) => {
                forget(&mut self.memories, &mut self.clients[at].watches, Some(*id));
                Answer::Done
            }
            (Act::Locks { member, .. }, Effect::Locks { id, .. }) => {
                let words =
                    self.words.get(&id).ok_or(Status::NoMemory).and_then(|words| {
                        match &self.cluster {
                            Some(_) => memory::to_read(&words.memory).map(OwnedFd::from),
                            None => words.memory.try_clone().map_err(|_| Status::NoMemory),
                        }
                    });
                match words {
                    Ok(words) => {
                        let set = &self.registry.sets[&id];
                        let (count, made) = (set.count, set.entry.made());
                        return Ok(Some((Answer::Locks { id, count, made }, vec![words])));
                    }
                    Err(status) => {
                        self.undo(&Act::DropLocks { member: *member, id });
                        return Err(status);
                    }
                }
            }
            (_, Effect::Lock { is_held }) => Answer::Lock { is_held },
            _ => Answer::Done,
        };
        Ok(Some((answer, Vec::new())))
    }

    fn attached(
        &mut self,
        id: u32,
        direction: Direction,
        loopback: bool,
    ) -> Result<(Answer, Vec<OwnedFd>), Status> {
        let bytes = self.registry.regions.get(&id).ok_or(Status::BadRegion)?.bytes;
        let given = match (direction, &self.cluster, self.memories.get_mut(&id)) {
            (Direction::Transmit, Some(_), _) => Ok(Vec::new()),
            (Direction::Transmit, None, Some(memory)) => {
                memory.given_to_transmit(bytes as usize, loopback)
            }
            (Direction::Receive, _, Some(memory)) => memory.given_to_receive(),
            (_, _, None) => Err(Status::NoMemory),
        };
        Ok((Answer::Memory { bytes }, given?))
    }

    fn welcome(&mut self, at: usize, member: u32) -> Result<(Answer, Vec<OwnedFd>), Status> {
        let mut given = vec![OwnedFd::from(memory::to_read(&self.page.0)?)];
        let in_cluster = self.cluster.is_some();
        let client = &mut self.clients[at];
        if in_cluster {
            let copy = |fd: &OwnedFd| fd.try_clone().map_err(|_| Status::NoMemory);
            let (log, bell) = (memory::make(log::BYTES)?, memory::own(fd::eventfd()?));
            given.extend([copy(&log)?, copy(&bell)?]);
            client.log = Some(Reader::new(memory::map_sparse(&log, log::BYTES, true)?));
            client.bell = Some(bell);
        }
        client.member = Some(member);
        let (user, barriers) = (self.registry.members[&member].uid, self.barriers);
        Ok((Answer::Welcome { member, user, barriers, in_cluster }, given))
    }

    fn look_at_lock(&mut self, member: u32, id: u32, lock: u32) -> Result<(), Status> {
        let set = self.registry.sets.get(&id).ok_or(Status::BadLock)?;
        if !set.entry.users.contains_key(&member) || lock as usize >= set.count {
            return Err(Status::BadLock);
        }
        // (In a cluster nobody else writes there.)
        if self.cluster.is_some() {
            return Ok(());
        }
        let word = self.words.get(&id).ok_or(Status::BadLock)?.lock(lock as usize);
        match word.holder() {
            Some(holder) if !set.entry.users.contains_key(&holder) => {
                // (What it holds was written by nobody who may.)
                if word.give_up(holder) {
                    futex::wake(&word.0);
                }
                Err(Status::CorruptLock)
            }
            _ => Ok(()),
        }
    }

    fn watch(&mut self, at: usize, id: u32, page: u32, on: bool) -> Result<(), Status> {
        let memory = self.memories.get_mut(&id).ok_or(Status::BadRegion)?;
        let watches = &mut self.clients[at].watches;
        let had = watches.get(&(id, page)).copied().unwrap_or(0);
        if on && watches.len().max(had as usize) >= WATCHES_MOST {
            return Err(Status::Full);
        }
        let count = watches.entry((id, page)).or_default();
        if on {
            *count += 1;
            memory.wish(page, 1);
            // ORDER: who writes looks at the wish behind its store, with no barrier of its own if it is registered. Behind this each such
            // store is seen, or the wish was: `Transmitter::notify`.
            if self.barriers {
                barrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED);
            }
        } else if *count > 0 {
            *count -= 1;
            memory.forget(page, 1);
        }
        if *count == 0 {
            self.clients[at].watches.remove(&(id, page));
        }
        Ok(())
    }

    fn gone(&mut self, mut client: Client) {
        forget(&mut self.memories, &mut client.watches, None);
        meet::part(client.socket.into_raw_fd());
        match (client.member, &mut self.cluster) {
            (None, _) => {}
            (Some(member), None) => self.undo(&Act::Leave { member }),
            (Some(member), Some(cluster)) => cluster.dying.push((member, client.log)),
        }
    }

    /// On one host: what it holds of this set is nobody's.
    fn give_up(&self, member: u32, id: u32) {
        let set = self.registry.sets.get(&id).filter(|set| set.entry.users.contains_key(&member));
        let (Some(set), Some(words)) = (set, self.words.get(&id)) else { return };
        for word in (0..set.count).map(|lock| words.lock(lock)) {
            if word.give_up(member) {
                futex::wake(&word.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of another host's, which says that it allows itself anything, no more is made here than this one allows.
    #[test]
    fn what_others_make_is_bounded_here() {
        for (pages, made_most, expected) in [(4, 1000, 4), (1000, 6, 6)] {
            let place = tempfile::tempdir().unwrap();
            let limits = Limits { all: pages * PAGE_BYTES as u64, received: 0 };
            let path = place.path().join("socket");
            let options = Options { path: Some(&path), limits, ..Options::default() };
            let (mut keeper, _) = Keeper::new(&options, Some(cluster::tests::alone())).unwrap();
            keeper.bounds.made_most = made_most;
            let host = keeper.registry.enter("other", 1, true);
            let any = Limits { all: u64::MAX / 2, received: u64::MAX / 2 };
            let bounds = Bounds { limits: any, made_most: usize::MAX, is_shared: false };
            let join = Act::Join { pid: 1, uid: 0, groups: vec![0] };
            cluster::tests::said(&mut keeper, host, bounds, join);
            let member = *keeper.registry.members.keys().next().unwrap();
            for key in 0..100 {
                let how = crate::registry::Permission::default();
                let act = Act::Allocate { member, key, bytes: 1, how };
                cluster::tests::said(&mut keeper, host, bounds, act);
            }
            assert_eq!(keeper.registry.regions.len(), 100, "all hosts have the same");
            assert_eq!(keeper.memories.len(), expected);
            for key in 0..100 {
                let act = Act::Locks { member, key, count: 1, mode: 0o600, creates: false };
                cluster::tests::said(&mut keeper, host, bounds, act);
            }
            assert!(keeper.memories.len() + keeper.words.len() <= made_most);
        }
    }

    /// A region's memory may take seconds to be given back.
    #[test]
    fn memory_is_given_back_beside_the_keeper_s_thread() {
        const BYTES: usize = (48 << 20) + 7 * PAGE_BYTES;
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let options = Options { path: Some(&path), ..Options::default() };
        let (mut keeper, _) = Keeper::new(&options, Some(cluster::tests::alone())).unwrap();
        let host = keeper.registry.enter("other", 1, true);
        let limits = Limits { all: 1 << 30, received: 1 << 30 };
        let bounds = Bounds { limits, made_most: 9, is_shared: false };
        let join = Act::Join { pid: 1, uid: 0, groups: vec![0] };
        cluster::tests::said(&mut keeper, host, bounds, join);
        let member = *keeper.registry.members.keys().next().unwrap();
        let how = crate::registry::Permission::default();
        let act = Act::Allocate { member, key: 1, bytes: BYTES as u64, how };
        cluster::tests::said(&mut keeper, host, bounds, act);
        let (id, memory) = keeper.memories.iter_mut().next().unwrap();
        memory.put(0, &vec![1; BYTES], BYTES as u64).unwrap();
        let act = Act::Deallocate { member, id: *id };
        cluster::tests::said(&mut keeper, host, bounds, act);
        assert!(keeper.memories.is_empty());
        let by = loop {
            let dropped = crate::memory::tests::DROPPED.lock().unwrap();
            if let Some((_, by)) = dropped.iter().find(|(bytes, _)| *bytes == BYTES) {
                break *by;
            }
            drop(dropped);
            std::thread::yield_now();
        };
        assert_ne!(by, std::thread::current().id());
    }

    /// Who asks for all that there is, again and again, has one answer in a turn; short questions are answered together.
    #[test]
    fn long_answers_are_given_by_turns() {
        let shared = memory::make(page::BYTES).unwrap();
        let mapped = memory::map(&shared, page::BYTES, true).unwrap();
        let mut keeper = Keeper {
            registry: Registry::new(Bounds::default()),
            bounds: Bounds::default(),
            memories: BTreeMap::new(),
            words: BTreeMap::new(),
            clients: Vec::new(),
            clients_most: 10,
            is_own: false,
            watched: end::Watched::new(&mapped),
            page: (shared, mapped),
            barriers: false,
            name: String::new(),
            cluster: None,
        };
        let [ours, socket] = meet::pair().unwrap().map(memory::own);
        keeper.clients.push(Client { member: Some(1), ..Client::new(socket, 0, None) });
        let answers = |question: &Ask, keeper: &mut Keeper| {
            let question = serde_json::to_vec(question).unwrap();
            (0..3).for_each(|_| meet::send(ours.as_raw_fd(), &question, &[]).unwrap());
            keeper.serve(0);
            let mut bytes = vec![0; ANSWER_BYTES];
            std::iter::from_fn(|| meet::receive(ours.as_raw_fd(), &mut bytes).ok()).count()
        };
        assert_eq!(answers(&Ask::Look { id: 1, lock: 0 }, &mut keeper), 3);
        assert_eq!(answers(&Ask::State, &mut keeper), 1);
    }
}
