//! Teams, and contexts, which tell in whose numbers PEs are meant. (All that is done by a context is complete when its call returns.)

use std::ffi::{c_int, c_long};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::group::{Group, SLOTS};
use crate::job::{Job, give_up, job};

/// `shmem_team_config_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Config {
    num_contexts: c_int,
}

const NUM_CONTEXTS: c_long = 1;

/// A team as its handle points to it.
pub struct Team {
    start: usize,
    stride: isize,
    size: usize,
    slot: usize,
    config: Config,
}

/// `shmem_team_t`: nothing, one of the two that are always there, or a `Team`'s address.
pub type Handle = *mut Team;
const INVALID: Handle = std::ptr::null_mut();
pub const WORLD: Handle = std::ptr::without_provenance_mut(1);
const SHARED: Handle = std::ptr::without_provenance_mut(2);
/// (And 0 the world's, 1 that of those who share memory: all, on one host.)
const SLOT_SHARED: usize = 1;
const PREDEFINED: u64 = 0b11;

pub fn group(job: &Job, team: Handle, split: usize) -> Option<Group<'_>> {
    match team {
        INVALID => None,
        WORLD => Some(Group::of_slot(job, 0, 1, job.size, 0, split)),
        SHARED => Some(Group::of_slot(job, 0, 1, job.size, SLOT_SHARED, split)),
        // SAFETY: made by `split`, and not destroyed: so the program says.
        team => unsafe { &*team }.group(job, split).into(),
    }
}

impl Team {
    fn group<'a>(&self, job: &'a Job, split: usize) -> Group<'a> {
        Group::of_slot(job, self.start, self.stride, self.size, self.slot, split)
    }
}

/// Slots that this PE has for teams to come.
struct Slots {
    free: u64,
    /// Of those of whose teams threads of this PE are making new ones; and one of them has the free ones to choose from.
    splitting: u64,
    is_offered: bool,
}

static SLOTS_OF_OURS: Mutex<Slots> =
    Mutex::new(Slots { free: ((1 << SLOTS) - 1) & !PREDEFINED, splitting: 0, is_offered: false });

fn slots() -> MutexGuard<'static, Slots> {
    SLOTS_OF_OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Among what is offered: it is. (No team to come has that slot.)
const OFFERED: u64 = 1;

/// A slot that all of these have free, and have no longer; 0: there is none. WHY by turns: threads of one PE may make teams of several at a time, others in
/// another order. What one has to choose from is nobody else's meanwhile, and where they want it at once the lowest of their slots, which all PEs know by
/// the same number, is first. (All are here before any of it is offered: who waits with it waits for nothing else.)
fn take_slot(members: &Group<'_>, parent: usize) -> usize {
    members.sync();
    loop {
        let mut ours = slots();
        ours.splitting |= 1 << parent;
        let is_turn = !ours.is_offered && ours.splitting.trailing_zeros() as usize == parent;
        ours.is_offered |= is_turn;
        let offer = if is_turn { ours.free | OFFERED } else { 0 };
        drop(ours);
        let all =
            |seen: &dyn Fn(usize) -> u64| (0..members.size).fold(!0, |all, at| all & seen(at));
        let common = members.exchange(offer, all);
        let slot = common.checked_ilog2().unwrap_or(0) as usize;
        let mut ours = slots();
        ours.free &= !(1 << slot);
        ours.is_offered &= !is_turn;
        if common & OFFERED != 0 {
            ours.splitting &= !(1 << parent);
            return slot;
        }
    }
}

fn give_slot(slot: usize) {
    slots().free |= (1 << slot) & !PREDEFINED;
}

/// A new team of some members of `parent`, all of which call this. `None`: this one is no member of it.
fn split(
    job: &Job,
    parent: Handle,
    part: (usize, isize, usize),
    config: Config,
) -> Result<Option<Box<Team>>, ()> {
    let of_parent = group(job, parent, 0).ok_or(())?;
    let (start, stride, size) = part;
    let mut team = Team { start, stride, size, slot: 0, config };
    // (They meet by the parent's other words: no two new ones have a member in common.)
    let slot = match parent {
        WORLD => 0,
        SHARED => SLOT_SHARED,
        // SAFETY: as `group`.
        parent => unsafe { &*parent }.slot,
    };
    let members = Group::of_slot(job, start, stride, size, slot, 1);
    let is_member = members.rank(job.me).is_some();
    if is_member {
        team.slot = take_slot(&members, slot);
    }
    let has_failed = is_member && team.slot == 0;
    if of_parent
        .exchange(has_failed.into(), |failed| (0..of_parent.size).any(|rank| failed(rank) != 0))
    {
        give_slot(team.slot);
        return Err(());
    }
    Ok(is_member.then(|| Box::new(team)))
}

fn config(given: *const Config, mask: c_long) -> Config {
    if mask & NUM_CONTEXTS == 0 || given.is_null() {
        return Config::default();
    }
    // SAFETY: as the program says.
    unsafe { given.read() }
}

fn put<T>(to: *mut T, value: T) {
    // SAFETY: to be written, as the program says.
    unsafe { to.write(value) };
}

