//! Who sleeps, and how peers wake them.
//!
//! A *context* is a thread in a blocking call or an epoll set. It has an interrupt flag in a page that peers map read-only (so
//! that none of them can spoil another's wake-up) and an eventfd that they ring. Both are handed out at the rendezvous, to peers
//! that could as well send us a signal, and we them: who holds an eventfd can make a ringer block, and its last close (`apart`). Others are told
//! the address of a second bell of the context, which is rung by its name (`bell`), when a connection's own wish says so. Where that can't be had
//! or rung, and for whoever sleeps in another context than the connection's home, a byte on the kernel connection wakes.
//!
//! Who gets the eventfd of an epoll set gets its ready board too, on which a sender says which connection has something (`ready`). A stranger's process
//! has one of its own (`boards`).

use super::bypass;
use super::table::{Socket, Tables, tables};
use crate::local::{self, Local};
use crate::lock::Lock;
use crate::once::Once;
use crate::plain::{P32, P64};
use crate::thread;
use ringlet_core::layout::{RINGS_BY_BYTE, RINGS_BY_EVENT, RINGS_BY_NAME, ReadyBoard};
use ringlet_core::memory::Area;
use ringlet_core::ready::Board;
use ringlet_core::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use ringlet_core::wait;
use ringlet_linux::bell::{self, Address};
use ringlet_linux::map::{self, Zeroed};
use ringlet_linux::{apart, fd, proof, sys};

/// Contexts of one process; further ones are woken by bytes.
pub const CONTEXT_COUNT: usize = 32;
const FLAG_APART_BYTES: usize = 128;
const PAGE_BYTES: usize = 4096;
const _: () = assert!(CONTEXT_COUNT * FLAG_APART_BYTES == PAGE_BYTES);
pub const BOARD_BYTES: usize = size_of::<ReadyBoard>();
const BOARDS_BYTES: usize = CONTEXT_COUNT * BOARD_BYTES;
/// Peers' contexts that we can ring.
const BELL_COUNT: u32 = 4096;

/// One of ours.
#[derive(Default)]
struct Context {
    /// Thread number, or `SET_OWNER` + set; 0 when free.
    owner: P32,
    eventfd: P32,
    /// How often its eventfd was replaced.
    replaced: P32,
    ringing: AtomicU32,
    /// The bell that is rung by name: its socket once somebody was told of it, its address, and wake-ups by it since it was drained.
    named: P32,
    address: BellAddress,
    heard: P32,
    /// Strangers may be told of it.
    barred: P32,
    /// Of a set: its ready board is held by memory.
    board: P32,
    /// Of a thread that polls many connections: a set of the kernel's, in which those are whose home it is (`watch`). `NONE` if it can't be had.
    watch: P32,
    /// The thread has asked that set, and what it was told is not yet noted. Who has jumped out of that leaves it so.
    asking: P32,
    /// Counts the polls that have asked it.
    watch_turn: P32,
}

impl Context {
    /// -1 if it has none.
    fn watch_number(&self) -> i32 {
        match self.watch.get() {
            0 | NONE => -1,
            number => number as i32,
        }
    }

    fn drain_named(&self) {
        in_hand(&self.named, &self.ringing, |socket| {
            if socket > 0 {
                bell::drain(socket);
            }
        });
    }
}

/// A bell's address, in memory that is shared with a child by fork.
#[derive(Default)]
struct BellAddress {
    name: P64,
    token: [P64; 2],
}

impl BellAddress {
    fn get(&self) -> Address {
        Address { name: self.name.get(), token: [self.token[0].get(), self.token[1].get()] }
    }

    fn set(&self, address: &Address) {
        self.name.set(address.name);
        self.token[0].set(address.token[0]);
        self.token[1].set(address.token[1]);
    }
}

const SET_OWNER: u32 = 1 << 31;

/// One of a peer's.
#[derive(Default)]
pub struct Bell {
    /// Whose: a random number of its process, which process the kernel says that is (numbers get around), and which of its
    /// contexts.
    process: P64,
    pid: P32,
    context: P32,
    /// Of one that is rung by name, the socket that rings it; and there is no page.
    eventfd: P32,
    address: BellAddress,
    page: AtomicUsize,
    /// The ready board of the peer's context; 0 if it gave none. (A stranger's is known to the connection, `boards`.)
    board: AtomicUsize,
    users: P32,
    /// Threads between the look at `eventfd` and their write to it.
    ringing: AtomicU32,
}

fn ring_by(eventfd: &P32, ringing: &AtomicU32) {
    in_hand(eventfd, ringing, fd::ring);
}

/// Does something with a number of ours that may move.
pub fn in_hand<T>(number: &P32, ringing: &AtomicU32, act: impl FnOnce(i32) -> T) -> T {
    // ORDER: SeqCst; pairs with `await_users`: whoever moves the eventfd sees us, or we see its new number.
    ringing.fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    let done = act(number.get() as i32);
    ringing.fetch_sub(1, Ordering::SeqCst);
    done
}

impl Bell {
    /// False if it may not have rung.
    fn ring(&self) -> bool {
        match self.address.name.get() {
            0 => {
                ring_by(&self.eventfd, &self.ringing);
                true
            }
            _ => {
                let Address { token, .. } = self.address.get();
                in_hand(&self.eventfd, &self.ringing, |socket| bell::ring(socket, &token))
            }
        }
    }
}

#[derive(Default)]
struct Ours {
    /// The page with the flags, 0 until the first rendezvous; its memfd; the random number.
    page: AtomicUsize,
    memfd: P32,
    process: P64,
    /// The contexts' ready boards, made with the first set's context, 0 where they could not be had; and their memfd.
    boards: AtomicUsize,
    boards_memfd: P32,
    /// The kernel's count of threads that want to run, once it was asked for; `NO_LOAD` if it can't be had.
    load: P32,
    /// How many bells were ever in use, with the first, which never is: a fork's child that looks at all the others would pay for their pages.
    bells: P32,
}

