//! Options and modes of a socket that the program sets, and the error that it takes: what the ring serves too, and what keeps a connection on the kernel.

use super::keep::keep_on_kernel;
use super::table::{self, Socket, Stage};
use super::{carrier, datagram, in_use};
use crate::plain::P32;
use crate::reasons::Reason;
use ringlet_linux::tcp::{self, SO_TIMESTAMP_NEW};
use ringlet_linux::unix::{SO_INQ, SO_PASSPIDFD};

/// asm-generic/socket.h: the same options with times of 64 bits on every machine.
const SO_TIMESTAMPING_NEW: i32 = 65;
const SO_RCVTIMEO_NEW: i32 = 66;
const SO_SNDTIMEO_NEW: i32 = 67;

/// The program has switched blocking on or off (fcntl, FIONBIO).
pub fn set_nonblocking(fd: i32, on: bool) {
    if let Some(socket) = table::socket(fd) {
        socket.end().nonblocking.set(on as u32);
    }
}

/// The program has set an option on the kernel's socket, which did not refuse.
pub fn option_set(fd: i32, level: i32, option: i32, value: i32) {
    let Some(socket) = table::socket(fd) else { return };
    let datagrams = socket.has_datagrams();
    let attached = socket.stage() == Stage::Attached;
    let timeout = match option {
        _ if level != libc::SOL_SOCKET => None,
        libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW => Some(&socket.end().receive_timeout_ns),
        libc::SO_SNDTIMEO | SO_SNDTIMEO_NEW => Some(&socket.end().send_timeout_ns),
        _ => None,
    };
    match timeout {
        // KERNEL: a negative one is over at once, though it reads as none.
        Some(word) if attached && value < 0 => return word.set(1),
        Some(_) if value < 0 => return keep_on_kernel(socket, Reason::Option),
        // (Also before it is attached, which another thread may be about to do.)
        Some(word) if !datagrams => return word.set(tcp::timeout_ns(fd, option)),
        _ => {}
    }
    if datagrams {
        return datagram::option_set(socket, level, option, value);
    }
    if level == libc::IPPROTO_TCP && matches!(option, libc::TCP_NODELAY | libc::TCP_CORK) {
        // The same; and if the kernel was told behind that, doorbells wait for company.
        let word =
            if option == libc::TCP_CORK { &socket.end().cork } else { &socket.end().no_delay };
        word.set((value != 0) as u32);
        if socket.stage() == Stage::Attached {
            carrier::tune(socket, socket.end());
        }
        return;
    }
    if attached
        && level == libc::SOL_SOCKET
        && matches!(option, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE)
    {
        return carrier::limits_changed(socket, socket.end());
    }
    match (level, option) {
        (
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT
            | libc::SO_OOBINLINE
            | libc::SO_ZEROCOPY
            | libc::SO_TIMESTAMP
            | libc::SO_TIMESTAMPNS
            | libc::SO_TIMESTAMPING
            | SO_TIMESTAMP_NEW..=SO_TIMESTAMPING_NEW
            | libc::SO_PEEK_OFF
            | libc::SO_PASSCRED
            | libc::SO_PASSSEC
            | SO_PASSPIDFD
            | SO_INQ
            | libc::SO_ATTACH_FILTER
            | libc::SO_ATTACH_BPF,
        )
        | (libc::IPPROTO_TCP, libc::TCP_ULP | libc::TCP_REPAIR | libc::TCP_INQ) => {
            keep_on_kernel(socket, Reason::Option)
        }
        _ => {}
    }
}

/// TCP_NODELAY or TCP_CORK on an attached connection: kept here, since on the kernel's socket doorbells must not be delayed.
/// True if it was kept.
pub fn keep_option(fd: i32, level: i32, option: i32, value: i32) -> bool {
    kept_option(fd, level, option).is_some_and(|word| {
        word.set((value != 0) as u32);
        if let Some(socket) = table::socket(fd)
            && socket.end().barred.is()
        {
            carrier::tune(socket, socket.end());
        }
        true
    })
}

/// Where the program's value of such an option is kept, if it is.
pub fn kept_option(fd: i32, level: i32, option: i32) -> Option<&'static P32> {
    let socket = table::socket(fd)
        .filter(|socket| socket.stage() == Stage::Attached && carrier::facts(socket).has_delays)?;
    match (level, option) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Some(&socket.end().no_delay),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Some(&socket.end().cork),
        _ => None,
    }
}

/// SO_ERROR, after the kernel has answered: an error is told once, by whichever call comes first.
pub fn take_error(socket: &Socket, mut of_kernel: i32) -> i32 {
    let end = socket.end();
    let in_use = in_use::in_use(socket);
    if in_use.is_some() && carrier::judge(socket, end, of_kernel) {
        of_kernel = 0;
    }
    let pending = end.pending_error.get() as i32;
    end.pending_error.set(0);
    let error = if of_kernel != 0 { of_kernel } else { pending };
    if error != 0 {
        end.ended.set(2);
    }
    error
}
