//! Carriers of a service before, which go on with what they carry until that is over.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use ringlet_linux::{fd, sys};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::keeper::{CARRY, KEEP};

/// No more are looked after: each costs a descriptor.
const MOST: usize = 64;

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
            (ours && is_our_program(pid) && is_called(pid, CARRY) && left())
                .then_some((pid, process))
        };
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        Earlier(all.filter_map(pid).filter_map(found).take(MOST).collect())
    }

    /// The pids of those that still go on.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.0.iter().filter(|(_, process)| lives(process)).map(|(pid, _)| *pid)
    }

    pub fn forget_ended(&mut self) {
        self.0.retain(|(_, process)| lives(process));
    }
}

fn lives(process: &OwnedFd) -> bool {
    fd::pending(process.as_raw_fd(), libc::POLLIN) == 0
}

/// Is it of the same file as we, which may have been replaced since, and of no container? (Anybody may call himself as he likes.)
fn is_our_program(pid: i32) -> bool {
    let link = |pid: &str, what: &str| fs::read_link(format!("/proc/{pid}/{what}")).ok();
    let is_same = |what: &str| {
        let name = |pid: &str| {
            let link = link(pid, what)?.into_os_string();
            let name = link.as_bytes();
            Some(name.strip_suffix(b" (deleted)").unwrap_or(name).to_vec())
        };
        let ours = name("self");
        ours.is_some() && ours == name(&pid.to_string())
    };
    is_same("exe") && is_same("ns/pid")
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

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn another_program_is_none_of_ours_whatever_it_calls_itself() {
        let mut other = Command::new("sleep");
        let mut other = other.arg0("ringlet").arg("600").spawn().unwrap();
        let is_ours = is_our_program(other.id() as i32);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!is_ours && is_our_program(std::process::id() as i32));
    }

    #[test]
    fn who_has_ended_is_forgotten() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id() as i32;
        let process = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let mut earlier = Earlier(vec![(pid, process)]);
        earlier.forget_ended();
        assert_eq!(earlier.pids().collect::<Vec<_>>(), [pid]);
        child.kill().unwrap();
        child.wait().unwrap();
        earlier.forget_ended();
        assert!(earlier.0.is_empty());
    }
}
