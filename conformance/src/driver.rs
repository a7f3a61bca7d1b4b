//! Runs each case on the kernel and with the library, and compares the transcripts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use similar::TextDiff;
use tempfile::NamedTempFile;

use crate::case::{BY_A_CHILD, Case, Family, Path, RING, Role, Run, checksum};
use crate::sys;

/// A case in one address family.
#[derive(Clone, Copy)]
pub struct Instance {
    pub case: &'static Case,
    pub family: Family,
}

impl Instance {
    pub fn name(self) -> String {
        format!("{}{}", self.case.name, self.family.suffix())
    }
}

/// One way to run a case.
#[derive(Clone)]
struct Pass {
    name: &'static str,
    /// The roles that get the library.
    wrapped: &'static [Role],
    spin_us: Option<u32>,
    unforgiving: Option<u32>,
    adapter: Option<u64>,
    strangers: bool,
}

pub struct Options {
    /// None compares the kernel with itself.
    pub preload: Option<PathBuf>,
    pub spin_us: Option<u32>,
    pub unforgiving: Option<u32>,
    /// The number of the adapter that mirrors connections.
    pub adapter: Option<u64>,
    /// The client is another user's.
    pub strangers: bool,
    pub repeat: u32,
    pub jobs: usize,
    pub limit: Duration,
    pub verbose: bool,
    /// A case that fails is run once more, by itself and with the same seeds, and counts as passed if it passes then.
    pub retry: bool,
    /// Where the library notes what it moves, and how: a case can't tell of a mirror, nor on which path anything is in unforgiving mode.
    pub moves: NamedTempFile,
}

/// Lines of a difference that are shown.
const DIFF_LINES: usize = 45;

/// Any user but root, as whom the driver runs then.
const NOBODY: u32 = 65534;

const KERNEL: Pass = Pass {
    name: "kernel",
    wrapped: &[],
    spin_us: None,
    unforgiving: None,
    adapter: None,
    strangers: false,
};

fn passes(options: &Options, case: &Case) -> Vec<Pass> {
    if options.preload.is_none() {
        return vec![Pass { name: "kernel again", ..KERNEL }];
    }
    let Options { spin_us, unforgiving, adapter, strangers, .. } = *options;
    let both = Pass { name: "both", wrapped: Role::ALL, spin_us, unforgiving, adapter, strangers };
    let mut passes = vec![both.clone()];
    if spin_us.is_none() && unforgiving.is_none() {
        passes.push(Pass { name: "both, sleeping", spin_us: Some(0), ..both });
        if case.each_side {
            passes.push(Pass { name: "client only", wrapped: &[Role::Client], ..KERNEL });
            passes.push(Pass { name: "server only", wrapped: &[Role::Server], ..KERNEL });
        }
    }
    passes
}

// ---- one run ----

/// What one process of a case left behind.
struct Outcome {
    role: Role,
    lines: Vec<String>,
    remarks: Vec<String>,
    errors: String,
}

struct Process {
    role: Role,
    child: Child,
    output: File,
    errors: File,
    ended: Option<ExitStatus>,
    hung: Option<String>,
}

fn roles(case: &Case) -> &'static [Role] {
    match case.run {
        Run::Pair(..) => &[Role::Client, Role::Server],
        Run::Solo(_) => &[Role::Solo],
    }
}

/// Each process of each run draws otherwise, and alike when all is run again.
fn seed_of(seed: u32, instance: Instance, role: Role, round: u32) -> u32 {
    let name = format!("{seed}/{}/{}/{round}", instance.name(), role.name());
    checksum(name.as_bytes()) as u32 | 1
}

