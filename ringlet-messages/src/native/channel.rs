//! A pair of queues between two programs, for bytes or messages.

use super::announcer::Announcer;
use super::bell::{Bell, Deadline, Waiter};
use super::segment::Mapping;
use super::{Error, Kind, Options, Timeout};
use ringlet_core::layout::{LaneGeometry, MESSAGE_MAX_BYTES};
use ringlet_core::leaving::Leaving;
use ringlet_core::mapped::{Lane, Mapped};
use ringlet_core::memory::Area;
use ringlet_core::queue::{self, Next, Refused, Reserved, Rx, Tx};
use ringlet_core::sync::Ordering;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

/// Largest piece of a stream: a long send is cut, so that the receiver reads one piece while the next is written.
const PIECE_BYTES: usize = 16 << 10;

/// A sender whose peer does not sleep, so that nothing is rung, looks after so many messages whether it is time to ask if it lives.
pub(super) const SENDS_PER_CLOCK: u32 = 8;

/// What both halves of a connection share. Each sleeps on a socket of its own, so that neither takes the other's bytes.
pub(super) struct Link {
    /// Wakes whoever waits for data.
    pub data: Bell,
    /// Wakes whoever waits for room; the same socket where only one of the two can be waited for.
    pub room: Option<Bell>,
    pub mapping: Mapping,
    pub side: usize,
    pub spin_us: u64,
}

impl Link {
    pub fn room(&self) -> &Bell {
        self.room.as_ref().unwrap_or(&self.data)
    }

    pub fn lane(&self, geometry: LaneGeometry, number: usize) -> Lane {
        Lane::new(self.mapping.0, number * geometry.lane_bytes(), geometry)
    }
}

/// Both ways of a connection, which can be used by two threads.
pub struct Channel {
    pub sender: Sender,
    pub receiver: Receiver,
}

impl Channel {
    pub(super) fn new(link: Link, geometry: LaneGeometry, options: &Options) -> Channel {
        let ours = link.lane(geometry, link.side);
        let theirs = link.lane(geometry, 1 - link.side);
        let (link, bytes) = (Arc::new(link), options.kind == Kind::Bytes);
        Channel {
            sender: Sender::new(link.clone(), ours, Some(theirs), bytes),
            receiver: Receiver::new(link, ours, theirs, bytes),
        }
    }
}

/// The sending end of a channel or of a mailbox's lane. Dropping it tells the receiver that no more will come.
pub struct Sender {
    link: Arc<Link>,
    lane: Lane,
    /// The way back, if there is one.
    back: Option<Lane>,
    tx: Tx,
    bytes: bool,
    /// What else there is to do after a message was published.
    announce: Option<Announcer>,
    /// Messages since the receiver was last known to be there.
    unheard: u32,
    abandoned: bool,
}

impl Sender {
    fn new(link: Arc<Link>, lane: Lane, back: Option<Lane>, bytes: bool) -> Sender {
        Sender {
            link,
            lane,
            back,
            tx: Tx::default(),
            bytes,
            announce: None,
            unheard: 0,
            abandoned: false,
        }
    }

    pub(super) fn of_mailbox(link: Link, geometry: LaneGeometry, announce: Announcer) -> Sender {
        let lane = link.lane(geometry, 0);
        let mut sender = Sender::new(Arc::new(link), lane, None, false);
        sender.announce = Some(announce);
        sender
    }

    /// Waits for room. (Out of the way of calls that find some.)
    #[cold]
    fn wait(&mut self, deadline: &mut Deadline) -> Result<(), Error> {
        let bell = self.link.room();
        if bell.is_gone() {
            return Err(Error::PeerDied);
        }
        let waiter = Waiter {
            wish: self.lane.control().room_wish(),
            ours: &self.lane,
            theirs: self.back.as_ref(),
            moves: self.link.side == 1,
            spin_us: self.link.spin_us,
        };
        bell.wait(&waiter, deadline, || self.has_room())
    }

    fn has_room(&self) -> bool {
        let closed = !self.lane.control().is_taken();
        self.tx.writable(&self.lane) || closed
    }

    /// Asks to be woken. True when there is no room yet: then `descriptor` becomes readable as soon as there is room for any message.
    pub fn arm(&mut self) -> bool {
        let wish = self.lane.control().room_wish();
        self.link.room().arm(wish, &mut || self.has_room())
    }

    /// To wait for room on, after `arm`. Only ever wait on it.
    pub fn descriptor(&self) -> i32 {
        self.link.room().descriptor()
    }

    /// Behind a message that has rung, or some that have not: is there still somebody to read it?
    #[cold]
    fn heard(&mut self, rang: bool) -> Result<(), Error> {
        self.unheard = 0;
        if !rang {
            self.link.data.look();
        }
        match self.link.data.is_gone() {
            // (One that was awake may have taken it, and gone, before it was rung for.)
            true if self.is_drained() => Ok(()),
            true if self.is_closed() => Err(Error::Closed),
            true => Err(Error::PeerDied),
            false => Ok(()),
        }
    }

