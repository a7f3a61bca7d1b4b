//! Guests whose far end is on another host. Both services find that they have the two ends of one connection, ask their policies, and have it carried.
//!
//! ```text
//!   connecting end's node                     accepting end's node
//!                       -- Seek: our end -->
//!                      <-- Seek: our end --       (whoever's guest comes first seeks in vain, and is found by the other one)
//!                       -- Here: our end -->
//!                                             decides, by its policy; has the lane
//!                                             expected by its process; expects a call
//!                      <-- Meet: lane, token --
//!   decides, by its policy; has the lane
//!   expected by its process; calls
//!                       == channel ==>
//!   MET to the guest                          MET to the guest
//! ```
//!
//! Who refuses says `Apart`, and whose guest goes before there is a channel. Then nobody is to call for it any more, and the lane goes with what the
//! guest would have had of it. What is under way when the session ends is forgotten: its guest goes, and comes again.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context, bail};
use ringlet::interconnect::node::{CARRIED, FAR, MET, Message, SAME_USER};
use ringlet::reasons::Reason;
use ringlet_linux::{meet, sys};

use crate::apart::{From, Handed};
use crate::carrier::keeper::{self, Kept};
use crate::cluster::members::Settings;
use crate::cluster::post::{self, Post};
use crate::cluster::{Cluster, End, Meet, Peer, Running, TOKEN_BYTES, Token, Word};
use crate::fabric::share::{Fabric, News, Side};
use crate::notes::{Note, Notes, Pair};
use crate::reflect::share::Reflect;
use crate::service::{FABRIC, Guest, REFLECT, Service, State};

/// The longest name of a control group that is told to other nodes: it may be six times as long in JSON, and has to fit in a word.
const GROUP_BYTES: usize = 128;

/// The cluster, as the service has it.
pub struct Far {
    pub cluster: Cluster,
    pub post: Post,
    pub fabric: Fabric,
    pub reflect: Option<Reflect>,
    /// Of lanes that this node names.
    next: u32,
}

impl Far {
    /// `socket`: where programs find the host's reflective memory.
    pub fn start(settings: Settings, socket: PathBuf, quiet: bool) -> anyhow::Result<Far> {
        let (node, rails) = (settings.node.clone(), settings.rails.clone());
        // (What can fail comes first, so that nothing is left behind.)
        let running = Running::prepare(settings.clone())?;
        let fabric = Fabric::new(Kept::start(keeper::FABRIC)?, node, rails);
        let reflect = settings.reflect.as_ref().map(|reflects| -> anyhow::Result<_> {
            let kept = Kept::start(keeper::REFLECT)?;
            Ok(Reflect::new(kept, &settings, reflects, socket))
        });
        let reflect = reflect.transpose()?;
        let ways = [Some(&fabric.side), reflect.as_ref().map(|reflect| &reflect.side)];
        let ways = ways.into_iter().flatten().map(|side| side.ways.clone()).collect();
        let post = Post::new(ways)?;
        let cluster = running.start(Box::new(post.clone()), quiet)?;
        Ok(Far { cluster, post, fabric, reflect, next: 0 })
    }

    /// Those that have rails.
    pub fn sides(&self) -> impl Iterator<Item = &Side> {
        std::iter::once(&self.fabric.side).chain(self.reflect.iter().map(|reflect| &reflect.side))
    }
}

/// A guest whose far end is found, until there is a channel to it.
pub(crate) struct Calling {
    peer: Peer,
    pair: Pair,
    token: Token,
    accepts: bool,
    flags: u32,
    about: String,
    /// What the guest gets, meeting and lifeline: our process has the other ends already.
    ours: [Handed; 2],
}

impl Calling {
    /// Nobody is to call for it any more.
    fn forget(&self) {
        if self.accepts {
            self.peer.unexpect(self.token);
        }
    }

    /// Its guest has gone.
    pub(crate) fn give_up(self) {
        self.forget();
        let _ = self.peer.say(&Word::Apart(self.pair, Reason::NoPeer as u32));
    }
}

