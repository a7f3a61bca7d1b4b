//! The symmetric heap's calls. All PEs make them alike, and leave them together.

use crate::data::HEAP_ALIGN;
use crate::group::copy;
use crate::job::{Job, give_up, job, world};

fn pointer(job: &Job, at: Option<usize>) -> *mut u8 {
    at.map_or(std::ptr::null_mut(), |at| job.at(at))
}

/// (What it returns is the same place at all PEs, or none at all of them.)
fn allocate(bytes: usize, align: usize, is_zeroed: bool) -> *mut u8 {
    if bytes == 0 {
        return std::ptr::null_mut();
    }
    let job = job();
    let at = job.heap().allocate(bytes, align);
    let found = pointer(job, at);
    if is_zeroed && !found.is_null() {
        // SAFETY: an allocation of so many bytes, of which nobody knows yet.
        unsafe { found.write_bytes(0, bytes) };
    }
    world(job).sync();
    found
}

#[unsafe(no_mangle)]
extern "C" fn shmem_malloc(bytes: usize) -> *mut u8 {
    allocate(bytes, 1, false)
}

/// (The hints make no difference: all memory is good for all.)
#[unsafe(no_mangle)]
extern "C" fn shmem_malloc_with_hints(bytes: usize, _hints: libc::c_long) -> *mut u8 {
    allocate(bytes, 1, false)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_calloc(count: usize, bytes: usize) -> *mut u8 {
    allocate(count.saturating_mul(bytes), 1, true)
}

#[unsafe(no_mangle)]
extern "C" fn shmem_align(align: usize, bytes: usize) -> *mut u8 {
    let can = align.is_power_of_two() && align <= HEAP_ALIGN;
    if can { allocate(bytes, align, false) } else { std::ptr::null_mut() }
}

#[cold]
fn unknown(at: *mut u8) -> ! {
    give_up(format_args!("{at:?} is not an allocation of the symmetric heap"))
}

#[unsafe(no_mangle)]
extern "C" fn shmem_free(at: *mut u8) {
    if at.is_null() {
        return;
    }
    let job = job();
    // (Others may put there until then.)
    world(job).sync();
    if !job.heap().free(job.offset(at)) {
        unknown(at);
    }
}

#[unsafe(no_mangle)]
extern "C" fn shmem_realloc(at: *mut u8, bytes: usize) -> *mut u8 {
    if at.is_null() {
        return shmem_malloc(bytes);
    }
    if bytes == 0 {
        shmem_free(at);
        return std::ptr::null_mut();
    }
    let job = job();
    world(job).sync();
    let mut heap = job.heap();
    let offset = job.offset(at);
    let length = heap.length(offset).unwrap_or_else(|| unknown(at));
    let new = if bytes <= length { Some(offset) } else { heap.allocate(bytes, 1) };
    if let Some(new) = new.filter(|new| *new != offset) {
        copy(at, job.at(new), length);
        heap.free(offset);
    }
    drop(heap);
    world(job).sync();
    pointer(job, new)
}
