//! UDP sockets: addresses as programs see them, who receives what is sent to an address, and doors.
//!
//! A *door* is an abstract Unix datagram socket named after the inode of a UDP socket, through which strangers that want to share a lane
//! with it come. Every message carries its sender's credentials, by the kernel's word.

use crate::diag::{Owner, far_owner_of, leads_here, owner_of};
use crate::sys::{Sys, close, sys};
use crate::tcp::{self, Address, Ends};
use crate::{fd, meet};

/// Longest datagram (over IPv4; the kernel refuses longer ones).
pub const DATAGRAM_MAX_BYTES: usize = 65_507;

/// An address as the kernel reports it to a socket of `family`: bytes of a sockaddr, and how many.
pub fn to_sockaddr(address: &Address, family: i32) -> ([u8; 28], usize) {
    let mut bytes = [0u8; 28];
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port.to_be_bytes());
    if family == libc::AF_INET {
        bytes[4..8].copy_from_slice(&address.ip[12..]);
        (bytes, size_of::<libc::sockaddr_in>())
    } else {
        bytes[8..24].copy_from_slice(&address.ip);
        (bytes, size_of::<libc::sockaddr_in6>())
    }
}

/// A destination or source in a sockaddr of the socket's own family; `None` for everything that only the kernel should judge.
pub fn from_sockaddr(bytes: &[u8], family: i32) -> Option<Address> {
    let said = i32::from(u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?]));
    if said != family {
        return None;
    }
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    if family == libc::AF_INET {
        let mut ip = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0];
        // The kernel asks for a whole sockaddr_in.
        ip[12..].copy_from_slice(bytes.get(..16)?.get(4..8)?);
        return Some(Address { ip, port });
    }
    let scope = bytes.get(24..28)?;
    let flow = bytes.get(4..8)?;
    let plain = scope == [0; 4] && flow == [0; 4];
    let ip = bytes.get(8..24)?.try_into().ok()?;
    (plain && family == libc::AF_INET6).then_some(Address { ip, port })
}

/// The family of a socket, and whether it is a UDP one.
pub fn family(fd: i32) -> Option<i32> {
    let udp = tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_UDP);
    udp.then(|| tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN).ok()).flatten()
}

/// The number by which the kernel's tables know a socket.
pub fn inode(fd: i32) -> Sys<u32> {
    // SAFETY: zero is a valid stat buffer.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is valid for writing.
    unsafe { sys!(SYS_fstat, fd, &raw mut stat)? };
    Ok(stat.st_ino as u32)
}

/// Is it the address of a socket that is bound to none?
pub fn is_any(address: &Address) -> bool {
    address.ip == [0; 16] || address.is_v4() && address.ip[12..] == [0; 4]
}

/// The address that what `fd` sends to `to` will come from.
pub fn source(fd: i32, to: &Address) -> Option<Address> {
    let local = tcp::local(fd)?;
    if local.port == 0 {
        return None;
    }
    if !is_any(&local) {
        return Some(local);
    }
    // The kernel's choice, which a socket of our own is told by connecting.
    let family = if to.is_v4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let probe = unsafe { sys!(SYS_socket, family, kind, 0) }.ok()? as i32;
    let (name, len) = to_sockaddr(to, family);
    // SAFETY: an address and its length.
    let connected = unsafe { sys!(SYS_connect, probe, name.as_ptr(), len) };
    let found = connected.ok().and_then(|_| tcp::local(probe));
    close(probe);
    Some(Address { ip: found?.ip, port: local.port })
}

/// Do datagrams between these two stay on this machine, in this network namespace? Addresses come and go, other than the loopback's.
pub fn stays_here(source: &Address, to: &Address) -> bool {
    source.is_loopback() && to.is_loopback() || leads_here(source, to)
}

