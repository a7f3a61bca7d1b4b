//! Every byte that two processes share: where it lies, who writes it, which ordering carries it.
//!
//! A segment is a sealed memfd of `Geometry::segment_bytes`. Two directions: 0 from the connecting side to the accepting
//! side, 1 the other way.
//!
//! ```text
//!        0 +--------------------------+
//!          | Head             (64 B)  |  written once by the maker, checked once by the other
//!      512 | Control of direction 0   |  four lines of 128 B, one writer per line
//!     1024 | Control of direction 1   |
//!     4096 +--------------------------+
//!          | slots of direction 0     |  SLOT_COUNT x 64 B, written by its sender
//!          | slots of direction 1     |
//!          | data of direction 0      |  ring_bytes, written by its sender
//!          | data of direction 1      |
//!          +--------------------------+
//! ```
//!
//! A slot is one cache line: a header word and 56 bytes. The header says which record this is (its position, so that what
//! an earlier lap left behind is never taken for news), how long it is, and where the next one will be. A message of up to
//! 56 bytes (48 in a byte ring, whose slots end with the time) lies in the slot itself and costs one line; a longer one lies in the data ring at the position
//! that the slot names.

use crate::memory::{Area, Shared};
use crate::sync::{AtomicU32, AtomicU64};
use crate::wait::Wish;

/// Of all that two processes share: this layout, those of lanes, of the native library and of Active Messages, and the messages by which they introduce
/// themselves. One that changes counts it up: peers of different versions find that out by their first message, and stay apart.
pub const VERSION: u32 = 11;
pub const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"rnglseg\0");

/// Unit of transfer between caches, and distance that keeps the adjacent-line prefetcher from pairing two writers.
pub const LINE_BYTES: usize = 64;
pub const APART_BYTES: usize = 128;
pub const PAGE_BYTES: usize = 4096;

/// Records that fit in one direction.
pub const SLOT_COUNT: usize = 1024;
/// While the receiver keeps up, only the first so many slots (one page) and data bytes are used, so that request/response
/// traffic stays in the same few cache lines and an idle connection keeps few pages.
pub const HOT_SLOT_COUNT: usize = 64;
pub const HOT_DATA_BYTES: u64 = 32 << 10;
/// Bytes of a message that lie in its slot.
pub const INLINE_BYTES: usize = LINE_BYTES - 8;
/// Last word of a byte ring's slot: when the record was sent, by the processor's counter. It decides nothing but the order in
/// which ready connections are told, as they became ready. Bytes of a message that lie before it.
pub const SENT_AT: usize = LINE_BYTES - 8;
pub const STREAM_INLINE_BYTES: usize = SENT_AT - 8;
/// Largest record: a longer message is cut, so that the receiver copies one piece while the sender fills the next.
pub const RECORD_MAX_BYTES: usize = 16 << 10;

/// Longest message of a queue: what a header can say, in whole lines.
pub const MESSAGE_MAX_BYTES: usize = (1 << LEN_BITS) - LINE_BYTES;

pub const RING_MIN_BYTES: usize = 64 << 10;
pub const RING_MAX_BYTES: usize = 64 << 20;

pub const HEAD_OFFSET: usize = 0;
pub const CONTROL_OFFSET: usize = 512;
pub const SLOTS_OFFSET: usize = 4096;

#[cfg(not(loom))] // whose atomics have other sizes
const _: () = assert!(CONTROL_OFFSET + 2 * size_of::<Control>() <= SLOTS_OFFSET);
const _: () = assert!(SLOT_COUNT.is_power_of_two() && HOT_SLOT_COUNT.is_power_of_two());
// A rewind leaves half a page of slots free, less two: one for the record itself and one for a mark (`Tx::publish`).
const _: () = assert!(HOT_SLOT_COUNT >= 4 && HOT_SLOT_COUNT <= SLOT_COUNT / 4);
const _: () = assert!(RECORD_MAX_BYTES as u64 <= HOT_DATA_BYTES);
const _: () = assert!(RECORD_MAX_BYTES < 1 << LEN_BITS && RECORD_MAX_BYTES * 4 <= RING_MIN_BYTES);

