//! The steps by which the two ends of a kernel connection come to share a segment.
//!
//! ```text
//!   accepting side                            connecting side
//!   offer: listen on the connection's name
//!                                             look: connect to it, check whose it is
//!   accept: check whose call it is,
//!   greeting: my descriptor's number
//!                                             check who greets,
//!                                             hello: my descriptor's number, my doorbell
//!   check who said hello,
//!   answer: the segment, my doorbell; attach
//!                                             check the answer, attach
//! ```
//!
//! Each step is taken inside a data call of the program, when it is due, and never waits: nobody waits for a peer that is busy
//! computing, and a peer that never comes costs a few failed looks at growing intervals.
//!
//! Whoever calls must own the far end of the very connection. The kernel's socket table names the user of that socket, and the Unix
//! socket's credentials name the caller. That it holds the socket, /proc tells if it lets us look; else each side's own statement does
//! (`proof`), which it makes before it says its first word. Nothing is handed out, and no descriptor taken, before that.
//!
//! Ends in two network namespaces of one host meet on a channel that the node service gives them (`interconnect::node`), which vouches for both.

use super::again::{self, Fresh, Over};
use super::boards::{self, Offer};
use super::epoll::{bells, life, registration, set};
use super::in_use::Waiter;
use super::meeting;
use super::pin;
use super::table::{self, End, Socket, Stage, Tables, tables};
use super::transfer::wait;
use super::{budget, carrier, chaos, context, control, in_use, memory, moving, rings, view};
use crate::config::PeerPolicy;
use crate::handshake::{self, Frame, Misfit, Protocol};
use crate::interconnect::introduction::{self, JOIN, LINK};
use crate::interconnect::{CARRIER, Interconnect, mirrored, node};
use crate::lock::Held;
use crate::plain::{P32, P64};
use crate::reasons::Reason;
use ringlet_core::layout::{Geometry, Head, SEGMENT_MAGIC};
use ringlet_core::memory::Area;
use ringlet_core::sync::{Ordering, fence};
use ringlet_core::view::ASKED_OFF;
use ringlet_linux::bell::Address;
use ringlet_linux::meet::{self as rendezvous, Ends};
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{apart, diag, fd, map, proof, tcp};

/// After so many messages and so long without a peer nobody will come any more. (One end of a stream may make a thousand calls
/// while the other makes one.)
const GIVE_UP_AFTER_CALLS: u32 = 1024;
/// Calls between two looks: a quarter of those made so far, so that a look's price stays a small part of them.
const LATER_GROWTH: u32 = 4;
const LATER_MAX_CALLS: u32 = 128;
const GIVE_UP_AFTER_NS: u64 = 2_000_000_000;
/// The accepting side offers some calls before the connecting side looks, so that a first look finds it.
const LOOK_LATER_CALLS: u32 = 2;
/// Rendezvous under way at a time, if the limit of descriptors allows; how many are looked at to find a place; and how long
/// a place is kept for a peer that does not come.
const PLACE_COUNT: usize = 1024;
const PLACES_LOOKED_AT: usize = 16;
const PLACE_KEPT_NS: u64 = 1_000_000_000;
const GREETING: u16 = 1;
const HELLO: u16 = 2;
const ANSWER: u16 = 3;

/// All messages: which it is, ring size, sender's descriptor number, its doorbell (process, context; 0 for none), the address of the doorbell
/// that it has for strangers (name, token; 0 for none), what it says of boards that both share (`boards::Offer`), the number of its adapter (0 for
/// none), and a ticket for that.
#[derive(Default)]
struct Message {
    kind: u16,
    ring_bytes: u64,
    fd: i32,
    context: u32,
    process: u64,
    bell: Address,
    boards: Offer,
    adapter: u64,
    ticket: [u64; 2],
}

impl Message {
    fn frame(&self) -> Frame {
        Frame::new(Protocol::Connection, self.kind)
            .u64(self.ring_bytes)
            .u32(self.fd as u32)
            .u32(self.context)
            .u64(self.process)
            .u64(self.bell.name)
            .u64(self.bell.token[0])
            .u64(self.bell.token[1])
            .u64(self.boards.number)
            .u32(self.boards.context)
            .u64(self.adapter)
            .u64(self.ticket[0])
            .u64(self.ticket[1])
    }

    fn read(packet: &[u8]) -> Result<Message, Misfit> {
        handshake::read(packet, Protocol::Connection, |kind, fields| {
            Some(Message {
                kind,
                ring_bytes: fields.u64()?,
                fd: fields.u32()? as i32,
                context: fields.u32()?,
                process: fields.u64()?,
                bell: Address { name: fields.u64()?, token: [fields.u64()?, fields.u64()?] },
                boards: Offer { number: fields.u64()?, context: fields.u32()? },
                adapter: fields.u64()?,
                ticket: [fields.u64()?, fields.u64()?],
            })
        })
    }
}

/// How a step ended.
enum Step {
    /// Not yet; look again after some more messages.
    Later,
    /// The same, for this reason.
    LaterFor(Reason),
    /// Look again at the next message.
    Soon,
    /// The next step can be taken right now.
    AtOnce,
    /// Never.
    Bar(Reason),
    /// There is nothing more to do: attached, or given up meanwhile.
    Done,
}

/// A connection is established on `socket`: from when on its steps are due.
pub fn begin(socket: &Socket, accepting: bool, service: u32) {
    let Some(tables) = tables() else { return };
    socket.side.set(accepting as u32);
    socket.service.set(service);
    let soonest = tables.config.move_after.min(u32::MAX as u64 / 2) as u32;
    let after = tables.services.move_after(service, soonest);
    let from = socket.calls.get().saturating_add(after);
    socket.next_step.set(chaos::due(from + if accepting { 0 } else { LOOK_LATER_CALLS }));
}

/// Takes the step that is due. Called with no lock held.
pub fn step(socket: &'static Socket) {
    chaos::step(socket, step_once);
}

/// A connection was just made: brings its two ends together before the program gets to use it, if the other end is there soon.
pub fn hasten(fd: i32) {
    if chaos::on()
        && let Some(socket) = table::socket(fd)
    {
        chaos::meet_now(socket, step_once);
    }
}

