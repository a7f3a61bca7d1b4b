//! The kernel's socket table is that of a network namespace: whoever asks must have been there.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::sched::{CloneFlags, setns};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use ringlet_linux::{diag, meet, sys::Errno};
use rustix::process::DumpableBehavior;

/// A socket that lists the sockets of the network namespace of a process, which is shown in this directory.
#[allow(unsafe_code)]
pub fn diag_socket(directory: &Path) -> io::Result<OwnedFd> {
    let link = |place: &Path| std::fs::read_link(place.join("ns/net"));
    if link(directory)? == link(Path::new("/proc/self"))? {
        // SAFETY: made just now, ours alone.
        return diag::open().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).map_err(error);
    }
    // A child goes there and sends it back: no thread of ours must stay there, and only a process of one thread may enter a user
    // namespace.
    let network = File::open(directory.join("ns/net"))?;
    let user = File::open(directory.join("ns/user"))?;
    let [ours, theirs] = meet::pair().map_err(error)?.map(|fd| {
        // SAFETY: made just now, ours alone.
        unsafe { OwnedFd::from_raw_fd(fd) }
    });
    // SAFETY: the child makes system calls, and ends by one.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let made = enter(&network, &user).map_err(|error| Errno(error as i32));
            let sent = made.and_then(|()| diag::open());
            let code = sent.err().map_or(0, |error| error.0).to_ne_bytes();
            let _ = meet::send(theirs.as_raw_fd(), &code, sent.ok().as_slice());
            // SAFETY: nothing of the parent's is undone.
            unsafe { libc::_exit(0) };
        }
        ForkResult::Parent { child } => waitpid(child, None).map(drop)?,
    }
    let mut code = [0; 4];
    let (_, mut descriptors) = meet::receive(ours.as_raw_fd(), &mut code).map_err(error)?;
    match (descriptors.take(0), i32::from_ne_bytes(code)) {
        // SAFETY: received just now, ours alone.
        (Some(fd), 0) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        (_, code) => Err(io::Error::from_raw_os_error(code)),
    }
}

fn enter(network: &File, user: &File) -> nix::Result<()> {
    if setns(network, CloneFlags::CLONE_NEWNET) == Ok(()) {
        return Ok(());
    }
    // Who is root there could look into us.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    setns(user, CloneFlags::CLONE_NEWUSER)?;
    setns(network, CloneFlags::CLONE_NEWNET)
}

fn error(error: Errno) -> io::Error {
    io::Error::from_raw_os_error(error.0)
}
