//! Unix sockets: identity, what is under way, messages with control data.

use crate::diag;
use crate::sys::{Errno, Sys, sys};
use crate::tcp;
use ringlet_core::memory::Buffers;

/// asm-generic/socket.h: a pidfd of the sender, or the bytes that wait, with each message.
pub const SO_PASSPIDFD: i32 = 76;
pub const SO_INQ: i32 = 84;

/// The two ends of a Unix connection, by their numbers (inodes) in the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ends {
    pub local: u32,
    pub remote: u32,
}

/// Type of a Unix socket (SOCK_STREAM and so on); `None` for anything else.
pub fn kind(fd: i32) -> Option<i32> {
    let option = |option| tcp::int_option(fd, libc::SOL_SOCKET, option).ok();
    option(libc::SO_DOMAIN).filter(|domain| *domain == libc::AF_UNIX)?;
    option(libc::SO_TYPE)
}

/// The number of a descriptor's socket.
pub fn inode(fd: i32) -> Sys<u32> {
    // SAFETY: zero is a valid struct stat.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: a writable struct stat.
    unsafe { sys!(SYS_fstat, fd, &raw mut stat)? };
    // Sockets are numbered with 32 bits, and the kernel's table knows no others.
    u32::try_from(stat.st_ino).map_err(|_| Errno::EINVAL)
}

/// Both ends of a connected Unix socket; `EAGAIN` while nobody has accepted the other one (or when it is closed).
pub fn ends(fd: i32) -> Sys<Ends> {
    match diag::unix_ends(fd)? {
        (_, 0) => Err(Errno::EAGAIN),
        (local, remote) => Ok(Ends { local, remote }),
    }
}

/// Memory of what was sent and not yet taken by the other end (SIOCOUTQ).
///
/// KERNEL: 0 exactly when the other end has taken all; otherwise more than the bytes, since it counts the buffers around them.
pub fn untaken(fd: i32) -> Sys<usize> {
    let mut n = 0i32;
    // SAFETY: a writable int.
    unsafe { sys!(SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut n)? };
    Ok(n.max(0) as usize)
}

/// Does the urgent byte stand next?
pub fn at_mark(fd: i32) -> bool {
    const SIOCATMARK: i32 = 0x8905;
    let mut n = 0i32;
    // SAFETY: a writable int.
    unsafe { sys!(SYS_ioctl, fd, SIOCATMARK, &raw mut n) }.is_ok() && n != 0
}

/// How bytes are taken out of the kernel's connection: plainly, or with the control data that the program's recvmsg has room for.
pub struct FromKernel<'m> {
    message: Option<&'m libc::msghdr>,
    /// Bytes of control data that came, and the message's flags. A call ends with the bytes that control data belongs to.
    pub control_bytes: usize,
    pub flags: i32,
    /// It came with an address, so that no bytes are a packet, not the end.
    pub named: bool,
}

impl<'m> FromKernel<'m> {
    #[inline(always)]
    pub fn new(message: Option<&'m libc::msghdr>) -> FromKernel<'m> {
        FromKernel { message, control_bytes: 0, flags: 0, named: false }
    }

    /// One recvmsg into the program's buffers, as `tcp::receive`.
    pub fn receive(&mut self, fd: i32, to: &mut Buffers, max: usize, flags: i32) -> Sys<usize> {
        let Some(message) = self.message else { return tcp::receive(fd, to, max, flags) };
        let mut asked = *message;
        let mut family = [0u8; 2];
        asked.msg_name = family.as_mut_ptr().cast();
        asked.msg_namelen = family.len() as u32;
        let got = tcp::message(to, max, asked, |asked| {
            // SAFETY: a message header with pieces of the program's buffers; its control buffer is the program's promise.
            let got = unsafe { sys!(SYS_recvmsg, fd, asked, flags)? };
            // SAFETY: the header that was just used.
            let told = unsafe { &*asked };
            (self.control_bytes, self.flags) = (told.msg_controllen, told.msg_flags);
            self.named = told.msg_namelen > 0;
            Ok(got)
        })?;
        to.pass(got);
        Ok(got)
    }
}

/// The program's recvmsg, as it is.
pub fn receive_message(fd: i32, message: &mut libc::msghdr, flags: i32) -> Sys<usize> {
    // SAFETY: the program's message; what it names is the program's promise.
    unsafe { sys!(SYS_recvmsg, fd, message as *mut libc::msghdr, flags) }
}

/// The program's sendmsg, with its control data.
pub fn send_message(fd: i32, message: &libc::msghdr, flags: i32) -> Sys<usize> {
    // SAFETY: the program's message.
    unsafe { sys!(SYS_sendmsg, fd, message as *const libc::msghdr, flags) }
}

/// A packet of ours. KERNEL: SO_SNDBUF limits what is sent; a packet that the program sent before it lowered that is not refused.
///
/// # Safety
/// `from` is valid for reading `len` bytes.
pub unsafe fn send_packet(fd: i32, from: *const u8, len: usize) -> Sys<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `from` is valid for reading `len` bytes by our own contract.
    let send = || unsafe { sys!(SYS_sendto, fd, from, len, flags, 0, 0) }.map(drop);
    let limit = |bytes: i32| {
        // SAFETY: an int and its size.
        let _ = unsafe {
            sys!(SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &raw const bytes, 4)
        };
    };
    match send() {
        Err(Errno(libc::EMSGSIZE)) => {
            let before = tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF)?;
            limit(len as i32);
            let sent = send();
            // KERNEL: it doubles what it is given.
            limit(before / 2);
            sent
        }
        sent => sent,
    }
}

/// The address of the other end, as much as there is room for; returns its length.
pub fn peer_name(fd: i32, to: *mut libc::sockaddr, room: u32) -> Option<u32> {
    let mut len = room;
    // SAFETY: the program's buffer and its length.
    unsafe { sys!(SYS_getpeername, fd, to, &raw mut len) }.ok().map(|_| len)
}
