//! What a kind of kernel connection has of its own. Where nothing else is said, the kind is a Unix stream.

use super::kernel::{
    has_unread, kernel_says_end, note_end, place_behind, receive_native, told_end,
};
use super::unix_stream;
use crate::reasons::Reason;
use crate::socket::table::{End, Socket, Stage, Tables};
use crate::socket::{channel, pin, words};
use ringlet_core::handover::{Incoming, Step};
use ringlet_core::memory::Buffers;
use ringlet_core::ring::SegmentRing;
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::tcp as kernel;
use ringlet_linux::unix::{self, FromKernel};

pub trait Carrier {
    // ---- whether it can be moved ----

    /// The two ends of a connection that may be moved; else why not, or that it is not yet known (`None`).
    fn ends(socket: &Socket, tables: &Tables) -> Result<Ends, Option<Reason>> {
        unix_stream::ends(socket, tables)
    }

    /// Do the kernel's counts name the places of the connection? Asked once, before it is attached.
    fn countable(_socket: &Socket) -> Result<(), Reason> {
        Ok(())
    }

    /// Is an option set whose meaning lies in the kernel's queues?
    fn has_unserved_option(socket: &Socket) -> bool {
        unix_stream::has_unserved_option(socket)
    }

    /// The connection is about to be shut down, perhaps before it is attached.
    fn shutting_down(socket: &Socket) {
        // A Unix connection moves whole, or not at all.
        if socket.stage() != Stage::Attached {
            pin::to_kernel(socket, Reason::Closing);
        }
    }

    /// The longest packet that the ring and the kernel take may have changed.
    fn limits_changed(_socket: &Socket, _end: &End) {}

    /// No doorbell waits for company, unless the connection is the kernel's again.
    fn tune(_socket: &Socket, _end: &End) {}

    // ---- places ----

    /// How much of our direction the kernel has got in all, if its measures of that agree.
    fn written_place(_socket: &Socket) -> Option<u64> {
        None
    }

    /// Bytes that it has sent and received, if the kernel tells.
    fn carried(_socket: &Socket) -> (usize, usize) {
        (0, 0)
    }

    /// The kernel's place from which on its bytes are doorbells; `None` if that can't be said now. Send lock held, and nobody is inside
    /// a native send.
    fn start_place(socket: &Socket, end: &End) -> Option<u64> {
        if unix::untaken(socket.fd()) != Ok(0) {
            return None;
        }
        end.refused_starts.set(0);
        Some(0)
    }

    /// A sender whose bytes are always under way finds no moment to enter the ring: waits, seldom, until the peer has taken all. Send lock
    /// held.
    fn await_start(socket: &Socket, end: &End) -> bool {
        unix_stream::await_taken(socket, end)
    }

    /// The kernel's place where the stream goes on there: no doorbell follows. ERANGE: the kernel has taken more or less than our doorbells
    /// since the `Start`. Send lock held.
    fn back_place(_socket: &Socket, end: &End, bells: u64) -> Sys<u64> {
        Ok(place_behind(end, bells))
    }

    /// The same once the adapter has died, which has put so many doorbells there, or one more. Send lock held.
    fn orphaned_place(_socket: &Socket, end: &End, bells: u64) -> Sys<u64> {
        Ok(place_behind(end, bells))
    }

    /// Where place 0 of the peer's marks lies in our count, if its `Start` is met now.
    fn base(_socket: &Socket, start: u64, taken: u64) -> u64 {
        // All that was sent before was taken.
        taken.wrapping_sub(start)
    }

    /// The kernel's place up to which all is taken: of a Unix connection, counted from the first time that it is asked for. (Counted by us from
    /// then on, since a closed connection no longer tells whether its end was counted.)
    fn taken(socket: &Socket, end: &End) -> Sys<u64> {
        if let Some(taken) = end.receiver.taken() {
            return Ok(taken);
        }
        let before = Self::taken_before(socket)?;
        end.receiver.begin_count(before);
        Ok(before)
    }

