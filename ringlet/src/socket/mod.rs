//! Berkeley sockets over shared memory, for programs that don't know of it.
//!
//! The edge (the preload library) asks `way` for each call on a descriptor: the kernel's, or ours. `table` knows the descriptors,
//! `meet` brings two ends together (`lives`: when), `transfer` moves bytes, `epoll` and `readiness` wait for many, `process` follows
//! descriptors through close, dup, fork and exec, `control` does what `ringlet off` and `on` ask,
//! `tap` records for `ringlet capture`.

pub mod asked;
mod budget;
pub mod carrier;
mod chaos;
pub mod context;
pub mod control;
pub mod datagram;
mod doorbells;
pub mod epoll;
pub mod family;
pub mod gate;
mod holders;
mod in_use;
mod interrupted;
pub mod jumps;
mod lives;
pub mod meet;
mod meeting;
pub mod memory;
pub mod moving;
mod pairs;
mod patience;
mod pin;
pub mod process;
pub mod readiness;
mod release;
mod sides;
pub mod table;
pub mod tap;
pub mod transfer;
pub mod unix;
pub mod view;
pub mod words;

use crate::config::{Config, LogTarget};
use crate::reasons::Reason;
use crate::waiting::{signals, spin};
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_core::view as layout;
use ringlet_linux::map;
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::tcp;
use table::{End, Known, Socket, Stage, lookup};

/// Sets ringlet up in this process.
pub fn start(config: Config) -> Sys<()> {
    chaos::start(config.unforgiving);
    release::start(process::close_orphan);
    spin::start(spin::Outside { load: context::load, tell: view::tell_watched });
    map::together(TABLES_BYTES, || {
        signals::start()?;
        context::start()?;
        if config.udp {
            datagram::start(table::SOCKET_COUNT)?;
        }
        epoll::start()?;
        table::start(config, process::after_fork)
    })
}

/// More than the tables of either kind take.
const TABLES_BYTES: usize = 64 << 20;

/// Adds a line to where notes of a kind go, if anywhere.
pub fn note(target: &LogTarget, line: &[u8]) {
    match target {
        LogTarget::Off => {}
        // Its reader may not read.
        LogTarget::Stderr if ringlet_linux::fd::is_writable(2) => drop(sys::write_quietly(2, line)),
        LogTarget::Stderr => {}
        LogTarget::File(path) => sys::append(path.as_c_str(), line),
    }
}

/// linux/tcp.h: a control message with the bytes that wait.
const TCP_INQ: i32 = 36;

/// asm-generic/socket.h: the same options with times of 64 bits on every machine.
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPING_NEW: i32 = 65;
const SO_RCVTIMEO_NEW: i32 = 66;
const SO_SNDTIMEO_NEW: i32 = 67;
/// asm-generic/socket.h: a pidfd of the sender, or the bytes that wait, with each message.
pub const SO_PASSPIDFD: i32 = 76;
pub const SO_INQ: i32 = 84;

