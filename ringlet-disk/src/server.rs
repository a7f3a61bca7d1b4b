//! Serves a disk.
//!
//! One thread at a time is the *leader*: it looks for requests, and sleeps while there are none. What may have to wait for the device it does behind
//! its leadership, which another thread takes meanwhile; what is in memory it does at once. So no request is passed from thread to thread.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringlet_reflect::{
    Host, Locks, Permission, Receiver, Region, Status, Transmitter, Use, Wait, Watch,
};

use crate::direct::{self, Asked, Ended, Fence, HELLO_BYTES, Hello, Link, Pending};
use crate::file::{Disk, Done, Patience};
use crate::layout::{
    self, DURABLE, EXTENTS_MOST, FAST, Facts, LOST, MAY_TRIM, Offer, Op, Part, READERS, Request,
    SLOT_BYTES, SLOTS, SPARSE, answer, answer_at, answer_of_zeros, answered, check_name,
    extents_bytes, granted_at, host_of, load, number_at, publish, read_at, written_at,
};
use crate::locked;
use crate::wait::{LOOK_AGAIN, Watcher};

/// Requests that wait for the device at a time, and one that looks for more.
const THREADS: usize = 17;
/// A server that has just died, or a reader that is about to, has gone by then.
const GONE: Duration = Duration::from_secs(2);
/// So many answers wait for each other at most.
const TOLD_AT_ONCE: usize = 8;
/// Whether a stream that was ended is done is looked at so often.
const DRAINED: Duration = Duration::from_millis(1);
/// Where nobody can be served a server tries again so often.
const RETRY: Duration = Duration::from_millis(200);

pub struct Options<'a> {
    pub name: &'a str,
    pub path: &'a Path,
    pub read_only: bool,
    /// As a file's, of those who may use it: reading and writing, or neither.
    pub mode: u32,
    /// Where readers of other hosts may ask by streams; of this one, too, if it is a loopback address.
    pub direct: Option<SocketAddr>,
}

impl Options<'_> {
    fn listen(&self) -> anyhow::Result<Option<TcpListener>> {
        let Some(address) = self.direct else { return Ok(None) };
        let listener = TcpListener::bind(address)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .with_context(|| format!("connections can't be taken at {address}"))?;
        Ok(Some(listener))
    }
}

pub enum Said {
    /// Readers can come.
    Ready,
    /// They can't, for the time being.
    Lost(anyhow::Error),
    /// They can, but by no connection of their own (`Options::direct`), until the next keeper.
    Indirect(anyhow::Error),
}

/// Serves until it is killed, which loses nothing. An error if it can't begin; later on it waits for a keeper to come back, which `find` finds.
pub fn serve(
    options: &Options,
    find: impl Fn() -> anyhow::Result<Host>,
    mut say: impl FnMut(Said),
) -> anyhow::Result<()> {
    check_name(options.name)?;
    let disk = Disk::open(options.path, options.read_only)?;
    let mut server = Server::new(options, &disk, find()?, || options.listen())?;
    loop {
        say(Said::Ready);
        server.run();
        // (All that it had is given back, and all that it did is done, before anybody is let in again.)
        drop(server);
        say(Said::Lost(Status::NotInitialised.into()));
        let mut why = String::new();
        server = loop {
            thread::sleep(RETRY);
            // (Its address may have gone by the time that a keeper is back: then by reflective memory alone.)
            let mut lacks = None;
            let listen = || {
                Ok(options
                    .listen()
                    .inspect_err(|error| lacks = Some(format!("{error:#}")))
                    .unwrap_or(None))
            };
            let began = find().and_then(|host| Server::new(options, &disk, host, listen));
            if began.is_ok()
                && let Some(why) = lacks
            {
                say(Said::Indirect(anyhow::anyhow!(why)));
            }
            match began {
                Ok(server) => break server,
                Err(error) if format!("{error:#}") == why => {}
                Err(error) => {
                    why = format!("{error:#}");
                    say(Said::Lost(error));
                }
            }
        };
    }
}

struct Server<'a> {
    disk: &'a Disk,
    name: &'a str,
    mode: u32,
    locks: Locks,
    announcement: Transmitter,
    requests: Receiver,
    host_name: String,
    host: Host,
    listener: Option<TcpListener>,
    token: [u64; 2],
    welcome: [u64; 2],
    leader: Mutex<Leader>,
    table: Mutex<Table>,
    /// One is let in at a time.
    door: Mutex<()>,
    is_over: AtomicBool,
}

