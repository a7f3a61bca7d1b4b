//! Where two ends have met, which stays if they have an adapter (`orphan`): what an end says there of its adapter's death, and what that means for
//! the end of the stream.

use super::table::Socket;
use super::{view, words};
use crate::handshake::{self, Frame, Protocol};
use crate::interconnect::mirrored::HAS_ADAPTER;
use crate::interconnect::{Interconnect, introduction, sever};
use crate::reasons::Reason;
use ringlet_core::layout::NOT_SHUT;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_linux::{fd, tcp};

/// What an end says of its death.
pub struct Word {
    /// Was our direction in the ring? Then it goes on in the kernel from this place on, in the count of marks, with this record, and what is sent
    /// again is so many bytes.
    pub in_ring: bool,
    pub place: u64,
    pub from: u64,
    pub bytes: u64,
    /// Doorbells that the adapter is known to have put before that place.
    pub bells: u64,
    /// Up to which record the other direction was delivered.
    pub delivered: u64,
}

/// What one takes.
const WORD_BYTES: usize = 60;

impl Word {
    pub fn frame(&self) -> Frame {
        let fields = [self.place, self.from, self.bytes, self.bells, self.delivered];
        let frame = Frame::new(Protocol::Adapter, introduction::ORPHAN).u32(self.in_ring as u32);
        fields.into_iter().fold(frame, Frame::u64)
    }
}

/// What the other end has said, if it has. The adapter may live on, as where ends on two hosts have one each, or it stood still for the other end: what was
/// said holds when it delivers nothing to us any more.
pub fn hear(socket: &Socket) -> Option<Word> {
    let word = heard(socket)?;
    // (Once: a stream that is broken off ends.)
    if socket.end().ended.get() == 0 && !sever::sever(socket) {
        break_off(socket);
    }
    Some(word)
}

fn heard(socket: &Socket) -> Option<Word> {
    let mut bytes = [0; handshake::ROOM_BYTES];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let n = tcp::receive_into(socket.channel.get() as i32, &mut bytes, flags).ok()?;
    // (On TCP the next one may follow at once, by another process of the family's: the first one counts.)
    let word = handshake::read(&bytes[..n.min(WORD_BYTES)], Protocol::Adapter, |kind, fields| {
        (kind == introduction::ORPHAN).then_some(())?;
        Some(Word {
            in_ring: fields.u32()? != 0,
            place: fields.u64()?,
            from: fields.u64()?,
            bytes: fields.u64()?,
            bells: fields.u64()?,
            delivered: fields.u64()?,
        })
    });
    word.ok()
}

/// Has the sender said, behind what was counted in the kernel, that its stream goes on there?
pub fn is_told(socket: &Socket) -> bool {
    socket.end().mirrored.is() && hear(socket).is_some()
}

/// Has its adapter died, on which our direction still depends?
pub fn is_orphan(socket: &Socket) -> bool {
    socket.end().mirrored.get() == HAS_ADAPTER && sever::has_died(socket)
}

pub fn has_ended_in_order(socket: &Socket) -> bool {
    // ORDER: Acquire; pairs with `mirror::SenderLine::write`: what was published before is there.
    socket.incoming().is_none_or(|ring| {
        let sender = &ring.control().sender;
        sender.shut.load(Ordering::Acquire) != NOT_SHUT
            || sender.parting.load(Ordering::Acquire) != 0
    })
}

