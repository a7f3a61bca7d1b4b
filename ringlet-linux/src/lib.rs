//! System calls, and only system calls: no policy, no state.
#![no_std]

pub mod diag;
pub mod fd;
pub mod futex;
pub mod map;
pub mod meet;
pub mod sys;
pub mod tcp;
pub mod udp;
pub mod unix;
