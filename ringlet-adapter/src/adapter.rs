//! One thread for many that are to be served: links, and what else crosses with them.

use crate::link::{Bells, Link, Progress};
use ringlet::waiting::spin;
use ringlet_linux::{fd, sys};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A link with nothing to do, while others have, is passed over so often before it is armed, and rings.
const IDLE_PASSES: u32 = 2000;
/// Where none has, they are passed over for so long at most; how long pays is known of the waits lately, and who else wants the processor goes first.
const WATCH_US: u64 = 500;
/// Before that the processor is offered to others, for so long at most, less where looks make system calls: those that are served may need it, and a
/// yield costs less than a sleep and its wake-up.
const OFFER: Duration = Duration::from_micros(150);
const OFFER_DEAR: Duration = Duration::from_micros(60);
/// A yield that took longer lost a slice to somebody else, who goes on wanting it; a sleeper is let in before him. What the yields that found something
/// have saved pays for it, each a sleep and its wake-up; where it does not, nothing is offered for a multiple of the rest.
const LOST: Duration = Duration::from_micros(80);
const SAVED: Duration = Duration::from_micros(10);
const SAVED_MOST: Duration = Duration::from_millis(8);
const LOST_TIMES: u32 = 50;
/// Passes over the busy links between two looks at descriptors, where links that sleep ring; and for how long others may be made to wait so.
const PASSES: u32 = 64;
const PASSES_MOST: Duration = Duration::from_micros(200);
/// After so many that were passed over the clock is looked at.
const CLOCK_PASSES: usize = 16;
/// Who reads does not ring for each record: so a link with something unread is looked at again, after times that grow.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
const LOOK_AGAIN_MOST: Duration = Duration::from_millis(50);
const EVENTS: usize = 64;
/// Tokens of descriptors that are not ours are below this one.
const SERVED: u64 = 1 << 32;

/// What an adapter serves.
pub trait Serve {
    /// Does what there is to do, within bounds. `rouse`: others that there is something for, by their numbers.
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress;
    /// Its descriptors get readable when there is something to do, from now on. It is passed over once more afterwards. False: not yet.
    fn arm(&mut self) -> bool;
    /// It is passed over again anyway.
    fn disarm(&mut self);
    /// It is to be passed over again after a while, though nothing tells of it.
    fn is_owed(&self) -> bool;
    /// That while is over: what waited for something with which it would go waits no more.
    fn overdue(&mut self) {}
    /// Does a pass that finds nothing make system calls? Then it is armed without a watch, behind a shorter offer of the processor.
    fn is_dear(&self) -> bool {
        false
    }
    /// Tells what to sleep on; only edges count.
    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>));
}

impl<S: Serve + ?Sized> Serve for Box<S> {
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress {
        (**self).pass(rouse)
    }
    fn arm(&mut self) -> bool {
        (**self).arm()
    }
    fn disarm(&mut self) {
        (**self).disarm();
    }
    fn is_owed(&self) -> bool {
        (**self).is_owed()
    }
    fn overdue(&mut self) {
        (**self).overdue();
    }
    fn is_dear(&self) -> bool {
        (**self).is_dear()
    }
    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        (**self).descriptors(tell);
    }
}

/// Rings of one link's programs, and what they ring to wake it: an eventfd, of this link's alone.
pub trait Wakes: Bells {
    fn eventfd(&self) -> BorrowedFd<'_>;
}

/// A link whose two programs are here.
pub struct Both<B> {
    pub link: Link,
    pub bells: B,
}

impl<B: Wakes> Serve for Both<B> {
    fn pass(&mut self, _rouse: &mut Vec<usize>) -> Progress {
        self.link.pass(&mut self.bells)
    }
    fn arm(&mut self) -> bool {
        self.link.arm();
        true
    }
    fn disarm(&mut self) {
        self.link.disarm();
    }
    fn is_owed(&self) -> bool {
        self.link.is_owed()
    }
    fn overdue(&mut self) {
        self.link.overdue();
    }
    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        tell(self.bells.eventfd());
    }
}

