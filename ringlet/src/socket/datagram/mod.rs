//! Datagrams (UDP) between local ends.
//!
//! A socket that receives has a mailbox: one *lane* (a queue in shared memory) from each socket that sends to it much. Its sender has the
//! other end, an outlet. Lanes are found at doors (`door`) while datagrams go through the kernel, which always remains open to them:
//!
//! - **Nobody sleeps on a lane.** Who is about to wait in the kernel, in whatever call, first turns its lanes to the kernel
//!   (`ringlet_core::switch`). What is sent to it then comes through the kernel, and wakes it. So there are no doorbells, the sleeping
//!   call is the program's own, and an end that has gone, or knows nothing of lanes, is simply sent to as ever.
//! - **Order.** Each message of a lane says how many its sender had sent through the kernel before; its receiver counts what came from
//!   there, and takes first what was sent first (`ringlet_core::switch`).
//! - **Room.** What finds its lane full goes through the kernel, which drops it if its buffer is full too.
//! - **What the kernel says counts.** A lane is used from the first datagram on that has come from its sender by the kernel, and its sender
//!   asks the kernel every millisecond whether it would still bring its datagrams to that socket.
//!
//! Whoever serves all sockets (fork, close, exit) need not know which these are: what is here does nothing for others.

mod address;
mod asleep;
mod door;
mod inlets;
mod life;
mod outlets;
mod transfer;

pub use asleep::{arm, falls_asleep, is_awake};
pub use door::{move_door, receiving};
pub use life::{
    after_fork, at_exit, bar, before_fork, begin, close_inlets, connected, look_anew, option_set,
    part, part_all, path, release, shown_path,
};
pub use transfer::{
    Kernel, Next, arrivals, arrived, count_in, has_hot_lanes, is_kernels_turn, lanes_mask,
    lanes_ready, next_len, poll_mask, receive, send, sends_by_lanes,
};

use ringlet_linux::sys::Sys;

/// Maps the tables, for so many sockets.
pub fn start(sockets: u32) -> Sys<()> {
    inlets::start(sockets)?;
    outlets::start(sockets)
}
