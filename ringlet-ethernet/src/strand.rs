//! What one queue of a port shares with one queue of another, and nobody else does: a ring each way, and the connection on which they ring for each
//! other, whose end is the other's.

use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use ringlet_core::layout::{
    APART_BYTES, CONTROL_OFFSET, Control, Geometry, SLOTS_OFFSET, WANT_BYTE, WANT_NOTHING,
};
use ringlet_core::mapped::SegmentRing;
use ringlet_core::memory::Area;
use ringlet_core::queue::{Message, Next, Reserved, Rx, Train, Tx};
use ringlet_core::record::RingMemory;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{fd, map, meet};
use ringlet_messages::guarded::Guarded;

/// Thirty-two of the longest messages; a short one lies in its slot.
pub const RING_BYTES: usize = 2 << 20;
/// Of others': one that takes nothing is sent as much as there is room for, in memory that is ours then.
pub const RINGS: RangeInclusive<usize> = RING_BYTES..=4 * RING_BYTES;
/// Behind what all segments have, in their first page: of each direction a word of its receiver's, `unwanted`.
const UNWANTED_OFFSET: usize = CONTROL_OFFSET + 4 * size_of::<Control>();
const _: () = assert!(UNWANTED_OFFSET + 2 * APART_BYTES <= SLOTS_OFFSET);
/// Messages that are shown at once, at most.
const TRAIN: u64 = 32;
/// Bells that are taken at once: who rings for nothing does not hold us here.
const BELLS_AT_ONCE: usize = 16;

/// (What two ports of one process use lies in lines of each one's own.)
#[repr(align(128))]
pub struct Strand {
    pub socket: Guarded,
    area: Area,
    out: SegmentRing,
    back: SegmentRing,
    side: usize,
    tx: Tx,
    train: Train,
    rx: Rx,
    /// Up to where was sent, as last noted.
    sent: AtomicU64,
    /// An older kernel lets a peer put descriptors into our queue: looked for before each bell is taken.
    looks: bool,
}

impl Strand {
    /// Makes the memory; the other port gets the descriptor.
    pub fn make(socket: Guarded, ring_bytes: usize) -> Sys<(Strand, OwnedFd)> {
        let geometry = Geometry::new(ring_bytes).ok_or(Errno::EINVAL)?;
        let memory = map::sealed_memfd(c"ringlet-ethernet", geometry.segment_bytes(), 0)?;
        // SAFETY: made just now, ours alone.
        #[allow(unsafe_code)]
        let memory = unsafe { OwnedFd::from_raw_fd(memory) };
        Ok((Strand::map(socket, &memory, geometry, 1)?, memory))
    }

    /// Takes the memory that another port has made.
    pub fn join(socket: Guarded, memory: &OwnedFd, ring_bytes: usize) -> Sys<Strand> {
        let geometry = Geometry::new(ring_bytes)
            .filter(|_| RINGS.contains(&ring_bytes))
            .ok_or(Errno::EINVAL)?;
        if map::sealed_size(memory.as_raw_fd())? != geometry.segment_bytes() {
            return Err(Errno::EINVAL);
        }
        Strand::map(socket, memory, geometry, 0)
    }

    fn map(socket: Guarded, memory: &OwnedFd, geometry: Geometry, side: usize) -> Sys<Strand> {
        let area = map::map_shared(memory.as_raw_fd(), geometry.segment_bytes(), true)?;
        let ring = |direction| SegmentRing::new(area, geometry, direction);
        let (out, back) = (ring(side), ring(1 - side));
        let looks = !meet::refuses_descriptors();
        Ok(Strand {
            socket,
            area,
            out,
            back,
            side,
            tx: Tx::default(),
            train: Train::default(),
            rx: Rx::default(),
            sent: AtomicU64::new(0),
            looks,
        })
    }

    /// A bit for each group, several of one bit, that the receiver does not want. (0 in fresh memory: it wants all.)
    fn unwanted(&self, direction: usize) -> &AtomicU64 {
        self.area.at(UNWANTED_OFFSET + direction * APART_BYTES)
    }

    /// What is sent from now on to groups of these bits need not come.
    pub fn want_all_but(&self, groups: u64) {
        // ORDER: SeqCst: it is there before the call returns, so before whoever is told of that sends. Pairs with `is_wanted`.
        self.unwanted(1 - self.side).store(groups, Ordering::SeqCst);
    }

