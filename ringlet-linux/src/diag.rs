//! The kernel's socket table (netlink, SOCK_DIAG): which socket is at the far end of a connection, and whose it is.
//!
//! The table is of the network namespace in which the calling thread is. A socket stays in that in which it was made, so a thread that has joined
//! another one (setns) would be told of strangers that have the same addresses there. So the near end has to be in the same table, by its cookie.

use crate::meet::Ends;
use crate::sys::{Errno, Sys, close, sys};
use crate::{proof, tcp, unix};

/// The far end of a connection, as the kernel's socket table has it.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    pub inode: u32,
    pub cookie: u64,
    pub uid: u32,
    /// What its program has not received yet: bytes for TCP, memory for UDP.
    pub unread: u32,
}

/// struct nlmsghdr, and a request of the family.
#[repr(C)]
struct Asked<R> {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    pid: u32,
    request: R,
}

/// struct inet_diag_req_v2.
#[repr(C)]
struct InetRequest {
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

/// struct unix_diag_req.
#[repr(C)]
struct UnixRequest {
    family: u8,
    protocol: u8,
    pad: u16,
    states: u32,
    inode: u32,
    show: u32,
    cookie: [u32; 2],
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NO_COOKIE: [u32; 2] = [u32::MAX; 2];
/// linux/unix_diag.h: what to tell, and the attributes that tell it.
const SHOW_NAME: u32 = 1;
const SHOW_PEER: u32 = 4;
const SHOW_UID: u32 = 64;
const ATTRIBUTE_NAME: u16 = 0;
const ATTRIBUTE_PEER: u16 = 2;
const ATTRIBUTE_UID: u16 = 7;
/// include/net/tcp_states.h.
const TCP_SYN_SENT: u8 = 2;
const TCP_SYN_RECV: u8 = 3;
const TCP_LISTEN: u8 = 10;
const TCP_NEW_SYN_RECV: u8 = 12;
/// struct nlmsghdr, and struct unix_diag_msg.
const HEADER_BYTES: usize = 16;
const UNIX_MESSAGE_BYTES: usize = 16;

/// Looks up the socket at the far end of `socket`, a connection of ours with these ends. `ENOENT` when it is not on this machine, or when one of the
/// two is not in this thread's network namespace; other errors when the kernel has no socket table for us.
pub fn far_owner(socket: i32, ends: &Ends) -> Sys<Owner> {
    match ends {
        Ends::Tcp(ends) => far_tcp_owner(socket, ends),
        Ends::Unix(ends) => far_unix_owner(ends),
    }
}

/// A netlink socket, by which one table is asked several times.
struct Table(i32);

impl Table {
    fn open(family: i32) -> Sys<Table> {
        netlink(family).map(Table)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// A socket by which the kernel is asked for the sockets of this network namespace.
pub fn open() -> Sys<i32> {
    netlink(libc::NETLINK_SOCK_DIAG)
}

fn netlink(family: i32) -> Sys<i32> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_socket, libc::AF_NETLINK, kind, family) }.map(|socket| socket as i32)
}

fn send<R>(socket: i32, kind: u16, request: R, flags: i32) -> Sys<usize> {
    let asked = Asked {
        len: size_of::<Asked<R>>() as u32,
        kind,
        flags: (libc::NLM_F_REQUEST | flags) as u16,
        sequence: 1,
        pid: 0,
        request,
    };
    // SAFETY: a plain struct and its size.
    unsafe { sys!(SYS_sendto, socket, &raw const asked, size_of::<Asked<R>>(), 0, 0, 0) }
}

/// The kernel answers within the send, and goes on within the receive, so this does not wait.
fn receive(socket: i32, answer: &mut [u8]) -> Sys<usize> {
    loop {
        // SAFETY: zero is a valid sockaddr_nl.
        let mut from: libc::sockaddr_nl = unsafe { core::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_nl>() as u32;
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: a valid buffer, and an address with its size.
        let got = unsafe {
            sys!(
                SYS_recvfrom,
                socket,
                answer.as_mut_ptr(),
                answer.len(),
                flags,
                &raw mut from,
                &raw mut len
            )?
        };
        // Who administers a network namespace may write to our port as well.
        if from.nl_pid == 0 {
            return if got > answer.len() { Err(Errno::ENOMEM) } else { Ok(got) };
        }
    }
}

/// Asks for one socket. Returns how long the answer is, which is sound as far as its header goes.
fn ask<R>(table: &Table, request: R, answer: &mut [u8]) -> Sys<usize> {
    ask_of(table, SOCK_DIAG_BY_FAMILY, request, SOCK_DIAG_BY_FAMILY, answer)
}

/// The same of any part of the kernel's, which answers by messages of the kind `expected`.
fn ask_of<R>(table: &Table, kind: u16, request: R, expected: u16, answer: &mut [u8]) -> Sys<usize> {
    send(table.0, kind, request, 0)?;
    let got = receive(table.0, answer)?;
    match u32_at(&answer[..got], 4).ok_or(Errno::EINVAL)? as u16 {
        kind if kind == expected => Ok(got),
        kind if kind == libc::NLMSG_ERROR as u16 => Err(error_in(&answer[..got])),
        _ => Err(Errno::ENOENT),
    }
}

/// What struct nlmsgerr, or the end of a list, says.
fn error_in(message: &[u8]) -> Errno {
    Errno((u32_at(message, HEADER_BYTES).unwrap_or(0) as i32).wrapping_neg())
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

/// struct rtmsg, and two attributes (struct rtattr) of an address each: `N` bytes.
#[repr(C)]
struct RouteRequest<const N: usize> {
    family: u8,
    target_bits: u8,
    source_bits: u8,
    rest: [u8; 9],
    target: Attribute<N>,
    source: Attribute<N>,
}

#[repr(C)]
struct Attribute<const N: usize> {
    len: u16,
    kind: u16,
    value: [u8; N],
}

/// Does what this user sends from `source` to `to` stay in this network namespace, at an address that is its own? By the kernel's own lookup, with
/// all its tables and rules. (For IPv4 it says no, too, where `source` is none of its own.)
pub fn leads_here(source: &tcp::Address, to: &tcp::Address) -> bool {
    const V4: usize = 4;
    match (source.is_v4(), to.is_v4()) {
        (true, true) => {
            let last = |ip: [u8; 16]| [ip[12], ip[13], ip[14], ip[15]];
            route_is_local::<V4>(libc::AF_INET, last(source.ip), last(to.ip))
        }
        (false, false) => route_is_local(libc::AF_INET6, source.ip, to.ip),
        _ => false,
    }
}

fn route_is_local<const N: usize>(family: i32, source: [u8; N], target: [u8; N]) -> bool {
    let attribute = |kind: u16, value: [u8; N]| Attribute { len: 4 + N as u16, kind, value };
    let request = RouteRequest {
        family: family as u8,
        target_bits: 8 * N as u8,
        source_bits: 8 * N as u8,
        rest: [0; 9],
        target: attribute(libc::RTA_DST, target),
        source: attribute(libc::RTA_SRC, source),
    };
    let mut answer = [0u8; 1024];
    let asked = Table::open(libc::NETLINK_ROUTE).and_then(|table| {
        ask_of(&table, libc::RTM_GETROUTE, request, libc::RTM_NEWROUTE, &mut answer)
    });
    // struct rtmsg: the kind of route at 7.
    asked.is_ok_and(|got| answer[..got].get(HEADER_BYTES + 7) == Some(&libc::RTN_LOCAL))
}

/// The other end must be connected, and to us. KERNEL: where there is no such socket, a listener that would take the connection is
/// found: so a web server's would be for each connection of the machine's to another one's.
fn far_tcp_owner(socket: i32, ends: &tcp::Ends) -> Sys<Owner> {
    let mut answer = [0u8; 1024];
    let (owner, answer) = far_of(socket, ends, libc::IPPROTO_TCP, &mut answer)?;
    let [family, state, ..] = *answer else { return Err(Errno::EINVAL) };
    // struct inet_diag_msg: family, state; at 4 the ports, and the addresses at 8 and 24, of IPv4 in the first four bytes.
    let address = |port: usize, ip: usize| {
        let port = u16::from_be_bytes(answer.get(port..port + 2)?.try_into().ok()?);
        let mut ip: [u8; 16] = answer.get(ip..ip + 16)?.try_into().ok()?;
        if family as i32 == libc::AF_INET {
            ip[4..].fill(0);
            ip.rotate_right(12);
            ip[10..12].fill(0xff);
        }
        Some(tcp::Address { ip, port })
    };
    let mirrored = address(4, 8) == Some(ends.remote) && address(6, 24) == Some(ends.local);
    let connecting = matches!(state, TCP_SYN_SENT | TCP_SYN_RECV | TCP_LISTEN | TCP_NEW_SYN_RECV);
    if mirrored && !connecting { Ok(owner) } else { Err(Errno::ENOENT) }
}

pub(crate) fn owner_of(ends: &tcp::Ends, protocol: i32) -> Sys<Owner> {
    let table = Table::open(libc::NETLINK_SOCK_DIAG)?;
    found_by(&table, ends, protocol, &mut [0; 1024]).map(|(owner, _)| owner)
}

/// What has the other end of `socket`, whose own these are.
pub(crate) fn far_owner_of(socket: i32, ends: &tcp::Ends, protocol: i32) -> Sys<Owner> {
    far_of(socket, ends, protocol, &mut [0; 1024]).map(|(owner, _)| owner)
}

/// The same, and the message that says so; `ENOENT` where `socket` is not in the same table under its own ends. (KERNEL: sockets that are bound to a
/// device, as those of a VRF, are not found; of the others no two in a namespace have the same ends.)
fn far_of<'a>(
    socket: i32,
    ends: &tcp::Ends,
    protocol: i32,
    answer: &'a mut [u8],
) -> Sys<(Owner, &'a [u8])> {
    let table = Table::open(libc::NETLINK_SOCK_DIAG)?;
    let from_there = tcp::Ends { local: ends.remote, remote: ends.local, family: ends.family };
    let (near, _) = found_by(&table, &from_there, protocol, answer)?;
    if near.cookie != proof::cookie(socket)? {
        return Err(Errno::ENOENT);
    }
    found_by(&table, ends, protocol, answer)
}

/// What the kernel finds with these ends the other way round, and the message that says so.
fn found_by<'a>(
    table: &Table,
    ends: &tcp::Ends,
    protocol: i32,
    answer: &'a mut [u8],
) -> Sys<(Owner, &'a [u8])> {
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
    let request = InetRequest {
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
        cookie: NO_COOKIE,
    };
    let got = ask(table, request, answer)?;
    // struct inet_diag_msg (72 bytes): cookie at 44, receive queue at 56, uid at 64, inode at 68.
    let found = |at| u32_at(&answer[..got], HEADER_BYTES + at);
    let (Some(low), Some(high)) = (found(44), found(48)) else { return Err(Errno::EINVAL) };
    let (Some(unread), Some(uid), Some(inode)) = (found(56), found(64), found(68)) else {
        return Err(Errno::EINVAL);
    };
    let owner = Owner { inode, cookie: u64::from(high) << 32 | u64::from(low), uid, unread };
    let message = answer.get(HEADER_BYTES..got).ok_or(Errno::EINVAL)?;
    if inode == 0 { Err(Errno::ENOENT) } else { Ok((owner, message)) }
}

/// The other end must say that we are its peer: then both numbers are of one connection, and of this moment.
fn far_unix_owner(ends: &unix::Ends) -> Sys<Owner> {
    let far = unix_socket(ends.remote)?;
    match (far.peer, far.uid) {
        (Some(peer), Some(uid)) if peer == ends.local => {
            Ok(Owner { inode: ends.remote, cookie: far.cookie, uid, unread: 0 })
        }
        (_, None) => Err(Errno::ENOSYS),
        _ => Err(Errno::ENOENT),
    }
}

/// The socket at the other end of a Unix socket of ours: its number and its cookie. `ENOENT` while nobody has accepted it, or when it is
/// closed.
pub fn unix_far(ours: u32) -> Sys<(u32, u64)> {
    let inode = unix_peer(ours)?;
    let far = if inode == 0 { Err(Errno::ENOENT) } else { unix_socket(inode) }?;
    // Each must say that the other is its peer: then both numbers are of one connection.
    if far.peer == Some(ours) { Ok((inode, far.cookie)) } else { Err(Errno::ENOENT) }
}

/// The number of the socket at the other end of a Unix socket; 0 while nobody has accepted it, or when it is closed.
fn unix_peer(inode: u32) -> Sys<u32> {
    unix_socket(inode).map(|found| found.peer.unwrap_or(0))
}

/// The numbers of `socket`, a Unix socket of ours, and of the one at its other end, or 0 as above. `ENOENT` where it is not in this thread's network
/// namespace. (Numbers come again; cookies do not.)
pub fn unix_ends(socket: i32) -> Sys<(u32, u32)> {
    let inode = unix::inode(socket)?;
    let found = unix_socket(inode)?;
    let is_it = found.cookie == proof::cookie(socket)?;
    if is_it { Ok((inode, found.peer.unwrap_or(0))) } else { Err(Errno::ENOENT) }
}

/// A Unix socket as the kernel lists it. `kind` and `state` are numbers of SOCK_* and of include/net/tcp_states.h.
pub struct UnixSocket<'a> {
    pub kind: u8,
    pub state: u8,
    pub inode: u32,
    pub cookie: u64,
    pub peer: Option<u32>,
    pub uid: Option<u32>,
    /// That it is bound to, which may hold any byte; an abstract one begins with 0.
    pub name: Option<&'a [u8]>,
}

