//! A connection whose carrier has died is carried again.
//!
//! Both directions have gone back to the kernel (`orphan`), and nobody counts any more on what stands in the segment. The connection stays attached: every
//! call goes through `transfer` on, which finds both directions in the kernel. Meanwhile the two ends meet anew, at the node service, by the steps and with
//! the proofs of a first meeting (`meet`). Who gets a segment of the new carrier puts it in the place of the old one, at the same address: who looks there
//! without a lock finds a ring in which nothing was ever published. All that the end knows of a ring begins anew with it, as behind a first meeting.
//!
//! ```text
//! end                                     node service, carrier           the other end
//!   its carrier has died: words of that, what was not delivered is sent again, both directions are in the kernel (`orphan`)
//!   is over with it: comes             ->
//!                                         waits until both are there  <-  is over with it: comes
//!   (each that is here has thrown away all doorbells, and sent all again)
//!   new memory, in the old one's place <-                             ->  new memory, in the old one's place
//!   says that it is attached                                              says that it is attached
//! ```
//!
//! An end that has changed beside one that has not, or never will, is as one that is attached and whose peer is not: it stays in the kernel.

use super::epoll::registration::heat_all;
use super::meeting;
use super::sides::{incoming, measure_written};
use super::table::{End, Receiving, Sending, Socket, Stage, Tables};
use super::transfer::wait;
use super::{budget, carrier, channel, context, memory, view};
use crate::interconnect::mirrored::{HAS_ADAPTER, Linked, NEEDS_NO_ADAPTER};
use crate::interconnect::sever;
use crate::reasons::Reason;
use ringlet_core::handover::Incoming;
use ringlet_core::layout::Geometry;
use ringlet_core::memory::Area;
use ringlet_core::sync::Ordering;
use ringlet_linux::{map, sys, tcp};

/// After a meeting that came to nothing, the next one: so soon at first, and twice as late each time.
const AGAIN_NS: u64 = 1_000_000_000;
const DOUBLED_MOST: u32 = 6;
/// And where the other end did not come, which is at its own pace.
const UNMET_DOUBLED_MOST: u32 = 3;
/// How often is looked whether the other end has come.
pub const LOOK_NS: u64 = 5_000_000;

/// Has an end nothing left to do with a carrier that has died?
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Over {
    Yes,
    NotYet,
    /// It is the kernel's for good: for something else, or since a direction has ended.
    Never,
}

/// Both locks held.
pub fn is_over(socket: &Socket, end: &End) -> Over {
    let ends = end.ended.get() != 0
        || end.pending_error.is()
        || end.shut_later.is()
        || end.shut.load(Ordering::SeqCst) != 0
        || end.shut_receiving.is();
    let is_kernels = end.barred.get() != Reason::NoAdapter as u32 || end.given.is();
    if ends || is_kernels || end.receiver.has_left() {
        return Over::Never;
    }
    let Some(ring) = socket.incoming() else { return Over::Never };
    if end.mirrored.get() != NEEDS_NO_ADAPTER {
        return Over::NotYet;
    }
    // (Doorbells may still be on their way; or what the other end says.)
    let settled = incoming(socket, end, &ring).settle() == Ok(true);
    let sent = matches!(end.sending(), Sending::Kernel | Sending::KernelForGood);
    let received = end.receiving() == Receiving::Kernel && !end.rx.ready(&ring);
    // Its word may be there, and its records stand again in the kernel: then that is known here (`orphan::heed`).
    let heard = channel::hear(socket).is_none_or(|word| !word.in_ring || end.heeded.get() != 0);
    let said = !end.worded.is() || channel::is_said(socket) != Some(false);
    // Behind the path, which has not been the ring since: who is about to touch a word of the sender's is seen here, or sees that (`Outgoing::ring`).
    let rings = !end.ringers.are_none_behind();
    // One from which we have severed ourselves lives, perhaps, and still holds the connection: two never have it at a time.
    let let_go = sever::has_hung_up(socket);
    let over = settled && sent && received && heard && said && !rings && let_go;
    if over { Over::Yes } else { Over::NotYet }
}

/// The same, without the locks.
pub fn is_over_now(socket: &Socket) -> Over {
    let end = socket.end();
    match (end.receive_lock.try_take(), end.send_lock.try_take()) {
        (Some(_receiving), Some(_sending)) => is_over(socket, end),
        _ => Over::NotYet,
    }
}

/// Looks for a carrier no more, unless that is asked.
pub fn never(socket: &Socket) {
    meeting::abandon(socket);
    socket.again_tries.set(u32::MAX);
    socket.comes_again.set(0);
}

