//! Records in a mapping: the two rings of a connection's segment, and lanes.

use crate::layout::*;
use crate::memory::Area;
use crate::queue::InPlace;
use crate::record::RingMemory;
use crate::sync::AtomicU64;

/// Where the parts of one direction lie in a mapping.
pub trait Mapped {
    fn area(&self) -> Area;
    fn control_offset(&self) -> usize;
    fn slot_offset(&self, slot: usize) -> usize;
    fn data_offset(&self) -> usize;
    fn data_bytes(&self) -> usize;
    fn slots(&self) -> usize {
        SLOT_COUNT
    }

    #[inline(always)]
    fn control<'a>(&self) -> &'a Control {
        self.area().at(self.control_offset())
    }
}

impl<T: Mapped> RingMemory for T {
    #[inline(always)]
    fn header(&self, slot: usize) -> &AtomicU64 {
        self.area().at(self.slot_offset(slot & (self.slots() - 1)))
    }
    #[inline(always)]
    fn credit_slots(&self) -> &AtomicU64 {
        &self.control().credit.slots
    }
    #[inline(always)]
    fn credit_data(&self) -> &AtomicU64 {
        &self.control().credit.data
    }
    #[inline(always)]
    fn ring_bytes(&self) -> usize {
        self.data_bytes()
    }
    #[inline(always)]
    fn slot_count(&self) -> usize {
        self.slots()
    }
    #[inline(always)]
    fn hot_slot_count(&self) -> usize {
        HOT_SLOT_COUNT.min(self.slots() / 4)
    }
    #[inline(always)]
    fn hot_data_bytes(&self) -> u64 {
        HOT_DATA_BYTES.min(self.data_bytes() as u64)
    }
    #[inline(always)]
    unsafe fn write_slot(&self, slot: usize, at: usize, from: *const u8, n: usize) {
        // SAFETY: `from` is valid for `n` bytes by our own contract; the area itself is checked by `write`.
        unsafe { self.area().write(self.slot_offset(slot) + at, from, n) };
    }
    #[inline(always)]
    unsafe fn read_slot(&self, slot: usize, at: usize, to: *mut u8, n: usize) {
        // SAFETY: `to` has room for `n` bytes by our own contract; the area itself is checked by `read`.
        unsafe { self.area().read(self.slot_offset(slot) + at, to, n) };
    }
    #[inline(always)]
    unsafe fn write_data(&self, at: usize, from: *const u8, n: usize) {
        // SAFETY: `from` is valid for `n` bytes by our own contract; the area itself is checked by `write`.
        unsafe { self.area().write(self.data_offset() + at, from, n) };
    }
    #[inline(always)]
    unsafe fn read_data(&self, at: usize, to: *mut u8, n: usize) {
        // SAFETY: `to` has room for `n` bytes by our own contract; the area itself is checked by `read`.
        unsafe { self.area().read(self.data_offset() + at, to, n) };
    }
}

impl<T: Mapped> InPlace for T {
    #[inline(always)]
    fn slot_pointer(&self, slot: usize) -> *mut u8 {
        self.area().base().wrapping_add(self.slot_offset(slot & (self.slots() - 1)))
    }
    #[inline(always)]
    fn data_pointer(&self) -> *mut u8 {
        self.area().base().wrapping_add(self.data_offset())
    }
}

/// The ring of one direction of a segment.
#[derive(Clone, Copy)]
pub struct SegmentRing {
    segment: Area,
    geometry: Geometry,
    direction: usize,
}

impl SegmentRing {
    /// Panics when the segment is smaller than its geometry says: the caller has checked the descriptor's size.
    pub fn new(segment: Area, geometry: Geometry, direction: usize) -> SegmentRing {
        assert!(segment.len() >= geometry.segment_bytes() && direction < 2);
        SegmentRing { segment, geometry, direction }
    }

    pub fn control<'a>(&self) -> &'a Control {
        control(self.segment, self.direction)
    }
}

impl Mapped for SegmentRing {
    #[inline(always)]
    fn area(&self) -> Area {
        self.segment
    }
    #[inline(always)]
    fn control_offset(&self) -> usize {
        control_offset(self.direction)
    }
    #[inline(always)]
    fn slot_offset(&self, slot: usize) -> usize {
        self.geometry.slot_offset(self.direction, slot)
    }
    #[inline(always)]
    fn data_offset(&self) -> usize {
        self.geometry.data_offset(self.direction)
    }
    #[inline(always)]
    fn data_bytes(&self) -> usize {
        self.geometry.ring_bytes
    }
}

/// One direction by itself, of any size, anywhere in a mapping.
#[derive(Clone, Copy)]
pub struct Lane {
    area: Area,
    offset: usize,
    geometry: LaneGeometry,
}

impl Lane {
    /// Panics when the lane does not fit: the caller has checked the mapping's size.
    pub fn new(area: Area, offset: usize, geometry: LaneGeometry) -> Lane {
        assert!(offset.is_multiple_of(PAGE_BYTES) && offset <= area.len());
        assert!(geometry.lane_bytes() <= area.len() - offset);
        Lane { area, offset, geometry }
    }
}

impl Mapped for Lane {
    #[inline(always)]
    fn area(&self) -> Area {
        self.area
    }
    #[inline(always)]
    fn control_offset(&self) -> usize {
        self.offset
    }
    #[inline(always)]
    fn slot_offset(&self, slot: usize) -> usize {
        self.offset + PAGE_BYTES + slot * LINE_BYTES
    }
    #[inline(always)]
    fn data_offset(&self) -> usize {
        self.offset + self.geometry.data_offset()
    }
    #[inline(always)]
    fn data_bytes(&self) -> usize {
        self.geometry.ring_bytes
    }
    #[inline(always)]
    fn slots(&self) -> usize {
        self.geometry.slot_count
    }
}
