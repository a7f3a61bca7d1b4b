//! Reflective memory, as DEC's Memory Channel had it (Gillett, IEEE Micro 1996): a store into a page is seen by all who receive that page, in one order
//! for all; locks that all share, released when their holder dies; and a count of errors to be looked at behind what was written.
//!
//! ```text
//!   program ── Host ──── asks ────> keeper      regions and locks by key, who may use them, who has gone
//!      │                              │
//!      └── Transmitter ── stores ──> memory <── loads ── Receiver ── other programs
//! ```
//!
//! On one host all who use a region map the same memory. A store is a store, the order is the processor's own, and nobody stands between. The
//! *keeper* (`ringlet reflect keep`) only says who may map what: it is started by who needs it first, and ends behind the last.
//!
//! Over several hosts each host's keeper is one of a cluster's ([`keeper::keep_in`]). What is written goes by a log to the keeper, by it into one order of
//! all hosts, and from there into the memory that is received on each. Programs are the same: [`Transmitter::put`] appends to the log; a plain store to
//! [`Transmitter::words`] is trapped, and does so too, in microseconds (on x86-64; elsewhere it faults), where a load from there, or an exchange, faults. A
//! program's own handler of SIGSEGV has to be set before it attaches anything: it is called for what is none of this. A child by fork has to join by itself.
//!
//! ```no_run
//! use ringlet_reflect::{Host, Permission, Use};
//!
//! # fn main() -> Result<(), ringlet_reflect::Status> {
//! let host = Host::open()?;
//! let region = host.allocate(0x7100, 8192, &Permission::default())?;
//! let (transmitter, receiver) = (region.transmit(Use::default())?, region.receive(Use::default())?);
//! transmitter.put(0, b"hello")?;
//! transmitter.notify(0, 5)?;
//! let mut bytes = [0; 5];
//! receiver.get(0, &mut bytes)?;
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod arena;
mod host;
pub mod keeper;
mod lock;
mod log;
mod logged;
mod memory;
mod name;
pub mod network;
mod process;
mod protocol;
mod region;
mod registry;
mod room;
mod sampler;
mod status;
mod trap;

pub use host::{Host, PATH, VARIABLE, bury_at, state_at};
pub use lock::{Locks, Wait};
pub use process::Process;
pub use protocol::page::RAILS_MOST;
pub use protocol::{Cluster, ClusterState, LockState, Made, MemberState, RegionState, State};
pub use region::{Receiver, Region, Transmitter, Watch, copy};
pub use registry::{LOCKS_MOST, Permission, Use};
pub use sampler::{Sample, Sampler};
pub use status::Status;
pub use trap::transmit;

/// What regions are a multiple of.
pub const PAGE_BYTES: usize = 4096;
