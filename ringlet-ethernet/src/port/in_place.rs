//! For programs that are ports themselves: messages written where their receiver reads them, and looked at where they came; and a descriptor for
//! those that wait for other things, too.
//!
//! ```no_run
//! # use ringlet_ethernet::{Mac, Options, Port, Room, frame::HEADER_BYTES, room};
//! # fn main() -> anyhow::Result<()> {
//! let room = Room::open(&room::base(), "blue")?;
//! let mac = Mac([2, 0, 0, 0, 0, 9]);
//! let (port, mut queues) = Port::open(room, Options::new("stack", mac), |_| ())?;
//! let queue = &mut queues[0];
//! while !queue.is_over() {
//!     queue.begin();
//!     let mut requests = Vec::new();
//!     queue.receive(64, |arrived| Ok(requests.push(arrived.head.source())));
//!     for to in &requests {
//!         let frame = [&to.0[..], &mac.0, &[0x88, 0xb5], b"answer"].concat();
//!         if let Ok(mut place) = queue.reserve(*to, HEADER_BYTES + frame.len()) {
//!             place.write(HEADER_BYTES, &frame);
//!             let _ = place.send();
//!         }
//!     }
//!     if requests.is_empty() {
//!         queue.wait(50, || false)?;
//!     }
//! }
//! # Ok(()) }
//! ```

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::frame::HEADER_BYTES;

/// So many places between two looks at the clock and at what the keeper says.
const PLACES_PER_LOOK: u32 = 64;

/// Why there is no place for a message now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Nobody else is there who could have this address.
    NoPort,
    /// The queue of the port that has it is full; `wait` and `arm` wait for room there.
    Full,
    /// A message is of `HEAD_BYTES` to `MESSAGE_MOST` bytes.
    Length,
}

/// Where a message lies that is reserved.
pub(super) enum At {
    Strand { lane: usize, place: Reserved, room: usize },
    Ours,
}

/// Room for a message. Forgotten, nothing is sent.
pub struct Place<'a> {
    queue: &'a mut Queue,
    at: *mut u8,
    len: usize,
}

impl Place<'_> {
    /// Writes bytes of the message; the first `HEADER_BYTES` are its header, and 0 if they are not written. Panics when there is no room for them.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at);
        // SAFETY: within the room of `len` bytes, which is there while the queue is borrowed. Another port may write there too: bytes are copied raw.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.add(at), bytes.len());
        }
    }

    /// All `len` bytes. What is written there its receiver, if there is one only, may read at once, and change.
    pub fn pointer(&self) -> *mut u8 {
        self.at
    }

    /// Sends all of it.
    pub fn send(self) -> Result<(), Refused> {
        let len = self.len;
        self.queue.send_place(len)
    }

    /// Sends all of it; but its receiver may see it, and is woken, if it sleeps, by `Queue::flush` only, or by what waits, receives, or begins: for one
    /// of several.
    /// (What is for several ports goes at once.)
    pub fn send_quietly(self) -> Result<(), Refused> {
        let len = self.len;
        self.queue.send_place_quietly(len)
    }

    /// It stays reserved, until the next one is, or `Queue::send_place`.
    pub fn keep(self) -> *mut u8 {
        self.at
    }
}

impl AsFd for Queue {
    /// Readable behind `arm` when there is something. (Nobody reads from it.)
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Queue {
    /// Room for a message of `len` bytes to this address: where the port that has it will read it; or, if it is for several, in memory of ours,
    /// from which it is copied. What was reserved before is forgotten.
    pub fn reserve(&mut self, to: Mac, len: usize) -> Result<Place<'_>, Refused> {
        if !(HEAD_BYTES..=MESSAGE_MOST).contains(&len) {
            return Err(Refused::Length);
        }
        self.places = self.places.wrapping_add(1);
        let has_changed = self.cache.changes != self.shared.changes.load(Ordering::Relaxed);
        if has_changed || self.has_orders() || self.places.is_multiple_of(PLACES_PER_LOOK) {
            self.begin();
        }
        self.reserved = None;
        let (reserved, at) = match self.lane_of(to)? {
            Some(lane) => {
                let (place, at) = self.room_in(lane, len).ok_or(Refused::Full)?;
                (At::Strand { lane, place, room: len }, at)
            }
            None => {
                self.copied.resize(len, 0);
                (At::Ours, self.copied.as_mut_ptr())
            }
        };
        self.reserved = Some(reserved);
        let mut place = Place { queue: self, at, len };
        place.write(0, &[0; HEADER_BYTES]);
        Ok(place)
    }

    /// The one port that is to get what goes to this address; `None`: all of them.
    pub(super) fn lane_of(&mut self, to: Mac) -> Result<Option<usize>, Refused> {
        match self.alone() {
            Some(lane) => Ok(Some(lane)),
            None if self.out.is_empty() => Err(Refused::NoPort),
            None if to.is_multicast() => Ok(None),
            None => match self.find(to) {
                Some(key) => {
                    let lane = self.out.get(&key).copied().ok_or(Refused::NoPort)?;
                    self.note_receiver(Some(lane));
                    Ok(Some(lane))
                }
                None => Ok(None),
            },
        }
    }

