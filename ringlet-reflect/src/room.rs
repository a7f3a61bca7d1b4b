//! How much memory this process may still have before the kernel ends somebody for it: of the machine, and of each control group that it is in.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// In bytes. (As good as endless where nothing says.)
pub fn left() -> u64 {
    let machine = read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of = |version: &Version| {
        let own = group(&groups, version.line)?;
        Some(version.of_groups(Path::new(version.root), &own))
    };
    VERSIONS.iter().filter_map(of).chain(machine).min().unwrap_or(u64::MAX)
}

/// How control groups tell of memory.
struct Version {
    root: &'static str,
    line: &'static str,
    most: &'static str,
    used: &'static str,
    /// Pages of files, which the kernel takes back first.
    files: [&'static str; 2],
}

const VERSIONS: [Version; 2] = [
    Version {
        root: "/sys/fs/cgroup",
        line: "0::/",
        most: "memory.max",
        used: "memory.current",
        files: ["inactive_file", "active_file"],
    },
    Version {
        root: "/sys/fs/cgroup/memory",
        line: ":memory:/",
        most: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        files: ["total_inactive_file", "total_active_file"],
    },
];

/// What the kernel takes for available, and swap.
fn of_machine(meminfo: &str) -> Option<u64> {
    let kilobytes = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        value.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some((kilobytes("MemAvailable")? + kilobytes("SwapFree").unwrap_or(0)) << 10)
}

/// This process's, in the hierarchy of that line.
fn group(text: &str, line: &str) -> Option<PathBuf> {
    text.lines().find_map(|each| each.split_once(line).map(|(_, path)| PathBuf::from(path)))
}

impl Version {
    /// The least of it and all above. (Where it is not seen, in a container, the root is the container's.)
    fn of_groups(&self, root: &Path, own: &Path) -> u64 {
        own.ancestors()
            .filter_map(|group| self.of_group(&root.join(group)))
            .min()
            .unwrap_or(u64::MAX)
    }

    /// What its limit leaves, with swap where that has a limit too. (Otherwise it is the machine's.)
    fn of_group(&self, folder: &Path) -> Option<u64> {
        let number =
            |name: &str| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let (most, used) = (number(self.most)?, number(self.used)?);
        let stat = read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let of = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|line| line.parse::<u64>().ok()).unwrap_or(0)
        };
        let files: u64 = self.files.iter().map(|name| of(name)).sum();
        let swap = number("memory.swap.max")
            .map_or(0, |most| most.saturating_sub(number("memory.swap.current").unwrap_or(0)));
        Some(most.saturating_sub(used.saturating_sub(files)).saturating_add(swap))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_a_machine_and_all_its_groups_is_left() {
        let text = "MemTotal:  9 kB\nMemAvailable:   100 kB\nSwapFree:  28 kB\n";
        assert_eq!(of_machine(text), Some(128 << 10));
        assert_eq!(of_machine("MemTotal: 9 kB"), None);
        let [second, first] = &VERSIONS;
        let text = "4:memory:/x/y\n1:cpu:/x\n0::/a/b\n";
        assert_eq!(group(text, second.line), Some("a/b".into()));
        assert_eq!(group(text, first.line), Some("x/y".into()));
        let folder = tempfile::tempdir().unwrap();
        let (root, inner) = (folder.path(), folder.path().join("a/b"));
        std::fs::create_dir_all(&inner).unwrap();
        let set = |at: &Path, most: &str, used: u64| {
            std::fs::write(at.join("memory.max"), format!("{most}\n")).unwrap();
            std::fs::write(at.join("memory.current"), format!("{used}\n")).unwrap();
            std::fs::write(at.join("memory.stat"), "anon 7\ninactive_file 100\nactive_file 20\n")
                .unwrap();
        };
        assert_eq!(second.of_groups(root, Path::new("a/b")), u64::MAX, "none says");
        set(&inner, "max", 1000);
        set(&root.join("a"), "5000", 4000);
        assert_eq!(second.of_groups(root, Path::new("a/b")), 1120);
        set(&inner, "600", 700);
        assert_eq!(second.of_groups(root, Path::new("a/b")), 20);
        std::fs::write(inner.join("memory.swap.max"), "64").unwrap();
        assert_eq!(second.of_groups(root, Path::new("a/b")), 84);
        std::fs::write(inner.join("memory.swap.max"), "max").unwrap();
        assert_eq!(
            second.of_groups(root, Path::new("a/b")),
            20,
            "the machine's is counted by the machine"
        );
    }
}
