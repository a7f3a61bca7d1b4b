//! Calls by which a program closes itself in: what it may call from then on is not for us to use.

use crate::Edge;
use crate::data::is_nowhere;
use libc::c_int;
use ringlet::socket::process;
use ringlet_linux::locked;
use ringlet_linux::sys::{self, Sys};

/// The number of landlock_restrict_self on every machine.
pub const LANDLOCK_RESTRICT_SELF: i64 = 446;
/// linux/prctl.h: system calls from outside a range raise a signal.
const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
const PR_SYS_DISPATCH_OFF: usize = 0;
const CAP_SYS_ADMIN: u32 = 21;

/// mlockall. (It reads a file of the kernel's, of which no child by fork may get the descriptor.)
pub fn lock_all(edge: &impl Edge, flags: c_int) -> Sys<usize> {
    process::apart_from_forks(|| locked::lock_all(flags, || edge.pass_on()))
}

/// prctl, seccomp and landlock_restrict_self.
pub fn confine(edge: &impl Edge, number: i64, args: [usize; 3]) -> Sys<usize> {
    if closes_in(number, args) && (process::is_closed_in() || may(number, args)) {
        process::closes_in();
    }
    edge.pass_on()
}

/// KERNEL: without privileges a filter is taken only from a thread that can't gain any. (Who is closed in is asked nothing any more.)
fn may(number: i64, [a, b, _]: [usize; 3]) -> bool {
    let needs_none = match number {
        libc::SYS_prctl => {
            a as c_int != libc::PR_SET_SECCOMP || b as u32 == libc::SECCOMP_MODE_STRICT
        }
        libc::SYS_seccomp => a as u32 == libc::SECCOMP_SET_MODE_STRICT,
        _ => false,
    };
    needs_none || sys::gains_no_privileges() || sys::has_capability(CAP_SYS_ADMIN)
}

/// (Who names no filter only asks whether the kernel knows them.)
fn closes_in(number: i64, [a, b, c]: [usize; 3]) -> bool {
    let sets = |mode: usize, filter: usize| match mode as u32 {
        libc::SECCOMP_MODE_STRICT => true,
        libc::SECCOMP_MODE_FILTER => !is_nowhere(filter as *const u8),
        _ => false,
    };
    match number {
        libc::SYS_prctl if a as c_int == libc::PR_SET_SECCOMP => sets(b, c),
        libc::SYS_prctl => a as c_int == PR_SET_SYSCALL_USER_DISPATCH && b != PR_SYS_DISPATCH_OFF,
        // Its operations are one less than the modes.
        libc::SYS_seccomp => sets(a + 1, c),
        LANDLOCK_RESTRICT_SELF => a as c_int >= 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_closes_a_process_in() {
        let somewhere = 0;
        let filter = &raw const somewhere as usize;
        let seccomp = libc::PR_SET_SECCOMP as usize;
        let dispatch = PR_SET_SYSCALL_USER_DISPATCH as usize;
        for (number, args) in [
            (libc::SYS_prctl, [seccomp, 1, 0]),
            (libc::SYS_prctl, [seccomp, 2, filter]),
            (libc::SYS_seccomp, [0, 0, 0]),
            (libc::SYS_seccomp, [1, 8, filter]),
            (libc::SYS_prctl, [dispatch, 1, 0]),
            (LANDLOCK_RESTRICT_SELF, [3, 0, 0]),
        ] {
            assert!(closes_in(number, args), "{number} {args:?}");
        }
        for (number, args) in [
            (libc::SYS_prctl, [seccomp, 2, 0]),
            (libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0]),
            (libc::SYS_seccomp, [1, 0, 0]),
            (libc::SYS_seccomp, [2, 0, filter]),
            (libc::SYS_prctl, [dispatch, 0, 0]),
            (LANDLOCK_RESTRICT_SELF, [usize::MAX, 0, 0]),
        ] {
            assert!(!closes_in(number, args), "{number} {args:?}");
        }
    }
}
