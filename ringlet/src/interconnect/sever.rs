//! An end severs itself from an adapter that does not answer, or of which the other end says that it is dead: the adapter is to deliver nothing more, and to
//! put nothing on the end's connection. To whoever asks it has died then.
//!
//! An adapter that is at work for this end finishes that first (`ringlet_core::mirror`). One that stands still meanwhile, and may go on at any time, can do
//! two things. It may write to the segment: so a copy takes the place of the segment in this process, and what is written there later is seen by nobody. And
//! it may put a doorbell byte on the connection: so that byte must be there already, as the kernel's count of TCP tells.
//!
//! ```text
//! a pass is under way    a byte is under way    then
//! no                     no                     the adapter has let go
//! yes                    no                     a copy of the segment takes its place
//! either                 yes, and is counted    the same
//! either                 yes, and is not        it is waited for, ten seconds; then the connection breaks
//! ```

use super::Interconnect;
use super::introduction::{Message, ORPHAN};
use crate::lock::{Held, Lock};
use crate::socket::table::{End, Kind, Socket, tables};
use crate::thread;
use core::mem::offset_of;
use ringlet_core::layout::{Control, LINE_BYTES, SLOT_COUNT, SLOTS_OFFSET, control_offset};
use ringlet_core::memory::Area;
use ringlet_core::mirror::Asks;
use ringlet_core::sync::{AtomicU64, Ordering, fence};
use ringlet_linux::{fd, map, meet, sys, tcp};

/// Between two looks.
pub(super) const LOOK_NS: u64 = 50_000;
/// How long it is waited for an adapter that puts a byte on the connection; and until a pass that is not over counts as standing still.
const LET_GO_NS: u64 = if cfg!(test) { 100_000_000 } else { 10_000_000_000 };
const STANDS_STILL_NS: u64 = if cfg!(test) { 1_000_000 } else { 100_000_000 };

/// Has the adapter gone, or is it nothing to us any more?
pub fn has_died(socket: &Socket) -> bool {
    let lifeline = socket.lifeline.get() as i32;
    lifeline != 0 && (socket.end().severed.is() || is_hung_up(lifeline))
}

/// Has it let go of all that it had of this connection, or is it dead? (One from which we have severed ourselves hangs up when it finds that.)
pub fn has_hung_up(socket: &Socket) -> bool {
    let lifeline = socket.lifeline.get() as i32;
    lifeline == 0 || is_hung_up(lifeline)
}

fn is_hung_up(lifeline: i32) -> bool {
    fd::pending(lifeline, libc::POLLRDHUP) & (libc::POLLHUP | libc::POLLRDHUP) != 0
}

/// See the module's description. False if that can't be done: the adapter stands still, and may yet put a byte on the connection, or the segment is shared
/// with other processes of the family's.
pub fn sever(socket: &Socket) -> bool {
    let Some(outgoing) = socket.outgoing() else { return false };
    let (end, words) = (socket.end(), outgoing.control());
    let _quiet = Quiet::new(end);
    let (mut still_since, mut until) = (0, 0);
    while !has_died(socket) {
        let now = sys::now_ns();
        if still_since == 0 {
            // (Once is enough: whoever asks next, at a close for instance, is told at once.)
            (still_since, until) = (now, now + if end.unanswered.is() { 0 } else { LET_GO_NS });
            words.sever();
            // (If there is no room it has much to read, and hears of it there.)
            let ended = Message { kind: ORPHAN, ..Message::default() };
            let lifeline = socket.lifeline.get() as i32;
            let _ = meet::send(lifeline, ended.frame().as_bytes(), &[]);
        }
        if words.has_let_go() {
            end.severed.set(1);
        } else if now - still_since >= STANDS_STILL_NS {
            // (Or another thread does it.) WHY unsignalled: a handler that calls us would wait for what it has interrupted, and others for one that jumps.
            if sys::unsignalled(|| take_segment_away(socket, end)) == Taken::NotStill {
                still_since = now;
            }
        }
        if !end.severed.is() {
            if now > until {
                end.unanswered.set(1);
                return false;
            }
            let _ = fd::poll(&mut [], Some(LOOK_NS), None);
        }
    }
    true
}

