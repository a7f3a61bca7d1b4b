//! A fork in a signal handler that interrupted this thread while it was at work in shared memory.
//!
//! Both processes go on with what was interrupted. The parent finishes it; what the child does must reach nobody. So before the fork a copy
//! is made of all that the interrupted frame may touch, and in the child the copy takes the place of what is shared: its call returns
//! there as it does in the parent, as after the kernel's own call. From then on the child does not have the connections that are moved:
//! its descriptors name sockets that are not connected.

use super::table::{Socket, Stage, Tables};
use ringlet_linux::map::Aside;
use std::cell::Cell;

/// Connections at whose locks one thread can be: a handler may have interrupted a handler.
const HELD_MOST: usize = 4;

struct Held {
    socket: u32,
    segment: Aside,
    ends: Aside,
}

thread_local! {
    static HELD: [Cell<Option<Held>>; HELD_MOST] = const { [const { Cell::new(None) }; HELD_MOST] };
}

/// Before the copy that a fork makes.
pub fn before_fork(tables: &'static Tables) {
    let held = |socket: &&Socket| {
        let end = socket.end();
        socket.stage() == Stage::Attached && (end.send_lock.is_ours() || end.receive_lock.is_ours())
    };
    HELD.with(|all| {
        for (place, socket) in all.iter().zip(tables.followed().filter(held)) {
            let Some((area, _)) = socket.segment() else { continue };
            let ends = Aside::of_table(tables.ends.chunk(socket.end_index()));
            place.set(Aside::of_area(area).zip(ends).map(|(segment, ends)| Held {
                socket: tables.index_of(socket),
                segment,
                ends,
            }));
        }
    });
}

pub fn after_fork_in_parent() {
    HELD.with(|all| {
        for held in all.iter().filter_map(Cell::take) {
            held.segment.forget();
            held.ends.forget();
        }
    });
}

/// In the child, which has no other thread.
/// `disown` takes a connection away from this process; it is told whether this thread is at work there.
pub fn after_fork_in_child(tables: &'static Tables, disown: impl Fn(&'static Socket, bool)) {
    HELD.with(|all| {
        let held = || all.iter().filter_map(Cell::take);
        let kept: [Option<Held>; HELD_MOST] = {
            let mut held = held();
            std::array::from_fn(|_| held.next())
        };
        if kept.iter().all(Option::is_none) {
            return;
        }
        for socket in tables.followed().filter(|socket| socket.stage() == Stage::Attached) {
            let index = tables.index_of(socket);
            let at_work = kept.iter().flatten().any(|held| held.socket == index);
            disown(socket, at_work);
        }
        for held in kept.into_iter().flatten() {
            held.segment.put_in_place();
            held.ends.put_in_place();
            let end = tables.sockets.at(held.socket as usize).end();
            end.sender.keep_out();
            // The frame does not free them, since it is another's; who waited for it would wait for ever.
            end.send_lock.keep();
            end.receive_lock.keep();
        }
    });
}
