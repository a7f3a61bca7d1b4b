//! What the protocol of `ringlet_core::handover` finds around the two directions of an attached connection: the kernel's connection (through
//! `carrier`), the ring, the family's other threads, and the peer's words. Beside it what wakes the peer, and may start a direction for that.

use super::epoll::registration::{receiving_changed, sending_changed, watched_by_sleepers};
use super::patience::{self, await_none, wait_patiently};
use super::table::{End, Receiving, Sending, Socket, tables};
use super::words::{self, note_written, peer_attached};
use super::{boards, carrier, channel, context, lease, orphan, view};
use crate::interconnect::{Interconnect, mirrored, sever};
use crate::reasons::Reason;
use ringlet_core::bells;
use ringlet_core::handover::{Fault, Head, Incoming, Outgoing, Receiver, Seen, Sender};
use ringlet_core::layout::{Control, NOT_SHUT, SHUT, WANT_BYTE, WANT_EVENT, WANT_READY};
use ringlet_core::leaving::Leaving;
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Mark, SegmentRing};
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::tcp;

/// Looks at a word of the peer's in a row: some microseconds.
const QUICK_LOOKS: u32 = 200;

/// A sending direction. Send lock held, but to ring.
pub struct Out<'a> {
    pub socket: &'a Socket,
    pub end: &'a End,
    pub ring: &'a SegmentRing,
    /// Why it goes back.
    pub reason: Reason,
}

impl Out<'_> {
    fn is_mirrored(&self) -> bool {
        self.socket.interconnect() == Interconnect::Mirrored
    }

    /// See `orphan::flush`.
    pub fn flush(&self, unsure: bool) {
        orphan::flush(self.socket, self.end, self.ring, unsure);
    }
}

impl Outgoing for Out<'_> {
    type Error = Errno;
    type Words = Control;

    fn sender(&self) -> &Sender {
        crate::step!();
        &self.end.sender
    }

    fn words(&self) -> &Control {
        crate::step!();
        self.ring.control()
    }

    fn drained(&self) -> bool {
        self.end.tx.drained(self.ring)
    }

    fn outstanding(&self) -> usize {
        self.end.tx.outstanding_bytes(self.ring)
    }

    fn push_mark(&self, mark: Mark) -> bool {
        if let Mark::Back(place) = mark {
            words::nothing_urgent(self.ring);
            self.end.back_at.set(place + 1);
        }
        self.end.tx.push_mark(self.ring, mark)
    }

    fn take_credit(&self) {
        self.end.tx.take_credit(self.ring);
    }

    fn pass_oldest(&self) -> bool {
        self.end.tx.pass_oldest(self.ring)
    }

    fn restart_bells(&self) {
        if self.is_mirrored() {
            // (The adapter counts anew at the mark.)
            return self.words().allow_bells();
        }
        // ORDER: Relaxed; who reads it has seen the mark.
        self.words().sender.bells.store(0, Ordering::Relaxed);
        self.end.bell_lost.set(0);
    }

    fn bells(&self) -> u64 {
        words::bells_put(self.end, self.ring)
    }

    fn back_place(&self) -> Sys<u64> {
        let (socket, end) = (self.socket, self.end);
        let place =
            carrier::back_place(socket, end, self.bells()).map_err(|error| match error {
                Errno::ERANGE | Errno::EAGAIN => patience::miscounted(socket),
                error => error,
            })?;
        words::note_written(self.ring, place);
        Ok(place)
    }

    fn send_again(&self, used: u64) -> Sys<u64> {
        let (socket, end, ring) = (self.socket, self.end, self.ring);
        let again = || carrier::send_again(socket, end, ring, used);
        let sent = orphan::send_gap(socket, end).and_then(|()| again());
        if sent == Err(Errno::EAGAIN) {
            // Sleepers are woken when there is room.
            sending_changed(socket);
        }
        sent
    }

    fn put_bell(&self) {
        if self.is_mirrored() {
            self.words().ask_byte();
            return mirrored::stir(self.socket);
        }
        // (Whoever counts on the number has waited for us, by `begin_bell` or `Leaving::work`.)
        let send = || tcp::ring_byte(self.socket.fd());
        if !bells::ring(&self.words().sender.bells, send) {
            self.end.bell_lost.set(1);
        }
    }

    fn begin_bell(&self) {
        self.end.ringers.begin();
    }

    fn end_bell(&self) {
        self.end.ringers.end();
    }

    /// An error if one stays under way (a thread or process of ours was stopped or killed in the middle of it), or the peer stays in the middle of
    /// taking one that did not go.
    fn await_bells(&self) -> Sys<()> {
        // ORDER: a fence behind the path; pairs with `Ringers::begin`: who is not seen here sees that.
        fence(Ordering::SeqCst);
        let taking = &self.words().receiver.taking;
        if self.is_mirrored() {
            let silent = await_none(&self.end.ringers) && mirrored::silence(self.socket, self.ring);
            if !silent && channel::is_orphan(self.socket) {
                // Nothing was said or sent that counts on it: our direction is where it was (`orphan::go_back` follows).
                self.end.sender.turn_to(Sending::Ring);
                return Err(Errno::ECONNRESET);
            }
            return if silent { Ok(()) } else { Err(patience::corrupt(self.socket)) };
        }
        let quiet = await_none(&self.end.ringers)
            && (!self.end.bell_lost.is() || wait_patiently(|| bells::nobody_takes(taking)));
        if quiet { Ok(()) } else { Err(patience::corrupt(self.socket)) }
    }

    fn is_draining(&self) -> bool {
        // ORDER: Acquire, after the credit; pairs with `say_draining`.
        self.words().receiver.draining.load(Ordering::Acquire) != 0
    }

    fn went_back(&self) {
        self.flush(true);
        sending_changed(self.socket);
        view::count_return(self.socket, self.reason);
        view::show(self.socket, self.reason);
    }

    fn returns(&self) {
        self.flush(true);
        view::count_return(self.socket, Reason::Asked);
        view::show(self.socket, Reason::Asked);
    }

    fn has_returned(&self) {
        let (socket, end) = (self.socket, self.end);
        // (Whoever has the descriptor beside us sends what we do not see.)
        if !end.given.is() && (!end.barred.is() || words::still_reads_on(end)) {
            measure_written(socket, end, self.ring);
        }
        words::linger_again(socket, end);
        sending_changed(socket);
        if end.shut_later.swap(0) != 0 {
            words::say_end(self.ring, SHUT);
            // (Its word comes before what the kernel says.)
            self.flush(false);
            let _ = tcp::shut_down(socket.fd(), libc::SHUT_WR);
        }
    }

    fn gives_up(&self) -> Errno {
        patience::corrupt(self.socket)
    }
}

