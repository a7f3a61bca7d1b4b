//! Lanes as their sender has them, and what it knows of each address that it sends to. A process's own, behind the send lock of the
//! socket's `End`; a child by fork sends through the kernel.

use super::address::{halves, hash, whole};
use super::inlets::{FREELY, words};
use crate::once::Once;
use crate::plain::{FreeList, P32, P64};
use crate::socket::budget;
use crate::socket::chaos;
use crate::socket::table::Socket;
use ringlet_core::layout::LaneGeometry;
use ringlet_core::mapped::Lane;
use ringlet_core::memory::{Area, Buffers};
use ringlet_core::queue::Tx;
use ringlet_core::switch;
use ringlet_core::sync::{AtomicUsize, Ordering};
use ringlet_linux::map::{self, Zeroed};
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::tcp::Address;
use ringlet_linux::udp;

const OUTLET_COUNT: u32 = 1 << 14;
const BUCKET_COUNT: usize = 32;
/// Destinations in one bucket; the one that was used longest ago is forgotten for a new one.
const CHAIN_MAX: usize = 128;
/// While a lane is used, the kernel is asked this often whether its receiver still receives what is sent there (about a millisecond).
const CHECK_TICKS: u64 = 3_000_000;
/// A lane that was not used for so long is asked about too, when there is time (about a second).
const IDLE_TICKS: u64 = 3_000_000_000;
/// Of more destinations than `FREELY`, those get lanes to which a message goes as often as if they were so few, so often in turn.
const OFTEN: u32 = 32;
const PAYS_TIMES: u32 = 16;
/// Of so many destinations it is noted where they are. (More: chains get full, and the last to be looked for is to stay.)
const MANY: core::ops::Range<u32> =
    4 * BUCKET_COUNT as u32..CHAIN_MAX as u32 * BUCKET_COUNT as u32 / 2;
const FOUND_COUNT: usize = 4096;
/// Lanes whose receivers may have gone are looked for this often (some 15 ms).
const CHECK_IDLE_TICKS: u64 = IDLE_TICKS / 64;
/// After so many units through the kernel, one for a message and one more for each so many bytes, some may have been dropped (by default a
/// receiver has room for 208 KiB). Its table is asked whether all have been received: now, and at every so many messages.
const UNSETTLED_UNITS: u32 = 16;
const UNIT_BYTES: usize = 4096;
const ASK_AFTER: u32 = 16;
/// After so many messages it has had time enough.
const LAGGING: u32 = 6 * ASK_AFTER;
/// After a lane has ended, the next one is asked for so many messages later.
const PAUSE_CALLS: u32 = 64;
/// A message that only the kernel can carry waits so long for what was published to be taken, so that it does not overtake it.
const DRAIN_LOOKS: u32 = 2_000;
/// What can't go behind the lane's messages by the kernel waits so long for those to be taken, before it is dropped.
const TAKEN_NS: u64 = 10_000_000;

static OUTLETS: Once<Outlets> = Once::new();

/// Maps the tables, for so many sockets.
pub fn start(sockets: u32) -> Sys<()> {
    let _ = OUTLETS.set(Outlets::map(sockets)?);
    Ok(())
}

/// Messages before the first step.
pub fn first_step() -> u32 {
    let config = crate::socket::table::tables().map(|tables| tables.config);
    config.map_or(u32::MAX, |config| config.move_after.min(u64::from(u32::MAX / 2)) as u32)
}

/// What goes out of one socket.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Outbox {
    pub door: P32,
    pub inode: P32,
    /// Where the socket is connected to; 0 for nowhere, or not yet looked up.
    connected: P32,
    /// Destinations, and messages to all of them.
    destinations: P32,
    sent: P32,
    /// When lanes were last looked at whose receivers may have gone.
    checked: P64,
    buckets: [P32; BUCKET_COUNT],
}

/// One destination.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Outlet {
    ip: [P64; 2],
    port: P32,
    pub state: P32,
    /// Messages sent there, and at which count the next step towards a lane is due.
    pub calls: P32,
    pub next_step: P32,
    /// Its box's count of messages at the last one, and how often in turn they have come often (`pays`).
    sent_at: P32,
    often: P32,
    pub tries: P32,
    /// The receiver's socket, and where our datagrams come from for it.
    pub inode: P32,
    source_ip: [P64; 2],
    source_port: P32,
    base: AtomicUsize,
    bytes: P64,
    slot_count: P32,
    ring_bytes: P64,
    tx: Tx,
    /// Messages sent through the kernel since its receiver was known to have none left there.
    gone_there: P32,
    /// How often that would have mattered since.
    unsettled: P32,
    /// While this is its progress, the receiver still has to empty the kernel's queue before it takes what is in the lane.
    entered: P64,
    /// Where it was when it was last waited for that it takes more (`is_taken_soon`).
    waited_at: P64,
    checked: P64,
    next: P32,
    next_free: P32,
    /// Whose it is (`Outlets::number_of`): 0 while it is free.
    of: P32,
}

