//! What carries frames between keepers: rails, and one transport to each of them that can be reached.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ringlet_fabric::{Node, Number, Told};
use ringlet_linux::meet;
use ringlet_linux::sys::Errno;
use ringlet_reflect::network::{Arena, Event, Life, Network, Parcel};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use rustix::time::{timerfd_create, timerfd_settime};

use super::frames::{Frames, Insane};
use super::kept::Kept;
use super::{Attempt, Passed, What};
use crate::clock::{Clock, Moment};
use crate::cluster::Session;
use crate::fabric::places::{Opens, Places, close_apart};
use crate::fabric::{
    ANSWER, ASK, BROKEN, DOWN, ENDED, JOINED, LEAVE, LOG, PACKET_BYTES, PASS, PASSED, Pieces,
    RailSettings, TooLong, UP, in_pieces, packet, read,
};

/// How often what has a time is looked at, where something has; and again what the service had no room for.
const SWEEP: Duration = Duration::from_millis(250);
const SOON: Duration = Duration::from_millis(5);
/// A rail on which nothing was acknowledged for so long is given up; one that does not work, or a transport that has failed, is tried again so
/// often.
const SILENT: Duration = Duration::from_secs(1);
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// Who begins anew finds the other end so soon behind its own beginning that it does not join in. WHY less than a half: of two that begin anew by turns,
/// each when the other one has just begun, neither ever found the other one ready.
const JUST_BEGUN: Duration = Duration::from_millis(250);
/// For so long no rail may work before all that is under way is given up.
const DOWN_MOST: Duration = Duration::from_secs(2);
/// Behind the end of its session a way is there for so long: a process whose service has ended bids farewell by it. (Longer than that takes.)
const LINGERS: Duration = Duration::from_secs(4);
/// The service, the bell and the time are looked at in one of so many polls: each costs as much as a frame. (And in the first one behind a sleep.)
const POLLS: u32 = 64;
const PACKETS_AT_ONCE: usize = 64;
/// What may wait for the service.
const WAITING_MOST: usize = 16 << 20;

/// A session of the services', and the transport that belongs to it.
struct Link {
    node: String,
    ours: Attempt,
    theirs: Option<Attempt>,
    open: Option<Open>,
    /// When the last one was opened.
    opened: Option<Moment>,
    pieces: Pieces,
    /// When the session did, whose way lingers.
    ended: Option<Moment>,
}

/// A transport.
struct Open {
    number: Number,
    life: Life,
    /// The keeper knows of it.
    is_up: bool,
    /// Since when none of its rails works.
    down: Option<Moment>,
    /// What was the oldest, and since when.
    oldest: [Option<(usize, u32)>; 2],
    since: Moment,
    /// Why it can't go on.
    failed: Option<String>,
    frames: Frames,
}

pub struct Rails {
    me: Life,
    kept: Kept,
    /// What is kept.
    last: Option<Vec<u8>>,
    service: OwnedFd,
    said: VecDeque<Vec<u8>>,
    said_bytes: usize,
    heard: Vec<u8>,
    node: Node,
    /// (Behind the node, which closes what takes from it.)
    arena: Arc<Arena>,
    places: Places,
    links: HashMap<Session, Link>,
    /// Which session a transport belongs to; and where a node is reached.
    sessions: HashMap<Number, Session>,
    lives: HashMap<Life, Session>,
    /// What the keeper was not told yet.
    changes: VecDeque<(bool, Life)>,
    rails_told: Option<u32>,
    clock: Clock,
    swept: Moment,
    tried: Moment,
    timer: OwnedFd,
    /// What it is set to; and it has rung since.
    wakes: Option<Duration>,
    rang: bool,
    polls: u32,
    /// The service has gone: then nobody needs us, and the keeper goes on for ever.
    is_over: bool,
    /// Called from then on.
    ends: Box<dyn FnMut()>,
}

