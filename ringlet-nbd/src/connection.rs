//! A connection's requests, and their answers.
//!
//! Two threads: one *receives*, and makes requests; while it has nothing to receive it watches for their answers, and sends them, as long as that pays. The
//! other one, which *answers*, sleeps for those that it does not see, while the first one sleeps for requests. So a request that is answered soon wakes no
//! thread but its client's, and one that takes its time holds up nobody.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringlet_disk::{Again, Flags, Op, Reader, SLOT_BYTES, SLOTS, Turn, Watcher};

/// Of a request's bytes, as NBD has it; what is more than a slot's is asked for in pieces.
pub const REQUEST_MOST: u32 = 32 << 20;

const REQUEST: u32 = 0x2560_9513;
const REQUEST_BYTES: usize = 28;
const REPLY: u32 = 0x6744_6698;
const REPLY_BYTES: usize = 16;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZERO: u16 = 6;

const FUA: u16 = 1;
const NO_HOLE: u16 = 1 << 1;
const FAST_ZERO: u16 = 1 << 4;

/// Who is to be woken by the other thread looks itself, so often.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Who has a slot gives it back soon.
const RETRY: Duration = Duration::from_millis(1);

/// As it came.
struct Request {
    flags: u16,
    kind: u16,
    cookie: u64,
    offset: u64,
    length: u32,
}

impl Request {
    /// `None` if it is none.
    fn read(bytes: &[u8; REQUEST_BYTES]) -> Option<Request> {
        let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let head = word(0);
        let (flags, kind, length) =
            ((head >> 16) as u16, head as u16, (word(20) & 0xffff_ffff) as u32);
        let request = Request { flags, kind, cookie: word(8), offset: word(16), length };
        (head >> 32 == u64::from(REQUEST)).then_some(request)
    }

    fn op(&self) -> Option<Op> {
        Some(match self.kind {
            READ => Op::Read,
            WRITE => Op::Write,
            FLUSH => Op::Flush,
            TRIM => Op::Trim,
            ZERO => Op::Zero,
            _ => return None,
        })
    }

    fn flags(&self) -> Flags {
        let has = |flag| self.flags & flag != 0;
        Flags { durable: has(FUA), may_trim: !has(NO_HOLE), fast: has(FAST_ZERO) }
    }
}

