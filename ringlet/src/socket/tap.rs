//! Recording what goes over a connection, for `ringlet capture` (layout: `ringlet_core::tap`).
//!
//! The memory is this process's own, made when the first byte is to be recorded; the command finds it as it finds the page. It
//! ends when the command says so, or when the command has shown no sign of life for a while.

use super::table::{End, Process, Receiving, Sending, Socket, Tables, tables};
use super::view;
use ringlet_core::memory::{Area, Buffers};
use ringlet_core::sync::AtomicU64;
use ringlet_core::sync::Ordering::{Relaxed, SeqCst};
use ringlet_core::tap::*;
use ringlet_core::view::{ADDRESS_NONE, ADDRESS_TCP, ASKED_TAP, ASKED_TAP_END, SocketSlot};
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::tcp::Address;
use ringlet_linux::{fd, map, tcp, udp};

/// Without a sign of life for so long, whoever asked is gone.
const ABANDONED_NS: u64 = 5_000_000_000;
/// How long the last user of the memory waits for the others.
const CLOSE_LOOKS: u32 = 1000;

/// Makes the transfer, which is told what is asked of the connection (`view::asked`), and records it if that was asked. The
/// direction's lock is held.
#[inline(always)]
pub fn recorded<'a>(
    socket: &Socket,
    end: &End,
    direction: Direction,
    buffers: &mut Buffers<'a>,
    transfer: impl FnOnce(&mut Buffers<'a>, u32) -> Sys<usize>,
) -> Sys<usize> {
    let asked = view::asked(socket);
    if asked & ASKED_TAP != 0 {
        return and_record(socket, end, direction, buffers, |buffers| transfer(buffers, asked));
    }
    transfer(buffers, asked)
}

#[cold]
#[inline(never)]
fn and_record<'a>(
    socket: &Socket,
    end: &End,
    direction: Direction,
    buffers: &mut Buffers<'a>,
    transfer: impl FnOnce(&mut Buffers<'a>) -> Sys<usize>,
) -> Sys<usize> {
    let before = buffers.clone();
    let done = transfer(buffers);
    if let Ok(n @ 1..) = done {
        // (Of a packet that was longer than the buffers only what they hold is known.)
        let n = n.min(before.remaining());
        record(socket, end, direction, before, n);
    }
    done
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Sent,
    Received,
    /// Received, and not wanted by the program (MSG_TRUNC).
    Discarded,
    /// Not to be recorded: it will be received again.
    Peeked,
}

impl Direction {
    pub fn of_receive(flags: i32) -> Direction {
        match (flags & libc::MSG_PEEK != 0, flags & libc::MSG_TRUNC != 0) {
            (true, _) => Direction::Peeked,
            (_, true) => Direction::Discarded,
            _ => Direction::Received,
        }
    }
}

/// Counts itself in as long as it may touch the memory.
struct User(&'static Process);

impl User {
    fn new(process: &'static Process) -> User {
        // ORDER: SeqCst; pairs with `close`: it sees us, or we see that the memory is gone.
        process.tap_users.fetch_add(1, SeqCst);
        User(process)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.0.tap_users.fetch_sub(1, SeqCst);
    }
}

/// Writes to the memory, if somebody still reads it; of each piece so many bytes at most are kept.
fn with_memory(write: impl FnOnce(&Tap, usize)) {
    let Some(tables) = tables().filter(|tables| is_wanted(tables)) else { return };
    let process = tables.process();
    let _user = User::new(process);
    let Some(tap) = memory(process).or_else(|| open(tables)) else { return };
    let limit = view::header(tables).map_or(0, |header| header.tap_snaplen.load(Relaxed));
    write(&tap, limit as usize);
}

fn record(socket: &Socket, end: &End, direction: Direction, mut buffers: Buffers, n: usize) {
    let Some(slot) = view::of(socket).filter(|_| direction != Direction::Peeked) else { return };
    note_addresses(socket, slot);
    let received = direction != Direction::Sent;
    let (mine, other) = match received {
        true => (&end.tap_received, &end.tap_sent),
        false => (&end.tap_sent, &end.tap_received),
    };
    let by_ring = match received {
        true => end.receiving() == Receiving::Ring,
        false => end.sending() == Sending::Ring,
    };
    let mut flags = if received { PIECE_RECEIVED } else { 0 };
    flags |= if by_ring { 0 } else { PIECE_BY_KERNEL };
    let words = |words: &[AtomicU64; 2]| [words[0].load(Relaxed), words[1].load(Relaxed)];
    let piece = Piece {
        flags,
        other: other.get(),
        ports: slot.ports.load(Relaxed),
        local: words(&slot.local),
        remote: words(&slot.remote),
        ..Piece::of(slot)
    };
    with_memory(|tap, limit| {
        let mut left = n;
        while left > 0 {
            let len = left.min(PIECE_MAX_BYTES);
            left -= len;
            let discarded =
                direction == Direction::Discarded && super::carrier::facts(socket).discards;
            let kept = if discarded { 0 } else { len.min(limit) };
            piece.write(tap, mine.get(), &mut buffers, len, kept, left == 0);
            mine.add(len as u64);
        }
    });
}

/// Is what goes over this UDP socket to be recorded?
#[inline(always)]
pub fn is_asked(socket: &Socket) -> bool {
    let asked = view::asked(socket) & (ASKED_TAP | ASKED_TAP_END);
    if asked & ASKED_TAP_END != 0 {
        notice_end(socket);
    }
    asked & ASKED_TAP != 0
}

/// Records a datagram of `len` bytes that went by a lane, to or from `other` (`None`: the address to which the socket is connected).
/// The first `copied` are in `buffers`.
#[cold]
#[inline(never)]
pub fn datagram(
    socket: &Socket,
    received: bool,
    other: Option<Address>,
    mut buffers: Buffers,
    copied: usize,
    len: usize,
) {
    let Some(slot) = view::of(socket) else { return };
    let Some(remote) = other.or_else(|| udp::peer(socket.fd())) else { return };
    // KERNEL: of one that is bound to none, the address from which it would answer; what comes from this machine was sent there.
    let Some(local) = udp::source(socket.fd(), &remote) else { return };
    let piece = Piece {
        flags: PIECE_DATAGRAM | if received { PIECE_RECEIVED } else { 0 },
        ports: u32::from(local.port) << 16 | u32::from(remote.port),
        local: halves(&local),
        remote: halves(&remote),
        ..Piece::of(slot)
    };
    with_memory(|tap, limit| piece.write(tap, 0, &mut buffers, len, copied.min(limit), true));
}

/// One moment of one connection, or a datagram.
struct Piece<'s> {
    time_ns: u64,
    flags: u32,
    other: u64,
    ports: u32,
    local: [u64; 2],
    remote: [u64; 2],
    slot: &'s SocketSlot,
}

