//! What a process records while it is captured (`ringlet capture`): a queue of fixed cells in a sealed memfd of its own, which the
//! command finds and maps as it does the process's page (`view`).
//!
//! Many threads write, one command reads. A writer claims places by moving `head` on, fills its cells, and publishes each by the number
//! of its place; it never waits, and what finds no room is counted. The reader gives places back by `tail`. A cell whose writer
//! never finished is retired by the reader: nobody uses it again, unless that writer comes back.

use crate::memory::{Area, Shared};
use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// "rngltap\x01", little endian: the last byte is the version of this layout.
pub const TAP_MAGIC: u64 = u64::from_le_bytes(*b"rngltap\x01");
/// Name given to memfd_create.
pub const TAP_MEMFD_NAME: &core::ffi::CStr = c"ringlet-tap";
pub const CELL_COUNT: u64 = 16_384;
pub const CELL_BYTES: usize = 1024;
/// Bytes of the stream in one cell.
pub const CELL_DATA_BYTES: usize = CELL_BYTES - CELL_HEAD_BYTES;
/// One piece of a stream tells of at most so many bytes, so that it fits in an IP packet.
pub const PIECE_MAX_BYTES: usize = 32 << 10;
/// A datagram is one piece.
pub const DATAGRAM_MAX_BYTES: usize = 65_507;
const CELL_HEAD_BYTES: usize = 128;
pub const TAP_HEAD_BYTES: usize = 4096;
pub const TAP_FILE_BYTES: usize = TAP_HEAD_BYTES + CELL_COUNT as usize * CELL_BYTES;
/// Writers that race for a place give way after so many attempts: to them the tap is full.
const CLAIM_ATTEMPTS: u32 = 64;

#[repr(C, align(128))]
pub struct TapHead {
    pub magic: AtomicU64,
    /// The process that writes it, as in its own namespace.
    pub pid: AtomicU32,
    /// Places claimed so far.
    head: AtomicU64,
    /// Pieces that found no room.
    pub dropped: AtomicU64,
    reader: Reader,
}

#[repr(C, align(128))]
struct Reader {
    /// Places given back so far.
    tail: AtomicU64,
}

/// The head of a cell; `CELL_DATA_BYTES` of the stream follow.
#[repr(C, align(128))]
pub struct Cell {
    /// Place + 1, stored last; `RETIRED` when the reader gave it up.
    state: AtomicU64,
    /// CLOCK_REALTIME.
    pub time_ns: AtomicU64,
    /// `SocketSlot::number` of the connection.
    pub connection: AtomicU64,
    /// Bytes of this direction before the piece, and of the other one by then, since recording began.
    pub before: AtomicU64,
    pub other: AtomicU64,
    /// Bytes that the piece tells of, and those of them that were kept.
    pub len: AtomicU32,
    pub kept: AtomicU32,
    /// Bytes of it in the cells before this one.
    pub at: AtomicU32,
    /// `PIECE_*`.
    pub flags: AtomicU32,
    pub fd: AtomicI32,
    pub ports: AtomicU32,
    /// Local and remote address, as IPv6 has them; zero if they are none.
    pub local: [AtomicU64; 2],
    pub remote: [AtomicU64; 2],
}

/// The process received it (else it sent it).
pub const PIECE_RECEIVED: u32 = 1;
/// It went through the kernel.
pub const PIECE_BY_KERNEL: u32 = 2;
/// The last piece of a call.
pub const PIECE_LAST: u32 = 4;
/// It is a datagram.
pub const PIECE_DATAGRAM: u32 = 8;

const RETIRED: u64 = u64::MAX;

const _: () = assert!(size_of::<TapHead>() <= TAP_HEAD_BYTES);
const _: () = assert!(size_of::<Cell>() == CELL_HEAD_BYTES);
const _: () = assert!((DATAGRAM_MAX_BYTES / CELL_DATA_BYTES + 1) < CELL_COUNT as usize / 4);

// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for TapHead {}
// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for Cell {}

