//! Sending and receiving on an attached connection: one direction at a time is on the kernel or in the ring, and changes at a
//! known byte (see `ringlet_core::handover` for the protocol as a model, and ARCHITECTURE.md for the walk). Packets go the same ways, and
//! change between them; what is otherwise with them is in `carrier`.
//!
//! `*_now` never waits; `wait` is the one place that does. Order of locks: receive before send.

use super::carrier::packets;
use super::in_use;
use super::table::{End, Receiving, Sending, Socket, Stage, tables};
use super::{
    carrier, chaos, context, control, doorbells, memory, moving, patience, sides, tap, view, words,
};
use crate::interconnect::mirrored;
use crate::reasons::Reason;
use crate::waiting::{sleep, spin};
use ringlet_core::handover::{Incoming, Step};
use ringlet_core::layout::{NOT_SHUT, RINGS_BY_EVENT, RINGS_BY_NAME, SHUT, WANT_BYTE, WANT_EVENT};
use ringlet_core::leaving::Leaving;
use ringlet_core::memory::Buffers;
use ringlet_core::ring::{Mark, Next, SegmentRing};
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::unix::{self, FromKernel};
use ringlet_linux::{fd, sys, tcp};

/// The kernel transfers no more in one call (MAX_RW_COUNT).
const CALL_MAX_BYTES: usize = 0x7fff_f000;
/// While the ring keeps an end busy, the kernel is asked about the peer's death this often (about a millisecond).
const ASK_KERNEL_TICKS: u64 = 3_000_000;
/// A program that polls an empty ring has the kernel asked this often (about 10 us).
const ASK_WHEN_EMPTY_TICKS: u64 = 30_000;
/// The same for the first look that finds nothing after some that found something.
const ASK_AFTER_SOME_TICKS: u64 = 150_000;
/// How often a sleeper looks that nothing might wake.
pub const LOOK_SOON_NS: u64 = 1_000_000;
pub const LOOK_AT_TIMES_NS: u64 = 50_000_000;
/// A ring that stays full so long is not being read.
const STALLED_NS: u64 = 10_000_000;
/// Looks for more of what has arrived, in one call, where the path changes.
const REST_ROUNDS_MAX: u32 = 64;
/// After so many bytes of one send a receiver that sleeps is looked for again.
const TELL_EVERY_BYTES: usize = 256 << 10;

/// What a caller waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Data,
    Room,
}

pub fn deadline(timeout_ns: u64) -> Option<u64> {
    (timeout_ns != 0).then(|| sys::now_ns().saturating_add(timeout_ns))
}

/// recv and its relatives. `Ok(0)` is the end of the stream.
#[inline]
pub fn receive(socket: &Socket, to: &mut Buffers, flags: i32) -> Sys<usize> {
    receive_by(socket, to, flags, &mut FromKernel::new(None))
}

/// The same; `from` says how the kernel's part is received.
pub fn receive_by(
    socket: &Socket,
    to: &mut Buffers,
    flags: i32,
    from: &mut FromKernel,
) -> Sys<usize> {
    if flags & carrier::facts(socket).kernels_flags != 0 {
        return tcp::receive(socket.fd(), to, CALL_MAX_BYTES, flags);
    }
    let end = socket.end();
    to.limit(CALL_MAX_BYTES);
    let wanted = to.remaining();
    let blocking = flags & libc::MSG_DONTWAIT == 0 && !end.nonblocking.is();
    let packets = carrier::facts(socket).has_boundaries;
    let all = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0 && !packets;
    let mut met = chaos::Met::begin(socket);
    let (mut until, mut waiter) = (None, None);
    let mut total = 0;
    loop {
        let step = if wanted == 0 && !packets {
            waiter.get_or_insert_with(|| in_use::Waiter::new(socket));
            receive_nothing(socket)
        } else {
            let _held = end.receive_lock.take().ok_or(Errno::EINTR)?;
            let mine = waiter.is_some() as u32;
            tap::recorded(socket, end, tap::Direction::of_receive(flags), to, |to, asked| {
                if asked != 0 {
                    control::notice(socket, end);
                    control::leave_idle(socket, end);
                }
                receive_now(socket, end, to, flags, blocking, mine, from)
            })
        };
        match step {
            Ok(0) => return Ok(total),
            Ok(n) => total += n,
            Err(Errno::EAGAIN) if met.goes_on(socket) => continue,
            Err(Errno::EAGAIN) if blocking => {
                if until.is_none() {
                    until = Some(deadline(end.receive_timeout_ns.get()));
                }
                match wait(
                    waiter.get_or_insert_with(|| in_use::Waiter::new(socket)),
                    Want::Data,
                    until.flatten(),
                ) {
                    Err(_) if total > 0 => return Ok(total),
                    Err(error) => return Err(error),
                    Ok(()) => continue,
                }
            }
            Err(error) if total > 0 => {
                words::tell_later(end, error);
                return Ok(total);
            }
            Err(error) => return Err(error),
        }
        if !all || to.remaining() == 0 || from.control_bytes != 0 {
            return Ok(total);
        }
    }
}

/// KERNEL: a recv of no bytes waits for some, and takes none.
fn receive_nothing(socket: &Socket) -> Sys<usize> {
    if socket.stage() != Stage::Attached {
        Err(Errno::EBADF)
    } else if poll_mask(socket, libc::POLLIN, false, 1) & libc::POLLIN != 0 {
        Ok(0)
    } else {
        Err(Errno::EAGAIN)
    }
}

/// One look, with the receive lock held. `blocking` callers will wait after `EAGAIN`, which asks the kernel anyway.
pub fn receive_now(
    socket: &Socket,
    end: &End,
    to: &mut Buffers,
    flags: i32,
    blocking: bool,
    mine: u32,
    from: &mut FromKernel,
) -> Sys<usize> {
    let Some(ring) = socket.incoming() else { return Err(Errno::EBADF) };
    moving::publish_attached(socket, end);
    chaos::receive(
        &ring,
        flags,
        (to, from),
        |to, from| look(socket, end, &ring, to, flags, blocking, mine, from),
        |to, from| receive_rest(socket, end, &ring, to, flags, from, true),
    )
}

