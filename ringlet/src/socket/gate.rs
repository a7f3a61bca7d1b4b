//! What a fork must see whole: which connections this process follows, and how many processes hold each. A thread that changes both goes
//! through the gate; a thread that forks shuts it from the count until the copy is made.
//!
//! Nobody waits here for ever. A handler that interrupted a thread inside goes in as well, or forks, and a thread that has left by a long
//! jump is forgotten after a second: then a count may be off, which only keeps a connection from being moved.

use crate::local::{self, Local};
use crate::thread;
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::fd;

const LOOK_NS: u64 = 100_000;
const LOOKS_MAX: u32 = 10_000;

/// How often this thread is inside.
static INSIDE: Local<u32> = Local::new(local::GATE);

#[derive(Default)]
pub struct Gate {
    /// Threads that change what is followed, and the one that forks.
    inside: AtomicU32,
    forker: AtomicU32,
}

/// Until it is dropped. (Of a thread that was the only one: nobody else can fork. A handler that does, in its midst, would not wait.)
pub struct Inside<'a>(Option<&'a Gate>);

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(gate) = self.0 {
            INSIDE.set(INSIDE.get() - 1);
            gate.one_less();
        }
    }
}

impl Gate {
    /// Never below none: `shut` may have given us up.
    fn one_less(&self) {
        let one_less = |inside: u32| inside.checked_sub(1);
        // ORDER: Release; pairs with `shut`.
        let _ = self.inside.fetch_update(Ordering::Release, Ordering::Relaxed, one_less);
    }

    /// The calling thread changes what is followed.
    #[inline]
    pub fn enter(&self) -> Inside<'_> {
        if thread::is_alone() {
            return Inside(None);
        }
        // ORDER: SeqCst, both; pairs with `shut`: it sees us, or we see it.
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.forker.load(Ordering::SeqCst) != 0 {
            self.await_fork();
        }
        INSIDE.set(INSIDE.get() + 1);
        Inside(Some(self))
    }

    /// Somebody forks: the calling thread, which has counted itself in, goes out until that is over.
    #[cold]
    fn await_fork(&self) {
        let me = thread::number();
        for _ in 1..LOOKS_MAX {
            // ORDER: as in `enter`.
            let forker = self.forker.load(Ordering::SeqCst);
            if forker == 0 || forker == me || INSIDE.get() > 0 {
                break;
            }
            self.one_less();
            nap();
            self.inside.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The same for who does not wait: not while another thread forks.
    pub fn try_enter(&self) -> Option<Inside<'_>> {
        // ORDER: as in `enter`.
        self.inside.fetch_add(1, Ordering::SeqCst);
        INSIDE.set(INSIDE.get() + 1);
        let inside = Inside(Some(self));
        let forker = self.forker.load(Ordering::SeqCst);
        (forker == 0 || forker == thread::number() || INSIDE.get() > 1).then_some(inside)
    }

    /// The calling thread is about to fork. (An only thread shuts nobody out; and a page that it need not write to it has not to copy.)
    pub fn shut(&self) {
        if thread::is_alone() {
            return;
        }
        let me = thread::number();
        for _ in 0..LOOKS_MAX {
            let before = self.forker.compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst);
            if before.is_ok() || before == Err(me) {
                break;
            }
            nap();
        }
        self.forker.store(me, Ordering::SeqCst);
        for _ in 0..LOOKS_MAX {
            // ORDER: SeqCst; pairs with `enter`, and with the Release of those who leave.
            if self.inside.load(Ordering::SeqCst) <= INSIDE.get() {
                return;
            }
            nap();
        }
        // (The next fork does not wait for them again.)
        self.inside.store(INSIDE.get(), Ordering::SeqCst);
    }

    /// It has forked; or it is the child, in which there is no other thread.
    pub fn open(&self, child: bool) {
        if child {
            self.inside.store(INSIDE.get(), Ordering::SeqCst);
        }
        if self.forker.load(Ordering::SeqCst) != 0 {
            self.forker.store(0, Ordering::SeqCst);
        }
    }
}

fn nap() {
    let _ = fd::poll(&mut [], Some(LOOK_NS), None);
}
