//! The program's static data, .data and .bss, as symmetric memory: it is copied into the job's region, which is then mapped in its place.

use std::cell::Cell;
use std::ffi::{c_int, c_void};

use ringlet_reflect::PAGE_BYTES;

use crate::job::{begun, give_up};

/// Whole pages, from `begin` on, that the program may write and the loader is done with.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Data {
    begin: usize,
    bytes: usize,
}

/// What a program's headers say of a part of it.
#[derive(Clone, Copy)]
struct Part {
    begin: usize,
    end: usize,
}

impl Data {
    /// Of this process's main program; not of its libraries.
    pub fn of_program() -> Result<Data, String> {
        let mut found = Ok(Data::default());
        // SAFETY: `look` is given the result, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut found).cast::<c_void>()) };
        found
    }

    fn of_parts(writable: &[Part], read_only: Option<Part>) -> Result<Data, String> {
        let page = |at: usize| at / PAGE_BYTES * PAGE_BYTES;
        let mut data: Option<Part> = None;
        for part in writable {
            let mut part =
                Part { begin: page(part.begin), end: part.end.next_multiple_of(PAGE_BYTES) };
            // (What the loader writes and protects then lies at the beginning, up to a page's.)
            if let Some(read_only) =
                read_only.filter(|each| (part.begin..part.end).contains(&each.begin))
            {
                part.begin = page(read_only.end);
            }
            if part.begin >= part.end {
                continue;
            }
            data = match data {
                None => Some(part),
                Some(before) if before.end == part.begin => Some(Part { end: part.end, ..before }),
                Some(_) => {
                    return Err(
                        "the program's static data is in pieces, which can't be shared".into()
                    );
                }
            };
        }
        Ok(data.map_or(Data::default(), |data| Data {
            begin: data.begin,
            bytes: data.end - data.begin,
        }))
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where in it such bytes lie.
    #[inline]
    pub fn find(&self, address: usize, bytes: usize) -> Option<usize> {
        let at = address.wrapping_sub(self.begin);
        (at < self.bytes && bytes <= self.bytes - at).then_some(at)
    }

    /// Copies it there, and maps that memory in its place. No other thread may run: what it wrote meanwhile would be lost.
    pub fn share(&self, there: *mut u8) -> Result<(), String> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: as many bytes of a mapping of ours that nobody uses yet; the program's are mapped and can be read.
        unsafe { std::ptr::copy_nonoverlapping(self.begin as *const u8, there, self.bytes) };
        // SAFETY: the pages that are replaced hold the same as those that come, so whoever has addresses of them sees no difference.
        let mapped = unsafe { alias(there, self.bytes, self.begin) };
        mapped.map_err(|error| format!("the program's static data can't be shared: {error}"))
    }
}

/// When the library is loaded, before the program does the same: so ours is the last before a fork, and the first in the child.
extern "C" fn watch_forks() {
    // SAFETY: functions of this library, which is not unloaded (build.rs).
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

#[used]
// SAFETY: a list of functions of this kind.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = watch_forks;

std::thread_local! {
    /// What a child that this thread makes will have as its data.
    static COPY: Cell<*mut c_void> = const { Cell::new(std::ptr::null_mut()) };
}

/// A child by fork is no PE: its static data are its own, as any program's are, or it would write its parent's.
extern "C" fn before_fork() {
    let Some(Data { begin, bytes }) = begun().map(|job| job.data) else { return };
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which replaces none.
    let copy = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, how, -1, 0) };
    if copy != libc::MAP_FAILED {
        // SAFETY: as many bytes each; others may write there meanwhile, as in any fork.
        unsafe { std::ptr::copy_nonoverlapping(begin as *const u8, copy.cast(), bytes) };
        COPY.set(copy);
    }
}

extern "C" fn in_parent() {
    let (Some(job), copy) = (begun(), COPY.take()) else { return };
    if !copy.is_null() {
        // SAFETY: `before_fork`'s.
        unsafe { libc::munmap(copy, job.data.bytes) };
    }
}

extern "C" fn in_child() {
    let (Some(Data { begin, bytes }), copy) = (begun().map(|job| job.data), COPY.take()) else {
        return;
    };
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the pages that come hold what those that are replaced held when the child was made.
    let moved = !copy.is_null()
        && unsafe { libc::mremap(copy, bytes, bytes, how, begin as *mut c_void) }
            != libc::MAP_FAILED;
    if !moved && bytes > 0 {
        give_up("a child can't have static data of its own: no memory");
    }
}

