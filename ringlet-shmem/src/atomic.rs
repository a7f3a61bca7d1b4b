//! Atomic memory operations: the processor's, on the other PE's memory.

use std::ffi::c_int;

use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};

use crate::job::{give_up, job};
use crate::team::{CTX_DEFAULT, Ctx, pe_of};
use crate::types::{atomic_types, bitwise_types};

/// Bits that the processor has atomic operations for, as which all types are treated.
pub trait Bits: Copy {
    fn load(at: *mut Self) -> Self;
    fn store(at: *mut Self, value: Self);
    fn swap(at: *mut Self, value: Self) -> Self;
    fn compare_swap(at: *mut Self, old: Self, new: Self) -> Self;
    fn add(at: *mut Self, value: Self) -> Self;
    fn and(at: *mut Self, value: Self) -> Self;
    fn or(at: *mut Self, value: Self) -> Self;
    fn xor(at: *mut Self, value: Self) -> Self;
}

macro_rules! bits {
    ($bits:ty, $atomic:ty) => {
        impl Bits for $bits {
            #[inline]
            fn load(at: *mut $bits) -> $bits {
                cell::<$atomic, $bits>(at).load(ORDER)
            }
            #[inline]
            fn store(at: *mut $bits, value: $bits) {
                // (A store of this ordering is an exchange.)
                cell::<$atomic, $bits>(at).store(value, ORDER);
            }
            #[inline]
            fn swap(at: *mut $bits, value: $bits) -> $bits {
                cell::<$atomic, $bits>(at).swap(value, ORDER)
            }
            #[inline]
            fn compare_swap(at: *mut $bits, old: $bits, new: $bits) -> $bits {
                let swapped = cell::<$atomic, $bits>(at).compare_exchange(old, new, ORDER, ORDER);
                swapped.unwrap_or_else(|seen| seen)
            }
            #[inline]
            fn add(at: *mut $bits, value: $bits) -> $bits {
                cell::<$atomic, $bits>(at).fetch_add(value, ORDER)
            }
            #[inline]
            fn and(at: *mut $bits, value: $bits) -> $bits {
                cell::<$atomic, $bits>(at).fetch_and(value, ORDER)
            }
            #[inline]
            fn or(at: *mut $bits, value: $bits) -> $bits {
                cell::<$atomic, $bits>(at).fetch_or(value, ORDER)
            }
            #[inline]
            fn xor(at: *mut $bits, value: $bits) -> $bits {
                cell::<$atomic, $bits>(at).fetch_xor(value, ORDER)
            }
        }
    };
}

// ORDER: SeqCst, pairs with itself in `bits`: the standard promises less; programs that need more by accident are not to find out here.
const ORDER: Ordering = Ordering::SeqCst;

bits!(u32, AtomicU32);
bits!(u64, AtomicU64);

fn cell<'a, A, B>(at: *mut B) -> &'a A {
    if !at.cast::<A>().is_aligned() {
        give_up(format_args!("an atomic operation at {at:?}, which is not aligned"));
    }
    // SAFETY: of a PE's memory (`Job::remote`), aligned, which stays mapped; of the same size.
    unsafe { &*at.cast() }
}

/// A type of C's, of the same size as its bits.
pub trait Value: Copy {
    type Bits: Bits;
    fn bits(self) -> Self::Bits;
    fn of(bits: Self::Bits) -> Self;
}

macro_rules! values {
    ($($type:ty, $bits:ty, $to:expr, $from:expr;)*) => {
        $(impl Value for $type {
            type Bits = $bits;
            #[inline]
            fn bits(self) -> $bits {
                $to(self)
            }
            #[inline]
            fn of(bits: $bits) -> $type {
                $from(bits)
            }
        })*
    };
}

values! {
    i32, u32, |value| value as u32, |bits| bits as i32;
    u32, u32, |value| value, |bits| bits;
    i64, u64, |value| value as u64, |bits| bits as i64;
    u64, u64, |value| value, |bits| bits;
    isize, u64, |value| value as u64, |bits| bits as isize;
    usize, u64, |value| value as u64, |bits| bits as usize;
    f32, u32, f32::to_bits, f32::from_bits;
    f64, u64, f64::to_bits, f64::from_bits;
}

