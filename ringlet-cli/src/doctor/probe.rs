//! The proof: two programs under the library exchange messages over loopback TCP, until their connection has moved.
//!
//! The two are this command again. Each writes lines to its standard output that the parent reads; whoever takes too long
//! is killed, and both die with the parent.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fmt::{self, Display};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, ChildStderr, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringlet::reasons::Reason;
use ringlet_core::view::PATH_RING;

use super::Check;
use ringlet_bench::bench::symbol;
use ringlet_programs::preload;
use ringlet_programs::processes;

/// Messages exchanged at least, and once more when the connection has moved.
const MESSAGE_COUNT: u64 = 200;
const MESSAGE_BYTES: usize = 64;
/// How long a connection may take to move: a thousand times what it takes.
const MOVE_PATIENCE: Duration = Duration::from_secs(5);
/// Where an exchange of messages takes longer, the machine has too much else to do, and nothing can be said of what has not happened.
const SLOW: Duration = Duration::from_millis(5);
/// Between messages, once there have been enough of them.
const PAUSE: Duration = Duration::from_millis(1);

/// What a client says when it's done.
const MOVED: &str = "moved";
const NOT_MOVED: &str = "not moved";
const NOT_TOLD: &str = "not told";
const NOT_LOADED: &str = "not loaded";

pub fn checks(patience: Duration) -> Vec<Check> {
    let name = "connection";
    let Ok(preload) = preload::library().and_then(|library| preload::preload_list(&library, None))
    else {
        return vec![Check::fail(name, "cannot be tried without the library", "See above.")];
    };
    match try_connection(&preload, patience) {
        Ok(checks) => checks,
        Err(error) if error.is::<Silent>() => vec![Check::unknown(name, error.to_string())],
        Err(error) => vec![Check::fail(
            name,
            format!("two programs could not be made to talk: {error:#}"),
            "Fix what fails above first; then run `ringlet doctor` again.",
        )],
    }
}

fn try_connection(preload: &OsStr, patience: Duration) -> anyhow::Result<Vec<Check>> {
    let mut server = Probe::start("server", &["--probe-server".into()], preload)?;
    let address = server.line(patience)?;
    let arguments = ["--probe-client".into(), address.into()];
    let mut client = Probe::start("client", &arguments, preload)?;
    let line = client.line(patience)?;
    let (outcome, count) = line.split_once(": ").unwrap_or((&line, "0"));
    Ok(match outcome {
        NOT_LOADED => vec![Check::fail(
            "connection",
            format!("the library was not loaded{}", client.complaint()),
            "Rebuild the library on this machine (`make build`); it may need a newer C library than there is.",
        )],
        NOT_MOVED => vec![Check::fail(
            "connection",
            format!("not moved after {count} messages: {}", reason(client.child.id())),
            "If nothing fails above, try `ringlet run --log stderr -- PROGRAM`.",
        )],
        NOT_TOLD => vec![Check::unknown(
            "connection",
            format!(
                "it has not moved after {count} messages, each of which took long: {}",
                reason(client.child.id())
            ),
        )],
        _ => vec![
            Check::ok(
                "connection",
                format!("moved into shared memory; {count} messages came back unchanged"),
            ),
            visible(&client, &server),
        ],
    })
}

/// Both ends are alive and wait, so `ringlet ss` must see them.
fn visible(client: &Probe, server: &Probe) -> Check {
    let shows = |probe: &Probe| -> anyhow::Result<bool> {
        let process = processes::one(probe.child.id())?;
        let mut slots = process.iter().flat_map(|process| &process.slots);
        Ok(slots.any(|slot| slot.path == PATH_RING))
    };
    let shown = shows(client).and_then(|near| Ok(near && shows(server)?));
    if let Err(error) = shown {
        Check::unknown("ss", format!("{error:#}"))
    } else if shown.is_ok_and(|both| both) {
        Check::ok("ss", "sees both ends")
    } else {
        Check::fail(
            "ss",
            "does not see both ends of a moved connection",
            "Make sure that /proc/PID/fd of your own processes can be read (hidepid, security modules).",
        )
    }
}

