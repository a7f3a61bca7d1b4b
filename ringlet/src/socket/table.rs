//! What ringlet knows of this process's descriptors.
//!
//! - `Socket`: this process's view of one socket. Private: a child by fork has its own copy.
//! - `End`: what all processes of one family (parent and children by fork) must agree on for one end of a connection: its
//!   locks, where its two directions stand, how many processes hold it. Shared by the family, invisible to the peer.
//!
//! All tables are mapped once and never unmapped, so an index or reference never dangles; what an entry means is checked
//! again under its lock. (Ends that nobody uses may be mapped anew, and are zero then: see `family`.)

use super::bypass;
use super::family::Pool;
use super::gate::Gate;
use super::holders::{Held, Holders};
use super::lives::Services;
use super::stalls::Stalls;
use crate::config::Config;
use crate::interconnect::Interconnect;
use crate::interconnect::quiesce::Rounds;
use crate::lock::Lock;
use crate::once::Once;
use crate::plain::{FreeList, News, P32, P64};
use crate::reasons::Reason;
use crate::thread::{self, Identity};
use core::mem::offset_of;
use ringlet_core::bells::Ringers;
use ringlet_core::handover::{Receiver, Sender};
pub use ringlet_core::handover::{Receiving, Sending};
use ringlet_core::layout::{Geometry, LINE_BYTES};
use ringlet_core::memory::Area;
use ringlet_core::ring::{Counted, Rx, SegmentRing, Tx};
use ringlet_core::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use ringlet_core::view;
use ringlet_linux::fd;
use ringlet_linux::map::{self, Table, Zeroed};
use ringlet_linux::sys::{self, Sys};

/// Descriptors beyond it are the kernel's alone.
const FD_COUNT: usize = 1 << 20;
/// Entries that lie with the small tables (`map::Table`).
const NEAR_FD_COUNT: usize = 128;
const NEAR_HIDDEN_FD_COUNT: usize = 32;
const NEAR_SOCKET_COUNT: usize = 8;
pub const SOCKET_COUNT: u32 = view::PROCESS_SLOT_COUNT as u32;
/// Ends that are passed over, and given back, for one that is free.
const PASSED_MOST: usize = 16;

/// Values of the descriptor table: nothing known; one of our own; otherwise a socket, or a set from `SET_BASE` up.
const FD_UNKNOWN: u32 = 0;
const FD_HIDDEN: u32 = u32::MAX;
const SET_BASE: u32 = 1 << 24;

/// How far a socket has come. In this order, but for `KERNEL_FOR_GOOD`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
#[repr(u32)]
pub enum Stage {
    Free = 0,
    /// On the kernel; counts its messages and may be moved.
    Kernel = 1,
    /// We accept: the rendezvous is open.
    Offered = 2,
    /// We have been greeted, have said hello and wait for the answer.
    Greeted = 3,
    /// A segment is mapped: every call goes through `transfer`, whatever path each direction is on.
    Attached = 4,
    /// On the kernel, and stays there.
    KernelForGood = 5,
    /// Closed; whoever still looks at it leaves, and the last one cleans up.
    Closing = 6,
    /// We accept: somebody came to the rendezvous, and has not yet spoken.
    Called = 7,
    /// A UDP socket, which may get lanes (`datagram`); it has none to receive from.
    Datagram = 8,
    /// A UDP socket that has, or had, lanes to receive from: every call that receives looks there.
    Mailbox = 9,
    /// We connected: we have come to the rendezvous and wait for its greeting.
    Looked = 10,
    /// The far end is not in sight: we have come to the node service and wait for its greeting.
    Visiting = 11,
    /// We have shown the node service our connection and wait until the far end has too.
    Introducing = 12,
}

impl Stage {
    pub fn may_move(self) -> bool {
        self == Stage::Kernel || self.is_meeting()
    }

    /// On its way from the kernel to a segment.
    pub fn is_meeting(self) -> bool {
        use Stage::{Called, Greeted, Introducing, Looked, Offered, Visiting};
        matches!(self, Offered | Called | Looked | Greeted | Visiting | Introducing)
    }

    fn from_u32(value: u32) -> Stage {
        match value {
            1 => Stage::Kernel,
            2 => Stage::Offered,
            3 => Stage::Greeted,
            4 => Stage::Attached,
            5 => Stage::KernelForGood,
            6 => Stage::Closing,
            7 => Stage::Called,
            8 => Stage::Datagram,
            9 => Stage::Mailbox,
            10 => Stage::Looked,
            11 => Stage::Visiting,
            12 => Stage::Introducing,
            _ => Stage::Free,
        }
    }
}

/// What the kernel has below a socket: see `carrier` for what differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    Tcp = 0,
    UnixStream = 1,
    /// Unix sequenced packets: each record of the ring is one.
    Packets = 2,
    /// UDP, which has no connections that move: it is served by `datagram`.
    Datagrams = 3,
}

