//! The tables of sets and of what is registered in them, as data.

use crate::lock::{Held, Lock};
use crate::once::Once;
use crate::plain::{FreeList, P32, P64, Published};
use crate::socket::table::{Known, Socket, Tables, lookup, tables};
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};
use ringlet_core::watch::{Rest, Told};
use ringlet_linux::map::{self, Table, Zeroed};
use ringlet_linux::sys::Sys;

const SET_COUNT: u32 = 4096;
const WATCH_COUNT: u32 = 1 << 17;
/// Entries that lie with the small tables (`map::Table`).
const NEAR_SET_COUNT: usize = 3;
const NEAR_WATCH_COUNT: usize = 8;

pub(super) const EPOLLIN: u32 = libc::EPOLLIN as u32;
pub(super) const EPOLLOUT: u32 = libc::EPOLLOUT as u32;
pub(super) const EPOLLPRI: u32 = libc::EPOLLPRI as u32;
pub(super) const EPOLLRDHUP: u32 = libc::EPOLLRDHUP as u32;

/// How a connection ends.
pub(super) const ENDS: u32 = EPOLLRDHUP | (libc::EPOLLHUP | libc::EPOLLERR) as u32;
pub(super) const EPOLLREAD: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
pub(super) const EPOLLET: u32 = libc::EPOLLET as u32;
pub(super) const EPOLLONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub(super) const EPOLLEXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// What the kernel tells of, beside neighbours, and is none of ours: the program's data, and when that was. By level, it is in the kernel's
/// list since then.
#[derive(Default)]
#[repr(C)]
pub(super) struct Other {
    pub(super) data: P64,
    pub(super) linked: P64,
}

/// So many are known; these find room between two of ours.
pub(super) const OTHERS_MOST: usize = 8;

/// An epoll set of this process.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Set {
    pub(super) lock: Lock,
    pub(super) epfd: P32,
    /// Descriptors of this process that name it.
    pub(super) names: P32,
    /// Attached connections in it; while there is none, every wait is the kernel's.
    pub(super) adopted: AtomicU32,
    /// How many sets this entry was before (upper half); and threads inside a wait of the kernel's alone in this one.
    natives: AtomicU64,
    /// Our context for it once it had an adopted connection; its eventfd is registered. Set under the lock, read without: whoever finds
    /// it rings that eventfd. (So with `second` and `reserved`.)
    pub(super) context: Published,
    /// The context of a thread that is home to connections which came into the set later: armed with it when that very thread waits.
    /// (Otherwise its thread may sleep elsewhere, and drain what was rung for us.)
    pub(super) second: Published,
    /// It is itself waited on (in another set, or by poll): it stays armed, by this context.
    pub(super) nested: P32,
    pub(super) armed: P32,
    /// What had come when it was last made ready or not for who waits on it (`nested::arrivals`).
    pub(super) settled: P64,
    /// Other sets are in it.
    pub(super) holds_sets: P32,
    pub(super) hot_first: P32,
    pub(super) hot_last: P32,
    pub(super) hot_count: P32,
    /// Waits that found something ready; and those that found nothing, of which one in so much time counts (`harvest::nothing_found`), when the
    /// last one did.
    pub(super) fruitful: P32,
    pub(super) fruitless: P32,
    pub(super) fruitless_at: P64,
    /// The kernel is asked first at the next wait: rings have filled the last one.
    pub(super) kernel_turn: P32,
    /// The last harvest reported something by level.
    pub(super) stays_ready: P32,
    /// Watched connections whose bytes come by the kernel. Beside these, what rings hold is told in the kernel's order (`in_order`).
    pub(super) neighbours: AtomicU32,
    /// Waits since the kernel told of one.
    pub(super) quiet: P32,
    /// Therefore the set's context is armed between waits too.
    pub(super) beside: P32,
    /// Counts what the kernel told of us, beside neighbours; of the last such turn something had no room.
    pub(super) turn: P32,
    pub(super) left_over: P32,
    /// Waits beside neighbours since one looked at everything.
    pub(super) since_all: P32,
    pub(super) kernel_asked: P64,
    /// Counts the questions to the kernel, and waits: what it has told is as of the last one (`look::told_now`). And so many
    /// waits are to look there soon, since it has told of datagrams.
    asks: P32,
    datagrams_told: P32,
    /// The last report: what was reported by level is in the list since then.
    pub(super) told_at: P64,
    pub(super) others: [Other; OTHERS_MOST],
    pub(super) written: P32,
    /// A signal handler could not put a watch on the hot list, or another process took what was for us: all are to be put there.
    pub(super) all_hot: P32,
    /// A watch rests, or did, whose ring is full (`harvest::look_at_full`); and when these were last looked at.
    pub(super) full: P32,
    pub(super) full_looked_ns: P64,
    /// Who held the lock has left the list in the midst of a change: it is to be made anew.
    pub(super) left: P32,
    /// A thread has taken a wake-up while others slept, and may return without another look.
    pub(super) taken: P32,
    /// The context's bell that is rung by name is registered too.
    pub(super) named: P32,
    /// A context whose eventfd is registered, for when there will be an adopted connection: a child by fork must be able to ring it.
    pub(super) reserved: Published,
    /// The process whose eventfd is registered; and if that is not this one, but one before a fork, that eventfd.
    pub(super) keeper: P32,
    pub(super) elder: P32,
    /// It is of a process before a fork; without an eventfd of that one's, this is ours that wakes it (`wake_by_mark`), and whom.
    pub(super) inherited: P32,
    pub(super) waker: P32,
    pub(super) waker_of: P32,
    /// Another process has it by a message: all that is in it stays on the kernel.
    pub(super) given: P32,
    pub(super) next_free: P32,
}

