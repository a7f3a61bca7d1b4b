//! What a keeper knows, and decides: regions and lock sets by their keys, who uses which, and who may. No system call is made here, and no memory is held:
//! each has a number, by which the keeper has it.
//!
//! In a cluster all hosts' keepers have the same, since each applies the same acts in the same order. What is said of a host is in what is applied: nothing
//! here depends on where it runs. On one host, which is no part of a cluster, that host's number is 0, and its locks are words in memory, of which nothing
//! is known here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::PAGE_BYTES;
use crate::protocol::Made;
use crate::status::Status;

/// A region is no larger.
const REGION_BYTES_MOST: u64 = 1 << 34;
/// Locks of a set, at most (`IMC_MAXNUMLOCKS`, which was not published).
pub const LOCKS_MOST: usize = 4096;
/// Processes of one host at a time, whatever it says: each is told to all others.
const MEMBERS_OF_A_HOST: usize = 1 << 14;
/// Groups of a process that count: all hosts keep them.
pub const GROUPS_MOST: usize = 1024;
/// Regions and sets that one process may use at a time.
const USED_MOST: usize = 1024;
/// Of those that programs make or are: as wide as an `int`, and narrower than the word of a lock that names its holder.
const LAST_NUMBER: u32 = (1 << 30) - 1;
/// What one user but root may own of the regions and sets: others are kept out by no one of them.
const SHARE_OF_A_USER: usize = 4;
/// The only logical rail there is.
const RAIL: u32 = 0;

/// Who may read and write a region, or use a set of locks, and what kind of region it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Permission {
    /// As a file's: reading and writing, for user, group and others.
    pub mode: u32,
    /// Who comes late sees all that was written since the region is there. (On one host, and whatever is said here, all do.)
    pub coherent: bool,
    pub rail: u32,
}

impl Default for Permission {
    /// For its user only.
    fn default() -> Permission {
        Permission { mode: 0o600, coherent: true, rail: RAIL }
    }
}

/// How a region is attached: as all processes of a host have to say alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Use {
    /// By other processes of this host too.
    pub shared: bool,
    /// What is written on this host is seen on it. (Only for who transmits.)
    pub loopback: bool,
}

impl Default for Use {
    fn default() -> Use {
        Use { shared: true, loopback: true }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Direction {
    Transmit,
    Receive,
}

/// A process, as the kernel of its host vouches for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    pub host: u32,
    pub pid: i32,
    pub uid: u32,
    pub groups: Vec<u32>,
}

/// What is shared by key: who may use it, and who does.
#[derive(Serialize, Deserialize)]
pub struct Entry<T> {
    pub key: u64,
    pub owner: u32,
    pub group: u32,
    pub mode: u32,
    /// By member.
    pub users: BTreeMap<u32, T>,
}

const READ: u32 = 4;
const WRITE: u32 = 2;

impl<T> Entry<T> {
    pub fn made(&self) -> Made {
        Made { owner: self.owner, mode: self.mode }
    }

    /// As the kernel decides of files: by the first of user, group and others that the process is.
    fn allows(&self, who: &Member, wanted: u32) -> bool {
        let shift = match who {
            _ if who.uid == 0 => return true,
            _ if who.uid == self.owner => 6,
            _ if who.groups.contains(&self.group) => 3,
            _ => 0,
        };
        self.mode >> shift & wanted == wanted
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attached {
    /// Of the process.
    pub host: u32,
    pub transmits: bool,
    pub receives: bool,
    /// To this host alone.
    pub only: Option<u32>,
}

impl Attached {
    fn any(self) -> bool {
        self.transmits || self.receives
    }
}

/// As the first one on a host has said that is attached there.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct First {
    shared: Option<bool>,
    loopback: Option<bool>,
}

#[derive(Serialize, Deserialize)]
pub struct RegionEntry {
    pub entry: Entry<Attached>,
    pub bytes: u64,
    pub coherent: bool,
    /// By host.
    first: BTreeMap<u32, First>,
    /// Of a coherent one: hosts that have all that was ever written to it, and give it to those that lack it; and hosts whose contents are on their way.
    pub holders: BTreeSet<u32>,
    pub filling: BTreeSet<u32>,
    /// The last host that had all of it has gone before another one had.
    pub incomplete: bool,
}

#[derive(Serialize, Deserialize)]
pub struct LockEntry {
    pub entry: Entry<()>,
    pub count: usize,
    /// In a cluster: the locks that somebody has.
    pub held: BTreeMap<u32, Held>,
}

#[derive(Serialize, Deserialize)]
pub struct Held {
    pub holder: u32,
    /// Who waits for it, in the order in which they came.
    pub waiting: VecDeque<u32>,
}

/// In bytes: of all regions, and of what this host receives.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Limits {
    pub all: u64,
    pub received: u64,
}

/// What a host allows.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Bounds {
    pub limits: Limits,
    /// Regions and sets.
    pub made_most: usize,
    /// By several users.
    pub is_shared: bool,
}

#[derive(Serialize, Deserialize)]
pub struct Registry {
    /// Those of the host whose act it is.
    #[serde(skip)]
    pub bounds: Bounds,
    /// Of a cluster, by their numbers: name, and which run of it.
    pub hosts: BTreeMap<u32, (String, u64)>,
    /// Those of them that have said nothing yet: what was made or written before they know the cluster's state they lack.
    behind: BTreeSet<u32>,
    pub members: BTreeMap<u32, Member>,
    pub regions: BTreeMap<u32, RegionEntry>,
    pub sets: BTreeMap<u32, LockEntry>,
    next: u32,
    /// Locks of a cluster that have another holder since this was emptied: set and lock.
    #[serde(skip)]
    pub changed: Vec<(u32, u32)>,
    /// Some region has become incomplete since this was taken.
    #[serde(skip)]
    pub is_lost: bool,
}

