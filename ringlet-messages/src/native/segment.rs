//! Memory of a connection: sealed, so that it can't fault, and mapped as long as somebody uses it.

use super::Error;
use ringlet_core::memory::Area;
use ringlet_linux::sys::Errno;
use ringlet_linux::{apart, map};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A mapping that goes when the last user does.
pub(super) struct Mapping(pub Area);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped for us by one of the functions below, or by `mailbox`; lanes and messages that point into it hold or borrow what holds this.
        #[allow(unsafe_code)]
        unsafe {
            map::unmap(self.0)
        };
    }
}

pub(super) fn own(fd: i32) -> OwnedFd {
    // SAFETY: a descriptor that the kernel has just given us and that nothing else knows of.
    #[allow(unsafe_code)]
    unsafe {
        OwnedFd::from_raw_fd(fd)
    }
}

/// A fresh segment of zeros.
pub(super) fn make_segment(bytes: usize) -> Result<(OwnedFd, Mapping), Error> {
    let memfd = own(map::sealed_memfd(c"ringlet-native", bytes, libc::F_SEAL_SEAL)?);
    let area = map::map_segment(memfd.as_raw_fd(), bytes)?;
    Ok((memfd, Mapping(area)))
}

/// Maps what a service sent, if it is of that size and can't fault.
pub(super) fn map_segment(fd: Option<i32>, bytes: usize, writable: bool) -> Result<Mapping, Error> {
    let memfd = fd.ok_or(Error::PeerCorrupt)?;
    let mapped = match map::sealed_size(memfd) {
        Ok(size) if size == bytes && writable => {
            map::map_segment(memfd, bytes).map_err(Error::from)
        }
        Ok(size) if size == bytes => map::map_shared(memfd, bytes, false).map_err(Error::from),
        Ok(_) | Err(Errno::EINVAL) => Err(Error::PeerCorrupt),
        Err(errno) => Err(errno.into()),
    };
    apart::close_foreign(memfd, apart::SOMEBODY);
    mapped.map(Mapping)
}
