//! The memory of one end, as the adapter makes it.

use crate::half::Segment;
use ringlet_core::layout::{Control, Geometry, Head, SEGMENT_MAGIC, SLOTS_OFFSET, control};
use ringlet_core::memory::Area;
use ringlet_core::mirror::Answers;
use ringlet_core::sync::Ordering;
use ringlet_linux::{map, sys, tcp};

const PAGE_BYTES: usize = 4096;

/// A segment of its own, mapped as long as this lives: longer than each link that has it.
pub struct Memory {
    area: Area,
    geometry: Geometry,
    /// To be sent to the program.
    pub memfd: i32,
}

impl Memory {
    /// `None`: it can't be had.
    pub fn make(geometry: Geometry) -> Option<Memory> {
        let bytes = geometry.segment_bytes();
        let memfd = map::sealed_memfd(c"ringlet-segment", bytes, libc::F_SEAL_SEAL).ok()?;
        let Ok(area) = map::map_shared(memfd, bytes, true) else {
            sys::close(memfd);
            return None;
        };
        let memory = Memory { area, geometry, memfd };
        // What both sides touch first: a page that can't be had would be SIGBUS.
        let slots = |direction| (geometry.slot_offset(direction, 0), PAGE_BYTES);
        for (at, bytes) in [(0, SLOTS_OFFSET), slots(0), slots(1)] {
            map::hold(area, at, bytes).ok()?;
        }
        let head = area.at::<Head>(0);
        head.ring_bytes.store(geometry.ring_bytes as u64, Ordering::Relaxed);
        head.magic.store(SEGMENT_MAGIC, Ordering::Relaxed);
        Some(memory)
    }

    /// Makes sure that there is memory for all that a fabric may write there, as a lane of this end needs it.
    pub fn hold_for_a_lane(&self, end: usize) -> Option<()> {
        let (at, bytes) = (self.geometry.data_offset(1 - end), self.geometry.ring_bytes);
        map::hold(self.area, at, bytes).ok()
    }

    pub fn segment(&self) -> Segment {
        Segment { area: self.area, geometry: self.geometry }
    }

    /// The words of the direction in which this end sends.
    pub fn outgoing(&self, end: usize) -> &Control {
        control(self.area, end)
    }

    /// Puts a doorbell byte on the connection of this end, which is `socket`, unless the end has severed itself. False if it did not go.
    pub fn ring_byte(&self, end: usize, socket: i32) -> bool {
        let words = self.outgoing(end);
        let went = words.begin_byte() && tcp::ring_byte(socket);
        words.end_byte();
        went
    }
}

impl Drop for Memory {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        sys::close(self.memfd);
        // SAFETY: the link that used it is gone.
        unsafe { map::unmap(self.area) };
    }
}