/// A receiving direction. Receive lock held.
pub struct In<'a> {
    pub socket: &'a Socket,
    pub end: &'a End,
    pub ring: &'a SegmentRing,
}

impl In<'_> {
    fn is_mirrored(&self) -> bool {
        self.socket.interconnect() == Interconnect::Mirrored
    }

    /// May somebody take from the kernel's connection who knows nothing of rings?
    fn is_shared(&self) -> bool {
        let left = self.end.receiver.has_left() && !words::still_reads_on(self.end);
        self.end.given.is() || left
    }

    /// Does an urgent byte stand behind so many doorbells more, which the program does not want among the data?
    fn urgent_behind(&self, doorbells: u64) -> bool {
        // ORDER: Relaxed; who finds a second urgent byte in the kernel reads it behind the kernel's lock, under which that was put there
        // (`words::say_urgent`).
        let place = self.words().sender.urgent_behind.load(Ordering::Relaxed);
        place != 0
            && !carrier::facts(self.socket).has_messages
            && self.end.receiver.taken().map(|taken| taken + doorbells)
                == self.end.receiver.goes_on_at(Mark::Back(place - 1))
            && tcp::int_option(self.socket.fd(), libc::SOL_SOCKET, libc::SO_OOBINLINE) == Ok(0)
    }
}