fn handle(made: Option<Box<Team>>) -> Handle {
    made.map_or(INVALID, Box::into_raw)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_split_strided(
    parent: Handle,
    start: c_int,
    stride: c_int,
    size: c_int,
    given: *const Config,
    mask: c_long,
    new: *mut Handle,
) -> c_int {
    let job = job();
    put(new, INVALID);
    let part = group(job, parent, 0).and_then(|group| group.part(start, stride, size));
    match part.map(|part| split(job, parent, part, config(given, mask))) {
        Some(Ok(made)) => {
            put(new, handle(made));
            0
        }
        _ => 1,
    }
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_split_2d(
    parent: Handle,
    xrange: c_int,
    x_given: *const Config,
    x_mask: c_long,
    x_new: *mut Handle,
    y_given: *const Config,
    y_mask: c_long,
    y_new: *mut Handle,
) -> c_int {
    let job = job();
    put(x_new, INVALID);
    put(y_new, INVALID);
    let Some(of) = group(job, parent, 0).filter(|_| xrange > 0) else { return 1 };
    let size = of.size as c_int;
    let xrange = xrange.min(size);
    let me = of.rank(job.me).unwrap_or(0) as c_int;
    let (x, y) = (me % xrange, me / xrange);
    let row = of.part(y * xrange, 1, xrange.min(size - y * xrange));
    let column = of.part(x, xrange, (size - x + xrange - 1) / xrange);
    let (Some(row), Some(column)) = (row, column) else { return 1 };
    let Ok(row) = split(job, parent, row, config(x_given, x_mask)) else { return 1 };
    match split(job, parent, column, config(y_given, y_mask)) {
        Ok(column) => {
            put(x_new, handle(row));
            put(y_new, handle(column));
            0
        }
        Err(()) => {
            destroy(handle(row));
            1
        }
    }
}

fn destroy(team: Handle) {
    if !matches!(team, INVALID | WORLD | SHARED) {
        // SAFETY: made by `handle`, and destroyed once: so the program says.
        let team = unsafe { Box::from_raw(team) };
        team.group(job(), 0).sync();
        give_slot(team.slot);
    }
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_destroy(team: Handle) {
    destroy(team);
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_my_pe(team: Handle) -> c_int {
    let job = job();
    group(job, team, 0).and_then(|group| group.rank(job.me)).map_or(-1, |rank| rank as c_int)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_n_pes(team: Handle) -> c_int {
    group(job(), team, 0).map_or(-1, |group| group.size as c_int)
}

/// A member's PE.
fn pe(job: &Job, team: Handle, member: c_int) -> Option<usize> {
    let group = group(job, team, 0)?;
    usize::try_from(member)
        .ok()
        .filter(|member| *member < group.size)
        .map(|member| group.pe(member))
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_translate_pe(from: Handle, member: c_int, to: Handle) -> c_int {
    let job = job();
    let rank = pe(job, from, member).and_then(|pe| group(job, to, 0)?.rank(pe));
    rank.map_or(-1, |rank| rank as c_int)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_get_config(team: Handle, mask: c_long, to: *mut Config) -> c_int {
    if team == INVALID {
        return 1;
    }
    if mask & NUM_CONTEXTS != 0 && !to.is_null() {
        let config = match team {
            WORLD | SHARED => Config::default(),
            // SAFETY: as `group`.
            team => unsafe { &*team }.config,
        };
        put(to, config);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_ptr(team: Handle, address: *const u8, member: c_int) -> *mut u8 {
    let job = job();
    pe(job, team, member).map_or(std::ptr::null_mut(), |pe| job.pointer(address, pe))
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_sync(team: Handle) -> c_int {
    let Some(group) = group(job(), team, 0) else { return -1 };
    group.sync();
    0
}

/// What `shmem_ctx_t` points to.
pub struct Context {
    team: Handle,
}

pub type Ctx = *const Context;
const CTX_INVALID: Ctx = std::ptr::null();
pub const CTX_DEFAULT: Ctx = std::ptr::without_provenance(1);

/// The PE that a number means by this context.
#[inline]
pub fn pe_of(job: &Job, ctx: Ctx, number: c_int) -> usize {
    if ctx == CTX_DEFAULT { number as usize } else { pe_of_other(job, ctx, number) }
}

fn pe_of_other(job: &Job, ctx: Ctx, number: c_int) -> usize {
    if ctx == CTX_INVALID {
        give_up("a context that is invalid is used");
    }
    // SAFETY: made by `shmem_team_create_ctx`, and not destroyed: so the program says.
    let team = unsafe { &*ctx }.team;
    pe(job, team, number)
        .unwrap_or_else(|| give_up(format_args!("there is no PE {number} in the context's team")))
}

#[unsafe(no_mangle)]
extern "C" fn shmem_team_create_ctx(team: Handle, _options: c_long, ctx: *mut Ctx) -> c_int {
    put(ctx, CTX_INVALID);
    if team == INVALID {
        return 1;
    }
    put(ctx, Box::into_raw(Box::new(Context { team })).cast_const());
    0
}

#[unsafe(no_mangle)]
extern "C" fn shmem_ctx_create(options: c_long, ctx: *mut Ctx) -> c_int {
    shmem_team_create_ctx(WORLD, options, ctx)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_ctx_destroy(ctx: Ctx) {
    job().quiet();
    if ctx != CTX_INVALID && ctx != CTX_DEFAULT {
        // SAFETY: made by `shmem_team_create_ctx`, and destroyed once: so the program says.
        drop(unsafe { Box::from_raw(ctx.cast_mut()) });
    }
}

#[unsafe(no_mangle)]
extern "C" fn shmem_ctx_get_team(ctx: Ctx, team: *mut Handle) -> c_int {
    match ctx {
        CTX_INVALID => put(team, INVALID),
        CTX_DEFAULT => put(team, WORLD),
        // SAFETY: as `pe_of_other`.
        ctx => put(team, unsafe { &*ctx }.team),
    }
    c_int::from(ctx == CTX_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_ctx_quiet(_ctx: Ctx) {
    job().quiet();
}

#[unsafe(no_mangle)]
extern "C" fn shmem_ctx_fence(_ctx: Ctx) {
    job().quiet();
}