    /// The peer is about to be told that it may send by the ring: what is taken is counted from now on, if it has to be. False if that can't be
    /// said now. Receive lock held.
    ///
    /// WHY: later there may be an urgent byte. KERNEL: a receive passes it without a count, and so does the arrival of another one.
    fn begin_count(_socket: &Socket, _end: &End) -> bool {
        true
    }

    /// What was taken before we count.
    fn taken_before(_socket: &Socket) -> Sys<u64> {
        Ok(0)
    }

    /// The kernel's place up to which all has arrived, in the count of `taken`. Grows while nobody receives (packets: while some bytes come).
    fn received(socket: &Socket, end: &End) -> Sys<u64> {
        Ok(Self::taken(socket, end)? + kernel::unread(socket.fd())? as u64)
    }

    /// Nothing waits in the kernel. Was all that came by it taken by calls that count?
    fn has_counted_all(_socket: &Socket, _end: &End) -> bool {
        true
    }

    /// What we have sent through the kernel, and the peer has not taken, as far as a Unix connection tells.
    fn untaken(socket: &Socket) -> Sys<usize> {
        unix::untaken(socket.fd())
    }

    /// What the kernel has still to bring to the other end's queue.
    fn undelivered(_socket: &Socket) -> usize {
        0
    }

    // ---- receiving and sending by the kernel ----

    /// From the kernel, before the peer has moved its direction. In this order: count what waits in the kernel, then look for the
    /// peer's mark; only bytes that were counted before no mark was there are known to be data.
    fn receive_kernel(
        socket: &Socket,
        end: &End,
        side: &impl Incoming<Error = Errno>,
        to: &mut Buffers,
        flags: i32,
        from: &mut FromKernel,
    ) -> Sys<Option<usize>> {
        let waiting = kernel::unread(socket.fd())?;
        match side.follow(false, waiting as u64)? {
            None => return Ok(None),
            Some(Step::Read(n)) => {
                return receive_native(socket, end, to, n as usize, flags, from).map(Some);
            }
            Some(_) => {}
        }
        let news = socket.kernel_news.number();
        let peeked =
            kernel::receive_into(socket.fd(), &mut [0; 1], libc::MSG_PEEK | libc::MSG_DONTWAIT);
        match Self::classify(socket, end, peeked) {
            Ok(0) if side.follow(true, 0)?.is_none() => Ok(None),
            Ok(0) => {
                channel::is_cut_short(socket, Self::peer_ended);
                Self::end_of_kernel(socket, end)
            }
            // KERNEL: at the urgent mark nothing counts as waiting, though data may follow. (Who sends urgent data enters the ring no more.)
            Ok(_) if kernel::unread(socket.fd())? == 0 => {
                receive_native(socket, end, to, usize::MAX, flags, from).map(Some)
            }
            Ok(_) => Ok(None),
            Err(error) => {
                socket.kernel_news.nothing_since(news);
                Err(error)
            }
        }
    }

    /// Waits more in the kernel that one receive would take together? KERNEL: a Unix one goes no further than the urgent byte, and drops that if
    /// it begins there.
    fn goes_on(socket: &Socket) -> bool {
        has_unread(socket) && !unix::at_mark(socket.fd())
    }

    /// Sends again, through the kernel, what the receiver has left unread behind the first `used` bytes of the oldest record; how much of it.
    /// Send lock held.
    fn send_again(socket: &Socket, end: &End, ring: &SegmentRing, used: u64) -> Sys<u64> {
        let mut piece = [0u8; 2048];
        match end.tx.oldest(ring, used as usize, &mut piece) {
            [] => {
                end.resent_at.set(0);
                Ok(0)
            }
            bytes => {
                if let sent @ 1.. = Self::resent_by_the_dead(socket, end, used, bytes.len() as u64)
                {
                    return Ok(sent);
                }
                words::sends_uncounted(end, ring);
                let sent = kernel::send_from(socket.fd(), bytes, libc::MSG_DONTWAIT);
                if sent.is_err() {
                    end.resent_at.set(0);
                }
                sent.map(|n| n as u64)
            }
        }
    }

