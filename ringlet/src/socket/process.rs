//! Descriptors and processes: close, dup, fork, exec, and what becomes of a connection then.

use super::holders::Held;
use super::in_use::Waiter;
use super::meeting;
use super::patience::wait_patiently;
pub use super::pin::is_closed_in;
use super::pin::{AROUND, BEHIND_OUR_BACK, CLOSED_IN, FOR_GOOD, IO_URING};
use super::release;
pub use super::table::borrowed;
use super::table::{
    self, Kind, Known, LENDER, Process, Receiving, Sending, Socket, Stage, Tables, lookup, tables,
};
use super::{
    address_space, boards, carrier, context, datagram, epoll, interrupted, jumps, lives, meet,
    memory, moving, pairs, pin, rest, rings, sides, view,
};
use crate::interconnect::mirrored;
use crate::local::{self, Local};
use crate::plain::P64;
use crate::reasons::Reason;
use crate::thread;
use ringlet_core::handover::Incoming;
use ringlet_core::sync::{AtomicU32, Ordering, fence};
use ringlet_linux::{apart, fd, map, sys, tcp};

/// A socket that may be moved was made: its descriptor is ours to follow. Whatever the number meant before is over (it was closed behind our
/// back).
pub fn made_socket(fd: i32, kind: Kind, domain: i32, nonblocking: bool) {
    reused(fd);
    if let Some(tables) = table::tables_for_new()
        && carrier::is_wanted(kind, &tables.config)
        && let Some(socket) = tables.follow(fd, kind)
    {
        match datagram::begin(socket, domain, nonblocking) {
            true if fd <= LAST_STANDARD => super::pin(socket, Reason::Stdio),
            true => {}
            false => view::appear(tables),
        }
    }
}

/// connect() has connected a UDP socket anew, or dissolved its connection.
pub fn reconnected(fd: i32) -> bool {
    matches!(lookup(fd), Some(Known::Socket(socket)) if datagram::connected(socket))
}

/// A pair of connected sockets was made. While one process holds both ends it stays on the kernel: such pairs wake event loops. The first end
/// offers.
pub fn made_pair(first: i32, second: i32, kind: Option<Kind>) {
    reused(first);
    reused(second);
    if let Some(tables) = table::tables_for_new()
        && let Some(kind) = kind
        && tables.config.allows_unix()
    {
        pairs::made_pair(tables, first, second, kind);
    }
}

/// A number was handed out by the kernel for something new.
#[inline]
pub fn reused(fd: i32) {
    if fd < 0 {
        return;
    }
    match lookup(fd) {
        None => {}
        Some(_) if is_split() => tables().into_iter().for_each(|tables| tables.clear(fd)),
        Some(Known::Socket(socket)) => {
            if let Some(tables) = tables() {
                tables.clear(fd);
                if socket.names.fetch_sub(1, Ordering::AcqRel) == 1 {
                    release(socket, false);
                }
            }
        }
        Some(Known::Set(set)) => {
            if let Some(tables) = tables() {
                tables.clear(fd);
            }
            epoll::closed(set);
        }
        Some(Known::Hidden) => {
            if let Some(tables) = tables() {
                tables.clear(fd);
            }
        }
    }
}

/// accept() returned this descriptor, of the same kind as its listener.
pub fn accepted(fd: i32, listener: i32) {
    let kind = match lookup(listener) {
        Some(Known::Socket(socket)) => Some(socket.kind()),
        _ if pin::is_closed_in() => None,
        // We have not seen it made: it was inherited.
        _ => carrier::kind_of(fd),
    };
    match kind {
        Some(kind) => {
            made_socket(fd, kind, 0, false);
            established(fd, true, || service_of(listener));
        }
        None => reused(fd),
    }
}

/// As what a listener listens.
fn service_of(listener: i32) -> u32 {
    let ask = || {
        let mut name = [0; fd::NAME_MAX_BYTES];
        fd::local_name(listener, &mut name).map_or(0, |name| lives::service(name, true))
    };
    match lookup(listener) {
        Some(Known::Socket(socket)) => {
            if !socket.service.is() {
                socket.service.set(ask());
            }
            socket.service.get()
        }
        _ => ask(),
    }
}

/// connect() to this address succeeded or is under way.
pub fn connected(fd: i32, address: &[u8]) {
    established(fd, false, || lives::service(address, false));
}

fn established(fd: i32, accepting: bool, service: impl FnOnce() -> u32) {
    memory::due();
    if let Some(Known::Socket(socket)) = lookup(fd)
        && socket.stage() == Stage::Kernel
    {
        let service = service();
        if socket.is_begun() && socket.service.get() == service && !accepting {
            // The second call of a connect that was under way.
            return;
        }
        meet::begin(socket, accepting, service);
        view::begin(socket);
        if fd <= LAST_STANDARD {
            super::pin(socket, Reason::Stdio);
        }
    }
}

