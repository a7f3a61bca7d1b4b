//! Descriptors: eventfds, polling, epoll, and the hiding place of those that the program must not meet.

use crate::map::Scratch;
use crate::sys::{Errno, Sys, close, sys};

pub use libc::{epoll_event, pollfd};

/// Our own descriptors lie from here up, if the limit allows: out of the way of programs that count on low numbers. KERNEL: each fork copies the
/// table of descriptors up to the highest.
pub const HIDDEN_FROM: i32 = 512;

/// None of ours is one of the standard streams, which a program may have closed: others would read and write there; and 0 is none of ours
/// wherever one is kept.
const LOWEST: i32 = 3;

/// Moves a descriptor of ours up, close-on-exec. It is closed if it can't stay where it is either.
pub fn hide(fd: i32) -> Sys<i32> {
    match duplicate_high(fd, HIDDEN_FROM) {
        Err(_) if fd >= LOWEST => Ok(fd),
        moved => {
            close(fd);
            moved
        }
    }
}

pub fn eventfd() -> Sys<i32> {
    // SAFETY: no memory is passed.
    let fd = unsafe { sys!(SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)? };
    hide(fd as i32)
}

/// Another number, at least `from`, for one of our own; half or a quarter of that where the limit is lower, or whatever there is.
pub fn duplicate_high(fd: i32, from: i32) -> Sys<i32> {
    let mut made = Err(Errno::EINVAL);
    for from in [from, from / 2, from / 4, 0] {
        let from = from.max(LOWEST);
        // SAFETY: no memory is passed.
        made = unsafe { sys!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, from) };
        // KERNEL: EINVAL says that the number lies beyond the limit, EMFILE that all up to it are taken.
        if made.is_ok() {
            break;
        }
    }
    made.map(|fd| fd as i32)
}

/// How many descriptors ringlet may hold in this process, of one kind: an eighth of what the program is allowed. What it
/// takes, the program can't have.
pub fn share() -> usize {
    limit() / 8
}

/// RLIMIT_NOFILE, as far as it matters.
pub fn limit() -> usize {
    let mut limit = [0u64; 2];
    // SAFETY: 16 writable bytes, for the soft and the hard limit.
    let got = unsafe { sys!(SYS_prlimit64, 0, libc::RLIMIT_NOFILE, 0, limit.as_mut_ptr()) };
    got.map_or(0, |_| limit[0].min(1 << 20) as usize)
}

pub fn is_open(fd: i32) -> bool {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_fcntl, fd, libc::F_GETFD) }.is_ok()
}

pub fn is_epoll(fd: i32) -> bool {
    link_starts_with(fd, b"anon_inode:[eventpoll]")
}

/// Is this descriptor an eventfd? (What a peer sends in place of one must not block us or act on our behalf.)
pub fn is_eventfd(fd: i32) -> bool {
    link_starts_with(fd, b"anon_inode:[eventfd]")
}

pub fn is_socket(fd: i32) -> bool {
    // SAFETY: zero is a valid struct stat.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: a writable struct stat.
    unsafe { sys!(SYS_fstat, fd, &raw mut stat) }.is_ok()
        && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK
}

pub fn is_io_uring(fd: i32) -> bool {
    link_starts_with(fd, b"anon_inode:[io_uring]")
}

/// Has this process an io_uring, beside those `known`? (What can't be looked at is taken for none.)
pub fn any_io_uring(known: impl Fn(i32) -> bool) -> bool {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    let opened = unsafe { sys!(SYS_openat, libc::AT_FDCWD, c"/proc/self/fd".as_ptr(), flags, 0) };
    let Ok(all) = opened.map(|fd| fd as i32) else { return false };
    let mut list = [0u8; 1024];
    let found = loop {
        // SAFETY: a buffer of its length.
        let got = unsafe { sys!(SYS_getdents64, all, list.as_mut_ptr(), list.len()) };
        let Ok(got @ 1..) = got else { break false };
        if numbers(&list[..got]).any(|fd| !known(fd) && fd != all && is_io_uring(fd)) {
            break true;
        }
    };
    crate::sys::close(all);
    found
}