/// The same, as far as it was sent by one call.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn look(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    blocking: bool,
    mine: u32,
    from: &mut FromKernel,
) -> Sys<usize> {
    for _ in 0..moving::CHANGES_MAX {
        let path = end.receiving();
        let result = match path {
            Receiving::Ring => receive_ring(socket, end, ring, to, flags, blocking, mine, from),
            Receiving::Kernel => receive_kernel(socket, end, ring, to, flags, from),
            Receiving::Draining => receive_draining(socket, end, ring, to, flags, from),
            Receiving::Discarding => moving::discard(socket, end, ring),
        };
        match result {
            Ok(None) => continue,
            Ok(Some(n)) if to.remaining() == 0 || n == 0 => return Ok(n),
            Ok(Some(n)) if flags & libc::MSG_PEEK != 0 => {
                return Ok(n + peek_rest(socket, end, ring, to, n, flags, from));
            }
            Ok(Some(n)) if path != Receiving::Ring || end.receiving() != Receiving::Ring => {
                return Ok(n + receive_rest(socket, end, ring, to, flags, from, false));
            }
            Ok(Some(n)) => return Ok(n),
            Err(error) => {
                if error == Errno::ECONNRESET {
                    // Told once.
                    end.ended.set(2);
                }
                return Err(error);
            }
        }
    }
    // It changes, or rings, faster than we look: there is nothing now.
    if moving::is_spoiled(socket, end, ring) {
        Err(patience::corrupt(socket))
    } else {
        Err(Errno::EAGAIN)
    }
}

/// What has arrived on both sides of a change of path belongs to one call: it may even be of one send. `crossed`: has this call come to the
/// kernel's bytes from the ring? Else it has taken those that were there.
#[cold]
fn receive_rest(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    from: &mut FromKernel,
    mut crossed: bool,
) -> usize {
    if carrier::facts(socket).has_boundaries {
        return 0;
    }
    let mut total = 0;
    for _ in 0..REST_ROUNDS_MAX {
        let unread = || carrier::goes_on(socket);
        let more = match end.receiving() {
            _ if to.remaining() == 0 || from.control_bytes != 0 => break,
            Receiving::Kernel => words::published(end, ring) || crossed && unread(),
            Receiving::Draining => end.receiver.before_ring() == 0 || crossed && unread(),
            Receiving::Ring => words::published(end, ring),
            Receiving::Discarding => {
                crossed = true;
                true
            }
        };
        let got = match end.receiving() {
            _ if !more => Ok(Some(0)),
            Receiving::Kernel => receive_kernel(socket, end, ring, to, flags, from),
            Receiving::Draining => receive_draining(socket, end, ring, to, flags, from),
            Receiving::Ring => receive_ring(socket, end, ring, to, flags, true, 0, from),
            Receiving::Discarding => moving::discard(socket, end, ring),
        };
        match got {
            Ok(Some(n @ 1..)) => total += n,
            Ok(None) => {}
            _ => break,
        }
    }
    total
}

/// The same for a look that takes nothing; `seen` bytes were found where the stream goes on now. At most a piece in the kernel, one in the
/// ring and one in the kernel follow each other: the ring is entered only when it is drained.
#[cold]
fn peek_rest(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    seen: usize,
    flags: i32,
    from: &mut FromKernel,
) -> usize {
    if end.receiver.has_left() || carrier::facts(socket).has_boundaries {
        return 0;
    }
    let mut total = 0;
    match end.receiving() {
        Receiving::Draining if end.receiver.before_ring() == seen as u64 => {
            total = end.rx.peek(ring, to)
        }
        Receiving::Ring => {}
        _ => return 0,
    }
    let Some(position) = words::back_ahead(end, ring).filter(|_| to.remaining() > 0) else {
        return total;
    };
    if end.receiving() == Receiving::Ring {
        if sides::incoming(socket, end, ring).discard_to(position) == Ok(true) {
            total += carrier::receive_native(socket, end, to, usize::MAX, flags, from).unwrap_or(0);
        }
        return total;
    }
    // Before it stand the first piece and doorbells, which can't be taken now.
    let before = carrier::taken(socket, end).map_or(0, |taken| position.saturating_sub(taken));
    total + tcp::peek_behind(socket.fd(), before as usize, to, flags & libc::MSG_TRUNC).unwrap_or(0)
}

/// From the ring. `None`: the path changed, look again.
#[inline]
#[allow(clippy::too_many_arguments)]
fn receive_ring(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    blocking: bool,
    mine: u32,
    from: &mut FromKernel,
) -> Sys<Option<usize>> {
    let mut total = 0;
    let mut passed = false;
    let mut next = Next::Empty;
    if carrier::facts(socket).has_boundaries {
        packets::error_first(socket, end, ring)?;
        next = packets::next(end, ring, to, flags, from);
        if let Next::Bytes(n, quarter) = next {
            if flags & libc::MSG_PEEK != 0 {
                return Ok(Some(n));
            }
            (total, passed) = (n, quarter);
        }
    } else if flags & libc::MSG_PEEK != 0 {
        let n = end.rx.peek(ring, to);
        if n > 0 {
            return Ok(Some(n));
        }
        if let Some(mark) = end.rx.mark(ring) {
            next = Next::Mark(mark);
        } else if words::published(end, ring) {
            return Ok(None);
        }
    } else {
        while to.remaining() > 0 {
            next = end.rx.pop(ring, to);
            let Next::Bytes(n, quarter) = next else { break };
            total += n;
            passed |= quarter;
        }
    }
    // Look for a sender that waits for room: when enough was passed, and when there is nothing to pass.
    if passed || total == 0 {
        sides::wake_sender(socket, ring);
    }
    if let Next::Mark(Mark::Back(place)) = next {
        moving::back_met(socket, end, ring, place);
    }
    if total > 0 {
        socket.found_nothing.set(0);
        view::count(socket, |slot| {
            slot.rx_bytes
                .store(slot.rx_bytes.load(Ordering::Relaxed) + total as u64, Ordering::Relaxed);
        });
        return Ok(Some(total));
    }
    match next {
        Next::Mark(Mark::Back(_)) => Ok(None),
        // A packet of no bytes, or into no buffer.
        Next::Bytes(..) => Ok(Some(0)),
        Next::Empty => {
            if doorbells::take_counted_bells(socket, end, ring, mine) {
                return Ok(None);
            }
            // (A doorbell that was not taken, since others wait too, would end each sleep at once.)
            if !socket.kernel_news.is() && !socket.bells_left.is() {
                // A blocking caller watches first, and then sleeps in the kernel, which tells.
                if blocking {
                    return Err(Errno::EAGAIN);
                }
                let now = sys::ticks();
                let age = now.wrapping_sub(socket.kernel_asked.get());
                // The first to find nothing after some is about to wait, in the kernel, which tells; or comes again.
                let again = socket.found_nothing.swap(1) != 0;
                if age < if again { ASK_WHEN_EMPTY_TICKS } else { ASK_AFTER_SOME_TICKS } {
                    return Err(Errno::EAGAIN);
                }
                socket.kernel_asked.set(now);
            }
            doorbells::look_at_kernel(socket, end, ring, mine)
        }
        _ => Err(patience::corrupt(socket)),
    }
}