impl<N: Notes> Service<N> {
    /// Asks the node to which the far end's address belongs. False if there is none that can be reached. (The address is no more than a hint whom to ask.)
    pub(crate) fn seek(&mut self, token: u64, cookie: u64) -> bool {
        let ring_bytes = self.policy.limits.carried_ring_bytes;
        let (Some(far), Some(guest)) = (&self.far, self.guests.get_mut(&token)) else {
            return false;
        };
        let Some(note) = self.notes.of(cookie) else { return false };
        // (One that mirrors it here, or came twice, is no matter of another host's.)
        let is_alone = self.notes.with(note.pair) == Some(cookie)
            && self.notes.with(note.pair.mirrored()).is_none();
        let node = far.cluster.node_of(note.far_address());
        let Some(peer) = node.and_then(|node| far.cluster.peer(&node)) else { return false };
        let Some(end) = guest.end(&note, ring_bytes) else { return false };
        if !is_alone || peer.say(&Word::Seek(end)).is_err() {
            return false;
        }
        guest.state = State::Seeking { note };
        if let Some(replaced) = self.hall.seek(token, &note, peer.node()) {
            self.part(replaced);
        }
        true
    }

    pub(crate) fn hear_of_others(&mut self) {
        let news = self.far.as_ref().map(|far| far.post.take()).unwrap_or_default();
        for news in news {
            match news {
                post::News::Said(peer, Word::Seek(end)) => self.found(&peer, end, true, true),
                post::News::Said(peer, Word::Here(end, may)) => self.found(&peer, end, may, false),
                post::News::Said(peer, Word::Meet(meet)) => self.meet(&peer, meet),
                post::News::Said(peer, Word::Apart(pair, reason)) => {
                    self.apart_from(&peer, pair, reason);
                }
                post::News::Said(peer, Word::Call(called)) => self.called_from(&peer, called),
                post::News::Said(peer, Word::Answer { lane, reason, user, group }) => {
                    self.answered(&peer, lane, reason, (user, &group));
                }
                post::News::Said(..) => {}
                post::News::Called(token, channel) => self.called(token, channel),
                post::News::Ended(peer) => self.ended(&peer),
            }
        }
    }

    pub(crate) fn hear_of_fabric(&mut self, process: bool) -> anyhow::Result<()> {
        let Some(far) = &mut self.far else { return Ok(()) };
        let (mut heard, mut lost) = (Vec::new(), false);
        match process {
            true => far.fabric.side.hear(&mut |news| heard.push(news)),
            false => far.fabric.side.hear_keeper(&mut |news| heard.push(news)),
        }
        for news in heard {
            match news {
                News::Started(pid) => {
                    self.watch_fabric()?;
                    self.journal.note("fabric-started", || format!("pid {pid}"));
                }
                News::Lost(pid) => {
                    let lanes = self.far.as_mut().map_or(0, |far| far.fabric.lose());
                    self.journal.note("fabric-lost", || {
                        format!(
                            "pid {pid}; what it carried goes on in the kernel: {lanes} connections"
                        )
                    });
                }
                News::Over(number) => {
                    self.far.iter_mut().for_each(|far| far.fabric.over(number));
                }
                News::Log(text) => self.journal.note("fabric", || text),
                News::KeeperLost => lost = true,
            }
        }
        // Nothing starts another one: so does who has started us.
        if lost {
            bail!("who starts the process that carries to other hosts has died");
        }
        Ok(())
    }

    /// The same of the process that reflects memory.
    pub(crate) fn hear_of_reflect(&mut self, process: bool) -> anyhow::Result<()> {
        let Some(reflect) = self.far.as_mut().and_then(|far| far.reflect.as_mut()) else {
            return Ok(());
        };
        let mut heard = Vec::new();
        match process {
            true => reflect.side.hear(&mut |news| heard.push(news)),
            false => reflect.side.hear_keeper(&mut |news| heard.push(news)),
        }
        for news in heard {
            match news {
                News::Started(pid) => {
                    self.watch_reflect()?;
                    self.journal.note("reflect-started", || format!("pid {pid}"));
                }
                News::Lost(pid) => self.journal.note("reflect-lost", || {
                    format!("pid {pid}; regions and locks of this host's programs are gone with it")
                }),
                News::Log(text) => self.journal.note("reflect", || text),
                News::KeeperLost => bail!("who starts the process that reflects memory has died"),
                News::Over(_) => {}
            }
        }
        Ok(())
    }

    pub(crate) fn watch_reflect(&self) -> anyhow::Result<()> {
        let reflect = self.far.as_ref().and_then(|far| far.reflect.as_ref());
        match reflect.and_then(|reflect| reflect.side.process()) {
            Some(process) => self.watch(process, REFLECT).context("what reflects"),
            None => Ok(()),
        }
    }

