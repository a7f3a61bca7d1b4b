//! ringlet's services: sockets today, other faces later.
#![deny(unsafe_code)]

pub mod active_message;
pub mod config;
mod guarded;
mod handshake;
mod lock;
pub mod native;
pub mod plain;
pub mod reasons;
pub mod socket;
pub mod thread;
pub mod waiting;