    /// Does the receiver want what goes to a group of this bit?
    pub fn is_wanted(&self, group: u64) -> bool {
        // ORDER: Acquire; pairs with `want_all_but` (SeqCst).
        self.unwanted(self.side).load(Ordering::Acquire) & group == 0
    }

    /// Room for a message of up to so many bytes, where the receiver will read it.
    pub fn reserve(&self, len: usize) -> Option<(Reserved, *mut u8)> {
        let place = self.tx.reserve(&self.out, len).ok()?;
        let at = place.pointer(&self.out);
        Some((place, at))
    }

    /// Sends what has been written there. True if the receiver slept, and was woken.
    pub fn commit(&self, place: Reserved, len: usize) -> bool {
        self.train.show(&self.out);
        self.tx.commit(&self.out, place, len);
        self.out.control().data_wish().granted_by_sender() != WANT_NOTHING && self.ring()
    }

    /// As `commit`; but a receiver that sleeps is woken by `look_after` only.
    pub fn publish(&self, place: Reserved, len: usize) {
        self.train.show(&self.out);
        self.tx.commit(&self.out, place, len);
    }

    /// As `publish`, for several, which the receiver may see behind `look_after` only.
    pub fn commit_quietly(&self, place: Reserved, len: usize) {
        let sealed = self.tx.seal(&self.out, place, len);
        // (One by one a receiver that looks has each line taken from it as it is written.)
        if self.train.add(&self.out, sealed) == TRAIN {
            self.train.show(&self.out);
        }
    }

    /// Shows what was committed quietly, and wakes the receiver if it sleeps. True if so.
    pub fn look_after(&self) -> bool {
        self.train.show(&self.out);
        // (By a fence that stands between those stores and this look.)
        self.out.control().data_wish().granted_by_receiver() != WANT_NOTHING && self.ring()
    }

    /// Writes the beginning of a message. Panics when there is no room for so much.
    pub fn write(&self, place: &Reserved, bytes: &[u8]) {
        // SAFETY: `bytes` is valid for its length.
        #[allow(unsafe_code)]
        unsafe {
            place.write(&self.out, 0, bytes.as_ptr(), bytes.len());
        }
    }

    /// `None`: there is no room.
    pub fn push(&self, message: &[u8]) -> Option<bool> {
        let place = self.tx.reserve(&self.out, message.len()).ok()?;
        self.write(&place, message);
        Some(self.commit(place, message.len()))
    }

    /// Is there room for any message? Rings when there is, if not. (Look once more behind it.)
    pub fn is_writable(&self) -> bool {
        self.tx.writable(&self.out)
    }

    pub fn want_room(&self) {
        self.out.control().room_wish().want(WANT_BYTE);
    }

    /// Changes when the receiver is found to have taken something, as it is where there was no room.
    pub fn progress(&self) -> u64 {
        self.tx.progress()
    }

    /// By the sender's thread, now and then: for `waiting`.
    pub fn note_sent(&self) {
        self.sent.store(self.tx.progress() + self.tx.outstanding(&self.out), Ordering::Relaxed);
    }

    /// Sent and not taken, at most; for anybody who looks.
    pub fn waiting(&self) -> u64 {
        let taken = self.out.credit_slots().load(Ordering::Relaxed);
        self.sent.load(Ordering::Relaxed).saturating_sub(taken).min(self.out.slot_count() as u64)
    }

    pub fn is_ready(&self) -> bool {
        self.rx.ready(&self.back)
    }

    /// Rings for the next message. (Look once more behind it.)
    pub fn want_data(&self) {
        self.back.control().data_wish().want(WANT_BYTE);
    }

    pub fn peek(&self) -> Next {
        self.rx.peek(&self.back)
    }

    /// The message behind one that is not released yet.
    pub fn peek_behind(&self, message: &Message) -> Next {
        self.rx.peek_behind(&self.back, message)
    }

    /// Copies the beginning of a message out; and where all of it lies, until it is released.
    pub fn look(&self, message: &Message, head: &mut [u8]) -> *const u8 {
        // SAFETY: `head` is valid for its length, and the message has as many (`read` checks).
        #[allow(unsafe_code)]
        unsafe {
            message.read(&self.back, 0, head.as_mut_ptr(), head.len());
        }
        message.pointer(&self.back)
    }

    /// True if the sender waited for room, and was woken.
    pub fn release(&self, message: Message) -> bool {
        self.rx.release(&self.back, message)
            && self.back.control().room_wish().granted_by_receiver() != WANT_NOTHING
            && self.ring()
    }

