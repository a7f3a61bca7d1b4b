//! An end severs itself from an adapter that does not answer, or of which the other end says that it is dead: the adapter is to deliver nothing more, and to
//! put nothing on the end's connection. To whoever asks it has died then.
//!
//! An adapter that is at work for this end finishes that first (`ringlet_core::mirror`). One that stands still meanwhile, and may go on at any time, can do
//! two things. It may write to the segment: so a private copy takes the place of the segment in this process, and nobody sees what is written there later.
//! And it may put a doorbell byte on the connection: so that byte must be there already, as the count of TCP tells.
//!
//! ```text
//! a pass is under way    a byte is under way    then
//! no                     no                     the adapter has let go
//! yes                    no                     a private copy takes the place of the segment
//! either                 yes, and is counted    the same
//! either                 yes, and is not        it is waited for, ten seconds; then the connection breaks
//! ```

use super::introduction::{Message, ORPHAN};
use super::private_copy::{self, Placed};
use crate::socket::table::{Kind, Socket};
use ringlet_core::mirror::Asks;
use ringlet_core::sync::Ordering;
use ringlet_linux::{fd, meet, sys, tcp};

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
            let lets_go = || is_no_byte_on_its_way(socket, words);
            if private_copy::put_in_place(socket, end, lets_go) == Placed::NotStill {
                still_since = now;
            }
        }
        // (Another thread may make the copy. We touch nothing of the segment here.)
        end.copies.stand_still([&end.send_lock, &end.receive_lock]);
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
