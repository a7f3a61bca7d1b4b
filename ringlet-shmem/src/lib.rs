//! libringlet_shmem: OpenSHMEM 1.5 for C on ringlet's reflective memory. `include/shmem.h` is what programs see; `ringlet shmem` starts them.
//!
//! ```text
//!   program ── put, get, atomics ──> memory of all PEs <── loads ── program
//!      │          (job: one region of the keeper's)            │
//!      └── sleeps on its bell (wait) <──────── rings ──────────┘
//! ```
//!
//! The program vouches for addresses of its own, as in any C library. Those of other PEs' memory are looked at (`Job::remote`).

mod atomic;
mod collective;
mod data;
mod group;
mod heap;
mod job;
mod lock;
mod memory;
mod point;
mod rma;
mod setup;
mod team;
mod types;
mod wait;