/// Of a byte that is counted only the adapter's own note is missing that it is there. (There is one at most: the next one is put when that is told.)
fn is_no_byte_on_its_way(socket: &Socket, words: &impl Asks) -> bool {
    match words.bytes_on_their_way() {
        0 => true,
        1 => is_byte_put(socket),
        _ => false,
    }
}

/// Is there one byte more behind our last `Start` than the adapter has told of? (Since then nothing but doorbells has gone there: before anything else
/// does, the adapter is silent, and none is on its way.)
fn is_byte_put(socket: &Socket) -> bool {
    let end = socket.end();
    let Some(outgoing) = socket.outgoing() else { return false };
    if socket.kind() != Kind::Tcp {
        return false;
    }
    let told = outgoing.control().receiver.bells_put.load(Ordering::Relaxed);
    let place = end.sender.started().wrapping_add(told).wrapping_add(1);
    tcp::written(socket.fd(), !socket.side.is()).is_ok_and(|written| written.place == place)
}

/// A thread that is in `sever` touches nothing of the segment: so the locks that it holds are as good as free, for another one that takes the segment away.
struct Quiet<'a>(&'a End);

fn locks(end: &End) -> [&Lock; 2] {
    [&end.send_lock, &end.receive_lock]
}

impl Quiet<'_> {
    fn new(end: &End) -> Quiet<'_> {
        for (lock, quiet) in locks(end).into_iter().zip(&end.quiet) {
            if lock.is_ours() {
                // ORDER: SeqCst; pairs with `is_still`: what we have done to the segment is there.
                quiet.store(thread::owner_number(), Ordering::SeqCst);
            }
        }
        Quiet(end)
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        let Quiet(end) = self;
        for (lock, quiet) in locks(end).into_iter().zip(&end.quiet) {
            if lock.is_ours() {
                // ORDER: SeqCst, before the look; pairs with `take_segment_away`, which says that it does before it looks here.
                quiet.store(0, Ordering::SeqCst);
            }
        }
        // (It takes a few milliseconds.)
        while end.taken_away.load(Ordering::SeqCst) != 0 {
            sys::sched_yield();
        }
    }
}

/// Nobody but us changes anything under this lock, until the answer is dropped.
fn is_still<'a>(lock: &'a Lock, quiet: u32) -> Option<Option<Held<'a>>> {
    if lock.is_ours() {
        return Some(None);
    }
    match lock.try_take() {
        None => (quiet != 0 && lock.owner() == quiet).then_some(None),
        held => Some(held),
    }
}

#[derive(PartialEq, Eq)]
enum Taken {
    Done,
    NotNow,
    /// The adapter was at work meanwhile: it is soon done.
    NotStill,
}

/// A copy takes the place of the segment, if this process alone has it.
fn take_segment_away(socket: &Socket, end: &End) -> Taken {
    let mut taken = Taken::NotNow;
    let (Some(tables), Some((area, _)), Some(outgoing)) =
        (tables(), socket.segment(), socket.outgoing())
    else {
        return taken;
    };
    // No fork is made from the look at the holders to the end: the child would go on with the segment.
    let Some(_inside) = tables.process().gate.try_enter() else { return taken };
    if socket.interconnect() != Interconnect::Mirrored || !tables.holders.is_alone(&end.holders) {
        return taken;
    }
    // ORDER: SeqCst, before the look at who is quiet; pairs with `Quiet::drop`.
    if end.taken_away.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return taken;
    }
    let [sends, receives] = end.quiet.each_ref().map(|quiet| quiet.load(Ordering::SeqCst));
    if let (Some(_sending), Some(_receiving)) =
        (is_still(&end.send_lock, sends), is_still(&end.receive_lock, receives))
        && !end.severed.is()
        && is_no_byte_on_its_way(socket, outgoing.control())
    {
        taken = put_copy_in_place(area, socket.side.is() as usize);
        if taken == Taken::Done {
            end.severed.set(1);
        }
    }
    // ORDER: SeqCst; pairs with `Quiet::drop`.
    end.taken_away.store(0, Ordering::SeqCst);
    taken
}

