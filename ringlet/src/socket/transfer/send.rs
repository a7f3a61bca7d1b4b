//! Sending: by the ring as long as it may, else through the kernel.

use super::room::leave_stalled;
use super::wait::{Want, deadline, wait};
use crate::reasons::Reason;
use crate::socket::epoll::nested::found_no_room;
use crate::socket::table::{End, Sending, Socket};
use crate::socket::{
    carrier, channel, chaos, control, in_use, lease, memory, moving, orphan, sides, tap, view,
    words,
};
use crate::waiting::spin;
use ringlet_core::leaving::Leaving;
use ringlet_core::memory::Buffers;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::{self, CALL_MAX_BYTES, Errno, Sys};
use ringlet_linux::{tcp, unix};

/// While the ring keeps an end busy, the kernel is asked about the peer's death this often (about a millisecond).
const ASK_KERNEL_TICKS: u64 = 3_000_000;
/// After so many bytes of one send a receiver that sleeps is looked for again.
const TELL_EVERY_BYTES: usize = 256 << 10;

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
    spin::sent();
    socket.has_sent.set(1);
    from.limit(CALL_MAX_BYTES);
    let wanted = from.remaining();
    let blocking = flags & libc::MSG_DONTWAIT == 0 && !end.nonblocking.is();
    let (mut until, mut waiter) = (None, None);
    let (mut total, mut told) = (0, false);
    loop {
        let step = {
            let _held = end.send_lock.take_first().ok_or(Errno::EINTR)?;
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
                found_no_room(socket);
                continue;
            }
            if total == 0 && leave_stalled(socket) {
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
        leave_stalled(socket);
    }
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
        moving::publish_attached_aside(socket, end);
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
        if orphan::go_back(socket, end, &ring, false) {
            // (It is `Returning`, below.)
        } else if words::has_left(&ring) {
            sides::return_unread(socket, end, &ring)?;
        } else if lease::has_lapsed(socket, || sides::ring_byte(socket, &ring)) {
            moving::go_back(socket, end, &ring, Sending::Kernel, Reason::Lease);
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
        let urgent =
            flags & libc::MSG_OOB != 0 && from.remaining() == 1 && urgent_follows(socket, end);
        let sent = send_native(socket, from, flags);
        if urgent && sent.is_ok() {
            words::say_urgent(&ring, end.back_at.get());
            end.back_at.set(0);
        }
        return sent;
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
    moving::publish_attached_aside(socket, end);
    moving::step_aside(socket, end, &ring, Reason::Ancillary)?;
    let sent = unix::send_message(socket.fd(), message, flags | libc::MSG_DONTWAIT)
        .inspect_err(|error| carrier::told_by_send(socket, end, *error))?;
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
        orphan::flush(socket, socket.end(), &outgoing, false);
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
            Err(error) => {
                carrier::told_by_send(socket, socket.end(), error);
                return Err(error);
            }
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
    end.bells_only.set(0);
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

/// An urgent byte is about to be sent through the kernel. Is it the first one behind our `Back`, where it stands behind doorbells perhaps?
/// (It is measured: another program may have sent there, too.)
#[cold]
fn urgent_follows(socket: &Socket, end: &End) -> bool {
    let back_at = end.back_at.get();
    // (Who is inside a native send has counted itself under the send lock. What another program sends meanwhile would be taken for the urgent byte.)
    let alone = end.native_senders.load(Ordering::SeqCst) == 0 && !end.given.is();
    if back_at == 0 || !alone || carrier::facts(socket).has_messages {
        return false;
    }
    let first = carrier::written_place(socket) == Some(back_at - 1);
    if !first {
        // Nor is what comes next.
        end.back_at.set(0);
    }
    first
}

/// Should what follows go through the kernel: the peer has ended (then the kernel says what TCP says), or the data is urgent?
#[inline(always)]
fn must_go_back(socket: &Socket, end: &End, ring: &SegmentRing, flags: i32, now: u64) -> bool {
    if end.ended.get() != 0 || !ring.control().is_taken() || flags & !carrier::MSG_SERVED != 0 {
        return true;
    }
    if now.wrapping_sub(socket.sender_asked.get()) < ASK_KERNEL_TICKS && !socket.end_news.is() {
        return false;
    }
    socket.sender_asked.set(now);
    way_ends(socket, ring, now)
}

/// (Whoever has asked the kernel for another reason has seen an end. He has not looked for the adapter, nor at the lease.)
#[cold]
fn way_ends(socket: &Socket, ring: &SegmentRing, now: u64) -> bool {
    let asked = now.wrapping_sub(socket.kernel_asked.get()) < ASK_KERNEL_TICKS;
    if !asked || socket.end_news.is() {
        socket.kernel_asked.set(now);
        socket.end_news.set(0);
        if carrier::kernel_says_end(socket) {
            return true;
        }
    }
    channel::is_orphan(socket) || lease::has_lapsed(socket, || sides::ring_byte(socket, ring))
}