impl UnixSocket<'_> {
    /// From a message with its header: struct unix_diag_msg, and attributes.
    fn parse(message: &[u8]) -> Option<UnixSocket<'_>> {
        let [_, kind, state, _] = u32_at(message, HEADER_BYTES)?.to_ne_bytes();
        let word = |at: usize| u32_at(message, HEADER_BYTES + at);
        let (inode, cookie) = (word(4)?, u64::from(word(12)?) << 32 | u64::from(word(8)?));
        let mut found =
            UnixSocket { kind, state, inode, cookie, peer: None, uid: None, name: None };
        let mut at = HEADER_BYTES + UNIX_MESSAGE_BYTES;
        // struct nlattr: length and type, 16 bits each; then the value, padded to 4 bytes.
        while let Some(head) = u32_at(message, at) {
            let (len, kind) = (head as u16 as usize, (head >> 16) as u16);
            let value = message.get(at + 4..at + len).unwrap_or(&[]);
            match kind {
                ATTRIBUTE_PEER => found.peer = u32_at(value, 0),
                ATTRIBUTE_UID => found.uid = u32_at(value, 0),
                ATTRIBUTE_NAME => found.name = Some(value),
                _ => {}
            }
            at += len.max(4).next_multiple_of(4);
        }
        Some(found)
    }
}

