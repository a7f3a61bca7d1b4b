//! Services of the native library's that are offered beyond their network namespace, and who calls them (`ringlet::interconnect::node::Ask`).
//!
//! ```text
//!   calling program       its node                  the other node       offering program
//!                                                                    <-- offer
//!   call: NODE:SERVICE -->
//!                         -- Call -->               asks its policy; hands a socket to its process
//!                                                                    --> call: NODE, a socket
//!                         <-- Answer --
//!                         asks its policy
//!                     <-- met: a socket to its process (`crate::fabric`)
//! ```
//!
//! On one host the two get the two ends of one socket, and the service is out of it.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use ringlet::handshake::Frame;
use ringlet::interconnect::node::{Ask, CALL, HERE, MET, Message, NAME, OFFER};
use ringlet::reasons::Reason;
use ringlet_linux::meet;
use ringlet_linux::sys::Errno;
use rustix::net::sockopt;

use crate::apart::{From, Handed};
use crate::cluster::{Called, Peer, Word};
use crate::notes::Notes;
use crate::service::{Guest, Service, State};

/// What waits to be accepted counts as ours: by the room of a service's lifeline, that is some 80 callers, and then they are told that the node is
/// full. KERNEL: the value is doubled, and a message that brings a descriptor takes some 800 bytes.
const ROOM_BYTES: usize = 32 << 10;

/// A call that the other node is to answer.
pub(crate) struct Calls {
    peer: Peer,
    lane: u32,
    service: String,
    /// What the caller gets.
    socket: Handed,
}

impl<N: Notes> Service<N> {
    pub(crate) fn asked(&mut self, token: u64, asked: &Ask) {
        let Some(name) = asked.text().filter(|name| !name.chars().any(char::is_control)) else {
            return self.send_away(token, Reason::BadPeer);
        };
        match (asked.kind, name.split_once(':')) {
            (OFFER, None) => self.offer(token, name),
            (NAME, None) => self.tell_name(token),
            (CALL, Some((node, service))) if self.is_here(node) => self.call_here(token, service),
            (CALL, Some((node, service))) => {
                // (Or an address of its.)
                let far = self.far.as_ref();
                let named = node.parse().ok().and_then(|address| far?.cluster.node_of(address));
                let node = named.as_deref().unwrap_or(node);
                if self.is_here(node) {
                    return self.call_here(token, service);
                }
                if let Err(reason) = self.call_there(token, node, service) {
                    self.send_away(token, reason);
                }
            }
            _ => self.send_away(token, Reason::BadPeer),
        }
    }

    /// Which node this is, for who wants to be called from others.
    fn tell_name(&mut self, token: u64) {
        let ours = self.far.as_ref().map(|far| far.cluster.settings().node.as_str());
        if let (Some(guest), Some(said)) =
            (self.guests.get(&token), Ask::new(NAME, ours.unwrap_or(HERE)))
        {
            // (Who does not take it has gone.)
            let _ = meet::send(guest.lifeline, said.frame().as_bytes(), &[]);
        }
        self.part(token);
    }

    fn is_here(&self, node: &str) -> bool {
        let ours = self.far.as_ref().map(|far| far.cluster.settings().node.as_str());
        node == HERE || ours == Some(node)
    }

    fn offer(&mut self, token: u64, service: &str) {
        let user = self.guests.get(&token).and_then(|guest| guest.who.user);
        if self.offering(service, |guest| guest.who.user == user).is_ok() {
            return self.send_away(token, Reason::BadPeer);
        }
        let Some(guest) = self.guests.get_mut(&token) else { return };
        let taken = Message { kind: MET, ..Message::default() };
        // SAFETY: it is the guest's until that is gone.
        let lifeline = unsafe { BorrowedFd::borrow_raw(guest.lifeline) };
        let _ = sockopt::set_socket_send_buffer_size(lifeline, ROOM_BYTES);
        guest.state = State::Offering { service: service.to_owned() };
        if meet::send(guest.lifeline, taken.frame().as_bytes(), &[]).is_err() {
            return self.part(token);
        }
        let about = guest.who.text();
        self.journal.note("offered", || format!("{about} :{service}"));
    }

    /// Who offers this service to a caller whom `may` admits. Each user has names of his own, so those of who may not be called are passed over.
    fn offering(&self, service: &str, may: impl Fn(&Guest) -> bool) -> Result<u64, Reason> {
        let is = |guest: &Guest| match &guest.state {
            State::Offering { service: theirs } => theirs == service && guest.is_here(),
            _ => false,
        };
        let mut any = false;
        let offers = self.guests.iter().filter(|(_, guest)| is(guest));
        let found = offers.inspect(|_| any = true).find(|(_, guest)| may(guest));
        let none = || if any { Reason::Refused } else { Reason::NoPeer };
        found.map(|(token, _)| *token).ok_or_else(none)
    }