    pub(crate) fn watch_fabric(&self) -> anyhow::Result<()> {
        match self.far.as_ref().and_then(|far| far.fabric.side.process()) {
            Some(process) => self.watch(process, FABRIC).context("what carries"),
            None => Ok(()),
        }
    }

    /// A guest who waits for this end of that node's, and how its connection began.
    fn sought(&self, peer: &Peer, far: &End) -> Option<(u64, Note)> {
        let token = self.hall.sought(&self.notes, peer.node(), far.pair)?;
        let guest = self.guests.get(&token)?;
        let State::Seeking { note } = guest.state else { return None };
        let accepted = note.side == crate::notes::ACCEPTED;
        (accepted != far.accepted && guest.is_here()).then_some((token, note))
    }

    /// Both ends are named, of the connecting one's numbers first, as both hosts log it.
    fn about(&self, token: u64, note: &Note, peer: &Peer, far: &End) -> String {
        let first = if far.accepted { note.pair } else { far.pair };
        let who = self.guests.get(&token).map(|guest| guest.who.text()).unwrap_or_default();
        let group = line(&far.group);
        format!("{:08x}-{:08x} {who} - {}:{group}", first.sends, first.expects, peer.node())
    }

    /// Why they don't meet here, if they don't.
    fn refusal(&self, token: u64, peer: &Peer, far: &End) -> Option<(Reason, &'static str)> {
        let guest = self.guests.get(&token)?;
        let fabric = self.far.as_ref().map(|far| &far.fabric)?;
        match () {
            () if !self.policy.allows_far(&guest.who, peer.node(), far.user, &far.group) => {
                Some((Reason::Refused, "policy"))
            }
            () if !fabric.side.is_up(peer.session) => Some((Reason::NoFabric, "no rail carries")),
            () if !fabric.may(&From::of(&guest.who), &self.policy.limits) => {
                Some((Reason::NodeFull, "as many as may be carried"))
            }
            () => None,
        }
    }

    fn refuse_far(&mut self, token: u64, reason: Reason, about: &str, by: &str) {
        self.journal.note(reason.code(), || format!("{about} ({by})"));
        self.say_apart(token, reason);
        // (The other node knows, or is told by who refuses.)
        if let Some(guest) = self.guests.get_mut(&token)
            && matches!(guest.state, State::Calling(_))
            && let State::Calling(calling) = std::mem::replace(&mut guest.state, State::Greeted)
        {
            calling.forget();
        }
        self.part(token);
    }

    /// A guest and an end on another host are the two ends of one connection. (`sought`: that end is sought by us or only by it.)
    fn found(&mut self, peer: &Peer, far: End, may_there: bool, seeks: bool) {
        let Some((token, note)) = self.sought(peer, &far) else { return };
        let about = self.about(token, &note, peer, &far);
        let refusal = self.refusal(token, peer, &far);
        let refusal = refusal.or((!may_there).then_some((Reason::Refused, "policy of that node")));
        let ring_bytes = self.policy.limits.carried_ring_bytes;
        let Some(near) = self.guests.get(&token).and_then(|guest| guest.end(&note, ring_bytes))
        else {
            return self.part(token);
        };
        if let Some((reason, by)) = refusal {
            let _ = peer.say(&Word::Apart(note.pair, reason as u32));
            return self.refuse_far(token, reason, &about, by);
        }
        if !near.accepted {
            // It decides. (If it has said where it is, it has heard of us.)
            if seeks && peer.say(&Word::Here(near, true)).is_err() {
                self.part(token);
            }
            return;
        }
        let (Some(lane), Some(name)) = (self.next_lane(peer), random()) else {
            return self.part(token);
        };
        let ring_bytes = ring_bytes.min(far.ring_bytes);
        let Some(ours) = self.hand_over(token, peer, (lane, true), ring_bytes) else {
            let _ = peer.say(&Word::Apart(note.pair, Reason::NodeFull as u32));
            return self.refuse_far(token, Reason::NodeFull, &about, "descriptors");
        };
        peer.expect(name);
        let meet = Meet { end: near, lane, token: name, ring_bytes };
        let flags = self.flags(token, &far);
        let (peer, pair) = (peer.clone(), note.pair);
        let calling = Calling { peer, pair, token: name, accepts: true, flags, about, ours };
        if calling.peer.say(&Word::Meet(meet)).is_err() {
            calling.forget();
            return self.part(token);
        }
        self.call(token, note, calling);
    }

