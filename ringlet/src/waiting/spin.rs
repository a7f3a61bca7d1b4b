//! How long to watch shared memory before sleeping.
//!
//! What a watch costs is its length; what it saves, if the wait ends meanwhile, is a sleep and a wake-up. So a thread keeps how long its
//! waits lately were, and watches as long as pays most ([`Waits::budget`]). A wait that was slept through counts too, by when the message
//! was published and not by when the thread woke; and if the peer had to be woken first, less what that takes. Else two ends that both
//! sleep would find each other's answers too late to be worth watching for, for ever.
//!
//! Who wants the processors goes first. While more threads want to run than there are processors, nobody watches; that is looked up now and then, and
//! not found out by giving a slice away. A thread that finds by a yield that others wanted its processor all the same, or that has lost a slice
//! (processors of a group, which the count does not show), sleeps at once, and so its next waits for a multiple of what they took. Who may not
//! watch rests: for a while it does not even look whether it may.
//!
//! The kernel likes to wake a thread where its waker runs, so two ends that talk often share one processor while another idles. Then
//! watching is in vain, and neither ever sleeps long enough to be moved. So a thread that finds by a yield that its peer runs
//! on the same processor moves to another one that it may use.

use crate::local::{self, Local, Zero};
use crate::once::Once;
use ringlet_core::sync::{AtomicBool, AtomicU64, Ordering};
use ringlet_linux::sys;

/// A gap in the clock, or a yield, that took longer gave the processor to somebody.
const CROWDED_NS: u64 = 8_000;
/// So long a thread does not watch that others took the processor from: as many times what they took, and so long at most (it may have been
/// stopped by a debugger).
const OFF_TIMES: u64 = 20;
const OFF_MOST_NS: u64 = 2_000_000_000;
const SLICE_NS: u64 = 500_000;
/// How old the count of those that want to run may be.
const COUNT_EVERY_NS: u64 = 4_000_000;
/// Time between yields while watching: a yield costs a system call of a fraction of it.
const YIELD_EVERY_NS: u64 = 4_000;
const LOOKS_PER_CLOCK: u32 = 16;
/// How long a thread rests at most, in `sys::ticks`: 0.4 to 2 ms on x86-64.
const REST_TICKS: u64 = 2_000_000;

/// A yield that took longer let somebody run.
const SHARED_NS: u64 = 1_500;
/// Time before a thread moves again; doubled each time that it is needed again soon.
const MOVE_AGAIN_NS: u64 = 2_000_000;
const MOVE_AGAIN_MAX_NS: u64 = 1_000_000_000;

/// Of this thread's time, one part in so many may be watched away in vain; and so much at once.
const VAIN_SHARE: u64 = 6;
const VAIN_MOST_NS: u64 = 2_000_000;

/// A thread tells what it has watched, if it does not sleep before, after so long, and after so many waits.
const TELL_NS: u64 = 1_000_000;
const TELL_WAITS: u32 = 4096;

/// The waits that are kept: half of them are forgotten when they are so many.
const KEPT: u32 = 64;
const LENGTHS: usize = 11;
/// The first length; each other is twice the one before; those that are longer than the last are only counted.
const FIRST_NS: u64 = 1_000;
/// A processor's time is worth an eighth of a waiter's, as long as nobody else wants it, to who wants latency above all; else a quarter, where
/// an answer is waited for.
const PRICE_FOR_LATENCY: u64 = 8;
const PRICE: u64 = 4;
/// What a sleep and its wake-up take of processors' time, on both sides: about so long pays where nobody's time is saved.
const SLEEP_NS: u64 = 8_000;
/// What a thread that knows nothing yet takes for the cost of a wake-up, and watches.
const WAKE_NS: u64 = 20_000;
const WAKE_MOST_NS: u64 = 100_000;
const BEGIN_NS: u64 = 50_000;

/// How long waits lately were, by powers of two.
#[derive(Clone, Copy, Default)]
struct Waits {
    counts: [u16; LENGTHS],
    longer: u16,
    all: u32,
}

impl Waits {
    fn note(&mut self, ns: u64, times: u16) {
        let nth = (0..LENGTHS).find(|nth| ns <= FIRST_NS << nth);
        let count = nth.map_or(&mut self.longer, |nth| &mut self.counts[nth]);
        *count = count.saturating_add(times);
        self.all += u32::from(times);
        if self.all >= KEPT {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.longer /= 2;
            self.all = self.counts.iter().map(|count| u32::from(*count)).sum::<u32>()
                + u32::from(self.longer);
        }
    }

