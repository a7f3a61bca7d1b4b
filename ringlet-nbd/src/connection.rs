//! A connection's requests, and their answers.
//!
//! Two threads: one *receives*, and makes requests; while it has nothing to receive it watches for their answers, and sends them, as long as that pays. The
//! other one, which *answers*, sleeps for those that it does not see, while the first one sleeps for requests. So a request that is answered soon wakes no
//! thread but its client's, and one that takes its time holds up nobody.
//!
//! A client may send on before it takes what it is answered. So the first thread does not wait for that: what is not taken is copied, from where the
//! disk's server has put it, for the other one to send (`Flight::unsent`), until that is too much.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringlet_disk::{Again, Flags, Op, Reader, SLOT_BYTES, SLOTS, Turn, Watcher};

use crate::wire::{
    self, Agreed, FAST_ZERO, FLUSH, FUA, Head, NO_HOLE, ONE, PAYLOAD, READ, REQUEST_MOST, Request,
    STATUS, TRIM, To, WHOLE, WRITE, ZERO,
};

/// Of answers that a client does not take: while there are more, nothing is received.
const UNSENT_MOST: usize = 32 << 20;

/// A client that reads takes more so soon, which spares a copy.
const TAKES: Duration = Duration::from_millis(20);

/// What is read at once, of so many bytes at least, and is a hole as a whole is told, not sent: to look for holes costs some.
const SPARSE_LEAST: u64 = 16 << 10;

/// What is behind a write that is refused is received in pieces of so many bytes.
const PASSED: usize = 64 << 10;

/// Who is to be woken by the other thread looks itself, so often.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Who has a slot gives it back soon.
const RETRY: Duration = Duration::from_millis(1);

impl Request {
    fn op(&self) -> Option<Op> {
        Some(match self.kind {
            READ => Op::Read,
            WRITE => Op::Write,
            FLUSH => Op::Flush,
            TRIM => Op::Trim,
            ZERO => Op::Zero,
            STATUS => Op::Extents,
            _ => return None,
        })
    }

    fn flags(&self) -> Flags {
        let has = |flag| self.flags & flag != 0;
        let (durable, may_trim, fast) = (has(FUA), !has(NO_HOLE), has(FAST_ZERO));
        Flags { durable, may_trim, fast, sparse: false }
    }
}

/// Whose answer it is that is awaited.
#[derive(Clone)]
struct Of {
    to: To,
    carries: Carries,
    /// If it is a piece: of what, and where there.
    piece: Option<(Arc<Mutex<Whole>>, usize)>,
}

/// What is sent with it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carries {
    Nothing,
    /// So much of what is read.
    Bytes(usize),
    /// What is held: one extent, or as many as are known.
    Extents {
        one: bool,
    },
}

impl Of {
    fn reads(&self) -> usize {
        if let Carries::Bytes(bytes) = self.carries { bytes } else { 0 }
    }
}

/// An answer, or a piece of one.
struct Answer {
    head: Head,
    body: Vec<u8>,
    /// What lies in the slot follows.
    has_slot: bool,
}

impl From<Head> for Answer {
    fn from(head: Head) -> Answer {
        Answer { head, body: Vec::new(), has_slot: false }
    }
}

impl From<(Head, Vec<u8>)> for Answer {
    fn from((head, body): (Head, Vec<u8>)) -> Answer {
        Answer { head, body, has_slot: false }
    }
}

/// What is longer than a slot, and is answered with its last piece; of what is read in chunks each piece is one.
struct Whole {
    left: usize,
    done: Result<(), i32>,
    read: Vec<u8>,
}

struct Asked {
    of: Of,
    turn: Turn,
}

