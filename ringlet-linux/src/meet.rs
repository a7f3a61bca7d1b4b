//! The rendezvous: abstract Unix sockets, descriptors and credentials over them, and who owns the far end of a connection.
//!
//! **Descriptors of strangers.** Whoever may connect to a Unix socket can put descriptors into its queue, before anybody has looked who it
//! is; and whoever empties or closes that queue closes them (`apart`). So a rendezvous admits none until it has looked
//! ([`admit_descriptors`]; older kernels know no such wish), a message of a stranger is looked at without being taken ([`look_at`]), and a
//! socket goes by [`part`], which hands one that holds descriptors to `apart`.

use crate::sys::{Errno, Sys, call, close, geteuid, pidfd, sys};
use crate::{apart, fd, tcp, unix};

/// The two ends of a connection, as both of them know it.
pub enum Ends {
    Tcp(tcp::Ends),
    Unix(unix::Ends),
}

/// Who is at the other end of a Unix socket, as the kernel vouches (at its connect or listen).
#[derive(Clone, Copy, Debug)]
pub struct Credentials {
    /// 0 when the process is in a pid namespace that we can't see.
    pub pid: i32,
    pub uid: u32,
}

pub const MAX_FDS: usize = 4;

/// Descriptors that came with a message; closed when dropped, unless taken.
pub struct Fds {
    fds: [i32; MAX_FDS],
    pub count: usize,
    /// More were sent than we had room or free numbers for.
    pub truncated: bool,
    /// From whom they came.
    pub user: u32,
}

impl Fds {
    /// Takes one out; the caller owns it.
    pub fn take(&mut self, at: usize) -> Option<i32> {
        let fd = *self.fds.get(at)?;
        self.fds[at] = -1;
        (fd >= 0).then_some(fd)
    }

    /// The same of several, which are there together or not at all.
    pub fn take_all<const N: usize>(&mut self, from: usize) -> Option<[i32; N]> {
        let all = self.fds.get(from..from + N)?;
        if all.iter().any(|fd| *fd < 0) {
            return None;
        }
        let mut taken = [-1; N];
        taken.copy_from_slice(all);
        self.fds[from..from + N].fill(-1);
        Some(taken)
    }
}

impl Drop for Fds {
    fn drop(&mut self) {
        let left = self.fds.into_iter().filter(|fd| *fd >= 0);
        left.for_each(|fd| apart::close_foreign(fd, self.user));
    }
}

const PREFIX: &[u8] = b"ringlet1/";
/// Room for the longest description of an end: an address and a port.
const END_BYTES: usize = 18;

/// An end in the rendezvous' name: address and port, or the number of a Unix socket. Returns how many bytes.
fn describe(ends: &Ends, local: bool) -> ([u8; END_BYTES], usize) {
    let mut bytes = [0; END_BYTES];
    let n = match ends {
        Ends::Tcp(ends) => {
            let end = if local { &ends.local } else { &ends.remote };
            bytes[..16].copy_from_slice(&end.ip);
            bytes[16..].copy_from_slice(&end.port.to_be_bytes());
            18
        }
        Ends::Unix(ends) => {
            let inode = if local { ends.local } else { ends.remote };
            bytes[..4].copy_from_slice(&inode.to_be_bytes());
            4
        }
    };
    (bytes, n)
}

/// The rendezvous of a connection is named after its two ends, the connecting one first, in an abstract name, which is scoped by
/// the network namespace just as the addresses are.
fn meeting_name(ends: &Ends, accepting: bool) -> (libc::sockaddr_un, u32) {
    // SAFETY: zero is a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    name.sun_family = libc::AF_UNIX as _;
    let mut n = 1;
    let mut put = |byte: u8| {
        name.sun_path[n] = byte as _;
        n += 1;
    };
    PREFIX.iter().for_each(|&byte| put(byte));
    for local in [!accepting, accepting] {
        let (bytes, len) = describe(ends, local);
        for &byte in &bytes[..len] {
            put(b"0123456789abcdef"[(byte >> 4) as usize]);
            put(b"0123456789abcdef"[(byte & 15) as usize]);
        }
    }
    (name, (core::mem::offset_of!(libc::sockaddr_un, sun_path) + n) as u32)
}

const UNIX_KIND: i32 = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

fn unix_socket() -> Sys<i32> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_socket, libc::AF_UNIX, UNIX_KIND, 0) }.map(|made| made as i32)
}

