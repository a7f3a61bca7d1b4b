//! How a sender and a receiver of datagrams come to share a lane.
//!
//! ```text
//!   receiver                                   sender
//!   opens a door, named after its socket
//!                                              asks the kernel which socket receives what it sends
//!                                              knocks at that one's door
//!   asks the kernel whose the address is,
//!   checks who knocked,
//!   makes the lane, sends it to the other's door
//!                                              checks who answered, maps the lane
//!   a datagram comes from there by the kernel:
//!   turns the lane to the ring
//! ```
//!
//! Each step is taken inside a data call of the program, when it is due, and never waits. The last one is the proof that no firewall stands
//! between the two: until then the sender goes on sending through the kernel.

use super::asleep::arm;
use super::life::{bar, is_paused, rehome, show, show_path};
use super::outlets::{ATTACHED, FRESH, KNOCKED, NEVER, Outlet};
use super::{inlets, outlets};
use crate::config::Endpoint;
use crate::handshake::{self, Fields, Frame, Misfit, Protocol};
use crate::reasons::Reason;
use crate::socket::budget;
use crate::socket::epoll::{life, registration};
use crate::socket::table::{Socket, Stage, Tables, tables};
use crate::socket::{meet, pin, rings, view};
use ringlet_core::layout::{Head, LaneGeometry, SEGMENT_MAGIC};
use ringlet_core::memory::Area;
use ringlet_core::sync::Ordering;
use ringlet_core::view::SLOT_FREE;
use ringlet_linux::diag::Owner;
use ringlet_linux::meet::{self as rendezvous, Credentials, Fds};
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::tcp::{self, Address};
use ringlet_linux::{apart, map, proof, udp};

const HELLO: u16 = 1;
const LANE: u16 = 2;
/// Messages taken from the door in one call of the program.
const MESSAGES_AT_ONCE: u32 = 8;
/// Calls between two looks: a quarter of those made so far, up to so many.
const LATER_GROWTH: u32 = 4;
const LATER_MAX_CALLS: u32 = 128;
/// Where nobody has come for so many calls, looks get rare.
const RARE_AFTER_CALLS: u32 = 4096;
const RARELY_CALLS: u32 = 65_536;
/// Looks for the answer of a receiver that we knocked at: each second one after twice as many calls, so that they take 253 calls.
const ANSWER_LOOKS: u32 = 13;
/// Where nobody answers, the next knock comes as many calls later as there were, and at least so many; at most `RARE_AFTER_CALLS`.
const AGAIN_CALLS: u32 = 64;
/// Lanes checked in one call of the program.
const CHECKS_AT_ONCE: u32 = 8;
/// A lane that was idle for so long is checked for whether its sender lives.
const CHECK_IDLE_NS: u64 = 1_000_000_000;
/// Room for what the socket's receive buffer would hold: the kernel charges some 768 bytes for a small datagram.
const SLOT_CHARGE_BYTES: usize = 256;
const SLOTS_MIN: usize = 256;
const SLOTS_MAX: usize = 1 << 14;
/// A quarter holds the longest datagram.
const DATA_MIN_BYTES: usize = 256 << 10;

/// What goes through doors, both ways.
#[derive(Clone, Copy)]
struct Message {
    kind: u16,
    /// The speaker's descriptor and socket, and the socket that is spoken to.
    fd: i32,
    inode: u32,
    to_inode: u32,
    /// The lane's two ends.
    source: Address,
    target: Address,
    slot_count: u32,
    ring_bytes: u64,
}

impl Message {
    fn frame(&self) -> Frame {
        let end = |frame: Frame, end: &Address| frame.put(&end.ip).u32(u32::from(end.port));
        let frame = Frame::new(Protocol::Datagrams, self.kind)
            .u32(self.fd as u32)
            .u32(self.inode)
            .u32(self.to_inode);
        end(end(frame, &self.source), &self.target).u32(self.slot_count).u64(self.ring_bytes)
    }

    fn read(packet: &[u8]) -> Result<Message, Misfit> {
        let address = |fields: &mut Fields| {
            Some(Address { ip: fields.array()?, port: u16::try_from(fields.u32()?).ok()? })
        };
        handshake::read(packet, Protocol::Datagrams, |kind, fields| {
            Some(Message {
                kind,
                fd: fields.u32()? as i32,
                inode: fields.u32()?,
                to_inode: fields.u32()?,
                source: address(fields)?,
                target: address(fields)?,
                slot_count: fields.u32()?,
                ring_bytes: fields.u64()?,
            })
        })
    }
}

