//! Collectives of teams, and of active sets in the older interface.

use std::ffi::{c_int, c_long};
use std::ops::{Add, Mul};

use crate::group::{Combine, Group};
use crate::job::{Job, give_up, job, world};
use crate::team::{Handle, group};
use crate::types::{LongDouble, active_set_types, bitwise_reduce_types, integer_types, rma_types};

/// Does something with a team; what the call returns.
fn of_team(team: Handle, act: impl FnOnce(Group<'_>)) -> c_int {
    let Some(group) = group(job(), team, 0) else { return -1 };
    act(group);
    0
}

fn of_set<'a>(
    job: &'a Job,
    start: c_int,
    stride: isize,
    size: c_int,
    sync: *mut c_long,
) -> Group<'a> {
    let set = Group::of_active_set(job, start, stride, size, sync);
    set.unwrap_or_else(|| {
        give_up(format_args!(
            "an active set of {size} from PE {start}, {stride} apart, with pSync at {sync:?}, makes no sense here"
        ))
    })
}

/// The older calls give a logarithm.
fn of_log<'a>(job: &'a Job, start: c_int, log: c_int, size: c_int, sync: *mut c_long) -> Group<'a> {
    let stride = 1isize.checked_shl(log as u32).filter(|stride| *stride > 0).unwrap_or(0);
    of_set(job, start, stride, size, sync)
}

macro_rules! of_teams {
    ([$($before:literal)*], [$($behind:literal)*], $type:ty) => {
        const _: () = {
            const BYTES: usize = size_of::<$type>();
            #[unsafe(export_name = concat!("shmem_", $($before,)* "broadcast", $($behind,)*))]
            extern "C" fn broadcast(team: Handle, dest: *mut $type, source: *const $type, count: usize, root: c_int) -> c_int {
                of_team(team, |group| group.broadcast(dest.cast(), source.cast(), count.saturating_mul(BYTES), root as usize, true))
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "collect", $($behind,)*))]
            extern "C" fn collect(team: Handle, dest: *mut $type, source: *const $type, count: usize) -> c_int {
                of_team(team, |group| group.collect(dest.cast(), source.cast(), count.saturating_mul(BYTES)))
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "fcollect", $($behind,)*))]
            extern "C" fn fcollect(team: Handle, dest: *mut $type, source: *const $type, count: usize) -> c_int {
                of_team(team, |group| group.collect_alike(dest.cast(), source.cast(), count.saturating_mul(BYTES)))
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "alltoall", $($behind,)*))]
            extern "C" fn alltoall(team: Handle, dest: *mut $type, source: *const $type, count: usize) -> c_int {
                of_team(team, |group| group.all_to_all(dest.cast(), source.cast(), BYTES, count, (1, 1)))
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "alltoalls", $($behind,)*))]
            extern "C" fn alltoalls(
                team: Handle, dest: *mut $type, source: *const $type, to: isize, from: isize, count: usize,
            ) -> c_int {
                of_team(team, |group| {
                    group.all_to_all(dest.cast(), source.cast(), BYTES, count, (to as usize, from as usize))
                })
            }
        };
    };
}

macro_rules! of_teams_typed {
    ($name:literal, $type:ty) => {
        of_teams!([$name "_"], [], $type);
    };
}

rma_types!(of_teams_typed);
of_teams!([], ["mem"], u8);