    /// A process that shares the end may have been killed between a send and its note: how much of what follows the first `used` bytes of the
    /// oldest record (at `most`) has the kernel got already? If none, one is under way from now on. (A Unix connection does not tell.)
    fn resent_by_the_dead(_socket: &Socket, _end: &End, _used: u64, _most: u64) -> u64 {
        0
    }

    // ---- ends ----

    /// Has the peer's end of the connection finished, as far as the kernel knows?
    fn peer_ended(socket: &Socket) -> bool {
        kernel_says_end(socket)
    }

    /// The kernel may say that the connection is over; `taken` is an error that was just taken from it. True if that is accounted for, and not
    /// what the program is to be told.
    fn judge(socket: &Socket, end: &End, taken: i32) -> bool {
        unix_stream::judge(socket, end, taken)
    }

    /// What a look has found in the kernel, with an end or reset as the program is to see it.
    fn classify(socket: &Socket, end: &End, found: Sys<usize>) -> Sys<usize> {
        match found {
            Ok(0) | Err(Errno::ECONNRESET) => {
                Self::judge(socket, end, found.err().map_or(0, |error| error.0));
                Ok(0)
            }
            other => other,
        }
    }

    /// The kernel has said that no more bytes come, and the ring is empty: the end of the stream, or the error that it ends with.
    fn end_of_stream(socket: &Socket, end: &End) -> Sys<Option<usize>> {
        note_end(socket, end);
        told_end(end)
    }

    /// The same where the ring was not in use.
    fn end_of_kernel(_socket: &Socket, end: &End) -> Sys<Option<usize>> {
        told_end(end)
    }

    /// KERNEL: a send on a Unix connection that waits while the peer closes with bytes unread takes the error, and raises no signal.
    fn broken(socket: &Socket, end: &End) -> Option<Errno> {
        Self::judge(socket, end, 0);
        let error = end.pending_error.swap(0);
        (error != 0).then_some(Errno(error as i32))
    }

    /// A send through the kernel has taken this error. What it says of the connection's end (`judge`) is told with that.
    fn told_by_send(socket: &Socket, end: &End, error: Errno) {
        if error == Errno::ECONNRESET && Self::judge(socket, end, error.0) {
            end.pending_error.set(0);
        }
    }

    /// The peer seems to have ended, so that our direction is about to go back: an error, or how much the send has lost by it. Send lock held.
    fn ends_in_ring(
        socket: &Socket,
        end: &End,
        _ring: &SegmentRing,
        _from: &mut Buffers,
    ) -> Sys<Option<usize>> {
        Self::judge(socket, end, 0);
        Ok(None)
    }

    /// Before a send through the kernel: how much of it is lost, since the peer died with doorbells unread? Send lock held.
    fn lost_by_death(
        _socket: &Socket,
        _end: &End,
        _ring: &SegmentRing,
        _from: &mut Buffers,
    ) -> Option<usize> {
        None
    }

    /// Before our direction steps aside: has the peer died with bytes of ours unread? Send lock held.
    fn died_unread(_socket: &Socket, _end: &End, _ring: &SegmentRing) -> Sys<()> {
        Ok(())
    }

    /// The kernel's connection is over by a reset: does the program see it as open our way?
    fn is_open_after_reset(_socket: &Socket, _end: &End) -> bool {
        false
    }

    /// What poll is to say of what the kernel says.
    fn shown(_socket: &Socket, _end: &End, kernel: i16) -> i16 {
        kernel
    }

    /// How a close is told to the peer; `shut`: what was told before.
    fn end_told(_socket: &Socket, _shut: u32, unread: bool) -> u32 {
        unix_stream::end_told(unread)
    }

    /// The process is about to end by itself, and nobody else holds this end.
    fn exiting(socket: &Socket) {
        unix_stream::exiting(socket)
    }

    /// The same, with some left that is to be sent again. Send lock held.
    fn exiting_unsent(_socket: &Socket, _end: &End) {}

    /// What the connection still held is lost: whoever reads from it gets an error, not an orderly end.
    fn break_off(socket: &Socket) {
        unix_stream::break_off(socket)
    }
}

pub struct UnixStream;

impl Carrier for UnixStream {}