/// States of an outlet.
pub const FRESH: u32 = 0;
/// We have knocked at the receiver's door.
pub const KNOCKED: u32 = 1;
pub const ATTACHED: u32 = 2;
/// Not local, or for other reasons the kernel's for good.
pub const NEVER: u32 = 3;

// SAFETY: atomics only; zero is the empty state.
#[allow(unsafe_code)]
unsafe impl Zeroed for Outbox {}
// SAFETY: atomics only; zero is the empty state.
#[allow(unsafe_code)]
unsafe impl Zeroed for Outlet {}

pub struct Outlets {
    pub boxes: &'static [Outbox],
    outlets: &'static [Outlet],
    free: &'static [FreeList],
    /// Where destinations of boxes that have many were found last: a hint.
    found: &'static [P32],
}

impl Outlets {
    pub fn map(sockets: u32) -> Sys<Outlets> {
        Ok(Outlets {
            boxes: map::private_table(sockets as usize)?,
            outlets: map::private_table(OUTLET_COUNT as usize)?,
            free: map::private_table(1)?,
            found: map::private_table(FOUND_COUNT)?,
        })
    }

    pub fn get(&self, index: u32) -> &'static Outlet {
        &self.outlets[index as usize % OUTLET_COUNT as usize]
    }

    fn number_of(&self, outbox: &Outbox) -> u32 {
        let before = core::ptr::from_ref(outbox).addr() - self.boxes.as_ptr().addr();
        (before / size_of::<Outbox>()) as u32 + 1
    }
}

/// How a message went.
#[derive(PartialEq, Eq, Debug)]
pub enum Sent {
    /// By the lane.
    Done,
    /// It is to go through the kernel.
    Kernel,
    /// Nowhere: there is no room for it.
    Dropped,
}

impl Outlet {
    pub fn address(&self) -> Address {
        Address { ip: whole(&self.ip), port: self.port.get() as u16 }
    }

    pub fn source(&self) -> Address {
        Address { ip: whole(&self.source_ip), port: self.source_port.get() as u16 }
    }

