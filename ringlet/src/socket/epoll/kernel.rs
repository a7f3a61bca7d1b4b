//! What the kernel reports of a set, and what it means.

use super::arm::{renew, rings_by_name};
use super::bells::{
    ALL, Armed, NAMED, SECOND, SELF, WATCH_MASK, any_of_ours, disarm, drain, is_ours, kick,
    kick_sleepers, mark, pass_on_overtaking,
};
use super::elder::pass_on;
use super::harvest::{Whom, harvest_turn};
use super::hot::heat;
use super::look::{any_ready, count_ready};
use super::nested::{holds_sets, leave, sleep_over};
use super::order::{IN_ORDER_MOST, note_other, place_of};
use super::registration::{ASKS_MAX, has_neighbours};
use super::set::{self, Set, Visit, is_marked_unmoved, is_of};
use crate::socket::table::Tables;
use crate::socket::{boards, context, doorbells};
use crate::waiting::sleep;
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::sys::{self, Sys};

/// Does the kernel tell of a neighbour, or of what is none of ours?
fn hear(set: &Set, told: &[epoll_event]) {
    let is_neighbour = |event: &epoll_event| {
        let watch = set::find_watch(event.u64 as u32 & WATCH_MASK);
        !is_ours(event) || watch.is_some_and(|watch| watch.neighbour.is())
    };
    if has_neighbours(set) && told.iter().any(is_neighbour) {
        set.quiet.set(0);
    }
}

/// What the kernel reported, without our own events.
pub(super) struct Translated {
    pub(super) kept: usize,
    /// Something of ours was among it; or of a process with which we share the set.
    pub(super) ours: bool,
    pub(super) foreign: Option<u64>,
}

/// The program's data in place of our marks, where what the kernel has told is still the kernel's (`control::register`): how many stay. Told
/// under the set's lock, so that each arming tells once, by the kernel or by us, also while the connection moves.
pub(super) fn restore(tables: &Tables, set: &Visit, told: &mut [epoll_event]) -> usize {
    let mut kept = 0;
    for nth in 0..told.len() {
        let event = told[nth];
        if let Some(event) =
            if is_ours(&event) { restored(tables, set, event) } else { Some(event) }
        {
            told[kept] = event;
            kept += 1;
        }
    }
    kept
}

fn restored(tables: &Tables, set: &Visit, event: epoll_event) -> Option<epoll_event> {
    let Some(watch) = set::find_watch(event.u64 as u32 & WATCH_MASK) else { return Some(event) };
    let _held = set.take();
    if set.is_over() {
        return None;
    }
    if watch.marked.get() != event.u64 as u32 || !is_of(watch, set) || !is_marked_unmoved(watch) {
        return Some(event);
    }
    // (What moves just now is told by us, once it is adopted. And another thread may have asked for something else meanwhile.)
    let moves = tables.sockets.at(watch.socket.get() as usize).is_ours();
    let events = event.events & (watch.events.get() | (libc::EPOLLERR | libc::EPOLLHUP) as u32);
    if moves || watch.disabled.is() || events == 0 {
        return None;
    }
    watch.disabled.set(1);
    Some(epoll_event { events, u64: watch.data.get() })
}

/// The set's eventfd was rung. (A full counter would not ring again. That of a nested set stays as long as there is something: `settle_nested`.)
fn heard(tables: &Tables, set: &Visit) {
    if !set.nested.is() || !any_ready(tables, set) {
        let _held = set.take();
        if !set.is_over() {
            drain(set);
        }
    }
}

/// Its bell by name was.
fn heard_named(set: &Visit) {
    let _held = set.take();
    if !set.is_over() {
        // (Each hot connection may have rung, and each stranger's process for what rests.)
        let context = set.context.get();
        context::heard_named(context, set.hot_count.get() + boards::heard(context));
    }
}

