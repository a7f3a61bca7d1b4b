//! Calls that make, name, change or close descriptors (`ringlet_agent::descriptors`), and libc's streams and threads that use them below our
//! feet.

use crate::edge::Call;
use crate::errno::result;
use crate::processes::{execve, execveat, forking, lends, makes_copy};
use crate::{also, next, served};
use libc::{c_char, c_int, c_long, c_uint, c_ulong, c_void, mode_t, sigset_t, sockaddr, socklen_t};
use ringlet::reasons::Reason;
use ringlet::socket::table::lookup;
use ringlet::socket::{self, process};
use ringlet_agent::descriptors;

/// Which path a descriptor's connection is on (`ringlet_core::view::PATH_*`), for tests and curious programs; -1 for a descriptor
/// that ringlet does not follow.
#[unsafe(no_mangle)]
pub extern "C" fn ringlet_path(fd: c_int) -> c_int {
    socket::path_of(fd).map_or(-1, |path| path as c_int)
}

served! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int => descriptors::socket, [domain, kind, protocol];
    connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int => descriptors::connect, [fd, address, len];
    accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int => descriptors::accept, [fd];
    accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int => descriptors::accept, [fd];
    socketpair(domain: c_int, kind: c_int, protocol: c_int, pair: *mut c_int) -> c_int
        => descriptors::socketpair, [domain, kind, protocol, pair];
    pipe(pair: *mut c_int) -> c_int => descriptors::pipe, [pair];
    pipe2(pair: *mut c_int, flags: c_int) -> c_int => descriptors::pipe, [pair];
    epoll_create(size: c_int) -> c_int => descriptors::epoll_create, [];
    epoll_create1(flags: c_int) -> c_int => descriptors::epoll_create, [];
    close(fd: c_int) -> c_int => descriptors::close, [fd];
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int => descriptors::close_range, [first, last, flags as u32];
    dup(fd: c_int) -> c_int => descriptors::dup, [fd];
    dup2(from: c_int, to: c_int) -> c_int => descriptors::dup_to, [from, to];
    dup3(from: c_int, to: c_int, flags: c_int) -> c_int => descriptors::dup_to, [from, to];
    fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int => descriptors::fcntl, [fd, command, argument];
    fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int => descriptors::fcntl, [fd, command, argument];
    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int => descriptors::ioctl, [fd, request, argument];
    shutdown(fd: c_int, how: c_int) -> c_int => descriptors::shutdown, [fd, how];
    setsockopt(fd: c_int, level: c_int, option: c_int, value: *const c_void, len: socklen_t) -> c_int
        => descriptors::setsockopt, [fd, level, option, value, len];
    getsockopt(fd: c_int, level: c_int, option: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int
        => descriptors::getsockopt, [fd, level, option, value];
}

