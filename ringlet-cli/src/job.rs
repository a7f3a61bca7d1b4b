//! The processes of a parallel program: started together, heard, and ended together.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{self, SigHandler, SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use ringlet_messages::active_message::job::{END, Word, read_from_process};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::PipeFlags;

use crate::arrivals::{Arrivals, Comer, signal_children};
use crate::run::EXIT_OURS;

/// Between asking the processes to end and ending them.
pub const GRACE: Duration = Duration::from_secs(2);
const EXIT_TIMEOUT: u8 = 124;

pub const EXIT_STATUS: &str = "Exit status: the code with which a process ended them all (AMX_SPMDExit, shmem_global_exit); else 0 if every process \
     ended with 0, or that of the first one that did not (128 plus the number of the signal that ended it); 124 if the time was up; 125 if ringlet \
     itself fails.";

#[derive(clap::Args)]
pub struct JobArgs {
    /// How many processes
    #[arg(short = 'n', long = "processes", value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub processes: u32,
    /// Put each process's number before its lines (those of more than 64 KiB come as several)
    #[arg(short, long)]
    prefix: bool,
    /// End the program after so long
    #[arg(short, long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// The program, looked for in PATH, and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    #[arg(value_names = ["PROGRAM", "ARGS"], value_hint = clap::ValueHint::CommandWithArguments)]
    program: Vec<OsString>,
}

/// What a kind of parallel program has of its own.
pub trait Kind {
    /// What a process finds its place by; it reaches us by this descriptor.
    fn environment(&self, rank: usize, descriptor: RawFd) -> Vec<(&'static str, String)>;
    /// It has said something.
    fn heard(&mut self, rank: usize, said: Word, processes: &[Process]) -> Option<Over>;
    /// It has ended well, and everything that it said was heard.
    fn ended(&mut self, rank: usize, processes: &[Process]) -> Option<Over>;
}

/// The job ends with this status.
pub enum Over {
    /// By us.
    Ends(u8),
    /// All processes were told, and do it by themselves.
    Told(u8),
}

pub enum Event {
    /// A process that we have not started has come.
    Came(Comer),
    /// A process has said something.
    Said(usize, Word),
    /// It has ended, and waits to be reaped (or we hear of it no more).
    Ended(usize),
    /// What a spawn function has started here has ended, with this status; and nothing more of it is there.
    Child(u8),
    NoChild,
    /// Nobody has one of the ends of their output any more.
    Closed,
    Signal(Signal),
}

pub struct Process {
    /// None of one that we have not started.
    child: Option<Child>,
    /// Reaped: its number may then be another's.
    has_ended: bool,
    socket: UnixStream,
    /// What it is told goes by a thread, which ends with the socket, or this.
    words: Sender<Arc<[u8]>>,
}

impl Process {
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    fn pid(&self) -> Option<Pid> {
        let child = self.child.as_ref().filter(|_| !self.has_ended)?;
        Some(Pid::from_raw(child.id() as i32))
    }

    fn new(socket: UnixStream) -> std::io::Result<Process> {
        let (words, told) = channel::<Arc<[u8]>>();
        let mut to = socket.try_clone()?;
        thread(move || told.iter().try_for_each(|message| to.write_all(&message)))?;
        Ok(Process { child: None, has_ended: false, socket, words })
    }

    /// One that does not read it (it stands still, or is far) is not waited for, and has all of it once it does.
    pub fn tell(&self, message: &Arc<[u8]>) {
        let _ = self.words.send(message.clone());
    }
}

/// There may be none more (a pod's limit).
pub fn thread<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    let why = |error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("no thread can be started: {error}"))
    };
    thread::Builder::new().spawn(run).map_err(why)
}