/// Serves links whose two programs are here.
pub type Adapter<B> = Server<Both<B>>;

struct Served<S> {
    it: S,
    idle: u32,
    /// It is armed.
    sleeps: bool,
    /// There was something to do behind its last arming.
    finds: bool,
    look_again: Option<(Instant, Duration)>,
}

/// Serves whatever there is.
pub struct Server<S> {
    epoll: OwnedFd,
    all: Vec<Option<Served<S>>>,
    /// Those that are not armed.
    busy: Vec<usize>,
    /// Those that are, and are to be looked at again without a ring.
    dozing: BTreeSet<(Instant, usize)>,
    roused: Vec<usize>,
    /// Something, since the last watch.
    passed_on: bool,
    offers_from: Instant,
    saved: Duration,
}

impl<B: Wakes> Server<Both<B>> {
    /// Its number.
    pub fn add(&mut self, link: Link, bells: B) -> io::Result<usize> {
        self.serve(Both { link, bells })
    }

    pub fn remove(&mut self, at: usize) -> Option<B> {
        self.leave(at).map(|both| both.bells)
    }

    pub fn bells(&mut self, at: usize) -> Option<&mut B> {
        self.get(at).map(|both| &mut both.bells)
    }

    /// Is an end held up by the other one's process (`Link::is_held_up`)?
    pub fn is_held_up(&self, at: usize) -> bool {
        let served = self.all.get(at).and_then(Option::as_ref);
        served.is_some_and(|served| served.it.link.is_held_up())
    }

    /// The process of this end is gone.
    pub fn gone(&mut self, at: usize, end: usize) {
        if let Some(both) = self.get(at) {
            both.link.gone(end);
            self.wake(at, 0);
        }
    }
}