/// From the kernel, before the peer has moved its direction.
fn receive_kernel(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    from: &mut FromKernel,
) -> Sys<Option<usize>> {
    carrier::receive_kernel(socket, end, &sides::incoming(socket, end, ring), to, flags, from)
}

/// The kernel's rest before the ring.
fn receive_draining(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    to: &mut Buffers,
    flags: i32,
    from: &mut FromKernel,
) -> Sys<Option<usize>> {
    let side = sides::incoming(socket, end, ring);
    // (What it has is known without a count.)
    let left = match side.follow(false, u64::MAX)? {
        Some(Step::Read(n)) => n,
        _ => return Ok(None),
    };
    let room = to.remaining() > 0;
    let got = carrier::receive_native(
        socket,
        end,
        to,
        left.min(usize::MAX as u64) as usize,
        flags,
        from,
    )?;
    if got == 0 && room && side.is_over() {
        return Err(patience::miscounted(socket));
    }
    // At once: a program that dies behind its last receive has taken all (`Outgoing::all_taken`).
    if flags & libc::MSG_PEEK == 0 && end.receiver.before_ring() == 0 {
        side.arrive();
    }
    Ok(Some(got))
}

/// send and its relatives.
#[inline]
pub fn send(socket: &Socket, from: &mut Buffers, flags: i32) -> Sys<usize> {
    send_by(socket, from, flags, None)
}

/// The same; `control` is the program's message, if its first bytes carry control data.
pub fn send_by(
    socket: &Socket,
    from: &mut Buffers,
    flags: i32,
    mut control: Option<&libc::msghdr>,
) -> Sys<usize> {
    let (end, mut flags) = (socket.end(), flags);
    from.limit(CALL_MAX_BYTES);
    let wanted = from.remaining();
    let blocking = flags & libc::MSG_DONTWAIT == 0 && !end.nonblocking.is();
    let (mut until, mut waiter) = (None, None);
    let (mut total, mut told) = (0, false);
    loop {
        let step = {
            let _held = end.send_lock.take().ok_or(Errno::EINTR)?;
            match control {
                Some(message) => {
                    tap::recorded(socket, end, tap::Direction::Sent, from, |from, _| {
                        send_control(socket, end, message, from, flags)
                    })
                }
                None => send_now(socket, end, from, flags),
            }
        };
        match step {
            Ok(n) => {
                total += n;
                control = None;
                if total >= wanted {
                    return Ok(total);
                }
                // KERNEL: a send that fails behind what it has sent raises no signal.
                flags |= libc::MSG_NOSIGNAL;
            }
            Err(Errno::EAGAIN) if wanted == 0 && !carrier::facts(socket).has_boundaries => {
                return Ok(0);
            }
            Err(Errno::EAGAIN) => {}
            Err(error) if total > 0 => {
                words::tell_later(end, error);
                return Ok(total);
            }
            Err(error) => {
                let broken = error == Errno::EPIPE && end.shut.load(Ordering::Relaxed) == 0;
                if error == Errno::ECONNRESET || broken {
                    // Told once.
                    end.ended.set(2);
                }
                return Err(error);
            }
        }
        if !blocking {
            // Said before the last look for room: whoever watches for some sees either this, or room before that.
            if !told {
                told = true;
                end.no_space.add(1);
                continue;
            }
            if total == 0 && stalled(end) && overflow(socket, end) {
                continue;
            }
            return if total > 0 { Ok(total) } else { Err(Errno::EAGAIN) };
        }
        if until.is_none() {
            until = Some(deadline(end.send_timeout_ns.get()));
        }
        match wait(
            waiter.get_or_insert_with(|| in_use::Waiter::new(socket)),
            Want::Room,
            until.flatten(),
        ) {
            Err(_) if total > 0 => return Ok(total),
            Err(error) => return Err(error),
            Ok(()) => {}
        }
        if let Some(error) = carrier::broken(socket, end) {
            return if total > 0 { Ok(total) } else { Err(error) };
        }
        if stalled(end) {
            overflow(socket, end);
        }
    }
}

/// Has the receiver read nothing for a while? Asked by senders that find no room.
fn stalled(end: &End) -> bool {
    let (now, progress) = (sys::now_ns(), end.tx.progress() + 1);
    if end.full_at.get() != progress {
        end.full_at.set(progress);
        end.full_since_ns.set(now);
    }
    now - end.full_since_ns.get() > STALLED_NS
}

/// A full ring that nobody reads: programs that first send and then receive count on what the kernel's buffers hold. The rest goes
/// there; the ring is entered again once it is drained.
fn overflow(socket: &Socket, end: &End) -> bool {
    let (Some(_held), Some(ring)) = (end.send_lock.take(), socket.outgoing()) else { return false };
    let full = end.sending() == Sending::Ring && !words::has_left(&ring) && !end.tx.writable(&ring);
    if full {
        moving::go_back(socket, end, &ring, Sending::Kernel, Reason::Stalled);
    }
    full
}

