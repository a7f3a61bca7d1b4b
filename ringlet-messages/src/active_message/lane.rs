//! One end of a connection between two endpoints, and the bells of the peer's process.

use super::name::Name;
use super::wire::Wire;
use parking_lot::Mutex;
use ringlet_core::active::layout::{BELLS_BYTES, BUNDLES, Bell, LANES};
use ringlet_core::active::{Connection, SegmentMemory, Status};
use ringlet_core::layout::{LANE_MAX_COUNT, WANT_EVENT};
use ringlet_core::mailbox;
use ringlet_core::memory::Area;
use ringlet_core::wait;
use ringlet_linux::{futex, map};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// A shared mapping that is unmapped with its last user.
pub struct Mapping(Area);

impl Mapping {
    pub fn new(fd: i32, bytes: usize) -> Option<Mapping> {
        map::map_shared(fd, bytes, true).ok().map(Mapping)
    }

    /// The same of rings, which no core dump of the program has.
    pub fn of_rings(fd: i32, bytes: usize) -> Option<Mapping> {
        map::map_segment(fd, bytes).ok().map(Mapping)
    }

    pub fn area(&self) -> Area {
        self.0
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: whoever took an `Area` holds the mapping as long (`Bells`, `Lane`).
        unsafe { map::unmap(self.0) };
    }
}

/// The bell page of a process, ours or a peer's.
#[derive(Clone)]
pub struct Bells(Arc<Mapping>);

impl Bells {
    pub fn map(fd: i32) -> Option<Bells> {
        Some(Bells(Arc::new(Mapping::new(fd, BELLS_BYTES)?)))
    }

    /// `bundle` is below `BUNDLES`.
    #[inline(always)]
    pub fn of(&self, bundle: usize) -> &Bell {
        self.0.area().at(bundle * size_of::<Bell>())
    }
}

/// Wakes who sleeps on a bell, after something was published that its sleeper looks at.
#[inline]
pub fn wake(bell: &Bell) {
    if wait::rouse(&bell.sleep) {
        futex::wake(&bell.sleep);
    }
}

/// Sets the bit of a lane, and wakes who sleeps there. (`place` may be any number.)
fn ring(bells: &Bells, place: u32) {
    let (bundle, lane) = (place as usize >> 16, place as usize & 0xffff);
    if bundle < BUNDLES && lane < LANES {
        let bell = bells.of(bundle);
        mailbox::announce(&bell.ready[lane / LANE_MAX_COUNT], lane % LANE_MAX_COUNT);
        wake(bell);
    }
}

const OPENING: u8 = 0;
const OPEN: u8 = 1;
/// And the status of what is sent after the end.
const ENDED: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    Opening,
    Open,
    Ended(Status),
}

pub struct Lane {
    /// Names the lane to its own process.
    pub id: u64,
    pub peer: Name,
    pub connection: Connection,
    pub memory: SegmentMemory,
    segment: Mapping,
    bells: OnceLock<Bells>,
    /// If no memory is shared with the peer.
    wire: Option<Wire>,
    stage: AtomicU8,
    /// The peer's segment, if we have it, and the generation that was asked for last.
    store: Mutex<Option<Store>>,
    asked: AtomicU32,
    /// The peer knows our endpoint's tag, and so our program may know the peer. Of a lane with a wire only.
    pub is_known: AtomicBool,
    /// Where the peer was last found in our endpoint's translation table.
    pub known_as: AtomicU32,
}

/// A peer's segment, into which we store by ourselves.
struct Store {
    generation: u8,
    memory: Mapping,
}

/// How bytes get into the peer's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// They were stored, in the segment of that generation.
    Stored(u8),
    /// In the message. The peer has a segment that we could ask for.
    Ask,
    /// In the message.
    Message,
}

impl Lane {
    /// `end` is 0 for who opens the connection, 1 for who is asked.
    pub fn new(id: u64, peer: Name, segment: Mapping, end: usize) -> Lane {
        let memory = SegmentMemory::new(segment.area(), end);
        Lane {
            id,
            peer,
            connection: Connection::default(),
            memory,
            segment,
            bells: OnceLock::new(),
            wire: None,
            stage: AtomicU8::new(OPENING),
            store: Mutex::default(),
            asked: AtomicU32::new(0),
            is_known: AtomicBool::new(false),
            known_as: AtomicU32::new(0),
        }
    }

    /// To an endpoint beyond our network namespace: the segment is ours alone.
    pub fn over(wire: Wire, id: u64, peer: Name, segment: Mapping) -> Lane {
        Lane { wire: Some(wire), stage: AtomicU8::new(OPEN), ..Lane::new(id, peer, segment, 0) }
    }

    #[inline(always)]
    pub fn wire(&self) -> Option<&Wire> {
        self.wire.as_ref()
    }

    /// A message was let in from the peer.
    #[inline(always)]
    pub fn know(&self) {
        if self.wire.is_some() {
            // ORDER: Relaxed; the service thread's choice of whom to send away, no more.
            self.is_known.store(true, Ordering::Relaxed);
        }
    }

    /// The segment as the peer would see it.
    fn peers_memory(&self) -> SegmentMemory {
        SegmentMemory::new(self.segment.area(), 1)
    }