/// Descriptors that stdio's own streams use.
const LAST_STANDARD: i32 = 2;

/// connect(AF_UNSPEC) is about to dissolve a connection: what comes after it on this descriptor is another one.
pub fn before_dissolve(fd: i32) {
    if let Some(Known::Socket(socket)) = lookup(fd)
        && !socket.has_datagrams()
    {
        super::keep_on_kernel(socket, Reason::NotConnected);
    }
}

/// A program that is about to be spawned gets this descriptor under another number.
pub fn given_to_spawned(fd: i32) {
    given_away(fd, Reason::Exec);
}

/// A vfork child has named a connection anew, for the program that it is about to become.
pub fn given_to_child(from: i32, to: i32) {
    if let Some(Known::Socket(socket)) = lookup(from)
        && names(from, socket)
        && !give(socket, Reason::Exec)
    {
        keep_from(socket, to);
    }
}

/// Has this process made one that borrows its memory (or one that it comes from)?
static LENDS: AtomicU32 = AtomicU32::new(0);

/// It is about to. (Of a child that has looked at nothing, the other would take itself for that child.)
pub fn lends_memory() {
    if tables().is_none() && LENDER.load(Ordering::Relaxed) == 0 {
        LENDER.store(sys::getpid() as u32, Ordering::Relaxed);
    }
    if LENDS.load(Ordering::Relaxed) == 0 {
        LENDS.store(1, Ordering::Relaxed);
    }
}

/// Are we in a vfork child? (Of a process that has closed itself in, and makes none, nobody asks who we are: that is a call which a filter may
/// forbid.)
pub fn is_lent() -> bool {
    (LENDS.load(Ordering::Relaxed) != 0 || !pin::is_closed_in()) && borrowed()
}

/// A connection that has not begun to move, under its only name in its only process: most end so. Nothing of it is in memory that anybody
/// shares, so nobody need be waited for. False: it is to be closed as any other.
///
/// Nor is it asked who we are (that is a system call), unless this process has made vfork children. One that was made around libc makes us
/// forget what its parent goes on with; then that stays on the kernel, which is no harm.
fn close_young(tables: &'static Tables, fd: i32, socket: &'static Socket) -> bool {
    let may = || {
        socket.stage() == Stage::Kernel
            && socket.names.load(Ordering::Relaxed) == 1
            && socket.end().holders.count() == 1
            && !socket.twin.is()
            && !socket.meeting.is()
            && !socket.shown.is()
    };
    if LENDS.load(Ordering::Relaxed) != 0 || is_split() || !may() {
        return false;
    }
    jumps::look_back();
    let _inside = tables.process().gate.enter();
    // ORDER: as in `meet::step_once`. Nobody moves it meanwhile, or gets it another end. (And a fork may have come before the gate.)
    if socket.stepping.swap(1, Ordering::SeqCst) != 0 {
        return false;
    }
    let young =
        may() && socket.names.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if young {
        socket.parting.set(1);
        // As `release` does, for the last sleeper.
        socket.published.set(2);
        // ORDER: SeqCst; pairs with `Waiter::new`: a thread that looks at it is seen below, or sees this.
        socket.set_stage(Stage::Closing);
        tables.clear(fd);
    }
    socket.stepping.swap(0, Ordering::SeqCst);
    if !young {
        pin::settle(socket);
        return false;
    }
    tables.services.note_end(socket.service.get(), socket.calls.get());
    epoll::forget_socket(socket);
    if socket.sleepers.load(Ordering::SeqCst) == 0 {
        release::clean_up_young(tables, socket);
    }
    true
}

/// Before a known descriptor number is closed (or overwritten by dup2). False: it is one of our own and stays open.
pub fn before_close(fd: i32, known: Known) -> bool {
    if let Known::Socket(socket) = known
        && let Some(tables) = tables()
        && close_young(tables, fd, socket)
    {
        return true;
    }
    if let Known::Socket(socket) = known
        && socket.last_of_ring.is()
        && socket.names.load(Ordering::Relaxed) == 1
    {
        rest::is_left(socket);
        if thread::is_left_alone() {
            return true;
        }
    }
    if is_lent() {
        return true;
    }
    let Some(tables) = tables() else { return true };
    jumps::look_back();
    match known {
        Known::Hidden => return false,
        _ if is_split() => {}
        Known::Set(set) => {
            tables.clear(fd);
            epoll::closed(set);
        }
        Known::Socket(socket) => {
            tables.clear(fd);
            if socket.names.fetch_sub(1, Ordering::AcqRel) == 1 {
                if !leave_to_sleepers(tables, socket) {
                    release(socket, true);
                }
                return true;
            }
            epoll::number_closes(socket, fd);
            if socket.fd() == fd {
                let other = tables.known_fds().find(|(_, other)| core::ptr::eq(*other, socket));
                if let Some((other, _)) = other {
                    socket.fd.set(other as u32);
                    context::renumbered(socket, fd);
                    view::count(socket, |slot| slot.fd.store(other, Ordering::Relaxed));
                }
            }
        }
    }
    true
}