/// As much as there is room for, with the send lock held.
#[inline]
fn send_now(socket: &Socket, end: &End, from: &mut Buffers, flags: i32) -> Sys<usize> {
    chaos::send(socket, end, from, flags, |from, flags| {
        tap::recorded(socket, end, tap::Direction::Sent, from, |from, asked| {
            send_unrecorded(socket, end, from, flags, asked)
        })
    })
}

/// `asked`: of this connection (`view::asked`).
#[inline(always)]
fn send_unrecorded(
    socket: &Socket,
    end: &End,
    from: &mut Buffers,
    flags: i32,
    asked: u32,
) -> Sys<usize> {
    let Some(ring) = socket.outgoing() else { return Err(Errno::EBADF) };
    if asked != 0 {
        control::notice(socket, end);
    }
    if end.sending() == Sending::Kernel && flags & libc::MSG_OOB != 0 {
        end.sender.keep_out();
    }
    if end.sending() == Sending::Kernel {
        moving::publish_attached(socket, end);
        sides::try_start(socket, end, &ring);
        if end.sending() == Sending::Kernel
            && words::peer_attached(socket) != 0
            && carrier::await_start(socket, end)
        {
            sides::try_start(socket, end, &ring);
        }
    }
    let (in_ring, now) = (end.sending() == Sending::Ring, sys::ticks());
    if in_ring && must_go_back(socket, end, &ring, flags, now) {
        if words::has_left(&ring) {
            sides::return_unread(socket, end, &ring)?;
        } else {
            if let Some(bytes) = carrier::ends_in_ring(socket, end, &ring, from)? {
                return Ok(bytes);
            }
            let urgent = flags & libc::MSG_OOB != 0;
            let reason = if urgent { Reason::Urgent } else { Reason::Closing };
            moving::go_back(socket, end, &ring, Sending::KernelForGood, reason);
        }
    } else if in_ring && ring.control().receiver.keep_out.load(Ordering::Relaxed) | asked != 0 {
        control::leave(socket, end, &ring);
    }
    if end.sending() == Sending::Returning {
        match sides::return_unread(socket, end, &ring) {
            Err(Errno::EAGAIN) if end.shut_later.is() => return Err(broken_pipe(flags)),
            result => result?,
        }
    }
    if end.sending() != Sending::Ring {
        // The first that goes through the kernel again: did the peer die with doorbells unread?
        if let Some(bytes) = carrier::lost_by_death(socket, end, &ring, from) {
            return Ok(bytes);
        }
        take_pending(socket, end)?;
        return send_native(socket, from, flags);
    }
    let packet_max = end.packet_max.get() as usize;
    if from.remaining() == 0 && packet_max == 0 {
        return Ok(0);
    }
    // How much the receiver was looked for behind: one that sleeps is woken for the first piece, and then for so many that it does not come
    // back to sleep behind each, having copied it as fast as we do.
    let (mut total, mut told) = (0, 0);
    loop {
        match end.tx.push_sent_at(&ring, from, now, packet_max) {
            Some(n) => total += n,
            None => {
                // Before anything else is done: a doorbell rings only while we are in the ring.
                if total > told {
                    sides::wake_receiver(socket, &ring);
                    told = total;
                }
                match memory::hold_more(socket, end, &ring) {
                    Some(true) => continue,
                    Some(false) => {
                        let reason = Reason::NoMemory;
                        moving::go_back(socket, end, &ring, Sending::KernelForGood, reason);
                        match moving::step_aside(socket, end, &ring, reason) {
                            // What is in the ring was sent, whatever is to be said of the rest.
                            _ if total > 0 => break,
                            other => other?,
                        }
                        return send_native(socket, from, flags);
                    }
                    None if total > 0 => break,
                    None if packet_max != 0 && from.remaining() > packet_max => {
                        moving::step_aside(socket, end, &ring, Reason::Large)?;
                        return send_native(socket, from, flags);
                    }
                    None => return Err(Errno::EAGAIN),
                }
            }
        }
        let left = words::has_left(&ring);
        if told == 0 || total - told >= TELL_EVERY_BYTES || from.remaining() == 0 || left {
            sides::wake_receiver(socket, &ring);
            told = total;
        }
        // After the publish: a receiver that left the ring just now, and did not see the record, has it sent again.
        if left {
            let _ = sides::return_unread(socket, end, &ring);
            break;
        }
        if from.remaining() == 0 {
            break;
        }
    }
    view::count(socket, |slot| {
        slot.tx_bytes
            .store(slot.tx_bytes.load(Ordering::Relaxed) + total as u64, Ordering::Relaxed);
    });
    Ok(total)
}

/// The kernel's part of a sendmsg with control data: all at once, since control data goes with the first of its bytes. Send lock held.
fn send_control(
    socket: &Socket,
    end: &End,
    message: &libc::msghdr,
    from: &mut Buffers,
    flags: i32,
) -> Sys<usize> {
    let Some(ring) = socket.outgoing() else { return Err(Errno::EBADF) };
    moving::publish_attached(socket, end);
    moving::step_aside(socket, end, &ring, Reason::Ancillary)?;
    let sent = unix::send_message(socket.fd(), message, flags | libc::MSG_DONTWAIT)?;
    let mut left = sent.min(from.remaining());
    while left > 0 {
        left -= from.take(left).1;
    }
    Ok(sent)
}

/// As the kernel says it of a direction that is shut down, where it does not know of that yet.
#[cold]
fn broken_pipe(flags: i32) -> Errno {
    if flags & libc::MSG_NOSIGNAL == 0 {
        sys::raise(libc::SIGPIPE);
    }
    Errno::EPIPE
}

fn send_native(socket: &Socket, from: &mut Buffers, flags: i32) -> Sys<usize> {
    socket.end().bells_only.set(0);
    if let Some(outgoing) = socket.outgoing() {
        outgoing.control().sender.kernel_at.store(sys::ticks(), Ordering::Relaxed);
        sides::out(socket, socket.end(), &outgoing, Reason::None).flush();
    }
    let mut total = 0;
    loop {
        let got = tcp::send(socket.fd(), from, flags | libc::MSG_DONTWAIT);
        match got {
            Ok(n) => {
                if let Some(outgoing) = socket.outgoing() {
                    words::count_written(&outgoing, n);
                }
                view::count_kernel_bytes(socket, n, 0);
                total += n;
            }
            Err(_) if total > 0 => return Ok(total),
            Err(error) => return Err(error),
        }
        if from.remaining() == 0 || got == Ok(0) {
            return Ok(total);
        }
    }
}

