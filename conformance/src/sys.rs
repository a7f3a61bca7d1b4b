//! Every call that a case makes, as a safe function that goes through libc's own symbol, so that a
//! preloaded library sees it exactly as it would see a C program's.
//!
//! Descriptors are plain numbers here, not owned handles: closed, reused and wrong numbers are part
//! of what the cases are about. All unsafe code of the suite is in this file and in `rare`.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void};
use std::mem::{size_of, size_of_val, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

pub type Fd = c_int;
pub type R<T> = Result<T, Errno>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub c_int);

macro_rules! errno_names {
    ($($name:ident)*) => {
        impl std::fmt::Display for Errno {
            fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                match self.0 {
                    $(libc::$name => f.write_str(stringify!($name)),)*
                    other => write!(f, "errno {other}"),
                }
            }
        }
    };
}

errno_names! {
    EPERM ENOENT EINTR EIO E2BIG EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT EEXIST ENODEV ENOTDIR
    EISDIR EINVAL ENFILE EMFILE ENOTTY EFBIG ENOSPC ESPIPE EPIPE EDOM ERANGE ENOSYS ELOOP EOVERFLOW EILSEQ
    ENOTSOCK EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT EOPNOTSUPP EAFNOSUPPORT
    EADDRINUSE EADDRNOTAVAIL ENETDOWN ENETUNREACH ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN
    ESHUTDOWN ETIMEDOUT ECONNREFUSED EHOSTUNREACH EALREADY EINPROGRESS ECANCELED
}

fn last() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

fn size(ret: isize) -> R<usize> {
    usize::try_from(ret).map_err(|_| last())
}

fn int(ret: c_int) -> R<c_int> {
    if ret < 0 { Err(last()) } else { Ok(ret) }
}

fn unit(ret: c_int) -> R<()> {
    int(ret).map(|_| ())
}

// ---- addresses ----

fn to_raw(addr: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero bytes are a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let place: *mut libc::sockaddr_storage = &mut storage;
    match addr {
        SocketAddr::V4(v4) => {
            // SAFETY: sockaddr_storage is large enough and aligned for every address family.
            let raw = unsafe { &mut *place.cast::<libc::sockaddr_in>() };
            raw.sin_family = libc::AF_INET as libc::sa_family_t;
            raw.sin_port = v4.port().to_be();
            raw.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
            (storage, size_of::<libc::sockaddr_in>() as libc::socklen_t)
        }
        SocketAddr::V6(v6) => {
            // SAFETY: as above.
            let raw = unsafe { &mut *place.cast::<libc::sockaddr_in6>() };
            raw.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            raw.sin6_port = v6.port().to_be();
            raw.sin6_addr.s6_addr = v6.ip().octets();
            (storage, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
        }
    }
}

fn from_raw(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let place: *const libc::sockaddr_storage = storage;
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage is large enough, and the family says that it holds this type.
            let raw = unsafe { &*place.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { &*place.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), 0, 0).into())
        }
        _ => None,
    }
}

type AddressCall = unsafe extern "C" fn(c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> c_int;

fn address(call: AddressCall, fd: Fd) -> R<Option<SocketAddr>> {
    // SAFETY: all-zero bytes are a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let mut len = size_of_val(&storage) as libc::socklen_t;
    // SAFETY: both pointers are to live locals and `len` is the storage's size.
    unit(unsafe { call(fd, (&raw mut storage).cast(), &mut len) })?;
    Ok(from_raw(&storage))
}

pub fn getsockname(fd: Fd) -> R<Option<SocketAddr>> {
    address(libc::getsockname, fd)
}

pub fn getpeername(fd: Fd) -> R<Option<SocketAddr>> {
    address(libc::getpeername, fd)
}

// ---- making and ending sockets ----

pub fn socket(family: c_int, kind: c_int) -> R<Fd> {
    // SAFETY: takes no pointers.
    int(unsafe { libc::socket(family, kind, 0) })
}

pub fn bind(fd: Fd, addr: SocketAddr) -> R<()> {
    let (storage, len) = to_raw(addr);
    // SAFETY: `storage` is live and holds `len` bytes of address.
    unit(unsafe { libc::bind(fd, (&raw const storage).cast(), len) })
}

pub fn connect(fd: Fd, addr: SocketAddr) -> R<()> {
    let (storage, len) = to_raw(addr);
    // SAFETY: `storage` is live and holds `len` bytes of address.
    unit(unsafe { libc::connect(fd, (&raw const storage).cast(), len) })
}

/// Where the bytes of a Unix address begin.
const UNIX_NAME: usize = core::mem::offset_of!(libc::sockaddr_un, sun_path);

/// Gives a Unix socket an abstract name that nobody has: the kernel takes five hexadecimal digits.
pub fn bind_to_a_number(fd: Fd) -> R<u32> {
    let family = libc::AF_UNIX as libc::sa_family_t;
    // SAFETY: an address that ends after its family.
    unit(unsafe { libc::bind(fd, (&raw const family).cast(), UNIX_NAME as libc::socklen_t) })?;
    // SAFETY: all-zero bytes are a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { zeroed() };
    let mut len = size_of_val(&name) as libc::socklen_t;
    // SAFETY: both pointers are to live locals and `len` is the name's size.
    unit(unsafe { libc::getsockname(fd, (&raw mut name).cast(), &mut len) })?;
    let digits =
        name.sun_path[1..len as usize - UNIX_NAME].iter().map(|digit| *digit as u8 as char);
    Ok(digits.fold(0, |number, digit| number * 16 + digit.to_digit(16).expect("a digit")))
}

/// Connects to what `bind_to_a_number` has named.
pub fn connect_to_a_number(fd: Fd, number: u32) -> R<()> {
    // SAFETY: all-zero bytes are a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { zeroed() };
    name.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let digits = format!("{number:05x}");
    for (place, digit) in name.sun_path[1..].iter_mut().zip(digits.bytes()) {
        *place = digit as libc::c_char;
    }
    let len = (UNIX_NAME + 1 + digits.len()) as libc::socklen_t;
    // SAFETY: `name` is live and holds `len` bytes of address.
    unit(unsafe { libc::connect(fd, (&raw const name).cast(), len) })
}

pub fn listen(fd: Fd, backlog: c_int) -> R<()> {
    // SAFETY: takes no pointers.
    unit(unsafe { libc::listen(fd, backlog) })
}

pub fn accept(fd: Fd) -> R<Fd> {
    // SAFETY: null address pointers are allowed.
    int(unsafe { libc::accept(fd, null_mut(), null_mut()) })
}

pub fn accept4(fd: Fd, flags: c_int) -> R<(Fd, Option<SocketAddr>)> {
    // SAFETY: all-zero bytes are a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let mut len = size_of_val(&storage) as libc::socklen_t;
    // SAFETY: both pointers are to live locals and `len` is the storage's size.
    let new = int(unsafe { libc::accept4(fd, (&raw mut storage).cast(), &mut len, flags) })?;
    Ok((new, from_raw(&storage)))
}

pub fn shutdown(fd: Fd, how: c_int) -> R<()> {
    // SAFETY: takes no pointers.
    unit(unsafe { libc::shutdown(fd, how) })
}

pub fn close(fd: Fd) -> R<()> {
    // SAFETY: no owned handle of this program holds `fd` (see the module's head).
    unit(unsafe { libc::close(fd) })
}

/// What the kernel says of a connection, whatever way its bytes go.
pub fn unread_in_kernel(fd: Fd) -> R<usize> {
    let mut n: c_int = 0;
    // SAFETY: a writable int.
    unit(unsafe { libc::syscall(libc::SYS_ioctl, fd, libc::FIONREAD, &raw mut n) } as c_int)?;
    Ok(n as usize)
}

/// Closes as Node.js does: by system call, not through `close`.
pub fn close_by_syscall(fd: Fd) -> R<()> {
    // SAFETY: as `close`.
    unit(unsafe { libc::syscall(libc::SYS_close, fd) } as c_int)
}

pub fn close_range(first: Fd, last: Fd) -> R<()> {
    // SAFETY: as `close`, for each number of the range.
    unit(unsafe { libc::close_range(first as c_uint, last as c_uint, 0) })
}

// ---- bytes ----

pub fn read(fd: Fd, buf: &mut [u8]) -> R<usize> {
    // SAFETY: `buf` is writable for its length.
    size(unsafe { libc::read(fd, buf.as_mut_ptr().cast(), buf.len()) })
}

pub fn write(fd: Fd, data: &[u8]) -> R<usize> {
    // SAFETY: `data` is readable for its length.
    size(unsafe { libc::write(fd, data.as_ptr().cast(), data.len()) })
}

pub fn recv(fd: Fd, buf: &mut [u8], flags: c_int) -> R<usize> {
    // SAFETY: `buf` is writable for its length.
    size(unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), flags) })
}

pub fn send(fd: Fd, data: &[u8], flags: c_int) -> R<usize> {
    // SAFETY: `data` is readable for its length.
    size(unsafe { libc::send(fd, data.as_ptr().cast(), data.len(), flags) })
}

/// Also returns the address length that the call left behind (it is told 128 bytes).
pub fn recvfrom(fd: Fd, buf: &mut [u8], flags: c_int) -> R<(usize, u32)> {
    // SAFETY: all-zero bytes are a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let mut len = size_of_val(&storage) as libc::socklen_t;
    let at = (&raw mut storage).cast();
    // SAFETY: `buf` is writable for its length; the address pointers are to live locals.
    let got = size(unsafe {
        libc::recvfrom(fd, buf.as_mut_ptr().cast(), buf.len(), flags, at, &mut len)
    })?;
    Ok((got, len))
}