/// What nobody uses any more, by their numbers.
#[derive(Default, PartialEq, Eq, Debug)]
pub struct Unused {
    pub regions: Vec<u32>,
    pub sets: Vec<u32>,
}

/// What changes a registry. Its `member` is of the host that does it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Act {
    Join {
        pid: i32,
        uid: u32,
        groups: Vec<u32>,
    },
    Leave {
        member: u32,
    },
    Allocate {
        member: u32,
        key: u64,
        bytes: u64,
        how: Permission,
    },
    Attach {
        member: u32,
        id: u32,
        direction: Direction,
        how: Use,
        only: Option<String>,
    },
    Detach {
        member: u32,
        id: u32,
        direction: Direction,
    },
    Deallocate {
        member: u32,
        id: u32,
    },
    Locks {
        member: u32,
        key: u64,
        count: usize,
        mode: u32,
        creates: bool,
    },
    DropLocks {
        member: u32,
        id: u32,
    },
    Acquire {
        member: u32,
        id: u32,
        lock: u32,
        waits: bool,
    },
    /// Waits no longer.
    Cancel {
        member: u32,
        id: u32,
        lock: u32,
    },
    Release {
        member: u32,
        id: u32,
        lock: u32,
    },
    /// Neither waits for it any longer nor has it.
    Abandon {
        member: u32,
        id: u32,
        lock: u32,
    },
    /// The host knows the cluster's state: from there on it has all that is made and written.
    Inside,
    /// The host has all that was ever written to this region.
    Filled {
        id: u32,
    },
    /// The host has no memory in which it could.
    Lacks {
        id: u32,
    },
}

/// What an act did.
#[derive(PartialEq, Eq, Debug)]
pub enum Effect {
    Joined(u32),
    Region {
        id: u32,
        is_new: bool,
    },
    Locks {
        id: u32,
        is_new: bool,
    },
    Unused(Unused),
    /// The lock is its own; otherwise it waits for it.
    Lock {
        is_held: bool,
    },
    Done,
}

impl Act {
    fn member(&self) -> Option<u32> {
        match *self {
            Act::Join { .. } | Act::Inside | Act::Filled { .. } | Act::Lacks { .. } => None,
            Act::Leave { member }
            | Act::Allocate { member, .. }
            | Act::Attach { member, .. }
            | Act::Detach { member, .. }
            | Act::Deallocate { member, .. }
            | Act::Locks { member, .. }
            | Act::DropLocks { member, .. }
            | Act::Acquire { member, .. }
            | Act::Cancel { member, .. }
            | Act::Release { member, .. }
            | Act::Abandon { member, .. } => Some(member),
        }
    }

    /// What can be done without can be done later too.
    pub fn gives_back(&self) -> bool {
        matches!(
            self,
            Act::Detach { .. }
                | Act::Deallocate { .. }
                | Act::DropLocks { .. }
                | Act::Release { .. }
        )
    }
}

impl Registry {
    pub fn new(bounds: Bounds) -> Registry {
        let (hosts, members) = (BTreeMap::new(), BTreeMap::new());
        let (regions, sets, changed) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let (behind, next, is_lost) = (BTreeSet::new(), 1, false);
        Registry { bounds, hosts, behind, members, regions, sets, next, changed, is_lost }
    }

    /// Does what a process of that host asks for, or says why not; then nothing has changed.
    pub fn apply(&mut self, host: u32, act: &Act) -> Result<Effect, Status> {
        // (It says nothing before.)
        self.behind.remove(&host);
        if let Some(member) = act.member() {
            let is_its = self.members.get(&member).is_some_and(|who| who.host == host);
            is_its.then_some(()).ok_or(Status::NotInitialised)?;
        }
        Ok(match act {
            Act::Join { pid, uid, groups } => {
                let of_host = self.members.values().filter(|who| who.host == host).count();
                (of_host < MEMBERS_OF_A_HOST).then_some(()).ok_or(Status::Full)?;
                (groups.len() <= GROUPS_MOST).then_some(()).ok_or(Status::BadParameter)?;
                let (pid, uid, groups) = (*pid, *uid, groups.clone());
                Effect::Joined(self.join(Member { host, pid, uid, groups }))
            }
            Act::Leave { member } => Effect::Unused(self.leave(*member)),
            Act::Allocate { member, key, bytes, how } => {
                let (id, is_new) = self.allocate(*member, *key, *bytes, how)?;
                Effect::Region { id, is_new }
            }
            Act::Attach { member, id, direction, how, only } => {
                let only = only.as_ref().map(|name| self.other(host, name)).transpose()?;
                self.attach(*member, *id, *direction, *how, only)?;
                Effect::Done
            }
            Act::Detach { member, id, direction } => {
                self.detach(*member, *id, *direction)?;
                Effect::Done
            }
            Act::Deallocate { member, id } => {
                let regions = if self.deallocate(*member, *id)? { vec![*id] } else { Vec::new() };
                Effect::Unused(Unused { regions, sets: Vec::new() })
            }
            Act::Locks { member, key, count, mode, creates } => {
                let (id, is_new) = self.locks(*member, *key, *count, *mode, *creates)?;
                Effect::Locks { id, is_new }
            }
            Act::DropLocks { member, id } => {
                let sets = if self.drop_locks(*member, *id)? { vec![*id] } else { Vec::new() };
                Effect::Unused(Unused { regions: Vec::new(), sets })
            }
            Act::Acquire { member, id, lock, waits } => {
                Effect::Lock { is_held: self.acquire(*member, *id, *lock, *waits)? }
            }
            Act::Cancel { member, id, lock } => {
                self.cancel(*member, *id, *lock)?;
                Effect::Lock { is_held: true }
            }
            Act::Release { member, id, lock } => {
                self.release(*member, *id, *lock)?;
                Effect::Done
            }
            Act::Abandon { member, id, lock } => {
                self.abandon(*member, *id, *lock);
                Effect::Done
            }
            Act::Inside => Effect::Done,
            Act::Filled { id } => {
                let region = self.regions.get_mut(id).ok_or(Status::BadRegion)?;
                region.filling.remove(&host).then_some(()).ok_or(Status::BadParameter)?;
                region.holders.insert(host);
                region.incomplete = false;
                Effect::Done
            }
            Act::Lacks { id } => {
                let region = self.regions.get_mut(id).ok_or(Status::BadRegion)?;
                self.is_lost |= region.forget_host(host);
                Effect::Done
            }
        })
    }