/// dup and its relatives made `to` another name of `from`.
pub fn duplicated(from: i32, to: i32) {
    reused(to);
    let Some(tables) = tables().filter(|_| !is_split()) else { return };
    match lookup(from) {
        Some(Known::Socket(socket)) => {
            socket.names.fetch_add(1, Ordering::AcqRel);
            tables.name_socket(to, socket);
            if to <= LAST_STANDARD {
                // stdio's own streams read and write there below our feet.
                super::keep_on_kernel(socket, Reason::Stdio);
            }
        }
        Some(Known::Set(set)) => {
            epoll::named(set);
            tables.name_set(to, set);
        }
        _ => {}
    }
}

/// KERNEL: a call that waits on a descriptor holds the connection open when another thread closes it. So does ours: the sleepers
/// keep it by a descriptor of our own, and the last of them closes it.
fn leave_to_sleepers(tables: &'static Tables, socket: &'static Socket) -> bool {
    if socket.stage() != Stage::Attached || socket.sleepers.load(Ordering::SeqCst) == 0 {
        return false;
    }
    let Ok(kept) = fd::duplicate_high(socket.fd(), fd::HIDDEN_FROM) else { return false };
    tables.hide(kept);
    epoll::forget_socket(socket);
    let before = socket.fd();
    socket.fd.set(kept as u32);
    context::renumbered(socket, before);
    // ORDER: SeqCst; pairs with `wait::wait`: the last sleeper sees this, or we see that it has left.
    socket.orphaned.store(1, Ordering::SeqCst);
    if socket.sleepers.load(Ordering::SeqCst) == 0 {
        release::close_orphan(socket);
    }
    true
}

/// The last sleeper of a connection that was closed meanwhile has left (`release::Close`).
pub fn close_orphan(socket: &'static Socket) {
    let kept = socket.fd();
    release(socket, true);
    if let Some(tables) = tables() {
        tables.close_hidden(kept);
    }
}

/// The process's last name of a socket goes. `open`: its descriptor still names it.
fn release(socket: &'static Socket, open: bool) {
    let end = socket.end();
    // KERNEL: where the first access to shared memory is a store, its page alone is mapped; at a load, those around it are too.
    end.holders.count();
    let Some(tables) = tables() else { return };
    if socket.is_ours() {
        // (Of those who were killed nobody is to wait for.)
        tables.holders.is_alone(&end.holders);
    }
    let last = {
        let _inside = tables.process().gate.enter();
        socket.parting.set(1);
        tables.holders.leave(&end.holders)
    };
    if last {
        tables.services.note_end(socket.service.get(), socket.calls.get());
    }
    meet::close(socket);
    if open {
        context::unwatch(socket);
    }
    if last && open && socket.shown.is() {
        epoll::unregister(socket);
    }
    let withdrawn = epoll::forget_socket(socket);
    if socket.twin.is() {
        pairs::part(tables, socket);
    }
    {
        // Without the locks (we are in a signal handler that interrupted their holder) we only stop using it.
        let _receiving = end.receive_lock.take();
        let _sending = end.send_lock.take();
        if socket.stage() == Stage::Attached && last && open && !end.given.is() {
            close_ring(socket);
        }
        datagram::release(socket, last);
        // What the last sleeper has to know.
        socket.published.set(1 + last as u32);
        // ORDER: SeqCst; pairs with `release::leave`: a sleeper that we do not see sees this.
        socket.set_stage(Stage::Closing);
    }
    if withdrawn && socket.sleepers.load(Ordering::SeqCst) == 0 {
        release::clean_up_as(socket, last, true);
    }
}

/// The connection's end is over: says to the peer what TCP would. Both locks held.
fn close_ring(socket: &Socket) {
    let Some(incoming) = socket.incoming() else { return };
    let end = socket.end();
    // From now on the peer sends through the kernel, and rings no more.
    // ORDER: SeqCst, both; pairs with `sides::ring_byte`.
    let unread = sides::incoming(socket, end, &incoming).close();
    if let Some(outgoing) = socket.outgoing() {
        let shut = outgoing.control().sender.shut.load(Ordering::Relaxed);
        let how = carrier::end_told(socket, shut, unread);
        moving::end_direction_now(socket, end, &outgoing, how);
    }
    match end.receiving() {
        // KERNEL: close with unread data sends a reset.
        _ if unread => tcp::reset_on_close(socket.fd()),
        Receiving::Ring => moving::drain_bells(socket, end, &incoming),
        _ => {}
    }
    // (Over a mirror our end would else stay open.)
    if !mirrored::part(socket) {
        moving::close_orphan(socket, end);
    }
}

