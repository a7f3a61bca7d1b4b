//! Between two nodes: a stream of frames in order, each once, and writes that a frame can need, over rails that may fail.
//!
//! **Giving a rail up.** A write that has failed may land later, when its memory is used again. So whoever finds that a rail does not work
//! withdraws what it has granted there, and says so with what has arrived until then (`Control::Left`). The other end does the same. Only what this
//! answer does not name is done again by another rail, for nothing of it can land by the old one any more; and its late notices are of an old
//! epoch. Messages are sent again at once, since one that comes twice is known by its number.
//!
//! **Trying it again.** Both ends grant everything anew for the next epoch (`Control::Try`), and send a probe over the rail. It is used again by
//! who knows that both probes have arrived. Who does not know it for long gives up the rail: a probe may have been lost without a word.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use crate::control::{Control, Granted};
use crate::error::Error;
use crate::frames::{Inbox, Outbox};
use crate::rail::{Grant, Peer, Rail, Refused, Region};
use crate::wire::{FIRST, FRAME_BYTES, HEADER_BYTES, Header, Kind, NUMBERS, Notice, Token, WINDOW};
use crate::writes::{Arrived, Memory, State, Write, Writes};

/// Memory that one node registers for one other.
pub const MEMORIES: usize = 4096;

/// Messages and writes after which an acknowledgement does not wait for a moment without any.
const OWED_MOST: usize = WINDOW / 4;
/// So many looks without any it waits for what can carry it.
const OWED_LOOKS: u32 = 64;

/// After so many calls of `try_again` a rail that is still being tried is given up, so that it is tried anew.
const TRIALS: u32 = 8;

/// What a transport tells its owner.
#[derive(Debug)]
pub enum Told<'a> {
    /// To be passed to `Node::control` of the other node, in order.
    Control(Control),
    Frame(&'a [u8]),
    /// Nothing is written to it any more, nor taken from it: it may be unmapped.
    Withdrawn(Memory),
    /// A rail works, where none did.
    Up,
    /// None does any more. What was given is kept until one does again, or the transport is closed.
    Down,
    /// By the other node's fault. All memory is withdrawn; there is nothing to be done but to close it.
    Ended(Error),
}

#[derive(thiserror::Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotTaken {
    #[error("no room now")]
    Full,
    #[error("no such memory (any more)")]
    Gone,
    #[error("beyond the memory")]
    Beyond,
    #[error("longer than a frame may be")]
    TooLong,
    #[error("the transport has ended")]
    Ended,
}

/// The other node's memory.
struct Theirs {
    bytes: u64,
    /// By rail, of the last epoch.
    grants: Vec<Option<Grant>>,
}

struct Ours {
    at: *mut u8,
    bytes: usize,
    /// By rail.
    regions: Vec<Option<Region>>,
    /// The other end writes nothing there.
    is_source: bool,
    /// The other end does not write to it any more.
    is_free: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Stage {
    /// Given up on both sides; or not begun.
    #[default]
    Down,
    /// The memory is granted, nothing is sent but a probe.
    Trying,
    Up,
    /// Given up by us.
    Left,
}

/// One rail, as this transport uses it.
#[derive(Default)]
struct Way {
    stage: Stage,
    epoch: u16,
    peer: Option<Peer>,
    /// The rail has said that it does not work.
    failed: bool,
    /// While it is tried: they try too; their probe is still to be answered by ours; theirs has come; ours has.
    tried: bool,
    probe_due: bool,
    heard: bool,
    was_heard: bool,
    /// Calls of `try_again` meanwhile.
    trials: u32,
    /// Bytes of writes under way.
    load: u64,
}

impl Way {
    fn is_granted(&self) -> bool {
        matches!(self.stage, Stage::Trying | Stage::Up)
    }
}

pub(crate) type Rails = [Box<dyn Rail>];

pub struct Transport {
    number: u16,
    key: u32,
    /// What they gave us, and how many rails both have.
    theirs: Option<(u16, u32)>,
    rails: usize,
    ways: Vec<Way>,
    outbox: Outbox,
    inbox: Inbox,
    writes: Writes,
    arrived: Arrived,
    ours: BTreeMap<Memory, Ours>,
    others: BTreeMap<Memory, Theirs>,
    /// Numbers of memory before this one were given.
    next_ours: u32,
    next_others: u32,
    /// Memory of ours and of theirs that is being withdrawn.
    withdrawing: Vec<Memory>,
    closing: Vec<Memory>,
    controls: VecDeque<Control>,
    /// Messages and notices that are not acknowledged.
    owed: usize,
    /// What was last acknowledged: the messages, and the writes.
    acknowledged: [u32; 2],
    /// Looks since the last one came.
    quiet: u32,
    /// Something was given that was not yet tried to be sent.
    given: bool,
    was_up: bool,
    ended: Option<Error>,
    told_end: bool,
}

impl Transport {
    pub(crate) fn new(number: u16, key: u32, rails: usize) -> Transport {
        Transport {
            number,
            key,
            theirs: None,
            rails: 0,
            ways: (0..rails).map(|_| Way::default()).collect(),
            outbox: Outbox::new(),
            inbox: Inbox::new(),
            writes: Writes::new(),
            arrived: Arrived::new(),
            ours: BTreeMap::new(),
            others: BTreeMap::new(),
            next_ours: 0,
            next_others: 0,
            withdrawing: Vec::new(),
            closing: Vec::new(),
            controls: [Control::Hello { number, key, rails }].into(),
            owed: 0,
            acknowledged: [FIRST; 2],
            quiet: 0,
            given: false,
            was_up: false,
            ended: None,
            told_end: false,
        }
    }

