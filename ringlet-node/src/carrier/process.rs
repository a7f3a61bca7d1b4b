//! The carrier's process: one thread that copies, and those that do apart what may wait.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::introduction::{GREETING, JOIN, LINK, LINKED, Message};
use ringlet_adapter::{Adapter, Link, Memory, Progress};
use ringlet_core::layout::Geometry;
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{fd, meet};

use super::ends::{Brought, Doing, Ends};
use super::keeper::by_whom_it_was_started;
use super::{Order, Pair, WORD_BYTES, Word};
use crate::apart::{Apart, From};
use crate::clock::{Clock, Moment};
use crate::memory::{RINGS_OF_A_PAIR, Room, connection_bytes};
use crate::{sandbox, service};

const SERVICE: u32 = 0;
/// How often it is looked for what hangs, while something is done apart; and how long one end may hold up the other.
const SWEEP: Duration = Duration::from_millis(250);
const HELD_UP_MOST: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_millis(5);
/// Pairs that are taken from the service at a time.
const PAIRS_AT_ONCE: usize = 64;

/// One end's lifeline.
struct Line {
    fd: OwnedFd,
    pair: u64,
    end: usize,
}

struct Held {
    from: [From; 2],
    ring_bytes: u64,
    /// By its token, until it is gone.
    lines: [Option<u32>; 2],
    joined: [bool; 2],
    link: Option<usize>,
    held_up: Option<Moment>,
    /// It is broken: each lifeline is closed behind the byte that is being put on its end's connection.
    ringing: [Option<Doing>; 2],
    broken: bool,
}

struct Carrier {
    /// Until it has gone.
    service: Option<OwnedFd>,
    adapter: Adapter<Ends>,
    /// By which programs tell it from others.
    name: u64,
    apart: Arc<Apart>,
    room: Room,
    /// Bytes that the pairs take, at most.
    taken: u64,
    pairs: HashMap<u64, Held>,
    lines: HashMap<u32, Line>,
    next: u32,
    /// What is to be said to the service.
    said: VecDeque<Word>,
    clock: Arc<Clock>,
    swept: Moment,
}

/// Carries what the service at the other end of standard input hands over. When that has gone, it goes on until nothing is left.
pub fn carry() -> anyhow::Result<()> {
    let service = by_whom_it_was_started();
    let mut adapter = Adapter::new()?;
    adapter.watch(&service, SERVICE)?;
    let (apart, room) = (Arc::new(Apart::new()?), Room::found());
    sys::run_briefly();
    sandbox::enter_as_carrier()?;
    let mut carrier = Carrier {
        service: Some(service),
        adapter,
        name: service::random_name(),
        apart,
        room,
        taken: 0,
        pairs: HashMap::new(),
        lines: HashMap::new(),
        next: SERVICE + 1,
        said: VecDeque::new(),
        clock: Arc::new(Clock::new()),
        swept: Moment::ZERO,
    };
    while carrier.service.is_some() || !carrier.pairs.is_empty() {
        carrier.turn()?;
    }
    Ok(())
}

impl Carrier {
    fn turn(&mut self) -> anyhow::Result<()> {
        let (mut ready, mut over) = (Vec::new(), Vec::new());
        let broken = |held: &Held| held.broken;
        let soon = |held: &Held| broken(held) && !held.ringing.iter().flatten().all(Doing::hangs);
        let patience = match self.apart.is_idle() {
            _ if self.pairs.values().any(soon) => SOON,
            true => IDLE,
            false => SWEEP,
        };
        self.adapter.turn(Some(patience), &mut ready, &mut over)?;
        self.clock.waited(patience);
        // (First: the place of a link that is over is another's then.)
        for (at, progress) in over.drain(..) {
            let is = |(_, held): &(&u64, &Held)| held.link == Some(at);
            if let Some(number) = self.pairs.iter().find(is).map(|(number, _)| *number) {
                self.end(number, progress == Progress::Failed);
            }
        }
        for token in ready.drain(..) {
            match token {
                SERVICE => self.hear_service(),
                _ => self.hear(token),
            }
        }
        let broken: Vec<u64> =
            self.pairs.iter().filter(|(_, held)| broken(held)).map(|(number, _)| *number).collect();
        for number in broken {
            self.part(number);
            self.forget_if_over(number);
        }
        if self.clock.since(self.swept) >= SWEEP {
            self.swept = self.clock.now();
            self.sweep(self.swept);
        }
        self.tell();
        Ok(())
    }