pub fn step_once(socket: &'static Socket) {
    let Some(tables) = tables() else { return };
    // Another thread that closes the connection leaves what is in use here to us. (Before `stepping` is taken: if that thread came first, the
    // entry may be another connection's, whose step is not to be one of two.)
    let _in_use = Waiter::new(socket);
    if matches!(socket.stage(), Stage::Free | Stage::Closing) {
        return;
    }
    // ORDER: Acquire; pairs with the swap behind the step, here or in `pin::settle`: one thread at a time; the next one sees what this one wrote.
    if socket.stepping.swap(1, Ordering::Acquire) != 0 {
        return;
    }
    let (calls, before) = (socket.calls.get(), socket.stage());
    let off = control::keeps_off(socket);
    let mut step = if off { Step::Soon } else { Step::AtOnce };
    if !off {
        rings::look_for_others();
    }
    while matches!(step, Step::AtOnce) {
        step = match pin::keeps_all_on_kernel() {
            // No fork is made from its look at the holders to its end: the child would go on with a connection of the kernel's.
            None => match tables.process().gate.try_enter() {
                Some(_inside) => take(tables, socket),
                None => Step::Soon,
            },
            Some((reason, true)) => Step::Bar(reason),
            Some((_, false)) => Step::Later,
        };
    }
    if socket.stage() == Stage::Attached {
        rings::look_for_others();
        // ORDER: SeqCst; pairs with `process::happens_behind_our_back`.
        fence(Ordering::SeqCst);
        if let Some((reason, _)) = pin::keeps_all_on_kernel() {
            super::keep_on_kernel(socket, reason);
        }
    }
    match step {
        Step::Later | Step::Soon if !off && overdue(socket, calls) => {
            pin::to_kernel(socket, Reason::NoPeer)
        }
        Step::LaterFor(reason) if !off && overdue(socket, calls) => pin::to_kernel(socket, reason),
        Step::Later | Step::LaterFor(_) => {
            let looking = calls.wrapping_sub(socket.calls_before.get());
            socket.next_step.set(calls + (looking / LATER_GROWTH).clamp(1, LATER_MAX_CALLS))
        }
        Step::Soon => socket.next_step.set(calls + 1),
        // (The node service has no carrier just now, or that has died: there will be another one.)
        Step::Bar(Reason::NoAdapter) if socket.shown.is() && !socket.end().barred.is() => {
            begin_again(socket);
            again::failed(socket, false);
            socket.next_step.set(calls + 1);
            view::show(socket, Reason::NoAdapter);
        }
        Step::Bar(reason) => pin::to_kernel(socket, reason),
        Step::Done | Step::AtOnce => {}
    }
    // ORDER: SeqCst, then the reason; pairs with `pin::settle`: who bars the socket during a step is seen here, or comes behind it.
    socket.stepping.swap(0, Ordering::SeqCst);
    pin::settle(socket);
    if before != Stage::Attached
        && socket.stage() == Stage::Attached
        && let Some(reason) = Reason::from_u32(socket.end().barred.get())
        && reason != Reason::None
    {
        super::keep_on_kernel(socket, reason);
    }
}

/// An attached connection whose carrier has died: takes the step towards another one, if one is due. Called with no lock held.
#[cold]
pub fn step_again(socket: &'static Socket) {
    let Some(tables) = tables() else { return };
    if sys::now_ns() < socket.again_due_ns.get() || view::asked(socket) & ASKED_OFF != 0 {
        return;
    }
    let Some(_in_use) = in_use::in_use(socket) else { return };
    // ORDER: as in `step_once`.
    if socket.stepping.swap(1, Ordering::Acquire) != 0 {
        return;
    }
    let mut step = Step::AtOnce;
    while matches!(step, Step::AtOnce) {
        // As in `step_once`.
        step = match (pin::keeps_all_on_kernel(), tables.process().gate.try_enter()) {
            (None, Some(_inside)) => take(tables, socket),
            _ => Step::Later,
        };
    }
    // (Unless it is done.)
    if socket.comes_again.is() {
        match step {
            Step::Soon | Step::AtOnce => socket.again_due_ns.set(0),
            Step::Later if socket.meets_anew() => {
                socket.again_due_ns.set(sys::now_ns() + again::LOOK_NS)
            }
            Step::LaterFor(Reason::NoPeer) => {
                socket.again_due_ns.set(sys::now_ns() + again::LOOK_NS)
            }
            Step::Later => again::failed(socket, true),
            Step::LaterFor(_) | Step::Bar(_) => again::failed(socket, false),
            Step::Done => {}
        }
    }
    socket.stepping.swap(0, Ordering::SeqCst);
    pin::settle(socket);
}

/// The first of them: is nothing left to be done with what the carrier had?
fn first_again(tables: &'static Tables, socket: &'static Socket) -> Step {
    match again::is_over_now(socket) {
        Over::Yes => {}
        Over::NotYet => return Step::LaterFor(Reason::NoPeer),
        Over::Never => {
            again::never(socket);
            return Step::Done;
        }
    }
    if !tables.holders.is_alone(&socket.end().holders) {
        view::show(socket, Reason::Shared);
        return Step::LaterFor(Reason::Shared);
    }
    view::show(socket, Reason::NoAdapter);
    if !may_visit(tables, socket) || carrier::unserved_option(socket).is_some() {
        return Step::Later;
    }
    match place(tables) {
        Some(place) => visit(tables, socket, place),
        None => Step::Later,
    }
}

/// (An attached one is shown as it is.)
fn show(socket: &Socket, reason: Reason) {
    if socket.stage() != Stage::Attached {
        view::show(socket, reason);
    }
}

fn overdue(socket: &Socket, calls: u32) -> bool {
    let now = sys::now_ns();
    if socket.first_step_ns.get() == 0 {
        socket.first_step_ns.set(now);
    }
    let looking = calls.wrapping_sub(socket.calls_before.get());
    looking > GIVE_UP_AFTER_CALLS && now - socket.first_step_ns.get() > GIVE_UP_AFTER_NS
}

fn take(tables: &'static Tables, socket: &'static Socket) -> Step {
    match socket.meeting_stage() {
        Stage::Kernel if socket.stage() == Stage::Attached => first_again(tables, socket),
        Stage::Kernel => first(tables, socket),
        Stage::Offered => take_call(tables, socket),
        Stage::Called => take_hello(tables, socket),
        Stage::Looked => take_greeting(tables, socket),
        Stage::Greeted => take_answer(tables, socket),
        Stage::Visiting => take_welcome(socket),
        Stage::Introducing => take_introduction(tables, socket),
        _ => Step::Done,
    }
}

/// The program wants the number of a rendezvous: it is given up, and begun again later. True if it was one.
pub fn give_up_number(fd: i32) -> bool {
    let waits = |socket: &&'static Socket| {
        socket.meeting.get() as i32 == fd
            && (socket.stage() != Stage::Attached || socket.meets_anew())
    };
    let Some(socket) = tables().and_then(|tables| tables.followed().find(waits)) else {
        return false;
    };
    // ORDER: as in `step_once`. In the middle of a step it is not to be had.
    if socket.stepping.swap(1, Ordering::SeqCst) != 0 {
        return false;
    }
    begin_again(socket);
    socket.next_step.set(socket.calls.get() + LATER_MAX_CALLS);
    socket.stepping.swap(0, Ordering::SeqCst);
    pin::settle(socket);
    true
}

/// Its descriptor is about to be closed: what is in use by a step of another thread is put away behind that (`process::release`).
pub fn close(socket: &Socket) {
    // ORDER: as in `step_once`.
    if socket.stepping.swap(1, Ordering::SeqCst) == 0 {
        meeting::abandon(socket);
        socket.stepping.swap(0, Ordering::SeqCst);
    }
}

/// A descriptor's worth of room at the rendezvous: who holds it, since when.
struct Place {
    socket: P32,
    since_ns: P64,
}

static PLACES: [Place; PLACE_COUNT] =
    [const { Place { socket: P32::new(0), since_ns: P64::new(0) } }; PLACE_COUNT];
static NEXT_PLACE: P32 = P32::new(0);

