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

/// What is unmapped at once. KERNEL: others of the process who map or unmap wait for it.
const UNMAPPED_AT_ONCE: usize = 64 << 20;

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(test)]
        tests::dropped(self.area.len());
        for at in (0..self.area.len()).step_by(UNMAPPED_AT_ONCE) {
            let length = UNMAPPED_AT_ONCE.min(self.area.len() - at);
            // SAFETY: mapped by `map` for this alone, from a whole page on; what points into it borrows it.
            #[allow(unsafe_code)]
            unsafe {
                map::unmap(Area::new(self.area.base().add(at), length))
            };
        }
    }
}

/// From so many bytes on memory is let go of by a thread of its own. KERNEL: 8 GiB of pages take two seconds to be given back.
const LARGE: usize = 32 << 20;

/// The keeper's thread goes on meanwhile: without it the others would take this host for dead.
pub fn let_go<T: Send + 'static>(what: T, bytes: usize) {
    if bytes >= LARGE {
        // (Where there can be no thread it is let go of here.)
        let _ = std::thread::Builder::new().name("frees".into()).spawn(move || drop(what));
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
    let mapping = map_sparse(memory, bytes, writable)?;
    hold(memory.as_fd().as_raw_fd(), mapping.area, writable, room::left)?;
    Ok(mapping)
}

/// What is held at once: others may take the same room meanwhile.
const HELD_AT_ONCE: usize = 8 << 20;

/// Before each part there has to be room for all that is missing still. (So of two that do so at once, and have no room together, one sees in time
/// what the other one has taken.)
fn hold(fd: i32, area: Area, writable: bool, left: impl Fn() -> u64) -> Result<(), Status> {
    for at in (0..area.len()).step_by(HELD_AT_ONCE) {
        let missing = (area.len() as u64).saturating_sub(map::held_bytes(fd)?);
        if missing > 0 && missing > left() {
            return Err(Status::NoMemory);
        }
        // SAFETY: a part of the mapping, from a whole page on.
        #[allow(unsafe_code)]
        let part = unsafe { Area::new(area.base().add(at), HELD_AT_ONCE.min(area.len() - at)) };
        map::populate(part, writable)?;
    }
    Ok(())
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

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;
    use std::sync::Mutex;
    use std::thread::ThreadId;

    use super::*;

    /// Of large mappings that were undone: how large, and by whom.
    pub static DROPPED: Mutex<Vec<(usize, ThreadId)>> = Mutex::new(Vec::new());

    pub fn dropped(bytes: usize) {
        if bytes >= LARGE {
            DROPPED.lock().unwrap().push((bytes, std::thread::current().id()));
        }
    }

    /// Another one takes as much at the same time: who sees that there is no room for both holds no more.
    #[test]
    fn of_two_who_take_the_same_room_one_sees_it() {
        const BYTES: usize = 6 * HELD_AT_ONCE;
        let made = || {
            let memory = make(BYTES).unwrap();
            let mapping = map_sparse(&memory, BYTES, true).unwrap();
            (memory, mapping)
        };
        let held = |memory: &OwnedFd| map::held_bytes(memory.as_raw_fd()).unwrap();
        let (ours, theirs, room) = (made(), made(), Cell::new(BYTES as u64 + (3 << 20)));
        let (steps, left) =
            (Cell::new(0), || room.get().saturating_sub(held(&ours.0) + held(&theirs.0)));
        // (Behind our first look.)
        let beside = || {
            if steps.replace(steps.get() + 1) > 0 {
                map::populate(theirs.1.area, true).unwrap();
            }
            left()
        };
        let hold = |left: &dyn Fn() -> u64| hold(ours.0.as_raw_fd(), ours.1.area, true, left);
        assert_eq!(hold(&beside), Err(Status::NoMemory));
        assert_eq!((steps.get(), held(&ours.0)), (2, HELD_AT_ONCE as u64));
        // (What is held already needs no room.)
        room.set(u64::MAX / 2);
        assert_eq!(hold(&left), Ok(()));
        assert_eq!(hold(&|| 0), Ok(()));
    }
}
