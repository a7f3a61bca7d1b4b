//! Lanes as their receiver has them. They lie in memory that a family shares, behind the receive lock of the socket's `End`. What a child
//! by fork could write there leads no further than to lanes of the same mailbox: whose a lane is, and where it is mapped, is private.

use super::address::{halves, hash, whole};
use crate::once::Once;
use crate::plain::{P32, P64};
use crate::socket::budget;
use crate::socket::family::Pool;
use crate::socket::table::Socket;
use ringlet_core::layout::LaneGeometry;
use ringlet_core::mapped::Lane;
use ringlet_core::memory::Area;
use ringlet_core::queue::{Message, Next, Rx};
use ringlet_core::switch::{self, Order, Words};
use ringlet_core::sync::{AtomicU32, AtomicUsize, Ordering, fence};
use ringlet_linux::map::{self, Zeroed};
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::tcp::Address;

pub const INLET_COUNT: u32 = 1 << 14;
/// Lanes of one socket.
const LANES_MAX_COUNT: u32 = 1024;
/// Lanes that a receiver looks at; the others are turned to the kernel until something comes from there. So the price of a look does
/// not grow with idle senders.
const HOT_COUNT: usize = 32;
const BUCKET_COUNT: usize = 32;
/// After so many messages it is looked at what lanes are worth (`Mailbox::count`).
const COOL_EVERY: u64 = 16;
/// Not before so many, since who begins sleeps more than later.
const TRIED_FIRST: u64 = 256;
/// A lane that brought nothing while so many messages came otherwise is looked at no more.
const COOL_AFTER: u32 = 4096;
/// Of more senders than that, those are heard by their lanes that send as often as if they were no more: this often in turn. Who is heard by turns would
/// cost the kernel's way, the looks, and the way between them besides (128 senders at random, medians: 11.5 us of the receiver where the kernel took 6.1).
const OFTEN: u32 = HOT_COUNT as u32;
const OFTEN_TIMES: u32 = 4;
/// A socket with so many lanes gets more for those senders alone whose messages have come often, so often in turn: making a lane, and looking now and
/// then whether its sender lives, costs what some hundred messages do. (Of 64 senders at random or in turn lanes save half of the receiver's time where
/// each end has a processor; of 200 none does.)
pub const FREELY: u32 = 4 * OFTEN;
const PAYS_TIMES: u32 = 16;
const NEWCOMERS: usize = 1024;
const TIMES_MASK: u32 = 0xff;
/// What lanes save and cost, in turns of one lane to the kernel or back (a store and a fence, about 80 ns): a message that comes by one saves the kernel's
/// send and receive; each other one costs a look.
const SAVED_TURNS: u64 = 24;
const LOOKS_OF_A_TURN: u64 = 8;
/// They rest where that saves so much a message: while a backlog of the kernel's is read none brings anything, and costs little.
const WORTH_A_REST: u64 = 2;
/// Where they cost more, none is looked at for as many messages, then for twice as many, so often.
const REST_DOUBLINGS: u32 = 10;
/// The first bytes of each message: how many its sender had sent through the kernel.
const HEAD_BYTES: usize = 8;
/// Looks at a busy sender before it is given up: it is between two stores, unless it has been stopped there.
const BUSY_LOOKS: u32 = 20_000;

static INLETS: Once<Inlets> = Once::new();

/// Maps the tables, for so many sockets.
pub fn start(sockets: u32) -> Sys<()> {
    let _ = INLETS.set(Inlets::map(sockets)?);
    Ok(())
}

pub fn all() -> Option<&'static Inlets> {
    INLETS.get()
}

/// A socket gets a mailbox. False if there is none.
pub fn begin(socket: &Socket) -> bool {
    all().is_some_and(|all| all.begin(socket))
}

