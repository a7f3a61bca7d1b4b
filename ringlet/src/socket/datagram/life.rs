//! A UDP socket from its first call to its end, as lanes have to do with it: what begins, ends or forbids them, and what is shown of it.

use super::inlets;
use super::outlets::{self, first_step};
use crate::reasons::Reason;
use crate::socket::epoll::registration;
use crate::socket::table::{Socket, Stage, tables};
use crate::socket::view;
use ringlet_linux::{meet, sys};

/// A socket was made, and is followed. True if it is one of UDP.
pub fn begin(socket: &Socket, family: i32, nonblocking: bool) -> bool {
    if !socket.has_datagrams() {
        return false;
    }
    socket.family.set(family as u32);
    socket.end().nonblocking.set(u32::from(nonblocking));
    socket.next_step.set(first_step());
    let has_mailbox = inlets::begin(socket);
    socket.set_stage(if has_mailbox { Stage::Datagram } else { Stage::KernelForGood });
    if let Some((_, outbox)) = outlets::of(socket) {
        outbox.door.set(0);
    }
    true
}

/// As `Tables::rehome`; what lanes that were shared still hold is taken first.
pub(super) fn rehome(socket: &Socket) -> bool {
    let Some(tables) = tables() else { return false };
    let Some((all, mailbox)) = inlets::of(socket) else { return false };
    tables.has_own_end(socket) || !mailbox.has_lanes() && tables.rehome(socket) && all.begin(socket)
}

/// connect() has changed what the socket receives, and what its datagrams come from: everything begins anew.
pub fn connected(socket: &'static Socket) -> bool {
    if socket.has_datagrams() {
        leave(socket, true);
        socket.next_step.set(socket.calls.get().saturating_add(first_step()));
    }
    socket.has_datagrams()
}

/// Doors are looked for at the next call.
pub fn look_anew(socket: &Socket) {
    if socket.has_datagrams() {
        socket.next_step.set(socket.calls.get());
    }
}

/// The socket stays on the kernel from now on. What is in its lanes can still be received.
pub fn bar(socket: &Socket, reason: Reason) {
    socket.end().barred.set(reason as u32);
    leave(socket, true);
    close_door(socket, meet::part);
    // One that had a mailbox keeps its place in epoll sets, and looks there for what its lanes still hold.
    if socket.stage() == Stage::Datagram {
        socket.set_stage(Stage::KernelForGood);
    }
    show(socket, reason);
}

fn close_door(socket: &Socket, close: fn(i32)) {
    let Some((_, outbox)) = outlets::of(socket) else { return };
    let door = outbox.door.swap(0) as i32;
    if door != 0 {
        if let Some(tables) = tables() {
            tables.clear(door);
        }
        close(door);
    }
}

/// Ends the lanes, both ways; those that come in are emptied first by whoever receives.
fn leave(socket: &Socket, ours: bool) {
    let end = socket.end();
    if let Some((all, mailbox)) = inlets::of(socket)
        && mailbox.has_lanes()
        && let Some(_held) = end.receive_lock.take()
    {
        mailbox.close_all(all);
    }
    if let Some((all, outbox)) = outlets::of(socket)
        && let Some(_held) = end.send_lock.take()
    {
        outbox.clear(all, ours);
    }
}

/// Two processes will hold the socket: what either sends or receives, the kernel brings.
pub fn before_fork(socket: &Socket) {
    leave(socket, true);
    if socket.has_datagrams() {
        // (By edge: the kernel would go on telling one of what it is the other's turn to receive.)
        registration::sending_changed(socket);
    }
}

/// What comes from now on, the kernel brings: for the end of this process, or another that gets the socket.
pub fn close_inlets(socket: &Socket) {
    if let Some((all, mailbox)) = inlets::of(socket)
        && mailbox.has_lanes()
        && let Some(_held) = socket.end().receive_lock.take()
    {
        mailbox.close_all(all);
    }
}

/// In a child by fork: outlets and door are the parent's.
pub fn after_fork(socket: &Socket) {
    close_door(socket, sys::close);
    if let Some((all, outbox)) = outlets::of(socket) {
        outbox.clear(all, false);
    }
    close_inlets(socket);
}

/// The process's last name of the socket goes; `last`: no other process of the family holds it. Both locks held, if they can be.
pub fn release(socket: &Socket, last: bool) {
    close_door(socket, meet::part);
    if let Some((all, mailbox)) = inlets::of(socket) {
        if last { mailbox.free_all(all) } else { mailbox.part(all) }
    }
    if let Some((all, outbox)) = outlets::of(socket) {
        outbox.clear(all, true);
    }
}

/// This process leaves the family: of what lanes that were shared still hold, it takes nothing.
pub fn part(socket: &Socket) -> bool {
    if !socket.has_datagrams() {
        return false;
    }
    close_door(socket, meet::part);
    if let Some((all, mailbox)) = inlets::of(socket) {
        mailbox.part(all);
    }
    socket.set_stage(Stage::KernelForGood);
    if tables().is_some_and(|tables| tables.take_along(socket)) && inlets::begin(socket) {
        socket.end().barred.set(Reason::Credentials as u32);
    }
    show(socket, Reason::Credentials);
    true
}

