//! Calls that move data.

use crate::{Edge, args, datagrams};
use core::ptr::{null, null_mut};
use libc::{c_int, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t};
use ringlet::reasons::Reason;
use ringlet::socket::table::{self, Socket};
use ringlet::socket::transfer::{self, events, splice};
use ringlet::socket::{self, Native, Way, carrier, process, unix, way_in, way_out};
use ringlet::thread::is_alone;
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_linux::fd;
use ringlet_linux::map::{CHUNK_BYTES, Chunk};
use ringlet_linux::sys::{self, CALL_MAX_BYTES, Errno, Sys};
use ringlet_linux::unix::{self as kernel, FromKernel};

pub const IOV_MAX: usize = 1024;
const FIRST_PAGE: usize = 4096;
/// Beyond it lies the kernel's half of the address space, where MAP_FAILED points.
const USER_END: usize = 1 << 56;

/// Nothing lies in the first page or in the kernel's half; the kernel says EFAULT, and so do we (a worse pointer gets a worse
/// answer).
pub fn is_nowhere<T>(pointer: *const T) -> bool {
    !(FIRST_PAGE..USER_END).contains(&(pointer as usize))
}

/// A native call, in which the thread may be cancelled: it counts if it moved data. (A process ends with its only thread.)
#[inline(always)]
fn native<E: Edge>(edge: &E, call: Option<Native>) -> Sys<usize> {
    let Some(call) = call else { return edge.pass_on() };
    let pass_on = || edge.pass_on();
    let moved = if is_alone() { pass_on() } else { E::in_which(&|| call.end(), pass_on) };
    if let Ok(1..) = moved {
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
unsafe fn receive(socket: &Socket, list: &[Buffer], flags: c_int) -> Sys<usize> {
    // SAFETY: asks for the program's buffers, which the caller vouches for.
    unsafe { receive_by(socket, list, flags, &mut FromKernel::new(None)) }
}

/// The same; `from` says how the kernel's part is received.
#[inline(always)]
unsafe fn receive_by(
    socket: &Socket,
    list: &[Buffer],
    flags: c_int,
    from: &mut FromKernel,
) -> Sys<usize> {
    if list.iter().any(is_out_of_reach) {
        return Err(Errno::EFAULT);
    }
    let discard = flags & libc::MSG_TRUNC != 0 && carrier::facts(socket).discards;
    if !discard && checked(list).is_err() {
        return receive_into_nothing(socket, flags);
    }
    let nowhere = [Buffer {
        base: core::ptr::null_mut(),
        len: list.iter().fold(0usize, |sum, buffer| sum.saturating_add(buffer.len)),
    }];
    // SAFETY: the program's buffers, valid by the contract of its call (or none, when it asks to discard).
    let mut to = unsafe { Buffers::new(if discard { &nowhere } else { list }) };
    finish(socket, transfer::receive_by(socket, &mut to, flags, from))
}

/// KERNEL: a bad buffer fails only when there are bytes to put into it.
#[cold]
fn receive_into_nothing(socket: &Socket, flags: c_int) -> Sys<usize> {
    // SAFETY: no buffers.
    let mut none = unsafe { Buffers::new(&[]) };
    if carrier::facts(socket).has_boundaries {
        // KERNEL: what was to be put there is lost.
        return match transfer::receive(socket, &mut none, flags | libc::MSG_TRUNC) {
            Ok(1..) => Err(Errno::EFAULT),
            other => other,
        };
    }
    match transfer::receive(socket, &mut none, flags) {
        Ok(_) if events::readable_bytes(socket).is_ok_and(|n| n > 0) => Err(Errno::EFAULT),
        other => other,
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
unsafe fn send_list(socket: &Socket, list: &[Buffer], flags: c_int) -> Sys<usize> {
    checked(list)?;
    // SAFETY: the program's buffers, valid by the contract of its call.
    let mut from = unsafe { Buffers::new(list) };
    finish(socket, transfer::send(socket, &mut from, flags))
}

#[inline(always)]
fn finish(socket: &Socket, moved: Sys<usize>) -> Sys<usize> {
    if let Ok(1..) = moved {
        socket::count_call(socket);
    }
    moved
}

/// The program's iovec array; an error if it is not one.
pub(crate) unsafe fn list<'a>(vector: *const iovec, count: usize) -> Sys<&'a [Buffer]> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > IOV_MAX || is_nowhere(vector) {
        return Err(if count > IOV_MAX { Errno::EINVAL } else { Errno::EFAULT });
    }
    // SAFETY: the program's array of `count` entries; an iovec is a `Buffer`.
    let list: &[Buffer] = unsafe { core::slice::from_raw_parts(vector.cast(), count) };
    let total = list.iter().try_fold(0isize, |sum, buffer| sum.checked_add_unsigned(buffer.len));
    if total.is_none() {
        return Err(Errno::EINVAL);
    }
    Ok(list)
}

/// A message header's vector; an error for a header that the kernel refuses.
pub(crate) unsafe fn list_of<'a>(header: &msghdr) -> Sys<&'a [Buffer]> {
    if !header.msg_name.is_null() && (header.msg_namelen as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    if header.msg_iovlen > IOV_MAX {
        return Err(Errno(libc::EMSGSIZE));
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

pub unsafe fn read<E: Edge>(edge: &E, fd: c_int, buffer: *mut c_void, len: size_t) -> Sys<usize> {
    match way_in(fd) {
        Way::Kernel(call) => native(edge, call),
        Way::Ours(_) | Way::Datagram(_) if len == 0 => Ok(0),
        Way::Ours(_) | Way::Datagram(_) if !fits(buffer as usize, len) => Err(Errno::EFAULT),
        // SAFETY: the contract of read.
        Way::Ours(socket) => unsafe { receive(socket, &[Buffer { base: buffer.cast(), len }], 0) },
        // SAFETY: the contract of read: `len` bytes at `buffer` are the program's to fill.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast(), len }];
            datagrams::receive::<E>(fd, socket, &list, 0, null_mut(), null_mut())
        },
    }
}

pub unsafe fn recvfrom<E: Edge>(
    edge: &E,
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> Sys<usize> {
    match way_in(fd) {
        Way::Kernel(call) => native(edge, call),
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
            let got = receive_message(socket, &raw mut message, flags, Asked::Name);
            if got.is_ok() {
                room?;
                *address_len = message.msg_namelen;
            }
            got
        },
        // SAFETY: the contract of recvfrom.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast(), len }];
            datagrams::receive::<E>(fd, socket, &list, flags, address, address_len)
        },
    }
}

pub unsafe fn recvmsg<E: Edge>(
    edge: &E,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> Sys<usize> {
    match way_in(fd) {
        Way::Kernel(call) => native(edge, call),
        // SAFETY: the contract of recvmsg.
        Way::Ours(socket) => unsafe { receive_message(socket, message, flags, Asked::Message) },
        Way::Datagram(_) if is_nowhere(message) => Err(Errno::EFAULT),
        // SAFETY: the contract of recvmsg: a header, and what it points to, of the program's.
        Way::Datagram(socket) => unsafe {
            datagrams::receive_message::<E>(fd, socket, &mut *message, flags)
        },
    }
}

/// By which call a program has asked for a message: a filter that knows the program may forbid the other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// recvfrom, which has room for an address.
    Name,
    /// recvmsg, which tells of control data too, if only that there was no room for it.
    Message,
}

unsafe fn receive_message(
    socket: &Socket,
    message: *mut msghdr,
    flags: c_int,
    asked: Asked,
) -> Sys<usize> {
    if is_nowhere(message) {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the program's message header.
    let message = unsafe { &mut *message };
    if asked == Asked::Message && flags & carrier::facts(socket).kernels_flags != 0 {
        // With all that it has room for.
        return finish(socket, kernel::receive_message(socket.fd(), message, flags));
    }
    // SAFETY: its vector.
    let list = unsafe { list_of(message) }?;
    let with_control = asked == Asked::Message;
    if carrier::facts(socket).has_messages {
        checked(list)?;
        // SAFETY: its buffers.
        let mut to = unsafe { Buffers::new(list) };
        let got = unix::receive_message(socket, message, &mut to, flags, with_control);
        return finish(socket, got);
    }
    let header = *message;
    let mut from = FromKernel::new(with_control.then_some(&header));
    // SAFETY: its buffers.
    let got = unsafe { receive_by(socket, list, flags, &mut from) };
    if got.is_ok() {
        message.msg_namelen = 0;
        message.msg_controllen = from.control_bytes;
        message.msg_flags = from.flags | flags & libc::MSG_CMSG_CLOEXEC;
    }
    got
}

pub unsafe fn recvmmsg<E: Edge>(
    edge: &E,
    fd: c_int,
    messages: *mut mmsghdr,
    count: libc::c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> Sys<usize> {
    match way_in(fd) {
        Way::Kernel(call) => native(edge, call),
        _ if count > 0 && is_nowhere(messages) => Err(Errno::EFAULT),
        // SAFETY: the contract of recvmmsg.
        Way::Ours(socket) => unsafe {
            let one = |message: &mut msghdr, flags| {
                receive_message(socket, message, flags, Asked::Message)
            };
            receive_messages(
                messages,
                count,
                flags,
                timeout,
                !carrier::facts(socket).has_boundaries,
                one,
            )
        },
        // SAFETY: the contract of recvmmsg: `count` headers of the program's.
        Way::Datagram(socket) => unsafe {
            let count = count.min(IOV_MAX as u32);
            let one = |message: &mut msghdr, flags| {
                datagrams::receive_message::<E>(fd, socket, message, flags)
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
    mut one: impl FnMut(&mut msghdr, c_int) -> Sys<usize>,
) -> Sys<usize> {
    // SAFETY: the program's timeout, if it gave one.
    let timeout_ns = unsafe { crate::waits::from_timespec(timeout) }?;
    let deadline = timeout_ns.map(|ns| sys::now_ns().saturating_add(ns));
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
            entry.msg_len = got.unwrap_or(0) as libc::c_uint;
            got
        };
        if got.is_err() {
            return if done > 0 { Ok(done as usize) } else { got };
        }
        done += 1;
        if let Some(deadline) = deadline {
            // KERNEL: the time is looked at after each message, and what is left of it is told.
            let left = deadline.saturating_sub(sys::now_ns());
            // SAFETY: recvmmsg's time is the program's to read and to write, and is there (it gave the deadline).
            unsafe { *timeout = ringlet_linux::fd::timespec(left) };
            if left == 0 {
                break;
            }
        }
        if stream && got == Ok(0) {
            break;
        }
    }
    Ok(done as usize)
}

/// KERNEL: unlike recv, a read of no bytes does not wait for some.
unsafe fn read_list(socket: &Socket, list: &[Buffer], flags: c_int) -> Sys<usize> {
    if list.iter().all(|buffer| buffer.len == 0) {
        return Ok(0);
    }
    // SAFETY: asks for the program's buffers, which the caller vouches for.
    unsafe { receive(socket, list, flags) }
}

/// KERNEL: unlike write, a writev of no bytes sends no packet.
unsafe fn write_list(socket: &Socket, list: &[Buffer]) -> Sys<usize> {
    if carrier::facts(socket).has_boundaries && list.iter().all(|buffer| buffer.len == 0) {
        return Ok(0);
    }
    // SAFETY: asks for the program's buffers, which the caller vouches for.
    unsafe { send_list(socket, list, 0) }
}

/// preadv2 and pwritev2 with position -1 are readv and writev.
const NO_POSITION: off_t = -1;

pub unsafe fn preadv2<E: Edge>(
    edge: &E,
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> Sys<usize> {
    match way_in(fd) {
        // SAFETY: the contract of preadv2.
        Way::Ours(socket) if position == NO_POSITION => unsafe {
            let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            read_list(socket, list(vector, count as u32 as usize)?, wait)
        },
        // SAFETY: the contract of preadv2: `count` vectors of the program's.
        Way::Datagram(socket) if position == NO_POSITION => unsafe {
            let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            read_datagram::<E>(fd, socket, vector, count, wait)
        },
        Way::Ours(_) | Way::Datagram(_) => Err(Errno(libc::ESPIPE)),
        Way::Kernel(call) => native(edge, call),
    }
}

pub unsafe fn pwritev2<E: Edge>(
    edge: &E,
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
) -> Sys<usize> {
    match way_out(fd) {
        // SAFETY: the contract of pwritev2.
        Way::Ours(socket) if position == NO_POSITION => unsafe {
            write_list(socket, list(vector, count as u32 as usize)?)
        },
        // SAFETY: the contract of pwritev2: `count` vectors of the program's.
        Way::Datagram(socket) if position == NO_POSITION => unsafe {
            write_datagram(edge, socket, vector, count)
        },
        Way::Ours(_) | Way::Datagram(_) => Err(Errno(libc::ESPIPE)),
        Way::Kernel(call) => native(edge, call),
    }
}

pub unsafe fn readv<E: Edge>(
    edge: &E,
    fd: c_int,
    vector: *const iovec,
    count: c_int,
) -> Sys<usize> {
    match way_in(fd) {
        Way::Kernel(call) => native(edge, call),
        // SAFETY: the contract of readv.
        Way::Ours(socket) => unsafe { read_list(socket, list(vector, count as u32 as usize)?, 0) },
        // SAFETY: the contract of readv: `count` vectors of the program's.
        Way::Datagram(socket) => unsafe { read_datagram::<E>(fd, socket, vector, count, 0) },
    }
}

/// KERNEL: a read of no bytes takes no datagram.
unsafe fn read_datagram<E: Edge>(
    fd: c_int,
    socket: &'static Socket,
    vector: *const iovec,
    count: c_int,
    flags: c_int,
) -> Sys<usize> {
    // SAFETY: the program's vector.
    match unsafe { list(vector, count as u32 as usize) }? {
        list if list.iter().all(|buffer| buffer.len == 0) => Ok(0),
        // SAFETY: its buffers.
        list => unsafe { datagrams::receive::<E>(fd, socket, list, flags, null_mut(), null_mut()) },
    }
}

unsafe fn write_datagram<E: Edge>(
    edge: &E,
    socket: &'static Socket,
    vector: *const iovec,
    count: c_int,
) -> Sys<usize> {
    // SAFETY: the program's vector.
    let list = unsafe { list(vector, count as u32 as usize) }?;
    // SAFETY: its buffers.
    unsafe { datagrams::send(socket, list, 0, null(), 0, false) }.unwrap_or_else(|| edge.pass_on())
}

pub unsafe fn write<E: Edge>(
    edge: &E,
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
) -> Sys<usize> {
    match way_out(fd) {
        Way::Kernel(call) => native(edge, call),
        Way::Ours(_) if !fits(buffer as usize, len) => Err(Errno::EFAULT),
        // SAFETY: the contract of write.
        Way::Ours(socket) => unsafe {
            send_list(socket, &[Buffer { base: buffer.cast_mut().cast(), len }], 0)
        },
        // SAFETY: the contract of write: `len` bytes at `buffer` may be read.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast_mut().cast(), len }];
            let sent = if fits(buffer as usize, len) {
                datagrams::send(socket, &list, 0, null(), 0, false)
            } else {
                None
            };
            sent.unwrap_or_else(|| edge.pass_on())
        },
    }
}

pub unsafe fn writev<E: Edge>(
    edge: &E,
    fd: c_int,
    vector: *const iovec,
    count: c_int,
) -> Sys<usize> {
    match way_out(fd) {
        Way::Kernel(call) => native(edge, call),
        // SAFETY: the contract of writev.
        Way::Ours(socket) => unsafe { write_list(socket, list(vector, count as u32 as usize)?) },
        // SAFETY: the contract of writev: `count` vectors of the program's.
        Way::Datagram(socket) => unsafe { write_datagram(edge, socket, vector, count) },
    }
}

pub unsafe fn sendto<E: Edge>(
    edge: &E,
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> Sys<usize> {
    match way_out(fd) {
        Way::Kernel(call) => native(edge, native_with(call, flags)),
        // KERNEL: a connected TCP socket ignores the address, and so do packets; a Unix stream does not.
        Way::Ours(socket)
            if carrier::facts(socket).refuses_address && !address.is_null() && address_len != 0 =>
        {
            Err(Errno(libc::EISCONN))
        }
        Way::Ours(_) if !address.is_null() && address_len != 0 && is_nowhere(address) => {
            Err(Errno::EFAULT)
        }
        Way::Ours(socket) if is_told_of(socket, flags) => {
            let args = args!(socket.fd(), buffer, len, flags, 0, 0);
            send_aside::<E>(socket, flags, libc::SYS_sendto, args)
        }
        // SAFETY: the contract of sendto.
        Way::Ours(socket) => unsafe {
            send_list(socket, &[Buffer { base: buffer.cast_mut().cast(), len }], flags)
        },
        // SAFETY: the contract of sendto.
        Way::Datagram(socket) => unsafe {
            let list = [Buffer { base: buffer.cast_mut().cast(), len }];
            datagrams::send(socket, &list, flags, address, address_len, false)
                .unwrap_or_else(|| edge.pass_on())
        },
    }
}

pub unsafe fn sendmsg<E: Edge>(
    edge: &E,
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> Sys<usize> {
    match way_out(fd) {
        Way::Kernel(call) => {
            // SAFETY: the program's message header.
            unsafe { let_go_of_passed(fd, message) };
            native(edge, native_with(call, flags))
        }
        // SAFETY: the contract of sendmsg.
        Way::Ours(socket) => unsafe { send_message::<E>(socket, message, flags) },
        // SAFETY: the contract of sendmsg: a header, and what it points to, of the program's.
        Way::Datagram(socket) => unsafe {
            datagrams::send_message(socket, message, flags).unwrap_or_else(|| edge.pass_on())
        },
    }
}

/// Should the kernel have the program's call whole? It tells of what it sends by buffers of the program's once for each call.
#[inline(always)]
fn is_told_of(socket: &Socket, flags: c_int) -> bool {
    flags & (libc::MSG_ZEROCOPY | libc::MSG_OOB) == libc::MSG_ZEROCOPY
        && socket.end().barred.is()
        && !carrier::facts(socket).has_messages
}

/// A send that goes to the kernel as the program has made it.
fn send_aside<E: Edge>(
    socket: &'static Socket,
    flags: c_int,
    number: i64,
    args: [usize; 6],
) -> Sys<usize> {
    let urgent = flags & libc::MSG_OOB != 0;
    let reason = if urgent { Reason::Urgent } else { Reason::Ancillary };
    let call = splice::aside(socket, flags & libc::MSG_DONTWAIT == 0, reason)?;
    // SAFETY: the program's call.
    let send = || unsafe { E::call(number, args) };
    let sent = if is_alone() { send() } else { E::in_which(&|| call.end(), send) };
    if let Ok(1..) = sent {
        call.moved();
    }
    sent
}

unsafe fn send_message<E: Edge>(
    socket: &'static Socket,
    message: *const msghdr,
    flags: c_int,
) -> Sys<usize> {
    if is_nowhere(message) {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the program's message header.
    let header = unsafe { &*message };
    // SAFETY: its vector.
    let list = unsafe { list_of(header) }?;
    if header.msg_namelen != 0 && !header.msg_name.is_null() && is_nowhere(header.msg_name) {
        return Err(Errno::EFAULT);
    }
    if carrier::facts(socket).has_messages {
        if carrier::facts(socket).refuses_address
            && !header.msg_name.is_null()
            && header.msg_namelen != 0
        {
            return Err(Errno(libc::EISCONN));
        }
        if unix::has_control(header) {
            // SAFETY: asks for the program's message header, which `header` was read from.
            unsafe { let_go_of_passed(socket.fd(), message) };
            // SAFETY: its buffers.
            let mut from = unsafe { Buffers::new(list) };
            return finish(socket, transfer::send_by(socket, &mut from, flags, Some(header)));
        }
    } else if unix::has_control(header) || is_told_of(socket, flags) {
        // KERNEL: TCP is asked so for a time stamp of this message alone, among others.
        let args = args!(socket.fd(), message, flags);
        return send_aside::<E>(socket, flags, libc::SYS_sendmsg, args);
    }
    // SAFETY: its buffers.
    unsafe { send_list(socket, list, flags) }
}

/// Descriptors that may leave for another process, if the call is on a Unix socket: their connections stay on the kernel.
unsafe fn let_go_of_passed(fd: c_int, message: *const msghdr) {
    if is_nowhere(message)
        || table::socket(fd).is_some_and(|socket| !carrier::facts(socket).has_messages)
    {
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

pub unsafe fn sendmmsg<E: Edge>(
    edge: &E,
    fd: c_int,
    messages: *mut mmsghdr,
    count: libc::c_uint,
    flags: c_int,
) -> Sys<usize> {
    match way_out(fd) {
        Way::Kernel(call) => {
            for i in 0..if is_nowhere(messages) { 0 } else { count.min(IOV_MAX as u32) } {
                // SAFETY: the program's array of `count` headers.
                unsafe { let_go_of_passed(fd, &raw const (*messages.add(i as usize)).msg_hdr) };
            }
            native(edge, native_with(call, flags))
        }
        _ if count > 0 && is_nowhere(messages) => Err(Errno::EFAULT),
        // SAFETY: the contract of sendmmsg.
        Way::Datagram(socket) => unsafe {
            datagrams::send_many::<E>(fd, socket, messages, count, flags)
        },
        Way::Ours(socket) => {
            let mut done = 0;
            while done < count.min(IOV_MAX as u32) {
                // SAFETY: the program's array of `count` headers.
                let sent = unsafe {
                    let entry = &mut *messages.add(done as usize);
                    let sent = send_message::<E>(socket, &entry.msg_hdr, flags);
                    entry.msg_len = sent.unwrap_or(0) as libc::c_uint;
                    sent
                };
                if sent.is_err() {
                    return if done > 0 { Ok(done as usize) } else { sent };
                }
                done += 1;
            }
            Ok(done as usize)
        }
    }
}

pub unsafe fn sendfile<E: Edge>(
    edge: &E,
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> Sys<usize> {
    let way = match way_out(to) {
        // What the kernel reads, it sends; and how it divides that into messages is its own affair.
        Way::Datagram(socket) => {
            socket::keep_on_kernel(socket, Reason::Splice);
            Way::Kernel(None)
        }
        Way::Ours(socket) if carrier::facts(socket).has_boundaries => {
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
            native(edge, call.or(reads))
        }
        // SAFETY: the contract of sendfile.
        Way::Ours(socket) => unsafe {
            let Some(chunk) = Chunk::take() else { return Err(Errno::ENOMEM) };
            E::in_which(&|| chunk.give_back(), || {
                send_file::<E>(socket, &chunk, from, offset, count)
            })
        },
        Way::Datagram(_) => unreachable!("sent to the kernel above"),
    }
}

/// Only what was sent counts as read: the file's own position is moved (or `offset` stored) by that much.
unsafe fn send_file<E: Edge>(
    socket: &Socket,
    chunk: &Chunk,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> Sys<usize> {
    // SAFETY: no memory is passed.
    let seek = |to: off_t, how: c_int| unsafe { E::call(libc::SYS_lseek, args!(from, to, how)) };
    let mut position = if offset.is_null() {
        // No file (EBADF), or one without a position, which the kernel refuses otherwise.
        let refused = |error| if error == Errno(libc::ESPIPE) { Errno::EINVAL } else { error };
        seek(0, libc::SEEK_CUR).map_err(refused)? as off_t
    } else {
        // SAFETY: the program's offset.
        unsafe { *offset }
    };
    if position < 0 {
        return Err(Errno::EINVAL);
    }
    let mut total = 0usize;
    while total < count {
        let wanted = CHUNK_BYTES.min(count - total);
        let read = args!(from, chunk.base(), wanted, position);
        // SAFETY: our own buffer, for both.
        let sent = unsafe {
            match E::call(libc::SYS_pread64, read) {
                Ok(0) => break,
                Ok(got) => send_list(socket, &[Buffer { base: chunk.base(), len: got }], 0)
                    .map(|sent| (sent, got)),
                Err(error) => Err(error),
            }
        };
        match sent {
            Err(error) if total == 0 => return Err(error),
            Err(_) => break,
            Ok((sent, got)) => {
                total += sent;
                position += sent as off_t;
                if sent < got {
                    break;
                }
            }
        }
    }
    if offset.is_null() {
        let _ = seek(position, libc::SEEK_SET);
    } else {
        // SAFETY: the program's offset.
        unsafe { *offset = position };
    }
    Ok(total)
}

/// What is read by a call that only the kernel knows to serve: a stream in the ring, where it has to be served here.
fn read_by_kernel(from: c_int) -> Way {
    match way_in(from) {
        Way::Ours(socket) if !carrier::facts(socket).has_boundaries => Way::Ours(socket),
        Way::Ours(socket) | Way::Datagram(socket) => {
            socket::keep_on_kernel(socket, Reason::Splice);
            Way::Kernel(None)
        }
        way => way,
    }
}

const SPLICE_FLAGS: libc::c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

pub unsafe fn splice<E: Edge>(
    edge: &E,
    from: c_int,
    from_offset: *mut libc::loff_t,
    to: c_int,
    to_offset: *mut libc::loff_t,
    len: size_t,
    flags: libc::c_uint,
) -> Sys<usize> {
    let call = match read_by_kernel(from) {
        Way::Ours(socket) => {
            let served = from_offset.is_null() && to_offset.is_null() && flags & !SPLICE_FLAGS == 0;
            // Anything else the kernel refuses, without a look at the connection.
            return match served && len > 0 && fd::is_pipe_to_write(to) {
                true => finish(socket, splice::out(socket, to, len, flags)),
                false => edge.pass_on(),
            };
        }
        Way::Kernel(call @ Some(_)) => call,
        _ => match way_out(to) {
            Way::Ours(socket) if !carrier::facts(socket).has_boundaries => {
                Some(splice::aside(socket, true, Reason::Splice)?)
            }
            Way::Ours(socket) | Way::Datagram(socket) => {
                socket::keep_on_kernel(socket, Reason::Splice);
                None
            }
            Way::Kernel(call) => call,
        },
    };
    native(edge, call)
}