/// What comes in to one socket. One per `End`.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Mailbox {
    /// Its lanes; 0 when there is none.
    first: AtomicU32,
    lanes: P32,
    /// Those that are looked at, and where the last message was.
    hot: [P32; HOT_COUNT],
    hot_count: P32,
    last: P32,
    /// Lanes by the address of their sender.
    buckets: [P32; BUCKET_COUNT],
    /// The hot lanes are turned to the kernel, because somebody sleeps; and in spite of what is in them (`KERNEL_AT_ONCE`).
    asleep: P32,
    at_once: P32,
    /// They were empty behind that: nothing comes by them before they are turned back.
    still: P32,
    /// Which way brings what the program was shown last and has not taken: it has looked at it, or asked how long it is.
    pub shown: P32,
    /// When the kernel was last looked at (ticks).
    pub kernel_asked: P64,
    /// Messages, and those of them that were taken from lanes; and both at the last look at what lanes are worth.
    seen: P64,
    taken: P64,
    seen_before: P64,
    taken_before: P64,
    /// Lanes that were turned since then. Until this many messages none is looked at, which was found so often in turn.
    turned: P64,
    rests_until: P64,
    rested: P32,
    /// Messages of senders that have no lane.
    strange: P32,
    /// The positions at which lanes were when they left the hot ones, less those at which they came.
    retired: P64,
}

/// One lane.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Inlet {
    state: P32,
    ip: [P64; 2],
    port: P32,
    /// Of the sender's socket.
    pub inode: P32,
    rx: Rx,
    /// Messages taken.
    taken: P64,
    order: Order,
    /// The receiver's count of messages when its sender's last one came, and how often in turn they have come often (`OFTEN`).
    active_at: P32,
    often: P32,
    pub checked_ns: P64,
    next: P32,
    next_in_bucket: P32,
}

/// This process's mapping of an inlet's lane, and whose it is.
#[derive(Default)]
pub struct Mapping {
    base: AtomicUsize,
    bytes: P64,
    slot_count: P32,
    ring_bytes: P64,
    mailbox: P32,
}

/// A sender that has no lane, as this process knows it by a hash: a hint. Which one, and how often in turn its messages came often (`OFTEN`); and its
/// receiver's count of all messages at the last one.
#[derive(Default)]
struct Newcomer {
    who: P32,
    at: P32,
}

