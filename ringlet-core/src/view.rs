//! What a ringlet process shows to `ringlet ss`: a page of its own in a sealed memfd, written by the process. Found as
//! `/proc/PID/fd/N` whose link starts with `/memfd:ringlet-process`, by its own user and by root only; they read it, and may
//! write the words named `asked`, in which `ringlet off` and `ringlet on` say what is to become of a connection.
//!
//! Everything that the kernel knows (addresses, TCP state) is read from the kernel by the inode of `/proc/PID/fd/FD`;
//! a slot holds what only ringlet knows.

use crate::memory::Shared;
use crate::sync::{AtomicI32, AtomicU32, AtomicU64};

/// "ringlet\x02", little endian: the last byte is the version of this layout.
pub const PROCESS_MAGIC: u64 = u64::from_le_bytes(*b"ringlet\x02");
/// Name given to memfd_create.
pub const PROCESS_MEMFD_NAME: &str = "ringlet-process";
/// Slots in a process's view; the file is sparse, so untouched ones cost nothing. Sockets beyond it stay on the kernel.
pub const PROCESS_SLOT_COUNT: usize = 65_536;

/// First 128 bytes of the memfd; `PROCESS_SLOT_COUNT` slots follow.
#[repr(C, align(128))]
pub struct ProcessHeader {
    pub magic: AtomicU64,
    /// The process that writes this page (a child by fork makes its own); pid as in its own namespace.
    pub pid: AtomicU32,
    /// Highest slot number ever used, plus one: readers stop here.
    pub slots_used: AtomicU32,
    /// Sockets on which ringlet gave up for want of a slot, memory or descriptors.
    pub refused: AtomicU64,
    /// `ASKED_*`: for connections that begin from now on, here and in children by fork.
    pub asked: AtomicU32,
    /// Connections ever shown, so that each has a number of its own.
    pub connections: AtomicU64,
    /// Written by `ringlet capture`: a count that grows as long as it lives and is 0 when it ends, and how many bytes of a piece it wants.
    pub tap_beat: AtomicU32,
    pub tap_snaplen: AtomicU32,
    /// How long its waits have watched memory, how many of them ended by it, and how many slept in the end. Added now and then, by each
    /// thread for itself. (0 of a ringlet that does not count them.)
    pub watched_ns: AtomicU64,
    pub watched: AtomicU64,
    pub watched_in_vain: AtomicU64,
}

/// One tracked socket. Written by its process only; each field is read by itself, so a reader may see a mix of two
/// moments, never a torn field.
#[repr(C, align(128))]
pub struct SocketSlot {
    /// `SLOT_FREE`, or one of the `PATH_*` values.
    pub path: AtomicU32,
    /// A `reasons::Reason` as u32: why the connection is (still) on the kernel; 0 when there is nothing to say.
    pub reason: AtomicU32,
    /// Lowest descriptor of this process that names the socket.
    pub fd: AtomicI32,
    /// How often this end slept waiting for its peer and was woken.
    pub wakes: AtomicU32,
    /// How often this end rang its peer's doorbell.
    pub bells: AtomicU32,
    /// Where each direction stands: `directions`.
    pub directions: AtomicU32,
    /// Bytes through the ring since it was moved. Fill of a direction = sender's `tx_bytes` - receiver's `rx_bytes`.
    pub tx_bytes: AtomicU64,
    pub rx_bytes: AtomicU64,
    /// Messages (successful calls) that moved data on this descriptor through ringlet's eyes, ring or kernel.
    pub calls: AtomicU64,
    /// `ASKED_*`, written by others; in the line that every call touches anyway.
    pub asked: AtomicU32,
    /// How often a blocking call found what it waited for by watching memory, without sleep.
    pub spins: AtomicU32,
    /// Which of the process's connections this is: a slot is used again.
    pub number: AtomicU64,
    /// `ADDRESS_*`, noted when the connection is first recorded; then its two ends (an IPv4 one mapped into IPv6) and their ports,
    /// local and remote.
    pub address: AtomicU32,
    pub ports: AtomicU32,
    pub local: [AtomicU64; 2],
    pub remote: [AtomicU64; 2],
    /// Moments, as CLOCK_REALTIME has them: when it was first shown, when it took its present path, when it first came to the ring
    /// (0: never), and when our sending direction last went back to the kernel.
    pub began_ns: AtomicU64,
    pub path_since_ns: AtomicU64,
    pub moved_ns: AtomicU64,
    pub returned_ns: AtomicU64,
    /// Bytes through the kernel: all before it shared a segment, and what ringlet saw there since.
    pub kernel_tx_bytes: AtomicU64,
    pub kernel_rx_bytes: AtomicU64,
    /// Of `calls`, those before it last came to the ring that were not made there; and `calls` when it last came or left.
    pub kernel_calls: AtomicU64,
    pub calls_at_change: AtomicU64,
    /// How often it came to the ring; how often our sending direction went back, why it last did, and how often since the receiver did
    /// not read.
    pub entries: AtomicU32,
    pub returns: AtomicU32,
    pub return_reason: AtomicU32,
    pub overflows: AtomicU32,
}

/// What others ask: keep off the ring (as long as it stands); enter it again, or try again to find the peer (taken back by the
/// process once it has seen it).
pub const ASKED_OFF: u32 = 1;
pub const ASKED_ON: u32 = 2;
/// Record what goes over it (`tap`); recording has ended.
pub const ASKED_TAP: u32 = 4;
pub const ASKED_TAP_END: u32 = 8;
/// What a child by fork, or a later connection, is asked too.
pub const ASKED_INHERITED: u32 = ASKED_OFF | ASKED_TAP;

pub const ADDRESS_TCP: u32 = 1;
pub const ADDRESS_NONE: u32 = 2;

/// `SocketSlot::directions` of a connection that shares a segment with its peer; 0 is no segment. `away`: the process has seen that
/// it is to keep off the ring, and asks its peer the same.
pub const fn directions(sending: u32, receiving: u32, away: bool) -> u32 {
    ATTACHED | (receiving & 0xff) << 8 | sending & 0xff | if away { AWAY } else { 0 }
}

const ATTACHED: u32 = 1 << 16;
const AWAY: u32 = 1 << 17;

pub const fn asks_peer(directions: u32) -> bool {
    directions & AWAY != 0
}

/// Do we send, and do we receive, by the ring (or by a rest of it)?
pub const fn ring_directions(directions: u32) -> (bool, bool) {
    let (sending, receiving) = (directions & 0xff, directions >> 8 & 0xff);
    let attached = directions & ATTACHED != 0;
    (attached && sending == SENDING_RING, attached && receiving == RECEIVING_RING)
}

/// The values of `Sending::Ring` and `Receiving::Ring`.
pub const SENDING_RING: u32 = 1;
pub const RECEIVING_RING: u32 = 2;

pub const SLOT_FREE: u32 = 0;
/// Plain kernel TCP; `reason` says why.
pub const PATH_KERNEL: u32 = 1;
/// The two ends are agreeing on a segment; data still flows through the kernel.
pub const PATH_MOVING: u32 = 2;
/// Data flows through the ring in both directions.
pub const PATH_RING: u32 = 3;

pub const PROCESS_FILE_BYTES: usize =
    size_of::<ProcessHeader>() + PROCESS_SLOT_COUNT * size_of::<SocketSlot>();

// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for ProcessHeader {}
// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for SocketSlot {}

const _: () = assert!(size_of::<ProcessHeader>() == 128);
const _: () = assert!(size_of::<SocketSlot>() == 256);
