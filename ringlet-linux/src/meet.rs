//! The rendezvous: abstract Unix sockets, descriptors and credentials over them, and who owns the far end of a connection.

use crate::fd;
use crate::sys::{Errno, Sys, call, close, sys};
use crate::{tcp, unix};

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
    bind(fd::hide(unix_socket()?), meeting_name(ends, true), 1)
}

/// The connecting side looks for it; `ECONNREFUSED` when nobody offers.
pub fn look(ends: &Ends) -> Sys<i32> {
    connect(fd::hide(unix_socket()?), meeting_name(ends, false))
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