    pub(super) fn mapping(&self) -> Area {
        self.link.mapping.0
    }

    pub(super) fn is_alone(&self) -> bool {
        self.link.data.ask();
        self.link.data.is_gone()
    }

    /// Does nobody read any more?
    pub(super) fn is_closed(&self) -> bool {
        !self.lane.control().is_taken()
    }

    /// Goes without telling the receiver, as if this process had died.
    pub(super) fn abandon(mut self) {
        self.abandoned = true;
    }

    /// Has the receiver taken everything?
    pub fn is_drained(&self) -> bool {
        self.tx.drained(&self.lane)
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        let control = self.lane.control();
        // ORDER: a SeqCst swap, as a publish is; pairs with `Receiver::wait`: messages before it are seen with it, and
        // the look at the flag comes after it.
        control.sender.shut.swap(1, Ordering::SeqCst);
        match &self.announce {
            Some(announce) => {
                announce.published(&self.link.data);
            }
            None if control.data_wish().granted_by_sender() != 0 => {
                self.link.data.ring();
            }
            None => {}
        }
    }
}

/// An end that sends.
pub trait Sends {
    /// The longest message, or piece of a stream, that can be reserved.
    fn max_bytes(&self) -> usize;

    /// Room for a message, or a piece of a stream, of up to `len` bytes, to be written in place.
    #[inline]
    fn reserve(&mut self, len: usize, timeout: Timeout) -> Result<Slot<'_, Self>, Error>
    where
        Self: Sized,
    {
        let reserved = self.reserve_raw(len, timeout)?;
        Ok(Slot { reserved, sender: self })
    }

    /// Sends a message, or of a stream as many bytes as go at once; returns how many. It fails as soon as the receiver is known to be gone: if
    /// that has died, what was sent shortly before may be lost.
    #[inline]
    fn send(&mut self, data: &[u8], timeout: Timeout) -> Result<usize, Error> {
        let len = data.len().min(self.piece_bytes());
        let reserved = self.reserve_raw(len, timeout)?;
        // SAFETY: `data` is valid for its length.
        #[allow(unsafe_code)]
        unsafe {
            reserved.write(self.out(), 0, data.as_ptr(), len)
        };
        self.commit_raw(reserved, len)?;
        Ok(len)
    }

    /// What of a send goes as one record: of a message all.
    #[doc(hidden)]
    #[inline]
    fn piece_bytes(&self) -> usize {
        usize::MAX
    }
    // For callers who can't hold a borrow: the C library.
    #[doc(hidden)]
    fn out(&self) -> &Lane;
    #[doc(hidden)]
    fn reserve_raw(&mut self, len: usize, timeout: Timeout) -> Result<Reserved, Error>;
    #[doc(hidden)]
    fn commit_raw(&mut self, reserved: Reserved, len: usize) -> Result<(), Error>;
}

impl Sends for Sender {
    fn max_bytes(&self) -> usize {
        queue::max_bytes(&self.lane)
    }

    #[inline]
    fn piece_bytes(&self) -> usize {
        if self.bytes { PIECE_BYTES.min(self.max_bytes()) } else { usize::MAX }
    }

    #[inline]
    fn out(&self) -> &Lane {
        &self.lane
    }

    #[inline(always)]
    fn reserve_raw(&mut self, len: usize, timeout: Timeout) -> Result<Reserved, Error> {
        let mut deadline = Deadline::new(timeout);
        loop {
            // ORDER: as in `is_taken`; the receiver's end is final, nothing is read by it.
            if !self.lane.control().is_taken() {
                return Err(Error::Closed);
            }
            if self.link.data.is_gone() {
                return Err(Error::PeerDied);
            }
            match self.tx.reserve(&self.lane, len) {
                Err(Refused::Full) => self.wait(&mut deadline)?,
                done => return Ok(done?),
            }
        }
    }

    #[inline(always)]
    fn commit_raw(&mut self, reserved: Reserved, len: usize) -> Result<(), Error> {
        if len == 0 && self.bytes {
            return Ok(());
        }
        self.tx.commit(&self.lane, reserved, len);
        let rang = match &self.announce {
            Some(announce) => announce.published(&self.link.data),
            None => {
                let wished = self.lane.control().data_wish().granted_by_sender() != 0;
                if wished {
                    self.link.data.ring();
                }
                wished
            }
        };
        self.unheard += 1;
        if rang || self.unheard == SENDS_PER_CLOCK {
            return self.heard(rang);
        }
        Ok(())
    }
}

/// A message that is being written where it will be read. Nothing is sent unless it is committed.
pub struct Slot<'a, S: Sends = Sender> {
    pub(super) reserved: Reserved,
    pub(super) sender: &'a mut S,
}

