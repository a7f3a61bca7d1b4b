//! A bundle: endpoints that are polled, and slept for, together.
//!
//! Of its connections a bundle watches those that were lately busy. Each other one is *left*: its flag says that whoever publishes
//! there sets its bit in the bundle's bell. So a poll costs what is busy, not what is connected.

use super::lane::{Lane, Stage, wake};
use super::message::Error;
use super::state::{
    Attached, BundleState, Endpoint, Guard, Handled, Hot, Shared, State, Undelivered,
};
use ringlet::waiting::spin;
use ringlet_core::active::{Delivered, Queue, Status};
use ringlet_core::layout::{LANE_MAX_COUNT, Ready};
use ringlet_core::mailbox::{self, Inbox};
use ringlet_core::wait;
use ringlet_linux::{futex, sys};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Polls in vain until a lane is left: while few are watched, and while many are.
const PATIENCE: u32 = 1000;
const PATIENCE_MANY: u32 = 2;
/// The same, of one whose messages others carry: they take longer, and its bell is rung by a thread of its own.
const PATIENCE_CARRIED: u32 = 1 << 14;
const FEW: usize = 8;
/// Messages of one lane that are delivered in one poll.
const BATCH: usize = 32;
/// Between two looks for a sender that waits for room: it waits while `DEPTH` requests are unserved.
const ROOM_EVERY: u32 = 16;
/// Polls in vain until the processor is offered to others, and until one lane that was left is looked at (a peer may have
/// spoiled its bit).
const YIELD_EVERY: u32 = 1 << 7;
/// The same, while something is watched whose messages others carry, who want a processor for that.
const YIELD_EVERY_CARRIED: u32 = 1 << 6;
const SWEEP_EVERY: u32 = 1 << 10;
/// How long a sleep lasts at most before all lanes are looked at, for the same reason.
const SLEEP_NS: u64 = 1_000_000_000;
/// How long memory is watched before a sleep.
const SPIN_US: u64 = 50;

