//! How a call comes from libc's function to the agent, and goes on to libc: results and errno, cancellation, and libc's own calls by number.

use crate::errno::told;
use crate::{cancellation, next};
use libc::{c_int, c_void};
use ringlet_agent::Edge;
use ringlet_linux::sys::{self, Sys};

/// A call of one of libc's functions: how it is passed on.
pub struct Call<F>(pub F);

impl<F: Fn() -> isize> Edge for Call<F> {
    #[inline(always)]
    fn pass_on(&self) -> Sys<usize> {
        told((self.0)())
    }

    unsafe fn call(number: i64, args: [usize; 6]) -> Sys<usize> {
        let [a, b, c, d, ..] = args;
        told(match number {
            libc::SYS_recvmsg => {
                next!(c"recvmsg", fn(c_int, usize, c_int) -> isize, a as c_int, b, c as c_int)
            }
            libc::SYS_recvfrom => {
                let [.., name, len] = args;
                next!(
                    c"recvfrom",
                    fn(c_int, usize, usize, c_int, usize, usize) -> isize,
                    a as c_int,
                    b,
                    c,
                    d as c_int,
                    name,
                    len
                )
            }
            libc::SYS_sendmsg => {
                next!(c"sendmsg", fn(c_int, usize, c_int) -> isize, a as c_int, b, c as c_int)
            }
            libc::SYS_sendmmsg => next!(
                c"sendmmsg",
                fn(c_int, usize, u32, c_int) -> c_int,
                a as c_int,
                b,
                c as u32,
                d as c_int
            ) as isize,
            libc::SYS_pread64 => next!(
                c"pread",
                fn(c_int, *mut c_void, usize, i64) -> isize,
                a as c_int,
                b as *mut c_void,
                c,
                d as i64
            ),
            libc::SYS_close_range => {
                next!(c"close_range", fn(u32, u32, c_int) -> c_int, a as u32, b as u32, c as c_int)
                    as isize
            }
            // SAFETY: by contract.
            _ => return unsafe { sys::call(number, args) },
        })
    }

    #[inline(always)]
    fn in_which<T>(cancelled: &dyn Fn(), call: impl FnOnce() -> T) -> T {
        cancellation::in_which(cancelled, call)
    }
}

/// Functions of libc that the agent serves: each is passed on by its own name.
#[macro_export]
macro_rules! served {
    ($($(#[$note:meta])* $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty => $agent:path, [$($given:expr),* $(,)?];)*) => {$(
        $(#[$note])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            const NAME: &core::ffi::CStr = $crate::edge::c_name(concat!(stringify!($name), "\0"));
            let call = $crate::edge::Call(
                || $crate::next!(NAME, fn($($type),*) -> $result, $($arg),*) as isize,
            );
            // SAFETY: the program's own arguments.
            #[allow(unused_unsafe, clippy::macro_metavars_in_unsafe)]
            let done = unsafe { $agent(&call, $($given),*) };
            $crate::errno::result(done) as $result
        }
    )*};
}

pub const fn c_name(name: &str) -> &core::ffi::CStr {
    match core::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name ends with the only zero"),
    }
}

/// The same function under another name.
#[macro_export]
macro_rules! also {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty => $function:path, [$($given:expr),* $(,)?];)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the contract of the function that this is another name of.
            #[allow(clippy::macro_metavars_in_unsafe)]
            unsafe { $function($($given),*) }
        }
    )*};
}
