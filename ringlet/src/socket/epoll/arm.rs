//! What is armed while somebody sleeps in a set, or in between.

use super::bells::{Armed, disarm};
use super::elder::has_elder;
use super::hot::{board_of, collect, for_each_hot};
use super::order::{leave_over, place_of};
use super::registration::{has_neighbours, holds_ours};
use super::set::{EPOLLOUT, Set, Visit};
use crate::socket::table::{Sending, Socket, Tables};
use crate::socket::transfer::room::{
    LOOK_NS, can_ring_for_room, leave_full, look_after, waits_for_room,
};
use crate::socket::transfer::wait::{self, LOOK_AT_TIMES_NS, LOOK_SOON_NS};
use crate::socket::{boards, context, datagram, sides};
use core::cell::Cell;
use ringlet_linux::sys;

/// Neighbours of which the kernel has told nothing for so many waits are quiet. Counted in waits, so that no clock decides about order.
const QUIET_AFTER_WAITS: u32 = 256;

/// Arms the set's contexts, and those hot connections that they do not cover.
pub(super) fn arm(tables: &Tables, set: &Set) -> Armed {
    let second = context::of_thread_if_any().filter(|mine| *mine == set.second.get());
    arm_as(tables, set, [set.context.get(), second.unwrap_or(0)])
}

/// Is what rings hold to be told in the kernel's order? Then the set's context is armed from the first such wait to the last.
#[inline(always)]
pub(super) fn beside_kernel(tables: &Tables, set: &Visit) -> bool {
    let (neighbours, before) = (has_neighbours(set), set.beside.is());
    let heard = neighbours && set.quiet.add(1) < QUIET_AFTER_WAITS;
    (neighbours || before) && go_beside(tables, set, heard)
}

#[cold]
fn go_beside(tables: &Tables, set: &Visit, neighbours: bool) -> bool {
    // (What a nested set reports, and one that is shared with a parent, has its own order.)
    let context = set.context.get();
    let beside = neighbours && context != 0 && !set.nested.is() && !set.elder.is();
    if beside == set.beside.is() {
        return beside;
    }
    let Some(held) = set.take() else { return set.beside.is() };
    // (By now it may have none.)
    let (context, beside) = (set.context.get(), beside && set.context.is());
    let before = set.beside.swap(if beside { context } else { 0 });
    if beside && before == 0 {
        context::arm(context);
    } else if !beside && before != 0 {
        context::disarm(before);
    }
    drop(held);
    if beside {
        // What rests by the bell that is rung by name would have no place in the kernel's list.
        if set.named.is() && context::is_of_set(context) && boards::any(context) {
            set.all_hot.set(1);
        }
        // Those that do not ring by it; and what came to rings before is not in the kernel's list.
        disarm(&arm_as(tables, set, [context, 0]));
        set.turn.add(1);
        set.told_at.set(sys::ticks());
        for_each_hot(tables, set, |watch, socket| {
            if !watch.neighbour.is() {
                leave_over(set, watch, place_of(watch, socket));
            }
        });
        set.others.iter().for_each(|other| other.linked.set(0));
        // What the kernel holds for neighbours it has told of once; those that were reported by level are linked.
        set.left_over.set(1);
    }
    beside
}