/// The entries of a list by getdents64 whose names are numbers.
fn numbers(list: &[u8]) -> impl Iterator<Item = i32> {
    // struct linux_dirent64: number and offset, 8 bytes each; length, 2; kind, 1; then the name.
    let mut rest = list;
    let names = core::iter::from_fn(move || {
        let len = usize::from(u16::from_ne_bytes([*rest.get(16)?, *rest.get(17)?]));
        let name = rest.get(19..len)?;
        rest = &rest[len..];
        Some(name)
    });
    names.filter_map(|name| {
        let name = name.split(|byte| *byte == 0).next()?;
        core::str::from_utf8(name).ok()?.parse().ok()
    })
}

fn link_starts_with(fd: i32, kind: &[u8]) -> bool {
    let mut path = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
    write_decimal(&mut path[14..], fd as u32);
    let mut link = [0u8; 32];
    // SAFETY: `path` is NUL-terminated, `link` valid for its length.
    let n = unsafe {
        sys!(SYS_readlinkat, libc::AT_FDCWD, path.as_ptr(), link.as_mut_ptr(), link.len())
    };
    n.is_ok_and(|n| link[..n].starts_with(kind))
}

/// Decimal digits at the start of `to`; returns how many.
pub fn write_decimal(to: &mut [u8], mut value: u32) -> usize {
    let mut digits = [0u8; 10];
    let mut n = 0;
    loop {
        digits[n] = b'0' + (value % 10) as u8;
        value /= 10;
        n += 1;
        if value == 0 {
            break;
        }
    }
    for i in 0..n {
        to[i] = digits[n - 1 - i];
    }
    n
}

/// Rings an eventfd. A full counter is as good as rung; any other failure is the peer's loss. False if a signal ended the wait that a holder of it
/// has made of that.
pub fn ring(fd: i32) -> bool {
    ring_by(fd, 1)
}

/// The same, by a number of the caller's.
pub fn ring_by(fd: i32, count: u64) -> bool {
    // SAFETY: eight readable bytes.
    unsafe { sys!(SYS_write, fd, &raw const count, 8) != Err(Errno::EINTR) }
}

/// Takes whatever an eventfd holds.
pub fn drain(fd: i32) -> u64 {
    let mut count = 0u64;
    // SAFETY: eight writable bytes.
    let _ = unsafe { sys!(SYS_read, fd, &raw mut count, 8) };
    count
}

/// `None` waits for ever. The signal mask, if given, is the kernel's 8 bytes.
pub fn poll(fds: &mut [pollfd], timeout_ns: Option<u64>, mask: Option<u64>) -> Sys<usize> {
    // SAFETY: `fds` is a valid array of its length.
    match unsafe { poll_raw(fds.as_mut_ptr(), fds.len(), timeout_ns, mask) } {
        Err(Errno::EINVAL) => poll_by_select(fds, timeout_ns, mask),
        done => done,
    }
}