impl Incoming for In<'_> {
    type Error = Errno;
    type Words = Control;

    fn receiver(&self) -> &Receiver {
        crate::step!();
        &self.end.receiver
    }

    fn words(&self) -> &Control {
        crate::step!();
        self.ring.control()
    }

    fn head(&self) -> Head {
        let rx = &self.end.rx;
        if self.end.receiver.has_left() {
            orphan::heed_left(self.socket, self.end, self.ring);
        }
        if !rx.ready(self.ring) && !orphan::heed(self.socket, self.end, self.ring) {
            return Head::Empty;
        }
        match rx.mark(self.ring) {
            Some(mark) => Head::Mark(mark),
            None if rx.has_bytes(self.ring) => Head::Bytes,
            None => Head::Spoiled,
        }
    }

    fn mark_ahead(&self) -> Option<Mark> {
        self.end.rx.mark_ahead(self.ring)
    }

    fn used(&self) -> u64 {
        self.end.rx.used()
    }

    fn skip(&self, bytes: u64) -> bool {
        // (Who has the descriptor beside us may have taken some.)
        !self.is_shared()
            && carrier::has_counted_all(self.socket, self.end)
            && self.end.rx.skip(self.ring, bytes)
    }

    fn pass_mark(&self, wakes: bool) {
        let is_back = matches!(self.end.rx.mark(self.ring), Some(Mark::Back(_)));
        // (Over a mirror the adapter's bytes would come between those that tell where urgent ones are.)
        if is_back && !self.is_mirrored() && others_wait(self.socket, self.end, 0) {
            // Before the peer hears of it, and may send by the ring again: who sleeps may have been rung by a byte that is thrown away here.
            self.ring.control().data_wish().want(WANT_BYTE);
        }
        if self.end.rx.pass_mark(self.ring) && wakes {
            wake_sender(self.socket, self.ring);
        }
    }

    fn taken(&self) -> Sys<u64> {
        carrier::taken(self.socket, self.end)
    }

    fn base(&self, start: u64, taken: u64) -> u64 {
        carrier::base(self.socket, start, taken)
    }

    fn throw_away(&self, most: u64) -> Sys<u64> {
        let fd = self.socket.fd();
        let mut bells = [0u8; 1024];
        let n = most.min(bells.len() as u64) as usize;
        let urgent = n as u64 == most && n < bells.len() && self.urgent_behind(most);
        // KERNEL: what is taken moves the place from which SO_PEEK_OFF looks. Doorbells were never before it.
        let peeks_from = tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF);
        // (Among them may be packets that we have had, `orphan`: longer ones, which count whole, and empty ones, which count too.)
        let packets = carrier::facts(self.socket).has_boundaries;
        let length = if packets { libc::MSG_TRUNC } else { 0 };
        // KERNEL: an urgent byte that stands next is passed without a look as another one comes; not behind doorbells that nobody has taken. A receive
        // ends before one that was not taken over, so that no byte of the stream goes with it.
        let taken =
            tcp::receive_into(fd, &mut bells[..n + urgent as usize], libc::MSG_DONTWAIT | length)
                .map(|taken| taken.min(n));
        let empty = packets && taken == Ok(0) && !carrier::peer_ended(self.socket);
        if let Ok(from @ 0..) = peeks_from {
            tcp::peek_from(fd, from);
        }
        taken.map(|n| n as u64 + empty as u64)
    }

    /// KERNEL: a receive that we have shut down ourselves says that no more bytes come, until the next ones do: that is no end.
    fn is_over(&self) -> bool {
        // In this order: what came before the peer's end is there.
        !self.is_shared()
            && carrier::peer_ended(self.socket)
            && tcp::unread(self.socket.fd()) == Ok(0)
    }

    fn bells(&self) -> u64 {
        // ORDER: Relaxed; the sender was seen not to be at work.
        self.words().sender.bells.load(Ordering::Relaxed)
    }

    fn has_ended(&self) -> bool {
        // ORDER: Acquire; pairs with `words::say_end`, before which the sender answers.
        let says_so = self.words().sender.shut.load(Ordering::Acquire) != NOT_SHUT;
        says_so || carrier::peer_ended(self.socket)
    }

    fn say_draining(&self, draining: bool) {
        // ORDER: Release; pairs with `Out::is_draining`. (Of a start, the release of its mark follows.)
        self.words().receiver.draining.store(draining as u32, Ordering::Release);
    }

    fn ask_back(&self) {
        // ORDER: as in `control::notice`.
        self.words().receiver.keep_out.store(1, Ordering::SeqCst);
        mirrored::said(self.socket);
    }

    /// The peer may say for ever that it is at work: some quick looks, and no wait.
    fn is_quiet(&self) -> bool {
        if self.is_mirrored() {
            // (The adapter answers.)
            return mirrored::answered(self.socket, || self.words().is_echoed())
                && self.words().is_quiet_beyond();
        }
        (0..QUICK_LOOKS).any(|_| {
            core::hint::spin_loop();
            self.words().is_quiet()
        })
    }

    fn await_quiet(&self) -> bool {
        self.is_quiet() || wait_patiently(|| self.is_quiet())
    }

    fn is_cut_off(&self) -> bool {
        self.is_mirrored() && sever::has_died(self.socket)
    }

    fn turned(&self) {
        receiving_turned(self.socket, self.end);
    }

    fn fails(&self, fault: Fault) -> Errno {
        match fault {
            Fault::Corrupt => patience::corrupt(self.socket),
            Fault::Miscounted => patience::miscounted(self.socket),
        }
    }
}

