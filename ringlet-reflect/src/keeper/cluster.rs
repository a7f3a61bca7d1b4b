//! A keeper as one of a cluster's: what its programs write and ask goes into one order for all hosts, and what comes out of that changes the registry, and
//! the memory that programs receive, on all hosts alike.
//!
//! ```text
//!   program ── log ──> batch ── submit ──> Order ──> other hosts
//!      │                 ^                   │
//!      └──── asks ── act ┘        Deliver <──┘ ──> registry, memory, locks ──> answers, wake-ups
//! ```
//!
//! A payload is a batch of items, each an act or a write. An act is answered when it is delivered, with what the registry says then.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ringlet_core::sync::{Ordering, fence};
use ringlet_linux::{futex, sys};
use ringlet_order::{Life, Order, Output, PAYLOAD_BYTES, Settings, View};
use serde::{Deserialize, Serialize};

use super::space::{Parted, forget};
use super::transfer::{Filling, Inbox, Standing, is_first};
use super::{Client, Keeper, Membership, Waits};
use crate::PAGE_BYTES;
use crate::log::{Reader, Record};
use crate::memory::{self, Mapping};
use crate::network::{Batch, Bytes, Event, Network};
use crate::protocol::{Answer, page};
use crate::region::copy;
use crate::registry::{Act, Bounds, Direction, Effect, Registry};
use crate::status::Status;

/// It looks again for so long before it sleeps, unless others want its processor.
const SPINS: Duration = Duration::from_micros(50);
/// For so long it believes that they do.
const CROWDED: Duration = Duration::from_millis(1);
/// Turns between looks at who asks, while there is traffic.
const TURNS: u32 = 16;
/// At the longest.
const SLEEPS: Duration = Duration::from_secs(1);
/// While something is asked of another keeper, or it is to leave.
const SLEEPS_BRIEFLY: Duration = Duration::from_millis(20);
/// Of one program before others have their turn.
const TAKEN_AT_ONCE: usize = 64 << 10;
/// Of the order's, before programs have their turn.
const OUTPUTS_AT_ONCE: usize = 256;
/// Who leaves waits for those who lack what it has, as long as they go on asking for it: for so long nobody has.
const UNASKED: Duration = Duration::from_secs(10);
/// For the others to agree that it leaves; and for what programs had written before, of which something may never be whole.
const LEAVES: Duration = Duration::from_secs(10);
const DRAINS: Duration = Duration::from_secs(1);

/// Kinds of items of a payload.
const WRITE: u8 = 1;
const ACT: u8 = 2;
/// Kind, and bytes behind this.
const ITEM_HEAD: usize = 5;
/// To which host alone (0: to all), region, place.
const WRITE_HEAD: usize = 16;

/// An act, with what its host allows.
#[derive(Serialize, Deserialize)]
struct Said {
    /// By which the host knows who has asked. (0: nobody waits.)
    tag: u64,
    bounds: Bounds,
    act: Act,
}

pub struct Cluster {
    pub me: Life,
    pub network: Box<dyn Network>,
    order: Order,
    pub began: Instant,
    /// This run's number, once it belongs to the cluster.
    pub host: u32,
    pub standing: Standing,
    pub view: Option<View>,
    /// The last place in the order that was delivered.
    pub delivered: u64,
    /// Why nothing is delivered any more, until there is another view.
    pub stopped: Option<String>,
    batch: Batch,
    acts: VecDeque<Vec<u8>>,
    /// Payloads of ours: given to the order; delivered, as numbers with their places; and at all hosts.
    submitted: u64,
    unsettled: VecDeque<(u64, u64)>,
    settled: u64,
    next_tag: u64,
    /// Whose turn is first.
    first: usize,
    /// Processes that have gone, with what they have written.
    pub dying: Vec<(u32, Option<Reader>)>,
    /// Who has said what nobody of this version says, and why that is nonsense.
    pub barred: BTreeMap<Life, &'static str>,
    pub inbox: Inbox,
    /// Pages that were written to, and that somebody wishes to be told of.
    told: Vec<(u32, u32)>,
    /// Since when it is to leave; and since when that waits for others to have what this host has.
    pub leaves: Option<Instant>,
    pub hands_over: Option<Duration>,
}