/// See the module's description. One per socket and process.
#[repr(C, align(64))]
pub struct Socket {
    stage: AtomicU32,
    end: AtomicU32,
    /// A descriptor that names the socket, and how many of this process do.
    pub fd: P32,
    pub names: AtomicU32,
    /// 0 when this side connected, 1 when it accepted: the direction in which it sends.
    pub side: P32,
    /// Successful data calls, and at which count the next step towards the ring is due.
    pub calls: P32,
    pub next_step: P32,
    /// The process has closed itself in; what the ring holds is received in memory, and behind it the kernel's connection has the stream
    /// (`rest`).
    pub last_of_ring: P32,
    pub first_step_ns: P64,
    /// Calls before the peer was looked for (again), which don't count as looking in vain.
    pub calls_before: P32,
    /// The rendezvous, or the listener of it.
    pub meeting: P32,
    /// What the node service has said of the far end (`interconnect::node`): `INTRODUCED` and more, and its number of the process there.
    pub introduced: P32,
    /// The node service may hold a copy of the descriptor.
    pub shown: P32,
    pub stranger: P32,
    /// What was asked of this meeting's other side, once (`meet::Far`): the far end's number and its user, and as whom, plus one, we were found to be
    /// allowed to trust it.
    pub far_inode: P32,
    pub far_uid: P32,
    pub trusts_as: P32,
    /// When the border between both is asked again whether it passes packets (`interconnect::lease`), and how much the far end had acknowledged then.
    pub lease_due_ns: P64,
    pub lease_acked: P64,
    /// Over a mirror, our socket to the adapter: see `interconnect::introduction`.
    pub lifeline: P32,
    /// And where we have met the peer, which stays (`orphan`).
    pub channel: P32,
    /// Its carrier has died, and it may be carried again (`again`); the stage of the meeting for that (`Stage`, 0 while there is none), when its next step
    /// is due, how often one came to nothing, and what the node service has given us for it.
    pub comes_again: P32,
    anew: AtomicU32,
    pub again_due_ns: P64,
    pub again_tries: P32,
    pub next_lifeline: P32,
    pub next_channel: P32,
    /// Counts the segments that it had. What a watch has seen is of one of them.
    pub epoch: P32,
    /// One thread at a time takes the steps.
    pub stepping: AtomicU32,
    /// Our context that the peer can ring (`context`), and the peer's that we can.
    pub home: P32,
    pub bell: P32,
    /// The ready boards that its two processes share, if they are strangers (`boards`).
    pub boards: P32,
    pub rung: P64,
    /// Our context in whose kernel's set it is (`context::watch`).
    pub watched: P32,
    /// The last poll that asked that set about it (`context::watch_turn`).
    pub watch_turn: P32,
    /// The segment, once attached.
    segment: AtomicUsize,
    ring_bytes: P64,
    /// Threads that sleep or watch without a lock; the last one out cleans up.
    pub sleepers: AtomicU32,
    /// Those of the sleepers that wait for room.
    pub room_waiters: AtomicU32,
    /// Its descriptors are closed, but threads still wait on it.
    pub orphaned: AtomicU32,
    /// First watch of this socket (`epoll`), and who changes its registrations in the kernel's sets.
    pub watches: AtomicU32,
    pub registering: Lock,
    /// libc's poll or select was called for it before it was attached.
    pub waited_for: P32,
    /// The kernel reported something on the descriptor since we last asked it.
    pub kernel_news: News,
    /// The same, since a sender asked whether the peer has ended.
    pub end_news: P32,
    /// When we last asked, doorbells were left there, since the ring had bytes: to be taken once it is empty. KERNEL: a Unix connection
    /// holds some 270 of them, and is full then; who waits for an edge is woken by none.
    pub bells_left: P32,
    /// Where the receiving direction stood when the kernel was asked last: data that comes next was doorbells then.
    pub kernel_asked_as: P32,
    /// When we last asked the kernel (ticks), to ask it now and then while the ring keeps us busy.
    pub kernel_asked: P64,
    /// When a sender last asked whether its way goes on (`send::must_go_back`), which nobody who receives or polls asks for it.
    pub sender_asked: P64,
    /// Something was sent on it since a wait (`wait::sent_lately`).
    pub has_sent: P32,
    /// So often was nothing found, also by the kernel, since a receive has found something (`events::ask_every`).
    pub found_nothing: P32,
    pub next_free: P32,
    /// The kernel's number of it, once attached: a vfork child may have given our numbers another meaning.
    pub inode: P32,
    /// The other end of a socket pair, while this process holds it too.
    pub twin: P32,
    /// Made by socketpair.
    pub paired: P32,
    kind: P32,
    /// We are in the peer's good books: our `attached` is published.
    pub published: P32,
    /// What was asked of it in the parent (`view::asked`), until it is shown here.
    pub asked: P32,
    /// Where its slot of the process's page is mapped, once it is shown (`view::of`).
    pub slot: AtomicUsize,
    /// AF_INET or AF_INET6, as which a UDP socket has its addresses.
    pub family: P32,
    /// This process counts itself among its holders no more.
    pub parting: P32,
    /// The last fork for whose child, which has no place, a holder was counted.
    pub counted: P32,
    /// What it is connected to, or listens as (`lives`); 0 if that is not known.
    pub service: P32,
    /// What is known of the bytes that can be read; behind the receive lock.
    pub counted_bytes: Counted,
}

