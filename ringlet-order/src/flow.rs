//! Within a view: submissions go to the hub, what it orders goes to all, and how far they are comes back. What is lost is asked for where a gap shows
//! it, and sent again where nothing shows it.

use std::time::Duration;

use bytes::Bytes;

use crate::api::{Life, Output, View};
use crate::log::Log;
use crate::order::{Order, Standing};
use crate::parcel::Parcel;
use crate::view::Change;
use crate::wire::{self, Entries, Frame, NO_ENTRIES, Status};

/// Of payloads, on their way to one member, or to the hub. (Less than most networks keep for who is slow: so it is not lost there, nor waited for.)
const UNDER_WAY_BYTES: u64 = 1 << 19;
/// Of one origin no more than so many windows' are believed to be under way (a member learns later than the hub what all have).
pub(crate) const WINDOWS: usize = 2;
/// Beats without progress, after which what is under way counts as lost.
const LOST_BEATS: u32 = 2;

/// As the hub sees a member.
struct Far {
    /// All up to here was sent to it; it has all up to here (none: it does not know of the view yet).
    sent: u64,
    acked: Option<u64>,
    /// The last of its own; what it was told that all have.
    own: u64,
    told_stable: u64,
    /// Since the last beat it has been sent again what is behind this one; and was told that its submissions are missing behind that.
    again: Option<u64>,
    asked: Option<u64>,
    /// Its last progress, or when it last was owed nothing; and beats since.
    progress: Duration,
    beats: u32,
}

/// Of this node, in its view.
pub(crate) struct Membership {
    pub view: View,
    pub place: usize,
    /// When it began.
    pub since: Duration,
    pub stopped: bool,
    pub log: Log,
    pub delivered: u64,
    /// Of each member, how many were delivered.
    counts: Vec<u64>,
    stable: u64,
    far: Vec<Far>,
    /// As a member that is not the hub: its last submission that went to the hub, bytes of those that are not delivered since, what it has acknowledged,
    /// and what it has asked for since the last beat.
    sent: u64,
    under_way: u64,
    acked: u64,
    asked: Option<u64>,
    progress: Duration,
    beats: u32,
}

impl Membership {
    pub fn new(change: &Change, place: usize, stable: u64, now: Duration) -> Membership {
        let members: Vec<_> = change.members.iter().map(|member| member.life.clone()).collect();
        let counts: Vec<_> = change.members.iter().map(|member| member.count).collect();
        let far = |_| Far {
            sent: change.start,
            acked: None,
            own: change.start,
            told_stable: 0,
            again: None,
            asked: None,
            progress: now,
            beats: 0,
        };
        Membership {
            place,
            since: now,
            stopped: false,
            log: Log::new(change.start, members.len()),
            delivered: change.start,
            stable,
            far: (0..members.len()).map(far).collect(),
            sent: counts[place],
            under_way: 0,
            counts,
            acked: 0,
            asked: None,
            progress: now,
            beats: 0,
            view: View { number: change.number, members },
        }
    }

    pub fn is_hub(&self) -> bool {
        self.place == 0
    }

    /// Of each member, how many are in the order up to there, which is not before what was delivered.
    pub fn counts_to(&self, sequence: u64) -> Vec<u64> {
        let mut counts = self.counts.clone();
        let open = sequence.saturating_sub(self.delivered) as usize;
        self.log
            .behind(self.delivered)
            .take(open)
            .for_each(|entry| counts[entry.origin as usize] += 1);
        counts
    }

    pub fn stable(&self) -> u64 {
        self.stable
    }

    pub fn status(&mut self, to: &Life) -> Status {
        let place = self.view.members.iter().position(|member| member == to);
        let mut status = Status { member: true, received: self.delivered, ..Status::default() };
        if self.is_hub() {
            (status.last, status.stable) = (self.log.last(), self.stable);
            if let Some(place) = place {
                status.taken = self.counts[place];
                self.far[place].told_stable = self.stable;
            }
        } else if place == Some(0) {
            self.acked = self.delivered;
        }
        status
    }

    /// Since when something that it should have done is not done.
    pub fn owed_since(&self, place: usize, pending: bool) -> Option<Duration> {
        if self.is_hub() {
            let far = &self.far[place];
            return (place != 0 && far.is_owed(self.log.last())).then_some(far.progress);
        }
        (place == 0 && pending).then_some(self.progress)
    }

