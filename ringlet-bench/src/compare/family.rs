//! What was started here, however far it has gone from us since: its processor time is counted, and it is ended. And whether somebody wants
//! us to end.

use std::collections::HashSet;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::errno::Errno;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, kill};
use nix::sys::time::TimeValLike;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::time::clock_getcpuclockid;
use nix::unistd::{Pid, SysconfVar, getpid, sysconf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};

/// For those that were asked to end; then they are killed.
const END_WITHIN: Duration = Duration::from_secs(5);
const GIVE_UP_AFTER: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const LOOKS_IN_VAIN: u32 = 2;

pub struct Family {
    /// Our children from before we began (a shell that became us may have had some): none of ours, nor are theirs.
    strangers: HashSet<Pid>,
}

pub struct Member {
    pub pid: Pid,
    parent: Pid,
    cpu_seconds: f64,
}

impl Family {
    pub fn new() -> Result<Family> {
        let none = Family { strangers: HashSet::new() };
        let strangers = none.members().into_iter().map(|member| member.pid).collect();
        // Who leaves its parent, as servers do, becomes our child.
        nix::sys::prctl::set_child_subreaper(true)?;
        Ok(Family { strangers })
    }

    pub fn members(&self) -> Vec<Member> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut others: Vec<Member> = pids
            .map(Pid::from_raw)
            .filter(|pid| !self.strangers.contains(pid))
            .filter_map(Member::read)
            .collect();
        let mut parents = vec![getpid()];
        let mut found = Vec::new();
        while let Some(parent) = parents.pop() {
            let (children, rest): (Vec<Member>, _) =
                others.into_iter().partition(|member| member.parent == parent);
            others = rest;
            parents.extend(children.iter().map(|child| child.pid));
            found.extend(children);
        }
        found
    }

    /// Of those that we have not waited for, with their children that they have waited for.
    pub fn cpu_seconds(&self) -> f64 {
        self.members().iter().map(|member| member.cpu_seconds).sum()
    }

    /// Ends all of it, but for what is not ours to kill.
    pub fn end(&self) {
        let began = Instant::now();
        let mut asked = HashSet::new();
        let mut none = 0;
        // One look may miss a process whose parent ended beside it.
        while none < LOOKS_IN_VAIN {
            let left = self.members();
            let patient = began.elapsed() < END_WITHIN;
            for Member { pid, parent, .. } in &left {
                let signal = if patient { Signal::SIGTERM } else { Signal::SIGKILL };
                // Asked once: a second SIGTERM is "at once" to some. A stopped one hears nothing until it goes on.
                if !patient || asked.insert(*pid) {
                    let _ = kill(*pid, signal);
                    let _ = kill(*pid, Signal::SIGCONT);
                }
                if *parent == getpid() {
                    let _ = waitpid(*pid, Some(WaitPidFlag::WNOHANG));
                }
            }
            if began.elapsed() > GIVE_UP_AFTER && !left.is_empty() {
                // Another user's, as what was started by sudo, or in the kernel's hands.
                let pids: Vec<String> = left.iter().map(|member| member.pid.to_string()).collect();
                eprintln!("ringlet: left behind, since it can't be ended: {}", pids.join(", "));
                return;
            }
            none = if left.is_empty() { none + 1 } else { 0 };
            if none == 0 {
                sleep(LOOK_AGAIN);
            }
        }
    }
}

impl Member {
    /// None for a process that has ended meanwhile.
    fn read(pid: Pid) -> Option<Member> {
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let text = String::from_utf8_lossy(&text);
        // proc_pid_stat(5): behind the name, which may hold anything, come state, ppid and others; utime is field 14.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let parent = Pid::from_raw(fields.get(1)?.parse().ok()?);
        let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100) as f64;
        let seconds = |fields: &[&str]| -> f64 {
            fields.iter().filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / ticks
        };
        // Its own time is told to the nanosecond elsewhere.
        let own = clock_getcpuclockid(pid)
            .and_then(|clock| clock.now())
            .map_or_else(|_| seconds(&fields[11..13]), |time| time.num_nanoseconds() as f64 / 1e9);
        Some(Member { pid, parent, cpu_seconds: own + seconds(fields.get(13..15)?) })
    }
}

/// Of those of our children that we have waited for, with theirs.
pub fn waited_cpu_seconds() -> Result<f64, Errno> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    Ok((usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6)
}

/// Whoever asks us to end, or no longer reads what we say, finds all ended that was started.
pub struct Stop(UnixStream);

impl Stop {
    pub fn new() -> Result<Stop> {
        let (ours, theirs) = UnixStream::pair()?;
        for signal in [SIGHUP, SIGINT, SIGTERM, SIGPIPE] {
            // As nohup(1) has it.
            if signal == SIGHUP && is_ignored(signal) {
                continue;
            }
            signal_hook::low_level::pipe::register(signal, theirs.try_clone()?)?;
        }
        Ok(Stop(ours))
    }

    pub fn is_asked(&self) -> bool {
        self.wait(None, Duration::ZERO).is_ok_and(|woken| woken == Woken::Stop)
    }

    /// Until that is readable, or we are to end, or the time is over.
    pub fn wait(&self, that: Option<&dyn AsFd>, time: Duration) -> Result<Woken> {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut look = vec![PollFd::new(&self.0, PollFlags::IN)];
        look.extend(that.map(|that| PollFd::from_borrowed_fd(that.as_fd(), PollFlags::IN)));
        match poll(&mut look, Some(&time)) {
            Err(rustix::io::Errno::INTR) | Ok(0) => Ok(Woken::Not),
            Err(error) => Err(error.into()),
            Ok(_) if !look[0].revents().is_empty() => Ok(Woken::Stop),
            Ok(_) => Ok(Woken::That),
        }
    }
}

fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[derive(PartialEq, Eq)]
pub enum Woken {
    Not,
    Stop,
    That,
}
