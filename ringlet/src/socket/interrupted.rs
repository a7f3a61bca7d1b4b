//! A fork in a signal handler that interrupted this thread while it was at work in shared memory.
//!
//! Both processes go on with what was interrupted. The parent finishes it; what the child does must reach nobody. So before the fork a copy
//! is made of all that the interrupted frame may touch, and in the child the copy takes the place of what is shared: its call returns
//! there as it does in the parent, as after the kernel's own call. From then on the child does not have the connections that are moved:
//! its descriptors name sockets that are not connected.
//!
//! A frame at work in a set touches no more of what is shared than a look does, but for the ready board: what it takes there is lost to the
//! parent. So the child learns of the fork before it returns there, and has a board of its own (`context::forget_all`).

use super::table::{Socket, Stage, Tables};
use crate::local::{self, Local, Zero};
use ringlet_linux::map::PrivateCopy;

/// Connections at whose locks one thread can be: a handler may have interrupted a handler.
const HELD_MOST: usize = 4;

#[derive(Clone, Copy, Default)]
struct Held {
    /// 0: none.
    socket: u32,
    segment: PrivateCopy,
    ends: PrivateCopy,
}

impl Held {
    fn is(&self) -> bool {
        self.socket != 0
    }
}

// SAFETY: numbers, without a destructor.
#[allow(unsafe_code)]
unsafe impl Zero for Held {}

static HELD: Local<[Held; HELD_MOST]> = Local::new(local::INTERRUPTED);

/// This thread was interrupted at work in a set.
static IN_A_SET: Local<bool> = Local::new(local::INTERRUPTED.from(HELD_WORDS));
const HELD_WORDS: usize = size_of::<[Held; HELD_MOST]>().div_ceil(size_of::<u64>());

/// Before the copy that a fork makes.
pub fn before_fork(tables: &'static Tables, in_a_set: bool) {
    if in_a_set {
        IN_A_SET.set(true);
    }
    let held = |socket: &&Socket| {
        let end = socket.end();
        socket.stage() == Stage::Attached && (end.send_lock.is_ours() || end.receive_lock.is_ours())
    };
    HELD.with_each(|all| {
        for (place, socket) in all.iter().zip(tables.followed().filter(held)) {
            let Some((area, _)) = socket.segment() else { continue };
            let Ok(segment) = PrivateCopy::of_area(area) else { continue };
            match PrivateCopy::of_table(tables.ends.chunk(socket.end_index())) {
                Ok(ends) => place.set(Held { socket: tables.index_of(socket), segment, ends }),
                Err(_) => segment.forget(),
            }
        }
    });
}

fn is_any_held() -> bool {
    HELD.with_each(|all| all.iter().any(|held| held.get().is()))
}

/// Was this thread at work where both processes go on?
pub fn was_at_work() -> bool {
    IN_A_SET.get() || is_any_held()
}

fn leave_sets() {
    if IN_A_SET.get() {
        IN_A_SET.set(false);
    }
}

pub fn after_fork_in_parent() {
    leave_sets();
    // (A page that the parent need not write to it has not to copy.)
    if !is_any_held() {
        return;
    }
    for held in HELD.take().into_iter().filter(Held::is) {
        held.segment.forget();
        held.ends.forget();
    }
}

/// In the child, which has no other thread.
/// `disown` takes a connection away from this process; it is told whether this thread is at work there.
pub fn after_fork_in_child(tables: &'static Tables, disown: impl Fn(&'static Socket, bool)) {
    leave_sets();
    if !is_any_held() {
        return;
    }
    let kept = HELD.take();
    for socket in tables.followed().filter(|socket| socket.stage() == Stage::Attached) {
        let index = tables.index_of(socket);
        disown(socket, kept.iter().any(|held| held.socket == index));
    }
    for held in kept.into_iter().filter(Held::is) {
        for copy in [held.segment, held.ends] {
            // SAFETY: a segment, and a table: both are made of atomics, and the copy has what they had.
            #[allow(unsafe_code)]
            let _ = unsafe { copy.put_in_place() };
        }
        let end = tables.sockets.at(held.socket as usize).end();
        end.sender.keep_out();
        // The frame does not free them, since it is another's; who waited for it would wait for ever.
        end.send_lock.keep();
        end.receive_lock.keep();
    }
}
