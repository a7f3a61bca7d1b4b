//! TCP: places in what it has carried, segments under way, and what is a reset where only doorbells were left unread.

use super::contract::Carrier;
use super::kernel::{has_unread, is_on, kernel_says_end, note_end, place_behind};
use crate::config::Endpoint;
use crate::reasons::Reason;
use crate::socket::table::{End, Sending, Socket, Tables};
use crate::socket::words::{LINGER_KEPT, bells_put, may_have_lost, peer_attached};
use crate::socket::{channel, patience, pin};
use ringlet_core::handover;
use ringlet_core::layout::{SHUT, SHUT_READ, SHUT_UNREAD};
use ringlet_core::leaving::Leaving;
use ringlet_core::memory::Buffers;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::Ordering;
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::tcp::{SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW};
use ringlet_linux::{diag, fd, tcp};

pub struct Tcp;

impl Carrier for Tcp {
    fn ends(socket: &Socket, tables: &Tables) -> Result<Ends, Option<Reason>> {
        let ends = tcp::ends(socket.fd()).ok_or(Some(Reason::NotConnected))?;
        if ends.local == ends.remote {
            return Err(Some(Reason::NotLocal));
        }
        let endpoint = |end: &tcp::Address| Endpoint { address: end.ip, port: end.port };
        if !tables.config.allows(endpoint(&ends.local), endpoint(&ends.remote)) {
            return Err(Some(Reason::Off));
        }
        // Without these counts no direction could be moved.
        let failed = |error| Some(Reason::from(error));
        tcp::counts(socket.fd()).map_err(failed)?;
        // Only the kernel knows which other addresses are this machine's: it has the far end's socket, or not.
        let loopback = ends.local.is_loopback() && ends.remote.is_loopback();
        if ends.local.ip != ends.remote.ip && !loopback {
            match diag::far_owner(socket.fd(), &Ends::Tcp(ends)) {
                Err(Errno::ENOENT) => return Err(Some(Reason::NotLocal)),
                found => drop(found.map_err(failed)?),
            }
        }
        Ok(Ends::Tcp(ends))
    }

    fn countable(socket: &Socket) -> Result<(), Reason> {
        let end = socket.end();
        // Before the counts: other threads go on.
        let (has_sent, has_received) = (end.has_sent.is(), end.has_received.is());
        let carried = match tcp::carried(socket.fd(), !socket.side.is()) {
            Err(Errno::EAGAIN) => return Ok(()),
            measured => measured.map_err(Reason::from)?,
        };
        // An urgent byte that was not passed: a receive goes past it without a count.
        if fd::pending(socket.fd(), libc::POLLPRI) & libc::POLLPRI != 0 {
            return Err(Reason::Urgent);
        }
        let past_tcp = carried.consumed == Err(Errno::ERANGE)
            || has_sent && carried.written.place == 0
            || has_received && carried.received == 0;
        // (What another thread writes between two measures is in one of them only. They are compared again when nobody does: `start_place`.)
        let writing = end.native_senders.load(Ordering::SeqCst) != 0;
        if past_tcp || carried.written.agreed().is_none() && !writing {
            return Err(Reason::Miscounted);
        }
        Ok(())
    }

    fn has_unserved_option(socket: &Socket) -> bool {
        // (A listener hands them on to what it accepts.)
        let told = [
            libc::SO_TIMESTAMP,
            libc::SO_TIMESTAMPNS,
            libc::SO_TIMESTAMPING,
            SO_TIMESTAMP_NEW,
            SO_TIMESTAMPNS_NEW,
            libc::SO_ZEROCOPY,
        ];
        told.iter().any(|option| is_on(socket, *option, 1))
            || is_on(socket, libc::SO_PEEK_OFF, 0)
            || tcp::int_option(socket.fd(), libc::IPPROTO_TCP, libc::TCP_INQ) == Ok(1)
            || tcp::has_upper_protocol(socket.fd())
    }

    fn shutting_down(_socket: &Socket) {}

    fn tune(socket: &Socket, end: &End) {
        if end.barred.is() {
            tcp::send_as_asked(socket.fd(), end.no_delay.is(), end.cork.is());
        } else {
            tcp::send_at_once(socket.fd());
        }
    }

