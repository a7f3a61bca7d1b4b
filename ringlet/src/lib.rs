//! What serves programs that don't know of it: sockets. It needs no libc but two questions (`getauxval`, `sched_getcpu`), and neither
//! libc's nor Rust's storage for threads (`local`).
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

pub mod config;
pub mod handshake;
pub mod interconnect;
pub mod local;
mod lock;
mod once;
pub mod plain;
pub mod reasons;
pub mod socket;
mod stack;
pub mod thread;
pub mod waiting;
#[cfg(test)]
mod worlds;

/// In tests: something else may happen here (`worlds`).
macro_rules! step {
    () => {
        #[cfg(test)]
        crate::worlds::step();
    };
}
pub(crate) use step;