/// Takes our own events out of what the kernel reported; what they mean is left with the watches. `mine`: as what the caller sleeps.
pub(super) fn translate(
    tables: &Tables,
    set: &Visit,
    events: &mut [epoll_event],
    mine: Option<&Armed>,
    question: u32,
) -> Translated {
    let mut told = Translated { kept: 0, ours: false, foreign: None };
    for i in 0..events.len() {
        let event = events[i];
        if !is_ours(&event) {
            events[told.kept] = event;
            told.kept += 1;
            continue;
        }
        told.ours = true;
        let foreign = (event.u64 ^ mark(0)) as u32 & !WATCH_MASK != 0;
        told.foreign = told.foreign.or(foreign.then_some(event.u64));
        match event.u64 as u32 & WATCH_MASK {
            SELF | ALL | NAMED if foreign => {}
            NAMED => heard_named(set),
            SELF => heard(tables, set),
            ALL => set.all_hot.set(1),
            SECOND => {}
            index => told_of(tables, set, index, event.events, question),
        }
    }
    if told.ours {
        renew(tables, set, mine);
        pass_on_overtaking(set);
    }
    told
}

/// When what the kernel holds for this watch was sent; 0 if that is not known.
fn sent_by_kernel(tables: &Tables, set: &Set, index: u32) -> u64 {
    let (Some(watch), Some(_held)) = (set::find_watch(index), set.take()) else {
        return 0;
    };
    if !is_of(watch, set) {
        return 0;
    }
    place_of(watch, tables.sockets.at(watch.socket.get() as usize))
}

/// As `translate`, beside neighbours: what is ours is put where the kernel tells of it. The first `n` of `out` are the kernel's; what a
/// ring's mark stands for may need more places.
fn translate_in_order(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    n: usize,
    mine: Option<&Armed>,
    since: Option<u32>,
    question: u32,
) -> Translated {
    let mut told = Translated { kept: n, ours: any_of_ours(&out[..n]), foreign: None };
    set.others.iter().for_each(|other| other.linked.set(0));
    if !told.ours {
        out[..n].iter().enumerate().for_each(|(nth, event)| note_other(set, nth, event.u64));
        return told;
    }
    let is_foreign = |event: &epoll_event| (event.u64 ^ mark(0)) as u32 & !WATCH_MASK != 0;
    for event in out[..n].iter().filter(|event| is_ours(event)) {
        let foreign = is_foreign(event);
        told.foreign = told.foreign.or(foreign.then_some(event.u64));
        match event.u64 as u32 & WATCH_MASK {
            SELF if !foreign => heard(tables, set),
            ALL if !foreign => set.all_hot.set(1),
            NAMED if !foreign => heard_named(set),
            SELF | SECOND | ALL | NAMED => {}
            index => told_of(tables, set, index, event.events, question),
        }
    }
    let turn = set.turn.add(1);
    let since = since.unwrap_or(turn);
    // Who rings from now on gets a new place; the looks that follow find what was published before.
    renew(tables, set, mine);
    pass_on_overtaking(set);
    let at = out.len() - n;
    out.copy_within(..n, at);
    told.kept = 0;
    let (mut others, mut rung, mut marks) = (0, false, 0);
    let harvest =
        |out: &mut [epoll_event], whom| harvest_turn(tables, set, out, mine.is_some(), whom, since);
    for i in at..out.len() {
        let event = out[i];
        let index = event.u64 as u32 & WATCH_MASK;
        if is_ours(&event) && matches!(index, SELF | SECOND | ALL | NAMED) {
            rung = true;
            continue;
        }
        if rung {
            // What the kernel holds of ours has a time too. What is none of ours has only its place: behind the first that has rung.
            let time = if is_ours(&event) { sent_by_kernel(tables, set, index) } else { 0 };
            rung = time != 0 && marks < IN_ORDER_MOST;
            marks += 1;
            let whom = if rung { Whom::RungBefore(time) } else { Whom::Rung };
            told.kept += harvest(&mut out[told.kept..i], whom);
        }
        if is_ours(&event) {
            told.kept += harvest(&mut out[told.kept..=i], Whom::One(index));
        } else {
            out[told.kept] = event;
            told.kept += 1;
            note_other(set, others, event.u64);
            others += 1;
        }
    }
    if rung {
        told.kept += harvest(&mut out[told.kept..], Whom::Rung);
    }
    told
}

/// So many events are asked of the kernel at once that there is room for what rings hold.
fn places_beside(tables: &Tables, set: &Set, room: usize) -> usize {
    let hot = set.hot_count.get() as usize;
    let rung = if hot < room { hot } else { count_ready(tables, set, room) };
    room + 1 - rung.clamp(1, room)
}

