//! The kernel's side of a connection: addresses, byte counts, raw transfer, options.

use crate::map::Scratch;
use crate::sys::{Errno, Sys, sys};
use ringlet_core::memory::{Buffer, Buffers};

/// An address and port; IPv4 in its v4-mapped form, so that `::ffff:127.0.0.1` and `127.0.0.1` are one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Address {
    pub ip: [u8; 16],
    pub port: u16,
}

impl Address {
    pub fn is_v4(&self) -> bool {
        self.ip[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }
    pub fn is_loopback(&self) -> bool {
        let v6 = self.ip == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        v6 || self.is_v4() && self.ip[12] == 127
    }
}

/// The two ends of a connection as seen from one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ends {
    pub local: Address,
    pub remote: Address,
    /// Family of the socket, for the kernel's table: AF_INET or AF_INET6.
    pub family: i32,
}

/// What the kernel has counted on a connection at one moment, under its own lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Sequence numbers that the peer has acknowledged since the beginning.
    pub acked: u64,
    /// What was sent, or asked of a peer that has no room, was sent again since, and nothing came back: by a network that passes nothing, or now and then.
    pub unanswered: bool,
    /// How often that was, in a row.
    pub retransmits: u8,
    /// Bytes that were transmitted for the first time, or are still to be.
    transmitted: u64,
    /// Nothing that was written waits to be sent or to be acknowledged.
    all_acked: bool,
    /// Bytes that arrived in order, read or not.
    pub received: u64,
    /// The same, and one more if a FIN did, which comes behind all of them. Known also where an error was taken.
    pub arrived: u64,
    pub state: u8,
}

/// How many bytes the program wrote since the beginning, by two measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// By sequence numbers: what is acknowledged, and what waits for it. Exact.
    pub place: u64,
    /// By transmissions, which is more where one has failed on this machine.
    pub transmitted: u64,
    pub state: u8,
}

impl Written {
    /// The place, if nothing contradicts it.
    pub fn agreed(&self) -> Option<u64> {
        (self.place == self.transmitted).then_some(self.place)
    }
}

pub const TCP_ESTABLISHED: u8 = 1;
pub const TCP_FIN_WAIT1: u8 = 4;
pub const TCP_FIN_WAIT2: u8 = 5;
const TCP_CLOSE: u8 = 7;
pub const TCP_CLOSE_WAIT: u8 = 8;
const TCP_LAST_ACK: u8 = 9;
const TCP_CLOSING: u8 = 11;
const TCP_TIME_WAIT: u8 = 6;

fn parse(storage: &libc::sockaddr_storage) -> Option<(Address, i32)> {
    match storage.ss_family as i32 {
        libc::AF_INET => {
            // SAFETY: the family says that it is a sockaddr_in, which fits in the storage.
            let v4 = unsafe { &*(storage as *const _ as *const libc::sockaddr_in) };
            let mut ip = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0];
            ip[12..].copy_from_slice(&v4.sin_addr.s_addr.to_ne_bytes());
            Some((Address { ip, port: u16::from_be(v4.sin_port) }, libc::AF_INET))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is a sockaddr_in6, which fits in the storage.
            let v6 = unsafe { &*(storage as *const _ as *const libc::sockaddr_in6) };
            let port = u16::from_be(v6.sin6_port);
            Some((Address { ip: v6.sin6_addr.s6_addr, port }, libc::AF_INET6))
        }
        _ => None,
    }
}

fn name(number: i64, fd: i32) -> Option<(Address, i32)> {
    // SAFETY: zero is a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    let mut len = size_of_val(&storage) as libc::socklen_t;
    let args = [fd as usize, &raw mut storage as usize, &raw mut len as usize, 0, 0, 0];
    // SAFETY: getsockname or getpeername with a buffer and its length.
    unsafe { crate::sys::call(number, args) }.ok()?;
    parse(&storage)
}

/// The address that a socket is bound to.
pub fn local(fd: i32) -> Option<Address> {
    name(libc::SYS_getsockname, fd).map(|(address, _)| address)
}

/// The address that a socket is connected to.
pub fn remote(fd: i32) -> Option<Address> {
    name(libc::SYS_getpeername, fd).map(|(address, _)| address)
}

