//! What a keeper that comes late is given by one that was there: the registry as of some place in the order, and the contents of coherent regions.
//!
//! It asks, and asks again, or another one: whatever is lost on the way, and whoever dies. What is delivered before it knows the registry is held back.
//!
//! Contents come piece by piece while it delivers already: a byte that was written since it joined has its value from the order, which is newer than any
//! piece, or will be overwritten in its turn; any other byte is the piece's. Nobody receives such a region there before all of it has come, and all that
//! its pieces knew has been delivered.
//!
//! Who has all of a region is in the registry, so all hosts agree on it: a host says in the order when it has. Only those are asked. Once the last of them
//! has gone the region is incomplete, which each host learns at the same place in the order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ringlet_order::{Life, Output, Parcel, View};

use super::Keeper;
use super::cluster::{Cluster, ring};
use super::space::Memory;
use crate::protocol::Answer;
use crate::registry::{Act, RegionEntry, Registry};

/// The first byte of all frames of this kind: none of the order's begins with it.
const KEEPERS: u8 = 0xf5;
const ASK_STATE: u8 = 1;
const STATE: u8 = 2;
const ASK_PIECE: u8 = 3;
const PIECE: u8 = 4;
const REFUSED: u8 = 5;

/// What one frame carries.
const PIECE_BYTES: usize = 32 << 10;
/// What is asked for by one question; and what may be under way, which is half of what waits for one way's room: the order has the rest.
const RANGE_BYTES: u64 = 4 * PIECE_BYTES as u64;
const WINDOW_BYTES: u64 = 16 * PIECE_BYTES as u64;
/// Frames of each other keeper that are heard in one turn.
const HEARD_AT_ONCE: usize = 16;
/// Frames that wait to be sent to one, or that have come from the one that was asked.
const FRAMES_MOST: usize = 4096;
/// From any other one, which has nothing to say but what it asks.
const ASKS_MOST: usize = 16;
/// Pieces that wait to be sent to one: who asks for more asks again.
const PIECES_MOST: usize = 64;
/// What is held back until the registry is known.
const HELD_BYTES_MOST: usize = 256 << 20;
/// Places in the order that another keeper may have and this one has not: more than all of them may have submitted that is not everywhere.
const AHEAD_MOST: u64 = 1 << 20;
/// Who does not answer is asked again, or another one.
const PATIENCE: Duration = Duration::from_millis(300);

/// Is this host's state that of the cluster?
pub enum Standing {
    Outside,
    /// It belongs to the view of this number, and does not know what was before.
    Waiting {
        since: u64,
        held: VecDeque<Output>,
        bytes: usize,
    },
    Inside,
}

/// A bit for each byte of a region that was written since this host knows it, by parts of the region. (A copy of it shares those, until either is
/// changed.)
#[derive(Clone)]
struct Touched(Vec<Option<Arc<Bits>>>);

/// Of a part of so many bytes.
type Bits = [u64; PART_BYTES / 64];
const PART_BYTES: usize = 64 << 10;

impl Touched {
    fn none(bytes: usize) -> Touched {
        Touched(vec![None; bytes.div_ceil(PART_BYTES)])
    }

    fn touch(&mut self, at: usize, bytes: usize) {
        let mut at = at;
        let end = at + bytes;
        while at < end {
            let part = &mut self.0[at / PART_BYTES];
            let part = part.get_or_insert_with(|| Arc::new([0; PART_BYTES / 64]));
            let (word, bit) = (at % PART_BYTES / 64, at % 64);
            let count = (64 - bit).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << bit;
            if part[word] & mask != mask {
                Arc::make_mut(part)[word] |= mask;
            }
            at += count;
        }
    }

    /// Those of 64 bytes.
    fn word(&self, at: usize) -> u64 {
        let part = self.0[at / PART_BYTES].as_ref();
        part.map_or(0, |part| part[at % PART_BYTES / 64])
    }

    /// The parts of this piece that nothing was written to: from, to.
    fn untouched(&self, at: usize, bytes: usize) -> Vec<(usize, usize)> {
        let (mut parts, mut at, end) = (Vec::new(), at, at + bytes);
        while at < end {
            let word = self.word(at) >> (at % 64);
            let left = (64 - at % 64).min(end - at);
            let free = (word.trailing_zeros() as usize).min(left);
            if free > 0 {
                match parts.last_mut() {
                    Some((_, to)) if *to == at => *to = at + free,
                    _ => parts.push((at, at + free)),
                }
                at += free;
            } else {
                at += ((!word).trailing_zeros() as usize).min(left);
            }
        }
        parts
    }
}

