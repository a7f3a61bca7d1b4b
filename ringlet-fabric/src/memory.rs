//! A rail in memory, between processes of one host: for tests, and to measure what is above it.
//!
//! Each endpoint is a file that whoever reaches it maps, with a lane for each of them, and a FIFO by which it is woken. A write goes through
//! its lane in pieces, and the target's `poll` puts them where they belong. Without a [`Chaos`] all is done in order and at once. With one the
//! target delays what has come, does it in any order, and may do the parts of a write again until it gives the notice; and now and then
//! a sender loses its way to all others: what is under way then is lost or, much later, still done.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use ringlet_core::layout::{LaneGeometry, PAGE_BYTES};
use ringlet_core::mapped::Lane;
use ringlet_core::memory::{Area, Shared};
use ringlet_core::queue::{Next, Rx, Tx};
use ringlet_linux::map;
use rustix::fs::{CWD, FileType, Mode, OFlags};

use crate::rail::{Event, Grant, MESSAGE_BYTES, Peer, Rail, Refused, Region};

/// Sleeps after which the bell is read, though nobody is known to have rung.
const UNREAD_MOST: u32 = 64;
/// Those who can reach one endpoint in its life.
const LANES: usize = 32;
const GEOMETRY: LaneGeometry = LaneGeometry { slot_count: 1024, ring_bytes: 1 << 20 };
const NAME_BYTES: usize = 64;

/// Of a write, what goes through the lane at once: small enough that both ends copy at the same time.
const PIECE_BYTES: usize = 32 << 10;
/// What one `poll` takes from a lane.
const MESSAGES_MOST: usize = 64;
/// Writes to one peer that wait for room.
const WAITING_MOST: usize = 16;
/// What a chaotic endpoint holds back.
const FLIGHTS_MOST: usize = 1024;

const HEAD_BYTES: usize = 8;
const PIECE_HEAD_BYTES: usize = HEAD_BYTES + 24;
const MESSAGE: u8 = 0;
const PIECE: u8 = 1;
const LAST_PIECE: u8 = 2;

/// Disorder by seed.
#[derive(Clone, Copy, Debug)]
pub struct Chaos {
    pub seed: u64,
    /// A way fails in one of so many polls; 0: never.
    pub fails_one_in: u32,
}

/// The first page of an endpoint's file.
#[repr(C, align(64))]
struct Head {
    sleeps: AtomicU32,
    _line: [AtomicU32; 15],
    /// Lanes that are taken, from the first on.
    lanes: AtomicU32,
    _line_too: [AtomicU32; 15],
    /// How often the sender of this lane has lost its way: what it sent before is late. Its own word.
    episodes: [AtomicU32; LANES],
    /// Writes through this lane to what is not granted. The receiver's own word.
    refused: [AtomicU32; LANES],
}

// SAFETY: made of atomics.
unsafe impl Shared for Head {}

/// An endpoint's file, mapped.
struct Memory(Area);

impl Memory {
    const BYTES: usize = PAGE_BYTES + LANES * (PAGE_BYTES + 1024 * 64 + (1 << 20));

    fn map(file: &File) -> io::Result<Memory> {
        if file.metadata()?.len() != Memory::BYTES as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not an endpoint's file"));
        }
        map::map_shared(file.as_raw_fd(), Memory::BYTES, true)
            .map(Memory)
            .map_err(|errno| io::Error::from_raw_os_error(errno.0))
    }

    fn head(&self) -> &Head {
        self.0.at(0)
    }

    fn lane(&self, number: usize) -> Lane {
        Lane::new(self.0, PAGE_BYTES + number * GEOMETRY.lane_bytes(), GEOMETRY)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: its lanes' copies are held beside it, and dropped with it.
        unsafe { map::unmap(self.0) };
    }
}