const NO_LOAD: u32 = NONE;
const NONE: u32 = u32::MAX;
/// Where our share of the descriptors is smaller, nobody asks.
const LOAD_SHARE: usize = 8;

// SAFETY: atomics only; zero is a free entry.
#[allow(unsafe_code)]
unsafe impl Zeroed for Context {}
// SAFETY: atomics only; zero is a bell that nobody uses.
#[allow(unsafe_code)]
unsafe impl Zeroed for Bell {}
// SAFETY: atomics only; zero is a process that has made nothing yet.
#[allow(unsafe_code)]
unsafe impl Zeroed for Ours {}

struct Contexts {
    contexts: &'static [Context],
    bells: &'static [Bell],
    ours: &'static [Ours],
    lock: &'static [Lock],
}

impl Contexts {
    /// The bells that were ever in use.
    fn bells(&self) -> &'static [Bell] {
        &self.bells[..(self.ours[0].bells.get() as usize).clamp(1, self.bells.len())]
    }
}

static CONTEXTS: Once<Contexts> = Once::new();

pub fn start() -> sys::Sys<()> {
    let made = Contexts {
        contexts: map::private_table(CONTEXT_COUNT)?,
        bells: map::private_table(BELL_COUNT as usize)?,
        ours: map::private_table(1)?,
        lock: map::private_table(1)?,
    };
    let _ = CONTEXTS.set(made);
    Ok(())
}

/// Generation of the process (high half), and the thread's context.
static CONTEXT: Local<u64> = Local::new(local::CONTEXT);
/// This thread has taken what has rung its context, since a handler began.
static TOOK: Local<bool> = Local::new(local::CONTEXT.from(1));

/// A handler begins.
pub fn begin_handler() -> bool {
    TOOK.replace(false)
}

/// It is over; `before`: what its beginning has said. A wait of its own may have taken what the call that it has interrupted is about to sleep for:
/// that one looks again.
pub fn end_handler(before: bool) {
    let Some(context) = of_thread_if_any().filter(|_| TOOK.get()) else {
        return TOOK.set(before);
    };
    if sleepers(context) > 0 {
        ring_ours(context);
    }
}

/// After a fork nothing of it is ours: peers ring the parent by it. `inherit`: what becomes of a set's eventfd.
pub fn forget_all(tables: &Tables, inherit: impl Fn(u32, i32)) {
    let Some(all) = CONTEXTS.get() else { return };
    all.lock[0].reset();
    // A page that a child does not write to stays its parent's memory.
    let stop = |ringing: &AtomicU32| {
        if ringing.load(Ordering::Relaxed) != 0 {
            ringing.store(0, Ordering::Relaxed);
        }
    };
    for context in all.contexts {
        stop(&context.ringing);
    }
    for context in all.contexts.iter().filter(|context| context.owner.is()) {
        let (owner, eventfd) = (context.owner.get(), context.eventfd.get() as i32);
        if owner & SET_OWNER != 0 {
            inherit(owner & !SET_OWNER, eventfd);
        } else {
            tables.close_hidden(eventfd);
        }
        if context.named.is() {
            tables.close_hidden(context.named.swap(0) as i32);
        }
        if !matches!(context.watch.get(), 0 | NONE) {
            tables.close_hidden(context.watch.get() as i32);
        }
        context.watch.set(0);
        context.asking.set(0);
        context.board.set(0);
        context.owner.set(0);
    }
    for bell in &all.bells()[1..] {
        stop(&bell.ringing);
    }
    let ours = &all.ours[0];
    if ours.page.load(Ordering::Relaxed) != 0 {
        tables.close_hidden(ours.memfd.get() as i32);
        ours.page.store(0, Ordering::Relaxed);
        let boards = ours.boards.swap(0, Ordering::Relaxed);
        if boards != 0 {
            tables.close_hidden(ours.boards_memfd.swap(0) as i32);
            // (A handler that has forked amid `hot::collect` returns to a frame that goes on to take bits.)
            map::stand_in(boards, BOARDS_BYTES);
        }
    }
    for socket in tables.followed() {
        socket.set_home(0);
    }
}

/// Where the kernel tells how many threads want to run (`sys::runnable`), if it does.
pub fn load() -> Option<i32> {
    let (all, tables) = (CONTEXTS.get()?, tables()?);
    let ours = &all.ours[0];
    if !ours.load.is() {
        // (A child by fork would have a copy of what is only on its way to its place.)
        let _inside = tables.process().gate.try_enter()?;
        let _held = all.lock[0].take()?;
        if !ours.load.is() {
            // (It would take the last descriptor from a program that may have few.)
            let load =
                if fd::share() < LOAD_SHARE { Err(sys::Errno::EMFILE) } else { sys::open_load() };
            let load = load.and_then(fd::hide);
            load.iter().for_each(|load| tables.hide(*load));
            ours.load.set(load.map_or(NO_LOAD, |load| load as u32));
        }
    }
    Some(ours.load.get()).filter(|load| *load != NO_LOAD).map(|load| load as i32)
}

/// What a peer needs to wake one of our contexts.
pub struct Card {
    pub process: u64,
    pub context: u32,
    pub eventfd: i32,
    pub page_memfd: i32,
    pub boards_memfd: Option<i32>,
}

