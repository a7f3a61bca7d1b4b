//! Who else is on the network: a thread of the port's own meets the others, hands strands to the queues, and notices who has gone.
//!
//! A port that comes listens first, then connects to each that is there, and says what it is; who accepts makes the strand's memory. Nobody waits for
//! an answer, so two that come at once may connect to each other: the connection of the one with the smaller number stays. With several queues,
//! further strands follow the first one.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{apart, meet};
use ringlet_messages::guarded::Guarded;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::counters::Traffic;
use crate::port::{Event, Order, QUEUES_MOST, Shared};
use crate::room::{PORTS_MOST, Seat, is_trusted};
use crate::strand::Strand;
use crate::table::{Bucket, Key, Policy};
use crate::wire::{About, Answer, Ask, Hello, Peer, State, VERSION, hear, hello, say};

/// Who has connected and not yet said what for; one more, and the oldest goes.
const COMERS_MOST: usize = 64;
/// A port that lives, and is not met, is visited again so often: after so long, and longer each time, up to so many times that.
const TRIES: u32 = 200;
const TRY_AGAIN: Duration = Duration::from_millis(50);
const TRY_AGAIN_MOST: u32 = 20;
/// Descriptors that no strand takes: our own, and of those who come only to ask.
const SPARE: usize = COMERS_MOST + 3 * QUEUES_MOST as usize + 32;
/// Whether our socket is still where others find it is looked at so often.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// To all, of a port that has just come: who comes again and again has no more by that.
const FIRST_FRAMES: u64 = 8;
/// What is said of others, a second.
const WORDS: u64 = 4;
const EVENTS: usize = 64;
const SEAT: u64 = 0;
const BELL: u64 = 1;
/// Other words of `epoll` name a comer, a visit or a strand.
const FIRST: u64 = 2;
const NAME_MOST: usize = 64;

struct Port {
    about: About,
    user: u32,
    token: u64,
    /// By their numbers; `None` until they are there.
    strands: Vec<Option<Arc<Strand>>>,
    traffic: Vec<Arc<Traffic>>,
    storm: Arc<Mutex<Bucket>>,
    /// How often it was visited until it was met.
    tries: u32,
}

/// A port to be connected to, for one strand.
#[derive(Clone, Copy)]
struct Visit {
    id: u64,
    number: u16,
    token: u64,
    tries: u32,
    due: Instant,
}

impl Visit {
    fn new(id: u64, number: u16, token: u64) -> Visit {
        Visit { id, number, token, tries: 0, due: Instant::now() }
    }
}

/// What an event of a socket's is about.
enum Whose {
    Comer(Guarded),
    Visit(Visit, Guarded),
    Strand(Key),
}

pub struct Keeper {
    shared: Arc<Shared>,
    seat: Seat,
    /// Of a seat that was taken again, all that belongs to it is done.
    is_seated: bool,
    looked: Instant,
    /// Why it is found by nobody.
    lost: Option<String>,
    epoll: OwnedFd,
    sockets: HashMap<u64, Whose>,
    next: u64,
    ports: HashMap<Key, Port>,
    next_key: Key,
    visits: Vec<Visit>,
    tell: Box<dyn FnMut(Event) + Send>,
    words: Bucket,
    /// Connections of those who asked us to end: they last until we have, and so behind `tell`, which may have the device.
    ending: Vec<Guarded>,
    /// Who has opened the port waits for its end: those that were there are met, or have been tried.
    meets: Option<Sender<()>>,
}

