//! What programs and their host's keeper say: one question, one answer, as JSON in packets of a Unix socket, with descriptors.

use serde::{Deserialize, Serialize};

use crate::registry::{Direction, Permission, Use};
use crate::status::Status;

pub const VERSION: u32 = 4;
/// Of a question. (An answer has `State`, which may be long.)
pub const ASK_BYTES: usize = 1024;
pub const ANSWER_BYTES: usize = 128 << 10;

/// What a keeper shows all its programs, as words of a page that only it writes.
pub mod page {
    use ringlet_core::sync::Ordering;

    use crate::memory::Mapping;

    pub const BYTES: usize = crate::PAGE_BYTES;
    /// Words 0 to this one, by rail: how many errors there were.
    pub const RAILS_MOST: usize = 4;
    /// Two bits, and above them the number of the last sleep; on a line of their own: each record is behind a look at them.
    pub const STATE: usize = 16;
    pub const ASLEEP: u32 = 1;
    pub const STOPPED: u32 = 2;
    pub const SLEEP: u32 = 4;
    /// How often something has happened to the cluster.
    pub const EVENTS: usize = 32;
    /// How many rails there are, and which of them carry, as bits.
    pub const RAILS: usize = 33;
    pub const ACTIVE: usize = 34;
    /// The keeper's thread, as a robust futex has its owner, on a line of its own: the kernel says there when that has gone (`keeper::end`).
    pub const KEEPER: usize = 48;
    pub const GONE: u32 = 0x4000_0000;

    #[inline]
    pub fn keeper_lives(page: &Mapping) -> bool {
        // ORDER: Relaxed: a flag alone. Another keeper begins behind the end of this one's process, which is behind what the kernel has written there.
        page.word(KEEPER).load(Ordering::Relaxed) & GONE == 0
    }
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Ask {
    Hello {
        version: u32,
    },
    Allocate {
        key: u64,
        bytes: u64,
        how: Permission,
    },
    Attach {
        id: u32,
        direction: Direction,
        how: Use,
        /// The host to which alone it is transmitted.
        only: Option<String>,
    },
    /// Once it is attached: can it be used now?
    Filled {
        id: u32,
        direction: Direction,
    },
    Detach {
        id: u32,
        direction: Direction,
    },
    Deallocate {
        id: u32,
    },
    Locks {
        key: u64,
        count: usize,
        mode: u32,
        creates: bool,
    },
    /// With what it holds of them.
    DropLocks {
        id: u32,
    },
    /// Writes to this page of a region are to be told of, or not any more.
    Watch {
        id: u32,
        page: u32,
        on: bool,
    },
    /// Is this lock's holder there? (If not, the lock is nobody's from now on.)
    Look {
        id: u32,
        lock: u32,
    },
    /// In a cluster: takes this lock, or waits for it.
    Acquire {
        id: u32,
        lock: u32,
        waits: bool,
    },
    /// Waits no longer.
    Cancel {
        id: u32,
        lock: u32,
    },
    Release {
        id: u32,
        lock: u32,
    },
    /// Answered when everybody has what this process has written.
    Settle,
    Cluster,
    /// An operator's word that this host is dead for good.
    Bury {
        node: String,
    },
    State,
    /// To see from outside how much is written there: for who may read it, and makes him no user.
    Sample {
        id: u32,
    },
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// With the page that all programs see; in a cluster with the log of what it transmits, and a bell.
    Welcome {
        member: u32,
        /// Who asks, as the keeper sees him.
        user: u32,
        barriers: bool,
        in_cluster: bool,
    },
    Region {
        id: u32,
        bytes: u64,
        made: Made,
    },
    /// With it, its changes, and for who transmits wishes. (In a cluster who transmits has a log.)
    Memory {
        bytes: u64,
    },
    /// It is attached, and its contents are on their way: so many bytes have come of all that are, which grows as long as any come.
    Filling {
        came: u64,
    },
    /// With its words.
    Locks {
        id: u32,
        count: usize,
        made: Made,
    },
    /// It is its own, or it waits for it.
    Lock {
        is_held: bool,
    },
    Done,
    Cluster(Cluster),
    State(Box<State>),
    No(Status),
}

/// By whom a region or a set of locks was made, and who may use it.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Made {
    pub owner: u32,
    pub mode: u32,
}

