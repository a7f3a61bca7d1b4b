//! For tests: several processes in one. A thread plays one of them at a time; each has tables of its own (`Once`). And something else can
//! happen at any step of a call, which is a look at what the handover stands on (`sides`).

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The first is played where nothing is said.
pub const COUNT: usize = 128;

/// What happens at which step.
type Due = Option<(u64, Box<dyn FnOnce()>)>;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static STEPS: Cell<u64> = const { Cell::new(0) };
    static DUE: RefCell<Due> = const { RefCell::new(None) };
}

pub fn now() -> usize {
    NOW.get()
}

/// One that nobody has played.
pub fn fresh() -> usize {
    static TAKEN: AtomicUsize = AtomicUsize::new(1);
    let world = TAKEN.fetch_add(1, Ordering::Relaxed);
    assert!(world < COUNT, "more worlds than there are");
    world
}

pub fn within<T>(world: usize, act: impl FnOnce() -> T) -> T {
    struct Back(usize);
    impl Drop for Back {
        fn drop(&mut self) {
            NOW.set(self.0);
        }
    }
    let _back = Back(NOW.replace(world));
    act()
}

/// A step of a call.
pub fn step() {
    STEPS.set(STEPS.get() + 1);
    let due = DUE.with_borrow_mut(|due| due.take_if(|(at, _)| *at == STEPS.get()));
    if let Some((_, event)) = due {
        event();
    }
}

/// At the `nth` step from now on (from 1).
pub fn at_step(nth: u64, event: impl FnOnce() + 'static) {
    DUE.set(Some((STEPS.get() + nth, Box::new(event))));
}

/// Nothing happens any more. True if something would have.
pub fn nothing_more() -> bool {
    DUE.take().is_some()
}
