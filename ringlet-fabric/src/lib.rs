//! What carries connections between hosts, for the node service.
//!
//! [`rail`] says what a network gives us; [`memory`] is one within a host, for tests. [`transport`] makes of one or several of them, each of
//! which may fail, an ordered stream of frames and writes between two nodes.

pub mod memory;
pub mod rail;