    /// Lanes that either node names have numbers of their own.
    pub(crate) fn next_lane(&mut self, peer: &Peer) -> Option<u32> {
        let far = self.far.as_mut()?;
        far.next = far.next.wrapping_add(1);
        Some(far.next << 1 | u32::from(peer.is_first()))
    }

    fn flags(&self, token: u64, far: &End) -> u32 {
        let user = self.guests.get(&token).and_then(|guest| guest.who.user);
        let same = user.is_some() && user == far.user;
        CARRIED | FAR | if same { SAME_USER } else { 0 }
    }

    fn call(&mut self, token: u64, note: Note, calling: Calling) {
        self.hall.seek_no_more(note.pair, token);
        if let Some(guest) = self.guests.get_mut(&token) {
            guest.state = State::Calling(calling);
            guest.since = std::time::Instant::now();
        }
    }

    /// The accepting end's node has decided.
    fn meet(&mut self, peer: &Peer, meet: Meet) {
        let Meet { end: far, lane, token: name, ring_bytes } = meet;
        let Some((token, note)) = self.sought(peer, &far).filter(|_| far.accepted) else {
            // (It has gone meanwhile.)
            let _ = peer.say(&Word::Apart(far.pair.mirrored(), Reason::NoPeer as u32));
            return;
        };
        let about = self.about(token, &note, peer, &far);
        let too_large = ring_bytes > self.policy.limits.carried_ring_bytes;
        let refusal = self.refusal(token, peer, &far);
        let refusal = refusal.or(too_large.then_some((Reason::NodeFull, "carried_ring_bytes")));
        if let Some((reason, by)) = refusal {
            let _ = peer.say(&Word::Apart(note.pair, reason as u32));
            return self.refuse_far(token, reason, &about, by);
        }
        let Some(ours) = self.hand_over(token, peer, (lane, false), ring_bytes) else {
            let _ = peer.say(&Word::Apart(note.pair, Reason::NodeFull as u32));
            return self.refuse_far(token, Reason::NodeFull, &about, "descriptors");
        };
        let flags = self.flags(token, &far);
        let (to, pair) = (peer.clone(), note.pair);
        let calling = Calling { peer: to, pair, token: name, accepts: false, flags, about, ours };
        self.call(token, note, calling);
        peer.call(name);
    }

    /// Our process gets a lifeline and a meeting; these are their other ends.
    fn hand_over(
        &mut self,
        token: u64,
        peer: &Peer,
        lane: (u32, bool),
        ring_bytes: u64,
    ) -> Option<[Handed; 2]> {
        let from = From::of(&self.guests.get(&token)?.who);
        let pair = || self.guarded([&from, &from]).ok();
        let ([line, ours], [meeting, our_meeting]) = (pair()?, pair()?);
        let fabric = &mut self.far.as_mut()?.fabric;
        fabric.carry(peer, lane, from, ring_bytes, [line, meeting]);
        Some([our_meeting, ours])
    }

    /// There is a channel, or there is none.
    fn called(&mut self, name: Token, channel: Option<OwnedFd>) {
        let is = |guest: &Guest| matches!(&guest.state, State::Calling(c) if c.token == name);
        let Some(token) = self.guests.iter().find(|(_, guest)| is(guest)).map(|(at, _)| *at) else {
            return;
        };
        let Some(guest) = self.guests.get_mut(&token) else { return };
        let State::Calling(calling) = std::mem::replace(&mut guest.state, State::Greeted) else {
            return;
        };
        let (lifeline, [meeting, line]) = (guest.lifeline, &calling.ours);
        let Some(channel) = channel else {
            let _ = calling.peer.say(&Word::Apart(calling.pair, Reason::NoFabric as u32));
            return self.refuse_far(token, Reason::NoFabric, &calling.about, "no channel");
        };
        let number = u32::from_le_bytes([name[0], name[1], name[2], name[3]]);
        let met =
            Message { kind: MET, flags: calling.flags, stranger: number, ..Message::default() };
        let fds = [meeting.as_raw_fd(), line.as_raw_fd(), channel.as_raw_fd()];
        // (Who is not reached is gone for the process; and for the other end.)
        let told = meet::send(lifeline, met.frame().as_bytes(), &fds);
        let outcome = if told.is_ok() { "carried-far" } else { "gone" };
        self.journal.note(outcome, || calling.about);
        self.part(token);
    }

