//! The part of ringlet that makes no system call, reads no clock and starts no thread: layouts, rings and state machines.
#![cfg_attr(not(any(test, loom)), no_std)]

#[cfg(not(loom))]
pub mod active;
pub mod bells;
pub mod course;
pub mod handover;
pub mod layout;
pub mod leaving;
pub mod locked;
pub mod mailbox;
#[cfg(not(loom))]
pub mod mapped;
pub mod memory;
pub mod mirror;
pub mod queue;
pub mod ready;
pub mod record;
pub mod reflect;
pub mod ring;
pub mod switch;
pub mod sync;
#[cfg(not(loom))]
pub mod tap;
#[cfg(not(loom))]
pub mod view;
pub mod wait;
pub mod watch;