/// Before the kernel sends for the program by another call than send: our direction is there, and may enter the ring again. Send lock held.
pub fn step_aside(socket: &Socket, end: &End, ring: &SegmentRing, reason: Reason) -> Sys<()> {
    if end.sending() == Sending::Ring {
        carrier::died_unread(socket, end, ring)?;
    }
    moving::step_aside(socket, end, ring, reason)?;
    take_pending(socket, end)
}

/// The error of the kernel's connection that was taken from it, and the program has not been told of.
fn take_pending(socket: &Socket, end: &End) -> Sys<()> {
    match end.pending_error.get() {
        error @ 1.. if carrier::facts(socket).tells_sender => {
            end.pending_error.set(0);
            Err(Errno(error as i32))
        }
        _ => Ok(()),
    }
}

/// Should what follows go through the kernel: the peer has ended (then the kernel says what TCP says), or the data is urgent?
#[inline(always)]
fn must_go_back(socket: &Socket, end: &End, ring: &SegmentRing, flags: i32, now: u64) -> bool {
    if end.ended.get() != 0 || !ring.control().is_taken() || flags & !carrier::MSG_SERVED != 0 {
        return true;
    }
    if now.wrapping_sub(socket.kernel_asked.get()) < ASK_KERNEL_TICKS && !socket.end_news.is() {
        return false;
    }
    socket.kernel_asked.set(now);
    socket.end_news.set(0);
    carrier::kernel_says_end(socket)
}

/// Before a shutdown. True if it is ours to do, for the connection is attached; else the kernel does it alone.
pub fn shut_down_before(socket: &Socket, how: i32) -> bool {
    if how != libc::SHUT_RD {
        // ORDER: SeqCst, then the stage; pairs with `moving::publish_attached`, which is after the stage: either we see that the
        // connection is attached, or whoever tells the peer so sees this.
        socket.end().shut.store(1, Ordering::SeqCst);
    }
    carrier::shutting_down(socket);
    socket.stage() == Stage::Attached
}

/// The kernel has refused to.
pub fn shut_down_failed(socket: &Socket) {
    socket.end().shut.store(0, Ordering::SeqCst);
}

/// shutdown(2): the kernel does it, after the ring's bytes in the order that the peer sees.
pub fn shut_down(socket: &Socket, how: i32) -> Sys<()> {
    let end = socket.end();
    let held = end.send_lock.take().ok_or(Errno::EINTR)?;
    let mut how_now = Some(how);
    if how != libc::SHUT_RD {
        if let Some(ring) = socket.outgoing()
            && !moving::end_direction(socket, end, &ring, SHUT)
        {
            // The kernel has no room yet for what comes before.
            end.shut_later.set(1);
            how_now = (how == libc::SHUT_RDWR).then_some(libc::SHUT_RD);
        }
        if end.sending() == Sending::Kernel {
            end.sender.keep_out();
        }
    }
    if matches!(how, libc::SHUT_RD | libc::SHUT_RDWR) && carrier::facts(socket).ends_sends_untold {
        shut_receiving(socket, end);
    }
    let result = match how_now.map_or(Ok(()), |how| tcp::shut_down(socket.fd(), how)) {
        Err(Errno::ENOTCONN) if carrier::is_open_after_reset(socket, end) => Ok(()),
        result => result,
    };
    if result.is_ok() && how != libc::SHUT_RD && end.sending() == Sending::Ring {
        // Nothing can follow the end; sends get the kernel's EPIPE.
        end.sender.keep_out();
    }
    socket.kernel_news.set(1);
    drop(held);
    if socket.home.is() && socket.sleepers.load(Ordering::SeqCst) != 0 {
        // A thread of ours that waits on this connection looks again.
        context::ring_ours(socket.home.get());
    }
    result
}

/// KERNEL: after SHUT_RD the peer's sends fail at once (`Facts::ends_sends_untold`). It must not wait for room either. Our own direction goes back to the kernel: the
/// peer can ring for its room no more. Send lock held, before the kernel's shutdown.
fn shut_receiving(socket: &Socket, end: &End) {
    end.shut_receiving.set(1);
    if let Some(incoming) = socket.incoming() {
        incoming.control().close();
        mirrored::said(socket);
        sides::wake_sender(socket, &incoming);
    }
    if end.sending() == Sending::Ring
        && let Some(outgoing) = socket.outgoing()
    {
        moving::go_back(socket, end, &outgoing, Sending::KernelForGood, Reason::Closing);
    }
}

/// Where the peer runs; and lets it know where we do.
pub fn peer(socket: &Socket) -> Option<spin::Peer> {
    let home = socket.home.get();
    if home != 0 {
        context::tell_processor(home);
    }
    context::peer_of(socket)
}

/// Is there what the caller waits for, as far as shared memory tells?
#[inline(always)]
fn there(socket: &Socket, end: &End, want: Want) -> bool {
    match want {
        Want::Data => {
            let Some(ring) = socket.incoming() else { return true };
            end.receiving() != Receiving::Discarding && words::published(end, &ring)
        }
        // On the kernel, the kernel tells.
        Want::Room if end.sending() != Sending::Ring => false,
        Want::Room => {
            let Some(ring) = socket.outgoing() else { return true };
            end.tx.writable(&ring)
                || !ring.control().is_taken()
                || view::is_away(socket, end, &ring)
        }
    }
}

/// Waits until a look is worth while: watches for a moment, then arms, looks again and sleeps. `EAGAIN` when the deadline has
/// passed, `EINTR` after a signal.
pub fn wait(waiter: &in_use::Waiter, want: Want, deadline_ns: Option<u64>) -> Sys<()> {
    let socket = waiter.socket();
    if socket.stage() != Stage::Attached {
        return Err(Errno::EBADF);
    }
    wait_inside(socket, socket.end(), want, deadline_ns)
}

