//! The part of ringlet that makes no system call, reads no clock and starts no thread: layouts, rings and state machines.
#![cfg_attr(not(test), no_std)]

pub mod sync;
#[cfg(not(loom))]
pub mod view;
