//! What keeps the two segments of a connection in step, as a card in each host would (`ringlet_core::mirror` has what crosses and in which order).
//!
//! A [`Half`] is one end of a connection: a program's segment, and the operations by which it and the other half keep in step. It makes no system call
//! and waits for nobody; what it has to ring it asks of its [`Rings`]. A [`Link`] has both halves; a [`Lane`] has one, whose other half is at another node,
//! to which a [`Trunk`] leads (`ringlet_fabric`); a [`Pipe`] has messages for one; [`Hosts`] are two nodes in one process. A [`Server`] serves
//! many of them with one thread: it passes over those that are busy, and sleeps when none is; an [`Adapter`] is one for links.
#![deny(unsafe_code)]

mod adapter;
mod fabric;
mod half;
mod hosts;
mod join;
mod lane;
mod link;
mod memory;
mod pipe;
mod trunk;
mod wire;

pub use adapter::{Adapter, Both, Serve, Server, Wakes, watch_the_crowd};
pub use half::{Back, Half, Operation, Rings, Segment, Way};
pub use hosts::Hosts;
pub use join::join_hosts;
pub use lane::{Lane, WakesOne};
pub use link::{Bells, Link, Progress};
pub use memory::Memory;
pub use pipe::{Failed, PIPE_BYTES, Pipe};
pub use trunk::{Event, LaneName, PIPE_MESSAGES, Trunk};