fn make_page(tables: &Tables, ours: &Ours) -> Option<()> {
    let mut random = [0u8; 8];
    if !sys::random(&mut random) {
        return None;
    }
    let memfd = map::sealed_memfd(c"ringlet-context", PAGE_BYTES, 0).and_then(fd::hide).ok()?;
    let mapped = map::map_shared(memfd, PAGE_BYTES, true)
        .and_then(|area| map::seal_readers(memfd).map(|_| area));
    let Ok(area) = mapped else {
        sys::close(memfd);
        return None;
    };
    tables.hide(memfd);
    ours.memfd.set(memfd as u32);
    ours.process.set(u64::from_ne_bytes(random));
    ours.page.store(area.base() as usize, Ordering::Release);
    Some(())
}

/// The ready boards of all contexts. (Without them, what rests is woken by bytes.)
fn make_boards(tables: &Tables, ours: &Ours) -> Option<()> {
    if fd::share() < LOAD_SHARE {
        return None;
    }
    let memfd = map::sealed_memfd(c"ringlet-ready", BOARDS_BYTES, libc::F_SEAL_SEAL);
    let memfd = memfd.and_then(fd::hide).ok()?;
    let Ok(area) = map::map_segment(memfd, BOARDS_BYTES) else {
        sys::close(memfd);
        return None;
    };
    tables.hide(memfd);
    ours.boards_memfd.set(memfd as u32);
    ours.boards.store(area.base() as usize, Ordering::Release);
    Some(())
}

/// The context number (from 1) of an owner, made if need be.
fn context_of(owner: u32) -> Option<u32> {
    let (all, tables) = (CONTEXTS.get()?, tables()?);
    let _held = all.lock[0].take()?;
    let ours = &all.ours[0];
    if ours.page.load(Ordering::Acquire) == 0 {
        make_page(tables, ours)?;
    }
    if owner & SET_OWNER != 0 && ours.boards.load(Ordering::Acquire) == 0 {
        let _ = make_boards(tables, ours);
    }
    if let Some(found) = all.contexts.iter().position(|context| context.owner.get() == owner) {
        return Some(found as u32 + 1);
    }
    // First: a program that makes a thread for each request needs no more of them than it has threads at once.
    let gone = |context: &Context| {
        let owner = context.owner.get();
        owner != 0 && owner & SET_OWNER == 0 && !sys::thread_exists(owner as i32)
    };
    let at = all
        .contexts
        .iter()
        .position(gone)
        .or_else(|| all.contexts.iter().position(|context| !context.owner.is()))?;
    let context = &all.contexts[at];
    if !context.owner.is() {
        let eventfd = fd::eventfd().ok()?;
        tables.hide(eventfd);
        context.eventfd.set(eventfd as u32);
    }
    // What its last owner has watched is nothing to the next one.
    let watch = context.watch.swap(0);
    if !matches!(watch, 0 | NONE) {
        // ORDER: a fence behind the swap; pairs with `in_hand`: whoever has read the number is waited for.
        fence(Ordering::SeqCst);
        until(|| context.ringing.load(Ordering::SeqCst) == 0);
        tables.close_hidden(watch as i32);
        let number = at as u32 + 1;
        tables.followed().filter(|socket| socket.watched.get() == number).for_each(forget_watched);
    }
    context.asking.set(0);
    // (Where no memory can be had for it, who writes there would get a SIGBUS, a peer of ours too.)
    let board = board_place(ours, at).filter(|_| owner & SET_OWNER != 0);
    let held = board.is_some_and(|area| map::hold(area, 0, area.len()).is_ok());
    context.board.set(held as u32);
    context.owner.set(owner);
    Some(at as u32 + 1)
}

/// The calling thread's context.
pub fn of_thread() -> Option<u32> {
    if let Some(known) = of_thread_if_any() {
        return Some(known);
    }
    let context = context_of(thread::number())?;
    CONTEXT.set((thread::generation() as u64) << 32 | context as u64);
    Some(context)
}

/// The calling thread's context if it has one already.
pub fn of_thread_if_any() -> Option<u32> {
    let known = CONTEXT.get();
    (known != 0 && known >> 32 == thread::generation() as u64).then_some(known as u32)
}

pub fn of_set(set: u32) -> Option<u32> {
    context_of(SET_OWNER | set)
}

/// A set is gone: its context can be another's. Its eventfd is replaced, since peers may still hold the old one, and those whose home it
/// was are woken by bytes from now on.
pub fn release_set(set: u32) {
    let (Some(all), Some(tables)) = (CONTEXTS.get(), tables()) else { return };
    let Some(_held) = all.lock[0].take() else { return };
    let released = |context: &Context| context.owner.get() == SET_OWNER | set;
    for (context, number) in all.contexts.iter().zip(1..).filter(|(context, _)| released(context)) {
        for socket in tables.followed().filter(|socket| socket.home.get() == number) {
            socket.set_home(0);
        }
        tables.close_hidden(context.eventfd.get() as i32);
        if context.named.is() {
            tables.close_hidden(context.named.swap(0) as i32);
        }
        context.replaced.add(1);
        context.owner.set(0);
    }
}

/// Is it a context of ours, and a set's?
pub fn is_of_set(context: u32) -> bool {
    numbered(context).is_some_and(|context| context.owner.get() & SET_OWNER != 0)
}

/// How many connections ring by this bell?
pub fn users(bell: u32) -> u32 {
    CONTEXTS.get().and_then(|all| all.bells.get(bell as usize)).map_or(0, |bell| bell.users.get())
}

/// Is it a context of ours, and a thread's?
pub fn is_of_thread(context: u32) -> bool {
    let contexts = CONTEXTS.get().map_or(&[][..], |all| all.contexts);
    let context = contexts.get((context as usize).wrapping_sub(1));
    context.is_some_and(|context| context.owner.is() && context.owner.get() & SET_OWNER == 0)
}