struct Newcomers(&'static [Newcomer]);

impl Newcomers {
    fn heard(&self, mailbox: u32, source: &Address, now: u32) {
        let (newcomer, name, times) = self.find(mailbox, source);
        let who = newcomer.who.get();
        let theirs = who & TIMES_MASK;
        if times == 0 && theirs > 1 {
            // (Of two in one place the one that sends more stays.)
            return newcomer.who.set((who & !TIMES_MASK) | (theirs / 2));
        }
        let often = now.wrapping_sub(newcomer.at.get()) <= OFTEN;
        let times = if often { (times + 1).min(TIMES_MASK) } else { 1 };
        newcomer.who.set(name | times);
        newcomer.at.set(now);
    }

    fn send_often(&self, mailbox: u32, source: &Address) -> bool {
        self.find(mailbox, source).2 >= PAYS_TIMES
    }

    /// Where it is noted, under which name, and how often in turn it has sent often.
    fn find(&self, mailbox: u32, source: &Address) -> (&'static Newcomer, u32, u32) {
        let hash = hash(source);
        let newcomer = &self.0[(hash ^ (mailbox as usize).wrapping_mul(31)) % NEWCOMERS];
        let (name, who) = ((hash as u32 + 1) << TIMES_MASK.count_ones(), newcomer.who.get());
        (newcomer, name, if who & !TIMES_MASK == name { who & TIMES_MASK } else { 0 })
    }
}

/// Values of `Mailbox::shown`. A lane's is the one that brought the last message.
pub const NONE: u32 = 0;
pub const KERNEL: u32 = 1;
pub const LANE: u32 = 2;

const COLD: u32 = 1;
const HOT: u32 = 2;
/// Only what it still holds is taken.
const CLOSED: u32 = 3;

// SAFETY: atomics only; zero is the empty state.
#[allow(unsafe_code)]
unsafe impl Zeroed for Mailbox {}
// SAFETY: atomics only; zero is the empty state.
#[allow(unsafe_code)]
unsafe impl Zeroed for Inlet {}
// SAFETY: atomics only; zero is no mapping.
#[allow(unsafe_code)]
unsafe impl Zeroed for Mapping {}
// SAFETY: numbers, of which 0 is one.
#[allow(unsafe_code)]
unsafe impl Zeroed for Newcomer {}

pub struct Inlets {
    /// By the numbers of the sockets' ends.
    mailboxes: Pool<Mailbox>,
    inlets: Pool<Inlet>,
    /// The highest number of a lane that there was here.
    highest: &'static [P32],
    mappings: &'static [Mapping],
    newcomers: Newcomers,
}

impl Inlets {
    pub fn map(sockets: u32) -> Sys<Inlets> {
        Ok(Inlets {
            mailboxes: Pool::map(sockets as usize)?,
            inlets: Pool::map(INLET_COUNT as usize)?,
            highest: map::private_table(1)?,
            mappings: map::private_table(INLET_COUNT as usize)?,
            newcomers: Newcomers(map::private_table(NEWCOMERS)?),
        })
    }

    fn get(&self, index: u32) -> &'static Inlet {
        self.inlets.get(index)
    }

    fn mapping(&self, index: u32) -> &'static Mapping {
        &self.mappings[(index % INLET_COUNT) as usize]
    }

    /// Is it a lane of this mailbox, as far as this process knows?
    #[inline(always)]
    fn belongs(&self, mailbox: &Mailbox, index: u32) -> bool {
        index != 0 && self.mapping(index).mailbox.get() == self.mailboxes.index_of(mailbox)
    }

    /// The lane of an inlet of this mailbox, if this process has it mapped.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn lane(&self, mailbox: &Mailbox, index: u32) -> Option<Lane> {
        let mapping = self.mapping(index);
        let base = mapping.base.load(Ordering::Relaxed);
        if base == 0 || !self.belongs(mailbox, index) {
            return None;
        }
        let geometry = LaneGeometry {
            slot_count: mapping.slot_count.get() as usize,
            ring_bytes: mapping.ring_bytes.get() as usize,
        };
        // SAFETY: mapped with this size by `add`, in this process or before a fork of it; unmapped only behind the receive lock, which the
        // caller holds.
        let area = unsafe { Area::new(base as *mut u8, mapping.bytes.get() as usize) };
        Some(Lane::new(area, 0, geometry))
    }

    /// This process has nothing to do with an inlet any more.
    fn forget(&self, index: u32) {
        self.unmap(index);
        self.mapping(index).mailbox.set(0);
        self.inlets.give(index);
    }

    /// A socket that was just given an end has a mailbox that nobody else has. False if it can't be.
    pub fn begin(&self, socket: &Socket) -> bool {
        let begins = age().is_some_and(|age| self.mailboxes.go_along(socket.end_index(), age));
        if begins {
            self.mailboxes.get(socket.end_index()).forget();
        }
        begins
    }

    pub fn part_all(&self, age: u32) {
        self.inlets.part(age);
        self.mailboxes.part(age);
    }

    /// Takes this process's mapping away.
    #[allow(unsafe_code)]
    fn unmap(&self, index: u32) {
        let mapping = self.mapping(index);
        let (base, bytes) = (mapping.base.load(Ordering::Relaxed), mapping.bytes.get() as usize);
        mapping.base.store(0, Ordering::Relaxed);
        if base != 0 {
            if let Some(tables) = crate::socket::table::tables() {
                budget::release(tables, bytes);
            }
            // SAFETY: a whole mapping of ours; users hold the receive lock, as our caller does, and no longer find it.
            unsafe { map::unmap(Area::new(base as *mut u8, bytes)) };
        }
    }
}

#[inline(always)]
pub fn words<'a>(lane: &Lane) -> &'a Words {
    use ringlet_core::mapped::Mapped;
    lane.area().at(switch::WORDS_OFFSET)
}

impl Inlet {
    pub fn source(&self) -> Address {
        Address { ip: whole(&self.ip), port: self.port.get() as u16 }
    }
}

/// A message was taken (or peeked at): its length, how much the buffers held, and who sent it.
pub struct Got {
    pub len: usize,
    pub copied: usize,
    pub source: Address,
}

/// What a look at the lanes found.
pub enum Found {
    Message(Got),
    /// A message, before which what the kernel has comes first.
    KernelFirst,
    Nothing,
}

impl Mailbox {
    /// What it knows of an earlier socket's messages. (There are no lanes.)
    fn forget(&self) {
        for word in [&self.seen, &self.taken, &self.seen_before, &self.taken_before] {
            word.set(0);
        }
        for word in [&self.turned, &self.rests_until] {
            word.set(0);
        }
        for word in [&self.rested, &self.asleep, &self.at_once, &self.still, &self.shown] {
            word.set(0);
        }
    }

