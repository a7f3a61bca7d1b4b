//! Another host, as a port of the network: its thread gives what comes for that port to the host, by the first of its ways that works, and what
//! comes from the host, by whichever, to the network. So to all others a host is a port like any other: its addresses are learned and guarded, a
//! frame for all goes to it once, and while it is slow only frames for it are lost. It is there while a way is.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail, ensure};
use ringlet::waiting::spin;
use ringlet_linux::sys;
use ringlet_messages::native::{self, Channel};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::carried::Carried;
use crate::counters::Dropped;
use crate::frame::{HEAD_BYTES, MESSAGE_MOST, Mac};
use crate::port::{Event, Filled, Kind, Options, Port, Queue};
use crate::room::Room;
pub use crate::udp::PORT;
use crate::udp::{BEAT, Udp};
use crate::wire::{Choice, Reach, Way as Told};

/// Frames of one way before the other has its turn.
const TURN: usize = 64;
/// Before what could not be a port is tried again.
const TRY_AGAIN: Duration = BEAT;
const BEAT_TIME: Timespec =
    Timespec { tv_sec: BEAT.as_secs() as i64, tv_nsec: BEAT.subsec_nanos() as i64 };
/// A look at a socket costs a system call: one of so many.
const LOOKS_PER_CALL: u32 = 8;
pub const WAYS_MOST: usize = 4;
const NAME_MOST: usize = 63;

/// Where a host is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// By the node services.
    Node(String),
    Udp(SocketAddr),
}

/// A host, by its addresses: the first that works is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host(pub Vec<Address>);

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Address> {
        // (An IPv4 address is one however it is spelt: the kernel gives what comes from there to one socket.)
        let canonical =
            |ip: IpAddr, port| Ok(Address::Udp(SocketAddr::new(ip.to_canonical(), port)));
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().to_canonical().is_ipv4() => {
                return canonical(address.ip(), address.port());
            }
            Ok(address) => return Ok(Address::Udp(address)),
            Err(_) => {}
        }
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return canonical(ip, PORT);
        }
        let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        ensure!(
            (1..=NAME_MOST).contains(&text.len()) && text.bytes().all(sane),
            "a host is named by its node, as `ringlet node status` shows it, or by a numeric address for UDP, like 10.0.0.2 or [::1]:{PORT}: not {text:?}"
        );
        Ok(Address::Node(text.to_owned()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Address::Node(node) => write!(to, "node {node}"),
            Address::Udp(address) => write!(to, "UDP {address}"),
        }
    }
}

impl FromStr for Host {
    type Err = Error;

    fn from_str(text: &str) -> Result<Host> {
        let ways: Vec<Address> = text.split(',').map(str::parse).collect::<Result<_>>()?;
        ensure!(ways.len() <= WAYS_MOST, "a host has {WAYS_MOST} ways at most");
        let doubled = ways.iter().enumerate().any(|(at, way)| ways[..at].contains(way));
        ensure!(!doubled, "{text:?} names a way twice");
        Ok(Host(ways))
    }
}

impl Host {
    /// The port's name.
    pub fn name(&self) -> String {
        match &self.0[0] {
            Address::Node(node) => node.clone(),
            Address::Udp(address) => address.to_string(),
        }
    }

    pub fn nodes(&self) -> impl Iterator<Item = &String> {
        self.0.iter().filter_map(|way| match way {
            Address::Node(node) => Some(node),
            Address::Udp(_) => None,
        })
    }
}

/// What a host's thread is told, and what it tells.
pub(crate) struct Post {
    pub is_over: AtomicBool,
    choice: AtomicU8,
    has_news: AtomicBool,
    news: Mutex<Vec<News>>,
    bell: OwnedFd,
    reach: Mutex<Reach>,
    /// Nodes that are to be called.
    apart: Mutex<Vec<String>>,
}

pub(crate) enum News {
    Called(String, Result<Channel, native::Error>),
    Came(String, Channel),
}

