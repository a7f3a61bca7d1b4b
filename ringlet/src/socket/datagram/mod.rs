//! Datagrams (UDP) between local ends.
//!
//! A socket that receives has a mailbox: one *lane* (a queue in shared memory) from each socket that sends to it much. Its sender has the
//! other end, an outlet. Lanes are found at doors (`door`) while datagrams go through the kernel, which always remains open to them:
//!
//! - **Nobody sleeps on a lane.** Who is about to wait in the kernel, in whatever call, first turns its lanes to the kernel
//!   (`ringlet_core::switch`). What is sent to it then comes through the kernel, and wakes it. So there are no doorbells, the sleeping
//!   call is the program's own, and an end that has gone, or knows nothing of lanes, is simply sent to as ever.
//! - **Order.** Each message of a lane says how many its sender had sent through the kernel before; its receiver counts what came from
//!   there, and takes first what was sent first (`ringlet_core::switch`).
//! - **Room.** What finds its lane full goes through the kernel, which drops it if its buffer is full too.
//! - **What the kernel says counts.** A lane is used from the first datagram on that has come from its sender by the kernel, and its sender
//!   asks the kernel every millisecond whether it would still bring its datagrams to that socket.
//!
//! Whoever serves all sockets (fork, close, exit) need not know which these are: what is here does nothing for others.

mod door;
mod inlets;
mod outlets;

use super::epoll::registration::{heat_all, may_sleep_on};
use super::table::{self, Socket, Stage};
use super::{chaos, view};
use crate::once::Once;
use crate::plain::P64;
use crate::reasons::Reason;
use crate::socket::release;
use crate::waiting::{signals, spin};
use inlets::{Found, Inlets, Mailbox};
use outlets::{Outlets, Sent};
use ringlet_core::memory::Buffers;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::tcp::Address;
use ringlet_linux::{fd, meet, udp};

pub use inlets::Got;

/// While lanes are busy, the kernel is looked at this often (about 10 us); while they are empty, about every microsecond at most.
const ASK_KERNEL_TICKS: u64 = 30_000;
const ASK_WHEN_EMPTY_TICKS: u64 = 3_000;
/// After so many messages, lanes that brought none of them cool down.
const COOL_EVERY: u64 = 1024;

struct DatagramTables {
    inlets: Inlets,
    outlets: Outlets,
}

static TABLES: Once<DatagramTables> = Once::new();

fn tables() -> Option<&'static DatagramTables> {
    TABLES.get()
}

/// Maps the tables, for so many sockets.
pub fn start(sockets: u32) -> Sys<()> {
    let made = DatagramTables { inlets: Inlets::map(sockets)?, outlets: Outlets::map(sockets)? };
    let _ = TABLES.set(made);
    Ok(())
}

fn halves(ip: &[u8; 16]) -> [u64; 2] {
    let mut words = [0; 2];
    for (word, bytes) in words.iter_mut().zip(ip.chunks_exact(8)) {
        *word = bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    }
    words
}

fn whole(words: &[P64; 2]) -> [u8; 16] {
    let mut ip = [0; 16];
    ip[..8].copy_from_slice(&words[0].get().to_le_bytes());
    ip[8..].copy_from_slice(&words[1].get().to_le_bytes());
    ip
}

/// Spreads addresses over a table's buckets.
fn hash(address: &Address) -> usize {
    let [low, high] = halves(&address.ip);
    let mixed = (low ^ high.rotate_left(17) ^ u64::from(address.port) << 40)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize
}

/// Messages before the first step.
fn first_step() -> u32 {
    let config = super::table::tables().map(|tables| tables.config);
    config.map_or(u32::MAX, |config| config.move_after.min(u64::from(u32::MAX / 2)) as u32)
}

/// A socket was made, and is followed. True if it is one of UDP.
pub fn begin(socket: &Socket, family: i32, nonblocking: bool) -> bool {
    if !socket.has_datagrams() {
        return false;
    }
    socket.family.set(family as u32);
    socket.end().nonblocking.set(u32::from(nonblocking));
    socket.next_step.set(first_step());
    let has_mailbox = tables().is_some_and(|all| all.inlets.begin(socket));
    socket.set_stage(if has_mailbox { Stage::Datagram } else { Stage::KernelForGood });
    if let Some((_, outbox)) = outlets::of(socket) {
        outbox.door.set(0);
    }
    true
}