    fn call_here(&mut self, token: u64, service: &str) {
        let Some(caller) = self.guests.get(&token) else { return };
        let may = |guest: &Guest| self.policy.allows(&caller.who, &guest.who).is_some();
        let met = self.offering(service, may).and_then(|offers| {
            let offers = self.guests.get(&offers).ok_or(Reason::NoPeer)?;
            let [one, other] = self.pair([offers, caller])?;
            give_caller(offers, &one, HERE)?;
            give(caller, &other)?;
            Ok(format!("{} - {} :{service}", caller.who.text(), offers.who.text()))
        });
        match met {
            Ok(about) => {
                self.journal.note("met", || about);
                self.part(token);
            }
            Err(reason) => self.send_away(token, reason),
        }
    }

    fn call_there(&mut self, token: u64, node: &str, service: &str) -> Result<(), Reason> {
        let (Some(far), Some(guest)) = (&self.far, self.guests.get(&token)) else {
            return Err(Reason::BadPeer);
        };
        if !far.cluster.knows(node) {
            return Err(Reason::BadPeer);
        }
        let peer = far.cluster.peer(node).ok_or(Reason::NoPeer)?;
        if !far.fabric.side.is_up(peer.session) {
            return Err(Reason::NoFabric);
        }
        let from = From::of(&guest.who);
        if !far.fabric.may(&from, &self.policy.limits) {
            return Err(Reason::NodeFull);
        }
        let (user, group) = (guest.who.user, guest.group().ok_or(Reason::Refused)?);
        let [ours, theirs] = self.pair([guest, guest])?;
        let lane = self.next_lane(&peer).ok_or(Reason::NodeFull)?;
        // (First: what that node says of it then comes behind it.)
        if let Some(far) = &mut self.far {
            far.fabric.carry_native(&peer, (lane, false), from, ours);
        }
        let called = Called { lane, service: service.to_owned(), user, group };
        peer.say(&Word::Call(called)).map_err(|_| Reason::NoPeer)?;
        if let Some(guest) = self.guests.get_mut(&token) {
            let calls = Calls { peer, lane, service: service.to_owned(), socket: theirs };
            guest.state = State::Asking(calls);
            guest.since = std::time::Instant::now();
        }
        Ok(())
    }

    /// Somebody on another node calls a service of ours.
    pub(crate) fn called_from(&mut self, peer: &Peer, called: Called) {
        let lane = called.lane;
        let answer = match self.connect_from(peer, &called) {
            Ok((user, group)) => Word::Answer { lane, reason: 0, user, group },
            Err(reason) => {
                let who = format!("{}:{}", peer.node(), crate::far::line(&called.group));
                let service = crate::far::line(&called.service);
                self.journal.note(reason.code(), || format!("{who} :{service}"));
                Word::Answer { lane, reason: reason as u32, user: None, group: String::new() }
            }
        };
        // (Who is not told ends with the session.)
        let _ = peer.say(&answer);
    }

    fn connect_from(
        &mut self,
        peer: &Peer,
        called: &Called,
    ) -> Result<(Option<u32>, String), Reason> {
        let Called { lane, service, user, group } = called;
        let node = peer.node();
        let offers =
            self.offering(service, |guest| self.policy.allows_far(&guest.who, node, *user, group))?;
        let (Some(far), Some(guest)) = (&self.far, self.guests.get(&offers)) else {
            return Err(Reason::NoPeer);
        };
        let from = From::of(&guest.who);
        // (Lanes that either node names have numbers of their own.)
        if lane & 1 == u32::from(peer.is_first()) || !far.fabric.side.is_up(peer.session) {
            return Err(Reason::NoFabric);
        }
        if !far.fabric.may(&from, &self.policy.limits) {
            return Err(Reason::NodeFull);
        }
        let ours = (guest.who.user, guest.group().ok_or(Reason::Refused)?);
        let [one, other] = self.pair([guest, guest])?;
        give_caller(guest, &one, node)?;
        let about = guest.who.text();
        if let Some(far) = &mut self.far {
            far.fabric.carry_native(peer, (*lane, true), from, other);
        }
        let group = crate::far::line(group);
        self.journal.note("carried-far", || format!("{node}:{group} - {about} :{service}"));
        Ok(ours)
    }