/// A datagram and where it came from.
pub fn recv_from(fd: Fd, len: usize, flags: c_int) -> R<(Vec<u8>, Option<SocketAddr>)> {
    let mut buf = vec![0; len];
    // SAFETY: all-zero bytes are a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let mut name_len = size_of_val(&storage) as libc::socklen_t;
    let at = (&raw mut storage).cast();
    // SAFETY: `buf` is writable for its length; the address pointers are to live locals.
    let got = size(unsafe {
        libc::recvfrom(fd, buf.as_mut_ptr().cast(), buf.len(), flags, at, &mut name_len)
    })?;
    buf.truncate(got);
    Ok((buf, from_raw(&storage)))
}

/// A recvfrom that has room for only so many bytes of the address; returns those, and the length that the kernel left behind.
pub fn recv_from_with_room(fd: Fd, buf: &mut [u8], room: u32) -> R<(usize, u32)> {
    let mut name = [0u8; 128];
    let mut len = room;
    // SAFETY: `buf` and `name` are writable for their lengths.
    let got = size(unsafe {
        libc::recvfrom(
            fd,
            buf.as_mut_ptr().cast(),
            buf.len(),
            0,
            name.as_mut_ptr().cast(),
            &mut len,
        )
    })?;
    assert!(name[room as usize..].iter().all(|byte| *byte == 0), "no byte beyond the room");
    Ok((got, len))
}

/// Dissolves a socket's connection.
pub fn disconnect(fd: Fd) -> R<()> {
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: the address is live and has its length.
    unit(unsafe { libc::connect(fd, &nowhere, size_of::<libc::sockaddr>() as libc::socklen_t) })
}

pub fn sendto(fd: Fd, data: &[u8], flags: c_int, addr: SocketAddr) -> R<usize> {
    let (storage, len) = to_raw(addr);
    let at = (&raw const storage).cast();
    // SAFETY: `data` is readable for its length; `storage` is live and holds `len` bytes.
    size(unsafe { libc::sendto(fd, data.as_ptr().cast(), data.len(), flags, at, len) })
}

/// A buffer at address zero, of a length that is not.
pub fn recv_to_null(fd: Fd, len: usize, flags: c_int) -> R<usize> {
    // SAFETY: the kernel answers EFAULT for memory that is not there, and what stands in for it must.
    size(unsafe { libc::recv(fd, null_mut(), len, flags) })
}

pub fn send_from_null(fd: Fd, len: usize, flags: c_int) -> R<usize> {
    // SAFETY: as `recv_to_null`.
    size(unsafe { libc::send(fd, null(), len, flags) })
}

/// An address in the kernel's half, as MAP_FAILED.
pub const NOWHERE: usize = usize::MAX;

/// A page that nobody may touch.
pub fn forbidden() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let at = unsafe { libc::mmap(null_mut(), 4096, libc::PROT_NONE, flags, -1, 0) };
    assert!(at != libc::MAP_FAILED, "mmap: {}", last());
    at as usize
}

pub fn recv_to(fd: Fd, at: usize, len: usize, flags: c_int) -> R<usize> {
    // SAFETY: as `recv_to_null`.
    size(unsafe { libc::recv(fd, at as *mut c_void, len, flags) })
}

pub fn send_from(fd: Fd, at: usize, len: usize, flags: c_int) -> R<usize> {
    // SAFETY: as `recv_to_null`.
    size(unsafe { libc::send(fd, at as *const c_void, len, flags) })
}

/// Room for a name, whose length is said to be `len`, or has no place where it is said.
pub fn recvfrom_with(fd: Fd, buf: &mut [u8], flags: c_int, len: Option<i32>) -> R<usize> {
    let mut name = [0u64; 16];
    let mut said = len.unwrap_or(0) as u32;
    let len = if len.is_some() { &raw mut said } else { null_mut() };
    let (at, size_of_buf) = (buf.as_mut_ptr().cast(), buf.len());
    let name = name.as_mut_ptr().cast();
    // SAFETY: `buf` and `name` are writable; a negative length is refused.
    size(unsafe { libc::recvfrom(fd, at, size_of_buf, flags, name, len) })
}

pub fn sendto_with(fd: Fd, data: &[u8], name: usize, len: u32) -> R<usize> {
    let (at, name) = (data.as_ptr().cast(), name as *const libc::sockaddr);
    // SAFETY: `data` is readable; a name that is nowhere is refused.
    size(unsafe { libc::sendto(fd, at, data.len(), libc::MSG_NOSIGNAL, name, len) })
}

/// A message of `count` parts of one byte each, with a name (at `name`, if given) of so many bytes.
pub fn message_with(
    fd: Fd,
    send: bool,
    name: Option<usize>,
    name_len: i32,
    count: usize,
) -> R<usize> {
    let (mut room, mut byte) = ([0u64; 16], b'x');
    let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut parts = vec![part; count];
    // SAFETY: all-zero bytes are a valid header.
    let mut header: libc::msghdr = unsafe { zeroed() };
    header.msg_name = name.map_or(room.as_mut_ptr().cast(), |at| at as *mut c_void);
    header.msg_namelen = name_len as u32;
    (header.msg_iov, header.msg_iovlen) = (parts.as_mut_ptr(), count as _);
    // SAFETY: the parts are live; what is nowhere is refused.
    size(unsafe {
        if send {
            libc::sendmsg(fd, &header, libc::MSG_NOSIGNAL)
        } else {
            libc::recvmsg(fd, &mut header, libc::MSG_DONTWAIT)
        }
    })
}

/// A ppoll of one descriptor that does not wait, with its array or mask at another address, if given. (Its time libc reads.)
pub fn ppoll_at(fd: Fd, array: Option<usize>, mask: Option<usize>) -> R<c_int> {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let array = array.map_or(&raw mut entry, |at| at as *mut _);
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: what is nowhere, or forbidden, is refused.
    int(unsafe { libc::ppoll(array, 1, &zero, mask.unwrap_or(0) as *const _) })
}

/// An epoll_pwait2 that does not wait, with its time or mask at another address, if given.
pub fn epoll_pwait_at(set: Fd, time: Option<usize>, mask: Option<usize>) -> R<c_int> {
    let mut event = NO_EVENT;
    let mask = mask.unwrap_or(0) as *const libc::sigset_t;
    // SAFETY: as `ppoll_at`.
    int(unsafe {
        match time {
            Some(at) => epoll_pwait2(set, &mut event, 1, at as *const _, mask),
            None => libc::epoll_pwait(set, &mut event, 1, 0, mask),
        }
    })
}

/// Peeks with a length larger than the buffer. The case sees to it that the connection never holds
/// more bytes than the buffer.
pub fn peek_claiming(fd: Fd, buf: &mut [u8], claimed: usize) -> R<usize> {
    // SAFETY: no more bytes than `buf.len()` exist in the stream (the caller's promise).
    size(unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), claimed, libc::MSG_PEEK) })
}

pub fn read_claiming(fd: Fd, buf: &mut [u8], claimed: usize) -> R<usize> {
    // SAFETY: as `peek_claiming`.
    size(unsafe { libc::read(fd, buf.as_mut_ptr().cast(), claimed) })
}

/// `len` zero bytes of address space that cost memory only where they are touched.
pub fn vast(len: usize) -> &'static mut [u8] {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh anonymous mapping that nothing else knows of.
    let at = unsafe { libc::mmap(null_mut(), len, prot, flags, -1, 0) };
    assert!(at != libc::MAP_FAILED, "mmap: {}", last());
    // SAFETY: the mapping is `len` bytes, zeroed, writable, and never unmapped.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
}