    /// Of each member, whether this is a number that may come next.
    fn is_next(&self, origin: u8, number: u64) -> bool {
        self.counts.get(origin as usize).is_some_and(|&count| number == count + 1)
    }
}

impl Order {
    /// This node's membership and the sender's place, if the view goes on, and the sender belongs to it.
    fn flowing(&mut self, from: &Life) -> Option<(&mut Membership, usize)> {
        if self.is_wedged() {
            return None;
        }
        match &mut self.standing {
            Standing::Member(membership) => {
                let place = membership.view.members.iter().position(|member| member == from)?;
                Some((membership, place))
            }
            _ => None,
        }
    }

    pub(crate) fn status(&mut self, from: &Life, status: Status) -> Result<(), &'static str> {
        let first = self.submitted - self.pending.len() as u64;
        let Some((membership, place)) = self.flowing(from) else { return Ok(()) };
        if !status.member {
            return Ok(());
        }
        if membership.is_hub() {
            self.acknowledged(place, status.received)?;
            if status.gap {
                self.rewind(place);
            }
        } else if place == 0 {
            if status.gap && membership.sent > first {
                (membership.sent, membership.under_way) = (first, 0);
            }
            let behind = status.last > membership.delivered;
            self.all_have(status.stable);
            if behind {
                self.ask();
            }
        }
        Ok(())
    }

    /// A member has all up to there.
    fn acknowledged(&mut self, place: usize, received: u64) -> Result<(), &'static str> {
        let Standing::Member(membership) = &mut self.standing else { return Ok(()) };
        if received > membership.log.last() {
            return Err("acknowledges what was never ordered");
        }
        let far = &mut membership.far[place];
        if far.acked.is_none_or(|acked| received > acked) {
            far.acked = Some(received);
            far.sent = far.sent.max(received);
            (far.progress, far.beats) = (self.now, 0);
            self.see_to_stable();
        }
        Ok(())
    }

    pub(crate) fn see_to_stable(&mut self) {
        let Standing::Member(membership) = &self.standing else { return };
        if !membership.is_hub() {
            return;
        }
        let others =
            membership.far.iter().enumerate().filter(|(place, _)| *place != membership.place);
        // (One that does not know of the view has nothing of it.)
        if let Some(stable) = others.map(|(_, far)| far.acked).min().unwrap_or(Some(u64::MAX)) {
            self.all_have(stable);
        }
    }

    fn all_have(&mut self, stable: u64) {
        let Standing::Member(membership) = &mut self.standing else { return };
        let stable = stable.min(membership.delivered);
        if stable > membership.stable {
            membership.stable = stable;
            membership.log.trim(stable);
            self.outputs.push_back(Output::Stable { sequence: stable });
        }
    }

    /// What is behind the last acknowledgement is to go to it again.
    fn rewind(&mut self, place: usize) {
        let Standing::Member(membership) = &mut self.standing else { return };
        let far = &mut membership.far[place];
        let from = far.acked.unwrap_or(0).max(membership.log.base());
        if far.again != Some(from) {
            far.again = Some(from);
            far.sent = from;
        }
    }

    /// The hub is told that something is missing; not for each frame that shows it.
    fn ask(&mut self) {
        let Standing::Member(membership) = &mut self.standing else { return };
        if membership.asked != Some(membership.delivered) {
            membership.asked = Some(membership.delivered);
            let hub = membership.view.members[0].clone();
            self.tell_with(&hub, true);
        }
    }

    /// To the hub, of a member.
    pub(crate) fn submitted_by(
        &mut self,
        from: &Life,
        received: u64,
        entries: Entries,
        whole: &Bytes,
    ) -> Result<(), &'static str> {
        let Some((membership, place)) = self.flowing(from) else { return Ok(()) };
        if !membership.is_hub() {
            return Err("submits to a node that is not the hub");
        }
        self.acknowledged(place, received)?;
        for (origin, number, payload) in entries {
            let Standing::Member(membership) = &mut self.standing else { return Ok(()) };
            if origin as usize != place {
                return Err("submits in another's name");
            }
            if number <= membership.counts[place] {
                continue;
            }
            if !membership.is_next(origin, number) {
                let taken = Some(membership.counts[place]);
                if std::mem::replace(&mut membership.far[place].asked, taken) != taken {
                    self.tell_with(from, true);
                }
                break;
            }
            // No member sends so much; it comes again, if it was sent twice by mistake.
            if !membership.log.usage(place).fits(payload.len(), 1) {
                break;
            }
            self.order(place, part(whole, payload));
        }
        Ok(())
    }

    /// As the hub: gives it its place.
    fn order(&mut self, place: usize, payload: Bytes) {
        let Standing::Member(membership) = &mut self.standing else { return };
        let number = membership.counts[place] + 1;
        membership.log.push(place as u8, number, payload);
        membership.far[place].own = membership.log.last();
        self.deliver_to(u64::MAX);
        if let Standing::Member(membership) = &self.standing
            && membership.far.len() == 1
        {
            self.see_to_stable();
        }
    }

    /// As the hub: what this node has submitted.
    pub(crate) fn order_mine(&mut self) {
        let goes_on = !self.is_wedged();
        while let Standing::Member(membership) = &self.standing
            && membership.is_hub()
            && goes_on
            && let Some(payload) = self.pending.front().cloned()
        {
            self.order(0, payload);
        }
    }

    /// All of the log that was not delivered yet, up to there. A member's own are `pending` no more. False if it is in no order.
    pub(crate) fn deliver_to(&mut self, to: u64) -> bool {
        let Standing::Member(membership) = &mut self.standing else { return true };
        let delivered = membership.delivered;
        for entry in membership.log.behind(delivered).take(to.saturating_sub(delivered) as usize) {
            let origin = entry.origin as usize;
            if membership.counts[origin] + 1 != entry.number {
                return false;
            }
            membership.counts[origin] += 1;
            membership.delivered += 1;
            if origin == membership.place
                && let Some(mine) = self.pending.pop_front()
            {
                self.pending_usage.remove(mine.len());
                // (Less, where it was sent before it was to be sent again: then more goes at once.)
                membership.under_way = membership.under_way.saturating_sub(mine.len() as u64);
                (membership.progress, membership.beats) = (self.now, 0);
            }
            self.outputs.push_back(Output::Deliver {
                sequence: membership.delivered,
                origin: membership.view.members[origin].clone(),
                number: entry.number,
                payload: entry.payload.clone(),
            });
        }
        true
    }

    /// To a member, of the hub.
    pub(crate) fn ordered(
        &mut self,
        from: &Life,
        stable: u64,
        first: u64,
        entries: Entries,
        whole: &Bytes,
    ) -> Result<(), &'static str> {
        let Some((membership, place)) = self.flowing(from) else { return Ok(()) };
        if place != 0 {
            return Err("orders, and is not the hub");
        }
        let skipped = (membership.delivered + 1).checked_sub(first);
        self.all_have(stable);
        let Some(skipped) = skipped else {
            self.ask();
            return Ok(());
        };
        for (origin, number, payload) in entries.skip(skipped as usize) {
            let Standing::Member(membership) = &mut self.standing else { return Ok(()) };
            if !membership.is_next(origin, number) {
                return Err("orders what is nobody's next");
            }
            let payload = match origin as usize == membership.place {
                // (It has been here all the time.)
                true => self.pending.front().cloned().ok_or("orders what was never submitted")?,
                false => part(whole, payload),
            };
            if !membership.log.usage(origin as usize).fits(payload.len(), WINDOWS) {
                return Err("orders more than may be under way");
            }
            membership.log.push(origin, number, payload);
            self.deliver_to(u64::MAX);
        }
        Ok(())
    }

    /// What can be sent: in as few frames as it takes.
    pub(crate) fn flush(&mut self) {
        if self.is_wedged() {
            return;
        }
        match &self.standing {
            Standing::Member(membership) if membership.is_hub() => self.flush_hub(),
            Standing::Member(_) => self.flush_member(),
            _ => {}
        }
    }

    fn is_up(&self, life: &Life) -> bool {
        self.peers.get(&life.node).is_some_and(|peer| peer.up && peer.life == *life)
    }

    fn flush_hub(&mut self) {
        let Standing::Member(membership) = &self.standing else { return };
        let up: Vec<_> = membership.view.members.iter().map(|member| self.is_up(member)).collect();
        let Standing::Member(membership) = &mut self.standing else { return };
        let (last, number) = (membership.log.last(), membership.view.number);
        // A frame for each, then the next.
        let mut sent = true;
        while std::mem::take(&mut sent) {
            for place in (1..up.len()).filter(|&place| up[place]) {
                let (log, far) = (&membership.log, &mut membership.far[place]);
                if far.sent >= last
                    || log.bytes_to(far.sent) - log.bytes_to(far.acked.unwrap_or(0))
                        >= UNDER_WAY_BYTES
                {
                    continue;
                }
                let ordered = Frame::Ordered {
                    stable: membership.stable,
                    first: far.sent + 1,
                    entries: NO_ENTRIES,
                };
                let mut frame = Parcel::from(wire::write(number, &ordered));
                let put = wire::put_entries(&mut frame, log.behind(far.sent), Some(place as u8));
                let to = membership.view.members[place].clone();
                self.outputs.push_back(Output::Send { to, frame });
                (far.sent, far.told_stable) = (far.sent + put, membership.stable);
                sent = true;
            }
        }
        // Those whose own it is wait for it.
        let waits = |far: &Far| far.told_stable < membership.stable && far.told_stable < far.own;
        let waiting: Vec<_> =
            (1..up.len()).filter(|&place| up[place] && waits(&membership.far[place])).collect();
        for place in waiting {
            let Standing::Member(membership) = &self.standing else { return };
            let life = membership.view.members[place].clone();
            self.tell(&life);
        }
    }

    fn flush_member(&mut self) {
        let first = self.submitted - self.pending.len() as u64 + 1;
        let Standing::Member(membership) = &mut self.standing else { return };
        let (hub, number) = (membership.view.members[0].clone(), membership.view.number);
        let mut next = membership.sent.max(first - 1) + 1;
        while next <= self.submitted && membership.under_way < UNDER_WAY_BYTES {
            let submit = Frame::Submit { received: membership.delivered, entries: NO_ENTRIES };
            let mut frame = Parcel::from(wire::write(number, &submit));
            for payload in self.pending.range((next - first) as usize..) {
                if !wire::put_entry(&mut frame, membership.place as u8, next, payload) {
                    break;
                }
                next += 1;
                membership.under_way += payload.len() as u64;
            }
            membership.acked = membership.delivered;
            self.outputs.push_back(Output::Send { to: hub.clone(), frame });
        }
        membership.sent = next - 1;
        if membership.acked < membership.delivered {
            self.tell(&hub);
        }
    }

    /// What was sent, and not acknowledged for some beats, goes again.
    pub(crate) fn flow_beat(&mut self) {
        let wedged = self.is_wedged();
        let now = self.now;
        let first = self.submitted - self.pending.len() as u64;
        let Standing::Member(membership) = &mut self.standing else { return };
        let (last, base, stopped) =
            (membership.log.last(), membership.log.base(), wedged || membership.stopped);
        for far in &mut membership.far {
            (far.again, far.asked) = (None, None);
            far.beats += 1;
            if !far.is_owed(last) || stopped {
                (far.progress, far.beats) = (now, 0);
            } else if far.beats >= LOST_BEATS {
                far.sent = far.acked.unwrap_or(0).max(base);
                far.beats = 0;
            }
        }
        membership.asked = None;
        membership.beats += 1;
        if self.pending.is_empty() || stopped {
            (membership.progress, membership.beats) = (now, 0);
        } else if membership.beats >= LOST_BEATS {
            (membership.sent, membership.under_way) = (first, 0);
            membership.beats = 0;
        }
    }
}

/// A payload of a frame: that frame itself, if there is not much else in it.
fn part(whole: &Bytes, payload: &[u8]) -> Bytes {
    if 2 * payload.len() > whole.len() {
        whole.slice_ref(payload)
    } else {
        Bytes::copy_from_slice(payload)
    }
}

impl Far {
    fn is_owed(&self, last: u64) -> bool {
        self.acked.is_none_or(|acked| acked < last)
    }
}