#[derive(Default)]
struct Flight {
    asked: Vec<Asked>,
    /// So many more are about to be asked for again.
    again: usize,
    /// Bytes of `Whole`s that are read.
    held: usize,
    /// The server may sleep, and does not know of some.
    is_untold: bool,
    /// The one that receives watches for answers too.
    is_watched: bool,
    /// The one that answers waits for something to wait for; the one that receives, for something to be answered.
    is_parked: bool,
    is_awaited: bool,
    /// The one that answers looks after nothing: whatever is asked wakes it.
    rests: bool,
    /// Answers that the client did not take at once, behind those of which the one that answers still sends so many bytes.
    unsent: Vec<u8>,
    sending: usize,
    /// Answers can't be sent any more.
    is_deaf: bool,
    is_over: bool,
    said: Option<String>,
}

impl Flight {
    fn requests(&self) -> usize {
        self.asked.len() + self.again
    }

    fn unsent(&self) -> usize {
        self.unsent.len() + self.sending
    }
}

struct Connection<'a> {
    stream: &'a UnixStream,
    reader: &'a Reader,
    agreed: Agreed,
    /// Of the disk.
    bytes: u64,
    flight: Mutex<Flight>,
    /// There is something to wait for.
    unparked: Condvar,
    /// Something is answered.
    answered: Condvar,
    say: &'a (dyn Fn(&str) + Sync),
}

/// Why a watch ended.
enum Seen {
    Answers,
    Input,
    End(io::Error),
}