    #[inline(always)]
    pub fn has_lanes(&self) -> bool {
        // ORDER: SeqCst; pairs with `add`, whose caller looks for native receivers afterwards: either it sees the one who asks here, or
        // that one sees the lane.
        self.first.load(Ordering::SeqCst) != 0
    }

    /// Is there a lane by which more may come?
    pub fn is_open(&self, all: &Inlets) -> bool {
        self.all_lanes(all).any(|index| all.get(index).state.get() != CLOSED)
    }

    pub fn is_full(&self) -> bool {
        self.lanes.get() >= LANES_MAX_COUNT
    }

    fn hot(&self) -> impl Iterator<Item = u32> {
        self.hot[..self.hot_count() as usize].iter().map(P32::get)
    }

    pub fn hot_count(&self) -> u32 {
        self.hot_count.get().min(HOT_COUNT as u32)
    }

    /// Is there a message in a lane that is looked at?
    pub fn ready(&self, all: &Inlets) -> bool {
        self.hot()
            .any(|index| all.lane(self, index).is_some_and(|lane| all.get(index).rx.ready(&lane)))
    }

    /// Grows with each message that comes by a lane, taken or not.
    pub fn arrivals(&self, all: &Inlets) -> u64 {
        self.hot()
            .fold(self.retired.get(), |sum, index| sum.wrapping_add(published(all, self, index)))
    }

    /// The length of the message that `take` would find, which is then taken first.
    pub fn next_len(&self, all: &Inlets, kernel_empty: bool) -> Option<usize> {
        let count = self.hot_count() as usize;
        let last = (self.last.get() as usize).min(count);
        (last..count).chain(0..last).find_map(|at| {
            let index = self.hot[at].get();
            let (inlet, lane) = (all.get(index), all.lane(self, index)?);
            let front = front(inlet, &lane)?;
            let history = &words(&lane).history;
            if !inlet.order.may_take(history, inlet.taken.get(), front.before, kernel_empty) {
                return None;
            }
            self.last.set(at as u32);
            Some(front.len())
        })
    }

    /// Was the next message of this lane sent before what the kernel has of its sender?
    pub fn lane_comes_first(&self, all: &Inlets, index: u32) -> bool {
        let inlet = all.get(index);
        all.lane(self, index).is_some_and(|lane| {
            let history = &words(&lane).history;
            front(inlet, &lane).is_some_and(|front| inlet.order.is_first(history, front.before))
        })
    }

    /// The kernel has brought a datagram of this lane's sender.
    pub fn came_by_kernel(&self, all: &Inlets, index: u32) {
        let inlet = all.get(index);
        inlet.order.came();
        let often = self.idle(inlet) <= OFTEN;
        inlet.often.set(if often { inlet.often.get().saturating_add(1) } else { 0 });
        inlet.active_at.set(self.seen.get() as u32);
    }

    /// The kernel has brought a datagram of somebody without a lane.
    pub fn heard_newcomer(&self, all: &Inlets, source: &Address) {
        let now = self.strange.add(1).wrapping_add(self.seen.get() as u32);
        all.newcomers.heard(all.mailboxes.index_of(self), source, now);
    }

    /// Would a lane for this sender pay?
    pub fn pays(&self, all: &Inlets, source: &Address) -> bool {
        self.lanes.get() < FREELY || all.newcomers.send_often(all.mailboxes.index_of(self), source)
    }

    /// The next message of the lane that brought the last one, or of another. `kernel_empty`: the kernel was just found to have nothing.
    #[inline]
    pub fn take(
        &self,
        all: &Inlets,
        to: &mut ringlet_core::memory::Buffers,
        keep: bool,
        kernel_empty: bool,
    ) -> Found {
        let count = self.hot_count() as usize;
        let mut at = self.last.get() as usize;
        let mut kernel_first = false;
        for _ in 0..count {
            if at >= count {
                at = 0;
            }
            let index = self.hot[at].get();
            let (inlet, lane) = (all.get(index), all.lane(self, index));
            let front = lane.as_ref().and_then(|lane| front(inlet, lane));
            let (Some(lane), Some(front)) = (lane, front) else {
                at += 1;
                continue;
            };
            let history = &words(&lane).history;
            if !inlet.order.may_take(history, inlet.taken.get(), front.before, kernel_empty) {
                kernel_first = true;
                at += 1;
                continue;
            }
            let len = front.len();
            let copied = front.message.copy_rest_to(&lane, HEAD_BYTES, to);
            if !keep {
                inlet.rx.release(&lane, front.message);
                inlet.taken.add(1);
                self.taken.add(1);
            }
            inlet.active_at.set(self.seen.get() as u32);
            self.last.set(at as u32);
            self.shown.set(if keep { LANE } else { NONE });
            if !keep {
                self.count(all);
            }
            return Found::Message(Got { len, copied, source: inlet.source() });
        }
        if kernel_first { Found::KernelFirst } else { Found::Nothing }
    }