/// See the module's description. One per socket and family.
#[repr(C, align(128))]
#[derive(Default)]
pub struct End {
    pub receive_lock: Lock,
    /// 1 once the peer's FIN was seen, 2 once a reset was reported.
    pub ended: P32,
    pub rx: Rx,
    pub receiver: Receiver,
    /// Threads inside a native receive (or wait) that began before the segment was there.
    pub native_receivers: AtomicU32,
    /// The kernel's last word on receiving, once it was taken from it: errno of a reset, not yet reported.
    pub pending_error: P32,
    _apart: [u64; 2],
    pub sender: Sender,
    pub send_lock: Lock,
    pub tx: Tx,
    pub native_senders: AtomicU32,
    /// Sends that found no room, and as many of them as were followed by room that was reported.
    pub no_space: P32,
    pub no_space_told: P32,
    pub room_news: P32,
    /// The longest packet that goes into the ring; 0 for a stream.
    pub packet_max: P32,
    pub stalls: Stalls,
    /// Threads that are about to put a doorbell on the kernel's connection; and whether one did not go since the last `Start`.
    pub ringers: Ringers,
    pub bell_lost: P32,
    /// While `Returning`: our direction is to be shut down behind what is sent again.
    pub shut_later: P32,
    /// The program's SO_LINGER, if a process that ended meanwhile has put a reset in its place (`moving::finish_return`).
    pub linger: P64,
    /// The place of our last `Back`, plus one.
    pub back_at: P64,
    /// What is being sent again, by a process that shares the end (`Out::resent_by_the_dead`): behind how many bytes of the oldest record, and the
    /// kernel's place before, plus one; 0 if none is under way.
    pub resent_behind: P64,
    pub resent_at: P64,
    /// Where the sender was, plus one, when its memory was looked at (`memory`).
    pub idle_at: P64,
    /// TCP_NODELAY and TCP_CORK as the program has them; on the kernel's socket doorbells must not be delayed.
    pub no_delay: P32,
    pub cork: P32,
    _apart_too: [u64; 1],
    /// The program has ended the sending direction, perhaps before the connection was attached.
    pub shut: AtomicU32,
    /// Processes of the family that hold it.
    pub holders: Held,
    /// Another program may hold it too, which knows nothing of the family.
    pub given: P32,
    pub nonblocking: P32,
    pub receive_timeout_ns: P64,
    pub send_timeout_ns: P64,
    /// The reason why the family keeps it on the kernel, if it does.
    pub barred: P32,
    /// The family was asked to keep it off the ring (`control`).
    pub away: P32,
    /// Bytes that were to be recorded (`tap`), each under its direction's lock.
    pub tap_sent: P64,
    pub tap_received: P64,
    /// Whether it is known how the peer ended (`carrier::unix_stream`), or that it died, and TCP would have said FIN (`carrier::tcp`).
    pub judged: P32,
    /// What our direction has put on the kernel's connection since it was last taken to the ring is doorbells, whether or not it is there
    /// still: a peer that dies with some of them unread has read all.
    pub bells_only: P32,
    /// Of a Unix connection: whether we have shut down receiving; sends that
    /// found the kernel's queue in use, so that there could be no `Start`.
    pub shut_receiving: P32,
    pub refused_starts: P32,
    /// There is a mirror between it and the peer (`interconnect`, `orphan`); and it has severed itself from its adapter, which stood still.
    pub mirrored: P32,
    pub severed: P32,
    /// Its adapter stands still in the middle of what it does for this end, and was waited for in vain.
    pub unanswered: P32,
    /// In which a private copy of the segment is made. (Of all connections that have this entry, one after another.)
    pub copies: Rounds,
    /// Where marks were put for a peer whose adapter has died, plus one; and the kernel's place behind all that it sends again.
    pub heeded: P64,
    pub whole: P64,
    /// How much the peer's kernel had acknowledged when the lease lapsed (`lease`), plus one; 0 while it holds.
    pub lapsed: P64,
    /// How often it has lapsed, and until when the direction stays out of the ring for that.
    pub lapses: P32,
    pub lapsed_until_ns: P64,
    /// By what its adapter is told from others (`interconnect::mirrored`).
    pub adapter: P64,
    /// Of our direction: whether we are about to say that it goes back (`orphan`), and the gap before that is still to be sent.
    pub worded: P32,
    pub gap_due: P32,
    /// Bytes went through the kernel before the connection was attached, so the kernel must have counted some.
    pub has_sent: P32,
    pub has_received: P32,
}

// What each send looks at lies in one line: the last word of `sender`, the lock, and the first six of `tx`; likewise for a receive.
const _: () = assert!((offset_of!(End, send_lock) - 8).is_multiple_of(LINE_BYTES));
const _: () = assert!(offset_of!(End, tx) + 48 - (offset_of!(End, send_lock) - 8) == LINE_BYTES);
const _: () = assert!(offset_of!(End, receiver) + 16 <= LINE_BYTES);

// SAFETY: atomics only; zero is a free entry.
#[allow(unsafe_code)]
unsafe impl Zeroed for Socket {}
// SAFETY: atomics only; zero is a free entry.
#[allow(unsafe_code)]
unsafe impl Zeroed for End {}

impl End {
    #[inline(always)]
    pub fn sending(&self) -> Sending {
        self.sender.path()
    }

    #[inline(always)]
    pub fn receiving(&self) -> Receiving {
        self.receiver.path()
    }

    /// Is a thread inside the kernel for it, which it entered before the segment was there?
    fn is_in_kernel(&self) -> bool {
        self.native_receivers.load(Ordering::SeqCst) != 0
            || self.native_senders.load(Ordering::SeqCst) != 0
    }

    #[allow(unsafe_code)]
    fn copy_from(&self, other: &End) {
        let words = size_of::<End>() / size_of::<P64>();
        // SAFETY: both are made of atomics, aligned to a word and of whole words; so each word can be read as one atomic.
        let (to, from) = unsafe {
            let at =
                |end: &End| core::slice::from_raw_parts((end as *const End).cast::<P64>(), words);
            (at(self), at(other))
        };
        for (to, from) in to.iter().zip(from) {
            to.set(from.get());
        }
    }