unsafe extern "C" {
    fn __read_chk(fd: c_int, buf: *mut c_void, len: usize, room: usize) -> isize;
    fn __recv_chk(fd: c_int, buf: *mut c_void, len: usize, room: usize, flags: c_int) -> isize;
    fn __recvfrom_chk(
        fd: c_int,
        buf: *mut c_void,
        len: usize,
        room: usize,
        flags: c_int,
        addr: *mut libc::sockaddr,
        addr_len: *mut libc::socklen_t,
    ) -> isize;
    fn dprintf(fd: c_int, format: *const c_char, ...) -> c_int;
    fn __poll_chk(fds: *mut libc::pollfd, n: libc::nfds_t, timeout: c_int, room: usize) -> c_int;
    fn epoll_pwait2(
        epfd: c_int,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// What a program compiled with _FORTIFY_SOURCE calls for `read`.
pub fn read_fortified(fd: Fd, buf: &mut [u8]) -> R<usize> {
    // SAFETY: `buf` is writable for its length.
    size(unsafe { __read_chk(fd, buf.as_mut_ptr().cast(), buf.len(), buf.len()) })
}

pub fn recv_fortified(fd: Fd, buf: &mut [u8], flags: c_int) -> R<usize> {
    // SAFETY: `buf` is writable for its length.
    size(unsafe { __recv_chk(fd, buf.as_mut_ptr().cast(), buf.len(), buf.len(), flags) })
}

pub fn recvfrom_fortified(fd: Fd, buf: &mut [u8], flags: c_int) -> R<usize> {
    let (at, len) = (buf.as_mut_ptr().cast(), buf.len());
    // SAFETY: `buf` is writable for its length; null address pointers are allowed.
    size(unsafe { __recvfrom_chk(fd, at, len, len, flags, null_mut(), null_mut()) })
}

fn slices(parts: &[&[u8]]) -> Vec<libc::iovec> {
    let vector = |p: &&[u8]| libc::iovec { iov_base: p.as_ptr() as *mut c_void, iov_len: p.len() };
    parts.iter().map(vector).collect()
}

/// One buffer for each length, and the vectors that point at them.
fn buffers(lens: &[usize]) -> (Vec<Vec<u8>>, Vec<libc::iovec>) {
    let mut bufs: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
    let vector =
        |b: &mut Vec<u8>| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() };
    let vectors = bufs.iter_mut().map(vector).collect();
    (bufs, vectors)
}

fn joined(bufs: &[Vec<u8>], len: usize) -> Vec<u8> {
    let mut all = bufs.concat();
    all.truncate(len);
    all
}

pub fn writev(fd: Fd, parts: &[&[u8]]) -> R<usize> {
    let vectors = slices(parts);
    // SAFETY: each vector is a live slice of `parts`.
    size(unsafe { libc::writev(fd, vectors.as_ptr(), vectors.len() as c_int) })
}

pub fn readv(fd: Fd, lens: &[usize]) -> R<Vec<u8>> {
    let (bufs, vectors) = buffers(lens);
    // SAFETY: each vector is one of the live `bufs`.
    let got = size(unsafe { libc::readv(fd, vectors.as_ptr(), vectors.len() as c_int) })?;
    Ok(joined(&bufs, got))
}

/// Two vectors, the second at address zero.
pub fn writev_null(fd: Fd, first: &[u8], len: usize) -> R<usize> {
    let mut vectors = slices(&[first]);
    vectors.push(libc::iovec { iov_base: null_mut(), iov_len: len });
    // SAFETY: the first vector is live; for the second, as `recv_to_null`.
    size(unsafe { libc::writev(fd, vectors.as_ptr(), 2) })
}

pub fn readv_null(fd: Fd, first: usize, len: usize) -> R<Vec<u8>> {
    let (bufs, mut vectors) = buffers(&[first]);
    vectors.push(libc::iovec { iov_base: null_mut(), iov_len: len });
    // SAFETY: the first vector is live; for the second, as `recv_to_null`.
    let got = size(unsafe { libc::readv(fd, vectors.as_ptr(), 2) })?;
    Ok(joined(&bufs, got))
}

pub fn preadv2(fd: Fd, lens: &[usize], offset: i64) -> R<Vec<u8>> {
    let (bufs, vectors) = buffers(lens);
    let count = vectors.len() as c_int;
    // SAFETY: each vector is one of the live `bufs`.
    let got = size(unsafe { libc::preadv2(fd, vectors.as_ptr(), count, offset, 0) })?;
    Ok(joined(&bufs, got))
}

pub fn preadv(fd: Fd, lens: &[usize], offset: i64) -> R<Vec<u8>> {
    let (bufs, vectors) = buffers(lens);
    // SAFETY: each vector is one of the live `bufs`.
    let got = size(unsafe { libc::preadv(fd, vectors.as_ptr(), vectors.len() as c_int, offset) })?;
    Ok(joined(&bufs, got))
}

pub fn pread(fd: Fd, buf: &mut [u8], offset: i64) -> R<usize> {
    // SAFETY: `buf` is writable for its length.
    size(unsafe { libc::pread(fd, buf.as_mut_ptr().cast(), buf.len(), offset) })
}

pub fn pwrite(fd: Fd, data: &[u8], offset: i64) -> R<usize> {
    // SAFETY: `data` is readable for its length.
    size(unsafe { libc::pwrite(fd, data.as_ptr().cast(), data.len(), offset) })
}

pub fn lseek(fd: Fd, offset: i64, whence: c_int) -> R<i64> {
    // SAFETY: takes no pointers.
    let at = unsafe { libc::lseek(fd, offset, whence) };
    if at < 0 { Err(last()) } else { Ok(at) }
}

/// What `recvmsg` fills in beside the bytes.
pub struct Message {
    pub data: Vec<u8>,
    pub flags: c_int,
    pub name_len: u32,
    pub control_len: usize,
}

pub fn recvmsg(fd: Fd, lens: &[usize], flags: c_int) -> R<Message> {
    let (bufs, mut vectors) = buffers(lens);
    let mut control = [0u64; 32];
    // SAFETY: all-zero bytes are a valid sockaddr_storage and a valid msghdr.
    let (mut name, mut msg): (libc::sockaddr_storage, libc::msghdr) = unsafe { zeroed() };
    msg.msg_name = (&raw mut name).cast();
    msg.msg_namelen = size_of_val(&name) as u32;
    msg.msg_iov = vectors.as_mut_ptr();
    msg.msg_iovlen = vectors.len() as _;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = size_of_val(&control) as _;
    // SAFETY: every pointer in `msg` is to a live local of the length given beside it.
    let got = size(unsafe { libc::recvmsg(fd, &mut msg, flags) })?;
    Ok(Message {
        data: joined(&bufs, got),
        flags: msg.msg_flags,
        name_len: msg.msg_namelen,
        control_len: msg.msg_controllen,
    })
}

pub fn sendmsg(fd: Fd, parts: &[&[u8]], flags: c_int) -> R<usize> {
    let mut vectors = slices(parts);
    // SAFETY: all-zero bytes are a valid msghdr.
    let mut msg: libc::msghdr = unsafe { zeroed() };
    msg.msg_iov = vectors.as_mut_ptr();
    msg.msg_iovlen = vectors.len() as _;
    // SAFETY: the vectors are live slices of `parts`.
    size(unsafe { libc::sendmsg(fd, &msg, flags) })
}

/// The same with a control message: so much is to be stamped of this message (SO_TIMESTAMPING).
pub fn send_with_stamps(fd: Fd, data: &[u8], stamps: u32, flags: c_int) -> R<usize> {
    let mut room = [0u64; 4];
    let mut vectors = slices(&[data]);
    // SAFETY: all-zero bytes are a valid msghdr.
    let mut msg: libc::msghdr = unsafe { zeroed() };
    (msg.msg_iov, msg.msg_iovlen) = (vectors.as_mut_ptr(), 1);
    msg.msg_control = room.as_mut_ptr().cast();
    // SAFETY: the room is large enough for one message of four bytes; the vector is a live slice.
    size(unsafe {
        msg.msg_controllen = libc::CMSG_SPACE(4) as _;
        let control = libc::CMSG_FIRSTHDR(&raw const msg);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SO_TIMESTAMPING;
        (*control).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(control).cast::<u32>().write_unaligned(stamps);
        libc::sendmsg(fd, &raw const msg, flags)
    })
}

/// One message for each part; returns each message's count.
pub fn sendmmsg(fd: Fd, parts: &[&[u8]], flags: c_int) -> R<Vec<u32>> {
    let mut vectors = slices(parts);
    let mut msgs = message_headers(&mut vectors);
    // SAFETY: each header points at one vector, which is a live slice of `parts`.
    let sent = int(unsafe { libc::sendmmsg(fd, msgs.as_mut_ptr(), msgs.len() as c_uint, flags) })?;
    Ok(msgs.iter().take(sent as usize).map(|m| m.msg_len).collect())
}

/// As `recvmmsg`, with a timeout in milliseconds.
pub fn recvmmsg_within(fd: Fd, lens: &[usize], flags: c_int, ms: i64) -> R<Vec<Vec<u8>>> {
    let (bufs, mut vectors) = buffers(lens);
    let mut msgs = message_headers(&mut vectors);
    let count = msgs.len() as c_uint;
    let mut time = libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
    // SAFETY: each header points at one vector, which is one of the live `bufs`; the time is a live local.
    let got = int(unsafe { libc::recvmmsg(fd, msgs.as_mut_ptr(), count, flags, &mut time) })?;
    let filled = bufs.into_iter().zip(&msgs).take(got as usize);
    Ok(filled.map(|(buf, msg)| buf[..msg.msg_len as usize].to_vec()).collect())
}

pub fn recvmmsg(fd: Fd, lens: &[usize], flags: c_int) -> R<Vec<Vec<u8>>> {
    let (bufs, mut vectors) = buffers(lens);
    let mut msgs = message_headers(&mut vectors);
    let count = msgs.len() as c_uint;
    // SAFETY: each header points at one vector, which is one of the live `bufs`.
    let got = int(unsafe { libc::recvmmsg(fd, msgs.as_mut_ptr(), count, flags, null_mut()) })?;
    let filled = bufs.into_iter().zip(&msgs).take(got as usize);
    Ok(filled.map(|(buf, msg)| buf[..msg.msg_len as usize].to_vec()).collect())
}

fn message_headers(vectors: &mut [libc::iovec]) -> Vec<libc::mmsghdr> {
    let header = |vector: &mut libc::iovec| {
        // SAFETY: all-zero bytes are a valid mmsghdr.
        let mut msg: libc::mmsghdr = unsafe { zeroed() };
        msg.msg_hdr.msg_iov = vector;
        msg.msg_hdr.msg_iovlen = 1;
        msg
    };
    vectors.iter_mut().map(header).collect()
}

pub fn sendfile(out: Fd, input: Fd, offset: Option<&mut i64>, count: usize) -> R<usize> {
    let at = offset.map_or(null_mut(), |o| o as *mut i64);
    // SAFETY: `at` is null or a live offset.
    size(unsafe { libc::sendfile(out, input, at, count) })
}

pub fn splice(input: Fd, out: Fd, len: usize, flags: c_uint) -> R<usize> {
    // SAFETY: null offsets are allowed.
    size(unsafe { libc::splice(input, null_mut(), out, null_mut(), len, flags) })
}

// ---- descriptors ----

pub fn dup(fd: Fd) -> R<Fd> {
    // SAFETY: takes no pointers.
    int(unsafe { libc::dup(fd) })
}

pub fn dup2(fd: Fd, new: Fd) -> R<Fd> {
    // SAFETY: as `close`, for `new`.
    int(unsafe { libc::dup2(fd, new) })
}

pub fn dup3(fd: Fd, new: Fd, flags: c_int) -> R<Fd> {
    // SAFETY: as `close`, for `new`.
    int(unsafe { libc::dup3(fd, new, flags) })
}

/// Commands whose argument is a number, or that take none.
pub fn fcntl(fd: Fd, command: c_int, argument: c_int) -> R<c_int> {
    // SAFETY: the commands that the cases use take no pointers.
    int(unsafe { libc::fcntl(fd, command, argument) })
}

/// Requests whose argument is an int that is read or written in place.
pub fn ioctl(fd: Fd, request: libc::Ioctl, mut argument: c_int) -> R<c_int> {
    // SAFETY: the requests that the cases use read or write one int.
    unit(unsafe { libc::ioctl(fd, request, &raw mut argument) })?;
    Ok(argument)
}

pub fn setsockopt(fd: Fd, level: c_int, name: c_int, value: c_int) -> R<()> {
    setsockopt_as(fd, level, name, &value)
}

pub fn getsockopt(fd: Fd, level: c_int, name: c_int) -> R<c_int> {
    getsockopt_as(fd, level, name, 0)
}

fn setsockopt_as<T: Copy>(fd: Fd, level: c_int, name: c_int, value: &T) -> R<()> {
    let at: *const T = value;
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is live and `len` bytes long.
    unit(unsafe { libc::setsockopt(fd, level, name, at.cast(), len) })
}

fn getsockopt_as<T: Copy>(fd: Fd, level: c_int, name: c_int, mut value: T) -> R<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is live and `len` bytes long, and any bytes are valid in the types used.
    unit(unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) })?;
    Ok(value)
}