impl Keeper {
    pub fn new(
        shared: Arc<Shared>,
        seat: Seat,
        tell: Box<dyn FnMut(Event) + Send>,
        meets: Sender<()>,
    ) -> Result<Keeper> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*seat.socket, EventData::new_u64(SEAT), EventFlags::IN)?;
        epoll::add(&epoll, &shared.bell, EventData::new_u64(BELL), EventFlags::IN)?;
        // (Our own address is nobody else's.)
        let mut table = shared.table.write().unwrap_or_else(PoisonError::into_inner);
        table.join(OURSELVES, None, shared.about.mac, false, 0);
        drop(table);
        let (sockets, ports, ending) = Default::default();
        let others = shared.room.ports()?;
        let others = others.into_iter().filter(|id| *id != shared.about.id);
        let visits = others.map(|id| Visit::new(id, 0, 0)).collect();
        Ok(Keeper {
            shared,
            seat,
            is_seated: true,
            looked: Instant::now(),
            lost: None,
            epoll,
            sockets,
            next: FIRST,
            ports,
            next_key: OURSELVES + 1,
            visits,
            tell,
            words: Bucket::new(WORDS, 0),
            ending,
            meets: Some(meets),
        })
    }

    /// Until the port is over.
    pub fn keep(mut self) {
        while !self.shared.is_over.load(Ordering::Relaxed) {
            self.visit();
            self.look_at_seat();
            if self.meets.is_some() && !self.is_on_first_visits() {
                self.meets = None;
            }
            let due = self.visits.iter().map(|visit| visit.due).min();
            let patience = due.map(|due| due.saturating_duration_since(Instant::now()));
            let mut events = Vec::with_capacity(EVENTS);
            let patience = patience.map_or(LOOK_AGAIN, |patience| patience.min(LOOK_AGAIN));
            let patience = patience.try_into().ok();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                patience.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return (self.tell)(Event::End),
            }
            for event in events {
                match event.data.u64() {
                    SEAT => self.accept(),
                    BELL => self.take_gone(),
                    number => self.hear(number),
                }
            }
        }
    }

    /// A network that was removed under its ports, and made again, is one with them, and with those that have come since.
    fn look_at_seat(&mut self) {
        if self.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        self.looked = Instant::now();
        if self.is_seated && self.seat.is_here() {
            return;
        }
        let name = self.shared.room.name.clone();
        match self.find_seat() {
            Ok(()) => {
                self.lost = None;
                (self.tell)(Event::Apart(format!(
                    "network {name:?} was made again: this port is in it"
                )));
            }
            Err(error) => {
                let why = format!("{error:#}");
                if self.lost.as_ref() != Some(&why) {
                    (self.tell)(Event::Apart(format!(
                        "network {name:?} was removed under this port, which is found by nobody new: {why}"
                    )));
                }
                self.lost = Some(why);
            }
        }
    }

    fn find_seat(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        // (The one before goes with its descriptor, which nobody else has.)
        if !self.seat.is_here() {
            self.seat.take_again(&shared.room, shared.about.id)?;
        }
        self.is_seated = false;
        let added =
            epoll::add(&self.epoll, &*self.seat.socket, EventData::new_u64(SEAT), EventFlags::IN);
        if added != Err(rustix::io::Errno::EXIST) {
            added?;
        }
        let others = shared.room.ports()?;
        let is_met = |id: &u64| self.ports.values().any(|port| port.about.id == *id);
        let new = others.into_iter().filter(|id| *id != shared.about.id && !is_met(id));
        let new: Vec<Visit> = new.map(|id| Visit::new(id, 0, 0)).collect();
        self.visits.extend(new);
        self.is_seated = true;
        Ok(())
    }

    fn is_on_first_visits(&self) -> bool {
        let is_first = |visit: &Visit| visit.tries == 0;
        let on = |whose: &Whose| matches!(whose, Whose::Visit(visit, _) if is_first(visit));
        self.visits.iter().any(is_first) || self.sockets.values().any(on)
    }

    fn watch(&mut self, fd: &Guarded, flags: EventFlags) -> Option<u64> {
        let number = self.next;
        self.next += 1;
        epoll::add(&self.epoll, &**fd, EventData::new_u64(number), flags).ok().map(|()| number)
    }

    fn accept(&mut self) {
        let comers = || {
            self.sockets
                .iter()
                .filter(|(_, whose)| matches!(whose, Whose::Comer(_)))
                .map(|(number, _)| *number)
        };
        if comers().count() >= COMERS_MOST {
            let oldest = comers().min();
            oldest.and_then(|number| self.sockets.remove(&number));
        }
        let Some(socket) = self.seat.accept() else {
            // (No number is free, it may be: who waits there goes on waiting, and this thread must not look at him all the time.)
            return std::thread::sleep(TRY_AGAIN);
        };
        if let Some(number) = self.watch(&socket, EventFlags::IN | EventFlags::RDHUP) {
            self.sockets.insert(number, Whose::Comer(socket));
        }
    }

    /// Says that somebody else is not, or no more, with us. (Who is none for long may have much said of him.)
    fn tell_apart(&mut self, why: String) {
        if self.words.takes(self.shared.now_ms()) {
            (self.tell)(Event::Apart(why));
        }
    }

    fn key_of(&self, id: u64, token: u64) -> Option<Key> {
        let is_it = |port: &Port| port.about.id == id && port.token == token;
        self.ports.iter().find(|(_, port)| is_it(port)).map(|(key, _)| *key)
    }

    /// Connects to those that are still to be met.
    fn visit(&mut self) {
        let now = Instant::now();
        let (due, later) = self.visits.drain(..).partition(|visit| visit.due <= now);
        self.visits = later;
        let due: Vec<Visit> = due;
        for visit in due {
            let Visit { id, number, token, .. } = visit;
            // (It may have come to us meanwhile; and to a port that has gone nothing is added.)
            let is_wanted = match number {
                0 => self.ports.values().all(|port| port.about.id != id),
                _ => self.key_of(id, token).is_some(),
            };
            match if is_wanted { self.begin_visit(visit) } else { Ok(()) } {
                Ok(()) => {}
                // (Too many wait there, or it does not listen, or let us in, yet; or something is lacking here.)
                Err(
                    Errno::EAGAIN
                    | Errno::ECONNREFUSED
                    | Errno::EACCES
                    | Errno::EMFILE
                    | Errno::ENFILE
                    | Errno::ENOMEM,
                ) => self.visit_again(visit),
                // (It has gone meanwhile.)
                Err(Errno::ENOENT) => {}
                Err(error) => self.give_up(visit, &format!("can't be reached: {error:?}")),
            }
        }
    }

    /// If it lives, and was not tried too often.
    fn visit_again(&mut self, visit: Visit) {
        let is_it = |other: &Visit| (other.id, other.number) == (visit.id, visit.number);
        if self.visits.iter().any(is_it) || self.shared.room.bury(visit.id) {
            return;
        }
        let tries = visit.tries + 1;
        match tries <= TRIES {
            true => {
                let due = Instant::now() + TRY_AGAIN * tries.min(TRY_AGAIN_MOST);
                self.visits.push(Visit { tries, due, ..visit });
            }
            false => self.give_up(visit, "was not met: no more is tried"),
        }
    }

    fn give_up(&mut self, visit: Visit, why: &str) {
        self.tell_apart(format!("port {:016x} {why}", visit.id));
        // (Half of a port is none: what goes by that strand would be lost.)
        if let Some(key) = self.key_of(visit.id, visit.token).filter(|_| visit.number > 0) {
            self.remove(key, "it has no further strand");
        }
    }

    fn begin_visit(&mut self, visit: Visit) -> Result<(), Errno> {
        let Visit { id, number, token, .. } = visit;
        let socket = self.shared.room.connect(id)?;
        // Memory comes with the answer, and nothing else.
        meet::admit_descriptors(socket.as_raw_fd(), true);
        let ask = match number {
            0 => Ask::Join(self.shared.about.clone()),
            _ => Ask::Strand { id: self.shared.about.id, number, token },
        };
        say(&socket, &hello(ask), &[]).map_err(|_| Errno::EAGAIN)?;
        let watched =
            self.watch(&socket, EventFlags::IN | EventFlags::RDHUP).ok_or(Errno::ENOMEM)?;
        self.sockets.insert(watched, Whose::Visit(visit, socket));
        Ok(())
    }

    fn hear(&mut self, number: u64) {
        match self.sockets.remove(&number) {
            Some(Whose::Strand(key)) => self.remove(key, "it has gone"),
            Some(Whose::Comer(socket)) => match hear::<Hello>(&socket) {
                Ok(None) => _ = self.sockets.insert(number, Whose::Comer(socket)),
                // (Who says what nobody understands, or nothing, goes.)
                Err(_) => {}
                Ok(Some((came, _))) => {
                    let _ = epoll::delete(&self.epoll, &*socket);
                    self.answer(socket, came);
                }
            },
            Some(Whose::Visit(visit, socket)) => match hear::<Answer>(&socket) {
                Ok(None) => _ = self.sockets.insert(number, Whose::Visit(visit, socket)),
                // (It has ended; or so many came to it that we had to go.)
                Err(_) => self.visit_again(visit),
                Ok(Some((answer, came))) => {
                    let _ = epoll::delete(&self.epoll, &*socket);
                    let (about, token, ring_bytes) = match answer {
                        Answer::Strand { about, token, ring_bytes } => (about, token, ring_bytes),
                        // (It comes to us, or has; if that comes to nothing we go there again.)
                        Answer::Crossed => return self.visit_again(visit),
                        // (Both are other hosts' ports: they have nothing to do with each other.)
                        Answer::Done if self.shared.about.far => return,
                        // (What it lacks, or another port has, may be free later.)
                        Answer::Refused(why) if visit.number == 0 => {
                            if visit.tries == 0 {
                                self.tell_apart(format!("port {:016x} refuses: {why}", visit.id));
                            }
                            return self.visit_again(visit);
                        }
                        Answer::Refused(why) => {
                            return self.give_up(visit, &format!("refuses: {why}"));
                        }
                        other => {
                            let why = format!("answers something else: {other:?}");
                            return self.give_up(visit, &why);
                        }
                    };
                    let mut fds = came.fds;
                    let met = Met { about, token, ring_bytes };
                    if let Err(error) = self.met(visit, socket, met, &mut fds) {
                        if visit.tries == 0 {
                            self.tell_apart(format!("port {:016x}: {error:#}", visit.id));
                        }
                        if let Some(key) = self.key_of(visit.id, token) {
                            self.remove(key, "it has no strand");
                        }
                        self.visit_again(visit);
                    }
                }
            },
            None => {}
        }
    }

    /// Answers one who has come.
    fn answer(&mut self, socket: Guarded, came: Hello) {
        let user = meet::credentials(socket.as_raw_fd()).map_or(apart::SOMEBODY, |who| who.uid);
        let refuse = |why: String| _ = say(&socket, &Answer::Refused(why), &[]);
        if came.version != VERSION {
            return refuse(format!(
                "it speaks version {VERSION:#x}, and not {:#x}: both need the same ringlet",
                came.version
            ));
        }
        match came.ask {
            Ask::State => _ = say(&socket, &Answer::State(self.state()), &[]),
            Ask::Way(_) => refuse("it is a port, and has no ways".into()),
            Ask::Attach(_) | Ask::Next(_) | Ask::Detach(_) => refuse("it is no bridge".into()),
            Ask::End => {
                if !may_end(user) {
                    return refuse("only its user, or root, ends a port".into());
                }
                let _ = say(&socket, &Answer::Ending, &[]);
                self.ending.push(socket);
                (self.tell)(Event::End);
            }
            Ask::Join(about) if about.far && self.shared.about.far => {
                _ = say(&socket, &Answer::Done, &[]);
            }
            Ask::Join(about) => match self.join(about, user) {
                Ok(Some((key, token))) => self.give(socket, key, 0, token),
                Ok(None) => _ = say(&socket, &Answer::Crossed, &[]),
                Err(error) => refuse(format!("{error:#}")),
            },
            Ask::Strand { id, number, token } => {
                let strand = |key: &Key| self.ports[key].strands.get(usize::from(number));
                match self.key_of(id, token).filter(|key| strand(key).is_some_and(Option::is_none))
                {
                    Some(key) => self.give(socket, key, number, token),
                    None => refuse("there is no such strand".into()),
                }
            }
        }
    }

    /// Takes in a port that has come; `None` if our own connection to it stays.
    fn join(&mut self, about: About, user: u32) -> Result<Option<(Key, u64)>> {
        // (Its socket in the room is its own: so nobody takes another user's number.)
        ensure!(
            self.shared.room.is_of(about.id, user),
            "its socket is not in the network's directory, or is another user's"
        );
        let visit = |whose: &Whose| matches!(whose, Whose::Visit(visit, _) if visit.id == about.id);
        let ours: Vec<u64> = self
            .sockets
            .iter()
            .filter(|(_, whose)| visit(whose))
            .map(|(number, _)| *number)
            .collect();
        if self.ports.values().any(|port| port.about.id == about.id) {
            return Ok(None);
        }
        if !ours.is_empty() && self.shared.about.id < about.id {
            return Ok(None);
        }
        ours.iter().for_each(|number| _ = self.sockets.remove(number));
        self.visits.retain(|visit| visit.id != about.id);
        let mut token = [0; 8];
        ensure!(sys::random(&mut token), "no random bytes");
        let token = u64::from_ne_bytes(token);
        Ok(Some((self.take_in(about, user, token, 0)?, token)))
    }

    fn take_in(&mut self, about: About, user: u32, token: u64, tries: u32) -> Result<Key> {
        ensure!((1..=QUEUES_MOST).contains(&about.queues), "{} queues", about.queues);
        ensure!(
            is_name(&about.name),
            "a name of up to {NAME_MOST} bytes without control characters"
        );
        ensure!(
            !about.bridge || user == 0 || self.shared.room.is_owner(user),
            "only root, or whose the network is, brings a bridge to it"
        );
        ensure!(
            !about.far
                || self.shared.room.rules.addresses != Policy::Static
                || user == 0
                || self.shared.room.is_owner(user),
            "addresses are static: only root, or whose the network is, brings another host's to it"
        );
        if self.ports.len() + 1 >= PORTS_MOST {
            self.make_way(user);
        }
        ensure!(self.ports.len() + 1 < PORTS_MOST, "the network has {PORTS_MOST} ports");
        let count = about.queues.max(self.shared.about.queues);
        ensure!(
            (self.sockets.len() + usize::from(count) + SPARE) as u64
                <= sys::limit(libc::RLIMIT_NOFILE),
            "it may have no more descriptors open (`LimitNOFILE=`, `ulimit -n`)"
        );
        let key = self.next_key;
        let now_ms = self.shared.now_ms();
        let joins = |keeper: &Keeper| {
            let mut table = keeper.shared.table.write().unwrap_or_else(PoisonError::into_inner);
            // (Users whom this user namespace does not know are all the same number.)
            let user = Some(user).filter(|user| !meet::is_vague(*user));
            table.join(key, user, about.mac, about.far || about.bridge, now_ms)
        };
        if !joins(self) {
            // (Of one that was killed the queues may not have told yet.)
            let gone = |port: &Port| port.strands.iter().flatten().any(|strand| strand.is_gone());
            let dead: Vec<Key> =
                self.ports.iter().filter(|(_, port)| gone(port)).map(|(key, _)| *key).collect();
            dead.into_iter().for_each(|key| self.remove(key, "it has gone"));
            ensure!(joins(self), "{} is another port's address on this network", about.mac);
        }
        self.next_key += 1;
        let strands = (0..count).map(|_| None).collect();
        let traffic = (0..count).map(|_| Arc::default()).collect();
        // (A bridge has taken no more than that from each device on it.)
        let rate = if about.bridge { 0 } else { self.shared.room.rules.storm };
        let storm = Bucket::new(rate, now_ms).beginning_with(FIRST_FRAMES);
        let storm = Arc::new(Mutex::new(storm));
        self.ports.insert(key, Port { about, user, token, strands, traffic, storm, tries });
        self.shared.ports.store(self.ports.len(), Ordering::Relaxed);
        self.shared.changes.fetch_add(1, Ordering::Relaxed);
        Ok(key)
    }

    /// Of a full network: a port of whoever has the most goes, if that is more than `comer` has; never one of this user's, or root's.
    fn make_way(&mut self, comer: u32) {
        let mut counts = HashMap::new();
        for port in self.ports.values().filter(|port| !is_trusted(port.user)) {
            *counts.entry(port.user).or_insert(0) += 1;
        }
        let theirs = counts.get(&comer).copied().unwrap_or(0);
        let Some((user, count)) = counts.into_iter().max_by_key(|(_, count)| *count) else {
            return;
        };
        if is_trusted(comer) || count > theirs + 1 {
            let last = self.ports.iter().filter(|(_, port)| port.user == user).map(|(key, _)| *key);
            last.max()
                .into_iter()
                .for_each(|key| self.remove(key, "it makes way for another user's"));
        }
    }

    /// Makes a strand for one who has come, and gives it the memory. (Our queue has it before: who has met us, and been met, is sent to. Nobody rings
    /// by it before the other one has that memory, and so the answer.)
    fn give(&mut self, socket: Guarded, key: Key, number: u16, token: u64) {
        let ring_bytes = self.shared.ring_bytes;
        let made = Strand::make(socket, ring_bytes)
            .map_err(|error| anyhow::anyhow!("no memory can be had: {error:?}"));
        let given = made.and_then(|(strand, memory)| {
            let (about, strand) = (self.shared.about.clone(), Arc::new(strand));
            self.put(key, number, Arc::clone(&strand))?;
            let answer = Answer::Strand { about, token, ring_bytes };
            say(&strand.socket, &answer, &[memory.as_raw_fd()])
        });
        if let Err(error) = given {
            self.tell_apart(format!("no strand: {error:#}"));
            self.remove(key, "it has no strand");
        }
    }

    /// A port that we have connected to has answered.
    fn met(
        &mut self,
        visit: Visit,
        socket: Guarded,
        Met { about, token, ring_bytes }: Met,
        fds: &mut meet::Fds,
    ) -> Result<()> {
        let Visit { id, number, tries, .. } = visit;
        meet::admit_descriptors(socket.as_raw_fd(), false);
        let user = meet::credentials(socket.as_raw_fd()).map_or(apart::SOMEBODY, |who| who.uid);
        let memory = fds.take(0).context("no memory came")?;
        // SAFETY: taken just now, ours alone.
        #[allow(unsafe_code)]
        let memory = unsafe { OwnedFd::from_raw_fd(memory) };
        let strand = Strand::join(socket, &memory, ring_bytes);
        // (Memory goes at once. What is none may make who closes it wait.)
        if strand.is_err() {
            apart::close_foreign(std::os::fd::IntoRawFd::into_raw_fd(memory), user);
        }
        let strand =
            strand.map_err(|error| anyhow::anyhow!("its memory can't be used: {error:?}"))?;
        ensure!(about.id == id, "it says that it is another one");
        let key = match number {
            0 => {
                let key = self.take_in(about, user, token, tries)?;
                let more = 1..self.ports[&key].strands.len() as u16;
                self.visits.extend(more.map(|number| Visit::new(id, number, token)));
                key
            }
            _ => self.key_of(id, token).context("it has gone")?,
        };
        self.put(key, number, Arc::new(strand))
    }

    /// Hands a strand to its queue.
    fn put(&mut self, key: Key, number: u16, strand: Arc<Strand>) -> Result<()> {
        let watched =
            self.watch(&strand.socket, EventFlags::RDHUP).context("it can't be watched")?;
        self.sockets.insert(watched, Whose::Strand(key));
        self.shared.wants.lock().unwrap_or_else(PoisonError::into_inner).tell(&strand);
        let port = self.ports.get_mut(&key).context("it has gone")?;
        let at = usize::from(number);
        let slot =
            port.strands.get_mut(at).filter(|slot| slot.is_none()).context("no such strand")?;
        *slot = Some(Arc::clone(&strand));
        let queues = self.shared.desks.len();
        let (traffic, storm) = (Arc::clone(&port.traffic[at]), Arc::clone(&port.storm));
        let sends = at < queues;
        self.shared.order(at % queues, Order::Add { key, sends, strand, traffic, storm });
        if number == 0 {
            (self.tell)(Event::Ports(self.ports.len()));
        }
        Ok(())
    }

    fn take_gone(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.bell, &mut count);
        let gone =
            std::mem::take(&mut *self.shared.gone.lock().unwrap_or_else(PoisonError::into_inner));
        for (key, why) in gone {
            self.remove(key, why);
        }
    }

    fn remove(&mut self, key: Key, why: &str) {
        let Some(port) = self.ports.remove(&key) else { return };
        for strand in port.strands.iter().flatten() {
            let _ = epoll::delete(&self.epoll, &*strand.socket);
        }
        let id = port.about.id;
        self.sockets.retain(|_, whose| match whose {
            Whose::Strand(of) => *of != key,
            Whose::Visit(visit, _) => visit.id != id || visit.number == 0,
            Whose::Comer(_) => true,
        });
        self.shared.table.write().unwrap_or_else(PoisonError::into_inner).leave(key);
        self.shared.ports.store(self.ports.len(), Ordering::Relaxed);
        self.shared.changes.fetch_add(1, Ordering::Relaxed);
        (0..self.shared.desks.len()).for_each(|queue| self.shared.order(queue, Order::Remove(key)));
        self.visits.retain(|visit| visit.id != id);
        let is_here = !self.shared.is_over.load(Ordering::Relaxed) && !self.shared.room.bury(id);
        // (It may live, and have let go of us: something was lacking there, or it has met a liar who led to us.)
        match port.strands.iter().flatten().any(|strand| strand.is_gone()) {
            _ if !is_here => {}
            true => self.visit_again(Visit { tries: port.tries, ..Visit::new(id, 0, 0) }),
            false => {
                self.tell_apart(format!("port {id:016x} ({}) is put out: {why}", port.about.name));
            }
        }
        (self.tell)(Event::Ports(self.ports.len()));
    }

    fn state(&self) -> State {
        let peers = self.ports.values().map(|port| {
            let sum = |of: &dyn Fn(&Traffic) -> u64| port.traffic.iter().map(|each| of(each)).sum();
            Peer {
                id: port.about.id,
                name: port.about.name.clone(),
                mac: port.about.mac,
                far: port.about.far,
                user: port.user,
                sent: sum(&|each| each.sent.load(Ordering::Relaxed)),
                received: sum(&|each| each.received.load(Ordering::Relaxed)),
                full: sum(&|each| each.full.load(Ordering::Relaxed)),
                waiting: port.strands.iter().flatten().map(|strand| strand.waiting()).sum(),
            }
        });
        let mut about = self.shared.about.clone();
        if let Some(present) = self.shared.present.get() {
            present(&mut about);
        }
        State { about, peers: peers.collect(), totals: self.shared.totals(), bridged: None }
    }
}

/// What was answered.
struct Met {
    about: About,
    token: u64,
    ring_bytes: usize,
}

/// (So what is said of 511 ports is short enough to be said.)
pub fn is_name(name: &str) -> bool {
    name.len() <= NAME_MOST && !name.chars().any(char::is_control)
}

/// Does this user rule what is ours?
pub fn may_end(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw() && !meet::is_vague(user)
}

/// Our own key in the table.
const OURSELVES: Key = 0;