/// Header word of a slot: published (1 bit, so that fresh memory is no header) | position (43 bits) | flags (3) | length (17).
/// Positions wrap after half a day of ten million messages a second; the slot's lap before that is long overwritten.
pub const LEN_BITS: u32 = 17;
pub const FLAG_BITS: u32 = 3;
pub const PUBLISHED: u64 = 1 << (63 - LEN_BITS - FLAG_BITS);
pub const POSITION_MASK: u64 = PUBLISHED - 1;
/// In place of a header: the receiver has withdrawn, and takes nothing from here on. No header, nor fresh memory.
pub const WITHDRAWN: u64 = 1;
/// The bytes lie in the data ring; the slot's first payload word is their position.
pub const FLAG_DATA: u64 = 1;
/// The record after this one lies in slot 0.
pub const FLAG_REWIND: u64 = 2;
/// Not bytes but a control record: first payload word its kind, second its value.
pub const FLAG_CONTROL: u64 = 4;

/// First line of a segment.
#[repr(C)]
pub struct Head {
    pub magic: AtomicU64,
    pub ring_bytes: AtomicU64,
}

/// One direction's control words. Every line has one writer.
///
/// Where the ends have a segment each, an adapter copies some of these lines from one to the other (`mirror`), whole: a sender's or receiver's first
/// is *mirrored*. The second stays where it is, and is between a program and the adapter: in the sender's segment the adapter has the receiver's
/// part, in the receiver's segment the sender's. So there too each line has one writer.
#[repr(C)]
#[derive(Default)]
pub struct Control {
    pub credit: Credit,
    pub receiver: Receiver,
    pub sender: Sender,
    pub serving: Serving,
}

impl Control {
    /// The receiver's, for data.
    #[inline(always)]
    pub fn data_wish(&self) -> Wish<'_> {
        Wish { wished: &self.receiver.want_data, granted: &self.sender.data_granted }
    }

    /// The sender's, for room.
    #[inline(always)]
    pub fn room_wish(&self) -> Wish<'_> {
        Wish { wished: &self.sender.want_room, granted: &self.receiver.room_granted }
    }
}

/// Written by the receiver after each record, read by the sender when it believes the ring is full.
#[repr(C, align(128))]
#[derive(Default)]
pub struct Credit {
    /// Slot position up to which everything is consumed. Release, pairs with `Tx::refresh` (Acquire).
    pub slots: AtomicU64,
    /// Data position up to which everything is consumed. Release, same pair.
    pub data: AtomicU64,
}

/// What the receiver says of itself; and its interrupt flag (SCILAN §3.2) towards this one sender.
#[repr(C, align(128))]
#[derive(Default)]
pub struct Receiver {
    // Mirrored.
    /// Whether the receiver takes from the ring, leaves it for the kernel, or has closed it (`leaving`).
    pub state: AtomicU32,
    /// 1 while the receiver asks that nothing more be put into the ring, though it still reads it.
    pub keep_out: AtomicU32,
    /// 1 while the receiver is past a `Start`, but bytes from before it are still unread in the kernel.
    pub draining: AtomicU32,
    /// Counted up behind each change of `state`, for the echo (`mirror`).
    pub changes: AtomicU32,
    /// Once it leaves: bytes of the first unreleased record that the receiver has taken.
    pub used: AtomicU64,
    _mirrored: [AtomicU64; 5],

    // Not mirrored.
    /// By a receiver that is about to sleep (`wait::Wish`); and what it has granted a sender that waits for room.
    pub want_data: AtomicU64,
    pub room_granted: AtomicU64,
    /// 1 while the receiver takes doorbells by their number (`bells`).
    pub taking: AtomicU32,
    /// The adapter's answers to `Sender::flushes`, `hold` and `parting`.
    pub delivered: AtomicU32,
    pub held: AtomicU32,
    pub parted: AtomicU32,
    /// Doorbell bytes that the adapter has put on the kernel connection since the last `Start`.
    pub bells_put: AtomicU64,
    /// The connection's bit on the receiver's ready board, as long as a wish says `WANT_READY`.
    pub lane: AtomicU64,
    _local: [AtomicU64; 2],
}