/// What the process itself gives as the reason.
fn reason(pid: u32) -> String {
    let Ok(Some(process)) = processes::one(pid) else {
        return "its library shows nothing".into();
    };
    let mut reasons = process.slots.iter().filter_map(|slot| Reason::from_u32(slot.reason));
    match reasons.next_back() {
        Some(reason) => reason.sentence().into(),
        None => "its library does not follow the connection".into(),
    }
}

/// A program did not say in time what it is to say.
#[derive(Debug)]
struct Silent(&'static str, Duration);

impl Display for Silent {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "the {} says nothing for {:?}", self.0, self.1)
    }
}

impl Error for Silent {}

/// One of the two programs; killed when dropped.
struct Probe {
    role: &'static str,
    child: Child,
    /// Closed to let it go.
    _input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Option<ChildStderr>,
}

impl Probe {
    fn start(role: &'static str, arguments: &[OsString], preload: &OsStr) -> anyhow::Result<Probe> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("doctor").args(arguments).env("LD_PRELOAD", preload);
        // What is proven is the machine; the user's configuration may well exclude this connection.
        for key in &ringlet::config::KEYS {
            command.env_remove(key.environment);
        }
        command.env(ringlet::config::FILE_ENVIRONMENT, "/dev/null");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start another process")?;
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().context("no pipe")?);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Ok(Probe { role, _input: child.stdin.take(), errors: child.stderr.take(), child, lines })
    }

    fn line(&mut self, patience: Duration) -> anyhow::Result<String> {
        match self.lines.recv_timeout(patience) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => bail!(Silent(self.role, patience)),
            Err(RecvTimeoutError::Disconnected) => {
                let complaint = self.complaint();
                bail!("the {} has ended{complaint}", self.role)
            }
        }
    }

    /// Ends it, and quotes the first line of its standard error.
    fn complaint(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut text = String::new();
        let errors = self.errors.take().map(|errors| errors.take(4096).read_to_string(&mut text));
        match (errors, text.lines().next()) {
            (Some(Ok(_)), Some(line)) => format!(": {line}"),
            _ => String::new(),
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn die_with_parent() -> anyhow::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    Ok(())
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Sends back whatever comes.
pub fn serve() -> anyhow::Result<ExitCode> {
    die_with_parent()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    say(&listener.local_addr()?.to_string())?;
    let (mut stream, _) = listener.accept()?;
    let mut message = [0; MESSAGE_BYTES];
    while stream.read_exact(&mut message).is_ok() {
        stream.write_all(&message)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Calls until the connection has moved, and for as long again; then waits, for the parent to look at it.
pub fn call(address: SocketAddr) -> anyhow::Result<ExitCode> {
    die_with_parent()?;
    if !symbol::is_loaded() {
        say(NOT_LOADED)?;
        return Ok(ExitCode::FAILURE);
    }
    let mut stream = TcpStream::connect(address)?;
    let start = Instant::now();
    let mut count = 0;
    let mut last = MESSAGE_COUNT;
    let mut moved = false;
    while count < last {
        exchange(&mut stream, count)?;
        count += 1;
        if count == last && !moved && start.elapsed() < MOVE_PATIENCE {
            moved = symbol::path(stream.as_fd()) == Some(PATH_RING);
            // The move goes on beside the messages, at its own pace.
            std::thread::sleep(PAUSE);
            last += if moved { MESSAGE_COUNT } else { 1 };
        }
    }
    let told = start.elapsed() < SLOW * count as u32;
    let outcome = if moved { MOVED } else { [NOT_TOLD, NOT_MOVED][usize::from(told)] };
    say(&format!("{outcome}: {count}"))?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(ExitCode::SUCCESS)
}

fn exchange(stream: &mut TcpStream, number: u64) -> anyhow::Result<()> {
    let mut message = [number as u8; MESSAGE_BYTES];
    message[..8].copy_from_slice(&number.to_ne_bytes());
    stream.write_all(&message)?;
    let mut answer = [0; MESSAGE_BYTES];
    stream.read_exact(&mut answer)?;
    ensure!(answer == message, "message {number} came back changed");
    Ok(())
}