/// Stands in the copy all that the adapter writes, as it still stands in the segment? Then it is of one moment: what was written before something that was
/// copied is in it, wherever it lies. (The data of records lies behind their headers, and is copied behind them.)
fn is_of_one_moment(area: Area, copy: Area, sends: usize) -> bool {
    let part = |direction: usize, at: usize, end: usize| {
        let base = control_offset(direction);
        (base + at..base + end).step_by(size_of::<AtomicU64>())
    };
    let slots = SLOTS_OFFSET + (1 - sends) * SLOT_COUNT * LINE_BYTES;
    // ORDER: SeqCst, behind the copy, each word of which was read by Acquire (`map::copy_of`): what stood before one of them is seen by now.
    fence(Ordering::SeqCst);
    let mut words = part(sends, 0, offset_of!(Control, sender))
        .chain(part(1 - sends, offset_of!(Control, sender), offset_of!(Control, serving)))
        .chain((slots..slots + SLOT_COUNT * LINE_BYTES).step_by(size_of::<AtomicU64>()));
    let word = |area: Area, at: usize| area.at::<AtomicU64>(at).load(Ordering::Relaxed);
    words.all(|at| word(area, at) == word(copy, at))
}

#[allow(unsafe_code)]
fn put_copy_in_place(area: Area, sends: usize) -> Taken {
    // ORDER: SeqCst, behind `severed`; pairs with `mirror::has_what_was_put`: what is told of is copied.
    fence(Ordering::SeqCst);
    let Ok(copy) = map::copy_of(area) else { return Taken::NotNow };
    if !is_of_one_moment(area, copy, sends) {
        // SAFETY: mapped just now and shown to nobody.
        unsafe { map::unmap(copy) };
        return Taken::NotStill;
    }
    // SAFETY: two mappings of ours, of one size, with the same in them: who has a reference into the one reads and writes atomics of the other. Under the
    // locks, which are ours or of threads that wait for us, nothing changes; what others note there meanwhile is for the adapter.
    let placed = unsafe { map::put_in_place(copy, area) };
    if placed.is_err() {
        // SAFETY: mapped just now and shown to nobody.
        unsafe { map::unmap(copy) };
    }
    if placed.is_ok() { Taken::Done } else { Taken::NotNow }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringlet_core::layout::Geometry;

    /// Which of an end's words an adapter at work changes: each of them is seen, and none of the end's own.
    #[test]
    #[allow(unsafe_code)]
    fn a_copy_is_of_one_moment() {
        let geometry = Geometry::new(1 << 16).unwrap();
        let bytes = geometry.segment_bytes();
        let memory = map::sealed_memfd(c"moment", bytes, libc::F_SEAL_SEAL).unwrap();
        let area = map::map_shared(memory, bytes, true).unwrap();
        for sends in 0..2 {
            let copy = map::copy_of(area).unwrap();
            let same = || is_of_one_moment(area, copy, sends);
            let (ours, theirs) = (control_offset(sends), control_offset(1 - sends));
            let slots = |direction| geometry.slot_offset(direction, 0);
            // (A look at all of the slots takes a while: so at some of them.)
            let some = (SLOTS_OFFSET..geometry.data_offset(0)).step_by(4096 + 8);
            for at in (0..SLOTS_OFFSET).step_by(8).chain(some) {
                let within = |from: usize, len: usize| (from..from + len).contains(&at);
                let adapters = within(ours, 256)
                    || within(theirs + 256, 128)
                    || within(slots(1 - sends), SLOT_COUNT * LINE_BYTES);
                assert!(same());
                let word = area.at::<AtomicU64>(at);
                word.store(1, Ordering::Relaxed);
                assert_eq!(same(), !adapters, "{at}");
                word.store(0, Ordering::Relaxed);
            }
            // SAFETY: nobody looks there any more.
            unsafe { map::unmap(copy) };
        }
        // SAFETY: as above.
        unsafe { map::unmap(area) };
        sys::close(memory);
    }
}