impl<S: Sends> Slot<'_, S> {
    /// The place, as bytes that the peer might change meanwhile. At least as long as was asked for.
    #[inline]
    pub fn bytes(&self) -> &[AtomicU8] {
        atomic_bytes(self.reserved.pointer(self.sender.out()), self.reserved.room())
    }

    /// Copies `data` to byte `at` of the message. Panics when there is no room for it.
    #[inline]
    pub fn write(&mut self, at: usize, data: &[u8]) {
        // SAFETY: `data` is valid for its length.
        #[allow(unsafe_code)]
        unsafe {
            self.reserved.write(self.sender.out(), at, data.as_ptr(), data.len())
        };
    }

    /// Sends the first `len` bytes; fails as `send` does. Panics when so many were not reserved.
    #[inline]
    pub fn commit(self, len: usize) -> Result<(), Error> {
        self.sender.commit_raw(self.reserved, len)
    }
}

/// Shared memory as bytes that may change at any time.
pub(super) fn atomic_bytes<'a>(at: *const u8, len: usize) -> &'a [AtomicU8] {
    // SAFETY: a place in a segment that `Reserved::pointer` and `Message::pointer` answer for, mapped as long as the `Link`, from
    // which the caller's borrow comes. Every bit pattern is an `AtomicU8`; within this process it is reached as such or by raw copies
    // that the queue's ordering keeps apart, and what another process does to it is to us as a device's writes: some value.
    #[allow(unsafe_code)]
    unsafe {
        std::slice::from_raw_parts(at.cast(), len)
    }
}

/// The receiving end of a channel. Dropping it tells the sender that nobody reads any more.
pub struct Receiver {
    link: Arc<Link>,
    lane: Lane,
    back: Lane,
    rx: Rx,
    bytes: bool,
    /// Bytes taken of the record that is next in a stream.
    used: usize,
    corrupt: bool,
    abandoned: bool,
}

impl Receiver {
    fn new(link: Arc<Link>, back: Lane, lane: Lane, bytes: bool) -> Receiver {
        Receiver {
            link,
            lane,
            back,
            rx: Rx::default(),
            bytes,
            used: 0,
            corrupt: false,
            abandoned: false,
        }
    }

    /// Is the peer gone, as the kernel has it now?
    pub(super) fn is_alone(&self) -> bool {
        self.link.data.ask();
        self.link.data.is_gone()
    }

    pub(super) fn abandon(mut self) {
        self.abandoned = true;
    }

    /// Takes the bytes that have rung, of both ways. Who has torn off one of his ends has gone: it would ring for ever.
    pub(super) fn drain(&self) {
        self.link.data.drain();
        self.link.room().drain();
        if self.link.room().is_gone() {
            self.link.data.give_up();
        }
    }

    fn has_news(&self) -> bool {
        let shut = &self.lane.control().sender.shut;
        self.rx.ready(&self.lane) || shut.load(Ordering::Acquire) != 0
    }

    /// What is next. Of a record that was received in part nothing is remembered but how much that was: the peer may have made it shorter.
    #[inline(always)]
    fn look(&self) -> Next {
        match self.rx.peek(&self.lane) {
            Next::Message(message) if self.used != 0 && message.len() <= self.used => Next::Corrupt,
            next => next,
        }
    }

    /// Waits for a message, or tells why there will be none. (Out of the way of calls that find one.)
    #[cold]
    fn wait(&mut self, deadline: &mut Deadline) -> Result<(), Error> {
        let control = self.lane.control();
        // ORDER: Acquire, before the look: what was sent before the end is seen with it (`Sender::drop`).
        let shut = control.sender.shut.load(Ordering::Acquire) != 0;
        let bell = &self.link.data;
        let gone = bell.is_gone();
        let next = self.look();
        self.corrupt |= next == Next::Corrupt;
        match next {
            _ if self.corrupt => Err(Error::PeerCorrupt),
            Next::Empty if shut => Err(Error::Closed),
            Next::Empty if gone => Err(Error::PeerDied),
            Next::Empty => {
                let waiter = Waiter {
                    wish: control.data_wish(),
                    ours: &self.back,
                    theirs: Some(&self.lane),
                    moves: self.link.side == 1,
                    spin_us: self.link.spin_us,
                };
                bell.wait(&waiter, deadline, || self.has_news())
            }
            Next::Message(_) | Next::Corrupt => Ok(()),
        }
    }

    /// Asks to be woken. True when there is nothing yet: then `descriptor` becomes readable as soon as there is something.
    pub fn arm(&mut self) -> bool {
        let wish = self.lane.control().data_wish();
        self.link.data.arm(wish, &mut || self.has_news())
    }

