//! Remote memory access. All PEs' memory is mapped, so a put or a get is a copy, and each is complete when it returns.

use std::ffi::c_int;

use crate::group::copy;
use crate::job::{give_up, job};
use crate::point::signal;
use crate::team::{CTX_DEFAULT, Ctx, pe_of};
use crate::types::{rma_types, scalar_types};

#[inline]
pub fn put(ctx: Ctx, dest: *mut u8, source: *const u8, bytes: usize, pe: c_int) {
    let job = job();
    let pe = pe_of(job, ctx, pe);
    let there = job.remote(dest, bytes, pe);
    copy(source, there, bytes);
    job.ring(pe, there, bytes);
}

#[inline]
fn get(ctx: Ctx, dest: *mut u8, source: *const u8, bytes: usize, pe: c_int) {
    let job = job();
    copy(job.remote(source, bytes, pe_of(job, ctx, pe)), dest, bytes);
}

/// The bytes from the first to the last of `count` elements.
fn span<T>(count: usize, apart: isize) -> usize {
    let apart = usize::try_from(apart)
        .unwrap_or_else(|_| give_up(format_args!("a stride of {apart} leads backwards")));
    (count - 1).saturating_mul(apart).saturating_add(1).saturating_mul(size_of::<T>())
}

fn put_strided<T: Copy>(
    ctx: Ctx,
    dest: *mut T,
    source: *const T,
    apart: (isize, isize),
    count: usize,
    pe: c_int,
) {
    let job = job();
    let pe = pe_of(job, ctx, pe);
    if count > 0 {
        let bytes = span::<T>(count, apart.0);
        let to = job.remote(dest.cast(), bytes, pe).cast::<T>();
        each(to, source, apart, count);
        job.ring(pe, to, bytes);
    }
}

fn get_strided<T: Copy>(
    ctx: Ctx,
    dest: *mut T,
    source: *const T,
    apart: (isize, isize),
    count: usize,
    pe: c_int,
) {
    let job = job();
    if count > 0 {
        let bytes = span::<T>(count, apart.1);
        let from = job.remote(source.cast(), bytes, pe_of(job, ctx, pe)).cast::<T>();
        each(dest, from, apart, count);
    }
}

fn each<T: Copy>(to: *mut T, from: *const T, apart: (isize, isize), count: usize) {
    for number in 0..count as isize {
        // SAFETY: the program vouches for its own elements, `Job::remote` for those between the first and the last of another PE's.
        unsafe { to.offset(number * apart.0).write_volatile(from.offset(number * apart.1).read()) };
    }
}

/// One element, which comes whole.
#[inline]
fn put_one<T: Copy>(ctx: Ctx, dest: *mut T, value: T, pe: c_int) {
    let job = job();
    let pe = pe_of(job, ctx, pe);
    let to = job.remote(dest.cast(), size_of::<T>(), pe).cast::<T>();
    // SAFETY: `Job::remote`'s, aligned as the program's own is.
    unsafe { to.write_volatile(value) };
    job.ring(pe, to, size_of::<T>());
}

#[inline]
fn get_one<T: Copy>(ctx: Ctx, source: *const T, pe: c_int) -> T {
    let job = job();
    let from = job.remote(source.cast(), size_of::<T>(), pe_of(job, ctx, pe)).cast::<T>();
    // SAFETY: `Job::remote`'s, aligned as the program's own is.
    unsafe { from.read_volatile() }
}