impl Rails {
    pub fn new(
        service: OwnedFd,
        kept: Kept,
        (run, last): (u64, Option<Vec<u8>>),
        name: String,
        rails: Vec<RailSettings>,
        opens: Opens,
        ends: Box<dyn FnMut()>,
    ) -> anyhow::Result<Rails> {
        let arena = Arena::new()
            .map_err(|status| anyhow::anyhow!("memory of payloads: {}", status.about()))?;
        let me = Life { node: name.clone(), incarnation: run };
        let (places, node) = Places::new(name, rails, opens)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let mut rails = Rails {
            me,
            kept,
            last,
            service,
            said: VecDeque::new(),
            said_bytes: 0,
            heard: Vec::new(),
            node,
            arena,
            places,
            links: HashMap::new(),
            sessions: HashMap::new(),
            lives: HashMap::new(),
            changes: VecDeque::new(),
            rails_told: None,
            clock: Clock::new(),
            swept: Moment::ZERO,
            tried: Moment::ZERO,
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            wakes: None,
            rang: false,
            polls: 0,
            is_over: false,
            ends,
        };
        if rails.places.len() == 0 {
            rails.log("no rails: no provider of libfabric here beats TCP, and none is named");
        }
        rails.open_rails();
        Ok(rails)
    }

    fn say(&mut self, kind: u8, session: Session, body: &[u8]) {
        let packet = packet(kind, session, body);
        self.said_bytes += packet.len();
        self.said.push_back(packet);
    }

    pub fn log(&mut self, text: &str) {
        self.say(LOG, Session::default(), text.as_bytes());
    }

    fn tell_service(&mut self) {
        while let Some(packet) = self.said.pop_front() {
            if meet::send(self.service.as_raw_fd(), &packet, &[]) == Err(Errno::EAGAIN) {
                self.said.push_front(packet);
                // (It is no service that does not read for so long.)
                self.is_over |= self.said_bytes > WAITING_MOST;
                return;
            }
            // (If it has gone, that is heard.)
            self.said_bytes -= packet.len();
        }
    }

    fn hear_service(&mut self) {
        // (Made once: cleared anew for each look it would cost more than that.)
        let mut bytes = std::mem::take(&mut self.heard);
        bytes.resize(PACKET_BYTES, 0);
        for _ in 0..PACKETS_AT_ONCE {
            // (No descriptors come: what does is closed.)
            let len = match meet::receive(self.service.as_raw_fd(), &mut bytes) {
                Err(Errno::EAGAIN) => break,
                Ok((len @ 1.., _)) => len,
                _ => {
                    self.is_over = true;
                    break;
                }
            };
            match read(&bytes[..len]) {
                Some((JOINED, session, node)) => {
                    self.join(session, String::from_utf8_lossy(node).into());
                }
                Some((ENDED, session, _)) => self.end(session),
                Some((PASSED, session, piece)) => self.take_piece(session, piece),
                Some((ASK, session, _)) => self.say(ANSWER, session, &[]),
                Some((LEAVE, ..)) => super::process::leave_in_order(),
                _ => {}
            }
        }
        self.heard = bytes;
    }

    fn join(&mut self, session: Session, node: String) {
        self.part(|link| link.ended.is_some() && link.node == node);
        let ours = Attempt { incarnation: self.me.incarnation, number: 1 };
        let (pieces, ended) = (Pieces::default(), None);
        let link = Link { node, ours, theirs: None, open: None, opened: None, pieces, ended };
        self.links.insert(session, link);
        self.pass(session, What::Hello);
    }

    /// Nothing is agreed upon there any more. What is under way comes, unless the node has another session already.
    fn end(&mut self, session: Session) {
        let Some(link) = self.links.get(&session) else { return };
        let is_up = link.open.as_ref().is_some_and(|open| open.is_up);
        let of_node = self.links.values().filter(|other| other.node == link.node).count();
        if !is_up || of_node > 1 {
            return self.part_from(session);
        }
        let now = self.clock.now();
        self.links.entry(session).and_modify(|link| link.ended = Some(now));
    }

    fn part_from(&mut self, session: Session) {
        self.close(session);
        self.links.remove(&session);
    }