pub struct MemoryRail {
    folder: PathBuf,
    name: Vec<u8>,
    memory: Memory,
    bell: OwnedFd,
    sleeps: bool,
    /// Somebody has rung, or is about to, and it was not read.
    rings: bool,
    /// Sleeps since the bell was read.
    unread: u32,
    lanes: Vec<(Lane, Rx)>,
    peers: Vec<Reached>,
    regions: HashMap<u32, Registered>,
    next_region: u32,
    told: VecDeque<Told>,
    chaos: Option<Disorder>,
    message: Box<[u8; MESSAGE_BYTES]>,
}

/// Memory of ours. The address is a number: what lies there is copied raw.
#[derive(Clone, Copy)]
struct Registered {
    at: usize,
    bytes: usize,
    /// Others may write there.
    is_granted: bool,
}

/// What is to be told.
enum Told {
    Done(u64),
    Failed(u64),
    Broken,
}

/// Another endpoint.
struct Reached {
    name: Vec<u8>,
    way: Option<Way>,
    waiting: VecDeque<Waiting>,
    /// A message was refused for want of room, and there has been none since.
    is_full: bool,
    /// What a chaotic endpoint has sent and not yet told of.
    held: Vec<u64>,
    /// Polls until a way that was lost works again.
    lost: u32,
    episode: u32,
    next_write: u32,
}

/// The lane to it.
struct Way {
    memory: Memory,
    bell: OwnedFd,
    number: usize,
    lane: Lane,
    tx: Tx,
    refused: u32,
}

/// A write that has no room yet, or not for all of it.
struct Waiting {
    from: Region,
    at: usize,
    bytes: usize,
    key: u64,
    address: u64,
    notice: u32,
    token: u64,
    id: u32,
}

struct Disorder {
    random: fastrand::Rng,
    fails_one_in: u32,
    flights: Vec<Flight>,
}

/// What has come, and is not yet done.
struct Flight {
    lane: usize,
    episode: u32,
    what: What,
}

enum What {
    Message(Vec<u8>),
    Write { id: u32, key: u64, pieces: Vec<(u64, Vec<u8>)>, notice: Option<u32> },
}

/// What stands before the bytes of a piece.
#[derive(Clone, Copy)]
struct PieceHead {
    key: u64,
    address: u64,
    notice: u32,
    id: u32,
}

impl PieceHead {
    fn write(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.notice.to_le_bytes());
        bytes[20..].copy_from_slice(&self.id.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8; 24]) -> PieceHead {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let last = word(16);
        PieceHead { key: word(0), address: word(8), notice: last as u32, id: (last >> 32) as u32 }
    }
}

fn head(kind: u8, episode: u32) -> [u8; HEAD_BYTES] {
    let mut bytes = [kind, 0, 0, 0, 0, 0, 0, 0];
    bytes[4..].copy_from_slice(&episode.to_le_bytes());
    bytes
}

fn lost() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the way was lost")
}

fn bell_path(folder: &Path, name: &[u8]) -> PathBuf {
    folder.join(OsStr::from_bytes(&[name, b".bell"].concat()))
}

impl Way {
    fn attach(folder: &Path, name: &[u8]) -> io::Result<Way> {
        let path = folder.join(OsStr::from_bytes(name));
        let memory = Memory::map(&File::options().read(true).write(true).open(path)?)?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let bell = rustix::fs::open(bell_path(folder, name), flags, Mode::empty())?;
        let number = memory.head().lanes.fetch_add(1, Ordering::Relaxed) as usize;
        if number >= LANES {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "too many reach it"));
        }
        let lane = memory.lane(number);
        Ok(Way { memory, bell, number, lane, tx: Tx::default(), refused: 0 })
    }

    /// False: there is no room.
    fn push(&self, parts: [&[u8]; 2], from: *const u8, bytes: usize) -> bool {
        let before = parts[0].len() + parts[1].len();
        let Ok(place) = self.tx.reserve(&self.lane, before + bytes) else { return false };
        let first = parts[0];
        // SAFETY: a slice; another; and the caller's memory (`Rail::register`, or a slice too).
        unsafe {
            place.write(&self.lane, 0, first.as_ptr(), first.len());
            place.write(&self.lane, first.len(), parts[1].as_ptr(), parts[1].len());
            place.write(&self.lane, before, from, bytes);
        }
        self.tx.commit(&self.lane, place, before + bytes);
        // ORDER: SeqCst, behind the publishing; pairs with that of `may_sleep`: it sees the record, or we see that it sleeps.
        fence(Ordering::SeqCst);
        let sleeps = &self.memory.head().sleeps;
        if sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0 {
            // A bell that is full rings already.
            let _ = rustix::io::write(&self.bell, &[1]);
        }
        true
    }
}