/// When to look again, after so many calls.
fn later(calls: u32) -> u32 {
    calls.saturating_add((calls / LATER_GROWTH).clamp(1, LATER_MAX_CALLS))
}

/// The same for a sender, to whom nobody may come any more.
fn later_or_rarely(calls: u32) -> u32 {
    if calls > RARE_AFTER_CALLS { calls.saturating_add(RARELY_CALLS) } else { later(calls) }
}

/// One thread at a time takes a socket's steps.
pub fn stepping(socket: &Socket, step: impl FnOnce()) {
    // ORDER: Acquire, and Release at the end of `stepping`: the next one sees what this one wrote.
    if socket.stepping.swap(1, Ordering::Acquire) == 0 {
        step();
        socket.stepping.store(0, Ordering::Release);
    }
}

/// As `context::move_away`, for doors.
pub fn move_door(fd: i32) -> bool {
    let Some(tables) = tables() else { return false };
    let has = |socket: &&'static Socket| {
        outlets::of(socket).is_some_and(|(_, outbox)| outbox.door.get() as i32 == fd)
    };
    let mut moved = false;
    if let Some(socket) = tables.followed().find(has) {
        // In the middle of a step it is not to be had: who has the old number would use the program's file.
        stepping(socket, || {
            moved = outlets::of(socket).is_some_and(|(_, outbox)| {
                outbox.door.get() as i32 == fd && tables.rename(&outbox.door)
            });
        });
    }
    moved
}

/// May this socket have lanes now? Bars it if it never may.
fn may_have_lanes(tables: &Tables, socket: &'static Socket) -> bool {
    rings::look_for_others();
    if let Some((reason, for_good)) = pin::keeps_all_on_kernel() {
        if for_good {
            bar(socket, reason);
        }
        return false;
    }
    if life::may_be_watched_by_a_strange_set(tables, socket) {
        bar(socket, Reason::OwnEpoll);
        return false;
    }
    if !tables.holders.is_alone(&socket.end().holders) {
        show(socket, Reason::Shared);
        return false;
    }
    if !rehome(socket) {
        show(socket, Reason::Shared);
        return false;
    }
    if is_paused(socket) {
        show(socket, Reason::Paused);
        return false;
    }
    matches!(socket.stage(), Stage::Datagram | Stage::Mailbox) && !socket.end().barred.is()
}

/// The socket's door, opened if need be.
fn door(tables: &Tables, socket: &'static Socket) -> Option<i32> {
    let (_, outbox) = outlets::of(socket)?;
    if outbox.door.is() {
        return Some(outbox.door.get() as i32);
    }
    let opened = udp::inode(socket.fd()).and_then(|inode| {
        outbox.inode.set(inode);
        let door = udp::open_door(inode)?;
        // (This thread's network namespace may be another one than the socket's.)
        if proof::are_of_two_namespaces(door, socket.fd()) {
            rendezvous::part(door);
            return Err(Errno(libc::EXDEV));
        }
        Ok(door)
    });
    match opened {
        Ok(door) => {
            tables.hide(door);
            outbox.door.set(door as u32);
            show(socket, Reason::NoPeer);
            Some(door)
        }
        Err(Errno(libc::EXDEV)) => {
            show(socket, Reason::NotLocal);
            None
        }
        Err(error) => {
            bar(socket, Reason::from(error));
            None
        }
    }
}

/// A socket that receives: opens its door, and looks whether somebody is there. Called with no lock held.
#[cold]
pub fn receiving(socket: &'static Socket) {
    let Some(tables) = tables() else { return };
    stepping(socket, || {
        let calls = socket.calls.get();
        socket.next_step.set(later(calls));
        if may_have_lanes(tables, socket)
            && tcp::local(socket.fd()).is_some_and(|local| local.port != 0)
            && let Some(door) = door(tables, socket)
        {
            if take_messages(tables, socket, door) {
                socket.next_step.set(calls + 1);
            }
            for _ in 0..CHECKS_AT_ONCE {
                if !check_idle(socket) {
                    break;
                }
            }
            if let Some((all, outbox)) = outlets::of(socket)
                && let Some(_held) = socket.end().send_lock.take()
            {
                outbox.check_idle(all, CHECKS_AT_ONCE);
            }
        }
    });
}

