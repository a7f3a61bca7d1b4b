//! What serves a program's calls, below any libc: each function here is a system call, with its arguments, and returns its result or the
//! error's number. What the program is linked with, and how its calls come here, is an edge's affair (`Edge`): the exported functions of
//! a libc, with errno and cancellation, are one (ringlet-preload); a program that makes its system calls itself needs another.
//!
//! Contract of every function here: that of the system call, with the program's own arguments.
#![no_std]
#![allow(clippy::missing_safety_doc)]

pub mod confine;
pub mod data;
mod datagrams;
pub mod descriptors;
pub mod uring;
pub mod waits;

use libc::{c_int, c_ulong};
use ringlet::socket::process;
use ringlet_linux::sys::{Errno, Sys};

/// One call of a program's, and the ways of what it came through.
pub trait Edge {
    /// The call goes to the kernel, as the program has made it.
    fn pass_on(&self) -> Sys<usize>;

    /// Another call to the kernel, for the one that is served: those that may wait can be cancelled as the program's own.
    ///
    /// # Safety
    /// As for a system call of this number.
    unsafe fn call(number: i64, args: [usize; 6]) -> Sys<usize>;

    /// Makes a call in which the thread may be cancelled. If it is, its frames are left without drops, and `cancelled` is all that runs.
    fn in_which<T>(cancelled: &dyn Fn(), call: impl FnOnce() -> T) -> T;
}

/// The arguments of a call, each in a register.
macro_rules! args {
    ($($arg:expr),*) => {{
        let given = [$($arg as usize),*];
        let mut args = [0usize; 6];
        args[..given.len()].copy_from_slice(&given);
        args
    }};
}
pub(crate) use args;

/// Serves a call by its number, as it stands in a program's registers: its result, or the error's number below zero. Calls that concern no
/// descriptor, and those that make processes or set handlers (how that is done is the edge's), are passed on.
///
/// # Safety
/// The program's own call.
pub unsafe fn serve<E: Edge>(edge: &E, number: i64, args: [usize; 6]) -> isize {
    // SAFETY: asks for a call of the program's by its registers, which the caller vouches for.
    match unsafe { served(edge, number, args) } {
        Ok(done) => done as isize,
        Err(Errno(error)) => -(error as isize),
    }
}

/// The same, as a result.
///
/// # Safety
/// As above.
pub unsafe fn served<E: Edge>(edge: &E, number: i64, [a, b, c, d, e, f]: [usize; 6]) -> Sys<usize> {
    let fd = a as c_int;
    // SAFETY: by contract, for all of them.
    unsafe {
        match number {
            libc::SYS_read => data::read(edge, fd, b as _, c),
            libc::SYS_write => data::write(edge, fd, b as _, c),
            libc::SYS_readv => data::readv(edge, fd, b as _, c as _),
            libc::SYS_writev => data::writev(edge, fd, b as _, c as _),
            libc::SYS_preadv2 => data::preadv2(edge, fd, b as _, c as _, d as _, f as _),
            libc::SYS_pwritev2 => data::pwritev2(edge, fd, b as _, c as _, d as _),
            libc::SYS_recvfrom => data::recvfrom(edge, fd, b as _, c, d as _, e as _, f as _),
            libc::SYS_sendto => data::sendto(edge, fd, b as _, c, d as _, e as _, f as _),
            libc::SYS_recvmsg => data::recvmsg(edge, fd, b as _, c as _),
            libc::SYS_sendmsg => data::sendmsg(edge, fd, b as _, c as _),
            libc::SYS_recvmmsg => data::recvmmsg(edge, fd, b as _, c as _, d as _, e as _),
            libc::SYS_sendmmsg => data::sendmmsg(edge, fd, b as _, c as _, d as _),
            libc::SYS_sendfile => data::sendfile(edge, fd, b as _, c as _, d),
            libc::SYS_splice => data::splice(edge, fd, b as _, c as _, d as _, e, f as _),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => waits::poll(edge, a as _, b as _, c as _),
            libc::SYS_ppoll => waits::ppoll(edge, a as _, b as _, c as _, d as _),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => waits::select(edge, fd, b as _, c as _, d as _, e as _),
            libc::SYS_pselect6 => {
                // KERNEL: the mask comes by a pointer to it and its length.
                let mask =
                    if data::is_nowhere(f as *const usize) { 0 } else { *(f as *const usize) };
                waits::pselect(edge, fd, b as _, c as _, d as _, e as _, mask as _)
            }
            libc::SYS_epoll_ctl => waits::epoll_ctl(edge, fd, b as _, c as _, d as _),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => waits::epoll_wait(edge, fd, b as _, c as _, d as _),
            libc::SYS_epoll_pwait => waits::epoll_pwait(edge, fd, b as _, c as _, d as _, e as _),
            libc::SYS_epoll_pwait2 => waits::epoll_pwait2(edge, fd, b as _, c as _, d as _, e as _),
            libc::SYS_socket => descriptors::socket(edge, fd, b as _, c as _),
            libc::SYS_socketpair => descriptors::socketpair(edge, fd, b as _, c as _, d as _),
            libc::SYS_connect => descriptors::connect(edge, fd, b as _, c as _),
            libc::SYS_accept | libc::SYS_accept4 => descriptors::accept(edge, fd),
            libc::SYS_shutdown => descriptors::shutdown(edge, fd, b as _),
            libc::SYS_setsockopt => {
                descriptors::setsockopt(edge, fd, b as _, c as _, d as _, e as _)
            }
            libc::SYS_getsockopt => descriptors::getsockopt(edge, fd, b as _, c as _, d as _),
            libc::SYS_fcntl => descriptors::fcntl(edge, fd, b as _, c as c_ulong),
            libc::SYS_ioctl => descriptors::ioctl(edge, fd, b as _, c as _),
            libc::SYS_close => descriptors::close(edge, fd),
            libc::SYS_close_range => descriptors::close_range(edge, a as _, b as _, c as _),
            libc::SYS_dup => descriptors::dup(edge, fd),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => descriptors::dup_to(edge, fd, b as _),
            libc::SYS_dup3 => descriptors::dup_to(edge, fd, b as _),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_pipe => descriptors::pipe(edge, a as _),
            libc::SYS_pipe2 => descriptors::pipe(edge, a as _),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_create => descriptors::epoll_create(edge),
            libc::SYS_epoll_create1 => descriptors::epoll_create(edge),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open | libc::SYS_creat => descriptors::made(edge),
            libc::SYS_openat
            | libc::SYS_openat2
            | libc::SYS_eventfd2
            | libc::SYS_timerfd_create
            | libc::SYS_memfd_create
            | libc::SYS_pidfd_getfd
            | libc::SYS_inotify_init1 => descriptors::made(edge),
            libc::SYS_signalfd4 if fd < 0 => descriptors::made(edge),
            libc::SYS_prctl | libc::SYS_seccomp | confine::LANDLOCK_RESTRICT_SELF => {
                confine::confine(edge, number, [a, b, c])
            }
            libc::SYS_mlockall => confine::lock_all(edge, fd),
            libc::SYS_io_uring_setup => {
                process::uses_io_uring();
                edge.pass_on()
            }
            libc::SYS_exit_group => {
                process::at_exit();
                edge.pass_on()
            }
            _ => edge.pass_on(),
        }
    }
}
