//! Who has come: its process, user and control group, as this host's kernel has them, whatever namespaces it is in.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use ringlet_linux::{fd, meet};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// KERNEL: Linux 6.5. The process that connected, and no other that gets its number later.
const SO_PEERPIDFD: i32 = 77;

#[derive(Default, Debug)]
pub struct Who {
    pub pid: i32,
    /// `None` where it can't be told: a user who is not mapped where we are.
    pub user: Option<u32>,
    pub group: Option<String>,
    /// That of the socket by which it came.
    pub label: Option<String>,
    pub(crate) process: Option<OwnedFd>,
}

impl Who {
    /// Of the other end of a Unix socket. `None` if it has gone, or can't be told.
    pub fn came(socket: i32, label: Option<&str>) -> Option<Who> {
        let caller = meet::credentials(socket).ok()?;
        let process = process_of(socket, caller.pid)?;
        let who = Who {
            pid: caller.pid,
            user: (!meet::is_vague(caller.uid)).then_some(caller.uid),
            group: group_of(caller.pid),
            label: label.map(str::to_owned),
            process: Some(process),
        };
        // What was read by its number was its own if it still lives.
        who.lives().then_some(who)
    }

    pub fn lives(&self) -> bool {
        let process = self.process.as_ref();
        process.is_some_and(|process| fd::pending(process.as_raw_fd(), libc::POLLIN) == 0)
    }

    /// Its group as it is shown: its name is its own to choose, and may be of any length and of anything that a terminal obeys.
    pub fn shown_group(&self) -> String {
        const LONGEST: usize = 200;
        let group = self.group.as_deref().unwrap_or("?").escape_debug().to_string();
        match group.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}...", &group[..end]),
            None => group,
        }
    }

    /// As it is logged: process, user, group.
    pub fn text(&self) -> String {
        let user = self.user.map_or("?".to_owned(), |user| user.to_string());
        let label = self.label.as_ref().map_or(String::new(), |label| format!(" label {label}"));
        format!("pid {} user {user} {}{label}", self.pid, self.shown_group())
    }
}

fn process_of(socket: i32, pid: i32) -> Option<OwnedFd> {
    let (mut process, mut len) = (-1i32, 4u32);
    // SAFETY: four writable bytes, and their number.
    let got = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut len,
        )
    };
    if got == 0 && process >= 0 {
        // SAFETY: the kernel has just made it for us.
        return Some(unsafe { OwnedFd::from_raw_fd(process) });
    }
    // Before Linux 6.5: by its number, right after it came.
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let _ = process.as_fd();
    Some(process)
}

/// The control group: of the unified hierarchy if it is more than the root there, else of the first other one that has some (older
/// container engines use one of those).
fn group_of(pid: i32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    group_in(&text)
}

const HIERARCHIES: [&str; 4] = ["", "name=systemd", "pids", "memory"];

pub fn group_in(text: &str) -> Option<String> {
    let path = |hierarchy: &str| {
        text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let names = parts.next()?;
            (names.split(',').any(|name| name == hierarchy)).then(|| parts.next()).flatten()
        })
    };
    let found = HIERARCHIES.iter().filter_map(|hierarchy| path(hierarchy));
    let mut any = None;
    for group in found {
        if group != "/" {
            return Some(group.to_owned());
        }
        any = Some(group.to_owned());
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_either_layout() {
        assert_eq!(
            group_in("0::/system.slice/x.scope\n").as_deref(),
            Some("/system.slice/x.scope")
        );
        let hybrid = "9:name=systemd:/a\n8:cpu,cpuacct:/c\n7:memory:/b\n0::/\n";
        assert_eq!(group_in(hybrid).as_deref(), Some("/a"));
        assert_eq!(group_in("5:memory:/b\n0::/\n").as_deref(), Some("/b"));
        assert_eq!(group_in("5:memory:/\n0::/\n").as_deref(), Some("/"));
        assert_eq!(group_in("nonsense"), None);
        // A name may hold what separates the fields.
        assert_eq!(group_in("0::/a:b\n").as_deref(), Some("/a:b"));
    }

    #[test]
    fn a_group_is_shown_in_one_short_line() {
        let shown = |group: &str| Who { group: Some(group.to_owned()), ..Who::default() }.text();
        assert!(shown("/a/b").ends_with(" /a/b"));
        let text = shown(&"/\u{1b}[2J".repeat(1000));
        assert!(text.len() < 400 && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn who_comes_is_known_and_seen_to_go() {
        let [ours, theirs] = meet::pair().unwrap();
        let who = Who::came(ours, Some("x")).unwrap();
        assert_eq!(who.pid, std::process::id() as i32);
        assert!(who.lives() && who.group.is_some());
        [ours, theirs].into_iter().for_each(ringlet_linux::sys::close);
    }
}