impl Reached {
    /// The lane to it, if the way works.
    fn way(&mut self, folder: &Path) -> io::Result<&Way> {
        if self.lost > 0 {
            return Err(lost());
        }
        let way = match self.way.take() {
            Some(way) => way,
            None => {
                let way = Way::attach(folder, &self.name)?;
                way.memory.head().episodes[way.number].store(self.episode, Ordering::Relaxed);
                way
            }
        };
        Ok(self.way.insert(way))
    }

    fn done(&mut self, token: u64, holds: bool, told: &mut VecDeque<Told>) {
        if holds {
            self.held.push(token);
        } else {
            told.push_back(Told::Done(token));
        }
    }

    /// Puts as much of the waiting writes into the lane as there is room for.
    fn advance(
        &mut self,
        holds: bool,
        regions: &HashMap<u32, Registered>,
        told: &mut VecDeque<Told>,
    ) {
        while let (Some(write), Some(way)) = (self.waiting.front_mut(), &self.way) {
            let n = write.bytes.min(PIECE_BYTES);
            let kind = if n == write.bytes { LAST_PIECE } else { PIECE };
            let Waiting { key, address, notice, id, .. } = *write;
            let piece = PieceHead { key, address, notice, id }.write();
            // (Withdrawn ones are not waiting any more.)
            let Some(region) = regions.get(&write.from.0) else { return };
            let from = (region.at + write.at) as *const u8;
            if !way.push([&head(kind, self.episode), &piece], from, n) {
                return;
            }
            write.at += n;
            write.address = write.address.wrapping_add(n as u64);
            write.bytes -= n;
            if kind == LAST_PIECE {
                let token = write.token;
                self.waiting.pop_front();
                self.done(token, holds, told);
            }
        }
    }

    /// What is under way is late from now on, and nothing can be sent for some polls.
    fn lose(&mut self, polls: u32, breaks: bool, told: &mut VecDeque<Told>) {
        (self.lost, self.episode) = (polls, self.episode.wrapping_add(1));
        if let Some(way) = &self.way {
            way.memory.head().episodes[way.number].store(self.episode, Ordering::Relaxed);
        }
        if breaks || self.held.is_empty() && self.waiting.is_empty() {
            told.push_back(Told::Broken);
        }
        told.extend(self.held.drain(..).map(Told::Failed));
        told.extend(self.waiting.drain(..).map(|write| Told::Failed(write.token)));
    }
}

/// Where a write goes to: within what is granted, or nowhere.
fn target(
    regions: &HashMap<u32, Registered>,
    key: u64,
    address: u64,
    bytes: usize,
) -> Option<*mut u8> {
    let region = regions.get(&u32::try_from(key).ok()?).filter(|region| region.is_granted)?;
    let offset = usize::try_from(address.checked_sub(region.at as u64)?).ok()?;
    (offset <= region.bytes && bytes <= region.bytes - offset)
        .then_some((region.at + offset) as *mut u8)
}

