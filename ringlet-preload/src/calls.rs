//! Calls that move data.

use crate::cancellation::in_which;
use crate::{datagrams, next, result, set_errno};
use core::ptr::{null, null_mut};
use libc::{c_int, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};
use ringlet::reasons::Reason;
use ringlet::socket::table::{self, Socket};
use ringlet::socket::{self, Native, Way, process, splice, stream, unix, way_in, way_out};
use ringlet::thread::is_alone;
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_linux::fd;
use ringlet_linux::map::{CHUNK_BYTES, Chunk};
use ringlet_linux::sys::{self, Errno, Sys};

pub(crate) const IOV_MAX: usize = 1024;
const FIRST_PAGE: usize = 4096;
/// Beyond it lies the kernel's half of the address space, where MAP_FAILED points.
const USER_END: usize = 1 << 56;
/// KERNEL: MAX_RW_COUNT, what one call moves at most.
const CALL_MAX_BYTES: usize = 0x7fff_f000;

/// Nothing lies in the first page or in the kernel's half; the kernel says EFAULT, and so do we (a worse pointer gets a worse
/// answer).
pub(crate) fn is_nowhere<T>(pointer: *const T) -> bool {
    !(FIRST_PAGE..USER_END).contains(&(pointer as usize))
}

/// A native call, in which the thread may be cancelled: it counts if it moved data. (A process ends with its only thread.)
#[inline(always)]
fn native(call: Option<Native>, make: impl FnOnce() -> ssize_t) -> ssize_t {
    let Some(call) = call else { return make() };
    let moved = if is_alone() { make() } else { in_which(&|| call.end(), make) };
    if moved > 0 {
        call.moved();
    }
    moved
}

/// Urgent data is about to be sent natively: the kernel's counts are no measure of what was read then.
#[inline(always)]
fn native_with(call: Option<Native>, flags: c_int) -> Option<Native> {
    if flags & libc::MSG_OOB != 0
        && let Some(call) = &call
    {
        call.stay(Reason::Urgent);
    }
    call
}

pub(crate) fn checked(list: &[Buffer]) -> Sys<()> {
    let bad = |buffer: &Buffer| {
        (buffer.base as usize) < FIRST_PAGE && buffer.len != 0 || is_out_of_reach(buffer)
    };
    if list.iter().any(bad) { Err(Errno::EFAULT) } else { Ok(()) }
}

/// Receives into the program's buffers.
#[inline(always)]
unsafe fn receive(socket: &Socket, list: &[Buffer], flags: c_int) -> ssize_t {
    if list.iter().any(is_out_of_reach) {
        return result(Err(Errno::EFAULT));
    }
    // KERNEL: only TCP takes this flag as a wish to discard.
    let discard = flags & libc::MSG_TRUNC != 0 && !socket.is_unix();
    if !discard && checked(list).is_err() {
        return receive_into_nothing(socket, flags);
    }
    let nowhere = [Buffer {
        base: core::ptr::null_mut(),
        len: list.iter().fold(0usize, |sum, buffer| sum.saturating_add(buffer.len)),
    }];
    // SAFETY: the program's buffers, valid by the contract of its call (or none, when it asks to discard).
    let mut to = unsafe { Buffers::new(if discard { &nowhere } else { list }) };
    finish(socket, stream::receive(socket, &mut to, flags))
}

/// KERNEL: a bad buffer fails only when there are bytes to put into it.
#[cold]
fn receive_into_nothing(socket: &Socket, flags: c_int) -> ssize_t {
    // SAFETY: no buffers.
    let mut none = unsafe { Buffers::new(&[]) };
    if socket.is_packets() {
        // KERNEL: what was to be put there is lost.
        return match stream::receive(socket, &mut none, flags | libc::MSG_TRUNC) {
            Ok(1..) => result(Err(Errno::EFAULT)),
            other => result(other),
        };
    }
    match stream::receive(socket, &mut none, flags) {
        Ok(_) if stream::readable_bytes(socket).is_ok_and(|n| n > 0) => result(Err(Errno::EFAULT)),
        other => result(other),
    }
}