/// A place for one more at the rendezvous, if there is one: a free one, or that of a connection whose peer has not come for long.
/// Idle connections must not keep descriptors from the program, nor other connections from the ring.
fn place(tables: &'static Tables) -> Option<&'static Place> {
    memory::close_left();
    let count =
        fd::share().clamp(1, PLACE_COUNT).checked_sub(apart::waiting()).filter(|n| *n > 0)?;
    let now = sys::now_ns();
    for _ in 0..PLACES_LOOKED_AT.min(count) {
        let place = &PLACES[NEXT_PLACE.add(1) as usize % count];
        let holder = tables.sockets.at(place.socket.get() as usize);
        if !holder.meeting.is() {
            return Some(place);
        }
        if now.saturating_sub(place.since_ns.get()) < PLACE_KEPT_NS {
            continue;
        }
        // ORDER: as in `step`. The holder's own next step finds that it must begin again.
        if holder.stepping.swap(1, Ordering::Acquire) == 0 {
            meeting::abandon(holder);
            holder.stepping.swap(0, Ordering::SeqCst);
            pin::settle(holder);
            return Some(place);
        }
    }
    None
}

/// A socket goes to the rendezvous with this descriptor.
fn go(tables: &Tables, place: &Place, socket: &Socket, meeting: i32) {
    place.socket.set(tables.index_of(socket));
    place.since_ns.set(sys::now_ns());
    goes_to(socket, meeting);
}

/// At whose other end is somebody of whom nothing was asked yet.
fn goes_to(socket: &Socket, meeting: i32) {
    socket.trusts_as.set(0);
    socket.meeting.set(meeting::hidden(meeting) as u32);
}

/// Has the other side of the rendezvous just gone, which is no failure of ours?
fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN)
}

/// Who has sent us what can't be closed gets no further chance; nobody does, where the kernel lets anybody send it.
fn hangs_us(socket: &Socket, ends: &Ends) -> bool {
    apart::is_busy()
        && (!rendezvous::refuses_descriptors()
            || diag::far_owner(socket.fd(), ends).is_ok_and(|owner| apart::is_full(owner.uid)))
}

/// Is the connection one for the ring at all? Then the accepting side offers, and the connecting side looks.
fn first(tables: &'static Tables, socket: &'static Socket) -> Step {
    let end = socket.end();
    if let Some(reason) =
        Reason::from_u32(end.barred.get()).filter(|reason| *reason != Reason::None)
    {
        return Step::Bar(reason);
    }
    if !tables.config.enabled {
        return Step::Bar(Reason::Off);
    }
    if life::may_be_watched_by_a_strange_set(tables, socket) {
        return Step::Bar(Reason::OwnEpoll);
    }
    // After a meeting for which no carrier was there. (That is no time in which nobody comes.)
    if socket.again_due_ns.get() != 0 {
        control::look_anew(socket);
        if sys::now_ns() < socket.again_due_ns.get() {
            return Step::Soon;
        }
        socket.again_due_ns.set(0);
    }
    // What was shared and is so no more may still be mapped by those who shared it.
    if !tables.holders.is_alone(&end.holders) || !tables.rehome(socket) {
        view::show(socket, Reason::Shared);
        return Step::Later;
    }
    socket.far_inode.set(0);
    let ends = match carrier::ends(socket, tables) {
        Ok(ends) => Some(ends),
        // Not of this network namespace, but perhaps of this host.
        Err(Some(Reason::NotLocal)) if may_visit(tables, socket) => None,
        Err(Some(reason)) => return Step::Bar(reason),
        Err(None) => return Step::Later,
    };
    if let Some(reason) = carrier::unserved_option(socket) {
        return Step::Bar(reason);
    }
    if ends.as_ref().map_or_else(apart::is_busy, |ends| hangs_us(socket, ends)) {
        view::show(socket, Reason::Full);
        return Step::Later;
    }
    let Some(place) = place(tables) else {
        view::show(socket, Reason::NoDescriptor);
        return Step::Later;
    };
    let Some(ends) = ends else { return visit(tables, socket, place) };
    if socket.side.get() == 1 {
        return match rendezvous::offer(&ends) {
            Ok(listener) if proof::are_of_two_namespaces(listener, socket.fd()) => {
                rendezvous::part(listener);
                elsewhere(tables, socket, place)
            }
            Ok(listener) => {
                go(tables, place, socket, listener);
                socket.advance(Stage::Offered);
                view::show(socket, Reason::NoPeer);
                Step::Soon
            }
            Err(error) => Step::Bar(Reason::from(error)),
        };
    }
    match rendezvous::look(&ends) {
        Ok(meeting) if proof::are_of_two_namespaces(meeting, socket.fd()) => {
            rendezvous::part(meeting);
            elsewhere(tables, socket, place)
        }
        Ok(meeting) => {
            match far_of(socket, &ends).and_then(|far| check_user(tables, &far, meeting)) {
                Ok(_) => {
                    go(tables, place, socket, meeting);
                    socket.advance(Stage::Looked);
                    view::show(socket, Reason::NoPeer);
                    Step::Soon
                }
                Err(reason) => {
                    rendezvous::part(meeting);
                    Step::Bar(reason)
                }
            }
        }
        Err(Errno::ECONNREFUSED | Errno::EAGAIN) => {
            // An address that looks like ours may be rewritten to another namespace's, as that of a published port.
            if may_visit(tables, socket)
                && diag::far_owner(socket.fd(), &ends).err() == Some(Errno::ENOENT)
            {
                return visit(tables, socket, place);
            }
            view::show(socket, Reason::NoPeer);
            Step::Later
        }
        Err(error) => Step::Bar(Reason::from(error)),
    }
}

/// The connection is not in this thread's network namespace, where others may have the same addresses.
#[cold]
fn elsewhere(tables: &'static Tables, socket: &'static Socket, place: &Place) -> Step {
    match may_visit(tables, socket) {
        true => visit(tables, socket, place),
        false => Step::Bar(Reason::NotLocal),
    }
}

fn may_visit(tables: &Tables, socket: &Socket) -> bool {
    carrier::facts(socket).is_known_to_node
        && tables.config.adapter == 0
        && node::is_there(tables.config.node.as_ref())
}

/// Comes to the node service.
fn visit(tables: &'static Tables, socket: &'static Socket, place: &Place) -> Step {
    match node::visit(tables.config.node.as_ref()) {
        Ok(Some(meeting)) => {
            go(tables, place, socket, meeting);
            socket.advance(Stage::Visiting);
            show(socket, Reason::NoPeer);
            Step::Soon
        }
        Ok(None) => Step::Bar(Reason::NotLocal),
        // Too many wait there.
        Err(Errno::EAGAIN) => Step::LaterFor(Reason::NodeFull),
        Err(error) => Step::Bar(Reason::from(error)),
    }
}

/// The node service's next message.
fn hear_node(socket: &Socket, meeting: i32) -> Result<(node::Message, rendezvous::Fds), Step> {
    let mut bytes = [0; handshake::ROOM_BYTES];
    let taken = match rendezvous::take(meeting, &mut bytes) {
        Err(Errno::EAGAIN) => return Err(Step::Later),
        Err(error) if !is_gone(error) => return Err(Step::Bar(Reason::from(error))),
        Err(_) => return Err(begin_again(socket)),
        Ok(taken) if taken.caller.is_none() => return Err(begin_again(socket)),
        Ok(taken) if taken.fds.truncated => return Err(Step::Bar(Reason::NoDescriptor)),
        Ok(taken) => taken,
    };
    match node::Message::read(&bytes[..taken.len]) {
        Ok(message) if message.kind == node::APART => {
            let reason = Reason::from_u32(message.reason).filter(|reason| *reason != Reason::None);
            Err(Step::Bar(reason.unwrap_or(Reason::NotLocal)))
        }
        Ok(message) => Ok((message, taken.fds)),
        Err(misfit) => Err(Step::Bar(Reason::from(misfit))),
    }
}