/// The kernel says that no more comes, and all that it had, and the ring, is taken: was that all that the peer has sent? What a killed one has
/// not sent again, or nobody has delivered, is lost: then every call is to find an error, not an end. Receive lock held.
///
/// `peer_ended` asks whether the kernel tells of the peer's end (`carrier::peer_ended`).
pub fn is_cut_short(socket: &Socket, peer_ended: impl Fn(&Socket) -> bool + Copy) -> bool {
    let end = socket.end();
    if !end.mirrored.is() || end.ended.get() == 2 {
        return false;
    }
    let short = match hear(socket) {
        Some(Word { in_ring: true, .. }) => {
            end.heeded.get() == 0 || end.receiver.taken() < Some(end.whole.get())
        }
        Some(_) => false,
        // (One that has never come sends by the kernel alone.)
        None => {
            let short = words::peer_attached(socket) != 0
                && !has_ended_in_order(socket)
                && (sever::has_died(socket) || is_torn_off(socket, &peer_ended));
            if short {
                await_word(socket);
                if heard(socket).is_some() {
                    return is_cut_short(socket, peer_ended);
                }
            }
            short
        }
    };
    if short {
        break_off(socket);
    }
    short
}

/// The kernel's end came. Between hosts what was said before it comes by another connection, which may be late: it is waited for, for a while.
fn await_word(socket: &Socket) {
    const WORD_NS: u64 = 1_000_000_000;
    if socket.is_far() && sever::has_died(socket) {
        let channel = socket.channel.get() as i32;
        let mut fds = [fd::pollfd { fd: channel, events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut fds, Some(WORD_NS), None);
    }
}

/// Is what we have said with the other end? On one host at once; on another one when its kernel has it: only then may bytes follow on the connection, which
/// would be taken for doorbells before. `None`: it will never be.
pub fn is_said(socket: &Socket) -> Option<bool> {
    if !socket.is_far() {
        return Some(true);
    }
    let channel = socket.channel.get() as i32;
    let waits = || tcp::unacknowledged(channel) != Ok(0);
    let gone = fd::pending(channel, 0) & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0;
    match waits() {
        // (It may have been acknowledged just before.)
        true if gone && waits() => None,
        waits => Some(!waits),
    }
}

/// What we say reaches nobody. Is there nobody for it either, since the peer has parted, or has itself said that it goes on in the kernel, or has closed the
/// channel, as one does that leaves before it has joined? Between hosts a channel may also break between two that live: one that was not told would take
/// what follows for doorbells.
pub fn is_missed_by_nobody(socket: &Socket) -> bool {
    if !socket.is_far() {
        return true;
    }
    // ORDER: Acquire; pairs with `mirror::SenderLine::write`.
    let parts = |ring: SegmentRing| ring.control().sender.parting.load(Ordering::Acquire) != 0;
    heard(socket).is_some() || is_closed(socket) || socket.incoming().is_some_and(parts)
}

/// KERNEL: an end in order is still told of behind a reset.
fn is_closed(socket: &Socket) -> bool {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    tcp::receive_into(socket.channel.get() as i32, &mut [0], flags) == Ok(0)
}

/// The kernel tells of the peer's end, but its adapter has not. An orderly one is told only when its word is delivered, and who is killed leaves its
/// kernel connection to the adapter, which says that it parts first: so the peer has torn the connection off (`patience`), from an adapter that hangs.
fn is_torn_off(socket: &Socket, peer_ended: &dyn Fn(&Socket) -> bool) -> bool {
    // (Receiving that we have shut down ourselves looks like an end.)
    !socket.end().shut_receiving.is() && peer_ended(socket)
}

pub fn break_off(socket: &Socket) {
    let end = socket.end();
    if end.pending_error.change(0, libc::ECONNRESET as u32) {
        view::show(socket, Reason::NoAdapter);
        end.ended.set(end.ended.get().max(1));
        tcp::tear_off(socket.fd());
        socket.kernel_tells();
    }
}

/// The peer is not to say there what nobody hears.
pub fn close(socket: &Socket) {
    if socket.interconnect() == Interconnect::Mirrored {
        let _ = tcp::shut_down(socket.channel.get() as i32, libc::SHUT_RDWR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_its_length() {
        let word = Word { in_ring: true, place: 1, from: 2, bytes: 3, bells: 4, delivered: 5 };
        assert_eq!(word.frame().as_bytes().len(), WORD_BYTES);
    }
}