    fn written_place(socket: &Socket) -> Option<u64> {
        written(socket).ok()?.agreed()
    }

    fn carried(socket: &Socket) -> (usize, usize) {
        match tcp::carried(socket.fd(), !socket.side.is()) {
            Ok(tcp::Carried { written, consumed: Ok(received), .. }) => {
                (written.place as usize, received as usize)
            }
            _ => (0, 0),
        }
    }

    fn start_place(socket: &Socket, end: &End) -> Option<u64> {
        let written = written(socket).ok()?;
        // (Packets that this machine itself drops, as where a border is shut, make both measures differ for good.)
        let place = written.agreed().or_else(|| counted_place(socket, end, written.place));
        if written.state != tcp::TCP_ESTABLISHED || place.is_none() {
            end.sender.keep_out();
        }
        if place.is_none() {
            pin::keep_out(socket, end, Reason::Miscounted);
        }
        place.filter(|_| end.sending() != Sending::KernelForGood)
    }

    fn await_start(_socket: &Socket, _end: &End) -> bool {
        false
    }

    fn back_place(socket: &Socket, end: &End, bells: u64) -> Sys<u64> {
        let place = place_behind(end, bells);
        match written(socket)? {
            written if written.place == place => Ok(place),
            // Nothing follows an end, which has a sequence number too.
            written if !matches!(written.state, tcp::TCP_ESTABLISHED | tcp::TCP_CLOSE_WAIT) => {
                Ok(place)
            }
            _ => Err(Errno::ERANGE),
        }
    }

    fn orphaned_place(socket: &Socket, _end: &End, _bells: u64) -> Sys<u64> {
        written(socket).map(|written| written.place)
    }

    fn base(_socket: &Socket, _start: u64, _taken: u64) -> u64 {
        0
    }

    fn taken_before(socket: &Socket) -> Sys<u64> {
        let end = socket.end();
        let take_error = || {
            if Self::judge(socket, end, 0) {
                return;
            }
            let error = tcp::take_error(socket.fd());
            // (EPIPE is told by each send, and by no receive: there is the end.)
            if error != 0 && error != libc::EPIPE {
                end.pending_error.change(0, error as u32);
            }
        };
        tcp::consumed(socket.fd(), take_error).map_err(|error| match error {
            Errno::ERANGE => patience::miscounted(socket),
            error => error,
        })
    }

    fn begin_count(socket: &Socket, end: &End) -> bool {
        if end.receiver.taken().is_some() {
            return true;
        }
        match tcp::consumed(socket.fd(), || ()) {
            Ok(taken) => end.receiver.begin_count(taken),
            Err(Errno::EAGAIN) => return false,
            // (It is told of when somebody counts on it.)
            Err(_) => {}
        }
        true
    }

    fn received(socket: &Socket, _end: &End) -> Sys<u64> {
        tcp::counts(socket.fd()).map(|counts| counts.received)
    }

    /// KERNEL: TCP_ZEROCOPY_RECEIVE takes bytes too, and who has TCP_ULP gets fewer than came.
    fn has_counted_all(socket: &Socket, end: &End) -> bool {
        tcp::counts(socket.fd()).is_ok_and(|counts| {
            // (Whether an end that is over was counted it does not always tell.)
            Self::taken(socket, end)
                .is_ok_and(|taken| [counts.received, counts.arrived].contains(&taken))
        })
    }

    fn untaken(_socket: &Socket) -> Sys<usize> {
        Ok(0)
    }

    fn undelivered(socket: &Socket) -> usize {
        tcp::unsent(socket.fd())
    }

    fn goes_on(socket: &Socket) -> bool {
        has_unread(socket)
    }

    fn resent_by_the_dead(socket: &Socket, end: &End, used: u64, most: u64) -> u64 {
        // ORDER: Acquire; pairs with `process::before_fork`.
        if end.resent_at.get() == 0 && end.holders.count() <= 1 {
            return 0;
        }
        let Some(place) = Self::written_place(socket) else {
            end.resent_at.set(0);
            return 0;
        };
        if let before @ 1.. = end.resent_at.get()
            && end.resent_behind.get() == used
            && place > before - 1
        {
            return (place - (before - 1)).min(most);
        }
        end.resent_at.set(0);
        end.resent_behind.set(used);
        end.resent_at.set(place + 1);
        0
    }