/// One into which strangers may write, and which goes by [`part`]. Every message in it carries credentials.
fn guarded_socket() -> Sys<i32> {
    let socket = fd::hide(unix_socket()?)?;
    guard(socket);
    Ok(socket)
}

/// No descriptors, for now; and credentials with every message, so that `part` knows one of no bytes from the end.
pub(crate) fn guard(socket: i32) {
    name_senders(socket);
    admit_descriptors(socket, false);
}

/// KERNEL: Linux 6.16. A listener hands it on to what it accepts; a sender of descriptors to one that admits none gets EPERM.
const SO_PASSRIGHTS: i32 = 83;

/// May descriptors be sent to this socket from now on? False if the kernel knows no such wish: they always may.
pub fn admit_descriptors(socket: i32, may: bool) -> bool {
    set_option(socket, SO_PASSRIGHTS, i32::from(may)).is_ok()
}

/// Can this kernel keep strangers from sending descriptors?
pub fn refuses_descriptors() -> bool {
    let Ok(socket) = unix_socket() else { return false };
    let knows = admit_descriptors(socket, false);
    close(socket);
    knows
}

fn set_option(socket: i32, option: i32, value: i32) -> Sys<()> {
    // SAFETY: an int and its size.
    unsafe { sys!(SYS_setsockopt, socket, libc::SOL_SOCKET, option, &raw const value, 4) }.map(drop)
}

fn bind(socket: i32, (name, len): (libc::sockaddr_un, u32), backlog: i32) -> Sys<i32> {
    // SAFETY: a name and its length.
    let bound = unsafe {
        sys!(SYS_bind, socket, &raw const name, len).and_then(|_| sys!(SYS_listen, socket, backlog))
    };
    bound.map(|_| socket).inspect_err(|_| close(socket))
}

fn connect(socket: i32, (name, len): (libc::sockaddr_un, u32)) -> Sys<i32> {
    // SAFETY: a name and its length.
    let connected = unsafe { sys!(SYS_connect, socket, &raw const name, len) };
    connected.map(|_| socket).inspect_err(|_| close(socket))
}

/// An abstract name of at most `NAME_MAX_BYTES`.
pub(crate) fn abstract_name(bytes: &[u8]) -> (libc::sockaddr_un, u32) {
    // SAFETY: zero is a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    name.sun_family = libc::AF_UNIX as _;
    for (to, byte) in name.sun_path[1..].iter_mut().zip(bytes) {
        *to = *byte as _;
    }
    let len = core::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + bytes.len();
    (name, len.min(size_of::<libc::sockaddr_un>()) as u32)
}

/// Opens a rendezvous of that name for many.
pub fn offer_named(name: &[u8]) -> Sys<i32> {
    bind(guarded_socket()?, abstract_name(name), 4096)
}

/// Looks for the rendezvous of that name; `ECONNREFUSED` when nobody offers, `EAGAIN` when too many came at once.
pub fn look_named(name: &[u8]) -> Sys<i32> {
    connect(guarded_socket()?, abstract_name(name))
}

/// Connects to a service that we trust at a path; `ENOENT` or `ECONNREFUSED` when there is none, `EAGAIN` when too many wait. It may send descriptors.
pub fn look_at_path(path: &core::ffi::CStr) -> Sys<i32> {
    let bytes = path.to_bytes();
    // SAFETY: zero is a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    name.sun_family = libc::AF_UNIX as _;
    if bytes.len() >= name.sun_path.len() {
        return Err(Errno::EINVAL);
    }
    for (to, byte) in name.sun_path.iter_mut().zip(bytes) {
        *to = *byte as _;
    }
    let socket = fd::hide(unix_socket()?)?;
    name_senders(socket);
    connect(socket, (name, size_of::<libc::sockaddr_un>() as u32))
}

/// Makes a channel that somebody has made for us a rendezvous like those that we make.
pub fn guard_channel(socket: i32) -> Sys<i32> {
    let socket = fd::hide(socket)?;
    guard(socket);
    Ok(socket)
}

/// The accepting side opens the rendezvous of its connection.
pub fn offer(ends: &Ends) -> Sys<i32> {
    bind(guarded_socket()?, meeting_name(ends, true), 1)
}

/// The connecting side looks for it; `ECONNREFUSED` when nobody offers.
pub fn look(ends: &Ends) -> Sys<i32> {
    connect(guarded_socket()?, meeting_name(ends, false))
}

