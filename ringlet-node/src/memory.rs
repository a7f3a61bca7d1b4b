//! How much memory what carries may take, where the service's control group has a limit: beyond that the kernel would end the process that carries for all.

use std::fs;
use std::path::{Path, PathBuf};

/// What the service and its processes take besides.
const BESIDE: u64 = 32 << 20;
/// What carries between tenants, what carries to other hosts, and what keeps reflective memory, are processes that know nothing of each other.
const PROCESSES: u64 = 3;
/// Of a connection, beside its rings.
const OF_A_LINK: u64 = 128 << 10;

/// Bytes that one process may take for what it carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room(u64);

impl Default for Room {
    /// Without a limit.
    fn default() -> Room {
        Room(u64::MAX)
    }
}

impl Room {
    /// By the limits of our control group and of those above.
    pub fn found() -> Room {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let groups = groups_in(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"));
        let left = groups.iter().filter_map(|(group, version)| version.left(group)).min();
        Room(left.map_or(u64::MAX, |left| left.saturating_sub(BESIDE) / PROCESSES))
    }

    /// How many connections, each of so many rings of this size.
    pub fn connections(self, rings: u64, ring_bytes: u64) -> usize {
        usize::try_from(self.0 / connection_bytes(rings, ring_bytes)).unwrap_or(usize::MAX)
    }

    /// One more, beside those that take so many bytes: their rings may be of other sizes, of a policy before.
    pub fn admits(self, taken: u64, rings: u64, ring_bytes: u64) -> bool {
        taken.saturating_add(connection_bytes(rings, ring_bytes)) <= self.0
    }
}

/// What a connection takes, of so many rings of this size.
pub fn connection_bytes(rings: u64, ring_bytes: u64) -> u64 {
    rings.saturating_mul(ring_bytes).saturating_add(OF_A_LINK)
}

/// Rings of a connection to another host; and of one between two tenants, each of whom has a segment.
pub const RINGS_OF_A_LANE: u64 = 2;
pub const RINGS_OF_A_PAIR: u64 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    One,
    Two,
}

impl Version {
    /// What this group may still take; `None` without a limit.
    fn left(self, group: &Path) -> Option<u64> {
        let [limit, used] = match self {
            Version::One => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
            Version::Two => ["memory.max", "memory.current"],
        };
        let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // (As `max` no number is read; an old hierarchy's largest one is no limit either.)
        let limit = number(limit).filter(|limit| *limit < 1 << 62)?;
        Some(limit.saturating_sub(number(used).unwrap_or(0)))
    }
}

/// The directories of our group, and of those above as far as they are mounted.
fn groups_in(own: &str, mounts: &str) -> Vec<(PathBuf, Version)> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((place, kind)) = line.split_once(" - ") else { continue };
        let mut fields = place.split(' ').skip(3);
        let (Some(root), Some(point)) = (fields.next(), fields.next()) else { continue };
        let is_of_memory = kind.split([' ', ',']).any(|word| word == "memory");
        let (version, hierarchy) = match kind.split(' ').next() {
            Some("cgroup2") => (Version::Two, ""),
            Some("cgroup") if is_of_memory => (Version::One, "memory"),
            _ => continue,
        };
        let path = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let names = parts.next()?;
            names.split(',').any(|name| name == hierarchy).then(|| parts.next())?
        });
        let below = path.and_then(|path| Path::new(path).strip_prefix(root).ok());
        if let Some(below) = below {
            let group = Path::new(point).join(below);
            let above = group.ancestors().take_while(|group| group.starts_with(point));
            found.extend(above.map(|group| (group.to_owned(), version)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "24 22 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n\
                          25 22 0:24 /pods /sys/fs/old rw - cgroup cgroup rw,memory\n\
                          26 22 0:25 / /sys/fs/other rw - cgroup cgroup rw,cpu\n";

    #[test]
    fn own_groups_are_found_in_either_layout() {
        let group = |path: &str, version| (PathBuf::from(path), version);
        assert_eq!(
            groups_in("0::/a/b\n4:memory:/pods/c\n3:cpu:/x\n", MOUNTS),
            [
                group("/sys/fs/cgroup/a/b", Version::Two),
                group("/sys/fs/cgroup/a", Version::Two),
                group("/sys/fs/cgroup", Version::Two),
                group("/sys/fs/old/c", Version::One),
                group("/sys/fs/old", Version::One),
            ]
        );
        // Of another part of the hierarchy than is mounted.
        assert_eq!(groups_in("4:memory:/elsewhere\n", MOUNTS), []);
    }

    #[test]
    fn what_is_left_is_shared_among_connections() {
        let place = std::env::temp_dir().join(format!("ringlet-memory-{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        let say = |name: &str, text: &str| fs::write(place.join(name), text).unwrap();
        say("memory.max", "max\n");
        assert_eq!(Version::Two.left(&place), None);
        say("memory.max", "134217728\n");
        say("memory.current", "33554432\n");
        assert_eq!(Version::Two.left(&place), Some(96 << 20));
        fs::remove_dir_all(&place).unwrap();
        let room = Room(32 << 20);
        assert_eq!(room.connections(RINGS_OF_A_LANE, 256 << 10), 51);
        assert_eq!(room.connections(RINGS_OF_A_PAIR, 256 << 10), 28);
        let large = connection_bytes(RINGS_OF_A_LANE, 16 << 20) - OF_A_LINK;
        assert!(!room.admits(large, RINGS_OF_A_LANE, 64 << 10), "one took all of it");
        assert!(room.admits(large / 2, RINGS_OF_A_LANE, 64 << 10));
        assert_eq!(Room(u64::MAX).connections(RINGS_OF_A_PAIR, u64::MAX), 1);
    }
}