    /// Is it one that acts can have made? (Another keeper has told it.)
    pub fn is_sound(&self) -> bool {
        let page = PAGE_BYTES as u64;
        let region = |each: &RegionEntry| {
            let mut hosts = each.holders.union(&each.filling);
            (1..=REGION_BYTES_MOST).contains(&each.bytes)
                && each.bytes.is_multiple_of(page)
                && hosts.all(|host| self.hosts.contains_key(host))
        };
        let set = |each: &LockEntry| {
            let is_lock = |lock: &u32| (*lock as usize) < each.count;
            (1..=LOCKS_MOST).contains(&each.count) && each.held.keys().all(is_lock)
        };
        (1..=LAST_NUMBER).contains(&self.next)
            && self.behind.iter().all(|host| self.hosts.contains_key(host))
            && self.regions.values().all(region)
            && self.sets.values().all(set)
    }

    /// Another host than that one, by its name.
    fn other(&self, host: u32, name: &str) -> Result<u32, Status> {
        let found = self.hosts.iter().find(|(_, (each, _))| each == name);
        match found.map(|(number, _)| *number) {
            Some(number) if number == host => Err(Status::ToItself),
            found => found.ok_or(Status::BadHost),
        }
    }

    /// That run of a host belongs to the cluster from now on; behind the others unless it is one of the first.
    pub fn enter(&mut self, name: &str, incarnation: u64, is_first: bool) -> u32 {
        let number = self.number();
        self.hosts.insert(number, (name.to_owned(), incarnation));
        if !is_first {
            self.behind.insert(number);
        }
        self.regions.values_mut().filter(|region| region.coherent).for_each(|region| {
            region.filling.insert(number);
        });
        number
    }

    pub fn host(&self, name: &str, incarnation: u64) -> Option<u32> {
        let is_it = |each: &(String, u64)| each.0 == name && each.1 == incarnation;
        self.hosts.iter().find(|(_, each)| is_it(each)).map(|(number, _)| *number)
    }

    /// A host has gone, and all its processes.
    pub fn exit(&mut self, host: u32) -> Unused {
        self.hosts.remove(&host);
        self.behind.remove(&host);
        let gone: Vec<u32> =
            self.members.iter().filter(|(_, who)| who.host == host).map(|(m, _)| *m).collect();
        let mut unused = Unused::default();
        for member in gone {
            let of_one = self.leave(member);
            unused.regions.extend(of_one.regions);
            unused.sets.extend(of_one.sets);
        }
        for region in self.regions.values_mut() {
            self.is_lost |= region.forget_host(host);
        }
        unused
    }

    /// Does this member use a region of which a part is lost?
    pub fn uses_incomplete(&self, member: u32) -> bool {
        let is_it = |each: &RegionEntry| each.incomplete && each.entry.users.contains_key(&member);
        self.regions.values().any(is_it)
    }

    /// In a cluster. True if it is the member's own now.
    fn acquire(&mut self, member: u32, id: u32, lock: u32, waits: bool) -> Result<bool, Status> {
        let set = self.set(member, id, lock)?;
        let Some(held) = set.held.get_mut(&lock) else {
            set.held.insert(lock, Held { holder: member, waiting: VecDeque::new() });
            self.changed.push((id, lock));
            return Ok(true);
        };
        if held.holder == member {
            return Err(Status::HeldByUs);
        }
        if !waits {
            return Err(Status::Busy);
        }
        if !held.waiting.contains(&member) {
            held.waiting.push_back(member);
        }
        Ok(false)
    }

    /// An error if it has not got the lock meanwhile.
    fn cancel(&mut self, member: u32, id: u32, lock: u32) -> Result<(), Status> {
        let set = self.set(member, id, lock)?;
        let held = set.held.get_mut(&lock).ok_or(Status::Busy)?;
        if held.holder == member {
            return Ok(());
        }
        held.waiting.retain(|each| *each != member);
        Err(Status::Busy)
    }

    fn release(&mut self, member: u32, id: u32, lock: u32) -> Result<(), Status> {
        let set = self.set(member, id, lock)?;
        let is_its = set.held.get(&lock).is_some_and(|held| held.holder == member);
        is_its.then_some(()).ok_or(Status::NotHeld)?;
        self.abandon(member, id, lock);
        Ok(())
    }

    fn abandon(&mut self, member: u32, id: u32, lock: u32) {
        if let Some(set) = self.sets.get_mut(&id) {
            give_up(member, id, set, &mut self.changed, Some(lock));
        }
    }

    fn set(&mut self, member: u32, id: u32, lock: u32) -> Result<&mut LockEntry, Status> {
        let is_its = |set: &&mut LockEntry| {
            set.entry.users.contains_key(&member) && (lock as usize) < set.count
        };
        self.sets.get_mut(&id).filter(is_its).ok_or(Status::BadLock)
    }

