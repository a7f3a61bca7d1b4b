//! A bell that is reached by its name: a Unix datagram socket under an abstract name. Whoever may ring it holds no descriptor of its owner's, nor
//! its owner one of his: so neither can hold up the other's close, or call.
//!
//! What the two can do to each other, by the kernel's source (`unix_dgram_sendmsg`, Linux 6.18):
//!
//! - A ring never waits: MSG_DONTWAIT, and a sender that passes no descriptors is not held up by the collector of those in flight. No lock of
//!   the sleeper's that the ring takes is ever held over a fault. What is woken runs in the ringer's time, as it does for a byte on a connection.
//! - A queued ring is charged to the socket that sent it. Each bell is rung by a socket of its own, so a sleeper that reads none uses up that
//!   one only (by eleven, `net.unix.max_dgram_qlen`), and then the ring fails.
//! - A ring carries a token, and a filter on the sleeper's socket drops, in the sender's own call and before anything is queued, what carries
//!   another. /proc/net/unix shows names, so anybody of the network namespace can send to one; only who was told the token rings.
//! - Who was told the token may ring for ever, and wake the sleeper each time. So he may who holds an eventfd, or publishes records, and one look
//!   takes no more rings than a queue holds (`drain`): it costs the sleeper what a busy connection does, and the ringer more.
//! - No descriptors are admitted (`SO_PASSRIGHTS`, Linux 6.16). Without that nobody is told of it but who carries for the node service, and he gets
//!   a socket of its network namespace beside its name: what carries no token is dropped with all that is in it, in its sender's call.

use crate::meet::{abstract_name, admit_descriptors};
use crate::sys::{Sys, close, sys};
use crate::{fd, sys as system, tcp};

/// What names a bell, and opens it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// 0 is none.
    pub name: u64,
    pub token: [u64; 2],
}

impl Address {
    /// One that nobody else has.
    pub fn random() -> Option<Address> {
        let mut bytes = [0u8; 24];
        if !system::random(&mut bytes) {
            return None;
        }
        let word = |at: usize| {
            bytes[at..at + 8].iter().fold(0u64, |word, &byte| word << 8 | u64::from(byte))
        };
        Some(Address { name: word(0).max(1), token: [word(8), word(16)] })
    }

    /// In the kernel's table of sockets all but the token is there to be read.
    fn socket_name(&self) -> (libc::sockaddr_un, u32) {
        let mut bytes = [0; PREFIX.len() + 16];
        bytes[..PREFIX.len()].copy_from_slice(PREFIX);
        for (nth, digit) in bytes[PREFIX.len()..].iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(self.name >> (60 - 4 * nth)) as usize & 15];
        }
        abstract_name(&bytes)
    }
}

fn token_bytes(token: &[u64; 2]) -> [u8; TOKEN_BYTES] {
    let mut bytes = [0; TOKEN_BYTES];
    bytes[..8].copy_from_slice(&token[0].to_be_bytes());
    bytes[8..].copy_from_slice(&token[1].to_be_bytes());
    bytes
}

const PREFIX: &[u8] = b"ringlet1-bell/";
const TOKEN_BYTES: usize = 16;
const TOKEN_WORDS: usize = TOKEN_BYTES / 4;

/// And does it admit no descriptors?
fn datagram_socket() -> Sys<(i32, bool)> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let socket = unsafe { sys!(SYS_socket, libc::AF_UNIX, kind, 0)? } as i32;
    Ok((socket, admit_descriptors(socket, false)))
}

/// Makes our own. May strangers be told its address?
pub fn make(address: &Address) -> Sys<(i32, bool)> {
    let (socket, barred) = datagram_socket()?;
    let (name, len) = address.socket_name();
    let made = admit_only(socket, address).and_then(|()| {
        // SAFETY: a name and its length.
        unsafe { sys!(SYS_bind, socket, &raw const name, len) }
    });
    match made {
        Ok(_) => fd::hide(socket).map(|socket| (socket, barred)),
        Err(error) => {
            close(socket);
            Err(error)
        }
    }
}