    /// How long to watch, where a wake-up costs so much: the length with the highest sum, over all waits, of what it saves less what it
    /// costs, at this price. 0: not at all.
    fn budget(&self, wake_ns: u64, price: u64) -> u64 {
        if self.all == 0 {
            return BEGIN_NS;
        }
        let (mut best, mut best_ns) = (0, 0);
        let (mut ended, mut watched) = (0, 0);
        for (nth, count) in self.counts.iter().enumerate() {
            let (length, count) = (FIRST_NS << nth, u64::from(*count));
            ended += count;
            watched += count * length;
            let costs = (watched + (u64::from(self.all) - ended) * length) / price;
            let saves = (ended * wake_ns).saturating_sub(costs);
            if saves > best {
                (best, best_ns) = (saves, length);
            }
        }
        best_ns
    }
}

/// The wait that is under way: when it began, by both clocks, and whether the peer had to be woken for it.
#[derive(Clone, Copy, Default)]
struct Wait {
    ns: u64,
    ticks: u64,
    rang: bool,
}

/// What this thread has watched, and its process's page does not yet tell.
#[derive(Clone, Copy, Default)]
struct Untold {
    ns: u64,
    watched: u32,
    in_vain: u32,
}

// SAFETY: numbers.
#[allow(unsafe_code)]
unsafe impl Zero for Waits {}
// SAFETY: numbers.
#[allow(unsafe_code)]
unsafe impl Zero for Wait {}
// SAFETY: numbers.
#[allow(unsafe_code)]
unsafe impl Zero for Untold {}

static RANG: Local<bool> = Local::new(local::SPIN);
/// Waits that ended at the first look, not yet among the others.
static AT_ONCE: Local<u32> = Local::new(local::SPIN.from(1));
/// In ticks: until then no wait of this thread is watched. 0: it does not rest.
static REST_UNTIL: Local<u64> = Local::new(local::SPIN.from(2));
static WAIT: Local<Wait> = Local::new(local::SPIN.from(3));
static OFF_UNTIL: Local<u64> = Local::new(local::SPIN.from(6));
static UNTOLD: Local<Untold> = Local::new(local::SPIN.from(7));
static WAITS: Local<Waits> = Local::new(local::SPIN.from(9));
/// By how much a wake-up costs more than `WAKE_NS`; less wraps around.
static WAKE: Local<u64> = Local::new(local::SPIN.from(13));
static MOVED_NS: Local<u64> = Local::new(local::SPIN.from(14));
/// At least `MOVE_AGAIN_NS`; 0 before the first move.
static MOVE_AGAIN: Local<u64> = Local::new(local::SPIN.from(15));
/// When we looked at which processors this thread may use, and whether it was one.
static BOUND: Local<(u64, bool)> = Local::new(local::SPIN.from(16));
/// When we looked at how modest this thread is, and whether it was.
static MODEST: Local<(u64, bool)> = Local::new(local::SPIN.from(22));
/// What was watched in vain of `VAIN_MOST_NS`, as of when.
static VAIN: Local<(u64, u64)> = Local::new(local::SPIN.from(18));

/// Of 256 waits, so many began though this thread, and all others on that connection, had sent nothing since the last one.
static UNASKED: Local<u64> = Local::new(local::SPIN.from(20));
static SENT: Local<bool> = Local::new(local::SPIN.from(21));
const UNASKED_ALL: u64 = 256;

/// What a watcher asks and tells; without it nobody is asked or told.
pub struct Outside {
    /// Where the kernel tells how many threads want to run (`sys::runnable`), if it does.
    pub load: fn() -> Option<i32>,
    /// A thread has watched for so long, so many waits to their end, and so many in vain.
    pub tell: fn(ns: u64, watched: u32, in_vain: u32),
    /// Latency counts, whatever it costs.
    pub for_latency: bool,
}

static OUTSIDE: Once<Outside> = Once::new();

pub fn start(outside: Outside) {
    let _ = OUTSIDE.set(outside);
}

/// Where the peer that a watcher waits for runs.
#[derive(Clone, Copy)]
pub struct Peer {
    pub processor: u32,
    /// Of two that share a processor this one moves; the other only when that does not help.
    pub we_move: bool,
}

