//! RLIMIT_AS, of which the kernel is told with room for what is ours (`ringlet::socket::address_space`). All other limits are passed on as they are.

use crate::next;
use libc::{c_int, pid_t, rlimit64};
use ringlet::socket::address_space::{self, Limits};
use ringlet::socket::process;
use ringlet_linux::sys;

type Which = libc::__rlimit_resource_t;

fn limits(of: &rlimit64) -> Limits {
    [of.rlim_cur, of.rlim_max]
}

fn limit([rlim_cur, rlim_max]: Limits) -> rlimit64 {
    rlimit64 { rlim_cur, rlim_max }
}

/// Sets those in `new`, if that is there, and tells in `old`, if that is, what they were.
fn change(
    which: Which,
    new: *const rlimit64,
    old: *mut rlimit64,
    pass_on: impl Fn(*const rlimit64) -> c_int,
) -> c_int {
    if which != libc::RLIMIT_AS || process::is_lent() {
        return pass_on(new);
    }
    // SAFETY: the program's struct, which libc's function reads as well, if there is one.
    let asked = unsafe { new.as_ref() }.map(limits);
    let given = asked.and_then(address_space::widened).map(limit);
    let done = pass_on(given.as_ref().map_or(new, |given| given));
    if done == 0 {
        // SAFETY: the program's struct, which was written to just now, if there is one.
        if let Some(old) = unsafe { old.as_mut() } {
            *old = limit(address_space::told(limits(old)));
        }
        if let Some(asked) = asked {
            address_space::were_given(asked, given.as_ref().map_or(asked, limits));
        }
    }
    done
}

macro_rules! of_this_process {
    ($($set:ident $set_name:literal, $get:ident $get_name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $set(which: Which, new: *const rlimit64) -> c_int {
            change(which, new, core::ptr::null_mut(), |new| {
                next!($set_name, fn(Which, *const rlimit64) -> c_int, which, new)
            })
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(which: Which, old: *mut rlimit64) -> c_int {
            change(which, core::ptr::null(), old, |_| {
                next!($get_name, fn(Which, *mut rlimit64) -> c_int, which, old)
            })
        }
    )*};
}

// (One struct has both names where a long has 64 bits.)
of_this_process! {
    setrlimit c"setrlimit", getrlimit c"getrlimit";
    setrlimit64 c"setrlimit64", getrlimit64 c"getrlimit64";
}

/// glibc's other name of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __getrlimit(which: Which, old: *mut rlimit64) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe { getrlimit(which, old) }
}

macro_rules! of_any_process {
    ($($function:ident $name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $function(
            pid: pid_t,
            which: Which,
            new: *const rlimit64,
            old: *mut rlimit64,
        ) -> c_int {
            let pass_on = |new| {
                next!(
                    $name,
                    fn(pid_t, Which, *const rlimit64, *mut rlimit64) -> c_int,
                    pid,
                    which,
                    new,
                    old
                )
            };
            match pid == 0 || pid == sys::getpid() {
                true => change(which, new, old, pass_on),
                false => pass_on(new),
            }
        }
    )*};
}

of_any_process! {
    prlimit c"prlimit";
    prlimit64 c"prlimit64";
}