    /// Writes the header of what is reserved, in place of zeros.
    pub fn write_header(&mut self, header: &[u8; HEADER_BYTES]) {
        match &self.reserved {
            Some(At::Strand { lane, place, .. }) => {
                self.lanes[*lane].iter().for_each(|lane| lane.strand.write(place, header));
            }
            Some(At::Ours) => self.copied[..HEADER_BYTES].copy_from_slice(header),
            None => {}
        }
    }

    /// Sends the first `len` bytes of what is reserved. `NoPort`: who was to get it has gone. `Full`: it was for several, and nobody took it.
    pub fn send_place(&mut self, len: usize) -> Result<(), Refused> {
        self.send_place_quietly(len)?;
        self.flush();
        Ok(())
    }

    /// As `send_place`; but the receiver may not see it yet, and is not woken.
    pub fn send_place_quietly(&mut self, len: usize) -> Result<(), Refused> {
        match self.reserved.take() {
            Some(At::Strand { lane, place, room }) if (HEAD_BYTES..=room).contains(&len) => {
                if self.unrung != Some(lane) {
                    self.flush();
                }
                self.send_reserved_quietly(lane, place, len);
                self.unrung = Some(lane);
                Ok(())
            }
            Some(At::Ours) if (HEAD_BYTES..=self.copied.len()).contains(&len) => {
                let copied = std::mem::take(&mut self.copied);
                let sent = self.send_copy(&copied[..len]);
                self.copied = copied;
                if sent { Ok(()) } else { Err(Refused::Full) }
            }
            Some(_) => Err(Refused::Length),
            None => Err(Refused::NoPort),
        }
    }

    /// Shows what was sent quietly, and wakes whom that is for, if it sleeps.
    pub fn flush(&mut self) {
        let lane = self.unrung.take().and_then(|at| self.lanes[at].as_ref());
        if let Some(rang) = lane.map(|lane| lane.strand.look_after()) {
            add(&self.counters().rang, u64::from(rang));
        }
    }

    fn send_reserved_quietly(&self, at: usize, place: Reserved, len: usize) {
        let Some(lane) = &self.lanes[at] else { return };
        lane.strand.commit_quietly(place, len);
        add(&lane.traffic.sent, 1);
        self.sent(len);
    }

    /// Was there no room, and is there none yet?
    pub fn is_waiting(&self) -> bool {
        self.full.is_some() && !self.has_room()
    }

    /// Room that there was not is not waited for: the message was dropped, and counts as such.
    pub fn give_up(&mut self) {
        self.cut_wait();
        if let Some(lane) = self.full.take().and_then(|at| self.lanes[at].as_ref()) {
            add(&lane.traffic.full, 1);
        }
    }

    /// As `receive`; but what came stays where it lies, and takes room, until `release`, or anything that waits or receives.
    pub fn hold(&mut self, most: usize, take: impl FnMut(&Arrived) -> Result<(), Dropped>) -> bool {
        self.release();
        self.take(most, true, take)
    }

    /// Gives back all that is held.
    pub fn release(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let (mut messages, mut rang) = (self.held.drain(..), 0);
        for (strand, count) in self.holds.drain(..) {
            for message in messages.by_ref().take(count) {
                rang += u64::from(strand.release(message));
            }
        }
        drop(messages);
        add(&self.counters().rang, rang);
    }

    pub(super) fn hold_back(&mut self, strand: &Arc<Strand>, message: Message) {
        self.held.push(message);
        match self.holds.last_mut() {
            Some((last, count)) if Arc::ptr_eq(last, strand) => *count += 1,
            _ => self.holds.push((Arc::clone(strand), 1)),
        }
    }

    /// Asks to be told: true if there is something now; else the descriptor becomes readable when there is. Who has waited for it goes on with
    /// `begin`.
    pub fn arm(&mut self) -> bool {
        self.arm_for(true)
    }

    /// As `arm`, for room and for what the keeper says alone, by who can't take messages now.
    pub fn arm_for_room(&mut self) -> bool {
        self.arm_for(false)
    }

    fn arm_for(&mut self, data: bool) -> bool {
        self.release();
        self.is_armed = true;
        let has_something = self.wish(data) || self.is_over();
        add(&self.counters().slept, u64::from(!has_something));
        has_something
    }

    /// Watches, for so long at most, until there is something, or `more` says so. Without `data`: until there is room.
    pub fn watch(&self, watch_us: u64, data: bool, mut more: impl FnMut() -> bool) -> bool {
        spin::watch(
            watch_us,
            || None,
            || more() || self.has_room() || self.has_orders() || data && self.is_ready(),
        )
    }

    /// As `wait`, for so long at most, or until a signal. False: nothing came in all that time.
    pub fn wait_for(&mut self, watch_us: u64, timeout: Option<Duration>) -> Result<bool> {
        self.release();
        if self.watch(watch_us, true, || self.is_over()) || self.arm() {
            return Ok(true);
        }
        let timeout = timeout.map(Timespec::try_from).transpose()?;
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], timeout.as_ref()) {
            Ok(count) => Ok(count > 0),
            // (Its program may have something to do.)
            Err(Errno::INTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

impl Arrived<'_> {
    /// Where all of the message lies, for `len` bytes. Its sender may change it at any time, so it is not what `head` says any more, it may be: read
    /// each byte once.
    pub fn pointer(&self) -> *const u8 {
        self.at
    }
}