/// Takes the one who came to our offer; `EAGAIN` when nobody did yet.
pub fn accept(offer: i32) -> Sys<i32> {
    accept_in_sight(offer).and_then(fd::hide)
}

/// The same, under the lowest free number, for a descriptor that the program is to use.
pub fn accept_in_sight(offer: i32) -> Sys<i32> {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no address is asked for.
    unsafe { sys!(SYS_accept4, offer, 0, 0, flags) }.map(|fd| fd as i32)
}

const SERVICE_PREFIX: &[u8] = b"ringlet1-service/";
const NAME_MAX_BYTES: usize = 107;

/// The abstract name of a service of the native library; `EINVAL` when it is empty or too long.
fn service_name(service: &[u8]) -> Sys<(libc::sockaddr_un, u32)> {
    let mut name = [0; NAME_MAX_BYTES];
    let len = SERVICE_PREFIX.len() + service.len();
    if service.is_empty() || len > name.len() {
        return Err(Errno::EINVAL);
    }
    name[..SERVICE_PREFIX.len()].copy_from_slice(SERVICE_PREFIX);
    name[SERVICE_PREFIX.len()..len].copy_from_slice(service);
    Ok(abstract_name(&name[..len]))
}

/// Takes the name of a service, at which nobody is let in yet; `EADDRINUSE` when it is taken. Who comes has no descriptors to give.
pub fn take_name(service: &[u8]) -> Sys<i32> {
    let (name, len) = service_name(service)?;
    let socket = unix_socket()?;
    admit_descriptors(socket, false);
    // SAFETY: a name and its length.
    let bound = unsafe { sys!(SYS_bind, socket, &raw const name, len) };
    bound.map(|_| socket).inspect_err(|_| close(socket))
}

/// From now on others find it by its name in this network namespace.
pub fn let_in(socket: i32) -> Sys<()> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_listen, socket, 128) }.map(drop)
}

/// The name of a service, of one that a Unix socket is bound to.
pub fn service_of(name: &[u8]) -> Option<&[u8]> {
    name.strip_prefix(b"\0")?.strip_prefix(SERVICE_PREFIX)
}

/// Opens a service that others find by its name; `EADDRINUSE` when there is one of that name.
pub fn serve(service: &[u8]) -> Sys<i32> {
    let socket = take_name(service)?;
    let_in(socket).map(|()| socket).inspect_err(|_| close(socket))
}

/// Connects to a service, which speaks first, with descriptors, and is named with what it says; `ECONNREFUSED` when there is none, `EAGAIN`
/// when too many wait.
pub fn visit(service: &[u8]) -> Sys<i32> {
    let name = service_name(service)?;
    let socket = unix_socket()?;
    name_senders(socket);
    connect(socket, name)
}

/// Each message that is sent to this socket from now on tells who has sent it. (KERNEL: what was sent before need not.)
pub fn name_senders(socket: i32) {
    let _ = set_option(socket, libc::SO_PASSCRED, 1);
}

/// Is it a Unix socket of our kind? (Whatever else a stranger sends may block who uses or closes it.)
pub fn is_ours_in_kind(socket: i32) -> bool {
    let is = |option, value| tcp::int_option(socket, libc::SOL_SOCKET, option) == Ok(value);
    is(libc::SO_DOMAIN, libc::AF_UNIX) && is(libc::SO_TYPE, libc::SOCK_SEQPACKET)
}

/// Two connected sockets.
pub fn pair() -> Sys<[i32; 2]> {
    let mut made = [0; 2];
    // SAFETY: room for two descriptors.
    unsafe { sys!(SYS_socketpair, libc::AF_UNIX, UNIX_KIND, 0, made.as_mut_ptr())? };
    Ok(made)
}

pub fn credentials(socket: i32) -> Sys<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as u32;
    // SAFETY: a struct ucred and its size.
    unsafe {
        sys!(
            SYS_getsockopt,
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            &raw mut found,
            &raw mut len
        )?;
    }
    Ok(Credentials { pid: found.pid, uid: found.uid })
}