/// Has the node service greeted? Then it is awake, and gets to see the connection.
fn take_welcome(socket: &'static Socket) -> Step {
    if socket.end().holders.count() != 1 {
        return Step::Later;
    }
    let meeting = socket.meeting.get() as i32;
    if meeting == 0 {
        return begin_again(socket);
    }
    match hear_node(socket, meeting) {
        Ok((message, _)) if message.kind == node::GREETING => {}
        Ok(_) => return Step::Bar(Reason::BadPeer),
        Err(step) => return step,
    }
    let accepting = socket.side.get();
    let come = node::Message { kind: node::COME, accepting, ..Default::default() };
    socket.shown.set(1);
    match rendezvous::send(meeting, come.frame().as_bytes(), &[socket.fd()]) {
        Ok(()) => {
            socket.advance(Stage::Introducing);
            Step::Soon
        }
        Err(error) if is_gone(error) => begin_again(socket),
        Err(error) => Step::Bar(Reason::from(error)),
    }
}

/// Has the far end come to the node service too? Then both have a channel, on which they go on as at a rendezvous.
fn take_introduction(tables: &'static Tables, socket: &'static Socket) -> Step {
    let meeting = socket.meeting.get() as i32;
    if meeting == 0 {
        return begin_again(socket);
    }
    let (met, mut fds) = match hear_node(socket, meeting) {
        Ok((message, fds)) if message.kind == node::MET => (message, fds),
        Ok(_) => return Step::Bar(Reason::BadPeer),
        Err(Step::Later) => return Step::LaterFor(Reason::NoPeer),
        Err(step) => return step,
    };
    let (carried, far) = (met.flags & node::CARRIED != 0, met.flags & node::FAR != 0);
    let [new, lifeline, channel] =
        [(0, true), (1, carried), (2, far)].map(|(at, is)| Given::take(&mut fds, at, is));
    meeting::abandon(socket);
    let again = socket.stage() == Stage::Attached;
    // (By a policy that has changed they may share memory now: of a connection that was carried that is not made use of.)
    if again && (carried, far) != (true, socket.is_far()) {
        return Step::Bar(Reason::NoAdapter);
    }
    if new.missing || lifeline.missing || channel.missing || far && !carried {
        return Step::Bar(Reason::BadPeer);
    }
    if tables.config.peers == PeerPolicy::SameUser && met.flags & node::SAME_USER == 0 {
        return Step::Bar(Reason::OtherUser);
    }
    let (new, lifeline, channel) = match (new.guarded(), lifeline.guarded(), channel.moved()) {
        (Ok(Some(new)), Ok(lifeline), Ok(channel)) => (new, lifeline, channel),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            return Step::Bar(Reason::from(error));
        }
        (Ok(None), ..) => return Step::Bar(Reason::BadPeer),
    };
    let new = new.hidden();
    socket.meeting.set(new);
    let [kept_lifeline, kept_channel] = socket.given();
    kept_lifeline.set(lifeline.map_or(0, Given::hidden));
    kept_channel.set(channel.hidden());
    socket.introduced.set(met.flags | node::INTRODUCED);
    socket.stranger.set(met.stranger);
    if socket.side.get() == 1 {
        socket.advance(Stage::Called);
        return greet(tables, socket, new as i32);
    }
    socket.advance(Stage::Looked);
    Step::Soon
}

/// A descriptor of the node service's, closed unless it is used.
struct Given {
    fd: Option<i32>,
    missing: bool,
}

impl Given {
    /// (What nobody has said to be there is left, and closed with them.)
    fn take(fds: &mut rendezvous::Fds, at: usize, is: bool) -> Given {
        let fd = if is { fds.take(at) } else { None };
        Given { fd, missing: is && fd.is_none() }
    }

    fn guarded(mut self) -> Result<Option<Given>, Errno> {
        let Some(fd) = self.fd.take() else { return Ok(None) };
        // (If it fails it is closed.)
        let fd = rendezvous::guard_channel(fd)?;
        Ok(Some(Given { fd: Some(fd), missing: false }))
    }

    /// Out of the program's way, where it is no Unix socket.
    fn moved(mut self) -> Result<Given, Errno> {
        let fd = self.fd.take().map(fd::hide).transpose()?;
        Ok(Given { fd, missing: false })
    }

    /// Its number, which the program does not see; 0 for none.
    fn hidden(mut self) -> u32 {
        self.fd.take().map_or(0, |fd| meeting::hidden(fd) as u32)
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        self.fd.into_iter().for_each(sys::close);
    }
}

/// The number of our adapter for this connection, which both ends are to have; 0 for none.
fn adapter_of(tables: &Tables, socket: &Socket) -> u64 {
    if socket.is_carried() { CARRIER } else { tables.config.adapter }
}

/// Who is at the other end of the rendezvous. One that was introduced has a number by which it is told from others, and which is no pid.
fn peer_of(socket: &Socket, meeting: i32) -> Result<rendezvous::Credentials, Reason> {
    if !socket.introduced.is() {
        return rendezvous::credentials(meeting).map_err(Reason::from);
    }
    let ours = socket.introduced.get() & node::SAME_USER != 0;
    let pid = -((socket.stranger.get() & i32::MAX as u32) as i32);
    Ok(rendezvous::Credentials { pid, uid: if ours { sys::geteuid() } else { apart::SOMEBODY } })
}

/// The context in which this connection is used: the epoll set that watches it, else this thread.
fn home_of(socket: &Socket) -> Option<u32> {
    match set::first_set(socket) {
        Some(set) => context::of_set(set),
        None => context::of_thread(),
    }
}

/// Sends hello or the answer, with our doorbell if the peer may have it, or the address of one, and `segment` if there is one. `heard`: what the peer
/// has said of boards.
fn say(
    socket: &Socket,
    meeting: i32,
    peer: rendezvous::Credentials,
    geometry: Geometry,
    segment: Option<i32>,
    heard: Offer,
) -> Result<(), Errno> {
    let home = home_of(socket);
    let card = home.filter(|_| trusts(socket, peer)).and_then(context::card);
    // By its address, who has it can do no more than ring (`ringlet_linux::bell`). It is one of this network namespace.
    let tell_address = |message: &mut Message| {
        let named = |home| context::address(home, socket.fd());
        let address = home.filter(|_| !socket.introduced.is()).and_then(named);
        message.bell = address.unwrap_or_default();
        socket.set_home(home.filter(|_| message.bell.name != 0).unwrap_or(0));
        // (The accepting side is attached, and so in its sets, before it says this.)
        bells::bell_was_named(socket);
        if segment.is_none() {
            message.boards = boards::offer(socket.home.get());
        }
    };
    let mut message = Message {
        kind: if segment.is_some() { ANSWER } else { HELLO },
        ring_bytes: geometry.ring_bytes as u64,
        fd: socket.fd(),
        context: card.as_ref().map_or(0, |card| card.context),
        process: card.as_ref().map_or(0, |card| card.process),
        ..Message::default()
    };
    let mut fds = [0; rendezvous::MAX_FDS];
    let mut count = 0;
    let mut put = |fd| {
        fds[count] = fd;
        count += 1;
    };
    segment.into_iter().for_each(&mut put);
    if let Some(card) = &card {
        put(card.eventfd);
        put(card.page_memfd);
        card.boards_memfd.into_iter().for_each(&mut put);
    }
    match &card {
        Some(card) => socket.set_home(card.context),
        None => tell_address(&mut message),
    }
    let given = match &card {
        None => {
            let least = if chaos::on() { 1 } else { boards::CONNECTIONS_LEAST };
            boards::give(socket, peer, heard, socket.home.get(), least)
        }
        Some(_) => None,
    };
    let sent = match &given {
        Some(given) => {
            message.boards = given.offer;
            given.in_hand(|memfd| {
                fds[count] = memfd;
                // (In a child that a handler has forked just now there is none.)
                let all = count + usize::from(memfd != 0);
                rendezvous::send(meeting, message.frame().as_bytes(), &fds[..all])
            })
        }
        None => rendezvous::send(meeting, message.frame().as_bytes(), &fds[..count]),
    };
    match sent {
        // It does not trust us (it can't see us in its /proc, say).
        Err(Errno::EPERM) if count > 0 && segment.is_none() => {
            (message.context, message.process) = (0, 0);
            tell_address(&mut message);
            rendezvous::send(meeting, message.frame().as_bytes(), &[])
        }
        said => said,
    }
}

