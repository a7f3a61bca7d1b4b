//! An aid for tests (key `unforgiving`): connections are moved as soon as they exist, and from then on change between kernel and
//! ring at random bytes, so that a few calls meet what is rare otherwise. What the program sees must be the same.
//!
//! A send is cut at random places, but for packets, with a change of path between the pieces. Because the kernel shows a small send to its
//! receiver as a whole, so do we: the sender counts in shared memory when it begins and ends to cut, and a receiver that has met pieces waits a
//! moment for the rest.
//!
//! Datagrams change their way too, lanes end for no reason, and a sender takes so long within a send that its receiver gives it up.
//!
//! It lies around what it disturbs: a call (`call`), a step of a rendezvous (`step`), a send (`send`), a receive (`Met`, `receive`), a look
//! (`of_whole_sends`). What is inside does not ask whether it is on.

use super::in_use;
use super::table::{End, Receiving, Sending, Socket, Stage, tables};
use super::{carrier, moving, sides, view, words};
use crate::interconnect::{Interconnect, mirrored};
use crate::reasons::Reason;
use ringlet_core::leaving::Leaving;
use ringlet_core::memory::Buffers;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::unix::FromKernel;
use ringlet_linux::{fd, tcp, unix};

/// How long a new connection waits, in all, for its other end to come to the rendezvous.
const MOMENT_NS: u64 = 20_000_000;
const LOOK_NS: u64 = 200_000;
/// How long a receiver waits for the rest of a send (whose sender may have been killed).
const PIECES_NS: u64 = 20_000_000;
/// Looks for the rest of sends, by one receive.
const ROUNDS_MAX: u32 = 64;
/// KERNEL: each piece costs a Unix socket a buffer of its own; beyond so much a small send might not find room as a whole.
const UNTAKEN_MOST: usize = 64 << 10;
/// One in so many calls sends the connection back for good.
const RETURN_ONE_IN: u64 = 128;
/// In so many datagrams, one closes lanes, and one takes so long that its receiver does not wait for it.
const LANES_ONE_IN: u64 = 256;
const DAWDLE_NS: u64 = 3_000_000;

/// The state of the generator; 0 is off.
static STATE: AtomicU64 = AtomicU64::new(0);

pub fn start(seed: u64) {
    STATE.store(seed << 32, Ordering::Relaxed);
}

#[inline(always)]
pub fn on() -> bool {
    STATE.load(Ordering::Relaxed) != 0
}

/// A number below `limit` (splitmix64; several threads may draw).
fn below(limit: u64) -> u64 {
    let drawn = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    let mixed = (drawn ^ drawn >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ mixed >> 31) % limit
}

fn one_in(count: u64) -> bool {
    below(count) == 0
}

/// The call at which something is due that is otherwise due at this one.
pub fn due(call: u32) -> u32 {
    if on() { 0 } else { call }
}

/// A step of the rendezvous is due. Called with no lock held.
#[cold]
pub fn step(socket: &'static Socket, step: fn(&'static Socket)) {
    if on() { meet_now(socket, step) } else { step(socket) }
}

/// A call of the program's on an attached connection begins. No lock is held.
#[inline(always)]
pub fn call(socket: &Socket) {
    if on() {
        perhaps_return(socket);
    }
}

/// Takes all steps of the rendezvous that can be taken within a moment; those of the far end too, if it is ours. (That it may use the ring
/// each end is told by the first call of the other's, as always: a program that only hands a connection on never has anything unread there.)
pub fn meet_now(socket: &'static Socket, step: fn(&'static Socket)) {
    loop {
        let before = socket.stage();
        step(socket);
        let far = far_end(socket);
        if let Some(far) = far {
            step(far);
        }
        match socket.stage() {
            stage if stage.may_move() => {}
            _ => return,
        }
        let waited = sys::now_ns().saturating_sub(socket.first_step_ns.get());
        if waited > MOMENT_NS {
            return;
        }
        if socket.stage() == before {
            let _ = fd::poll(&mut [], Some(LOOK_NS), None);
        }
    }
}

/// The other end, if it is a socket of this process.
fn far_end(socket: &Socket) -> Option<&'static Socket> {
    let tables = tables()?;
    let ends = carrier::ends(socket, tables).ok()?;
    let waits = |far: &Socket| far.stage() != Stage::Closing && far.next_step.get() != u32::MAX;
    let is_far = |far: &Socket| match &ends {
        Ends::Tcp(ends) => tcp::ends(far.fd())
            .is_some_and(|far| far.local == ends.remote && far.remote == ends.local),
        Ends::Unix(ends) => unix::inode(far.fd()) == Ok(ends.remote),
    };
    tables.followed().find(|far| waits(far) && is_far(far))
}