/// A fork, as `Process::age` numbers them, and the child's place (`holders`), plus one.
#[derive(Clone, Copy)]
struct Fork {
    number: u32,
    place: u32,
}

/// The one that this thread is making, until it has made it, and in the child until that has looked; and the one that it made last. An only
/// thread has them beside what a fork changes anyway.
static FORKING: Local<u64> = Local::new(local::FORK);
static FORKED: Local<u64> = Local::new(local::LAST_FORK);

impl Fork {
    fn from(word: u64) -> Option<Fork> {
        (word != 0).then_some(Fork { number: (word >> 32) as u32, place: word as u32 })
    }

    fn note(self, threads: &Local<u64>, processes: &P64) {
        let word = u64::from(self.number) << 32 | u64::from(self.place);
        if thread::is_alone() { processes.set(word) } else { threads.set(word) }
    }

    fn noted(threads: &Local<u64>, processes: &P64) -> Option<Fork> {
        Fork::from(threads.get()).or_else(|| Fork::from(processes.get()))
    }

    /// (A page that holds none is not written to.)
    fn take(threads: &Local<u64>, processes: &P64) -> Option<Fork> {
        let noted = Fork::noted(threads, processes);
        match threads.get() {
            0 if noted.is_some() => processes.set(0),
            0 => {}
            _ => threads.set(0),
        }
        noted
    }
}

/// Before the copy that a fork makes: from then on two processes hold every socket. Nothing changes until `after_fork_in_parent`.
pub fn before_fork() {
    super::asked::before_fork();
    let Some(tables) = tables() else { return };
    let process = tables.process();
    tables.followed().for_each(epoll::before_fork);
    process.gate.shut();
    interrupted::before_fork(tables, epoll::before_fork_amid() | context::is_asking());
    view::before_fork(tables);
    let number = process.age.add(1);
    // (Where that can't be had there is no connection.)
    let (noted, place) = if map::share() {
        let all = tables.followed().map(|each| &each.end().holders);
        tables.holders.before_fork(process.pid.get(), number, all)
    } else {
        (0, 0)
    };
    for socket in tables.followed().filter(|socket| !socket.parting.is()) {
        if place == 0 {
            socket.counted.set(number);
        }
        socket.end().holders.share(noted);
        datagram::before_fork(socket);
    }
    Fork { number, place }.note(&FORKING, &process.forking);
}

/// Has a descriptor for a moment, which no child by fork may get. (A child that is made around libc gets it, as a program that it executes does not.)
pub fn apart_from_forks<T>(work: impl FnOnce() -> T) -> T {
    let _inside = tables().map(|tables| tables.process().gate.enter());
    work()
}

/// After it, in the parent.
pub fn after_fork_in_parent() {
    let Some(tables) = tables() else { return };
    let process = tables.process();
    if let Some(fork) = Fork::take(&FORKING, &process.forking) {
        fork.note(&FORKED, &process.forked);
    }
    interrupted::after_fork_in_parent();
    tables.process().gate.open(false);
}

/// There is no child. (What another thread has closed meanwhile was closed as by a process that shares it.)
pub fn fork_failed() {
    let Some(tables) = tables() else { return };
    let Some(fork) = Fork::take(&FORKED, &tables.process().forked) else { return };
    let counted = |socket: &&Socket| match fork.place {
        0 => socket.counted.swap(0) == fork.number,
        place => socket.end().holders.is_noted(place),
    };
    let counted = tables.followed().filter(|socket| !socket.parting.is()).filter(counted);
    tables.holders.unborn(fork.place, counted.map(|socket| &socket.end().holders));
}

/// There is one, and that is its number.
pub fn forked(child: i32) {
    if let Some(tables) = tables()
        && let Some(fork) = Fork::take(&FORKED, &tables.process().forked)
    {
        tables.holders.born(fork.place, child);
    }
}

/// After it, in the child. (Any look at the tables does what is to be done: a child that makes none, as most that end at once or become another
/// program, need not pay for it. But a frame that a handler has interrupted looks no more.)
pub fn after_fork_in_child() {
    if LENDER.load(Ordering::Relaxed) != 0 {
        LENDER.store(0, Ordering::Relaxed);
    }
    if interrupted::was_at_work() {
        thread::look_for_fork();
    }
}

