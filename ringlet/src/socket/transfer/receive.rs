//! Receiving: from the ring, from the kernel, and where one follows the other.

use super::events::{ask_every, asked_in_vain, poll_mask};
use super::wait::{Want, deadline, wait};
use crate::socket::carrier::packets;
use crate::socket::table::{End, Receiving, Socket, Stage};
use crate::socket::{
    carrier, chaos, control, doorbells, in_use, moving, patience, rest, sides, tap, view, words,
};
use ringlet_core::handover::{Incoming, Step};
use ringlet_core::memory::Buffers;
use ringlet_core::ring::{Mark, Next, SegmentRing};
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, CALL_MAX_BYTES, Errno, Sys};
use ringlet_linux::tcp;
use ringlet_linux::unix::{self, FromKernel};

/// Looks for more of what has arrived, in one call, where the path changes.
const REST_ROUNDS_MAX: u32 = 64;
/// The same for the first look that finds nothing after some that found something.
const ASK_AFTER_SOME_TICKS: u64 = 150_000;

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
            let _held = end.receive_lock.take_first().ok_or(Errno::EINTR)?;
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
            Ok(n) if all && to.remaining() > 0 && socket.stage() == Stage::KernelForGood => {
                // The process has closed itself in, and the rest is the kernel's, by the program's own call.
                return Ok(total
                    + n
                    + tcp::receive(socket.fd(), to, CALL_MAX_BYTES, flags).unwrap_or(0));
            }
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
        // KERNEL: a receive that has some ends before the urgent byte.
        let at_mark = || end.receiving() == Receiving::Kernel && unix::at_mark(socket.fd());
        if !all || to.remaining() == 0 || is_divided(socket, from) || at_mark() {
            return Ok(total);
        }
    }
}

/// KERNEL: control data ends a Unix message, and a receive goes no further; what it has no room for ends it too. Of TCP each part has its
/// own, a time for instance, and the last part's is told.
fn is_divided(socket: &Socket, from: &FromKernel) -> bool {
    let told = from.control_bytes != 0 || from.flags & libc::MSG_CTRUNC != 0;
    told && carrier::facts(socket).has_messages
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
    if carrier::facts(socket).has_boundaries || socket.stage() != Stage::Attached {
        return 0;
    }
    let mut total = 0;
    for _ in 0..REST_ROUNDS_MAX {
        let unread = || carrier::goes_on(socket);
        let more = match end.receiving() {
            _ if to.remaining() == 0 || is_divided(socket, from) => break,
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
    // (Of a process that has closed itself in: what the kernel has is for a call of its own.)
    let apart = carrier::facts(socket).has_boundaries || socket.last_of_ring.is();
    if end.receiver.has_left() || apart {
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
    if let Next::Mark(Mark::Back(place)) = next
        && !socket.last_of_ring.is()
    {
        moving::back_met(socket, end, ring, place);
    }
    if total > 0 {
        socket.found_nothing.set(0);
        if socket.last_of_ring.is() && !end.rx.has_bytes(ring) {
            rest::was_taken(socket);
        }
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
                let every = match socket.found_nothing.get() {
                    0 => ASK_AFTER_SOME_TICKS,
                    times => ask_every(times),
                };
                if age >= every || socket.found_nothing.get() == 0 {
                    asked_in_vain(socket);
                }
                if age < every {
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