    fn peer_ended(socket: &Socket) -> bool {
        // Receiving that we have shut down ourselves looks like an end.
        let sends = [tcp::TCP_ESTABLISHED, tcp::TCP_FIN_WAIT1, tcp::TCP_FIN_WAIT2];
        tcp::counts(socket.fd()).is_ok_and(|counts| !sends.contains(&counts.state))
    }

    fn judge(socket: &Socket, end: &End, taken: i32) -> bool {
        let Some(outgoing) = socket.outgoing() else { return false };
        end.send_lock
            .try_take()
            .is_some_and(|_held| fin_by_death(socket, end, &outgoing, taken != 0))
    }

    fn classify(socket: &Socket, end: &End, found: Sys<usize>) -> Sys<usize> {
        match found {
            Err(Errno::ECONNRESET) if Self::judge(socket, end, libc::ECONNRESET) => Ok(0),
            other => other,
        }
    }

    /// If the peer ended without reading what we sent, TCP would have told us by a reset: so do we.
    fn end_of_stream(socket: &Socket, end: &End) -> Sys<Option<usize>> {
        let died_unread = |outgoing: &SegmentRing| {
            end.send_lock.try_take().is_some_and(|_held| died_unread(socket, end, outgoing))
        };
        if note_end(socket, end) < 2 && socket.outgoing().as_ref().is_some_and(died_unread) {
            return Err(reset_by_death(socket, end));
        }
        Ok(Some(0))
    }

    fn end_of_kernel(socket: &Socket, end: &End) -> Sys<Option<usize>> {
        match end.pending_error.swap(0) {
            0 => Self::end_of_stream(socket, end),
            error => Err(Errno(error as i32)),
        }
    }

    fn broken(_socket: &Socket, _end: &End) -> Option<Errno> {
        None
    }

    fn told_by_send(_socket: &Socket, _end: &End, _error: Errno) {}

    fn ends_in_ring(
        socket: &Socket,
        end: &End,
        ring: &SegmentRing,
        from: &mut Buffers,
    ) -> Sys<Option<usize>> {
        if ring.control().is_taken() {
            Self::died_unread(socket, end, ring)?;
        }
        Ok(Self::lost_by_death(socket, end, ring, from))
    }

    /// KERNEL: a first send to a peer that has ended in order still succeeds, and is lost; the next one fails.
    fn lost_by_death(
        socket: &Socket,
        end: &End,
        ring: &SegmentRing,
        from: &mut Buffers,
    ) -> Option<usize> {
        let lost = end.ended.get() < 2
            && end.bells_only.is()
            && end.shut.load(Ordering::Relaxed) == 0
            && (end.judged.is() || fin_by_death(socket, end, ring, false));
        if !lost {
            return None;
        }
        let bytes = from.take_all();
        if bytes > 0 {
            end.bells_only.set(0);
            end.sender.keep_out();
        }
        Some(bytes)
    }

    fn died_unread(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
        let died = end.ended.get() < 2 && kernel_says_end(socket) && died_unread(socket, end, ring);
        if died { Err(reset_by_death(socket, end)) } else { Ok(()) }
    }

    fn is_open_after_reset(socket: &Socket, end: &End) -> bool {
        let is_fin = |ring: &SegmentRing| fin_by_death(socket, end, ring, false);
        end.bells_only.is() && (end.judged.is() || socket.outgoing().as_ref().is_some_and(is_fin))
    }

    fn shown(socket: &Socket, end: &End, kernel: i16) -> i16 {
        let open = end.judged.is() && end.bells_only.is() && end.shut.load(Ordering::Relaxed) == 0;
        let shown = if open { kernel & !libc::POLLHUP } else { kernel };
        let reset = libc::POLLERR | libc::POLLHUP;
        // (A send or a receive takes it: `died_unread`, `end_of_stream`.)
        let is_reset = || {
            let _held = end.send_lock.try_take()?;
            Some(end.ended.get() < 2 && died_unread(socket, end, &socket.outgoing()?))
        };
        let ended_in_order = shown & (libc::POLLRDHUP | reset) == libc::POLLRDHUP;
        if ended_in_order && is_reset() == Some(true) { shown | reset } else { shown }
    }