/// This thread has woken a peer: what it waits for next takes that much longer.
#[inline]
pub fn rang() {
    RANG.set(true);
}

/// Something was sent, to which what is waited for next may be the answer.
#[inline]
pub fn sent() {
    SENT.set(true);
}

/// Watches until `ready` or until it does not pay any more; says whether it became ready. (Who is told that it did not looks once more when
/// peers know that it sleeps.) `peer` is asked when the processor turns out to be shared.
#[inline]
pub fn watch(limit_us: u64, peer: impl Fn() -> Option<Peer>, ready: impl FnMut() -> bool) -> bool {
    watch_many(limit_us, 1, peer, ready)
}

/// The same, where one look is at so many connections: the more there are, the fewer looks before the clock is asked.
#[inline]
pub fn watch_many(
    limit_us: u64,
    connections: usize,
    peer: impl Fn() -> Option<Peer>,
    mut ready: impl FnMut() -> bool,
) -> bool {
    if limit_us == 0 {
        return false;
    }
    let per_clock = looks_per_clock(connections);
    // An answer that comes at once is not kept waiting by the clock.
    let rests = rests();
    let at_once = if rests { ready() } else { looks(per_clock, &mut ready) };
    if at_once {
        AT_ONCE.set(AT_ONCE.get().saturating_add(1));
        return true;
    }
    let start = sys::now_ns();
    begin(start);
    let budget = if rests { 0 } else { budget(start, limit_us * 1000, &peer) };
    if budget == 0 {
        tell();
        return false;
    }
    // (That tells the peer where we are, too.)
    peer();
    let mut yielded = start;
    let mut last = start;
    let (found, until) = loop {
        if looks(per_clock, &mut ready) {
            break (true, last);
        }
        let mut now = sys::now_ns();
        if now - last > CROWDED_NS && !ready() && gives_way(now, now - last) {
            break (ready(), now);
        }
        if now - start > budget {
            let (spent, at) = VAIN.get();
            VAIN.set(((spent + (now - start)).min(VAIN_MOST_NS), at));
            break (ready(), now);
        }
        if now - yielded > YIELD_EVERY_NS {
            let back = offer();
            let lost = back - now;
            if lost > SHARED_NS && !shares_with(back, &peer) && !ready() {
                // Who wanted the processor had it because we offered it. He wants it again.
                stay_off(back, lost);
                break (ready(), back);
            }
            now = back;
            yielded = now;
        }
        last = now;
    };
    count(until - start, found);
    if found {
        note(until - start);
    }
    found
}

/// Offers the processor to others; when we have it again.
fn offer() -> u64 {
    sys::sched_yield();
    #[cfg(test)]
    return sys::now_ns() + tests::TAKEN_NS.get();
    #[cfg(not(test))]
    sys::now_ns()
}

/// This thread has watched for so long.
fn count(ns: u64, found: bool) {
    let mut untold = UNTOLD.get();
    untold.ns += ns;
    untold.watched += u32::from(found);
    untold.in_vain += u32::from(!found);
    UNTOLD.set(untold);
    // (Who did not find it sleeps now, who knows how long.)
    if !found || untold.ns > TELL_NS || untold.watched > TELL_WAITS {
        tell();
    }
}

/// Adds what this thread has watched to what its process shows.
fn tell() {
    let Untold { ns, watched, in_vain } = UNTOLD.take();
    if watched == 0 && in_vain == 0 {
        return;
    }
    if let Some(outside) = OUTSIDE.get() {
        (outside.tell)(ns, watched, in_vain);
    }
}

/// In a child by fork: what its parent has watched is not its own.
pub fn forget() {
    UNTOLD.take();
    AT_ONCE.take();
}

#[inline]
pub fn rests() -> bool {
    let until = REST_UNTIL.get();
    if until == 0 {
        return false;
    }
    let rests = is_ahead(until, sys::ticks());
    if !rests {
        REST_UNTIL.set(0);
    }
    rests
}

/// Is the end of a rest still to come? What is further away than any rest was noted before the ticks jumped.
fn is_ahead(until: u64, ticks: u64) -> bool {
    (1..=REST_TICKS).contains(&until.wrapping_sub(ticks))
}