    /// What it knows of a segment begins anew, with another one: both directions are in the kernel, and nobody counts on anything else. Both locks held.
    pub fn begin_anew(&self) {
        self.receiver.reset();
        self.rx.reset();
        self.tx.reset();
        self.sender.reset();
        for word in [
            &self.bells_only,
            &self.bell_lost,
            &self.refused_starts,
            &self.severed,
            &self.unanswered,
            &self.worded,
            &self.gap_due,
            &self.away,
        ] {
            word.set(0);
        }
        for word in [&self.heeded, &self.whole, &self.resent_at, &self.resent_behind, &self.idle_at]
        {
            word.set(0);
        }
        self.stalls.reset();
    }

    /// For another connection. (Threads that are inside the kernel for the one before, which was closed beside them, stay counted: each will
    /// count itself out here.)
    fn reset(&self) {
        self.receiver.reset();
        self.rx.reset();
        self.tx.reset();
        self.sender.reset();
        for word in [
            &self.pending_error,
            &self.ended,
            &self.no_space,
            &self.no_space_told,
            &self.room_news,
            &self.barred,
            &self.no_delay,
            &self.cork,
            &self.away,
            &self.judged,
            &self.bells_only,
            &self.refused_starts,
            &self.shut_receiving,
            &self.packet_max,
            &self.shut_later,
            &self.mirrored,
            &self.severed,
            &self.unanswered,
            &self.lapses,
            &self.worded,
            &self.gap_due,
            &self.has_sent,
            &self.has_received,
        ] {
            word.set(0);
        }
        for word in [
            &self.linger,
            &self.back_at,
            &self.heeded,
            &self.whole,
            &self.lapsed,
            &self.lapsed_until_ns,
            &self.adapter,
            &self.resent_at,
            &self.tap_sent,
            &self.tap_received,
        ] {
            word.set(0);
        }
        self.shut.store(0, Ordering::Relaxed);
        self.nonblocking.set(0);
        self.stalls.reset();
        self.idle_at.set(0);
        self.ringers.reset();
        self.given.set(0);
        self.holders.begin();
    }
}

/// What a descriptor number means to us.
#[derive(Clone, Copy)]
pub enum Known {
    Socket(&'static Socket),
    Set(u32),
    /// One of our own: the program must not meet it.
    Hidden,
}

pub struct Tables {
    pub config: Config,
    fds: Table<AtomicU32>,
    /// Those of them from `fd::HIDDEN_FROM`, where our own descriptors lie.
    hidden_fds: &'static [AtomicU32],
    pub sockets: Table<Socket>,
    pub ends: Pool<End>,
    free: &'static [FreeList],
    /// Another value in a child (`thread`).
    alive: &'static AtomicU32,
    pub process: &'static [Process],
    pub services: Services,
    pub holders: Holders,
}

/// What changes with the process: one entry, private.
#[derive(Default)]
pub struct Process {
    pub pid: P32,
    identity: Identity,
    /// Counts forks of this process too, each of which seals what there is of shared memory (`family`).
    pub age: P32,
    /// The view's mapping; and, until this process makes one, its parent's (KERNEL: to keep it out of a fork would cost more than its copy).
    pub view: AtomicUsize,
    pub parents_view: AtomicUsize,
    pub view_fd: P32,
    /// One thread makes the view.
    pub view_lock: Lock,
    /// Of segments and lanes that are mapped (`budget::reserve`).
    pub shared_bytes: AtomicU64,
    /// When connections are looked at for memory that they do not use, 0 if none holds any; and how long after that again (`memory`).
    pub memory_due_ns: P64,
    pub look_at_memory_ns: P64,
    /// Spawns under way, and the numbers, plus one, that are close-on-exec as long as there are some (`process::before_spawn`).
    pub spawn_lock: Lock,
    pub spawns: P32,
    pub withheld: [P32; 16],
    pub gate: Gate,
    /// No descriptor above it was ever known.
    pub highest_fd: P32,
    /// Its threads have different descriptor tables (`process::before_split`).
    pub split: P32,
    /// An epoll set was found that was made around libc.
    pub has_strange_set: P32,
    /// What was asked of the parent (`view::forget`).
    pub asked: P32,
    pub tap_snaplen: P32,
    /// The fork that its only thread makes, and the one that it has made (`process::Fork`).
    pub forking: P64,
    pub forked: P64,
    /// What `tap` records into: its mapping, its descriptor, threads at work in it.
    pub tap: AtomicUsize,
    pub tap_fd: P32,
    pub tap_users: AtomicU32,
    /// The last sign of life of whoever reads it, and when that was new.
    pub tap_beat: P32,
    pub tap_beat_ns: P64,
}

// SAFETY: an atomic; zero is an empty list.
#[allow(unsafe_code)]
unsafe impl Zeroed for FreeList {}
// SAFETY: atomics only; zero is a process that has done nothing.
#[allow(unsafe_code)]
unsafe impl Zeroed for Process {}

static TABLES: Once<Tables> = Once::new();
/// What maps them when there is something to be put there.
static BEGIN: Once<fn()> = Once::new();
static NEVER: AtomicU32 = AtomicU32::new(0);

pub fn begin_with(begin: fn()) {
    BEGIN.set(begin);
}

/// The tables, where something new is to be put there.
pub fn tables_for_new() -> Option<&'static Tables> {
    #[cold]
    fn begin() -> Option<&'static Tables> {
        if NEVER.load(Ordering::Relaxed) == 0 {
            BEGIN.get()?();
        }
        tables()
    }
    tables().or_else(begin)
}