/// A socket that sends to `to`: the next step towards a lane there. Called with no lock held.
#[cold]
pub fn sending(socket: &'static Socket, to: &Address) {
    let Some(tables) = tables() else { return };
    stepping(socket, || {
        let Some((all, outbox)) = outlets::of(socket) else { return };
        if !may_have_lanes(tables, socket) {
            return put_off(socket, to);
        }
        if outbox.door.is() {
            take_messages(tables, socket, outbox.door.get() as i32);
        }
        let state = {
            let Some(_held) = socket.end().send_lock.take() else { return };
            outbox.check_idle(all, CHECKS_AT_ONCE);
            let Some(outlet) = outbox.outlet(all, to).map(|index| all.get(index)) else { return };
            let calls = outlet.calls.get();
            match outlet.state.get() {
                KNOCKED if outlet.tries.add(1) <= ANSWER_LOOKS => {
                    outlet.next_step.set(calls + (1 << (outlet.tries.get() / 2)));
                    KNOCKED
                }
                // (It may be one that sends too seldom for a lane, and sends much by then.)
                KNOCKED => {
                    outlet.begin_again(calls + calls.clamp(AGAIN_CALLS, RARE_AFTER_CALLS));
                    KNOCKED
                }
                ATTACHED | NEVER => {
                    outlet.next_step.set(u32::MAX);
                    NEVER
                }
                _ => {
                    outlet.next_step.set(later_or_rarely(calls));
                    FRESH
                }
            }
        };
        if state == FRESH {
            knock(tables, socket, to);
        }
        // A lane may have ended since the socket was shown last.
        if view::of(socket).is_some_and(|slot| slot.path.load(Ordering::Relaxed) != SLOT_FREE) {
            show_path(socket);
        }
    });
}

/// Not now; later.
fn put_off(socket: &Socket, to: &Address) {
    if let Some(_held) = socket.end().send_lock.take()
        && let Some((all, outbox)) = outlets::of(socket)
        && let Some(index) = outbox.outlet(all, to)
    {
        let outlet = all.get(index);
        outlet.next_step.set(later_or_rarely(outlet.calls.get()));
    }
}

/// The outlet of `to`, changed behind the send lock.
fn change(socket: &Socket, to: &Address, change: impl FnOnce(&Outlet)) {
    if let Some(_held) = socket.end().send_lock.take()
        && let Some((all, outbox)) = outlets::of(socket)
        && let Some(index) = outbox.outlet(all, to)
    {
        change(all.get(index));
    }
}

/// Is it for a lane at all, and who receives it? Then we knock there.
fn knock(tables: &Tables, socket: &'static Socket, to: &Address) {
    let never = |reason| {
        show(socket, reason);
        change(socket, to, |outlet| {
            outlet.state.set(NEVER);
            outlet.next_step.set(u32::MAX);
        });
    };
    let Some(source) = udp::source(socket.fd(), to) else { return never(Reason::NotLocal) };
    if !is_local(&source, to) || !udp::is_of_one(to) {
        return never(Reason::NotLocal);
    }
    if !allowed(tables, &source, to) {
        return never(Reason::Off);
    }
    let owner = match udp::receiver_for(socket.fd(), &source, to) {
        Ok(owner) => owner,
        Err(Errno::ENOENT) => return,
        Err(error) => return never(Reason::from(error)),
    };
    let Some(door) = door(tables, socket) else { return };
    let Some((_, outbox)) = outlets::of(socket) else { return };
    if owner.inode == outbox.inode.get() {
        return never(Reason::NotLocal);
    }
    // Before we knock, so that the answer finds it.
    change(socket, to, |outlet| {
        outlet.set_source(&source);
        outlet.inode.set(owner.inode);
        outlet.state.set(KNOCKED);
        outlet.tries.set(0);
        outlet.next_step.set(outlet.calls.get() + 1);
    });
    let hello = Message {
        kind: HELLO,
        fd: socket.fd(),
        inode: outbox.inode.get(),
        to_inode: owner.inode,
        source,
        target: *to,
        slot_count: 0,
        ring_bytes: 0,
    };
    rendezvous::admit_descriptors(door, true);
    if udp::knock(door, owner.inode, hello.frame().as_bytes(), &[]).is_err() {
        // Nobody is there, or too many are.
        change(socket, to, |outlet| outlet.begin_again(later_or_rarely(outlet.calls.get())));
    }
}

