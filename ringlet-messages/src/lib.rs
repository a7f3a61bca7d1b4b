//! Shared memory for programs that know of it: `native` (channels, mailboxes, regions) and `active_message`. The services of programs
//! that have a libc and Rust's standard library; what serves those that don't know of it (`ringlet`) needs neither.
#![deny(unsafe_code)]

pub mod active_message;
pub mod guarded;
pub mod native;
