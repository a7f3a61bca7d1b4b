//! What the owner gives and gets.

use std::time::Duration;

use bytes::Bytes;

use crate::parcel::Parcel;

/// One run of a node: its name, and a number that grows with each run. A run that was declared dead never comes back; the node does, as another one.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Life {
    pub node: String,
    pub incarnation: u64,
}

/// Who belongs to it, from a place in the order on. The first one is the hub, which makes the order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    pub number: u64,
    pub members: Vec<Life>,
}

pub struct Settings {
    pub me: Life,
    /// Names, the same in all nodes: who may begin a cluster. The first one decides where half of them are there.
    pub founders: Vec<String>,
    /// A node of which nothing was heard for so long is dead.
    pub silent: Duration,
    pub beat: Duration,
}

/// The most that one payload has.
pub const PAYLOAD_BYTES: usize = 66 << 10;
/// The most that a frame to another node has.
pub const FRAME_BYTES: usize = 68 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotTaken {
    /// Too much is under way: after the next deliveries there is room.
    Full,
    /// This node belongs to no view that goes on: it can't reach enough others.
    Stopped,
    TooLong,
}

/// What the owner is to do, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// To stable storage, before anything that comes behind it is done. It replaces what was kept before.
    Keep(Vec<u8>),
    /// To that node, if there is a way; it may be lost, doubled or late.
    Send { to: Life, frame: Parcel },
    /// The next of the one order. `number` is what `submit` has returned at its origin (1 for its first, then one more each).
    Deliver { sequence: u64, origin: Life, number: u64, payload: Bytes },
    /// From this place in the order on these are the members. All that others of the last view have written, and is not delivered by now, never is.
    /// One that has `joined` knows nothing of what was delivered before: the hub's owner passes its state on.
    View { sequence: u64, view: View, joined: Vec<Life>, left: Vec<Life> },
    /// All members have delivered everything up to this one.
    Stable { sequence: u64 },
    /// Nothing is delivered from now on, until `View`; or for good, if `Order::is_over`: then only another run of the node is of use. Why is to be read.
    Stopped { why: String },
}