    pub fn set_source(&self, source: &Address) {
        for (word, half) in self.source_ip.iter().zip(halves(&source.ip)) {
            word.set(half);
        }
        self.source_port.set(u32::from(source.port));
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    fn lane(&self) -> Option<Lane> {
        let base = self.base.load(Ordering::Relaxed);
        if base == 0 {
            return None;
        }
        let geometry = LaneGeometry {
            slot_count: self.slot_count.get() as usize,
            ring_bytes: self.ring_bytes.get() as usize,
        };
        // SAFETY: mapped with this size by `door`, and unmapped only behind the send lock, which the caller holds.
        let area = unsafe { Area::new(base as *mut u8, self.bytes.get() as usize) };
        Some(Lane::new(area, 0, geometry))
    }

    pub fn attach(&self, area: Area, geometry: LaneGeometry) {
        self.slot_count.set(geometry.slot_count as u32);
        self.ring_bytes.set(geometry.ring_bytes as u64);
        self.bytes.set(area.len() as u64);
        self.tx.reset();
        self.gone_there.set(UNSETTLED_UNITS);
        self.unsettled.set(0);
        self.entered.set(u64::MAX);
        self.waited_at.set(u64::MAX);
        self.checked.set(sys::ticks());
        self.base.store(area.base() as usize, Ordering::Relaxed);
        self.state.set(ATTACHED);
        if let Some(lane) = self.lane() {
            words(&lane).history.attached.store(1, Ordering::Release);
        }
    }

    /// Ends the lane, if there is one: what is in it stays for its receiver.
    #[allow(unsafe_code)]
    pub fn detach(&self) {
        let Some(lane) = self.lane() else { return };
        // ORDER: Release, after the last publish; pairs with `Mailbox::tidy`.
        words(&lane).history.left.store(1, Ordering::Release);
        self.forget_mapping();
        self.begin_again(chaos::due(self.calls.get() + PAUSE_CALLS));
    }

    #[allow(unsafe_code)]
    fn forget_mapping(&self) {
        let base = self.base.swap(0, Ordering::Relaxed);
        if base != 0 {
            if let Some(tables) = crate::socket::table::tables() {
                budget::release(tables, self.bytes.get() as usize);
            }
            // SAFETY: a whole mapping of ours; users hold the send lock, as our caller does, and no longer find it.
            unsafe { map::unmap(Area::new(base as *mut u8, self.bytes.get() as usize)) };
        }
    }

    pub fn begin_again(&self, at: u32) {
        self.state.set(FRESH);
        self.tries.set(0);
        self.next_step.set(at);
    }

    /// Sends by the lane if there is one and its receiver looks at it.
    #[inline]
    pub fn send(&self, from: &mut Buffers, by_ring: bool) -> Sent {
        let Some(lane) = self.lane() else { return Sent::Kernel };
        let (words, len) = (words(&lane), from.remaining());
        let untaken = || !self.tx.drained(&lane);
        if by_ring && (!chaos::by_kernel() || self.drops(&lane)) {
            let path = words.receiver.path.load(Ordering::Relaxed);
            let open = path == switch::RING || path == switch::KERNEL && untaken();
            if open && self.is_gone(CHECK_TICKS) {
                self.detach();
                return Sent::Kernel;
            }
            if open
                && self.is_settled(&lane, words)
                && switch::claim(&words.sender.busy, &words.receiver.path, untaken)
            {
                return self.publish(&lane, from);
            }
        }
        // ORDER: Acquire; pairs with `switch::turn`.
        if words.receiver.path.load(Ordering::Acquire) == switch::CLOSED {
            self.detach();
            return Sent::Kernel;
        }
        if !by_ring {
            // What was published is taken first, if the receiver is there to take it.
            for _ in 0..DRAIN_LOOKS {
                if self.tx.drained(&lane) {
                    break;
                }
                core::hint::spin_loop();
            }
        }
        self.by_kernel(&lane, len)
    }

    fn by_kernel(&self, lane: &Lane, len: usize) -> Sent {
        if self.drops(lane) && !self.is_taken_soon(lane) {
            return Sent::Dropped;
        }
        words(lane).history.note_kernel();
        // The first message that is published says where the counts agree: nothing goes to the kernel between that and it.
        let first = self.tx.is_new();
        let units = if first { UNSETTLED_UNITS } else { 1 + (len / UNIT_BYTES) as u32 };
        self.gone_there.set(self.gone_there.get().saturating_add(units));
        Sent::Kernel
    }

    /// Would it be received before what is in the lane?
    fn drops(&self, lane: &Lane) -> bool {
        !self.tx.drained(lane) && self.entered.get() == self.tx.progress()
    }

    /// Lets the receiver take what is in the lane: where it has not run since, a message would be dropped for nothing.
    #[cold]
    fn is_taken_soon(&self, lane: &Lane) -> bool {
        // (Of one that stands still nothing is waited for again.)
        let progress = self.tx.progress();
        if self.waited_at.get() == progress {
            return false;
        }
        self.waited_at.set(progress);
        let until = sys::now_ns() + TAKEN_NS;
        while !self.tx.drained(lane) && sys::now_ns() < until {
            sys::sched_yield();
        }
        self.tx.drained(lane)
    }

    /// Does the receiver know how many it has not got of those that went through the kernel?
    #[inline(always)]
    fn is_settled(&self, lane: &Lane, words: &switch::Words) -> bool {
        self.gone_there.get() < UNSETTLED_UNITS || self.settle(lane, words)
    }

    /// When the kernel has nothing left for the receiver, what that one has not got by now is lost. One that always has some left there may
    /// find that out itself, if nothing more goes there meanwhile.
    #[cold]
    fn settle(&self, lane: &Lane, words: &switch::Words) -> bool {
        let times = self.unsettled.add(1) - 1;
        if !times.is_multiple_of(ASK_AFTER) {
            return false;
        }
        let owner = udp::receiver(&self.source(), &self.address());
        if owner.is_ok_and(|owner| owner.unread == 0) {
            words.history.settle();
        } else if times >= LAGGING && self.tx.drained(lane) {
            self.entered.set(self.tx.progress());
        } else {
            return false;
        }
        self.gone_there.set(0);
        self.unsettled.set(0);
        true
    }

    #[inline(always)]
    fn publish(&self, lane: &Lane, from: &mut Buffers) -> Sent {
        let words = words(lane);
        let (before, len) = (words.history.before_next().to_le_bytes(), from.remaining());
        chaos::dawdle();
        let published = self.tx.push_behind(lane, &before, from);
        chaos::dawdle();
        switch::done(&words.sender.busy);
        match published {
            Ok(true) => Sent::Done,
            // It took too long, and the receiver has given the lane up.
            Ok(false) => {
                self.detach();
                Sent::Kernel
            }
            // Full: the kernel's buffer takes what comes next, until it is empty again, and drops what it has no room for.
            Err(_) => {
                self.gone_there.set(UNSETTLED_UNITS);
                self.by_kernel(lane, len)
            }
        }
    }

    /// Asked now and then: would the kernel no longer bring our datagrams to the same socket?
    #[inline(always)]
    fn is_gone(&self, after: u64) -> bool {
        let now = sys::ticks();
        now.wrapping_sub(self.checked.get()) > after && {
            self.checked.set(now);
            let (source, to) = (self.source(), self.address());
            // (A socket stays bound to an address that has moved to another machine.)
            let found = udp::receiver(&source, &to);
            found.map_or(true, |owner| owner.inode != self.inode.get())
                || !udp::stays_here(&source, &to)
        }
    }
}

impl Outbox {
    /// What is known of a destination; made if need be.
    #[inline]
    pub fn outlet(&self, all: &Outlets, to: &Address) -> Option<u32> {
        let hash = hash(to);
        let bucket = &self.buckets[hash % BUCKET_COUNT];
        let ip = halves(&to.ip);
        let same = |outlet: &Outlet| {
            let same = outlet.ip[0].get() == ip[0] && outlet.ip[1].get() == ip[1];
            same && outlet.port.get() == u32::from(to.port)
        };
        let number = all.number_of(self);
        let found = &all.found[(hash ^ number.wrapping_mul(31) as usize) % FOUND_COUNT];
        let many = MANY.contains(&self.destinations.get());
        if many {
            let outlet = all.get(found.get());
            if outlet.of.get() == number && same(outlet) {
                return Some(found.get());
            }
        }
        let mut previous = 0;
        let mut index = bucket.get();
        let mut length = 0;
        while index != 0 {
            let outlet = all.get(index);
            if same(outlet) {
                if many {
                    found.set(index);
                } else if previous != 0 {
                    // To the front: the others age.
                    all.get(previous).next.set(outlet.next.get());
                    outlet.next.set(bucket.get());
                    bucket.set(index);
                }
                return Some(index);
            }
            length += 1;
            if length == CHAIN_MAX {
                break;
            }
            previous = index;
            index = outlet.next.get();
        }
        let index = if length == CHAIN_MAX {
            // The last of the chain makes room.
            all.get(previous).next.set(0);
            all.get(index).detach();
            if self.connected.get() == index {
                self.connected.set(0);
            }
            index
        } else {
            let index = all.free[0].take(OUTLET_COUNT, |i| all.get(i).next_free.get())?;
            self.destinations.add(1);
            index
        };
        let outlet = all.get(index);
        for (word, half) in outlet.ip.iter().zip(ip) {
            word.set(half);
        }
        outlet.port.set(u32::from(to.port));
        outlet.of.set(number);
        outlet.calls.set(0);
        outlet.often.set(0);
        outlet.begin_again(first_step());
        outlet.next.set(bucket.get());
        bucket.set(index);
        Some(index)
    }