/// What the reader finds at a place.
pub enum Found<'a> {
    /// Nothing was claimed yet.
    Nothing,
    /// Claimed, and being written.
    Unfinished,
    /// Given up.
    Lost,
    /// More was claimed than there is room for: no sane writer does.
    Astray,
    Piece(&'a Cell),
}

/// The mapped memfd, of `TAP_FILE_BYTES`.
#[derive(Clone, Copy)]
pub struct Tap(pub Area);

impl Tap {
    pub fn head(&self) -> &TapHead {
        self.0.at(0)
    }

    fn offset(place: u64) -> usize {
        TAP_HEAD_BYTES + (place % CELL_COUNT) as usize * CELL_BYTES
    }

    pub fn cell(&self, place: u64) -> &Cell {
        self.0.at(Tap::offset(place))
    }

    /// The first of `count` places in a row; None, and counted, when there is no room.
    pub fn claim(&self, count: u64) -> Option<u64> {
        let head = self.head();
        let mut at = head.head.load(Ordering::Relaxed);
        for _ in 0..CLAIM_ATTEMPTS {
            // ORDER: Acquire; pairs with `give_back`: the reader is done with what we may now overwrite.
            let tail = head.reader.tail.load(Ordering::Acquire);
            if at.wrapping_sub(tail) > CELL_COUNT - count {
                break;
            }
            match head.head.compare_exchange_weak(
                at,
                at.wrapping_add(count),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(at),
                Err(now) => at = now,
            }
        }
        head.dropped.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// May the claimed place be written? Not if the reader has retired it.
    pub fn is_usable(&self, place: u64) -> bool {
        self.cell(place).state.load(Ordering::Relaxed) != RETIRED
    }

    /// Copies bytes of the stream into a claimed cell.
    ///
    /// # Safety
    /// `from` is valid for reading `n` bytes.
    pub unsafe fn write(&self, place: u64, at: usize, from: *const u8, n: usize) {
        let n = n.min(CELL_DATA_BYTES.saturating_sub(at));
        // SAFETY: `from` is valid for `n` bytes by our own contract; the target lies within the cell.
        unsafe { self.0.write(Tap::offset(place) + CELL_HEAD_BYTES + at, from, n) };
    }

    /// The cell is written.
    pub fn publish(&self, place: u64) {
        // ORDER: Release; pairs with `look` (Acquire).
        self.cell(place).state.store(place.wrapping_add(1), Ordering::Release);
    }

    /// Where a reader that begins now begins: what was recorded before is not its own.
    pub fn begin(&self) -> u64 {
        let head = self.head().head.load(Ordering::Acquire);
        self.give_back(head);
        head
    }

    pub fn look(&self, place: u64) -> Found<'_> {
        let ahead = self.head().head.load(Ordering::Acquire).wrapping_sub(place);
        match ahead {
            0 => return Found::Nothing,
            // A sane one waits for `tail`.
            _ if ahead > CELL_COUNT => return Found::Astray,
            _ => {}
        }
        let cell = self.cell(place);
        // ORDER: Acquire; pairs with `publish` (Release).
        match cell.state.load(Ordering::Acquire) {
            RETIRED => Found::Lost,
            state if state == place.wrapping_add(1) => Found::Piece(cell),
            _ => Found::Unfinished,
        }
    }

    /// The bytes of a cell that was found written.
    pub fn read(&self, place: u64, to: &mut [u8; CELL_DATA_BYTES]) {
        // SAFETY: the array is valid for its length.
        unsafe { self.0.read(Tap::offset(place) + CELL_HEAD_BYTES, to.as_mut_ptr(), to.len()) };
    }

    /// Gives up a cell whose writer does not finish.
    pub fn retire(&self, place: u64) {
        let state = &self.cell(place).state;
        let now = state.load(Ordering::Relaxed);
        if now != place.wrapping_add(1) {
            // A writer that finishes right now wins.
            let _ = state.compare_exchange(now, RETIRED, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Everything before `place` was read.
    pub fn give_back(&self, place: u64) {
        // ORDER: Release; pairs with `claim` (Acquire).
        self.head().reader.tail.store(place, Ordering::Release);
    }
}
