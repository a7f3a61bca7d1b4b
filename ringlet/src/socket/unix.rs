//! Messages of Unix connections: control data beside the bytes, and addresses.

use super::table::Socket;
use super::{carrier, transfer};
use libc::{msghdr, sockaddr};
use ringlet_core::memory::Buffers;
use ringlet_linux::sys::Sys;
use ringlet_linux::unix::{self as kernel, FromKernel};

/// recvmsg. KERNEL: control data ends a message, and comes with its bytes; the address is the one that the peer is bound to.
/// `with_control`: the program has asked for that too, so that it is told of what it has no room for.
pub fn receive_message(
    socket: &Socket,
    message: &mut msghdr,
    to: &mut Buffers,
    flags: i32,
    with_control: bool,
) -> Sys<usize> {
    let asked = *message;
    let whole = with_control || carrier::facts(socket).has_boundaries;
    let mut from = FromKernel::new(whole.then_some(&asked));
    let got = transfer::receive_by(socket, to, flags, &mut from)?;
    message.msg_controllen = from.control_bytes;
    message.msg_flags = from.flags | flags & libc::MSG_CMSG_CLOEXEC;
    if !message.msg_name.is_null() {
        let name = message.msg_name.cast();
        let anything = got > 0 || from.named;
        let room = message.msg_namelen;
        message.msg_namelen = if anything { peer_name(socket, name, room) } else { 0 };
    }
    Ok(got)
}

/// The address that a receive tells; returns how long it is, which may be more than there is room for.
fn peer_name(socket: &Socket, to: *mut sockaddr, room: u32) -> u32 {
    // KERNEL: of a peer that is bound to nothing only the family is known, and a receive tells not even that.
    kernel::peer_name(socket.fd(), to, room).filter(|len| *len > 2).unwrap_or(0)
}

/// Does this message carry more than bytes?
pub fn has_control(message: &msghdr) -> bool {
    !message.msg_control.is_null() && message.msg_controllen != 0
}