/// Does a datagram go through the kernel, though there is a lane?
pub fn by_kernel() -> bool {
    on() && one_in(3)
}

/// Does a receiver of datagrams close its lanes, for no reason?
pub fn closes_lanes() -> bool {
    on() && one_in(LANES_ONE_IN)
}

/// The sender of a datagram takes its time, and its receiver may give it up meanwhile.
pub fn dawdle() {
    if on() && one_in(LANES_ONE_IN) {
        let _ = fd::poll(&mut [], Some(DAWDLE_NS), None);
    }
}

/// Sends the connection back to the kernel for good, once in a while.
#[cold]
fn perhaps_return(socket: &Socket) {
    let end = socket.end();
    let moved = end.sending() == Sending::Ring && end.receiving() == Receiving::Ring;
    if moved
        && !end.ended.is()
        && one_in(RETURN_ONE_IN)
        && let Some(_in_use) = in_use::in_use(socket)
    {
        let _ = moving::return_to_kernel(socket, Reason::Unforgiving);
        if let Some(far) = far_end(socket).filter(|far| far.stage() == Stage::Attached) {
            sides::answer_return(far, far.end());
        }
    }
}

/// A send, which `send` does; in pieces. Send lock held.
#[inline(always)]
pub fn send<'b>(
    socket: &Socket,
    end: &End,
    from: &mut Buffers<'b>,
    flags: i32,
    send: impl Fn(&mut Buffers<'b>, i32) -> Sys<usize>,
) -> Sys<usize> {
    if on() { send_cut(socket, end, from, flags, &send) } else { send(from, flags) }
}

type Send<'s, 'b> = &'s dyn Fn(&mut Buffers<'b>, i32) -> Sys<usize>;

#[cold]
fn send_cut<'b>(
    socket: &Socket,
    end: &End,
    from: &mut Buffers<'b>,
    flags: i32,
    send: Send<'_, 'b>,
) -> Sys<usize> {
    let Some(ring) = socket.outgoing() else { return Err(Errno::EBADF) };
    let cutting = &ring.control().sender.cutting;
    let sent = send_pieces(socket, end, &ring, from, flags, send);
    if !cutting.load(Ordering::Relaxed).is_multiple_of(2) {
        // ORDER: SeqCst; pairs with `pieces_of`: who sees the end sees all pieces.
        cutting.fetch_add(1, Ordering::SeqCst);
        mirrored::said(socket);
    }
    sent
}

/// Before the first piece that is not the whole.
fn begin_to_cut(socket: &Socket, ring: &SegmentRing) {
    let cutting = &ring.control().sender.cutting;
    if cutting.load(Ordering::Relaxed).is_multiple_of(2) {
        // ORDER: SeqCst; pairs with `pieces_of`: who sees a piece sees that it was begun.
        cutting.fetch_add(1, Ordering::SeqCst);
        if socket.interconnect() == Interconnect::Mirrored {
            mirrored::flush(socket, ring);
        }
    }
}

fn send_pieces<'b>(
    socket: &Socket,
    end: &End,
    ring: &SegmentRing,
    from: &mut Buffers<'b>,
    flags: i32,
    send: Send<'_, 'b>,
) -> Sys<usize> {
    let (mut total, mut flags) = (0, flags);
    loop {
        perhaps_go_back(socket, end, ring);
        let whole = from.remaining();
        // On the kernel for good pieces might wait for each other (TCP_NODELAY is the program's again). To an end that is closed only
        // the first succeeds. One that is not yet attached would not wait for the rest; nor would one that wants all from the kernel,
        // where each piece has credentials of its own.
        let cut = flags & !carrier::MSG_SERVED == 0
            && !carrier::facts(socket).has_boundaries
            && words::peer_attached(socket) != 0
            && matches!(end.sending(), Sending::Kernel | Sending::Ring)
            && !end.barred.is()
            && !words::has_left(ring)
            && !view::is_away(socket, end, ring)
            && !carrier::kernel_says_end(socket)
            && carrier::untaken(socket).is_ok_and(|n| n <= UNTAKEN_MOST);
        let piece = match whole {
            2.. if cut && !one_in(3) => 1 + below(whole.min(1 << below(17)) as u64) as usize,
            _ => whole,
        };
        if piece < whole {
            begin_to_cut(socket, ring);
        }
        from.limit(piece);
        let sent = send(from, flags);
        from.allow(whole - piece);
        match sent {
            Ok(n) => total += n,
            // The peer has closed when it had the first pieces: the kernel would have taken the whole before.
            Err(error @ (Errno::EPIPE | Errno::ECONNRESET))
                if total > 0 && end.shut.load(Ordering::Relaxed) == 0 =>
            {
                words::tell_later(end, error);
                return Ok(total + whole);
            }
            Err(error) if total > 0 => {
                words::tell_later(end, error);
                return Ok(total);
            }
            Err(error) => return Err(error),
        }
        if from.remaining() == 0 || sent != Ok(piece) {
            return Ok(total);
        }
        flags |= libc::MSG_NOSIGNAL;
    }
}

