//! A private copy of a segment takes its place in this process: what an adapter that stands still may yet write there is seen by nobody (`sever`).
//!
//! It is made under both locks, or while their holders stand still (`quiesce`); and it is of one moment, as the adapter has written.

use super::Interconnect;
use crate::socket::table::{End, Socket, tables};
use core::mem::offset_of;
use ringlet_core::layout::{Control, LINE_BYTES, SLOT_COUNT, SLOTS_OFFSET, control_offset};
use ringlet_core::memory::Area;
use ringlet_core::sync::{AtomicU64, Ordering, fence};
use ringlet_linux::map::PrivateCopy;
use ringlet_linux::sys;

/// What a round has come to.
#[derive(PartialEq, Eq)]
pub enum Placed {
    Done,
    NotNow,
    /// The adapter was at work meanwhile: it is soon done.
    NotStill,
}

/// A copy takes the place of the segment, if this process alone has it, and the adapter then lets go of what else it has (`lets_go`): so the end has severed
/// itself.
pub fn put_in_place(socket: &Socket, end: &End, lets_go: impl Fn() -> bool) -> Placed {
    // WHY unsignalled: a handler that calls us would wait for what it has interrupted, and others for one that jumps.
    sys::unsignalled(|| put_in_place_now(socket, end, lets_go)).unwrap_or(Placed::NotNow)
}

fn put_in_place_now(socket: &Socket, end: &End, lets_go: impl Fn() -> bool) -> Option<Placed> {
    let (tables, (area, _)) = (tables()?, socket.segment()?);
    let round = end.copies.begin()?;
    let _still = round.await_still([&end.send_lock, &end.receive_lock])?;
    // No fork is made from the look at the holders to the end: the child would go on with the segment.
    let _inside = tables.process().gate.try_enter()?;
    let is_ours = socket.interconnect() == Interconnect::Mirrored
        && tables.holders.is_alone(&end.holders)
        && !end.severed.is();
    if !is_ours || !lets_go() {
        return None;
    }
    let placed = put_copy_in_place(area, socket.side.is() as usize);
    if placed == Placed::Done {
        end.severed.set(1);
    }
    Some(placed)
}

/// Stands in the copy all that the adapter writes, as it still stands in the segment? Then it is of one moment: what was written before something that was
/// copied is in it, wherever it lies. (The data of records lies behind their headers, and is copied behind them.)
fn is_of_one_moment(area: Area, copy: Area, sends: usize) -> bool {
    let part = |direction: usize, at: usize, end: usize| {
        let base = control_offset(direction);
        (base + at..base + end).step_by(size_of::<AtomicU64>())
    };
    let slots = SLOTS_OFFSET + (1 - sends) * SLOT_COUNT * LINE_BYTES;
    // ORDER: SeqCst, behind the copy, each word of which was read by Acquire (`PrivateCopy`): what stood before one of them is seen by now.
    fence(Ordering::SeqCst);
    let mut words = part(sends, 0, offset_of!(Control, sender))
        .chain(part(1 - sends, offset_of!(Control, sender), offset_of!(Control, serving)))
        .chain((slots..slots + SLOT_COUNT * LINE_BYTES).step_by(size_of::<AtomicU64>()));
    let word = |area: Area, at: usize| area.at::<AtomicU64>(at).load(Ordering::Relaxed);
    words.all(|at| word(area, at) == word(copy, at))
}

#[allow(unsafe_code)]
fn put_copy_in_place(area: Area, sends: usize) -> Placed {
    // ORDER: SeqCst, behind `severed`; pairs with `mirror::has_what_was_put`: what is told of is copied.
    fence(Ordering::SeqCst);
    let Ok(copy) = PrivateCopy::of_area(area) else { return Placed::NotNow };
    if !is_of_one_moment(area, copy.area(), sends) {
        copy.forget();
        return Placed::NotStill;
    }
    // SAFETY: two mappings of ours, of one size, with the same in them: who has a reference into the one reads and writes atomics of the other. Under the
    // locks, which are ours or of threads that wait for us, nothing changes; what others note there meanwhile is for the adapter.
    match unsafe { copy.put_in_place() } {
        Ok(()) => Placed::Done,
        Err(_) => Placed::NotNow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringlet_core::layout::Geometry;
    use ringlet_linux::map;

    /// Which of an end's words an adapter at work changes: each of them is seen, and none of the end's own.
    #[test]
    #[allow(unsafe_code)]
    fn a_copy_is_of_one_moment() {
        let geometry = Geometry::new(1 << 16).unwrap();
        let bytes = geometry.segment_bytes();
        let memory = map::sealed_memfd(c"moment", bytes, libc::F_SEAL_SEAL).unwrap();
        let area = map::map_shared(memory, bytes, true).unwrap();
        for sends in 0..2 {
            let copy = PrivateCopy::of_area(area).unwrap();
            let same = || is_of_one_moment(area, copy.area(), sends);
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
            copy.forget();
        }
        // SAFETY: nobody looks there any more.
        unsafe { map::unmap(area) };
        sys::close(memory);
    }

    /// A copy that has taken its place is one memory for this process and its children, as the segment was; others write to that and are not seen.
    #[test]
    #[allow(unsafe_code)]
    fn a_copy_is_shared_with_children() {
        let bytes = Geometry::new(1 << 16).unwrap().segment_bytes();
        let memory = map::sealed_memfd(c"shared", bytes, libc::F_SEAL_SEAL).unwrap();
        let [area, others] = [(); 2].map(|()| map::map_shared(memory, bytes, true).unwrap());
        let word = |area: Area, at: usize| area.at::<AtomicU64>(at);
        // (Of a page that has nothing there is none in the copy, until it is used.)
        let places = [0, bytes / 2, bytes - 8];
        word(others, 0).store(7, Ordering::Relaxed);
        let copy = PrivateCopy::of_area(area).unwrap();
        // SAFETY: atomics, here and there.
        unsafe { copy.put_in_place() }.unwrap();
        assert_eq!(word(area, 0).load(Ordering::Relaxed), 7);
        // SAFETY: the child stores some words and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            places.iter().for_each(|at| word(area, *at).store(9, Ordering::Relaxed));
            // SAFETY: the child ends here, without the handlers of its parent.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: a number of ours.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        for at in places {
            assert_eq!(word(area, at).load(Ordering::Relaxed), 9);
            word(others, at).store(5, Ordering::Relaxed);
            assert_eq!(word(area, at).load(Ordering::Relaxed), 9);
        }
        // SAFETY: nobody looks there any more.
        [area, others].into_iter().for_each(|area| unsafe { map::unmap(area) });
        sys::close(memory);
    }
}