pub fn out<'a>(socket: &'a Socket, end: &'a End, ring: &'a SegmentRing, reason: Reason) -> Out<'a> {
    Out { socket, end, ring, reason }
}

pub fn incoming<'a>(socket: &'a Socket, end: &'a End, ring: &'a SegmentRing) -> In<'a> {
    In { socket, end, ring }
}

/// Moves our direction into the ring, if it is not there, the peer is at home there and nobody is inside a native send. Send lock held: who
/// looked without it whether this is to be done may find it done.
pub fn try_start(socket: &Socket, end: &End, ring: &SegmentRing) {
    let ready = end.sending() == Sending::Kernel
        && peer_attached(socket) != 0
        && end.native_senders.load(Ordering::SeqCst) == 0
        && end.ended.get() == 0
        && !end.barred.is()
        && !view::is_away(socket, end, ring)
        && ring.control().is_taken()
        && end.tx.drained(ring)
        && lease::holds(socket, end);
    if !ready {
        return;
    }
    let Some(place) = carrier::start_place(socket, end) else { return };
    if end.tx.is_new() {
        note_move(socket);
    }
    note_written(ring, place);
    if out(socket, end, ring, Reason::None).start(place) {
        end.bells_only.set(1);
        sending_changed(socket);
        show_path(socket, end);
        wake_receiver(socket, ring);
    }
}

/// For tests: an end uses the ring for the first time.
#[cold]
fn note_move(socket: &Socket) {
    if let Some(tables) = tables() {
        let how: &[u8] = match socket.interconnect() {
            Interconnect::Local => b"moved\n",
            Interconnect::Mirrored => b"mirrored\n",
        };
        super::note::note(&tables.config.moves, how);
    }
}

/// Send lock held.
pub fn measure_written(socket: &Socket, end: &End, ring: &SegmentRing) {
    if end.native_senders.load(Ordering::SeqCst) == 0
        && let Some(place) = carrier::written_place(socket)
    {
        note_written(ring, place);
    }
}

/// The receiving direction comes another way now.
pub fn receiving_turned(socket: &Socket, end: &End) {
    let path = end.receiving();
    if path != Receiving::Ring {
        // What the kernel has told of may be data from now on, and it does not tell again.
        socket.kernel_news.tell();
    }
    receiving_changed(socket);
    show_path(socket, end);
    if path == Receiving::Ring
        && end.sending() == Sending::Kernel
        && let Some(outgoing) = socket.outgoing()
        && let Some(_held) = end.send_lock.try_take()
    {
        // An end that only receives moves too: its doorbells for room need the ring.
        try_start(socket, end, &outgoing);
    }
}

fn show_path(socket: &Socket, end: &End) {
    let both = end.sending() == Sending::Ring && end.receiving() == Receiving::Ring;
    let young = end.sending() == Sending::Kernel || end.receiving() != Receiving::Ring;
    let reason = match both {
        true if socket.is_carried() => Reason::Carried,
        true => Reason::None,
        false => Reason::Young,
    };
    if both
        || young
            && !end.barred.is()
            && !socket.outgoing().is_some_and(|ring| view::is_away(socket, end, &ring))
            && end.sending() != Sending::KernelForGood
    {
        view::show(socket, reason);
    } else {
        view::show_path(socket);
    }
}

/// After a publish: wakes a receiver that sleeps.
#[inline(always)]
pub fn wake_receiver(socket: &Socket, ring: &SegmentRing) {
    crate::step!();
    // (Who is killed, or jumps out, between the two leaves the wish to the next sender.)
    let mut announced = false;
    let wish = ring.control().data_wish();
    let mut how = wish.granted_by_sender_behind(|how| {
        announced = how & WANT_READY != 0 && announce(socket, ring);
        crate::step!();
    });
    if announced {
        how &= !WANT_READY;
    }
    let rung = if announced && socket.boards.is() {
        ring_sleeper(socket, ring)
    } else {
        context::ring_if_armed(socket)
    };
    if how != 0 {
        // (Whose bell or board does not take it hears a byte.)
        let heard = how & WANT_EVENT == 0 || context::ring(socket);
        if how & (WANT_BYTE | WANT_READY) != 0 || !heard {
            ring_byte(socket, ring);
        }
    }
    if rung || how != 0 {
        count_bell(socket);
    }
}