impl Post {
    pub fn new(host: &Host) -> Result<Arc<Post>> {
        let ways = host.0.iter().map(|way| Told {
            address: way.to_string(),
            up: false,
            why: None,
            lost: 0,
        });
        Ok(Arc::new(Post {
            is_over: AtomicBool::new(false),
            choice: AtomicU8::new(Choice::Auto as u8),
            has_news: AtomicBool::new(false),
            news: Mutex::default(),
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            reach: Mutex::new(Reach { name: host.name(), by: None, ways: ways.collect() }),
            apart: Mutex::new(host.nodes().cloned().collect()),
        }))
    }

    fn ring(&self) {
        // ORDER: Release; pairs with `take_news` (Acquire).
        self.has_news.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.ring();
    }

    pub fn choose(&self, choice: Choice) {
        self.choice.store(choice as u8, Ordering::Relaxed);
        self.ring();
    }

    pub fn put(&self, news: News) {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).push(news);
        self.ring();
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    pub fn reach(&self) -> Reach {
        self.reach.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn is_apart(&self, node: &str) -> bool {
        self.apart.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|apart| apart == node)
    }
}

/// Who spans hosts has a random number, which others are told: so one that is reached as two hosts is found out, and one that is this process itself.
pub(crate) struct Spans {
    own: u64,
    /// Of each host, in the order in which they are named.
    theirs: Mutex<Vec<(String, Option<Found>)>>,
}

/// Who is there, and the first of the ways there, in an order that both ends see: so of two that are one both ends use the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    number: u64,
    /// Of both ends; `None`, the first, by the node services.
    by: Option<[SocketAddr; 2]>,
}

impl Spans {
    pub fn new(hosts: &[Host]) -> Result<Spans> {
        let theirs = hosts.iter().map(|host| (host.name(), None)).collect();
        Ok(Spans { own: random()?, theirs: Mutex::new(theirs) })
    }

    /// What is found there. Why that is no other host, if it is none.
    fn is(&self, nth: usize, found: Option<Found>) -> Option<String> {
        let mut theirs = self.theirs.lock().unwrap_or_else(PoisonError::into_inner);
        theirs[nth].1 = found;
        let found = found?;
        if found.number == self.own {
            return Some("this host itself".into());
        }
        let numbered = theirs.iter().enumerate();
        let same =
            numbered.filter(|(_, (_, other))| other.is_some_and(|it| it.number == found.number));
        let first = same.min_by_key(|(at, (_, other))| (*other, *at)).filter(|(at, _)| *at != nth);
        first.map(|(_, (name, _))| {
            format!("{name}: name a host once, with all its ways (`--peer {name},...`)")
        })
    }
}

fn random() -> Result<u64> {
    let mut bits = [0; 8];
    ensure!(sys::random(&mut bits), "the kernel has no random bytes yet");
    Ok(u64::from_ne_bytes(bits))
}

enum Way {
    Node(String, Box<Carried>),
    Udp(Box<Udp>),
}

impl Way {
    /// The number of who is there, if somebody is.
    fn span(&self) -> Option<u64> {
        match self {
            Way::Node(_, carried) => carried.span(),
            Way::Udp(udp) => udp.span(),
        }
    }

    fn found(&self) -> Option<Found> {
        let by = match self {
            Way::Node(..) => None,
            Way::Udp(udp) => Some(udp.ends()),
        };
        self.span().map(|number| Found { number, by })
    }

    fn is_of(&self, choice: u8) -> bool {
        match self {
            Way::Node(..) => choice != Choice::Udp as u8,
            Way::Udp(_) => choice != Choice::Node as u8,
        }
    }

    fn is_free(&mut self) -> bool {
        match self {
            Way::Node(_, carried) => carried.is_free(),
            Way::Udp(udp) => udp.is_free(),
        }
    }

    fn send(&mut self, message: &[u8]) {
        match self {
            Way::Node(_, carried) => carried.send(message),
            Way::Udp(udp) => udp.send(message),
        }
    }

    fn receive(&mut self, to: &mut Vec<u8>) -> bool {
        match self {
            Way::Node(_, carried) => carried.receive(to),
            Way::Udp(udp) => udp.receive(to),
        }
    }