    /// One that nothing has. Each is used once before any is used again: what was just given back is not mistaken for what comes next.
    fn number(&mut self) -> u32 {
        loop {
            let number = self.next;
            self.next = if number >= LAST_NUMBER { 1 } else { number + 1 };
            let is_used = self.members.contains_key(&number)
                || self.hosts.contains_key(&number)
                || self.regions.contains_key(&number)
                || self.sets.contains_key(&number);
            // (Those that are there at a time are far fewer.)
            if !is_used {
                return number;
            }
        }
    }

    pub fn join(&mut self, who: Member) -> u32 {
        let member = self.number();
        self.members.insert(member, who);
        member
    }

    /// The region of this key, for this member; made if it is not there.
    pub fn allocate(
        &mut self,
        member: u32,
        key: u64,
        bytes: u64,
        how: &Permission,
    ) -> Result<(u32, bool), Status> {
        let who = self.members.get(&member).ok_or(Status::NotInitialised)?;
        if how.rail != RAIL {
            return Err(Status::BadRail);
        }
        if how.mode & !0o666 != 0 || how.mode == 0 {
            return Err(Status::BadParameter);
        }
        if bytes == 0 || bytes > REGION_BYTES_MOST {
            return Err(Status::BadSize);
        }
        let bytes = bytes.next_multiple_of(PAGE_BYTES as u64);
        let used = self.regions.values().filter(|each| each.entry.users.contains_key(&member));
        if used.count() >= USED_MOST {
            return Err(Status::Full);
        }
        if let Some((id, region)) = self.regions.iter_mut().find(|(_, each)| each.entry.key == key)
        {
            let entry = &mut region.entry;
            if !entry.allows(who, READ) && !entry.allows(who, WRITE) {
                return Err(Status::Denied);
            }
            if entry.users.contains_key(&member) {
                return Err(Status::Prior);
            }
            if region.bytes != bytes {
                return Err(Status::BadSize);
            }
            if region.coherent != how.coherent {
                return Err(Status::Incoherent);
            }
            entry.users.insert(member, Attached { host: who.host, ..Attached::default() });
            return Ok((*id, false));
        }
        let (own, others) = self.bytes(|region| region.entry.owner == who.uid);
        let most = self.most(self.bounds.limits.all, who.uid, others);
        if own + bytes > most || self.is_full(who.uid) {
            return Err(Status::Full);
        }
        let (owner, group) = (who.uid, who.groups.first().copied().unwrap_or(u32::MAX));
        let attached = Attached { host: who.host, ..Attached::default() };
        let users = BTreeMap::from([(member, attached)]);
        let entry = Entry { key, owner, group, mode: how.mode, users };
        let (coherent, first) = (how.coherent, BTreeMap::new());
        let hosts = self.hosts.keys().filter(|_| coherent).copied();
        let (filling, holders) = hosts.partition(|host| self.behind.contains(host));
        let incomplete = false;
        let id = self.number();
        let region = RegionEntry { entry, bytes, coherent, first, holders, filling, incomplete };
        self.regions.insert(id, region);
        Ok((id, true))
    }

    pub fn attach(
        &mut self,
        member: u32,
        id: u32,
        direction: Direction,
        how: Use,
        only: Option<u32>,
    ) -> Result<(), Status> {
        let who = self.members.get(&member).ok_or(Status::NotInitialised)?;
        let (host, uid) = (who.host, who.uid);
        let is_own = |(other, each): (&u32, &Attached)| {
            let is_user = || self.members.get(other).is_some_and(|other| other.uid == uid);
            each.host == host && each.receives && is_user()
        };
        let received = |each: &RegionEntry| each.is_received(host);
        let (own, others) = self.bytes(|each| each.entry.users.iter().any(is_own));
        let (_, none) = self.bytes(received);
        let others = others - none;
        let most = self.most(self.bounds.limits.received, uid, others);
        let region = self.regions.get_mut(&id).ok_or(Status::BadRegion)?;
        let attached = *region.entry.users.get(&member).ok_or(Status::NotAllocated)?;
        let (wanted, is_there, already) = match direction {
            Direction::Transmit => (WRITE, attached.transmits, Status::TransmitAttached),
            Direction::Receive => (READ, attached.receives, Status::ReceiveAttached),
        };
        if is_there {
            return Err(already);
        }
        if !region.entry.allows(who, wanted) {
            return Err(Status::Denied);
        }
        if region.incomplete {
            return Err(Status::Incomplete);
        }
        let is_another =
            |(other, each): (&u32, &Attached)| *other != member && each.host == host && each.any();
        let others = region.entry.users.iter().any(is_another);
        let first = region.first.get(&host).copied().unwrap_or_default();
        match first.shared {
            Some(true) if !how.shared => return Err(Status::Shared),
            Some(false) if how.shared || others => return Err(Status::NonShared),
            _ => {}
        }
        let transmits = direction == Direction::Transmit;
        let speaks_of_loopback = transmits && only.is_none();
        if speaks_of_loopback && first.loopback.is_some_and(|loopback| loopback != how.loopback) {
            return Err(Status::OtherLoopback);
        }
        if !transmits && !region.is_received(host) && own + region.bytes > most {
            return Err(Status::ReceiveFull);
        }
        let first = region.first.entry(host).or_default();
        first.shared = Some(how.shared);
        if speaks_of_loopback {
            first.loopback = Some(how.loopback);
        }
        let attached = region.entry.users.entry(member).or_default();
        match direction {
            Direction::Transmit => (attached.transmits, attached.only) = (true, only),
            Direction::Receive => attached.receives = true,
        }
        Ok(())
    }

    /// May this member see what is written there? How large it is, and whether those who write now see it themselves.
    pub fn see(&self, member: u32, id: u32) -> Result<(u64, bool), Status> {
        let who = self.members.get(&member).ok_or(Status::NotInitialised)?;
        let region = self.regions.get(&id).ok_or(Status::BadRegion)?;
        match region.entry.allows(who, READ) {
            true => Ok((region.bytes, region.loopback(who.host) != Some(false))),
            false => Err(Status::Denied),
        }
    }