/// One descriptor of a followed socket in one set.
///
/// A socket's list of them only grows, and is taken apart when the socket goes: so whoever reads it needs no lock (some hold a set's, or
/// the connection's). An entry that is registered nowhere stays in it, for the next registration.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Watch {
    /// 0: registered nowhere. Set behind all that the registration says, since who walks the socket's list has no lock. What changes later
    /// (`events`, `data`, `disabled` and what was seen) is behind the set's lock, and without it a hint.
    pub(super) set: Published,
    pub(super) socket: P32,
    pub(super) fd: P32,
    pub(super) events: P32,
    pub(super) data: P64,
    /// Edge-triggered: what was last reported (ring position, bytes that the kernel had received, room), and whether it is new.
    pub(super) seen: Told,
    /// Of which of the connection's segments that position is (`Socket::epoch`).
    pub(super) seen_epoch: P32,
    pub(super) seen_received: P64,
    /// Up to which record of the ring its set was settled, if that is nested.
    pub(super) settled: P64,
    pub(super) seen_room: P32,
    pub(super) fresh: P32,
    /// One-shot, and shot.
    pub(super) disabled: P32,
    /// Removed by the program, but still registered in the kernel's set.
    pub(super) dormant: P32,
    pub(super) adopted: P32,
    pub(super) hot: P32,
    pub(super) hot_next: P32,
    pub(super) hot_previous: P32,
    /// The counts of its set's fruitful and fruitless waits when it was last ready.
    pub(super) active_at: P32,
    pub(super) active_at_fruitless: P32,
    /// Next watch of the same socket; next free one.
    pub(super) next: AtomicU32,
    pub(super) next_free: P32,
    /// Its socket has gone, but it could not be taken off the hot list: whoever meets it there frees it.
    pub(super) gone: P32,
    /// What the kernel has told of it since the last report, and which ends of the connection were reported.
    pub(super) told: P32,
    /// In answer to which of the set's questions (`Set::asks`).
    told_in: P32,
    pub(super) seen_ends: P32,
    /// Its connection is a neighbour of what rings hold: its bytes come by the kernel.
    pub(super) neighbour: P32,
    /// In which of the set's turns it was reported; and whether it is to be looked at although the kernel tells nothing of it.
    pub(super) turn: P32,
    pub(super) again: P32,
    /// Its place in the list of what is ready: when it was put there by a report, or as it was asked for. 0: what comes next puts it there.
    pub(super) linked: P64,
    /// So that the kernel tells of it as long as it is readable (`our_event`).
    by_level: P32,
    /// Under whose mark it is registered in the kernel's set: ours, or that of a process before a fork, which then takes what comes of it. 0: under
    /// the program's data.
    pub(super) marked: P32,
    /// It is not on the hot list, and counts on a doorbell.
    pub(super) rests: Rest,
}