/// Both ends of a connected TCP socket.
pub fn ends(fd: i32) -> Option<Ends> {
    let (local, family) = name(libc::SYS_getsockname, fd)?;
    let (remote, _) = name(libc::SYS_getpeername, fd)?;
    Some(Ends { local, remote, family })
}

fn option_u32(fd: i32, level: i32, option: i32) -> Sys<u32> {
    let (mut value, mut len) = (0u32, 4u32);
    // SAFETY: a four-byte buffer and its length.
    unsafe { sys!(SYS_getsockopt, fd, level, option, &raw mut value, &raw mut len)? };
    Ok(value)
}

pub fn int_option(fd: i32, level: i32, option: i32) -> Sys<i32> {
    option_u32(fd, level, option).map(|value| value as i32)
}

pub fn is_listening(fd: i32) -> bool {
    int_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1)
}

pub fn is_tcp(fd: i32) -> bool {
    int_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
}

/// Has the socket an upper-layer protocol (kTLS and the like)?
pub fn has_upper_protocol(fd: i32) -> bool {
    let (mut name, mut len) = ([0u8; 16], 16u32);
    // SAFETY: a buffer and its length.
    let got = unsafe {
        sys!(SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_ULP, name.as_mut_ptr(), &raw mut len)
    };
    got.is_ok() && len > 0 && name[0] != 0
}

/// SO_RCVTIMEO or SO_SNDTIMEO; 0 is for ever.
pub fn timeout_ns(fd: i32, option: i32) -> u64 {
    let (mut time, mut len) = ([0i64; 2], 16u32);
    // SAFETY: a struct timeval of 16 bytes and its length.
    let got = unsafe {
        sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, option, time.as_mut_ptr(), &raw mut len)
    };
    got.map_or(0, |_| {
        (time[0] as u64).saturating_mul(1_000_000_000).saturating_add(time[1] as u64 * 1000)
    })
}

/// Sets SO_PEEK_OFF.
pub fn peek_from(fd: i32, from: i32) {
    // SAFETY: a four-byte value.
    let _ = unsafe {
        sys!(SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &raw const from, 4)
    };
}

/// Takes the pending error, as SO_ERROR does.
pub fn take_error(fd: i32) -> i32 {
    option_u32(fd, libc::SOL_SOCKET, libc::SO_ERROR).map_or(0, |value| value as i32)
}

/// The kernel's struct tcp_info up to the fields we need (linux/tcp.h; layout is ABI).
#[repr(C)]
#[derive(Default)]
struct TcpInfo {
    state: u8,
    _ca_state: u8,
    retransmits: u8,
    probes: u8,
    _small: [u8; 4],
    _times_and_sizes: [u32; 4],
    unacked_packets: u32,
    _words: [u32; 19],
    _pacing: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
    _segs: [u32; 2],
    notsent_bytes: u32,
    _rtt: [u32; 3],
    _delivery: u64,
    _limited: [u64; 3],
    _delivered: [u32; 2],
    bytes_sent: u64,
    bytes_retrans: u64,
}

const _: () = assert!(core::mem::offset_of!(TcpInfo, unacked_packets) == 24);
const _: () = assert!(core::mem::offset_of!(TcpInfo, bytes_acked) == 120);
const _: () = assert!(core::mem::offset_of!(TcpInfo, notsent_bytes) == 144);
const _: () = assert!(core::mem::offset_of!(TcpInfo, bytes_sent) == 200);