/// In a child, at its first call, however the fork was made.
#[cold]
pub fn after_fork() {
    let Some(tables) = tables() else { return };
    let process = tables.process();
    let parent = process.pid.get();
    process.pid.set(sys::getpid() as u32);
    map::begin_sharing_anew();
    process.age.add(1);
    apart::after_fork();
    rings::after_fork();
    Fork::take(&FORKED, &process.forked);
    let counted = Fork::take(&FORKING, &process.forking).is_some_and(|fork| {
        // KERNEL: who has lost its parent has another; it is counted once too often then.
        let is_child = fork.place != 0 || sys::getppid() as u32 == parent;
        is_child && tables.holders.begin(fork.place, process.pid.get())
    });
    if !counted {
        tables.holders.begin(0, process.pid.get());
    }
    process.gate.open(true);
    process.view_lock.reset();
    process.spawn_lock.reset();
    process.spawns.set(0);
    end_withholding(process);
    // Loads of the parent's other threads.
    if BEHIND_OUR_BACK.load(Ordering::Relaxed) & !FOR_GOOD != 0 {
        BEHIND_OUR_BACK.fetch_and(FOR_GOOD, Ordering::SeqCst);
    }
    context::forget_all(tables, |set, eventfd| epoll::inherit(tables, set, eventfd));
    boards::forget_all(tables);
    view::forget(tables);
    super::tap::forget(tables);
    epoll::after_fork(tables, parent);
    interrupted::after_fork_in_child(tables, |socket, at_work| disown(tables, socket, at_work));
    for socket in tables.ever_followed() {
        // The parent's threads are not ours. (A table that nobody writes to stays the parent's memory.)
        for count in [&socket.sleepers, &socket.room_waiters] {
            if count.load(Ordering::Relaxed) != 0 {
                count.store(0, Ordering::Relaxed);
            }
        }
    }
    for socket in tables.followed() {
        if socket.parting.is() {
            // Another thread of the parent was about to close it.
            meeting::abandon(socket);
            socket.set_stage(Stage::Closing);
            release::clean_up_as(socket, true, false);
            continue;
        }
        if !counted {
            tables.holders.join(process.pid.get(), &socket.end().holders);
        }
        // Nor is its rendezvous.
        socket.stepping.store(0, Ordering::Relaxed);
        meeting::forget(socket);
        datagram::after_fork(socket);
        if socket.stage().is_meeting() {
            socket.set_stage(Stage::Kernel);
            socket.next_step.set(socket.calls.get() + 1);
        }
    }
    jumps::count_again();
    // A wait of the parent's other threads does not keep open here what was closed beside it.
    let nobodys = |socket: &&Socket| {
        socket.stage() == Stage::Attached && socket.sleepers.load(Ordering::SeqCst) == 0
    };
    tables.followed().filter(nobodys).for_each(release::close_orphan);
}

/// In a child that is not to have this connection, which its parent goes on with: its descriptors name an unconnected socket from now on, of
/// which nothing is known here. `at_work`: this thread is still at work there, so nothing that it uses becomes another's.
pub fn disown(tables: &'static Tables, socket: &'static Socket, at_work: bool) {
    for (number, _) in tables.known_fds().filter(|(_, each)| core::ptr::eq(*each, socket)) {
        keep_from(socket, number);
        tables.clear(number);
    }
    epoll::forget_socket(socket);
    meeting::forget(socket);
    tables.holders.leave(&socket.end().holders);
    if at_work {
        let _ = socket.take_segment();
        socket.set_stage(Stage::KernelForGood);
    } else {
        socket.set_stage(Stage::Closing);
        release::clean_up_as(socket, false, false);
    }
}

/// Another program will hold this descriptor, and know nothing of rings: the connection stays on the kernel.
pub fn given_away(fd: i32, reason: Reason) {
    match lookup(fd) {
        Some(Known::Socket(socket)) if !give(socket, reason) => carrier::break_off(socket),
        Some(Known::Set(set)) if !borrowed() => {
            epoll::given_away(set, |socket| give(socket, reason))
        }
        _ => {}
    }
}

/// Brings a connection to the kernel for another program, which then holds it too. False: that program must not get it.
fn give(socket: &'static Socket, reason: Reason) -> bool {
    // Another thread that closes it leaves it to us.
    let _in_use = Waiter::new(socket);
    if matches!(socket.stage(), Stage::Free | Stage::Closing) {
        return true;
    }
    if socket.stage() != Stage::Attached {
        super::pin(socket, reason);
    }
    // (Or another thread has moved it meanwhile.)
    if socket.stage() == Stage::Attached {
        if !moving::return_to_kernel(socket, reason) {
            return false;
        }
        // Nothing tells when who gets it has closed it.
        mirrored::part(socket);
        if !moving::give_channel(socket) {
            return false;
        }
    }
    socket.end().given.set(1);
    true
}

/// Brings to the kernel what the new program inherits. `keep` is told of each number that it must not get.
fn give_inherited(tables: &'static Tables, keep: impl Fn(i32, &'static Socket)) {
    for (fd, socket) in tables.known_fds() {
        let inherited = socket.stage() != Stage::Free && fd::is_inherited(fd) && names(fd, socket);
        if inherited && !give(socket, Reason::Exec) {
            keep(fd, socket);
        }
    }
}

/// Does a number that we know still name this socket? In a vfork child it may not, and the tables are the parent's.
fn names(fd: i32, socket: &Socket) -> bool {
    !borrowed() || !socket.inode.is() || carrier::inode(fd) == socket.inode.get()
}