/// The hosts among which memory is reflected, and the rails between them.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug, Default)]
pub struct Cluster {
    /// Names. (On one host it is one.)
    pub hosts: Vec<String>,
    /// Logical rails, numbered from 0, and those of them that carry, as bits.
    pub rails: u32,
    pub active: u32,
    /// Why nothing that is written here is received by anybody, until that ends.
    pub stopped: Option<String>,
    /// Which state of the cluster this is, for `Host::wait_event`.
    pub event: u32,
}

/// Of a cluster, for who looks after it.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug, Default)]
pub struct ClusterState {
    pub view: u64,
    /// Who makes the order.
    pub hub: String,
    pub hosts: Vec<String>,
    /// Which run of this host it is.
    pub incarnation: u64,
    pub stopped: Option<String>,
    /// Does it know what was there before it came?
    pub is_inside: bool,
    /// The place in the order up to which this host has all; payloads of its own that were submitted, and that all hosts have.
    pub delivered: u64,
    pub submitted: u64,
    pub settled: u64,
    /// Coherent regions whose contents are on their way.
    pub filling: u32,
    /// (An older keeper does not say this, nor what follows.) Of these: how many bytes have come, and of how many.
    #[serde(default)]
    pub filled_bytes: u64,
    #[serde(default)]
    pub filling_bytes: u64,
    /// Coherent regions of which other hosts lack what this one has: who stops it now may lose that; and of which a part is lost.
    #[serde(default)]
    pub needed: u32,
    #[serde(default)]
    pub incomplete: u32,
    /// It leaves as soon as the others have what it has.
    #[serde(default)]
    pub hands_over: bool,
    /// Nodes that are not heard, each with what is wrong with what it says: as where its version is another one.
    #[serde(default)]
    pub unheard: Vec<(String, String)>,
    pub errors: Vec<u32>,
}

/// What a host has, as `ringlet reflect ls` shows it. (Who asks, and has nothing, is not shown.)
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug, Default)]
pub struct State {
    pub host: String,
    pub allocated: u64,
    pub allocated_most: u64,
    pub received_most: u64,
    pub members: Vec<MemberState>,
    pub regions: Vec<RegionState>,
    pub sets: Vec<LockState>,
    /// There is more than one answer holds.
    pub is_cut: bool,
    /// If it is one of several: then all members, regions and locks are the cluster's.
    pub cluster: Option<ClusterState>,
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct MemberState {
    /// (None if it is not there any more.)
    pub host: Option<String>,
    pub member: u32,
    pub pid: i32,
    pub uid: u32,
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct RegionState {
    pub id: u32,
    pub key: u64,
    pub bytes: u64,
    pub mode: u32,
    pub owner: u32,
    pub coherent: bool,
    /// Members.
    pub users: Vec<u32>,
    pub transmit: Vec<u32>,
    pub receive: Vec<u32>,
    /// Pages that somebody wishes to be told of.
    pub watched: u32,
    /// In a cluster, of a coherent one: hosts that have all of it; hosts whose contents are on their way; and how much of them has come to this one.
    #[serde(default)]
    pub holders: Vec<String>,
    #[serde(default)]
    pub filling: Vec<String>,
    #[serde(default)]
    pub filled_bytes: Option<u64>,
    /// The last host that had all of it has gone before another one had.
    #[serde(default)]
    pub incomplete: bool,
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct LockState {
    pub id: u32,
    pub key: u64,
    pub count: usize,
    pub mode: u32,
    pub owner: u32,
    pub users: Vec<u32>,
    /// Locks that are held, and by whom.
    pub held: Vec<(u32, u32)>,
    /// Locks that somebody sleeps for, or did until just now.
    pub waited: Vec<u32>,
}