    /// What there is to be carried, both ways (`Wire::carry`).
    #[inline(always)]
    pub fn carry(&self) {
        if let Some(wire) = &self.wire {
            self.carry_over(wire, false);
        }
    }

    fn carry_over(&self, wire: &Wire, all: bool) {
        if let Err(status) = wire.carry(&self.peers_memory(), all) {
            self.end(status);
        }
    }

    /// Of one that has no more to say but why it ends. Is it said?
    pub fn hang_up(&self, status: Status) -> bool {
        self.wire.as_ref().is_none_or(|wire| wire.hang_up(&self.peers_memory(), status))
    }

    /// For the service thread: one of the wire's bells has rung. Our own is rung then.
    pub fn rang(&self, bells: &Bells) {
        let Some(wire) = &self.wire else { return };
        wire.rang();
        self.carry_over(wire, false);
        let place = self.memory.ours().watching.bell.load(Ordering::Relaxed);
        ring(bells, place);
    }

    /// Is there something to deliver, or to be noticed?
    #[inline(always)]
    pub fn ready(&self) -> bool {
        if self.wire.is_none() {
            return self.connection.ready(&self.memory);
        }
        self.carry();
        self.connection.ready(&self.memory) || self.has_ended()
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.stage(), Stage::Ended(_))
    }

    #[inline(always)]
    pub fn stage(&self) -> Stage {
        // ORDER: Acquire; pairs with `open` and `end`.
        match self.stage.load(Ordering::Acquire) {
            OPENING => Stage::Opening,
            OPEN => Stage::Open,
            ended => Stage::Ended(Status::from_u8(ended - ENDED).unwrap_or(Status::Unreachable)),
        }
    }

    pub fn open(&self, bells: Bells) {
        let _ = self.bells.set(bells);
        // ORDER: Release; pairs with `stage`. An end that came first stays.
        let _ = self.stage.compare_exchange(OPENING, OPEN, Ordering::Release, Ordering::Relaxed);
    }

    /// The first reason is the one that counts.
    pub fn end(&self, status: Status) {
        let ended = ENDED + status as u8;
        // ORDER: Release; pairs with `stage`: what the peer has published until now is seen by who delivers the rest.
        let _ = self.stage.fetch_update(Ordering::Release, Ordering::Relaxed, |stage| {
            (stage < ENDED).then_some(ended)
        });
    }

    /// After something was published: if the peer does not watch this lane, its bit is set and its sleeper woken.
    #[inline(always)]
    pub fn notify(&self) {
        if self.wire.is_some() {
            return self.carry();
        }
        if self.memory.watch_wish(false).granted_by_sender() != 0 {
            self.ring();
        }
    }

    #[cold]
    fn ring(&self) {
        let place = self.memory.theirs().watching.bell.load(Ordering::Relaxed);
        if let Some(bells) = self.bells.get() {
            ring(bells, place);
        }
    }

    /// After requests were served: wakes the peer if it waits for that.
    pub fn notify_room(&self) {
        if self.memory.room_wish(false).granted_by_receiver() != 0 {
            self.ring();
        }
    }

    /// Need a request not wait (be it that it comes back)? Who is about to sleep asks to be woken.
    pub fn accepts(&self, sleeping: bool) -> bool {
        if sleeping {
            self.memory.room_wish(true).want(WANT_EVENT);
        }
        match self.stage() {
            Stage::Opening => false,
            Stage::Open => self.connection.has_room(&self.memory),
            Stage::Ended(_) => true,
        }
    }

    /// Stores bytes into the peer's segment, if it is one that peers may store to, and they fit.
    pub fn store(&self, offset: u64, bytes: &[u8]) -> Way {
        let generation = self.memory.theirs().watching.segment.load(Ordering::Relaxed);
        let Ok(generation @ 1..) = u8::try_from(generation) else { return Way::Message };
        let store = self.store.lock();
        match &*store {
            Some(store) if store.generation == generation => {
                let area = store.memory.area();
                #[allow(unsafe_code)]
                // SAFETY: `bytes` is valid for its length; the place is checked.
                let stored = usize::try_from(offset)
                    .is_ok_and(|offset| unsafe { area.write(offset, bytes.as_ptr(), bytes.len()) });
                if stored { Way::Stored(generation) } else { Way::Message }
            }
            _ if self.asked.swap(generation.into(), Ordering::Relaxed) == generation.into() => {
                Way::Message
            }
            _ => Way::Ask,
        }
    }

    /// The peer has given us its segment.
    pub fn set_store(&self, generation: u8, memory: Mapping) {
        *self.store.lock() = Some(Store { generation, memory });
    }

    /// Tells the peer which segment it may store to by itself.
    pub fn set_generation(&self, generation: u8) {
        self.memory.ours().watching.segment.store(generation.into(), Ordering::Relaxed);
    }

    /// Asks for the bit: this lane is not watched from now on. True if something is there already.
    pub fn leave(&self) -> bool {
        if let Some(wire) = &self.wire {
            self.carry_over(wire, true);
            return self.ready() || !wire.arm();
        }
        self.memory.watch_wish(true).want(WANT_EVENT);
        self.connection.ready(&self.memory)
    }

    /// Where the peer finds this lane's bit.
    pub fn set_bell(&self, bundle: usize, lane: usize) {
        self.memory.ours().watching.bell.store((bundle << 16 | lane) as u32, Ordering::Relaxed);
    }
}
