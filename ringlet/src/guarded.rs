//! A Unix socket at whose other end may be anybody.

use ringlet_linux::meet;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};

/// What strangers have left in its queue goes with it, and nobody waits for that.
pub struct Guarded(ManuallyDrop<OwnedFd>);

impl Guarded {
    pub fn new(socket: OwnedFd) -> Guarded {
        Guarded(ManuallyDrop::new(socket))
    }
}

impl Deref for Guarded {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        meet::part(self.0.as_raw_fd());
    }
}