fn arm_as(tables: &Tables, set: &Set, contexts: [u32; 2]) -> Armed {
    let mut armed = Armed { contexts, look_every_ns: None };
    for context in armed.contexts {
        if context != 0 {
            context::arm(context);
            boards::sleeps(context);
        }
    }
    // What strangers have announced before is hot before what is hot is wished for: what they announce from here on rings, once.
    if set.context.is()
        && boards::announced(set.context.get())
        && let Some(_held) = set.take()
    {
        collect(tables, set);
    }
    let by_name = may_ring_by_name(set);
    let (look_soon, look_at_times) = (Cell::new(false), Cell::new(false));
    let look_for_room = Cell::new(if set.full.is() { LOOK_NS } else { u64::MAX });
    for_each_hot(tables, set, |watch, socket| {
        if socket.has_datagrams() {
            datagram::arm(socket, true);
            return;
        }
        sides::answer_return(socket, socket.end());
        let room = watch.events.get() & EPOLLOUT != 0;
        if room && waits_for_room(socket) {
            look_for_room.set(look_for_room.get().min(look_after(socket)));
        }
        if room && set.nested.is() {
            leave_full(socket);
        }
        let home = socket.home.get();
        let by_event = home != 0 && armed.contexts.contains(&home) && wait::rings_home(socket);
        if by_event {
            if room {
                wait::want_room_event(socket);
            }
        } else if by_name && rings_by_name(set, socket, home) {
            // (Who announces rings once for all that comes before somebody is awake.)
            let announces = boards::announces(socket, home);
            if announces {
                wait::want_ready(socket, tables.index_of(socket));
            }
            if room || !announces {
                wait::want_named(socket, !announces, room);
            }
        } else {
            wait::want_bytes(socket, true, room);
        }
        // (A bell by name may fail to ring, and then only a byte can. Of room in the kernel the kernel tells.)
        if room && !by_event && socket.end().sending() == Sending::Ring {
            look_soon.set(look_soon.get() || !can_ring_for_room(socket));
            look_at_times.set(true);
        }
    });
    let soon = (look_soon.get() || holds_ours(set) && has_elder(set)).then_some(LOOK_SOON_NS);
    let at_times = look_at_times.get().then_some(LOOK_AT_TIMES_NS);
    let for_room = Some(look_for_room.get()).filter(|ns| *ns != u64::MAX);
    armed.look_every_ns = [soon, at_times, for_room].into_iter().flatten().min();
    armed
}

/// We have taken a wake-up, perhaps for something that we report, and others go on sleeping in this set: senders, which ring once, are to
/// ring again. The look that follows finds what they did not ring for.
pub(super) fn renew(tables: &Tables, set: &Set, mine: Option<&Armed>) {
    let contexts = [set.context.get(), set.second.get()];
    let others = contexts.iter().any(|&context| {
        let own = mine.is_some_and(|armed| armed.contexts.contains(&context));
        context != 0 && context::sleepers(context) > u64::from(own)
    });
    if others {
        disarm(&arm_as(tables, set, contexts));
        set.taken.set(1);
    }
}

/// Whoever is about to sleep wants to be woken through the kernel.
pub(super) fn want(socket: &Socket, room: bool) {
    if socket.has_datagrams() {
        datagram::arm(socket, true);
    } else {
        wait::want_bytes(socket, true, room);
    }
}

/// The same, of a watch of this set that is looked at no more: where the peer has the set's ready board, it says there that there is something.
pub(super) fn want_at_rest(tables: &Tables, set: &Set, socket: &Socket, room: bool) {
    if has_board(set, socket) {
        wait::want_ready(socket, tables.index_of(socket));
        wait::want_bytes(socket, false, room);
    } else {
        want(socket, room);
    }
}

/// Does the peer of this socket have a ready board of the set's context, and ring that?
pub(super) fn has_board(set: &Set, socket: &Socket) -> bool {
    let home = socket.home.get();
    home != 0
        && home == set.context.get()
        && !socket.has_datagrams()
        && !socket.end().mirrored.is()
        && if wait::rings_home(socket) {
            board_of(set).is_some()
        } else {
            may_ring_by_name(set)
                && rings_by_name(set, socket, home)
                && boards::announces(socket, home)
        }
}

/// (A bell by name has no place among neighbours, and what waits in its queue would make a nested set ready.)
fn may_ring_by_name(set: &Set) -> bool {
    set.named.is() && !set.beside.is() && !set.nested.is()
}

/// Is a socket with this home woken by the bell by name of this set's context?
pub(super) fn rings_by_name(set: &Set, socket: &Socket, home: u32) -> bool {
    set.named.is() && home != 0 && home == set.context.get() && wait::rings_by_name(socket)
}