/// A pidfd of the process at the other end, which has connected. `ESRCH` when it has ended, `None` where the kernel does not tell: before
/// Linux 6.5 of one in a pid namespace that we can't see.
pub fn process_at_other_end(socket: i32) -> Sys<Option<i32>> {
    const SO_PEERPIDFD: i32 = 77;
    let (mut process, mut len) = (-1i32, 4u32);
    // SAFETY: an int and its size.
    let told = unsafe {
        sys!(SYS_getsockopt, socket, libc::SOL_SOCKET, SO_PEERPIDFD, &raw mut process, &raw mut len)
    };
    match told {
        Ok(_) => Ok(Some(process)),
        Err(Errno(libc::ENOPROTOOPT)) => process_of(&credentials(socket)?),
        // KERNEL: EINVAL of one that has ended, until Linux 6.16.
        Err(Errno::EINVAL) => Err(Errno(libc::ESRCH)),
        Err(errno) => Err(errno),
    }
}

/// A pidfd of who has sent a message; `None` and `ESRCH` as above.
pub fn process_of(sender: &Credentials) -> Sys<Option<i32>> {
    match sender.pid {
        0 => Ok(None),
        pid => match pidfd(pid) {
            Err(Errno(libc::ENOSYS | libc::EPERM)) => Ok(None),
            opened => opened.map(Some),
        },
    }
}

#[repr(C, align(8))]
pub(crate) struct FdMessage {
    header: libc::cmsghdr,
    fds: [i32; MAX_FDS],
}

/// One message with descriptors.
pub fn send(socket: i32, bytes: &[u8], fds: &[i32]) -> Sys<()> {
    send_to(socket, None, bytes, fds)
}

/// The same from a socket that is not connected.
pub(crate) fn send_to(
    socket: i32,
    to: Option<(&libc::sockaddr_un, u32)>,
    bytes: &[u8],
    fds: &[i32],
) -> Sys<()> {
    // SAFETY: zero is a valid control message and message header.
    let (mut control, mut message) =
        unsafe { (core::mem::zeroed::<FdMessage>(), core::mem::zeroed::<libc::msghdr>()) };
    control.header.cmsg_level = libc::SOL_SOCKET;
    control.header.cmsg_type = libc::SCM_RIGHTS;
    control.header.cmsg_len = (size_of::<libc::cmsghdr>() + 4 * fds.len()) as _;
    control.fds[..fds.len()].copy_from_slice(fds);
    let mut piece = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    if let Some((name, len)) = to {
        message.msg_name = name as *const libc::sockaddr_un as *mut _;
        message.msg_namelen = len;
    }
    if !fds.is_empty() {
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<FdMessage>() as _;
    }
    // SAFETY: the header points to locals that outlive the call.
    unsafe {
        sys!(SYS_sendmsg, socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    }
    .map(drop)
}

/// Room for credentials, and for descriptors behind them.
const CREDENTIALS_BYTES: usize = size_of::<libc::cmsghdr>() + 16;
#[repr(C, align(8))]
struct Control {
    bytes: [u8; CREDENTIALS_BYTES + size_of::<FdMessage>()],
}

/// A message as it came.
pub struct Received {
    pub len: usize,
    /// Who sent it, where the socket asks for that.
    pub caller: Option<Credentials>,
    pub fds: Fds,
}

/// One recvmsg; with `room` for credentials only, or for descriptors too.
fn receive_once(socket: i32, bytes: &mut [u8], room: usize, flags: i32) -> Sys<Received> {
    let mut control = Control { bytes: [0; _] };
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: zero is a valid message header.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    if room > 0 {
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = room.min(size_of::<Control>()) as _;
    }
    let flags = flags | libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: the header points to locals that outlive the call.
    let len = unsafe { sys!(SYS_recvmsg, socket, &raw mut message, flags)? };
    let (mut fds, mut count, mut caller) = ([-1; MAX_FDS], 0, None);
    let filled = (message.msg_controllen as usize).min(room).min(size_of::<Control>());
    let u32_at = |at: usize| {
        control.bytes.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    };
    let (mut next, head) = (0, size_of::<libc::cmsghdr>());
    while next + head <= filled {
        // KERNEL: cmsg_len has the size of a word, then come level and type.
        let len = u32_at(next) as usize;
        if len < head || next + len > filled {
            break;
        }
        let data = next + head;
        match (u32_at(next + 8) as i32, u32_at(next + 12) as i32) {
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                caller = Some(Credentials { pid: u32_at(data) as i32, uid: u32_at(data + 4) });
            }
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                count = ((len - head) / 4).min(MAX_FDS);
                for (i, fd) in fds[..count].iter_mut().enumerate() {
                    *fd = u32_at(data + 4 * i) as i32;
                }
            }
            _ => {}
        }
        next += len.next_multiple_of(8);
    }
    let truncated = message.msg_flags & libc::MSG_CTRUNC != 0;
    // KERNEL: SO_PEERCRED names the effective user, whom we have checked; a message its real one.
    let user = match if count == 0 { apart::SOMEBODY } else { user_of(socket) } {
        apart::SOMEBODY => caller.map_or(apart::SOMEBODY, |caller| caller.uid),
        connected => connected,
    };
    Ok(Received { len, caller, fds: Fds { fds, count, truncated, user } })
}