    /// What wakes: for what comes, or also for room.
    fn descriptors<'a>(&'a self, for_room: bool, tell: &mut dyn FnMut(BorrowedFd<'a>, PollFlags)) {
        match self {
            Way::Node(_, carried) => carried.descriptors(&mut |fd| tell(fd, PollFlags::IN)),
            Way::Udp(udp) => {
                let out = if for_room { PollFlags::OUT } else { PollFlags::empty() };
                tell(udp.as_fd(), PollFlags::IN | out);
            }
        }
    }
}

pub(crate) struct Far {
    room: Room,
    name: String,
    post: Arc<Post>,
    spans: Arc<Spans>,
    nth: usize,
    /// What it is, if it is no other host, or one that is reached by another name.
    double: Option<String>,
    /// Why it could not be a port here, and when that was.
    failed: Option<(String, Instant)>,
    ways: Vec<Way>,
    watch_us: u64,
    timer: OwnedFd,
    beat: Option<Instant>,
    /// A frame on its way to the network, and one that leaves.
    held: Vec<u8>,
    leaving: Vec<u8>,
}

/// Nothing more to do now; or the way by which is sent has no room.
#[derive(PartialEq, Eq)]
enum Pass {
    Busy,
    Idle,
    Blocked,
}

impl Far {
    pub fn new(
        room: Room,
        (host, nth): (&Host, usize),
        spans: Arc<Spans>,
        (listen, watch_us): (Option<SocketAddr>, u64),
        post: Arc<Post>,
    ) -> Result<Far> {
        let open = |address: &Address| -> Result<Way> {
            Ok(match address {
                Address::Node(node) => Way::Node(node.clone(), Box::new(Carried::new(spans.own))),
                Address::Udp(peer) => {
                    let ends = (listen, *peer);
                    Way::Udp(Box::new(Udp::open(ends, &room.name, spans.own)?))
                }
            })
        };
        let ways = host.0.iter().map(open).collect::<Result<_>>()?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let (held, leaving) = Default::default();
        Ok(Far {
            name: host.name(),
            room,
            post,
            spans,
            nth,
            double: None,
            failed: None,
            ways,
            watch_us,
            timer,
            beat: None,
            held,
            leaving,
        })
    }