/// May eventfds go between this peer and us? Who holds one could make a ringer wait, and whoever closes it last for good (`apart`): so only
/// between processes each of which could signal the other anyway. (Root could, but must not take another user's.)
pub fn trusted(peer: rendezvous::Credentials) -> bool {
    rendezvous::is_our_user(peer.uid) && rendezvous::is_in_sight(peer.pid)
}

/// The same of a connection's peer: of one that was introduced, the node service's policy decides.
fn trusts(socket: &Socket, peer: rendezvous::Credentials) -> bool {
    match socket.introduced.get() {
        0 => trusts_caller(socket, peer),
        said => said & node::TRUSTED != 0,
    }
}

/// As `trusted`, asked once at a meeting: who is at its other end stays the same. As whom we act may change meanwhile.
fn trusts_caller(socket: &Socket, peer: rendezvous::Credentials) -> bool {
    let us = sys::geteuid();
    if us.checked_add(1) == Some(socket.trusts_as.get()) {
        return peer.uid == us;
    }
    let trusted = trusted(peer);
    if trusted {
        socket.trusts_as.set(peer.uid.wrapping_add(1));
    }
    trusted
}

/// Only a trusted peer may send more than memory.
fn check_trust(socket: &Socket, peer: rendezvous::Credentials) -> Result<(), Step> {
    if trusts(socket, peer) {
        return Ok(());
    }
    if socket.introduced.is() {
        return Err(Step::Bar(Reason::BadPeer));
    }
    Err(Step::Bar(match rendezvous::sight(peer.pid) {
        Err(error @ (Errno::EMFILE | Errno::ENFILE)) => Reason::from(error),
        _ => Reason::BadPeer,
    }))
}

/// The connecting side: who is it that offers? One that has proven itself is told hello.
fn take_greeting(tables: &'static Tables, socket: &'static Socket) -> Step {
    if socket.end().holders.count() != 1 {
        return Step::Later;
    }
    let meeting = socket.meeting.get() as i32;
    if meeting == 0 {
        return begin_again(socket);
    }
    let peer = match listen(tables, socket, meeting, GREETING) {
        Ok((_greeting, peer)) => peer,
        Err(step) => return step,
    };
    if let Err(step) = is_countable(socket) {
        return step;
    }
    rendezvous::skip(meeting);
    // (One that is carried gets memory from nobody but who carries.)
    if !socket.is_carried() {
        rendezvous::admit_descriptors(meeting, true);
    }
    // (Where it can't be stated, /proc may do.)
    if !socket.introduced.is() {
        let _ = proof::state(socket.fd(), meeting);
    }
    let Some(geometry) = Geometry::new(tables.config.ring_bytes as usize) else {
        unreachable!("the configuration admits only sound ring sizes");
    };
    let said = match adapter_of(tables, socket) {
        0 => say(socket, meeting, peer, geometry, None, Offer::default()),
        adapter => {
            say_mirrored(socket, meeting, HELLO, geometry.ring_bytes as u64, adapter, [0; 2])
        }
    };
    match said {
        Ok(()) => {}
        Err(error) if is_gone(error) => return begin_again(socket),
        Err(error) => return Step::Bar(Reason::from(error)),
    }
    socket.advance(Stage::Greeted);
    show(socket, Reason::Young);
    Step::Soon
}

/// (Of one that is attached nobody else writes meanwhile who would not be counted.)
fn is_countable(socket: &Socket) -> Result<(), Step> {
    let attached = socket.stage() == Stage::Attached;
    let _held = match socket.end().send_lock.try_take() {
        None if attached => return Err(Step::Soon),
        held => held.filter(|_| attached),
    };
    carrier::countable(socket).map_err(Step::Bar)
}

/// The first message of the other side, which stays in the queue, if it owns the far end; else the step to take.
fn listen(
    tables: &Tables,
    socket: &Socket,
    meeting: i32,
    kind: u16,
) -> Result<(Message, rendezvous::Credentials), Step> {
    let mut bytes = [0; handshake::ROOM_BYTES];
    let heard = match rendezvous::look_at(meeting, &mut bytes) {
        // It speaks at its own next call.
        Err(Errno::EAGAIN) => return Err(Step::Soon),
        Err(error) if !is_gone(error) => return Err(Step::Bar(Reason::from(error))),
        Err(_) => return Err(begin_again(socket)),
        Ok(heard) if heard.caller.is_none() => return Err(begin_again(socket)),
        Ok(heard) => heard,
    };
    let message = match Message::read(&bytes[..heard.len]) {
        Ok(message) => message,
        Err(misfit) => {
            if (misfit, kind) == (Misfit::OtherVersion, GREETING) {
                // (Who has said hello knows ours by our greeting.)
                let ours = Frame::version_only(Protocol::Connection);
                let _ = rendezvous::send(meeting, ours.as_bytes(), &[]);
            }
            return Err(Step::Bar(Reason::from(misfit)));
        }
    };
    if message.kind != kind || kind == GREETING && heard.fds.truncated {
        return Err(Step::Bar(Reason::BadPeer));
    }
    let peer = if socket.introduced.is() {
        peer_of(socket, meeting).map_err(Step::Bar)?
    } else {
        let far = known_far_of(tables, socket).map_err(Step::Bar)?;
        check(tables, socket, &far, meeting, message.fd)?
    };
    // (They stay where they are: older kernels admit them from anybody.)
    if heard.fds.truncated {
        check_trust(socket, peer)?;
    }
    Ok((message, peer))
}

/// The far end of a connection, as the kernel's socket table has it: its number, and its user.
struct Far {
    inode: u32,
    uid: u32,
}

/// The same for the table of this thread's network namespace. Noted for the steps that follow: as long as our end is open nothing else comes in its place, and
/// of one that is closed nobody can prove that he holds it.
fn far_of(socket: &Socket, ends: &Ends) -> Result<Far, Reason> {
    let owner = match diag::far_owner(socket.fd(), ends) {
        Ok(owner) => owner,
        Err(Errno::ENOENT) => return Err(Reason::NotLocal),
        Err(error) => return Err(Reason::from(error)),
    };
    socket.far_inode.set(owner.inode);
    socket.far_uid.set(owner.uid);
    Ok(Far { inode: owner.inode, uid: owner.uid })
}

/// As it was found in an earlier step, if it was.
fn known_far_of(tables: &Tables, socket: &Socket) -> Result<Far, Reason> {
    if socket.far_inode.is() {
        return Ok(Far { inode: socket.far_inode.get(), uid: socket.far_uid.get() });
    }
    let ends = carrier::ends(socket, tables).map_err(|_| Reason::NotConnected)?;
    far_of(socket, &ends)
}

