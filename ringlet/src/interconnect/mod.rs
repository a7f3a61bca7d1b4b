//! What lies between the two ends of a connection: memory that both map, or a segment for each, which an adapter keeps in step.
//!
//! Chosen once for each connection, at its introduction (`socket::meet`), and asked where the two differ: how a segment is had and by whom an end
//! is rung, when the other end has what this one did, and that it is alive. No byte of the program's asks: a send publishes, looks at a flag of
//! whoever it rings, and is done. Over a mirror that is the adapter, which is to each program its local peer (`ringlet_core::mirror`).

pub mod introduction;
pub mod mirrored;
pub mod node;
mod private_copy;
pub mod quiesce;
pub mod sever;

/// See the module's description.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interconnect {
    /// One segment, a sealed memfd.
    Local,
    /// One for each end.
    Mirrored,
}

/// What stands for the number of an adapter where the node service carries: none is called so.
pub const CARRIER: u64 = u64::MAX;

impl Interconnect {
    /// By the adapters' numbers (the key `adapter`; 0 for none) of both ends; `None` if they can't be brought together.
    pub fn agreed(ours: u64, theirs: u64) -> Option<Interconnect> {
        match (ours, ours == theirs) {
            (0, true) => Some(Interconnect::Local),
            (_, true) => Some(Interconnect::Mirrored),
            _ => None,
        }
    }
}
