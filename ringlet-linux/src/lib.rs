//! System calls, and only system calls: no policy, no state, but for the threads that `apart` counts. (And ELF, for what is to be found
//! without libc's help.)
#![no_std]

#[cfg(test)]
extern crate std;

pub mod apart;
pub mod bell;
pub mod clock;
pub mod diag;
pub mod elf;
pub mod fd;
pub mod futex;
pub mod locked;
pub mod map;
pub mod mapped;
pub mod meet;
pub mod proof;
pub mod service;
pub mod sys;
pub mod tcp;
pub mod udp;
pub mod unix;
