//! This process's page for `ringlet ss` and its relatives (layout: `ringlet_core::view`).

use super::table::{End, Process, Receiving, SOCKET_COUNT, Sending, Socket, Stage, Tables, tables};
use crate::plain::P32;
use crate::reasons::Reason;
use ringlet_core::memory::Area;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::AtomicU64;
use ringlet_core::sync::Ordering::Relaxed;
use ringlet_core::view::*;
use ringlet_linux::{fd, map, sys};

const _: () = assert!(Sending::Ring as u32 == SENDING_RING);
const _: () = assert!(Receiving::Ring as u32 == RECEIVING_RING);

/// Makes the page. Without it (no memfd, no descriptor) ringlet works, unseen.
pub fn open(tables: &Tables) {
    let made = map::sealed_memfd(c"ringlet-process", PROCESS_FILE_BYTES, 0).and_then(fd::hide);
    let Ok(memfd) = made else { return };
    let Ok(area) = map::map_segment(memfd, PROCESS_FILE_BYTES) else {
        sys::close(memfd);
        return;
    };
    tables.hide(memfd);
    let process = tables.process();
    leave_parents(process);
    process.view_fd.set(memfd as u32);
    process.view.store(area.base() as usize, Relaxed);
    let header = area.at::<ProcessHeader>(0);
    header.pid.store(process.pid.get(), Relaxed);
    header.asked.store(process.asked.get(), Relaxed);
    header.tap_snaplen.store(process.tap_snaplen.get(), Relaxed);
    // Not 0: whoever records the parent is to find us too.
    header.tap_beat.store(process.asked.get() & ASKED_TAP, Relaxed);
    header.magic.store(PROCESS_MAGIC, Relaxed);
}

/// Before a fork: what is asked of the parent holds for the child too, which will not have the page. (One that is made around libc has what
/// was known at the last of the others.)
pub fn before_fork(tables: &Tables) {
    let Some(header) = header(tables) else { return };
    let process = tables.process();
    // (A page that is not written to is not copied.)
    let keep = |word: &P32, value| {
        if word.get() != value {
            word.set(value);
        }
    };
    keep(&process.asked, header.asked.load(Relaxed) & ASKED_INHERITED);
    keep(&process.tap_snaplen, header.tap_snaplen.load(Relaxed));
    // (One that is not yet shown keeps what this process has inherited.)
    for socket in tables.followed().filter(|socket| of(socket).is_some()) {
        keep(&socket.asked, asked(socket) & ASKED_INHERITED);
    }
}

/// What is told of this process's parent is not to be written to from here any more.
pub fn leave_parents(process: &Process) {
    let page = process.parents_view.swap(0, Relaxed);
    if page != 0 {
        map::stand_in(page, PROCESS_FILE_BYTES);
    }
}

/// Nothing is told of this process any more.
pub fn leave(process: &Process) {
    leave_parents(process);
    let page = process.view.swap(0, Relaxed);
    if page != 0 {
        map::stand_in(page, PROCESS_FILE_BYTES);
    }
}

/// In a child by fork, which makes a page of its own when it has something to show. (Nothing leads to the parent's: `table::leave_behind`.)
pub fn forget(tables: &Tables) {
    crate::waiting::spin::forget();
    let old = tables.process().view_fd.swap(0) as i32;
    if old != 0 {
        tables.clear(old);
        sys::close(old);
    }
}

#[allow(unsafe_code)]
fn area(tables: &Tables) -> Option<Area> {
    let base = tables.process().view.load(Relaxed);
    // SAFETY: mapped by `open` with this size, for good.
    (base != 0).then(|| unsafe { Area::new(base as *mut u8, PROCESS_FILE_BYTES) })
}

/// A thread has watched memory for so long (`spin::Outside`).
pub fn tell_watched(ns: u64, watched: u32, in_vain: u32) {
    let Some(header) = tables().and_then(header) else { return };
    // ORDER: Relaxed: for people.
    header.watched_ns.fetch_add(ns, Relaxed);
    header.watched.fetch_add(watched.into(), Relaxed);
    header.watched_in_vain.fetch_add(in_vain.into(), Relaxed);
}

/// What is asked of the whole process.
pub fn header(tables: &Tables) -> Option<&'static ProcessHeader> {
    area(tables).map(|area| area.at(0))
}

#[inline(always)]
pub fn slot(tables: &Tables, index: u32) -> Option<&'static SocketSlot> {
    let area = area(tables)?;
    let at = size_of::<ProcessHeader>() + (index % SOCKET_COUNT) as usize * size_of::<SocketSlot>();
    Some(area.at(at))
}