/// The processes are started here, or come by themselves (`arrivals`).
pub fn run(
    args: &JobArgs,
    kind: &mut dyn Kind,
    arrivals: Option<&Arrivals>,
) -> anyhow::Result<ExitCode> {
    let (sender, events) = channel();
    // (Who started us may want to know of no child of his.)
    // SAFETY: no handler.
    #[allow(unsafe_code)]
    unsafe {
        signal::signal(Signal::SIGCHLD, SigHandler::SigDfl)?;
    }
    // All threads inherit the mask, one takes the signals; the children get the mask that we had. What is ignored (`nohup`) stays so.
    let signals = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    let signals: SigSet = signals.into_iter().filter(|signal| !is_ignored(*signal)).collect();
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&signals), Some(&mut before))?;
    let to = sender.clone();
    thread(move || {
        while let Ok(signal) = signals.wait() {
            if to.send(Event::Signal(signal)).is_err() {
                break;
            }
        }
    })?;
    let (mut processes, mut children) = (Vec::new(), arrivals.is_some());
    let (is_over, over) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let is_over = Arc::new(is_over);
    let limit = args.timeout.map(|timeout| Instant::now() + timeout);
    if let Some(arrivals) = arrivals {
        arrivals.begin(&sender)?;
        match await_comers(arrivals, args.processes as usize, &events, limit)? {
            Come::All(sockets, are_left) => {
                children = are_left;
                for (rank, socket) in sockets.into_iter().enumerate() {
                    hear(rank, socket.try_clone()?, &sender)?;
                    processes.push(Process::new(socket)?);
                }
            }
            Come::Over(status) => return Ok(ExitCode::from(status)),
        }
    }
    for rank in processes.len()..args.processes as usize {
        match start(args, kind, rank, before, &sender, &is_over) {
            Ok(process) => processes.push(process),
            Err(error) => {
                end_all(&processes, Signal::SIGKILL);
                for process in &mut processes {
                    let _ = process.child.as_mut().map(Child::wait);
                }
                return Err(error);
            }
        }
    }
    drop(sender);
    let mut output = if args.prefix && arrivals.is_none() { 2 * processes.len() } else { 0 };
    let ended = attend(kind, &mut processes, children, &events, limit, &mut output);
    // What they have started and left, which may hold our ends of their output, is told by this that it has no launcher any more.
    for process in processes {
        let _ = process.socket.shutdown(Shutdown::Both);
    }
    Ok(ExitCode::from(await_output(output, &events, limit, ended, over)))
}

enum Come {
    /// By rank; and whether there is anything left of what the spawn function has started here.
    All(Vec<UnixStream>, bool),
    /// It ends with this status, before it has begun.
    Over(u8),
}

/// How long nothing is said about those who have not come.
const PATIENCE: Duration = Duration::from_secs(30);

