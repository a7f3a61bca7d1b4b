//! The adapter of a mirrored connection has died: both directions go back to the kernel, each by itself, and nobody waits for the other end.
//!
//! A dead adapter delivers nothing more. So the receiver's ring holds what was delivered, for good, and the sender still has all for which it has
//! no credit. It can't publish a mark. But the ends have kept the channel on which they met: the sender says there from which place of the
//! kernel's connection on it sends again, and from which record on, before it does. The receiver follows the handover's one rule: it counts what
//! waits in the kernel, finds its ring empty, and then looks on the channel. What was said there it does to its ring, in the adapter's stead.
//!
//! ```text
//! sender                                       channel          receiver
//!   has credit up to record 3, is at place 20                   has taken up to record 5, its ring is empty
//!   says: from place 20 on, from record 3      20, 3            (records 3 and 4 are 7 bytes: it has had them)
//!   sends record 3, 4, 5, ... by the kernel                     puts Back(27) into its ring, and goes on from there
//! ```
//!
//! What was said stays there (it is looked at, never taken): so any process that shares the end may find it, again and again. In the same words
//! each end says how far the other's records were delivered, so that they are not sent to one who has closed.

use super::channel::{self, Word, hear};
use super::epoll::registration::sending_changed;
use super::table::{End, Receiving, Sending, Socket};
use super::{carrier, patience, view, words};
use crate::interconnect::mirrored::{self, HAS_ADAPTER, NEEDS_NO_ADAPTER};
use crate::reasons::Reason;
use ringlet_core::layout::{LINE_BYTES, PAGE_BYTES, SLOT_COUNT};
use ringlet_core::leaving::Leaving;
use ringlet_core::mapped::Mapped;
use ringlet_core::ring::{Mark, SegmentRing};
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, map, meet, tcp};

/// If the adapter has died, our direction goes back: all that was not delivered is then `Returning`. `unsure`: a mark was published, and nothing sent
/// behind it; it may not have been delivered. False if it lives. Send lock held.
#[cold]
pub fn go_back(socket: &Socket, end: &End, ring: &SegmentRing, unsure: bool) -> bool {
    if !channel::is_orphan(socket) {
        return false;
    }
    let in_ring = unsure || end.sending() == Sending::Ring;
    end.tx.take_credit(ring);
    let pass_delivered = || {
        let delivered = hear(socket).map_or(0, |word| word.delivered);
        while end.tx.progress() < delivered && end.tx.pass_oldest(ring) {}
    };
    // (Who was killed behind its word has said from where: what another one says again is not heard.)
    if end.worded.swap(1) == 0 {
        pass_delivered();
    }
    let bells = words::bells_put(end, ring);
    let place = if in_ring { carrier::orphaned_place(socket, end, bells) } else { Ok(0) };
    let told = place.and_then(|place| {
        let from = end.tx.progress();
        let bytes = end.tx.outstanding_bytes(ring) as u64;
        let delivered = match socket.incoming() {
            Some(ring) if !end.receiver.has_left() => end.rx.end(&ring),
            _ => 0,
        };
        let word = Word { in_ring, place, from, bytes, bells, delivered };
        meet::send(socket.channel.get() as i32, word.frame().as_bytes(), &[])
    });
    if in_ring && told.is_err() {
        // Nobody hears it: the peer is closing (`moving::close_orphan`), or has given the connection to a stranger, who is to get what it has left unread.
        pass_delivered();
        if words::has_left(ring) {
            end.resent_at.set(0);
            end.sender.send_all_again(ring.control().used());
        } else {
            let lost = end.tx.outstanding_bytes(ring) > 0 && !channel::has_ended_in_order(socket);
            if lost || !channel::is_missed_by_nobody(socket) {
                channel::break_off(socket);
            }
            end.sender.keep_out();
        }
    } else if in_ring {
        end.resent_at.set(0);
        end.gap_due.set(!carrier::facts(socket).counts_places as u32);
        end.sender.send_all_again(0);
    } else if end.sending() != Sending::Returning {
        end.sender.keep_out();
        // All was delivered, as far as we hear of that or not.
        while end.tx.pass_oldest(ring) {}
    }
    end.mirrored.set(NEEDS_NO_ADAPTER);
    // (What has barred it before does so for good.)
    end.barred.change(Reason::None as u32, Reason::NoAdapter as u32);
    socket.lost_its_carrier();
    carrier::tune(socket, end);
    sending_changed(socket);
    view::count_return(socket, Reason::NoAdapter);
    view::show(socket, Reason::NoAdapter);
    true
}

