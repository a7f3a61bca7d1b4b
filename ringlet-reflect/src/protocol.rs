//! What programs and their host's keeper say: one question, one answer, as JSON in packets of a Unix socket, with descriptors.

use serde::{Deserialize, Serialize};

use crate::registry::{Direction, Permission, Use};
use crate::status::Status;

pub const VERSION: u32 = 1;
/// Of a question. (An answer has `State`, which may be long.)
pub const ASK_BYTES: usize = 1024;
pub const ANSWER_BYTES: usize = 128 << 10;

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
    State,
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// With what all hosts and rails are doing.
    Welcome {
        member: u32,
        barriers: bool,
    },
    Region {
        id: u32,
        bytes: u64,
    },
    /// With it, its changes, and for who transmits wishes.
    Memory {
        bytes: u64,
    },
    /// With its words.
    Locks {
        id: u32,
        count: usize,
    },
    Done,
    State(Box<State>),
    No(Status),
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
}

#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct MemberState {
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
}
