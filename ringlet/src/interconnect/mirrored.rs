//! The mirror, as an end sees it: how it gets its segment from the adapter, and what it asks of the adapter (`ringlet_core::mirror`) where a peer that
//! shares its memory would simply see.
//!
//! An adapter never waits for a program, so its answers are waited for, also in calls that must not block: some microseconds, if it is awake. From one that
//! does not answer (it stands still, with its service perhaps, and may go on) an end severs itself, and goes on as if it had died.

use super::Interconnect;
use super::introduction::{GREETING, LINKED, Message, name};
use super::sever::{LOOK_NS, has_died, sever};
use crate::plain::P64;
use crate::reasons::Reason;
use crate::socket::context;
use crate::socket::table::{Socket, tables};
use ringlet_core::layout::WANT_EVENT;
use ringlet_core::mirror::Asks;
use ringlet_core::ring::SegmentRing;
use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::bell::Address;
use ringlet_linux::fd;
use ringlet_linux::meet::{self, Received};
use ringlet_linux::sys::{self, Errno};

/// Values of `End::mirrored`: its adapter lives, as far as is known; our direction needs none any more.
pub const HAS_ADAPTER: u32 = 1;
pub const NEEDS_NO_ADAPTER: u32 = 2;

/// How long the adapter may take for an introduction; and to answer what is asked in shared memory (a machine may have other work).
const INTRODUCTION_NS: u64 = 2_000_000_000;
const ANSWER_NS: u64 = if cfg!(test) { 20_000_000 } else { 2_000_000_000 };
/// The same where that adapter did not answer another end of this process's lately. (One that goes on has some thousand links to look at first.)
const ANSWER_AGAIN_NS: u64 = ANSWER_NS / 8;
/// So long ago is lately.
const LATELY_NS: u64 = 10_000_000_000;
/// Looks in a row before the processor is left to the adapter, and with that before it is left alone for a moment.
const QUICK_LOOKS: u32 = 200;
const YIELDING_LOOKS: u32 = 1000;

/// What the adapter has given an end.
pub struct Linked {
    /// Ours to close, all.
    pub lifeline: i32,
    pub segment: i32,
    pub ring_bytes: u64,
    pub ticket: [u64; 2],
    /// The adapter's doorbell (`context::keep`).
    pub bell: u32,
    /// By what the adapter is told from others.
    pub adapter: u64,
}

/// Asks the adapter of this number for a segment. `card`: the doorbell by which it may ring us.
pub fn introduce(
    number: u64,
    socket: i32,
    request: Message,
    card: Option<&context::Card>,
) -> Result<Linked, Reason> {
    let lifeline = meet::look_named(&name(number)).map_err(reason)?;
    let linked = introduce_by(lifeline, socket, request, card);
    if linked.is_err() {
        meet::part(lifeline);
    }
    linked
}

/// The same of who carries, over the lifeline that the node service has given us, which becomes the answer's. No eventfds are exchanged: who holds
/// one could make the other wait. `rope`: by what it may ring us.
pub fn introduce_to_carrier(
    lifeline: i32,
    socket: i32,
    request: Message,
    rope: Option<(i32, Address)>,
) -> Result<Linked, Reason> {
    let until = sys::now_ns() + INTRODUCTION_NS;
    let linked = greeted(lifeline, until).and_then(|most| {
        let ring_bytes = if most == 0 { request.ring_bytes } else { request.ring_bytes.min(most) };
        let (rope, bell) = rope.unwrap_or((-1, Address::default()));
        let request = Message { ring_bytes, bell, ..request };
        let fds = &[socket, rope][..1 + usize::from(rope >= 0)];
        meet::send(lifeline, request.frame().as_bytes(), fds).map_err(reason)?;
        let (linked, Received { mut fds, .. }) = hear(lifeline, until)?;
        if linked.kind != LINKED || linked.ring_bytes != ring_bytes {
            return Err(Reason::NoAdapter);
        }
        meet::admit_descriptors(lifeline, false);
        let segment = fds.take(0).ok_or(Reason::NoAdapter)?;
        let Some(bell) = context::keep_line(lifeline) else {
            sys::close(segment);
            return Err(Reason::NoDescriptor);
        };
        let adapter = linked.process;
        Ok(Linked { lifeline, segment, ring_bytes, ticket: linked.ticket, bell, adapter })
    });
    if linked.is_err() {
        meet::part(lifeline);
    }
    linked
}