/// Before the kernel's connection carries what the peer is to know the meaning of by what was published, or said: waits until it has that. Where
/// the adapter dies meanwhile, or we sever ourselves from it, the direction goes back (`unsure` as in `go_back`).
pub fn flush(socket: &Socket, end: &End, ring: &SegmentRing, unsure: bool) {
    if end.mirrored.get() == HAS_ADAPTER
        && !mirrored::flush(socket, ring)
        && !go_back(socket, end, ring, unsure)
    {
        patience::corrupt(socket);
    }
}

/// The ring is empty: does the sender say, by now, that it goes on in the kernel? Then the marks stand there that say so. Behind the count of what
/// waits in the kernel, receive lock held. True if there is something to look at.
pub fn heed(socket: &Socket, end: &End, ring: &SegmentRing) -> bool {
    if !end.mirrored.is() || end.receiver.has_left() {
        return false;
    }
    let (position, heeded) = (end.rx.position() + 1, end.heeded.get());
    // (Once; but one may have been killed in the middle of it.)
    if heeded != 0 && heeded != position {
        return false;
    }
    let Some(word) = hear(socket) else { return false };
    // What was delivered by then is all.
    if end.rx.ready(ring) {
        return true;
    }
    if !word.in_ring {
        return false;
    }
    let had = end.rx.taken_since(ring, word.from).filter(|_| hold_marks(ring, position - 1));
    // (Where the last mark was a `Back`, or there was none, this is a stay of no records.)
    let in_ring = matches!(end.receiving(), Receiving::Ring | Receiving::Draining);
    let place = match carrier::facts(socket).counts_places {
        true => Ok(word.place),
        false if in_ring => place_of_gap(socket, end, ring, word.bells),
        // No doorbell was put behind a `Start` that was not delivered.
        false => Ok(0),
    };
    let (Some(had), Ok(place)) = (had, place) else {
        if had.is_none() || place == Err(Errno::ERANGE) {
            channel::break_off(socket);
        }
        return false;
    };
    let gap = !carrier::facts(socket).counts_places as u64;
    let back = |bytes: u64| Mark::Back(place.wrapping_add(gap).wrapping_add(bytes));
    let from = match end.receiving() {
        Receiving::Discarding => end.receiver.until(),
        _ => carrier::taken(socket, end).unwrap_or(0),
    };
    let whole = match in_ring || gap == 0 {
        true => end.receiver.goes_on_at(back(word.bytes)),
        false => from.checked_add(gap + word.bytes.min(u32::MAX.into())),
    };
    end.whole.set(whole.unwrap_or(0));
    end.heeded.set(position);
    let marks = [Mark::Start(place), back(had)];
    end.rx.put_marks(ring, &marks[in_ring as usize..]);
    true
}

/// Between doorbells and what is sent again, where the kernel does not count: a byte, or packet, that is neither.
const GAP: u8 = 1;
/// KERNEL: a Unix connection holds some 270 of one byte.
const BELLS_LOOKED_AT: usize = 512;

/// How long it is waited for the other host's kernel at a time: longer, as TCP itself waits, where nothing passes to it.
const SAID_NS: u64 = 1_000_000;
const DOUBLED_MOST: u8 = 5;

/// Before anything is sent again. Send lock held.
pub fn send_gap(socket: &Socket, end: &End) -> Sys<()> {
    if end.worded.is() && socket.is_far() {
        await_said(socket, end)?;
    }
    if end.gap_due.is() {
        tcp::send_from(socket.fd(), &[GAP], libc::MSG_DONTWAIT)?;
        end.gap_due.set(0);
    }
    Ok(())
}

fn said_in_ns(socket: &Socket) -> u64 {
    let channel = socket.channel.get() as i32;
    let doubled = tcp::counts(channel).map_or(0, |counts| counts.retransmits);
    SAID_NS << doubled.min(DOUBLED_MOST)
}

/// Nothing is sent before the other host's kernel has what we have said, whatever room there is: after so long it is worth while to look. `None`: it has.
pub fn unsaid(socket: &Socket, end: &End) -> Option<u64> {
    let waits = end.worded.is() && socket.is_far() && end.sending() == Sending::Returning;
    (waits && channel::is_said(socket) == Some(false)).then(|| said_in_ns(socket))
}