    /// To be delivered behind all frames before it; if it `needs_writes`, also behind all writes that were given before it.
    pub fn frame(&mut self, bytes: &[u8], needs_writes: bool) -> Result<(), NotTaken> {
        match () {
            _ if self.ended.is_some() => return Err(NotTaken::Ended),
            _ if bytes.len() > FRAME_BYTES => return Err(NotTaken::TooLong),
            _ => {}
        }
        let needs = needs_writes.then(|| self.writes.next());
        if !self.outbox.push(bytes, needs) {
            return Err(NotTaken::Full);
        }
        self.given = true;
        Ok(())
    }

    /// Writes from our memory to theirs. What is written stays unchanged until `written` has passed the number that this returns.
    pub fn write(&mut self, write: Write) -> Result<u32, NotTaken> {
        if self.ended.is_some() {
            return Err(NotTaken::Ended);
        }
        let ours = self.ours.get(&write.from).ok_or(NotTaken::Gone)?;
        if self.withdrawing.contains(&write.from) || self.closing.contains(&write.to) {
            return Err(NotTaken::Gone);
        }
        if write.at > ours.bytes || write.bytes > ours.bytes - write.at {
            return Err(NotTaken::Beyond);
        }
        match self.others.get(&write.to) {
            Some(theirs) if !theirs.holds(&write) => return Err(NotTaken::Beyond),
            Some(_) => {}
            None if write.to.0 < self.next_others => return Err(NotTaken::Gone),
            // Their frames may come before what they say of their memory.
            None => {}
        }
        let number = self.writes.next();
        if !self.writes.push(write) {
            return Err(NotTaken::Full);
        }
        self.given = true;
        Ok(number)
    }

    /// Is one more frame and write taken? What was `NotTaken::Full` is to be tried again then: something has been acknowledged.
    pub fn has_room(&self) -> bool {
        self.outbox.has_room() && self.writes.has_room()
    }

    /// The number of the first write that is not known to have arrived.
    pub fn written(&self) -> u32 {
        self.writes.first()
    }

    /// Asks the other end to write to it no more, which is told as `Told::Withdrawn`. Who can't wait for that closes the transport.
    pub fn withdraw(&mut self, memory: Memory) {
        if self.ours.contains_key(&memory) && !self.withdrawing.contains(&memory) {
            self.withdrawing.push(memory);
            self.controls.push_back(Control::Withdrawing { memory });
        }
    }

    /// Is nothing under way, either way?
    pub fn is_idle(&self) -> bool {
        self.outbox.is_empty() && self.writes.is_empty() && !self.has_work()
    }

    /// Does this rail carry?
    pub fn is_up(&self, rail: usize) -> bool {
        self.ways.get(rail).is_some_and(|way| way.stage == Stage::Up)
    }

    /// The oldest message and the oldest write that are not acknowledged: by which rail they went, and their numbers. If one stays the same for
    /// long, its rail carries nothing and does not say so. (A message may also wait for writes that its frames need.)
    pub fn oldest(&self) -> [Option<(usize, u32)>; 2] {
        [self.outbox.oldest(), self.writes.oldest()]
    }