/// The greeting's ring size.
fn greeted(lifeline: i32, until: u64) -> Result<u64, Reason> {
    meet::admit_descriptors(lifeline, true);
    match hear(lifeline, until)? {
        (greeting, _) if greeting.kind == GREETING => Ok(greeting.ring_bytes),
        _ => Err(Reason::NoAdapter),
    }
}

fn introduce_by(
    lifeline: i32,
    socket: i32,
    request: Message,
    card: Option<&context::Card>,
) -> Result<Linked, Reason> {
    let adapter = meet::credentials(lifeline).map_err(reason)?;
    if adapter.uid != 0 && !meet::is_our_user(adapter.uid) {
        return Err(Reason::NoAdapter);
    }
    let until = sys::now_ns() + INTRODUCTION_NS;
    greeted(lifeline, until)?;
    let fds =
        [socket, card.map_or(-1, |card| card.eventfd), card.map_or(-1, |card| card.page_memfd)];
    let request = Message {
        process: card.map_or(0, |card| card.process),
        context: card.map_or(0, |card| card.context),
        ..request
    };
    let count = if card.is_some() { 3 } else { 1 };
    meet::send(lifeline, request.frame().as_bytes(), &fds[..count]).map_err(reason)?;
    let (linked, Received { mut fds, .. }) = hear(lifeline, until)?;
    if linked.kind != LINKED {
        return Err(Reason::NoAdapter);
    }
    let Some([segment, eventfd, page]) = fds.take_all(0) else {
        return Err(if fds.truncated { Reason::NoDescriptor } else { Reason::NoAdapter });
    };
    let bell = [eventfd, page];
    let bell = context::keep(adapter.pid, linked.process, linked.context, bell, None);
    let Some(bell) = bell else {
        sys::close(segment);
        return Err(Reason::NoDescriptor);
    };
    let Message { ring_bytes, ticket, .. } = linked;
    Ok(Linked { lifeline, segment, ring_bytes, ticket, bell, adapter: adapter.pid as u64 })
}

fn reason(error: Errno) -> Reason {
    match error {
        Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM => Reason::from(error),
        _ => Reason::NoAdapter,
    }
}

