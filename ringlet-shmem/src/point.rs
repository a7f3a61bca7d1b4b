//! Waiting for values of this PE's that others change, and signals.

use std::ffi::c_int;

use ringlet_core::sync::{Ordering, fence};

use crate::atomic::Bits;
use crate::job::{Job, give_up, job};
use crate::team::{Ctx, pe_of};
use crate::types::wait_types;
use crate::wait;

const EQ: c_int = 0;
const NE: c_int = 1;
const GT: c_int = 2;
const LE: c_int = 3;
const LT: c_int = 4;
const GE: c_int = 5;

#[inline]
fn is_so<T: PartialOrd>(value: T, op: c_int, than: T) -> bool {
    match op {
        EQ => value == than,
        NE => value != than,
        GT => value > than,
        LE => value <= than,
        LT => value < than,
        GE => value >= than,
        other => give_up(format_args!("{other} is not a comparison")),
    }
}

/// Of an array of the program's.
fn element<T: Copy>(array: *const T, number: usize) -> T {
    // SAFETY: within it, as the program says; others write there, as a device would.
    unsafe { array.add(number).read_volatile() }
}

/// Variables that are waited for: those whose status is not set.
struct Set<T> {
    variables: *const T,
    count: usize,
    status: *const c_int,
    op: c_int,
    /// What each is compared with, or all.
    values: Result<*const T, T>,
}

impl<T: PartialOrd + Copy> Set<T> {
    fn is_so(&self, number: usize) -> bool {
        let than = match self.values {
            Ok(values) => element(values, number),
            Err(value) => value,
        };
        is_so(element(self.variables, number), self.op, than)
    }

    fn place(&self) -> (*const u8, usize) {
        (self.variables.cast(), self.count * size_of::<T>())
    }

    fn members(&self) -> impl Iterator<Item = usize> + use<'_, T> {
        let is_in = |number: &usize| self.status.is_null() || element(self.status, *number) == 0;
        (0..self.count).filter(is_in)
    }

    fn all(&self) -> bool {
        seen(self.members().all(|number| self.is_so(number)))
    }

    /// `usize::MAX`: none. (The one behind the last one that was found comes first: each is found in the end.)
    fn any(&self, from: &mut usize) -> usize {
        let later = self.members().filter(|number| *number >= *from);
        let earlier = self.members().filter(|number| *number < *from);
        let found = later.chain(earlier).find(|number| self.is_so(*number));
        if let Some(found) = found {
            *from = found + 1;
        }
        seen(found.is_some());
        found.unwrap_or(usize::MAX)
    }

    fn some(&self, indices: *mut usize) -> usize {
        let mut count = 0;
        for number in self.members().filter(|number| self.is_so(*number)) {
            // SAFETY: room for as many as there are variables, as the program says.
            unsafe { indices.add(count).write(number) };
            count += 1;
        }
        seen(count > 0);
        count
    }
}

/// What was stored before the value that was seen is seen too.
#[inline]
fn seen(is_so: bool) -> bool {
    if is_so {
        // ORDER: Acquire, pairs with the orderings of `Bits`, and `Job::quiet` behind a put.
        fence(Ordering::Acquire);
    }
    is_so
}

