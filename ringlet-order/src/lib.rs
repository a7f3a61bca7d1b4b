//! One order for all: what each node of a cluster submits is delivered at every node in the same order, whatever is lost, comes late or twice, and
//! whichever nodes die. No system call is made here, and no clock is read: who owns an [`Order`] brings both.

mod api;
mod ballot;
mod change;
mod flow;
mod log;
mod order;
mod parcel;
mod view;
mod wire;

pub use api::{FRAME_BYTES, Life, NotTaken, Output, PAYLOAD_BYTES, Settings, View};
pub use bytes::Bytes;
pub use log::{WINDOW_BYTES, WINDOW_COUNT};
pub use order::Order;
pub use parcel::Parcel;
pub use wire::{MEMBERS, NAME_BYTES, VERSION};

/// The run that has kept this (`Output::Keep`), or why it can't be read.
pub fn kept_by(kept: &[u8]) -> Result<u64, &'static str> {
    wire::read_kept(kept).map(|(incarnation, _)| incarnation)
}
