//! epoll_wait and its relatives; and waits that are left to the kernel alone.

use super::arm::{arm, beside_kernel};
use super::bells::{disarm, kick_sleepers, others_sleep};
use super::elder::pass_on;
use super::harvest::{
    ALL_AFTER_WAITS, Whom, harvest, harvest_turn, harvest_turn_at, look_at_full, nothing_found,
};
use super::kernel::{ask_kernel, ask_kernel_since, left_over, restore, translate};
use super::look::any_ready;
use super::nested::{leave, sleep_over};
use super::order::{IN_ORDER_MOST, merge_others};
use super::registration::{has_neighbours, holds_ours};
use super::set::{self, Set, Visit, is_of, others_of};
use crate::socket::table::{Socket, Stage, Tables, tables};
use crate::socket::{context, jumps, kernel_writes, memory, pin, transfer};
use crate::waiting::{signals, sleep, spin};
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::sys::{self, Errno, Sys};

/// While rings keep a set busy (or being watched), the kernel's part is looked at this often (about 10 us).
const ASK_KERNEL_TICKS: u64 = 30_000;
/// While the kernel brings datagrams, who watches looks there this often (about 1 us): it is where the next one comes, too.
const ASK_SOON_TICKS: u64 = 3_000;

/// A wait beside neighbours, as far as it needs no sleep.
#[cold]
fn in_order(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    mask: Option<u64>,
) -> Sys<usize> {
    if set.full.is()
        && let Some(_held) = set.take_first()
    {
        look_at_full(tables, set);
    }
    if set.kernel_turn.swap(0) != 0 {
        let found = ask_kernel(tables, set, out, Some(0), mask, None)?;
        if found > 0 {
            return Ok(found);
        }
    }
    // KERNEL: what there was no room for is first, then what was reported by level: it is in the list again, before all that came later.
    let listed = set.left_over.swap(0) | set.stays_ready.swap(0);
    let (mut first, now) = ([(0, 0); IN_ORDER_MOST], sys::ticks());
    let mut found = 0;
    if listed != 0 {
        let turn = set.turn.add(1);
        found = harvest_turn_at(tables, set, out, false, Whom::Linked, turn, &mut first, now);
    }
    let ours = found;
    // Whatever it is that nobody tells of: it must not wait as long as the neighbours are busy.
    if found == 0 && set.since_all.add(1) > ALL_AFTER_WAITS {
        set.since_all.set(0);
        found = harvest_turn(tables, set, out, false, Whom::All, set.turn.add(1));
    }
    if found > 0 {
        // KERNEL: one wait tells all that is ready, if there is room.
        let (since, others) = (set.turn.get(), others_of(set));
        let rest = &mut out[found..];
        if rest.is_empty() {
            // It comes first at the next wait.
            set.kernel_turn.set(1);
            return Ok(found);
        }
        let more = ask_kernel_since(tables, set, rest, Some(0), mask, None, Some(since));
        found += more.unwrap_or(0);
        merge_others(set, &mut out[..found], &first[..ours], &others, now);
        return Ok(found);
    }
    for _ in 0..2 {
        let found = ask_kernel(tables, set, out, Some(0), mask, None)?;
        if found > 0 {
            return Ok(found);
        }
        // Who has published is about to ring; and what the kernel has got meanwhile may have come before.
        if !any_ready(tables, set) {
            break;
        }
    }
    set.since_all.set(0);
    Ok(0)
}

/// epoll_wait and its relatives, on a set that has (or had) adopted connections, or for what a native wait returned
/// (`native` events) when one was adopted meanwhile. `EINTR` after a signal, as the kernel has it.
pub fn wait(
    visit: Visit,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let tables = tables().ok_or(Errno::EBADF)?;
    let set = &visit;
    jumps::look_back();
    set.begin_question();
    let deadline = timeout_ns.map(|ns| if ns == 0 { 0 } else { sys::now_ns().saturating_add(ns) });
    let result = wait_in(tables, set, out, deadline, mask);
    if set.is_over() {
        return sleep_out(result, deadline, mask);
    }
    // (What was told holds for this wait: who looks at the set from outside asks anew.)
    set.begin_question();
    if result == Ok(0) {
        nothing_found(set);
    }
    let stays_ready = result.is_ok() && set.stays_ready.is();
    // (Who waits on the set itself is told of what comes, and that is what `leave` sees to.)
    let others_sleep = |set: &Set| others_sleep(set) && !waits_nest_only(set);
    if (result == Ok(out.len()) || stays_ready) && others_sleep(set) {
        // More may be ready than there was room for, and what is reported by level is so to every sleeper: another one looks.
        set.stays_ready.set(0);
        kick_sleepers(set);
    } else if set.taken.swap(0) != 0 && others_sleep(set) && any_ready(tables, set) {
        // What rang came behind our look at the rings, and its wake-up is gone.
        kick_sleepers(set);
    }
    leave(tables, set);
    result
}