/// A set as a wait has found it. KERNEL: a wait in a set that another thread closes goes on, in what nobody can name any more. The entry may be the next
/// set's by then, in which that wait has nothing to take.
#[derive(Clone, Copy)]
pub struct Visit {
    set: &'static Set,
    index: u32,
    pub(super) life: u32,
}

impl core::ops::Deref for Visit {
    type Target = Set;
    #[inline(always)]
    fn deref(&self) -> &Set {
        self.set
    }
}

impl Visit {
    #[inline(always)]
    pub fn of(index: u32) -> Visit {
        let set = at(index);
        Visit { set, index, life: set.life() }
    }

    pub fn index(&self) -> u32 {
        self.index
    }

    /// Was the set closed? Without its lock, it may be so just now.
    #[inline(always)]
    pub(super) fn is_over(&self) -> bool {
        self.set.life() != self.life
    }

    /// As of the set itself; but if that was closed, `None`. (As long as it is held, it is not.)
    #[inline(always)]
    pub(super) fn take(&self) -> Option<Held<'static>> {
        self.set.take().filter(|_| !self.is_over())
    }

    #[inline(always)]
    pub(super) fn take_first(&self) -> Option<Held<'static>> {
        self.set.take_first().filter(|_| !self.is_over())
    }

    /// One native wait more. False, and it is not counted, if the set was closed.
    pub(super) fn enter_native(&self) -> bool {
        count_native(self.index, self.life)
    }

    pub(super) fn leave_native(&self) {
        leave_native(self.index, self.life);
    }
}

const LIFE_SHIFT: u32 = u32::BITS;

/// Of what was told before there were any.
pub(super) const NO_QUESTION: u32 = 0;
/// After the kernel has told of datagrams, so many waits look there soon for more.
const TOLD_WAITS: u32 = 8;

impl Watch {
    /// What the kernel has told of it is in answer to this question.
    pub(super) fn told_in(&self, question: u32) {
        self.told_in.set(question);
    }

    /// Is it in answer to the question that was asked last?
    pub(super) fn is_told_now(&self) -> bool {
        at(self.set.get()).is_asked(self.told_in.get())
    }

    pub(super) fn is_by_level(&self) -> bool {
        self.by_level.is()
    }

    /// How it is registered in the kernel's set, about to be or by now.
    pub(super) fn registered(&self, by_level: bool) {
        self.by_level.set(u32::from(by_level));
    }
}

impl Set {
    #[inline(always)]
    fn life(&self) -> u32 {
        // ORDER: Relaxed; changed under the lock, and a hint without that.
        (self.natives.load(Ordering::Relaxed) >> LIFE_SHIFT) as u32
    }

    /// What was told before is not as of now any more.
    pub(super) fn begin_question(&self) -> u32 {
        // (Never `NO_QUESTION`.)
        let question = self.asks.get().wrapping_add(1) | 1 << 31;
        self.asks.set(question);
        question
    }

    /// Is this the question that was asked last?
    fn is_asked(&self, question: u32) -> bool {
        question != NO_QUESTION && question == self.asks.get()
    }

    /// The kernel has told of datagrams.
    pub(super) fn datagrams_came(&self) {
        self.datagrams_told.set(TOLD_WAITS);
    }

    /// Did it lately? A wait begins.
    pub(super) fn datagrams_come(&self) -> bool {
        let told = self.datagrams_told.get();
        self.datagrams_told.set(told.saturating_sub(1));
        told != 0
    }

    /// It is closed: who waits in it stays there, and is nothing to the next one. Set lock held.
    pub(super) fn end_life(&self) {
        let next = |word: u64| Some(((word >> LIFE_SHIFT) + 1) << LIFE_SHIFT);
        let _ = self.natives.fetch_update(Ordering::SeqCst, Ordering::Relaxed, next);
    }

    /// Is any thread inside a wait of the kernel's alone?
    pub fn has_natives(&self) -> bool {
        // ORDER: SeqCst; pairs with `wait::begin_native`.
        self.natives.load(Ordering::SeqCst) as u32 != 0
    }