std::thread_local! {
    /// Where `any` begins.
    static FROM: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn wait_any<T: PartialOrd + Copy>(set: &Set<T>, waits: bool) -> usize {
    let mut from = FROM.get();
    let mut found = set.any(&mut from);
    if waits && found == usize::MAX && set.members().next().is_some() {
        wait::wait_for_program(job(), set.place(), || {
            found = set.any(&mut from);
            found != usize::MAX
        });
    }
    FROM.set(from);
    found
}

fn wait_some<T: PartialOrd + Copy>(set: &Set<T>, indices: *mut usize) -> usize {
    let mut count = 0;
    if set.members().next().is_some() {
        wait::wait_for_program(job(), set.place(), || {
            count = set.some(indices);
            count > 0
        });
    }
    count
}

macro_rules! waits {
    ($name:literal, $type:ty) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $name, "_wait_until"))]
            extern "C" fn wait_until(at: *const $type, op: c_int, value: $type) {
                wait::wait_for_program(job(), (at.cast(), size_of::<$type>()), || {
                    seen(is_so(element(at, 0), op, value))
                });
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_test"))]
            extern "C" fn test(at: *const $type, op: c_int, value: $type) -> c_int {
                seen(is_so(element(at, 0), op, value)).into()
            }
    waits!(@ $name, "", $type, value: $type, Err(value));
    waits!(@ $name, "_vector", $type, values: *const $type, Ok(values));
        };
    };
    (@ $name:literal, $behind:literal, $type:ty, $value:ident: $of:ty, $values:expr) => {
        const _: () = {
            #[unsafe(export_name = concat!("shmem_", $name, "_wait_until_all", $behind))]
            extern "C" fn wait_all(
                variables: *const $type,
                count: usize,
                status: *const c_int,
                op: c_int,
                $value: $of,
            ) {
                let set = Set { variables, count, status, op, values: $values };
                wait::wait_for_program(job(), set.place(), || set.all());
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_wait_until_any", $behind))]
            extern "C" fn any(
                variables: *const $type,
                count: usize,
                status: *const c_int,
                op: c_int,
                $value: $of,
            ) -> usize {
                wait_any(&Set { variables, count, status, op, values: $values }, true)
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_wait_until_some", $behind))]
            extern "C" fn some(
                variables: *const $type,
                count: usize,
                indices: *mut usize,
                status: *const c_int,
                op: c_int,
                $value: $of,
            ) -> usize {
                wait_some(&Set { variables, count, status, op, values: $values }, indices)
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_test_all", $behind))]
            extern "C" fn test_all(
                variables: *const $type,
                count: usize,
                status: *const c_int,
                op: c_int,
                $value: $of,
            ) -> c_int {
                Set { variables, count, status, op, values: $values }.all().into()
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_test_any", $behind))]
            extern "C" fn test_any(
                variables: *const $type,
                count: usize,
                status: *const c_int,
                op: c_int,
                $value: $of,
            ) -> usize {
                wait_any(&Set { variables, count, status, op, values: $values }, false)
            }
            #[unsafe(export_name = concat!("shmem_", $name, "_test_some", $behind))]
            extern "C" fn test_some(
                variables: *const $type,
                count: usize,
                indices: *mut usize,
                status: *const c_int,
                op: c_int,
                $value: $of,
            ) -> usize {
                Set { variables, count, status, op, values: $values }.some(indices)
            }
        };
    };
}

wait_types!(waits);

const SIGNAL_SET: c_int = 0;
const SIGNAL_ADD: c_int = 1;

/// Behind what was put before.
#[inline]
pub fn signal(ctx: Ctx, at: *mut u64, value: u64, op: c_int, pe: c_int) {
    let job = job();
    let pe = pe_of(job, ctx, pe);
    let at = job.remote(at.cast(), size_of::<u64>(), pe).cast::<u64>();
    // ORDER: `Bits` are SeqCst: who sees the signal sees what was put.
    match op {
        SIGNAL_SET => Bits::store(at, value),
        SIGNAL_ADD => {
            Bits::add(at, value);
        }
        other => give_up(format_args!("{other} is not an operation on signals")),
    }
    job.ring(pe, at, size_of::<u64>());
}

fn own(job: &Job, at: *const u64) -> *mut u64 {
    job.remote(at.cast(), size_of::<u64>(), job.me).cast()
}

#[unsafe(no_mangle)]
extern "C" fn shmem_signal_fetch(at: *const u64) -> u64 {
    Bits::load(own(job(), at))
}

/// The value that was seen.
#[unsafe(no_mangle)]
extern "C" fn shmem_signal_wait_until(at: *const u64, op: c_int, value: u64) -> u64 {
    let job = job();
    let at = own(job, at);
    let mut found = 0;
    wait::wait_for_program(job, (at.cast(), size_of::<u64>()), || {
        found = Bits::load(at);
        is_so(found, op, value)
    });
    found
}