/// A program that must not get a connection finds an unconnected socket under its number. Called in the child that becomes the program.
fn keep_from(socket: &Socket, number: i32) {
    if let Ok(other) = carrier::unconnected(socket) {
        fd::replace(number, other);
        sys::close(other);
    } else {
        sys::close(number);
    }
}

/// Before another program is spawned beside this one. What it must not get is close-on-exec until `after_spawn`.
pub fn before_spawn() {
    let Some(tables) = tables() else { return };
    let process = tables.process();
    let _held = process.spawn_lock.take();
    process.spawns.add(1);
    give_inherited(tables, |fd, socket| {
        match process.withheld.iter().find(|number| !number.is()) {
            Some(free) => {
                free.set(fd as u32 + 1);
                fd::set_cloexec(fd, true);
            }
            None => carrier::break_off(socket),
        }
    });
}

/// It was spawned, or was not.
pub fn after_spawn() {
    let Some(tables) = tables() else { return };
    let process = tables.process();
    let _held = process.spawn_lock.take();
    process.spawns.set(process.spawns.get().saturating_sub(1));
    if !process.spawns.is() {
        end_withholding(process);
    }
}

fn end_withholding(process: &Process) {
    for number in &process.withheld {
        let fd = number.swap(0) as i32 - 1;
        // It may mean something else by now.
        if let Some(Known::Socket(socket)) = lookup(fd)
            && socket.end().barred.get() == Reason::Exec as u32
        {
            fd::set_cloexec(fd, false);
        }
    }
}

/// Before the exec of a process that may have others beside it, which go on with what the new program must not get.
fn before_exec_alone() {
    let Some(tables) = tables() else { return };
    give_inherited(tables, |fd, socket| {
        if borrowed() || !tables.holders.is_alone(&socket.end().holders) {
            keep_from(socket, fd);
        } else {
            carrier::break_off(socket);
        }
    });
    if !borrowed() {
        epoll::give_back_inherited(tables);
    }
}

/// This process is about to become another program, and what it does not hand over it no longer holds.
pub fn before_exec() {
    before_exec_alone();
    if !borrowed() {
        for socket in tables().into_iter().flat_map(|tables| tables.followed()) {
            // Who sends datagrams here finds out at once that there is nobody.
            datagram::close_inlets(socket);
            let end = socket.end();
            if socket.stage() == Stage::Attached {
                moving::finish_return(socket, end);
            }
            let is_alone = || tables().is_some_and(|tables| tables.holders.is_alone(&end.holders));
            // (If it does not become one, it goes on with what it has.)
            if moving::loses_by_bells(socket, end) && is_alone() {
                moving::drain_before_end(socket, end);
            }
        }
        hold(|tables, held| {
            tables.holders.leave(held);
        });
        tables().into_iter().for_each(epoll::before_exec);
    }
    // (Last, since what is mapped already may be more. A vfork child has limits of its own.)
    address_space::before_exec();
}

/// It did not become one.
pub fn after_failed_exec() {
    address_space::after_failed_exec();
    if !borrowed() {
        hold(|tables, held| tables.holders.join(tables.process().pid.get(), held));
        tables().into_iter().for_each(epoll::after_failed_exec);
    }
}

fn hold(change: impl Fn(&Tables, &Held)) {
    let Some(tables) = tables() else { return };
    tables.followed().for_each(|socket| change(tables, &socket.end().holders));
}

/// A child ends that has looked at nothing of ours since it was forked: nothing was begun here, so that nothing is to be finished, unless its
/// parent has left something to it. False: it has looked, or is to.
fn at_exit_unseen() -> bool {
    let Some(tables) = table::tables_unseen() else { return true };
    let process = tables.process();
    let Some(fork) = Fork::noted(&FORKING, &process.forking) else { return false };
    if process.pid.get() == sys::getpid() as u32 {
        return false;
    }
    // What has never been connected nobody asks about; if somebody does, this process was noted, and is dead.
    let held = |socket: &Socket| {
        socket.stage() != Stage::Free
            && !socket.parting.is()
            && (socket.is_begun() || socket.has_datagrams() || fork.place == 0)
    };
    let is_last = |socket: &Socket| {
        socket.has_datagrams()
            || socket.end().holders.count() <= 1
            || socket.is_ours() && socket.end().sending() == Sending::Returning
    };
    // (Plain loops: what they call lies in other pages, which the child had to map.)
    for socket in tables.ever_followed() {
        if held(socket) && is_last(socket) {
            return false;
        }
    }
    for socket in tables.ever_followed() {
        if held(socket) && tables.holders.leave_at(fork.place, &socket.end().holders) {
            left_by_the_last(tables, socket);
        }
    }
    true
}