/// KERNEL: one TCP_INFO is one consistent moment (the kernel takes the socket's lock); a FIN counts as one received byte once the state
/// says that it came.
pub fn counts(fd: i32) -> Sys<Counts> {
    let mut info = TcpInfo::default();
    let mut len = size_of::<TcpInfo>() as u32;
    // SAFETY: a buffer and its length.
    unsafe {
        sys!(SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_INFO, &raw mut info, &raw mut len)?
    };
    if (len as usize) < size_of::<TcpInfo>() {
        return Err(Errno::ENOSYS);
    }
    // A connection that a reset has closed has got no FIN, and holds the error (until somebody takes it).
    let fin = match info.state {
        TCP_CLOSE_WAIT | TCP_LAST_ACK | TCP_CLOSING | TCP_TIME_WAIT => true,
        TCP_CLOSE => crate::fd::pending(fd, libc::POLLIN) & libc::POLLERR == 0,
        _ => false,
    };
    Ok(Counts {
        acked: info.bytes_acked,
        // KERNEL: what was sent is in packets until it is acknowledged, and both counts are of one moment. (Of a closed one the packets are thrown away.)
        all_acked: matches!(info.state, TCP_ESTABLISHED | TCP_CLOSE_WAIT)
            && (info.unacked_packets, info.notsent_bytes) == (0, 0),
        // KERNEL: both are in a row, and 0 again with any acknowledgement; the first probe is also one that is under way.
        unanswered: info.retransmits > 0 || info.probes > 1,
        retransmits: info.retransmits,
        transmitted: info
            .bytes_sent
            .wrapping_sub(info.bytes_retrans)
            .wrapping_add(info.notsent_bytes as u64),
        received: info.bytes_received.saturating_sub(fin as u64),
        arrived: info.bytes_received,
        state: info.state,
    })
}

/// Bytes that were sent and that the other end's kernel has not acknowledged (SIOCOUTQ).
pub fn unacknowledged(fd: i32) -> Sys<usize> {
    let mut n: i32 = 0;
    // SAFETY: one int.
    unsafe { sys!(SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut n)? };
    Ok(n.max(0) as usize)
}

/// What was written so far; `connected` says which side's it is. Exact while nobody writes and the stream is open (the caller holds
/// the send lock). Where all is acknowledged, which it mostly is, one count tells it.
///
/// KERNEL: `bytes_acked` and SIOCOUTQ (write_seq - snd_una) count sequence numbers, so their sum grows by what is written, and by nothing
/// else; the SYN is one, where we sent it first. `bytes_sent` grows before a transmission that may fail on this machine (an address
/// that is gone, a full queue, a firewall's drop), and the same bytes are sent again without being counted in `bytes_retrans`.
pub fn written(fd: i32, connected: bool) -> Sys<Written> {
    let mut before = counts(fd)?;
    let written = |counts: Counts, waiting: i32| {
        let place = (counts.acked + waiting as u64).wrapping_sub(connected as u64);
        Ok(Written { place, transmitted: counts.transmitted, state: counts.state })
    };
    if before.all_acked {
        return written(before, 0);
    }
    for _ in 0..STABLE_LOOKS {
        let mut waiting = 0i32;
        // SAFETY: a writable int.
        unsafe { sys!(SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut waiting)? };
        let after = counts(fd)?;
        if (after.acked, after.transmitted) == (before.acked, before.transmitted) {
            return written(after, waiting);
        }
        before = after;
    }
    Err(Errno::EAGAIN)
}

/// What was written and what was read, as `written` and `consumed` say it, and what has arrived: of one moment.
pub struct Carried {
    pub written: Written,
    pub consumed: Sys<u64>,
    pub received: u64,
}

/// Asks for both at once. EAGAIN: while they go on, both change all the time.
pub fn carried(fd: i32, connected: bool) -> Sys<Carried> {
    let mut before = counts(fd)?;
    for _ in 0..STABLE_LOOKS {
        let sent = if before.all_acked { 0 } else { unacknowledged(fd)? };
        let waiting = unread(fd)?;
        // (As in `written` and in `consumed`.)
        let at_once = before.all_acked && waiting == 0;
        let after = if at_once { before } else { counts(fd)? };
        let all = |counts: Counts| {
            (counts.acked, counts.transmitted, counts.received, counts.all_acked, counts.state)
        };
        if all(after) == all(before) {
            let place = (after.acked + sent as u64).wrapping_sub(connected as u64);
            let consumed = match after.state {
                TCP_CLOSE => consumed(fd, || ()),
                _ => after.received.checked_sub(waiting as u64).ok_or(Errno::ERANGE),
            };
            let written = Written { place, transmitted: after.transmitted, state: after.state };
            return Ok(Carried { written, consumed, received: after.received });
        }
        before = after;
    }
    Err(Errno::EAGAIN)
}

