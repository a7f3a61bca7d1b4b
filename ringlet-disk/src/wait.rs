//! How both sides wait: they watch for as long as that lately paid; then they sleep.

use std::time::Duration;

use ringlet_linux::sys;
use ringlet_reflect::Watch;

/// For so long at most.
const WATCH_NS: u64 = 50_000;
const LOOKS_PER_CLOCK: u32 = 16;
/// Who watches offers its processor so often: what it waits for may need it, and may be several programs (NBD's client is one).
const YIELD_EVERY_NS: u64 = 4_000;
/// Behind a watch in vain the next is left out, behind another one the next two, and so on, up to so many.
const LEFT_OUT_MOST: u32 = 256;
/// Who sleeps looks again so often, whether others are there.
pub const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Whether to watch. WHY not as sockets do it: those leave the processor to others as soon as more want to run than there are processors. Here, where
/// one request has NBD's client, its server and the disk's run in turn, that is so whenever one of them has not gone to sleep yet.
#[derive(Default)]
pub struct Watcher {
    in_vain: u32,
    left_out: u32,
}

impl Watcher {
    /// Will the next watch look at all?
    pub fn watches(&self) -> bool {
        self.left_out == 0
    }

    fn leaves_out(&mut self) -> bool {
        let left_out = self.left_out;
        self.left_out = left_out.saturating_sub(1);
        left_out > 0
    }

    fn found(&mut self) {
        self.in_vain = 0;
    }

    /// So many of the next ones are left out, or twice as many as the last time.
    fn watched_in_vain(&mut self, least: u32) {
        self.in_vain = (self.in_vain * 2).clamp(least, LEFT_OUT_MOST);
        self.left_out = self.in_vain;
    }

    /// Looks until something is found, unless that lately was in vain. `idle` is called now and then: it may find something too.
    pub fn watch<T>(
        &mut self,
        mut look: impl FnMut() -> Option<T>,
        mut idle: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        if self.leaves_out() {
            return None;
        }
        let start = sys::now_ns();
        let mut offered = start;
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if let found @ Some(_) = look() {
                    self.found();
                    return found;
                }
                std::hint::spin_loop();
            }
            let now = sys::now_ns();
            if now - start > WATCH_NS {
                self.watched_in_vain(1);
                return None;
            }
            if now - offered > YIELD_EVERY_NS {
                if let found @ Some(_) = idle() {
                    return found;
                }
                sys::sched_yield();
                offered = sys::now_ns();
                // (Others had the processor for long: who sleeps is let to it before them, and who watches is not.)
                if offered - now > WATCH_NS {
                    self.watched_in_vain(LEFT_OUT_MOST);
                    return look();
                }
            }
        }
    }

    /// What is there by the time that the page has changed, or that it took too long.
    pub fn wait<T>(&mut self, page: &mut Watch, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if let found @ Some(_) = self.watch(&mut look, || None) {
            return found;
        }
        // (What was written since the last sleep ends this one at once.)
        page.wait(Some(LOOK_AGAIN));
        look()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_in_vain_are_left_out_more_and_more() {
        let mut watcher = Watcher::default();
        let next = |watcher: &mut Watcher| (0..).position(|_| !watcher.leaves_out()).unwrap();
        let left_out = |watcher: &mut Watcher, least| {
            watcher.watched_in_vain(least);
            assert_eq!(watcher.watches(), watcher.left_out == 0);
            next(watcher)
        };
        let vain = [(); 10].map(|()| left_out(&mut watcher, 1));
        assert_eq!(vain, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256]);
        watcher.found();
        assert_eq!(left_out(&mut watcher, 1), 1);
        // Where others want the processor, at once.
        watcher.found();
        assert_eq!([(); 2].map(|()| left_out(&mut watcher, LEFT_OUT_MOST)), [256, 256]);
    }
}