/// How a call on a descriptor goes.
pub enum Way {
    /// To the kernel; what is to be told about it afterwards.
    Kernel(Option<Native>),
    /// Through `transfer`.
    Ours(&'static Socket),
    /// Through `datagram`, or else to the kernel.
    Datagram(&'static Socket),
}

/// A native call under way on a socket that may be moved: as long as it is, it will not be.
pub struct Native {
    socket: &'static Socket,
    count: &'static AtomicU32,
}

impl Native {
    /// The call has moved data.
    #[inline]
    pub fn moved(&self) {
        let end = self.socket.end();
        let sends = core::ptr::eq(self.count, &end.native_senders);
        let has = if sends { &end.has_sent } else { &end.has_received };
        if !has.is() {
            has.set(1);
        }
        count_call(self.socket);
    }

    /// In place of the drop, for a thread that is cancelled.
    #[inline]
    pub fn end(&self) {
        release::leave_native(self.count);
    }

    /// The connection is not to be moved.
    pub fn stay(&self, reason: Reason) {
        pin(self.socket, reason);
    }
}

impl Drop for Native {
    #[inline]
    fn drop(&mut self) {
        self.end();
    }
}

#[inline(always)]
pub fn count_call(socket: &Socket) {
    let calls = socket.calls.add(1);
    view::count(socket, |slot| slot.calls.store(calls as u64, Ordering::Relaxed));
}

/// A call that receives.
#[inline(always)]
pub fn way_in(fd: i32) -> Way {
    match lookup(fd) {
        Some(Known::Socket(socket)) => way(socket, |end| &end.native_receivers, Stage::Mailbox),
        _ => Way::Kernel(None),
    }
}

/// A call that sends.
#[inline(always)]
pub fn way_out(fd: i32) -> Way {
    match lookup(fd) {
        Some(Known::Socket(socket)) => way(socket, |end| &end.native_senders, Stage::Datagram),
        _ => {
            KERNEL_WRITES.store(kernel_writes().wrapping_add(1), Ordering::Relaxed);
            Way::Kernel(None)
        }
    }
}

/// Counts this process's writes to what is not a connection of ours; may miss one of two at once.
static KERNEL_WRITES: AtomicU32 = AtomicU32::new(0);

pub fn kernel_writes() -> u32 {
    KERNEL_WRITES.load(Ordering::Relaxed)
}

#[inline(always)]
fn way(socket: &'static Socket, count: fn(&End) -> &AtomicU32, datagram_from: Stage) -> Way {
    if socket.stage() == Stage::Attached {
        chaos::call(socket);
        return Way::Ours(socket);
    }
    before_native(socket, count, datagram_from)
}

/// `datagram_from`: the stage from which on a UDP socket's call goes through `datagram`.
fn before_native(
    socket: &'static Socket,
    count: fn(&End) -> &AtomicU32,
    datagram_from: Stage,
) -> Way {
    if view::asked(socket) & layout::ASKED_ON != 0 {
        datagram::look_anew(socket);
        control::begin_again(socket);
    }
    match socket.stage() {
        stage @ (Stage::Datagram | Stage::Mailbox) if stage >= datagram_from => {
            return Way::Datagram(socket);
        }
        Stage::Free | Stage::Closing => return Way::Kernel(None),
        Stage::KernelForGood if socket.is_kernels_for_good() => return Way::Kernel(None),
        Stage::KernelForGood => {}
        _ if socket.calls.get() < socket.next_step.get() => {}
        _ if socket.has_datagrams() => datagram::step_in(socket),
        _ => meet::step(socket),
    }
    // ORDER: SeqCst, then the stage; pairs with `meet::attach` (stage) and `moving::publish_attached` (count): either we see that
    // the segment is there, or the peer is not told to use it before we are back. So whatever may still be moved, by another thread and
    // at any moment, is counted before it is looked at.
    let count = socket.enter_native(count);
    match socket.stage() {
        Stage::Attached => {
            release::leave_native(count);
            Way::Ours(socket)
        }
        stage @ (Stage::Datagram | Stage::Mailbox) if stage >= datagram_from => {
            release::leave_native(count);
            Way::Datagram(socket)
        }
        _ => Way::Kernel(Some(Native { socket, count })),
    }
}

/// The path of a descriptor's connection; `None` for one that is not followed.
pub fn path_of(fd: i32) -> Option<u32> {
    let socket = table::socket(fd)?;
    // Another thread that closes it leaves it to us.
    let _in_use = in_use::Waiter::new(socket);
    Some(datagram::shown_path(socket))
}

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
        | (libc::IPPROTO_TCP, libc::TCP_ULP | libc::TCP_REPAIR | TCP_INQ) => {
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
pub fn kept_option(fd: i32, level: i32, option: i32) -> Option<&'static crate::plain::P32> {
    let socket = table::socket(fd)
        .filter(|socket| socket.stage() == Stage::Attached && carrier::facts(socket).has_delays)?;
    match (level, option) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Some(&socket.end().no_delay),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Some(&socket.end().cork),
        _ => None,
    }
}

/// Leaves a socket on the kernel for good, and shows why.
fn pin(socket: &Socket, reason: Reason) {
    match socket.has_datagrams() {
        true => datagram::bar(socket, reason),
        false => pin::to_kernel(socket, reason),
    }
}

/// The program has asked for something that only the kernel can do with this connection, from now on.
pub fn keep_on_kernel(socket: &'static Socket, reason: Reason) {
    // Another thread that closes it leaves it to us.
    let _in_use = in_use::Waiter::new(socket);
    if matches!(socket.stage(), Stage::Free | Stage::Closing) {
        return;
    }
    if socket.stage() != Stage::Attached {
        pin(socket, reason);
    }
    // (Or another thread has moved it meanwhile.)
    if socket.stage() == Stage::Attached && !moving::return_to_kernel(socket, reason) {
        // An error that can be seen, not bytes lost in silence.
        carrier::break_off(socket);
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