    fn part(&mut self, is_it: impl Fn(&Link) -> bool) {
        let all = self.links.iter().filter(|(_, link)| is_it(link));
        let all: Vec<Session> = all.map(|(session, _)| *session).collect();
        all.into_iter().for_each(|session| self.part_from(session));
    }

    fn pass(&mut self, session: Session, what: What) {
        let Some(link) = self.links.get(&session) else { return };
        let passed = Passed { from: link.ours, to: link.theirs.unwrap_or_default(), what };
        let Ok(message) = serde_json::to_vec(&passed) else { return };
        in_pieces(&message).for_each(|piece| self.say(PASS, session, &piece));
    }

    fn take_piece(&mut self, session: Session, piece: &[u8]) {
        let Some(link) = self.links.get_mut(&session) else { return };
        let message = match link.pieces.take(piece) {
            Ok(None) => return,
            Ok(Some(message)) => serde_json::from_slice::<Passed>(&message).ok(),
            Err(TooLong) => None,
        };
        let Some(Passed { from, to, what }) = message else {
            return self.say(BROKEN, session, b"a message of a keeper's that can't be read");
        };
        match what {
            What::Hello => self.hello(session, from),
            What::Control(control) if to == link.ours && Some(from) == link.theirs => {
                if let Some(open) = &link.open {
                    self.node.control(open.number, control);
                }
            }
            What::Control(_) => {}
        }
    }

    /// Another process is there, or the same one begins anew: what was agreed upon with the one before is over.
    fn hello(&mut self, session: Session, from: Attempt) {
        let Some(link) = self.links.get_mut(&session) else { return };
        if link.theirs.is_some_and(|theirs| theirs >= from) {
            return;
        }
        link.theirs = Some(from);
        // (Who says so again and again has us do it no more often.)
        let late = link.opened.is_none_or(|opened| self.clock.since(opened) >= JUST_BEGUN);
        self.close(session);
        if late {
            // (It may not have heard of us: we were there before it.)
            self.pass(session, What::Hello);
            self.open(session);
        }
    }

    fn open(&mut self, session: Session) {
        let now = self.clock.now();
        let Some(link) = self.links.get_mut(&session) else { return };
        let Some(theirs) = link.theirs else { return };
        link.opened = Some(now);
        let Some(number) = self.node.open() else { return };
        // SAFETY: `close` closes the transport first; and the node, which is the first of both, closes all.
        let frames = match unsafe { Frames::begin(&mut self.node, number, self.arena.clone()) } {
            Ok(frames) => frames,
            Err(error) => return self.log(&format!("no memory for what comes: {error}")),
        };
        let life = Life { node: link.node.clone(), incarnation: theirs.incarnation };
        self.sessions.insert(number, session);
        link.open = Some(Open {
            number,
            life,
            is_up: false,
            down: None,
            oldest: [None; 2],
            since: now,
            failed: None,
            frames,
        });
    }

    /// Once this returns nothing comes from there any more.
    fn close(&mut self, session: Session) {
        let Some(open) = self.links.get_mut(&session).and_then(|link| link.open.take()) else {
            return;
        };
        self.node.close(open.number);
        self.sessions.remove(&open.number);
        if open.is_up {
            self.lives.remove(&open.life);
            self.say(DOWN, session, &[]);
            self.changes.push_back((false, open.life));
        }
    }

    /// It is begun anew in a while.
    fn give_up(&mut self, session: Session, why: &str) {
        let Some(link) = self.links.get_mut(&session) else { return };
        let text = format!("{} is given up: {why}", link.node);
        self.close(session);
        self.log(&text);
    }

    /// Those that are not open, and could be, are begun anew: the other process hears of it.
    fn open_again(&mut self) {
        let now = self.clock.now();
        let waits = |(session, link): (&Session, &mut Link)| {
            let late = link.opened.is_some_and(|opened| now.saturating_sub(opened) >= TRY_AGAIN);
            let waits =
                link.open.is_none() && link.theirs.is_some() && link.ended.is_none() && late;
            waits.then_some(*session)
        };
        let waiting: Vec<Session> = self.links.iter_mut().filter_map(waits).collect();
        for session in waiting {
            if let Some(link) = self.links.get_mut(&session) {
                link.ours.number += 1;
            }
            self.pass(session, What::Hello);
            self.open(session);
        }
    }

