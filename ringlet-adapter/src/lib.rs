//! What keeps the two segments of a connection in step, as a card in each host would (`ringlet_core::mirror` has what crosses and in which order).
//!
//! [`Link`] is one connection: two segments and what is between them. It makes no system call and waits for nobody; what it has to ring it
//! asks of its [`Bells`]. [`Adapter`] serves many links with one thread: it passes over those that are busy, and sleeps when none is.
#![deny(unsafe_code)]

mod adapter;
mod fabric;
mod half;
mod lane;
mod link;
mod trunk;
mod wire;

pub use adapter::{Adapter, Both, Serve, Server, Wakes};
pub use half::{Back, Half, Operation, Rings, Segment, Way};
pub use lane::{Lane, WakesOne};
pub use link::{Bells, Link, Progress};
pub use trunk::{Event, LaneName, Trunk};
