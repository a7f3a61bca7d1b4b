//! One run of one comparison: a server and a client, in a directory and with a port of their own.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File, Permissions};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use regex::Regex;
use ringlet::reasons::Reason;
use rustix::process::{PidfdFlags, pidfd_open};
use serde::Serialize;
use tempfile::TempDir;

use super::comparison::{
    CPU, Comparison, Figure, Places, REQUESTS, Requests, SERVER_CPU, TIME, find, words,
};
use super::family::{Family, Stop, Woken, waited_cpu_seconds};
use ringlet_programs::joined;
use ringlet_programs::processes;
use ringlet_programs::program::{self, Reach};
use ringlet_programs::settings::{Environment, Flags, Settings, set_variable};
use ringlet_programs::sockets::{KernelSocket, LISTENING, Protocol, SocketTable, UNCONNECTED};

const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// For the reasons why connections don't move.
const LOOK_FOR_REASONS: Duration = Duration::from_millis(10);
/// Where ends tell that they have moved.
const MOVED: &str = "moved";
/// Of the output of what failed.
const LINES_SHOWN: usize = 5;

/// Who takes part.
pub struct Contender {
    pub name: String,
    /// The library that stands before its programs; none for the kernel.
    pub preload: Option<PathBuf>,
    /// Which ends run under it.
    pub server: bool,
    pub client: bool,
}

/// What came of a run.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// In the order of the comparison's.
    pub figures: Vec<f64>,
    /// That the client made, where that is known.
    pub requests: Option<f64>,
    pub client_seconds: f64,
    /// Processor time while the client ran, in all its processes and in all of the server's.
    pub client_cpu_seconds: f64,
    pub server_cpu_seconds: f64,
    /// Ends of connections that came into shared memory meanwhile.
    pub moved_ends: usize,
}

/// Where all runs happen.
pub struct Ground {
    pub family: Family,
    pub stop: Stop,
    /// How long a server may take to be ready, and a run to be done.
    pub ready_within: Duration,
    pub limit: Duration,
}

/// Somebody has asked us to end.
#[derive(Debug)]
pub struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("stopped")
    }
}

impl std::error::Error for Stopped {}

/// One that other users can enter, as whom a server may run.
fn directory() -> Result<TempDir> {
    let directory = TempDir::with_prefix("ringlet-compare-")?;
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
    Ok(directory)
}

impl Ground {
    /// Makes what all runs use, in a directory that they share.
    pub fn build(&self, comparison: &Comparison, kernel: &Contender) -> Result<TempDir> {
        let built = directory()?;
        let stage = Stage::new(self, kernel, comparison, &built)?;
        for command in &comparison.build {
            stage.run("build", command, false)?;
        }
        Ok(built)
    }

    pub fn play(
        &self,
        comparison: &Comparison,
        contender: &Contender,
        built: &TempDir,
    ) -> Result<Outcome> {
        Stage::new(self, contender, comparison, built)?.play(comparison, None)
    }

    /// Why nothing moved: told by a run that is looked at, and not measured.
    pub fn why_not_moved(
        &self,
        comparison: &Comparison,
        contender: &Contender,
        built: &TempDir,
    ) -> Result<String> {
        if !Settings::load(std::env::vars_os().collect(), &Flags::default()).config.enabled {
            return Ok("ringlet is turned off; `ringlet config` tells where".into());
        }
        for command in comparison.server.iter().chain([&comparison.client]) {
            let words = words(command, &Places::new())?;
            let arguments: Vec<_> = words[1..].iter().map(|word| word.as_ref()).collect();
            let reach = find(&words[0]).map(|path| program::inspect(&path, &arguments));
            if let Some(Reach::Unreached(why)) = reach {
                return Ok(format!("{} is out of ringlet's reach: {why}", words[0]));
            }
        }
        let mut reasons = BTreeMap::new();
        let stage = Stage::new(self, contender, comparison, built)?;
        stage.play(comparison, Some(&mut reasons))?;
        let told = reasons.into_iter().map(|(reason, times)| (times, reason));
        let mut told: Vec<(usize, String)> = told.collect();
        told.sort_by_key(|(times, _)| std::cmp::Reverse(*times));
        let told: Vec<String> = told.into_iter().map(|(_, reason)| reason).collect();
        Ok(if told.is_empty() {
            "none was seen; it had a few messages only, or belongs to a program that ringlet doesn't reach"
                .into()
        } else {
            told.join("; ")
        })
    }
}