    fn open_rails(&mut self) {
        let Rails { places, node, .. } = self;
        places.open(|at| node.is_broken(at));
    }

    fn take_rails(&mut self) {
        let mut said = Vec::new();
        for (at, rail) in self.places.opened(&mut |text| said.push(text.to_owned())) {
            close_apart(self.node.replace(at, rail));
        }
        said.iter().for_each(|text| self.log(text));
    }

    /// Which rails carry to all to whom one does.
    fn active(&mut self) -> u32 {
        let Rails { node, places, links, .. } = self;
        let is_active = |at: &usize| {
            let goes_on = links.values().filter(|link| link.ended.is_none());
            let mut up = goes_on.filter_map(|link| link.open.as_ref()).filter(|it| it.is_up);
            places.is_open(*at)
                && !node.is_broken(*at)
                && up.all(|it| node.transport(it.number).is_up(*at))
        };
        (0..places.len()).filter(is_active).fold(0, |mask, at| mask | 1 << at)
    }

    /// Has nothing a time?
    fn is_quiet(&mut self) -> bool {
        let Rails { node, places, links, .. } = self;
        let rails = places.len();
        let mut all = links.values().filter(|link| link.theirs.is_some());
        (0..rails).all(|at| places.is_open(at) && !node.is_broken(at))
            && all.all(|link| {
                link.ended.is_none()
                    && link.open.as_ref().is_some_and(|open| {
                        let transport = node.transport(open.number);
                        transport.is_idle() && (0..rails).all(|rail| transport.is_up(rail))
                    })
            })
    }

    fn sweep(&mut self) {
        let now = self.clock.now();
        let again = now.saturating_sub(self.tried) >= TRY_AGAIN;
        if again {
            self.tried = now;
            self.open_rails();
            self.open_again();
        }
        self.part(|link| link.ended.is_some_and(|ended| now.saturating_sub(ended) >= LINGERS));
        let (rails, mut broken) = (self.places.len(), Vec::new());
        for (session, link) in &mut self.links {
            let Some(open) = &mut link.open else { continue };
            let transport = self.node.transport(open.number);
            let all_up = (0..rails).all(|rail| transport.is_up(rail));
            let oldest = transport.oldest();
            if again && !all_up {
                self.node.try_again(open.number);
            }
            if oldest != std::mem::replace(&mut open.oldest, oldest) || oldest == [None; 2] {
                open.since = now;
            } else if now.saturating_sub(open.since) > SILENT {
                open.since = now;
                for (rail, _) in oldest.into_iter().flatten() {
                    self.node.give_up(open.number, rail);
                }
            }
            let late = |since: Moment| now.saturating_sub(since) > DOWN_MOST;
            if open.is_up && open.down.is_some_and(late) {
                broken.push(*session);
            }
        }
        broken.into_iter().for_each(|session| self.give_up(session, "no rail works"));
    }

    /// What is not looked at in each poll.
    fn look_around(&mut self) {
        self.polls = 0;
        self.rang = rustix::io::read(&self.timer, &mut [0u8; 8]).is_ok();
        if self.rang {
            self.node.acknowledge();
        }
        self.clock.waited(self.wakes.unwrap_or(SWEEP));
        self.hear_service();
        self.take_rails();
        if self.clock.since(self.swept) >= SWEEP {
            self.swept = self.clock.now();
            self.sweep();
        }
    }

    /// Who is up or down by now, and what of that the keeper has not heard.
    fn tell_changes(&mut self, tell: &mut dyn FnMut(Event<'_>)) -> bool {
        let busy = !self.changes.is_empty();
        for (is_up, life) in self.changes.drain(..) {
            tell(if is_up { Event::Up(life) } else { Event::Down(life) });
        }
        busy
    }

    fn set_timer(&mut self, wakes: Option<Duration>) {
        if self.wakes == wakes {
            return;
        }
        self.wakes = wakes;
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let each = wakes.and_then(|wakes| Timespec::try_from(wakes).ok()).unwrap_or(none);
        let spec = Itimerspec { it_interval: each, it_value: each };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }
}

impl Network for Rails {
    fn note(&mut self, text: &str) {
        self.log(text);
    }