/// The user at the other side of the rendezvous must be the user of the far end. Returns who it is.
fn check_user(tables: &Tables, far: &Far, meeting: i32) -> Result<rendezvous::Credentials, Reason> {
    let caller = rendezvous::credentials(meeting).map_err(Reason::from)?;
    check_owner(tables, far.uid, caller)?;
    if apart::is_full(caller.uid) {
        return Err(Reason::Full);
    }
    Ok(caller)
}

fn check_owner(tables: &Tables, owner: u32, caller: rendezvous::Credentials) -> Result<(), Reason> {
    // Root may hold anybody's socket; whether it holds this one is asked next.
    if caller.uid != owner && caller.uid != 0 {
        return Err(Reason::NotOwner);
    }
    if tables.config.peers == PeerPolicy::SameUser && !rendezvous::is_our_user(caller.uid) {
        return Err(Reason::OtherUser);
    }
    Ok(())
}

/// As `check`, for one who comes to the door of a UDP socket, where nobody can state anything: of another user's process, in sight but not to be
/// looked into, its user has to do.
pub fn check_caller(
    tables: &Tables,
    owner: &diag::Owner,
    caller: rendezvous::Credentials,
    fd: i32,
) -> Result<(), Reason> {
    check_owner(tables, owner.uid, caller)?;
    let refused = |error| matches!(error, Errno::EACCES | Errno::EPERM);
    let certain = || !rendezvous::is_vague(caller.uid) && rendezvous::is_in_sight(caller.pid);
    match rendezvous::holds(caller.pid, fd, owner.inode) {
        _ if caller.pid == 0 => Err(Reason::Unproven),
        Ok(true) => Ok(()),
        Err(error) if refused(error) && certain() => Ok(()),
        Err(error) if refused(error) || !rendezvous::has_proc() => Err(Reason::Unproven),
        // The caller may have gone or forked meanwhile, or it lies: no deal either way.
        Ok(false) | Err(Errno::ENOENT | Errno(libc::ESRCH)) => Err(Reason::NotOwner),
        Err(error) => Err(Reason::from(error)),
    }
}

/// Who is at the other side must be of the far end's user, and hold it. Returns who it is: its process (0 if that can't be seen) and user.
fn check(
    tables: &Tables,
    socket: &Socket,
    far: &Far,
    meeting: i32,
    fd: i32,
) -> Result<rendezvous::Credentials, Step> {
    let caller = check_user(tables, far, meeting).map_err(Step::Bar)?;
    if caller.pid != 0 && rendezvous::holds(caller.pid, fd, far.inode) == Ok(true) {
        return Ok(caller);
    }
    Err(match proof::is_stated(far.inode, meeting) {
        Ok(true) => return Ok(caller),
        Ok(false) => Step::Bar(Reason::NotOwner),
        Err(Errno::EAGAIN) => {
            view::show(socket, Reason::Unproven);
            Step::LaterFor(Reason::Unproven)
        }
        Err(error @ (Errno::EMFILE | Errno::ENFILE)) => Step::Bar(Reason::from(error)),
        Err(_) => Step::Bar(Reason::Unproven),
    })
}

/// The accepting side: has somebody come? It is greeted, if it may be the far end.
fn take_call(tables: &Tables, socket: &'static Socket) -> Step {
    let offer = socket.meeting.get() as i32;
    if offer == 0 {
        return begin_again(socket);
    }
    match rendezvous::accept(offer) {
        Ok(meeting) => {
            meeting::part(offer);
            goes_to(socket, meeting);
            socket.advance(Stage::Called);
            greet(tables, socket, meeting)
        }
        Err(Errno::EAGAIN) => Step::Later,
        Err(Errno::EMFILE | Errno::ENFILE) => Step::Bar(Reason::NoDescriptor),
        Err(error) => Step::Bar(Reason::from(error)),
    }
}

fn greet(tables: &Tables, socket: &'static Socket, meeting: i32) -> Step {
    let caller = if socket.introduced.is() {
        peer_of(socket, meeting)
    } else {
        known_far_of(tables, socket).and_then(|far| check_user(tables, &far, meeting))
    };
    let caller = match caller {
        Ok(caller) => caller,
        Err(reason) => return Step::Bar(reason),
    };
    if !socket.introduced.is() {
        let _ = proof::state(socket.fd(), meeting);
    }
    // Hello comes with a doorbell, or with nothing.
    if trusts(socket, caller) {
        rendezvous::admit_descriptors(meeting, true);
    }
    let greeting = Message { kind: GREETING, fd: socket.fd(), ..Message::default() };
    match rendezvous::send(meeting, greeting.frame().as_bytes(), &[]) {
        Ok(()) => Step::Soon,
        Err(error) if is_gone(error) => begin_again(socket),
        Err(error) => Step::Bar(Reason::from(error)),
    }
}

/// Begins again: whoever was at the rendezvous has gone.
fn begin_again(socket: &Socket) -> Step {
    meeting::abandon(socket);
    socket.far_inode.set(0);
    if socket.stage() != Stage::Attached {
        socket.introduced.set(0);
    }
    socket.advance(Stage::Kernel);
    Step::Later
}

/// The accepting side: who is it, and what does it say?
fn take_hello(tables: &'static Tables, socket: &'static Socket) -> Step {
    let again = socket.stage() == Stage::Attached;
    if socket.end().holders.count() != 1 || !again && !tables.rehome(socket) {
        return Step::Later;
    }
    let meeting = socket.meeting.get() as i32;
    if meeting == 0 {
        return begin_again(socket);
    }
    let Some(registrations) = hold_registrations(socket) else {
        return one_shot(socket);
    };
    let (hello, peer) = match listen(tables, socket, meeting, HELLO) {
        Ok(heard) => heard,
        Err(step) => return step,
    };
    let mut bytes = [0; handshake::ROOM_BYTES];
    let mut fds = match rendezvous::take(meeting, &mut bytes) {
        Ok(taken) if taken.fds.truncated => return Step::Bar(Reason::NoDescriptor),
        Ok(taken) => taken.fds,
        Err(error) => return Step::Bar(Reason::from(error)),
    };
    if let Err(step) = is_countable(socket) {
        return step;
    }
    let Some(geometry) = Geometry::new(hello.ring_bytes.min(tables.config.ring_bytes) as usize)
    else {
        return Step::Bar(Reason::BadPeer);
    };
    let adapter = adapter_of(tables, socket);
    let said = match Interconnect::agreed(adapter, hello.adapter) {
        None => return Step::Bar(Reason::NoAdapter),
        Some(Interconnect::Local) if again => return Step::Bar(Reason::NoAdapter),
        Some(Interconnect::Local) => {
            let segment = match make_segment(tables, socket, geometry) {
                Ok(segment) => segment,
                Err(reason) => return Step::Bar(reason),
            };
            keep_bell(socket, &hello, &mut fds, 0, peer);
            // Attached before the answer is out: the peer may use the ring the moment that it has it.
            attach_or_go_on(socket, registrations);
            let said = say(socket, meeting, peer, geometry, Some(segment), hello.boards);
            sys::close(segment);
            said
        }
        Some(Interconnect::Mirrored) => {
            let ring_bytes = geometry.ring_bytes as u64;
            let link = introduction::Message { kind: LINK, ring_bytes, ..Default::default() };
            let (ticket, ring_bytes) = match join(tables, socket, link) {
                Ok(joined) => joined,
                Err(reason) => return Step::Bar(reason),
            };
            meeting::keep(socket);
            attach_or_go_on(socket, registrations);
            say_mirrored(socket, meeting, ANSWER, ring_bytes, adapter, ticket)
        }
    };
    meeting::leave(socket);
    // (Of one that is carried again who carries finds that the other end has gone, and lets go of it: then it comes again.)
    if let Err(error) = said
        && !again
    {
        // It will never be attached.
        let reason = if is_gone(error) { Reason::NoPeer } else { Reason::from(error) };
        super::keep_on_kernel(socket, reason);
    }
    Step::Done
}

