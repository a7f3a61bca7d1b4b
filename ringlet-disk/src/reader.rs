//! Reads and writes a disk.
//!
//! Each request has a slot, a [`Turn`], from before it is made until its answer is taken. If the server goes, or this host is cut off from it, requests are
//! made again of the server that comes next: the same bytes to the same place, of which nobody was told that they are written.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringlet_reflect::{
    Host, Locks, Permission, Receiver, Region, Status, Transmitter, Use, Wait, Watch,
};

use crate::direct::{Asked, Asks, Broken, HOLD, Waited};
use crate::file::Extent;
use crate::layout::{
    self, DURABLE, FAST, Facts, LOST, MAY_TRIM, Op, Part, READERS, Request, SLOT_BYTES, SLOTS,
    SPARSE, answer_at, answered, check_name, granted_at, load, next, number_at, read_at,
    written_at,
};
use crate::locked;
use crate::wait::{LOOK_AGAIN, Watcher};

/// To be let in: the server waits for what those did that have gone.
const WELCOME: Duration = Duration::from_secs(30);

const FOR_EVER: Duration = Duration::from_secs(1 << 32);

/// How something is written, made zeros, or read.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Flags {
    /// It is on the disk before the call returns.
    pub durable: bool,
    /// Zeros may be holes.
    pub may_trim: bool,
    /// Zeros only if that is faster than to write them.
    pub fast: bool,
    /// Where all that is read is a hole nothing need come ([`Turn::is_hole`]).
    pub sparse: bool,
}

impl Flags {
    fn bits(self) -> u32 {
        let flag = |is: bool, flag: u32| if is { flag } else { 0 };
        flag(self.durable, DURABLE)
            | flag(self.may_trim, MAY_TRIM)
            | flag(self.fast, FAST)
            | flag(self.sparse, SPARSE)
    }
}

/// A disk. Calls may be made by many threads at a time; their errors are the kernel's numbers.
pub struct Reader {
    known: Arc<Known>,
    session: Mutex<State>,
}

/// What all readers know of a disk that were opened one by another.
struct Known {
    name: String,
    owner: Option<u32>,
    patience: Duration,
    facts: Facts,
    /// Which run of its host's kernel has what was written and not flushed, and which medium its device had in that.
    run: Mutex<(u64, u64)>,
    /// Writes that were answered, and as many of them as are known to be on the disk.
    written: AtomicU64,
    flushed: AtomicU64,
    /// What the announcement says of what is lost, as last seen; and whether some of ours is.
    losses: AtomicU64,
    is_lost: AtomicBool,
}

#[derive(Default)]
struct State {
    session: Option<Arc<Session>>,
    /// Of what was used before: as long as it is there, what was asked for by it may still be done.
    before: Weak<()>,
    /// Why it can't be used just now, or any more.
    why_not: Option<String>,
    is_spoilt: bool,
}

/// The server, or the way to it, has gone.
#[derive(Debug)]
struct Lost;

impl From<Status> for Lost {
    fn from(_: Status) -> Lost {
        Lost
    }
}

/// By a server that is there.
#[derive(Debug)]
struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.0)
    }
}

