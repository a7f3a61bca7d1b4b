//! From one view to the next: whoever makes the attempt asks all, brings those who are behind to the same place, and only then proposes.

use std::time::Duration;

use bytes::Bytes;

use crate::api::{Life, Output};
use crate::ballot::{self, Ballot, is_quorum, place_of};
use crate::flow::{Membership, WINDOWS};
use crate::log::Log;
use crate::order::{Order, Standing};
use crate::parcel::Parcel;
use crate::view::{Change, Seat};
use crate::wire::{self, Entries, Frame, MEMBERS, NO_ENTRIES};

/// An attempt takes so many times the time of silence at most; then another one asks anew.
const PATIENCE: u32 = 4;
/// Where everybody has lost what the view had, nobody knows how far it was. No view gets so far, so no place in the order is given twice.
const LOST: u64 = 1 << 44;
/// A member that left in order stays for so many times the time of silence, for those who have not heard of it.
const DEPARTS: u32 = 2;

struct Promised {
    life: Life,
    have: Option<u64>,
    leaving: bool,
    accepted: Option<(Ballot, Change)>,
    /// Its last progress; behind which one it was sent, or asked for, what is missing.
    progress: Duration,
    asked: Option<u64>,
    /// Its promise counts, but it is too slow to belong to the next view.
    out: bool,
}

/// Of this node, to have the next view agreed on.
pub(crate) struct Attempt {
    ballot: Ballot,
    began: Duration,
    /// By acceptors' places.
    promises: Vec<Option<Promised>>,
    /// Not to be in the next view, whatever they say.
    without: Vec<bool>,
    /// Proposed, and who has accepted.
    proposed: Option<(Change, Vec<bool>)>,
}

impl Order {
    fn have(&self) -> Option<u64> {
        match &self.standing {
            Standing::Member(membership) => Some(membership.log.last()),
            _ => None,
        }
    }

    pub(crate) fn begin(&mut self) {
        let acceptors = self.acceptor.view.members.len();
        let Some(place) = self.acceptor.view.place_of_node(&self.me.node) else { return };
        let without = (0..acceptors).map(|other| self.is_stalled(other)).collect();
        let ballot = ballot::above(self.acceptor.promised, place);
        self.acceptor.promise(ballot);
        self.keep();
        let mut attempt =
            Attempt { ballot, began: self.now, promises: Vec::new(), without, proposed: None };
        attempt.promises.resize_with(acceptors, || None);
        attempt.promises[place] = Some(Promised {
            life: self.me.clone(),
            have: self.have(),
            leaving: false,
            accepted: self.acceptor.accepted.clone(),
            progress: self.now,
            asked: None,
            out: false,
        });
        self.attempt = Some(attempt);
        self.ask_all();
        self.advance();
    }

    /// To all acceptors that have not answered what the attempt asks now.
    fn ask_all(&mut self) {
        let Some(attempt) = &self.attempt else { return };
        let frame = match &attempt.proposed {
            None => Frame::Prepare { ballot: attempt.ballot },
            Some((change, _)) => Frame::Propose { ballot: attempt.ballot, change: change.clone() },
        };
        let answered = |place: usize| match &attempt.proposed {
            None => attempt.promises[place].is_some(),
            Some((_, accepted)) => accepted[place],
        };
        let open = (0..attempt.promises.len())
            .filter(|&place| !answered(place) && !attempt.without[place]);
        let nodes = open.map(|place| &self.acceptor.view.members[place].life.node);
        let peers = nodes.filter_map(|node| self.peers.get(node)).filter(|peer| peer.up);
        let to: Vec<_> = peers.map(|peer| peer.life.clone()).collect();
        to.iter().for_each(|life| self.send(life, &frame));
    }

    pub(crate) fn attempt_beat(&mut self) {
        let (now, silent) = (self.now, self.silent);
        let Some(attempt) = &mut self.attempt else { return };
        if now.saturating_sub(attempt.began) > silent * PATIENCE {
            return self.give_up();
        }
        for promised in attempt.promises.iter_mut().flatten() {
            promised.asked = None;
        }
        self.ask_all();
        self.advance();
    }

    /// Others may have their turn.
    fn give_up(&mut self) {
        self.attempt = None;
        self.patient = self.now;
    }