    pub fn find(&self, all: &Inlets, source: &Address) -> Option<u32> {
        let ip = halves(&source.ip);
        let mut index = self.buckets[hash(source) % BUCKET_COUNT].get();
        for _ in 0..LANES_MAX_COUNT {
            if !all.belongs(self, index) {
                break;
            }
            let inlet = all.get(index);
            let same = inlet.ip[0].get() == ip[0] && inlet.ip[1].get() == ip[1];
            if same && inlet.port.get() == u32::from(source.port) {
                return Some(index);
            }
            index = inlet.next_in_bucket.get();
        }
        None
    }

    /// A new lane, mapped by this process.
    pub fn add(
        &self,
        all: &Inlets,
        source: &Address,
        inode: u32,
        area: Area,
        geometry: LaneGeometry,
    ) -> bool {
        let Some(index) = age().and_then(|age| all.inlets.take(age)) else { return false };
        let (inlet, mapping) = (all.get(index), all.mapping(index));
        for (word, half) in inlet.ip.iter().zip(halves(&source.ip)) {
            word.set(half);
        }
        inlet.port.set(u32::from(source.port));
        inlet.inode.set(inode);
        inlet.rx.reset();
        inlet.taken.set(0);
        inlet.often.set(0);
        inlet.active_at.set((self.seen.get() as u32).wrapping_sub(COOL_AFTER));
        inlet.order.reset();
        inlet.checked_ns.set(sys::now_ns());
        inlet.state.set(COLD);
        mapping.slot_count.set(geometry.slot_count as u32);
        mapping.ring_bytes.set(geometry.ring_bytes as u64);
        mapping.bytes.set(area.len() as u64);
        mapping.mailbox.set(all.mailboxes.index_of(self));
        all.highest[0].set(all.highest[0].get().max(index));
        mapping.base.store(area.base() as usize, Ordering::Relaxed);
        let bucket = &self.buckets[hash(source) % BUCKET_COUNT];
        inlet.next_in_bucket.set(bucket.get());
        bucket.set(index);
        inlet.next.set(self.first.load(Ordering::Relaxed));
        self.lanes.add(1);
        // ORDER: SeqCst; pairs with `has_lanes`.
        self.first.store(index, Ordering::SeqCst);
        true
    }

    /// Lanes cost more than they save, for now. (One alone costs little.)
    fn rests(&self) -> bool {
        self.lanes.get() > 1 && self.seen.get() < self.rests_until.get()
    }

    /// Something came through the kernel from the sender of this lane, so what it sends to us arrives: from now on by the lane. True if it
    /// did not before.
    pub fn heat(&self, all: &Inlets, index: u32, sleepers: bool) -> bool {
        let inlet = all.get(index);
        if self.rests() {
            return false;
        }
        let Some(lane) = all.lane(self, index).filter(|_| inlet.state.get() == COLD) else {
            return false;
        };
        let crowded = self.lanes.get() as usize > HOT_COUNT;
        if crowded && inlet.often.get() < OFTEN_TIMES {
            return false;
        }
        let full = self.hot_count() as usize == HOT_COUNT;
        if full && !self.cool_one(all, |other| self.idle(other) > OFTEN * OFTEN_TIMES) {
            return false;
        }
        let count = self.hot_count() as usize;
        let Some(place) = self.hot.get(count) else { return false };
        inlet.state.set(HOT);
        inlet.active_at.set(self.seen.get() as u32);
        place.set(index);
        self.hot_count.set(count as u32 + 1);
        self.retired.add(published(all, self, index).wrapping_neg());
        if sleepers {
            self.turn_all(all, switch::KERNEL);
        } else if !self.is_asleep() {
            switch::turn(&words(&lane).receiver.path, switch::RING);
        }
        true
    }