/// Behind the announcement on a board that is shared with a stranger. True if it rang.
#[cold]
fn ring_sleeper(socket: &Socket, ring: &SegmentRing) -> bool {
    let rang = boards::ring_sleeper(socket);
    if rang == Some(false) {
        ring_byte(socket, ring);
    }
    rang.is_some()
}

/// Before the look at the flag of the receiver's context.
#[cold]
fn announce(socket: &Socket, ring: &SegmentRing) -> bool {
    // ORDER: Relaxed; behind the look that has found the wish, before which it was written (`wait::want_ready`).
    let lane = ring.control().receiver.lane.load(Ordering::Relaxed);
    if socket.boards.is() {
        boards::announce(socket, lane)
    } else {
        context::announce(socket, lane)
    }
}

/// After a release: wakes a sender that waits for room.
pub fn wake_sender(socket: &Socket, incoming: &SegmentRing) {
    crate::step!();
    let how = incoming.control().room_wish().granted_by_receiver();
    if how == 0 {
        return;
    }
    count_bell(socket);
    let rung = how & WANT_EVENT != 0 && context::ring(socket);
    if rung && how & WANT_BYTE == 0 {
        return;
    }
    if let Some(outgoing) = socket.outgoing() {
        let end = socket.end();
        if end.sending() == Sending::Kernel
            && let Some(_held) = end.send_lock.try_take()
        {
            // A byte is a doorbell only while we send by the ring.
            try_start(socket, end, &outgoing);
        }
        ring_byte(socket, &outgoing);
    }
}

fn count_bell(socket: &Socket) {
    crate::waiting::spin::rang();
    view::count(socket, |slot| {
        slot.bells.fetch_add(1, Ordering::Relaxed);
    });
}

/// A byte on the kernel connection, if it is a doorbell there.
#[inline(never)]
pub fn ring_byte(socket: &Socket, outgoing: &SegmentRing) {
    out(socket, socket.end(), outgoing, Reason::None).ring();
}

/// The receiver has left the ring: what it has not released is sent again, through the kernel. (Where it takes that back all stays as
/// it was.) `EAGAIN` when the kernel is full: every later call goes on with it, and whoever sleeps on the connection is woken for it.
/// Send lock held: who looked without it may find it done.
#[cold]
pub fn return_unread(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()> {
    let side = out(socket, end, ring, Reason::Asked);
    match side.return_unread() {
        Err(Errno::ECONNRESET) if orphan::go_back(socket, end, ring, false) => side.return_unread(),
        other => other,
    }
}

/// If the adapter has died, our direction goes back. Any lock may be held; under the send lock it is for its holder.
pub fn go_back_if_orphan(socket: &Socket) {
    let end = socket.end();
    if end.mirrored.get() == mirrored::NEEDS_NO_ADAPTER {
        // (Another process of the family may have gone back.)
        return socket.lost_its_carrier();
    }
    if channel::is_orphan(socket)
        && let Some(ring) = socket.outgoing()
        && let Some(_held) = end.send_lock.try_take()
        && orphan::go_back(socket, end, &ring, false)
    {
        let _ = return_unread(socket, end, &ring);
    }
}

/// The peer may have left the ring while we have nothing to send; or we are sending again.
pub fn answer_return(socket: &Socket, end: &End) {
    let Some(outgoing) = socket.outgoing() else { return };
    if (end.sending() == Sending::Returning
        || end.sending() == Sending::Ring && words::has_left(&outgoing))
        && let Some(_held) = end.send_lock.try_take()
    {
        let _ = return_unread(socket, end, &outgoing);
    }
}

/// What a look at an empty ring's kernel connection has found: how much waits there, its end, or an error, which is one.
pub fn seen(socket: &Socket, end: &End, ring: &SegmentRing, peeked: Sys<usize>) -> Seen {
    let ended = !matches!(peeked, Ok(1..));
    let waiting = peeked.unwrap_or(0) as u64;
    Seen { ended, waiting, ring: incoming(socket, end, ring).head() }
}

/// Does anybody else wait on this connection, in this process or another of the family? `mine` of the counted waiters are the caller.
pub fn others_wait(socket: &Socket, end: &End, mine: u32) -> bool {
    socket.sleepers.load(Ordering::SeqCst) > mine
        || end.holders.count() > 1
        || watched_by_sleepers(socket)
}