/// Looks until two counts agree, one before and one after what is asked between them.
const STABLE_LOOKS: u32 = 1000;

/// asm-generic/socket.h: times of what comes, with 64 bits on every machine.
pub const SO_TIMESTAMP_NEW: i32 = 63;
pub const SO_TIMESTAMPNS_NEW: i32 = 64;

/// Bytes that wait in the kernel's receive queue. KERNEL: of TCP those up to the urgent byte, if there is one that was not passed.
pub fn unread(fd: i32) -> Sys<usize> {
    let mut n = 0i32;
    // SAFETY: a writable int.
    unsafe { sys!(SYS_ioctl, fd, libc::FIONREAD, &raw mut n)? };
    Ok(n.max(0) as usize)
}

/// Bytes that were written and not yet sent, since the peer has no room for them.
pub fn unsent(fd: i32) -> usize {
    const SIOCOUTQNSD: u64 = 0x894b;
    let mut n = 0i32;
    // SAFETY: a writable int.
    let asked = unsafe { sys!(SYS_ioctl, fd, SIOCOUTQNSD, &raw mut n) };
    asked.map_or(0, |_| n.max(0) as usize)
}

/// SO_LINGER: whether, and for how many seconds.
pub fn linger(fd: i32) -> Sys<[i32; 2]> {
    let (mut linger, mut len) = ([0i32; 2], 8u32);
    // SAFETY: a struct linger and its size.
    unsafe {
        sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, &raw mut linger, &raw mut len)?
    };
    Ok(linger)
}

pub fn set_linger(fd: i32, linger: [i32; 2]) {
    // SAFETY: a struct linger and its size.
    let _ = unsafe {
        sys!(SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, &raw const linger, 8)
    };
}

/// Does close() send a reset, because the program asked for it?
pub fn resets_on_close(fd: i32) -> bool {
    linger(fd).is_ok_and(|[on, seconds]| on != 0 && seconds == 0)
}

/// Bytes that the program has read from the kernel since the beginning, taken between two equal counts of arrivals, or of a moment at which none waits.
/// Exact while nobody else reads (the caller holds the receive lock), and no urgent byte waits. Of a connection that is closed, whose error
/// waits and no byte, it is so only if `take_error` does that: else nobody knows whether a FIN came. ERANGE: more wait than ever arrived, so
/// they came past TCP.
pub fn consumed(fd: i32, take_error: impl FnOnce()) -> Sys<u64> {
    let mut before = counts(fd)?;
    for _ in 0..STABLE_LOOKS {
        let waiting = unread(fd)?;
        // (All that arrived was taken, before the count and behind it: nobody takes any meanwhile.)
        if waiting == 0 && before.state != TCP_CLOSE {
            return Ok(before.received);
        }
        let after = counts(fd)?;
        if after.received == before.received && after.state == before.state {
            let mut received = before.received;
            if before.state == TCP_CLOSE {
                if is_hidden(fd, waiting) {
                    take_error();
                }
                let fin = fin_came(fd, waiting);
                received = fin.map_or(received, |fin| before.arrived.saturating_sub(fin as u64));
            }
            return received.checked_sub(waiting as u64).ok_or(Errno::ERANGE);
        }
        before = after;
    }
    Err(Errno::EAGAIN)
}

/// Would a look at what comes next take an error?
fn is_hidden(fd: i32, waiting: usize) -> bool {
    waiting == 0 && crate::fd::pending(fd, 0) & libc::POLLERR != 0
}

/// Did a FIN come, on a connection that is closed? Its state does not tell: a reset may have come behind one, or alone, whose error anybody may have
/// taken. KERNEL: TCP_INQ counts a FIN that was not taken as a byte, and one that was as one too where nothing waits; FIONREAD never does.
fn fin_came(fd: i32, waiting: usize) -> Option<bool> {
    if is_hidden(fd, waiting) {
        return None;
    }
    let asked = int_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ).ok()?;
    let peeks_from = int_option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF);
    set_flag(fd, libc::TCP_INQ, true);
    peek_from(fd, -1);
    let seen = peek_inq(fd);
    if let Ok(from @ 0..) = peeks_from {
        peek_from(fd, from);
    }
    set_flag(fd, libc::TCP_INQ, asked != 0);
    Some(seen? as usize != waiting)
}

