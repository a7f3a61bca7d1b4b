//! Berkeley sockets over shared memory, for programs that don't know of it.
//!
//! The edge (the preload library) asks `way` for each call on a descriptor: the kernel's, or ours. `table` knows the descriptors,
//! `meet` brings two ends together (`lives`: when), `transfer` moves bytes, `epoll` and `readiness` wait for many, `process` follows
//! descriptors through close, dup, fork and exec, `control` does what `ringlet off` and `on` ask,
//! `tap` records for `ringlet capture`.

pub mod address_space;
mod again;
pub mod asked;
mod boards;
mod budget;
pub(crate) mod bypass;
pub mod carrier;
mod channel;
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
mod lease;
mod lives;
pub mod meet;
mod meeting;
pub mod memory;
pub mod moving;
mod note;
mod options;
mod orphan;
mod pairs;
mod patience;
mod pin;
pub mod process;
pub mod readiness;
mod release;
pub mod rest;
pub mod rings;
mod sides;
mod stalls;
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

use crate::config::{Config, SpinPolicy};
use crate::once::Once;
use crate::waiting::spin;
use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::map;
use ringlet_linux::sys::{self, Sys};

/// Sets ringlet up in this process, when it makes its first socket or set. `begun` is called then, or told that there is no memory.
pub fn start_when_needed(config: Config, begun: fn(&Config, Sys<()>)) {
    if START.set(Start { config, begun }) {
        table::begin_with(begin);
    }
}

struct Start {
    config: Config,
    begun: fn(&Config, Sys<()>),
}

static START: Once<Start> = Once::new();
/// Whether it has begun: not yet, a thread is at it, or once and for all.
static BEGUN: AtomicU32 = AtomicU32::new(0);
/// Other threads wait for no longer than this.
const LOOKS: usize = 10_000;

#[cold]
fn begin() {
    let Some(start) = START.get() else { return };
    // (The tables of a vfork child would be its parent's, with the child's number.)
    if process::borrowed() {
        return;
    }
    // ORDER: Acquire; pairs with the store of `begin`.
    match BEGUN.compare_exchange(0, 1, Ordering::Acquire, Ordering::Acquire) {
        Ok(_) => {
            // Under a tighter limit the tables and segments would take what the program needs.
            if sys::address_space_limit() >= ADDRESS_SPACE_MIN_BYTES {
                (start.begun)(&start.config, self::start(start.config));
            }
            // ORDER: Release; pairs with the looks of `begin`.
            BEGUN.store(2, Ordering::Release);
        }
        // (A handler that has interrupted that thread gives up, and so does a child in which that thread is not: the socket is the kernel's.)
        Err(1) => {
            let is_done = |_| {
                core::hint::spin_loop();
                // ORDER: Acquire; pairs with the store of `begin`.
                BEGUN.load(Ordering::Acquire) != 1
            };
            if !(0..LOOKS).any(is_done) {
                BEGUN.store(2, Ordering::Relaxed);
            }
        }
        Err(_) => {}
    }
}

/// Under a tighter RLIMIT_AS ringlet stays off.
const ADDRESS_SPACE_MIN_BYTES: u64 = 1 << 30;

/// Sets ringlet up now.
pub fn start(config: Config) -> Sys<()> {
    chaos::start(config.unforgiving);
    release::start(process::close_orphan);
    rings::start(process::uses_io_uring);
    spin::start(spin::Outside {
        load: context::load,
        tell: view::tell_watched,
        for_latency: config.spin == SpinPolicy::Latency,
    });
    let tables = map::together(TABLES_BYTES, || {
        context::start()?;
        if config.udp {
            datagram::start(table::SOCKET_COUNT)?;
        }
        epoll::start()?;
        let tables = table::Tables::map(config, process::after_fork)?;
        // (Last: few processes touch it.)
        boards::start()?;
        Ok(tables)
    })?;
    // Last: other threads use them from here on, and what they put there before the family's part is known (`map::share`) would be lost.
    table::publish(tables);
    Ok(())
}

/// More than the tables of either kind take.
const TABLES_BYTES: usize = 72 << 20;