impl Cluster {
    pub fn new(network: Box<dyn Network>, membership: &Membership) -> Cluster {
        let me = network.me().clone();
        let settings = Settings {
            me: me.clone(),
            founders: membership.founders.clone(),
            silent: membership.silent,
            beat: membership.beat,
        };
        let order = Order::new(settings, network.kept().as_deref(), Duration::ZERO);
        Cluster {
            me,
            network,
            order,
            began: Instant::now(),
            host: 0,
            standing: Standing::Outside,
            view: None,
            delivered: 0,
            stopped: None,
            batch: Batch::new(None),
            acts: VecDeque::new(),
            submitted: 0,
            unsettled: VecDeque::new(),
            settled: 0,
            next_tag: 1,
            first: 0,
            dying: Vec::new(),
            barred: BTreeMap::new(),
            inbox: Inbox::default(),
            told: Vec::new(),
            leaves: None,
            hands_over: None,
        }
    }

    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag - 1
    }

    /// Has an act done on all hosts.
    pub fn say(&mut self, tag: u64, act: &Act, by: &Registry) {
        let said = Said { tag, bounds: by.bounds, act: act.clone() };
        let mut item = vec![ACT, 0, 0, 0, 0];
        // (Into memory: it can't fail.)
        let _ = serde_json::to_writer(&mut item, &said);
        let bytes = (item.len() - ITEM_HEAD) as u32;
        item[1..ITEM_HEAD].copy_from_slice(&bytes.to_le_bytes());
        self.acts.push_back(item);
    }

    /// Acts that are not in the order yet.
    pub fn has_acts(&self) -> usize {
        self.acts.len()
    }

    /// The payload with which all that was taken until now has been passed on.
    pub fn written(&self) -> u64 {
        self.submitted + u64::from(!self.batch.is_empty())
    }

    /// Payloads that were submitted, and that all hosts have.
    pub fn counts(&self) -> (u64, u64) {
        (self.submitted, self.settled)
    }

    pub fn is_settled(&self, number: u64) -> bool {
        self.settled >= number
    }

    /// An operator's word that this host is dead for good. False if there is none.
    pub fn bury(&mut self, node: &str) -> bool {
        let members = self.view.iter().flat_map(|view| &view.members);
        let Some(life) = members.clone().find(|life| life.node == node).cloned() else {
            return false;
        };
        let now = self.now();
        self.order.bury(&life, now);
        true
    }

    /// What has come is the order's, or for the inbox.
    fn hear(&mut self, page: &Mapping) -> bool {
        let now = self.now();
        let Cluster { network, order, barred, inbox, .. } = self;
        let mut notes = Vec::new();
        let any = network.poll(&mut |event| match event {
            Event::Up(life) => {
                inbox.up(&life);
                order.up(life, now);
            }
            Event::Down(life) => {
                order.down(&life, now);
                inbox.down(&life);
                barred.remove(&life);
            }
            Event::Frame(from, _) if barred.contains_key(from) => {}
            Event::Frame(from, frame) if Inbox::is_for(&frame) => inbox.put(from, &frame),
            Event::Frame(from, frame) => {
                if let Err(why) = order.heard(from, frame, now) {
                    notes.push(format!("nothing of {} is heard: it says {why}", from.node));
                    barred.insert(from.clone(), why);
                    order.down(from, now);
                }
            }
            Event::Rails { active, number } => {
                page.word(page::RAILS)
                    .store(number.clamp(1, page::RAILS_MOST as u32), Ordering::Relaxed);
                page.word(page::ACTIVE).store(active, Ordering::Relaxed);
                ring(page);
            }
        });
        notes.iter().for_each(|note| network.note(note));
        any
    }

    /// Room for so much in the batch.
    fn has_room(&mut self, bytes: usize) -> bool {
        self.batch.len() + bytes <= PAYLOAD_BYTES || self.flush()
    }

    /// True if nothing is left of the batch.
    fn flush(&mut self) -> bool {
        if self.batch.is_empty() {
            return true;
        }
        let now = self.now();
        if self.order.takes(self.batch.len()).is_err() {
            return false;
        }
        // (What is short keeps no room that it does not need.)
        let payload = match self.batch.len() > PAYLOAD_BYTES / 2 {
            true => {
                let next = Batch::new(self.network.arena());
                std::mem::replace(&mut self.batch, next).freeze()
            }
            false => Bytes::copy_from_slice(self.batch.as_ref()),
        };
        self.batch.clear();
        let Ok(number) = self.order.submit(payload, now) else { return false };
        self.submitted = number;
        true
    }

    /// Acts, into the batch. False if there is no room.
    fn add_acts(&mut self) -> bool {
        while let Some(item) = self.acts.front() {
            let bytes = item.len();
            if !self.has_room(bytes) {
                return false;
            }
            self.acts.pop_front().iter().for_each(|item| self.batch.put(item));
        }
        true
    }

    fn is_passed_on(&self) -> bool {
        self.batch.is_empty() && self.acts.is_empty() && self.is_settled(self.submitted)
    }

    fn add_write(&mut self, record: &Record, only: u32) {
        let bytes = (WRITE_HEAD + record.length) as u32;
        self.batch.put(&[WRITE]);
        self.batch.put(&bytes.to_le_bytes());
        self.batch.put(&only.to_le_bytes());
        self.batch.put(&record.region.to_le_bytes());
        self.batch.put(&record.at.to_le_bytes());
        // SAFETY: the log has so many bytes there.
        #[allow(unsafe_code)]
        unsafe {
            self.batch.put_raw(record.bytes, record.length);
        }
    }
}