/// As `Tables::rehome`; what lanes that were shared still hold is taken first.
fn rehome(socket: &Socket) -> bool {
    let Some(tables) = super::table::tables() else { return false };
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
        if let Some(tables) = super::table::tables() {
            tables.clear(door);
        }
        close(door);
    }
}

/// As `context::move_away`, for doors.
pub fn move_door(fd: i32) -> bool {
    let Some(tables) = super::table::tables() else { return false };
    let has = |socket: &&'static Socket| {
        outlets::of(socket).is_some_and(|(_, outbox)| outbox.door.get() as i32 == fd)
    };
    let mut moved = false;
    if let Some(socket) = tables.followed().find(has) {
        // In the middle of a step it is not to be had: who has the old number would use the program's file.
        door::stepping(socket, || {
            moved = outlets::of(socket).is_some_and(|(_, outbox)| {
                outbox.door.get() as i32 == fd && tables.rename(&outbox.door)
            });
        });
    }
    moved
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
    if super::table::tables().is_some_and(|tables| tables.take_along(socket))
        && tables().is_some_and(|all| all.inlets.begin(socket))
    {
        socket.end().barred.set(Reason::Credentials as u32);
    }
    show(socket, Reason::Credentials);
    true
}

/// Maps anew what others of the family have and this process does not use.
pub fn part_all(age: u32) {
    if let Some(all) = tables() {
        all.inlets.part_all(age);
    }
}

/// The process ends: its senders go back to the kernel, which tells them what it tells.
pub fn at_exit(socket: &Socket) {
    if socket.has_datagrams()
        && table::tables().is_some_and(|tables| tables.holders.is_alone(&socket.end().holders))
    {
        close_inlets(socket);
    }
}

/// Shows where a socket stands now, and why.
fn show(socket: &Socket, reason: Reason) {
    view::show_reason(socket, reason);
    show_path(socket);
}