enum Bytes<'a> {
    None,
    /// To the disk.
    From(&'a [u8]),
    /// From it.
    To(&'a mut [u8]),
    Extents(&'a mut Vec<Extent>),
}

impl Reader {
    /// A disk that is served just now by this user, root, or `owner`. When its server has gone, or can't be reached, a request waits so long before
    /// it fails.
    pub fn open(name: &str, owner: Option<u32>, patience: Duration) -> anyhow::Result<Reader> {
        check_name(name)?;
        let (session, facts) = Session::open(name, owner)?;
        let known = Known {
            name: name.to_owned(),
            owner,
            // (A moment that is further away is none.)
            patience: patience.min(FOR_EVER),
            run: Mutex::new((facts.boot, facts.sequence)),
            facts,
            written: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            losses: AtomicU64::new(load(&session.announcement, LOST)),
            is_lost: AtomicBool::new(false),
        };
        Ok(Reader::by(Arc::new(known), session))
    }

    fn by(known: Arc<Known>, session: Session) -> Reader {
        let state = State { session: Some(Arc::new(session)), ..State::default() };
        Reader { known, session: Mutex::new(state) }
    }

    /// By which others are opened of the same disk.
    pub fn source(&self) -> Source {
        Source(self.known.clone())
    }

    /// Why calls fail where it is not for the disk's errors.
    pub fn why_not(&self) -> Option<String> {
        locked(&self.session).why_not.clone()
    }

    /// Where its server takes streams, and what the next one of this reader's would say first. For those that test the server.
    #[doc(hidden)]
    pub fn stream_hello(&self) -> Option<(SocketAddr, Vec<u8>)> {
        let session = locked(&self.session).session.clone()?;
        session.asks.hello().map(|(offer, hello)| (offer.address, hello.bytes().to_vec()))
    }

    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), i32> {
        offset.checked_add(to.len() as u64).ok_or(libc::EINVAL)?;
        for (part, at) in to.chunks_mut(SLOT_BYTES).zip((offset..).step_by(SLOT_BYTES)) {
            self.ask(Op::Read, Flags::default(), at, part.len() as u64, Bytes::To(part))?;
        }
        Ok(())
    }

    pub fn write(&self, offset: u64, from: &[u8], flags: Flags) -> Result<(), i32> {
        offset.checked_add(from.len() as u64).ok_or(libc::EINVAL)?;
        for (part, at) in from.chunks(SLOT_BYTES).zip((offset..).step_by(SLOT_BYTES)) {
            self.ask(Op::Write, flags, at, part.len() as u64, Bytes::From(part))?;
        }
        Ok(())
    }

    /// All that was written before, by whichever call has returned, is on the disk.
    pub fn flush(&self) -> Result<(), i32> {
        self.ask(Op::Flush, Flags::default(), 0, 0, Bytes::None)
    }

    pub fn trim(&self, offset: u64, length: u64, flags: Flags) -> Result<(), i32> {
        self.ask(Op::Trim, flags, offset, length, Bytes::None)
    }

    /// With `fast` only if that is faster than to write them, or EOPNOTSUPP.
    pub fn zero(&self, offset: u64, length: u64, flags: Flags) -> Result<(), i32> {
        self.ask(Op::Zero, flags, offset, length, Bytes::None)
    }

    /// Which of these bytes are held, and which are holes; from the first one on, and maybe not of all of them. What the server does not tell of is held.
    pub fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, i32> {
        let mut found = Vec::new();
        let bytes = Bytes::Extents(&mut found);
        self.ask(Op::Extents, Flags::default(), offset, length, bytes)?;
        Ok(found)
    }

    fn ask(
        &self,
        op: Op,
        flags: Flags,
        offset: u64,
        length: u64,
        mut bytes: Bytes,
    ) -> Result<(), i32> {
        let mut until = None;
        loop {
            let session = self.session(&mut until)?;
            if let Ok(done) = self.ask_by(&session, op, flags, offset, length, &mut bytes) {
                return done;
            }
            self.lose(&session);
        }
    }

    fn ask_by(
        &self,
        session: &Arc<Session>,
        op: Op,
        flags: Flags,
        offset: u64,
        length: u64,
        bytes: &mut Bytes,
    ) -> Result<Result<(), i32>, Lost> {
        let mut turn = Turn::new(&self.known, session, session.take()?);
        turn.prepare(op, flags, offset, length);
        if let Bytes::From(bytes) = bytes {
            turn.fill_from(bytes);
        }
        turn.ask();
        turn.tell();
        let mut done = turn.wait()?;
        if let Bytes::Extents(extents) = bytes {
            done = turn.extents(done).map(|found| **extents = found);
        } else if let (Ok(()), Bytes::To(bytes)) = (done, bytes) {
            // SAFETY: a request has a slot's bytes at most, which are within the region. What the server stores there meanwhile, who has answered,
            // spoils but what it has read itself.
            #[allow(unsafe_code)]
            unsafe {
                std::ptr::copy_nonoverlapping(turn.bytes(), bytes.as_mut_ptr(), bytes.len());
            }
        }
        turn.finish();
        Ok(done)
    }

    /// A slot to ask in; `None` if all are taken, or a stream stands ready until all that was asked before is answered.
    ///
    /// Where the server has gone it is waited for, `until` its patience ends (`None`: that has not begun).
    pub fn turn(&self, until: &mut Option<Instant>) -> Result<Option<Turn>, i32> {
        loop {
            let session = self.session(until)?;
            match session.try_take() {
                Ok(slot) => return Ok(slot.map(|slot| Turn::new(&self.known, &session, slot))),
                Err(Lost) => self.lose(&session),
            }
        }
    }

    fn lose(&self, session: &Arc<Session>) {
        session.is_lost.store(true, Ordering::Relaxed);
        let mut state = locked(&self.session);
        if state.session.as_ref().is_some_and(|now| Arc::ptr_eq(now, session)) {
            state.before = Arc::downgrade(&session.seated);
            state.session = None;
            self.known.look_for_losses(session);
        }
    }

    /// That with the server. Once it has had to be waited for: until then.
    fn session(&self, until: &mut Option<Instant>) -> Result<Arc<Session>, i32> {
        loop {
            let mut state = locked(&self.session);
            if state.is_spoilt {
                return Err(libc::EIO);
            }
            if let Some(session) = &state.session {
                session.seek_stream();
                return Ok(session.clone());
            }
            let until = *until.get_or_insert_with(|| Instant::now() + self.known.patience);
            // (What was asked for by the one before may be done until its seat is given back, which is behind its last user.)
            if state.before.strong_count() == 0 {
                match Session::open(&self.known.name, self.known.owner) {
                    Ok((session, facts)) => {
                        self.known.look_for_losses(&session);
                        state.why_not = self.known.why_another(&facts);
                        state.is_spoilt = state.why_not.is_some();
                        state.session = (!state.is_spoilt).then(|| Arc::new(session));
                        continue;
                    }
                    Err(error) => state.why_not = Some(format!("{error:#}")),
                }
            }
            drop(state);
            if Instant::now() >= until {
                return Err(libc::EIO);
            }
            thread::sleep(LOOK_AGAIN);
        }
    }
}

/// A disk that was opened once.
pub struct Source(Arc<Known>);

impl Source {
    /// With a seat of its own: neither waits for what the other asks, and what one flushes the others have written too. The server is waited for, as by
    /// requests.
    pub fn open(&self) -> anyhow::Result<Reader> {
        let began = Instant::now();
        loop {
            match Session::open(&self.0.name, self.0.owner) {
                Ok((session, facts)) => {
                    self.0.look_for_losses(&session);
                    match self.0.why_another(&facts) {
                        Some(why) => bail!(why),
                        None => return Ok(Reader::by(self.0.clone(), session)),
                    }
                }
                Err(error) if error.is::<Refused>() || began.elapsed() >= self.0.patience => {
                    return Err(error);
                }
                Err(_) => thread::sleep(LOOK_AGAIN),
            }
        }
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn bytes(&self) -> u64 {
        self.0.facts.bytes
    }

    pub fn is_read_only(&self) -> bool {
        self.0.facts.read_only
    }
}

impl Known {
    /// Between two servers: the next one may not know what the one before has lost, and said.
    fn look_for_losses(&self, session: &Session) {
        let losses = load(&session.announcement, LOST);
        // ORDER: Acquire, pairs with Release in `look_for_losses`: who finds it seen by another one finds what that means, too.
        let before = self.losses.load(Ordering::Acquire);
        if losses != 0 && losses != before && self.has_unflushed() {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        self.losses.store(losses, Ordering::Release);
    }

    fn has_unflushed(&self) -> bool {
        self.written.load(Ordering::Acquire) != self.flushed.load(Ordering::Acquire)
    }

    /// Why what is served now is not what was. If it is, it is what is used from now on.
    fn why_another(&self, now: &Facts) -> Option<String> {
        let mut run = locked(&self.run);
        let before = &self.facts;
        let what = |facts: &Facts| (facts.bytes, facts.read_only, facts.file, facts.host.clone());
        let is_booted = now.boot != run.0;
        let is_replaced = !is_booted && now.sequence != run.1;
        if what(now) != what(before) || is_replaced {
            return Some(format!("the disk {} is another one now", self.name));
        }
        if is_booted && self.has_unflushed() {
            return Some(format!(
                "{} has been started again: what was written to {} and not flushed is lost",
                now.host, self.name
            ));
        }
        *run = (now.boot, now.sequence);
        None
    }
}

/// A seat at a server's.
struct Session {
    seat: usize,
    server: u32,
    generation: u64,
    announcement: Receiver,
    requests: Transmitter,
    written: Transmitter,
    read: Receiver,
    slots: Mutex<Vec<Slot>>,
    answers: Mutex<Watch>,
    freed: Condvar,
    /// So many wait for a slot; counted where the slots are locked.
    waiting: AtomicUsize,
    is_lost: AtomicBool,
    asks: Arc<Asks>,
    locks: Locks,
    host: Host,
    /// Last of all: when it has gone the seat was given back. (Of the session itself nothing is left while it is still being taken apart.)
    seated: Arc<()>,
}

struct Slot {
    slot: usize,
    number: u64,
    watch: Watch,
    watcher: Watcher,
}

/// A slot, for one request: to be prepared, asked, and finished. Dropped in between, its session is another one from then on: so what it asked for is done,
/// or not, before whatever is asked for behind it.
pub struct Turn {
    known: Arc<Known>,
    session: Arc<Session>,
    /// Until it is given back.
    slot: Option<Slot>,
    /// Once it is known.
    request: Option<Request>,
    /// What is to be written, where it is not written to where it is received; or it is where streams have it.
    payload: Vec<u8>,
    is_for_stream: bool,
    /// It was answered by a stream.
    is_by_stream: bool,
    /// What was written before it was asked.
    written: u64,
    /// What it would be told is not so.
    is_refused: bool,
    /// What was to be read are zeros, and does not come.
    is_hole: bool,
}

/// Where a session's answers come, to sleep on.
pub struct Answers(Arc<Session>);

impl Turn {
    fn new(known: &Arc<Known>, session: &Arc<Session>, slot: Slot) -> Turn {
        let (known, session, slot) = (known.clone(), session.clone(), Some(slot));
        Turn {
            known,
            session,
            slot,
            request: None,
            payload: Vec::new(),
            is_for_stream: false,
            is_by_stream: false,
            written: 0,
            is_refused: false,
            is_hole: false,
        }
    }

    fn slot(&self) -> usize {
        self.slot.as_ref().map_or(0, |slot| slot.slot)
    }

    /// Has `fill` (where, how many bytes) write what is to be written to the disk, at most a slot's. It may wait. False if it said so, or it is too much.
    pub fn fill(&mut self, length: usize, mut fill: impl FnMut(*mut u8, usize) -> bool) -> bool {
        if length > SLOT_BYTES {
            return false;
        }
        if self.session.asks.has_stream() {
            self.is_for_stream = true;
            return fill(self.session.asks.bytes(self.slot()).as_mut_ptr(), length);
        }
        let to = &self.session.written;
        if to.is_memory() {
            return to.fill(written_at(self.slot()), length, |_, part, to| fill(to, part)).is_ok();
        }
        // (In a log others would wait behind it.)
        self.payload.resize(length, 0);
        fill(self.payload.as_mut_ptr(), length)
    }

    pub fn fill_from(&mut self, bytes: &[u8]) -> bool {
        self.fill(bytes.len(), |to, length| {
            // SAFETY: so many bytes may be written there, as `fill` has it.
            #[allow(unsafe_code)]
            unsafe {
                ringlet_reflect::copy(bytes.as_ptr(), to, length);
            }
            true
        })
    }

    /// What is to be asked for; what is to be written is filled in behind this.
    pub fn prepare(&mut self, op: Op, flags: Flags, offset: u64, length: u64) {
        self.request = Some(Request { op, flags: flags.bits(), offset, length, over: 0 });
    }

    /// Makes the request; a server that sleeps is not told of it. What has failed here is found lost later.
    pub fn ask(&mut self) {
        // ORDER: Acquire, pairs with AcqRel in `count`: what is counted here was answered before the server is asked.
        self.written = self.known.written.load(Ordering::Acquire);
        let syncs = |request: Request| request.op == Op::Flush || request.flags & DURABLE != 0;
        if self.request.is_some_and(syncs) && self.known.is_lost.load(Ordering::Relaxed) {
            self.is_refused = true;
            return;
        }
        if self.try_ask().is_err() {
            self.session.is_lost.store(true, Ordering::Relaxed);
        }
    }

    /// Is it of a server that is known to have gone?
    pub fn is_lost(&self) -> bool {
        self.session.is_lost.load(Ordering::Relaxed)
    }

    fn try_ask(&mut self) -> Result<(), Status> {
        let session = &self.session;
        let (Some(request), Some(slot)) = (self.request, self.slot.as_mut()) else {
            return Err(Status::BadParameter);
        };
        // (First of all: by the number before what fails here would be answered.)
        slot.number = next(slot.number);
        let (slot, number) = (slot.slot, slot.number);
        // (All slots were free when the stream that is there was taken: this one's bytes are there, too.)
        let Err(over) = session.asks.ask(slot, number, request) else { return Ok(()) };
        if self.is_for_stream {
            let asked = Asked { slot, number, request };
            return session.ask_by_regions(&asked, over, true);
        }
        if !self.payload.is_empty() {
            session.written.put(written_at(slot), &self.payload)?;
        }
        session.ask_by_regions(&Asked { slot, number, request }, over, false)
    }

    /// Wakes the server, if it sleeps, for all that was asked by this session.
    pub fn tell(&self) {
        let of = &self.session;
        if of.asks.has_stream() {
            if let Err(broken) = of.asks.send() {
                of.move_to_regions(&broken);
            }
            return;
        }
        of.tell();
    }

    /// What was answered, if it was; once.
    #[inline]
    pub fn answer(&mut self) -> Option<Result<(), i32>> {
        if self.is_refused {
            return Some(Err(libc::EIO));
        }
        let slot = self.slot.as_ref()?;
        let by_stream = self.session.asks.answer(slot.slot, slot.number);
        self.is_by_stream = by_stream.is_some();
        let by_regions = || load(&self.session.read, answer_at(slot.slot));
        let word = by_stream.unwrap_or_else(by_regions);
        let done = answered(word, slot.number)?;
        self.is_hole = layout::is_of_zeros(word);
        self.count(done);
        Some(done)
    }

    /// All that was to be read are zeros, and none of them are at [`Turn::bytes`]: of one that was `sparse`.
    pub fn is_hole(&self) -> bool {
        self.is_hole
    }

    /// What was found, of a request for extents that was answered so. A server of a version that knows no extents holds all.
    pub fn extents(&self, done: Result<(), i32>) -> Result<Vec<Extent>, i32> {
        let length = self.request.map_or(0, |request| request.length);
        match done {
            Ok(()) if self.is_by_stream => {
                let bytes = self.session.asks.bytes(self.slot());
                let word = |at: usize| {
                    u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]))
                };
                layout::extents(word, length).ok_or(libc::EIO)
            }
            Ok(()) => {
                let at = read_at(self.slot());
                let word = |word| load(&self.session.read, at + word * size_of::<u64>());
                layout::extents(word, length).ok_or(libc::EIO)
            }
            Err(libc::EINVAL) if self.is_inside(length) => {
                Ok(vec![Extent { length, is_hole: false }])
            }
            Err(errno) => Err(errno),
        }
    }

    fn is_inside(&self, length: u64) -> bool {
        let end = self.request.and_then(|request| request.offset.checked_add(length));
        length > 0 && end.is_some_and(|end| end <= self.known.facts.bytes)
    }

    /// Those of the session.
    pub fn answers(&self) -> Answers {
        Answers(self.session.clone())
    }

    fn wait(&mut self) -> Result<Result<(), i32>, Lost> {
        loop {
            if let Some(done) = self.answer() {
                return Ok(done);
            }
            let slot = self.slot.as_mut().ok_or(Lost)?;
            let (session, at, number) = (&self.session, answer_at(slot.slot), slot.number);
            let is_answered = || session.asks.answer(slot.slot, number).is_some();
            let is_quiet = match session.wait_by_stream(None, LOOK_AGAIN, is_answered) {
                Waited::NoStream => {
                    let look = || answered(load(&session.read, at), number);
                    slot.watcher.wait(&mut slot.watch, look).is_none()
                }
                waited => waited == Waited::Nothing,
            };
            if is_quiet && !session.is_served() {
                return Err(Lost);
            }
        }
    }

    /// Where what was read is, a slot's bytes, as long as this is there. Others may write there.
    pub fn bytes(&self) -> *const u8 {
        if self.is_by_stream {
            return self.session.asks.bytes(self.slot()).as_ptr();
        }
        let at = read_at(self.slot()).min(self.session.read.len());
        // SAFETY: within the region.
        #[allow(unsafe_code)]
        unsafe {
            self.session.read.base().add(at)
        }
    }

    /// Before anybody is told of the answer: what he flushes then, by whichever reader, has it.
    fn count(&self, done: Result<(), i32>) {
        let known = &self.known;
        match self.request {
            Some(Request { op: Op::Flush, .. }) if done.is_ok() => {
                known.flushed.fetch_max(self.written, Ordering::AcqRel);
            }
            Some(Request { op, flags, .. })
                if done.is_ok() && op.changes() && flags & DURABLE == 0 =>
            {
                // ORDER: AcqRel, pairs with Acquire in `ask`.
                known.written.fetch_add(1, Ordering::AcqRel);
            }
            _ => {}
        }
    }

    /// The answer was taken, and what was read; or nothing was asked.
    pub fn finish(mut self) {
        self.request = None;
    }

    /// What is to be asked anew, of a server that comes next.
    pub fn again(mut self, reader: &Reader) -> Again {
        let length = self.request.map_or(0, |request| request.length as usize);
        let is_write = self.request.is_some_and(|request| request.op == Op::Write);
        if is_write && self.is_for_stream {
            let bytes = self.session.asks.bytes(self.slot());
            self.payload = bytes[..length.min(SLOT_BYTES)].to_vec();
        } else if is_write && self.payload.is_empty() {
            let mut bytes = vec![0; length.min(SLOT_BYTES)];
            // SAFETY: a slot's bytes at most, of a mapping that is there as long as the session.
            #[allow(unsafe_code)]
            unsafe {
                let from = self.session.written.base().add(written_at(self.slot()));
                ringlet_reflect::copy(from, bytes.as_mut_ptr(), bytes.len());
            }
            self.payload = bytes;
        }
        reader.lose(&self.session);
        Again { request: self.request, payload: std::mem::take(&mut self.payload) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.request.is_some() {
            self.session.is_lost.store(true, Ordering::Relaxed);
        }
        if let Some(slot) = self.slot.take() {
            let mut slots = locked(&self.session.slots);
            slots.push(slot);
            if self.session.waiting.load(Ordering::Relaxed) > 0 {
                self.session.freed.notify_one();
            }
        }
    }
}

/// A request of a server that has gone.
pub struct Again {
    request: Option<Request>,
    payload: Vec<u8>,
}

impl Again {
    /// For that turn to ask for.
    pub fn prepare(self, turn: &mut Turn) {
        turn.request = self.request;
        turn.fill_from(&self.payload);
    }

    /// What is to be written.
    pub fn payload(&mut self) -> &mut [u8] {
        &mut self.payload
    }
}

impl Answers {
    /// Sleeps until there may be more of them. False: for a tenth of a second there were none.
    pub fn wait(&self) -> bool {
        match self.0.wait_by_stream(None, LOOK_AGAIN, || false) {
            Waited::NoStream => locked(&self.0.answers).wait(Some(LOOK_AGAIN)),
            waited => waited != Waited::Nothing,
        }
    }

    /// Takes those that have come by a stream, and does not wait.
    pub fn receive(&self) {
        self.0.wait_by_stream(None, Duration::ZERO, || false);
    }

    /// Sleeps until there may be more of them, or there is something to be read there, which is the answer; not for long. `None` where they come
    /// by no stream, or another thread waits for them.
    pub fn wait_beside(&self, other: BorrowedFd) -> Option<bool> {
        match self.0.wait_by_stream(Some(other), LOOK_AGAIN, || false) {
            Waited::NoStream | Waited::Busy => None,
            waited => Some(waited == Waited::Seen { beside: true }),
        }
    }

    /// Do they come by a stream?
    pub fn have_stream(&self) -> bool {
        self.0.asks.has_stream()
    }

    /// Is it of a server that is known to have gone?
    pub fn is_lost(&self) -> bool {
        self.0.is_lost.load(Ordering::Relaxed)
    }

    /// Is the server there, and is this its reader?
    pub fn can_come(&self) -> bool {
        self.0.is_served()
    }
}

/// A region of this disk's, made by the one who serves it.
fn allocate(host: &Host, name: &str, part: Part, owner: u32) -> anyhow::Result<Region> {
    let how = Permission { coherent: part.is_coherent(), ..Permission::default() };
    let region = host.allocate(part.key(name), part.bytes(), &how)?;
    ensure!(region.made().owner == owner, "it is made by somebody else");
    Ok(region)
}

impl Session {
    fn open(name: &str, owner: Option<u32>) -> anyhow::Result<(Session, Facts)> {
        let host = Host::find().context("this host's reflective memory")?;
        let how = Permission::default();
        let none = || format!("no disk {name} is served just now (`ringlet disk ls`)");
        let region =
            match host.allocate(Part::Announcement.key(name), Part::Announcement.bytes(), &how) {
                Err(Status::Denied) => {
                    bail!("the disk {name} is not for this user (`ringlet disk serve --mode`)")
                }
                region => region.context("its announcement")?,
            };
        let announcement = region.receive(Use::default())?;
        let (facts, generation) = Facts::read(&announcement).with_context(none)?;
        let made = region.made().owner;
        let is_believed = made == 0 || made == host.user() || Some(made) == owner;
        ensure!(
            is_believed,
            "the disk {name} is served by user {made}: --owner {made} says that he is believed"
        );
        ensure!(
            facts.name == name,
            "the disk {} has the key of {name}: one of both needs another name",
            facts.name
        );
        let locks = match host.locks(Part::Announcement.key(name), 1 + READERS, 0o600, false) {
            Err(Status::Denied) => {
                bail!("the disk {name} is not for this user (`ringlet disk serve --mode`)")
            }
            locks => locks.context("its locks")?,
        };
        ensure!(locks.made().owner == made && locks.count() == 1 + READERS, none());
        let server = locks.holder(0)?.with_context(none)?;
        let mut seats = 0..READERS;
        let seat = seats.find(|seat| locks.acquire(1 + seat, Wait::No).is_ok());
        let full = || Refused(format!("the disk {name} has {READERS} readers already"));
        let seat = seat.with_context(full)?;

        let requests = allocate(&host, name, Part::Requests, made)?.transmit(Use::default())?;
        let (state, mut number) = (host.state()?, layout::random());
        let admitted = number;
        let mut watch = announcement.watch(0)?;
        Request::hello(&requests, seat, &state.host, number)?;
        let began = Instant::now();
        let done = loop {
            if let Some(done) = answered(load(&announcement, granted_at(seat)), number) {
                break done;
            }
            let is_there =
                layout::generation(&announcement) == generation && locks.holder(0)? == Some(server);
            ensure!(is_there && host.await_end(Duration::ZERO) == Ok(false), none());
            ensure!(began.elapsed() < WELCOME, "the server of the disk {name} does not answer");
            watch.wait(Some(LOOK_AGAIN));
        };
        if let Err(errno) = done {
            let why = std::io::Error::from_raw_os_error(errno);
            bail!(Refused(format!("the disk {name}'s server does not let this reader in: {why}")));
        }

        let written = allocate(&host, name, Part::Written(seat), made)?;
        let written = match state.cluster.is_some() && facts.host != state.host {
            true => written.transmit_to(&facts.host, true)?,
            false => written.transmit(Use::default())?,
        };
        let read = allocate(&host, name, Part::Read(seat), made)?.receive(Use::default())?;
        let mut slots = Vec::with_capacity(SLOTS);
        // (The last one is taken first: always the same, where one is enough.)
        for slot in (0..SLOTS).rev() {
            let watch = read.watch(answer_at(slot))?;
            number = next(number);
            slots.push(Slot { slot, number, watch, watcher: Watcher::default() });
        }
        let answers = Mutex::new(read.watch(answer_at(0))?);
        let (slots, freed, is_lost) = (Mutex::new(slots), Condvar::new(), AtomicBool::new(false));
        let waiting = AtomicUsize::new(0);
        // (On one host its memory is nearer; and another one's loopback address is somebody else's here.)
        let is_here = facts.host == state.host;
        let offer = facts
            .offer
            .clone()
            .filter(|of| of.address.ip().to_canonical().is_loopback() == is_here);
        #[cfg(test)]
        let offer = tests::by_another_way(name, offer);
        let asks = Arc::new(Asks::new(offer, seat, admitted));
        if asks.is_due() {
            asks.connect_at_once();
        }
        let session = Session {
            seat,
            server,
            generation,
            announcement,
            requests,
            written,
            read,
            slots,
            answers,
            freed,
            waiting,
            is_lost,
            asks,
            locks,
            host,
            seated: Arc::new(()),
        };
        Ok((session, facts))
    }

    fn try_take(&self) -> Result<Option<Slot>, Lost> {
        let mut slots = locked(&self.slots);
        // (Under the lock: so it is seen by who gets the slot of a turn that was given up.)
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(Lost);
        }
        Ok(if self.asks.is_open(slots.len()) { slots.pop() } else { None })
    }

    fn take(&self) -> Result<Slot, Lost> {
        let mut slots = locked(&self.slots);
        loop {
            if self.is_lost.load(Ordering::Relaxed) {
                return Err(Lost);
            }
            let is_open = self.asks.is_open(slots.len());
            if is_open && let Some(slot) = slots.pop() {
                return Ok(slot);
            }
            // (For a stream that stands ready nobody waits longer than it is held for.)
            let patience = if is_open { LOOK_AGAIN } else { HOLD };
            // ORDER: Relaxed: the lock tells of it.
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let woken = self.freed.wait_timeout(slots, patience);
            slots = woken.unwrap_or_else(PoisonError::into_inner).0;
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Where it has none, and the server takes some, another thread tries for one.
    fn seek_stream(&self) {
        if self.asks.is_due() {
            let asks = self.asks.clone();
            if thread::Builder::new().spawn(move || asks.connect()).is_err() {
                self.asks.put_off();
            }
        }
    }

    fn tell(&self) {
        let bytes = SLOTS * size_of::<u64>();
        if self.requests.notify(number_at(self.seat, 0), bytes).is_err() {
            self.is_lost.store(true, Ordering::Relaxed);
        }
    }

    /// What is written is there, or comes from where streams have it.
    fn ask_by_regions(&self, asked: &Asked, over: u64, copies: bool) -> Result<(), Status> {
        let &Asked { slot, number, request } = asked;
        let length = (asked.payload() as usize).min(SLOT_BYTES);
        if copies && length > 0 {
            self.written.put(written_at(slot), &self.asks.bytes(slot)[..length])?;
        }
        Request { over, ..request }.write(&self.requests, self.seat, slot)?;
        layout::write(&self.requests, number_at(self.seat, slot), number)
    }

    /// What was asked by a stream that has ended, and not answered, is asked by the regions, with the same numbers.
    fn move_to_regions(&self, broken: &Broken) {
        let moved = self.asks.leave(broken);
        for asked in &moved.asked {
            if self.ask_by_regions(asked, moved.over, true).is_err() {
                self.is_lost.store(true, Ordering::Relaxed);
            }
        }
        self.tell();
    }

    fn wait_by_stream(
        &self,
        beside: Option<BorrowedFd>,
        most: Duration,
        is_done: impl Fn() -> bool,
    ) -> Waited {
        self.asks.wait(beside, most, is_done).unwrap_or_else(|broken| {
            self.move_to_regions(&broken);
            Waited::Seen { beside: false }
        })
    }

    /// Is the server there, and is this its reader?
    fn is_served(&self) -> bool {
        let holds = |lock, member| self.locks.holder(lock) == Ok(Some(member));
        !self.is_lost.load(Ordering::Relaxed)
            && holds(0, self.server)
            && holds(1 + self.seat, self.host.member())
            && layout::generation(&self.announcement) == self.generation
            && self.host.await_end(Duration::ZERO) == Ok(false)
            // (Of no bytes: whether this host is cut off.)
            && self.requests.put(0, &[]).is_ok()
    }
}

#[cfg(test)]
mod streams;
#[cfg(test)]
mod tests;
