//! Rails on virtual time. What is taken is done at some time, in any order, the bytes of a write in parts and repeatedly, until its notice. A way from one
//! endpoint to another may be lost for a while: what was under way there has failed, and is lost or, later, still done. Or it may swallow all and say nothing;
//! or an endpoint breaks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use ringlet_fabric::rail::{Event, Grant, MESSAGE_BYTES, Peer, Rail, Refused, Region};
use serde::Serialize;

use crate::{Time, from_us, transfer};

/// Messages and writes that are under way to one endpoint.
const UNDER_WAY_MOST: usize = 48;
/// What one `poll` tells.
const TOLD_MOST: usize = 64;
const LATENCY_US: f64 = 1.0;
const MB_S: f64 = 10_000.0;
/// The longest time for which a way is lost, or mute, and by which what is late then comes later yet.
const LOST_US: f64 = 3000.0;
const LATE_US: f64 = 5000.0;

/// What goes wrong, and how often: probabilities, of each thing that is sent.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Disorder {
    /// It takes up to so much longer.
    pub late: f64,
    pub late_us: f64,
    /// A part of a write is written again.
    pub repeated: f64,
    /// The way is lost, or mute, or the endpoint breaks.
    pub fails: f64,
    /// Nodes that die, and pairs of services that lose one another.
    pub dead_nodes: usize,
    pub lost_sessions: usize,
    pub within_us: f64,
    /// What rails promise and don't keep: then it is not the carrier's fault what is found.
    pub broken: Option<Promise>,
}

/// What a carrier relies on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Promise {
    /// All of a write has landed before its notice.
    Notice,
    /// Nothing lands in memory that was withdrawn.
    Withdrawal,
}

/// What an endpoint's owner is to be told.
enum Told {
    Done(u64),
    Failed(u64),
    Noticed(u32),
    Message(Vec<u8>),
    Broken,
}

struct Endpoint {
    node: usize,
    works: bool,
    told: VecDeque<Told>,
    /// It rings its node when there is something to tell.
    sleeps: bool,
    regions: BTreeMap<u64, Registered>,
}

/// The address is a number: what lies there is copied raw.
#[derive(Clone, Copy)]
struct Registered {
    at: usize,
    bytes: usize,
    /// Others may write there.
    is_granted: bool,
}

/// From one endpoint to another.
#[derive(Default)]
struct Way {
    /// How often it was lost.
    episode: u32,
    lost_until: Time,
    mute_until: Time,
    /// Tokens of what is under way, and of what was swallowed, by number.
    held: BTreeMap<u64, u64>,
    swallowed: BTreeMap<u64, u64>,
}

struct Flight {
    from: usize,
    to: usize,
    /// Of its way, when it was sent.
    episode: u32,
    /// It is late, and was put off for that.
    put_off: bool,
    /// The message, or the write, that it belongs to.
    number: u64,
    what: What,
}

enum What {
    Message(Vec<u8>),
    Piece { address: u64, bytes: Vec<u8> },
    Notice,
    Answer,
}

struct Writing {
    key: u64,
    notice: u32,
    /// Pieces that have not landed, or are to land again.
    left: usize,
}

#[derive(Default, Clone, Copy, Debug)]
pub struct Counts {
    pub operations: u64,
    pub failures: u64,
    pub late: u64,
    pub repeated: u64,
}

pub struct Network {
    pub now: Time,
    rng: Pcg64Mcg,
    disorder: Disorder,
    flights: BinaryHeap<Reverse<(Time, u64)>>,
    by_number: BTreeMap<u64, Flight>,
    writes: BTreeMap<u64, Writing>,
    endpoints: Vec<Endpoint>,
    ways: BTreeMap<(usize, usize), Way>,
    next: u64,
    /// Nodes that were rung.
    rung: Vec<usize>,
    pub counts: Counts,
}

fn lost() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the way was lost")
}