/// The set was closed beside the wait. KERNEL: that goes on until its time is up or a signal comes; none of the numbers by which it began means
/// anything to it.
#[cold]
fn sleep_out(result: Sys<usize>, deadline: Option<u64>, mask: Option<u64>) -> Sys<usize> {
    if matches!(result, Ok(1..) | Err(Errno::EINTR)) {
        return result;
    }
    let left = deadline.map(|at| at.saturating_sub(sys::now_ns()));
    sleep::poll(&mut [], left, mask, &|| {})
}

/// Does nobody sleep in this set but who waits on it from outside?
fn waits_nest_only(set: &Set) -> bool {
    set.armed.is() && context::sleepers(set.armed.get()) <= 1
}

fn wait_in(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    deadline: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    loop {
        if set.is_over() {
            return Ok(0);
        }
        let beside = beside_kernel(tables, set);
        if beside {
            let found = in_order(tables, set, out, mask)?;
            if found > 0 {
                return Ok(found);
            }
        } else if set.kernel_turn.swap(0) != 0 || has_neighbours(set) && any_ready(tables, set) {
            let more = ask_kernel(tables, set, out, Some(0), mask, None)?;
            let found = harvest(tables, set, &mut out[more..], false);
            if more + found > 0 {
                return Ok(more + found);
            }
        }
        let found = harvest(tables, set, out, false);
        // (What a nested set leaves untaken in the kernel makes it readable.)
        if found > 0
            && (beside || !kernel_due(set, set.told_at.get(), ASK_KERNEL_TICKS) && !set.nested.is())
        {
            return Ok(found);
        }
        if found == out.len() {
            // No room for what the kernel has: it comes first at the next wait.
            set.kernel_turn.set(1);
            return Ok(found);
        }
        if found > 0 || deadline == Some(0) {
            let more = ask_kernel(tables, set, &mut out[found..], Some(0), mask, None)?;
            if found + more > 0 {
                return Ok(found + more);
            }
            return Ok(harvest(tables, set, out, false));
        }
        sleep::check(&|| leave(tables, set));
        let budget = tables
            .config
            .watch_us()
            .min(deadline.map_or(u64::MAX, |at| at.saturating_sub(sys::now_ns()) / 1000));
        let soon = set.datagrams_come() && !spin::rests();
        if soon && budget > 0 {
            // There may be more of what it has told of, for which nobody would watch. (Who sleeps at once is told.)
            let more = ask_kernel(tables, set, out, Some(0), mask, None)?;
            if more > 0 {
                return Ok(more);
            }
            if any_ready(tables, set) {
                continue;
            }
        }
        let every = if soon { ASK_SOON_TICKS } else { ASK_KERNEL_TICKS };
        // (Who does not watch for long asks the kernel by sleeping there.)
        let began = sys::ticks();
        let for_long =
            || sys::ticks().wrapping_sub(began) > every || kernel_writes() != set.written.get();
        let in_kernel = || for_long() && kernel_due(set, sys::ticks(), every) && in_kernel(set);
        signals::begin_wait();
        if latest(tables, set).is_some_and(transfer::wait::sent_lately) {
            spin::sent();
        }
        if spin::watch(
            budget,
            || latest_peer(tables, set),
            || any_ready(tables, set) || in_kernel(),
        ) {
            let more = if any_ready(tables, set) {
                0
            } else {
                ask_kernel(tables, set, out, Some(0), mask, None)?
            };
            if more > 0 {
                return Ok(more);
            }
            continue;
        }
        if signals::handled() {
            // It would have ended the kernel's wait.
            return Err(Errno::EINTR);
        }
        let armed = arm(tables, set);
        let mut left = deadline.map(|at| at.saturating_sub(sys::now_ns()));
        for every in armed.look_every_ns.into_iter().chain(memory::due()) {
            left = Some(left.unwrap_or(every).min(every));
        }
        let slept = if any_ready(tables, set) {
            Ok(0)
        } else {
            ask_kernel(tables, set, out, left, mask, Some(&armed))
        };
        disarm(&armed);
        match slept {
            Ok(0) if beside && deadline.is_none_or(|at| sys::now_ns() < at) => {}
            Ok(more @ 1..) if beside => return Ok(more),
            Ok(0) => {
                let found = harvest(tables, set, out, true);
                if found > 0 || deadline.is_some_and(|at| sys::now_ns() >= at) {
                    return Ok(found);
                }
            }
            Ok(more) => {
                let found = harvest(tables, set, &mut out[more..], true);
                return Ok(more + found);
            }
            Err(error) => return Err(error),
        }
    }
}