/// Who waits for an event of the cluster looks again.
pub fn ring(page: &Mapping) {
    let events = page.word(page::EVENTS);
    // ORDER: Release, pairs with Acquire in `Host::wait_event`.
    events.fetch_add(1, Ordering::Release);
    futex::wake(events);
}

fn number<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..at + N)?.try_into().ok()
}

/// The next item of a payload, and what is behind it.
fn item(from: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let bytes = u32::from_le_bytes(number(from, 1)?) as usize;
    let (body, rest) = from.get(ITEM_HEAD..)?.split_at_checked(bytes)?;
    Some((*from.first()?, body, rest))
}

impl Keeper {
    fn cluster(&mut self) -> &mut Cluster {
        self.cluster.as_mut().expect("it is one of a cluster")
    }

    pub(super) fn keep_in_cluster(
        &mut self,
        listener: &OwnedFd,
        leaves: Option<&AtomicBool>,
    ) -> std::io::Result<()> {
        sys::run_briefly();
        let load = sys::open_load().ok().map(memory::own);
        let wanting = || load.as_ref().map_or(0, |load| sys::runnable(load.as_raw_fd()));
        let mut crowded: Option<Instant> = None;
        // Turns; those of them since the last one in which there was anything.
        let (mut turns, mut idle, mut seen) = (0u32, 0u32, Instant::now());
        loop {
            let any = self.turn()?;
            (turns, idle) = (turns.wrapping_add(1), idle.saturating_add(1));
            if any {
                (seen, idle) = (Instant::now(), 0);
            }
            let is_to_leave = leaves.is_some_and(|leaves| leaves.load(Ordering::Relaxed));
            if is_to_leave && self.has_left() {
                return Ok(());
            }
            // (A look at who wants to run costs as much as some turns.)
            let mut is_crowded = || {
                let is_known = crowded.is_some_and(|since| since.elapsed() < CROWDED);
                if !is_known && idle % TURNS == 1 {
                    crowded = (wanting() > sys::processors()).then(Instant::now);
                }
                crowded.is_some()
            };
            let is_awake = any || seen.elapsed() < SPINS && !is_crowded();
            if is_awake && !turns.is_multiple_of(TURNS) {
                std::hint::spin_loop();
                continue;
            }
            let asked = match is_awake {
                true => self.look(listener, Duration::ZERO),
                false => self.sleep(listener, is_to_leave),
            };
            if asked {
                (seen, idle) = (Instant::now(), 0);
            }
        }
    }

