//! An Ethernet of message queues (ETHOM, Finocchiaro 2009): ports of one host that are on the same named network hand Ethernet frames to each other
//! through shared memory, and a TAP device makes each a network card to Linux.
//!
//! ```text
//!   kernel ── TAP ── Queue ── strand ── Queue ── TAP ── kernel        device, port, strand
//!                      │                  │
//!                    Keeper ── room ── Keeper                         who is there: keeper, room, wire
//! ```
//!
//! **Who owns which memory.** A frame lies in memory that its sender and its receiver map, and nobody else: a *strand* for each pair of ports, of
//! one ring each way. Memory of a receiver's that all senders write would show each sender what the others sent. So no port reads what is not for it;
//! a port that does not take its frames fills its own strands only; and one that scribbles breaks those. (A switch process between would need a copy,
//! and a wake-up, more.) Pages are there once they are used: a pair that only says where it is has five.
//!
//! Another host is a port, too (`span`, `far`): a process that gives frames to the node service's channels (`carried`), or sends them by UDP
//! (`udp`, `pieces`).
//!
//! A network may have a bridge of the kernel's as well (`bridge`), on which devices are that need no more than that (`attached`).
//!
//! A port has one or several queues, each of one thread. A strand belongs to one queue at each end, and so needs no lock.
#![deny(unsafe_code)]

pub mod attached;
pub mod bridge;
mod carried;
mod counters;
pub mod cut;
pub mod device;
pub mod far;
pub mod frame;
mod keeper;
mod links;
mod pieces;
pub mod port;
pub mod room;
pub mod span;
mod strand;
pub mod table;
mod udp;
pub mod vhost;
pub mod wire;

pub use counters::Dropped;
pub use frame::Mac;
pub use port::{Arrived, Ender, Event, Filled, Options, Place, Port, Queue, Refused};
pub use room::Room;
pub use table::Policy;