/// Both ends on this machine, and the way from one to the other. (A link's address is not whole without its link.)
fn is_local(source: &Address, to: &Address) -> bool {
    let is_link = |end: &Address| end.ip[..2] == [0xfe, 0x80];
    !is_link(to) && !is_link(source) && udp::stays_here(source, to)
}

fn allowed(tables: &Tables, local: &Address, remote: &Address) -> bool {
    let endpoint = |end: &Address| Endpoint { address: end.ip, port: end.port };
    tables.config.allows(endpoint(local), endpoint(remote))
}

/// Takes what waits at the door. True if there was something.
///
/// Only an answer that we have asked for, from who receives what we send, is taken with its descriptor. Anybody else's descriptors are left
/// where they are, with the door: it is given up.
fn take_messages(tables: &Tables, socket: &'static Socket, door: i32) -> bool {
    let mut any = false;
    for _ in 0..MESSAGES_AT_ONCE {
        let mut bytes = [0; handshake::ROOM_BYTES];
        let Ok(heard) = rendezvous::look_at(door, &mut bytes) else { break };
        let Some(caller) = heard.caller else { break };
        any = true;
        let Some((_, outbox)) = outlets::of(socket) else { break };
        let message = Message::read(&bytes[..heard.len]).and_then(|message| {
            let to_us = message.to_inode == outbox.inode.get();
            if to_us { Ok(message) } else { Err(Misfit::Nonsense) }
        });
        let taken = match (message, heard.fds.truncated) {
            (Ok(message), false) if message.kind == HELLO => {
                rendezvous::skip(door);
                match pays(socket, &message.source) {
                    true => take_hello(tables, socket, door, &message, caller),
                    // (It knocks again: by then it may be known to send much.)
                    false => Ok(()),
                }
            }
            (Ok(message), true) if message.kind == LANE => {
                match take_answer(tables, socket, door, &message, caller) {
                    Some(taken) => taken,
                    None => {
                        bar(socket, Reason::BadPeer);
                        break;
                    }
                }
            }
            (said, false) => {
                rendezvous::skip(door);
                Err(said.err().map_or(Reason::BadPeer, Reason::from))
            }
            (_, true) => {
                bar(socket, Reason::BadPeer);
                break;
            }
        };
        if let Err(reason) = taken {
            show(socket, reason);
        }
    }
    any
}

/// Who knocks or answers must hold the socket that it speaks for, and be trusted not to use the lane when it has closed that socket: the port may be
/// another user's by then, and what comes by the lane would come in that one's name. Such a one can harm us anyway.
fn check_caller(
    tables: &Tables,
    owner: &Owner,
    caller: Credentials,
    fd: i32,
) -> Result<(), Reason> {
    meet::check_caller(tables, owner, caller, fd)?;
    if meet::trusted(caller) { Ok(()) } else { Err(Reason::OtherUser) }
}

/// The sender: an answer with a descriptor is at the door. `None` if it is not to be taken.
fn take_answer(
    tables: &Tables,
    socket: &'static Socket,
    door: i32,
    answer: &Message,
    caller: Credentials,
) -> Option<Result<(), Reason>> {
    let owner = udp::receiver_for(socket.fd(), &answer.source, &answer.target).ok()?;
    let found = if owner.inode == answer.inode { Ok(()) } else { Err(Reason::NotOwner) };
    let checked = found.and_then(|()| check_caller(tables, &owner, caller, answer.fd));
    if let Err(reason) = checked {
        // One of the same user may be late; one of another is none of our business.
        let ours = rendezvous::is_our_user(caller.uid);
        let taken = ours.then(|| rendezvous::take(door, &mut [])).and_then(Result::ok);
        return taken.filter(|taken| !taken.fds.truncated).map(|_| Err(reason));
    }
    let taken = rendezvous::take(door, &mut [0; handshake::ROOM_BYTES]).ok()?;
    if taken.fds.truncated {
        return None;
    }
    let lane = take_lane(tables, socket, answer, taken.fds);
    // (Others that we have knocked at are still to answer.)
    let awaits = || {
        let (all, outbox) = outlets::of(socket)?;
        let _held = socket.end().send_lock.take()?;
        Some(outbox.awaits(all))
    };
    rendezvous::admit_descriptors(door, awaits() == Some(true));
    Some(lane)
}