/// If there are none yet, there will be none.
pub fn never_begin() {
    NEVER.store(1, Ordering::Relaxed);
}

/// From now on there are tables. Without them (no memory) every descriptor stays unknown and everything is the kernel's.
pub fn publish(tables: Tables) {
    let _ = TABLES.set(tables);
}

/// In a child, where the view that is mapped is the parent's: nothing leads there any more, but from a frame that the handler has interrupted
/// in which it was forked.
fn leave_behind() {
    let Some(tables) = TABLES.get() else { return };
    let process = tables.process();
    let page = process.view.swap(0, Ordering::Relaxed);
    if page != 0 {
        process.parents_view.store(page, Ordering::Relaxed);
        for socket in
            tables.ever_followed().filter(|socket| socket.slot.load(Ordering::Relaxed) != 0)
        {
            socket.slot.store(0, Ordering::Relaxed);
        }
    }
}

/// The tables, brought up to date after a fork however it was made; `None` while ringlet is off.
#[inline(always)]
pub fn tables() -> Option<&'static Tables> {
    let tables = TABLES.get()?;
    // ORDER: Acquire; pairs with the store of `thread::become_child`: what another thread has done for this child is there.
    if tables.alive.load(Ordering::Acquire) != thread::SEEN {
        return look_for_fork(tables);
    }
    Some(tables)
}

#[cold]
fn look_for_fork(tables: &'static Tables) -> Option<&'static Tables> {
    thread::look_for_fork();
    (!thread::is_left_alone()).then_some(tables)
}

/// The tables as they are, in a child perhaps its parent's.
pub fn tables_unseen() -> Option<&'static Tables> {
    TABLES.get()
}

/// Which process has made one that borrows its memory, if it had no tables yet, which tell. (A child by fork that was made around libc takes itself
/// for one that borrows, and stays on the kernel.)
pub static LENDER: AtomicU32 = AtomicU32::new(0);

/// Are we in a vfork child? It shares our memory but not our descriptors: what it closes stays open here.
pub fn borrowed() -> bool {
    match (tables(), LENDER.load(Ordering::Relaxed)) {
        (Some(tables), _) => tables.process().pid.get() != sys::getpid() as u32,
        (None, lender) => lender != 0 && lender != sys::getpid() as u32,
    }
}

/// One indexed load for a descriptor that is not ours.
#[inline(always)]
pub fn lookup(fd: i32) -> Option<Known> {
    let tables = tables()?;
    match tables.fd_entry(fd as u32 as usize)?.load(Ordering::Relaxed) {
        FD_UNKNOWN => None,
        FD_HIDDEN => Some(Known::Hidden),
        index if index >= SET_BASE => Some(Known::Set(index - SET_BASE)),
        index => Some(Known::Socket(tables.sockets.at(index as usize))),
    }
}

/// This number, or less: behind which no descriptor was ever known.
pub fn known_below(count: usize) -> usize {
    tables().map_or(0, |tables| count.min(tables.highest_known() + 1))
}

/// Whether any descriptor was ever known. (Number 0, where `highest_fd` begins, is looked up.)
#[inline(always)]
pub fn knows_any() -> bool {
    tables().is_some_and(|tables| tables.process().highest_fd.get() != 0) || lookup(0).is_some()
}

/// The socket behind a descriptor.
#[inline(always)]
pub fn socket(fd: i32) -> Option<&'static Socket> {
    match lookup(fd)? {
        Known::Socket(socket) => Some(socket),
        _ => None,
    }
}

impl Tables {
    /// `after_fork` is called once in each child.
    pub fn map(config: Config, after_fork: fn()) -> Sys<Tables> {
        let process: &'static [Process] = map::private_table(1)?;
        process[0].pid.set(sys::getpid() as u32);
        Ok(Tables {
            config,
            fds: Table::map(NEAR_FD_COUNT, FD_COUNT)?,
            hidden_fds: map::private_table(NEAR_HIDDEN_FD_COUNT)?,
            sockets: Table::map(NEAR_SOCKET_COUNT, SOCKET_COUNT as usize)?,
            // (Beside the first ends: who ends a connection needs both, and a look at either maps what is around it.)
            services: Services::map()?,
            holders: Holders::map()?,
            ends: Pool::map(SOCKET_COUNT as usize)?,
            free: map::private_table(1)?,
            alive: thread::start(&process[0].identity, leave_behind, after_fork)?,
            process,
        })
    }