    fn idle(&self, inlet: &Inlet) -> u32 {
        (self.seen.get() as u32).wrapping_sub(inlet.active_at.get())
    }

    /// A message was received. Now and then: lanes that have brought nothing for long are looked at no more; nor is any where they cost more than they
    /// save. (Who sleeps before each message turns all of them twice for it, and none brings it.)
    pub fn count(&self, all: &Inlets) {
        if !self.seen.add(1).is_multiple_of(COOL_EVERY) {
            return;
        }
        let hot = u64::from(self.hot_count());
        let seen = self.seen.get().wrapping_sub(self.seen_before.get());
        let taken = self.taken.get().wrapping_sub(self.taken_before.get());
        let cost = self.turned.get() + seen * hot / LOOKS_OF_A_TURN;
        self.turned.set(0);
        self.seen_before.set(self.seen.get());
        self.taken_before.set(self.taken.get());
        if hot == 0 || self.lanes.get() == 1 {
            return;
        }
        if cost > taken * SAVED_TURNS + seen * WORTH_A_REST && self.seen.get() >= TRIED_FIRST {
            while self.cool_one(all, |_| true) {}
            self.rests_until.set(self.seen.get() + (COOL_EVERY << self.rested.get()));
            self.rested.set((self.rested.get() + 1).min(REST_DOUBLINGS));
        } else {
            if taken > 0 {
                self.rested.set(0);
            }
            self.cool_one(all, |inlet| self.idle(inlet) > COOL_AFTER);
        }
    }

    /// Turns the lane that was idle for longest to the kernel, of those that `may` be. False if there is none.
    fn cool_one(&self, all: &Inlets, may: impl Fn(&Inlet) -> bool) -> bool {
        let hot = self.hot().filter(|&index| {
            let inlet = all.get(index);
            inlet.state.get() == HOT
                && may(inlet)
                && all.lane(self, index).is_none_or(|lane| !inlet.rx.ready(&lane))
        });
        let Some(index) = hot.max_by_key(|&index| self.idle(all.get(index))) else { return false };
        if let Some(lane) = all.lane(self, index) {
            let path = &words(&lane).receiver.path;
            switch::turn(path, switch::KERNEL);
            let quiet = until_quiet(&lane);
            if !quiet || all.get(index).rx.ready(&lane) {
                switch::turn(path, self.turned());
                return false;
            }
        }
        all.get(index).state.set(COLD);
        all.get(index).often.set(0);
        self.remove_hot(all, index);
        true
    }

    fn remove_hot(&self, all: &Inlets, index: u32) {
        let count = self.hot_count() as usize;
        if let Some(at) = self.hot[..count].iter().position(|hot| hot.get() == index) {
            let last = count - 1;
            self.hot[at].set(self.hot[last].get());
            self.hot_count.set(last as u32);
            if self.last.get() as usize == last {
                self.last.set(at as u32);
            }
            self.retired.add(published(all, self, index));
        }
    }

    /// Turns all lanes to the kernel, for somebody who is about to sleep. True if there is something to take instead; `at_once`: it may be
    /// that he sleeps in spite of that.
    pub fn turn_to_kernel(&self, all: &Inlets, at_once: bool) -> bool {
        if self.hot_count() == 0 {
            // (One that becomes hot meanwhile is turned there by whoever makes it so: `heat`.)
            return false;
        }
        if !self.turn_all(all, switch::KERNEL) {
            // ORDER: SeqCst; what was taken meanwhile is given back before the look at `busy`; pairs with `switch::claim`, whose sender
            // may publish while something is not taken.
            fence(Ordering::SeqCst);
        }
        for at in (0..self.hot_count() as usize).rev() {
            let index = self.hot[at].get();
            if let Some(lane) = all.lane(self, index)
                && all.get(index).state.get() == HOT
                && !until_quiet(&lane)
            {
                withdraw(all.get(index), &lane);
            }
        }
        let ready = self.ready(all);
        self.still.set(u32::from(!ready));
        if ready && at_once {
            self.at_once.set(1);
            for index in self.hot().filter(|&index| all.get(index).state.get() == HOT) {
                if let Some(lane) = all.lane(self, index) {
                    switch::turn(&words(&lane).receiver.path, switch::KERNEL_AT_ONCE);
                }
            }
        }
        ready
    }