/// A coherent region whose contents are on their way.
pub struct Filling {
    touched: Touched,
    /// The same of what was written to all hosts, once that lies apart.
    apart: Option<Touched>,
    next: u64,
    /// Up to where pieces were asked for.
    asked: u64,
    bytes: u64,
    /// The place in the order that its pieces knew, by who has told them.
    known: BTreeMap<Life, u64>,
    is_delivered: bool,
    /// Who does not know of it.
    refused: BTreeSet<Life>,
}

impl Filling {
    fn new(bytes: u64) -> Filling {
        let touched = Touched::none(bytes as usize);
        let (next, asked, is_delivered) = (0, 0, false);
        let (apart, known, refused) = (None, BTreeMap::new(), BTreeSet::new());
        Filling { touched, apart, next, asked, bytes, known, is_delivered, refused }
    }

    pub fn touch(&mut self, at: usize, bytes: usize) {
        self.touched.touch(at, bytes);
    }

    pub fn part(&mut self) {
        self.apart = Some(self.touched.clone());
    }

    pub fn touch_apart(&mut self, at: usize, bytes: usize) {
        if let Some(touched) = &mut self.apart {
            touched.touch(at, bytes);
        }
    }

    pub fn is_done(&self) -> bool {
        self.next >= self.bytes && self.is_delivered
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How much of it is there.
    pub fn progress(&self) -> u64 {
        self.next
    }
}

/// Frames between keepers, and what is asked.
#[derive(Default)]
pub struct Inbox {
    came: BTreeMap<Life, VecDeque<Vec<u8>>>,
    sending: BTreeMap<Life, VecDeque<Parcel>>,
    /// Whom was asked, and when; what has come of the registry: as of which place, and its parts.
    asked: Option<(Life, Duration)>,
    parts: Parts,
    whom: usize,
    /// The region whose contents were asked for last.
    asked_for: Option<u32>,
    refused: BTreeSet<Life>,
    /// Members to which there is no way now.
    down: BTreeSet<Life>,
    pub filling: BTreeMap<u32, Filling>,
    /// The number of the last view that the registry knows, and the place in the order from which on this host has it.
    pub applied: u64,
    pub base: u64,
    /// Bytes of contents that have come, of all regions; the region that a program waits for; and when somebody was given any.
    pub came_bytes: u64,
    pub wanted: Option<u32>,
    pub gave: Option<Duration>,
}

/// Parts of a registry as of one view and place, of so many: another one's are not mixed with them.
#[derive(Default)]
struct Parts {
    of: (u64, u64, u32),
    came: BTreeMap<u32, Vec<u8>>,
}

impl Parts {
    /// All of it, once the last part has come.
    fn add(&mut self, of: (u64, u64, u32), at: u32, bytes: &[u8]) -> Option<Vec<u8>> {
        if self.of != of {
            *self = Parts { of, came: BTreeMap::new() };
        }
        self.came.insert(at, bytes.to_vec());
        let is_all = self.came.len() == of.2 as usize;
        is_all.then(|| std::mem::take(&mut self.came).into_values().flatten().collect())
    }
}

impl Inbox {
    pub fn is_for(frame: &[u8]) -> bool {
        frame.first() == Some(&KEEPERS)
    }

    /// (What one sends beyond that is lost, as on the way: it crowds out nobody else's.)
    pub fn put(&mut self, from: &Life, frame: &[u8]) {
        let most = if self.is_asked(from) { FRAMES_MOST } else { ASKS_MOST };
        let came = self.came.entry(from.clone()).or_default();
        if came.len() < most {
            came.push_back(frame.to_vec());
        }
    }

    /// One of each who has sent any.
    fn next(&mut self) -> Vec<(Life, Vec<u8>)> {
        let all = self.came.iter_mut();
        let next = all.filter_map(|(from, came)| Some((from.clone(), came.pop_front()?))).collect();
        self.came.retain(|_, came| !came.is_empty());
        next
    }

    fn is_asked(&self, life: &Life) -> bool {
        self.asked.as_ref().is_some_and(|(asked, _)| asked == life)
    }

    pub fn up(&mut self, life: &Life) {
        self.down.remove(life);
    }

    pub fn down(&mut self, life: &Life) {
        self.down.insert(life.clone());
        self.forget(life);
    }

    /// Of others nothing is sent, or kept.
    pub fn keep_members(&mut self, view: &View) {
        self.sending.retain(|life, _| view.members.contains(life));
        self.down.retain(|life| view.members.contains(life));
        if let Some((life, _)) = self.asked.clone()
            && !view.members.contains(&life)
        {
            self.forget(&life);
        }
        // (All that it knew and that is in the order has been delivered before it went.)
        for filling in self.filling.values_mut() {
            filling.known.retain(|life, _| view.members.contains(life));
        }
    }