/// Maps shared memory, which is mapped already, at another address too, in place of what is there.
///
/// # Safety
/// `from` is a shared mapping of so many bytes, and what it replaces is the caller's to replace.
unsafe fn alias(from: *mut u8, bytes: usize, at: usize) -> std::io::Result<()> {
    // KERNEL: of a shared mapping of which 0 bytes are moved, there is another one then, of the same memory.
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: by our contract.
    let mapped = unsafe { libc::mremap(from.cast(), 0, bytes, how, at as *mut c_void) };
    if mapped == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Heaps are aligned to this, and so may allocations be.
pub const HEAP_ALIGN: usize = 1 << 30;
/// Where they are, if that is free: then addresses in it are the same in all PEs, which the standard does not promise, and programs have relied on.
const HEAP_AT: usize = 0x3000_0000_0000;

/// Maps a PE's own heap, of which this is the memory, where it is well aligned.
pub fn place_heap(memory: *mut u8, bytes: usize) -> Result<*mut u8, String> {
    let cant = |error: std::io::Error| format!("no room for a heap of {bytes} bytes: {error}");
    let reserve = |at: usize, bytes: usize, how: c_int| {
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | how;
        // SAFETY: a new mapping, which replaces none.
        let found = unsafe { libc::mmap(at as *mut c_void, bytes, libc::PROT_NONE, how, -1, 0) };
        let found = (found != libc::MAP_FAILED).then_some(found as usize);
        found.ok_or_else(std::io::Error::last_os_error)
    };
    let at = match reserve(HEAP_AT, bytes, libc::MAP_FIXED_NOREPLACE) {
        Ok(at) if at == HEAP_AT => at,
        _ => reserve(0, bytes + HEAP_ALIGN, 0).map_err(cant)?.next_multiple_of(HEAP_ALIGN),
    };
    // SAFETY: a shared mapping of the job's, over what was reserved for it.
    unsafe { alias(memory, bytes, at) }.map_err(cant)?;
    Ok(at as *mut u8)
}

/// The first one is the program; so the iteration ends there.
extern "C" fn look(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> c_int {
    // SAFETY: the loader's, for this call.
    let info = unsafe { &*info };
    // SAFETY: as many headers as it says.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let part = |header: &libc::Elf64_Phdr| {
        let begin = (info.dlpi_addr + header.p_vaddr) as usize;
        Part { begin, end: begin + header.p_memsz as usize }
    };
    let is_writable = |each: &&libc::Elf64_Phdr| {
        each.p_type == libc::PT_LOAD && each.p_flags & libc::PF_W != 0 && each.p_memsz > 0
    };
    let writable: Vec<Part> = headers.iter().filter(is_writable).map(part).collect();
    let read_only = headers.iter().find(|each| each.p_type == libc::PT_GNU_RELRO).map(part);
    // SAFETY: `of_program`'s.
    unsafe { *found.cast() = Data::of_parts(&writable, read_only) };
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn part(begin: usize, end: usize) -> Part {
        Part { begin, end }
    }

    #[test]
    fn data_is_what_the_loader_leaves_writable() {
        let data = |begin, bytes| Ok(Data { begin, bytes });
        // As GNU's linker lays it out, without and with what is protected; as LLVM's does; in pieces.
        assert_eq!(Data::of_parts(&[part(0x4df8, 0x5100)], None), data(0x4000, 0x2000));
        assert_eq!(
            Data::of_parts(&[part(0x4df8, 0x5100)], Some(part(0x4df8, 0x5000))),
            data(0x5000, 0x1000)
        );
        let parts = [part(0x4df8, 0x5000), part(0x6010, 0x6020), part(0x7000, 0x7800)];
        assert_eq!(Data::of_parts(&parts, Some(part(0x4df8, 0x5000))), data(0x6000, 0x2000));
        assert!(Data::of_parts(&[part(0x4000, 0x5000), part(0x8000, 0x9000)], None).is_err());
        assert_eq!(Data::of_parts(&[], None), data(0, 0));
    }

    #[test]
    fn only_what_lies_within_is_found() {
        let data = Data { begin: 0x4000, bytes: 0x1000 };
        assert_eq!(data.find(0x4010, 16), Some(0x10));
        assert_eq!(data.find(0x4000, 0x1000), Some(0));
        assert_eq!(data.find(0x4000, 0x1001), None);
        assert_eq!(data.find(0x4ff8, usize::MAX), None);
        assert_eq!(data.find(0x3fff, 1), None);
        assert_eq!(data.find(0x5000, 0), None);
    }
}