fn wait_inside(socket: &Socket, end: &End, want: Want, deadline_ns: Option<u64>) -> Sys<()> {
    let in_ring = match want {
        Want::Data => end.receiving() == Receiving::Ring,
        Want::Room => end.sending() == Sending::Ring,
    };
    sleep::check(&|| in_use::wait_no_more(socket));
    let limit = tables().map_or(0, |tables| tables.config.spin_us);
    crate::waiting::signals::begin_wait();
    if in_ring && spin::watch(limit, || peer(socket), || there(socket, end, want)) {
        view::count_spin(socket);
        return Ok(());
    }
    if !crate::waiting::signals::restart() {
        // It would have ended the kernel's wait.
        return Err(Errno::EINTR);
    }
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else {
        return Ok(());
    };
    // Its bell serves if this thread is the connection's home and the peer has said that it rings it.
    let home = Some(socket.home.get())
        .filter(|home| *home != 0 && context::of_thread_if_any() == Some(*home))
        .filter(|_| rings_home(socket) || rings_by_name(socket));
    let event = home.is_some() && rings_home(socket);
    let how = if home.is_some() { WANT_EVENT } else { WANT_BYTE };
    let wish = match want {
        Want::Data => incoming.control().data_wish(),
        Want::Room => outgoing.control().room_wish(),
    };
    if let Some(home) = home {
        context::arm(home);
    }
    // (For room in the kernel its event tells. A doorbell would lie unread there, and make our death a reset, in which what the kernel
    // has not yet sent is lost.)
    let wishes = match want {
        Want::Data => !event,
        Want::Room => end.sending() == Sending::Ring,
    };
    if wishes {
        wish.want(how);
    }
    sides::answer_return(socket, end);
    if want == Want::Room {
        socket.room_waiters.fetch_add(1, Ordering::SeqCst);
    }
    let result = if there(socket, end, want) {
        Ok(())
    } else {
        fall_asleep(socket, end, want, home, deadline_ns)
    };
    if want == Want::Room {
        socket.leave_room();
    }
    if let Some(home) = home {
        context::disarm(home);
    }
    if there(socket, end, want) {
        spin::woken(if want == Want::Data { sent_at(socket) } else { 0 });
    }
    view::count_wake(socket);
    result
}