    /// That node's end of this pair does not meet ours.
    fn apart_from(&mut self, peer: &Peer, pair: Pair, reason: u32) {
        let is = |guest: &Guest| match &guest.state {
            State::Calling(calling) => {
                calling.pair == pair.mirrored() && calling.peer.session == peer.session
            }
            _ => false,
        };
        let calling = self.guests.iter().find(|(_, guest)| is(guest)).map(|(token, _)| *token);
        let token = calling.or_else(|| self.hall.sought(&self.notes, peer.node(), pair));
        if let Some(token) = token {
            let Some(guest) = self.guests.get(&token) else { return };
            let accepted = match &guest.state {
                State::Calling(calling) => calling.accepts,
                State::Seeking { note } => note.side == crate::notes::ACCEPTED,
                _ => return,
            };
            let first = if accepted { pair } else { pair.mirrored() };
            let (sends, expects) = (first.sends, first.expects);
            let about = format!("{sends:08x}-{expects:08x} {} - {}", guest.who.text(), peer.node());
            let reason = Reason::from_u32(reason).filter(|reason| *reason != Reason::None);
            self.refuse_far(token, reason.unwrap_or(Reason::Refused), &about, "that node");
        }
    }

    /// What was under way in it comes again.
    fn ended(&mut self, peer: &Peer) {
        self.call_no_more(peer);
        let Some(far) = &mut self.far else { return };
        far.fabric.side.forget(peer.session);
        far.reflect.iter_mut().for_each(|reflect| reflect.side.forget(peer.session));
        let gone = |guest: &Guest| match &guest.state {
            State::Calling(calling) => calling.peer.session == peer.session,
            // (Whose address it is may be another's by now, or nobody's, as that of a node that is not listed.)
            State::Seeking { note } => self.hall.seeks_at(note.pair, peer.node()),
            _ => false,
        };
        let tokens: Vec<u64> =
            self.guests.iter().filter(|(_, guest)| gone(guest)).map(|(at, _)| *at).collect();
        tokens.into_iter().for_each(|token| self.part(token));
    }
}

impl Guest {
    pub(crate) fn group(&self) -> Option<String> {
        self.who.group.clone().filter(|group| group.len() <= GROUP_BYTES)
    }

    /// What other nodes are told of it. None if its group can't be told, or is longer than anybody needs.
    fn end(&self, note: &Note, ring_bytes: u64) -> Option<End> {
        let group = self.group()?;
        let accepted = note.side == crate::notes::ACCEPTED;
        Some(End { pair: note.pair, accepted, user: self.who.user, group, ring_bytes })
    }
}

/// A group's name as another node has told it, for the journal.
pub(crate) fn line(text: &str) -> String {
    text.chars().filter(|each| !each.is_control()).take(GROUP_BYTES).collect()
}