impl Network {
    pub fn new(seed: u64, disorder: Disorder) -> Network {
        Network {
            now: 0,
            rng: Pcg64Mcg::seed_from_u64(seed),
            disorder,
            flights: BinaryHeap::new(),
            by_number: BTreeMap::new(),
            writes: BTreeMap::new(),
            endpoints: Vec::new(),
            ways: BTreeMap::new(),
            next: 1,
            rung: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// When the next thing lands.
    pub fn next_time(&self) -> Option<Time> {
        self.flights.peek().map(|Reverse((time, _))| *time)
    }

    pub fn rung(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.rung)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn fly(&mut self, flight: Flight, delay: Time) {
        let number = self.number();
        self.flights.push(Reverse((self.now + delay, number)));
        self.by_number.insert(number, flight);
    }

    fn delay(&mut self, bytes: usize) -> Time {
        let late = if self.rng.random_bool(self.disorder.late) {
            from_us(self.rng.random_range(0.0..=self.disorder.late_us))
        } else {
            0
        };
        from_us(LATENCY_US) + transfer(bytes, MB_S) + late
    }

    fn tell(&mut self, endpoint: usize, told: Told) {
        let endpoint = &mut self.endpoints[endpoint];
        endpoint.told.push_back(told);
        if std::mem::take(&mut endpoint.sleeps) {
            self.rung.push(endpoint.node);
        }
    }

    /// What was under way is late from now on, and nothing can be sent for a while.
    fn lose(&mut self, from: usize, to: usize) {
        self.counts.failures += 1;
        let until = self.now + from_us(self.rng.random_range(10.0..=LOST_US));
        let way = self.ways.entry((from, to)).or_default();
        (way.episode, way.lost_until) = (way.episode.wrapping_add(1), until);
        let held = std::mem::take(&mut way.held);
        held.into_values().for_each(|token| self.tell(from, Told::Failed(token)));
    }

    /// By chance, as something is sent.
    fn fail(&mut self, from: usize, to: usize) {
        if self.disorder.fails == 0.0 || !self.rng.random_bool(self.disorder.fails) {
            return;
        }
        match self.rng.random_range(0..8) {
            0 => {
                self.counts.failures += 1;
                self.endpoints[from].works = false;
                self.tell(from, Told::Broken);
            }
            1 => {
                self.counts.failures += 1;
                let until = self.now + from_us(self.rng.random_range(10.0..=LOST_US));
                self.ways.entry((from, to)).or_default().mute_until = until;
            }
            _ => self.lose(from, to),
        }
    }

    /// Takes something on its way: its number and the way's episode; `None`: it is swallowed.
    fn take(&mut self, from: usize, to: usize, token: u64) -> Result<Option<(u64, u32)>, Refused> {
        self.counts.operations += 1;
        self.fail(from, to);
        let (now, number) = (self.now, self.number());
        let works = self.endpoints[from].works;
        let way = self.ways.entry((from, to)).or_default();
        if !works || way.lost_until > now {
            return Err(Refused::Failed(lost()));
        }
        let is_mute = way.mute_until > now;
        if !is_mute {
            for token in std::mem::take(&mut way.swallowed).into_values() {
                self.endpoints[from].told.push_back(Told::Failed(token));
            }
        }
        if way.held.len() + way.swallowed.len() >= UNDER_WAY_MOST {
            return Err(Refused::Full);
        }
        let list = if is_mute { &mut way.swallowed } else { &mut way.held };
        list.insert(number, token);
        Ok((!is_mute).then_some((number, way.episode)))
    }

    /// The next thing lands.
    pub fn land(&mut self) {
        let Some(Reverse((time, place))) = self.flights.pop() else { return };
        self.now = time;
        let Some(mut flight) = self.by_number.remove(&place) else { return };
        let Flight { from, to, episode, number, .. } = flight;
        let is_late = self.ways.get(&(from, to)).is_some_and(|way| way.episode != episode);
        if is_late && !std::mem::replace(&mut flight.put_off, true) {
            self.counts.late += 1;
            let later = from_us(self.rng.random_range(0.0..=LATE_US));
            // (Of a write, a part that is lost is never noticed.)
            if self.rng.random_bool(0.7) {
                self.fly(flight, later);
            }
            return;
        }
        match flight.what {
            What::Answer => {
                let held = self.ways.get_mut(&(from, to)).and_then(|way| way.held.remove(&number));
                if let Some(token) = held {
                    self.tell(from, Told::Done(token));
                }
            }
            _ if !self.endpoints[to].works => {}
            What::Message(bytes) => {
                self.tell(to, Told::Message(bytes));
                self.answer(from, to, episode, number);
            }
            What::Notice => {
                if let Some(writing) = self.writes.remove(&number) {
                    self.tell(to, Told::Noticed(writing.notice));
                    self.answer(from, to, episode, number);
                }
            }
            What::Piece { address, bytes } => {
                let Some(key) = self.writes.get(&number).map(|writing| writing.key) else { return };
                let granted = self.endpoints[to].target(key, address, bytes.len());
                let anywhere = self.disorder.broken == Some(Promise::Withdrawal);
                match granted.or(anywhere.then_some(address as *mut u8)) {
                    // SAFETY: granted, and mapped until it is withdrawn (`Rail::register`); or once granted, and mapped until the end of the run.
                    Some(target) => unsafe { target.copy_from(bytes.as_ptr(), bytes.len()) },
                    None if is_late => {
                        self.writes.remove(&number);
                        return;
                    }
                    None => {
                        self.writes.remove(&number);
                        return self.lose(from, to);
                    }
                }
                if self.rng.random_bool(self.disorder.repeated) {
                    self.counts.repeated += 1;
                    let delay = self.delay(bytes.len());
                    let what = What::Piece { address, bytes };
                    return self.fly(Flight { what, ..flight }, delay);
                }
                let Some(writing) = self.writes.get_mut(&number) else { return };
                writing.left = writing.left.wrapping_sub(1);
                if writing.left == 0 {
                    let delay = self.delay(0);
                    self.fly(Flight { what: What::Notice, ..flight }, delay);
                }
            }
        }
    }

    fn answer(&mut self, from: usize, to: usize, episode: u32, number: u64) {
        let delay = self.delay(0);
        let what = What::Answer;
        self.fly(Flight { from, to, episode, put_off: true, number, what }, delay);
    }
}

impl Endpoint {
    /// Where a write goes to: within what is granted, or nowhere.
    fn target(&self, key: u64, address: u64, bytes: usize) -> Option<*mut u8> {
        let region = self.regions.get(&key).filter(|region| region.is_granted)?;
        let offset = usize::try_from(address.checked_sub(region.at as u64)?).ok()?;
        (offset <= region.bytes && bytes <= region.bytes - offset)
            .then_some((region.at + offset) as *mut u8)
    }
}

/// Nobody else has it: one thread runs a simulation. (But a rail may go to another thread.)
pub fn held(network: &Mutex<Network>) -> MutexGuard<'_, Network> {
    network.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct SimulatedRail {
    network: Arc<Mutex<Network>>,
    me: usize,
    name: [u8; 8],
    /// Nobody sleeps on it.
    fd: Arc<OwnedFd>,
}

impl SimulatedRail {
    pub fn new(network: &Arc<Mutex<Network>>, node: usize, fd: &Arc<OwnedFd>) -> SimulatedRail {
        let endpoints = &mut held(network).endpoints;
        let me = endpoints.len();
        endpoints.push(Endpoint {
            node,
            works: true,
            told: VecDeque::new(),
            sleeps: false,
            regions: BTreeMap::new(),
        });
        let name = (me as u64).to_le_bytes();
        SimulatedRail { network: network.clone(), me, name, fd: fd.clone() }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

impl SimulatedRail {
    fn enter(&self, registered: Registered) -> io::Result<Region> {
        let network = &mut *held(&self.network);
        let key = network.number();
        let region = Region(u32::try_from(key).map_err(|_| invalid("too many regions"))?);
        network.endpoints[self.me].regions.insert(key, registered);
        Ok(region)
    }
}

impl Rail for SimulatedRail {
    fn name(&self) -> &[u8] {
        &self.name
    }

    fn reach(&mut self, name: &[u8]) -> io::Result<Peer> {
        let number = name.try_into().map(u64::from_le_bytes).map_err(|_| invalid("no name"))?;
        let known = held(&self.network).endpoints.len();
        if number as usize >= known {
            return Err(invalid("nobody's name"));
        }
        Ok(Peer(number as u32))
    }

    fn forget(&mut self, _: Peer) {}

    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> io::Result<(Region, Grant)> {
        let region = self.enter(Registered { at: at as usize, bytes, is_granted: true })?;
        Ok((region, Grant { key: region.0.into(), base: at as u64 }))
    }

    unsafe fn register_source(&mut self, at: *mut u8, bytes: usize) -> io::Result<Region> {
        self.enter(Registered { at: at as usize, bytes, is_granted: false })
    }

    fn withdraw(&mut self, region: Region) {
        held(&self.network).endpoints[self.me].regions.remove(&u64::from(region.0));
    }

    fn write(
        &mut self,
        to: Peer,
        from: Region,
        at: usize,
        bytes: usize,
        grant: Grant,
        offset: u64,
        notice: u32,
        token: u64,
    ) -> Result<(), Refused> {
        let network = &mut *held(&self.network);
        let (me, to) = (self.me, to.0 as usize);
        let region = network.endpoints[me].regions.get(&u64::from(from.0));
        let region = *region.ok_or_else(|| Refused::Failed(invalid("no such region")))?;
        if at > region.bytes || bytes > region.bytes - at {
            return Err(Refused::Failed(invalid("beyond the region")));
        }
        let Some((number, episode)) = network.take(me, to, token)? else { return Ok(()) };
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < bytes {
            let most = if network.rng.random() { 64 } else { 16 << 10 };
            let n = network.rng.random_range(1..=most).min(bytes - done);
            // SAFETY: within what is registered, which stays mapped until it is withdrawn.
            let piece =
                unsafe { std::slice::from_raw_parts((region.at + at + done) as *const u8, n) };
            let address = grant.base.wrapping_add(offset + done as u64);
            pieces.push(What::Piece { address, bytes: piece.to_vec() });
            done += n;
        }
        let (key, mut left) = (grant.key, pieces.len());
        if network.disorder.broken == Some(Promise::Notice) {
            left = left.div_ceil(2);
        }
        network.writes.insert(number, Writing { key, notice, left });
        for what in pieces {
            let delay = network.delay(bytes);
            network.fly(Flight { from: me, to, episode, put_off: false, number, what }, delay);
        }
        Ok(())
    }

    fn send(&mut self, to: Peer, message: &[u8], token: u64) -> Result<(), Refused> {
        let network = &mut *held(&self.network);
        let (me, to) = (self.me, to.0 as usize);
        if message.len() > MESSAGE_BYTES {
            return Err(Refused::Failed(invalid("too long a message")));
        }
        let Some((number, episode)) = network.take(me, to, token)? else { return Ok(()) };
        let delay = network.delay(message.len());
        let what = What::Message(message.to_vec());
        network.fly(Flight { from: me, to, episode, put_off: false, number, what }, delay);
        Ok(())
    }

    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) {
        let told: Vec<_> = {
            let endpoint = &mut held(&self.network).endpoints[self.me];
            endpoint.sleeps = false;
            let n = endpoint.told.len().min(TOLD_MOST);
            endpoint.told.drain(..n).collect()
        };
        for told in told {
            match told {
                Told::Done(token) => tell(Event::Done { token }),
                Told::Failed(token) => tell(Event::Failed { token, error: lost() }),
                Told::Noticed(notice) => tell(Event::Noticed { notice }),
                Told::Message(bytes) => tell(Event::Message(&bytes)),
                Told::Broken => tell(Event::Broken(lost())),
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        (*self.fd).as_fd()
    }

    fn may_sleep(&mut self) -> bool {
        let endpoint = &mut held(&self.network).endpoints[self.me];
        endpoint.sleeps = endpoint.told.is_empty();
        endpoint.sleeps
    }
}

impl Drop for SimulatedRail {
    /// What is under way to it comes nowhere.
    fn drop(&mut self) {
        let endpoint = &mut held(&self.network).endpoints[self.me];
        (endpoint.works, endpoint.sleeps) = (false, false);
        endpoint.regions.clear();
        endpoint.told.clear();
    }
}
