//! The part of ringlet that makes no system call, reads no clock and starts no thread: layouts, rings and state machines.
#![cfg_attr(not(any(test, loom)), no_std)]

pub mod handover;
pub mod layout;
pub mod memory;
pub mod ring;
pub mod sync;
#[cfg(not(loom))]
pub mod view;
pub mod wait;
