//! liburing's functions that make a ring, and those that hand something to the kernel: it makes its system calls by itself.
//!
//! Its types are pointers and numbers here, but for what `ringlet_agent::uring` looks at.

use crate::edge::c_name;
use crate::next;
use core::ffi::{c_int, c_uint, c_void};
use ringlet::socket::{process, rings};
use ringlet_agent::uring::{self, Parameters, Ring};

/// Functions that do something before they go on to liburing's of the same name; or around that (`|make|`).
macro_rules! in_front_of {
    ($($name:ident($($arg:ident: $type:ty),*) $before:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                // SAFETY: the program's ring and lists, by the contract of liburing's function.
                #[allow(unused_unsafe)]
                unsafe {
                    $before
                };
                next!(c_name(concat!(stringify!($name), "\0")), fn($($type),*) -> c_int, $($arg),*)
            }
        )*
    };
}

macro_rules! making {
    ($($name:ident($($arg:ident: $type:ty),*) |$make:ident| $around:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                let $make =
                    || next!(c_name(concat!(stringify!($name), "\0")), fn($($type),*) -> c_int, $($arg),*);
                // SAFETY: the program's ring and parameters, by the contract of liburing's function.
                unsafe { $around }
            }
        )*
    };
}

type List = *const c_int;
type Any = *mut c_void;

making! {
    io_uring_queue_init(entries: c_uint, ring: *const Ring, flags: c_uint)
        |make| uring::made(ring, flags, make);
    io_uring_queue_init_params(entries: c_uint, ring: *const Ring, parameters: *const Parameters)
        |make| uring::made_with(ring, parameters, make);
    io_uring_queue_init_try_nosqarr(entries: c_uint, ring: *const Ring, parameters: *const Parameters)
        |make| uring::made_with(ring, parameters, make);
    io_uring_queue_init_mem(
        entries: c_uint, ring: *const Ring, parameters: *const Parameters, memory: Any, bytes: usize
    )
        |make| uring::made_with(ring, parameters, make);
}

in_front_of! {
    io_uring_setup(entries: c_uint, parameters: Any) process::uses_io_uring();
    io_uring_queue_exit(ring: *const Ring) uring::ends(ring);

    io_uring_submit(ring: *const Ring) uring::hands_over(ring);
    io_uring_submit_and_wait(ring: *const Ring, count: c_uint) uring::hands_over(ring);
    io_uring_submit_and_wait_timeout(ring: *const Ring, done: Any, count: c_uint, time: Any, mask: Any)
        uring::hands_over(ring);
    io_uring_submit_and_wait_min_timeout(
        ring: *const Ring, done: Any, count: c_uint, time: Any, least: c_uint, mask: Any
    )
        uring::hands_over(ring);
    io_uring_submit_and_wait_reg(ring: *const Ring, done: Any, count: c_uint, place: c_int)
        uring::hands_over(ring);
    io_uring_submit_and_get_events(ring: *const Ring) uring::hands_over(ring);
    io_uring_wait_cqes(ring: *const Ring, done: Any, count: c_uint, time: Any, mask: Any)
        uring::hands_over(ring);
    io_uring_wait_cqes_min_timeout(
        ring: *const Ring, done: Any, count: c_uint, time: Any, least: c_uint, mask: Any
    )
        uring::hands_over(ring);
    io_uring_wait_cqe_timeout(ring: *const Ring, done: Any, time: Any) uring::hands_over(ring);
    io_uring_enter(fd: c_uint, count: c_uint, least: c_uint, flags: c_uint, mask: Any)
        uring::enters(count);
    io_uring_enter2(fd: c_uint, count: c_uint, least: c_uint, flags: c_uint, mask: Any, bytes: usize)
        uring::enters(count);

    io_uring_register(fd: c_uint, what: c_uint, argument: Any, count: c_uint)
        uring::registers_by_call(what);
    io_uring_register_files(ring: *const Ring, files: List, count: c_uint)
        uring::registers(files, count);
    io_uring_register_files_tags(ring: *const Ring, files: List, tags: Any, count: c_uint)
        uring::registers(files, count);
    io_uring_register_files_update(ring: *const Ring, from: c_uint, files: List, count: c_uint)
        uring::registers(files, count);
    io_uring_register_files_update_tag(
        ring: *const Ring, from: c_uint, files: List, tags: Any, count: c_uint
    )
        uring::registers(files, count);
}

// A ring of the program's own system calls is mapped by libc's function, perhaps.
macro_rules! mapping {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            place: Any,
            bytes: usize,
            rights: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> Any {
            rings::mapped(fd, offset);
            next!(
                c_name(concat!(stringify!($name), "\0")),
                fn(Any, usize, c_int, c_int, c_int, i64) -> Any,
                place,
                bytes,
                rights,
                flags,
                fd,
                offset
            )
        }
    )*};
}

mapping! { mmap mmap64 }
