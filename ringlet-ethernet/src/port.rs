//! A port of a network, for whoever has frames: the TAP device's loop, or a program with a stack of its own.
//!
//! Each [`Queue`] is for one thread. It sends to the port that has the destination's address, or to all. Where there is only one other port, nobody
//! else can be kept waiting: there the frame is written where that one will read it, and one that has no room is waited for ([`Queue::fill`]). One of
//! several is waited for as long as the others lose little by it ([`Queue::offer`], `patience`); then it loses the frame, as one of many does to whom
//! a frame for all goes.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringlet::waiting::spin;
use ringlet_core::queue::{Message, Next, Reserved};
use ringlet_linux::sys;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::counters::{Counters, Dropped, Totals, Traffic, add};
use crate::frame::{HEAD_BYTES, Head, MESSAGE_MOST, Mac};
use crate::keeper::{Keeper, is_name};
use crate::room::{PORTS_MOST, Room, Seat};
use crate::strand::{RING_BYTES, RINGS, Strand};
use crate::table::{Bucket, Key, Source, Table};
use crate::wire::About;

mod in_place;
mod patience;

pub use in_place::{Place, Refused};
use patience::{Patience, Waits};

pub const QUEUES_MOST: u16 = 16;
/// A strand in which nothing was found so often rings from then on, and is not looked at.
const QUIET_LOOKS: u32 = 256;
/// How long an address's user is taken to be the same without a look at the table, which so learns that it is used.
const TRUST_MS: u64 = 1000;
/// For one that was there before and does not answer.
const MEET: Duration = Duration::from_secs(2);
/// Events of one sleep.
const EVENTS: usize = 64;
/// Messages of one strand before the others have their turn.
const TURN: usize = 16;
/// A look at what is not memory costs a system call: one of so many.
const LOOKS_PER_CALL: u32 = 8;
/// A busy thread hears what rings in one pass of so many.
const PASSES_PER_CALL: u32 = 64;
/// `epoll`'s word of what is not a strand.
const ORDERS: u64 = u64::MAX;
const OUTSIDE: u64 = u64::MAX - 1;
const TIMER: u64 = u64::MAX - 2;
/// Other ports that were sent to so long ago are taken to have nothing behind what waits.
const LATELY_MS: u64 = 1000;

#[derive(Clone, Debug)]
pub struct Options {
    /// As others see it: the device's name.
    pub name: String,
    pub mac: Mac,
    pub queues: u16,
    pub ring_bytes: usize,
}

impl Options {
    /// Of a port of one queue.
    pub fn new(name: impl Into<String>, mac: Mac) -> Options {
        Options { name: name.into(), mac, queues: 1, ring_bytes: RING_BYTES }
    }
}

/// What the keeper tells who has opened the port.
#[derive(Debug)]
pub enum Event {
    /// So many other ports are there now.
    Ports(usize),
    /// Another one does not want us, or was put out.
    Apart(String),
    /// Somebody has asked the port to end.
    End,
}

pub(crate) enum Order {
    Add {
        key: Key,
        sends: bool,
        strand: Arc<Strand>,
        traffic: Arc<Traffic>,
        storm: Arc<Mutex<Bucket>>,
    },
    Remove(Key),
}

/// What a queue's thread and the keeper have in common.
#[derive(Default)]
pub(crate) struct Desk {
    orders: Mutex<Vec<Order>>,
    has_orders: AtomicBool,
    bell: Option<OwnedFd>,
    pub counters: Counters,
}

/// Which groups the port does not want, by their bits; and the strands to which that was said.
#[derive(Default)]
pub(crate) struct Wants {
    all_but: u64,
    strands: Vec<Weak<Strand>>,
}

impl Wants {
    /// A strand is to be used from now on.
    pub fn tell(&mut self, strand: &Arc<Strand>) {
        strand.want_all_but(self.all_but);
        self.strands.retain(|strand| strand.strong_count() > 0);
        self.strands.push(Arc::downgrade(strand));
    }
}

pub(crate) struct Shared {
    pub room: Room,
    pub about: About,
    pub ring_bytes: usize,
    pub table: RwLock<Table>,
    /// Counted up when the table has changed.
    pub changes: AtomicU64,
    pub desks: Vec<Desk>,
    /// How many others there are.
    pub ports: AtomicUsize,
    /// Ports whose strands have ended, and why.
    pub gone: Mutex<Vec<(Key, &'static str)>>,
    pub wants: Mutex<Wants>,
    /// Brings up to date what is said of the port to who asks, if it can change.
    pub present: OnceLock<Present>,
    pub is_over: AtomicBool,
    pub bell: OwnedFd,
    began: Instant,
}

pub(crate) type Present = Box<dyn Fn(&mut About) + Send + Sync>;

impl Shared {
    pub fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    pub fn order(&self, queue: usize, order: Order) {
        let desk = &self.desks[queue];
        desk.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        // ORDER: Release; pairs with `take_orders` (Acquire).
        desk.has_orders.store(true, Ordering::Release);
        desk.bell.iter().for_each(ring);
    }