fn halves(address: &Address) -> [u64; 2] {
    let half = |at: usize| u64::from_ne_bytes(core::array::from_fn(|byte| address.ip[at + byte]));
    [half(0), half(8)]
}

impl Piece<'_> {
    /// Of now.
    fn of(slot: &SocketSlot) -> Piece<'_> {
        let time_ns = sys::real_time_ns();
        Piece { time_ns, flags: 0, other: 0, ports: 0, local: [0; 2], remote: [0; 2], slot }
    }

    fn write(
        &self,
        tap: &Tap,
        before: u64,
        buffers: &mut Buffers,
        len: usize,
        kept: usize,
        last: bool,
    ) {
        let cells = kept.div_ceil(CELL_DATA_BYTES).max(1);
        let first = tap.claim(cells as u64);
        for place in first.into_iter().flat_map(|first| first..first.wrapping_add(cells as u64)) {
            let at = place.wrapping_sub(first.unwrap_or(0)) as usize * CELL_DATA_BYTES;
            let bytes = (kept - at).min(CELL_DATA_BYTES);
            if !tap.is_usable(place) {
                take(buffers, bytes, |_, _, _| {});
                continue;
            }
            let cell = tap.cell(place);
            cell.time_ns.store(self.time_ns, Relaxed);
            cell.connection.store(self.slot.number.load(Relaxed), Relaxed);
            cell.before.store(before, Relaxed);
            cell.other.store(self.other, Relaxed);
            cell.len.store(len as u32, Relaxed);
            cell.kept.store(kept as u32, Relaxed);
            cell.at.store(at as u32, Relaxed);
            cell.flags.store(self.flags | if last { PIECE_LAST } else { 0 }, Relaxed);
            cell.fd.store(self.slot.fd.load(Relaxed), Relaxed);
            cell.ports.store(self.ports, Relaxed);
            for half in 0..2 {
                cell.local[half].store(self.local[half], Relaxed);
                cell.remote[half].store(self.remote[half], Relaxed);
            }
            take(buffers, bytes, |done, from, n| {
                // SAFETY: a piece of the program's buffers, valid by the contract of its call.
                #[allow(unsafe_code)]
                unsafe {
                    tap.write(place, done, from, n)
                };
            });
            tap.publish(place);
        }
        let rest = if first.is_some() { len - kept } else { len };
        take(buffers, rest, |_, _, _| {});
    }
}

/// Goes on by `n` bytes, piece by piece.
fn take(buffers: &mut Buffers, n: usize, mut each: impl FnMut(usize, *const u8, usize)) {
    let mut done = 0;
    while done < n {
        let (from, taken) = buffers.take(n - done);
        if taken == 0 {
            break;
        }
        each(done, from, taken);
        done += taken;
    }
}