/// This process ends, and nobody else holds the socket.
fn left_by_the_last(tables: &Tables, socket: &'static Socket) {
    tables.services.note_end(socket.service.get(), socket.calls.get());
    carrier::exiting(socket);
    // (What this end still does is delivered as long as the peer is there.)
    if !mirrored::part(socket) {
        let end = socket.end();
        moving::finish_return(socket, end);
        let _receiving = end.receive_lock.take();
        let _sending = end.send_lock.take();
        moving::close_orphan(socket, end);
        return;
    }
    moving::drain_before_end(socket, socket.end());
}

/// This process ends, with connections open: the family goes on without it. (One that is killed is counted until somebody asks: `holders`.)
pub fn at_exit() {
    if at_exit_unseen() || ends_unheard() || borrowed() {
        return;
    }
    let Some(tables) = tables() else { return };
    for socket in tables.followed() {
        datagram::at_exit(socket);
        let end = socket.end();
        if socket.stage() == Stage::Attached {
            moving::finish_return(socket, end);
        }
        if end.holders.count() > 1 && moving::loses_by_bells(socket, end) {
            // (Those who were killed do not deliver it.)
            tables.holders.is_alone(&end.holders);
        }
        if tables.holders.leave(&end.holders) {
            left_by_the_last(tables, socket);
        }
    }
}

/// Before the process changes its user or group: it may be about to become less trusted than those with whom it shares connections. These go
/// back to the kernel, as for another program, and no memory is shared any more, so that whoever takes the process over finds nothing to
/// write to. (Ends that are in use by several threads stay where they are.)
pub fn before_credentials(single_threaded: bool) {
    let Some(tables) = tables().filter(|_| !borrowed()) else { return };
    let age = tables.process().age.get();
    view::leave_parents(tables.process());
    for socket in tables.followed().filter(|socket| !tables.has_own_end(socket)) {
        let shared = !tables.holders.is_alone(&socket.end().holders);
        if datagram::part(socket) {
            continue;
        }
        let attached = socket.stage() == Stage::Attached;
        if shared && attached && !give(socket, Reason::Credentials) {
            // The others go on with what the kernel can't hand over.
            for (number, _) in tables.known_fds().filter(|(_, each)| core::ptr::eq(*each, socket)) {
                keep_from(socket, number);
                reused(number);
            }
            continue;
        }
        if single_threaded && tables.take_along(socket) && shared && !attached {
            super::pin(socket, Reason::Credentials);
        }
    }
    tables.ends.part(age);
    tables.services.part(age);
    tables.holders.part(age, tables.followed().any(|socket| !tables.has_own_end(socket)));
    datagram::part_all(age);
}

/// Before the process closes itself in: a filter may end it for a system call that it would not make by itself. So its connections go back to the
/// kernel, as for another program, and nothing is followed any more. Then no call is made here but the program's own.
///
/// Where other threads are, these go back too, but stay known until they are closed. (So does what a thread is at work with, or what can't be handed
/// over, and that still takes calls of ours.)
pub fn closes_in() {
    if thread::is_left_alone() || is_lent() {
        return;
    }
    BEHIND_OUR_BACK.fetch_or(CLOSED_IN, Ordering::SeqCst);
    // ORDER: as in `happens_behind_our_back`.
    fence(Ordering::SeqCst);
    let Some(tables) = tables() else {
        table::never_begin();
        return thread::leave_alone();
    };
    let alone = thread::is_alone();
    let moves = |socket: &Socket| socket.stage() == Stage::Attached || socket.has_datagrams();
    let gives = |socket: &'static Socket| moves(socket) && give(socket, Reason::Sandbox);
    for number in tables.known_numbers(0, u32::MAX) {
        if let Some(Known::Set(set)) = lookup(number) {
            epoll::closes_in(set, gives);
        }
    }
    let mut all = alone;
    for socket in tables.followed() {
        if alone && !is_at_work(socket) && rest::stays(tables, socket) {
            all = false;
            continue;
        }
        let gone = (!moves(socket) || gives(socket))
            && !is_at_work(socket)
            && !datagram::lanes_ready(socket);
        if gone && socket.change_stage(Stage::Attached, Stage::KernelForGood) {
            // (Another thread may have begun to wait there meanwhile.)
            match is_at_work(socket) {
                false => release::part_from_segment(tables, socket, true),
                true => socket.set_stage(Stage::Attached),
            }
        }
        all &= gone;
    }
    if all {
        return forget_all(tables);
    }
    for socket in tables.followed().filter(|socket| socket.stage().may_move()) {
        super::pin(socket, Reason::Sandbox);
    }
    if alone {
        let left =
            |socket: &&Socket| socket.stage() == Stage::Attached && !socket.last_of_ring.is();
        let attached = tables.followed().filter(left);
        attached.for_each(|socket| socket.last_of_ring.set(rest::is_last(socket) as u32));
    }
}

/// Is a thread at it, or a frame that the handler has interrupted in which we are?
fn is_at_work(socket: &Socket) -> bool {
    let end = socket.end();
    socket.sleepers.load(Ordering::SeqCst) != 0
        || socket.stepping.load(Ordering::SeqCst) != 0
        || end.receive_lock.is_ours()
        || end.send_lock.is_ours()
}