impl<S: Serve> Server<S> {
    pub fn new() -> io::Result<Server<S>> {
        watch_the_crowd();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Server {
            epoll,
            all: Vec::new(),
            busy: Vec::new(),
            dozing: BTreeSet::new(),
            roused: Vec::new(),
            passed_on: false,
            offers_from: Instant::now(),
            saved: Duration::ZERO,
        })
    }

    /// Serves it from now on. Its number.
    pub fn serve(&mut self, it: S) -> io::Result<usize> {
        let at = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(SERVED + at as u64);
        let mut added = Ok(());
        it.descriptors(&mut |fd| {
            if added.is_ok() {
                added = epoll::add(&self.epoll, fd, data, flags);
            }
        });
        if let Err(error) = added {
            self.forget(&it);
            return Err(error);
        }
        let served = Served { it, idle: 0, sleeps: false, finds: false, look_again: None };
        match self.all.get_mut(at) {
            Some(place) => *place = Some(served),
            None => self.all.push(Some(served)),
        }
        self.busy.push(at);
        Ok(at)
    }

    /// Serves it no more.
    pub fn leave(&mut self, at: usize) -> Option<S> {
        self.busy.retain(|busy| *busy != at);
        let mut served = self.all.get_mut(at)?.take()?;
        if served.sleeps {
            served.it.disarm();
        }
        self.dozing.retain(|(_, dozing)| *dozing != at);
        self.forget(&served.it);
        Some(served.it)
    }

    fn forget(&self, it: &S) {
        it.descriptors(&mut |fd| {
            // (Of which some may not be there.)
            let _ = epoll::delete(&self.epoll, fd);
        });
    }

    pub fn get(&mut self, at: usize) -> Option<&mut S> {
        Some(&mut self.all.get_mut(at)?.as_mut()?.it)
    }

    /// Another descriptor to sleep on, whose `token` (below 2^32) `turn` tells.
    pub fn watch(&mut self, fd: impl AsFd, token: u32) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.into()), epoll::EventFlags::IN)
    }

    pub fn unwatch(&mut self, fd: impl AsFd) -> io::Result<()> {
        epoll::delete(&self.epoll, fd)
    }

    /// Passes over the busy links for a while, or sleeps (no longer than `most`). What came of it: tokens of descriptors that are ready, and links
    /// that have ended or failed, to be removed.
    pub fn turn(
        &mut self,
        most: Option<Duration>,
        ready: &mut Vec<u32>,
        over: &mut Vec<(usize, Progress)>,
    ) -> io::Result<()> {
        let now = Instant::now();
        let patience =
            if self.busy.is_empty() { self.patience(now, most) } else { Some(Duration::ZERO) };
        let found = self.look_at_descriptors(patience, ready)?;
        if found && patience != Some(Duration::ZERO) {
            spin::woken(0);
        }
        let began = Instant::now();
        self.look_again(began);
        let (mut passed, mut quiet) = (0, false);
        for _ in 0..PASSES {
            quiet = self.pass(over);
            if quiet {
                break;
            }
            // (A look at the clock costs as much as what has nothing to do.)
            passed += self.busy.len();
            if passed >= CLOCK_PASSES {
                passed = 0;
                if began.elapsed() > PASSES_MOST {
                    break;
                }
            }
        }
        let quiet = quiet && !self.busy.is_empty() && over.is_empty() && ready.is_empty();
        if quiet && !self.spin(over) && !self.sleep() && !self.busy.is_empty() {
            // These can't be armed yet, which may be for others to change.
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Nobody has anything to do: passes over the busy links, as long as that pays. False if that was in vain, or does not.
    fn spin(&mut self, over: &mut Vec<(usize, Progress)>) -> bool {
        let dear = |at: &usize| self.all[*at].as_ref().is_some_and(|served| served.it.is_dear());
        let dear = self.busy.iter().any(dear);
        if std::mem::take(&mut self.passed_on) {
            // It may be answered.
            spin::sent();
        }
        if self.offer(if dear { OFFER_DEAR } else { OFFER }, over) {
            return true;
        }
        if dear {
            return false;
        }
        let (links, mut passed) = (self.busy.len(), 0);
        let ready = || {
            passed += links;
            let asks = passed >= PASSES as usize;
            passed = if asks { 0 } else { passed };
            asks && self.rings() || !self.pass(over) || !over.is_empty()
        };
        spin::watch_many(WATCH_US, links, || None, ready)
    }

    /// Offers the processor, and passes over the busy links in between.
    fn offer(&mut self, most: Duration, over: &mut Vec<(usize, Progress)>) -> bool {
        let began = Instant::now();
        let mut now = began;
        while now >= self.offers_from && now - began < most {
            std::thread::yield_now();
            let took = now.elapsed();
            let found = !self.pass(over) || !over.is_empty() || self.rings();
            now = Instant::now();
            if took > LOST {
                let unpaid = took.saturating_sub(self.saved).min(SAVED_MOST);
                self.saved = self.saved.saturating_sub(took);
                self.offers_from = now + LOST_TIMES * unpaid;
            }
            if found {
                self.saved = SAVED_MOST.min(self.saved + SAVED);
                return true;
            }
        }
        false
    }

    /// Is a descriptor readable?
    fn rings(&self) -> bool {
        fd::pending(self.epoll.as_raw_fd(), libc::POLLIN) != 0
    }

    /// All that can be are armed. True if there was something to do then.
    fn sleep(&mut self) -> bool {
        let Server { all, busy, dozing, roused, .. } = self;
        let mut found = false;
        busy.retain(|at| {
            let Some(served) = &mut all[*at] else { return false };
            let sleeps = served.dozes(*at, roused, dozing);
            found |= served.finds;
            !sleeps
        });
        found | self.wake_roused()
    }

    fn patience(&self, now: Instant, most: Option<Duration>) -> Option<Duration> {
        let next = self.dozing.first().map(|(at, _)| at.saturating_duration_since(now));
        [next, most].into_iter().flatten().min()
    }

    fn look_at_descriptors(
        &mut self,
        patience: Option<Duration>,
        ready: &mut Vec<u32>,
    ) -> io::Result<bool> {
        let timeout = patience.map(|time| Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; EVENTS];
        let found = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(found) => found,
            Err(io::Errno::INTR) => 0,
            Err(error) => return Err(error),
        };
        for event in &events[..found] {
            match event.data.u64().checked_sub(SERVED) {
                None => ready.push(event.data.u64() as u32),
                // (Edges: what was rung need not be read.)
                Some(at) => self.wake(at as usize, 0),
            }
        }
        Ok(found > 0)
    }

    fn look_again(&mut self, now: Instant) {
        while let Some(&(due, at)) = self.dozing.first()
            && due <= now
        {
            self.dozing.pop_first();
            self.wake(at, IDLE_PASSES);
            if let Some(served) = self.all.get_mut(at).and_then(Option::as_mut) {
                served.it.overdue();
            }
        }
    }

    /// There is something for it to do, of which its descriptors don't tell.
    pub fn rouse(&mut self, at: usize) {
        self.wake(at, 0);
    }

    fn wake(&mut self, at: usize, idle: u32) {
        if let Some(served) = self.all.get_mut(at).and_then(Option::as_mut) {
            served.idle = idle;
            if served.sleeps {
                served.sleeps = false;
                served.it.disarm();
                if let Some((due, _)) = served.look_again {
                    self.dozing.remove(&(due, at));
                }
                self.busy.push(at);
            }
        }
    }

    /// True if none of them had anything to do.
    fn pass(&mut self, over: &mut Vec<(usize, Progress)>) -> bool {
        let Server { all, busy, dozing, roused, passed_on, .. } = self;
        let mut quiet = true;
        busy.retain(|at| {
            let Some(served) = &mut all[*at] else { return false };
            match served.it.pass(roused) {
                Progress::Busy => {
                    (served.idle, served.look_again) = (0, None);
                    (quiet, *passed_on) = (false, true);
                    true
                }
                Progress::Idle if served.idle < IDLE_PASSES => {
                    served.idle += 1;
                    true
                }
                Progress::Idle => {
                    let sleeps = served.dozes(*at, roused, dozing);
                    quiet &= !served.finds;
                    !sleeps
                }
                ended => {
                    over.push((*at, ended));
                    false
                }
            }
        });
        quiet & !self.wake_roused()
    }

    /// Were there any?
    fn wake_roused(&mut self) -> bool {
        let mut roused = std::mem::take(&mut self.roused);
        let any = !roused.is_empty();
        roused.drain(..).for_each(|at| self.wake(at, 0));
        self.roused = roused;
        any
    }
}