pub fn set_timeout(fd: Fd, name: c_int, timeout: Duration) -> R<()> {
    setsockopt_as(fd, libc::SOL_SOCKET, name, &timeval(timeout))
}

/// A timeout of less than nothing.
pub fn set_negative_timeout(fd: Fd, name: c_int) -> R<()> {
    setsockopt_as(fd, libc::SOL_SOCKET, name, &libc::timeval { tv_sec: -1, tv_usec: 0 })
}

/// How often this thread has slept.
pub fn sleeps() -> i64 {
    // SAFETY: all zeros is a valid rusage, and getrusage fills it.
    let mut usage: libc::rusage = unsafe { zeroed() };
    // SAFETY: as above.
    let done = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    assert_eq!(done, 0, "getrusage");
    usage.ru_nvcsw
}

pub fn timeout_of(fd: Fd, name: c_int) -> R<Duration> {
    let tv = getsockopt_as(fd, libc::SOL_SOCKET, name, timeval(Duration::ZERO))?;
    Ok(Duration::new(tv.tv_sec as u64, tv.tv_usec as u32 * 1000))
}

pub fn set_linger(fd: Fd, seconds: Option<c_int>) -> R<()> {
    let value =
        libc::linger { l_onoff: seconds.is_some().into(), l_linger: seconds.unwrap_or_default() };
    setsockopt_as(fd, libc::SOL_SOCKET, libc::SO_LINGER, &value)
}

pub fn linger(fd: Fd) -> R<(c_int, c_int)> {
    let value = libc::linger { l_onoff: -1, l_linger: -1 };
    let value = getsockopt_as(fd, libc::SOL_SOCKET, libc::SO_LINGER, value)?;
    Ok((value.l_onoff, value.l_linger))
}

/// The TCP state as TCP_INFO tells it (1 is ESTABLISHED).
pub fn tcp_state(fd: Fd) -> R<u8> {
    // SAFETY: all-zero bytes are a valid tcp_info.
    let info: libc::tcp_info = unsafe { zeroed() };
    getsockopt_as(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info).map(|info| info.tcpi_state)
}

pub fn file_type(fd: Fd) -> R<u32> {
    // SAFETY: all-zero bytes are a valid stat.
    let mut stat: libc::stat = unsafe { zeroed() };
    // SAFETY: `stat` is live.
    unit(unsafe { libc::fstat(fd, &mut stat) })?;
    Ok(stat.st_mode & libc::S_IFMT)
}

pub fn pipe() -> R<(Fd, Fd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    unit(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    Ok((ends[0], ends[1]))
}

pub fn socketpair(kind: c_int) -> R<(Fd, Fd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    unit(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
    Ok((ends[0], ends[1]))
}

pub fn open(path: &str) -> R<Fd> {
    let path = CString::new(path).expect("a path without zero bytes");
    // SAFETY: `path` ends with a zero byte.
    int(unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) })
}

/// A file without a name, holding `data`, positioned at its start.
pub fn file_with(data: &[u8]) -> R<Fd> {
    // SAFETY: the name ends with a zero byte.
    let fd = int(unsafe { libc::memfd_create(c"case".as_ptr(), libc::MFD_CLOEXEC) })?;
    let mut done = 0;
    while done < data.len() {
        done += write(fd, &data[done..])?;
    }
    lseek(fd, 0, libc::SEEK_SET)?;
    Ok(fd)
}

pub fn eventfd(count: c_uint) -> R<Fd> {
    // SAFETY: takes no pointers.
    int(unsafe { libc::eventfd(count, libc::EFD_CLOEXEC) })
}

/// A timer descriptor that fires once.
pub fn timerfd(after: Duration) -> R<Fd> {
    // SAFETY: takes no pointers.
    let fd = int(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC) })?;
    let value =
        libc::itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(after) };
    // SAFETY: `value` is live; a null old value is allowed.
    unit(unsafe { libc::timerfd_settime(fd, 0, &value, null_mut()) })?;
    Ok(fd)
}

// ---- readiness ----

/// `poll` and `epoll` share these values.
const EVENT_NAMES: &[(u32, &str)] = &[
    (libc::EPOLLIN as u32, "IN"),
    (libc::EPOLLPRI as u32, "PRI"),
    (libc::EPOLLOUT as u32, "OUT"),
    (libc::EPOLLERR as u32, "ERR"),
    (libc::EPOLLHUP as u32, "HUP"),
    (libc::POLLNVAL as u32, "NVAL"),
    (libc::EPOLLRDNORM as u32, "RDNORM"),
    (libc::EPOLLRDBAND as u32, "RDBAND"),
    (libc::EPOLLWRNORM as u32, "WRNORM"),
    (libc::EPOLLWRBAND as u32, "WRBAND"),
    (libc::EPOLLRDHUP as u32, "RDHUP"),
];

pub fn event_names(mask: u32) -> String {
    let known = EVENT_NAMES.iter().filter(|(bit, _)| mask & bit != 0);
    let mut names: Vec<String> = known.map(|(_, name)| (*name).into()).collect();
    let rest = EVENT_NAMES.iter().fold(mask, |rest, (bit, _)| rest & !bit);
    if rest != 0 {
        names.push(format!("{rest:#x}"));
    }
    if names.is_empty() { "nothing".into() } else { names.join("|") }
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

fn timeval(time: Duration) -> libc::timeval {
    libc::timeval { tv_sec: time.as_secs() as i64, tv_usec: time.subsec_micros().into() }
}

fn pollfds(fds: &[(Fd, i16)]) -> Vec<libc::pollfd> {
    fds.iter().map(|(fd, events)| libc::pollfd { fd: *fd, events: *events, revents: 0 }).collect()
}

/// The count that `poll` returned, and each descriptor's events.
pub fn poll(fds: &[(Fd, i16)], timeout_ms: c_int) -> R<(c_int, Vec<u32>)> {
    let mut raw = pollfds(fds);
    // SAFETY: `raw` holds as many entries as told.
    let n = int(unsafe { libc::poll(raw.as_mut_ptr(), raw.len() as libc::nfds_t, timeout_ms) })?;
    Ok((n, raw.iter().map(|p| p.revents as u16 as u32).collect()))
}

pub fn poll_fortified(fds: &[(Fd, i16)], timeout_ms: c_int) -> R<(c_int, Vec<u32>)> {
    let mut raw = pollfds(fds);
    let (count, room) = (raw.len() as libc::nfds_t, size_of_val(raw.as_slice()));
    // SAFETY: `raw` holds as many entries as told.
    let n = int(unsafe { __poll_chk(raw.as_mut_ptr(), count, timeout_ms, room) })?;
    Ok((n, raw.iter().map(|p| p.revents as u16 as u32).collect()))
}

pub fn ppoll(
    fds: &[(Fd, i16)],
    timeout: Option<Duration>,
    mask: Option<&SigSet>,
) -> R<(c_int, Vec<u32>)> {
    let mut raw = pollfds(fds);
    let time = timeout.map(timespec);
    let time = time.as_ref().map_or(null(), |t| t as *const _);
    let mask = mask.map_or(null(), |m| &m.0 as *const _);
    // SAFETY: `raw` holds as many entries as told; the others are null or live.
    let n = int(unsafe { libc::ppoll(raw.as_mut_ptr(), raw.len() as libc::nfds_t, time, mask) })?;
    Ok((n, raw.iter().map(|p| p.revents as u16 as u32).collect()))
}

pub fn poll_too_many(count: u64) -> R<c_int> {
    let mut raw = pollfds(&[(-1, 0)]);
    // SAFETY: more entries than RLIMIT_NOFILE are refused before any is looked at.
    int(unsafe { libc::poll(raw.as_mut_ptr(), count, 0) })
}

fn fd_set(fds: &[Fd]) -> libc::fd_set {
    // SAFETY: all-zero bytes are a valid fd_set.
    let mut set: libc::fd_set = unsafe { zeroed() };
    for fd in fds {
        assert!((0..libc::FD_SETSIZE as c_int).contains(fd), "{fd} does not fit an fd_set");
        // SAFETY: `fd` fits the set.
        unsafe { libc::FD_SET(*fd, &mut set) };
    }
    set
}

fn members(fds: &[Fd], set: &libc::fd_set) -> Vec<Fd> {
    // SAFETY: `fd_set` has checked that every number fits.
    fds.iter().copied().filter(|fd| unsafe { libc::FD_ISSET(*fd, set) }).collect()
}

/// What a select call left in its three sets, and the time that it left (select only).
pub struct Selected {
    pub count: c_int,
    pub read: Vec<Fd>,
    pub write: Vec<Fd>,
    pub except: Vec<Fd>,
    pub left: Option<Duration>,
}

pub fn select(read: &[Fd], write: &[Fd], except: &[Fd], timeout: Option<Duration>) -> R<Selected> {
    let (mut r, mut w, mut e) = (fd_set(read), fd_set(write), fd_set(except));
    let nfds = [read, write, except].concat().into_iter().max().unwrap_or(-1) + 1;
    let mut time = timeout.map(timeval);
    let at = time.as_mut().map_or(null_mut(), |t| t as *mut _);
    // SAFETY: the sets are live and hold numbers below `nfds`; `at` is null or live.
    let count = int(unsafe { libc::select(nfds, &mut r, &mut w, &mut e, at) })?;
    let left = time.map(|t| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000));
    let (read, write) = (members(read, &r), members(write, &w));
    Ok(Selected { count, read, write, except: members(except, &e), left })
}

