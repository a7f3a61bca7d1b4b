//! Berkeley sockets over shared memory, for programs that don't know of it.
//!
//! The edge (the preload library) asks `way` for each call on a descriptor: the kernel's, or ours. `table` knows the descriptors,
//! `meet` brings two ends together (`lives`: when), `transfer` moves bytes, `epoll` and `readiness` wait for many, `process` follows
//! descriptors through close, dup, fork and exec, `control` does what `ringlet off` and `on` ask,
//! `tap` records for `ringlet capture`.

pub mod asked;
mod budget;
pub mod carrier;
mod chaos;
pub mod context;
pub mod control;
pub mod datagram;
mod doorbells;
pub mod epoll;
pub mod family;
pub mod gate;
mod holders;
mod in_use;
mod interrupted;
pub mod jumps;
mod keep;
mod lives;
pub mod meet;
mod meeting;
pub mod memory;
pub mod moving;
mod note;
mod options;
mod pairs;
mod patience;
mod pin;
pub mod process;
pub mod readiness;
mod release;
mod sides;
#[cfg(test)]
mod steps;
pub mod table;
pub mod tap;
pub mod transfer;
pub mod unix;
pub mod view;
mod way;
pub mod words;

pub use keep::{keep_on_kernel, pin};
pub use note::note;
pub use options::{keep_option, kept_option, option_set, set_nonblocking, take_error};
pub use way::{Native, Way, count_call, kernel_writes, path_of, way_in, way_out};

use crate::config::Config;
use crate::waiting::{signals, spin};
use ringlet_linux::map;
use ringlet_linux::sys::Sys;

/// Sets ringlet up in this process.
pub fn start(config: Config) -> Sys<()> {
    chaos::start(config.unforgiving);
    release::start(process::close_orphan);
    spin::start(spin::Outside { load: context::load, tell: view::tell_watched });
    map::together(TABLES_BYTES, || {
        signals::start()?;
        context::start()?;
        if config.udp {
            datagram::start(table::SOCKET_COUNT)?;
        }
        epoll::start()?;
        table::start(config, process::after_fork)
    })
}

/// More than the tables of either kind take.
const TABLES_BYTES: usize = 64 << 20;