/// Watching gives way where others want the processors. What that is told by is opened before a process closes itself in.
pub fn watch_the_crowd() {
    static LOAD: OnceLock<Option<i32>> = OnceLock::new();
    LOAD.get_or_init(|| sys::open_load().ok());
    sys::processors();
    sys::has_quota();
    let load = || *LOAD.get().unwrap_or(&None);
    spin::start(spin::Outside { load, tell: |_, _, _| {}, for_latency: false });
}

impl<S: Serve> Served<S> {
    /// It sleeps, and is looked at again if it is owed something.
    fn dozes(
        &mut self,
        at: usize,
        rouse: &mut Vec<usize>,
        dozing: &mut BTreeSet<(Instant, usize)>,
    ) -> bool {
        let sleeps = self.sleep(rouse);
        if sleeps && let Some((due, _)) = self.look_again {
            dozing.insert((due, at));
        }
        sleeps
    }

    /// It rings from now on. False if there was something to do.
    fn sleep(&mut self, rouse: &mut Vec<usize>) -> bool {
        let armed = self.it.arm();
        self.finds = armed && self.it.pass(rouse) != Progress::Idle;
        if !armed || self.finds {
            (self.idle, self.look_again) = (0, if self.finds { None } else { self.look_again });
            return false;
        }
        self.sleeps = true;
        self.look_again = self.it.is_owed().then(|| {
            let after =
                self.look_again.map_or(LOOK_AGAIN, |(_, last)| (2 * last).min(LOOK_AGAIN_MOST));
            (Instant::now() + after, after)
        });
        true
    }
}