    pub fn connected(&self) -> Option<u32> {
        let index = self.connected.get();
        (index != 0).then_some(index)
    }

    pub fn set_connected(&self, index: u32) {
        self.connected.set(index);
    }

    fn each<'a>(&'a self, all: &'a Outlets) -> impl Iterator<Item = u32> + 'a {
        self.buckets.iter().flat_map(move |bucket| {
            let mut next = bucket.get();
            core::iter::from_fn(move || {
                let index = next;
                next = all.get(index).next.get();
                (index != 0).then_some(index)
            })
        })
    }

    /// The destination whose receiver has answered.
    pub fn knocked_at(&self, all: &Outlets, inode: u32, to: &Address) -> Option<&'static Outlet> {
        self.each(all).map(|index| all.get(index)).find(|outlet| {
            let state = outlet.state.get();
            state == KNOCKED && outlet.inode.get() == inode && outlet.address() == *to
        })
    }

    /// Have we knocked somewhere, and not been answered?
    pub fn awaits(&self, all: &Outlets) -> bool {
        self.each(all).any(|index| all.get(index).state.get() == KNOCKED)
    }

    /// Ends lanes whose receivers have gone, where nothing is sent that would find it out; a few at a time.
    pub fn check_idle(&self, all: &Outlets, mut most: u32) {
        let now = sys::ticks();
        if now.wrapping_sub(self.checked.get()) < CHECK_IDLE_TICKS {
            return;
        }
        self.checked.set(now);
        for index in self.each(all) {
            let outlet = all.get(index);
            let idle = now.wrapping_sub(outlet.checked.get()) > IDLE_TICKS;
            if outlet.state.get() == ATTACHED && idle && most > 0 {
                most -= 1;
                if outlet.is_gone(IDLE_TICKS) {
                    outlet.detach();
                }
            }
        }
    }