/// The slot of a socket, once it is shown.
#[allow(unsafe_code)]
#[inline(always)]
pub fn of(socket: &Socket) -> Option<&'static SocketSlot> {
    let slot = socket.slot.load(Relaxed) as *const SocketSlot;
    // SAFETY: null, or set by `begin` to a slot of the page, which stays mapped; in a child, which has it no more, it was taken back (`table::leave_behind`);
    // all bits are a valid slot of atomics.
    unsafe { slot.as_ref() }
}

/// Makes the page if there is none: at the first socket, so that something can be asked of a server that has no connection yet.
pub fn appear(tables: &Tables) {
    if area(tables).is_none()
        && let Some(_held) = tables.process().view_lock.take()
        && area(tables).is_none()
    {
        open(tables);
    }
}

/// Shows a socket from now on: it was just connected or accepted, or came with a fork.
pub fn begin(socket: &Socket) {
    let Some(tables) = tables() else { return };
    appear(tables);
    let index = tables.index_of(socket);
    let (Some(slot), Some(area)) = (slot(tables, index), area(tables)) else { return };
    let header = area.at::<ProcessHeader>(0);
    if header.slots_used.load(Relaxed) <= index {
        header.slots_used.fetch_max(index + 1, Relaxed);
    }
    socket.slot.store(slot as *const SocketSlot as usize, Relaxed);
    for word in [
        &slot.wakes,
        &slot.bells,
        &slot.spins,
        &slot.entries,
        &slot.returns,
        &slot.return_reason,
        &slot.overflows,
    ] {
        word.store(0, Relaxed);
    }
    for word in [
        &slot.tx_bytes,
        &slot.rx_bytes,
        &slot.calls,
        &slot.moved_ns,
        &slot.returned_ns,
        &slot.kernel_tx_bytes,
        &slot.kernel_rx_bytes,
        &slot.kernel_calls,
        &slot.calls_at_change,
    ] {
        word.store(0, Relaxed);
    }
    let now = sys::about_real_time_ns();
    slot.began_ns.store(now, Relaxed);
    slot.address.store(0, Relaxed);
    slot.fd.store(socket.fd(), Relaxed);
    // What bars it may be known from before: an end of a pair, or a connection of the parent's.
    let reason = match socket.end().barred.get() {
        0 => Reason::Young as u32,
        barred => barred,
    };
    slot.reason.store(reason, Relaxed);
    slot.number.store(header.connections.fetch_add(1, Relaxed) + 1, Relaxed);
    slot.asked.store(socket.asked.get() | header.asked.load(Relaxed) & ASKED_INHERITED, Relaxed);
    if socket.stage() != Stage::Kernel {
        return show_path(socket);
    }
    slot.directions.store(0, Relaxed);
    slot.path_since_ns.store(now, Relaxed);
    slot.path.store(PATH_KERNEL, Relaxed);
}

/// Shows a socket no more.
pub fn end(tables: &Tables, socket: &Socket) {
    if let Some(slot) = slot(tables, tables.index_of(socket)) {
        slot.path.store(SLOT_FREE, Relaxed);
    }
}

/// What others ask of this connection (`ASKED_*`).
#[inline(always)]
pub fn asked(socket: &Socket) -> u32 {
    of(socket).map_or(0, |slot| slot.asked.load(Relaxed))
}

/// Shows where a socket stands now, and why.
pub fn show(socket: &Socket, reason: Reason) {
    show_reason(socket, reason);
    show_path(socket);
}

/// Shows why a socket stands where it does.
pub fn show_reason(socket: &Socket, reason: Reason) {
    if of(socket).is_none_or(|slot| slot.path.load(Relaxed) == SLOT_FREE) {
        begin(socket);
    }
    if let Some(slot) = of(socket) {
        slot.reason.store(reason as u32, Relaxed);
    }
}

/// Is our sending direction to keep off the ring: was that asked of us, or does the peer ask it?
#[inline(always)]
pub fn is_away(socket: &Socket, end: &End, ring: &SegmentRing) -> bool {
    let asked = asked(socket) & ASKED_OFF | end.away.get();
    ring.control().receiver.keep_out.load(Relaxed) | asked != 0
}