/// The functions of a type, or of a size: what is before `put` in their names, and behind it.
macro_rules! blocks {
    ([$($before:literal)*], [$($behind:literal)*], $type:ty, ($($ctx:ident)?), $by:expr) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $($before,)* "put", $($behind,)*))]
            extern "C" fn put_block($($ctx: Ctx,)? dest: *mut $type, source: *const $type, count: usize, pe: c_int) {
                put($by, dest.cast(), source.cast(), count.saturating_mul(size_of::<$type>()), pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "get", $($behind,)*))]
            extern "C" fn get_block($($ctx: Ctx,)? dest: *mut $type, source: *const $type, count: usize, pe: c_int) {
                get($by, dest.cast(), source.cast(), count.saturating_mul(size_of::<$type>()), pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "put", $($behind,)* "_nbi"))]
            extern "C" fn put_later($($ctx: Ctx,)? dest: *mut $type, source: *const $type, count: usize, pe: c_int) {
                put($by, dest.cast(), source.cast(), count.saturating_mul(size_of::<$type>()), pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "get", $($behind,)* "_nbi"))]
            extern "C" fn get_later($($ctx: Ctx,)? dest: *mut $type, source: *const $type, count: usize, pe: c_int) {
                get($by, dest.cast(), source.cast(), count.saturating_mul(size_of::<$type>()), pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "put", $($behind,)* "_signal"))]
            extern "C" fn put_signal(
                $($ctx: Ctx,)? dest: *mut $type, source: *const $type, count: usize, at: *mut u64, value: u64, op: c_int, pe: c_int,
            ) {
                put($by, dest.cast(), source.cast(), count.saturating_mul(size_of::<$type>()), pe);
                signal($by, at, value, op, pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "put", $($behind,)* "_signal_nbi"))]
            extern "C" fn put_signal_later(
                $($ctx: Ctx,)? dest: *mut $type, source: *const $type, count: usize, at: *mut u64, value: u64, op: c_int, pe: c_int,
            ) {
                put($by, dest.cast(), source.cast(), count.saturating_mul(size_of::<$type>()), pe);
                signal($by, at, value, op, pe);
            }
        };
    };
}

macro_rules! strides {
    ([$($before:literal)*], [$($behind:literal)*], $type:ty, ($($ctx:ident)?), $by:expr) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $($before,)* "iput", $($behind,)*))]
            extern "C" fn iput(
                $($ctx: Ctx,)? dest: *mut $type, source: *const $type, to: isize, from: isize, count: usize, pe: c_int,
            ) {
                put_strided($by, dest, source, (to, from), count, pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "iget", $($behind,)*))]
            extern "C" fn iget(
                $($ctx: Ctx,)? dest: *mut $type, source: *const $type, to: isize, from: isize, count: usize, pe: c_int,
            ) {
                get_strided($by, dest, source, (to, from), count, pe);
            }
        };
    };
}

macro_rules! of_a_type {
    ($name:literal, $type:ty) => {
        blocks!([$name "_"], [], $type, (), CTX_DEFAULT);
        blocks!(["ctx_" $name "_"], [], $type, (ctx), ctx);
        strides!([$name "_"], [], $type, (), CTX_DEFAULT);
        strides!(["ctx_" $name "_"], [], $type, (ctx), ctx);
    };
}

macro_rules! of_a_size {
    ($bits:literal, $type:ty) => {
        blocks!([], [$bits], $type, (), CTX_DEFAULT);
        blocks!(["ctx_"], [$bits], $type, (ctx), ctx);
        strides!([], [$bits], $type, (), CTX_DEFAULT);
        strides!(["ctx_"], [$bits], $type, (ctx), ctx);
    };
}

macro_rules! ones {
    ([$($before:literal)*], $type:ty, ($($ctx:ident)?), $by:expr) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $($before,)* "_p"))]
            extern "C" fn p($($ctx: Ctx,)? dest: *mut $type, value: $type, pe: c_int) {
                put_one($by, dest, value, pe);
            }
            #[unsafe(export_name = concat!("shmem_", $($before,)* "_g"))]
            extern "C" fn g($($ctx: Ctx,)? source: *const $type, pe: c_int) -> $type {
                get_one($by, source, pe)
            }
        };
    };
}

macro_rules! one {
    ($name:literal, $type:ty) => {
        ones!([$name], $type, (), CTX_DEFAULT);
        ones!(["ctx_" $name], $type, (ctx), ctx);
    };
}

rma_types!(of_a_type);
scalar_types!(one);
of_a_size!("8", u8);
of_a_size!("16", u16);
of_a_size!("32", u32);
of_a_size!("64", u64);
of_a_size!("128", [u64; 2]);
blocks!([], ["mem"], u8, (), CTX_DEFAULT);
blocks!(["ctx_"], ["mem"], u8, (ctx), ctx);
