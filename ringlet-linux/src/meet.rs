//! The rendezvous: abstract Unix sockets, descriptors and credentials over them, and who owns the far end of a connection.

use crate::sys::{Errno, Sys, call, close, sys};
use crate::tcp::{Address, Ends};
use crate::{fd, tcp};

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
}

impl Fds {
    pub(crate) fn new(fds: [i32; MAX_FDS], count: usize, truncated: bool) -> Fds {
        Fds { fds, count, truncated }
    }

    /// Takes one out; the caller owns it.
    pub fn take(&mut self, at: usize) -> Option<i32> {
        let fd = *self.fds.get(at)?;
        self.fds[at] = -1;
        (fd >= 0).then_some(fd)
    }
}

impl Drop for Fds {
    fn drop(&mut self) {
        for fd in self.fds {
            if fd >= 0 {
                close(fd);
            }
        }
    }
}

const PREFIX: &[u8] = b"ringlet1/";
const NAME_BYTES: usize = 1 + PREFIX.len() + 2 * 36;

/// The rendezvous of a connection is named after its two ends, the connecting one first, in an abstract name, which is scoped by
/// the network namespace just as the addresses are.
fn meeting_name(connector: &Address, acceptor: &Address) -> (libc::sockaddr_un, u32) {
    // SAFETY: zero is a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    name.sun_family = libc::AF_UNIX as _;
    let mut n = 1;
    let mut put = |byte: u8| {
        name.sun_path[n] = byte as _;
        n += 1;
    };
    PREFIX.iter().for_each(|&byte| put(byte));
    for end in [connector, acceptor] {
        for byte in end.ip.iter().copied().chain(end.port.to_be_bytes()) {
            put(b"0123456789abcdef"[(byte >> 4) as usize]);
            put(b"0123456789abcdef"[(byte & 15) as usize]);
        }
    }
    debug_assert!(n == NAME_BYTES);
    (name, (core::mem::offset_of!(libc::sockaddr_un, sun_path) + n) as u32)
}

const UNIX_KIND: i32 = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

fn unix_socket() -> Sys<i32> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_socket, libc::AF_UNIX, UNIX_KIND, 0) }.map(|made| made as i32)
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
fn abstract_name(bytes: &[u8]) -> (libc::sockaddr_un, u32) {
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
    bind(fd::hide(unix_socket()?), abstract_name(name), 4096)
}

/// Looks for the rendezvous of that name; `ECONNREFUSED` when nobody offers, `EAGAIN` when too many came at once.
pub fn look_named(name: &[u8]) -> Sys<i32> {
    connect(fd::hide(unix_socket()?), abstract_name(name))
}

/// The accepting side opens the rendezvous of its connection.
pub fn offer(ends: &Ends) -> Sys<i32> {
    bind(fd::hide(unix_socket()?), meeting_name(&ends.remote, &ends.local), 1)
}

/// The connecting side looks for it; `ECONNREFUSED` when nobody offers.
pub fn look(ends: &Ends) -> Sys<i32> {
    connect(fd::hide(unix_socket()?), meeting_name(&ends.local, &ends.remote))
}

