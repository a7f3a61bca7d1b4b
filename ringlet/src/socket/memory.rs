//! The memory that a connection's segment holds.
//!
//! A page of it that can't be had would be SIGBUS at its first use. So what is about to be used is asked for before (`hold`), by the
//! sender, who alone writes there; the receiver reads only what was written, and looks for news only at slots that the sender has asked
//! for (`Tx::begin_bare`). Where there is no more, the direction goes back to the kernel.
//!
//! What a burst has used is given back, by the sender too: once all is consumed, and nothing was sent for a while. Nobody is woken for
//! that by the peer; who sleeps looks after a second, and then ever more rarely (`due`). It also closes what a stranger has left, and had no closer.

use super::table::{self, End, Process, Sending, Socket, Stage, Tables, tables};
use super::{release, sides};
use crate::interconnect::mirrored;
use crate::reasons::Reason;
use ringlet_core::layout::{Geometry, HOT_DATA_BYTES, PAGE_BYTES, SLOT_COUNT, SLOTS_OFFSET};
use ringlet_core::memory::Area;
use ringlet_core::ring::{Backing, SegmentRing};
use ringlet_core::sync::Ordering;
use ringlet_linux::{apart, map, sys};

/// Data is asked for in pieces of so many bytes.
const PIECE_BYTES: u64 = 256 << 10;
/// What has not been used for so long is given back; and how rarely is looked in the end.
const IDLE_NS: u64 = 1_000_000_000;
const LOOK_MAX_NS: u64 = 64_000_000_000;
/// How often is looked whether there is a closer for what a stranger has left.
const CLOSE_AGAIN_NS: u64 = 50_000_000;

/// Of a segment of ours: what both ends touch first.
pub fn hold_first(area: Area, geometry: Geometry) -> Result<(), Reason> {
    let slots = |direction| geometry.slot_offset(direction, 0);
    map::hold(area, 0, SLOTS_OFFSET)
        .and_then(|()| map::hold(area, slots(0), PAGE_BYTES))
        .and_then(|()| map::hold(area, slots(1), PAGE_BYTES))
        .map_err(|_| Reason::NoMemory)
}

/// A record was refused: for memory that is to be asked for (`Some`; false if there is none), or for room.
#[cold]
pub fn hold_more(socket: &Socket, end: &End, ring: &SegmentRing) -> Option<bool> {
    let what = end.tx.wanted_backing()?;
    let (area, geometry) = socket.segment()?;
    let direction = socket.side.get() as usize & 1;
    let held = match what {
        Backing::Slots => {
            // The first page is there, and in use.
            let first = geometry.slot_offset(direction, 0) + PAGE_BYTES;
            map::hold(area, first, geometry.slot_offset(direction, SLOT_COUNT) - first)
                .map(|()| what)
        }
        Backing::Data(wanted) => {
            let before = end.tx.backing(ring).1;
            let hold = |unit: u64| {
                let until = wanted.next_multiple_of(unit).min(geometry.ring_bytes as u64);
                let from = geometry.data_offset(direction) + before as usize;
                map::hold(area, from, (until - before) as usize).map(|()| Backing::Data(until))
            };
            match wanted {
                // By and by: a connection that is hardly used holds little.
                0..=HOT_DATA_BYTES => hold(before.max(PAGE_BYTES as u64)),
                _ => hold(PIECE_BYTES).or_else(|_| hold(HOT_DATA_BYTES)),
            }
        }
    };
    if let Ok(held) = held {
        end.tx.has_backing(ring, held);
        if let Some(tables) = tables()
            && holds_much(end, ring)
        {
            let process = tables.process();
            process.look_at_memory_ns.set(IDLE_NS);
            process.memory_due_ns.set(sys::now_ns() + IDLE_NS);
        }
    }
    Some(held.is_ok())
}

/// A connection has an adapter, which may die while all sleep.
pub fn begin_looking_after_adapters(tables: &Tables) {
    let process = tables.process();
    process.look_at_memory_ns.set(mirrored::LOOK_AFTER_NS);
    process.memory_due_ns.set(sys::now_ns() + mirrored::LOOK_AFTER_NS);
}

fn holds_much(end: &End, ring: &SegmentRing) -> bool {
    let (slots, data) = end.tx.backing(ring);
    slots || data > HOT_DATA_BYTES
}

/// Closes what a stranger has left, and had no closer, as far as there are closers by now.
#[inline(always)]
pub fn close_left() {
    if apart::waiting() != 0 && !table::borrowed() {
        apart::go_on();
    }
}

/// Before a sleep: after so many nanoseconds at most there is something to look after.
#[inline(always)]
pub fn due() -> Option<u64> {
    let tables = tables()?;
    let process = tables.process();
    let memory = if process.memory_due_ns.get() == 0 { None } else { look_after(tables, process) };
    if apart::waiting() == 0 { memory } else { close_what_waits(memory) }
}

#[cold]
fn close_what_waits(due: Option<u64>) -> Option<u64> {
    close_left();
    let again = (apart::waiting() > 0 && !table::borrowed()).then_some(CLOSE_AGAIN_NS);
    due.into_iter().chain(again).min()
}