pub fn pselect(
    read: &[Fd],
    write: &[Fd],
    except: &[Fd],
    timeout: Option<Duration>,
    mask: Option<&SigSet>,
) -> R<Selected> {
    let (mut r, mut w, mut e) = (fd_set(read), fd_set(write), fd_set(except));
    let nfds = [read, write, except].concat().into_iter().max().unwrap_or(-1) + 1;
    let time = timeout.map(timespec);
    let at = time.as_ref().map_or(null(), |t| t as *const _);
    let mask = mask.map_or(null(), |m| &m.0 as *const _);
    // SAFETY: the sets are live and hold numbers below `nfds`; the others are null or live.
    let count = int(unsafe { libc::pselect(nfds, &mut r, &mut w, &mut e, at, mask) })?;
    let (read, write) = (members(read, &r), members(write, &w));
    Ok(Selected { count, read, write, except: members(except, &e), left: None })
}

pub fn select_count(nfds: c_int) -> R<c_int> {
    // SAFETY: null sets are allowed; a zero time makes the call return at once.
    let mut now = timeval(Duration::ZERO);
    // SAFETY: as above.
    int(unsafe { libc::select(nfds, null_mut(), null_mut(), null_mut(), &mut now) })
}

pub fn epoll_create() -> R<Fd> {
    // SAFETY: takes no pointers.
    int(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

pub fn epoll_ctl(set: Fd, op: c_int, fd: Fd, events: u32, data: u64) -> R<()> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: `event` is live.
    unit(unsafe { libc::epoll_ctl(set, op, fd, &mut event) })
}

pub fn epoll_ctl_null(set: Fd, op: c_int, fd: Fd) -> R<()> {
    // SAFETY: the kernel answers EFAULT where it needs the event, and ignores it elsewhere.
    unit(unsafe { libc::epoll_ctl(set, op, fd, null_mut()) })
}

/// Each event's data and mask.
pub type Events = Vec<(u64, u32)>;

fn events(raw: &[libc::epoll_event], count: c_int) -> Events {
    raw.iter().take(count as usize).map(|e| (e.u64, e.events)).collect()
}

const NO_EVENT: libc::epoll_event = libc::epoll_event { events: 0, u64: 0 };

pub fn epoll_wait(set: Fd, max: c_int, timeout_ms: c_int) -> R<Events> {
    let mut raw = vec![NO_EVENT; max.max(1) as usize];
    // SAFETY: `raw` has room for `max` events.
    let n = int(unsafe { libc::epoll_wait(set, raw.as_mut_ptr(), max, timeout_ms) })?;
    Ok(events(&raw, n))
}

pub fn epoll_pwait(set: Fd, max: c_int, timeout_ms: c_int, mask: Option<&SigSet>) -> R<Events> {
    let mut raw = vec![NO_EVENT; max.max(1) as usize];
    let mask = mask.map_or(null(), |m| &m.0 as *const _);
    // SAFETY: `raw` has room for `max` events; `mask` is null or live.
    let n = int(unsafe { libc::epoll_pwait(set, raw.as_mut_ptr(), max, timeout_ms, mask) })?;
    Ok(events(&raw, n))
}

pub fn epoll_wait_ns(set: Fd, max: c_int, timeout: Option<Duration>) -> R<Events> {
    let mut raw = vec![NO_EVENT; max.max(1) as usize];
    let time = timeout.map(timespec);
    let time = time.as_ref().map_or(null(), |t| t as *const _);
    // SAFETY: `raw` has room for `max` events; `time` is null or live.
    let n = int(unsafe { epoll_pwait2(set, raw.as_mut_ptr(), max, time, null()) })?;
    Ok(events(&raw, n))
}

// ---- signals ----

#[derive(Clone, Copy)]
pub struct SigSet(libc::sigset_t);

impl SigSet {
    pub fn empty() -> Self {
        // SAFETY: all-zero bytes are a valid sigset_t, which sigemptyset then fills in.
        let mut set = unsafe { zeroed() };
        // SAFETY: `set` is live.
        unsafe { libc::sigemptyset(&mut set) };
        SigSet(set)
    }

    pub fn with(mut self, signal: c_int) -> Self {
        // SAFETY: the set is live and initialised.
        unsafe { libc::sigaddset(&mut self.0, signal) };
        self
    }
}

/// Sets the calling thread's mask.
pub fn set_mask(set: &SigSet) {
    // SAFETY: `set` is live; a null old set is allowed.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &set.0, null_mut()) };
}

static HITS: AtomicUsize = AtomicUsize::new(0);
static HANDLER_FD: AtomicI32 = AtomicI32::new(-1);
static HANDLER_SENT: AtomicIsize = AtomicIsize::new(0);

extern "C" fn count(_: c_int) {
    HITS.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn count_and_send(_: c_int) {
    // SAFETY: errno's place is the thread's own; a handler must leave its value as it was.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    // Once: a handler that is run again must not send again, for the transcript's sake.
    if HITS.fetch_add(1, Ordering::SeqCst) == 0 {
        let fd = HANDLER_FD.load(Ordering::SeqCst);
        // SAFETY: the literal is live and one byte long; send is async-signal-safe.
        let sent = unsafe { libc::send(fd, c"!".as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
        HANDLER_SENT.store(sent, Ordering::SeqCst);
    }
    *errno = before;
}

static HANDLER_FORKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn count_and_fork(_: c_int) {
    // SAFETY: as in `count_and_send`.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    if HITS.fetch_add(1, Ordering::SeqCst) == 0 {
        // SAFETY: what was interrupted is a call of the case's, which holds no lock of libc's.
        match unsafe { libc::fork() } {
            0 => drop(read(HANDLER_FD.load(Ordering::SeqCst), &mut [0])),
            child => HANDLER_FORKED.store(child, Ordering::SeqCst),
        }
    }
    *errno = before;
}

extern "C" fn count_and_close(_: c_int) {
    // SAFETY: as in `count_and_send`.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    if HITS.fetch_add(1, Ordering::SeqCst) == 0 {
        let _ = close(HANDLER_FD.load(Ordering::SeqCst));
        HANDLER_SENT.store(1, Ordering::SeqCst);
    }
    *errno = before;
}

/// The child of the handler that forks.
pub fn handler_forked() -> c_int {
    HANDLER_FORKED.load(Ordering::SeqCst)
}

/// What a signal does: nothing, count, or count and (the first time) send "!" on a descriptor, or close it, or fork; the child then goes on
/// when a byte comes on the descriptor.
#[derive(Clone, Copy)]
pub enum Handler {
    Default,
    Ignore,
    Count,
    Send(Fd),
    Close(Fd),
    Fork(Fd),
}

pub fn on_signal(signal: c_int, handler: Handler, flags: c_int) {
    HITS.store(0, Ordering::SeqCst);
    // SAFETY: all-zero bytes are a valid sigaction.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_flags = flags;
    action.sa_sigaction = match handler {
        Handler::Default => libc::SIG_DFL,
        Handler::Ignore => libc::SIG_IGN,
        Handler::Count => count as extern "C" fn(c_int) as usize,
        Handler::Send(fd) => {
            HANDLER_FD.store(fd, Ordering::SeqCst);
            count_and_send as extern "C" fn(c_int) as usize
        }
        Handler::Close(fd) => {
            HANDLER_FD.store(fd, Ordering::SeqCst);
            HANDLER_SENT.store(0, Ordering::SeqCst);
            count_and_close as extern "C" fn(c_int) as usize
        }
        Handler::Fork(fd) => {
            HANDLER_FD.store(fd, Ordering::SeqCst);
            count_and_fork as extern "C" fn(c_int) as usize
        }
    };
    // SAFETY: the handlers only touch atomics, errno and `send`.
    let set = unsafe { libc::sigaction(signal, &action, null_mut()) };
    assert!(set == 0, "sigaction: {}", last());
}

/// How often a handler has run since the last `on_signal`.
pub fn handler_runs() -> usize {
    HITS.load(Ordering::SeqCst)
}

/// SIGALRM, once, after so long.
pub fn alarm(after: Duration) {
    let time = |after: Duration| libc::timeval {
        tv_sec: after.as_secs() as i64,
        tv_usec: i64::from(after.subsec_micros()),
    };
    let value = libc::itimerval { it_interval: time(Duration::ZERO), it_value: time(after) };
    // SAFETY: `value` is live; a null old value is allowed.
    unit(unsafe { libc::setitimer(libc::ITIMER_REAL, &value, null_mut()) }).expect("setitimer");
}

/// A handler that counts, as `signal` sets it.
pub fn on_signal_bsd(number: c_int) {
    HITS.store(0, Ordering::SeqCst);
    // SAFETY: the handler only counts.
    let before = unsafe { libc::signal(number, count as extern "C" fn(c_int) as usize) };
    assert_ne!(before, libc::SIG_ERR, "signal");
}

/// Sets again, by libc, the handler that the kernel tells of itself.
pub fn set_again(number: c_int) {
    // (The kernel's struct begins with the handler.)
    let mut old = [0usize; 4];
    // SAFETY: room for the kernel's struct; all-zero bytes are a valid sigaction.
    unsafe {
        libc::syscall(libc::SYS_rt_sigaction, number, 0, old.as_mut_ptr(), 8);
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = old[0];
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(number, &raw const action, null_mut());
    }
}

/// What the handler's `send` returned.
pub fn handler_sent() -> isize {
    HANDLER_SENT.load(Ordering::SeqCst)
}

pub fn kill(pid: c_int, signal: c_int) -> R<()> {
    // SAFETY: takes no pointers.
    unit(unsafe { libc::kill(pid, signal) })
}

pub fn kill_thread(tid: c_int, signal: c_int) -> R<()> {
    // SAFETY: takes no pointers.
    unit(unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, signal) } as c_int)
}

