//! Carriers of a service before, which go on with what they carry until that is over.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use ringlet_linux::{fd, sys};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::keeper::{CARRY, KEEP};

#[derive(Default)]
pub struct Earlier(Vec<(i32, OwnedFd)>);

impl Earlier {
    /// Those of our user whose keeper has gone. Before the service gives up the right to look.
    pub fn find() -> Earlier {
        let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<i32>().ok();
        let found = |pid: i32| {
            let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
            let ours = fs::metadata(format!("/proc/{pid}")).ok()?.uid() == sys::geteuid();
            let left = || parent(pid).is_some_and(|parent| !is_called(parent, KEEP));
            (ours && is_called(pid, CARRY) && left()).then_some((pid, process))
        };
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        Earlier(all.filter_map(pid).filter_map(found).collect())
    }

    /// The pids of those that still go on.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        let lives = |process: &OwnedFd| fd::pending(process.as_raw_fd(), libc::POLLIN) == 0;
        self.0.iter().filter(move |(_, process)| lives(process)).map(|(pid, _)| *pid)
    }
}

/// `ringlet node WORD`, as a keeper and who carries are started.
fn is_called(pid: i32, word: &str) -> bool {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0).skip(1);
    words.next() == Some(b"node") && words.next() == Some(word.as_bytes())
}

fn parent(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}
