//! A mailbox: one receiver, and a lane for each of its senders (`ringlet_core::mailbox`).
//!
//! Each lane is a segment of its own, so that a sender can write only to its own. The list of lanes that have something is shared by
//! the senders of one user (who could harm each other anyway); the receiver's interrupt flag can be read by all and written by none.

use super::bell::{Bell, Deadline, Process};
use super::channel::Receives;
use super::segment::{Mapping, make_segment, own};
use super::welcome::{Welcome, accept, open_service};
use super::{Error, Kind, Options, Timeout};
use crate::guarded::Guarded;
use ringlet::waiting::spin;
use ringlet_core::layout::{LANE_MAX_COUNT, LaneGeometry, PAGE_BYTES, Ready};
use ringlet_core::leaving::Leaving;
use ringlet_core::mailbox::Inbox;
use ringlet_core::mapped::{Lane, Mapped};
use ringlet_core::queue::{self, Next, Rx};
use ringlet_core::sync::Ordering;
use ringlet_core::wait;
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{fd, map, meet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A receiver that is always busy looks for new senders this often (in ticks: some 10 to 50 ms), counted at every so many looks.
const LOOK_EVERY_TICKS: u64 = 50_000_000;
const LOOKS_PER_CLOCK: u32 = 64;
const EVENTS_AT_ONCE: usize = 32;
/// The service's mark in the epoll set; lanes have their number, and their senders' processes this bit beside it.
const SERVICE: u64 = u64::MAX;
const PROCESS: u64 = 1 << 32;
/// Where no descriptor is free for one who has come, a receiver that waits looks again after so long.
const LOOK_AGAIN_NS: u64 = 10_000_000;

/// Which sender a message is from: a number that no other sender of this mailbox has or had.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SenderId(pub u64);

struct Entry {
    id: SenderId,
    uid: u32,
    lane: Lane,
    rx: Rx,
    bell: Bell,
    _mapping: Mapping,
}

impl Entry {
    /// A message, or the end.
    fn has_news(&self) -> bool {
        let shut = &self.lane.control().sender.shut;
        self.rx.ready(&self.lane) || shut.load(Ordering::Acquire) != 0 || self.bell.is_gone()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // ORDER: as in `Sender::drop`.
        self.lane.control().close();
        if self.lane.control().room_wish().granted_by_receiver() != 0 {
            self.bell.ring();
        }
    }
}

/// The senders of one user.
struct Circle {
    uid: u32,
    memfd: OwnedFd,
    mapping: Mapping,
}

/// The receiving end.
pub struct Mailbox {
    service: Guarded,
    /// The service and all lanes' sockets.
    set: OwnedFd,
    options: Options,
    geometry: LaneGeometry,
    flag_memfd: OwnedFd,
    flag: Mapping,
    armed: bool,
    circles: Vec<Circle>,
    lanes: Vec<Option<Entry>>,
    /// Whose message was found last.
    current: usize,
    last: SenderId,
    next_id: u64,
    inbox: Inbox,
    looks: u32,
    looked: u64,
}

impl Mailbox {
    /// Opens a mailbox under a name; its senders come by [`connect`](super::connect). Fails with EADDRINUSE when there is a service of
    /// that name in this network namespace.
    pub fn bind(name: &str, options: Options) -> Result<Mailbox, Error> {
        if options.kind != Kind::Mailbox {
            return Err(Error::OtherKind);
        }
        let geometry = options.geometry()?;
        let service = open_service(name)?;
        let set = own(fd::epoll_create()?);
        let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64: SERVICE };
        fd::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, service.as_raw_fd(), Some(event))?;
        let flag_memfd = own(map::sealed_memfd(c"ringlet-native", PAGE_BYTES, 0)?);
        let flag = Mapping(map::map_shared(flag_memfd.as_raw_fd(), PAGE_BYTES, true)?);
        map::seal_readers(flag_memfd.as_raw_fd())?;
        Ok(Mailbox {
            service,
            set,
            options,
            geometry,
            flag_memfd,
            flag,
            armed: false,
            circles: Vec::new(),
            lanes: Vec::new(),
            current: 0,
            last: SenderId(0),
            next_id: 1,
            inbox: Inbox::default(),
            looks: 0,
            looked: 0,
        })
    }

    /// Senders that are connected, or whose last messages are not received yet.
    pub fn senders(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// The next lane that has a message, or whose sender has ended.
    #[inline]
    fn lane_with_news(&mut self) -> Option<usize> {
        let Mailbox { inbox, circles, lanes, .. } = self;
        let bitmaps = circles.iter().map(|circle| circle.mapping.0.at::<Ready>(0));
        inbox.poll(bitmaps, lanes.len(), |lane| lanes[lane].as_ref().is_some_and(Entry::has_news))
    }

    /// The next message. Lanes that have ended, or whose sender wrote what no ringlet writes, go.
    #[inline]
    fn find(&mut self) -> Option<queue::Message> {
        for _ in 0..=self.lanes.len() {
            let lane = self.lane_with_news()?;
            let entry = self.lanes[lane].as_ref()?;
            match entry.rx.peek(&entry.lane) {
                Next::Message(message) => {
                    (self.current, self.last) = (lane, entry.id);
                    return Some(message);
                }
                // The end was seen before the look, so nothing comes after it. A message that came in between is next.
                Next::Empty if entry.rx.ready(&entry.lane) => {}
                Next::Empty | Next::Corrupt => self.remove(lane),
            }
        }
        None
    }

    fn remove(&mut self, lane: usize) {
        let Some(entry) = self.lanes[lane].take() else { return };
        // KERNEL: a child that this process has forked holds both too, so that closing them would leave them in the set.
        for of in [entry.bell.socket(), entry.bell.process().descriptor()] {
            let _ = fd::epoll_ctl(self.set.as_raw_fd(), libc::EPOLL_CTL_DEL, of, None);
        }
        self.leave_circle(entry.uid);
    }

    /// With the last of its senders it goes: its descriptor and mapping are the receiver's.
    fn leave_circle(&mut self, uid: u32) {
        if self.lanes.iter().flatten().all(|entry| entry.uid != uid) {
            self.circles.retain(|circle| circle.uid != uid);
        }
    }

    /// Asks to be woken. True when there is nothing yet: then `descriptor` becomes readable as soon as there is something, or somebody
    /// new (of whom the next call takes care).
    pub fn arm(&mut self) -> bool {
        if !self.armed {
            self.armed = true;
            wait::arm(self.flag.0.at(0));
        }
        if self.lane_with_news().is_none() && self.unannounced().is_none() {
            return true;
        }
        self.disarm();
        false
    }

    /// A lane with a message of which nothing was said: another sender has taken its bit away. Before a sleep each lane is looked at,
    /// since no doorbell need come any more.
    fn unannounced(&mut self) -> Option<usize> {
        let waits = |entry: &Entry| entry.rx.ready(&entry.lane);
        let lane = self.lanes.iter().position(|entry| entry.as_ref().is_some_and(waits))?;
        self.inbox.keep(lane);
        Some(lane)
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            wait::disarm(self.flag.0.at(0));
        }
    }

    /// To wait for messages on, after `arm`. Only ever wait on it.
    pub fn descriptor(&self) -> i32 {
        self.set.as_raw_fd()
    }

    #[inline]
    fn look_now_and_then(&mut self) {
        self.looks = self.looks.wrapping_add(1);
        if self.looks % LOOKS_PER_CLOCK == 1 {
            self.look_if_due();
        }
    }

    #[cold]
    fn look_if_due(&mut self) {
        let now = sys::ticks();
        if now.wrapping_sub(self.looked) > LOOK_EVERY_TICKS {
            self.looked = now;
            let _ = self.answer_events(Some(0));
        }
    }

    /// Waits for a message. (Out of the way of calls that find one.)
    #[cold]
    fn wait(&mut self, deadline: &mut Deadline) -> Result<(), Error> {
        let spin_us = self.options.spin_us;
        if !self.armed && deadline.look_first(spin_us, &mut || self.lane_with_news().is_some()) {
            return Ok(());
        }
        let left = match deadline.left() {
            Err(Error::WouldBlock) if self.armed => {
                // Somebody waits on our descriptor in our place, and has been woken.
                self.disarm();
                self.answer_events(Some(0))?;
                return self.lane_with_news().map(|_| ()).ok_or(Error::WouldBlock);
            }
            left => left?,
        };
        let limit = left.map_or(spin_us, |left| spin_us.min(left / 1000));
        if spin::watch(limit, || None, || self.lane_with_news().is_some()) || !self.arm() {
            return Ok(());
        }
        let answered = self.answer_events(left);
        self.disarm();
        answered
    }

    /// Waits so long for doorbells and new senders, and takes care of them.
    fn answer_events(&mut self, timeout_ns: Option<u64>) -> Result<(), Error> {
        let mut events = [fd::epoll_event { events: 0, u64: 0 }; EVENTS_AT_ONCE];
        let (set, list) = (self.set.as_raw_fd(), events.as_mut_ptr());
        // SAFETY: as many events as are asked for.
        #[allow(unsafe_code)]
        let n = unsafe { fd::epoll_wait(set, list, EVENTS_AT_ONCE, timeout_ns, None)? };
        let mut crowded = false;
        for event in &events[..n] {
            let lane = (event.u64 & !PROCESS) as usize;
            if event.u64 == SERVICE {
                crowded = self.admit_senders() == Err(Error::System(Errno::EMFILE));
            } else if let Some(Some(entry)) = self.lanes.get(lane) {
                // Whoever rings has something for us, or is gone.
                match event.u64 & PROCESS {
                    0 => entry.bell.drain(),
                    _ => entry.bell.give_up(),
                }
                self.inbox.keep(lane);
            }
        }
        // Whoever waits for a descriptor would wake us again at once.
        if crowded && n == 1 && timeout_ns != Some(0) {
            let pause = timeout_ns.map_or(LOOK_AGAIN_NS, |left| left.min(LOOK_AGAIN_NS));
            fd::poll(&mut [], Some(pause), None)?;
        }
        Ok(())
    }

    /// Takes those in who have come. Who can't be served is turned away; for whom no descriptor is free, waits.
    fn admit_senders(&mut self) -> Result<(), Error> {
        loop {
            let made = make_segment(self.geometry.lane_bytes())?;
            // (And of a user who is new here.)
            let spare = [made.0.try_clone(), made.0.try_clone()];
            if spare.iter().any(Result::is_err) {
                return Err(Error::System(Errno::EMFILE));
            }
            let socket = accept(&self.service, self.options.peers)?;
            drop(spare);
            if self.admit(socket, made).is_err()
                && let Some(uid) = self.circles.last().map(|circle| circle.uid)
            {
                // (It may have been made for who was to be admitted.)
                self.leave_circle(uid);
            }
        }
    }

    fn admit(&mut self, socket: Guarded, made: (OwnedFd, Mapping)) -> Result<(), Error> {
        let free = self.lanes.iter().position(Option::is_none);
        let number = free.unwrap_or(self.lanes.len());
        if number >= LANE_MAX_COUNT {
            return Err(Error::Refused);
        }
        let uid = meet::credentials(socket.as_raw_fd())?.uid;
        // Senders of one user share their list; those who only read as the same one could harm each other by it.
        if !self.has_room_for(uid) || meet::is_vague(uid) {
            return Err(Error::Refused);
        }
        let circle = self.circle(uid)?;
        let (memfd, mapping) = made;
        let fds = [&memfd, &self.circles[circle].memfd, &self.flag_memfd].map(AsRawFd::as_raw_fd);
        Welcome::new(&self.options, number as u32).send(&socket, &fds)?;
        drop(memfd);
        // (Where no descriptor is free for it, its socket alone tells of its end.)
        let process = Process::that_connected(&socket).unwrap_or(Process::Unknown);
        let own =
            [(socket.as_raw_fd(), number as u64), (process.descriptor(), number as u64 | PROCESS)];
        for (of, u64) in own.into_iter().filter(|(of, _)| *of >= 0) {
            let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64 };
            fd::epoll_ctl(self.set.as_raw_fd(), libc::EPOLL_CTL_ADD, of, Some(event))?;
        }
        let lane = Lane::new(mapping.0, 0, self.geometry);
        let id = SenderId(self.next_id);
        self.next_id += 1;
        let (rx, bell) = (Rx::default(), Bell::new(socket, process));
        let entry = Entry { id, uid, lane, rx, bell, _mapping: mapping };
        match free {
            Some(number) => self.lanes[number] = Some(entry),
            None => self.lanes.push(Some(entry)),
        }
        Ok(())
    }

    /// Another user gets no more lanes than it leaves to all others, so that none takes them all.
    fn has_room_for(&self, uid: u32) -> bool {
        let held = self.lanes.iter().flatten().filter(|entry| entry.uid == uid).count();
        let free = LANE_MAX_COUNT - self.senders();
        uid == 0 || uid == sys::geteuid() || held < free
    }

    /// The circle of a user, made if it is the first of its senders.
    fn circle(&mut self, uid: u32) -> Result<usize, Error> {
        if let Some(known) = self.circles.iter().position(|circle| circle.uid == uid) {
            return Ok(known);
        }
        let (memfd, mapping) = make_segment(PAGE_BYTES)?;
        self.circles.push(Circle { uid, memfd, mapping });
        Ok(self.circles.len() - 1)
    }

    /// Whose message was received, or peeked at, last.
    pub fn last_sender(&self) -> SenderId {
        self.last
    }

    #[inline]
    fn entry(&self) -> &Entry {
        self.lanes[self.current].as_ref().expect("a message is borrowed from it")
    }
}