    fn hear_service(&mut self) {
        let Some(service) = self.service.as_ref().map(AsRawFd::as_raw_fd) else { return };
        for _ in 0..PAIRS_AT_ONCE {
            let mut bytes = [0; WORD_BYTES];
            match meet::receive(service, &mut bytes) {
                Err(Errno::EAGAIN) => return,
                Ok((len @ 1.., mut fds)) => {
                    let order = serde_json::from_slice(&bytes[..len]).ok();
                    let lines = [fds.take(0), fds.take(1)];
                    // SAFETY: the kernel has just given it to us.
                    let lines = lines.map(|fd| fd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    match (order, lines) {
                        (Some(Order::Carry(pair)), [Some(one), Some(other)]) => {
                            self.begin(pair, [one, other]);
                        }
                        // (No descriptor is free; what has come is closed, and its ends see that.)
                        (Some(Order::Carry(pair)), _) => {
                            self.said.push_back(Word::Over(pair.number))
                        }
                        (Some(Order::Ask), _) => self.said.push_back(Word::Answer),
                        (None, _) => {}
                    }
                }
                _ => {
                    let _ = self.adapter.unwatch(borrowed(service));
                    self.service = None;
                    return;
                }
            }
        }
    }

    fn begin(&mut self, pair: Pair, lines: [OwnedFd; 2]) {
        let Pair { number, ends, ring_bytes } = pair;
        let (lines_of, joined) = ([None; 2], [false; 2]);
        let held = Held {
            from: ends,
            ring_bytes,
            lines: lines_of,
            joined,
            link: None,
            held_up: None,
            ringing: [None, None],
            broken: false,
        };
        // (What it would have done apart would wait behind what hangs.)
        let hangs = self.apart.is_full() || held.from.iter().any(|from| self.apart.hangs(from));
        let is_room = self.room.admits(self.taken, RINGS_OF_A_PAIR, ring_bytes);
        self.taken += connection_bytes(RINGS_OF_A_PAIR, ring_bytes);
        if let Some(before) = self.pairs.insert(number, held) {
            self.taken -= connection_bytes(RINGS_OF_A_PAIR, before.ring_bytes);
        }
        for (end, fd) in lines.into_iter().enumerate() {
            let (token, raw) = (self.next, fd.as_raw_fd());
            self.next = if token == u32::MAX { SERVICE + 1 } else { token + 1 };
            let greeting = Message { kind: GREETING, ring_bytes, ..Message::default() };
            meet::admit_descriptors(raw, true);
            let greeted = !hangs
                && is_room
                && !self.lines.contains_key(&token)
                && meet::send(raw, greeting.frame().as_bytes(), &[]).is_ok()
                && self.adapter.watch(borrowed(raw), token).is_ok();
            if greeted {
                self.lines.insert(token, Line { fd, pair: number, end });
                if let Some(held) = self.pairs.get_mut(&number) {
                    held.lines[end] = Some(token);
                }
            } else if let Some(held) = self.pairs.get(&number) {
                self.apart.close(held.from[end].clone(), vec![fd]);
            }
        }
        if self.pairs.get(&number).is_some_and(|held| held.lines.contains(&None)) {
            self.end(number, true);
        }
    }

    /// A tenant says something, or has gone.
    fn hear(&mut self, token: u32) {
        let Some(line) = self.lines.get(&token) else { return };
        let (number, end, raw) = (line.pair, line.end, line.fd.as_raw_fd());
        let Some(held) = self.pairs.get(&number) else { return };
        let from = held.from[end].clone();
        let mut bytes = [0; ROOM_BYTES];
        let mut said = match meet::take(raw, &mut bytes) {
            Err(Errno::EAGAIN) => return,
            Ok(said) if said.caller.is_some() && !said.fds.truncated => said,
            _ => return self.gone(token),
        };
        let mut shown = service::shown_in(&mut said);
        match held.link {
            // It rings.
            Some(link) if held.joined[end] => self.adapter.rouse(link),
            None if held.joined[end] => self.gone(token),
            _ => {
                // (What is not taken stays with the others, which are closed apart.)
                let joined = Message::read(&bytes[..said.len]).ok().and_then(|asked| {
                    let brought = Brought::of(&mut shown, asked.bell)?;
                    self.join(number, end, asked, brought, raw)
                });
                if joined.is_none() {
                    self.end(number, true);
                }
            }
        }
        if !shown.is_empty() {
            self.apart.close(from, shown);
        }
    }

    /// An end brings its connection, and gets its segment.
    fn join(
        &mut self,
        number: u64,
        end: usize,
        asked: Message,
        brought: Brought,
        line: i32,
    ) -> Option<()> {
        let held = self.pairs.get_mut(&number)?;
        let from = held.from[end].clone();
        let link = match (asked.kind, end, held.link) {
            (LINK, 1, None) => {
                let with = (&self.apart, &self.clock);
                make(held, &mut self.adapter, with, asked.ring_bytes)
            }
            (JOIN, 0, link) => link,
            _ => None,
        };
        let found = link.and_then(|link| {
            let ends = self.adapter.bells(link)?;
            let geometry = ends.memory[end].segment().geometry;
            (geometry.ring_bytes as u64 == asked.ring_bytes).then_some((link, ends))
        });
        let Some((link, ends)) = found else {
            self.apart.close(from, brought.all());
            return None;
        };
        ends.ends[end].come(brought);
        (held.link, held.joined[end]) = (Some(link), true);
        meet::admit_descriptors(line, false);
        let (ring_bytes, process) = (asked.ring_bytes, self.name);
        let linked = Message { kind: LINKED, ring_bytes, process, ..Message::default() };
        // (Who does not get it goes, and that is heard.)
        let _ = meet::send(line, linked.frame().as_bytes(), &[ends.memory[end].memfd]);
        Some(())
    }

    /// The last process of an end has gone, or it says what it should not.
    fn gone(&mut self, token: u32) {
        let Some(Line { pair: number, end, .. }) = self.lines.get(&token) else { return };
        let (number, end) = (*number, *end);
        self.close(token);
        let Some(held) = self.pairs.get_mut(&number) else { return };
        held.lines[end] = None;
        if end == 0 {
            self.said.push_back(Word::Gone(number));
        }
        let (joined, all) = (held.joined, held.lines == [None; 2]);
        match held.link {
            // (One whose peer was never to come sends by the kernel alone.)
            Some(link) if joined[end] => {
                if let Some(ends) = self.adapter.bells(link) {
                    ends.ends[end].gone = true;
                }
                self.adapter.gone(link, end);
                if !joined[1 - end] {
                    self.adapter.gone(link, 1 - end);
                }
            }
            Some(_) => {}
            // Without a link the other one waits for nothing; behind one it goes in time.
            None if all || !joined.contains(&true) => self.end(number, true),
            None => {}
        }
    }

    fn close(&mut self, token: u32) {
        let Some(line) = self.lines.remove(&token) else { return };
        let _ = self.adapter.unwatch(borrowed(line.fd.as_raw_fd()));
        if let Some(held) = self.pairs.get(&line.pair) {
            // (Before Linux 6.16 there may be anything in its queue.)
            self.apart.close(held.from[line.end].clone(), vec![line.fd]);
        }
    }

    /// Its link is over; or, if it is broken, can't go on: to its ends it is so as if we had died.
    fn end(&mut self, number: u64, broken: bool) {
        let Some(held) = self.pairs.get_mut(&number) else { return };
        if let Some(ends) = held.link.take().and_then(|link| self.adapter.remove(link)) {
            held.ringing = [0, 1].map(|end: usize| ends.ends[end].ringing());
        }
        if broken {
            held.broken = true;
            self.part(number);
        }
        self.forget_if_over(number);
    }

    /// Lets go of each lifeline of a pair whose link is broken, when we put nothing on its end's connection any more. (An end by whose fault that takes
    /// long holds up itself.)
    fn part(&mut self, number: u64) {
        for end in 0..2 {
            let Some(held) = self.pairs.get_mut(&number) else { return };
            let rings = held.ringing[end].as_ref().is_some_and(|ringing| !ringing.give_up());
            let line = if rings { None } else { held.lines[end].take() };
            line.into_iter().for_each(|token| self.close(token));
        }
    }

    fn forget_if_over(&mut self, number: u64) {
        let over = |held: &Held| held.link.is_none() && held.lines == [None; 2];
        if self.pairs.get(&number).is_some_and(over) {
            if let Some(held) = self.pairs.remove(&number) {
                self.taken -= connection_bytes(RINGS_OF_A_PAIR, held.ring_bytes);
            }
            self.said.push_back(Word::Over(number));
        }
    }

    /// Gives up what hangs.
    fn sweep(&mut self, now: Moment) {
        let Carrier { adapter, pairs, .. } = self;
        let mut hang = Vec::new();
        for (number, held) in pairs {
            let Some(link) = held.link else { continue };
            held.held_up = adapter.is_held_up(link).then(|| held.held_up.unwrap_or(now));
            let held_up = held.held_up.is_some_and(|since| now - since > HELD_UP_MOST);
            if held_up || adapter.bells(link).is_some_and(|ends| ends.hangs()) {
                hang.push(*number);
            }
        }
        hang.into_iter().for_each(|number| self.end(number, true));
    }

    fn tell(&mut self) {
        while let (Some(service), Some(word)) = (&self.service, self.said.front()) {
            let Ok(bytes) = serde_json::to_vec(word) else { return };
            if meet::send(service.as_raw_fd(), &bytes, &[]).is_err() {
                return;
            }
            self.said.pop_front();
        }
        if self.service.is_none() {
            self.said.clear();
        }
    }
}

/// The link of a pair, with memory of its own for each end.
fn make(
    held: &Held,
    adapter: &mut Adapter<Ends>,
    with: (&Arc<Apart>, &Arc<Clock>),
    ring_bytes: u64,
) -> Option<usize> {
    let bytes = usize::try_from(ring_bytes).ok().filter(|_| ring_bytes <= held.ring_bytes)?;
    let geometry = Geometry::new(bytes)?;
    let memory = [Memory::make(geometry)?, Memory::make(geometry)?];
    let segments = [0, 1].map(|end: usize| memory[end].segment());
    // SAFETY: made just now, ours alone.
    let eventfd = unsafe { OwnedFd::from_raw_fd(fd::eventfd().ok()?) };
    let ends = Ends::new(held.from.clone(), memory, eventfd, with);
    adapter.add(Link::new(None, segments), ends).ok()
}

/// A number of ours, for a call.
fn borrowed(fd: i32) -> BorrowedFd<'static> {
    // SAFETY: its owner closes it after the call.
    unsafe { BorrowedFd::borrow_raw(fd) }
}