    /// Whatever an attempt asks of this node, and what is answered to its own.
    pub(crate) fn vote(&mut self, from: &Life, frame: Frame) -> Result<(), &'static str> {
        let Some(place) = self.acceptor.view.place_of_node(&from.node) else {
            return Err("votes, and has no voice");
        };
        let Some(mine) = self.acceptor.view.place_of_node(&self.me.node) else { return Ok(()) };
        match frame {
            Frame::Prepare { ballot } | Frame::Propose { ballot, .. }
                if place_of(ballot) != place =>
            {
                return Err("a ballot of another's");
            }
            // (The next attempt's ballot is above it.)
            Frame::Promised { ballot } if self.attempt.is_some() => self.promise(ballot),
            Frame::Prepare { ballot } | Frame::Propose { ballot, .. }
                if ballot < self.acceptor.promised =>
            {
                self.send(from, &Frame::Promised { ballot: self.acceptor.promised });
            }
            Frame::Prepare { ballot } => {
                self.promise(ballot);
                self.answer(from, ballot);
            }
            Frame::Propose { ballot, change } => {
                if change.number != self.acceptor.view.number + 1 {
                    return Err("proposes what is not the next view");
                }
                self.promise(ballot);
                if self.acceptor.accepted.as_ref().is_none_or(|(accepted, _)| *accepted != ballot) {
                    self.acceptor.accept(ballot, change);
                    self.keep();
                }
                self.send(from, &Frame::Accepted { ballot });
            }
            Frame::Promise { ballot, have, leaving, accepted } => {
                let Some(attempt) =
                    self.attempt.as_mut().filter(|attempt| attempt.ballot == ballot)
                else {
                    return Ok(());
                };
                let have = have.filter(|_| self.acceptor.view.members[place].life == *from);
                match &mut attempt.promises[place] {
                    // A later run of that node has the same promise to keep, but not what was there.
                    Some(promised) if promised.life == *from => {
                        if have > promised.have {
                            (promised.have, promised.progress) = (have, self.now);
                        }
                    }
                    promised => {
                        let (life, progress) = (from.clone(), self.now);
                        *promised = Some(Promised {
                            life,
                            have,
                            leaving,
                            accepted,
                            progress,
                            asked: None,
                            out: false,
                        });
                    }
                }
                self.advance();
            }
            Frame::Accepted { ballot } => {
                let attempt = self.attempt.as_mut().filter(|attempt| attempt.ballot == ballot);
                if let Some((_, accepted)) = attempt.and_then(|attempt| attempt.proposed.as_mut()) {
                    accepted[place] = true;
                    self.advance();
                }
            }
            Frame::Fetch { ballot, have }
                if ballot == self.acceptor.promised && place_of(ballot) == place =>
            {
                self.send_level(from, ballot, have);
            }
            Frame::Level { ballot, first, entries } if ballot == self.acceptor.promised => {
                if place_of(ballot) != place && place_of(ballot) != mine {
                    return Err("brings what was not asked for");
                }
                self.level(first, entries)?;
                match place_of(ballot) == mine {
                    true => self.leveled(),
                    false => self.answer(from, ballot),
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// To another's ballot, which is not lower than any before.
    fn promise(&mut self, ballot: Ballot) {
        if ballot > self.acceptor.promised {
            self.acceptor.promise(ballot);
            self.keep();
            self.give_up();
        }
    }

    fn answer(&mut self, to: &Life, ballot: Ballot) {
        let (have, leaving) = (self.have(), self.leaves());
        let accepted = self.acceptor.accepted.clone();
        self.send(to, &Frame::Promise { ballot, have, leaving, accepted });
    }

    /// The next frame of what is behind that one.
    fn send_level(&mut self, to: &Life, ballot: Ballot, have: u64) {
        let Standing::Member(membership) = &self.standing else { return };
        let level = Frame::Level { ballot, first: have + 1, entries: NO_ENTRIES };
        let mut frame = Parcel::from(wire::write(self.acceptor.view.number, &level));
        if wire::put_entries(&mut frame, membership.log.behind(have), None) > 0 {
            self.outputs.push_back(Output::Send { to: to.clone(), frame });
        }
    }

    /// Takes what it lacks, and does not deliver it: the next view may end before.
    fn level(&mut self, first: u64, entries: Entries) -> Result<(), &'static str> {
        let Standing::Member(membership) = &mut self.standing else { return Ok(()) };
        let log: &mut Log = &mut membership.log;
        let Some(skipped) = (log.last() + 1).checked_sub(first) else { return Ok(()) };
        for (origin, number, payload) in entries.skip(skipped as usize) {
            if origin as usize >= membership.view.members.len() {
                return Err("brings what is nobody's");
            }
            if !log.usage(origin as usize).fits(payload.len(), WINDOWS) {
                return Err("brings more than may be under way");
            }
            log.push(origin, number, Bytes::copy_from_slice(payload));
        }
        Ok(())
    }

    fn leveled(&mut self) {
        let have = self.have();
        let mine = self.acceptor.view.place_of_node(&self.me.node);
        if let (Some(attempt), Some(mine)) = (&mut self.attempt, mine)
            && let Some(promised) = &mut attempt.promises[mine]
            && have > promised.have
        {
            (promised.have, promised.progress) = (have, self.now);
            self.advance();
        }
    }

    /// The next step of this node's attempt, if it can be made.
    fn advance(&mut self) {
        let electorate = self.electorate();
        let Some(attempt) = &self.attempt else { return };
        if let Some((change, accepted)) = &attempt.proposed {
            if is_quorum(&electorate, |place| accepted[place]) {
                let change = change.clone();
                self.decided(change);
            }
            return;
        }
        if !is_quorum(&electorate, |place| attempt.promises[place].is_some()) {
            return;
        }
        let waits = |place: usize| {
            attempt.promises[place].is_none()
                && !attempt.without[place]
                && electorate[place]
                && self.is_audible(place)
        };
        if self.now.saturating_sub(attempt.began) <= self.silent && (0..electorate.len()).any(waits)
        {
            return;
        }
        let accepted =
            attempt.promises.iter().flatten().filter_map(|promised| promised.accepted.as_ref());
        match accepted.max_by_key(|(ballot, _)| *ballot) {
            // It may have been decided already.
            Some((_, change)) => {
                let change = change.clone();
                self.propose(change);
            }
            None => self.level_all(),
        }
    }

    /// All who answered and have what the view had, but the slow ones, get to the same place; then the next view is proposed.
    fn level_all(&mut self) {
        let (now, silent) = (self.now, self.silent);
        let Some(mine) = self.acceptor.view.place_of_node(&self.me.node) else { return };
        let Some(attempt) = &mut self.attempt else { return };
        let ballot = attempt.ballot;
        let mut sends = Vec::new();
        let start = loop {
            let have = |promised: &Promised| promised.have.filter(|_| !promised.out);
            let with = |place: &usize| !attempt.without[*place];
            let of = |place: usize| attempt.promises[place].as_ref().and_then(have);
            let Some(most) = (0..attempt.promises.len()).filter(with).filter_map(of).max() else {
                break None;
            };
            let Some(have) = of(mine) else {
                // Who has it sees to it.
                return self.give_up();
            };
            let behind = |place: usize| of(place).is_some_and(|have| have < most);
            // To fetch from; else those to bring it to.
            let targets: Vec<_> = match have < most {
                true => (0..attempt.promises.len())
                    .filter(with)
                    .filter(|&place| of(place) == Some(most))
                    .take(1)
                    .collect(),
                false => (0..attempt.promises.len())
                    .filter(with)
                    .filter(|&place| behind(place))
                    .collect(),
            };
            if targets.is_empty() {
                break Some(most);
            }
            let my_progress =
                attempt.promises[mine].as_ref().map_or(now, |promised| promised.progress);
            let mut slow = false;
            for place in targets {
                let Some(promised) = &mut attempt.promises[place] else { continue };
                let progress = if have < most {
                    my_progress.max(promised.progress)
                } else {
                    promised.progress
                };
                let mark = if have < most { Some(have) } else { promised.have };
                if now.saturating_sub(progress) > silent {
                    (promised.out, slow) = (true, true);
                } else if promised.asked != mark {
                    promised.asked = mark;
                    sends.push((promised.life.clone(), mark.unwrap_or_default()));
                }
            }
            if !slow {
                let fetches = have < most;
                for (life, behind) in sends {
                    match fetches {
                        true => self.send(&life, &Frame::Fetch { ballot, have: behind }),
                        false => self.send_level(&life, ballot, behind),
                    }
                }
                return;
            }
            sends.clear();
        };
        if let Some(change) = self.next_view(start) {
            self.propose(change);
        }
    }

    /// Those who have all up to `start`, and behind them those who know nothing. If nobody has anything, all know nothing.
    fn next_view(&self, start: Option<u64>) -> Option<Change> {
        let attempt = self.attempt.as_ref()?;
        let view = &self.acceptor.view;
        let promises = || {
            attempt
                .promises
                .iter()
                .enumerate()
                .filter_map(|(place, promised)| Some((place, promised.as_ref()?)))
        };
        let goes_on = |(place, promised): &(usize, &Promised)| {
            promised.have.is_some()
                && promised.have == start
                && !promised.out
                && !promised.leaving
                && !attempt.without[*place]
        };
        let counts = match &self.standing {
            Standing::Member(membership) => membership.counts_to(start.unwrap_or_default()),
            _ => Vec::new(),
        };
        let seat = |(place, promised): (usize, &Promised)| {
            Some(Seat { life: promised.life.clone(), joins: false, count: *counts.get(place)? })
        };
        let mut members: Vec<_> = promises().filter(goes_on).filter_map(seat).collect();
        if start.is_some() && members.is_empty() {
            return None;
        }
        let lost = promises().filter(|(_, promised)| promised.have.is_none() && !promised.leaving);
        for life in lost.map(|(_, promised)| &promised.life).chain(self.outsiders()) {
            let is_new = members.iter().all(|member| member.life.node != life.node);
            if is_new && members.len() < MEMBERS {
                members.push(Seat { life: life.clone(), joins: true, count: 0 });
            }
        }
        let lost_start = if view.number == 0 { 0 } else { view.start.saturating_add(LOST) };
        Some(Change { number: view.number + 1, start: start.unwrap_or(lost_start), members })
    }

    fn propose(&mut self, change: Change) {
        let Some(mine) = self.acceptor.view.place_of_node(&self.me.node) else { return };
        let Some(attempt) = &mut self.attempt else { return };
        let mut accepted = vec![false; attempt.promises.len()];
        accepted[mine] = true;
        self.acceptor.accept(attempt.ballot, change.clone());
        attempt.proposed = Some((change, accepted));
        self.keep();
        self.ask_all();
        self.advance();
    }

    /// A quorum has accepted it.
    fn decided(&mut self, change: Change) {
        let number = change.number;
        let frame = Parcel::from(wire::write(number, &Frame::Decided(change.clone())));
        for peer in self.peers.values().filter(|peer| peer.up) {
            self.outputs.push_back(Output::Send { to: peer.life.clone(), frame: frame.clone() });
        }
        self.install(change);
    }

    /// It was decided on: this node goes on in it, joins it, waits outside of it, or has come to its end.
    pub(crate) fn install(&mut self, change: Change) {
        let next = change.number == self.acceptor.view.number + 1;
        let place = change.place(&self.me);
        let joins = place.is_some_and(|place| change.members[place].joins);
        let outside = matches!(self.standing, Standing::Outside);
        if outside && place.is_some() && (!joins || self.departing.is_some()) {
            return self.end(format!(
                "view {} knows this run of the node as one that it is not",
                change.number
            ));
        }
        if outside && place.is_none() {
            self.settle(change);
            return;
        }
        if outside {
            self.settle(change);
            let start = self.acceptor.view.start;
            return self.enter(place.unwrap_or_default(), start, Vec::new());
        }
        let Some(place) = place.filter(|_| next && !joins) else {
            if self.leaves() && next {
                self.settle(change);
                self.standing = Standing::Outside;
                self.departing = Some(self.now + self.silent * DEPARTS);
                return;
            }
            let number = change.number;
            self.settle(change);
            return self.end(format!(
                "view {number} goes on without this run of the node, which was taken for dead"
            ));
        };
        let is_whole = self.deliver_to(change.start);
        let Standing::Member(membership) = &mut self.standing else { return };
        membership.log.cut(change.start);
        if !is_whole || membership.delivered != change.start {
            let why = format!(
                "view {} begins at {}, and this node has not what is before",
                change.number,
                change.start + 1
            );
            return self.end(why);
        }
        let stable = membership.stable();
        let left = membership
            .view
            .members
            .iter()
            .filter(|life| change.place(life).is_none())
            .cloned()
            .collect();
        if change.members[place].count != self.submitted - self.pending.len() as u64 {
            return self
                .end(format!("view {} miscounts what this node has submitted", change.number));
        }
        self.settle(change);
        self.enter(place, stable, left);
    }

    /// It is the last view that this node knows of.
    fn settle(&mut self, change: Change) {
        self.acceptor = ballot::Acceptor::new(change);
        self.keep();
        self.forget();
    }

    fn enter(&mut self, place: usize, stable: u64, left: Vec<Life>) {
        let change = &self.acceptor.view;
        let membership = Membership::new(change, place, stable, self.now);
        let joined = change
            .members
            .iter()
            .filter(|member| member.joins)
            .map(|member| member.life.clone())
            .collect();
        let (sequence, view) = (change.start + 1, membership.view.clone());
        self.standing = Standing::Member(Box::new(membership));
        self.outputs.push_back(Output::View { sequence, view, joined, left });
        self.dirty = true;
        self.see_to_stable();
        self.order_mine();
    }
}