/// In answer to that question.
fn told_of(tables: &Tables, set: &Visit, index: u32, events: u32, question: u32) {
    let Some(watch) = set::find_watch(index) else { return };
    let held = set.take();
    if !set.is_over() && watch.adopted.is() && is_of(watch, set) {
        let socket = tables.sockets.at(watch.socket.get() as usize);
        doorbells::kernel_tells(socket, events);
        let datagrams = socket.has_datagrams();
        // (KERNEL: it tells all that is ready. What it has told of a stream before is still to be reported.)
        watch.told.set(if datagrams { events } else { watch.told.get() | events });
        watch.told_in(question);
        if datagrams {
            set.datagrams_came();
        }
        let rings = watch.hot.is() || socket.boards.is();
        let by_byte = rings && rings_by_name(set, socket, socket.home.get());
        heat(set, watch, held.is_some());
        if by_byte {
            // Perhaps because the bell's queue is full. That gives no edge any more by which it would be emptied.
            context::drain_named(set.context.get());
        }
    }
}

/// What the kernel has told of a set that was closed beside the wait: what is none of ours is the program's. The rest may have been for the next set,
/// if the number was that one's already when the kernel was asked: it looks at all that is in it.
#[cold]
pub(super) fn left_over(set: &Visit, told: &mut [epoll_event]) -> usize {
    if any_of_ours(told) {
        set.all_hot.set(1);
        // ORDER: a fence behind `all_hot`; pairs with `wait::arm`: who is about to sleep there sees it, or is rung.
        fence(Ordering::SeqCst);
        kick(set);
    }
    let mut kept = 0;
    for nth in 0..told.len() {
        if !is_ours(&told[nth]) {
            told[kept] = told[nth];
            kept += 1;
        }
    }
    kept
}

pub(super) fn ask_kernel(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    asleep: Option<&Armed>,
) -> Sys<usize> {
    ask_kernel_since(tables, set, out, timeout_ns, mask, asleep, None)
}

/// `since`: the same wait has told of some already, in this turn.
#[allow(unsafe_code)]
pub(super) fn ask_kernel_since(
    tables: &Tables,
    set: &Visit,
    out: &mut [epoll_event],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
    asleep: Option<&Armed>,
    since: Option<u32>,
) -> Sys<usize> {
    let epfd = set.epfd.get() as i32;
    let mut timeout = timeout_ns;
    let beside = set.beside.is();
    let room = if beside { places_beside(tables, set, out.len()) } else { out.len() };
    for nth in 0..ASKS_MAX {
        if set.is_over() {
            // The number that we have read may be another's.
            return Ok(0);
        }
        let question = set.begin_question();
        let asked = &mut out[..room];
        let n = match asleep {
            Some(armed) => {
                let cancelled = || {
                    disarm(armed);
                    // What had woken this one is another's.
                    kick_sleepers(set);
                    leave(tables, set);
                };
                if holds_sets(set.index()) {
                    sleep_over(set, timeout, mask, &cancelled)?;
                    timeout = Some(0);
                }
                if set.is_over() {
                    return Ok(0);
                }
                sleep::epoll_wait(epfd, asked, timeout, mask, &cancelled)?
            }
            None => {
                if holds_sets(set.index()) {
                    sleep_over(set, Some(0), None, &|| {})?;
                }
                // SAFETY: `asked` is a valid slice.
                unsafe { fd::epoll_wait(epfd, asked.as_mut_ptr(), room, timeout, mask)? }
            }
        };
        if set.is_over() {
            return Ok(left_over(set, &mut out[..n]));
        }
        set.kernel_asked.set(sys::ticks());
        let kept = restore(tables, set, &mut out[..n]);
        hear(set, &out[..kept]);
        let told = match beside {
            true => translate_in_order(tables, set, out, kept, asleep, since, question),
            false => translate(tables, set, &mut out[..kept], asleep, question),
        };
        if let Some(taken) = told.foreign {
            let passed = pass_on(tables, set, taken, mask);
            if told.kept == 0 {
                passed?;
            }
        }
        if told.kept > 0 || n < room {
            return Ok(told.kept);
        }
        // Events of our own took all the room there was. What they told of comes first; the kernel's turn is next.
        // (By level they take it again.)
        if (asleep.is_some() || nth > 0) && any_ready(tables, set) {
            return Ok(0);
        }
        timeout = Some(0);
    }
    Ok(0)
}