/// The connection that was heard of last.
fn latest<'t>(tables: &'t Tables, set: &Set) -> Option<&'t Socket> {
    let last = set.hot_last.get();
    let watch = set::find_watch(last).filter(|_| last != 0)?;
    let socket = tables.sockets.at(watch.socket.get() as usize);
    (is_of(watch, set) && socket.stage() == Stage::Attached).then_some(socket)
}

/// Where its peer runs.
fn latest_peer(tables: &Tables, set: &Set) -> Option<spin::Peer> {
    // (Who closes it takes it out of the set first, under this lock: until we have looked, what the peer says there stays mapped.)
    let _held = set.take()?;
    transfer::wait::peer(latest(tables, set)?)
}

/// The processor on which the latest peer of a set was.
#[cfg(test)]
pub fn latest_processor(set: u32) -> Option<u32> {
    latest_peer(tables()?, set::at(set)).map(|peer| peer.processor)
}

/// Is the kernel's part of the set to be looked at again? Every now and then; and at once when this process has written to something
/// that is not a connection of ours, since it may expect to be told of it.
fn kernel_due(set: &Set, now: u64, every: u64) -> bool {
    let written = kernel_writes();
    if now.wrapping_sub(set.kernel_asked.get()) < every && written == set.written.get() {
        return false;
    }
    set.kernel_asked.set(now);
    set.written.set(written);
    true
}

fn in_kernel(set: &Set) -> bool {
    fd::pending(set.epfd.get() as i32, libc::POLLIN) != 0
}

/// Can this set be left to the kernel alone?
#[inline(always)]
pub fn is_native(set_index: u32) -> bool {
    let set = set::at(set_index);
    // (What we have slept with was taken out again before the process closed itself in.)
    !holds_ours(set) && (!set.context.is() || pin::is_closed_in())
}

/// A wait that is left to the kernel alone begins. False, and it does not, if the set has connections of ours by now.
pub fn begin_native(set: Visit) -> bool {
    memory::close_left();
    jumps::waits_in(set.index(), set.life);
    // ORDER: SeqCst, before the look; pairs with `registration::prepare`, after which `bells::pass_on_overtaking` looks for us.
    let native = set.enter_native() && is_native(set.index());
    if !native {
        end_native(set);
    }
    native
}

/// A wait that is left to the kernel, in a set that holds others (`nested::sleep_over`).
#[allow(unsafe_code)]
pub fn wait_over_sets(
    set: Visit,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let deadline = timeout_ns.map(|ns| sys::now_ns().saturating_add(ns));
    sleep::check(&|| end_native(set));
    signals::begin_wait();
    loop {
        let left = deadline.map(|at| at.saturating_sub(sys::now_ns()));
        sleep_over(&set, left, mask, &|| end_native(set))?;
        if set.is_over() {
            return sleep_out(Ok(0), deadline, mask);
        }
        let epfd = set.epfd.get() as i32;
        // SAFETY: a valid slice.
        let n = unsafe { fd::epoll_wait(epfd, out.as_mut_ptr(), out.len(), Some(0), mask)? };
        if n > 0 || deadline.is_some_and(|at| sys::now_ns() >= at) {
            return Ok(n);
        }
        if signals::handled() {
            // While sets were looked at: it would have ended the kernel's wait.
            return Err(Errno::EINTR);
        }
    }
}

pub fn end_native(set: Visit) {
    jumps::waits_no_more_in(set.index());
    set.leave_native();
}

/// What a native wait returned that was overtaken by an adoption: our events taken out.
pub fn after_native(visit: Visit, out: &mut [epoll_event]) -> usize {
    let Some(tables) = tables() else { return out.len() };
    let set = &visit;
    if set.is_over() {
        return left_over(set, out);
    }
    let kept = restore(tables, set, out);
    let told = translate(tables, set, &mut out[..kept], None, set::NO_QUESTION);
    if let Some(taken) = told.foreign {
        let _ = pass_on(tables, set, taken, None);
    }
    told.kept
}
