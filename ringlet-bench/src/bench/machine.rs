//! What the figures were taken on.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::utsname::uname;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde::Serialize;

/// As `git describe` has it, if whoever built this said so.
const VERSION: &str = match option_env!("GIT_DESCRIBE") {
    Some(described) => described,
    None => env!("CARGO_PKG_VERSION"),
};

#[derive(Debug, Serialize)]
pub struct Machine {
    pub processor: String,
    pub cores: usize,
    pub kernel: String,
    pub virtual_machine: bool,
    pub version: &'static str,
    pub date: String,
    pub library: Option<String>,
    /// ringlet's own variables, which the wrapped children inherit.
    pub environment: BTreeMap<String, String>,
}

impl Machine {
    pub fn look() -> Result<Machine> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |key: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(key))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let name = uname()?;
        Ok(Machine {
            processor: field("model name").unwrap_or_else(|| name.machine().display().to_string()),
            cores: allowed_cpus()?.len(),
            kernel: format!("{} {}", name.sysname().display(), name.release().display()),
            virtual_machine: field("flags").is_some_and(|flags| flags.contains("hypervisor")),
            version: VERSION,
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            library: ringlet_programs::preload::library()
                .ok()
                .map(|path| path.display().to_string()),
            environment: env::vars().filter(|(key, _)| key.starts_with("RINGLET_")).collect(),
        })
    }

    pub fn headline(&self) -> String {
        let Machine { processor, cores, kernel, version, date, .. } = self;
        let kind = if self.virtual_machine { ", virtual machine" } else { "" };
        let plural = if *cores == 1 { "" } else { "s" };
        format!("ringlet {version}, {date}\n{processor}, {cores} core{plural}{kind}, {kernel}")
    }
}

/// What those have taken of processors so far, in nanoseconds; of one that has ended, nothing.
pub fn processor_time_of(pids: &[u32]) -> u64 {
    let time = |&pid: &u32| -> Option<u64> {
        let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(pid as i32)).ok()?;
        Some(Duration::from(clock_gettime(clock).ok()?).as_nanos() as u64)
    };
    pids.iter().filter_map(time).sum()
}

pub fn allowed_cpus() -> Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0)).context("sched_getaffinity")?;
    Ok((0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect())
}

/// Two cores for the two ends: the first allowed one, and the next that isn't its hyperthread.
pub fn two_cores() -> Result<(usize, usize)> {
    let cpus = allowed_cpus()?;
    let [first, rest @ ..] = cpus.as_slice() else { bail!("no core is allowed") };
    let path = format!("/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list");
    let siblings = parse_cpu_list(&fs::read_to_string(path).unwrap_or_default());
    match rest.iter().find(|cpu| !siblings.contains(cpu)).or(rest.first()) {
        Some(&second) => Ok((*first, second)),
        None => bail!("both ends can't be pinned apart: only core {first} is allowed"),
    }
}

/// `0,2-4`; what can't be read is left out.
fn parse_cpu_list(text: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(low), Ok(high)) = (low.parse::<usize>(), high.parse::<usize>()) {
            cpus.extend(low..=high);
        }
    }
    cpus
}

pub fn first_core() -> Result<usize> {
    allowed_cpus()?.first().copied().context("no core is allowed")
}

/// Raises the limit of open files as far as we may, for the children to inherit, and tells how many idle connections
/// that allows; some descriptors are left for everything else.
pub fn idle_limit() -> Result<usize> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard.saturating_sub(OTHER_DESCRIPTORS as u64) as usize)
}

/// Says how many descriptors so many connections need, where they can't be had.
pub fn have_descriptors_for(connections: usize) -> Result<()> {
    let limit = idle_limit()?;
    ensure!(
        connections <= limit,
        "{connections} connections need {} descriptors, and RLIMIT_NOFILE allows {} (ulimit -Hn)",
        connections + OTHER_DESCRIPTORS,
        limit + OTHER_DESCRIPTORS,
    );
    Ok(())
}

const OTHER_DESCRIPTORS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("0\n"), [0]);
        assert_eq!(parse_cpu_list("0,2-4"), [0, 2, 3, 4]);
        assert_eq!(parse_cpu_list(""), [0usize; 0]);
    }
}