    fn sleep(&mut self, listener: &OwnedFd, briefly: bool) -> bool {
        let state = self.page.1.word(page::STATE);
        // (Its number before it is said: who sees that has rung in no sleep of that number.)
        state.fetch_add(page::SLEEP | page::ASLEEP, Ordering::Relaxed);
        // ORDER: SeqCst, pairs with that in `logged::tell`: either the record is seen here, or the bell is rung.
        fence(Ordering::SeqCst);
        let is_blocked = !self.cluster().batch.is_empty();
        let has_more = !is_blocked
            && self.clients.iter().filter_map(|client| client.log.as_ref()).any(Reader::has_next);
        let cluster = self.cluster();
        let may_sleep = !has_more && cluster.network.may_sleep();
        let most = if briefly || cluster.is_asking() { SLEEPS_BRIEFLY } else { SLEEPS };
        let left = cluster.order.due().saturating_sub(cluster.now()).min(most);
        let asked = self.look(listener, if may_sleep { left } else { Duration::ZERO });
        self.page.1.word(page::STATE).fetch_and(!page::ASLEEP, Ordering::SeqCst);
        asked
    }

    /// Does it stay for those who lack contents that it has? (Until then its programs go on.)
    fn hands_over(&mut self) -> bool {
        let here = self.cluster().host;
        let is_needed = self.registry.regions.values().any(|region| region.is_needed_of(here));
        let cluster = self.cluster();
        let now = cluster.now();
        let since = *cluster.hands_over.get_or_insert(now);
        let last = cluster.inbox.gave.unwrap_or_default().max(since);
        is_needed && cluster.leaves.is_none() && now.saturating_sub(last) < UNASKED
    }

    /// Takes nothing any more, and leaves once all hosts have what programs have written; it has left once the others know.
    fn has_left(&mut self) -> bool {
        if self.hands_over() {
            return false;
        }
        // (Each turn: another view lets programs go on.)
        self.page.1.word(page::STATE).fetch_or(page::STOPPED, Ordering::SeqCst);
        let cluster = self.cluster();
        cluster.stopped.get_or_insert_with(|| "this host leaves".into());
        if cluster.leaves.is_none() {
            cluster.leaves = Some(Instant::now());
            ring(&self.page.1);
        }
        let is_taken = |log: &Reader| log.has_taken(log.tail());
        let are_taken = self
            .clients
            .iter()
            .all(|client| client.later.is_empty() && client.log.as_ref().is_none_or(is_taken));
        let cluster = self.cluster();
        let since = cluster.leaves.map_or(Duration::ZERO, |since| since.elapsed());
        let is_drained = are_taken && cluster.dying.is_empty() && cluster.is_passed_on();
        if is_drained || !matches!(cluster.standing, Standing::Inside) || since >= DRAINS {
            let now = cluster.now();
            cluster.order.leave(now);
        }
        cluster.order.is_over() || since >= LEAVES
    }

    /// What has come from others, from programs, and out of the order. True if there was anything.
    fn turn(&mut self) -> std::io::Result<bool> {
        let Some(cluster) = &mut self.cluster else { return Ok(false) };
        let mut any = cluster.hear(&self.page.1);
        let now = cluster.now();
        if now >= cluster.order.due() {
            cluster.order.tick(now);
        }
        any |= self.drain();
        any |= self.outputs()?;
        any |= self.transfer()?;
        Ok(any)
    }