    /// Until it is over.
    pub fn run(mut self, tell: &(impl Fn(Event) + Clone + Send + 'static)) -> Result<()> {
        let mut told = None;
        while !self.post.is_over() {
            self.look_around();
            if self.double.is_some() && told != self.double {
                told.clone_from(&self.double);
                let what = told.as_deref().unwrap_or_default();
                tell(Event::Apart(format!("{} is {what}", self.name)));
            }
            // (What comes while nothing can be sent there is nobody's.)
            for way in &mut self.ways {
                (0..TURN).take_while(|_| way.receive(&mut self.held)).for_each(drop);
            }
            self.held.clear();
            // (What is lacking here, or another port has, may be free later; the other hosts' ports have nothing to do with it.)
            let is_soon = self.failed.as_ref().is_some_and(|(_, at)| at.elapsed() < TRY_AGAIN);
            if self.best().is_none() || is_soon {
                self.sleep(None)?;
                continue;
            }
            let before = self.failed.take().map(|(before, _)| before);
            let why = self.serve(tell.clone()).err().map(|error| format!("{error:#}"));
            if let Some(why) = why {
                if before.as_ref() != Some(&why) {
                    tell(Event::Apart(format!("{} is no port here: {why}", self.name)));
                }
                self.failed = Some((why, Instant::now()));
                self.tell();
            }
        }
        Ok(())
    }

    /// The way by which is sent.
    fn best(&self) -> Option<usize> {
        let choice = self.post.choice.load(Ordering::Relaxed);
        let works = |way: &Way| way.is_of(choice) && way.span().is_some();
        self.ways.iter().position(works).filter(|_| self.double.is_none())
    }

    /// What was told, and what has a time. True if something was told.
    fn look_around(&mut self) -> bool {
        let has_news = self.post.has_news.load(Ordering::Relaxed);
        // (The timer may ring a little early by this clock.)
        let is_late = self.beat.is_none_or(|beat| beat.elapsed() >= BEAT * 3 / 4);
        if has_news {
            self.take_news();
        }
        if is_late {
            self.beat = Some(Instant::now());
            self.set_timer();
            for way in &mut self.ways {
                if let Way::Udp(udp) = way {
                    udp.beat();
                }
            }
        }
        if has_news || is_late {
            self.double = self.spans.is(self.nth, self.ways.iter().filter_map(Way::found).min());
            self.tell();
        }
        has_news
    }

    /// For the next beat. KERNEL: a periodic timer goes on only when it is read; so one that had rung soon after a late beat would have been the last.
    fn set_timer(&self) {
        let once = Itimerspec { it_interval: Timespec::default(), it_value: BEAT_TIME };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }

    fn take_news(&mut self) {
        let _ = rustix::io::read(&self.post.bell, &mut [0; 8]);
        // ORDER: Acquire; pairs with `ring` (Release).
        self.post.has_news.swap(false, Ordering::Acquire);
        let news =
            std::mem::take(&mut *self.post.news.lock().unwrap_or_else(PoisonError::into_inner));
        for news in news {
            let (News::Called(of, _) | News::Came(of, _)) = &news;
            let carried = self.ways.iter_mut().find_map(|way| match way {
                Way::Node(node, carried) if node == of => Some(carried),
                _ => None,
            });
            match (carried, news) {
                (Some(carried), News::Called(_, channel)) => carried.called(channel),
                (Some(carried), News::Came(_, channel)) => carried.came(channel),
                (None, _) => {}
            }
        }
    }

    fn tell(&self) {
        let by = self.best().filter(|_| self.failed.is_none());
        let by = by.map(|at| self.reach_of(at).address);
        let ways = (0..self.ways.len()).map(|at| self.reach_of(at)).collect();
        *self.post.reach.lock().unwrap_or_else(PoisonError::into_inner) =
            Reach { name: self.name.clone(), by, ways };
        let apart = self.ways.iter().filter_map(|way| match way {
            Way::Node(node, carried) if carried.is_apart() => Some(node.clone()),
            _ => None,
        });
        *self.post.apart.lock().unwrap_or_else(PoisonError::into_inner) = apart.collect();
    }

    fn reach_of(&self, at: usize) -> Told {
        let way = &self.ways[at];
        let (address, why, lost) = match way {
            Way::Node(node, carried) => (Address::Node(node.clone()), carried.why(), 0),
            Way::Udp(udp) => (Address::Udp(udp.peer()), udp.why(), udp.lost()),
        };
        let double = self.double.as_ref().map(|what| format!("it is {what}"));
        let failed = self.failed.as_ref().map(|(why, _)| format!("it is no port here: {why}"));
        let why = double.or(failed).or(why);
        Told { address: address.to_string(), up: way.span().is_some() && why.is_none(), why, lost }
    }

    /// As a port of the network, as long as there is a way.
    fn serve(&mut self, tell: impl Fn(Event) + Send + 'static) -> Result<()> {
        let options = Options::new(&self.name, Mac::random()?);
        let (_port, queues) = Port::join(self.room.clone(), options, Kind::Far, tell)?;
        let Some(mut queue) = queues.into_iter().next() else { bail!("a port without a queue") };
        queue.watch_outside(&self.timer)?;
        queue.watch_outside(&self.post.bell)?;
        self.watch_ways(&queue);
        self.tell();
        let mut used = None;
        while !self.post.is_over() && !queue.is_over() {
            queue.begin();
            if self.look_around() {
                self.watch_ways(&queue);
            }
            let Some(best) = self.best() else { break };
            if used.replace(best) != Some(best) {
                self.tell();
            }
            match self.pass(&mut queue, best) {
                Pass::Busy => {}
                // (What has come may have been its end.)
                _ if self.best() != Some(best) => {}
                Pass::Idle => self.wait(&mut queue)?,
                Pass::Blocked => self.sleep(Some(best))?,
            }
        }
        self.tell();
        Ok(())
    }

    /// (Those that are watched already say so.)
    fn watch_ways(&self, queue: &Queue) {
        for way in &self.ways {
            way.descriptors(false, &mut |fd, _| _ = queue.watch_outside(fd));
        }
    }

    fn pass(&mut self, queue: &mut Queue, best: usize) -> Pass {
        let Far { ways, held, leaving, .. } = self;
        let mut is_busy = false;
        let way = &mut ways[best];
        let mut is_free = way.is_free();
        for _ in 0..TURN {
            let sent = is_free
                && queue.receive(1, |arrived| {
                    leaving.resize(arrived.len, 0);
                    arrived.copy_to(leaving);
                    way.send(leaving);
                    Ok(())
                });
            if !sent {
                break;
            }
            is_busy = true;
            is_free = way.is_free();
        }
        for way in ways {
            for _ in 0..TURN {
                if held.is_empty() && !way.receive(held) {
                    break;
                }
                match give(queue, held) {
                    // (Who waits for room there and here would wait for two things at once.)
                    Filled::Full if !is_free => {
                        queue.give_up();
                        queue.dropped(Dropped::Full);
                    }
                    Filled::Full => return if is_busy { Pass::Busy } else { Pass::Idle },
                    _ => {}
                }
                held.clear();
                is_busy = true;
            }
        }
        match () {
            () if is_busy => Pass::Busy,
            () if is_free => Pass::Idle,
            () => Pass::Blocked,
        }
    }

    /// For anything at all: watches for a while, then sleeps.
    fn wait(&mut self, queue: &mut Queue) -> Result<()> {
        let (mut looks, waits_for_room) = (0u32, !self.held.is_empty());
        let (ways, post) = (&mut self.ways, &self.post);
        let ready = || {
            looks = looks.wrapping_add(1);
            let is_turn = looks.is_multiple_of(LOOKS_PER_CALL);
            let comes = |way: &mut Way| match way {
                Way::Node(_, carried) => carried.is_readable(),
                Way::Udp(udp) => is_turn && udp.is_readable(),
            };
            queue.is_ready()
                || post.has_news.load(Ordering::Relaxed)
                || !waits_for_room && ways.iter_mut().any(comes)
        };
        if spin::watch(self.watch_us, || None, ready) || !waits_for_room && !self.arm(None) {
            return Ok(());
        }
        queue.wait(0, || false)
    }

    /// (The others have room, most of the time: who waited for that would not sleep.)
    fn arm(&mut self, full: Option<usize>) -> bool {
        self.ways.iter_mut().enumerate().all(|(at, way)| match way {
            Way::Node(_, carried) => carried.arm(full == Some(at)),
            Way::Udp(_) => true,
        })
    }

    /// For the ways alone: until something comes, or there is room by the one that is full; or something has its time.
    fn sleep(&mut self, full: Option<usize>) -> Result<()> {
        if !self.arm(full) {
            return Ok(());
        }
        let mut fds = vec![
            PollFd::new(&self.timer, PollFlags::IN),
            PollFd::new(&self.post.bell, PollFlags::IN),
        ];
        for (at, way) in self.ways.iter().enumerate() {
            way.descriptors(full == Some(at), &mut |fd, flags| {
                fds.push(PollFd::from_borrowed_fd(fd, flags))
            });
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // (Who has it ring behind a beat that came by itself is not woken by it again.)
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        Ok(())
    }
}

/// Gives a frame to the network.
fn give(queue: &mut Queue, message: &[u8]) -> Filled {
    if message.is_empty() {
        return Filled::Nothing;
    }
    if !(HEAD_BYTES..=MESSAGE_MOST).contains(&message.len()) {
        queue.dropped(Dropped::Malformed);
        return Filled::Nothing;
    }
    let filled = queue.fill(|to, most| {
        let len = message.len().min(most);
        // SAFETY: room for so many bytes, by the contract of `fill`.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(message.as_ptr(), to, len);
        }
        len
    });
    match filled {
        Filled::NotAlone if queue.offer(message) => Filled::Sent,
        Filled::NotAlone => Filled::Full,
        filled => filled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> Host {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_is_one_however_it_is_spelt() {
        let spelt = ["10.0.0.2", "10.0.0.2:7472", "::ffff:10.0.0.2", "[::ffff:10.0.0.2]:7472"];
        spelt.iter().for_each(|text| assert_eq!(host(text), host("10.0.0.2")));
        assert_eq!(host("[fe80::1%3]:7472").name(), "[fe80::1%3]:7472");
        assert!("10.0.0.2,[::ffff:10.0.0.2]:7472".parse::<Host>().is_err());
    }

    fn far(base: &std::path::Path) -> Far {
        let rules =
            crate::room::Rules { addresses: crate::Policy::Locked, storm: 0, bridge: false };
        Room::create(base, "net", rules, None).unwrap();
        let (room, host) = (Room::open(base, "net").unwrap(), host("node"));
        let spans = Arc::new(Spans::new(std::slice::from_ref(&host)).unwrap());
        let post = Post::new(&host).unwrap();
        Far::new(room, (&host, 0), spans, (None, 0), post).unwrap()
    }

    /// A beat may come before its timer rings: who sleeps then is woken by that once.
    #[test]
    fn a_ring_wakes_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut far = far(folder.path());
        // (It rings once, behind a beat.)
        let [it_value, it_interval] = [Duration::from_millis(1), Duration::ZERO]
            .map(|each| Timespec::try_from(each).unwrap());
        let once = Itimerspec { it_interval, it_value };
        timerfd_settime(&far.timer, TimerfdTimerFlags::empty(), &once).unwrap();
        far.beat = Some(Instant::now() + Duration::from_secs(3600));
        far.sleep(None).unwrap();
        far.look_around();
        assert_eq!(
            poll(&mut [PollFd::new(&far.timer, PollFlags::IN)], Some(&Timespec::default())),
            Ok(0)
        );
    }

    /// Who was held up, so that a beat was late, goes on with one for each ring.
    #[test]
    fn a_late_beat_is_not_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let mut far = far(folder.path());
        far.look_around();
        std::thread::sleep(BEAT * 8 / 5);
        far.look_around();
        for _ in 0..2 {
            let before = far.beat;
            let long = Timespec { tv_sec: 120, tv_nsec: 0 };
            let rang = poll(&mut [PollFd::new(&far.timer, PollFlags::IN)], Some(&long));
            assert_eq!(rang, Ok(1));
            far.look_around();
            assert!(far.beat > before);
        }
    }

    /// Both ends leave out the same one, however they name them.
    #[test]
    fn who_is_named_twice_is_one() {
        let hosts = ["10.0.0.2", "b", "10.0.0.3", "c"].map(host);
        let by = |last| Some([[10, 0, 0, 1], [10, 0, 0, last]].map(|ip| (ip, PORT).into()));
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let spans = Spans::new(&hosts).unwrap();
            let found = [by(2), None, by(3)].map(|by| Some(Found { number: spans.own ^ 1, by }));
            order.iter().for_each(|nth| _ = spans.is(*nth, found[*nth]));
            let is = |nth: usize| spans.is(nth, found[nth]);
            assert!(is(1).is_none() && is(0).unwrap().starts_with("b: name a host once"));
            assert!(is(2).unwrap().starts_with("b: "));
            // (While one way has gone.)
            assert!(spans.is(1, None).is_none() && is(0).is_none());
            assert!(is(2).unwrap().starts_with("10.0.0.2:7472: "));
            let other = Found { number: spans.own ^ 2, by: None };
            assert_eq!(spans.is(3, Some(other)), None);
            let own = Found { number: spans.own, by: None };
            assert_eq!(spans.is(3, Some(own)).as_deref(), Some("this host itself"));
        }
    }
}
