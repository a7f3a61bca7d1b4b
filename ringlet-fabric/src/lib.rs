//! What carries connections between hosts, for the node service.
//!
//! [`rail`] says what a network gives us; [`memory`] is one within a host, for tests, [`libfabric`] one on real networks. [`Transport`] makes of
//! one or several of them, each of which may fail, an ordered stream of frames and writes between two nodes. [`Node`] has the rails, and the
//! transports that share them.
//!
//! Who owns a [`Node`] polls it, passes each [`Control`] to the other node by a connection that knows who is who, in order, and has the clock: it tries
//! rails again, and gives up one that is silent. [`Node::close`] takes all memory back at once.

mod control;
mod error;
mod frames;
pub mod libfabric;
pub mod memory;
mod node;
pub mod rail;
mod transport;
mod wire;
mod writes;

pub use control::{Control, Granted};
pub use error::Error;
pub use node::{Node, Number, Progress};
pub use transport::{MEMORIES, NotTaken, Told, Transport};
pub use wire::{FRAME_BYTES, WINDOW, WRITES};
pub use writes::{Memory, Receipt, Write};
