//! Every byte that the two ends of an Active Messages connection share, and the bell page of a process.
//!
//! ```text
//!        0 +---------------------+
//!          | Head                |  written once by the maker
//!     1024 | Side of end 0       |  written by end 0 (its wishes are also taken back by end 1)
//!     2048 | Side of end 1       |
//!     4096 +---------------------+
//!          | slots               |  requests of end 0, replies of end 0, requests of end 1, replies of end 1:
//!          |                     |  DEPTH x 128 B each, written by the end that sends
//!          | buffers             |  the same four, DEPTH x 64 KiB each: bytes that do not fit in a slot
//!          +---------------------+
//! ```
//!
//! A slot is two cache lines: a stamp (its position plus one, so that fresh memory is no message), 24 bytes of head, then the
//! arguments and the bytes that fit. A message of up to eight arguments lies in the first line.

use crate::layout::{LANE_MAX_COUNT, Ready};
use crate::memory::Shared;
use crate::sync::{AtomicU32, AtomicU64};

pub const MAGIC: u64 = u64::from_le_bytes(*b"rngl-am\0");

/// Requests of one end that may be uncompleted.
pub const DEPTH: usize = 64;
pub const SLOT_BYTES: usize = 128;
/// Room for arguments and bytes in a slot.
pub const INLINE_BYTES: usize = SLOT_BYTES - 8 - 24;
/// Most bytes of a message.
pub const BUFFER_BYTES: usize = 64 << 10;

pub const SIDE_OFFSET: usize = 1024;
pub const SIDE_BYTES: usize = 1024;
pub const SLOTS_OFFSET: usize = 4096;
pub const BUFFERS_OFFSET: usize = SLOTS_OFFSET + 4 * DEPTH * SLOT_BYTES;
/// Never touched pages cost nothing.
pub const SEGMENT_BYTES: usize = BUFFERS_OFFSET + 4 * DEPTH * BUFFER_BYTES;

#[repr(C)]
pub struct ConnectionHead {
    pub magic: AtomicU64,
}

/// What one end tells the other. Each line has one writer.
#[repr(C)]
pub struct Side {
    pub watching: Watching,
    pub credit: Credits,
    pub room: Room,
}

#[repr(C, align(128))]
pub struct Watching {
    /// While this end does not watch its queues, who publishes sets its bit in the bell page (`wait::Wish`); and what this end has granted the
    /// peer of the same.
    pub want: AtomicU64,
    pub granted: AtomicU64,
    /// Where that bit is: bundle (high half) and lane (low half). Loaded by the peer, and checked.
    pub bell: AtomicU32,
    /// The generation of this end's segment, if the peer may store there by itself; else 0. A hint.
    pub segment: AtomicU32,
}

#[repr(C, align(128))]
pub struct Credits {
    /// Requests served, and replies taken. Release; pairs with `Memory::credit` (Acquire): their slots may be written again.
    pub taken: [AtomicU64; 2],
}

#[repr(C, align(128))]
pub struct Room {
    /// While this end waits until its requests are served; and what it has granted the peer of the same.
    pub want: AtomicU64,
    pub granted: AtomicU64,
}

/// Bundles of a process, and lists of connections of a bundle.
pub const BUNDLES: usize = 255;
pub const LISTS: usize = 4;
pub const LANES: usize = LISTS * LANE_MAX_COUNT;
pub const BELLS_BYTES: usize = BUNDLES * size_of::<Bell>();

/// How the connections of a bundle say that they have something. Written by all peers of the process: what it says is a hint,
/// and who believes it in vain looks once for nothing.
#[repr(C, align(128))]
pub struct Bell {
    /// Set while somebody sleeps here: the word that it sleeps on (`wait::nap`).
    pub sleep: AtomicU32,
    /// Which connections may have something.
    pub ready: [Ready; LISTS],
}

#[cfg(not(loom))] // whose atomics have other sizes
const _: () =
    assert!(size_of::<Side>() <= SIDE_BYTES && size_of::<ConnectionHead>() <= SIDE_OFFSET);
const _: () = assert!(DEPTH.is_power_of_two() && DEPTH <= 64);

// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for ConnectionHead {}
// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for Side {}
// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for Bell {}