fn unix_request(inode: u32, show: u32) -> UnixRequest {
    UnixRequest {
        family: libc::AF_UNIX as u8,
        protocol: 0,
        pad: 0,
        states: u32::MAX,
        inode,
        show,
        cookie: NO_COOKIE,
    }
}

fn unix_socket(inode: u32) -> Sys<UnixSocket<'static>> {
    let mut answer = [0u8; 512];
    let table = Table::open(libc::NETLINK_SOCK_DIAG)?;
    let got = ask(&table, unix_request(inode, SHOW_PEER | SHOW_UID), &mut answer)?;
    let found = UnixSocket::parse(&answer[..got]).ok_or(Errno::EINVAL)?;
    Ok(UnixSocket { name: None, ..found })
}

/// Room for any part of the kernel's list.
pub const LIST_BYTES: usize = 1 << 16;

/// Every Unix socket of the network namespace in which `socket` was opened.
pub fn unix_sockets(
    socket: i32,
    room: &mut [u8; LIST_BYTES],
    mut each: impl FnMut(&UnixSocket),
) -> Sys<()> {
    let request = unix_request(0, SHOW_NAME | SHOW_PEER | SHOW_UID);
    send(socket, SOCK_DIAG_BY_FAMILY, request, libc::NLM_F_DUMP)?;
    loop {
        let got = receive(socket, room)?;
        let mut rest = &room[..got];
        while let (Some(len), Some(kind)) = (u32_at(rest, 0), u32_at(rest, 4)) {
            let len = len as usize;
            let message = rest.get(..len).filter(|_| len >= HEADER_BYTES).ok_or(Errno::EINVAL)?;
            match i32::from(kind as u16) {
                libc::NLMSG_ERROR => return Err(error_in(message)),
                libc::NLMSG_DONE => {
                    let error = error_in(message);
                    return if error == Errno(0) { Ok(()) } else { Err(error) };
                }
                _ => each(&UnixSocket::parse(message).ok_or(Errno::EINVAL)?),
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        }
    }
}