fn keep_bell(
    socket: &Socket,
    message: &Message,
    fds: &mut rendezvous::Fds,
    from: usize,
    peer: rendezvous::Credentials,
) {
    if message.context == 0 && message.bell.name != 0 {
        socket.bell.set(context::keep_named(&message.bell, socket.fd()).unwrap_or(0));
    }
    if message.context == 0 && message.kind == ANSWER && message.boards.number != 0 {
        let memfd = fds.take(from);
        boards::take(socket, peer, message.boards, memfd);
        memfd.into_iter().for_each(|memfd| apart::close_foreign(memfd, fds.user));
    }
    if message.context == 0 || !trusts(socket, peer) {
        return;
    }
    let Some(bell) = fds.take_all(from) else { return };
    let boards = fds.take(from + 2);
    if let Some(bell) = context::keep(peer.pid, message.process, message.context, bell, boards) {
        socket.bell.set(bell);
    }
}

fn make_segment(tables: &Tables, socket: &Socket, geometry: Geometry) -> Result<i32, Reason> {
    let bytes = geometry.segment_bytes();
    budget::reserve(tables, bytes)?;
    let made = map::sealed_memfd(c"ringlet-segment", bytes, libc::F_SEAL_SEAL).and_then(|fd| {
        match map::map_segment(fd, bytes) {
            Ok(area) => Ok((fd, area)),
            Err(error) => {
                sys::close(fd);
                Err(error)
            }
        }
    });
    let (segment, area) = made.map_err(|error| {
        budget::release(tables, bytes);
        Reason::from(error)
    })?;
    if let Err(reason) = memory::hold_first(area, geometry) {
        budget::release(tables, bytes);
        sys::close(segment);
        // SAFETY: mapped just now and shown to nobody.
        #[allow(unsafe_code)]
        unsafe {
            map::unmap(area)
        };
        return Err(reason);
    }
    let head = area.at::<Head>(0);
    head.ring_bytes.store(geometry.ring_bytes as u64, Ordering::Relaxed);
    head.magic.store(SEGMENT_MAGIC, Ordering::Relaxed);
    socket.set_segment(area, geometry);
    Ok(segment)
}

/// The connecting side: is the answer there, and sound?
fn take_answer(tables: &'static Tables, socket: &'static Socket) -> Step {
    let again = socket.stage() == Stage::Attached;
    if socket.end().holders.count() != 1 || !again && !tables.rehome(socket) {
        return Step::Later;
    }
    let meeting = socket.meeting.get() as i32;
    if meeting == 0 {
        return begin_again(socket);
    }
    let Some(registrations) = hold_registrations(socket) else {
        return one_shot(socket);
    };
    // It has proven itself by its greeting.
    let mut bytes = [0; handshake::ROOM_BYTES];
    let taken = match rendezvous::take(meeting, &mut bytes) {
        // It has come this far: the answer is due at the peer's next call.
        Err(Errno::EAGAIN) => return Step::Soon,
        Err(error) if !is_gone(error) => return Step::Bar(Reason::from(error)),
        Err(_) => return begin_again(socket),
        Ok(taken) if taken.caller.is_none() => return begin_again(socket),
        Ok(taken) => taken,
    };
    let answer = match Message::read(&bytes[..taken.len]) {
        Ok(answer) if answer.kind == ANSWER => answer,
        Ok(_) => return Step::Bar(Reason::BadPeer),
        Err(misfit) => return Step::Bar(Reason::from(misfit)),
    };
    let peer = match peer_of(socket, meeting) {
        Ok(peer) => peer,
        Err(reason) => return Step::Bar(reason),
    };
    let mut fds = taken.fds;
    let memory = 1 + usize::from(answer.context == 0 && answer.boards.number != 0);
    if fds.count > memory
        && let Err(step) = check_trust(socket, peer)
    {
        return step;
    }
    match Interconnect::agreed(adapter_of(tables, socket), answer.adapter) {
        None => return Step::Bar(Reason::NoAdapter),
        Some(Interconnect::Local) if again => return Step::Bar(Reason::NoAdapter),
        Some(Interconnect::Local) => {}
        Some(Interconnect::Mirrored) => {
            let (ring_bytes, ticket) = (answer.ring_bytes, answer.ticket);
            let request =
                introduction::Message { kind: JOIN, ring_bytes, ticket, ..Default::default() };
            if let Err(reason) = join(tables, socket, request) {
                return Step::Bar(reason);
            }
            meeting::keep(socket);
            meeting::leave(socket);
            attach_or_go_on(socket, registrations);
            return Step::Done;
        }
    }
    let Some(segment) = fds.take(0) else {
        return Step::Bar(if fds.truncated { Reason::NoDescriptor } else { Reason::BadPeer });
    };
    let mapped = map_segment(tables, socket, segment, answer.ring_bytes);
    apart::close_foreign(segment, fds.user);
    if let Err(reason) = mapped {
        return Step::Bar(reason);
    }
    keep_bell(socket, &answer, &mut fds, 1, peer);
    meeting::abandon(socket);
    attach_or_go_on(socket, registrations);
    Step::Done
}

/// Hello, or the answer, of an end that has an adapter, by which it is rung.
fn say_mirrored(
    socket: &Socket,
    meeting: i32,
    kind: u16,
    ring_bytes: u64,
    adapter: u64,
    ticket: [u64; 2],
) -> Result<(), Errno> {
    let fd = socket.fd();
    let message = Message { kind, ring_bytes, fd, adapter, ticket, ..Message::default() };
    rendezvous::send(meeting, message.frame().as_bytes(), &[])
}

/// Gets this end's segment from the adapter. The ticket for the other end, and the size of its ring.
fn join(
    tables: &Tables,
    socket: &Socket,
    request: introduction::Message,
) -> Result<([u64; 2], u64), Reason> {
    let home = home_of(socket);
    let (linked, home) = match socket.is_carried() {
        true => {
            let [lifeline, _] = socket.given();
            let lifeline = lifeline.swap(0) as i32;
            // (Hidden again below.)
            tables.clear(lifeline);
            let rope = home.and_then(context::rope);
            let linked = mirrored::introduce_to_carrier(lifeline, socket.fd(), request, rope);
            rope.iter().for_each(|(rope, _)| sys::close(*rope));
            (linked?, home.filter(|_| rope.is_some()))
        }
        false => {
            let card = home.and_then(context::card);
            let number = tables.config.adapter;
            let linked = mirrored::introduce(number, socket.fd(), request, card.as_ref())?;
            (linked, card.map(|card| card.context))
        }
    };
    let mapped = match linked.ring_bytes <= request.ring_bytes {
        true => map_checked(tables, linked.segment, linked.ring_bytes),
        false => Err(Reason::NoAdapter),
    };
    sys::close(linked.segment);
    let (area, geometry) = match mapped {
        Ok(mapped) => mapped,
        Err(reason) => {
            context::release(linked.bell);
            sys::close(linked.lifeline);
            return Err(reason);
        }
    };
    if socket.stage() == Stage::Attached {
        let joined = (linked.ticket, linked.ring_bytes);
        let fresh = Fresh { area, geometry, linked, home: home.unwrap_or(0) };
        again::change(tables, socket, fresh)?;
        bells::bell_was_named(socket);
        return Ok(joined);
    }
    socket.set_segment(area, geometry);
    socket.bell.set(linked.bell);
    socket.set_home(home.unwrap_or(0));
    if socket.is_carried() {
        bells::bell_was_named(socket);
    }
    tables.hide(linked.lifeline);
    socket.lifeline.set(linked.lifeline as u32);
    socket.end().adapter.set(linked.adapter);
    socket.end().mirrored.set(mirrored::HAS_ADAPTER);
    memory::begin_looking_after_adapters(tables);
    Ok((linked.ticket, linked.ring_bytes))
}