/// KERNEL: poll takes no more entries than RLIMIT_NOFILE says, of which a program that has closed itself in may leave none; select takes all. (It
/// tells of an end or an error only who asks for bytes or room.)
#[cold]
pub fn poll_by_select(
    fds: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    const ASKED: [i16; 3] =
        [libc::POLLIN | libc::POLLRDNORM, libc::POLLOUT | libc::POLLWRNORM, libc::POLLPRI];
    let mut closed = false;
    for entry in fds.iter_mut() {
        // (Of these select knows nothing but EBADF, and their numbers may be any.)
        let is_closed = entry.fd >= 0 && !is_open(entry.fd);
        entry.revents = if is_closed { libc::POLLNVAL } else { 0 };
        closed |= is_closed;
    }
    let timeout_ns = if closed { Some(0) } else { timeout_ns };
    let asks = |entry: &&pollfd| entry.fd >= 0 && entry.revents & libc::POLLNVAL == 0;
    let count = fds.iter().filter(asks).map(|entry| entry.fd as usize + 1).max().unwrap_or(0);
    let words = count.div_ceil(64).max(1);
    let mut sets = Scratch::new(ASKED.len() * words, 0u64).ok_or(Errno::ENOMEM)?;
    let bit = |set: usize, fd: i32| (set * words + fd as usize / 64, 1 << (fd % 64));
    for (set, asked) in ASKED.into_iter().enumerate() {
        for entry in fds.iter().filter(asks).filter(|entry| entry.events & asked != 0) {
            let (word, bit) = bit(set, entry.fd);
            sets[word] |= bit;
        }
    }
    let mut time = timespec(timeout_ns.unwrap_or(0));
    let time = if timeout_ns.is_some() { &raw mut time } else { core::ptr::null_mut() };
    let mask = mask.as_ref().map_or(core::ptr::null(), |mask| mask as *const u64);
    let (base, mask) = (sets.as_mut_ptr(), [mask as usize, 8]);
    let at = |set| base.wrapping_add(set * words);
    // SAFETY: three sets of `words` words; the time, and the mask with its size, are locals.
    unsafe { sys!(SYS_pselect6, count, at(0), at(1), at(2), time, mask.as_ptr())? };
    let mut ready = 0;
    for entry in fds {
        let asks = asks(&&*entry);
        for (set, asked) in ASKED.into_iter().enumerate().filter(|_| asks) {
            let (word, bit) = bit(set, entry.fd);
            entry.revents |= if sets[word] & bit != 0 { entry.events & asked } else { 0 };
        }
        ready += usize::from(entry.revents != 0);
    }
    Ok(ready)
}

/// Would a write of a little not wait?
pub fn is_writable(fd: i32) -> bool {
    let mut one = [pollfd { fd, events: libc::POLLOUT, revents: 0 }];
    poll(&mut one, Some(0), None) == Ok(1) && one[0].revents & libc::POLLOUT != 0
}

/// # Safety
/// `fds .. fds + count` is valid for reading and writing.
pub unsafe fn poll_raw(
    fds: *mut pollfd,
    count: usize,
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let mut time = timespec(timeout_ns.unwrap_or(0));
    let time = if timeout_ns.is_some() { &raw mut time } else { core::ptr::null_mut() };
    let pointer = mask.as_ref().map_or(core::ptr::null(), |mask| mask as *const u64);
    // SAFETY: the array by contract; the time and mask are locals.
    let result = unsafe { sys!(SYS_ppoll, fds, count, time, pointer, 8) };
    #[cfg(target_arch = "x86_64")]
    if mask.is_none() && is_barred(&result) {
        // SAFETY: the array is valid for `count` entries by our own contract.
        return unsafe { sys!(SYS_poll, fds, count, milliseconds(timeout_ns)) };
    }
    result
}

/// Does the kernel not have this call, or a filter forbid it? (For calls that fail in no such way themselves.)
pub fn is_barred(result: &Sys<usize>) -> bool {
    matches!(result, Err(Errno::ENOSYS | Errno::EPERM | Errno::EACCES))
}

/// For calls that know no finer time: rounded up, so that a wait is never shorter than asked.
pub fn milliseconds(timeout_ns: Option<u64>) -> i32 {
    timeout_ns.map_or(-1, |ns| ns.div_ceil(1_000_000).min(i32::MAX as u64) as i32)
}

pub fn timespec(ns: u64) -> libc::timespec {
    libc::timespec { tv_sec: (ns / 1_000_000_000) as _, tv_nsec: (ns % 1_000_000_000) as _ }
}

/// Events that are pending on one descriptor now, without waiting.
pub fn pending(fd: i32, events: i16) -> i16 {
    let mut fds = [pollfd { fd, events, revents: 0 }];
    match poll(&mut fds, Some(0), None) {
        Ok(1) => fds[0].revents,
        _ => 0,
    }
}

pub fn epoll_create() -> Sys<i32> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) }.map(|fd| fd as i32)
}