/// The adapter's next message.
fn hear(lifeline: i32, until: u64) -> Result<(Message, Received), Reason> {
    let mut bytes = [0; crate::handshake::ROOM_BYTES];
    loop {
        match meet::take(lifeline, &mut bytes) {
            Ok(taken) if taken.caller.is_none() => return Err(Reason::NoAdapter),
            Ok(taken) if taken.fds.truncated => return Err(Reason::NoDescriptor),
            Ok(taken) => {
                let message = Message::read(&bytes[..taken.len]).map_err(Reason::from)?;
                return Ok((message, taken));
            }
            Err(Errno::EAGAIN) => {}
            Err(error) => return Err(reason(error)),
        }
        let left = until.checked_sub(sys::now_ns()).ok_or(Reason::NoAdapter)?;
        let mut fds = [fd::pollfd { fd: lifeline, events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut fds, Some(left), None);
    }
}

/// How often a process that has mirrored connections looks whether their adapters live.
pub const LOOK_AFTER_NS: u64 = 500_000_000;

/// Something was said or asked: the adapter looks, if it sleeps.
pub fn stir(socket: &Socket) {
    // ORDER: a fence behind what was said, which may be a plain store; pairs with the fence of `Wish::want`.
    fence(Ordering::SeqCst);
    if let Some(outgoing) = socket.outgoing()
        && outgoing.control().data_wish().granted_by_sender() & WANT_EVENT != 0
    {
        context::ring(socket);
    }
}

/// We have said something to the peer that no publish follows: over a mirror the adapter is to look.
pub fn said(socket: &Socket) {
    if socket.interconnect() == Interconnect::Mirrored {
        stir(socket);
    }
}

/// Rings the peer's home context, as for what it sleeps for.
pub fn ring_event(socket: &Socket) {
    match (socket.interconnect(), socket.outgoing()) {
        (Interconnect::Mirrored, Some(outgoing)) => {
            outgoing.control().ask_event();
            stir(socket);
        }
        _ => drop(context::ring(socket)),
    }
}

/// Which adapter did not answer this process, and until when another end does not wait for it as long. (Two words of which threads may see one only: then
/// an end waits less long, or longer.)
struct Silent {
    adapter: P64,
    until_ns: P64,
}

static SILENT: Silent = Silent { adapter: P64::new(0), until_ns: P64::new(0) };

impl Silent {
    fn patience_ns(&self, adapter: u64, now: u64) -> u64 {
        let is_silent = self.adapter.get() == adapter && now < self.until_ns.get();
        if is_silent { ANSWER_AGAIN_NS } else { ANSWER_NS }
    }

    fn says_nothing(&self, adapter: u64, now: u64) {
        self.adapter.set(adapter);
        self.until_ns.set(now + LATELY_NS);
    }

    fn answers(&self, adapter: u64) {
        if self.until_ns.get() != 0 && self.adapter.get() == adapter {
            self.until_ns.set(0);
        }
    }
}

/// Waits for an answer of the adapter's. False if it is dead, or we have severed ourselves since it gave none, or could not.
pub fn answered(socket: &Socket, done: impl Fn() -> bool) -> bool {
    let end = socket.end();
    if end.mirrored.get() == NEEDS_NO_ADAPTER {
        return done();
    }
    let mut until = 0;
    for look in 0u32.. {
        if done() {
            SILENT.answers(end.adapter.get());
            return true;
        }
        stir(socket);
        match look {
            0..QUICK_LOOKS => core::hint::spin_loop(),
            // (By time, too: where others want the processor a yield may take a tick of theirs.)
            _ => {
                let now = sys::now_ns();
                if until == 0 {
                    let waits = SILENT.patience_ns(end.adapter.get(), now);
                    until = now + if end.unanswered.is() { 0 } else { waits };
                }
                let yields = look < YIELDING_LOOKS;
                if now > until {
                    SILENT.says_nothing(end.adapter.get(), now);
                    sever(socket);
                    return done();
                }
                if !yields && has_died(socket) {
                    return done();
                }
                if yields {
                    sys::sched_yield();
                    continue;
                }
                let _ = fd::poll(&mut [], Some(LOOK_NS), None);
            }
        }
    }
    false
}

/// Has the peer all that we published and said in this direction? Waits until it does.
pub fn flush(socket: &Socket, outgoing: &SegmentRing) -> bool {
    let words = outgoing.control();
    let asked = words.ask_delivery();
    answered(socket, || words.is_delivered(asked) || words.is_over())
}

/// No more doorbell bytes of ours come; waits until that is so.
pub fn silence(socket: &Socket, outgoing: &SegmentRing) -> bool {
    let words = outgoing.control();
    words.ask_silence();
    answered(socket, || words.bells_of_silence().is_some() || words.is_over())
}

/// Over a mirror, the adapter lets go of our kernel connection, having delivered all; waits until it has.
/// False if it has died before.
pub fn part(socket: &Socket) -> bool {
    let Some(outgoing) = socket.outgoing() else { return true };
    let words = outgoing.control();
    if socket.interconnect() == Interconnect::Local || words.has_parted() {
        return true;
    }
    words.ask_parting();
    answered(socket, || words.has_parted())
}

/// The program wants the number of an end's lifeline, or channel. True if it was one.
pub fn move_away(fd: i32) -> bool {
    let Some(tables) = tables() else { return false };
    let words = |socket: &'static Socket| {
        [&socket.lifeline, &socket.channel, &socket.next_lifeline, &socket.next_channel]
    };
    let mut all = tables.followed().flat_map(words);
    all.find(|word| word.get() as i32 == fd).is_some_and(|word| tables.rename(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_is_waited_for_less_for_a_while_and_nobody_else() {
        let silent = Silent { adapter: P64::new(0), until_ns: P64::new(0) };
        assert_eq!(silent.patience_ns(0, 1), ANSWER_NS, "nobody was asked yet");
        silent.says_nothing(7, 1);
        assert_eq!(silent.patience_ns(7, 2), ANSWER_AGAIN_NS);
        assert_eq!(silent.patience_ns(8, 2), ANSWER_NS, "another adapter");
        silent.answers(8);
        assert_eq!(silent.patience_ns(7, 2), ANSWER_AGAIN_NS, "another one has answered");
        assert_eq!(silent.patience_ns(7, 1 + LATELY_NS), ANSWER_NS, "that was long ago");
        silent.answers(7);
        assert_eq!(silent.patience_ns(7, 2), ANSWER_NS, "it has answered");
    }
}