    fn forget(&mut self, life: &Life) {
        self.sending.remove(life);
        self.came.remove(life);
        if self.is_asked(life) {
            (self.asked, self.asked_for) = (None, None);
            self.whom = self.whom.wrapping_add(1);
        }
    }

    fn send(&mut self, to: &Life, kind: u8, words: &[u64], bytes: &[u8]) {
        let queue = self.sending.entry(to.clone()).or_default();
        if queue.len() < FRAMES_MOST {
            let mut frame = vec![KEEPERS, kind];
            words.iter().for_each(|word| frame.extend(word.to_le_bytes()));
            frame.extend(bytes);
            queue.push_back(frame.into());
        }
    }
}

/// Words of a frame, and what is behind them.
fn words<const N: usize>(frame: &[u8]) -> Option<([u64; N], &[u8])> {
    let (head, rest) = frame.split_at_checked(8 * N)?;
    let word = |at: usize| head[8 * at..8 * at + 8].try_into().map(u64::from_le_bytes);
    let mut words = [0; N];
    for (at, to) in words.iter_mut().enumerate() {
        *to = word(at).ok()?;
    }
    Some((words, rest))
}

/// Where nobody knows anything all begin alike.
pub fn is_first(view: &View, joined: &[Life]) -> bool {
    view.members.iter().all(|member| joined.contains(member))
}

impl Cluster {
    pub fn holds_back(&self) -> bool {
        matches!(self.standing, Standing::Waiting { .. })
    }

    /// Something was asked of another keeper, or is to be sent to one.
    pub fn is_asking(&self) -> bool {
        self.holds_back() || !self.inbox.filling.is_empty() || !self.inbox.sending.is_empty()
    }

    pub fn hold(&mut self, output: Output) -> std::io::Result<()> {
        let Standing::Waiting { held, bytes, .. } = &mut self.standing else { return Ok(()) };
        if let Output::Deliver { payload, .. } = &output {
            *bytes += payload.len() + 64;
        }
        held.push_back(output);
        if *bytes > HELD_BYTES_MOST {
            return Err(std::io::Error::other("nobody tells what the cluster has"));
        }
        Ok(())
    }

    /// True if a view is to be applied at once.
    pub fn enters(
        &mut self,
        view: &View,
        joined: &[Life],
        output: Output,
    ) -> std::io::Result<bool> {
        self.inbox.refused.clear();
        self.inbox.filling.values_mut().for_each(|filling| filling.refused.clear());
        match &self.standing {
            Standing::Waiting { .. } => {
                self.hold(output)?;
                Ok(false)
            }
            Standing::Inside => Ok(true),
            Standing::Outside => {
                let is_first = is_first(view, joined);
                self.standing = match is_first {
                    true => Standing::Inside,
                    false => {
                        Standing::Waiting { since: view.number, held: VecDeque::new(), bytes: 0 }
                    }
                };
                Ok(is_first)
            }
        }
    }

    /// The others, one of which is asked.
    fn others(&self) -> Vec<Life> {
        let members = self.view.iter().flat_map(|view| &view.members);
        members.filter(|life| **life != self.me).cloned().collect()
    }

    /// One of these, and another one if the last one that was asked is silent.
    fn whom(&mut self, of: &[Life]) -> Option<Life> {
        let inbox = &mut self.inbox;
        inbox.whom = inbox.whom.wrapping_add(usize::from(inbox.asked.is_some()));
        let life = of.get(inbox.whom % of.len().max(1))?;
        inbox.asked = Some((life.clone(), self.began.elapsed()));
        Some(life.clone())
    }