/// Sends this direction back to the kernel for a while, by chance; `send` takes it to the ring again.
fn perhaps_go_back(socket: &Socket, end: &End, ring: &SegmentRing) {
    let free = end.sending() == Sending::Ring && !end.ended.is() && ring.control().is_taken();
    if free && one_in(3) {
        moving::go_back(socket, end, ring, Sending::Kernel, Reason::Unforgiving);
    }
}

/// Of the peer's sends, those that a receive has met.
pub struct Met(Option<u32>);

impl Met {
    #[inline(always)]
    pub fn begin(socket: &Socket) -> Met {
        Met(on().then(|| pieces_now(socket)))
    }

    /// It finds nothing: in the middle of a send, whose beginning an earlier call may have taken?
    #[inline(always)]
    pub fn goes_on(&mut self, socket: &Socket) -> bool {
        let goes_on = self.0.is_some_and(|before| before != whole(socket));
        if goes_on {
            self.0 = Some(pieces_now(socket));
        }
        goes_on
    }
}

/// What a receive finds by `look`, and by `rest` what follows of the sends whose pieces it has met.
#[inline(always)]
pub fn receive<'b, 'm>(
    ring: &SegmentRing,
    flags: i32,
    (to, from): (&mut Buffers<'b>, &mut FromKernel<'m>),
    look: impl FnOnce(&mut Buffers<'b>, &mut FromKernel<'m>) -> Sys<usize>,
    rest: impl Fn(&mut Buffers<'b>, &mut FromKernel<'m>) -> usize,
) -> Sys<usize> {
    let peeks = flags & libc::MSG_PEEK != 0;
    if peeks {
        await_whole(ring);
    }
    let (mut total, mut pieces) = (look(to, from)?, None);
    for _ in 0..if peeks || total == 0 || !on() { 0 } else { ROUNDS_MAX } {
        if to.remaining() == 0 || from.control_bytes != 0 {
            break;
        }
        total += rest(to, from);
        let now = Some(pieces_of(ring));
        if pieces == now {
            break;
        }
        pieces = now;
    }
    Ok(total)
}

/// Before bytes are counted that can be received.
#[inline(always)]
pub fn await_whole(ring: &SegmentRing) {
    if on() {
        pieces_of(ring);
    }
}

/// What `look` finds while the peer is not within a send: the other pieces of one that has begun are no news of their own.
#[inline(always)]
pub fn of_whole_sends<T>(socket: &Socket, look: impl Fn() -> T) -> T {
    if !on() {
        return look();
    }
    let mut pieces = whole(socket);
    loop {
        let found = look();
        let now = whole(socket);
        if pieces == now {
            return found;
        }
        pieces = now;
    }
}

/// Waits until the peer is not within a send; as `pieces_of`.
fn whole(socket: &Socket) -> u32 {
    socket.incoming().map_or(0, |ring| pieces_of(&ring))
}

/// The peer's count of begun and ended sends, as it is now.
fn pieces_now(socket: &Socket) -> u32 {
    socket.incoming().map_or(0, |ring| ring.control().sender.cutting.load(Ordering::SeqCst))
}

/// Waits until the sender is not within a send; its count, to be compared after all was received.
fn pieces_of(ring: &SegmentRing) -> u32 {
    let until = sys::now_ns() + PIECES_NS;
    loop {
        let count = ring.control().sender.cutting.load(Ordering::SeqCst);
        if count.is_multiple_of(2) || sys::now_ns() > until {
            return count;
        }
        sys::sched_yield();
    }
}