/// One message with descriptors; `Ok(0)` when the other side is gone.
pub fn receive(socket: i32, bytes: &mut [u8]) -> Sys<(usize, Fds)> {
    let got = receive_named(socket, bytes)?;
    Ok((got.len, got.fds))
}

/// The same, and who has sent it, if the socket was asked to tell (`name_senders`).
pub fn receive_named(socket: i32, bytes: &mut [u8]) -> Sys<Received> {
    receive_once(socket, bytes, size_of::<Control>(), 0)
}

/// The next message of a guarded socket, which stays where it is. `fds.truncated`: descriptors are with it.
pub fn look_at(socket: i32, bytes: &mut [u8]) -> Sys<Received> {
    receive_once(socket, bytes, CREDENTIALS_BYTES, libc::MSG_PEEK)
}

/// Takes the message that was looked at, which has no descriptors.
pub fn skip(socket: i32) {
    let _ = receive_once(socket, &mut [], 0, 0);
}

/// Takes the next message of a guarded socket, with its descriptors. Where there were more than anybody should send, it stays where it is,
/// and is `truncated`: to drop those is for `part`.
pub fn take(socket: i32, bytes: &mut [u8]) -> Sys<Received> {
    // What was looked at is ours too: so taking it drops nothing.
    let got = receive_once(socket, bytes, size_of::<Control>(), libc::MSG_PEEK)?;
    if !got.fds.truncated {
        skip(socket);
    }
    Ok(got)
}

/// Messages that are looked through before a socket is closed. (The kernel's buffer holds fewer.)
const PARTING_MOST: u32 = 1024;

/// The user at the other end.
fn user_of(socket: i32) -> u32 {
    credentials(socket).map_or(apart::SOMEBODY, |caller| caller.uid)
}

/// Closes a Unix socket, or one that listens; what strangers have left in it is closed apart.
pub fn part(socket: i32) {
    // From now on nothing more comes, so that what is seen here is all. (That a message carries credentials is settled when it is received.)
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(SYS_shutdown, socket, libc::SHUT_RD) };
    name_senders(socket);
    if tcp::int_option(socket, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1) {
        loop {
            match accept_in_sight(socket) {
                Ok(came) => part(came),
                // No number is free for those who still wait there.
                Err(Errno::EMFILE | Errno::ENFILE) => {
                    return apart::close_socket_apart(socket, apart::SOMEBODY);
                }
                Err(_) => return close(socket),
            }
        }
    }
    let user = user_of(socket);
    for _ in 0..PARTING_MOST {
        match look_at(socket, &mut []) {
            Ok(Received { caller: Some(_), fds, .. }) if !fds.truncated => skip(socket),
            Ok(Received { caller: None, fds, .. }) if !fds.truncated => return close(socket),
            Err(Errno::EINTR) => {}
            Err(_) => return close(socket),
            // Memory is closed here; doorbells, which are seldom left, apart.
            Ok(_)
                if !apart::is_full(user)
                    && take(socket, &mut []).is_ok_and(|taken| !taken.fds.truncated) => {}
            Ok(_) => break,
        }
    }
    apart::close_socket_apart(socket, user);
}

/// Is there a /proc to look at?
pub fn has_proc() -> bool {
    let mut link = [0u8; 16];
    // SAFETY: a C string, and a buffer of its length.
    let got = unsafe {
        sys!(SYS_readlinkat, libc::AT_FDCWD, c"/proc/self".as_ptr(), link.as_mut_ptr(), link.len())
    };
    got.is_ok()
}

/// Does this number name no certain user? In a user namespace all users that are not mapped there read as the same one.
pub fn is_vague(uid: u32) -> bool {
    const DEFAULT: u32 = 65_534;
    let number = |line: &[u8]| core::str::from_utf8(line).ok()?.trim().parse().ok();
    let mut overflow = DEFAULT;
    let _ = fd::find_line(b"/proc/sys/kernel/overflowuid\0", 64, |line| {
        overflow = number(line).unwrap_or(DEFAULT);
        true
    });
    // Where all are mapped, as outside of user namespaces, it is one like any.
    uid == overflow && !all_users_are_mapped()
}