fn pays(socket: &Socket, source: &Address) -> bool {
    inlets::of(socket).is_some_and(|(all, mailbox)| {
        socket.end().receive_lock.take().is_some_and(|_held| mailbox.pays(all, source))
    })
}

/// The receiver: somebody wants to send to us by a lane.
fn take_hello(
    tables: &Tables,
    socket: &'static Socket,
    door: i32,
    hello: &Message,
    caller: Credentials,
) -> Result<(), Reason> {
    if !is_local(&hello.source, &hello.target) {
        return Err(Reason::NotLocal);
    }
    if !allowed(tables, &hello.target, &hello.source) {
        return Err(Reason::Off);
    }
    if udp::peer(socket.fd()).is_some_and(|peer| peer != hello.source) {
        return Err(Reason::NotOwner);
    }
    // A socket of all addresses is not told to which one a datagram came: that the sender's come to another one is no proof for this one, from
    // where they may be sent elsewhere (DNAT, IPVS).
    let (source, target) = (&hello.source, &hello.target);
    let one_way = source.ip == target.ip || source.is_loopback() && target.is_loopback();
    if !one_way && tcp::local(socket.fd()).is_none_or(|local| udp::is_any(&local)) {
        return Err(Reason::NotLocal);
    }
    // Whose is the address that it says it sends from? Only that socket may use it; and what it sends there comes to us.
    let owner = udp::receiver_for(socket.fd(), &hello.target, &hello.source)
        .map_err(|_| Reason::NotOwner)?;
    if owner.inode != hello.inode {
        return Err(Reason::NotOwner);
    }
    check_caller(tables, &owner, caller, hello.fd)?;
    let (all, mailbox) = inlets::of(socket).ok_or(Reason::Full)?;
    let registrations = match socket.stage() {
        Stage::Datagram => Some(registration::hold_registrations(socket).ok_or(Reason::OneShot)?),
        _ => None,
    };
    let geometry = geometry(tables, socket);
    let (memfd, area) = make_lane(tables, geometry)?;
    let added = {
        let held = socket.end().receive_lock.take();
        let alone = tables.holders.is_alone(&socket.end().holders);
        let free = held.is_some() && alone && !socket.end().barred.is();
        if let (true, Some(old)) = (free, mailbox.find(all, &hello.source)) {
            mailbox.close(all, old);
        }
        // One that still holds something keeps its place in the order; its sender knocks again later.
        free && mailbox.find(all, &hello.source).is_none()
            && !mailbox.is_full()
            && mailbox.add(all, &hello.source, hello.inode, area, geometry)
    };
    if !added {
        sys::close(memfd);
        give_back(tables, area);
        return Err(Reason::Full);
    }
    if let Some(registrations) = registrations {
        // Calls that receive look at the mailbox from now on.
        socket.set_stage(Stage::Mailbox);
        registration::adopt(socket, registrations, |socket, _| _ = arm(socket, true));
    }
    let answer = Message {
        kind: LANE,
        fd: socket.fd(),
        inode: hello.to_inode,
        to_inode: hello.inode,
        slot_count: geometry.slot_count as u32,
        ring_bytes: geometry.ring_bytes as u64,
        ..*hello
    };
    let said = udp::knock(door, hello.inode, answer.frame().as_bytes(), &[memfd]);
    sys::close(memfd);
    if said.is_err()
        && let Some(_held) = socket.end().receive_lock.take()
        && let Some(index) = mailbox.find(all, &hello.source)
    {
        mailbox.close(all, index);
    }
    Ok(())
}