/// Where one run happens. What it has started ends with it.
struct Stage<'a> {
    ground: &'a Ground,
    contender: &'a Contender,
    directory: TempDir,
    places: Places,
}

impl Stage<'_> {
    fn new<'a>(
        ground: &'a Ground,
        contender: &'a Contender,
        comparison: &Comparison,
        built: &TempDir,
    ) -> Result<Stage<'a>> {
        let directory = directory()?;
        // Free now; a port that the kernel gives nobody else soon.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let text = |path: &Path| {
            path.to_str().map(str::to_owned).with_context(|| format!("{path:?} is no text"))
        };
        let places = HashMap::from([
            ("port", port.to_string()),
            ("dir", text(directory.path())?),
            ("build", text(built.path())?),
            ("here", text(&comparison.here)?),
        ]);
        let moved = directory.path().join(MOVED);
        File::create(&moved)?.set_permissions(Permissions::from_mode(0o666))?;
        Ok(Stage { ground, contender, directory, places })
    }

    fn play(
        &self,
        comparison: &Comparison,
        reasons: Option<&mut BTreeMap<String, usize>>,
    ) -> Result<Outcome> {
        for command in &comparison.prepare {
            self.run("prepare", command, false)?;
        }
        let mut server = None;
        if let Some(command) = &comparison.server {
            let ready = Ready::of(&words(&comparison.ready, &self.places)?)?;
            if let Ready::Port(port) = &ready {
                ensure!(!ready.holds(self), "somebody else listens on port {port}");
            }
            let started = server.insert(self.start("server", command, self.contender.server)?);
            self.await_ready(started, &ready)
                .with_context(|| format!("the server ({})", brief(command)))?;
        }
        for command in &comparison.warm {
            self.run("warm", command, self.contender.client)?;
        }
        let moved_before = self.moved_ends();
        let (before, waited_before) = (self.ground.family.cpu_seconds(), waited_cpu_seconds()?);
        let began = Instant::now();
        let mut client = self.start("client", &comparison.client, self.contender.client)?;
        let status = self.wait(&mut client, self.ground.limit, reasons);
        let client_seconds = began.elapsed().as_secs_f64();
        // Both when nothing more happens, and before anything is ended.
        let client_cpu_seconds = waited_cpu_seconds()? - waited_before;
        let server_cpu_seconds = (self.ground.family.cpu_seconds() - before).max(0.0);
        let who = || format!("the client ({})", brief(&comparison.client));
        let status = status.with_context(who)?;
        if !status.success() {
            let server = server.as_mut().and_then(|server| server.try_wait().ok().flatten());
            let ended = server.filter(|status| !status.success()).map(|status| {
                format!("; the server had ended with {status}: {}", self.tail("server"))
            });
            let ended = ended.unwrap_or_default();
            bail!("{} ended with {status}: {}{ended}", who(), self.tail("client"));
        }
        let server_status = server.as_mut().and_then(|server| server.try_wait().ok().flatten());
        if let Some(status) = server_status.filter(|status| status.signal().is_some()) {
            bail!("the server had ended with {status}: {}", self.tail("server"));
        }
        let output = self.output("client");
        let requests = comparison.requests.as_ref().map(|requests| match requests {
            Requests::Number(number) => Ok(*number),
            Requests::Pattern(pattern) => self.read("requests", pattern, &output),
        });
        let requests = requests.transpose()?;
        let figure = |figure: &Figure| match figure.pattern.as_str() {
            TIME => Ok(client_seconds),
            CPU => Ok(client_cpu_seconds + server_cpu_seconds),
            SERVER_CPU => Ok(server_cpu_seconds / requests.unwrap_or(1.0)),
            REQUESTS => Ok(requests.unwrap_or(0.0) / client_seconds),
            pattern => self.read(&figure.name, pattern, &output),
        };
        Ok(Outcome {
            figures: comparison.figure.iter().map(figure).collect::<Result<_>>()?,
            requests,
            client_seconds,
            client_cpu_seconds,
            server_cpu_seconds,
            moved_ends: self.moved_ends().saturating_sub(moved_before),
        })
    }

    /// The last match: programs tell how they get on before they tell the result.
    fn read(&self, name: &str, pattern: &str, output: &str) -> Result<f64> {
        let found = Regex::new(pattern)?.captures_iter(output).last();
        let found = found.as_ref().and_then(|groups| groups.get(1)).with_context(|| {
            format!(
                "{name}: {pattern} matches nothing in the client's output: {}",
                self.tail("client")
            )
        })?;
        let found = found.as_str().trim();
        number(found).with_context(|| format!("{name}: {pattern} finds {found}, no number"))
    }

    fn moved_ends(&self) -> usize {
        let told = fs::read_to_string(self.directory.path().join(MOVED)).unwrap_or_default();
        told.lines().count()
    }

    fn start(&self, role: &str, command: &str, wrapped: bool) -> Result<Child> {
        ensure!(!self.ground.stop.is_asked(), Stopped);
        let words = words(command, &self.places)?;
        let log = File::options().create(true).append(true).open(self.log(role))?;
        let mut environment: Environment = std::env::vars_os().collect();
        match self.contender.preload.as_ref().filter(|_| wrapped) {
            Some(library) => {
                ringlet_programs::preload::preload(&mut environment, library)?;
                let moved = self.directory.path().join(MOVED);
                set_variable(&mut environment, "RINGLET_MOVES", moved.into());
            }
            // Whoever compares may be under ringlet himself.
            None => ringlet_programs::preload::unload(&mut environment),
        }
        let mut child = Command::new(&words[0]);
        child.args(&words[1..]).env_clear().envs(environment);
        child.current_dir(self.directory.path()).stdin(Stdio::null());
        child.stdout(log.try_clone()?).stderr(log);
        child.spawn().with_context(|| format!("cannot start {}", words[0]))
    }

    fn run(&self, role: &str, command: &str, wrapped: bool) -> Result<()> {
        self.run_within(role, command, wrapped, self.ground.limit)
    }

    fn run_within(&self, role: &str, command: &str, wrapped: bool, limit: Duration) -> Result<()> {
        let mut child = self.start(role, command, wrapped)?;
        let status = self.wait(&mut child, limit, None).with_context(|| brief(command))?;
        ensure!(status.success(), "{} ended with {status}: {}", brief(command), self.tail(role));
        Ok(())
    }

    fn wait(
        &self,
        child: &mut Child,
        limit: Duration,
        mut reasons: Option<&mut BTreeMap<String, usize>>,
    ) -> Result<ExitStatus> {
        let ended = pidfd_open(rustix::process::Pid::from_child(child), PidfdFlags::empty())?;
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "not done within {} s", limit.as_secs());
            let left = if reasons.is_some() { left.min(LOOK_FOR_REASONS) } else { left };
            match self.ground.stop.wait(Some(&ended), left)? {
                Woken::Stop => bail!(Stopped),
                Woken::That => return Ok(child.wait()?),
                Woken::Not => {}
            }
            if let Some(reasons) = &mut reasons {
                self.look_for_reasons(reasons)?;
            }
        }
    }

    /// Counts why connections of ours are on the kernel.
    fn look_for_reasons(&self, reasons: &mut BTreeMap<String, usize>) -> Result<()> {
        let ours: Vec<u32> =
            self.ground.family.members().iter().map(|member| member.pid.as_raw() as u32).collect();
        let processes: Vec<_> = processes::all()?.processes;
        let processes: Vec<_> =
            processes.into_iter().filter(|process| ours.contains(&process.pid)).collect();
        let is_connected =
            |socket: &KernelSocket| ![LISTENING, UNCONNECTED].contains(&socket.state);
        for each in joined::join(&processes, &mut Vec::new()) {
            if each.socket.as_ref().is_some_and(is_connected)
                // Programs wake themselves by such.
                && each.reason() != Reason::Pair as u32
                && let Some(code) = joined::reason_code(each.reason())
            {
                let sentence = joined::explanation(each.reason()).unwrap_or_default();
                let sentence = sentence.trim_end_matches('.');
                *reasons.entry(format!("{code}: {sentence}")).or_default() += 1;
            }
        }
        Ok(())
    }

    fn await_ready(&self, server: &mut Child, ready: &Ready) -> Result<()> {
        let until = Instant::now() + self.ground.ready_within;
        loop {
            // First, lest one that ended a moment ago is found ready by what it left.
            let ended = server.try_wait()?;
            if ready.holds(self) {
                return Ok(());
            }
            if let Some(status) = ended {
                // One that went into the background has ended well, and left others.
                let gone = !status.success() || self.ground.family.members().is_empty();
                ensure!(!gone, "ended with {status} before it was ready: {}", self.tail("server"));
            }
            ensure!(!self.ground.stop.is_asked(), Stopped);
            if Instant::now() > until {
                let within = self.ground.ready_within.as_secs();
                bail!("not ready within {within} s: {}; {}", ready.lack(), self.tail("server"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn log(&self, role: &str) -> PathBuf {
        self.directory.path().join(format!("{role}.log"))
    }

    fn output(&self, role: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.log(role)).unwrap_or_default()).into_owned()
    }

    /// The end of what was said.
    fn tail(&self, role: &str) -> String {
        let output = self.output(role);
        let lines = output.lines().rev().filter(|line| !line.trim().is_empty()).take(LINES_SHOWN);
        let mut said: Vec<String> = lines.map(ringlet_programs::table::printable).collect();
        said.reverse();
        if said.is_empty() { "it said nothing".into() } else { said.join(" / ") }
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        self.ground.family.end();
    }
}

/// As programs print it: 1234.5 or 1,234.5 (but 12,5 is a comma in some languages, and no 125).
fn number(text: &str) -> Option<f64> {
    let whole = text.split('.').next().unwrap_or(text);
    let mut groups = whole.split(',').skip(1);
    let grouped = groups.all(|group| group.len() == 3) && !whole.starts_with(',');
    let number = text.replace(',', "").parse::<f64>().ok()?;
    (grouped && !text[whole.len()..].contains(',') && number.is_finite()).then_some(number)
}

/// Its program, and as much as helps to know it again.
fn brief(command: &str) -> String {
    const SHOWN: usize = 60;
    let mut shown: String = command.chars().take(SHOWN).collect();
    if shown.len() < command.len() {
        shown.push_str("...");
    }
    shown
}

/// When a server is ready.
enum Ready {
    Port(u16),
    Path(PathBuf),
    Command(String),
}

impl Ready {
    fn of(words: &[String]) -> Result<Ready> {
        Ok(match words {
            [word] if word.parse::<u16>().is_ok() => Ready::Port(word.parse()?),
            [word] if word.starts_with('/') && !program::is_elf(word.as_ref()) => {
                Ready::Path(word.into())
            }
            _ => {
                let command = shlex::try_join(words.iter().map(String::as_str));
                Ready::Command(command.map_err(|error| anyhow!("{error}"))?)
            }
        })
    }

    /// Nothing is connected: many servers serve the first comer only.
    fn holds(&self, stage: &Stage) -> bool {
        match self {
            Ready::Port(port) => {
                let table = SocketTable::read(Path::new("/proc/self"));
                table.iter().any(|(_, socket)| {
                    socket.local.port() == Some(*port)
                        && (socket.state == LISTENING || socket.protocol == Protocol::Udp)
                })
            }
            Ready::Path(path) => path.exists(),
            Ready::Command(command) => {
                stage.run_within("ready", command, false, stage.ground.ready_within).is_ok()
            }
        }
    }

    /// What is to be said if it never holds.
    fn lack(&self) -> String {
        match self {
            Ready::Port(port) => format!("nobody listens on port {port}"),
            Ready::Path(path) => format!("{} is not there", path.display()),
            Ready::Command(command) => format!("{} fails", brief(command)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_programs_print_them() {
        let read = ["12", "1.5e3", "1,234.5", "12,345,678", "-3"].map(number);
        assert_eq!(read, [12.0, 1500.0, 1234.5, 12_345_678.0, -3.0].map(Some));
        for text in ["12,5", "1234,56", "1.234,5", ",123", "nan", "inf", "", "1,23,456"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