pub fn thread_id() -> c_int {
    // SAFETY: takes no pointers.
    unsafe { libc::gettid() }
}

/// Limits the numbers that descriptors may have.
pub fn limit_descriptors(count: u64) -> R<()> {
    // SAFETY: all-zero bytes are a valid rlimit.
    let mut limit: libc::rlimit = unsafe { zeroed() };
    // SAFETY: `limit` is live.
    unit(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) })?;
    limit.rlim_cur = count;
    // SAFETY: `limit` is live.
    unit(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) })
}

/// Ends this process with the thread that started it, however that one ends.
pub fn die_with_parent() {
    // SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

// ---- memory that comes late ----

/// A page that is not there until it is provided (userfaultfd): whoever touches it waits, in whatever it does. Where that is not to be had,
/// one that is there at once.
pub struct LatePage {
    faults: Option<Fd>,
    base: usize,
    content: [u8; PAGE],
}

const PAGE: usize = 4096;

impl LatePage {
    pub fn new(bytes: &[u8]) -> LatePage {
        // SAFETY: a fresh mapping.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        } as usize;
        let mut content = [0; PAGE];
        content[..bytes.len()].copy_from_slice(bytes);
        let page = LatePage { faults: Self::watch(base), base, content };
        if page.faults.is_none() {
            page.bytes().copy_from_slice(&content);
        }
        page
    }

    fn watch(base: usize) -> Option<Fd> {
        const UFFDIO_API: u64 = 0xc018_aa3f;
        const UFFDIO_REGISTER: u64 = 0xc020_aa00;
        let (mut api, mut register) = ([0xaa_u64, 0, 0], [base as u64, PAGE as u64, 1, 0]);
        // SAFETY: structs of the sizes that the requests name.
        unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as Fd;
            let ready = fd >= 0
                && libc::ioctl(fd, UFFDIO_API, &mut api) == 0
                && libc::ioctl(fd, UFFDIO_REGISTER, &mut register) == 0;
            ready.then_some(fd)
        }
    }

    #[allow(clippy::mut_from_ref)]
    pub fn bytes(&self) -> &'static mut [u8] {
        // SAFETY: the mapping stays for good, and cases use it in one call at a time.
        unsafe { std::slice::from_raw_parts_mut(self.base as *mut u8, PAGE) }
    }

    /// Is it not there at once?
    pub fn is_late(&self) -> bool {
        self.faults.is_some()
    }

    /// Waits until somebody touches it.
    pub fn await_touch(&self) {
        if let Some(fd) = self.faults {
            read(fd, &mut [0; 32]).expect("a fault");
        }
    }

    pub fn provide(&self) {
        const UFFDIO_COPY: u64 = 0xc028_aa03;
        let Some(fd) = self.faults else { return };
        let mut copy = [self.base as u64, self.content.as_ptr() as u64, PAGE as u64, 0, 0];
        // SAFETY: a struct uffdio_copy; the content is live.
        let done = unsafe { libc::ioctl(fd, UFFDIO_COPY, &mut copy) };
        assert!(done == 0, "the page: {}", last());
    }
}

// ---- threads of C ----

/// In which call a thread is cancelled.
#[derive(Clone, Copy)]
pub enum Waits {
    Recv,
    Poll,
    /// Over so many descriptors that they do not fit on the stack.
    PollMany,
    Ppoll,
    Select,
    Pselect,
    /// These wait on a set.
    EpollWait,
    EpollPwait,
    /// Into a pipe, of its own, that has room.
    Splice,
    /// Into one that is full.
    SpliceFull,
    /// Not for ever: it asks and is answered all the time.
    Traffic,
}

/// The number of the thread that is to be cancelled, and how many cleanup handlers have run.
static CANCELLED_TID: AtomicI32 = AtomicI32::new(0);
static CLEANED: AtomicI32 = AtomicI32::new(0);
/// What the thread closes when it has left its frames, plus one.
static CLOSES_AT_END: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" {
    fn _pthread_cleanup_push(
        buffer: *mut usize,
        routine: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut usize, execute: c_int);
}

extern "C" fn clean(_: *mut c_void) {
    CLEANED.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn close_at_end(_: *mut c_void) {
    // SAFETY: takes no pointers.
    unsafe { libc::close(CLOSES_AT_END.load(Ordering::SeqCst) - 1) };
}

extern "C" fn until_cancelled(argument: *mut c_void) -> *mut c_void {
    // SAFETY: lives until this thread is joined.
    let (fd, waits) = unsafe { *argument.cast::<(Fd, Waits)>() };
    CANCELLED_TID.store(thread_id(), Ordering::SeqCst);
    let mut byte = 0u8;
    let mut fds = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }; 300];
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let mut cleanup = [0usize; 4];
    if CLOSES_AT_END.load(Ordering::SeqCst) != 0 {
        let mut key = 0;
        // SAFETY: `key` is live; the value only says that there is one.
        unsafe {
            libc::pthread_key_create(&mut key, Some(close_at_end));
            libc::pthread_setspecific(key, argument);
        }
    }
    // SAFETY: all that is passed is live. A cancelled thread leaves this frame, in which nothing needs to be dropped, by libc's means.
    unsafe {
        let mut readable: libc::fd_set = zeroed();
        libc::FD_SET(fd, &mut readable);
        _pthread_cleanup_push(cleanup.as_mut_ptr(), clean, null_mut());
        let (byte, fds, none) = ((&raw mut byte).cast::<c_void>(), fds.as_mut_ptr(), null_mut());
        match waits {
            Waits::Recv => drop(libc::recv(fd, byte, 1, 0)),
            Waits::Poll => drop(libc::poll(fds, 1, -1)),
            Waits::PollMany => drop(libc::poll(fds, 300, -1)),
            Waits::Ppoll => drop(libc::ppoll(fds, 1, null(), null())),
            Waits::Select => {
                libc::select(fd + 1, &mut readable, none, none, null_mut());
            }
            Waits::Pselect => {
                libc::pselect(fd + 1, &mut readable, none, none, null(), null());
            }
            Waits::EpollWait => drop(libc::epoll_wait(fd, &mut event, 1, -1)),
            Waits::EpollPwait => drop(libc::epoll_pwait(fd, &mut event, 1, -1, null())),
            Waits::Splice | Waits::SpliceFull => {
                let mut pipe = [0; 2];
                libc::pipe(pipe.as_mut_ptr());
                if let Waits::SpliceFull = waits {
                    libc::fcntl(pipe[1], libc::F_SETPIPE_SZ, 4096);
                    libc::write(pipe[1], fds.cast(), 2048);
                    libc::write(pipe[1], fds.cast(), 2048);
                }
                libc::splice(fd, null_mut(), pipe[1], null_mut(), 1, 0);
            }
            Waits::Traffic => {
                while libc::send(fd, byte, 1, 0) == 1 && libc::recv(fd, byte, 1, 0) == 1 {}
            }
        }
        _pthread_cleanup_pop(cleanup.as_mut_ptr(), 0);
    }
    null_mut()
}

/// Starts a thread that waits for `fd`, calls `until` with its number, and cancels it. Tells whether it ended by that, and how many
/// of its cleanup handlers have run.
pub fn cancel_in(fd: Fd, waits: Waits, until: impl FnOnce(c_int)) -> String {
    CANCELLED_TID.store(0, Ordering::SeqCst);
    CLEANED.store(0, Ordering::SeqCst);
    let (mut thread, mut ended) = (0, null_mut());
    let mut argument = (fd, waits);
    // SAFETY: `thread` is live, and `argument` until the thread is joined.
    let failed = unsafe {
        libc::pthread_create(&mut thread, null(), until_cancelled, (&raw mut argument).cast())
    };
    assert!(failed == 0, "pthread_create: {}", Errno(failed));
    while CANCELLED_TID.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    until(CANCELLED_TID.load(Ordering::SeqCst));
    // SAFETY: the thread was created above and is joined once, here.
    unsafe {
        libc::pthread_cancel(thread);
        libc::pthread_join(thread, &mut ended);
    }
    // PTHREAD_CANCELED
    let how = if ended as isize == -1 { "by that" } else { "by itself" };
    format!("{how}, {} cleaned", CLEANED.load(Ordering::SeqCst))
}

/// The same; when the thread has left its frames, it closes `fd`.
pub fn cancel_and_close_in(fd: Fd, waits: Waits, until: impl FnOnce(c_int)) -> String {
    CLOSES_AT_END.store(fd + 1, Ordering::SeqCst);
    let how = cancel_in(fd, waits, until);
    CLOSES_AT_END.store(0, Ordering::SeqCst);
    how
}

// ---- processes ----

static FORKED: AtomicBool = AtomicBool::new(false);

/// Did `fork` make this process?
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Forks; the child does `work` and ends without running anything else. Cases fork while they have
/// one thread only, so the child may do whatever a program does.
pub fn fork(work: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: one thread, so no lock is held by a thread that the child lacks.
    match int(unsafe { libc::fork() }).expect("fork") {
        0 => {
            FORKED.store(true, Ordering::Relaxed);
            exit_now(work())
        }
        pid => pid,
    }
}