    /// Memory that is taken by what is under way, either way. It has a bound.
    pub fn kept_bytes(&self) -> usize {
        let controls = self.controls.capacity() * size_of::<Control>();
        self.outbox.kept_bytes() + self.inbox.kept_bytes() + self.writes.kept_bytes() + controls
    }

    /// Is there something to be done before anything comes, at once or, if all of it is an acknowledgement, before long?
    fn has_work(&self) -> bool {
        self.owes() || self.has_work_now()
    }

    pub(crate) fn has_work_now(&self) -> bool {
        if self.ended.is_some() {
            return !self.told_end || !self.controls.is_empty();
        }
        self.given
            || !self.controls.is_empty()
            || self.ways.iter().any(|way| way.failed || way.probe_due)
    }

    /// An acknowledgement, for which it waits whether anything goes that can carry it.
    pub(crate) fn owes(&self) -> bool {
        self.owed > 0 && self.ended.is_none()
    }

    pub(crate) fn acknowledge(&mut self) {
        self.quiet = OWED_LOOKS;
    }

    /// This rail is to be given up: it has said that it failed, or whoever watches it believes so.
    pub(crate) fn note_failure(&mut self, rail: usize, epoch: Option<u16>) {
        if let Some(way) = self.ways.get_mut(rail)
            && way.is_granted()
            && epoch.is_none_or(|epoch| epoch == way.epoch)
        {
            way.failed = true;
        }
    }