    /// What programs have written, each a bit, and what they ask: into the order.
    fn drain(&mut self) -> bool {
        let Some(cluster) = &mut self.cluster else { return false };
        if !matches!(cluster.standing, Standing::Inside) || !cluster.add_acts() {
            return false;
        }
        let (mut any, count) = (false, self.clients.len());
        cluster.first = cluster.first.wrapping_add(1);
        let (mut has_room, mut is_lost) = (true, false);
        let first = cluster.first;
        for at in (0..count).map(|each| (first % count + each) % count) {
            let client = &mut self.clients[at];
            let (Some(member), Some(log)) = (client.member, &mut client.log) else { continue };
            match take(cluster, &self.registry, member, log) {
                Ok(taken) => (any, is_lost) = (any | taken.any, is_lost | taken.is_lost),
                Err(_) => client.is_over = true,
            }
            let is_free = client.undoes.is_none();
            while let Some((_, act)) =
                client.later.pop_front_if(|(up_to, _)| is_free && log.has_taken(*up_to))
            {
                cluster.say(0, &act, &self.registry);
            }
            log.give_back();
            has_room = cluster.has_room(PAYLOAD_BYTES / 2);
            if !has_room {
                break;
            }
        }
        if has_room {
            for (member, mut log) in std::mem::take(&mut cluster.dying) {
                // (What is not whole by now never is.)
                let taken = log.as_mut().map(|log| take(cluster, &self.registry, member, log));
                match taken {
                    Some(Ok(Taken { any: true, .. } | Taken { is_all: false, .. })) => {
                        any = true;
                        cluster.dying.push((member, log));
                    }
                    _ => cluster.say(0, &Act::Leave { member }, &self.registry),
                }
            }
        }
        cluster.add_acts();
        cluster.flush();
        if is_lost {
            self.count_errors();
        }
        for at in (0..self.clients.len()).rev() {
            let client = &self.clients[at];
            let drains = client.drains.zip(client.log.as_ref());
            if drains.is_some_and(|(up_to, log)| log.has_taken(up_to)) {
                self.serve(at);
            }
            if self.clients[at].is_over {
                let client = self.clients.swap_remove(at);
                self.gone(client);
            }
        }
        any
    }

    fn outputs(&mut self) -> std::io::Result<bool> {
        for done in 0..OUTPUTS_AT_ONCE {
            let cluster = self.cluster();
            let Some(output) = cluster.order.output() else { return Ok(done > 0) };
            match output {
                Output::Keep(bytes) => cluster.network.keep(&bytes)?,
                Output::Send { to, frame } => drop(cluster.network.send(&to, &frame)),
                Output::Stopped { why } => self.stop(&why)?,
                Output::Stable { sequence } => {
                    while let Some((number, _)) =
                        cluster.unsettled.pop_front_if(|(_, place)| *place <= sequence)
                    {
                        cluster.settled = number;
                    }
                    self.answer_settled();
                }
                Output::View { view, joined, left, .. } => self.see(view, joined, left)?,
                output @ Output::Deliver { .. } if cluster.holds_back() => cluster.hold(output)?,
                Output::Deliver { sequence, origin, number, payload } => {
                    self.deliver(sequence, &origin, number, &payload);
                }
            }
        }
        Ok(true)
    }

    fn stop(&mut self, why: &str) -> std::io::Result<()> {
        let cluster = self.cluster();
        let is_over = cluster.order.is_over();
        cluster.stopped = Some(why.to_owned());
        let page = &self.page.1;
        page.word(page::STATE).fetch_or(page::STOPPED, Ordering::SeqCst);
        // (What was written lately may be lost, or not: who asks is to write it again.)
        self.count_errors();
        ring(&self.page.1);
        for at in 0..self.clients.len() {
            // (What waits for room of what it has written need not.)
            self.clients[at].drains = None;
            match self.clients[at].waits {
                Waits::Settled(_) => self.reply(at, &Answer::No(Status::ChannelError), &[]),
                Waits::Delivery { tag, gives_back } => {
                    self.clients[at].undoes = Some(tag);
                    let no = Answer::No(Status::Stopped);
                    self.reply(at, if gives_back { &Answer::Done } else { &no }, &[]);
                }
                Waits::No => {}
            }
        }
        // (Unless it was to leave, it is to begin anew.)
        let is_fault = is_over && self.cluster().leaves.is_none();
        if is_fault { Err(std::io::Error::other(why.to_owned())) } else { Ok(()) }
    }

    fn go_on(&mut self) {
        self.cluster().stopped = None;
        self.page.1.word(page::STATE).fetch_and(!page::STOPPED, Ordering::SeqCst);
    }