    pub fn totals(&self) -> Totals {
        Totals::of(self.desks.iter().map(|desk| &desk.counters))
    }
}

pub(crate) fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

pub(crate) fn new_bell() -> Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// A port that is open. Dropped, it leaves the network.
pub struct Port {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

impl Port {
    /// Joins a network, and returns when those that are there have been met (or one has not answered for two seconds): what is sent from then on
    /// reaches them. `tell` is called by a thread of the port's own, before that too.
    pub fn open(
        room: Room,
        options: Options,
        tell: impl FnMut(Event) + Send + 'static,
    ) -> Result<(Port, Vec<Queue>)> {
        Port::join(room, options, Kind::Plain, tell)
    }

    /// The same, of any kind.
    pub(crate) fn join(
        room: Room,
        options: Options,
        kind: Kind,
        tell: impl FnMut(Event) + Send + 'static,
    ) -> Result<(Port, Vec<Queue>)> {
        ensure!(
            (1..=QUEUES_MOST).contains(&options.queues),
            "a port has 1 to {QUEUES_MOST} queues"
        );
        ensure!(
            !room.is_full()?,
            "network {:?} has {PORTS_MOST} ports, and takes no more",
            room.name
        );
        ensure!(
            is_name(&options.name),
            "a port's name is of up to 64 bytes, without control characters: not {:?}",
            options.name
        );
        ensure!(
            RINGS.contains(&options.ring_bytes) && options.ring_bytes.is_power_of_two(),
            "a ring is of {} to {} bytes, a power of two: not {}",
            RINGS.start(),
            RINGS.end(),
            options.ring_bytes
        );
        watch_the_crowd();
        let mut id = [0; 8];
        ensure!(sys::random(&mut id), "the kernel has no random bytes yet");
        let about = About {
            id: u64::from_ne_bytes(id),
            name: options.name,
            mac: options.mac,
            queues: options.queues,
            pid: std::process::id(),
            namespace: namespace()?,
            far: kind == Kind::Far,
            bridge: kind == Kind::Bridge,
        };
        let desk = || Ok(Desk { bell: Some(new_bell()?), ..Desk::default() });
        let shared = Arc::new(Shared {
            ring_bytes: options.ring_bytes,
            table: RwLock::new(Table::new(room.rules.addresses)),
            changes: AtomicU64::new(0),
            desks: (0..options.queues).map(|_| desk()).collect::<Result<_>>()?,
            gone: Mutex::default(),
            ports: AtomicUsize::new(0),
            wants: Mutex::default(),
            present: OnceLock::new(),
            is_over: AtomicBool::new(false),
            bell: new_bell()?,
            began: Instant::now(),
            about,
            room,
        });
        let queues = (0..usize::from(options.queues))
            .map(|number| Queue::new(&shared, number))
            .collect::<Result<_>>()?;
        // (Listening before the others are looked for: of two that come at once one at least finds the other.)
        let seat = Seat::take(&shared.room, shared.about.id)?;
        let (meets, met) = channel();
        let keeper = Keeper::new(Arc::clone(&shared), seat, Box::new(tell), meets)?;
        let keeper =
            std::thread::Builder::new().name("keeper".into()).spawn(move || keeper.keep())?;
        let _ = met.recv_timeout(MEET);
        Ok((Port { shared, keeper: Some(keeper) }, queues))
    }

    pub fn totals(&self) -> Totals {
        self.shared.totals()
    }

    /// How many other ports are there.
    pub fn others(&self) -> usize {
        self.shared.ports.load(Ordering::Relaxed)
    }

    /// From the moment on in which this returns other ports send broadcast and these groups here, and leave out others as far as they can tell them
    /// apart (`None`, as at first: all groups). Some of those still come, and all from a network's only other port.
    pub fn want(&self, groups: Option<&[Mac]>) {
        let bits = |groups: &[Mac]| groups.iter().fold(0, |sum, group| sum | group.group());
        let mut wants = self.shared.wants.lock().unwrap_or_else(PoisonError::into_inner);
        wants.all_but = groups.map_or(0, |groups| !bits(groups));
        for strand in wants.strands.iter().filter_map(Weak::upgrade) {
            strand.want_all_but(wants.all_but);
        }
    }

    /// (Once.)
    pub(crate) fn is_presented_by(&self, present: impl Fn(&mut About) + Send + Sync + 'static) {
        let _ = self.shared.present.set(Box::new(present));
    }

    /// The queues' threads find that it is over.
    pub fn end(&self) {
        self.ender().end();
    }

    /// For who has other addresses of this host behind the port.
    pub(crate) fn holder(&self) -> Holder {
        Holder(Arc::clone(&self.shared))
    }

    /// For who is to end the port without having it.
    pub fn ender(&self) -> Ender {
        Ender(Arc::clone(&self.shared))
    }
}

/// What is behind a port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    /// Another host's ports.
    Far,
    /// Devices of this host, on a bridge.
    Bridge,
}

/// Keeps addresses for who is behind the port, so that no other port gets them.
pub(crate) struct Holder(Arc<Shared>);

/// Beside the keys of ports.
const HELD: Key = 1 << 63;

impl Holder {
    /// The port's number.
    pub fn id(&self) -> u64 {
        self.0.about.id
    }