/// Is it the address of one receiver, as the kernel sees it? (Broadcasts have many: 127.255.255.255 is one too.)
pub fn is_of_one(to: &Address) -> bool {
    let multicast = if to.is_v4() { to.ip[12] & 0xf0 == 0xe0 } else { to.ip[0] == 0xff };
    let family = if to.is_v4() { libc::AF_INET } else { libc::AF_INET6 };
    let Ok(probe) = fd::unconnected(family, libc::SOCK_DGRAM) else { return false };
    let (name, len) = to_sockaddr(to, family);
    // KERNEL: EACCES for a broadcast, as long as the socket has not asked for them.
    // SAFETY: an address and its length.
    let connected = unsafe { sys!(SYS_connect, probe, name.as_ptr(), len) };
    close(probe);
    connected.is_ok() && !multicast
}

/// The socket of this machine that receives what `from` sends to `to`, by the kernel's own lookup. `ENOENT` when there is none.
///
/// KERNEL: the request for UDP names the sender as the source, where TCP's names the socket that is looked for.
pub fn receiver(from: &Address, to: &Address) -> Sys<Owner> {
    let ends = Ends { local: *to, remote: *from, family: 0 };
    owner_of(&ends, libc::IPPROTO_UDP)
}

/// The same of what `socket` sends from its own address `from` to `to`; `ENOENT` also where what comes back would not be received by `socket`: then
/// it is not in this thread's network namespace, or the address is not its own alone.
pub fn receiver_for(socket: i32, from: &Address, to: &Address) -> Sys<Owner> {
    let ends = Ends { local: *to, remote: *from, family: 0 };
    far_owner_of(socket, &ends, libc::IPPROTO_UDP)
}

/// The peer of a connected socket.
pub fn peer(fd: i32) -> Option<Address> {
    tcp::remote(fd)
}

const PREFIX: &[u8] = b"ringlet1/udp/";

fn door_name(inode: u32) -> (libc::sockaddr_un, u32) {
    // SAFETY: zero is a valid sockaddr_un.
    let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    name.sun_family = libc::AF_UNIX as _;
    let digits = (0..8).map(|i| b"0123456789abcdef"[(inode >> (28 - 4 * i) & 15) as usize]);
    let mut n = 1;
    for byte in PREFIX.iter().copied().chain(digits) {
        name.sun_path[n] = byte as _;
        n += 1;
    }
    (name, (core::mem::offset_of!(libc::sockaddr_un, sun_path) + n) as u32)
}

/// Opens the door of the socket `inode`.
pub fn open_door(inode: u32) -> Sys<i32> {
    let (name, len) = door_name(inode);
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let door = unsafe { sys!(SYS_socket, libc::AF_UNIX, kind, 0)? } as i32;
    meet::guard(door);
    // SAFETY: a name and its length.
    let bound = unsafe { sys!(SYS_bind, door, &raw const name, len) };
    match bound {
        Ok(_) => fd::hide(door),
        Err(error) => {
            close(door);
            Err(error)
        }
    }
}

/// Sends a message, and perhaps a descriptor, from our door to that of another socket. Never waits. `ECONNREFUSED` when it has none.
pub fn knock(door: i32, at: u32, bytes: &[u8], fds: &[i32]) -> Sys<()> {
    let (name, len) = door_name(at);
    meet::send_to(door, Some((&name, len)), bytes, fds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_this_machine_is_told_from_others() {
        let v4 = |ip: [u8; 4]| {
            let mut all = [0; 16];
            all[10..12].fill(0xff);
            all[12..].copy_from_slice(&ip);
            Address { ip: all, port: 9 }
        };
        let ours = v4([127, 0, 0, 1]);
        assert!(leads_here(&ours, &v4([127, 0, 0, 2])));
        // Of a net that is for documents only.
        assert!(!leads_here(&ours, &v4([192, 0, 2, 1])));
        assert!(!leads_here(&v4([192, 0, 2, 1]), &ours));
        assert!(!leads_here(&ours, &Address { ip: [0; 16], port: 9 }));
    }
}