static FORK_BEGINS: Mutex<Option<(Fd, Fd)>> = Mutex::new(None);
static FORK_GOES_ON: Mutex<Option<(Fd, Fd)>> = Mutex::new(None);
static MADE_DURING_FORK: AtomicI32 = AtomicI32::new(-1);

fn ends_of(which: &Mutex<Option<(Fd, Fd)>>) -> (Fd, Fd) {
    which.lock().expect("a lock").expect("hold_forks was called")
}

/// From now on a fork waits, in the first of its handlers, until another thread is through with `during_fork`.
pub fn hold_forks() {
    extern "C" fn before() {
        write(ends_of(&FORK_BEGINS).1, b"!").expect("write");
        read(ends_of(&FORK_GOES_ON).0, &mut [0; 1]).expect("read");
    }
    *FORK_BEGINS.lock().expect("a lock") = Some(pipe().expect("pipe"));
    *FORK_GOES_ON.lock().expect("a lock") = Some(pipe().expect("pipe"));
    // SAFETY: a function that lives for ever.
    unsafe { libc::pthread_atfork(Some(before), None, None) };
}

/// Waits for a fork to begin, and keeps it waiting while `work` makes a descriptor.
pub fn during_fork(work: impl FnOnce() -> Fd) -> Fd {
    read(ends_of(&FORK_BEGINS).0, &mut [0; 1]).expect("read");
    let made = work();
    MADE_DURING_FORK.store(made, Ordering::SeqCst);
    write(ends_of(&FORK_GOES_ON).1, b"!").expect("write");
    made
}

pub fn made_during_fork() -> Fd {
    MADE_DURING_FORK.load(Ordering::SeqCst)
}

/// Changes the user and the group to those that they are.
pub fn become_oneself() -> R<()> {
    // SAFETY: no memory is passed.
    unsafe {
        int(libc::setuid(libc::getuid()))?;
        int(libc::setreuid(u32::MAX, libc::geteuid()))?;
        int(libc::setresgid(u32::MAX, libc::getegid(), u32::MAX)).map(drop)
    }
}

/// This thread leaves what it shares with the others.
pub fn unshare(flags: c_int) -> R<()> {
    // SAFETY: no memory is passed.
    int(unsafe { libc::unshare(flags) }).map(drop)
}

/// A place to jump back to: the stack pointer behind the registers that a function keeps.
#[cfg(target_arch = "x86_64")]
static JUMP: AtomicUsize = AtomicUsize::new(0);

/// Calls `work(argument)`: 0 when it returns, 1 when it is left by `jump_back`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn call_or_jump(
    work: unsafe extern "C" fn(*mut c_void),
    argument: *mut c_void,
    place: *mut usize,
) -> c_int {
    core::arch::naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov [rdx], rsp",
        "mov rax, rdi",
        "mov rdi, rsi",
        "call rax",
        "xor eax, eax",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn jump_back(place: usize) -> ! {
    core::arch::naked_asm!(
        "mov rsp, rdi",
        "mov eax, 1",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

/// Does `work` until a signal comes, whose handler leaves it as siglongjmp does. (Elsewhere than on x86-64 it does nothing.)
pub fn left_by_jump(signal: c_int, after_ms: i64, work: &mut dyn FnMut()) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        extern "C" fn handler(_: c_int) {
            // SAFETY: `call_or_jump` is under way; its frame and what it calls hold nothing that must be dropped.
            unsafe { jump_back(JUMP.load(Ordering::SeqCst)) }
        }
        unsafe extern "C" fn call(work: *mut c_void) {
            // SAFETY: the reference below.
            unsafe { (*work.cast::<&mut dyn FnMut()>())() }
        }
        let mut work = work;
        // SAFETY: structs of ours; the handler stays, and is not called again.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handler as extern "C" fn(c_int) as usize;
            action.sa_flags = libc::SA_NODEFER;
            libc::sigaction(signal, &action, null_mut());
            let time = libc::itimerval {
                it_interval: zeroed(),
                it_value: libc::timeval { tv_sec: 0, tv_usec: after_ms * 1000 },
            };
            libc::setitimer(libc::ITIMER_REAL, &time, null_mut());
            call_or_jump(call, (&raw mut work).cast(), JUMP.as_ptr()) == 1
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (signal, after_ms, work);
        true
    }
}

/// Writes over memory of which the program knows nothing.
pub fn overwrite(at: usize, len: usize, byte: u8) {
    // SAFETY: mapped and writable, by the caller's word; and the child that does this uses nothing of it.
    unsafe { std::ptr::write_bytes(at as *mut u8, byte, len) };
}

pub fn exit_now(status: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

/// By libc's `syscall`.
pub fn exit_by_call(status: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::syscall(libc::SYS_exit_group, status) };
    exit_now(status)
}

pub fn exit_with_handlers(status: c_int) -> ! {
    // SAFETY: cases call this from their main thread, once.
    unsafe { libc::exit(status) }
}

// ---- a child that its parent stops within a call ----

/// The parent traces this process, which has not yet stopped.
pub fn be_traced() {
    // SAFETY: no memory is passed.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
}

/// Stops until the parent goes on.
pub fn stop() {
    // SAFETY: no memory is passed.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Where a traced child is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traced {
    /// At its next `stop`, or at its end.
    AtStop,
    /// Where it was stopped.
    Within,
    /// It sleeps in a system call.
    Asleep,
}

/// Goes on with a traced child until its next `stop`, or its end.
pub fn go_on(pid: c_int) -> Traced {
    // SAFETY: no memory is passed. One that is asleep is stopped when it wakes.
    unsafe { libc::ptrace(libc::PTRACE_CONT, pid, 0, 0) };
    loop {
        match stopped(pid, 0) {
            Some(0 | libc::SIGSTOP) | None => return Traced::AtStop,
            // SAFETY: as above.
            Some(_) => unsafe { libc::ptrace(libc::PTRACE_CONT, pid, 0, 0) },
        };
    }
}

/// The signal that has stopped a traced child; 0 if it has ended.
fn stopped(pid: c_int, flags: c_int) -> Option<c_int> {
    let mut status = 0;
    // SAFETY: `status` is live.
    let found = int(unsafe { libc::waitpid(pid, &mut status, flags) }).expect("a child");
    (found != 0).then(|| if libc::WIFSTOPPED(status) { libc::WSTOPSIG(status) } else { 0 })
}

/// Lets a traced child do so many operations that others may see: atomic ones that read and write, and system calls.
pub fn step(pid: c_int, mut operations: usize) -> Traced {
    while operations > 0 {
        operations -= usize::from(is_seen_by_others(pid));
        // SAFETY: no memory is passed.
        unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, pid, 0, 0) };
        let mut looks = 0;
        let signal = loop {
            match stopped(pid, libc::WNOHANG) {
                Some(signal) => break signal,
                None => looks += 1,
            }
            std::thread::yield_now();
            if looks % 64 == 0 {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
                if stat.is_ok_and(|stat| stat.contains(") S ")) {
                    return Traced::Asleep;
                }
            }
        };
        if matches!(signal, 0 | libc::SIGSTOP) {
            return Traced::AtStop;
        }
    }
    Traced::Within
}

/// Is the next instruction of a stopped child such an operation? (Elsewhere than on x86-64 each one counts.)
fn is_seen_by_others(pid: c_int) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: all-zero bytes are valid registers, which are live.
        let mut registers: libc::user_regs_struct = unsafe { zeroed() };
        // SAFETY: as above.
        unsafe { libc::ptrace(libc::PTRACE_GETREGS, pid, 0, &raw mut registers) };
        // SAFETY: the child's memory is read.
        let word = unsafe { libc::ptrace(libc::PTRACE_PEEKTEXT, pid, registers.rip, 0) };
        let code = word.to_le_bytes();
        let is_prefix =
            |byte: u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x66 | 0xf2 | 0xf3);
        let at = code.iter().position(|&byte| !is_prefix(byte)).unwrap_or(0);
        if code[at] == 0xf0 {
            return true; // lock
        }
        let rex = usize::from(code.get(at).is_some_and(|byte| byte & 0xf0 == 0x40));
        match code.get(at + rex..at + rex + 2) {
            Some([0x86 | 0x87, operands]) => operands >> 6 != 3, // xchg with memory
            Some([0x0f, 0x05]) => true,                          // syscall
            _ => false,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = pid;
        true
    }
}

/// Waits for a child, and tells how it ended.
pub fn wait_for(pid: c_int) -> String {
    let mut status = 0;
    loop {
        // SAFETY: `status` is live.
        match int(unsafe { libc::waitpid(pid, &mut status, 0) }) {
            Err(Errno(libc::EINTR)) => continue,
            Err(e) => return format!("{e}"),
            Ok(_) if libc::WIFSIGNALED(status) => {
                return format!("signal {}", libc::WTERMSIG(status));
            }
            Ok(_) => return format!("exit {}", libc::WEXITSTATUS(status)),
        }
    }
}

fn words(args: &[&str]) -> (Vec<CString>, Vec<*mut c_char>) {
    let owned: Vec<CString> =
        args.iter().map(|a| CString::new(*a).expect("no zero byte")).collect();
    let mut raw: Vec<*mut c_char> = owned.iter().map(|a| a.as_ptr().cast_mut()).collect();
    raw.push(null_mut());
    (owned, raw)
}

/// Becomes another program; returns only what went wrong.
pub fn exec(args: &[&str]) -> Errno {
    let (owned, raw) = words(args);
    // SAFETY: the strings end with zero bytes and the array with a null.
    unsafe { libc::execvp(owned[0].as_ptr(), raw.as_ptr().cast()) };
    last()
}

unsafe extern "C" {
    static environ: *const *mut c_char;
}