    /// That node has answered a call.
    pub(crate) fn answered(
        &mut self,
        peer: &Peer,
        of: u32,
        reason: u32,
        (user, group): (Option<u32>, &str),
    ) {
        let is = |guest: &Guest| matches!(&guest.state, State::Asking(calls) if calls.lane == of && calls.peer.session == peer.session);
        let Some((token, guest)) = self.guests.iter().find(|(_, guest)| is(guest)) else { return };
        let (token, State::Asking(calls)) = (*token, &guest.state) else { return };
        let said = Reason::from_u32(reason).filter(|reason| *reason != Reason::None);
        let answer = match said {
            _ if reason != 0 => Err(said.unwrap_or(Reason::Refused)),
            _ if !self.policy.allows_far(&guest.who, peer.node(), user, group) => {
                Err(Reason::Refused)
            }
            _ => give(guest, &calls.socket),
        };
        let about = format!("{} - {}:{}", guest.who.text(), peer.node(), calls.service);
        match answer {
            Ok(()) => self.journal.note("carried-far", || about),
            Err(reason) => {
                self.journal.note(reason.code(), || about);
                self.say_apart(token, reason);
            }
        }
        self.part(token);
    }

    /// Two connected sockets, over which descriptors may go, and to whom each is handed; or from whom what comes by it is.
    fn pair(&self, to: [&Guest; 2]) -> Result<[Handed; 2], Reason> {
        let [one, other] = meet::pair().map_err(|_| Reason::NodeFull)?;
        // (Its credentials name this process.)
        [one, other].into_iter().for_each(meet::name_senders);
        // SAFETY: made just now, ours alone.
        let [one, other] = [one, other].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let handed = |fd, to: &Guest| self.apart.handed(fd, &From::of(&to.who));
        Ok([handed(one, to[0]), handed(other, to[1])])
    }

    /// With its session a call is over.
    pub(crate) fn call_no_more(&mut self, peer: &Peer) {
        let is = |guest: &Guest| matches!(&guest.state, State::Asking(calls) if calls.peer.session == peer.session);
        let all: Vec<u64> =
            self.guests.iter().filter(|(_, guest)| is(guest)).map(|(token, _)| *token).collect();
        all.into_iter().for_each(|token| self.send_away(token, Reason::NoPeer));
    }
}

fn give(guest: &Guest, socket: &Handed) -> Result<(), Reason> {
    hand(guest, socket, &Message { kind: MET, ..Message::default() }.frame())
}

/// The same to who offers: with the node of who calls, which is as sure as that node's certificate.
fn give_caller(guest: &Guest, socket: &Handed, node: &str) -> Result<(), Reason> {
    hand(guest, socket, &Ask::new(CALL, node).ok_or(Reason::BadPeer)?.frame())
}

fn hand(guest: &Guest, socket: &Handed, frame: &Frame) -> Result<(), Reason> {
    let given = meet::send(guest.lifeline, frame.as_bytes(), &[socket.as_raw_fd()]);
    given.map_err(|error| match error {
        // It takes none.
        Errno::EAGAIN => Reason::NodeFull,
        _ => Reason::NoPeer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notes::{Note, Pair};
    use crate::policy::Policy;
    use crate::service::guarded_pair;
    use crate::who::Who;
    use std::os::fd::IntoRawFd;
    use std::time::Instant;

    struct Nobody;

    impl Notes for Nobody {
        fn of(&self, _: u64) -> Option<Note> {
            None
        }
        fn with(&self, _: Pair) -> Option<u64> {
            None
        }
    }

    #[test]
    fn few_wait_for_a_service_that_takes_nobody() {
        let mut service = Service::new(Policy::parse("").unwrap(), Nobody, Vec::new()).unwrap();
        let [ours, theirs] = guarded_pair().unwrap();
        let who = Who::came(ours.as_raw_fd(), None).unwrap();
        let (lifeline, since) = (ours.into_raw_fd(), Instant::now());
        service.guests.insert(1, Guest { lifeline, who, since, state: State::Greeted });
        meet::admit_descriptors(theirs.as_raw_fd(), true);
        service.offer(1, "orders");
        let come = || {
            let guest = &service.guests[&1];
            let [one, _other] = service.pair([guest, guest]).unwrap();
            give_caller(guest, &one, HERE)
        };
        let waiting = (0..10_000).take_while(|_| come().is_ok()).count();
        assert!((16..=128).contains(&waiting), "{waiting} wait");
        assert_eq!(come(), Err(Reason::NodeFull));
        let mut taken = 0;
        while meet::receive(theirs.as_raw_fd(), &mut [0; 512]).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, 1 + waiting, "and that it is offered");
        assert_eq!(come(), Ok(()));
    }
}