#[cold]
fn await_said(socket: &Socket, end: &End) -> Sys<()> {
    for look in 0..2 {
        match channel::is_said(socket) {
            Some(true) => return Ok(()),
            Some(false) if look == 0 => {
                let patience_ns = said_in_ns(socket);
                // Who may block sleeps for it, without the lock (`unsaid`).
                if patience_ns == SAID_NS || end.nonblocking.is() {
                    let _ = fd::poll(&mut [], Some(patience_ns), None);
                }
            }
            Some(false) => {}
            // Nobody hears it, as in `go_back`.
            None => {
                let Some(ring) = socket.outgoing() else { return Ok(()) };
                let delivered = hear(socket).map_or(0, |word| word.delivered);
                while end.tx.progress() < delivered && end.tx.pass_oldest(&ring) {}
                let lost =
                    end.tx.outstanding_bytes(&ring) > 0 && !channel::has_ended_in_order(socket);
                if lost || !channel::is_missed_by_nobody(socket) {
                    channel::break_off(socket);
                    return Err(Errno::ECONNRESET);
                }
                return Ok(());
            }
        }
    }
    Err(Errno::EAGAIN)
}

/// How many doorbells are before the gap. An adapter counts each for the receiver before it goes, and for the sender behind that (`counted`): if it
/// has died in between, the byte itself tells. EAGAIN: it has not come. Receive lock held.
fn place_of_gap(socket: &Socket, end: &End, ring: &SegmentRing, counted: u64) -> Sys<u64> {
    let bells = ring.control().sender.bells.load(Ordering::Relaxed);
    match bells.wrapping_sub(counted) {
        0 => return Ok(counted),
        1 if end.receiving() == Receiving::Ring => {}
        1 => return Err(Errno::EAGAIN),
        _ => return Err(Errno::ERANGE),
    }
    let at = end.receiver.goes_on_at(Mark::Back(counted)).unwrap_or(0);
    let Some(before) = at.checked_sub(carrier::taken(socket, end)?) else { return Ok(bells) };
    let mut waits = [0; BELLS_LOOKED_AT];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let n = tcp::receive_into(socket.fd(), &mut waits, flags)?;
    match waits[..n].get(before as usize) {
        Some(&next) => Ok(if next == GAP { counted } else { bells }),
        // (Behind one packet nothing is seen.)
        None if before >= waits.len() as u64
            || before > 0 && carrier::facts(socket).has_boundaries =>
        {
            Err(Errno::ERANGE)
        }
        None => Err(Errno::EAGAIN),
    }
}

/// The same where we had left: what is sent again begins with what we had of it. (The sender may not have answered, or nobody has delivered that.)
#[cold]
pub fn heed_left(socket: &Socket, end: &End, ring: &SegmentRing) {
    let position = end.rx.position() + 1;
    let late = end.heeded.get() == position || end.receiving() == Receiving::Draining;
    if !end.mirrored.is() || late {
        return;
    }
    let Some(word) = hear(socket).filter(|word| word.in_ring) else { return };
    let again_from = match carrier::facts(socket).counts_places {
        true => end.receiver.goes_on_at(Mark::Back(word.place)),
        // (Who left while its adapter lived knows the number of doorbells: `half::Half::pass_back`.)
        false => {
            let bells = ring.control().sender.bells.load(Ordering::Relaxed);
            let known = matches!(bells.wrapping_sub(word.bells), 0 | 1);
            known.then(|| end.receiver.bells_end(bells).wrapping_add(1))
        }
    };
    let place = |bytes: u64| Some(again_from?.wrapping_add(bytes));
    let until = end.rx.taken_since(ring, word.from).and_then(place);
    end.whole.set(place(word.bytes).unwrap_or(0));
    end.heeded.set(position);
    match until {
        Some(until) if end.receiver.taken() <= Some(until) => {
            ring.control().answer();
            end.receiver.begins_again_at(until);
        }
        _ => {
            channel::break_off(socket);
            // What is there can't be told from doorbells: none of it is the program's.
            end.receiver.begins_again_at(u64::MAX);
        }
    }
}

/// The memory where two marks from this position on are put, and the slot behind: what the adapter has not asked for may not be there.
fn hold_marks(ring: &SegmentRing, position: u64) -> bool {
    (position..=position + 2).all(|position| {
        let at = ring.slot_offset(position as usize & (SLOT_COUNT - 1));
        map::hold(ring.area(), at / PAGE_BYTES * PAGE_BYTES, LINE_BYTES).is_ok()
    })
}