/// KERNEL: read and write refuse a buffer that reaches beyond the program's half of the address space.
fn fits(buffer: usize, len: size_t) -> bool {
    buffer.checked_add(len).is_some_and(|end| end <= USER_END)
}

/// KERNEL: the others cut the length first, and refuse before they wait.
fn is_out_of_reach(buffer: &Buffer) -> bool {
    !fits(buffer.base as usize, buffer.len.min(CALL_MAX_BYTES))
}

/// Sends from the program's buffers.
#[inline(always)]
unsafe fn send_list(socket: &Socket, list: &[Buffer], flags: c_int) -> ssize_t {
    if let Err(error) = checked(list) {
        return result(Err(error));
    }
    // SAFETY: the program's buffers, valid by the contract of its call.
    let mut from = unsafe { Buffers::new(list) };
    finish(socket, stream::send(socket, &mut from, flags))
}

#[inline(always)]
fn finish(socket: &Socket, moved: Sys<usize>) -> ssize_t {
    if let Ok(1..) = moved {
        socket::count_call(socket);
    }
    result(moved)
}

/// The program's iovec array; `None` (with errno set) if it is not one.
pub(crate) unsafe fn list<'a>(vector: *const iovec, count: usize) -> Option<&'a [Buffer]> {
    if count == 0 {
        return Some(&[]);
    }
    if count > IOV_MAX || is_nowhere(vector) {
        set_errno(if count > IOV_MAX { libc::EINVAL } else { libc::EFAULT });
        return None;
    }
    // SAFETY: the program's array of `count` entries; an iovec is a `Buffer`.
    let list: &[Buffer] = unsafe { core::slice::from_raw_parts(vector.cast(), count) };
    let total = list.iter().try_fold(0isize, |sum, buffer| sum.checked_add_unsigned(buffer.len));
    if total.is_none() {
        set_errno(libc::EINVAL);
        return None;
    }
    Some(list)
}

/// A message header's vector; `None` (with errno set) for a header that the kernel refuses.
pub(crate) unsafe fn list_of<'a>(header: &msghdr) -> Option<&'a [Buffer]> {
    if !header.msg_name.is_null() && (header.msg_namelen as i32) < 0 {
        set_errno(libc::EINVAL);
        return None;
    }
    if header.msg_iovlen > IOV_MAX {
        set_errno(libc::EMSGSIZE);
        return None;
    }
    // SAFETY: the program's vector.
    unsafe { list(header.msg_iov, header.msg_iovlen) }
}