#[cold]
fn look_after(tables: &'static Tables, process: &Process) -> Option<u64> {
    let now = sys::now_ns();
    let at = process.memory_due_ns.get();
    if now < at {
        return Some(at - now);
    }
    // One thread does it.
    let every = process.look_at_memory_ns.get();
    process.memory_due_ns.set(now + every);
    let mut left = false;
    let mut mirrored = false;
    for socket in tables.followed().filter(|socket| socket.stage() == Stage::Attached) {
        left |= !give_back(socket);
        sides::go_back_if_orphan(socket);
        mirrored |= socket.end().mirrored.get() == mirrored::HAS_ADAPTER;
    }
    if mirrored {
        process.look_at_memory_ns.set(mirrored::LOOK_AFTER_NS);
        process.memory_due_ns.set(now + mirrored::LOOK_AFTER_NS);
        return Some(mirrored::LOOK_AFTER_NS);
    }
    if !left {
        process.memory_due_ns.set(0);
        return None;
    }
    process.look_at_memory_ns.set((every * 2).min(LOOK_MAX_NS));
    Some(every)
}

/// Gives back what a connection does not use. True if there is no more to give.
fn give_back(socket: &Socket) -> bool {
    let end = socket.end();
    // ORDER: SeqCst; pairs with `process::release`, as in `Waiter::new`: the segment is not unmapped meanwhile.
    socket.sleepers.fetch_add(1, Ordering::SeqCst);
    let done = give_back_now(socket, end);
    release::leave(socket);
    done
}

fn give_back_now(socket: &Socket, end: &End) -> bool {
    let Some(_held) = end.send_lock.try_take() else { return false };
    if socket.stage() != Stage::Attached || end.sending() == Sending::Returning {
        return true;
    }
    let (Some(ring), Some((area, geometry))) = (socket.outgoing(), socket.segment()) else {
        return true;
    };
    if !holds_much(end, &ring) {
        return true;
    }
    let position = end.tx.position() + 1;
    if end.idle_at.get() != position {
        end.idle_at.set(position);
        return false;
    }
    let held = end.tx.backing(&ring);
    let Some(kept) = end.tx.let_go(&ring) else { return false };
    let direction = socket.side.get() as usize & 1;
    let page = |slot| geometry.slot_offset(direction, slot);
    let (first, kept) = (page(0) + PAGE_BYTES, page(kept));
    let pieces = [
        (geometry.data_offset(direction), held.1 as usize),
        (first, kept.saturating_sub(first)),
        (kept.max(page(0)) + PAGE_BYTES, page(SLOT_COUNT) - kept - PAGE_BYTES),
    ];
    for (from, bytes) in pieces {
        if map::let_go(area, from, bytes).is_err() {
            // Locked in memory, or not to be given back: it stays as it was.
            end.tx.has_backing(&ring, Backing::Slots);
            end.tx.has_backing(&ring, Backing::Data(held.1));
            return true;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsRawFd, IntoRawFd};

    /// Who closes waits until all has been sent; only a fault meets it.
    const LINGER_S: i32 = 60;

    #[test]
    fn who_sleeps_closes_what_had_no_closer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peers = Vec::new();
        for _ in 0..20 {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            peers.push(listener.accept().unwrap().0);
            stream.set_nonblocking(true).unwrap();
            while std::io::Write::write(&mut &stream, &[0; 1 << 16]).is_ok() {}
            let linger = libc::linger { l_onoff: 1, l_linger: LINGER_S };
            // SAFETY: an option and its size.
            #[allow(unsafe_code)]
            let set = unsafe {
                let (value, len) = ((&raw const linger).cast(), size_of_val(&linger) as u32);
                let fd = stream.as_raw_fd();
                libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, value, len)
            };
            assert_eq!(set, 0);
            apart::close_socket_apart(stream.into_raw_fd(), 4711);
        }
        assert!(apart::waiting() > 0, "closers did not hang");
        assert_eq!(close_what_waits(None), Some(CLOSE_AGAIN_NS));
        assert_eq!(close_what_waits(Some(1)), Some(1));
        drop(peers);
        let began = std::time::Instant::now();
        while apart::is_busy() {
            assert!(began.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
        let waiting = apart::waiting();
        // A vfork child has copies of its own: what it does is nothing to its parent's.
        table::LENDER.store(sys::getpid() as u32, Ordering::Relaxed);
        extern "C" fn looks(_: *mut libc::c_void) -> i32 {
            close_what_waits(None).is_some().into()
        }
        let mut stack = vec![0u8; 1 << 20];
        let mut status = -1;
        // SAFETY: a stack of the child's own, which ends before this goes on; an int.
        #[allow(unsafe_code)]
        unsafe {
            let top = stack.as_mut_ptr_range().end.cast();
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            let child = libc::clone(looks, top, flags, std::ptr::null_mut());
            assert!(child > 0 && libc::waitpid(child, &raw mut status, 0) == child);
        }
        assert_eq!((status, apart::waiting()), (0, waiting));
        while let Some(due) = close_what_waits(None) {
            assert!(due <= CLOSE_AGAIN_NS && began.elapsed().as_secs() < 60, "{due}");
            std::thread::sleep(std::time::Duration::from_nanos(due));
        }
        assert_eq!(apart::waiting(), 0);
    }
}
