//! A signal handler may leave a call that waits by a long jump. Then our frames are gone without their drops, and what they had counted
//! would keep a connection open for ever.
//!
//! So a thread notes, beside each count, where its frame was. At its next wait or close, frames that lie below that call's are gone:
//! their counts are taken back. Unless the two are on different stacks, which tell nothing about each other (`stack::has_left`).

use super::epoll::set;
use super::release;
use super::table::{Socket, tables};
use crate::local::{self, Local, Zero};
use crate::stack;
use ringlet_core::sync::Ordering;

/// Waits of one thread that are noted: in handlers inside handlers, or one poll of several connections.
const NOTED_COUNT: usize = 16;

#[derive(Clone, Copy)]
struct Noted {
    /// Index of the socket; or of the set, beside `SET`, and which of the sets that its entry is (`set::Visit`).
    what: u32,
    life: u32,
    frame: usize,
}

// SAFETY: numbers.
#[allow(unsafe_code)]
unsafe impl Zero for Noted {}

const SET: u32 = 1 << 31;
/// Beside a socket: it is counted among the threads inside the kernel too.
const NATIVE: u32 = 1 << 30;
const INDEX: u32 = NATIVE - 1;

static COUNT: Local<usize> = Local::new(local::JUMPS);
static NOTED: Local<[Noted; NOTED_COUNT]> = Local::new(local::JUMPS.from(1));

fn name_of(socket: &Socket, native: bool) -> u32 {
    let index = tables().map_or(0, |tables| tables.index_of(socket));
    index | if native { NATIVE } else { 0 }
}

/// The calling thread is about to count itself among the sleepers of a socket; `native`: and among those inside the kernel for it.
pub fn waits(socket: &Socket, native: bool) {
    note(name_of(socket, native), 0);
}

/// Or among those that wait in a set, in the kernel alone.
pub fn waits_in(set: u32, life: u32) {
    note(SET | set, life);
}

fn note(what: u32, life: u32) {
    look_back();
    let count = COUNT.get();
    if count < NOTED_COUNT {
        let noted = Noted { what, life, frame: stack::here() };
        NOTED.with_each(|all| all[count].set(noted));
        // After the entry: a handler may come in between.
        COUNT.set(count + 1);
    }
}

/// It is about to count itself out.
pub fn waits_no_more(socket: &Socket, native: bool) {
    note_no_more(name_of(socket, native));
}

pub fn waits_no_more_in(set: u32) {
    note_no_more(SET | set);
}

fn note_no_more(what: u32) {
    let count = COUNT.get();
    NOTED.with_each(|all| {
        let found = all[..count].iter().rposition(|noted| noted.get().what == what);
        if let Some(at) = found {
            for next in at + 1..count {
                all[next - 1].set(all[next].get());
            }
            COUNT.set(count - 1);
        }
    });
}

/// Takes back the counts of frames that this thread has jumped out of.
#[inline]
pub fn look_back() {
    if COUNT.get() != 0 {
        take_back();
    }
}

#[cold]
fn take_back() {
    let here = stack::here();
    while let Some(last) = COUNT.get().checked_sub(1) {
        let noted = NOTED.with_each(|all| all[last].get());
        if noted.frame == here || !stack::has_left(noted.frame, here) {
            return;
        }
        COUNT.set(last);
        let Some(tables) = tables() else { return };
        if noted.what & SET != 0 {
            set::leave_native(noted.what & !SET, noted.life);
            continue;
        }
        let socket = tables.sockets.at((noted.what & INDEX) as usize);
        if noted.what & NATIVE != 0 {
            release::leave_native(&socket.end().native_receivers);
        }
        if socket.sleepers.load(Ordering::SeqCst) == 1 {
            socket.room_waiters.store(0, Ordering::SeqCst);
        }
        release::leave(socket);
    }
}

/// In a child by fork, where all counts begin anew: this thread may be inside a wait, which a handler has interrupted to fork.
pub fn count_again() {
    let Some(tables) = tables() else { return };
    NOTED.with_each(|all| {
        for noted in &all[..COUNT.get()] {
            let Noted { what, life, .. } = noted.get();
            match what {
                set if set & SET != 0 => _ = set::count_native(set & !SET, life),
                what => {
                    let socket = tables.sockets.at((what & INDEX) as usize);
                    socket.sleepers.fetch_add(1, Ordering::SeqCst);
                    if what & NATIVE != 0 {
                        socket.enter_native(|end| &end.native_receivers);
                    }
                }
            }
        }
    });
}