    /// Nobody sleeps any more: the lanes are looked at again. True if they were not.
    pub fn turn_to_ring(&self, all: &Inlets) -> bool {
        self.turn_all(all, switch::RING)
    }

    /// False: they were turned that way.
    fn turn_all(&self, all: &Inlets, to: u32) -> bool {
        if self.is_asleep() == (to != switch::RING) {
            return false;
        }
        self.asleep.set(u32::from(to != switch::RING));
        self.at_once.set(0);
        self.still.set(0);
        self.turned.add(u64::from(self.hot_count()));
        for index in self.hot().filter(|&index| all.get(index).state.get() == HOT) {
            if let Some(lane) = all.lane(self, index) {
                switch::turn(&words(&lane).receiver.path, to);
            }
        }
        true
    }

    pub fn is_asleep(&self) -> bool {
        self.asleep.is()
    }

    /// Are the lanes empty as long as they are not turned back? (Those that become hot meanwhile are, too.)
    pub fn is_still(&self) -> bool {
        self.asleep.is() && self.still.is()
    }

    /// Where the hot lanes are turned, as this process knows: the words themselves are in the senders' memory too.
    fn turned(&self) -> u32 {
        match (self.asleep.is(), self.at_once.is()) {
            (false, _) => switch::RING,
            (true, false) => switch::KERNEL,
            (true, true) => switch::KERNEL_AT_ONCE,
        }
    }

    /// No more comes by this lane than what is in it.
    pub fn close(&self, all: &Inlets, index: u32) {
        let inlet = all.get(index);
        let Some(lane) = all.lane(self, index) else { return self.free(all, index) };
        if inlet.state.get() != CLOSED {
            withdraw(inlet, &lane);
        }
        if !inlet.rx.ready(&lane) {
            self.free(all, index);
        }
    }

    fn all_lanes<'a>(&'a self, all: &'a Inlets) -> impl Iterator<Item = u32> + 'a {
        let mut next = self.first.load(Ordering::Relaxed);
        let found = core::iter::from_fn(move || {
            let index = next;
            next = all.get(index).next.get();
            all.belongs(self, index).then_some(index)
        });
        found.take(LANES_MAX_COUNT as usize)
    }

    pub fn close_all(&self, all: &Inlets) {
        for index in self.all_lanes(all) {
            self.close(all, index);
        }
    }

    /// Ends all lanes, with what they hold.
    pub fn free_all(&self, all: &Inlets) {
        for index in self.all_lanes(all) {
            if let Some(lane) = all.lane(self, index) {
                switch::turn(&words(&lane).receiver.path, switch::CLOSED);
            }
            self.free(all, index);
        }
        self.part(all);
    }

    /// This process only: others of the family may still hold the socket, and may have ended lanes that we have mapped.
    pub fn part(&self, all: &Inlets) {
        for index in (1..=all.highest[0].get()).filter(|&index| all.belongs(self, index)) {
            all.forget(index);
        }
    }

    /// Lanes that are over and empty go.
    pub fn tidy(&self, all: &Inlets) {
        for at in (0..self.hot_count() as usize).rev() {
            let index = self.hot[at].get();
            let inlet = all.get(index);
            let over = match all.lane(self, index) {
                None => inlet.state.get() == CLOSED,
                Some(lane) => {
                    let left = words(&lane).history.left.load(Ordering::Acquire) != 0;
                    // In this order: what arrives in between is neither corrupt nor lost.
                    let something = inlet.rx.ready(&lane);
                    front(inlet, &lane).is_none()
                        && (left || something || inlet.state.get() == CLOSED)
                }
            };
            if over {
                self.free(all, index);
            }
        }
    }

    fn free(&self, all: &Inlets, index: u32) {
        if !all.belongs(self, index) {
            return;
        }
        let inlet = all.get(index);
        self.remove_hot(all, index);
        let unlink = |first: u32, next: &dyn Fn(&Inlet) -> &P32| -> u32 {
            // The list without `index`; its new head.
            if first == index {
                return next(inlet).get();
            }
            let mut at = first;
            for _ in 0..LANES_MAX_COUNT {
                if !all.belongs(self, at) {
                    break;
                }
                let link = next(all.get(at));
                if link.get() == index {
                    link.set(next(inlet).get());
                    break;
                }
                at = link.get();
            }
            first
        };
        let bucket = &self.buckets[hash(&inlet.source()) % BUCKET_COUNT];
        bucket.set(unlink(bucket.get(), &|inlet| &inlet.next_in_bucket));
        let first = unlink(self.first.load(Ordering::Relaxed), &|inlet| &inlet.next);
        self.first.store(first, Ordering::SeqCst);
        self.lanes.add(u32::MAX);
        inlet.state.set(0);
        all.forget(index);
    }

