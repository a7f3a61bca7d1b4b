//! What the two ends of a moved connection say to each other, and to themselves, beside what `ringlet_core::handover` says.

use super::table::{End, Socket};
use crate::reasons::Reason;
use ringlet_core::leaving::Leaving;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::Errno;
use ringlet_linux::tcp;

/// Whether the peer is at home in the segment, and how it rings us.
pub fn peer_attached(socket: &Socket) -> u32 {
    crate::step!();
    // ORDER: Acquire; pairs with `moving::publish_attached` (Release).
    socket.incoming().map_or(0, |ring| ring.control().sender.attached.load(Ordering::Acquire))
}

/// Have we said that we are? Before that the peer does not send by the ring.
pub fn has_said_attached(socket: &Socket) -> bool {
    socket
        .outgoing()
        .is_some_and(|ring| ring.control().sender.attached.load(Ordering::Relaxed) != 0)
}

pub fn say_end(ring: &SegmentRing, how: u32) {
    crate::step!();
    // ORDER: Release; pairs with `In::has_ended`, and with `tcp::fin_by_death` and its like; the end itself follows through
    // the kernel.
    ring.control().sender.shut.store(how, Ordering::Release);
}

pub const LINGER_KEPT: u64 = 1 << 63;

/// All is sent again, so that the end need not be a reset.
pub fn linger_again(socket: &Socket, end: &End) {
    if let linger @ 1.. = end.linger.get() {
        end.linger.set(0);
        tcp::set_linger(socket.fd(), [(linger >> 32 & 1) as i32, linger as i32]);
    }
}

/// Has the receiver of this ring gone back to the kernel?
pub fn has_left(ring: &SegmentRing) -> bool {
    crate::step!();
    ring.control().has_left()
}

/// Does every call of the program's still come through here? Then what stands in the ring can be read from there.
pub fn reads_on(reason: Reason) -> bool {
    matches!(reason, Reason::Unforgiving | Reason::Option | Reason::AsyncSignal)
}

/// The same, where we have left already.
pub fn still_reads_on(end: &End) -> bool {
    Reason::from_u32(end.barred.get()).is_some_and(reads_on)
}

/// The kernel's place up to which its bytes are doorbells, when no more are sent.
pub fn bells_end(end: &End, ring: &SegmentRing) -> u64 {
    // ORDER: Relaxed; the sender was seen not to be at work.
    end.receiver.bells_end(ring.control().sender.bells.load(Ordering::Relaxed))
}

/// Doorbells of ours on the kernel's connection since our last `Start`. Over a mirror the adapter puts them there.
pub fn bells_put(end: &End, outgoing: &SegmentRing) -> u64 {
    let words = outgoing.control();
    let count = if end.mirrored.is() { &words.receiver.bells_put } else { &words.sender.bells };
    count.load(Ordering::Relaxed)
}

/// Where the stream goes on in the kernel behind what is published, if it does.
pub fn back_ahead(end: &End, ring: &SegmentRing) -> Option<u64> {
    end.receiver.goes_on_at(end.rx.mark_ahead(ring)?)
}

/// Where our direction is in the kernel, once it is known. Send lock held.
pub fn note_written(ring: &SegmentRing, place: u64) {
    // ORDER: Release; pairs with `may_have_lost`, which follows the end that the kernel tells of.
    ring.control().sender.written.store(place + 1, Ordering::Release);
}

/// The kernel has taken so much more of our direction. Send lock held.
pub fn count_written(ring: &SegmentRing, bytes: usize) {
    let written = &ring.control().sender.written;
    let before = written.load(Ordering::Relaxed);
    if before != 0 {
        // ORDER: as in `note_written`.
        written.store(before.wrapping_add(bytes as u64), Ordering::Release);
    }
}

/// What follows behind our `Back` is no urgent byte. Send lock held.
pub fn nothing_urgent(ring: &SegmentRing) {
    ring.control().sender.urgent_behind.store(0, Ordering::Relaxed);
}

/// The first byte behind our `Back`, which was before this place, was an urgent one. Send lock held. (Said behind its send, lest who stops
/// before has a byte of the stream taken for it. It matters from the next urgent byte on.)
pub fn say_urgent(ring: &SegmentRing, back_at: u64) {
    // ORDER: Relaxed; pairs with `In::urgent_behind`: the next urgent byte is sent behind this, by the same lock.
    ring.control().sender.urgent_behind.store(back_at, Ordering::Relaxed);
}

/// Before the kernel carries more than doorbells of our direction, by calls that nobody counts.
pub fn sends_uncounted(end: &End, ring: &SegmentRing) {
    end.bells_only.set(0);
    ring.control().sender.written.store(0, Ordering::Release);
}

/// The kernel has reset: may it have had bytes of the peer's to send, which are lost so? (Behind a FIN nothing follows.)
pub fn may_have_lost(socket: &Socket, ring: &SegmentRing) -> bool {
    let written = ring.control().sender.written.load(Ordering::Acquire);
    written == 0 || tcp::counts(socket.fd()).map_or(true, |here| here.arrived < written - 1)
}

/// Is something published that we have not consumed (bytes or a mark)?
#[inline(always)]
pub fn published(end: &End, incoming: &SegmentRing) -> bool {
    crate::step!();
    end.rx.ready(incoming) && !end.receiver.has_left()
}

/// What was received or sent counts; a reset is told by the next call.
pub fn tell_later(end: &End, error: Errno) {
    if error == Errno::ECONNRESET {
        end.pending_error.set(error.0 as u32);
    }
}