impl MemoryRail {
    /// Makes an endpoint of this name in a folder, which all who reach one another share and trust. It ends with it.
    pub fn new(folder: &Path, name: &str, chaos: Option<Chaos>) -> io::Result<MemoryRail> {
        if !is_name(name.as_bytes()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an endpoint's name"));
        }
        debug_assert_eq!(Memory::BYTES, PAGE_BYTES + LANES * GEOMETRY.lane_bytes());
        let file =
            File::options().read(true).write(true).create_new(true).open(folder.join(name))?;
        file.set_len(Memory::BYTES as u64)?;
        let bell = bell_path(folder, name.as_bytes());
        rustix::fs::mknodat(CWD, &bell, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(MemoryRail {
            folder: folder.into(),
            name: name.into(),
            memory: Memory::map(&file)?,
            bell: rustix::fs::open(bell, flags, Mode::empty())?,
            sleeps: false,
            rings: false,
            unread: 0,
            lanes: Vec::new(),
            peers: Vec::new(),
            regions: HashMap::new(),
            next_region: 1,
            told: VecDeque::new(),
            chaos: chaos.map(|chaos| Disorder {
                random: fastrand::Rng::with_seed(chaos.seed),
                fails_one_in: chaos.fails_one_in,
                flights: Vec::new(),
            }),
            message: Box::new([0; MESSAGE_BYTES]),
        })
    }

    fn enter(&mut self, region: Registered) -> io::Result<Region> {
        let number = self.next_region;
        self.next_region = number
            .checked_add(1)
            .ok_or_else(|| io::Error::new(io::ErrorKind::QuotaExceeded, "too many regions"))?;
        self.regions.insert(number, region);
        Ok(Region(number))
    }

    /// Nothing can be sent from here for so many polls, and what is under way is late.
    pub fn fail(&mut self, polls: u32) {
        for peer in &mut self.peers {
            peer.lose(polls, true, &mut self.told);
        }
    }

    /// Puts into the lanes what waits, and fails by chance.
    fn serve_peers(&mut self) {
        let MemoryRail { peers, chaos, told, regions, .. } = self;
        for peer in peers {
            if peer.lost > 0 {
                peer.lost -= 1;
                continue;
            }
            let Some(way) = &mut peer.way else { continue };
            let refused = way.memory.head().refused[way.number].load(Ordering::Relaxed);
            if refused != std::mem::replace(&mut way.refused, refused) {
                peer.lose(1, false, told);
                continue;
            }
            peer.advance(chaos.is_some(), regions, told);
            let Some(Disorder { random, fails_one_in, .. }) = chaos else { continue };
            if *fails_one_in > 0 && random.u32(..*fails_one_in) == 0 {
                peer.lose(random.u32(1..300), random.bool(), told);
            }
            if !peer.held.is_empty() && random.bool() {
                let nth = random.usize(..peer.held.len());
                told.push_back(Told::Done(peer.held.swap_remove(nth)));
            }
        }
    }

    /// What has come through one lane.
    fn receive(&mut self, number: usize, tell: &mut dyn FnMut(Event<'_>)) {
        let MemoryRail { memory, lanes, regions, chaos, message, .. } = self;
        let (lane, rx) = &lanes[number];
        let current = memory.head().episodes[number].load(Ordering::Relaxed);
        for _ in 0..MESSAGES_MOST {
            if chaos.as_ref().is_some_and(|chaos| chaos.flights.len() >= FLIGHTS_MOST) {
                return;
            }
            // A corrupt lane is an empty one from then on.
            let Next::Message(record) = rx.peek(lane) else { return };
            let mut start = [0; PIECE_HEAD_BYTES];
            let n = record.len().min(PIECE_HEAD_BYTES);
            // SAFETY: within both.
            unsafe { record.read(lane, 0, start.as_mut_ptr(), n) };
            let episode = u32::from_le_bytes(start[4..HEAD_BYTES].try_into().unwrap());
            let is_late = episode != current;
            match start[0] {
                MESSAGE if (HEAD_BYTES..=HEAD_BYTES + MESSAGE_BYTES).contains(&record.len()) => {
                    let bytes = &mut message[..record.len() - HEAD_BYTES];
                    // SAFETY: of that length.
                    unsafe { record.read(lane, HEAD_BYTES, bytes.as_mut_ptr(), bytes.len()) };
                    match chaos {
                        None if is_late => {}
                        None => tell(Event::Message(bytes)),
                        Some(chaos) => chaos.flights.push(Flight {
                            lane: number,
                            episode,
                            what: What::Message(bytes.to_vec()),
                        }),
                    }
                }
                kind @ (PIECE | LAST_PIECE) if n == PIECE_HEAD_BYTES => {
                    let piece = PieceHead::read(start[HEAD_BYTES..].try_into().unwrap());
                    let bytes = record.len() - PIECE_HEAD_BYTES;
                    let read = |to: *mut u8| {
                        // SAFETY: `to` has so many (`target`, or the vector).
                        unsafe { record.read(lane, PIECE_HEAD_BYTES, to, bytes) };
                    };
                    if let Some(chaos) = chaos {
                        let mut data = vec![0; bytes];
                        read(data.as_mut_ptr());
                        chaos.take_piece(number, episode, piece, data, kind == LAST_PIECE);
                    } else if !is_late {
                        match target(regions, piece.key, piece.address, bytes) {
                            Some(to) => {
                                read(to);
                                if kind == LAST_PIECE {
                                    tell(Event::Noticed { notice: piece.notice });
                                }
                            }
                            None => refuse(memory, number),
                        }
                    }
                }
                _ => {}
            }
            rx.release(lane, record);
        }
    }
}

fn refuse(memory: &Memory, lane: usize) {
    memory.head().refused[lane].fetch_add(1, Ordering::Relaxed);
}

impl Disorder {
    /// It is done in parts of any length, in any order.
    fn take_piece(
        &mut self,
        lane: usize,
        episode: u32,
        piece: PieceHead,
        data: Vec<u8>,
        last: bool,
    ) {
        let PieceHead { key, address, notice, id } = piece;
        let is_same = |flight: &Flight| {
            (flight.lane, flight.episode) == (lane, episode)
                && matches!(flight.what, What::Write { id: other, .. } if other == id)
        };
        let nth = self.flights.iter().position(is_same).unwrap_or_else(|| {
            let what = What::Write { id, key, pieces: Vec::new(), notice: None };
            self.flights.push(Flight { lane, episode, what });
            self.flights.len() - 1
        });
        let What::Write { pieces, notice: noted, .. } = &mut self.flights[nth].what else { return };
        let mut at = 0;
        while at < data.len() {
            let most = if self.random.bool() { 64 } else { 8192 };
            let n = self.random.usize(1..=most).min(data.len() - at);
            pieces.push((address.wrapping_add(at as u64), data[at..at + n].to_vec()));
            at += n;
        }
        if last {
            *noted = Some(notice);
        }
    }

    /// Does some of what has come.
    fn pass(
        &mut self,
        memory: &Memory,
        regions: &HashMap<u32, Registered>,
        tell: &mut dyn FnMut(Event<'_>),
    ) {
        let Disorder { random, flights, .. } = self;
        for _ in 0..random.usize(..2 * flights.len() + 2) {
            if flights.is_empty() {
                return;
            }
            let nth = random.usize(..flights.len());
            let Flight { lane, episode, what } = &mut flights[nth];
            let is_late = *episode != memory.head().episodes[*lane].load(Ordering::Relaxed);
            // What is late comes much later than its way works again.
            if is_late && random.u32(..64) > 0 {
                continue;
            }
            let drops = is_late && random.bool();
            let ends = match what {
                _ if drops => true,
                What::Message(bytes) => {
                    tell(Event::Message(bytes));
                    true
                }
                What::Write { pieces, notice: Some(notice), .. } if pieces.is_empty() => {
                    tell(Event::Noticed { notice: *notice });
                    true
                }
                What::Write { pieces, .. } if pieces.is_empty() => false,
                What::Write { key, pieces, .. } => {
                    // All that is late of a write comes together: then it is there when nobody expects it.
                    let mut is_granted = true;
                    for _ in 0..if is_late { pieces.len() } else { 1 + pieces.len() / 4 } {
                        let part = random.usize(..pieces.len());
                        let (address, bytes) = &pieces[part];
                        match target(regions, *key, *address, bytes.len()) {
                            // SAFETY: granted, and mapped until it is withdrawn (`Rail::register`).
                            Some(to) => unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) },
                            None => is_granted = false,
                        }
                        // (Else it is done again.)
                        if random.u32(..8) > 0 {
                            pieces.swap_remove(part);
                        }
                        if pieces.is_empty() {
                            break;
                        }
                    }
                    if !is_granted && !is_late {
                        refuse(memory, *lane);
                    }
                    !is_granted
                }
            };
            if ends {
                flights.swap_remove(nth);
            }
        }
    }
}

fn is_name(name: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
    (1..=NAME_BYTES).contains(&name.len()) && name.iter().all(plain)
}

impl Rail for MemoryRail {
    fn name(&self) -> &[u8] {
        &self.name
    }