    /// Never waits: where a byte does not fit, as many bells are there.
    fn ring(&self) -> bool {
        let _ = meet::send(self.socket.as_raw_fd(), &[0], &[]);
        true
    }

    /// Takes the bells that have come: by one call, where that is safe. (More of them ring again.) False: the other port has gone, or does what none does.
    pub fn take_bells(&self) -> bool {
        let socket = self.socket.as_raw_fd();
        if !self.looks {
            return take_messages(socket);
        }
        let mut bytes = [0; 8];
        for _ in 0..BELLS_AT_ONCE {
            if meet::look_at(socket, &mut bytes).is_ok_and(|seen| seen.fds.truncated) {
                return false;
            }
            match rustix::io::read(&*self.socket, &mut bytes) {
                Ok(0) => return false,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    pub fn is_gone(&self) -> bool {
        fd::pending(self.socket.as_raw_fd(), libc::POLLRDHUP)
            & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR)
            != 0
    }
}

/// What has come, up to so many messages, by one call. False: its other end has gone, or sent an empty one.
fn take_messages(socket: i32) -> bool {
    let mut bytes = [0u8; 8];
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: zeros are messages without a place for anything. Each gets the same few bytes, which nobody reads.
    #[allow(unsafe_code)]
    let mut messages: [libc::mmsghdr; BELLS_AT_ONCE] = unsafe { std::mem::zeroed() };
    for message in &mut messages {
        (message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) = (&raw mut piece, 1);
    }
    let most = BELLS_AT_ONCE as libc::c_uint;
    // SAFETY: so many messages, whose one piece is valid for its length until the call returns.
    #[allow(unsafe_code)]
    let took = unsafe {
        let no_wait = std::ptr::null_mut();
        libc::recvmmsg(socket, messages.as_mut_ptr(), most, libc::MSG_DONTWAIT as _, no_wait)
    };
    match usize::try_from(took) {
        // KERNEL: behind the end a message of no bytes comes as often as one is asked for.
        Ok(took) => messages[..took].iter().all(|message| message.msg_len > 0),
        Err(_) => {
            let error = std::io::Error::last_os_error().raw_os_error();
            matches!(error, Some(libc::EAGAIN | libc::EINTR))
        }
    }
}

impl Drop for Strand {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; the rings that use it go with it, and what `reserve` and `look` point to is used before.
        #[allow(unsafe_code)]
        unsafe {
            map::unmap(self.area);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringlet_linux::sys;

    /// What another port has made: too small for the longest messages, or so large that what it does not take costs us more than we give.
    #[test]
    fn memory_of_other_sizes_is_none() {
        for (ring_bytes, fits) in [
            (RING_BYTES / 2, false),
            (RING_BYTES, true),
            (4 * RING_BYTES, true),
            (8 * RING_BYTES, false),
            (64 << 20, false),
        ] {
            let socket = || {
                let [one, other] = meet::pair().unwrap();
                sys::close(other);
                // SAFETY: made just now, ours alone.
                #[allow(unsafe_code)]
                Guarded::new(unsafe { OwnedFd::from_raw_fd(one) })
            };
            let (_made, memory) = Strand::make(socket(), ring_bytes).unwrap();
            assert_eq!(Strand::join(socket(), &memory, ring_bytes).is_ok(), fits, "{ring_bytes}");
        }
    }

    /// However many there are, each is taken, and then the end is noticed.
    #[test]
    fn bells_are_taken_and_the_end_is_noticed() {
        for count in [0, 1, 3, BELLS_AT_ONCE] {
            let [one, other] = meet::pair().unwrap();
            // SAFETY: made just now, ours alone.
            #[allow(unsafe_code)]
            let other = unsafe { OwnedFd::from_raw_fd(other) };
            // SAFETY: the pair's other end, ours alone too.
            #[allow(unsafe_code)]
            let socket = Guarded::new(unsafe { OwnedFd::from_raw_fd(one) });
            let (strand, _memory) = Strand::make(socket, RING_BYTES).unwrap();
            let rung = (0..count).filter(|_| meet::send(other.as_raw_fd(), &[0], &[]).is_ok());
            assert!(rung.count() > 0 || count == 0);
            assert!(strand.take_bells());
            assert_eq!(fd::pending(strand.socket.as_raw_fd(), libc::POLLIN), 0, "{count}");
            meet::send(other.as_raw_fd(), &[0], &[]).unwrap();
            drop(other);
            assert!(!strand.take_bells());
        }
    }
}
