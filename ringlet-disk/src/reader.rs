//! Reads and writes a disk.
//!
//! Each request takes a slot, and waits there for its answer. If the server goes, or this host is cut off from it, requests are made again of the
//! server that comes next: the same bytes to the same place, of which nobody was told that they are written.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringlet_reflect::{
    Host, Locks, Permission, Receiver, Region, Status, Transmitter, Use, Wait, Watch,
};

use crate::layout::{
    self, DURABLE, FAST, Facts, MAY_TRIM, Op, Part, READERS, Request, SLOT_BYTES, SLOTS, answer_at,
    answered, check_name, granted_at, load, next, number_at, publish, read_at, written_at,
};
use crate::wait::{LOOK_AGAIN, wait};

/// To be let in: the server waits for what those did that have gone.
const WELCOME: Duration = Duration::from_secs(30);

/// How something is written, or made zeros.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Flags {
    /// It is on the disk before the call returns.
    pub durable: bool,
    /// Zeros may be holes.
    pub may_trim: bool,
    /// Zeros only if that is faster than to write them.
    pub fast: bool,
}

/// A disk. Calls may be made by many threads at a time; their errors are the kernel's numbers.
pub struct Reader {
    name: String,
    owner: Option<u32>,
    patience: Duration,
    facts: Facts,
    session: Mutex<State>,
    /// Writes that were answered, and as many of them as are known to be on the disk.
    written: AtomicU64,
    flushed: AtomicU64,
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
struct Lost;

impl From<Status> for Lost {
    fn from(_: Status) -> Lost {
        Lost
    }
}

enum Bytes<'a> {
    None,
    /// To the disk.
    From(&'a [u8]),
    /// From it.
    To(&'a mut [u8]),
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reader {
    /// A disk that is served just now by this user, root, or `owner`. When its server has gone, or can't be reached, a request waits so long before
    /// it fails.
    pub fn open(name: &str, owner: Option<u32>, patience: Duration) -> anyhow::Result<Reader> {
        check_name(name)?;
        let (session, facts) = Session::open(name, owner)?;
        let state = State { session: Some(Arc::new(session)), ..State::default() };
        let (session, written, flushed) = (Mutex::new(state), AtomicU64::new(0), AtomicU64::new(0));
        Ok(Reader { name: name.to_owned(), owner, patience, facts, session, written, flushed })
    }

    pub fn bytes(&self) -> u64 {
        self.facts.bytes
    }

    pub fn is_read_only(&self) -> bool {
        self.facts.read_only
    }

    /// Why calls fail where it is not for the disk's errors.
    pub fn why_not(&self) -> Option<String> {
        locked(&self.session).why_not.clone()
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
        // ORDER: Acquire, pairs with AcqRel in `ask`: what is counted here was answered before the server is asked.
        let written = self.written.load(Ordering::Acquire);
        self.ask(Op::Flush, Flags::default(), 0, 0, Bytes::None)?;
        self.flushed.fetch_max(written, Ordering::AcqRel);
        Ok(())
    }

    pub fn trim(&self, offset: u64, length: u64, flags: Flags) -> Result<(), i32> {
        self.ask(Op::Trim, flags, offset, length, Bytes::None)
    }

    /// With `fast` only if that is faster than to write them, or EOPNOTSUPP.
    pub fn zero(&self, offset: u64, length: u64, flags: Flags) -> Result<(), i32> {
        self.ask(Op::Zero, flags, offset, length, Bytes::None)
    }

    fn ask(
        &self,
        op: Op,
        how: Flags,
        offset: u64,
        length: u64,
        mut bytes: Bytes,
    ) -> Result<(), i32> {
        let flag = |is: bool, flag: u32| if is { flag } else { 0 };
        let flags =
            flag(how.durable, DURABLE) | flag(how.may_trim, MAY_TRIM) | flag(how.fast, FAST);
        let request = Request { op, flags, offset, length };
        let mut until = None;
        loop {
            let session = self.session(&mut until)?;
            if let Ok(done) = session.ask(&request, &mut bytes) {
                if done.is_ok() && !how.durable && !matches!(op, Op::Read | Op::Flush) {
                    // ORDER: AcqRel, pairs with Acquire in `flush`.
                    self.written.fetch_add(1, Ordering::AcqRel);
                }
                return done;
            }
            self.lose(&session);
        }
    }

    fn lose(&self, session: &Arc<Session>) {
        session.is_lost.store(true, Ordering::Relaxed);
        let mut state = locked(&self.session);
        if state.session.as_ref().is_some_and(|now| Arc::ptr_eq(now, session)) {
            state.before = Arc::downgrade(&session.seated);
            state.session = None;
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
                return Ok(session.clone());
            }
            let until = *until.get_or_insert_with(|| Instant::now() + self.patience);
            // (What was asked for by the one before may be done until its seat is given back, which is behind its last user.)
            if state.before.strong_count() == 0 {
                match Session::open(&self.name, self.owner) {
                    Ok((session, facts)) => {
                        state.why_not = self.why_another(&facts);
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

    /// Why what is served now is not what was.
    fn why_another(&self, now: &Facts) -> Option<String> {
        let before = &self.facts;
        let what = |facts: &Facts| (facts.bytes, facts.read_only, facts.file, facts.host.clone());
        if what(now) != what(before) {
            return Some(format!("the disk {} is another one now", self.name));
        }
        let (written, flushed) =
            (self.written.load(Ordering::Acquire), self.flushed.load(Ordering::Acquire));
        let is_lost = now.boot != before.boot && written != flushed;
        is_lost.then(|| {
            format!(
                "{} has been started again: what was written to {} and not flushed is lost",
                now.host, self.name
            )
        })
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
    freed: Condvar,
    is_lost: AtomicBool,
    locks: Locks,
    host: Host,
    /// Last of all: when it has gone the seat was given back. (Of the session itself nothing is left while it is still being taken apart.)
    seated: Arc<()>,
}

struct Slot {
    slot: usize,
    number: u64,
    watch: Watch,
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
        let seat =
            seat.with_context(|| format!("the disk {name} has {READERS} readers already"))?;

        let requests = allocate(&host, name, Part::Requests, made)?.transmit(Use::default())?;
        let (state, mut number) = (host.state()?, layout::random());
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
            bail!("the server of the disk {name} does not let this reader in: {why}");
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
            slots.push(Slot { slot, number, watch });
        }
        let (slots, freed, is_lost) = (Mutex::new(slots), Condvar::new(), AtomicBool::new(false));
        let session = Session {
            seat,
            server,
            generation,
            announcement,
            requests,
            written,
            read,
            slots,
            freed,
            is_lost,
            locks,
            host,
            seated: Arc::new(()),
        };
        Ok((session, facts))
    }

    fn ask(&self, request: &Request, bytes: &mut Bytes) -> Result<Result<(), i32>, Lost> {
        let mut slot = self.take()?;
        let done = self.ask_in(&mut slot, request, bytes)?;
        locked(&self.slots).push(slot);
        self.freed.notify_one();
        Ok(done)
    }

    fn take(&self) -> Result<Slot, Lost> {
        let mut slots = locked(&self.slots);
        loop {
            if self.is_lost.load(Ordering::Relaxed) {
                return Err(Lost);
            }
            if let Some(slot) = slots.pop() {
                return Ok(slot);
            }
            let woken = self.freed.wait_timeout(slots, LOOK_AGAIN);
            slots = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn ask_in(
        &self,
        slot: &mut Slot,
        request: &Request,
        bytes: &mut Bytes,
    ) -> Result<Result<(), i32>, Lost> {
        if let Bytes::From(bytes) = bytes {
            self.written.put(written_at(slot.slot), bytes)?;
        }
        request.write(&self.requests, self.seat, slot.slot)?;
        slot.number = next(slot.number);
        publish(&self.requests, number_at(self.seat, slot.slot), slot.number)?;
        let done = self.await_answer(slot)?;
        if let (Ok(()), Bytes::To(bytes)) = (done, bytes) {
            // SAFETY: a request has a slot's bytes at most, which are within the region. What the server stores there meanwhile, who has answered,
            // spoils but what it has read itself.
            #[allow(unsafe_code)]
            unsafe {
                let from = self.read.base().add(read_at(slot.slot));
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
            }
        }
        Ok(done)
    }

    fn await_answer(&self, slot: &mut Slot) -> Result<Result<(), i32>, Lost> {
        let (at, number) = (answer_at(slot.slot), slot.number);
        loop {
            if let Some(done) = wait(&mut slot.watch, || answered(load(&self.read, at), number)) {
                return Ok(done);
            }
            if !self.is_served() {
                return Err(Lost);
            }
        }
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
mod tests;