    pub fn detach(&mut self, member: u32, id: u32, direction: Direction) -> Result<(), Status> {
        let region = self.regions.get_mut(&id).ok_or(Status::BadRegion)?;
        let attached = region.entry.users.get_mut(&member).ok_or(Status::BadRegion)?;
        let there = match direction {
            Direction::Transmit => &mut attached.transmits,
            Direction::Receive => &mut attached.receives,
        };
        if !std::mem::take(there) {
            return Err(Status::BadRegion);
        }
        if direction == Direction::Transmit {
            attached.only = None;
        }
        region.forget_first();
        Ok(())
    }

    /// True if nobody uses it any more: it is gone.
    pub fn deallocate(&mut self, member: u32, id: u32) -> Result<bool, Status> {
        let region = self.regions.get_mut(&id).ok_or(Status::BadRegion)?;
        let attached = region.entry.users.get(&member).ok_or(Status::NotAllocated)?;
        if attached.any() {
            return Err(Status::Attached);
        }
        region.entry.users.remove(&member);
        let is_unused = region.entry.users.is_empty();
        if is_unused {
            self.regions.remove(&id);
        }
        Ok(is_unused)
    }

    /// The set of this key, for this member, and whether it was made for it.
    pub fn locks(
        &mut self,
        member: u32,
        key: u64,
        count: usize,
        mode: u32,
        creates: bool,
    ) -> Result<(u32, bool), Status> {
        let who = self.members.get(&member).ok_or(Status::NotInitialised)?;
        if count == 0 || count > LOCKS_MOST || mode & !0o666 != 0 || mode == 0 {
            return Err(Status::BadParameter);
        }
        let used = self.sets.values().filter(|each| each.entry.users.contains_key(&member));
        if used.count() >= USED_MOST {
            return Err(Status::Full);
        }
        if let Some((id, set)) = self.sets.iter_mut().find(|(_, each)| each.entry.key == key) {
            if !set.entry.allows(who, READ | WRITE) {
                return Err(Status::Denied);
            }
            if creates {
                return Err(Status::Exists);
            }
            if set.entry.users.insert(member, ()).is_some() {
                return Err(Status::Prior);
            }
            return Ok((*id, false));
        }
        if self.is_full(who.uid) {
            return Err(Status::Full);
        }
        let (owner, group) = (who.uid, who.groups.first().copied().unwrap_or(u32::MAX));
        let entry = Entry { key, owner, group, mode, users: BTreeMap::from([(member, ())]) };
        let in_cluster = who.host != 0;
        let id = self.number();
        self.sets.insert(id, LockEntry { entry, count, held: BTreeMap::new() });
        // (On one host it is taken in memory.)
        if creates && in_cluster {
            self.acquire(member, id, 0, false)?;
        }
        Ok((id, true))
    }

    /// True if nobody uses it any more: it is gone.
    pub fn drop_locks(&mut self, member: u32, id: u32) -> Result<bool, Status> {
        let set = self.sets.get_mut(&id).ok_or(Status::BadLock)?;
        set.entry.users.remove(&member).ok_or(Status::NotAllocated)?;
        give_up(member, id, set, &mut self.changed, None);
        let is_unused = set.entry.users.is_empty();
        if is_unused {
            self.sets.remove(&id);
        }
        Ok(is_unused)
    }

    /// Of all regions: how much this is true of, and the rest.
    fn bytes(&self, is_it: impl Fn(&RegionEntry) -> bool) -> (u64, u64) {
        self.regions.values().fold((0, 0), |(own, others), region| match is_it(region) {
            true => (own + region.bytes, others),
            false => (own, others + region.bytes),
        })
    }

    /// What a user may have of a space of which others have so much. Of several users no one but root may have more than half of what the others have
    /// left: so there is always something left for one more.
    fn most(&self, space: u64, uid: u32, others: u64) -> u64 {
        let left = space.saturating_sub(others);
        if self.bounds.is_shared && uid != 0 { left / 2 } else { left }
    }

    /// For one more of this user's.
    fn is_full(&self, uid: u32) -> bool {
        let regions = self.regions.values().map(|region| region.entry.owner);
        let owners = regions.chain(self.sets.values().map(|set| set.entry.owner));
        let (all, own) =
            owners.fold((0, 0), |(all, own), owner| (all + 1, own + usize::from(owner == uid)));
        all >= self.bounds.made_most
            || (self.bounds.is_shared && uid != 0 && own >= self.bounds.made_most / SHARE_OF_A_USER)
    }

    /// Does it use anything?
    pub fn has(&self, member: u32) -> bool {
        let regions = self.regions.values().any(|region| region.entry.users.contains_key(&member));
        regions || self.sets.values().any(|set| set.entry.users.contains_key(&member))
    }

    /// A process has gone.
    pub fn leave(&mut self, member: u32) -> Unused {
        self.members.remove(&member);
        for region in self.regions.values_mut() {
            region.entry.users.remove(&member);
            region.forget_first();
        }
        for (id, set) in &mut self.sets {
            if set.entry.users.remove(&member).is_some() {
                give_up(member, *id, set, &mut self.changed, None);
            }
        }
        let mut unused = Unused::default();
        self.regions
            .retain(|id, region| keep(*id, region.entry.users.is_empty(), &mut unused.regions));
        self.sets.retain(|id, set| keep(*id, set.entry.users.is_empty(), &mut unused.sets));
        unused
    }
}

