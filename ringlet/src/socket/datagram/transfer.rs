//! Receiving and sending by lanes, beside the kernel; and what poll reports of them.

use super::asleep::{Asleep, Still, awake, fall_asleep, rouse, sleepers, stay};
use super::door;
use super::inlets::{self, Found, Got, Inlets, Mailbox};
use super::life::{is_paused, show};
use super::outlets::{self, Sent};
use crate::reasons::Reason;
use crate::socket::epoll::registration::heat_all;
use crate::socket::table::{Socket, tables};
use crate::socket::{chaos, view};
use crate::waiting::{signals, spin};
use ringlet_core::memory::Buffers;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::tcp::Address;
use ringlet_linux::{fd, udp};

/// While lanes are busy, the kernel is looked at this often (about 10 us); while they are empty, about every microsecond at most.
const ASK_KERNEL_TICKS: u64 = 30_000;
const ASK_WHEN_EMPTY_TICKS: u64 = 3_000;

/// How a receive goes on.
pub enum Next {
    Datagram(Got),
    /// Look into the kernel without waiting; if there is nothing, ask again.
    AskKernel,
    /// The same, whoever sent what it has: the program has seen that already.
    TakeKernel,
    /// The same: nothing comes by the lanes meanwhile.
    TakeStill(Still),
    /// Receive from the kernel, and wait there.
    Sleep(Asleep),
    /// What was asked for, only the kernel can do.
    Kernel,
    Fail(Errno),
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
            let Some(_held) = end.receive_lock.take_first() else {
                return Next::Fail(Errno::EINTR);
            };
            if chaos::closes_lanes() {
                mailbox.close_all(all);
            }
            let now = sys::ticks();
            let asked = now.wrapping_sub(mailbox.kernel_asked.get());
            if kernel == Kernel::Unknown
                && mailbox.is_still()
                && let Some(still) = stay(socket)
            {
                mailbox.kernel_asked.set(now);
                return Next::TakeStill(still);
            }
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
                Found::Message(got) => return Next::Datagram(got),
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
    let limit = tables().map_or(0, |tables| tables.config.watch_us());
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
        if let (Some(source), None, false) = (source, found, kept) {
            mailbox.heard_newcomer(all, &source);
        }
        found.is_some_and(|index| {
            if !kept {
                mailbox.came_by_kernel(all, index);
                // (Strangers, who have no lane, don't count.)
                mailbox.count(all);
            }
            mailbox.heat(all, index, sleepers(socket))
        })
    };
    if heated {
        show(socket, Reason::None);
        // (Sets that looked at none of its lanes look from now on.)
        heat_all(socket);
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
    spin::sent();
    is_paused(socket);
    let due = {
        let _held = socket.end().send_lock.take_first()?;
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
        let calls = outbox.count(outlet);
        let by_ring = plain && flags & !SERVED_OUT == 0 && len <= udp::DATAGRAM_MAX_BYTES;
        match outlet.send(from, by_ring) {
            Sent::Done => {
                count_out(socket, len);
                return Some(len);
            }
            Sent::Dropped => return Some(len),
            Sent::Kernel => {}
        }
        let due = calls >= outlet.next_step.get() && outbox.pays(outlet);
        due.then(|| outlet.address())
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

/// The length of the next datagram if a lane has it, and 0 if there is none (FIONREAD); `None`: the kernel is to say.
pub fn next_len(socket: &Socket) -> Option<usize> {
    let (all, mailbox) = inlets::of(socket)?;
    let _held = socket.end().receive_lock.take()?;
    let kernel_has = || fd::pending(socket.fd(), libc::POLLIN) & libc::POLLIN != 0;
    if mailbox.hot_count() == 0 || mailbox.shown.get() == inlets::KERNEL && kernel_has() {
        return None;
    }
    let mut found = mailbox.next_len(all, false);
    let in_kernel = found.is_none() && kernel_has();
    if found.is_none() && !in_kernel {
        found = mailbox.next_len(all, true);
    }
    // The next receive takes what is told of, whatever comes meanwhile. Of nothing nothing is told, and both are looked at again.
    mailbox.shown.set(match found {
        Some(_) => inlets::LANE,
        None if in_kernel => inlets::KERNEL,
        None => inlets::NONE,
    });
    if in_kernel { None } else { Some(found.unwrap_or(0)) }
}

const READABLE: i16 = libc::POLLIN | libc::POLLRDNORM;
const WRITABLE: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// What poll would report of the lanes.
pub fn lanes_mask(socket: &Socket, events: i16) -> i16 {
    if events & READABLE != 0 && lanes_ready(socket) { events & READABLE } else { 0 }
}

/// As `events::poll_mask`. `told`: what the kernel has told just now; `stale`: it has told something before.
pub fn poll_mask(socket: &Socket, events: i16, told: Option<i16>, stale: bool) -> i16 {
    let mut mask = lanes_mask(socket, events);
    if let Some(told) = told {
        mask |= told & (events | libc::POLLERR | libc::POLLHUP);
    } else if stale || socket.kernel_news.is() || events & WRITABLE != 0 {
        let news = socket.kernel_news.number();
        let kernel = fd::pending(socket.fd(), events);
        match kernel & !WRITABLE {
            0 => socket.kernel_news.nothing_since(news),
            _ => socket.kernel_news.tell(),
        }
        mask |= kernel;
    }
    mask
}

/// Grows with each datagram that comes by a lane.
pub fn arrivals(socket: &Socket) -> u64 {
    let Some((all, mailbox)) = inlets::of(socket) else { return 0 };
    socket.end().receive_lock.take().map_or(0, |_held| mailbox.arrivals(all))
}