    fn reach(&mut self, name: &[u8]) -> io::Result<Peer> {
        if !is_name(name) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an endpoint's name"));
        }
        let known = self.peers.iter().position(|peer| peer.name == name);
        let nth = match known {
            Some(nth) => nth,
            None if self.peers.len() < LANES => {
                self.peers.push(Reached {
                    name: name.into(),
                    way: None,
                    waiting: VecDeque::new(),
                    is_full: false,
                    held: Vec::new(),
                    lost: 0,
                    episode: 0,
                    next_write: 0,
                });
                self.peers.len() - 1
            }
            None => return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "too many peers")),
        };
        Ok(Peer(nth as u32))
    }

    /// Its lane is kept: it may be reached again.
    fn forget(&mut self, _: Peer) {}

    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> io::Result<(Region, Grant)> {
        let Region(number) = self.enter(Registered { at: at as usize, bytes, is_granted: true })?;
        Ok((Region(number), Grant { key: number.into(), base: at as u64 }))
    }

    unsafe fn register_source(&mut self, at: *mut u8, bytes: usize) -> io::Result<Region> {
        self.enter(Registered { at: at as usize, bytes, is_granted: false })
    }

    fn withdraw(&mut self, region: Region) {
        self.regions.remove(&region.0);
        for peer in &mut self.peers {
            let told = &mut self.told;
            peer.waiting.retain(|write| {
                if write.from == region {
                    told.push_back(Told::Failed(write.token));
                }
                write.from != region
            });
        }
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
        let MemoryRail { folder, peers, regions, told, chaos, .. } = self;
        let invalid = |what| Refused::Failed(io::Error::new(io::ErrorKind::InvalidInput, what));
        let peer = peers.get_mut(to.0 as usize).ok_or_else(|| invalid("no such peer"))?;
        let region = regions.get(&from.0).ok_or_else(|| invalid("no such region"))?;
        if at > region.bytes || bytes > region.bytes - at {
            return Err(invalid("beyond the region"));
        }
        peer.way(folder).map_err(Refused::Failed)?;
        if peer.waiting.len() >= WAITING_MOST {
            return Err(Refused::Full);
        }
        let (key, address) = (grant.key, grant.base.wrapping_add(offset));
        let id = peer.next_write;
        peer.next_write = id.wrapping_add(1);
        peer.waiting.push_back(Waiting { from, at, bytes, key, address, notice, token, id });
        peer.advance(chaos.is_some(), regions, told);
        Ok(())
    }

    fn send(&mut self, to: Peer, message: &[u8], token: u64) -> Result<(), Refused> {
        let invalid = |what| Refused::Failed(io::Error::new(io::ErrorKind::InvalidInput, what));
        let peer = self.peers.get_mut(to.0 as usize).ok_or_else(|| invalid("no such peer"))?;
        if message.len() > MESSAGE_BYTES {
            return Err(invalid("too long a message"));
        }
        let head = head(MESSAGE, peer.episode);
        let way = peer.way(&self.folder).map_err(Refused::Failed)?;
        if !way.push([&head, &[]], message.as_ptr(), message.len()) {
            peer.is_full = true;
            return Err(Refused::Full);
        }
        peer.done(token, self.chaos.is_some(), &mut self.told);
        Ok(())
    }

    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) {
        if self.sleeps {
            self.sleeps = false;
            self.rings |= self.memory.head().sleeps.swap(0, Ordering::Relaxed) == 0;
            self.unread += 1;
            // (What was published by whoever rings is found below, though the ring itself may come later: behind another one's, which was read for
            // it. Nobody is known to have rung then; but what is never read would end each sleep.)
            if self.rings || self.unread >= UNREAD_MOST {
                self.rings &= rustix::io::read(&self.bell, &mut [0u8; 64]).is_err();
                self.unread = 0;
            }
        }
        self.serve_peers();
        for _ in 0..self.told.len() {
            match self.told.pop_front() {
                Some(Told::Done(token)) => tell(Event::Done { token }),
                Some(Told::Failed(token)) => tell(Event::Failed { token, error: lost() }),
                Some(Told::Broken) => tell(Event::Broken(lost())),
                None => break,
            }
        }
        let lanes = self.memory.head().lanes.load(Ordering::Relaxed) as usize;
        while self.lanes.len() < lanes.min(LANES) {
            self.lanes.push((self.memory.lane(self.lanes.len()), Rx::default()));
        }
        for number in 0..self.lanes.len() {
            self.receive(number, tell);
        }
        if let Some(chaos) = &mut self.chaos {
            chaos.pass(&self.memory, &self.regions, tell);
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn may_sleep(&mut self) -> bool {
        // (One that has room again is tried once more. WHY not each that has none now: who has sent all would go round until the other end has taken half
        // of it, for which that may need this processor.)
        let is_quiet = |peer: &mut Reached| {
            let was_full = peer.is_full;
            peer.is_full &= peer.way.as_ref().is_some_and(|way| !way.tx.writable(&way.lane));
            peer.waiting.is_empty() && peer.held.is_empty() && peer.lost == 0 && !was_full
        };
        let chaos = self.chaos.as_ref().is_some_and(|chaos| !chaos.flights.is_empty());
        if chaos || !self.told.is_empty() || !self.peers.iter_mut().all(is_quiet) {
            return false;
        }
        let head = self.memory.head();
        self.sleeps = true;
        head.sleeps.store(1, Ordering::Relaxed);
        // ORDER: SeqCst, between the flag and the look at the lanes; pairs with that of `Way::push`.
        fence(Ordering::SeqCst);
        head.lanes.load(Ordering::Relaxed) as usize <= self.lanes.len()
            && !self.lanes.iter().any(|(lane, rx)| rx.ready(lane))
    }
}

impl Drop for MemoryRail {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.folder.join(OsStr::from_bytes(&self.name)));
        let _ = std::fs::remove_file(bell_path(&self.folder, &self.name));
    }
}

// What a queue of this memory takes (`queue::max_bytes`).
const _: () = assert!(PIECE_HEAD_BYTES + PIECE_BYTES <= GEOMETRY.ring_bytes / 4);
const _: () = assert!(HEAD_BYTES + MESSAGE_BYTES <= GEOMETRY.ring_bytes / 4);
const _: () = assert!(size_of::<Head>() <= PAGE_BYTES);