/// What TCP_INQ says by a look at the next byte.
fn peek_inq(fd: i32) -> Option<i32> {
    let (mut byte, mut control) = (0u8, [0u64; 16]);
    let piece = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut message = EMPTY;
    (message.msg_iov, message.msg_iovlen) = ((&raw const piece).cast_mut(), 1);
    (message.msg_control, message.msg_controllen) =
        (control.as_mut_ptr().cast(), size_of_val(&control) as _);
    // SAFETY: a message header with our own buffers.
    unsafe { sys!(SYS_recvmsg, fd, &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT) }.ok()?;
    // SAFETY: the header is as the kernel has left it, and so are the messages in its buffer.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(&raw const message);
        while !at.is_null() {
            if ((*at).cmsg_level, (*at).cmsg_type) == (libc::IPPROTO_TCP, libc::TCP_INQ) {
                return Some(libc::CMSG_DATA(at).cast::<i32>().read_unaligned());
            }
            at = libc::CMSG_NXTHDR(&raw const message, at);
        }
    }
    None
}

/// Pieces of the program's buffers that there usually are at most, and at most (UIO_MAXIOV).
const PIECES_USUAL: usize = 64;
const PIECES_MAX: usize = 1024;

/// One receive into the program's buffers: a recvfrom if that is enough, since filters that know the program may forbid the other.
pub fn receive(fd: i32, to: &mut Buffers, max: usize, flags: i32) -> Sys<usize> {
    let got = message(to, max, EMPTY, |message| {
        // SAFETY: a message header with pieces of the program's buffers.
        unsafe {
            match only_piece(&*message) {
                Some((piece, len)) => sys!(SYS_recvfrom, fd, piece, len, flags, 0, 0),
                None => sys!(SYS_recvmsg, fd, message, flags),
            }
        }
    })?;
    to.pass(got);
    Ok(got)
}

/// One send from the program's buffers, as `receive`; raises SIGPIPE unless told otherwise.
pub fn send(fd: i32, from: &mut Buffers, flags: i32) -> Sys<usize> {
    let sent = message(from, usize::MAX, EMPTY, |message| {
        // SAFETY: as in `receive`.
        unsafe {
            match only_piece(&*message) {
                Some((piece, len)) => sys!(SYS_sendto, fd, piece, len, flags, 0, 0),
                None => sys!(SYS_sendmsg, fd, message, flags),
            }
        }
    })?;
    from.pass(sent);
    Ok(sent)
}

/// # Safety
/// The header's vector is valid.
unsafe fn only_piece(message: &libc::msghdr) -> Option<(*mut core::ffi::c_void, usize)> {
    // SAFETY: there is one.
    (message.msg_iovlen == 1)
        .then(|| unsafe { ((*message.msg_iov).iov_base, (*message.msg_iov).iov_len) })
}

// SAFETY: zero is a valid message header.
const EMPTY: libc::msghdr = unsafe { core::mem::zeroed() };

/// A call with `message`, whose pieces are those of the program's buffers.
pub(crate) fn message(
    buffers: &Buffers,
    max: usize,
    message: libc::msghdr,
    call: impl FnOnce(*mut libc::msghdr) -> Sys<usize>,
) -> Sys<usize> {
    if buffers.longer_than(PIECES_USUAL) {
        // More than the smallest stacks have room for.
        let mut pieces = Scratch::new(PIECES_MAX, NO_PIECE).ok_or(Errno::ENOMEM)?;
        return message_of(buffers, max, &mut pieces, message, call);
    }
    message_of(buffers, max, &mut [NO_PIECE; PIECES_USUAL], message, call)
}

const NO_PIECE: Buffer = Buffer { base: core::ptr::null_mut(), len: 0 };

fn message_of(
    buffers: &Buffers,
    max: usize,
    pieces: &mut [Buffer],
    mut message: libc::msghdr,
    call: impl FnOnce(*mut libc::msghdr) -> Sys<usize>,
) -> Sys<usize> {
    message.msg_iov = pieces.as_mut_ptr().cast();
    message.msg_iovlen = buffers.show(max, pieces) as _;
    call(&raw mut message)
}