/// A wait begins that is not over at once.
fn begin(now: u64) {
    if WAIT.get().ns != 0 {
        // The last one ended without what was waited for.
        note(u64::MAX);
    }
    // (Smoothed over eight waits.)
    let unasked = if SENT.replace(false) { 0 } else { UNASKED_ALL };
    UNASKED.set((UNASKED.get() * 7 + unasked) / 8);
    let at_once = AT_ONCE.take();
    if at_once > 0 {
        let (mut waits, mut untold) = (WAITS.get(), UNTOLD.get());
        waits.note(0, at_once.min(KEPT / 4) as u16);
        untold.watched = untold.watched.saturating_add(at_once);
        WAITS.set(waits);
        UNTOLD.set(untold);
    }
    WAIT.set(Wait { ns: now, ticks: sys::ticks(), rang: RANG.replace(false) });
}

fn wake_ns() -> u64 {
    WAKE_NS.wrapping_add(WAKE.get())
}

/// How long is a wait that begins now watched? A thread that may not, rests.
fn budget(now: u64, limit: u64, peer: &impl Fn() -> Option<Peer>) -> u64 {
    let (spent, at) = VAIN.get();
    let spent = spent.saturating_sub(now.saturating_sub(at) / VAIN_SHARE);
    VAIN.set((spent, now));
    let left = VAIN_MOST_NS - spent;
    let off = OFF_UNTIL.get().saturating_sub(now);
    // (Who has one processor tells where, and learns whether the peer has the same. Of whom nothing is known a yield tells.)
    let needed = || is_bound(now) && peer().is_some_and(|peer| peer.processor == sys::processor());
    let barred = off > 0 || needed() || crowded(now, COUNT_EVERY_NS);
    let pays = if barred { 0 } else { pays(now, for_latency()).min(left) };
    if pays == 0 {
        // (A tick is a nanosecond at most.)
        let rest = if off > 0 { off.min(REST_TICKS) } else { REST_TICKS };
        REST_UNTIL.set(sys::ticks().wrapping_add(rest));
    }
    pays.min(limit)
}

/// How long to watch so that it pays. Nobody waits for a thread that is only sent to: it saves what a sleep takes of a processor, and no more. So does
/// one that stands behind others by its own wish, or may have so much of the processors only.
fn pays(now: u64, for_latency: bool) -> u64 {
    let waits = WAITS.get();
    if for_latency {
        return worth(waits.budget(wake_ns(), PRICE_FOR_LATENCY));
    }
    if UNASKED.get() > UNASKED_ALL / 2 || is_modest(now) {
        return waits.budget(SLEEP_NS, 1);
    }
    worth(waits.budget(wake_ns(), PRICE))
}

/// Does latency count, whatever it costs? To who does not say otherwise.
fn for_latency() -> bool {
    OUTSIDE.get().is_none_or(|outside| outside.for_latency)
}

/// How long to watch where so much pays. What lately was says little of the few waits that are longer; but who watches, before it sleeps, for
/// as long as a sleep costs, pays twice what it had to at most. A peer that was woken for this wait needs as long as we do, and
/// is as often later as sooner.
fn worth(pays: u64) -> u64 {
    let wake = wake_ns();
    match (pays, WAIT.get().rang) {
        (0, _) => 0,
        (_, false) => pays.max(wake),
        (_, true) => pays.max(wake) + 2 * wake,
    }
}

/// The wait is over; it was so long, or would have been.
fn note(ns: u64) {
    let wait = WAIT.take();
    let mut waits = WAITS.get();
    waits.note(ns.saturating_sub(if wait.rang { wake_ns() } else { 0 }), 1);
    WAITS.set(waits);
}

/// After a sleep: what was waited for is there, and was published then (in ticks; 0: that is not known).
pub fn woken(published: u64) {
    let wait = WAIT.get();
    if wait.ns == 0 {
        return;
    }
    let (all, ticks) =
        (sys::now_ns().saturating_sub(wait.ns), sys::ticks().wrapping_sub(wait.ticks));
    let after = published.wrapping_sub(wait.ticks);
    let wake = wake_ns();
    let until = match published {
        0 => all.saturating_sub(wake),
        // (Ticks of a peer's, who may lie: at worst this thread watches for nothing, or does not watch.)
        _ if after <= ticks => {
            (u128::from(all) * u128::from(after) / u128::from(ticks.max(1))) as u64
        }
        _ => 0,
    };
    if published != 0 {
        let late = (all - until).min(WAKE_MOST_NS);
        WAKE.set((wake - wake / 8 + late / 8).wrapping_sub(WAKE_NS));
    }
    note(until);
}

