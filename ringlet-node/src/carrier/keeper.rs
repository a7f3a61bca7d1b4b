//! The keeper: the service can start no process any more when it serves. One keeps carriers going, another what carries to other hosts (`crate::fabric`).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use ringlet_linux::sys::Errno;
use ringlet_linux::{fd, meet};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Started, WORD_BYTES};
use crate::sandbox;

/// How it, and what it starts, are called: `ringlet node keep WORD`, `ringlet node WORD`.
pub const KEEP: &str = "keep";
pub const CARRY: &str = "carry";
pub const FABRIC: &str = "fabric";
/// A process that died is followed by the next one after so long, and the first one comes in so long.
const PAUSE_NS: u64 = 1_000_000_000;
const PATIENCE_NS: u64 = 20_000_000_000;

/// A keeper, and the process that it has started last.
pub struct Kept {
    keeper: OwnedFd,
    process: Option<(OwnedFd, u32)>,
}

/// What became of that process.
#[derive(PartialEq, Eq, Debug)]
pub enum Word {
    None,
    Started(u32),
    KeeperLost,
}

impl Kept {
    /// Starts the keeper, before the service gives up the right to.
    pub fn start(word: &str) -> anyhow::Result<Kept> {
        let (ours, _keeper) = start_ours(&[KEEP, word])?;
        let mut kept = Kept::by(ours);
        let mut fds = [fd::pollfd { fd: kept.keeper(), events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut fds, Some(PATIENCE_NS), None);
        kept.hear();
        ensure!(kept.process.is_some(), "`ringlet node {word}` can't be started");
        Ok(kept)
    }

    pub fn by(keeper: OwnedFd) -> Kept {
        Kept { keeper, process: None }
    }

    pub fn keeper(&self) -> i32 {
        self.keeper.as_raw_fd()
    }

    pub fn process(&self) -> Option<i32> {
        self.process.as_ref().map(|(socket, _)| socket.as_raw_fd())
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|(_, pid)| *pid)
    }

    /// The process has gone, or is no longer to be heard.
    pub fn forget(&mut self) {
        self.process = None;
    }

    /// The keeper says something: there is another process.
    pub fn hear(&mut self) -> Word {
        let mut bytes = [0; WORD_BYTES];
        let (len, mut fds) = match meet::receive(self.keeper(), &mut bytes) {
            Err(Errno::EAGAIN) => return Word::None,
            Ok((len @ 1.., fds)) => (len, fds),
            _ => return Word::KeeperLost,
        };
        let started = serde_json::from_slice::<Started>(&bytes[..len]);
        let (Ok(started), Some(socket)) = (started, fds.take(0)) else { return Word::None };
        // SAFETY: the kernel has just given it to us.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        self.process = Some((socket, started.pid));
        Word::Started(started.pid)
    }
}

/// One of this program's own processes, whose standard input is the other end of a socket of ours.
fn start_ours(words: &[&str]) -> anyhow::Result<(OwnedFd, Child)> {
    let pair = meet::pair().map_err(|error| std::io::Error::from_raw_os_error(error.0))?;
    // SAFETY: made just now, ours alone.
    let [ours, theirs] = pair.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let mut command = Command::new("/proc/self/exe");
    // (What ends the service by its terminal is not to end what is carried.)
    command
        .process_group(0)
        .arg("node")
        .args(words)
        .env_clear()
        .stdin(theirs)
        .stdout(Stdio::null());
    Ok((ours, command.spawn().context("a process for what is carried can't be started")?))
}

/// What the keeper does, until the service has gone. (A carrier that lives goes on with what it carries.)
pub fn keep(word: &str) -> anyhow::Result<()> {
    let service = by_whom_it_was_started();
    sandbox::give_up_rights()?;
    loop {
        // (There may be too many processes just now.)
        let Ok((ours, mut carrier)) = start_ours(&[word]) else {
            if has_gone(&service, None, Some(PAUSE_NS)) {
                return Ok(());
            }
            continue;
        };
        let started = serde_json::to_vec(&Started { pid: carrier.id() })?;
        if meet::send(service.as_raw_fd(), &started, &[ours.as_raw_fd()]).is_err() {
            return Ok(());
        }
        drop(ours);
        let process = Pid::from_raw(carrier.id() as i32)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            .context("pidfd_open")?;
        if has_gone(&service, Some(&process), None) {
            return Ok(());
        }
        carrier.wait()?;
        if has_gone(&service, None, Some(PAUSE_NS)) {
            return Ok(());
        }
    }
}

/// Has the service gone? Waits until it has, or this process has ended, or the time is over. (It says nothing.)
fn has_gone(service: &OwnedFd, process: Option<&OwnedFd>, patience_ns: Option<u64>) -> bool {
    let pollfd = |fd: i32| fd::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let process = process.map_or(-1, |process| process.as_fd().as_raw_fd());
    let mut fds = [pollfd(service.as_raw_fd()), pollfd(process)];
    let _ = fd::poll(&mut fds, patience_ns, None);
    fds[0].revents != 0
}

/// The socket to who has started this process. Nothing else of its is kept open, and nothing of it is handed on.
pub(crate) fn by_whom_it_was_started() -> OwnedFd {
    // SAFETY: nobody has opened anything yet but who has started us.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    // SAFETY: standard input is ours, and nobody reads it.
    let socket = unsafe { fd::duplicate_high(0, 3).map(|fd| OwnedFd::from_raw_fd(fd)) };
    if let (Ok(socket), Ok(null)) = (socket, File::open("/dev/null")) {
        fd::replace(0, null.as_raw_fd());
        return socket;
    }
    std::process::exit(1)
}