    /// Has anything been sent?
    pub fn sends(&self, all: &Outlets) -> bool {
        self.each(all).any(|index| all.get(index).calls.get() > 0)
    }

    /// Is there a lane?
    pub fn has_lane(&self, all: &Outlets) -> bool {
        self.each(all).any(|index| all.get(index).state.get() == ATTACHED)
    }

    /// Ends all lanes and forgets all destinations. `ours`: the lanes are this process's, and their receivers are told.
    pub fn clear(&self, all: &Outlets, ours: bool) {
        for bucket in &self.buckets {
            let mut index = bucket.get();
            bucket.set(0);
            while index != 0 {
                let outlet = all.get(index);
                let next = outlet.next.get();
                if ours {
                    outlet.detach();
                } else {
                    outlet.forget_mapping();
                }
                outlet.of.set(0);
                all.free[0].give(index, |i, next| all.get(i).next_free.set(next));
                index = next;
            }
        }
        self.connected.set(0);
        self.destinations.set(0);
    }

    /// A message goes there: how many went before.
    #[inline(always)]
    pub fn count(&self, outlet: &Outlet) -> u32 {
        let sent = self.sent.add(1);
        let often = sent.wrapping_sub(outlet.sent_at.get()) <= OFTEN;
        outlet.often.set(if often { outlet.often.get().saturating_add(1) } else { 0 });
        outlet.sent_at.set(sent);
        outlet.calls.add(1)
    }

    /// Would a lane there pay?
    pub fn pays(&self, outlet: &Outlet) -> bool {
        self.destinations.get() <= FREELY || outlet.often.get() >= PAYS_TIMES
    }
}

/// The outbox of a socket.
#[inline(always)]
pub fn of(socket: &Socket) -> Option<(&'static Outlets, &'static Outbox)> {
    let all = OUTLETS.get().filter(|_| socket.has_datagrams())?;
    let index = crate::socket::table::tables()?.index_of(socket);
    Some((all, &all.boxes[index as usize % all.boxes.len()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of few and of many, in turn and at random, and after all were forgotten.
    #[test]
    fn a_destination_is_found_again() {
        let all = Outlets::map(3).expect("tables");
        let address = |n: usize| Address { ip: [n as u8; 16], port: 1000 + (n / 7) as u16 };
        for many in [5, 127, 1000, 2100] {
            let of_each = [1, 2].map(|nth: usize| {
                let outbox = &all.boxes[nth];
                let of = |n| outbox.outlet(&all, &address(n)).expect("an outlet");
                let first: Vec<_> = (0..many).map(of).collect();
                for n in (0..many).chain((0..4 * many).map(|n| n * 7919 % many)) {
                    assert_eq!(of(n), first[n]);
                    assert_eq!(all.get(first[n]).address(), address(n));
                }
                first
            });
            assert!(of_each[0].iter().all(|index| !of_each[1].contains(index)));
            all.boxes[1].clear(&all, true);
            let again = all.boxes[2].outlet(&all, &address(0));
            assert_eq!(again, Some(of_each[1][0]));
            all.boxes[2].clear(&all, true);
        }
    }

    #[test]
    fn where_little_is_sent_there_is_no_lane() {
        let outbox = Outbox::default();
        let outlets: Vec<_> = (0..2 * FREELY).map(|_| Outlet::default()).collect();
        let in_turn = || (0..100).for_each(|_| outlets.iter().for_each(|to| _ = outbox.count(to)));
        // To few destinations; then to many.
        outbox.destinations.set(FREELY);
        in_turn();
        assert!(outlets.iter().all(|to| outbox.pays(to)));
        outbox.destinations.set(2 * FREELY);
        assert!(!outlets.iter().any(|to| outbox.pays(to)));
        // Every second message to one of them.
        for n in 0..2 * PAYS_TIMES as usize {
            outbox.count(&outlets[0]);
            outbox.count(&outlets[n % 60 + 1]);
        }
        assert!(outbox.pays(&outlets[0]) && !outbox.pays(&outlets[1]));
        in_turn();
        assert!(!outbox.pays(&outlets[0]));
    }
}