/// The clock stood for so long: an interrupt, or somebody else had the processor. Does he, or another, still want it?
#[cold]
fn gives_way(now: u64, lost: u64) -> bool {
    if lost > SLICE_NS {
        stay_off(now, lost);
        return true;
    }
    crowded(now, COUNT_EVERY_NS / 8)
}

/// Others had the processor for so long: this thread sleeps, and leaves it to them.
#[cold]
fn stay_off(now: u64, lost: u64) {
    OFF_UNTIL.set(now + lost.saturating_mul(OFF_TIMES).min(OFF_MOST_NS));
}

/// Has this thread one processor only, which its peer may need?
fn is_bound(now: u64) -> bool {
    looked_up(&BOUND, now, sys::is_bound)
}

/// Does this thread give way to others (nice, SCHED_IDLE, SCHED_BATCH), or has its control group a quota?
fn is_modest(now: u64) -> bool {
    looked_up(&MODEST, now, || sys::is_nice() || sys::has_quota())
}

fn looked_up(known: &Local<(u64, bool)>, now: u64, look: impl FnOnce() -> bool) -> bool {
    let (looked, found) = known.get();
    if now.saturating_sub(looked) <= COUNT_EVERY_NS {
        return found;
    }
    let found = look();
    known.set((now, found));
    found
}

static COUNTED_NS: AtomicU64 = AtomicU64::new(0);
static CROWDED: AtomicBool = AtomicBool::new(false);

/// Do more threads want to run than there are processors, as of so long ago at most?
fn crowded(now: u64, age: u64) -> bool {
    // ORDER: Relaxed, all: a hint.
    let counted = COUNTED_NS.load(Ordering::Relaxed);
    if now.saturating_sub(counted) > age
        && COUNTED_NS.compare_exchange(counted, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        let runnable = OUTSIDE.get().and_then(|outside| (outside.load)()).map_or(0, sys::runnable);
        CROWDED.store(runnable > sys::processors(), Ordering::Relaxed);
    }
    CROWDED.load(Ordering::Relaxed)
}

#[inline(always)]
fn looks_per_clock(connections: usize) -> u32 {
    LOOKS_PER_CLOCK / connections.clamp(1, LOOKS_PER_CLOCK as usize) as u32
}

#[inline(always)]
fn looks(times: u32, ready: &mut impl FnMut() -> bool) -> bool {
    (0..times).any(|_| {
        let is_ready = ready();
        if !is_ready {
            core::hint::spin_loop();
        }
        is_ready
    })
}