/// Takes the one who came to our offer; `EAGAIN` when nobody did yet.
pub fn accept(offer: i32) -> Sys<i32> {
    accept_in_sight(offer).map(fd::hide)
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

/// Opens a service that others find by its name in this network namespace; `EADDRINUSE` when there is one of that name.
pub fn serve(service: &[u8]) -> Sys<i32> {
    let name = service_name(service)?;
    bind(unix_socket()?, name, 128)
}

/// Connects to a service; `ECONNREFUSED` when there is none, `EAGAIN` when too many wait.
pub fn visit(service: &[u8]) -> Sys<i32> {
    let name = service_name(service)?;
    connect(unix_socket()?, name)
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

/// One message with descriptors; `Ok(0)` when the other side is gone.
pub fn receive(socket: i32, bytes: &mut [u8]) -> Sys<(usize, Fds)> {
    // SAFETY: zero is a valid control message and message header.
    let (mut control, mut message) =
        unsafe { (core::mem::zeroed::<FdMessage>(), core::mem::zeroed::<libc::msghdr>()) };
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<FdMessage>() as _;
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: the header points to locals that outlive the call.
    let n = unsafe { sys!(SYS_recvmsg, socket, &raw mut message, flags)? };
    let truncated = message.msg_flags & libc::MSG_CTRUNC != 0;
    let mut fds = Fds { fds: [-1; MAX_FDS], count: 0, truncated };
    let rights = message.msg_controllen >= size_of::<libc::cmsghdr>()
        && control.header.cmsg_level == libc::SOL_SOCKET
        && control.header.cmsg_type == libc::SCM_RIGHTS;
    if rights {
        let bytes = control.header.cmsg_len.saturating_sub(size_of::<libc::cmsghdr>());
        fds.count = (bytes / 4).min(MAX_FDS);
        fds.fds[..fds.count].copy_from_slice(&control.fds[..fds.count]);
    }
    Ok((n, fds))
}

/// The far end of a connection, as the kernel's socket table has it.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    pub inode: u32,
    pub uid: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DiagRequest {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    pid: u32,
    family: u8,
    protocol: u8,
    extensions: u8,
    pad: u8,
    states: u32,
    source_port: u16,
    target_port: u16,
    source: [u8; 16],
    target: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NO_COOKIE: u32 = u32::MAX;

/// Looks up the socket at the far end of a connection of ours. `ENOENT` when it is not on this machine (or not in this
/// network namespace); other errors when the kernel has no socket table for us.
pub fn far_owner(ends: &Ends) -> Sys<Owner> {
    owner_of(ends, libc::IPPROTO_TCP)
}

pub(crate) fn owner_of(ends: &Ends, protocol: i32) -> Sys<Owner> {
    // KERNEL: an exact lookup finds a socket under the family that the request names, v4-mapped ones under both.
    let v4 = ends.local.is_v4();
    let family = if v4 { libc::AF_INET } else { libc::AF_INET6 };
    let (mut source, mut target) = (ends.remote.ip, ends.local.ip);
    if v4 {
        source.rotate_left(12);
        target.rotate_left(12);
        source[4..].fill(0);
        target[4..].fill(0);
    }
    let request = DiagRequest {
        len: size_of::<DiagRequest>() as u32,
        kind: SOCK_DIAG_BY_FAMILY,
        flags: libc::NLM_F_REQUEST as u16,
        sequence: 1,
        pid: 0,
        family: family as u8,
        protocol: protocol as u8,
        extensions: 0,
        pad: 0,
        states: u32::MAX,
        source_port: ends.remote.port.to_be(),
        target_port: ends.local.port.to_be(),
        source,
        target,
        interface: 0,
        cookie: [NO_COOKIE; 2],
    };
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let socket =
        unsafe { sys!(SYS_socket, libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG)? } as i32;
    // SAFETY: a plain struct and its size.
    let asked =
        unsafe { sys!(SYS_sendto, socket, &raw const request, size_of::<DiagRequest>(), 0, 0, 0) };
    let mut answer = [0u8; 1024];
    // The kernel answers within the send, so this does not wait.
    let got = asked.and_then(|_| tcp::receive_into(socket, &mut answer, libc::MSG_DONTWAIT));
    close(socket);
    parse_owner(&answer[..got?])
}

/// struct nlmsghdr (16 bytes), then struct inet_diag_msg (72 bytes): uid at 64, inode at 68.
fn parse_owner(answer: &[u8]) -> Sys<Owner> {
    let u32_at =
        |at: usize| answer.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    let kind = u32_at(4).ok_or(Errno::EINVAL)? as u16;
    if kind == libc::NLMSG_ERROR as u16 {
        return Err(Errno(-(u32_at(16).unwrap_or(0) as i32)));
    }
    let (Some(uid), Some(inode)) = (u32_at(16 + 64), u32_at(16 + 68)) else {
        return Err(Errno::EINVAL);
    };
    if kind != SOCK_DIAG_BY_FAMILY || inode == 0 {
        return Err(Errno::ENOENT);
    }
    Ok(Owner { inode, uid })
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

/// Does descriptor `fd` of process `pid` name the socket `inode`? `EACCES` or `EPERM` when we may not look.
pub fn holds(pid: i32, fd: i32, inode: u32) -> Sys<bool> {
    let mut path = [0u8; 40];
    let mut n = 0;
    for part in [&b"/proc/"[..], b"", b"/fd/"] {
        if part.is_empty() {
            n += fd::write_decimal(&mut path[n..], pid as u32);
        } else {
            path[n..n + part.len()].copy_from_slice(part);
            n += part.len();
        }
    }
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