/// Until the client leaves, has gone, or says what it should not. All that it asked for is done then, or has failed: nothing of it comes late.
pub fn serve(
    stream: &UnixStream,
    reader: &Reader,
    agreed: Agreed,
    say: &(dyn Fn(&str) + Sync),
) -> io::Result<()> {
    // (Who waits for a write's bytes looks whether they can still be written where they are received; and who waits to send, whether the server
    // is there.)
    stream.set_read_timeout(Some(LOOK_AGAIN))?;
    stream.set_write_timeout(Some(LOOK_AGAIN))?;
    let (bytes, flight) = (reader.source().bytes(), Mutex::default());
    let (unparked, answered) = (Condvar::new(), Condvar::new());
    let connection = Connection { stream, reader, agreed, bytes, flight, unparked, answered, say };
    thread::scope(|scope| {
        thread::Builder::new().spawn_scoped(scope, || connection.answer())?;
        let done = connection.receive();
        if done.is_err() {
            connection.hang_up();
        }
        let is_done = |flight: &Flight| flight.requests() == 0 && flight.unsent() == 0;
        connection.await_answers(is_done);
        connection.flight().is_over = true;
        connection.unparked.notify_all();
        done
    })
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn interrupted(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}

fn waits(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// (The kernel has another word for a client that has gone and did not read all.)
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

impl Connection<'_> {
    fn flight(&self) -> MutexGuard<'_, Flight> {
        locked(&self.flight)
    }

    /// Nothing is sent any more. What was received before is there all the same.
    fn hang_up(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    fn receive(&self) -> io::Result<()> {
        let (mut input, mut watcher) = (Input::new(), Watcher::default());
        // (What has come already waits for a server with what is before it, and no longer.)
        let mut until = None;
        loop {
            while input.left().len() < self.agreed.request_bytes() {
                match self.await_input(&mut input, &mut watcher) {
                    Ok(true) => until = None,
                    Ok(false) => {}
                    // (Who says no more may listen.)
                    Err(error) if is_end(&error) && input.left().is_empty() => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            let Some(request) = Request::read(input.left(), self.agreed) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            input.from += self.agreed.request_bytes();
            if request.kind == wire::DISCONNECT {
                return Ok(());
            }
            let is_taken = |flight: &Flight| flight.unsent() <= UNSENT_MOST;
            if !is_taken(&self.flight()) {
                self.await_answers(is_taken);
            }
            self.ask(&request, &mut input, &mut until)?;
        }
    }

    /// More to read: meanwhile what is answered is sent. Whether it had to be waited for.
    fn await_input(&self, input: &mut Input, watcher: &mut Watcher) -> io::Result<bool> {
        let mut tries = || match input.receive(self.stream, libc::MSG_DONTWAIT) {
            Ok(()) => Some(Seen::Input),
            Err(error) if waits(&error) => None,
            Err(error) => Some(Seen::End(error)),
        };
        // (By a stream it sleeps for both, which tells whether there is any.)
        let (mut has_waited, mut has_input) = (false, !has_stream(&self.flight()));
        loop {
            match has_input.then(&mut tries).flatten() {
                Some(Seen::End(error)) => return Err(error),
                Some(_) => return Ok(has_waited),
                None => has_waited = true,
            }
            if !self.tell(watcher) {
                break;
            }
            if let Some(found) = self.await_by_stream() {
                has_input = found;
                continue;
            }
            has_input = true;
            let look = || self.send_answers(&mut self.flight()).then_some(Seen::Answers);
            match watcher.watch(look, &mut tries) {
                Some(Seen::End(error)) => return Err(error),
                Some(Seen::Input) => return Ok(true),
                Some(Seen::Answers) => {}
                None => break,
            }
        }
        self.aside(|| {
            loop {
                match input.receive(self.stream, 0) {
                    Err(error) if waits(&error) => await_some(self.stream),
                    received => return received.map(|()| true),
                }
            }
        })
    }

    /// Where answers come by a stream: sleeps for one of them, which is sent, or for something from the client, which is the answer. `None`: they
    /// come otherwise, or nothing is asked.
    fn await_by_stream(&self) -> Option<bool> {
        let answers = {
            let mut flight = self.flight();
            self.tell_of(&mut flight);
            // (Who sends by a stream may receive meanwhile.)
            if self.send_answers(&mut flight) {
                return Some(true);
            }
            let answers = flight.asked.first()?.turn.answers();
            flight.is_watched |= answers.have_stream();
            answers
        };
        let found = answers.wait_beside(self.stream.as_fd())?;
        self.send_answers(&mut self.flight());
        Some(found)
    }

    /// Waits for something else than answers, which the other thread looks after meanwhile.
    fn aside<T>(&self, wait: impl FnOnce() -> T) -> T {
        {
            let mut flight = self.flight();
            self.tell_of(&mut flight);
            self.send_received(&mut flight);
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

    fn ask(
        &self,
        request: &Request,
        input: &mut Input,
        until: &mut Option<Instant>,
    ) -> io::Result<()> {
        let Request { cookie, offset, length, payload, .. } = *request;
        if payload > REQUEST_MOST.into() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let to = To { cookie, offset };
        let mut of = Of { to, carries: Carries::Nothing, piece: None };
        let op = match self.allowed(request) {
            Ok(op) => op,
            Err(errno) => {
                input.pass(self, payload as usize)?;
                self.conclude(&of, Err(errno));
                return Ok(());
            }
        };
        let (reads, has_chunks) = (op == Op::Read, self.agreed.has_chunks());
        let is_bytes = reads || op == Op::Write;
        if !is_bytes || length <= SLOT_BYTES as u64 {
            of.carries = match op {
                Op::Read => Carries::Bytes(length as usize),
                Op::Extents => Carries::Extents { one: request.flags & ONE != 0 },
                _ => Carries::Nothing,
            };
            let sparse = has_chunks && reads && length >= SPARSE_LEAST;
            let flags = Flags { sparse, ..request.flags() };
            return self.ask_once(of, op, flags, (offset, length), input, until);
        }
        // (Bytes of a request are within `REQUEST_MOST`.)
        let length = length as usize;
        let mut whole = Whole { left: length.div_ceil(SLOT_BYTES), done: Ok(()), read: Vec::new() };
        if reads && !has_chunks {
            let has_room = |flight: &Flight| flight.held + length <= REQUEST_MOST as usize;
            if !has_room(&self.flight()) {
                self.await_answers(has_room);
            }
            self.flight().held += length;
            whole.read = vec![0; length];
        }
        let whole = Arc::new(Mutex::new(whole));
        for at in (0..length).step_by(SLOT_BYTES) {
            let part = SLOT_BYTES.min(length - at);
            let carries = if reads { Carries::Bytes(part) } else { Carries::Nothing };
            let of = Of { to, carries, piece: Some((whole.clone(), at)) };
            let flags = Flags { sparse: has_chunks && reads, ..request.flags() };
            self.ask_once(of, op, flags, (offset + at as u64, part as u64), input, until)?;
        }
        Ok(())
    }

    /// What can be asked for at all.
    fn allowed(&self, request: &Request) -> Result<Op, i32> {
        let op = request.op().ok_or(libc::EINVAL)?;
        let agreed = self.agreed;
        let flags = FUA
            | match op {
                Op::Zero => NO_HOLE | FAST_ZERO,
                Op::Read if agreed.has_chunks() => WHOLE,
                Op::Write if agreed.extended => PAYLOAD,
                Op::Extents => ONE,
                _ => 0,
            };
        // (All that is written follows its request.)
        let is_short = op == Op::Write && request.payload != request.length;
        let is_agreed = op != Op::Extents || agreed.allocation && request.length > 0;
        let end = request.offset.checked_add(request.length);
        let is_inside = op == Op::Flush || end.is_some_and(|end| end <= self.bytes);
        match op {
            _ if request.flags & !flags != 0 || is_short || !is_agreed => Err(libc::EINVAL),
            Op::Write | Op::Zero if !is_inside => Err(libc::ENOSPC),
            Op::Read if request.length > REQUEST_MOST.into() => Err(libc::EINVAL),
            _ if !is_inside => Err(libc::EINVAL),
            // (One chunk is one slot's.)
            Op::Read if request.flags & WHOLE != 0 && request.length > SLOT_BYTES as u64 => {
                Err(libc::EOVERFLOW)
            }
            _ => Ok(op),
        }
    }

    /// At most a slot's, from where on.
    fn ask_once(
        &self,
        of: Of,
        op: Op,
        flags: Flags,
        (offset, length): (u64, u64),
        input: &mut Input,
        until: &mut Option<Instant>,
    ) -> io::Result<()> {
        let mut turn = match self.turn(op, until) {
            Ok(turn) => turn,
            Err(errno) => {
                if op == Op::Write {
                    input.pass(self, length as usize)?;
                }
                self.conclude(&of, Err(errno));
                return Ok(());
            }
        };
        turn.prepare(op, flags, offset, length);
        if op == Op::Write {
            let length = length as usize;
            let (server, mut received) = (turn.answers(), Ok(0));
            turn.fill(length, |to, part| {
                received = input.read(self, to, part, || !server.is_lost());
                true
            });
            drop(server);
            match received {
                Ok(had) if had == length => {}
                // (Others are about to ask again, for which all of the session before must be given back.)
                Ok(had) => {
                    let mut again = turn.again(self.reader);
                    let rest = &mut again.payload()[had..];
                    let done = input.read(self, rest.as_mut_ptr(), rest.len(), || true);
                    return done.map(|_| self.place(of, again, until));
                }
                Err(error) => {
                    turn.finish();
                    return Err(error);
                }
            }
        }
        if let Err(lost) = self.push(&of, turn) {
            self.place(of, lost, until);
        }
        Ok(())
    }

    /// A slot, once there is one; not for what nobody would hear.
    fn turn(&self, op: Op, until: &mut Option<Instant>) -> Result<Turn, i32> {
        loop {
            let (is_deaf, is_full) = {
                let flight = self.flight();
                (flight.is_deaf, flight.requests() >= SLOTS)
            };
            if matches!(op, Op::Read | Op::Extents) && is_deaf {
                return Err(libc::EIO);
            }
            if is_full {
                self.await_answers(|flight| flight.requests() < SLOTS);
                continue;
            }
            match self.reader.turn(until) {
                Ok(Some(turn)) => {
                    *until = None;
                    return Ok(turn);
                }
                // (Others have a slot, or a stream waits for what was asked before.)
                Ok(None) => self.aside(|| thread::sleep(RETRY)),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Until enough is answered.
    fn await_answers(&self, is_enough: impl Fn(&Flight) -> bool) {
        // (By a stream it takes what comes itself, whatever the other one sends.)
        loop {
            let mut flight = self.flight();
            self.tell_of(&mut flight);
            self.send_received(&mut flight);
            if is_enough(&flight) {
                return;
            }
            let answers = flight.asked.first().map(|asked| asked.turn.answers());
            let Some(answers) = answers.filter(|answers| answers.have_stream()) else { break };
            flight.is_watched = true;
            drop(flight);
            answers.wait();
        }
        self.aside(|| {
            let mut flight = self.flight();
            flight.is_awaited = true;
            let flight = self.answered.wait_while(flight, |flight| !is_enough(flight));
            flight.unwrap_or_else(PoisonError::into_inner).is_awaited = false;
        });
    }

    /// What has come by a stream while something was sent there, of which nobody else hears.
    fn send_received(&self, flight: &mut Flight) {
        if has_stream(flight) {
            self.send_answers(flight);
        }
    }

    fn send(&self, flight: &mut Flight, mut parts: &mut [libc::iovec]) {
        if flight.is_deaf {
            return;
        }
        if flight.unsent() == 0 {
            match send(self.stream, parts) {
                Ok(left) => parts = left,
                Err(_) => return self.give_up(flight),
            }
        }
        for part in &*parts {
            let (at, unsent) = (flight.unsent.len(), &mut flight.unsent);
            unsent.reserve(part.iov_len);
            // SAFETY: bytes that can be read as long as this call (callers), raw, since others may write there; and room for them.
            #[allow(unsafe_code)]
            unsafe {
                let to = unsent.as_mut_ptr().add(at);
                std::ptr::copy_nonoverlapping(part.iov_base.cast(), to, part.iov_len);
                unsent.set_len(at + part.iov_len);
            }
        }
        if flight.unsent() > 0 && flight.is_parked {
            self.unparked.notify_all();
        }
    }

    /// (Half of an answer may be sent.)
    fn give_up(&self, flight: &mut Flight) {
        (flight.is_deaf, flight.unsent) = (true, Vec::new());
        self.hang_up();
    }

    /// What could not be asked for is answered.
    fn conclude(&self, of: &Of, done: Result<(), i32>) {
        let mut flight = self.flight();
        if let Some(Answer { head, body, .. }) = self.answer_to(&mut flight, of, done, None) {
            let parts = [head.bytes(), &body].map(|bytes| part(bytes.as_ptr(), bytes.len()));
            let mut parts: Vec<_> = parts.into_iter().filter(|part| part.iov_len > 0).collect();
            self.send(&mut flight, &mut parts);
        }
    }

    /// The answer; of a piece it is none until all are done, unless it is a chunk. `turn`: who has what this one has read, or was told.
    fn answer_to(
        &self,
        flight: &mut Flight,
        of: &Of,
        mut done: Result<(), i32>,
        turn: Option<&Turn>,
    ) -> Option<Answer> {
        let mut extents = Vec::new();
        if let (Carries::Extents { one }, Some(turn)) = (of.carries, turn) {
            done = turn.extents(done).map(|found| extents = found);
            extents.truncate(if one { 1 } else { usize::MAX });
        }
        let mut read = Vec::new();
        if let Some((whole, at)) = &of.piece {
            let mut whole = locked(whole);
            let to = whole.read.get_mut(*at..*at + of.reads());
            if let (Ok(()), Some(to), Some(turn)) = (done, to, turn) {
                // SAFETY: a slot has so many bytes, which are there as long as its turn.
                #[allow(unsafe_code)]
                unsafe {
                    std::ptr::copy_nonoverlapping(turn.bytes(), to.as_mut_ptr(), to.len());
                }
            }
            if self.agreed.has_chunks() && of.reads() > 0 {
                whole.left -= 1;
                let is_last = whole.left == 0;
                drop(whole);
                let why = self.say_why(flight, done);
                return Some(self.chunk(of, done, is_last, turn, &why));
            }
            whole.done = whole.done.and(done);
            whole.left -= 1;
            if whole.left > 0 {
                return None;
            }
            done = whole.done;
            flight.held -= whole.read.len();
            read = std::mem::take(&mut whole.read);
            if done.is_err() {
                read.clear();
            }
        }
        let why = self.say_why(flight, done);
        let (agreed, to) = (self.agreed, of.to);
        Some(match (of.carries, done) {
            _ if !agreed.has_chunks() => Answer {
                has_slot: done.is_ok() && of.reads() > 0 && of.piece.is_none(),
                body: read,
                head: Head::simple(to, done),
            },
            (Carries::Bytes(_), _) => self.chunk(of, done, true, turn, &why),
            (_, Err(errno)) => wire::failed(agreed, to, true, errno, None, &why).into(),
            (Carries::Extents { .. }, Ok(())) => wire::extents(agreed, to, &extents).into(),
            (Carries::Nothing, Ok(())) => Head::done(agreed, to).into(),
        })
    }

    /// What was read, or why not, of an answer in chunks.
    fn chunk(
        &self,
        of: &Of,
        done: Result<(), i32>,
        is_last: bool,
        turn: Option<&Turn>,
        why: &str,
    ) -> Answer {
        let (agreed, to, bytes) = (self.agreed, of.to, of.reads());
        let at = of.piece.as_ref().map(|(_, at)| to.offset + *at as u64);
        let from = at.unwrap_or(to.offset);
        match done {
            Err(errno) => wire::failed(agreed, to, is_last, errno, at, why).into(),
            Ok(()) if bytes == 0 => Head::empty(agreed, to).into(),
            Ok(()) if turn.is_some_and(Turn::is_hole) => {
                Head::hole(agreed, to, is_last, from, bytes).into()
            }
            Ok(()) => {
                let head = Head::data(agreed, to, is_last, from, bytes);
                Answer { head, body: Vec::new(), has_slot: true }
            }
        }
    }

    /// A client without chunks is told a number: here is why, each reason once. It is empty where there is none.
    fn say_why(&self, flight: &mut Flight, done: Result<(), i32>) -> String {
        if done != Err(libc::EIO) {
            return String::new();
        }
        let why = self.reader.why_not();
        if let Some(why) = why.as_ref().filter(|why| flight.said.as_ref() != Some(*why)) {
            (self.say)(why);
            flight.said = Some(why.clone());
        }
        why.unwrap_or_default()
    }

    /// Sends all that is answered; false if nothing is.
    fn send_answers(&self, flight: &mut Flight) -> bool {
        let mut answered = Vec::new();
        let mut at = 0;
        while let Some(asked) = flight.asked.get_mut(at) {
            match asked.turn.answer() {
                Some(done) => answered.push((flight.asked.swap_remove(at), done)),
                None => at += 1,
            }
        }
        if answered.is_empty() {
            return false;
        }
        let answers: Vec<_> = answered
            .iter()
            .map(|(asked, done)| self.answer_to(flight, &asked.of, *done, Some(&asked.turn)))
            .collect();
        let mut parts = Vec::with_capacity(2 * answers.len());
        for ((asked, _), answer) in answered.iter().zip(&answers) {
            let Some(Answer { head, body, has_slot }) = answer else { continue };
            parts.push(part(head.bytes().as_ptr(), head.bytes().len()));
            if !body.is_empty() {
                parts.push(part(body.as_ptr(), body.len()));
            }
            if *has_slot {
                parts.push(part(asked.turn.bytes(), asked.of.reads()));
            }
        }
        self.send(flight, &mut parts);
        for (asked, _) in answered {
            asked.turn.finish();
        }
        if flight.is_awaited {
            self.answered.notify_all();
        }
        true
    }

    /// Sleeps for answers while the other thread does not see them, and sends what the client did not take.
    fn answer(&self) {
        // (What of it is being sent, and up to where it is.)
        let (mut sends, mut at) = (Vec::new(), 0);
        let mut is_idle = false;
        loop {
            let mut flight = self.flight();
            flight.is_parked = true;
            // (The other one may have found meanwhile that the server has gone, and wait for the next one: which waits for what is in flight.)
            let idle = |flight: &mut Flight| {
                let nothing_comes = flight.is_watched || flight.asked.is_empty();
                !flight.is_over && flight.unsent() == 0 && nothing_comes
            };
            flight.rests = is_idle && flight.asked.is_empty();
            let has_rested = flight.rests;
            let mut flight = if has_rested {
                let rested =
                    self.unparked.wait_while(flight, |flight| flight.rests && idle(flight));
                rested.unwrap_or_else(PoisonError::into_inner)
            } else {
                let parked = self.unparked.wait_timeout_while(flight, LOOK_AGAIN, idle);
                parked.unwrap_or_else(PoisonError::into_inner).0
            };
            (flight.is_parked, flight.rests) = (false, false);
            if flight.is_over {
                return;
            }
            is_idle = !has_rested && flight.asked.is_empty() && flight.unsent() == 0;
            if has_rested || self.send_answers(&mut flight) {
                continue;
            }
            let answers = flight.asked.first().map(|asked| asked.turn.answers());
            if at == sends.len() {
                (sends, at) = (std::mem::take(&mut flight.unsent), 0);
                flight.sending = sends.len();
            }
            let is_watched = flight.is_watched;
            drop(flight);
            let is_quiet = match &answers {
                // (The other one sleeps for them.)
                Some(answers) if at == sends.len() && is_watched && answers.have_stream() => true,
                _ if at < sends.len() => {
                    if let Some(answers) = answers.as_ref().filter(|_| !is_watched) {
                        answers.receive();
                    }
                    let sent = self.send_on(&sends[at..]);
                    at += sent;
                    sent == 0
                }
                Some(answers) => !answers.wait(),
                None => false,
            };
            if is_quiet && answers.as_ref().is_some_and(|answers| !answers.can_come()) {
                drop(answers);
                self.ask_again();
            }
        }
    }

    /// Sends some of what the client did not take, once it takes that; how much, which is 0 if it takes nothing for a tenth of a second.
    fn send_on(&self, bytes: &[u8]) -> usize {
        let sent = send_some(self.stream, &mut [part(bytes.as_ptr(), bytes.len())], 0);
        let mut flight = self.flight();
        let sent = match sent {
            Err(error) if waits(&error) => 0,
            Err(_) => {
                self.give_up(&mut flight);
                bytes.len()
            }
            Ok(sent) => sent,
        };
        flight.sending -= sent;
        if flight.is_awaited {
            self.answered.notify_all();
        }
        sent
    }

    /// Asks the server that comes next for all that is not answered. (The other thread goes on meanwhile: what it has of the session before it gives
    /// back, and the next one does not begin before.)
    fn ask_again(&self) {
        let again: Vec<_> = {
            let mut flight = self.flight();
            self.send_answers(&mut flight);
            let asked = std::mem::take(&mut flight.asked);
            flight.again = asked.len();
            asked.into_iter().map(|each| (each.of, each.turn.again(self.reader))).collect()
        };
        let mut until = None;
        for (of, again) in again {
            self.place(of, again, &mut until);
            self.flight().again -= 1;
            self.answered.notify_all();
        }
        self.tell_of(&mut self.flight());
    }

    /// Asks for what was asked for, or was going to be, of a server that has gone.
    fn place(&self, of: Of, mut again: Again, until: &mut Option<Instant>) {
        loop {
            match self.reader.turn(until) {
                Ok(Some(mut turn)) => {
                    again.prepare(&mut turn);
                    match self.push(&of, turn) {
                        Ok(()) => return,
                        Err(lost) => again = lost,
                    }
                }
                Ok(None) => {
                    self.send_answers(&mut self.flight());
                    thread::sleep(RETRY);
                }
                Err(errno) => return self.conclude(&of, Err(errno)),
            }
        }
    }

    /// Asks, unless the server has gone meanwhile: what is lost is found by who has it in flight, and not behind that.
    fn push(&self, of: &Of, mut turn: Turn) -> Result<(), Again> {
        let mut flight = self.flight();
        if turn.is_lost() {
            return Err(turn.again(self.reader));
        }
        turn.ask();
        flight.asked.push(Asked { of: of.clone(), turn });
        flight.is_untold = true;
        if std::mem::take(&mut flight.rests) {
            self.unparked.notify_all();
        }
        Ok(())
    }
}

/// Is something asked, by a stream?
fn has_stream(flight: &Flight) -> bool {
    flight.asked.first().is_some_and(|asked| asked.turn.answers().have_stream())
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

    /// So many bytes, to there: how many came before they were not waited for any more.
    fn read(
        &mut self,
        of: &Connection,
        to: *mut u8,
        length: usize,
        waits_on: impl Fn() -> bool,
    ) -> io::Result<usize> {
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
            let left = length - done;
            let received = match receive(of.stream, to, left, libc::MSG_DONTWAIT) {
                Err(error) if waits(&error) => match of.await_by_stream() {
                    Some(_) => Err(error),
                    None => of.aside(|| receive(of.stream, to, left, libc::MSG_WAITALL)),
                },
                received => received,
            };
            match received {
                Ok(more) => done += more,
                Err(error) if waits(&error) && waits_on() => {}
                Err(error) if waits(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// So many bytes are for nobody.
    fn pass(&mut self, of: &Connection, length: usize) -> io::Result<()> {
        let mut bytes = [0; PASSED];
        for at in (0..length).step_by(PASSED) {
            self.read(of, bytes.as_mut_ptr(), PASSED.min(length - at), || true)?;
        }
        Ok(())
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

/// Until there is something to receive, or an error.
fn await_some(stream: &UnixStream) {
    let mut look = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one that is there for this call.
    #[allow(unsafe_code)]
    unsafe {
        libc::poll(&raw mut look, 1, -1);
    }
}

fn part(from: *const u8, length: usize) -> libc::iovec {
    libc::iovec { iov_base: from.cast_mut().cast(), iov_len: length }
}

/// Sends what the client takes, and waits for that a moment. What is left.
fn send<'a>(
    stream: &UnixStream,
    mut parts: &'a mut [libc::iovec],
) -> io::Result<&'a mut [libc::iovec]> {
    while !parts.is_empty() {
        let mut sent = match send_some(stream, parts, libc::MSG_DONTWAIT) {
            Err(error) if waits(&error) && takes(stream) => continue,
            Err(error) if waits(&error) => break,
            sent => sent?,
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
    Ok(parts)
}

fn send_some(stream: &UnixStream, parts: &mut [libc::iovec], flags: i32) -> io::Result<usize> {
    loop {
        // SAFETY: zeros are a message of nothing; the parts can be read as long as this call (callers), by the kernel alone.
        #[allow(unsafe_code)]
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
            let flags = flags | libc::MSG_NOSIGNAL;
            libc::sendmsg(stream.as_raw_fd(), &raw const message, flags)
        };
        match usize::try_from(sent) {
            Ok(sent) => return Ok(sent),
            Err(_) => {
                let error = io::Error::last_os_error();
                if !interrupted(&error) {
                    return Err(error);
                }
            }
        }
    }
}

/// Does the client take something soon?
fn takes(stream: &UnixStream) -> bool {
    let mut look = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one that is there for this call.
    #[allow(unsafe_code)]
    let found = unsafe { libc::poll(&raw mut look, 1, TAKES.as_millis() as i32) };
    found == 1 && look.revents & libc::POLLOUT != 0
}
