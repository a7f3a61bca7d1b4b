//! The policy, read again when the service is told to (SIGHUP), by a thread of its own: it alone can open the file.

use std::fs::File;
use std::io::{Error, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::anyhow;
use ringlet_linux::fd;

use crate::policy::{self, Policy};
use crate::sandbox;

/// What the service has of that thread.
pub struct Reload {
    bell: OwnedFd,
    read: Receiver<anyhow::Result<Policy>>,
}

/// SIGHUP, to be read. Before there is another thread: none is to be ended by it. (Processes that we start have none blocked: std clears that.)
pub fn hold_signal() -> anyhow::Result<File> {
    // SAFETY: a set of signals, of this frame.
    let made = unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGHUP);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC)
    };
    if made < 0 {
        return Err(Error::last_os_error().into());
    }
    // SAFETY: made just now, ours alone.
    Ok(unsafe { File::from_raw_fd(made) })
}

/// Starts the thread, which gives up its rights.
pub fn start(mut signals: File, path: Option<PathBuf>) -> anyhow::Result<Reload> {
    let failed = |error: ringlet_linux::sys::Errno| Error::from_raw_os_error(error.0);
    // SAFETY: made just now, ours alone.
    let bell = unsafe { OwnedFd::from_raw_fd(fd::eventfd().map_err(failed)?) };
    let ring = bell.try_clone()?;
    // (The file is replaced by another one, perhaps, or is not there yet.)
    let file = std::path::absolute(path.as_deref().unwrap_or(Path::new(policy::FILE)))?;
    let readable = file.ancestors().skip(1).find(|place| place.is_dir()).map(PathBuf::from);
    let (said, confined) = sync_channel(1);
    // (One is read while the one before waits: who asks more often is told of the last.)
    let (to, read) = sync_channel(1);
    std::thread::Builder::new().name("reload".into()).spawn(move || {
        let entered = sandbox::enter_for_renewal(readable.as_deref().unwrap_or(Path::new("/etc")));
        let is_confined = entered.is_ok();
        let _ = said.send(entered);
        const INFO_BYTES: usize = size_of::<libc::signalfd_siginfo>();
        while is_confined && signals.read_exact(&mut [0; INFO_BYTES]).is_ok() {
            if to.send(Policy::load_again(&file)).is_err() {
                return;
            }
            fd::ring(ring.as_raw_fd());
        }
    })?;
    confined.recv().map_err(|_| anyhow!("the thread that reads the policy again has ended"))??;
    Ok(Reload { bell, read })
}

impl Reload {
    pub fn bell(&self) -> i32 {
        self.bell.as_raw_fd()
    }

    /// What was read since, if anything was.
    pub fn take(&self) -> Option<anyhow::Result<Policy>> {
        fd::drain(self.bell());
        self.read.try_recv().ok()
    }
}
