//! Calls that move datagrams (`ringlet::socket::datagram`). What lanes don't have or can't do is asked of libc, by a message header that
//! also tells where a datagram came from.

use crate::data::{IOV_MAX, checked, is_nowhere, list_of, room_for_name};
use crate::{Edge, args};
use core::ptr::null_mut;
use libc::{c_int, iovec, mmsghdr, msghdr, sockaddr, socklen_t};
use ringlet::socket::datagram::{self, Kernel, Next};
use ringlet::socket::table::Socket;
use ringlet::socket::tap;
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::tcp::Address;
use ringlet_linux::udp;

/// A header for buffers of the program, without a name.
fn header_of(list: &[Buffer]) -> msghdr {
    // SAFETY: zero is a valid message header.
    let mut header: msghdr = unsafe { core::mem::zeroed() };
    // An iovec is a `Buffer`.
    header.msg_iov = list.as_ptr().cast::<iovec>().cast_mut();
    header.msg_iovlen = list.len();
    header
}

/// recv, read, recvfrom and their relatives.
///
/// # Safety
/// The program's buffers, and the name as recvfrom takes it.
pub unsafe fn receive<E: Edge>(
    fd: c_int,
    socket: &'static Socket,
    list: &[Buffer],
    flags: c_int,
    name: *mut sockaddr,
    name_len: *mut socklen_t,
) -> Sys<usize> {
    let mut header = header_of(list);
    if name.is_null() {
        // SAFETY: asks for a header whose buffers are the program's: `list`, by the caller's word.
        return unsafe { receive_by::<E>(fd, socket, &mut header, flags, false) };
    }
    // SAFETY: the program's length.
    let room = unsafe { room_for_name(name_len) };
    (header.msg_name, header.msg_namelen) = (name.cast(), room.unwrap_or(0));
    // SAFETY: asks for a header whose buffers and name are the program's, by the caller's word; the name's room is what it said.
    let got = unsafe { receive_by::<E>(fd, socket, &mut header, flags, false) };
    if got.is_ok() {
        room?;
        // SAFETY: the program's length.
        unsafe { *name_len = header.msg_namelen };
    }
    got
}

/// recvmsg.
///
/// # Safety
/// The program's message header.
pub unsafe fn receive_message<E: Edge>(
    fd: c_int,
    socket: &'static Socket,
    header: &mut msghdr,
    flags: c_int,
) -> Sys<usize> {
    // SAFETY: the header is the program's, as the caller has promised, and so is what it names.
    unsafe { receive_by::<E>(fd, socket, header, flags, true) }
}