/// Most that `peek_behind` looks past.
const BEHIND_MOST: usize = 1 << 20;

/// A look at what waits behind so many bytes that wait before it.
pub fn peek_behind(fd: i32, before: usize, to: &mut Buffers, flags: i32) -> Sys<usize> {
    if before > BEHIND_MOST {
        return Ok(0);
    }
    let mut nowhere = Scratch::new(before, 0u8).ok_or(Errno::ENOMEM)?;
    let mut pieces = Scratch::new(PIECES_MAX, NO_PIECE).ok_or(Errno::ENOMEM)?;
    pieces[0] = Buffer { base: nowhere.as_mut_ptr(), len: before };
    let mut message = EMPTY;
    message.msg_iov = pieces.as_mut_ptr().cast();
    message.msg_iovlen = (1 + to.show(usize::MAX, &mut pieces[1..])) as _;
    let flags = flags | libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: a message header with our own buffer and pieces of the program's.
    let seen = unsafe { sys!(SYS_recvmsg, fd, &raw mut message, flags) }?;
    let seen = seen.saturating_sub(before);
    to.pass(seen);
    Ok(seen)
}

pub fn shut_down(fd: i32, how: i32) -> Sys<()> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_shutdown, fd, how) }.map(drop)
}

/// Reads into a buffer of our own.
pub fn receive_into(fd: i32, to: &mut [u8], flags: i32) -> Sys<usize> {
    // SAFETY: a valid buffer.
    unsafe { sys!(SYS_recvfrom, fd, to.as_mut_ptr(), to.len(), flags, 0, 0) }
}

/// Sends from a buffer of our own; never raises SIGPIPE.
pub fn send_from(fd: i32, from: &[u8], flags: i32) -> Sys<usize> {
    // SAFETY: a valid buffer.
    unsafe { sys!(SYS_sendto, fd, from.as_ptr(), from.len(), flags | libc::MSG_NOSIGNAL, 0, 0) }
}

/// A doorbell byte; says if it went. A full socket is as good as rung: whatever fills it makes the peer's descriptor readable.
pub fn ring_byte(fd: i32) -> bool {
    send_from(fd, &[0], libc::MSG_DONTWAIT) == Ok(1)
}

fn set_flag(fd: i32, option: i32, on: bool) {
    let value = on as i32;
    // SAFETY: an int and its size.
    let _ = unsafe { sys!(SYS_setsockopt, fd, libc::IPPROTO_TCP, option, &raw const value, 4) };
}

/// No byte waits for company.
pub fn send_at_once(fd: i32) {
    set_flag(fd, libc::TCP_CORK, false);
    set_flag(fd, libc::TCP_NODELAY, true);
}

/// As the program wants it.
pub fn send_as_asked(fd: i32, no_delay: bool, cork: bool) {
    set_flag(fd, libc::TCP_NODELAY, no_delay);
    set_flag(fd, libc::TCP_CORK, cork);
}

/// Room for so many bytes to send, as far as the kernel lets us; never less than there is.
pub fn widen_sending(fd: i32, bytes: usize) {
    // KERNEL: an skb may take thrice what it carries; the value is doubled. Without privileges no more is had than net.core.wmem_max, and
    // what TCP has taken by itself may be more.
    const UNPRIVILEGED_BYTES: i32 = 400_000;
    let value = bytes.min(1 << 28) as i32 * 2;
    let before = int_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(i32::MAX);
    let widen = |option| {
        // SAFETY: an int and its size.
        unsafe { sys!(SYS_setsockopt, fd, libc::SOL_SOCKET, option, &raw const value, 4) }.is_ok()
    };
    let _ = before >= value
        || widen(libc::SO_SNDBUFFORCE)
        || before < UNPRIVILEGED_BYTES && widen(libc::SO_SNDBUF);
}

/// Ends a connection at once, by a reset; what still reads from it fails (ENOTCONN) instead of finding an orderly end.
pub fn disconnect(fd: i32) {
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: an address and its length.
    let _ = unsafe { sys!(SYS_connect, fd, &raw const nowhere, size_of::<libc::sockaddr>()) };
}