pub fn epoll_ctl(epfd: i32, op: i32, fd: i32, event: Option<epoll_event>) -> Sys<()> {
    let event = event.as_ref().map_or(core::ptr::null(), |event| event as *const epoll_event);
    // SAFETY: null or a valid event.
    unsafe { sys!(SYS_epoll_ctl, epfd, op, fd, event) }.map(drop)
}

/// # Safety
/// `events .. events + max` is valid for writing.
pub unsafe fn epoll_wait(
    epfd: i32,
    events: *mut epoll_event,
    max: usize,
    timeout_ns: Option<u64>,
    mask: Option<u64>,
) -> Sys<usize> {
    let mask = mask.as_ref().map_or(core::ptr::null(), |mask| mask as *const u64);
    let time = timespec(timeout_ns.unwrap_or(0));
    let pointer = if timeout_ns.is_some() { &raw const time } else { core::ptr::null() };
    // SAFETY: the array by contract; the time and mask are locals.
    let result = unsafe { sys!(SYS_epoll_pwait2, epfd, events, max, pointer, mask, 8) };
    if !is_barred(&result) {
        return result;
    }
    // Before Linux 5.11, or under a filter that was written before.
    // SAFETY: the array has room for `max` events by our own contract; the mask is null or a local.
    unsafe { sys!(SYS_epoll_pwait, epfd, events, max, milliseconds(timeout_ns), mask, 8) }
}

pub const NAME_MAX_BYTES: usize = size_of::<libc::sockaddr_storage>();

/// The address that a socket is bound to, as the kernel writes it.
pub fn local_name(fd: i32, name: &mut [u8; NAME_MAX_BYTES]) -> Option<&[u8]> {
    let mut len = NAME_MAX_BYTES as libc::socklen_t;
    // SAFETY: a buffer and its length.
    unsafe { sys!(SYS_getsockname, fd, name.as_mut_ptr(), &raw mut len) }.ok()?;
    name.get(..len as usize)
}

/// Is this a pipe that can be written to?
pub fn is_pipe_to_write(fd: i32) -> bool {
    // SAFETY: no memory is passed.
    let flags = unsafe { sys!(SYS_fcntl, fd, libc::F_GETFL) };
    // SAFETY: no memory is passed. (Refused for what is no pipe.)
    let room = unsafe { sys!(SYS_fcntl, fd, libc::F_GETPIPE_SZ) };
    room.is_ok() && flags.is_ok_and(|flags| flags as i32 & libc::O_ACCMODE != libc::O_RDONLY)
}

pub fn is_nonblocking(fd: i32) -> bool {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_fcntl, fd, libc::F_GETFL) }
        .is_ok_and(|flags| flags as i32 & libc::O_NONBLOCK != 0)
}

/// Is this number open, and does a new program get it?
pub fn is_inherited(fd: i32) -> bool {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_fcntl, fd, libc::F_GETFD) }
        .is_ok_and(|flags| flags as i32 & libc::FD_CLOEXEC == 0)
}

pub fn set_cloexec(fd: i32, on: bool) {
    let flags = if on { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(SYS_fcntl, fd, libc::F_SETFD, flags) };
}

/// A socket that is connected to nothing.
pub fn unconnected(domain: i32, socket_type: i32) -> Sys<i32> {
    let socket_type = socket_type | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_socket, domain, socket_type, 0) }.map(|fd| fd as i32)
}

/// Gives a number another meaning, and leaves its close-on-exec flag as it was.
pub fn replace(number: i32, by: i32) {
    let flags = if is_inherited(number) { 0 } else { libc::O_CLOEXEC };
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(SYS_dup3, by, number, flags) };
}

/// Is the registration of `fd` in a set still armed (a one-shot one that was reported is not)? Read from the set's fdinfo, the
/// only place that tells.
pub fn epoll_armed(epfd: i32, fd: i32) -> bool {
    let mut path = *b"/proc/self/fdinfo/\0\0\0\0\0\0\0\0\0\0\0\0";
    write_decimal(&mut path[18..], epfd as u32);
    let mut armed = true;
    let _ = find_line(&path, usize::MAX, |line| match parse_registration(line) {
        Some((tfd, events)) if tfd == fd as u32 => {
            armed = events & !PRIVATE_BITS != 0;
            true
        }
        _ => false,
    });
    armed
}