    fn end_told(socket: &Socket, shut: u32, unread: bool) -> u32 {
        match shut {
            _ if tcp::resets_on_close(socket.fd()) => SHUT_UNREAD,
            SHUT => SHUT,
            _ if unread => SHUT_UNREAD,
            _ => SHUT_READ,
        }
    }

    fn exiting(_socket: &Socket) {}

    fn exiting_unsent(socket: &Socket, end: &End) {
        if let Ok([on, seconds]) = tcp::linger(socket.fd())
            && end.linger.get() == 0
        {
            end.linger.set(LINGER_KEPT | (on as u64) << 32 | u64::from(seconds as u32));
        }
        tcp::reset_on_close(socket.fd());
    }

    fn break_off(socket: &Socket) {
        tcp::disconnect(socket.fd());
    }
}

fn written(socket: &Socket) -> Sys<tcp::Written> {
    tcp::written(socket.fd(), !socket.side.is())
}

/// This place, if both measures agreed at an earlier `Start`, and it is what we have written ourselves since.
fn counted_place(socket: &Socket, end: &End, place: u64) -> Option<u64> {
    let counted = socket.outgoing()?.control().sender.written.load(Ordering::Relaxed);
    (!end.tx.is_new() && counted.checked_sub(1) == Some(place)).then_some(place)
}

/// Did the peer's end vanish (no orderly end) with bytes of ours unread? Send lock held.
fn died_unread(socket: &Socket, end: &End, outgoing: &SegmentRing) -> bool {
    let Some(incoming) = socket.incoming() else { return false };
    let orderly = incoming.control().sender.shut.load(Ordering::Acquire) == SHUT;
    end.sending() != Sending::Returning
        && !orderly
        && end.tx.outstanding_bytes(outgoing) > 0
        // KERNEL: receiving that we have shut down ourselves looks like an end.
        && Tcp::peer_ended(socket)
        // (What a dead adapter has not told of may be taken; and a peer that has severed itself from one that lives has ended in order by the kernel.)
        && !channel::is_orphan(socket)
        && !channel::is_told(socket)
}

/// What TCP would have said by a reset; the kernel's own connection, which saw an orderly end, is shut to match.
fn reset_by_death(socket: &Socket, end: &End) -> Errno {
    end.ended.set(2);
    end.sender.keep_out();
    let _ = tcp::shut_down(socket.fd(), libc::SHUT_RDWR);
    Errno::ECONNRESET
}

/// Once the peer has died, or closed while a doorbell of ours was under way: did it leave only doorbells unread? The kernel resets for them, where TCP would
/// have said FIN, and so do we from then on (`judged`). `taken`: the kernel's error was taken already. Send lock held.
fn fin_by_death(socket: &Socket, end: &End, outgoing: &SegmentRing, taken: bool) -> bool {
    let reset = libc::POLLERR | libc::POLLHUP;
    let Some(incoming) = socket.incoming() else { return false };
    let words = outgoing.control();
    // One that has closed with bytes unread, or wants a reset, says so.
    let meant = incoming.control().sender.shut.load(Ordering::Acquire) == SHUT_UNREAD;
    let all_taken = || {
        handover::all_taken(
            end.tx.outstanding_bytes(outgoing),
            end.tx.drained(outgoing),
            bells_put(end, outgoing),
            // ORDER: as in `Out::is_draining`.
            words.receiver.draining.load(Ordering::Acquire) != 0,
        )
    };
    if meant
        || peer_attached(socket) == 0
        || !end.bells_only.is()
        || !taken && fd::pending(socket.fd(), 0) & reset != reset
        || !all_taken()
        // By a reset that is lost, of which an orderly end would say nothing.
        || may_have_lost(socket, &incoming)
    {
        return false;
    }
    if !taken {
        let _ = tcp::take_error(socket.fd());
    }
    end.judged.set(1);
    end.ended.set(1);
    true
}