/// A meeting has come to nothing; the next one is later. `unmet`: the other end was not there.
pub fn failed(socket: &Socket, unmet: bool) {
    meeting::abandon(socket);
    let tries = socket.again_tries.get();
    let most = if unmet { UNMET_DOUBLED_MOST } else { DOUBLED_MOST };
    socket.again_tries.set(tries.saturating_add(1).min(DOUBLED_MOST));
    socket.again_due_ns.set(sys::now_ns() + (AGAIN_NS << tries.min(most)));
}

/// A segment of another carrier, mapped somewhere, and what belongs to it. By its home context the carrier may ring us.
pub struct Fresh {
    pub area: Area,
    pub geometry: Geometry,
    pub linked: Linked,
    pub home: u32,
}

/// It takes the place of the old one. If it can't, all of it is given back.
pub fn change(tables: &Tables, socket: &Socket, fresh: Fresh) -> Result<(), Reason> {
    let changed = change_now(tables, socket, &fresh);
    // (Of the two one is there no more.)
    budget::release(tables, fresh.geometry.segment_bytes());
    if changed.is_err() {
        // SAFETY: mapped just now and shown to nobody.
        #[allow(unsafe_code)]
        unsafe {
            map::unmap(fresh.area)
        };
        context::release(fresh.linked.bell);
        sys::close(fresh.linked.lifeline);
        return changed;
    }
    // Behind the locks, in which nobody waits for a set's.
    view::show(socket, Reason::Young);
    // Whoever sleeps has asked for a doorbell in memory that is there no more.
    heat_all(socket);
    memory::begin_looking_after_adapters(tables);
    Ok(())
}

#[allow(unsafe_code)]
fn change_now(tables: &Tables, socket: &Socket, fresh: &Fresh) -> Result<(), Reason> {
    let end = socket.end();
    let (Some(_receiving), Some(_sending)) = (end.receive_lock.take(), end.send_lock.take()) else {
        return Err(Reason::NoAdapter);
    };
    let (Some((area, geometry)), Stage::Attached) = (socket.segment(), socket.stage()) else {
        return Err(Reason::NoAdapter);
    };
    // (A ring of another size would not fit in its place.)
    if geometry != fresh.geometry || is_over(socket, end) != Over::Yes {
        return Err(Reason::NoAdapter);
    }
    // SAFETY: two mappings of ours, of one size. Who has a reference into the old one reads and writes atomics of the new one; what lies in the rings is
    // looked at under the locks, which are ours, but for headers, of which none is published in the new one; and nobody is between a word that he changes
    // and takes back (`is_over`).
    unsafe { map::put_in_place(fresh.area, area) }.map_err(Reason::from)?;
    // (Behind it: by the old positions nothing stands in the new ring, by the new ones something might in the old one.)
    end.begin_anew();
    socket.counted_bytes.reset();
    for word in [&socket.published, &socket.bells_left, &socket.found_nothing] {
        word.set(0);
    }
    socket.lease_due_ns.set(0);
    socket.kernel_asked_as.set(Receiving::Kernel as u32);
    socket.epoch.add(1);
    let linked = &fresh.linked;
    if socket.bell.is() && context::renew_line(socket.bell.get(), linked.lifeline) {
        context::release(linked.bell);
    } else {
        context::release(socket.bell.swap(linked.bell));
    }
    context::unwatch(socket);
    socket.set_home(fresh.home);
    tables.hide(linked.lifeline);
    let new_channel = match socket.next_channel.swap(0) {
        0 => meeting::kept(socket),
        channel => channel,
    };
    let lifeline = socket.lifeline.swap(linked.lifeline as u32) as i32;
    let channel = socket.channel.swap(new_channel) as i32;
    if lifeline != 0 {
        meeting::part(lifeline);
    }
    if channel != 0 {
        // KERNEL: with words unread, a close would be a reset, which the other end may meet before our word.
        let mut word = [0; crate::handshake::ROOM_BYTES];
        while matches!(tcp::receive_into(channel, &mut word, libc::MSG_DONTWAIT), Ok(1..)) {}
        meeting::part(channel);
    }
    socket.meet_no_more_anew();
    socket.comes_again.set(0);
    socket.again_tries.set(0);
    end.adapter.set(linked.adapter);
    end.mirrored.set(HAS_ADAPTER);
    // (Unless something else has barred it meanwhile.)
    end.barred.change(Reason::NoAdapter as u32, Reason::None as u32);
    if let Some(outgoing) = socket.outgoing() {
        end.tx.begin_bare(&outgoing);
        measure_written(socket, end, &outgoing);
    }
    // Who sleeps on the kernel's connection is to be woken by a byte there; before we say that we are attached.
    wait::want_bytes(socket, true, false);
    carrier::attached(socket, end);
    Ok(())
}
