//! Shared memory of the keeper's: sealed, and held by memory before anybody uses it, so that no mapping of it can fault; gone with its last user.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use ringlet_core::memory::Area;
use ringlet_core::sync::AtomicU32;
use ringlet_linux::map;
use rustix::fs::{Mode, fchmod};

use crate::room;
use crate::status::Status;

/// A mapping, to be undone by its last user.
pub struct Mapping {
    area: Area,
}

impl Mapping {
    #[inline]
    pub fn area(&self) -> Area {
        self.area
    }

    /// The word of this number. (Panics if there is none: numbers are checked before.)
    #[inline]
    pub fn word(&self, number: usize) -> &AtomicU32 {
        &self.area.at::<Word>(number * size_of::<u32>()).0
    }
}

#[repr(transparent)]
struct Word(AtomicU32);

#[allow(unsafe_code)]
// SAFETY: an atomic integer.
unsafe impl ringlet_core::memory::Shared for Word {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` for this alone; what points into it borrows it.
        #[allow(unsafe_code)]
        unsafe {
            map::unmap(self.area)
        };
    }
}

/// Addresses where nothing is: who stores there faults.
pub struct Window {
    base: *mut u8,
    bytes: usize,
}

#[allow(unsafe_code)]
// SAFETY: an address and a size, which nobody changes.
unsafe impl Send for Window {}
#[allow(unsafe_code)]
// SAFETY: as for `Send`.
unsafe impl Sync for Window {}

impl Window {
    pub fn new(bytes: usize) -> Result<Window, Status> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: fresh addresses, wherever the kernel has some.
        #[allow(unsafe_code)]
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            Err(Status::NoMemory)
        } else {
            Ok(Window { base: base.cast(), bytes })
        }
    }

    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; what borrows it has gone.
        #[allow(unsafe_code)]
        unsafe {
            libc::munmap(self.base.cast(), self.bytes);
        }
    }
}

pub fn own(fd: i32) -> OwnedFd {
    // SAFETY: a descriptor that the kernel has just given us and that nothing else knows of.
    #[allow(unsafe_code)]
    unsafe {
        OwnedFd::from_raw_fd(fd)
    }
}

/// Memory of zeros. Nobody but this process's user can open it anew: who is given it has it as it was given, to read or to write.
pub fn make(bytes: usize) -> Result<OwnedFd, Status> {
    let memory = own(map::sealed_memfd(c"ringlet-reflect", bytes, libc::F_SEAL_SEAL)?);
    fchmod(&memory, Mode::RUSR | Mode::WUSR).map_err(|_| Status::NoMemory)?;
    Ok(memory)
}

/// The same memory, to be read only.
pub fn to_read(memory: &OwnedFd) -> Result<File, Status> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    OpenOptions::new().read(true).open(path).map_err(|_| Status::NoMemory)
}

/// Reads all of these bytes.
pub fn read(memory: &OwnedFd, to: &mut [u8], at: u64) -> Result<(), Status> {
    let mut done = 0;
    while done < to.len() {
        match rustix::io::pread(memory, &mut to[done..], at + done as u64) {
            Ok(0) => return Err(Status::NoMemory),
            Ok(length) => done += length,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Err(Status::NoMemory),
        }
    }
    Ok(())
}

/// Maps memory of the keeper's, if it is that large, and has all of it held by memory, which is this process's to pay for: what its control group,
/// the machine or strict overcommit does not give would be SIGBUS, or somebody's end, at a store.
pub fn map(memory: &impl AsFd, bytes: usize, writable: bool) -> Result<Mapping, Status> {
    let (fd, mapping) = (memory.as_fd().as_raw_fd(), map_sparse(memory, bytes, writable)?);
    let missing = (bytes as u64).saturating_sub(map::held_bytes(fd)?);
    if missing > 0 && missing > room::left() {
        return Err(Status::NoMemory);
    }
    map::populate(mapping.area, writable)?;
    Ok(mapping)
}

/// The same for the keeper, who pays for what he writes only: whoever has it from him holds the rest.
pub fn map_sparse(memory: &impl AsFd, bytes: usize, writable: bool) -> Result<Mapping, Status> {
    let fd = memory.as_fd().as_raw_fd();
    if map::sealed_size(fd)? != bytes {
        return Err(Status::NoMemory);
    }
    Ok(Mapping { area: map::map_shared(fd, bytes, writable)? })
}

/// So many words, in whole pages.
pub fn words_bytes(count: usize) -> usize {
    (count * size_of::<u32>()).next_multiple_of(crate::PAGE_BYTES)
}