    /// In a child by fork, where the parent's threads are not.
    pub(super) fn forget_natives(&self) {
        let none = |word: u64| (word as u32 != 0).then_some(word >> LIFE_SHIFT << LIFE_SHIFT);
        let _ = self.natives.fetch_update(Ordering::Relaxed, Ordering::Relaxed, none);
    }

    #[inline(always)]
    pub(super) fn take(&self) -> Option<Held<'_>> {
        self.lock.take().inspect(|held| self.notice(held))
    }

    /// For a wait, or a call of epoll_ctl, which has not taken it before.
    #[inline(always)]
    pub(super) fn take_first(&self) -> Option<Held<'_>> {
        self.lock.take_first().inspect(|held| self.notice(held))
    }

    #[inline(always)]
    fn notice(&self, held: &Held<'_>) {
        if held.was_left() {
            self.left.set(1);
            self.all_hot.set(1);
        }
    }
}

// SAFETY: atomics only; zero is a free entry.
#[allow(unsafe_code)]
unsafe impl Zeroed for Set {}
// SAFETY: atomics only; zero is a free entry.
#[allow(unsafe_code)]
unsafe impl Zeroed for Watch {}

struct Sets {
    sets: Table<Set>,
    watches: Table<Watch>,
    free: &'static [Free],
}

#[derive(Default)]
struct Free {
    sets: FreeList,
    watches: FreeList,
}

// SAFETY: atomics only; zero is the empty list.
#[allow(unsafe_code)]
unsafe impl Zeroed for Free {}

static SETS: Once<Sets> = Once::new();

pub(super) fn start() -> Sys<()> {
    let made = Sets {
        sets: Table::map(NEAR_SET_COUNT, SET_COUNT as usize)?,
        watches: Table::map(NEAR_WATCH_COUNT, WATCH_COUNT as usize)?,
        free: map::private_table(1)?,
    };
    let _ = SETS.set(made);
    Ok(())
}

fn all() -> &'static Sets {
    SETS.get().expect("a set exists only in the tables")
}

#[inline(always)]
pub(super) fn at(set: u32) -> &'static Set {
    all().sets.at(set as usize)
}

/// Those that were ever used.
pub(super) fn used() -> impl Iterator<Item = &'static Set> {
    SETS.get().into_iter().flat_map(|all| all.sets.entries(1..all.free[0].sets.end() as usize))
}

/// `None` when the table is full, or is not there.
pub(super) fn take() -> Option<u32> {
    let all = SETS.get()?;
    all.free[0].sets.take(SET_COUNT, |set| at(set).next_free.get())
}

pub(super) fn give(set: u32) {
    all().free[0].sets.give(set, |set, next| at(set).next_free.set(next));
}

#[inline(always)]
pub(super) fn watch_at(watch: u32) -> &'static Watch {
    all().watches.at(watch as usize)
}

/// For a number that the kernel tells.
pub(super) fn find_watch(watch: u32) -> Option<&'static Watch> {
    all().watches.get(watch as usize)
}

pub(super) fn index_of(watch: &Watch) -> u32 {
    all().watches.index_of(watch) as u32
}

pub(super) fn take_watch() -> Option<u32> {
    all().free[0].watches.take(WATCH_COUNT, |watch| watch_at(watch).next_free.get())
}

pub(super) fn give_watch(watch: u32) {
    all().free[0].watches.give(watch, |watch, next| watch_at(watch).next_free.set(next));
}

fn change_natives(index: u32, life: u32, change: impl Fn(u32) -> Option<u32>) -> bool {
    let next = |word: u64| {
        let changed = change(word as u32).filter(|_| (word >> LIFE_SHIFT) as u32 == life)?;
        Some(word >> LIFE_SHIFT << LIFE_SHIFT | u64::from(changed))
    };
    // ORDER: SeqCst; pairs with `registration::prepare`, as `wait::begin_native` says.
    at(index).natives.fetch_update(Ordering::SeqCst, Ordering::Relaxed, next).is_ok()
}

/// One native wait less, unless the set was closed meanwhile.
pub fn leave_native(index: u32, life: u32) {
    change_natives(index, life, |count| count.checked_sub(1));
}

/// One more.
pub fn count_native(index: u32, life: u32) -> bool {
    change_natives(index, life, |count| Some(count + 1))
}