    /// A message that has come by this rail.
    pub(crate) fn take_message(
        &mut self,
        rail: usize,
        header: Header,
        message: &[u8],
        tell: &mut dyn FnMut(Told<'_>),
    ) {
        let way = &mut self.ways[rail];
        // Another's, or one that comes late: what counts of it is sent again elsewhere.
        if self.ended.is_some()
            || header.key != self.key
            || header.epoch != way.epoch
            || !way.is_granted()
        {
            return;
        }
        let result = match header.kind {
            None => Err(Error::Kind),
            Some(Kind::Probe) => {
                if way.stage == Stage::Trying && !way.heard {
                    way.heard = true;
                    self.controls.push_back(Control::Heard { rail, epoch: header.epoch });
                    self.begin_use(rail);
                }
                Ok(())
            }
            Some(Kind::Acknowledgement) => self.take_acknowledgement(&header),
            Some(Kind::Frames) => {
                (self.owed, self.quiet) = (self.owed + 1, 0);
                self.take_acknowledgement(&header).and_then(|()| {
                    let Transport { inbox, arrived, .. } = self;
                    let deliver = &mut |frame: &[u8]| tell(Told::Frame(frame));
                    inbox.take(header.sequence, &message[HEADER_BYTES..], arrived, deliver)
                })
            }
        };
        self.given |= self.lags();
        self.end_unless(result);
    }

    /// A write has arrived by this rail.
    pub(crate) fn take_notice(
        &mut self,
        rail: usize,
        notice: Notice,
        tell: &mut dyn FnMut(Told<'_>),
    ) {
        let way = &self.ways[rail];
        if self.ended.is_some() || Notice::epoch_of(way.epoch) != notice.epoch || !way.is_granted()
        {
            return;
        }
        (self.owed, self.quiet) = (self.owed + 1, 0);
        let before = self.arrived.next();
        let mut result = self.arrived.note(notice.write);
        if result.is_ok() && self.arrived.next() != before {
            let Transport { inbox, arrived, .. } = self;
            result = inbox.advance(arrived, &mut |frame: &[u8]| tell(Told::Frame(frame)));
        }
        self.given |= self.lags();
        self.end_unless(result);
    }

    fn take_acknowledgement(&mut self, header: &Header) -> Result<(), Error> {
        self.outbox.acknowledge(header.acknowledged)?;
        self.take_written(header.arrived)
    }

    fn take_written(&mut self, number: u32) -> Result<(), Error> {
        let Transport { writes, ways, .. } = self;
        // What waits for that may be let go.
        self.given |= !self.closing.is_empty() || !self.withdrawing.is_empty();
        writes.acknowledge(number, |write, state| {
            if let State::Under(way) = state {
                ways[way].load = ways[way].load.saturating_sub(write.bytes as u64);
            }
        })
    }

    fn end_unless(&mut self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.ended.get_or_insert(error);
        }
    }

    /// Makes memory known to the other node; of a source only its number, since nothing is granted of it.
    ///
    /// # Safety
    /// As `Rail::register`, until it is told as withdrawn, or the transport has ended or is closed.
    pub(crate) unsafe fn register(
        &mut self,
        rails: &mut Rails,
        at: *mut u8,
        bytes: usize,
        is_source: bool,
    ) -> io::Result<Memory> {
        let memory = Memory(self.next_ours);
        if self.ended.is_some() || self.ours.len() == MEMORIES || memory.0 == u32::MAX {
            let what = "the transport has ended, or takes no more memory";
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        let regions = vec![None; self.ways.len()];
        let mut ours = Ours { at, bytes, regions, is_source, is_free: false };
        let (mut granted, mut refused, mut any) = (Vec::new(), Vec::new(), false);
        for (rail, _) in self.ways.iter().enumerate().filter(|(_, way)| way.is_granted()) {
            match ours.register(rails, rail) {
                Ok(grant) => {
                    any = true;
                    granted.extend(grant.map(|grant| (rail, Granted::new(memory, grant))));
                }
                Err(error) => refused.push((rail, error)),
            }
        }
        // A rail that does not take what another takes is given up: one that is in use takes all.
        for (rail, error) in refused {
            if !any {
                return Err(error);
            }
            self.ways[rail].failed = true;
        }
        self.next_ours += 1;
        self.ours.insert(memory, ours);
        self.controls.push_back(Control::Registered {
            memory,
            bytes: if is_source { 0 } else { bytes as u64 },
            rails: granted,
        });
        Ok(memory)
    }

    /// Withdraws all memory.
    pub(crate) fn withdraw_all(&mut self, rails: &mut Rails) {
        self.ours.values_mut().for_each(|ours| ours.withdraw_all(rails));
        self.ours.clear();
        for (rail, way) in self.ways.iter_mut().enumerate() {
            way.stage = Stage::Down;
            if let Some(peer) = way.peer.take() {
                rails[rail].forget(peer);
            }
        }
    }

    /// Tries the rails that are given up; and gives up those of which nothing has been heard since they were tried.
    pub(crate) fn try_again(&mut self, rails: &mut Rails) {
        for rail in 0..self.rails {
            let way = &mut self.ways[rail];
            match way.stage {
                _ if self.ended.is_some() => {}
                // If it can't be granted there, it stays as it is.
                Stage::Down => drop(self.grant(rails, rail)),
                Stage::Trying => {
                    way.trials += 1;
                    way.failed |= way.trials > TRIALS;
                }
                Stage::Up | Stage::Left => {}
            }
        }
    }

    /// Begins the next epoch of a rail.
    fn grant(&mut self, rails: &mut Rails, rail: usize) -> io::Result<()> {
        let mut grants = Vec::new();
        let mut result = Ok(());
        for (memory, ours) in &mut self.ours {
            match ours.register(rails, rail) {
                Ok(grant) => grants.extend(grant.map(|grant| Granted::new(*memory, grant))),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if result.is_err() {
            self.ours.values_mut().for_each(|ours| ours.withdraw(rails, rail));
            return result;
        }
        let way = &mut self.ways[rail];
        let (epoch, peer) = (way.epoch.wrapping_add(1), way.peer.take());
        *way = Way { stage: Stage::Trying, epoch, peer, ..Way::default() };
        let name = rails[rail].name().to_vec();
        self.controls.push_back(Control::Try { rail, epoch, name, grants });
        Ok(())
    }

    /// Makes the other end's endpoint a peer: anew, so that a rail forgets with the old one what has failed.
    fn reach(&mut self, rails: &mut Rails, rail: usize, name: &[u8]) -> io::Result<()> {
        let way = &mut self.ways[rail];
        if let Some(peer) = way.peer.take() {
            rails[rail].forget(peer);
        }
        way.peer = Some(rails[rail].reach(name)?);
        Ok(())
    }

    /// Both ends have heard each other?
    fn begin_use(&mut self, rail: usize) {
        let way = &mut self.ways[rail];
        if way.stage == Stage::Trying && way.heard && way.was_heard {
            way.stage = Stage::Up;
            self.given = true;
        }
    }

    /// Leaves a rail that is granted.
    fn give_up(&mut self, rails: &mut Rails, rail: usize) {
        let way = &mut self.ways[rail];
        (way.stage, way.failed, way.probe_due) = (Stage::Left, false, false);
        let epoch = way.epoch;
        self.ours.values_mut().for_each(|ours| ours.withdraw(rails, rail));
        self.outbox.leave(rail);
        // An acknowledgement may have been lost with it.
        (self.owed, self.quiet, self.given) = (self.owed + 1, OWED_LOOKS, true);
        let receipt = self.arrived.receipt();
        self.controls.push_back(Control::Left { rail, epoch, receipt });
    }

    /// The endpoint is to be replaced: nothing of it is used any more.
    pub(crate) fn leave_endpoint(&mut self, rails: &mut Rails, rail: usize) {
        if self.ways[rail].is_granted() {
            self.give_up(rails, rail);
        }
        if let Some(peer) = self.ways[rail].peer.take() {
            rails[rail].forget(peer);
        }
    }

    /// What the other end has said, by the connection that carries `Told::Control`.
    pub(crate) fn control(&mut self, rails: &mut Rails, control: Control) {
        if self.ended.is_none() {
            let result = self.take_control(rails, control);
            self.end_unless(result);
        }
    }

    fn take_control(&mut self, rails: &mut Rails, control: Control) -> Result<(), Error> {
        if self.theirs.is_some() == matches!(control, Control::Hello { .. }) {
            return Err(Error::Hello);
        }
        let way = |rail: usize, what| match self.ways.get(rail) {
            Some(way) if rail < self.rails => Ok((way.stage, way.epoch)),
            _ => Err(Error::Rail(rail, what)),
        };
        match control {
            Control::Hello { number, .. } if usize::from(number) >= NUMBERS => {
                return Err(Error::Hello);
            }
            Control::Hello { number, key, rails: count } => {
                self.theirs = Some((number, key));
                self.rails = count.min(self.ways.len());
                self.try_again(rails);
            }
            Control::Try { rail, epoch, name, grants } => {
                const TRIED: &str = "tried";
                let (stage, ours) = way(rail, TRIED)?;
                let next = if stage == Stage::Down { ours.wrapping_add(1) } else { ours };
                if epoch != next || stage != Stage::Down && self.ways[rail].tried {
                    return Err(Error::Rail(rail, TRIED));
                }
                let mut works = true;
                if stage == Stage::Down && self.grant(rails, rail).is_err() {
                    // It is begun, and given up at once.
                    self.ways[rail].epoch = epoch;
                    works = false;
                }
                self.ways[rail].tried = true;
                for granted in grants {
                    // What it has withdrawn meanwhile is not known any more.
                    if let Some(theirs) = self.others.get_mut(&granted.memory) {
                        theirs.grants[rail] = Some(granted.grant());
                    }
                }
                if stage != Stage::Left {
                    works = works && self.reach(rails, rail, &name).is_ok();
                    if works {
                        self.ways[rail].probe_due = true;
                    } else {
                        self.give_up(rails, rail);
                    }
                }
            }
            Control::Heard { rail, epoch } => {
                const HEARD: &str = "heard";
                let (stage, ours) = way(rail, HEARD)?;
                let is_expected = matches!(stage, Stage::Trying | Stage::Left);
                if epoch != ours || !is_expected || self.ways[rail].was_heard {
                    return Err(Error::Rail(rail, HEARD));
                }
                self.ways[rail].was_heard = true;
                self.begin_use(rail);
            }
            Control::Left { rail, epoch, receipt } => {
                const LEFT: &str = "left";
                let (stage, ours) = way(rail, LEFT)?;
                if epoch != ours || stage == Stage::Down {
                    return Err(Error::Rail(rail, LEFT));
                }
                if stage != Stage::Left {
                    self.give_up(rails, rail);
                }
                self.take_written(receipt.arrived)?;
                self.writes.leave(rail, &receipt)?;
                self.ways[rail].stage = Stage::Down;
                self.given = true;
            }
            Control::Registered { memory, bytes, rails } => {
                if memory.0 != self.next_others || self.others.len() == MEMORIES {
                    return Err(Error::Memory(memory.0, "registered in disorder, or too much"));
                }
                self.next_others =
                    memory.0.checked_add(1).ok_or(Error::Memory(memory.0, "the last"))?;
                let mut theirs = Theirs { bytes, grants: vec![None; self.ways.len()] };
                for (rail, granted) in rails {
                    way(rail, "granted")?;
                    theirs.grants[rail] = Some(granted.grant());
                }
                if self.writes.any(|write| write.to == memory && !theirs.holds(write)) {
                    return Err(Error::Memory(memory.0, "smaller than was said"));
                }
                self.others.insert(memory, theirs);
                self.given = true;
            }
            Control::Withdrawing { memory } => {
                if !self.others.contains_key(&memory) || self.closing.contains(&memory) {
                    return Err(Error::Memory(memory.0, "withdrawn, and not there"));
                }
                self.closing.push(memory);
                self.given = true;
            }
            Control::Free { memory } => match self.ours.get_mut(&memory) {
                Some(ours) if self.withdrawing.contains(&memory) && !ours.is_free => {
                    ours.is_free = true;
                    self.given = true;
                }
                _ => return Err(Error::Memory(memory.0, "left, and was not withdrawn")),
            },
        }
        Ok(())
    }

    /// Does what is to be done. True if there was something.
    pub(crate) fn work(&mut self, rails: &mut Rails, tell: &mut dyn FnMut(Told<'_>)) -> bool {
        // (A rail that was full may have room.)
        let unsent = self.outbox.unsent().is_some() || self.writes.unsent().is_some();
        if !unsent && !self.has_work() {
            return false;
        }
        let busy = self.has_work_now();
        self.given = false;
        if self.ended.is_none() {
            for rail in 0..self.ways.len() {
                if std::mem::take(&mut self.ways[rail].failed) && self.ways[rail].is_granted() {
                    self.give_up(rails, rail);
                }
                if self.ways[rail].probe_due && self.send(rails, rail, Kind::Probe) {
                    self.ways[rail].probe_due = false;
                }
            }
            self.send_writes(rails);
            self.send_messages(rails);
            self.quiet = self.quiet.saturating_add(1);
            if self.owed > OWED_MOST || self.lags() || self.owed > 0 && self.quiet > OWED_LOOKS {
                let up = (0..self.ways.len()).find(|rail| self.is_up(*rail));
                // With no rail up it is not needed: whatever is not acknowledged then comes again, or was told by `Control::Left`.
                if up.is_none_or(|rail| self.send(rails, rail, Kind::Acknowledgement)) {
                    self.has_acknowledged();
                }
            }
            self.let_go(rails, tell);
        }
        while let Some(control) = self.controls.pop_front() {
            tell(Told::Control(control));
        }
        let is_up = self.ended.is_none() && self.ways.iter().any(|way| way.stage == Stage::Up);
        if is_up != std::mem::replace(&mut self.was_up, is_up) {
            tell(if is_up { Told::Up } else { Told::Down });
        }
        if let Some(error) = self.ended.clone()
            && !std::mem::replace(&mut self.told_end, true)
        {
            self.withdraw_all(rails);
            (self.owed, self.given) = (0, false);
            tell(Told::Ended(error));
        }
        busy
    }

    fn has_acknowledged(&mut self) {
        self.owed = 0;
        self.acknowledged = [self.inbox.next(), self.arrived.next()];
    }

    /// Could so much be acknowledged by now that the other end's window may be full? What came out of order is so at once.
    fn lags(&self) -> bool {
        let [messages, writes] = self.acknowledged;
        let (messages, writes) =
            (self.inbox.next().wrapping_sub(messages), self.arrived.next().wrapping_sub(writes));
        messages.max(writes) as usize > OWED_MOST
    }

    fn header(&self, rail: usize, kind: Kind, sequence: u32) -> Option<Header> {
        let (number, key) = self.theirs?;
        Some(Header {
            number,
            key,
            kind: Some(kind),
            epoch: self.ways[rail].epoch,
            sequence,
            acknowledged: self.inbox.next(),
            arrived: self.arrived.next(),
        })
    }

    fn token(&self, rail: usize) -> u64 {
        Token { number: self.number, epoch: self.ways[rail].epoch }.pack()
    }

    /// A message without frames. False: there was no room.
    fn send(&mut self, rails: &mut Rails, rail: usize, kind: Kind) -> bool {
        let (Some(header), Some(peer)) = (self.header(rail, kind, 0), self.ways[rail].peer) else {
            return true;
        };
        let mut message = [0; HEADER_BYTES];
        header.write(&mut message);
        match rails[rail].send(peer, &message, self.token(rail)) {
            Ok(()) => true,
            Err(Refused::Full) => false,
            Err(Refused::Failed(_)) => {
                self.give_up(rails, rail);
                true
            }
        }
    }

    fn send_messages(&mut self, rails: &mut Rails) {
        let mut rail = 0;
        while rail < self.ways.len() {
            let (header, token) = (self.header(rail, Kind::Frames, 0), self.token(rail));
            let (Stage::Up, Some(header), Some(peer)) =
                (self.ways[rail].stage, header, self.ways[rail].peer)
            else {
                rail += 1;
                continue;
            };
            let Some((sequence, message)) = self.outbox.unsent() else { return };
            Header { sequence, ..header }.write(&mut message.bytes);
            match rails[rail].send(peer, &message.bytes, token) {
                Ok(()) => {
                    message.go(rail);
                    self.has_acknowledged();
                }
                Err(Refused::Full) => rail += 1,
                Err(Refused::Failed(_)) => self.give_up(rails, rail),
            }
        }
    }

    /// Gives what is to be written to the rails: each write to that of those which know its memory that has least to do.
    fn send_writes(&mut self, rails: &mut Rails) {
        if self.writes.unsent().is_none() {
            return;
        }
        // Rails that take no more now.
        let mut full = vec![false; self.ways.len()];
        while let Some((number, write, state)) = self.writes.unsent() {
            let (Some((theirs, _)), Some(from), Some(to)) =
                (self.theirs, self.ours.get(&write.from), self.others.get(&write.to))
            else {
                return;
            };
            let choice = self.ways.iter().enumerate().filter(|(rail, way)| {
                let is_known = to.grants[*rail].is_some() && from.regions[*rail].is_some();
                way.stage == Stage::Up && is_known && !full[*rail]
            });
            let Some((rail, way)) = choice.min_by_key(|(_, way)| way.load) else { return };
            let (Some(grant), Some(region), Some(peer)) =
                (to.grants[rail], from.regions[rail], way.peer)
            else {
                return;
            };
            let notice = Notice::new(theirs, way.epoch, number).pack();
            let token = Token { number: self.number, epoch: way.epoch }.pack();
            let Write { at, bytes, offset, .. } = write;
            match rails[rail].write(peer, region, at, bytes, grant, offset, notice, token) {
                Ok(()) => {
                    *state = State::Under(rail);
                    self.ways[rail].load += bytes as u64;
                }
                Err(Refused::Full) => full[rail] = true,
                Err(Refused::Failed(_)) => self.give_up(rails, rail),
            }
        }
    }

    /// Memory of theirs to which nothing is written any more; and of ours.
    fn let_go(&mut self, rails: &mut Rails, tell: &mut dyn FnMut(Told<'_>)) {
        let Transport { writes, closing, controls, others, withdrawing, ours, .. } = self;
        closing.retain(|memory| {
            let is_used = writes.any(|write| write.to == *memory);
            if !is_used {
                others.remove(memory);
                controls.push_back(Control::Free { memory: *memory });
            }
            is_used
        });
        withdrawing.retain(|memory| {
            let Some(left) = ours.get_mut(memory) else { return false };
            let is_used = !left.is_free || writes.any(|write| write.from == *memory);
            if !is_used {
                left.withdraw_all(rails);
                ours.remove(memory);
                tell(Told::Withdrawn(*memory));
            }
            is_used
        });
    }
}

impl Theirs {
    fn holds(&self, write: &Write) -> bool {
        let end = write.offset.checked_add(write.bytes as u64);
        end.is_some_and(|end| end <= self.bytes)
    }
}

impl Ours {
    /// What is granted by that, if anything.
    fn register(&mut self, rails: &mut Rails, rail: usize) -> io::Result<Option<Grant>> {
        let rail_of = &mut rails[rail];
        // SAFETY: it stays mapped until it is withdrawn everywhere (`Transport::register`).
        let (region, grant) = unsafe {
            match self.is_source {
                true => (rail_of.register_source(self.at, self.bytes)?, None),
                false => rail_of.register(self.at, self.bytes).map(|(at, it)| (at, Some(it)))?,
            }
        };
        self.regions[rail] = Some(region);
        Ok(grant)
    }

    fn withdraw(&mut self, rails: &mut Rails, rail: usize) {
        if let Some(region) = self.regions[rail].take() {
            rails[rail].withdraw(region);
        }
    }

    fn withdraw_all(&mut self, rails: &mut Rails) {
        (0..self.regions.len()).for_each(|rail| self.withdraw(rails, rail));
    }
}
