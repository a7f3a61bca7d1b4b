//! What a node knows of itself and of others, and when it acts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use crate::api::{Life, NotTaken, Output, PAYLOAD_BYTES, Settings, View};
use crate::ballot::{Acceptor, is_quorum};
use crate::change::Attempt;
use crate::flow::Membership;
use crate::log::Usage;
use crate::view::{Change, Seat};
use crate::wire::{self, Frame, MEMBERS, NAME_BYTES, Status};

/// Who acknowledges nothing for so many times the time of silence, and is owed something, is dead.
const STALLED: u32 = 4;
/// Who wants to leave does not wait for others longer than so many times the time of silence.
const LEAVING: u32 = 8;

/// A node that there is, or was, a way to: the last of its runs that was heard of.
pub(crate) struct Peer {
    pub life: Life,
    pub up: bool,
    pub heard: Option<Duration>,
    /// It has sent what no node sends.
    pub broken: bool,
    /// As it has last said: whether it belongs to that view, wants to join one, or to leave.
    pub view: u64,
    pub member: bool,
    pub outside: bool,
    pub leaving: bool,
    /// What a view was answered with is not repeated within a beat, whatever it says.
    told: bool,
}

pub(crate) enum Standing {
    Outside,
    Member(Box<Membership>),
    /// For good.
    Over,
}

/// What makes the order. (`now` never goes back; its zero is any.)
pub struct Order {
    pub(crate) me: Life,
    pub(crate) silent: Duration,
    beat: Duration,
    pub(crate) now: Duration,
    next_beat: Duration,
    /// Something may be to be sent that waits until all has been said, so that it goes in few frames.
    pub(crate) dirty: bool,
    pub(crate) acceptor: Acceptor,
    pub(crate) standing: Standing,
    pub(crate) peers: BTreeMap<String, Peer>,
    /// Up to which run of it a node is dead for good, as an operator says.
    buried: BTreeMap<String, u64>,
    pub(crate) outputs: VecDeque<Output>,
    /// What was submitted and has not been delivered; the number of the last one.
    pub(crate) pending: VecDeque<Bytes>,
    pub(crate) pending_usage: Usage,
    pub(crate) submitted: u64,
    pub(crate) attempt: Option<Attempt>,
    /// When this node last had reason to think that somebody else sees to the next view.
    pub(crate) patient: Duration,
    /// Since when the hub is to be replaced, and others before this node don't.
    uneasy: Option<Duration>,
    /// Since when it wants to leave; and until when it stays for those who don't know of the view without it.
    pub(crate) leaving: Option<Duration>,
    pub(crate) departing: Option<Duration>,
}

impl Order {
    /// `kept` is what the last `Output::Keep` of this node's earlier runs had, if there was one.
    pub fn new(settings: Settings, kept: Option<&[u8]>, now: Duration) -> Order {
        let founder = |node: &String| Seat {
            life: Life { node: node.clone(), incarnation: 0 },
            joins: false,
            count: 0,
        };
        let founders = Change {
            number: 0,
            start: 0,
            members: settings.founders.iter().map(founder).collect(),
        };
        let mut order = Order {
            me: settings.me,
            silent: settings.silent,
            beat: settings.beat,
            now,
            next_beat: now,
            dirty: false,
            acceptor: Acceptor::new(founders),
            standing: Standing::Outside,
            peers: BTreeMap::new(),
            buried: BTreeMap::new(),
            outputs: VecDeque::new(),
            pending: VecDeque::new(),
            pending_usage: Usage::default(),
            submitted: 0,
            attempt: None,
            patient: now,
            uneasy: None,
            leaving: None,
            departing: None,
        };
        let names: Vec<_> = settings.founders.iter().chain([&order.me.node]).collect();
        let twice = (1..settings.founders.len())
            .any(|at| settings.founders[..at].contains(&settings.founders[at]));
        if names.iter().any(|name| name.len() > NAME_BYTES) || names.len() - 1 > MEMBERS || twice {
            order.end(
                "the founders are too many, or named twice, or a node's name is too long".into(),
            );
        }
        match kept.map(wire::read_kept) {
            None => {}
            Some(Err(fault)) => order.end(format!(
                "what this node has kept is damaged ({fault}): it can't know what it has promised"
            )),
            Some(Ok((incarnation, _))) if incarnation >= order.me.incarnation => {
                order.end(format!(
                    "a run of this node has had number {incarnation} before, and this one has {}",
                    order.me.incarnation
                ));
            }
            Some(Ok((_, acceptor))) => order.acceptor = acceptor,
        }
        order
    }