/// Drops what does not carry the token; before the name is bound, so that nothing comes earlier.
fn admit_only(socket: i32, address: &Address) -> Sys<()> {
    const DROP_AT: u8 = 2 * TOKEN_WORDS as u8 + 1;
    let operation = |code: u32, to_false: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: to_false,
        k,
    };
    let mut program = [operation(libc::BPF_RET | libc::BPF_K, 0, 0); 2 * TOKEN_WORDS + 2];
    let token = token_bytes(&address.token);
    for (nth, word) in token.chunks_exact(4).enumerate() {
        let wanted = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
        let (load, compare) = (2 * nth, 2 * nth + 1);
        // (Of a shorter datagram the load ends the program, by which it is dropped.)
        program[load] = operation(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 4 * nth as u32);
        program[compare] = operation(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            DROP_AT - compare as u8 - 1,
            wanted,
        );
    }
    program[2 * TOKEN_WORDS] = operation(libc::BPF_RET | libc::BPF_K, 0, u32::MAX);
    let program = libc::sock_fprog { len: program.len() as u16, filter: (&raw mut program).cast() };
    let len = size_of::<libc::sock_fprog>();
    // SAFETY: a program and its length, which the kernel copies.
    unsafe {
        sys!(
            SYS_setsockopt,
            socket,
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            &raw const program,
            len
        )
    }
    .map(drop)
}

/// A socket by which to ring somebody else's.
pub fn reach(address: &Address) -> Sys<i32> {
    let (socket, _) = datagram_socket()?;
    let (name, len) = address.socket_name();
    // SAFETY: a name and its length.
    match unsafe { sys!(SYS_connect, socket, &raw const name, len) } {
        Ok(_) => fd::hide(socket),
        Err(error) => {
            close(socket);
            Err(error)
        }
    }
}

/// Is a stranger's such a socket, by its kind: one by which a ring never waits?
pub fn is_one(socket: i32) -> bool {
    let option = |option| tcp::int_option(socket, libc::SOL_SOCKET, option);
    option(libc::SO_DOMAIN) == Ok(libc::AF_UNIX) && option(libc::SO_TYPE) == Ok(libc::SOCK_DGRAM)
}

/// Rings by such a socket. False if it can't be told that it did: the sleeper has gone, or does not read what rings.
pub fn ring(socket: i32, token: &[u64; 2]) -> bool {
    let token = token_bytes(token);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a valid buffer; no address.
    unsafe { sys!(SYS_sendto, socket, token.as_ptr(), TOKEN_BYTES, flags, 0, 0) }.is_ok()
}

/// The same by a stranger's socket, which he may have connected to anybody, and may at any time: what goes there goes in our name. So it goes to a bell's
/// name, in his network namespace.
pub fn ring_by(socket: i32, address: &Address) -> bool {
    let token = token_bytes(&address.token);
    let (name, len) = address.socket_name();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a valid buffer; a name and its length.
    unsafe { sys!(SYS_sendto, socket, token.as_ptr(), TOKEN_BYTES, flags, &raw const name, len) }
        .is_ok()
}

/// Takes what has rung, in one call if the kernel's queue is no longer than it usually is.
pub fn drain(socket: i32) {
    // SAFETY: zero is a message without name, data and control: what is longer is cut off.
    let mut messages: [libc::mmsghdr; AT_ONCE] = unsafe { core::mem::zeroed() };
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: an array and its length.
    let taken = unsafe { sys!(SYS_recvmmsg, socket, messages.as_mut_ptr(), AT_ONCE, flags, 0) };
    if fd::is_barred(&taken) {
        // SAFETY: no room for the token, which is cut off, and no address.
        let take = || unsafe { sys!(SYS_recvfrom, socket, 0, 0, libc::MSG_DONTWAIT, 0, 0) };
        for _ in 0..AT_ONCE {
            if take().is_err() {
                break;
            }
        }
    }
}

/// KERNEL: `net.unix.max_dgram_qlen` is 10, and one more is admitted.
const AT_ONCE: usize = 11;
