//! The exported C symbols that stand in front of libc's: the edge of programs that have a libc. No logic: each is served by the agent
//! (`ringlet_agent`), which says what is passed on.
//!
//! Contract of every function here: that of the libc function of the same name, with the program's own arguments.

#![cfg_attr(panic = "abort", no_std)]
#![allow(clippy::missing_safety_doc)]

mod around;
mod calls;
mod cancellation;
mod descriptors;
mod edge;
mod errno;
mod limits;
mod musl;
mod next;
mod objects;
mod processes;
mod start;
mod uring;
mod waits;
#[cfg(panic = "abort")]
mod without_std;

pub(crate) use errno::set_errno;

// That libc is loaded before us, and under which names and versions its functions are there. (musl takes this name for its own.)
#[link(name = "c")]
unsafe extern "C" {}