/// -1 if there is no such context.
pub fn eventfd_of(context: u32) -> i32 {
    let contexts = CONTEXTS.get().map_or(&[][..], |all| all.contexts);
    let context = contexts.get((context as usize).wrapping_sub(1));
    context.map_or(-1, |context| context.eventfd.get() as i32)
}

/// Wakes who sleeps in a context of ours.
pub fn ring_ours(context: u32) {
    let contexts = CONTEXTS.get().map_or(&[][..], |all| all.contexts);
    if let Some(context) = contexts.get((context as usize).wrapping_sub(1)) {
        ring_by(&context.eventfd, &context.ringing);
    }
}

/// The socket of a context's bell that is rung by name; -1 if there is none.
pub fn named_of(context: u32) -> i32 {
    let contexts = CONTEXTS.get().map_or(&[][..], |all| all.contexts);
    let context = contexts.get((context as usize).wrapping_sub(1));
    context.map(|context| context.named.get() as i32).filter(|socket| *socket != 0).unwrap_or(-1)
}

// A poll over many connections would have the kernel look at each, twice, for what only the kernel can tell: that the peer has died, and doorbells. So
// those whose home is the polling thread's context, which is rung for the rest, lie in a set of the kernel's, and the thread sleeps on that.

/// The kernel's set of a context of a thread, made if need be; -1 if there is none.
pub fn watch_of(context: u32) -> i32 {
    let Some(found) = numbered(context) else { return -1 };
    if !found.watch.is() {
        make_watch(found);
    }
    found.watch_number()
}

#[cold]
fn make_watch(context: &Context) {
    let (Some(all), Some(tables)) = (CONTEXTS.get(), tables()) else { return };
    // (As in `load`.)
    let Some(_inside) = tables.process().gate.try_enter() else { return };
    let Some(_held) = all.lock[0].take() else { return };
    if !context.watch.is() {
        let few = fd::share() < LOAD_SHARE;
        let made = if few { Err(sys::Errno::EMFILE) } else { fd::epoll_create() };
        let made = made.and_then(fd::hide);
        made.iter().for_each(|watch| tables.hide(*watch));
        context.watch.set(made.map_or(NONE, |watch| watch as u32));
    }
}

/// A poll is about to ask the set: its number.
pub fn watch_turn(context: u32) -> u32 {
    numbered(context).map_or(0, |context| context.watch_turn.add(1))
}

/// Puts a connection of the context's there. By edge: what is told once is noted at the socket (`doorbells::kernel_tells`), and a byte that has to stay
/// wakes nobody again. False if it can't be.
pub fn watch(context: u32, socket: &Socket) -> bool {
    if socket.watched.get() == context {
        return true;
    }
    let (Some(tables), Some(found)) = (tables(), numbered(context)) else { return false };
    let events = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
    let event = fd::epoll_event { events, u64: tables.index_of(socket).into() };
    let added = in_hand(&found.watch, &found.ringing, |_| {
        let number = socket.fd();
        let ctl = |how| fd::epoll_ctl(found.watch_number(), how, number, Some(event));
        let added = match ctl(libc::EPOLL_CTL_ADD) {
            Err(sys::Errno::EEXIST) => ctl(libc::EPOLL_CTL_MOD),
            done => done,
        };
        // It has got another number meanwhile, and this one may name another file by now.
        if socket.fd() != number && added.is_ok() {
            let _ = ctl(libc::EPOLL_CTL_DEL);
            return Err(sys::Errno::EBADF);
        }
        // (Behind it: who jumps out in between asks again. And in hand: who closes the set for the context's next owner waits for that, and forgets it.)
        if added.is_ok() {
            socket.watched.set(context);
        }
        added
    });
    added.is_ok()
}

/// The connection has another number, in place of one that is about to be closed, and somebody may be asleep on the set.
pub fn renumbered(socket: &Socket, before: i32) {
    let context = socket.watched.get();
    if context == 0 || bypass::is_closed_in() {
        return;
    }
    socket.watched.set(0);
    // (First, lest anything comes in between. An end that is there is told anew.)
    let watched = watch(context, socket);
    if let Some(found) = numbered(context) {
        let _ = in_hand(&found.watch, &found.ringing, |_| {
            fd::epoll_ctl(found.watch_number(), libc::EPOLL_CTL_DEL, before, None)
        });
    }
    // (Where there was no room for both.)
    if !watched && !watch(context, socket) {
        ring_ours(context);
    }
}

/// A connection is closed, or has gone to the kernel. (The kernel's entry would stay where a child by fork has the connection too.)
pub fn unwatch(socket: &Socket) {
    let context = socket.watched.get();
    if context == 0 {
        return;
    }
    socket.watched.set(0);
    // (A process that has closed itself in asks the set no more, and its filter may kill it for trying.)
    let Some(found) = numbered(context).filter(|_| !bypass::is_closed_in()) else { return };
    let _ = in_hand(&found.watch, &found.ringing, |_| {
        fd::epoll_ctl(found.watch_number(), libc::EPOLL_CTL_DEL, socket.fd(), None)
    });
}

fn forget_watched(socket: &Socket) {
    socket.watched.set(0);
}

