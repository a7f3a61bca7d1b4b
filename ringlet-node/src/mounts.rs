//! How the directory of the service's socket is mounted where its guests are: who is root there, and may write to it, can put a socket of its own in
//! the service's place. Programs tell that from ours by its mark (`ringlet_linux::service`), but are introduced by nobody any more.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A line of /proc/PID/mountinfo.
struct Mount<'a> {
    device: &'a str,
    /// What of the file system is mounted, and where.
    root: PathBuf,
    point: PathBuf,
    is_writable: bool,
}

impl Mount<'_> {
    fn parse(line: &str) -> Option<Mount<'_>> {
        let mut fields = line.split(' ').skip(2);
        let device = fields.next()?;
        let (root, point) = (unescaped(fields.next()?)?, unescaped(fields.next()?)?);
        let is_writable = fields.next()?.split(',').any(|option| option == "rw");
        Some(Mount { device, root, point, is_writable })
    }
}

/// KERNEL: space, tab, newline and backslash are there as `\` and three octal digits.
fn unescaped(text: &str) -> Option<PathBuf> {
    let mut path = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('\\') {
        path.push_str(before);
        path.push(char::from(u8::from_str_radix(behind.get(..3)?, 8).ok()?));
        rest = &behind[3..];
    }
    path.push_str(rest);
    Some(path.into())
}

/// Where a directory lies, whatever mount it is seen by.
struct Place {
    device: String,
    path: PathBuf,
}

impl Place {
    fn find(directory: &Path, mounts: &str) -> Option<Place> {
        let directory = directory.canonicalize().ok()?;
        let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
        let mount = &mounts[covering(&mounts, &directory)?];
        let rest = directory.strip_prefix(&mount.point).ok()?;
        Some(Place { device: mount.device.to_owned(), path: mount.root.join(rest) })
    }

    fn is_writable_in(&self, mounts: &str) -> bool {
        let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
        mounts.iter().enumerate().any(|(at, mount)| {
            let here = self.path.strip_prefix(&mount.root).map(|rest| mount.point.join(rest));
            let is_it = mount.is_writable && mount.device == self.device;
            // (Another one may lie over it.)
            is_it && here.is_ok_and(|here| covering(&mounts, &here) == Some(at))
        })
    }
}

/// Which of them this path leads to: of several at one point the last one.
fn covering(mounts: &[Mount], path: &Path) -> Option<usize> {
    let under = mounts.iter().enumerate().filter(|(_, mount)| path.starts_with(&mount.point));
    under.max_by_key(|(_, mount)| mount.point.components().count()).map(|(at, _)| at)
}

/// Is there a mount of its own at this directory, as of a container's, by which it can be written to?
pub fn is_mounted_writable(directory: &Path) -> bool {
    let text = text_of("self", "mountinfo").unwrap_or_default();
    let mounts: Vec<Mount> = text.lines().filter_map(Mount::parse).collect();
    let found = covering(&mounts, directory).map(|at| &mounts[at]);
    found.is_some_and(|mount| mount.is_writable && mount.point == directory)
}

/// Those who were looked at.
#[derive(Default)]
pub struct Watch {
    places: Vec<Place>,
    groups: HashSet<String>,
}

/// So many groups are remembered.
const GROUPS_MOST: usize = 4096;
const TEXT_MOST: u64 = 1 << 20;

impl Watch {
    pub fn of(directories: &[PathBuf]) -> Watch {
        let mounts = text_of("self", "mountinfo").unwrap_or_default();
        let places = directories.iter().filter_map(|directory| Place::find(directory, &mounts));
        Watch { places: places.collect(), groups: HashSet::new() }
    }

    /// Can the container of this process, in which it is root, write to one of the directories? Each group is looked at once.
    pub fn finds(&mut self, pid: i32, group: Option<&str>) -> bool {
        if self.groups.len() >= GROUPS_MOST {
            self.groups.clear();
        }
        let group = group.unwrap_or_default();
        if self.places.is_empty() || self.groups.contains(group) {
            return false;
        }
        let pid = pid.to_string();
        let text = |name| text_of(&pid, name).filter(|text| !text.is_empty());
        // (Of one that has ended meanwhile nothing is known, so that the next of its group is looked at.)
        let (Some(status), Some(users), Some(mounts)) =
            (text("status"), text("uid_map"), text("mountinfo"))
        else {
            return false;
        };
        self.groups.insert(group.to_owned());
        let levels = status
            .lines()
            .find_map(|line| Some(line.strip_prefix("NSpid:")?.split_whitespace().count()));
        levels.is_some_and(|levels| levels > 1)
            && has_root(&users)
            && self.places.iter().any(|place| place.is_writable_in(&mounts))
    }
}

/// Does a user namespace have the host's root among its users?
fn has_root(map: &str) -> bool {
    map.lines().any(|line| line.split_whitespace().nth(1) == Some("0"))
}

fn text_of(process: &str, name: &str) -> Option<String> {
    let mut text = String::new();
    let file = File::open(format!("/proc/{process}/{name}")).ok()?;
    file.take(TEXT_MOST).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw\n\
                        25 22 0:22 / /run rw,nosuid shared:5 - tmpfs tmpfs rw,mode=755\n";

    #[test]
    fn a_directory_is_found_by_whatever_mount() {
        let run = Place { device: "0:22".to_owned(), path: "/ringlet".into() };
        assert!(run.is_writable_in(HOST));
        let container = |options: &str, root: &str| {
            format!(
                "400 300 0:55 / / rw - overlay overlay rw\n401 400 0:22 {root} /srv/a\\040b {options} - tmpfs tmpfs rw\n"
            )
        };
        assert!(run.is_writable_in(&container("rw,nosuid", "/ringlet")));
        assert!(run.is_writable_in(&container("rw", "/")));
        assert!(!run.is_writable_in(&container("ro,nosuid", "/ringlet")));
        assert!(!run.is_writable_in(&container("rw", "/ringlet-labels")));
        let covered = format!("{HOST}{}", "30 25 0:22 /ringlet /run/ringlet ro - tmpfs tmpfs rw\n");
        assert!(!run.is_writable_in(&covered));
        let spaced = container("rw", "/ringlet");
        let mount = Mount::parse(spaced.lines().last().unwrap()).unwrap();
        assert_eq!((mount.point, mount.device), (PathBuf::from("/srv/a b"), "0:22"));
        assert!(Mount::parse("nonsense").is_none());
    }

    #[test]
    fn roots_of_user_namespaces_are_told_from_the_host_s() {
        assert!(has_root("         0          0 4294967295\n"));
        assert!(!has_root("         0       1000          1\n         1     100000      65536\n"));
    }

    #[test]
    fn who_ends_at_once_does_not_count_for_its_group() {
        let mut watch = Watch::of(&[std::env::temp_dir()]);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        assert!(!watch.finds(pid, Some("/a")) && watch.groups.is_empty());
        watch.finds(std::process::id() as i32, Some("/a"));
        assert!(watch.groups.contains("/a"));
    }

    #[test]
    fn who_sees_our_own_processes_is_no_container() {
        let mut watch = Watch::of(&[std::env::temp_dir()]);
        assert_eq!(watch.places.len(), 1);
        assert!(!watch.finds(std::process::id() as i32, Some("/a")));
    }
}