impl Guard<'_> {
    /// Delivers what has arrived; how many messages that were.
    #[inline]
    pub fn poll(&self, shared: &Shared) -> Result<usize, Error> {
        self.outside()?;
        if self.bundle.news.load(Ordering::Relaxed) {
            self.take_news(shared);
        }
        let bell = shared.bells.of(self.bundle.index);
        for (list, ready) in bell.ready.iter().enumerate() {
            if mailbox::announced(ready) {
                self.take_bits(list, ready);
            }
        }
        let mut total = 0;
        let mut leaving = false;
        for hot in self.inner.hot.borrow().iter() {
            total += self.deliver(hot);
            leaving |= hot.left.get();
        }
        if leaving {
            self.inner.hot.borrow_mut().retain(|hot| !hot.left.get());
        }
        while let Some((endpoint, what)) = self.take_returned() {
            total += 1;
            self.handle(|| endpoint.run_error(self, &what));
        }
        if total == 0 {
            self.poll_in_vain()
        } else {
            self.inner.empty.set(0)
        }
        // A sleeper is woken by bits, so nobody may keep a lane for itself.
        if self.bundle.sleepers.load(Ordering::Relaxed) != 0 && self.leave_all() {
            wake(bell);
        }
        Ok(total)
    }

    fn take_returned(&self) -> Option<(Arc<Endpoint>, Undelivered)> {
        self.inner.returned.borrow_mut().pop_front()
    }

    #[inline]
    fn deliver(&self, hot: &Hot) -> usize {
        let Some(state) = hot.endpoint.state(self) else { return 0 };
        let count = self.deliver_lane(&hot.endpoint, state, &hot.lane);
        if count == 0 {
            hot.idle.set(hot.idle.get() + 1);
            let many = self.inner.hot.borrow().len() > FEW;
            let patience = match hot.lane.wire() {
                _ if many => PATIENCE_MANY,
                Some(_) => PATIENCE_CARRIED,
                None => PATIENCE,
            };
            if hot.idle.get() >= patience {
                hot.left.set(!hot.lane.leave());
            }
            return 0;
        }
        hot.idle.set(0);
        hot.served.set(hot.served.get() + count as u32);
        if hot.served.get() >= ROOM_EVERY {
            hot.served.set(0);
            hot.lane.notify_room();
        }
        count
    }

    #[inline]
    fn deliver_lane(&self, endpoint: &Arc<Endpoint>, state: &State, lane: &Lane) -> usize {
        // Who is not told yet where our bell is can't be answered.
        if lane.stage() == Stage::Opening {
            return 0;
        }
        lane.carry();
        let host = Handled { guard: self, endpoint, state, lane };
        let (connection, memory) = (&lane.connection, &lane.memory);
        let mut count = 0;
        while count < BATCH {
            let reply = connection.deliver(memory, Queue::Reply, &host);
            let request = connection.deliver(memory, Queue::Request, &host);
            if reply == Delivered::Corrupt || request == Delivered::Corrupt {
                lane.end(Status::Unreachable);
                // ORDER: Relaxed; our own note, taken under the same lock.
                self.bundle.news.store(true, Ordering::Relaxed);
                break;
            }
            if reply == Delivered::Nothing && request == Delivered::Nothing {
                break;
            }
            count += 1;
        }
        if count > 0 {
            lane.notify(); // of what went back
        }
        if lane.wire().is_some() && lane.has_ended() {
            // ORDER: Relaxed; our own note, taken under the same lock.
            self.bundle.news.store(true, Ordering::Relaxed);
        }
        count
    }

    #[cold]
    fn poll_in_vain(&self) {
        let empty = self.inner.empty.get().wrapping_add(1);
        self.inner.empty.set(empty);
        if empty.is_multiple_of(SWEEP_EVERY) {
            let count = self.inner.lanes.borrow().len().max(1);
            let number = (self.inner.swept.get() + 1) % count;
            self.inner.swept.set(number);
            self.look_at(number);
        }
        let is_carried = || self.inner.hot.borrow().iter().any(|hot| hot.lane.wire().is_some());
        if empty.is_multiple_of(YIELD_EVERY)
            || empty.is_multiple_of(YIELD_EVERY_CARRIED) && is_carried()
        {
            sys::sched_yield();
        }
    }

    fn look_at(&self, number: usize) {
        let lanes = self.inner.lanes.borrow();
        let ready = lanes
            .get(number)
            .is_some_and(|lane| lane.as_ref().is_some_and(|each| each.lane.ready()));
        drop(lanes);
        if ready {
            self.watch(number);
        }
    }

    #[cold]
    fn take_bits(&self, list: usize, ready: &Ready) {
        let mut inbox = Inbox::default();
        inbox.collect(ready);
        let _ = inbox.next_pending(LANE_MAX_COUNT, |lane| {
            self.watch(list * LANE_MAX_COUNT + lane);
            false
        });
    }

    #[cold]
    fn take_news(&self, shared: &Shared) {
        // ORDER: SeqCst; pairs with `BundleState::tell`: what was put into an inbox before is found.
        self.bundle.news.swap(false, Ordering::SeqCst);
        for endpoint in self.inner.endpoints.borrow().iter() {
            for lane in endpoint.take_inbox() {
                if let Some(state) = endpoint.state(self) {
                    state.know(&lane);
                }
                if !self.attach(endpoint, &lane) {
                    lane.end(Status::Congestion);
                    shared.lane_ended(&lane, Status::Congestion);
                }
            }
        }
        let ended = self.detach(|each| matches!(each.lane.stage(), Stage::Ended(_)));
        for Attached { endpoint, lane } in ended {
            let (Stage::Ended(status), Some(state)) = (lane.stage(), endpoint.state(self)) else {
                continue;
            };
            // What had arrived is delivered first. The peer is gone, but who knows who else writes there.
            for _ in 0..4 {
                if self.deliver_lane(&endpoint, state, &lane) == 0 {
                    break;
                }
            }
            lane.connection.undelivered(&lane.memory, status, |returned| {
                let what = Undelivered { returned, peer: Some(lane.peer) };
                self.inner.returned.borrow_mut().push_back((endpoint.clone(), what));
            });
            state.bury(&lane, status);
            shared.lane_ended(&lane, status);
        }
    }

    /// Is there something for a poll to do?
    pub fn pending(&self, shared: &Shared) -> bool {
        let bell = shared.bells.of(self.bundle.index);
        self.bundle.news.load(Ordering::Relaxed)
            || bell.ready.iter().any(mailbox::announced)
            || !self.inner.returned.borrow().is_empty()
            || self.inner.hot.borrow().iter().any(|hot| hot.lane.ready())
    }

    /// Leaves every lane, so that their bits wake us. True if something is there already.
    fn leave_all(&self) -> bool {
        let mut hot = self.inner.hot.borrow_mut();
        hot.retain(|each| each.lane.leave());
        !hot.is_empty()
    }

    pub fn count(&self, which: impl Fn(&Attached) -> bool) -> usize {
        self.inner.lanes.borrow().iter().flatten().filter(|each| which(each)).count()
    }

    fn look_at_all(&self) {
        let count = self.inner.lanes.borrow().len();
        (0..count).for_each(|number| self.look_at(number));
    }
}

impl BundleState {
    /// Returns true when `done`, which is asked under the lock (and told if a sleep is next): watches memory for a while, then
    /// sleeps. False after `limit_ns`.
    pub fn wait(
        &self,
        shared: &Shared,
        limit_ns: u64,
        done: impl Fn(&Guard, bool) -> bool,
    ) -> bool {
        let start = sys::now_ns();
        loop {
            if spin::watch(SPIN_US, || None, || done(&self.lock(), false)) {
                return true;
            }
            let waited = sys::now_ns() - start;
            if waited >= limit_ns {
                return false;
            }
            self.sleep(shared, (limit_ns - waited).min(SLEEP_NS), &done);
        }
    }

    fn sleep(&self, shared: &Shared, limit_ns: u64, done: &impl Fn(&Guard, bool) -> bool) {
        let start = sys::now_ns();
        let guard = self.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let busy = guard.leave_all();
        drop(guard);
        let bell = shared.bells.of(self.index);
        wait::nap(&bell.sleep);
        if !busy && !done(&self.lock(), true) {
            futex::wait(&bell.sleep, wait::NAPS, limit_ns);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        if sys::now_ns() - start >= SLEEP_NS {
            self.lock().look_at_all();
        }
    }
}