    pub fn process(&self) -> &'static Process {
        &self.process[0]
    }

    #[inline(always)]
    fn fd_entry(&self, fd: usize) -> Option<&'static AtomicU32> {
        match self.hidden_fds.get(fd.wrapping_sub(fd::HIDDEN_FROM as usize)) {
            Some(entry) => Some(entry),
            None => self.fds.get(fd),
        }
    }

    fn put(&self, fd: i32, value: u32) {
        if let Some(entry) = self.fd_entry(fd as u32 as usize) {
            entry.store(value, Ordering::Relaxed);
            let process = self.process();
            process.highest_fd.set(process.highest_fd.get().max(fd as u32));
        }
    }

    pub fn hide(&self, fd: i32) {
        self.put(fd, FD_HIDDEN);
    }

    /// Forgets a descriptor number, without touching what it named.
    pub fn clear(&self, fd: i32) {
        self.put(fd, FD_UNKNOWN);
    }

    /// Gives a hidden descriptor another number.
    pub fn rename(&self, word: &P32) -> bool {
        let old = word.get() as i32;
        let Ok(new) = fd::duplicate_high(old, old + 1) else { return false };
        self.hide(new);
        word.set(new as u32);
        self.clear(old);
        true
    }

    pub fn close_hidden(&self, fd: i32) {
        self.clear(fd);
        sys::close(fd);
    }

    pub fn name_socket(&self, fd: i32, socket: &Socket) {
        self.put(fd, self.index_of(socket));
    }

    pub fn name_set(&self, fd: i32, set: u32) {
        self.put(fd, SET_BASE + set);
    }

    pub fn index_of(&self, socket: &Socket) -> u32 {
        self.sockets.index_of(socket) as u32
    }

    /// Begins to follow a new socket. None when a table is full: then it is simply the kernel's.
    pub fn follow(&'static self, fd: i32, kind: Kind) -> Option<&'static Socket> {
        let alone = self.process().split.is() || bypass::is_closed_in();
        if alone || !map::share() {
            return None;
        }
        let _inside = self.process().gate.enter();
        let index =
            self.free[0].take(SOCKET_COUNT, |i| self.sockets.at(i as usize).next_free.get())?;
        let socket = self.sockets.at(index as usize);
        let Some(end) = self.take_end() else {
            self.free[0].give(index, |i, next| self.sockets.at(i as usize).next_free.set(next));
            return None;
        };
        self.ends.get(end).reset();
        socket.reset(end, fd);
        socket.kind.set(kind as u32);
        socket.set_stage(Stage::Kernel);
        self.put(fd, index);
        Some(socket)
    }

    /// An end that no thread is inside the kernel for. One that is may never be free again, since its thread has left the call by a long jump:
    /// it is passed over, and when there are many of them they are left aside for good.
    fn take_end(&self) -> Option<u32> {
        let age = self.process().age.get();
        let mut passed = [0; PASSED_MOST];
        let mut count = 0;
        let found = loop {
            match self.ends.take(age) {
                Some(index) if self.ends.get(index).is_in_kernel() => {
                    count %= passed.len();
                    passed[count] = index;
                    count += 1;
                }
                other => break other,
            }
        };
        passed[..count].iter().for_each(|&index| self.ends.give(index));
        found
    }

    /// Gives the entry of a socket back that is free by now (`leave`); `last` when no other process of the family holds the end either.
    pub fn forget(&'static self, socket: &'static Socket, last: bool) {
        let (end, age) = (socket.end_index(), &self.process().age);
        if !last && !self.ends.is_sealed(end, age.get()) {
            // Somebody else has what we thought to be ours: by a fork around libc.
            age.add(1);
        }
        self.ends.give(end);
        let index = self.index_of(socket);
        self.free[0].give(index, |i, next| self.sockets.at(i as usize).next_free.set(next));
    }

    /// Does no other process have the memory of its end?
    pub fn has_own_end(&self, socket: &Socket) -> bool {
        !self.ends.is_sealed(socket.end_index(), self.process().age.get())
    }

    /// A connection that this process alone holds again, and that is not attached, gets an end that only this process has. False: not now.
    pub fn rehome(&self, socket: &Socket) -> bool {
        if self.has_own_end(socket) {
            return true;
        }
        let (old, age) = (socket.end_index(), self.process().age.get());
        let end = self.ends.get(old);
        if end.is_in_kernel() {
            return false;
        }
        let Some(new) = self.ends.take(age) else { return false };
        let home = self.ends.get(new);
        home.reset();
        for (to, from) in [
            (&home.barred, &end.barred),
            (&home.nonblocking, &end.nonblocking),
            (&home.no_delay, &end.no_delay),
            (&home.cork, &end.cork),
            (&home.ended, &end.ended),
            (&home.pending_error, &end.pending_error),
        ] {
            to.set(from.get());
        }
        home.receive_timeout_ns.set(end.receive_timeout_ns.get());
        home.send_timeout_ns.set(end.send_timeout_ns.get());
        home.shut.store(end.shut.load(Ordering::SeqCst), Ordering::SeqCst);
        // ORDER: SeqCst; pairs with `Socket::enter_native`: who has counted itself at the old one is seen here, or sees this.
        socket.end.store(new, Ordering::SeqCst);
        // ORDER: SeqCst; pairs with `pin::to_kernel`: who bars the old end is seen here, or bars the new one too.
        fence(Ordering::SeqCst);
        if end.barred.is() {
            home.barred.set(end.barred.get());
        }
        let free = !end.is_in_kernel();
        if free {
            self.ends.give(old);
        } else {
            socket.end.store(old, Ordering::SeqCst);
            self.ends.give(new);
        }
        free
    }

    /// The same for any other, in a process of one thread: what the end holds moves with it. False: not now.
    pub fn take_along(&self, socket: &Socket) -> bool {
        let (old, age) = (socket.end_index(), self.process().age.get());
        let end = self.ends.get(old);
        let (Some(_receiving), Some(_sending)) =
            (end.receive_lock.try_take(), end.send_lock.try_take())
        else {
            return false;
        };
        let Some(new) = self.ends.take(age) else { return false };
        let home = self.ends.get(new);
        home.copy_from(end);
        home.receive_lock.reset();
        home.send_lock.reset();
        home.holders.begin();
        socket.end.store(new, Ordering::SeqCst);
        self.ends.give(old);
        true
    }

    /// All sockets that this process follows.
    pub fn followed(&self) -> impl Iterator<Item = &'static Socket> {
        self.ever_followed().filter(|socket| socket.stage() != Stage::Free)
    }

    /// And those that it did.
    pub fn ever_followed(&self) -> impl Iterator<Item = &'static Socket> + use<> {
        self.sockets.entries(1..self.free[0].end() as usize)
    }

    /// Numbers in a range that mean something to us.
    pub fn known_numbers(&self, first: u32, last: u32) -> impl Iterator<Item = i32> {
        let end = (last as usize).saturating_add(1).min(self.highest_known() + 1);
        let is_known = |fd: &usize| {
            self.fd_entry(*fd).is_some_and(|entry| entry.load(Ordering::Relaxed) != FD_UNKNOWN)
        };
        (first as usize..end).filter(is_known).map(|fd| fd as i32)
    }

    /// No number above it was ever known.
    fn highest_known(&self) -> usize {
        self.process().highest_fd.get() as usize
    }

    /// All descriptors up to the highest that could be known, for `fork` and `exec`.
    pub fn known_fds(&self) -> impl Iterator<Item = (i32, &'static Socket)> {
        let known = |fd| match self.fd_entry(fd)?.load(Ordering::Relaxed) {
            FD_UNKNOWN | FD_HIDDEN => None,
            index if index >= SET_BASE => None,
            index => Some((fd as i32, self.sockets.at(index as usize))),
        };
        (0..=self.highest_known()).filter_map(known)
    }
}