struct Table {
    readers: Vec<Seat>,
    /// Those that have gone, until nothing is done for them any more.
    gone: Vec<Arc<Reader>>,
    from: usize,
    looked: Instant,
}

struct Seat {
    reader: Option<Arc<Reader>>,
    /// The last number of each slot.
    seen: [u64; SLOTS],
}

struct Reader {
    seat: usize,
    member: u32,
    /// By which it was let in.
    admitted: u64,
    written: Receiver,
    read: Transmitter,
    file: File,
    fence: Mutex<Fence>,
    /// The last answer of each slot to what changes the disk and was asked by a stream.
    changed: Mutex<[u64; SLOTS]>,
}

/// Where a request's bytes are: in a slot of the reader's regions, or here, either what is written or what is read.
enum Place<'a> {
    Slot(usize),
    Here(&'a mut [u8]),
}

impl Reader {
    /// For good. What is under way ends, and whoever has it has the reader until then.
    fn end_streams(&self) {
        locked(&self.fence).raise(u64::MAX);
    }

    /// Wakes it, if it sleeps.
    fn tell(&self) {
        let _ = self.read.notify(answer_at(0), SLOTS * size_of::<u64>());
    }
}

/// How the leader waits.
struct Leader {
    watch: Watch,
    watcher: Watcher,
}

/// Whose answers are written, some of which it was not told of: of several that come one behind the other it is told once. Dropped, it is told.
#[derive(Default)]
struct Untold {
    reader: Option<Arc<Reader>>,
    answers: usize,
}

impl Untold {
    fn add(&mut self, reader: Arc<Reader>) {
        let is_another = self.reader.as_ref().is_some_and(|before| !Arc::ptr_eq(before, &reader));
        if is_another || self.answers == TOLD_AT_ONCE {
            self.tell();
        }
        self.reader = Some(reader);
        self.answers += 1;
    }

    fn tell(&mut self) {
        self.answers = 0;
        if let Some(reader) = self.reader.take() {
            reader.tell();
        }
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        self.tell();
    }
}

/// What has been done is where it belongs; or it is zeros, of which nobody need be sent any.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// (So many bytes that are read.)
    There(usize),
    Zeros,
}

fn word(number: u64, done: Done<Found>) -> u64 {
    match done {
        Ok(Found::Zeros) => answer_of_zeros(number),
        done => answer(number, done.map(drop)),
    }
}

enum Job {
    Hello(usize, u64),
    Request(Arc<Reader>, usize, u64, Option<Request>),
    Over,
}

/// A region of a disk's, as it should be: somebody else's could be read by others.
fn allocate(host: &Host, name: &str, part: Part, mode: u32) -> Result<Region, Status> {
    let (mode, coherent) = (part.mode(mode), part.is_coherent());
    let how = Permission { mode, coherent, ..Permission::default() };
    let region = host.allocate(part.key(name), part.bytes(), &how)?;
    let made = region.made();
    let is_ours = made.owner == host.user() && made.mode == mode;
    if is_ours { Ok(region) } else { Err(Status::Denied) }
}

/// Tries again while others may be about to go.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T, Status>) -> Result<T, Status> {
    let began = Instant::now();
    loop {
        match attempt() {
            Err(Status::Denied | Status::Busy | Status::BadSize | Status::Incoherent)
                if began.elapsed() < GONE =>
            {
                thread::sleep(RETRY);
            }
            done => return done,
        }
    }
}

fn secret() -> io::Result<[u64; 2]> {
    let mut bytes = [[0; 8]; 2];
    for bytes in &mut bytes {
        rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes.map(u64::from_ne_bytes))
}

fn boot() -> u64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