/// The room that a program tells of for an address. KERNEL: it is asked for when the data has been taken.
pub(crate) unsafe fn room_for_name(len: *const socklen_t) -> Sys<socklen_t> {
    if is_nowhere(len) {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the program's length.
    let room = unsafe { *len };
    if (room as i32) < 0 { Err(Errno::EINVAL) } else { Ok(room) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    match way_in(fd) {
        Way::Kernel(call) => native(call, || {
            next!(c"read", fn(c_int, *mut c_void, size_t) -> ssize_t, fd, buffer, len)
        }),
        Way::Ours(_) | Way::Datagram(_) if len == 0 => 0,
        Way::Ours(_) | Way::Datagram(_) if !fits(buffer as usize, len) => {
            result(Err(Errno::EFAULT))
        }
        // SAFETY: the contract of read.
        Way::Ours(socket) => unsafe { receive(socket, &[Buffer { base: buffer.cast(), len }], 0) },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast(), len }];
            datagrams::receive(fd, socket, &list, 0, null_mut(), null_mut())
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    size: size_t,
) -> ssize_t {
    check(len, size);
    // SAFETY: passed on.
    unsafe { read(fd, buffer, len) }
}

/// What fortified programs ask: does the length fit in the buffer as the compiler knew it?
fn check(len: size_t, size: size_t) {
    if len > size {
        // SAFETY: as __chk_fail does.
        unsafe { libc::abort() };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match way_in(fd) {
        Way::Kernel(call) => native(call, || {
            next!(c"recv", fn(c_int, *mut c_void, size_t, c_int) -> ssize_t, fd, buffer, len, flags)
        }),
        // SAFETY: the contract of recv.
        Way::Ours(socket) => unsafe {
            receive(socket, &[Buffer { base: buffer.cast(), len }], flags)
        },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast(), len }];
            datagrams::receive(fd, socket, &list, flags, null_mut(), null_mut())
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
) -> ssize_t {
    check(len, size);
    // SAFETY: passed on.
    unsafe { recv(fd, buffer, len, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    match way_in(fd) {
        Way::Kernel(call) => native(call, || {
            next!(
                c"recvfrom",
                fn(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t,
                fd,
                buffer,
                len,
                flags,
                address,
                address_len
            )
        }),
        // SAFETY: the contract of recvfrom. KERNEL: TCP says that the address is empty.
        Way::Ours(socket) => unsafe {
            if address.is_null() {
                return receive(socket, &[Buffer { base: buffer.cast(), len }], flags);
            }
            let room = room_for_name(address_len);
            let mut piece = iovec { iov_base: buffer, iov_len: len };
            let mut message: msghdr = core::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
            (message.msg_name, message.msg_namelen) = (address.cast(), room.unwrap_or(0));
            let got = receive_message(socket, &raw mut message, flags);
            match room {
                _ if got < 0 => got,
                Err(error) => result(Err(error)),
                Ok(_) => {
                    *address_len = message.msg_namelen;
                    got
                }
            }
        },
        // SAFETY: the contract of recvfrom.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast(), len }];
            datagrams::receive(fd, socket, &list, flags, address, address_len)
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    check(len, size);
    // SAFETY: passed on.
    unsafe { recvfrom(fd, buffer, len, flags, address, address_len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    match way_in(fd) {
        Way::Kernel(call) => native(call, || {
            next!(c"recvmsg", fn(c_int, *mut msghdr, c_int) -> ssize_t, fd, message, flags)
        }),
        // SAFETY: the contract of recvmsg.
        Way::Ours(socket) => unsafe { receive_message(socket, message, flags) },
        Way::Datagram(_) if is_nowhere(message) => result(Err(Errno::EFAULT)),
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            datagrams::receive_message(fd, socket, &mut *message, flags)
        },
    }
}

unsafe fn receive_message(socket: &Socket, message: *mut msghdr, flags: c_int) -> ssize_t {
    if is_nowhere(message) {
        return result(Err(Errno::EFAULT));
    }
    // SAFETY: the program's message header.
    let message = unsafe { &mut *message };
    // SAFETY: its vector.
    let Some(list) = (unsafe { list_of(message) }) else { return -1 };
    if socket.is_unix() {
        if let Err(error) = checked(list) {
            return result(Err(error));
        }
        // SAFETY: its buffers.
        let mut to = unsafe { Buffers::new(list) };
        return finish(socket, unix::receive_message(socket, message, &mut to, flags));
    }
    // SAFETY: its buffers.
    let got = unsafe { receive(socket, list, flags) };
    if got >= 0 {
        message.msg_namelen = 0;
        message.msg_controllen = 0;
        message.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: libc::c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    match way_in(fd) {
        Way::Kernel(call) => native(call, || {
            next!(
                c"recvmmsg",
                fn(c_int, *mut mmsghdr, libc::c_uint, c_int, *mut libc::timespec) -> c_int,
                fd,
                messages,
                count,
                flags,
                timeout
            ) as ssize_t
        }) as c_int,
        _ if count > 0 && is_nowhere(messages) => result(Err(Errno::EFAULT)) as c_int,
        // SAFETY: the contract of recvmmsg.
        Way::Ours(socket) => unsafe {
            let one = |message: &mut msghdr, flags| receive_message(socket, message, flags);
            receive_messages(messages, count, flags, timeout, !socket.is_packets(), one)
        },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            let count = count.min(IOV_MAX as u32);
            let one = |message: &mut msghdr, flags| {
                datagrams::receive_message(fd, socket, message, flags)
            };
            receive_messages(messages, count, flags, timeout, false, one)
        },
    }
}

/// Receives messages by `one`; of a stream, the one of no bytes is the last.
unsafe fn receive_messages(
    messages: *mut mmsghdr,
    count: libc::c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
    stream: bool,
    mut one: impl FnMut(&mut msghdr, c_int) -> ssize_t,
) -> c_int {
    // SAFETY: the program's timeout, if it gave one.
    let deadline = match unsafe { crate::waits::from_timespec(timeout) } {
        Ok(timeout) => timeout.map(|ns| sys::now_ns().saturating_add(ns)),
        Err(error) => return result(Err(error)) as c_int,
    };
    let mut done = 0;
    while done < count {
        // The first one may wait, and with MSG_WAITFORONE only it.
        let wait_for_one = flags & libc::MSG_WAITFORONE != 0 && done > 0;
        let flags =
            flags & !libc::MSG_WAITFORONE | if wait_for_one { libc::MSG_DONTWAIT } else { 0 };
        // SAFETY: the program's array of `count` headers.
        let got = unsafe {
            let entry = &mut *messages.add(done as usize);
            let got = one(&mut entry.msg_hdr, flags);
            entry.msg_len = got.max(0) as libc::c_uint;
            got
        };
        if got < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        done += 1;
        if let Some(deadline) = deadline {
            // KERNEL: the time is looked at after each message, and what is left of it is told.
            let left = deadline.saturating_sub(sys::now_ns());
            // SAFETY: as above.
            unsafe { *timeout = ringlet_linux::fd::timespec(left) };
            if left == 0 {
                break;
            }
        }
        if stream && got == 0 {
            break;
        }
    }
    done as c_int
}

/// KERNEL: unlike recv, a read of no bytes does not wait for some.
unsafe fn read_list(socket: &Socket, list: &[Buffer], flags: c_int) -> ssize_t {
    if list.iter().all(|buffer| buffer.len == 0) {
        return 0;
    }
    // SAFETY: passed on.
    unsafe { receive(socket, list, flags) }
}

/// KERNEL: unlike write, a writev of no bytes sends no packet.
unsafe fn write_list(socket: &Socket, list: &[Buffer]) -> ssize_t {
    if socket.is_packets() && list.iter().all(|buffer| buffer.len == 0) {
        return 0;
    }
    // SAFETY: passed on.
    unsafe { send_list(socket, list, 0) }
}

/// preadv2 and pwritev2 with position -1 are readv and writev.
const NO_POSITION: off_t = -1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    match way_in(fd) {
        // SAFETY: the contract of preadv2.
        Way::Ours(socket) if position == NO_POSITION => unsafe {
            let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            list(vector, count as u32 as usize).map_or(-1, |list| read_list(socket, list, wait))
        },
        // SAFETY: as above.
        Way::Datagram(socket) if position == NO_POSITION => unsafe {
            let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            read_datagram(fd, socket, vector, count, wait)
        },
        Way::Ours(_) | Way::Datagram(_) => result(Err(Errno(libc::ESPIPE))),
        Way::Kernel(call) => native(call, || {
            next!(
                c"preadv2",
                fn(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t,
                fd,
                vector,
                count,
                position,
                flags
            )
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv64v2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: passed on; off_t has 64 bits here.
    unsafe { preadv2(fd, vector, count, position, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    match way_out(fd) {
        // SAFETY: the contract of pwritev2.
        Way::Ours(socket) if position == NO_POSITION => unsafe {
            list(vector, count as u32 as usize).map_or(-1, |list| write_list(socket, list))
        },
        // SAFETY: as above.
        Way::Datagram(socket) if position == NO_POSITION => unsafe {
            write_datagram(fd, socket, vector, count)
        },
        Way::Ours(_) | Way::Datagram(_) => result(Err(Errno(libc::ESPIPE))),
        Way::Kernel(call) => native(call, || {
            next!(
                c"pwritev2",
                fn(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t,
                fd,
                vector,
                count,
                position,
                flags
            )
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev64v2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: passed on; off_t has 64 bits here.
    unsafe { pwritev2(fd, vector, count, position, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    match way_in(fd) {
        Way::Kernel(call) => native(call, || {
            next!(c"readv", fn(c_int, *const iovec, c_int) -> ssize_t, fd, vector, count)
        }),
        // SAFETY: the contract of readv.
        Way::Ours(socket) => unsafe {
            list(vector, count as u32 as usize).map_or(-1, |list| read_list(socket, list, 0))
        },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe { read_datagram(fd, socket, vector, count, 0) },
    }
}

/// KERNEL: a read of no bytes takes no datagram.
unsafe fn read_datagram(
    fd: c_int,
    socket: &'static Socket,
    vector: *const iovec,
    count: c_int,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program's vector.
    match unsafe { list(vector, count as u32 as usize) } {
        None => -1,
        Some(list) if list.iter().all(|buffer| buffer.len == 0) => 0,
        // SAFETY: its buffers.
        Some(list) => unsafe {
            datagrams::receive(fd, socket, list, flags, null_mut(), null_mut())
        },
    }
}

unsafe fn write_datagram(
    fd: c_int,
    socket: &'static Socket,
    vector: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the program's vector.
    let Some(list) = (unsafe { list(vector, count as u32 as usize) }) else { return -1 };
    // SAFETY: its buffers.
    unsafe { datagrams::send(socket, list, 0, null(), 0, false) }.unwrap_or_else(|| {
        next!(c"writev", fn(c_int, *const iovec, c_int) -> ssize_t, fd, vector, count)
    })
}

/// What libc's writes without our `write`: polls that look away for a moment are to hear of it (`ringlet::socket::asked`).
#[unsafe(no_mangle)]
pub extern "C" fn eventfd_write(fd: c_int, value: u64) -> c_int {
    // SAFETY: a local of eight bytes.
    let written = unsafe { write(fd, (&raw const value).cast(), size_of::<u64>()) };
    if written == size_of::<u64>() as ssize_t { 0 } else { -1 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    match way_out(fd) {
        Way::Kernel(call) => native(call, || {
            next!(c"write", fn(c_int, *const c_void, size_t) -> ssize_t, fd, buffer, len)
        }),
        Way::Ours(_) if !fits(buffer as usize, len) => result(Err(Errno::EFAULT)),
        // SAFETY: the contract of write.
        Way::Ours(socket) => unsafe {
            send_list(socket, &[Buffer { base: buffer.cast_mut().cast(), len }], 0)
        },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast_mut().cast(), len }];
            let sent = if fits(buffer as usize, len) {
                datagrams::send(socket, &list, 0, null(), 0, false)
            } else {
                None
            };
            sent.unwrap_or_else(|| {
                next!(c"write", fn(c_int, *const c_void, size_t) -> ssize_t, fd, buffer, len)
            })
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    match way_out(fd) {
        Way::Kernel(call) => native(call, || {
            next!(c"writev", fn(c_int, *const iovec, c_int) -> ssize_t, fd, vector, count)
        }),
        // SAFETY: the contract of writev.
        Way::Ours(socket) => unsafe {
            list(vector, count as u32 as usize).map_or(-1, |list| write_list(socket, list))
        },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe { write_datagram(fd, socket, vector, count) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match way_out(fd) {
        Way::Kernel(call) => native(native_with(call, flags), || {
            next!(
                c"send",
                fn(c_int, *const c_void, size_t, c_int) -> ssize_t,
                fd,
                buffer,
                len,
                flags
            )
        }),
        // SAFETY: the contract of send.
        Way::Ours(socket) => unsafe {
            send_list(socket, &[Buffer { base: buffer.cast_mut().cast(), len }], flags)
        },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast_mut().cast(), len }];
            datagrams::send(socket, &list, flags, null(), 0, false).unwrap_or_else(|| {
                next!(
                    c"send",
                    fn(c_int, *const c_void, size_t, c_int) -> ssize_t,
                    fd,
                    buffer,
                    len,
                    flags
                )
            })
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> ssize_t {
    match way_out(fd) {
        Way::Kernel(call) => native(native_with(call, flags), || {
            next!(
                c"sendto",
                fn(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t,
                fd,
                buffer,
                len,
                flags,
                address,
                address_len
            )
        }),
        // KERNEL: a connected TCP socket ignores the address, and so do packets; a Unix stream does not.
        Way::Ours(socket) if takes_no_address(socket) && !address.is_null() && address_len != 0 => {
            result(Err(Errno(libc::EISCONN)))
        }
        Way::Ours(_) if !address.is_null() && address_len != 0 && is_nowhere(address) => {
            result(Err(Errno::EFAULT))
        }
        // SAFETY: the contract of sendto.
        Way::Ours(socket) => unsafe {
            send_list(socket, &[Buffer { base: buffer.cast_mut().cast(), len }], flags)
        },
        // SAFETY: the contract of sendto.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast_mut().cast(), len }];
            datagrams::send(socket, &list, flags, address, address_len, false).unwrap_or_else(
                || {
                    next!(
                        c"sendto",
                        fn(
                            c_int,
                            *const c_void,
                            size_t,
                            c_int,
                            *const sockaddr,
                            socklen_t,
                        ) -> ssize_t,
                        fd,
                        buffer,
                        len,
                        flags,
                        address,
                        address_len
                    )
                },
            )
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    match way_out(fd) {
        Way::Kernel(call) => {
            // SAFETY: the program's message header.
            unsafe { let_go_of_passed(fd, message) };
            let call = native_with(call, flags);
            native(call, || {
                next!(c"sendmsg", fn(c_int, *const msghdr, c_int) -> ssize_t, fd, message, flags)
            })
        }
        // SAFETY: the contract of sendmsg.
        Way::Ours(socket) => unsafe { send_message(socket, message, flags) },
        // SAFETY: as above.
        Way::Datagram(socket) => unsafe {
            datagrams::send_message(socket, message, flags).unwrap_or_else(|| {
                next!(c"sendmsg", fn(c_int, *const msghdr, c_int) -> ssize_t, fd, message, flags)
            })
        },
    }
}

unsafe fn send_message(socket: &Socket, message: *const msghdr, flags: c_int) -> ssize_t {
    if is_nowhere(message) {
        return result(Err(Errno::EFAULT));
    }
    // SAFETY: the program's message header.
    let header = unsafe { &*message };
    // SAFETY: its vector.
    let Some(list) = (unsafe { list_of(header) }) else { return -1 };
    if header.msg_namelen != 0 && !header.msg_name.is_null() && is_nowhere(header.msg_name) {
        return result(Err(Errno::EFAULT));
    }
    if socket.is_unix() {
        if takes_no_address(socket) && !header.msg_name.is_null() && header.msg_namelen != 0 {
            return result(Err(Errno(libc::EISCONN)));
        }
        if unix::has_control(header) {
            // SAFETY: as above.
            unsafe { let_go_of_passed(socket.fd(), message) };
            // SAFETY: its buffers.
            let mut from = unsafe { Buffers::new(list) };
            return finish(socket, stream::send_by(socket, &mut from, flags, Some(header)));
        }
    }
    // SAFETY: its buffers.
    unsafe { send_list(socket, list, flags) }
}

fn takes_no_address(socket: &Socket) -> bool {
    socket.is_unix() && !socket.is_packets()
}

/// Descriptors that may leave for another process, if the call is on a Unix socket: their connections stay on the kernel.
unsafe fn let_go_of_passed(fd: c_int, message: *const msghdr) {
    if is_nowhere(message) || table::socket(fd).is_some_and(|socket| !socket.is_unix()) {
        return;
    }
    // SAFETY: the program's message header and control messages, walked as the CMSG macros do.
    unsafe {
        if is_nowhere((*message).msg_control) {
            return;
        }
        let mut control = libc::CMSG_FIRSTHDR(message);
        while !control.is_null() {
            if (*control).cmsg_level == libc::SOL_SOCKET && (*control).cmsg_type == libc::SCM_RIGHTS
            {
                let bytes =
                    ((*control).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds: *const c_int = libc::CMSG_DATA(control).cast();
                for i in 0..bytes / size_of::<c_int>() {
                    process::given_away(fds.add(i).read_unaligned(), Reason::Passed);
                }
            }
            control = libc::CMSG_NXTHDR(message, control);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: libc::c_uint,
    flags: c_int,
) -> c_int {
    match way_out(fd) {
        Way::Kernel(call) => {
            for i in 0..if is_nowhere(messages) { 0 } else { count.min(IOV_MAX as u32) } {
                // SAFETY: the program's array of `count` headers.
                unsafe { let_go_of_passed(fd, &raw const (*messages.add(i as usize)).msg_hdr) };
            }
            native(native_with(call, flags), || {
                next!(
                    c"sendmmsg",
                    fn(c_int, *mut mmsghdr, libc::c_uint, c_int) -> c_int,
                    fd,
                    messages,
                    count,
                    flags
                ) as ssize_t
            }) as c_int
        }
        _ if count > 0 && is_nowhere(messages) => result(Err(Errno::EFAULT)) as c_int,
        // SAFETY: the contract of sendmmsg.
        Way::Datagram(socket) => unsafe {
            datagrams::send_many(fd, socket, messages, count, flags)
        },
        Way::Ours(socket) => {
            let mut done = 0;
            while done < count.min(IOV_MAX as u32) {
                // SAFETY: the program's array of `count` headers.
                let sent = unsafe {
                    let entry = &mut *messages.add(done as usize);
                    let sent = send_message(socket, &entry.msg_hdr, flags);
                    entry.msg_len = sent.max(0) as libc::c_uint;
                    sent
                };
                if sent < 0 {
                    return if done > 0 { done as c_int } else { -1 };
                }
                done += 1;
            }
            done as c_int
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    let way = match way_out(to) {
        // What the kernel reads, it sends; and how it divides that into messages is its own affair.
        Way::Datagram(socket) => {
            socket::keep_on_kernel(socket, Reason::Splice);
            Way::Kernel(None)
        }
        Way::Ours(socket) if socket.is_packets() => {
            socket::keep_on_kernel(socket, Reason::Splice);
            Way::Kernel(None)
        }
        way => way,
    };
    match way {
        Way::Kernel(call) => {
            let reads = match read_by_kernel(from) {
                // KERNEL: the one thing that can be sent from a connection to is a pipe.
                Way::Ours(socket) if offset.is_null() && count > 0 && fd::is_pipe_to_write(to) => {
                    return finish(socket, splice::out(socket, to, count, 0));
                }
                Way::Kernel(reads) => reads,
                _ => None,
            };
            native(call.or(reads), || {
                next!(
                    c"sendfile",
                    fn(c_int, c_int, *mut off_t, size_t) -> ssize_t,
                    to,
                    from,
                    offset,
                    count
                )
            })
        }
        // SAFETY: the contract of sendfile.
        Way::Ours(socket) => unsafe {
            let Some(chunk) = Chunk::take() else { return result(Err(Errno::ENOMEM)) };
            in_which(&|| chunk.give_back(), || send_file(socket, &chunk, from, offset, count))
        },
        Way::Datagram(_) => unreachable!("sent to the kernel above"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: passed on; off_t has 64 bits here.
    unsafe { sendfile(to, from, offset, count) }
}

/// Only what was sent counts as read: the file's own position is moved (or `offset` stored) by that much.
unsafe fn send_file(
    socket: &Socket,
    chunk: &Chunk,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    let mut position = if offset.is_null() {
        // SAFETY: no memory is passed.
        unsafe { libc::lseek(from, 0, libc::SEEK_CUR) }
    } else {
        // SAFETY: the program's offset.
        unsafe { *offset }
    };
    if position < 0 && !offset.is_null() {
        set_errno(libc::EINVAL);
        return -1;
    }
    if position < 0 {
        // No file (EBADF), or one without a position, which the kernel refuses otherwise.
        // SAFETY: libc's errno of this thread.
        if unsafe { *libc::__errno_location() } == libc::ESPIPE {
            set_errno(libc::EINVAL);
        }
        return -1;
    }
    let mut total = 0usize;
    while total < count {
        let wanted = CHUNK_BYTES.min(count - total);
        // SAFETY: our own buffer.
        let got = unsafe { libc::pread(from, chunk.base().cast(), wanted, position) };
        if got <= 0 {
            if got < 0 && total == 0 {
                return -1;
            }
            break;
        }
        // SAFETY: our own buffer.
        let sent =
            unsafe { send_list(socket, &[Buffer { base: chunk.base(), len: got as usize }], 0) };
        if sent < 0 {
            if total == 0 {
                return -1;
            }
            break;
        }
        total += sent as usize;
        position += sent as off_t;
        if sent < got {
            break;
        }
    }
    if offset.is_null() {
        // SAFETY: no memory is passed.
        unsafe { libc::lseek(from, position, libc::SEEK_SET) };
    } else {
        // SAFETY: the program's offset.
        unsafe { *offset = position };
    }
    total as ssize_t
}

/// What is read by a call that only the kernel knows to serve: a stream in the ring, where it has to be served here.
fn read_by_kernel(from: c_int) -> Way {
    match way_in(from) {
        Way::Ours(socket) if !socket.is_packets() => Way::Ours(socket),
        Way::Ours(socket) | Way::Datagram(socket) => {
            socket::keep_on_kernel(socket, Reason::Splice);
            Way::Kernel(None)
        }
        way => way,
    }
}

const SPLICE_FLAGS: libc::c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut libc::loff_t,
    to: c_int,
    to_offset: *mut libc::loff_t,
    len: size_t,
    flags: libc::c_uint,
) -> ssize_t {
    let make = || {
        next!(
            c"splice",
            fn(c_int, *mut libc::loff_t, c_int, *mut libc::loff_t, size_t, libc::c_uint) -> ssize_t,
            from,
            from_offset,
            to,
            to_offset,
            len,
            flags
        )
    };
    let call = match read_by_kernel(from) {
        Way::Ours(socket) => {
            let served = from_offset.is_null() && to_offset.is_null() && flags & !SPLICE_FLAGS == 0;
            // Anything else the kernel refuses, without a look at the connection.
            return match served && len > 0 && fd::is_pipe_to_write(to) {
                true => finish(socket, splice::out(socket, to, len, flags)),
                false => make(),
            };
        }
        Way::Kernel(call @ Some(_)) => call,
        _ => match way_out(to) {
            Way::Ours(socket) if !socket.is_packets() => match splice::aside(socket) {
                Ok(call) => Some(call),
                Err(error) => return result(Err(error)),
            },
            Way::Ours(socket) | Way::Datagram(socket) => {
                socket::keep_on_kernel(socket, Reason::Splice);
                None
            }
            Way::Kernel(call) => call,
        },
    };
    native(call, make)
}