macro_rules! of_sets {
    ($bits:literal, $bytes:literal) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_broadcast", $bits))]
            extern "C" fn broadcast(
                dest: *mut u8,
                source: *const u8,
                count: usize,
                root: c_int,
                start: c_int,
                log: c_int,
                size: c_int,
                sync: *mut c_long,
            ) {
                of_log(job(), start, log, size, sync).broadcast(
                    dest,
                    source,
                    count.saturating_mul($bytes),
                    root as usize,
                    false,
                );
            }
            #[unsafe(export_name = concat!("shmem_collect", $bits))]
            extern "C" fn collect(
                dest: *mut u8,
                source: *const u8,
                count: usize,
                start: c_int,
                log: c_int,
                size: c_int,
                sync: *mut c_long,
            ) {
                of_log(job(), start, log, size, sync).collect(
                    dest,
                    source,
                    count.saturating_mul($bytes),
                );
            }
            #[unsafe(export_name = concat!("shmem_fcollect", $bits))]
            extern "C" fn fcollect(
                dest: *mut u8,
                source: *const u8,
                count: usize,
                start: c_int,
                log: c_int,
                size: c_int,
                sync: *mut c_long,
            ) {
                of_log(job(), start, log, size, sync).collect_alike(
                    dest,
                    source,
                    count.saturating_mul($bytes),
                );
            }
            #[unsafe(export_name = concat!("shmem_alltoall", $bits))]
            extern "C" fn alltoall(
                dest: *mut u8,
                source: *const u8,
                count: usize,
                start: c_int,
                log: c_int,
                size: c_int,
                sync: *mut c_long,
            ) {
                of_log(job(), start, log, size, sync).all_to_all(
                    dest,
                    source,
                    $bytes,
                    count,
                    (1, 1),
                );
            }
            #[unsafe(export_name = concat!("shmem_alltoalls", $bits))]
            extern "C" fn alltoalls(
                dest: *mut u8,
                source: *const u8,
                to: isize,
                from: isize,
                count: usize,
                start: c_int,
                log: c_int,
                size: c_int,
                sync: *mut c_long,
            ) {
                of_log(job(), start, log, size, sync).all_to_all(
                    dest,
                    source,
                    $bytes,
                    count,
                    (to as usize, from as usize),
                );
            }
        };
    };
}

of_sets!("32", 4);
of_sets!("64", 8);

/// A complex number of C's.
#[repr(C)]
#[derive(Clone, Copy)]
struct Complex<T> {
    real: T,
    imaginary: T,
}