fn map_segment(
    tables: &Tables,
    socket: &Socket,
    segment: i32,
    ring_bytes: u64,
) -> Result<(), Reason> {
    let (area, geometry) = map_checked(tables, segment, ring_bytes)?;
    socket.set_segment(area, geometry);
    Ok(())
}

/// Somewhere.
fn map_checked(tables: &Tables, segment: i32, ring_bytes: u64) -> Result<(Area, Geometry), Reason> {
    let limit = tables.config.ring_bytes;
    let geometry = Geometry::new(ring_bytes.min(limit) as usize)
        .filter(|geometry| geometry.ring_bytes as u64 == ring_bytes)
        .ok_or(Reason::BadPeer)?;
    let bytes = geometry.segment_bytes();
    match map::sealed_size(segment) {
        Ok(size) if size == bytes => {}
        Ok(_) | Err(Errno::EINVAL) => return Err(Reason::BadPeer),
        Err(error) => return Err(Reason::from(error)),
    }
    budget::reserve(tables, bytes)?;
    let area = map::map_segment(segment, bytes).map_err(|error| {
        budget::release(tables, bytes);
        Reason::from(error)
    })?;
    let head = area.at::<Head>(0);
    if head.magic.load(Ordering::Relaxed) != SEGMENT_MAGIC {
        budget::release(tables, bytes);
        // SAFETY: mapped just now and shown to nobody.
        #[allow(unsafe_code)]
        unsafe {
            map::unmap(area)
        };
        return Err(Reason::BadPeer);
    }
    Ok((area, geometry))
}

/// A set may have told of it just now, once: at the next call that comes behind it.
#[cold]
fn one_shot(socket: &Socket) -> Step {
    view::show(socket, Reason::OneShot);
    Step::LaterFor(Reason::OneShot)
}

/// Its registrations stay as they are while that is held; those of one that is attached do in any case. (A part of its caller: `Lock`.)
#[inline(always)]
fn hold_registrations(socket: &Socket) -> Option<Option<Held<'_>>> {
    match socket.stage() {
        Stage::Attached => Some(None),
        _ => registration::hold_registrations(socket).map(Some),
    }
}

/// (What is attached has changed its segment already, `join`.)
fn attach_or_go_on(socket: &'static Socket, registrations: Option<Held<'_>>) {
    if let Some(registrations) = registrations {
        attach(socket, registrations);
    }
}

/// From now on every call on the socket goes through `transfer`.
fn attach(socket: &'static Socket, registrations: Held<'_>) {
    let end = socket.end();
    if let Some(outgoing) = socket.outgoing() {
        end.tx.begin_bare(&outgoing);
    }
    // Until nothing is new: another thread that changes an option now says so here behind that (`option_set`).
    let _ = (0..OPTION_LOOKS).any(|_| !copy_options(socket, end));
    carrier::attaching(socket, end);
    socket.kernel_tells();
    let (sent, received) = carrier::carried(socket);
    view::count_kernel_bytes(socket, sent, received);
    if !socket.advance(Stage::Attached) {
        return;
    }
    if end.holders.count() != 1 {
        // A handler that interrupted this step has forked: its child goes on with a connection of the kernel's.
        end.barred.set(Reason::Shared as u32);
    }
    carrier::attached(socket, end);
    moving::written_so_far(socket, end);
    view::show(socket, Reason::Young);
    registration::adopt(socket, registrations, |socket, room| {
        wait::want_bytes(socket, true, room);
    });
}

/// For tests: an end that need not look for its peer, with the segment of that, or one that it makes.
#[cfg(test)]
pub fn attach_with(socket: &'static Socket, segment: Option<i32>) -> i32 {
    let tables = tables().expect("started");
    let ring_bytes = tables.config.ring_bytes;
    let geometry = Geometry::new(ring_bytes as usize).expect("a sound size");
    let segment = match segment {
        None => make_segment(tables, socket, geometry).expect("a segment"),
        Some(segment) => {
            map_segment(tables, socket, segment, ring_bytes).expect("a sound segment");
            segment
        }
    };
    attach(socket, registration::hold_registrations(socket).expect("in no set"));
    segment
}

const OPTION_LOOKS: u32 = 8;

/// Options that the kernel keeps and we serve. True if one was not as we had it.
fn copy_options(socket: &Socket, end: &End) -> bool {
    let fd = socket.fd();
    let mut new = false;
    let mut copy = |word: &P32, value: u32| {
        if word.get() != value {
            word.set(value);
            new = true;
        }
    };
    copy(&end.nonblocking, fd::is_nonblocking(fd) as u32);
    if carrier::facts(socket).has_delays {
        let on = |option| tcp::int_option(fd, libc::IPPROTO_TCP, option).unwrap_or(0) as u32;
        copy(&end.no_delay, on(libc::TCP_NODELAY));
        copy(&end.cork, on(libc::TCP_CORK));
    }
    for (word, option) in
        [(&end.receive_timeout_ns, libc::SO_RCVTIMEO), (&end.send_timeout_ns, libc::SO_SNDTIMEO)]
    {
        let time = tcp::timeout_ns(fd, option);
        new |= word.get() != time;
        word.set(time);
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends of sockets, whose other ends came with a message.
    fn came(count: usize) -> ([i32; 3], rendezvous::Fds) {
        let channel = rendezvous::pair().unwrap();
        let (mut held, mut sent) = ([-1; 3], [-1; 3]);
        for at in 0..3 {
            [held[at], sent[at]] = rendezvous::pair().unwrap();
        }
        rendezvous::send(channel[0], b"x", &sent[..count]).unwrap();
        sent.into_iter().for_each(sys::close);
        let (_, fds) = rendezvous::receive(channel[1], &mut [0; 8]).unwrap();
        channel.into_iter().for_each(sys::close);
        assert_eq!(fds.count, count);
        (held, fds)
    }

    /// Nobody has the other ends of these any more. (They may be closed by a thread apart.)
    fn are_closed(held: &[i32]) {
        for end in held {
            let mut fds = [fd::pollfd { fd: *end, events: 0, revents: 0 }];
            let _ = fd::poll(&mut fds, Some(60_000_000_000), None);
            assert_ne!(fds[0].revents & libc::POLLHUP, 0, "{end} is kept");
            sys::close(*end);
        }
    }

    #[test]
    fn what_came_and_is_not_used_is_closed() {
        let (held, mut fds) = came(3);
        let given =
            [(0, true), (1, false), (2, false)].map(|(at, is)| Given::take(&mut fds, at, is));
        assert!(given.iter().all(|given| !given.missing));
        assert_eq!(fd::pending(held[0], 0) & libc::POLLHUP, 0);
        drop(fds);
        are_closed(&held[1..]);
        drop(given);
        are_closed(&held[..1]);
        let (held, mut fds) = came(1);
        assert_eq!(fds.take_all::<2>(0), None, "one is missing");
        drop(fds);
        are_closed(&held);
    }
}