/// What the kernel's set has to tell, and of which of its connections: false if it can't be asked. One of which `tell` says that it is there no more is
/// taken out.
#[allow(unsafe_code)]
pub fn watch_tells(context: u32, tell: impl Fn(&Socket, u32) -> bool) -> bool {
    let Some(found) = numbered(context) else { return false };
    let mut events = [fd::epoll_event { events: 0, u64: 0 }; WATCHED_AT_ONCE];
    TOOK.set(true);
    // (Before the look for a fork, that of the tables: a handler's comes before it, or finds this.)
    found.asking.set(1);
    let Some(tables) = tables() else {
        found.asking.set(0);
        return false;
    };
    for _ in 0..tables.sockets.len().div_ceil(WATCHED_AT_ONCE) {
        let told = in_hand(&found.watch, &found.ringing, |_| {
            let (watch, most) = (found.watch_number(), WATCHED_AT_ONCE);
            // SAFETY: a valid array.
            unsafe { fd::epoll_wait(watch, events.as_mut_ptr(), most, Some(0), None) }
        });
        let Ok(told) = told else {
            found.asking.set(0);
            return false;
        };
        for event in &events[..told] {
            // (By now its entry may be another one's, which is told in vain.)
            let Some(socket) = tables.sockets.get(event.u64 as usize) else { continue };
            if !tell(socket, event.events) && socket.watched.get() == context {
                unwatch(socket);
            }
        }
        if told < WATCHED_AT_ONCE {
            break;
        }
    }
    found.asking.set(0);
    true
}

/// Is the thread that calls amid that, in a handler, or has it jumped out of it? Then the set does not tell all.
pub fn is_asking() -> bool {
    of_thread_if_any().and_then(numbered).is_some_and(|context| context.asking.is())
}

const WATCHED_AT_ONCE: usize = 16;

fn numbered(context: u32) -> Option<&'static Context> {
    CONTEXTS.get()?.contexts.get((context as usize).wrapping_sub(1))
}

/// The eventfd has woken who sleeps in this context. (By the number that it has now: the one that was slept on may be the program's.)
/// Returns how often it was rung.
pub fn drain(context: u32) -> u64 {
    TOOK.set(true);
    numbered(context).map_or(0, |context| in_hand(&context.eventfd, &context.ringing, fd::drain))
}

/// The bell by name has woken who sleeps in this context: what has rung it is taken.
pub fn drain_named(context: u32) {
    TOOK.set(true);
    numbered(context).into_iter().for_each(Context::drain_named);
}

/// The same, where its readiness is told by edges: it is only taken before the queue is full, which may be when `most` have rung it at each.
/// (Who finds it full rings by a byte.)
pub fn heard_named(context: u32, most: u32) {
    let Some(context) = numbered(context) else { return };
    // (The next sleep's may come as well.)
    if (context.heard.add(1) + 1).saturating_mul(most.max(1)) > QUEUE_KEPT {
        context.heard.set(0);
        context.drain_named();
    }
}

const QUEUE_KEPT: u32 = 8;

/// What to tell a stranger about a context of ours: its bell by name, made if need be. `None` where that is in another network namespace than
/// `connection`, in which the stranger would look for it.
pub fn address(context: u32, connection: i32) -> Option<Address> {
    let (address, bell, barred) = named(context)?;
    (barred && proof::are_of_one_namespace(bell, connection)).then_some(address)
}

/// What to give who carries: the same address, and a socket by which to ring there. (He is in another network namespace perhaps, where its name means nothing.)
pub fn rope(context: u32) -> Option<(i32, Address)> {
    let (address, bell, _) = named(context)?;
    let rope = bell::reach(&address).ok()?;
    // (This thread may be in another network namespace than when the bell was made, where somebody else may have that name.)
    if !proof::are_of_one_namespace(rope, bell) {
        sys::close(rope);
        return None;
    }
    Some((rope, address))
}

/// Its address, its socket, and whether that admits no descriptors.
fn named(context: u32) -> Option<(Address, i32, bool)> {
    let (all, tables) = (CONTEXTS.get()?, tables()?);
    let _held = all.lock[0].take()?;
    let context = &all.contexts[context as usize - 1];
    if !context.named.is() {
        // (As in `load`.)
        if fd::share() < LOAD_SHARE {
            return None;
        }
        let address = Address::random()?;
        let (socket, barred) = bell::make(&address).ok()?;
        tables.hide(socket);
        context.address.set(&address);
        context.heard.set(0);
        context.barred.set(barred as u32);
        context.named.set(socket as u32);
    }
    Some((context.address.get(), context.named.get() as i32, context.barred.is()))
}

fn flag_of(context: u32) -> Option<&'static AtomicU64> {
    word_of(context, 0)
}

#[allow(unsafe_code)]
fn word_of(context: u32, offset: usize) -> Option<&'static AtomicU64> {
    let page = CONTEXTS.get()?.ours[0].page.load(Ordering::Acquire);
    if page == 0 {
        return None;
    }
    // SAFETY: our page, mapped for good (a fork forgets it, which only leaves a mapping behind).
    let area = unsafe { Area::new(page as *mut u8, PAGE_BYTES) };
    Some(area.at((context as usize - 1) % CONTEXT_COUNT * FLAG_APART_BYTES + offset))
}

/// What to tell a peer about a context of ours.
pub fn card(context: u32) -> Option<Card> {
    let all = CONTEXTS.get()?;
    Some(Card {
        // Who holds an older card of this context must not take this one for the same.
        process: all.ours[0]
            .process
            .get()
            .wrapping_add(all.contexts[context as usize - 1].replaced.get() as u64),
        context,
        eventfd: eventfd_of(context),
        page_memfd: all.ours[0].memfd.get() as i32,
        boards_memfd: Some(all.ours[0].boards_memfd.get() as i32)
            .filter(|_| all.contexts[context as usize - 1].board.is()),
    })
}

/// The ready board of a context of ours, if it has one.
#[inline(always)]
pub fn board_of(context: u32) -> Option<Board<'static>> {
    let all = CONTEXTS.get()?;
    let at = (context as usize).wrapping_sub(1);
    if !all.contexts.get(at)?.board.is() {
        return None;
    }
    board_place(&all.ours[0], at).map(|area| area.at::<ReadyBoard>(0).into())
}