    /// A lane that was not checked since then, to see whether its sender still lives.
    pub fn unchecked_since(&self, all: &Inlets, ns: u64) -> Option<(u32, &'static Inlet)> {
        self.all_lanes(all)
            .map(|index| (index, all.get(index)))
            .find(|(_, inlet)| inlet.checked_ns.get() < ns)
    }
}

/// The position up to which a lane has messages.
fn published(all: &Inlets, mailbox: &Mailbox, index: u32) -> u64 {
    all.lane(mailbox, index).map_or(0, |lane| all.get(index).rx.published_after(&lane, 0))
}

/// The next message of a lane, and how many its sender had sent through the kernel before.
struct Front {
    message: Message,
    before: u64,
}

impl Front {
    fn len(&self) -> usize {
        self.message.len() - HEAD_BYTES
    }
}

#[inline(always)]
#[allow(unsafe_code)]
fn front(inlet: &Inlet, lane: &Lane) -> Option<Front> {
    let Next::Message(message) = inlet.rx.peek(lane) else { return None };
    if message.len() < HEAD_BYTES {
        return None;
    }
    let mut head = [0; HEAD_BYTES];
    // SAFETY: `head` is valid for its length.
    unsafe { message.read(lane, 0, head.as_mut_ptr(), HEAD_BYTES) };
    Some(Front { message, before: u64::from_le_bytes(head) })
}

/// No more comes by this lane than what is in it; a sender that has not finished what it began is told so.
fn withdraw(inlet: &Inlet, lane: &Lane) {
    switch::turn(&words(lane).receiver.path, switch::CLOSED);
    inlet.rx.withdraw(lane);
    inlet.state.set(CLOSED);
}

/// Waits out a sender that is between its look at the path and its publish.
fn until_quiet(lane: &Lane) -> bool {
    for look in 0..BUSY_LOOKS {
        if switch::is_quiet(&words(lane).sender.busy) {
            return true;
        }
        if look % 256 == 255 {
            sys::sched_yield();
        } else {
            core::hint::spin_loop();
        }
    }
    false
}

fn age() -> Option<u32> {
    crate::socket::table::tables().map(|tables| tables.process().age.get())
}

/// The mailbox of a socket's end.
#[inline(always)]
pub fn of(socket: &Socket) -> Option<(&'static Inlets, &'static Mailbox)> {
    let all = INLETS.get().filter(|_| socket.has_datagrams())?;
    Some((all, all.mailboxes.get(socket.end_index())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender(n: u32) -> Address {
        let mut ip = [0; 16];
        ip[12..].copy_from_slice(&n.to_be_bytes());
        Address { ip, port: 7 }
    }

    #[test]
    fn who_sends_often_is_known_by_that() {
        const MANY: u32 = 2 * OFTEN;
        let newcomers =
            Newcomers((0..NEWCOMERS).map(|_| Newcomer::default()).collect::<Vec<_>>().leak());
        let mut now = 0;
        let mut hear = |n: u32| {
            newcomers.heard(3, &sender(n), now);
            now += 1;
        };
        let often = |n: u32| newcomers.send_often(3, &sender(n));
        // Each of many in its turn.
        (0..100).for_each(|_| (0..MANY).for_each(&mut hear));
        assert!(!(0..MANY).any(often));
        // One of them as every second, and then seldom again.
        for n in 0..PAYS_TIMES {
            assert!(!often(1), "after {n}");
            hear(1);
            hear(2 + n);
        }
        assert!(often(1) && !often(2));
        // (To this receiver.)
        assert!(!newcomers.send_often(4, &sender(1)));
        (0..MANY).for_each(&mut hear);
        hear(1);
        assert!(!often(1));
        // A burst is often.
        (0..PAYS_TIMES).for_each(|_| hear(MANY));
        assert!(often(MANY));
    }
}