    /// To wait for messages on, after `arm`. Only ever wait on it.
    pub fn descriptor(&self) -> i32 {
        self.link.data.descriptor()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        let control = self.lane.control();
        // ORDER: as in `Sender::drop`.
        control.close();
        if control.room_wish().granted_by_receiver() != 0 {
            self.link.room().ring();
        }
    }
}

impl AsFd for Receiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.data.as_fd()
    }
}

impl AsFd for Sender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.room().as_fd()
    }
}

/// An end that receives.
pub trait Receives {
    /// The next message, or what is next of a stream, left where it is.
    #[inline]
    fn peek(&mut self, timeout: Timeout) -> Result<Message<'_, Self>, Error>
    where
        Self: Sized,
    {
        let message = self.peek_raw(timeout)?;
        Ok(Message { message, receiver: self })
    }

    /// Receives a message into a buffer that must be long enough, or of a stream as many bytes as are there and fit; returns how many.
    #[inline]
    fn receive(&mut self, to: &mut [u8], timeout: Timeout) -> Result<usize, Error> {
        let message = self.peek_raw(timeout)?;
        let (used, len) = (self.used(), message.len() - self.used());
        if len > to.len() && !self.may_cut() {
            return Err(Error::BufferTooSmall);
        }
        let n = len.min(to.len());
        // SAFETY: `to` is valid for `n` bytes.
        #[allow(unsafe_code)]
        unsafe {
            message.read(self.inward(), used, to.as_mut_ptr(), n)
        };
        self.take_raw(message, n);
        Ok(n)
    }

    /// May a record be received in parts?
    #[doc(hidden)]
    #[inline]
    fn may_cut(&self) -> bool {
        false
    }
    /// Bytes of the next record that are taken already.
    #[doc(hidden)]
    #[inline]
    fn used(&self) -> usize {
        0
    }
    // For callers who can't hold a borrow: the C library.
    #[doc(hidden)]
    fn peek_raw(&mut self, timeout: Timeout) -> Result<queue::Message, Error>;
    /// Where the message that was found last lies.
    #[doc(hidden)]
    fn inward(&self) -> &Lane;
    /// Done with the first `n` bytes.
    #[doc(hidden)]
    fn take_raw(&mut self, message: queue::Message, n: usize);
}

impl Receives for Receiver {
    #[inline(always)]
    fn peek_raw(&mut self, timeout: Timeout) -> Result<queue::Message, Error> {
        let mut deadline = Deadline::new(timeout);
        loop {
            match self.look() {
                Next::Message(message) if !self.corrupt => return Ok(message),
                _ => self.wait(&mut deadline)?,
            }
        }
    }

    #[inline]
    fn inward(&self) -> &Lane {
        &self.lane
    }

    #[inline]
    fn may_cut(&self) -> bool {
        self.bytes
    }

    #[inline]
    fn used(&self) -> usize {
        self.used
    }

    #[inline(always)]
    fn take_raw(&mut self, message: queue::Message, n: usize) {
        if self.bytes && self.used + n < message.len() {
            self.used += n;
            return;
        }
        self.used = 0;
        if self.rx.release(&self.lane, message)
            && self.lane.control().room_wish().granted_by_receiver() != 0
        {
            self.link.room().ring();
        }
    }
}

/// A received message, or the next bytes of a stream, where it lies. It is there again at the next look unless it is released.
pub struct Message<'a, R: Receives = Receiver> {
    pub(super) message: queue::Message,
    pub(super) receiver: &'a mut R,
}

impl<R: Receives> Message<'_, R> {
    #[inline]
    pub fn len(&self) -> usize {
        self.message.len() - self.receiver.used()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// In place, as bytes that a hostile peer may change while they are looked at: load each once.
    #[inline]
    pub fn bytes(&self) -> &[AtomicU8] {
        let at = self.message.pointer(self.receiver.inward());
        atomic_bytes(at.wrapping_add(self.receiver.used()), self.len())
    }

    /// Copies out, from byte `at` on. Panics when there are not so many.
    #[inline]
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let (lane, at) = (self.receiver.inward(), self.receiver.used() + at);
        // SAFETY: `to` is valid for its length.
        #[allow(unsafe_code)]
        unsafe {
            self.message.read(lane, at, to.as_mut_ptr(), to.len())
        };
    }

    pub fn to_vec(&self) -> Vec<u8> {
        let mut data = vec![0; self.len()];
        self.read(0, &mut data);
        data
    }

    /// Done with it: gives its place back to the sender.
    #[inline]
    pub fn release(self) {
        let n = self.len();
        self.take(n);
    }

    /// Done with the first `n` bytes: of a stream the rest stays, a message goes as a whole.
    #[inline]
    pub fn take(self, n: usize) {
        self.receiver.take_raw(self.message, n);
    }
}

const _: () = assert!(PIECE_BYTES <= MESSAGE_MAX_BYTES);