/// Where the ready board of this context lies.
#[allow(unsafe_code)]
#[inline(always)]
fn board_place(ours: &Ours, at: usize) -> Option<Area> {
    let boards = ours.boards.load(Ordering::Acquire);
    if boards == 0 {
        return None;
    }
    let place = at % CONTEXT_COUNT * size_of::<ReadyBoard>();
    // SAFETY: ours, mapped for good; a fork puts other memory in its place.
    Some(unsafe { Area::new((boards + place) as *mut u8, size_of::<ReadyBoard>()) })
}

#[allow(unsafe_code)]
#[inline(always)]
fn board_at(base: usize) -> Option<Board<'static>> {
    if base == 0 {
        return None;
    }
    // SAFETY: a peer's, mapped as long as its bell has users, and the socket for which it is asked is one.
    let area = unsafe { Area::new(base as *mut u8, BOARD_BYTES) };
    Some(area.at::<ReadyBoard>(0).into())
}

/// After publishing for `socket`'s peer, which wished for it: says so on the ready board of its home context. False if it has none.
pub fn announce(socket: &Socket, lane: u64) -> bool {
    let (bell, Some(all)) = (socket.bell.get(), CONTEXTS.get()) else { return false };
    let Some(board) = board_at(all.bells[bell as usize].board.load(Ordering::Acquire)) else {
        return false;
    };
    board.announce(lane as usize);
    true
}

pub fn arm(context: u32) {
    if let Some(flag) = flag_of(context) {
        wait::arm(flag);
    }
}

pub fn disarm(context: u32) {
    if let Some(flag) = flag_of(context) {
        wait::disarm(flag);
    }
}

/// Where in a context's line its processor stands (plus one; 0 is unknown), for peers that share it.
const PROCESSOR_OFFSET: usize = 8;

/// Tells peers on which processor this context watches. A store only when it changed: peers look at the line for every message.
pub fn tell_processor(context: u32) {
    if let Some(word) = word_of(context, PROCESSOR_OFFSET) {
        let here = sys::processor() as u64 + 1;
        if word.load(Ordering::Relaxed) != here {
            word.store(here, Ordering::Relaxed);
        }
    }
}

/// The processor on which the home context of `socket`'s peer was last seen.
pub fn peer_of(socket: &Socket) -> Option<crate::waiting::spin::Peer> {
    let (_, word) = bell_word(socket, PROCESSOR_OFFSET)?;
    crate::step!();
    let processor = word.load(Ordering::Relaxed);
    let processor = u32::try_from(processor.checked_sub(1)?).ok()?;
    Some(crate::waiting::spin::Peer { processor, we_move: socket.side.get() == 1 })
}

/// How many sleep in this context now?
pub fn sleepers(context: u32) -> u64 {
    flag_of(context).map_or(0, wait::sleeper_count)
}

/// Does anyone sleep in this context now?
pub fn has_sleepers(context: u32) -> bool {
    flag_of(context).is_some_and(|flag| wait::armed(flag, u64::MAX).is_some())
}

/// Keeps a card of the peer `pid`, or finds that we hold it already. Takes the descriptors, if they are what they should be.
pub fn keep(
    pid: i32,
    process: u64,
    context: u32,
    [eventfd, page_memfd]: [i32; 2],
    boards_memfd: Option<i32>,
) -> Option<u32> {
    let (all, tables) = (CONTEXTS.get()?, tables()?);
    // Nobody else is trusted with a bell.
    let user = sys::geteuid();
    let close_eventfd = || match fd::is_eventfd(eventfd) {
        // A trusted peer's, whom we let hold us up: each further connection of his brings it again.
        true => sys::close(eventfd),
        false => apart::close_foreign(eventfd, user),
    };
    let close_boards =
        || boards_memfd.into_iter().for_each(|memfd| apart::close_foreign(memfd, user));
    let close_all = || {
        close_eventfd();
        apart::close_foreign(page_memfd, user);
        close_boards();
    };
    let Some(_held) = all.lock[0].take() else {
        close_all();
        return None;
    };
    // Who claims to be another process must not be rung in its place. A pid that we can't see is nobody's.
    let same = |bell: &Bell| {
        let owner = bell.pid.get() == pid as u32 && bell.process.get() == process;
        bell.users.is() && pid != 0 && owner && bell.context.get() == context
    };
    if let Some(found) = all.bells()[1..].iter().position(same) {
        let bell = &all.bells[found + 1];
        if bell.board.load(Ordering::Relaxed) == 0 {
            // The context was a thread's when it came first.
            bell.board.store(map_board(boards_memfd, context), Ordering::Release);
        }
        close_all();
        bell.users.add(1);
        return Some(found as u32 + 1);
    }
    let sane = (1..=CONTEXT_COUNT as u32).contains(&context)
        && map::sealed_size(page_memfd) == Ok(PAGE_BYTES)
        && fd::is_eventfd(eventfd);
    let used = all.bells().len();
    let held = all.bells()[1..].iter().filter(|bell| bell.users.is()).count();
    let free = all.bells[1..].iter().take(used).position(|bell| !bell.users.is());
    let sane = sane && held < fd::share();
    let (true, Some(at)) = (sane, free) else {
        close_all();
        return None;
    };
    let Ok(eventfd) = fd::hide(eventfd) else {
        apart::close_foreign(page_memfd, user);
        close_boards();
        return None;
    };
    let mapped = map::map_shared(page_memfd, PAGE_BYTES, false);
    apart::close_foreign(page_memfd, user);
    let board = mapped.as_ref().map_or(0, |_| map_board(boards_memfd, context));
    close_boards();
    let Ok(area) = mapped else {
        sys::close(eventfd);
        return None;
    };
    tables.hide(eventfd);
    let bell = &all.bells[at + 1];
    all.ours[0].bells.set(used.max(at + 2) as u32);
    bell.process.set(process);
    bell.pid.set(pid as u32);
    bell.context.set(context);
    bell.eventfd.set(eventfd as u32);
    bell.board.store(board, Ordering::Release);
    bell.page.store(area.base() as usize, Ordering::Release);
    bell.users.set(1);
    Some(at as u32 + 1)
}