    /// There is a way to that run of a node.
    pub fn up(&mut self, node: Life, now: Duration) {
        self.now = now;
        if node.node == self.me.node || node.node.len() > NAME_BYTES {
            return;
        }
        match self.peers.get_mut(&node.node) {
            Some(peer) if peer.life == node => peer.up = true,
            Some(peer) if peer.life.incarnation > node.incarnation => {}
            _ => {
                let (view, told) = (0, false);
                let (member, outside, leaving, broken) = (false, false, false, false);
                let peer = Peer {
                    life: node.clone(),
                    up: true,
                    heard: None,
                    broken,
                    view,
                    member,
                    outside,
                    leaving,
                    told,
                };
                self.peers.insert(node.node.clone(), peer);
            }
        }
        self.tell(&node);
    }

    /// There is no way to it any more.
    pub fn down(&mut self, node: &Life, now: Duration) {
        self.now = now;
        if let Some(peer) = self.peers.get_mut(&node.node)
            && peer.life == *node
        {
            peer.up = false;
        }
    }

    /// A frame of another node's, which is hostile input; an error says why that node is not to be heard any more.
    pub fn heard(
        &mut self,
        from: &Life,
        frame: impl Into<Bytes>,
        now: Duration,
    ) -> Result<(), &'static str> {
        self.now = now;
        if self.is_over() {
            return Ok(());
        }
        let Some(peer) = self.peers.get_mut(&from.node) else { return Ok(()) };
        if peer.life != *from || peer.broken {
            return Ok(());
        }
        peer.heard = Some(now);
        self.dirty = true;
        let whole = frame.into();
        let heard =
            wire::read(&whole).and_then(|(view, frame)| self.take(from, view, frame, &whole));
        if heard.is_err()
            && let Some(peer) = self.peers.get_mut(&from.node)
        {
            peer.broken = true;
        }
        heard
    }

    /// Gives it to the order; its number. What a node submits is delivered in the order in which it did, each once, or not at all from some place on
    /// (if it dies).
    pub fn submit(&mut self, payload: impl Into<Bytes>, now: Duration) -> Result<u64, NotTaken> {
        self.now = now;
        let payload = payload.into();
        self.takes(payload.len())?;
        self.submitted += 1;
        self.pending_usage.add(payload.len());
        self.pending.push_back(payload);
        self.dirty = true;
        self.order_mine();
        Ok(self.submitted)
    }

    /// Would a payload of so many bytes be taken now?
    pub fn takes(&self, bytes: usize) -> Result<(), NotTaken> {
        let Standing::Member(membership) = &self.standing else { return Err(NotTaken::Stopped) };
        if membership.stopped || self.leaving.is_some() {
            return Err(NotTaken::Stopped);
        }
        if bytes > PAYLOAD_BYTES {
            return Err(NotTaken::TooLong);
        }
        let mut usage = membership.log.usage(membership.place);
        usage.count += self.pending_usage.count;
        usage.bytes += self.pending_usage.bytes;
        if usage.fits(bytes, 1) { Ok(()) } else { Err(NotTaken::Full) }
    }

    /// Leaves the cluster in order: behind what it has submitted. `Output::Stopped` says when.
    pub fn leave(&mut self, now: Duration) {
        self.now = now;
        if self.leaving.is_none() && !self.is_over() {
            self.leaving = Some(now);
            self.see_to_leaving();
        }
    }

    /// When `tick` is to be called at the latest.
    pub fn due(&self) -> Duration {
        if self.is_over() { Duration::MAX } else { self.next_beat }
    }

    pub fn tick(&mut self, now: Duration) {
        self.now = now;
        if now < self.next_beat || self.is_over() {
            return;
        }
        // What was not heard while this node itself did nothing tells nothing of others.
        let late = now - self.next_beat;
        if late > self.beat {
            let heard = self.peers.values_mut().filter_map(|peer| peer.heard.as_mut());
            heard.for_each(|heard| *heard += late);
        }
        self.next_beat = now + self.beat;
        self.dirty = true;
        self.peers.values_mut().for_each(|peer| peer.told = false);
        self.flow_beat();
        self.see_to_leaving();
        self.see_to_view();
        self.see_to_quorum();
        let up: Vec<_> =
            self.peers.values().filter(|peer| peer.up).map(|peer| peer.life.clone()).collect();
        if !self.is_over() {
            up.iter().for_each(|life| self.tell(life));
        }
    }

    pub fn output(&mut self) -> Option<Output> {
        if self.outputs.is_empty() && std::mem::take(&mut self.dirty) {
            self.flush();
        }
        self.outputs.pop_front()
    }

    /// The view to which this node belongs.
    pub fn view(&self) -> Option<&View> {
        match &self.standing {
            Standing::Member(membership) => Some(&membership.view),
            _ => None,
        }
    }

    /// This run has stopped for good: its node comes back as another one only.
    pub fn is_over(&self) -> bool {
        matches!(self.standing, Standing::Over)
    }

    /// An operator says that this run of a node is dead for good, and answers for it: neither it nor what it has decided with others is ever seen
    /// again, and its node does not start before it can reach those who go on. They need its vote no more.
    pub fn bury(&mut self, node: &Life, now: Duration) {
        self.now = now;
        if node.node != self.me.node && self.acceptor.view.place_of_node(&node.node).is_some() {
            let buried = self.buried.entry(node.node.clone()).or_default();
            *buried = node.incarnation.max(*buried);
        }
    }

    /// By number, what it says, and by whom: nothing that is of another view is taken.
    fn take(
        &mut self,
        from: &Life,
        view: u64,
        frame: Frame,
        whole: &Bytes,
    ) -> Result<(), &'static str> {
        let mine = self.acceptor.view.number;
        if let Frame::Decided(change) = frame {
            if view != change.number {
                return Err("a view under another's number");
            }
            if view > mine {
                self.install(change);
            }
            return Ok(());
        }
        if let Frame::Status(status) = &frame {
            let peer = self.peers.get_mut(&from.node).expect("it was heard");
            (peer.view, peer.member, peer.outside) = (view, status.member, !status.member);
            peer.leaving = status.leaving;
            if view >= mine && status.member {
                // Somebody there sees to views.
                if matches!(self.standing, Standing::Outside) {
                    self.patient = self.now;
                }
            }
        }
        if view < mine {
            self.tell_view(from);
            return Ok(());
        }
        if view > mine {
            if !std::mem::replace(
                &mut self.peers.get_mut(&from.node).expect("it was heard").told,
                true,
            ) {
                self.tell(from);
            }
            return Ok(());
        }
        match frame {
            Frame::Status(status) => self.status(from, status),
            Frame::Submit { received, entries } => {
                self.submitted_by(from, received, entries, whole)
            }
            Frame::Ordered { stable, first, entries } => {
                self.ordered(from, stable, first, entries, whole)
            }
            frame => self.vote(from, frame),
        }
    }

    /// To one that knows an older view only.
    fn tell_view(&mut self, to: &Life) {
        let peer = self.peers.get_mut(&to.node).expect("it was heard");
        if !std::mem::replace(&mut peer.told, true) {
            self.send(to, &Frame::Decided(self.acceptor.view.clone()));
        }
    }

    pub(crate) fn send(&mut self, to: &Life, frame: &Frame) {
        let frame = wire::write(self.acceptor.view.number, frame);
        self.outputs.push_back(Output::Send { to: to.clone(), frame: frame.into() });
    }

    /// Everything about this node that another one may want to know.
    pub(crate) fn tell(&mut self, to: &Life) {
        self.tell_with(to, false);
    }

    pub(crate) fn tell_with(&mut self, to: &Life, gap: bool) {
        let mut status = match &mut self.standing {
            Standing::Over => return,
            Standing::Outside => Status::default(),
            Standing::Member(membership) => membership.status(to),
        };
        status.gap = gap;
        status.leaving = self.leaves();
        self.send(to, &Frame::Status(status));
    }

    /// Wants to, and what it has submitted is delivered.
    pub(crate) fn leaves(&self) -> bool {
        self.leaving.is_some() && self.pending.is_empty()
    }

    pub(crate) fn keep(&mut self) {
        self.outputs.push_back(Output::Keep(wire::write_kept(self.me.incarnation, &self.acceptor)));
    }

    pub(crate) fn end(&mut self, why: String) {
        self.standing = Standing::Over;
        self.pending.clear();
        self.pending_usage = Usage::default();
        self.attempt = None;
        self.outputs.push_back(Output::Stopped { why });
    }

    /// It has promised to deliver nothing more in this view.
    pub(crate) fn is_wedged(&self) -> bool {
        self.acceptor.promised > 0
    }

    fn heard_lately(&self, peer: &Peer) -> bool {
        !peer.broken
            && peer.heard.is_some_and(|heard| self.now.saturating_sub(heard) <= self.silent)
    }

    /// Does it speak, as whatever run?
    pub(crate) fn is_audible(&self, place: usize) -> bool {
        let node = &self.acceptor.view.members[place].life.node;
        *node == self.me.node || self.peers.get(node).is_some_and(|peer| self.heard_lately(peer))
    }

    fn is_buried(&self, place: usize) -> bool {
        let life = &self.acceptor.view.members[place].life;
        let latest = self
            .peers
            .get(&life.node)
            .map_or(0, |peer| peer.life.incarnation)
            .max(life.incarnation);
        self.buried.get(&life.node).is_some_and(|&buried| buried >= latest)
    }

    /// Whose votes count, of those of this view.
    pub(crate) fn electorate(&self) -> Vec<bool> {
        (0..self.acceptor.view.members.len()).map(|place| !self.is_buried(place)).collect()
    }

    fn hears_a_quorum(&self) -> bool {
        is_quorum(&self.electorate(), |place| self.is_audible(place))
    }

    /// Wants to join, and is to be heard.
    pub(crate) fn outsiders(&self) -> impl Iterator<Item = &Life> {
        let joins = |peer: &&Peer| peer.outside && !peer.leaving && self.heard_lately(peer);
        self.peers
            .values()
            .filter(joins)
            .map(|peer| &peer.life)
            .filter(|life| self.acceptor.view.place(life).is_none())
    }

    /// It acknowledges nothing, or, as the hub, orders nothing.
    pub(crate) fn is_stalled(&self, place: usize) -> bool {
        match &self.standing {
            Standing::Member(membership) => membership
                .owed_since(place, !self.pending.is_empty())
                .is_some_and(|since| self.now.saturating_sub(since) > self.silent * STALLED),
            _ => false,
        }
    }

    /// A member of this view that is dead, as far as this node can tell.
    fn is_suspect(&self, place: usize) -> bool {
        let Standing::Member(membership) = &self.standing else { return false };
        let life = &self.acceptor.view.members[place].life;
        if *life == self.me {
            return false;
        }
        let since = |heard: Option<Duration>| heard.unwrap_or_default().max(membership.since);
        let is_silent = |heard| self.now.saturating_sub(since(heard)) > self.silent;
        let suspect = match self.peers.get(&life.node) {
            Some(peer) if peer.life == *life => peer.broken || is_silent(peer.heard),
            Some(peer) => peer.life.incarnation > life.incarnation || is_silent(None),
            None => is_silent(None),
        };
        suspect || self.is_buried(place) || self.is_stalled(place)
    }

    fn is_leaving(&self, place: usize) -> bool {
        let life = &self.acceptor.view.members[place].life;
        self.peers.get(&life.node).is_some_and(|peer| peer.life == *life && peer.leaving)
    }

    /// Begins to make another view if one is needed, and nobody before this node does.
    fn see_to_view(&mut self) {
        if self.attempt.is_some() {
            return self.attempt_beat();
        }
        if self.leaving.is_some() || self.acceptor.view.place_of_node(&self.me.node).is_none() {
            return;
        }
        let begin = match &self.standing {
            Standing::Over => false,
            Standing::Member(membership) if !self.is_wedged() => {
                let (place, since) = (membership.place, membership.since);
                self.is_needed(place, since)
            }
            _ => self.is_overdue(),
        };
        if begin {
            self.uneasy = None;
            self.begin();
        }
    }

    /// A member that has promised nothing yet.
    fn is_needed(&mut self, place: usize, since: Duration) -> bool {
        let gone = |place: usize| self.is_suspect(place) || self.is_leaving(place);
        let before = (0..place).filter(|&place| !gone(place)).count() as u32;
        if before == 0 {
            // (Those who come at once come together.)
            let joins =
                self.outsiders().next().is_some() && self.now.saturating_sub(since) > self.beat;
            return joins || (0..self.acceptor.view.members.len()).any(gone);
        }
        if !gone(0) {
            self.uneasy = None;
            return false;
        }
        let uneasy = *self.uneasy.get_or_insert(self.now);
        self.now >= uneasy + self.silent * before
    }

    /// One that has promised, or lost, or never had its place in a view: those who made the last attempt, or are to make one, have had their time.
    fn is_overdue(&self) -> bool {
        if !self.hears_a_quorum() {
            return false;
        }
        let acceptors = &self.acceptor.view.members;
        let place = self.acceptor.view.place_of_node(&self.me.node).expect("it is one");
        let outside = |place: usize| {
            self.peers.get(&acceptors[place].life.node).is_some_and(|peer| peer.outside)
        };
        let has_data = matches!(self.standing, Standing::Member(_));
        let before = (0..place)
            .filter(|&place| self.is_audible(place) && !(has_data && outside(place)))
            .count() as u32;
        // Where all are there, and all begin, nobody else will.
        let all = (0..acceptors.len())
            .all(|other| other == place || (self.is_audible(other) && outside(other)));
        let all = all && !has_data && before == 0 && !self.is_wedged();
        all || self.now.saturating_sub(self.patient) >= self.silent * (1 + before)
    }

    /// Says so where too few are left.
    fn see_to_quorum(&mut self) {
        let lost = self.is_wedged() && !self.hears_a_quorum();
        if let Standing::Member(membership) = &mut self.standing
            && lost
            && !membership.stopped
        {
            membership.stopped = true;
            let number = membership.view.number;
            let why = format!("this node can't reach enough of the members of view {number}");
            self.outputs.push_back(Output::Stopped { why });
        }
    }

    fn see_to_leaving(&mut self) {
        let (Some(leaving), false) = (self.leaving, self.is_over()) else { return };
        let alone = match &self.standing {
            Standing::Member(membership) => {
                membership.view.members.len() == 1 && self.pending.is_empty()
            }
            _ => self.departing.is_none(),
        };
        // All who go on without this one know of it.
        let known = self.departing.is_some_and(|until| {
            let knows = |member: &Seat| {
                self.peers
                    .get(&member.life.node)
                    .is_some_and(|peer| peer.view >= self.acceptor.view.number)
            };
            self.now >= until || self.acceptor.view.members.iter().all(knows)
        });
        if alone || known {
            self.end("this node has left".into());
        } else if self.now >= leaving + self.silent * LEAVING {
            self.end("this node has left, and others could not be told".into());
        }
    }

    /// A new view is in force: what was about the last one is void.
    pub(crate) fn forget(&mut self) {
        self.attempt = None;
        self.uneasy = None;
        self.patient = self.now;
        let view = &self.acceptor.view;
        self.peers.retain(|node, peer| peer.up || view.place_of_node(node).is_some());
        self.buried.retain(|node, _| view.place_of_node(node).is_some());
    }
}