fn fall_asleep(
    socket: &Socket,
    end: &End,
    want: Want,
    home: Option<u32>,
    deadline_ns: Option<u64>,
) -> Sys<()> {
    let timeout = match deadline_ns {
        None => None,
        Some(at) => match at.checked_sub(sys::now_ns()) {
            None | Some(0) => return Err(Errno::EAGAIN),
            left => left,
        },
    };
    // (By name a bell may fail to ring, and then a byte does.)
    let event = home.is_some() && rings_home(socket);
    let mut events = libc::POLLRDHUP;
    if end.sending() == Sending::Returning {
        // To go on with what is sent again.
        events |= libc::POLLOUT;
    }
    match want {
        Want::Data => events |= libc::POLLIN,
        Want::Room if end.sending() != Sending::Ring => events |= libc::POLLOUT,
        // Woken by a byte: it is readable. (Data that waits in the kernel would look the same: then we look every now and then.)
        Want::Room if !event && end.receiving() == Receiving::Ring => events |= libc::POLLIN,
        Want::Room => {}
    }
    // Nothing wakes this one if no byte can be sent to it, or when a thread of ours shuts the connection: it looks now and then.
    let look_every = match want {
        Want::Room if end.sending() == Sending::Ring => Some(STALLED_NS),
        Want::Room if carrier::facts(socket).ends_sends_untold => Some(LOOK_AT_TIMES_NS),
        Want::Room if !event && !can_ring_for_room(socket) => Some(LOOK_SOON_NS),
        Want::Room if !event => Some(LOOK_AT_TIMES_NS),
        // Another waiter may take the byte that was meant for us.
        Want::Data if socket.sleepers.load(Ordering::SeqCst) > 1 => Some(LOOK_AT_TIMES_NS),
        _ => None,
    };
    let look_every = match (look_every, memory::due()) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    let now_and_then = look_every.is_some();
    let timeout = look_every.map_or(timeout, |ns| Some(timeout.unwrap_or(ns).min(ns)));
    let named = home.filter(|_| !event).map(context::named_of);
    let mut fds = [
        fd::pollfd { fd: socket.fd(), events, revents: 0 },
        fd::pollfd { fd: home.map_or(-1, context::eventfd_of), events: libc::POLLIN, revents: 0 },
        fd::pollfd { fd: named.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
    ];
    let fds = &mut fds[..2 + usize::from(named.is_some())];
    // As `wait_inside` and its caller would do it.
    let cancelled = || {
        if want == Want::Room {
            socket.leave_room();
        }
        if let Some(home) = home {
            context::disarm(home);
        }
        in_use::wait_no_more(socket);
    };
    // As the kernel does it: restarted, unless the call has a timeout.
    let goes_on = || deadline_ns.is_none() && crate::waiting::signals::restart();
    let woken = match sleep::poll(fds, timeout, None, &cancelled) {
        Err(Errno::EINTR) if goes_on() => return Ok(()),
        other => other?,
    };
    if let Some(home) = home.filter(|_| fds[1].revents != 0) {
        context::drain(home);
    }
    if let Some(home) = home.filter(|_| fds.get(2).is_some_and(|bell| bell.revents != 0)) {
        context::drain_named(home);
    }
    if fds[0].revents != 0 {
        doorbells::kernel_tells(socket, fds[0].revents as u16 as u32);
        let by_ring = want == Want::Room && end.sending() == Sending::Ring;
        if by_ring && !doorbells::take_bells(socket, end, 1) && !there(socket, end, want) {
            // Without an ear for bytes, then: the one that stays would end each sleep at once.
            let mut fds = [fd::pollfd { events: events & !libc::POLLIN, ..fds[0] }];
            let timeout = timeout.map_or(LOOK_SOON_NS, |ns| ns.min(LOOK_SOON_NS));
            return match sleep::poll(&mut fds, Some(timeout), None, &cancelled) {
                Err(error) if error != Errno::EINTR || !goes_on() => Err(error),
                _ => Ok(()),
            };
        }
    }
    if woken == 0 && !now_and_then { Err(Errno::EAGAIN) } else { Ok(()) }
}

/// Bytes that a receive would find now: in the ring, or in the kernel while it is the way.
pub fn readable_bytes(socket: &Socket) -> Sys<usize> {
    count_readable(socket, usize::MAX)
}

/// Until there are `enough`: behind what is found first may stand a whole ring of small records, which nobody walks through at each look
/// (who asks for all of them goes on where the last one stopped).
fn count_readable(socket: &Socket, enough: usize) -> Sys<usize> {
    let end = socket.end();
    let _held = end.receive_lock.take().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.incoming() else { return tcp::unread(socket.fd()) };
    chaos::await_whole(&ring);
    match moving::settle(socket, end, &ring) {
        Ok(()) | Err(Errno::EAGAIN) => {}
        Err(error) => return Err(error),
    }
    let of_kernel = match end.receiving() {
        Receiving::Kernel => return tcp::unread(socket.fd()),
        Receiving::Draining if end.receiver.has_left() => {
            let again = moving::unread_after(socket, end, words::bells_end(end, &ring))?;
            return Ok(tcp::unread(socket.fd())?.min(end.receiver.before_ring() as usize) + again);
        }
        Receiving::Draining => tcp::unread(socket.fd())?.min(end.receiver.before_ring() as usize),
        Receiving::Ring => 0,
        Receiving::Discarding => return moving::unread_after(socket, end, end.receiver.until()),
    };
    if of_kernel >= enough {
        return Ok(of_kernel);
    }
    let (in_ring, back) = match enough {
        usize::MAX => {
            let (all, mark) = end.rx.available_since(&ring, &socket.counted_bytes);
            (all, mark.and_then(|mark| end.receiver.goes_on_at(mark)))
        }
        _ => match end.rx.available(&ring, enough) {
            some if of_kernel + some >= enough => (some, None),
            all => (all, words::back_ahead(end, &ring)),
        },
    };
    let behind = match back {
        Some(position) => moving::unread_after(socket, end, position)?,
        None => 0,
    };
    Ok(of_kernel + in_ring + behind)
}

/// Would a receive find something now?
fn is_readable(socket: &Socket) -> Sys<bool> {
    if !carrier::facts(socket).has_boundaries {
        return count_readable(socket, 1).map(|n| n > 0);
    }
    let end = socket.end();
    let _held = end.receive_lock.take().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.incoming() else { return Ok(true) };
    packets::wait_for_us(socket, end, &ring, &sides::incoming(socket, end, &ring))
}

/// Do bytes lie in the ring that come before what the kernel has?
pub fn ring_holds_bytes(socket: &Socket) -> bool {
    let end = socket.end();
    let in_use = in_use::in_use(socket);
    in_use.is_some()
        && end.receiving() == Receiving::Ring
        && socket.incoming().is_some_and(|ring| end.rx.has_bytes(&ring))
}

/// Bytes sent that the peer has not yet taken (SIOCOUTQ).
pub fn unsent_bytes(socket: &Socket) -> Sys<usize> {
    let end = socket.end();
    let _held = end.send_lock.take().ok_or(Errno::EINTR)?;
    let Some(ring) = socket.outgoing() else { return Ok(0) };
    let in_kernel = if end.sending() == Sending::Ring { 0 } else { carrier::untaken(socket)? };
    Ok(end.tx.outstanding_bytes(&ring) + in_kernel)
}

/// The event mask that poll would report, of those in `events` and of the three that it always reports. `watched`: the kernel
/// tells us of its news on this descriptor (an epoll set does), so it need not be asked now and then. `mine` of the counted waiters are the
/// caller.
pub fn poll_mask(socket: &Socket, events: i16, watched: bool, mine: u32) -> i16 {
    let end = socket.end();
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else {
        return fd::pending(socket.fd(), events);
    };
    let readable = libc::POLLIN | libc::POLLRDNORM;
    let writable = carrier::facts(socket).writable;
    let mut mask = 0;
    let receiving = end.receiving();
    let in_ring = receiving == Receiving::Ring;
    let mut has_bytes = end.rx.has_bytes(&incoming);
    if in_ring && has_bytes {
        mask |= readable;
    }
    if in_ring
        && !has_bytes
        && socket.bells_left.is()
        && !socket.kernel_news.is()
        && let Some(_held) = end.receive_lock.try_take()
        && doorbells::take_counted_bells(socket, end, &incoming, mine)
    {
        // Behind the doorbell, as is the look for room below: it may have been the only one that told of it.
        has_bytes = end.rx.has_bytes(&incoming);
        mask |= if has_bytes { readable } else { 0 };
    }
    let sending = end.sending();
    let mut away = false;
    // (Whoever does not ask for room is spared the look at the peer's cache line.)
    if sending == Sending::Ring && events & writable != 0 {
        if has_room(end, &outgoing) {
            mask |= writable;
        } else {
            away = view::is_away(socket, end, &outgoing);
        }
    }
    let asked_long_ago =
        || sys::ticks().wrapping_sub(socket.kernel_asked.get()) > ASK_WHEN_EMPTY_TICKS;
    let due = socket.kernel_news.is()
        || !has_bytes && socket.bells_left.is()
        || end.ended.get() == 0 && is_shut(&incoming)
        || away
        || (!in_ring || !has_bytes) && words::published(end, &incoming)
        || !in_ring && receiving as u32 != socket.kernel_asked_as.get()
        || !watched && asked_long_ago();
    let rings_tell = sending == Sending::Ring || events & writable == 0;
    if (in_ring || watched) && rings_tell && !due {
        return mask & events;
    }
    mask |= ask_kernel(socket, end, &incoming, readable, writable, mine);
    if events & writable != 0 && has_room(end, &outgoing) {
        // It has come to the ring meanwhile; or the doorbell that was taken told of room.
        mask |= writable;
    }
    mask & (events | libc::POLLERR | libc::POLLHUP)
}

/// Does a send by the ring find room, or that nobody reads any more?
fn has_room(end: &End, outgoing: &SegmentRing) -> bool {
    end.sending() == Sending::Ring && (end.tx.writable(outgoing) || !outgoing.control().is_taken())
}

/// Was the kernel last asked so long ago that it is to be asked again, though rings have something? (Who has heard elsewhere of the peer's
/// death may count on it here.)
pub fn is_asked_late(socket: &Socket, now: u64) -> bool {
    now.wrapping_sub(socket.kernel_asked.get()) > ASK_WHEN_EMPTY_TICKS
}

/// The kernel's part of `poll_mask`.
fn ask_kernel(
    socket: &Socket,
    end: &End,
    incoming: &SegmentRing,
    readable: i16,
    writable: i16,
    mine: u32,
) -> i16 {
    socket.kernel_asked.set(sys::ticks());
    socket.kernel_asked_as.set(end.receiving() as u32);
    socket.kernel_news.set(0);
    socket.bells_left.set(0);
    sides::answer_return(socket, end);
    mirrored::break_off_if_orphan(socket);
    control::leave_idle(socket, end);
    if words::published(end, incoming)
        && (end.receiving() != Receiving::Ring || !end.rx.has_bytes(incoming))
    {
        let _ = count_readable(socket, 0);
    }
    for _ in 0..moving::CHANGES_MAX {
        let look =
            || fd::pending(socket.fd(), readable | writable | libc::POLLRDHUP | libc::POLLPRI);
        let mut kernel = look();
        let over = kernel & (libc::POLLHUP | libc::POLLERR) != 0;
        if over && !end.judged.is() && carrier::judge(socket, end, 0) {
            kernel = look();
        }
        kernel = carrier::shown(socket, end, kernel);
        let mut mask = kernel & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLPRI);
        if end.pending_error.is() {
            mask |= libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP | readable;
        }
        if mask != 0 {
            // What has happened to the kernel's connection stays, and is to be seen at every look.
            socket.kernel_news.set(1);
        }
        if mask & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0 {
            mask |= readable;
            end.ended.set(end.ended.get().max(1));
        }
        if end.sending() != Sending::Ring || mask & (libc::POLLHUP | libc::POLLERR) != 0 {
            mask |= kernel & writable;
        }
        if kernel & readable == 0 || mask & readable != 0 {
            return mask | ready_mask(end, incoming, readable);
        }
        // Bytes in the kernel: data, or doorbells?
        match end.receiving() {
            Receiving::Ring if end.rx.has_bytes(incoming) => {
                socket.bells_left.set(1);
                return mask | readable;
            }
            Receiving::Ring if !words::published(end, incoming) => {
                if !doorbells::take_bells(socket, end, mine) {
                    return mask | ready_mask(end, incoming, readable);
                }
            }
            _ => match is_readable(socket) {
                Ok(false) | Err(Errno::EAGAIN) => {}
                _ => {
                    socket.kernel_news.set(1);
                    return mask | readable;
                }
            },
        }
    }
    0
}