/// `posix_spawnp`, with `stdin` and `stdout` put in place of 0 and 1 if given.
pub fn spawn(args: &[&str], stdio: Option<(Fd, Fd)>) -> R<c_int> {
    let (owned, raw) = words(args);
    let mut pid = 0;
    // SAFETY: all-zero bytes are storage that posix_spawn_file_actions_init fills in.
    let mut actions: libc::posix_spawn_file_actions_t = unsafe { zeroed() };
    // SAFETY: `actions` is live until destroyed below, the strings and the array end as they must.
    let failed = unsafe {
        libc::posix_spawn_file_actions_init(&mut actions);
        if let Some((input, output)) = stdio {
            libc::posix_spawn_file_actions_adddup2(&mut actions, input, 0);
            libc::posix_spawn_file_actions_adddup2(&mut actions, output, 1);
        }
        let (file, argv) = (owned[0].as_ptr(), raw.as_ptr());
        let failed = libc::posix_spawnp(&mut pid, file, &actions, null(), argv, environ);
        libc::posix_spawn_file_actions_destroy(&mut actions);
        failed
    };
    if failed == 0 { Ok(pid) } else { Err(Errno(failed)) }
}

/// Starts a program in a vfork child (one with our memory), which first closes a descriptor of its own.
pub fn vfork_and_close(fd: Fd, args: &[&str]) -> c_int {
    struct Work {
        fd: Fd,
        words: (Vec<CString>, Vec<*mut c_char>),
    }
    extern "C" fn child(work: *mut libc::c_void) -> c_int {
        // SAFETY: the `Work` below, which lives until we have exec'd; strings and array end as they must.
        unsafe {
            let work = &*work.cast::<Work>();
            libc::close(work.fd);
            libc::execvp(work.words.0[0].as_ptr(), work.words.1.as_ptr().cast());
            libc::_exit(127)
        }
    }
    let mut work = Work { fd, words: words(args) };
    let mut stack = vec![0u128; 4096];
    // SAFETY: the child runs on the stack, whose end is aligned, and is done with it when clone returns (CLONE_VFORK).
    int(unsafe {
        libc::clone(
            child,
            stack.as_mut_ptr_range().end.cast(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            (&raw mut work).cast(),
        )
    })
    .expect("clone")
}

pub fn system(command: &str) -> c_int {
    let command = CString::new(command).expect("no zero byte");
    // SAFETY: the string ends with a zero byte.
    libc::WEXITSTATUS(unsafe { libc::system(command.as_ptr()) })
}

/// All that a command prints, and its exit status.
pub fn popen(command: &str) -> R<(String, c_int)> {
    let command = CString::new(command).expect("no zero byte");
    // SAFETY: both strings end with zero bytes.
    let file = unsafe { libc::popen(command.as_ptr(), c"r".as_ptr()) };
    let mut stream = Stream::of(file)?;
    let mut all = String::new();
    while let Some(line) = stream.gets() {
        all.push_str(&line);
    }
    // SAFETY: `file` came from popen and is closed once.
    let status = unsafe { libc::pclose(file) };
    Ok((all, libc::WEXITSTATUS(status)))
}

/// Sends a descriptor, with one byte, over a Unix socket.
pub fn pass_fd(over: Fd, fd: Fd) -> R<usize> {
    send_with_fds(over, b"D", &[fd], 0)
}

pub fn receive_fd(over: Fd) -> R<Fd> {
    recv_with_control(over, 1, 0)?.fds.first().copied().ok_or(Errno(libc::EBADF))
}

/// Sends descriptors with the first of some bytes.
pub fn send_with_fds(over: Fd, data: &[u8], fds: &[Fd], flags: c_int) -> R<usize> {
    let bytes: Vec<u8> = fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
    send_with_control(over, data, libc::SCM_RIGHTS, &bytes, flags)
}

/// Sends this process's credentials with the first of some bytes.
pub fn send_with_credentials(over: Fd, data: &[u8]) -> R<usize> {
    // SAFETY: these calls only tell.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let words = [std::process::id(), uid, gid];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    send_with_control(over, data, libc::SCM_CREDENTIALS, &bytes, 0)
}

fn send_with_control(over: Fd, data: &[u8], kind: c_int, bytes: &[u8], flags: c_int) -> R<usize> {
    let mut control = [0u64; 32];
    let mut vector = slices(&[data]);
    // SAFETY: all-zero bytes are a valid msghdr.
    let mut msg: libc::msghdr = unsafe { zeroed() };
    msg.msg_iov = vector.as_mut_ptr();
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    assert!(bytes.len() <= size_of_val(&control) / 2, "room for the control data");
    // SAFETY: CMSG_SPACE and CMSG_LEN only compute; `control` has room for one header and `bytes`.
    unsafe {
        msg.msg_controllen = libc::CMSG_SPACE(bytes.len() as u32) as _;
        let header = libc::CMSG_FIRSTHDR(&msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(bytes.len() as u32) as _;
        libc::CMSG_DATA(header).copy_from(bytes.as_ptr(), bytes.len());
    }
    // SAFETY: every pointer in `msg` is to a live local or to `data`.
    size(unsafe { libc::sendmsg(over, &msg, flags) })
}

/// What came with a message.
pub struct Carried {
    pub data: Vec<u8>,
    pub fds: Vec<Fd>,
    /// The sender's process, if the socket asks for it.
    pub pid: Option<c_int>,
    pub flags: c_int,
}

pub fn recv_with_control(over: Fd, len: usize, flags: c_int) -> R<Carried> {
    let mut control = [0u64; 32];
    let (bufs, mut vector) = buffers(&[len]);
    // SAFETY: all-zero bytes are a valid msghdr.
    let mut msg: libc::msghdr = unsafe { zeroed() };
    msg.msg_iov = vector.as_mut_ptr();
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = size_of_val(&control) as _;
    // SAFETY: every pointer in `msg` is to a live local of the length given beside it.
    let got = size(unsafe { libc::recvmsg(over, &mut msg, flags) })?;
    let data = joined(&bufs, got);
    let mut carried = Carried { data, fds: Vec::new(), pid: None, flags: msg.msg_flags };
    // SAFETY: `msg` is as recvmsg left it; its headers and their data lie in `control`.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&msg);
        while !header.is_null() {
            let place: *const c_int = libc::CMSG_DATA(header).cast();
            let words = ((*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize) / 4;
            match (*header).cmsg_type {
                libc::SCM_RIGHTS => {
                    carried.fds.extend((0..words).map(|i| place.add(i).read_unaligned()));
                }
                libc::SCM_CREDENTIALS => carried.pid = Some(place.read_unaligned()),
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&msg, header);
        }
    }
    Ok(carried)
}

/// The process that SO_PEERCRED tells.
pub fn peer_process(fd: Fd) -> R<u32> {
    let credentials = getsockopt_as(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, [0u32; 3])?;
    Ok(credentials[0])
}

// ---- stdio ----

/// A C stream. Not closed by itself: closing is something that cases do and record.
pub struct Stream(*mut libc::FILE);

impl Stream {
    fn of(file: *mut libc::FILE) -> R<Stream> {
        if file.is_null() { Err(last()) } else { Ok(Stream(file)) }
    }

    pub fn on(fd: Fd, mode: &CStr) -> R<Stream> {
        // SAFETY: `mode` ends with a zero byte.
        Stream::of(unsafe { libc::fdopen(fd, mode.as_ptr()) })
    }

    pub fn printf(&mut self, text: &str, number: c_int) -> c_int {
        let text = CString::new(text).expect("no zero byte");
        // SAFETY: the stream is open, and the arguments are what the format asks for.
        unsafe { libc::fprintf(self.0, c"%s %d\n".as_ptr(), text.as_ptr(), number) }
    }

    pub fn flush(&mut self) -> R<()> {
        // SAFETY: the stream is open.
        unit(unsafe { libc::fflush(self.0) })
    }

    pub fn gets(&mut self) -> Option<String> {
        let mut line = [0u8; 256];
        // SAFETY: `line` is as long as told, and the stream is open.
        let got = unsafe { libc::fgets(line.as_mut_ptr().cast(), line.len() as c_int, self.0) };
        let text = CStr::from_bytes_until_nul(&line).expect("fgets ends with a zero byte");
        (!got.is_null()).then(|| text.to_string_lossy().into_owned())
    }

    /// Reads up to `len` bytes with `fread`.
    pub fn fread(&mut self, len: usize) -> Vec<u8> {
        let mut buf = vec![0; len];
        // SAFETY: `buf` is `len` bytes long, and the stream is open.
        let got = unsafe { libc::fread(buf.as_mut_ptr().cast(), 1, len, self.0) };
        buf.truncate(got);
        buf
    }

    pub fn close(self) -> R<()> {
        // SAFETY: the stream is open, and `self` is used up.
        unit(unsafe { libc::fclose(self.0) })
    }
}

pub fn print_to(fd: Fd, text: &str, number: c_int) -> c_int {
    let text = CString::new(text).expect("no zero byte");
    // SAFETY: the arguments are what the format asks for.
    unsafe { dprintf(fd, c"%s %d\n".as_ptr(), text.as_ptr(), number) }
}

// ---- ringlet ----

type PathOf = unsafe extern "C" fn(c_int) -> c_int;

/// Where a connection's bytes go: 1 the kernel, 2 on the move, 3 the ring; 0 without ringlet.
pub fn ringlet_path(fd: Fd) -> c_int {
    static ASK: OnceLock<Option<PathOf>> = OnceLock::new();
    let ask = ASK.get_or_init(|| {
        // SAFETY: the name ends with a zero byte.
        let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ringlet_path".as_ptr()) };
        // SAFETY: a symbol of this name is this function; null is None.
        unsafe { std::mem::transmute::<*mut c_void, Option<PathOf>>(at) }
    });
    // SAFETY: any number may be asked about.
    ask.map_or(0, |ask| unsafe { ask(fd) })
}

const _: () = assert!(size_of::<c_long>() == 8, "the suite is for 64-bit machines");