/// What the sender says of itself, and has ended; and its interrupt flag.
#[repr(C, align(128))]
#[derive(Default)]
pub struct Sender {
    // Mirrored.
    /// `SHUT` once the sender has shut its direction down in an orderly way while its end lives on; `SHUT_READ` or `SHUT_UNREAD` once it was
    /// closed.
    pub shut: AtomicU32,
    /// So many threads of the sender are at work: putting a doorbell byte on the kernel connection, or deciding to leave the ring
    /// (`leaving::Working`); and which leaving of the receiver's was answered last.
    pub working: AtomicU32,
    pub answered: AtomicU32,
    /// 1 once the sender is at home in its end of the segment (reads its ring, knows our doorbell).
    pub attached: AtomicU32,
    /// Counted up when a send that is cut into pieces begins and when it ends: odd in between. (Only for tests: `unforgiving`.)
    pub cutting: AtomicU32,
    /// Asked of the adapter (`mirror`): so often, to say when all that was published and said before has been delivered; to ring the receiver, by a
    /// byte and by an event; to put no more bytes on the kernel connection (while it is odd); and, once, to deliver all and let go of it.
    pub flushes: AtomicU32,
    pub rings: AtomicU32,
    pub events: AtomicU32,
    pub hold: AtomicU32,
    pub parting: AtomicU32,
    /// When `shut` was set, in the ticks of a record's time; 0 if that is not known. Nothing may depend on its truth.
    pub shut_at: AtomicU64,
    /// When the sender last gave bytes of the stream to the kernel, likewise.
    pub kernel_at: AtomicU64,
    /// The kernel's place up to which calls of the sender that have returned have written, but for doorbells since the last `Start`, plus
    /// one; 0 if that is not known.
    pub written: AtomicU64,

    // Not mirrored.
    /// By a sender that waits for room; and what it has granted a receiver that sleeps.
    pub want_room: AtomicU64,
    pub data_granted: AtomicU64,
    /// Doorbell bytes on the kernel connection since the last `Start`. Written while `working`; over a mirror by the adapter.
    pub bells: AtomicU64,
    /// The last `Receiver::changes` that the adapter has seen, and after that the sender's line.
    pub echo: AtomicU32,
    /// 1 once the end has severed itself from its adapter, which touches neither the segment nor the connection any more (`mirror`).
    pub severed: AtomicU32,
    /// The place of a `Back`, plus one, behind which the first byte is urgent; 0 if there is none. (Over a mirror nobody is told.)
    pub urgent_behind: AtomicU64,
    _local: [AtomicU64; 3],
}

/// What the adapter says of itself, in the sending direction of each end: not mirrored.
#[repr(C, align(128))]
#[derive(Default)]
pub struct Serving {
    /// 1 while it passes over this end; and how many of its threads put a doorbell byte on the end's connection.
    pub passes: AtomicU32,
    pub bytes: AtomicU32,
}

/// Values of `Sender::shut`. A Unix connection that is closed also tells whether bytes of the other end were unread.
pub const NOT_SHUT: u32 = 0;
pub const SHUT: u32 = 1;
pub const SHUT_READ: u32 = 2;
pub const SHUT_UNREAD: u32 = 3;

pub use crate::wait::{WANT_BYTE, WANT_EVENT, WANT_NOTHING, WANT_READY};

/// Values of `Sender::attached`, once it is: by what the sender rings. The context's eventfd rings when its page says so, a bell by name when a
/// wish says `WANT_EVENT`.
pub const RINGS_BY_BYTE: u32 = WANT_BYTE;
pub const RINGS_BY_EVENT: u32 = WANT_EVENT;
pub const RINGS_BY_NAME: u32 = 3;

#[cfg(not(loom))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Control>() == 512);
    assert!(offset_of!(ReadyBoard, lanes) == PAGE_BYTES);
    assert!(offset_of!(ReadyBoard, awake) == AWAKE_OFFSET);
    assert!(offset_of!(Receiver, want_data) == LINE_BYTES && size_of::<Receiver>() == APART_BYTES);
    assert!(offset_of!(Sender, want_room) == LINE_BYTES && size_of::<Sender>() == APART_BYTES);
};

// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for Head {}
// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for Control {}
// SAFETY: an atomic; all bit patterns valid.
unsafe impl Shared for AtomicU64 {}
// SAFETY: an atomic; all bit patterns valid.
unsafe impl Shared for AtomicU32 {}

/// Senders of a mailbox.
pub const LANE_MAX_COUNT: usize = 1024;
pub const READY_WORD_COUNT: usize = LANE_MAX_COUNT / 64;