/// The path of a stream, as `ringlet_path` names it; of a UDP socket, what was shown last.
pub fn path(socket: &Socket) -> u32 {
    let is_away = || socket.outgoing().is_some_and(|ring| is_away(socket, socket.end(), &ring));
    match socket.stage() {
        Stage::Free | Stage::Closing => SLOT_FREE,
        Stage::Kernel | Stage::KernelForGood => PATH_KERNEL,
        Stage::Datagram | Stage::Mailbox => {
            of(socket).map_or(PATH_KERNEL, |slot| slot.path.load(Relaxed))
        }
        Stage::Attached => match (socket.end().sending(), socket.end().receiving()) {
            (Sending::Ring, Receiving::Ring) => PATH_RING,
            (Sending::KernelForGood | Sending::Returning, _) => PATH_KERNEL,
            (Sending::Kernel, Receiving::Kernel) if is_away() => PATH_KERNEL,
            _ => PATH_MOVING,
        },
        _meeting if asked(socket) & ASKED_OFF != 0 => PATH_KERNEL,
        _meeting => PATH_MOVING,
    }
}

/// Shows where a stream stands now; nothing new is known of the reason.
pub fn show_path(socket: &Socket) {
    show_path_as(socket, path(socket));
}

/// The same for any socket.
pub fn show_path_as(socket: &Socket, path: u32) {
    let Some(slot) = of(socket) else { return };
    let end = socket.end();
    let attached = socket.stage() == Stage::Attached;
    let directions = directions(end.sending() as u32, end.receiving() as u32, end.away.is());
    slot.directions.store(if attached { directions } else { 0 }, Relaxed);
    let before = slot.path.load(Relaxed);
    if path != before {
        note_change(slot, before, path);
        slot.path.store(path, Relaxed);
    }
}

/// When it took another path, and how many of its calls were made on which.
fn note_change(slot: &SocketSlot, before: u32, path: u32) {
    let (now, calls) = (sys::real_time_ns(), slot.calls.load(Relaxed));
    slot.path_since_ns.store(now, Relaxed);
    if path == PATH_RING {
        add(&slot.kernel_calls, calls - slot.calls_at_change.load(Relaxed).min(calls));
        slot.entries.store(slot.entries.load(Relaxed) + 1, Relaxed);
        if slot.moved_ns.load(Relaxed) == 0 {
            slot.moved_ns.store(now, Relaxed);
        }
    }
    if path == PATH_RING || before == PATH_RING {
        slot.calls_at_change.store(calls, Relaxed);
    }
}

/// Our sending direction has gone back to the kernel.
pub fn count_return(socket: &Socket, reason: Reason) {
    count(socket, |slot| {
        slot.returned_ns.store(sys::real_time_ns(), Relaxed);
        slot.return_reason.store(reason as u32, Relaxed);
        slot.returns.store(slot.returns.load(Relaxed) + 1, Relaxed);
        let overflow = (reason == Reason::Stalled) as u32;
        slot.overflows.store(slot.overflows.load(Relaxed) + overflow, Relaxed);
    });
}

/// What watching memory was good for.
pub fn count_spin(socket: &Socket) {
    count(socket, |slot| slot.spins.store(slot.spins.load(Relaxed).wrapping_add(1), Relaxed));
}

/// Bytes that went through the kernel.
pub fn count_kernel_bytes(socket: &Socket, sent: usize, received: usize) {
    count(socket, |slot| {
        add(&slot.kernel_tx_bytes, sent as u64);
        add(&slot.kernel_rx_bytes, received as u64);
        // Another process of the family may have taken it there, which can't write to our page.
        if slot.path.load(Relaxed) == PATH_RING
            && let Some(reason) = Reason::from_u32(socket.end().barred.get())
            && reason != Reason::None
        {
            show(socket, reason);
        }
    });
}

fn add(word: &AtomicU64, more: u64) {
    word.store(word.load(Relaxed).wrapping_add(more), Relaxed);
}

/// This end slept, and its connection is why it woke.
pub fn count_wake(socket: &Socket) {
    count(socket, |slot| {
        slot.wakes.fetch_add(1, Relaxed);
    });
}

/// Counters have one writer at a time (the direction's lock holder), so a load and a store do.
#[inline(always)]
pub fn count(socket: &Socket, update: impl Fn(&SocketSlot)) {
    if let Some(slot) = of(socket) {
        update(slot);
    }
}

/// As `context::move_away`, for the page's own descriptor.
pub fn move_away(fd: i32) -> bool {
    tables().is_some_and(|tables| {
        let process = tables.process();
        [&process.view_fd, &process.tap_fd]
            .into_iter()
            .any(|word| word.get() as i32 == fd && tables.rename(word))
    })
}