    /// Asks for what is missing, if it is time.
    fn ask(&mut self, registry: &Registry) -> std::io::Result<()> {
        let now = self.now();
        let is_silent = self.inbox.asked.as_ref().is_none_or(|(_, when)| now >= *when + PATIENCE);
        if self.holds_back() {
            if is_silent {
                let mut others = self.others();
                others.retain(|life| !self.inbox.refused.contains(life));
                if others.is_empty() {
                    let error = "nobody is left who knows what the cluster has";
                    return Err(std::io::Error::other(error));
                }
                // (To who is cut off there may be a way again.)
                others.retain(|life| !self.inbox.down.contains(life));
                if let Some(life) = self.whom(&others) {
                    self.inbox.send(&life, ASK_STATE, &[], &[]);
                }
            }
            return Ok(());
        }
        // (Who was silent may go on to be: another one, or another region, has its turn.)
        let silent = self.inbox.asked.as_ref().filter(|_| is_silent).map(|(life, _)| life.clone());
        let silent = silent.zip(self.inbox.asked_for.take_if(|_| is_silent));
        if let Some((life, id)) = &silent
            && let Some(filling) = self.inbox.filling.get_mut(id)
        {
            filling.refused.insert(life.clone());
        }
        // (Where nobody has it, somebody may say yet that he has.)
        let mut others = self.others();
        others.retain(|life| !self.inbox.down.contains(life));
        let has = |life: &Life, region: &RegionEntry| {
            let host = registry.host(&life.node, life.incarnation);
            host.is_some_and(|host| region.holders.contains(&host))
        };
        let filling = &self.inbox.filling;
        let missing = self.inbox.wanted.iter().chain(filling.keys()).filter_map(|id| {
            let region = registry.regions.get(id)?;
            let filling = filling.get(id).filter(|it| it.next < it.bytes)?;
            let holders: Vec<_> = others.iter().filter(|life| has(life, region)).cloned().collect();
            (!holders.is_empty()).then_some((*id, holders, filling))
        });
        let mut refused = None;
        let free = missing.clone().find_map(|(id, mut holders, filling)| {
            holders.retain(|life| !filling.refused.contains(life));
            (!holders.is_empty()).then_some((id, holders))
        });
        if free.is_none() {
            refused = missing.clone().map(|(id, holders, _)| (id, holders)).next();
        }
        let is_refused = refused.is_some();
        let Some((id, holders)) = free.or(refused) else { return Ok(()) };
        // (One that answers goes on to be asked, if it has this one too.)
        let asked = self.inbox.asked.as_ref().map(|(life, _)| life.clone());
        let goes_on = asked.filter(|life| !is_silent && holders.contains(life));
        if is_refused {
            self.inbox.filling.values_mut().for_each(|filling| filling.refused.clear());
        }
        let is_another = self.inbox.asked_for.replace(id) != Some(id);
        let Some(filling) = self.inbox.filling.get_mut(&id) else { return Ok(()) };
        if goes_on.is_none() || is_another {
            // (What they do not know of yet they know in a while, in which nothing is asked.)
            let is_paused = is_refused && silent.is_none();
            filling.asked = if is_paused { filling.bytes } else { filling.next };
        }
        let Some(life) = goes_on.or_else(|| self.whom(&holders)) else { return Ok(()) };
        let Cluster { inbox, .. } = self;
        let Some(filling) = inbox.filling.get_mut(&id) else { return Ok(()) };
        let mut ranges = Vec::new();
        while filling.asked < filling.bytes.min(filling.next + WINDOW_BYTES) {
            let to = filling.bytes.min(filling.asked + RANGE_BYTES);
            ranges.push([u64::from(id), filling.asked, to]);
            filling.asked = to;
        }
        ranges.iter().for_each(|range| inbox.send(&life, ASK_PIECE, range, &[]));
        Ok(())
    }
}

impl Keeper {
    /// What keepers ask of each other. True if there was anything.
    pub(super) fn transfer(&mut self) -> std::io::Result<bool> {
        let Some(cluster) = &mut self.cluster else { return Ok(false) };
        let mut next = cluster.inbox.next();
        let mut any = !next.is_empty();
        for nth in 1..=HEARD_AT_ONCE {
            for (from, frame) in std::mem::take(&mut next) {
                if let [_, kind, words @ ..] = &frame[..] {
                    self.hear(&from, *kind, words);
                }
            }
            let Some(cluster) = &mut self.cluster else { return Ok(any) };
            if nth < HEARD_AT_ONCE {
                next = cluster.inbox.next();
            }
        }
        self.filled();
        let Some(cluster) = &mut self.cluster else { return Ok(false) };
        cluster.ask(&self.registry)?;
        let Cluster { inbox, network, .. } = cluster;
        inbox.sending.retain(|to, frames| {
            while let Some(frame) = frames.front() {
                if !network.send(to, frame) {
                    break;
                }
                any = true;
                frames.pop_front();
            }
            !frames.is_empty()
        });
        Ok(any)
    }