/// Maps anew what others of the family have and this process does not use.
pub fn part_all(age: u32) {
    if let Some(all) = inlets::all() {
        all.part_all(age);
    }
}

/// The process ends: its senders go back to the kernel, which tells them what it tells.
pub fn at_exit(socket: &Socket) {
    if socket.has_datagrams()
        && tables().is_some_and(|tables| tables.holders.is_alone(&socket.end().holders))
    {
        close_inlets(socket);
    }
}

/// Shows where a socket stands now, and why.
pub(super) fn show(socket: &Socket, reason: Reason) {
    view::show_reason(socket, reason);
    show_path(socket);
}

pub(super) fn show_path(socket: &Socket) {
    view::show_path_as(socket, shown_path(socket));
}

pub fn shown_path(socket: &Socket) -> u32 {
    match socket.stage() {
        Stage::Datagram | Stage::Mailbox => path(socket),
        _ => view::path(socket),
    }
}

/// Which path the datagrams of a socket take: by lanes where it sends or receives much.
pub fn path(socket: &Socket) -> u32 {
    use ringlet_core::view::{PATH_KERNEL, PATH_MOVING, PATH_RING};
    let inward = inlets::of(socket).is_some_and(|(_, mailbox)| mailbox.hot_count() > 0);
    let Some((all, outbox)) = outlets::of(socket) else { return PATH_KERNEL };
    let outward = outbox.has_lane(all);
    let receives = socket.calls.get() > 0;
    match (inward || !receives, outward || !outbox.sends(all)) {
        _ if !inward && !outward => PATH_KERNEL,
        (true, true) => PATH_RING,
        _ => PATH_MOVING,
    }
}

/// Is the socket to keep to the kernel for now (`ringlet off`)? Then it leaves its lanes.
#[inline(always)]
pub(super) fn is_paused(socket: &Socket) -> bool {
    let off = view::asked(socket) & ringlet_core::view::ASKED_OFF != 0;
    if off {
        pause(socket);
    }
    off
}

#[cold]
fn pause(socket: &Socket) {
    let receives = inlets::of(socket).is_some_and(|(all, mailbox)| mailbox.is_open(all));
    let sends = outlets::of(socket).is_some_and(|(all, outbox)| outbox.has_lane(all));
    if receives || sends {
        leave(socket, true);
        show(socket, Reason::Paused);
    }
}

/// Options that change nothing that a lane would have to know.
fn is_harmless(level: i32, option: i32) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            option,
            libc::SO_RCVBUF
                | libc::SO_SNDBUF
                | libc::SO_RCVBUFFORCE
                | libc::SO_SNDBUFFORCE
                | libc::SO_RCVTIMEO
                | libc::SO_SNDTIMEO
                | libc::SO_REUSEADDR
                | libc::SO_BROADCAST
                | libc::SO_PRIORITY
                | libc::SO_LINGER
                | libc::SO_KEEPALIVE
                | libc::SO_BUSY_POLL
        ),
        libc::IPPROTO_IP => matches!(
            option,
            libc::IP_TTL
                | libc::IP_TOS
                | libc::IP_MTU_DISCOVER
                | libc::IP_MULTICAST_TTL
                | libc::IP_MULTICAST_LOOP
                | libc::IP_MULTICAST_IF
                | libc::IP_MULTICAST_ALL
                | libc::IP_ADD_MEMBERSHIP
                | libc::IP_DROP_MEMBERSHIP
        ),
        libc::IPPROTO_IPV6 => matches!(
            option,
            libc::IPV6_V6ONLY
                | libc::IPV6_UNICAST_HOPS
                | libc::IPV6_MULTICAST_HOPS
                | libc::IPV6_MULTICAST_LOOP
                | libc::IPV6_MULTICAST_IF
                | libc::IPV6_ADD_MEMBERSHIP
                | libc::IPV6_DROP_MEMBERSHIP
                | libc::IPV6_TCLASS
                | libc::IPV6_MTU_DISCOVER
        ),
        _ => false,
    }
}

/// The program has set an option; `value` is its first word.
pub fn option_set(socket: &Socket, level: i32, option: i32, value: i32) {
    // One that switches something off changes nothing: had it been on, the socket were barred. (A program is attached by a descriptor, which may
    // be 0.)
    let attaches = level == libc::SOL_SOCKET
        && matches!(option, libc::SO_ATTACH_BPF | libc::SO_ATTACH_REUSEPORT_EBPF);
    let off = if (level, option) == (libc::SOL_SOCKET, libc::SO_PEEK_OFF) { -1 } else { 0 };
    if (value != off || attaches) && !is_harmless(level, option) {
        bar(socket, Reason::Option);
    }
}