/// Was it ever put into a set?
pub(super) fn watches_any(socket: &Socket) -> bool {
    socket.watches.load(Ordering::Relaxed) != 0
}

/// A set that holds a socket of ours.
pub fn first_set(socket: &Socket) -> Option<u32> {
    watches(tables()?, socket).map(|(_, watch)| watch.set.get()).next()
}

/// The registrations of a socket. See `Watch` for why this needs no lock.
pub(super) fn watches<'t>(
    tables: &'t Tables,
    socket: &Socket,
) -> impl Iterator<Item = (u32, &'t Watch)> {
    entries(tables, socket).filter(|(_, watch)| watch.set.get() != 0)
}

/// The same, and those that are registered nowhere.
fn entries<'t>(tables: &'t Tables, socket: &Socket) -> impl Iterator<Item = (u32, &'t Watch)> {
    let owner = tables.index_of(socket);
    // ORDER: Acquire, both; pairs with `link`: what the entry says of itself is there.
    let mut next = socket.watches.load(Ordering::Acquire);
    core::iter::from_fn(move || {
        let index = next;
        let watch = watch_at(index);
        // (An entry that is another's by now: our socket has gone meanwhile, and its list with it.)
        if index == 0 || watch.socket.get() != owner {
            return None;
        }
        next = watch.next.load(Ordering::Acquire);
        Some((index, watch))
    })
}

pub(super) fn find<'t>(
    tables: &'t Tables,
    socket: &Socket,
    set: u32,
    fd: i32,
) -> Option<(u32, &'t Watch)> {
    watches(tables, socket).find(|(_, watch)| watch.set.get() == set && watch.fd.get() as i32 == fd)
}

/// An entry for a new registration; the socket's list may have one. `registering` held.
pub(super) fn entry<'t>(tables: &'t Tables, socket: &Socket) -> Option<(u32, &'t Watch)> {
    if let Some(unused) =
        entries(tables, socket).find(|(_, watch)| watch.set.get() == 0 && !watch.hot.is())
    {
        return Some(unused);
    }
    let index = take_watch()?;
    let watch = watch_at(index);
    watch.set.set(0);
    watch.hot.set(0);
    watch.gone.set(0);
    watch.socket.set(tables.index_of(socket));
    link(socket, index, watch);
    Some((index, watch))
}

fn link(socket: &Socket, index: u32, watch: &Watch) {
    let mut first = socket.watches.load(Ordering::Relaxed);
    loop {
        watch.next.store(first, Ordering::Relaxed);
        // ORDER: Release; pairs with `entries`. An exchange, for a signal handler may be quicker, which needs no lock that we hold.
        match socket.watches.compare_exchange(first, index, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

pub(super) fn free(index: u32, watch: &Watch) {
    watch.socket.set(0);
    give_watch(index);
}

/// Set lock held, under which no thread takes it out, and so none closes what it watches.
pub(super) fn is_of(watch: &Watch, set: &Set) -> bool {
    core::ptr::eq(at(watch.set.get()), set)
}

/// Registered by one-shot under a mark, and still the kernel's: `disabled` says whether it has told.
pub(super) fn is_marked_unmoved(watch: &Watch) -> bool {
    watch.marked.is() && !watch.adopted.is() && watch.events.get() & EPOLLONESHOT != 0
}

/// Does the number under which this is registered name the socket still? KERNEL: a registration lasts as long as any number names what it was made of,
/// and can be changed only by its own, which may be another's by now.
pub(super) fn is_named(socket: &Socket, watch: &Watch) -> bool {
    match lookup(watch.fd.get() as i32) {
        Some(Known::Socket(named)) => core::ptr::eq(named, socket),
        _ => false,
    }
}

pub(super) fn is_linked(watch: &Watch) -> bool {
    watch.linked.get() != 0
}

/// Those of which the kernel has told last.
pub(super) fn others_of(set: &Set) -> [(u64, u64); OTHERS_MOST] {
    core::array::from_fn(|nth| (set.others[nth].data.get(), set.others[nth].linked.get()))
}

pub(super) fn other_place(others: &[(u64, u64)], data: u64) -> Option<u64> {
    others.iter().find(|other| other.0 == data && other.1 != 0).map(|other| other.1)
}