// Whatever else makes one. (open's third argument is there only with O_CREAT and O_TMPFILE; passed on as it is in any case. A connection
// of another process that comes by pidfd_getfd is not followed: it may be moved there, and its bytes with it.)
served! {
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int => descriptors::made, [];
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int => descriptors::made, [];
    openat(at: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int => descriptors::made, [];
    openat64(at: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int => descriptors::made, [];
    __open_2(path: *const c_char, flags: c_int) -> c_int => descriptors::made, [];
    __open64_2(path: *const c_char, flags: c_int) -> c_int => descriptors::made, [];
    creat(path: *const c_char, mode: mode_t) -> c_int => descriptors::made, [];
    creat64(path: *const c_char, mode: mode_t) -> c_int => descriptors::made, [];
    mkstemp(template: *mut c_char) -> c_int => descriptors::made, [];
    mkstemp64(template: *mut c_char) -> c_int => descriptors::made, [];
    memfd_create(name: *const c_char, flags: c_uint) -> c_int => descriptors::made, [];
    eventfd(value: c_uint, flags: c_int) -> c_int => descriptors::made, [];
    timerfd_create(clock: c_int, flags: c_int) -> c_int => descriptors::made, [];
    inotify_init1(flags: c_int) -> c_int => descriptors::made, [];
    pidfd_getfd(pidfd: c_int, of: c_int, flags: c_uint) -> c_int => descriptors::made, [];
    signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int => made_unless_given, [fd];
}

/// signalfd makes a descriptor only where it was given none.
fn made_unless_given(edge: &impl ringlet_agent::Edge, fd: c_int) -> ringlet_linux::sys::Sys<usize> {
    if fd < 0 { descriptors::made(edge) } else { edge.pass_on() }
}

// (off_t has 64 bits here, so the structs are the same.)
also! {
    aio_read64(request: *mut libc::aiocb) -> c_int => aio_read, [request];
    aio_write64(request: *mut libc::aiocb) -> c_int => aio_write, [request];
    lio_listio64(mode: c_int, requests: Requests, count: c_int, event: *mut libc::sigevent) -> c_int
        => lio_listio, [mode, requests, count, event];
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    let mut at_mark: c_int = 0;
    // SAFETY: the request writes an int.
    let done = unsafe { ioctl(fd, descriptors::SIOCATMARK as c_ulong, (&raw mut at_mark).cast()) };
    if done < 0 { done } else { at_mark }
}

#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    // SAFETY: no memory is passed.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// Programs that avoid libc's wrappers (Node.js closes its descriptors this way, libuv receives and sends many datagrams).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
    e: c_ulong,
    f: c_ulong,
) -> c_long {
    let make = || {
        next!(
            c"syscall",
            fn(c_long, c_ulong, c_ulong, c_ulong, c_ulong, c_ulong, c_ulong) -> c_long,
            number,
            a,
            b,
            c,
            d,
            e,
            f
        )
    };
    // SAFETY: the program's own arguments.
    unsafe {
        match number {
            libc::SYS_execve => execve(a as _, b as _, c as _) as c_long,
            libc::SYS_execveat => {
                execveat(a as c_int, b as _, c as _, d as _, e as c_int) as c_long
            }
            _ if makes_copy(number, a) => forking(make),
            _ if lends(number, a) => {
                process::lends_memory();
                make()
            }
            _ => {
                let args = [a, b, c, d, e, f].map(|arg| arg as usize);
                result(ringlet_agent::served(&Call(|| make() as isize), number, args)) as c_long
            }
        }
    }
}

/// fclose closes by itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fclose(stream: *mut libc::FILE) -> c_int {
    // SAFETY: the program's stream.
    let fd = if stream.is_null() { -1 } else { unsafe { libc::fileno(stream) } };
    if let Some(known) = lookup(fd) {
        process::before_close(fd, known);
    }
    let done = next!(c"fclose", fn(*mut libc::FILE) -> c_int, stream);
    ringlet::socket::asked::closes();
    done
}

/// libc's threads behind aio read and write natively.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aio_read(request: *mut libc::aiocb) -> c_int {
    // SAFETY: the program's request.
    unsafe { keep_aio_on_kernel(request) };
    next!(c"aio_read", fn(*mut libc::aiocb) -> c_int, request)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aio_write(request: *mut libc::aiocb) -> c_int {
    // SAFETY: the program's request.
    unsafe { keep_aio_on_kernel(request) };
    next!(c"aio_write", fn(*mut libc::aiocb) -> c_int, request)
}

type Requests = *const *mut libc::aiocb;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lio_listio(
    mode: c_int,
    requests: Requests,
    count: c_int,
    event: *mut libc::sigevent,
) -> c_int {
    if !requests.is_null() {
        for i in 0..count.max(0) as usize {
            // SAFETY: the program's list of requests.
            unsafe { keep_aio_on_kernel(*requests.add(i)) };
        }
    }
    next!(
        c"lio_listio",
        fn(c_int, Requests, c_int, *mut libc::sigevent) -> c_int,
        mode,
        requests,
        count,
        event
    )
}

unsafe fn keep_aio_on_kernel(request: *const libc::aiocb) {
    if !request.is_null() {
        // SAFETY: the program's request.
        process::keep_fd_on_kernel(unsafe { (*request).aio_fildes }, Reason::Stdio);
    }
}

/// stdio reads and writes below our feet: the connection goes to the kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE {
    process::keep_fd_on_kernel(fd, Reason::Stdio);
    let stream = next!(c"fdopen", fn(c_int, *const c_char) -> usize, fd, mode);
    if stream == usize::MAX { core::ptr::null_mut() } else { stream as *mut libc::FILE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdprintf(
    fd: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    process::keep_fd_on_kernel(fd, Reason::Stdio);
    next!(c"vdprintf", fn(c_int, *const c_char, *mut c_void) -> c_int, fd, format, arguments)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    process::keep_fd_on_kernel(fd, Reason::Stdio);
    next!(
        c"__vdprintf_chk",
        fn(c_int, c_int, *const c_char, *mut c_void) -> c_int,
        fd,
        flag,
        format,
        arguments
    )
}