/// Are we in no user namespace but the first (or one that maps all users)?
pub fn all_users_are_mapped() -> bool {
    let all = |line: &[u8]| {
        line.split(u8::is_ascii_whitespace).rfind(|word| !word.is_empty()) == Some(b"4294967295")
    };
    fd::find_line(b"/proc/thread-self/uid_map\0", 4096, all) == Ok(true)
}

/// Is it certainly the user as whom we act?
pub fn is_our_user(uid: u32) -> bool {
    uid == geteuid() && !is_vague(uid)
}

/// Is this a process of our own pid namespace, which (its user allowing) can send us signals too? One of a namespace below ours can't.
pub fn is_in_sight(pid: i32) -> bool {
    sight(pid) == Ok(true)
}

/// The same, or why that can't be told.
pub fn sight(pid: i32) -> Sys<bool> {
    let (path, _) = path_of(pid, b"/status");
    let own = |line: &[u8]| {
        line.starts_with(b"NSpid:")
            && line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).count() == 2
    };
    if pid == 0 { Ok(false) } else { fd::find_line(&path, 16 << 10, own) }
}

/// `/proc/PID` and more, NUL-terminated, and how long.
fn path_of(pid: i32, rest: &[u8]) -> ([u8; 40], usize) {
    let mut path = [0u8; 40];
    path[..6].copy_from_slice(b"/proc/");
    let n = 6 + fd::write_decimal(&mut path[6..], pid as u32);
    path[n..n + rest.len()].copy_from_slice(rest);
    (path, n + rest.len())
}

/// Does descriptor `fd` of process `pid` name the socket `inode`? `EACCES` or `EPERM` when we may not look.
pub fn holds(pid: i32, fd: i32, inode: u32) -> Sys<bool> {
    match thread_holds(pid, fd, inode) {
        // KERNEL: a first thread that has ended has no descriptors; the other threads have those of the process.
        Err(Errno::ENOENT) => any_thread_holds(pid, fd, inode),
        known => known,
    }
}

/// Asks the first threads that are listed: one that lives will do.
fn any_thread_holds(pid: i32, fd: i32, inode: u32) -> Sys<bool> {
    let (path, _) = path_of(pid, b"/task");
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    let task = unsafe { sys!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0)? } as i32;
    let mut list = [0u8; 512];
    // SAFETY: a buffer of its length.
    let got = unsafe { sys!(SYS_getdents64, task, list.as_mut_ptr(), list.len()) };
    close(task);
    // struct linux_dirent64: number and offset, 8 bytes each; length, 2; kind, 1; then the name.
    let mut rest = &list[..got?];
    while let [_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, low, high, _, name @ ..] = rest {
        let digits = name.iter().take_while(|byte| byte.is_ascii_digit());
        let thread = digits
            .fold(0i32, |all, digit| all.wrapping_mul(10).wrapping_add(i32::from(digit - b'0')));
        if thread != pid && thread > 0 && thread_holds(thread, fd, inode) == Ok(true) {
            return Ok(true);
        }
        let len = usize::from(u16::from_ne_bytes([*low, *high])).max(1);
        rest = rest.get(len..).unwrap_or(&[]);
    }
    Err(Errno::ENOENT)
}

fn thread_holds(pid: i32, fd: i32, inode: u32) -> Sys<bool> {
    let (mut path, n) = path_of(pid, b"/fd/");
    fd::write_decimal(&mut path[n..], fd as u32);
    let mut link = [0u8; 32];
    let args = [
        libc::AT_FDCWD as usize,
        path.as_ptr() as usize,
        link.as_mut_ptr() as usize,
        link.len(),
        0,
        0,
    ];
    // SAFETY: `path` is NUL-terminated (it is longer than what was written), `link` valid for its length.
    let got = unsafe { call(libc::SYS_readlinkat, args)? };
    let mut expected = *b"socket:[\0\0\0\0\0\0\0\0\0\0\0\0";
    let digits = fd::write_decimal(&mut expected[8..], inode);
    expected[8 + digits] = b']';
    Ok(link[..got] == expected[..8 + digits + 1])
}