fn show_path(socket: &Socket) {
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

/// How a receive goes on.
pub enum Next {
    Datagram(Got),
    /// Look into the kernel without waiting; if there is nothing, ask again.
    AskKernel,
    /// The same, whoever sent what it has: the program has seen that already.
    TakeKernel,
    /// Receive from the kernel, and wait there.
    Sleep(Asleep),
    /// What was asked for, only the kernel can do.
    Kernel,
    Fail(Errno),
}

/// Is the socket to keep to the kernel for now (`ringlet off`)? Then it leaves its lanes.
#[inline(always)]
fn is_paused(socket: &Socket) -> bool {
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

const SERVED_IN: i32 = libc::MSG_PEEK
    | libc::MSG_DONTWAIT
    | libc::MSG_WAITALL
    | libc::MSG_TRUNC
    | libc::MSG_NOSIGNAL
    | libc::MSG_CMSG_CLOEXEC;
const SERVED_OUT: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_CONFIRM;

/// What the kernel was just found to have for a receive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    Unknown,
    Nothing,
    /// Something that was sent after what is in a lane.
    Later,
}

/// One receive.
#[inline]
pub fn receive(socket: &Socket, to: &mut Buffers, flags: i32, kernel: Kernel) -> Next {
    let Some((all, mailbox)) = inlets::of(socket) else { return Next::Kernel };
    if flags & !SERVED_IN != 0 {
        return Next::Kernel;
    }
    is_paused(socket);
    let end = socket.end();
    let blocking = flags & libc::MSG_DONTWAIT == 0 && !end.nonblocking.is();
    let mut kernel = kernel;
    loop {
        let roused;
        {
            let Some(_held) = end.receive_lock.take() else { return Next::Fail(Errno::EINTR) };
            if chaos::closes_lanes() {
                mailbox.close_all(all);
            }
            let now = sys::ticks();
            let asked = now.wrapping_sub(mailbox.kernel_asked.get());
            match (kernel, mailbox.shown.get()) {
                (Kernel::Unknown, inlets::KERNEL) => return Next::TakeKernel,
                (Kernel::Unknown, inlets::LANE) => {}
                (Kernel::Unknown, _) if asked > ASK_KERNEL_TICKS => {
                    mailbox.kernel_asked.set(now);
                    return Next::AskKernel;
                }
                (Kernel::Unknown, _) => {}
                (Kernel::Nothing, _) => {
                    mailbox.kernel_asked.set(now);
                    mailbox.shown.set(inlets::NONE);
                }
                (Kernel::Later, _) => mailbox.ask_kernel_soon(now),
            }
            let nothing = kernel == Kernel::Nothing;
            match mailbox.take(all, to, flags & libc::MSG_PEEK != 0, nothing) {
                Found::Message(got) => {
                    if mailbox.taken.get() % COOL_EVERY == 0 {
                        mailbox.cool_idle(all);
                    }
                    return Next::Datagram(got);
                }
                Found::KernelFirst => return Next::AskKernel,
                Found::Nothing => {}
            }
            mailbox.shown.set(inlets::NONE);
            mailbox.tidy(all);
            if mailbox.hot_count() > 0 && asked > ASK_WHEN_EMPTY_TICKS && !nothing {
                mailbox.kernel_asked.set(now);
                return Next::AskKernel;
            }
            roused = rouse(socket, all, mailbox);
        }
        if roused {
            heat_all(socket);
            continue;
        }
        if !blocking {
            let has_nothing = match kernel {
                Kernel::Nothing => true,
                Kernel::Unknown => asked_lately(mailbox),
                Kernel::Later => false,
            };
            return if has_nothing { Next::Fail(Errno::EAGAIN) } else { Next::AskKernel };
        }
        match watch(socket, all, mailbox) {
            Watched::Lanes => kernel = Kernel::Unknown,
            Watched::Kernel => return Next::AskKernel,
            // A signal that came while we watched would have ended the kernel's wait.
            Watched::Nothing if !signals::restart() => return Next::Fail(Errno::EINTR),
            Watched::Nothing => match fall_asleep(socket) {
                Some(asleep) => return Next::Sleep(asleep),
                None => kernel = Kernel::Unknown,
            },
        }
    }
}

impl Mailbox {
    /// The kernel has something: it is asked as soon as the lanes are empty.
    fn ask_kernel_soon(&self, now: u64) {
        self.kernel_asked.set(now.wrapping_sub(ASK_WHEN_EMPTY_TICKS + 1));
    }
}

/// Was the kernel looked at just now, while lanes bring most?
fn asked_lately(mailbox: &Mailbox) -> bool {
    mailbox.hot_count() > 0
        && sys::ticks().wrapping_sub(mailbox.kernel_asked.get()) <= ASK_WHEN_EMPTY_TICKS
}

enum Watched {
    Lanes,
    Kernel,
    Nothing,
}

/// Watches the lanes for a moment, and the kernel now and then.
fn watch(socket: &Socket, all: &Inlets, mailbox: &Mailbox) -> Watched {
    signals::begin_wait();
    if mailbox.hot_count() == 0 {
        return Watched::Nothing;
    }
    let limit = super::table::tables().map_or(0, |tables| tables.config.spin_us);
    let mut found = Watched::Nothing;
    let mut asked = sys::ticks();
    let end = socket.end();
    spin::watch(
        limit,
        || None,
        || {
            let Some(_held) = end.receive_lock.take() else { return true };
            if mailbox.ready(all) {
                found = Watched::Lanes;
                return true;
            }
            let now = sys::ticks();
            if limit != 0 && now.wrapping_sub(asked) > ASK_KERNEL_TICKS {
                asked = now;
                if fd::pending(socket.fd(), libc::POLLIN) != 0 {
                    found = Watched::Kernel;
                    return true;
                }
            }
            false
        },
    );
    found
}

/// A thread that waits in the kernel for something to receive: while there is one, all that is sent to the socket goes there.
pub struct Asleep(&'static Socket);

impl Drop for Asleep {
    fn drop(&mut self) {
        // ORDER: SeqCst; pairs with `sleepers`.
        release::leave_native(&self.0.end().native_receivers);
        spin::woken(0);
        awake(self.0);
    }
}

/// `None`: there is something to receive.
fn fall_asleep(socket: &Socket) -> Option<Asleep> {
    let tables = super::table::tables()?;
    let socket = tables.sockets.at(tables.index_of(socket) as usize);
    socket.enter_native(|end| &end.native_receivers);
    let asleep = Asleep(socket);
    if arm(socket, false) { None } else { Some(asleep) }
}

/// Turns the lanes to the kernel. True if there is something in them; `at_once`: that may not keep the caller from sleeping.
pub fn arm(socket: &Socket, at_once: bool) -> bool {
    let Some((all, mailbox)) = inlets::of(socket) else { return false };
    let Some(_held) = socket.end().receive_lock.take() else { return true };
    mailbox.turn_to_kernel(all, at_once)
}

/// Turns the lanes back, if nobody sleeps any more.
pub fn awake(socket: &Socket) {
    let Some((all, mailbox)) = inlets::of(socket) else { return };
    let roused = mailbox.is_asleep()
        && socket.end().receive_lock.take().is_some_and(|_held| rouse(socket, all, mailbox));
    if roused {
        heat_all(socket);
    }
}

/// Does anybody wait in the kernel on this socket, or may a set in which it is?
fn sleepers(socket: &Socket) -> bool {
    let end = socket.end();
    end.native_receivers.load(Ordering::SeqCst) != 0
        || end.holders.count() != 1
        || may_sleep_on(socket)
}

/// Turns the lanes back, if nobody sleeps any more; then epoll sets are to be told, once the receive lock, which the caller holds, is free.
fn rouse(socket: &Socket, all: &Inlets, mailbox: &Mailbox) -> bool {
    mailbox.is_asleep() && !sleepers(socket) && mailbox.turn_to_ring(all)
}

/// A datagram has come from `source` by the kernel (`kept`: it was only looked at); no lock held.
pub fn arrived(socket: &'static Socket, source: Option<Address>, kept: bool) {
    count_in(socket, 0);
    if socket.calls.get() >= socket.next_step.get() {
        door::receiving(socket);
    }
    let Some((all, mailbox)) = inlets::of(socket) else { return };
    let heated = {
        let Some(_held) = socket.end().receive_lock.take() else { return };
        // It may have more.
        mailbox.ask_kernel_soon(sys::ticks());
        let found = source.and_then(|source| mailbox.find(all, &source));
        mailbox.shown.set(if kept { inlets::KERNEL } else { inlets::NONE });
        found.is_some_and(|index| {
            if !kept {
                mailbox.came_by_kernel(all, index);
            }
            mailbox.heat(all, index, sleepers(socket))
        })
    };
    if heated {
        show(socket, Reason::None);
    }
    awake(socket);
}

/// What the kernel has next comes from `source`. Is that one's lane empty, or was its content sent later?
pub fn is_kernels_turn(socket: &Socket, source: Option<Address>) -> bool {
    let Some((all, mailbox)) = inlets::of(socket) else { return true };
    let Some(_held) = socket.end().receive_lock.take() else { return true };
    let lane = source.and_then(|source| mailbox.find(all, &source));
    lane.is_none_or(|index| !mailbox.lane_comes_first(all, index))
}

/// Are there lanes that are looked at?
pub fn has_hot_lanes(socket: &Socket) -> bool {
    inlets::of(socket).is_some_and(|(_, mailbox)| mailbox.hot_count() > 0)
}

/// The steps of a socket that has no lane yet.
pub fn step_in(socket: &'static Socket) {
    door::receiving(socket);
}

/// A datagram was received: `bytes` by a lane.
#[inline]
pub fn count_in(socket: &Socket, bytes: usize) {
    socket.calls.add(1);
    view::count(socket, |slot| {
        slot.calls.fetch_add(1, Ordering::Relaxed);
        slot.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    });
}

fn count_out(socket: &Socket, bytes: usize) {
    view::count(socket, |slot| {
        slot.calls.fetch_add(1, Ordering::Relaxed);
        slot.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    });
}

/// Sends one datagram by a lane: `Some(len)`. `None`: it is to go through the kernel. `to`: the address given, if there was one.
#[inline]
pub fn send(
    socket: &'static Socket,
    to: Option<&Address>,
    from: &mut Buffers,
    flags: i32,
    plain: bool,
) -> Option<usize> {
    let len = from.remaining();
    let (all, outbox) = outlets::of(socket)?;
    is_paused(socket);
    let due = {
        let _held = socket.end().send_lock.take()?;
        let index = match to {
            Some(to) => outbox.outlet(all, to)?,
            None => match outbox.connected() {
                Some(index) => index,
                None => {
                    let index = outbox.outlet(all, &udp::peer(socket.fd())?)?;
                    outbox.set_connected(index);
                    index
                }
            },
        };
        let outlet = all.get(index);
        let calls = outlet.calls.add(1);
        let by_ring = plain && flags & !SERVED_OUT == 0 && len <= udp::DATAGRAM_MAX_BYTES;
        match outlet.send(from, by_ring) {
            Sent::Done => {
                count_out(socket, len);
                return Some(len);
            }
            Sent::Dropped => return Some(len),
            Sent::Kernel => {}
        }
        (calls >= outlet.next_step.get()).then(|| outlet.address())
    };
    if let Some(to) = due {
        door::sending(socket, &to);
    }
    None
}

pub fn sends_by_lanes(socket: &Socket) -> bool {
    outlets::of(socket).is_some_and(|(all, outbox)| outbox.has_lane(all))
}

/// Is a message in a lane?
pub fn lanes_ready(socket: &Socket) -> bool {
    let Some((all, mailbox)) = inlets::of(socket) else { return false };
    socket.end().receive_lock.take().is_none_or(|_held| mailbox.ready(all))
}

/// The length of the next datagram, if a lane has it (FIONREAD).
pub fn next_len(socket: &Socket) -> Option<usize> {
    let (all, mailbox) = inlets::of(socket)?;
    let _held = socket.end().receive_lock.take()?;
    if mailbox.hot_count() == 0 || mailbox.shown.get() == inlets::KERNEL {
        return None;
    }
    let mut len = mailbox.next_len(all, false);
    if len.is_none() && fd::pending(socket.fd(), libc::POLLIN) & libc::POLLIN == 0 {
        len = mailbox.next_len(all, true);
    }
    // The next receive takes what is told of, whatever comes meanwhile.
    mailbox.shown.set(if len.is_some() { inlets::LANE } else { inlets::KERNEL });
    len
}

/// A thread is about to sleep on the socket: datagrams find it in the kernel.
pub fn falls_asleep(socket: &Socket) {
    if socket.has_datagrams() {
        socket.enter_native(|end| &end.native_receivers);
        // What is in the lanes is found by the look that follows; who does not ask for it needs no waking by more of it.
        arm(socket, false);
    }
}

/// It is awake.
pub fn is_awake(socket: &Socket) {
    if socket.has_datagrams() {
        release::leave_native(&socket.end().native_receivers);
        awake(socket);
    }
}

const READABLE: i16 = libc::POLLIN | libc::POLLRDNORM;
const WRITABLE: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// What poll would report of the lanes.
pub fn lanes_mask(socket: &Socket, events: i16) -> i16 {
    if events & READABLE != 0 && lanes_ready(socket) { events & READABLE } else { 0 }
}

/// As `events::poll_mask`.
pub fn poll_mask(socket: &Socket, events: i16) -> i16 {
    let mut mask = lanes_mask(socket, events);
    if socket.kernel_news.is() || events & WRITABLE != 0 {
        let kernel = fd::pending(socket.fd(), events);
        socket.kernel_news.set(u32::from(kernel & !WRITABLE != 0));
        mask |= kernel;
    }
    mask
}

/// Grows with each datagram that comes by a lane.
pub fn arrivals(socket: &Socket) -> u64 {
    let Some((all, mailbox)) = inlets::of(socket) else { return 0 };
    socket.end().receive_lock.take().map_or(0, |_held| mailbox.arrivals(all))
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