fn random() -> Option<Token> {
    let mut token = [0; TOKEN_BYTES];
    sys::random(&mut token).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::tests::joined;
    use crate::fabric::share::tests::{fabric, is_up};
    use crate::notes::{ACCEPTED, CONNECTED};
    use crate::policy::Policy;
    use crate::service::guarded_pair;
    use crate::who::Who;
    use std::time::Instant;

    /// Each pair is this host's, and no mirrored one.
    struct Alone;

    impl Notes for Alone {
        fn of(&self, _: u64) -> Option<Note> {
            None
        }
        fn with(&self, pair: Pair) -> Option<u64> {
            (pair.sends < pair.expects).then_some(u64::from(pair.sends) + 1)
        }
    }

    fn pair(number: u32) -> Pair {
        Pair { sends: number, expects: number + 1000 }
    }

    /// A service that can carry to node b, what it says to that, and who keeps the ends of its sockets.
    fn service(more: &str) -> (Service<Alone>, Peer, Vec<OwnedFd>) {
        let text = format!("{more}\n[[allow]]\nbetween = ['/*', 'b:/there']\n");
        let mut service = Service::new(Policy::parse(&text).unwrap(), Alone, Vec::new()).unwrap();
        let (mut fabric, held) = fabric();
        let peer = joined(&["b"]).remove(0);
        is_up(&mut fabric, &peer, &held[1]);
        let (cluster, post) = (peer.cluster(), Post::new(vec![fabric.side.ways.clone()]).unwrap());
        service.far = Some(Far { cluster, post, fabric, reflect: None, next: 0 });
        (service, peer, held.into())
    }

    /// A guest that seeks; its end of its lifeline.
    fn seeks(service: &mut Service<Alone>, number: u32, side: u32) -> OwnedFd {
        let [ours, theirs] = guarded_pair().unwrap();
        let who = Who { group: Some("/here".into()), ..Who::came(ours.as_raw_fd(), None).unwrap() };
        let note = Note { pair: pair(number), side, ..Note::default() };
        service.hall.seek(number.into(), &note, "b");
        let (lifeline, since) = (std::os::fd::IntoRawFd::into_raw_fd(ours), Instant::now());
        let state = State::Seeking { note };
        service.guests.insert(number.into(), Guest { lifeline, who, since, state });
        theirs
    }

    fn there(number: u32, accepted: bool) -> End {
        let (pair, group) = (pair(number).mirrored(), "/there".into());
        End { pair, accepted, user: Some(sys::geteuid()), group, ring_bytes: 1 << 16 }
    }

    fn carried(service: &Service<Alone>) -> u64 {
        service.far.as_ref().unwrap().fabric.status()["connections"].as_u64().unwrap()
    }

    #[test]
    fn who_leaves_before_there_is_a_channel_is_called_apart_and_nobody_calls_for_it() {
        let (mut service, peer, _held) = service("");
        let apart = |number| {
            let (Pair { sends, expects }, reason) = (pair(number), Reason::NoPeer as u32);
            format!("{{\"Apart\":[{{\"sends\":{sends},\"expects\":{expects}}},{reason}]}}")
        };
        let _accepting = seeks(&mut service, 1, ACCEPTED);
        service.found(&peer, there(1, false), true, true);
        assert!(matches!(service.guests[&1].state, State::Calling(_)));
        assert_eq!((peer.expected(), carried(&service)), (1, 1));
        service.part(1);
        assert_eq!(peer.expected(), 0, "somebody may call for it still");
        assert_eq!(peer.waiting().last(), Some(&apart(1)));
        let _connecting = seeks(&mut service, 2, CONNECTED);
        let token = [7; TOKEN_BYTES];
        let meet = Meet { end: there(2, true), lane: 2, token, ring_bytes: 1 << 16 };
        service.meet(&peer, meet);
        assert!(matches!(service.guests[&2].state, State::Calling(_)));
        service.part(2);
        assert_eq!(peer.waiting().last(), Some(&apart(2)));
        // One of which that node has said so hears of it, and that node no more.
        let _other = seeks(&mut service, 3, ACCEPTED);
        service.found(&peer, there(3, false), true, true);
        let said = peer.waiting().len();
        service.apart_from(&peer, pair(3).mirrored(), Reason::Refused as u32);
        assert_eq!((peer.expected(), peer.waiting().len()), (0, said));
        assert!(service.guests.is_empty());
    }

    #[test]
    fn whose_node_has_gone_comes_again_whatever_its_address_is_by_now() {
        let (mut service, peer, _held) = service("");
        let other = joined(&["c"]).remove(0);
        let _seeking = seeks(&mut service, 1, ACCEPTED);
        assert!(peer.cluster().node_of(Note::default().far_address()).is_none());
        service.ended(&other);
        assert_eq!(service.guests.len(), 1, "another node's end");
        service.ended(&peer);
        assert!(service.guests.is_empty(), "it waits for who never comes");
    }

    #[test]
    fn who_waits_for_its_channel_counts_for_its_pod() {
        let (mut service, peer, _held) = service("[limits]\ncarried_of_a_pod = 1");
        let _first = seeks(&mut service, 1, ACCEPTED);
        let _second = seeks(&mut service, 2, ACCEPTED);
        service.found(&peer, there(1, false), true, true);
        service.found(&peer, there(2, false), true, true);
        assert!(matches!(service.guests[&1].state, State::Calling(_)));
        assert!(!service.guests.contains_key(&2), "one more than its pod may have");
        assert_eq!(carried(&service), 1);
    }
}
