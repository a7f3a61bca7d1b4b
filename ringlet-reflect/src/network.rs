//! What carries frames between the keepers of a cluster: the node service has one over its rails, tests have one over sockets.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use crate::arena::{Arena, Batch};
pub use ringlet_order::{Bytes, FRAME_BYTES, Life, Parcel, kept_by};

pub enum Event<'a> {
    /// There is a way to that run of a node: what is sent comes in order from now on, or not at all once it is down.
    Up(Life),
    Down(Life),
    Frame(&'a Life, Bytes),
    /// One of these logical rails has begun or ceased to carry, anywhere that this node knows of.
    Rails {
        active: u32,
        number: u32,
    },
}

pub trait Network {
    fn me(&self) -> &Life;
    /// What was kept last, by this or an earlier run; and keeps it from now on: once this returns it is on stable storage.
    /// Where payloads lie from which it sends without a copy of its own.
    fn arena(&self) -> Option<&Arc<Arena>> {
        None
    }
    fn kept(&self) -> Option<Vec<u8>>;
    fn keep(&mut self, bytes: &[u8]) -> std::io::Result<()>;
    /// At most `FRAME_BYTES`. False if there is no room now (or no way): it is lost, which the order mends.
    fn send(&mut self, to: &Life, frame: &Parcel) -> bool;
    /// Makes progress, and tells what has come, within bounds; never waits. True if it was anything.
    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) -> bool;
    /// Each is readable when there is something to be polled; may be slept on when `may_sleep` says so.
    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>));
    fn may_sleep(&mut self) -> bool;
    /// Where operators read it.
    fn note(&mut self, _text: &str) {}
}