    fn me(&self) -> &Life {
        &self.me
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        Some(&self.arena)
    }

    fn kept(&self) -> Option<Vec<u8>> {
        self.last.clone()
    }

    fn keep(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.kept.keep(bytes)?;
        self.last = Some(bytes.to_vec());
        Ok(())
    }

    fn send(&mut self, to: &Life, frame: &Parcel) -> bool {
        let link = self.lives.get(to).and_then(|session| self.links.get_mut(session));
        let Some(open) = link.and_then(|link| link.open.as_mut()) else { return false };
        open.frames.send(&mut self.node, frame)
    }

    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) -> bool {
        self.polls += 1;
        if self.polls >= POLLS {
            self.look_around();
        }
        if self.is_over {
            (self.ends)();
        }
        let mut busy = self.tell_changes(tell);
        let now = self.clock.now();
        let mut controls = Vec::new();
        let Rails { node, links, sessions, lives, .. } = self;
        let progress = node.poll(&mut |number, told| {
            let Some(session) = sessions.get(&number) else { return };
            let Some(open) = links.get_mut(session).and_then(|link| link.open.as_mut()) else {
                return;
            };
            // (A frame may come before we know that ours would, by which it is up.)
            if matches!(told, Told::Up | Told::Frame(_)) && !open.is_up {
                open.is_up = true;
                lives.insert(open.life.clone(), *session);
                controls.push((*session, None));
                tell(Event::Up(open.life.clone()));
            }
            match told {
                Told::Frame(piece) if open.failed.is_none() => match open.frames.take(piece) {
                    Ok(Some(frame)) => tell(Event::Frame(&open.life, frame)),
                    Ok(None) => {}
                    Err(Insane(why)) => open.failed = Some(why.to_owned()),
                },
                Told::Control(control) => controls.push((*session, Some(control))),
                Told::Up => open.down = None,
                Told::Down => open.down = Some(now),
                Told::Ended(error) => open.failed = Some(error.to_string()),
                // (Memory is the transport's own, as long as it is there.)
                Told::Frame(_) | Told::Withdrawn(_) => {}
            }
        });
        busy |= progress == ringlet_fabric::Progress::Busy;
        for (session, control) in controls {
            match control {
                Some(control) => self.pass(session, What::Control(control)),
                None => self.say(UP, session, &[]),
            }
        }
        let mut failed = Vec::new();
        for (session, link) in &mut self.links {
            let Some(open) = &mut link.open else { continue };
            match open.failed.take() {
                Some(why) => failed.push((*session, why)),
                None => busy |= open.frames.go_on(&mut self.node),
            }
        }
        failed.into_iter().for_each(|(session, why)| self.give_up(session, &why));
        if !self.said.is_empty() {
            self.tell_service();
        }
        if self.polls == 0 {
            let (active, number) = (self.active(), self.places.len() as u32);
            if self.rails_told.replace(active) != Some(active) {
                tell(Event::Rails { active, number });
                busy = true;
            }
        }
        busy | self.tell_changes(tell)
    }

    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        tell(self.service.as_fd());
        tell(self.places.bell());
        tell(self.timer.as_fd());
        self.node.fds().for_each(tell);
    }

    fn may_sleep(&mut self) -> bool {
        if !self.changes.is_empty() || !self.node.may_doze() {
            return false;
        }
        // (Who has slept looks at everything.)
        self.polls = POLLS;
        let wakes = match () {
            () if !self.said.is_empty() || self.node.owes() => Some(SOON),
            () if !self.is_quiet() => Some(SWEEP),
            () => None,
        };
        // (One that rings once too often costs less than one that is set whenever anything comes.)
        let early = self.wakes.is_some_and(|set| wakes.is_none_or(|wakes| set <= wakes));
        if !early || self.rang {
            self.set_timer(wakes);
        }
        true
    }
}
