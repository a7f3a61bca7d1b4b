//! Where the children run: on which processors, in which class, with how much of a processor, and beside whom.

#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// What busy processors are to be like.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Crowd {
    /// For both ends and the hogs; empty: any.
    pub cpus: Vec<usize>,
    /// Processes that want a processor all the time.
    pub hogs: usize,
    /// Both ends under SCHED_FIFO.
    pub fifo: bool,
    /// How much of one processor both ends have together.
    pub percent: Option<u32>,
}

/// Processors, and whether by SCHED_FIFO. A child inherits both, as from taskset(1) and chrt(1).
pub struct Place {
    pub cpus: Vec<usize>,
    pub fifo: bool,
}

impl Place {
    /// Does that by a thread that is there.
    pub fn within<T>(&self, begin: impl FnOnce() -> T) -> Result<T> {
        let cpus = sched_getaffinity(Pid::from_raw(0)).context("sched_getaffinity")?;
        let _back = Back { cpus, is_other: !self.fifo };
        if !self.cpus.is_empty() {
            pin(&self.cpus)?;
        }
        if self.fifo {
            schedule(libc::SCHED_FIFO, 1).context("cannot become SCHED_FIFO")?;
        }
        Ok(begin())
    }
}

/// Brings the thread back to where it was.
struct Back {
    cpus: CpuSet,
    is_other: bool,
}

impl Drop for Back {
    fn drop(&mut self) {
        // Both were ours a moment ago.
        if !self.is_other {
            let _ = schedule(libc::SCHED_OTHER, 0);
        }
        let _ = sched_setaffinity(Pid::from_raw(0), &self.cpus);
    }
}

/// Binds the calling thread to these processors.
pub fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu).with_context(|| format!("core {cpu} is out of range"))?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot pin to {cpus:?}"))
}

fn schedule(policy: i32, priority: i32) -> io::Result<()> {
    // SAFETY: all of its fields are numbers.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = priority;
    // SAFETY: of the calling thread; the argument is read.
    match unsafe { libc::sched_setscheduler(0, policy, &param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Why we can't have children by SCHED_FIFO.
pub fn may_be_fifo() -> Result<()> {
    Place { cpus: Vec::new(), fifo: true }.within(|| ())
}

/// A control group whose processes have so much of one processor together; removed when it is dropped, which must be after their end.
pub struct Quota(PathBuf);

/// A control group of the unified hierarchy, at its top; removed as a `Quota` is.
pub struct Group(PathBuf);

impl Group {
    pub fn new(name: &str) -> Result<Group> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let unified = |line: &str| {
            let mut fields = line.split(' ').skip(1);
            let at = fields.next()?;
            (fields.next()? == "cgroup2").then(|| PathBuf::from(at))
        };
        let top = mounts.lines().find_map(unified).context("no cgroup2 is mounted")?;
        remove_forgotten(&top);
        let made = top.join(format!("{GROUP}{}-{name}", std::process::id()));
        // (Of one that was killed and had our number, as in a container each has.)
        let _ = fs::remove_dir(&made);
        fs::create_dir(&made).with_context(|| format!("cannot make {}", made.display()))?;
        Ok(Group(made))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// As who sees all of the hierarchy names it.
    pub fn name(&self) -> String {
        format!("/{}", self.0.file_name().unwrap_or_default().to_string_lossy())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

const PERIOD_US: u32 = 100_000;
const GROUP: &str = "ringlet-bench-";
/// Where version 1 has it.
const VERSION_1: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"];
const VERSION_2: &str = "/sys/fs/cgroup";

impl Quota {
    pub fn new(percent: u32) -> Result<Quota> {
        let quota = PERIOD_US / 100 * percent;
        let mut above: Vec<(PathBuf, bool)> =
            VERSION_1.iter().map(|path| (PathBuf::from(path), true)).collect();
        let ours = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let ours = ours.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        // Beside us if that is where we may, as in a session of systemd; else at the root.
        let beside = Path::new(VERSION_2).join(ours).parent().map(Path::to_owned);
        above.extend(beside.map(|path| (path, false)));
        above.push((VERSION_2.into(), false));
        for (above, is_first) in above {
            let lists = fs::read_to_string(above.join("cgroup.subtree_control"));
            let has_cpu = lists.is_ok_and(|list| list.split_whitespace().any(|it| it == "cpu"));
            let limits = if is_first { above.join("cpu.cfs_quota_us").exists() } else { has_cpu };
            if !limits {
                continue;
            }
            remove_forgotten(&above);
            let made = Quota(above.join(format!("{GROUP}{}", std::process::id())));
            if fs::create_dir(&made.0).is_err() {
                continue;
            }
            let written = if is_first {
                fs::write(made.0.join("cpu.cfs_period_us"), PERIOD_US.to_string())
                    .and_then(|()| fs::write(made.0.join("cpu.cfs_quota_us"), quota.to_string()))
            } else {
                fs::write(made.0.join("cpu.max"), format!("{quota} {PERIOD_US}"))
            };
            if written.is_ok() {
                return Ok(made);
            }
        }
        bail!("no control group can be made that limits processor time")
    }

    pub fn add(&self, pid: u32) -> Result<()> {
        let into = self.0.join("cgroup.procs");
        fs::write(&into, pid.to_string()).with_context(|| format!("{}", into.display()))
    }
}

/// Groups of whoever was killed before it could remove its own.
fn remove_forgotten(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(GROUP));
        let maker = maker.and_then(|maker| maker.split('-').next());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// Who has just ended may still be in it.
fn remove(group: &Path) {
    for _ in 0..100 {
        if fs::remove_dir(group).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_comes_back_from_where_it_began_something() {
        let here = || sched_getaffinity(Pid::from_raw(0)).unwrap();
        let before = here();
        let cpu = (0..CpuSet::count()).find(|&cpu| before.is_set(cpu).unwrap()).unwrap();
        let there = Place { cpus: vec![cpu], fifo: false }.within(here).unwrap();
        let only = (0..CpuSet::count()).filter(|&cpu| there.is_set(cpu).unwrap());
        assert_eq!(only.collect::<Vec<_>>(), [cpu]);
        assert_eq!(here(), before);
        assert!(Place { cpus: vec![usize::MAX], fifo: false }.within(|| ()).is_err());
        assert_eq!(here(), before);
    }
}
