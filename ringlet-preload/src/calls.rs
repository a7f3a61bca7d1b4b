//! Calls that move data (`ringlet_agent::data`).

use crate::{also, musl, next, served};
use core::ptr::null_mut;
use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};
use ringlet_agent::data;

served! {
    read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t => data::read, [fd, buffer, len];
    recv(fd: c_int, buffer: *mut c_void, len: size_t, flags: c_int) -> ssize_t
        => data::recvfrom, [fd, buffer, len, flags, null_mut(), null_mut()];
    recvfrom(fd: c_int, buffer: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t
        => data::recvfrom, [fd, buffer, len, flags, address, address_len];
    preadv2(fd: c_int, vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> ssize_t
        => data::preadv2, [fd, vector, count, position, flags];
    pwritev2(fd: c_int, vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> ssize_t
        => data::pwritev2, [fd, vector, count, position];
    readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t => data::readv, [fd, vector, count];
    write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t => data::write, [fd, buffer, len];
    writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t => data::writev, [fd, vector, count];
    send(fd: c_int, buffer: *const c_void, len: size_t, flags: c_int) -> ssize_t
        => data::sendto, [fd, buffer, len, flags, core::ptr::null(), 0];
    sendto(fd: c_int, buffer: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t) -> ssize_t
        => data::sendto, [fd, buffer, len, flags, address, address_len];
    sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t
        => data::sendfile, [to, from, offset, count];
    splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, len: size_t, flags: c_uint) -> ssize_t
        => data::splice, [from, from_offset, to, to_offset, len, flags];
}

// (off_t has 64 bits here.)
also! {
    preadv64v2(fd: c_int, vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> ssize_t
        => preadv2, [fd, vector, count, position, flags];
    pwritev64v2(fd: c_int, vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> ssize_t
        => pwritev2, [fd, vector, count, position, flags];
    sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t => sendfile, [to, from, offset, count];
    __read_chk(fd: c_int, buffer: *mut c_void, len: size_t, size: size_t) -> ssize_t
        => read, [fd, buffer, checked(len, size)];
    __recv_chk(fd: c_int, buffer: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t
        => recv, [fd, buffer, checked(len, size), flags];
    __recvfrom_chk(fd: c_int, buffer: *mut c_void, len: size_t, size: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t
        => recvfrom, [fd, buffer, checked(len, size), flags, address, address_len];
}

/// What fortified programs ask: does the length fit in the buffer as the compiler knew it?
fn checked(len: size_t, size: size_t) -> size_t {
    if len > size {
        // SAFETY: as __chk_fail does.
        unsafe { libc::abort() };
    }
    len
}

/// What libc's writes without our `write`: polls that look away for a moment are to hear of it (`ringlet::socket::asked`).
#[unsafe(no_mangle)]
pub extern "C" fn eventfd_write(fd: c_int, value: u64) -> c_int {
    // SAFETY: a local of eight bytes.
    let written = unsafe { write(fd, (&raw const value).cast(), size_of::<u64>()) };
    if written == size_of::<u64>() as ssize_t { 0 } else { -1 }
}

// Message headers, which musl has in its own way.

mod as_kernel {
    use super::*;

    pub unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        let call = crate::edge::Call(|| {
            next!(c"recvmsg", fn(c_int, *mut msghdr, c_int) -> ssize_t, fd, message, flags)
        });
        // SAFETY: the program's own arguments.
        crate::errno::result(unsafe { data::recvmsg(&call, fd, message, flags) })
    }

    pub unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        let call = crate::edge::Call(|| {
            next!(c"sendmsg", fn(c_int, *const msghdr, c_int) -> ssize_t, fd, message, flags)
        });
        // SAFETY: the program's own arguments.
        crate::errno::result(unsafe { data::sendmsg(&call, fd, message, flags) })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the contract of recvmsg, for musl's header as for glibc's.
    unsafe {
        if !musl::is() || data::is_nowhere(message) {
            return as_kernel::recvmsg(fd, message, flags);
        }
        let mut header = musl::header(message);
        let got = as_kernel::recvmsg(fd, &raw mut header, flags);
        *message = header;
        got
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the contract of sendmsg, for musl's header as for glibc's.
    unsafe {
        if !musl::is() || data::is_nowhere(message) {
            return as_kernel::sendmsg(fd, message, flags);
        }
        let header = musl::header(message);
        as_kernel::sendmsg(fd, &raw const header, flags)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe {
        if musl::is() && !data::is_nowhere(messages) {
            // As musl's does.
            for at in 0..count as usize {
                (*messages.add(at)).msg_hdr = musl::header(&raw const (*messages.add(at)).msg_hdr);
            }
        }
        let call = crate::edge::Call(|| {
            next!(
                c"recvmmsg",
                fn(c_int, *mut mmsghdr, c_uint, c_int, *mut timespec) -> c_int,
                fd,
                messages,
                count,
                flags,
                timeout
            ) as isize
        });
        crate::errno::result(data::recvmmsg(&call, fd, messages, count, flags, timeout)) as c_int
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    if musl::is() {
        // As musl's does.
        for at in 0..count.min(data::IOV_MAX as c_uint) {
            // SAFETY: the program's array of `count` headers.
            let sent = unsafe {
                let entry = &mut *messages.add(at as usize);
                let sent = sendmsg(fd, &entry.msg_hdr, flags);
                entry.msg_len = sent.max(0) as c_uint;
                sent
            };
            if sent < 0 {
                return if at > 0 { at as c_int } else { -1 };
            }
        }
        return count.min(data::IOV_MAX as c_uint) as c_int;
    }
    let call = crate::edge::Call(|| {
        next!(
            c"sendmmsg",
            fn(c_int, *mut mmsghdr, c_uint, c_int) -> c_int,
            fd,
            messages,
            count,
            flags
        ) as isize
    });
    // SAFETY: the program's own arguments.
    crate::errno::result(unsafe { data::sendmmsg(&call, fd, messages, count, flags) }) as c_int
}