    pub fn others(&self) -> usize {
        self.0.ports.load(Ordering::Relaxed)
    }

    /// An address that is its own, of this user's. False: it is another one's.
    pub fn hold(&self, number: u64, user: Option<u32>, mac: Mac) -> bool {
        let now_ms = self.0.now_ms();
        self.table().join(HELD | number, user, mac, false, now_ms)
    }

    pub fn let_go(&self, number: u64) {
        self.table().leave(HELD | number);
    }

    fn table(&self) -> std::sync::RwLockWriteGuard<'_, Table> {
        self.0.changes.fetch_add(1, Ordering::Relaxed);
        self.0.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone)]
pub struct Ender(Arc<Shared>);

impl Ender {
    pub fn end(&self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        self.0.desks.iter().flat_map(|desk| &desk.bell).for_each(ring);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.end();
        ring(&self.shared.bell);
        let _ = self.keeper.take().map(JoinHandle::join);
    }
}

/// This thread's network namespace, by its inode.
pub fn namespace() -> Result<u64> {
    Ok(rustix::fs::stat("/proc/thread-self/ns/net")
        .context("/proc/thread-self/ns/net (is /proc mounted?)")?
        .st_ino)
}

/// Watching gives way where others want the processors.
fn watch_the_crowd() {
    static LOAD: OnceLock<Option<i32>> = OnceLock::new();
    let load = || *LOAD.get_or_init(|| sys::open_load().ok());
    spin::start(spin::Outside { load, tell: |_, _, _| {}, for_latency: true });
}

/// One other port's, of this queue.
struct Lane {
    key: Key,
    sends: bool,
    strand: Arc<Strand>,
    traffic: Arc<Traffic>,
    /// Looks in vain, one after the other. It is among `hot` until they are `QUIET_LOOKS`.
    quiet: u32,
    /// All the port's strands have it, however many those are.
    storm: Arc<Mutex<Bucket>>,
    patience: Patience,
}

/// What the table said last, and until when that holds.
#[derive(Default)]
struct Cache {
    changes: u64,
    until_ms: u64,
    source: Option<(Mac, Key)>,
    destination: Option<(Mac, Option<Key>)>,
}

/// A frame that has come. What its head says can't change any more; the rest its sender may still write to.
pub struct Arrived<'a> {
    pub head: &'a Head,
    /// All of the message: the head's bytes as they are now, and what follows.
    at: *const u8,
    pub len: usize,
}

impl Arrived<'_> {
    /// The head's copy, and what lies behind it: for `writev`.
    pub fn pieces(&self) -> [libc::iovec; 2] {
        let head = libc::iovec { iov_base: self.head.0.as_ptr() as *mut _, iov_len: HEAD_BYTES };
        let rest = libc::iovec {
            iov_base: self.at.wrapping_add(HEAD_BYTES) as *mut _,
            iov_len: self.len - HEAD_BYTES,
        };
        [head, rest]
    }

    /// Copies the message, as much as there is room for; how much that was.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let total = self.len.min(to.len());
        let head = total.min(HEAD_BYTES);
        to[..head].copy_from_slice(&self.head.0[..head]);
        // SAFETY: `len` bytes lie at `at` until the message is released, which is behind the call that was given this. Its sender may write there
        // meanwhile: bytes are copied raw.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(self.at.add(head), to[head..].as_mut_ptr(), total - head);
        }
        total
    }
}

/// What became of a frame that was to be written into its only receiver's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filled {
    Sent,
    /// There was none.
    Nothing,
    /// There is no room; the queue is ready again when there is.
    Full,
    /// There are several other ports, or none: `send`.
    NotAlone,
}

pub struct Queue {
    shared: Arc<Shared>,
    number: usize,
    epoll: OwnedFd,
    lanes: Vec<Option<Lane>>,
    /// Those that are looked at. The others ring.
    hot: Vec<usize>,
    /// Those that this queue sends to; and the one that is the only one.
    out: HashMap<Key, usize>,
    only: Option<usize>,
    cache: Cache,
    now_ms: u64,
    passes: u32,
    /// Whose queue had no room, of those that are waited for; and until when, if it is not for ever.
    full: Option<usize>,
    until_ms: Option<u64>,
    waits: Waits,
    /// Ends a sleep then.
    timer: OwnedFd,
    /// Whom the last frame for one of several went to, and when that was another one.
    last: Option<usize>,
    changed_ms: Option<u64>,
    /// Where the next message is to be written, which is not sent yet.
    reserved: Option<in_place::At>,
    /// What was sent there last, its receiver was not woken for.
    unrung: Option<usize>,
    /// How many places were asked for.
    places: u32,
    /// For messages that go to several ports.
    copied: Vec<u8>,
    /// Taken and not yet released: so many of each strand, in this order.
    held: Vec<Message>,
    holds: Vec<(Arc<Strand>, usize)>,
    /// Somebody waits on the descriptor, it may be.
    is_armed: bool,
    /// See `heard_outside`.
    outside: Option<bool>,
    /// Whom frames are for is woken by `flush`, and not for each of them.
    gathers: bool,
}

