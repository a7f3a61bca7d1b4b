//! A parallel program: the processes that `ringlet am-run` has started together, or which a spawn function has started and
//! that come to it by themselves (`invitation`).
//!
//! Each has a socket to the launcher. A process sends its part of a gather, a length and as many bytes, and gets all parts once all have sent theirs;
//! or it says `END` and a code, which the launcher tells all. A thread waits for what the launcher says.

use super::invitation::{self, Invitation};
use ringlet_linux::fd;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What the launcher tells each process: its number, how many there are, and the descriptor by which it is reached.
pub const RANK_ENVIRONMENT: &str = "RINGLET_AM_RANK";
pub const SIZE_ENVIRONMENT: &str = "RINGLET_AM_SIZE";
pub const DESCRIPTOR_ENVIRONMENT: &str = "RINGLET_AM_FD";

/// Bytes of one process in a `gather`, at most.
pub const GATHER_MAX_BYTES: usize = 1 << 20;
/// In the place of a length: the job ends, with the code that follows.
pub const END: u32 = u32::MAX;
/// In the place of a length: nobody's parts come any more, since a process has ended without its own.
pub const NO_PARTS: u32 = u32::MAX - 1;
/// How long a process polls its own bundle only, and then between two looks.
const BUSY: Duration = Duration::from_micros(200);
const LOOK: Duration = Duration::from_millis(1);
/// How long the launcher may take to say that the job ends, when it was told.
const END_LIMIT: Duration = Duration::from_secs(5);
/// The code of a job that nobody ends.
const LAUNCHER_HAS_ENDED: i32 = 1;

/// This process's place among them.
pub struct Job {
    rank: usize,
    size: usize,
    /// `None` in a job of one, which nobody has launched.
    launcher: Option<Launcher>,
}

struct Launcher {
    socket: Arc<UnixStream>,
    said: Arc<Said>,
    /// Of a launcher to which this process has come.
    environment: Option<Vec<u8>>,
    /// This process is a child by fork.
    is_left: AtomicBool,
    /// The thread that writes to the socket, or 0.
    writer: AtomicI32,
}

impl Launcher {
    fn new(socket: Arc<UnixStream>, said: Arc<Said>, environment: Option<Vec<u8>>) -> Launcher {
        let (is_left, writer) = (AtomicBool::new(false), AtomicI32::new(0));
        Launcher { socket, said, environment, is_left, writer }
    }

