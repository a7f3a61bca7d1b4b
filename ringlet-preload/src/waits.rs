//! Calls that wait for readiness (`ringlet_agent::waits`).

use crate::{also, served};
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use ringlet_agent::waits;

served! {
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int => waits::poll, [fds, count, timeout];
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int
        => waits::ppoll, [fds, count, timeout, mask];
    select(count: c_int, readable: *mut fd_set, writable: *mut fd_set, exceptional: *mut fd_set, timeout: *mut timeval) -> c_int
        => waits::select, [count, readable, writable, exceptional, timeout];
    pselect(count: c_int, readable: *mut fd_set, writable: *mut fd_set, exceptional: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int
        => waits::pselect, [count, readable, writable, exceptional, timeout, mask];
    epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int
        => waits::epoll_ctl, [epfd, op, fd, event];
    epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int
        => waits::epoll_wait, [epfd, events, max, timeout];
    epoll_pwait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int
        => waits::epoll_pwait, [epfd, events, max, timeout, mask];
    epoll_pwait2(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int
        => waits::epoll_pwait2, [epfd, events, max, timeout, mask];
}

also! {
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, _size: usize) -> c_int => poll, [fds, count, timeout];
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, _size: usize) -> c_int
        => ppoll, [fds, count, timeout, mask];
}