/// Where the ready board of a peer's context lies now, of which the memfd has those of all. 0: it can't be had.
fn map_board(boards_memfd: Option<i32>, context: u32) -> usize {
    let (place, bytes) = (context as usize - 1, size_of::<ReadyBoard>());
    boards_memfd
        .filter(|memfd| map::sealed_size(*memfd) == Ok(BOARDS_BYTES))
        .and_then(|memfd| map::map_shared_at(memfd, place * bytes, bytes).ok())
        .map_or(0, |board| board.base() as usize)
}

/// Finds a way to a bell of a stranger's, or that we have one already. (An address is all that there is to it: whose it is does not matter.) It is in
/// the network namespace of `connection`, or it is another one.
pub fn keep_named(address: &Address, connection: i32) -> Option<u32> {
    let (all, tables) = (CONTEXTS.get()?, tables()?);
    let _held = all.lock[0].take()?;
    let is_there = |bell: &Bell| proof::are_of_one_namespace(bell.eventfd.get() as i32, connection);
    let same = |bell: &Bell| bell.users.is() && bell.address.get() == *address && is_there(bell);
    if let Some(found) = all.bells()[1..].iter().position(same) {
        all.bells[found + 1].users.add(1);
        return Some(found as u32 + 1);
    }
    let (at, used) = free_bell(all)?;
    let socket = bell::reach(address).ok()?;
    if !proof::are_of_one_namespace(socket, connection) {
        sys::close(socket);
        return None;
    }
    keep_as(tables, all, at, used, socket, address)
}

/// A place for one more, and how many were ever in use.
fn free_bell(all: &Contexts) -> Option<(usize, usize)> {
    let used = all.bells().len();
    let held = all.bells()[1..].iter().filter(|bell| bell.users.is()).count();
    let free = all.bells[1..].iter().take(used).position(|bell| !bell.users.is());
    Some((free.filter(|_| held < fd::share())? + 1, used))
}

/// A bell that is rung by what is sent from this socket. Lock held.
fn keep_as(
    tables: &Tables,
    all: &Contexts,
    at: usize,
    used: usize,
    socket: i32,
    address: &Address,
) -> Option<u32> {
    tables.hide(socket);
    let bell = &all.bells[at];
    all.ours[0].bells.set(used.max(at + 1) as u32);
    bell.pid.set(0);
    bell.eventfd.set(socket as u32);
    bell.address.set(address);
    bell.users.set(1);
    Some(at as u32)
}

/// A way to ring who holds the other end of this socket, which stays the caller's: any message there rings. (Its address is one that nobody
/// looks at.)
pub fn keep_line(line: i32) -> Option<u32> {
    let (all, tables) = (CONTEXTS.get()?, tables()?);
    let _held = all.lock[0].take()?;
    let (at, used) = free_bell(all)?;
    let address = Address::random()?;
    let socket = fd::duplicate_high(line, line).ok()?;
    keep_as(tables, all, at, used, socket, &address)
}

/// This bell, which one connection has (`keep_line`), rings who holds the other end of that socket from now on. False: as before.
pub fn renew_line(bell: u32, line: i32) -> bool {
    let (Some(all), Some(tables)) = (CONTEXTS.get(), tables()) else { return false };
    let Some(_held) = all.lock[0].take() else { return false };
    let bell = &all.bells[bell as usize];
    let Ok(socket) = fd::duplicate_high(line, line) else { return false };
    tables.hide(socket);
    let old = bell.eventfd.swap(socket as u32) as i32;
    // Who still rings by the old number does it before that is closed.
    await_users(all, &bell.eventfd, old, core::iter::empty(), |_, _, _| {});
    tables.close_hidden(old);
    true
}

/// How we ring `socket`'s peer, as `Sender::attached` says it.
pub fn rings(socket: &Socket) -> u32 {
    match (socket.bell.get(), CONTEXTS.get()) {
        // (Who carries rings the peer's home context, if it has one.)
        _ if socket.is_carried() => RINGS_BY_NAME,
        (at @ 1.., Some(all)) if all.bells[at as usize].address.name.get() != 0 => RINGS_BY_NAME,
        (1.., Some(_)) => RINGS_BY_EVENT,
        _ => RINGS_BY_BYTE,
    }
}

/// A connection that used this bell is gone.
#[allow(unsafe_code)]
pub fn release(bell: u32) {
    let (Some(all), Some(tables)) = (CONTEXTS.get(), tables()) else { return };
    if bell == 0 {
        return;
    }
    let Some(_held) = all.lock[0].take() else { return };
    let bell = &all.bells[bell as usize];
    if bell.users.add(u32::MAX) == 0 {
        tables.close_hidden(bell.eventfd.get() as i32);
        bell.address.set(&Address::default());
        for (mapped, bytes) in [(&bell.page, PAGE_BYTES), (&bell.board, size_of::<ReadyBoard>())] {
            let base = mapped.swap(0, Ordering::AcqRel);
            if base != 0 {
                // SAFETY: a mapping of this bell's; its last user is gone, and only users look at it.
                unsafe { map::unmap(Area::new(base as *mut u8, bytes)) };
            }
        }
    }
}