/// One lock, or all that it has or waits for, is the next one's.
fn give_up(
    member: u32,
    id: u32,
    set: &mut LockEntry,
    changed: &mut Vec<(u32, u32)>,
    only: Option<u32>,
) {
    set.held.retain(|lock, held| {
        if only.is_some_and(|only| only != *lock) {
            return true;
        }
        held.waiting.retain(|each| *each != member);
        if held.holder != member {
            return true;
        }
        changed.push((id, *lock));
        let next = held.waiting.pop_front();
        held.holder = next.unwrap_or(member);
        next.is_some()
    });
}

fn keep(id: u32, is_unused: bool, unused: &mut Vec<u32>) -> bool {
    if is_unused {
        unused.push(id);
    }
    !is_unused
}

impl RegionEntry {
    /// That host has gone, or can't have all of it. True if nobody has all of it any more.
    fn forget_host(&mut self, host: u32) -> bool {
        self.filling.remove(&host);
        let is_last = self.holders.remove(&host) && self.holders.is_empty();
        self.incomplete |= is_last;
        is_last
    }

    /// Does another host lack what that one could still give it?
    pub fn is_needed_of(&self, host: u32) -> bool {
        self.holders.contains(&host) && !self.filling.is_empty()
    }

    pub fn is_received(&self, host: u32) -> bool {
        self.entry.users.values().any(|each| each.host == host && each.receives)
    }

    /// Is what that host writes seen there too? (Nothing is said where nobody transmits to all.)
    pub fn loopback(&self, host: u32) -> Option<bool> {
        self.first.get(&host).and_then(|first| first.loopback)
    }