/// What is reduced. (Integers wrap around, as C's compilers have it.)
trait Reduced: Copy {
    fn sum(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
}

macro_rules! reduced_integer {
    ($($type:ty)*) => {
        $(impl Reduced for $type {
            fn sum(self, other: $type) -> $type {
                self.wrapping_add(other)
            }
            fn prod(self, other: $type) -> $type {
                self.wrapping_mul(other)
            }
        })*
    };
}

reduced_integer!(i8 i16 i32 i64 isize u8 u16 u32 u64 usize);

macro_rules! reduced_float {
    ($($type:ty)*) => {
        $(impl Reduced for $type {
            fn sum(self, other: $type) -> $type {
                self + other
            }
            fn prod(self, other: $type) -> $type {
                self * other
            }
        })*
    };
}

reduced_float!(f32 f64);

impl<T: Copy + Add<Output = T> + Mul<Output = T> + std::ops::Sub<Output = T>> Reduced
    for Complex<T>
{
    fn sum(self, other: Self) -> Self {
        Complex { real: self.real + other.real, imaginary: self.imaginary + other.imaginary }
    }

    fn prod(self, other: Self) -> Self {
        Complex {
            real: self.real * other.real - self.imaginary * other.imaginary,
            imaginary: self.real * other.imaginary + self.imaginary * other.real,
        }
    }
}

/// Each element of the second into that of the first.
#[inline]
fn fold<T: Copy>(into: *mut u8, from: *const u8, count: usize, combine: impl Fn(T, T) -> T) {
    let (into, from) = (into.cast::<T>(), from.cast::<T>());
    for number in 0..count {
        // SAFETY: so many elements of a block of `Group::reduce`, and of a PE's memory (`Job::remote`).
        unsafe {
            into.add(number).write(combine(into.add(number).read(), from.add(number).read()))
        };
    }
}

macro_rules! reduction {
    ($name:literal, $op:literal, $type:ty, $combine:expr) => {
        const _: () = {
            extern "C" fn each(into: *mut u8, from: *const u8, count: usize) {
                fold::<$type>(into, from, count, $combine);
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_", $op, "_reduce"))]
            extern "C" fn reduce(
                team: Handle,
                dest: *mut $type,
                source: *const $type,
                count: usize,
            ) -> c_int {
                of_team(team, |group| {
                    group.reduce(dest.cast(), source.cast(), size_of::<$type>(), count, each)
                })
            }
        };
    };
}

macro_rules! to_all {
    ($name:literal, $op:literal, $type:ty, $combine:expr) => {
        const _: () = {
            extern "C" fn each(into: *mut u8, from: *const u8, count: usize) {
                fold::<$type>(into, from, count, $combine);
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_", $op, "_to_all"))]
            extern "C" fn reduce(
                dest: *mut $type,
                source: *const $type,
                count: c_int,
                start: c_int,
                log: c_int,
                size: c_int,
                _work: *mut $type,
                sync: *mut c_long,
            ) {
                let set = of_log(job(), start, log, size, sync);
                set.reduce(
                    dest.cast(),
                    source.cast(),
                    size_of::<$type>(),
                    count.max(0) as usize,
                    each,
                );
            }
        };
    };
}

macro_rules! bitwise_by {
    ($by:ident, $name:literal, $type:ty) => {
        $by!($name, "and", $type, |a, b| a & b);
        $by!($name, "or", $type, |a, b| a | b);
        $by!($name, "xor", $type, |a, b| a ^ b);
    };
}

macro_rules! sums_by {
    ($by:ident, $name:literal, $type:ty) => {
        $by!($name, "sum", $type, |a, b| Reduced::sum(a, b));
        $by!($name, "prod", $type, |a, b| Reduced::prod(a, b));
    };
}

macro_rules! ordered_by {
    ($by:ident, $name:literal, $type:ty) => {
        $by!($name, "max", $type, |a, b| if b > a { b } else { a });
        $by!($name, "min", $type, |a, b| if b < a { b } else { a });
        sums_by!($by, $name, $type);
    };
}

macro_rules! reduce_bitwise {
    ($name:literal, $type:ty) => {
        bitwise_by!(reduction, $name, $type);
    };
}

macro_rules! reduce_ordered {
    ($name:literal, $type:ty) => {
        ordered_by!(reduction, $name, $type);
    };
}

macro_rules! set_reductions {
    ($name:literal, $type:ty) => {
        bitwise_by!(to_all, $name, $type);
        ordered_by!(to_all, $name, $type);
    };
}

bitwise_reduce_types!(reduce_bitwise);
integer_types!(reduce_ordered);
reduce_ordered!("float", f32);
reduce_ordered!("double", f64);
sums_by!(reduction, "complexf", Complex<f32>);
sums_by!(reduction, "complexd", Complex<f64>);
active_set_types!(set_reductions);
ordered_by!(to_all, "float", f32);
ordered_by!(to_all, "double", f64);
sums_by!(to_all, "complexf", Complex<f32>);
sums_by!(to_all, "complexd", Complex<f64>);

/// Of `long double`, which shmem.h combines.
#[unsafe(no_mangle)]
extern "C" fn ringlet_shmem_reduce(
    team: Handle,
    dest: *mut u8,
    source: *const u8,
    count: usize,
    each: Combine,
) -> c_int {
    of_team(team, |group| group.reduce(dest, source, size_of::<LongDouble>(), count, each))
}

#[unsafe(no_mangle)]
extern "C" fn ringlet_shmem_to_all(
    dest: *mut u8,
    source: *const u8,
    count: c_int,
    start: c_int,
    log: c_int,
    size: c_int,
    sync: *mut c_long,
    each: Combine,
) {
    let set = of_log(job(), start, log, size, sync);
    set.reduce(dest, source, size_of::<LongDouble>(), count.max(0) as usize, each);
}

#[unsafe(no_mangle)]
extern "C" fn shmem_barrier_all() {
    shmem_sync_all();
}

/// (What was put is complete anyway.)
#[unsafe(no_mangle)]
extern "C" fn shmem_sync_all() {
    world(job()).sync();
}

#[unsafe(no_mangle)]
extern "C" fn shmem_barrier(start: c_int, log: c_int, size: c_int, sync: *mut c_long) {
    let job = job();
    job.quiet();
    of_log(job, start, log, size, sync).sync();
}

/// `shmem_sync` of an active set.
#[unsafe(no_mangle)]
extern "C" fn shmem_sync(start: c_int, log: c_int, size: c_int, sync: *mut c_long) {
    of_log(job(), start, log, size, sync).sync();
}