/// Looks for a line of a file of /proc (a NUL-terminated path), in its first `most` bytes. Of a long line only the beginning is seen.
pub(crate) fn find_line(path: &[u8], most: usize, wanted: impl FnMut(&[u8]) -> bool) -> Sys<bool> {
    match find_line_by(path, most, &mut [0u8; 1024], wanted)? {
        Looked::Found => Ok(true),
        Looked::Through { .. } | Looked::Part => Ok(false),
    }
}

/// What a look for a line came to.
pub(crate) enum Looked {
    Found,
    /// It is not there, in all that there was; whether that was read at once.
    Through {
        at_once: bool,
    },
    /// There was more than was to be looked at.
    Part,
}

/// The same, in pieces of so many bytes.
pub(crate) fn find_line_by(
    path: &[u8],
    most: usize,
    piece: &mut [u8],
    mut wanted: impl FnMut(&[u8]) -> bool,
) -> Sys<Looked> {
    debug_assert!(path.contains(&0));
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: `path` is NUL-terminated.
    let file = unsafe { sys!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0)? } as i32;
    let (mut line, mut used, mut read, mut pieces) = ([0u8; 160], 0, 0, 0);
    let mut looked = Ok(Looked::Part);
    'file: while read < most {
        // SAFETY: a valid buffer.
        let n = match unsafe { sys!(SYS_read, file, piece.as_mut_ptr(), piece.len()) } {
            Ok(0) => {
                // KERNEL: a piece ends before the line that does not fit, and a list that has become shorter ends there: a piece that is
                // nearly full may not have been all.
                looked = Ok(Looked::Through { at_once: pieces <= 1 && read <= piece.len() / 2 });
                break;
            }
            Ok(n) => n,
            Err(error) => {
                looked = Err(error);
                break;
            }
        };
        read += n;
        pieces += 1;
        for &byte in &piece[..n] {
            if byte != b'\n' {
                if used < line.len() {
                    line[used] = byte;
                    used += 1;
                }
                continue;
            }
            if wanted(&line[..used]) {
                looked = Ok(Looked::Found);
                break 'file;
            }
            used = 0;
        }
    }
    close(file);
    looked
}

/// EPOLLWAKEUP, ONESHOT, ET and EXCLUSIVE: what is left of a one-shot registration that was reported.
const PRIVATE_BITS: u32 = 0xf << 28;

/// A line `tfd: N events: HEX data: ...`.
fn parse_registration(line: &[u8]) -> Option<(u32, u32)> {
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let number =
        |word: &[u8], radix| u32::from_str_radix(core::str::from_utf8(word).ok()?, radix).ok();
    if words.next()? != b"tfd:" {
        return None;
    }
    let tfd = number(words.next()?, 10)?;
    if words.next()? != b"events:" {
        return None;
    }
    Some((tfd, number(words.next()?, 16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a look says that finds nothing in so many bytes, by pieces of 4,096.
    fn looked(bytes: usize) -> Looked {
        // SAFETY: a C string.
        let file = unsafe { libc::memfd_create(c"lines".as_ptr(), 0) };
        let text = [b'\n'; 5000];
        // SAFETY: a buffer of so many bytes at least.
        assert_eq!(unsafe { libc::write(file, text.as_ptr().cast(), bytes) }, bytes as isize);
        let path = std::format!("/proc/self/fd/{file}\0");
        let looked = find_line_by(path.as_bytes(), 1 << 20, &mut [0; 4096], |_| false).unwrap();
        close(file);
        looked
    }

    #[test]
    fn a_list_may_have_been_longer_if_its_first_piece_was_nearly_full() {
        for bytes in [0, 100, 2048] {
            assert!(matches!(looked(bytes), Looked::Through { at_once: true }), "{bytes}");
        }
        for bytes in [2049, 4000, 4096, 5000] {
            assert!(matches!(looked(bytes), Looked::Through { at_once: false }), "{bytes}");
        }
    }
}