/// `whole`: what else a header tells is asked for, too.
///
/// # Safety
/// The program's message header.
unsafe fn receive_by<E: Edge>(
    fd: c_int,
    socket: &'static Socket,
    header: &mut msghdr,
    flags: c_int,
    whole: bool,
) -> Sys<usize> {
    // SAFETY: the program's vector; an iovec is a `Buffer`.
    let list = unsafe { list_of(header) }?;
    if checked(list).is_err() || !header.msg_name.is_null() && is_nowhere(header.msg_name) {
        // The kernel knows what to say, but must not wait for it while lanes are looked at.
        return natively::<E>(fd, header, flags);
    }
    let mut kernel = Kernel::Unknown;
    let kept = flags & libc::MSG_PEEK != 0;
    loop {
        // SAFETY: the program's buffers.
        let mut to = unsafe { Buffers::new(list) };
        match datagram::receive(socket, &mut to, flags, kernel) {
            Next::Datagram(got) => {
                datagram::count_in(socket, got.len);
                if !kept && tap::is_asked(socket) {
                    // SAFETY: the program's buffers again, which are only read here.
                    let list = unsafe { Buffers::new(list) };
                    tap::datagram(socket, true, Some(got.source), list, got.copied, got.len);
                }
                let truncated = if got.copied < got.len { libc::MSG_TRUNC } else { 0 };
                // SAFETY: the program's name.
                unsafe { give_name(header, &got.source, socket.family.get() as i32) };
                header.msg_controllen = 0;
                header.msg_flags = flags & libc::MSG_CMSG_CLOEXEC | truncated;
                let all = flags & libc::MSG_TRUNC != 0;
                return Ok(if all { got.len } else { got.copied });
            }
            next @ (Next::AskKernel | Next::TakeKernel | Next::TakeStill(_)) => {
                let flags = flags | libc::MSG_DONTWAIT;
                let (mut got, mut source) = (Ok(0), None);
                if matches!(next, Next::AskKernel)
                    && kernel != Kernel::Later
                    && datagram::has_hot_lanes(socket)
                {
                    // From whom it is tells whether it is its turn.
                    let mut none = header_of(&[]);
                    let flags = flags | libc::MSG_PEEK;
                    (got, source) = from_kernel::<E>(fd, socket, &mut none, flags, false);
                    if got.is_ok() && !datagram::is_kernels_turn(socket, source) {
                        kernel = Kernel::Later;
                        continue;
                    }
                }
                if got.is_ok() {
                    (got, source) = from_kernel::<E>(fd, socket, header, flags, whole);
                }
                drop(next);
                if got.is_ok() {
                    datagram::arrived(socket, source, kept);
                    return got;
                }
                if got != Err(Errno(libc::EAGAIN)) {
                    return got;
                }
                kernel = Kernel::Nothing;
            }
            Next::Sleep(asleep) => {
                let (got, source) = from_kernel::<E>(fd, socket, header, flags, whole);
                drop(asleep);
                if got.is_ok() {
                    datagram::arrived(socket, source, kept);
                }
                return got;
            }
            Next::Kernel => return natively::<E>(fd, header, flags),
            Next::Fail(error) => return Err(error),
        }
    }
}

/// Writes an address as the kernel does: as much as there is room for, and how long it is.
unsafe fn give_name(header: &mut msghdr, source: &Address, family: c_int) {
    if header.msg_name.is_null() {
        return;
    }
    let (bytes, len) = udp::to_sockaddr(source, family);
    let room = (header.msg_namelen as usize).min(len);
    // SAFETY: the program's name has so much room.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), header.msg_name.cast(), room) };
    header.msg_namelen = len as socklen_t;
}

fn natively<E: Edge>(fd: c_int, header: *mut msghdr, flags: c_int) -> Sys<usize> {
    // SAFETY: the program's header, or ours with the program's vector.
    unsafe { E::call(libc::SYS_recvmsg, args!(fd, header, flags)) }
}

/// A datagram from the kernel, and where it came from.
fn from_kernel<E: Edge>(
    fd: c_int,
    socket: &Socket,
    header: &mut msghdr,
    flags: c_int,
    whole: bool,
) -> (Sys<usize>, Option<Address>) {
    let mut name = [0u8; 128];
    let mut ours = *header;
    ours.msg_name = name.as_mut_ptr().cast();
    ours.msg_namelen = name.len() as socklen_t;
    let got = if whole || ours.msg_iovlen > 1 {
        natively::<E>(fd, &mut ours, flags)
    } else {
        // (The kernel has no header to copy, in and out.)
        let nothing = iovec { iov_base: null_mut(), iov_len: 0 };
        // SAFETY: as many buffers of the program as the header says.
        let to = if ours.msg_iovlen == 0 { nothing } else { unsafe { *ours.msg_iov } };
        let (name, len) = (ours.msg_name, &raw mut ours.msg_namelen);
        // SAFETY: that buffer, and our room for a name.
        unsafe { E::call(libc::SYS_recvfrom, args!(fd, to.iov_base, to.iov_len, flags, name, len)) }
    };
    if got.is_err() {
        return (got, None);
    }
    let len = (ours.msg_namelen as usize).min(name.len());
    if !header.msg_name.is_null() {
        let room = (header.msg_namelen as usize).min(len);
        // SAFETY: the program's name has so much room.
        unsafe { core::ptr::copy_nonoverlapping(name.as_ptr(), header.msg_name.cast(), room) };
        header.msg_namelen = ours.msg_namelen;
    }
    header.msg_controllen = ours.msg_controllen;
    header.msg_flags = ours.msg_flags;
    (got, udp::from_sockaddr(&name[..len], socket.family.get() as c_int))
}

