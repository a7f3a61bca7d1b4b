//! A segment in the test's own memory, and lists of buffers for it.

use ringlet_core::layout::Geometry;
use ringlet_core::memory::{Area, Buffer, Buffers};
use ringlet_core::ring::SegmentRing;
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Zeroed pages.
pub struct Pages {
    base: *mut u8,
    layout: Layout,
}

impl Pages {
    pub fn new(bytes: usize) -> Pages {
        let layout = Layout::from_size_align(bytes, 4096).expect("a small power of two");
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null());
        Pages { base, layout }
    }

    /// Not to be used after `self` is dropped.
    pub fn area(&self) -> Area {
        // SAFETY: allocated for so many bytes, page-aligned; the tests drop the pages last.
        unsafe { Area::new(self.base, self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

pub struct Segment {
    pages: Pages,
    pub geometry: Geometry,
}

impl Segment {
    pub fn new(ring_bytes: usize) -> Segment {
        let geometry = Geometry::new(ring_bytes).expect("a legal ring size");
        Segment { pages: Pages::new(geometry.segment_bytes()), geometry }
    }

    /// Not to be used after `self` is dropped.
    pub fn area(&self) -> Area {
        self.pages.area()
    }

    pub fn ring(&self, direction: usize) -> SegmentRing {
        SegmentRing::new(self.area(), self.geometry, direction)
    }
}

/// Calls `f` with `data` as a list of buffers of the lengths `cuts`, as far as they go, the rest in one.
pub fn with_buffers<R>(data: &mut [u8], cuts: &[usize], f: impl FnOnce(&mut Buffers) -> R) -> R {
    let mut list = Vec::new();
    let mut rest = data;
    for &cut in cuts {
        let (piece, after) = rest.split_at_mut(cut.min(rest.len()));
        list.push(Buffer { base: piece.as_mut_ptr(), len: piece.len() });
        rest = after;
    }
    list.push(Buffer { base: rest.as_mut_ptr(), len: rest.len() });
    // SAFETY: disjoint pieces of `data`, which is borrowed for the call.
    f(&mut unsafe { Buffers::new(&list) })
}