    fn hear(&mut self, from: &Life, kind: u8, frame: &[u8]) -> Option<()> {
        let cluster = self.cluster.as_mut()?;
        let is_asked = cluster.inbox.is_asked(from);
        let is_member = cluster.others().contains(from);
        match kind {
            _ if !is_member => {}
            ASK_STATE if !matches!(cluster.standing, Standing::Inside) => {
                cluster.inbox.send(from, REFUSED, &[0], &[]);
            }
            // (One that is on its way is enough.)
            ASK_STATE if cluster.inbox.sending.contains_key(from) => {}
            ASK_STATE => {
                let text = serde_json::to_vec(&self.registry).ok()?;
                let count = text.len().div_ceil(PIECE_BYTES) as u64;
                for (at, part) in text.chunks(PIECE_BYTES).enumerate() {
                    let head = [cluster.inbox.applied, cluster.delivered, at as u64, count];
                    cluster.inbox.send(from, STATE, &head, part);
                }
            }
            STATE if is_asked => {
                let ([view, place, at, count], bytes) = words(frame)?;
                self.learn(view, place, at as u32, count as u32, bytes);
            }
            ASK_PIECE
                if cluster.inbox.sending.get(from).map_or(0, VecDeque::len) >= PIECES_MOST => {}
            ASK_PIECE => {
                let ([id, at, to], _) = words(frame)?;
                self.tell_range(from, id as u32, at, to);
            }
            PIECE if is_asked => {
                let ([id, asked, at, next, place], bytes) = words(frame)?;
                self.fill(from, id as u32, asked, at, next, place, bytes);
            }
            REFUSED if is_asked => {
                let ([id], _) = words(frame)?;
                (cluster.inbox.asked, cluster.inbox.asked_for) = (None, None);
                match cluster.inbox.filling.get_mut(&(id as u32)) {
                    Some(filling) => drop(filling.refused.insert(from.clone())),
                    None if id == 0 => drop(cluster.inbox.refused.insert(from.clone())),
                    None => {}
                }
            }
            _ => {}
        }
        Some(())
    }

    /// A part of the registry, as of that view and place.
    fn learn(&mut self, view: u64, place: u64, at: u32, count: u32, bytes: &[u8]) -> Option<()> {
        let cluster = self.cluster.as_mut()?;
        let Standing::Waiting { since, .. } = cluster.standing else { return None };
        let now = cluster.now();
        // (It does not know of us yet: in a while it does.)
        if view < since || at >= count || count as usize > FRAMES_MOST {
            return None;
        }
        cluster.inbox.asked.as_mut()?.1 = now;
        let text = cluster.inbox.parts.add((view, place, count), at, bytes)?;
        let whom = cluster.inbox.asked.take();
        let known = serde_json::from_slice::<Registry>(&text).ok().filter(Registry::is_sound);
        let host = known.as_ref().and_then(|it| it.host(&cluster.me.node, cluster.me.incarnation));
        let (Some(mut known), Some(host)) = (known, host) else {
            // (That is nonsense. Another one may make sense.)
            cluster.inbox.refused.extend(whom.map(|(life, _)| life));
            return None;
        };
        let standing = std::mem::replace(&mut cluster.standing, Standing::Inside);
        let Standing::Waiting { held, .. } = standing else { return None };
        known.bounds = self.bounds;
        cluster.host = host;
        (cluster.inbox.applied, cluster.inbox.base, cluster.delivered) = (view, place, place);
        let coherent = known.regions.iter().filter(|(_, region)| region.coherent);
        let coherent: Vec<_> = coherent.map(|(id, region)| (*id, region.bytes)).collect();
        let sets: Vec<_> = known.sets.iter().map(|(id, set)| (*id, set.count)).collect();
        for (id, set) in &known.sets {
            known.changed.extend(set.held.keys().map(|lock| (*id, *lock)));
        }
        self.registry = known;
        for (id, bytes) in coherent {
            let made = self.make(bytes);
            let cluster = self.cluster.as_mut()?;
            match made {
                Ok(memory) => {
                    self.memories.insert(id, memory);
                    cluster.inbox.filling.insert(id, Filling::new(bytes));
                }
                Err(_) => cluster.say(0, &Act::Lacks { id }, &self.registry),
            }
        }
        for (id, count) in sets {
            if let Ok(words) = self.make_words(count) {
                self.words.insert(id, words);
            }
        }
        self.tell_holders();
        let cluster = self.cluster.as_mut()?;
        cluster.say(0, &Act::Inside, &self.registry);
        for output in held {
            match output {
                Output::Deliver { sequence, origin, number, payload } if sequence > place => {
                    self.deliver(sequence, &origin, number, &payload);
                }
                Output::View { view: next, joined, left, .. } if next.number > view => {
                    self.apply_view(&next, &joined, &left);
                }
                _ => {}
            }
        }
        Some(())
    }

