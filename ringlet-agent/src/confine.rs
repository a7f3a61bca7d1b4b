//! Calls by which a program closes itself in: what it may call from then on is not for us to use.

use crate::Edge;
use crate::data::is_nowhere;
use libc::c_int;
use ringlet::socket::process;
use ringlet_linux::sys::Sys;

/// The number of landlock_restrict_self on every machine.
pub const LANDLOCK_RESTRICT_SELF: i64 = 446;
/// linux/prctl.h: system calls from outside a range raise a signal.
const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
const PR_SYS_DISPATCH_OFF: usize = 0;

/// prctl, seccomp and landlock_restrict_self.
pub fn confine(edge: &impl Edge, number: i64, args: [usize; 3]) -> Sys<usize> {
    if closes_in(number, args) {
        process::closes_in();
    }
    edge.pass_on()
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