/// Of a process that has closed itself in, and has nothing left on a ring but what it has not read: who shares its ends sees when it is over.
fn ends_unheard() -> bool {
    if !pin::is_closed_in() {
        return false;
    }
    let followed = || tables().into_iter().flat_map(|tables| tables.followed());
    followed().filter(|socket| socket.last_of_ring.is()).for_each(rest::is_left);
    !followed().any(|socket| socket.stage() == Stage::Attached)
}

/// Nothing is on the ring. This process still counts as one that holds what it shares with others: until it ends they leave that on the kernel.
fn forget_all(tables: &'static Tables) {
    for socket in tables.followed() {
        let own = tables.has_own_end(socket);
        datagram::release(socket, own);
        socket.set_stage(Stage::Closing);
        release::clean_up_as(socket, own, true);
    }
    let age = tables.process().age.get();
    tables.ends.part(age);
    tables.services.part(age);
    tables.holders.part(age, false);
    datagram::part_all(age);
    for number in tables.known_numbers(0, u32::MAX) {
        if let Some(Known::Hidden) = lookup(number) {
            tables.close_hidden(number);
        }
    }
    view::leave(tables.process());
    table::never_begin();
    thread::leave_alone();
}

/// Before a thread gets a descriptor table of its own. From then on numbers mean different things to different threads, which tables can't
/// tell: what they have goes to the kernel, a close is the kernel's affair, and nothing new is followed.
pub fn before_split() {
    if borrowed() {
        return;
    }
    let Some(tables) = tables() else { return table::never_begin() };
    tables.process().split.set(1);
    for socket in tables.followed() {
        give(socket, Reason::OwnFiles);
    }
}

fn is_split() -> bool {
    tables().is_some_and(|tables| tables.process().split.is())
}

/// The program gives this descriptor to something that uses the kernel below our feet.
pub fn keep_fd_on_kernel(fd: i32, reason: Reason) {
    if let Some(Known::Socket(socket)) = lookup(fd) {
        super::keep_on_kernel(socket, reason);
    }
}

/// For dup in a vfork child: is either number known, so that the parent's tables would be changed by mistake?
pub fn borrowed_if_known(from: i32, to: i32) -> bool {
    (lookup(from).is_some() || lookup(to).is_some()) && is_lent()
}

/// The program wants the number of one of our own descriptors: the descriptor moves away.
pub fn make_way(fd: i32) -> bool {
    context::move_away(fd, epoll::elders(), boards::numbers(), epoll::renamed)
        || view::move_away(fd)
        || datagram::move_door(fd)
        || meet::give_up_number(fd)
        || mirrored::move_away(fd)
}

/// Known descriptors in a range, lowest first.
pub fn known_between(first: u32, last: u32) -> impl Iterator<Item = i32> {
    tables().into_iter().flat_map(move |tables| tables.known_numbers(first, last))
}

fn happens_behind_our_back(reason: Reason, change: impl Fn(&AtomicU32) -> u32) {
    change(&BEHIND_OUR_BACK);
    // ORDER: SeqCst; pairs with `meet::step_once`: we see that a connection has just been attached, or it sees this.
    fence(Ordering::SeqCst);
    let moved = |socket: &&Socket| matches!(socket.stage(), Stage::Attached | Stage::Mailbox);
    let all = || tables().into_iter().flat_map(|tables| tables.followed()).filter(moved);
    all().for_each(moving::leave_early);
    all().for_each(answer);
    all().for_each(|socket| super::keep_on_kernel(socket, reason));
    // What is unread in a ring comes by the kernel when the peer has sent it again, which it does at its next call.
    wait_patiently(|| {
        all().for_each(answer);
        !all().any(moving::is_owed)
    });
}

fn answer(socket: &'static Socket) {
    let _in_use = Waiter::new(socket);
    if socket.stage() == Stage::Attached {
        sides::answer_return(socket, socket.end());
    }
}

/// An io_uring reads and writes behind our back: from now on every connection of this process is on the kernel.
pub fn uses_io_uring() {
    happens_behind_our_back(Reason::IoUring, |bits| bits.fetch_or(IO_URING, Ordering::SeqCst));
}

/// So do functions of libc that are not reached by way of ours.
pub fn is_reached_around() {
    happens_behind_our_back(Reason::Around, |bits| bits.fetch_or(AROUND, Ordering::SeqCst));
}

/// A library is about to be loaded that prefers libc's functions to ours, and its constructors run before we can lead it to ours.
pub fn begin_loading_deep() {
    happens_behind_our_back(Reason::Around, |bits| bits.fetch_add(1, Ordering::SeqCst));
}

pub fn end_loading_deep() {
    BEHIND_OUR_BACK.fetch_sub(1, Ordering::SeqCst);
}