fn start(
    instance: Instance,
    role: Role,
    pass: &Pass,
    round: u32,
    options: &Options,
    control: UnixStream,
) -> std::io::Result<Process> {
    let (output, errors) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["case", instance.case.name, "--role", role.name()]);
    command.args(["--family", &format!("{:?}", instance.family)]);
    let ours = |name: &str| name == "LD_PRELOAD" || name.starts_with("RINGLET_");
    // A panic's trace would be of the case, and takes long.
    command.env("RUST_BACKTRACE", "0");
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_str().is_some_and(ours)) {
        command.env_remove(name);
    }
    if let Some(library) = options.preload.as_ref().filter(|_| pass.wrapped.contains(&role)) {
        command.env("LD_PRELOAD", library).env("RINGLET_MOVE_AFTER", "0");
        if let Some(spin) = pass.spin_us {
            command.env("RINGLET_SPIN_US", spin.to_string());
        }
        if let Some(adapter) = pass.adapter {
            command.env("RINGLET_ADAPTER", adapter.to_string());
            command.env("RINGLET_MOVES", options.moves.path());
        }
        if let Some(seed) = pass.unforgiving {
            let seed = seed_of(seed, instance, role, round);
            command.env("RINGLET_UNFORGIVING", seed.to_string());
            command.env("RINGLET_MOVES", options.moves.path());
        }
    }
    command.stdin(OwnedFd::from(control)).stdout(output.try_clone()?).stderr(errors.try_clone()?);
    if options.strangers && role == Role::Client {
        command.uid(NOBODY).gid(NOBODY);
    }
    // A group of its own: what a case leaves behind can be ended with it, and nothing else.
    let child = command.process_group(0).spawn()?;
    Ok(Process { role, child, output, errors, ended: None, hung: None })
}

impl Process {
    fn has_ended(&mut self) -> std::io::Result<bool> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended.is_some())
    }

    fn end(&mut self) -> std::io::Result<()> {
        if self.hung.is_some() {
            // Not yet waited for, so the group's number can't have gone to anyone else.
            let _ = sys::kill(-(self.child.id() as i32), libc::SIGKILL);
            self.ended = Some(self.child.wait()?);
        }
        Ok(())
    }

    fn outcome(mut self) -> std::io::Result<Outcome> {
        let text = contents(&mut self.output)?;
        let (remarks, mut lines): (Vec<String>, Vec<String>) =
            text.lines().map(String::from).partition(|line| line.starts_with('#'));
        // A process and its children write down what they see as it comes: nothing says in which order.
        lines.sort_by_key(|line| line.starts_with(BY_A_CHILD));
        lines.push(match (self.hung, self.ended.unwrap_or_default()) {
            (Some(place), _) => format!("hung {place}"),
            (None, status) => match status.signal() {
                Some(signal) => format!("killed by signal {signal}"),
                None => format!("exit {}", status.code().unwrap_or_default()),
            },
        });
        Ok(Outcome { role: self.role, lines, remarks, errors: contents(&mut self.errors)? })
    }
}