/// Sends by a lane, if there is one that can take it: `Some(result)`. `None`: the call is the kernel's.
///
/// # Safety
/// The program's buffers and address.
pub unsafe fn send(
    socket: &'static Socket,
    list: &[Buffer],
    flags: c_int,
    name: *const sockaddr,
    name_len: socklen_t,
    control: bool,
) -> Option<Sys<usize>> {
    checked(list).ok()?;
    if flags & libc::MSG_MORE != 0 {
        // What follows belongs to the same datagram, in the kernel.
        ringlet::socket::keep_on_kernel(socket, ringlet::reasons::Reason::Option);
        return None;
    }
    let to = if name.is_null() {
        None
    } else {
        if is_nowhere(name) || name_len > 128 {
            return None;
        }
        // SAFETY: the program's address.
        let bytes = unsafe { core::slice::from_raw_parts(name.cast::<u8>(), name_len as usize) };
        Some(udp::from_sockaddr(bytes, socket.family.get() as c_int).filter(|to| to.port != 0)?)
    };
    // SAFETY: the program's buffers.
    let mut from = unsafe { Buffers::new(list) };
    let whole = tap::is_asked(socket).then(|| from.clone());
    let sent = datagram::send(socket, to.as_ref(), &mut from, flags, !control)?;
    if let Some(whole) = whole {
        tap::datagram(socket, false, to, whole, sent, sent);
    }
    Some(Ok(sent))
}

/// As `send`, of a message header.
///
/// # Safety
/// The program's message header.
pub unsafe fn send_message(
    socket: &'static Socket,
    message: *const msghdr,
    flags: c_int,
) -> Option<Sys<usize>> {
    if is_nowhere(message) {
        return None;
    }
    // SAFETY: the program's header.
    let header = unsafe { &*message };
    if header.msg_iovlen > IOV_MAX || header.msg_iovlen != 0 && is_nowhere(header.msg_iov) {
        return None;
    }
    let list: &[Buffer] = if header.msg_iovlen == 0 {
        &[]
    } else {
        // SAFETY: its vector; an iovec is a `Buffer`.
        unsafe { core::slice::from_raw_parts(header.msg_iov.cast(), header.msg_iovlen) }
    };
    let control = !header.msg_control.is_null() && header.msg_controllen != 0;
    let name = if header.msg_namelen == 0 { null_mut() } else { header.msg_name };
    // SAFETY: asks for the program's buffers and name, which the caller's header describes.
    unsafe { send(socket, list, flags, name.cast(), header.msg_namelen, control) }
}

/// sendmmsg: each message by the way that is open to it.
///
/// # Safety
/// The program's array of `count` headers.
pub unsafe fn send_many<E: Edge>(
    fd: c_int,
    socket: &'static Socket,
    messages: *mut mmsghdr,
    count: libc::c_uint,
    flags: c_int,
) -> Sys<usize> {
    let mut done = 0;
    while done < count.min(IOV_MAX as u32) {
        // SAFETY: the program's array.
        let entry = unsafe { &mut *messages.add(done as usize) };
        // SAFETY: its header.
        let by_lane = unsafe { send_message(socket, &entry.msg_hdr, flags) };
        if by_lane.is_none() && !datagram::sends_by_lanes(socket) {
            // SAFETY: what is left of the program's array.
            let sent = unsafe {
                let rest = messages.add(done as usize);
                E::call(libc::SYS_sendmmsg, args!(fd, rest, count - done, flags))
            };
            return match sent {
                Err(_) if done > 0 => Ok(done as usize),
                sent => sent.map(|sent| done as usize + sent),
            };
        }
        let sent = by_lane.unwrap_or_else(|| {
            let message = &raw const entry.msg_hdr;
            // SAFETY: the program's header.
            unsafe { E::call(libc::SYS_sendmsg, args!(fd, message, flags)) }
        });
        match sent {
            Err(_) if done > 0 => break,
            sent => entry.msg_len = sent? as libc::c_uint,
        }
        done += 1;
    }
    Ok(done as usize)
}