impl Socket {
    /// For another connection. (Threads that looked at the one before, which was closed beside them, may still be counted: each will count
    /// itself out here.)
    fn reset(&self, end: u32, fd: i32) {
        self.end.store(end, Ordering::Relaxed);
        self.fd.set(fd as u32);
        self.names.store(1, Ordering::Relaxed);
        self.stepping.store(0, Ordering::Relaxed);
        self.orphaned.store(0, Ordering::Relaxed);
        self.segment.store(0, Ordering::Relaxed);
        self.rung.set(0);
        self.first_step_ns.set(0);
        self.lease_due_ns.set(0);
        self.kernel_asked.set(0);
        self.sender_asked.set(0);
        self.found_nothing.set(0);
        self.has_sent.set(0);
        self.last_of_ring.set(0);
        for word in [
            &self.side,
            &self.calls,
            &self.meeting,
            &self.introduced,
            &self.shown,
            &self.stranger,
            &self.far_inode,
            &self.far_uid,
            &self.trusts_as,
            &self.lifeline,
            &self.channel,
            &self.comes_again,
            &self.again_tries,
            &self.next_lifeline,
            &self.next_channel,
            &self.epoch,
            &self.home,
            &self.bell,
            &self.boards,
            &self.watched,
            &self.watch_turn,
            &self.twin,
        ] {
            word.set(0);
        }
        self.anew.store(0, Ordering::Relaxed);
        self.again_due_ns.set(0);
        self.watches.store(0, Ordering::Relaxed);
        self.calls_before.set(0);
        self.waited_for.set(0);
        self.paired.set(0);
        self.kernel_news.reset();
        self.end_news.set(0);
        self.bells_left.set(0);
        self.kernel_asked_as.set(0);
        self.published.set(0);
        self.asked.set(0);
        self.slot.store(0, Ordering::Relaxed);
        self.parting.set(0);
        self.counted.set(0);
        self.service.set(0);
        self.counted_bytes.reset();
        self.inode.set(0);
        self.next_step.set(u32::MAX);
    }

    #[inline(always)]
    pub fn stage(&self) -> Stage {
        // ORDER: SeqCst; pairs with `set_stage`: a thread that has announced its native call and still sees an earlier stage is
        // seen by whoever attaches (`native_receivers`, `native_senders`).
        Stage::from_u32(self.stage.load(Ordering::SeqCst))
    }

    #[inline(always)]
    pub fn kind(&self) -> Kind {
        match self.kind.get() {
            0 => Kind::Tcp,
            1 => Kind::UnixStream,
            2 => Kind::Packets,
            _ => Kind::Datagrams,
        }
    }

    /// Does `datagram` serve it, and not what moves the bytes of connections?
    #[inline(always)]
    pub fn has_datagrams(&self) -> bool {
        self.kind() == Kind::Datagrams
    }

    /// `Closing` to `Free`: true for one caller only, who cleans up.
    pub fn leave(&self) -> bool {
        self.change_stage(Stage::Closing, Stage::Free)
    }