/// Ends a connection as a reset does, for both ends; who waits for it is woken. KERNEL: that is how one looks that was reset by its peer, but for the
/// error, which is for us to tell. Before 6.7 the kernel does not disconnect where a thread waits in it, and a Unix connection it never does: then
/// the peer sees an orderly end.
pub fn tear_off(fd: i32) {
    disconnect(fd);
    reset_on_close(fd);
    let _ = shut_down(fd, libc::SHUT_RDWR);
    let _ = take_error(fd);
}

/// Makes close() send a reset.
pub fn reset_on_close(fd: i32) {
    set_linger(fd, [1, 0]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    /// However it has ended, and whoever has taken the error.
    #[test]
    fn what_was_consumed_is_known_behind_the_end() {
        for (read, reset, fin, takes) in
            (0..24).map(|n| (n / 8 % 3, n & 1 > 0, n & 2 > 0, n & 4 > 0))
        {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            far.write_all(b"hi").unwrap();
            near.read_exact(&mut std::vec![0; read]).unwrap();
            if reset && !fin {
                reset_on_close(far.as_raw_fd());
            }
            if !reset {
                shut_down(near.as_raw_fd(), libc::SHUT_WR).unwrap();
            }
            drop(far);
            if reset && fin {
                assert!(ring_byte(near.as_raw_fd()));
            }
            let fd = near.as_raw_fd();
            while counts(fd).unwrap().state != TCP_CLOSE {
                std::thread::yield_now();
            }
            if takes {
                take_error(fd);
            }
            let found = consumed(fd, || {
                assert!(reset && read == 2 && !takes);
                take_error(fd);
            });
            assert_eq!(found, Ok(read as u64), "{read} {reset} {fin} {takes}");
            assert_eq!(int_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ), Ok(0));
        }
    }

    /// Both measures at once say what each says alone, whatever waits where.
    #[test]
    fn what_is_carried_is_what_was_written_and_read() {
        for (written, read, ends) in
            [(0, 0, 0), (3, 0, 0), (3, 2, 1), (3, 3, 0), (3, 3, 1), (3, 1, 2)]
        {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            near.write_all(&std::vec![1; written]).unwrap();
            far.write_all(&std::vec![1; written]).unwrap();
            near.read_exact(&mut std::vec![0; read]).unwrap();
            match ends {
                0 => {}
                1 => shut_down(far.as_raw_fd(), libc::SHUT_WR).unwrap(),
                _ => {
                    reset_on_close(far.as_raw_fd());
                    drop(far);
                }
            }
            let fd = near.as_raw_fd();
            // (As it is, and once the peer's kernel has acknowledged what it does by and by.)
            for _ in 0..2 {
                let found = carried(fd, true).unwrap();
                assert_eq!(found.consumed, Ok(read as u64), "{written} {read} {ends}");
                assert_eq!(found.received, written as u64);
                if ends < 2 {
                    assert_eq!(found.written.agreed(), Some(written as u64));
                    assert_eq!(self::written(fd, true), Ok(found.written));
                    while counts(fd).unwrap().acked <= written as u64 {
                        std::thread::yield_now();
                    }
                }
            }
        }
    }

    #[test]
    fn a_peer_that_has_no_room_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(n) = near.write(&[0; 1 << 16]) {
            sent += n;
        }
        // (Some probes long, which come after 0.2, 0.4, 0.8 s.)
        std::thread::sleep(Duration::from_secs(2));
        let full = counts(near.as_raw_fd()).unwrap();
        assert!(unsent(near.as_raw_fd()) > 0);
        assert!(!full.unanswered);
        // (What waits counts as written.)
        let written = written(near.as_raw_fd(), true).unwrap();
        assert_eq!(written.agreed(), Some(sent as u64));
        assert_eq!(carried(near.as_raw_fd(), true).unwrap().written, written);
        far.read_exact(&mut std::vec![0; sent]).unwrap();
        while counts(near.as_raw_fd()).unwrap().acked < sent as u64 {
            std::thread::yield_now();
        }
        assert!(full.acked < sent as u64);
    }
}