/// When what a receive would find first was sent, or the peer ended; 0 if that is not known.
pub fn sent_at(socket: &Socket) -> u64 {
    let end = socket.end();
    match socket.incoming() {
        Some(ring) if end.receiving() == Receiving::Ring => {
            let sender = &ring.control().sender;
            let ended = is_shut(&ring) && !end.rx.has_bytes(&ring);
            if ended { sender.shut_at.load(Ordering::Relaxed) } else { end.rx.sent_at(&ring) }
        }
        Some(ring) => ring.control().sender.kernel_at.load(Ordering::Relaxed),
        None => 0,
    }
}

/// Does the ring hold something that was not looked at, bytes or a mark?
pub fn ring_tells(socket: &Socket) -> bool {
    socket.incoming().is_some_and(|ring| words::published(socket.end(), &ring))
}

/// Does the peer say that it has ended its direction? The kernel has the end itself, or is about to.
#[inline(always)]
fn is_shut(incoming: &SegmentRing) -> bool {
    // ORDER: Acquire; pairs with `moving::end_direction`.
    incoming.control().sender.shut.load(Ordering::Acquire) != NOT_SHUT
}

fn ready_mask(end: &End, incoming: &SegmentRing, readable: i16) -> i16 {
    if end.receiving() == Receiving::Ring && end.rx.has_bytes(incoming) { readable } else { 0 }
}

/// Whoever is about to sleep on this socket among others: asks to be woken by a byte, which every way of waiting in the
/// kernel sees. Look again afterwards.
pub fn want_bytes(socket: &Socket, data: bool, room: bool) {
    want(socket, WANT_BYTE, data, room);
}

/// The same, by the bell of our home context, which the peer rings by its name.
pub fn want_named(socket: &Socket, room: bool) {
    want(socket, WANT_EVENT, true, room);
}

fn want(socket: &Socket, how: u32, data: bool, room: bool) {
    let (Some(incoming), Some(outgoing)) = (socket.incoming(), socket.outgoing()) else { return };
    if data {
        incoming.control().data_wish().want(how);
    }
    // (As in `wait_inside`.)
    if room && socket.end().sending() == Sending::Ring {
        outgoing.control().room_wish().want(how);
    }
}

/// As `want_bytes`, for room only, by the home context's eventfd.
pub fn want_room_event(socket: &Socket) {
    if let Some(outgoing) = socket.outgoing() {
        outgoing.control().room_wish().want(WANT_EVENT);
    }
}

/// Can the peer, which receives, wake us by a byte: only while its own direction is in the ring.
pub fn can_ring_for_room(socket: &Socket) -> bool {
    socket.end().receiving() == Receiving::Ring
}

/// Does the peer ring our home context's eventfd?
pub fn rings_home(socket: &Socket) -> bool {
    socket.home.is() && words::peer_attached(socket) == RINGS_BY_EVENT
}

/// Does the peer ring our home context by its bell's name, for a wish that says so?
pub fn rings_by_name(socket: &Socket) -> bool {
    socket.home.is() && words::peer_attached(socket) == RINGS_BY_NAME
}