    /// What lies in a region from there on, of what was ever written, up to there.
    fn tell_range(&mut self, to: &Life, id: u32, from: u64, end: u64) -> Option<()> {
        let is_filled = self.is_filled(id);
        let cluster = self.cluster.as_mut()?;
        let memory = self.memories.get(&id).filter(|memory| memory.has_common());
        let known = self.registry.regions.get(&id).zip(memory);
        let Some((region, memory)) = known.filter(|_| is_filled) else {
            cluster.inbox.send(to, REFUSED, &[u64::from(id)], &[]);
            return None;
        };
        cluster.inbox.gave = Some(cluster.began.elapsed());
        let (whole, mut asked) = (region.bytes, from);
        for _ in 0..RANGE_BYTES / PIECE_BYTES as u64 {
            if asked >= end.min(whole) {
                break;
            }
            let at = memory.next_common(asked).unwrap_or(whole).clamp(asked, whole);
            let next = whole.min((at + 1).next_multiple_of(PIECE_BYTES as u64));
            let bytes = memory.copy_common(at as usize, (next - at) as usize)?;
            let head = [u64::from(id), asked, at, next, cluster.delivered];
            cluster.inbox.send(to, PIECE, &head, &bytes);
            asked = next;
        }
        Some(())
    }

    #[allow(clippy::too_many_arguments)]
    fn fill(
        &mut self,
        from: &Life,
        id: u32,
        asked: u64,
        at: u64,
        next: u64,
        place: u64,
        bytes: &[u8],
    ) -> Option<()> {
        let cluster = self.cluster.as_mut()?;
        let now = cluster.now();
        let filling = cluster.inbox.filling.get_mut(&id)?;
        let end = filling.bytes;
        let is_it = asked == filling.next && at >= asked && next > asked && next <= end;
        let is_whole = at <= end && bytes.len() as u64 == next - at.min(next);
        // (One that knew less than we did at the start has not all that we lack.)
        // (And none is so far ahead of what has been delivered here.)
        let is_place = place >= cluster.inbox.base && place <= cluster.delivered + AHEAD_MOST;
        if !is_it || !is_whole || !is_place {
            return None;
        }
        cluster.inbox.came_bytes += next - asked;
        if let Some((_, when)) = &mut cluster.inbox.asked {
            *when = now;
        }
        let memory = self.memories.get_mut(&id)?;
        let part = |(from, to): (usize, usize)| &bytes[from - at as usize..to - at as usize];
        for (from, to) in filling.touched.untouched(at as usize, bytes.len()) {
            memory.put(from as u64, part((from, to)), end);
        }
        if let Some(touched) = &filling.apart {
            for (from, to) in touched.untouched(at as usize, bytes.len()) {
                memory.put_apart(from as u64, part((from, to)));
            }
        }
        filling.next = next;
        filling.asked = filling.asked.max(next);
        let known = filling.known.entry(from.clone()).or_default();
        *known = place.max(*known);
        Some(())
    }

    /// Those whose regions are whole can receive them, and all hosts know that they are.
    fn filled(&mut self) {
        let Some(cluster) = &mut self.cluster else { return };
        if cluster.inbox.filling.is_empty() {
            return;
        }
        let (regions, delivered, mut done) = (&self.registry.regions, cluster.delivered, vec![]);
        cluster.inbox.filling.retain(|id, filling| {
            filling.is_delivered = filling.known.values().all(|known| delivered >= *known);
            if filling.is_done() {
                done.push(*id);
            }
            regions.contains_key(id) && !filling.is_done()
        });
        for id in &done {
            // (Who can't give it has said so.)
            if self.memories.get(id).is_some_and(Memory::has_common) {
                cluster.say(0, &Act::Filled { id: *id }, &self.registry);
            }
        }
        let filling = &cluster.inbox.filling;
        cluster.inbox.wanted = cluster.inbox.wanted.filter(|id| filling.contains_key(id));
        if !done.is_empty() {
            ring(&self.page.1);
        }
    }

    /// It is detached: other regions are as urgent.
    pub(super) fn want_no_more(&mut self, id: u32) {
        if let Some(cluster) = &mut self.cluster {
            cluster.inbox.wanted = cluster.inbox.wanted.filter(|wanted| *wanted != id);
        }
    }