    pub(super) fn count_errors(&self) {
        let page = &self.page.1;
        for rail in 0..page::RAILS_MOST {
            // ORDER: Release, pairs with Acquire in `Host::errors`. (Only this thread writes there. A count is never negative.)
            let count = page.word(rail).load(Ordering::Relaxed) as i32;
            page.word(rail).store(count.checked_add(1).unwrap_or(0) as u32, Ordering::Release);
        }
    }

    /// Another view. Those that left, and all their processes, have gone; of those that joined we may be one.
    fn see(&mut self, view: View, joined: Vec<Life>, left: Vec<Life>) -> std::io::Result<()> {
        let cluster = self.cluster();
        let output = Output::View {
            sequence: 0,
            view: view.clone(),
            joined: joined.clone(),
            left: left.clone(),
        };
        cluster.inbox.keep_members(&view);
        cluster.view = Some(view.clone());
        self.go_on();
        if !self.cluster().enters(&view, &joined, output)? {
            return Ok(());
        }
        // (What the registry knew already when this host was told of it is not done again: who told it may have been ahead.)
        if view.number > self.cluster().inbox.applied {
            self.apply_view(&view, &joined, &left);
        }
        Ok(())
    }

    pub(super) fn apply_view(&mut self, view: &View, joined: &[Life], left: &[Life]) {
        for life in left {
            let Some(host) = self.registry.host(&life.node, life.incarnation) else { continue };
            let here = self.cluster().host;
            // (What was written to it alone is lost.)
            let is_lost = self.registry.regions.values().any(|region| {
                region.entry.users.values().any(|each| each.host == here && each.only == Some(host))
            });
            if is_lost {
                self.count_errors();
            }
            let unused = self.registry.exit(host);
            self.tell_lost();
            unused.regions.iter().for_each(|id| self.let_go(*id));
            unused.sets.iter().for_each(|id| drop(self.words.remove(id)));
        }
        let is_first = is_first(view, joined);
        for life in joined {
            self.registry.enter(&life.node, life.incarnation, is_first);
        }
        self.tell_holders();
        let me = self.cluster().me.clone();
        if let Some(host) = self.registry.host(&me.node, me.incarnation) {
            self.cluster().host = host;
        }
        self.cluster().inbox.applied = view.number;
        ring(&self.page.1);
    }

    /// The next of the one order.
    pub(super) fn deliver(&mut self, sequence: u64, origin: &Life, count: u64, payload: &[u8]) {
        let cluster = self.cluster();
        // (As in `see`.)
        if sequence <= cluster.inbox.base {
            return;
        }
        cluster.delivered = sequence;
        let is_ours = *origin == cluster.me;
        if is_ours {
            cluster.unsettled.push_back((count, sequence));
        }
        let Some(host) = self.registry.host(&origin.node, origin.incarnation) else { return };
        let mut rest = payload;
        // (Another keeper that says nonsense is heard as far as it makes sense, and the same everywhere.)
        while let Some((kind, body, next)) = item(rest) {
            match kind {
                WRITE => drop(self.write(host, body)),
                ACT => {
                    let Ok(said) = serde_json::from_slice::<Said>(body) else { return };
                    self.do_said(host, said);
                }
                _ => return,
            }
            rest = next;
        }
        self.tell_watchers();
    }

