//! What a host's keeper knows, and decides: regions and lock sets by their keys, who uses which, and who may. No system call is made here, and no memory
//! is held: each has a number, by which the keeper has it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::PAGE_BYTES;
use crate::status::Status;

/// A region is no larger.
const REGION_BYTES_MOST: u64 = 1 << 34;
/// Locks of a set, at most (`IMC_MAXNUMLOCKS`, which was not published).
pub const LOCKS_MOST: usize = 4096;
/// Regions and sets that one process may use at a time.
const USED_MOST: usize = 1024;
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

/// A process, as the kernel vouches for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    pub pid: i32,
    pub uid: u32,
    pub groups: Vec<u32>,
}

/// What is shared by key: who may use it, and who does.
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

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Attached {
    pub transmits: bool,
    pub receives: bool,
}

impl Attached {
    fn any(self) -> bool {
        self.transmits || self.receives
    }
}

pub struct RegionEntry {
    pub entry: Entry<Attached>,
    pub bytes: u64,
    pub coherent: bool,
    /// As the first one on this host has said that is attached.
    shared: Option<bool>,
    loopback: Option<bool>,
}

pub struct LockEntry {
    pub entry: Entry<()>,
    pub count: usize,
}

/// In bytes: of all regions, and of what this host receives.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub all: u64,
    pub received: u64,
}

pub struct Registry {
    pub limits: Limits,
    pub members: BTreeMap<u32, Member>,
    pub regions: BTreeMap<u32, RegionEntry>,
    pub sets: BTreeMap<u32, LockEntry>,
    next: u32,
}

/// What nobody uses any more, by their numbers.
#[derive(Default, PartialEq, Eq, Debug)]
pub struct Unused {
    pub regions: Vec<u32>,
    pub sets: Vec<u32>,
}

impl Registry {
    pub fn new(limits: Limits) -> Registry {
        let (members, regions, sets) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Registry { limits, members, regions, sets, next: 1 }
    }

    fn number(&mut self) -> Result<u32, Status> {
        // (As wide as a word says who holds a lock. Who makes two thousand millions of anything has it end.)
        let number = self.next;
        self.next = number.checked_add(1).filter(|next| *next < 1 << 30).ok_or(Status::Full)?;
        Ok(number)
    }

    pub fn join(&mut self, who: Member) -> Result<u32, Status> {
        let member = self.number()?;
        self.members.insert(member, who);
        Ok(member)
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
            entry.users.insert(member, Attached::default());
            return Ok((*id, false));
        }
        let had: u64 = self.regions.values().map(|each| each.bytes).sum();
        if had + bytes > self.limits.all {
            return Err(Status::Full);
        }
        let (owner, group) = (who.uid, who.groups.first().copied().unwrap_or(u32::MAX));
        let users = BTreeMap::from([(member, Attached::default())]);
        let entry = Entry { key, owner, group, mode: how.mode, users };
        let coherent = how.coherent;
        let id = self.number()?;
        self.regions
            .insert(id, RegionEntry { entry, bytes, coherent, shared: None, loopback: None });
        Ok((id, true))
    }

    pub fn attach(
        &mut self,
        member: u32,
        id: u32,
        direction: Direction,
        how: Use,
    ) -> Result<(), Status> {
        let who = self.members.get(&member).ok_or(Status::NotInitialised)?;
        let received: u64 =
            self.regions.values().filter(|each| each.is_received()).map(|each| each.bytes).sum();
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
        let others = region.entry.users.iter().any(|(other, each)| *other != member && each.any());
        match region.shared {
            Some(true) if !how.shared => return Err(Status::Shared),
            Some(false) if how.shared || others => return Err(Status::NonShared),
            _ => {}
        }
        let transmits = direction == Direction::Transmit;
        if transmits && region.loopback.is_some_and(|loopback| loopback != how.loopback) {
            return Err(Status::OtherLoopback);
        }
        if !transmits && !region.is_received() && received + region.bytes > self.limits.received {
            return Err(Status::ReceiveFull);
        }
        region.shared = Some(how.shared);
        if transmits {
            region.loopback = Some(how.loopback);
        }
        let attached = region.entry.users.entry(member).or_default();
        match direction {
            Direction::Transmit => attached.transmits = true,
            Direction::Receive => attached.receives = true,
        }
        Ok(())
    }

    pub fn detach(&mut self, member: u32, id: u32) -> Result<(), Status> {
        let region = self.regions.get_mut(&id).ok_or(Status::BadRegion)?;
        let attached = region.entry.users.get_mut(&member).filter(|each| each.any());
        *attached.ok_or(Status::BadRegion)? = Attached::default();
        region.forget_first();
        Ok(())
    }

    /// What `attach` has said was not done.
    pub fn unattach(&mut self, member: u32, id: u32, direction: Direction) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        if let Some(attached) = region.entry.users.get_mut(&member) {
            match direction {
                Direction::Transmit => attached.transmits = false,
                Direction::Receive => attached.receives = false,
            }
        }
        region.forget_first();
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
        let (owner, group) = (who.uid, who.groups.first().copied().unwrap_or(u32::MAX));
        let entry = Entry { key, owner, group, mode, users: BTreeMap::from([(member, ())]) };
        let id = self.number()?;
        self.sets.insert(id, LockEntry { entry, count });
        Ok((id, true))
    }

    /// True if nobody uses it any more: it is gone.
    pub fn drop_locks(&mut self, member: u32, id: u32) -> Result<bool, Status> {
        let set = self.sets.get_mut(&id).ok_or(Status::BadLock)?;
        set.entry.users.remove(&member).ok_or(Status::NotAllocated)?;
        let is_unused = set.entry.users.is_empty();
        if is_unused {
            self.sets.remove(&id);
        }
        Ok(is_unused)
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
        for set in self.sets.values_mut() {
            set.entry.users.remove(&member);
        }
        let mut unused = Unused::default();
        self.regions
            .retain(|id, region| keep(*id, region.entry.users.is_empty(), &mut unused.regions));
        self.sets.retain(|id, set| keep(*id, set.entry.users.is_empty(), &mut unused.sets));
        unused
    }
}

fn keep(id: u32, is_unused: bool, unused: &mut Vec<u32>) -> bool {
    if is_unused {
        unused.push(id);
    }
    !is_unused
}

impl RegionEntry {
    fn is_received(&self) -> bool {
        self.entry.users.values().any(|each| each.receives)
    }

    /// What the first one has said holds as long as somebody is attached; of loopback, as long as somebody transmits.
    fn forget_first(&mut self) {
        let users = &self.entry.users;
        if !users.values().any(|each| each.any()) {
            self.shared = None;
        }
        if !users.values().any(|each| each.transmits) {
            self.loopback = None;
        }
    }
}