    /// Of a region that was attached and is not whole yet: how much has come here of all that is on its way.
    pub(super) fn wait_for(&mut self, id: u32) -> Answer {
        let inbox = self.cluster.as_mut().map(|cluster| &mut cluster.inbox);
        let came = inbox.map(|inbox| {
            inbox.wanted = Some(id);
            inbox.came_bytes
        });
        Answer::Filling { came: came.unwrap_or_default() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Options;
    use super::super::cluster::tests::alone;
    use super::*;
    use crate::registry::{Bounds, Member};

    /// Whoever tells nonsense is asked no more; with what the next one tells this host goes on.
    #[test]
    fn nonsense_of_one_keeper_keeps_nobody_out() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let options = Options { path: Some(&path), ..Options::default() };
        let (mut keeper, _) = Keeper::new(&options, Some(alone())).unwrap();
        let mut known = Registry::new(Bounds::default());
        known.enter("here", 1, true);
        let member = known.join(Member { host: 1, pid: 1, uid: 0, groups: vec![0] });
        known.bounds.made_most = 9;
        known.locks(member, 1, 2, 0o600, true).unwrap();
        let sound = serde_json::to_string(&known).unwrap();
        let (held, there) = (r#""held":{"0":"#, r#""held":{"4000000000":"#);
        assert!(sound.contains(held));
        let told = [
            "nonsense".to_owned(),
            sound.replace(held, there),
            sound.replace(r#""count":2"#, r#""count":4000000000"#),
            sound.replace(r#"["here",1]"#, r#"["here",2]"#),
            sound,
        ];
        let standing = Standing::Waiting { since: 1, held: VecDeque::new(), bytes: 0 };
        keeper.cluster.as_mut().unwrap().standing = standing;
        for (nth, text) in told.iter().enumerate() {
            let is_last = nth + 1 == told.len();
            let life = Life { node: format!("other-{nth}"), incarnation: 1 };
            let asked = Some((life.clone(), Duration::ZERO));
            keeper.cluster.as_mut().unwrap().inbox.asked = asked;
            keeper.learn(1, nth as u64 + 1, 0, 1, text.as_bytes());
            let Cluster { standing, inbox, .. } = keeper.cluster.as_ref().unwrap();
            assert_eq!(inbox.refused.contains(&life), !is_last, "{text}");
            assert_eq!(matches!(standing, Standing::Inside), is_last, "{text}");
        }
        assert_eq!(keeper.words.len(), 1);
    }

    /// Of one region whoever has it does not give it, or has gone, or tells nonsense: others are asked for meanwhile.
    #[test]
    fn a_region_that_cannot_be_had_holds_up_no_other() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let options = Options { path: Some(&path), ..Options::default() };
        let (mut keeper, _) = Keeper::new(&options, Some(alone())).unwrap();
        let bounds = Bounds {
            limits: crate::keeper::Limits { all: 1 << 30, received: 0 },
            made_most: 9,
            is_shared: false,
        };
        let life = |node: &str| Life { node: node.into(), incarnation: 1 };
        let (me, lives) = (life("here"), ["one", "other"].map(life));
        let mut known = Registry::new(bounds);
        let hosts = ["one", "other"].map(|name| known.enter(name, 1, true));
        let member = known.join(Member { host: hosts[0], pid: 1, uid: 0, groups: vec![0] });
        let how = crate::registry::Permission::default();
        let ids = [0, 1].map(|key| known.allocate(member, key, 4096, &how).unwrap().0);
        for (id, host) in ids.iter().zip(hosts) {
            known.regions.get_mut(id).unwrap().holders = BTreeSet::from([host]);
            keeper.memories.insert(*id, Memory::make(4096, true).unwrap());
        }
        keeper.registry = known;
        let cluster = keeper.cluster.as_mut().unwrap();
        cluster.standing = Standing::Inside;
        let members = [me, lives[0].clone(), lives[1].clone()].to_vec();
        let view = View { number: 1, members };
        cluster.view = Some(view.clone());
        cluster.inbox.filling = ids.map(|id| (id, Filling::new(4096))).into();
        cluster.inbox.wanted = Some(ids[0]);
        let whom = |keeper: &mut Keeper| {
            let cluster = keeper.cluster.as_mut().unwrap();
            cluster.ask(&keeper.registry).unwrap();
            cluster.inbox.asked.clone().map(|(life, _)| life)
        };
        assert_eq!(whom(&mut keeper).as_ref(), Some(&lives[0]), "what a program waits for");
        // It is silent.
        let silent = |keeper: &mut Keeper| {
            let inbox = &mut keeper.cluster.as_mut().unwrap().inbox;
            inbox.asked.as_mut().unwrap().1 = Duration::ZERO;
            while keeper.cluster.as_ref().unwrap().now() < PATIENCE {
                std::thread::yield_now();
            }
        };
        silent(&mut keeper);
        assert_eq!(whom(&mut keeper).as_ref(), Some(&lives[1]));
        silent(&mut keeper);
        assert_eq!(whom(&mut keeper).as_ref(), Some(&lives[0]), "it has its turn again");
        // It refuses.
        keeper.hear(&lives[0], REFUSED, &u64::from(ids[0]).to_le_bytes());
        assert_eq!(whom(&mut keeper).as_ref(), Some(&lives[1]));
        let piece = |place: u64| {
            let head = [u64::from(ids[1]), 0, 0, 4096, place].map(u64::to_le_bytes);
            [head.as_flattened(), &[7; 4096]].concat()
        };
        keeper.hear(&lives[1], PIECE, &piece(u64::MAX));
        let progress = |keeper: &Keeper| {
            keeper.cluster.as_ref().unwrap().inbox.filling.get(&ids[1]).map(Filling::progress)
        };
        assert_eq!(progress(&keeper), Some(0), "no order is so long");
        keeper.hear(&lives[1], PIECE, &piece(5));
        keeper.filled();
        assert_eq!(progress(&keeper), Some(4096), "its place is to be delivered yet");
        // It goes: nobody is left who could be asked for anything, and nothing is kept for it.
        let inbox = &mut keeper.cluster.as_mut().unwrap().inbox;
        lives.iter().for_each(|life| inbox.down(life));
        assert_eq!(whom(&mut keeper), None);
        let inbox = &mut keeper.cluster.as_mut().unwrap().inbox;
        assert!(inbox.sending.is_empty());
        let left = View { number: 2, members: view.members[..2].to_vec() };
        inbox.keep_members(&left);
        keeper.filled();
        assert_eq!(progress(&keeper), None, "what it knew is no more");
        // There is a way to the first one again.
        keeper.cluster.as_mut().unwrap().inbox.up(&lives[0]);
        assert_eq!(whom(&mut keeper).as_ref(), Some(&lives[0]));
        keeper.cluster.as_mut().unwrap().inbox.wanted = Some(ids[0]);
        keeper.want_no_more(ids[0]);
        assert_eq!(keeper.cluster.as_ref().unwrap().inbox.wanted, None);
    }

    /// Who sends without end is heard no more often than others, and crowds out nobody.
    #[test]
    fn a_flood_of_one_crowds_out_no_other() {
        let [floods, asks, tells] =
            ["floods", "asks", "tells"].map(|node| Life { node: node.into(), incarnation: 1 });
        let mut inbox = Inbox { asked: Some((tells.clone(), Duration::ZERO)), ..Inbox::default() };
        (0..4 * FRAMES_MOST).for_each(|_| inbox.put(&floods, &[KEEPERS, ASK_STATE]));
        inbox.put(&asks, &[KEEPERS, ASK_STATE]);
        (0..FRAMES_MOST).for_each(|_| inbox.put(&tells, &[KEEPERS, STATE]));
        let first = inbox.next();
        assert_eq!(
            first.iter().map(|(from, _)| from).collect::<Vec<_>>(),
            [&asks, &floods, &tells]
        );
        let mut of = BTreeMap::new();
        for (from, _) in first.into_iter().chain((0..FRAMES_MOST).flat_map(|_| inbox.next())) {
            *of.entry(from).or_insert(0) += 1;
        }
        assert_eq!(of, BTreeMap::from([(asks, 1), (floods, ASKS_MOST), (tells, FRAMES_MOST)]));
    }

    /// Who told half of it has died: another one tells less, as of the same place.
    #[test]
    fn what_two_tell_of_the_registry_is_not_mixed() {
        let mut parts = Parts::default();
        assert_eq!(parts.add((1, 7, 3), 0, b"abc"), None);
        assert_eq!(parts.add((1, 7, 3), 1, b"def"), None);
        assert_eq!(parts.add((2, 7, 2), 0, b"xy"), None);
        assert_eq!(parts.add((2, 7, 2), 1, b"z"), Some(b"xyz".to_vec()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]
        #[test]
        fn what_was_touched_is_known_by_the_byte(
            touches in prop::collection::vec((0..1000usize, 0..200usize), 0..20),
            (at, bytes) in (0..1000usize, 0..300usize),
        ) {
            let (mut filling, mut plain) = (Filling::new(1300), vec![false; 1300]);
            for (at, bytes) in touches {
                filling.touch(at, bytes);
                plain[at..at + bytes].fill(true);
            }
            let mut free = vec![false; 1300];
            for (from, to) in filling.touched.untouched(at, bytes) {
                prop_assert!(from < to && !free[from..to].contains(&true));
                free[from..to].fill(true);
            }
            for (place, is_free) in free.iter().enumerate() {
                let is_asked = (at..at + bytes).contains(&place);
                prop_assert_eq!(*is_free, is_asked && !plain[place], "{}", place);
            }
        }
    }
}