/// Messages of all senders, each in its turn. (What was only peeked at need not be what is found next.)
impl Receives for Mailbox {
    #[inline(always)]
    fn peek_raw(&mut self, timeout: Timeout) -> Result<queue::Message, Error> {
        let mut deadline = Deadline::new(timeout);
        loop {
            self.look_now_and_then();
            match self.find() {
                Some(message) => return Ok(message),
                None => self.wait(&mut deadline)?,
            }
        }
    }

    #[inline]
    fn inward(&self) -> &Lane {
        &self.entry().lane
    }

    #[inline(always)]
    fn take_raw(&mut self, message: queue::Message, _: usize) {
        let Entry { rx, lane, bell, .. } = self.entry();
        if rx.release(lane, message) && lane.control().room_wish().granted_by_receiver() != 0 {
            bell.ring();
        }
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::super::connect;
    use super::*;
    use std::time::Duration;

    /// One user after another leaves nothing behind.
    #[test]
    fn a_circle_goes_with_its_last_sender() {
        let name = format!("circle-{}", std::process::id());
        let options = Options::new(Kind::Mailbox);
        let mut mailbox = Mailbox::bind(&name, options).unwrap();
        let comes = || {
            let name = name.clone();
            std::thread::spawn(move || {
                let patience = Some(Duration::from_secs(60));
                connect(&name, options, patience).unwrap().sender().unwrap()
            })
        };
        for _ in 0..3 {
            let came = [comes(), comes()];
            while mailbox.senders() < came.len() {
                mailbox.answer_events(Some(LOOK_AGAIN_NS)).unwrap();
            }
            assert_eq!(mailbox.circles.len(), 1);
            for (left, comer) in came.into_iter().enumerate() {
                drop(comer.join().unwrap());
                while mailbox.senders() > 1 - left {
                    mailbox.answer_events(Some(LOOK_AGAIN_NS)).unwrap();
                    assert!(mailbox.find().is_none());
                }
                assert_eq!(mailbox.circles.len(), 1 - left);
            }
        }
    }
}