impl Queue {
    fn new(shared: &Arc<Shared>, number: usize) -> Result<Queue> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = shared.desks[number].bell.as_ref().context("a bell")?;
        epoll::add(&epoll, bell, epoll::EventData::new_u64(ORDERS), epoll::EventFlags::IN)?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        let (lanes, hot, out, held, holds) = Default::default();
        let shared = Arc::clone(shared);
        Ok(Queue {
            shared,
            number,
            epoll,
            lanes,
            hot,
            out,
            only: None,
            cache: Cache::default(),
            now_ms: 0,
            passes: 0,
            full: None,
            until_ms: None,
            waits: Waits::default(),
            timer,
            last: None,
            changed_ms: None,
            reserved: None,
            unrung: None,
            places: 0,
            copied: Vec::new(),
            held,
            holds,
            is_armed: false,
            outside: None,
            gathers: false,
        })
    }

    pub fn number(&self) -> usize {
        self.number
    }

    /// A descriptor that ends `wait` as long as there is something to read. (Who does not read, since there is no room for it, says so by `heed`.)
    pub(crate) fn watch_level(&self, fd: impl AsFd) -> Result<()> {
        let data = epoll::EventData::new_u64(OUTSIDE);
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    /// From now on what can be read there ends `wait`, or does not.
    pub(crate) fn heed(&self, fd: impl AsFd, heeds: bool) -> Result<()> {
        let data = epoll::EventData::new_u64(OUTSIDE);
        // KERNEL: a TAP device says nothing urgent, so that does not end a sleep; but who asks for nothing at all is not told of its end, which is
        // announced as what can be read is (tun_detach_all, ep_poll_callback).
        let flags = if heeds { epoll::EventFlags::IN } else { epoll::EventFlags::PRI };
        Ok(epoll::modify(&self.epoll, fd, data, flags)?)
    }

    /// What was last heard of the descriptor of `watch_level`, since this was asked: is there something to read? `None`: nobody has looked.
    pub(crate) fn heard_outside(&mut self) -> Option<bool> {
        self.outside.take()
    }

    /// A descriptor that ends `wait` when something new comes there. (Who reads from it does so behind `begin`, until there is nothing more.)
    pub fn watch_outside(&self, fd: impl AsFd) -> Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(OUTSIDE),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?)
    }

    fn counters(&self) -> &Counters {
        &self.shared.desks[self.number].counters
    }

    pub fn dropped(&self, why: Dropped) {
        self.counters().dropped(why);
    }

    /// Has the port ended?
    pub fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::Relaxed)
    }

    /// What a pass begins with: the time, what the keeper has said, and now and then what rings, of which who is busy would not hear.
    pub fn begin(&mut self) {
        self.flush();
        self.now_ms = self.shared.now_ms();
        self.passes = self.passes.wrapping_add(1);
        if std::mem::take(&mut self.is_armed) || self.passes.is_multiple_of(PASSES_PER_CALL) {
            self.note_sent();
            // (What fails here fails in a wait, too.)
            let _ = self.hear(Some(&Timespec::default()));
        }
        self.take_orders();
        self.lose_patience();
        let changes = self.shared.changes.load(Ordering::Relaxed);
        if self.cache.changes != changes || self.cache.until_ms <= self.now_ms {
            self.cache = Cache { changes, until_ms: self.now_ms + TRUST_MS, ..Cache::default() };
        }
    }

    fn has_orders(&self) -> bool {
        self.shared.desks[self.number].has_orders.load(Ordering::Relaxed)
    }

    fn take_orders(&mut self) {
        if !self.has_orders() {
            return;
        }
        let desk = &self.shared.desks[self.number];
        // ORDER: Acquire; pairs with `order` (Release).
        desk.has_orders.swap(false, Ordering::Acquire);
        let orders =
            std::mem::take(&mut *desk.orders.lock().unwrap_or_else(PoisonError::into_inner));
        for order in orders {
            match order {
                Order::Add { key, sends, strand, traffic, storm } => {
                    let patience = Patience::default();
                    self.add(Lane { key, sends, strand, traffic, quiet: 0, storm, patience });
                }
                Order::Remove(key) => {
                    let of =
                        |lane: &Option<Lane>| lane.as_ref().is_some_and(|lane| lane.key == key);
                    let all: Vec<usize> =
                        (0..self.lanes.len()).filter(|at| of(&self.lanes[*at])).collect();
                    all.into_iter().for_each(|at| self.remove(at));
                }
            }
        }
    }

    fn add(&mut self, lane: Lane) {
        let (key, sends) = (lane.key, lane.sends);
        let at = self.lanes.iter().position(Option::is_none).unwrap_or(self.lanes.len());
        let data = epoll::EventData::new_u64(at as u64);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if epoll::add(&self.epoll, &*lane.strand.socket, data, flags).is_err() {
            return self.tell_gone(key, "its bell can't be heard");
        }
        let lane = Some(lane);
        match self.lanes.get_mut(at) {
            Some(free) => *free = lane,
            None => self.lanes.push(lane),
        }
        self.hot.push(at);
        if sends {
            self.out.insert(key, at);
            self.find_only();
        }
        self.full = None;
        self.cut_wait();
    }

    fn remove(&mut self, at: usize) {
        let Some(lane) = self.lanes[at].take() else { return };
        let _ = epoll::delete(&self.epoll, &*lane.strand.socket);
        self.hot.retain(|hot| *hot != at);
        if lane.sends {
            self.out.remove(&lane.key);
            self.find_only();
        }
        self.full = None;
        self.cut_wait();
        self.reserved = None;
        self.unrung = self.unrung.filter(|unrung| *unrung != at);
    }

    fn tell_gone(&self, key: Key, why: &'static str) {
        self.shared.gone.lock().unwrap_or_else(PoisonError::into_inner).push((key, why));
        ring(&self.shared.bell);
    }

    fn fail(&mut self, at: usize, why: &'static str) {
        if let Some(lane) = &self.lanes[at] {
            self.tell_gone(lane.key, why);
        }
        self.remove(at);
    }

    /// Sends a message: a header, and an Ethernet frame of this port's. Copied; what can't be sent is counted.
    pub fn send(&mut self, message: &[u8]) {
        self.send_copy(message);
    }

    /// False: nobody gets it.
    fn send_copy(&mut self, message: &[u8]) -> bool {
        let Some(head) = message
            .first_chunk()
            .map(|head| Head(*head))
            .filter(|head| head.is_sound(message.len()))
        else {
            self.dropped(Dropped::Malformed);
            return false;
        };
        if self.out.is_empty() {
            self.dropped(Dropped::NoPort);
            return false;
        }
        let to =
            if head.destination().is_multicast() { None } else { self.find(head.destination()) };
        let sent = match to.map(|key| self.out.get(&key).copied()) {
            Some(Some(at)) => {
                self.note_receiver(Some(at));
                self.push(at, message)
            }
            // (It is known, and its strand is not there yet or no more. Others do not see it for that.)
            Some(None) => {
                self.dropped(Dropped::NoPort);
                false
            }
            None => {
                self.note_receiver(None);
                self.push_to_all(head.destination(), message)
            }
        };
        if sent {
            self.sent(message.len());
        }
        sent
    }

    /// To all that want it, if any do. False: they had no room.
    fn push_to_all(&self, to: Mac, message: &[u8]) -> bool {
        let group = if to.is_multicast() { to.group() } else { 0 };
        let wants = |at: &&usize| {
            self.lanes[**at].as_ref().is_some_and(|lane| lane.strand.is_wanted(group))
        };
        let wanting = self.out.values().filter(wants);
        let (all, took) = wanting
            .fold((0, 0), |(all, took), at| (all + 1, took + usize::from(self.push(*at, message))));
        all == 0 || took > 0
    }

    fn sent(&self, bytes: usize) {
        add(&self.counters().sent, 1);
        add(&self.counters().sent_bytes, bytes as u64);
    }

    fn push(&self, at: usize, message: &[u8]) -> bool {
        let Some(lane) = &self.lanes[at] else { return false };
        let rang = lane.strand.push(message);
        match rang {
            Some(rang) => {
                add(&lane.traffic.sent, 1);
                add(&self.counters().rang, u64::from(rang));
            }
            None => {
                add(&lane.traffic.full, 1);
                self.dropped(Dropped::Full);
            }
        }
        rang.is_some()
    }

    fn find(&mut self, mac: Mac) -> Option<Key> {
        match self.cache.destination {
            Some((known, key)) if known == mac => key,
            _ => {
                let key = self
                    .shared
                    .table
                    .read()
                    .unwrap_or_else(PoisonError::into_inner)
                    .find(mac, self.now_ms);
                self.cache.destination = Some((mac, key));
                key
            }
        }
    }

    /// Where there is one other port, sends it the message that `read` writes into its queue, of so many bytes at most; `read` returns how many
    /// it wrote, 0 if there is nothing to send.
    pub fn fill(&mut self, read: impl FnOnce(*mut u8, usize) -> usize) -> Filled {
        let Some(at) = self.alone() else {
            // (Of several, `offer` says who is waited for.)
            self.full = self.full.filter(|_| self.until_ms.is_some());
            return Filled::NotAlone;
        };
        let Some((place, pointer)) = self.room_in(at, MESSAGE_MOST) else { return Filled::Full };
        match read(pointer, MESSAGE_MOST) {
            0 => Filled::Nothing,
            len => {
                self.send_reserved(at, place, len);
                Filled::Sent
            }
        }
    }

    /// Room for so many bytes in another port's queue; if there is none, it is waited for.
    fn room_in(&mut self, at: usize, len: usize) -> Option<(Reserved, *mut u8)> {
        let strand = &self.lanes[at].as_ref()?.strand;
        // (Whoever was told of no room has had everybody woken.)
        if self.full == Some(at) && !strand.is_writable() {
            return None;
        }
        let room = strand.reserve(len).or_else(|| {
            add(&self.counters().waited, 1);
            strand.want_room();
            strand.reserve(len)
        });
        if self.until_ms.is_some() {
            self.end_wait(room.is_none().then_some(at));
        }
        self.full = room.is_none().then_some(at);
        if room.is_none() {
            self.flush();
        }
        room
    }

    /// Sends a message as `send` does; but one port that has no room is waited for as long as the others lose little by it. False: then `wait`, and offer
    /// it again.
    pub fn offer(&mut self, message: &[u8]) -> bool {
        let head = message.first_chunk().map(|head| Head(*head));
        let head = head.filter(|head| head.is_sound(message.len()));
        let Some(Ok(Some(at))) = head.map(|head| self.lane_of(head.destination())) else {
            self.send_copy(message);
            return true;
        };
        match self.room_in(at, message.len()) {
            Some((place, _)) => {
                self.lanes[at].iter().for_each(|lane| lane.strand.write(&place, message));
                self.send_reserved(at, place, message.len());
                true
            }
            None if self.is_patient() => false,
            None => {
                self.dropped(Dropped::Full);
                true
            }
        }
    }

    /// There was no room: is it waited for? If not, the message was for nobody.
    pub(crate) fn is_patient(&mut self) -> bool {
        let Some(at) = self.full else { return false };
        if self.alone() == Some(at) {
            self.cut_wait();
            return true;
        }
        if self.until_ms.is_none() {
            self.now_ms = self.shared.now_ms();
            let alone = self
                .changed_ms
                .is_none_or(|changed| self.now_ms - changed.min(self.now_ms) > LATELY_MS);
            let lane = self.lanes[at].as_mut();
            self.until_ms = lane.and_then(|lane| {
                let taken = lane.strand.progress();
                self.waits.begin(&mut lane.patience, self.now_ms, taken, alone)
            });
        }
        if self.until_ms.is_none() {
            self.give_up();
        }
        self.until_ms.is_some()
    }

    /// That wait is over; or it goes on, if it is this port's.
    #[cold]
    fn end_wait(&mut self, still: Option<usize>) {
        let Some(at) = self.full.filter(|full| Some(*full) != still) else { return };
        let now_ms = self.shared.now_ms();
        if let (Some(_), Some(lane)) = (self.until_ms.take(), self.lanes[at].as_mut()) {
            self.waits.end(&mut lane.patience, now_ms, None);
        }
    }

    /// Nobody is waited for any more, and it is nobody's doing.
    fn cut_wait(&mut self) {
        if self.until_ms.take().is_some() {
            self.waits.end_of_none(self.shared.now_ms());
        }
    }

    /// Whom a frame goes to, or all: it would have stood behind one that is waited for.
    fn note_receiver(&mut self, lane: Option<usize>) {
        if lane.is_none_or(|lane| self.last.replace(lane).is_some_and(|last| last != lane)) {
            self.changed_ms = Some(self.now_ms);
        }
    }

    /// Who was waited for long enough loses what is for it, until it takes something.
    fn lose_patience(&mut self) {
        if self.until_ms.is_none_or(|until| until > self.now_ms) {
            return;
        }
        if let Some(lane) = self.full.take().and_then(|at| self.lanes[at].as_mut()) {
            let taken = lane.strand.progress();
            self.waits.end(&mut lane.patience, self.now_ms, Some(taken));
        }
        self.cut_wait();
    }

    fn send_reserved(&mut self, at: usize, place: Reserved, len: usize) {
        if self.gathers && self.unrung != Some(at) {
            self.flush();
        }
        let Some(lane) = &self.lanes[at] else { return };
        add(&lane.traffic.sent, 1);
        match self.gathers {
            true => lane.strand.publish(place, len),
            false => add(&self.counters().rang, u64::from(lane.strand.commit(place, len))),
        }
        self.unrung = self.unrung.or(Some(at).filter(|_| self.gathers));
        self.sent(len);
    }

    /// From now on who gets frames of `fill` and `offer` is woken, if it sleeps, by `flush`, or what waits or begins: for several at once. Or no more.
    pub(crate) fn gather(&mut self, gathers: bool) {
        self.gathers = gathers;
        if !gathers {
            self.flush();
        }
    }

    /// (Of a port that has just come this queue's strand may not be there yet: so it is the keeper who counts.)
    fn alone(&self) -> Option<usize> {
        self.only.filter(|_| self.shared.ports.load(Ordering::Relaxed) == 1)
    }

    fn find_only(&mut self) {
        self.only = self.out.values().next().copied().filter(|_| self.out.len() == 1);
    }

    /// Takes messages from all strands by turns, so many at most. True if there were any.
    pub fn receive(
        &mut self,
        most: usize,
        take: impl FnMut(&Arrived) -> Result<(), Dropped>,
    ) -> bool {
        self.release();
        self.take(most, false, take)
    }

    fn take(
        &mut self,
        most: usize,
        holds: bool,
        mut take: impl FnMut(&Arrived) -> Result<(), Dropped>,
    ) -> bool {
        let (mut left, mut nth) = (most, 0);
        while nth < self.hot.len() && left > 0 {
            let at = self.hot[nth];
            let before = left;
            let whole = self.take_from(at, &mut left, holds, &mut take);
            let lane = self.lanes[at].as_mut();
            match (whole, lane) {
                (Err(why), _) => self.fail(at, why),
                (_, None) => _ = self.hot.swap_remove(nth),
                (_, Some(lane)) if left < before => {
                    lane.quiet = 0;
                    nth += 1;
                }
                (_, Some(lane)) => {
                    lane.quiet += 1;
                    if lane.quiet < QUIET_LOOKS || !cools(lane) {
                        nth += 1;
                    } else {
                        self.hot.swap_remove(nth);
                    }
                }
            }
        }
        // (Who is first has the first turn.)
        if left < most && self.hot.len() > 1 {
            self.hot.rotate_left(1);
        }
        left < most
    }

    fn take_from(
        &mut self,
        at: usize,
        left: &mut usize,
        holds: bool,
        take: &mut impl FnMut(&Arrived) -> Result<(), Dropped>,
    ) -> Result<(), &'static str> {
        let Some(lane) = &self.lanes[at] else { return Ok(()) };
        let (strand, traffic, key) =
            (Arc::clone(&lane.strand), Arc::clone(&lane.traffic), lane.key);
        // (A strand has one turn in each call, before which all is released.)
        let first = self.held.len();
        for _ in 0..TURN.min(*left) {
            let next = match self.held[first..].last() {
                None => strand.peek(),
                Some(before) => strand.peek_behind(before),
            };
            let message = match next {
                Next::Empty => break,
                Next::Corrupt => return Err("it wrote what no port writes"),
                Next::Message(message) => message,
            };
            *left -= 1;
            let len = message.len();
            let mut head = Head([0; HEAD_BYTES]);
            let taken = if len < HEAD_BYTES {
                Err(Dropped::Malformed)
            } else {
                let pointer = strand.look(&message, &mut head.0);
                self.admit(at, key, &head, len)
                    .and_then(|()| take(&Arrived { head: &head, at: pointer, len }))
            };
            if holds {
                self.hold_back(&strand, message);
            } else {
                let rang = strand.release(message);
                add(&self.counters().rang, u64::from(rang));
            }
            match taken {
                Ok(()) => {
                    add(&traffic.received, 1);
                    add(&self.counters().received, 1);
                    add(&self.counters().received_bytes, len as u64);
                }
                Err(why) => self.dropped(why),
            }
        }
        Ok(())
    }

    /// May this frame come from there?
    fn admit(&mut self, at: usize, key: Key, head: &Head, len: usize) -> Result<(), Dropped> {
        if !head.is_sound(len) || !head.source().is_station() {
            return Err(Dropped::Malformed);
        }
        if self.cache.source != Some((head.source(), key)) {
            let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
            match table.source(head.source(), key, self.now_ms) {
                Source::Refused => return Err(Dropped::Source),
                Source::Learned => _ = self.shared.changes.fetch_add(1, Ordering::Relaxed),
                Source::Known | Source::Unlearned => {}
            }
            self.cache.source = Some((head.source(), key));
        }
        let lane = self.lanes[at].as_ref().filter(|_| head.destination().is_multicast());
        let storm = lane.map(|lane| lane.storm.lock().unwrap_or_else(PoisonError::into_inner));
        match storm.is_none_or(|mut storm| storm.takes(self.now_ms)) {
            true => Ok(()),
            false => Err(Dropped::Storm),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        let ready =
            |at: &usize| self.lanes[*at].as_ref().is_some_and(|lane| lane.strand.is_ready());
        self.has_orders() || self.hot.iter().any(ready) || self.has_room()
    }

    /// Is there room again where there was none, or was that waited for long enough?
    fn has_room(&self) -> bool {
        self.full
            .is_some_and(|at| self.lanes[at].as_ref().is_none_or(|lane| lane.strand.is_writable()))
            || self.until_ms.is_some_and(|until| until <= self.shared.now_ms())
    }

    /// Waits for messages, for room if there was none, for what the keeper says, or for `outside`, which is asked now and then: watches for a while,
    /// then sleeps.
    pub fn wait(&mut self, watch_us: u64, outside: impl Fn() -> bool) -> Result<()> {
        self.release();
        let (mut looks, listens, mut is_outside) = (0u32, self.full.is_none(), false);
        let ready = || {
            looks = looks.wrapping_add(1);
            let is_ready = self.is_ready();
            is_outside = !is_ready && listens && looks.is_multiple_of(LOOKS_PER_CALL) && outside();
            is_ready || is_outside
        };
        if spin::watch(watch_us, || None, ready) {
            self.outside = self.outside.or(is_outside.then_some(true));
            return Ok(());
        }
        if self.wish(true) {
            return Ok(());
        }
        add(&self.counters().slept, 1);
        self.hear(None)
    }

    /// Asks to be woken: for messages, if they are wanted, and for room. True if there is something now.
    fn wish(&mut self, data: bool) -> bool {
        self.flush();
        for at in self.hot.iter().filter(|_| data) {
            if let Some(lane) = &self.lanes[*at] {
                lane.strand.want_data();
            }
        }
        if let Some(lane) = self.full.and_then(|at| self.lanes[at].as_ref()) {
            lane.strand.want_room();
        }
        if let Some(until) = self.until_ms {
            // (At least some time: none would be never.)
            let left = Duration::from_millis(until.saturating_sub(self.shared.now_ms()).max(1));
            let it_value = Timespec::try_from(left).unwrap_or_default();
            let once = Itimerspec { it_interval: Timespec::default(), it_value };
            let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
        }
        self.note_sent();
        // (Behind the wishes, which are fences: who has published before either is seen here or rings.)
        if data { self.is_ready() } else { self.has_orders() || self.has_room() }
    }

    /// Takes what rings, after a sleep of so long at most.
    fn hear(&mut self, patience: Option<&Timespec>) -> Result<()> {
        let mut events = Vec::with_capacity(EVENTS);
        let room = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, room, patience) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.outside = Some(self.outside == Some(true));
        for event in events {
            match event.data.u64() {
                ORDERS => {
                    let bell = self.shared.desks[self.number].bell.as_ref().context("a bell")?;
                    let _ = rustix::io::read(bell, &mut [0; 8]);
                }
                OUTSIDE => self.outside = Some(true),
                TIMER => _ = rustix::io::read(&self.timer, &mut [0; 8]),
                at => self.rung(at as usize),
            }
        }
        Ok(())
    }

    fn note_sent(&self) {
        let lanes = self.lanes.iter().flatten();
        lanes.filter(|lane| lane.sends).for_each(|lane| lane.strand.note_sent());
    }

    fn rung(&mut self, at: usize) {
        let Some(lane) = self.lanes.get_mut(at).and_then(Option::as_mut) else { return };
        lane.quiet = 0;
        if !lane.strand.take_bells() {
            return self.fail(at, "it has gone");
        }
        if !self.hot.contains(&at) {
            self.hot.push(at);
        }
    }
}