fn contents(file: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// In which system call each thread of a process is, for the report of one that hangs.
fn whereabouts(pid: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let places = tasks.map(|task| {
        let word = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let call = word("syscall");
        let number = call.split(' ').next().unwrap_or_default().trim().to_string();
        format!("in system call {number} ({})", word("wchan"))
    });
    places.collect::<Vec<_>>().join(", ")
}

fn run_once(
    instance: Instance,
    pass: &Pass,
    round: u32,
    options: &Options,
) -> std::io::Result<Vec<Outcome>> {
    let (near, far) = UnixStream::pair()?;
    let mut ends = [near, far].into_iter();
    let mut processes = Vec::new();
    for role in roles(instance.case) {
        let control = ends.next().expect("a case has at most two processes");
        processes.push(start(instance, *role, pass, round, options, control)?);
    }
    drop(ends);
    let end = Instant::now() + options.limit;
    loop {
        let overdue = Instant::now() > end;
        let mut all_ended = true;
        for process in &mut processes {
            all_ended &= process.has_ended()?;
        }
        if overdue {
            // All are asked where they are before the end of one lets another go on.
            for process in processes.iter_mut().filter(|process| process.ended.is_none()) {
                process.hung = Some(whereabouts(process.child.id()));
            }
            for process in &mut processes {
                process.end()?;
            }
        }
        if all_ended || overdue {
            return processes.into_iter().map(Process::outcome).collect();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

// ---- comparing ----

/// The kernel's transcript, with the lines that the case declares to be different put in place.
fn expected(case: &Case, kernel: &[Outcome]) -> Result<Vec<Vec<String>>, String> {
    let mut expected: Vec<Vec<String>> = kernel.iter().map(|o| o.lines.clone()).collect();
    for difference in case.differences {
        let mut found = false;
        for lines in &mut expected {
            for line in lines.iter_mut().filter(|line| *line == difference.kernel) {
                *line = difference.ringlet.into();
                found = true;
            }
            // An empty line stands for none.
            lines.retain(|line| !line.is_empty());
        }
        if !found {
            return Err(format!(
                "declares a line that the kernel never writes: {}",
                difference.kernel
            ));
        }
    }
    Ok(expected)
}

fn compare(instance: Instance, pass: &Pass, kernel: &[Outcome], got: &[Outcome]) -> Option<String> {
    let both_wrapped = pass.wrapped.len() == Role::ALL.len();
    let wanted = if both_wrapped {
        expected(instance.case, kernel)
    } else {
        Ok(kernel.iter().map(|o| o.lines.clone()).collect())
    };
    let wanted = match wanted {
        Ok(wanted) => wanted,
        Err(stale) => return Some(stale),
    };
    // Where the path changes by chance, what differs on the ring need not.
    let as_on_kernel = || kernel.iter().zip(got).all(|(kernel, got)| kernel.lines == got.lines);
    if pass.unforgiving.is_some() && as_on_kernel() {
        return None;
    }
    let mut report = String::new();
    for (wanted, got) in wanted.iter().zip(got).filter(|(wanted, got)| **wanted != got.lines) {
        report += &difference(got.role.name(), wanted, &got.lines);
    }
    report += &misplaced(instance.case, pass, got).unwrap_or_default();
    if report.is_empty() {
        return None;
    }
    for outcome in got {
        let lines =
            outcome.remarks.iter().map(String::as_str).chain(outcome.errors.lines().take(20));
        report.extend(lines.map(|line| format!("{}: {line}\n", outcome.role.name())));
    }
    Some(report)
}

fn difference(role: &str, wanted: &[String], got: &[String]) -> String {
    let (old, new) = (wanted.join("\n") + "\n", got.join("\n") + "\n");
    let diff = TextDiff::from_lines(&old, &new);
    let header = (format!("{role} expected"), format!("{role} got"));
    let all = diff.unified_diff().context_radius(3).header(&header.0, &header.1).to_string();
    let lines: Vec<&str> = all.lines().collect();
    if lines.len() <= DIFF_LINES {
        return all;
    }
    // One that ended early misses all the rest: its start and its end tell.
    let (start, end) = (&lines[..DIFF_LINES * 2 / 3], &lines[lines.len() - DIFF_LINES / 3..]);
    format!("{}\n...\n{}\n", start.join("\n"), end.join("\n"))
}

/// Says if the connections were not where they had to be.
fn misplaced(case: &Case, pass: &Pass, got: &[Outcome]) -> Option<String> {
    let told = got.iter().flat_map(|o| &o.remarks).filter_map(|r| r.strip_prefix("#path "));
    let paths: Vec<i32> = told.filter_map(|path| path.parse().ok()).collect();
    // (Datagrams of two users stay on the kernel: the port could become somebody else's.)
    let stays = pass.strangers && case.name.starts_with("datagrams/");
    if case.path == Path::Any || pass.wrapped.is_empty() || pass.unforgiving.is_some() || stays {
        None
    } else if pass.wrapped.len() < Role::ALL.len() {
        paths.contains(&RING).then(|| "a connection with one wrapped side claims the ring\n".into())
    } else if paths.is_empty() {
        Some("no connection was warmed up\n".into())
    } else {
        let stayed = paths.iter().any(|path| *path != RING);
        stayed.then(|| format!("not all connections reached the ring: {paths:?}\n"))
    }
}

struct Failure {
    pass: &'static str,
    report: String,
}

/// All runs of one instance; returns how many there were, and those that failed.
fn examine(instance: Instance, options: &Options) -> (usize, Vec<Failure>) {
    let broken = |pass, error: std::io::Error| Failure { pass, report: format!("{error}\n") };
    let kernel = match run_once(instance, &KERNEL, 0, options) {
        Ok(kernel) => kernel,
        Err(error) => return (1, vec![broken(KERNEL.name, error)]),
    };
    if let Some(bad) = kernel.iter().find(|o| unsound(&o.lines)) {
        let report = format!("{}:\n{}\n{}", bad.role.name(), bad.lines.join("\n"), bad.errors);
        return (1, vec![Failure { pass: KERNEL.name, report }]);
    }
    let mut runs = 0;
    let mut failures = Vec::new();
    for pass in passes(options, instance.case) {
        for round in 0..options.repeat {
            runs += 1;
            let report = match run_once(instance, &pass, round, options) {
                Ok(got) => compare(instance, &pass, &kernel, &got),
                Err(error) => Some(broken(pass.name, error).report),
            };
            failures.extend(report.map(|report| Failure { pass: pass.name, report }));
        }
    }
    (runs, failures)
}

/// A transcript that nothing can be compared with.
fn unsound(lines: &[String]) -> bool {
    let end = lines.last().map_or("", String::as_str);
    // By signal 6: a panic, where those abort.
    end.starts_with("hung")
        || matches!(end, "exit 101" | "killed by signal 6")
        || lines.iter().any(|l| l.ends_with(": never"))
}

// ---- all of it ----

#[derive(Default)]
struct Tally {
    cases: usize,
    runs: usize,
    failed: usize,
}

fn topic(instance: Instance) -> &'static str {
    instance.case.name.split('/').next().unwrap_or_default()
}

fn tell(instance: Instance, failures: &[Failure]) {
    for failure in failures {
        println!("FAIL  {} [{}]\n{}", instance.name(), failure.pass, failure.report);
    }
}

fn lines(instance: Instance, failures: &[Failure]) -> Vec<String> {
    failures.iter().map(|failure| format!("{} [{}]", instance.name(), failure.pass)).collect()
}

/// Runs the instances, prints failures as they come and a table at the end; true if all is well.
pub fn run(instances: &[Instance], options: &Options) -> bool {
    let next = AtomicUsize::new(0);
    let tallies: Mutex<BTreeMap<&str, Tally>> = Mutex::default();
    let failed: Mutex<Vec<(Instance, Vec<Failure>)>> = Mutex::default();
    let work = || {
        while let Some(instance) = instances.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let (runs, failures) = examine(*instance, options);
            let seconds = start.elapsed().as_secs_f32();
            let mut tallies = tallies.lock().expect("no worker panics");
            let tally = tallies.entry(topic(*instance)).or_default();
            tally.cases += 1;
            tally.runs += runs;
            tally.failed += usize::from(!failures.is_empty());
            if failures.is_empty() && options.verbose {
                println!("ok    {} ({runs} runs, {seconds:.1} s)", instance.name());
            }
            if !failures.is_empty() {
                tell(*instance, &failures);
                failed.lock().expect("no worker panics").push((*instance, failures));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(work);
        }
    });

    let mut tallies = tallies.into_inner().expect("no worker panics");
    let mut failed = failed.into_inner().expect("no worker panics");
    if options.retry {
        failed.retain_mut(|(instance, failures)| {
            let (_, again) = examine(*instance, options);
            tell(*instance, &again);
            if again.is_empty() {
                println!("flaky: {}", lines(*instance, failures).join(", "));
                if let Some(tally) = tallies.get_mut(topic(*instance)) {
                    tally.failed -= 1;
                }
                return false;
            }
            *failures = again;
            true
        });
    }
    println!("{:<14} {:>6} {:>6} {:>7}", "topic", "cases", "runs", "failed");
    for (topic, tally) in &tallies {
        println!("{topic:<14} {:>6} {:>6} {:>7}", tally.cases, tally.runs, tally.failed);
    }
    let mut failed: Vec<String> = failed.iter().flat_map(|(i, all)| lines(*i, all)).collect();
    failed.sort();
    failed.dedup();
    for line in &failed {
        println!("failed: {line}");
    }
    let bad: usize = tallies.values().map(|t| t.failed).sum();
    let all: usize = tallies.values().map(|t| t.cases).sum();
    println!("{} passed, {bad} failed", all - bad);
    let notes = std::fs::read_to_string(options.moves.path()).unwrap_or_default();
    let told = |how| notes.lines().filter(|line| *line == how).count();
    let (moved, mirrored) = (told("moved"), told("mirrored"));
    let (wanted, others) = match options.adapter {
        None => (moved, mirrored),
        Some(_) => (mirrored, moved),
    };
    if options.unforgiving.is_some() || options.adapter.is_some() {
        println!("{wanted} ends of connections used the ring as they should, {others} otherwise");
    }
    let used = wanted > 0 || (options.unforgiving.is_none() && options.adapter.is_none());
    bad == 0 && used && others == 0
}