    /// What the first one has said holds as long as somebody of its host is attached; of loopback, as long as somebody there transmits.
    fn forget_first(&mut self) {
        let users = &self.entry.users;
        self.first.retain(|host, first| {
            let mut here = users.values().filter(|each| each.host == *host && each.any());
            if !here.clone().any(|each| each.transmits && each.only.is_none()) {
                first.loopback = None;
            }
            here.next().is_some()
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Act {
        Join(u32),
        Allocate(usize, u64, u64),
        Attach(usize, usize, bool, bool),
        Detach(usize, usize, bool),
        Deallocate(usize, usize),
        Locks(usize, u64, bool),
        DropLocks(usize, usize),
        Leave(usize),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let who = || 0..4usize;
        let act = prop_oneof![
            (1..4u32).prop_map(Act::Join),
            (who(), 0..3u64, 1..3u64).prop_map(|(who, key, pages)| Act::Allocate(who, key, pages)),
            (who(), who(), any::<bool>(), any::<bool>())
                .prop_map(|(who, which, sends, way)| Act::Attach(who, which, sends, way)),
            (who(), who(), any::<bool>())
                .prop_map(|(who, which, sends)| Act::Detach(who, which, sends)),
            (who(), who()).prop_map(|(who, which)| Act::Deallocate(who, which)),
            (who(), 0..3u64, any::<bool>())
                .prop_map(|(who, key, creates)| Act::Locks(who, key, creates)),
            (who(), who()).prop_map(|(who, which)| Act::DropLocks(who, which)),
            who().prop_map(Act::Leave),
        ];
        prop::collection::vec(act, 0..120)
    }

    /// One line for each fact: who has what, and how.
    #[derive(Default)]
    struct Model {
        /// Member and user.
        members: Vec<(u32, u32)>,
        /// Number, key, pages, owner.
        regions: Vec<(u32, u64, u64, u32)>,
        /// Member, region.
        uses: Vec<(u32, u32)>,
        /// Member, region, transmits; what it said (shared; of loopback, who transmits).
        attached: Vec<(u32, u32, bool, bool)>,
        sets: Vec<(u32, u64, u32)>,
        set_uses: Vec<(u32, u32)>,
    }

    const PAGES_MOST: u64 = 10;
    const RECEIVED_MOST: u64 = 6;

    impl Model {
        fn pages(&self, of: impl Fn(u32) -> bool) -> u64 {
            self.regions.iter().filter(|each| of(each.0)).map(|each| each.2).sum()
        }

        /// Of what other users leave, half is for one user.
        fn has_no_room(&self, uid: u32, pages: u64) -> bool {
            let of = |own: bool| {
                let regions = self.regions.iter().filter(|each| (each.3 == uid) == own);
                regions.map(|each| each.2).sum::<u64>()
            };
            2 * (of(true) + pages) > PAGES_MOST - of(false)
        }

        fn allocate(&self, (member, uid): (u32, u32), key: u64, pages: u64) -> Result<(), Status> {
            match self.regions.iter().find(|each| each.1 == key) {
                Some((id, ..)) if self.uses.contains(&(member, *id)) => Err(Status::Prior),
                Some((_, _, had, _)) if *had != pages => Err(Status::BadSize),
                None if self.has_no_room(uid, pages) => Err(Status::Full),
                _ => Ok(()),
            }
        }

        fn attach(&self, who: (u32, u32), id: u32, sends: bool, way: bool) -> Result<(), Status> {
            let (member, uid) = who;
            let Some(region) = self.regions.iter().find(|each| each.0 == id) else {
                return Err(Status::BadRegion);
            };
            if !self.uses.contains(&(member, id)) {
                return Err(Status::NotAllocated);
            }
            let mut of: Vec<_> = self.attached.iter().filter(|each| each.1 == id).collect();
            if of.iter().any(|each| each.0 == member && each.2 == sends) {
                let is = [Status::ReceiveAttached, Status::TransmitAttached];
                return Err(is[usize::from(sends)]);
            }
            if sends && uid != region.3 {
                return Err(Status::Denied);
            }
            let receives = |id| self.attached.iter().any(|each| each.1 == id && !each.2);
            let is_user = |member| self.members.contains(&(member, uid));
            let own =
                |id| self.attached.iter().any(|each| each.1 == id && !each.2 && is_user(each.0));
            let others = self.pages(receives) - self.pages(own);
            let has_room = 2 * (self.pages(own) + region.2) <= RECEIVED_MOST - others;
            of.retain(|each| each.2);
            match of.first() {
                Some(first) if sends && first.3 != way => Err(Status::OtherLoopback),
                _ if !sends && !receives(id) && !has_room => Err(Status::ReceiveFull),
                _ => Ok(()),
            }
        }

        /// What nobody uses goes.
        fn sweep(&mut self) {
            self.regions.retain(|each| self.uses.iter().any(|has| has.1 == each.0));
            self.sets.retain(|each| self.set_uses.iter().any(|has| has.1 == each.0));
        }
    }

    fn is_same(registry: &Registry, model: &Model) {
        let regions: Vec<_> = registry.regions.iter().collect();
        assert_eq!(regions.len(), model.regions.len());
        for (id, region) in regions {
            let uses = region.entry.users.iter();
            let mut said: Vec<_> = uses.clone().map(|(member, _)| (*member, *id)).collect();
            let mut had: Vec<_> = model.uses.iter().filter(|has| has.1 == *id).copied().collect();
            said.sort();
            had.sort();
            assert_eq!(said, had);
            let attached: usize = uses
                .map(|(_, each)| usize::from(each.transmits) + usize::from(each.receives))
                .sum();
            assert_eq!(attached, model.attached.iter().filter(|each| each.1 == *id).count());
        }
        let users = registry.sets.values().map(|set| set.entry.users.len()).sum::<usize>();
        assert_eq!((registry.sets.len(), users), (model.sets.len(), model.set_uses.len()));
    }

    fn user(uid: u32) -> Member {
        Member { host: 0, pid: 1, uid, groups: vec![uid] }
    }

    fn with(made_most: usize, is_shared: bool) -> Registry {
        let limits = Limits { all: 1 << 30, received: 1 << 30 };
        Registry::new(Bounds { limits, made_most, is_shared })
    }

    #[test]
    fn numbers_come_again_when_all_were_used_but_for_those_that_are_there() {
        let mut registry = with(100, true);
        let first = registry.join(user(1));
        let (region, _) = registry.allocate(first, 1, 1, &Permission::default()).unwrap();
        let (set, _) = registry.locks(first, 1, 1, 0o600, false).unwrap();
        assert_eq!((first, region, set), (1, 2, 3));
        registry.next = LAST_NUMBER - 1;
        let host = registry.enter("host", 1, true);
        let more: Vec<_> = (0..3).map(|_| registry.join(user(1))).collect();
        assert_eq!((host, &more[..]), (LAST_NUMBER - 1, &[LAST_NUMBER, 4, 5][..]));
        registry.next = LAST_NUMBER - 1;
        assert_eq!([registry.enter("other", 1, true), registry.join(user(1))], [6, 7]);
        const { assert!(ringlet_core::reflect::LAST_HOLDER >= LAST_NUMBER) };
        // What has gone just now is not the next one.
        registry.leave(7);
        assert_eq!(registry.join(user(1)), 8);
    }

    #[test]
    fn no_user_but_root_takes_all_that_can_be_made() {
        for (uid, is_shared, most) in [(7, true, 10), (7, false, 40), (0, true, 40)] {
            let mut registry = with(40, is_shared);
            let member = registry.join(user(uid));
            let made = (0..100).take_while(|key| match key % 2 {
                0 => registry.allocate(member, *key, 1, &Permission::default()).is_ok(),
                _ => registry.locks(member, *key, 1, 0o600, false).is_ok(),
            });
            assert_eq!(made.count(), most, "{uid} {is_shared}");
            let other = registry.join(user(8));
            let theirs = registry.allocate(other, 1000, 1, &Permission::default());
            assert_eq!(theirs.is_ok(), most == 10);
        }
    }

    /// What another keeper tells is used as it is told: sizes of memory, and places in it.
    #[test]
    fn a_registry_that_no_acts_make_is_not_sound() {
        let made = || {
            let mut registry = with(40, true);
            registry.enter("host", 1, true);
            let member = registry.join(Member { host: 1, ..user(7) });
            let (region, _) = registry.allocate(member, 1, 1, &Permission::default()).unwrap();
            let (set, _) = registry.locks(member, 1, 2, 0o600, true).unwrap();
            assert!(registry.is_sound());
            (registry, region, set)
        };
        let faults: [fn(&mut RegionEntry); 3] =
            [|it| it.bytes = 0, |it| it.bytes += 1, |it| it.bytes = REGION_BYTES_MOST + 4096];
        for fault in faults {
            let (mut registry, region, _) = made();
            fault(registry.regions.get_mut(&region).unwrap());
            assert!(!registry.is_sound());
        }
        let held = || Held { holder: 1, waiting: VecDeque::new() };
        let faults: [&dyn Fn(&mut LockEntry); 3] =
            [&|it| it.count = 0, &|it| it.count = LOCKS_MOST + 1, &|it| {
                drop(it.held.insert(2, held()))
            }];
        for fault in faults {
            let (mut registry, _, set) = made();
            fault(registry.sets.get_mut(&set).unwrap());
            assert!(!registry.is_sound());
        }
        for next in [0, LAST_NUMBER + 1] {
            let (mut registry, ..) = made();
            registry.next = next;
            assert!(!registry.is_sound());
        }
    }

    #[test]
    fn a_host_has_no_end_of_processes_and_keeps_out_none_of_others() {
        let mut registry = with(40, true);
        let join = super::Act::Join { pid: 1, uid: 7, groups: vec![7] };
        let joined = (0..1 << 16).take_while(|_| registry.apply(1, &join).is_ok()).count();
        assert_eq!(joined, MEMBERS_OF_A_HOST);
        assert_eq!(registry.apply(1, &join), Err(Status::Full));
        assert!(registry.apply(2, &join).is_ok());
        let join = |groups: usize| super::Act::Join { pid: 1, uid: 7, groups: vec![7; groups] };
        assert!(registry.apply(2, &join(GROUPS_MOST)).is_ok());
        assert_eq!(registry.apply(2, &join(GROUPS_MOST + 1)), Err(Status::BadParameter));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]
        /// Whatever programs ask in whatever order: what is answered, and who has what.
        #[test]
        fn registry_does_as_a_plain_list_of_facts(acts in acts()) {
            let page = PAGE_BYTES as u64;
            let limits = Limits { all: PAGES_MOST * page, received: RECEIVED_MOST * page };
            let bounds = Bounds { limits, made_most: usize::MAX, is_shared: true };
            let (mut registry, mut model) = (Registry::new(bounds), Model::default());
            for act in acts {
                let who = |at: usize| model.members.get(at).copied().unwrap_or((9999, 1));
                let region = |at: usize| model.regions.get(at).map_or(8888, |each| each.0);
                let way = |sends| if sends { Direction::Transmit } else { Direction::Receive };
                match act {
                    Act::Join(uid) if model.members.len() < 4 => {
                        let groups = vec![uid];
                        let member = registry.join(Member { host: 0, pid: 1, uid, groups });
                        model.members.push((member, uid));
                    }
                    Act::Join(_) => {}
                    Act::Allocate(at, key, pages) => {
                        let (member, uid) = who(at);
                        let how = Permission { mode: 0o604, coherent: true, rail: 0 };
                        let done = registry.allocate(member, key, pages * page - 1, &how);
                        let expected = match at < model.members.len() {
                            true => model.allocate(who(at), key, pages),
                            false => Err(Status::NotInitialised),
                        };
                        prop_assert_eq!(done.map(drop), expected);
                        if let Ok((id, is_new)) = done {
                            let known = model.regions.iter().find(|each| each.1 == key);
                            prop_assert_eq!(is_new, known.is_none());
                            prop_assert!(known.is_none_or(|known| known.0 == id));
                            if is_new {
                                model.regions.push((id, key, pages, uid));
                            }
                            model.uses.push((member, id));
                        }
                    }
                    Act::Attach(at, which, sends, loopback) if at < model.members.len() => {
                        let (who, id) = (who(at), region(which));
                        let how = Use { shared: true, loopback };
                        let done = registry.attach(who.0, id, way(sends), how, None);
                        prop_assert_eq!(done, model.attach(who, id, sends, loopback));
                        if done.is_ok() {
                            model.attached.push((who.0, id, sends, loopback));
                        }
                    }
                    Act::Attach(..) => {}
                    Act::Detach(at, which, sends) => {
                        let (member, id) = (who(at).0, region(which));
                        let before = model.attached.len();
                        let is_it = |each: &(u32, u32, bool, bool)| {
                            (each.0, each.1, each.2) == (member, id, sends)
                        };
                        model.attached.retain(|each| !is_it(each));
                        let expected = before != model.attached.len();
                        prop_assert_eq!(registry.detach(member, id, way(sends)).is_ok(), expected);
                    }
                    Act::Deallocate(at, which) => {
                        let (member, id) = (who(at).0, region(which));
                        let is_attached =
                            model.attached.iter().any(|each| (each.0, each.1) == (member, id));
                        let has = model.uses.contains(&(member, id));
                        let done = registry.deallocate(member, id);
                        prop_assert_eq!(done.is_ok(), has && !is_attached);
                        if done.is_ok() {
                            model.uses.retain(|each| *each != (member, id));
                            let regions = model.regions.len();
                            model.sweep();
                            prop_assert_eq!(done, Ok(regions != model.regions.len()));
                        }
                    }
                    Act::Locks(at, key, creates) if at < model.members.len() => {
                        let (member, uid) = who(at);
                        let known = model.sets.iter().find(|each| each.1 == key).copied();
                        let done = registry.locks(member, key, 2, 0o600, creates);
                        let expected = match known {
                            Some((_, _, owner)) if owner != uid => Err(Status::Denied),
                            Some(_) if creates => Err(Status::Exists),
                            Some((id, ..)) if model.set_uses.contains(&(member, id)) => {
                                Err(Status::Prior)
                            }
                            _ => Ok(()),
                        };
                        prop_assert_eq!(done.map(drop), expected);
                        if let Ok((id, is_new)) = done {
                            prop_assert_eq!(is_new, known.is_none());
                            if is_new {
                                model.sets.push((id, key, uid));
                            }
                            model.set_uses.push((member, id));
                        }
                    }
                    Act::Locks(..) => {}
                    Act::DropLocks(at, which) => {
                        let member = who(at).0;
                        let id = model.sets.get(which).map_or(8888, |each| each.0);
                        let has = model.set_uses.contains(&(member, id));
                        prop_assert_eq!(registry.drop_locks(member, id).is_ok(), has);
                        model.set_uses.retain(|each| *each != (member, id));
                        model.sweep();
                    }
                    Act::Leave(at) => {
                        let member = who(at).0;
                        let unused = registry.leave(member);
                        let had = (model.regions.len(), model.sets.len());
                        model.members.retain(|each| each.0 != member);
                        model.uses.retain(|each| each.0 != member);
                        model.attached.retain(|each| each.0 != member);
                        model.set_uses.retain(|each| each.0 != member);
                        model.sweep();
                        let gone = (had.0 - model.regions.len(), had.1 - model.sets.len());
                        prop_assert_eq!((unused.regions.len(), unused.sets.len()), gone);
                    }
                }
                is_same(&registry, &model);
            }
        }
    }
}
