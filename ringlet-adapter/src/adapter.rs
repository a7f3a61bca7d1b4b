//! One thread for many that are to be served: links, and what else crosses with them.

use crate::link::{Bells, Link, Progress};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// A link with nothing to do is passed over so often before it is armed, and rings.
const IDLE_PASSES: u32 = 2000;
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
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Server {
            epoll,
            all: Vec::new(),
            busy: Vec::new(),
            dozing: BTreeSet::new(),
            roused: Vec::new(),
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
        let served = Served { it, idle: 0, sleeps: false, look_again: None };
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
        let served = self.all.get_mut(at)?.take()?;
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
        self.look_at_descriptors(patience, ready)?;
        let began = Instant::now();
        self.look_again(began);
        let mut passed = 0;
        for _ in 0..PASSES {
            if self.busy.is_empty() {
                break;
            }
            self.pass(over);
            // (A look at the clock costs as much as what has nothing to do.)
            passed += self.busy.len();
            if passed >= CLOCK_PASSES {
                passed = 0;
                if began.elapsed() > PASSES_MOST {
                    break;
                }
            }
        }
        let waits = |at: &usize| self.all[*at].as_ref().is_none_or(|served| served.idle > 0);
        if self.busy.iter().all(waits) {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn patience(&self, now: Instant, most: Option<Duration>) -> Option<Duration> {
        let next = self.dozing.first().map(|(at, _)| at.saturating_duration_since(now));
        [next, most].into_iter().flatten().min()
    }

    fn look_at_descriptors(
        &mut self,
        patience: Option<Duration>,
        ready: &mut Vec<u32>,
    ) -> io::Result<()> {
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
        Ok(())
    }

    fn look_again(&mut self, now: Instant) {
        while let Some(&(due, at)) = self.dozing.first()
            && due <= now
        {
            self.dozing.pop_first();
            self.wake(at, IDLE_PASSES);
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

    fn pass(&mut self, over: &mut Vec<(usize, Progress)>) {
        let Server { all, busy, dozing, roused, .. } = self;
        let mut quiet = true;
        busy.retain(|at| {
            let Some(served) = &mut all[*at] else { return false };
            match served.it.pass(roused) {
                Progress::Busy => {
                    (served.idle, served.look_again) = (0, None);
                    quiet = false;
                    true
                }
                Progress::Idle if served.idle < IDLE_PASSES => {
                    served.idle += 1;
                    true
                }
                Progress::Idle => {
                    let sleeps = served.sleep(roused);
                    if sleeps && let Some((due, _)) = served.look_again {
                        dozing.insert((due, *at));
                    }
                    !sleeps
                }
                ended => {
                    over.push((*at, ended));
                    false
                }
            }
        });
        let mut roused = std::mem::take(&mut self.roused);
        roused.drain(..).for_each(|at| self.wake(at, 0));
        self.roused = roused;
        if quiet {
            std::hint::spin_loop();
        }
    }
}

impl<S: Serve> Served<S> {
    /// It rings from now on. False if there was something to do.
    fn sleep(&mut self, rouse: &mut Vec<usize>) -> bool {
        if !self.it.arm() || self.it.pass(rouse) != Progress::Idle {
            self.idle = 0;
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