    fn do_said(&mut self, host: u32, said: Said) {
        let made_most = said.bounds.made_most.min(super::MADE_MOST);
        let bounds = Bounds { made_most, ..said.bounds };
        let own = std::mem::replace(&mut self.registry.bounds, bounds);
        let effect = self.perform(host, &said.act);
        self.registry.bounds = own;
        if host != self.cluster().host || said.tag == 0 {
            return;
        }
        let waits = |client: &Client| matches!(client.waits, Waits::Delivery { tag, .. } if tag == said.tag);
        match (self.clients.iter().position(waits), effect) {
            (Some(at), effect) => self.finish(at, &said.act, effect),
            (None, effect) if self.clients.iter().any(|client| client.undoes == Some(said.tag)) => {
                let undo = effect.ok().and_then(|effect| undone(&said.act, &effect));
                let cluster = self.cluster();
                let next = undo.is_some().then(|| cluster.tag());
                if let (Some(undo), Some(tag), Some(cluster)) = (undo, next, &mut self.cluster) {
                    cluster.say(tag, &undo, &self.registry);
                }
                let is_it = |client: &&mut Client| client.undoes == Some(said.tag);
                for client in self.clients.iter_mut().filter(is_it) {
                    client.undoes = next;
                    if let Act::Detach { id, direction: Direction::Receive, .. } = said.act {
                        forget(&mut self.memories, &mut client.watches, Some(id));
                    }
                }
            }
            // (It has gone meanwhile.)
            (None, Ok(Effect::Joined(member))) => self.undo(&Act::Leave { member }),
            (None, _) => {}
        }
    }

    /// Puts what was written on that host into what is received here.
    fn write(&mut self, from: u32, body: &[u8]) -> Option<()> {
        let only = u32::from_le_bytes(number(body, 0)?);
        let id = u32::from_le_bytes(number(body, 4)?);
        let at = u64::from_le_bytes(number(body, 8)?);
        let bytes = &body[WRITE_HEAD..];
        let cluster = self.cluster.as_mut()?;
        let here = cluster.host;
        if only != 0 && only != here {
            return None;
        }
        let region = self.registry.regions.get(&id)?;
        let is_seen = from != here || region.loopback(here) == Some(true);
        let memory = self.memories.get_mut(&id)?;
        if region.coherent {
            if only != 0 || !is_seen {
                match (memory.part(), cluster.inbox.filling.get_mut(&id)) {
                    (Parted::Now, Some(filling)) => filling.part(),
                    (Parted::Failed, _) => cluster.say(0, &Act::Lacks { id }, &self.registry),
                    _ => {}
                }
            }
            if only == 0
                && memory.put_apart(at, bytes).is_some()
                && let Some(filling) = cluster.inbox.filling.get_mut(&id)
            {
                filling.touch_apart(at as usize, bytes.len());
            }
        }
        if !is_seen {
            return None;
        }
        memory.put(at, bytes, region.bytes)?;
        if let Some(filling) = cluster.inbox.filling.get_mut(&id) {
            filling.touch(at as usize, bytes.len());
        }
        if bytes.is_empty() {
            return None;
        }
        let pages = at as usize / PAGE_BYTES..=(at as usize + bytes.len() - 1) / PAGE_BYTES;
        for page in pages {
            if memory.wished.word(page).load(Ordering::Relaxed) != 0 {
                cluster.told.push((id, page as u32));
            }
        }
        None
    }

    fn tell_watchers(&mut self) {
        let cluster = self.cluster();
        if cluster.told.is_empty() {
            return;
        }
        let mut told = std::mem::take(&mut cluster.told);
        told.sort_unstable();
        told.dedup();
        for (id, page) in told {
            let written = self.memories.get(&id).and_then(|memory| memory.written.as_ref());
            if let Some((_, changes)) = written {
                let word = changes.word(page as usize);
                // ORDER: Release, pairs with Acquire in `Watch::has_changed`: what was written is seen with it.
                word.fetch_add(1, Ordering::Release);
                futex::wake(word);
            }
        }
    }

    pub(super) fn answer_settled(&mut self) {
        for at in 0..self.clients.len() {
            let Some(cluster) = &self.cluster else { return };
            if let Waits::Settled(number) = self.clients[at].waits
                && cluster.is_settled(number)
            {
                self.reply(at, &Answer::Done, &[]);
            }
        }
    }

    /// Contents that nobody has any more are an error of all hosts.
    pub(super) fn tell_lost(&mut self) {
        if std::mem::take(&mut self.registry.is_lost) {
            self.count_errors();
            ring(&self.page.1);
        }
    }

    /// Is all there that was written to this region before this host came?
    pub(super) fn is_filled(&self, id: u32) -> bool {
        let filling = self.cluster.as_ref().and_then(|cluster| cluster.inbox.filling.get(&id));
        filling.is_none_or(Filling::is_done)
    }
}