/// Does it to the other PE's, which is told if it may have changed.
#[inline]
fn act<T: Value>(
    ctx: Ctx,
    at: *const T,
    pe: c_int,
    act: impl FnOnce(*mut T::Bits) -> T::Bits,
) -> T {
    let job = job();
    let pe = pe_of(job, ctx, pe);
    let there = job.remote(at.cast(), size_of::<T>(), pe);
    let before = act(there.cast());
    job.ring(pe, there, size_of::<T>());
    T::of(before)
}

fn put<T>(to: *mut T, value: T) {
    // SAFETY: the program's own.
    unsafe { to.write(value) };
}

/// An operation that returns what was there: `arguments` are its own, and `|at|` what it does.
macro_rules! fetching {
    ($op:literal, $name:literal, $type:ty, ($($argument:ident: $of:ty),*), |$at:ident| $do:expr) => {
        fetching!(@ ["" $name], $op, $type, (), CTX_DEFAULT, ($($argument: $of),*), |$at| $do);
        fetching!(@ ["ctx_" $name], $op, $type, (ctx), ctx, ($($argument: $of),*), |$at| $do);
    };
    (@ [$($name:literal)*], $op:literal, $type:ty, ($($ctx:ident)?), $by:expr, ($($argument:ident: $of:ty),*), |$at:ident| $do:expr) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $($name,)* "_atomic_", $op))]
            extern "C" fn now($($ctx: Ctx,)? target: *const $type, $($argument: $of,)* pe: c_int) -> $type {
                act($by, target, pe, |$at| $do)
            }
            #[unsafe(export_name = concat!("shmem_", $($name,)* "_atomic_", $op, "_nbi"))]
            extern "C" fn later($($ctx: Ctx,)? fetch: *mut $type, target: *const $type, $($argument: $of,)* pe: c_int) {
                put(fetch, act($by, target, pe, |$at| $do));
            }
        };
    };
}

/// One that returns nothing.
macro_rules! silent {
    ($op:literal, $name:literal, $type:ty, ($($argument:ident: $of:ty),*), |$at:ident| $do:expr) => {
        silent!(@ ["" $name], $op, $type, (), CTX_DEFAULT, ($($argument: $of),*), |$at| $do);
        silent!(@ ["ctx_" $name], $op, $type, (ctx), ctx, ($($argument: $of),*), |$at| $do);
    };
    (@ [$($name:literal)*], $op:literal, $type:ty, ($($ctx:ident)?), $by:expr, ($($argument:ident: $of:ty),*), |$at:ident| $do:expr) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $($name,)* "_atomic_", $op))]
            extern "C" fn now($($ctx: Ctx,)? target: *mut $type, $($argument: $of,)* pe: c_int) {
                let _: $type = act($by, target, pe, |$at| $do);
            }
        };
    };
}

macro_rules! extended {
    ($name:literal, $type:ty) => {
        fetching!("fetch", $name, $type, (), |at| Bits::load(at));
        fetching!("swap", $name, $type, (value: $type), |at| Bits::swap(at, value.bits()));
        silent!("set", $name, $type, (value: $type), |at| {
            Bits::store(at, value.bits());
            value.bits()
        });
    };
}

macro_rules! standard {
    ($name:literal, $type:ty) => {
        extended!($name, $type);
        fetching!("compare_swap", $name, $type, (old: $type, new: $type), |at| Bits::compare_swap(at, old.bits(), new.bits()));
        fetching!("fetch_add", $name, $type, (value: $type), |at| Bits::add(at, value.bits()));
        fetching!("fetch_inc", $name, $type, (), |at| Bits::add(at, 1));
        silent!("add", $name, $type, (value: $type), |at| Bits::add(at, value.bits()));
        silent!("inc", $name, $type, (), |at| Bits::add(at, 1));
    };
}

macro_rules! bitwise {
    ($name:literal, $type:ty) => {
        fetching!("fetch_and", $name, $type, (value: $type), |at| Bits::and(at, value.bits()));
        fetching!("fetch_or", $name, $type, (value: $type), |at| Bits::or(at, value.bits()));
        fetching!("fetch_xor", $name, $type, (value: $type), |at| Bits::xor(at, value.bits()));
        silent!("and", $name, $type, (value: $type), |at| Bits::and(at, value.bits()));
        silent!("or", $name, $type, (value: $type), |at| Bits::or(at, value.bits()));
        silent!("xor", $name, $type, (value: $type), |at| Bits::xor(at, value.bits()));
    };
}

atomic_types!(standard);
extended!("float", f32);
extended!("double", f64);
bitwise_types!(bitwise);
