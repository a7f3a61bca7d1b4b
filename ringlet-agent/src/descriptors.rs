//! Calls that make, name, change or close descriptors.

use crate::data::is_nowhere;
use crate::{Edge, args};
use libc::{c_int, c_ulong, c_void, sockaddr, socklen_t};
use ringlet::reasons::Reason;
use ringlet::socket::table::{Known, Stage, lookup};
use ringlet::socket::transfer::{events, shut};
use ringlet::socket::{self, asked, carrier, datagram, epoll, meet, process, rings};
use ringlet::thread::is_alone;
use ringlet_linux::sys::{Errno, Sys};

pub fn socket(edge: &impl Edge, domain: c_int, kind: c_int, protocol: c_int) -> Sys<usize> {
    let made = edge.pass_on()?;
    let fd = made as c_int;
    match carrier::kind(domain, kind, protocol) {
        Some(of) => process::made_socket(fd, of, domain, kind & libc::SOCK_NONBLOCK != 0),
        None => process::reused(fd),
    }
    Ok(made)
}

pub unsafe fn connect(
    edge: &impl Edge,
    fd: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> Sys<usize> {
    // SAFETY: the program's address, if it is one.
    let dissolves = !is_nowhere(address)
        && len as usize >= size_of::<libc::sa_family_t>()
        && unsafe { (*address).sa_family } as c_int == libc::AF_UNSPEC;
    if dissolves {
        process::before_dissolve(fd);
        let done = edge.pass_on();
        process::reconnected(fd);
        return done;
    }
    let done = edge.pass_on();
    let connects = matches!(done, Ok(_) | Err(Errno(libc::EINPROGRESS)));
    if connects && !(done.is_ok() && process::reconnected(fd)) {
        // SAFETY: the kernel has read it.
        process::connected(fd, unsafe { name_of(address, len) });
        if done.is_ok() {
            meet::hasten(fd);
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

pub fn accept(edge: &impl Edge, listener: c_int) -> Sys<usize> {
    let made = edge.pass_on()?;
    process::accepted(made as c_int, listener);
    meet::hasten(made as c_int);
    Ok(made)
}

pub unsafe fn socketpair(
    edge: &impl Edge,
    domain: c_int,
    kind: c_int,
    protocol: c_int,
    pair: *const c_int,
) -> Sys<usize> {
    let done = edge.pass_on()?;
    // SAFETY: the kernel has filled the pair.
    unsafe { process::made_pair(*pair, *pair.add(1), carrier::kind(domain, kind, protocol)) };
    Ok(done)
}

pub unsafe fn pipe(edge: &impl Edge, pair: *const c_int) -> Sys<usize> {
    let done = edge.pass_on()?;
    // SAFETY: the kernel has filled the pair.
    unsafe {
        process::reused(*pair);
        process::reused(*pair.add(1));
    }
    Ok(done)
}

/// Whatever makes one descriptor that is no socket's.
pub fn made(edge: &impl Edge) -> Sys<usize> {
    let fd = edge.pass_on()?;
    process::reused(fd as c_int);
    Ok(fd)
}

pub fn epoll_create(edge: &impl Edge) -> Sys<usize> {
    let fd = made(edge)?;
    epoll::created(fd as c_int);
    Ok(fd)
}

pub fn close(edge: &impl Edge, fd: c_int) -> Sys<usize> {
    if let Some(known) = lookup(fd)
        && !process::before_close(fd, known)
    {
        // One of our own, which the program does not know: for it, the number is not open.
        return Err(Errno(libc::EBADF));
    }
    rings::closes(fd as u32, fd as u32);
    let done = edge.pass_on();
    asked::closes();
    done
}

/// dup, dup2, dup3 have made `to` of it.
fn duplicated(from: c_int, to: usize) -> usize {
    asked::closes();
    if from != to as c_int {
        if process::borrowed_if_known(from, to as c_int) {
            process::given_to_child(from, to as c_int);
        } else {
            process::duplicated(from, to as c_int);
        }
    }
    to
}

pub fn dup(edge: &impl Edge, fd: c_int) -> Sys<usize> {
    Ok(duplicated(fd, edge.pass_on()?))
}

/// dup2 and dup3.
pub fn dup_to(edge: &impl Edge, from: c_int, to: c_int) -> Sys<usize> {
    make_way(from, to)?;
    dup(edge, from)
}

/// Before a number is overwritten: what it named is closed first, if the call will succeed. One of our own descriptors that the
/// program wants the number of moves away.
fn make_way(from: c_int, to: c_int) -> Sys<()> {
    let Some(known) = lookup(to) else {
        if from != to {
            rings::closes(to as u32, to as u32);
        }
        return Ok(());
    };
    if from == to || !ringlet_linux::fd::is_open(from) {
        return Ok(());
    }
    match known {
        Known::Hidden if !process::make_way(to) => return Err(Errno(libc::EBUSY)),
        Known::Hidden => {}
        _ => {
            process::before_close(to, known);
        }
    }
    Ok(())
}

pub fn fcntl(edge: &impl Edge, fd: c_int, command: c_int, argument: c_ulong) -> Sys<usize> {
    let done = edge.pass_on()?;
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => return Ok(duplicated(fd, done)),
        libc::F_SETFL => {
            socket::set_nonblocking(fd, argument as c_int & libc::O_NONBLOCK != 0);
            if argument as c_int & libc::O_ASYNC != 0 {
                process::keep_fd_on_kernel(fd, Reason::AsyncSignal);
            }
        }
        _ => {}
    }
    Ok(done)
}

pub unsafe fn ioctl(
    edge: &impl Edge,
    fd: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> Sys<usize> {
    if let Some(Known::Socket(socket)) = lookup(fd)
        && socket.stage() == Stage::Attached
        && !is_nowhere(argument)
    {
        let count = match request as u32 as u64 {
            SIOCINQ => Some(events::readable_bytes(socket)),
            SIOCOUTQ => Some(events::unsent_bytes(socket)),
            // Urgent data comes through the kernel, behind what the ring still holds.
            SIOCATMARK if events::ring_holds_bytes(socket) => Some(Ok(0)),
            _ => None,
        };
        if let Some(count) = count {
            let count = count?.min(c_int::MAX as usize);
            // SAFETY: these requests take a pointer to an int.
            unsafe { *argument.cast::<c_int>() = count as c_int };
            return Ok(0);
        }
    }
    if let Some(Known::Socket(socket)) = lookup(fd)
        && socket.stage() == Stage::Mailbox
        && request as u32 as u64 == SIOCINQ
        && !is_nowhere(argument)
        && let Some(len) = datagram::next_len(socket)
    {
        // SAFETY: SIOCINQ takes a pointer to an int, and this one is not nowhere.
        unsafe { *argument.cast::<c_int>() = len as c_int };
        return Ok(0);
    }
    let done = edge.pass_on()?;
    if !argument.is_null() {
        // SAFETY: both requests take a pointer to an int.
        let on = || unsafe { *argument.cast::<c_int>() } != 0;
        match request as u32 as u64 {
            FIONBIO => socket::set_nonblocking(fd, on()),
            FIOASYNC if on() => process::keep_fd_on_kernel(fd, Reason::AsyncSignal),
            _ => {}
        }
    }
    Ok(done)
}

const FIONBIO: u64 = 0x5421;
const FIOASYNC: u64 = 0x5452;
const SIOCINQ: u64 = 0x541b;
const SIOCOUTQ: u64 = 0x5411;
pub const SIOCATMARK: u64 = 0x8905;

pub fn shutdown(edge: &impl Edge, fd: c_int, how: c_int) -> Sys<usize> {
    let Some(Known::Socket(socket)) = lookup(fd) else {
        return edge.pass_on();
    };
    if shut::before(socket, how) {
        return shut::shut_down(socket, how).map(|_| 0);
    }
    let done = edge.pass_on();
    if done.is_err() {
        shut::failed(socket);
    } else if socket.has_datagrams() {
        socket::keep_on_kernel(socket, Reason::Closing);
    } else if socket.stage() == Stage::Attached {
        // Another thread has moved it meanwhile, and may have sent by the ring.
        let _ = shut::shut_down(socket, how);
    }
    done
}

pub unsafe fn setsockopt(
    edge: &impl Edge,
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Sys<usize> {
    if len as usize >= size_of::<c_int>() && !is_nowhere(value) && level == libc::IPPROTO_TCP {
        // SAFETY: the program's value, of at least an int.
        let value = unsafe { value.cast::<c_int>().read_unaligned() };
        if socket::keep_option(fd, level, option, value) {
            return Ok(0);
        }
    }
    if (level, option) == (libc::IPPROTO_TCP, libc::TCP_REPAIR) {
        // First: under repair the kernel takes no bytes.
        socket::option_set(fd, level, option, 1);
    }
    let done = edge.pass_on()?;
    let word = len as usize >= size_of::<c_int>() && !value.is_null();
    // SAFETY: the program's value, which the kernel has read.
    let word = if word { unsafe { value.cast::<c_int>().read_unaligned() } } else { 1 };
    socket::option_set(fd, level, option, word);
    Ok(done)
}

/// linux/tcp.h: a receive in the guise of a question.
const TCP_ZEROCOPY_RECEIVE: c_int = 35;

pub unsafe fn getsockopt(
    edge: &impl Edge,
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
) -> Sys<usize> {
    if (level, option) == (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        process::keep_fd_on_kernel(fd, Reason::Option);
    }
    let done = edge.pass_on()?;
    if (level, option) == (libc::SOL_SOCKET, libc::SO_ERROR)
        && let Some(socket) = socket::table::socket(fd)
    {
        // SAFETY: SO_ERROR is an int, which the kernel has just written.
        unsafe {
            let value = value.cast::<c_int>();
            *value = socket::take_error(socket, *value);
        }
    }
    if let Some(kept) = socket::kept_option(fd, level, option) {
        // SAFETY: an int, which the kernel has just written.
        unsafe { *value.cast::<c_int>() = kept.get() as c_int };
    }
    Ok(done)
}

pub fn close_range<E: Edge>(edge: &E, first: u32, last: u32, flags: u32) -> Sys<usize> {
    // KERNEL: with CLOEXEC nothing is closed now. UNSHARE makes a table for this thread alone: in a program of one thread what is
    // closed there is closed for the program; in any other it is this thread's affair.
    let only_ours = flags == libc::CLOSE_RANGE_UNSHARE && is_alone();
    if flags & libc::CLOSE_RANGE_UNSHARE != 0 && !only_ours {
        process::before_split();
    }
    if flags != 0 && !only_ours || process::borrowed() {
        return edge.pass_on();
    }
    if first > last {
        return Err(Errno::EINVAL);
    }
    let mut from = first;
    // SAFETY: no memory is passed.
    let by_kernel = |from: u32, to: u32, flags: u32| unsafe {
        let done = E::call(libc::SYS_close_range, args!(from, to, flags));
        asked::closes();
        done
    };
    // A process made with CLONE_FILES shares its maker's table, and leaves it before it closes: here by a range of no descriptor.
    if only_ours {
        by_kernel(u32::MAX, u32::MAX, flags)?;
    }
    rings::closes(first, last);
    for fd in process::known_between(first, last) {
        let Some(known) = lookup(fd) else { continue };
        if process::before_close(fd, known) {
            continue;
        }
        // One of our own: everything before it, then go on after it.
        if fd as u32 > from {
            let _ = by_kernel(from, fd as u32 - 1, 0);
        }
        from = fd as u32 + 1;
    }
    if from <= last { by_kernel(from, last, 0) } else { Ok(0) }
}
