//! A stream between a reader and the server, beside their regions: by it go requests and answers, in the same slots and with the same numbers.
//!
//! ```text
//!   Asks ── hello, requests, what it writes ──> Link ── the server
//!        <── welcome, answers, what it reads ──
//! ```
//!
//! Whichever of both ways a request goes, its slot has one at a time. When a stream breaks, its reader asks again by the regions, for what was not
//! answered, with the same numbers, and says which stream has ended (`over`). The server ends that one, waits until nothing of it is under way, and knows of
//! each slot what it has done last: so what changes the disk is done once.

mod asks;
mod serves;
mod wire;

pub use asks::{Asks, Broken, HOLD, Waited};
pub use serves::{Ended, Fence, Link, Pending, meet, serve};
pub use wire::{Asked, HELLO_BYTES, Hello};
#[cfg(test)]
pub use wire::{Head, WELCOME_BYTES, welcome};