/// An answer's head.
fn head(cookie: u64, done: Result<(), i32>) -> [u8; REPLY_BYTES] {
    // (NBD has these numbers, and no others.)
    let error = match done {
        Ok(()) => 0,
        Err(libc::EPERM | libc::EROFS | libc::EACCES) => libc::EPERM,
        Err(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => libc::ENOSPC,
        Err(error @ (libc::ENOMEM | libc::EINVAL | libc::EOVERFLOW | libc::EOPNOTSUPP)) => error,
        Err(_) => libc::EIO,
    };
    let mut bytes = [0; REPLY_BYTES];
    bytes[..4].copy_from_slice(&REPLY.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

struct Asked {
    cookie: u64,
    turn: Turn,
    /// How much of what it read is sent with its answer.
    reads: usize,
}

#[derive(Default)]
struct Flight {
    asked: Vec<Asked>,
    /// The server may sleep, and does not know of some.
    is_untold: bool,
    /// The one that receives watches for answers too.
    is_watched: bool,
    /// The one that answers waits for something to wait for; the one that receives, for a slot.
    is_parked: bool,
    is_full: bool,
    is_over: bool,
    said: Option<String>,
}

struct Connection<'a> {
    stream: &'a UnixStream,
    reader: &'a Reader,
    flight: Mutex<Flight>,
    /// There is something to wait for.
    unparked: Condvar,
    /// A slot is free.
    freed: Condvar,
    say: &'a (dyn Fn(&str) + Sync),
}

/// Why a watch ended.
enum Seen {
    Answers,
    Input,
    End(io::Error),
}

/// Until the client has gone, or says what it should not.
pub fn serve(stream: &UnixStream, reader: &Reader, say: &(dyn Fn(&str) + Sync)) -> io::Result<()> {
    let (flight, unparked, freed) = (Mutex::default(), Condvar::new(), Condvar::new());
    let connection = Connection { stream, reader, flight, unparked, freed, say };
    thread::scope(|scope| {
        let answers = || {
            let _ = connection.answer();
            connection.end();
        };
        thread::Builder::new().spawn_scoped(scope, answers)?;
        let done = connection.receive();
        connection.end();
        done
    })
}

fn interrupted(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}

impl Connection<'_> {
    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For both threads.
    fn end(&self) {
        // (First of all: who waits to send has the lock.)
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.flight().is_over = true;
        self.unparked.notify_all();
        self.freed.notify_all();
    }

    fn receive(&self) -> io::Result<()> {
        let (mut input, mut watcher) = (Input::new(), Watcher::default());
        loop {
            while input.left().len() < REQUEST_BYTES {
                self.await_input(&mut input, &mut watcher)?;
            }
            let Some(request) = input.take().and_then(|bytes| Request::read(&bytes)) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            if request.kind == DISCONNECT {
                return Ok(());
            }
            self.ask(&request, &mut input)?;
        }
    }

    /// More to read: meanwhile what is answered is sent.
    fn await_input(&self, input: &mut Input, watcher: &mut Watcher) -> io::Result<()> {
        let mut tries = || match input.receive(self.stream, libc::MSG_DONTWAIT) {
            Ok(()) => Some(Seen::Input),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => Some(Seen::End(error)),
        };
        loop {
            match tries() {
                Some(Seen::End(error)) => return Err(error),
                Some(_) => return Ok(()),
                None => {}
            }
            if !self.tell(watcher) {
                break;
            }
            let look = || match self.send_answers(&mut self.flight()) {
                Ok(true) => Some(Seen::Answers),
                Ok(false) => None,
                Err(error) => Some(Seen::End(error)),
            };
            match watcher.watch(look, &mut tries) {
                Some(Seen::End(error)) => return Err(error),
                Some(Seen::Input) => return Ok(()),
                Some(Seen::Answers) => {}
                None => break,
            }
        }
        self.aside(|| input.receive(self.stream, 0))
    }

    /// Waits for something else than answers, which the other thread looks after meanwhile.
    fn aside<T>(&self, wait: impl FnOnce() -> T) -> T {
        {
            let mut flight = self.flight();
            self.tell_of(&mut flight);
            flight.is_watched = false;
            if flight.is_parked && !flight.asked.is_empty() {
                self.unparked.notify_all();
            }
        }
        wait()
    }

    /// The server knows of all; is there any? Then it is watched for, if that is so.
    fn tell(&self, watcher: &Watcher) -> bool {
        let mut flight = self.flight();
        self.tell_of(&mut flight);
        flight.is_watched = watcher.watches();
        !flight.asked.is_empty()
    }

    fn tell_of(&self, flight: &mut Flight) {
        if std::mem::take(&mut flight.is_untold)
            && let Some(asked) = flight.asked.last()
        {
            asked.turn.tell();
        }
    }

    fn ask(&self, request: &Request, input: &mut Input) -> io::Result<()> {
        let Request { cookie, offset, length, .. } = *request;
        let Some(op) = request.op() else {
            return self.send_answer(cookie, Err(libc::EINVAL), &[]);
        };
        let (length, flags) = (length as usize, request.flags());
        let has_bytes = matches!(op, Op::Read | Op::Write);
        if has_bytes && length > REQUEST_MOST as usize {
            // (Behind a write come its bytes.)
            return match op {
                Op::Read => self.send_answer(cookie, Err(libc::EINVAL), &[]),
                _ => Err(io::ErrorKind::InvalidData.into()),
            };
        }
        if has_bytes && length > SLOT_BYTES {
            return self.ask_in_pieces(request, input);
        }
        let mut turn = match self.turn() {
            Ok(turn) => turn,
            Err(errno) => {
                if op == Op::Write {
                    input.pass(self, length)?;
                }
                return self.send_answer(cookie, Err(errno), &[]);
            }
        };
        turn.prepare(op, flags, offset, length as u64);
        if op == Op::Write && !turn.fill(length, |to, part| input.read(self, to, part).is_ok()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let reads = if op == Op::Read { length } else { 0 };
        match self.push(cookie, reads, turn) {
            Ok(()) => Ok(()),
            Err(lost) => self.place(cookie, reads, lost, &mut None),
        }
    }

    /// A slot, once there is one.
    fn turn(&self) -> Result<Turn, i32> {
        let mut until = None;
        loop {
            if self.flight().asked.len() == SLOTS {
                self.aside(|| self.await_slot());
            }
            if self.flight().is_over {
                return Err(libc::EIO);
            }
            match self.reader.turn(&mut until) {
                Ok(Some(turn)) => return Ok(turn),
                Ok(None) => thread::sleep(RETRY),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn await_slot(&self) {
        let mut flight = self.flight();
        flight.is_full = true;
        let is_full = |flight: &mut Flight| flight.asked.len() == SLOTS && !flight.is_over;
        let flight = self.freed.wait_while(flight, is_full);
        flight.unwrap_or_else(PoisonError::into_inner).is_full = false;
    }

    /// What is longer than a slot.
    fn ask_in_pieces(&self, request: &Request, input: &mut Input) -> io::Result<()> {
        let (cookie, offset) = (request.cookie, request.offset);
        let mut bytes = vec![0; request.length as usize];
        if request.kind == READ {
            let done = self.aside(|| self.reader.read(offset, &mut bytes));
            return self.send_answer(cookie, done, if done.is_ok() { &bytes } else { &[] });
        }
        input.read(self, bytes.as_mut_ptr(), bytes.len())?;
        let done = self.aside(|| self.reader.write(offset, &bytes, request.flags()));
        self.send_answer(cookie, done, &[])
    }

    fn send_answer(&self, cookie: u64, done: Result<(), i32>, bytes: &[u8]) -> io::Result<()> {
        let mut flight = self.flight();
        self.say_why(&mut flight, done);
        let head = head(cookie, done);
        let part = |bytes: &[u8]| part(bytes.as_ptr(), bytes.len());
        send(self.stream, &mut [part(&head), part(bytes)])
    }

    /// A client is told a number: here is why.
    fn say_why(&self, flight: &mut Flight, done: Result<(), i32>) {
        if done == Err(libc::EIO)
            && let Some(why) = self.reader.why_not()
            && flight.said.as_ref() != Some(&why)
        {
            (self.say)(&why);
            flight.said = Some(why);
        }
    }

    /// Sends all that is answered; false if nothing is.
    fn send_answers(&self, flight: &mut Flight) -> io::Result<bool> {
        let mut answered = Vec::new();
        let mut at = 0;
        while let Some(asked) = flight.asked.get(at) {
            match asked.turn.answer() {
                Some(done) => answered.push((flight.asked.swap_remove(at), done)),
                None => at += 1,
            }
        }
        if answered.is_empty() {
            return Ok(false);
        }
        let heads: Vec<_> =
            answered.iter().map(|(asked, done)| head(asked.cookie, *done)).collect();
        let mut parts = Vec::with_capacity(2 * heads.len());
        for ((asked, done), head) in answered.iter().zip(&heads) {
            parts.push(part(head.as_ptr(), head.len()));
            if done.is_ok() && asked.reads > 0 {
                parts.push(part(asked.turn.bytes(), asked.reads));
            }
        }
        let sent = send(self.stream, &mut parts);
        for (asked, done) in answered {
            asked.turn.finish(done);
        }
        if flight.is_full {
            self.freed.notify_all();
        }
        sent.map(|()| true)
    }

    /// Sleeps for answers while the other thread does not see them.
    fn answer(&self) -> io::Result<()> {
        loop {
            let mut flight = self.flight();
            flight.is_parked = true;
            // (The other one may have found meanwhile that the server has gone, and wait for the next one: which waits for what is in flight.)
            let idle = |flight: &mut Flight| {
                !flight.is_over && (flight.is_watched || flight.asked.is_empty())
            };
            let parked = self.unparked.wait_timeout_while(flight, LOOK_AGAIN, idle);
            let mut flight = parked.unwrap_or_else(PoisonError::into_inner).0;
            flight.is_parked = false;
            if flight.is_over {
                return Ok(());
            }
            if self.send_answers(&mut flight)? {
                continue;
            }
            let Some(answers) = flight.asked.first().map(|asked| asked.turn.answers()) else {
                continue;
            };
            drop(flight);
            if !answers.wait() && !answers.can_come() {
                drop(answers);
                self.ask_again()?;
            }
        }
    }

    /// Asks the server that comes next for all that is not answered. (The other thread goes on meanwhile: what it has of the session before it gives
    /// back, and the next one does not begin before.)
    fn ask_again(&self) -> io::Result<()> {
        let again: Vec<_> = {
            let mut flight = self.flight();
            self.send_answers(&mut flight)?;
            let asked = std::mem::take(&mut flight.asked);
            self.freed.notify_all();
            let again = |each: Asked| (each.cookie, each.reads, each.turn.again(self.reader));
            asked.into_iter().map(again).collect()
        };
        let mut until = None;
        for (cookie, reads, again) in again {
            self.place(cookie, reads, again, &mut until)?;
        }
        self.tell_of(&mut self.flight());
        Ok(())
    }

    /// Asks for what was asked for, or was going to be, of a server that has gone.
    fn place(
        &self,
        cookie: u64,
        reads: usize,
        mut again: Again,
        until: &mut Option<Instant>,
    ) -> io::Result<()> {
        loop {
            match self.reader.turn(until) {
                Ok(Some(mut turn)) => {
                    again.prepare(&mut turn);
                    match self.push(cookie, reads, turn) {
                        Ok(()) => return Ok(()),
                        Err(lost) => again = lost,
                    }
                }
                Ok(None) => {
                    self.send_answers(&mut self.flight())?;
                    thread::sleep(RETRY);
                }
                Err(errno) => return self.send_answer(cookie, Err(errno), &[]),
            }
        }
    }

    /// Asks, unless the server has gone meanwhile: what is lost is found by who has it in flight, and not behind that.
    fn push(&self, cookie: u64, reads: usize, mut turn: Turn) -> Result<(), Again> {
        let mut flight = self.flight();
        if turn.is_lost() {
            return Err(turn.again(self.reader));
        }
        turn.ask();
        flight.asked.push(Asked { cookie, turn, reads });
        flight.is_untold = true;
        Ok(())
    }
}

/// What was received, and not yet taken.
struct Input {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Input {
    fn new() -> Input {
        Input { bytes: vec![0; 32 << 10].into(), from: 0, to: 0 }
    }

    fn left(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }

    fn take(&mut self) -> Option<[u8; REQUEST_BYTES]> {
        let bytes = *self.left().first_chunk()?;
        self.from += REQUEST_BYTES;
        Some(bytes)
    }

    /// At least a byte more.
    fn receive(&mut self, stream: &UnixStream, flags: i32) -> io::Result<()> {
        if self.from > 0 {
            self.bytes.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let room = &mut self.bytes[self.to..];
        self.to += receive(stream, room.as_mut_ptr(), room.len(), flags)?;
        Ok(())
    }

    /// So many bytes, to there.
    fn read(&mut self, of: &Connection, to: *mut u8, length: usize) -> io::Result<()> {
        let had = self.left().len().min(length);
        // SAFETY: so many bytes may be written there: callers.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(self.left().as_ptr(), to, had);
        }
        self.from += had;
        let mut done = had;
        while done < length {
            // SAFETY: within what may be written.
            #[allow(unsafe_code)]
            let to = unsafe { to.add(done) };
            let now = match receive(of.stream, to, length - done, libc::MSG_DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    of.aside(|| receive(of.stream, to, length - done, libc::MSG_WAITALL))
                }
                now => now,
            };
            done += now?;
        }
        Ok(())
    }

    /// So many bytes are for nobody.
    fn pass(&mut self, of: &Connection, length: usize) -> io::Result<()> {
        let mut bytes = vec![0; length];
        self.read(of, bytes.as_mut_ptr(), length)
    }
}

/// At least a byte; a client that has gone is an error.
fn receive(stream: &UnixStream, to: *mut u8, length: usize, flags: i32) -> io::Result<usize> {
    loop {
        // SAFETY: so many bytes may be written there: callers.
        #[allow(unsafe_code)]
        let got = unsafe { libc::recv(stream.as_raw_fd(), to.cast(), length, flags) };
        match usize::try_from(got) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => return Ok(got),
            Err(_) => {
                let error = io::Error::last_os_error();
                if !interrupted(&error) {
                    return Err(error);
                }
            }
        }
    }
}

fn part(from: *const u8, length: usize) -> libc::iovec {
    libc::iovec { iov_base: from.cast_mut().cast(), iov_len: length }
}

/// Sends all of it.
fn send(stream: &UnixStream, mut parts: &mut [libc::iovec]) -> io::Result<()> {
    while !parts.is_empty() {
        // SAFETY: zeros are a message of nothing; the parts can be read as long as this call (callers), by the kernel alone.
        #[allow(unsafe_code)]
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
            libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        let mut sent = match usize::try_from(sent) {
            Ok(sent) => sent,
            Err(_) => {
                let error = io::Error::last_os_error();
                if interrupted(&error) {
                    continue;
                }
                return Err(error);
            }
        };
        while let Some(first) = parts.first_mut()
            && sent >= first.iov_len
        {
            sent -= first.iov_len;
            parts = &mut parts[1..];
        }
        if let Some(first) = parts.first_mut() {
            // SAFETY: less than its bytes.
            #[allow(unsafe_code)]
            unsafe {
                first.iov_base = first.iov_base.cast::<u8>().add(sent).cast();
            }
            first.iov_len -= sent;
        }
    }
    Ok(())
}