fn geometry(tables: &Tables, socket: &Socket) -> LaneGeometry {
    let room = tcp::int_option(socket.fd(), libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap_or(0);
    let room = room.max(0) as usize;
    let most = (tables.config.ring_bytes as usize).max(DATA_MIN_BYTES);
    LaneGeometry {
        slot_count: (room / SLOT_CHARGE_BYTES).next_power_of_two().clamp(SLOTS_MIN, SLOTS_MAX),
        ring_bytes: room.next_power_of_two().clamp(DATA_MIN_BYTES, most),
    }
}

fn make_lane(tables: &Tables, geometry: LaneGeometry) -> Result<(i32, Area), Reason> {
    let bytes = geometry.lane_bytes();
    budget::reserve(tables, bytes)?;
    let made = map::sealed_memfd(c"ringlet-lane", bytes, libc::F_SEAL_SEAL).and_then(|fd| {
        map::map_segment(fd, bytes).map(|area| (fd, area)).inspect_err(|_| sys::close(fd))
    });
    let (fd, area) = made.map_err(|error| {
        budget::release(tables, bytes);
        Reason::from(error)
    })?;
    area.at::<Head>(HEAD_OFFSET).magic.store(SEGMENT_MAGIC, Ordering::Relaxed);
    Ok((fd, area))
}

/// Behind the words of the lane's two sides.
const HEAD_OFFSET: usize = 4096 - 64;

/// A mapping that nobody has seen.
#[allow(unsafe_code)]
fn give_back(tables: &Tables, area: Area) {
    budget::release(tables, area.len());
    // SAFETY: mapped just now and shown to nobody.
    unsafe { map::unmap(area) };
}

/// The sender: the receiver has answered.
fn take_lane(
    tables: &Tables,
    socket: &'static Socket,
    answer: &Message,
    mut fds: Fds,
) -> Result<(), Reason> {
    let memfd = fds.take(0).ok_or(Reason::BadPeer)?;
    let mapped = check_lane(tables, answer, memfd);
    apart::close_foreign(memfd, fds.user);
    let (area, geometry) = mapped?;
    {
        let _held = socket.end().send_lock.take();
        if let Some((all, outbox)) = outlets::of(socket)
            && let Some(outlet) = outbox.knocked_at(all, answer.inode, &answer.target)
            && outlet.source() == answer.source
        {
            outlet.attach(area, geometry);
            drop(_held);
            show(socket, Reason::None);
            return Ok(());
        }
    }
    give_back(tables, area);
    Err(Reason::NoPeer)
}

fn check_lane(
    tables: &Tables,
    answer: &Message,
    memfd: i32,
) -> Result<(Area, LaneGeometry), Reason> {
    let geometry = LaneGeometry::new(answer.slot_count as usize, answer.ring_bytes as usize)
        .filter(|geometry| geometry.ring_bytes >= DATA_MIN_BYTES)
        .ok_or(Reason::BadPeer)?;
    let bytes = geometry.lane_bytes();
    if map::sealed_size(memfd) != Ok(bytes) {
        return Err(Reason::BadPeer);
    }
    budget::reserve(tables, bytes)?;
    let area = map::map_segment(memfd, bytes).map_err(|error| {
        budget::release(tables, bytes);
        Reason::from(error)
    })?;
    if area.at::<Head>(HEAD_OFFSET).magic.load(Ordering::Relaxed) != SEGMENT_MAGIC {
        give_back(tables, area);
        return Err(Reason::BadPeer);
    }
    Ok((area, geometry))
}

/// One lane whose sender was not seen for long: does it live? False if there is none to be checked.
fn check_idle(socket: &Socket) -> bool {
    let Some((all, mailbox)) = inlets::of(socket) else { return false };
    let now = sys::now_ns();
    let found = {
        let Some(_held) = socket.end().receive_lock.take() else { return false };
        mailbox.unchecked_since(all, now.saturating_sub(CHECK_IDLE_NS)).map(|(_, inlet)| {
            inlet.checked_ns.set(now);
            (inlet.source(), inlet.inode.get())
        })
    };
    let Some((source, inode)) = found else { return false };
    let Some(local) = tcp::local(socket.fd()) else { return false };
    // A socket that is bound to no address is looked for from the sender's own.
    let from = Address { ip: if udp::is_any(&local) { source.ip } else { local.ip }, ..local };
    let lives = udp::receiver(&from, &source).is_ok_and(|owner| owner.inode == inode);
    if !lives
        && let Some(_held) = socket.end().receive_lock.take()
        && let Some(index) = mailbox.find(all, &source)
    {
        mailbox.close(all, index);
    }
    true
}