/// From now on the strand rings. False if something has come meanwhile.
fn cools(lane: &mut Lane) -> bool {
    lane.quiet = 0;
    lane.strand.want_data();
    !lane.strand.is_ready()
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.flush();
        let keys: Vec<Key> = self.lanes.iter().flatten().map(|lane| lane.key).collect();
        keys.into_iter().for_each(|key| self.tell_gone(key, "we have ended"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a receiver that takes each frame at once, and sleeps again.
    #[test]
    fn who_gathers_frames_rings_once_for_them() {
        const FRAMES: usize = 5;
        let folder = tempfile::tempdir().unwrap();
        let rules =
            crate::room::Rules { addresses: crate::Policy::Moving, storm: 0, bridge: false };
        Room::create(folder.path(), "net", rules, None).unwrap();
        let room = Room::open(folder.path(), "net").unwrap();
        let open = |name: &str| {
            let options = Options::new(name, Mac::random().unwrap());
            let (port, mut queues) = Port::open(room.clone(), options, |_| ()).unwrap();
            (port, queues.remove(0))
        };
        let ((first, mut one), (_second, mut other)) = (open("one"), open("other"));
        let mut message = [0; HEAD_BYTES];
        message[crate::frame::HEADER_BYTES..][..6].fill(0xff);
        message[crate::frame::HEADER_BYTES + 6..][..6].copy_from_slice(&first.shared.about.mac.0);
        let mut rings = |gathers: bool| {
            let before = first.totals().rang;
            one.gather(gathers);
            for nth in 0..FRAMES {
                while other.arm() {
                    other.begin();
                    other.receive(1, |_| Ok(()));
                }
                let fill = |one: &mut Queue| {
                    one.fill(|to, _| {
                        // SAFETY: it is writable for the longest message's length.
                        #[allow(unsafe_code)]
                        unsafe {
                            to.copy_from_nonoverlapping(message.as_ptr(), message.len());
                        }
                        message.len()
                    })
                };
                while fill(&mut one) == Filled::NotAlone {
                    one.begin();
                }
                other.begin();
                assert!(other.receive(1, |_| Ok(())), "frame {nth} is there at once");
            }
            // (The last wish is made anew, so that there is somebody to wake.)
            let _ = other.arm();
            one.gather(false);
            first.totals().rang - before
        };
        assert_eq!(rings(false), FRAMES as u64);
        assert_eq!(rings(true), 1);
    }

    /// A program's threads may be in several.
    #[test]
    fn a_thread_has_a_namespace_of_its_own() {
        let ours = namespace().unwrap();
        let theirs = std::thread::spawn(|| {
            // SAFETY: this thread's alone, which opens nothing.
            #[allow(unsafe_code)]
            let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            (done == 0).then(|| namespace().unwrap())
        });
        match theirs.join().unwrap() {
            Some(theirs) => assert_ne!(theirs, ours),
            None => eprintln!("skipped: only root makes network namespaces"),
        }
    }
}