    /// Writes a message, which nothing falls into that another thread says. An error: it was not written, or none of the job is here. System calls only.
    fn write(&self, message: &[u8]) -> io::Result<()> {
        let us = ringlet_linux::sys::gettid();
        let start = Instant::now();
        // ORDER: Acquire; pairs with the Release of `writer` below.
        while let Err(writer) =
            self.writer.compare_exchange(0, us, Ordering::Acquire, Ordering::Relaxed)
        {
            if self.is_left.load(Ordering::Relaxed) {
                break;
            }
            // (By a handler of a signal, in the middle of what this thread writes; or the launcher does not read.)
            if writer == us || start.elapsed() > END_LIMIT {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        if self.is_left.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let written = (&mut &*self.socket).write_all(message);
        // ORDER: Release; pairs with the Acquire of `writer` above.
        self.writer.store(0, Ordering::Release);
        written
    }
}

/// What the launcher has said, as the thread leaves it for the others.
#[derive(Default)]
struct Said {
    /// The parts of a gather.
    parts: Mutex<Option<Vec<Vec<u8>>>>,
    changed: Condvar,
    /// `parts` has something, or will have nothing any more.
    news: AtomicBool,
    ended: AtomicBool,
    code: AtomicI32,
    gone: AtomicBool,
}

impl Said {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<Vec<u8>>>> {
        self.parts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tell(&self) {
        let guard = self.lock();
        // ORDER: Release; pairs with the load in `Job::gather`.
        self.news.store(true, Ordering::Release);
        drop(guard);
        self.changed.notify_all();
    }

    fn listen(&self, mut from: &UnixStream, size: usize, on_end: impl Fn()) {
        while let Ok(first) = read_word(&mut from) {
            match first {
                END => {
                    let Ok(code) = read_word(&mut from) else { break };
                    self.end(code as i32, &on_end);
                    continue;
                }
                NO_PARTS => {
                    self.part();
                    continue;
                }
                _ => {}
            }
            let read =
                |rank| if rank == 0 { read_bytes(&mut from, first) } else { read_part(&mut from) };
            let Ok(parts) = (0..size).map(read).collect() else { break };
            *self.lock() = Some(parts);
            self.tell();
        }
        self.part();
        // A process that a script has started, or that runs elsewhere, is not ended with its launcher.
        if !self.ended.load(Ordering::Relaxed) {
            let _ = writeln!(io::stderr(), "ringlet: the launcher has ended");
            self.end(LAUNCHER_HAS_ENDED, on_end);
        }
    }

    /// No parts come any more.
    fn part(&self) {
        // ORDER: Release; pairs with the load in `Job::gather`.
        self.gone.store(true, Ordering::Release);
        self.tell();
    }

    fn end(&self, code: i32, on_end: impl FnOnce()) {
        self.code.store(code, Ordering::Relaxed);
        // ORDER: Release; pairs with `Job::ended`.
        self.ended.store(true, Ordering::Release);
        self.tell();
        on_end();
    }
}

impl Job {
    /// A process that was not launched is a job of one; one that was finds it once, since its environment says so no longer. One that comes to its
    /// launcher by itself may say which rank it wants, if all do. `on_end` is called, by another thread, when the job ends (`ended`); with whether
    /// the launcher can also signal this process.
    #[allow(unsafe_code)]
    pub fn from_environment(
        wanted: Option<usize>,
        on_end: impl Fn(bool) + Send + 'static,
    ) -> io::Result<Job> {
        let variable = |name| std::env::var(name).ok();
        let found = match (variable(DESCRIPTOR_ENVIRONMENT), variable(invitation::ENVIRONMENT)) {
            (Some(descriptor), _) => {
                let (socket, rank, size) = inherited(&descriptor, variable)?;
                (socket, rank, size, None)
            }
            (None, Some(text)) => {
                let (socket, place) = Invitation::parse(&text)?.accept(wanted)?;
                (socket, place.rank, place.size, Some(place.environment))
            }
            (None, None) => return Ok(Job { rank: 0, size: 1, launcher: None }),
        };
        let (socket, rank, size, environment) = found;
        let is_its_own = environment.is_none();
        let (socket, said) = (Arc::new(socket), Arc::new(Said::default()));
        let (from, saying) = (socket.clone(), said.clone());
        super::process::thread("ringlet-am-job", move || {
            saying.listen(&from, size, || on_end(is_its_own))
        })?;
        // (Programs that this one starts are none of the job's.)
        for name in
            [RANK_ENVIRONMENT, SIZE_ENVIRONMENT, DESCRIPTOR_ENVIRONMENT, invitation::ENVIRONMENT]
        {
            // SAFETY: what else the program does with its environment it does before or behind this.
            unsafe { std::env::remove_var(name) };
        }
        Ok(Job { rank, size, launcher: Some(Launcher::new(socket, said, environment)) })
    }

    /// Was a process with this environment started for a job?
    pub fn is_expected() -> bool {
        [DESCRIPTOR_ENVIRONMENT, invitation::ENVIRONMENT]
            .iter()
            .any(|name| std::env::var_os(name).is_some())
    }

    /// For a child by fork, which is none of the job's: what it says is not heard, and the launcher hears of its parent's end, which may come
    /// first. System calls only.
    #[allow(unsafe_code)]
    pub fn leave_to_parent(&self) {
        let Some(launcher) = &self.launcher else { return };
        // (Once: the child may have closed all numbers that it does not know, and its own children find a file of its there.)
        if launcher.is_left.swap(true, Ordering::Relaxed) {
            return;
        }
        let socket = launcher.socket.as_raw_fd();
        // SAFETY: the number stays ours, of a descriptor that is no socket: who writes there fails, and nobody reads.
        unsafe {
            libc::close(socket);
            if let Ok(nothing) = fd::eventfd()
                && nothing != socket
            {
                libc::dup3(nothing, socket, libc::O_CLOEXEC);
                libc::close(nothing);
            }
        }
    }

    /// By `ringlet am-run`.
    pub fn is_launched(&self) -> bool {
        self.launcher.is_some()
    }

    /// The launcher's environment ("NAME=VALUE", each ended by a zero), if this process was not started with it.
    pub fn environment(&self) -> Option<&[u8]> {
        self.launcher.as_ref()?.environment.as_deref()
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Everybody's bytes, by rank, once everybody has called this. `meanwhile` polls. An error once the job ends.
    pub fn gather(&self, bytes: &[u8], mut meanwhile: impl FnMut()) -> io::Result<Vec<Vec<u8>>> {
        let Some(launcher) = &self.launcher else {
            return Ok(vec![bytes.to_vec()]);
        };
        let said = &launcher.said;
        if bytes.len() > GATHER_MAX_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut message = (bytes.len() as u32).to_le_bytes().to_vec();
        message.extend(bytes);
        launcher.write(&message)?;
        let start = Instant::now();
        loop {
            meanwhile();
            // ORDER: Acquire; pairs with `Said::tell` and `Said::listen`.
            if said.news.swap(false, Ordering::Acquire) {
                if let Some(parts) = said.lock().take() {
                    return Ok(parts);
                }
                let why = match self.ended() {
                    Some(_) => io::ErrorKind::Interrupted,
                    None => io::ErrorKind::UnexpectedEof,
                };
                if why == io::ErrorKind::Interrupted || said.gone.load(Ordering::Acquire) {
                    said.tell(); // the next one finds it too
                    return Err(why.into());
                }
            }
            if start.elapsed() > BUSY {
                let guard = said.lock();
                if !said.news.load(Ordering::Relaxed) {
                    drop(said.changed.wait_timeout(guard, LOOK));
                }
            }
        }
    }

    /// The job's code, once one of its processes has ended it.
    #[inline]
    pub fn ended(&self) -> Option<i32> {
        let said = &self.launcher.as_ref()?.said;
        // ORDER: Acquire; pairs with `Said::listen`.
        said.ended.load(Ordering::Acquire).then(|| said.code.load(Ordering::Relaxed))
    }

    /// Ends the job: the launcher tells the others, and has heard of it when this returns (or is gone). Writes and sleeps only.
    pub fn end(&self, code: i32) {
        let Some(launcher) = &self.launcher else { return };
        let said = &launcher.said;
        let [first, second] = [END.to_le_bytes(), code.to_le_bytes()];
        let mut message = [0; 8];
        message[..4].copy_from_slice(&first);
        message[4..].copy_from_slice(&second);
        if launcher.write(&message).is_err() {
            return;
        }
        let start = Instant::now();
        while self.ended().is_none()
            && !said.gone.load(Ordering::Acquire)
            && start.elapsed() < END_LIMIT
        {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The socket, rank and size that the launcher has given to a process that it has started.
fn inherited(
    descriptor: &str,
    variable: impl Fn(&'static str) -> Option<String>,
) -> io::Result<(UnixStream, usize, usize)> {
    let bad = || io::Error::new(io::ErrorKind::InvalidInput, "not what ringlet am-run sets");
    let number = |text: &str| text.parse::<usize>().ok();
    let of = |name| variable(name).as_deref().and_then(number).ok_or_else(bad);
    let (rank, size) = (of(RANK_ENVIRONMENT)?, of(SIZE_ENVIRONMENT)?);
    let descriptor = number(descriptor).ok_or_else(bad)? as i32;
    if rank >= size || !fd::is_open(descriptor) {
        return Err(bad());
    }
    let copy = fd::duplicate_high(descriptor, fd::HIDDEN_FROM).map_err(|_| bad())?;
    drop(super::state::own(descriptor));
    Ok((UnixStream::from(super::state::own(copy)), rank, size))
}

fn read_word(from: &mut impl Read) -> io::Result<u32> {
    let mut word = [0; 4];
    from.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

fn read_bytes(from: &mut impl Read, len: u32) -> io::Result<Vec<u8>> {
    if len as usize > GATHER_MAX_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_part(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let len = read_word(from)?;
    read_bytes(from, len)
}

/// What a process says to its launcher.
pub enum Word {
    Part(Vec<u8>),
    End(i32),
}

/// For the launcher.
pub fn read_from_process(from: &mut impl Read) -> io::Result<Word> {
    match read_word(from)? {
        END => Ok(Word::End(read_word(from)? as i32)),
        len => read_bytes(from, len).map(Word::Part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process of a job of two, and the launcher's end.
    fn job() -> (Arc<Job>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let launcher = Launcher::new(Arc::new(ours), Arc::default(), None);
        (Arc::new(Job { rank: 0, size: 2, launcher: Some(launcher) }), theirs)
    }

    /// It was forked while another thread of its parent's was sending, which goes on there alone.
    #[test]
    fn a_child_by_fork_waits_for_no_thread_of_its_parent_s() {
        let (job, mut launcher) = job();
        job.launcher.as_ref().unwrap().writer.store(1, Ordering::Relaxed);
        job.leave_to_parent();
        let gathered = job.gather(&[0; 4], || panic!("it waits for parts"));
        assert_eq!(gathered.unwrap_err().kind(), io::ErrorKind::NotConnected);
        job.end(3);
        assert_eq!(launcher.read(&mut [0; 8]).unwrap(), 0, "it has said something");
    }

    /// What a thread sends is longer than the socket takes: an end that another thread says comes before it or behind it.
    #[test]
    fn an_end_falls_into_no_part() {
        for _ in 0..20 {
            let (job, mut launcher) = job();
            let said = job.launcher.as_ref().unwrap().said.clone();
            let gathers = job.clone();
            let gathers = std::thread::spawn(move || {
                gathers.gather(&vec![7; GATHER_MAX_BYTES], || {}).map(drop)
            });
            let until_blocked = || {
                let mut before = 0;
                loop {
                    std::thread::sleep(Duration::from_millis(5));
                    let mut waits = 0;
                    // SAFETY: an int.
                    #[allow(unsafe_code)]
                    unsafe {
                        libc::ioctl(launcher.as_raw_fd(), libc::FIONREAD, &raw mut waits);
                    }
                    if waits > 0 && std::mem::replace(&mut before, waits) == waits {
                        return;
                    }
                }
            };
            until_blocked();
            let ends = std::thread::spawn(move || job.end(3));
            std::thread::sleep(Duration::from_millis(5));
            let mut words = Vec::new();
            for _ in 0..2 {
                match read_from_process(&mut launcher).unwrap() {
                    Word::Part(part) => {
                        assert!(part.len() == GATHER_MAX_BYTES && part.iter().all(|it| *it == 7));
                        words.push("part");
                    }
                    Word::End(code) => {
                        assert_eq!(code, 3);
                        words.push("end");
                    }
                }
            }
            words.sort_unstable();
            assert_eq!(words, ["end", "part"]);
            said.end(3, || {});
            ends.join().unwrap();
            assert!(gathers.join().unwrap().is_err());
        }
    }
}
