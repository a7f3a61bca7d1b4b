//! Calls that make, name, change or close descriptors.

use crate::calls::{is_nowhere, recvmmsg, sendmmsg};
use crate::processes::{execve, execveat, forking, lends, makes_copy};
use crate::{next, result, set_errno};
use libc::{c_char, c_int, c_long, c_ulong, c_void, sockaddr, socklen_t};
use ringlet::reasons::Reason;
use ringlet::socket::table::{Known, Stage, lookup};
use ringlet::socket::{self, asked, carrier, datagram, epoll, process, stream, unforgiving};
use ringlet::thread::is_alone;

/// Which path a descriptor's connection is on (`ringlet_core::view::PATH_*`), for tests and curious programs; -1 for a descriptor
/// that ringlet does not follow.
#[unsafe(no_mangle)]
pub extern "C" fn ringlet_path(fd: c_int) -> c_int {
    socket::path_of(fd).map_or(-1, |path| path as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = next!(c"socket", fn(c_int, c_int, c_int) -> c_int, domain, kind, protocol);
    if fd >= 0 {
        let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
        let datagram = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_DGRAM;
        if datagram && inet && (protocol == 0 || protocol == libc::IPPROTO_UDP) {
            process::made_datagram_socket(fd, domain, kind & libc::SOCK_NONBLOCK != 0);
        } else if let Some(kind) = carrier::kind(domain, kind, protocol) {
            process::made_socket(fd, kind);
        } else {
            process::reused(fd);
        }
    }
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the program's address, if it is one.
    let dissolves = (address as usize) >= 4096
        && len as usize >= size_of::<libc::sa_family_t>()
        && unsafe { (*address).sa_family } as c_int == libc::AF_UNSPEC;
    if dissolves {
        process::before_dissolve(fd);
        let done =
            next!(c"connect", fn(c_int, *const sockaddr, socklen_t) -> c_int, fd, address, len);
        process::reconnected(fd);
        return done;
    }
    let done = next!(c"connect", fn(c_int, *const sockaddr, socklen_t) -> c_int, fd, address, len);
    if done == 0 && process::reconnected(fd) {
        return done;
    }
    // SAFETY: libc's errno of this thread.
    if done == 0 || unsafe { *libc::__errno_location() } == libc::EINPROGRESS {
        // SAFETY: the kernel has read it.
        process::connected(fd, unsafe { name_of(address, len) });
        if done != 0 {
            set_errno(libc::EINPROGRESS);
        } else {
            unforgiving::hasten(fd);
        }
    }
    done
}

/// What of an address names its place. (Behind an IPv4 address and port may be anything.)
unsafe fn name_of<'a>(address: *const sockaddr, len: socklen_t) -> &'a [u8] {
    // SAFETY: by the caller's word.
    let family = unsafe { (*address).sa_family } as c_int;
    let len = if family == libc::AF_INET { IPV4_NAME_BYTES } else { len as usize };
    // SAFETY: the same; the kernel takes no shorter one of this family.
    unsafe { core::slice::from_raw_parts(address.cast(), len) }
}

/// The family, the port, the address.
const IPV4_NAME_BYTES: usize = 8;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let made =
        next!(c"accept", fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int, fd, address, len);
    accepted(fd, made)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let made = next!(
        c"accept4",
        fn(c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int,
        fd,
        address,
        len,
        flags
    );
    accepted(fd, made)
}

fn accepted(listener: c_int, made: c_int) -> c_int {
    if made >= 0 {
        process::accepted(made, listener);
        unforgiving::hasten(made);
    }
    made
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socketpair(
    domain: c_int,
    kind: c_int,
    protocol: c_int,
    pair: *mut c_int,
) -> c_int {
    let done = next!(
        c"socketpair",
        fn(c_int, c_int, c_int, *mut c_int) -> c_int,
        domain,
        kind,
        protocol,
        pair
    );
    if done == 0 {
        // SAFETY: the kernel has filled the pair.
        unsafe { process::made_pair(*pair, *pair.add(1), carrier::kind(domain, kind, protocol)) };
    }
    done
}

unsafe fn made_pipe(done: c_int, pair: *const c_int) -> c_int {
    if done == 0 {
        // SAFETY: two descriptors, by the caller's word.
        unsafe {
            process::reused(*pair);
            process::reused(*pair.add(1));
        }
    }
    done
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pipe(pair: *mut c_int) -> c_int {
    let done = next!(c"pipe", fn(*mut c_int) -> c_int, pair);
    // SAFETY: on success the kernel has filled the pair.
    unsafe { made_pipe(done, pair) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pipe2(pair: *mut c_int, flags: c_int) -> c_int {
    let done = next!(c"pipe2", fn(*mut c_int, c_int) -> c_int, pair, flags);
    // SAFETY: on success the kernel has filled the pair.
    unsafe { made_pipe(done, pair) }
}

fn made(fd: c_int) -> c_int {
    process::reused(fd);
    fd
}

/// The third argument is there only with O_CREAT and O_TMPFILE; passed on as it is in any case.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    made(next!(c"open", fn(*const c_char, c_int, libc::mode_t) -> c_int, path, flags, mode))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    made(next!(c"open64", fn(*const c_char, c_int, libc::mode_t) -> c_int, path, flags, mode))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat(
    at: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    made(next!(
        c"openat",
        fn(c_int, *const c_char, c_int, libc::mode_t) -> c_int,
        at,
        path,
        flags,
        mode
    ))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(
    at: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    made(next!(
        c"openat64",
        fn(c_int, *const c_char, c_int, libc::mode_t) -> c_int,
        at,
        path,
        flags,
        mode
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn eventfd(value: libc::c_uint, flags: c_int) -> c_int {
    made(next!(c"eventfd", fn(libc::c_uint, c_int) -> c_int, value, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn timerfd_create(clock: c_int, flags: c_int) -> c_int {
    made(next!(c"timerfd_create", fn(c_int, c_int) -> c_int, clock, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn epoll_create(size: c_int) -> c_int {
    made_set(next!(c"epoll_create", fn(c_int) -> c_int, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn epoll_create1(flags: c_int) -> c_int {
    made_set(next!(c"epoll_create1", fn(c_int) -> c_int, flags))
}

fn made_set(fd: c_int) -> c_int {
    if fd >= 0 {
        process::reused(fd);
        epoll::created(fd);
    }
    fd
}

#[unsafe(no_mangle)]
pub extern "C" fn close(fd: c_int) -> c_int {
    asked::closes();
    if let Some(known) = lookup(fd)
        && !process::before_close(fd, known)
    {
        // One of our own, which the program does not know: for it, the number is not open.
        set_errno(libc::EBADF);
        return -1;
    }
    next!(c"close", fn(c_int) -> c_int, fd)
}

#[unsafe(no_mangle)]
pub extern "C" fn dup(fd: c_int) -> c_int {
    duplicated(fd, next!(c"dup", fn(c_int) -> c_int, fd))
}

fn duplicated(from: c_int, to: c_int) -> c_int {
    if to >= 0 && from != to {
        if process::borrowed_if_known(from, to) {
            process::given_to_child(from, to);
        } else {
            process::duplicated(from, to);
        }
    }
    to
}

#[unsafe(no_mangle)]
pub extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    let Some(to) = make_way(from, to) else { return -1 };
    duplicated(from, next!(c"dup2", fn(c_int, c_int) -> c_int, from, to))
}

#[unsafe(no_mangle)]
pub extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    let Some(to) = make_way(from, to) else { return -1 };
    duplicated(from, next!(c"dup3", fn(c_int, c_int, c_int) -> c_int, from, to, flags))
}

/// Before a number is overwritten: what it named is closed first, if the call will succeed. One of our own descriptors that the
/// program wants the number of moves away.
fn make_way(from: c_int, to: c_int) -> Option<c_int> {
    if from == to || !ringlet_linux::fd::is_open(from) {
        return Some(to);
    }
    asked::closes();
    match lookup(to) {
        None => {}
        Some(Known::Hidden) if !process::make_way(to) => {
            set_errno(libc::EBUSY);
            return None;
        }
        Some(Known::Hidden) => {}
        Some(known) => {
            process::before_close(to, known);
        }
    }
    Some(to)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let done = next!(c"fcntl", fn(c_int, c_int, c_ulong) -> c_int, fd, command, argument);
    controlled(fd, command, argument, done)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let done = next!(c"fcntl64", fn(c_int, c_int, c_ulong) -> c_int, fd, command, argument);
    controlled(fd, command, argument, done)
}

fn controlled(fd: c_int, command: c_int, argument: c_ulong, done: c_int) -> c_int {
    if done < 0 {
        return done;
    }
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => return duplicated(fd, done),
        libc::F_SETFL => {
            socket::set_nonblocking(fd, argument as c_int & libc::O_NONBLOCK != 0);
            if argument as c_int & libc::O_ASYNC != 0 {
                process::keep_fd_on_kernel(fd, Reason::AsyncSignal);
            }
        }
        _ => {}
    }
    done
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if let Some(Known::Socket(socket)) = lookup(fd)
        && socket.stage() == Stage::Attached
        && !is_nowhere(argument)
    {
        let count = match request as u32 as u64 {
            SIOCINQ => Some(stream::readable_bytes(socket)),
            SIOCOUTQ => Some(stream::unsent_bytes(socket)),
            // Urgent data comes through the kernel, behind what the ring still holds.
            SIOCATMARK if stream::ring_holds_bytes(socket) => Some(Ok(0)),
            _ => None,
        };
        if let Some(count) = count {
            let count = result(count.map(|n| n.min(c_int::MAX as usize)));
            if count >= 0 {
                // SAFETY: both requests take a pointer to an int.
                unsafe { *argument.cast::<c_int>() = count as c_int };
                return 0;
            }
            return -1;
        }
    }
    if let Some(Known::Socket(socket)) = lookup(fd)
        && socket.stage() == Stage::Mailbox
        && request as u32 as u64 == SIOCINQ
        && !is_nowhere(argument)
        && let Some(len) = datagram::next_len(socket)
    {
        // SAFETY: as above.
        unsafe { *argument.cast::<c_int>() = len as c_int };
        return 0;
    }
    let done = next!(c"ioctl", fn(c_int, c_ulong, *mut c_void) -> c_int, fd, request, argument);
    if done >= 0 && !argument.is_null() {
        // SAFETY: both requests take a pointer to an int.
        let on = || unsafe { *argument.cast::<c_int>() } != 0;
        match request as u32 as u64 {
            FIONBIO => socket::set_nonblocking(fd, on()),
            FIOASYNC if on() => process::keep_fd_on_kernel(fd, Reason::AsyncSignal),
            _ => {}
        }
    }
    done
}

const FIONBIO: u64 = 0x5421;
const FIOASYNC: u64 = 0x5452;
const SIOCINQ: u64 = 0x541b;
const SIOCOUTQ: u64 = 0x5411;
const SIOCATMARK: u64 = 0x8905;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    let mut at_mark: c_int = 0;
    // SAFETY: the request writes an int.
    let done = unsafe { ioctl(fd, SIOCATMARK, (&raw mut at_mark).cast()) };
    if done < 0 { done } else { at_mark }
}

#[unsafe(no_mangle)]
pub extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let Some(Known::Socket(socket)) = lookup(fd) else {
        return next!(c"shutdown", fn(c_int, c_int) -> c_int, fd, how);
    };
    if stream::shut_down_before(socket, how) {
        return result(stream::shut_down(socket, how).map(|_| 0)) as c_int;
    }
    let done = next!(c"shutdown", fn(c_int, c_int) -> c_int, fd, how);
    if done != 0 {
        stream::shut_down_failed(socket);
    } else if socket.is_datagram() {
        socket::keep_on_kernel(socket, Reason::Closing);
    } else if socket.stage() == Stage::Attached {
        // Another thread has moved it meanwhile, and may have sent by the ring.
        let _ = stream::shut_down(socket, how);
    }
    done
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if len as usize >= size_of::<c_int>() && !is_nowhere(value) && level == libc::IPPROTO_TCP {
        // SAFETY: the program's value, of at least an int.
        let value = unsafe { value.cast::<c_int>().read_unaligned() };
        if socket::keep_option(fd, level, option, value) {
            return 0;
        }
    }
    if (level, option) == (libc::IPPROTO_TCP, libc::TCP_REPAIR) {
        // First: under repair the kernel takes no bytes.
        socket::option_set(fd, level, option, 1);
    }
    let done = next!(
        c"setsockopt",
        fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
        fd,
        level,
        option,
        value,
        len
    );
    if done == 0 {
        let word = len as usize >= size_of::<c_int>() && !value.is_null();
        // SAFETY: the program's value, which the kernel has read.
        let word = if word { unsafe { value.cast::<c_int>().read_unaligned() } } else { 1 };
        socket::option_set(fd, level, option, word);
    }
    done
}

/// linux/tcp.h: a receive in the guise of a question.
const TCP_ZEROCOPY_RECEIVE: c_int = 35;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if (level, option) == (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        process::keep_fd_on_kernel(fd, Reason::Option);
    }
    let done = next!(
        c"getsockopt",
        fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int,
        fd,
        level,
        option,
        value,
        len
    );
    if done == 0
        && (level, option) == (libc::SOL_SOCKET, libc::SO_ERROR)
        && let Some(socket) = socket::table::socket(fd)
    {
        // SAFETY: SO_ERROR is an int, which the kernel has just written.
        unsafe {
            let value = value.cast::<c_int>();
            *value = socket::take_error(socket, *value);
        }
    }
    if done == 0
        && let Some(kept) = socket::kept_option(fd, level, option)
    {
        // SAFETY: an int, which the kernel has just written.
        unsafe { *value.cast::<c_int>() = kept.get() as c_int };
    }
    done
}

#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: libc::c_uint, last: libc::c_uint, flags: c_int) -> c_int {
    // KERNEL: with CLOEXEC nothing is closed now. UNSHARE makes a table for this thread alone: in a program of one thread what is
    // closed there is closed for the program; in any other it is this thread's affair.
    let only_ours = flags == libc::CLOSE_RANGE_UNSHARE as c_int && is_alone();
    if flags as libc::c_uint & libc::CLOSE_RANGE_UNSHARE != 0 && !only_ours {
        process::before_split();
    }
    if flags != 0 && !only_ours || process::borrowed() {
        return next!(
            c"close_range",
            fn(libc::c_uint, libc::c_uint, c_int) -> c_int,
            first,
            last,
            flags
        );
    }
    if first > last {
        set_errno(libc::EINVAL);
        return -1;
    }
    let mut from = first;
    let by_kernel = |from: libc::c_uint, to: libc::c_uint, flags: c_int| {
        next!(c"close_range", fn(libc::c_uint, libc::c_uint, c_int) -> c_int, from, to, flags)
    };
    // A process made with CLONE_FILES shares its maker's table, and leaves it before it closes: here by a range of no descriptor.
    if only_ours && by_kernel(libc::c_uint::MAX, libc::c_uint::MAX, flags) != 0 {
        return -1;
    }
    let close_up_to = |from: libc::c_uint, to: libc::c_uint| by_kernel(from, to, 0);
    for fd in process::known_between(first, last) {
        let Some(known) = lookup(fd) else { continue };
        if process::before_close(fd, known) {
            continue;
        }
        // One of our own: everything before it, then go on after it.
        if fd as u32 > from {
            close_up_to(from, fd as u32 - 1);
        }
        from = fd as u32 + 1;
    }
    if from <= last { close_up_to(from, last) } else { 0 }
}

#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    close_range(first.max(0) as libc::c_uint, libc::c_uint::MAX, 0);
}

/// Programs that avoid libc's wrappers (Node.js closes its descriptors this way).
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
    match number {
        libc::SYS_close => return close(a as c_int) as c_long,
        libc::SYS_close_range => return close_range(a as u32, b as u32, c as c_int) as c_long,
        libc::SYS_dup => return dup(a as c_int) as c_long,
        libc::SYS_dup3 => return dup3(a as c_int, b as c_int, c as c_int) as c_long,
        // libuv's way to receive and send many datagrams.
        libc::SYS_recvmmsg => {
            // SAFETY: the program's own arguments.
            return unsafe {
                recvmmsg(a as c_int, b as *mut _, c as libc::c_uint, d as c_int, e as *mut _)
            } as c_long;
        }
        libc::SYS_sendmmsg => {
            // SAFETY: as above.
            return unsafe { sendmmsg(a as c_int, b as *mut _, c as libc::c_uint, d as c_int) }
                as c_long;
        }
        libc::SYS_io_uring_setup => process::uses_io_uring(),
        // SAFETY: as above.
        libc::SYS_execve => return unsafe { execve(a as _, b as _, c as _) } as c_long,
        libc::SYS_execveat => {
            // SAFETY: as above.
            return unsafe { execveat(a as c_int, b as _, c as _, d as _, e as c_int) } as c_long;
        }
        libc::SYS_exit_group => process::at_exit(),
        _ => {}
    }
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
    // SAFETY: as above.
    if unsafe { lends(number, a) } {
        process::lends_memory();
    }
    // SAFETY: as above.
    if unsafe { makes_copy(number, a) } { forking(make) } else { make() }
}

// liburing makes its system calls by itself.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init(
    entries: libc::c_uint,
    ring: *mut c_void,
    flags: libc::c_uint,
) -> c_int {
    process::uses_io_uring();
    next!(
        c"io_uring_queue_init",
        fn(libc::c_uint, *mut c_void, libc::c_uint) -> c_int,
        entries,
        ring,
        flags
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init_params(
    entries: libc::c_uint,
    ring: *mut c_void,
    parameters: *mut c_void,
) -> c_int {
    process::uses_io_uring();
    next!(
        c"io_uring_queue_init_params",
        fn(libc::c_uint, *mut c_void, *mut c_void) -> c_int,
        entries,
        ring,
        parameters
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_setup(entries: libc::c_uint, parameters: *mut c_void) -> c_int {
    process::uses_io_uring();
    next!(c"io_uring_setup", fn(libc::c_uint, *mut c_void) -> c_int, entries, parameters)
}

/// fclose closes by itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fclose(stream: *mut libc::FILE) -> c_int {
    // SAFETY: the program's stream.
    let fd = if stream.is_null() { -1 } else { unsafe { libc::fileno(stream) } };
    if let Some(known) = lookup(fd) {
        process::before_close(fd, known);
    }
    next!(c"fclose", fn(*mut libc::FILE) -> c_int, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn creat(path: *const c_char, mode: libc::mode_t) -> c_int {
    made(next!(c"creat", fn(*const c_char, libc::mode_t) -> c_int, path, mode))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn creat64(path: *const c_char, mode: libc::mode_t) -> c_int {
    made(next!(c"creat64", fn(*const c_char, libc::mode_t) -> c_int, path, mode))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __open_2(path: *const c_char, flags: c_int) -> c_int {
    made(next!(c"__open_2", fn(*const c_char, c_int) -> c_int, path, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
    made(next!(c"__open64_2", fn(*const c_char, c_int) -> c_int, path, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mkstemp(template: *mut c_char) -> c_int {
    made(next!(c"mkstemp", fn(*mut c_char) -> c_int, template))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mkstemp64(template: *mut c_char) -> c_int {
    made(next!(c"mkstemp64", fn(*mut c_char) -> c_int, template))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfd_create(name: *const c_char, flags: libc::c_uint) -> c_int {
    made(next!(c"memfd_create", fn(*const c_char, libc::c_uint) -> c_int, name, flags))
}

/// A connection of another process that comes this way is not followed: it may be moved there, and its bytes with it.
#[unsafe(no_mangle)]
pub extern "C" fn pidfd_getfd(pidfd: c_int, of: c_int, flags: libc::c_uint) -> c_int {
    made(next!(c"pidfd_getfd", fn(c_int, c_int, libc::c_uint) -> c_int, pidfd, of, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn inotify_init1(flags: c_int) -> c_int {
    made(next!(c"inotify_init1", fn(c_int) -> c_int, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn signalfd(fd: c_int, mask: *const libc::sigset_t, flags: c_int) -> c_int {
    let got = next!(c"signalfd", fn(c_int, *const libc::sigset_t, c_int) -> c_int, fd, mask, flags);
    if fd < 0 { made(got) } else { got }
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aio_read64(request: *mut libc::aiocb) -> c_int {
    // SAFETY: passed on; off_t has 64 bits here, so the struct is the same.
    unsafe { aio_read(request) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aio_write64(request: *mut libc::aiocb) -> c_int {
    // SAFETY: as above.
    unsafe { aio_write(request) }
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lio_listio64(
    mode: c_int,
    requests: Requests,
    count: c_int,
    event: *mut libc::sigevent,
) -> c_int {
    // SAFETY: passed on; off_t has 64 bits here.
    unsafe { lio_listio(mode, requests, count, event) }
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