    /// Of many, one caller does it.
    pub fn change_stage(&self, from: Stage, to: Stage) -> bool {
        let (from, to) = (from as u32, to as u32);
        self.stage.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The next stage on the way to the ring; not of a socket that was closed meanwhile.
    pub fn advance(&self, to: Stage) -> bool {
        let from = self.stage();
        if from == Stage::Attached {
            // (Only who takes the steps writes it.)
            self.anew.store(if to == Stage::Kernel { 0 } else { to as u32 }, Ordering::Relaxed);
            return true;
        }
        from.may_move() && self.change_stage(from, to)
    }

    /// How far it has come on its way to a segment; of one that is attached, to another one (`again`).
    pub fn meeting_stage(&self) -> Stage {
        match self.stage() {
            Stage::Attached => match self.anew.load(Ordering::Relaxed) {
                0 => Stage::Kernel,
                stage => Stage::from_u32(stage),
            },
            stage => stage,
        }
    }

    pub fn meets_anew(&self) -> bool {
        self.anew.load(Ordering::Relaxed) != 0
    }

    /// It meets nobody any more. True if it did, to be carried again.
    pub fn meet_no_more_anew(&self) -> bool {
        self.anew.swap(0, Ordering::Relaxed) != 0
    }

    /// Its carrier has died, or the end has severed itself from it: another one is looked for, in a moment. (Unless that is given up, `again::never`.)
    pub fn lost_its_carrier(&self) {
        const AT_FIRST_NS: u64 = 1_000_000_000;
        let is_given_up = self.again_tries.get() == u32::MAX;
        if self.is_carried() && !self.comes_again.is() && !is_given_up {
            self.again_tries.set(0);
            self.again_due_ns.set(sys::now_ns() + AT_FIRST_NS);
            self.comes_again.set(1);
        }
    }

    /// Where what the node service gives us at a meeting is kept: a lifeline, and a channel.
    pub fn given(&self) -> [&P32; 2] {
        match self.stage() {
            Stage::Attached => [&self.next_lifeline, &self.next_channel],
            _ => [&self.lifeline, &self.channel],
        }
    }

    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u32, Ordering::SeqCst);
    }

    #[inline(always)]
    pub fn end(&self) -> &'static End {
        let tables = TABLES.get().expect("a socket exists only in tables");
        tables.ends.get(self.end_index())
    }

    #[inline(always)]
    pub fn end_index(&self) -> u32 {
        self.end.load(Ordering::Relaxed)
    }

    /// Counts a thread that goes into the kernel for this socket; it counts itself down at the word that is returned.
    #[inline(always)]
    pub fn enter_native(&self, count: fn(&End) -> &AtomicU32) -> &'static AtomicU32 {
        loop {
            let end = self.end();
            // ORDER: SeqCst, then the end (and the caller's look at the stage); pairs with `Tables::rehome`.
            count(end).fetch_add(1, Ordering::SeqCst);
            let tables = TABLES.get().expect("a socket exists only in tables");
            if core::ptr::eq(tables.ends.get(self.end.load(Ordering::SeqCst)), end) {
                return count(end);
            }
            count(end).fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A thread waits for room no more. (Never below none: in a child all counts begin anew, also that of a wait which a handler has
    /// interrupted to fork.)
    pub fn leave_room(&self) {
        let one_less = |count: u32| count.checked_sub(1);
        let _ = self.room_waiters.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    }

    /// The kernel has reported something on the descriptor: who receives or sends next asks it.
    pub fn kernel_tells(&self) {
        self.kernel_news.tell();
        self.end_news.set(1);
    }

    pub fn fd(&self) -> i32 {
        self.fd.get() as i32
    }

    /// A connection that nothing can move any more (a peer that was not found is looked for again where `ringlet on` asks for it).
    pub fn is_kernels_for_good(&self) -> bool {
        let barred = self.end().barred.get();
        self.stage() == Stage::KernelForGood
            && !self.has_datagrams()
            && barred != Reason::None as u32
            && barred != Reason::NoPeer as u32
    }

    /// Is it known to be connected, or about to be (`meet::begin`)?
    #[inline(always)]
    pub fn is_begun(&self) -> bool {
        self.next_step.get() != u32::MAX
    }

    /// From now on the peer can ring this context of ours. (What is in another one's set, or was told there as another entry, is asked for anew.)
    pub fn set_home(&self, context: u32) {
        self.home.set(context);
        self.watched.set(0);
    }

    /// Do we answer for its readiness?
    #[inline(always)]
    pub fn is_ours(&self) -> bool {
        matches!(self.stage(), Stage::Attached | Stage::Mailbox)
    }

    /// Does a process of the node service's carry between it and its peer, with which it shares no memory?
    pub fn is_far(&self) -> bool {
        self.introduced.get() & crate::interconnect::node::FAR != 0
    }

    pub fn is_carried(&self) -> bool {
        self.introduced.get() & crate::interconnect::node::CARRIED != 0
    }

    /// What lies between it and its peer, once it is attached.
    pub fn interconnect(&self) -> Interconnect {
        match self.end().mirrored.is() {
            false => Interconnect::Local,
            true => Interconnect::Mirrored,
        }
    }

    /// Records the segment; `attach` follows.
    pub fn set_segment(&self, area: Area, geometry: Geometry) {
        self.ring_bytes.set(geometry.ring_bytes as u64);
        self.segment.store(area.base() as usize, Ordering::Release);
    }

    pub fn geometry(&self) -> Option<Geometry> {
        Geometry::new(self.ring_bytes.get() as usize)
    }

    /// The mapped segment; `None` before it is there and after it is gone.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub fn segment(&self) -> Option<(Area, Geometry)> {
        let base = self.segment.load(Ordering::Acquire);
        if base == 0 {
            return None;
        }
        let geometry = Geometry { ring_bytes: self.ring_bytes.get() as usize };
        // SAFETY: mapped with this size by `meet`, and unmapped only by `take_segment`'s caller once nobody uses it.
        Some((unsafe { Area::new(base as *mut u8, geometry.segment_bytes()) }, geometry))
    }

    /// Takes the mapping away, to unmap it.
    pub fn take_segment(&self) -> Option<(Area, Geometry)> {
        let found = self.segment();
        self.segment.store(0, Ordering::Release);
        found
    }

    /// The ring that we send into, and the one that we receive from.
    #[inline(always)]
    pub fn outgoing(&self) -> Option<SegmentRing> {
        let (area, geometry) = self.segment()?;
        Some(SegmentRing::new(area, geometry, self.side.get() as usize & 1))
    }

    #[inline(always)]
    pub fn incoming(&self) -> Option<SegmentRing> {
        let (area, geometry) = self.segment()?;
        Some(SegmentRing::new(area, geometry, 1 - (self.side.get() as usize & 1)))
    }
}