/// A word in the line of the peer's home context, and its bell.
#[allow(unsafe_code)]
#[inline(always)]
fn bell_word(socket: &Socket, offset: usize) -> Option<(&'static Bell, &'static AtomicU64)> {
    let bell = socket.bell.get();
    if bell == 0 {
        return None;
    }
    let bell = &CONTEXTS.get()?.bells[bell as usize];
    let page = bell.page.load(Ordering::Acquire);
    if page == 0 {
        return None;
    }
    // SAFETY: mapped read-only as long as the bell has users; only loads are made. The socket is one until it is put away, and that waits for
    // the caller, who has one of its locks (`release::part_from_segment` takes them), or is counted at it (`in_use`), or has the lock of a
    // set that it is in (`registration::forget_socket`, before that).
    let area = unsafe { Area::new(page as *mut u8, PAGE_BYTES) };
    let line = (bell.context.get() as usize - 1) % CONTEXT_COUNT * FLAG_APART_BYTES;
    Some((bell, area.at(line + offset)))
}

/// After publishing for `socket`'s peer: rings its home context if somebody sleeps there. True if it did.
#[inline(always)]
pub fn ring_if_armed(socket: &Socket) -> bool {
    let Some((bell, flag)) = bell_word(socket, 0) else { return false };
    let Some(value) = wait::armed(flag, socket.rung.get()) else { return false };
    socket.rung.set(value);
    ring_by(&bell.eventfd, &bell.ringing);
    true
}

/// Rings the home context of `socket`'s peer. False if we can't, or it is not known to have rung.
pub fn ring(socket: &Socket) -> bool {
    let bell = socket.bell.get();
    let Some(all) = CONTEXTS.get() else { return false };
    if bell == 0 {
        return false;
    }
    all.bells[bell as usize].ring()
}

/// A number of ours that is kept elsewhere, and the count of threads that have it in hand.
pub type InHand = (&'static P32, &'static AtomicU32);

/// Moves one of our descriptors to another number, for a program that wants this one. True if it was one of these.
pub fn move_away(
    fd: i32,
    elders: impl Iterator<Item = &'static P32>,
    kept: impl Iterator<Item = InHand> + Clone,
    renamed: impl Fn(u32, i32, i32),
) -> bool {
    let (Some(all), Some(tables)) = (CONTEXTS.get(), tables()) else { return false };
    let ours = &all.ours[0];
    let ours = [&ours.memfd, &ours.boards_memfd, &ours.load].into_iter().filter(|word| word.is());
    let contexts = all.contexts.iter().filter(|context| context.owner.is());
    let contexts = contexts
        .flat_map(|context| [&context.eventfd, &context.named, &context.watch])
        .filter(|word| word.is());
    let bells = all.bells().iter().filter(|bell| bell.users.is()).map(|bell| &bell.eventfd);
    let Some(word) = ours
        .chain(contexts)
        .chain(kept.clone().map(|(word, _)| word))
        .chain(bells)
        .chain(elders)
        .find(|word| word.get() as i32 == fd)
    else {
        return false;
    };
    tables.rename(word) && {
        await_users(all, word, fd, kept, renamed);
        true
    }
}

/// Between the look at a number of ours and the call with it nothing of the program's may come to stand there: once a descriptor has moved,
/// who still has the old number is waited for, while that names it too.
///
/// KERNEL: a poll that is woken looks its numbers up again. Who sleeps on a bell of ours would look at the program's file, and hear no
/// ring. So the eventfd is rung, by the number that it has now, and whoever sleeps looks for that.
fn await_users(
    all: &Contexts,
    moved: &P32,
    old: i32,
    kept: impl Iterator<Item = InHand>,
    renamed: impl Fn(u32, i32, i32),
) {
    // ORDER: SeqCst; pairs with `ring_by` and `wait::arm`: who comes behind it sees the new number, and we see who came before.
    fence(Ordering::SeqCst);
    let bells = all.bells().iter().map(|bell| (&bell.eventfd, &bell.ringing));
    let ours = all.contexts.iter().flat_map(|context| {
        [&context.eventfd, &context.named, &context.watch].map(|word| (word, &context.ringing))
    });
    if let Some((_, ringing)) =
        bells.chain(ours).chain(kept).find(|(word, _)| core::ptr::eq(*word, moved))
    {
        until(|| ringing.load(Ordering::SeqCst) == 0);
    }
    let number = all.contexts.iter().position(|context| {
        [&context.eventfd, &context.named, &context.watch]
            .into_iter()
            .any(|word| core::ptr::eq(word, moved))
    });
    if let Some(at) = number {
        renamed(at as u32 + 1, old, moved.get() as i32);
    }
    // (A set is armed between waits too. A thread that is interrupted by this call does not sleep.)
    let sleeps = |context: &u32| is_of_thread(*context) && of_thread_if_any() != Some(*context);
    if let Some(context) = number.map(|at| at as u32 + 1).filter(sleeps)
        && has_sleepers(context)
    {
        // `wait::disarm` changes the word.
        let word = flag_of(context).map_or(0, |flag| flag.load(Ordering::SeqCst));
        fd::ring(eventfd_of(context));
        until(|| flag_of(context).is_none_or(|flag| flag.load(Ordering::SeqCst) != word));
    }
}

/// Not for ever: it may be in a handler, or have left by a jump.
fn until(done: impl Fn() -> bool) {
    for _ in 0..LOOKS_MOST {
        if done() {
            return;
        }
        let _ = fd::poll(&mut [], Some(LOOK_NS), None);
    }
}

const LOOK_NS: u64 = 50_000;
const LOOKS_MOST: u32 = 1000;