/// What undoes an act that was done, of one who was told that it is not. (What gives back is as well given back.)
fn undone(act: &Act, effect: &Effect) -> Option<Act> {
    Some(match (act, effect) {
        (_, Effect::Joined(member)) => Act::Leave { member: *member },
        (Act::Allocate { member, .. }, Effect::Region { id, .. }) => {
            Act::Deallocate { member: *member, id: *id }
        }
        (Act::Attach { member, id, direction, .. }, _) => {
            Act::Detach { member: *member, id: *id, direction: *direction }
        }
        (Act::Locks { member, .. }, Effect::Locks { id, .. }) => {
            Act::DropLocks { member: *member, id: *id }
        }
        (Act::Acquire { member, id, lock, .. } | Act::Cancel { member, id, lock }, _) => {
            Act::Abandon { member: *member, id: *id, lock: *lock }
        }
        _ => return None,
    })
}

pub fn put_into(data: &Mapping, at: u64, bytes: &[u8]) -> Option<()> {
    let end = at.checked_add(bytes.len() as u64)?;
    (end <= data.area().len() as u64).then_some(())?;
    // SAFETY: within the mapping, as was just looked at.
    #[allow(unsafe_code)]
    unsafe {
        copy(bytes.as_ptr(), data.area().base().add(at as usize), bytes.len());
    }
    Some(())
}

struct Taken {
    any: bool,
    /// There is no more, or it is not whole.
    is_all: bool,
    /// Some of it was for one host alone, which has gone.
    is_lost: bool,
}

/// Some of what a process has written. What it may not write is not.
fn take(
    cluster: &mut Cluster,
    registry: &Registry,
    member: u32,
    log: &mut Reader,
) -> Result<Taken, crate::log::Broken> {
    let (mut bytes, mut is_lost) = (0, false);
    while bytes < TAKEN_AT_ONCE {
        let Some(record) = log.next()? else {
            return Ok(Taken { any: bytes > 0, is_all: true, is_lost });
        };
        if !cluster.has_room(ITEM_HEAD + WRITE_HEAD + record.length) {
            return Ok(Taken { any: bytes > 0, is_all: false, is_lost });
        }
        let region = registry.regions.get(&record.region);
        let attached = region.and_then(|region| region.entry.users.get(&member));
        let most = region.map_or(0, |region| region.bytes);
        let fits = record.at.checked_add(record.length as u64).is_some_and(|end| end <= most);
        if let (Some(attached), true) = (attached.filter(|each| each.transmits), fits) {
            is_lost |= attached.only.is_some_and(|host| !registry.hosts.contains_key(&host));
            cluster.add_write(&record, attached.only.unwrap_or(0));
        }
        bytes += ITEM_HEAD + WRITE_HEAD + record.length;
        log.take(&record);
    }
    Ok(Taken { any: true, is_all: false, is_lost })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::network::Parcel;
    use std::os::fd::BorrowedFd;

    /// Carries nothing.
    struct Nowhere(Life);

    impl Network for Nowhere {
        fn me(&self) -> &Life {
            &self.0
        }
        fn kept(&self) -> Option<Vec<u8>> {
            None
        }
        fn keep(&mut self, _: &[u8]) -> std::io::Result<()> {
            Ok(())
        }
        fn send(&mut self, _: &Life, _: &Parcel) -> bool {
            false
        }
        fn poll(&mut self, _: &mut dyn FnMut(Event<'_>)) -> bool {
            false
        }
        fn descriptors(&self, _: &mut dyn FnMut(BorrowedFd<'_>)) {}
        fn may_sleep(&mut self) -> bool {
            true
        }
    }

    pub fn alone() -> Cluster {
        let me = Life { node: "here".into(), incarnation: 1 };
        Cluster::new(Box::new(Nowhere(me)), &Membership::default())
    }

    /// What another host has said is delivered.
    pub fn said(keeper: &mut Keeper, host: u32, bounds: Bounds, act: Act) {
        keeper.do_said(host, Said { tag: 0, bounds, act });
    }
}