/// The kernel knows the addresses; it is asked once.
fn note_addresses(socket: &Socket, slot: &SocketSlot) {
    if slot.address.load(Relaxed) != 0 {
        return;
    }
    let Some(ends) = tcp::ends(socket.fd()) else {
        slot.address.store(ADDRESS_NONE, Relaxed);
        return;
    };
    for at in 0..2 {
        slot.local[at].store(halves(&ends.local)[at], Relaxed);
        slot.remote[at].store(halves(&ends.remote)[at], Relaxed);
    }
    slot.ports.store((ends.local.port as u32) << 16 | ends.remote.port as u32, Relaxed);
    slot.address.store(ADDRESS_TCP, Relaxed);
}

/// Does whoever asked still live? If not, all recording ends.
fn is_wanted(tables: &'static Tables) -> bool {
    let Some(header) = view::header(tables) else { return false };
    let process = tables.process();
    // The time first: whoever is stopped between the two has seen the later sign of life.
    let (now, beat) = (sys::now_ns(), header.tap_beat.load(Relaxed));
    if beat != process.tap_beat.get() {
        process.tap_beat.set(beat);
        process.tap_beat_ns.set(now);
    }
    let wanted = beat != 0 && now.saturating_sub(process.tap_beat_ns.get()) < ABANDONED_NS;
    if !wanted {
        close(tables);
    }
    wanted
}

#[allow(unsafe_code)]
fn memory(process: &Process) -> Option<Tap> {
    let base = process.tap.load(SeqCst);
    // SAFETY: mapped by `open` with this size; unmapped only once it is 0 and nobody is counted in.
    (base != 0).then(|| Tap(unsafe { Area::new(base as *mut u8, TAP_FILE_BYTES) }))
}

/// Makes the memory. Without it (no memfd, no descriptor) nothing is recorded.
fn open(tables: &'static Tables) -> Option<Tap> {
    let process = tables.process();
    let _held = process.view_lock.take()?;
    if let Some(tap) = memory(process) {
        return Some(tap);
    }
    let memfd = map::sealed_memfd(TAP_MEMFD_NAME, TAP_FILE_BYTES, 0).and_then(fd::hide).ok()?;
    let Ok(area) = map::map_segment(memfd, TAP_FILE_BYTES) else {
        sys::close(memfd);
        return None;
    };
    tables.hide(memfd);
    process.tap_fd.set(memfd as u32);
    let tap = Tap(area);
    tap.head().pid.store(process.pid.get(), Relaxed);
    tap.head().magic.store(TAP_MAGIC, Relaxed);
    process.tap.store(area.base() as usize, SeqCst);
    Some(tap)
}

/// Was it said that a connection's recording has ended? Another capture may have begun meanwhile.
#[cold]
pub fn notice_end(socket: &Socket) {
    let (Some(tables), Some(slot)) = (tables(), view::of(socket)) else { return };
    let ended = slot.asked.fetch_and(!ASKED_TAP_END, Relaxed) & ASKED_TAP_END != 0;
    if ended && view::header(tables).is_some_and(|header| header.tap_beat.load(Relaxed) == 0) {
        close(tables);
    }
}

/// All recording in this process ends, and its memory goes.
#[cold]
fn close(tables: &'static Tables) {
    if let Some(header) = view::header(tables) {
        header.asked.fetch_and(!ASKED_TAP, Relaxed);
    }
    for socket in tables.followed() {
        view::count(socket, |slot| {
            slot.asked.fetch_and(!(ASKED_TAP | ASKED_TAP_END), Relaxed);
        });
    }
    let process = tables.process();
    let Some(_held) = process.view_lock.take() else { return };
    let Some(tap) = memory(process) else { return };
    process.tap.store(0, SeqCst);
    let fd = process.tap_fd.get() as i32;
    tables.clear(fd);
    sys::close(fd);
    for _ in 0..CLOSE_LOOKS {
        if process.tap_users.load(SeqCst) == 0 {
            // SAFETY: nobody is counted in, and who comes finds no memory.
            #[allow(unsafe_code)]
            unsafe {
                map::unmap(tap.0)
            };
            return;
        }
        sys::sched_yield();
    }
    // A user that was stopped (or that we interrupted) keeps its mapping, whose pages are few or none once the command has let them go.
}

/// In a child by fork: the memory is the parent's.
#[allow(unsafe_code)]
pub fn forget(tables: &Tables) {
    let process = tables.process();
    if let Some(tap) = memory(process) {
        process.tap.store(0, Relaxed);
        let fd = process.tap_fd.get() as i32;
        tables.clear(fd);
        sys::close(fd);
        // (As in `close`: a frame that the handler interrupted in which we were forked writes on.)
        if process.tap_users.load(SeqCst) == 0 {
            // SAFETY: the parent's memory as mapped here; the child has one thread, and it is here, not in a call that is recorded.
            unsafe { map::unmap(tap.0) };
        }
    }
}