fn await_comers(
    arrivals: &Arrivals,
    count: usize,
    events: &Receiver<Event>,
    limit: Option<Instant>,
) -> anyhow::Result<Come> {
    let (mut comers, mut told, mut children) = (Vec::new(), false, true);
    // (Before those that have come see the end of their sockets, and say that: what has happened is said by us.)
    let over = |status| {
        signal_children(Signal::SIGTERM);
        Ok(Come::Over(status))
    };
    let patience = Instant::now() + PATIENCE;
    while comers.len() < count {
        let next = [limit, Some(patience).filter(|_| !told)].into_iter().flatten().min();
        match events.recv_timeout(until(next)) {
            Ok(Event::Came(comer)) => comers.push(comer),
            Ok(Event::Signal(signal)) => return over(status_of(signal)),
            // (What the spawn function has started may have started others, and ended well.)
            Ok(Event::Child(status @ 1..)) => {
                eprintln!(
                    "ringlet: a process of the spawn function has ended with {status} before the job began"
                );
                return over(status);
            }
            Ok(Event::NoChild) => children = false,
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => return over(EXIT_OURS),
            Err(RecvTimeoutError::Timeout) if limit.is_some_and(|at| at <= Instant::now()) => {
                return over(EXIT_TIMEOUT);
            }
            Err(RecvTimeoutError::Timeout) if !told && patience <= Instant::now() => {
                told = true;
                eprintln!(
                    "ringlet: {} of {count} processes have come; the others are waited for",
                    comers.len()
                );
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    arrivals.seat(comers).map(|sockets| Come::All(sockets, children))
}

/// Until nobody has one of so many ends of their output any more. Longer than the program may take, or than who was told to end has, no more is waited for
/// (`over`).
fn await_output(
    mut output: usize,
    events: &Receiver<Event>,
    limit: Option<Instant>,
    Ended { mut code, is_forced }: Ended,
    over: OwnedFd,
) -> u8 {
    let mut limit = if is_forced { Some(Instant::now() + GRACE) } else { limit };
    let mut over = Some(over);
    while output > 0 {
        let status = match events.recv_timeout(until(limit)) {
            Ok(Event::Signal(signal)) => status_of(signal),
            Err(RecvTimeoutError::Timeout) if limit.is_some_and(|at| at <= Instant::now()) => {
                limit = None;
                EXIT_TIMEOUT
            }
            Err(RecvTimeoutError::Disconnected) => break,
            event => {
                output -= usize::from(matches!(event, Ok(Event::Closed)));
                continue;
            }
        };
        // (The second time our own output is not waited for either.)
        if over.take().is_none() {
            break;
        }
        code = if code == 0 && !is_forced { status } else { code };
    }
    code
}

/// An end of their output. Once no more is waited for (`over` is hung up) it has what is there, which is no more than so much.
struct Output {
    stream: File,
    over: Arc<OwnedFd>,
    left: usize,
}

/// Of a pipe.
const OUTPUT_BYTES: usize = 64 << 10;

impl Read for Output {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let mut fds = [
            PollFd::new(&self.stream, PollFlags::IN),
            PollFd::new(&*self.over, PollFlags::empty()),
        ];
        poll(&mut fds, None)?;
        let [is_there, is_over] = fds.map(|fd| !fd.revents().is_empty());
        let most = if is_over { self.left.min(to.len()) } else { to.len() };
        let count = if is_there { self.stream.read(&mut to[..most])? } else { 0 };
        self.left -= if is_over { count } else { 0 };
        Ok(count)
    }
}

fn is_ignored(signal: Signal) -> bool {
    // SAFETY: plain data, which the call fills; it changes nothing.
    #[allow(unsafe_code)]
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal as i32, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

fn until(limit: Option<Instant>) -> Duration {
    limit.map_or(Duration::from_secs(3600), |at| at - Instant::now().min(at))
}

fn status_of(signal: Signal) -> u8 {
    128 + signal as i32 as u8
}

/// How the processes have.
struct Ended {
    code: u8,
    /// By us.
    is_forced: bool,
}

#[allow(unsafe_code)]
fn start(
    args: &JobArgs,
    kind: &dyn Kind,
    rank: usize,
    mask: SigSet,
    events: &Sender<Event>,
    is_over: &Arc<OwnedFd>,
) -> anyhow::Result<Process> {
    let (socket, theirs) = UnixStream::pair()?;
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
    let mut command = Command::new(&args.program[0]);
    command.args(&args.program[1..]);
    command.envs(kind.environment(rank, theirs.as_raw_fd()));
    if args.prefix {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    if rank > 0 {
        command.stdin(Stdio::null());
    }
    let us = nix::unistd::getpid();
    // SAFETY: system calls only, in the child before it becomes the program.
    unsafe {
        command.pre_exec(move || {
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)?;
            // Without its launcher a process would wait for ever.
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
            if nix::unistd::getppid() != us {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            Ok(())
        });
    }
    let name = args.program[0].display();
    let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let tended = tend(&mut child, rank, socket, events, is_over);
    if tended.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let process = tended.with_context(|| format!("cannot start {name}"))?;
    Ok(Process { child: Some(child), ..process })
}

/// Hears what it says, and of its end, and forwards its output if it has come here.
fn tend(
    child: &mut Child,
    rank: usize,
    socket: UnixStream,
    events: &Sender<Event>,
    is_over: &Arc<OwnedFd>,
) -> std::io::Result<Process> {
    let forward = |stream: Option<OwnedFd>, to: fn(&[u8])| {
        let Some(stream) = stream else { return Ok(()) };
        let (events, over) = (events.clone(), is_over.clone());
        let output = Output { stream: stream.into(), over, left: OUTPUT_BYTES };
        let forwards = move || {
            forward(output, rank, to);
            let _ = events.send(Event::Closed);
        };
        thread(forwards).map(drop)
    };
    forward(child.stdout.take().map(Into::into), |line| {
        let _ = std::io::stdout().write_all(line);
    })?;
    forward(child.stderr.take().map(Into::into), |line| {
        let _ = std::io::stderr().write_all(line);
    })?;
    let pid = Pid::from_raw(child.id() as i32);
    let (ears, to) = (socket.try_clone()?, events.clone());
    let listener = listen(rank, socket.try_clone()?, events)?;
    thread(move || {
        // Not reaped: as long as we may signal it, its number is its own.
        let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        // KERNEL: what it has said before is still read, and then its end, though a child of it may have the other end of the socket.
        let _ = ears.shutdown(Shutdown::Read);
        let _ = listener.join();
        let _ = to.send(Event::Ended(rank));
    })?;
    Process::new(socket)
}

/// What a process says, until the end.
fn listen(
    rank: usize,
    mut from: UnixStream,
    events: &Sender<Event>,
) -> std::io::Result<JoinHandle<()>> {
    let to = events.clone();
    thread(move || {
        while let Ok(said) = read_from_process(&mut from) {
            if to.send(Event::Said(rank, said)).is_err() {
                break;
            }
        }
    })
}

/// One that we have not started: it has ended when it says nothing any more.
fn hear(rank: usize, from: UnixStream, events: &Sender<Event>) -> std::io::Result<()> {
    let (listener, to) = (listen(rank, from, events)?, events.clone());
    let hears = move || {
        let _ = listener.join();
        let _ = to.send(Event::Ended(rank));
    };
    thread(hears).map(drop)
}

/// Of a line: what is longer comes as several.
const LINE_BYTES: usize = 64 << 10;

/// Whole lines, so that those of several processes do not mix.
fn forward(stream: impl Read, rank: usize, to: fn(&[u8])) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend(format!("[{rank}] ").bytes());
        let start = line.len();
        match (&mut stream).take(LINE_BYTES as u64).read_until(b'\n', &mut line) {
            Ok(n) if n > 0 => {}
            _ => break,
        }
        if line.len() > start && line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        to(&line);
    }
}

/// What we can't signal is told that the job ends, and sees to it by itself; at last we hear of it no more.
fn end_all(processes: &[Process], signal: Signal) {
    for process in processes.iter().filter(|process| !process.has_ended) {
        match (process.pid(), signal) {
            (Some(pid), _) => {
                let _ = kill(pid, signal);
            }
            (None, Signal::SIGKILL) => {
                let _ = process.socket.shutdown(Shutdown::Both);
            }
            (None, _) => process.tell(&end_word(status_of(signal).into())),
        }
    }
}

pub fn end_word(code: i32) -> Arc<[u8]> {
    [END.to_le_bytes(), code.to_le_bytes()].concat().into()
}

/// Until all have ended; how.
fn attend(
    kind: &mut dyn Kind,
    processes: &mut [Process],
    mut children: bool,
    events: &Receiver<Event>,
    limit: Option<Instant>,
    output: &mut usize,
) -> Ended {
    let mut code = 0;
    // When those that are left get which signal: the job is ending.
    let mut end: Option<(Instant, Signal)> = None;
    let mut limit = limit;
    while children || processes.iter().any(|process| !process.has_ended) {
        let next = [end.map(|(at, _)| at), limit].into_iter().flatten().min();
        let event = match events.recv_timeout(until(next)) {
            Ok(event) => event,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                if let Some((at, signal)) = end
                    && at <= now
                {
                    end_all(processes, signal);
                    if children && signal == Signal::SIGKILL {
                        signal_children(Signal::SIGTERM);
                        // (Not waited for any longer.)
                        children = false;
                    }
                    end = Some((now + GRACE, Signal::SIGKILL));
                } else if limit.is_some_and(|at| at <= now) {
                    limit = None;
                    code = EXIT_TIMEOUT;
                    end_all(processes, Signal::SIGTERM);
                    end = Some((now + GRACE, Signal::SIGKILL));
                }
                continue;
            }
        };
        let over = match event {
            Event::Said(_, _) if end.is_some() => None,
            Event::Said(rank, said) => kind.heard(rank, said, processes),
            Event::Signal(signal) => {
                end_all(processes, signal);
                code = if code == 0 { status_of(signal) } else { code };
                end.get_or_insert((Instant::now() + GRACE, Signal::SIGKILL));
                None
            }
            Event::Closed => {
                *output -= 1;
                None
            }
            Event::Ended(rank) => {
                processes[rank].has_ended = true;
                let status = processes[rank].child.as_mut().map(Child::wait).transpose();
                let ended = status.map_or(EXIT_OURS, |status| status.map_or(0, status_code));
                match ended {
                    _ if end.is_some() => None,
                    0 => kind.ended(rank, processes),
                    ended => Some(Over::Ends(ended)),
                }
            }
            Event::Child(status @ 1..) if end.is_none() => Some(Over::Ends(status)),
            Event::NoChild => {
                children = false;
                None
            }
            Event::Child(_) | Event::Came(_) => None,
        };
        let Some(over) = over else { continue };
        let (status, next) = match over {
            Over::Ends(status) => {
                end_all(processes, Signal::SIGTERM);
                (status, Signal::SIGKILL)
            }
            Over::Told(status) => (status, Signal::SIGTERM),
        };
        (code, end) = (status, Some((Instant::now() + GRACE, next)));
    }
    Ended { code, is_forced: end.is_some() }
}

fn status_code(status: ExitStatus) -> u8 {
    let signalled = status.signal().map(|signal| 128 + signal);
    status.code().or(signalled).unwrap_or(i32::from(EXIT_OURS)) as u8
}