/// Which lanes of a mailbox may hold something new. Written by all senders that share it: bits are set by them and taken by the
/// receiver, and are hints (`mailbox`). Up to 448 lanes it is one line.
#[repr(C, align(128))]
#[derive(Default)]
pub struct Ready {
    /// Bit i: a bit is set in word i.
    pub summary: AtomicU64,
    /// Bit i of word j: lane 64 j + i.
    pub words: [AtomicU64; READY_WORD_COUNT],
}

// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for Ready {}

/// Connections that a ready board can tell apart.
pub const BOARD_LANE_COUNT: usize = 65_536;
const AWAKE_OFFSET: usize = 2 * APART_BYTES;

/// The ready board of a context (`ready`): in a memfd that the context's process writes to, and peers that could kill it; or one stranger's process.
#[repr(C, align(4096))]
pub struct ReadyBoard {
    pub top: AtomicU64,
    /// (In one line with the top, for the first 28,672 lanes.)
    pub middle: [AtomicU64; BOARD_LANE_COUNT / 64 / 64],
    _line: [AtomicU64; AWAKE_OFFSET / 8 - 1 - BOARD_LANE_COUNT / 64 / 64],
    /// For a stranger, who does not see the context's flag (`ready::Awake`).
    pub awake: AtomicU64,
    _page: [AtomicU64; (PAGE_BYTES - AWAKE_OFFSET) / 8 - 1],
    pub lanes: [AtomicU64; BOARD_LANE_COUNT / 64],
}

// SAFETY: atomics only; all bit patterns valid.
unsafe impl Shared for ReadyBoard {}

/// Sizes of a segment, from one number; checked when it comes from a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    pub ring_bytes: usize,
}

impl Geometry {
    pub fn new(ring_bytes: usize) -> Option<Geometry> {
        let fits = (RING_MIN_BYTES..=RING_MAX_BYTES).contains(&ring_bytes);
        (fits && ring_bytes.is_power_of_two()).then_some(Geometry { ring_bytes })
    }

    pub fn segment_bytes(self) -> usize {
        SLOTS_OFFSET + 2 * (SLOT_COUNT * LINE_BYTES + self.ring_bytes)
    }

    /// Lines up the header word of `slot` for `direction`.
    pub fn slot_offset(self, direction: usize, slot: usize) -> usize {
        SLOTS_OFFSET + (direction * SLOT_COUNT + slot) * LINE_BYTES
    }

    pub fn data_offset(self, direction: usize) -> usize {
        SLOTS_OFFSET + 2 * SLOT_COUNT * LINE_BYTES + direction * self.ring_bytes
    }
}

#[inline(always)]
pub fn control_offset(direction: usize) -> usize {
    CONTROL_OFFSET + (direction & 1) * size_of::<Control>()
}

/// The control words of a direction.
#[inline(always)]
pub fn control<'a>(segment: Area, direction: usize) -> &'a Control {
    segment.at(control_offset(direction))
}

/// Sizes of a lane, which is one direction by itself: a page that begins with its `Control` (from
/// `LANE_FREE_OFFSET` on it is left to the lane's users), then slots, then data, each on pages of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneGeometry {
    pub slot_count: usize,
    pub ring_bytes: usize,
}

pub const LANE_FREE_OFFSET: usize = 1024;
pub const LANE_SLOT_MIN_COUNT: usize = 16;
pub const LANE_SLOT_MAX_COUNT: usize = 1 << 16;
pub const LANE_RING_MIN_BYTES: usize = PAGE_BYTES;

impl LaneGeometry {
    pub fn new(slot_count: usize, ring_bytes: usize) -> Option<LaneGeometry> {
        let slots = (LANE_SLOT_MIN_COUNT..=LANE_SLOT_MAX_COUNT).contains(&slot_count);
        let data = (LANE_RING_MIN_BYTES..=RING_MAX_BYTES).contains(&ring_bytes);
        let fits = slots && data && slot_count.is_power_of_two() && ring_bytes.is_power_of_two();
        fits.then_some(LaneGeometry { slot_count, ring_bytes })
    }

    pub fn lane_bytes(self) -> usize {
        self.data_offset() + self.ring_bytes
    }

    pub(crate) fn data_offset(self) -> usize {
        PAGE_BYTES + (self.slot_count * LINE_BYTES).next_multiple_of(PAGE_BYTES)
    }
}