impl<'a> Server<'a> {
    fn new(
        options: &Options<'a>,
        disk: &'a Disk,
        host: Host,
        listen: impl FnOnce() -> anyhow::Result<Option<TcpListener>>,
    ) -> anyhow::Result<Server<'a>> {
        let (name, mode) = (options.name, options.mode);
        let locks = patiently(|| {
            let locks = host.locks(Part::Announcement.key(name), 1 + READERS, mode, false)?;
            let made = locks.made();
            let is_ours = made.owner == host.user() && made.mode == mode;
            let is_right = is_ours && locks.count() == 1 + READERS;
            if is_right { Ok(locks) } else { Err(Status::Denied) }
        });
        let theirs = || {
            format!(
                "another program has what the disk {name} needs, or who has used it when it had another --mode does still"
            )
        };
        let locks = locks.with_context(theirs)?;
        match patiently(|| locks.acquire(0, Wait::No)) {
            Err(Status::Busy) => bail!("a disk {name} is served already (`ringlet disk ls`)"),
            taken => taken?,
        }
        let make = |part| patiently(|| allocate(&host, name, part, mode)).with_context(theirs);
        let announcement = make(Part::Announcement)?.transmit(Use::default())?;
        let requests = make(Part::Requests)?.receive(Use::default())?;
        let watch = requests.watch(0)?;
        let leader = Mutex::new(Leader { watch, watcher: Watcher::default() });
        // (What was asked of another server is none of this one's.)
        let seat = |seat| Seat {
            reader: None,
            seen: std::array::from_fn(|slot| load(&requests, number_at(seat, slot))),
        };
        let readers = (0..READERS).map(seat).collect();
        let table = Table { readers, gone: Vec::new(), from: 0, looked: Instant::now() };
        let host_name = host.state()?.host;
        let listener = listen()?;
        let address = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        let (token, welcome) = (secret()?, secret()?);
        let offer = address.map(|address| Offer { address, token, welcome });
        let facts = Facts {
            name: name.to_owned(),
            bytes: disk.bytes,
            read_only: disk.read_only,
            boot: boot(),
            host: host_name.clone(),
            file: disk.id,
            sequence: disk.sequence,
            offer,
        };
        facts.announce(&announcement, layout::random())?;
        let (table, door, is_over) = (Mutex::new(table), Mutex::new(()), AtomicBool::new(false));
        Ok(Server {
            disk,
            name,
            mode,
            locks,
            announcement,
            requests,
            host_name,
            host,
            listener,
            token,
            welcome,
            leader,
            table,
            door,
            is_over,
        })
    }

    /// Until the keeper has gone, or takes another one for the server.
    fn run(&self) {
        let pending = Pending::default();
        thread::scope(|scope| {
            if let Some(listener) = &self.listener {
                let is_over = || self.is_over.load(Ordering::Relaxed);
                let greeted = move |stream, hello| self.greeted(scope, stream, &hello);
                let pending = &pending;
                scope.spawn(move || direct::meet(scope, listener, pending, is_over, greeted));
            }
            let workers: Vec<_> =
                (0..THREADS).map(|_| scope.spawn(|| while self.work() {})).collect();
            for worker in workers {
                if let Err(panic) = worker.join() {
                    std::panic::resume_unwind(panic);
                }
            }
            // (Nobody is let in any more.)
            for seat in &locked(&self.table).readers {
                seat.reader.iter().for_each(|reader| reader.end_streams());
            }
        });
    }

    /// Somebody has connected, and said this.
    fn greeted<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stream: TcpStream,
        hello: &[u8; HELLO_BYTES],
    ) {
        let Some(Hello { seat, admitted, stream: number, .. }) = Hello::read(hello, self.token)
        else {
            return;
        };
        let reader = locked(&self.table).readers[seat].reader.clone();
        let Some(reader) = reader.filter(|reader| reader.admitted == admitted) else { return };
        let link = Arc::new(Link::new(stream, number));
        if !locked(&reader.fence).admit(&link) || link.welcome(self.welcome).is_err() {
            return;
        }
        let stream = link.clone();
        let does = move |asked: &Asked, bytes: &mut [u8], may_wait| {
            self.done_by_stream(&reader, &stream, asked, bytes, may_wait)
        };
        direct::serve(scope, link, does);
    }

    fn done_by_stream(
        &self,
        reader: &Reader,
        stream: &Link,
        &Asked { slot, number, request }: &Asked,
        bytes: &mut [u8],
        may_wait: bool,
    ) -> Result<Option<(u64, usize)>, Ended> {
        let holds = self.holder(reader.seat) == Some(reader.member);
        if stream.is_over() || !holds || self.is_over.load(Ordering::Relaxed) {
            return Err(Ended);
        }
        let patience = if may_wait { Patience::AsLong } else { Patience::None };
        let done = self.perform(reader, &request, Place::Here(bytes), patience);
        if done == Err(libc::EAGAIN) && !may_wait {
            return Ok(None);
        }
        let word = word(number, done);
        if request.op.changes() {
            locked(&reader.changed)[slot] = word;
        }
        // (What could not be said is asked again, of another run.)
        if self.is_over.load(Ordering::Relaxed) {
            return Err(Ended);
        }
        let length = if let Ok(Found::There(length)) = done { length } else { 0 };
        Ok(Some((word, length)))
    }

    fn work(&self) -> bool {
        let job = {
            let mut leader = locked(&self.leader);
            let mut untold = Untold::default();
            loop {
                let job = self.look().unwrap_or_else(|| {
                    untold.tell();
                    self.next(&mut leader)
                });
                match job {
                    Job::Request(reader, slot, number, Some(request)) => {
                        match self.once(&reader, slot, number, &request, Patience::None) {
                            Err(libc::EAGAIN) => {
                                break Job::Request(reader, slot, number, Some(request));
                            }
                            done => {
                                self.answer(&reader, slot, number, done);
                                untold.add(reader);
                            }
                        }
                    }
                    job => break job,
                }
            }
        };
        match job {
            Job::Over => return false,
            Job::Hello(seat, number) => self.welcome(seat, number),
            Job::Request(reader, slot, number, request) => {
                let perform = |request| self.once(&reader, slot, number, request, Patience::AsLong);
                let done = request.as_ref().map_or(Err(libc::EINVAL), perform);
                self.answer(&reader, slot, number, done);
                reader.tell();
            }
        }
        true
    }

    /// The next that is asked for; it sleeps until there is something.
    fn next(&self, Leader { watch, watcher }: &mut Leader) -> Job {
        loop {
            if let Some(job) = watcher.wait(watch, || self.look()) {
                return job;
            }
        }
    }

    fn look(&self) -> Option<Job> {
        let mut table = locked(&self.table);
        // (Readers, and the keeper, are looked after as often as a sleeper looks again.)
        if table.looked.elapsed() >= LOOK_AGAIN {
            self.look_after(&mut table);
        }
        if self.is_over.load(Ordering::Relaxed) {
            return Some(Job::Over);
        }
        // (From where it found the last one on: nobody is kept waiting by others.)
        let Table { readers, from, .. } = &mut *table;
        for seat in (*from..READERS).chain(0..*from) {
            let Seat { reader, seen } = &mut readers[seat];
            let slots = if reader.is_some() { SLOTS } else { 1 };
            for (slot, seen) in seen.iter_mut().enumerate().take(slots) {
                let number = load(&self.requests, number_at(seat, slot));
                if number == std::mem::replace(seen, number) {
                    continue;
                }
                let request = Request::read(&self.requests, seat, slot);
                if request.is_some_and(|request| request.op == Op::Hello) {
                    return Some(Job::Hello(seat, number));
                }
                // (Its words are its own if it still holds the seat behind them, and else may be half another's.)
                let holds = |reader: &Reader| self.holder(seat) == Some(reader.member);
                if let Some(reader) = reader.as_ref().filter(|reader| holds(reader)) {
                    let reader = reader.clone();
                    *from = (seat + 1) % READERS;
                    return Some(Job::Request(reader, slot, number, request));
                }
            }
        }
        None
    }

    fn holder(&self, seat: usize) -> Option<u32> {
        self.locks.holder(1 + seat).ok().flatten()
    }

    /// Who has gone has no seat any more.
    fn look_after(&self, table: &mut Table) {
        table.looked = Instant::now();
        for seat in &mut table.readers {
            let has_gone = |reader: &Arc<Reader>| self.holder(reader.seat) != Some(reader.member);
            if seat.reader.as_ref().is_some_and(has_gone) {
                table.gone.extend(seat.reader.take());
            }
        }
        table.gone.iter().for_each(|reader| reader.end_streams());
        table.gone.retain(|reader| Arc::strong_count(reader) > 1);
        let is_there = self.host.await_end(Duration::ZERO) == Ok(false);
        if !is_there || self.locks.holder(0) != Ok(Some(self.host.member())) {
            self.is_over.store(true, Ordering::Relaxed);
        }
    }

    /// Lets a reader in, or says why not, by an error. What those did that have gone is done before: it can't come behind what this one does.
    fn welcome(&self, seat: usize, number: u64) {
        let _door = locked(&self.door);
        loop {
            let mut table = locked(&self.table);
            // (Who asked may have given up meanwhile: then it is another one's seat, which is let in by its own number, or was.)
            if load(&self.requests, number_at(seat, 0)) != number {
                return;
            }
            let before = table.readers[seat].reader.take();
            table.gone.extend(before);
            self.look_after(&mut table);
            if table.gone.is_empty() {
                break;
            }
            drop(table);
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        let admitted = self.admit(seat, number);
        #[cfg(test)]
        tests::dawdle(self.name, &self.table);
        let done = match &admitted {
            Ok(_) => Ok(()),
            Err(Status::Denied) => Err(libc::EACCES),
            Err(Status::Full | Status::ReceiveFull | Status::NoMemory) => Err(libc::ENOMEM),
            Err(_) => Err(libc::EAGAIN),
        };
        if let Ok(reader) = admitted {
            let mut seen = std::array::from_fn(|slot| load(&self.requests, number_at(seat, slot)));
            // (Who asked may have gone meanwhile: another one's number is not seen yet.)
            seen[0] = number;
            locked(&self.table).readers[seat] = Seat { reader: Some(Arc::new(reader)), seen };
        }
        let _ = self.say(|| publish(&self.announcement, granted_at(seat), answer(number, done)));
    }

    fn admit(&self, seat: usize, admitted: u64) -> Result<Reader, Status> {
        let member = self.locks.holder(1 + seat)?.ok_or(Status::NotHeld)?;
        let host = host_of(&self.requests, seat).ok_or(Status::BadHost)?;
        let make = |part| allocate(&self.host, self.name, part, self.mode);
        let written = make(Part::Written(seat))?.receive(Use::default())?;
        let read = make(Part::Read(seat))?;
        let read = match host == self.host_name {
            true => read.transmit(Use::default())?,
            false => read.transmit_to(&host, true)?,
        };
        let file = self.disk.own().map_err(|_| Status::NoMemory)?;
        let (fence, changed) = (Mutex::default(), Mutex::default());
        Ok(Reader { seat, member, admitted, written, read, file, fence, changed })
    }

    /// What is asked by the regions; maybe it was asked by a stream before, which has ended, and maybe it is done.
    fn once(
        &self,
        reader: &Reader,
        slot: usize,
        number: u64,
        request: &Request,
        patience: Patience,
    ) -> Done<Found> {
        while request.over > 0 && !locked(&reader.fence).raise(request.over) && request.op.changes()
        {
            if patience == Patience::None {
                return Err(libc::EAGAIN);
            }
            thread::sleep(DRAINED);
        }
        let changed = locked(&reader.changed)[slot];
        if request.op.changes()
            && let Some(done) = answered(changed, number)
        {
            return done.map(|()| Found::There(0));
        }
        self.perform(reader, request, Place::Slot(slot), patience)
    }

    /// EAGAIN: it may have to wait, and was not to.
    fn perform(
        &self,
        reader: &Reader,
        request: &Request,
        place: Place,
        patience: Patience,
    ) -> Done<Found> {
        let Request { op, flags, offset, length, .. } = *request;
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= self.disk.bytes);
        if !is_inside || op.is_of_slot() && length > SLOT_BYTES as u64 {
            return Err(libc::EINVAL);
        }
        if op.changes() && self.disk.read_only {
            return Err(libc::EPERM);
        }
        if op == Op::Read {
            // KERNEL: who looks for holes may wait for who writes to the file, or for the device; zeros are read where that does not wait.
            let is_zeros = match patience {
                _ if flags & SPARSE == 0 => false,
                Patience::None => self.disk.is_zeros(offset, length)?,
                Patience::AsLong => self.disk.is_hole(&reader.file, offset, length),
            };
            if is_zeros {
                return Ok(Found::Zeros);
            }
            let length = length as usize;
            match place {
                Place::Slot(slot) => self.read(reader, slot, offset, length, patience)?,
                Place::Here(bytes) => {
                    let bytes = &mut bytes[..length];
                    // SAFETY: as many bytes as it has.
                    #[allow(unsafe_code)]
                    unsafe {
                        self.disk.read(offset, length, bytes.as_mut_ptr(), patience)?;
                    }
                }
            }
            return Ok(Found::There(length));
        }
        // (In memory, too, all of a large disk takes its time.)
        let is_long = length > SLOT_BYTES as u64 || op == Op::Extents;
        if patience == Patience::None && (!self.disk.never_waits || is_long) {
            return Err(libc::EAGAIN);
        }
        match op {
            Op::Write => {
                let length = length as usize;
                let bytes = match place {
                    // SAFETY: the slots are within the region.
                    #[allow(unsafe_code)]
                    Place::Slot(slot) => unsafe {
                        reader.written.words().as_ptr().cast::<u8>().add(written_at(slot))
                    },
                    Place::Here(bytes) => bytes[..length].as_ptr(),
                };
                // SAFETY: `length` is a slot's at most; nobody but the kernel reads there.
                #[allow(unsafe_code)]
                unsafe {
                    self.disk.write(offset, length, bytes)?;
                }
            }
            Op::Trim => self.disk.trim(offset, length)?,
            Op::Zero => {
                self.disk.zero(offset, length, flags & MAY_TRIM != 0, flags & FAST != 0)?;
            }
            Op::Flush => self.flush(reader)?,
            Op::Extents if length == 0 => return Err(libc::EINVAL),
            Op::Extents => {
                let found = self.disk.extents(&reader.file, offset, length, EXTENTS_MOST);
                let found = extents_bytes(&found);
                match place {
                    Place::Slot(slot) => self.say(|| reader.read.put(read_at(slot), &found))?,
                    Place::Here(bytes) => bytes[..found.len()].copy_from_slice(&found),
                }
                return Ok(Found::There(found.len()));
            }
            Op::Hello | Op::Read => return Err(libc::EINVAL),
        }
        if op.changes() && flags & DURABLE != 0 {
            self.flush(reader)?;
        }
        Ok(Found::There(0))
    }

    /// What is lost is announced before anybody is told: the kernel tells it to no file that is opened later, as the next server's.
    fn flush(&self, reader: &Reader) -> Done<()> {
        self.disk.flush(&reader.file).or_else(|errno| {
            self.say(|| publish(&self.announcement, LOST, layout::random()))?;
            Err(errno)
        })
    }

    /// Straight into what the reader receives, or into the log that goes there. Only what need not wait goes into a log: others would wait for it
    /// there.
    fn read(
        &self,
        reader: &Reader,
        slot: usize,
        offset: u64,
        length: usize,
        patience: Patience,
    ) -> Done<()> {
        let (to, at) = (&reader.read, read_at(slot));
        if patience == Patience::AsLong && !to.is_memory() {
            let mut bytes = vec![0; length];
            // SAFETY: as many bytes as it has.
            #[allow(unsafe_code)]
            unsafe {
                self.disk.read(offset, length, bytes.as_mut_ptr(), patience)?;
            }
            return self.say(|| to.put(at, &bytes));
        }
        let mut done = Ok(());
        let filled = self.say(|| {
            let filled = to.fill(at, length, |from, part, to| {
                // SAFETY: so many bytes may be written there, as `fill` has it.
                #[allow(unsafe_code)]
                unsafe {
                    done = self.disk.read(offset + from as u64, part, to, patience);
                }
                done.is_ok()
            });
            // (What could not be read could be said.)
            if done.is_err() { Ok(()) } else { filled }
        });
        done.and(filled)
    }

    /// To where it is received.
    fn say(&self, say: impl FnOnce() -> Result<(), Status>) -> Done<()> {
        #[cfg(test)]
        let say = || tests::pass(self.name).and_then(|()| say());
        // WHY: a host that is cut off for a moment goes on with all who were there, and who waits for what was not said then would wait for ever. So
        // there is another run of this server, of which they ask again.
        say().map_err(|_| {
            self.is_over.store(true, Ordering::Relaxed);
            libc::EIO
        })
    }

    fn answer(&self, reader: &Reader, slot: usize, number: u64, done: Done<Found>) {
        if !self.is_over.load(Ordering::Relaxed) {
            let word = word(number, done);
            let _ = self.say(|| layout::write(&reader.read, answer_at(slot), word));
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::sync::Mutex;

    use ringlet_reflect::Status;

    /// As if the host of this disk's server were cut off while the next answer is said.
    pub static CUT_OFF: Mutex<Option<&str>> = Mutex::new(None);

    /// Who is let in by this disk's server next is kept waiting, and nobody looks meanwhile.
    pub static DAWDLES: Mutex<Option<&str>> = Mutex::new(None);

    pub fn dawdle<T>(disk: &str, table: &Mutex<T>) {
        if DAWDLES.lock().unwrap().is_some_and(|dawdles| dawdles == disk) {
            let _nobody = table.lock().unwrap();
            *DAWDLES.lock().unwrap() = None;
            std::thread::sleep(std::time::Duration::from_millis(500));
        }
    }

    pub fn pass(disk: &str) -> Result<(), Status> {
        match CUT_OFF.lock().unwrap().take_if(|cut| *cut == disk) {
            Some(_) => Err(Status::Stopped),
            None => Ok(()),
        }
    }
}