/// Is it the peer with whom we share this processor? Then one of the two moves away, if that helps.
#[cold]
fn shares_with(now: u64, peer: &impl Fn() -> Option<Peer>) -> bool {
    let here = sys::processor();
    let Some(peer) = peer().filter(|peer| peer.processor == here) else { return false };
    let patience = MOVE_AGAIN.get().max(MOVE_AGAIN_NS) * if peer.we_move { 1 } else { 8 };
    if now - MOVED_NS.get() < patience {
        return true;
    }
    // Needed again soon after the last time: it does not help much here.
    let soon = now - MOVED_NS.get() < patience * 8;
    MOVE_AGAIN.set(if soon {
        (MOVE_AGAIN.get().max(MOVE_AGAIN_NS) * 2).min(MOVE_AGAIN_MAX_NS)
    } else {
        MOVE_AGAIN_NS
    });
    MOVED_NS.set(now);
    sys::leave_processor(here);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// So long others have the processor when it is offered to them.
        pub static TAKEN_NS: Cell<u64> = const { Cell::new(0) };
    }

    /// As if nothing were known, and there were always room to watch.
    fn fresh() {
        COUNTED_NS.store(u64::MAX, Ordering::Relaxed);
        CROWDED.store(false, Ordering::Relaxed);
        BOUND.set((u64::MAX, false));
        MODEST.set((u64::MAX, false));
        UNASKED.set(0);
        SENT.set(false);
        WAIT.set(Wait::default());
        WAITS.set(Waits::default());
        VAIN.set((0, 0));
        OFF_UNTIL.set(0);
        REST_UNTIL.set(0);
    }

    fn waits(lengths: &[(u64, u16)]) -> Waits {
        let mut waits = Waits::default();
        lengths.iter().for_each(|(ns, times)| waits.note(*ns, *times));
        waits
    }

    #[test]
    fn watches_for_what_comes_soon_and_not_for_what_does_not() {
        assert_eq!(waits(&[(10_000, 20)]).budget(20_000, 8), 16_000);
        assert_eq!(waits(&[(100_000, 20)]).budget(20_000, 8), 128_000);
        assert_eq!(waits(&[(100_000, 20)]).budget(20_000, 4), 0);
        assert_eq!(waits(&[(1_000_000, 20)]).budget(20_000, 8), 0);
        assert_eq!(waits(&[(u64::MAX, 20)]).budget(20_000, 8), 0);
    }

    #[test]
    fn a_wake_up_that_costs_more_is_watched_for_longer() {
        let waits = waits(&[(250_000, 20)]);
        assert_eq!(waits.budget(20_000, 8), 0);
        assert_eq!(waits.budget(60_000, 8), 256_000);
    }

    #[test]
    fn few_long_waits_do_not_lengthen_the_watch() {
        assert_eq!(waits(&[(10_000, 20), (u64::MAX, 5)]).budget(20_000, 8), 16_000);
        assert_eq!(waits(&[(10_000, 1), (u64::MAX, 20)]).budget(20_000, 8), 0);
    }

    #[test]
    fn who_watches_does_so_for_as_long_as_a_sleep_costs_and_as_a_woken_peer_takes() {
        let watched = |waits: Waits, rang: bool| {
            fresh();
            WAITS.set(waits);
            WAIT.set(Wait { ns: 1, ticks: 1, rang });
            budget(sys::now_ns(), 500_000, &|| None)
        };
        WAKE.set(0);
        assert_eq!(watched(waits(&[(1_000, 20)]), false), WAKE_NS);
        assert_eq!(watched(waits(&[(1_000, 20)]), true), 3 * WAKE_NS);
        assert_eq!(watched(waits(&[(50_000, 20)]), false), 64_000);
        assert_eq!(watched(waits(&[(u64::MAX, 20)]), true), 0);
    }

    #[test]
    fn who_is_only_sent_to_watches_no_longer_than_a_sleep_costs() {
        let pays_of = |lengths: u64, asked: bool| {
            fresh();
            WAKE.set(0);
            for _ in 0..20 {
                if asked {
                    sent();
                }
                begin(1);
            }
            WAITS.set(waits(&[(lengths, 20)]));
            pays(1, false)
        };
        // A stream without answers; then what is waited for is an answer.
        for (lengths, alone, for_an_answer) in
            [(1_000, 1_000, 20_000), (5_000, 0, 20_000), (50_000, 0, 64_000)]
        {
            assert_eq!(pays_of(lengths, false), alone);
            assert_eq!(pays_of(lengths, true), for_an_answer);
        }
        // One that gives way to others.
        MODEST.set((u64::MAX, true));
        assert_eq!(pays_of_modest(), 0);
    }

    fn pays_of_modest() -> u64 {
        UNASKED.set(0);
        WAITS.set(waits(&[(50_000, 20)]));
        pays(1, false)
    }

    #[test]
    fn a_peer_that_had_to_be_woken_does_not_make_the_wait_long() {
        fresh();
        WAKE.set(0);
        WAIT.set(Wait { ns: 1, ticks: 1, rang: true });
        note(WAKE_NS + 2_000);
        assert_eq!(WAITS.get().counts[1], 1);
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut waits = waits(&[(u64::MAX, 60)]);
        (0..200).for_each(|_| waits.note(10_000, 1));
        assert_eq!(waits.budget(20_000, 8), 16_000);
    }

    /// Waits for what does not come, and says how often it looked.
    fn looks_in_vain() -> u32 {
        let mut looks = 0;
        assert!(!watch(
            500,
            || None,
            || {
                looks += 1;
                false
            }
        ));
        looks
    }

    #[test]
    fn who_may_not_watch_rests_and_learns_all_the_same() {
        OFF_UNTIL.set(u64::MAX);
        WAITS.set(waits(&[(u64::MAX, 60)]));
        // (A rest may be over when the next wait begins: then it looks as often as at first.)
        let times = (0..1000).map(|_| {
            let looks = looks_in_vain();
            let wait = WAIT.get();
            assert_ne!(wait.ns, 0);
            woken(wait.ticks + 1);
            assert_eq!(WAIT.get().ns, 0);
            looks
        });
        let times: Vec<u32> = times.collect();
        assert_eq!(times[0], LOOKS_PER_CLOCK);
        assert!(times.contains(&1));
        assert!(times.iter().all(|looks| [1, LOOKS_PER_CLOCK].contains(looks)));
        assert_ne!(WAITS.get().budget(WAKE_NS, PRICE), 0);
    }

    #[test]
    fn who_looks_at_many_connections_asks_the_clock_more_often() {
        for (connections, looks) in [(0, 16), (1, 16), (2, 8), (15, 1), (16, 1), (5000, 1)] {
            assert_eq!(looks_per_clock(connections), looks);
            OFF_UNTIL.set(u64::MAX);
            REST_UNTIL.set(0);
            let mut looked = 0;
            watch_many(
                500,
                connections,
                || None,
                || {
                    looked += 1;
                    false
                },
            );
            assert_eq!(looked, looks);
        }
    }

    #[test]
    fn what_a_process_has_watched_is_told() {
        // (Of this thread: tests run beside each other.)
        thread_local! {
            static TOLD: Cell<[u64; 3]> = const { Cell::new([0; 3]) };
        }
        let tell = |ns, watched: u32, in_vain: u32| {
            let [all_ns, all, all_in_vain] = TOLD.get();
            TOLD.set([all_ns + ns, all + u64::from(watched), all_in_vain + u64::from(in_vain)]);
        };
        start(Outside { load: || None, tell, for_latency: false });
        let told = || TOLD.get();
        fresh();
        assert!(looks_in_vain() > LOOKS_PER_CLOCK);
        let [ns, watched, in_vain] = told();
        assert_ne!(ns, 0);
        assert_eq!((watched, in_vain), (0, 1));
        // What comes at once, and what comes after a while, which others' wish for the processor may keep us from seeing.
        assert!(watch(500, || None, || true));
        let tries = (0..1000).position(|_| {
            let mut looks = 0;
            fresh();
            watch(
                500,
                || None,
                || {
                    looks += 1;
                    looks > 3 * LOOKS_PER_CLOCK
                },
            )
        });
        let tries = tries.unwrap() as u64;
        fresh();
        looks_in_vain();
        let [more_ns, watched, in_vain] = told();
        assert!(more_ns > ns);
        assert_eq!((watched, in_vain), (2, tries + 2));
        // What is not yet told when a fork is made is the parent's alone.
        assert!(watch(500, || None, || true));
        forget();
        fresh();
        looks_in_vain();
        assert_eq!(told()[1], 2);
    }

    #[test]
    fn who_learns_by_a_yield_that_others_want_the_processor_stays_off() {
        TAKEN_NS.set(OFF_MOST_NS);
        let before = sys::now_ns();
        // (One that is preempted before it offers the processor may be done by then.)
        let stays_off = |_| {
            fresh();
            looks_in_vain();
            OFF_UNTIL.get() > before + 2 * OFF_MOST_NS
        };
        assert!((0..1000).any(stays_off));
        assert!([1, LOOKS_PER_CLOCK].contains(&looks_in_vain()));
    }

    #[test]
    fn who_rests_sees_what_is_there() {
        OFF_UNTIL.set(u64::MAX);
        looks_in_vain();
        assert!(watch(500, || None, || true));
        assert_eq!(AT_ONCE.get(), 1);
    }

    #[test]
    fn no_rest_is_longer_for_ticks_that_jump() {
        let now = 5;
        assert!(is_ahead(now + 1, now));
        assert!(is_ahead(now.wrapping_add(REST_TICKS), now));
        assert!(is_ahead(1, u64::MAX));
        assert!(!is_ahead(now, now));
        assert!(!is_ahead(now - 1, now));
        assert!(!is_ahead(now + REST_TICKS + 1, now));
    }

    #[test]
    fn who_gave_way_stays_off_for_a_multiple_and_not_for_ever() {
        stay_off(1_000, 2_000);
        assert_eq!(OFF_UNTIL.get(), 1_000 + 2_000 * OFF_TIMES);
        stay_off(1_000, u64::MAX);
        assert_eq!(OFF_UNTIL.get(), 1_000 + OFF_MOST_NS);
    }
}
